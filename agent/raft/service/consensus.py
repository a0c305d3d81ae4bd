"""The log of one host: the core with its timer, its messages, its disk and the applied state.

Writes. One task performs them in order (`service.writer`). While one write is under way further requests gather and
become the next one (group commit). What the core promised to others leaves only after `Persisted`.

Trouble. A full disk is waited for. When it fails otherwise, or the state cannot apply a committed command, this host's
part in the log ends: what an interrupted write left there is unknown until a restart reads it back. The agent keeps
running and answers reads with their age.
"""

import asyncio
import sys
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import assert_never

from agent.raft.disk import Store
from agent.raft.machine import Contradiction, Raft
from agent.raft.machine.types import (
    Action,
    Apply,
    ConfigurationChanged,
    Event,
    HandOver,
    Persist,
    Persisted,
    RaftHostsChanged,
    RaftStarted,
    ReadFrom,
    Restore,
    SaveSnapshot,
    SendRaft,
    Snapshot,
    SnapshotTaken,
    SoftState,
    Tick,
)
from agent.raft.messages import (
    NO_RACK,
    SNAPSHOT_BYTES_MAX,
    ChangeVoters,
    Configuration,
    MalformedMessage,
    ReadIndex,
    another_rack,
    decode,
    decode_asked,
    encode,
)
from agent.raft.policy import founders
from agent.raft.service.applied import AppliedState
from agent.raft.service.changes import Changes
from agent.raft.service.proposals import Proposals
from agent.raft.service.reads import LogReads
from agent.raft.service.settings import LeaderSettings
from agent.raft.service.writer import LogWriter
from covey.core.errors import Refused
from covey.core.events import Heard
from covey.core.ids import HostId
from covey.ports.env import Env

FORGOTTEN = (
    "the log of this host is new, or holds less than it acknowledged: it has no vote until it has caught up "
    "with a majority of the other voters"
)
UNCOUNTED = (
    "its log is new, or holds less than it acknowledged; its vote counts once the other voters have committed that"
)
WAITS = (
    "the log of this host waits for room on its disk, and until then acknowledges nothing, does not vote "
    "and hands over leadership; next: free some space in its state directory"
)
TIMER_S_MIN = 0.002
"""The shortest timer in seconds: uvloop's timers may fire a millisecond early."""
HAND_OVER_S = 0.7
"""Seconds for which a leader that is stopped looks for a successor, and waits until that one leads: usually some
hundredths of a second. It is shorter than an election timeout; after it the others elect one by themselves."""
STOP_S = 1.0
"""Seconds for which `stop` waits for a write that is under way; with `HAND_OVER_S` a part of `agent.main.LEAVE_S`."""


class LeaderKnown:
    """Who leads, as this host knows, and since when by its clock."""

    def __init__(self) -> None:
        self.leader: HostId | None = None
        self.since_s = 0.0
        """Time at which this leader became known, or the last one was lost."""
        self.turned = asyncio.Event()
        """Set when a leader became known or was lost."""
        self._lost_s = 0.0
        """Time at which a known leader was last lost or followed by another."""

    def begin(self, now_s: float) -> None:
        """The log begins, and knows no leader yet."""
        self.since_s = self._lost_s = now_s

    def is_now(self, leader: HostId | None, now_s: float) -> None:
        """This host leads now; None: none does."""
        self.end(now_s)
        self.leader, self.since_s = leader, now_s
        self.turned.set()

    def end(self, now_s: float) -> None:
        """This host takes no further part, and knows no leader from now on."""
        if self.leader is not None:
            self._lost_s = now_s
        self.leader = None

    def without_s(self, now_s: float) -> float:
        """Seconds without a leader; 0 with one."""
        return 0.0 if self.leader is not None else now_s - self._lost_s


