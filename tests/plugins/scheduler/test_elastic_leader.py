"""What the leader does with elastic jobs: they give extras back before any job stops, and grow into idle GPUs."""

from collections.abc import Sequence
from typing import Any

import msgspec

from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.leader.defragmenting import Defragmenting
from plugins.scheduler.machine.leader.elastic import REST_S, freed, to_shrink
from plugins.scheduler.machine.leader.leader import RackHost, ScheduleTick
from plugins.scheduler.messages.commands import (
    Applied,
    Arranged,
    Arrangement,
    Attained,
    CancelAsked,
    Command,
    GpusKept,
    Granted,
    JobHeals,
    NotApplied,
    PlaceFailed,
    PlacesLost,
    Promoted,
    QuotaSet,
    RanksReported,
    ScaleAsked,
    Submitted,
    TakenBack,
)
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy.carrying import carried_after
from tests.plugins.scheduler.little import Little

H1, H2, H3 = HostId("h1"), HostId("h2"), HostId("h3")


class Stretching(Little):
    """A little rack with elastic jobs, whose leader decides alone."""

    stamps = False

    def proposed(self, look: ScheduleTick) -> list[Command]:
        proposed = [action.command for action in self.leader.handle(look, self.now_s)]
        self.leader.check()
        return proposed

    def elastic(self, fewest: int, most: int, now: int = 0, kind: str = "guaranteed", tenant: str = "ann") -> JobId:
        """An elastic job that runs, with `now` processes, and has registered its state."""
        spec = JobSpec.parse({"argv": ["x"], "workers": fewest, "workers_max": most, "tenant": tenant, "class": kind})
        said = self.say(Submitted(wall_s=1.0, key=f"key{self.queue.index:06}", spec=spec))
        assert isinstance(said, Applied) and said.job is not None
        self.settle()
        assert self.state(said.job) == "running"
        self.heal(said.job)
        if now > fewest:
            self.grow(said.job, now)
        return said.job

    def heal(self, id: JobId) -> None:
        job = self.queue.jobs[id]
        for place in job.start.places:
            said = {id: JobHeals(job.grant.epoch, place.since, True, place.ranks)}
            self.say(Attained(wall_s=1.0, host=place.host, service_gpu_s={}, heals=said))

    def grow(self, id: JobId, workers: int) -> None:
        """Let the job grow as its coordinator would: onto the first free GPUs."""
        job = self.queue.jobs[id]
        names = sorted(carried_after(job.start.carried, (), workers - job.processes).keys() - job.start.carried.keys())
        places, since = {place.host: place for place in job.start.places}, job.healing.healed + 1
        for host in self.totals:
            gpus = self.free(host)[: len(names)]
            new, names = tuple(names[: len(gpus)]), names[len(gpus) :]
            old = places.get(host, Place(host, (), ()))
            if new:
                places[host] = Place(host, (*old.ranks, *new), (*old.gpus, *gpus), since)
        arrangement = Arrangement(job.grant.epoch, since - 1, tuple(places.values()))
        assert self.say(Arranged(wall_s=1.0, jobs={id: arrangement}, by="a test")) == Applied()
        self.heal(id)

    def left(self, id: JobId) -> None:
        job = self.queue.jobs[id]
        for place in job.healing.leaving:
            said: dict[str, Any] = {"host": place.host, "since": place.since, "asked": True}
            codes = dict.fromkeys(place.ranks, -9)
            self.say(RanksReported(wall_s=1.0, job=id, epoch=job.grant.epoch, codes=codes, **said))

    def processes(self, id: JobId) -> int:
        return self.queue.jobs[id].processes


def of(commands: Sequence[Command], *kinds: type) -> list[Any]:
    return [command for command in commands if isinstance(command, kinds)]


# ---- giving back -----------------------------------------------------------------------------------------------------


def test_extras_end_for_a_guaranteed_job_that_waits_and_no_job_stops() -> None:
    rack = Stretching([4, 4], {})
    id = rack.elastic(2, 8, now=8)
    waits = rack.submit(3, "bob")
    said = rack.look()
    (asked,) = of(said, ScaleAsked)
    assert (asked.job, asked.workers, asked.by) == (id, 5, "the leader")
    assert asked.why == f"{waits} (tenant bob, 3 GPUs) is guaranteed and waits for GPUs"
    assert not of(said, TakenBack) and rack.processes(id) == 5
    rack.left(id)
    said = rack.settle()
    assert rack.state(waits) == "running" and not of(said, TakenBack, ScaleAsked) and rack.processes(id) == 5


