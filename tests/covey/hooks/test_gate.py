"""The native gate and the flag, on real PyTorch (`covey/hooks/gate/gate.cpp`), judged by what the kernel counts."""

import asyncio
import statistics
import time
from pathlib import Path

import pytest

from covey.hooks import SITE
from covey.kernel.pages import FlagReader, RankLimits
from plugins.facts import JobHooked
from tests.agent.here import until
from tests.covey.agents import Agent, lease
from tests.covey.hooks.flag_lags import flag_follows
from tests.covey.hooks.torch_jobs import BURSTY, NEEDS_TORCH, SATURATED, WHOLE_HEAD, TorchRank, gate_folder, running
from tests.families import in_gate

pytestmark = NEEDS_TORCH


@pytest.fixture
def gate() -> str:
    return str(gate_folder())


@pytest.mark.parametrize("built", [True, pytest.param(False, marks=pytest.mark.long)], ids=["operators", "modules"])
async def test_a_rank_gets_the_share_that_its_agent_says(agent: Agent, gate: str, built: bool) -> None:
    """The rank gets the whole time once no limit is in force any more. Reference: §3.1.2."""
    async with running(agent, SATURATED, COVEY_GATE=gate if built else "/nonexistent") as rank:
        told = next(fact for fact in agent.facts if isinstance(fact, JobHooked))
        assert told.to.endswith("gate per operator" if built else "gate per module") and told.problem == ""
        assert await rank.ran_freely() > 0.8
        for epoch, share in enumerate([0.5, 0.1, 1e-9, 0.0], 1):
            await rank.obeyed(RankLimits(epoch, idle=1.0, busy=share, lease_ns=lease(), failsafe=0.5))
            assert await rank.used(1.0) <= share * 1.2 + 0.04
            assert await rank.ran(1.0) >= share * 0.5
        rank.obey(RankLimits(9, idle=0.1, busy=0.1, failsafe=0.5, lease_ns=lease(0.2)))
        await asyncio.sleep(0.3)
        assert await rank.used(1.0) <= 0.63 and await rank.ran(1.0) >= 0.25, "after the lease the failsafe holds"
        free_ns = lease(3.0)  # longer than a busy machine keeps this test from looking
        await rank.obeyed(RankLimits(10, failsafe=0.5, lease_ns=free_ns))
        assert await rank.ran_freely() > 0.8
        await asyncio.sleep(max(0.0, (free_ns - time.monotonic_ns()) / 1e9) + 0.2)
        assert await rank.used(1.0) <= 0.63, "who was free for a lease is not free for ever"
        await rank.obeyed(RankLimits(11))
        assert await rank.ran_freely() > 0.8
        await rank.batches()
        assert not any(batch.gated_ns for batch in (await rank.batches()).batches[-3:])


async def test_a_rank_that_is_stopped_acknowledges_and_goes_on_at_once(agent: Agent, gate: str) -> None:
    """Limits are acknowledged in the middle of a mini-batch: a thread that is never stopped reads the page."""
    async with running(agent, SATURATED, COVEY_GATE=gate) as rank:
        await rank.obeyed(RankLimits(1, idle=0.0, busy=0.0, lease_ns=lease()))
        assert await rank.used(0.5) < 0.05
        await rank.obeyed(RankLimits(2, idle=0.0, busy=0.0, lease_ns=lease()))
        await rank.obeyed(RankLimits(3))
        assert await rank.ran_freely() > 0.8


WAITS = {"sleeps": "time.sleep(0.015)", "waits for a thread": "threading.Event().wait(0.015)"}
TELLS = """
import threading
phases = []
for at in range(60):
    for _ in range(20): step()
    phases.append((False, time.monotonic_ns()))
    WAITS
    phases.append((True, time.monotonic_ns()))
"""


@pytest.mark.parametrize("waits", in_gate(1, WAITS))
async def test_the_flag_follows_what_the_script_does(agent: Agent, gate: str, tmp_path: Path, waits: str) -> None:
    """The flag is lowered when the script waits for anything, and raised when it continues."""
    script = "work(0.5)\n" + TELLS.replace("WAITS", WAITS[waits])
    lags_ms = await flag_follows(agent, script, tmp_path, within_ms=6, COVEY_GATE=gate)
    assert max(lags_ms[-1]) < 6, lags_ms


@pytest.mark.parametrize("alone", in_gate(1, [True, False]))
async def test_time_without_work_is_reported_while_somebody_reads_the_flag(
    agent: Agent, gate: str, alone: bool
) -> None:
    script = "while True:\n    step(); time.sleep(0.03)"
    async with running(agent, script, COVEY_GATE=gate) as rank:
        for now_alone in (not alone, alone):
            rank.obey(RankLimits(1 + (now_alone == alone), guaranteed=True, alone=now_alone))
            await asyncio.sleep(0.5)
        await rank.batches()
        await asyncio.sleep(0.7)
        report = await rank.batches()
        shares = [batch.idle_ns / batch.step_ns for batch in report.batches]
        assert report.says_idle and report.gate == 1
        assert rank.flag().busy() or not alone
        assert statistics.median(shares) == 0 if alone else 0.7 < statistics.median(shares) <= 1, shares


PINNED = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"


