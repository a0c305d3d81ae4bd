"""The tuner of one job, as a story."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.events import LogEvent
from covey.core.ids import HostId, JobId
from plugins.tuner.machine.disjoint import (
    Available,
    BatchReported,
    DisjointAction,
    DisjointTuner,
    HostLost,
    HostsChanged,
    NicReported,
    Perform,
    StepDone,
    StepFailed,
)
from plugins.tuner.machine.figures import Figure
from plugins.tuner.policy.cost import Load
from plugins.tuner.policy.plan import Configuration
from plugins.tuner.policy.steps import Add, Move, Recover, Start
from tests.families import examples

H = [HostId(f"h{n}") for n in range(8)]
FAST = Available("fast", 1.25e8)
SLOW = Available("slow", 1.25e8)


def tuner(workers: int = 2, hosts: int = 6) -> DisjointTuner:
    now = Configuration(
        {host: "worker" if n < workers else "server" for n, host in enumerate(H[:hosts])},
        {H[n]: tuple(range(n * 6, n * 6 + 6)) for n in range(workers)},
        {H[n]: (n,) for n in range(workers, hosts)},
    )
    return DisjointTuner(JobId("j1"), Load(1e6, 1e7, 1e4), now, dict.fromkeys(H[:hosts], FAST), batches_min=3)


def timed(of: DisjointTuner, times: int, sample_s: float = 2e-3) -> list[DisjointAction]:
    actions: list[DisjointAction] = []
    for _ in range(times):
        for host in sorted(host for host, role in of.roles.items() if role == "worker"):
            actions += of.handle(BatchReported(host, 10_000, 10_000 * sample_s), 0.0)
    of.check()
    return actions


def finish(of: DisjointTuner, actions: list[DisjointAction], rng: random.Random) -> None:
    orders = [each for each in actions if isinstance(each, Perform)]
    while orders:
        order = orders.pop(rng.randrange(len(orders)))
        if rng.random() < 0.2:
            orders += [a for a in of.handle(StepFailed(order.plan, order.at, "busy"), 0.0) if isinstance(a, Perform)]
        else:
            orders += [a for a in of.handle(StepDone(order.plan, order.at), 0.0) if isinstance(a, Perform)]
        of.check()


def test_nothing_is_decided_before_every_worker_has_timed_enough() -> None:
    """Reference: §3.4.1, optimizer setup."""
    of = tuner()
    for _ in range(9):
        assert of.handle(BatchReported(H[0], 10_000, 20.0), 0.0) == []
    assert of.handle(BatchReported(H[1], 10_000, 20.0), 0.0) == []
    assert of.handle(BatchReported(H[1], 10_000, 20.0), 0.0) == []
    assert of.handle(BatchReported(H[1], 10_000, 20.0), 0.0)


def test_a_bad_split_is_left_and_the_next_measurements_keep_the_good_one() -> None:
    of = tuner()
    finish(of, timed(of, 3), random.Random(1))
    assert sum(role == "worker" for role in of.roles.values()) == 5
    kept = timed(of, 3)
    assert [each.event for each in kept if isinstance(each, LogEvent)] == ["Kept"]
    assert of.plan is None


def test_more_hosts_are_used_and_hosts_that_leave_are_emptied_first() -> None:
    """Reference: §3.4.4, utilizing opportunistic resources."""
    of = tuner()
    finish(of, timed(of, 3), random.Random(2))
    of.handle(HostsChanged(dict.fromkeys(H, FAST)), 0.0)
    finish(of, timed(of, 3), random.Random(3))
    assert set(of.roles) == set(H)
    actions = list(of.handle(HostsChanged(dict.fromkeys(H[:5], FAST)), 0.0))
    finish(of, actions, random.Random(4))
    assert set(of.roles) == set(H[:5])


def test_answers_to_another_plan_or_twice_change_nothing() -> None:
    of = tuner()
    orders = [each for each in timed(of, 3) if isinstance(each, Perform)]
    assert of.handle(StepDone(orders[0].plan + 1, orders[0].at), 0.0) == []
    assert of.handle(StepFailed(orders[0].plan + 1, orders[0].at, "late"), 0.0) == []
    assert of.done == set()
    of.handle(StepDone(orders[0].plan, orders[0].at), 0.0)
    before = of.now
    assert of.handle(StepDone(orders[0].plan, orders[0].at), 0.0) == []
    assert of.now == before
    finish(of, list(orders[1:]), random.Random(1))
    for event in (StepDone(1, 0), StepFailed(1, 0, "late")):
        assert of.handle(event, 0.0) == [] and of.plan is None


def test_a_measurement_moves_the_average_by_a_fifth() -> None:
    """Reference: §3.3.1, metric collection."""
    of = tuner()
    for seconds in range(1, 9):
        of.handle(BatchReported(H[0], 1, float(seconds)), 0.0)
    assert of.sample_s[H[0]].mean == pytest.approx(4.8388608)
    for rate in (1e8, 1e8, 2e8, 1e8, 1e8):
        of.handle(NicReported(H[5], rate), 0.0)
    assert of.nic[H[5]].mean == pytest.approx(1.128e8)
    assert {host.nic_bytes_per_s for host in of.hosts()} == {of.nic[H[5]].mean}, (
        "the only one of its kind that is known"
    )


def test_a_host_that_has_not_worked_is_like_those_of_its_kind_else_like_the_median() -> None:
    of = tuner(3)
    of.handle(
        HostsChanged({H[0]: FAST, H[1]: SLOW, H[2]: SLOW, H[3]: FAST, H[4]: SLOW, H[5]: Available("new", 1e8)}), 0
    )
    for host, seconds in ((H[0], 1.0), (H[1], 10.0), (H[2], 30.0)):
        for _ in range(3):
            of.handle(BatchReported(host, 1, seconds), 0.0)
    assert [host.sample_s for host in of.hosts()] == [1.0, 10.0, 30.0, 1.0, 20.0, 10.0]


def test_hosts_of_a_kind_that_differ_by_chance_are_equal_and_a_slow_one_is_not() -> None:
    rng = random.Random(5)
    of = tuner(5)
    for _ in range(40):
        for host in H[:5]:
            slower = 1.5 if host == H[4] else 1.0
            of._timed(BatchReported(host, 1, slower * rng.lognormvariate(0, 0.1)))
    sample_s = {host.host: host.sample_s for host in of.hosts()}
    assert len({sample_s[host] for host in (*H[:4], H[5])}) == 1
    assert sample_s[H[4]] > 1.3 * sample_s[H[0]]


def test_measurements_that_fluctuate_do_not_move_blocks_for_ever() -> None:
    """Reference: §3.3.1, a threshold against oscillating."""
    rng = random.Random(7)
    of = tuner()
    for _ in range(300):
        for host in sorted(of.computing):
            finish(of, list(of.handle(BatchReported(host, 10_000, 20 * rng.lognormvariate(0, 0.1)), 0.0)), rng)
    assert of.plans <= 2


def test_after_a_decision_every_worker_measures_anew() -> None:
    of = tuner()
    finish(of, timed(of, 3), random.Random(1))
    assert [each.event for each in timed(of, 3) if isinstance(each, LogEvent)] == ["Kept"]
    assert timed(of, 2) == []
    assert [each.event for each in timed(of, 1) if isinstance(each, LogEvent)] == ["Kept"]


def test_what_is_timed_while_blocks_move_does_not_count_for_the_next_decision() -> None:
    """Decisions need a set of batches of the configuration that is to be judged. Reference: §3.4.1, optimizer setup."""
    of = tuner()
    orders = timed(of, 3)
    assert of.plan is not None
    assert timed(of, 3) == []
    finish(of, orders, random.Random(1))
    assert timed(of, 2) == []
    assert [each.event for each in timed(of, 1) if isinstance(each, LogEvent)] == ["Kept"]


def test_what_was_timed_is_kept_when_hosts_join() -> None:
    of = tuner()
    assert timed(of, 2) == []
    assert of.handle(HostsChanged(dict.fromkeys(H, FAST)), 0.0) == []
    found = timed(of, 1)
    assert [each.event for each in found if isinstance(each, LogEvent)] == ["Reconfigured"]


def test_what_a_host_timed_before_it_left_does_not_count_when_it_is_back() -> None:
    of = tuner()
    assert timed(of, 2) == []
    assert of.handle(HostsChanged({H[0]: FAST}), 0.0) == [], "one host has nothing to be split"
    assert of.handle(HostsChanged(dict.fromkeys(H[:6], FAST)), 0.0) == []
    assert timed(of, 2) == [] and timed(of, 1)


def test_a_timing_of_nothing_in_no_time_or_by_who_has_no_part_in_it_is_dropped() -> None:
    of = tuner()
    for host, samples, seconds in ((H[7], 10, 1.0), (H[0], 0, 1.0), (H[0], -1, 1.0), (H[0], 10, 0.0), (H[0], 10, -1.0)):
        for _ in range(9):
            assert of.handle(BatchReported(host, samples, seconds), 0.0) == []
    assert of.sample_s == {} and of.batches == {}
    assert timed(of, 2) == [] and timed(of, 1)


def test_a_server_that_computes_is_measured_but_not_waited_for() -> None:
    of = tuner()
    for _ in range(3):
        assert of.handle(BatchReported(H[5], 10_000, 20.0), 0.0) == []
    assert of.sample_s[H[5]].mean == pytest.approx(2e-3), "seconds of one sample"
    assert of.batches == {}


def test_before_anything_is_measured_computing_is_taken_for_as_slow_as_the_network() -> None:
    found = tuner().hosts()
    assert [host.sample_s for host in found] == [pytest.approx(1e7 / 1.25e8 / 1e4)] * 6
    assert [host.nic_bytes_per_s for host in found] == [1.25e8] * 6


def test_a_host_is_like_its_kind_until_it_was_measured_often_enough() -> None:
    of = tuner(5)
    for count, expected in ((2, 1.0), (1, 3.0)):
        for _ in range(count):
            for host in H[:5]:
                of._timed(BatchReported(host, 1, 3.0 if host == H[4] else 1.0))
        assert {host.host: host.sample_s for host in of.hosts()}[H[4]] == expected


def test_the_story_says_what_an_epoch_was_and_will_be_and_why_blocks_move() -> None:
    """Each worker has six of twelve blocks, then each of five has three at most. Reference: §3.2.2, equation 3.1."""
    of = tuner()
    found = timed(of, 3)
    assert of.epoch_s(of.hosts()) == pytest.approx(5e5 * (2e-3 + 0.08 / 1e4))
    (note,) = [each for each in found if isinstance(each, LogEvent)]
    assert note.reason == "5 workers and 1 servers: 510 s an epoch; was 1e+03 s"
    finish(of, found, random.Random(1))
    told = [each for each in of.handle(HostsChanged(dict.fromkeys(H[1:], FAST)), 0.0) if isinstance(each, LogEvent)]
    assert told[0].reason.endswith("; h0 must leave")


def test_what_is_not_worth_a_change_is_kept_and_the_story_says_what_could_be_had() -> None:
    """Reference: §3.3.1, a threshold."""
    of = tuner()
    of.gain_min = 0.9
    (note,) = timed(of, 3)
    assert isinstance(note, LogEvent) and note.event == "Kept" and "the best would be" in note.reason
    assert of.plan is None and sum(role == "worker" for role in of.roles.values()) == 2


def test_hosts_that_come_while_blocks_move_wait_until_these_are_there() -> None:
    of = tuner()
    orders = timed(of, 3)
    before = of.plan
    assert of.handle(HostsChanged(dict.fromkeys(H, FAST)), 0.0) == []
    assert of.plan is before and of.plans == 1
    finish(of, orders, random.Random(1))
    assert set(of.roles) == set(H[:6])
    finish(of, timed(of, 3), random.Random(1))
    assert set(of.roles) == set(H)


def test_of_equal_hosts_those_keep_their_role_that_have_it() -> None:
    """No block moves for the sake of a name; this rule is Covey's own."""
    now = Configuration(
        {host: "worker" if n >= 4 else "server" for n, host in enumerate(H[:6])},
        {H[n]: tuple(range(n * 6 - 24, n * 6 - 18)) for n in (4, 5)},
        {H[n]: (n,) for n in range(4)},
    )
    of = DisjointTuner(JobId("j1"), Load(1e6, 1e7, 1e4), now, dict.fromkeys(H[:6], FAST), batches_min=3)
    finish(of, timed(of, 3), random.Random(1))
    assert sorted(of.roles.values()) == ["server", *["worker"] * 5]
    assert of.roles[H[4]] == of.roles[H[5]] == "worker"


