"""A pool of shared GPUs for the cases of classes and quotas: the agents' `Queue` and `Leader` decide, this performs.

Each event of a case becomes a command of the log or a measurement, then the leader looks. A look that demotes or
upgrades starts no job, so it looks again until it has; once more when a gang that kept GPUs has started, because only
then another may keep some. A job that is granted GPUs starts at once, where the leader's own view of the pool puts it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.leader.leader import Leader, RackHost, ScheduleTick
from plugins.scheduler.machine.leader.shared_capacity import SharedCapacity, SharedGpus, Sharing, host_of
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.messages.commands import (
    Attained,
    CancelAsked,
    Command,
    Demoted,
    GpusKept,
    Granted,
    NotApplied,
    Placed,
    RanksReported,
    Result,
    Submitted,
    Upgraded,
)
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.policy.shared import BUSY, part_of
from sim.vectors.types import finite, whole_number

GPUS_MAX = 4096
"""Most GPUs that one gang may have."""
LOOKS_MAX = 1000
STEPS = {"DEMOTE": 0, "UPGRADE": 1, "START_RG": 2, "RESERVE": 2, "START_OT": 3}
"""The order in which a case names what happens at one event."""
Action = list[Any]


class SharedPool:
    """The pool of `config` and `events` of a case. `handle` says what became of each event, in the words of the
    case."""

    def __init__(self, config: Mapping[str, Any], events: Sequence[Sequence[Any]]) -> None:
        self.gpus = whole_number("n", config["n"], 1, GPUS_MAX)
        self.each = whole_number("per_node", config["per_node"], 1, GPUS_MAX)
        quotas: dict[str, int] = config["quota"]
        if sum(quotas.values()) > self.gpus:
            raise ValueError(f"quotas of {sum(quotas.values())} GPUs in a pool of {self.gpus}")
        jobs = [event[2] for event in events if event[0] == "submit"]
        self.numbers = _numbers(events)
        queues = 1 + max([whole_number("q", job.get("q", 0), 0, 100) for job in jobs], default=0)
        settings = SchedulerSettings(
            queue_thresholds_gpu_s=tuple(float(queue) for queue in range(1, queues)),
            narrow_first=False,
            preemption=False,
            demote_after_s=finite(config.get("demote_after")),
            starve_limit_s=None,
            quotas=quotas,
            default_quota=0,
        )
        self.queue = JobTable()
        sharing = Sharing(beside=config.get("ot_per_gpu", 1), busy=config.get("M", BUSY))
        self.leader = Leader(self.queue, settings, sharing)
        self.utilisation = [0.0] * self.gpus
        self.names: dict[JobId, str] = {}
        self.ids: dict[str, JobId | None] = {}
        """Id of each job in the log; None: the log refused it, because it needs more than its tenant's quota."""
        self._look(0.0)

    def handle(self, event: Sequence[Any]) -> list[Action]:
        """Apply an event. Raises ValueError when a job comes twice, or one ends that is not there."""
        what: Any
        kind, now_s, what = event[0], event[1], event[2] if len(event) > 2 else {}
        match kind:
            case "submit":
                self._submit(what, now_s)
            case "finish":
                self._finish(str(what), now_s)
            case "util":
                for gpu, share in what.items():
                    self.utilisation[whole_number("a GPU", int(gpu), 0, self.gpus - 1)] = share
            case "tick":
                pass
            case _:
                raise ValueError(f"unknown event {kind!r}")
        return sorted(self._looks(now_s), key=lambda action: STEPS[action[0]])

    def check(self) -> None:
        """Assert the invariants of the log and of its leader."""
        self.queue.check()
        self.leader.check()

    # ---- what happens ----

    def _say(self, command: Command) -> Result:
        return apply(self.queue, self.queue.index + 1, command)[0]

    def _submit(self, what: Mapping[str, Any], now_s: float) -> None:
        name = str(what["id"])
        if name in self.ids:
            raise ValueError(f"{name} is here already")
        spec = JobSpec(
            name=name,
            tenant=what["tenant"],
            job_class=what["cls"],
            workers=whole_number("W", what["W"], 1, GPUS_MAX),
            argv=("x",),
            pack="host" if what.get("same_node", False) else "any",
        )
        self.queue.next_number = self.numbers[name]
        may_demote = self.leader.settings.demote_after_s is not None
        key = f"job-{self.numbers[name]:08}"
        result = self._say(Submitted(wall_s=now_s, key=key, spec=spec, may_demote=may_demote))
        if isinstance(result, NotApplied):
            self.ids[name] = None
            return
        assert result.job is not None
        self.ids[name], self.names[result.job] = result.job, name
        if what.get("q", 0):
            served = {result.job: float(what["q"])}
            self._say(Attained(wall_s=now_s, host=self._host(0), service_gpu_s=served))

    def _finish(self, name: str, now_s: float) -> None:
        if name not in self.ids:
            raise ValueError(f"{name} is not here")
        id = self.ids.pop(name)
        if id is None:
            return
        job = self.queue.jobs[id]
        if not job.placed:
            self._say(CancelAsked(wall_s=now_s, job=id))
            return
        for place in job.start.places:
            codes = dict.fromkeys(place.ranks, 0)
            self._say(
                RanksReported(wall_s=now_s, job=id, epoch=job.grant.epoch, host=place.host, codes=codes, asked=False)
            )

    # ---- what the leader says ----

    def _looks(self, now_s: float) -> Iterator[Action]:
        for _ in range(LOOKS_MAX):
            commands, keeps = self._look(now_s), self.queue.keeper
            for command in commands:
                yield from self._perform(command, now_s)
            moved = any(isinstance(command, Demoted | Upgraded) for command in commands)
            started = keeps is not None and any(isinstance(each, Granted) and each.job == keeps for each in commands)
            if not moved and not started:
                return
        raise ValueError("the leader does not stop deciding")

    def _look(self, now_s: float) -> list[Command]:
        """Commands that the leader proposes and the log takes."""
        hosts = -(-self.gpus // self.each)
        rack = tuple(self._rack_host(at) for at in range(hosts))
        proposed = [action.command for action in self.leader.handle(ScheduleTick(rack, now_s), now_s)]
        return [command for command in proposed if not isinstance(self._say(command), NotApplied)]

    def _rack_host(self, at: int) -> RackHost:
        shares = tuple(self.utilisation[at * self.each : (at + 1) * self.each])
        return RackHost(self._host(at), len(shares), shared=SharedGpus(utilisation=shares))

    def _host(self, at: int) -> HostId:
        return HostId(f"{at:04}")

    def _perform(self, command: Command, now_s: float) -> Iterator[Action]:
        match command:
            case Demoted():
                yield ["DEMOTE", self.names[command.job]]
            case Upgraded():
                yield ["UPGRADE", self.names[command.job]]
            case GpusKept() if command.gpus:
                yield ["RESERVE", self.names[command.job], [self.number(unit) for unit in command.gpus]]
            case Granted():
                job = self.queue.jobs[command.job]
                units = self._place(job, now_s)
                yield ["START_RG" if job.counts else "START_OT", self.names[job.id], [*map(self.number, units)]]
            case _:
                pass

    def number(self, unit: HostId) -> int:
        """Number of the GPU, as the case names it."""
        return int(host_of(unit)) * self.each + int(unit.rpartition("/")[2])

    def _place(self, job: Job, now_s: float) -> list[HostId]:
        """Start the job where the pool as it is now says, as its coordinator and its hosts do."""
        capacity = SharedCapacity(
            self.queue,
            self.leader.capacity.totals,
            None,
            self.leader.sharing or Sharing(),
            {host.host: host.shared for host in self.leader.rack if host.shared is not None},
        )
        units = list(capacity.plan(job, capacity.free_for(job), None, 1.0))
        gpus: dict[HostId, list[str]] = {}
        for unit in units:
            gpus.setdefault(host_of(unit), []).append(self._part(job, host_of(unit), unit.rpartition("/")[2]))
        places, rank = [], 0
        for host, held in gpus.items():
            places.append(Place(host, tuple(range(rank, rank + len(held))), tuple(held)))
            rank += len(held)
        placed = Placed(
            wall_s=now_s, job=job.id, epoch=job.grant.epoch, places=tuple(places), master_addr="", master_port=1
        )
        result = self._say(placed)
        assert not isinstance(result, NotApplied), result
        return units

    def _part(self, job: Job, host: HostId, gpu: str) -> str:
        """The GPU, or a free part of it: an upgraded job keeps the part that it has."""
        if job.counts:
            return gpu
        held = self.queue.holders.get(host, {})
        return next(part for part in (part_of(gpu, number) for number in range(len(held) + 1)) if part not in held)


def _numbers(events: Sequence[Sequence[Any]]) -> dict[str, int]:
    """Numbers that the log would give the jobs: jobs of one second come by id."""
    given = {str(event[2]["id"]): event[1] for event in reversed(events) if event[0] == "submit"}
    return {name: at for at, name in enumerate(sorted(given, key=lambda name: (given[name], name)), 1)}
