"""What a service asks of its machine."""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from covey.ports.devices import Devices, Gpu


class MemoryNow(msgspec.Struct, frozen=True):
    """Memory of one host now: the smaller of the machine's and the cgroup's."""

    total_bytes: int
    available_bytes: int
    pressure_some_avg10: float
    """Percent of the last 10 s in which some task waited for memory (PSI); 0 where the kernel has no PSI."""
    oom_kills: int | None = None
    """Processes that the kernel has killed for memory since it started, whoever's and at whatever limit; None: it does
    not say."""


class CardNow(msgspec.Struct, frozen=True):
    """What one network interface has carried since it came up."""

    name: str
    received_bytes: int
    sent_bytes: int


class Probes(Protocol):
    @property
    def devices(self) -> Devices:
        """The devices that jobs of this host share: its GPUs, or what is in their place."""

    def gpus(self) -> Sequence[Gpu]:
        """All GPUs that this host has, whatever its driver says of them now, until an operator says otherwise."""

    def gpus_unlisted(self) -> str:
        """Why it is not known which GPUs this host has, in words; empty: `gpus` has them all."""

    def forget_gpu(self, uuid: str) -> str:
        """Forget this GPU: its XIDs, and, unless the driver lists it, that it is here. Returns what was forgotten, in
        words; empty: nothing was remembered."""

    def memory(self) -> MemoryNow: ...
    def card(self, address: str) -> CardNow | None:
        """The counters of the interface with this IP address; None: they cannot be read."""

    def cores(self) -> int:
        """Number of processors that this process may use."""

    def watch_memory(self, stalls: Callable[[], None]) -> str:
        """From now on call `stalls` on this loop whenever tasks of this machine have waited for memory for 0.15 s of 2
        s. Returns why that is impossible, in words; empty: it works."""

    def stay_in_memory(self, flushes: bool) -> str:
        """From now on nothing of this process is swapped out. `flushes`: a disk of this host may depend on it, so the
        kernel does not wait for disks when it needs memory for it. Returns why that is impossible, in words; empty: it
        works."""

    def swap_lacks(self, helper: str) -> str:
        """Why no volume can be swap of this host, and the next step; empty: a helper listens there, and the kernel has
        what is needed, as far as can be seen without asking."""

    def keep_heap(self, size_bytes: int) -> str:
        """Take `size_bytes` of memory for requests now and never give it back, so that a request under load finds some.
        0: take none, but keep some of what is freed for the next request, which then need not ask the kernel. Returns
        why that is impossible, in words; empty: it works."""

    def watch_loop(self) -> "LoopStalls":
        """From now on, until the process ends, measure how long this loop is held up."""


class LoopStalls(Protocol):
    """How long one loop was held up: by its own callbacks, and (`waits`) by a machine that had no processor for it."""

    @property
    def count(self) -> int:
        """How often the loop was held up for more than 5 ms."""

    @property
    def longest_s(self) -> float:
        """The longest delay of the last minute or two, in seconds."""

    @property
    def waits_count(self) -> int: ...

    @property
    def waits_longest_s(self) -> float: ...
