"""Data Blocks go with the ranks that they belong to, whatever happens: no Block is lost, none is computed twice.

Threads are processes here; connections, aggregators and what moves Blocks are real.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.core.errors import CoveyError
from covey.healing.healing import Healing
from covey.healing.neighbours import HealedRank
from covey.job.blocks import exchange as exchanges
from covey.job.blocks.data_blocks import DataBlocks, added, declared_blocks
from covey.job.blocks.exchange import Exchange
from covey.job.blocks.exchange import Process as BlockProcess
from covey.job.carrying import RANKS_MAX, CarriedMember, CarriedRanks, CarriedScript
from covey.job.job_state import ScriptState, begun
from tests.covey.test_carrying import JOB, ElasticGang, Process, reached, until

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
        return (self.steps * sum(content(k) for k in range(self.blocks))).tobytes()

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
            here = {k for k in process.exchange.sets["data"].store}
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
    change_at_random(gangs, seed)


def change_at_random(gangs: Callable[..., DataGang], seed: int) -> None:
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
                gang.arrange(draw.sample(sorted(gang.now), 1), draw.randint(0, min(2, RANKS + 1 - len(gang.now))))
            case "restart" if len(gang.now) > 1:
                gang.restart(draw.choice(sorted(gang.now)))
            case "owner":
                gang.lose_owner(draw.randint(0, 1))
            case _:
                pass
    gang.end_with_one_owner()
