"""What must hold whatever happens, checked over the whole simulated rack.

Each invariant is a small class with a name. Those with `every_s = 0` are checked after every single callback and are
so cheap that this costs little: they begin with "did this concern me?", or `after` says so. The others are checked
from time to time. They see everything at once, as no host can: the state of every agent, and what really runs.
"""

import zlib
from typing import Any, NamedTuple

from agent.raft.machine.raft import Role
from chaos.checks.books import BillsHold, GpusBilled
from chaos.checks.elastic import CarriedOnce, OneProcessEach, ProcessesPlaced
from chaos.checks.leaks import UnusedSlabs
from chaos.checks.ranks_seen import Rank, RanksHeld, known_job, newest_queue, ranks_of
from chaos.rack_seen import RackSeen
from chaos.world.loop import HostLoop
from chaos.world.world import Invariant, World
from covey.core.errors import Refused
from covey.core.ids import JobId

HEARTBEAT_S = 1.0
"""Seconds by which the age of a copy of the log may be told too low."""
FENCE_S = 30.0
"""Seconds for which ranks of a grant may still run once the log has ended it: their own grace and its sequel. A host
that was given up has none left by then (`RanksOnce`)."""
GANG_S = 150.0
"""Seconds within which a gang that began to start is whole or gone: a lost host is noticed, waited for and given up."""


class OneLeaderPerTerm:
    """Raft's election safety: at most one host leads in a term."""

    name, every_s = "at most one leader per term", 0.0
    after = "moved"

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack
        self.led: dict[int, str] = {}

    def forget(self) -> None:
        """Forget what was seen, since a new log begins."""
        self.led.clear()

    def check(self, world: World) -> None:
        raft = self.rack.moved
        if raft is not None and raft.role is Role.LEADER:
            who = self.led.setdefault(raft.term, str(raft.me))
            assert who == raft.me, f"{who} and {raft.me} both lead in term {raft.term}"


class LogsAgree:
    """State machine safety: whatever is committed at an index is the same everywhere, for ever, after restarts too."""

    name, every_s = "logs agree on what is committed", 0.0
    after = "moved"

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack
        self.committed: dict[int, tuple[int, int]] = {}
        """Index -> term and checksum of the command."""
        self.seen: dict[HostLoop, int] = {}
        """An agent's loop -> the index up to which its log was compared."""

    def forget(self) -> None:
        """Forget what was seen, since a new log begins."""
        self.committed.clear()
        self.seen.clear()

    def check(self, world: World) -> None:
        raft = self.rack.moved
        if raft is None or world.last is None:
            return
        seen = self.seen.get(world.last, 0)
        if raft.commit <= seen:
            return
        self.seen[world.last] = raft.commit
        log = raft._raft_log.log
        first = max(seen, log.base_index) + 1
        for index, entry in enumerate(log.slice(first, raft.commit), first):
            here = (entry.term, zlib.crc32(entry.command))
            known = self.committed.setdefault(index, here)
            assert known == here, f"{raft.me} has committed another command at {index}: {here}, elsewhere {known}"


class MachinesHold:
    """Every machine's own `check()` holds, on every host whose agent runs."""

    name, every_s = "the invariants of all machines", 1.0

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack

    def check(self, world: World) -> None:
        for name in self.rack.alive():
            for machine in machines_of(self.rack.agents[name]):
                try:
                    machine.check()
                except AssertionError as error:
                    raise AssertionError(f"{type(machine).__name__} of {name}: {error}") from error


def machines_of(agent: Any) -> list[Any]:
    """Everything with `handle` and `check` that the agent's parts hold."""
    found: list[Any] = []
    for part in (getattr(agent, "gossip", None), getattr(agent, "log", None), *getattr(agent, "plugins", {}).values()):
        for held in [] if part is None else vars(part).values():
            kind = _kinds.get(type(held)) or _kind(type(held))
            if kind.machine:
                found.append(held)
            if kind.may_hold:
                inside = [deeper for deeper in vars(held).values() if type(deeper) not in _plain]
                found += [deeper for deeper in inside if _kind(type(deeper)).machine]
    return found


