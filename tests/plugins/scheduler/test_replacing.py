"""Gangs that continue without a host: what the log keeps of that, when the leader says so, how another host is
found."""

from math import inf
from typing import Any

import msgspec
import pytest

from covey.core.events import Heard
from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.gang.gang import ATTEMPTS, Action, GrantSeen, PlacementProposed, PlacesSought
from plugins.scheduler.machine.leader.leader import RackHost, ScheduleTick
from plugins.scheduler.machine.leader.leases import LeaseAsked
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import JobHealing
from plugins.scheduler.machine.log.replacing import LOSSES_MAX, joinable, refused_move, taken_over, waits_for, why_not
from plugins.scheduler.messages.commands import (
    Applied,
    Attained,
    Command,
    JobHeals,
    Leads,
    MoveAsked,
    NotApplied,
    PlaceFailed,
    PlacesLost,
    Replaced,
    Result,
    TakenBack,
)
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.messages.wire import NotReserved, Reserved
from plugins.scheduler.policy.leases import DRIFT, PAUSE_SLACK_S, terms
from plugins.scheduler.policy.place import stand_in
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.service import views
from tests.plugins.scheduler.test_gang import Coordinator, asks, proposals, released
from tests.plugins.scheduler.test_leader import Led
from tests.plugins.scheduler.test_queue import Told

H1, H2, H3, H4 = HostId("h1"), HostId("h2"), HostId("h3"), HostId("h4")
TERM = 7


class Healing(Told):
    """A gang of four, two ranks on each of h1 and h2, all of which may be lost."""

    def __init__(self, **spec: Any) -> None:
        super().__init__()
        self.say(Leads(wall_s=1.0, term=TERM, leases_over_s=50.0, pauses_over_s=5.0))
        self.id = self.run(4, **spec)
        for host in (H1, H2):
            self.heals(host)

    @property
    def job(self) -> Any:
        return self[self.id]

    def heals(self, host: HostId, may: bool = True, since: int | None = None) -> None:
        place = self.job.place_on(host)
        said = JobHeals(self.job.grant.epoch, place.since if since is None else since, may)
        self.say(Attained(wall_s=1.0, host=host, service_gpu_s={}, heals={self.id: said}))

    def lose(self, *hosts: HostId, term: int = TERM, coordinator: HostId = H1) -> Result:
        epoch = self.job.grant.epoch
        return self.say(
            PlacesLost(
                wall_s=1.0, job=self.id, epoch=epoch, hosts=hosts, coordinator=coordinator, reason="gone", term=term
            )
        )

    def move(self, host: HostId, to: HostId | None = None) -> Result:
        epoch = self.job.grant.epoch
        return self.say(MoveAsked(wall_s=1.0, job=self.id, epoch=epoch, host=host, to=to, coordinator=H1))

    def replace(self, old: HostId, new: HostId, **more: Any) -> Result:
        before = self.job.place_on(old)
        gpus = more.pop("gpus", tuple(f"{new}-{n}" for n in range(len(before.gpus))))
        place = Place(new, more.pop("ranks", before.ranks), gpus, more.pop("since", self.job.healing.healed + 1))
        if more.pop("joins", False):
            place = taken_over(place, self.job.place_on(new))
        return self.say(Replaced(wall_s=1.0, job=self.id, epoch=self.job.grant.epoch, places={old: place}, **more))

    @property
    def hosts(self) -> list[HostId]:
        return [place.host for place in self.job.start.places]


# ---- the log ---------------------------------------------------------------------------------------------------------


def test_a_gang_that_lost_a_host_goes_on_under_its_grant_on_another_one() -> None:
    told = Healing()
    epoch, attempt = told.job.grant.epoch, told.job.tally.attempt
    assert isinstance(told.lose(H2), Applied)
    assert told.job.state == "running" and told.job.healing.missing == (H2,) and not told.job.awaits(H2)
    assert H2 not in told.queue.holders, "its GPUs are nobody's"
    assert isinstance(told.replace(H2, H3), Applied)
    assert told.hosts == [H1, H3] and told.job.healing.missing == () and not told.job.seeks
    assert (told.job.grant.epoch, told.job.tally.attempt, told.job.state) == (epoch, attempt, "running")
    assert told.queue.used("alice") == 4 and set(told.queue.holders[H3].values()) == {told.id}
    assert told.job.place_on(H3) == Place(H3, (2, 3), ("h3-0", "h3-1"), 1)
    again = Replaced(wall_s=2.0, job=told.id, epoch=epoch, places={H2: told.job.place_on(H3)})
    assert isinstance(told.say(again), Applied) and told.job.healing.healed == 1, "said twice"


