"""The service on the real jobs.sock: pages reach ranks, reports reach the machine, a dead agent stops no rank."""

import asyncio
import mmap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from covey.core.ids import JobId
from covey.core.units import GIB, MIB
from covey.job.client import JobClient
from covey.kernel.pages import FlagWriter, LimitsReader, MiniBatch, RankLimits, RankReport, ReportWriter, rates_at
from covey.ports.devices import DeviceHealth, DeviceSample
from covey.wire.job import AskPages
from plugins.base import PluginService
from plugins.sharing.plugin import PLUGIN
from plugins.sharing.service.metrics import GPU_JOBS
from tests.agent.here import until
from tests.plugins.sharing.live_host import LiveHost, live_host

SLEEP = ("sleep", "600")
MS = 1_000_000


class Obedient:
    """A rank in this process that follows its pages as `covey.hooks` does, at a pace that the test sets."""

    def __init__(self, host: LiveHost, job: str) -> None:
        self.host, self.job = host, job
        self.page = RankLimits()
        self.limits: LimitsReader | None = None
        self.report: ReportWriter
        self.report_page: mmap.mmap
        self.flag: FlagWriter
        self.neighbour: mmap.mmap | None = None
        self.steps = self.acked = self.memory_bytes = 0
        self.client: JobClient

    async def connect(self) -> "Obedient":
        environ = {"COVEY_SOCKET": f"{self.host.env.run_dir}/jobs.sock", "COVEY_JOB_ID": self.job, "COVEY_RANK": "0"}
        environ |= {
            "COVEY_WORLD_SIZE": "1",
            "COVEY_EPOCH": "1",
            "COVEY_TABLES": "1",
            "COVEY_TOKEN": "secret",
            "COVEY_HOST": "h1",
        }
        self.client = JobClient(environ)
        self.client.share(self)
        await until(lambda: self.limits is not None)
        await until(lambda: self.look().epoch > 0)
        return self

    def now(self) -> AskPages:
        return AskPages(self.acked, self.memory_bytes)

    def pages_came(self, limits: mmap.mmap, report: mmap.mmap, flag: mmap.mmap) -> None:
        self.report, self.flag, self.limits = ReportWriter(report), FlagWriter(flag), LimitsReader(limits)
        self.report_page = report

    def neighbour_is(self, flag: mmap.mmap | None) -> None:
        self.neighbour = flag

    def pages_lost(self) -> None:
        """Continue by the last pages, since the agent is gone."""

    def look(self) -> RankLimits:
        assert self.limits is not None
        if self.limits.changed() and self.limits.newest is not None:
            self.page = self.limits.newest
        return self.page

    def step(self, count: int = 1, step_ms: int = 10, peak: int = 64 * MIB) -> None:
        for _ in range(count):
            self.look()
            self.acked, self.memory_bytes = self.page.epoch, self.page.memory_bytes
            self.steps += 1
            told = RankReport(self.acked, self.memory_bytes, peak, peak // 2, gate=1, says_idle=True)
            self.report.write(told, MiniBatch(self.steps, step_ms * MS, step_ms * MS // 2))

    @property
    def stopped(self) -> bool:
        rates = rates_at(self.look(), time.monotonic_ns())
        return rates.idle == 0 and rates.busy == 0

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)


async def ticks(host: LiveHost) -> None:
    """Wait until the service has read its ranks' pages a few times, and acted on them."""
    before = host.reads
    await until(lambda: host.reads >= before + 3)


async def looked_at_devices(host: LiveHost) -> None:
    """Wait until the service has looked at the devices twice."""
    before = host.devices.samples
    await until(lambda: host.devices.samples >= before + 2)


async def rank(host: LiveHost, job: str, kind: str, memory_bytes: int = GIB // 2) -> Obedient:
    await host.come(job, kind, SLEEP, memory_bytes)  # type: ignore[arg-type]
    return await Obedient(host, job).connect()


async def test_a_guaranteed_rank_waits_until_the_other_has_given_room_and_then_runs_free() -> None:
    """Reference: AntMan §3.3, Local coordinator."""
    async with live_host(1 * GIB) as host:
        other = await rank(host, "o", "opportunistic", GIB)
        assert other.look().free
        other.step()
        host.coming("g", "guaranteed", GIB // 2)
        await until(lambda: other.look().memory_bytes <= GIB // 2)
        await ticks(host)
        assert not host.may_start("g") and not other.stopped, "it gives memory back at the end of a mini-batch"
        other.step()
        await until(lambda: host.may_start("g"))
        assert other.stopped
        host.start("g", SLEEP)
        mine = await Obedient(host, "g").connect()
        assert mine.look().free and mine.look().guaranteed
        await until(lambda: other.neighbour is not None)
        await mine.close()
        await other.close()


async def test_an_agent_that_dies_stops_nobody_and_the_next_one_raises_no_limit() -> None:
    async with live_host(1 * GIB) as host:
        other = await rank(host, "o", "opportunistic", GIB // 2)
        other.step()
        guaranteed = await rank(host, "g", "guaranteed", GIB // 4)
        await until(lambda: other.stopped)
        other.step()
        held = other.look().memory_bytes
        await host.end()
        over_ns = time.monotonic_ns() + 2_000_000_000
        assert rates_at(other.look(), over_ns).busy == pytest.approx(0.1), "a lease is two seconds"
        await until(lambda: not other.stopped)
        assert rates_at(other.look(), time.monotonic_ns()).busy == pytest.approx(0.1)
        assert guaranteed.look().free
        host.told.clear()
        await host.begin()
        host.coming("g", "guaranteed", GIB // 4, running=True)
        host.coming("o", "opportunistic", GIB // 2, running=True)
        await until(lambda: other.stopped, 10.0)
        assert other.look().memory_bytes == held
        assert host.may_start("o") and host.may_start("g")
        await guaranteed.close()
        await other.close()


async def test_a_rank_that_is_killed_gives_its_share_back_within_a_second_or_two() -> None:
    async with live_host(1 * GIB) as host:
        other = await rank(host, "o", "opportunistic", GIB)
        other.step()
        guaranteed = await rank_after(host, other)
        await guaranteed.close()
        sampled = host.devices.samples
        host.kill("g")

        def is_given() -> bool:
            looks = host.devices.samples - sampled
            given = other.look().free and other.look().memory_bytes > GIB // 2
            assert given or looks <= 2, "devices are looked at once a second"
            return given

        await until(is_given)
        await other.close()


async def rank_after(host: LiveHost, other: Obedient) -> Obedient:
    host.coming("g", "guaranteed", GIB // 2)
    await until(lambda: other.look().memory_bytes <= GIB // 2)
    other.step()
    await until(lambda: host.may_start("g"))
    host.start("g", SLEEP)
    return await Obedient(host, "g").connect()


async def test_garbage_in_a_page_is_counted_said_once_and_ignored() -> None:
    async with live_host() as host:
        other = await rank(host, "o", "opportunistic")
        other.step()
        for _ in range(20):
            other.report_page[:] = bytes(range(256)) * (len(other.report_page) // 256)
            await asyncio.sleep(0.06)
        await until(lambda: host.service.counters["garbage"] > 0)
        assert [note for note in host.notes if note[1] == "page ignored"][1:] == []
        other.report = ReportWriter(other.report_page)
        other.report._sequence = 1 << 60  # newer than whatever the garbage says
        other.step()
        await until(lambda: host.service.machine.gpus["CPU-h1-0"].members[JobId("o")].last_step_s > 0)
        await other.close()


async def test_who_asks_for_no_pages_is_suspended_before_the_guaranteed_job_starts() -> None:
    async with live_host(1 * GIB) as host:
        await host.come("o", "opportunistic", SLEEP, GIB)
        host.coming("g", "guaranteed", GIB // 2)
        await until(lambda: host.may_start("g"), 15.0)
        await until(lambda: state_of(host.processes[JobId("o")].pid) == "T")  # nothing in it gives memory back
        await looked_at_devices(host)
        assert state_of(host.processes[JobId("o")].pid) == "T", "nothing in it goes by less"
        host.kill("o")


async def test_who_is_suspended_goes_on_when_it_is_asked_to_end() -> None:
    async with live_host(1 * GIB) as host:
        await host.come("o", "opportunistic", SLEEP, GIB)
        pid = host.processes[JobId("o")].pid
        host.coming("g", "guaranteed", GIB // 2)
        await until(lambda: state_of(pid) == "T", 15.0)
        host.runner.ending.add((JobId("o"), 1))
        await until(lambda: state_of(pid) != "T")
        await looked_at_devices(host)
        assert state_of(pid) != "T", "it has its grace to save"
        host.kill("o")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_device_that_is_lost_gives_its_jobs_back_with_the_reason() -> None:
    async with live_host() as host:
        other = await rank(host, "o", "opportunistic")
        host.devices.condition = DeviceHealth("lost", "XID 79: it has fallen off the bus")
        host.devices.news.put_nowait(("CPU-h1-0", host.devices.condition))
        await until(lambda: host.given_back("o") is not None)
        assert "XID 79" in str(host.given_back("o")) and host.state() == "lost"
        host.coming("p", "opportunistic")
        await until(lambda: host.given_back("p") is not None)
        await other.close()


async def test_memory_of_who_ended_is_not_handed_on_while_the_device_does_not_answer() -> None:
    """A device that is lost holds nothing any more; one that does not answer may hold everything."""
    async with live_host() as host:
        service = host.service

        async def hangs(uuid: str) -> DeviceHealth:
            raise TimeoutError("the driver does not answer")

        for condition, lost in (("ok", False), ("unknown", False), ("drain", False), ("lost", True)):
            host.devices.condition = DeviceHealth(condition, "why")  # type: ignore[arg-type]
            assert await service._is_lost("CPU-h1-0") is lost, condition
        host.devices.health = hangs  # type: ignore[method-assign]
        assert await service._is_lost("CPU-h1-0") is False


class LetsGo:
    """The part of the port of processes with which ranks are let go."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    async def let_go(self, pid: int) -> bool:
        self.pids.append(pid)
        return True


async def test_a_rank_is_let_go_once_when_its_first_mini_batch_has_ended() -> None:
    """The rank's pages are there long before: modules are imported after that, and nothing in it can be stopped
    meanwhile."""
    async with live_host() as host:
        port = LetsGo()
        host.service.env = replace(host.service.env, processes=port)  # type: ignore[arg-type]
        other = await rank(host, "o", "opportunistic")
        other.report.write(RankReport(other.look().epoch, 0, 0, 0, gate=1, says_idle=True), None)
        await ticks(host)
        assert port.pids == []
        for _ in range(2):
            other.step()
            await ticks(host)
        assert port.pids == [host.processes[JobId("o")].pid]
        await other.close()
        ungated = await rank(host, "p", "opportunistic")
        host.change("p", "guaranteed", 12)
        await until(lambda: len(port.pids) == 2)
        await ungated.close()


async def test_an_upgrade_changes_class_in_place() -> None:
    """Reference: AntMan §3.3, Job upgrade."""
    async with live_host() as host:
        other = await rank(host, "o", "opportunistic")
        other.step()
        assert not other.look().guaranteed
        host.change("o", "guaranteed", 12)
        await until(lambda: other.look().guaranteed)
        host.change("o", "opportunistic", 13)
        await until(lambda: not other.look().guaranteed)
        assert host.processes[JobId("o")].poll() is None and host.runner.stopped == [], "it runs on"
        assert host.given_back("o") is None and other.client.connected
        await other.close()


async def test_people_see_who_shares_and_what_it_costs() -> None:
    async with live_host() as host:
        guaranteed = await rank(host, "g", "guaranteed")
        other = await rank(host, "o", "opportunistic")
        for _ in range(40):
            guaranteed.step(10)
            other.step(1)
            await asyncio.sleep(0.06)
            if host.state() == "run":
                break
        (gpu,) = await host.service.commands()["gpus"]({})
        assert [(job.job, job.kind) for job in gpu.jobs] == [("g", "guaranteed"), ("o", "opportunistic")]
        assert gpu.state == "run" and gpu.jobs[0].may == "without limit"
        (row,) = await host.service.commands()["interference"]({"job": "g"})
        assert row.beside == ("o",) and row.baseline_s == pytest.approx(0.01) and row.audits == 1
        assert await host.service.commands()["interference"]({"job": "o"}) == []
        metrics = host.service.metrics()
        assert metrics[GPU_JOBS.of(gpu.gpu)] == 2
        await guaranteed.close()
        await other.close()


def test_the_plugin_is_what_agents_start() -> None:
    assert issubclass(PLUGIN.service, PluginService) and PLUGIN.name == "sharing"  # type: ignore[arg-type]


async def test_a_device_that_does_not_answer_shows_nothing_of_now() -> None:
    """What the device showed last has no process that began since, nor memory that was taken since."""
    async with live_host() as host:
        watch = host.service.watch
        assert await watch.look("CPU-h1-0") is not None

        async def hangs(uuid: str) -> DeviceSample:
            raise TimeoutError("the driver does not answer")

        host.devices.sample = hangs  # type: ignore[method-assign]
        assert await watch.look("CPU-h1-0") is None
