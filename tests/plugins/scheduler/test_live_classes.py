"""Classes on the replicated queue and its leader: stories, and what holds in every order of events."""

from typing import Any

import msgspec
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from covey.core.ids import HostId
from plugins.scheduler.machine.leader.capacity import fits_whole
from plugins.scheduler.machine.leader.leader import Leader
from plugins.scheduler.messages.commands import (
    Applied,
    CancelAsked,
    Command,
    Demoted,
    GpusKept,
    Granted,
    NotApplied,
    Promoted,
    QuotaSet,
    TakenBack,
    Upgraded,
)
from tests.families import examples
from tests.plugins.scheduler.little import Little, replay

H1, H2 = HostId("h1"), HostId("h2")


def kinds(commands: Any) -> list[tuple[str, str]]:
    return [(type(command).__name__, getattr(command, "job", "")) for command in commands]


def test_an_auto_job_is_demoted_runs_on_idle_gpus_of_others_yields_and_is_upgraded() -> None:
    """Reference: AntMan §3.3."""
    rack = Little([4, 4], {"red": 4, "blue": 4}, demote_after_s=60.0)
    own = rack.submit(4, "red")
    rack.settle()
    late = rack.submit(2, "red", "auto")
    rack.look(0.0)
    rack.look(30.0)
    assert rack.queue.jobs[late].state == "queued" and rack.queue.jobs[late].counts
    assert kinds(rack.look(31.0)) == [("Demoted", late)]
    rack.settle()
    job = rack.queue.jobs[late]
    assert (job.state, job.job_class, rack.queue.used("red")) == ("running", "opportunistic", 4)
    first = rack.submit(4, "blue")
    assert ("TakenBack", late) in kinds(rack.settle()), "blue's quota is a promise"
    assert (rack.state(first), rack.state(late), job.tally.preemptions) == ("running", "queued", 1)
    rack.end(rack.queue.jobs[first])
    rack.settle()
    assert (rack.state(late), job.job_class) == ("running", "opportunistic"), "red's quota is in use"
    rack.end(rack.queue.jobs[own])
    said = rack.settle()
    assert kinds(said)[0] == ("Upgraded", late)
    assert (job.job_class, rack.queue.used("red")) == ("guaranteed", 2)


def test_an_upgrade_comes_before_any_start_and_declared_opportunistic_jobs_stay_so() -> None:
    """Reference: AntMan §3.3: "prefers to upgrade the opportunistic job rather than launch a new one"."""
    rack = Little([4], {"red": 2, "blue": 2}, demote_after_s=10.0)
    first = rack.submit(2, "red")
    rack.settle()
    late, plain = rack.submit(1, "red", "auto"), rack.submit(1, "red", "opportunistic")
    rack.look()
    rack.look(20.0)
    rack.settle()
    assert len(rack.jobs("running")) == 3
    waiting = rack.submit(2, "red")
    rack.settle()
    assert rack.queue.jobs[waiting].state == "queued"
    rack.end(rack.queue.jobs[first])
    assert kinds(rack.look()) == [("Upgraded", late)]
    rack.settle()
    assert rack.queue.jobs[plain].job_class == "opportunistic"
    assert rack.queue.used("red") == 1


def test_a_gang_that_does_not_fit_keeps_what_there_is_and_starts_when_it_is_whole() -> None:
    """Reference: AntMan §3.3: reserved GPUs are closed to other guaranteed jobs and open to opportunistic ones."""
    rack = Little([2, 2], {"red": 2, "blue": 2})
    ones = [rack.submit(1, tenant) for tenant in ("red", "blue", "red", "blue")]
    rack.look()
    for job, gpu in zip(rack.jobs("placing"), ("h1.0", "h1.1", "h2.0", "h2.1"), strict=True):
        rack.place(job, {HostId(gpu[:2]): [gpu]})
    for number in (0, 2):  # one GPU is left on each host
        rack.end(rack.queue.jobs[ones[number]])
    gang = rack.submit(1, "red", each=2)
    assert kinds(rack.settle()) == [("GpusKept", gang)]
    assert rack.queue.kept == {H1: 1}
    rack.restore()
    rack.say(QuotaSet(wall_s=1.0, tenant="green", gpus=2))
    other, guest = rack.submit(2, "green"), rack.submit(1, "green", "opportunistic")
    rack.settle()
    assert rack.queue.jobs[other].state == "queued", "one of the two GPUs is kept"
    assert rack.queue.jobs[guest].state == "running"
    rack.end(rack.queue.jobs[ones[1]])
    rack.settle()
    assert rack.queue.jobs[gang].state == "running" and rack.queue.keeper != gang


