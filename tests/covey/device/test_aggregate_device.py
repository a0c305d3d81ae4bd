"""Scripts on a device that do not import `covey`, as `submit --aggregate` runs them: the bits of one process."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from covey import hooks as attach
from plugins.facts import JobHooked, TensorsSeen
from tests.covey.agents import Agent
from tests.covey.device import lab
from tests.covey.hooks.torch_jobs import NEEDS_TORCH

pytestmark = [
    *NEEDS_TORCH,
    pytest.mark.xdist_group("lab"),
    pytest.mark.skipif(lab.compiler() is None, reason="there is no C++ compiler"),
]
ROOT = Path(__file__).parents[3]
SCRIPT = """
import hashlib, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.covey.device import lab, labccl
rank, ranks, store = int(sys.argv[1]), 2, sys.argv[2]
torch.set_num_threads(1)
lab.load()
labccl.register()
def made():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    model.to("lab:0")
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
def batch(rank, step):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * rank + step)).to("lab:0")
model, optimizer = made()
if store == "alone":
    parameters = list(model.parameters())
    for step in range(4):
        each = []
        for one in range(ranks):
            model.zero_grad()
            model(batch(one, step)).square().mean().backward()
            each.append([p.grad.clone() for p in parameters])
        for p, a, b in zip(parameters, *each):
            p.grad = (a + b) / ranks
        optimizer.step()
else:
    dist.init_process_group("labccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
    for step in range(4):
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
whole = torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()])
print("sha256", hashlib.sha256(whole.numpy().tobytes()).hexdigest())
"""


@pytest.mark.parametrize(
    ("devices", "way"),
    [
        ("", "gradients averaged by Covey, added on GPUs of ranks 0 to 1 (labccl)"),
        pytest.param(
            "one",
            "gradients averaged by Covey, copied from each GPU: ranks 0 and 1 share a GPU, which labccl refuses",
            marks=pytest.mark.long,
        ),
    ],
)
async def test_a_stock_script_on_a_device_is_averaged_by_covey(
    agent: Agent, tmp_path: Path, devices: str, way: str
) -> None:
    """`agentctl job` shows which way its gradients go. Memory is shared where they come down, and not where they do
    not."""
    await asyncio.to_thread(lab.library)  # else each process compiles it within its time
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def env(rank: int) -> dict[str, str]:
        path = os.pathsep.join((attach.SITE, str(ROOT)))
        of = {"COVEY_AGGREGATE": "1", "PYTHONPATH": path, lab.UUID: devices or f"of rank {rank}"}
        return {**os.environ, **agent.environ(COVEY_RANK=str(rank)), **of}

    def started(rank: int, store: Path | str, environ: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(script), str(rank), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )

    alone = started(0, "alone", {**os.environ, "PYTHONPATH": str(ROOT)})
    each = [started(rank, tmp_path / "store", env(rank)) for rank in range(2)]
    ended = [await asyncio.to_thread(process.communicate, timeout=100) for process in (*each, alone)]
    assert [process.returncode for process in (*each, alone)] == [0] * 3, ended
    assert len({out for out, _ in ended}) == 1, ended
    told = [fact.to for fact in agent.facts if isinstance(fact, JobHooked) and not fact.problem]
    assert any(way in to for to in told), told
    assert any(isinstance(fact, TensorsSeen) for fact in agent.facts)
