"""A rack in virtual time for the groups of jobs: the machines of agents, and jobs whose iterations take what the model
says."""

from collections.abc import Sequence

import msgspec

from covey.core.ids import HostId, JobId
from plugins.interleave.policy.model import JobProfile, iteration_s
from sim.groups.agents import Agents


class Progress(msgspec.Struct):
    """A job as it really is, and its mini-batches."""

    profile: JobProfile
    done: float = 0.0
    told: int = 0


class Rack(Agents):
    """Hosts `h1`.. with a machine each, and the log. `step` is one second."""

    def __init__(self, hosts: int, seed: int = 1, loss: float = 0.0, late_s: float = 0.05, review_s: float = 600.0):
        super().__init__([HostId(f"h{n}") for n in range(1, hosts + 1)], seed, loss, late_s, review_s)
        self.jobs: dict[JobId, Progress] = {}

    def begin(self, job: JobId, hosts: Sequence[HostId], work_s: float, net_s: float, most: int = 8) -> None:
        self.jobs[job] = Progress(JobProfile(job, work_s, net_s))
        self.submit(job, hosts, most)

    def end(self, job: JobId) -> None:
        del self.jobs[job]
        super().end(job)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.step()

    def step(self) -> None:
        self.now_s += 1.0
        for job in self.jobs:
            self._compute(job)
        self.second(self.now_s)
        self.check()

    def apart(self) -> list[tuple[tuple[JobId, ...], int]]:
        """The jobs of each group, and the number of its hosts."""
        return [(group.jobs, len(group.hosts)) for group in self.groups()]

    def _compute(self, name: JobId) -> None:
        """Each job does one mini-batch in an iteration of its group."""
        job = self.jobs[name]
        group = next(group for group in self.groups() if name in group.jobs)
        each_s = iteration_s([self.jobs[other].profile for other in group.jobs], len(group.hosts))
        job.done += 1.0 / max(each_s, 1e-6)
        while job.told < int(job.done):
            job.told += 1
            hosts = self.hosts_of(name)
            for host in hosts:
                self.stepped(name, host, job.told, each_s, job.profile.work_s / len(hosts), job.profile.net_s)
