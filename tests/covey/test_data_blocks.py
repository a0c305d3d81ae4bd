"""Data Blocks go with the ranks that they belong to, whatever happens: no Block is lost, none is computed twice.

Threads are processes here; connections, aggregators and what moves Blocks are real.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.core.errors import CoveyError
from covey.core.ids import HostId
from covey.healing.healing import Healing
from covey.healing.neighbours import HealedRank
from covey.job.blocks import exchange as exchanges
from covey.job.blocks import seeking
from covey.job.blocks.block_wire import (
    BLOCK_BYTES_MAX,
    BLOCKS_MAX,
    SETS_MAX,
    AboutBlocks,
    BlocksHeld,
    DeclaredBlocks,
    encode_blocks,
)
from covey.job.blocks.data_blocks import DataBlocks, added, declared_blocks
from covey.job.blocks.exchange import Exchange
from covey.job.blocks.exchange import ExchangingProcess as BlockProcess
from covey.job.carrying import RANKS_MAX, CarriedMember, CarriedRanks, CarriedScript
from covey.job.job_state import ScriptState, begun
from covey.tensors.numbers.telling import Tell, ToldByRank
from covey.tensors.numbers.tensor_wire import PART_BYTES_MAX
from covey.wire.job import AggregatorAt, Carries
from tests.covey.test_carrying import JOB, ElasticGang, Process, reached

BLOCKS, WIDTH, RANKS = 14, 900, 6


def content(k: int) -> np.ndarray[Any, Any]:
    return np.arange(WIDTH, dtype=np.float64) % 13 + k


class DataProcess(Process):
    """A process whose ranks add up their Blocks: whole numbers, so that each sum is known."""

    gang: "DataGang"
    exchange: Exchange
    data: DataBlocks

    def kill(self) -> None:
        super().kill()
        with suppress(AttributeError):
            self.exchange.close()

    def _load(self, k: int) -> dict[str, Any]:
        self.gang.loads.append((self.first, k))
        return {"x": content(k)}

    def _begin_blocks(self) -> None:
        of = self.first, self.incarnation, self.gang.ranks
        said = BlockProcess(str(JOB), *of, lambda: self.client.far.owner(0), self.client.tell)
        self.exchange = Exchange(said, lambda: self.client.far)
        self.client.about_blocks = self.exchange.told
        declared = declared_blocks("data", self.gang.blocks, self._load, 1 << 16)
        self.data = added(self.exchange, declared, self._load, self.gang.ranks, self._entered)

    def _entered(self) -> int | None:
        return None if self.carried is None else self.carried.entered

    def _train(self) -> bytes:
        total = np.zeros(WIDTH)

        def load(arrays: dict[str, Any], own: Any) -> None:
            total[:] = arrays["total"]

        def carry(healing: Healing) -> CarriedRanks:
            script = CarriedScript(None, lambda rank, own: None)
            self.carried = CarriedRanks(CarriedMember(self.client, healing), script, self._client, me)
            self.carried.blocks = self.exchange
            self.carried.told(self.gang.carries())
            return self.carried

        self._begin_blocks()
        me = HealedRank(self.first, self.gang.ranks, self.incarnation)
        script = ScriptState(lambda: {"total": total}, load, None)
        state = begun(self.client, me, script, gathers_max=RANKS_MAX, carry=carry)
        assert self.carried is not None
        for step in state.steps(self.gang.steps):
            self._passes(step, "at its beginning")
            for rank in self.carried.carried():
                with rank:
                    mine, used = np.zeros(WIDTH), []
                    for k, block in self.data.of(rank):
                        assert (block["x"] == content(k)).all()
                        used.append(k)
                        mine += block["x"]
                        self._passes(step, "between Blocks")
                    assert used == list(range(int(rank), self.gang.blocks, self.gang.ranks))
                    self.gang.drawn.append((step, int(rank)))
                    sums = rank.push("total", mine)
            total += sums.wait()
            if self.gang.computes_s:
                time.sleep(self.gang.computes_s)
        return total.tobytes()


class DataGang(ElasticGang):
    makes = DataProcess
    blocks = BLOCKS

    def __init__(self, *words: Any, **more: Any) -> None:
        self.loads: list[tuple[int, int]] = []
        super().__init__(*words, **more)

    def total(self) -> bytes:
        """What every process ends with: each Block once in each step (the papers' AddVector)."""
        return bytes((self.steps * np.sum([content(k) for k in range(self.blocks)], axis=0)).tobytes())

    def process(self, first: int) -> DataProcess:
        found = self.now[first]
        assert isinstance(found, DataProcess)
        return found

    def end_with_one_owner(self) -> None:
        """All processes end with the sum, and each Block is in the process that carries its rank."""
        kept = {first: self.process(first) for first in self.now}
        assert self.end() == self.total()
        for process in kept.values():
            assert process.carried is not None
            here = set(process.exchange.sets["data"].store)
            mine = {k for k in range(self.blocks) if k % self.ranks in process.carried.members}
            assert mine <= here, (process.first, mine, here, self.told())
        carried = [rank for each in kept.values() if each.carried for rank in each.carried.members]
        assert sorted(carried) == list(range(self.ranks)), "no rank, and so no Block, has two owners or none"

    def moved(self) -> int:
        return sum(self.process(first).data.moved for first in self.now)


@pytest.fixture
def gangs(tmp_path: Path) -> Iterator[Callable[..., DataGang]]:
    made: list[DataGang] = []

    def make(processes: int, **more: Any) -> DataGang:
        made.append(DataGang(tmp_path / str(len(made)), RANKS, processes, **more))
        made[-1].computes_s = 0.004
        return made[-1]

    yield make
    for gang in made:
        with suppress(AssertionError):
            gang.close()


@pytest.mark.parametrize("processes", [1, 4, 6])
def test_each_process_loads_the_blocks_of_its_ranks_once(gangs: Callable[..., DataGang], processes: int) -> None:
    gang = gangs(processes)
    gang.end_with_one_owner()
    assert sorted(k for _, k in gang.loads) == list(range(BLOCKS))


def test_blocks_of_a_killed_process_are_loaded_by_who_carries_its_ranks(gangs: Callable[..., DataGang]) -> None:
    gang = gangs(2)
    reached(gang, 3)
    lost = gang.carried[1]
    gang.arrange([1], 0)
    gang.end_with_one_owner()
    again = [k for k in range(BLOCKS) if k % RANKS in lost]
    assert sorted([k for first, k in gang.loads if first == 0][-len(again) :]) == again
    assert len(gang.loads) == BLOCKS + len(again)


def test_a_new_process_takes_blocks_from_the_one_before_and_loads_none(gangs: Callable[..., DataGang]) -> None:
    gang = gangs(1, steps=60)
    reached(gang, 3)
    (new,) = gang.arrange([], 1)
    gang.end_with_one_owner()
    assert len(gang.loads) == BLOCKS
    assert gang.moved() == sum(k % RANKS in gang.carried[new] for k in range(BLOCKS))
    left = set(gang.process(0).exchange.sets["data"].store)
    assert not {k % RANKS for k in left} & set(gang.carried[new]), "what another process has taken is forgotten"


def test_a_process_that_is_started_again_loads_its_blocks(gangs: Callable[..., DataGang]) -> None:
    gang = gangs(3)
    reached(gang, 3)
    gang.restart(2)
    gang.end_with_one_owner()
    again = [k for k in range(BLOCKS) if k % RANKS in gang.carried[2]]
    assert sorted(k for first, k in gang.loads if first == 2) == sorted(again + again)


@pytest.mark.parametrize("seed", range(4))
def test_no_block_is_lost_or_counted_twice_whatever_changes(gangs: Callable[..., DataGang], seed: int) -> None:
    """Data Blocks move while the job runs. Reference: §3.3.2."""
    draw, steps = random.Random(seed), 60
    gang = gangs(draw.randint(1, RANKS), steps=steps)
    for at in range(2, steps - 6, 6):
        reached(gang, at + draw.randint(0, 4))
        time.sleep(draw.random() * 0.01)
        match draw.choice(["shrink", "grow", "grow", "both", "restart", "owner"]):
            case "shrink" if len(gang.now) > 1:
                gang.arrange(draw.sample(sorted(gang.now), draw.randint(1, len(gang.now) - 1)), 0)
            case "grow" if len(gang.now) < RANKS:
                gang.arrange([], draw.randint(1, RANKS - len(gang.now)))
            case "both" if len(gang.now) > 1:
                gang.arrange(draw.sample(sorted(gang.now), 1), draw.randint(0, min(2, RANKS - len(gang.now))))
            case "restart" if len(gang.now) > 1:
                gang.restart(draw.choice(sorted(gang.now)))
            case "owner":
                gang.lose_owner(draw.randint(0, 1))
            case _:
                pass
    gang.end_with_one_owner()


class Agents:
    """The part of a job that `job.data` needs in a test without agents."""

    def exchange(self) -> Exchange:
        return Exchange(BlockProcess("j1", 0, 0, 2, lambda: None, lambda text: None), lambda: pytest.fail("it asked"))

    def data(self, entered: int | None, **more: Any) -> DataBlocks:
        given = {"name": "data", "blocks": 5, "load": content, "bytes_max": "1 MiB", **more}
        return added(self.exchange(), declared_blocks(**given), given["load"], 2, lambda: entered)


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(CoveyError) as error:
        call()
    assert len(str(error.value).splitlines()) == 3
    assert all(word in str(error.value) for word in words), str(error.value)


def test_data_that_cannot_be_is_refused_in_three_lines() -> None:
    refused(lambda: declared_blocks("data", 5, None, 10), "load=")
    refused(lambda: declared_blocks("data", 0, content, 10), "0 Blocks")
    refused(lambda: declared_blocks("data", 1 << 20, content, 10), "1048576 Blocks")
    refused(lambda: declared_blocks("data", 5, content, 0), "bytes=0")
    exchange = Agents().exchange()
    added(exchange, declared_blocks("data", 5, content, 10), content, 2, lambda: None)
    more = partial(added, exchange, load=content, world_size=2, entered=lambda: None, store=lambda: pytest.fail("made"))
    refused(lambda: more(declared_blocks("data", 6, content, 10)), "5 Blocks already")
    refused(lambda: more(declared_blocks("more", BLOCKS_MAX - 4, content, 10)), "65537 Blocks")


def test_a_block_is_given_to_the_rank_that_it_belongs_to_alone() -> None:
    refused(lambda: next(Agents().data(None).of(1)), "no rank was entered", "belongs to rank 1")
    refused(lambda: next(Agents().data(0).of(1)), "computes as rank 0")
    refused(lambda: Agents().data(0)[3], "belongs to rank 1")
    data = Agents().data(1)
    assert (data[3] == content(3)).all() and [k for k, _ in data.of(1)] == [1, 3] and data.loaded == 2
    with pytest.raises(IndexError):
        data[5]


def test_blocks_that_are_declared_otherwise_elsewhere_are_refused() -> None:
    """The script was changed while the job ran: a process that begins later runs other code."""
    for theirs, word in (
        (declared_blocks("data", 6, content, "1 MiB"), "blocks 5 here and 6 there"),
        (declared_blocks("data", 5, content, "2 MiB"), "bytes 1048576 here and 2097152 there"),
        (declared_blocks("data", 5, lambda k: content(k) + 1, "1 MiB"), "load is other code"),
    ):
        exchange = Exchange(BlockProcess("j1", 1, 1, 2, lambda: None, lambda text: None), Silent)
        mine = declared_blocks("data", 5, content, "1 MiB")
        data = added(exchange, mine, content, 2, lambda: 1)
        exchange.carries(Carries(1, {0: (0,), 1: (1,)}))
        answer = encode_blocks(BlocksHeld(1, "", (theirs,)))
        assert exchange.told(ToldByRank(0, AboutBlocks.ANSWER, 0, answer))
        refused(partial(data.__getitem__, 1), word)
        exchange.close()


def test_the_longest_answer_fits_into_a_message() -> None:
    """A job's sets have at most so many Blocks together."""
    sets = tuple(DeclaredBlocks(f"{at:64}", BLOCKS_MAX, BLOCK_BYTES_MAX, "c" * 32) for at in range(SETS_MAX))
    part = BLOCKS_MAX // SETS_MAX
    held = {each.name: tuple(range(BLOCKS_MAX - part, BLOCKS_MAX)) for each in sets}
    assert len(encode_blocks(BlocksHeld((1 << 63) - 1, "a" * 80, sets, held))) < PART_BYTES_MAX


class Silent:
    """Other ranks that hear nothing."""

    def tell(self, said: Tell) -> None:
        pass


def test_blocks_are_loaded_when_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeking, "ASK_S", 0.05)
    exchange = Exchange(BlockProcess("j1", 1, 1, 2, lambda: None, lambda text: None), Silent)
    data = added(exchange, declared_blocks("data", 5, content, "1 MiB"), content, 2, lambda: 1)
    exchange.carries(Carries(1, {0: (0,), 1: (1,)}))
    assert (data[1] == content(1)).all() and (data.loaded, data.moved) == (1, 0)
    exchange.close()


