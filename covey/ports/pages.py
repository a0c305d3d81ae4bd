"""Memory that processes of a host share."""

from typing import Any, Protocol


class Handed(Protocol):
    """A descriptor of this process that can be passed to another process."""

    @property
    def descriptor(self) -> int:
        """The descriptor; -1 once it is closed."""

    def close(self) -> None:
        """Close the descriptor in this process. Idempotent."""


class SharedPage(Handed, Protocol):
    """A page of `covey.kernel.pages`, made here, whose descriptor is sent to the process that maps it."""

    @property
    def view(self) -> Any:
        """The page itself; writable where this process is the writer."""

    def seal(self) -> None:
        """Seal the page, once its writer has mapped it, against all other writers. OSError when the kernel cannot."""


class HeldMemory(Protocol):
    """A `SharedRing` of another process, which exists as long as this object is held."""

    name: str
    """Name by which other processes open the memory from here."""

    def close(self) -> None:
        """Give the memory back here; no view of it may be used any more. Idempotent."""


class SharedRing(HeldMemory, Protocol):
    """Memory that two processes of a host share."""

    locked: bool
    """Whether the memory cannot be swapped out."""
    view: memoryview
    """All of the memory, writable; begins at a page of the machine."""

    def empty(self) -> None:
        """Give the memory back to the kernel: all who map it read zeros then. OSError when the kernel refuses."""


class Pages(Protocol):
    def make(self, kind: str, mine: bool) -> SharedPage:
        """A page of zeros. `mine`: this process writes it, and it is sealed at once. OSError when there is no memory or
        descriptor for it, or the kernel has no sealed memory."""

    def make_memory(self, ranks: int, first: int) -> SharedPage:
        """Memory of `covey.tensors.same_host.layout` for `ranks` ranks from `first` on; this process needs no view of
        it. OSError as of `make`."""

    def make_handed(self, size: int) -> SharedPage:
        """`size` bytes of zeros, of a size that is sealed, for this process and one to which the descriptor is handed;
        `close` ends the descriptor, and the view stays. OSError as of `make`."""

    def make_ring(self, size: int, sparse: bool = False) -> "SharedRing":
        """`size` bytes of zeros for this process and another one of this host, locked in memory where that is
        permitted; they exist as long as one of the two holds them. `sparse`: a page takes memory, and is locked, from
        its first use on. OSError as of `make`."""

    def open_ring(self, name: str, size: int, sparse: bool = False) -> "SharedRing":
        """Memory that a living process of this user made, or holds. OSError when it is gone, or has another size."""

    def hold(self, name: str, size: int) -> "HeldMemory":
        """Hold memory without using it. OSError as of `open_ring`."""
