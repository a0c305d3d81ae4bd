"""An owner brings its Blocks to the next one, in every order, with deaths of either at every frame."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.tensors.numbers.tensor_wire import (
    OWNER,
    Declared,
    TensorOp,
    TensorWireError,
    frame,
    job_hash,
    key_of,
    pack_declared,
    parse,
)
from covey.tensors.numbers.updates import SGD
from covey.tensors.owner.speakers import Violation
from covey.tensors.owner.sums import StateTransfer, TensorSum
from plugins.aggregator.datapath.blocks.block_copies import COPIES_MAX, IncomingCopies, OutgoingCopies
from tests.families import examples
from tests.plugins.aggregator.harness import JOB, Bench, Owner, Tensor

MODEL = Tensor("w", "model", (7, 3))
MOVED = Tensor("m", "model", (5,), SGD(0.1, momentum=0.9), keeper=1)
GRAD = Tensor("g", "grad", (5,))
ALL = (MODEL, MOVED, GRAD)
KEY, HASH = key_of("w"), job_hash(JOB)
DECLARED = Declared("w", "model", (4,), 8)


def between_rounds(bench: Bench, round: int) -> None:
    """Run until every rank has its results of the round before, and has pushed nothing of this one."""

    def allowed(what: str, which: int) -> bool:
        return what != "script" or bench.worker(which).round < round

    while bench.step(allowed):
        pass
    assert all((worker.round, worker.at) == (round, 0) for worker in bench.workers)


@pytest.mark.parametrize("seed", range(6))
def test_a_model_that_is_handed_over_is_asked_of_no_rank(seed: int) -> None:
    bench = Bench(seed, 3, ALL, rounds=3)
    for round in (1, 2, 3):
        between_rounds(bench, round)
        bringing = bench.hand_over()
        bench.run(until=lambda bringing=bringing: bringing.over)  # type: ignore[misc]
        assert (bringing.out.copied, bringing.out.refused) == (2, 0), "sums of gradients are not brought"
        bench.run(until=lambda round=round: all(w.round > round for w in bench.workers))  # type: ignore[misc]
        assert bench.owner.asked == []
    bench.run()
    bench.check_results()


@given(
    seed=st.integers(0, 2**32),
    hosts=st.sampled_from([[1, 1, 1], [2, 1], [1], [2, 2]]),
    part_bytes=st.sampled_from([4, 16, 1 << 20]),
    moves=st.lists(
        st.tuples(st.integers(0, 250), st.sampled_from(["old", "new", "none"]), st.integers(0, 40)), max_size=4
    ),
)
@settings(max_examples=examples(25), deadline=None)
def test_whenever_it_is_handed_over_and_whoever_dies_the_bits_are_the_same(
    seed: int, hosts: list[int], part_bytes: int, moves: list[tuple[int, str, int]]
) -> None:
    """A handover may happen in the middle of rounds, where ranks hold another version than the one that is brought."""
    bench = Bench(seed, sum(hosts), ALL, rounds=3, part_bytes=part_bytes, hosts=hosts)
    for steps, dies, after in moves:
        for _ in range(steps):
            bench.step()
        bringing = bench.hand_over()
        for _ in range(after):
            bench.step()
        if dies == "old":
            bringing.end()
        elif dies == "new":
            bench.new_owner()
    bench.run()
    bench.check_results()


@pytest.mark.parametrize("dies", ["old", "new"])
def test_either_side_dies_after_each_frame_in_turn(dies: str) -> None:
    def dies_after(heard: int) -> int:
        bench = Bench(heard, 2, (MODEL, MOVED), rounds=2, part_bytes=16)
        between_rounds(bench, 2)
        bringing = bench.hand_over()
        bench.run(until=lambda: bringing.over or bringing.heard == heard)
        bringing.end() if dies == "old" else bench.new_owner()
        bench.run()
        bench.check_results()
        return bringing.heard

    heard = 0
    while dies_after(heard) == heard:
        heard += 1
    assert heard > 2 + 1 + 6 + 4, "OPEN of each, COPIES, and the parts of both"


class Next:
    """The next owner of one Block, which three ranks have opened at this version except for the ranks of `late`."""

    def __init__(self, version: int, late: tuple[int, ...] = ()) -> None:
        self.owner = Owner(1 << 32, 3)
        self.copies = self.owner.before = IncomingCopies(self.owner)
        tensor = self.owner.declare(KEY, DECLARED)
        assert isinstance(tensor, TensorSum)
        self.tensor = tensor
        self.asks = [self.tensor.open(rank, version, False) for rank in range(3) if rank not in late]

    def say(self, op: TensorOp, payload: bytes = b"", **of: Any) -> list[TensorOp]:
        """Give it this frame; return its answer."""
        head, _ = frame(op, HASH, 1 << 32, rank=OWNER, payload=payload, key=of.pop("key", KEY), **of)
        header = parse(head)
        into = self.copies.destination(header)
        into[:] = payload
        return [parse(said[0]).op for said in self.copies.heard(header, into)]

    def bring(self, version: int, parts: int = 2) -> None:
        self.say(TensorOp.OPEN, pack_declared(DECLARED), round=version)
        self.say(TensorOp.COPIES)
        for part in range(parts):
            self.say(TensorOp.STATE, bytes([7]) * 8, part=part, round=version)

    @property
    def state(self) -> bytes:
        return self.tensor.lend()[1].tobytes()


def test_pushes_are_held_until_the_last_part_is_there_and_are_added_then() -> None:
    next = Next(5)
    next.bring(5, parts=1)
    assert next.asks == [(), (), ()] and next.tensor.push(0, 6, 0, bytes(8)) == ()
    with pytest.raises(TensorWireError, match="version 4 of a Block that was not said to come"):
        next.say(TensorOp.STATE, bytes(8), part=1, round=4)
    assert next.tensor.version is None and not next.tensor.busy
    assert next.say(TensorOp.STATE, bytes([7]) * 8, part=1, round=5) == [TensorOp.COPIED]
    assert next.tensor.version == 5 and next.state == bytes([7]) * 16 and next.owner.asked == []


def test_a_whole_copy_waits_for_the_word_of_every_rank() -> None:
    """The missing rank might hold a newer version."""
    for newest, asked in ((5, []), (6, [StateTransfer("ask", 1)])):
        next = Next(5, late=(1,))
        next.bring(5)
        next.copies.ended()
        asks = next.tensor.open(1, newest, False)
        assert [*asks] == asked and (next.tensor.version == 5) is (not asked)


@pytest.mark.parametrize("brought", [4, 6])
def test_a_version_that_no_rank_holds_is_forgotten_wherever_it_is(brought: int) -> None:
    """A part of that version that is on its way does not overwrite what a rank brings."""
    next = Next(5, late=(1,))
    next.say(TensorOp.OPEN, pack_declared(DECLARED), round=brought)
    next.say(TensorOp.COPIES)
    head, _ = frame(TensorOp.STATE, HASH, 1 << 32, rank=OWNER, key=KEY, part=0, round=brought, payload=bytes(8))
    being_read = next.copies.destination(parse(head))
    ((_, holder),) = next.tensor.open(1, 5, False)
    for part in (0, 1):
        next.tensor.state_part(holder, 5, part, bytes([3]) * 8)
    being_read[:] = bytes([9]) * 8
    next.copies.heard(parse(head), being_read)
    next.say(TensorOp.STATE, bytes([9]) * 8, part=1, round=brought)
    assert next.tensor.version == 5 and next.state == bytes([3]) * 16


def test_one_that_asks_hears_whether_there_is_memory_for_so_much() -> None:
    next = Next(5)
    for ready in (False, True):
        next.owner.is_ready = ready
        head, _ = frame(TensorOp.PING, HASH, 1 << 32, rank=OWNER, round=7)
        (said,) = next.copies.heard(parse(head), b"")
        answer = parse(said[0])
        assert (answer.op, answer.round, answer.rank) == (TensorOp.PONG, int(ready), OWNER)
    assert next.owner.expects == 7 << 20


def test_what_was_not_said_to_come_is_asked_of_ranks_at_once() -> None:
    next = Next(5)
    assert next.owner.asked == []
    next.say(TensorOp.COPIES)
    assert next.owner.asked == [] and next.tensor.copy is None and next.tensor._holder is not None


def test_an_owner_that_ends_in_the_middle_leaves_everything_to_ranks() -> None:
    next = Next(5)
    next.bring(5, parts=1)
    assert next.tensor._holder is None
    next.copies.ended()
    assert next.tensor._holder is not None and next.copies.awaited == 1


def test_four_blocks_are_on_their_way_at_most() -> None:
    tensors = {}
    for number in range(10):
        tensor = tensors[number] = TensorSum(Declared(f"w{number}", "model", (2,), 8), 1)
        tensor.open(0, 0, True)
        tensor.state_part(0, 0, 0, bytes(8))
    out = OutgoingCopies(HASH, 1 << 32, tensors)
    with pytest.raises(TensorWireError, match="unexpected COPIED"):
        out.heard(parse(frame(TensorOp.COPIED, HASH, 1 << 32, rank=OWNER, key=9)[0]))
    on_way: list[int] = []
    chance = random.Random(1)
    while not out.is_over:
        while (state := out.next()) is not None:
            on_way += [parse(head).key for head, _ in state]
        assert len(on_way) == min(COPIES_MAX, 10 - out.copied)
        done = on_way.pop(chance.randrange(len(on_way)))
        out.heard(parse(frame(TensorOp.COPIED, HASH, 1 << 32, rank=OWNER, key=done)[0]))
    assert (out.copied, out.sent_bytes) == (10, 80)
    with pytest.raises(TensorWireError):
        out.heard(parse(frame(TensorOp.COPIED, HASH, 1 << 32, rank=OWNER, key=done)[0]))


WORDS = st.sampled_from([TensorOp.OPEN, TensorOp.COPIES, TensorOp.STATE, TensorOp.STATE, TensorOp.PING, TensorOp.PUSH])
DECLARATIONS = [pack_declared(DECLARED), pack_declared(Declared("w", "model", (5,), 8)), b"\xc1"]


@given(
    said=st.lists(
        st.tuples(WORDS, st.integers(0, 1), st.integers(0, 2), st.integers(4, 6), st.integers(0, 2)), max_size=14
    ),
    late=st.sampled_from([(), (1,), (0, 1, 2)]),
)
@settings(max_examples=examples(100), deadline=None)
def test_whatever_an_owner_says_a_sum_stays_sound(
    said: list[tuple[TensorOp, int, int, int, int]], late: tuple[int, ...]
) -> None:
    """The frames come in any order, of any part and version: they are refused, or of no effect, or the state of a
    version."""
    next = Next(5, late)
    for op, key, part, version, which in said:
        payload = {TensorOp.OPEN: DECLARATIONS[which], TensorOp.STATE: bytes([version]) * 8}.get(op, b"")
        try:
            next.say(op, payload, key=KEY + key, part=part, round=version)
        except (TensorWireError, Violation):
            break
    next.copies.ended()
    next.tensor.check()
    assert next.tensor.copy is None or next.tensor.copy.is_whole
    for rank in late:
        next.tensor.open(rank, 5, False)
    if next.tensor.version is not None:
        assert (next.tensor.version, next.state) == (5, bytes([5]) * 16)
    else:
        assert next.tensor._holder is not None
