"""`[scheduler]` of agent.toml. Every default names its source."""

import itertools
import math
from fractions import Fraction

import msgspec

from plugins.scheduler.policy.leases import HEAL_PAUSE_S
from plugins.scheduler.policy.rules import COVEY
from plugins.scheduler.policy.shared import BUSY

BESIDE_MAX = 16
"""The most opportunistic jobs on one GPU: each has a context of hundreds of MB there."""


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a person may decide about the order of jobs. All hosts should agree; only the leader's copy decides."""

    queue_thresholds_gpu_s: tuple[float, ...] = tuple(float(limit) for limit in COVEY.thresholds_gpu_s)
    """Attained service at which a job leaves a queue for the next lower one, GPU·s; n thresholds make n + 1 queues
    (NSDI'19 §5.3: 3200 GPU·s; the second one keeps jobs of hours apart from jobs of weeks, see `policy/rules.py`)."""
    narrow_first: bool = COVEY.narrow_first
    """Among jobs that wait in one queue gangs of fewer GPUs go first; by age among equals (measured: `make tables`)."""
    packlimit: float = 0.3
    """Skew above which a gang is packed onto few hosts (NSDI'19 §3.4; published models lie at 0.04-0.15 or
    0.61-0.77)."""
    packlimit_refit: bool = True
    """Fit `packlimit` anew from gangs that ran both on one host and on several (NSDI'19 §3.4)."""
    preemption: bool = True
    """Stop a job of a lower queue for one of a higher queue. Off: a started job keeps its GPUs, except that an
    opportunistic one always yields to guaranteed ones."""
    defragment: bool = True
    """Whether gangs that can continue without a host (`job.state`) move so that another gang fits, instead of being
    stopped, or waited for; also so that a gang fits on one host that loses on several (`policy/defragment.py`)."""
    elastic_grow_after_s: float = 10.0
    """Elastic jobs grow into GPUs that were free for this many seconds while no job waited for them; 0: they grow only
    when somebody asks for it (ours: long beside the second that placing a job takes)."""
    demote_after_s: float | None = 300.0
    """A job of class auto that waited this many seconds for its tenant's quota becomes opportunistic; None or inf:
    never (AntMan §3.3 names no time. Ours: long beside the seconds that placing takes, short beside the hours of a
    job)."""
    starve_limit_s: float | None = COVEY.starve_limit_s
    """A job that waited this many seconds goes to the head of everything; None: never (NSDI'19 §3.3, STARVELIMIT; a
    week, so that no job is passed for ever). Longer than jobs take to their next checkpoint: under that two that need
    the same GPUs may stop one another before either makes progress."""
    promote_knob: float | None = None
    """A job below the highest queue that waited this many times as long as it ran goes to the head of everything; None
    or inf: never (NSDI'19 §3.3, PROMOTEKNOB, which the paper's testbed leaves off too). At least 1, where the paper's
    own series begins (§5): under that two jobs that need the same GPUs stop one another before either makes
    progress."""
    gang_patience_s: float | None = COVEY.gang_patience_s
    """A gang of an eighth of what its tenant may use, or more, that could run by age waits at most this many seconds,
    and as long as it ran, until it goes before everybody, and stays there until it ends; None or inf: for ever. Not
    while the others ask for over twice the GPUs (`machine/leader/gang_clocks.py`). Ours: about as long as narrow jobs
    take, and with 30 minutes one of fourteen traces loses 12 % in the mean."""
    restart_s: float = 60.0
    """Seconds that a stop and a start cost a job beside what it has not saved, until a restart of it was measured: for
    jobs that save, which stop for others only while both are at most a tenth of the time for which they have run
    (`machine/leader/firm_jobs.py`; chosen: a checkpoint and a start of 30 s each, as the simulator has them)."""
    unsaved_stops: int | None = 3
    """How often jobs of one tenant that had not saved are stopped for others, and do not save then, until none of the
    tenant that never saved is stopped before it ends or saves; each job that saved when it was told to end makes good
    for as many again. None: always (chosen: a script may save when it is told to end, and nobody knows before)."""
    host_lost_after_s: float = 60.0
    """A host gone for more seconds than this loses its jobs (chosen: an agent's restart and a switch's reboot fit in).
    Ranks that no leader confirms are asked to end after half of it, and are gone after three quarters
    (`policy/leases.py`)."""
    heal_pause_s: float = HEAL_PAUSE_S
    """Ranks of a job that heals are suspended when no leader has confirmed them for this many seconds, and continue
    once one does. 1.7 s after that others may start in their place, if their host is dead to gossip
    (`policy/leases.py`)."""
    coordinator_lost_after_s: float = 3.0
    """Seconds for which the host that looks for a gang's GPUs may be gone before another one takes over: nothing runs
    yet, so waiting gains nothing."""
    placing_limit_s: float = 60.0
    """A grant that is not placed within this many seconds goes to another coordinator."""
    reservation_lease_s: float = 15.0
    """Seconds for which a host holds GPUs for a gang without news of its grant."""
    reserve_deadline_s: float = 3.0
    """Seconds for which a coordinator waits for the hosts of one attempt."""
    env_copies: int = 2
    """The number of hosts beside the submitting agent's that keep the (sealed) environment of a job from its submission
    on, voters first: this many hosts may be lost before its first start (chosen: as many as a log of five voters
    survives). 0: only the submitting agent's host and those that run it."""
    place_attempts: int = 3
    """The number of attempts before a grant goes back to the queue."""
    checkpoint_s: float = 10.0
    """Seconds between two reports of attained service to the log: at most this much is forgotten with a host."""
    current_s: float = 3.0
    """A copy of the log that is older than this many seconds starts no ranks."""
    beside: int = 0
    """The most opportunistic jobs on a GPU beside one guaranteed job (AntMan §3.3). 0: a GPU is one job's. It should be
    the same on all hosts; one that says 0 takes none beside others. Over 0 ranks wait for the plugin `sharing`
    (default: a decision of whoever owns the rack)."""
    busy_max: float = BUSY
    """Utilisation over the last 10 s, 0..1, from which on a GPU takes no more opportunistic jobs (AntMan §3.3: M)."""
    quotas: dict[str, int] = {}
    """GPUs per tenant, written into the log once by the first leader; `agentctl quota` changes them later."""
    default_quota: int | None = None
    """GPUs of a tenant without a quota of its own; None: not limited."""

    @property
    def knob(self) -> tuple[int, int] | None:
        """`promote_knob` as a fraction, as `OrderRules` has it."""
        if self.promote_knob is None:
            return None
        return Fraction(self.promote_knob).limit_denominator(1000).as_integer_ratio()

    def __post_init__(self) -> None:
        if any(value <= 0 for value in self.queue_thresholds_gpu_s) or any(
            low >= high for low, high in itertools.pairwise(self.queue_thresholds_gpu_s)
        ):
            raise ValueError("queue_thresholds_gpu_s must be over 0 and ascending")
        if not 0 <= self.packlimit <= 1:
            raise ValueError("packlimit must be from 0 to 1")
        for name in ("host_lost_after_s", "coordinator_lost_after_s", "placing_limit_s", "reservation_lease_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be over 0")
        if not 0 <= self.elastic_grow_after_s < math.inf:
            raise ValueError("elastic_grow_after_s must be 0 or more seconds; 0 is never")
        for name in ("reserve_deadline_s", "checkpoint_s", "current_s", "heal_pause_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be over 0")
        for name in ("starve_limit_s", "demote_after_s", "promote_knob", "gang_patience_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must be 0 or more; inf is never")
            if value == math.inf:
                msgspec.structs.force_setattr(self, name, None)
        if self.promote_knob is not None and self.promote_knob < 1:
            raise ValueError(
                "promote_knob must be at least 1: a job that gave way must not come back before the other ran"
            )
        if self.gang_patience_s is not None and self.gang_patience_s < 1:
            raise ValueError("gang_patience_s must be at least 1; inf is never")
        if not 0 <= self.restart_s < math.inf or (self.unsaved_stops is not None and self.unsaved_stops < 0):
            raise ValueError("restart_s must be 0 or more seconds, unsaved_stops 0 or more")
        if self.place_attempts < 1 or self.env_copies < 0:
            raise ValueError("place_attempts must be at least 1, env_copies at least 0")
        if not 0 <= self.beside <= BESIDE_MAX or not 0 < self.busy_max <= 1:
            raise ValueError(f"beside must be from 0 to {BESIDE_MAX} jobs, busy_max over 0 and at most 1")
        if any(value < 0 for value in self.quotas.values()):
            raise ValueError("quotas must be 0 or more GPUs")
