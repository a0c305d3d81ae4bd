"""The voters: requests to the leader to change them, and its answers.

`decide` is the whole decision: its arguments are a request, the configuration of the log and the hosts that answer; its
result is the next configuration, or a refusal of three lines. A request that is fulfilled already, or under way, is no
error: asking twice is harmless.
"""

from collections.abc import Iterable, Sequence

import msgspec

from agent.raft.messages import ChangeVoters, Configuration
from agent.raft.policy import quorum
from covey.core.errors import Refused
from covey.core.ids import HostId

VOTERS_AT_MOST = 7
"""The most voters: more make every change slower and protect against nothing that seven do not."""
STABLE_S = 30.0
"""Seconds for which a host has been alive, with nothing wrong with it, before the leader lets it vote by itself
(chosen: longer than a suspicion lasts, shorter than somebody watches an installation)."""
REFUSED, AGAIN = 4, 75
NOBODY = HostId("")


class VotersSeen(msgspec.Struct, frozen=True):
    """The hosts of the rack as the leader knows them."""

    alive: frozenset[HostId]
    """The hosts that are alive by gossip, the leader included."""
    away: frozenset[HostId]
    """The hosts that gossip knows, but that are gone or left."""
    heard: frozenset[HostId]
    """Hosts that answered the leader within an election timeout, itself included."""
    strangers: frozenset[HostId]
    """Hosts whose log is of another rack."""


def decide(asked: ChangeVoters, now: Configuration, rack: VotersSeen) -> Configuration:
    """The next configuration; the present one when the request is fulfilled or under way. Refused."""
    add, remove = asked.add, asked.remove
    if (not add and not remove) or add == remove:
        raise Refused(2, "nothing to change", "expected a host to add, a host to remove, or one of each", NEXT)
    if (now.learner or now.leaving) and (add, remove) != (now.learner, now.leaving):
        return _while_another_is_under_way(asked, now)
    if remove and remove not in now.hosts and remove not in rack.alive | rack.away:
        why = f"no host of that name is known; {', '.join(now.hosts)} {_vote(now.hosts)}"
        raise Refused(REFUSED, f"{remove} does not vote", why, NEXT)
    if (now.learner or now.leaving) or _fulfilled(asked, now):
        return now
    if add:
        _check_new(asked, now, rack)
    if remove:
        _check_old(asked, now, rack)
    learner = add if add not in now.hosts else NOBODY
    if remove and (learner or remove not in rack.heard):  # how many should vote is still for the leader to see to
        return msgspec.structs.replace(now, learner=learner, leaving=remove)
    return _by_people(now, learner, remove)


def _by_people(now: Configuration, learner: HostId, leaving: HostId) -> Configuration:
    return msgspec.structs.replace(now, learner=learner, leaving=leaving, by_people=True)


def grown(now: Configuration, rack: VotersSeen, stable: frozenset[HostId], wanted: int) -> Configuration:
    """The next configuration that the leader asks for by itself; the present one when it asks for none. `stable`: hosts
    that have been alive for `STABLE_S`, with nothing wrong.

    A second voter alone would make the log weaker: two are added, one after the other, or none. Nothing is added while
    a voter is silent, and an addition whose host is not alive any more is called off, so that another can follow."""
    if now.by_people or now.leaving:
        return now
    if now.learner:
        return now if now.learner in rack.alive else msgspec.structs.replace(now, learner=NOBODY)
    able = sorted((stable & rack.alive & rack.heard) - rack.strangers - {*now.hosts})
    count = min(wanted, len(now.hosts) + len(able))
    aim = count if count % 2 else count - 1
    if len(now.hosts) >= aim or not {*now.hosts} <= rack.heard:
        return now
    return msgspec.structs.replace(now, learner=able[0])


NEXT = "agentctl voters"


def _fulfilled(asked: ChangeVoters, now: Configuration) -> bool:
    return (not asked.add or asked.add in now.hosts) and (not asked.remove or asked.remove not in now.hosts)


def _while_another_is_under_way(asked: ChangeVoters, now: Configuration) -> Configuration:
    """A change under way can be called off by asking for its opposite; any other request is refused."""
    if asked.remove == now.learner and not asked.add and asked.remove:
        return _by_people(now, NOBODY, NOBODY)
    if asked.add == now.leaving and not asked.remove and not now.learner and asked.add:
        return _by_people(now, now.learner, NOBODY)
    if now.learner:
        why, back = f"{under_way(now)}; one change at a time", f"agentctl voters remove {now.learner}"
    else:
        why, back = f"{under_way(now)}; one change at a time", f"agentctl voters add {now.leaving}"
    raise Refused(REFUSED, "the voters cannot be changed now", why, f"wait (see {NEXT}), or cancel it: {back}")


