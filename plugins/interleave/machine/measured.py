"""What a host measures of jobs that share it, and the profiles that coordinators make of it (Harmony §4.3.2).

Each host averages what its processes of a job tell of their mini-batches and sends that to the job's coordinator. A
profile needs all hosts of one configuration: the computing of a mini-batch is the sum over hosts, its communication the
longest sending (COMM), or, of jobs that take no turns, that of the host that waits least for others. Until a new
configuration is measured, the profile of the one before stands: the computing of a job, in host-seconds, does not
depend on how many hosts do it.
"""

from collections.abc import Sequence

import msgspec

from covey.core.ids import HostId, JobId
from plugins.facts import StepTimed, SumsWorked
from plugins.interleave.machine.timed import WEIGHT
from plugins.interleave.messages import ProfileTold, StepsMeasured
from plugins.interleave.policy.groups import PlacedJob

TIMINGS_MIN = 3
"""Mini-batches that each host measures in a configuration before a job counts as profiled. Ours; the paper takes
"average execution times"."""
SKIPPED = 1
"""Mini-batches of a process that are not counted after each change: they lie partly before it, or wait for what is
new."""


SILENT = 4
"""Reports of a table that may be missing, by the mini-batches of its last one, before its sums are done elsewhere."""


class _Table(msgspec.Struct):
    """Processor time of this host's `aggd` for one table in a mini-batch, and its last report."""

    each_s: float
    step: int
    rounds: int


class _Average(msgspec.Struct):
    comp_s: float = 0.0
    comm_s: float = 0.0
    sent_s: float = 0.0
    step_s: float = 0.0
    added_s: float = 0.0
    seen: int = 0

    def add(self, comp_s: float, comm_s: float, sent_s: float, step_s: float, added_s: float) -> None:
        self.seen += 1
        count = self.seen - SKIPPED
        if count < 1:
            return
        share = max(WEIGHT, 1 / count)
        self.comp_s += share * (comp_s - self.comp_s)
        self.comm_s += share * (comm_s - self.comm_s)
        self.sent_s += share * (sent_s - self.sent_s)
        self.step_s += share * (step_s - self.step_s)
        self.added_s += share * (added_s - self.added_s)

    @property
    def timings(self) -> int:
        return max(0, self.seen - SKIPPED)


class StepsHere:
    """What this host measured of one job under one configuration."""

    def __init__(self, job: JobId, epoch: int, config: int) -> None:
        self.job, self.epoch, self.config = job, epoch, config
        self.step = 0
        self._processes: dict[int, _Average] = {}
        self._tables: dict[JobId, _Table] = {}

    def stepped(self, fact: StepTimed) -> None:
        """Count one mini-batch of a process here."""
        took = fact.compute_s, fact.communicate_s, fact.sending_s, fact.step_s, fact.added_s
        if not all(0 <= each <= 1e9 for each in took):
            return
        self.step = max(self.step, fact.step)
        self._processes.setdefault(fact.rank, _Average()).add(*took)

    def summed(self, fact: SumsWorked) -> None:
        """Count what this host's `aggd` did for one table in some mini-batches."""
        each_s, known = fact.worked_s / fact.rounds, self._tables.get(fact.table)
        before_s = known.each_s if known is not None else each_s
        self._tables[fact.table] = _Table((1 - WEIGHT) * before_s + WEIGHT * each_s, self.step, fact.rounds)

    def told(self) -> StepsMeasured | None:
        """The message to the job's coordinator; None while nothing is measured. The processes of one job compute here
        at the same time, so the longest of them counts; what they and the `aggd` of this host do for sums meanwhile
        comes to that, all of it, since it keeps the processors from other jobs as computing does."""
        known = [each for each in self._processes.values() if each.timings]
        if not known:
            return None
        here = [each for each in self._tables.values() if self.step - each.step <= SILENT * (each.rounds + 1)]
        added_s = sum(each.added_s for each in known) + sum(each.each_s for each in here)
        return StepsMeasured(
            job=self.job,
            epoch=self.epoch,
            config=self.config,
            step=self.step,
            timings=min(each.timings for each in known),
            comp_s=max(each.comp_s for each in known) + added_s,
            comm_s=min(each.comm_s for each in known),
            sent_s=max(each.sent_s for each in known),
            step_s=max(each.step_s for each in known),
        )


def profile_of(job: PlacedJob, measured: Sequence[tuple[HostId, StepsMeasured]]) -> ProfileTold | None:
    """The job's profile from what its hosts measured; None until each of them has measured enough in the present
    configuration."""
    of = {
        host: told
        for host, told in measured
        if told.epoch == job.epoch and told.config == job.config and told.timings >= TIMINGS_MIN
    }
    if not job.hosts or not job.hosts <= set(of):
        return None
    told = [of[host] for host in sorted(job.hosts)]
    return ProfileTold(
        job=job.job,
        epoch=job.epoch,
        config=job.config,
        step=max(each.step for each in told),
        timings=min(each.timings for each in told),
        work_s=sum(each.comp_s for each in told),
        net_s=max(each.sent_s for each in told) or min(each.comm_s for each in told),
        step_s=max(each.step_s for each in told),
    )
