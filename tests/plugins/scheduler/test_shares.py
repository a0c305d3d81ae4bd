"""Elastic jobs of which somebody says how many ranks each host carries, and which host owns each table."""

from typing import Any

import msgspec
import pytest

from agent.jobs.launching import begins_beside_its_siblings
from covey.core.ids import HostId
from plugins.base import RanksSpec
from plugins.facts import Place
from plugins.scheduler.messages.commands import (
    Applied,
    Arranged,
    Arrangement,
    HostDrained,
    Placed,
    RanksReported,
    Replaced,
    TakenBack,
)
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy.carrying import carried_by_shares, first_carried, is_equal, shares_of
from plugins.scheduler.service.ranks.rankspec import ranks_spec
from tests.plugins.scheduler.test_arranging import H1, H2, H3, H4, Elastic
from tests.plugins.scheduler.test_queue import refusal

NOBODY = HostId("")


class Shared(Elastic):
    """An elastic job of 16 ranks and 8 tables: two processes on each of h1 and h2."""

    def arrange(self, shares: dict[HostId, int], owners: Any = None, **more: Any) -> Any:
        return self.say(self.wish(shares, owners, **more))

    def wish(self, shares: dict[HostId, int], owners: Any = None, **more: Any) -> Arranged:
        job = self.job
        said: dict[str, Any] = {"epoch": 1, "replaces": job.healing.healed, "places": job.start.places, **more}
        new = Arrangement(**said, shares=shares, owners=owners)
        return Arranged(wall_s=1.0, jobs={self.id: new}, by="the tuner", why="h1 computes faster")

    @property
    def shares(self) -> dict[HostId, int]:
        return shares_of(self.job.start.carried, self.job.start.places)


def owners(*hosts: HostId) -> tuple[HostId, ...]:
    """Owners of 8 tables: these hosts in turn."""
    return tuple(hosts[table % len(hosts)] for table in range(8))


# ---- shares ----------------------------------------------------------------------------------------------------------


def test_the_processes_of_a_host_carry_its_share_together_and_equally_many_each() -> None:
    told = Shared()
    before = dict(told.job.start.carried)
    assert told.arrange({H1: 11, H2: 5}) == Applied()
    assert told.shares == {H1: 11, H2: 5}
    assert sorted(len(told.job.start.carried[process]) for process in (0, 1)) == [5, 6]
    assert sorted(len(told.job.start.carried[process]) for process in (2, 3)) == [2, 3]
    for process, ranks in before.items():
        stays = told.job.start.carried[process]
        assert stays[0] == process and set(ranks[: len(stays)]) <= set(stays), "as few ranks move as that allows"
    assert (told.job.healing.healed, told.job.start.places[0].since) == (1, 0), "its processes are no others"
    assert told.job.reason == "the tuner, h1 computes faster: ranks by host are h1 11, h2 5"
    assert (told.id, "arranged anew") in told.notes


def test_a_new_process_gets_the_part_of_its_hosts_share() -> None:
    told = Shared()
    names = carried_by_shares(told.job.start.carried, (), [H3], {0: H1, 1: H1, 2: H2, 3: H2}, {H1: 4, H2: 4, H3: 8})[1]
    places = (*told.job.start.places, Place(H3, tuple(names), ("h3.0",), 1))
    assert told.arrange({H1: 4, H2: 4, H3: 8}, places=places) == Applied()
    assert told.shares == {H1: 4, H2: 4, H3: 8} and told.job.processes == 5
    assert told.job.reason.endswith("from 4 to 5 processes: 1 more on h3; ranks by host are h1 4, h2 4, h3 8")


