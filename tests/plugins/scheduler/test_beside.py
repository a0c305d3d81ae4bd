"""GPUs that are shared, live on a rack of fakes: which jobs come beside which, when ranks start, what the log makes of
it."""

from collections.abc import Awaitable, Callable
from typing import Any

from covey.core.events import Fact
from covey.core.ids import HostId, JobId
from plugins.facts import (
    GpusMeasured,
    GpuUse,
    KindChanged,
    PairHarms,
    RanksComing,
    RanksMayStart,
    RanksUnfit,
    SecondPassed,
)
from plugins.gossiped import GpusShared
from plugins.scheduler.machine.leader.capacity import Capacity
from plugins.scheduler.machine.leader.shared_capacity import SharedCapacity
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.policy.shared import device_of, is_part, short_name
from tests.plugins.scheduler.rack import FakeHost, Rack, on_a_rack, submit, until

SHARING = SchedulerSettings(beside=2, demote_after_s=5.0, quotas={"red": 2})
TWO = {"gpu1": 2, "gpu2": 2}
GIB = 1 << 30


class Stub:
    """The sharing of every host: it measures once a second, and lets everybody start, unless told otherwise."""

    def __init__(self) -> None:
        self.busy: dict[str, float] = {}
        self.free_bytes: dict[str, int] = {}
        self.refusal: dict[str, str] = {}
        self.silent = False
        self.mute: set[str] = set()
        """Hosts that measure nothing."""

    def __call__(self, host: FakeHost, fact: Fact) -> None:
        if isinstance(fact, SecondPassed) and host.id not in self.mute:
            host.publish(GpusMeasured(tuple(self.use(gpu.uuid) for gpu in host.machine.probes.gpus())))
        elif isinstance(fact, RanksComing) and not self.silent:
            host.publish(RanksMayStart(fact.job, fact.epoch))

    def use(self, gpu: str) -> GpuUse:
        return GpuUse(gpu, self.busy.get(gpu, 0.0), self.free_bytes.get(gpu, 64 * GIB), self.refusal.get(gpu, ""))


def sharing(test: Callable[[Rack, Stub], Awaitable[None]]) -> Callable[..., None]:
    """Give a test a rack whose hosts share their GPUs, and what stands for their plugin `sharing`."""

    @on_a_rack(TWO, SHARING)
    async def told(rack: Rack) -> None:
        rack.sharing = stub = Stub()
        await until(lambda: all("gpus_shared" in rack.values[host] for host in rack.hosts))
        await until(lambda: all(takes(rack, host) == 2 for host in rack.hosts))
        await test(rack, stub)

    return told


def takes(rack: Rack, host: HostId) -> int | None:
    view = next(view for view in rack.views(host) if view.host == host)
    said = view.value("gpus_shared", GpusShared)
    return said.takes if isinstance(said, GpusShared) else None


def units(capacity: Capacity) -> list[HostId]:
    return list(capacity.units) if isinstance(capacity, SharedCapacity) else []


def gpus_of(rack: Rack, job: str) -> list[str]:
    return [gpu for place in rack.job(job).start.places for gpu in place.gpus]


async def running(rack: Rack, id: str, **fields: Any) -> list[str]:
    """Submit a job, and return the GPUs on which it runs."""
    view = await submit(rack, **fields)
    assert view.id == id
    await until(lambda: rack.job(id).state == "running" and starts(rack, id) == len(rack.job(id).start.places))
    return gpus_of(rack, id)


def starts(rack: Rack, job: str, epoch: int | None = None) -> int:
    of = [key for host in rack.hosts.values() for key in host.machine.starts if key[0] == job]
    return len([key for key in of if epoch in (None, key[1])])


def told(rack: Rack, kind: type[Fact]) -> list[Any]:
    return [fact for host in rack.hosts.values() for fact in host.told if isinstance(fact, kind)]