def test_a_person_who_was_faster_than_the_leader_keeps_what_was_asked_for() -> None:
    rack = Stretching([4, 4], {})
    id = rack.elastic(2, 8, now=8)
    rack.submit(2, "bob")
    tick = ScheduleTick(tuple(RackHost(host, gpus) for host, gpus in rack.totals.items()), 1.0)
    (late,) = of(rack.proposed(tick), ScaleAsked)
    assert late.workers == 6
    rack.say(ScaleAsked(wall_s=1.0, job=id, epoch=1, workers=5, coordinator=H1, by="ann"))
    rack.left(id)
    assert isinstance(rack.say(late), NotApplied)
    assert (rack.processes(id), rack.queue.jobs[id].healing.wanted) == (5, 0)


def test_while_processes_end_no_more_are_given_back_and_no_other_gets_their_gpus() -> None:
    rack = Stretching([2, 2, 2, 2], {})
    id = rack.elastic(2, 8, now=8)
    waits = rack.submit(2, "bob")
    assert of(rack.look(), ScaleAsked) and rack.queue.jobs[id].healing.leaving, "a whole host ends"
    other = rack.submit(1, "carl", "opportunistic")
    for _ in range(3):
        assert not of(rack.look(), ScaleAsked, TakenBack, Granted)
    rack.left(id)
    rack.settle()
    assert (rack.state(waits), rack.state(other), rack.processes(id)) == ("running", "queued", 6)


def test_extras_are_given_back_by_opportunistic_jobs_first_then_by_the_newest() -> None:
    rack = Stretching([4, 4], {})
    old, new = rack.elastic(1, 8, now=3), rack.elastic(1, 8, now=3, tenant="bob")
    guest = rack.elastic(1, 8, now=2, kind="opportunistic")
    jobs = [rack.queue.jobs[id] for id in (old, new, guest)]

    def needs(gpus: int) -> list[tuple[JobId, int]] | None:
        found = to_shrink(jobs, {}, lambda free: sum(free.values()) >= gpus)
        return None if found is None else [(job.id, count) for job, count in found]

    assert needs(0) == []
    assert needs(1) == [(guest, 1)] and needs(2) == [(guest, 1), (new, 1)]
    assert needs(4) == [(guest, 1), (new, 2), (old, 1)] and needs(5) == [(guest, 1), (new, 2), (old, 2)]
    assert needs(6) is None


def test_what_does_not_help_is_not_given_back() -> None:
    rack = Stretching([4, 4], {})
    wide, small = rack.elastic(3, 8, now=6), rack.elastic(1, 8, now=2)
    jobs = [rack.queue.jobs[id] for id in (wide, small)]
    assert (freed(jobs[0], 3), freed(jobs[1], 1)) == ({H1: 1, H2: 2}, {H2: 1})
    assert to_shrink(jobs, {}, lambda free: free.get(H1, 0) >= 1) == [(jobs[0], 3)], "the newest has nothing there"


def test_a_job_that_would_not_fit_with_all_extras_stops_others_as_before() -> None:
    rack = Stretching([4, 4], {})
    id = rack.elastic(2, 8, now=4)
    guest = rack.submit(4, "bob", "opportunistic")
    rack.settle()
    too_wide, waits = rack.submit(7, "bob"), rack.submit(6, "bob")
    for _ in range(4):
        said = rack.look()
        assert not (of(said, ScaleAsked) and of(said, TakenBack)), "first these, and then what still has to stop"
        rack.left(id)
    assert (rack.processes(id), rack.state(guest)) == (2, "stopping")
    rack.settle()
    assert (rack.state(too_wide), rack.state(waits)) == ("queued", "running")


def test_fewer_opportunistic_jobs_stop_where_extras_are_given_back() -> None:
    rack = Stretching([4, 4], {})
    id = rack.elastic(2, 8, now=4)
    guests = [rack.submit(2, "bob", "opportunistic") for _ in range(2)]
    rack.settle()
    waits = rack.submit(4, "bob")
    assert of(rack.look(), ScaleAsked) and rack.processes(id) == 2
    rack.left(id)
    rack.settle()
    assert rack.state(waits) == "running" and sorted(map(rack.state, guests)) == ["queued", "running"]


def test_an_elastic_job_whose_state_is_not_registered_gives_nothing_back() -> None:
    rack = Stretching([4, 4], {})
    id = rack.elastic(2, 8, now=8)
    job = rack.queue.jobs[id]
    for place in job.start.places:
        said = {id: JobHeals(job.grant.epoch, place.since, False)}
        rack.say(Attained(wall_s=1.0, host=place.host, service_gpu_s={}, heals=said))
    rack.submit(2, "bob")
    assert not of(rack.look(), ScaleAsked) and rack.processes(id) == 8


def test_nothing_is_given_back_while_a_host_of_the_job_is_away() -> None:
    rack = Stretching([4, 4, 4], {})
    id = rack.elastic(2, 12, now=12)
    rack.submit(2, "bob")
    away = rack.totals.pop(H2)
    assert not of(rack.look(), ScaleAsked) and rack.processes(id) == 12
    rack.totals[H2] = away
    assert of(rack.look(), ScaleAsked)


