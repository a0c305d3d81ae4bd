"""Three ways to run the same jobs: each on hosts of its own, two on the same hosts, in groups (Harmony §4.4.1)."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from covey.core.ids import HostId
from covey.tensors.turns.rules import LAPS
from plugins.interleave.policy.rules import OURS, REVIEW_S, GroupRules
from sim.groups.cluster import Cluster, Event, Outcome, Rules, Shared, Work
from sim.groups.memory import Load, collecting, hosts_least, resident
from sim.groups.one_mind import (
    Groups,
    GroupsAction,
    JobEnded,
    JobSubmitted,
    Progressed,
    ReviewDue,
    SetGroup,
    SubtaskReported,
)
from sim.groups.workload import Job
from sim.kernel import Kernel

ALONE_ON = (4, 6, 8, 10, 12, 16, 20, 25, 33)
"""Numbers of hosts per job that are tried for isolated jobs."""
TIMINGS = 1
"""Iterations after which a job counts as profiled: in virtual time all of a job's are alike."""
CURVE_S = 600.0


@dataclass(frozen=True)
class Setting:
    """What a run of `groups` assumes."""

    hosts: int = 100
    manner: GroupRules = OURS
    error: float = 0.05
    """Largest share by which measured times are wrong; each job's are always wrong by the same share."""
    move_s: float = 30.0
    """Seconds that a job pauses when its hosts change."""
    gap: float = 0.1
    contention: float = 0.1
    talking: float = 0.0
    """Share of processors that a COMM takes; the model of the paper (equations 4.1 to 4.4) has none."""
    declared: bool = False
    """Whether jobs declare how many iterations they will do."""
    spill: bool = True
    """Whether arranged groups spill; if False, jobs spill only while they are tried out."""
    group_max: int | None = None
    """Most jobs in a group; None: no limit."""
    seed: int = 1


def isolated(jobs: Sequence[Job], setting: Setting) -> tuple[Outcome, int]:
    """First come, first served, each job on hosts of its own: the number of hosts that keeps the processors busiest
    over the whole run (§4.4.1). Returns the outcome and that number, found by trying all of `ALONE_ON`, which a real
    cluster cannot do."""
    sizes = [each for each in ALONE_ON if each <= setting.hosts] or [setting.hosts]
    tried = [(alone(jobs, setting, each), each) for each in sizes]
    return max(tried, key=lambda each: each[0].cpu)


def alone(jobs: Sequence[Job], setting: Setting, each: int) -> Outcome:
    """First come, first served, with `each` hosts per job, more where a job's memory needs them; left-over hosts too
    few for another job go to the one that starts."""
    ends: Kernel[float, int] = Kernel(0.0)
    """Ends of jobs, each with the number of hosts that it gives back."""
    free, now_s = setting.hosts, 0.0
    spans: list[tuple[float, float, int, float]] = []
    jct, busy, useful = [], 0.0, 0.0
    for job in sorted(jobs, key=lambda job: job.submit_s):
        now_s = max(now_s, job.submit_s)
        least = min(setting.hosts, max(each, hosts_least(job.input_gb, job.model_gb)))
        while (end_s := ends.next_at()) is not None and (end_s <= now_s or free < least):
            free += ends.pop()
            now_s = max(now_s, end_s)
        given = free if free < least + each else least
        load = Load(job.profile.work_s / given, job.profile.net_s, job.input_gb / given, job.model_gb / given)
        comp_s = resident([load]).comp_s[0]
        took_s = (comp_s + job.profile.net_s) * job.iterations
        ends.post(now_s + took_s, given)
        free -= given
        jct.append(now_s + took_s - job.submit_s)
        busy += comp_s * given * job.iterations
        useful += job.profile.work_s * job.iterations
        spans.append((now_s, now_s + took_s, given, comp_s / (comp_s + job.profile.net_s)))
    first, last = min(job.submit_s for job in jobs), max(end for _, end, _, _ in spans)
    total = (last - first) * setting.hosts
    talked = sum((end - start) * given * (1 - cpu) for start, end, given, cpu in spans) * (1 - setting.gap)
    at_once = sum(end - start for start, end, _, _ in spans) / (last - first)
    busy += setting.talking * talked
    return Outcome(
        jct, last - first, busy / total, talked / total, useful / total, at_once, at_once, curve=_curve(spans, setting)
    )


