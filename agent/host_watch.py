"""What this host sees of the others, and what is wrong with them: in the event log as it happens, in views as long as
it lasts.

Gossip tells of suspicions, returns, losses and claims of names; hosts gossip which rack's log they follow (`LogNow`)
and what they see themselves (`WrongNow`). Whatever a reader has to mend is a `Trouble` of one host: what is wrong, and
what to type. Hosts that share a key but began logs of their own are alive to one another and yet several racks; no
agent merges them, since one log and its jobs would be lost, and no person had said so.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from agent.event_log import EventLog
from covey.core.ids import HostId
from covey.core.version import RELEASE, VERSION, follow, release_of
from covey.ports.addresses import Address
from covey.ports.env import Env
from gossip.service import (
    GossipEvent,
    HostDown,
    HostUp,
    LaterBootKnown,
    MemberAway,
    MemberSuspected,
    NameConflict,
    TableFull,
)
from plugins.facts import HostState, HostView
from plugins.gossiped import LogNow, WrongNow, version_of
from plugins.views import Trouble

SEEN_KEPT_S = 120.0
"""Seconds for which a conflict of names, or a full table, counts after gossip last told of it; gossip repeats it every
30 s, and a machine that is not let in calls at least every 10 s."""
LASTING_S = 15.0
"""Seconds after which something is called wrong that otherwise settles by itself when a rack starts or elects."""
FLAPS, FLAPS_S = 3, 600.0
"""The number of returns of a host that was suspected, lost, or began anew without a word, and the seconds within which
they count."""
NAMES_TOLD = 3
"""The most contested names that a host gossips: a value has room for this many of the longest."""
NOT_LIVE: Sequence[HostState] = ("gone", "left", "away")


class LogSeen(msgspec.Struct, frozen=True):
    """This host's own part in the log."""

    now: LogNow
    voters: tuple[HostId, ...]
    at: Address
    """The address under which other hosts reach the gossip of this one."""


class Return(msgspec.Struct, frozen=True):
    """A host came back."""

    at_s: float
    by: HostId | None
    """The host that had suspected it first; None: none had."""


class Claimed(msgspec.Struct, frozen=True):
    """Two machines claim one name."""

    at: Address
    """Address of the machine that is not let in, as far as it is known."""
    told_s: float
    """When gossip last told of it."""


