"""How jobs are ordered, as one value: the published policies, what they are compared with, and Covey's own.

Every policy is a walk down an order (`policy/order.py`); they differ in the queues, in who stays, and in the order
inside a queue. An `OrderRules` says all of it, so that the agent, the simulator and the tests mean one thing.
"""

from typing import Literal, get_args

import msgspec

Discipline = Literal["dlas", "dgittins", "las", "gittins", "srsf", "srtf", "sjf", "fjf", "fifo", "backfill", "gandiva"]
"""How jobs are ordered. `dlas`, `dgittins`: discretised 2DAS. `las`, `gittins`: these two without queues. `srsf`,
`srtf`: they are told how long jobs are. `sjf`: fewest GPUs first. `fjf`: first come, best effort; `fifo`: first come,
and a job that does not fit blocks the others. `backfill`: fifo, and a job that does not delay the first may pass it
(EASY). `gandiva`: turns of equal length."""
Inside = Literal["sticky", "first"]
"""The order inside a queue: a job that runs stays, or strictly by first start."""

NON_PREEMPTIVE: tuple[Discipline, ...] = ("fjf", "fifo", "backfill")
MOVING: tuple[Discipline, ...] = ("las", "gittins", "dgittins", "srsf", "srtf")
"""The disciplines whose keys change while a job runs."""


class OrderRules(msgspec.Struct, frozen=True, kw_only=True):
    """One policy with its parameters. Times in s, service in GPU·s."""

    discipline: Discipline = "dlas"
    thresholds_gpu_s: tuple[int, ...] = ()
    """The thresholds between queues, GPU·s: n thresholds make n + 1 queues [h_i-1, h_i); none: one queue."""
    inside: Inside = "sticky"
    quantum_s: int | None = None
    """Seconds whose multiples are the only times of decisions; None: every event is one. Never for fifo and fjf."""
    knob: tuple[int, int] | None = None
    """PROMOTEKNOB as a fraction; None: infinite (Gu 2021 §3.3.2.3). Below 1 for the simulator only: a promoted job has
    its GPUs for a whole first quantum there, while on hosts one that stops may come back before another starts."""
    starve_limit_s: int | None = None
    """STARVELIMIT; None: infinite."""
    preempt_s: int = 0
    """Seconds that a checkpoint takes; it holds the GPUs."""
    restore_s: int = 0
    """Seconds that a restart from a checkpoint takes; it holds the GPUs and is no service."""
    narrow_first: bool = False
    """Whether, inside a queue, waiting jobs of fewer GPUs come first; by age among equals."""
    gang_patience_s: int | None = None
    """Seconds that a wide gang which could run by age waits at most before it goes before everybody, until it ends
    (`machine/leader/gang_clocks.py`); None: for ever. For `dlas`."""

    checkpoint_every_s: int | None = None
    """Seconds of running between two checkpoints: what a job ran since the last is lost when it is stopped. 0: it never
    saves; None: it saves when it is stopped, and loses nothing."""
    unsaved_stops: int | None = None
    """How often jobs that have not saved yet may be stopped, all jobs together, where jobs lose something; a job that
    saved may be stopped while that costs little (`machine/leader/firm_jobs.py`). None: at any time."""

    def __post_init__(self) -> None:
        if self.discipline not in get_args(Discipline):
            raise ValueError(f"unknown discipline {self.discipline}; expected one of {', '.join(get_args(Discipline))}")
        if self.inside not in get_args(Inside):
            raise ValueError(f"unknown inside {self.inside}; expected one of {', '.join(get_args(Inside))}")
        if any(low >= high for low, high in zip((0, *self.thresholds_gpu_s), self.thresholds_gpu_s, strict=False)):
            raise ValueError("thresholds_gpu_s must be over 0 and ascending")
        if self.quantum_s is not None and self.quantum_s < 1:
            raise ValueError("quantum_s must be at least 1")
        if self.knob is not None and (self.knob[0] < 0 or self.knob[1] < 1):
            raise ValueError("knob must be a fraction of 0 or more")
        if min(self.preempt_s, self.restore_s) < 0:
            raise ValueError("preempt_s and restore_s must be 0 or more")
        if self.starve_limit_s is not None and self.starve_limit_s < 1:
            raise ValueError("starve_limit_s must be at least 1")
        if min(self.checkpoint_every_s or 0, self.unsaved_stops or 0) < 0:
            raise ValueError("checkpoint_every_s and unsaved_stops must be 0 or more")
        if self.gang_patience_s is not None and (self.gang_patience_s < 1 or self.discipline != "dlas"):
            raise ValueError("gang_patience_s must be at least 1, and is for dlas")


LAS_PUBLISHED = OrderRules(thresholds_gpu_s=(3200,), inside="first")
"""2D-LAS as in the paper's testbed: two queues, FIFO by first start inside a queue, no promotion (Gu 2021 §3.5.2)."""

COVEY = OrderRules(
    thresholds_gpu_s=(3200, 51200),
    narrow_first=True,
    starve_limit_s=7 * 86400,
    gang_patience_s=45 * 60,
    unsaved_stops=3,
)
"""Covey's policy, from the same information (GPUs asked for and service attained): the paper's threshold and a second
one 16 times higher, so that jobs of hours do not share a queue with jobs of weeks; inside a queue whoever runs stays,
and narrow gangs go first, because of two jobs that have attained the same the narrower one has less service ahead of it
and leaves fewer GPUs waiting; no job waits more than a week without going to the head of everything, and a wide gang
whose turn has come by age at most 45 minutes longer, and what it ran."""
