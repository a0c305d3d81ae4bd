"""A rank's side of a shared device: obeys the page of limits, keeps the flag, reports each mini-batch. Pure of torch.

    agent --limits--> page --+-> gate.cpp, every 2 to 20 ms: rates    (AntMan §3.1.2)
                             +-> boundary(): memory, then the epoch is acknowledged    (AntMan §3.1.1)
    hooks --step ended--> boundary() --> page --report--> agent
    hooks, gate.cpp --busy now?--> flag --> neighbours on the device

Where `gate.cpp` was not built, a thread reads the limits and the script is stopped before modules and after steps.
An agent that goes away leaves its pages here: rates end with their lease, memory stays as it is.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from covey.attach.native import GateCounters, NativeGate, Page
from covey.attach.pace import GatePace
from covey.attach.steps import Step
from covey.pages import (
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
from covey.wire import AskPages

LOOK_S = 0.05
"""Between two looks within a mini-batch: an epoch that leaves memory as it is need not wait for its end."""
POLL_S = 0.002
"""Between two looks of a script that is stopped."""


@dataclass
class SharedPages:
    """The pages of this rank, mapped: limits to read, report and flag to write, and a neighbour's flag to read."""

    limits_page: Page
    report_page: Page
    flag_page: Page

    def __post_init__(self) -> None:
        self.limits = LimitsReader(self.limits_page)
        self.report = ReportWriter(self.report_page)
        self.flag = FlagWriter(self.flag_page)


class MemoryUsed(msgspec.Struct, frozen=True):
    """Of the mini-batch that ended; bytes. As in `covey.pages.RankReport`."""

    peak_bytes: int = 0
    stable_bytes: int = 0
    spill_bytes: int = 0
    retries: int = 0


class MemoryLimit(Protocol):
    """Keeps a rank within its device memory. Called in the script's thread, between two mini-batches."""

    def ended(self) -> MemoryUsed: ...

    def apply(self, limit_bytes: int) -> None:
        """From now on; 0: none."""


class Stops(Protocol):
    """Calls something before each module of the script, from `put_in` until `take_out`."""

    def put_in(self, before: Callable[[], None]) -> None: ...

    def take_out(self) -> None: ...


