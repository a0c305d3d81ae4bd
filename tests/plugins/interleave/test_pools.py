"""Groups of a whole rack, without a master: stories in virtual time."""

import itertools
import random
from functools import partial

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.events import Heard
from covey.core.ids import HostId, JobId
from plugins.facts import ArrangementsAnswered, StepTimed, SumsWorked
from plugins.interleave.machine.measured import TIMINGS_MIN, StepsHere
from plugins.interleave.machine.pools import AGE_S, BACK_OFF_S, IDLE_REFUSALS, HostsNow, Pools, SecondBegan
from plugins.interleave.messages import ProfilesTold, ProfileTold, StepsMeasured
from plugins.interleave.policy.decide import PoolView
from plugins.interleave.policy.groups import groups_of
from tests.families import examples
from tests.plugins.interleave.racks import Rack

J1, J2, J3, J4 = (JobId(f"j{n}") for n in range(1, 5))
H1, H2, H3, H4 = (HostId(f"h{n}") for n in range(1, 5))
CPU, NET = (4.0, 0.4), (0.8, 2.4)


def two_and_two(seed: int = 1, **more: float) -> Rack:
    """Two jobs that compute on one pair of hosts, two that send on the other."""
    rack = Rack(4, seed, **more)
    rack.begin(J1, [H1, H2], *CPU)
    rack.begin(J2, [H2, H1], *CPU)
    rack.begin(J3, [H3, H4], *NET)
    rack.begin(J4, [H4, H3], *NET)
    return rack


def in_force(rack: Rack) -> list[HostId]:
    return [host for host, _, refused in rack.wishes if not refused]


def test_a_job_ends_and_the_others_get_its_hosts() -> None:
    rack = Rack(4)
    rack.begin(J1, [H1, H2], *CPU)
    rack.begin(J2, [H2, H1], *CPU)
    rack.begin(J3, [H3, H4], *CPU, most=0)  # it is not elastic, and is never moved
    rack.run(200)
    assert rack.apart() == [((J1, J2), 2), ((J3,), 2)]
    before = len(rack.wishes)
    rack.end(J3)
    rack.run(60)
    assert in_force(rack)[before:], "somebody proposed"
    assert {host for group in rack.groups() for host in group.hosts} == {H1, H2, H3, H4}


def test_jobs_that_compute_come_together_with_jobs_that_send() -> None:
    rack = two_and_two()
    rack.run(150)
    assert in_force(rack), rack.wishes
    for group in rack.groups():
        assert {J1, J2} & set(group.jobs), "no group only sends"


def test_the_event_log_says_what_was_predicted_and_then_what_was_measured() -> None:
    """Reference: §4.4.6, the accuracy of the model."""
    rack = two_and_two()
    rack.run(240)
    events = [note.event for note in rack.notes]
    assert "regrouped" in events
    assert "iteration measured" in events
    measured = next(note.reason for note in rack.notes if note.event == "iteration measured")
    assert measured.startswith("predicted ")
    off = float(measured.rpartition("(")[2].rstrip("%)"))
    assert abs(off) <= 5, measured


def test_when_nothing_changes_nothing_more_is_wanted() -> None:
    rack = two_and_two(review_s=60.0)
    rack.run(400)
    settled, last = rack.apart(), len(rack.wishes)
    rack.run(600)
    assert rack.apart() == settled
    assert len(rack.wishes) <= last + 1, "reviews repeat nothing"


def test_of_two_proposers_at_once_one_is_refused_and_looks_again() -> None:
    """Reference: §4.3.2, where one master decides. The one that is refused proposed from a configuration that is
    replaced by now."""
    rack = two_and_two(late_s=3.0)  # each hears of what the other did only seconds later
    for machine in rack.machines.values():  # all of them take themselves for the one that arranges
        machine.view = partial(_mine, machine)  # type: ignore[method-assign]
    rack.run(200)
    refused = [why for _, _, why in rack.wishes if why]
    assert any("configuration" in why for why in refused), rack.wishes
    assert in_force(rack)
    rack.check()


def _mine(machine: Pools, name: str, now_s: float) -> PoolView:
    view = Pools.view(machine, name, now_s)
    first = min(host for job in view.jobs for host in job.hosts)
    return msgspec.structs.replace(view, me=first)


def test_a_proposer_that_dies_is_followed_by_the_next() -> None:
    rack = two_and_two()
    rack.answers = False  # the wish of the first never reaches the log
    rack.run(30)
    assert not rack.wishes
    rack.kill(H1)
    rack.answers = True
    rack.run(300)
    assert in_force(rack)
    assert H1 not in in_force(rack)
    assert set(rack.jobs) == {J1, J2, J3, J4}


