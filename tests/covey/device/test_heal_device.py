"""Trainings on a device whose ranks are killed end with the same bits: real processes, a real aggregator."""

import random
from collections.abc import Iterator

import pytest

from tests.covey.device import lab
from tests.covey.hooks.torch_jobs import NEEDS_TORCH
from tests.covey.test_torch_heal import Gangs, calm, disturbed
from tests.covey.test_torch_heal import gangs as gangs
from tests.families import in_gate

pytestmark = [
    *NEEDS_TORCH,
    pytest.mark.xdist_group("lab"),
    pytest.mark.skipif(lab.compiler() is None, reason="there is no C++ compiler"),
]


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    lab.library()
    yield


@pytest.mark.parametrize(
    ("kind", "steps", "after"),
    in_gate(1, [("lab-epochs", 24, [2, 9]), ("lab-steps", 12, [2, 6]), ("lab-models-gan", 24, [2, 5, 9])]),
)
def test_a_training_on_a_device_whose_ranks_are_killed_ends_with_the_same_bits(
    gangs: Gangs, kind: str, steps: int, after: list[int]
) -> None:
    """Parameters, Adam's moments, the device's random generator (dropout) and a GradScaler come to a successor that has
    another device of its host; buffers (BatchNorm) are rank 0's."""
    gang = gangs(2, kind, steps)
    disturbed(gang, random.Random(3), 2, after, 1)
    assert sum(gang.incarnations.values()) == len(after)
    assert gang.learnt() == calm(gangs, 2, kind, steps)
    gang.check_samples()
