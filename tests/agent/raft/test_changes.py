"""What the leader says to a change of voters, and what a host says about the voters."""

import asyncio
from collections.abc import Callable, Iterable

import msgspec
import pytest

from agent.raft.messages import NO_RACK, ChangeVoters, Configuration
from agent.raft.policy import founders
from agent.raft.service import voters
from covey.core.errors import Refused
from covey.core.ids import HostId
from tests.agent.raft.rack import Rack, virtual

A, B, C, D = (HostId(name) for name in "abcd")
NONE = HostId("")


def now(*hosts: HostId, learner: HostId = NONE, leaving: HostId = NONE) -> Configuration:
    return msgspec.structs.replace(founders(hosts, b"rack one"), learner=learner, leaving=leaving)


def changed(*hosts: HostId, learner: HostId = NONE, leaving: HostId = NONE) -> Configuration:
    """What a person made of it: from then on the leader adds no voter by itself."""
    return msgspec.structs.replace(now(*hosts, learner=learner, leaving=leaving), by_people=True)


def rack(
    heard: Iterable[HostId] = (A, B, C, D), away: Iterable[HostId] = (), strangers: Iterable[HostId] = ()
) -> voters.VotersSeen:
    there = frozenset(heard)
    return voters.VotersSeen(frozenset({A, B, C, D}) - frozenset(away), frozenset(away), there, frozenset(strangers))


def wish(add: HostId = NONE, remove: HostId = NONE, force: bool = False) -> ChangeVoters:
    return ChangeVoters(NO_RACK, add, remove, force)


def refused(asked: ChangeVoters, configuration: Configuration, known: voters.VotersSeen) -> str:
    with pytest.raises(Refused) as no:
        voters.decide(asked, configuration, known)
    assert no.value.code in (2, 4) and no.value.what and no.value.why and no.value.next
    return f"{no.value.what}: {no.value.why}; {no.value.next}"


def test_a_wish_becomes_the_first_step_of_a_change() -> None:
    assert voters.decide(wish(D), now(A, B, C), rack()) == changed(A, B, C, learner=D)
    assert voters.decide(wish(remove=C), now(A, B, C), rack()) == changed(A, B, C, leaving=C)
    assert voters.decide(wish(D, C), now(A, B, C), rack()) == now(A, B, C, learner=D, leaving=C)


def test_who_mends_a_loss_or_replaces_leaves_the_number_of_voters_to_the_leader() -> None:
    for asked in (wish(remove=C), wish(D, C)):
        assert not voters.decide(asked, now(A, B, C), rack(heard=(A, B, D))).by_people
        assert voters.decide(asked, changed(A, B, C), rack(heard=(A, B, D))).by_people, "what people decided stays"
    assert voters.decide(wish(remove=C), now(A, B, C), rack()).by_people
    assert not voters.decide(wish(D, C), now(A, B, C), rack()).by_people
    assert voters.decide(wish(A, C), now(A, B, C), rack()).by_people, "nobody comes in its place"


def test_asking_twice_is_harmless() -> None:
    for configuration in (now(A, B, C, learner=D, leaving=C), now(A, B, D)):
        assert voters.decide(wish(D, C), configuration, rack()) == configuration
    assert voters.decide(wish(remove=D), now(A, B, C), rack()) == now(A, B, C)


def test_a_change_is_called_off_by_its_contrary_and_others_wait() -> None:
    under_way = now(A, B, C, learner=D, leaving=C)
    assert voters.decide(wish(remove=D), under_way, rack()) == changed(A, B, C)
    assert voters.decide(wish(C), now(A, B, C, leaving=C), rack()) == changed(A, B, C)
    assert "d will replace c" in refused(wish(remove=A), under_way, rack())
    assert "cancel it: agentctl voters remove d" in refused(wish(remove=A), under_way, rack())


def test_what_cannot_be_is_refused_in_words() -> None:
    assert "gossip knows no host of that name" in refused(wish(HostId("gpu9")), now(A), rack())
    assert "no host of that name is known" in refused(wish(remove=HostId("gpu9")), now(A), rack())
    assert "d cannot vote now: it is away; start its agent; or add --force" in refused(wish(D), now(A), rack(away=[D]))
    assert "the last voter" in refused(wish(remove=A), now(A), rack())
    assert "belongs to another rack" in refused(wish(D), now(A), rack(strangers=[D]))
    assert "it does not vote" in refused(wish(D, HostId("c")), now(A, B), rack())
    assert "nothing to change" in refused(wish(), now(A), rack())