def _check_new(asked: ChangeVoters, now: Configuration, rack: VotersSeen) -> None:
    new = asked.add
    if new in now.hosts:
        return
    if new in rack.strangers:
        why = "its log belongs to another rack"
        raise Refused(REFUSED, f"{new} cannot vote here", why, f"on {new}: {GIVE_UP_LOG}")
    if new not in rack.alive and new not in rack.away:
        why = "gossip knows no host of that name"
        raise Refused(REFUSED, f"{new} cannot vote", why, "agentctl hosts lists the names; start its agent first")
    if new not in rack.alive and not asked.force:
        next_step = "start its agent; or add --force, and it catches up when it returns"
        raise Refused(REFUSED, f"{new} cannot vote now", "it is away", next_step)
    if len(now.voters) - bool(asked.remove) >= VOTERS_AT_MOST:
        why = f"{len(now.voters)} hosts vote; more than {VOTERS_AT_MOST} make the log slower, not safer"
        raise Refused(REFUSED, f"{new} would be one voter too many", why, "agentctl voters replace OLD NEW")


GIVE_UP_LOG = "agentctl rack join HOST:7946 --leave-own    (HOST: one of this rack)"


def _check_old(asked: ChangeVoters, now: Configuration, rack: VotersSeen) -> None:
    old, new = asked.remove, asked.add
    if old not in now.hosts:
        why = f"it does not vote; {', '.join(now.hosts)} do"
        raise Refused(REFUSED, f"{old} cannot be replaced", why, f"agentctl voters add {new}")
    rest = [host for host in now.hosts if host != old]
    if not rest and not new:
        why = "it is the last voter: without it nothing could be decided any more"
        raise Refused(REFUSED, f"{old} cannot be removed", why, f"agentctl voters replace {old} NEW")
    joins = [new] if new and new not in now.hosts else []
    before, after = [*now.hosts, *joins], [*rest, *joins]
    coming = {*rack.heard, new}
    for voters in (before, after):
        if not _majority(voters, coming):
            silent = [host for host in voters if host not in coming]
            why = f"a majority of {', '.join(voters)} must answer, and {', '.join(silent)} {_do(silent)} not"
            next_step = f"bring {silent[0]} back first, or remove or replace {silent[0]} instead"
            raise Refused(REFUSED, f"{old} cannot be {'replaced' if new else 'removed'} now", why, next_step)


def _vote(hosts: Sequence[HostId]) -> str:
    return "votes" if len(hosts) == 1 else "vote"


def _do(hosts: Sequence[HostId]) -> str:
    return "does" if len(hosts) == 1 else "do"


def _majority(voters: list[HostId], heard: Iterable[HostId]) -> bool:
    return len({*voters} & {*heard}) >= quorum(len(voters))


# ---- in words ----


def under_way(now: Configuration) -> str:
    """The change that is under way, in words; empty when there is none."""
    if now.learner and now.leaving:
        return f"{now.learner} will replace {now.leaving}; it is receiving the log"
    if now.learner:
        return f"{now.learner} will vote; it is receiving the log"
    return f"{now.leaving} will stop voting" if now.leaving else ""


def accepted(asked: ChangeVoters, before: Configuration, after: Configuration) -> str:
    """The answer to a request that was not refused, in words."""
    if not (after.learner or after.leaving) and (before.learner or before.leaving):
        return f"cancelled: {', '.join(after.hosts)} {_vote(after.hosts)}"
    return under_way(after) or f"no change needed: {', '.join(after.hosts)} {_vote(after.hosts)}"


def even(now: Configuration) -> str:
    """The warning about an even number of voters; empty for an odd one."""
    count = len(now.voters)
    if count % 2 or now.learner or now.leaving:
        return ""
    return (
        f"{count} hosts vote: {quorum(count)} of them must answer, so they survive no more losses than {count - 1} "
        "would; add or remove one"
    )


def of_another_rack(host: HostId) -> str:
    """The warning about a host whose log is of another rack."""
    return (
        f"{host} has a log of a different origin from the one here, so the two cannot be merged; "
        "next: on the host that gives up its log: agentctl rack join HOST:7946 --leave-own    "
        "(HOST: one of the rack that stays)"
    )


def not_followed(leader: HostId | None, founders: Iterable[str]) -> str:
    """The warning of a host whose log has not begun, about a leader that is none of agent.toml's voters."""
    if leader is None:
        return ""
    return (
        f"{leader} leads a log, and none of its voters is in leader.voters = {', '.join(founders)}: "
        f"if it is this rack's, name {leader} there and restart the agent"
    )


def differs(founders: Iterable[str], now: Configuration, source: str) -> str:
    """The warning that agent.toml names other voters than the log; empty when it does not."""
    named = sorted(founders)
    if named == sorted(now.hosts):
        return ""
    return (
        f"{source} says leader.voters = {', '.join(named)}; the log says {', '.join(now.hosts)}, and the log counts: "
        "change voters with agentctl voters, and write them into agent.toml"
    )