class HostWatch:
    """What is wrong with hosts. `heard` takes what gossip tells, `look` is called once a second."""

    def __init__(self, env: Env, me: HostId, event_log: EventLog) -> None:
        self._env, self._me, self._event_log = env, me, event_log
        self._state: dict[HostId, HostState] = {}
        """The state of each host, as gossip told it last."""
        self._returns: dict[HostId, deque[Return]] = {}
        self._by: dict[HostId, HostId] = {}
        """Who suspected a host first, the last time."""
        self._claimed: dict[HostId, Claimed] = {}
        self._full: tuple[HostId, float] | None = None
        """The host that was last not let in, and when."""
        self._since: dict[tuple[HostId, str], float] = {}
        """When each trouble began that has to last before it is told."""
        self._troubles: dict[HostId, dict[str, Trouble]] = {}

    # ---- what gossip tells ----

    def heard(self, event: GossipEvent, view: HostView | None) -> None:
        """Take an event of a host. `view` is that host, as gossip has it after the event."""
        match event:
            case HostUp():
                self._up(event.host, view)
            case MemberSuspected():
                self._state[event.host] = "suspect"
                self._by.setdefault(event.host, event.by)
                self._note(event.host, "suspected", f"{event.by} could not reach it", "suspect", view)
            case MemberAway():
                self._state[event.host] = "away"
                self._note(event.host, "away", f"it restarts, and will be back within {event.for_s:g} s", "away", view)
            case HostDown():
                self._down(event, view)
            case NameConflict():
                self._conflict(event)
            case TableFull():
                self._table_full(event)
            case LaterBootKnown():
                pass

    def _note(self, host: HostId, what: str, why: str, kind: str, view: HostView | None) -> None:
        """Note an event of a host. Hosts that see it note it under one key."""
        key = "" if view is None else f"{kind}/{view.boot}.{view.incarnation}"
        self._event_log.note(f"host/{host}", what, why, key=key)

    def _up(self, host: HostId, view: HostView | None) -> None:
        was, self._state[host] = self._state.get(host), "alive"
        by = self._by.pop(host, None)
        where = "" if view is None or not view.address else f"at {view.address}"
        match was:
            case None | "left":
                said = "joined", where or "gossip reached it"
            case "suspect":
                said = "answers again", "it refuted the suspicion"
            case "gone":
                said = "came back", where or "gossip reached it"
            case "away":
                said = "came back", "after the restart that it announced"
            case "alive":
                said = "restarted", f"its agent was restarted without notice, {where}".rstrip(", ")
        self._note(host, *said, "up", view)
        if was in ("suspect", "gone", "alive"):
            self._returns.setdefault(host, deque(maxlen=64)).append(Return(self._env.clock.now_s(), by))

    def _down(self, event: HostDown, view: HostView | None) -> None:
        was, self._state[event.host] = self._state.get(event.host), "left" if event.left else "gone"
        if event.left:
            self._note(event.host, "left", "it said so itself", "down", view)
        elif was == "away":
            self._note(event.host, "gone", "it did not come back in time", "down", view)
        else:
            by = None if view is None else view.suspected_by
            why = f"{by or 'another host'} could not reach it, and it did not refute that in time"
            self._note(event.host, "gone", why, "down", view)

    def _conflict(self, event: NameConflict) -> None:
        before, now_s = self._claimed.get(event.host), self._env.clock.now_s()
        at = event.at or (before.at if before else "")
        self._claimed[event.host] = Claimed(at, now_s)
        if before is None:
            trouble = contested(at)
            self._env.log.error("name conflict", peer=event.host, why=trouble.what, next=trouble.next)
            self._event_log.note(f"host/{event.host}", "name conflict", f"{trouble.what}; next: {trouble.next}")

    def _table_full(self, event: TableFull) -> None:
        before, self._full = self._full, (event.host, self._env.clock.now_s())
        if before is None:
            trouble = full(event.host)
            self._env.log.error("a host is not admitted", peer=event.host, why=trouble.what, next=trouble.next)
            self._event_log.note(f"host/{event.host}", "not admitted", f"hosts_max of {self._me} is reached")
            self._event_log.note(f"host/{self._me}", "hosts_max reached", f"{trouble.what}; next: {trouble.next}")

    # ---- once a second ----

    def look(self, views: Sequence[HostView], log: LogSeen) -> None:
        """Find out what is wrong now."""
        now_s = self._env.clock.now_s()
        self._forget(views, now_s)
        found: dict[HostId, dict[str, Trouble]] = {}
        lasting: set[tuple[HostId, str]] = set()
        said = {view.host: wrong for view in views if isinstance(wrong := _said(view, self), WrongNow)}
        claimed = {name for wrong in said.values() for name in wrong.names}
        known = {view.host for view in views}
        for view in views:
            own = said.get(view.host, WrongNow())
            for kind, trouble, waits in self._of(view, own, view.host in claimed, known, log):
                if waits:
                    lasting.add((view.host, kind))
                    if now_s - self._since.setdefault((view.host, kind), now_s) < LASTING_S:
                        continue
                found.setdefault(view.host, {})[kind] = trouble
        self._since = {each: since_s for each, since_s in self._since.items() if each in lasting}
        for host, troubles in found.items():
            for kind, trouble in troubles.items():
                if kind.startswith("rack ") and kind not in self._troubles.get(host, {}):
                    self._env.log.error("a host of another rack", peer=host, why=trouble.what, next=trouble.next)
                    self._event_log.note(f"host/{host}", "is of another rack", trouble.what, key=kind)
        self._troubles = found

    def _forget(self, views: Sequence[HostView], now_s: float) -> None:
        for host, claimed in list(self._claimed.items()):
            if now_s - claimed.told_s > SEEN_KEPT_S:
                del self._claimed[host]
                self._event_log.note(f"host/{host}", "name conflict over", "no other machine claims the name any more")
        if self._full is not None and now_s - self._full[1] > SEEN_KEPT_S:
            self._full = None
            self._event_log.note(f"host/{self._me}", "hosts_max not reached", "no host is refused any more")
        known = {view.host for view in views}
        for host, returns in list(self._returns.items()):
            while returns and now_s - returns[0].at_s > FLAPS_S:
                returns.popleft()
            if not returns or host not in known:
                del self._returns[host]
        self._state = {host: state for host, state in self._state.items() if host in known}
        self._by = {host: by for host, by in self._by.items() if host in known}

    def _of(
        self, view: HostView, own: WrongNow, is_claimed: bool, known: set[HostId], log: LogSeen
    ) -> list[tuple[str, Trouble, bool]]:
        """The troubles of a host, each with its kind, and whether it has to last before it is told. `own`: what it says
        is wrong; `is_claimed`: whether any host says that two have its name."""
        found: list[tuple[str, Trouble, bool]] = []
        if is_claimed:
            claimed = self._claimed.get(view.host)
            found.append(("twin", contested(claimed.at if claimed else ""), False))
        if own.full:
            found.append(("full", full(own.full), False))
        if self._flaps(view.host) and not self._is_slandered(view.host):
            found.append(("flaps", flapping(view.host, len(self._returns[view.host])), False))
        if view.host == self._me:
            unknown = sorted(set(log.voters) - known)
            found += [(f"unknown {host}", unknown_voter(host), True) for host in unknown]
        elif view.state not in NOT_LIVE:
            found += _of_its_log(view, log) if log.now.rack else []
            version = version_of(view)
            release = release_of(version)
            if version and (release is None or not follow(release, RELEASE)):
                found.append(("version", other_version(version), False))
        return found

    def _flaps(self, host: HostId) -> bool:
        return len(self._returns.get(host, ())) >= FLAPS

    def _is_slandered(self, host: HostId) -> bool:
        """Whether only one other host ever lost this one, and that host is itself lost again and again, by others too:
        then it is the other one whose link fails. Whoever comes back says of others that they were gone."""
        by = {each.by for each in self._returns[host]}
        (one,) = by if len(by) == 1 else (None,)
        return one is not None and self._flaps(one) and {each.by for each in self._returns[one]} != {host}

    # ---- for others ----

    def told(self) -> WrongNow:
        """What this host itself saw to be wrong, for the others."""
        full_for = self._full[0] if self._full is not None else HostId("")
        return WrongNow(tuple(sorted(self._claimed))[:NAMES_TOLD], full_for)

    @property
    def troubles(self) -> Mapping[HostId, Sequence[Trouble]]:
        return {host: tuple(found.values()) for host, found in sorted(self._troubles.items())}