def test_a_host_differs_from_its_kind_by_a_twentieth_and_by_more_than_chance() -> None:
    """The error of an average with weights that fall by a fifth is a third of a single measurement's; Covey's own
    rule."""
    for kind, own, differs in ((1.0, 1.04, False), (1.0, 1.06, True), (10.0, 10.4, False), (10.0, 9.4, True)):
        assert Figure(own, 0.0, 10).differs(kind) is differs
    assert not Figure(1.19, 0.01, 10).differs(1.0)
    assert Figure(1.21, 0.01, 10).differs(1.0)


# ---- lost hosts ------------------------------------------------------------------------------------------------------


def performs(actions: Sequence[DisjointAction]) -> list[Perform]:
    return [each for each in actions if isinstance(each, Perform)]


def test_what_a_lost_host_owned_is_recovered_by_hosts_of_its_role() -> None:
    of = tuner(3)
    found = list(of.handle(HostLost(H[0]), 0.0))
    assert [each.step for each in performs(found)] == [
        Recover("data", H[1], (0, 1, 2)),
        Recover("data", H[2], (3, 4, 5)),
    ]
    of.check()
    assert of.now.data[H[1]] == (0, 1, 2, 6, 7, 8, 9, 10, 11), "it owns them at once"
    finish(of, found, random.Random(1))
    assert of.plan is None and H[0] not in of.roles and H[0] not in of.available
    assert of.handle(HostLost(H[0]), 0.0) == []


