"""The plugin on a rack of fakes when things go away: leaders, agents, hosts, disks; and when they come back."""

import asyncio

import pytest

from covey.core.ids import JobId
from plugins.facts import JobPlaced, JobUnplaced
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.service.journal import FILE
from tests.plugins.scheduler.rack import FOUR, Rack, on_a_rack, refused, submit, until


@on_a_rack()
async def test_without_a_leader_reads_answer_with_their_age_and_writes_say_75(rack: Rack) -> None:
    await submit(rack)
    await until(lambda: rack.job("j1").state == "running")
    rack.lead(None)
    view = (await rack["gpu2"].call("jobs"))[0]
    assert view.state == "running" and view.age_s > 100
    assert (await refused(submit(rack))).code == 75
    assert (await refused(rack["gpu2"].call("cancel", id="j1"))).code == 75
    assert (await refused(rack["gpu2"].call("quota_set", tenant="a", gpus=1))).code == 75
    rack.finish("j1")
    await asyncio.sleep(20)
    rack.lead("gpu3")
    await until(lambda: rack.job("j1").state == "done")


@on_a_rack()
async def test_ranks_live_on_while_their_agent_restarts_and_are_found_again(rack: Rack) -> None:
    await submit(rack)
    await until(lambda: sum(len(host.machine.ranks) for host in rack.hosts.values()) == 2)
    name = str(rack.job("j1").start.places[0].host)
    rack[name].die()
    rack.gone(name)
    await asyncio.sleep(10)
    new = await rack.restart(name)
    await until(lambda: any(isinstance(fact, JobPlaced) for fact in new.told))
    await asyncio.sleep(5)
    assert new.machine.starts == [("j1", 1)]
    assert len(new.service.ranks.reservations.free()) == 0, "its GPUs are still held"
    rack.finish("j1")
    await until(lambda: rack.job("j1", "gpu2").state == "done")
    assert rack.job("j1", name).tally.attempt == 1


@on_a_rack()
async def test_an_end_while_the_agent_was_away_is_reported_when_it_is_back(rack: Rack) -> None:
    await submit(rack)
    await until(lambda: sum(len(host.machine.ranks) for host in rack.hosts.values()) == 2)
    name = str(rack.job("j1").start.places[1].host)
    rack[name].die()
    rack.finish("j1")
    await asyncio.sleep(10)
    assert rack.job("j1", "gpu2" if name != "gpu2" else "gpu1").state == "running"
    await rack.restart(name)
    await until(lambda: rack.job("j1").state == "done")
    assert rack[name].machine.starts == [("j1", 1)], "what ended was not started again"


@on_a_rack()
async def test_jobs_of_a_host_gone_for_a_minute_start_elsewhere_under_a_higher_epoch(rack: Rack) -> None:
    await submit(rack, workers=4)
    await until(lambda: sum(len(host.machine.ranks) for host in rack.hosts.values()) == 2)
    lost = rack.job("j1").start.places[1].host
    survivor = next(str(host) for host in sorted(rack.hosts) if host != lost)
    rack.lead(survivor)
    rack.cut_off(str(lost))
    await asyncio.sleep(50)
    assert rack.job("j1", survivor).grant.epoch == 1, "not before a minute has passed"
    await until(lambda: rack.job("j1", survivor).grant.epoch == 2 and rack.job("j1", survivor).state == "running")
    job = rack.job("j1", survivor)
    assert (
        lost not in [place.host for place in job.start.places] and job.tally.attempt == 2 and job.tally.preemptions == 0
    )
    rack.heal(str(lost))
    await until(lambda: not rack.hosts[lost].machine.ranks)
    await asyncio.sleep(3)
    assert rack.hosts[lost].machine.starts == [("j1", 1)]
    assert len(rack.hosts[lost].service.ranks.reservations.free()) == 2
    rack.finish("j1")
    await until(lambda: rack.job("j1").state == "done")


