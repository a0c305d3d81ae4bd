"""Hosts whose processors or disks are late: a leader stays, as long as no host is lost."""

import pytest

from agent.raft.machine import Role
from agent.raft.machine.disk_pace import RELUCTANCE, SLOW_S, DiskPace
from agent.raft.machine.patience import LATE_S_MAX, MEMORY_S, STRETCH, ElectionPatience
from agent.raft.machine.types import HardState, Persist, Proposed, Tick
from agent.raft.messages import AppendReply, TimeoutNow
from chaos.crowds.log.late import Late, play
from tests.agent.raft.stage import TIMING, A, B, C, Stage, proposal


@pytest.mark.parametrize("seed", range(12))
def test_no_leader_changes_while_every_host_is_late_by_less_than_a_second(seed: int) -> None:
    late = Late(seed)
    late.run(5.0)
    assert len(late.leaders) == 1
    for _ in range(400):
        late.stop(late.rng.choice(late.names), late.rng.uniform(0.1, 0.95))
        late.run(late.rng.uniform(0.0, 0.8))
    assert len(late.leaders) == 1, f"seed {seed}: {late.leaders}"


def test_a_disk_that_hangs_and_a_host_that_is_lost_do_change_the_leader() -> None:
    assert len(play(3).leaders) == 3


@pytest.mark.parametrize("seed", range(12))
def test_a_loss_is_noticed_within_two_seconds_by_hosts_that_are_not_late(seed: int) -> None:
    late = Late(seed)
    late.run(5.0)
    ((_, lost),) = late.leaders
    late.run(2.0, gone=lost)
    assert len(late.leaders) == 2, f"seed {seed}: nobody leads two seconds after {lost} was lost"


def test_silences_that_ended_are_outlasted_for_a_minute_and_outages_are_not_lateness() -> None:
    patience = ElectionPatience()
    patience.ended(1.5, 100.0)
    patience.ended(0.2, 110.0)
    assert patience.stretched(1.2, 110.0) == STRETCH * 1.5
    assert patience.stretched(1.2, 100.0 + MEMORY_S + 1) == 1.2
    patience.ended(LATE_S_MAX + 0.1, 200.0)
    assert patience.stretched(1.2, 200.0) == 1.2


def test_who_was_stopped_itself_reads_what_came_before_it_stands() -> None:
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.beat(A)
    stage.now_s += 10.0
    stage.tell(B, Tick())
    assert stage.rafts[B].role is Role.FOLLOWER and stage.rafts[B].leader == A, "the leader may have spoken meanwhile"
    stage.now_s += TIMING.heartbeat_s
    stage.tell(B, Tick())
    assert stage.rafts[B].role is Role.PRECANDIDATE, "it did not"


def test_a_leader_that_was_stopped_reads_the_answers_before_it_steps_down() -> None:
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.beat(A)
    stage.now_s += TIMING.step_down_s + 0.3
    stage.tell(A, Tick())
    assert stage.rafts[A].role is Role.LEADER and not stage.rafts[A].holds_lease(stage.now_s)
    stage.messages.clear()
    for _ in range(4):
        stage.now_s += TIMING.heartbeat_s
        stage.tell(A, Tick())
    assert stage.rafts[A].role is Role.LEADER, "it was stopped itself, and asked nobody: they may be late by as much"
    stage.now_s += LATE_S_MAX - TIMING.step_down_s - 0.3 - 4 * TIMING.heartbeat_s + 0.01
    stage.tell(A, Tick())
    assert stage.rafts[A].role is Role.FOLLOWER


def test_lateness_of_the_leader_and_then_of_a_majority_changes_nobody() -> None:
    """Each of them was late by less than a second, one after the other."""
    assert len(play(70006).leaders) == 3, "one for the disk that hangs, one for the host that is lost"


def test_what_lay_unread_while_a_host_was_stopped_does_not_make_its_copy_the_newest() -> None:
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.beat(A)
    heard_s = stage.rafts[B].current_s
    stage.now_s += TIMING.heartbeat_s
    stage.tell(A, Tick())  # sent before B is stopped, read after it
    stage.now_s += 20.0
    stage.deliver()
    assert heard_s is not None and stage.rafts[B].current_s == heard_s
    stage.elect(A)
    stage.beat(A)
    assert stage.rafts[B].current_s == stage.now_s, "a leader spoke now"


def test_a_leader_that_has_committed_nothing_yet_makes_nobodys_copy_the_newest() -> None:
    """What an earlier leader committed, this one has, and does not know to be committed. Reference: Raft §8."""
    stage = Stage(A, B, C, logs=dict.fromkeys((A, B, C), (1, 1, 1)))
    stage.stand(A)
    for _ in range(3):
        stage.deliver(lose=lambda _, to, message: to == A and isinstance(message, AppendReply))
        stage.now_s = max(stage.now_s, stage.rafts[A].wake_s)
        stage.tell(A, Tick())
    assert stage.rafts[A].leading and stage.rafts[B].leader == A
    assert stage.rafts[B].current_s is None, "three entries may be committed that it has not applied"
    assert stage.rafts[A].confirmed_s(stage.now_s) is None, "nor has the leader"
    for _ in range(3):
        stage.beat(A)
    assert stage.rafts[B].commit == 4 and stage.rafts[B].current_s == stage.now_s


# ---- disks ----


def led_with_a_hanging_disk() -> Stage:
    """A stage where A leads, and its disk does not finish what B and C have."""
    stage = Stage(A, B, C)
    stage.elect(A)
    stage.beat(A)
    stage.slow.add(A)
    stage.tell(A, Proposed([proposal("x")]))
    stage.deliver()
    return stage


def test_a_leader_whose_disk_hangs_commits_by_the_others_and_hands_over_after_2_s() -> None:
    stage = led_with_a_hanging_disk()
    assert stage.applied[A] == ["x"], "two of three have it"
    end_s = stage.now_s + SLOW_S + 0.5
    while stage.now_s < end_s and stage.rafts[A].leading:
        stage.now_s += TIMING.heartbeat_s
        stage.tell(A, Tick())
        stage.deliver()
    assert stage.leaders() in ([B], [C])
    assert stage.rafts[A].counters["handovers_for_slow_disk"] == 1


def test_a_host_whose_disk_hangs_does_not_stand_until_it_is_well() -> None:
    stage = led_with_a_hanging_disk()
    stage.messages.clear()
    stage.now_s += SLOW_S + 20.0
    for _ in range(4):
        stage.tell(A, Tick())
        stage.now_s += 10.0
    assert stage.rafts[A].role is Role.FOLLOWER
    assert not [1 for sender, _, message in stage.told if sender == A and isinstance(message, TimeoutNow)]
    asked = stage.rafts[A].counters["prevotes"]
    stage.slow.clear()
    stage.finish_writing(A)
    for _ in range(4):
        stage.now_s += 10.0
        stage.tell(A, Tick())
    assert stage.rafts[A].counters["prevotes"] > asked, "it may be the only one left"


def test_a_slow_write_makes_reluctant_until_one_was_quick() -> None:
    pace = DiskPace()
    pace.began([Persist(1, HardState(), 1, ())], 10.0)
    assert not pace.hangs(10.0 + SLOW_S)
    assert pace.hangs(10.1 + SLOW_S)
    pace.done(1, 20.0)
    assert (pace.hangs(30.0), pace.reluctance) == (False, RELUCTANCE)
    pace.began([Persist(2, HardState(), 1, ())], 30.0)
    pace.done(2, 30.1)
    assert pace.reluctance == 1.0
