"""Stock PyTorch DDP scripts whose gradients Covey averages: real processes, a real aggregator (make check TORCH=1)."""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from covey import hooks as attach
from covey.job import this_job
from covey.tensors.numbers.peer_memory import myself
from covey.tensors.same_host.huge_pages import make_huge
from covey.wire.job import AggregatorAt
from plugins.facts import JobHooked, TensorsSeen
from tests.covey.agents import Agent
from tests.covey.forks import Fork, Forks
from tests.covey.hooks.torch_jobs import NEEDS_TORCH
from tests.plugins.aggregator.loopback import AggdThread

pytestmark = NEEDS_TORCH
EPOCH = 1 << 32
SCRIPT = """
import hashlib, sys, threading, time, types
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rank, world, store, kinds, steps, doors = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6], sys.argv[6]
torch.set_num_threads(1)
SHORT = {"bfloat16": torch.bfloat16, "float64": torch.float64}
class Model(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        self.sometimes, self.kind = torch.nn.Linear(64, 40_000 if kind == "large" else 64), kind
    def forward(self, x):
        x = self.layers(x.to(self.layers[0].weight.dtype))
        return self.sometimes(x) if self.kind != "unused" else x
def batch(rank, step):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * rank + step))
def told(model):
    whole = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    print("sha256", hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest(), flush=True)
def made(kind):
    torch.manual_seed(1)
    model = Model(kind)
    if kind in SHORT:
        model.to(SHORT[kind])
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
def alone(kind):  # the ranks one after another, in one process
    model, optimizer = made(kind)
    parameters = list(model.parameters())
    for step in range(int(steps)):
        found = []
        for each in range(world):
            model.zero_grad()
            model(batch(each, step)).square().mean().backward()
            found.append([p.grad.clone() for p in parameters])
        for at, p in enumerate(parameters):
            sums = [gradients[at].to(torch.promote_types(p.dtype, torch.float32)) for gradients in found]
            while len(sums) > 1:
                sums = [a + b for a, b in zip(sums[::2], sums[1::2])] + sums[len(sums) // 2 * 2:]
            p.grad = (sums[0] / world).to(p.dtype)
        optimizer.step()
    told(model)
def together(kind):
    model, optimizer = made(kind)
    ddp = DistributedDataParallel(
        model,
        bucket_cap_mb=25 if kind == "compiled" else 0.03,  # torch.compile refuses a small one
        find_unused_parameters=kind == "unused",
        gradient_as_bucket_view=kind == "views",
    )
    if kind == "own-hook":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    if doors == "covey":
        covey.torch.attach(ddp, types.SimpleNamespace(tensors=client, world_size=world))
    if kind == "attached" and doors == "gloo":  # by the script, also with submit --aggregate
        from covey.torch import attach
        attach(ddp)
    called = torch.compile(ddp, backend="eager") if kind == "compiled" else ddp
    for step in range(int(steps)):
        optimizer.zero_grad(set_to_none=kind != "views")
        if kind == "accumulated":
            with ddp.no_sync():
                ddp(batch(rank, 500 + step)).square().mean().backward()
        called(batch(rank, step)).square().mean().backward()
        optimizer.step()
        print("step", step, flush=True)
        if kind == "slowly":
            time.sleep(0.05)
    told(model)
    if kind == "large":
        import covey.tensors.same_host.lent_rounds as lent_rounds
        from covey.job.this_job import of_process
        ways = of_process().tensors._ways.values()
        print("lends", sum(bool(way._words[rank, lent_rounds.LENDS]) for way in ways if way and way._lent), flush=True)
if doors != "alone":
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
if doors == "covey":
    import covey.torch
    from covey.core.ids import HostId, JobId
    from covey.job.tensors import TensorClient
    from covey.wire.job import AggregatorAt
    client = TensorClient(JobId("j1"), rank, world, lambda epoch, why, table: None)
    def moved():
        for line in sys.stdin:
            epoch, address = line.split()
            client.moved(AggregatorAt(JobId("j1"), int(epoch), HostId("h1"), address, b"sixteen bytes !!"))
    threading.Thread(target=moved, daemon=True).start()
for kind in kinds.split(","):
    (alone if doors == "alone" else together)(kind)
if doors == "gloo":
    dist.destroy_process_group()  # its threads end the process (SIGABRT) now and then if nobody does
"""  # and with our doors it ends without a word: nobody closes anything