def test_extras_are_not_given_back_for_opportunistic_jobs_or_beyond_a_quota() -> None:
    rack = Stretching([4, 4], {"bob": 1})
    id = rack.elastic(2, 8, now=8)
    rack.submit(2, "carl", "opportunistic")
    running = rack.try_submit(2, "bob", "auto")
    assert running is not None and not of(rack.look(), ScaleAsked) and rack.processes(id) == 8


# ---- growing ---------------------------------------------------------------------------------------------------------


def test_a_job_grows_into_gpus_that_were_free_for_a_while() -> None:
    rack = Stretching([4, 4], {}, elastic_grow_after_s=20.0)
    id = rack.elastic(2, 6)
    assert not of(rack.look(10.0), ScaleAsked)
    (asked,) = of([*rack.look(11.0), *rack.look(5.0)], ScaleAsked)
    assert (asked.job, asked.workers) == (id, 6), "no further than its range"
    assert asked.why == "GPUs have been free for 20 s, and no job waits for them"
    assert rack.queue.jobs[id].healing.wanted == 6
    assert not of(rack.look(), ScaleAsked), "once"
    rack.grow(id, 6)
    assert not of([*rack.look(REST_S), *rack.look(60.0)], ScaleAsked), "it has all that it may have"


def test_it_does_not_grow_where_that_is_off() -> None:
    rack = Stretching([4, 4], {}, elastic_grow_after_s=0.0)
    rack.elastic(2, 6)
    assert not of([*rack.look(100.0), *rack.look(100.0)], ScaleAsked)


def test_it_grows_by_itself_no_further_than_a_person_wanted() -> None:
    rack = Stretching([4, 4], {}, elastic_grow_after_s=5.0)
    id = rack.elastic(2, 8, now=6)
    rack.say(ScaleAsked(wall_s=1.0, job=id, epoch=1, workers=4, coordinator=H1, by="ann", why=""))
    rack.left(id)
    assert not of([*rack.look(REST_S), *rack.look(60.0)], ScaleAsked) and rack.processes(id) == 4
    rack.say(ScaleAsked(wall_s=1.0, job=id, epoch=1, workers=5, coordinator=H1, by="ann", why=""))
    rack.say(PlaceFailed(wall_s=1.0, job=id, epoch=1, reason="no room"))
    assert [asked.workers for asked in of([*rack.look(REST_S), *rack.look(60.0)], ScaleAsked)] == [5]


def test_it_does_not_grow_while_a_job_waits_that_could_use_the_gpus() -> None:
    rack = Stretching([4, 4], {"bob": 1}, elastic_grow_after_s=5.0, preemption=False)
    id = rack.elastic(2, 8)
    waits = rack.submit(7, "carl")
    for _ in range(4):
        assert not of(rack.look(6.0), ScaleAsked)
    rack.say(CancelAsked(wall_s=1.0, job=waits))
    rack.say(QuotaSet(wall_s=1.0, tenant="bob", gpus=0))
    over = rack.queue.jobs[waits].spec
    over = msgspec.structs.replace(over, tenant="bob", workers=1, job_class="auto")
    rack.say(Submitted(wall_s=1.0, key="over-quota", spec=over, may_demote=True))
    said = [command for _ in range(4) for command in rack.look(3.0)]
    assert [asked.job for asked in of(said, ScaleAsked)] == [id], "a job that waits for its quota has no use for them"


def test_one_job_grows_at_a_time_and_each_rests_after_it_asked() -> None:
    rack = Stretching([8, 8], {}, elastic_grow_after_s=5.0)
    ids = [rack.elastic(1, 4), rack.elastic(1, 4, tenant="bob")]
    said = [command for _ in range(4) for command in rack.look(3.0)]
    assert [asked.job for asked in of(said, ScaleAsked)] == ids
    for id in ids:
        rack.say(PlaceFailed(wall_s=1.0, job=id, epoch=1, reason="no"))
    assert not of([*rack.look(5.0), *rack.look(REST_S - 15.0)], ScaleAsked)
    assert [asked.job for asked in of(rack.look(6.0), ScaleAsked)] == ids[:1]


def test_who_gave_back_does_not_grow_at_once() -> None:
    rack = Stretching([4, 4], {}, elastic_grow_after_s=1.0)
    id = rack.elastic(2, 8, now=8)
    waits = rack.submit(4, "bob")
    rack.look()
    rack.left(id)
    rack.settle()
    rack.end(rack.queue.jobs[waits])
    assert not of([rack.look(2.0), rack.look(REST_S - 15.0)][1], ScaleAsked)
    assert of([*rack.look(20.0), *rack.look(5.0)], ScaleAsked)


