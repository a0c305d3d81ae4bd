"""Port: reading and writing another machine's memory without its processor (RDMA), as pages and tensors need it.

    device.register(memory, remote=True) -> Region: its key and address are told to the peer
    device.pair(done)                    -> Pair: `where` is told to the peer, `connect` is told the peer's
    pair.post(steps)                     -> one call of `done` for each post, in the order of the posts
    pair.completed()                     -> those calls, where no loop makes them: for threads

A pair keeps order: what was posted first is done first, and a WRITE is seen by every step after it. After the first
failure a pair cannot be used any more, and everything that was posted is answered with the reason.
`covey.verbs.pyverbs_port` implements this port over pyverbs.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

KEY_BITS = 32
NUMBER_BITS = 24
"""Bits of queue pair numbers, and of packet sequence numbers."""
GID_BYTES = 16
MTU_MAX = 5


class NoVerbs(Exception):
    """There is no RDMA here, or the request cannot be met; the text says why and what to do next."""


class PairPlace(msgspec.Struct, frozen=True):
    """The address of a queue pair."""

    gid: bytes
    """GID of the port, 16 bytes; over Ethernet an IP address."""
    lid: int
    """LID of the port on InfiniBand; 0 over Ethernet."""
    number: int
    first_psn: int
    mtu: int
    """Path MTU, as verbs number it: 1 (256 bytes) to 5 (4096 bytes)."""


class VerbStep(NamedTuple):
    """A READ of the peer's memory into this process's, or a WRITE of this process's memory into the peer's."""

    is_read: bool
    here: int
    """Address in a region of this process."""
    here_key: int
    there: int
    there_key: int
    size: int


class Region(Protocol):
    """Memory that is registered with the device."""

    @property
    def address(self) -> int: ...
    @property
    def key(self) -> int:
        """Key of the region, for the peer, or for this process's own steps where the region is not remote."""

    def close(self) -> None:
        """Deregister the memory. Idempotent. Once it returns nobody reads or writes that memory through this region,
        whatever is under way: a peer that tries loses its pair."""


class Pair(Protocol):
    """One end of a reliable connection between two machines."""

    @property
    def where(self) -> PairPlace: ...
    @property
    def descriptor(self) -> int:
        """A file descriptor that can be read once there is something for `completed`."""

    def completed(self) -> None:
        """Call `done` for each post that was answered since. It never waits. A loop that watches the pair calls this
        itself; of a pair that no loop watches, one thread at a time uses any method."""

    def connect(self, peer: PairPlace) -> None:
        """Connect to the peer's pair. NoVerbs when the device refuses; the first step shows if the peer is
        reachable."""

    def post(self, steps: Sequence[VerbStep]) -> None:
        """Perform the steps in order; done when the last is. Never more than `STEPS_MAX` steps are under way."""

    def close(self) -> None:
        """Close the pair. Idempotent. Once it returns, neither the peer's steps here nor our own are performed any
        more; posts that are not answered yet never are."""


class VerbsDevice(Protocol):
    """A device with a protection domain on it: its pairs reach its regions and no others."""

    @property
    def name(self) -> str: ...

    def register(self, memory: memoryview, remote: bool) -> Region:
        """Register writable memory, which must not move and takes RAM from now on, all of it. `remote`: peers that know
        the key may read and write it. NoVerbs when the device or a limit refuses."""

    def pair(self, done: Callable[[str], None], watched: bool = True) -> Pair:
        """A new pair. `done` is called for each post, in order: empty, or why it failed. `watched`: by this asyncio
        loop; otherwise by whoever calls `completed`. NoVerbs."""

    def close(self) -> None:
        """Close the device; everything made of it must be closed already."""


STEPS_MAX = 256
"""Most steps of one pair that are under way at once."""


class VerbsFound(NamedTuple):
    """What a look for RDMA found: the `device`; or `why` there is none and what is next, else empty."""

    device: str
    why: str


class Verbs(Protocol):
    def look(self, needs_bytes: int) -> VerbsFound:
        """Look for RDMA without loading or opening anything. `needs_bytes`: bytes that must be lockable at once."""

    def open(self) -> VerbsDevice:
        """The device that this host has, with a protection domain of its own; loads what is needed for it. NoVerbs says
        why there is none."""


NOT_GIVEN = "this process was given no RDMA"


class NoVerbsHere:
    """The port where there is no RDMA; it says why."""

    def __init__(self, why: str = NOT_GIVEN) -> None:
        self._why = why

    def look(self, needs_bytes: int) -> VerbsFound:
        return VerbsFound("", self._why)

    def open(self) -> VerbsDevice:
        raise NoVerbs(self._why)


NO_VERBS_HERE = NoVerbsHere()
SWITCHED_OFF = NoVerbsHere("it is switched off ([memory] rdma)")
