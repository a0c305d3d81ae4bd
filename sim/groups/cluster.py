"""A cluster whose jobs compute and communicate in turns, in virtual time: what `covey-sim groups` runs.

A job repeats COMP (its work divided by the hosts of its group) and COMM (always of one length) until its iterations
are done. Subtasks of one group meet in two ways:

    turns      one COMP, one primary COMM and a secondary one in its gaps, as `plugins.interleave.machine.turns` says
    naive      no turns: n jobs in the same phase have 1/n of it each, and lose a share more to contention

Nothing is taken from the equations of the model: what a group achieves is the result of its subtasks, one after
another, and is compared with them. Memory makes COMPs longer (`group_memory`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from covey.tensors.turns.rules import LAPS, Need
from plugins.interleave.machine.turns import Finished, OrderChanged, TurnAsked, Turns
from sim.groups.memory import Load, MemoryEffect, resident, spilling
from sim.groups.workload import Job
from sim.kernel import Kernel

EPS = 1e-9
Event = Literal["came", "ended", "iterated"]


@dataclass(eq=False)
class Work:
    """One job, and its progress."""

    job: Job
    need: Need = "comp"
    left: float = 1.0
    """Part of the present subtask that is still to do, 0..1."""
    done: int = 0
    """Iterations done."""
    from_s: float = 0.0
    """Time until which the job moves, in seconds."""
    end_s: float | None = None
    comp_s: float = 0.0
    """Seconds of a COMP subtask in its group, collections, reloading and waiting for the disk included."""
    cpu_s: float = 0.0
    """Seconds of a COMP subtask in its group without waiting for the disk."""
    spilled: float = 0.0

    @property
    def name(self) -> str:
        return self.job.profile.job


@dataclass(frozen=True)
class Rules:
    """How subtasks of a group meet."""

    turns: bool = True
    contention: float = 0.0
    """Share of speed lost per other job in the same phase when there are no turns."""
    gap: float = 0.0
    """Share of a COMM in which it waits for others and leaves the network to a secondary one."""
    talking: float = 0.0
    """Share of processors that a COMM takes: a COMP beside it is slower by this share."""
    spill: bool = True
    laps: int = LAPS
    """Turns of others after which a job is next (`Turns`)."""


class Shared:
    """Jobs that share hosts. Time passes for this group alone between two events of the cluster."""

    def __init__(self, jobs: Sequence[Work], hosts: int, rules: Rules) -> None:
        self.jobs, self.hosts, self.rules = list(jobs), hosts, rules
        self.turns = Turns(laps=rules.laps)
        self.at_s = 0.0
        self.busy = {"comp": 0.0, "comm": 0.0, "useful": 0.0}
        """Host-seconds used so far: of processors, of the network, and of processors at what jobs compute."""
        self.felt = MemoryEffect([], [], [], 0.0)

    def reorder(self, jobs: Sequence[Work], hosts: int) -> None:
        """Put these jobs on `hosts` hosts from now on; the first of the list has the first turn among equals."""
        self.jobs, self.hosts = list(jobs), hosts
        loads = [
            Load(
                job.job.profile.work_s / hosts,
                job.job.profile.net_s,
                job.job.input_gb / hosts,
                job.job.model_gb / hosts,
            )
            for job in jobs
        ]
        self.felt = (spilling if self.rules.spill else resident)(loads)
        for at, job in enumerate(jobs):
            job.comp_s, job.cpu_s, job.spilled = self.felt.comp_s[at], self.felt.cpu_s[at], self.felt.spilled[at]
        if self.rules.turns:
            self.turns.handle(OrderChanged(tuple(job.job.profile.job for job in jobs)), 0.0)
            self._ask()

    def _ask(self) -> None:
        for job in self.jobs:
            if job.from_s <= self.at_s + EPS and job.end_s is None:
                self.turns.handle(TurnAsked(job.job.profile.job, job.need), 0.0)

    def rates(self) -> list[tuple[Work, float]]:
        """The jobs that make progress now, each with the share of its subtask that it does per second."""
        if not self.rules.turns:
            return self._crowd()
        holds = self.turns.holds
        speed = {
            holds.get("comp"): 1.0 - self.rules.talking if "primary" in holds else 1.0,
            holds.get("primary"): 1.0,
            holds.get("secondary"): self.rules.gap,
        }
        return [
            (job, speed[job.job.profile.job] / self.length(job)) for job in self.jobs if job.job.profile.job in speed
        ]

    def _crowd(self) -> list[tuple[Work, float]]:
        active = [job for job in self.jobs if job.from_s <= self.at_s + EPS and job.end_s is None]
        same = {need: sum(1 for job in active if job.need == need) for need in ("comp", "comm")}
        speed = {"comp": 1.0 - self.rules.talking if same["comm"] else 1.0, "comm": 1.0}
        share = {need: speed[need] / max(1, n) / (1 + self.rules.contention * (n - 1)) for need, n in same.items()}
        return [(job, share[job.need] / self.length(job)) for job in active]

    def length(self, job: Work) -> float:
        """Seconds of the job's present subtask when it runs alone."""
        return max(1e-6, job.comp_s if job.need == "comp" else job.job.profile.net_s)

    def next_s(self) -> float:
        """Time at which the next subtask ends or a job that moved arrives; infinity when nothing will happen."""
        ends = [self.at_s + job.left / rate for job, rate in self.rates() if rate > 0]
        there = [job.from_s for job in self.jobs if job.from_s > self.at_s + EPS]
        return min([*ends, *there], default=math.inf)

    def advance(self, to_s: float) -> list[Work]:
        """Let time pass until `to_s`; returns the jobs whose subtask is over."""
        step = to_s - self.at_s
        over = []
        rates = self.rates()
        if any(job.need == "comm" for job, _ in rates):
            self.busy["comp"] += step * self.rules.talking * self.hosts
        for job, rate in rates:
            went = min(job.left, step * rate)
            job.left -= went
            if job.need == "comp":
                self.busy["comp"] += went * job.cpu_s * self.hosts
                self.busy["useful"] += went * job.job.profile.work_s
            else:
                self.busy["comm"] += went * job.job.profile.net_s * self.hosts * (1 - self.rules.gap)
            if job.left <= EPS:
                over.append(job)
        self.at_s = to_s
        if self.rules.turns and any(abs(job.from_s - to_s) <= EPS for job in self.jobs):
            self._ask()
        return over

    def next_subtask(self, job: Work) -> bool:
        """Begin the job's next subtask; returns whether the one that is over was the last of an iteration."""
        last = job.need == "comm"
        job.need, job.left = ("comp" if last else "comm"), 1.0
        if last:
            job.done += 1
        if self.rules.turns:
            self.turns.handle(Finished(job.job.profile.job), 0.0)
            if not (last and job.done >= job.job.iterations):
                self.turns.handle(TurnAsked(job.job.profile.job, job.need), 0.0)
        return last


