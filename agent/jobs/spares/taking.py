"""The supervisor's side of spares: a rank that is to start begins in a waiting process, where there is one."""

import asyncio

from agent.jobs.spares.frames import NoSpare, SpareTaken, TakeSpare, decoder
from covey.ports.addresses import Address
from covey.ports.env import Env
from covey.ports.processes import Command, Process
from covey.wire.frames import pack, read_frame

TAKE_S = 5.0
"""Seconds to wait for the answer: a spare's record is on the disk by then."""


class AnswerLost(Exception):
    """The answer of a spare's keeper was lost: a spare may have become the rank, or may yet, so whatever waits must be
    ended before anything else is started."""


async def take(env: Env, socket: Address, command: Command) -> Process | None:
    """Take a spare for the rank. None: there is none that can be it. AnswerLost when that is not known."""
    try:
        stream = await env.bytes.connect(socket)
    except ConnectionError:
        return None
    try:
        async with asyncio.timeout(TAKE_S):
            await stream.write(pack(TakeSpare(command)))
            while not isinstance(answer := await read_frame(stream, decoder), SpareTaken | NoSpare):
                continue
        if isinstance(answer, NoSpare):
            env.log.info("no spare", why=answer.why)
            return None
        found = env.processes.resume(command)
    except (ConnectionError, TimeoutError, OSError) as error:
        raise AnswerLost(str(error) or "the parent process of spares does not answer") from error
    finally:
        stream.close()
    if found is None:
        raise AnswerLost("a spare was taken, and has no record")
    return found
