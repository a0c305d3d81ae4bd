"""Gradients and state on a real GPU (`make gpu-check`): the same bits as DDP gives by itself there, and healing."""

import random
from pathlib import Path

import pytest

from tests.agent.ports.devices.rigs import has_gpu
from tests.covey.device import test_gpu_sums as gpu_sums
from tests.covey.device.test_ddp_device import trained
from tests.covey.forks import Forks
from tests.covey.test_torch_heal import Gangs, calm, disturbed
from tests.covey.test_torch_heal import gangs as gangs

pytestmark = pytest.mark.gpu
KINDS = "plain,views,accumulated,bfloat16,float64,compiled"
"""Without float16: DDP by itself divides before it adds, and loses the smallest numbers of that type."""


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    if not has_gpu():
        pytest.skip("PyTorch finds no CUDA device here: nothing of a GPU was tried")


def count() -> int:
    import torch

    return int(torch.cuda.device_count())


@pytest.mark.parametrize("group", ["covey", "covey+gloo"])
def test_two_ranks_train_to_the_bits_of_gloo(forks: Forks, tmp_path: Path, group: str) -> None:
    """Two ranks, on one GPU where there is only one. A sum of two numbers has one order."""
    store = f"={tmp_path / 'store'}" if "gloo" in group else ""
    ours, _ = trained(forks, tmp_path / "ours", "cuda", KINDS, group + store)
    gloo, _ = trained(forks, tmp_path / "gloo", "cuda", KINDS, f"gloo={tmp_path / 'other'}")
    assert ours == gloo and len(set(gloo.values())) == 4


def test_two_ranks_train_to_the_bits_of_nccl(forks: Forks, tmp_path: Path) -> None:
    if count() < 2:
        pytest.skip("PyTorch finds no CUDA device here but one: NCCL needs one for each rank")
    ours, _ = trained(forks, tmp_path / "ours", "cuda", f"{KINDS},split", "covey")
    nccl, _ = trained(forks, tmp_path / "nccl", "cuda", f"{KINDS},split", f"nccl={tmp_path / 'store'}")
    assert ours == nccl


def test_ranks_add_on_their_gpus_to_the_bits_of_copies(forks: Forks, tmp_path: Path) -> None:
    """NCCL moves gradients between GPUs of a host; on one GPU it is said that it does not."""
    kinds, alone = "plain,bfloat16,float64", count() < 2
    hosts, group = (2,) if count() < 4 else (2, 2), f"covey+gloo={tmp_path / 'store'}" if alone else ""
    ours = gpu_sums.trained(forks, tmp_path / "ours", hosts, kinds, "cuda", group)
    group = f"covey+gloo={tmp_path / 'other'}" if alone else ""
    copies = gpu_sums.trained(forks, tmp_path / "copies", hosts, kinds, "cuda", group, COVEY_GPU_SUMS="0")
    assert ours.bits == copies.bits
    way = "copied from each GPU: ranks 0 and 1 share a GPU, which nccl refuses"
    assert ours.ways[0] == [way if alone else "added on GPUs of ranks 0 to 1 (nccl)"] * 3


@pytest.mark.parametrize(("kind", "steps", "after"), [("cuda-epochs", 48, [2, 9, 25]), ("cuda-steps", 24, [2, 6, 7])])
def test_a_training_on_a_gpu_whose_ranks_are_killed_ends_with_the_same_bits(
    gangs: Gangs, kind: str, steps: int, after: list[int]
) -> None:
    gang = gangs(2, kind, steps)
    disturbed(gang, random.Random(3), 2, after, 1)
    assert gang.learnt() == calm(gangs, 2, kind, steps)
    gang.check_samples()