@pytest.mark.parametrize("cut", [True, False])
@on_a_rack()
async def test_ranks_that_fail_because_their_peers_are_cut_off_are_started_again(rack: Rack, cut: bool) -> None:
    """Gossip has noticed nothing yet: ranks see a broken connection first."""
    await submit(rack, workers=4)
    await until(lambda: sum(len(host.machine.ranks) for host in rack.hosts.values()) == 2)
    here, there = (place.host for place in rack.job("j1").start.places)
    survivor = next(str(host) for host in sorted(rack.hosts) if host != there)
    rack.lead(survivor)
    if cut:
        rack.cut.add(there)
    (spec,) = rack.hosts[here].machine.ranks.values()
    rack.hosts[here].runner.end(JobId("j1"), 1, {rank.rank: 1 for rank in spec.ranks})
    await until(lambda: bool(rack.job("j1", survivor).tally.hosts_lost + rack.job("j1", survivor).tally.failures))
    job = rack.job("j1", survivor)
    assert (job.tally.hosts_lost, job.tally.failures) == ((1, 0) if cut else (0, 1))
    if not cut:
        await until(lambda: rack.job("j1", survivor).state == "failed")
        return
    assert f"{there} did not answer {here} then" in job.reason
    rack.gone(str(there))
    await until(lambda: rack.job("j1", survivor).grant.epoch == 2 and rack.job("j1", survivor).state == "running")
    assert rack.job("j1", survivor).tally.hosts_lost == 1, "counted once"
    rack.heal(str(there))
    await until(lambda: not any(epoch == 1 for _, epoch in rack.hosts[there].machine.ranks))
    rack.finish("j1")
    await until(lambda: rack.job("j1").state == "done")


@on_a_rack()
async def test_a_coordinator_that_dies_before_it_placed_a_gang_is_replaced(rack: Rack) -> None:
    rack.lead("gpu4")
    await asyncio.sleep(2)
    rack.delay_s = 1.0
    await submit(rack, on="gpu2", workers=6)
    await until(lambda: rack.job("j1", "gpu4").state == "placing")
    coordinator = str(rack.job("j1", "gpu4").grant.coordinator)
    assert coordinator == "gpu1"
    rack[coordinator].die()
    rack.gone(coordinator)
    rack.delay_s = 0.005
    await until(lambda: rack.job("j1", "gpu4").state == "running")
    job = rack.job("j1", "gpu4")
    assert job.grant.coordinator != coordinator and job.grant.epoch >= 2
    assert coordinator not in [place.host for place in job.start.places]


@on_a_rack()
async def test_a_host_with_a_sick_disk_promises_nothing_and_the_gang_goes_elsewhere(rack: Rack) -> None:
    rack["gpu1"].machine.disk.sick = True
    await submit(rack, on="gpu2", workers=4)
    await until(lambda: rack.job("j1", "gpu2").state == "running")
    assert "gpu1" not in [place.host for place in rack.job("j1", "gpu2").start.places]


@on_a_rack()
async def test_a_whole_rack_that_restarts_goes_on_with_what_runs_and_starts_nothing_twice(rack: Rack) -> None:
    await submit(rack)
    await submit(rack, workers=8)
    await until(lambda: sum(len(host.machine.ranks) for host in rack.hosts.values()) == 2)
    for name in FOUR:
        rack[name].die()
    rack.lead(None)
    await asyncio.sleep(5)
    for name in FOUR:
        await rack.restart(name)
    await asyncio.sleep(10)
    rack.lead("gpu2")
    await asyncio.sleep(10)
    assert rack.job("j1").state == "running" and rack.job("j2").state == "queued"
    rack.finish("j1")
    await until(lambda: rack.job("j2").state == "running")
    starts = [start for host in rack.hosts.values() for start in set(host.machine.starts)]
    assert len(starts) == sum(len(host.machine.starts) for host in rack.hosts.values())


async def apply_slowly(rack: Rack, name: str) -> None:
    """Apply one entry of the log every 1.5 s, so that this host looks at each state that ever was."""
    host = rack[name]
    while host.log.applied_index < len(rack.entries):
        rack.slow[host.id] = 1
        host.log.catch_up()
        rack.slow[host.id] = 0
        await asyncio.sleep(1.5)
    del rack.slow[host.id]


