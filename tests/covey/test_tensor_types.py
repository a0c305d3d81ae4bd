"""Tensors with other types than float32: their rounding, and that shared memory and aggregators add them alike."""

import struct
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey.core.ids import JobId
from covey.job.tensors import TensorClient, TensorError
from covey.tensors.aggregator.rounds import Rounds
from covey.tensors.numbers.arrays import checked
from covey.tensors.numbers.tensor_wire import (
    TYPES,
    Declared,
    TensorOp,
    TensorWireError,
    Type,
    frame,
    job_hash,
    key_of,
    parse,
)
from covey.tensors.numbers.types import NUMBERS
from covey.tensors.same_host import layout as tensor_layout
from covey.tensors.same_host.memory import TensorMemory
from tests.covey.test_host_rounds import gang
from tests.plugins.aggregator.harness import added
from tests.plugins.aggregator.loopback import AggdThread

EPOCH = 1 << 32
SHAPE = (70, 1001)
"""Shape of a tensor that is larger than a small one in shared memory, and than one piece of an addition."""
BFLOAT = NUMBERS["bfloat16"]
Clients = list[TensorClient]


def bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def value(bits32: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits32))[0])


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@example(value(0x3F808000))
@example(value(0x3F818000))
@example(value(0x7F7FFFFF))
@example(-0.0)
def test_bfloat16_is_rounded_to_the_nearest_and_to_even(number: float) -> None:
    (found,) = BFLOAT.narrow(np.array([number], np.float32)).tolist()
    below = bits(number) >> 16
    candidates = (below, below + 1)  # away from zero, whatever the sign
    if candidates[1] & 0x7FFF >= 0x7F80:
        assert found in candidates
        return
    far = {each: abs(Fraction(value(each << 16)) - Fraction(number)) for each in candidates}
    least = min(far.values())
    nearest = [each for each in candidates if far[each] == least]
    assert found == (nearest[0] if len(nearest) == 1 else next(each for each in nearest if each % 2 == 0))


def test_what_is_no_number_stays_none_and_infinities_stay() -> None:
    odd = np.array([np.nan, np.inf, -np.inf, value(0x7F800001), value(0xFF80FFFF)], np.float32)
    wide = BFLOAT.widen(BFLOAT.narrow(odd))
    assert np.isnan(wide).tolist() == [True, False, False, True, True]
    assert wide[1:3].tolist() == [np.inf, -np.inf]
    halves = NUMBERS["float16"].narrow(np.array([1e6, np.nan], np.float32))
    assert halves[0] == np.inf and np.isnan(halves[1])


@given(st.integers(0, 0xFFFF))
def test_every_bfloat16_is_itself_again(number: int) -> None:
    stored = np.array([number], np.uint16)
    again = BFLOAT.narrow(BFLOAT.widen(stored))
    assert again.tolist() == [number] or (number & 0x7F80 == 0x7F80 and number & 0x7F)


# ---- rounds ----------------------------------------------------------------------------------------------------------


def contribution(type: Type, rank: int, round: int) -> np.ndarray:
    """A rank's contribution to a round, with the type in which it is stored."""
    rng = np.random.default_rng([rank, round])
    wide = (rng.standard_normal(SHAPE) * 10.0 ** rng.integers(-3, 4, SHAPE)).astype(NUMBERS[type].wide)
    return np.ascontiguousarray(NUMBERS[type].narrow(wide))


def expected(type: Type, ranks: int, round: int, mean: bool) -> np.ndarray:
    numbers = NUMBERS[type]
    with np.errstate(over="ignore"):
        total = added([numbers.widen(contribution(type, rank, round)) for rank in range(ranks)], "tree")
        return numbers.narrow(total / numbers.wide.type(ranks) if mean else total)


@pytest.fixture(params=["shared memory", "an aggregator", "three owners"])
def clients(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], Clients]]:
    """A function that makes clients for so many ranks, for each way of a tensor."""
    made: Clients = []
    running: list[AggdThread] = []
    tables = 3 if request.param == "three owners" else 1

    def of(ranks: int) -> Clients:
        shared = request.param == "shared memory"
        descriptor = tensor_layout.make(ranks) if shared else -1
        for rank in range(ranks):
            client = TensorClient(
                JobId("j1"), rank, ranks, lambda epoch, why, table: None, undecided=shared, tables=tables
            )
            made.append(client)
            if shared:
                client.memory_is(TensorMemory(descriptor if rank == 0 else _again(descriptor), rank, ranks))
        for table in range(0 if shared else tables):
            (tmp_path / f"{table}").mkdir()
            running.append(AggdThread(tmp_path / f"{table}"))
            at = running[-1].serve(f"j1/{table}" if table else "j1", EPOCH + 1, ranks)
            for client in made:
                client.moved(type(at)(JobId("j1"), at.epoch, at.host, at.address, at.secret, table))
        return made

    yield of
    for client in made:
        client.close()
    for aggd in running:
        aggd.finish()


def _again(descriptor: int) -> int:
    import os

    return os.dup(descriptor)


def play(clients: Clients, script: Callable[[int, TensorClient], None]) -> None:
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            script(rank, clients[rank])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    if failed:
        raise failed[0]


def test_sums_and_means_of_every_type_have_the_bits_of_the_same_lines_in_numpy(
    clients: Callable[[int], Clients],
) -> None:
    found: dict[tuple[int, str, int], np.ndarray] = {}

    def script(rank: int, client: TensorClient) -> None:
        for round in range(2):
            for type in TYPES:
                for mean in (False, True):
                    array = contribution(type, rank, round)
                    name = f"{type} {mean}"
                    out = np.empty_like(array) if round else None
                    result = client.push_pull(name, array, out=out, mean=mean, type=type)
                    assert result is out or out is None
                    assert result.dtype == array.dtype
                    found[rank, name, round] = result.copy()

    play(clients(3), script)
    for (_, name, round), result in found.items():
        type, mean = name.split()
        assert type in TYPES
        assert result.tobytes() == expected(type, 3, round, mean == "True").tobytes(), name


