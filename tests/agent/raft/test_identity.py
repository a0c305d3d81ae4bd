"""A voter is a name and the log it votes with: one that forgot what it acknowledged neither votes nor counts."""

import asyncio
import re
from typing import Any

import pytest

from agent.raft.disk import FOLDER, Contradicted, DiskRefused
from agent.raft.machine import Role
from agent.raft.machine.types import Tick
from agent.raft.messages import AppendReply, Configuration, RequestVote, Voter, VoteReply, configuration_of
from covey.core.errors import NoLeader, OutcomeUnknown
from tests.agent.raft.rack import Member, Rack, virtual
from tests.agent.raft.stage import A, B, C, Stage


def files_of(member: Member) -> dict[str, bytes]:
    return {name: data for name, data in member.disk.files.items() if name.startswith(FOLDER)}


def without_log(member: Member) -> None:
    member.disk.files = {name: data for name, data in member.disk.files.items() if not name.startswith(FOLDER)}


def with_older_log(member: Member, older: dict[str, bytes]) -> None:
    without_log(member)
    member.disk.files |= older


def cut_in_half(member: Member) -> None:
    name = max(files_of(member))
    member.disk.files[name] = member.disk.files[name][: len(member.disk.files[name]) // 2]


def with_its_last_frame_damaged(member: Member) -> None:
    name = max(files_of(member))
    whole = member.disk.files[name]
    member.disk.files[name] = whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:]


def log_of(member: Member) -> Any:
    return member.log


def identity(member: Member) -> bytes:
    raft = log_of(member)._raft
    assert raft is not None
    return bytes(raft.identity)


def votes(member: Member) -> bool:
    raft = log_of(member)._raft
    return raft is not None and not raft.forgotten


async def nobody_leads(rack: Rack, seconds: float) -> None:
    for _ in range(int(seconds / 0.05)):
        await asyncio.sleep(0.05)
        assert rack.leader() is None, "somebody leads without the log that was acknowledged"


LOSSES = {
    "gone": without_log,
    "cut in half": cut_in_half,
    "its last frame damaged": with_its_last_frame_damaged,
}


