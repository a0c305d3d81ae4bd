"""Elastic jobs in the log: they grow, shrink and lose hosts; each rank is carried once, and each GPU is one job's."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.messages.commands import (
    Applied,
    Arranged,
    Arrangement,
    Attained,
    Command,
    HostDrained,
    JobHeals,
    MoveAsked,
    NotApplied,
    PlaceFailed,
    PlacesLost,
    RanksDone,
    RanksReported,
    Replaced,
    Result,
    ScaleAsked,
)
from plugins.scheduler.policy.carrying import carried_after, ending, first_carried, without
from tests.plugins.scheduler.test_queue import Told, refusal

H1, H2, H3, H4 = HostId("h1"), HostId("h2"), HostId("h3"), HostId("h4")


class Elastic(Told):
    """An elastic job of 4 to 16 workers, two processes on each of h1 and h2, whose state is registered."""

    def __init__(self, **spec: Any) -> None:
        super().__init__()
        self.id = self.run(4, workers_max=16, **spec)
        self.heal()

    @property
    def job(self) -> Any:
        return self[self.id]

    @property
    def names(self) -> dict[HostId, tuple[int, ...]]:
        return {place.host: place.ranks for place in self.job.start.places}

    def heal(self, *hosts: HostId) -> None:
        for place in self.job.start.places:
            if not hosts or place.host in hosts:
                said = {self.id: JobHeals(self.job.grant.epoch, place.since, True, place.ranks)}
                self.say(Attained(wall_s=1.0, host=place.host, service_gpu_s={}, heals=said))

    def scale(self, workers: int, **more: Any) -> Result:
        said = {"wall_s": 1.0, "job": self.id, "epoch": self.job.grant.epoch, "coordinator": H1, "by": "ann", **more}
        return self.say(ScaleAsked(workers=workers, **said))

    def grown(self, **more: int) -> Arranged:
        """The command of its coordinator, once hosts said yes for so many more processes: `h3=2`."""
        job = self.job
        names = sorted(carried_after(job.start.carried, (), sum(more.values())).keys() - job.start.carried.keys())
        places = {place.host: place for place in job.start.places}
        for host, count in more.items():
            new, names = tuple(names[:count]), names[count:]
            old = places.get(HostId(host), Place(HostId(host), (), ()))
            gpus = (*old.gpus, *(f"{host}.{job.healing.healed}.{name}" for name in new))
            places[old.host] = Place(old.host, (*old.ranks, *new), gpus, job.healing.healed + 1)
        return self.arrangement(tuple(places.values()))

    def arrangement(self, places: Sequence[Place], **more: Any) -> Arranged:
        said = {"epoch": self.job.grant.epoch, "replaces": self.job.healing.healed, **more}
        return Arranged(wall_s=1.0, jobs={self.id: Arrangement(places=tuple(places), **said)})

    def grow(self, **more: int) -> None:
        assert self.say(self.grown(**more)) == Applied()
        self.heal()

    def lose(self, *hosts: HostId) -> Result:
        said: dict[str, Any] = {"job": self.id, "epoch": self.job.grant.epoch, "reason": "gone"}
        return self.say(PlacesLost(wall_s=1.0, hosts=hosts, coordinator=H1, **said))

    def left(self, host: HostId) -> Result:
        """Report the end of the processes on this host, which the job has left."""
        place = self.job.left_on(host)
        codes = dict.fromkeys(place.ranks, -9)
        return self.report(self.id, host, codes, since=place.since, asked=True)


# ---- grow and shrink -------------------------------------------------------------------------------------------------


def test_an_elastic_job_starts_with_its_fewest_processes_that_carry_all_ranks() -> None:
    told = Elastic()
    assert told.names == {H1: (0, 1), H2: (2, 3)} and told.job.processes == 4
    assert told.job.start.carried == first_carried(16, 4)
    assert told.queue.used("alice") == 4


def test_a_job_that_is_not_elastic_carries_nothing_and_is_not_scaled() -> None:
    told = Told()
    id = told.run(4)
    said = ScaleAsked(wall_s=1.0, job=id, epoch=1, workers=2, coordinator=H1)
    assert told[id].start.carried == {} and "not with a range" in refusal(told.say(said)).why
    assert told[id].carriers([2, 1]) == [1, 2] and told[id].carried_by([3]) == [3]


def test_a_job_grows_by_what_its_coordinator_found_and_the_event_says_who_and_why() -> None:
    told = Elastic()
    assert told.scale(7, why="the night is quiet") == Applied(told.id)
    assert (told.job.healing.wanted, told.job.seeks, told.job.processes) == (7, True, 4)
    assert told.say(told.grown(h2=1, h3=2)) == Applied()
    assert told.names == {H1: (0, 1), H2: (2, 3, 10), H3: (12, 14)}
    assert told.job.start.carried[2] == (2, 6) and told.job.start.carried[10] == (10, 11)
    assert (told.job.healing.wanted, told.job.seeks, told.job.healing.healed) == (0, False, 1)
    assert told.job.place_on(H1).since == 0 and told.job.place_on(H2).since == told.job.place_on(H3).since == 1
    assert set(told.queue.holders[H3].values()) == {told.id} and told.queue.used("alice") == 4, "no quota for extras"
    assert told.job.healing.may_be_lost == (H1,), "hosts with new processes say anew that they may be lost"
    assert told.job.reason == "ann, the night is quiet: from 4 to 7 processes: 1 more on h2, 2 more on h3"
    assert (told.id, "to grow") in told.notes and (told.id, "grew") in told.notes


def test_a_job_seeks_room_for_the_rest_until_its_coordinator_gives_up() -> None:
    told = Elastic()
    told.scale(10)
    sought = told.job.healing.sought
    told.grow(h3=2)
    assert (told.job.processes, told.job.healing.wanted) == (6, 10)
    assert told.job.healing.sought > sought, "the search that is under way belongs to the earlier configuration"
    failed = PlaceFailed(wall_s=1.0, job=told.id, epoch=1, reason="no host has room for another process")
    assert told.say(failed) == Applied(told.id)
    assert (told.job.state, told.job.processes, told.job.healing.wanted) == ("running", 6, 0)
    assert told.job.reason == "ann: it keeps 6 of 10 processes: no host has room for another process"


def test_a_job_shrinks_in_the_entry_that_asks_for_it() -> None:
    told = Elastic()
    told.grow(h2=1, h3=2)
    assert told.scale(5) == Applied(told.id)
    assert told.names == {H1: (0, 1), H2: (2, 3, 10)} and told.job.processes == 5
    assert [place.host for place in told.job.healing.leaving] == [H3] and H3 in told.queue.holders
    assert told.job.reason == "ann: from 7 to 5 processes: 2 less on h3"
    told.left(H3)
    assert told.job.healing.leaving == () and H3 not in told.queue.holders
    held = len(told.queue.holders[H2])
    told.scale(4)
    assert len(told.queue.holders[H2]) == held - 1, "the GPU of a process that ends beside others is free in the log"
    assert told.job.place_on(H2).since == 1, "those that stay are no others"
    assert told.names == {H1: (0, 1), H2: (2, 3)}


def test_the_report_of_a_host_counts_for_the_processes_that_it_still_has() -> None:
    told = Elastic()
    told.grow(h2=1)
    since, ended = told.job.place_on(H2).since, told.names[H2][-1]
    told.scale(4)
    told.report(told.id, H2, {2: 0, 3: 0, ended: -9}, since=since)
    told.report(told.id, H1, {0: 0, 1: 0})
    assert (told.job.state, told.job.reason) == ("done", "all 16 ranks exited with 0")


def test_whole_hosts_end_before_parts_of_hosts_and_the_newest_first() -> None:
    old, mid = Place(H1, (0, 1), ("a", "b")), Place(H2, (2, 3, 4), ("c", "d", "e"), 1)
    new = Place(H3, (5, 6), ("f", "g"), 2)
    places = (old, mid, new)
    assert ending(places, [0], 1) == [6]
    assert ending(places, [0], 2) == [5, 6]
    assert ending(places, [0], 3) == [4, 5, 6]
    assert ending(places, [0], 6) == [1, 2, 3, 4, 5, 6] and ending(places, [0], 9) == [1, 2, 3, 4, 5, 6]
    assert without(places, [6, 3], 1) == (old, Place(H2, (2, 4), ("c", "e"), 1), Place(H3, (5,), ("f",), 2))
    assert without(places, [5, 6], 1) == (old, mid)


# ---- two at once ----


def decided(told: Elastic) -> dict[str, int]:
    """The configuration on which somebody decides now."""
    return {"replaces": told.job.healing.healed, "sought": told.job.healing.sought}


def test_who_asks_for_as_many_processes_as_the_leader_just_did_limits_the_job() -> None:
    told = Elastic()
    seen = told.job.healing.sought
    assert told.scale(7, by="the leader") == Applied(told.id)
    assert told.scale(7, sought=seen) == Applied(told.id)
    assert (told.job.healing.wanted, told.job.healing.at_most) == (7, 7)
    told.grow(h3=3)
    stale = refusal(told.scale(9, by="the leader"))
    assert stale.why == "no more than 7 processes were asked for since"


def test_a_shrink_of_the_leader_that_a_person_overtook_lets_the_job_not_grow() -> None:
    told = Elastic()
    told.grow(h2=1, h3=3)
    stale = {"by": "the leader", "why": "j2 waits", **decided(told)}
    assert told.scale(5, **decided(told)) == Applied(told.id)
    said = refusal(told.scale(6, **stale))
    assert (said.what, said.why) == (
        "j1 was not scaled",
        "it has 5 processes by now: its configuration is 2, not 1",
    )
    assert said.next == "look again: agentctl job j1"
    assert (told.job.processes, told.job.healing.wanted, told.job.healing.at_most) == (5, 0, 5)


def test_of_two_people_who_ask_for_more_at_once_the_second_is_refused() -> None:
    told = Elastic()
    both = decided(told)
    assert told.scale(7, **both) == Applied(told.id)
    said = refusal(told.scale(9, **{**both, "by": "bob"}))
    assert said.why == "somebody else was faster: it is to grow to 7 (ann)"
    assert (told.job.healing.wanted, told.job.healing.wanted_by) == (7, "ann")
    assert told.scale(7, **both) == Applied(told.id), "ann is heard once, and told yes twice"
    assert told.scale(9, **{**decided(told), "by": "bob"}) == Applied(told.id), "bob has looked again"
    assert told.job.healing.wanted == 9


def test_the_leader_asks_for_no_more_than_a_person_did_whatever_it_knew() -> None:
    told = Elastic()
    told.scale(4)
    said = refusal(told.scale(6, by="the leader", why="GPUs are free"))
    assert said.why == "no more than 4 processes were asked for since"
    assert not told.job.healing.wanted
    told.lose(H2)
    assert told.scale(4, by="the leader", **decided(told)) == Applied(told.id), "its gang is whole again"


def test_whoever_says_no_configuration_is_heard_as_before() -> None:
    told = Elastic()
    told.grow(h2=1, h3=3)
    assert told.scale(6) == told.scale(5, sought=None) == Applied(told.id)


def test_a_move_that_was_decided_on_another_configuration_is_refused() -> None:
    told = Elastic()
    before = told.job.healing.healed
    told.grow(h2=1)
    asked = MoveAsked(wall_s=1.0, job=told.id, epoch=1, host=H2, to=H3, coordinator=H1, replaces=before)
    said = refusal(told.say(asked))
    assert (said.what, said.next) == ("j1 was not moved", "look again: agentctl job j1")
    assert said.why == "its ranks moved meanwhile: its configuration is 1 by now, and not 0"
    assert not told.job.healing.moving
    assert told.say(msgspec.structs.replace(asked, replaces=before + 1)) == Applied(told.id)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "next"), [(3, "agentctl scale j1 4"), (17, "agentctl scale j1 16")])
def test_a_number_out_of_the_range_is_refused(workers: int, next: str) -> None:
    said = refusal(Elastic().scale(workers))
    assert (said.what, said.next) == ("j1 was not scaled", next)
    assert said.why == f"it was submitted with --workers 4..16, and {workers} is out of that range"


def test_a_job_that_has_not_registered_its_state_is_asked_again_later() -> None:
    told = Told()
    id = told.run(4, workers_max=16)
    for workers in (8, 4):
        said = refusal(told.say(ScaleAsked(wall_s=1.0, job=id, epoch=1, workers=workers, coordinator=H1)))
        assert (said.code, said.why) == (75, "its processes on h1, h2 have not registered their state (job.state)")


def test_a_job_of_which_processes_have_ended_is_not_arranged_anew() -> None:
    told = Elastic()
    grown = told.grown(h3=1)
    told.say(RanksDone(wall_s=1.0, job=told.id, epoch=1, host=H2, steps={3: 9}))
    assert sorted(told.job.healing.gone) == [3, 7, 11, 15], "all the ranks that it carried have left"
    assert "h2 have ended already" in refusal(told.scale(8)).why
    assert "h2 have ended already" in refusal(told.say(grown)).why
    told.lose(H1)
    assert told.job.state == "stopping", "nobody is there to carry the ranks of the process that has ended"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda told, new: {"replaces": 1}, "its configuration is 0 by now, and not 1"),
        (lambda told, new: {"epoch": 2}, "it is running under epoch 1"),
        (lambda told, new: {"places": told.job.start.places}, "its processes stay as they are"),
        (lambda told, new: {"places": new[1:]}, "the process that carries rank 0 ends only with its host"),
        (lambda told, new: {"places": new[:1]}, "it has 4..16 processes, and would have 2"),
        (lambda told, new: {"places": (*new, new[0])}, "a host has two places"),
        (lambda told, new: {"places": (*new[:2], Place(H3, (9,), ("x",), 1))}, "its processes would be"),
        (lambda told, new: {"places": (*new[:2], Place(H3, new[2].ranks, ("x",), 0))}, "is of configuration 0"),
        (lambda told, new: {"places": (*new[:2], Place(H3, new[2].ranks, ("x", "y"), 1))}, "gives 2 GPUs to 1 process"),
        (
            lambda told, new: {"places": (Place(H1, (0, 1), ("g0", "x")), *new[1:])},
            "processes [0, 1] on h1 do not keep their GPUs",
        ),
        (lambda told, new: {"places": (Place(H1, (1, 0), ("g1", "g0")), *new[1:])}, "do not stay on h1"),
        (lambda told, new: {"places": (*new[:2], Place(H4, (1,), ("x",), 1))}, "a process is in two"),
    ],
)  # fmt: skip
def test_an_arrangement_that_cannot_be_changes_nothing(change: Any, why: str) -> None:
    told = Elastic()
    good = told.grown(h3=1).jobs[told.id]
    given: dict[str, Any] = {"epoch": 1, "replaces": 0, "places": good.places, **change(told, good.places)}
    before = told.queue.snapshot()
    said = refusal(told.say(Arranged(wall_s=1.0, jobs={told.id: Arrangement(**given)})))
    assert why in said.why and said.what == "no job was arranged anew"
    told.queue.index -= 1
    assert told.queue.snapshot() == before


def test_of_two_arrangements_at_once_one_is_refused_and_one_said_twice_is_one() -> None:
    told = Elastic()
    first, second = told.grown(h3=1), told.grown(h4=2)
    assert told.say(first) == Applied()
    assert "its configuration is 1 by now, and not 0" in refusal(told.say(second)).why
    assert told.say(first) == Applied() and told.job.healing.healed == 1


def test_gpus_of_others_and_drained_hosts_are_refused() -> None:
    told = Elastic()
    other = told.submit(1)
    told.grant(other)
    told.place(other, Place(H3, (0,), ("x",)))
    new = told.grown(h3=1).jobs[told.id].places
    taken = told.arrangement((*new[:2], Place(H3, new[2].ranks, ("x",), 1)))
    assert f"GPU x on h3 belongs to {other}" in refusal(told.say(taken)).why
    told.say(HostDrained(wall_s=1.0, host=H4))
    assert "h4 is drained" in refusal(told.say(told.grown(h4=1))).why


def test_several_jobs_are_arranged_together_or_none_of_them() -> None:
    told = Elastic()
    second = told.run(4, workers_max=8, base=10)
    for host in (H1, H2):
        heals = {second: JobHeals(1, 0, True, told[second].place_on(host).ranks)}  # type: ignore[union-attr]
        told.say(Attained(wall_s=1.0, host=host, service_gpu_s={}, heals=heals))
    one = told.grown(h3=1).jobs[told.id]
    (name,) = carried_after(told[second].start.carried, (), 1).keys() - told[second].start.carried.keys()

    def both(gpu: str) -> Arranged:
        places = (*told[second].start.places, Place(H3, (name,), (gpu,), 1))
        return Arranged(wall_s=1.0, jobs={told.id: one, second: Arrangement(1, 0, places)}, by="a test")

    said = refusal(told.say(both(one.places[-1].gpus[0])))
    assert "belongs to" in said.why and (told.job.processes, told[second].processes) == (4, 4)
    assert told.say(both("h3.other")) == Applied()
    assert (told.job.processes, told[second].processes) == (5, 5)
    assert told[second].reason == "a test: from 4 to 5 processes: 1 more on h3"


# ---- hosts that are lost, moved from, drained ------------------------------------------------------------------------


def test_others_carry_the_ranks_of_a_lost_host_in_the_same_entry() -> None:
    told = Elastic()
    told.grow(h3=4)
    assert told.lose(H2) == Applied(told.id)
    assert set(told.names) == {H1, H3} and told.job.processes == 6
    assert (told.job.state, told.job.healing.missing, told.job.healing.wanted) == ("running", (), 0)
    assert H2 not in told.queue.holders and not told.job.awaits(H2)
    assert told.job.reason == "gone; from 8 to 6 processes: 2 less on h2"


def test_a_host_that_began_anew_before_it_was_missed_costs_no_restart() -> None:
    told = Elastic()
    told.grow(h3=4)
    since = told.job.place_on(H2).since
    codes = dict.fromkeys(told.job.place_on(H2).ranks, 255)
    lost = RanksReported(wall_s=1.0, job=told.id, epoch=1, host=H2, codes=codes, reason="restarted", lost=True)
    assert isinstance(told.say(msgspec.structs.replace(lost, since=since)), Applied)
    assert (told.job.state, told.job.processes, set(told.names)) == ("running", 6, {H1, H3})
    assert told.job.reason == "h2 lost its processes: restarted; from 8 to 6 processes: 2 less on h2"
    assert isinstance(told.say(msgspec.structs.replace(lost, since=since)), NotApplied), "it is not there any more"
    told.say(msgspec.structs.replace(lost, host=H3, since=told.job.place_on(H3).since, asked=True))
    assert told.job.state == "running" and set(told.names) == {H1}, (
        "its supervisor had asked what was left of them to end"
    )


def test_nobody_ends_the_only_process_that_has_the_state() -> None:
    """The others were started again a moment ago."""
    told = Elastic()
    told.grow(h3=2)
    last = told.names[H3][-1]
    for host, have in ((H1, ()), (H2, ()), (H3, (last,))):
        since = told.job.place_on(host).since
        told.say(Attained(wall_s=1.0, host=host, service_gpu_s={}, heals={told.id: JobHeals(1, since, True, have)}))
    for workers in (5, 4):  # it ends, with its host or without
        said = refusal(told.scale(workers))
        assert said.code == 75 and said.why.startswith("the processes that would be left have not received the state")
    assert told.job.processes == 6
    have = told.job.place_on(H1).ranks
    told.say(Attained(wall_s=1.0, host=H1, service_gpu_s={}, heals={told.id: JobHeals(1, 0, True, have[:1])}))
    assert told.scale(4) == Applied(told.id)


def test_who_has_the_state_is_said_by_the_host_where_it_runs_alone() -> None:
    """What a host said before a process ended there may come late, when another host has one of that name."""
    told = Elastic()
    assert told.say(told.grown(h3=2)) == Applied()
    late = {told.id: JobHeals(1, told.job.place_on(H1).since, True, (*told.names[H1], *told.names[H3]))}
    told.say(Attained(wall_s=1.0, host=H1, service_gpu_s={}, heals=late))
    assert told.job.healing.have[H1] == told.names[H1]
    assert told.job.heals_without((H2,)) and not told.job.heals_without((H1, H2)), "none on h3 has it yet"


def test_processes_that_were_there_have_the_state_while_others_come() -> None:
    """A host is lost before any of the new ones has it."""
    told = Elastic()
    told.scale(8)
    assert told.say(told.grown(h1=2, h2=2)) == Applied()
    assert told.job.healing.may_be_lost == ()
    assert told.lose(H1) == Applied(told.id)
    assert (told.job.state, told.job.processes) == ("running", 4)


def test_a_job_with_fewer_processes_than_its_gang_wants_to_grow_back() -> None:
    told = Elastic()
    told.lose(H2)
    assert (told.job.processes, told.job.healing.wanted, told.job.grant.coordinator) == (2, 4, H1)
    assert "h1 looks for 2 more" in told.job.reason and told.queue.used("alice") == 4
    told.grow(h3=2)
    assert (told.job.processes, told.job.seeks, told.job.state) == (4, False, "running")
    assert told.job.reason == "h2 was lost: from 2 to 4 processes: 2 more on h3"


def test_process_0_may_be_lost_like_any_other() -> None:
    told = Elastic()
    told.lose(H1)
    assert set(told.names) == {H2} and told.job.carriers([0]) == [2] and told.job.carriers([0, 15]) == [2, 3]
    assert 0 not in ending(told.job.start.places, told.job.carriers([0]), 1) and told.scale(4) == Applied(told.id)


def test_what_was_proposed_before_a_loss_is_refused_after_it() -> None:
    told = Elastic()
    told.grow(h3=2)
    told.scale(8)
    grown = told.grown(h4=2)
    sought = told.job.healing.sought
    told.lose(H2)
    assert "its configuration is" in refusal(told.say(grown)).why
    assert told.job.healing.wanted == 8 and told.job.healing.sought > sought


def test_a_job_that_loses_hosts_again_and_again_without_a_step_stops() -> None:
    told = Elastic()
    for number in range(6):
        told.grow(**{f"x{number}": 1})
        told.lose(HostId(f"x{number}"))
    assert told.job.state == "stopping" and "it lost 6 hosts without finishing a step" in told.job.reason


def test_a_job_whose_state_is_not_registered_starts_again_when_it_loses_a_host() -> None:
    told = Told()
    id = told.run(4, workers_max=16)
    told.say(PlacesLost(wall_s=1.0, job=id, epoch=1, hosts=(H2,), coordinator=H1, reason="gone"))
    assert told[id].state == "stopping" and "have not registered their state" in told[id].reason


def test_a_move_exchanges_a_host_and_every_process_keeps_what_it_carries() -> None:
    told = Elastic()
    carried = told.job.start.carried
    told.say(MoveAsked(wall_s=1.0, job=told.id, epoch=1, host=H2, to=H3, coordinator=H1))
    places = {H2: Place(H3, (2, 3), ("x", "y"), 1)}
    assert told.say(Replaced(wall_s=1.0, job=told.id, epoch=1, places=places)) == Applied(told.id)
    assert told.names == {H1: (0, 1), H3: (2, 3)} and told.job.start.carried == carried


def test_a_move_to_processes_of_the_job_leaves_these_as_they_were() -> None:
    """They may still begin, as processes of an earlier configuration, and others answer them."""
    told = Elastic()
    told.say(told.grown(h3=2))
    came = dict(told.job.start.came)
    told.say(MoveAsked(wall_s=1.0, job=told.id, epoch=1, host=H2, to=H3, coordinator=H1))
    there = told.job.place_on(H3)
    assert there is not None
    places = {H2: Place(H3, (*there.ranks, 2, 3), (*there.gpus, "x", "y"), 2)}
    assert told.say(Replaced(wall_s=1.0, job=told.id, epoch=1, places=places)) == Applied(told.id)
    moved = told.job.carried_by((2, 3))
    assert told.job.start.came == {**came, **dict.fromkeys(moved, 2)}


def test_who_moves_has_no_state_until_its_new_host_says_so() -> None:
    told = Elastic()
    told.grow(h3=2)
    told.say(MoveAsked(wall_s=1.0, job=told.id, epoch=1, host=H2, to=H4, coordinator=H1))
    places = {H2: Place(H4, (2, 3), ("x", "y"), 2)}
    assert told.say(Replaced(wall_s=1.0, job=told.id, epoch=1, places=places)) == Applied(told.id)
    assert told.job.heals_without((H1,)) and not told.job.heals_without((H1, H3)), "none on h4 has it yet"
    told.heal(H4)
    assert told.job.heals_without((H1, H3))


def test_a_drained_host_is_left_without_another_one_if_enough_processes_are_left() -> None:
    told = Elastic()
    told.grow(h3=2)
    told.say(HostDrained(wall_s=1.0, host=H3, by="ann"))
    for processes in (4, 4):
        for host in told.names:
            if host != H1:
                told.say(MoveAsked(wall_s=1.0, job=told.id, epoch=1, host=host, to=None, coordinator=H1))
                told.say(PlaceFailed(wall_s=1.0, job=told.id, epoch=1, reason="no other host has room"))
        assert told.job.processes == processes and set(told.names) == {H1, H2}, "h2 is not drained, and not left"
        assert not told.job.seeks
    told.say(HostDrained(wall_s=1.0, host=H2, by="ann"))
    told.say(MoveAsked(wall_s=1.0, job=told.id, epoch=1, host=H2, to=None, coordinator=H1))
    told.say(PlaceFailed(wall_s=1.0, job=told.id, epoch=1, reason="no other host has room"))
    assert told.names.keys() == {H1, H2}, "no more than its gang is given up for a drain"


def test_running_time_is_counted_by_the_rack_and_not_by_the_width() -> None:
    told = Elastic(time_limit_s=100.0)
    told.queue.rack_s = 60.0
    assert told.job.ran_s(60.0) == 60.0
    told.say(Attained(wall_s=1.0, host=H1, service_gpu_s={told.id: 16 * 60.0}))
    assert told.job.ran_s(60.0) == 60.0, "16 GPUs for a minute are a minute"


# ---- any order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_each_rank_is_carried_once_and_stale_words_are_refused(seed: int) -> None:
    draw = random.Random(seed)
    told = Elastic(gpus_per_worker=1)
    hosts, stale = [HostId(f"h{number}") for number in range(1, 7)], list[Command]()
    told.say(HostDrained(wall_s=1.0, host=HostId("h6"), drained=False))
    for _ in range(60):
        job = told.job
        if job.state != "running":
            break
        before = job.healing.healed
        match draw.randrange(6):
            case 0:
                told.scale(draw.randint(3, 17))
            case 1 | 2:
                free = [host for host in hosts if job.left_on(host) is None]
                more = {host: draw.randint(1, 3) for host in draw.sample(free, draw.randint(1, min(2, len(free))))}
                if job.processes + sum(more.values()) <= 16:
                    command = told.grown(**more)
                    stale.append(command)
                    if draw.random() < 0.7:
                        result = told.say(command)
                        assert result == Applied() or job.healing.healed == before
            case 3:
                lost = draw.choice(hosts)
                told.lose(lost)
            case 4 if stale:
                again = told.say(draw.choice(stale))
                assert isinstance(again, NotApplied) or job.healing.healed in (before, before + 1)
            case _:
                for place in list(job.healing.leaving):
                    told.left(place.host)
                told.heal(*draw.sample(hosts, 4))
        if draw.random() < 0.3:
            job.start.step = (job.start.step or 0) + 1
        check(told)


def check(told: Elastic) -> None:
    """Each rank is carried once, by a process that has GPUs of its own which the log knows as the job's."""
    job = told.job
    if job.state != "running":
        return
    carried = sorted(rank for ranks in job.start.carried.values() for rank in ranks)
    assert carried == list(range(16))
    gpus = [(place.host, gpu) for place in (*job.start.places, *job.healing.leaving) for gpu in place.gpus]
    held = [(host, gpu) for host, held in told.queue.holders.items() for gpu in held]
    assert sorted(gpus) == sorted(held) and len(set(gpus)) == len(gpus)
    assert sum(len(place.gpus) for place in job.start.places) == job.processes
    assert told.queue.used("alice") == 4


def test_one_who_reports_processes_of_before_is_not_heard() -> None:
    told = Elastic()
    told.grow(h2=1)
    said: dict[str, Any] = {"job": told.id, "epoch": 1, "host": H2, "since": 0}
    assert isinstance(told.say(RanksReported(wall_s=1.0, codes={2: 0, 3: 0}, **said)), NotApplied)
    assert JobId("j1") == told.id and told.job.state == "running"
