"""The tuner of one job, at its home: measures, decides, and walks a plan to its end (Cruise §3.3.1).

    measuring --- every worker has timed k mini-batches ---> deciding --- not worth 5 % ---> measuring, anew
        ^                                                        |
        |                                                        v worth it, or hosts left
        '------------------- all steps done ----------------- moving

The first mini-batches fluctuate, so a decision waits for `batches_min` of every worker (§3.4.1) and uses moving
averages. A host that has not worked yet has no time per sample: it is taken for like those of its kind, else for the
median of all. A step that failed is ordered again; hosts that are to leave are emptied whatever it costs. The owner of
a block changes when its move is *done*, here and nowhere else, so an owner is known at every instant.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import assert_never

import msgspec

from covey.core import HostId, JobId, Note
from plugins.tuner.messages import Add, Delete, Move, Step, Switch
from plugins.tuner.policy import plan as planning
from plugins.tuner.policy.cost import Host, Load, epoch_of_shares
from plugins.tuner.policy.plan import GAIN_MIN, Configuration, Plan
from plugins.tuner.policy.search import best

BATCHES_MIN = 8
"""k: mini-batches of every worker before a decision. The paper waits for "a set" of them (§3.4.1) and names no
number."""
WEIGHT = 0.2
"""Of the newest measurement in the moving averages (§3.3.1)."""


class Available(msgspec.Struct, frozen=True):
    """A host that the job may use."""

    kind: str
    """Hosts of one kind are taken for equal until they are measured."""
    nic_bytes_per_s: float
    """What its network card is said to carry, until it is measured."""


# ---- events ----------------------------------------------------------------------------------------------------------


class BatchTimed(msgspec.Struct, frozen=True):
    """A worker finished a mini-batch."""

    host: HostId
    samples: int
    compute_s: float


class NicMeasured(msgspec.Struct, frozen=True):
    host: HostId
    bytes_per_s: float


class HostsChanged(msgspec.Struct, frozen=True):
    """These hosts, and no others, are the job's to use from now on."""

    hosts: Mapping[HostId, Available]


class StepDone(msgspec.Struct, frozen=True):
    plan: int
    at: int


class StepFailed(msgspec.Struct, frozen=True):
    plan: int
    at: int
    why: str


TunerEvent = BatchTimed | NicMeasured | HostsChanged | StepDone | StepFailed

# ---- actions ---------------------------------------------------------------------------------------------------------


class Perform(msgspec.Struct, frozen=True):
    """Have this step done; comes back as `StepDone` or `StepFailed`. The same step may be ordered again."""

    plan: int
    at: int
    step: Step


TunerAction = Perform | Note


