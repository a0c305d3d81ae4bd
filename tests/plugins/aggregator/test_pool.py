"""The pool machine by story: jobs and aggregators come and go, plans turn out wrong."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.events import LogEvent
from covey.core.ids import HostId, JobId
from plugins.aggregator.machine.pool import (
    Action,
    Back,
    Event,
    Exited,
    PeriodPassed,
    Pool,
    PoolJobArrived,
    PoolJobEnded,
    PoolJobTimed,
    PoolMove,
    PoolPlace,
    PoolRefused,
    PoolRules,
    PoolStart,
    PoolStop,
)
from plugins.aggregator.policy.assign import AggregationProfile, Tensor
from plugins.aggregator.policy.measured import MeasuredIterations, is_hurt, loss_measured, reverted
from tests.families import examples


def profile(name: str, period: int, *works: int, limit: Fraction = Fraction(1, 10)) -> AggregationProfile:
    return AggregationProfile(
        JobId(name), period, tuple(Tensor(f"t{at}", work) for at, work in enumerate(works)), 1, limit
    )


class Play:
    def __init__(self, rules: PoolRules = PoolRules(), hosts: Sequence[HostId] | None = None) -> None:
        self.pool = Pool(rules, hosts)

    def __call__(self, event: Event) -> list[Action]:
        found = list(self.pool.handle(event, 0.0))
        self.pool.check()
        return found

    def arrive(self, name: str, period: int, *works: int) -> list[Action]:
        return self(PoolJobArrived(profile(name, period, *works)))

    def run(self, name: str, period_us: int, times: int = 100) -> list[Action]:
        return [action for _ in range(times) for action in self(PoolJobTimed(JobId(name), period_us))]

    def hosts(self, name: str) -> set[HostId]:
        return set(self.pool.on[JobId(name)].values())


def only(actions: Sequence[Action], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def test_a_job_fills_what_is_there_and_starts_what_it_lacks() -> None:
    play = Play()
    assert play.arrive("a", 10, 6) == [PoolStart(HostId("a1")), PoolPlace(JobId("a"), "t0", HostId("a1"))]
    found = play.arrive("b", 10, 5, 3)
    assert only(found, PoolStart) == [PoolStart(HostId("a2"))]
    assert {place.tensor: place.host for place in only(found, PoolPlace)} == {"t0": "a2", "t1": "a1"}


def test_a_job_that_arrives_twice_or_that_nobody_can_sum_changes_nothing() -> None:
    play = Play()
    play.arrive("a", 10, 6)
    assert play.arrive("a", 10, 6) == []
    (note,) = play.arrive("b", 10, 11)
    assert isinstance(note, LogEvent) and "split it" in note.reason
    assert list(play.pool.jobs) == ["a"]


def test_when_a_job_leaves_the_least_loaded_aggregator_is_emptied_and_stops() -> None:
    """The aggregator is emptied into the others."""
    play = Play()
    play.arrive("a", 10, 6)
    play.arrive("b", 10, 4, 2)
    play.arrive("c", 10, 3)
    assert play.hosts("b") == {"a1", "a2"}
    found = play(Exited(JobId("a")))
    assert only(found, PoolStop) == [PoolStop(HostId("a1"))]
    assert only(found, PoolMove) == [PoolMove(JobId("b"), "t0", HostId("a1"), HostId("a2"))]
    assert list(play.pool.cycles) == ["a2"]


def test_hybrid_scaling_clears_up_when_the_period_ends_only() -> None:
    play = Play(PoolRules(scaling="hybrid"))
    play.arrive("a", 10, 9)
    play.arrive("b", 10, 8)
    assert play(Exited(JobId("a"))) == []
    assert len(play.pool.cycles) == 2
    assert only(play(PeriodPassed()), PoolStop) == [PoolStop(HostId("a1"))]
    assert play(PeriodPassed()) == []


def test_in_hybrid_scaling_only_a_job_that_lacks_little_waits_for_the_period() -> None:
    play = Play(PoolRules(scaling="hybrid", lacking_min=2))
    (note,) = play.arrive("a", 10, 9)
    assert isinstance(note, LogEvent) and "period" in note.reason and play.pool.waiting
    assert len(only(play.arrive("b", 10, 9, 9), PoolStart)) == 2
    assert len(only(play(PeriodPassed()), PoolStart)) == 1
    assert not play.pool.waiting


def test_a_job_waits_when_no_host_is_left_and_gets_what_another_leaves() -> None:
    play = Play(hosts=[HostId("x")])
    play.arrive("a", 10, 6)
    (note,) = play.arrive("b", 10, 6)
    assert isinstance(note, LogEvent) and "no host" in note.reason
    found = play(Exited(JobId("a")))
    assert only(found, PoolStop) == [PoolStop(HostId("x"))] and only(found, PoolStart) == [PoolStart(HostId("x"))]
    assert play.hosts("b") == {"x"}
    play.arrive("c", 10, 6)
    play(Exited(JobId("c")))
    assert not play.pool.waiting


def test_the_newest_job_leaves_where_another_is_measured_too_slow() -> None:
    play = Play()
    play.arrive("old", 12, 3)
    play.arrive("new", 6, 1)
    assert play.hosts("old") == play.hosts("new") == {"a1"}
    assert play.run("old", 14, 99) == []
    found = play.run("old", 14, 1)
    assert only(found, PoolStart) == [PoolStart(HostId("a2"))]
    assert only(found, PoolMove) == [PoolMove(JobId("new"), "t0", HostId("a1"), HostId("a2"))]
    (note,) = only(found, LogEvent)
    assert "old lost 14%" in note.reason


def test_what_left_because_it_hurt_comes_back_only_after_one_that_it_hurt_has_left() -> None:
    play = Play()
    play.arrive("old", 12, 3)
    play.arrive("new", 6, 1)
    play.run("old", 14)
    play.arrive("c", 10, 1)
    assert play(Exited(JobId("c"))) == [PoolStop(HostId("a3"))], "a2 is nearly empty, and its job is barred from a1"
    play.arrive("d", 12, 5)
    play(Exited(JobId("old")))
    assert list(play.pool.cycles) == ["a1"], "not because the rest came to it: it has come back"
    assert play.hosts("new") == play.hosts("d") == {"a1"}


def test_who_was_barred_from_an_aggregator_that_stopped_may_use_its_host_again() -> None:
    play = Play(hosts=[HostId("x"), HostId("y")])
    play.arrive("old", 12, 3)
    play.arrive("new", 6, 1)
    play.run("old", 14)
    assert play.hosts("new") == {"y"}, "barred from x"
    play(PoolJobEnded(HostId("x")))
    play(Back(HostId("x")))
    play.arrive("c", 12, 9)
    assert play.hosts("c") == {"x"}
    play(PoolRefused(HostId("y"), JobId("new"), "it is fuller than you think"))
    assert play.hosts("new") == {"x"}, "what was hurt there went with the aggregator"


@pytest.mark.parametrize(("work", "host"), [(4, "a1"), (5, "a3")])
def test_what_hurts_goes_to_an_aggregator_up_to_a_third_full_and_else_to_a_new_one(work: int, host: str) -> None:
    """The third is our figure; a new aggregator is the thesis's. Reference: §4.5.2.3."""
    play = Play()
    play.arrive("beside", 12, work)
    play.arrive("old", 12, 9)
    play.arrive("new", 12, 1)
    assert play.hosts("new") == play.hosts("old") == {"a2"}
    play.run("old", 14)
    assert play.hosts("new") == {host}


