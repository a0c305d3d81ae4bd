"""PreVote, CheckQuorum and the lease: a healthy leader stays, a cut-off one goes."""

import pytest

from agent.raft.machine import Role
from agent.raft.machine.types import Tick
from agent.raft.messages import Append, AppendReply, InstallSnapshot, RequestVote, VoteReply
from agent.raft.policy import Timing
from covey.core.ids import HostId
from tests.agent.raft.stage import TIMING, A, B, C, D, E, Stage


def test_asking_whether_one_would_be_elected_changes_nobodys_term() -> None:
    """Reference: Raft thesis §9.6."""
    stage = Stage(A, B, C, term=4)
    stage.stand(A)
    stage.without(B, C)
    assert stage.rafts[A].role is Role.PRECANDIDATE
    assert [raft.term for raft in stage.rafts.values()] == [4, 4, 4]


def test_a_host_that_was_cut_off_deposes_nobody_when_it_comes_back() -> None:
    """Reference: Raft thesis §9.6."""
    stage = Stage(A, B, C)
    stage.elect(A)
    for _ in range(20):
        stage.beat(A, C)
        if stage.now_s >= stage.rafts[C].wake_s:
            stage.tell(C, Tick())
            stage.without(C)
    assert stage.rafts[C].counters["prevotes"] >= 1
    stage.tell(C, Tick())
    stage.beat(A)
    assert (stage.leaders(), stage.rafts[A].term, stage.rafts[C].term, stage.rafts[C].leader) == ([A], 1, 1, A)


def test_a_host_that_restarts_again_and_again_deposes_nobody() -> None:
    """Reference: Raft thesis §9.6."""
    stage = Stage(A, B, C)
    stage.elect(A)
    for _ in range(5):
        stage.restart(C)
        for _ in range(8):
            stage.beat(A, C)
        stage.now_s = max(stage.now_s, stage.rafts[C].wake_s - 1.0)
        stage.beat(A, C)
        stage.tell(C, Tick())
        stage.deliver()
        stage.beat(A)
    assert (stage.leaders(), stage.rafts[A].term) == ([A], 1)


def test_whoever_heard_the_leader_just_now_does_not_even_adopt_a_candidates_term() -> None:
    """Reference: Raft thesis §4.2.3."""
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.now_s += TIMING.election_min_s - 0.2
    assert stage.hear(B, C, RequestVote(9, False, 99, 9)) == []
    assert stage.rafts[B].term == 1
    stage.now_s += 0.3
    assert stage.hear(B, C, RequestVote(9, False, 99, 9)) == [VoteReply(9, False, True)]


def test_a_restarted_voter_helps_nobody_at_first_since_it_may_have_heard_a_leader() -> None:
    """Reference: Raft thesis §6.4.1: the lease counts on every voter that answered."""
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.restart(B)
    stage.now_s += TIMING.lease_s / 2
    assert stage.hear(B, C, RequestVote(2, True, 9, 1)) == []
    assert stage.rafts[A].holds_lease(stage.now_s)


def test_an_isolated_leader_loses_its_lease_and_then_steps_down_within_the_bound() -> None:
    """Reference: Raft thesis §6.2."""
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.beat(A)
    cut_s = stage.now_s
    lease_ended_s = None
    while stage.leaders() == [A]:
        stage.beat(A, B, C)
        if lease_ended_s is None and not stage.rafts[A].holds_lease(stage.now_s):
            lease_ended_s = stage.now_s
    assert lease_ended_s is not None
    assert lease_ended_s - cut_s < Timing().election_min_s + Timing().heartbeat_s
    assert stage.now_s - cut_s <= 1.8
    assert (stage.rafts[A].role, stage.rafts[A].leader, stage.rafts[A].counters["stepped_down"]) == (
        Role.FOLLOWER,
        None,
        1,
    )


def test_a_leader_that_was_paused_steps_down_before_it_does_anything_else() -> None:
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.now_s += 30
    stage.told.clear()
    stage.propose(A, "too late")
    assert (stage.leaders(), stage.terms(A), stage.told) == ([], [1], [])


def test_one_answering_follower_of_two_keeps_a_leader() -> None:
    stage = Stage(A, B, C)
    stage.elect(A)
    for _ in range(30):
        stage.beat(A, C)
    assert stage.rafts[A].holds_lease(stage.now_s)


def test_an_answer_to_an_old_round_does_not_renew_the_lease() -> None:
    """What counts is when the round began, not when its answer arrives. Reference: Raft thesis §6.4.1."""
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.beat(A, C)
    late = stage.said(B, A, AppendReply)[-1]
    stage.now_s += TIMING.lease_s + 0.001
    stage.hear(A, B, late)
    assert not stage.rafts[A].holds_lease(stage.now_s)


def test_no_other_leader_is_elected_while_a_lease_runs() -> None:
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.beat(A)
    start_s = stage.now_s
    while stage.leaders() in ([A], []):
        stage.now_s += 0.01
        for host in (B, C):
            stage.tell(host, Tick())
        stage.without(A)
        if any(stage.rafts[host].role is Role.CANDIDATE for host in (B, C)):
            break
        if set(stage.leaders()) & {B, C}:
            break
    assert stage.now_s - start_s >= TIMING.lease_s
    assert not stage.rafts[A].holds_lease(stage.now_s)