class ShareControl:
    """One for this process; without pages it does nothing. `meters()`: whether what the threads of this process do says
    that it has work on the device, which is so where the device is a set of cores."""

    def __init__(
        self,
        native: NativeGate | None = None,
        memory: MemoryLimit | None = None,
        stops: Stops | None = None,
        meters: Callable[[], bool] = lambda: True,
    ) -> None:
        self._native, self._memory, self._stops = native, memory, stops
        self._on_cores, self._meters = meters, False
        self._lock = threading.Lock()
        self._pages: SharedPages | None = None
        self._neighbour: FlagReader | None = None
        self._limits = RankLimits()
        self._limit_bytes = self._acked = 0
        self._used = MemoryUsed()
        self._since = GateCounters()
        self._script = threading.main_thread().ident
        self._waiting = self._ever_waited = False
        self._pace, self._paced = GatePace(), False
        self._gated_ns = self._gated_before_ns = 0
        self._looks: threading.Thread | None = None
        self._closed = threading.Event()
        os.register_at_fork(after_in_child=self._forked)

    @property
    def gate(self) -> str:
        """By what the script can be stopped: one of `covey.pages.GATES`."""
        return "operator" if self._native is not None else "module" if self._stops is not None else "step"

    # ---- the client's thread ----

    def now(self) -> AskPages:
        """By what it goes, also by the word of an agent before this one."""
        return AskPages(self._acked, self._limit_bytes)

    def pages_came(self, limits: Page, report: Page, flag: Page) -> None:
        """From an agent, also from one that began anew: from now on these hold."""
        with self._lock:
            pages = self._pages = SharedPages(limits, report, flag)
            pages.flag.write(True, time.monotonic_ns())
            if self._native is not None:
                self._meters = self._on_cores()
                self._native.start(limits, flag, self._meters)
                self._since = self._native.counters()
            self._look(between_batches=False)
            if self._looks is None:
                self._looks = threading.Thread(target=self._keep_looking, name="covey-limits", daemon=True)
                self._looks.start()

    def neighbour_is(self, flag: Page | None) -> None:
        """Another rank shares the device from now on, or none that has a flag."""
        with self._lock:
            self._neighbour = None if flag is None else FlagReader(flag)
            if self._native is not None:
                self._native.neighbour_is(flag)

    def pages_lost(self) -> None:
        """The agent went away. Its pages stay: rates end with their lease, memory is not raised by nobody."""

    def close(self) -> None:
        """Limits are not looked at any more, but at the end of a mini-batch."""
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
            if self._memory is not None:
                self._used = self._memory.ended()
            self._look(between_batches=True)
            self._report(step)
        if self._paced:
            self._stop_until_allowed()

    def waits(self, begins: bool) -> None:
        """The script's thread begins, or ends, to wait for what other processes do, and has no work on the device."""
        if self.is_script():
            self.idles(begins)

    def fetches(self, begins: bool) -> None:
        """The script's thread begins, or ends, to fetch input by itself: that is work, or a sleep, seen at once."""
        if self._native is not None and self.is_script():
            self._native.fetch(begins)

    def is_script(self) -> bool:
        """Whether this thread is the script's, which ends its mini-batches, and there are pages."""
        return self._pages is not None and threading.get_ident() == self._script

    def idles(self, begins: bool) -> None:
        """The device has no work of this rank from now on, or may have some again."""
        if self._pages is None or begins == self._waiting:
            return
        self._waiting, self._ever_waited = begins, True
        if self._native is not None:
            self._native.wait(begins)
        else:
            self._pages.flag.write(not begins, time.monotonic_ns())

    def _script_is(self, thread: threading.Thread) -> None:
        if thread.ident != self._script and not self._waiting:
            self._script = thread.ident
            if self._native is not None:
                self._native.script_is(thread.native_id or 0)

    def _report(self, step: Step) -> None:
        assert self._pages is not None
        step_ns = int(step.step_s * 1e9)
        idle_ns, gated_ns = self._spent(step)
        ended = None
        if step_ns > 0:
            ended = MiniBatch(step.number, step_ns, min(max(idle_ns, 0), step_ns), min(max(gated_ns, 0), step_ns))
        self._write(ended)

    def _spent(self, step: Step) -> tuple[int, int]:
        """Idle and stopped since the last boundary, ns."""
        if self._native is None:
            gated_ns, self._gated_before_ns = self._gated_ns - self._gated_before_ns, self._gated_ns
            return int(step.input_s * 1e9), gated_ns
        now, before = self._native.counters(), self._since
        self._since = now
        return now.idle_ns - before.idle_ns if self._meters else int(step.input_s * 1e9), now.gated_ns - before.gated_ns

    def _write(self, ended: MiniBatch | None) -> None:
        assert self._pages is not None
        says_idle = self._ever_waited or (self._native is not None and self._meters)
        used = self._used
        self._pages.report.write(
            RankReport(
                self._acked,
                self._limit_bytes,
                used.peak_bytes,
                used.stable_bytes,
                used.spill_bytes,
                used.retries,
                GATES.index(self.gate),
                says_idle,
            ),
            ended,
        )

    # ---- limits ----

    def _look(self, between_batches: bool) -> None:
        """Under the lock. Memory changes between two mini-batches; an epoch is acknowledged when all of it holds."""
        assert self._pages is not None
        if self._pages.limits.changed():
            newest = self._pages.limits.newest
            assert newest is not None
            self._limits = newest
            if self._native is not None:
                self._native.look()
        limits = self._limits
        if limits.memory_bytes != self._limit_bytes and between_batches and self._memory is not None:
            self._memory.apply(limits.memory_bytes)
            self._limit_bytes = limits.memory_bytes
        if self._native is None:
            self._set_pace(limits)
        if limits.epoch != self._acked and limits.memory_bytes == self._limit_bytes:
            self._acked = limits.epoch
            if not between_batches:
                self._write(None)

    def _keep_looking(self) -> None:
        while not self._closed.wait(LOOK_S):
            with self._lock:
                if self._pages is not None:
                    self._look(between_batches=False)

    # ---- without a native gate ----

    def _set_pace(self, limits: RankLimits) -> None:
        now_ns = time.monotonic_ns()
        rates = rates_at(limits, now_ns)
        self._pace.set(rates, now_ns, time.process_time_ns())
        if self._paced == (not rates.free):
            return
        self._paced = not rates.free
        if self._stops is not None and self._paced:
            self._stops.put_in(self._stop_until_allowed)
        elif self._stops is not None:
            self._stops.take_out()

    def _stop_until_allowed(self) -> None:
        """In a thread of the script. Never longer than the lease: then other rates hold."""
        began_ns = time.monotonic_ns()
        while not self._allowed():
            time.sleep(POLL_S)
        self._gated_ns += time.monotonic_ns() - began_ns

    def _allowed(self) -> bool:
        with self._lock:
            if self._pages is None or not self._paced:
                return True
            neighbour, now_ns = self._neighbour, time.monotonic_ns()
            said = None if neighbour is None else neighbour.busy()
            busy, since_ns = said is not False, 0 if neighbour is None or said is None else neighbour.since_ns()
            if self._limits.lease_ns and now_ns >= self._limits.lease_ns:
                self._set_pace(self._limits)
            self._pace.account(now_ns, time.process_time_ns(), busy, since_ns)
            return self._pace.may(now_ns, busy, since_ns)

    def _forked(self) -> None:
        """In a child: the pages are its parent's."""
        self._lock = threading.Lock()
        self._pages = self._looks = None
        self._paced = self._waiting = False
        if self._native is None and self._stops is not None:
            with contextlib.suppress(RuntimeError):
                self._stops.take_out()
