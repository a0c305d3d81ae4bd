"""The tuner as the paper has it: hosts work or serve, a plan moves blocks between them (Cruise §3.3.1).

`covey-sim tuner` runs it on modelled hosts, for the tables of the paper. Live jobs have `machine/tuner.py`.

    measuring --- every worker has timed k mini-batches ---> deciding --- not worth 5 % ---> measuring, anew
        ^                                                        |
        |                                                        v worth it, or hosts left
        '------------------- all steps done ----------------- moving

The first mini-batches fluctuate, so a decision waits for `batches_min` of every worker (§3.4.1) and uses moving
averages. They still differ by chance, and the best split of hosts that differ by chance always looks better than the
present one: with mini-batches that spread by 10 % the tuner would find another 5 % to gain every time. So hosts of a
kind count as equal, with their median, but for those that differ from it by more than their own fluctuation explains. A
host that has not worked yet is like those of its kind, else like the median of all. What is gained is counted in whole
blocks, before and after, since the best shares are no whole blocks either.

A step that failed is ordered again; hosts that are to leave are emptied whatever it costs. The owner of a block changes
when its move is *done*, so an owner is known at every instant.

A host that is lost cannot be emptied. Its blocks change their owner at that instant: they go to the host to which
they were being sent, else evenly to hosts of the same role, and the new owners are ordered to recover them. Steps under
way between other hosts are waited for, the rest of the plan is dropped, and when all is recovered a new plan is made;
it need not gain 5 % if a host is without the blocks of its role. When no host is left the blocks wait for the next one.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import assert_never

import msgspec

from covey.core.events import LogEvent
from covey.core.ids import HostId, JobId
from plugins.tuner.machine.figures import Figure, measure, named, short
from plugins.tuner.policy import plan as planning
from plugins.tuner.policy.cost import HostCosts, Load, epoch_of_shares
from plugins.tuner.policy.gain import GAIN_MIN, is_worth_it
from plugins.tuner.policy.plan import Configuration, Plan
from plugins.tuner.policy.search import best
from plugins.tuner.policy.steps import Add, Delete, Kind, Move, Recover, Start, Step, Stop, Switch

BATCHES_MIN = 8
"""k: mini-batches of every worker before a decision. The paper waits for "a set" of them (§3.4.1) and names no
number."""
KINDS: tuple[Kind, ...] = ("data", "model")


class Available(msgspec.Struct, frozen=True):
    """A host that the job may use."""

    kind: str
    """Kind of the host: hosts of one kind count as equal until they are measured."""
    nic_bytes_per_s: float
    """Bytes per second that its network card is said to carry, until it is measured."""


# ---- events ----------------------------------------------------------------------------------------------------------


class BatchReported(msgspec.Struct, frozen=True):
    """A worker finished a mini-batch."""

    host: HostId
    samples: int
    compute_s: float


class NicReported(msgspec.Struct, frozen=True):
    host: HostId
    bytes_per_s: float


class HostsChanged(msgspec.Struct, frozen=True):
    """These hosts, and no others, are the job's to use from now on. Hosts that it works on and that are not named are
    alive and will be emptied; dead ones come as `HostLost`."""

    hosts: Mapping[HostId, Available]


class HostLost(msgspec.Struct, frozen=True):
    """This host is dead, and what it held is gone."""

    host: HostId


class StepDone(msgspec.Struct, frozen=True):
    plan: int
    at: int


class StepFailed(msgspec.Struct, frozen=True):
    plan: int
    at: int
    why: str


DisjointEvent = BatchReported | NicReported | HostsChanged | HostLost | StepDone | StepFailed

# ---- actions ---------------------------------------------------------------------------------------------------------


class Perform(msgspec.Struct, frozen=True):
    """Action: have this step done; the answer is `StepDone` or `StepFailed`. The same step may be ordered again."""

    plan: int
    at: int
    step: Step


DisjointAction = Perform | LogEvent


class DisjointTuner:
    """The tuner of one job. `now`: which host has which role and owns which blocks."""

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
        self.sample_s: dict[HostId, Figure] = {}
        self.nic: dict[HostId, Figure] = {}
        self.batches: dict[HostId, int] = {}
        self.computing = {host for host, role in now.roles.items() if role == "worker"}
        """Workers between their start and their stop."""
        self.orphans: dict[Kind, tuple[int, ...]] = {"data": (), "model": ()}
        """Blocks of lost hosts that no host is left to take."""
        self.plans = 0
        self.plan: Plan | None = None
        self.begun: set[int] = set()
        self.done: set[int] = set()

    @property
    def now(self) -> Configuration:
        return Configuration(dict(self.roles), dict(self.data), dict(self.model))

    def handle(self, event: DisjointEvent, now_s: float) -> Sequence[DisjointAction]:
        match event:
            case BatchReported():
                return self._timed(event)
            case NicReported():
                measure(self.nic, event.host, event.bytes_per_s)
                return []
            case HostsChanged():
                self.available = dict(event.hosts)
                self.batches = {host: count for host, count in self.batches.items() if host in self.available}
                if any(self.orphans.values()):
                    return self._recover([])
                return self._decide() if self._measured() or not self._is_sound() else []
            case HostLost():
                return self._lost(event.host)
            case StepDone():
                return self._step_done(event)
            case StepFailed():
                return self._step_failed(event)
            case _:
                assert_never(event)

    def check(self) -> None:
        for kind, count in zip(KINDS, (self.data_blocks, self.model_blocks), strict=True):
            blocks = [block for each in self._owned(kind).values() for block in each] + list(self.orphans[kind])
            assert len(blocks) == count == len(set(blocks)), f"{kind}: each block has exactly one owner"
            holding = {host for host, owned in self._owned(kind).items() if owned}
            assert holding <= set(self.roles), f"{kind}: who owns a block is there"
        heirs = self._heirs("data") if self.roles else []
        assert not (heirs and any(self.orphans.values())), "no block is without an owner while a host can take it"
        assert self.computing <= set(self.roles), "who computes is there"
        assert self.done <= self.begun, "what is done was begun"
        if self.plan is not None:
            waiting = {after for before, after in self.plan.edges if before not in self.done}
            assert not waiting & self.begun, "no step begins before those that it waits for"

    # ---- measuring ---------------------------------------------------------------------------------------------------

    def _timed(self, event: BatchReported) -> Sequence[DisjointAction]:
        if event.host not in self.roles or event.samples <= 0 or event.compute_s <= 0:
            return []
        measure(self.sample_s, event.host, event.compute_s / event.samples)
        if self.plan is not None or self.roles[event.host] != "worker":
            return []
        self.batches[event.host] = self.batches.get(event.host, 0) + 1
        return self._decide() if self._measured() else []

    def _measured(self) -> bool:
        working = [host for host, role in self.roles.items() if role == "worker"]
        return bool(working) and all(self.batches.get(host, 0) >= self.batches_min for host in working)

    def _leaving(self) -> list[HostId]:
        return sorted(host for host in self.roles if host not in self.available)

    def hosts(self) -> list[HostCosts]:
        """The hosts that may be used, as the cost model sees them. Before the first measurement computing counts as
        slow as the network, which makes half of the hosts workers."""
        sample_s, nic = self._typical(self.sample_s), self._typical(self.nic)
        found = []
        for host, of in sorted(self.available.items()):
            rate = self._own(host, self.nic, nic.get(of.kind), of.nic_bytes_per_s)
            as_network = max(1e-12, self.load.model_bytes / rate / self.load.batch)
            other = statistics.median([each.mean for each in self.sample_s.values()] or [as_network])
            found.append(HostCosts(host, self._own(host, self.sample_s, sample_s.get(of.kind), other), rate))
        return found

    def _typical(self, figures: Mapping[HostId, Figure]) -> dict[str, float]:
        """Kind -> median of its measured hosts."""
        alike: dict[str, list[float]] = {}
        for host in sorted(figures):
            if host in self.available:
                alike.setdefault(self.available[host].kind, []).append(figures[host].mean)
        return {kind: statistics.median(means) for kind, means in alike.items()}

    def _own(self, host: HostId, figures: Mapping[HostId, Figure], typical: float | None, other: float) -> float:
        """The figure used for a host: its own when it was measured enough and differs from its kind, else the
        kind's."""
        if typical is None:
            return other
        own = figures.get(host)
        if own is None or own.count < self.batches_min or not own.differs(typical):
            return typical
        return own.mean

    # ---- deciding ----------------------------------------------------------------------------------------------------

    def _decide(self) -> Sequence[DisjointAction]:
        hosts = self.hosts()
        if self.plan is not None or len(hosts) < 2 or any(self.orphans.values()):
            return []
        self.batches = {}
        working = [host for host, role in self.roles.items() if role == "worker"]
        split = best(self.load, hosts, working, serving=self.roles.keys() - set(working))
        wanted = planning.target(split, self.data_blocks, self.model_blocks)
        now_s, then_s = self.epoch_s(hosts), self._epoch_s(hosts, wanted)
        is_sound, leaving = self._is_sound(), self._leaving()
        if is_sound and not is_worth_it(now_s, then_s, self.gain_min):
            return [self._note("Kept", f"{short(now_s)} an epoch; the best would be {short(then_s)}")]
        because = f"was {short(now_s)}" if is_sound else "a role or its blocks are missing"
        if leaving:
            because = f"{named(leaving)} must leave"
        text = f"{len(split.workers)} workers and {len(split.servers)} servers: {short(then_s)} an epoch; {because}"
        plan = planning.compiled(self.now, wanted, self.computing)
        if not plan.steps:
            return [self._note("Kept", text)]
        self.plan, self.begun, self.done = plan, set(), set()
        self.plans += 1
        return [self._note("Reconfigured", text), *self._order()]

    def epoch_s(self, hosts: Sequence[HostCosts]) -> float:
        """Seconds of an epoch with the present roles and blocks, by the cost model, in whole blocks."""
        counts = [{host: len(blocks) for host, blocks in self._owned(kind).items()} for kind in KINDS]
        return self._epoch_s(hosts, planning.Target(self.roles, *counts))

    def _epoch_s(self, hosts: Sequence[HostCosts], of: planning.Target) -> float:
        by = {host.host: host for host in hosts}
        workers = [host for host in sorted(of.roles) if of.roles[host] == "worker" and host in by]
        servers = [host for host in sorted(of.roles) if of.roles[host] == "server" and host in by]
        data = [self.load.samples * of.data.get(host, 0) / max(1, self.data_blocks) for host in workers]
        model = [self.load.model_bytes * of.model.get(host, 0) / max(1, self.model_blocks) for host in servers]
        return epoch_of_shares(self.load, [by[h] for h in workers], [by[h] for h in servers], data, model)

    # ---- moving ------------------------------------------------------------------------------------------------------

    def _order(self) -> list[DisjointAction]:
        if self.plan is None:
            return []
        due = planning.ready(self.plan, self.begun, self.done)
        self.begun |= set(due)
        return [Perform(self.plans, at, self.plan.steps[at]) for at in due]

    def _step_done(self, event: StepDone) -> Sequence[DisjointAction]:
        if self.plan is None or event.plan != self.plans or event.at not in self.begun - self.done:
            return []
        self.done.add(event.at)
        self._apply(self.plan.steps[event.at])
        if any(self.orphans.values()):
            return self._recover([])
        if len(self.done) < len(self.plan.steps):
            return self._order()
        return self._finished()

    def _finished(self) -> list[DisjointAction]:
        self.plan = None
        self.begun, self.done = set(), set()
        settled = self._note("Settled", f"plan {self.plans} is done")
        return [settled] if self._is_sound() else [settled, *self._decide()]

    def _step_failed(self, event: StepFailed) -> Sequence[DisjointAction]:
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
        elif isinstance(step, Start):
            self.computing.add(step.host)
        elif isinstance(step, Stop):
            self.computing.discard(step.host)
        elif isinstance(step, Move):
            owned = self._owned(step.kind)
            going = set(step.blocks)
            owned[step.source] = tuple(block for block in owned[step.source] if block not in going)
            owned[step.target] = tuple(sorted((*owned.get(step.target, ()), *step.blocks)))

    # ---- losing ------------------------------------------------------------------------------------------------------

    def _lost(self, host: HostId) -> list[DisjointAction]:
        self.available.pop(host, None)
        self.batches.pop(host, None)
        self.computing.discard(host)
        role = self.roles.pop(host, None)
        concerned = self.plan is not None and any(_concerns(step, host) for step in self.plan.steps)
        if role is None and not concerned:
            return []
        under_way = [] if self.plan is None else [self.plan.steps[at] for at in sorted(self.begun - self.done)]
        moving = [step for step in under_way if isinstance(step, Move)]
        for kind in KINDS:
            self.orphans[kind] += self._owned(kind).pop(host, ())
        if self.plan is not None:
            steps = self.plan.steps
            dropped = {at for at in range(len(steps)) if at not in self.begun or _concerns(steps[at], host)}
            self.begun |= dropped
            self.done |= dropped
            self.plan = Plan(steps, ())
        taken_back = [Recover(each.kind, each.source, each.blocks) for each in moving if each.target == host]
        note = self._note("HostLost", f"{host}, {role or 'about to join'}")
        return [note, *self._recover([each for each in moving if each.source == host], taken_back)]

    def _recover(self, moving: Sequence[Move], taken_back: Sequence[Recover] = ()) -> list[DisjointAction]:
        """Give orphaned blocks owners, which recover them, beside the steps under way."""
        steps: list[Step] = list(taken_back)
        waits = self.plan is not None and bool(self.begun - self.done)
        if any(self.orphans.values()) and not self.roles and self.available and not waits:
            first = min(self.available)
            self.roles[first] = "server"  # the one host that is left, until there is a second
            steps.append(Add(first, "server"))
        for kind in KINDS:
            of_it = [move for move in moving if move.target in self.roles]
            taken = planning.after_loss(kind, self.orphans[kind], of_it, self._heirs(kind))
            given = {block for blocks in taken.values() for block in blocks}
            for heir, blocks in taken.items():
                self._owned(kind)[heir] = tuple(sorted((*self._owned(kind).get(heir, ()), *blocks)))
                steps.append(Recover(kind, heir, blocks))
            self.orphans[kind] = tuple(block for block in self.orphans[kind] if block not in given)
        if self.plan is None:
            if not steps:
                return list(self._decide()) if self.roles and not self._is_sound() else []
            self.plans += 1
            self.plan, self.begun, self.done = Plan((), ()), set(), set()
        before = len(self.plan.steps)
        added = [at for at, step in enumerate(steps, before) if isinstance(step, Add)]
        edges = [(add, at) for add in added for at in range(before, before + len(steps)) if at != add]
        self.plan = Plan((*self.plan.steps, *steps), tuple(edges))
        return self._order() if len(self.done) < len(self.plan.steps) else self._finished()

    def _heirs(self, kind: Kind) -> list[HostId]:
        """Hosts that may take blocks of a lost host: hosts of the role, not being deleted; else any that is there."""
        deleting = [self.plan.steps[at] for at in self.begun - self.done] if self.plan is not None else []
        there = [host for host in sorted(self.roles) if not _is_deleted(host, deleting)]
        staying = [host for host in there if host in self.available]
        role = "worker" if kind == "data" else "server"
        return [host for host in staying if self.roles[host] == role] or staying or there

    def _is_sound(self) -> bool:
        """Does every host do what its role says, with the blocks of its role, and may it stay?"""
        workers = {host for host, role in self.roles.items() if role == "worker"}
        servers = set(self.roles) - workers
        return (
            bool(workers and servers)
            and workers == self.computing
            and {host for host, owned in self.data.items() if owned} <= workers
            and {host for host, owned in self.model.items() if owned} <= servers
            and not self._leaving()
        )

    def _owned(self, kind: Kind) -> dict[HostId, tuple[int, ...]]:
        return self.data if kind == "data" else self.model

    def _note(self, event: str, reason: str) -> LogEvent:
        return LogEvent(subject=self.job, event=event, reason=reason)


def _is_deleted(host: HostId, steps: Sequence[Step]) -> bool:
    return any(isinstance(step, Delete) and step.host == host for step in steps)


def _concerns(step: Step, host: HostId) -> bool:
    return host in (step.source, step.target) if isinstance(step, Move) else step.host == host