def test_nothing_is_kept_that_a_gang_being_placed_is_about_to_take() -> None:
    rack = Little([2, 2, 2], {"red": 4, "blue": 2})
    for host in ("h1", "h2", "h3"):
        rack.submit(1, "red")
        rack.look()
        rack.place(rack.jobs("placing")[0], {HostId(host): [f"{host}.0"]})
    first = rack.submit(1, "red")
    assert kinds(rack.look()) == [("Granted", first)]
    wide = rack.submit(1, "blue", each=2)
    assert kinds(rack.look()) == [("GpusKept", wide)]
    assert rack.queue.kept == {H2: 1}, "the coordinator of the first will take the GPU of h1"
    rack.place(rack.queue.jobs[first], {H1: ["h1.1"]})
    assert rack.settle() == [], "what is kept is there"


def test_nobody_is_stopped_for_gpus_that_a_gang_being_placed_is_about_to_take() -> None:
    rack = Little([2, 2], {"red": 2, "blue": 2})
    guest = rack.submit(1, "green", "opportunistic", each=2)
    rack.look()
    rack.place(rack.queue.jobs[guest], {H1: ["h1.0", "h1.1"]})
    first = rack.submit(1, "red", each=2)
    assert kinds(rack.look()) == [("Granted", first)]
    second = rack.submit(1, "blue", each=2)
    assert kinds(rack.look()) == [("TakenBack", guest), ("GpusKept", second)]
    assert rack.queue.kept == {H1: 2}, "h2 is where the coordinator of the first will put it"


def test_two_gangs_never_hold_half_each() -> None:
    rack = Little([2, 2], {"red": 2, "blue": 2})
    ones = [rack.submit(1, tenant) for tenant in ("red", "blue", "red", "blue")]
    rack.look()
    for job, gpu in zip(rack.jobs("placing"), ("h1.0", "h1.1", "h2.0", "h2.1"), strict=True):
        rack.place(job, {HostId(gpu[:2]): [gpu]})
    rack.end(rack.queue.jobs[ones[0]])
    rack.end(rack.queue.jobs[ones[2]])
    first = rack.submit(1, "red", each=2)
    rack.settle()
    rack.end(rack.queue.jobs[ones[1]])
    second = rack.submit(1, "blue", each=2)
    rack.settle()
    rack.end(rack.queue.jobs[ones[3]])
    rack.settle()
    assert {job.id for job in rack.jobs("running")} == {first, second}


def test_what_is_kept_goes_back_when_the_job_is_cancelled_demoted_or_passed() -> None:
    rack = Little([2, 2], {"red": 2, "blue": 2}, demote_after_s=100.0)
    rack.submit(1, "blue")
    rack.submit(1, "blue")
    rack.look()
    for job, gpu in zip(rack.jobs("placing"), ("h1.0", "h2.0"), strict=True):
        rack.place(job, {HostId(gpu[:2]): [gpu]})
    gang = rack.submit(1, "red", "auto", each=2)
    rack.settle()
    assert rack.queue.keeper == gang
    assert kinds(rack.look(200.0))[0] == ("Demoted", gang) and rack.queue.keeper is None
    gang = rack.submit(1, "red", each=2)
    rack.settle()
    assert rack.queue.keeper == gang
    rack.say(QuotaSet(wall_s=1.0, tenant="red", gpus=1))
    assert ("GpusKept", gang) in kinds(rack.look()) and rack.queue.keeper is None, "it is over its quota now"
    rack.say(QuotaSet(wall_s=1.0, tenant="red", gpus=2))
    rack.settle()
    assert rack.queue.keeper == gang
    second = rack.submit(1, "red", each=2)
    asks = GpusKept(wall_s=1.0, job=second, epoch=0, gpus={H2: 1})
    assert isinstance(rack.say(asks), NotApplied), "one gang at a time"
    rack.say(CancelAsked(wall_s=1.0, job=gang))
    assert rack.queue.keeper is None and isinstance(rack.say(asks), Applied)


def test_a_jobs_wait_outlives_the_leader_and_counts_only_while_somebody_waits() -> None:
    rack = Little([1], {"red": 1}, demote_after_s=100.0)
    rack.submit(1, "red")
    rack.settle()
    rack.look(5000.0)
    assert rack.queue.clock_s < 20.0, "nobody waited"
    late = rack.submit(1, "red", "auto")
    for _ in range(6):
        rack.look(11.0)
    rack.leader = Leader(rack.queue, rack.settings)
    assert rack.look(0.0) == []
    assert kinds(rack.look(25.0)) == []
    assert kinds(rack.look(25.0)) == [("Demoted", late)], "66 s before, 50 s after, all but the last seconds known"


