"""Voters come and go, one at a time, through the log (Raft thesis, chapter 4; the behaviours of etcd-io/raft's
`confchange` and `TestRawNodeProposeAndConfChange` and of its learners' tests, told anew)."""

import msgspec
import pytest

from agent.raft import policy
from agent.raft.machine import Role
from agent.raft.machine.types import (
    ConfigurationChanged,
    ConfigurationWanted,
    HandOver,
    RaftHostsChanged,
    SnapshotTaken,
    Tick,
)
from agent.raft.messages import (
    NO_RACK,
    Append,
    Configuration,
    InstallSnapshot,
    RequestVote,
    TimeoutNow,
    VoteReply,
    configuration_entry,
    configuration_of,
)
from covey.core.ids import HostId
from tests.agent.raft.stage import A, B, C, D, E, Stage

NONE = HostId("")


def want(stage: Stage, leader: HostId, learner: HostId = NONE, leaving: HostId = NONE) -> None:
    now = stage.rafts[leader].configuration
    wanted = msgspec.structs.replace(now, learner=learner, leaving=leaving)
    stage.tell(leader, ConfigurationWanted(now, wanted))


def settle(stage: Stage, leader: HostId, *gone: HostId, beats: int = 12) -> None:
    for _ in range(beats):
        if stage.rafts[leader].leading:
            stage.beat(leader, *gone)


def voters(stage: Stage, name: HostId) -> str:
    return "".join(stage.rafts[name].voters)


def steps(stage: Stage, name: HostId) -> list[str]:
    """What the entries of this host's log say: voters, +learner, -leaving."""
    log = stage.rafts[name]._raft_log.log
    found = [configuration_of(each) for each in log.slice(log.base_index + 1, log.last_index)]
    return [_words(each) for each in found if each]


def _words(configuration: Configuration) -> str:
    learner, leaving = configuration.learner, configuration.leaving
    return "".join(configuration.hosts) + (f" +{learner}" if learner else "") + (f" -{leaving}" if leaving else "")


def test_the_first_entry_says_who_votes_and_names_the_rack() -> None:
    stage = Stage(A, B, C, observers=[D])
    assert {stage.rafts[name].rack for name in stage.rafts} == {bytes(8)}, "nobody knows before it is committed"
    stage.elect(A)
    settle(stage, A)
    racks = {stage.rafts[name].rack for name in stage.rafts}
    assert len(racks) == 1 and racks != {bytes(8)}
    assert {voters(stage, name) for name in stage.rafts} == {"abc"}


def test_a_new_voter_learns_first_and_is_promoted_when_it_has_caught_up() -> None:
    stage = Stage(A, B, C, observers=[D])
    stage.elect(A)
    stage.propose(A, *"uvwxyz")
    stage.without(D)
    want(stage, A, learner=D)
    settle(stage, A, D)
    assert (voters(stage, A), stage.rafts[A].configuration.learner) == ("abc", D), "it is away: nothing waits for it"
    stage.propose(A, "later")
    stage.without(D)
    assert stage.applied[A][-1] == "later", "a learner does not count"
    settle(stage, A)
    assert steps(stage, D) == ["abc", "abc +d", "abcd"]
    assert {voters(stage, name) for name in stage.rafts} == {"abcd"}


def test_a_rack_of_one_grows_to_three() -> None:
    stage = Stage(A, observers=[B, C])
    assert stage.leaders() == [A]
    stage.propose(A, "before")
    settle(stage, A)
    want(stage, A, learner=B)
    settle(stage, A)
    want(stage, A, learner=C)
    settle(stage, A)
    assert {voters(stage, name) for name in stage.rafts} == {"abc"}
    stage.elect(B, A)
    stage.propose(B, "after")
    stage.without(A)
    assert stage.applied[C] == ["before", "after"]


def test_the_second_voter_that_does_not_know_it_yet_elects_the_first_again() -> None:
    """The leader appended that b votes, and stopped before b heard of it. Nobody else can elect it now."""
    stage = Stage(A, observers=[B])
    settle(stage, A)
    want(stage, A, learner=B)
    stage.deliver(lambda sender, to, message: isinstance(message, Append) and len(steps(stage, A)) == 3)
    while len(steps(stage, A)) < 3:
        stage.beat(A)
    assert (voters(stage, A), voters(stage, B)) in (("ab", "a"), ("ab", "ab"))
    stage.messages.clear()
    stage.restart(A)
    stage.elect(A)
    assert voters(stage, B) == "ab"