class Consensus:
    """The `plugins.base.ReplicatedLog` of one host. `send(to, data)` is one try at most; `ask_leader(to, data,
    seconds)` asks until it is answered or raises TimeoutError, and the other host answers with `answer`; `changed(term,
    leader)` is called when either is new, and with (term, None) when this host's part ends."""

    def __init__(
        self,
        env: Env,
        me: HostId,
        settings: LeaderSettings,
        send: Callable[[HostId, bytes], bool],
        ask_leader: Callable[[HostId, bytes, float], Awaitable[bytes]],
        changed: Callable[[int, HostId | None], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.founders = tuple(HostId(name) for name in sorted(settings.voters)) or (me,)
        """The voters of a log that has not begun, as agent.toml says."""
        self.configured: Callable[[], None] = lambda: None
        """Called when a change of voters, or its beginning, is committed."""
        self._env, self._me, self._settings = env, me, settings
        self._send, self._changed = send, changed
        self._store = Store(env.disk, env.entropy)
        self._state, self._known = AppliedState(settings.snapshot_entries), LeaderKnown()
        self.changes = Changes(env, me, self.founders, self, ask_leader, settings.voters_wanted)
        self._proposals = Proposals(env, me, self, ask_leader, self._state.sessions, self.counters)
        self._reads = LogReads(env, me, self, ask_leader, self.counters)
        self._raft: Raft | None = None
        self._started_s = 0.0
        self._events: deque[Event] = deque()
        self._draining = self._stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._writer = LogWriter(env, self._store, self.counters, self._durable, self._break)
        self._broken: BaseException | None = None
        self._said_trouble = ""

    # ---- what is known ----

    @property
    def leader(self) -> HostId | None:
        return self._known.leader

    @property
    def leader_since_s(self) -> float:
        """When, on this host's clock, the present leader became known or was lost."""
        return self._known.since_s

    @property
    def term(self) -> int:
        return self._raft.term if self._raft else 0

    @property
    def leaderless_s(self) -> float:
        """Seconds without a leader, as `ReplicatedLog` says."""
        if self._raft is None:
            return 0.0
        return max(0.0, self._known.without_s(self._env.clock.now_s()) - self._settings.step_down_s)

    @property
    def configuration(self) -> Configuration:
        """The voters, and the change that is under way, as this host's log says."""
        return self._raft.configuration if self._raft else founders(self.founders, NO_RACK)

    @property
    def voters(self) -> tuple[HostId, ...]:
        return self.configuration.hosts

    @property
    def rack(self) -> bytes:
        """The rack's identity; NO_RACK until this host is certain of it."""
        return self._raft.rack if self._raft else NO_RACK

    @property
    def may_change(self) -> bool:
        """Whether this host may change the voters now, as `changes.ProposalLogView` says."""
        return self._raft is not None and self.is_leader and self._raft.may_change

    @property
    def stranger(self) -> HostId | None:
        """A leader that this host does not follow, as `changes.ProposalLogView` says."""
        return self._raft.stranger if self._raft else None

    @property
    def heard_lately(self) -> frozenset[HostId]:
        return self._raft.heard_lately(self._env.clock.now_s()) if self._raft else frozenset()

    @property
    def open(self) -> bool:
        return self._raft is not None and not self._stopping and self._broken is None

    @property
    def trouble(self) -> str:
        """Why this host's log cannot be written, or has no vote although it should have one, or, on the leader, which
        voters do not count, for people; empty when all is well."""
        if self._raft is None or self._broken:
            return ""
        if self._writer.no_room:
            return f"{self._writer.no_room}: {WAITS}"
        if self._raft.forgotten:
            return FORGOTTEN
        others = ", ".join(self._raft.uncounted)
        return f"{others}: {UNCOUNTED}" if others else ""

    @property
    def no_room(self) -> str:
        """Why the log cannot be written now; empty when it can, or when this host's part in it has ended."""
        return self._writer.no_room

    @property
    def counted(self) -> Mapping[str, int]:
        """What this service and its machine counted since the start, for metrics."""
        return {**self.counters, **(self._raft.counters if self._raft else {})}

    def _say_trouble(self) -> None:
        """Log a trouble once when it begins, changes or ends."""
        if (now := self.trouble) != self._said_trouble:
            self._said_trouble = now
            if now:
                self._env.log.warning("a log without a vote", why=now, next="start the voters that are away")
            else:
                self._env.log.info("every log here counts again")

    @property
    def is_leader(self) -> bool:
        return self._raft is not None and self.open and self._raft.holds_lease(self._env.clock.now_s())

    @property
    def applied_index(self) -> int:
        return self._state.index

    def undecided(self) -> Sequence[bytes]:
        """The undecided commands, as `ReplicatedLog` says."""
        entries = self._raft.entries_after(self._state.index) if self._raft else ()
        return [entry.command for entry in entries if entry.id]

    @property
    def commit_index(self) -> int:
        return self._raft.commit if self._raft else 0

    @property
    def under_way(self) -> int:
        return self._raft.last_index - self._raft.commit if self._raft else 0

    @property
    def age_s(self) -> float:
        """The age of this copy, as `ReplicatedLog` says. Before any leader confirmed it: seconds since this log
        started."""
        now_s = self._env.clock.now_s()
        if self._raft is None or self.is_leader:
            return 0.0
        confirmed_s = self._raft.confirmed_s(now_s)
        current_s = self._raft.current_s if confirmed_s is None else confirmed_s
        return max(0.0, now_s - max(self._started_s, current_s or self._started_s))

    @property
    def caught_up(self) -> bool:
        """Whether this copy has caught up, as `ReplicatedLog` says."""
        return self.is_leader or (self._raft is not None and self._raft.current_s is not None)

    def bind(
        self,
        apply: Callable[[int, bytes], bytes],
        snapshot: Callable[[], bytes],
        restore: Callable[[bytes], None],
    ) -> None:
        """Bind the state machine, as `ReplicatedLog` says: the log does not stop."""
        self._state.bind(apply, snapshot, restore)

    @property
    def bound(self) -> bool:
        return self._state.bound

    # ---- life ----

    async def start(self) -> None:
        """Read the disk back and apply what was known to be committed. A rack of one leads when this returns. Raises
        DiskRefused for files that cannot be trusted, OSError when the disk fails."""
        saved = await self._store.load(alone=self.founders == (self._me,))
        self._started_s = self._env.clock.now_s()
        self._known.begin(self._started_s)
        if saved.hard.term:
            self._proposals.goes_on()
        self._raft = Raft(self._me, self.founders, saved, self._settings.timing(), self._env.rng, self._started_s)
        self._env.spawn("log writer", self._writer.run())
        self.dispatch(RaftStarted())
        if self.changes.alive:
            self.dispatch(RaftHostsChanged(self.changes.alive))
        while self.voters == (self._me,) and not self.is_leader and self.open and not self._writer.no_room:
            await self._writer.turned()
        if self._broken:
            raise self._broken

    async def stop(self) -> None:
        """Hand over, finish the write under way, and end every waiting proposal."""
        await self._hand_over()
        self._stopping = True
        if self._timer:
            self._timer.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._writer.idle()
        self._writer.end()
        self._known.leader = None
        self._proposals.leader_changed()
        self._reads.applied()

    async def _hand_over(self) -> None:
        """Wait, as a leader, until another voter leads, so that a planned stop costs less than an election timeout."""
        if self.leader != self._me or not self.open or len(self.voters) == 1:
            return
        end_s = self._env.clock.now_s() + HAND_OVER_S
        self.dispatch(HandOver(end_s))
        others = [voter for voter in self.voters if voter != self._me]
        while self._broken is None and self.leader not in others and (left_s := end_s - self._env.clock.now_s()) > 0:
            self._known.turned.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._known.turned.wait()

    def hosts(self, alive: Sequence[HostId], away: Sequence[HostId] = ()) -> None:
        """Take the living hosts: those that do not vote receive what is committed. `away` are known, and gone or
        left."""
        self.changes.away = tuple(away)
        found = tuple(sorted({host for host in alive if host != self._me}))
        if found != self.changes.alive:
            self.changes.alive = found
            self.dispatch(RaftHostsChanged(found))

    async def propose(self, command: bytes, timeout_s: float = 5.0) -> bytes:
        return await self._proposals.propose(command, timeout_s)

    async def be_current(self, timeout_s: float = 5.0) -> None:
        await self._reads.be_current(timeout_s)

    async def answer(self, sender: HostId, data: bytes) -> bytes:
        """Answer a question that another host forwards (`ask_leader` there). Refused when it is of another kind."""
        try:
            asked = decode_asked(data)
        except MalformedMessage as error:
            self.counters["malformed"] += 1
            raise Refused(2, f"{sender} sent an unknown question", str(error), "upgrade the older host") from error
        if isinstance(asked, ChangeVoters):
            return self.changes.answer(sender, asked)
        if isinstance(asked, ReadIndex):
            return await self._reads.answer(sender, asked)
        return await self._proposals.answer(sender, asked)

    async def change_voters(self, add: str, remove: str, force: bool, timeout_s: float = 5.0) -> str:
        """Ask the leader for another voter, one fewer, or one in the place of another, and return one line on what it
        does. The change continues by itself, also under another leader. Refused."""
        return await self.changes.change(add, remove, force, timeout_s)

    def grow(self, unfit: frozenset[HostId]) -> None:
        """Let one more host vote, as a leader of a rack that should have more voters; called every second. `unfit`:
        hosts that should not vote now."""
        if self.open:
            self.changes.grow(unfit)

    # ---- events and actions ----

    def receive(self, sender: HostId, data: bytes) -> None:
        """Take a raw message of an authenticated host. It never raises: the message is only decoded here and handled as
        an event."""
        try:
            envelope = decode(data)
        except MalformedMessage:
            self.counters["malformed"] += 1
            return
        if another_rack(envelope.rack, self.rack):
            self.counters["of_another_rack"] += 1
            self.changes.stranger(sender)
            return
        self.changes.strangers.pop(sender, None)
        asyncio.get_running_loop().call_soon(self.dispatch, Heard(sender, envelope.message))

    def dispatch(self, event: Event) -> None:
        """Handle one event at a time: an action performed for one may bring the next, which waits its turn."""
        if self._raft is None or self._broken or (self._stopping and not isinstance(event, Persisted)):
            return
        self._events.append(event)
        if self._draining:
            return
        self._draining = failed = True
        try:
            while self._events:
                for action in self._raft.handle(self._events.popleft(), self._env.clock.now_s()):
                    self._perform(action)
            failed = False
        except Contradiction as error:
            failed = False
            self._break(self._store.contradicted(self.leader or "?", str(error)))
        finally:
            self._draining = False
            if failed:
                self._break(sys.exception() or AssertionError("interrupted"))
        self._arm()

    def _perform(self, action: Action) -> None:
        match action:
            case SendRaft():
                if not self._send(action.to, encode(self.rack, action.message)):
                    self.counters["not_sent"] += 1
            case Persist() | SaveSnapshot():
                self._writer.ask(action)
            case Apply():
                self._apply_all(action)
            case Restore():
                self._restore_image(action.image)
            case ReadFrom():
                self._reads.confirmed(action)
            case SoftState():
                self._led(action)
            case ConfigurationChanged():
                if self.changes.changed(action):
                    self.configured()
            case _:
                assert_never(action)

    def _arm(self) -> None:
        """Set the timer to when the core wants to wake; one that fires too early finds nothing to do and is set
        again."""
        if self._raft is None or not self.open:
            return
        loop = asyncio.get_running_loop()
        delay_s = max(TIMER_S_MIN, self._raft.wake_s - self._env.clock.now_s())
        if self._timer is None or self._timer.when() > loop.time() + delay_s + TIMER_S_MIN:
            if self._timer:
                self._timer.cancel()
            self._timer = loop.call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.dispatch(Tick())
        self._say_trouble()

    def _led(self, led: SoftState) -> None:
        self._known.is_now(led.leader, self._env.clock.now_s())
        self._proposals.leader_changed()
        self._changed(led.term, led.leader)

    def _break(self, error: BaseException) -> None:
        """Break off: this host takes no further part, since neither its state nor its disk can be relied on until a
        restart."""
        if self._broken is None:
            self._broken = error
            self._known.end(self._env.clock.now_s())
            self._env.log.error(
                "the log stopped on this host", why=repr(error), next="correct that, then restart the agent"
            )
            self._writer.end(error)
            self._proposals.leader_changed()
            self._reads.applied()
            self._changed(self.term, None)

    def _durable(self, number: int) -> None:
        self.dispatch(Persisted(number))

    # ---- the state ----

    def _apply_all(self, action: Apply) -> None:
        for index, entry in enumerate(action.entries, action.first):
            outcome = self._state.apply(index, entry)
            if outcome is not None:
                self._proposals.applied(entry, outcome)
        self.counters["applied"] += len(action.entries)
        self._reads.applied()
        if self._state.is_snapshot_due:
            self._take_snapshot()

    def _take_snapshot(self) -> None:
        data = self._state.snapshot()
        if len(data) > SNAPSHOT_BYTES_MAX:
            self.counters["snapshots_too_large"] += 1
            self._env.log.error("the log's snapshot is too large", bytes=len(data), limit=SNAPSHOT_BYTES_MAX)
            return
        self._events.append(SnapshotTaken(self._state.index, data))

    def _restore_image(self, image: Snapshot) -> None:
        self._state.restore(image)
        self._proposals.restored(image)
        self._reads.applied()