def test_the_knob_promotes_on_the_rack_what_waited_so_many_times_as_long_as_it_ran() -> None:
    """Reference: Tiresias §3.3, PROMOTEKNOB."""
    rack = Little([2], {}, promote_knob=2.0, starve_limit_s=None)
    long = rack.submit(2, "red")
    rack.settle()
    rack.serve(rack.queue.jobs[long], 200.0)
    rack.submit(2, "blue")
    rack.settle()
    assert rack.queue.jobs[long].state == "queued"
    assert rack.look(190.0) == []
    said = rack.look(20.0)
    assert kinds(said) == [("Promoted", long)], "it ran 100 s"


def test_jobs_found_due_together_are_promoted_in_the_order_in_which_they_became_due() -> None:
    """A leader that could not look for a while finds several. Reference: Tiresias §3.3, PROMOTEKNOB."""
    rack = Little([2], {}, promote_knob=2.0, starve_limit_s=None)
    waiting = []
    for gpu_s in (400.0, 200.0):
        waiting.append(rack.submit(2, "red"))
        rack.settle()
        rack.serve(rack.queue.jobs[waiting[-1]], gpu_s)
    rack.submit(2, "red")
    rack.settle()
    assert [rack.state(job) for job in waiting] == ["queued", "queued"]
    first, second = waiting
    assert kinds(rack.look(1000.0))[:2] == [("Promoted", second), ("Promoted", first)], "due after 200 and 400 s"
    assert rack.queue.jobs[second].priority.promoted == (rack.queue.jobs[first].priority.promoted or 0) - 1


def test_a_gang_that_waits_for_a_job_to_stop_keeps_no_gpus_that_it_does_not_need() -> None:
    """Whoever was chosen starts as soon as enough GPUs are free. Reference: Tiresias §3.3."""
    rack = Little([6], {}, narrow_first=False)
    sunk = rack.submit(2, "red")
    rack.settle()
    rack.serve(rack.queue.jobs[sunk], 300.0)
    wide, narrow = rack.submit(5, "red"), rack.submit(1, "red")
    said = [*rack.look(), *rack.look()]
    assert kinds(said) == [("TakenBack", sunk), ("Granted", narrow)], (
        "one of the four free GPUs is not for the wide one"
    )
    rack.settle()
    assert [rack.state(job) for job in (sunk, wide, narrow)] == ["queued", "running", "running"]


def test_whoever_is_promoted_comes_before_whoever_would_have_started() -> None:
    """Reference: Tiresias §3.3, STARVELIMIT."""
    rack = Little([2], {}, starve_limit_s=50.0, narrow_first=True)
    first = rack.submit(2, "red")
    rack.settle()
    starving = rack.submit(2, "red")
    rack.look()
    rack.now_s += 60.0
    narrow = rack.submit(1, "red")
    rack.end(rack.queue.jobs[first])
    rack.settle()
    assert [rack.state(job) for job in (starving, narrow)] == ["running", "queued"]
    assert rack.queue.jobs[narrow].tally.attempt == 0, "it did not start in between"


def test_without_preemption_nobody_waits_for_a_job_that_needs_another_to_stop() -> None:
    """The second job of blue is before its first one in the order; red has GPUs and quota all the same."""
    rack = Little([4], {"red": 3, "blue": 1}, preemption=False)
    sunk = rack.submit(1, "blue")
    rack.settle()
    rack.serve(rack.queue.jobs[sunk], 200.0)
    rack.submit(2, "red")
    rack.settle()
    behind, within = rack.submit(1, "blue"), rack.submit(1, "red")
    rack.settle()
    assert [rack.state(job) for job in (sunk, behind, within)] == ["running", "queued", "running"]


def test_a_job_over_its_quota_is_taken_when_it_can_be_demoted_and_never_upgraded() -> None:
    rack = Little([4], {"red": 1, "blue": 3}, demote_after_s=10.0)
    rack.look()
    assert rack.try_submit(2, "red") is None
    wide = rack.submit(2, "red", "auto")
    rack.look(1.0)
    said = [*rack.look(20.0), *rack.settle()]
    assert ("Demoted", wide) in kinds(said) and rack.queue.jobs[wide].state == "running"
    assert rack.queue.used("red") == 0