def thrown(jobs: Sequence[Job], setting: Setting, each: int, together: int = 2, turns: bool = False) -> Outcome:
    """First come, first served, on sets of `each` hosts: up to `together` jobs in a set if their memory fits; subtasks
    take turns or not."""
    count = max(1, setting.hosts // each)
    sizes = [setting.hosts // count + (1 if n < setting.hosts % count else 0) for n in range(count)]
    rules = Rules(turns, setting.contention, setting.gap, setting.talking, spill=False)
    waiting: list[Work] = []

    def arrange(cluster: Cluster, event: Event, job: Work) -> None:
        if not cluster.groups:
            cluster.groups = [Shared([], size, rules) for size in sizes]
        if event == "came":
            waiting.append(job)
        for group in cluster.groups:
            group.at_s = cluster.now_s
        members = [[other for other in group.jobs if other.end_s is None] for group in cluster.groups]
        for _ in range(together):
            for group, those in zip(cluster.groups, members, strict=True):
                if waiting and len(those) < together and (not those or _fit([*those, waiting[0]], group.hosts)):
                    those.append(waiting.pop(0))
        for group, those in zip(cluster.groups, members, strict=True):
            if those != group.jobs:
                group.reorder(those, group.hosts)

    return Cluster(jobs, setting.hosts, arrange).run()


def thrown_best(jobs: Sequence[Job], setting: Setting, turns: bool = False) -> tuple[Outcome, int]:
    """The best of `thrown` over the hosts of a set, as the paper's naive baseline is the best of all tried (§4.4.1)."""
    tried = [(thrown(jobs, setting, each, turns=turns), each) for each in (12, 16, 20, 25, 33) if each <= setting.hosts]
    return min(
        tried or [(thrown(jobs, setting, setting.hosts, turns=turns), setting.hosts)],
        key=lambda each: each[0].makespan_s,
    )


def _fit(jobs: Sequence[Work], hosts: int) -> bool:
    loads = [Load(0, 0, job.job.input_gb / hosts, job.job.model_gb / hosts) for job in jobs]
    return collecting(resident(loads).full) < collecting(0.9)


def _curve(spans: Sequence[tuple[float, float, int, float]], setting: Setting) -> list[tuple[float, float, float]]:
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    found = []
    at_s = first
    while at_s < last:
        till = min(last, at_s + max(CURVE_S, (last - first) / 100))
        cpu = net = 0.0
        for start, end, given, share in spans:
            part = max(0.0, min(end, till) - max(start, at_s)) * given / (setting.hosts * (till - at_s))
            cpu += part * share
            net += part * (1 - share) * (1 - setting.gap)
        found.append(((at_s + till) / 2, cpu, net))
        at_s = till
    return found


def wrong_times(jobs: Sequence[Job], setting: Setting) -> dict[str, tuple[float, float]]:
    """The factors by which a job's times of computing and communicating are measured wrong."""
    rng = random.Random(setting.seed)
    off = setting.error
    return {job.profile.job: (1 + rng.uniform(-1, 1) * off, 1 + rng.uniform(-1, 1) * off) for job in jobs}


def grouped(jobs: Sequence[Job], setting: Setting, progress: Callable[[float], None] = lambda share: None) -> Outcome:
    """Run the jobs in groups as `plugins.interleave` makes them, from times measured with an error."""
    return _Grouped(jobs, setting).run(progress)


class _Grouped:
    """The plugin's machine and the cluster: each gets what the other did as an event."""

    def __init__(self, jobs: Sequence[Job], setting: Setting) -> None:
        self.setting, self.all = setting, list(jobs)
        self.home = Groups(
            [HostId(f"h{n:04}") for n in range(setting.hosts)], setting.manner, TIMINGS, setting.group_max
        )
        laps = LAPS if setting.manner.by_left else 1
        self.rules = Rules(gap=setting.gap, talking=setting.talking, spill=setting.spill, laps=laps)
        self.shared: dict[int, Shared] = {}
        self.place: dict[str, tuple[HostId, ...]] = {}
        self.wrong = wrong_times(jobs, setting)
        self.works: dict[str, Work] = {}
        self.told: dict[str, int] = {}

    def run(self, progress: Callable[[float], None]) -> Outcome:
        cluster = Cluster(
            self.all, self.setting.hosts, self._arrange, lambda job: job.done == TIMINGS, self._review, REVIEW_S
        )
        self.works = {job.name: job for job in cluster.jobs}
        return cluster.run(progress)

    def _arrange(self, cluster: Cluster, event: Event, job: Work) -> None:
        name, now_s = job.job.profile.job, cluster.now_s
        touched: set[int] = set()
        if event == "came":
            declared = job.job.iterations if self.setting.declared else None
            self._follow(self.home.handle(JobSubmitted(name, declared), now_s), touched)
        elif event == "ended":
            self._tell_progress(now_s, touched)
            self._follow(self.home.handle(JobEnded(name), now_s), touched)
        else:
            for timed in self._timed(job):
                self._follow(self.home.handle(timed, now_s), touched)
        self.home.check()
        self._settle(cluster, touched)

    def _review(self, cluster: Cluster) -> None:
        touched: set[int] = set()
        self._tell_progress(cluster.now_s, touched)
        self._follow(self.home.handle(ReviewDue(), cluster.now_s), touched)
        self.home.check()
        self._settle(cluster, touched)

    def _tell_progress(self, now_s: float, touched: set[int]) -> None:
        for group in self.shared.values():
            for job in group.jobs:
                if job.done > self.told.get(job.name, 0):
                    self.told[job.name] = job.done
                    for event in (Progressed(job.job.profile.job, job.done), *self._timed(job)):
                        self._follow(self.home.handle(event, now_s), touched)

    def _timed(self, job: Work) -> tuple[SubtaskReported, SubtaskReported]:
        on = len(self.place[job.name])
        comp, comm = self.wrong[job.job.profile.job]
        in_company = any(len(group.jobs) > 1 and job.name in group.jobs for group in self.home.groups.values())
        if in_company:  # others communicate beside nearly all of its COMPs
            comp /= 1 - self.setting.talking
        return (
            SubtaskReported(job.job.profile.job, "comp", job.cpu_s * comp, on),
            SubtaskReported(job.job.profile.job, "comm", job.job.profile.net_s * comm, on),
        )

    def _follow(self, actions: Sequence[GroupsAction], touched: set[int]) -> None:
        touched |= {action.group for action in actions if isinstance(action, SetGroup)}

    def _settle(self, cluster: Cluster, touched: set[int]) -> None:
        """Change the touched groups to what the machine decided; jobs whose hosts changed pause."""
        for at in sorted(touched):
            if at not in self.home.groups:
                self.shared.pop(at, None)
                continue
            wanted = self.home.groups[at]
            group = self.shared.setdefault(at, Shared([], len(wanted.hosts), self.rules))
            group.at_s = cluster.now_s
            group.rules = replace(self.rules, spill=self.setting.spill or not self.home.arranged)
            members = [self.works[name] for name in wanted.jobs]
            for job in members:
                was = self.place.get(job.name)
                if was is not None and was != wanted.hosts:
                    cluster.moves += 1
                    job.from_s = cluster.now_s + self.setting.move_s
                self.place[job.name] = wanted.hosts
            group.reorder(members, len(wanted.hosts))
            if self.home.arranged:
                cluster.spilled += group.felt.spilled
        cluster.groups = [self.shared[at] for at in sorted(self.shared)]
        assert set(self.shared) == set(self.home.groups), "the cluster runs the groups of the machine"