def test_a_host_that_is_away_may_be_wanted_by_force() -> None:
    assert voters.decide(wish(D, force=True), now(A), rack(away=[D])) == changed(A, learner=D)


def test_nobody_is_removed_when_the_others_could_not_commit() -> None:
    alone = rack(heard=[A, B])
    assert "a majority of a, c must answer, and c does not" in refused(wish(remove=B), now(A, B, C), alone)
    assert voters.decide(wish(remove=C), now(A, B, C), alone) == now(A, B, C, leaving=C), "the dead one may go"
    assert voters.decide(wish(D, C), now(A, B, C), alone) == now(A, B, C, learner=D, leaving=C)
    assert "must answer" in refused(wish(D, A), now(A, B, C), rack(heard=[A]))


def test_an_even_number_and_another_agent_toml_are_told() -> None:
    assert "2 hosts vote: 2 of them must answer" in voters.even(now(A, B))
    assert voters.even(now(A, B, C)) == voters.even(now(A, B, learner=C)) == ""
    assert "says leader.voters = a, b, c; the log says a, and the log counts" in voters.differs([A, B, C], now(A), "f")
    assert voters.differs([C, A, B], now(A, B, C), "f") == ""


# ---- whole logs ----


@virtual
async def test_any_host_may_be_asked_and_a_rack_of_one_grows_to_three() -> None:
    async with Rack("a", "b", "c", voters=1) as rack:
        await (await rack.led()).log.propose(b"before")
        for name in ("b", "c"):
            await rack.members["c"].log.change_voters(name, "", False)
            await until(lambda name=name: all(name in each.log.voters for each in rack.members.values()))  # type: ignore[misc]
        rack.members["a"].kill()
        heir = await rack.led()
        await heir.log.propose(b"after")
        assert heir.commands == ["before", "after"]


@virtual
async def test_the_running_logs_voters_win_over_agent_toml_and_the_difference_is_told() -> None:
    """Found so: a rack of one whose agent.toml is given three voters ended in a traceback and an endless restart."""
    async with Rack("a", "b", "c", voters=1) as rack:
        member = rack.members["a"]
        await (await rack.led()).log.propose(b"kept")
        await member.stop()
        rack.settings = msgspec.structs.replace(rack.settings, voters=("a", "b", "c"))
        await member.start()
        assert (await rack.led()) is member and member.log.voters == (A,)
        await member.log.propose(b"more")
        assert member.commands[-1] == "more"
        (note,) = member.log.changes.notes("agent.toml")
        assert "leader.voters = a, b, c; the log says a, and the log counts" in note


@virtual
async def test_a_new_host_that_names_none_who_votes_says_whom_to_name() -> None:
    async with Rack("a", "b", voters=1) as rack:
        await (await rack.led()).log.propose(b"ours")
        late = rack.members["b"]
        await late.stop()
        late.disk.files.clear()
        rack.settings = msgspec.structs.replace(rack.settings, voters=("x",))
        await late.start()
        await asyncio.sleep(3)
        assert late.commands == []
        assert any("name a there and restart the agent" in note for note in late.log.changes.notes())
        await rack.members["a"].log.change_voters("b", "", False)  # people want it to vote: then it follows
        await until(lambda: late.log.voters == (A, B))
        assert late.commands == ["ours"]


@virtual
async def test_the_log_of_another_rack_is_refused_and_told_on_both_sides() -> None:
    async with Rack("a", "b", voters=1) as rack:
        await (await rack.led()).log.propose(b"ours")
        other = rack.members["b"]
        await other.stop()
        other.disk.files.clear()
        rack.settings = msgspec.structs.replace(rack.settings, voters=("b",))
        await other.start()
        await other.log.propose(b"theirs")
        await asyncio.sleep(3)
        ours = rack.members["a"]
        assert (ours.commands, other.commands) == (["ours"], ["theirs"])
        assert list(ours.log.changes.strangers) == ["b"] and list(other.log.changes.strangers) == ["a"]
        with pytest.raises(Refused, match="belongs to another rack"):
            await ours.log.change_voters("b", "", False)


async def until(reached: Callable[[], bool], seconds: float = 10.0) -> None:
    end_s = asyncio.get_running_loop().time() + seconds
    while not reached():
        assert asyncio.get_running_loop().time() < end_s, "not in time"
        await asyncio.sleep(0.05)
