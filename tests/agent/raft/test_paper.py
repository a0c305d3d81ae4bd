"""Claims of the Raft paper (Ongaro and Ousterhout, USENIX ATC 2014), one per test, against the core."""

import random

import pytest

from agent.raft import policy
from agent.raft.machine import Role
from agent.raft.machine.types import Tick
from agent.raft.messages import Append, AppendReply, RequestVote, VoteReply
from agent.raft.policy import Timing
from covey.core.ids import HostId
from tests.agent.raft.stage import TIMING, A, B, C, D, E, Stage, entry, log_of


def append(term: int, prev: tuple[int, int], *entries: int, commit: int = 0) -> Append:
    """An Append whose entries continue `log_of` after the index of `prev`, with these terms."""
    made = tuple(entry(each, f"{index}/{each}") for index, each in enumerate(entries, prev[0] + 1))
    return Append(term, *prev, commit, 1, made)


# ---- §5.1: terms ----


@pytest.mark.parametrize("role", [Role.FOLLOWER, Role.PRECANDIDATE, Role.CANDIDATE, Role.LEADER])
def test_whoever_hears_of_a_later_term_follows_in_it(role: Role) -> None:
    """Reference: Raft §5.1."""
    stage = Stage(A, B, C)
    if role is not Role.FOLLOWER:
        stage.stand(A)
    if role is Role.CANDIDATE:
        stage.hear(A, B, VoteReply(1, True, True))
    if role is Role.LEADER:
        stage.deliver()
    assert stage.rafts[A].role is role
    stage.hear(A, C, append(7, (0, 0)))
    assert (stage.rafts[A].term, stage.rafts[A].role, stage.rafts[A].leader) == (7, Role.FOLLOWER, C)


def test_a_request_of_an_earlier_term_is_refused_and_answered_with_ours() -> None:
    """Reference: Raft §5.1."""
    stage = Stage(A, B, C, term=5)
    assert stage.hear(A, B, append(3, (0, 0), 3)) == [AppendReply(5, 1, False, 0)]
    assert stage.hear(A, B, RequestVote(3, False, 9, 3)) == [VoteReply(5, False, False)]
    assert stage.terms(A) == []


# ---- §5.2: elections ----


def test_hosts_begin_as_followers_without_a_leader() -> None:
    """Reference: Raft §5.2."""
    raft = Stage(A, B, C).rafts[A]
    assert (raft.role, raft.leader, raft.term) == (Role.FOLLOWER, None, 0)


def test_a_leader_sends_heartbeats_without_entries_to_all_others() -> None:
    """Reference: Raft §5.2."""
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.told.clear()
    stage.now_s += TIMING.heartbeat_s
    stage.tell(A, Tick())
    for host in (B, C):
        (beat,) = stage.said(A, host, Append)
        assert isinstance(beat, Append)
        assert (beat.entries, beat.term) == ((), 1)


def test_a_follower_that_hears_nothing_stands_in_the_next_term_and_votes_for_itself() -> None:
    """Reference: Raft §5.2."""
    stage = Stage(A, B, C, term=2)
    stage.stand(A)
    stage.hear(A, B, VoteReply(3, True, True))
    raft = stage.rafts[A]
    assert (raft.role, raft.term, raft._raft_log.vote) == (Role.CANDIDATE, 3, A)
    assert stage.said(A, B, RequestVote)[-1] == RequestVote(3, False, 0, 0)


def test_a_candidate_without_an_outcome_stands_again_in_a_new_term() -> None:
    """Reference: Raft §5.2."""
    stage = Stage(A, B, C)
    for term in (1, 2):
        stage.stand(A)
        stage.hear(A, B, VoteReply(term, True, True))
        assert (stage.rafts[A].role, stage.rafts[A].term) == (Role.CANDIDATE, term)


