"""One job on a GPU, as the machine knows it.

waiting --(memory is there)--> running --(did not free memory in time)--> pressed --> suspended --> running
                                  '--------> ended --(device shows no memory of it)--> gone
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from covey.core.ids import JobId
from plugins.sharing.messages import Kind, Limits
from plugins.sharing.policy import interference, memory
from plugins.sharing.policy.interference import StepSamples

Stage = Literal["waiting", "running", "suspended", "ended"]
SPEED_WEIGHT = 0.2
"""Weight of the newest mini-batch in the typical duration."""


@dataclass
class GpuMember:
    job: JobId
    kind: Kind
    wanted_bytes: int
    """The job's peak in bytes with everything on the device: what it asked for, then what it shows."""
    weight: float
    flag: bool
    stage: Stage = "waiting"
    stable_bytes: int = 0
    """Bytes that the job cannot give back between mini-batches; 0 while unknown."""
    spill_bytes: int = 0
    step_s: float = 0.0
    """Typical duration of the job's mini-batch, s."""
    last_step_s: float = 0.0
    """When the newest mini-batch ended, or the job started; clock time."""
    started_s: float = 0.0
    """When the job started, was found, or was upgraded; clock time."""
    steps: StepSamples = field(default_factory=StepSamples)
    """Mini-batches since the limits last changed: for trials, and for whether a job that just started runs steadily."""
    settling: StepSamples = field(default_factory=StepSamples)
    """The newest mini-batches of a guaranteed job that does not run steadily yet."""
    settling_steps: int = 0
    """The number of all mini-batches of such a job."""
    limits: Limits | None = None
    """The limits that were sent last."""
    epoch: int = 0
    grant: int = 0
    """The log index of the newest change of the job's class."""
    to_upgrade: bool = False
    """Whether the log made the job guaranteed; it is that here once the guaranteed job before it has ended here too."""
    asked: bool = True
    """Whether the job said what memory it wants, or has shown it."""
    peak_bytes: int = 0
    """The most bytes that the job held and spilled in a mini-batch so far."""
    gate: bool | None = None
    """Whether the job can be held back; None: not known yet."""
    fixed: bool = False
    """Whether the job took its memory when it started and goes by no smaller limit: it stays as it is, or leaves."""
    waits_since_s: float | None = None
    """When the job was first seen to wait for memory beside a guaranteed job that runs."""
    evicted: bool = False
    """Whether the job was asked to end, since it cannot be held back, or waited for memory in vain."""
    press: int = 0
    """How far the job had to be pressed to let memory go: 0 asked, 1 driver, 2 suspend, 3 terminate, 4 kill."""
    press_s: float = 0.0

    @property
    def guaranteed(self) -> bool:
        return self.kind == "guaranteed"

    @property
    def present(self) -> bool:
        """Whether the job has, or is about to have, work on the device."""
        return self.stage in ("waiting", "running")

    def saw(self, step_s: float, peak_bytes: int, stable_bytes: int, spill_bytes: int, now_s: float) -> None:
        """Note that the job finished a mini-batch."""
        self.last_step_s = now_s
        self.step_s += (SPEED_WEIGHT if self.step_s else 1.0) * (step_s - self.step_s)
        self.steps = self.steps.plus(step_s)
        self.stable_bytes, self.spill_bytes = stable_bytes, spill_bytes
        self.peak_bytes = max(self.peak_bytes, peak_bytes + spill_bytes)
        if self.asked:
            self.wanted_bytes = max(self.wanted_bytes, self.shown_bytes)

    def settled(self, step_s: float) -> str:
        """Why the job counts as steady with this mini-batch; empty: not yet. The newest ones must be even."""
        if self.settling.count >= interference.STEPS_SETTLING:
            self.settling = StepSamples()
        self.settling, self.settling_steps = self.settling.plus(step_s), self.settling_steps + 1
        if interference.is_stable(self.settling):
            return f"{self.job} runs steadily: {self.settling.count} mini-batches alone"
        uneven = self.settling_steps >= interference.STEPS_SETTLING_MAX
        return f"{self.job} is uneven by itself: {self.settling_steps} mini-batches alone" if uneven else ""

    def upgraded(self) -> None:
        """Make the job guaranteed from now on; nothing is known of it as such."""
        self.kind, self.to_upgrade, self.steps = "guaranteed", False, StepSamples()
        self.settling, self.settling_steps = StepSamples(), 0

    @property
    def shown_bytes(self) -> int:
        """Bytes that the job has needed so far, as a limit."""
        return max(memory.QUANTUM, -(-self.peak_bytes // memory.QUANTUM) * memory.QUANTUM)

    def has_shown(self) -> None:
        """Take what the job needed so far as what it wants, if it did not say: it ran for long enough."""
        if not self.asked:
            self.asked, self.wanted_bytes = True, self.shown_bytes


def answered(members: Iterable[GpuMember]) -> bool:
    """Whether each of the members that runs has said what can hold it back. One that has not goes by no rates."""
    return not any(member.stage == "running" and member.gate is None for member in members)


def begun(members: Iterable[GpuMember]) -> bool:
    """Whether one of them that runs has finished a mini-batch."""
    return any(member.stage == "running" and member.step_s > 0 for member in members)