def test_a_host_that_is_about_to_leave_inherits_nothing() -> None:
    of = tuner(3)
    of.handle(HostsChanged({host: FAST for host in H[:6] if host != H[2]}), 0.0)
    found = performs(of.handle(HostLost(H[0]), 0.0))
    heirs = {each.step.host for each in found if isinstance(each.step, Recover) and each.step.kind == "data"}
    assert heirs and H[2] not in heirs


def test_without_a_server_a_worker_takes_the_model_and_a_new_plan_is_made_at_once() -> None:
    of = tuner(2, 3)
    found = list(of.handle(HostLost(H[2]), 0.0))
    assert [each.step for each in performs(found)] == [Recover("model", H[0], (2,))]
    finish(of, found, random.Random(1))
    assert sorted(of.roles.values()) == ["server", "worker"]
    (server,) = (host for host, role in of.roles.items() if role == "server")
    assert of.now.model[server] == (2,) and len(of.computing) == 1


def test_a_move_from_or_to_a_lost_host_is_not_ordered_again() -> None:
    """What was on its way reaches the host it was sent to; what was sent to a dead host stays, and is read again."""
    for lost_end in ("source", "target"):
        of = tuner()
        plan = performs(timed(of, 3))
        while not (moves := [each for each in plan if isinstance(each.step, Move)]):
            plan += performs(of.handle(StepDone(plan[0].plan, plan.pop(0).at), 0.0))
        order = moves[0]
        assert isinstance(order.step, Move)
        lost = order.step.source if lost_end == "source" else order.step.target
        stays = order.step.target if lost_end == "source" else order.step.source
        found = performs(of.handle(HostLost(lost), 0.0))
        of.check()
        kept = [each.step for each in found if isinstance(each.step, Recover) and each.step.host == stays]
        assert any(set(order.step.blocks) <= set(each.blocks) for each in kept)
        assert of.handle(StepFailed(order.plan, order.at, "dead"), 0.0) == []
        assert of.handle(StepDone(order.plan, order.at), 0.0) == []
        of.check()


