"""Frames of the tensor path, and the worker's rounds event by event. (Whole jobs: tests/plugins/aggregator.)"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import JobId
from covey.tensors.aggregator.rounds import Rounds, Stale, Superseded
from covey.tensors.numbers.tensor_wire import (
    HEADER_BYTES,
    OPEN_BYTES_MAX,
    PART_BYTES_MAX,
    WANT,
    Declared,
    Frame,
    TensorOp,
    TensorWireError,
    epoch_text,
    frame,
    grant_of,
    job_hash,
    key_of,
    pack_declared,
    parse,
    unpack_declared,
    verify,
)
from covey.wire import handshake

JOB = JobId("j1")
EPOCH = (1 << 32) + 1


def say(rounds: Rounds, op: TensorOp, name: str = "", **fields: object) -> list[Frame]:
    """The aggregator sends one frame; returns the worker's answer."""
    head, payload = frame(op, job_hash(JOB), rounds.epoch, key=key_of(name), **fields)  # type: ignore[arg-type]
    header = parse(head)
    into = rounds.destination(header)
    into[:] = payload
    answer: list[Frame] = [(made, bytes(data)) for made, data in rounds.heard(header, into)]
    rounds.check()
    return answer


def told(frames: object) -> list[tuple[TensorOp, int, int, bytes]]:
    """The frames as (operation, round, part, payload)."""
    found = []
    for head, payload in frames:  # type: ignore[attr-defined]
        header = parse(head)
        verify(head, payload)
        found.append((header.op, header.round, header.part, bytes(payload)))
    return found


def ready(part_bytes: int = 8) -> Rounds:
    """A worker whose model `w` of 12 bytes is agreed."""
    rounds = Rounds(JOB, 1, 3, part_bytes)
    rounds.moved(EPOCH)
    list(rounds.declare("w", "model", (3,), b"a" * 12))
    declared = rounds.tensors["w"].declared
    for part in range(declared.parts):
        start, end = declared.span(part)
        say(rounds, TensorOp.RESULT, "w", part=part, payload=b"A" * (end - start))
    return rounds


# ---- rounds ----------------------------------------------------------------------------------------------------------


def test_a_models_initial_value_counts_only_once_the_aggregator_said_whose() -> None:
    rounds = Rounds(JOB, 1, 3, 8)
    rounds.moved(EPOCH)
    ((head, payload),) = rounds.declare("w", "model", (3,), b"a" * 12)
    assert parse(head).flags == WANT and unpack_declared(payload) == Declared("w", "model", (3,), 8, "tree")
    with pytest.raises(ValueError, match="still in round 0"):
        rounds.push("w", b"d" * 12)
    say(rounds, TensorOp.RESULT, "w", part=1, payload=b"0" * 4)
    assert not rounds.tensors["w"].agreed
    say(rounds, TensorOp.RESULT, "w", part=0, payload=b"0" * 8)
    assert rounds.tensors["w"].agreed and rounds.tensors["w"].version == 0
    assert rounds.tensors["w"].state == b"0" * 12


def test_a_push_goes_out_in_parts_and_is_not_over_until_the_whole_result_is_here() -> None:
    rounds = ready()
    frames = rounds.push("w", b"d" * 12)
    assert told(frames) == [(TensorOp.PUSH, 1, 0, b"d" * 8), (TensorOp.PUSH, 1, 1, b"d" * 4)]
    say(rounds, TensorOp.RESULT, "w", round=1, part=0, payload=b"R" * 8)
    assert rounds.tensors["w"].state == b"A" * 12 and rounds.tensors["w"].version == 0
    say(rounds, TensorOp.RESULT, "w", round=1, part=1, payload=b"R" * 4)
    assert rounds.tensors["w"].state == b"R" * 12 and rounds.tensors["w"].version == 1
    assert rounds.tensors["w"].unacknowledged is None


