"""The reporter between framework hooks and the agent: counts steps, and reports the newest a few times a second."""

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from covey.core.errors import CoveyError
from covey.hooks import rank_of
from covey.hooks.limits.sharing import ShareControl
from covey.hooks.quiet import NEVER, Quiet
from covey.hooks.reports.steps import JITTED_CALL, OPTIMIZER, Step, StepCounter
from covey.hooks.turns.hooked import HookedTurns
from covey.job import this_job
from covey.job.client import JobClient

CALLS_MAX, ROUND_S = 64, 1.0
"""Number of jitted calls, and seconds, after which a step is told even if the script has not waited for its device."""
SEND_S, SEND_LATER_S, EARLY = 0.1, 0.5, 20
"""Seconds between two steps that are told, for the first `EARLY` ones and after them: each wakes another thread, for
which the script waits some 0.4 ms (that thread needs the interpreter)."""
LATER_MAX = 96
"""Most events that are noted and counted later. With cold caches, noting the time takes a third of counting."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Untold:
    """Steps since the last one that was told."""

    def __init__(self) -> None:
        self._sum = Step(0, 0.0, 0.0, "")
        self.count = 0

    def add(self, step: Step) -> None:
        known = self._sum
        times = (
            known.step_s + step.step_s,
            known.input_s + step.input_s,
            step.boundary,
            known.device_s + step.device_s,
            step.ended_s,
        )
        self._sum, self.count = Step(step.number, *times), self.count + 1

    @property
    def total_s(self) -> float:
        return self._sum.step_s

    def mean(self) -> Step:
        """The mean of the steps, with the number of the newest; there must be one at least."""
        known, count = self._sum, self.count
        means = known.step_s / count, known.input_s / count, known.boundary, known.device_s / count
        return Step(known.number, *means, known.ended_s)


class CallRounds:
    """Mini-batches of a script that runs ahead of its device: all calls between two waits for the device count as
    equally long. When the script was not seen to wait for long, each call is told by itself."""

    def __init__(self) -> None:
        self._untold = Untold()
        self._since = CALLS_MAX
        """Number of calls since the script waited."""

    def ended(self, step: Step) -> Step | None:
        """A call of `step.step_s` seconds ended. Returns the mean, once it can be told."""
        if step.boundary != JITTED_CALL:
            return step
        self._since = 0 if step.device_s > 0 else self._since + 1
        self._untold.add(step)
        if self._since and self._since < CALLS_MAX and self._untold.total_s < ROUND_S:
            return None
        told, self._untold = self._untold.mean(), Untold()
        return told


class Reporter:
    """The reporter of this process, whatever frameworks it uses (`of_process`). Its methods are called by the hooks, in
    any of the script's threads, and raise nothing.

    `memory_bytes` returns how much memory the script uses, `communicate_s` how long a step waited for other ranks
    (None: not known); both are called once for each step that is told. For jitted calls the mean is told, since the
    script runs ahead of the device and waits for many calls at once."""

    def __init__(
        self,
        to: str = "",
        memory_bytes: Callable[[], int] | None = None,
        communicate_s: Callable[[], float | None] | None = None,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.to = to
        self.now_s = now_s
        self._memory = [memory_bytes or resident_bytes]
        self._communicate_s = communicate_s or (lambda: None)
        self._lock = threading.RLock()
        """Guards the counter. Held for a few lines; reentrant, since an optimizer may be collected within these."""
        self._untold, self._rounds = Untold(), CallRounds()
        self._later: deque[tuple[int | None, float, float]] = deque()
        """Events that were no news: the optimizer that stepped, or None and how long a batch took; and when."""
        self._share: ShareControl | None = None
        self._shares = False
        self._turns: HookedTurns | None = None
        self._turned: JobClient | None = None
        """The client whose turns the hooks take."""
        self._steps = StepCounter()
        self._client: JobClient | None = None
        self._pid = 0
        self._tell_s, self._tellings = NEVER, 0
        self._newest: Step | None = None
        """The newest step, if it was not told."""
        self._news_s, self._quiet = NEVER, Quiet()
        """Time until which the next step is of no interest to the agent; and the quiet time of the shared device."""
        self._problem, self._sign_s = "", now_s()
        os.register_at_fork(after_in_child=self._forked)

    def attach(
        self,
        to: str,
        memory_bytes: Callable[[], int] | None = None,
        communicate_s: Callable[[], float | None] | None = None,
        share: ShareControl | None = None,
        turns: HookedTurns | None = None,
    ) -> None:
        """A further framework is hooked. `share` obeys the limits of a shared device, if this host's agent sets some,
        but not in a child that the script forks; `turns` takes turns, if the job shares its host."""
        if share is not None and self._share is None:
            share.before_telling(self.catch_up)
            self._quiet = share.quiet
        self._share, self._turns = self._share or share, self._turns or turns
        self.to = f"{self.to}; {to}" if self.to else to
        self._memory += [memory_bytes] if memory_bytes is not None else []
        self._communicate_s = communicate_s or self._communicate_s
        self.start()

    def start(self) -> None:
        """Tell the agent to what this process is attached. A process that does not report for its rank stays silent."""
        client = self._connected()
        if client is not None:
            client.hooked(self.to, self._problem)

    # ---- what the hooks see ----

    def optimizer_stepped(self, optimizer: int) -> None:
        now_s = self._sign_s = self.now_s()
        if self._is_no_news(now_s):
            self._later.append((optimizer, 0.0, now_s))
            return
        self.catch_up()
        with self._lock:
            ended = self._steps.optimizer_stepped(optimizer, now_s)
        self._ended(ended)

    def optimizer_gone(self, optimizer: int) -> None:
        self.catch_up()
        with self._lock:
            self._steps.optimizer_gone(optimizer)

    def jit_called(self, count: int) -> None:
        self.catch_up()
        now_s = self._sign_s = self.now_s()
        with self._lock:
            ended = self._steps.jit_called(count, now_s)
        self._ended(ended)

    def device_waited(self, waited_s: float) -> None:
        self.catch_up()
        with self._lock:
            self._steps.device_waited(waited_s)

    def batch_fetched(self, waited_s: float, with_gradients: bool) -> None:
        now_s = self._sign_s = self.now_s()
        if self._is_no_news(now_s):
            self._later.append((None, waited_s, now_s))
            return
        self.catch_up()
        with self._lock:
            ended = self._steps.batch_fetched(waited_s, with_gradients, now_s)
        self._ended(ended)

    def _is_no_news(self, now_s: float) -> bool:
        """Whether this event may be counted later: optimizers make the steps, and the next step will not be told."""
        waiting = len(self._later)
        return now_s < self._news_s and waiting < LATER_MAX and self._quiet.lasts(now_s, waiting)

    def catch_up(self) -> None:
        """Count the events that were no news when they happened. Called by any thread."""
        with self._lock:
            while self._later:
                optimizer, waited_s, at_s = self._later.popleft()
                if optimizer is None:
                    self._steps.batch_fetched(waited_s, False, at_s)
                elif (step := self._steps.optimizer_stepped(optimizer, at_s)) is not None:
                    self._newest = step
                    if self._share is not None:
                        self._share.ended_before(step)

    def newest(self) -> tuple[int | None, float]:
        """The newest step, told or not, and when something of the script was seen last (CLOCK_MONOTONIC)."""
        self.catch_up()
        return (self._steps.count - 1 if self._steps.count else None), self._sign_s

    def failed(self, error: BaseException) -> None:
        """A hook failed: report the first error, in one line."""
        if not self._problem:
            self._problem = f"{type(error).__name__}: {error}".replace("\n", " ")
            self.start()

    # ---- the agent ----

    def _ended(self, step: Step | None) -> None:
        if step is None:
            return
        jitted = step.boundary == JITTED_CALL
        if self._share is not None and (round_ := self._rounds.ended(step)) is not None:
            self._share.boundary(round_)
        if step.step_s <= 0:
            return
        now_s = self.now_s()
        self._newest = step
        if not jitted and now_s < self._tell_s:
            return
        with self._lock:
            self._untold.add(step)
            if now_s < self._tell_s:
                return
            told = self._untold.mean() if jitted else step
            self._tellings, self._untold, self._newest = self._tellings + 1, Untold(), None
            self._tell_s = now_s + (SEND_S if self._tellings < EARLY else SEND_LATER_S)
            self._news_s = self._tell_s if step.boundary == OPTIMIZER else NEVER
        self._tell(told)

    def finish(self) -> None:
        """Tell the newest step if it was not told: nothing follows, and the agent would show the script some steps
        before its end."""
        self.catch_up()
        with self._lock:
            told, self._newest = self._newest, None
            if told is not None and told.boundary == JITTED_CALL and self._untold.count:
                told, self._untold = self._untold.mean(), Untold()
        if told is not None and told.step_s > 0:
            self._tell(told)

    def _tell(self, told: Step) -> None:
        client = self._connected()
        if client is not None:
            memory, more = max(memory() for memory in self._memory), {}
            if told.boundary == JITTED_CALL:
                more["device_wait_s"] = told.device_s
            if (communicate_s := self._communicate_s()) is not None:
                more["communicate_s"] = communicate_s
            client.observed(told.number, told.step_s, told.input_s, memory, told.boundary, **more)

    def _forked(self) -> None:
        """Reset in the child: a thread that held the lock does not exist there."""
        self._lock = threading.RLock()
        self._later.clear()
        self._newest = None

    def _connected(self) -> JobClient | None:
        """The connection of this process; after a fork the child has its own, if it is the process that computes."""
        if self._pid != os.getpid():
            self._pid, self._client = os.getpid(), None
            if not rank_of(os.environ):
                try:
                    self._client = this_job.of_process()
                except CoveyError:
                    return None
                self._client.heartbeats.seen = self.newest
        if self._client is not None and self._share is not None and not self._shares:
            self._shares = True
            self._client.share(self._share)
        if self._client is not None and self._turns is not None and self._turned is not self._client:
            self._turned = self._client
            self._turns.takes(self._client.turns, self.failed)
        return self._client


_process: Reporter | None = None


def of_process() -> Reporter:
    """The reporter of this process, made if there is none; hooks of a framework `attach` themselves to it."""
    global _process
    if _process is None:
        _process = Reporter()
        atexit.register(_process.finish)  # before its client closes, which was registered earlier
    return _process


def resident_bytes() -> int:
    """Resident memory of this process in bytes, as the kernel counts."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE_BYTES
