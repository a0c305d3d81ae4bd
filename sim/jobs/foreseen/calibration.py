"""`covey-sim jobs --eta`: a trace under the scheduler that agents run, and at random moments, of each job that waits,
the start that agents would say then, beside the one that it became.

What is said is worked out from jobs that ended before that moment alone: their user (the trace's tenant), their name
(its `model`, where there is one), GPUs and length.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from plugins.scheduler.machine.ahead.foreseen import Foreseeing, Past, StartForeseen
from plugins.scheduler.machine.ahead.run_ahead import moment
from plugins.scheduler.messages.spec import TITLE_PATTERN, JobOwner, JobSpec
from plugins.scheduler.policy.foreseen.lengths import Lengths, PastJob, kind_of
from plugins.scheduler.policy.rules import OrderRules
from plugins.scheduler.policy.settings import SchedulerSettings
from sim.jobs.engine import SimJob
from sim.jobs.live import Live, settings_of
from sim.report import Cell, Progress, Report, Table, Wrong, duration

ASKED = 40
"""At how many random moments of a trace it is asked when each job that waits will start."""
SEED = 1


@dataclass
class Said:
    """What was said of one job that waited, and what it became."""

    foreseen: StartForeseen
    at_s: int
    """When it was said."""
    waited_s: int | None = None
    """Seconds from then until it started."""


class AskedLive(Live):
    """A run in which jobs that wait are asked about."""

    def __init__(
        self,
        jobs: Sequence[SimJob],
        hosts: int,
        gpus_each: int,
        rules: OrderRules,
        settings: SchedulerSettings,
        names: Sequence[str] | None = None,
        asked: int = 0,
    ) -> None:
        """`names`: of each job, in the order of `jobs`; `asked`: at how many moments it is asked."""
        super().__init__(jobs, hosts, gpus_each, rules, settings)
        self.names = names
        self.past = Past(Lengths(), [])
        first, last = min(job.submit_s for job in jobs), max(job.submit_s for job in jobs)
        rng = random.Random(SEED)
        self.moments = sorted((rng.randint(first, last) for _ in range(asked)), reverse=True)
        """When it is asked, the next one last."""
        self.said: list[Said] = []
        self.awaited: dict[int, list[Said]] = {}
        """What was said of jobs that wait still."""

    def _spec(self, at: int) -> JobSpec:
        spec, user = super()._spec(at), re.sub(r"[^A-Za-z0-9_.-]", "_", self.jobs[at].tenant)[:64]
        title = self.names[at] if self.names is not None and re.match(TITLE_PATTERN, self.names[at]) else "job"
        owner = JobOwner(user=user, uid=1000) if re.match(r"[A-Za-z0-9_]", user) else None
        return msgspec.structs.replace(spec, title=title, owner=owner)

    def _complete(self, at: int) -> None:
        kind, ran_s = kind_of(self._spec(at)), float(self.lives[at].ran + self.now - self.lives[at].since)
        self.past.lengths.add(PastJob(kind, self.jobs[at].submit_s, ran_s))
        super()._complete(at)

    def _start(self, at: int, counts: bool) -> None:
        super()._start(at, counts)
        for said in self.awaited.pop(at, ()):
            said.waited_s = self.now - said.at_s

    def _decide(self) -> None:
        super()._decide()
        while self.moments and self.moments[-1] <= self.now:
            self.moments.pop()
            self._ask()

    def _ask(self) -> None:
        """Ask about every job that waits now."""
        now, _ = moment(self.queue, self.rack, float(self.now), float(self.now))
        submitted = [self._submitted(one) for one in self.at.values()]
        seen = Foreseeing(now, self.leader.settings, Past(self.past.lengths, submitted), self.now)
        for _ in seen.steps():
            pass
        for id, foreseen in seen.answers().items():
            said = Said(foreseen, self.now)
            self.said.append(said)
            self.awaited.setdefault(self.at[id], []).append(said)

    def _submitted(self, at: int) -> PastJob:
        ended_s = self.out.end_s[at]
        return PastJob(kind_of(self._spec(at)), self.jobs[at].submit_s, float(self.lives[at].ran) if ended_s else None)


CERTAIN = 1.05
"""A start is said as certain when its p90 is at most so many times its p50."""


def calibrated(
    name: str,
    jobs: Sequence[SimJob],
    names: Sequence[str] | None,
    hosts: tuple[int, int],
    rules: OrderRules,
    progress: Progress,
) -> Report:
    """Run a trace on hosts of so many GPUs, and report what was said of starts, and what they became."""
    try:
        settings = settings_of(rules, {}, None, None)
    except ValueError as error:
        raise Wrong("--eta with this policy", str(error), "--policy covey") from None
    live = AskedLive(jobs, *hosts, rules, settings, names, ASKED)
    live.run(progress)
    found = measured(live.said)
    title = f"starts foreseen on {name}, {hosts[0]} hosts of {hosts[1]} GPUs"
    rows: list[Sequence[Cell]] = [
        ("asked: waiting jobs at random moments", found["asked"], f"{ASKED} moments"),
        ("p50 said", found["told_p50"], ""),
        ("... and started by then", _share(found["by_p50"]), "a share of one half is aimed at"),
        ("p90 said", found["told_p90"], ""),
        ("... and started by then", _share(found["by_p90"]), "85 to 95 % is aimed at"),
        ("... p90 over 5 % later than p50", found["wide"], ""),
        ("...... and started by p50", _share(found["wide_by_p50"]), ""),
        ("...... and started by p90", _share(found["wide_by_p90"]), ""),
        ("p50, median", duration(found["p50_s_median"]), ""),
        ("p90, median", duration(found["p90_s_median"]), ""),
        ("the start, median", duration(found["start_s_median"]), ""),
        ("not known: too few jobs had ended", found["unlike"], ""),
        ("p50 not known: beyond what is run ahead", found["beyond"], ""),
    ]
    data = {"trace": name, "gpus": hosts[0] * hosts[1], **found}
    return Report("jobs-eta", data, (Table(title, ("what", "value", ""), rows),))


def measured(said: Sequence[Said]) -> dict[str, Any]:
    """Measures of what was said; times in seconds."""
    over = [(one.foreseen.p50_s, one.foreseen.p90_s, one.waited_s) for one in said if one.waited_s is not None]
    p50 = [(p50_s, waited_s) for p50_s, _, waited_s in over if p50_s is not None]
    p90 = [(p50_s or 0.0, p90_s, waited_s) for p50_s, p90_s, waited_s in over if p90_s is not None]
    wide = [each for each in p90 if each[1] > CERTAIN * each[0]]
    why = Counter("unlike" if "is like" in one.foreseen.basis else "beyond" for one in said if not one.foreseen.p50_s)
    return {
        "asked": len(said),
        "told_p50": len(p50),
        "told_p90": len(p90),
        "by_p50": _part([waited_s <= p50_s for p50_s, waited_s in p50]),
        "by_p90": _part([waited_s <= p90_s for _, p90_s, waited_s in p90]),
        "wide": len(wide),
        "wide_by_p50": _part([waited_s <= p50_s for p50_s, _, waited_s in wide]),
        "wide_by_p90": _part([waited_s <= p90_s for _, p90_s, waited_s in wide]),
        "p50_s_median": _median([p50_s for p50_s, _, _ in p90]),
        "p90_s_median": _median([p90_s for _, p90_s, _ in p90]),
        "start_s_median": _median([waited_s for _, _, waited_s in p90]),
        "unlike": why["unlike"],
        "beyond": why["beyond"],
    }


def _part(found: Sequence[bool]) -> float | None:
    return sum(found) / len(found) if found else None


def _median(values: Sequence[float]) -> float:
    return float(sorted(values)[len(values) // 2]) if values else 0.0


def _share(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.1f} %"
