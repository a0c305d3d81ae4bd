"""The chunks of an array that come before they are touched, and those that go: decisions on traces of accesses."""

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plugins.memory.machine.arrays.events import (
    Answered,
    AskedFor,
    ChunkCame,
    ChunkNotCame,
    ChunkNotSaved,
    ChunkSaved,
    ChunkTouched,
    FetchChunk,
    GoOn,
    PagingAction,
    PagingEvent,
    Poison,
    PunchHole,
    PutInPlace,
    SendChunk,
    SyncVolume,
    Unprotect,
    Unstage,
    WaitedTooLong,
)
from plugins.memory.machine.arrays.paging import HERE, Chunk, Paging
from plugins.memory.policy.arrays import prefetch, residence

# ---- strides ---------------------------------------------------------------------------------------------------------


@given(strides=st.lists(st.integers(-3, 3), max_size=40))
def test_the_vote_finds_the_majority_exactly_where_there_is_one(strides: list[int]) -> None:
    found = prefetch.majority(strides)
    most = max(strides, key=strides.count, default=None)
    has_one = most is not None and 2 * strides.count(most) > len(strides)
    assert found == (most if has_one else None)


def test_a_new_trend_shows_in_the_newest_strides_before_it_has_half_of_all() -> None:
    assert prefetch.trend([1] * 24 + [5] * 8) == 5
    assert prefetch.trend([1] * 28 + [5] * 4) == 1


def test_a_trend_between_random_strides_is_kept_while_a_quarter_has_it() -> None:
    noise = [1000 + 7 * n for n in range(24)]
    mixed = [value for n in range(8) for value in (3, *noise[3 * n : 3 * n + 3])]
    assert prefetch.trend(mixed, 3) == 3
    assert prefetch.trend(mixed) is None
    assert prefetch.trend(noise + [3] * 2, 3) is None


def test_an_access_follows_the_stream_over_a_few_that_do_not() -> None:
    assert prefetch.follows(16, 2, [10, 12, 93, 14])
    assert not prefetch.follows(15, 2, [10, 12, 93, 14])
    assert not prefetch.follows(93, 2, [10, 12, 14])


def test_the_window_doubles_with_hits_and_halves_without() -> None:
    grown = 0
    sizes = []
    for _ in range(7):
        grown = prefetch.window(grown, hit=True)
        sizes.append(grown)
    assert sizes == [2, 4, 8, 16, 16, 16, 16]
    assert [prefetch.window(16, hit=False), prefetch.window(1, hit=False), prefetch.window(0, hit=False)] == [8, 1, 1]


def test_what_is_fetched_ahead_lies_inside_the_array() -> None:
    assert prefetch.ahead(5, 3, 4, 13) == [8, 11]
    assert prefetch.ahead(5, -3, 4, 13) == [2]


# ---- room ------------------------------------------------------------------------------------------------------------


def test_the_oldest_go_and_those_somebody_waits_for_do_not() -> None:
    assert residence.victims([4, 9, 2, 7], {9}, 2) == [4, 2]
    assert residence.victims([4, 9], {4, 9}, 2) == []


@given(budget=st.integers(residence.CHUNKS_MIN, 5000), taken=st.integers(-3, 40), leaving=st.integers(0, 30))
def test_room_is_made_before_there_is_none(budget: int, taken: int, leaving: int) -> None:
    """`taken` chunks of those that are kept free are taken; they are freed together, from a third of them on."""
    free = residence.kept_free(budget)
    assert 2 <= free <= budget // 4
    held = min(budget, budget - free + taken)
    leaving = min(leaving, held)
    count = residence.to_go(held, leaving, budget)
    left = held - leaving - count - (budget - free)
    assert left <= 0 or (count == 0 and 3 * left < free)
    assert count == 0 or left == 0


