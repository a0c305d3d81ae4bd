"""Lanes: processes that add for `aggd`, in the memory where the numbers lie, to the same bits; they may die at any
time."""

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.ports.clock import RealClock
from agent.ports.memory.pages import MemfdPages
from agent.ports.processors import cores_now
from covey.core.ids import HostId, JobId
from covey.tensors.numbers.tensor_wire import TYPES, Declared, Type
from covey.tensors.owner.memory import Arena, Buffers, Memory
from covey.tensors.owner.part_additions import LastAddition
from covey.tensors.owner.sums import TensorSum
from covey.wire.splicing import LEAST_BYTES
from covey.wire.sums import Serve
from plugins.aggregator.datapath.job_sums import Counters, JobSums, SharedByJobs
from plugins.aggregator.datapath.lanes.addition_queue import AdditionQueue
from plugins.aggregator.datapath.lanes.lane import Lane
from plugins.aggregator.datapath.lanes.lanes import DEPTH, LaneLink, Lanes
from plugins.aggregator.datapath.lanes.memory import LaneMemory
from plugins.aggregator.datapath.lanes.wire import LaneDone, LaneMaps, LaneMemoryAt, LaneOrder
from plugins.aggregator.machine.cycle_ledger import CycleLedger
from plugins.aggregator.machine.owner import Owner
from plugins.aggregator.machine.process_words import ProcessUp
from plugins.aggregator.machine.served_job import ServedJob
from plugins.aggregator.messages import AggregatorSettings, Demand
from plugins.aggregator.policy import load_now
from plugins.aggregator.policy.lanes import lanes_of
from tests.covey.test_host_rounds import Gang, check, gang
from tests.plugins.aggregator.harness import Tensor
from tests.plugins.aggregator.loopback import SECRET, AggdThread, Quiet
from tests.plugins.aggregator.test_optimizers import UPDATES

JOB, OTHER = JOBS = (JobId("j1"), JobId("j2"))
LARGE = (Tensor("w", "model", (150_001,), UPDATES[4]), Tensor("g", "grad", (150_000,)), Tensor("b", "grad", (7,)))


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Free the memory of a test before others count descriptors."""
    yield
    gc.collect()


def lanes(job: Gang) -> list[Lanes]:
    return [owner.aggd.lanes for owner in job.owners if owner.aggd.lanes is not None]


def until(is_so: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def children(running: AggdThread) -> list[int]:
    """The processes of its lanes."""
    return [
        pid for pid, child in cast(Any, running.aggd.env.processes)._children.items() if child._popen.poll() is None
    ]


def test_lanes_add_to_the_bits_of_one_process_and_end_with_it(tmp_path: Path) -> None:
    with gang(tmp_path, 1, 1, 1, tables=1, lanes=2) as job:
        job.serve()
        (here,) = lanes(job)
        until(lambda: here.up == 2)
        started = [child._popen for child in cast(Any, job.owners[0].aggd.env.processes)._children.values()]
        job.share()
        job.play(check(LARGE, 3, 40))
        assert here.cpu_s > 0, "lanes added"  # all of it one, where it is quick
        busy_us = job.jobs()[0].busy_us
        assert busy_us >= 1e6 * here.cpu_s * 0.9, "what lanes do is the job's work"
        assert job.owners[0].now().lanes == 2 and job.owners[0].now().lanes_s == here.cpu_s
    until(lambda: all(each.poll() is not None for each in started))


def test_a_lane_that_dies_loses_nothing_and_another_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that it was adding are pushed again, as after an addition that failed."""
    monkeypatch.setattr(AggdThread, "finish", AggdThread.kill)  # it may log an error, as it should
    with gang(tmp_path, 1, 1, tables=1, lanes=2) as job:
        job.serve()
        (here,) = lanes(job)
        until(lambda: here.up == 2)
        job.share()
        threads = job.start(check(LARGE, 2, 60))
        for _ in range(3):
            time.sleep(0.1)
            until(lambda: children(job.owners[0]))
            os.kill(children(job.owners[0])[0], signal.SIGKILL)
        job.end(threads, 60)
        until(lambda: here.up == 2)


