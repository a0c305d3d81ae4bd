"""Hosts that are drained: nothing starts there, what can leave it does, a host at a time."""

import asyncio
from typing import Any

import msgspec
import pytest

from covey.core.ids import HostId
from plugins.facts import HostNeverBack, Place
from plugins.gossiped import DrainedNow
from plugins.scheduler.machine.leader.draining import AGAIN_S, TRIES
from plugins.scheduler.machine.leader.leader import RackHost, ScheduleTick
from plugins.scheduler.machine.log.job_table import DRAINED_MAX, FORGOTTEN_MAX, JobTable
from plugins.scheduler.messages.commands import (
    Applied,
    Command,
    Granted,
    HostDrained,
    HostForgotten,
    MoveAsked,
    NotApplied,
    PlaceFailed,
    PlacesLost,
    Result,
    TakenBack,
)
from plugins.scheduler.policy.eligible import Drain
from tests.plugins.scheduler.rack import Rack, operator
from tests.plugins.scheduler.test_leader import Led
from tests.plugins.scheduler.test_queue import Told, halves
from tests.plugins.scheduler.test_replacing import Healing
from tests.virtual_time import play

H1, H2, H3, H4 = HostId("h1"), HostId("h2"), HostId("h3"), HostId("h4")


def drain(host: HostId, drained: bool = True, **more: Any) -> HostDrained:
    return HostDrained(wall_s=1.0, host=host, drained=drained, by="ann", **more)


def why(result: Result) -> str:
    assert isinstance(result, NotApplied)
    return result.why


# ---- the log ---------------------------------------------------------------------------------------------------------


def test_no_gang_is_placed_on_a_host_that_is_drained() -> None:
    told = Told()
    told.say(drain(H2))
    id = told.submit(4)
    told.grant(id)
    assert why(told.place(id, *halves(4))) == "h2 is drained, by ann"
    assert told[id].state == "placing" and not told.queue.holders
    told.say(drain(H2, drained=False))
    assert isinstance(told.place(id, *halves(4)), Applied)


def test_nor_does_a_part_of_a_gang_go_on_there() -> None:
    told = Healing()
    told.say(drain(H3))
    assert why(told.move(H2, H3)) == "h3 is drained, by ann"
    told.lose(H2)
    assert why(told.replace(H2, H3)) == "h3 is drained, by ann"
    assert isinstance(told.replace(H2, H4), Applied)


def test_what_runs_on_a_host_that_is_drained_goes_on_until_something_is_decided() -> None:
    told = Healing()
    told.say(drain(H2))
    assert told.job.state == "running" and told.hosts == [H1, H2]
    told.report(told.id, H1, {0: 0, 1: 0})
    told.report(told.id, H2, {2: 0, 3: 0})
    assert told.job.state == "done"


def test_a_cordon_keeps_new_ranks_away_and_a_drain_is_more() -> None:
    told = Told()
    told.say(drain(H2, cordon=True))
    id = told.submit(4)
    told.grant(id)
    assert why(told.place(id, *halves(4))) == "h2 is cordoned, by ann"
    assert isinstance(told.say(drain(H2)), Applied), "a cordoned host is drained then"
    for command in (drain(H2, cordon=True), drain(H2, drained=False, cordon=True)):
        assert why(told.say(command)) == "it is drained, by ann, and what is there leaves it"
    again = JobTable()
    again.restore(told.queue.snapshot())
    assert again.drained == told.queue.drained and not again.drained[H2].cordon
    for command in (drain(H2, drained=False), *[drain(H2, cordon=True)] * 2, drain(H2, drained=False, cordon=True)):
        assert isinstance(told.say(command), Applied)
    noted = [event.removeprefix("host ") for subject, event in told.notes if subject == "host/h2"]
    assert noted == ["cordoned", "drained", "resumed", "cordoned", "uncordoned"] and not told.queue.drained
    told.queue.drained = {HostId(f"r{n}"): Drain("ann", False, 1.0, True) for n in range(DRAINED_MAX)}
    for cordon, word in ((True, "cordoned"), (False, "drained")):
        refused = told.say(drain(H2, cordon=cordon))
        assert isinstance(refused, NotApplied) and refused.what == f"h2 was not {word}"