class _Kind(NamedTuple):
    """What is known about the objects of one type: is it a machine, and is it a part of a plugin that may hold
    machines?"""

    machine: bool
    may_hold: bool


_kinds: dict[type, _Kind] = {}
_plain: set[type] = set()
"""Types that are no machines: most attributes have one of these."""


def _kind(of: type) -> _Kind:
    if of not in _kinds:
        machine = callable(getattr(of, "check", None)) and callable(getattr(of, "handle", None))
        _kinds[of] = _Kind(machine, of.__module__.startswith("plugins.") and bool(of.__dictoffset__))
        if not machine:
            _plain.add(of)
    return _kinds[of]


class PluginsLive:
    """No plugin of any agent failed, unless a disk did, or it waits for the administrator."""

    name, every_s = "no plugin fails", 1.0

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack

    def check(self, world: World) -> None:
        person = self.rack.administrator
        for name in self.rack.alive():
            for plugin, health in self.rack.agents[name].health.items():
                if plugin == "memory" and person is not None and person.must_help(name):
                    continue
                sick = "OSError" in health.why or "Errno" in health.why
                assert health.state != "failed" or sick, f"{plugin} of {name} failed: {health.why}"


class WorkloadsRight:
    """The users' programs found nothing wrong in what they check themselves: exact sums, no acknowledged page lost."""

    name, every_s = "workloads saw nothing wrong", 0.0
    after = "process_count"

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack

    def check(self, world: World) -> None:
        assert not self.rack.wrong, self.rack.wrong[0]


class GpusExclusive(RanksHeld):
    """A GPU never runs ranks of two grants at once, and a rank never runs twice under one grant. (Processes of an
    elastic job may be named alike for a moment, `chaos.checks.elastic`.)"""

    name = "a GPU belongs to one grant"

    def look(self, ranks: list[Rank]) -> None:
        owner: dict[str, Rank] = {}
        running: dict[tuple[str, int, int], str] = {}
        for rank in ranks:
            once = (rank.job, rank.epoch, rank.rank)
            if not rank.still and not rank.elastic:
                assert once not in running, f"{once} runs on {running[once]} and on {rank.host}"
                running[once] = rank.host
            for gpu in rank.gpus:
                other = owner.setdefault(gpu, rank)
                assert (other.job, other.epoch) == (rank.job, rank.epoch), (
                    f"{gpu} runs {other.job} under epoch {other.epoch} and {rank.job} under epoch {rank.epoch}"
                )


class GpusBeside(RanksHeld):
    """A shared GPU never runs ranks of two guaranteed jobs, nor of more than `beside` others. A job that started as
    opportunistic is guaranteed as soon as some host knows that it was upgraded."""

    name = "a GPU has one guaranteed job and so many others"

    def __init__(self, rack: RackSeen) -> None:
        super().__init__(rack)
        self._upgraded: dict[str, None] = {}

    def look(self, ranks: list[Rank]) -> None:
        guaranteed: dict[str, Rank] = {}
        others: dict[str, dict[tuple[str, int], None]] = {}
        for rank in ranks:
            counts = rank.job_class != "opportunistic" or self._is_upgraded(rank.job)
            for gpu in rank.gpus:
                if counts:
                    owner = guaranteed.setdefault(gpu, rank)
                    assert (owner.job, owner.epoch) == (rank.job, rank.epoch), (
                        f"{gpu} runs {owner.job} under epoch {owner.epoch} and {rank.job} under epoch {rank.epoch}, "
                        f"both guaranteed"
                    )
                else:
                    others.setdefault(gpu, {})[rank.job, rank.epoch] = None
        for gpu, jobs in others.items():
            assert len(jobs) <= self.rack.beside, f"{gpu} runs {sorted(jobs)} beside one another"

    def _is_upgraded(self, job: str) -> bool:
        """Whether the job was upgraded; remembered also when the agent that knew it died since."""
        if job in self._upgraded:
            return True
        agents: list[Any] = [agent for agent in self.rack.agents.values() if hasattr(agent, "plugins")]
        plugins = [agent.plugins["scheduler"] for agent in agents if "scheduler" in agent.plugins]
        known = [plugin.queue.jobs.get(JobId(job)) for plugin in plugins]
        if any(found is not None and found.priority.upgraded is not None for found in known):
            self._upgraded[job] = None
        return job in self._upgraded


