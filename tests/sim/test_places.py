"""Gangs on hosts: the product's own placement, what a spread gang loses, and that hosts alone change no time."""

import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.ids import HostId
from plugins.scheduler.policy.rules import OrderRules
from sim.jobs import jobs as simulator
from sim.jobs.engine import RESUME, RUN, SUSP, Engine, SimJob
from sim.jobs.engine_baselines import engine_for
from sim.jobs.engine_places import SKEWS, Floor, Placing
from sim.jobs.trace import read_trace
from sim.main import main
from tests.families import examples

TRACES = Path(__file__).parents[2] / "bench" / "traces"
HEAD = "job_id,submit_time_s,num_gpus,duration_s"
HALF = Placing(slowdown=Fraction(1, 2))


def on(hosts: int, gpus_each: int, jobs: Sequence[SimJob], policy: str = "fjf", placing: Placing = HALF) -> Engine:
    plan = simulator.plan_of(policy, {})
    engine = engine_for(plan.rules)(jobs, hosts * gpus_each, plan.rules)
    engine.on_hosts(hosts, placing)
    return engine


def ran(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["jobs", *argv, "--json", "--quiet"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_skewed_gang_that_is_spread_takes_longer_and_others_do_not() -> None:
    """Reference: Gu 2021, §3.3.3: the VGG family and AlexNet lose by being spread, the others do not."""
    jobs = [
        SimJob("a", 0, 1, 100),
        SimJob("b", 0, 3, 100, skew=0.7),
        SimJob("even", 200, 2, 100),
        SimJob("skewed", 200, 2, 100, skew=0.7),
    ]
    # a and b fill the two hosts of two: b cannot be on one host in any case, so it needs two and is not spread
    out = on(2, 2, jobs).run()
    assert out.end_s == [100, 100, 300, 300]
    gaps = [
        SimJob("a", 0, 1, 300),
        SimJob("b", 0, 2, 300, skew=0.1),
        SimJob("c", 1, 2, 100, skew=0.7),
        SimJob("d", 2, 1, 50),
    ]
    engine = on(3, 2, gaps)
    out = engine.run()  # a: one of a host; b: the gap beside it and one of the next; c: a whole host is left
    assert out.end_s == [300, 300, 101, 52]
    assert engine.floor is not None and engine.floor.tally.spread == 1 and engine.floor.tally.skewed_spread == 0
    narrow = [SimJob("a", 0, 1, 300), SimJob("b", 0, 1, 300, skew=0.9), SimJob("c", 0, 2, 300, skew=0.7)]
    narrow += [SimJob("d", 1, 2, 100, skew=0.7)]
    full = on(2, 3, narrow)
    assert full.run().end_s == [300, 300, 300, 151], "one GPU is left on each host: half as long again"
    assert full.floor is not None and full.floor.tally.lost_gpu_s == 100


def test_an_unknown_gang_is_packed_and_one_spread_needlessly_is_counted() -> None:
    jobs = [SimJob(str(at), 0, 7, 100) for at in range(3)] + [SimJob("gang", 1, 8, 100)]
    engine = on(4, 8, jobs)
    engine.run()
    assert engine.floor is not None
    assert (engine.floor.tally.spread, engine.floor.tally.needless, engine.floor.tally.hosts) == (0, 0, 4)
    engine = on(4, 8, jobs, placing=Placing(skew=0.0))
    engine.run()
    assert engine.floor is not None
    found = engine.floor.tally.found()
    assert (found["gangs_spread"], found["nodes_per_spread_gang_mean"]) == (3, 2.0), "each lies across a gap"
    assert found["gangs_spread_needlessly"] == 3


def test_the_trace_says_what_a_gang_loses_and_the_setting_speaks_for_the_others() -> None:
    wide = [SimJob("a", 0, 1, 50), SimJob("c", 0, 4, 50, skew=0.1)]
    assert on(2, 3, [*wide, SimJob("d", 100, 2, 100, skew=0.7, spread_slowdown=Fraction(3))]).run().end_s[-1] == 200
    blockers = [SimJob("a", 0, 2, 300), SimJob("b", 0, 2, 300)]
    packed = Placing(packlimit=0.0, skew=0.2, slowdown=Fraction(1, 2))
    spread = [SimJob("d", 1, 2, 100, skew=0.7, spread_slowdown=Fraction(3)), SimJob("e", 500, 2, 100, skew=0.7)]
    assert on(2, 3, [*blockers, *spread], placing=packed).run().end_s == [300, 300, 401, 600]


def test_a_gang_that_is_stopped_and_placed_better_goes_on_at_its_own_pace() -> None:
    jobs = [
        SimJob("a", 0, 2, 100),
        SimJob("b", 0, 2, 100),
        SimJob("slow", 0, 2, 1000, skew=0.7),
        SimJob("first", 90, 6, 10),
    ]
    rules = OrderRules(discipline="srtf", preempt_s=0, restore_s=0)
    engine = Engine(jobs, 6, rules)
    engine.on_hosts(2, Placing(packlimit=0.5, skew=0.6, slowdown=Fraction(1, 2)))
    out = engine.run()
    # slow runs spread until 90 (60 s of work), is stopped for `first`, and then has a host to itself
    assert out.first_s[2] == 0 and out.preempted[2] >= 1
    assert engine.floor is not None and engine.floor.work[2] == 0
    assert 1000 + 10 < out.end_s[2] <= 1000 + 10 + 30 + 10


def test_a_single_gpu_goes_where_it_leaves_the_least() -> None:
    floor = Floor(2, 4, Placing(), lambda job: ((3, None, None), (1, 0.9, None))[job])
    assert floor.put(0, 10) == 10 and floor.put(1, 10) == 10
    assert floor.free == {HostId("1"): 4}, "the gap beside the first, not the empty host"
    floor.lift(0, 0)
    floor.lift(1, 0)
    floor.check()
    assert floor.tally.gangs == 1


asked = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 6), st.integers(1, 60), st.sampled_from([None, 0.1, 0.7])),
    min_size=1,
    max_size=14,
)


