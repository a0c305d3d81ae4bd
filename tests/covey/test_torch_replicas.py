"""Trainings whose model is divided among ranks, with replicas (HSDP): ranks that are killed are replaced, and the
training ends with the same bits. Real processes, a real aggregator."""

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from covey.core.errors import EXIT_STATE_LOST
from tests.covey.forks import Forks
from tests.covey.hooks.torch_jobs import NEEDS_TORCH
from tests.covey.test_torch_heal import TrainedGang, until

pytestmark = NEEDS_TORCH
SCRIPT = Path(__file__).with_name("torch_replicas_script.py")
RANKS = 4
Gangs = Callable[..., TrainedGang]


@pytest.fixture
def gangs(forks: Forks, tmp_path: Path) -> Iterator[Gangs]:
    made: list[TrainedGang] = []

    def make(kind: str, steps: int, saved: Path | None = None) -> TrainedGang:
        gang = TrainedGang(forks, tmp_path / str(len(made)), RANKS, kind, steps, saved, SCRIPT)
        made.append(gang)
        gang.begin()
        return gang

    yield make
    for gang in made:
        gang.close()


def learnt(gang: TrainedGang) -> list[str]:
    """The checksums with which the ranks end, each with its next random number."""
    ended = [gang.ended(rank) for rank in range(RANKS)]
    assert ended == [0] * RANKS, [gang.text(rank)[-3000:] for rank in range(RANKS)]
    return [gang.lines(rank, "sha256")[-1] for rank in range(RANKS)]


def disturbed(gang: TrainedGang, draws: random.Random, after: list[int], pairs: list[tuple[int, ...]]) -> None:
    """After each of these steps some ranks are killed, somewhere in one of the next steps, and replaced."""
    for at, step in enumerate(after):
        lost = pairs[at % len(pairs)]
        others = set(range(RANKS)) - set(lost)
        gang.until(min(others), step)
        until(partial(gang.have_begun, others), gang)
        time.sleep(draws.uniform(0.0, 0.06))
        gang.kill(*lost)
        gang.replace(*lost)


def test_a_divided_training_whose_ranks_are_killed_ends_with_the_same_bits(gangs: Gangs) -> None:
    """Ranks are killed two at once, too: of different shards, one replica, both; in steps, and after epochs."""
    gang = gangs("epochs", 24)
    disturbed(gang, random.Random(5), [0, 6, 11, 17], [(3,), (1, 2), (0, 1), (2,)])
    assert learnt(gang) == learnt(gangs("epochs", 24))
    gang.check_samples()
    assert "is replaced, and gets its part from a rank that holds the same (0 = 2, 1 = 3)" in gang.text(0)
    assert "restarts instead of heals" not in gang.text(0)


@pytest.mark.long
def test_a_shard_whose_ranks_are_all_lost_begins_again_from_the_last_checkpoint(gangs: Gangs, tmp_path: Path) -> None:
    """Its training is in bfloat16, saves in its fifth step, and is asked to end later."""
    (saved := tmp_path / "saved").mkdir()
    gang = gangs("steps", 24, saved)
    gang.until(0, 8)
    gang.kill(1, 3)
    gang.replace(1, 3)
    why = "all ranks that hold the same part of the state (1, 3) were lost, and with them what it had learnt"
    until(lambda: why in gang.text(1) + gang.text(3), gang)
    first = 1 if why in gang.text(1) else 3  # the other one may wait for it until the agent ends the job
    assert gang.ended(first) == EXIT_STATE_LOST and "next: start from its last checkpoint" in gang.text(first)
    assert "restarts instead of heals when a rank is lost between optimizer.step() and the next step: state.save" in (
        gang.text(0)
    )
    again = gangs("steps", 24, saved)
    again.until(0, 12)
    again.stopped()
    assert [again.lines(rank, "goes on") for rank in range(RANKS)] == [["5"]] * RANKS
    last = gangs("steps", 24, saved)
    until(partial(last.have_begun, range(RANKS)), last)
    last.kill(2)
    last.replace(2)
    assert learnt(last) == learnt(gangs("steps", 24)) and int(last.lines(0, "goes on")[0]) > 12


def test_what_a_divided_training_cannot_heal_is_said(gangs: Gangs) -> None:
    """Replicas with other parameters; a mesh of some ranks, in which gloo adds; a barrier in the optimizer's step."""
    unlike, part, within = gangs("unlike", 2), gangs("part", 2), gangs("within", 2)
    assert [unlike.ended(rank) for rank in range(RANKS)] == [1] * RANKS
    assert "ranks 0 and 2 have the same shard of the model, with other parameters in it" in unlike.text(3)
    learnt(part)
    assert [part.lines(rank, "added")[0] for rank in (0, 3)] == ["2.0 2.0 2.0", "1.0 1.0 1.0"]
    assert [part.lines(rank, "of mesh") for rank in range(RANKS)] == [["0.5 2"], ["0.5 3"], ["2.5 2"], ["2.5 3"]]
    assert "restarts instead of heals from now on when a rank is lost: a collective of ranks [0, 1]" in part.text(0)
    learnt(within)
    assert "when a rank is lost: barrier within optimizer.step() cannot be repeated" in within.text(0)


def test_the_groups_of_a_dimension_are_those_made_together_that_have_all_ranks() -> None:
    from covey.frameworks.torch.calls.mesh_groups import MeshRow, row_of
    from covey.frameworks.torch.calls.script_calls import MadeGroup

    of_two = [("mesh_a", (0, 2)), ("mesh_a", (1, 3)), ("mesh_b", (0, 1)), ("mesh_b", (2, 3))]
    twice = [*of_two, *of_two[:2], ("mesh_a", (0, 2)), ("mesh_a", (1, 3)), ("", (0, 1))]
    made = [MadeGroup(number, *each) for number, each in enumerate(twice, 1)]
    rows = [row_of(made, each.number, 4) for each in made]
    pairs = [(first, at) for first in (1, 3, 5, 7) for at in (0, 1)]
    assert rows == [*(MeshRow(first, at, 2) for first, at in pairs), None]
    some = [("mesh_a", (0, 1)), ("mesh_b", (0, 1)), ("mesh_b", (1, 2)), ("mesh_b", (3,))]
    made = [MadeGroup(number, *each) for number, each in enumerate(some, 1)]
    assert [row_of(made, each.number, 4) for each in made] == [None] * 4


@pytest.mark.parametrize(
    ("mesh", "alike", "parts"),
    [
        ([[0, 1], [2, 3]], [(0, 2), (1, 3)] * 2, [0, 1, 0, 1]),
        ([[0, 2], [1, 3]], [(0, 1), (0, 1), (2, 3), (2, 3)], [0, 0, 1, 1]),
    ],
)
def test_a_shard_is_known_by_its_part_in_whatever_order_a_mesh_has_its_ranks(
    mesh: list[list[int]], alike: list[tuple[int, ...]], parts: list[int]
) -> None:
    """Else a job that continues on a mesh of another order would take parts for others, of the same size."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from covey.frameworks.torch.sharded.replicas import replicas_of
    from covey.frameworks.torch.sharded.shard_state import PARTS

    for rank, part in enumerate(parts):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            of = DeviceMesh("cpu", torch.tensor(mesh))
            weight = DTensor.from_local(torch.zeros(2, 3), of, [Replicate(), Shard(0)], run_check=False)
            assert replicas_of([weight], 4) == alike
            (said,) = PARTS.described([("weight", weight)])["shard"]
            assert said.startswith("weight (2, 3) ") and said.endswith(f" part [{part}]")
        finally:
            dist.destroy_process_group()