def _said(view: HostView, watch: HostWatch) -> msgspec.Struct | None:
    """What a host that is not gone says is wrong; this host needs no gossip for its own word."""
    if view.host == watch._me:
        return watch.told()
    return None if view.state in NOT_LIVE else view.value("wrong", WrongNow)


def _of_its_log(view: HostView, log: LogSeen) -> list[tuple[str, Trouble, bool]]:
    theirs = view.value("log", LogNow)
    now = theirs if isinstance(theirs, LogNow) else LogNow()
    if now.rack and now.rack != log.now.rack:
        return [(f"rack {now.rack.hex()}", another_rack(view.host, now.leader, log), False)]
    if not (now.rack and now.leader) and log.now.leader:
        return [("leaderless", leaderless(view.host, log.now.leader), True)]
    return []


# ---- in words --------------------------------------------------------------------------------------------------------


def contested(at: Address) -> Trouble:
    other = f" (the other one at {at})" if at else ""
    return Trouble(
        f"two machines claim this name{other}, and only one of them is admitted",
        "give one of them another name in its agent.toml (name = ...), and restart its agent",
    )


def full(host: HostId) -> Trouble:
    return Trouble(
        f"it admits no more hosts, such as {host}: the rack has as many hosts as [gossip] hosts_max allows",
        "raise hosts_max under [gossip] in the agent.toml of every host, and restart the agents one after another",
    )


def flapping(host: HostId, times: int) -> Trouble:
    minutes = math.ceil(FLAPS_S / 60)
    return Trouble(
        f"it was lost and came back {times} times in the last {minutes} min: its network or its machine fails, or two "
        "machines have one identity file",
        f"agentctl why host/{host}",
    )


def another_rack(host: HostId, leader: HostId, log: LogSeen) -> Trouble:
    who = (
        "which it leads itself" if leader == host else f"which {leader} leads" if leader else "which has no leader now"
    )
    return Trouble(
        f"it belongs to another rack, {who}: its log has a different origin from "
        "the one here, so the two cannot be merged",
        f"choose which rack stays; to have {host} join this one, type there: agentctl rack join {log.at} --leave-own"
        "    (jobs and quotas of its rack are forgotten)",
    )


def leaderless(host: HostId, leader: HostId) -> Trouble:
    return Trouble(
        f"it knows no leader, while {leader} leads here: it gets no work, and answers from an old copy of the log",
        f"on {host}: agentctl status, agentctl voters",
    )


def other_version(version: str) -> Trouble:
    return Trouble(
        f"it runs Covey {version}, and here runs {VERSION}: agents of one rack are at most one MINOR apart",
        "upgrade the older ones, one MINOR at a time; agentctl version shows what each host runs",
    )


def unknown_voter(host: HostId) -> Trouble:
    return Trouble(
        f"{host} is a voter, but gossip knows no host of that name",
        f"start its agent, or: agentctl voters remove {host}",
    )
