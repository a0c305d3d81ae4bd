"""Leadership transfer: a leader that is stopped on purpose costs less than an election timeout, and nobody a lease."""

import asyncio

import pytest

from agent.raft import policy
from agent.raft.machine import Role
from agent.raft.machine.types import HandOver, Tick
from agent.raft.messages import RequestVote, TimeoutNow
from tests.agent.raft.rack import Rack, virtual
from tests.agent.raft.stage import TIMING, A, B, C, Stage


def led_by_a() -> Stage:
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.propose(A, "one")
    stage.deliver()
    stage.beat(A)
    return stage


def test_the_voter_with_the_whole_log_leads_in_the_next_term_at_once() -> None:
    """Reference: Raft thesis §3.10."""
    stage = led_by_a()
    stage.tell(A, HandOver(stage.now_s + 1.0))
    stage.deliver()
    (leader,) = stage.leaders()
    assert leader in (B, C)
    assert {raft.term for raft in stage.rafts.values()} == {2}
    stage.propose(leader, "two")
    stage.deliver()
    stage.beat(leader)
    assert stage.applied == {A: ["one", "two"], B: ["one", "two"], C: ["one", "two"]}


def test_it_is_sent_only_when_the_log_of_the_other_is_whole() -> None:
    """Reference: Raft thesis §3.10: "if the server's log is not up-to-date, it would be able to veto"."""
    stage = led_by_a()
    stage.slow |= {B, C}
    stage.propose(A, "two")
    stage.tell(A, HandOver(stage.now_s + 1.0))
    stage.deliver()
    assert stage.leaders() == [A] and not stage.said(A, B, TimeoutNow) + stage.said(A, C, TimeoutNow)
    stage.slow.clear()
    stage.finish_writing(C)
    stage.deliver()
    assert stage.said(A, C, TimeoutNow) == [TimeoutNow(1)] and stage.leaders() == [C]


def test_the_old_leader_is_down_and_has_no_lease_before_the_order_leaves() -> None:
    """Reference: Raft thesis §6.4.1, last paragraph."""
    stage = led_by_a()
    assert stage.rafts[A].holds_lease(stage.now_s)
    stage.tell(A, HandOver(stage.now_s + 1.0))
    stage.deliver(lambda _sender, _to, message: isinstance(message, TimeoutNow))
    assert len(stage.said(A, B, TimeoutNow) + stage.said(A, C, TimeoutNow)) == 1
    assert not stage.rafts[A].holds_lease(stage.now_s)
    assert stage.rafts[A].role is Role.FOLLOWER


def test_while_it_hands_over_it_takes_no_command_and_leads_on_if_nobody_is_ready() -> None:
    """Reference: Raft thesis §3.10: the leader "aborts the transfer and resumes"."""
    stage = led_by_a()
    stage.now_s += 0.01
    stage.tell(A, HandOver(stage.now_s + 0.4))
    stage.propose(A, "lost")
    stage.without(B, C)
    assert stage.leaders() == [A] and stage.rafts[A].last_index == 2
    stage.now_s += 0.5
    stage.propose(A, "two")
    stage.beat(A)
    stage.beat(A)
    assert stage.leaders() == [A] and stage.applied[A] == ["one", "two"]


def test_an_order_that_is_lost_costs_an_election_timeout_and_no_more() -> None:
    stage = led_by_a()
    stage.tell(A, HandOver(stage.now_s + 1.0))
    stage.deliver(lambda _sender, _to, message: isinstance(message, TimeoutNow))
    assert stage.leaders() == []
    stage.elect(C)
    assert stage.leaders() == [C]


def test_an_order_counts_in_its_own_term_and_from_its_own_leader_only() -> None:
    stage = led_by_a()
    for sender, order in ((A, TimeoutNow(2)), (A, TimeoutNow(0)), (C, TimeoutNow(1))):
        assert stage.hear(B, sender, order) == []
    assert stage.rafts[B].role is Role.FOLLOWER and stage.rafts[B].counters["handover_orders_stale"] == 3
    stage.hear(B, A, TimeoutNow(1))
    assert stage.rafts[B].role is Role.CANDIDATE and stage.rafts[B].term == 2


def test_a_loyal_voter_yields_only_to_a_candidate_that_was_handed_the_office() -> None:
    stage = led_by_a()
    last = (stage.rafts[C].last_index, 1)
    assert stage.hear(C, B, RequestVote(2, False, *last)) == [], "it heard its leader just now"
    (reply,) = stage.hear(C, B, RequestVote(2, False, *last, handed_over=True))
    assert reply.granted  # type: ignore[union-attr]


def test_a_leader_of_a_later_term_is_not_deposed_by_a_late_request_of_a_successor() -> None:
    stage = led_by_a()
    stage.elect(B, A)
    stage.beat(B)
    assert stage.leaders() == [B] and stage.rafts[B].term == 2
    stage.hear(C, A, RequestVote(2, False, 99, 1, handed_over=True))
    assert stage.rafts[B].holds_lease(stage.now_s) and stage.rafts[C].leader == B


def test_who_is_asked_to_take_over_has_everything_and_answered_last() -> None:
    assert policy.successor([(A, 9, 5.0), (B, 9, 6.0), (C, 8, 7.0)], 9, 4.0) == B
    assert policy.successor([(A, 9, 5.0), (C, 8, 7.0)], 9, 5.5) is None
    assert policy.successor([], 0, 0.0) is None


def test_a_failed_successor_asks_like_anybody_else_the_next_time() -> None:
    stage = led_by_a()
    stage.hear(B, A, TimeoutNow(1))
    stage.messages.clear()
    for _ in range(2):  # the first time it was late itself, and listens once more
        stage.now_s += TIMING.election_max_s + 1
        stage.tell(B, Tick())
    asked = [message for message in stage.said(B, C, RequestVote) if isinstance(message, RequestVote)]
    assert [(each.handed_over, each.pre_vote) for each in asked] == [(True, False), (False, True)]


# ---- whole logs, on a virtual clock ----


@pytest.mark.parametrize("seed", range(8))
@virtual
async def test_a_leader_that_is_stopped_leaves_a_leader_behind_and_no_proposal_is_lost(seed: int) -> None:
    async with Rack("a", "b", "c", "d", seed=seed) as rack:
        clock = asyncio.get_running_loop()
        leader = await rack.led()
        await asyncio.sleep(1.0)
        other = next(member for member in rack.members.values() if member.up and member is not leader)
        stop = clock.create_task(leader.stop())
        began_s = clock.time()
        results = await asyncio.gather(*(other.log.propose(f"{n}".encode()) for n in range(5)))
        took_s = clock.time() - began_s
        await stop
        assert sorted(results) == [b"1", b"2", b"3", b"4", b"5"], "each applied once"
        assert took_s < TIMING.election_min_s / 4
        assert rack.leader() is not None


@virtual
async def test_the_last_voter_that_is_up_stops_without_waiting_for_anybody_for_long() -> None:
    async with Rack("a", "b", "c") as rack:
        leader = await rack.led()
        for member in rack.members.values():
            if member is not leader:
                member.kill()
        began_s = asyncio.get_running_loop().time()
        await leader.stop()
        assert asyncio.get_running_loop().time() - began_s < 1.0
