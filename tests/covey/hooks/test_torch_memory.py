"""Memory limits on real PyTorch: the same bits, whatever is in host memory
(`covey/hooks/frameworks/torch_memory.py`)."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from covey.hooks.limits.device_memory import Used
from covey.kernel.pages import RankLimits
from tests.agent.here import until
from tests.covey.agents import Agent
from tests.covey.hooks.torch_jobs import NEEDS_TORCH, running
from tests.families import in_gate

pytestmark = NEEDS_TORCH
ROOT = Path(__file__).parents[3]
TRAINS = """
import hashlib, json, sys
import torch
from covey.hooks.frameworks.torch_memory import TorchMemory
torch.set_num_threads(1)

def conv():
    layers = [torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Flatten()]
    layers += [torch.nn.Linear(4096, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)]
    return torch.nn.Sequential(*layers), (8, 3, 16, 16)

def transformer():
    layers = [torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2)]
    return torch.nn.Sequential(*layers), (8, 32, 64)

def trained(limits, model="conv", compiled=False, made=torch.optim.Adam, steps=10):
    torch.manual_seed(3)
    net, shape = {"conv": conv, "transformer": transformer}[model]()
    xs = torch.randn(steps, *shape)
    o, memory = made(net.parameters(), 1e-3), TorchMemory()
    forward = torch.compile(net, backend="aot_eager") if compiled else net
    memory.uses(o)
    losses, used = [], []
    for at, x in enumerate(xs):
        def closure():
            o.zero_grad(); loss = forward(x).square().mean(); loss.backward()
            return loss
        losses.append(float(o.step(closure)))
        used.append(memory.ended())
        if at in limits:
            memory.apply(limits[at])
    memory.apply(0)
    memory.ended()
    bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters()) + repr(losses).encode()
    figures = [[u.peak_bytes, u.stable_bytes, u.spill_bytes, u.retries] for u in used]
    return hashlib.sha256(bits).hexdigest(), figures

def tell(**found):
    print(json.dumps(found))
"""


def script(code: str) -> Any:
    """The JSON that a script tells."""
    path = {"PATH": os.environ["PATH"], "HOME": "/tmp", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TRAINS + code], env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@cache
def under_limits(model: str, compiled: bool) -> Any:
    return script(f"""