@settings(max_examples=examples(60))
@given(asked, st.sampled_from(simulator.POLICIES), st.sampled_from([(3, 2), (2, 3), (6, 1), (1, 6)]))
def test_hosts_alone_change_no_time(
    jobs: list[tuple[int, int, int, float | None]], policy: str, size: tuple[int, int]
) -> None:
    given_ = [SimJob(at, s, w, d, None, "", skew) for at, (s, w, d, skew) in enumerate(jobs)]
    plan = simulator.plan_of(policy, {})
    alike = engine_for(plan.rules)(given_, 6, plan.rules, simulator.history_of(plan, given_)).run()
    engine = engine_for(plan.rules)(given_, 6, plan.rules, simulator.history_of(plan, given_))
    engine.on_hosts(*size[:1], Placing())
    assert engine.run() == alike


class Watched(Engine):
    """An engine that checks the floor after every decision."""

    def _decide(self) -> None:
        super()._decide()
        assert self.floor is not None
        self.floor.check()
        held = {job for job, state in enumerate(self.state) if state in (RUN, RESUME, SUSP)}
        assert set(self.floor.placed) == held, "who holds GPUs has a place, and nobody else"
        for job, placed in self.floor.placed.items():
            assert sum(placed.hosts.values()) == self.width[job]