@sharing
async def test_opportunistic_jobs_run_beside_a_guaranteed_one_that_alone_counts(rack: Rack, stub: Stub) -> None:
    first = await running(rack, "j1", tenant="blue")
    assert not any(map(is_part, first)) and len(set(first)) == 4
    beside = await running(rack, "j2", tenant="red", **{"class": "opportunistic"})
    assert sorted(map(device_of, beside)) == sorted(first) and all(map(is_part, beside))
    again = await running(rack, "j3", tenant="red", **{"class": "opportunistic"})
    assert not set(again) & set(beside) and sorted(map(device_of, again)) == sorted(first)
    queue = rack["gpu1"].service.queue
    assert (queue.used("blue"), queue.used("red")) == (4, 0)
    ranks = [rank for host in rack.hosts.values() for spec in host.machine.ranks.values() for rank in spec.ranks]
    assert {gpu for rank in ranks for gpu in rank.gpus} == set(first), "ranks get GPUs, not parts"
    await submit(rack, tenant="red", **{"class": "opportunistic"})
    await until(lambda: "2 opportunistic jobs" in rack.job("j4").reason or rack.job("j4").state == "queued")
    assert starts(rack, "j4") == 0, "two are beside on each GPU"
    rack.finish("j2")
    await until(lambda: starts(rack, "j4") == 2)


@sharing
async def test_a_guaranteed_job_takes_gpus_that_it_shares_with_the_fewest_and_stops_nobody(
    rack: Rack, stub: Stub
) -> None:
    guest = await running(rack, "j1", workers=1, **{"class": "opportunistic"})
    alone = await running(rack, "j2", workers=3, pack="any")
    assert device_of(guest[0]) not in alone
    last = await running(rack, "j3", workers=1)
    assert last == [device_of(guest[0])]
    assert rack.job("j1").state == "running" and rack.job("j1").tally.preemptions == 0


@sharing
async def test_a_host_refuses_by_what_it_measured_in_words(rack: Rack, stub: Stub) -> None:
    stub.busy = dict.fromkeys(("GPU-gpu1-0", "GPU-gpu1-1"), 0.9)
    stub.free_bytes = {"GPU-gpu2-0": 4 * GIB}
    await until(lambda: rack["gpu2"].service.ranks.reservations.uses["GPU-gpu2-0"].free_bytes == 4 * GIB)
    await until(lambda: len(told(rack, GpusMeasured)) > 8)
    fits = await running(rack, "j1", workers=1, gpu_memory=8 * GIB, **{"class": "opportunistic"})
    assert fits == ["GPU-gpu2-1+1"]
    await submit(rack, workers=2, gpu_memory=8 * GIB, **{"class": "opportunistic"})
    await until(lambda: "without enough free memory" in rack.job("j2").reason)
    assert "gpu2 refused: 2 GPUs were requested and 1 are free: 1 without enough free memory" in rack.job("j2").reason
    stub.free_bytes.clear()
    await until(lambda: starts(rack, "j2") == 1)


@sharing
async def test_ranks_start_only_when_the_sharing_says_so_and_it_is_told_until_then(rack: Rack, stub: Stub) -> None:
    stub.silent = True
    await submit(rack, workers=2)
    await until(lambda: rack.job("j1").state == "running")
    await until(lambda: len(told(rack, RanksComing)) > 5)
    coming = told(rack, RanksComing)[-1]
    assert (coming.job, coming.kind, coming.running) == ("j1", "guaranteed", False)
    assert sorted(coming.gpus) == [0, 1] and starts(rack, "j1") == 0
    notes = [note for host in rack.hosts.values() for note in host.notes if note[1] == "ranks wait here"]
    await until(lambda: len([n for h in rack.hosts.values() for n in h.notes if n[1] == "ranks wait here"]) == 1)
    assert len(notes) <= 1
    host = rack.job("j1").start.places[0].host
    rack[host].publish(RanksMayStart(JobId("j1"), 1))
    await until(lambda: starts(rack, "j1") == 1)
    stub.silent = False
    await rack.restart(host)
    rack[host].told.clear()
    await until(lambda: any(isinstance(fact, RanksComing) for fact in rack[host].told))
    again = next(fact for fact in rack[host].told if isinstance(fact, RanksComing))
    assert again.running and starts(rack, "j1") == 1


@sharing
async def test_a_job_that_is_stopped_before_it_could_start_beside_others_never_starts(rack: Rack, stub: Stub) -> None:
    stub.silent = True
    await submit(rack, workers=4)
    await until(lambda: rack.job("j1").state == "running")
    await rack["gpu1"].call("cancel", id="j1")
    await until(lambda: rack.job("j1").state == "cancelled")
    assert starts(rack, "j1") == 0
    await until(lambda: all(not host.service.ranks.reservations.all() for host in rack.hosts.values()))


