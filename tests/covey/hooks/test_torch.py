"""Real PyTorch scripts without a line about Covey, seen by an agent's socket (`make check TORCH=1`)."""

import pytest

from covey.core.errors import CoveyError
from plugins.facts import JobHooked, StepTimed
from tests.covey.agents import Agent
from tests.covey.hooks import plain_scripts
from tests.covey.hooks.plain_scripts import WITHOUT_COMPILER, printed
from tests.covey.hooks.torch_jobs import NEEDS_TORCH
from tests.families import in_gate

pytestmark = NEEDS_TORCH
HEAD = """
import time, torch
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Linear(8, 8)
def loss(x):
    return model(x).square().sum()
def ended():
    time.sleep(0.15)  # a step is told every tenth of a second
"""
PLAIN = """
o = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(15):
    o.zero_grad(); loss(torch.randn(4, 8)).backward(); o.step(); ended()
"""
LOADER = """
from torch.utils.data import DataLoader, TensorDataset
class Slow(TensorDataset):
    def __getitem__(self, at):
        time.sleep(0.02)
        return super().__getitem__(at)
o = torch.optim.AdamW(model.parameters())
for (x,) in DataLoader(Slow(torch.randn(60, 8)), batch_size=4):
    o.zero_grad(); loss(x).backward(); o.step(); ended()
"""
BY_HAND = """
from torch.utils.data import DataLoader, TensorDataset
for (x,) in DataLoader(TensorDataset(torch.randn(100, 8)), batch_size=4):
    model.zero_grad(); loss(x).backward()
    with torch.no_grad():
        for p in model.parameters(): p -= 0.01 * p.grad
    ended()
"""
TWO = """
a = torch.optim.SGD([model.weight], 0.01); b = torch.optim.SGD([model.bias], 0.01)
for _ in range(15):
    a.zero_grad(); b.zero_grad(); loss(torch.randn(4, 8)).backward(); a.step(); b.step(); ended()
"""
IN_BACKWARD = """
each = {p: torch.optim.SGD([p], 0.01) for p in model.parameters()}
def step(p):
    each[p].step(); each[p].zero_grad()
for p in model.parameters(): p.register_post_accumulate_grad_hook(step)
for _ in range(15):
    loss(torch.randn(4, 8)).backward(); ended()
"""
ACCUMULATED = """
o = torch.optim.SGD(model.parameters(), 0.01)
for at in range(60):
    loss(torch.randn(4, 8)).backward(); time.sleep(0.04)
    if at % 4 == 3: o.step(); o.zero_grad()
"""
CLOSURE = """
o = torch.optim.LBFGS(model.parameters(), max_iter=3)
x = torch.randn(4, 8)
def closure():
    o.zero_grad(); l = loss(x); l.backward(); return l
for _ in range(15): o.step(closure); ended()
"""
SKIPPED = """
o = torch.optim.SGD(model.parameters(), 0.01)
scaler = torch.amp.GradScaler("cpu")
for at in range(15):
    o.zero_grad(); l = loss(torch.randn(4, 8)) * (float("inf") if at % 3 == 0 else 1.0)
    scaler.scale(l).backward(); scaler.step(o); scaler.update(); ended()
"""
REPLACED = """
for _ in range(3):
    o = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(5): o.zero_grad(); loss(torch.randn(4, 8)).backward(); o.step(); ended()
"""
MONKEYPATCHED = """
one_step = torch.optim.SGD.step
def step(self, closure=None): return one_step(self, closure)
torch.optim.SGD(model.parameters(), 0.01)
torch.optim.SGD.step = step
o = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(15): o.zero_grad(); loss(torch.randn(4, 8)).backward(); o.step(); ended()
"""
TRACED = (
    """
import sys
def traced(frame, event, arg): return traced
sys.settrace(traced)
"""
    + PLAIN
)
THREADS = """
import threading
def train(at):
    o = torch.optim.SGD([p.detach().clone().requires_grad_() for p in model.parameters()], 0.01)
    for _ in range(15):
        for p in o.param_groups[0]["params"]: p.grad = torch.ones_like(p)
        o.step(); ended()
threads = [threading.Thread(target=train, args=(at,)) for at in range(4)]
for t in threads: t.start()
for t in threads: t.join()
"""
FORKED = """
import os
o = torch.optim.SGD(model.parameters(), 0.01)
def train(steps, pause_s):
    for _ in range(steps): o.zero_grad(); loss(torch.randn(4, 8)).backward(); o.step(); time.sleep(pause_s)
train(5, 0.15)
child = os.fork()
train(10, 0.15 if child else 0.4)
if child: os.waitpid(child, 0)
else: os._exit(0)
"""
EVALUATES = """
from torch.utils.data import DataLoader, TensorDataset
with torch.no_grad():
    for (x,) in DataLoader(TensorDataset(torch.randn(100, 8)), batch_size=4): loss(x)
ended()
"""
SAYS_ITSELF = """
import covey
o = torch.optim.SGD(model.parameters(), 0.01)
with covey.join() as job:
    for at in range(15):
        o.zero_grad(); loss(torch.randn(4, 8)).backward(); o.step(); job.step(100 + at); ended()
"""


async def trained(agent: Agent, script: str, **environ: str) -> list[StepTimed]:
    return await plain_scripts.trained(agent, WITHOUT_COMPILER + HEAD + script, "-W", "error", **environ)


