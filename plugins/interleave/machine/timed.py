"""Timings of one job: how long its subtasks take, and how far it is (Harmony §4.3.2, profiling)."""

from collections.abc import Sequence

import msgspec

from covey.core.ids import JobId
from covey.tensors.turns.rules import Need
from plugins.interleave.policy.model import JobProfile
from plugins.interleave.policy.order import ALONE_ON, Waiting, alone_s, left_of

WEIGHT = 0.2
"""Weight of the newest timing in the moving averages (§4.3.2)."""


class JobTimings(msgspec.Struct):
    """Moving averages of one job, and its iterations."""

    work_s: float = 0.0
    """Host-seconds of computing in one iteration."""
    net_s: float = 0.0
    comp: int = 0
    """Number of timings of each sort."""
    comm: int = 0
    declared: int | None = None
    """Iterations that the job said it will do; None: it did not say."""
    done: int = 0

    def add(self, need: Need, took_s: float, hosts: int) -> None:
        """Add a subtask that took `took_s` seconds on `hosts` hosts."""
        if need == "comp":
            self.work_s = _averaged(self.work_s, took_s * hosts, self.comp)
            self.comp += 1
        else:
            self.net_s = _averaged(self.net_s, took_s, self.comm)
            self.comm += 1

    def is_profiled(self, timings_min: int) -> bool:
        return min(self.comp, self.comm) >= timings_min

    def profile(self, job: JobId, lean: float = 1.0) -> JobProfile:
        """The job's profile for planning: its communication takes `lean` times as long as measured."""
        return JobProfile(job, self.work_s, self.net_s * lean)

    def waiting(self, job: JobId, ended_s: Sequence[float], lean: float = 1.0) -> Waiting:
        """The job and the iterations it has left; `ended_s` as for `left_of`."""
        profile = self.profile(job, lean)
        return Waiting(profile, left_of(self.declared, self.done, alone_s(profile, ALONE_ON), ended_s))


def _averaged(old: float, measured: float, count: int) -> float:
    """The new average: a plain mean until there are enough timings for a moving average."""
    share = max(WEIGHT, 1 / (count + 1))
    return share * measured + (1 - share) * old
