"""PyTorch scripts without a line about Covey take turns to compute: real processes, on a page of this test."""

import asyncio
import itertools
import signal
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from covey.tensors.turns.page import AT, LOST, TURNS
from covey.tensors.turns.rules import HOLDS, WAITS
from tests.agent.here import here, until
from tests.covey.agents import Agent
from tests.covey.hooks.torch_jobs import NEEDS_TORCH, WHOLE_HEAD, TorchRank, gate_folder, running
from tests.covey.hooks.turns_host import TELL, Host, both_computed, changes, one_at_a_time
from tests.families import in_gate

pytestmark = NEEDS_TORCH
TELLS = (
    TELL
    + """
def batch(seconds=0.02):
    model[0](x)
    tell("begins"); work(seconds); tell("ends")
    o.zero_grad(); o.step()
def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end: model(x).square().mean().backward()
"""
)
TRAINS = TELLS + "while True: batch()"
SLEEPS = (
    TELLS
    + """
while True:
    batch(); x + 0
    tell("sleeps"); time.sleep(0.7); tell("woke")
"""
)


@pytest.fixture
async def host(agent: Agent, tmp_path: Path) -> AsyncIterator[Host]:
    made = Host(agent, tmp_path)
    yield made
    await made.close()


@pytest.mark.long
@pytest.mark.parametrize("built", in_gate(1, [True, False]), ids=["operators", "modules"])
async def test_two_scripts_that_only_have_hooks_compute_in_turns(host: Host, built: bool) -> None:
    """A host runs one COMP at a time, also of scripts that push nothing. Reference: §4.3.1."""
    for slot in range(2):
        await host.run(slot, TRAINS, **({} if built else {"COVEY_GATE": "/nonexistent"}))
    first, second = await both_computed(host)
    assert one_at_a_time(first, second), (first, second)
    assert changes(first, second) > 10, "each has to wait for long"


@pytest.mark.long
async def test_while_one_script_waits_another_computes(host: Host) -> None:
    """It sleeps for less than a second, after which a turn that is not used would be lost anyhow."""
    for slot, script in enumerate([SLEEPS, TRAINS]):
        await host.run(slot, script)
    await until(lambda: host.doing(HOLDS) and host.told(1), 20)
    since_s = time.monotonic() + 1.0

    def sleeps() -> list[tuple[float, float]]:
        return [span for span in host.spans(0, "sleeps", "woke") if span[0] > since_s]

    await until(lambda: len(sleeps()) >= 4, 60)
    within = [sum(a + 0.35 < begins_s < b for begins_s, _ in host.spans(1)) for a, b in sleeps()]
    assert sum(map(bool, within)) >= 3, (within, sleeps(), host.spans(1)[-40:])


async def test_a_script_that_is_killed_while_it_computes_frees_its_turn(host: Host) -> None:
    rank = await host.run(0, TRAINS)
    mine = host.beside(1)
    await until(lambda: host.doing(HOLDS) == [0], 20)
    rank.process.send_signal(signal.SIGKILL)
    assert host.doing(HOLDS) == [0], "it had no time to give it"
    began_s = time.monotonic()
    await asyncio.to_thread(mine.begins)
    assert time.monotonic() - began_s < 4.0, "two seconds, and two for a machine that is busy"
    assert host.doing(HOLDS) == [1]
    mine.close()


INTERRUPTED = (
    TELLS
    + """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts with & ignores SIGINT
try:
    while True:
        tell("begins"); work(0.01); o.step()
except KeyboardInterrupt:
    tell("interrupted")
time.sleep(60)
"""
)


async def test_a_signal_reaches_a_script_that_waits_for_its_turn_and_no_wish_is_left(host: Host) -> None:
    rank = await host.run(0, INTERRUPTED)
    mine = host.beside(1)
    await until(lambda: len(host.told(0)) > 1 and host.doing(HOLDS) == [0], 20)  # it is inside its `try` by now
    await asyncio.to_thread(mine.begins)
    await until(lambda: host.doing(WAITS) == [0])
    assert host.doing(HOLDS) == [1]
    rank.process.send_signal(signal.SIGINT)
    await until(lambda: host.told(0)[-1][0] == "interrupted")
    await until(lambda: not host.doing(WAITS), 2.0)
    assert host.doing(HOLDS) == [1] and rank.process.returncode is None
    mine.close()