def test_a_voter_that_is_removed_observes_from_then_on_and_disturbs_nobody() -> None:
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.tell(A, RaftHostsChanged((B, C)))
    want(stage, A, leaving=C)
    settle(stage, A)
    assert steps(stage, A) == ["abc", "abc -c", "ab"]
    stage.propose(A, "x")
    settle(stage, A)
    assert (stage.applied[C], stage.rafts[C].role, voters(stage, C)) == (["x"], Role.FOLLOWER, "ab")
    before = len(stage.said(C, A, RequestVote))
    for _ in range(5):
        stage.now_s += 0.1
        settle(stage, A)
    assert len(stage.said(C, A, RequestVote)) == before
    assert stage.leaders() == [A]


def test_a_removed_voter_that_never_heard_of_it_is_not_elected_and_deposes_nobody() -> None:
    stage = Stage(A, B, C)
    stage.elect(A)
    settle(stage, A)
    stage.tell(A, RaftHostsChanged((B,)))
    want(stage, A, leaving=C)
    settle(stage, A, C)
    assert voters(stage, A) == "ab" and voters(stage, C) == "abc"
    term = stage.rafts[A].term
    for _ in range(60):
        stage.beat(A, C)
        if stage.now_s >= stage.rafts[C].wake_s and stage.rafts[C].role is Role.FOLLOWER:
            stage.tell(C, Tick())
    assert stage.rafts[C].role is Role.PRECANDIDATE
    for _ in range(8):
        stage.beat(A)
    assert (stage.leaders(), stage.rafts[A].term, stage.rafts[C].term) == ([A], term, term)


def test_one_change_at_a_time() -> None:
    stage = Stage(A, B, C, observers=[D, E])
    stage.elect(A)
    want(stage, A, learner=D)
    before = stage.rafts[A].configuration
    want(stage, A, learner=E)  # the first is not committed yet
    assert stage.rafts[A].configuration == before
    stage.without(D, E)
    stage.tell(A, ConfigurationWanted(msgspec.structs.replace(before, learner=E), before))
    assert stage.rafts[A].configuration == before, "it was asked of another configuration than the one in force"


def test_two_voters_never_change_in_one_step() -> None:
    stage = Stage(A, B, C, observers=[D])
    stage.elect(A)
    now = stage.rafts[A].configuration
    swapped = policy.founders([A, B, D], now.rack)
    stage.tell(A, ConfigurationWanted(now, swapped))
    assert stage.rafts[A].configuration == now
    stage.tell(A, ConfigurationWanted(now, Configuration((), now.rack)))
    assert stage.rafts[A].configuration == now


def test_no_change_before_an_entry_of_the_leaders_own_term_is_committed() -> None:
    """The known bug of single-server changes (Ongaro, raft-dev, 10 July 2015): a appends that e votes, and nobody but e
    hears of it; b is elected by c and d and appends that a does not vote, which b and c alone could commit; then a is
    elected by d and e, whose logs hold neither, and overwrites it. What protects is that b must commit something
    before: d then has an entry of b's term and refuses a."""
    stage = Stage(A, B, C, D, observers=[E])
    stage.elect(A)
    settle(stage, A)
    now = stage.rafts[A].configuration
    stage.tell(A, ConfigurationWanted(now, policy.founders([A, B, C, D, E], now.rack)))
    stage.without(B, C, D)
    assert [voters(stage, name) for name in (A, B, E)] == ["abcde", "abcd", "abcde"]
    stage.stand(B)
    stage.deliver(lambda sender, to, message: A in (sender, to) or isinstance(message, Append))
    assert stage.rafts[B].leading and stage.rafts[B].commit < stage.rafts[B].last_index
    want(stage, B, leaving=A)
    assert stage.rafts[B].configuration.leaving == "", "its own first entry is not committed"
    stage.beat(B, A)
    want(stage, B, leaving=A)
    assert stage.rafts[B].configuration.leaving == A
    settle(stage, B, A)
    stage.stand(A)
    stage.without(B, C)
    assert not stage.rafts[A].leading, "d has an entry of b's term"


def test_a_configuration_that_is_cut_off_is_in_force_no_more() -> None:
    stage = Stage(A, B, C, observers=[D])
    stage.elect(A)
    settle(stage, A)
    want(stage, A, learner=D)
    stage.messages.clear()
    assert stage.rafts[A].configuration.learner == D
    stage.elect(B, A)
    settle(stage, B)
    assert {stage.rafts[name].configuration.learner for name in stage.rafts} == {""}
    assert stage.leaders() == [B]