def test_blocks_are_loaded_when_who_has_them_cannot_be_reached() -> None:
    said: list[str] = []
    owner = AggregatorAt(JOB, 5, HostId("h1"), "127.0.0.1:9", b"s" * 16)
    exchange = Exchange(BlockProcess("j1", 1, 1, 2, lambda: owner, said.append), Silent)
    data = added(exchange, declared_blocks("data", 5, content, "1 MiB"), content, 2, lambda: 1)
    exchange.carries(Carries(1, {0: (0,), 1: (1,)}))
    answer = encode_blocks(BlocksHeld(1, "127.0.0.1:9", (), {"data": (1, 3)}))
    exchange.told(ToldByRank(0, AboutBlocks.ANSWER, 0, answer))
    assert [(block == content(k)).all() for k, block in data.of(1)] == [True, True]
    assert (data.loaded, data.moved) == (2, 0) and "loads Blocks that process 0 has" in said[0]
    exchange.close()


def test_blocks_that_nobody_takes_are_kept_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Agents().exchange()
    data = added(exchange, declared_blocks("data", 5, content, "1 MiB"), content, 2, lambda: 1)
    exchange.carries(Carries(0, {0: (0, 1)}))
    assert data[1] is not None
    exchange.carries(Carries(1, {0: (0,), 1: (1,)}))
    exchange.let_go([1])
    exchange.stepped([0])
    assert 1 in exchange.sets["data"].store
    monkeypatch.setattr(exchanges, "KEEP_S", -1.0)
    exchange.stepped([0])
    assert 1 not in exchange.sets["data"].store
