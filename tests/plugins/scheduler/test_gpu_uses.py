"""GPUs that are not used as the log says: by processes that no job started, or by nobody although a job holds them."""

import asyncio
from collections.abc import Sequence

import msgspec

from covey.core.ids import HostId, JobId
from covey.ports.devices import DeviceProcess
from plugins.gossiped import GpusNow
from plugins.scheduler.machine.host.gpu_uses import FOREIGN_S, IDLE_S, GpuLook, GpusLooked, GpuUses, idle_words
from plugins.scheduler.service.gpus import gpus_here
from plugins.scheduler.service.metrics import GPU_FOREIGN, GPU_IDLE_SECONDS, GPU_TAKES_JOBS, GPUS_FREE, GPUS_OUT
from tests.plugins.scheduler.rack import Rack, on_a_rack, submit, until

J1 = JobId("j1")
BIG, SMALL, UNKNOWN = DeviceProcess(4242, 10 << 30), DeviceProcess(7, 1 << 20), DeviceProcess(9, None)
NONE = DeviceProcess(8, 0)


def seen(
    uses: GpuUses, at_s: float, job: JobId | None, busy: float | None, there: Sequence[DeviceProcess] | None
) -> None:
    uses.handle(GpusLooked((GpuLook("GPU-0", job, busy, None if there is None else tuple(there)),)), at_s)


def test_a_process_that_stays_on_a_gpu_which_nobody_holds_is_foreign() -> None:
    uses = GpuUses()
    seen(uses, 0.0, None, 0.5, [SMALL])
    seen(uses, 100.0, None, 0.5, [SMALL, BIG])
    assert not uses.foreign(100.0 + FOREIGN_S - 1), "a job that has just ended leaves within a second or two"
    seen(uses, 105.0, None, None, None)
    said = uses.foreign(100.0 + FOREIGN_S)["GPU-0"]
    assert said == "used by process 4242, which no job of the rack started", "a driver that is silent changes nothing"
    seen(uses, 111.0, None, 0.5, [BIG, UNKNOWN, *(DeviceProcess(each, 1 << 30) for each in (5, 6, 8))])
    assert "processes 4242, 9, 5 and 2 more" in uses.foreign(111.0)["GPU-0"]
    seen(uses, 112.0, None, 0.0, [SMALL, NONE])
    assert not uses.foreign(200.0), "no bytes of the device are not unknown ones"
    seen(uses, 201.0, None, 0.0, [BIG])
    seen(uses, 206.0, J1, 0.0, [BIG])
    assert not uses.foreign(300.0), "it is the job's now"
    seen(uses, 301.0, None, 0.0, [BIG])
    uses.handle(GpusLooked(()), 302.0)
    assert not uses.foreign(400.0), "the GPU was taken out"


def test_processes_on_a_gpu_that_this_agent_sees_for_the_first_time_count_at_once() -> None:
    """A restart of the agent must not make a GPU free for as long as it takes to be sure that a job left."""
    uses = GpuUses()
    seen(uses, 0.0, None, None, None)
    assert not uses.tells_processes("GPU-0") and not uses.tells_utilization("GPU-0"), "the driver told nothing yet"
    seen(uses, 5.0, None, 0.5, [BIG])
    assert uses.foreign(5.0) and uses.tells_processes("GPU-0") and uses.tells_utilization("GPU-0")
    uses.handle(GpusLooked(()), 10.0)
    assert not uses.tells_processes("GPU-0"), "the GPU was taken out"
    uses = GpuUses()
    seen(uses, 0.0, J1, 0.5, None)
    seen(uses, 5.0, None, 0.5, [BIG])
    assert not uses.foreign(5.0 + FOREIGN_S - 1), "a job held it when this agent started"


def test_a_gpu_that_its_job_does_not_use_for_ten_minutes_is_idle() -> None:
    uses = GpuUses()
    seen(uses, 0.0, J1, 0.0, None)
    seen(uses, IDLE_S - 1, J1, 0.0, None)
    assert not uses.idle(IDLE_S - 1)
    seen(uses, IDLE_S, J1, 0.0, [])
    assert idle_words(uses.idle(IDLE_S)["GPU-0"], IDLE_S) == "idle for 10 min: no process is there"
    seen(uses, IDLE_S + 20, J1, 0.0, [BIG])
    assert idle_words(uses.idle(IDLE_S + 20)["GPU-0"], IDLE_S + 20).endswith(": process 4242 computes nothing")
    seen(uses, IDLE_S + 30, J1, 0.01, None)
    assert not uses.idle(2 * IDLE_S)
    seen(uses, 1000.0, J1, 0.0, None)
    seen(uses, 1500.0, J1, None, None)
    assert not uses.idle(1000.0 + IDLE_S), "while its use is not known it is not idle"
    seen(uses, 1600.0, JobId("j2"), 0.0, None)
    assert not uses.idle(1500.0 + IDLE_S), "another job has it"


