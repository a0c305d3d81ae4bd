"""An elastic training on a device, whose processes come and are killed, ends with the same bits."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.covey.device import lab
from tests.covey.hooks.torch_jobs import NEEDS_TORCH
from tests.covey.test_torch_elastic import SCRIPT, Jobs, changed, fixed
from tests.covey.test_torch_elastic import jobs as jobs

pytestmark = [
    *NEEDS_TORCH,
    pytest.mark.xdist_group("lab"),
    pytest.mark.skipif(lab.compiler() is None, reason="there is no C++ compiler"),
]
WORDS = ("lab", "40")


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    lab.library()
    yield


@pytest.mark.long
def test_ranks_move_between_processes_with_other_devices(jobs: Jobs, tmp_path: Path) -> None:
    """Gradients come to host memory on a stream of their own, and the device's random generator moves with the rank."""
    assert changed(jobs, WORDS, tmp_path / "go on").digest() == fixed(jobs, SCRIPT, WORDS)