@on_a_rack()
async def test_a_log_that_is_replayed_slowly_starts_and_tells_nothing_of_the_past(rack: Rack) -> None:
    await submit(rack)
    await until(lambda: rack.job("j1").state == "running")
    name = str(rack.job("j1").start.places[1].host)
    rack.finish("j1")
    await until(lambda: rack.job("j1").state == "done")
    await asyncio.sleep(3)
    rack[name].machine.forgotten.clear()
    rack.slow[rack[name].id] = 0
    new = await rack.restart(name)
    await apply_slowly(rack, name)
    await asyncio.sleep(3)
    assert new.machine.starts == [("j1", 1)], "only the log knew that it is over"
    assert [fact for fact in new.told if isinstance(fact, JobPlaced | JobUnplaced)] == []


@on_a_rack()
async def test_a_coordinator_whose_copy_was_old_still_sees_its_grant_later(rack: Rack) -> None:
    coordinator = rack["gpu1"]
    rack.lead("gpu2")
    await asyncio.sleep(2)
    coordinator.service.queue_log._caught_up = False
    await submit(rack, on="gpu2")
    await asyncio.sleep(3)
    assert rack.job("j1").grant.coordinator == "gpu1" and rack.job("j1").state == "placing"
    coordinator.service.queue_log._caught_up = True
    await until(lambda: rack.job("j1").state == "running")
    assert rack.job("j1").grant.epoch == 1


@on_a_rack()
async def test_a_host_whose_copy_of_the_log_lags_behind_its_report_leaks_nothing(rack: Rack) -> None:
    await submit(rack)
    await until(lambda: sum(len(host.machine.ranks) for host in rack.hosts.values()) == 2)
    name = str(rack.job("j1").start.places[1].host)
    rack.slow[rack[name].id] = 0
    rack.finish("j1")
    await until(lambda: rack.job("j1").state == "done")
    await asyncio.sleep(5)
    await apply_slowly(rack, name)
    await until(lambda: rack.job("j1", name).state == "done")
    await asyncio.sleep(3)
    assert rack[name].service.ranks.reservations.all() == []
    assert rack[name].machine.ends == {}


@on_a_rack()
async def test_a_host_that_cannot_write_its_journal_starts_nothing_until_it_can(rack: Rack) -> None:
    rack.delay_s = 0.4
    await submit(rack, workers=8)
    await until(lambda: all(host.service.ranks.reservations.all() for host in rack.hosts.values()))
    rack["gpu2"].machine.disk.sick = True
    await until(lambda: rack.job("j1").state == "running")
    await asyncio.sleep(5)
    assert rack["gpu2"].machine.starts == [] and rack["gpu3"].machine.starts == [("j1", 1)]
    rack["gpu2"].machine.disk.sick = False
    await until(lambda: rack["gpu2"].machine.starts == [("j1", 1)])


@on_a_rack(settings=SchedulerSettings(queue_thresholds_gpu_s=(100.0,)))
async def test_ranks_that_save_and_exit_with_0_when_preempted_run_again(rack: Rack) -> None:
    for host in rack.hosts.values():
        host.machine.saves_and_exits = True
    await submit(rack, workers=8)
    await asyncio.sleep(30)
    await submit(rack, workers=2)
    await until(lambda: rack.job("j2").state == "running")
    assert rack.job("j1").state == "queued" and rack.job("j1").tally.preemptions == 1


@on_a_rack()
async def test_the_fence_on_disk_keeps_an_older_grant_from_starting(rack: Rack) -> None:
    await submit(rack, workers=2, gpus_per_worker=1, skew=0.9)
    await until(lambda: rack.job("j1").state == "running")
    name = str(rack.job("j1").start.places[0].host)
    await asyncio.sleep(2)
    new = await rack.restart(name)
    assert new.service.ranks.fences == {"j1": 1}
    other = next(host for host in rack.hosts.values() if str(host.id) != name)
    other.service.ranks.fences[JobId("j2")] = 7
    await submit(rack, workers=7, gpus_per_worker=0)
    await until(lambda: rack.job("j2").state == "running")
    await asyncio.sleep(3)
    assert ("j2", 1) not in other.machine.starts


