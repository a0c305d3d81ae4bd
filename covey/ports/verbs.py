"""Port: reading and writing another machine's memory without its processor (RDMA), as the byte path needs it.

    device.register(memory, remote=True) -> Region: its key and address are told to the peer
    device.pair(done)                    -> Pair: `where` is told to the peer, `connect` is told the peer's
    pair.post(steps)                     -> one call of `done` for each post, in the order of the posts

A pair keeps order: what was posted first is done first, and a WRITE is seen by every step after it. After the first
failure a pair is of no use any more; everything that was posted is answered with why. `agent.ports.network.verbs` is
the real one, over pyverbs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

KEY_BITS = 32
NUMBER_BITS = 24
"""Of queue pair numbers, and of packet sequence numbers."""
GID_BYTES = 16
MTU_MAX = 5


class NoVerbs(Exception):
    """There is no RDMA here, or this cannot be had; the text says why and what is next."""


class PairPlace(msgspec.Struct, frozen=True):
    """How a queue pair is reached."""

    gid: bytes
    """Of the port, 16 bytes; over Ethernet an IP address."""
    lid: int
    """Of the port on InfiniBand; 0 over Ethernet."""
    number: int
    first_psn: int
    mtu: int
    """As verbs number them: 1 (256 bytes) to 5 (4096 bytes)."""


class VerbStep(NamedTuple):
    """A READ of the peer's memory into ours, or a WRITE of ours into the peer's."""

    is_read: bool
    here: int
    """Address in a region of ours."""
    here_key: int
    there: int
    there_key: int
    size: int


class Region(Protocol):
    """Registered memory."""

    @property
    def address(self) -> int: ...
    @property
    def key(self) -> int:
        """For the peer, or for our own steps where it is not remote."""

    def close(self) -> None:
        """Idempotent. Once it returns nobody reads or writes that memory through this region, whatever is under way:
        a peer that tries loses its pair."""


class Pair(Protocol):
    """One end of a reliable connection between two machines."""

    @property
    def where(self) -> PairPlace: ...

    def connect(self, peer: PairPlace) -> None:
        """NoVerbs when the device refuses it. Whether the peer can be reached shows with the first step."""

    def post(self, steps: Sequence[VerbStep]) -> None:
        """In order, and done when the last is. Never more steps under way than `STEPS_MAX`."""

    def close(self) -> None:
        """Idempotent. Once it returns the peer's steps are not performed here any more, nor are ours; posts that are
        not answered yet never are."""


class VerbsDevice(Protocol):
    """A device, and a protection domain on it: its pairs reach its regions and no others."""

    @property
    def name(self) -> str: ...

    def register(self, memory: memoryview, remote: bool) -> Region:
        """Writable memory, which stays where it is and takes RAM from now on, whole. `remote`: peers that know the key
        may read and write it. NoVerbs when the device or a limit refuses."""

    def pair(self, done: Callable[[str], None]) -> Pair:
        """`done` is called on this loop for each post, in order: empty, or why it failed. NoVerbs."""

    def close(self) -> None:
        """What was made of it is closed already."""


STEPS_MAX = 256
"""Of one pair, under way at once."""


class VerbsFound(NamedTuple):
    """`why` there is no RDMA, and what is next; empty: `device` is what there is."""

    device: str
    why: str


class Verbs(Protocol):
    def look(self, needs_bytes: int) -> VerbsFound:
        """Without loading or opening anything. `needs_bytes`: of one registration."""

    def open(self) -> VerbsDevice:
        """The device that this host has, with a domain of its own; loads what is needed for it. NoVerbs says why there
        is none."""


NOT_GIVEN = "this process was given no RDMA"


class NoVerbsHere:
    """Where there is none, and why."""

    def __init__(self, why: str = NOT_GIVEN) -> None:
        self._why = why

    def look(self, needs_bytes: int) -> VerbsFound:
        return VerbsFound("", self._why)

    def open(self) -> VerbsDevice:
        raise NoVerbs(self._why)


NO_VERBS_HERE = NoVerbsHere()
SWITCHED_OFF = NoVerbsHere("it is switched off ([memory] rdma)")