def test_after_a_change_of_owner_everything_is_said_again_under_the_new_epoch() -> None:
    rounds = ready()
    list(rounds.push("w", b"d" * 12))
    say(rounds, TensorOp.RESULT, "w", round=1, part=0, payload=b"R" * 8)  # half a result, then the owner dies
    assert rounds.moved(EPOCH + 1)
    frames = list(rounds.connected())
    assert {parse(head).epoch for head, _ in frames} == {EPOCH + 1}
    assert [(op, round, part) for op, round, part, _ in told(frames)] == [
        (TensorOp.OPEN, 0, 0),
        (TensorOp.PUSH, 1, 0),
        (TensorOp.PUSH, 1, 1),
    ]
    say(rounds, TensorOp.RESULT, "w", round=1, part=1, payload=b"S" * 4)
    assert rounds.tensors["w"].version == 0, "parts of two owners' results were put together"
    say(rounds, TensorOp.RESULT, "w", round=1, part=0, payload=b"S" * 8)
    assert rounds.tensors["w"].state == b"S" * 12


def test_the_last_result_is_given_to_whoever_asks_also_between_two_pushes() -> None:
    rounds = ready()
    assert told(say(rounds, TensorOp.ASK, "w")) == [(TensorOp.STATE, 0, 0, b"A" * 8), (TensorOp.STATE, 0, 1, b"A" * 4)]
    list(rounds.push("w", b"d" * 12))
    say(rounds, TensorOp.RESULT, "w", round=1, part=0, payload=b"R" * 8)
    assert told(say(rounds, TensorOp.ASK, "w")) == [(TensorOp.STATE, 0, 0, b"A" * 8), (TensorOp.STATE, 0, 1, b"A" * 4)]


@pytest.mark.parametrize("round", [0, 1, 3])
def test_late_and_repeated_results_are_ignored(round: int) -> None:
    rounds = ready()
    list(rounds.push("w", b"d" * 12))
    for part, size in ((0, 8), (1, 4)):
        say(rounds, TensorOp.RESULT, "w", round=1, part=part, payload=b"R" * size)
    list(rounds.push("w", b"e" * 12))
    for part, size in ((0, 8), (1, 4)):
        say(rounds, TensorOp.RESULT, "w", round=round, part=part, payload=b"X" * size)
    assert rounds.tensors["w"].version == 1 and rounds.tensors["w"].state == b"R" * 12
    assert rounds.ignored == 2


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_parts_of_a_result_may_come_in_any_order_and_twice(order: tuple[int, ...]) -> None:
    rounds = ready(part_bytes=4)
    list(rounds.push("w", b"d" * 12))
    for part in (order[0], order[0], *order[1:]):
        say(rounds, TensorOp.RESULT, "w", round=1, part=part, payload=b"%d" % part * 4)
    assert rounds.tensors["w"].state == b"000011112222"


def test_the_higher_epoch_wins_and_another_run_of_the_job_ends_this_one() -> None:
    rounds = ready()
    assert not rounds.moved(EPOCH) and not rounds.moved(EPOCH - 1)
    assert rounds.moved(EPOCH + 7)
    with pytest.raises(Superseded, match="grant 2"):
        rounds.moved(2 << 32)


def test_stale_is_told_apart_by_whether_this_run_is_over() -> None:
    rounds = ready()
    head = parse(frame(TensorOp.STALE, job_hash(JOB), EPOCH + 1)[0])
    with pytest.raises(Stale):
        rounds.heard(head, rounds.destination(head))
    head = parse(frame(TensorOp.STALE, job_hash(JOB), 2 << 32)[0])
    with pytest.raises(Superseded):
        rounds.heard(head, rounds.destination(head))


def test_a_process_in_whose_place_another_one_runs_is_told_to_end() -> None:
    rounds = ready()
    rounds.incarnation = 3
    said = parse(rounds.hello(bytes(16), bytes(16))[0])
    assert said.round == 3
    head = parse(frame(TensorOp.STALE, job_hash(JOB), EPOCH, round=3)[0])
    with pytest.raises(Stale):
        rounds.heard(head, rounds.destination(head))
    head = parse(frame(TensorOp.STALE, job_hash(JOB), EPOCH, round=4)[0])
    with pytest.raises(Superseded, match="another process runs as rank 1 of j1 now"):
        rounds.heard(head, rounds.destination(head))


