"""A rank's side of a shared device: obey the page of limits, keep the flag, report each mini-batch. Imports no torch.

    agent --limits--> page --+-> gate.cpp, every 2 to 20 ms: rates    (AntMan §3.1.2)
                             +-> boundary(): memory, then the epoch is acknowledged    (AntMan §3.1.1)
    hooks --step ended--> boundary() --> page --report--> agent
    hooks, gate.cpp --busy now?--> flag --> neighbours on the device

Where `gate.cpp` was not built, a thread reads the limits and the script is stopped before modules and after steps; a
JAX script is stopped after each jitted call, whatever was built (`covey.hooks.frameworks.jax_share`). An agent that
goes away leaves its pages here: rates end with their lease, the memory limit stays.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from covey.hooks.gate.native import GateCounters, NativeGate, Page
from covey.hooks.quiet import Quiet
from covey.hooks.reports.figures import RankReports, mini_batch
from covey.hooks.reports.pace import GatePace
from covey.hooks.reports.steps import Step
from covey.hooks.words import DeviceWords
from covey.kernel.futex import SharedWord
from covey.kernel.pages import (
    BUSY_AT,
    GATES,
    FlagReader,
    FlagWriter,
    LimitsReader,
    MiniBatch,
    RankLimits,
    RankReport,
    ReportWriter,
    rates_at,
)
from covey.wire.job import AskPages

LOOK_S = 0.05
"""Seconds between two looks within a mini-batch, without a native gate: an epoch that leaves the memory limit as it is
need not wait for the mini-batch's end."""
LOOK_NATIVE_S = 0.25
"""Longest delay in seconds of a last report with a native gate, whose thread sees new limits at once."""


@dataclass
class SharedPages:
    """The pages of this rank, mapped: limits to read, report and flag to write, and a neighbour's flag to read."""

    limits_page: Page
    report_page: Page
    flag_page: Page

    def __post_init__(self) -> None:
        self.limits = LimitsReader(self.limits_page)
        self.reports = RankReports(ReportWriter(self.report_page))
        self.flag = FlagWriter(self.flag_page)
        self._flag_word = SharedWord(self.flag_page, BUSY_AT)

    def say(self, busy: bool, now_ns: int) -> None:
        """Set the flag for the neighbours, and wake those that sleep until it changes."""
        self.flag.write(busy, now_ns)
        self._flag_word.wake()


class MemoryUsed(msgspec.Struct, frozen=True):
    """Figures of the mini-batch that ended, in bytes; `covey.kernel.pages.RankReport` explains them."""

    peak_bytes: int = 0
    stable_bytes: int = 0
    spill_bytes: int = 0
    retries: int = 0


class MemoryLimit(Protocol):
    """Keeps a rank within its device memory. Called in the script's thread, between two mini-batches."""

    def ended(self) -> MemoryUsed: ...

    @property
    def counting(self) -> bool:
        """Whether the mini-batch that begins is counted, without a limit."""

    def apply(self, limit_bytes: int) -> bool:
        """Set the limit in bytes; 0: none. Whether it holds; otherwise it is set again after the next mini-batch."""


class FixedMemory(Protocol):
    """Device memory that a framework took when it started (JAX). Asked in the script's thread, after a mini-batch."""

    def took(self) -> int | None:
        """Bytes that it took; 0: not known. None: the framework has not started."""

    def ended(self) -> MemoryUsed: ...

    def on_cores(self) -> bool:
        """Whether its device is a set of cores."""


class Stops(Protocol):
    """Calls a function before each module of the script, from `put_in` until `take_out`."""

    def put_in(self, before: Callable[[], None]) -> None: ...

    def take_out(self) -> None: ...