@pytest.mark.parametrize("met_before", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
@virtual
async def test_what_two_of_three_committed_outlives_the_log_of_one(loss: str, met_before: bool) -> None:
    """The one that was away and the one that lost its log elect nobody, whether they have met before or not."""
    rack = Rack("a", "b", "c")
    present = [rack.members[name] for name in ("abc" if met_before else "ac")]
    for member in present:
        await member.start()
    a, b, c = rack.members.values()
    await (await rack.led()).log.propose(b"first")
    if met_before:
        await asyncio.sleep(1)
        await b.stop()
    for number in range(20):
        await (await rack.led()).log.propose(f"job {number}".encode())
    await asyncio.sleep(1)
    await a.stop()
    await c.stop()
    LOSSES[loss](c)
    before = identity(c)
    await b.start()
    await c.start()
    await nobody_leads(rack, 20)
    assert identity(c) != before, "another log is another voter"
    assert not votes(c)
    assert "the log of this host is new, or holds less" in c.log.trouble
    assert b.log.trouble == ""
    await a.start()
    leader = await rack.led()
    await leader.log.propose(b"last")
    await asyncio.sleep(3)
    assert a.commands == b.commands == c.commands == ["first", *(f"job {n}" for n in range(20)), "last"]
    assert votes(c), "the others brought it up to date: it votes again"
    assert {member.log.trouble for member in (a, b, c)} == {""}
    await a.stop()
    await (await rack.led()).log.propose(b"without a")
    await asyncio.sleep(1)
    assert b.commands == c.commands
    await rack.__aexit__()


@virtual
async def test_a_fresh_rack_forms_with_two_of_three_and_the_third_later() -> None:
    rack = Rack("a", "b", "c")
    a, b, c = rack.members.values()
    await a.start()
    await b.start()
    await (await rack.led()).log.propose(b"1")
    await c.start()
    await asyncio.sleep(2)
    assert all(map(votes, (a, b, c)))
    await a.stop()
    await (await rack.led()).log.propose(b"2")
    await asyncio.sleep(1)
    assert c.commands == b.commands == ["1", "2"]
    await rack.__aexit__()


@virtual
async def test_after_a_restart_of_everybody_everybody_votes() -> None:
    rack = Rack("a", "b", "c")
    for member in rack.members.values():
        await member.start()
    await (await rack.led()).log.propose(b"1")
    before = {member.name: identity(member) for member in rack.members.values()}
    for member in rack.members.values():
        member.kill()
    for member in rack.members.values():
        await member.start()
    await (await rack.led()).log.propose(b"2")
    assert {member.name: identity(member) for member in rack.members.values()} == before
    assert all(map(votes, rack.members.values()))
    await rack.__aexit__()


@virtual
async def test_a_voter_whose_folder_was_moved_away_is_brought_back_while_the_others_work() -> None:
    """What the error message of a damaged log advises."""
    async with Rack("a", "b", "c", snapshot_entries=16, keep_entries=4) as rack:
        for number in range(50):
            await (await rack.led()).log.propose(f"{number}".encode())
        leader = await rack.led()
        victim = next(member for member in rack.members.values() if member is not leader)
        for _ in range(3):
            await victim.stop()
            without_log(victim)
            await victim.start()
            await leader.log.propose(b"more")
            await asyncio.sleep(2)
            assert victim.commands == leader.commands
            assert votes(victim)


@virtual
async def test_a_leader_tells_a_voter_that_its_log_became_shorter() -> None:
    """The whole state directory is an older one, so the host itself cannot know; with the third voter away the leader
    cannot go on, and does not pretend to."""
    rack = Rack("a", "b", "c")
    for member in rack.members.values():
        await member.start()
    leader = await rack.led()
    followers = [member for member in rack.members.values() if member is not leader]
    victim, away = followers
    await leader.log.propose(b"1")
    await asyncio.sleep(1)
    await victim.stop()
    older = dict(victim.disk.files)
    await victim.start()
    await away.stop()
    for number in range(10):
        await leader.log.propose(f"more {number}".encode())
    await victim.stop()
    victim.disk.files = older
    await victim.start()
    with pytest.raises((NoLeader, OutcomeUnknown)):
        await leader.log.propose(b"with nobody", timeout_s=4)
    assert not votes(victim)
    assert rack.leader() is None, "a leader that nobody follows says so"
    assert "a log without a vote" in leader.quiet.warnings, "and whose log does not count"
    await away.start()
    await (await rack.led()).log.propose(b"last")
    await asyncio.sleep(3)
    assert victim.commands == leader.commands == away.commands
    assert victim.commands[-1] == "last"
    assert all(map(votes, rack.members.values()))
    await rack.__aexit__()


@virtual
async def test_a_host_that_votes_alone_does_not_begin_anew_without_its_log() -> None:
    rack = Rack("a", voters=1)
    (a,) = rack.members.values()
    await a.start()
    await a.log.propose(b"1")
    await a.stop()
    files = files_of(a)
    without_log(a)
    with pytest.raises(DiskRefused, match=r"the only voter, is gone: .* restore "):
        await a.start()
    with_older_log(a, files)
    cut_in_half(a)
    with pytest.raises(DiskRefused, match=r"the only voter, holds less than it acknowledged"):
        await a.start()
    with_older_log(a, files)
    await a.start()
    assert a.commands == ["1"], "put back as it was"
    await a.stop()
    without_log(a)
    del a.disk.files["acknowledged"]
    await a.start()
    assert a.commands == [], "somebody decided to begin anew"
    await a.stop()


@virtual
async def test_a_log_of_another_host_is_nobodys_own_however_long_it_is() -> None:
    """The folder was copied over from a host that has more of it, and was heard of more often."""
    async with Rack("a", "b", "c") as rack:
        leader = await rack.led()
        await leader.log.propose(b"x")
        a, b = [member for member in rack.members.values() if member is not leader]
        known = {identity(a), identity(b)}
        await a.stop()
        for number in range(50):
            await leader.log.propose(b"%d" % number)
        await asyncio.sleep(1)
        with_older_log(a, files_of(b))
        await b.stop()
        await a.start()
        assert not votes(a) and identity(a) not in known, "it has forgotten what it acknowledged, and says so"
        await b.start()
        await asyncio.sleep(3)
        assert votes(a) and a.commands == leader.commands, "it counts once a majority of the others brought it there"


@virtual
async def test_who_votes_is_written_in_the_log_and_survives_its_snapshots() -> None:
    async with Rack("a", "b", "c", "d", snapshot_entries=16, keep_entries=2) as rack:
        await (await rack.led()).log.propose(b"0")
        await asyncio.sleep(1)
        voters = tuple(Voter(m.name, identity(m)) for m in list(rack.members.values())[:3])
        expected = Configuration(voters, (await rack.led()).log.rack)
        for number in range(60):
            await (await rack.led()).log.propose(f"{number}".encode())
        await asyncio.sleep(3)
        for member in rack.members.values():
            raft_log = log_of(member)._raft._raft_log
            assert raft_log.image is not None
            assert raft_log.configuration == raft_log.image.configuration == expected
            kept = raft_log.log.slice(raft_log.log.base_index + 1, raft_log.log.last_index)
            assert not any(map(configuration_of, kept)), "what the snapshot holds need not be in the entries"
            await member.stop()
            await member.start()
            assert log_of(member)._raft._raft_log.configuration == expected


@virtual
async def test_a_log_that_contradicts_its_leaders_is_refused_in_words() -> None:
    """The whole state of two of three is an older one, their second records too: nobody there could have known."""
    rack = Rack("a", "b", "c")
    a, b, c = rack.members.values()
    for member in (a, b, c):
        await member.start()
    await (await rack.led()).log.propose(b"old 0")
    await asyncio.sleep(1)
    older = {member.name: dict(member.disk.files) for member in (a, b)}
    for number in range(1, 10):
        await (await rack.led()).log.propose(f"old {number}".encode())
    await asyncio.sleep(1)
    for member in (a, b, c):
        await member.stop()
    for member in (a, b):
        member.disk.files = older[member.name]
        await member.start()
    for number in range(3):
        await (await rack.led()).log.propose(f"new {number}".encode())
    await c.start()
    await asyncio.sleep(10)
    assert c.commands == [f"old {number}" for number in range(10)], "nothing that was committed here is replaced"
    refused = log_of(c)._broken
    assert isinstance(refused, Contradicted)
    assert "contradicts the log of the leader" in refused.what
    assert re.search(r"entry \d+ is committed here in term \d+", refused.why)
    assert "keep a copy" in refused.next
    assert any("contradicts" in error for error in c.quiet.errors), "who runs the agent is told, and ends it"
    assert log_of(a)._broken is None
    await rack.__aexit__()


# ---- the core alone ----


def led() -> Stage:
    stage = Stage(A, B, C, identities=True)
    stage.elect(A)
    stage.propose(A, "x")
    stage.deliver()
    stage.beat(A)
    return stage


def test_a_vote_of_a_log_that_is_gone_elects_nobody() -> None:
    """All of C is gone: it takes itself for a new host and votes. Who knows its former log does not count that."""
    stage = led()
    stage.disks[C].files.clear()
    stage.restart(C)
    stage.now_s += 5
    stage.tell(A, Tick())
    assert stage.rafts[A].leading is None
    stage.told.clear()
    stage.stand(A)
    stage.without(B)
    granted = [message for message in stage.said(C, A, VoteReply) if isinstance(message, VoteReply) and message.granted]
    assert granted, "C votes: it does not know better"
    assert stage.leaders() == []
    stage.stand(A)
    stage.deliver()
    assert stage.leaders() == [A], "with the vote of B"


def test_a_log_that_came_anew_counts_and_votes_once_the_others_committed_who_it_is() -> None:
    stage = led()
    stage.lose_log(C)
    commit = stage.rafts[A].commit
    for _ in range(3):
        stage.beat(A, B)
    assert stage.rafts[C].last_index > commit, "it was told everything, who it is included"
    assert stage.rafts[A].commit == commit, "what it acknowledges makes no majority"
    assert stage.rafts[C].forgotten
    stage.now_s += 3
    assert stage.hear(C, B, RequestVote(9, False, 99, 8)) == [], "it does not vote"
    stage.tell(C, Tick())
    assert stage.rafts[C].role is Role.FOLLOWER, "nor does it stand"
    stage = led()
    stage.lose_log(C)
    for _ in range(3):
        stage.beat(A)
    assert not stage.rafts[C].forgotten
    stage.propose(A, "y")
    stage.without(B)
    assert stage.applied[A] == ["x", "y"], "with C alone: it counts again"
    stage.restart(C)
    assert not stage.rafts[C].forgotten, "and knows it after a restart"


def test_an_answer_of_the_log_that_was_lost_comes_after_one_of_the_next() -> None:
    """The leader had heard neither. It took the one it heard last for the later one, and never heard the host again."""
    stage = Stage(A, B, C, identities=True)
    stage.elect(A, C)
    stage.now_s = stage.rafts[A].wake_s
    stage.tell(A, Tick())
    stage.deliver(lambda sender, to, _: sender == C)
    late = stage.said(C, A, AppendReply)[-1]
    stage.lose_log(C)
    for _ in range(3):
        stage.beat(A)
    assert isinstance(late, AppendReply)
    assert late.identity != stage.rafts[C].identity
    known = stage.rafts[A].configuration
    stage.hear(A, C, late)
    for _ in range(3):
        stage.beat(A)
    assert stage.rafts[A].configuration == known, "which log C votes with is not said anew"
    stage.propose(A, "x")
    stage.without(B)
    assert stage.applied[A] == stage.applied[C] == ["x"], "with C, which counts again"


def test_a_new_identity_is_durable_before_anybody_hears_of_it() -> None:
    stage = led()
    older = dict(stage.disks[C].files)
    stage.propose(A, "y", "z")
    stage.deliver()
    stage.disks[C].files = older
    stage.restart(C)
    former = stage.rafts[C].identity
    stage.slow.add(C)
    stage.told.clear()
    stage.beat(A, B)
    assert stage.rafts[C].identity != former, "it was told that it had acknowledged more"
    assert stage.said(C, A, AppendReply) == []
    stage.beat(A, B)
    assert stage.said(C, A, AppendReply) == [], "a heartbeat is no exception"
    stage.slow.clear()
    stage.finish_writing(C)
    said = stage.said(C, A, AppendReply)
    assert said
    assert all(isinstance(one, AppendReply) and one.lost and one.identity == stage.rafts[C].identity for one in said)


def test_a_restart_between_a_vote_and_its_write_leaves_the_vote_free_and_untold() -> None:
    """Reference: Raft Figure 2, "updated on stable storage before responding to RPCs"."""
    stage = Stage(A, B, C, identities=True)
    stage.slow.add(B)
    stage.now_s += 2
    assert stage.hear(B, A, RequestVote(1, False, 0, 0)) == []
    stage.slow.clear()
    stage.restart(B)
    stage.now_s += 2
    (vote,) = stage.hear(B, C, RequestVote(1, False, 0, 0))
    assert isinstance(vote, VoteReply)
    assert vote.granted
    stage.restart(B)
    stage.now_s += 2
    (vote,) = stage.hear(B, A, RequestVote(1, False, 0, 0))
    assert isinstance(vote, VoteReply)
    assert not vote.granted, "this vote was said, so a restart does not take it back"


def test_a_term_is_durable_before_an_answer_shows_it() -> None:
    stage = led()
    stage.slow.add(B)
    stage.now_s += 2
    term = stage.rafts[A].term + 1
    log = stage.rafts[A]
    refused = VoteReply(term, False, False, stage.rafts[B].identity)
    assert stage.hear(B, C, RequestVote(term, False, 0, 0)) == [refused], "a refusal promises nothing"
    assert stage.hear(B, C, RequestVote(term, False, log.last_index, term - 1)) == []
    stage.restart(B)
    assert stage.rafts[B].term == term - 1, "nobody relies on a term that was not written"
