"""`covey-sim jobs`: every policy runs, what it reports adds up, and what cannot be used is refused with its place."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.scheduler.policy.rules import COVEY, OrderRules
from sim.jobs import jobs as simulator
from sim.jobs.engine import SimJob
from sim.jobs.engine_baselines import Backfill, Slices, engine_for
from sim.jobs.foreseen import calibration
from sim.jobs.sharing_cluster import Cluster, Sharing
from sim.jobs.trace import read_services, read_trace
from sim.main import main
from sim.report import Wrong

TRACES = Path(__file__).parents[2] / "bench" / "traces"
SMALL = TRACES / "tiresias_60.csv.gz"
FIELDS = ("jobs", "jct_s_mean", "jct_s_p50", "jct_s_p95", "wait_s_mean", "makespan_s", "preemptions", "gpu_utilization")


def ran(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["jobs", *argv, "--json", "--quiet"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["jobs", *argv]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "why:" in said.err and "next:" in said.err
    return said.err


@pytest.mark.parametrize("policy", simulator.POLICIES)
def test_every_policy_ends_every_job_and_reports_it(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = ran(capsys, "--trace", str(SMALL), "--gpus", "4x2", "--policy", policy)
    assert all(field in found for field in FIELDS)
    fits = [job for job in read_trace(SMALL).jobs if job.gpus <= 8]
    assert (found["jobs"], found["left_out_too_wide"]) == (len(fits), 60 - len(fits))
    assert found["jct_s_mean"] >= sum(job.duration_s for job in fits) / len(fits)
    assert found["jct_s_p50"] <= found["jct_s_p95"] <= found["jct_s_max"] <= found["makespan_s"]
    assert 0 < found["gpu_utilization"] <= found["gpu_held"] + 1e-9
    assert found["gpu_held"] <= 1 + 1e-9


def test_starts_are_foreseen_from_what_ended_before_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "ASKED", 4)
    known = calibration.AskedLive._ask

    def ask(live: calibration.AskedLive) -> None:
        over = [at for at, end_s in enumerate(live.out.end_s) if end_s]
        assert live.past.lengths.count == len(over) and all(live.out.end_s[at] <= live.now for at in over)
        known(live)

    monkeypatch.setattr(calibration.AskedLive, "_ask", ask)
    found = ran(capsys, "--trace", str(SMALL), "--gpus", "2x8", "--eta")
    assert found["asked"] >= found["told_p50"] >= found["told_p90"] > 0 and found["p50_s_median"] > 0
    assert found["by_p50"] <= found["by_p90"] <= 1
    assert "--policy covey" in refused(capsys, "--trace", str(SMALL), "--gpus", "16", "--eta", "--policy", "fifo")
    assert "leave it out" in refused(capsys, "--trace", str(SMALL), "--gpus", "16", "--eta", "--set", "sharing=on")


def test_the_published_policy_is_said_with_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ran(capsys, "--trace", str(SMALL), "--gpus", "16", "--policy", "las-published")["settings"]
    assert settings == {
        "thresholds_gpu_s": [3200], "inside": "first", "narrow_first": False, "knob": "inf", "starve_limit_s": "inf",
        "gang_patience_s": "inf",
        "preempt_s": 30, "restore_s": 30,
    }  # fmt: skip


def test_settings_change_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--trace", str(TRACES / "tiresias480r_seed1.csv.gz"), "--gpus", "60", "--policy", "dlas"]
    costly, free = ran(capsys, *base), ran(capsys, *base, "--set", "preempt=0", "--set", "restore=0")
    assert free["jct_s_mean"] * 480 == 783477, "the exact vector of this trace"
    assert costly["jct_s_mean"] > free["jct_s_mean"]
    shared = ran(capsys, *base[:-2], "--set", "sharing=on", "--set", "interference=0.02")
    assert shared["jct_s_mean"] < free["jct_s_mean"] and shared["settings"]["interference"] == 0.02
    worse = ran(capsys, *base[:-2], "--set", "sharing=on", "--set", "interference=0.5", "--set", "busy_low=0.8")
    assert worse["jct_s_mean"] > shared["jct_s_mean"]
    other = ran(capsys, *base[:-2], "--set", "sharing=on", "--set", "interference=0.02", "--set", "draw=2")
    assert other["jct_s_mean"] != shared["jct_s_mean"]


def test_sharing_does_not_look_at_hosts_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["jobs", "--trace", str(SMALL), "--quiet", "--set", "sharing=on"]
    assert main([*base, "--gpus", "4x2"]) == 0
    assert "which of the 4 hosts a gang is on is not looked at" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--policy", "magic"], "--policy magic"),
        (["--set", "speed=1"], "speed is no setting"),
        (["--set", "preempt"], "KEY=VALUE is expected"),
        (["--set", "preempt=-1"], "--set preempt=-1"),
        (["--set", "thresholds=5/5"], "ascending"),
        (["--set", "interference=0.5"], "sharing, which is off"),
        (["--set", "sharing=on", "--policy", "fifo"], "only covey shares GPUs"),
        (["--set", "interference=2", "--set", "sharing=on"], "not from 0 to 1"),
        (["--set", "busy_low=0.95", "--set", "sharing=on"], "at most busy_high"),
        (["--set", "checkpoint_every=0m"], "no time between two checkpoints"),
        (["--set", "checkpoint_every=30x"], "such as 600, 30m or 2h, never, or stop"),
        (["--set", "knob=1/0", "--policy", "dlas"], "--set knob=1/0"),
        (["--set", "knob=4", "--policy", "fifo"], "--set knob with --policy fifo"),
        (["--set", "preempt=50", "--policy", "fifo"], "it has no such settings"),
        (["--set", "narrow=on", "--policy", "fjf"], "narrow is for covey, las-published, dlas"),
        (["--set", "thresholds=100", "--policy", "srsf"], "it looks at checkpoint_every, preempt, quantum, restore"),
        (["--set", "limit_factor=2"], "limit_factor is for backfill"),
        (["--set", "samples=nofile"], "samples is for dgittins, gittins"),
        (["--set", "samples=nofile", "--policy", "gittins"], "nofile cannot be read"),
        (["--set", "sharing=on", "--set", "knob=4"], "with sharing=on"),
        (["--gpus", "0"], "--gpus 0"),
        (["--gpus", "4x"], "--gpus 4x"),
        (["--gpus", "1", "--trace", "/nowhere.csv"], "/nowhere.csv cannot be read"),
    ],
)
def test_what_cannot_be_used_is_refused_and_named(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, "--trace", str(SMALL), "--gpus", "16", *argv)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("job_id,submit_time_s,num_gpus\na,0,1\n", "line 1: no column duration_s"),
        ("", "line 1: no column job_id"),
        ("job_id,submit_time_s,num_gpus,duration_s\na,0,1,5\nb,0,x,5\n", "line 3, column num_gpus: 'x'"),
        ("job_id,submit_time_s,num_gpus,duration_s\na,-1,1,5\n", "line 2, column submit_time_s: '-1'"),
        ("job_id,submit_time_s,num_gpus,duration_s\na,0,1,0\n", "line 2, column duration_s: '0'"),
        ("job_id,submit_time_s,num_gpus,duration_s\na,0,1,nan\n", "line 2, column duration_s: 'nan'"),
        ("job_id,submit_time_s,num_gpus,duration_s\na,0,1\n", "line 2: 3 columns"),
        ("job_id,submit_time_s,num_gpus,duration_s\na,0,1,5\n\na,0,1,5\n", "line 4, column job_id: a is there twice"),
        ("job_id,submit_time_s,num_gpus,duration_s\n", "no job"),
        ('job_id,submit_time_s,num_gpus,duration_s\n"a,0,1,5\n', "no CSV"),
        ("job_id,submit_time_s,num_gpus,duration_s,num_gpus\n", "column num_gpus is there twice"),
    ],
)
def test_a_broken_trace_is_refused_with_line_and_column(
    text: str, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text(text)
    assert where in refused(capsys, "--trace", str(tmp_path / "t.csv"), "--gpus", "4")


@given(st.binary(max_size=300))
def test_any_bytes_are_a_trace_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.mktemp("t") / "t.csv"
    file.write_bytes(b"job_id,submit_time_s,num_gpus,duration_s\n" + data)
    try:
        trace = read_trace(file)
    except Wrong as wrong:
        assert str(file) in wrong.what
    else:
        assert trace.jobs


def test_a_truncated_gzip_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv.gz").write_bytes(SMALL.read_bytes()[:100])
    assert "cannot be read" in refused(capsys, "--trace", str(tmp_path / "t.csv.gz"), "--gpus", "4")


def test_the_history_of_services_is_read_whole() -> None:
    assert len(read_services(TRACES / "msr_gputime_quantiles_1000.csv.gz")) == 1001


def test_the_figure_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "a.svg"
    assert main(["jobs", "--trace", str(SMALL), "--gpus", "16", "--plot", str(drawn), "--quiet"]) == 0
    assert drawn.read_text().startswith("<svg ") and "job completion time" in capsys.readouterr().out


# ---- the engines beside the walk ----


def test_backfill_lets_pass_who_does_not_delay_the_first_in_line() -> None:
    jobs = [
        SimJob("runs", 0, 3, 10, 10),
        SimJob("first", 1, 4, 5, 5),
        SimJob("short", 2, 1, 8, 8),
        SimJob("long", 3, 1, 9, 9),
    ]
    out = Backfill(jobs, 4, OrderRules(discipline="backfill")).run()
    assert out.first_s == [0, 10, 2, 15], "short ends with the one that runs, long would delay the first"


def test_backfill_believes_the_limit_and_not_the_duration() -> None:
    jobs = [SimJob("runs", 0, 3, 10, 10), SimJob("first", 1, 4, 5, 5), SimJob("modest", 2, 1, 2, 100)]
    assert Backfill(jobs, 4, OrderRules(discipline="backfill")).run().first_s == [0, 10, 15]


def test_turns_share_one_gpu_equally() -> None:
    jobs = [SimJob("a", 0, 1, 100), SimJob("b", 0, 1, 100)]
    out = Slices(jobs, 1, OrderRules(discipline="gandiva", quantum_s=10)).run()
    assert sorted(out.end_s) == [190, 200] and sum(out.preempted) >= 17


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4), st.integers(1, 40), st.integers(1, 50)), max_size=15),
    st.sampled_from(["backfill", "gandiva", "covey"]),
)
def test_no_engine_gives_more_gpus_than_there_are(asked: list[tuple[int, int, int, int]], policy: str) -> None:
    jobs = [SimJob(at, s, w, d, limit) for at, (s, w, d, limit) in enumerate(asked)]
    plan = simulator.plan_of(policy, {})
    engine = engine_for(plan.rules)(jobs, 4, plan.rules, None, True)
    out = engine.run()
    for _, holding in out.timeline:
        assert sum(jobs[int(id)].gpus for id in holding) <= 4
    assert all(end >= job.submit_s + job.duration_s for job, end in zip(jobs, out.end_s, strict=True))


ASKED = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=15)


@given(ASKED, st.floats(0, 0.5), st.integers(1, 3), st.integers(0, 3))
def test_sharing_never_makes_more_progress_than_the_devices_allow(
    asked: list[tuple[int, int, int]], interference: float, per_gpu: int, draw: int
) -> None:
    jobs = [SimJob(at, s, w, d) for at, (s, w, d) in enumerate(asked)]
    cluster = Cluster(jobs, 4, Sharing(interference=interference, per_gpu_max=per_gpu), draw, COVEY)
    cluster.run()
    out = cluster.whole()
    span = max(out.end_s) - min(job.submit_s for job in jobs)
    assert sum(job.gpus * job.duration_s for job in jobs) <= span * 4 * per_gpu
    for at, job in enumerate(jobs):
        assert out.end_s[at] >= job.submit_s + job.duration_s
        assert out.end_s[at] >= out.first_s[at] + job.duration_s and out.first_s[at] >= job.submit_s
        assert out.wait_s[at] <= out.end_s[at] - job.submit_s
    assert out.held_gpu_s <= span * 4


@pytest.mark.parametrize("seed", [1, 2])
def test_one_job_on_a_gpu_is_the_plain_order(seed: int) -> None:
    """Where both models mean the same, without sharing and without costs, they say the same, but for fractions of a
    second: the engine knows whole ones only."""
    jobs = read_trace(TRACES / f"tiresias480r_seed{seed}.csv.gz").jobs
    rules = simulator.plan_of("covey", {"preempt": "0", "restore": "0"}).rules
    cluster = Cluster(jobs, 60, Sharing(per_gpu_max=1, move_s=0.0), 1, rules)
    cluster.run()
    ours, plain = cluster.whole().end_s, engine_for(rules)(jobs, 60, rules).run().end_s
    assert sum(abs(a - b) <= 60 for a, b in zip(ours, plain, strict=True)) > 0.9 * len(jobs)
    assert sum(ours) - sum(plain) == pytest.approx(0, abs=0.02 * (sum(plain) - sum(job.submit_s for job in jobs)))


def test_who_waits_for_the_limit_goes_first_also_where_gpus_are_shared() -> None:
    jobs = [SimJob("long", 0, 2, 3000), SimJob("late", 1, 2, 100)]
    rules = simulator.plan_of("covey", {"starve": "500", "preempt": "0", "restore": "0", "thresholds": "none"}).rules
    cluster = Cluster(jobs, 2, Sharing(per_gpu_max=1, move_s=0.0), 1, rules)
    cluster.run()
    out = cluster.whole()
    assert out.promoted[1] == 1 and out.first_s[1] == 501 and out.end_s == [3100, 601]