def test_a_gang_has_as_many_tables_as_it_started_on_hosts_whatever_it_lies_on_later() -> None:
    told = Healing()
    assert told.job.start.tables == 2
    told.lose(H2)
    told.replace(H2, H1, gpus=("h1-2", "h1-3"), joins=True)
    assert told.hosts == [H1] and told.job.start.tables == 2
    copy = JobTable()
    copy.restore(told.queue.snapshot())
    assert copy.jobs[told.id].start.tables == 2, "a host that learns of it by a snapshot knows the same"


def test_ranks_that_took_over_may_be_lost_before_they_have_the_state() -> None:
    told = Healing()
    told.lose(H2)
    told.replace(H2, H3)
    assert told.job.heals_without((H3,)), "h1 has what is needed"
    assert not told.job.heals_without((H1,)) and isinstance(told.move(H1), NotApplied)
    assert "have not received their state yet" in why_not(told.job)
    told.lose(H3)
    assert told.job.state == "running" and told.job.healing.missing == (H3,)
    told.replace(H3, H4)
    told.heals(H4)
    assert told.job.heals_without((H1,)) and isinstance(told.move(H1), Applied)


def test_it_is_done_when_the_hosts_that_it_has_then_report_zeros() -> None:
    told = Healing()
    told.lose(H2)
    told.replace(H2, H3)
    told.report(told.id, H1, {0: 0, 1: 0})
    assert isinstance(told.report(told.id, H2, {2: -9, 3: -9}), NotApplied), "it has no place there any more"
    told.report(told.id, H3, {2: 0, 3: 0}, since=1)
    assert told.job.state == "done"


def test_a_report_of_ranks_that_were_replaced_is_not_one_of_those_after_them() -> None:
    told = Healing()
    told.lose(H2)
    told.replace(H2, H3)
    told.heals(H3)
    told.lose(H3)
    assert isinstance(told.replace(H3, H2), Applied), "a host may get them back"
    assert isinstance(told.report(told.id, H2, {2: -9, 3: -9}, lost=True), NotApplied)
    assert told.job.state == "running" and told.job.awaits(H2)
    told.report(told.id, H2, {2: -9, 3: -9}, lost=True, since=2)
    assert told.job.state == "stopping"


def test_a_gang_whose_other_hosts_are_not_ready_is_taken_back_whole() -> None:
    told = Healing()
    told.heals(H1, may=False)
    told.lose(H2)
    assert told.job.state == "stopping" and told.job.ending.after == "queued" and told.job.tally.hosts_lost == 1
    assert "h1 have not registered their state" in told.job.reason
    told.report(told.id, H1, {0: -15, 1: -15})
    assert told.job.state == "queued"


@pytest.mark.parametrize("spec", [{"on_lost": "restart"}, {"on_lost": "keep"}])
def test_a_job_that_was_submitted_not_to_heal_does_not(spec: dict[str, Any]) -> None:
    told = Healing(**spec)
    told.lose(H2)
    assert told.job.state == "stopping" and f"--on-lost {spec['on_lost']}" in told.job.reason


def test_a_gang_that_lost_all_its_hosts_begins_again() -> None:
    told = Healing()
    told.lose(H1, H2)
    assert told.job.state == "queued" and told.job.tally.hosts_lost == 1 and not told.queue.holders


def test_no_host_has_been_lost_by_the_word_of_a_leader_before_this_one() -> None:
    told = Healing()
    assert isinstance(told.lose(H2, term=TERM - 1), NotApplied) and told.job.healing.missing == ()


def test_without_a_place_the_whole_gang_begins_again() -> None:
    told = Healing()
    told.lose(H2)
    failed = PlaceFailed(wall_s=1.0, job=told.id, epoch=told.job.grant.epoch, reason="no other host has room")
    assert isinstance(told.say(failed), Applied)
    assert told.job.state == "stopping" and told.job.healing.missing == () and told.job.ending.lost == (H2,)
    told.report(told.id, H1, {0: -15, 1: -15})
    assert told.job.state == "queued" and told.job.healing.may_be_lost == ()


