"""The plugin on a rack of fakes: from submit to done, and everything that people ask on the way."""

import asyncio
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from covey.core.ids import HostId, JobId
from covey.core.metrics import Distribution
from plugins.facts import JobPlaced, JobUnplaced, StepTimed
from plugins.gossiped import GpusNow
from plugins.scheduler.machine.books.job_record import ended_as
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.messages.commands import Attained, open_command
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.service import views
from plugins.scheduler.service.job_waits import JobWaits
from plugins.scheduler.service.metrics import GPUS_OUT, JOB_WAIT_SECONDS, PLACEMENT_SECONDS
from tests.plugins.scheduler.rack import FOUR, Rack, on_a_rack, refused, submit, until


@on_a_rack()
async def test_a_job_runs_on_several_hosts_and_is_done_when_all_ranks_ended_with_0(rack: Rack) -> None:
    job = await submit(rack, on="gpu3")
    assert (job.id, job.state, job.gpus) == ("j1", "queued", 4) or job.state in ("placing", "running")
    await until(lambda: rack.job("j1").state == "running")
    await until(lambda: sum(len(host.machine.starts) for host in rack.hosts.values()) == 2)
    view = await rack["gpu4"].call("job", id="j1")
    assert [rank.rank for rank in view.ranks] == [0, 1, 2, 3]
    assert {rank.state for rank in view.ranks} == {"running"} and all(rank.pid for rank in view.ranks)
    specs = [spec for host in rack.hosts.values() for spec in host.machine.ranks.values()]
    assert {spec.world_size for spec in specs} == {4}
    assert {spec.master_addr for spec in specs} == {rack[view.places[0].host].advertise}
    assert {spec.master_port for spec in specs} == {20_000}
    assert sorted(spec.node_rank for spec in specs) == [0, 1]
    assert len({gpu for spec in specs for rank in spec.ranks for gpu in rank.gpus}) == 4
    rack.finish("j1")
    await until(lambda: rack.job("j1").state == "done")
    view = await rack["gpu2"].call("job", id="j1")
    assert view.exit_code == 0 and view.reason == "all 4 ranks exited with 0"
    await until(lambda: all(len(host.service.ranks.reservations.free()) == 2 for host in rack.hosts.values()))
    assert all(not host.machine.ends for host in rack.hosts.values()), "the runner may forget what the log knows"


@on_a_rack()
async def test_a_host_that_lags_behind_the_log_does_not_say_that_a_job_was_never_there(rack: Rack) -> None:
    await submit(rack, on="gpu1")
    assert (await refused(rack["gpu3"].call("job", id="j9"))).code == 3
    rack.just_started.add(HostId("gpu3"))
    unknown = await refused(rack["gpu3"].call("job", id="j9"))
    assert (unknown.code, unknown.why) == (75, "it has just started")
    rack.just_started.clear()
    rack.cut.add(HostId("gpu3"))
    unknown = await refused(rack["gpu3"].call("job", id="j9"))
    assert unknown.code == 75 and "1000 s old" in unknown.why


@on_a_rack()
async def test_a_job_that_was_accepted_elsewhere_a_moment_ago_is_waited_for_and_not_denied(rack: Rack) -> None:
    asked = asyncio.ensure_future(rack["gpu3"].call("job", id="j1"))
    await asyncio.sleep(0.2)
    assert (await submit(rack, on="gpu1")).id == (await asked).id == "j1"


@on_a_rack()
async def test_a_job_that_was_forgotten_is_not_waited_for(rack: Rack) -> None:
    await submit(rack, on="gpu1")
    queue = rack["gpu3"].service.queue
    await until(lambda: "j1" in queue.jobs)
    forgotten = queue.jobs.pop(JobId("j1"))
    began_s = asyncio.get_running_loop().time()
    assert (await refused(rack["gpu3"].call("job", id="j1"))).code == 3
    assert asyncio.get_running_loop().time() == began_s
    queue.jobs[JobId("j1")] = forgotten