def test_the_aggregators_of_a_job_that_needs_as_many_as_it_has_are_not_emptied() -> None:
    """Reference: §4.3.3.3, job arrival (one aggregator more) and job exit (the least loaded is emptied)."""
    play = Play()
    play(PoolJobArrived(AggregationProfile(JobId("a"), 10, (Tensor("t0", 2), Tensor("t1", 2)), 2)))
    play.run("a", 12)
    assert play.hosts("a") == {"a1", "a2"}, "slow on one, it got another"
    play.arrive("b", 10, 9)
    play(Exited(JobId("b")))
    assert play.hosts("a") == {"a1", "a2"} and list(play.pool.cycles) == ["a1", "a2"]


def test_a_job_that_is_slow_alone_moves_nowhere() -> None:
    play = Play()
    play.arrive("a", 10, 6)
    (note,) = play.run("a", 20)
    assert isinstance(note, LogEvent) and "measure it again" in note.reason


def test_iterations_before_a_change_do_not_count_after_it() -> None:
    play = Play()
    play.arrive("old", 12, 3)
    play.run("old", 14, 99)
    play.arrive("new", 6, 1)
    assert play.run("old", 14, 99) == []
    assert play.run("old", 14, 1) != []


def test_a_loss_below_the_limit_moves_nothing_and_the_next_hundred_count_anew() -> None:
    play = Play()
    play.arrive("old", 12, 3)
    play.arrive("new", 6, 1)
    assert play.run("old", 13, 300) == []