def test_a_job_that_ends_while_a_wish_is_under_way_refuses_it_whole() -> None:
    rack = two_and_two()
    ends: list[JobId] = []

    propose = rack._propose

    def late(host: HostId, wish) -> None:  # type: ignore[no-untyped-def]
        if not ends:
            ends.append(sorted(wish.jobs)[0])
            rack.end(ends[0])
        propose(host, wish)

    rack._propose = late  # type: ignore[method-assign]
    rack.run(250)
    assert ends
    assert rack.wishes[0][2] == f"there is no job {ends[0]}"
    assert set(rack.jobs) == {J1, J2, J3, J4} - set(ends)


def test_what_is_refused_is_not_asked_again_at_once_and_soon_without_idle_hosts() -> None:
    rack = Rack(6)
    rack.barred = {HostId("h5"), HostId("h6")}
    rack.begin(J1, [H1, H2], *CPU)
    rack.begin(J2, [H2, H1], *CPU)
    rack.begin(J3, [H3, H4], *NET)
    rack.begin(J4, [H4, H3], *NET)
    rack.run(400)
    refused = [wish for _, wish, why in rack.wishes if why]
    assert 1 <= len(refused) <= IDLE_REFUSALS + 1
    assert in_force(rack), "then it asks for what it can have"
    assert all(host not in rack.barred for job in rack.log for host in rack.hosts_of(job))
    times = sorted(float(wish.ask.split("/")[2]) for _, wish, _ in rack.wishes)
    assert all(b - a >= BACK_OFF_S / 2 for a, b in itertools.pairwise(times))


def test_a_wish_that_nobody_answers_is_given_up() -> None:
    rack = two_and_two()
    rack.answers = False
    rack.run(120)
    assert any(note.event == "not regrouped" and "nobody answered" in note.reason for note in rack.notes)
    rack.answers = True
    rack.run(300)
    assert in_force(rack)


def test_profiles_that_are_not_told_any_more_do_not_count() -> None:
    rack = two_and_two()
    rack.run(60)
    machine = rack.machines[H1]
    assert set(machine.known("auto", rack.now_s)) == {J1, J2, J3, J4}
    assert set(machine.known("auto", rack.now_s + AGE_S)) == set()


def test_only_a_host_of_the_job_is_believed_and_an_older_profile_changes_nothing() -> None:
    rack = Rack(4)
    rack.begin(J1, [H1, H2], *CPU, most=0)
    rack.begin(J3, [H3, H4], *NET, most=0)
    rack.run(40)
    machine = rack.machines[H1]
    known = machine.profiles[J3].told
    newer = ProfileTold(J3, 1, known.config, known.step + 5, 9, 7.0, 1.0, 1.0)
    machine.handle(Heard(H1, ProfilesTold((newer,))), rack.now_s)
    assert machine.profiles[J3].told == known, "h1 has no process of j3"
    machine.handle(Heard(H3, ProfilesTold((newer,))), rack.now_s)
    assert machine.profiles[J3].told == newer
    older = ProfileTold(J3, 1, known.config, known.step, 9, 1.0, 1.0, 1.0)
    machine.handle(Heard(H3, ProfilesTold((older,))), rack.now_s)
    assert machine.profiles[J3].told == newer


def test_a_job_is_profiled_once_all_its_hosts_measured_enough_as_it_is_now() -> None:
    rack = Rack(2)
    rack.begin(J1, [H1, H2], *CPU)
    rack.run(2)
    machine = rack.machines[H1]
    one = StepsMeasured(J1, 1, 0, 9, TIMINGS_MIN, 2.0, 0.4, 0.0, 3.0)
    machine.handle(Heard(H1, one), rack.now_s)
    machine._own_profile(J1, rack.now_s)
    assert J1 not in machine.profiles, "nothing of h2 yet"
    machine.handle(Heard(H2, StepsMeasured(J1, 1, 0, 9, TIMINGS_MIN - 1, 2.0, 0.5, 0.0, 3.0)), rack.now_s)
    machine._own_profile(J1, rack.now_s)
    assert J1 not in machine.profiles, "too few"
    machine.handle(Heard(H2, StepsMeasured(J1, 1, 1, 9, TIMINGS_MIN, 2.0, 0.5, 0.0, 3.0)), rack.now_s)
    machine._own_profile(J1, rack.now_s)
    assert J1 not in machine.profiles, "of another configuration"
    machine.handle(Heard(H2, StepsMeasured(J1, 1, 0, 9, TIMINGS_MIN, 2.0, 0.5, 0.0, 3.0)), rack.now_s)
    machine._own_profile(J1, rack.now_s)
    told = machine.profiles[J1].told
    assert (told.work_s, told.net_s) == (4.0, 0.4), "computing of all hosts; communication where nobody is waited for"
    machine.handle(Heard(H2, StepsMeasured(J1, 1, 0, 10, TIMINGS_MIN, 2.0, 0.5, 0.3, 3.0)), rack.now_s)
    machine._own_profile(J1, rack.now_s)
    assert machine.profiles[J1].told.net_s == 0.3, "in turns it is known who sends, and for how long"