def test_who_broke_off_before_its_start_is_started_by_the_next_plan() -> None:
    of = tuner()
    plan = performs(timed(of, 3))
    joining = sorted(host for host in H[:6] if of.plan is not None and Start(host) in of.plan.steps)
    plan += performs(of.handle(HostLost(H[0]), 0.0))
    finish(of, list(plan), random.Random(3))
    assert set(joining) & of.computing == {host for host in joining if of.roles.get(host) == "worker"} != set()


def test_when_all_are_lost_the_blocks_wait_for_the_next_hosts() -> None:
    of = tuner(1, 2)
    assert list(of.handle(HostLost(H[0]), 0.0))
    of.handle(HostLost(H[1]), 0.0)
    of.check()
    assert of.roles == {} and (len(of.orphans["data"]), len(of.orphans["model"])) == (6, 1)
    found = list(of.handle(HostsChanged(dict.fromkeys(H[2:4], FAST)), 0.0))
    assert [type(each.step) for each in performs(found)] == [Add], "first it must be there"
    finish(of, found, random.Random(1))
    assert sorted(of.roles) == H[2:4] and sorted(of.roles.values()) == ["server", "worker"]
    assert of.orphans == {"data": (), "model": ()}


def test_data_without_an_owner_waits_for_the_next_hosts_also_when_no_model_is_lost() -> None:
    now = Configuration({H[0]: "worker"}, {H[0]: (0, 1)}, {})
    of = DisjointTuner(JobId("j1"), Load(1e6, 1e7, 1e4), now, {H[0]: FAST}, batches_min=3)
    of.handle(HostLost(H[0]), 0.0)
    assert of.orphans == {"data": (0, 1), "model": ()}
    finish(of, list(of.handle(HostsChanged(dict.fromkeys(H[2:4], FAST)), 0.0)), random.Random(1))
    assert of.orphans == {"data": (), "model": ()} and sum(map(len, of.data.values())) == 2
    assert sorted(of.roles) == H[2:4]