@sharing
async def test_a_job_that_does_not_fit_is_queued_again_and_that_is_no_failure_of_it(rack: Rack, stub: Stub) -> None:
    stub.silent = True
    await submit(rack, workers=4, retries_lost=0)
    await until(lambda: rack.job("j1").state == "running")
    rack["gpu2"].publish(RanksUnfit(JobId("j1"), 1, "8 GiB were asked for and 4 GiB are free"))
    await until(lambda: rack.job("j1").tally.unfit == 1)
    await until(lambda: rack.job("j1").grant.epoch > 1 or rack.job("j1").state == "queued")
    job = rack.job("j1")
    assert (job.tally.failures, job.tally.hosts_lost, job.tally.requeues, job.tally.preemptions) == (0, 0, 0, 0)
    said = [note for note in rack["gpu1"].notes if note[0] == "j1"]
    assert any("it cannot use its GPUs of gpu2: 8 GiB were asked for" in note[2] for note in said)
    stub.silent = False
    await until(lambda: starts(rack, "j1") == 2)


@sharing
async def test_a_demoted_job_is_upgraded_where_it_runs_and_its_hosts_tell_their_sharing(rack: Rack, stub: Stub) -> None:
    await running(rack, "j1", tenant="red", workers=2)
    parts = await running(rack, "j2", tenant="red", workers=2, **{"class": "auto"})
    assert rack.job("j2").job_class == "opportunistic" and all(map(is_part, parts))
    rack.finish("j1")
    await until(lambda: rack.job("j2").priority.upgraded is not None)
    await until(lambda: told(rack, KindChanged))
    changed = told(rack, KindChanged)[0]
    assert (changed.job, changed.kind, changed.grant) == ("j2", "guaranteed", rack.job("j2").priority.upgraded)
    assert gpus_of(rack, "j2") == parts and starts(rack, "j2") == len(rack.job("j2").start.places)
    host = rack.job("j2").start.places[0].host
    before = len(told(rack, KindChanged))
    await rack.restart(host)
    await until(lambda: any(isinstance(fact, KindChanged) for fact in rack[host].told))
    assert before >= 1
    rest = await running(rack, "j3", tenant="blue", workers=2)
    assert not set(map(device_of, parts)) & set(rest), "no second guaranteed job comes there"
    await submit(rack, tenant="blue", workers=1)
    guests = await running(rack, "j5", tenant="blue", workers=4, **{"class": "opportunistic"})
    assert {device_of(gpu) for gpu in guests} == set(rest) | set(map(device_of, parts))
    assert starts(rack, "j4") == 0


@sharing
async def test_what_does_not_pair_is_taken_back_and_not_placed_there_again_while_both_live(
    rack: Rack, stub: Stub
) -> None:
    theirs = await running(rack, "j1", workers=2, pack="host")
    stub.busy = {f"GPU-{host}-{n}": 0.5 for host in TWO for n in range(2)} | dict.fromkeys(theirs, 0.0)
    await until(lambda: len(told(rack, GpusMeasured)) > 12)
    parts = await running(rack, "j2", workers=2, **{"class": "opportunistic"})
    assert sorted(map(device_of, parts)) == sorted(theirs), "these are the least busy"
    host = rack[rack.job("j1").start.places[0].host]
    host.publish(PairHarms(JobId("j1"), JobId("j2"), 0.082, 0.01))
    host.publish(PairHarms(JobId("j1"), JobId("j2"), 0.082, 0.01))
    await until(lambda: rack.job("j2").tally.unfit == 1)
    assert rack.job("j2").measured.harms == ("j1",)
    said = [note[2] for note in rack["gpu1"].notes if note[0] == "j2"]
    assert any("it slows that job by 8.2% slower, give or take 1.0%" in text for text in said)
    await until(lambda: starts(rack, "j2") == 2)
    assert not {device_of(gpu) for gpu in gpus_of(rack, "j2")} & set(theirs)
    assert rack.job("j2").tally.unfit == 1


@sharing
async def test_without_measurements_a_host_takes_nobody_beside_others(rack: Rack, stub: Stub) -> None:
    stub.mute = {"gpu1", "gpu2"}
    await until(lambda: all(takes(rack, host) == 0 for host in rack.hosts))
    await submit(rack, workers=1, **{"class": "opportunistic"})
    await running(rack, "j2", workers=1)
    assert rack.job("j1").state == "queued"
    stub.mute.clear()
    await until(lambda: starts(rack, "j1") == 1)