@pytest.mark.parametrize(
    ("voters", "yes", "no", "role"),
    [
        (1, 0, 0, Role.LEADER),
        (3, 2, 0, Role.LEADER),
        (3, 1, 0, Role.LEADER),
        (5, 4, 0, Role.LEADER),
        (5, 2, 1, Role.LEADER),
        (3, 0, 2, Role.FOLLOWER),
        (5, 0, 4, Role.FOLLOWER),
        (5, 1, 3, Role.FOLLOWER),
        (3, 0, 0, Role.CANDIDATE),
        (5, 1, 0, Role.CANDIDATE),
        (5, 0, 2, Role.CANDIDATE),
    ],
)
def test_a_majority_of_votes_makes_a_leader(voters: int, yes: int, no: int, role: Role) -> None:
    """Reference: Raft §5.2."""
    hosts = (A, B, C, D, E)[:voters]
    stage = Stage(*hosts)
    stage.stand(A)
    for host in hosts[1 : policy.quorum(voters)]:
        stage.hear(A, host, VoteReply(1, True, True))
    answers = [True] * yes + [False] * no
    for host, answer in zip(hosts[1:], answers, strict=False):
        stage.hear(A, host, VoteReply(1, False, answer))
    assert stage.rafts[A].role is role


def test_each_voter_counts_once_however_often_it_answers() -> None:
    """Reference: Raft §5.2."""
    stage = Stage(A, B, C, D, E)
    stage.stand(A)
    for host in (B, C):
        stage.hear(A, host, VoteReply(1, True, True))
    for _ in range(5):
        stage.hear(A, B, VoteReply(1, False, True))
    assert stage.rafts[A].role is Role.CANDIDATE
    stage.hear(A, C, VoteReply(1, False, True))
    assert stage.rafts[A].role is Role.LEADER


@pytest.mark.parametrize(("first", "second", "granted"), [(B, B, True), (C, C, True), (B, C, False), (C, B, False)])
def test_a_voter_votes_once_per_term_first_come_first_served(first: HostId, second: HostId, granted: bool) -> None:
    """Reference: Raft §5.2."""
    stage = Stage(A, B, C)
    stage.now_s += 2
    assert stage.hear(A, first, RequestVote(1, False, 0, 0)) == [VoteReply(1, False, True)]
    assert stage.hear(A, second, RequestVote(1, False, 0, 0)) == [VoteReply(1, False, granted)]


def test_a_vote_survives_a_crash() -> None:
    """Reference: Raft §5.2 and Figure 2, "persistent state"."""
    stage = Stage(A, B, C)
    stage.now_s += 2
    assert stage.hear(A, B, RequestVote(1, False, 0, 0)) == [VoteReply(1, False, True)]
    stage.restart(A)
    stage.now_s += 2
    assert stage.hear(A, C, RequestVote(1, False, 0, 0)) == [VoteReply(1, False, False)]
    assert stage.hear(A, B, RequestVote(1, False, 0, 0)) == [VoteReply(1, False, True)]


def test_a_vote_is_not_given_before_it_is_durable() -> None:
    """Reference: Raft Figure 2, "updated on stable storage before responding to RPCs"."""
    stage = Stage(A, B, C)
    stage.now_s += 2
    stage.slow.add(A)
    assert stage.hear(A, B, RequestVote(1, False, 0, 0)) == []
    stage.finish_writing(A)
    assert stage.said(A, B, VoteReply) == [VoteReply(1, False, True)]


def test_a_candidate_asks_nobody_before_its_own_vote_is_durable() -> None:
    """Reference: Raft Figure 2, "updated on stable storage before responding to RPCs"."""
    stage = Stage(A, B, C)
    stage.slow.add(A)
    stage.stand(A)
    stage.hear(A, B, VoteReply(1, True, True))
    assert [m for m in stage.said(A, B, RequestVote) if isinstance(m, RequestVote) and not m.pre_vote] == []
    stage.finish_writing(A)
    assert stage.said(A, B, RequestVote)[-1] == RequestVote(1, False, 0, 0)


