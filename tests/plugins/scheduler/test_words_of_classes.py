"""What people are told about classes, in the scheduler's own words: on the little rack, and over the service."""

import asyncio

from covey.core.ids import HostId, JobId
from plugins.facts import JobJoined, StepTimed, TensorsAssigned, TensorsSeen
from plugins.scheduler.policy.explain import ordinal
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.service import views
from tests.plugins.scheduler.little import Little
from tests.plugins.scheduler.rack import Rack, on_a_rack, submit, until


def reason(rack: Little, job: str) -> str:
    """Why the job is in its state; the place and the jobs ahead that it names are those of its turn."""
    standing = views.QueueSnapshot(rack.queue, rack.settings, rack.totals)
    found = next(each for each in rack.queue.live() if each.id == job)
    said, turn = standing.reason(found), standing.turn(found)
    assert (turn is None) == (found.state != "queued")
    if turn is not None:
        assert said.startswith(f"{ordinal(turn.place)} of the ") and (turn.place == 1) == (turn.ahead == "")
        assert "; ahead: " not in said or f"; ahead: {turn.ahead}" in said
    return said


def test_a_gang_is_told_what_is_reserved_and_whose_end_it_waits_for() -> None:
    rack = Little([2, 2], {"red": 2, "blue": 2})
    ones = [rack.submit(1, tenant) for tenant in ("red", "blue", "red", "blue")]
    rack.look()
    for job, gpu in zip(rack.jobs("placing"), ("h1.0", "h1.1", "h2.0", "h2.1"), strict=True):
        rack.place(job, {HostId(gpu[:2]): [gpu]})
    for number in (0, 2):
        rack.end(rack.queue.jobs[ones[number]])
    gang = rack.submit(1, "red", each=2)
    assert "free GPUs by host are h1 1, h2 1, and each worker needs 2 GPUs on one host" in reason(rack, gang)
    rack.settle()
    said = reason(rack, gang)
    assert said.endswith("1 of 2 GPUs reserved: h1 1, waiting for j2 (blue, 1 GPU), j4 (blue, 1 GPU)")
    assert "about to be placed" not in said
    rack.end(rack.queue.jobs[ones[1]])
    other = rack.submit(1, "blue", each=1)
    assert "about to be placed" in reason(rack, other), "a GPU beside those that are kept is free"


def test_an_opportunistic_job_is_told_that_it_gets_what_is_left() -> None:
    rack = Little([2], {"red": 2, "blue": 0}, demote_after_s=60.0)
    rack.submit(2, "red")
    rack.settle()
    guest, late = rack.submit(2, "blue", "opportunistic"), rack.submit(1, "red", "auto")
    rack.settle()
    assert reason(rack, guest) == (
        "1st of the opportunistic jobs waiting; it needs 2 GPUs that guaranteed "
        "jobs leave free, and 0 are free; it starts "
        "when enough of j1 (red, 2 GPUs) have ended"
    )
    assert reason(rack, late).endswith("it becomes opportunistic after a wait of 1 min")
    rack.look(70.0)
    said = reason(rack, late)
    assert said.startswith("2nd of the opportunistic jobs waiting"), "it says so no more"
    assert "; ahead: j2 (blue, 2 GPUs)" in said
    assert "it becomes opportunistic" not in reason(rack, late)


@on_a_rack(settings=SchedulerSettings(quotas={"red": 2}, default_quota=4, demote_after_s=20.0))
async def test_the_views_say_class_demotion_and_what_is_used_beyond_the_quota(rack: Rack) -> None:
    await submit(rack, workers=2, tenant="red")
    await until(lambda: rack.job("j1").state == "running")
    late = await submit(rack, workers=2, tenant="red", **{"class": "auto"})
    assert (late.job_class, late.runs_as) == ("auto", "auto")
    await until(lambda: rack.job("j2").state == "running", 60.0)
    view = (await rack["gpu3"].call("jobs"))[1]
    assert (view.job_class, view.runs_as, view.state) == ("auto", "opportunistic", "running")
    quota = next(each for each in await rack["gpu2"].call("quotas") if each.tenant == "red")
    assert (quota.gpus, quota.used, quota.opportunistic) == (2, 2, 2)
    rack.finish("j1")
    await until(lambda: rack.job("j2").job_class == "guaranteed")
    quota = next(each for each in await rack["gpu2"].call("quotas") if each.tenant == "red")
    assert (quota.used, quota.opportunistic) == (2, 0)
    events = [event for subject, event, _, _ in rack["gpu1"].notes if subject == "j2"]
    assert [event for event in events if event in ("demoted", "upgraded")] == ["demoted", "upgraded"]


