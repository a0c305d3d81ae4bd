"""Which jobs are in which state and on which host, brought up to date with each job that changed."""

from collections.abc import Collection, Iterable

from covey.core.ids import HostId, JobId
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job


class JobIndex:
    """Jobs that are not over, as far as a leader has to find them again."""

    def __init__(self, queue: JobTable) -> None:
        self.queue = queue
        self.placing: dict[JobId, None] = {}
        self.time_limit_reached: dict[JobId, None] = {}
        """Running jobs that used up their time."""
        self.demoted: dict[str, dict[int, dict[JobId, None]]] = {}
        """Opportunistic jobs that run and were guaranteed once: by tenant and width."""
        self.healing: dict[JobId, None] = {}
        """Running jobs that may lose hosts."""
        self.elastic: dict[JobId, None] = {}
        """Elastic jobs that run."""
        self.awaited: dict[HostId, dict[JobId, None]] = {}
        """Host -> placed gangs whose ranks it has still to report."""
        self.coordinators: dict[HostId, int] = {}
        """Host -> gangs that it looks for a place for."""
        self.named: dict[HostId, float | None] = {}
        """Hosts that gossip named, and for how long each is gone."""
        self.unnamed: dict[HostId, None] = {}
        """Hosts that matter here and that gossip never named."""
        self._marks: dict[JobId, tuple[Job, tuple[HostId, ...], HostId | None, int | None]] = {}
        """What is noted of each job: hosts awaited, coordinator while it is being placed, width while it may be
        upgraded."""

    def put(self, job: Job) -> None:
        """Index the job as it is now."""
        self.drop(job.id)
        id, spec = job.id, job.spec
        hosts = tuple(place.host for place in job.awaited)
        coordinator = job.grant.coordinator if job.state == "placing" else None
        limit_s = spec.runs_for_s
        demoted = job.state == "running" and job.priority.demoted is not None and not job.counts
        if job.state == "placing":
            self.placing[id] = None
        elif job.state == "running" and limit_s is not None and job.ran_of_limit_s(self.queue.rack_s) >= limit_s:
            self.time_limit_reached[id] = None
        if job.state == "running" and job.healing.may_be_lost:
            self.healing[id] = None
        if job.state == "running" and spec.elastic:
            self.elastic[id] = None
        for host in hosts:
            self.awaited.setdefault(host, {})[id] = None
        if coordinator is not None:
            self.coordinators[coordinator] = self.coordinators.get(coordinator, 0) + 1
        if demoted:
            self.demoted.setdefault(spec.tenant, {}).setdefault(spec.gpus, {})[id] = None
        if hosts or coordinator is not None:
            self._marks[id] = job, hosts, coordinator, spec.gpus if demoted else None
            self._name(hosts if coordinator is None else (coordinator,))

    def drop(self, id: JobId) -> None:
        """Remove a job that is over, or about to be put in again."""
        self.placing.pop(id, None)
        self.time_limit_reached.pop(id, None)
        self.healing.pop(id, None)
        self.elastic.pop(id, None)
        if id not in self._marks:
            return
        job, hosts, coordinator, width = self._marks.pop(id)
        for host in hosts:
            del self.awaited[host][id]
            if not self.awaited[host]:
                del self.awaited[host]
        if coordinator is not None:
            self.coordinators[coordinator] -= 1
            if not self.coordinators[coordinator]:
                del self.coordinators[coordinator]
        if width is not None:
            widths = self.demoted[job.spec.tenant]
            del widths[width][id]
            if not widths[width]:
                del widths[width]
            if not widths:
                del self.demoted[job.spec.tenant]
        self._name(hosts if coordinator is None else (coordinator,))

    def heard(self, named: dict[HostId, float | None]) -> None:
        """Take in what gossip says of all hosts now."""
        self.named, self.unnamed = named, {}
        self._name([*self.awaited, *self.coordinators])

    def _name(self, hosts: Iterable[HostId]) -> None:
        for host in hosts:
            if host not in self.named and (host in self.awaited or host in self.coordinators):
                self.unnamed[host] = None
            else:
                self.unnamed.pop(host, None)

    def by_age(self, ids: Collection[JobId]) -> list[Job]:
        """These jobs in order of admission."""
        return sorted([self.queue.jobs[id] for id in ids], key=lambda job: job.number) if ids else []