def test_what_is_gossiped_of_gpus_fits_whatever_is_wrong() -> None:
    class Nothing:
        def out(self) -> dict[str, str]:
            return {}

        def free(self) -> list[str]:
            return []

    in_trouble = {JobId(f"j{10**10 + number}"): "degraded" for number in range(9)} | {JobId("j" + "9" * 30): "lost"}
    long = gpus_here.now((), "x" * 500, Nothing(), in_trouble)  # type: ignore[arg-type]
    assert len(long.held) == 2 and all(len(job) < 13 for job in long.held)
    spread = GpusNow(999, 999, "m" * 64, True, 999, long.why, False, long.held)
    assert len(msgspec.msgpack.encode(spread)) <= 256


@on_a_rack()
async def test_no_job_gets_a_gpu_that_somebody_else_uses_until_that_ends(rack: Rack) -> None:
    others = rack["gpu1"].machine.probes.devices
    others.processes = {"GPU-gpu1-0": (BIG,)}
    await until(lambda: rack["gpu1"].service.ranks.reservations.free() == ["GPU-gpu1-1"], 30.0)
    metrics = rack["gpu1"].service.metrics()
    assert (metrics[GPU_FOREIGN.of("GPU-gpu1-0")], metrics[GPU_TAKES_JOBS.of("GPU-gpu1-0")]) == (1, 0)
    assert (metrics[GPU_FOREIGN.of("GPU-gpu1-1")], metrics[GPU_TAKES_JOBS.of("GPU-gpu1-1")]) == (0, 1)
    assert metrics[GPU_IDLE_SECONDS.of("GPU-gpu1-0")] == 0
    assert GPU_IDLE_SECONDS.of("GPU-gpu1-1") not in metrics, "a simulated GPU without processes tells no use"
    assert (metrics[GPUS_OUT.of()], metrics[GPUS_FREE.of()]) == (1, 1), "each GPU is held, free or out"
    uses = await rack["gpu1"].call("gpu_uses")
    assert uses == {"GPU-gpu1-0": "used by process 4242, which no job of the rack started"}
    await submit(rack, workers=8)
    await until(lambda: "used by process 4242" in rack["gpu2"].service._standing().reason(rack.job("j1")), 30.0)
    assert rack.job("j1").state == "queued"
    others.fails, probes = True, rack["gpu1"].machine.probes
    probes._gpus = [*probes.gpus(), msgspec.structs.replace(probes.gpus()[0], uuid="GPU-new", condition="unknown")]
    await asyncio.sleep(60.0)
    assert rack.job("j1").state == "queued", "a driver that is silent says of nobody that it left"
    metrics = rack["gpu1"].service.metrics()
    assert GPU_FOREIGN.of("GPU-new") not in metrics, "its driver never told who is there"
    assert metrics[GPU_FOREIGN.of("GPU-gpu1-0")] == 1
    others.fails, others.processes, probes._gpus = False, {}, list(probes.gpus()[:2])
    await until(lambda: rack.job("j1").state == "running", 30.0)
    assert HostId("gpu1") in {place.host for place in rack.job("j1").start.places}


@on_a_rack()
async def test_jobs_that_hold_sick_or_idle_gpus_are_told_so_by_every_host(rack: Rack) -> None:
    await submit(rack, workers=2)
    await until(lambda: rack.job("j1").state == "running", 30.0)
    (place,) = rack.job("j1").start.places
    probes = rack[place.host].machine.probes
    probes.devices.processes = {place.devices[0]: (BIG,)}
    probes._gpus = [
        msgspec.structs.replace(gpu, condition="drain", why="XID 48") if gpu.uuid == place.devices[1] else gpu
        for gpu in probes.gpus()
    ]
    await asyncio.sleep(IDLE_S + 60.0)
    other = next(host for host in rack.hosts.values() if host.id != place.host)
    (listed,) = await other.call("jobs")
    assert listed.seen.devices[place.host] == "a GPU is drain", "the worse of both, by gossip"
    view = await other.call("job", id="j1")
    said = view.seen.devices[place.host]
    assert "GPU 1 is drain: XID 48" in said and "GPU 0 idle for 1" in said and "process 4242 computes nothing" in said
    found = rack[place.host].service.metrics()
    idle_s = found[GPU_IDLE_SECONDS.of(place.devices[0])]
    assert isinstance(idle_s, float) and IDLE_S <= idle_s < 2 * IDLE_S