def test_the_log_refuses_what_a_leader_that_was_cut_off_says_too_late() -> None:
    rack = Little([4], {"red": 2}, demote_after_s=10.0)
    rack.look()
    a, b = rack.submit(2, "red"), rack.submit(2, "red", "auto")
    rack.settle()
    refused: list[Command] = [
        Upgraded(wall_s=1.0, job=b, epoch=0),
        Demoted(wall_s=1.0, job=a, epoch=1, waited_s=1.0),
        Demoted(wall_s=1.0, job=b, epoch=7, waited_s=1.0),
        GpusKept(wall_s=1.0, job=a, epoch=1, gpus={H1: 1}),
        GpusKept(wall_s=1.0, job=b, epoch=0, gpus={H1: 3}),
    ]
    assert all(isinstance(rack.say(command), NotApplied) for command in refused)
    rack.look(20.0)
    rack.settle()
    job = rack.queue.jobs[b]
    assert job.state == "running" and isinstance(
        rack.say(Upgraded(wall_s=1.0, job=b, epoch=job.grant.epoch)), NotApplied
    )


def test_a_snapshot_of_another_version_is_refused_and_changes_nothing() -> None:
    rack = Little([4], {"red": 2})
    rack.submit(2, "red", "auto")
    rack.settle()
    before = rack.queue.snapshot()
    for other in (msgspec.msgpack.decode(before) | {"version": 2}, {"version": 2}):
        with pytest.raises(ValueError, match="snapshot has version 2; this agent reads 1"):
            rack.queue.restore(msgspec.msgpack.encode(other))
    assert rack.queue.snapshot() == before


def test_a_quota_that_was_lowered_under_what_several_jobs_hold_is_restored_as_it_was() -> None:
    """Found by the test below: each job that was counted anew lowered what its tenant was allowed to hold."""
    rack = Little([2], {})
    rack.submit(1, "red")
    rack.submit(1, "red")
    rack.settle()
    rack.say(QuotaSet(wall_s=1.0, tenant="red", gpus=0))
    rack.restore()
    assert rack.copy.overshoot == {"red": 2}


TENANTS = ("red", "blue", "green")
CLASSES = ("guaranteed", "guaranteed", "auto", "opportunistic")


