"""The agent's offer of memory that all ranks share, kept until a script uses tensors and follows it. Imports no numpy
before that."""

import contextlib
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from covey.tensors.same_host.layout import lends, refuse, usable

if TYPE_CHECKING:
    from covey.job.tensors import TensorClient


class MemoryOffer:
    """The offer of shared memory to one client. Methods may be called from any thread."""

    def __init__(self, rank: int, ranks: int, environ: Mapping[str, str]) -> None:
        self._rank, self._ranks, self._usable = rank, ranks, usable(environ)
        self._lends = lends(environ)
        self._lock = threading.Lock()
        self._decided, self._held = not self._usable, False
        self._why = ""
        self.cannot = ""
        """Why this rank cannot use the memory that it was given; the agent is told whenever it is joined."""
        self._descriptor: int | None = None
        self._tensors: TensorClient | None = None

    @property
    def now(self) -> int:
        """The value for `Join.tensor_memory`."""
        return 2 if self._held else int(self._usable and not self._decided)

    def joined(self, follows: bool) -> None:
        """The agent answered. `follows`: it will say later whether there is memory; otherwise there is none."""
        if not follows:
            self.none("")

    def here(self, descriptor: int) -> str:
        """The memory has come. Returns why it cannot be used, or nothing."""
        with self._lock:
            if self._decided:
                os.close(descriptor)
                return "" if self._held else f"rank {self._rank} has been told that there is none"
            self._decided = self._held = True
            self._descriptor = descriptor
        return self._go_on()

    def none(self, why: str) -> None:
        """There is no memory, or a rank cannot use it (`why`)."""
        with self._lock:
            first, self._decided, tensors = not self._decided, True, self._tensors
            self._why = why or self._why
        if tensors is not None and (first or why):
            tensors.memory_is(None, why)

    def decline(self, why: str) -> str:
        """The script will not use the memory; called before it uses tensors. Returns `why`, for the agent."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            self._decided, self._held, self.cannot, self._why = True, False, why, why
        if descriptor is not None:
            with contextlib.suppress(OSError):
                refuse(descriptor)
            os.close(descriptor)
        return why

    def used_by(self, tensors: "TensorClient") -> str:
        """The script uses tensors from now on. Returns why the memory cannot be used, or nothing."""
        with self._lock:
            self._tensors = tensors
        return self._go_on()

    def close(self) -> None:
        """Close the memory if no tensors have taken it."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _go_on(self) -> str:
        with self._lock:
            tensors, descriptor = self._tensors, self._descriptor
            if tensors is None or not self._decided:
                return ""
            self._descriptor = None
        if descriptor is None:
            if not self._held:
                tensors.memory_is(None, self._why)
            return ""
        from covey.tensors.same_host.memory import TensorMemory

        try:
            memory = TensorMemory(descriptor, self._rank, self._ranks, self._lends)
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):
                refuse(descriptor)  # so that the other ranks know it, also while the agent is away
            os.close(descriptor)
            self._held, self.cannot = False, f"rank {self._rank} cannot map it: {error}"
            tensors.memory_is(None, self.cannot)
            return self.cannot
        tensors.memory_is(memory, self._why)
        return ""