@pytest.mark.parametrize("loses", range(1, 30))
def test_a_replacement_is_completed_whoever_dies_at_whichever_step(loses: int) -> None:
    """The host that leads loses its power after the n-th message; whoever leads then goes on, and it comes back."""
    stage = Stage(A, B, C, observers=[D])
    stage.elect(A)
    settle(stage, A)
    want(stage, A, learner=D, leaving=C)
    said = 0

    def power_fails(*_letter: object) -> bool:
        nonlocal said
        said += 1
        return said > loses

    while said < loses:
        stage.now_s = max(stage.now_s, stage.rafts[A].wake_s) if stage.rafts[A].leading else stage.now_s
        stage.deliver(power_fails)
        if said < loses:
            stage.beat(A)
            said += 1
    stage.messages.clear()
    stage.restart(A)
    stage.tell(A, RaftHostsChanged((B, C, D)))
    stage.elect(B)
    settle(stage, B)
    assert {voters(stage, name) for name in stage.rafts} == {"abd"}
    assert {stage.rafts[name].configuration.leaving for name in stage.rafts} == {""}


def test_a_leader_that_is_removed_hands_over_first() -> None:
    stage = Stage(A, B, C)
    stage.elect(A)
    settle(stage, A)
    stage.tell(A, RaftHostsChanged((B, C)))
    for name in (B, C):
        stage.tell(name, RaftHostsChanged(tuple(host for host in (A, B, C) if host != name)))
    want(stage, A, leaving=A)
    settle(stage, A)
    assert len([each for each in stage.told if isinstance(each[2], TimeoutNow)]) == 1
    (heir,) = stage.leaders()
    settle(stage, heir)
    assert {voters(stage, name) for name in stage.rafts} == {"bc"}
    assert stage.rafts[A].leader == heir


def test_a_leader_that_nobody_can_follow_stays_and_says_nothing() -> None:
    stage = Stage(A, B)
    stage.elect(A)
    settle(stage, A)
    stage.tell(B, RaftHostsChanged((A,)))
    want(stage, A, leaving=A)
    stage.messages.clear()
    stage.propose(A, "x")
    stage.messages.clear()
    assert stage.rafts[A].leading


def test_nobody_leaves_when_the_rest_could_not_commit() -> None:
    """Three voters, one away: without the other one nothing would be committed any more."""
    stage = Stage(A, B, C)
    stage.elect(A)
    settle(stage, A)
    settle(stage, A, C)
    want(stage, A, leaving=B)
    settle(stage, A, C)
    assert (voters(stage, A), stage.rafts[A].configuration.leaving) == ("abc", B)
    settle(stage, A)
    assert voters(stage, A) == "ac", "c is back"


def test_a_change_is_called_off() -> None:
    stage = Stage(A, B, C, observers=[D])
    stage.elect(A)
    settle(stage, A)
    want(stage, A, learner=D, leaving=C)
    settle(stage, A, D)
    want(stage, A)
    settle(stage, A)
    assert (voters(stage, A), stage.rafts[A].configuration.learner) == ("abc", "")
    assert {voters(stage, name) for name in stage.rafts} == {"abc"}


def test_a_snapshot_and_a_restart_keep_who_votes() -> None:
    stage = Stage(A, B, C, observers=[D])
    stage.elect(A)
    settle(stage, A)
    want(stage, A, learner=D)
    settle(stage, A, C)
    stage.propose(A, *"stuvwxyz")
    stage.without(C)
    for name in (A, B, D):
        stage.tell(name, SnapshotTaken(stage.rafts[name].commit, b"state"))
    settle(stage, A)
    assert stage.restored[C] == [b"state"] and stage.said(A, C, InstallSnapshot)
    assert {voters(stage, name) for name in stage.rafts} == {"abcd"}
    for name in (A, B, C, D):
        stage.restart(name)
    assert {voters(stage, name) for name in stage.rafts} == {"abcd"}
    assert len({stage.rafts[name].rack for name in stage.rafts} - {bytes(8)}) == 1


def test_a_vote_of_a_host_that_does_not_vote_is_not_counted() -> None:
    stage = Stage(A, B, C, observers=[D])
    stage.elect(A)
    settle(stage, A)
    stage.stand(B)
    term = stage.rafts[B].term
    stage.tell(A, HandOver(stage.now_s))
    stage.messages.clear()
    stage.hear(B, D, VoteReply(term + 1, True, True))
    assert stage.rafts[B].role is Role.PRECANDIDATE


