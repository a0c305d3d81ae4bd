"""Scripts that call collectives wherever people call them, in PyTorch trainings whose ranks are killed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from covey.core.errors import EXIT_STATE_LOST
from tests.covey.forks import Forks
from tests.covey.hooks.torch_jobs import NEEDS_TORCH
from tests.covey.test_torch_heal import TrainedGang, until

pytestmark = NEEDS_TORCH
SCRIPT = Path(__file__).with_name("torch_calls_script.py")
Gangs = Callable[..., TrainedGang]


@pytest.fixture
def gangs(forks: Forks, tmp_path: Path) -> Iterator[Gangs]:
    made: list[TrainedGang] = []

    def make(ranks: int, kind: str, steps: int = 96, saved: Path | None = None) -> TrainedGang:
        gang = TrainedGang(forks, tmp_path / str(len(made)), ranks, kind, steps, saved, SCRIPT)
        made.append(gang)
        gang.begin()
        return gang

    yield make
    for gang in made:
        gang.close()


def told(gang: TrainedGang, word: str, ranks: int = 2) -> list[set[str]]:
    return [set(gang.lines(rank, word)) for rank in range(ranks)]


def test_collectives_anywhere_are_healed_with_the_bits_of_a_run_without_losses(gangs: Gangs) -> None:
    """A rank is lost before the loop, in a step, and between any two collectives at an epoch's end."""
    places = ["attached", "first", "step-10", "validates-1", "second-1", "third-2", "fourth-2", "step-72"]
    gang, calm = gangs(2, f"windows@{','.join(places)}"), gangs(2, "windows")
    for _ in places:
        gang.replace(1)
    assert gang.learnt() == calm.learnt()
    assert told(gang, "validated") == told(calm, "validated"), "what is validated, and the schedule, are the same"
    assert len(set.union(*told(gang, "agreed"))) == 1, "each process has the run id that the first ones agreed on"
    assert len(set.union(*told(gang, "validated"))) == 4
    gang.check_samples()
    assert "restarts" not in gang.text(0)