def test_a_tensor_with_a_fault_is_not_named_to_the_next_aggregator() -> None:
    rounds = ready()
    say(rounds, TensorOp.FAULT, "w", payload=b"shapes differ")
    assert rounds.tensors["w"].fault == "shapes differ"
    rounds.moved(EPOCH + 1)
    assert not list(rounds.connected())


@pytest.mark.parametrize(
    "bad",
    [
        frame(TensorOp.RESULT, job_hash(JOB), EPOCH, key=key_of("unknown")),
        frame(TensorOp.RESULT, job_hash(JobId("j2")), EPOCH, key=key_of("w")),
        frame(TensorOp.RESULT, job_hash(JOB), EPOCH - 1, key=key_of("w")),
        frame(TensorOp.RESULT, job_hash(JOB), EPOCH, key=key_of("w"), part=2, payload=b"12345678"),
        frame(TensorOp.RESULT, job_hash(JOB), EPOCH, key=key_of("w"), payload=b"1234567"),
        frame(TensorOp.PUSH, job_hash(JOB), EPOCH, key=key_of("w"), payload=b"12345678"),
        frame(TensorOp.HELLO, job_hash(JOB), EPOCH, payload=bytes(16)),
    ],
)
def test_a_frame_that_nobody_could_mean_is_an_error_of_the_peer(bad: Frame) -> None:
    rounds = ready()
    header = parse(bad[0])
    with pytest.raises(TensorWireError):
        rounds.destination(header)
    rounds.check()


@given(
    frames=st.lists(
        st.tuples(
            st.sampled_from([TensorOp.RESULT, TensorOp.ASK, TensorOp.FAULT, TensorOp.PONG, TensorOp.WELCOME]),
            st.integers(0, 3),
            st.integers(0, 3),
            st.binary(max_size=9),
        ),
        max_size=12,
    )
)
def test_whatever_an_aggregator_says_the_rounds_stay_sound(frames: list[tuple[TensorOp, int, int, bytes]]) -> None:
    rounds = ready()
    list(rounds.push("w", b"d" * 12))
    for op, round, part, payload in frames:
        data = payload if op in (TensorOp.RESULT, TensorOp.FAULT) else b""
        try:
            say(rounds, op, "w", round=round, part=part, payload=data)
        except TensorWireError:
            pass
        rounds.check()


def test_names_are_taken_once_and_must_fit_a_frame() -> None:
    rounds = ready()
    with pytest.raises(ValueError, match="already known"):
        rounds.declare("w", "grad", (3,))
    with pytest.raises(ValueError, match="length"):
        rounds.declare("", "grad", (3,))
    with pytest.raises(ValueError, match="parts"):
        rounds.declare("huge", "grad", (1 << 20,))
    with pytest.raises(ValueError, match="bytes"):
        rounds.declare("v", "model", (3,), b"too short")


# ---- frames ----------------------------------------------------------------------------------------------------------


def test_a_header_is_40_bytes_and_says_everything_again() -> None:
    short, word = 2**16 - 1, 2**32 - 1
    head, payload = frame(TensorOp.PUSH, 2**64 - 1, 2**63, key=word, part=short, rank=short, round=word, payload=b"x")
    header = parse(head)
    assert len(head) == HEADER_BYTES == 40
    assert (header.op, header.job, header.epoch, header.key) == (TensorOp.PUSH, 2**64 - 1, 2**63, 2**32 - 1)
    assert (header.part, header.rank, header.round, header.length) == (65535, 65535, 2**32 - 1, 1)
    verify(head, payload)


@given(st.binary(max_size=80))
def test_random_bytes_are_no_frame_or_a_bounded_one(data: bytes) -> None:
    try:
        header = parse(data)
    except TensorWireError:
        return
    assert header.length <= PART_BYTES_MAX