@pytest.mark.parametrize("term", [1, 2])
def test_a_candidate_follows_a_leader_of_its_own_or_a_later_term(term: int) -> None:
    """Reference: Raft §5.2."""
    stage = Stage(A, B, C)
    stage.stand(A)
    stage.hear(A, B, VoteReply(1, True, True))
    stage.hear(A, C, append(term, (0, 0)))
    assert (stage.rafts[A].role, stage.rafts[A].term, stage.rafts[A].leader) == (Role.FOLLOWER, term, C)


def test_election_timeouts_are_spread_over_their_whole_range() -> None:
    """Reference: Raft §5.2."""
    timing, rng = Timing(), random.Random(5)
    drawn = [policy.election_timeout(timing, rng) for _ in range(1000)]
    assert timing.election_min_s <= min(drawn) < timing.election_min_s + 0.05
    assert timing.election_max_s - 0.05 < max(drawn) <= timing.election_max_s


def test_two_voters_seldom_lose_patience_together() -> None:
    """Within 20 ms of each other, the time of an election: less than one time in ten. Reference: Raft §5.2."""
    timing, rng = Timing(), random.Random(6)
    pairs = [(policy.election_timeout(timing, rng), policy.election_timeout(timing, rng)) for _ in range(2000)]
    assert sum(abs(a - b) < 0.02 for a, b in pairs) < 200


# ---- §5.3: replication ----


def test_a_leader_appends_commands_and_sends_them_to_the_others_in_parallel() -> None:
    """Reference: Raft §5.3."""
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.told.clear()
    stage.propose(A, "x")
    for host in (B, C):
        (sent,) = stage.said(A, host, Append)
        assert isinstance(sent, Append)
        assert (sent.prev_index, sent.prev_term, sent.commit) == (1, 1, 1)
        assert [each.command for each in sent.entries] == [b"x"]


def test_an_entry_is_committed_and_applied_once_a_majority_has_it_and_all_hear_it() -> None:
    """Reference: Raft §5.3."""
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.propose(A, "x")
    assert stage.applied[A] == []
    stage.deliver()
    assert [stage.applied[host] for host in (A, B, C)] == [["x"]] * 3


@pytest.mark.parametrize(
    ("voters", "answering", "committed"),
    [(1, 0, True), (3, 0, False), (3, 1, True), (5, 1, False), (5, 2, True), (5, 4, True)],
)
def test_a_majority_commits_and_less_does_not(voters: int, answering: int, committed: bool) -> None:
    """Reference: Raft §5.3."""
    hosts = (A, B, C, D, E)[:voters]
    stage = Stage(*hosts)
    stage.stand(A)
    stage.deliver()
    stage.propose(A, "x")
    stage.without(*hosts[1 + answering :])
    assert stage.applied[A] == (["x"] if committed else [])


@pytest.mark.parametrize("terms", [(), (2,), (1, 2), (1,)])
def test_committing_an_entry_commits_all_before_it_those_of_earlier_leaders_too(terms: tuple[int, ...]) -> None:
    """Reference: Raft §5.3."""
    stage = Stage(A, B, C, logs={A: terms}, term=2)
    stage.elect(A)
    stage.propose(A, "x")
    stage.deliver()
    earlier = [each.command.decode() for each in log_of(*terms)]
    assert stage.applied[A] == stage.applied[B] == [*earlier, "x"]


def test_a_follower_applies_in_order_what_its_leader_says_is_committed() -> None:
    """Reference: Raft §5.3."""
    stage = Stage(A, B, C)
    stage.hear(A, B, append(1, (0, 0), 1, 1, commit=1))
    assert stage.applied[A] == ["1/1"]
    stage.hear(A, B, append(1, (2, 1), commit=2))
    assert stage.applied[A] == ["1/1", "2/1"]


def test_a_follower_commits_no_further_than_what_it_compared_with_its_leader() -> None:
    """Reference: Raft Figure 2, AppendEntries 5."""
    stage = Stage(A, B, C, logs={A: (1, 1, 1)}, term=1)
    stage.hear(A, B, append(2, (1, 1), commit=3))
    assert stage.applied[A] == ["1/1"]