def test_tensors_that_an_aggregator_refused_go_elsewhere_and_the_rest_stays() -> None:
    play = Play()
    play.arrive("a", 10, 6, 6)
    found = play(PoolRefused(HostId("a1"), JobId("a"), "it is fuller than you think"))
    assert only(found, PoolMove) == [PoolMove(JobId("a"), "t0", HostId("a1"), HostId("a3"))]
    assert play(PoolRefused(HostId("a1"), JobId("a"), "again")) == []


def test_what_a_lost_aggregator_summed_is_placed_anew_from_nothing() -> None:
    play = Play()
    play.arrive("a", 10, 6, 6)
    play.arrive("b", 10, 3)
    (gone,) = play.hosts("b")
    found = play(PoolJobEnded(gone))
    assert len(only(found, PoolPlace)) == 2 and not only(found, PoolMove)
    assert gone not in play.pool.cycles and play(PoolJobEnded(gone)) == []


def test_a_job_for_which_a_lost_aggregator_leaves_no_room_waits_as_a_whole() -> None:
    play = Play(hosts=[HostId("x"), HostId("y")])
    play.arrive("a", 10, 6, 6)
    found = play(PoolJobEnded(HostId("x")))
    assert only(found, LogEvent) and not play.pool.jobs and list(play.pool.cycles) == ["y"]
    found = play(Back(HostId("x")))
    assert only(found, PoolStart) == [PoolStart(HostId("x"))] and play.hosts("a") == {"x", "y"}


@pytest.mark.parametrize(("period", "count", "hurt"), [(112, 100, True), (111, 100, False), (200, 99, False)])
def test_a_job_is_hurt_at_a_tenth_of_its_speed_over_a_hundred_iterations(period: int, count: int, hurt: bool) -> None:
    measured = MeasuredIterations(count, count * period)
    assert is_hurt(measured, 100, Fraction(1, 10)) == hurt


def test_a_job_that_is_faster_than_alone_lost_nothing() -> None:
    assert loss_measured(MeasuredIterations(10, 900), 100) == 0 == loss_measured(MeasuredIterations(), 100)


def test_the_newest_assignment_is_the_one_that_is_reverted() -> None:
    assert reverted(JobId("a"), [JobId("b"), JobId("c")], {JobId("a"): 1, JobId("b"): 3, JobId("c"): 2}) == "b"
    assert reverted(JobId("a"), [], {JobId("a"): 1}) == "a"


# ---- whatever happens ------------------------------------------------------------------------------------------------

JOBS = st.sampled_from([JobId(f"j{at}") for at in range(6)])
HOSTS = [HostId(f"h{at}") for at in range(4)]