class QueuesHold:
    """Every copy of the queue keeps what its module's docstring promises; checked from time to time."""

    name, every_s = "the queue holds", 1.0

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack

    def check(self, world: World) -> None:
        for name in self.rack.alive():
            scheduler = self.rack.plugin(name, "scheduler")
            if scheduler is not None:
                scheduler.queue.check()


class RanksOnce(RanksHeld):
    """A rank of a job lives once, under one epoch, wherever that is, even on hosts that are cut off. A job that is to
    be kept (`on_lost`) is not placed elsewhere, so this holds for it too. A rank that may be lost does not count as
    alive while it is suspended, and counts again when it continues."""

    name = "a rank lives once"

    def look(self, ranks: list[Rank]) -> None:
        alive: dict[tuple[str, int], Rank] = {}
        for rank in (rank for rank in ranks if not rank.still):
            other = alive.setdefault((rank.job, rank.rank), rank)
            if rank.elastic and rank.epoch == other.epoch:
                continue
            assert other is rank, (
                f"rank {rank.rank} of {rank.job} lives on {other.host} under epoch {other.epoch} and on {rank.host} "
                f"under epoch {rank.epoch}"
            )


class QuotaHeld(RanksHeld):
    """What really runs of a tenant against its quota never exceeds it, wherever it runs and under whatever epoch, even
    on hosts that are cut off. A job that started as opportunistic counts as soon as some host knows that it was
    upgraded."""

    name = "no tenant runs more than its quota"

    def __init__(self, rack: RackSeen, quotas: dict[str, int]) -> None:
        super().__init__(rack)
        self.quotas = quotas
        self._gangs: dict[str, int] = {}
        """The GPUs of the gang of each elastic job, which stay known while no agent runs."""

    def look(self, ranks: list[Rank]) -> None:
        used: dict[str, int] = {}
        elastic: dict[tuple[str, int], list[Rank]] = {}
        for rank in (rank for rank in ranks if not rank.still):
            if rank.elastic:
                elastic.setdefault((rank.job, rank.epoch), []).append(rank)
            elif rank.job_class != "opportunistic" or self._upgraded(rank.job):
                used[rank.tenant] = used.get(rank.tenant, 0) + len(rank.gpus)
        for each in elastic.values():
            tenant, gpus = self._of_gang(each)
            used[tenant] = used.get(tenant, 0) + gpus
        for tenant, gpus in used.items():
            quota = self.quotas.get(tenant)
            assert quota is None or gpus <= quota, f"tenant {tenant} runs {gpus} GPUs, its quota is {quota}"

    def _of_gang(self, processes: list[Rank]) -> tuple[str, int]:
        """The tenant of an elastic job, and the GPUs that its processes hold against the quota: at most those of its
        gang, since extras count against none."""
        one, known = processes[0], known_job(self.rack, processes[0].job)
        if one.job_class == "opportunistic" and not self._upgraded(one.job):
            return one.tenant, 0
        if known is not None:
            self._gangs[one.job] = known.spec.gpus
        held = sum(len(process.gpus) for process in processes)
        return one.tenant, min(held, self._gangs.get(one.job, held))

    def _upgraded(self, job: str) -> bool:
        plugins = [self.rack.plugin(name, "scheduler") for name in self.rack.alive()]
        known = [plugin.queue.jobs.get(job) for plugin in plugins if plugin is not None]
        return any(found is not None and found.priority.upgraded is not None for found in known)