class Neighbour:
    """Another rank on the device, by its flag."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._flag, self._word = FlagReader(page), SharedWord(page, BUSY_AT)
        self._seen = 0

    def said(self) -> tuple[bool, int]:
        """Whether the neighbour is busy, and since when (ns); busy since 0 where its page says nothing."""
        self._seen, busy = self._word.value, self._flag.busy()
        return (True, 0) if busy is None else (busy, self._flag.since_ns())

    def sleep(self, length_ns: int) -> None:
        """Sleep until the flag differs from the last answer of `said`, at most `length_ns`."""
        self._word.sleep(self._seen, length_ns)


class ShareControl:
    """The share control of this process, whatever frameworks it uses (`of_process`); without pages it does nothing.
    `meters()`: whether the activity of this process's threads shows that it has work on the device, as where the device
    is a set of cores. `fixed`: memory of a framework that is stopped after its jitted calls, and keeps what it took."""

    def __init__(
        self,
        native: NativeGate | None = None,
        memory: MemoryLimit | None = None,
        stops: Stops | None = None,
        meters: Callable[[], bool] = lambda: True,
        fixed: FixedMemory | None = None,
    ) -> None:
        self._native, self._memory, self._stops, self._fixed = native, memory, stops, fixed
        self._torch_on_cores, self._meters = meters, False
        self.graphs: Callable[[], bool] = lambda: False
        """Whether the script replays recorded graphs, in which no operator is seen."""
        self._lock = threading.Lock()
        self._pages: SharedPages | None = None
        self._neighbour: Neighbour | None = None
        self._limits = RankLimits()
        self._limit_bytes = self._acked = 0
        self._used = MemoryUsed()
        self._since, self._changes = GateCounters(), 0
        self._applied_bytes = 0
        self.quiet = Quiet()
        self._catch_up: Callable[[], None] = lambda: None
        self._script, self.script_native_id = threading.main_thread().ident, threading.main_thread().native_id or 0
        self._words, self._speaking = DeviceWords(), threading.Lock()
        self._took: int | None = None
        """Bytes that `fixed` took, at the newest mini-batch."""
        self._idle_before_ns = 0
        self._pace, self._paced = GatePace(), False
        self._gated_ns = self._gated_before_ns = 0
        self._looks: threading.Thread | None = None
        self._closed = threading.Event()
        os.register_at_fork(after_in_child=self._forked)

    @property
    def gate(self) -> str:
        """The point at which the script can be stopped: one of `covey.kernel.pages.GATES`."""
        if self.graphs():
            return "graph"
        if self._native is not None:
            return "operator"
        return "module" if self._stops is not None else "jitted call" if self._fixed is not None else "step"

    @property
    def here(self) -> bool:
        """Whether there are pages."""
        return self._pages is not None

    @property
    def stops_now(self) -> bool:
        """Whether limits are in force that may stop the script where it is stopped without a native gate."""
        return self._paced

    @property
    def flagged(self) -> bool:
        """Whether neighbours obey this rank's flag."""
        return self._pages is not None and self._limits.guaranteed and not self._limits.alone

    @property
    def only_calls(self) -> bool:
        """Whether all work of this process for the device comes from jitted calls."""
        return self._native is None and self._memory is None

    def gains(
        self,
        native: NativeGate | None = None,
        memory: MemoryLimit | None = None,
        stops: Stops | None = None,
        meters: Callable[[], bool] | None = None,
        fixed: FixedMemory | None = None,
    ) -> "ShareControl":
        """Add the parts of a further framework that is hooked in this process, perhaps after its pages came."""
        with self._lock:
            self._memory, self._stops = memory or self._memory, stops or self._stops
            self._fixed, self._torch_on_cores = fixed or self._fixed, meters or self._torch_on_cores
            if stops is not None and self._paced:
                stops.put_in(self._stop_until_allowed)
            if native is not None:
                self._native = native
                self._start_native()
        return self

    def _on_cores(self) -> bool:
        return self._torch_on_cores() and (self._took is None or self._fixed is None or self._fixed.on_cores())

    # ---- the client's thread ----

    def now(self) -> AskPages:
        """The limits that it obeys now, also by an agent before this one."""
        return AskPages(self._acked, self._limit_bytes)

    def pages_came(self, limits: Page, report: Page, flag: Page) -> None:
        """Take the pages of an agent, also of one that began anew: from now on these hold."""
        self._catch_up()  # what ended before is not theirs
        with self._lock:
            pages = self._pages = SharedPages(limits, report, flag)
            self.quiet.end()
            with self._speaking:
                pages.say(not self._words.idle, time.monotonic_ns())
            self._start_native()
            self._look(between_batches=False)
            self._write()
            if self._looks is None:
                self._looks = threading.Thread(target=self._keep_looking, name="covey-limits", daemon=True)
                self._looks.start()

    def _start_native(self) -> None:
        if self._native is None or self._pages is None:
            return
        self._meters = self._on_cores()
        self._native.start(self._pages.limits_page, self._pages.flag_page, self._meters)
        self._since = self._native.counters()
        if self._neighbour is not None:
            self._native.neighbour_is(self._neighbour.page)

    def neighbour_is(self, flag: Page | None) -> None:
        """Another rank shares the device from now on; None: no rank with a flag."""
        with self._lock:
            self._neighbour = None if flag is None else Neighbour(flag)
            if self._native is not None:
                self._native.neighbour_is(flag)

    def pages_lost(self) -> None:
        """The agent went away. Its pages stay: rates end with their lease, and no one raises the memory limit."""

    def close(self) -> None:
        """From now on look at limits only at the end of a mini-batch."""
        self._closed.set()
        if self._looks is not None:
            self._looks.join()

    # ---- the script's threads ----

    def boundary(self, step: Step) -> None:
        """A mini-batch ended."""
        with self._lock:
            if self._pages is None:
                return
            self._script_is(threading.current_thread())
            if self._meters and not self._on_cores() and self._native is not None:
                self._meters = False
                self._native.meter(False)
            self._used = self._memory_used()
            self._look(between_batches=True)
            self._report(step)
            self._be_quiet(self._pages.reports)
        self.stop_if_limited()

    def _be_quiet(self, reports: RankReports) -> None:
        """Begin a quiet time, if nothing limits this rank and it only computes."""
        native, counting = self._native, self._memory is not None and self._memory.counting
        limited = counting or self._paced or self._applied_bytes or self._fixed or not self._meters
        if limited or native is None or native.changes[0] != self._changes:
            self.quiet.end()
        else:
            self.quiet.until(reports.due_ns / 1e9, native.changes, self._script, reports.left)

    def ended_before(self, step: Step) -> None:
        """Take a mini-batch that was no news when it ended (`quiet`); by any thread, in the order of their numbers."""
        if (pages := self._pages) is not None and step.step_s > 0:
            pages.reports.later(step)

    def before_telling(self, catch_up: Callable[[], None]) -> None:
        """Set the function to call before a report: it adds all mini-batches that were no news (`ended_before`)."""
        self._catch_up = catch_up

    def stop_if_limited(self) -> None:
        """Stop the script here, if limits demand it, until it may continue."""
        if self._paced:
            self._stop_until_allowed()

    def waits(self, begins: bool) -> None:
        """The script's thread begins, or ends, to wait for other processes, with no work on the device."""
        if self.is_script():
            self.idles(begins)

    def fetches(self, begins: bool) -> None:
        """The script's thread begins, or ends, to fetch input itself: work or sleep, which the native gate sees."""
        if self._native is not None and self.is_script():
            self._native.fetch(begins)

    def is_script(self) -> bool:
        """Whether this thread is the script's, which ends its mini-batches, and there are pages."""
        return self._pages is not None and threading.get_ident() == self._script

    def memory_is_free(self) -> None:
        """Drop the memory limit: from now on the script must have all that it needs in place."""
        with self._lock:
            self._limit_bytes = self._applied_bytes = 0

    def flag_is_kept(self) -> None:
        """The flag is kept by others, who say idle themselves when the device is done."""
        self._words.ever_idle = True

    def idles(self, begins: bool) -> None:
        """The script has no work for the device from now on, or may have some again."""
        self._say(self._words.script_idles, begins)

    def works(self, on: bool) -> None:
        """A jitted call was given to the device, or the device is done with all of them."""
        self._say(self._words.device_works, on)

    def _say(self, word: Callable[[bool, int], bool], on: bool) -> None:
        with self._speaking:
            now_ns = time.monotonic_ns()
            if self._pages is None or not word(on, now_ns):
                return
            if self._native is not None:
                self._native.wait(self._words.idle)
            else:
                self._pages.say(not self._words.idle, now_ns)

    def _script_is(self, thread: threading.Thread) -> None:
        if thread.ident != self._script and not self._words.idle:
            self._script, self.script_native_id = thread.ident, thread.native_id or 0
            if self._native is not None:
                self._native.script_is(self.script_native_id)

    def _report(self, step: Step) -> None:
        idle_ns, gated_ns = self._spent(step)
        self._write(mini_batch(step, idle_ns, gated_ns) if step.step_s > 0 else None)

    def _spent(self, step: Step) -> tuple[int, int]:
        """Idle and stopped time since the last boundary, in ns."""
        gated_ns, self._gated_before_ns = self._gated_ns - self._gated_before_ns, self._gated_ns
        said_ns = self._words.idle_ns(time.monotonic_ns())
        idle_ns, self._idle_before_ns = max(int(step.input_s * 1e9), said_ns - self._idle_before_ns), said_ns
        if self._native is None:
            return idle_ns, gated_ns
        changes = self._native.changes[0]
        if changes == self._changes:  # and odd: it was busy, and was not stopped
            return 0 if self._meters else idle_ns, gated_ns
        now, before = self._native.counters(), self._since
        self._since, self._changes = now, changes if changes % 2 else 0
        return now.idle_ns - before.idle_ns if self._meters else idle_ns, gated_ns + now.gated_ns - before.gated_ns

    def _write(self, ended: MiniBatch | None = None) -> None:
        assert self._pages is not None
        says_idle = self._words.ever_idle or (self._native is not None and self._meters)
        used = self._used
        self._pages.reports.write(
            RankReport(
                self._acked,
                self._limit_bytes,
                used.peak_bytes,
                used.stable_bytes,
                used.spill_bytes,
                used.retries,
                GATES.index(self.gate),
                says_idle,
                self._took is not None,
            ),
            ended,
            time.monotonic_ns(),
            self._limits.alone,
        )

    # ---- memory ----

    def _memory_used(self) -> MemoryUsed:
        """Figures of all frameworks. Memory that a framework took at its start is not given back between
        mini-batches."""
        used = MemoryUsed() if self._memory is None else self._memory.ended()
        if self._fixed is None or (took := self._fixed.took()) is None:
            return used
        began = self._took is None and self._memory is not None  # what another framework holds stays its own
        known = max(took, self._limit_bytes) if began else took or self._limit_bytes
        self._took = max(known, self._took or 0)
        least = self._fixed.ended()
        peak, stable = used.peak_bytes + least.peak_bytes, used.stable_bytes + least.stable_bytes
        return MemoryUsed(max(peak, self._took), max(stable, self._took), used.spill_bytes, used.retries)

    def _obeys(self, limit_bytes: int, between_batches: bool) -> bool:
        """Whether the memory limit is in force now, perhaps since it was just applied. A rank that is alone on a set of
        cores has all of their memory, and is spared the counting."""
        memory = self._memory if between_batches else None
        apply_bytes = 0 if self._limits.alone and self._on_cores() else limit_bytes
        if self._took is not None:
            if self._took <= limit_bytes or not limit_bytes:
                self._limit_bytes = limit_bytes
        elif apply_bytes == self._applied_bytes or (memory is not None and memory.apply(apply_bytes)):
            self._limit_bytes, self._applied_bytes = limit_bytes, apply_bytes
        return limit_bytes == self._limit_bytes

    # ---- limits ----

    def _look(self, between_batches: bool) -> None:
        """Look at the limits; called under the lock. The memory limit changes only between two mini-batches; an epoch
        is acknowledged when all of it is in force."""
        assert self._pages is not None
        if self._pages.limits.changed():
            newest = self._pages.limits.newest
            assert newest is not None
            self._limits = newest
            self.quiet.end()
            if self._native is not None:
                self._native.look()
        limits = self._limits
        if self._native is None or self._fixed is not None:
            self._set_pace(limits)
        if self._obeys(limits.memory_bytes, between_batches) and limits.epoch != self._acked:
            self._acked = limits.epoch
            if not between_batches:
                self._write()

    def _keep_looking(self) -> None:
        while not self._closed.wait(LOOK_S if self._native is None else 0):
            if self._native is not None:
                self._native.await_limits(LOOK_NATIVE_S)
            with self._lock:
                if self._pages is None:
                    continue
                self._look(between_batches=False)
                late = time.monotonic_ns() >= self._pages.reports.due_ns
            if late:
                self.tell()

    def tell(self) -> None:
        """Write the report of mini-batches that wait for the next one, which does not come."""
        self._catch_up()
        with self._lock:
            if self._pages is not None and self._pages.reports.untold:
                self._write()

    # ---- without a native gate ----

    def _set_pace(self, limits: RankLimits) -> None:
        now_ns = time.monotonic_ns()
        rates = rates_at(limits, now_ns)
        self._pace.set(rates, now_ns, self._worked_ns(now_ns))
        if self._paced == (not rates.free):
            return
        self._paced = not rates.free
        if self._stops is not None and self._paced:
            self._stops.put_in(self._stop_until_allowed)
        elif self._stops is not None:
            self._stops.take_out()

    def _stop_until_allowed(self) -> None:
        """Stop a thread of the script. Never longer than the lease: then other rates hold."""
        began_ns = time.monotonic_ns()
        while pause_ns := self._pause_ns():
            neighbour = self._neighbour
            if neighbour is not None:
                neighbour.sleep(pause_ns)
            else:
                time.sleep(pause_ns / 1e9)
        self._gated_ns += time.monotonic_ns() - began_ns

    def _pause_ns(self) -> int:
        """How many ns the script stays stopped, unless its neighbour's flag changes; 0: it may continue."""
        with self._lock:
            if self._pages is None or not self._paced:
                return 0
            self._look(between_batches=False)
            now_ns = time.monotonic_ns()
            busy, since_ns = (True, 0) if self._neighbour is None else self._neighbour.said()
            self._pace.account(now_ns, self._worked_ns(now_ns), busy, since_ns)
            may = self._pace.may(now_ns, busy, since_ns) or not self.stops_now
            return 0 if may else self._pace.pause_ns(busy)

    def _worked_ns(self, now_ns: int) -> int:
        """Processor time in ns; on a GPU, where that says nothing, the time that jitted calls were at work."""
        on_cores = self._took is None or self._memory is not None or self._on_cores()
        return time.process_time_ns() if on_cores else self._words.worked_ns(now_ns)

    def _forked(self) -> None:
        """Reset in a forked child: the pages are the parent's."""
        self._lock, self._speaking = threading.Lock(), threading.Lock()
        self._pages = self._looks = None
        self.quiet.nobody_asks()
        self._paced, self._words = False, DeviceWords()
        if self._native is None and self._stops is not None:
            with contextlib.suppress(RuntimeError):
                self._stops.take_out()


_process: ShareControl | None = None


def of_process() -> ShareControl:
    """The share control of this process, made if there is none; the hooks of each framework add their parts to it."""
    global _process
    if _process is None:
        _process = ShareControl()
    return _process
