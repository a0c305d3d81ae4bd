"""`covey-sim jobs --tenants FILE`: quotas, classes, demotion, upgrade and reservations by the agents' own scheduler."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from plugins.scheduler.messages.spec import JobClass
from plugins.scheduler.policy.rules import OrderRules
from sim.jobs.engine import SimJob
from sim.jobs.live import Asks, Live, settings_of
from sim.jobs.tenants import read_tenants
from sim.main import main
from sim.report import Wrong

QUIET = OrderRules(thresholds_gpu_s=(100_000,), narrow_first=False)
"""Rules under which no job sinks, and nothing takes time except jobs."""


def live(
    jobs: list[tuple[int, int, int, Asks]], gpus: int, quotas: dict[str, int], hosts: int = 1, **more: Any
) -> Live:
    """Run jobs given as (submitted, GPUs, duration, tenant and class)."""
    rules = more.pop("rules", QUIET)
    given = [SimJob(at, submit_s, width, run_s) for at, (submit_s, width, run_s, _) in enumerate(jobs)]
    settings = settings_of(rules, quotas, None, more.pop("demote_after_s", None))
    run = Live(given, hosts, gpus // hosts, rules, settings, [job[3] for job in jobs])
    run.run()
    run.queue.check()
    run.leader.check()
    return run


def a(job_class: JobClass = "guaranteed") -> Asks:
    return Asks("a", job_class)


def b(job_class: JobClass = "guaranteed") -> Asks:
    return Asks("b", job_class)


def test_a_tenant_waits_for_its_quota_although_gpus_are_free() -> None:
    """Reference: AntMan §3.2."""
    run = live([(0, 2, 100, a()), (10, 2, 100, a()), (20, 2, 50, b())], 6, {"a": 2, "b": 4})
    assert run.out.first_s == [0, 100, 20]
    assert run.tally.used["a"].held_max == 2 and run.tally.used["a"].over_s == 0


def test_an_auto_job_is_demoted_after_its_wait_and_upgraded_when_its_quota_is_free() -> None:
    """The job is charged to the quota from the second at which the other job of its tenant ends. Reference: AntMan
    §3.3."""
    run = live([(0, 2, 500, a()), (10, 1, 1000, a("auto"))], 4, {"a": 2, "b": 2}, demote_after_s=300.0)
    assert run.out.first_s == [0, 310]
    assert run.tally.demoted == run.tally.upgraded == {1}
    used = run.tally.used["a"]
    assert (used.opportunistic_gpu_s, used.guaranteed_gpu_s) == (500 - 310, 2 * 500 + 1310 - 500)


def test_an_opportunistic_job_yields_to_a_guaranteed_one_and_pays_for_it() -> None:
    """The price is a checkpoint of 30 s, then a restore of 20 s. Reference: AntMan §3.3."""
    rules = OrderRules(thresholds_gpu_s=(100_000,), preempt_s=30, restore_s=20)
    run = live([(0, 4, 100, b("opportunistic")), (50, 4, 100, a())], 4, {"a": 4}, rules=rules)
    assert run.out.preempted == [1, 0]
    assert run.out.first_s == [0, 80] and run.out.end_s == [180 + 20 + 50, 180]


def test_a_gang_keeps_the_gpus_of_those_that_stop_for_it() -> None:
    """One GPU is free meanwhile, and no opportunistic job slips in. Reference: AntMan §3.3."""
    rules = OrderRules(thresholds_gpu_s=(100_000,), preempt_s=30)
    aside = b("opportunistic")
    run = live([(0, 3, 1000, aside), (50, 4, 100, a()), (55, 1, 10, aside)], 4, {"a": 4}, rules=rules)
    assert run.tally.kept == {1}
    assert run.out.first_s == [0, 80, 180]


def test_a_job_wider_than_its_quota_is_refused_and_counted() -> None:
    run = live([(0, 3, 100, a()), (0, 2, 100, a())], 4, {"a": 2})
    assert run.tally.refused == {0} and run.out.end_s[1] == 100


def test_jobs_that_the_log_has_no_room_for_come_when_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of these jobs is refused then, and the next one does not wait for it."""
    monkeypatch.setattr("sim.jobs.live.LIVE_MAX", 2)
    asked = [(0, 1, 100, a()), (0, 1, 50, a()), (10, 3, 10, a()), (10, 1, 10, a()), (10, 1, 10, a())]
    run = live(asked, 4, {"a": 2})
    assert run.tally.late == 3 and run.tally.refused == {2}
    assert run.out.first_s == [0, 0, 0, 50, 60]


def test_whatever_comes_no_tenant_holds_more_than_its_quota_and_every_job_ends() -> None:
    """What the cluster held is counted apart from the log, and every second of it belongs to a tenant."""
    for seed in range(40):
        dice = random.Random(seed)
        quotas = {"a": dice.randrange(1, 9), "b": dice.randrange(1, 9)}
        kinds: tuple[JobClass, ...] = ("guaranteed", "guaranteed", "auto", "opportunistic")
        jobs = [
            (dice.randrange(400), dice.choice((1, 1, 2, 4)), dice.randrange(1, 300), Asks(dice.choice("abc"), kind))
            for kind in dice.choices(kinds, k=30)
        ]
        rules = OrderRules(thresholds_gpu_s=(200,), preempt_s=dice.choice((0, 7)), restore_s=5, starve_limit_s=300)
        hosts = dice.choice((1, 2, 4))
        run = live(jobs, 8, quotas, hosts=hosts, rules=rules, demote_after_s=dice.choice((0.0, 60.0)))
        for tenant, quota in quotas.items():
            used = run.tally.used[tenant]
            assert used.over_s == 0 and used.held_max <= quota, f"seed {seed}"
        taken = [at for at in range(len(jobs)) if at not in run.tally.refused]
        assert all(run.out.end_s[at] >= jobs[at][0] + jobs[at][2] for at in taken), f"seed {seed}"
        held = sum(used.guaranteed_gpu_s + used.opportunistic_gpu_s for used in run.tally.used.values())
        assert held == run.out.held_gpu_s >= sum(jobs[at][1] * jobs[at][2] for at in taken), f"seed {seed}"
        assert not any(run.held.values())