def test_a_host_is_forgotten_once_no_job_has_ranks_there() -> None:
    told = Healing()
    told.say(drain(H2, cordon=True))
    forget = HostForgotten(wall_s=1.0, host=H2, boot=3, by="ann")
    assert why(told.say(forget)) == "j1 has ranks on it" and H2 in told.queue.drained
    told.lose(H2)
    told.replace(H2, H3)
    assert isinstance(told.say(forget), Applied) and not told.queue.drained
    assert isinstance(told.say(forget), Applied), "twice is no error"
    told.say(msgspec.structs.replace(forget, boot=2))
    assert told.queue.forgotten == {H2: 3}, "an older word takes nothing back"
    again = JobTable()
    again.restore(told.queue.snapshot())
    assert again.forgotten == {H2: 3}
    for number in range(FORGOTTEN_MAX):
        told.say(HostForgotten(wall_s=1.0, host=HostId(f"x{number}"), boot=1))
    assert len(told.queue.forgotten) == FORGOTTEN_MAX and H2 not in told.queue.forgotten


def test_whoever_reads_the_log_or_a_snapshot_hears_which_hosts_never_come_back() -> None:
    async def main() -> None:
        rack = Rack({"gpu1": 1, "gpu2": 1})
        await rack.start()
        await rack["gpu1"].service.queue_log.insist(HostForgotten(wall_s=1.0, host=H2, boot=3))
        for host in ("gpu1", "gpu2"):
            assert [fact for fact in rack[host].told if isinstance(fact, HostNeverBack)] == [HostNeverBack(H2, 3)]
        rack["gpu2"].told.clear()
        rack["gpu2"].log.restore(rack["gpu1"].log.snapshot())
        assert HostNeverBack(H2, 3) in rack["gpu2"].told

    play(main())


def test_it_is_remembered_and_said_once() -> None:
    told = Told()
    for command in (drain(H2), drain(H2), drain(H2, stop_jobs=True), drain(H1, drained=False)):
        assert isinstance(told.say(command), Applied)
    assert [event for subject, event in told.notes if subject == "host/h2"] == ["host drained", "host drained"]
    again = JobTable()
    again.restore(told.queue.snapshot())
    assert again.drained == told.queue.drained and again.drained[H2].stop_jobs
    told.say(drain(H2, drained=False))
    assert not told.queue.drained and told.notes[-1] == ("host/h2", "host resumed")


def test_the_last_ones_that_have_what_others_need_do_not_move() -> None:
    told = Healing()
    assert isinstance(told.move(H1), Applied)
    assert "about to move" in why(told.move(H2))
    told.lose(H2)
    assert told.job.healing.moving == {} and told.job.healing.missing == (H2,), "who was to move is needed where it is"
    told = Healing()
    told.move(H1)
    told.job.healing.missing = (H2,)
    told.queue.rebuild()
    assert why(told.replace(H1, H3)) == "no rank with their state would be left"


# ---- the leader ------------------------------------------------------------------------------------------------------

RACK = (RackHost(H1, 4), RackHost(H2, 4), RackHost(H3, 4))


class LedDrain:
    """A gang of two hosts that heals, and a leader."""

    def __init__(self, healing: bool = True) -> None:
        self.led = Led()
        self.id = self.led.run(2, host=H2)
        self.job = self.led.queue.jobs[self.id]
        self.job.start.places = (Place(H1, (0,), ("h1-0",)), Place(H2, (1,), ("h2-0",)))
        self.led.queue.rebuild()
        self.job.healing.may_be_lost = (H1, H2) if healing else ()
        self.led.leader.forget()

    def look(self, after_s: float = 1.0, rack: tuple[RackHost, ...] = RACK) -> list[Command]:
        self.led.now_s += after_s
        found = [action.command for action in self.led.leader.handle(ScheduleTick(rack, 1.0), self.led.now_s)]
        self.led.leader.check()
        return [command for command in found if isinstance(command, MoveAsked | TakenBack | Granted | PlacesLost)]


def test_a_gang_that_heals_leaves_one_host_at_a_time() -> None:
    it = LedDrain()
    it.led.say(drain(H1))
    it.led.say(drain(H2))
    (asked,) = it.look()
    assert isinstance(asked, MoveAsked) and (asked.host, asked.to, asked.coordinator) == (H1, None, H2)
    it.led.say(asked)
    assert it.look() == [], "one at a time"
    assert (
        it.job.healing.moving == {H1: ""} and "ann, who drains h1," in it.led.queue.jobs[it.id].reason
    ) or it.job.healing.moving