def test_a_new_host_follows_the_rack_that_its_agent_toml_names_and_no_other() -> None:
    """It knows no rack yet: it follows whoever agent.toml names, or a log that one of these began or votes in."""
    stage = Stage(A, B, C, observers=[D])
    fresh = stage.rafts[D]
    stranger = HostId("x")
    theirs = policy.founders([stranger], b"rack two")
    ours = policy.founders([A, B], b"rack one")
    stage.hear(D, stranger, Append(4, 0, 0, 0, 1, (configuration_entry(4, theirs),)))
    assert (fresh.leader, fresh.last_index) == (None, 0)
    stage.hear(D, stranger, InstallSnapshot(4, 5, 1, 1, 1, 1, 0, b"x", theirs))
    assert (fresh.leader, fresh.last_index) == (None, 0)
    (reply,) = stage.hear(D, E, Append(4, 7, 3, 7, 1, ()))
    assert (fresh.leader, getattr(reply, "accepted", None)) == (None, False), "e is asked what its log began with"
    stage.hear(D, E, Append(4, 0, 0, 0, 1, (configuration_entry(4, ours),)))
    assert (fresh.leader, fresh.last_index) == (E, 1)


def test_a_host_that_heard_only_how_its_log_began_follows_and_votes_for_its_rack() -> None:
    """All whom that entry names may have stopped voting since, and the new voters may need its vote."""
    ours = policy.founders([A, B, C], b"rack one")
    theirs = policy.founders([HostId("x")], b"rack two")
    now = policy.founders([D, E], b"rack one")
    stage = Stage(A, B, C)
    behind = stage.rafts[C]
    stage.hear(C, A, Append(4, 0, 0, 0, 1, (configuration_entry(4, ours),)))
    assert (behind.rack, behind.last_index) == (NO_RACK, 1), "another leader may put another entry there"
    stage.now_s += 2
    assert stage.hear(C, HostId("x"), RequestVote(5, False, 9, 4, False, b"", b"rack two")) == []
    stage.hear(C, HostId("x"), InstallSnapshot(5, 5, 1, 1, 1, 1, 0, b"x", theirs))
    assert behind.leader == A
    (vote,) = stage.hear(C, D, RequestVote(5, False, 9, 4, False, b"", b"rack one"))
    assert isinstance(vote, VoteReply)
    assert vote.granted
    stage.hear(C, D, InstallSnapshot(5, 5, 1, 1, 1, 1, 0, b"x", now))
    assert behind.leader == D


def test_a_voter_identified_anew_that_does_not_know_it_yet_votes_for_who_says_so() -> None:
    """Found so: it lost its log, the leader wrote its new identity down, the other voter committed that, and both the
    leader and the word that it is committed were lost: without its vote the rest had no majority."""
    stage = Stage(A, B, C)
    stage.elect(A)
    settle(stage, A)
    stage.disks[C].files = {name: data for name, data in stage.disks[C].files.items() if name == "acknowledged"}
    stage.restart(C)
    for _ in range(30):
        stage.beat(A)
        if stage.rafts[A].configuration == stage.rafts[B].configuration:
            voter = stage.rafts[A].configuration.voter(C)
            assert voter is not None
            if voter.identity == stage.rafts[C].identity and stage.rafts[A].commit >= voter.since:
                break
    voter = stage.rafts[B].configuration.voter(C)
    assert voter is not None and voter.identity == stage.rafts[C].identity
    ask = RequestVote(9, True, 99, 9, False, voter.identity)
    stage.now_s += 2
    raft_log = stage.rafts[C]._raft_log
    raft_log.commit = min(raft_log.commit, max(0, voter.since - 1))  # as if the word had not come
    assert stage.rafts[C].forgotten
    (reply,) = stage.hear(C, B, ask)
    assert isinstance(reply, VoteReply) and reply.granted
    assert stage.hear(C, B, msgspec.structs.replace(ask, counts=b"")) == []


def test_a_step_is_not_taken_on_the_word_of_a_voter_given_before_the_change_began() -> None:
    """The voter may have lost its log since: each step asks anew which logs are there."""
    stage = Stage(A, B, C)
    stage.elect(A)
    settle(stage, A)
    stage.beat(A)
    want(stage, A, leaving=B)
    stage.without(C)  # b answers, so that the wish is committed; c answered a moment ago, and does not answer now
    stage.without(C)
    assert (voters(stage, A), stage.rafts[A].configuration.leaving) == ("abc", B)
    settle(stage, A)
    assert voters(stage, A) == "ac"


def test_what_is_in_force_is_told_when_it_is_appended_and_when_it_is_certain() -> None:
    stage = Stage(A, B, C, observers=[D])
    stage.elect(A)
    settle(stage, A)
    now = stage.rafts[A].configuration
    actions = stage.tell(A, ConfigurationWanted(now, msgspec.structs.replace(now, learner=D)))
    told = [each for each in actions if isinstance(each, ConfigurationChanged)]
    assert [(each.configuration.learner, each.committed) for each in told] == [(D, False)]
