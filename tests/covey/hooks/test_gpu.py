"""Tests on a real GPU (`make gpu-check`): memory limits with the same bits, the flag at the end of the stream, a queue
that ends soon after its rank is stopped, suspension by the driver. Skipped where there is no GPU."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from covey.core.units import GIB, MIB
from covey.kernel.pages import FlagReader, RankLimits
from tests.agent.ports.devices.rigs import has_gpu
from tests.covey.agents import Agent
from tests.covey.hooks.torch_jobs import gate_folder, running

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not has_gpu():
        pytest.skip("PyTorch finds no CUDA device here: nothing of a GPU was tried")


pytestmark = pytest.mark.gpu

TRAINS = """
import json, sys
import torch
from covey.hooks.gate.build import TorchBuild, cache_folder, found
from covey.hooks.limits.device_memory import on_device
from covey.hooks.frameworks.torch_cuda import TorchGpu
from covey.hooks.frameworks.torch_memory import TorchMemory
torch.use_deterministic_algorithms(True)
MIB = 1 << 20
told = []

def rank():
    gpu = TorchGpu(found(TorchBuild.of(torch), cache_folder()), lambda error: told.append(str(error)))
    return gpu, TorchMemory(gpu.memory)

def trained(limits, steps=12):
    torch.manual_seed(3)
    net = torch.nn.Sequential(*[layer for _ in range(12) for layer in (torch.nn.Linear(2048, 2048), torch.nn.GELU())])
    net, xs = net.cuda(), torch.randn(steps, 4096, 2048).cuda()
    o = torch.optim.Adam(net.parameters(), 1e-4)
    gpu, memory = rank()
    memory.uses(o)
    losses, used, held, at_limit = [], [], [], 0
    for at, x in enumerate(xs):
        o.zero_grad(); loss = net(x).square().mean(); loss.backward(); o.step()
        losses.append(loss.item())
        used.append(memory.ended())
        if at in limits:
            at_limit = int(limits[at] * used[0].peak_bytes)
            held.append(memory.apply(at_limit))
    memory.apply(0)
    peaks = [one.peak_bytes for one in used]
    return losses, peaks, [one.spill_bytes for one in used], held, used[0].peak_bytes
"""


def tried(script: str) -> Any:
    """The JSON that the script prints in a process of its own."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    gate_folder()
    done = subprocess.run(
        [sys.executable, "-c", TRAINS + script], env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_losses_are_the_same_bits_under_limits_that_change() -> None:
    """The limits are 90, 60 and 45 % of the memory that the script wants, and 90 % again; parameters and gradients
    stay. Reference: §3.1.1, table 2."""
    found = tried(
        "free, *_ = trained({})\n"
        "limits = {3: .9, 5: .6, 7: .45, 9: .9}\n"
        "losses, peaks, spills, held, whole = trained(limits)\n"
        "found = dict(free=free, losses=losses, peaks=peaks, spills=spills, held=held, whole=whole, told=told)\n"
        "print(json.dumps(found))"
    )
    assert found["losses"] == found["free"] and found["told"] == [] and all(found["held"])
    shares = [peak / found["whole"] for peak in found["peaks"]]
    assert max(shares[4:6]) <= 0.9 and max(shares[6:8]) <= 0.6 and max(shares[8:10]) <= 0.45, shares
    assert all(spill > 0 for spill in found["spills"][6:10])


def test_more_than_the_limit_within_a_step_lands_in_host_memory_and_does_not_fail() -> None:
    """Tensors that are not saved cannot be moved: the allocator finds them a place. Reference: §3.1.1."""
    found = tried(
        "gpu, memory = rank()\n"
        "def step():\n"
        "    held = [torch.full((64 * MIB,), at, dtype=torch.uint8, device='cuda') for at in range(16)]\n"
        "    total = sum(int(one.sum(dtype=torch.int64)) for one in held)\n"
        "    del held\n"
        "    return total, memory.ended()\n"
        "step(); whole, free = step()\n"
        "held = memory.apply(256 * MIB)\n"
        "under, used = step()\n"
        "memory.apply(0); torch.cuda.empty_cache(); after, _ = step()\n"
        "print(json.dumps(dict(sums=[whole, under, after], peaks=[free.peak_bytes, used.peak_bytes],\n"
        "      spill=used.spill_bytes, held=held, told=told)))"
    )
    assert found["held"] and found["told"] == [] and len(set(found["sums"])) == 1
    assert found["peaks"][0] >= GIB and found["peaks"][1] <= 256 * MIB and found["spill"] >= 768 * MIB


def test_a_rank_with_graphs_says_that_it_cannot_shrink() -> None:
    found = tried(
        "gpu, memory = rank()\n"
        "gpu.graphs.install()\n"
        "x = torch.ones(1024, device='cuda'); y = x + 1\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph): y = x + 1\n"
        "graph.replay(); torch.cuda.synchronize()\n"
        "memory.ended()\n"
        "print(json.dumps(dict(held=memory.apply(512 * MIB), told=told, y=float(y.sum()))))"
    )
    assert not found["held"] and "graphs" in found["told"][0] and found["y"] == 2048


BUSY = """
import os, time, torch
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 1 << 20
    def __getitem__(self, at):
        time.sleep(float(os.environ.get("WAITS", 0)))
        return torch.ones(256)
net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).cuda()
o = torch.optim.SGD(net.parameters(), 1e-3)
for batch in DataLoader(Slow(), batch_size=1):
    o.zero_grad(); x = batch.cuda()
    torch.cuda._sleep(int(2e6 * float(os.environ.get("MS", 1))))
    net(x).sum().backward(); o.step()
"""


async def test_the_flag_is_down_while_the_rank_waits_for_input_and_up_while_it_works(agent: Agent) -> None:
    async with running(agent, BUSY, COVEY_GATE=str(gate_folder()), WAITS="0.03", MS="10") as rank:
        rank.obey(RankLimits(1, guaranteed=True))
        await asyncio.sleep(5)
        share = await asyncio.to_thread(idle_share, rank.flag())
    assert 0.3 < share < 0.95, share


def idle_share(flag: FlagReader) -> float:
    looks = []
    end_s = time.monotonic() + 3
    while time.monotonic() < end_s:
        looks.append(flag.busy() is False)
        time.sleep(0.0005)
    return sum(looks) / len(looks)


async def test_a_stopped_rank_leaves_the_device_within_a_tenth_of_a_second(agent: Agent) -> None:
    """The rank's queue is bounded. Reference: §3.1.2."""
    async with running(agent, BUSY, COVEY_GATE=str(gate_folder()), MS="1") as rank:
        await asyncio.sleep(5)
        await rank.obeyed(RankLimits(1, idle=0.5, busy=0.5, failsafe=0.1, lease_ns=time.monotonic_ns() + 60 * 10**9))
        await asyncio.sleep(1)
        before = (await rank.batches()).batches[-1].number
        await rank.obeyed(RankLimits(2, idle=0.0, busy=0.0, failsafe=0.1, lease_ns=time.monotonic_ns() + 60 * 10**9))
        await asyncio.sleep(0.1)
        assert await rank.used(0.5) < 0.1
        rank.obey(RankLimits(3))
        after = (await rank.batches()).batches[-1].number
        assert after - before < 200
