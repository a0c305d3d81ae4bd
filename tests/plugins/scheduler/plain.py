"""The scheduler without cleverness: every second, everything is sorted, in one walk. The fast one is compared with
it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from plugins.scheduler.policy.history import History
from plugins.scheduler.policy.rules import MOVING, NON_PREEMPTIVE, OrderRules


@dataclass
class PlainJob:
    id: int
    submit: int
    width: int
    duration: int
    state: str = "unborn"
    done: int = 0
    ran: int = 0
    waited: int = 0
    wait_now: int = 0
    wait_all: int = 0
    until: int = 0
    queue: int = 0
    first: float = math.inf
    promoted: float | None = None
    due: int | None = None
    """The first second of this wait in which the job was to be promoted."""
    preempted: int = 0
    promotions: int = 0
    end: int = -1

    @property
    def attained(self) -> int:
        return self.ran * self.width


def index(history: History, attained: int, delta: float) -> Fraction:
    """The Gittins index as its definition says it."""
    beyond = [total - attained for total in history.totals if total > attained]
    hits = sum(1 for more in beyond if more <= delta)
    return Fraction(hits) / Fraction(sum(min(more, delta) for more in beyond)) if hits else Fraction(0)


def key(job: PlainJob, rules: OrderRules, history: History) -> tuple[object, ...]:
    runs = job.state in ("run", "resume")
    promoted = (1, 0.0, 0) if job.promoted is None else (0, job.promoted, job.id)
    stays = () if rules.inside == "first" else (0 if runs else 1,)
    narrow = (job.width,) if rules.narrow_first and not runs and job.promoted is None else (0,)
    by_age = (*stays, *narrow, job.first, job.submit, job.id)
    last = job.queue == len(rules.thresholds_gpu_s)
    match rules.discipline:
        case "dlas":
            return (job.queue, promoted, *by_age)
        case "dgittins":
            value = Fraction(0) if last else -index(history, job.attained, rules.thresholds_gpu_s[job.queue])
            return (job.queue, promoted, value, *by_age)
        case "las":
            return (job.attained, job.id)
        case "gittins":
            later = {total - job.attained for total in history.totals if total > job.attained}
            return (-max((index(history, job.attained, delta) for delta in later), default=Fraction(0)), job.id)
        case "srsf":
            return ((job.duration - job.done) * job.width, job.id)
        case "srtf":
            return (job.duration - job.done, job.id)
        case "sjf":
            return (job.width, job.submit, job.id)
        case _:
            return (job.submit, job.id)


class Plain:
    def __init__(self, jobs: Sequence[PlainJob], capacity: int, rules: OrderRules, history: History) -> None:
        self.jobs, self.capacity, self.rules, self.history = list(jobs), capacity, rules, history
        self.quantum = 1 if rules.discipline in ("fifo", "fjf") else rules.quantum_s or 1
        self.changed = False

    def run(self) -> list[PlainJob]:
        now = 0
        while any(job.state != "done" for job in self.jobs):
            self.step(now)
            now += 1
            for job in self.jobs:
                if job.state == "run":
                    job.done += 1
                    job.ran += 1
                elif job.state == "wait":
                    job.waited += 1
                    job.wait_now += 1
                    job.wait_all += 1
        return self.jobs

    def step(self, now: int) -> None:
        """Do everything that happens at this second, and decide if anything did since the last one. With a quantum,
        demotions, promotions and decisions come at its multiples; a completion gives its GPUs back at once."""
        changed = self.changed
        decides = now % self.quantum == 0
        for job in self.jobs:
            if job.state == "run" and job.done == job.duration:
                job.state, job.end, changed = "done", now, True
        for job in self.jobs:
            if job.state == "susp" and job.until <= now:
                job.state, job.wait_now, changed = "wait", 0, True
            elif job.state == "resume" and job.until <= now:
                job.state, changed = "run", True
        for job in self.jobs:
            if job.state == "unborn" and job.submit == now:
                job.state, changed = "wait", True
        thresholds = self.rules.thresholds_gpu_s if self.rules.discipline in ("dlas", "dgittins") else ()
        for job in self.jobs:
            queue = sum(1 for threshold in thresholds if job.attained >= threshold)
            if decides and job.state == "run" and queue > job.queue:
                job.queue, job.promoted, changed = queue, None, True
        for job in self.jobs:
            if job.state != "wait":
                job.due = None
            elif job.due is None and self.starves(job):
                job.due = now
            if decides and job.due is not None:
                job.ran = job.waited = job.queue = 0
                job.promoted, job.promotions, changed, job.due = job.due, job.promotions + 1, True, None
        moves = self.quantum > 1 and self.rules.discipline in MOVING
        if decides and (changed or moves):
            self.decide(now)
        self.changed = changed and not decides

    def starves(self, job: PlainJob) -> bool:
        knob, limit = self.rules.knob, self.rules.starve_limit_s
        if knob is not None and job.queue > 0 and job.ran > 0 and job.waited * knob[1] >= knob[0] * job.ran:
            return True
        return limit is not None and job.promoted is None and job.wait_now >= limit

    def decide(self, now: int) -> None:
        rules = self.rules
        free, chosen = self.capacity, []
        there = [job for job in self.jobs if job.state in ("wait", "run", "resume")]
        fixed = rules.discipline in NON_PREEMPTIVE
        for job in sorted(there, key=lambda j: (fixed and j.state == "wait", key(j, rules, self.history))):
            if job.width <= free:
                free -= job.width
                chosen.append(job)
            elif rules.discipline == "fifo":
                break
        for job in there:
            if job.state != "wait" and job not in chosen:
                job.preempted += 1
                job.state, job.until, job.wait_now = ("susp", now + rules.preempt_s, 0)
                if rules.preempt_s == 0:
                    job.state = "wait"
        held = sum(job.width for job in self.jobs if job.state in ("run", "resume", "susp"))
        for job in chosen:
            if job.state == "wait" and held + job.width <= self.capacity:
                held += job.width
                again = job.first != math.inf
                job.first = min(job.first, now)
                job.state, job.until = ("resume", now + rules.restore_s) if again and rules.restore_s else ("run", 0)