class Tuner:
    """One job. `now` is who has which role and owns which blocks."""

    def __init__(
        self,
        job: JobId,
        load: Load,
        now: Configuration,
        available: Mapping[HostId, Available],
        batches_min: int = BATCHES_MIN,
        gain_min: float = GAIN_MIN,
    ) -> None:
        self.job, self.load = job, load
        self.roles, self.data, self.model = dict(now.roles), dict(now.data), dict(now.model)
        self.available = dict(available)
        self.batches_min, self.gain_min = batches_min, gain_min
        self.data_blocks = sum(map(len, now.data.values()))
        self.model_blocks = sum(map(len, now.model.values()))
        self.sample_s: dict[HostId, float] = {}
        self.nic: dict[HostId, float] = {}
        self.batches: dict[HostId, int] = {}
        self.plans = 0
        self.plan: Plan | None = None
        self.begun: set[int] = set()
        self.done: set[int] = set()

    @property
    def now(self) -> Configuration:
        return Configuration(dict(self.roles), dict(self.data), dict(self.model))

    def handle(self, event: TunerEvent, now_s: float) -> Sequence[TunerAction]:
        match event:
            case BatchTimed():
                return self._timed(event)
            case NicMeasured():
                self.nic[event.host] = _averaged(self.nic.get(event.host), event.bytes_per_s)
                return []
            case HostsChanged():
                self.available = dict(event.hosts)
                self.batches = {host: count for host, count in self.batches.items() if host in self.available}
                return self._decide() if self._leaving() or self._measured() else []
            case StepDone():
                return self._step_done(event)
            case StepFailed():
                return self._step_failed(event)
            case _:
                assert_never(event)

    def check(self) -> None:
        for kind, owned, count in (("data", self.data, self.data_blocks), ("model", self.model, self.model_blocks)):
            blocks = [block for each in owned.values() for block in each]
            assert len(blocks) == count == len(set(blocks)), f"{kind}: each block has exactly one owner"
        assert self.done <= self.begun, "what is done was begun"
        if self.plan is not None:
            waiting = {after for before, after in self.plan.edges if before not in self.done}
            assert not waiting & self.begun, "no step begins before those that it waits for"

    # ---- measuring ---------------------------------------------------------------------------------------------------

    def _timed(self, event: BatchTimed) -> Sequence[TunerAction]:
        if event.host not in self.roles or event.samples <= 0:
            return []
        self.sample_s[event.host] = _averaged(self.sample_s.get(event.host), event.compute_s / event.samples)
        if self.plan is not None or self.roles[event.host] != "worker":
            return []
        self.batches[event.host] = self.batches.get(event.host, 0) + 1
        return self._decide() if self._measured() else []

    def _measured(self) -> bool:
        working = [host for host, role in self.roles.items() if role == "worker"]
        return bool(working) and all(self.batches.get(host, 0) >= self.batches_min for host in working)

    def _leaving(self) -> list[HostId]:
        return sorted(host for host in self.roles if host not in self.available)

    def hosts(self) -> list[Host]:
        """The hosts that may be used, as the cost model sees them; empty before the first measurement."""
        known = {host: value for host, value in sorted(self.sample_s.items()) if value > 0}
        if not known:
            return []
        found = []
        for host, of in sorted(self.available.items()):
            alike = [value for each, value in known.items() if each in self.available and self._kind(each) == of.kind]
            typical = statistics.median(alike or list(known.values()))
            found.append(Host(host, known.get(host, typical), self.nic.get(host, of.nic_bytes_per_s)))
        return found

    def _kind(self, host: HostId) -> str:
        return self.available[host].kind

    # ---- deciding ----------------------------------------------------------------------------------------------------

    def _decide(self) -> Sequence[TunerAction]:
        hosts = self.hosts()
        if self.plan is not None or len(hosts) < 2:
            return []
        working = [host for host, role in self.roles.items() if role == "worker"]
        split = best(self.load, hosts, working)
        leaving = self._leaving()
        epoch_s = self.epoch_s(hosts)
        self.batches = {}
        if not leaving and not planning.is_worth_it(epoch_s, split.epoch_s, self.gain_min):
            return [self._note("Kept", f"{_short(epoch_s)} an epoch; the best would be {_short(split.epoch_s)}")]
        wanted = planning.target(split, self.data_blocks, self.model_blocks)
        self.plan = planning.compiled(self.now, wanted)
        self.plans += 1
        self.begun, self.done = set(), set()
        because = f"{', '.join(leaving)} must leave" if leaving else f"was {_short(epoch_s)}"
        roles = f"{len(split.workers)} workers and {len(split.servers)} servers"
        text = f"{roles}: {_short(split.epoch_s)} an epoch; {because}"
        if not self.plan.steps:
            self.plan = None
            return [self._note("Kept", text)]
        return [self._note("Reconfigured", text), *self._order()]

    def epoch_s(self, hosts: Sequence[Host]) -> float:
        """Seconds of an epoch as things stand now, by the cost model, whole blocks and all."""
        by = {host.host: host for host in hosts}
        workers = [host for host in sorted(self.roles) if self.roles[host] == "worker" and host in by]
        servers = [host for host in sorted(self.roles) if self.roles[host] == "server" and host in by]
        data = [self.load.samples * len(self.data.get(host, ())) / max(1, self.data_blocks) for host in workers]
        model = [self.load.model_bytes * len(self.model.get(host, ())) / max(1, self.model_blocks) for host in servers]
        return epoch_of_shares(self.load, [by[h] for h in workers], [by[h] for h in servers], data, model)

    # ---- moving ------------------------------------------------------------------------------------------------------

    def _order(self) -> list[TunerAction]:
        if self.plan is None:
            return []
        due = planning.ready(self.plan, self.begun, self.done)
        self.begun |= set(due)
        return [Perform(self.plans, at, self.plan.steps[at]) for at in due]

    def _step_done(self, event: StepDone) -> Sequence[TunerAction]:
        if self.plan is None or event.plan != self.plans or event.at not in self.begun - self.done:
            return []
        self.done.add(event.at)
        self._apply(self.plan.steps[event.at])
        if len(self.done) < len(self.plan.steps):
            return self._order()
        self.plan = None
        self.begun, self.done = set(), set()
        if self._leaving():
            return self._decide()
        return [self._note("Settled", f"plan {self.plans} is done")]

    def _step_failed(self, event: StepFailed) -> Sequence[TunerAction]:
        if self.plan is None or event.plan != self.plans or event.at not in self.begun - self.done:
            return []
        step = self.plan.steps[event.at]
        return [self._note("Retried", f"{type(step).__name__}: {event.why}"), Perform(event.plan, event.at, step)]

    def _apply(self, step: Step) -> None:
        if isinstance(step, Add):
            self.roles[step.host] = step.role
        elif isinstance(step, Switch):
            self.roles[step.host] = step.after
        elif isinstance(step, Delete):
            del self.roles[step.host]
            self.data.pop(step.host, None)
            self.model.pop(step.host, None)
        elif isinstance(step, Move):
            owned = self.data if step.kind == "data" else self.model
            going = set(step.blocks)
            owned[step.source] = tuple(block for block in owned[step.source] if block not in going)
            owned[step.target] = tuple(sorted((*owned.get(step.target, ()), *step.blocks)))

    def _note(self, event: str, reason: str) -> Note:
        return Note(subject=self.job, event=event, reason=reason)


def _averaged(old: float | None, measured: float, weight: float = WEIGHT) -> float:
    return measured if old is None else weight * measured + (1 - weight) * old


def _short(seconds: float) -> str:
    return f"{seconds:.3g} s"
