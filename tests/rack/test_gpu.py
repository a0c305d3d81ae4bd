"""A real agent on this machine's GPU (`make gpu-check`), and the same stories on cores (`make check LONG=1 TORCH=1`):
scripts of PyTorch that train on it, alone and two at a time, also while the agent is killed."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from cli.jobs.logs import collect
from covey.core.units import GIB
from tests.agent.ports.devices.rigs import has_gpu
from tests.covey.hooks.torch_jobs import NEEDS_TORCH, gate_folder
from tests.rack.living_rack import wait
from tests.rack.sharing_rack import SharingRack, sharing_rack

HOST = "gpu1"
TRAINS = """
import sys, time, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1)
net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).to(device)
o = torch.optim.Adam(net.parameters(), 1e-4)
x = torch.randn(256, 256, device=device)
held = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
for step in range(int(sys.argv[1])):
    o.zero_grad(); loss = net(x).square().mean(); loss.backward(); o.step()
    time.sleep(float(sys.argv[2]))
if device == "cuda": torch.cuda.synchronize()
print("trained on", device, "visible", torch.cuda.device_count(), "loss", loss.item())
"""
"""A script as people write it: it imports nothing of Covey."""
FOREVER = 10**9


@pytest.fixture(
    params=[
        pytest.param("nvml", marks=[pytest.mark.gpu]),
        pytest.param("cpu", marks=[pytest.mark.long, *NEEDS_TORCH]),
    ]
)
def rack(request: pytest.FixtureRequest) -> Iterator[SharingRack]:
    if request.param == "nvml" and not has_gpu():
        pytest.skip("PyTorch finds no CUDA device here: nothing of a GPU was tried")
    gate_folder()
    with sharing_rack(1, 1, "beside = 1", devices=request.param) as started:
        yield started


pytestmark = [pytest.mark.rack, pytest.mark.xdist_group("rack"), pytest.mark.cpu_seconds(0)]


def script(rack: SharingRack, name: str, steps: int, waits_s: float = 0.0, **more: Any) -> str:
    return rack.submit(name, [sys.executable, "-c", TRAINS, str(steps), str(waits_s)], **more)


def gpu(rack: SharingRack) -> dict[str, Any]:
    (row,) = rack.agent().get("gpus").data
    return dict(row)


def steps(rack: SharingRack, job: str) -> int:
    return int(rack.job(job)["step"] or 0)


def test_a_script_trains_on_the_gpu_and_the_rack_sees_it(rack: SharingRack) -> None:
    found = gpu(rack)
    assert found["memory_total_bytes"] >= GIB, found
    job = script(rack, "trains", 200)
    wait("it is done", lambda: rack.job(job)["over"], 100.0)
    view = rack.job(job)
    assert view["state"] == "done", view["reason"]
    said = collect(rack.agent(), job, 0)
    assert f"trained on {'cuda' if rack.devices == 'nvml' else 'cpu'}" in said and "loss" in said, said
    if rack.devices == "nvml":
        assert "visible 1" in said, "one GPU was given, one is seen"


def test_two_jobs_of_two_classes_use_one_gpu_and_outlive_their_agent(
    rack: SharingRack,
) -> None:
    """The guaranteed one waits between its steps; what it leaves idle is used. Reference: AntMan, §3.2."""
    first = script(rack, "first", FOREVER, waits_s=0.05, gpu_memory=512 << 20)
    rack.runs(first, 60.0)
    second = script(rack, "second", FOREVER, job_class="opportunistic", gpu_memory=512 << 20)
    rack.runs(second, 60.0)
    both = {first: "guaranteed", second: "opportunistic"}
    wait(
        "both are on the GPU",
        lambda: set(both.items()) == set(next(iter(rack.shared(HOST).values()), {}).items()),
        60.0,
    )
    wait("both make steps", lambda: steps(rack, first) > 0 and steps(rack, second) > 0, 60.0)
    rack.kill(HOST)
    rack.start()
    assert rack.runs(first)["tally"]["attempt"] == rack.runs(second)["tally"]["attempt"] == 1
    before = steps(rack, first), steps(rack, second)
    wait("both go on", lambda: steps(rack, first) > before[0] and steps(rack, second) > before[1], 60.0)
    for job in both:
        rack.agent().post("jobs", job, "cancel")
    wait("both are over", lambda: all(rack.job(job)["over"] for job in both), 30.0)
    if rack.devices == "nvml":
        wait("nothing of theirs is on the GPU", lambda: gpu(rack)["memory_used_bytes"] < 2 * GIB, 30.0)
