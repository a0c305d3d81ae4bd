"""What an agent knows about one job's ranks on this host under one epoch, and the facts about them."""

import asyncio

import msgspec

from agent.jobs.records import Key, StartRecord
from agent.jobs.successors import NEVER
from agent.jobs.supervision import CANNOT_START, SIGKILL, UNKNOWN, StopRanks, SupervisorState
from covey.ports.processes import ProcessId
from covey.ports.streams import ByteStream
from plugins.base import RankLease, RankSpec, RanksSpec
from plugins.facts import MemoryKilled, RankEndedHere, RankReplaced, RanksEnded, RanksHeal, RanksStarted


class Epoch:
    """What this agent knows about one job's ranks under one epoch."""

    def __init__(self, record: StartRecord, found: bool) -> None:
        self.record = record
        self.state = SupervisorState()
        self.found = found
        """Whether the record was read from disk; the scheduler has not asked this agent to start these ranks."""
        self.launched = False
        """Whether this agent started the epoch's supervisor."""
        self.stop: StopRanks | None = None
        self.lease: RankLease | None = None
        """The newest lease that the scheduler gave for these ranks."""
        self.heals: dict[int, int] = {}
        """Ranks that may be lost, each with the step from which on it may."""
        self.modules: tuple[str, ...] = ()
        """The modules that a spare of these ranks imports; empty: none would wait."""
        self.spares_refused = False
        """Whether it was told why there are no spares."""
        self.told = False
        """Whether the supervisor is connected, and was told all that was said before."""
        self.changing = False
        """Whether ranks joined those that ran here or left them, and it was not told yet which ranks run now."""
        self.spares_awaited = 0
        """The number of processes that wait here for ranks that are to join."""
        self.may_be_lost = False
        """Whether all ranks here may be lost, so that their supervisor suspends them when no leader confirms them; as
        last told."""
        self.said_to_have: dict[int, ProcessId | None] = {}
        """For each process of an elastic job that said that it has the job's state: who said so. None: a process that
        is connected, and of which no supervisor has told this agent yet."""
        self.awaited_until_s = 0.0
        """Until when processes that an earlier agent started may say again that they have the job's state, by
        `Clock.now_s`."""
        self.have: tuple[int, ...] = ()
        """Processes that have the state, as last told."""
        self.stream: ByteStream | None = None
        self.started = self.ended = self.forgotten = False
        """Whether `RanksStarted` and `RanksEnded` were published, and `forget` came."""
        self.forced = False
        """Whether all that runs is being ended by force: no other supervisor is started."""
        self.extended = False
        """Whether a rank asked for more time than its grace."""
        self.oom: MemoryKilled | None = None
        """What the kernel killed of these ranks, by its own count."""
        self.killed_before = 0
        """The processes that the kernel had killed when a rank was last started again: this end is none of theirs."""
        self.changes = asyncio.Lock()
        """Held while a change is written down and the limits follow it: one after the other."""
        self.allowed: tuple[RankSpec, ...] = ()
        """The ranks for which the limits are, where those that leave still have theirs; empty: those of the record."""
        self.over = asyncio.Event()
        self.launches = 0
        """The number of supervisors started since one last answered."""


def is_leaving(epoch: Epoch) -> bool:
    """Whether processes that left may still run here."""
    return not epoch.ended and epoch.state.changed < epoch.record.changed


def takes_changes(epoch: Epoch) -> bool:
    """Whether other ranks may still come here or leave."""
    return not epoch.ended and epoch.stop is None


def allowed_with(epoch: Epoch, spec: RanksSpec) -> RanksSpec:
    """The spec of these ranks and of all that still have limits here: less memory would kill who is leaving."""
    before = epoch.allowed or epoch.record.spec.ranks
    both = {(rank.rank, rank.gpus): rank for rank in (*before, *spec.ranks)}
    return msgspec.structs.replace(spec, ranks=tuple(both.values()))


def codes_here(epoch: Epoch) -> dict[int, int]:
    """The exit codes of ranks that have ended, in that order, without those that left."""
    here = {rank.rank for rank in epoch.record.spec.ranks}
    return {rank: code for rank, code in epoch.state.codes.items() if rank in here}


def ended_before_others(key: Key, epoch: Epoch, before: SupervisorState = SupervisorState()) -> list[RankEndedHere]:
    """Ranks that have ended since `before`, while others run."""
    if epoch.ended or not epoch.started:
        return []
    return [RankEndedHere(*key, rank, code) for rank, code in codes_here(epoch).items() if rank not in before.codes]


def replaced_of(key: Key, before: SupervisorState, now: SupervisorState) -> list[RankReplaced]:
    """Ranks that were started again since `before`."""
    return [
        RankReplaced(key[0], key[1], rank, now.pids[rank].pid, healing.incarnation)
        for rank, healing in sorted(now.healing.items())
        if rank in now.pids and rank in before.pids and now.pids[rank] != before.pids[rank]
    ]


def heal_of(key: Key, epoch: Epoch) -> RanksHeal:
    return RanksHeal(key[0], key[1], epoch.record.spec.since, epoch.may_be_lost, epoch.have)


def have_now(epoch: Epoch) -> tuple[int, ...]:
    """The processes of an elastic job here that have its state and give it: not those that took the place of one that
    said so, nor those that are through."""
    if not epoch.record.spec.carried or epoch.ended:
        return ()
    pids, codes = epoch.state.pids, epoch.state.codes
    here = sorted(rank.rank for rank in epoch.record.spec.ranks)
    said = epoch.said_to_have
    through = {rank for rank, known in epoch.state.healing.items() if known.step >= NEVER}
    through |= {rank for rank, step in epoch.heals.items() if step >= NEVER}
    have = (rank for rank in here if rank in pids and rank not in codes and pids[rank] == said.get(rank))
    return tuple(rank for rank in have if rank not in through)


def run_all(epoch: Epoch, state: SupervisorState) -> bool:
    """Whether all ranks that are here run, or have run."""
    return all(rank.rank in state.pids for rank in epoch.record.spec.ranks)


def started_of(key: Key, epoch: Epoch) -> RanksStarted:
    here = {rank.rank for rank in epoch.record.spec.ranks}
    return RanksStarted(*key, {rank: pid.pid for rank, pid in epoch.state.pids.items() if rank in here})


def ended_of(key: Key, epoch: Epoch) -> RanksEnded:
    """The end of this epoch's ranks. Ranks that joined these too late to start count as lost."""
    codes = codes_here(epoch)
    late = any(rank not in codes for rank in epoch.record.joined)
    for rank in epoch.record.spec.ranks:
        codes.setdefault(rank.rank, UNKNOWN)
    lost, since = epoch.state.lost or late, epoch.record.spec.since
    state = epoch.state
    return RanksEnded(key[0], key[1], codes, state.reason, lost, since, epoch.oom, state.unstarted)


def lost_of(epoch: Epoch, state: SupervisorState, why: str) -> SupervisorState:
    """The final state of ranks without a supervisor: those that ran were killed, the others never started."""
    codes = dict(state.codes)
    for rank in epoch.record.spec.ranks:
        codes.setdefault(rank.rank, -SIGKILL if rank.rank in state.pids else CANNOT_START)
    return SupervisorState(pids=state.pids, codes=codes, ended=True, reason=why, lost=True, unstarted=state.unstarted)