def test_hosts_that_are_lost_one_after_the_other_without_a_step_are_the_jobs_fault() -> None:
    told = Healing()
    host, others = H2, [H3, H4] * LOSSES_MAX
    for other in others[:LOSSES_MAX]:
        told.lose(host)
        assert told.job.state == "running"
        told.replace(host, other)
        told.heals(other)
        host = other
    told.lose(host)
    assert told.job.state == "stopping" and "6 hosts without finishing a step" in told.job.reason


def test_losses_with_steps_between_them_are_not() -> None:
    told = Healing()
    host = H2
    for step in range(3 * LOSSES_MAX):
        told.lose(host)
        told.job.start.step = step
        other = H3 if host != H3 else H4
        assert isinstance(told.replace(host, other), Applied)
        told.heals(other)
        host = other
    assert told.job.state == "running" and told.job.healing.healed == 3 * LOSSES_MAX


@pytest.mark.parametrize(
    ("new", "more", "why"),
    [
        (H1, {}, "does not match the one on h2"),
        (H1, {"joins": True, "gpus": ("g0", "g1")}, "GPU g0 on h1 belongs to j1"),
        (H1, {"joins": True, "ranks": (2,)}, "does not match the one on h2"),
        (H3, {"ranks": (1, 2)}, "does not match the one on h2"),
        (H3, {"since": 2}, "does not match the one on h2"),
        (H3, {"gpus": ("a",)}, "gives 1 GPU to 2 workers"),
        (H3, {"gpus": ("a", "a")}, "gives 2 GPUs to 2 workers"),
    ],
)
def test_only_a_place_like_the_one_that_was_lost_takes_over(new: HostId, more: dict[str, Any], why: str) -> None:
    told = Healing()
    told.lose(H2)
    result = told.replace(H2, new, **more)
    assert isinstance(result, NotApplied) and why in result.why and told.job.healing.missing == (H2,)


def test_nothing_takes_over_what_was_not_lost_or_belongs_to_others() -> None:
    told = Healing()
    assert isinstance(told.replace(H2, H3), NotApplied)
    other = told.submit(1, tenant="bob")
    told.grant(other)
    told.place(other, Place(H3, (0,), ("h3-0",)))
    told.lose(H2)
    result = told.replace(H2, H3)
    assert isinstance(result, NotApplied) and result.why == f"GPU h3-0 on h3 belongs to {other}"


def test_rank_0_takes_its_address_along() -> None:
    told = Healing()
    told.lose(H1, coordinator=H2)
    told.replace(H1, H3, master_addr="10.0.0.3", master_port=99)
    assert (told.job.start.master_addr, told.job.start.master_port) == ("10.0.0.3", 99) and told.hosts == [H3, H2]


def test_ranks_that_move_end_before_their_successors_start() -> None:
    told = Healing()
    assert isinstance(told.move(H2, H4), Applied) and told.job.awaits(H2)
    assert isinstance(told.replace(H2, H4), Applied)
    new = told.job.place_on(H4)
    assert waits_for(told.job, new) == H2 and told.job.awaits(H2) and set(told.queue.holders) == {H1, H2, H4}
    told.report(told.id, H2, {2: -9, 3: -9}, asked=True)
    assert waits_for(told.job, new) is None and told.job.state == "running" and set(told.queue.holders) == {H1, H4}


def test_ranks_that_end_before_they_move_go_nowhere_and_nobody_waits_for_them() -> None:
    """Otherwise another host would start them when this one has reported their end, which it has; the job would never
    be over."""
    told = Healing()
    told.move(H2, H4)
    told.report(told.id, H2, {2: 0, 3: 0})
    assert not told.job.seeks
    refused = told.replace(H2, H4)
    assert isinstance(refused, NotApplied) and told.hosts == [H1, H2] and told.job.healing.leaving == ()
    told.report(told.id, H1, {0: 0, 1: 0})
    assert told.job.state == "done"


def test_no_rank_joins_those_of_a_host_that_have_ended() -> None:
    """No host would wait for the end of such a rank."""
    told = Healing()
    told.report(told.id, H1, {0: 0, 1: 0})
    assert [place.host for place in joinable(told.job)] == [H2]


