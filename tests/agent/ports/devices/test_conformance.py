"""What holds for devices of every backend: real ones by NVML (over a driver that is played), cores, and a story's."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from covey.ports.devices import DeviceHealth, DeviceSample
from tests.agent.here import until
from tests.agent.ports.devices.rigs import DEADLINE_S, HELD, Rig, quicken, rig_of

BUSY = 0.04
"""The share of a core above which a process computes, also beside many others; one that does not compute gets less."""
WORDS = {"utilization", "process memory", "process utilization", "hard limit", "suspend", "events"}


@pytest.fixture(params=["sim", "cpu", "nvml", pytest.param("gpu", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    quicken(monkeypatch.setattr)
    with rig_of(request.param) as made:
        yield made


async def first(rig: Rig) -> str:
    await rig.devices.start_up()
    return rig.devices.devices()[0].uuid


async def after_a_window(rig: Rig, uuid: str) -> DeviceSample:
    """A sample over a whole window: utilization is of the time between two samples."""
    await rig.devices.sample(uuid)
    await asyncio.sleep(0.4)
    return await rig.devices.sample(uuid)


async def test_devices_have_names_sizes_and_known_abilities(rig: Rig) -> None:
    await first(rig)
    found = rig.devices.devices()
    assert len(found) >= 1 and len({device.uuid for device in found}) == len(found)
    for device in found:
        assert device.memory_bytes > 0 and device.model and device.uuid
        assert device.can <= WORDS and "process memory" in device.can
        assert device.backend in ("nvml", "cpu", "sim") and (device.backend == "cpu") == bool(device.cores)


async def test_the_scheduler_counts_the_same_devices(rig: Rig) -> None:
    await first(rig)
    counted = [(gpu.uuid, gpu.model, gpu.memory_total_bytes) for gpu in rig.devices.gpus()]
    assert counted == [(device.uuid, device.model, device.memory_bytes) for device in rig.devices.devices()]
    assert len({gpu.index for gpu in rig.devices.gpus()}) == len(counted)
    tells = [gpu.utilization is not None for gpu in rig.devices.gpus()]
    assert tells == ["utilization" in device.can for device in rig.devices.devices()]


async def test_a_process_is_seen_with_what_it_uses_and_goes_when_it_ends(rig: Rig) -> None:
    uuid = await first(rig)
    before = await rig.devices.sample(uuid)
    busy, idle = await rig.use(uuid, busy=True), await rig.use(uuid, busy=False)
    sample = await after_a_window(rig, uuid)
    used = {process.pid: process for process in sample.processes}
    assert set(used) == {busy, idle}
    for process in used.values():
        assert process.memory_bytes is not None and process.memory_bytes >= HELD
    assert (used[busy].utilization or 0.0) > BUSY > (used[idle].utilization or 0.0)
    assert (sample.utilization or 0.0) > BUSY and sample.memory_used_bytes >= before.memory_used_bytes + 2 * HELD
    await rig.end(busy)
    await rig.end(idle)
    assert (await after_a_window(rig, uuid)).processes == ()


async def test_what_is_done_on_one_device_is_not_counted_on_another(rig: Rig) -> None:
    uuid = await first(rig)
    pid = await rig.use(uuid, busy=False)
    for device in rig.devices.devices():
        seen = {process.pid for process in (await after_a_window(rig, device.uuid)).processes}
        assert seen == ({pid} if device.uuid == uuid else set())


async def test_figures_stay_within_the_device(rig: Rig) -> None:
    uuid = await first(rig)
    total = rig.devices.devices()[0].memory_bytes
    for _ in range(3):
        await rig.use(uuid, busy=True)
    sample = await after_a_window(rig, uuid)
    assert 0 <= sample.memory_used_bytes <= total and 0.0 <= (sample.utilization or 0.0) <= 1.0
    assert all(0.0 <= (process.utilization or 0.0) <= 1.0 for process in sample.processes)


async def test_a_device_that_is_not_here_is_refused_in_words(rig: Rig) -> None:
    await first(rig)
    for call in (rig.devices.sample("GPU-9"), rig.devices.health("GPU-9"), rig.devices.set_hard_limit("GPU-9", 1, 1)):
        with pytest.raises(OSError, match="GPU-9"):
            await call


async def test_a_healthy_device_says_so_and_nothing_happens(rig: Rig) -> None:
    uuid = await first(rig)
    began_s = time.monotonic()
    assert await rig.devices.health(uuid) == DeviceHealth()
    assert list(await rig.devices.events()) == []
    assert time.monotonic() - began_s < 5.0, "it waits about a second"


async def test_a_device_that_breaks_is_lost_and_that_is_told_once(rig: Rig) -> None:
    uuid = await first(rig)
    rig.break_(uuid)
    assert (await rig.devices.health(uuid)).condition == "lost"
    told = await rig.devices.events()
    assert [(who, what.condition) for who, what in told] == [(uuid, "lost")] and told[0][1].why
    assert list(await rig.devices.events()) == []
    await until(lambda: {gpu.uuid: gpu.takes_jobs for gpu in rig.devices.gpus()}[uuid] is False)
    others = [device.uuid for device in rig.devices.devices() if device.uuid != uuid]
    assert [await rig.devices.health(other) for other in others] == [DeviceHealth()] * len(others)


async def test_suspend_holds_a_process_where_the_backend_can(rig: Rig) -> None:
    uuid = await first(rig)
    pid = await rig.use(uuid, busy=True)
    can = "suspend" in rig.devices.devices()[0].can
    assert await rig.devices.suspend(pid) is can
    share = {process.pid: process.utilization or 0.0 for process in (await after_a_window(rig, uuid)).processes}[pid]
    assert share < BUSY if can else share > BUSY
    assert await rig.devices.resume(pid) is can
    share = {process.pid: process.utilization or 0.0 for process in (await after_a_window(rig, uuid)).processes}[pid]
    assert share > BUSY


async def test_a_process_that_is_not_there_is_not_suspended(rig: Rig) -> None:
    await first(rig)
    assert await rig.devices.suspend(1) is False
    assert await rig.devices.resume(1) is False


async def test_a_hard_limit_is_set_only_where_the_backend_says_it_can(rig: Rig) -> None:
    uuid = await first(rig)
    pid = await rig.use(uuid, busy=False)
    held = await rig.devices.set_hard_limit(uuid, pid, HELD // 2)
    assert not held or "hard limit" in rig.devices.devices()[0].can
    if held:
        (process,) = (await after_a_window(rig, uuid)).processes
        assert process.memory_bytes == HELD // 2
        assert await rig.devices.set_hard_limit(uuid, pid, None)


async def test_one_that_hangs_is_contained_and_said_and_comes_back(rig: Rig) -> None:
    uuid = await first(rig)
    await rig.devices.sample(uuid)
    await asyncio.sleep(0.15)
    rig.hang()
    ticks, began_s = 0, time.monotonic()

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    ticking = asyncio.ensure_future(tick())
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await rig.devices.sample(uuid)
    health = await rig.devices.health(uuid)
    assert health.condition == "unknown" and "answer" in health.why
    assert {gpu.condition for gpu in rig.devices.gpus()} == {"unknown"}, (
        "nobody knows how they are, and none takes jobs"
    )
    assert len(rig.devices.devices()) == len(rig.devices.gpus()) >= 1, "the newest that is known, at once"
    assert time.monotonic() - began_s < DEADLINE_S * 4 + 3.0 and ticks > 10, "the loop went on"
    ticking.cancel()
    rig.answer()
    end_s = time.monotonic() + 10.0
    while True:  # who asks while the call that hung comes to its end is answered as before
        try:
            assert (await rig.devices.sample(uuid)).memory_used_bytes >= 0
            break
        except TimeoutError:
            assert time.monotonic() < end_s, "it does not come back"
    assert await rig.devices.health(uuid) == DeviceHealth()