def test_a_host_that_is_being_added_is_not_added_twice() -> None:
    of = tuner(1, 2)
    of.handle(HostsChanged(dict.fromkeys(H[:3], FAST)), 0.0)
    added = [each for each in performs(timed(of, 3)) if each.step == Add(H[2], "worker")]
    assert len(added) == 1
    assert performs(of.handle(HostLost(H[0]), 0.0)) and performs(of.handle(HostLost(H[1]), 0.0)) == []
    of.check()
    found = list(of.handle(StepDone(added[0].plan, added[0].at), 0.0))
    assert {type(each.step) for each in performs(found)} == {Recover}
    finish(of, found, random.Random(1))
    assert (len(of.data[H[2]]), len(of.model[H[2]])) == (6, 1)


@settings(max_examples=examples(150), deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_every_prefix_of_a_plan_with_a_loss_at_any_point_leaves_one_owner_per_block(seed: int) -> None:
    rng = random.Random(seed)
    hosts = rng.randrange(3, 7)
    of = tuner(rng.randrange(1, hosts), hosts)
    orders = performs(timed(of, 3, rng.uniform(1e-5, 1e-2)))
    losses = rng.randrange(1, hosts + 1)
    for _ in range(400):
        if losses and rng.random() < 0.15:
            losses -= 1
            lost = rng.choice(sorted({*of.available, *of.roles}) or H)
            orders += performs(of.handle(HostLost(lost), 0.0))
            orders = [each for each in orders if of.plan is not None and each.at not in of.done]
        elif len(of.available) < 2 or rng.random() < 0.02:
            back = sorted({*of.available, *rng.sample(H, 3)})
            orders += performs(of.handle(HostsChanged(dict.fromkeys(back, FAST)), 0.0))
        elif orders:
            order = orders.pop(rng.randrange(len(orders)))
            if rng.random() < 0.1:
                orders += performs(of.handle(StepFailed(order.plan, order.at, "busy"), 0.0))
            else:
                orders += performs(of.handle(StepDone(order.plan, order.at), 0.0))
        elif not losses:
            break
        of.check()
    assert of.plan is None and not orders, "it comes to an end"
    workers = {host for host, role in of.roles.items() if role == "worker"}
    assert workers == of.computing and 0 < len(workers) < len(of.roles)
    assert set(of.roles) <= set(of.available), "who is lost has no part in it"
    assert {host for host, owned in of.data.items() if owned} <= workers
    assert not workers & {host for host, owned in of.model.items() if owned}
    assert not any(of.orphans.values())


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_whatever_happens_every_block_has_one_owner(seed: int) -> None:
    rng = random.Random(seed)
    of = tuner(rng.randrange(1, 5))
    orders: list[Perform] = []
    for _ in range(60):
        kind = rng.randrange(6)
        if kind == 5:
            found = of.handle(HostLost(rng.choice(H)), 0.0)
        elif kind == 0 and orders:
            order = orders.pop(rng.randrange(len(orders)))
            found = of.handle(StepDone(order.plan, order.at), 0.0)
        elif kind == 1:
            found = of.handle(HostsChanged(dict.fromkeys(rng.sample(H, rng.randrange(2, 9)), FAST)), 0.0)
        elif kind == 2:
            found = of.handle(NicReported(rng.choice(H), rng.uniform(1e7, 1e9)), 0.0)
        else:
            found = timed(of, 3, rng.uniform(1e-5, 1e-2))
        orders += [each for each in found if isinstance(each, Perform)]
        of.check()