class FencedRanksEnd:
    """Ranks of a grant that any host's log knows to be over end within a bound, wherever they are and whatever became
    of their agent: it stops them, or their lease runs out."""

    name, every_s = "ranks of an ended grant end", 1.0

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack
        self._since: dict[tuple[str, int], float] = {}

    def check(self, world: World) -> None:
        newest = newest_queue(self.rack)
        if newest is None:
            return
        still: dict[tuple[str, int], float] = {}
        for rank in ranks_of(world):
            if newest.over(JobId(rank.job), rank.epoch):
                key = (rank.host, rank.process.id.pid)
                still[key] = since = self._since.get(key, world.now)
                age_s = world.now - since
                assert age_s < FENCE_S, (
                    f"rank {rank.rank} of {rank.job} still runs on {rank.host} under epoch {rank.epoch}, "
                    f"{age_s:.0f} s after the log said that this is over"
                )
        self._since = still


class GangsWhole:
    """All or nothing: a gang that has begun to start is whole or gone within a bound. (`chaos.checks.elastic` looks at
    elastic ones, of which any number of processes runs.)"""

    name, every_s = "a gang starts whole or not at all", 1.0

    def __init__(self, rack: RackSeen) -> None:
        self._within_s = GANG_S + rack.patience_s
        self._began: dict[tuple[str, int], float] = {}
        self._started: dict[tuple[str, int], dict[int, None]] = {}

    def check(self, world: World) -> None:
        alive: dict[tuple[str, int], int] = {}
        for rank in (rank for rank in ranks_of(world) if not rank.elastic):
            key = (rank.job, rank.epoch)
            alive[key] = rank.size
            self._began.setdefault(key, world.now)
            self._started.setdefault(key, {})[rank.rank] = None
        for key, size in alive.items():
            age_s = world.now - self._began[key]
            started = len(self._started[key])
            assert started == size or age_s < self._within_s, (
                f"{started} of {size} ranks of {key[0]} under epoch {key[1]} were started, {age_s:.0f} s ago"
            )


class JobsKnown:
    """No host denies a job that was accepted: one that does not know it (any more) says so, and not that it was never
    given."""

    name, every_s = "nobody denies an accepted job", 1.0

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack

    def check(self, world: World) -> None:
        for name in self.rack.alive():
            scheduler = self.rack.plugin(name, "scheduler")
            for id, at_s in [] if scheduler is None else self.rack.accepted.items():
                if id in scheduler.queue.jobs or world.now <= at_s + scheduler.settings.current_s + HEARTBEAT_S:
                    continue
                try:
                    scheduler._find({"id": id})
                except Refused as no:
                    assert "no job ever had" not in no.why, f"{name} denies {id}, which was accepted"


class SlabsExclusive:
    """One mapping of one slab is lent by one host at most, and every lender lends no more than it may."""

    name, every_s = "a slab has one lender", 1.0

    def __init__(self, rack: RackSeen) -> None:
        self.rack = rack

    def check(self, world: World) -> None:
        holders: dict[tuple[Any, ...], str] = {}
        for name in self.rack.alive():
            memory = self.rack.plugin(name, "memory")
            for lent in [] if memory is None else memory.lending.machine.lent.values():
                if lent.state in ("lent", "evicting"):
                    key = (lent.borrower, lent.slab.volume, lent.slab.index, lent.slab.epoch)
                    assert key not in holders, f"{key} is lent by {holders[key]} and by {name}"
                    holders[key] = name


def invariants_for(rack: RackSeen) -> list[Invariant]:
    """All invariants that can be checked in a rack with these plugins."""
    found: list[Invariant] = [
        OneLeaderPerTerm(rack),
        LogsAgree(rack),
        MachinesHold(rack),
        PluginsLive(rack),
        WorkloadsRight(rack),
    ]
    plugins = {plugin.name for plugin in rack.plugins}
    if "scheduler" in plugins:
        gpus: list[Invariant] = [GpusBeside(rack), QueuesHold(rack)] if rack.beside else [GpusExclusive(rack)]
        found += [
            *gpus,
            RanksOnce(rack),
            CarriedOnce(rack),
            ProcessesPlaced(rack),
            OneProcessEach(rack),
            QuotaHeld(rack, rack.quotas),
            FencedRanksEnd(rack),
            GangsWhole(rack),
            JobsKnown(rack),
            BillsHold(rack),
            GpusBilled(rack),
        ]
    if "memory" in plugins:
        found += [SlabsExclusive(rack), UnusedSlabs(rack)]
    return found
