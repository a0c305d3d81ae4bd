"""Gradients that ranks of one host add on their devices: the bits of each rank's own way, with fewer copies. Real
processes on the laboratory device, memory that ranks of a host share, real aggregators; `labccl` moves tensors."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import pytest

from covey.core.ids import JobId
from covey.tensors.numbers.blocks import table_id
from covey.tensors.same_host import layout
from covey.wire.sums import Serve
from tests.covey.device import lab
from tests.covey.forks import Forks
from tests.covey.hooks.torch_jobs import NEEDS_TORCH
from tests.families import in_gate
from tests.plugins.aggregator.loopback import SECRET, AggdThread

pytestmark = [
    *NEEDS_TORCH,
    pytest.mark.xdist_group("lab"),
    pytest.mark.skipif(lab.compiler() is None, reason="there is no C++ compiler"),
]
SCRIPT = Path(__file__).with_name("ddp_script.py")
EPOCH = 1 << 32
FEW = "plain,accumulated,bfloat16"
KINDS = "plain,views,bfloat16,float64,unused"


class Trained(NamedTuple):
    bits: dict[str, str]
    """By kind, the checksum with which all ranks end."""
    ways: list[list[str]]
    """By rank, the way of gradients of each model, in words."""
    moves: list[int]
    """By rank, the number of moves between devices."""
    texts: list[str]


def trained(
    forks: Forks,
    folder: Path,
    hosts: Sequence[int],
    kinds: str = KINDS,
    device: str = "lab",
    group: str = "",
    **environ: str,
) -> Trained:
    """`hosts`: number of ranks of each; `environ`: of rank 0's host."""
    folder.mkdir()
    ranks, running = sum(hosts), AggdThread(folder)
    for table in range(len(hosts)):
        running.order(Serve(table_id(JobId("j1"), table), EPOCH + 1, ranks, SECRET))
    firsts = [sum(hosts[:at]) for at in range(len(hosts))]
    memories = [layout.make(count, first) for count, first in zip(hosts, firsts, strict=True)]
    processes = []
    for memory, first, count in zip(memories, firsts, hosts, strict=True):
        for rank in range(first, first + count):
            path = f"/proc/{os.getpid()}/fd/{memory}"
            backend = {"lab": "labccl", "cuda": "nccl"}.get(device, "gloo")
            words = [rank, ranks, device, group or f"covey+{backend}={folder / 'store'}", kinds, path, len(hosts)]
            given = [f"{name}={value}" for name, value in environ.items() if first == 0]
            processes.append(forks.run(SCRIPT, *words, *given))
    try:
        for each in processes:
            for table in range(len(hosts)):
                each.say(f"{EPOCH + 1} {running.now().address} {table}")
        assert [each.wait() for each in processes] == [0] * ranks, "\n".join(each.text()[-3000:] for each in processes)
        texts = [each.text() for each in processes]
    finally:
        for each in processes:
            each.close()
        running.finish()
        for memory in memories:
            os.close(memory)
    bits = [dict(re.findall("sha256 (.*) (.*)", text)) for text in texts]
    assert all(each == bits[0] for each in bits) and list(bits[0]) == kinds.split(",")
    ways = [re.findall("gradients are (.*)", text) for text in texts]
    moves = [sum(map(int, re.findall(r"moves (\d+)", text))) for text in texts]
    return Trained(bits[0], ways, moves, texts)