@dataclass
class Outcome:
    jct_s: list[float]
    makespan_s: float
    """Seconds from the first job's start to the last job's end."""
    cpu: float
    """Busy share of all hosts over the makespan, 0..1; collections, reloading and what COMMs take included."""
    net: float
    useful: float
    """Share of all hosts that computes over the makespan, 0..1, without collections, reloading and COMMs."""
    running: float
    """Jobs that run at once, mean over time."""
    groups: float
    moves: int = 0
    spilled: float = 0.0
    """Share of input on disk, mean over jobs that ran together."""
    curve: list[tuple[float, float, float]] = field(default_factory=list)
    """(time, CPU, network): use in each stretch of ten minutes or more."""


class Cluster:
    """Groups side by side. `arrange(cluster, event, job)` is called when a job came, ended an iteration (only if it is
    `watched`) or ended, `review(cluster)` every `review_s` seconds. Both may change `groups`; groups that they change
    are brought to the present before."""

    def __init__(
        self,
        jobs: Sequence[Job],
        hosts: int,
        arrange: "Callable[[Cluster, Event, Work], None]",
        watched: Callable[[Work], bool] = lambda job: False,
        review: "Callable[[Cluster], None]" = lambda cluster: None,
        review_s: float = math.inf,
    ) -> None:
        self.jobs = [Work(job) for job in jobs]
        self.hosts, self.arrange, self.watched = hosts, arrange, watched
        self.review, self.review_s = review, review_s
        self.groups: list[Shared] = []
        self.now_s = 0.0
        self.moves = 0
        self.spilled: list[float] = []
        self.past = {"comp": 0.0, "comm": 0.0, "useful": 0.0}
        """Host-seconds used by groups that are over."""
        self.curve: list[tuple[float, float, float]] = []
        self.mark = (0.0, 0.0, 0.0)
        self.held = [0.0, 0.0]
        """Job-seconds and group-seconds so far."""

    def run(self, progress: Callable[[float], None] = lambda share: None) -> Outcome:
        coming = sorted(self.jobs, key=lambda job: job.job.submit_s, reverse=True)
        ended, review_s = 0, self.review_s
        while ended < len(self.jobs):
            while coming and coming[-1].job.submit_s <= self.now_s + EPS:
                self._tell("came", coming.pop())
            if self.now_s >= review_s - EPS:
                review_s = self.now_s + self.review_s
                self._change(self.review)
            found = self._until(min(review_s, coming[-1].job.submit_s if coming else math.inf))
            if found is None:
                continue
            if found.end_s is None:
                self._tell("iterated", found)
                continue
            ended += 1
            self._tell("ended", found)
            progress(ended / len(self.jobs))
        return self._outcome()

    def _tell(self, event: Event, job: Work) -> None:
        self._change(lambda cluster: cluster.arrange(cluster, event, job))

    def _change(self, how: "Callable[[Cluster], None]") -> None:
        before = list(self.groups)
        how(self)
        there = set(map(id, self.groups))
        for group in before:
            if id(group) not in there:
                for key, value in group.busy.items():
                    self.past[key] += value

    def _until(self, stop_s: float) -> Work | None:
        """Run the groups one by one until a job ends, a watched iteration ends, or `stop_s`."""
        kernel: Kernel[float, int] = Kernel(self.now_s)
        for at, group in enumerate(self.groups):
            kernel.post(group.next_s(), at, rank=at)
        while (next_s := kernel.next_at()) is not None and next_s < stop_s:
            at = kernel.pop()
            group = self.groups[at]
            found = self._first(group.advance(next_s), group, next_s)
            if found is not None:
                self._pass(next_s)
                return found
            kernel.post(group.next_s(), at, rank=at)
        if stop_s == math.inf:
            raise RuntimeError("jobs are left and nothing runs")
        self._pass(stop_s)
        return None

    def _first(self, over: Sequence[Work], group: Shared, now_s: float) -> Work | None:
        """The first of these that the cluster acts on; the next call finds others that end at the same time."""
        for job in over:
            if not group.next_subtask(job):
                continue
            if job.done >= job.job.iterations:
                job.end_s = now_s
                return job
            if self.watched(job):
                return job
        return None

    def _pass(self, to_s: float) -> None:
        span = to_s - self.now_s
        self.held[0] += span * sum(len(group.jobs) for group in self.groups)
        self.held[1] += span * len(self.groups)
        self.now_s = to_s
        for group in self.groups:
            group.advance(to_s)
        since, cpu, net = self.mark
        if to_s - since >= 600:
            total = (to_s - since) * self.hosts
            now_cpu, now_net = self._busy("comp"), self._busy("comm")
            self.curve.append(((since + to_s) / 2, (now_cpu - cpu) / total, (now_net - net) / total))
            self.mark = (to_s, now_cpu, now_net)

    def _busy(self, what: str) -> float:
        return self.past[what] + sum(group.busy[what] for group in self.groups)

    def _outcome(self) -> Outcome:
        first = min(job.job.submit_s for job in self.jobs)
        span = self.now_s - first
        total = span * self.hosts
        return Outcome(
            jct_s=[(job.end_s or 0.0) - job.job.submit_s for job in self.jobs],
            makespan_s=span,
            cpu=self._busy("comp") / total,
            net=self._busy("comm") / total,
            useful=self._busy("useful") / total,
            running=self.held[0] / span,
            groups=self.held[1] / span,
            moves=self.moves,
            spilled=sum(self.spilled) / len(self.spilled) if self.spilled else 0.0,
            curve=self.curve,
        )
