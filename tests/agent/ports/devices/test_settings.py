"""[gpus] of agent.toml: what cannot be is refused at the start, by its key, with what to do."""

import os
from typing import Any

import pytest

from agent.config import ConfigError, parse
from agent.ports.devices.choice import backend
from agent.ports.devices.cpu import CpuDevices, devices_of
from agent.ports.devices.nvidia.nvml import NvmlDevices
from agent.ports.devices.settings import CpuDevice, GpuSettings, trouble, usable_cores
from agent.ports.devices.sim import SimDevices
from agent.program import JsonLog
from covey.core.ids import HostId
from covey.core.units import GIB
from tests.agent.here import Lines

CORE = min(usable_cores())


def refused(**gpus: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse({"name": "h1", "gpus": gpus}, "agent.toml", {"HOME": "/h"})
    return caught.value


def device(cores: object = str(CORE), memory: str = "1 GiB") -> dict[str, object]:
    return {"cores": cores, "memory": memory}


@pytest.mark.parametrize(
    ("listed", "key", "why"),
    [
        ([device(), device()], "gpus.cpu[1].cores", f"core {CORE} is in cpu[0] too"),
        ([device("0-8191")], "gpus.cpu[0].cores", "is not available to this agent"),
        ([device("7000")], "gpus.cpu[0].cores", "core 7000 is not available to this agent"),
        ([device(memory="0 B")], "gpus.cpu[0].memory", "0 bytes"),
        ([device(memory="much")], "gpus.cpu[0]", "much"),
        ([device("one")], "gpus.cpu[0]", "not a list of cores"),
        ([device("3-1")], "gpus.cpu[0]", "not a range of cores"),
        ([device("")], "gpus.cpu[0]", "not a list of cores"),
        ([device("0-99999999")], "gpus.cpu[0]", "not a range of cores"),
        ([device([0])], "gpus.cpu[0].cores", "Expected `str`"),
        ([{"cores": "0"}], "gpus.cpu[0]", "memory"),
        ([device(memory=f"{n} GiB") for n in range(65)], "gpus", "at most 64"),
    ],
)
def test_devices_that_cannot_be_are_refused_by_key(listed: list[object], key: str, why: str) -> None:
    error = refused(cpu=listed)
    assert f"`{key}`" in error.what and why in error.why and error.next


@pytest.mark.parametrize(
    ("gpus", "key"),
    [
        ({"backend": "cpu"}, "gpus.cpu"),
        ({"backend": "simulated"}, "gpus.simulated"),
        ({"backend": "nvml", "simulated": 2}, "gpus.simulated"),
        ({"backend": "nvml", "cpu": [device()]}, "gpus.cpu"),
        ({"simulated": 2, "cpu": [device()]}, "gpus.cpu"),
        ({"backend": "rocm"}, "gpus"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(gpus: dict[str, object], key: str) -> None:
    error = refused(**gpus)
    assert f"`{key}`" in error.what and error.why and error.next


def test_cores_are_read_as_taskset_reads_them() -> None:
    assert CpuDevice("0-2, 8,5-5", "1 GiB").core_numbers == (0, 1, 2, 5, 8)
    both = GpuSettings(cpu=(CpuDevice("0-1", "1 GiB"), CpuDevice("2,3", "1 GiB")))
    assert trouble(both, lambda: range(4)) is None
    assert trouble(both, lambda: range(3)) is not None


def test_cores_that_this_agent_may_not_use_do_not_exist_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5})
    assert usable_cores() == {4, 5}


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (GpuSettings(), NvmlDevices),
        (GpuSettings(backend="nvml"), NvmlDevices),
        (GpuSettings(simulated=2), SimDevices),
        (GpuSettings(cpu=(CpuDevice("0", "1 GiB"),)), CpuDevices),
    ],
)
def test_the_backend_is_the_one_that_the_settings_mean(settings: GpuSettings, kind: type[object]) -> None:
    log = JsonLog(Lines())  # type: ignore[arg-type]
    assert type(backend(settings, HostId("h1"), "/run/jobs.sock", log, lambda: 0.0)) is kind


def test_devices_keep_their_names_over_restarts_and_say_their_cores() -> None:
    listed = (CpuDevice("0-1", "2 GiB"), CpuDevice("4", "1 GiB"))
    assert devices_of("h1", listed) == devices_of("h1", listed)
    assert [(one.uuid, one.cores) for one in devices_of("h1", listed)] == [("CPU-h1-0", (0, 1)), ("CPU-h1-1", (4,))]


async def test_simulated_devices_say_that_they_are() -> None:
    log = JsonLog(Lines())  # type: ignore[arg-type]
    made = backend(GpuSettings(simulated=2, simulated_memory="1 GiB"), HostId("h1"), "", log, lambda: 0.0)
    assert [(gpu.uuid, gpu.simulated, gpu.memory_total_bytes) for gpu in made.gpus()] == [
        ("GPU-sim-h1-0", True, GIB),
        ("GPU-sim-h1-1", True, GIB),
    ]
