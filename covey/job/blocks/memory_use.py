"""The memory of one process of a job: what it has, what its data Blocks may take, and what its agent is told.

    agent <--MemoryHeld-- this process, each `Joined.memory_s` while the job has a limit or the process has Blocks
          --HostMemory--> the limit, and what the job's other processes on this host need

Before the first answer, and while the agent is away, the process goes by its environment: COVEY_HOST_MEMORY is the
limit, and COVEY_RANKS_HERE names the processes that began here together.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from covey.job.blocks.memory_share import BesideBlocks, seen, share_bytes
from covey.kernel.host_memory import available_bytes
from covey.kernel.resident import Resident, resident
from covey.wire.job import Frame, HostMemory, MemoryHeld

if TYPE_CHECKING:
    from covey.tensors.numbers.arrays import Array


class KeptBlocks(Protocol):
    """What this needs of where Blocks of one set are kept (`covey.job.blocks.block_store`)."""

    @property
    def spills(self) -> bool: ...
    @property
    def resident_bytes(self) -> int: ...


class MemoryUse:
    """The memory of this process. Methods may be called from any thread; none waits."""

    def __init__(
        self,
        limit_bytes: int,
        processes: int,
        measure: Callable[[], Resident] = resident,
        available: Callable[[], int] = available_bytes,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_host = HostMemory(limit_bytes, processes)
        self.every_s = 0.0
        """Seconds between two reports, as the agent wants it; 0: none."""
        self.arrays_bytes = 0
        """Bytes of the arrays that the script has registered as its state."""
        self._measure, self._available, self._now_s = measure, available, now_s
        self._lock = threading.Lock()
        self._stores: tuple[tuple[KeptBlocks, int], ...] = ()
        self._available_bytes: int | None = None
        self._beside = BesideBlocks()
        self._said_s = float("-inf")

    # ---- Blocks ----

    def keeps(self, store: KeptBlocks, promised_bytes: int = 0) -> None:
        """From now on this set of Blocks counts. `promised_bytes`: room that it is to have, however much is there."""
        with self._lock:
            self._stores = *self._stores, (store, promised_bytes)
        self.beside_bytes()

    def share_bytes(self) -> int:
        """Bytes of Blocks that each set that spills may have in memory: they share the room."""
        return self.room_bytes() // max(1, sum(store.spills for store, _ in self._stores))

    def room_bytes(self) -> int:
        """Bytes of Blocks that may be in memory beside those of sets that do not spill."""
        if self._available_bytes is None:
            self._available_bytes = self._available()
        share = share_bytes(self.on_host, self.beside_bytes(), self._available_bytes)
        if self.on_host.limit_bytes:
            share -= sum(max(store.resident_bytes, least) for store, least in self._stores if not store.spills)
        return max(0, share)

    def beside_bytes(self) -> int:
        """What this process needs beside its Blocks, measured now and before."""
        blocks = self.blocks_bytes
        now = self._measure()
        with self._lock:
            self._beside = seen(self._beside, now.now_bytes, now.peak_bytes, blocks)
            return max(self._beside.bytes, self.arrays_bytes)

    @property
    def blocks_bytes(self) -> int:
        """Bytes of all Blocks in memory here."""
        return sum(store.resident_bytes for store, _ in self._stores)

    def counts(self, get: "Callable[[], Mapping[str, Array]]") -> "Callable[[], Mapping[str, Array]]":
        """`get`, which returns the arrays of the script's state: where the job has a limit, they are counted."""
        if not self.on_host.limit_bytes:
            return get

        def counted() -> "Mapping[str, Array]":
            state = get()
            if isinstance(state, dict):  # another mapping may copy each array when it is read
                self.arrays_bytes = sum(getattr(each, "nbytes", 0) for each in state.values())
            return state

        return counted

    # ---- with the agent ----

    def heard(self, frame: Frame) -> bool:
        """Note what the agent says that the job's processes on this host may take, and what the others need. False:
        this frame says something else."""
        if not isinstance(frame, HostMemory):
            return False
        self.on_host = frame
        return True

    @property
    def _reports(self) -> bool:
        return bool(self.every_s) and bool(self.on_host.limit_bytes or self._stores)

    def left_s(self, most_s: float | None) -> float | None:
        """Seconds until the next report, or `most_s` if that is less; None: no limit."""
        if not self._reports:
            return most_s
        left_s = max(0.0, self._said_s + self.every_s - self._now_s())
        return left_s if most_s is None else min(left_s, most_s)

    def due(self) -> list[MemoryHeld]:
        """The report that is due now, or nothing."""
        if not self._reports or self._now_s() < self._said_s + self.every_s:
            return []
        self._said_s = self._now_s()
        beside = self.beside_bytes()
        return [MemoryHeld(self.blocks_bytes, self.arrays_bytes, beside, self._beside.peak_bytes)]
