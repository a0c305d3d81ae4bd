"""Jobs that wait for something else than GPUs: somebody who holds them, other jobs, their time, their own tasks."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.ids import JobId
from plugins.scheduler.machine.leader.leader import RackHost, ScheduleTick
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.arrays import TASKS_MAX, is_in, joined, tasks_of
from plugins.scheduler.messages.commands import (
    Applied,
    Attained,
    BeginReached,
    CancelAsked,
    Granted,
    HoldAsked,
    NotApplied,
    PriorityAsked,
    RanksReported,
    ReleaseAsked,
    RequeueAsked,
    Result,
    Submitted,
    TaskBegun,
    TimeLimitReached,
    TimeLimitSet,
)
from plugins.scheduler.messages.spec import JobOwner, JobSpec, SpecError
from tests.families import examples
from tests.plugins.scheduler.little import Little


def job(little: Little, owner: str = "", **fields: Any) -> JobId:
    """A new job of one GPU."""
    result = submit(little, owner, **fields)
    assert isinstance(result, Applied) and result.job is not None, result
    return result.job


def submit(little: Little, owner: str = "", **fields: Any) -> Result:
    spec = JobSpec.parse({"argv": ["x"], "tenant": "red", **fields})
    if owner:
        spec = msgspec.structs.replace(spec, owner=JobOwner(owner, 1000 + len(owner)))
    return little.say(Submitted(wall_s=1.0, key=f"key{little.queue.index:06}", spec=spec))


def known(little: Little, id: JobId) -> Job:
    return little.queue.jobs[id]


def run(little: Little, *ids: JobId, code: int = 0) -> None:
    """Let these jobs be placed and end."""
    for id in ids:
        while known(little, id).state == "queued":
            assert [each for each in little.look() if isinstance(each, Granted)], f"{id} is not granted"
        little.place(known(little, id))
        little.end(known(little, id), code)


def place_all(little: Little) -> list[JobId]:
    """Look until nothing happens any more, and place what is granted."""
    placed: list[JobId] = []
    while found := little.look():
        for each in found:
            if isinstance(each, Granted):
                little.place(known(little, each.job))
                placed.append(each.job)
    return placed


def test_a_held_job_starts_when_it_is_released_and_not_before() -> None:
    little = Little([2], {"red": 2})
    first, second = job(little, hold=True), job(little)
    assert place_all(little) == [second], "who comes after it starts"
    assert known(little, first).holds.held == "it was submitted so"
    epoch = known(little, first).grant.epoch + 1
    stray = little.say(Granted(wall_s=1.0, job=first, epoch=epoch, coordinator=next(iter(little.totals))))
    assert isinstance(stray, NotApplied), "a leader that has not heard of it does not start it either"
    little.restore()
    little.say(ReleaseAsked(wall_s=1.0, job=first, by="ann"))
    assert place_all(little) == [first] and not known(little, first).holds.held
    refused = little.say(HoldAsked(wall_s=1.0, job=first, by="ann"))
    assert isinstance(refused, NotApplied) and refused.next == f"agentctl requeue {first} --hold"


def test_a_hold_takes_a_grant_back_and_what_is_kept() -> None:
    little = Little([1], {"red": 1})
    first = job(little)
    little.look()
    assert little.state(first) == "placing"
    little.say(HoldAsked(wall_s=1.0, job=first, by="ann"))
    assert (little.state(first), little.queue.used("red")) == ("queued", 0)
    assert known(little, first).holds.held == "by ann" and not place_all(little)


def test_a_job_that_is_requeued_runs_again_or_is_held() -> None:
    little = Little([1], {"red": 1})
    first = job(little)
    place_all(little)
    asked = RequeueAsked(wall_s=1.0, job=first, epoch=1, by="ann")
    assert isinstance(little.say(asked), Applied) and little.state(first) == "stopping"
    little.end(known(little, first), 143)
    assert little.state(first) == "queued" and "requeued by ann" in known(little, first).reason
    assert place_all(little) == [first]
    little.say(asked)
    assert little.state(first) == "running", "said twice it stops one start"
    tried = RequeueAsked(wall_s=1.0, job=first, epoch=2, hold=True, by="ann", test=True)
    little.say(tried)
    assert known(little, first).reason == "its stop is tried by ann (preempt --test), which counts as no preemption"
    assert known(little, first).ending.cause == "requeued" and isinstance(little.say(tried), NotApplied)
    little.end(known(little, first), 143)
    assert not place_all(little) and known(little, first).holds.held == "by ann"
    assert known(little, first).tally.failures == known(little, first).tally.preemptions == 0
    little.say(CancelAsked(wall_s=1.0, job=first))
    assert isinstance(little.say(RequeueAsked(wall_s=1.0, job=first, epoch=2)), NotApplied)


def test_a_script_whose_time_is_over_may_have_itself_queued_again() -> None:
    little = Little([1, 1], {"red": 2})
    first = job(little, time_limit_s=60, signal_before_s=10, workers=2, pack="apart")
    for start in (1, 2):
        assert place_all(little) == [first]
        host = known(little, first).start.places[0].host
        for served_s in (49.0, 50.0):
            total = 2 * (50.0 * (start - 1) + served_s)
            little.say(Attained(wall_s=1.0, host=host, service_gpu_s={first: total}))
            reached = [each.job for each in little.look() if isinstance(each, TimeLimitReached)]
            assert reached == ([first] if served_s == 50.0 else [])
        assert little.state(first) == "stopping" and known(little, first).grace_s == 10.0
        if start == 1:
            other = known(little, first).start.places[1].host
            little.say(RanksReported(wall_s=1.0, job=first, epoch=1, host=other, codes={1: 1}, asked=True))
            assert isinstance(little.say(RequeueAsked(wall_s=1.0, job=first, epoch=1, by="ann")), Applied)
            assert "requeued by ann" in known(little, first).reason
            little.end(known(little, first), 143)
            assert little.state(first) == "queued"
    little.end(known(little, first), 143)
    assert little.state(first) == "failed"
    assert isinstance(little.say(RequeueAsked(wall_s=1.0, job=first, epoch=2)), NotApplied)


def test_a_job_waits_for_the_end_of_others_and_is_held_if_one_failed() -> None:
    little = Little([4], {"red": 4})
    one, two = job(little), job(little)
    ok, any_way = job(little, after=[f"ok:{one}", f"ok:{two}"]), job(little, after=[f"any:{two}"])
    assert place_all(little) == [one, two]
    little.end(known(little, one))
    assert known(little, ok).holds.after == (f"ok:{two}",) and not place_all(little)
    little.restore()
    little.end(known(little, two), 3)
    assert place_all(little) == [any_way], "it waited for the end alone"
    assert known(little, ok).holds.held == f"{two}, which was to be done first, failed (exit 3)"
    assert known(little, ok).holds.ended == {one: "done", two: "failed 3"}
    little.say(ReleaseAsked(wall_s=1.0, job=ok))
    assert place_all(little) == [ok]
    late = job(little, after=[f"ok:{two}", f"any:{one}"])
    assert known(little, late).holds.held and not known(little, late).holds.after, "what is over is not waited for"


def test_only_jobs_before_it_can_be_waited_for_so_there_is_no_circle() -> None:
    little = Little([1], {"red": 1})
    one = job(little)
    for wrong in (f"ok:j{int(one[1:]) + 1}", "ok:j99"):
        refused = submit(little, after=[wrong])
        assert isinstance(refused, NotApplied) and refused.why.startswith("there is no job j")
    for value in (["ok:1"], ["on:j1"], ["ok:j01"], "ok:j1", [1]):
        with pytest.raises(SpecError, match="after"):
            JobSpec.parse({"argv": ["x"], "after": value})
    chain = [job(little, after=[f"any:j{number}"]) for number in range(int(one[1:]), int(one[1:]) + 3)]
    little.say(CancelAsked(wall_s=1.0, job=one))
    for each in chain:
        run(little, each)
    assert all(little.state(each) == "done" for each in chain)


def test_a_job_does_not_start_before_its_time() -> None:
    little = Little([1], {"red": 1})
    first = job(little, begin_wall_s=50.0)
    assert not place_all(little) and little.leader.wakes_s() == pytest.approx(little.now_s + 49.0)
    rack = tuple(RackHost(host, gpus) for host, gpus in little.totals.items())
    said = little.proposed(ScheduleTick(rack, 50.0))
    assert said == [BeginReached(wall_s=50.0, job=first)]
    little.say(said[0])
    assert place_all(little) == [first]


def test_a_job_moves_before_and_behind_those_of_its_tenant_and_no_others() -> None:
    little = Little([1], {}, default_quota=None)
    blue = job(little, tenant="blue")
    place_all(little)
    ann, other, bob, late = job(little, "ann"), job(little, tenant="blue"), job(little, "bob"), job(little, "ann")
    before = {id: known(little, id).turn for id in (ann, bob, late)}
    assert isinstance(little.say(PriorityAsked(wall_s=1.0, job=late, up=True, own=True, by="ann")), Applied)
    assert [known(little, id).turn for id in (late, bob, ann)] == [before[id] for id in (ann, bob, late)]
    little.say(PriorityAsked(wall_s=1.0, job=bob, up=True, by="root"))
    little.restore()
    assert isinstance(little.say(PriorityAsked(wall_s=1.0, job=bob, up=True, by="root")), Applied), "twice is once"
    ended = [blue]
    little.end(known(little, blue))
    for _ in range(4):
        (now,) = place_all(little)
        ended.append(now)
        little.end(known(little, now))
    assert ended == [blue, bob, other, late, ann], "the other tenant's job has its place"
    assert isinstance(little.say(PriorityAsked(wall_s=1.0, job=ann, up=False)), NotApplied)


def test_a_time_limit_may_change_while_a_job_waits_and_runs() -> None:
    little = Little([1], {"red": 1})
    first = job(little, time_limit_s=100.0)
    little.say(TimeLimitSet(wall_s=1.0, job=first, time_limit_s=None, by="ann"))
    place_all(little)
    little.serve(known(little, first), 150.0)
    assert not place_all(little) and little.state(first) == "running"
    little.say(TimeLimitSet(wall_s=1.0, job=first, time_limit_s=140.0, by="ann"))
    little.look()
    assert little.state(first) == "stopping" and "140 s" in known(little, first).reason


# ---- arrays ----------------------------------------------------------------------------------------------------------


def test_an_array_is_one_record_and_its_tasks_begin_as_there_is_room() -> None:
    little = Little([4], {"red": 4})
    array = job(little, array="0-9%3", name="sweep")
    assert len(little.queue.jobs) == 1
    begun = place_all(little)
    assert len(begun) == 3 and len(little.queue.jobs) == 4, "three run, and none waits"
    assert [known(little, id).task.index for id in begun] == [0, 1, 2]  # type: ignore[union-attr]
    other = job(little)
    assert place_all(little) == [other]
    little.restore()
    little.end(known(little, begun[1]), 7)
    assert known(little, array).array.failed_tasks == (1,)  # type: ignore[union-attr]
    while little.state(array) == "queued":
        running = [each.id for each in little.jobs("running") if each.task is not None]
        assert len(running) <= 3
        for id in running:
            little.end(known(little, id))
        place_all(little)
    assert (little.state(array), known(little, array).ending.exit_code) == ("failed", 7)
    assert known(little, array).reason == "1 of 10 tasks failed: 1"


def test_a_full_rack_has_one_waiting_task_of_an_array_in_the_arrays_place() -> None:
    little = Little([1], {"red": 1})
    array, late = job(little, array="5,7,9"), job(little)
    first = place_all(little)
    assert len(first) == 1 and sum(each.task is not None for each in little.queue.live()) == 2, "one runs, one waits"
    order = []
    for _ in range(4):
        (runs,) = little.jobs("running")
        order.append(runs.task.index if runs.task else runs.id)
        little.end(runs)
        place_all(little)
    assert order == [5, 7, 9, late] and little.state(array) == "done", "tasks come before what came after the array"


def test_tasks_are_cancelled_by_their_indices_and_an_array_with_all_of_them() -> None:
    little = Little([2], {"red": 2})
    array = job(little, array="0-99")
    after = job(little, after=[f"any:{array}"])
    place_all(little)
    assert isinstance(little.say(CancelAsked(wall_s=1.0, job=array, tasks=((1, 1), (3, 97)))), Applied)
    record = known(little, array).array
    assert record is not None and record.cancelled == 95, "task 1 runs, and is stopped first"
    assert isinstance(little.say(CancelAsked(wall_s=1.0, job=array, tasks=((200, 300),))), NotApplied)
    little.end(next(each for each in little.jobs("stopping") if each.task), 143)
    assert record.cancelled == 96
    place_all(little)
    assert [each.task.index for each in little.jobs("running") if each.task] == [0, 2]
    little.say(CancelAsked(wall_s=1.0, job=array, by="ann"))
    little.restore()
    for each in little.jobs("stopping"):
        little.end(each, 143)
    assert little.state(array) == "cancelled" and place_all(little) == [after]
    held = job(little, array="0-3", hold=True)
    assert not place_all(little)
    little.say(CancelAsked(wall_s=1.0, job=held))
    assert little.state(held) == "cancelled", "nothing of it had begun"


@pytest.mark.parametrize(
    ("text", "said"),
    [("0-9999999", "10,000,000 tasks"), ("5-3", "ends before it begins"), ("0-9,4", "overlap"), ("1%0", "most tasks"),
     ("%4", "is no index"), ("a-b", "is no index"), ("1-9:0", "is no index"), (",".join(map(str, range(101))), "101"),
     ("1%", "most tasks at once")],
)  # fmt: skip
def test_an_array_that_cannot_be_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tasks_of(text)
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({"argv": ["x"], "array": text})
    assert caught.value.field == "array"


parts = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=4)


@settings(max_examples=examples(150), deadline=None)
@given(parts, st.lists(st.tuples(st.integers(0, 80), st.integers(0, 20)), max_size=4))
def test_tasks_have_one_place_each(given: list[tuple[int, int, int]], meant: list[tuple[int, int]]) -> None:
    text = ",".join(f"{first}-{first + length}:{step}" for first, length, step in given)
    wanted = [index for first, length, step in given for index in range(first, first + length + 1, step)]
    try:
        tasks = tasks_of(text)
    except ValueError:
        return
    assert [tasks.at(place) for place in range(tasks.count)] == wanted and tasks.at(tasks.count) is None
    assert [tasks.place_of(index) for index in wanted] == list(range(tasks.count))
    ranges = [(first, first + length) for first, length in meant]
    inside = {index for index in wanted if any(low <= index <= high for low, high in ranges)}
    assert sorted(tasks.within(ranges)) == sorted(inside)
    assert all(is_in(index, joined(ranges)) == (index in inside) for index in wanted)
    assert (tasks.first, tasks.last) == (min(wanted), max(wanted)) and tasks.count <= TASKS_MAX


def test_a_leader_that_comes_later_begins_the_next_task_and_none_twice() -> None:
    little = Little([2], {"red": 2})
    array = job(little, array="0-5%2")
    place_all(little)
    little.leader.forget()
    (one, _) = little.jobs("running")
    little.end(one)
    begun = [each for each in little.look() if isinstance(each, TaskBegun)]
    assert [each.index for each in begun] == [2]
    assert isinstance(little.say(begun[0]), NotApplied), "heard twice it is one task"
    assert isinstance(little.say(TaskBegun(wall_s=1.0, job=array, index=4)), NotApplied)