@on_a_rack()
async def test_every_host_tells_its_plugins_once_where_a_job_is_and_when_it_is_over(rack: Rack) -> None:
    await submit(rack, remote_memory=8 << 30)
    await until(lambda: rack.job("j1").state == "running")
    await asyncio.sleep(3)
    rack.finish("j1")
    await until(lambda: rack.job("j1").state == "done")
    await asyncio.sleep(3)
    for host in rack.hosts.values():
        placed = [fact for fact in host.told if isinstance(fact, JobPlaced)]
        over = [fact for fact in host.told if isinstance(fact, JobUnplaced)]
        assert [(fact.job, fact.epoch, fact.world_size) for fact in placed] == [("j1", 1, 4)]
        assert placed[0].remote_memory == 8 << 30
        assert [(fact.job, fact.epoch, fact.ended) for fact in over] == [("j1", 1, True)]


@on_a_rack()
async def test_a_killed_rank_fails_its_job_with_128_plus_the_signal_and_stops_the_others(rack: Rack) -> None:
    await submit(rack)
    await until(lambda: sum(len(host.machine.ranks) for host in rack.hosts.values()) == 2)
    place = rack.job("j1").start.places[1]
    rack[place.host].runner.end(JobId("j1"), 1, {2: -9, 3: -15}, "rank 2 was killed")
    await until(lambda: rack.job("j1").state == "failed")
    view = await rack["gpu1"].call("job", id="j1")
    assert view.exit_code == 137
    assert f"rank 2 on {place.host} was killed by SIGKILL (9)" in view.reason
    other = rack[rack.job("j1").start.places[0].host]
    assert other.runner.stops and "SIGKILL" in other.runner.stops[0][2]
    assert [rank.code for rank in view.ranks] == [-15, -15, -9, -15]


@on_a_rack()
async def test_a_cancelled_job_is_stopped_and_stays_cancelled_whatever_its_ranks_say(rack: Rack) -> None:
    await submit(rack)
    await until(lambda: sum(len(host.machine.ranks) for host in rack.hosts.values()) == 2)
    view = await rack["gpu2"].call("cancel", id="j1")
    assert view.state in ("stopping", "cancelled")
    await until(lambda: rack.job("j1").state == "cancelled")
    assert (await rack["gpu1"].call("job", id="j1")).exit_code == 143
    assert (await rack["gpu1"].call("cancel", id="j1")).state == "cancelled"


@on_a_rack()
async def test_a_job_over_its_quota_waits_says_why_and_starts_when_the_quota_is_free(rack: Rack) -> None:
    await rack["gpu2"].call("quota_set", tenant="alice", gpus=4)
    await submit(rack, tenant="alice")
    await submit(rack, tenant="alice", workers=2)
    await until(lambda: rack.job("j1").state == "running")
    await asyncio.sleep(5)
    view = await rack["gpu3"].call("job", id="j2")
    assert view.state == "queued"
    assert "tenant alice uses 4 of its quota of 4" in view.reason and "j1 (alice, 4 GPUs)" in view.reason
    quotas = {row.tenant: row for row in await rack["gpu3"].call("quotas")}
    assert (quotas["alice"].gpus, quotas["alice"].used, quotas["alice"].queued_jobs) == (4, 4, 1)
    rack.finish("j1")
    await until(lambda: rack.job("j2").state == "running")


@on_a_rack()
async def test_what_can_never_run_is_refused_at_submit_with_7_for_rack_and_4_for_quota(rack: Rack) -> None:
    error = await refused(submit(rack, workers=9))
    assert error.code == 7 and "9 GPUs" in error.why and "8" in error.why
    error = await refused(submit(rack, workers=1, gpus_per_worker=3))
    assert error.code == 7 and "largest host has 2" in error.why
    await rack["gpu2"].call("quota_set", tenant="alice", gpus=3)
    error = await refused(submit(rack, tenant="alice"))
    assert error.code == 4 and "quota of tenant alice is 3" in error.why
    error = await refused(submit(rack, worker=3))
    assert error.code == 2 and error.next == "did you mean workers?"
    assert await rack["gpu1"].call("jobs", all=True) == []


