"""When an aggregator may hand a job over: the end of an iteration, as its rounds show it; and memory that is ready."""

import asyncio
import resource
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from covey.core.ids import JobId
from covey.ports.clock import Clock
from covey.ports.env import Env
from covey.tensors.numbers.tensor_wire import Payload
from covey.tensors.owner.memory import (
    ALIGNED,
    LATER_S,
    READY_BUFFER_BYTES,
    RESTS,
    RESTS_LATER,
    TOUCH_BYTES,
    Arena,
    Buffers,
    Memory,
    MemoryInAdvance,
    mapped,
    touched,
)
from covey.wire.sums import Serve
from plugins.aggregator.datapath.iteration_gaps import SHORT_S, IterationGaps
from plugins.aggregator.datapath.job_sums import Counters, JobSums, SharedByJobs
from plugins.aggregator.datapath.rounds_under_way import RoundsUnderWay
from tests.virtual_time import play

A, B, C = 1, 2, 3


def iterations(gaps: IterationGaps, count: int, pauses: dict[int, float]) -> float:
    now_s = 0.0
    for _ in range(count):
        for key, pause_s in pauses.items():
            gaps.began(now_s)
            now_s += 0.1
            gaps.quiet(key, now_s)
            now_s += pause_s
    return now_s


def test_an_iteration_ends_with_the_block_that_the_longest_pause_follows() -> None:
    gaps = IterationGaps()
    now_s = iterations(gaps, 3, {A: 0.01, B: 0.2, C: 1.0})
    assert gaps.longest_s == pytest.approx(1.0) and gaps.patience_s == pytest.approx(2.0)
    ends = []
    for key in (A, B, C):
        gaps.began(now_s)
        assert not gaps.is_end, "a round is under way"
        gaps.quiet(key, now_s)
        ends.append(gaps.is_end)
    assert ends == [False, False, True]


def test_of_a_job_that_just_began_any_pause_will_do() -> None:
    gaps = IterationGaps()
    assert not gaps.is_end and gaps.patience_s == SHORT_S
    gaps.began(0.0)
    gaps.quiet(A, 1.0)
    assert gaps.is_end


def test_a_job_that_changes_its_ways_is_followed() -> None:
    gaps = IterationGaps()
    iterations(gaps, 3, {A: 0.01, C: 1.0})
    iterations(gaps, 2, {A: 3.0, C: 0.1})
    gaps.quiet(C, 9.0)
    assert not gaps.is_end