ALONE = (
    TELLS
    + """
from covey.hooks.turns import hooked
turns = hooked.of_process()
def costs_us():
    for _ in range(300):
        turns._turns.rests()
        began_ns = time.perf_counter_ns(); x + 0; yield (time.perf_counter_ns() - began_ns) // 1000
while True:
    batch(); tell("on" if turns.on else "off")
    if turns.on: tell(min(costs_us()))
"""
)


async def test_who_is_alone_is_asked_nothing_and_a_free_turn_costs_microseconds(host: Host) -> None:
    await host.run(0, ALONE)
    await until(lambda: len(host.told(0)) > 30, 20)
    assert not host.doing(HOLDS) and {word for word, _ in host.told(0)} == {"begins", "ends", "off"}
    mine = host.beside(1)
    await until(lambda: any(word.isdigit() for word, _ in host.told(0)), 20)
    assert min(int(word) for word, _ in host.told(0) if word.isdigit()) < 20
    mine.close()
    host.turns.free(1)
    await until(lambda: host.told(0)[-1][0] == "off", 20)
    assert not host.doing(HOLDS)


COLLECTIVES = (
    TELLS
    + """
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + os.environ["MEETS"], world_size=2, rank=int(os.environ["RANK"]))
ddp = torch.nn.parallel.DistributedDataParallel(model)
o = torch.optim.SGD(ddp.parameters(), 0.01)
def step():
    o.zero_grad(); ddp(x).square().mean().backward(); o.step()
while True:
    work(0.005); step()
    mine = torch.ones(3)
    dist.all_reduce(mine)
    assert mine[0] == 2
    tell("step")
"""
)


@asynccontextmanager
async def another_agent() -> AsyncIterator[Agent]:
    with TemporaryDirectory(prefix="covey-") as directory:
        async with here(directory) as there:
            made = Agent(there)
            await made.socket.start()
            yield made
            await made.socket.stop()


async def test_collectives_of_two_jobs_on_two_hosts_in_unlike_order_go_on(agent: Agent, tmp_path: Path) -> None:
    """Nobody waits for other ranks with a turn. Otherwise each job would have the turn of one host, and wait for its
    rank on the other host, which waits there for the turn of the other job: until turns are lost, a second later.

    Reference: §4.3.1."""
    hosts = [Host(agent, tmp_path / str(at)) for at in range(2)]
    async with AsyncExitStack() as stack:
        agents = [agent, await stack.enter_async_context(another_agent())]
        started = list[Awaitable[TorchRank]]()
        for job, rank in itertools.product(range(2), range(2)):
            told = {"TOLD": str(tmp_path / str(rank) / str(job)), "MEETS": str(tmp_path / f"meets{job}")}
            more = {"COVEY_GATE": str(gate_folder()), "RANK": str(rank), **told}
            started.append(stack.enter_async_context(running(agents[job], COLLECTIVES, rank, WHOLE_HEAD, **more)))
        await asyncio.gather(*started)
        for job, rank in itertools.product(range(2), range(2)):
            hosts[rank].hand(job, job ^ rank, agents[job], rank)
        since_s = time.monotonic() + 1.0

        def steps(rank: int, job: int) -> int:
            return sum(word == "step" and at_s > since_s for word, at_s in hosts[rank].told(job))

        await until(lambda: all(steps(*at) >= 40 for at in itertools.product(range(2), range(2))), 60)
        turns = [[host.turns.get(slot, AT["comp"] + TURNS) for slot in range(2)] for host in hosts]
        lost = sum(host.turns.get(slot, LOST) for host in hosts for slot in range(2))
        assert min(map(min, turns)) > 20 and lost < 5, (turns, lost)  # a busy machine may lose one
    for host in hosts:
        await host.close()
