"""covey-sim aggregators: what it says of small cases, the same for a seed, and what it saves."""

import json
import random
from fractions import Fraction
from pathlib import Path

import pytest

from covey.core.ids import JobId
from plugins.aggregator.machine.pool import Pool, PoolRules
from plugins.aggregator.policy.assign import flaw
from sim.main import main
from sim.tensors import aggregators
from sim.tensors.jobs import MODELS, Workload, profile
from sim.tensors.pools import compared
from sim.tensors.rounds import Shared, alone
from sim.tensors.trace import Trace


def quiet(share: float, text: str) -> None:
    assert 0 <= share <= 1 and text


def test_the_same_seed_draws_the_same_jobs_and_nobody_could_refuse_them() -> None:
    one, again = (Workload(jobs=30, window=True).drawn(random.Random(3)) for _ in range(2))
    assert one == again != Workload(jobs=30, window=True).drawn(random.Random(4))
    assert not any(flaw(job.profile) for job in one)
    use = [job.profile.work_us / job.profile.period_us / job.profile.servers for job in one]
    assert all(0.149 < each < 0.501 for each in use)


def test_as_published_sharing_saves_about_what_the_thesis_says_within_every_limit() -> None:
    outcome = Trace(PoolRules()).run(Workload().drawn(random.Random(1)))
    assert outcome.over_limit == 0 and outcome.loss_max < 0.1
    assert 0.55 < outcome.saved < 0.66
    assert all(1 - 1e-9 < slower < 1 / 0.9 for slower in outcome.slower) and len(outcome.slower) == 150


def test_longer_cycles_save_more_than_sixty_percent_at_half_the_loss_limit() -> None:
    """Longer cycles are Covey's own. Reference: §4.5.2.4."""
    jobs = Workload(limit=Fraction(1, 20), window=True).drawn(random.Random(1))
    ours, published = Trace(PoolRules(times=4)).run(jobs), Trace(PoolRules()).run(jobs)
    assert ours.over_limit == 0 and ours.loss_max < 0.05
    assert ours.saved > 0.6 > published.saved


def test_nothing_is_saved_for_one_job_that_fills_its_server_and_trials_cost() -> None:
    outcome = Trace(PoolRules()).run(Workload(jobs=1, servers=(1,)).drawn(random.Random(1)))
    assert outcome.saved == pytest.approx(0, abs=1e-9) and outcome.slower == [pytest.approx(1)]


def test_hybrid_scaling_holds_aggregators_longer() -> None:
    jobs = Workload(jobs=60).drawn(random.Random(1))
    at_once, hybrid = Trace(PoolRules()).run(jobs), Trace(PoolRules(scaling="hybrid"), 1, 600.0).run(jobs)
    assert hybrid.saved < at_once.saved and hybrid.over_limit == 0


def test_who_must_wait_for_the_period_keeps_its_trial_servers_meanwhile() -> None:
    jobs = Workload(jobs=10, servers=(4,)).drawn(random.Random(1))
    eager = Trace(PoolRules(scaling="hybrid"), 1, 600.0).run(jobs)
    patient = Trace(PoolRules(scaling="hybrid", lacking_min=9), 1, 600.0).run(jobs)
    assert patient.saved < eager.saved and patient.over_limit == 0


def test_a_job_measured_alone_takes_what_its_model_says_and_a_little_more() -> None:
    for model in MODELS:
        job = alone(profile("j", model, 2, model.use / 2, model.period_us, random.Random(1)), 1)
        assert model.period_us <= job.profile.period_us < 1.25 * model.period_us


def test_jobs_that_hurt_one_another_settle_within_their_limits() -> None:
    jobs = [aggregators.trial(f"j{at}", MODELS[0], 2, 2, 1) for at in range(3)]
    found = aggregators.settled(jobs, 1, by_arrival=True)
    assert found.over_first > 0 and found.loss_first >= 0.1
    assert found.over == 0 and found.loss < 0.1 and found.aggregators_planned < found.aggregators < 6
    due_first = aggregators.settled([aggregators.trial(f"j{at}", MODELS[0], 2, 2, 1) for at in range(3)], 1)
    assert not due_first.over_first and due_first.aggregators == due_first.aggregators_planned < found.aggregators


def test_two_jobs_in_time_show_the_form_of_figure_4_11() -> None:
    """Two jobs share; one loses too much over 100 iterations, and gets an aggregator, which is freed when it leaves.
    Reference: §4.5.2.3."""
    table, figure = aggregators.two_jobs(1)
    assert [row[2] for row in table.rows] == [1, 1, 2, 1]
    assert "lost" in str(table.rows[2][1]) and 20 < float(table.rows[2][0] or 0) < 30
    assert {series.label for series in figure.series} == {"first", "second", "aggregators"}


def test_a_job_that_leaves_ends_the_iteration_it_is_in() -> None:
    shared = Shared(Pool())
    job = aggregators.trial("j", MODELS[1], 2, 2, 1)
    shared.arrive(job)
    shared.run(5)
    done = job.iterations
    shared.leave(JobId("j"))
    shared.run(5)
    assert job.iterations == done + 1 and not shared.pool.cycles


def test_pools_and_the_index_decide_as_the_printed_loop_does_on_what_they_look_at() -> None:
    scan, index, pool_scan, pool_index = compared(60, 48, 12, random.Random(1))
    assert (scan.used, scan.new, scan.loss) == (index.used, index.new, index.loss)
    assert (pool_scan.used, pool_scan.new) == (pool_index.used, pool_index.new)
    assert pool_index.looked_at == 12 < index.looked_at == 48 and pool_index.others <= index.others


def test_the_command_prints_tables_json_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = tmp_path / "trace.svg"
    given = ["aggregators", "--part", "trace", "--jobs", "6", "--seeds", "1", "--json", "--plot", str(at)]
    assert main([*given, "--loss-limit", "0.07"]) == 0
    said = capsys.readouterr().out
    found = json.loads(said[: said.rindex("}") + 1])
    assert len(found["trace"]) == len(aggregators.WAYS) + 1
    assert all(way["jobs_over_limit"] == 0 for way in found["trace"])
    assert at.read_text().startswith("<")


def test_arrivals_come_from_a_trace_whose_jobs_of_one_gpu_have_no_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "few.csv"
    file.write_text("job_id,submit_time_s,num_gpus,duration_s\na,0,1,900\nb,5,8,900\nc,9,64,600\n")
    assert aggregators.read_recorded(file, 9) == ((5.0, 900.0, 2), (9.0, 600.0, 4))
    assert main(["aggregators", "--part", "trace", "--trace", str(file), "--seeds", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"] == 2
    file.write_text("job_id,submit_time_s,num_gpus,duration_s\na,0,1,900\n")
    assert main(["aggregators", "--part", "trace", "--trace", str(file)]) == 2
    assert "two or more GPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--seeds", "0"],
        ["--loss-limit", "0.6"],
        ["--part", "none"],
        ["--pool", "-1"],
        ["--jobs", "1000000"],
        ["--aggregators", "1000000000"],
        ["--tensors", "20000", "--aggregators", "20000"],
    ],
)
def test_wrong_options_are_refused_with_a_reason(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["aggregators", *wrong])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert wrong[0].strip("-") in capsys.readouterr().err


def test_reports_of_every_part_have_rows_and_data() -> None:
    for report in (aggregators.pools(1, 40, 30, 10, quiet), aggregators.trace([1], Workload(jobs=5), quiet)):
        assert report.data and all(table.rows and len(table.columns) == len(table.rows[0]) for table in report.tables)