@on_a_rack()
async def test_a_host_with_a_nearly_full_disk_takes_no_submission_or_ranks_and_others_do(rack: Rack) -> None:
    rack["gpu1"].runner.refusal = "less than 1 GiB is free in /state/jobs of gpu1"
    error = await refused(submit(rack, workers=1))
    assert error.code == 4 and "less than 1 GiB is free" in error.why and "disk_free_min" in error.next
    assert await rack["gpu2"].call("jobs", all=True) == []
    job = await submit(rack, on="gpu2", workers=6)
    await until(lambda: sum(len(host.machine.starts) for host in rack.hosts.values()) == 3)
    assert not rack["gpu1"].machine.starts and job.id


@on_a_rack(settings=SchedulerSettings(queue_thresholds_gpu_s=(100.0,)))
async def test_a_short_job_of_a_higher_queue_preempts_a_long_one_which_then_starts_again(rack: Rack) -> None:
    await submit(rack, workers=8)
    await until(lambda: rack.job("j1").state == "running")
    await asyncio.sleep(30)
    assert rack.job("j1").attained_gpu_s >= 100
    await submit(rack, workers=2)
    await until(lambda: rack.job("j2").state == "running")
    job = rack.job("j1")
    assert job.state == "queued" and job.tally.preemptions == 1
    view = await rack["gpu3"].call("job", id="j1")
    assert view.queue == 1 and "preempted" in view.reason and "j2 (default, 2 GPUs)" in view.reason
    rack.finish("j2")
    await until(lambda: rack.job("j1").state == "running")
    assert rack.job("j1").tally.attempt == 2 and rack.job("j1").attained_gpu_s >= 100


@on_a_rack()
async def test_a_job_past_its_time_limit_is_stopped_and_failed(rack: Rack) -> None:
    await submit(rack, workers=2, time_limit_s=20)
    await until(lambda: rack.job("j1").state == "failed")
    assert rack.job("j1").reason == "it reached its time limit of 20 s"
    assert rack.job("j1").ending.exit_code == 143
    await submit(rack, workers=2, time_limit_s=40, signal_before_s=30, grace_s=3)
    await until(lambda: rack.job("j2").state == "failed")
    assert rack.job("j2").reason == "30 s before its time limit of 40 s it was asked to end"
    assert 10.0 <= rack.job("j2").ran_s(0.0) <= 12.0 and ended_as(rack.job("j2")) == "timeout"
    graces = {grace_s for host in rack.hosts.values() for job, _, grace_s in host.runner.graces if job == "j2"}
    assert graces == {30.0}, "what is left is killed at the limit"
    await submit(rack, workers=2, time_limit_s=400, signal_before_s=30, grace_s=3)
    await until(lambda: rack.job("j3").state == "running")
    await rack["gpu1"].call("cancel", id="j3")
    await until(lambda: rack.job("j3").over)
    assert {grace_s for host in rack.hosts.values() for job, _, grace_s in host.runner.graces if job == "j3"} == {3.0}


@on_a_rack()
async def test_attained_service_is_written_every_ten_seconds_and_never_falls(rack: Rack) -> None:
    await submit(rack, workers=4)
    await until(lambda: rack.job("j1").state == "running")
    seen = [0.0]
    for _ in range(6):
        await asyncio.sleep(10)
        seen.append(rack.job("j1").attained_gpu_s)
    assert seen == sorted(seen) and seen[-1] == pytest.approx(4 * 60, abs=4 * 12)
    checkpoints = [entry for entry in map(open_command, rack.entries) if isinstance(entry, Attained)]
    assert 8 <= sum(bool(entry.service_gpu_s) for entry in checkpoints) <= 14