def test_a_candidate_stuck_in_a_later_term_frees_itself() -> None:
    """The candidate refuses the leader's appends with its own term; the leader then follows and a new election includes
    it."""
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.rafts[C]._raft_log.enter(5, C)
    stage.beat(A)
    assert stage.leaders() == []
    assert stage.rafts[A].term == 5
    stage.stand(B)
    stage.deliver()
    assert (stage.leaders(), stage.rafts[B].term) == ([], 5), "asking, B learns of the later term"
    stage.elect(B)
    assert [raft.term for raft in stage.rafts.values()] == [6, 6, 6]


def test_two_voters_are_enough_to_go_on_when_the_third_dies() -> None:
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.propose(A, "x")
    stage.deliver()
    stage.elect(B, A)
    stage.propose(B, "y")
    stage.without(A)
    stage.beat(B, A)
    assert stage.applied[B] == stage.applied[C] == ["x", "y"]


def test_a_rack_of_one_leads_at_once_and_needs_nobody() -> None:
    stage = Stage(A)
    assert stage.leaders() == [A]
    stage.propose(A, "x")
    assert stage.applied[A] == ["x"]
    stage.now_s += 3600
    assert stage.rafts[A].holds_lease(stage.now_s)


def test_failover_takes_a_second_and_a_half_in_the_median_and_never_two() -> None:
    """The time is from the leader's death to the next leader, over fifty racks; wanted: under 2 s always."""
    took = []
    for number in range(50):
        names = [HostId(f"{letter}{number}") for letter in "abc"]
        stage = Stage(*names, timing=Timing())
        stage.elect(names[0])
        stage.beat(names[0])
        died_s = stage.now_s
        while not set(stage.leaders()) & set(names[1:]):
            stage.now_s += 0.005
            for host in names[1:]:
                stage.tell(host, Tick())
            stage.without(names[0])
        took.append(stage.now_s - died_s)
    took.sort()
    assert took[25] <= 1.5
    assert took[-1] <= 2.0


# ---- observers ----


def test_an_observer_applies_what_is_committed_but_neither_votes_nor_counts() -> None:
    stage = Stage(A, B, C, observers=[D, E])
    stage.elect(A)
    stage.propose(A, "x")
    stage.without(B, C)
    assert [stage.applied[host] for host in (A, D, E)] == [[], [], []], "two observers and a leader are no majority"
    stage.beat(A)
    stage.beat(A)
    assert [stage.applied[host] for host in (A, D, E)] == [["x"]] * 3


def test_an_observer_receives_nothing_that_is_not_committed() -> None:
    stage = Stage(A, B, C, observers=[D])
    stage.elect(A)
    stage.propose(A, "x")
    stage.without(B, C)
    stage.beat(A, B, C)
    assert all(b"x" not in [e.command for e in m.entries] for m in stage.said(A, D, Append) if isinstance(m, Append))


def test_a_silent_observer_keeps_no_leader_from_leading_and_never_stands_itself() -> None:
    stage = Stage(A, B, C, observers=[D])
    stage.elect(A)
    for _ in range(40):
        stage.beat(A, D)
    assert stage.rafts[A].holds_lease(stage.now_s)
    for _ in range(5):
        stage.now_s += 10
        stage.tell(D, Tick())
    assert (stage.rafts[D].leader, stage.rafts[D].role, stage.said(D, A, RequestVote)) == (None, Role.FOLLOWER, [])


@pytest.mark.parametrize(
    "message", [RequestVote(9, False, 9, 9), RequestVote(9, True, 9, 9), VoteReply(9, False, True)]
)
def test_nobody_minds_votes_of_hosts_that_have_none(message: RequestVote | VoteReply) -> None:
    stage = Stage(A, B, C, observers=[D])
    stage.now_s += 2
    assert stage.hear(A, D, message) == []
    assert stage.hear(D, A, message) == []
    assert (stage.rafts[A].term, stage.rafts[A].counters["votes_of_strangers"]) == (0, 1)


@pytest.mark.parametrize("message", [Append(9, 0, 0, 0, 1, ()), InstallSnapshot(9, 5, 1, 1, 1, 1, 0, b"x")])
def test_only_a_voter_can_be_a_leader(message: Append | InstallSnapshot) -> None:
    stage = Stage(A, B, C, observers=[D])
    assert stage.hear(A, D, message) == []
    assert (stage.rafts[A].term, stage.rafts[A].leader) == (0, None)


def test_an_observer_with_a_later_term_is_caught_up_with() -> None:
    """The observer was a voter once, and stood for election when it was cut off. A leader of an earlier term could
    never bring it the log again; so that one stands anew, once."""
    stage = Stage(A, B, C, observers=[D])
    stage.elect(A)
    assert stage.hear(A, D, AppendReply(9, 1, False, 0)) == []
    assert (stage.leaders(), stage.rafts[A].term) == ([], 9)
    stage.elect(A)
    assert stage.rafts[D].leader == A


def test_a_stranger_who_answers_changes_nothing() -> None:
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.propose(A, "x")
    stage.hear(A, HostId("stranger"), AppendReply(1, 1, True, 2))
    assert stage.applied[A] == []


def test_an_answer_that_claims_more_than_the_log_holds_is_ignored() -> None:
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.hear(A, B, AppendReply(1, 1, True, 1000))
    stage.propose(A, "x")
    stage.deliver()
    assert stage.applied[A] == ["x"]


def test_a_second_leader_in_one_term_is_not_obeyed() -> None:
    stage = Stage(A, B, C)
    stage.hear(A, B, Append(1, 0, 0, 0, 1, ()))
    assert stage.hear(A, C, Append(1, 0, 0, 0, 1, ())) == []
    assert (stage.rafts[A].leader, stage.rafts[A].counters["two_leaders_in_one_term"]) == (B, 1)
