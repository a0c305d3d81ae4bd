"""Coordinators and owners of a small rack together: trial, exact check, packing, reverting, emptying. By story, and by
hypothesis in any order and with lost messages."""

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from covey.core.ids import JobId
from plugins.aggregator.machine.process_words import ProcessDown
from plugins.aggregator.policy import scale
from plugins.aggregator.policy.profile import profile_of
from plugins.aggregator.policy.scale import OrphanedTensor
from tests.families import examples
from tests.plugins.aggregator.minirack import MiniRack


def shared(rack: MiniRack, *jobs: str) -> bool:
    """Whether one aggregator sums these jobs and no other has any of them."""
    owners = {tuple(rack.owners(job)) for job in jobs}
    return len(owners) == 1 and len(owners.pop()) == 1


def promised(rack: MiniRack, job: str) -> bool:
    return any(
        agent.owner.jobs[JobId(job)].demand is not None
        for agent in rack.agents.values()
        if JobId(job) in agent.owner.jobs
    )


def test_a_job_is_summed_on_trial_then_promised_what_it_was_measured_to_need() -> None:
    """Reference: §4.3.3.1."""
    rack = MiniRack(1, 3)
    rack.start("j1", 100_000, 20_000)
    rack.until(lambda: promised(rack, "j1"), 20)
    (host,) = rack.owners("j1")
    demand = rack.agents[host].owner.jobs[JobId("j1")].demand
    assert demand is not None and (demand.period_us, demand.limit_permille) == (100_000, 100)
    assert 20_000 <= demand.work_us <= 21_000
    assert rack.said("tensors keep their place")


def test_two_jobs_that_fit_share_an_aggregator_and_a_third_is_refused_there_in_words() -> None:
    rack = MiniRack(2, 4, cycles_max=1)
    rack.start("j1", 100_000, 20_000)
    rack.start("j2", 100_000, 30_000, ("h2",))
    rack.until(lambda: shared(rack, "j1", "j2") and promised(rack, "j1") and promised(rack, "j2"))
    (host,) = rack.owners("j1")
    rack.start("j3", 170_000, 1_000, ("h3",))
    rack.run(120)
    (apart,) = rack.owners("j3")
    assert apart != host and shared(rack, "j1", "j2")
    owner = rack.agents[apart].owner
    assert owner.emptier.refused[JobId("j3")] == f"{host}: in a cycle of 170000 us, j1 would lose 41.2% of its speed"


def test_a_third_job_that_would_overfill_is_refused_with_the_figures() -> None:
    """Reference: Pseudocode 3."""
    rack = MiniRack(3, 4)
    for at, work_us in enumerate((40_000, 35_000, 30_000), 1):
        rack.start(f"j{at}", 100_000, work_us, (f"h{at}",))
    rack.run(240)
    hosts = {host for job in ("j1", "j2", "j3") for host in rack.owners(job)}
    assert len(hosts) == 2, "all three do not fit on one, two do"
    said = [why for agent in rack.agents.values() for why in agent.owner.emptier.refused.values()]
    assert any("us of work and" in why and "us free in a cycle of 100000 us" in why for why in said), said


def test_a_job_that_is_slower_than_alone_makes_the_newest_beside_it_leave() -> None:
    """Reference: §4.3.3.2, §4.5.2.3."""
    rack = MiniRack(4, 3, scale_s=1e6)
    first = rack.start("j1", 50_000, 1_000)
    rack.until(lambda: promised(rack, "j1"))
    second = rack.start("j2", 50_000, 1_000, ("h2",))
    rack.until(lambda: shared(rack, "j1", "j2"), 60)  # the end of its trial lets the less loaded empty itself
    (both,) = rack.owners("j1")
    first.slowed = lambda at: 1.3 if shared(rack, "j1", "j2") else 1.0
    rack.until(lambda: not shared(rack, "j1", "j2"), 60)
    assert rack.owners("j1") != rack.owners("j2")
    (why,) = rack.said("tensors must leave")
    assert "j1 lost 2" in why and f"on {both}" in why and "came last" in why
    second.slowed = lambda at: 1.0
    rack.run(60)
    assert rack.owners("j1") != rack.owners("j2"), "who hurt does not come back while nothing has changed"


def test_an_end_lets_the_least_loaded_aggregator_empty_itself() -> None:
    """Reference: §4.3.3.3, job exit."""
    rack = MiniRack(5, 4, scale_s=1e6)
    for at, work_us in enumerate((60_000, 50_000, 20_000), 1):
        rack.start(f"j{at}", 100_000, work_us, (f"h{at}",))
    rack.run(90)
    assert len({host for job in ("j1", "j2", "j3") for host in rack.owners(job)}) == 2
    left = "j1" if not shared(rack, "j1", "j3") else "j2"
    other = "j2" if left == "j1" else "j1"
    rack.end(left)
    rack.run(20)
    assert shared(rack, other, "j3")


def test_a_job_that_nobody_has_room_for_is_summed_all_the_same_and_promised_nothing() -> None:
    rack = MiniRack(6, 1)
    rack.start("j1", 100_000, 80_000)
    rack.start("j2", 100_000, 80_000)
    rack.run(60)
    held = rack.agents["h1"].owner.jobs
    assert sorted(held) == ["j1", "j2"]
    assert sorted(one.demand is None for one in held.values()) == [False, True]
    assert rack.agents["h1"].owner.ledger.cycle.load <= 1
    assert any("80" in why for why in rack.agents["h1"].owner.refused.values())
    waits, goes = ("j1", "j2") if held[JobId("j1")].demand is None else ("j2", "j1")
    rack.end(goes)
    rack.until(lambda: promised(rack, waits), 60)