def test_what_is_on_a_cordoned_host_stays() -> None:
    for healing in (True, False):
        it = LedDrain(healing)
        it.led.say(drain(H1, cordon=True))
        assert [command for _ in range(80) for command in it.look()] == []


def test_it_is_asked_again_later_and_later_when_no_host_has_room() -> None:
    it = LedDrain()
    it.led.say(drain(H1))
    for pause_s in AGAIN_S:
        (asked,) = it.look()
        it.led.say(asked)
        it.led.say(PlaceFailed(wall_s=1.0, job=it.id, epoch=it.job.grant.epoch, reason="no other host has room"))
        assert it.job.state == "running" and it.look(pause_s - 0.5) == []


def test_a_job_that_cannot_leave_stays_or_with_stop_jobs_stops() -> None:
    it = LedDrain(healing=False)
    it.led.say(drain(H1))
    assert it.look() == []
    it.led.say(drain(H1, stop_jobs=True))
    (stopped,) = it.look()
    assert isinstance(stopped, TakenBack) and (stopped.cause, stopped.reason) == ("preempted", "h1 is drained, by ann")


def test_with_stop_jobs_one_that_found_no_place_stops_as_well() -> None:
    it = LedDrain()
    it.led.say(drain(H1, stop_jobs=True))
    for _ in range(TRIES):
        (asked,) = it.look(100.0)
        assert isinstance(asked, MoveAsked)
        it.led.say(asked)
        it.led.say(PlaceFailed(wall_s=1.0, job=it.id, epoch=it.job.grant.epoch, reason="no other host has room"))
    (stopped,) = it.look(100.0)
    assert isinstance(stopped, TakenBack)


def test_a_host_that_is_gone_is_lost_and_not_drained() -> None:
    it = LedDrain()
    it.led.say(drain(H1, stop_jobs=True))
    gone = (RackHost(H1, 4, gone_s=1.0), RackHost(H2, 4), RackHost(H3, 4))
    assert not any(isinstance(command, MoveAsked) for command in it.look(1.0, gone))


@pytest.mark.parametrize("workers", [5, 8])
def test_gpus_of_a_drained_host_are_given_to_nobody(workers: int) -> None:
    led = Led()
    led.say(drain(H2))
    led.submit(workers)
    assert led.act() == [], "four GPUs are open, and nobody stops for the rest"
    led.say(drain(H2, drained=False))
    assert any(isinstance(command, Granted) for command in led.act())


def test_a_job_on_a_drained_host_does_not_stop_for_others_nor_they_for_it() -> None:
    led = Led(narrow_first=False)
    stays, other = led.run(2, host=H1), led.run(4, host=H2)
    led.say(drain(H1))
    led.submit(2, tenant="bob")
    assert led.act() == [], "the four GPUs that are open belong to the older of the two: nobody stops for the younger"
    assert {led.queue.jobs[id].state for id in (stays, other)} == {"running"}


# ---- what people ask -------------------------------------------------------------------------------------------------


def test_whoever_drains_a_host_is_named_by_its_agent_whatever_a_request_says() -> None:
    names = ["ann", "x" * 256, "EXAMPLE\\ann.lee@corp", "7", ""]
    claims = ["the leader", "\U0001f600" * 200, "\ud800lone", 7, None]

    async def story() -> list[str]:
        rack = Rack({"h1": 2, "h2": 2, "h3": 2})
        await rack.start()
        said = []
        for name, claim in zip(names, claims, strict=True):
            await rack["h2"].call("drain", id="h1", by=claim, asker=operator(name))
            await asyncio.sleep(2.0)
            now = msgspec.msgpack.decode(rack.values[H1]["drained"], type=DrainedNow)
            assert len(rack.values[H1]["drained"]) <= 80
            said.append(now.by)
            await rack["h3"].call("resume", id="h1")
            await asyncio.sleep(2.0)
        rack.check()
        rack.stop()
        return said

    assert play(story()) == ["ann", "x" * 48, "EXAMPLE\\ann.lee@corp", "7", "uid 0"]
