"""The way of a command to the leader, and of its result back.

`propose` gives the command an id. On the leader it waits for the end of this turn of the event loop, so that all
proposals of the turn become one event, one write and one message; elsewhere they are forwarded, also as one
(`forwarding`). It is done when *this* host has applied it (a read here then sees the effect), or, if this host is slow,
when the leader answered so. When the leader changes meanwhile the same id is proposed again: `machine.session_table`
applies it once.
"""

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from agent.raft.machine import Outcome, SessionTable
from agent.raft.machine.types import Proposal, Proposed, Snapshot
from agent.raft.messages import (
    COMMAND_BYTES_MAX,
    ID_BYTES,
    MESSAGE_BYTES_MAX,
    Asked,
    Entry,
    ForwardedCommand,
    ProposeEntries,
    ProposeEntry,
    ProposeReplies,
    ProposeReply,
    another_rack,
    encode_asked,
)
from agent.raft.policy import ENTRY_OVERHEAD_BYTES
from agent.raft.service.forwarding import FORWARD_S, LOST, PAUSE_S, Forwarding
from covey.core.errors import NoLeader, OutcomeUnknown, Refused
from covey.core.ids import HostId
from covey.ports.env import Env

UNDER_WAY_MAX = 16384
"""The number of entries appended but not committed above which a leader takes no more."""
ANSWER_S = 10.0
"""Seconds for which a forwarded proposal is kept waiting here."""
APPLY_S = 1.0
"""Seconds for which a result from the leader waits for this host to apply the command as well."""
NOTED_MAX = 16384
"""The number of attempts remembered as refused, so that a late copy of one message is refused too; and the number of
ids remembered as appended."""
COPIES_S = 2 * FORWARD_S
"""Seconds within which another copy of a message may come."""

K = TypeVar("K")
Result = asyncio.Future[Outcome]


class ProposalLog(Protocol):
    """The part of the log that proposals need."""

    @property
    def leader(self) -> HostId | None: ...
    @property
    def open(self) -> bool:
        """Whether this host takes part."""

    @property
    def rack(self) -> bytes:
        """The rack of the log; NO_RACK until that is certain."""

    @property
    def term(self) -> int: ...
    @property
    def commit_index(self) -> int: ...
    @property
    def under_way(self) -> int:
        """The number of entries appended and not committed."""

    @property
    def no_room(self) -> str:
        """Why the log cannot be written now; empty when it can."""

    def dispatch(self, event: Proposed) -> None: ...


