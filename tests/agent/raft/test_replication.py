"""Flow control, snapshots and compaction: hosts that are slow, far behind, or come back from their disks."""

from collections.abc import Sequence

import pytest

from agent.raft.machine import Contradiction
from agent.raft.machine.progress import VOTER_WINDOW, ProgressState
from agent.raft.machine.types import RaftHostsChanged, SnapshotTaken, Tick
from agent.raft.messages import Append, AppendReply, Entry, InstallSnapshot, SnapshotReply, Words
from agent.raft.policy import Timing
from covey.core.ids import HostId
from tests.agent.raft.stage import A, B, C, D, Stage


def led(observers: Sequence[HostId] = (), timing: Timing | None = None) -> Stage:
    stage = Stage(A, B, C, observers=observers, timing=timing or Timing(keep_entries=2, chunk_bytes=10))
    stage.elect(A)
    return stage


def fill(stage: Stage, count: int, *gone: HostId) -> None:
    for number in range(count):
        stage.propose(A, f"c{number}")
        stage.without(*gone)


def progress(stage: Stage, host: HostId) -> ProgressState:
    leading = stage.rafts[A].leading
    assert leading is not None
    return leading.peers[host].state


def test_an_entry_is_acknowledged_once_on_the_disk_and_committed_by_no_earlier_word() -> None:
    stage = led()
    stage.slow |= {B, C}
    stage.propose(A, "kept")
    stage.told.clear()
    stage.deliver()
    assert stage.applied[A] == [], "one disk of three"
    assert stage.said(B, A, AppendReply) == stage.said(C, A, AppendReply) == []
    stage.beat(A)
    assert stage.applied[A] == [], "they answer heartbeats meanwhile, with what they have on their disks"
    assert stage.said(B, A, AppendReply)
    stage.slow.discard(B)
    stage.finish_writing(B)
    stage.deliver()
    assert stage.applied[A] == ["kept"]


def test_entries_are_sent_ahead_of_the_answers_but_only_so_far() -> None:
    stage = led()
    stage.told.clear()
    for number in range(VOTER_WINDOW + 10):
        stage.propose(A, f"c{number}")
    assert len(stage.said(A, B, Append)) == VOTER_WINDOW
    stage.deliver()
    assert len(stage.applied[A]) == VOTER_WINDOW + 10


def test_what_did_not_fit_the_window_travels_together() -> None:
    stage = led()
    for number in range(VOTER_WINDOW + 300):
        stage.propose(A, f"c{number}")
    stage.told.clear()
    stage.deliver()
    sent = [message for message in stage.said(A, B, Append) if isinstance(message, Append) and message.entries]
    assert sum(len(message.entries) for message in sent) == 300
    assert len(sent) < 10


def test_a_lost_append_is_found_out_by_the_next_heartbeat() -> None:
    stage = led()
    stage.propose(A, "lost")
    stage.messages.clear()
    stage.propose(A, "refused")
    stage.deliver()
    stage.beat(A)
    stage.beat(A)
    assert [stage.applied[host] for host in (A, B, C)] == [["lost", "refused"]] * 3


def test_lost_answers_do_not_block_a_follower() -> None:
    stage = led()
    for number in range(VOTER_WINDOW * 2):
        stage.propose(A, f"c{number}")
    stage.deliver(lambda sender, to, message: to == A)
    assert stage.applied[A] == []
    stage.beat(A)
    stage.beat(A)
    assert len(stage.applied[A]) == len(stage.applied[B]) == VOTER_WINDOW * 2


def test_an_observer_gets_one_append_at_a_time_and_then_all_that_gathered() -> None:
    stage = led(observers=[D])
    stage.beat(A)
    stage.told.clear()
    fill(stage, 20, D)
    assert len(stage.said(A, D, Append)) == 1
    for _ in range(3):
        stage.beat(A)
    assert stage.applied[D] == stage.applied[A]


def test_a_new_observer_catches_up_and_a_host_that_leaves_is_left_alone() -> None:
    stage = led(observers=[D])
    stage.tell(A, RaftHostsChanged(()))
    fill(stage, 5)
    stage.told.clear()
    stage.beat(A)
    assert stage.said(A, D, Append) == []
    stage.tell(A, RaftHostsChanged((D,)))
    for _ in range(3):
        stage.beat(A)
    assert stage.applied[D] == stage.applied[A]


# ---- snapshots ----


def compacted(*gone: HostId, observers: Sequence[HostId] = ()) -> Stage:
    """A leader whose log no longer reaches back to what the hosts that were gone have."""
    stage = led(observers)
    stage.beat(A)
    fill(stage, 10, *gone)
    stage.tell(A, SnapshotTaken(stage.rafts[A].commit, b"the state after ten commands"))
    assert len(stage.terms(A)) == 2, "keep_entries"
    return stage


def test_a_follower_that_the_log_no_longer_reaches_gets_a_snapshot_in_pieces() -> None:
    """Reference: Raft §7."""
    stage = compacted(C)
    for _ in range(3):
        stage.beat(A)
    pieces = stage.said(A, C, InstallSnapshot)
    assert len({piece.offset for piece in pieces if isinstance(piece, InstallSnapshot)}) == 3
    assert stage.restored[C] == [b"the state after ten commands"]
    stage.propose(A, "after")
    stage.deliver()
    assert stage.applied[C] == ["after"]
    assert progress(stage, C) is ProgressState.STREAM


