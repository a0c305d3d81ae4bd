"""A coordinator places a gang: whole or not at all, whatever the hosts answer and whenever."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from covey.core.events import Heard, Send, SetTimer, Undelivered
from covey.core.ids import HostId, JobId
from plugins.scheduler.machine.gang.gang import (
    Action,
    AttemptOver,
    Event,
    Gangs,
    GrantOver,
    GrantSeen,
    KeptForAnother,
    Placement,
    PlacementProposed,
    ProposePlacement,
    RackSeen,
    TryAgain,
)
from plugins.scheduler.messages.commands import Applied, NotApplied, Placed, PlaceFailed
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.messages.wire import NotReserved, Release, Reserve, Reserved
from plugins.scheduler.policy.settings import SchedulerSettings

J1 = JobId("j1")
H1, H2, H3 = HostId("h1"), HostId("h2"), HostId("h3")


class Coordinator:
    def __init__(self, free: dict[HostId, int] | None = None, **settings: Any) -> None:
        self.gangs = Gangs(SchedulerSettings(**settings))
        self.now_s = 0.0
        self.free = free or {H1: 2, H2: 2, H3: 2}

    def dispatch(self, event: Event) -> list[Action]:
        self.gangs.handle(RackSeen(self.free, dict.fromkeys(self.free, 0)), self.now_s)
        actions = list(self.gangs.handle(event, self.now_s))
        self.gangs.check()
        return actions

    def grant(self, workers: int = 4, epoch: int = 1, **more: Any) -> dict[HostId, Reserve]:
        spec = JobSpec.parse({"argv": ["x"], "workers": workers, **more})
        return asks(self.dispatch(GrantSeen(J1, epoch, spec)))

    def yes(self, host: HostId, ask: Reserve) -> list[Action]:
        gpus = tuple(f"{host}-{n}" for n in range(ask.workers * ask.gpus_per_worker))
        port = 20_000 if ask.master else 0
        return self.dispatch(Heard(host, Reserved(ask.job, ask.epoch, ask.attempt, gpus, f"ip-{host}", port)))

    def no(self, host: HostId, ask: Reserve, free: int = 0) -> list[Action]:
        return self.dispatch(Heard(host, NotReserved(ask.job, ask.epoch, ask.attempt, free, "taken")))


def asks(actions: list[Action]) -> dict[HostId, Reserve]:
    sends = [action for action in actions if isinstance(action, Send)]
    return {send.to: send.message for send in sends if isinstance(send.message, Reserve)}


def released(actions: list[Action]) -> list[HostId]:
    return [action.to for action in actions if isinstance(action, Send) and isinstance(action.message, Release)]


def proposals(actions: list[Action]) -> list[Placement]:
    return [action.command for action in actions if isinstance(action, ProposePlacement)]


def timers(actions: list[Action]) -> list[Any]:
    return [action.event for action in actions if isinstance(action, SetTimer)]


def test_all_yes_is_proposed_once_with_ranks_in_order_and_the_master_at_rank_0() -> None:
    coordinator = Coordinator()
    asked = coordinator.grant(workers=4)
    assert {host: (ask.workers, ask.master) for host, ask in asked.items()} == {H1: (2, True), H2: (2, False)}
    assert coordinator.yes(H2, asked[H2]) == []
    (placed,) = proposals(coordinator.yes(H1, asked[H1]))
    assert isinstance(placed, Placed)
    assert [(place.host, place.ranks, place.gpus) for place in placed.places] == [
        (H1, (0, 1), ("h1-0", "h1-1")),
        (H2, (2, 3), ("h2-0", "h2-1")),
    ]
    assert (placed.master_addr, placed.master_port) == ("ip-h1", 20_000)
    assert coordinator.yes(H1, asked[H1]) == [], "said twice, proposed once, and not released"
    coordinator.dispatch(PlacementProposed(placed, Applied(J1)))
    assert coordinator.gangs.searches == {}


def test_one_no_releases_all_and_the_next_attempt_plans_with_what_the_host_said() -> None:
    coordinator = Coordinator()
    asked = coordinator.grant(workers=4)
    coordinator.yes(H1, asked[H1])
    actions = coordinator.no(H2, asked[H2], free=0)
    assert released(actions) == [H1, H2]
    (again,) = timers(actions)
    assert again == TryAgain(J1, 1, 1)
    asked = asks(coordinator.dispatch(again))
    assert {host: ask.workers for host, ask in asked.items()} == {H1: 2, H3: 2}
    assert {ask.attempt for ask in asked.values()} == {2}


def test_a_late_yes_after_the_release_is_released_again() -> None:
    coordinator = Coordinator()
    asked = coordinator.grant(workers=4)
    coordinator.no(H2, asked[H2])
    assert released(coordinator.yes(H1, asked[H1])) == [H1]
    coordinator.dispatch(TryAgain(J1, 1, 1))
    assert released(coordinator.yes(H1, asked[H1])) == [H1], "a yes to attempt 1 is no yes to attempt 2"


def test_silence_ends_the_attempt() -> None:
    coordinator = Coordinator()
    asked = coordinator.grant(workers=4)
    coordinator.yes(H1, asked[H1])
    actions = coordinator.dispatch(AttemptOver(J1, 1, 1))
    assert released(actions) == [H1, H2] and timers(actions) == [TryAgain(J1, 1, 1)]
    assert coordinator.dispatch(AttemptOver(J1, 1, 1)) == [], "an old timer says nothing"


def test_after_its_attempts_the_grant_goes_back_with_the_reason() -> None:
    coordinator = Coordinator(place_attempts=2)
    asked = coordinator.grant(workers=2, skew=0.9)
    coordinator.no(H1, asked[H1])
    asked = asks(coordinator.dispatch(TryAgain(J1, 1, 1)))
    (failed,) = proposals(coordinator.no(H2, asked[H2]))
    assert isinstance(failed, PlaceFailed) and failed.reason == "h2 refused: taken"
    coordinator.dispatch(PlacementProposed(failed, Applied(J1)))
    assert coordinator.gangs.searches == {}


def test_a_view_in_which_it_does_not_fit_asks_nobody() -> None:
    coordinator = Coordinator({H1: 1}, place_attempts=1)
    spec = JobSpec.parse({"argv": ["x"], "workers": 2})
    actions = coordinator.dispatch(GrantSeen(J1, 1, spec))
    (failed,) = proposals(actions)
    assert isinstance(failed, PlaceFailed) and "h1 1" in failed.reason and asks(actions) == {}


def test_a_refusal_is_forgotten_after_a_while() -> None:
    coordinator = Coordinator({H1: 2})
    asked = coordinator.grant(workers=2)
    coordinator.no(H1, asked[H1], free=1)
    assert asks(coordinator.dispatch(TryAgain(J1, 1, 1))) == {}
    coordinator.now_s = 60.0
    assert set(asks(coordinator.dispatch(TryAgain(J1, 1, 2)))) == {H1}


def test_an_unreachable_host_ends_the_attempt_at_once() -> None:
    coordinator = Coordinator()
    asked = coordinator.grant(workers=4)
    assert released(coordinator.dispatch(Undelivered(H2, asked[H2]))) == [H1, H2]
    assert coordinator.dispatch(Undelivered(H2, Release(J1, 1, 1))) == []


def test_a_proposal_the_log_refused_is_released_and_tried_again() -> None:
    coordinator = Coordinator()
    asked = coordinator.grant(workers=4)
    coordinator.yes(H1, asked[H1])
    (placed,) = proposals(coordinator.yes(H2, asked[H2]))
    actions = coordinator.dispatch(PlacementProposed(placed, NotApplied(4, "no", "GPU h1-0 on h1 belongs to j7", "")))
    assert released(actions) == [H1, H2] and timers(actions) == [TryAgain(J1, 1, 1)]


def test_a_proposal_of_unknown_outcome_is_repeated_and_nothing_is_released() -> None:
    coordinator = Coordinator()
    asked = coordinator.grant(workers=4)
    coordinator.yes(H1, asked[H1])
    (placed,) = proposals(coordinator.yes(H2, asked[H2]))
    assert coordinator.dispatch(PlacementProposed(placed, None)) == [ProposePlacement(placed)]
    assert coordinator.dispatch(AttemptOver(J1, 1, 1)) == [], "the log may still place it"


def test_a_grant_taken_back_releases_and_one_that_was_placed_does_not() -> None:
    coordinator = Coordinator()
    asked = coordinator.grant(workers=4)
    coordinator.yes(H1, asked[H1])
    assert released(coordinator.dispatch(GrantOver(J1, 1, placed=False))) == [H1, H2]
    coordinator.grant(workers=4, epoch=2)
    assert coordinator.dispatch(GrantOver(J1, 1, placed=False)) == [], "news of an older grant"
    assert coordinator.dispatch(GrantOver(J1, 2, placed=True)) == []
    assert coordinator.gangs.searches == {}


def test_gpus_kept_for_another_gang_are_closed_to_a_plan_and_not_to_a_proposal() -> None:
    """The GPUs were kept for the other gang meanwhile."""
    coordinator = Coordinator()
    asked = coordinator.grant(workers=4)
    assert set(asked) == {H1, H2}
    kept = KeptForAnother(J1, 1, JobId("j2"), {H2: 2, H3: 0})
    assert coordinator.dispatch(kept) == [], "there is still room for two workers on h2"
    assert coordinator.dispatch(msgspec.structs.replace(kept, epoch=2, free={H2: 1})) == [], "it is about another grant"
    actions = coordinator.dispatch(msgspec.structs.replace(kept, free={H2: 1}))
    assert sorted(released(actions)) == [H1, H2] and len(timers(actions)) == 1
    assert coordinator.gangs.searches[J1].trouble == "GPUs on h2 are now reserved for j2"
    coordinator.free = {H1: 2, H2: 1, H3: 2}
    asked = asks(coordinator.dispatch(timers(actions)[0]))
    assert {host: ask.workers for host, ask in asked.items()} == {H1: 2, H3: 2}
    for host in (H1, H3):
        said = coordinator.yes(host, asked[host])
    assert len(proposals(said)) == 1
    assert coordinator.dispatch(msgspec.structs.replace(kept, free={H3: 0})) == []


def test_a_newer_grant_replaces_an_older_search_and_seeing_one_twice_is_once() -> None:
    coordinator = Coordinator()
    coordinator.grant(workers=4)
    spec = JobSpec.parse({"argv": ["x"], "workers": 4})
    actions = coordinator.dispatch(GrantSeen(J1, 3, spec))
    assert released(actions) == [H1, H2] and {ask.epoch for ask in asks(actions).values()} == {3}
    assert coordinator.dispatch(GrantSeen(J1, 3, spec)) == [] and coordinator.dispatch(GrantSeen(J1, 2, spec)) == []


ANSWERS = st.lists(
    st.tuples(
        st.sampled_from(["yes", "no", "lost", "over", "again", "log yes", "log no", "log ?", "short yes"]),
        st.sampled_from([H1, H2, H3]),
        st.integers(1, 4),
    ),
    max_size=25,
)


@given(ANSWERS)
def test_in_whatever_order_nothing_half_is_proposed_and_nothing_stays_unreleased(script: Any) -> None:
    coordinator = Coordinator()
    kept: set[tuple[HostId, int]] = set()
    log: list[Placement] = []
    home_free = {H1: 2, H2: 2, H3: 2}
    plans: dict[int, dict[HostId, Reserve]] = {}

    def note(actions: list[Action]) -> None:
        search = coordinator.gangs.searches.get(J1)
        if search is not None and isinstance(search.proposed, Placed):
            said = [action.message for action in actions if isinstance(action, Send)]
            ended = [message.attempt for message in said if isinstance(message, Release)]
            assert all(attempt < search.attempt for attempt in ended), "released what the log may still place"
        for host, ask in asks(actions).items():
            plans.setdefault(ask.attempt, {})[host] = ask
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, Release):
                kept.difference_update({(action.to, n) for n in range(action.message.attempt + 1)})
        log.extend(proposals(actions))

    coordinator.free = home_free
    note(coordinator.dispatch(GrantSeen(J1, 1, JobSpec.parse({"argv": ["x"], "workers": 5}))))
    for what, host, attempt in script:
        ask = plans.get(attempt, {}).get(host)
        if what in ("yes", "short yes") and ask is not None:
            kept.add((host, attempt))
            count = ask.workers - (what == "short yes")
            gpus = tuple(f"{host}-{n}" for n in range(count))
            note(coordinator.dispatch(Heard(host, Reserved(J1, 1, attempt, gpus, "ip", 1))))
        elif what == "no" and ask is not None:
            note(coordinator.no(host, ask))
        elif what == "lost" and ask is not None:
            note(coordinator.dispatch(Undelivered(host, ask)))
        elif what == "over":
            note(coordinator.dispatch(AttemptOver(J1, 1, attempt)))
        elif what == "again":
            note(coordinator.dispatch(TryAgain(J1, 1, attempt)))
        elif log and what.startswith("log"):
            said = {"log yes": Applied(J1), "log no": NotApplied(4, "", "", ""), "log ?": None}[what]
            note(coordinator.dispatch(PlacementProposed(log[-1], said)))
    for placed in log:
        if isinstance(placed, Placed):
            assert [rank for place in placed.places for rank in place.ranks] == list(range(5))
            assert all(len(place.gpus) == len(place.ranks) for place in placed.places)
    if J1 in coordinator.gangs.searches:
        note(coordinator.dispatch(GrantOver(J1, 1, placed=False)))
        assert kept == set(), "a host keeps GPUs for a gang that nobody places"


def test_a_job_that_takes_turns_goes_where_its_group_is() -> None:
    """Reference: Harmony §4.3.1: jobs of a group share all its hosts."""
    rack = Coordinator({H1: 0, H2: 0, H3: 0})
    for group, busy, where in (
        ("night", {H1: 0, H2: 5, H3: 5}, {H2: 1, H3: 1}),
        ("auto", {H1: 0, H2: 5, H3: 5}, {H1: 2}),
        ("auto", {H1: 3, H2: 5, H3: 5}, {H2: 1, H3: 1}),
        ("", {H1: 0, H2: 5, H3: 5}, {H1: 2}),
    ):
        rack.gangs = Gangs(SchedulerSettings())
        company = frozenset((H2, H3)) if group else frozenset()
        rack.gangs.handle(RackSeen(rack.free, busy, company=company), 0.0)
        spec = JobSpec.parse({"argv": ["x"], "workers": 2, "gpus_per_worker": 0, "share_host": group})
        found = asks(list(rack.gangs.handle(GrantSeen(J1, 1, spec), 0.0)))
        assert {host: ask.workers for host, ask in found.items()} == where, (group, busy)


def test_workers_that_lie_apart_leave_the_hosts_of_their_group_if_too_few() -> None:
    rack = Coordinator()
    rack.gangs.handle(RackSeen({H1: 0, H2: 0}, {H1: 0, H2: 5}, company=frozenset((H2,))), 0.0)
    more = {"workers": 2, "gpus_per_worker": 0, "share_host": "night", "pack": "apart"}
    found = asks(list(rack.gangs.handle(GrantSeen(J1, 1, JobSpec.parse({"argv": ["x"], **more})), 0.0)))
    assert sorted(found) == [H1, H2]