@on_a_rack()
async def test_steps_and_accuracy_are_seen_on_any_host_while_the_job_runs_and_afterwards(rack: Rack) -> None:
    await submit(rack)
    await until(lambda: sum(len(host.machine.ranks) for host in rack.hosts.values()) == 2)
    host = rack[rack.job("j1").start.places[0].host]
    host.publish(StepTimed(JobId("j1"), 1, 0, 40, 0.1, 0.05, 0.05, {"accuracy": 0.9, "loss": 0.4}))
    host.publish(StepTimed(JobId("j1"), 1, 0, 41, 0.1, 0.05, 0.05, {"loss": 0.3}))
    for name in FOUR:
        view = await rack[name].call("job", id="j1")
        assert (view.step, view.metrics) == (41, {"accuracy": 0.9, "loss": 0.3})
    rack.finish("j1")
    await until(lambda: rack.job("j1").state == "done")
    view = await rack["gpu4"].call("job", id="j1")
    assert (view.step, view.metrics["accuracy"]) == (41, 0.9)
    curve = await rack["gpu3"].call("curve", id="j1")
    assert [(point.step, point.metrics) for point in curve.points] == [
        (40, {"accuracy": 0.9, "loss": 0.4}),
        (41, {"loss": 0.3}),
    ]
    assert curve.unanswered == ()


@on_a_rack()
async def test_the_output_of_a_rank_is_read_through_any_host(rack: Rack) -> None:
    await submit(rack)
    await until(lambda: sum(len(host.machine.ranks) for host in rack.hosts.values()) == 2)
    place = rack.job("j1").start.places[1]
    rack[place.host].machine.outputs[JobId("j1"), 2] = b"x" * 100_000 + b"end\n"
    other = next(name for name in FOUR if name != place.host)
    part = await rack[other].call("logs", id="j1", rank=2, offset=0)
    assert (len(part.data), part.offset, part.size, part.host, part.end) == (65536, 0, 100_004, place.host, False)
    part = await rack[other].call("logs", id="j1", rank=2, offset=-4)
    assert (part.data, part.offset, part.end, part.timed) == (b"end\n", 100_000, False, None)
    rack[place.host].machine.written[600.0] = 100_001
    part = await rack[other].call("logs", id="j1", rank=2, offset=0, since_s=600)
    assert (part.data, part.offset, part.timed) == (b"nd\n", 100_001, True)
    part = await rack[other].call("logs", id="j1", rank=2, offset=0, since_s=601)
    assert (part.offset, part.timed) == (0, False)
    rack.finish("j1")
    await until(lambda: rack.job("j1").state == "done")
    assert (await rack[other].call("logs", id="j1", rank=2, offset=-4)).end
    assert (await refused(rack[other].call("logs", id="j1", rank=4))).code == 3
    del rack[place.host].machine.outputs[JobId("j1"), 2]
    gone = await refused(rack[other].call("logs", id="j1", rank=2))
    assert (gone.code, gone.what) == (3, "the output of rank 2 of j1 is no longer kept")
    assert place.host in gone.why and "agentctl job j1" in gone.next and "keep_ended" in gone.next
    rack.cut_off(str(place.host))
    rack.lead(other)
    assert (await refused(rack[other].call("logs", id="j1", rank=2))).code == 75


@on_a_rack()
async def test_a_job_without_gpus_is_spread_over_the_hosts(rack: Rack) -> None:
    await submit(rack, workers=4, gpus_per_worker=0)
    await until(lambda: rack.job("j1").state == "running")
    assert [len(place.ranks) for place in rack.job("j1").start.places] == [1, 1, 1, 1]
    rack.finish("j1")
    await until(lambda: rack.job("j1").state == "done")


