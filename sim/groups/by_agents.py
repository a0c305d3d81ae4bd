"""Jobs in groups that agents make, each host for itself, in virtual time.

Jobs run as in `sim/groups/cluster.py`, subtask by subtask; who shares hosts with whom is decided by the machines that
agents run (`sim/groups/agents.py`). A job that comes is placed by the scheduler's own rule for jobs that share hosts,
begins with few processes, and may have one on every host. No job waits: the log runs what it placed.
"""

from collections.abc import Callable, Sequence

from covey.core.ids import HostId, JobId
from plugins.interleave.policy.decide import effective_hosts
from plugins.interleave.policy.groups import AUTO, PlacedGroup
from plugins.interleave.policy.turn_order import turn_order
from plugins.scheduler.policy.place import in_company, spread
from sim.groups.agents import Agents
from sim.groups.cluster import Cluster, Event, Outcome, Rules, Shared, Work
from sim.groups.strategies import Setting, wrong_times
from sim.groups.workload import Job

LOOK_S = 5.0
"""Seconds between two looks of a host. Agents look every second: with 1, 2 and 5 s two seeds had the same moves, and
gains that differ by at most 1.1 %."""
ORDER_S = 60.0
"""Seconds after which the order of turns follows what jobs have left."""
FEWEST = 4
"""Processes with which a job begins."""


def by_agents(jobs: Sequence[Job], setting: Setting, progress: Callable[[float], None] = lambda share: None) -> Outcome:
    """Run the jobs on the hosts of one rack, grouped by its agents from times measured with an error."""
    return _ByAgents(jobs, setting).run(progress)


class _ByAgents:
    """The agents and the cluster: each gets what the other did."""

    def __init__(self, jobs: Sequence[Job], setting: Setting) -> None:
        self.setting, self.all = setting, list(jobs)
        self.hosts = [HostId(f"h{n:03}") for n in range(setting.hosts)]
        self.agents = Agents(self.hosts, setting.seed)
        self.rules = Rules(gap=setting.gap, talking=setting.talking, spill=setting.spill)
        self.profiles = {job.profile.job: job.profile for job in jobs}
        self.wrong = wrong_times(jobs, setting)
        self.shared: dict[str, Shared] = {}
        """The groups, by the names that the log gives them."""
        self.seen: dict[str, PlacedGroup] = {}
        self.works: dict[JobId, Work] = {}
        self.places: dict[JobId, frozenset[HostId]] = {}
        self.began_s: dict[JobId, float] = {}
        """When each job began the iteration that it is in."""
        self.ordered_s = 0.0

    def run(self, progress: Callable[[float], None]) -> Outcome:
        cluster = Cluster(self.all, self.setting.hosts, self._arrange, lambda job: True, self._look, LOOK_S)
        self.works = {job.job.profile.job: job for job in cluster.jobs}
        return cluster.run(progress)

    def _arrange(self, cluster: Cluster, event: Event, job: Work) -> None:
        name, self.agents.now_s = job.job.profile.job, cluster.now_s
        if event == "iterated":
            self._tell(job, cluster.now_s)
            return
        if event == "came":
            self._submit(name)
            self.began_s[name] = cluster.now_s
        else:
            self.agents.end(name)
        self._settle(cluster)

    def _submit(self, name: JobId) -> None:
        """Place a job as the scheduler places one that shares hosts with any other."""
        ranks = dict.fromkeys(self.hosts, 0)
        for placed in self.agents.placed().values():
            for host, count in placed.processes.items():
                ranks[host] += count
        company = {host for host, count in ranks.items() if count}
        fewest = min(FEWEST, self.setting.hosts)
        chosen = spread(in_company(ranks, AUTO, company, fewest, "few"), fewest)
        self.agents.submit(name, sorted(chosen), most=self.setting.hosts, fewest=fewest)

    def _look(self, cluster: Cluster) -> None:
        self.agents.second(cluster.now_s)
        self._settle(cluster)
        if cluster.now_s - self.ordered_s >= ORDER_S:
            self.ordered_s = cluster.now_s
            for name, group in self.seen.items():
                shared = self.shared[name]
                order = self._order(group)
                if order != shared.jobs:
                    shared.reorder(order, shared.hosts)

    def _tell(self, job: Work, now_s: float) -> None:
        name = job.job.profile.job
        hosts = self.agents.hosts_of(name)
        comp, comm = self.wrong[name]
        group = next(each for each in self.shared.values() if job in each.jobs)
        comp_s = job.cpu_s * comp * group.hosts / len(hosts)
        if len(group.jobs) > 1:  # others communicate beside nearly all of its computing
            comp_s /= 1 - self.setting.talking
        for host in hosts:
            took_s = now_s - self.began_s[name]
            self.agents.stepped(name, host, job.done, took_s, comp_s, job.job.profile.net_s * comm)
        self.began_s[name] = now_s

    def _order(self, group: PlacedGroup) -> list[Work]:
        left_s = self.agents.machines[group.hosts[0]].left_s(self.agents.now_s)
        return [self.works[job] for job in turn_order(group.jobs, left_s)]

    def _settle(self, cluster: Cluster) -> None:
        """Change the groups to what the log says; jobs whose hosts changed pause."""
        groups = {group.name: group for group in self.agents.groups()}
        if groups == self.seen:
            return
        self.agents.check()
        placed = self.agents.placed()
        for name, group in groups.items():
            if group == self.seen.get(name):
                continue
            hosts = effective_hosts(group, placed, self.profiles)
            shared = self.shared.setdefault(name, Shared([], hosts, self.rules))
            shared.at_s = cluster.now_s
            for job in group.jobs:
                self._place(cluster, job, placed[job].hosts)
            shared.reorder(self._order(group), hosts)
            cluster.spilled += shared.felt.spilled
        self.seen = groups
        self.shared = {name: self.shared[name] for name in groups}
        cluster.groups = [self.shared[name] for name in sorted(groups)]

    def _place(self, cluster: Cluster, job: JobId, hosts: frozenset[HostId]) -> None:
        """The job pauses if it had other hosts."""
        if self.places.get(job, hosts) != hosts:
            cluster.moves += 1
            self.works[job].from_s = cluster.now_s + self.setting.move_s
        self.places[job] = hosts