def test_parameters_are_kept_in_their_type(clients: Callable[[int], Clients]) -> None:
    found: dict[tuple[int, str], np.ndarray] = {}

    def script(rank: int, client: TensorClient) -> None:
        for type in ("float64", "float16"):
            start = np.full(SHAPE, 0.5 + rank, type)
            assert np.all(client.model(type, start, mean=True) == 0.5)
            found[rank, type] = client.push_pull(type, contribution(type, rank, 0), mean=True)

    play(clients(2), script)
    for (_, type), result in found.items():
        numbers = NUMBERS[type]  # type: ignore[index]
        total = numbers.widen(contribution(type, 0, 0)) + numbers.widen(contribution(type, 1, 0))  # type: ignore[arg-type]
        start = numbers.widen(np.full(SHAPE, 0.5, type))
        right = numbers.narrow(start + total / numbers.wide.type(2))
        assert result.dtype == type and result.tobytes() == right.tobytes()


def test_ranks_that_mean_different_types_are_told(clients: Callable[[int], Clients]) -> None:
    told: list[str] = []

    def script(rank: int, client: TensorClient) -> None:
        try:
            client.push_pull("g", np.ones(SHAPE, np.float64 if rank else np.float32))
        except TensorError as error:
            told.append(str(error))
            ranks[1 - rank].close()

    ranks = clients(2)
    play(ranks, script)
    assert told and "float64" in told[0] and "float32" in told[0], told


def test_a_tensor_is_of_one_type_and_one_kind_of_result(clients: Callable[[int], Clients]) -> None:
    (client,) = clients(1)
    client.push_pull("g", np.ones(3, np.float32))
    with pytest.raises(ValueError, match="is the sum of float32, and here the sum of float64"):
        client.push_pull("g", np.ones(3))
    with pytest.raises(ValueError, match="is the sum of float32, and here the mean of float32"):
        client.push_pull("g", np.ones(3, np.float32), mean=True)
    assert client.push_pull("g", np.ones(3, np.float32)).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("array", "type"),
    [
        (np.ones(3, np.int64), None),
        (np.ones(3, np.uint16), None),
        (np.ones(3, np.complex64), None),
        (np.ones(3, np.float32), "bfloat16"),
        (np.ones(3, np.uint16), "float32"),
    ],
)
def test_what_covey_does_not_add_is_refused_by_name(array: np.ndarray, type: Type | None) -> None:
    with pytest.raises(
        TypeError, match=rf"tensor 'g' is {array.dtype}.*Covey adds float32, float64, float16, bfloat16"
    ):
        checked("g", array, type)


def test_bits_of_bfloat16_come_in_either_integer_and_go_back_in_it() -> None:
    for dtype in (np.uint16, np.int16):
        given = checked("g", np.array([0x3F80, 0x4000], dtype), "bfloat16")
        assert given.type == "bfloat16" and given.data.dtype == np.uint16 and given.dtype == dtype
    other_order = checked("g", np.array([1.0, 2.0], ">f4"))
    assert other_order.type == "float32" and other_order.data.tolist() == [1.0, 2.0]
    assert other_order.data.view(other_order.dtype).tolist() == [1.0, 2.0], "as a result is handed over"


# ---- frames ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 200_000])
def test_what_is_not_finite_is_added_counted_and_told_once(tmp_path: Path, size: int) -> None:
    with gang(tmp_path, 2) as job:
        job.share()

        def script(rank: int, client: TensorClient) -> None:
            for round in range(3):
                given = np.full(size, np.inf if round else 1, np.float32) * (1 - 2 * rank)
                given[1:] = 1
                assert np.isnan(client.push_pull("g", given)[0]) == bool(round)

        job.play(script)
        said = [each.getvalue() for each in job.said]
        finders = [client.not_finite for client in job.clients]
    assert finders == ([2, 2] if size == 100 else [2, 0]), "of a large tensor each rank adds its part"
    for found, words in zip(finders, said, strict=True):
        assert words.count("found NaN or infinity in the sum of tensor 'g' in round 2") == (1 if found else 0)


def test_frames_say_the_type_and_another_one_is_no_frame_of_the_tensor() -> None:
    rounds = Rounds(JobId("j1"), 0, 1)
    rounds.moved(EPOCH + 1)
    (opened,) = rounds.declare_as(Declared("g", "grad", (4,), type="float16"))
    assert parse(opened[0]).type == TYPES["float16"][0]
    (pushed,) = rounds.push("g", bytes(8))
    assert parse(pushed[0]).type == TYPES["float16"][0]
    key, where = key_of("g"), (job_hash(JobId("j1")), EPOCH + 1)
    head, _ = frame(TensorOp.RESULT, *where, key=key, round=1, payload=bytes(8), type=TYPES["bfloat16"][0])
    with pytest.raises(TensorWireError, match="is of type 4"):
        rounds.destination(parse(head))
    head, _ = frame(TensorOp.PING, *where, type=TYPES["float16"][0])
    with pytest.raises(TensorWireError, match="unknown type 3 of PING"):
        parse(head)
    head, _ = frame(TensorOp.PUSH, *where, type=9)
    with pytest.raises(TensorWireError, match="unknown type 9"):
        parse(head)