def test_a_new_process_in_another_place_than_its_name_is_for_is_refused() -> None:
    told = Shared()
    where, shares = {0: H1, 1: H1, 2: H2, 3: H2}, {H1: 4, H2: 4, H3: 2, H4: 6}
    one, two = carried_by_shares(told.job.start.carried, (), [H3, H4], where, shares)[1]
    good = [Place(H3, (one,), ("a",), 1), Place(H4, (two,), ("b",), 1)]
    wrong = [Place(H3, (two,), ("a",), 1), Place(H4, (one,), ("b",), 1)]
    said = refusal(told.arrange(shares, places=(*told.job.start.places, *wrong)))
    assert "would carry" in said.why and "they are in other places" in said.why
    assert told.arrange(shares, places=(*told.job.start.places, *good)) == Applied()


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        ({H1: 11, H2: 4}, "the shares of the hosts are 15 ranks together, and the job has 16"),
        ({H1: 15, H2: 1}, "h2 is to carry 1 rank with 2 processes, and each carries at least one"),
        ({H1: 8, H2: 4, H3: 4}, "h3 is to carry 4 ranks and has no process of the job"),
        ({H1: 16}, "h2 has processes of the job and no share of its ranks"),
        ({}, "its processes stay as they are, what they carry, and who owns its tables"),
        ({H1: 8, H2: 8}, "its processes stay as they are, what they carry, and who owns its tables"),
    ],
)
def test_shares_that_cannot_be_change_nothing(shares: dict[HostId, int], why: str) -> None:
    told = Shared()
    before = told.queue.snapshot()
    said = refusal(told.arrange(shares))
    assert said.why == f"{told.id}: {why}"
    told.queue.index -= 1
    assert told.queue.snapshot() == before


def test_ranks_that_have_not_registered_their_state_carry_no_others() -> None:
    told = Shared()
    told.job.healing.may_be_lost = ()
    assert "have not registered their state" in refusal(told.arrange({H1: 11, H2: 5})).why
    assert told.arrange({}, owners(H1)) == Applied(), "tables move without it"


def test_of_two_who_share_out_at_once_one_is_refused_and_one_said_twice_is_one() -> None:
    told = Shared()
    first, second = told.wish({H1: 11, H2: 5}, owners(H1)), told.wish({H1: 5, H2: 11}, owners(H1))
    third = told.wish({H1: 11, H2: 5}, owners(H2))
    assert told.say(first) == Applied() and told.say(first) == Applied()
    for other in (second, third, told.wish({}, owners(H1), replaces=0)):
        assert "its configuration is 1 by now, and not 0" in refusal(told.say(other)).why
    assert told.shares == {H1: 11, H2: 5} and told.job.healing.healed == 1


def test_the_next_change_that_says_no_shares_lets_all_carry_equally_many_again() -> None:
    for change in ("lose", "scale", "grow"):
        told = Shared()
        told.grow(h3=2)
        assert told.arrange({H1: 10, H2: 4, H3: 2}) == Applied()
        if change == "lose":
            told.lose(H3)
        elif change == "scale":
            told.scale(5)
        else:
            told.grow(h3=1)
        assert is_equal(told.job.start.carried), change
        assert "; ranks by host are " in told.job.reason, change


def test_arrangements_without_shares_say_nothing_of_ranks() -> None:
    told = Shared()
    told.grow(h3=2)
    assert told.job.reason == "a person: from 4 to 6 processes: 2 more on h3"


def test_the_leader_lets_a_job_not_grow_over_what_a_plugin_asked_for() -> None:
    told = Shared()
    told.grow(h3=2)
    assert told.job.healing.at_most == 0, "its coordinator found room, as the leader wanted"
    left = told.job.start.places[:2]
    assert told.arrange({}, places=left) == Applied()
    assert (told.job.processes, told.job.healing.at_most) == (4, 4)
    told.arrange({H1: 11, H2: 5})
    assert told.job.healing.at_most == 4


def test_processes_for_which_others_wait_begin_with_their_share_of_the_cores() -> None:
    """Nobody else carries the ranks of the process that ended."""
    told = Shared()
    told.grow(h3=1)
    assert told.job.healing.awaited == () and not spec_on(told, H3).awaited
    first, second = told.job.start.places[:2]
    ends = Place(H2, second.ranks[:1], second.gpus[:1])
    where = {process: place.host for place in told.job.start.places for process in place.ranks}
    carried, names = carried_by_shares(told.job.start.carried, second.ranks[1:], [H4], where, {})
    places = (first, ends, told.job.start.places[2], Place(H4, tuple(names), ("h4.0",), 2))
    assert told.arrange({}, places=places) == Applied()
    assert told.job.healing.awaited == tuple(names) and told.job.start.carried == carried
    assert spec_on(told, H4).awaited and not begins_beside_its_siblings(spec_on(told, H4))
    assert not spec_on(told, H3).awaited and begins_beside_its_siblings(spec_on(told, H3))


def spec_on(told: Shared, host: HostId) -> RanksSpec:
    return ranks_spec(told.job, told.job.place_on(host), {})


# ---- owners ----------------------------------------------------------------------------------------------------------