def test_a_snapshot_reaches_its_follower_although_pieces_and_answers_get_lost() -> None:
    stage = compacted(C)
    lost = 0

    def every_third(sender: HostId, to: HostId, message: Words) -> bool:
        nonlocal lost
        lost += isinstance(message, InstallSnapshot | SnapshotReply)
        return isinstance(message, InstallSnapshot | SnapshotReply) and lost % 3 == 1

    for _ in range(60):
        stage.now_s = stage.rafts[A].wake_s
        stage.tell(A, Tick())
        stage.deliver(every_third)
    assert stage.restored[C] == [b"the state after ten commands"]
    assert lost > 6


def test_a_snapshot_under_way_does_not_look_like_a_lost_host() -> None:
    """With the third voter dead, the slow one's answers keep the leader in office."""
    stage = compacted(C)
    for _ in range(20):
        stage.now_s = stage.rafts[A].wake_s
        stage.tell(A, Tick())
        stage.deliver(lambda sender, to, message: B in (sender, to) or isinstance(message, InstallSnapshot))
    assert stage.leaders() == [A]
    assert progress(stage, C) is ProgressState.SNAPSHOT


def test_a_damaged_snapshot_is_not_installed() -> None:
    stage = led()
    bad = InstallSnapshot(1, 9, 1, 1, 4, 12345, 0, b"lies")
    assert stage.hear(C, A, bad) == [SnapshotReply(1, 1, 9, 0, last_index=1)]
    assert (stage.restored[C], stage.rafts[C].commit) == ([], 1)


def test_a_snapshot_of_what_a_follower_has_already_changes_nothing() -> None:
    """Reference: Raft §7: a retransmission, or one that arrived late."""
    stage = compacted()
    commit = stage.rafts[B].commit
    stage.hear(B, A, InstallSnapshot(1, commit - 2, 1, 1, 4, 12345, 0, b"late"))
    assert (stage.restored[B], stage.rafts[B].commit) == ([], commit)


def test_a_follower_that_has_the_entry_a_snapshot_ends_with_keeps_its_log() -> None:
    """Reference: Raft §7."""
    stage = led()
    stage.propose(A, "x", "y")
    stage.deliver(lambda sender, to, message: to != C)
    held = stage.terms(C)
    stage.hear(C, A, InstallSnapshot(1, 2, 1, 1, 4, 12345, 0, b"unused"))
    assert (stage.terms(C), stage.rafts[C].commit, stage.restored[C]) == (held, 2, [])


def test_a_leader_elected_on_a_compacted_log_brings_the_others_along() -> None:
    stage = compacted(C)
    stage.elect(A, B)
    for _ in range(4):
        stage.beat(A)
    stage.propose(A, "after")
    stage.deliver()
    assert stage.applied[C][-1] == "after"
    assert stage.rafts[B].commit == stage.rafts[C].commit == stage.rafts[A].commit


def test_a_follower_far_behind_and_in_conflict_takes_the_snapshot_instead_of_its_log() -> None:
    stage = Stage(A, B, C, logs={C: (1, 2, 2, 2, 2, 2)}, term=3, timing=Timing(keep_entries=0))
    stage.elect(A, C)
    fill(stage, 4, C)
    stage.tell(A, SnapshotTaken(stage.rafts[A].commit, b"s"))
    for _ in range(4):
        stage.beat(A)
    assert stage.restored[C] == [b"s"]
    assert 2 not in stage.terms(C)


# ---- restarts ----


@pytest.mark.parametrize("host", [A, B, D])
def test_a_host_comes_back_with_what_it_had_and_goes_on(host: HostId) -> None:
    stage = compacted(observers=[D])
    for _ in range(3):
        stage.beat(A)
    stage.propose(A, "last")
    stage.deliver()
    stage.beat(A)
    term, last = stage.rafts[host].term, stage.rafts[host].last_index
    stage.restart(host)
    assert (stage.rafts[host].term, stage.rafts[host].last_index) == (term, last)
    if host == A:
        assert stage.restored[A] == [b"the state after ten commands"]
    stage.elect(B if host == A else A)
    stage.beat(stage.leaders()[0])
    for _ in range(3):
        stage.beat(stage.leaders()[0])
    assert stage.applied[host][-1] == "last"


def test_an_observer_resumes_from_its_own_disk_without_asking_for_everything_again() -> None:
    stage = led(observers=[D])
    stage.beat(A)
    fill(stage, 10)
    for _ in range(3):
        stage.beat(A)
    stage.restart(D)
    stage.told.clear()
    for _ in range(10):
        stage.beat(A)
    assert stage.applied[D] == stage.applied[A]
    assert sum(len(message.entries) for message in stage.said(A, D, Append) if isinstance(message, Append)) == 0


def test_what_the_disk_knew_to_be_committed_is_applied_before_anybody_is_heard() -> None:
    stage = led(timing=Timing(hint_s=0.0))
    fill(stage, 3)
    stage.beat(A)
    stage.restart(B)
    assert stage.applied[B] == ["c0", "c1", "c2"]


def test_a_committed_entry_is_not_replaced_and_the_contradiction_is_said() -> None:
    stage = led()
    fill(stage, 3)
    stage.beat(A)
    term, last = stage.rafts[B].term, stage.rafts[B].commit
    assert last == 4
    with pytest.raises(Contradiction, match=r"entry 3 is committed here in term 1, the leader has one of term 7"):
        stage.hear(B, C, Append(7, 2, term, 0, 1, (Entry(7, b"", 0, b""),)))
    with pytest.raises(Contradiction, match="entry 3"):
        stage.hear(C, B, Append(8, 3, 7, 0, 1, ()))
    assert stage.rafts[B].last_index == stage.rafts[C].last_index == last