@given(at=st.integers(0, 39), flip=st.integers(1, 255), payload=st.binary(min_size=1, max_size=64))
def test_a_frame_with_any_byte_changed_is_found_out(at: int, flip: int, payload: bytes) -> None:
    head = bytearray(frame(TensorOp.PUSH, 7, EPOCH, key=3, payload=payload)[0])
    head[at] ^= flip
    with pytest.raises(TensorWireError):
        header = parse(head)
        verify(head, payload[: header.length])
    changed = bytearray(payload)
    changed[at % len(payload)] ^= flip
    with pytest.raises(TensorWireError):
        verify(frame(TensorOp.PUSH, 7, EPOCH, key=3, payload=payload)[0], changed)


@pytest.mark.parametrize(
    ("op", "most"), [(TensorOp.OPEN, OPEN_BYTES_MAX + 4), (TensorOp.PUSH, PART_BYTES_MAX), (TensorOp.ASK, 0)]
)
def test_a_length_too_large_for_its_operation_is_refused_before_anything_is_read(op: TensorOp, most: int) -> None:
    head = bytearray(frame(op, 1, EPOCH)[0])
    head[32:36] = (most + 1).to_bytes(4, "little")
    with pytest.raises(TensorWireError, match="at most"):
        parse(head)


@given(st.binary(max_size=200))
def test_random_bytes_are_no_declaration_or_a_bounded_one(data: bytes) -> None:
    try:
        declared = unpack_declared(data)
    except TensorWireError:
        return
    assert declared.parts <= 65535 and declared.size_bytes <= 65535 * PART_BYTES_MAX


@given(at=st.integers(0, 200), flip=st.integers(1, 255))
def test_a_mutated_declaration_is_refused_or_another_bounded_one(at: int, flip: int) -> None:
    data = bytearray(pack_declared(Declared("weights", "model", (1000, 30), 4096)))
    data[at % len(data)] ^= flip
    try:
        declared = unpack_declared(data)
    except TensorWireError:
        return
    assert 1 <= declared.parts <= 65535 and declared.part_bytes % 4 == 0


@given(shape=st.lists(st.integers(0, 50), max_size=3), part_bytes=st.integers(1, 100).map(lambda n: 4 * n))
def test_parts_cover_a_tensor_exactly(shape: list[int], part_bytes: int) -> None:
    declared = Declared("t", "grad", tuple(shape), part_bytes)
    spans = [declared.span(part) for part in range(declared.parts)]
    assert spans[0][0] == 0 and spans[-1][1] == declared.size_bytes
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(end - start <= part_bytes for start, end in spans)


def test_epochs_read_as_grant_and_ballot() -> None:
    assert epoch_text((3 << 32) + 17) == "3.17" and grant_of((3 << 32) + 17) == 3


def test_a_worker_proves_that_it_knows_the_secret_and_never_says_it() -> None:
    rounds, secret = ready(), b"s" * 16
    head, nonce = rounds.hello(secret, b"n" * 16)
    hello = head + bytes(nonce)
    ((proof_head, proof),) = say(rounds, TensorOp.CHALLENGE, payload=handshake.challenge(secret, hello, b"m" * 16))
    assert parse(proof_head).op is TensorOp.PROOF
    assert proof == handshake.proof_of_client(secret, hello, b"m" * 16)
    assert secret not in hello + bytes(proof)


def test_whoever_does_not_know_the_secret_is_no_aggregator() -> None:
    rounds = ready()
    head, nonce = rounds.hello(b"s" * 16, b"n" * 16)
    with pytest.raises(TensorWireError, match="does not know the secret"):
        say(rounds, TensorOp.CHALLENGE, payload=handshake.challenge(b"x" * 16, head + bytes(nonce), b"m" * 16))
    with pytest.raises(TensorWireError, match="a challenge of 0 bytes"):
        say(rounds, TensorOp.CHALLENGE)