def test_owners_are_remembered_whether_or_not_the_job_has_processes_there() -> None:
    told = Shared()
    assert told.arrange({}, owners(H1, H4)) == Applied()
    assert (told.job.start.owners, told.job.start.owners_since) == (owners(H1, H4), 1)
    said = "4 processes as before; tables 0 2 4 6 on h1, 1 3 5 7 on h4"
    assert told.job.reason == f"the tuner, h1 computes faster: {said}"
    assert told.arrange({H1: 11, H2: 5}) == Applied()
    assert (told.job.start.owners, told.job.start.owners_since) == (owners(H1, H4), 1), "nobody said others"
    assert told.arrange({H1: 11, H2: 5}, ()) == Applied()
    assert (told.job.start.owners, told.job.start.owners_since) == ((), 3)
    assert told.job.reason.endswith("; each table is where it is by itself")


def test_as_many_owners_as_tables_and_no_drained_ones() -> None:
    told = Shared()
    said = refusal(told.arrange({}, (H1, H2)))
    assert said.why == f"{told.id}: the owners of 2 tables are said, and it has 8"
    told.say(HostDrained(wall_s=1.0, host=H4))
    assert "a table is to be on h4: h4 is drained" in refusal(told.arrange({}, owners(H1, H4))).why


def test_nobody_is_said_for_tables_of_hosts_that_are_lost_or_given_back() -> None:
    for change in ("lose", "scale"):
        told = Shared()
        told.grow(h3=2)
        assert told.arrange({}, owners(H1, H3, H4, H2)) == Applied()
        assert (told.lose(H3) if change == "lose" else told.scale(4)) == Applied(told.id)
        assert told.job.start.owners == owners(H1, NOBODY, H4, H2), "h4 never had a process, and goes on summing"
    told = Shared()
    told.grow(h3=2)
    told.arrange({}, owners(H3))
    told.lose(H3)
    assert told.job.start.owners == (), "nobody is left for whom somebody said one"


def test_nobody_is_said_for_tables_of_a_drained_host_from_then_on() -> None:
    told = Shared()
    told.arrange({}, owners(H1, H4))
    told.say(HostDrained(wall_s=1.0, host=H4))
    assert told.job.start.owners == owners(H1, NOBODY)
    assert told.job.healing.healed == 2, "all hosts hear of it as of another configuration"
    assert (told.id, "owners forgotten") in told.notes
    told.say(HostDrained(wall_s=1.0, host=H3))
    assert told.job.healing.healed == 2


def test_tables_go_along_with_processes_that_move() -> None:
    told = Shared()
    told.arrange({}, owners(H1, H2))
    told.job.healing.moving = {H2: H3}
    old = told.job.place_on(H2)
    new = Place(H3, old.ranks, ("x", "y"), 2)
    assert told.say(Replaced(wall_s=1.0, job=told.id, epoch=1, places={H2: new})) == Applied(told.id)
    assert told.job.start.owners == owners(H1, H3)


def test_another_start_begins_without_owners_and_shares() -> None:
    told = Shared()
    told.arrange({H1: 11, H2: 5}, owners(H1))
    told.say(TakenBack(wall_s=1.0, job=told.id, epoch=1, cause="preempted", reason="room"))
    for place in told.job.start.places:
        codes = dict.fromkeys(place.ranks, -15)
        told.say(RanksReported(wall_s=1.0, job=told.id, epoch=1, host=place.host, codes=codes, asked=True))
    told.grant(told.id)
    places = (Place(H1, (0, 1, 2, 3), ("a", "b", "c", "d")),)
    placed = Placed(wall_s=1.0, job=told.id, epoch=2, places=places, master_addr="10.0.0.1", master_port=7000)
    assert told.say(placed) == Applied(told.id)
    assert (told.job.start.owners, told.job.start.owners_since) == ((), 0)
    assert told.job.start.carried == first_carried(16, 4)


# ---- how many tables -------------------------------------------------------------------------------------------------


def test_an_elastic_job_has_tables_by_its_ranks_wherever_it_starts() -> None:
    told = Shared()
    assert told.job.start.tables == 8
    small = told.run(1, workers_max=3, base=20)
    assert told[small].start.tables == 3
    fixed = told.run(4, base=30)
    assert told[fixed].start.tables == len(told[fixed].start.places) == 2


def test_a_range_counts_its_ranks() -> None:
    spec = JobSpec.parse({"argv": ["train"], "workers": 4, "workers_max": 16})
    assert (spec.elastic, spec.world_size) == (True, 16)
    assert msgspec.structs.replace(spec, workers_max=0).world_size == 4