@pytest.mark.parametrize(
    ("prev", "accepted"),
    [((0, 0), True), ((1, 1), True), ((2, 2), True), ((1, 2), False), ((2, 1), False), ((3, 3), False)],
)
def test_a_follower_refuses_entries_that_do_not_continue_its_log(prev: tuple[int, int], accepted: bool) -> None:
    """Reference: Raft §5.3, the consistency check of AppendEntries."""
    stage = Stage(A, B, C, logs={A: (1, 2)})
    (reply,) = stage.hear(A, B, append(3, prev))
    assert isinstance(reply, AppendReply)
    assert reply.accepted is accepted


@pytest.mark.parametrize(
    ("prev", "entries", "left"),
    [
        ((2, 2), (3,), [1, 2, 3]),
        ((1, 1), (3, 4), [1, 3, 4]),
        ((0, 0), (1,), [1, 2]),
        ((0, 0), (3,), [3]),
        ((1, 1), (2,), [1, 2]),
    ],
)
def test_only_a_conflict_shortens_a_followers_log(
    prev: tuple[int, int], entries: tuple[int, ...], left: list[int]
) -> None:
    """A delayed Append that we have already (third and fifth case) takes nothing away.
    Reference: Raft §5.3, Figure 2."""
    stage = Stage(A, B, C, logs={A: (1, 2)})
    stage.hear(A, B, append(4, prev, *entries))
    assert stage.terms(A) == left


def test_an_old_append_takes_nothing_from_what_was_acknowledged_since() -> None:
    """This is the hole of another implementation (PySyncObj): it would now vote for a host that lacks what it
    acknowledged. Reference: Raft §5.3."""
    stage = Stage(A, B, C)
    first, second = append(1, (0, 0), 1), append(1, (1, 1), 1, 1)
    stage.hear(A, B, first)
    stage.hear(A, B, second)
    stage.hear(A, B, first)
    assert stage.terms(A) == [1, 1, 1]
    stage.now_s += 2
    assert stage.hear(A, C, RequestVote(2, False, 1, 1)) == [VoteReply(2, False, False)]


def test_an_entry_is_not_acknowledged_before_it_is_durable() -> None:
    """Reference: Raft Figure 2, "updated on stable storage before responding to RPCs"."""
    stage = Stage(A, B, C)
    stage.slow.add(A)
    assert stage.hear(A, B, append(1, (0, 0), 1)) == []
    beat = stage.hear(A, B, append(1, (1, 1)))
    assert beat == [AppendReply(1, 1, True, 0)], "a heartbeat is answered at once, with what is durable"
    stage.finish_writing(A)
    assert stage.said(A, B, AppendReply)[-1] == AppendReply(1, 1, True, 1)


def test_a_leader_counts_its_own_copy_once_it_is_durable() -> None:
    """Reference: Raft thesis §10.2.1."""
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.slow.add(A)
    stage.propose(A, "x")
    stage.without(C)
    assert stage.applied[A] == []
    stage.finish_writing(A)
    assert stage.applied[A] == ["x"]


FIGURE_7 = {
    "a": (1, 1, 1, 4, 4, 5, 5, 6, 6),
    "b": (1, 1, 1, 4),
    "c": (1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 6),
    "d": (1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 7, 7),
    "e": (1, 1, 1, 4, 4, 4, 4),
    "f": (1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3),
}


@pytest.mark.parametrize("case", sorted(FIGURE_7))
def test_a_leader_brings_any_followers_log_into_agreement_with_its_own(case: str) -> None:
    """Reference: Raft §5.3, Figure 7."""
    leader = (1, 1, 1, 4, 4, 5, 5, 6, 6, 6)
    stage = Stage(A, B, C, logs={A: leader, B: FIGURE_7[case], C: leader}, term=7)
    stage.stand(A)
    stage.without(B)
    stage.beat(A)
    assert stage.terms(A) == stage.terms(B) == [*leader, 8]