def test_a_job_with_fewer_processes_than_its_gang_grows_back_whatever_was_set() -> None:
    rack = Stretching([2, 2, 2], {})
    id = rack.elastic(4, 8)
    job = rack.queue.jobs[id]
    lost = job.start.places[1].host
    said: dict[str, Any] = {"job": id, "epoch": 1, "hosts": (lost,), "coordinator": H1, "reason": "gone"}
    rack.say(PlacesLost(wall_s=1.0, **said))
    rack.say(PlaceFailed(wall_s=1.0, job=id, epoch=1, reason="no room"))
    assert (job.processes, job.healing.wanted) == (2, 0)
    (asked,) = of(rack.look(), ScaleAsked)
    assert (asked.workers, asked.why) == (4, "it has 2 of the 4 processes of its gang")
    rack.say(PlaceFailed(wall_s=1.0, job=id, epoch=1, reason="no room"))
    assert not of(rack.look(5.0), ScaleAsked) and of(rack.look(REST_S), ScaleAsked)


def test_who_waits_for_extras_keeps_what_is_free_where_it_is_to_run() -> None:
    rack = Stretching([4, 4], {})
    rack.elastic(2, 8, now=6)
    waits = rack.submit(5, "bob")
    (kept,) = of(rack.look(), GpusKept)
    assert (kept.job, kept.gpus) == (waits, {H2: 2})


# ---- the time that it ran --------------------------------------------------------------------------------------------


def served(rack: Stretching, id: JobId, seconds: float, processes: int) -> None:
    """Let the job run for so long with so many processes, each on a GPU."""
    job = rack.queue.jobs[id]
    done = {id: job.attained_gpu_s + seconds * processes}
    host, now_s = job.start.places[0].host, rack.queue.rack_s + seconds
    rack.say(Attained(wall_s=1.0, rack_s=now_s, host=host, service_gpu_s=done))


def stopped(rack: Stretching, id: JobId) -> None:
    job = rack.queue.jobs[id]
    rack.say(TakenBack(wall_s=1.0, job=id, epoch=job.grant.epoch, cause="preempted", reason="a test"))
    for place in job.awaited:
        said: dict[str, Any] = {"host": place.host, "since": place.since, "asked": True}
        codes = dict.fromkeys(place.ranks, -9)
        rack.say(RanksReported(wall_s=1.0, job=id, epoch=job.grant.epoch, codes=codes, **said))
    assert rack.state(id) == "queued"


def test_a_job_that_had_many_gpus_did_not_run_for_longer() -> None:
    """The knob promotes what waited twice as long as it ran: 100 s on 8 GPUs are no 400 s, though its width is 2."""
    rack = Stretching([8], {}, promote_knob=2.0, starve_limit_s=None)
    id = rack.elastic(2, 8, now=8)
    served(rack, id, 100.0, 8)
    assert (rack.queue.jobs[id].attained_gpu_s, rack.queue.jobs[id].ran_s(100.0)) == (800.0, 100.0)
    for time in ("first", "second"):
        stopped(rack, id)
        other = rack.submit(8, "bob")
        rack.settle()
        assert (rack.state(other), rack.state(id)) == ("running", "queued"), time
        assert not of(rack.look(190.0), Promoted), time
        assert [each.job for each in of(rack.look(20.0), Promoted)] == [id], time
        assert rack.queue.jobs[id].priority.base_ran_s == rack.queue.jobs[id].ran_s(rack.queue.rack_s)
        rack.end(rack.queue.jobs[other])
        rack.settle()
        rack.heal(id)
        rack.grow(id, 8)
        served(rack, id, 100.0, 8)


def test_a_spread_job_moves_together_for_what_it_ran_and_what_it_holds() -> None:
    rack = Stretching([4, 4], {})
    id = rack.elastic(2, 8, now=6)
    job = rack.queue.jobs[id]
    assert [len(place.gpus) for place in job.start.places] == [4, 2] and (job.width, job.spec.width) == (6, 2)
    served(rack, id, 400.0, 6)

    def merges(loss: float) -> bool:
        moves = Defragmenting(rack.queue)
        moves.begin(0.0, {}, True)
        return moves.merge(job, loss, {H1: 4, H2: 0}, rack.totals, 1.0) is not None

    assert merges(0.01), "it loses 4 s of 400, and stands still for 3"
    assert not merges(0.005), "it ran 400 s, not 1200"


def test_the_width_of_a_job_is_what_it_holds() -> None:
    rack = Stretching([4, 4], {})
    id = rack.elastic(2, 8, now=6)
    job = rack.queue.jobs[id]
    assert (job.width, job.extras) == (6, 4)
    stopped(rack, id)
    assert (job.width, job.extras) == (2, 0), "what it starts with"
    plain = rack.queue.jobs[rack.submit(3, "bob")]
    rack.settle()
    assert (plain.width, plain.extras) == (plain.spec.width, 0) == (3, 0)
