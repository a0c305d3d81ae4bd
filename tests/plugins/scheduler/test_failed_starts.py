"""A host on which starts fail one after another cordons itself, for a reason that people read, and no rack does."""

import asyncio

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId, JobId
from covey.ports.devices import Gpu
from plugins.askers import Asker
from plugins.facts import StartFault
from plugins.gossiped import DrainedNow
from plugins.scheduler.machine.host.failed_starts import (
    IN_A_ROW,
    Action,
    CloseHost,
    Event,
    FailedStarts,
    HostLooked,
    StartedWell,
    StartFailed,
    StayOpen,
)
from plugins.scheduler.messages.commands import Applied, HostDrained, NotApplied
from plugins.scheduler.policy.eligible import Drain
from plugins.scheduler.service.drains import ITSELF, in_gossip
from plugins.scheduler.service.gpus import gpus_here
from tests.plugins.scheduler.rack import Rack, on_a_rack, operator, submit, until
from tests.plugins.scheduler.test_queue import Told

FOUR = HostLooked(alive=4, closed=0, here=False)


def failed(job: int, fault: StartFault = "host", user: str = "ann", why: str = "no space left") -> StartFailed:
    return StartFailed(JobId(f"j{job}"), user, fault, why)


def after(*events: Event) -> list[Action]:
    starts = FailedStarts()
    return [action for event in events for action in starts.handle(event)]


def test_three_jobs_that_the_host_failed_close_it_and_three_tries_of_one_job_do_not() -> None:
    (close,) = after(failed(4), failed(7), failed(9, why="no room"), FOUR)
    assert close == CloseHost("j4, j7, j9 did not start here: no room", 0)
    assert not after(failed(4), failed(4), failed(4), failed(7), FOUR)
    assert not after(failed(4), failed(7), StartedWell(), failed(9), FOUR), "not in a row"
    assert not after(failed(4), failed(7), failed(9, fault=""), FOUR), "that one was stopped before it began"


def test_programs_that_nobody_has_close_no_host_until_three_users_lack_theirs() -> None:
    assert not after(*[failed(job, "job") for job in range(1000)], FOUR)
    assert not after(*[failed(job, "job", ("ann", "bob")[job % 2]) for job in range(1000)], FOUR)
    said = after(failed(1, "job", "ann"), failed(2, "job", "bob"), failed(3, "job", "eve", "/home/eve/secret"), FOUR)
    assert said == [CloseHost("j1, j2, j3 did not start here", 0)], "what a user's program is called is not told"


def test_no_more_than_half_of_the_hosts_close_themselves_and_others_say_why_once() -> None:
    row = [failed(job) for job in range(IN_A_ROW)]
    assert isinstance(after(*row, HostLooked(4, 1, False))[0], CloseHost)
    kept = after(*row, *[HostLooked(4, 2, False)] * 3)
    assert len(kept) == 1 and isinstance(kept[0], StayOpen) and "no more than half" in kept[0].why
    assert isinstance(after(*row, HostLooked(1, 0, False))[0], StayOpen), "a rack of one host"


def test_a_host_that_a_person_opens_again_is_closed_by_three_new_failures_alone() -> None:
    row = [failed(job) for job in range(IN_A_ROW)]
    closed = HostLooked(4, 1, True)
    assert len(after(*row, FOUR, FOUR, closed, FOUR, failed(8), failed(9), FOUR)) == 2
    assert len(after(*row, FOUR, closed, *row, FOUR)) == 2


EVENTS = st.one_of(
    st.builds(failed, st.integers(1, 5), st.sampled_from(("host", "job", "")), st.sampled_from(("ann", "bob", "eve"))),
    st.just(StartedWell()),
    st.builds(HostLooked, st.integers(1, 6), st.integers(0, 6), st.booleans()),
)


@given(st.lists(EVENTS, max_size=40))
def test_whatever_happens_a_host_closes_for_three_differing_failures_alone(events: list[Event]) -> None:
    starts, since = FailedStarts(), list[StartFailed]()
    for event in events:
        found = starts.handle(event)
        if isinstance(event, StartedWell) or (isinstance(event, HostLooked) and event.here):
            since = []
        elif isinstance(event, StartFailed) and event.fault:
            since.append(event)
        differ = {each.job if each.fault == "host" else (each.user,) for each in since}
        closes = [action for action in found if isinstance(action, CloseHost)]
        if isinstance(event, HostLooked):
            assert bool(closes) == (len(differ) >= IN_A_ROW and 2 * (event.closed + 1) <= event.alive)
        else:
            assert not found
        assert len(starts.row) <= IN_A_ROW


# ---- the log ---------------------------------------------------------------------------------------------------------