def test_a_host_that_dies_while_its_ranks_leave_it_holds_nobody_up() -> None:
    told = Healing()
    told.move(H2)
    told.replace(H2, H4)
    told.heals(H4)
    told.lose(H2)
    assert told.job.healing.leaving == () and told.job.healing.missing == () and told.job.state == "running"


def test_a_move_that_finds_no_place_changes_nothing() -> None:
    told = Healing()
    told.move(H2)
    told.say(PlaceFailed(wall_s=1.0, job=told.id, epoch=told.job.grant.epoch, reason="no other host has room"))
    assert told.job.state == "running" and told.hosts == [H1, H2] and not told.job.seeks
    assert (told.id, "not moved") in told.notes


@pytest.mark.parametrize(
    ("host", "to", "why"),
    [
        (H3, None, "no rank of it is on h3"),
        (H2, H2, "its ranks are there already"),
    ],
)
def test_a_move_that_cannot_be_says_why(host: HostId, to: HostId | None, why: str) -> None:
    result = Healing().move(host, to)
    assert isinstance(result, NotApplied) and why in result.why


def test_ranks_that_move_to_a_host_of_their_gang_join_those_that_run_there() -> None:
    told = Healing()
    assert isinstance(told.move(H1, H2), Applied) and told.job.awaits(H1)
    assert isinstance(told.replace(H1, H2, gpus=("x", "y"), joins=True, master_addr="10.0.0.2", master_port=7), Applied)
    grown = Place(H2, (2, 3, 0, 1), ("g2", "g3", "x", "y"), 1)
    assert told.job.start.places == (grown,), "those that were there keep their numbers and GPUs"
    assert (told.job.start.master_addr, told.job.start.master_port) == ("10.0.0.2", 7), "rank 0 came along"
    assert waits_for(told.job, grown) == H1 and told.job.healing.may_be_lost == ()
    told.queue.check()
    told.report(told.id, H1, {0: -9, 1: -9}, asked=True)
    assert waits_for(told.job, grown) is None and set(told.queue.holders) == {H2}
    assert isinstance(told.report(told.id, H2, {2: 0, 3: 0}), NotApplied), "what was reported before they came"
    told.report(told.id, H2, dict.fromkeys(range(4), 0), since=1)
    assert told.job.state == "done"


def test_ranks_of_a_lost_host_may_join_others_and_the_rest_takes_a_host_too() -> None:
    told = Healing()
    told.lose(H2)
    assert isinstance(told.replace(H2, H1, gpus=("x", "y"), joins=True), Applied)
    assert told.job.start.places == (Place(H1, (0, 1, 2, 3), ("g0", "g1", "x", "y"), 1),)
    assert told.job.healing.missing == () and told.job.healing.leaving == () and told.job.state == "running"
    told.heals(H1)
    assert "no other rank has their state" in why_not(told.job), "a gang on one host"


@pytest.mark.parametrize(
    ("spec", "others", "why"),
    [
        ({"pack": "apart"}, (), "each of its ranks needs a host of its own"),
        ({}, ((H1, H3),), "its ranks on h1 are about to move to another host, or are lost"),
    ],
)
def test_ranks_join_no_others_that_leave_or_want_hosts_of_their_own(
    spec: dict[str, Any], others: tuple[tuple[HostId, HostId], ...], why: str
) -> None:
    told = Healing()
    hosts = (H1, H2, H3, H4)
    job = told.job
    job.healing = JobHealing(may_be_lost=hosts, moving=dict(others))
    job.start.places = tuple(Place(host, (n,), (f"{host}-0",)) for n, host in enumerate(hosts))
    job.spec = msgspec.structs.replace(job.spec, **spec)
    asked = MoveAsked(wall_s=1.0, job=job.id, epoch=job.grant.epoch, host=H2, to=H1, coordinator=H3)
    result = refused_move(job, asked, {})
    assert result is not None and why in result.why


