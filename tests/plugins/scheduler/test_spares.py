"""Spares on other hosts: which one is asked, which ranks may leave when, what is forgotten, which host a coordinator
takes."""

from typing import Any

import pytest

from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.gang.gang import GrantSeen
from plugins.scheduler.machine.gang.spares import ASK_S, KEEP_S, MOVE_WAITS_S, SparesOfOthers, destination
from plugins.scheduler.messages.spec import JobSpec, SpecError
from plugins.scheduler.messages.wire import SparesWarm
from plugins.scheduler.service.coordinated_gangs import sought_places
from tests.plugins.scheduler.test_gang import Coordinator, asks
from tests.plugins.scheduler.test_replacing import H1, H2, H3, H4, Healing

MODULES = ("torch",)


def gang(**spec: Any) -> Any:
    """The job of four ranks on h1 and h2, with a spare."""
    return Healing(**{"spares": 1, **spec}).job


def moved() -> tuple[Any, Place]:
    """The gang, whose ranks on h2 continue on h3, and the place that it had on h2."""
    job = gang()
    before = job.place_on(H2)
    job.healing.leaving = (before,)
    job.start.places = (job.start.places[0], Place(H3, before.ranks, before.gpus, 1))
    return job, before


# ---- who is asked ----


def test_the_first_host_of_a_job_with_spares_asks_for_more_elsewhere() -> None:
    job = gang()
    assert SparesOfOthers(H1).chooses(job) and not SparesOfOthers(H2).chooses(job)
    job.healing.missing = (H1,)
    assert SparesOfOthers(H2).chooses(job), "it is the first that is left, and looks for another one now"
    assert not SparesOfOthers(H1).chooses(gang(spares=0))


def test_it_asks_the_tightest_host_with_room_for_the_widest_place_and_stays_with_it() -> None:
    asks_of, job = SparesOfOthers(H1), gang()
    assert asks_of.choose(job, {H1: 8, H2: 8, H3: 4, H4: 2}) == H4
    assert asks_of.choose(job, {H3: 2, H4: 4}) == H4, "that one has what waits already"
    assert asks_of.choose(job, {H3: 2, H4: 1}) == H3, "it has no room any more"
    assert asks_of.choose(job, {H3: 1, H1: 8}) is None, "one that has ranks of it takes no others over"


def test_a_host_is_asked_again_now_and_then() -> None:
    asks_of = SparesOfOthers(H1)
    assert [asks_of.is_due(JobId("j1"), H3, now_s) for now_s in (0.0, 1.0, ASK_S - 0.1, ASK_S, ASK_S + 1)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert asks_of.is_due(JobId("j1"), H4, 1.0) and asks_of.is_due(JobId("j2"), H3, 1.0)


# ---- ranks that leave ----


def test_ranks_that_move_run_on_until_what_takes_their_place_has_started() -> None:
    job, before = moved()
    leaves = SparesOfOthers(H2)
    assert destination(job, before) == H3
    assert not leaves.may_leave(job, before, MODULES, 0.0)
    leaves.heard(H3, SparesWarm(job.id, job.grant.epoch, 1))
    assert not leaves.may_leave(job, before, MODULES, 1.0), "there are two of them"
    leaves.heard(H3, SparesWarm(job.id, job.grant.epoch, 2))
    assert leaves.may_leave(job, before, MODULES, 1.0)


@pytest.mark.parametrize("why", ["says why not", "too long", "nothing to import", "waits anyway"])
def test_ranks_that_move_do_not_wait_for_what_does_not_help(why: str) -> None:
    job, before = moved()
    leaves = SparesOfOthers(H2)
    assert not leaves.may_leave(job, before, MODULES, 0.0)
    if why == "says why not":
        leaves.heard(H3, SparesWarm(job.id, job.grant.epoch, 0, "no memory"))
    if why == "waits anyway":
        job.healing.missing = (H1,)
    modules = () if why == "nothing to import" else MODULES
    assert leaves.may_leave(job, before, modules, MOVE_WAITS_S + 0.1 if why == "too long" else 1.0)


# ---- what is kept, and forgotten ----


def test_what_nobody_asks_for_again_goes() -> None:
    keeps, job = SparesOfOthers(H3), gang()
    key, jobs = (job.id, job.grant.epoch), {job.id: job}
    keeps.keep(H1, key, 1, MODULES, 0.0)
    assert keeps.over(jobs, KEEP_S - 1) == []
    keeps.keep(H1, key, 1, MODULES, KEEP_S - 1)
    assert keeps.over(jobs, KEEP_S + 1) == []
    assert keeps.over(jobs, 2 * KEEP_S) == [key]
    assert keeps.over(jobs, 2 * KEEP_S) == []


def test_what_was_kept_for_a_grant_that_is_over_goes_at_once() -> None:
    keeps, job = SparesOfOthers(H3), gang()
    keeps.keep(H1, (job.id, job.grant.epoch - 1), 1, MODULES, 0.0)
    assert keeps.over({job.id: job}, 0.1) == [(job.id, job.grant.epoch - 1)]
    keeps.heard(H4, SparesWarm(job.id, job.grant.epoch, 1))
    assert keeps.kept_by(job) == H4
    assert keeps.over({}, 0.1) == [] and keeps.kept_by(job) is None, "its job is over"


def test_a_host_that_has_ranks_of_the_job_by_now_is_no_other_host() -> None:
    knows, job = SparesOfOthers(H1), gang()
    knows.heard(H2, SparesWarm(job.id, job.grant.epoch, 1))
    knows.heard(H3, SparesWarm(job.id, job.grant.epoch, 0))
    assert knows.kept_by(job) is None
    knows.heard(H3, SparesWarm(job.id, job.grant.epoch, 1))
    assert knows.kept_by(job) == H3


# ---- where a lost host's ranks go on ----


@pytest.mark.parametrize(("free", "found"), [({H3: 2, H4: 4}, H4), ({H3: 2, H4: 1}, H3)])
def test_a_coordinator_takes_the_host_where_processes_wait_if_it_has_room(free: dict[HostId, int], found: str) -> None:
    healing = Healing(spares=1)
    healing.job.healing.missing = (H2,)
    sought = sought_places(healing.job, H4)
    assert sought.prefer == H4
    job = healing.job
    actions = Coordinator(free).dispatch(GrantSeen(job.id, job.grant.epoch, job.spec, sought=sought))
    assert list(asks(actions)) == [found]


# ---- what people ask for ----


@pytest.mark.parametrize("on_lost", ["restart", "keep"])
def test_a_job_none_of_whose_ranks_is_replaced_alone_has_no_spares(on_lost: str) -> None:
    with pytest.raises(SpecError) as wrong:
        JobSpec.parse({"argv": ["train"], "spares": 2, "on_lost": on_lost})
    assert wrong.value.field == "spares" and 'on_lost = "heal"' in wrong.value.next
    assert JobSpec.parse({"argv": ["train"], "spares": 2, "on_lost": "heal"}).spares == 2