bits, used = trained({{}}, "{model}", {compiled})
demand = max(peak for peak, *_ in used)
limited = {{share: trained({{2: int(demand * share)}}, "{model}", {compiled}) for share in (0.9, 0.6, 0.3, 0.001)}}
turns = {{0: demand // 2, 2: demand // 5, 4: 2 * demand, 5: 100, 7: 0}}
tell(bits=bits, used=used, demand=demand, limited=limited, turns=trained(turns, "{model}", {compiled}))
""")


@pytest.mark.parametrize(
    ("model", "compiled"),
    [
        pytest.param("conv", False, id="conv-eager", marks=pytest.mark.long),
        pytest.param("conv", True, id="conv-compiled", marks=pytest.mark.long),
        pytest.param("transformer", False, id="transformer-eager"),
        pytest.param("transformer", True, id="transformer-compiled", marks=pytest.mark.long),
    ],
)
def test_losses_and_parameters_are_the_same_bits_under_any_limit(model: str, compiled: bool) -> None:
    """The limit also changes between mini-batches, and may be less than a single tensor. Reference: §3.1.1."""
    told = under_limits(model, compiled)
    assert {bits for bits, _ in told["limited"].values()} | {told["turns"][0]} == {told["bits"]}


@pytest.mark.parametrize("model", in_gate(1, ["conv", "transformer"]))
def test_what_does_not_fit_is_counted_in_host_memory(model: str) -> None:
    told = under_limits(model, False)
    _, stable_bytes, spill_bytes, retries = told["used"][-1]
    assert 0 < stable_bytes < told["demand"] and (spill_bytes, retries) == (0, 0)
    for share, (_, used) in told["limited"].items():
        limit_bytes = told["demand"] * float(share)
        peak_bytes, _, spill_bytes, retries = used[-1]
        assert peak_bytes <= max(limit_bytes, stable_bytes) + 4096, "but for tensors of less than a page"
        missing_bytes = told["demand"] - max(limit_bytes, stable_bytes)
        assert missing_bytes / 2 < spill_bytes < told["demand"] and retries > 0
    assert told["turns"][1][-1][0] == told["demand"] and told["turns"][1][-1][2] == 0, "all of it is back"


def test_a_tensor_larger_than_the_limit_is_moved_at_each_mini_batch() -> None:
    """The memory that stays on the device is then far below the limit, but not the memory that is needed."""
    told = script("""
conv = lambda: (torch.nn.Sequential(torch.nn.Linear(1, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)), (5000, 1))
bits, used = trained({}, steps=20)
demand = max(peak for peak, *_ in used)
limited, after = trained({2: 3 * demand // 4}, steps=20)
tell(same=bits == limited, demand=demand, after=after[3:])
""")
    assert told["same"]
    assert all(peak < told["demand"] // 2 < spill for peak, _, spill, _ in told["after"])


@pytest.mark.long
def test_other_optimizers_train_the_same() -> None:
    told = script("""
import functools
adamw, lbfgs = functools.partial(torch.optim.AdamW, fused=True), functools.partial(torch.optim.LBFGS, max_iter=3)
kinds = [torch.optim.SGD, adamw, lbfgs]
tell(kinds=[trained({2: 100000}, made=kind)[0] == trained({}, made=kind)[0] for kind in kinds])
""")
    assert told["kinds"] == [True, True, True]


def test_hooks_of_the_script_and_ours_do_not_meet() -> None:
    told = script("""
from torch import _C
top = lambda: _C._autograd._top_saved_tensors_default_hooks(False)
memory = TorchMemory()
memory.apply(1000)
gradient = torch.func.grad(lambda x: (x * x).sum())(torch.ones(3)).tolist()
after = top() is not None
with torch.autograd.graph.save_on_cpu():
    x = torch.ones(3000, requires_grad=True)
    y = (x * x).sum()
    mine = top()
    for limit in (500, 0, 700, 0): memory.apply(limit); memory.ended()
    kept = top() == mine
y.backward()
for _ in range(3): memory.ended()
tell(gradient=gradient, after=after, kept=kept, x=x.grad.sum().item(), left=top() is None)
""")
    assert told == {"gradient": [2.0, 2.0, 2.0], "after": True, "kept": True, "x": 6000.0, "left": True}


def test_tensors_of_any_shape_come_back_as_they_were() -> None:
    told = script("""
from covey.hooks.frameworks.torch_memory import in_host_memory, to_device
whole = torch.randn(64, 48)
views = [whole, whole.t(), whole[:, 3:17], whole[::2, ::3], whole.reshape(4, 4, 12, 16).permute(2, 0, 3, 1), whole[5],
         torch.randn(8, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(5) > 0, torch.tensor(3.0)]
def same(view):
    back = to_device(in_host_memory(view), view.device)
    return torch.equal(back, view) and back.stride() == view.stride() and back.data_ptr() != view.data_ptr()
tell(same=[same(view) for view in views], overlapping=in_host_memory(whole[:1].expand(9, 48)))
""")
    assert all(told["same"]) and told["overlapping"] is None


LIMITED = """
for at in range(100000): step(); time.sleep(0.002)
"""


async def test_an_agent_changes_the_memory_of_a_running_rank(agent: Agent) -> None:
    """The limit is acknowledged once it is in force, at the end of a mini-batch. Reference: §3.1.1."""
    async with running(agent, "o = torch.optim.Adam(model.parameters())\n" + LIMITED) as rank:
        await until(lambda: (rank.acked() == 0) and newest(rank.pages).peak_bytes > 0, 60)
        demand_bytes = newest(rank.pages).peak_bytes
        assert newest(rank.pages).spill_bytes == 0
        await rank.obeyed(RankLimits(1, memory_bytes=demand_bytes // 2))
        await until(lambda: rank.acked() == 1 and newest(rank.pages).spill_bytes > 0)
        assert newest(rank.pages).memory_limit_bytes == demand_bytes // 2
        assert newest(rank.pages).peak_bytes <= max(demand_bytes // 2, newest(rank.pages).stable_bytes) + 4096
        await rank.obeyed(RankLimits(2))
        await until(lambda: rank.acked() == 2 and newest(rank.pages).spill_bytes == 0)


def newest(pages: Any) -> Any:
    return pages.report.newest


class Allocator:
    """The memory of a GPU, as the limits of a script use it."""

    wanted_bytes, retries = 4000, 3

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.holds, self.records = True, False

    def ended(self) -> Used:
        return Used(allocated_peak=5000, reserved_peak=6000, allocated=700, reserved=3000, pool=2000)

    def recording(self) -> bool:
        return self.records

    def ready(self, limit_bytes: int) -> bool:
        return not self.records

    def hold(self, limit_bytes: int, moved_bytes: int) -> bool:
        assert moved_bytes >= 0
        self.calls.append(("hold", limit_bytes))
        return self.holds

    def lift(self) -> None:
        self.calls.append(("lift", 0))

    def lies_in_host_memory(self, tensor: Any) -> bool:
        return True


def test_on_a_gpu_its_allocator_keeps_the_limit_and_says_what_was_used() -> None:
    import torch

    from covey.hooks.frameworks.torch_memory import TorchMemory

    allocator: Any = Allocator()
    memory = TorchMemory(lambda: allocator)
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.Adam([weight])
    memory.uses(optimizer)
    weight.sum().backward()
    optimizer.step()
    used = memory.ended()
    assert (used.peak_bytes, used.stable_bytes, used.retries) == (4000, 700, 3)
    assert used.spill_bytes >= 1000, "what the device never had was in the pool"
    allocator.holds = False
    assert memory.apply(900) is False
    allocator.holds = True
    assert memory.apply(900) is True
    state = optimizer.state[weight]["exp_avg"]
    bits = state.clone()
    assert memory.apply(0) is True
    assert allocator.calls == [("hold", 900), ("hold", 900), ("lift", 0)]
    allocator.records = True
    assert memory.ended() == used and memory.apply(900) is False, "in a graph that is recorded nothing is done"
    assert allocator.calls[-1] == ("lift", 0) and memory.states.away_bytes() == 0
    kept = state.data
    memory.states.settle(allocator.lies_in_host_memory)
    assert state.data_ptr() != kept.data_ptr() and torch.equal(state, bits), "it is on the device again"