def test_ranks_join_others_where_no_host_without_has_room() -> None:
    it = Coordinator({H1: 2, H2: 4, H3: 1})
    places = (Place(H1, (0, 1), ("a", "b")), Place(H2, (2, 3), ("c", "d")))
    spec = JobSpec.parse({"argv": ["x"], "workers": 4})
    sought = PlacesSought(((places[1], None),), (H1, H2), 5, 1, stays=places[:1])
    ((host, ask),) = asks(it.dispatch(GrantSeen(JobId("j1"), 1, spec, sought=sought))).items()
    assert (host, ask.joins, ask.workers) == (H1, True, 2)
    (command,) = proposals(it.yes(H1, ask))
    assert isinstance(command, Replaced)
    assert command.places == {H2: Place(H1, (0, 1, 2, 3), ("a", "b", "h1-0", "h1-1"), 5)}
    roomy = Coordinator({H1: 2, H2: 4, H3: 2})
    found = asks(roomy.dispatch(GrantSeen(JobId("j1"), 1, spec, sought=sought)))
    assert list(found) == [H3] and not found[H3].joins, "a host without ranks of it comes first"


def test_a_gang_that_cannot_heal_does_not_move() -> None:
    told = Healing()
    told.heals(H2, may=False)
    result = told.move(H2)
    assert isinstance(result, NotApplied) and "its ranks on h2 have not registered their state" in result.why


def test_it_is_said_whether_a_job_goes_on_without_any_one_of_its_hosts() -> None:
    told = Healing()
    assert views.heals(told.job)
    told.heals(H2, may=False)
    assert (
        not views.heals(told.job) and why_not(told.job) == "its ranks on h2 have not registered their state (job.state)"
    )
    alone = told.submit(1)
    told.grant(alone)
    told.place(alone, Place(H3, (0,), ("h3-0",)))
    told.say(Attained(wall_s=1.0, host=H3, service_gpu_s={}, heals={alone: JobHeals(told[alone].grant.epoch, 0, True)}))
    assert not views.heals(told[alone]) and why_not(told[alone]).startswith("all its ranks are on one host")


def test_a_snapshot_keeps_what_is_missing_and_who_may_be_lost() -> None:
    told = Healing()
    told.move(H1)
    told.lose(H2)
    copy = JobTable()
    copy.restore(told.queue.snapshot())
    copy.check()
    assert copy.jobs[told.id] == told.job and copy.pauses_over_s == 5.0


# ---- the leader ------------------------------------------------------------------------------------------------------


class LedHealing:
    def __init__(self) -> None:
        self.led = Led()
        self.id = self.led.run(2, host=H2)
        self.job = self.led.queue.jobs[self.id]
        self.job.start.places = (Place(H1, (0,), ("h1-0",)), Place(H2, (1,), ("h2-0",)))
        self.led.queue.rebuild()
        self.job.healing.may_be_lost = (H1, H2)
        self.led.leader.forget()

    def look(self, **gone: Any) -> list[Command]:
        return self.look_at((RackHost(H1, 4), RackHost(H2, 4, gone_s=0.0, **gone), RackHost(H3, 4)))

    def look_at(self, rack: tuple[RackHost, ...], back: frozenset[HostId] = frozenset()) -> list[Command]:
        look = ScheduleTick(rack, 1.0, speechless=back)
        return [action.command for action in self.led.leader.handle(look, self.led.now_s)]

    def lost(self, **gone: Any) -> list[PlacesLost | TakenBack]:
        return [command for command in self.look(**gone) if isinstance(command, PlacesLost | TakenBack)]


def test_a_host_is_lost_to_a_gang_that_heals_once_its_ranks_stand_still() -> None:
    it = LedHealing()
    it.led.now_s += 100.0
    it.look()
    it.led.now_s += 100.0
    it.led.leader.leases.handle(LeaseAsked(H2, ((it.id, it.job.grant.epoch),)), it.led.now_s)
    paused_s = terms(60.0).paused_s
    it.led.now_s += paused_s - 0.1
    assert it.lost() == []
    it.led.now_s += 0.2
    (lost,) = it.lost()
    assert isinstance(lost, PlacesLost) and (lost.hosts, lost.coordinator) == ((H2,), H1)
    (given,) = it.led.leader.leases.handle(LeaseAsked(H2, ((it.id, it.job.grant.epoch),)), it.led.now_s)
    assert given.grants == (), "it is confirmed no more"


def test_a_host_whose_agent_restarts_is_not_lost_to_it() -> None:
    it = LedHealing()
    it.look()
    it.led.now_s += 30.0
    assert it.lost(away=True) == [] and len(it.lost()) == 1


