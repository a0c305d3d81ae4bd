"""GPUs through NVML, with a stand-in for the driver; and GPUs that are only simulated."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from agent.ports import gpus as gpus_module
from agent.ports.fake_gpus import simulated_gpus
from agent.ports.gpus import RealProbes
from agent.program import JsonLog
from covey.core import HostId
from covey.ports import Gpu
from covey.units import GIB
from tests.agent.here import Lines, until


class NVMLError(Exception):
    """What pynvml raises."""


class Driver:
    """The part of pynvml that is asked, with GPUs that may fail."""

    NVMLError = NVMLError

    def __init__(self, count: int) -> None:
        self.count, self.present, self.sick, self.mig = count, True, set[int](), set[int]()
        self.readings = 0
        self.gate = threading.Event()
        self.gate.set()

    def nvmlInit(self) -> None:
        if not self.present:
            raise NVMLError("no driver")

    def nvmlShutdown(self) -> None:
        """Nothing to let go of."""

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.1"

    def nvmlDeviceGetCount(self) -> int:
        self.gate.wait(5)
        if not self.present:
            raise NVMLError("driver gone")
        self.readings += 1
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.sick:
            raise NVMLError("fallen off the bus")
        return index

    def nvmlDeviceGetUUID(self, device: int) -> bytes:
        return b"GPU-%d" % device

    def nvmlDeviceGetName(self, device: int) -> str:
        return "A100"

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        return SimpleNamespace(total=80 * GIB, used=device * GIB)

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:
        if device in self.mig:
            raise NVMLError("not supported")
        return SimpleNamespace(gpu=50)


@pytest.fixture
def lines() -> Lines:
    return Lines()


def probes(driver: Driver, lines: Lines) -> RealProbes:
    return RealProbes(JsonLog(lines, "debug"), nvml=driver)  # type: ignore[arg-type]


async def test_gpus_are_what_the_driver_says(lines: Lines) -> None:
    found = probes(Driver(2), lines)
    await found.start_up()
    assert list(found.gpus()) == [
        Gpu(0, "GPU-0", "A100", 80 * GIB, 0, 0.5),
        Gpu(1, "GPU-1", "A100", 80 * GIB, GIB, 0.5),
    ]


async def test_a_sick_gpu_is_left_out_and_one_in_parts_has_no_utilization(lines: Lines) -> None:
    driver = Driver(3)
    driver.sick, driver.mig = {1}, {2}
    found = probes(driver, lines)
    await found.start_up()
    assert [(gpu.index, gpu.utilization) for gpu in found.gpus()] == [(0, 0.5), (2, 0.0)]


async def test_without_a_driver_there_are_no_gpus_until_there_is_one(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus_module, "NO_DRIVER_S", 0.01)
    monkeypatch.setattr(gpus_module, "REFRESH_S", 0.01)
    driver = Driver(1)
    driver.present = False
    found = probes(driver, lines)
    await found.start_up()
    assert list(found.gpus()) == []
    driver.present = True
    await until(lambda: len(found.gpus()) == 1)
    driver.present = False
    await until(lambda: len(found.gpus()) == 0)
    assert "NVML failed" in lines.text


async def test_a_driver_that_hangs_holds_nobody_up_and_is_asked_once(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus_module, "REFRESH_S", 0.0)
    driver = Driver(1)
    found = probes(driver, lines)
    await found.start_up()
    driver.gate.clear()
    before = driver.readings
    for _ in range(20):
        assert len(found.gpus()) == 1
        await asyncio.sleep(0)
    driver.gate.set()
    await until(lambda: found._reading is None or found._reading.done())
    assert driver.readings <= before + 1


async def test_the_driver_is_asked_once_a_second_at_most(lines: Lines) -> None:
    driver = Driver(1)
    found = probes(driver, lines)
    await found.start_up()
    for _ in range(50):
        found.gpus()
        await asyncio.sleep(0)
    assert driver.readings == 1


async def test_starting_waits_no_longer_than_it_was_told(lines: Lines) -> None:
    driver = Driver(1)
    driver.gate.clear()
    found = probes(driver, lines)
    await found.start_up(timeout_s=0.01)
    assert list(found.gpus()) == []
    driver.gate.set()


async def test_simulated_gpus_say_so_and_need_no_driver(lines: Lines) -> None:
    pretended = simulated_gpus(HostId("h1"), 2, GIB)
    driver = Driver(8)
    found = RealProbes(JsonLog(lines), pretended, nvml=driver)  # type: ignore[arg-type]
    await found.start_up()
    assert [gpu.uuid for gpu in found.gpus()] == ["GPU-sim-h1-0", "GPU-sim-h1-1"]
    assert all(gpu.simulated and gpu.memory_total_bytes == GIB for gpu in found.gpus())
    assert driver.readings == 0


def test_memory_is_read_again_only_after_a_while(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    found = probes(Driver(0), lines)
    first = found.memory()
    assert found.memory() is first
    monkeypatch.setattr(gpus_module, "MEMORY_S", -1.0)
    assert found.memory() is not first


@pytest.mark.gpu
async def test_the_gpus_of_this_machine_are_found_by_the_real_driver(lines: Lines) -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(f"no NVIDIA driver here: {error}")
    found = RealProbes(JsonLog(lines))  # type: ignore[arg-type]
    await found.start_up()
    assert [gpu.index for gpu in found.gpus()] == list(range(pynvml.nvmlDeviceGetCount()))
    assert all(gpu.uuid.startswith("GPU-") and gpu.memory_total_bytes > GIB for gpu in found.gpus())
