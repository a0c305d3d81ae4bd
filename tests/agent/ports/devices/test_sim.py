"""Devices of a story, in virtual time."""

import asyncio

import pytest

from agent.ports.devices.sim import DeviceFault, SimDevices, simulated_devices
from chaos.rackworld import SimRack
from covey.core.ids import HostId
from covey.core.units import GIB
from covey.ports.devices import DeviceHealth

DEVICE, OTHER = "GPU-sim-h1-0", "GPU-sim-h1-1"


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_script_of_faults_happens_at_its_times() -> None:
    time = Time()
    script = [
        DeviceFault(30.0, DEVICE, "lost"),
        DeviceFault(10.0, DEVICE, "xid", 63),
        DeviceFault(20.0, DEVICE, "ecc", 3),
        DeviceFault(25.0, DEVICE, "xid", 95),
        DeviceFault(40.0, DEVICE, "well"),
    ]
    devices = SimDevices(simulated_devices(HostId("h1"), 2), time, script)
    seen = []
    for time.now_s in (5.0, 12.0, 22.0, 26.0, 33.0, 45.0):
        seen.append((await devices.health(DEVICE)).condition)
        assert len(devices.gpus()) == len(devices.devices()) == 2, "none vanishes"
        assert devices.gpus()[0].condition == seen[-1]
    assert seen == ["ok", "degraded", "degraded", "drain", "lost", "ok"]
    assert (await devices.health(OTHER)).condition == "ok"


async def test_what_a_process_used_ends_with_it() -> None:
    alive = {7, 8}
    devices = SimDevices(simulated_devices(HostId("h1"), 1), lambda: 0.0, alive=alive.__contains__)
    devices.use(DEVICE, 7, GIB, 0.5)
    devices.use(DEVICE, 8, GIB, 0.25)
    assert (await devices.sample(DEVICE)).utilization == 0.75
    alive.remove(7)
    sample = await devices.sample(DEVICE)
    assert (sample.memory_used_bytes, sample.utilization) == (GIB, 0.25)
    assert devices.gpus()[0].memory_used_bytes == GIB


async def test_a_suspended_process_is_off_its_device_until_it_goes_on() -> None:
    devices = SimDevices(simulated_devices(HostId("h1"), 1), lambda: 0.0)
    devices.use(DEVICE, 7, GIB, 0.5)
    assert await devices.suspend(7)
    assert (await devices.sample(DEVICE)).memory_used_bytes == 0
    assert await devices.resume(7)
    assert (await devices.sample(DEVICE)).memory_used_bytes == GIB


async def test_a_suspension_ends_by_itself_like_a_real_one() -> None:
    time = Time()
    devices = SimDevices(simulated_devices(HostId("h1"), 1), time)
    devices.use(DEVICE, 7, GIB, 0.5)
    assert await devices.suspend(7)
    time.now_s = 9.0
    assert (await devices.sample(DEVICE)).utilization == 0.0
    time.now_s = 10.5
    assert (await devices.sample(DEVICE)).utilization == 0.5


async def test_more_than_the_device_has_is_not_used() -> None:
    devices = SimDevices(simulated_devices(HostId("h1"), 1, GIB), lambda: 0.0)
    for pid in (7, 8):
        devices.use(DEVICE, pid, 3 * GIB, 0.9)
    sample = await devices.sample(DEVICE)
    assert (sample.memory_used_bytes, sample.utilization) == (GIB, 1.0)


def test_hosts_of_the_simulator_have_devices_that_stories_strike() -> None:
    with SimRack(3, hosts=1).start() as rack:
        rack.settle()
        host = rack.hosts["h1"]
        assert host.agent is not None
        uuid = host.probes.devices.devices()[0].uuid
        host.probes.devices.use(uuid, host.agent.id.pid, GIB, 0.5)
        told: list[tuple[str, DeviceHealth]] = []

        async def listen() -> None:
            while True:
                told.extend(await host.probes.devices.events())

        host.agent.spawn("listen", listen())
        rack.run(3.0)
        assert told == [] and host.probes.gpus()[0].memory_used_bytes == GIB
        host.probes.devices.strike(DeviceFault(rack.world.now + 1.0, uuid, "lost"))
        rack.run(5.0)
        assert [(who, health.condition) for who, health in told] == [(uuid, "lost")]
        assert {gpu.uuid: gpu.takes_jobs for gpu in host.probes.gpus()}[uuid] is False


async def test_calls_wait_for_a_driver_that_is_stuck_and_then_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.ports.devices.sim.STUCK_S", 0.01)
    devices = SimDevices(simulated_devices(HostId("h1"), 2), lambda: 0.0, [DeviceFault(0.0, DEVICE, "stuck")])
    for call in (devices.sample(OTHER), devices.suspend(7), devices.set_hard_limit(OTHER, 7, 1)):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await call
    assert {(await devices.health(uuid)).condition for uuid in (DEVICE, OTHER)} == {"unknown"}