@settings(max_examples=examples(80))
@given(asked, st.sampled_from(["covey", "dlas", "las", "srtf", "srsf", "fifo"]), st.fractions(0, 3), st.integers(0, 3))
def test_every_gang_is_somewhere_whole_and_does_all_its_work(
    jobs: list[tuple[int, int, int, float | None]], policy: str, slowdown: Fraction, cost_s: int
) -> None:
    given_ = [SimJob(at, s, w, d, None, "", skew) for at, (s, w, d, skew) in enumerate(jobs)]
    more = {} if policy == "fifo" else {"preempt": f"{cost_s}", "restore": f"{cost_s}"}
    rules = simulator.plan_of(policy, more).rules
    engine = Watched(given_, 6, rules)
    engine.on_hosts(3, Placing(slowdown=slowdown))
    out = engine.run()
    assert engine.floor is not None and not engine.floor.placed
    assert all(work == 0 for work in engine.floor.work.values())
    for job, end in zip(given_, out.end_s, strict=True):
        ran_s = end - job.submit_s - out.wait_s[job.id if isinstance(job.id, int) else 0]
        assert ran_s >= job.duration_s
        most = math.ceil(job.duration_s * (1 + slowdown)) + 1
        overhead = out.preempted[int(job.id)] * (2 * cost_s + 1)
        assert ran_s <= (most if job.gpus > 1 and (job.skew or 0) > 0.3 else job.duration_s) + overhead


def test_what_placement_came_to_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--trace", str(TRACES / "muri_cluster400.csv.gz"), "--policy", "covey", "--set", "gang_patience=inf"]
    alike = ran(capsys, *base, "--gpus", "64")
    hosts = ran(capsys, *base, "--gpus", "8x8")
    assert "nodes_per_gang_mean" not in alike
    assert hosts["jct_s_mean"] == alike["jct_s_mean"] and (hosts["hosts"], hosts["gpus_per_host"]) == (8, 8)
    assert 1 <= hosts["nodes_per_gang_fewest_mean"] < hosts["nodes_per_gang_mean"]
    assert 0 < hosts["gangs_skewed_spread"] <= hosts["gangs_skewed"] <= hosts["gang_starts"]
    slow = ran(capsys, *base, "--gpus", "8x8", "--set", "spread_slowdown=1")
    loose = ran(capsys, *base, "--gpus", "8x8", "--set", "spread_slowdown=1", "--set", "packlimit=1")
    assert loose["gangs_skewed_spread"] / loose["gangs_skewed"] > slow["gangs_skewed_spread"] / slow["gangs_skewed"]
    assert slow["spread_lost_gpu_s"] > 0 and slow["jct_s_mean"] > alike["jct_s_mean"]
    assert slow["settings"]["spread_slowdown"] == 1


def test_skew_is_read_from_its_column_or_from_the_model(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(f"{HEAD},skew,model,spread_slowdown\na,0,2,5,0.4,vgg16,\nb,0,2,5,,VGG16,0.25\nc,0,2,5,,dqn,0\n")
    found = read_trace(file).jobs
    assert [job.skew for job in found] == [0.4, SKEWS["vgg16"], None]
    assert [job.spread_slowdown for job in found] == [None, Fraction(1, 4), Fraction(0)]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--gpus", "8", "--set", "spread_slowdown=0.5"], "gangs on hosts"),
        (["--gpus", "4x2", "--set", "spread_slowdown=-1"], "--set spread_slowdown=-1"),
        (["--gpus", "4x2", "--set", "packlimit=2"], "not from 0 to 1"),
        (["--gpus", "4x2", "--set", "skew=much"], "bytes of the largest tensor"),
    ],
)
def test_settings_of_places_are_checked(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "--trace", str(TRACES / "tiresias_60.csv.gz"), *argv]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("column", "text"), [("skew", "1.5"), ("skew", "x"), ("spread_slowdown", "-1")])
def test_a_broken_number_is_refused_with_its_place(
    column: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text(f"{HEAD},{column}\na,0,1,5,\nb,0,1,5,{text}\n")
    assert main(["jobs", "--trace", str(tmp_path / "t.csv"), "--gpus", "4"]) == 2
    assert f"line 3, column {column}: '{text}'" in capsys.readouterr().err