def test_a_stream_fetches_four_chunks_at_once_and_the_rest_at_the_end() -> None:
    whole = prefetch.WINDOW_MAX
    fetched = [absent for absent in range(whole + 1) if prefetch.fetches_on(absent, whole, whole)]
    assert fetched == list(range(4, whole + 1))
    assert prefetch.fetches_on(1, 5, whole)
    assert prefetch.fetches_on(1, whole // 2, whole // 2)


# ---- a machine on traces ---------------------------------------------------------------------------------------------


class Played:
    """A player of what the machine asks for: fetches and writes take `delay` accesses. It keeps the contents of the
    volume and of the array's memory as version numbers, so a lost write shows."""

    def __init__(self, chunks: int, budget: int, staging: int = 16, delay: int = 3) -> None:
        self.machine = Paging(chunks, budget, staging)
        self.delay, self.now = delay, 0
        self.volume, self.memory = dict.fromkeys(range(chunks), 0), dict[int, int]()
        self.staged: dict[int, int] = {}
        self.writable: set[int] = set()
        self.due: list[tuple[int, PagingEvent]] = []
        self.sent: dict[int, int] = {}
        self.answers: dict[int, str] = {}
        self.synced: list[int] = []
        self.poisoned: list[int] = []
        self.fails = False

    def tell(self, event: PagingEvent) -> None:
        for action in self.machine.handle(event):
            self.perform(action)
        self.machine.check()

    def perform(self, action: PagingAction) -> None:
        match action:
            case FetchChunk(chunk):
                came = ChunkNotCame(chunk, "gone") if self.fails else ChunkCame(chunk)
                self.staged[chunk] = self.volume[chunk]
                self.due.append((self.now + self.delay, came))
            case PutInPlace(chunk, writable):
                assert chunk not in self.memory
                self.memory[chunk] = self.staged.pop(chunk)
                if writable:
                    self.writable.add(chunk)
            case Unstage(chunk):
                del self.staged[chunk]
            case SendChunk(chunk):
                self.writable.discard(chunk)
                self.sent[chunk] = self.memory[chunk]
                saved = ChunkNotSaved(chunk, "full") if self.fails else ChunkSaved(chunk)
                self.due.append((self.now + self.delay, saved))
            case Unprotect(chunk):
                # Where nothing else can go, it is sent to the volume in the same turn: protected again, and waited for.
                assert self.machine.state(chunk) in (Chunk.DIRTY, Chunk.LEAVING)
                self.writable.add(chunk)
            case PunchHole(chunk):
                assert self.volume[chunk] == self.memory.pop(chunk), "what goes is at the volume"
                assert chunk not in self.writable
            case Answered(id, why):
                self.answers[id] = why
            case SyncVolume(id):
                self.synced.append(id)
            case Poison(chunk, _):
                self.poisoned.append(chunk)
            case GoOn():
                pass
            case _:
                raise AssertionError(action)

    def pass_time(self) -> None:
        self.now += 1
        while self.due and self.due[0][0] <= self.now:
            event = self.due.pop(0)[1]
            if isinstance(event, ChunkSaved):
                self.volume[event.chunk] = self.sent.pop(event.chunk)
            self.tell(event)

    def touch(self, chunk: int, write: bool = False) -> bool | None:
        """Whether the chunk had been fetched ahead; None when it was no fault."""
        self.pass_time()
        if chunk in self.memory and (not write or chunk in self.writable):
            return None
        hits = self.machine.counts.hits
        self.tell(ChunkTouched(chunk, write))
        hit = self.machine.counts.hits > hits
        for _ in range(1000):
            if chunk in self.memory and (not write or chunk in self.writable):
                return hit
            if chunk not in self.machine.waiting:  # protected again before the thread ran, which faults once more
                self.tell(ChunkTouched(chunk, write))
            self.pass_time()
        raise AssertionError(f"chunk {chunk} never came; it is {self.machine.state(chunk)!r}")

    def settle(self) -> None:
        while self.due:
            self.pass_time()


def a_stream(
    rng: random.Random, accesses: int, stride: int, random_share: float, chunks: int
) -> Iterable[tuple[int, bool]]:
    at = 0
    for _ in range(accesses):
        if rng.random() < random_share:
            yield rng.randrange(chunks), False
        else:
            yield at, True
            at = (at + stride) % chunks


@pytest.mark.parametrize("stride", [1, 3, -2])
@pytest.mark.parametrize("seed", range(4))
def test_a_stream_with_30_percent_random_accesses_hits_at_least_80_percent(stride: int, seed: int) -> None:
    """Only accesses of the stream count; the random ones cannot be foreseen. Most chunks fetched ahead are of use.
    Reference: Leap, ATC'20, section 3.2.
    """
    chunks = 2000
    played = Played(chunks, 128)
    accesses = list(a_stream(random.Random(seed), 1500, stride, 0.3, chunks))
    found = [(played.touch(chunk), of_stream) for chunk, of_stream in accesses]
    stream = [hit for hit, of_stream in found if of_stream]
    missed = stream.count(False)
    counts = played.machine.counts
    assert missed <= 0.2 * len(stream), f"{missed} of {len(stream)} missed: {counts}"
    assert counts.hits + counts.placed >= 0.8 * counts.ahead, counts


def test_a_stream_that_turns_is_found_again() -> None:
    played = Played(1000, 128)
    for chunk in [*range(200), *range(900, 500, -2)]:
        played.touch(chunk)
    tail = [played.touch(chunk) for chunk in range(500, 400, -2)]
    assert tail.count(False) <= 2


def test_random_accesses_fetch_next_to_nothing_ahead() -> None:
    played, rng = Played(4000, 128), random.Random(5)
    for _ in range(800):
        played.touch(rng.randrange(4000))
    assert played.machine.counts.ahead <= 8


def test_advice_sequential_fetches_ahead_at_once_and_random_never() -> None:
    played = Played(1000, 128)
    played.tell(AskedFor(1, "sequential", 0, 0))
    for chunk in (10, 11, 12):
        played.touch(chunk)
    assert played.machine.counts.ahead >= 2
    before = played.machine.counts.ahead
    played.tell(AskedFor(2, "random", 0, 0))
    for chunk in range(100, 150):
        played.touch(chunk)
    assert played.machine.counts.ahead == before


def test_a_stream_that_writes_is_put_in_place_writable_and_loses_nothing() -> None:
    played = Played(600, 64)
    faults = 0
    for chunk in range(600):
        faults += played.touch(chunk, write=True) is not None
        played.memory[chunk] += 1
    assert faults < 300, "most of them were in place before they were touched"
    played.tell(AskedFor(1, "flush", 0, 0))
    played.settle()
    assert played.synced == [1]
    assert set(played.volume.values()) == {1}


STEP = st.one_of(
    st.tuples(st.just("read"), st.integers(0, 39)),
    st.tuples(st.just("write"), st.integers(0, 39)),
    st.tuples(st.just("run"), st.integers(0, 30)),
    st.tuples(st.sampled_from(["pin", "unpin", "prefetch", "drop", "save", "flush"]), st.integers(0, 36)),
    st.tuples(st.sampled_from(["fail", "well"]), st.just(0)),
)


def test_a_chunk_written_again_after_a_failed_save_is_not_the_first_to_go() -> None:
    played = Played(40, 16, 4, 2)
    for chunk in (0, *range(29, 39)):
        played.touch(chunk, write=True)
    played.settle()
    played.fails = True
    played.tell(AskedFor(1, "save", 0, 0))
    played.settle()
    played.fails = False
    played.tell(AskedFor(2, "pin", 1, 5))
    played.touch(0, write=True)
    played.settle()
    assert played.machine.state(0) is Chunk.DIRTY


@example([("write", 0), ("run", 29), ("fail", 0), ("pin", 1), ("write", 0)], 2, 4)
@given(steps=st.lists(STEP, max_size=60), delay=st.integers(1, 6), staging=st.integers(4, 8))
def test_nothing_written_is_lost_whatever_is_asked_for(
    steps: Sequence[tuple[str, int]], delay: int, staging: int
) -> None:
    played = Played(40, 16, staging, delay)
    newest = dict.fromkeys(range(40), 0)

    def write(chunk: int) -> None:
        played.touch(chunk, write=True)
        newest[chunk] += 1
        played.memory[chunk] = newest[chunk]

    for number, (what, chunk) in enumerate(steps):
        if what == "read":
            played.touch(chunk)
            assert played.memory[chunk] == newest[chunk]
        elif what == "write":
            write(chunk)
        elif what == "run":
            for at in range(chunk, min(40, chunk + 10)):
                write(at)
        elif what == "fail":
            played.settle()
            played.fails = True
            played.tell(AskedFor(1000 + number, "save", 0, 0))
            played.pass_time()
            played.fails = False
            played.settle()
        elif what != "well":
            played.tell(AskedFor(number, what, chunk, chunk + 4))  # type: ignore[arg-type]
    played.settle()
    played.tell(AskedFor(9999, "save", 0, 0))
    for _ in range(20):
        played.settle()
        if "full" in played.answers.values() and played.machine.unsaved:
            played.tell(AskedFor(9999, "save", 0, 0))
    assert not played.machine.unsaved
    assert played.volume == newest
    assert 9999 in played.answers


def test_a_chunk_that_cannot_be_had_poisons_who_waits_and_nobody_else() -> None:
    played = Played(40, 16)
    played.touch(1)
    played.fails = True
    played.tell(ChunkTouched(7, False))
    played.settle()
    assert played.poisoned == [7]
    played.fails = False
    played.touch(8)
    played.tell(ChunkTouched(9, False))
    played.tell(WaitedTooLong(9, "nobody gives it"))
    assert played.poisoned == [7, 9]
    played.settle()
    assert played.machine.state(9) in (Chunk.STAGED, *HERE)


def test_pinned_chunks_stay_and_too_many_are_refused() -> None:
    played = Played(200, 32)
    played.tell(AskedFor(1, "pin", 0, 10))
    played.settle()
    assert played.answers[1] == ""
    for chunk in range(20, 180):
        played.touch(chunk, write=True)
    assert all(chunk in played.memory for chunk in range(10))
    played.tell(AskedFor(2, "pin", 50, 80))
    assert "more than the local budget" in played.answers[2]
    played.tell(AskedFor(3, "unpin", 0, 10))
    for chunk in range(20, 180):
        played.touch(chunk)
    assert not any(chunk in played.memory for chunk in range(10))


def test_a_pager_that_takes_over_sends_all_that_it_finds() -> None:
    machine = Paging(40, 16, 8, here=[3, 5])
    sent = [action for action in machine.handle(AskedFor(1, "save", 0, 0)) if isinstance(action, SendChunk)]
    assert [action.chunk for action in sent] == [3, 5]
    machine.check()


def test_a_chunk_that_is_written_to_while_it_leaves_stays_and_is_sent_again() -> None:
    played = Played(40, 16)
    played.touch(3, write=True)
    played.tell(AskedFor(1, "drop", 3, 4))
    assert played.machine.state(3) is Chunk.LEAVING
    played.tell(ChunkTouched(3, True))
    played.settle()
    assert played.machine.state(3) is Chunk.DIRTY
    assert 3 in played.memory and 3 in played.writable, "who waited may write"