@sharing
async def test_a_gpu_that_vanishes_is_counted_no_more_and_the_others_go_on(rack: Rack, stub: Stub) -> None:
    await running(rack, "j1", workers=4)
    await running(rack, "j2", workers=4, **{"class": "opportunistic"})
    lost = rack["gpu2"].machine.probes._gpus.pop()
    await until(lambda: len(told(rack, GpusMeasured)) > 12)
    leader = rack["gpu1"].service.leadership.leader
    await until(lambda: len(units(leader.capacity)) == 3)
    assert not any(unit.endswith(short_name(lost.uuid)) for unit in leader.capacity.free)
    rack.finish("j1")
    rack.finish("j2")
    await until(lambda: rack.job("j2").state == "done")
    assert await running(rack, "j3", workers=3)
    leader.check()


@sharing
async def test_a_damaged_record_on_disk_takes_no_gpu_from_jobs_that_share_it(rack: Rack, stub: Stub) -> None:
    await running(rack, "j1", workers=4)
    parts = await running(rack, "j2", workers=4, **{"class": "opportunistic"})
    name = next(name for name in rack["gpu2"].machine.disk.files if "scheduler" in name or "reserv" in name)
    data = bytearray(rack["gpu2"].machine.disk.files[name])
    data[len(data) // 2] ^= 0xFF
    rack["gpu2"].machine.disk.files[name] = bytes(data)
    await rack.restart("gpu2")
    host = rack["gpu2"].service.ranks.reservations
    place = next(place for place in rack.job("j2").start.places if place.host == "gpu2")
    await until(lambda: any(hold.job == "j2" and hold.gpus == place.gpus for hold in host.all()))
    assert starts(rack, "j2") == 2 and len(set(parts)) == 4


@sharing
async def test_a_host_that_shares_otherwise_is_named_and_takes_nobody_beside_others(rack: Rack, stub: Stub) -> None:
    values = rack.values[HostId("gpu2")]
    await until(lambda: rack["gpu1"].service.gossip.differs == ())
    rack["gpu2"].service.gossip.settings = SchedulerSettings()
    await until(lambda: takes(rack, HostId("gpu2")) == 0)
    await until(lambda: rack["gpu1"].service.gossip.differs == ("gpu2 has 0",))
    said = [note for note in rack["gpu1"].notes if note[1] == "hosts share GPUs differently"]
    assert said and "[scheduler] beside is 2 here; gpu2 has 0" in said[0][2]
    parts = await running(rack, "j1", workers=2, **{"class": "opportunistic"})
    assert all(gpu.startswith("GPU-gpu1") for gpu in parts)
    await submit(rack, workers=3, **{"class": "opportunistic"})
    assert await running(rack, "j3", workers=4), "guaranteed jobs go everywhere"
    assert rack.job("j2").state == "queued"
    rack["gpu2"].service.gossip.publish = lambda gpus: None  # type: ignore[method-assign]
    del values["gpus_shared"]
    await until(lambda: rack["gpu1"].service.gossip.differs == ("gpu2 does not say",))


@on_a_rack()
async def test_a_rack_that_shares_no_gpus_gossips_nothing_of_them(rack: Rack) -> None:
    rack.sharing = Stub()
    await submit(rack, **{"class": "opportunistic"})
    await until(lambda: starts(rack, "j1") == 2)
    assert not any("gpus_shared" in values for values in rack.values.values())
    assert not any(is_part(gpu) for gpu in gpus_of(rack, "j1")) and not told(rack, RanksComing)
    assert (await rack["gpu1"].call("job", id="j1")).beside == ()


@sharing
async def test_a_person_sees_with_whom_a_job_shares_gpus(rack: Rack, stub: Stub) -> None:
    await running(rack, "j1", workers=2, pack="host")
    await running(rack, "j2", workers=4, **{"class": "opportunistic"})
    host = rack.job("j1").start.places[0].host
    view = await rack["gpu1"].call("job", id="j1")
    assert [(each.job, each.runs_as, each.hosts) for each in view.beside] == [("j2", "opportunistic", (host,))]
    other = await rack["gpu2"].call("job", id="j2")
    assert [each.job for each in other.beside] == ["j1"]
    assert all(device_of(gpu) == gpu for rank in other.ranks for gpu in rank.gpus)
