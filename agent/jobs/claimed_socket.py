"""The control socket of a supervisor: the process that listens there is the one supervisor of its epoch."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from covey.ports.addresses import Address
from covey.ports.env import Env
from covey.ports.streams import Accept


@asynccontextmanager
async def claimed_socket(env: Env, address: Address, accept: Accept) -> AsyncIterator[bool]:
    """Claim the socket: yields whether no other process had it before; it is held until the context ends."""
    try:
        listener = await env.bytes.listen(address, accept)
    except OSError as error:
        env.log.info("another supervisor is running", why=str(error))
        yield False
        return
    try:
        yield True
    finally:
        await listener.close()