def lose_ranks(rack: Rack) -> None:
    """Restart the machine of the first place: how its ranks ended is not known."""
    job = rack.job("j1")
    place = job.start.places[0]
    rack[place.host].runner.end(JobId("j1"), job.grant.epoch, dict.fromkeys(place.ranks, 255), "lost", lost=True)


@on_a_rack()
async def test_a_job_whose_ranks_a_host_lost_is_placed_again_and_not_failed(rack: Rack) -> None:
    await submit(rack)
    await until(
        lambda: rack.job("j1").state == "running" and sum(len(h.machine.ranks) for h in rack.hosts.values()) == 2
    )
    lose_ranks(rack)
    await until(lambda: (rack.job("j1").tally.attempt, rack.job("j1").state) == (2, "running"))
    await until(lambda: sum(len(host.machine.ranks) for host in rack.hosts.values()) == 2)
    rack.finish("j1")
    await until(lambda: rack.job("j1").state == "done")
    assert rack.job("j1").ending.exit_code == 0


@pytest.mark.parametrize("at", [0, 9, 13, 20, 60, -1])
@on_a_rack()
async def test_a_damaged_record_of_who_holds_which_gpu_is_not_believed_what_runs_is_asked(rack: Rack, at: int) -> None:
    await submit(rack, workers=2, gpus_per_worker=1, skew=0.9)
    await until(lambda: rack.job("j1").state == "running")
    await asyncio.sleep(3)
    name = str(rack.job("j1").start.places[0].host)
    rack[name].die()
    whole = bytearray(rack[name].machine.disk.files[FILE])
    whole[at] ^= 1
    rack[name].machine.disk.files[FILE] = bytes(whole)
    new = await rack.restart(name)
    held = new.service.ranks.reservations.owners()
    assert held == dict.fromkeys(rack.job("j1").start.places[0].gpus, "j1"), "before anything is asked of it"
    assert new.service.ranks.fences == {"j1": 1}
    await asyncio.sleep(10)
    assert new.machine.starts == [("j1", 1)], "nothing started twice"
    assert new.machine.disk.files[FILE] != bytes(whole), "the record is whole again"
    rack.finish("j1")
    await until(lambda: rack.job("j1", name).state == "done" and not new.service.ranks.reservations.all())


@on_a_rack()
async def test_a_log_that_is_begun_anew_gives_no_id_twice(rack: Rack) -> None:
    """Everything durable of the log was deleted on every voter; ranks of the former one may still run."""
    for number in range(3):
        await submit(rack, name=f"before-{number}")
    await asyncio.sleep(3)
    for host in rack.hosts.values():
        host.die()
    rack.entries.clear()
    for name in list(rack.hosts):
        await rack.restart(str(name))
    await asyncio.sleep(3)
    after = await submit(rack, name="after")
    assert after.id == "j4"
    await until(lambda: rack.job("j4").state == "running")
    assert all(key[0] == "j4" for host in rack.hosts.values() for key in host.machine.ranks), "the old ones ended"


@on_a_rack()
async def test_gpus_of_ended_ranks_are_free_after_a_restart_though_the_disk_was_sick(rack: Rack) -> None:
    """Their end is in the log. The runner's record went before the hold did.
    An agent that died in between held these GPUs for ever.
    """
    await submit(rack, workers=1)
    await until(lambda: rack.job("j1").state == "running")
    name = str(rack.job("j1").start.places[0].host)
    rack[name].machine.disk.sick = True
    rack.finish("j1")
    await until(lambda: rack.job("j1").state == "done")
    await asyncio.sleep(3.0)
    rack[name].machine.disk.sick = False
    await rack.restart(name)
    await until(lambda: not rack[name].service.ranks.reservations.all(), 30.0)
    await until(lambda: not rack[name].machine.ends, 30.0)
