"""Real JAX and PyTorch scripts beside one another on one core, under the real service: which waits for which."""

import asyncio
import statistics
import sys
import time

import pytest

from agent.jobs.socket.rank_pages import HeldPages
from covey.core.ids import JobId
from covey.core.units import GIB, MIB
from covey.kernel.pages import FlagReader
from plugins.sharing.machine.gpu import SharedGpu
from plugins.sharing.machine.ladder import Ladder
from plugins.sharing.machine.rivals import Flag, Naive
from tests.agent.here import until
from tests.covey.hooks.jax_jobs import NEEDS_JAX, TRAIN
from tests.covey.hooks.torch_jobs import NEEDS_TORCH, gate_folder
from tests.plugins.sharing.live_host import LiveHost, live_host
from tests.plugins.sharing.ruled import rule, ruled

pytestmark = [*NEEDS_JAX, *NEEDS_TORCH]
JAX = f"""
import sys, time
size, waits_s = int(sys.argv[1]), float(sys.argv[2])
{TRAIN}
while True:
    weights = jax.block_until_ready(train(weights, batch))
    time.sleep(waits_s)
"""
TORCH = """
import sys, time, torch
size, waits_s = int(sys.argv[1]), float(sys.argv[2])
torch.set_num_threads(1)
class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            time.sleep(waits_s)
            yield torch.randn(size, 128)
model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(6)])
o = torch.optim.SGD(model.parameters(), 0.001)
for batch in torch.utils.data.DataLoader(Batches(), batch_size=None):
    o.zero_grad(); model(batch).square().mean().backward(); o.step()
"""
JAX_BURSTY, JAX_SATURATED = ("-c", JAX, "256", "0.02"), ("-c", JAX, "128", "0")
TORCH_BURSTY, TORCH_SATURATED = ("-c", TORCH, "1024", "0.02"), ("-c", TORCH, "64", "0")


PACKED = ruled(lambda tolerance: Naive())
PHASES = ruled(lambda tolerance: Flag())
"""A controller that opens idle phases, whatever is measured on a machine that does other things too."""


def gpu_of(host: LiveHost) -> SharedGpu:
    (gpu,) = host.service.machine.gpus.values()
    return gpu


def under(host: LiveHost, law: type[Ladder]) -> None:
    """Put this law in force from now on."""
    gpu_of(host).controller = law
    rule(gpu_of(host))


def clock_of(host: LiveHost, job: str) -> int:
    """Id of the clock of its process's processor time, as clock_getcpuclockid(3) makes it."""
    return ~host.processes[JobId(job)].pid << 3 | 2


def beside(host: LiveHost, seconds: float) -> tuple[float, float]:
    """Share of the guaranteed rank's busy time in which the other one computed, and of its idle time, by the flag of
    the one and the kernel's count of the other: what else this machine does counts little."""
    (pages,) = [peer.pages for peer in host.socket.peers(JobId("g"))]
    assert isinstance(pages, HeldPages)
    flag, clock = FlagReader(pages.flag.view), clock_of(host, "o")
    spent, passed = {True: 0, False: 0}, {True: 1, False: 1}
    before, used_ns, at_ns = flag.busy(), time.clock_gettime_ns(clock), time.monotonic_ns()
    end_ns = at_ns + int(seconds * 1e9)
    while at_ns < end_ns:
        time.sleep(0.001)
        busy, now_used_ns, now_ns = flag.busy(), time.clock_gettime_ns(clock), time.monotonic_ns()
        if busy is not None and busy == before:
            spent[busy] += now_used_ns - used_ns
            passed[busy] += now_ns - at_ns
        before, used_ns, at_ns = busy, now_used_ns, now_ns
    return spent[True] / passed[True], spent[False] / passed[False]


async def pair(host: LiveHost, guaranteed: tuple[str, ...], other: tuple[str, ...]) -> None:
    """Run both scripts until the guaranteed one is known."""
    gate = str(gate_folder())
    gpu, asked = gpu_of(host), {"o": 256 * MIB, "g": GIB}
    for job, argv in (("o", other), ("g", guaranteed)):
        kind = "guaranteed" if job == "g" else "opportunistic"
        argv = (sys.executable, *argv)
        await host.come(job, kind, argv, asked[job], COVEY_GATE=gate)  # type: ignore[arg-type]
        await until(lambda job=job: gpu.members[JobId(job)].step_s > 0, 120.0)  # type: ignore[misc]
    await until(lambda: host.state() in ("baseline", "run", "verify"), 120.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("guaranteed", "other", "fixed"),
    [
        pytest.param(JAX_BURSTY, TORCH_SATURATED, "g", id="jax-guaranteed"),
        pytest.param(TORCH_BURSTY, JAX_SATURATED, "o", id="jax-opportunistic", marks=pytest.mark.long),
    ],
)
async def test_a_jax_script_shares_a_device_with_one_of_pytorch(
    guaranteed: tuple[str, ...], other: tuple[str, ...], fixed: str
) -> None:
    """The other script uses what is left, and far less of the guaranteed one's busy time than packed: medians of three
    tries, each of both. Reference: AntMan §3.1.2, §3.3."""
    async with live_host(4 * GIB) as host:
        await pair(host, guaranteed, other)
        members = gpu_of(host).members
        assert members[JobId("g")].flag and all(member.gate for member in members.values())
        assert [member.job for member in members.values() if member.fixed] == [fixed]
        packed, ours, used = [], [], []
        for _ in range(3):
            under(host, PACKED)
            await asyncio.sleep(0.5)
            packed.append((await asyncio.to_thread(beside, host, 2.0))[0])
            under(host, PHASES)
            await asyncio.sleep(0.5)
            in_busy, in_idle = await asyncio.to_thread(beside, host, 2.0)
            ours.append(in_busy)
            used.append(in_idle)
        assert statistics.median(ours) < 0.5 * statistics.median(packed), (packed, ours, used)
        assert statistics.median(used) > 0.1, (packed, ours, used)
        under(host, Ladder)
        await until(lambda: host.state() == "run", 120.0)
        assert host.given_back("o") is None and host.given_back("g") is None
