"""What is decoded is a message of the log, or Malformed: never anything else."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.raft.messages import (
    CHUNK_BYTES_MAX,
    COMMAND_BYTES_MAX,
    ENTRIES_MAX,
    MESSAGE_BYTES_MAX,
    NO_RACK,
    Append,
    AppendReply,
    Asked,
    Entry,
    ForwardedCommand,
    InstallSnapshot,
    MalformedMessage,
    ProposeEntries,
    ProposeEntry,
    ProposeReplies,
    ProposeReply,
    ReadIndex,
    ReadIndexReply,
    RequestVote,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    Words,
    another_rack,
    decode,
    decode_asked,
    encode,
    encode_asked,
)
from agent.raft.policy import BATCH_BYTES_MAX, batch_length
from tests.agent.raft.stage import entry

RACK = b"rack one"
WORDS: list[Words] = [
    RequestVote(3, True, 9, 2),
    RequestVote(3, False, 9, 2, handed_over=True),
    TimeoutNow(3),
    VoteReply(3, False, True),
    Append(3, 7, 2, 6, 41, (entry(2, "x"), entry(3), entry(3, "y"))),
    AppendReply(3, 41, False, 7, 5, 2),
    InstallSnapshot(3, 100, 2, 41, 10, 0xFFFFFFFF, 4, b"pieces"),
    SnapshotReply(3, 41, 100, 10),
]
ASKED: list[Asked] = [
    ProposeEntry(RACK, b"i" * 16, 2, 90, b"command"),
    ProposeReply("applied", 91, b"result"),
    ProposeEntries(RACK, (ForwardedCommand(b"i" * 16, 2, 90, b"command"), ForwardedCommand(b"j" * 16, 1, 90, b""))),
    ProposeReplies((ProposeReply("applied", 91, b"result"), ProposeReply("busy"))),
    ReadIndex(RACK),
    ReadIndexReply(True, 91),
]


@pytest.mark.parametrize("message", WORDS, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: Words) -> None:
    envelope = decode(encode(RACK, message))
    assert (envelope.rack, envelope.message) == (RACK, message)


@pytest.mark.parametrize("message", ASKED, ids=lambda message: type(message).__name__)
def test_every_question_and_answer_survives_the_wire(message: Asked) -> None:
    assert decode_asked(encode_asked(message)) == message


def test_racks_are_different_only_when_both_are_certain() -> None:
    assert another_rack(RACK, b"rack two")
    assert not another_rack(RACK, RACK)
    assert not another_rack(RACK, NO_RACK)
    assert not another_rack(NO_RACK, RACK)


@given(st.binary(max_size=400))
def test_random_bytes_are_malformed_or_a_message(data: bytes) -> None:
    for read in (decode, decode_asked):
        try:
            assert isinstance(read(data), msgspec.Struct)
        except MalformedMessage as error:
            assert str(error)


@given(st.sampled_from([encode(RACK, m) for m in WORDS] + [encode_asked(m) for m in ASKED]), st.data())
def test_mutated_messages_are_malformed_or_a_message(data: bytes, draw: st.DataObject) -> None:
    broken = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, len(broken) - 1))
        broken[at : at + draw.draw(st.integers(0, 2))] = draw.draw(st.binary(max_size=3))
        if not broken:
            broken += b"\x90"
    for read in (decode, decode_asked):
        try:
            assert isinstance(read(bytes(broken)), msgspec.Struct)
        except MalformedMessage as error:
            assert str(error)


@given(st.sampled_from(WORDS), st.integers(0, 200))
def test_a_truncated_message_is_malformed(message: Words, keep: int) -> None:
    data = encode(RACK, message)
    with pytest.raises(MalformedMessage):
        decode(data[: min(keep, len(data) - 1)])


def raw(*fields: object) -> bytes:
    return msgspec.msgpack.encode([RACK, fields])


@pytest.mark.parametrize(
    "data",
    [
        raw("RequestVote", -1, True, 9, 2),
        raw("RequestVote", 3, True, 9, 4),
        raw("RequestVote", 3, True, 9, 2, True),
        raw("TimeoutNow", -1),
        raw("RequestVote", 3, 1, 9, 2),
        raw("RequestVote", 1 << 60, True, 9, 2),
        raw("Append", 3, 7, 2, 6, 41, [[4, b"", 0, b""]]),
        raw("Append", 3, 7, 3, 6, 41, [[2, b"", 0, b""]]),
        raw("Append", 3, 7, 2, 6, 41, [[3, b"", 0, b""], [2, b"", 0, b""]]),
        raw("Append", 3, 0, 1, 6, 41, []),
        raw("Append", 3, 7, 2, 6, 41, [[3, b"i" * 17, 0, b""]]),
        raw("Append", 3, 7, 2, 6, 41, [[3, b"", 0, b""]] * (ENTRIES_MAX + 1)),
        raw("Append", 3, 7, 2, 6, 41, [[3, b"", 0, bytes(COMMAND_BYTES_MAX + 1)]]),
        raw("Snapshot", 3, 100, 2, 41, 10, 1, 5, b"pieces"),
        raw("Snapshot", 3, 0, 2, 41, 10, 1, 0, b""),
        raw("Snapshot", 1, 100, 2, 41, 10, 1, 0, b""),
        raw("Snapshot", 3, 100, 2, 41, 1 << 40, 1, 0, b""),
        raw("Snapshot", 3, 100, 2, 41, 1 << 20, 1, 0, bytes(CHUNK_BYTES_MAX + 1)),
        raw("Shutdown", 3),
        msgspec.msgpack.encode([b"short", ["VoteReply", 3, False, True]]),
        b"\x91" * 20_000 + b"\x00",
        bytes(MESSAGE_BYTES_MAX + 1),
    ],
)
def test_what_no_correct_host_says_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data)


def test_a_question_over_the_limits_is_malformed() -> None:
    for question in (
        ProposeEntry(RACK, b"i" * 15, 2, 90, b""),
        ProposeEntry(RACK, b"i" * 16, 2, 90, bytes(COMMAND_BYTES_MAX + 1)),
        ProposeEntry(b"", b"i" * 16, 2, 90, b""),
    ):
        with pytest.raises(MalformedMessage):
            decode_asked(encode_asked(question))
    with pytest.raises(MalformedMessage):
        decode_asked(bytes(MESSAGE_BYTES_MAX + 1))


def test_the_largest_batch_fits_into_a_message() -> None:
    longest = Entry(1 << 53, b"i" * 16, 1 << 53, bytes(COMMAND_BYTES_MAX))
    small = Entry(1 << 53, b"i" * 16, 1 << 53, bytes(BATCH_BYTES_MAX // ENTRIES_MAX - 48))
    for entries in ([longest] * 4, [small] * 2000):
        batch = tuple(entries[: batch_length(entries)])
        assert len(encode(RACK, Append(1 << 53, 1 << 52, 1, 1, 1, batch))) <= MESSAGE_BYTES_MAX


@given(st.lists(st.integers(0, COMMAND_BYTES_MAX), max_size=30))
def test_a_batch_is_never_empty_and_never_too_long(sizes: list[int]) -> None:
    entries = [Entry(1, b"", 0, bytes(size)) for size in sizes]
    length = batch_length(entries)
    assert (length > 0) == bool(entries)
    assert length == 1 or sum(sizes[:length]) <= BATCH_BYTES_MAX


def test_a_request_of_an_agent_that_does_not_know_of_handing_over_is_understood() -> None:
    plain = decode(encode(RACK, RequestVote(3, False, 9, 2)))
    older = msgspec.msgpack.encode([RACK, ["RequestVote", 3, False, 9, 2]])
    assert decode(older) == plain
