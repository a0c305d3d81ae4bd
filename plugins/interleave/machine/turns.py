"""One host of a group: whose turn it is (Harmony §4.3.1).

One COMP runs at a time, since it uses all processors. One COMM is *primary*; it leaves gaps while it waits for others,
so a second one is *secondary* and yields to the first. When the primary is done, the secondary takes its place.

    asked ---> waiting ---> running (COMP)                       ---> finished
                       \\--> running (COMM, secondary) -> primary ---> finished

Among those that wait, the plan's order decides: the first job of a group runs as if it were alone, the others fill
what it leaves, and it ends soonest. A job that `LAPS` turns of others went before is next, so none waits for
ever: ranks go by the same rule (`covey/tensors/turns/rules.py`), on a page that all of a host see. All hosts of a group
run the same order, whatever order the requests of one moment arrive in.
"""

from collections.abc import Sequence
from typing import Literal, assert_never

import msgspec

from covey.core.ids import JobId
from covey.tensors.turns.rules import LAPS, Need, urgency

Lane = Literal["comp", "primary", "secondary"]


class TurnAsked(msgspec.Struct, frozen=True):
    """A job wants to begin a subtask."""

    job: JobId
    need: Need


class Finished(msgspec.Struct, frozen=True):
    """A job ended its subtask."""

    job: JobId


class OrderChanged(msgspec.Struct, frozen=True):
    """These jobs, in this order, take turns here from now on. A job that is not among them gives back what it has."""

    jobs: tuple[JobId, ...]


class Run(msgspec.Struct, frozen=True):
    """Action: let the job begin its subtask, or continue it, in this lane."""

    job: JobId
    lane: Lane


TurnsEvent = TurnAsked | Finished | OrderChanged


class Turns:
    """The tokens of one host."""

    def __init__(self, jobs: Sequence[JobId] = (), laps: int = LAPS) -> None:
        self.laps = laps
        self.order = {job: at for at, job in enumerate(jobs)}
        self.waiting: dict[JobId, Need] = {}
        self.holds: dict[Lane, JobId] = {}
        self.passed: dict[JobId, int] = {}
        """Waiting job -> turns of others in its lane since it asked."""

    def handle(self, event: TurnsEvent, now_s: float) -> Sequence[Run]:
        match event:
            case TurnAsked(job, need):
                if job in self.order and job not in self.waiting and job not in self.holds.values():
                    self.waiting[job] = need
                    self.passed[job] = 0
            case Finished(job):
                self._give_back(job)
            case OrderChanged(jobs):
                self._reorder(jobs)
            case _:
                assert_never(event)
        return self._fill()

    def check(self) -> None:
        held = list(self.holds.values())
        assert len(held) == len(set(held)), "no job holds two turns"
        assert not set(held) & set(self.waiting), "who runs does not wait"
        assert set(self.passed) == set(self.waiting), "all that wait are counted, and no others"
        assert set(held) | set(self.waiting) <= set(self.order), "only jobs of the group have turns"
        assert "secondary" not in self.holds or "primary" in self.holds, "no COMM is secondary without a primary one"
        if "comp" not in self.holds:
            assert "comp" not in self.waiting.values(), "processors are not idle while a job waits for them"
        if len({"primary", "secondary"} & set(self.holds)) < 2:
            assert "comm" not in self.waiting.values(), "the network is not idle while a job waits for it"

    def _give_back(self, job: JobId) -> None:
        self.waiting.pop(job, None)
        self.passed.pop(job, None)
        self.holds = {lane: holder for lane, holder in self.holds.items() if holder != job}

    def _place(self, job: JobId) -> tuple[int, int]:
        """Sort key of a waiting job, least first (`covey.tensors.turns.rules`)."""
        return urgency(self.order[job], self.passed[job], self.laps)

    def _reorder(self, jobs: Sequence[JobId]) -> None:
        for job in [job for job in self.order if job not in set(jobs)]:
            self._give_back(job)
        self.order = {job: at for at, job in enumerate(jobs)}

    def _fill(self) -> list[Run]:
        runs = []
        if "primary" not in self.holds and "secondary" in self.holds:
            self.holds["primary"] = self.holds.pop("secondary")
            runs.append(Run(self.holds["primary"], "primary"))
        lanes: tuple[tuple[Lane, Need], ...] = (("comp", "comp"), ("primary", "comm"), ("secondary", "comm"))
        for lane, need in lanes:
            if lane in self.holds:
                continue
            ready = [job for job, wanted in self.waiting.items() if wanted == need]
            if ready:
                job = min(ready, key=self._place)
                del self.waiting[job], self.passed[job]
                self.holds[lane] = job
                for other in ready:
                    if other != job:
                        self.passed[other] += 1
                runs.append(Run(job, lane))
        return runs