@st.composite
def arrivals(draw: st.DrawFn) -> PoolJobArrived:
    period = draw(st.sampled_from([4, 5, 6, 8, 10, 11, 12, 20, 24, 60]))
    works = draw(st.lists(st.integers(0, period // 2), min_size=1, max_size=5))
    return PoolJobArrived(
        profile(draw(JOBS), period, *works, limit=draw(st.sampled_from([Fraction(1, 10), Fraction(1, 40)])))
    )


EVENTS = st.lists(
    st.one_of(
        arrivals(),
        arrivals(),
        st.builds(Exited, JOBS),
        st.tuples(JOBS, st.integers(1, 100)),
        st.just(PeriodPassed()),
        st.builds(PoolRefused, st.sampled_from(HOSTS), JOBS, st.just("full")),
        st.builds(PoolJobEnded, st.sampled_from(HOSTS)),
        st.builds(Back, st.sampled_from(HOSTS)),
    ),
    max_size=30,
)
RULES = st.builds(
    PoolRules,
    scaling=st.sampled_from(["at once", "hybrid"]),
    lacking_min=st.integers(1, 2),
    iterations=st.just(5),
    lanes=st.integers(1, 2),
    times=st.integers(1, 3),
)


def events_of(drawn: object) -> list[Event]:
    if isinstance(drawn, tuple):
        job, period_us = drawn
        return [PoolJobTimed(job, period_us)] * 5
    assert isinstance(drawn, PoolJobArrived | Exited | PeriodPassed | PoolRefused | PoolJobEnded | Back)
    return [drawn]


@given(rules=RULES, drawn=EVENTS, limited=st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_no_task_is_ever_on_two_aggregators_nobody_is_hurt_and_nothing_is_overfull(
    rules: PoolRules, drawn: list[Any], limited: bool
) -> None:
    play = Play(rules, HOSTS if limited else None)
    where: dict[tuple[JobId, str], HostId] = {}
    running: set[HostId] = set()
    for event in [event for one in drawn for event in events_of(one)]:
        if isinstance(event, Exited):
            where = {key: host for key, host in where.items() if key[0] != event.job}
        if isinstance(event, PoolJobEnded):
            running.discard(event.host)
        for action in play(event):  # `check` after each holds the three
            match action:
                case PoolStart():
                    assert action.host not in running
                    running.add(action.host)
                case PoolStop():
                    assert action.host not in where.values()
                    running.remove(action.host)
                case PoolPlace():
                    assert action.host in running
                    assert where.get((action.job, action.tensor)) not in running, "it was summed somewhere else"
                    where[action.job, action.tensor] = action.host
                case PoolMove():
                    assert where[action.job, action.tensor] == action.source != action.host
                    where[action.job, action.tensor] = action.host
                case LogEvent():
                    assert action.event and action.reason
        where = {key: host for key, host in where.items() if key[0] in play.pool.jobs}
        assert where == {(job, name): host for job, on in play.pool.on.items() for name, host in on.items()}
        assert running == play.pool.cycles.keys()
        assert not limited or running <= set(HOSTS)


@given(rules=RULES, drawn=EVENTS)
@settings(max_examples=examples(100), deadline=None)
def test_other_names_for_the_same_hosts_change_nothing_but_names(rules: PoolRules, drawn: list[Any]) -> None:
    names = [HostId(name) for name in ("z", "m", "a", "k")]
    other = dict(zip(HOSTS, names, strict=True))
    ours, theirs = Play(rules, HOSTS), Play(rules, names)
    for event in [event for one in drawn for event in events_of(one)]:
        renamed: Event = event
        if isinstance(event, PoolRefused):
            renamed = PoolRefused(other[event.host], event.job, event.why)
        elif isinstance(event, PoolJobEnded | Back):
            renamed = type(event)(other[event.host])
        ours(event)
        theirs(renamed)
        assert [other[host] for host in ours.pool.cycles] == list(theirs.pool.cycles)
        for job, on in ours.pool.on.items():
            assert {name: other[host] for name, host in on.items()} == theirs.pool.on[job]