@pytest.mark.long
async def test_idle_phases_of_a_neighbour_are_used_and_its_work_is_not_delayed(agent: Agent, gate: str) -> None:
    """Both run on one core: the guaranteed rank's wait for it, compared with packing them. Reference: §3.1.2."""
    beside: dict[str, list[float]] = {"packed": [], "gated": []}
    shares = []
    async with (
        running(agent, PINNED + BURSTY, rank=0, COVEY_GATE=gate) as first,
        running(agent, PINNED + SATURATED, rank=1, COVEY_GATE=gate) as other,
    ):
        first.obey(RankLimits(1, guaranteed=True))
        other.pages.show(first.pages)
        for attempt in range(3):
            await other.obeyed(RankLimits(2 * attempt + 1))
            beside["packed"].append((await asyncio.to_thread(beside_work, first.flag(), other, 1.5))[0])
            await other.obeyed(RankLimits(2 * attempt + 2, idle=1, busy=0.0, lease_ns=lease()))
            gated, share = await asyncio.to_thread(beside_work, first.flag(), other, 1.5)
            beside["gated"].append(gated)
            shares.append(share)
    packed, gated = (statistics.median(beside[how]) for how in ("packed", "gated"))
    assert gated < packed / 3, beside
    assert statistics.median(shares) > 0.3, "the idle time is used"


def beside_work(flag: FlagReader, other: TorchRank, seconds: float) -> tuple[float, float]:
    """Share of the guaranteed rank's busy time in which the other rank computed, and share of its idle time."""
    spent, passed = {True: 0, False: 0}, {True: 1, False: 1}
    before, cpu_ns, at_ns = flag.busy(), other.cpu_ns(), time.monotonic_ns()
    end_ns = at_ns + int(seconds * 1e9)
    while at_ns < end_ns:
        time.sleep(0.001)
        busy, now_cpu_ns, now_ns = flag.busy(), other.cpu_ns(), time.monotonic_ns()
        if busy is not None and busy == before:
            spent[busy] += now_cpu_ns - cpu_ns
            passed[busy] += now_ns - at_ns
        before, cpu_ns, at_ns = busy, now_cpu_ns, now_ns
    return spent[True] / passed[True], spent[False] / passed[False]


FORKS = """
child = os.fork()
if child == 0:
    work(600)
time.sleep(600)
"""
ISOLATED = """
import covey
job = covey.join()
work(600)
"""
THREADS = """
import threading
def train():
    m = torch.nn.Linear(64, 64)
    o = torch.optim.AdamW(m.parameters())
    while True:
        o.zero_grad(); m(x).square().mean().backward(); o.step()
for _ in range(3): threading.Thread(target=train, daemon=True).start()
work(600)
"""


async def test_a_forked_child_does_not_say_that_its_parent_is_busy(agent: Agent, gate: str) -> None:
    async with running(agent, "work(2)\n" + FORKS, COVEY_GATE=gate) as rank:
        await rank.obeyed(RankLimits(1, guaranteed=True))
        flag = rank.flag()
        await asyncio.sleep(3.0)
        assert statistics.median([await said(flag) for _ in range(9)]) == 0
        rank.pages.report.fresh()
        await asyncio.sleep(0.5)
        late = rank.pages.report.fresh()
        assert late is None or late.batches == (), "mini-batches of the child are not those of the rank"


async def said(flag: FlagReader) -> int:
    await asyncio.sleep(0.05)
    return int(flag.busy() is True)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(THREADS, id="threads"),
        pytest.param(ISOLATED, id="python that reads no PYTHONPATH", marks=pytest.mark.long),
    ],
)
async def test_several_threads_share_one_share(agent: Agent, gate: str, script: str) -> None:
    path = SITE if script == THREADS else ""
    async with running(agent, script, COVEY_GATE=gate, PYTHONPATH=path) as rank:
        await rank.obeyed(RankLimits(1, idle=0.2, busy=0.2, lease_ns=lease()))
        began_ns, cpu_ns = time.monotonic_ns(), all_cpu_ns(rank)
        await asyncio.sleep(1.5)
        assert 0.02 < (all_cpu_ns(rank) - cpu_ns) / (time.monotonic_ns() - began_ns) < 0.45
        await rank.obeyed(RankLimits(2))


def all_cpu_ns(rank: TorchRank) -> int:
    """Processor time of all threads of the rank, in ns."""
    tasks = Path(f"/proc/{rank.process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks)


MANY = """
def trained(model, o, closure=None, scaler=None):
    for _ in range(30):
        def loss():
            o.zero_grad(); l = model(x).square().mean()
            (scaler.scale(l) if scaler else l).backward()
            return l
        if closure: o.step(loss)
        elif scaler: loss(); scaler.step(o); scaler.update()
        else: loss(); o.step()
    return [p.double().sum().item() for p in model.parameters()]
def fresh():
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
def all_kinds():
    m = fresh(); yield trained(m, torch.optim.LBFGS(m.parameters(), max_iter=3), closure=True)
    m = fresh(); yield trained(m, torch.optim.SGD(m.parameters(), 0.1), scaler=torch.amp.GradScaler("cpu"))
    m = fresh(); yield trained(torch.compile(m, backend="aot_eager"), torch.optim.Adam(m.parameters()))
def wait(name):
    while not os.path.exists(os.environ["TOLD"] + name): step()
first = list(all_kinds())
wait("limited")
same = list(all_kinds()) == first
open(os.environ["TOLD"] + ("same" if same else "other"), "w").close()
work(600)
"""


@pytest.mark.long
async def test_whatever_trains_trains_the_same_under_a_limit(agent: Agent, gate: str, tmp_path: Path) -> None:
    """A closure, a loss scaler and a compiled model give the same bits."""
    async with running(agent, MANY, head=WHOLE_HEAD, COVEY_GATE=gate, TOLD=f"{tmp_path}/") as rank:
        rank.obey(RankLimits(1, idle=0.4, busy=0.4, lease_ns=lease(200)))
        (tmp_path / "limited").touch()
        await until(lambda: (tmp_path / "same").exists() or (tmp_path / "other").exists(), 200)
        assert (tmp_path / "same").exists()
