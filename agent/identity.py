"""What identifies this host across restarts of its agent: the file `identity`, written before any other host is
told."""

import msgspec

from agent.raft.disk import NO_ROOM
from covey.ports.disk import Disk
from covey.wire import checked

FILE = "identity"


class Identity(msgspec.Struct, frozen=True):
    """The identity of this installation, and of this life of its agent."""

    uuid: bytes
    boot: int
    name: str = ""
    """The host's name: what is in the state directory was done, and promised, under it. Empty: an older version did not
    write it."""


_decoder = msgspec.msgpack.Decoder(Identity)


async def load(disk: Disk) -> Identity | None:
    """Read the identity; None: there is no file. StateRefused for a damaged one: under a boot number that was used
    before, other hosts would take new messages of this host for repeats."""
    try:
        return await checked.load(disk, FILE, _decoder)
    except checked.Damaged as error:
        raise checked.StateRefused(
            "the identity of this host cannot be read",
            str(error),
            f"restore {disk.path(FILE)} from a copy; or delete it and start again, as a new host under the old name",
        ) from error


def of_another_name(known: Identity, name: str, folder: str) -> checked.StateRefused | None:
    """Why an agent of this name cannot go on with this identity; None: it can. Ranks, slabs and votes are its former
    name's, and other hosts would give them to others while they are still here."""
    if known.name in ("", name):
        return None
    return checked.StateRefused(
        f"this host is named {name}, and was {known.name} before",
        f"what is in {folder}, and what runs here, is {known.name}'s: jobs, slabs and a vote would be there twice",
        f'name = "{known.name}" in agent.toml; or, to have it as another host, drained and without a vote: mv {folder} '
        f"{folder}.old, then agentctl rack join --leave-own, then elsewhere agentctl hosts forget {known.name}",
    )


async def save(disk: Disk, identity: Identity) -> None:
    """Write the identity, durable on return. On a disk without room it is written over the earlier one where that has
    the same length, as one of this name and version has: an agent starts all the same. OSError."""
    data = checked.seal(identity)
    try:
        await disk.replace(FILE, data)
    except OSError as error:
        if error.errno not in NO_ROOM or len(await disk.read(FILE) or b"") != len(data):
            raise
        await disk.write_at(FILE, 0, data)
        await disk.sync(FILE)