class Proposals:
    def __init__(
        self,
        env: Env,
        me: HostId,
        desk: ProposalLog,
        ask_leader: Callable[[HostId, bytes, float], Awaitable[bytes]],
        once: SessionTable,
        counters: Counter[str],
    ) -> None:
        self._env, self._me, self._desk = env, me, desk
        self._sessions, self._counters = once, counters
        self._forwarding = Forwarding(env, lambda: desk.rack, ask_leader, counters)
        self._queued: dict[bytes, Proposal] = {}
        """The proposals to be handed to the core at the end of this turn of the loop."""
        self._appended: set[bytes] = set()
        """The ids handed to the core since the leader last changed, and not applied yet."""
        self._results: dict[bytes, Result] = {}
        self._turn: asyncio.Future[None] | None = None
        """Done when the leader changes; made when a proposal waits for that."""
        self._refused: OrderedDict[tuple[bytes, int], None] = OrderedDict()
        self._certain_s = -math.inf
        """The time from which on whatever this agent has not appended was not appended by the one before it either."""
        self._perhaps: OrderedDict[bytes, None] = OrderedDict()
        """The ids of forwarded proposals that were appended here, also under another leader since: a late copy of such
        a message is not answered with a refusal, for the next leader may have committed the command."""

    # ---- from the log ----

    def goes_on(self) -> None:
        """Note that this log was there before the agent started: the agent before it may have led, and appended a
        proposal of which another copy comes."""
        self._certain_s = self._env.clock.now_s() + COPIES_S

    def applied(self, entry: Entry, outcome: Outcome) -> None:
        """Take the outcome of one copy of this command, which was reached here."""
        self._appended.discard(entry.id)
        self._resolve(entry.id, outcome)

    def restored(self, image: Snapshot) -> None:
        """Take in a snapshot, which took the place of many commands; proposals here may wait for some of them."""
        for proposal in list(self._results):
            if outcome := self._sessions.find(proposal):
                self._resolve(proposal, outcome)

    def _resolve(self, proposal: bytes, outcome: Outcome) -> None:
        waiting = self._results.pop(proposal, None)
        if waiting and not waiting.done():
            waiting.set_result(outcome)

    def leader_changed(self) -> None:
        """Propose again what was appended, which may be lost: the leader changed."""
        self._appended.clear()
        if self._turn and not self._turn.done():
            self._turn.set_result(None)

    # ---- from this host ----

    async def propose(self, command: bytes, timeout_s: float) -> bytes:
        """Propose a command, as `plugins.base.ReplicatedLog` says. ValueError for a command over COMMAND_BYTES_MAX."""
        if len(command) > COMMAND_BYTES_MAX:
            raise ValueError(f"a command of {len(command)} bytes is over the limit of {COMMAND_BYTES_MAX}")
        proposal = Proposal(self._env.entropy(ID_BYTES), self._desk.commit_index, command)
        result = self._result_of(proposal.id)
        try:
            return await self._until(proposal, result, self._env.clock.now_s() + timeout_s)
        finally:
            self._results.pop(proposal.id, None)

    async def _until(self, proposal: Proposal, result: Result, end_s: float) -> bytes:
        """Try until the command is applied or the time is over."""
        tried, attempt = False, 0
        while self._desk.open and (left_s := end_s - self._env.clock.now_s()) > 0:
            attempt += 1
            leader = self._desk.leader
            if leader == self._me and self._desk.no_room and not tried:
                raise NoLeader(f"the leader {leader} cannot write its log: {self._desk.no_room}")
            if leader is None:
                await self.turning(left_s, result)
            elif leader == self._me:
                appended = self._append(proposal)
                tried = tried or appended
                await self.turning(left_s if appended else min(left_s, PAUSE_S), result)
            else:
                reply = await self._forward(leader, proposal, attempt, result, min(left_s, FORWARD_S))
                if reply.outcome == "applied":
                    return await self._own_copy(result, reply, end_s)
                tried = tried or reply.outcome in ("lost", "perhaps", "expired")
                if reply.outcome != "lost" and not result.done():
                    await self.turning(min(left_s, PAUSE_S), result)
            if result.done():
                return _value(result.result())
        if tried:
            raise OutcomeUnknown("it was proposed, but no result came in time")
        leader = self._desk.leader
        raise NoLeader("no leader is known" if leader is None else f"{leader} takes no proposals now")

    async def _own_copy(self, result: Result, reply: ProposeReply, end_s: float) -> bytes:
        """The leader's result, after a little wait until this host has applied the command as well."""
        wait_s = min(end_s - self._env.clock.now_s(), APPLY_S)
        if not result.done() and wait_s > 0:
            await asyncio.wait([result], timeout=wait_s)
        return _value(result.result()) if result.done() else reply.result

    async def turning(self, seconds: float, result: Result) -> None:
        """Wait until there is a result, the leader changes, or the time is over."""
        awaited: list[asyncio.Future[Any]] = [result, self._next_turn()]
        await asyncio.wait(awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    def _next_turn(self) -> asyncio.Future[None]:
        if self._turn is None or self._turn.done():
            self._turn = asyncio.get_running_loop().create_future()
        return self._turn

    def _result_of(self, proposal: bytes) -> Result:
        if proposal not in self._results:
            self._results[proposal] = asyncio.get_running_loop().create_future()
        return self._results[proposal]

    def _append(self, proposal: Proposal) -> bool:
        """Queue a proposal for the core, once while one leader leads. False when too much is under way, or cannot be
        written."""
        if proposal.id in self._appended:
            return True
        if self._desk.no_room or self._desk.under_way + len(self._queued) > UNDER_WAY_MAX:
            self._counters["busy"] += 1
            return False
        self._appended.add(proposal.id)
        if not self._queued:
            asyncio.get_running_loop().call_soon(self._flush)
        self._queued[proposal.id] = proposal
        return True

    def _flush(self) -> None:
        queued, self._queued = tuple(self._queued.values()), {}
        self._desk.dispatch(Proposed(queued))

    # ---- to the leader ----

    async def _forward(
        self, leader: HostId, proposal: Proposal, attempt: int, result: Result, seconds: float
    ) -> ProposeReply:
        """Forward a proposal, and return the leader's answer; `lost` when there is none, or when the result or another
        leader came first."""
        command = ForwardedCommand(proposal.id, attempt, proposal.base, proposal.command)
        reply = self._forwarding.forward(leader, command)
        awaited: list[asyncio.Future[Any]] = [reply, result, self._next_turn()]
        await asyncio.wait(awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return reply.result() if reply.done() else LOST

    # ---- as the leader ----

    async def answer(self, sender: HostId, question: Asked) -> bytes:
        """Answer proposals that `sender` forwards. Refused when it is something else, or for another log."""
        if not isinstance(question, ProposeEntry | ProposeEntries) or another_rack(question.rack, self._desk.rack):
            self._counters["of_another_rack"] += 1
            why = "its log has a different origin from the one here"
            next_step = "docs/guides/failures.md, 'A host of another rack'"
            raise Refused(2, f"{sender} belongs to another rack", why, next_step)
        if isinstance(question, ProposeEntries):
            return encode_asked(_within_limit(await self._asked(question.commands)))
        one = ForwardedCommand(question.id, question.attempt, question.base, question.command)
        return encode_asked((await self._asked([one]))[0])

    async def _asked(self, commands: Sequence[ForwardedCommand]) -> list[ProposeReply]:
        """The outcome of each of these, once all are known, the leader has changed, or the time is over."""
        taken = [self._taken(each) for each in commands]
        results = [each for each in taken if isinstance(each, asyncio.Future)]
        try:
            await self._all(results)
        finally:
            for command, result in zip(commands, taken, strict=True):
                if isinstance(result, asyncio.Future) and not result.done():
                    self._results.pop(command.id, None)
        return [each if isinstance(each, ProposeReply) else _of(each) for each in taken]

    def _taken(self, command: ForwardedCommand) -> ProposeReply | Result:
        """What is known of a forwarded proposal at once, or what will have its outcome."""
        if known := self._sessions.find(command.id):
            return _reply(known)
        key = (command.id, command.attempt)
        leads = self._desk.open and self._desk.leader == self._me
        proposal = Proposal(command.id, command.base, command.command)
        if not leads or key in self._refused or not self._append(proposal):
            if command.id in self._perhaps or self._env.clock.now_s() < self._certain_s:
                return ProposeReply("perhaps")
            _note(self._refused, key)
            return ProposeReply("busy" if leads else "not leader")
        _note(self._perhaps, command.id)
        return self._result_of(command.id)

    async def _all(self, results: Sequence[Result]) -> None:
        """Wait until all have come, the leader has changed, or `ANSWER_S` are over."""
        whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = set(results)

        def came(result: Result) -> None:
            waiting.discard(result)
            if not waiting and not whole.done():
                whole.set_result(None)

        for result in list(waiting):
            result.add_done_callback(came)
        if waiting:
            awaited: list[asyncio.Future[Any]] = [whole, self._next_turn()]
            await asyncio.wait(awaited, timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)


def _note(noted: OrderedDict[K, None], key: K) -> None:
    noted[key] = None
    if len(noted) > NOTED_MAX:
        noted.popitem(last=False)


def _within_limit(replies: list[ProposeReply]) -> ProposeReplies:
    """The replies in one message; those whose results are too long for it are `lost`: their proposers find them in
    their own copies, or ask again."""
    size = 0
    for at, reply in enumerate(replies):
        size += len(reply.result) + ENTRY_OVERHEAD_BYTES
        if size > MESSAGE_BYTES_MAX:
            replies[at] = LOST
            size -= len(reply.result)
    return ProposeReplies(tuple(replies))


def _of(result: Result) -> ProposeReply:
    return _reply(result.result()) if result.done() and not result.cancelled() else LOST


def _reply(outcome: Outcome) -> ProposeReply:
    if outcome.kind == "expired" or outcome.result is None:
        return ProposeReply("expired", outcome.index)
    return ProposeReply("applied", outcome.index, outcome.result)


def _value(outcome: Outcome) -> bytes:
    if outcome.kind == "expired":
        raise OutcomeUnknown("it was repeated so late that it is unknown whether it was applied before")
    if outcome.result is None:
        raise OutcomeUnknown("it was applied, but its result is no longer kept")
    return outcome.result
