"""NVIDIA's driver, played beneath the real pynvml: what it has, hides, breaks, lacks, and says wrongly."""

import asyncio
import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from agent.ports.devices.nvidia import nvml as nvml_module
from agent.ports.devices.nvidia import nvml_driver, nvml_reads
from agent.ports.devices.nvidia.nvml import NvmlDevices
from agent.program import JsonLog
from covey.core.units import GIB
from covey.ports.devices import DeviceProcess, Gpu
from tests.agent.here import Lines, until
from tests.agent.ports.devices.stand_in import HIDDEN, NEWER, RECORDED, Board, StandIn, beneath_pynvml, in_parts


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def made() -> Iterator[list[NvmlDevices]]:
    found: list[NvmlDevices] = []
    yield found
    for devices in found:
        devices.close()


async def over(driver: StandIn, made: list[NvmlDevices], lines: Lines, deadline_s: float = 2.0) -> NvmlDevices:
    devices = NvmlDevices(JsonLog(lines, "debug"), deadline_s=deadline_s, first_s=deadline_s)  # type: ignore[arg-type]
    made.append(devices)
    await devices.start_up()
    return devices


async def test_an_h100_is_what_its_driver_says(made: list[NvmlDevices], lines: Lines) -> None:
    board = Board("GPU-1", used=3 * GIB, busy=50, processes={7: 2 * GIB, 9: GIB}, shares={7: 40})
    with beneath_pynvml(StandIn(board, Board("GPU-2"))) as driver:
        devices = await over(driver, made, lines)
        assert devices.gpus()[0] == Gpu(0, "GPU-1", "NVIDIA H100 80GB HBM3", 80 * GIB, 3 * GIB, 0.5)
        assert [device.uuid for device in devices.devices()] == ["GPU-1", "GPU-2"]
        sample = await devices.sample("GPU-1")
        assert sample.processes == (DeviceProcess(7, 2 * GIB, 0.4), DeviceProcess(9, GIB, 0.0))
        assert (sample.memory_used_bytes, sample.utilization) == (3 * GIB, 0.5)