@pytest.mark.parametrize(
    ("script", "count", "boundary"),
    [
        pytest.param(PLAIN, 15, "optimizer", id="plain"),
        pytest.param(LOADER, 15, "optimizer", id="loader", marks=pytest.mark.long),
        pytest.param(TWO, 15, "optimizer", id="two-optimizers", marks=pytest.mark.long),
        pytest.param(IN_BACKWARD, 15, "optimizer", id="in-backward", marks=pytest.mark.long),
        pytest.param(ACCUMULATED, 15, "optimizer", id="accumulated"),
        pytest.param(CLOSURE, 15, "optimizer", id="closure", marks=pytest.mark.long),
        pytest.param(SKIPPED, 15, "optimizer", id="scaler-skips", marks=pytest.mark.long),
        pytest.param(REPLACED, 15, "optimizer", id="replaced", marks=pytest.mark.long),
        pytest.param(MONKEYPATCHED, 15, "optimizer", id="monkeypatched", marks=pytest.mark.long),
        pytest.param(TRACED, 15, "optimizer", id="traced", marks=pytest.mark.long),
        pytest.param(THREADS, 15, "optimizer", id="threads", marks=pytest.mark.long),
        pytest.param(BY_HAND, 17, "data loader", id="no-optimizer"),
    ],
)
async def test_a_mini_batch_is_a_step_however_it_is_written(
    agent: Agent, script: str, count: int, boundary: str
) -> None:
    steps = await trained(agent, script)
    assert {step.boundary for step in steps} == {boundary}
    assert [step.step for step in steps] == sorted({step.step for step in steps}), "each is told once"
    assert steps[-1].step == count - 1 and len(steps) >= count - 5
    assert all(0.02 < step.step_s < 30 and step.memory_bytes > 10 << 20 for step in steps)
    attached = [fact for fact in agent.facts if isinstance(fact, JobHooked)]
    assert [(fact.to[:6], fact.problem) for fact in attached] == [("torch ", "")]


async def test_waiting_for_input_is_told_apart(agent: Agent) -> None:
    steps = await trained(agent, LOADER)
    assert all(0.07 < step.input_s <= step.step_s for step in steps), "four items of 20 ms"


@pytest.mark.long
async def test_of_a_script_that_forks_one_process_counts(agent: Agent) -> None:
    steps = await trained(agent, FORKED)
    numbers = [step.step for step in steps]
    assert agent.socket.counters["steps_of_others"] > 0
    assert numbers == sorted(set(numbers)) and all(step.step_s < 0.4 for step in steps)


@pytest.mark.parametrize("script", in_gate(1, [EVALUATES, ""]), ids=["evaluates", "ends at once"])
async def test_what_trains_nothing_has_no_steps(agent: Agent, script: str) -> None:
    assert await trained(agent, script) == []


@pytest.mark.long
async def test_a_script_that_says_its_steps_is_believed(agent: Agent) -> None:
    steps = await trained(agent, SAYS_ITSELF)
    assert {step.boundary for step in steps if step.step >= 100} == {"script"}
    assert [step.step for step in steps if step.step >= 100] == list(range(100, 115))
    assert len([step for step in steps if step.step < 100]) <= 1, "at most the one before the first word"


async def test_a_script_that_only_joins_is_seen_without_our_folder(agent: Agent) -> None:
    steps = await trained(agent, "import covey\njob = covey.join()\n" + PLAIN, PYTHONPATH="")
    assert {step.boundary for step in steps} == {"optimizer"} and steps[-1].step == 14


async def test_an_agent_that_refuses_costs_the_script_nothing(agent: Agent) -> None:
    assert await trained(agent, PLAIN, COVEY_TOKEN="wrong") == []


async def test_results_are_the_same_bits_with_hooks_and_without(agent: Agent) -> None:
    show = "print(model.weight.double().sum().item(), flush=True)"
    assert await printed(agent, HEAD + PLAIN + show, True) == await printed(agent, HEAD + PLAIN + show, False)


@pytest.mark.parametrize(("given", "refused"), [({}, True), ({"world_size": 16}, True), ({"world_size": 1}, False)])
def test_an_elastic_job_is_told_at_once_that_a_process_group_would_wait_for_ever(
    given: dict[str, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from covey.hooks.frameworks.torch_hooks import for_elastic

    made = list[int]()

    def init_process_group(backend: str | None = None, world_size: int = -1) -> None:
        made.append(world_size)

    monkeypatch.setenv("WORLD_SIZE", "16")
    if refused:
        with pytest.raises(CoveyError, match="16 ranks can be made in this job") as error:
            for_elastic(init_process_group)("gloo", **given)
        assert "elastic=True" in str(error.value.next) and not made
    else:
        for_elastic(init_process_group)("gloo", **given)
        assert made == [1]


def test_waits_for_collectives_are_those_of_the_newest_step() -> None:
    from covey.hooks.frameworks.torch_hooks import DdpFigures

    figures = DdpFigures()
    figures.step_ends()
    assert figures.communicate_s() is None, "a script without ranks"
    figures.waited_s += 0.5
    figures.step_ends()
    assert figures.communicate_s() == 0.5
    figures.step_ends()
    assert figures.communicate_s() == 0.0
