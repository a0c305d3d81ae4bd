"""Trainings whose model is divided among ranks, with replicas (HSDP): ranks that are killed are replaced, and the
training ends with the same bits. Real processes, a real aggregator."""

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

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
    """Also two at once that hold different shards, of one replica and of both; in steps, and after epochs."""
    gang = gangs("epochs", 48)
    disturbed(gang, random.Random(5), [0, 3, 8, 11, 17, 23, 29, 35, 41], [(3,), (0,), (1, 2), (0, 1), (2,)])
    assert learnt(gang) == learnt(gangs("epochs", 48))
    gang.check_samples()
    assert "is replaced, and gets its part from a rank that holds the same (0 = 2, 1 = 3)" in gang.text(0)
    assert "restarts instead of heals" not in gang.text(0)
