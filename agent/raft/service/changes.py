"""A change of voters on its way to the leader, and a host's notes on the voters.

The leader decides (`voters.decide`) and appends the first step; the core of the leader of that time takes the others
(`machine.leading`). Nothing here has to run until a change is completed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from agent.raft.machine.types import ConfigurationChanged, ConfigurationWanted
from agent.raft.messages import (
    ChangeReply,
    ChangeVoters,
    Configuration,
    MalformedMessage,
    another_rack,
    decode_asked,
    encode_asked,
)
from agent.raft.service import voters
from covey.core.errors import Refused
from covey.core.ids import HostId
from covey.ports.env import Env

PAUSE_S = 0.2
"""Seconds to pause before a leader that could not change anything yet is asked again."""
REASON_MAX = 400
"""The most characters of a reply's line."""


class ProposalLogView(Protocol):
    """The part of the log that changes need."""

    @property
    def leader(self) -> HostId | None: ...
    @property
    def rack(self) -> bytes: ...
    @property
    def configuration(self) -> Configuration: ...
    @property
    def may_change(self) -> bool:
        """Whether this host leads and can append another configuration now."""

    @property
    def heard_lately(self) -> frozenset[HostId]:
        """The hosts that answered this leader within an election timeout, itself included."""

    @property
    def stranger(self) -> HostId | None:
        """A leader that this host, whose log has not begun, does not follow: agent.toml names none of its voters."""

    def dispatch(self, event: ConfigurationWanted) -> None: ...


class Changes:
    def __init__(
        self,
        env: Env,
        me: HostId,
        founders: Sequence[HostId],
        desk: ProposalLogView,
        ask_leader: Callable[[HostId, bytes, float], Awaitable[bytes]],
        wanted: int = 1,
    ) -> None:
        """`wanted`: the number of voters up to which the leader adds hosts by itself."""
        self.strangers: dict[HostId, float] = {}
        """The hosts whose log is of another rack, and when each was last heard."""
        self.alive: tuple[HostId, ...] = ()
        """The other living hosts."""
        self.away: tuple[HostId, ...] = ()
        """The known hosts that are gone or left."""
        self._env, self._me, self._founders, self._desk, self._ask_leader = env, me, founders, desk, ask_leader
        self._wanted = wanted
        self._told: Configuration | None = None
        self._well_since_s: dict[HostId, float] = {}
        """Since when each other host has been alive, with nothing wrong with it."""

    # ---- from this host ----

    async def change(self, add: str, remove: str, force: bool, timeout_s: float) -> str:
        """Ask the leader for a change, and return one line on what it does. Refused."""
        asked = ChangeVoters(self._desk.rack, HostId(add), HostId(remove), force)
        end_s = self._env.clock.now_s() + timeout_s
        while True:
            left_s = end_s - self._env.clock.now_s()
            reply = await self._ask(asked, max(left_s, PAUSE_S))
            if not reply.code:
                return reply.what
            if reply.code != voters.AGAIN or left_s <= PAUSE_S:
                raise Refused(reply.code, reply.what, reply.why, reply.next)
            await asyncio.sleep(PAUSE_S)

    async def _ask(self, asked: ChangeVoters, seconds: float) -> ChangeReply:
        leader = self._desk.leader
        if leader is None:
            return _again("the voters were not changed", "no leader is known now")
        if leader == self._me:
            return self._decided(asked)
        try:
            answer = decode_asked(await self._ask_leader(leader, encode_asked(asked), seconds))
        except TimeoutError:
            return _again("the outcome is unknown", f"the leader {leader} did not answer")
        except MalformedMessage as error:
            return _again("the outcome is unknown", f"{leader} gave an unexpected answer: {error}")
        if isinstance(answer, ChangeReply):
            return answer
        return _again("the outcome is unknown", f"{leader} gave an unexpected answer")

    # ---- as the leader ----

    def answer(self, sender: HostId, asked: ChangeVoters) -> bytes:
        """Answer another host's `change`. Refused when that one belongs to another rack."""
        if another_rack(asked.rack, self._desk.rack):
            why = "its log has a different origin from the one here"
            raise Refused(2, f"{sender} belongs to another rack", why, f"on {sender}: {voters.GIVE_UP_LOG}")
        return encode_asked(self._decided(asked))

    def _decided(self, asked: ChangeVoters) -> ChangeReply:
        now = self._desk.configuration
        if not self._desk.may_change:
            return _again("the voters were not changed", "the leader is new, or is recording another change")
        try:
            wanted = voters.decide(asked, now, self._seen())
        except Refused as no:
            return ChangeReply(no.code, no.what[:REASON_MAX], no.why[:REASON_MAX], no.next[:REASON_MAX])
        if wanted != now:
            self._desk.dispatch(ConfigurationWanted(now, wanted))
        return ChangeReply(0, voters.accepted(asked, now, wanted)[:REASON_MAX])

    def _seen(self) -> voters.VotersSeen:
        alive = frozenset({self._me, *self.alive})
        away = frozenset(self.away) - alive
        return voters.VotersSeen(alive, away, self._desk.heard_lately, frozenset(self.strangers))

    def grow(self, unfit: frozenset[HostId]) -> None:
        """Called every second, on every host; the leader lets one more host vote, where the rack should have more
        voters (`voters.grown`). `unfit`: hosts that should not vote now."""
        now_s, now = self._env.clock.now_s(), self._desk.configuration
        self._well_since_s = {host: self._well_since_s.get(host, now_s) for host in self.alive if host not in unfit}
        if self._wanted == 1 or not self._desk.may_change:
            return
        stable = frozenset(host for host, since_s in self._well_since_s.items() if now_s - since_s >= voters.STABLE_S)
        wanted = voters.grown(now, self._seen(), stable, self._wanted)
        if wanted != now:
            self._env.log.info("the leader changes who votes", wanted=self._wanted, under_way=voters.under_way(wanted))
            self._desk.dispatch(ConfigurationWanted(now, wanted))

    # ---- notes ----

    def changed(self, changed: ConfigurationChanged) -> bool:
        """Log the voters once a change of them is committed. True when they differ from the last time."""
        now, before = changed.configuration, self._told
        if not changed.committed or now == before:
            return False
        self._told = now
        log = self._env.log
        if before is not None:
            log.info("who votes", voters=list(now.hosts), under_way=voters.under_way(now))
        for told in self.notes():
            log.warning("who votes", why=told)
        return True

    def notes(self, source: str = "agent.toml") -> list[str]:
        """Warnings about the voters, one sentence each."""
        now = self._desk.configuration
        found = [
            voters.differs(self._founders, now, source),
            voters.not_followed(self._desk.stranger, self._founders),
            voters.even(now),
            *(voters.of_another_rack(host) for host in sorted(self.strangers)),
        ]
        return [each for each in found if each]

    def stranger(self, host: HostId) -> None:
        """Note that a message of another rack's log came from this host."""
        if host not in self.strangers:
            told = voters.of_another_rack(host)
            self._env.log.error("a host has the log of another rack", host=host, why=told)
        self.strangers[host] = self._env.clock.now_s()


def _again(what: str, why: str) -> ChangeReply:
    return ChangeReply(
        voters.AGAIN, what, why[:REASON_MAX], "try again in a few seconds: repeating the command is harmless"
    )