def test_two_hosts_that_close_themselves_at_once_are_not_more_than_was_decided_on() -> None:
    told = Told()
    one, two = (
        HostDrained(wall_s=5.0, host=HostId(name), by=ITSELF, cordon=True, why="j1 did not start", closed=0)
        for name in ("h1", "h2")
    )
    assert isinstance(told.say(one), Applied) and isinstance(told.say(one), Applied)
    assert isinstance(told.say(two), NotApplied) and set(told.queue.drained) == {"h1"}
    assert told.notes[-1] == ("host/h1", "host cordoned")
    assert in_gossip(told.queue.drained[HostId("h1")], 2) == DrainedNow(ITSELF, 2, True, "j1 did not start", 5.0)
    assert in_gossip(None, 2) == DrainedNow("")
    longest = in_gossip(Drain(ITSELF, False, 1e9, True, "x" * 1000), 100)
    assert len(msgspec.msgpack.encode(longest)) <= 104, "all that a host gossips has 960 bytes"


# ---- on a rack -------------------------------------------------------------------------------------------------------


async def rests(rack: Rack, id: str) -> str:
    """What becomes of a job: it runs, or has failed."""
    await until(lambda: rack.job(id).state in ("running", "failed"))
    return str(rack.job(id).state)


@on_a_rack()
async def test_a_host_where_three_jobs_cannot_start_is_cordoned_until_a_person_opens_it(rack: Rack) -> None:
    for host in rack.hosts.values():
        host.machine.unstarted = "host" if host.id == "gpu2" else ""
    gpu2 = rack["gpu2"]
    tried = 0
    while "gpu2" not in gpu2.service.queue.drained:
        tried += 1
        assert tried < 20, "gpu2 is not cordoned"
        view = await submit(rack, workers=2, argv=["./a.py", str(tried)])
        await rests(rack, view.id)
        await until(lambda: not gpu2.machine.ends)
        await asyncio.sleep(2.0)
    drain = gpu2.service.queue.drained[HostId("gpu2")]
    assert (drain.by, drain.cordon) == (ITSELF, True) and drain.wall_s > 0
    assert drain.why.count("j") >= 3 and drain.why.endswith("did not start here: no room in this test")
    failed_there = [job for job, _ in gpu2.machine.starts]
    noted = [reason for subject, event, reason, _ in gpu2.notes if event == "host cordoned"]
    assert len(failed_there) == 3 and len(noted) == 1 and drain.why in noted[0]
    for _ in range(4):
        view = await submit(rack, workers=1)
        assert await rests(rack, view.id) == "running"
    assert [job for job, _ in gpu2.machine.starts] == failed_there, "no rank starts there any more"
    gpu2.machine.unstarted = ""
    await rack["gpu1"].call("uncordon", operator("ann"), id="gpu2")
    await asyncio.sleep(5.0)
    assert "gpu2" not in gpu2.service.queue.drained, "what was before a person opened it closes it no more"


@on_a_rack()
async def test_a_program_that_nobody_has_cordons_no_host(rack: Rack) -> None:
    for host in rack.hosts.values():
        host.machine.unstarted = "job"
    for number in range(20):
        who = Asker(1001 + number % 2, ("ann", "bob")[number % 2], "operator")
        view = await rack["gpu1"].call("submit", who, argv=["./typo"], workers=2, cwd="/tmp")
        assert await rests(rack, view.id) == "failed"
    for host in rack.hosts.values():
        await asyncio.sleep(2.0)
        assert not host.service.queue.drained and not host.service.own_cordon.notes()


# ---- GPUs in words ---------------------------------------------------------------------------------------------------


def test_a_host_tells_each_cause_for_which_its_gpus_take_no_job_the_worst_first() -> None:
    def gpu(number: int, condition: str, why: str) -> Gpu:
        return Gpu(number, f"GPU-{number}", "Test", 1, 0, None, condition=condition, why=why)  # type: ignore[arg-type]

    gpus = [gpu(0, "drain", "XID 48: memory"), gpu(1, "lost", "XID 79: bus"), gpu(2, "drain", "XID 48: memory")]
    out = {"GPU-0": "XID 48: memory", "GPU-3": "used by process 7"}
    found = gpus_here.causes([*gpus, gpu(3, "ok", ""), gpu(4, "degraded", "look at it")], out)
    assert found == ["XID 79: bus", "XID 48: memory", "used by process 7"]
    assert gpus_here.shortened(found) == "XID 79: bus; XID 48: memory; used by process 7"
    assert gpus_here.shortened(["a" * 60, "b" * 30, "c"]) == f"{'a' * 60}; 2 more"
    assert gpus_here.shortened(["ä" * 60]) == "ä" * 40 and gpus_here.shortened([]) == ""