@on_a_rack(settings=SchedulerSettings(quotas={"alice": 3}, default_quota=6))
async def test_the_quotas_of_the_settings_are_written_once_and_stay_changed(rack: Rack) -> None:
    assert rack["gpu3"].service.queue.quotas == {"*": 6, "alice": 3}
    await rack["gpu2"].call("quota_set", tenant="alice", gpus=None)
    rack.lead("gpu2")
    await asyncio.sleep(5)
    assert rack["gpu3"].service.queue.quotas == {"*": 6, "alice": None}


@on_a_rack()
async def test_the_story_of_a_job_is_told_once_per_event_whatever_the_number_of_hosts(rack: Rack) -> None:
    await submit(rack)
    await until(lambda: rack.job("j1").state == "running")
    rack.finish("j1")
    await until(lambda: rack.job("j1").state == "done")
    stories = {
        name: [note[1] for note in rack[name].notes if note[0] == "j1" and note[3].startswith("log/")] for name in FOUR
    }
    assert set(map(tuple, stories.values())) == {
        ("submitted", "granted", "placed", "ranks ended", "ranks ended", "done")
    }
    keys = [note[3] for note in rack["gpu1"].notes if note[0] == "j1" and note[3]]
    assert keys == sorted(keys, key=lambda key: float(key.split("/")[1]))
    assert len(set(keys)) == len(keys), "notes with one key are shown as one"


@on_a_rack()
async def test_a_number_that_no_message_can_carry_is_refused(rack: Rack) -> None:
    await submit(rack, workers=1)
    await until(lambda: bool(rack.job("j1").start.places))
    for number in (10**30, -(10**30), float("inf")):
        no = await refused(rack[next(iter(FOUR))].call("logs", id="j1", offset=number))
        assert no.code == 2 and "offset" in no.what


def test_output_that_a_sick_disk_does_not_give_stops_nothing_but_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sick(*_: object) -> None:
        raise OSError(5, "sick in this test")

    @on_a_rack()
    async def story(rack: Rack) -> None:
        await submit(rack, workers=1)
        await until(lambda: bool(rack.job("j1").start.places))
        (place,) = rack.job("j1").start.places
        monkeypatch.setattr(rack[place.host].runner, "read_log", sick)
        for name in FOUR:
            no = await refused(rack[name].call("logs", id="j1"))
            assert no.code == 75 and "sick in this test" in no.why

    story()


@on_a_rack()
async def test_a_job_waits_for_gpus_that_are_sick_and_is_told_so(rack: Rack) -> None:
    probes = rack["gpu2"].machine.probes
    well = list(probes.gpus())
    sick = "the driver does not answer"
    probes._gpus = [msgspec.structs.replace(gpu, condition="unknown", why=sick) for gpu in well]
    await until(lambda: GpusNow(2, 0, "Test", True, 2, sick) == told_by(rack, "gpu2"))
    assert await submit(rack, workers=8, pack="any"), "the rack has 8, whatever answers just now"
    view = await rack["gpu1"].call("job", id="j1")
    assert view.state == "queued" and f"GPUs that cannot take jobs: gpu2 2 ({sick})" in view.reason
    notes = [(event, reason) for subject, event, reason, _ in rack["gpu2"].notes if subject == "host/gpu2"]
    assert len(notes) == 2 and all(event == "GPU out of use" and sick in reason for event, reason in notes)
    assert sick in rack["gpu2"].service.notes()[0]
    probes._gpus = well
    await until(lambda: rack.job("j1").state == "running")
    assert rack["gpu2"].service.notes() == [] and rack["gpu2"].service.metrics()[GPUS_OUT.of()] == 0


@on_a_rack()
async def test_nothing_is_refused_for_good_while_a_host_does_not_know_which_gpus_it_has(rack: Rack) -> None:
    rack["gpu2"].machine.probes.unlisted = "there is no driver to ask: Driver Not Loaded"
    await until(lambda: not told_by(rack, "gpu2").known)
    view = await submit(rack, workers=9)
    assert view.state == "queued" and "Driver Not Loaded" in view.reason
    rack["gpu2"].machine.probes.unlisted = ""
    await until(lambda: told_by(rack, "gpu2").known)
    assert (await refused(submit(rack, workers=9))).code == 7