def test_an_addition_that_a_lane_took_with_it_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane stands still with orders under way, and is killed then."""
    monkeypatch.setattr(AggdThread, "finish", AggdThread.kill)
    with gang(tmp_path, 1, 1, tables=1, lanes=1 + 1) as job:
        (owner,) = job.serve()
        (here,) = lanes(job)
        until(lambda: here.up == 2)
        stopped = children(owner)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        job.share()
        threads = job.start(check(LARGE[:1], 2, 3))
        until(lambda: any(link.under_way for link in here._links))
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
        job.end(threads, 60)
        assert any("addition failed" in each for each in owner.log.errors)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_memory_is_there_as_long_as_an_array_of_it_is_and_no_longer() -> None:
    memory = LaneMemory(MemfdPages())
    arena = Arena(4 * LEAST_BYTES, memory.mapped)
    first = arena.take(LEAST_BYTES // 4, np.dtype("<f4"))
    view = memoryview(first.view("u1").data)[64:128]
    place = memory.place(view)
    assert place == (1, 64, 128) and memory.place(np.empty(5)) is None
    behind = np.lib.stride_tricks.as_strided(first.view("u1"), (8 * LEAST_BYTES,))
    assert memory.place(behind) is None
    del behind
    del arena, first
    gc.collect()
    assert memory.place(view) == place, "a rank is still being sent it"
    del view
    gc.collect()
    assert not memory.by_number and not memory._addresses
    again = memory.mapped(LEAST_BYTES)
    assert memory.place(again) == (2, 0, LEAST_BYTES), "no number is used twice: a lane may have the old one mapped"


@pytest.mark.long
def test_large_buffers_are_where_lanes_see_them_and_used_again() -> None:
    memory = LaneMemory(MemfdPages())
    buffers = Buffers(memory.mapped)
    small, large, other = buffers.take(100), buffers.take(LEAST_BYTES), buffers.take(LEAST_BYTES + 1)
    assert memory.place(small) is None and memory.place(large) is not None
    assert memory.place(large) != memory.place(other)
    memoryview(large)[:] = b"\1" * LEAST_BYTES
    buffers.give(large)
    assert buffers.take(LEAST_BYTES) is large
    del small, large, other
    buffers.clear()
    gc.collect()
    assert not memory.by_number


def ports() -> Any:
    return SimpleNamespace(pages=MemfdPages(), clock=RealClock(), log=Quiet())


# ---- who adds --------------------------------------------------------------------------------------------------------


class PlayedLink:
    """A lane that does its orders when the test says so, with mappings of its own."""

    def __init__(self, lanes: Lanes) -> None:
        self.lane = object.__new__(Lane)
        self.lane._env, self.lane._memory, self.lane._cpu_s = lanes.env, {}, 0.0
        self.link = object.__new__(LaneLink)
        self.link._lanes, self.link.under_way, self.link.knows = lanes, {}, set()
        self.link.say = self.said  # type: ignore[method-assign]
        self.lane.say = lambda message: self.answers.append(cast(LaneDone, message))  # type: ignore[method-assign]
        self.orders: list[LaneOrder | LaneMaps] = []
        self.answers: list[LaneDone] = []
        lanes._links.append(self.link)

    def said(self, message: Any) -> None:
        self.orders.append(message)

    def work(self) -> None:
        """Do the orders that it has, in turn."""
        orders, self.orders = self.orders, []
        for order in orders:
            self.lane.heard(order)
        answers, self.answers = self.answers, []
        for answer in answers:
            self.link.heard(answer)


@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(1, 6),
    type=st.sampled_from(tuple(TYPES)),
    mean=st.booleans(),
    count=st.integers(1, 3),
)
def test_lanes_in_any_order_of_work_give_the_bits_of_one(
    seed: int, ranks: int, type: Type, mean: bool, count: int
) -> None:
    """The parts of a tensor, and sums within a part, are at several lanes at once; any of them may end first."""
    env = ports()
    here = Lanes(env, count)
    played = [PlayedLink(here) for _ in range(count)]
    size = TYPES[type][1]
    declared = Declared("g", "grad", (2 * LEAST_BYTES // size + 16,), LEAST_BYTES, "tree", type=type, mean=mean)
    buffers = Buffers(here.memory.mapped)
    ours = TensorSum(declared, ranks, buffers.give, Arena(0, here.memory.mapped), buffers.take)
    alone = TensorSum(declared, ranks)
    rng = np.random.default_rng(seed)
    for rank in range(ranks):
        for tensor in (ours, alone):
            tensor.open(rank, 0, False)
    pushes = [(rank, part) for rank in range(ranks) for part in range(declared.parts)]
    rng.shuffle(pushes)
    handed = 0

    def deal() -> int:
        taken = 0
        while ours.busy:
            addition = ours.begin()
            if here.take(addition, lambda done, addition=addition: ended.append((addition, done))):  # type: ignore[misc]
                taken += 1
            else:
                ours.end(addition, addition.run())
            ours.check()
        return taken

    ended: list[Any] = []
    for rank, part in pushes:
        start, end = declared.span(part)
        bits = rng.integers(0, 256, end - start, np.uint8)
        bits[size - 1 :: size] &= 0x3F  # finite
        into = buffers.take(end - start)
        memoryview(into)[:] = bits.data
        ours.push(rank, 1, part, into)
        alone.push(rank, 1, part, bits.tobytes())
        handed += deal()
        if rng.random() < 0.5:
            played[int(rng.integers(count))].work()
        for addition, done in ended:
            assert not done.why
            ours.end(addition, done.not_finite)
        ended.clear()
        handed += deal()
    for _ in range(20):
        for each in played:
            each.work()
        for addition, done in ended:
            assert not done.why
            ours.end(addition, done.not_finite)
        ended.clear()
        handed += deal()
    while alone.busy:
        alone.work()
    assert ours.version == alone.version == 1
    assert ours.lend()[1].tobytes() == alone.lend()[1].tobytes()
    assert handed > 0 or declared.size_bytes < LEAST_BYTES


PLACES = st.tuples(st.integers(0, 2), st.integers(-10, 1 << 17), st.integers(-10, 1 << 40))


@given(
    order=st.builds(
        LaneOrder,
        st.integers(),
        st.sampled_from(tuple(TYPES)),
        st.lists(st.booleans(), max_size=3).map(tuple),
        st.lists(PLACES, max_size=3).map(tuple),
        st.none() | PLACES,
        st.none() | st.builds(LastAddition, st.integers(0, 3), st.booleans(), st.none() | st.sampled_from(UPDATES)),
        st.lists(PLACES, max_size=3).map(tuple),
        st.lists(PLACES, max_size=3).map(tuple),
    )
)
def test_whatever_a_lane_is_told_it_answers(order: LaneOrder) -> None:
    """A lane keeps running after a wrong order: it answers that the order failed, in words."""
    memory = LaneMemory(MemfdPages())
    held = memory.mapped(LEAST_BYTES)
    played = PlayedLink(Lanes(ports(), 1))
    played.lane.heard(LaneMaps([memory.by_number[1], LaneMemoryAt(2, "1:1:1", 5)]))
    played.lane.heard(order)
    (answer,) = played.answers
    assert answer.number == order.number and len(held) == LEAST_BYTES


class Room:
    """Lanes with room for `room` additions."""

    def __init__(self, up: int, room: int) -> None:
        self.up, self.room, self.given = up, room, list[str]()

    @property
    def has_room(self) -> bool:
        return len(self.given) < self.room


def test_lanes_get_what_is_due_first_as_they_have_room() -> None:
    from tests.plugins.aggregator.test_urgency import Adds

    done: list[str] = []
    room = Room(2, 0)
    additions = AdditionQueue(cast(Any, None), cast(Any, room))
    late, early = Adds("late", 9.0, done), Adds("early", 5.0, done)
    additions.put(late, 0, late.tensors[0])
    additions.put(early, 1, early.tensors[1])
    assert not done, "nobody has room, and this process does not add what is theirs"
    room.room = 4
    additions.deal()
    assert room.given == ["early1"] * 3 + ["late0"]
    room.room = 99
    additions.deal()
    assert done == ["early1"] * 3 + ["late0"] * 3


def test_while_no_lane_is_up_this_process_adds() -> None:
    from tests.plugins.aggregator.test_urgency import Adds, queue
    from tests.virtual_time import play

    done: list[str] = []

    async def story() -> None:
        import asyncio

        here, additions = Lanes(ports(), 1), queue()
        additions._lanes, here.freed = here, additions.deal
        lane = PlayedLink(here)
        for number in range(DEPTH):  # it has as much to do as it may
            lane.link.under_way[number] = cast(Any, (None, lambda done: None))
        job = Adds("a", 1.0, done)
        additions.put(job, 0, job.tensors[0])
        await asyncio.sleep(1.0)
        assert not done, "it is the lane's as long as that lives"
        here.lost(lane.link)
        additions.put(job, 1, job.tensors[1])
        await asyncio.sleep(1.0)

    play(story())
    assert sorted(done) == ["a0"] * 3 + ["a1"] * 3


def test_what_a_lane_makes_of_a_tensor_that_began_anew_is_given_to_nobody() -> None:
    env, given = ports(), list[int]()
    env.spawn = lambda name, work: work.close()
    here = Lanes(env, 1)
    played, source = PlayedLink(here), here.memory.mapped
    shared = SharedByJobs(Memory(1 << 30), Counters(), Buffers(source), AdditionQueue(env, here), source)
    job = JobSums(env, Serve(JOB, 1 << 32, 2, SECRET), shared)
    link = SimpleNamespace(rank=0, give=lambda key, tensor: given.append(key), close=lambda: None)
    job.join(cast(Any, link))
    made = job.declare(7, Declared("g", "grad", (LEAST_BYTES // 4,), LEAST_BYTES))
    assert isinstance(made, TensorSum)
    for rank in range(2):
        made.open(rank, 0, False)
    for rank in range(2):
        data = job.buffers.take(LEAST_BYTES)
        memoryview(data)[:] = bytes(LEAST_BYTES)
        made.push(rank, 1, 0, data)
    job.hand_part(7, here)
    assert len(played.orders) == 2, "what it has to map, and the addition"
    job.broken(7, RuntimeError("another part of it failed"))
    played.work()
    assert not given and job.rounds == 0 and job.tensors[7] is not made


def test_a_lane_that_cannot_is_sent_away() -> None:
    """A lane that cannot map memory would fail again and again, and its job would stand."""
    here = Lanes(ports(), 1)
    played = PlayedLink(here)
    closed: list[int] = []
    played.link._stream = cast(Any, SimpleNamespace(close=lambda: closed.append(1)))
    said: list[str] = []
    for number, why in ((1, ""), (2, "KeyError(1)")):
        played.link.under_way[number] = cast(Any, (None, lambda done: said.append(done.why)))
        played.link.heard(LaneDone(number, why=why))
        assert closed == [1] * bool(why)
    assert said == ["", "KeyError(1)"]


def test_a_lane_has_two_orders_at_most() -> None:
    env = ports()
    here = Lanes(env, 1)
    one = PlayedLink(here)
    buffers = Buffers(here.memory.mapped)
    tensor = TensorSum(
        Declared("g", "grad", (LEAST_BYTES,), LEAST_BYTES), 1, buffers.give, Arena(0, here.memory.mapped)
    )
    tensor.open(0, 0, False)
    for part in range(4):
        tensor.push(0, 1, part, buffers.take(LEAST_BYTES))
    taken = [here.take(tensor.begin(), lambda done: None) for _ in range(4)]
    assert taken == [True] * DEPTH + [False] * (4 - DEPTH) and not here.has_room
    lost: list[str] = []
    for number, (addition, _) in one.link.under_way.items():
        one.link.under_way[number] = addition, lambda done: lost.append(done.why)
    here.lost(one.link)
    assert len(lost) == DEPTH and all(lost) and not here.up


# ---- what is promised -----------------------------------------------------------------------------------------------


def test_a_cycle_has_as_much_work_as_the_process_has_lanes() -> None:
    """The rule is AutoPS 4.3.3.2 with lanes * C in the place of C; three quarters of it where several jobs meet."""
    for lanes in (1, 2, 4):
        ledger = CycleLedger(lanes=lanes)
        assert not ledger.take(JOB, Demand(100_000, 100_000 * lanes))
        assert ledger.refusal(JOB, Demand(100_000, 100_000 * lanes + 1))
        assert ledger.load(JOB) == pytest.approx(1.0)
        ledger.leave(JOB)
        assert not ledger.take(JOB, Demand(100_000, 50_000 * lanes))
        assert not ledger.refusal(OTHER, Demand(100_000, 25_000 * lanes))
        assert ledger.refusal(OTHER, Demand(100_000, 25_000 * lanes + 1))
        ledger.check()


def test_what_its_process_has_is_promised_and_not_what_the_settings_say() -> None:
    """A process that was started before goes on with the lanes that it has."""
    held = [ServedJob(job, 1 << 32, 2, b"sixteen bytes !!", HostId("h1"), Demand(100_000, 70_000), 1) for job in JOBS]
    owner = Owner(AggregatorSettings(), held, HostId("h1"), 2)
    assert owner.promised().lanes == 2 and [one.job for one in owner.promised().jobs] == [JOB, OTHER]
    serves = dict.fromkeys(JOBS, 1 << 32)
    owner.handle(ProcessUp("h1:1", serves, 2), 0.0)
    assert len(owner.promised().jobs) == 2
    owner.handle(ProcessUp("h1:1", serves, 1), 0.0)
    assert owner.promised().lanes == 1 and [one.job for one in owner.promised().jobs] == [JOB]
    assert owner.jobs.keys() == set(JOBS) and owner.jobs[OTHER].demand is None, "it is measured again"
    owner.check()


def test_a_process_is_as_busy_as_its_lanes_or_its_loop() -> None:
    assert load_now(0.0, 0.2, 1.0, 2, 1.8) == pytest.approx(0.2 * 0.9)
    assert load_now(0.0, 0.9, 1.0, 2, 0.2) == pytest.approx(0.2 * 0.9)


def test_cores_are_those_of_the_affinity_and_of_the_cgroup(tmp_path: Path) -> None:
    here = len(os.sched_getaffinity(0))
    for text, found in (("max 100000", here), ("100000 100000", 1), ("50000 100000", 1), ("x", here)):
        (tmp_path / "cpu.max").write_text(text)
        assert cores_now(str(tmp_path / "cpu.max")) == found
    assert cores_now(str(tmp_path / "none")) == here


@pytest.mark.parametrize(
    ("asked", "cores", "devices", "found"),
    [(0, 1, 0, 1), (0, 2, 0, 1), (0, 2, 1, 1), (0, 8, 0, 3), (0, 64, 8, 8), (0, 16, 8, 1), (4, 2, 8, 4), (1, 64, 0, 1)],
)
def test_as_many_lanes_as_cores_are_spared_or_as_the_settings_say(
    asked: int, cores: int, devices: int, found: int
) -> None:
    assert lanes_of(asked, cores, devices) == found