def test_a_refusal_skips_whole_terms_so_that_few_exchanges_find_the_place() -> None:
    """Reference: Raft §5.3, end."""
    stage = Stage(A, B, C, logs={A: (1,) * 5 + (6,) * 200, B: (1,) * 5 + (2,) * 50 + (3,) * 50, C: (1,) * 5}, term=6)
    stage.stand(A)
    stage.hear(A, C, VoteReply(7, True, True))
    stage.hear(A, C, VoteReply(7, False, True))
    stage.without(C)
    refusals = [
        reply for reply in stage.said(B, A, AppendReply) if isinstance(reply, AppendReply) and not reply.accepted
    ]
    assert len(refusals) <= 2
    assert stage.terms(B) == stage.terms(A)


# ---- §5.4: safety ----


def test_a_request_for_votes_says_how_complete_the_candidates_log_is() -> None:
    """Reference: Raft §5.4.1."""
    stage = Stage(A, B, C, logs={A: (1, 2, 2)}, term=4)
    stage.stand(A)
    assert stage.said(A, B, RequestVote) == [RequestVote(5, True, 3, 2)]


@pytest.mark.parametrize(
    ("own", "last_index", "last_term", "granted"),
    [
        ((1,), 1, 1, True),
        ((1,), 2, 1, True),
        ((1, 1), 1, 1, False),
        ((1,), 1, 2, True),
        ((1, 1), 1, 2, True),
        ((2,), 1, 1, False),
        ((2,), 2, 1, False),
        ((1, 2), 2, 1, False),
    ],
)
def test_a_voter_refuses_a_candidate_whose_log_is_less_complete(
    own: tuple[int, ...], last_index: int, last_term: int, granted: bool
) -> None:
    """Reference: Raft §5.4.1."""
    for pre_vote in (True, False):
        stage = Stage(A, B, C, logs={A: own}, term=2)
        stage.now_s += 2
        (reply,) = stage.hear(A, B, RequestVote(3, pre_vote, last_index, last_term))
        assert isinstance(reply, VoteReply)
        assert reply.granted is granted


@pytest.mark.parametrize(("match", "commit"), [(1, 0), (2, 0), (3, 3)])
def test_only_an_entry_of_the_leaders_own_term_is_committed_by_counting(match: int, commit: int) -> None:
    """Reference: Raft §5.4.2, Figure 8."""
    stage = Stage(A, B, C, logs={A: (1, 2)}, term=2)
    stage.stand(A)
    stage.hear(A, B, VoteReply(3, True, True))
    stage.hear(A, B, VoteReply(3, False, True))
    assert stage.terms(A) == [1, 2, 3], "the leader's own no-op ends its log"
    stage.hear(A, B, AppendReply(3, 1, True, match))
    assert stage.rafts[A].commit == commit


@pytest.mark.parametrize(("match", "told", "commit"), [(2, 2, 2), (2, 1, 1), (1, 2, 1), (2, 9, 2), (0, 2, 0)])
def test_a_leader_hears_what_is_committed_as_far_as_the_logs_are_equal(match: int, told: int, commit: int) -> None:
    """What an earlier leader committed and this one cannot count yet: a voter that lost its log does not count before
    the entry that says so is committed, which may be one of those."""
    stage = Stage(A, B, C, logs={A: (1, 2)}, term=2)
    stage.stand(A)
    stage.hear(A, B, VoteReply(3, True, True))
    stage.hear(A, B, VoteReply(3, False, True))
    stage.hear(A, B, AppendReply(3, 1, True, match, commit=told))
    assert stage.rafts[A].commit == commit


# ---- §5.6, §8 ----


def test_a_leader_may_act_as_one_only_after_its_own_entry_is_committed() -> None:
    """Reference: Raft §8."""
    stage = Stage(A, B, C)
    stage.stand(A)
    stage.deliver(lambda sender, to, message: isinstance(message, AppendReply))
    assert stage.leaders() == [A]
    assert not stage.rafts[A].holds_lease(stage.now_s)
    stage.beat(A)
    assert stage.rafts[A].holds_lease(stage.now_s)
