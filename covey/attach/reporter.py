"""Between the hooks of a framework and the agent: counts steps, and says the newest a few times per second."""

import os
import time
from collections.abc import Callable

from covey.attach import rank_of
from covey.attach.steps import Step, StepCounter
from covey.client import JobClient, of_process
from covey.errors import CoveyError

SEND_S = 0.1
"""Between two steps that are told: each one costs the script's thread some 20 us, and wakes another."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Reporter:
    """One for this process. Its methods are called by the hooks, in the script's threads, and raise nothing.

    `memory_bytes` says how much memory the script uses, `communicate_s` what of a step it waited for other ranks (None:
    not known); both are asked once for each step that is told."""

    def __init__(
        self,
        to: str,
        memory_bytes: Callable[[], int] | None = None,
        communicate_s: Callable[[], float | None] | None = None,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.to = to
        self.now_s = now_s
        self._memory_bytes, self._communicate_s = memory_bytes or resident_bytes, communicate_s or (lambda: None)
        self._steps = StepCounter()
        self._client: JobClient | None = None
        self._pid = 0
        self._told_s = float("-inf")
        self._problem = ""

    def start(self) -> None:
        """Say to what this process is attached. A process that does not report for its rank stays silent."""
        client = self._connected()
        if client is not None:
            client.attached(self.to, self._problem)

    # ---- what the hooks see ----

    def optimizer_stepped(self, optimizer: int) -> None:
        self._ended(self._steps.optimizer_stepped(optimizer, self.now_s()))

    def optimizer_gone(self, optimizer: int) -> None:
        self._steps.optimizer_gone(optimizer)

    def batch_fetched(self, waited_s: float, with_gradients: bool) -> None:
        self._ended(self._steps.batch_fetched(waited_s, with_gradients, self.now_s()))

    def failed(self, error: BaseException) -> None:
        """A hook failed: told once, in one line."""
        if not self._problem:
            self._problem = f"{type(error).__name__}: {error}".replace("\n", " ")
            self.start()

    # ---- the agent ----

    def _ended(self, step: Step | None) -> None:
        if step is None or step.step_s <= 0:
            return
        now_s = self.now_s()
        if now_s - self._told_s < SEND_S:
            return
        self._told_s = now_s
        client = self._connected()
        if client is not None:
            memory = self._memory_bytes()
            client.observed(step.number, step.step_s, self._communicate_s(), step.input_s, memory, step.boundary)

    def _connected(self) -> JobClient | None:
        """One connection a process; after a fork the child has its own, if it is the one that computes."""
        if self._pid != os.getpid():
            self._pid, self._client = os.getpid(), None
            if not rank_of(os.environ):
                try:
                    self._client = of_process()
                except CoveyError:
                    return None
        return self._client


def resident_bytes() -> int:
    """Of this process, as the kernel counts."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE_BYTES