def test_a_lost_aggregators_job_is_checked_before_it_is_taken_over() -> None:
    """Reference: §4.6."""
    rack = MiniRack(7, 3, scale_s=1e6)
    rack.start("j1", 100_000, 60_000)
    rack.start("j2", 100_000, 60_000, ("h2",))
    rack.until(lambda: promised(rack, "j1") and promised(rack, "j2"))
    (full,) = rack.owners("j2")
    (dead,) = rack.owners("j1")
    rack.agents[dead].aggd.clear()
    rack.dispatch(dead, "owner", ProcessDown("killed"))
    rack.run(10)
    (taken,) = rack.owners("j1")
    assert taken not in (full, dead) and promised(rack, "j1")


def test_stale_gossip_costs_a_retry_and_never_an_overload() -> None:
    """All hosts are believed to have nothing to do."""
    declined = 0
    for seed in range(8):
        rack = MiniRack(seed, 4, scale_s=1e6)
        rack.run(2.0)
        stopped = rack.candidates()
        for at in range(1, 4):
            rack.start(f"j{seed}{at}", 200_000, 120_000, (f"h{at}",))  # whom equals are ranked by depends on names
            rack.run(20.0)
        rack.gossip = stopped
        rack.run(2.0)
        (dead,) = rack.owners(f"j{seed}1")
        rack.kill_aggd(dead)
        rack.run(20.0)
        assert all(promised(rack, job) for job in rack.scripts)
        assert len({host for job in rack.scripts for host in rack.owners(job)}) == 3
        declined += sum("us of work and" in why for why in rack.said("tensors declined"))
    assert declined > 2, "some were asked that had no room, and said so"


ACTS = st.one_of(
    st.tuples(
        st.just("start"), st.integers(1, 4), st.sampled_from([200_000, 250_000, 450_000, 500_000]), st.integers(0, 99)
    ),
    st.tuples(st.just("end"), st.integers(0, 5), st.just(0), st.just(0)),
    st.tuples(st.just("kill"), st.integers(1, 4), st.just(0), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 15), st.just(0), st.just(0)),
)


def play(rack: MiniRack, acts: list[tuple[str, int, int, int]]) -> None:
    count = 0
    for what, which, period_us, percent in acts:
        match what:
            case "start" if len(rack.scripts) < 6:
                count += 1
                rack.start(f"j{count}", period_us, period_us * percent // 100, (f"h{which}",))
            case "end" if rack.scripts:
                rack.end(sorted(rack.scripts)[which % len(rack.scripts)])
            case "kill":
                rack.kill_aggd(f"h{which}")
            case _:
                rack.run(which)
        rack.run(1.0)


@pytest.mark.parametrize(("loss", "disorder"), [(0.0, 0.0), (0.15, 0.0), (0.1, 0.2)])
@given(seed=st.integers(0, 1 << 16), acts=st.lists(ACTS, max_size=12))
@settings(max_examples=examples(12), deadline=None, phases=[Phase.explicit, Phase.generate])
def test_after_any_sequence_of_offers_ends_and_kills_every_job_has_exactly_one_owner(
    loss: float, disorder: float, seed: int, acts: list[Any]
) -> None:
    """`MiniRack.check` runs after every event: no job on two owners under one epoch, no promise above a cycle, nobody
    promised a loss at its limit."""
    rack = MiniRack(seed, 4, loss=loss, disorder=disorder, scale_s=15.0, trial_iterations=10)
    play(rack, acts)
    rack.loss = rack.disorder = 0.0
    rack.until(lambda: all(len(rack.owners(job)) == 1 and rack.owner_of(job) for job in rack.scripts), 90)
    rack.run(40)
    for job in rack.scripts:
        assert rack.owners(job) == [rack.owner_of(job)]
    for job in rack.over:
        assert rack.owners(job) == []
    assert not any(agent.owner.ledger.reserved for agent in rack.agents.values())


@given(seed=st.integers(0, 1 << 16))
@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_in_the_end_the_least_loaded_fits_nowhere_else(seed: int) -> None:
    """The rack comes by itself to a state where the rule of §4.3.3.3, applied to all it knows, has nothing left to
    empty."""
    rack = MiniRack(seed, 5, scale_s=10.0)
    for at in range(1, 6):
        rack.start(f"j{at}", 400_000, rack.rng.randrange(5, 70) * 4000, (f"h{at}",))
    rack.run(150)
    assert all(promised(rack, job) for job in rack.scripts)
    cycles = {agent.name: agent.owner.ledger.cycle for agent in rack.agents.values() if agent.owner.jobs}
    least = scale.least_loaded(cycles, {host: -at for at, host in enumerate(sorted(cycles))})
    assert least is not None
    demands = dict(rack.agents[least].owner.ledger.demands)
    works = [OrphanedTensor(job, "all", demand.work_us) for job, demand in demands.items()]
    profiles = {job: profile_of(job, demand) for job, demand in demands.items()}
    assert scale.emptied(least, works, cycles, profiles, {}) is None
    assert len(cycles) < 5 or sum(cycle.used_us for cycle in cycles.values()) > 2 * 400_000