@on_a_rack(settings=SchedulerSettings(checkpoint_s=20.0))
async def test_a_time_limit_is_kept_to_the_second_whenever_the_last_checkpoint_was(rack: Rack) -> None:
    await submit(rack, workers=4, time_limit_s=27)
    await until(lambda: rack.job("j1").state == "running")
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await until(lambda: rack.job("j1").state == "failed")
    assert 26.0 <= loop.time() - begun <= 30.0
    assert "27 s" in rack.job("j1").reason


@on_a_rack()
async def test_a_new_start_begins_with_no_step(rack: Rack) -> None:
    await submit(rack, workers=2)
    await until(lambda: rack.job("j1").state == "running")
    place = rack.job("j1").start.places[0]
    rack[place.host].publish(StepTimed(rack.job("j1").id, 1, 0, 70, 0.1, 0.1, 0.0, {"loss": 0.5}))
    rack.finish("j1", {0: 75, 1: 75})
    await until(lambda: rack.job("j1").tally.attempt == 2)
    view = await rack["gpu1"].call("job", id="j1")
    assert (view.step, view.metrics) == (None, {})


def test_gangs_of_a_name_are_spread_once_tensors_and_steps_show_they_do_not_mind() -> None:
    """Reference: Tiresias §3.2, §3.4."""

    async def run(rack: Rack, id: str, step_s: float, **more: str) -> int:
        """Run a job, and return on how many hosts it was."""
        await submit(rack, workers=2, name="resnet", **more)
        await until(lambda: rack.job(id).state == "running")
        places = rack.job(id).start.places
        host = rack[places[0].host]
        host.publish(TensorsSeen(rack.job(id).id, 1, 10, 100))
        host.publish(TensorsAssigned(rack.job(id).id, 1, 3, HostId("gpu4")))
        for step in range(20):
            host.publish(StepTimed(rack.job(id).id, 1, 0, step, step_s, step_s, 0.0, {}))
        await until(lambda: rack.job(id).measured.tensors == (10, 100))
        assert (await rack["gpu4"].call("job", id=id)).seen.aggregator == "gpu4"
        rack.finish(id)
        await until(lambda: rack.job(id).state == "done")
        return len(places)

    @on_a_rack()
    async def story(rack: Rack) -> None:
        await submit(rack, workers=1, name="filler")
        assert await run(rack, "j2", 0.1) == 1, "nothing is known about it"
        assert await run(rack, "j3", 0.1) == 1, "its tensors are small, and nobody saw it on several hosts"
        assert await run(rack, "j4", 0.1, pack="any") == 2, "the gap beside the filler is used"
        assert await run(rack, "j5", 0.2) == 2, "it does not mind"
        assert await run(rack, "j6", 0.1) == 1, "its newest steps on two hosts took twice as long"

    story()


@on_a_rack()
async def test_a_job_whose_ranks_found_unlike_kernels_is_told_which(rack: Rack) -> None:
    await submit(rack, workers=3)
    await until(lambda: rack.job("j1").state == "running")
    assert len(rack.job("j1").start.places) == 2
    for place in rack.job("j1").start.places:
        for rank in place.ranks:
            rack[place.host].publish(JobJoined(JobId("j1"), 1, rank, "numpy 2.1.0 OpenBLAS Haswell"))
    assert (await rack["gpu1"].call("job", id="j1")).seen.unlike == ""
    last = rack.job("j1").start.places[-1]
    rack[last.host].publish(JobJoined(JobId("j1"), 1, 2, "numpy 2.1.0 OpenBLAS SkylakeX"))
    assert (await rack["gpu1"].call("job", id="j1")).seen.unlike == (
        "ranks 0, 1: numpy 2.1.0 OpenBLAS Haswell; rank 2: numpy 2.1.0 OpenBLAS SkylakeX "
        "(results may differ in the last bits)"
    )