@pytest.fixture(scope="module")
def four(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Four ranks whose gradients are in host memory."""
    return trained(forks, tmp_path_factory.mktemp("four") / "each", (2, 2), FEW, "cpu")


def test_ranks_of_a_job_on_one_host_add_on_their_devices_to_the_same_bits(forks: Forks, tmp_path: Path) -> None:
    """Nothing is pushed but what they agree on, a round for each model."""
    ours = trained(forks, tmp_path / "ours", (3,))
    each = trained(forks, tmp_path / "each", (3,), KINDS, "cpu")
    assert ours.bits == each.bits and len(set(ours.bits.values())) == 4
    assert ours.ways == [["added on GPUs of ranks 0 to 2 (labccl)"] * 5] * 3
    assert re.findall(r"pushed (\d+)", ours.texts[0]) == ["5"]


@pytest.mark.parametrize("hosts", in_gate(1, [((3, 1),), ((2, 2),)]), ids=str)
def test_hosts_whose_ranks_add_on_devices_send_the_same_sums(
    forks: Forks, tmp_path: Path, four: Trained, hosts: list[int]
) -> None:
    """On hosts whose ranks are one sum of the tree, and on one whose ranks are two of them beside one with one rank."""
    ours = trained(forks, tmp_path / "ours", hosts, FEW)
    assert ours.bits == four.bits and len(set(ours.bits.values())) == 3
    assert ours.ways[0] == [f"added on GPUs of ranks 0 to {hosts[0] - 1} (labccl)"] * 3
    alone = "copied from each GPU: no other rank of the job is on this host"
    assert ours.ways[3] == ["added on GPUs of ranks 2 to 3 (labccl)" if hosts[1] == 2 else alone] * 3
    assert ours.moves[0] > 10 and four.ways[0] == ["in host memory"] * 3


@pytest.mark.long
def test_a_host_that_adds_on_its_devices_beside_one_that_does_not(forks: Forks, tmp_path: Path, four: Trained) -> None:
    mixed = trained(forks, tmp_path / "mixed", (2, 2), FEW, COVEY_GPU_SUMS="0")
    assert mixed.ways[0] == ["copied from each GPU: COVEY_GPU_SUMS is 0"] * 3
    assert mixed.bits == four.bits and mixed.moves[0] == 0 < mixed.moves[2]


def test_ranks_that_share_a_device_copy_on_their_own_and_say_so(forks: Forks, tmp_path: Path) -> None:
    found = trained(forks, tmp_path / "one", (2,), "plain", LAB_UUID="the only one")
    assert found.ways == [["copied from each GPU: ranks 0 and 1 share a GPU, which labccl refuses"]] * 2
    assert "covey: rank 1 of j1 has its gradients copied from each GPU: ranks 0 and 1 share a GPU" in found.texts[1]


def test_four_shares_are_added_as_the_tree_says() -> None:
    """First 0 and 1, 2 and 3: another order has other bits."""
    import torch

    from covey.frameworks.torch.gpu_sums import _sum
    from covey.tensors.numbers.additions import tree_of

    shares = [torch.tensor(each) for each in ([1.0], [1e8], [-1e8], [1.0])]
    assert _sum(tree_of((0, 4), "tree"), shares).item() == 0 and _sum(tree_of((0, 4), "rank"), shares).item() == 1
    halves = [torch.tensor([1 / 3], dtype=torch.bfloat16)] * 2
    assert _sum(tree_of((0, 2), "tree"), halves).dtype == torch.float32, "rounded once, after the last addition"
    assert _sum(0, halves) is halves[0], "a rank alone is pushed as it is"


def test_shares_go_up_once_all_of_the_pass_have_begun_to_go_down() -> None:
    """Another order on one rank than on its neighbour would mix up their moves."""
    import torch

    from covey.frameworks.torch import gpu_sums

    lab.load()
    order: list[str] = []

    def went_up(share: Any, bucket: Any, cut: Any) -> Any:
        order.append("went up")
        return bucket

    stream = torch.Stream(device="lab")
    sums: Any = SimpleNamespace(stream_of=lambda device: stream, went_up=went_up)
    begun: Any = SimpleNamespace(wait=lambda: order.append("waited for the pass"))
    bucket = torch.zeros(1, device="lab")
    future = torch.futures.Future(devices=[bucket.device])
    gpu_sums._Gathers(sums, bucket, cast(Any, None), begun, future).set_result(None)
    assert order == ["waited for the pass", "went up"] and future.wait() is bucket


class Agreed(NamedTuple):
    """A played job, of which this is rank 0 on a host with `members`."""

    members: tuple[int, int] | None = (0, 2)
    other: bool = True
    rank: int = 0
    world_size: int = 4
    order: Literal["tree", "rank"] = "tree"

    def neighbours(self) -> tuple[int, int] | None:
        return self.members

    def push_pull(self, name: str, rows: Any) -> Any:
        rows[1] = [1, 2, 3, 4, 5] if self.other else 0
        return rows


@pytest.mark.parametrize(
    ("job", "split", "why"),
    [
        (Agreed(None), False, "ranks of this host share no memory"),
        (Agreed((0, 1)), False, "no other rank of the job is on this host"),
        (
            Agreed((1, 3), rank=1, order="rank"),
            False,
            "no two of ranks 1 to 2 are added to each other first, in 'rank'",
        ),
        (Agreed((1, 3), rank=1), False, "no two of ranks 1 to 2 are added to each other first, in 'tree'"),
        (Agreed(), True, "'1.weight' is not on lab:0 as others are"),
        (Agreed(), False, "PyTorch has no backend that moves tensors between devices of type lab"),
        (Agreed(other=False), False, "rank 1 of this host cannot: its first lines say why"),
    ],
)
def test_ranks_that_cannot_add_on_their_devices_say_why(
    job: Agreed, split: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round in which they agree is made all the same: others wait for it."""
    import torch

    from covey.frameworks.torch import gpu_sums

    lab.load()
    if why.startswith("PyTorch has no backend"):
        monkeypatch.setattr(gpu_sums, "_backend", lambda device: "")  # other tests of this process register one
    if not job.other:
        monkeypatch.setattr(gpu_sums, "_backend", lambda device: "labccl")
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    first, second = torch.nn.Linear(2, 2, device="lab:0"), torch.nn.Linear(2, 2, device="lab:1" if split else "lab:0")
    assert gpu_sums.agreed(cast(Any, job), SimpleNamespace(module=torch.nn.Sequential(first, second)), "g") == why


def test_a_group_without_connections_is_said_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from covey.frameworks.torch import gpu_sums, group

    lab.load()
    monkeypatch.setattr(gpu_sums, "_backend", lambda device: "labccl")
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=group.TensorsGroup(0, 4)))
    found = gpu_sums.agreed(cast(Any, Agreed()), SimpleNamespace(module=torch.nn.Linear(2, 2, device="lab")), "g")
    assert found == "covey.torch.init_process_group() connects no GPUs"