def told_by(rack: Rack, host: str) -> GpusNow:
    return msgspec.msgpack.decode(rack.values[HostId(host)]["gpus"], type=GpusNow)


@on_a_rack()
async def test_what_the_log_knows_to_be_held_is_not_planned_with(rack: Rack) -> None:
    await submit(rack)
    await until(lambda: rack.job("j1").state == "running")
    host = rack["gpu1"]
    stale = GpusNow(2, 2, "Test", True)
    for name in FOUR:
        rack[name].spread("gpus", stale)
    free = views.free_of(host.hosts(), host.service.queue)
    held = {place.host: len(place.gpus) for place in rack.job("j1").start.places}
    assert free == {name: 2 - held.get(name, 0) for name in free}
    rack.gone("gpu3")
    assert "gpu3" not in views.free_of(host.hosts(), host.service.queue)


@on_a_rack(gpus={"gpu1": 2, "gpu2": 2, "gpu3": 2})
async def test_a_gang_being_placed_makes_way_for_gpus_that_are_kept_since_its_grant(rack: Rack) -> None:
    for _ in range(6):
        await submit(rack, workers=1)
    await until(lambda: sum(len(host.machine.ranks) for host in rack.hosts.values()) == 6)
    ended = [next(iter(host.machine.ranks))[0] for host in rack.hosts.values()]
    for job in ended:
        rack.finish(job)
    await until(lambda: {rack.job(job).state for job in ended} == {"done"})
    await asyncio.sleep(2)
    gossip = msgspec.msgpack.decode(rack.values[HostId("gpu1")]["gpus"], type=GpusNow)
    rack.values[HostId("gpu1")]["gpus"] = msgspec.msgpack.encode(msgspec.structs.replace(gossip, free=0))
    rack.delay_s = 1.0  # its coordinator hears no answer yet
    await submit(rack, workers=1)
    await until(lambda: any(list(host.service.gangs.searches) == ["j7"] for host in rack.hosts.values()))
    coordinator = next(host for host in rack.hosts.values() if host.service.gangs.searches)
    assert list(coordinator.service.gangs.searches[JobId("j7")].plan) == ["gpu2"], "gossip says that gpu1 is full"
    await submit(rack, workers=1, gpus_per_worker=2)
    await until(lambda: coordinator.service.queue.keeper == "j8")
    assert coordinator.service.queue.kept == {"gpu2": 1}, "the leader thinks that j7 takes the GPU of gpu1"
    await until(lambda: rack.job("j7").state == "running")
    assert [place.host for place in rack.job("j7").start.places] == ["gpu3"]
    assert rack.job("j7").tally.place_failures == 0 and coordinator.service.queue.kept == {"gpu2": 1}


@pytest.mark.parametrize("behind", [True, False])
def test_what_a_log_that_is_read_again_tells_is_not_timed_again(behind: bool) -> None:
    times, grant = (
        SimpleNamespace(submitted_rack_s=1.0, started_rack_s=None),
        SimpleNamespace(coordinator="h1", epoch=1),
    )
    more = {"task": None, "spec": JobSpec.parse({"argv": ["x"]})}
    job = SimpleNamespace(id=JobId("j1"), over=False, times=times, grant=grant, state="placing", placed=False, **more)
    waits = JobWaits(HostId("h1"), cast(JobTable, SimpleNamespace(jobs={job.id: job})))
    waits.look([job.id], 10.0, behind)
    assert waits.longest_s(4.0) == 3.0
    job.state, job.placed, times.started_rack_s = "running", True, 6.0
    waits.look([job.id], 12.0, behind)
    found = waits.metrics(7.0)
    sums = [found[metric.of()] for metric in (JOB_WAIT_SECONDS, PLACEMENT_SECONDS)]
    assert [each.sum for each in sums if isinstance(each, Distribution)] == ([0, 0] if behind else [5.0, 2.0])
