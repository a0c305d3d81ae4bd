"""How a successor handles what others give: pieces that are late, lost, from lost ranks, different, or cut short."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.errors import CoveyError, StateLost
from covey.healing.healing import Healing
from covey.healing.held_state import OTHERS_BYTES_MAX, HeldState, contents_sum
from covey.healing.neighbours import HealedRank
from covey.healing.state_pieces import (
    ALL_AT_ONCE,
    ANSWER_S,
    AT_ONCE,
    PIECE_BYTES,
    About,
    Have,
    Item,
    PieceFetch,
    Stream,
    Which,
    array_of,
    bytes_of_state,
    contents_of,
    encode_have,
    have_decoder,
    piece_of,
    why_too_slow,
)
from covey.healing.taking_over import Recovered, TakingOver
from covey.tensors.aggregator.rounds import Tell, ToldByRank
from tests.families import examples
from tests.quiet import until_blocked

WITHIN_S = 10.0
State = dict[str, np.ndarray[Any, Any]]


def state(size: int = 300_000) -> State:
    drawn = np.random.default_rng(size)
    return {"w": drawn.standard_normal(size), "b": np.arange(7, dtype=np.int16).reshape(7, 1), "none": np.zeros((0, 3))}


class Given:
    """A successor, and ranks that answer it, each in its own thread, as they are told to."""

    def __init__(
        self,
        holds: Mapping[int, State],
        answers: Callable[[int, int], bool] = lambda rank, at: True,
        alike: tuple[int, ...] = (),
    ) -> None:
        """`answers`: whether a rank answers its question number `at` for a piece. `alike`: as in HealedRank."""
        self.held = {rank: HeldState(each, b"rounds") for rank, each in holds.items()}
        self.sums, self.moved = True, False
        self.answers, self.asked = answers, dict.fromkeys(holds, 0)
        self.own: dict[int, bytes] = {}
        self.others: dict[int, dict[int, bytes]] = {}
        self.healing = Healing(HealedRank(9, 10, 1, alike=alike), self, lambda: b"")
        self.found: Recovered | CoveyError | None = None
        self.told: list[Tell] = []

    def tell(self, said: Tell) -> None:
        self.told.append(said)
        if said.about in (About.NEED, About.FETCH):
            threading.Thread(target=self._answer, args=(said,), daemon=True).start()

    def _answer(self, said: Tell) -> None:
        if said.about is About.NEED:
            self._have(said.rank)
            return
        self.asked[said.rank] += 1
        held = self.held.get(said.rank)
        piece = None if held is None else held.piece(said.data)
        if piece is not None and self.answers(said.rank, self.asked[said.rank]):
            self.healing.told(ToldByRank(said.rank, About.PIECE, said.step, piece))

    def _have(self, rank: int) -> None:
        held = self.held.get(rank)
        if held is None:
            self.say(rank, Have(1, is_new=True))
            return
        if self.sums:
            held.make_sum()
        for have in held.haves(1, 5, 0, self.own, self.others):
            self.say(rank, have)

    def say(self, rank: int, have: Have) -> None:
        self.healing.told(ToldByRank(rank, About.HAVE, have.step, encode_have(have)))

    def lose(self, rank: int) -> None:
        """The rank is lost: its successor asks, too."""
        self.healing.told(ToldByRank(rank, About.NEED, 1, b""))

    def recover(self, known: State | None = None, has_own: bool = False, within_s: float = 60.0) -> threading.Thread:
        def run() -> None:
            try:
                self.found = self.healing.recover(lambda text: None, has_own, known, within_s=within_s)
            except CoveyError as error:
                self.found = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def recovered(self, thread: threading.Thread) -> Recovered:
        thread.join(WITHIN_S)
        assert isinstance(self.found, Recovered), self.found
        return self.found

    def failed(self, thread: threading.Thread) -> str:
        thread.join(WITHIN_S)
        assert isinstance(self.found, StateLost), self.found
        assert self.found.what and self.found.why and self.found.next
        return self.found.why


def test_a_late_piece_of_a_lost_rank_is_dropped_while_all_are_asked_again() -> None:
    """The thread that reads the connection ended with a KeyError, so the successor heard nothing any more."""
    taking = TakingOver(2, 3, 1, lambda: 0.0, lambda: False, lambda kept: None)
    steps = taking.state({}, 60.0, 60.0)
    next(steps)
    taking.have(0, Have(1, step=5, contents_bytes=8, contents_sum=b"x"))
    taking.have(1, Have(1, is_new=True))
    steps.send(None)
    taking.lost(0)
    pause = steps.send(None)
    assert [said.about for said in pause.says] == [About.NEED, About.NEED], "all are asked again"
    assert taking.came(0, b"a piece") == ()


def asking(*ranks: int) -> tuple[TakingOver, Any, list[Tell]]:
    """A successor that asks these ranks of 3 for what the state consists of; the pieces that it asks for."""
    taking = TakingOver(2, 3, 1, lambda: 0.0, lambda: False, lambda kept: None)
    steps = taking.state({}, 60.0, 60.0)
    next(steps)
    for rank in range(2):
        have = Have(1, step=5, contents_bytes=2 * PIECE_BYTES, contents_sum=b"x")
        taking.have(rank, have if rank in ranks else Have(1, is_new=True))
    return taking, steps, list(steps.send(None).says)


def test_who_gives_nothing_is_lost_although_its_successor_asks_as_another_rank() -> None:
    """A successor that carries two ranks asks as the first of them alone."""
    taking, steps, said = asking(0, 1)
    assert {each.rank for each in said} == {0, 1} and {each.about for each in said} == {About.FETCH}
    taking.gives_nothing(1)
    assert {each.rank for each in steps.send(None).says} == {0}, "the piece that rank 1 was asked for, too"
    taking.gives_nothing(0)
    assert {each.about for each in steps.send(None).says} == {About.NEED}, "all are asked anew"


def test_a_late_word_that_a_rank_gives_nothing_is_dropped_while_all_are_asked_again() -> None:
    taking, steps, _ = asking(0)
    taking.gives_nothing(0)
    steps.send(None)
    taking.have(0, Have(1, step=5, contents_bytes=8, contents_sum=b"x"))
    taking.gives_nothing(0)
    assert taking.survivors == [0], "it said since then that it has the state"


def test_who_was_lost_before_it_said_what_its_bytes_sum_to_is_not_awaited() -> None:
    given = Given({0: state(), 1: state()})
    given.sums = False
    given.held[0].make_sum()
    thread = given.recover()
    end_s = time.monotonic() + WITHIN_S
    while not any(said.rank == 1 and not said.data for said in given.told if said.about is About.FETCH):
        assert time.monotonic() < end_s, "who owes its checksum is not asked whether it still gives"
        time.sleep(0.001)
    given.healing.told(ToldByRank(1, About.NOTHING, 1, b""))
    assert given.recovered(thread).step == 5


def test_the_state_comes_from_several_at_once_into_the_arrays_of_the_script() -> None:
    here = {name: np.empty_like(array) for name, array in state().items()}
    given = Given(dict.fromkeys(range(3), state()))
    found = given.recovered(given.recover(here))
    assert all(found.arrays[name] is here[name] for name in here)
    assert all((found.arrays[name] == array).all() for name, array in state().items())
    assert found.rounds == b"rounds" and found.step == 5
    assert sum(count > 1 for count in given.asked.values()) == 3


def test_an_array_that_is_unlike_or_not_plain_is_made_anew() -> None:
    there = np.arange(12, dtype=np.float32).reshape(3, 4)
    item = Item("w", "<f4", (3, 4))
    frozen = np.zeros((3, 4), np.float32)
    frozen.flags.writeable = False
    for known in (None, np.zeros((4, 3), np.float32), np.zeros((3, 4)), np.zeros((4, 3), np.float32).T, frozen):
        made = array_of(item, known)
        assert made is not known and made.shape == (3, 4) and made.dtype == np.float32
        bytes_of_state(made)[:] = bytes_of_state(there)
        assert (made == there).all()
    assert array_of(item, there) is there


def test_a_survivor_that_is_lost_while_it_gives_leaves_the_rest_to_the_others() -> None:
    given = Given(dict.fromkeys(range(3), state(1_000_000)), lambda rank, at: rank != 1 or at < 3)
    thread = given.recover()
    end_s = time.monotonic() + WITHIN_S
    while given.asked[1] < 3:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    given.lose(1)
    found = given.recovered(thread)
    assert (found.arrays["w"] == state(1_000_000)["w"]).all()


def test_when_all_that_give_are_lost_the_successor_asks_anew_and_says_so() -> None:
    given = Given({0: state()}, lambda rank, at: at < 3)
    thread = given.recover()
    while given.asked[0] < 3:
        time.sleep(0.001)
    given.held.clear()
    given.lose(0)
    assert "all ranks of this job were lost" in given.failed(thread)


def test_survivors_that_hold_other_bits_are_named() -> None:
    other = state()
    other["w"][77] += 1
    given = Given({0: state(), 1: state(), 2: other})
    why = given.failed(given.recover())
    assert "what came is not what rank" in why and "the same on every rank differs" in why


def test_only_ranks_that_hold_the_same_part_of_the_state_give_it() -> None:
    """Rank 9 has the part of ranks 1 and 4; when these are lost too, nobody has it."""
    given = Given({rank: state(5 if rank in (1, 4) else 6) for rank in range(9)}, alike=(1, 4, 9))
    assert (given.recovered(given.recover()).arrays["w"] == state(5)["w"]).all()
    assert {rank for rank, asked in given.asked.items() if asked} <= {1, 4}
    lost = Given({rank: state() for rank in range(9) if rank not in (1, 4)}, alike=(1, 4, 9))
    why = "all ranks that hold the same part of the state (1, 4, 9) were lost, and with them what it had learnt"
    assert lost.failed(lost.recover()) == why


def test_a_successor_waits_for_the_checksum_of_whoever_gave() -> None:
    given = Given({0: state()})
    given.sums = False
    thread = given.recover()
    end_s = time.monotonic() + 10.0
    while given.asked[0] < 2:
        assert time.monotonic() < end_s, "it asked for nothing"
        time.sleep(0.001)
    until_blocked(thread, Healing.recover)
    given.sums = True
    given._have(0)
    assert given.recovered(thread).step == 5


def test_a_state_that_comes_too_slowly_ends_before_all_of_the_time_is_over() -> None:
    given, began_s = Given({0: state(4_000_000)}, lambda rank, at: at < 4), time.monotonic()
    why = given.failed(given.recover(within_s=5.0))
    assert "came in" in why and "5.0 s are allowed for all" in why
    assert time.monotonic() - began_s < 4.0


def test_when_a_state_is_too_slow() -> None:
    assert why_too_slow(0, 1000, 9.9, 100.0) == "", "too early"
    assert why_too_slow(100, 1000, 10.0, 100.0) == ""
    assert why_too_slow(60, 1000, 10.0, 100.0) == "", "it may become faster"
    assert why_too_slow(49, 1000, 10.0, 100.0)
    assert (
        why_too_slow(999, 1000, 100.0, 100.0)
        == "999 B of 1000 B came in 1 min 40 s, and 1 min 40 s are allowed for all"
    )


def test_a_mirror_that_is_missing_older_or_cut_short_is_said() -> None:
    for own, said in (
        ({}, "its own at step 5 was with rank 0 and 8, lost too"),
        ({4: b"[7]"}, "rank 0 and 8 kept what is its own at step 4, and the others are at step 5"),
        ({5: b"[7"}, "what is its own was kept in 2 bytes that cannot be read"),
        ({5: b"\xff"}, "what is its own was kept in 1 bytes that cannot be read"),
    ):
        given = Given({0: state(10)})
        given.own = own
        assert said in given.failed(given.recover(has_own=True))


def test_what_is_said_of_arrays_and_is_cut_short_is_not_taken() -> None:
    given = Given({})
    given.held = {0: HeldState(state(10), b"rounds")}
    given.asked[0] = 0
    have = given.held[0].haves(1, 5, 0, {}, {})[0]
    shorter = msgspec.structs.replace(have, contents_bytes=have.contents_bytes - 1)
    given._have = lambda rank: given.say(rank, shorter if rank == 0 else Have(1, is_new=True))  # type: ignore[method-assign]
    assert "did not come as it was said" in given.failed(given.recover())


@given(st.binary(max_size=200))
def test_whatever_is_said_of_arrays_is_contents_or_a_word_to_people(data: bytes) -> None:
    try:
        found = contents_of(data, 3)
    except StateLost as lost:
        assert "rank 3" in lost.why
        return
    for item in found.items[:3]:
        try:
            assert array_of(item, None).shape == item.shape
        except StateLost as lost:
            assert item.name in lost.why or repr(item.name) in lost.why


def test_what_is_kept_of_many_others_comes_in_several_frames() -> None:
    kept = {rank: {step: bytes([rank]) * 30_000 for step in (4, 5)} for rank in range(8)}
    held = HeldState(state(10), b"")
    frames = held.haves(1, 5, 0, {5: b"1"}, kept)
    assert len(frames) > 1 and all(len(encode_have(have)) < OTHERS_BYTES_MAX + 1000 for have in frames)
    given = Given({0: state(10)})
    given.own, given.others = {5: b"1"}, kept
    found = given.recovered(given.recover(has_own=True))
    assert found.own == 1
    assert {rank: given.healing.machine._kept[rank] for rank in kept} == kept


def test_an_answer_of_which_a_frame_is_missing_is_none() -> None:
    kept = {rank: {5: bytes(OTHERS_BYTES_MAX)} for rank in range(2)}
    given = Given({0: state(10)})
    first, second = given.held[0].haves(1, 5, 0, {}, kept)
    given._have = lambda rank: given.say(rank, first if rank == 0 else Have(1, is_new=True))  # type: ignore[method-assign]
    thread = given.recover()
    until_blocked(thread, Healing.recover)
    assert not given.asked[0]
    given.held[0].make_sum()
    given.say(0, second)
    given.say(0, given.held[0].haves(1, 5, 0, {}, {})[0])
    assert given.recovered(thread).step == 5


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_was_carried_elsewhere_gives_no_state_from_where_it_was(late: bool) -> None:
    """The process that answered is gone; who carries its rank now may be this process, and says nothing."""
    given = Given({0: state(10), 1: state(10)})
    given.sums = False
    given.held[0].make_sum()
    old = given.held[1].haves(1, 5, 0, {}, {})[0]
    says = iter([old])

    def answers(rank: int) -> None:
        if rank != 1 or not late:
            Given._have(given, rank)
        elif given.moved:
            given.say(1, next(says, Have(1, is_new=True)))

    given._have = answers  # type: ignore[method-assign]
    thread = given.recover()
    until_blocked(thread, Healing.recover)
    given.healing.carried_elsewhere({1: 2 << 16})
    given.moved = True
    assert given.recovered(thread).step == 5


# ---- pieces ----


def streams(sizes: list[int]) -> tuple[dict[int, Stream], list[bytearray]]:
    """A stream of bytes to give, and memory to receive them."""
    held = Stream([memoryview(np.random.default_rng(size).bytes(size)) for size in sizes])
    return {int(Which.STATE): held}, [bytearray(size) for size in sizes]


def views(of: Iterable[bytes | bytearray]) -> list[memoryview]:
    return [memoryview(each) for each in of]


@given(st.lists(st.integers(0, 3 * PIECE_BYTES), max_size=4), st.lists(st.integers(0, 9), min_size=1, unique=True))
@settings(max_examples=examples(50), deadline=None)
def test_all_pieces_come_whoever_answers(sizes: list[int], sources: list[int]) -> None:
    held, into = streams(sizes)
    fetch, now_s = PieceFetch(Which.STATE, Stream(views(into))), 0.0
    while fetch.left_bytes:
        for number, (asked, source) in enumerate(fetch.asks(sources, now_s)):
            assert source in sources
            piece = piece_of(held, asked)
            assert piece is not None
            if number % 3 or now_s > 10.0:  # some answers are lost
                fetch.came(source, piece, now_s)
                fetch.came(source, piece, now_s)
        now_s += 3.0
    assert b"".join(into) == b"".join(held[1].cut(0, len(held[1])))


@given(st.lists(st.integers(0, 50), max_size=9), st.integers(0, 450), st.integers(0, 450))
def test_a_stream_is_its_parts_one_after_the_other(sizes: list[int], first: int, end: int) -> None:
    parts = [bytes([at]) * size for at, size in enumerate(sizes)]
    whole = b"".join(parts)
    stream = Stream(views(parts))
    first, end = sorted((min(first, len(whole)), min(end, len(whole))))
    assert b"".join(stream.cut(first, end)) == whole[first:end] and len(stream) == len(whole)


def test_many_small_arrays_travel_in_few_pieces() -> None:
    held = HeldState({str(at): np.full(100, at, np.float32) for at in range(20_000)}, b"")
    into = [bytearray(400) for _ in range(20_000)]
    fetch, pieces = PieceFetch(Which.STATE, Stream(views(into))), 0
    while fetch.left_bytes:
        for asked, source in fetch.asks([1, 2], 0.0):
            piece = held.piece(asked)
            assert piece is not None
            fetch.came(source, piece, 0.0)
            pieces += 1
    assert pieces == -(-8_000_000 // PIECE_BYTES)
    assert all(np.frombuffer(each, np.float32)[99] == at for at, each in enumerate(into))


def test_what_is_on_its_way_is_bounded_however_many_give() -> None:
    fetch = PieceFetch(Which.STATE, Stream([memoryview(bytearray(100 * PIECE_BYTES))]))
    assert len(fetch.asks([1], 0.0)) == AT_ONCE
    assert len(fetch.asks(list(range(64)), 0.0)) == ALL_AT_ONCE - AT_ONCE
    assert not fetch.asks(list(range(64)), 0.0)


def test_who_does_not_answer_is_not_asked_again_before_it_says_something() -> None:
    held, into = streams([30 * PIECE_BYTES])
    fetch = PieceFetch(Which.STATE, Stream(views(into)))
    first = fetch.asks([1, 2], 0.0)
    answered = [asked for asked, rank in first if rank == 2]
    late = [asked for asked, rank in first if rank == 1]
    for asked in answered:
        fetch.came(2, piece_of(held, asked) or b"", 0.1)
    again = fetch.asks([1, 2], ANSWER_S + 0.1)
    assert {rank for _, rank in again} == {2} and set(late) == {asked for asked, _ in again}
    fetch.came(1, piece_of(held, late[0]) or b"", ANSWER_S + 0.2)
    assert 1 in {rank for _, rank in fetch.asks([1, 2], ANSWER_S + 0.2)}


def test_a_slow_link_is_given_time_for_its_answers() -> None:
    held, into = streams([30 * PIECE_BYTES])
    fetch = PieceFetch(Which.STATE, Stream(views(into)))
    asked = [piece for piece, _ in fetch.asks([1], 0.0)]
    fetch.came(1, piece_of(held, asked[0]) or b"", 1.9)
    more = [piece for piece, _ in fetch.asks([1], 1.9)]
    assert len(more) == 1
    later = [piece for piece, _ in fetch.asks([1], 1.9 + 4 * 1.8)]
    assert more[0] not in later and set(later) <= set(asked)


@given(st.binary(max_size=40))
def test_a_piece_that_nobody_asked_for_is_left_alone(data: bytes) -> None:
    into = bytearray(8)
    fetch = PieceFetch(Which.STATE, Stream([memoryview(into)]))
    fetch.asks([1], 0.0)
    fetch.came(1, data, 0.0)
    assert bytes(into) == bytes(8) or len(data) == 21
    assert piece_of({1: Stream([memoryview(b"12345678")])}, data) is None or len(data) == 13


@given(st.binary(max_size=100))
def test_an_answer_of_another_rank_is_one_or_none(data: bytes) -> None:
    try:
        have = have_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    assert have.parts >= 1 and contents_sum(b"") != have.contents_sum
