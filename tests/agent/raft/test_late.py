"""What comes late: votes, orders, answers and pieces of a term, a write or a snapshot that is over."""

import random

from agent.raft.disk.acknowledged import SLOT_BYTES, Acknowledged
from agent.raft.machine import Role
from agent.raft.machine.snapshot_receiver import SnapshotReceiver
from agent.raft.machine.types import Persisted
from agent.raft.messages import (
    IDENTITY_BYTES,
    NO_RACK,
    AppendReply,
    InstallSnapshot,
    RequestVote,
    TimeoutNow,
    VoteReply,
    crc,
)
from agent.raft.policy import up_to_date
from chaos.crowds.memory_disk import MemoryDisk, run
from tests.agent.raft.stage import TIMING, A, B, C, D, E, Stage


def test_a_candidate_of_a_term_that_is_over_gets_no_vote_though_nobody_has_this_one() -> None:
    stage = Stage(A, B, C, term=7)
    stage.now_s += 2 * TIMING.election_min_s
    (answer,) = stage.hear(B, A, RequestVote(6, False, 99, 9))
    assert isinstance(answer, VoteReply) and (answer.term, answer.granted) == (7, False)
    (answer,) = stage.hear(B, C, RequestVote(7, False, 99, 9))
    assert isinstance(answer, VoteReply) and answer.granted, "its vote of this term was not given away"


def test_a_vote_that_was_given_in_an_earlier_term_does_not_count_in_this_one() -> None:
    stage = Stage(A, B, C, D, E, term=3)
    stage.stand(A)
    stage.deliver(lambda _sender, _to, message: isinstance(message, RequestVote) and not message.pre_vote)
    first = stage.rafts[A].term
    assert stage.rafts[A].role is Role.CANDIDATE and not stage.rafts[A].leading
    stage.stand(A)
    stage.deliver(lambda _sender, _to, message: isinstance(message, RequestVote) and not message.pre_vote)
    assert (stage.rafts[A].role, stage.rafts[A].term) == (Role.CANDIDATE, first + 1)
    for voter in (B, C):
        stage.hear(A, voter, VoteReply(first, False, True))
    assert not stage.rafts[A].leading, "both voted in the term before, and may vote for another in this one"
    for voter in (B, C):
        stage.hear(A, voter, VoteReply(first + 1, False, True))
    assert stage.rafts[A].leading


def test_a_candidate_counts_its_own_vote_once_the_write_of_that_vote_is_durable() -> None:
    """An earlier write that ends meanwhile is another one."""
    stage = Stage(A, B, C)
    stage.elect(B)
    stage.slow.add(A)
    stage.propose(B, "x")
    stage.deliver()
    assert stage.writing[A], "the entry is not on its disk yet"
    (entry_alone,) = stage.writing[A]
    stage.hear(A, B, TimeoutNow(stage.rafts[A].term))
    stage.writing[A].remove(entry_alone)
    raft = stage.rafts[A]
    assert raft.role is Role.CANDIDATE and stage.writing[A], "it wrote that it votes for itself"
    stage.tell(A, Persisted(entry_alone.number))
    assert A not in raft._votes, "its own vote is not written"
    stage.finish_writing(A)
    assert raft._votes[A]


def test_an_answer_of_a_former_term_says_nothing_of_what_a_voter_holds_in_this_one() -> None:
    stage = Stage(A, B, C)
    stage.elect(A)
    first = stage.rafts[A].term
    stage.propose(A, "x")
    stage.without(B, C)
    stage.elect(A)
    raft = stage.rafts[A]
    assert raft.leading and raft.term > first
    stage.propose(A, "y")
    stage.messages.clear()
    last, commit = raft.last_index, raft.commit
    for voter in (B, C):
        stage.hear(A, voter, AppendReply(first, 1, True, last))
    assert raft.commit == commit < last, "they held that in another leader's log, perhaps, and may have cut it since"


def test_the_term_of_the_last_entry_comes_before_how_many_there_are() -> None:
    """Reference: Raft §5.4.1."""
    assert up_to_date(3, 5, 9, 4) and not up_to_date(9, 4, 3, 5)
    assert up_to_date(4, 4, 4, 4) and up_to_date(5, 4, 4, 4) and not up_to_date(3, 4, 4, 4)


def test_pieces_of_two_snapshots_of_one_length_are_not_put_together() -> None:
    old, new = b"a" * 12, b"b" * 12

    def piece(data: bytes, offset: int, index: int) -> InstallSnapshot:
        return InstallSnapshot(2, index, 1, 0, len(data), crc(data), offset, data[offset : offset + 4])

    receiver = SnapshotReceiver()
    assert receiver.add(A, piece(old, 0, 5)) is None
    assert receiver.add(A, piece(new, 4, 9)) is None and receiver.length == 0, "a new one is received from its start"
    assert receiver.add(A, piece(new, 0, 9)) is receiver.add(A, piece(new, 4, 9)) is None
    whole = receiver.add(A, piece(new, 8, 9))
    assert whole is not None and (whole.index, whole.data) == (9, new)


def test_a_torn_record_leaves_the_one_before_it() -> None:
    disk = MemoryDisk(random.Random(1))
    acknowledged = Acknowledged(disk)
    run(acknowledged.begin(b"r" * len(NO_RACK), b"i" * IDENTITY_BYTES, 1, 100))
    for size in range(101, 110):
        run(disk.write_at(*acknowledged.note(b"r" * len(NO_RACK), b"i" * IDENTITY_BYTES, 1, size)))
        run(acknowledged.noted())
        newest = max((0, SLOT_BYTES), key=lambda at: _size(disk.files["acknowledged"], at))
        whole = bytearray(disk.files["acknowledged"])
        whole[newest + 20] ^= 1
        torn = MemoryDisk(random.Random(1))
        torn.files["acknowledged"] = bytes(whole)
        found = run(Acknowledged(torn).load())
        assert found is not None and found.size == size - 1


def _size(data: bytes, at: int) -> int:
    one = MemoryDisk(random.Random(1))
    one.files["acknowledged"] = data[at : at + SLOT_BYTES] * 2
    found = run(Acknowledged(one).load())
    return 0 if found is None else found.size