@pytest.fixture
def aggd(tmp_path: Path) -> Iterator[AggdThread]:
    running = AggdThread(tmp_path)
    yield running
    running.finish()


class Attached:
    """A rank that Covey attaches to by its environment: it has an interpreter of its own."""

    def __init__(self, env: Mapping[str, str], script: Path, words: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **env},
        )

    def wait(self) -> int:
        self._text, _ = self._process.communicate(timeout=100)
        return self._process.returncode

    def text(self) -> str:
        return self._text


class Script:
    """The processes of one run, forked, or with what `env` gives each rank attached to."""

    def __init__(
        self,
        forks: Forks,
        folder: Path,
        workers: int,
        kind: str,
        door: str,
        steps: int = 6,
        env: Callable[[int], Mapping[str, str]] | None = None,
    ) -> None:
        store = folder / f"store-{door}-{kind}"
        store.unlink(missing_ok=True)
        script = folder / "script.py"
        script.write_text(SCRIPT)
        words = [str(workers), str(store), kind, str(steps), door]
        ranks = range(1 if door == "alone" else workers)
        self._forked = [] if env is not None else [forks.run(script, rank, *words) for rank in ranks]
        attached = [] if env is None else [Attached(env(rank), script, [str(rank), *words]) for rank in ranks]
        self._ranks: list[Fork | Attached] = [*self._forked, *attached]

    def moved(self, at: AggregatorAt) -> None:
        for rank in self._forked:
            rank.say(f"{at.epoch} {at.address}")

    def until(self, step: int) -> None:
        self._forked[0].until(f"step {step}\n")

    def parameters(self) -> str:
        """The checksums that all ranks end with."""
        ended = [rank.wait() for rank in self._ranks]
        self.said = [rank.text() for rank in self._ranks]
        assert ended == [0] * len(ended), self.said
        (found,) = {" ".join(re.findall("sha256 (.*)", text)) for text in self.said}
        return found


KINDS = "plain,accumulated,unused,views"


def test_two_ranks_train_to_the_same_bits_as_with_gloo(forks: Forks, aggd: AggdThread, tmp_path: Path) -> None:
    """The script has buckets that are made anew after the first pass, `no_sync`, unused parameters and gradients as
    views of buckets, and its processes end without closing anything."""
    gloo = Script(forks, tmp_path, 2, KINDS, "gloo").parameters()
    ours = Script(forks, tmp_path, 2, KINDS, "covey")
    ours.moved(aggd.serve("j1", EPOCH + 1, 2))
    assert ours.parameters() == gloo
    assert len(set(gloo.split())) == 3, "a view of a bucket is trained as plainly as a gradient of its own"


@pytest.mark.long
def test_four_ranks_train_to_the_same_bits_as_one_process(forks: Forks, aggd: AggdThread, tmp_path: Path) -> None:
    """Models of 16 and of 64 bits are among them."""
    kinds = "plain,bfloat16,float64"
    ours = Script(forks, tmp_path, 4, kinds, "covey")
    ours.moved(aggd.serve("j1", EPOCH + 1, 4))
    found = ours.parameters()
    assert found == Script(forks, tmp_path, 4, kinds, "alone").parameters()
    assert len(set(found.split())) == 3


def test_an_aggregator_that_is_killed_in_a_backward_pass_changes_no_bit(forks: Forks, tmp_path: Path) -> None:
    running = AggdThread(tmp_path, control="1.sock")
    ours = Script(forks, tmp_path, 2, "slowly", "covey", steps=30)
    ours.moved(running.serve("j1", EPOCH + 1, 2))
    for epoch, step in ((2, 5), (3, 15)):
        ours.until(step)
        running.kill()
        running = AggdThread(tmp_path, control=f"{epoch}.sock")
        time.sleep(0.2)
        ours.moved(running.serve("j1", EPOCH + epoch, 2))
    assert ours.parameters() == Script(forks, tmp_path, 2, "plain", "alone", steps=30).parameters()
    running.finish()