class AnyLife(RuleBasedStateMachine):
    """Jobs of all classes come, run, end and are asked back, quotas and leaders change, commands are repeated."""

    @initialize(gpus=st.lists(st.integers(2, 4), min_size=1, max_size=3), cut=st.integers(0, 9), narrow=st.booleans())
    def begin(self, gpus: list[int], cut: int, narrow: bool) -> None:
        red = min(cut, sum(gpus))
        quotas = {"red": red, "blue": sum(gpus) - red, "green": 0}
        self.rack = Little(gpus, quotas, demote_after_s=60.0, narrow_first=narrow, promote_knob=3.0)
        self.rack.look()

    @rule(
        workers=st.integers(1, 4),
        each=st.sampled_from([1, 1, 1, 2, 2, 3]),
        tenant=st.sampled_from(TENANTS),
        kind=st.sampled_from(CLASSES),
    )
    def submit(self, workers: int, each: int, tenant: str, kind: str) -> None:
        self.rack.try_submit(workers, tenant, kind, each)

    @rule(after_s=st.sampled_from([0.1, 1.0, 1.0, 20.0, 70.0]))
    def look(self, after_s: float) -> None:
        before = self.rack.queue.keeper, dict(self.rack.queue.kept)
        said = self.rack.look(after_s)
        reserved = [command for command in said if isinstance(command, GpusKept)]
        for command in reserved:
            if before[0] == command.job and command.gpus:
                kept = self.rack.queue.kept
                grew = all(kept.get(host, 0) >= gpus for host, gpus in before[1].items())
                assert grew or sum(kept.values()) == self.rack.queue.jobs[command.job].spec.gpus, "it shrank"
        assert len({command.job for command in reserved if command.gpus}) <= 1
        if any(isinstance(command, Upgraded | Demoted) for command in said):
            assert not any(isinstance(command, Granted) for command in said), "an upgrade comes before any start"

    @precondition(lambda self: self.rack.jobs("placing"))
    @rule(at=st.integers(0, 9), scatter=st.booleans())
    def place(self, at: int, scatter: bool) -> None:
        jobs = self.rack.jobs("placing")
        job = jobs[at % len(jobs)]
        self.rack.place(job, (scatter and self.rack.scattered(job)) or None)

    @precondition(lambda self: self.rack.jobs("running", "stopping"))
    @rule(at=st.integers(0, 9), code=st.sampled_from([0, 0, 0, 1, 75]))
    def end(self, at: int, code: int) -> None:
        jobs = self.rack.jobs("running", "stopping")
        self.rack.end(jobs[at % len(jobs)], code)

    @precondition(lambda self: self.rack.jobs("running"))
    @rule(at=st.integers(0, 9), gpu_s=st.sampled_from([10.0, 150.0]))
    def serve(self, at: int, gpu_s: float) -> None:
        jobs = self.rack.jobs("running")
        self.rack.serve(jobs[at % len(jobs)], gpu_s)

    @rule(tenant=st.sampled_from(TENANTS), gpus=st.none() | st.integers(0, 6), give=st.booleans())
    def quota(self, tenant: str, gpus: int | None, give: bool) -> None:
        """Set a quota, mostly to as many GPUs as no other tenant was promised."""
        if give:
            others = [self.rack.queue.quota(other) or 0 for other in TENANTS if other != tenant]
            gpus = max(0, sum(self.rack.totals.values()) - sum(others))
        self.rack.say(QuotaSet(wall_s=1.0, tenant=tenant, gpus=gpus))

    @precondition(lambda self: self.rack.queue.live())
    @rule(at=st.integers(0, 9), what=st.sampled_from(["demote", "upgrade", "reserve", "return"]))
    def wild(self, at: int, what: str) -> None:
        """Say what no leader would say now; the log refuses it or stays sound."""
        jobs = self.rack.queue.live()
        id, epoch = jobs[at % len(jobs)].id, jobs[at % len(jobs)].grant.epoch
        commands: dict[str, Command] = {
            "demote": Demoted(wall_s=1.0, job=id, epoch=epoch, waited_s=1.0),
            "upgrade": Upgraded(wall_s=1.0, job=id, epoch=epoch),
            "reserve": GpusKept(wall_s=1.0, job=id, epoch=epoch, gpus={HostId("h1"): 1 + at % 3}),
            "return": GpusKept(wall_s=1.0, job=id, epoch=epoch, gpus={}),
        }
        reserving = self.rack.queue.keeper
        result = self.rack.say(commands[what])
        if what == "reserve" and reserving not in (None, id):
            assert isinstance(result, NotApplied), "two gangs keep GPUs"

    @rule()
    def another_leads(self) -> None:
        self.rack.leader = Leader(self.rack.queue, self.rack.settings)

    @rule(at=st.integers(0, 10**6))
    def repeat(self, at: int) -> None:
        if self.rack.heard:
            self.rack.say(self.rack.heard[at % len(self.rack.heard)])

    @rule()
    def restore(self) -> None:
        self.rack.restore()
        assert replay(self.rack.heard) == self.rack.queue.snapshot()

    @rule()
    def settle(self) -> None:
        """Let the rack settle: a job that is within a quota and still waits at rest is kept out by guaranteed jobs
        alone."""
        said = self.rack.settle()
        assert len([command for command in said if isinstance(command, TakenBack | Promoted)]) <= 40
        queue, ground = self.rack.queue, self.rack.capacity()
        for job in self.rack.jobs("queued"):
            free = queue.free_quota(job.spec.tenant)
            promised = job.counts and free is not None and job.spec.gpus <= free and not job.tally.place_failures
            if promised and queue.keeper in (None, job.id) and self._first_of_tenant(job):
                assert not fits_whole(job, ground.open), f"{job.id} is kept out by opportunistic jobs"
                assert not any(ground.open.values()) or queue.keeper is not None or job.spec.gpus_per_worker > 1

    def _first_of_tenant(self, job: Any) -> bool:
        """Whether no other of its tenant's jobs has a claim on the same quota."""
        mine = [other for other in self.rack.jobs("queued") if other.spec.tenant == job.spec.tenant and other.counts]
        return mine == [job] and self._promises_kept()

    def _promises_kept(self) -> bool:
        quotas = [self.rack.queue.quota(tenant) for tenant in TENANTS]
        return None not in quotas and sum(quota or 0 for quota in quotas) <= sum(self.rack.totals.values())

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "rack"):
            return
        self.rack.queue.check()
        for job in self.rack.queue.live():
            if job.placed:
                assert sorted(rank for place in job.start.places for rank in place.ranks) == list(
                    range(job.spec.workers)
                )
        asked = {job.id for job in self.rack.queue.live() if job.spec.job_class == "opportunistic"}
        assert not any(self.rack.queue.jobs[id].counts for id in asked), "who asked to be opportunistic stays so"


AnyLife.TestCase.settings = hypothesis_settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
test_in_every_life_quotas_gangs_and_promises_hold = AnyLife.TestCase