class TrainingJob:
    """A job with rounds of A and B, and then a pause."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.rounds = RoundsUnderWay(cast(Clock, self))
        self.began_s = self.now_s()

    def now_s(self) -> float:
        return self.loop.time()

    async def round(self, key: int) -> None:
        self.rounds.follow(key, True)
        await asyncio.sleep(0.1)
        for _ in range(2):
            self.rounds.owe()
        self.rounds.follow(key, False)
        await asyncio.sleep(0.1)
        self.rounds.paid(key)
        await asyncio.sleep(0.05)  # one worker reads more slowly
        self.rounds.paid(key)

    async def train(self, iterations: int) -> None:
        for _ in range(iterations):
            await self.round(A)
            await asyncio.sleep(0.05)
            await self.round(B)
            await asyncio.sleep(0.45)


def test_a_round_has_waited_since_its_first_push() -> None:
    async def story() -> tuple[int, float] | None:
        rounds = TrainingJob().rounds
        for key in (A, A, B):
            rounds.follow(key, True)
            await asyncio.sleep(2.0)
        return rounds.longest()

    assert play(story()) == (A, 6.0)


def test_a_job_is_handed_over_at_the_end_of_an_iteration() -> None:
    async def story() -> tuple[str, float]:
        job = TrainingJob()
        training = asyncio.create_task(job.train(9))
        await asyncio.sleep(2.1)  # in the first round of the third iteration
        why = await job.rounds.until_between(0.2, 30.0)
        ended_s = job.now_s() - job.began_s
        await training
        return why, ended_s

    why, ended_s = play(story())
    assert why == "an iteration ended" and ended_s == pytest.approx(2.55, abs=0.01)


def test_it_goes_on_while_the_next_owner_gets_ready() -> None:
    async def story() -> float:
        job = TrainingJob()
        training = asyncio.create_task(job.train(9))
        await asyncio.sleep(2.1)
        await job.rounds.until_between(0.5, 30.0)
        ended_s = job.now_s() - job.began_s
        await training
        return ended_s

    assert play(story()) == pytest.approx(3.55, abs=0.01), "not at 2.55"


@pytest.mark.parametrize(("ready_s", "ends_s"), [(2.2, 2.55), (2.7, 3.55), (1.9, 2.55)])
def test_it_goes_on_until_the_next_owner_says_that_it_is_ready(ready_s: float, ends_s: float) -> None:
    """The owner waits at least for the time that ranks take to hear of the move."""

    async def story() -> float:
        job = TrainingJob()
        training = asyncio.create_task(job.train(9))
        asyncio.get_running_loop().call_later(ready_s, job.rounds.next_is_ready)
        await asyncio.sleep(2.1)
        await job.rounds.until_between(15.0, 30.0, 0.2)
        ended_s = job.now_s() - job.began_s
        await training
        return ended_s

    assert play(story()) == pytest.approx(ends_s, abs=0.01)


def test_ranks_hear_of_the_next_owner_first_however_soon_that_is_ready() -> None:
    async def story() -> float:
        job = TrainingJob()
        training = asyncio.create_task(job.train(9))
        job.rounds.next_is_ready()
        await asyncio.sleep(2.1)
        await job.rounds.until_between(15.0, 30.0, 0.5)
        ended_s = job.now_s() - job.began_s
        await training
        return ended_s

    assert play(story()) == pytest.approx(3.55, abs=0.01), "not at 2.55"


def test_a_job_that_pushes_nothing_is_not_waited_for() -> None:
    async def story() -> tuple[str, float]:
        job = TrainingJob()
        await job.train(3)
        await asyncio.sleep(60)
        began_s = job.now_s()
        return await job.rounds.until_between(0.2, 30.0), job.now_s() - began_s

    why, took_s = play(story())
    assert why == "nobody pushed" and took_s < 2.0


def test_a_worker_that_left_ends_it() -> None:
    async def story() -> tuple[str, str, str]:
        job = TrainingJob()
        job.rounds.follow(A, True)
        asyncio.get_running_loop().call_later(0.1, job.rounds.leave, 1)
        early = await job.rounds.until_between(5.0, 30.0)
        known = await job.rounds.until_between(5.0, 30.0)
        job.rounds.come(1)
        asyncio.get_running_loop().call_later(6.0, job.rounds.leave, 2)
        return early, known, await job.rounds.until_between(5.0, 30.0)

    assert play(story()) == ("a worker left",) * 3


def test_a_round_that_never_ends_is_not_waited_for_for_ever() -> None:
    async def story() -> tuple[str, float]:
        job = TrainingJob()
        job.rounds.follow(A, True)
        began_s = job.now_s()
        return await job.rounds.until_between(5.0, 30.0), job.now_s() - began_s

    why, took_s = play(story())
    assert why == "a round was always under way" and took_s == pytest.approx(35.0, abs=0.1)


def test_where_no_iteration_ends_any_moment_without_a_round_will_do() -> None:
    """The Block with the longest pause is not pushed any more."""

    async def story() -> tuple[str, float]:
        job = TrainingJob()
        await job.train(2)

        async def without_b() -> None:
            while True:
                await job.round(A)
                await asyncio.sleep(0.05)

        going = asyncio.create_task(without_b())
        began_s = job.now_s()
        found = await job.rounds.until_between(0.0, 30.0), job.now_s() - began_s
        going.cancel()
        return found

    why, took_s = play(story())
    assert why == "no round was under way" and 14.9 < took_s < 16.0


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_an_arena_gives_each_byte_once_and_the_rest_comes_from_elsewhere() -> None:
    arena = Arena(4096)
    assert sum(1 for _ in arena.touch()) == 1
    first, second = arena.take(100, np.dtype("<f4")), arena.take(400, np.dtype("<f8"))
    third, empty = arena.take(200, np.dtype("<f4")), Arena().take(3, np.dtype("<u2"))
    assert [len(each) for each in (first, second, third, empty)] == [100, 400, 200, 3]
    assert first.base is not None and second.base is first.base, "from the same memory"
    assert not np.shares_memory(first, second) and not np.shares_memory(second, third) and third.base is not first.base
    assert all(each.ctypes.data % ALIGNED == first.ctypes.data % ALIGNED for each in (first, second))


def test_memory_that_was_given_is_not_written_any_more() -> None:
    """Ranks come before all memory is ready: the numbers that they brought stay, also in the middle of a piece."""
    arena = Arena(5 * TOUCH_BYTES)
    arena.take(10, np.dtype("<f4"))
    pieces = arena.touch()
    next(pieces)
    held = arena.take(3 * TOUCH_BYTES // 8, np.dtype("<f8"))
    held[:] = 7
    assert len(list(pieces)) == 4 and np.all(held == 7)


def test_a_host_that_has_not_so_much_memory_gets_none_ready() -> None:
    arena = Arena(1 << 60)
    assert not list(arena.touch()) and len(arena.take(10, np.dtype("<f4"))) == 10


def test_an_arena_of_which_nothing_was_given_can_grow() -> None:
    """All of the arena is written then, the earlier part included."""
    arena = Arena(2 * TOUCH_BYTES)
    pieces = arena.touch()
    next(pieces)
    assert not arena.grow(TOUCH_BYTES) and not arena.grow(1 << 60)
    arena = Arena(2 * TOUCH_BYTES)
    pieces = arena.touch()
    next(pieces)
    assert arena.grow(4 * TOUCH_BYTES) and len(list(pieces)) == 4 and not list(arena.touch())
    first = arena.take(TOUCH_BYTES // 8, np.dtype("<f8"))
    last = arena.take(3 * TOUCH_BYTES // 8, np.dtype("<f8"))
    assert last.base is first.base and not arena.grow(8 * TOUCH_BYTES), "what was given stays where it is"


def test_large_memory_has_large_pages() -> None:
    """The test is skipped where the kernel has no large pages: 4 MB of small ones are a thousand faults."""
    offers = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not offers.exists() or "[never]" in offers.read_text():
        pytest.skip("this kernel has no large pages")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    mapped(32 << 20).fill(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < (32 << 20) // 4096 // 2


def test_memory_is_touched_a_piece_at_a_time() -> None:
    array = np.ones(700_000, np.float32)
    pieces = touched(array)
    next(pieces)
    assert not array[: 1 << 18].any() and array[1 << 18 :].all()
    assert len(list(pieces)) == 2 and not array.any()


def test_memory_in_advance_leaves_time_to_others_and_ends_with_its_job() -> None:
    async def story() -> tuple[float, int]:
        loop = asyncio.get_running_loop()
        written: list[float] = []

        def pieces() -> Iterator[None]:
            for _ in range(3):
                written.append(loop.time())
                yield

        def spawn(name: str, work: Coroutine[Any, Any, Any]) -> None:
            tasks.append(loop.create_task(work))

        tasks: list[asyncio.Task[Any]] = []
        clock = SimpleNamespace(cpu_s=lambda: 0.01 * len(written), now_s=loop.time)
        advance = MemoryInAdvance(cast(Env, SimpleNamespace(clock=clock, spawn=spawn)), "test")
        advance.add(pieces())
        advance.add(pieces())
        await asyncio.sleep(2.0)
        took_s = written[-1] - written[0]
        advance.add(pieces())
        await asyncio.sleep(0.01)
        advance.stop()
        await asyncio.gather(*tasks)
        assert len(tasks) == 2, "one at a time"
        return took_s, len(written)

    took_s, written = play(story())
    assert took_s == pytest.approx(5 * RESTS * 0.01) and written == 7


def test_memory_in_advance_that_takes_long_takes_more_of_a_core() -> None:
    """For a while ranks wait for the memory to be ready."""

    async def story() -> float:
        loop = asyncio.get_running_loop()
        written: list[float] = []

        def pieces() -> Iterator[None]:
            for _ in range(60):
                written.append(loop.time())
                yield

        tasks: list[asyncio.Task[Any]] = []
        clock = SimpleNamespace(cpu_s=lambda: 0.01 * len(written), now_s=loop.time)
        spawn: Any = lambda name, work: tasks.append(loop.create_task(work))  # noqa: E731
        MemoryInAdvance(cast(Env, SimpleNamespace(clock=clock, spawn=spawn)), "test").add(pieces())
        await asyncio.gather(*tasks)
        return written[-1] - written[0]

    slowly = -int(-LATER_S // (0.01 * RESTS))
    assert play(story()) == pytest.approx(0.01 * (slowly * RESTS + (59 - slowly) * RESTS_LATER), abs=0.2)


def test_buffers_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.tensors.owner.memory.BUFFERS_BYTES_MAX", 3 << 16)
    buffers = Buffers()
    given = [buffers.take(1 << 16) for _ in range(5)]
    others: list[Payload] = [buffers.take(100), bytes(1 << 16)]
    for each in (*given, *others):
        buffers.give(each)
    again = [buffers.take(1 << 16) for _ in range(4)]
    kept = [any(each is one for one in given) for each in again]
    assert kept == [True, True, True, False] and not any(again[3])
    buffers.give(again[0])
    buffers.clear()
    assert buffers.take(1 << 16) is not again[0]


def test_a_buffer_of_one_tensor_will_do_for_another() -> None:
    buffers = Buffers()
    first = buffers.take(500_000)
    assert isinstance(first, memoryview) and first.nbytes == 500_000
    whole = first.obj
    buffers.give(first)
    second = buffers.take(READY_BUFFER_BYTES)
    assert second is whole and len(second) == READY_BUFFER_BYTES
    buffers.give(second)
    assert memoryview(buffers.take(300_000)).obj is whole and len(buffers.take(300_000)) == 300_000


def test_buffers_are_made_ready_with_those_that_are_there_and_within_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("covey.tensors.owner.memory.BUFFERS_BYTES_MAX", 3 * READY_BUFFER_BYTES)
    buffers = Buffers()
    assert not list(buffers.ready(0))
    assert len(list(buffers.ready(2 * READY_BUFFER_BYTES))) == 2
    assert len(list(buffers.ready(1 << 40))) == 1
    taken = [buffers.take(READY_BUFFER_BYTES) for _ in range(3)]
    assert not list(buffers.ready(0)) and all(len(each) == READY_BUFFER_BYTES for each in taken)


def test_a_job_that_comes_has_memory_for_its_first_round() -> None:
    """There is memory for sums, for states with the moments that its owner before announces, and for pushes that may
    come before the last rank does; not more than there is."""

    async def story() -> None:
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[Any]] = []
        clock = SimpleNamespace(now_s=loop.time, cpu_s=lambda: 0.0)
        spawn: Any = lambda name, work: tasks.append(loop.create_task(work))  # noqa: E731
        env = cast(Env, SimpleNamespace(clock=clock, spawn=spawn))
        buffers = Buffers()
        shared = SharedByJobs(Memory(1 << 30), Counters(), buffers, cast(Any, None))
        job = JobSums(env, Serve(JobId("j1"), 1 << 32, 3, b"sixteen bytes !!", 4 << 20), shared)
        assert not job.is_ready
        job.expect(12 << 20)
        await asyncio.gather(*tasks)
        assert job.is_ready and not list(buffers.ready(2 * 4 << 20)), "of two ranks"
        first = job._arena.take(12 << 20, np.dtype(np.uint8))
        assert job._arena.take(12 << 20, np.dtype(np.uint8)).base is first.base
        small = SharedByJobs(Memory(1 << 20), Counters(), Buffers(), cast(Any, None))
        JobSums(env, Serve(JobId("j1"), 1 << 32, 3, b"sixteen bytes !!", 4 << 20), small).expect(12 << 20)
        await asyncio.gather(*tasks)
        assert not list(small.buffers.ready(1 << 20))
        assert len(list(small.buffers.ready(2 << 20))) == 2

    play(story())