def test_a_host_that_is_back_from_a_long_restart_has_time_to_say_what_it_has() -> None:
    """Its agent was away for longer than its ranks may go without a lease; gossip knows it, but no value of its."""
    it = LedHealing()
    it.look()
    paused_s = terms(60.0).paused_s
    it.led.now_s += 4 * paused_s
    assert it.lost(away=True) == []
    others, back = (RackHost(H1, 4), RackHost(H3, 4)), frozenset((H2,))
    for _ in range(3):
        assert it.look_at(others, back) == []
        it.led.now_s += paused_s
    assert it.look_at((*others, RackHost(H2, 4))) == [], "it spoke"
    it.led.now_s += 4 * paused_s
    assert it.look_at(others, back) == []
    it.led.now_s += SchedulerSettings().host_lost_after_s
    (lost,) = it.look_at(others, back)
    assert isinstance(lost, PlacesLost) and lost.hosts == (H2,), "it says nothing for as long as any host is waited for"


def test_a_host_that_gossip_does_not_name_is_lost_once_its_ranks_stand_still() -> None:
    it = LedHealing()
    it.look()
    it.led.now_s += 4 * terms(60.0).paused_s
    (lost,) = it.look_at((RackHost(H1, 4), RackHost(H3, 4)))
    assert isinstance(lost, PlacesLost) and lost.hosts == (H2,)


def test_a_host_that_is_only_suspected_is_lost_once_its_ranks_stand_still() -> None:
    """How long a suspicion lasts depends on how many hosts confirm it; on a busy rack of five it was 13 s."""
    it = LedHealing()
    suspect = (RackHost(H1, 4), RackHost(H2, 4, suspect=True), RackHost(H3, 4))
    it.look_at(suspect)
    it.led.now_s += 100.0
    it.led.leader.leases.handle(LeaseAsked(H2, ((it.id, it.job.grant.epoch),)), it.led.now_s)
    paused_s = terms(60.0).paused_s
    assert it.led.leader.still_in_s(it.led.now_s) == pytest.approx(paused_s), "when its leader looks next"
    it.led.now_s += paused_s - 0.1
    assert it.look_at(suspect) == []
    it.led.now_s += 0.2
    assert it.led.leader.still_in_s(it.led.now_s) == inf
    (lost,) = it.look_at(suspect)
    assert isinstance(lost, PlacesLost) and (lost.hosts, lost.coordinator) == ((H2,), H1)
    assert lost.reason == "h2 does not answer"


def test_a_suspected_host_is_asked_last_to_look_for_others() -> None:
    it = LedHealing()
    it.job.start.places = (*it.job.start.places, Place(H3, (2,), ("h3-0",)))
    it.job.healing.may_be_lost = (H1, H2, H3)
    it.led.queue.rebuild()
    it.led.leader.forget()
    it.look()
    it.led.now_s += 30.0
    it.led.leader.leases.handle(LeaseAsked(H1, ((it.id, it.job.grant.epoch),)), it.led.now_s)
    (lost,) = it.look_at((RackHost(H1, 4, suspect=True), RackHost(H2, 4, gone_s=9.0), RackHost(H3, 4)))
    assert isinstance(lost, PlacesLost) and (lost.hosts, lost.coordinator) == ((H2,), H3)


def test_a_host_that_ranks_are_leaving_is_lost_before_their_successors_run() -> None:
    it = LedHealing()
    it.job.healing.leaving, it.job.start.places = (
        (it.job.start.places[1],),
        (it.job.start.places[0], Place(H3, (1,), ("h3-0",), 1)),
    )
    it.led.queue.rebuild()
    it.job.healing.may_be_lost = (H1,)
    it.led.leader.forget()
    it.look()
    it.led.now_s += 30.0
    (lost,) = it.lost()
    assert isinstance(lost, PlacesLost) and lost.hosts == (H2,)
    it.led.say(lost)
    assert it.job.state == "running" and not it.led.queue.jobs[it.id].healing.leaving and not it.job.seeks


def test_a_gang_that_does_not_heal_waits_until_its_ranks_are_gone() -> None:
    it = LedHealing()
    it.job.healing.may_be_lost = (H1,)
    it.look()
    it.led.now_s += 30.0
    assert it.lost() == []