# ---- the file, and the report ----

TRACE = """job_id,submit_time_s,num_gpus,duration_s,tenant
j1,0,2,100,ann
j2,0,2,100,ben
j3,10,2,100,ann
j4,20,8,100,ben
"""


def written(tmp_path: Path, tenants: str, trace: str = TRACE) -> list[str]:
    (tmp_path / "trace.csv").write_text(trace)
    (tmp_path / "tenants.toml").write_text(tenants)
    return ["jobs", "--trace", str(tmp_path / "trace.csv"), "--gpus", "8", "--tenants", str(tmp_path / "tenants.toml")]


def test_the_report_says_what_each_tenant_got(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = written(tmp_path, '[tenants.lab]\nquota = 2\nof = ["ann"]\n[tenants."*"]\nquota = 4\n')
    assert main([*argv, "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["jobs"] == 3 and found["refused_over_quota"] == 1, "ben asks for 8 of 4"
    lab = found["tenants"]["lab"]
    assert (lab["quota_gpus"], lab["jobs"], lab["held_gpus_max"], lab["over_quota_s"]) == (2, 2, 2, 0)
    assert (lab["jct_s_mean"], lab["jct_s_p95"], lab["wait_s_mean"], lab["wait_s_p95"]) == (145.0, 190, 45.0, 90)
    assert lab["guaranteed_gpu_h"] == pytest.approx(400 / 3600)
    assert main([*argv, "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "never" in said and "lab" in said and "ben" in said


def test_the_class_of_a_tenant_of_the_trace_outdoes_that_of_its_tenant(tmp_path: Path) -> None:
    text = '[tenants.lab]\nclass = "auto"\nof = ["ann", "ben"]\n[classes]\nben = "opportunistic"\n'
    (tmp_path / "t.toml").write_text(text)
    asked = read_tenants(tmp_path / "t.toml").asks([SimJob(1, 0, 1, 1, tenant="ann"), SimJob(2, 0, 1, 1, tenant="ben")])
    assert asked == [Asks("lab", "auto"), Asks("lab", "opportunistic")]


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        ("tenants = ", "this is no TOML", "Invalid value"),
        ("", "no tenant", "it has no table [tenants.NAME]"),
        ("tenants = 3", "tenants: 3", "expected a table [tenants]"),
        ("[tenants]\nann = 3", "tenants.ann: 3", "expected a table [tenants.ann]"),
        ("[tenants.ann]\nqouta = 3", "tenants.ann: qouta is no setting", "known: quota, class, of"),
        ("users = 1\n[tenants.ann]", "users is no setting", "known: tenants, classes, demote_after_s"),
        ("[tenants.ann]\nquota = -1", "tenants.ann.quota: -1", "expected a whole number of GPUs from 0 to 1000000"),
        ("[tenants.ann]\nquota = true", "tenants.ann.quota: True", "expected a whole number of GPUs"),
        ('[tenants.ann]\nclass = "best"', "tenants.ann.class: 'best'", "guaranteed, auto, opportunistic"),
        ('[tenants.ann]\nof = "ben"', "tenants.ann.of: 'ben'", "expected a list of tenants of the trace"),
        ('[tenants."*"]\nof = ["ben"]', "tenants.*.of: ['ben']", "it stands for all others"),
        ('[tenants.a]\nof = ["x"]\n[tenants.b]\nof = ["x"]', "tenants.b: 'x' of the trace is a already", "one tenant"),
        ("demote_after_s = -1\n[tenants.ann]", "demote_after_s: -1", "expected seconds, 0 or more"),
        ("demote_after_s = nan\n[tenants.ann]", "demote_after_s: nan", "expected seconds, 0 or more"),
        ("[classes]\nann = 1\n[tenants.ann]", "classes.ann: 1", "expected one of guaranteed"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_place(tmp_path: Path, text: str, what: str, why: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(Wrong) as refused:
        read_tenants(path)
    assert refused.value.what.startswith(str(path)) and what in refused.value.what
    assert why in refused.value.why and refused.value.next


@pytest.mark.parametrize(
    ("more", "tenants", "said"),
    [
        ([], "[tenants.ann]\nquota = 4\n", "nothing is said of tenant 'ben' of the trace"),
        (["--policy", "srsf"], '[tenants."*"]\n', "agents have 2D-LAS in which running gangs stay"),
        (["--set", "quantum=60"], '[tenants."*"]\n', "without a quantum"),
        (["--set", "sharing=on"], '[tenants."*"]\n', "agents share no GPUs yet"),
        (["--gpus", "2x4", "--set", "skew=0.5"], '[tenants."*"]\n', "no gang is slowed there by its hosts"),
        ([], '[tenants."*"]\nquota = 1\n', "no job can run"),
    ],
)
def test_what_means_nothing_with_tenants_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], tenants: str, said: str
) -> None:
    assert main([*written(tmp_path, tenants), *more]) == 2
    told = capsys.readouterr()
    assert told.out == "" and said in told.err and "next:" in told.err


def test_a_trace_without_tenants_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = "job_id,submit_time_s,num_gpus,duration_s\nj1,0,1,1\n"
    assert main(written(tmp_path, '[tenants."*"]\n', trace)) == 2
    assert "the trace names no tenants" in capsys.readouterr().err