async def test_with_mig_on_the_instances_are_the_devices(made: list[NvmlDevices], lines: Lines) -> None:
    board = in_parts()
    board.parts[0].processes, board.parts[0].used = {7: GIB}, 2 * GIB
    with beneath_pynvml(StandIn(board, Board("GPU-2"))) as driver:
        devices = await over(driver, made, lines)
        found = [(device.uuid, device.parent, device.memory_bytes // GIB) for device in devices.devices()]
        assert found == [("MIG-GPU-mig-3", "GPU-mig", 20), ("MIG-GPU-mig-5", "GPU-mig", 20), ("GPU-2", "", 80)]
        assert [gpu.utilization is not None for gpu in devices.gpus()] == [False, False, True]
        assert ["utilization" in device.can for device in devices.devices()] == [False, False, True]
        sample = await devices.sample("MIG-GPU-mig-3")
        assert sample.processes == (DeviceProcess(7, GIB, None),) and sample.memory_used_bytes == 2 * GIB
        assert "process utilization" not in devices.devices()[0].can


async def test_an_error_of_one_instance_is_not_its_neighbours(made: list[NvmlDevices], lines: Lines) -> None:
    board = in_parts()
    with beneath_pynvml(StandIn(board)) as driver:
        devices = await over(driver, made, lines)
        driver.xid(board, 94, instance=5)
        told = await devices.events()
        assert [(uuid, health.condition) for uuid, health in told] == [("MIG-GPU-mig-5", "degraded")]
        driver.xid(board, 79)
        parts = {"MIG-GPU-mig-3": "lost", "MIG-GPU-mig-5": "lost"}
        seen: dict[str, str] = {}
        for _ in range(5):
            seen |= {uuid: health.condition for uuid, health in await devices.events()}
            if seen == parts:
                break
        assert seen == parts


@pytest.mark.parametrize("name", RECORDED)
async def test_a_recorded_failure_is_followed_step_by_step(name: str, made: list[NvmlDevices], lines: Lines) -> None:
    board = Board("GPU-1")
    with beneath_pynvml(StandIn(board, Board("GPU-2"))) as driver:
        devices = await over(driver, made, lines)
        condition = "ok"
        for step, after in RECORDED[name]:
            step(driver, board)
            told = dict(await devices.events())
            for _ in range(5):
                if after != condition and not told:
                    told = dict(await devices.events())
            assert (await devices.health("GPU-1")).condition == after
            assert ("GPU-1" in told) or condition == after, "what changed is told"
            assert "GPU-2" not in told and (await devices.health("GPU-2")).condition == "ok"
            condition = after


async def test_an_xid_is_told_at_once(made: list[NvmlDevices], lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_module, "LOOK_S", 30.0)
    board = Board("GPU-1")
    with beneath_pynvml(StandIn(board)) as driver:
        devices = await over(driver, made, lines)
        asked = driver.calls.get("nvmlEventSetWait_v2", 0)
        waiting = asyncio.ensure_future(devices.events())
        await until(lambda: driver.calls.get("nvmlEventSetWait_v2", 0) > asked)
        assert not waiting.done(), "nothing has happened yet"
        driver.xid(board, 48)
        told = await asyncio.wait_for(waiting, 5.0)
        assert [(uuid, health.condition) for uuid, health in told] == [("GPU-1", "drain")]
        assert devices.counters["xids"] == 1
        assert "XID 48" in told[0][1].why and '"number": 48' in lines.text


async def test_memory_that_the_driver_hides_is_unknown_not_huge(made: list[NvmlDevices], lines: Lines) -> None:
    board = Board("GPU-1", processes={7: HIDDEN}, shares={7: 10})
    with beneath_pynvml(StandIn(board)) as driver:
        devices = await over(driver, made, lines)
        assert (await devices.sample("GPU-1")).processes == (DeviceProcess(7, None, 0.1),)


async def test_an_old_driver_does_what_it_can(made: list[NvmlDevices], lines: Lines) -> None:
    board = Board("GPU-1", processes={7: GIB}, ecc=2)
    with beneath_pynvml(StandIn(board, without=NEWER)) as driver:
        devices = await over(driver, made, lines)
        assert (await devices.sample("GPU-1")).processes == (DeviceProcess(7, GIB, 0.0),)
        assert (await devices.health("GPU-1")).condition == "degraded"
        assert "hard limit" not in devices.devices()[0].can
        assert await devices.set_hard_limit("GPU-1", 7, GIB) is False


async def test_a_driver_that_lies_is_bounded(made: list[NvmlDevices], lines: Lines) -> None:
    processes = {7: 2**63, 0: GIB, 4_000_000_000: GIB}
    board = Board("GPU-1", used=2**60, busy=100_000, processes=processes, shares={7: -1}, ecc=2**64 - 1, recovery=77)
    with beneath_pynvml(StandIn(board)) as driver:
        devices = await over(driver, made, lines)
        (gpu,) = devices.gpus()
        assert (gpu.memory_used_bytes, gpu.utilization) == (80 * GIB, 1.0)
        sample = await devices.sample("GPU-1")
        assert sample.processes == (DeviceProcess(7, 80 * GIB, 1.0),)
        assert (sample.memory_used_bytes, sample.utilization) == (80 * GIB, 1.0)
        assert (await devices.health("GPU-1")).condition == "ok"


async def test_a_list_that_cannot_be_is_an_error_of_the_driver(made: list[NvmlDevices], lines: Lines) -> None:
    with beneath_pynvml(StandIn(Board("GPU-1"))) as driver:
        devices = await over(driver, made, lines)

        def absurd(handle: Any, samples: Any, count: Any, since: Any) -> None:
            count._obj.value = 0xFFFFFFFF if samples is None else 5
            if samples is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

        patched = type("Lying", (StandIn,), {"_nvmlDeviceGetProcessUtilization": staticmethod(absurd)})
        driver.__class__ = patched
        try:
            sample = await devices.sample("GPU-1")
            assert sample.processes == ()
        except OSError as error:
            assert "driver failed" in str(error)


async def test_a_driver_that_hangs_is_asked_by_one_thread_only(made: list[NvmlDevices], lines: Lines) -> None:
    with beneath_pynvml(StandIn(Board("GPU-1"))) as driver:
        devices = await over(driver, made, lines, deadline_s=0.2)
        driver.open.clear()
        before = sum(driver.calls.values())
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await devices.sample("GPU-1")
        assert sum(driver.calls.values()) <= before + 3
        assert devices.counters["timeouts"] >= 20
        assert dict(await devices.events())["GPU-1"].condition == "unknown"
        driver.open.set()
        await until(lambda: devices.gpus()[0].condition == "ok")
        assert dict(await devices.events())["GPU-1"].condition == "ok"


async def test_starting_waits_no_longer_than_it_was_told(made: list[NvmlDevices], lines: Lines) -> None:
    with beneath_pynvml(StandIn(Board("GPU-1"))) as driver:
        driver.open.clear()
        devices = NvmlDevices(JsonLog(lines))  # type: ignore[arg-type]
        made.append(devices)
        began_s = time.monotonic()
        await devices.start_up(timeout_s=0.05)
        assert time.monotonic() - began_s < 5.0 and list(devices.gpus()) == []


async def test_without_a_driver_there_are_no_devices_until_there_is_one(
    made: list[NvmlDevices], lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml_driver, "NO_DRIVER_S", 0.01)
    monkeypatch.setattr(nvml_driver, "AGAIN_S", 0.01)
    monkeypatch.setattr(nvml_module, "REFRESH_S", 0.01)
    with beneath_pynvml(StandIn(Board("GPU-1"))) as driver:
        driver.present = False
        devices = await over(driver, made, lines)
        assert list(devices.gpus()) == [] and devices.unlisted() == "", "a machine without GPUs"
        driver.present = True
        await until(lambda: [gpu.condition for gpu in devices.gpus()] == ["ok"])
        driver.present = False
        await until(lambda: [gpu.condition for gpu in devices.gpus()] == ["unknown"])
        assert "Driver Not Loaded" in devices.gpus()[0].why and "Driver Not Loaded" in lines.text
        driver.present = True
        await until(lambda: [gpu.condition for gpu in devices.gpus()] == ["ok"])


async def test_the_driver_is_asked_once_a_second_at_most(made: list[NvmlDevices], lines: Lines) -> None:
    with beneath_pynvml(StandIn(Board("GPU-1"))) as driver:
        devices = await over(driver, made, lines)
        for _ in range(50):
            devices.gpus()
            await asyncio.sleep(0)
        assert driver.calls["nvmlDeviceGetCount_v2"] == 1


async def test_a_limit_is_set_on_a_cgroup_that_is_the_ranks_own(
    made: list[NvmlDevices], lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board("GPU-1")
    with beneath_pynvml(StandIn(board, limits=True)) as driver:
        devices = await over(driver, made, lines)
        assert "hard limit" in devices.devices()[0].can
        monkeypatch.setattr(nvml_reads, "own_cgroup", lambda pid: "/sys/fs/cgroup/j1")
        assert await devices.set_hard_limit("GPU-1", 7, GIB)
        assert board.limits == {"/sys/fs/cgroup/j1": GIB}
        assert await devices.set_hard_limit("GPU-1", 7, None)
        assert board.limits == {"/sys/fs/cgroup/j1": 2**64 - 1}
        monkeypatch.setattr(nvml_reads, "own_cgroup", lambda pid: "")
        assert await devices.set_hard_limit("GPU-1", 7, GIB) is False


def test_a_cgroup_that_others_share_is_nobodys_own(tmp_path: Path) -> None:
    def cgroup(pid: int, path: str, members: str) -> str:
        for folder in (f"proc/{pid}/task/{pid}", f"sys/fs/cgroup{path}"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / f"proc/{pid}/cgroup").write_text(f"0::{path}\n")
        (tmp_path / f"proc/{pid}/task/{pid}/children").write_text("8 9")
        (tmp_path / f"sys/fs/cgroup{path}/cgroup.procs").write_text(members)
        return nvml_reads.own_cgroup(pid, str(tmp_path))

    assert cgroup(7, "/ours/j1", "7\n8\n") == "/sys/fs/cgroup/ours/j1"
    assert cgroup(7, "/ours", "7\n8\n99\n") == ""
    assert cgroup(7, "/", "7\n") == ""
    assert nvml_reads.own_cgroup(12345, str(tmp_path)) == ""


def test_the_stand_in_is_driven_by_the_real_pynvml() -> None:
    with beneath_pynvml(StandIn(Board("GPU-1"))):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert isinstance(handle, pynvml.c_nvmlDevice_t) and ctypes.sizeof(handle) == 8
        assert pynvml.nvmlDeviceGetUUID(handle) == "GPU-1"


@pytest.mark.gpu
async def test_the_gpus_of_this_machine_are_found_by_the_real_driver(lines: Lines) -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(f"no NVIDIA driver here: {error}")
    devices = NvmlDevices(JsonLog(lines))  # type: ignore[arg-type]
    await devices.start_up()
    assert devices.devices() and all(device.memory_bytes > GIB for device in devices.devices())
    for device in devices.devices():
        assert 0.0 <= ((await devices.sample(device.uuid)).utilization or 0.0) <= 1.0
        assert (await devices.health(device.uuid)).condition in ("ok", "degraded", "drain")
    devices.close()