def test_ranks_stand_still_before_others_may_start_whatever_two_clocks_do() -> None:
    told = terms(60.0)
    assert told.pause_s / (1 - DRIFT) * (1 + DRIFT) + PAUSE_SLACK_S <= told.paused_s * (1 + 1e-9)
    assert terms(2.0).pause_s <= terms(2.0).lease_s, "never after their lease is over"


def test_a_new_leader_waits_for_the_pauses_that_leaders_before_it_gave() -> None:
    it = LedHealing()
    it.led.say(Leads(wall_s=1.0, term=3, leases_over_s=60.0, pauses_over_s=40.0))
    it.led.leader.forget()
    it.look()
    it.led.now_s += 39.0
    assert it.lost() == []
    it.led.now_s += 2.0
    assert len(it.lost()) == 1


def test_another_host_looks_when_the_one_that_did_is_gone() -> None:
    it = LedHealing()
    it.job.healing.missing, it.job.grant.coordinator, it.job.healing.sought = (H1,), H3, 1
    it.job.healing.may_be_lost = (H2,)
    it.led.leader.forget()
    rack = (RackHost(H1, 4, gone_s=9.0), RackHost(H2, 4), RackHost(H3, 4, gone_s=9.0))
    said = [action.command for action in it.led.leader.handle(ScheduleTick(rack, 1.0), it.led.now_s)]
    again = [command for command in said if isinstance(command, PlacesLost)]
    assert [(command.hosts, command.coordinator) for command in again] == [((H1,), H2)]


# ---- the coordinator -------------------------------------------------------------------------------------------------


def seek(*places: tuple[Place, HostId | None], number: int = 1, **spec: Any) -> tuple[Coordinator, list[Action]]:
    it = Coordinator({H1: 4, H2: 4, H3: 2, H4: 1})
    job = JobSpec.parse({"argv": ["x"], "workers": 4, **spec})
    sought = PlacesSought(places, (H1, H2), 5, number)
    return it, it.dispatch(GrantSeen(JobId("j1"), 1, job, sought=sought))


def test_a_host_of_its_own_is_asked_for_each_place_and_no_host_of_the_gang() -> None:
    it, actions = seek((Place(H1, (0,), ("a",)), None), (Place(H2, (1, 2), ("b", "c")), None))
    asked = asks(actions)
    assert {host: (ask.workers, ask.master) for host, ask in asked.items()} == {H3: (2, False), H4: (1, True)}
    assert not proposals(it.yes(H3, asked[H3]))
    (said,) = proposals(it.yes(H4, asked[H4]))
    assert isinstance(said, Replaced) and (said.master_addr, said.master_port) == ("ip-h4", 20_000)
    assert said.places == {H1: Place(H4, (0,), ("h4-0",), 5), H2: Place(H3, (1, 2), ("h3-0", "h3-1"), 5)}
    assert it.dispatch(PlacementProposed(said, Applied())) == [] and not it.gangs.searches


def test_the_host_that_a_person_named_is_asked_or_none() -> None:
    _, actions = seek((Place(H2, (1,), ("b",)), H3))
    assert list(asks(actions)) == [H3]
    _, actions = seek((Place(H2, (1, 2), ("b", "c")), H4))
    assert not asks(actions), "it has no room"


def test_attempts_of_a_later_search_come_after_those_of_the_ones_before() -> None:
    it, actions = seek((Place(H2, (1,), ("b",)), None), number=3)
    (ask,) = asks(actions).values()
    assert ask.attempt == 3 * ATTEMPTS + 1
    actions = it.dispatch(Heard(H4, NotReserved(ask.job, ask.epoch, ask.attempt, 0, "taken")))
    assert released(actions) == [H4]
    late = Reserved(ask.job, ask.epoch, ask.attempt, ("h4-0",), "", 0)
    assert released(it.dispatch(Heard(H4, late))) == [H4], "a yes that came too late is given back"


def test_the_widest_place_chooses_first_and_the_tightest_host_takes_it() -> None:
    assert stand_in({H1: 4, H2: 2, H3: 1}, [(1, None), (2, None)]) == [H3, H2]
    assert stand_in({H1: 4, H2: 2}, [(1, H1), (2, None)]) == [H1, H2]
    assert stand_in({H1: 1}, [(2, None)]) is None and stand_in({H1: 4}, [(1, None), (1, None)]) is None
    assert stand_in({H1: -3, H2: -1}, [(0, None)]) == [H2], "without GPUs: where the fewest ranks are"