WRONG = """
import torch, torch.distributed as dist
import covey.torch
dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).to(torch.complex64))
ddp = torch.nn.parallel.DistributedDataParallel(model)
covey.torch.attach(ddp)
"""


def test_gradients_that_cannot_be_averaged_are_named(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WRONG.format(store=tmp_path / "store"))
    wrong = forks.run(script)
    assert wrong.wait() == 1
    named = "gradients of '1.weight' are complex64 on cpu; Covey averages dense float32, float64, float16, bfloat16 in"
    assert f"{named} host memory or on an accelerator" in wrong.text()


@pytest.mark.parametrize(
    ("kind", "by"),
    [
        ("large,attached", "gradients averaged by Covey"),
        pytest.param("compiled,plain", "gradients averaged by Covey", marks=pytest.mark.long),
        pytest.param("plain", "gradients averaged by Covey", marks=pytest.mark.long),
        pytest.param("own-hook", "gradients averaged by DDP itself (register_comm_hook", marks=pytest.mark.long),
    ],
)
async def test_a_stock_script_is_averaged_by_covey_if_it_is_asked_for(
    forks: Forks, agent: Agent, tmp_path: Path, kind: str, by: str
) -> None:
    """With `submit --aggregate` the script has no line about Covey. Both ranks are on one host: no aggregator."""
    root = str(Path(__file__).parents[2])

    def env(rank: int) -> Mapping[str, str]:
        path = os.pathsep.join((attach.SITE, root))
        return {**agent.environ(COVEY_RANK=str(rank)), "COVEY_AGGREGATE": "1", "PYTHONPATH": path}

    script = Script(forks, tmp_path, 2, kind, "gloo", env=env)
    attached = await asyncio.to_thread(script.parameters)
    alone = Script(forks, tmp_path, 2, "plain" if kind == "own-hook" else kind, "alone")
    assert attached == await asyncio.to_thread(alone.parameters)
    if kind == "large,attached" and make_huge(np.ones(10_000_000, np.float32)) and myself().is_there:
        assert all("lends 1\n" in said for said in script.said), "a tensor of 10 MB stays where it is"
    told = [fact.to for fact in agent.facts if isinstance(fact, JobHooked) and not fact.problem]
    assert any(by in to for to in told), told
    assert any("averaged by DDP itself" in to for to in told) == ("DDP itself" in by), told
    assert any(isinstance(fact, TensorsSeen) for fact in agent.facts) == (kind != "own-hook")


class ModelOf:
    """The part of a DistributedDataParallel that `attach` uses."""

    def __init__(self, ranks: int) -> None:
        self.module = SimpleNamespace(named_parameters=list, named_modules=list, parameters=list, buffers=list)
        self.process_group = SimpleNamespace(size=lambda: ranks)

    def register_comm_hook(self, state: object, hook: object) -> None: ...

    def register_forward_pre_hook(self, hook: object) -> None: ...


async def test_models_of_one_process_share_its_connection(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two connections of one rank would replace each other at an aggregator."""
    import covey.torch

    for name, value in agent.environ(COVEY_RANK="0").items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        await asyncio.to_thread(covey.torch.attach, ModelOf(2))
    assert agent.socket.counters["joined"] == 1
    await asyncio.to_thread(this_job.of_process().close)


async def test_ranks_that_torchrun_started_are_not_averaged_one_by_one(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four processes run under one worker of the job: each would be the only rank."""
    import covey.torch

    for name, value in agent.environ(COVEY_RANK="0", COVEY_WORLD_SIZE="1").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"DDP has 4 ranks, and this job has 1.*--workers 4, without torchrun"):
        await asyncio.to_thread(covey.torch.attach, ModelOf(4))
    await asyncio.to_thread(this_job.of_process().close)