def test_the_first_mini_batch_after_a_change_does_not_count() -> None:
    here = StepsHere(J1, 1, 3)
    here.stepped(StepTimed(J1, 1, 0, 0, 90.0, 60.0, 30.0, {}))
    assert here.told() is None
    for step in range(1, 4):
        here.stepped(StepTimed(J1, 1, 0, step, 3.0, 2.0, 0.5, {}))
    told = here.told()
    assert told is not None
    assert (told.timings, told.comp_s, told.comm_s, told.step_s) == (3, 2.0, 0.5, 3.0)


def test_what_sums_take_of_a_hosts_processors_counts_as_computing() -> None:
    """Whoever adds keeps other jobs from computing: each process of the job, and the host's aggd."""
    here = StepsHere(J1, 1, 3)
    for step in range(3):
        for rank, comp_s, added_s in ((0, 2.0, 0.25), (1, 1.0, 0.5)):
            here.stepped(StepTimed(J1, 1, rank, step, 3.0, comp_s, 0.5, {}, added_s=added_s))
    for table, worked_s in (("j1", 1.0), ("j1/1", 0.5)):
        here.summed(SumsWorked(J1, 1, JobId(table), 4, worked_s))
    told = here.told()
    assert told is not None and told.comp_s == pytest.approx(2.0 + 0.25 + 0.5 + (1.0 + 0.5) / 4)


def test_sums_of_a_table_that_left_this_host_keep_it_no_longer() -> None:
    here = StepsHere(J1, 1, 3)
    here.summed(SumsWorked(J1, 1, JobId("j1"), 4, 1.0))
    found = list[float]()
    for step in range(60):
        here.stepped(StepTimed(J1, 1, 0, step, 3.0, 2.0, 0.5, {}))
        found += [told.comp_s for told in (here.told(),) if told is not None]
    assert found[:16] == pytest.approx([2.25] * 16), "reports may be late"
    assert found[-1] == pytest.approx(2.0)


def test_a_pool_where_nothing_is_due_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands of pools, and each host goes through all of them each second."""
    rack = two_and_two()
    rack.run(400)
    seen = list[HostId]()
    for host, machine in rack.machines.items():
        monkeypatch.setattr(machine, "view", lambda *_, host=host: seen.append(host))
    rack.run(60)
    assert not seen, f"{len(seen)} looks in a minute"


def test_nothing_is_kept_of_a_pool_that_is_over() -> None:
    """Users choose the names."""
    for ends in ((J1, J2, J3, J4), (J4, J3, J2, J1)):
        rack = two_and_two()
        rack.run(150)
        for job in ends:
            rack.end(job)
            rack.run(1)
        for machine in rack.machines.values():
            kept = {name: value for name, value in vars(machine).items() if isinstance(value, dict) and value}
            assert not kept


def test_an_answer_to_another_wish_changes_nothing() -> None:
    machine = Pools(H1, random.Random(1), 600.0)
    assert not machine.handle(ArrangementsAnswered("groups/h1/9/9"), 1.0)
    assert not machine.handle(HostsNow(frozenset([H1]), frozenset([H1])), 1.0)
    assert not machine.handle(SecondBegan(), 2.0)


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 1 << 30))
def test_no_job_is_lost_and_no_host_has_two_orders_whatever_happens(seed: int) -> None:
    """Jobs come and end, hosts die, messages are late and lost."""
    rack = Rack(6, seed, loss=0.2, late_s=2.0, review_s=40.0)
    rng = rack.rng
    for _ in range(14):
        live = sorted(rack.machines)
        dice = rng.random()
        if dice < 0.4 and len(rack.jobs) < 5:
            hosts = rng.sample(live, min(len(live), rng.randint(1, 3)))
            name = JobId(f"j{rng.randint(1, 1 << 20)}")
            rack.begin(name, hosts, rng.uniform(0.5, 6), rng.uniform(0.1, 3), most=rng.choice((0, 6)))
        elif dice < 0.55 and len(rack.jobs) > 1:
            rack.end(rng.choice(sorted(rack.jobs)))
        elif dice < 0.65 and len(live) > 3:
            spared = {rack.hosts_of(job)[0] for job in rack.log if len(rack.hosts_of(job)) == 1}
            if victims := sorted(set(live) - spared):
                rack.kill(rng.choice(victims))
        rack.run(rng.randint(5, 40))
    fixed = [name for name, job in rack.log.items() if not job.workers]
    assert all(name not in wish.jobs for _, wish, _ in rack.wishes for name in fixed)


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_everybody_sees_the_same_groups_once_the_log_is_quiet(loss: float) -> None:
    rack = two_and_two(loss=loss)
    rack.run(300)
    seen = {tuple(groups_of(machine.jobs.values())) for machine in rack.machines.values()}
    assert len(seen) == 1
