"""Every noun: its table, its JSON, its exit code, and what it says when something is wrong."""

import json
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from cli import main as agentctl
from cli.jobs.job import facts
from cli.main import NOUNS, main
from tests.cli.conftest import FakeAgent

Job = Callable[..., dict[str, Any]]
Run = Callable[..., tuple[int, str, str]]

HOSTS = [
    {
        "host": "gpu1",
        "state": "alive",
        "age_s": 0.0,
        "address": "127.0.0.1:1",
        "leads": True,
        "since_s": 65.0,
        "gpus_total": 2,
        "gpus_free": 1,
        "slabs_free": 8,
        "slabs_lent": 0,
        "aggregator_jobs": 1,
        "suspected_by": None,
        "plugins_failed": ["memory"],
    },
    {
        "host": "gpu2",
        "state": "suspect",
        "age_s": 3.0,
        "address": "127.0.0.1:2",
        "leads": False,
        "since_s": 2.0,
        "gpus_total": None,
        "gpus_free": None,
        "slabs_free": None,
        "slabs_lent": None,
        "aggregator_jobs": None,
        "suspected_by": "gpu1",
        "plugins_failed": [],
    },
]
GPU = {
    "host": "gpu1",
    "index": 0,
    "uuid": "GPU-1",
    "model": "Pretend",
    "memory_total_bytes": 16 << 30,
    "memory_used_bytes": 3 << 29,
    "utilization": 0.42,
    "job": "j1",
    "simulated": True,
    "age_s": 0.0,
}
SLAB = {
    "volume": "demo",
    "index": 0,
    "borrower": "gpu1",
    "state": "mapped",
    "lender": "gpu2",
    "size_bytes": 16 << 20,
    "pages_written": 4096,
    "pages_remote": 4000,
    "requests_per_s": 812.25,
    "epoch": 3,
    "age_s": 0.0,
}
VOLUME = {
    "volume": "demo",
    "host": "gpu1",
    "size_bytes": 64 << 20,
    "page_bytes": 4096,
    "slab_bytes": 16 << 20,
    "taken_bytes": 64 << 20,
    "slabs_mapped": 1,
    "slabs": 4,
    "read_bytes": 1024,
    "written_bytes": 2048,
    "remote_read_bytes": 512,
    "disk_read_bytes": 0,
    "process_alive": True,
    "latencies": [{"op": "read", "answered": "lender", "requests": 812, "p50_s": 5.5e-5, "p99_s": 1.2e-3}],
    "tenant": "ann",
    "job": "j1",
    "budget_bytes": 96 << 20,
    "links": {"open": 3, "reopening": 1, "recovering": 0, "leaving": 0},
    "path": "",
}
ACCOUNTS = [
    {"kind": "tenant", "name": "ann", "tenant": "ann", "budget_bytes": None, "used_bytes": 0, "lenders": {}},
    {
        "kind": "job",
        "name": "j1",
        "tenant": "ann",
        "budget_bytes": 2 << 30,
        "used_bytes": 3 << 30,
        "lenders": {"gpu2": 1 << 30, "gpu3": 2 << 30},
    },
]
TENSORS = {
    "job": "j1",
    "host": "gpu3",
    "epoch": 2,
    "workers": 4,
    "joined": 3,
    "tensors": 2,
    "bytes": 2600,
    "rounds": 80,
    "received_bytes": 1 << 20,
    "sent_bytes": 1 << 21,
    "age_s": 0.0,
}
LEADER = {"leader": "gpu1", "term": 3, "since_s": 70.0, "applied_index": 9, "age_s": 0.2, "voters": ["gpu1"]}
STORY = {
    "wall_s": 900.0,
    "host": "gpu2",
    "subject": "j1",
    "event": "granted",
    "reason": "first in its queue",
    "key": "",
}


@pytest.fixture
def run(agent: FakeAgent, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs agentctl; returns exit code, stdout, stderr."""

    def call(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.fixture(autouse=True)
def answers(agent: FakeAgent, job: Job) -> None:
    agent.replies |= {
        "GET /v1/hosts": HOSTS,
        "GET /v1/gpus": [GPU, GPU | {"index": 1, "job": None}],
        "GET /v1/jobs": [job()],
        "GET /v1/jobs/j1": job(),
        "GET /v1/slabs": [SLAB, SLAB | {"index": 1, "state": "cold", "lender": None}],
        "GET /v1/volumes": [VOLUME],
        "GET /v1/memory/accounts": ACCOUNTS,
        "GET /v1/tensors": [TENSORS],
        "GET /v1/leader": {
            "leader": "gpu1",
            "term": 3,
            "since_s": 70.0,
            "applied_index": 9,
            "age_s": 0.2,
            "voters": [],
        },
        "GET /v1/status": {"boot": 2, "up_s": 600.0, "plugins": {"memory": {"state": "on", "why": ""}}},
        "GET /v1/why/j1": [STORY],
        "GET /v1/quotas": [{"tenant": "ann", "gpus": None, "used": 2, "queued_jobs": 1}],
    }


def error_of(text: str) -> dict[str, Any]:
    found = json.loads(text)
    assert found["schema"] == 1
    error: dict[str, Any] = found["error"]
    return error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "hosts",
            ["gpu1  alive    leader", "1/2", "suspected by gpu1", "failed: memory", "1 of 2 hosts alive; gpu1 leads"],
        ),
        ("gpus", ["Pretend (simulated)", "1.5 GiB", "16 GiB", "42%", "j1", "free", "2 GPUs: 1 held, 1 free"]),
        ("gpus --line", ["2 GPUs: 1 held, 1 free"]),
        (
            "jobs",
            ["j1", "digits", "running", "1 min", "all ranks started", "1 job waiting or running; as gpu1 knows it"],
        ),
        ("job j1", ["gpu1: ranks 0-1", "loss 0.25", "2, 1 GPU each", "killed by SIGKILL", "gradients at", "gpu3"]),
        ("why j1", ["gpu2", "granted", "first in its queue", "1 event"]),
        ("slabs", ["demo", "mapped", "gpu2", "812.2", "1 of 2 slabs mapped on 1 lender"]),
        ("slabs other", ["0 of 0 slabs"]),
        (
            "volume show demo",
            ["with a disk", "ann of a budget of 96 MiB", "1 KiB, of that 512 B from lenders", "55 us"],
        ),
        ("volume", ["64 MiB", "1/4", "2 KiB", "alive"]),
        ("volume ls", ["64 MiB", "1/4", "2 KiB", "alive"]),
        ("memory", ["ANSWERED BY", "lender", "812", "55 us", "1.2 ms", "links to lenders: 3 open, 1 reopening"]),
        ("memory", ["TENANT", "ann", "96 MiB", "demo (j1)"]),
        ("memory", ["ON THE RACK", "job j1 of ann", "3 GiB", "2 GiB (over)", "gpu3 2 GiB, gpu2 1 GiB", "no limit"]),
        ("tensors", ["gpu3", "3/4", "1 MiB", "2 MiB"]),
        ("leader", ["gpu1", "1 min 10 s", "entry 9, confirmed 0.2 s ago"]),
        ("status", ["memory", "on", "10 min", "gpu1"]),
        ("quota", ["ann", "no limit"]),
        ("version", ["agentctl "]),
        ("", ["look", "act", "submit"]),
        ("--help", ["look", "act", "submit"]),
        ("help", ["look", "act", "submit"]),
        ("--version", ["agentctl "]),
    ],
)
def test_people_read_what_they_look_for(run: Run, words: str, expected: list[str]) -> None:
    code, out, err = run(*words.split())
    assert (code, err) == (0, "")
    assert [text for text in expected if text not in out] == []


@pytest.mark.parametrize(
    "words",
    [
        "hosts",
        "gpus",
        "jobs",
        "job j1",
        "why j1",
        "slabs",
        "volume",
        "volume ls",
        "volume show demo",
        "tensors",
        "leader",
        "status",
        "quota",
    ],
)
def test_programs_get_the_answer_as_it_came(run: Run, words: str) -> None:
    for argv in (["--json", *words.split()], [*words.split(), "--json"]):
        code, out, _ = run(*argv)
        found = json.loads(out)
        assert (code, found["schema"], found["host"]) == (0, 1, "gpu1")


@pytest.mark.parametrize("noun", sorted(NOUNS))
def test_every_noun_explains_itself(noun: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([noun, "--help"])
    assert caught.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


def test_how_long_steps_take_and_what_they_wait_for_is_shown(run: Run, agent: FakeAgent) -> None:
    _, out, _ = run("jobs")
    line = next(line for line in out.splitlines() if line.startswith("j1"))
    assert "250 ms  input 40 %  1 GiB" in re.sub(" {2,}", "  ", line), "a share under one percent is left out"
    _, out, _ = run("job", "j1")
    assert "250 ms, of which input 40 %; 1 GiB; counted by its optimizer" in out
    assert "rank 0: torch 2.13.0; rank 1: covey-job is not installed" in out


def test_what_a_jax_job_waits_for_its_device_is_shown(
    run: Run, agent: FakeAgent, job: Callable[..., dict[str, Any]]
) -> None:
    timing = {"step_s": 0.2, "input_s": 0.0, "communicate_s": 0.0, "memory_bytes": 0, "boundary": "jitted call"}
    agent.replies["GET /v1/jobs/j1"] = job(seen={"timing": timing}, metrics={"device_wait_s": 0.15})
    _, out, _ = run("job", "j1")
    assert "200 ms, of which device 75 %; counted by its jitted call" in out


@pytest.mark.parametrize(
    ("argv", "ago_s", "said"),
    [
        (["python", "-I", "train.py"], 1.0, "nothing: Python ignores PYTHONPATH with -I"),
        (["/usr/bin/python3.12", "-u", "-BE", "train.py"], 1.0, "nothing: Python ignores PYTHONPATH with -BE"),
        (["python", "train.py"], 1.0, ""),
        (["python", "train.py", "-I"], 60.0, "nothing: the script has imported neither PyTorch nor JAX yet"),
        (["python", "-Wignore::ImportWarning", "train.py"], 1.0, ""),
        (["./train.sh"], 60.0, ""),
    ],
)
def test_why_nothing_sees_a_script_is_said(
    argv: list[str], ago_s: float, said: str, job: Callable[..., dict[str, Any]]
) -> None:
    seen = dict(facts(job(argv=argv, step=None, seen={"hooked": {}, "timing": None}, times={"for_s": ago_s})))
    assert str(seen["seen by"]).startswith(said) and bool(seen["seen by"]) == bool(said)


def test_all_jobs_are_asked_for_with_a(run: Run, agent: FakeAgent) -> None:
    run("jobs", "-a")
    assert agent.asked[-1][0] == "GET /v1/jobs?all=1"


def test_no_leader_is_said_and_is_no_error_for_a_read(run: Run, agent: FakeAgent) -> None:
    agent.replies["GET /v1/leader"] = {
        "leader": None,
        "term": 3,
        "since_s": None,
        "applied_index": 9,
        "age_s": 7.0,
        "voters": ["gpu1"],
    }
    code, out, _ = run("leader")
    assert code == 0
    assert "none now" in out and "7.0 s ago" in out


def test_a_failed_plugin_makes_status_fail(run: Run, agent: FakeAgent) -> None:
    agent.replies["GET /v1/status"] = {"plugins": {"memory": {"state": "failed", "why": "disk is full"}}}
    code, out, _ = run("status")
    assert code == 1
    assert "disk is full" in out and "restart the agent" in out
    waiting = {"state": "failed", "why": "OSError: disk is full", "restarts": 2, "again_s": 4.0}
    agent.replies["GET /v1/status"] = {"plugins": {"memory": waiting}}
    code, out, _ = run("status")
    assert code == 1
    assert "disk is full; it is restarted about every 4 s" in out


def test_a_host_that_restarts_is_away_and_back_within_the_time_it_said(run: Run, agent: FakeAgent) -> None:
    rows = agent.replies["GET /v1/hosts"]
    agent.replies["GET /v1/hosts"] = [*rows, rows[0] | {"host": "gpu7", "state": "away", "away_s": 42.0}]
    code, out, _ = run("hosts")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("gpu7")]
    assert "away" in line and "back within 42 s" in line


def test_a_seed_that_is_not_known_is_named_by_status(run: Run, agent: FakeAgent) -> None:
    agent.replies["GET /v1/status"] = {"plugins": {}, "seeds_unknown": {"gpu9:7946": "Name or service not known"}}
    code, out, _ = run("status")
    assert code == 0
    assert "unknown seed" in out and "gpu9:7946: Name or service not known" in out


# ---- wrong usage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "what", "next_step"),
    [
        ("hots", "unknown command 'hots'", "agentctl hosts"),
        ("nodes", "unknown command 'nodes'", "agentctl hosts"),
        ("run", "unknown command 'run'", "agentctl submit"),
        ("jobs --al", "unknown option --al", "--all"),
        ("hosts --jsno", "unknown option --jsno", "--json"),
        ("hosts gpu1", "invalid choice: 'gpu1'", "--help"),
        ("--agnet x hosts", "unknown option --agnet", "--agent"),
        ("job", "required: ID", "--help"),
        ("logs j1 --rank two", "invalid int value", "--help"),
        ("logs j1 --rank -1", "no rank -1", "--rank 0"),
        ("logs j1 --rank 2", "no rank 2", "--rank 0"),
        ("hosts --timeout soon", "invalid --timeout soon", "--help"),
        ("hosts --agent nowhere", "'nowhere' is not an agent's address", "--agent"),
        ("volume create demo large", "invalid size 'large'", "64MiB"),
        ("volume destroy demo", "unknown command 'volume destroy'", "agentctl volume rm NAME"),
        ("volume rm demo twice", "unexpected argument 'twice'", "agentctl volume rm --help"),
        ("volumes", "unknown command 'volumes'", "agentctl volume ls"),
        ("memory attach swap1 --size 1G", "unexpected argument 'attach'", "agentctl volume swap NAME SIZE"),
        ("quota ann many", "'many' is not a number", "quota TENANT"),
        ("submit", "no command", "--"),
        ("submit python train.py", "unexpected argument 'python'", "-- python train.py"),
        ("submit --lr 3 -- python", "unknown option --lr", "after a lone --"),
        ("submit --env X -- python", "--env 'X'", "KEY=VAL"),
        ("submit --time soon -- python", "--time soon", "--help"),
        ("submit --time 120 -- python", "--time 120 has no unit", "--time 120min, or --time 120s"),
        ("submit --hang 1.5 -- python", "--hang 1.5 has no unit", "--hang 1.5min"),
        ("submit --time 2:00:00 -- python", "invalid --time 2:00:00", "--time 7200s"),
        ("submit --time 1-12:30 -- python", "invalid --time 1-12:30", "--time 131400s"),
        ("drain gpu1", "unknown command 'drain'", "agentctl hosts drain HOST"),
        ("frobnicate", "unknown command 'frobnicate'", "agentctl --help"),
        ("submit --mem 8G -- python", "unknown option --mem", "--gpu-memory 8GiB"),
        ("submit --after j1 -- python", "unknown option --after", "agentctl wait ID && agentctl submit"),
        ("submit --frob 1 -- python", "unknown option --frob", "agentctl submit --help"),
        ("logs j1 --tail 5", "unknown option --tail", "| tail -n N"),
        ("submit --class best -- python", "invalid choice", "--help"),
        ("submit --nodes 2 --workers 4 -- python", "--nodes and --workers", "leave one of them out"),
        ("submit --nodes 2 --pack any -- python", "--nodes and --pack", "leave one of them out"),
    ],
)
def test_wrong_usage_exits_2_with_what_why_and_next(run: Run, words: str, what: str, next_step: str) -> None:
    code, out, err = run(*words.split())
    lines = err.splitlines()
    assert (code, out, len(lines)) == (2, "", 3)
    assert lines[0].startswith("agentctl: ") and what in lines[0]
    assert lines[1].startswith("  why:  ") and len(lines[1]) > 10
    assert lines[2].startswith("  next: ") and next_step in lines[2] + lines[1]


def test_errors_are_json_for_programs(run: Run) -> None:
    code, out, err = run("hots", "--json")
    assert (code, out) == (2, "")
    assert error_of(err)["code"] == 2


def test_flags_of_the_command_are_not_agentctls(run: Run) -> None:
    code, _, err = run("submit", "--tenant", "Ann Lee", "--", "python", "--json")
    assert code == 3  # no POST /v1/jobs in this fake: the words went through
    assert err.startswith("agentctl: ")


# ---- exit codes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "status"), [(1, 500), (2, 400), (3, 404), (4, 403), (6, 504), (7, 422), (75, 503)])
def test_the_exit_code_is_the_agents(run: Run, agent: FakeAgent, code: int, status: int) -> None:
    agent.replies["POST /v1/jobs"] = (code, status)
    assert run("submit", "--", "true")[0] == code
    assert error_of(run("--json", "submit", "--", "true")[2]) == {
        "code": code,
        "what": "no",
        "why": "because",
        "next": "do this",
    }


def test_without_an_agent_it_exits_5(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_AGENT", "unix:/nonexistent/agent.sock")
    code, out, err = run("hosts")
    assert (code, out) == (5, "")
    assert "no agent answers" in err and "No such file" in err and "next:" in err


def test_an_unknown_job_names_the_nearest(run: Run, agent: FakeAgent) -> None:
    for words in ("job digts", "cancel digts", "wait digts", "logs digts", "why digts"):
        code, _, err = run(*words.split())
        assert code == 3
        assert f"agentctl {words.split()[0]} j1" in err
    code, _, err = run("job", "zzz")
    assert code == 3 and "next: nothing" in err  # the agent's own word


def test_a_defect_is_three_lines_unless_debug_is_asked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(agentctl, "find", broken)
    code, _, err = run("hosts")
    assert (code, len(err.splitlines())) == (1, 3)
    with pytest.raises(ZeroDivisionError):
        main(["hosts", "--debug"])


# ---- submit, wait, cancel --------------------------------------------------------------------------------------------


def test_submit_carries_command_directory_and_environment(
    run: Run, agent: FakeAgent, job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    agent.replies["POST /v1/jobs"] = job(state="queued", reason="2nd in queue 0")
    monkeypatch.setenv("VIRTUAL_ENV", "/venv")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("COVEY_TOKEN", "secret")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/ssh")
    monkeypatch.setenv("ODD", "\udcff")
    monkeypatch.setenv("BASH_FUNC_module%%", "() { echo; }")
    words = "submit --name n --workers 4 --gpus 2 --tenant ann --class auto --env A=b=c --time 2h --grace 5s --cwd sub"
    code, out, _ = run(*words.split(), "--", "python", "x.py", "--lr", "3")
    assert (code, out) == (0, "j1 queued: 2nd in queue 0\n")
    body = agent.asked[-1][1]
    env, key = body.pop("env"), body.pop("key")
    assert body == {
        "argv": ["python", "x.py", "--lr", "3"],
        "cwd": f"{tmp_path}/sub",
        "workers": 4,
        "gpus_per_worker": 2,
        "name": "n",
        "tenant": "ann",
        "class": "auto",
        "time_limit_s": 7200.0,
        "grace_s": 5.0,
    }
    assert (env["VIRTUAL_ENV"], env["A"]) == ("/venv", "b=c")
    assert (env["ODD"], env["BASH_FUNC_module%%"]) == ("\x00ff", "() { echo; }")
    assert not {"RANK", "COVEY_TOKEN", "COVEY_AGENT", "SSH_AUTH_SOCK"} & set(env)
    assert len(key) >= 16


def test_a_node_is_a_worker_on_a_host_of_its_own(run: Run, agent: FakeAgent, job: Job) -> None:
    agent.replies["POST /v1/jobs"] = job()
    for words, workers, pack in (
        ("--nodes 3 --gpus 8", 3, "apart"),
        ("--workers 3 --pack host", 3, "host"),
        ("--pack any", 1, "any"),
        ("", 1, None),
    ):
        run("submit", *words.split(), "--", "torchrun", "train.py")
        body = agent.asked[-1][1]
        assert (body.get("workers", 1), body.get("pack")) == (workers, pack), words


def test_a_script_is_attached_to_unless_it_is_left_alone(run: Run, agent: FakeAgent, job: Job) -> None:
    agent.replies["POST /v1/jobs"] = job()
    for flags, hooks in ((["--no-hooks"], False), ([], None)):
        run("submit", *flags, "--", "true")
        assert agent.asked[-1][1].get("hooks") is hooks


def test_a_scripts_gradients_are_averaged_by_covey_if_it_is_attached_to(run: Run, agent: FakeAgent, job: Job) -> None:
    agent.replies["POST /v1/jobs"] = job()
    run("submit", "--aggregate", "--", "true")
    assert agent.asked[-1][1]["env"]["COVEY_AGGREGATE"] == "1"
    run("submit", "--", "true")
    assert "COVEY_AGGREGATE" not in agent.asked[-1][1]["env"]
    code, _, errors = run("submit", "--aggregate", "--no-hooks", "--", "true")
    assert code == 2 and "--aggregate and --no-hooks cannot be used together" in errors


def test_the_memory_of_a_gpu_is_asked_for_in_words(run: Run, agent: FakeAgent, job: Job) -> None:
    agent.replies["POST /v1/jobs"] = job()
    run("submit", "--gpu-memory", "8GiB", "--", "true")
    assert agent.asked[-1][1]["gpu_memory"] == 8 << 30
    run("submit", "--remote-memory", "16GiB", "--", "true")
    assert agent.asked[-1][1]["remote_memory"] == 16 << 30
    for size in ("0", "0B", "-1", "lots"):
        code, _, errors = run("submit", f"--remote-memory={size}", "--", "true")
        assert code == 2 and f"--remote-memory {size}" in errors and "next" in errors
    asked = len(agent.asked)
    code, _, errors = run("submit", "--gpu-memory", "much", "--", "true")
    assert code == 2 and "invalid --gpu-memory much" in errors and len(agent.asked) == asked


def test_each_submission_has_its_own_key_and_no_env_carries_little(
    run: Run, agent: FakeAgent, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.replies["POST /v1/jobs"] = job()
    monkeypatch.setenv("VIRTUAL_ENV", "/venv")
    before = os.umask(0o027)
    run("submit", "--no-env", "--", "true")
    run("submit", "--no-env", "--env", "COVEY_UMASK=002", "--", "true")
    os.umask(before)
    first, second = (body for target, body in agent.asked if target == "POST /v1/jobs")
    assert first["key"] != second["key"]
    assert set(first["env"]) <= {"PATH", "HOME", "USER", "LANG", "COVEY_UMASK"}
    assert (first["env"]["COVEY_UMASK"], second["env"]["COVEY_UMASK"]) == ("027", "002")


def test_a_submission_is_repeated_with_its_key_at_the_next_agent(
    agents: Callable[[], FakeAgent], agent: FakeAgent, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    second = agents()
    tries: list[dict[str, Any]] = []

    def dies_first(body: dict[str, Any]) -> Any:
        tries.append(body)
        if len(tries) == 1:
            raise ConnectionResetError
        return job()

    agent.replies["POST /v1/jobs"] = second.replies["POST /v1/jobs"] = dies_first
    assert main(["submit", "--", "true"]) == 0
    assert len(tries) == 2
    assert tries[0] == tries[1]


@pytest.mark.parametrize(
    ("state", "exit_code", "expected"),
    [
        ("done", 0, 0),
        ("failed", 3, 3),
        ("failed", 137, 137),
        ("cancelled", 143, 143),
        ("cancelled", None, 1),
        ("done", None, 0),
    ],
)
def test_wait_returns_the_jobs_own_code(
    run: Run, agent: FakeAgent, job: Job, state: str, exit_code: int | None, expected: int
) -> None:
    looks = iter([job(), job(state=state, exit_code=exit_code, reason="over")])
    agent.replies["GET /v1/jobs/j1"] = lambda _: next(looks)
    code, out, _ = run("wait", "j1")
    hint = "next: agentctl logs j1\n" if state == "failed" else ""
    assert (code, out) == (expected, f"j1 {state}: over\n{hint}")


def test_submit_wait_is_submit_and_wait(run: Run, agent: FakeAgent, job: Job) -> None:
    agent.replies["POST /v1/jobs"] = job(state="queued")
    agent.replies["GET /v1/jobs/j1"] = job(state="failed", exit_code=9, reason="rank 0 exited with 9")
    assert run("submit", "--wait", "--", "true")[0] == 9


def test_waiting_ends_at_its_deadline_with_6(run: Run) -> None:
    code, _, err = run("wait", "j1", "--timeout", "10ms")
    assert code == 6
    assert "running: all ranks started" in err


def test_cancel_says_what_it_did(run: Run, agent: FakeAgent, job: Job) -> None:
    agent.replies["POST /v1/jobs/j1/cancel"] = job(state="stopping")
    assert run("cancel", "j1")[:2] == (0, "j1 is stopping; next: agentctl wait j1\n")


def test_a_volume_of_another_host_is_not_forgotten_but_found(run: Run, agent: FakeAgent) -> None:
    agent.replies |= {"GET /v1/volumes": [VOLUME | {"volume": "demo", "host": "gpu4"}]}
    code, _, err = run("volume", "rm", "demo")
    assert code == 3
    assert "gpu1 has no volume of that name; gpu4 has" in err
    assert "next: agentctl volume rm demo --host gpu4" in err


WAITS = {"lender": "gpu3", "slabs": [0, 2], "why": "cannot connect to gpu3"}


def test_a_volume_that_waits_for_a_lender_says_for_whom_and_what_may_be_done(run: Run, agent: FakeAgent) -> None:
    agent.replies["GET /v1/volumes"] = [VOLUME | {"waits_for": [WAITS], "trouble": "read-only: no space left"}]
    said = run("volume", "ls")[1]
    assert "2 slabs may be newer at gpu3, which does not answer: cannot connect to gpu3" in said
    assert "agentctl volume give-up demo --host gpu1" in said
    assert "demo on gpu1: read-only: no space left" in said


def test_lenders_that_do_not_answer_may_be_given_up(run: Run, agent: FakeAgent) -> None:
    agent.replies["POST /v1/volumes/demo/give-up"] = {"volume": "demo", "slabs": [0, 2], "lenders": ["gpu3"]}
    code, said, _ = run("volume", "give-up", "demo")
    assert (code, said) == (
        0,
        "demo no longer waits for gpu3: pages of slab 0, 2 that were written last may read older\n",
    )
    agent.replies["POST /v1/volumes/demo/give-up"] = {"volume": "demo", "slabs": [], "lenders": []}
    assert run("volume", "give-up", "demo")[1] == "demo waits for no lender\n"
    assert run("volume", "give-up")[0] == 2
    assert run("volume", "frobnicate")[0] == 2


def test_a_volume_is_exported_at_a_socket_and_no_more(run: Run, agent: FakeAgent) -> None:
    agent.replies["POST /v1/volumes/demo/export"] = {"volume": "demo", "socket": "/tmp/d.sock"}
    code, said, _ = run("volume", "export", "demo", "--socket", "/tmp/d.sock")
    assert (code, said) == (0, "demo: nbd+unix:///?socket=/tmp/d.sock\n")
    assert (
        run("volume", "unexport", "demo", "--socket", "/tmp/d.sock")[1] == "demo is no longer served at /tmp/d.sock\n"
    )
    assert run("volume", "export", "demo")[0] == 2
    assert run("volume", "frobnicate", "demo", "--socket", "/tmp/d.sock")[0] == 2


def test_giving_up_a_volume_of_another_host_says_whose_it_is(run: Run, agent: FakeAgent) -> None:
    agent.replies |= {"GET /v1/volumes": [VOLUME | {"volume": "demo", "host": "gpu4"}]}
    code, _, err = run("volume", "give-up", "demo")
    assert code == 3
    assert "next: agentctl volume give-up demo --host gpu4" in err


def test_a_host_that_was_named_is_the_one_that_is_asked(
    run: Run, agents: Callable[[], FakeAgent], agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = agents()
    whole = {"schema": 1, "as_of_wall_s": 0.0, "host": "gpu4", "data": {}}
    monkeypatch.setattr(other, "reply", lambda method, target, body: (200, whole))
    assert run("volume", "rm", "demo", "--host", "gpu4")[:2] == (0, "demo is removed from gpu4\n")
    assert run("volume", "create", "demo", "1MiB", "--host", "gpu4")[1].startswith("demo: 1 MiB on gpu4")
    assert not [target for target, _ in agent.asked if not target.startswith("GET")]
    code, _, err = run("volume", "rm", "demo", "--host", "gpu9")
    assert code == 5 and "cannot reach the agent of gpu9" in err


def test_a_volume_without_a_disk_is_asked_for_as_it_was_said(run: Run, agent: FakeAgent) -> None:
    agent.replies["POST /v1/volumes"] = {}
    for flags, body in ((["--mirror", "2"], {"mirror": 2}), (["--parity", "2+1"], {"parity": "2+1"})):
        assert run("volume", "create", "demo", "64MiB", *flags)[0] == 0
        assert agent.asked[-1][1] == {"volume": "demo", "size_bytes": 64 << 20} | body


def test_a_gpu_of_a_host_that_is_gone_is_not_free(run: Run, agent: FakeAgent) -> None:
    agent.replies["GET /v1/gpus"] = [GPU | {"job": None}, GPU | {"index": 1, "job": "j1", "host_state": "gone"}]
    assert run("gpus", "--line")[1] == "2 GPUs: 0 held, 1 free, 1 on hosts that are gone\n"
    assert " gone " in run("gpus")[1].splitlines()[2]


def test_a_gpu_that_takes_no_job_is_named_with_the_reason_in_every_list(run: Run, agent: FakeAgent) -> None:
    lost = GPU | {"index": 1, "uuid": "GPU-2", "job": None, "condition": "lost", "why": "XID 79: off the bus"}
    agent.replies["GET /v1/gpus"] = [GPU | {"condition": "degraded", "why": "an NVLink error"}, lost]
    assert run("gpus", "--line")[1] == "2 GPUs: 1 held, 0 free, 1 out of use\n"
    shown = run("gpus")[1]
    assert "GPU-2 lost: XID 79: off the bus" in shown and "degraded: an NVLink error" in shown and " out " in shown
    agent.replies["GET /v1/hosts"] = [HOSTS[0] | {"gpus_out": 1, "gpus_why": "XID 79: off the bus"}]
    assert "1 GPU out: XID 79: off the bus" in run("hosts")[1]
    agent.replies["GET /v1/hosts"] = [HOSTS[0] | {"gpus_known": False, "gpus_why": "the driver does not answer"}]
    assert "the driver does not answer" in run("hosts")[1]
    agent.replies["GET /v1/voters"] = {"voters": ["gpu1"], "rows": []}
    code, shown, _ = run("doctor")
    assert (
        code == 1
        and "GPU-2 is lost: XID 79" in shown
        and "its the GPUs of this host are not known: the driver does not" in shown
    )


def test_what_is_remembered_of_a_gpu_is_forgotten_by_name(run: Run, agent: FakeAgent) -> None:
    agent.replies["POST /v1/gpus/GPU-2/forget"] = {"said": "XID 48"}
    assert run("gpus", "forget", "GPU-2")[1] == "GPU-2: forgot XID 48\n"
    agent.replies["POST /v1/gpus/GPU-2/forget"] = {"said": ""}
    assert "GPU-2: the agent remembers nothing beyond" in run("gpus", "forget", "GPU-2")[1]
    assert run("gpus", "forget")[0] == 2


def test_what_the_hosts_agreed_on_happened_in_the_rack_and_not_where_it_was_noted(run: Run, agent: FakeAgent) -> None:
    agent.replies["GET /v1/why/j1"] = [STORY | {"key": "log/7.1"}, STORY | {"event": "ranks run here"}]
    _, out, _ = run("why", "j1")
    agreed, here = out.splitlines()[1:3]
    assert " rack " in agreed and "gpu2" not in agreed
    assert " gpu2 " in here


def test_the_story_of_a_job_ends_with_what_it_waits_for_now(run: Run, agent: FakeAgent, job: Job) -> None:
    agent.replies["GET /v1/jobs/j1"] = job(state="queued", reason="tenant ann uses 2 of its quota of 2")
    assert "now queued: tenant ann uses 2 of its quota of 2\n" in run("why", "j1")[1]
    agent.replies["GET /v1/jobs/j1"] = job(state="done", reason="over")
    assert "now" not in run("why", "j1")[1].splitlines()[-2].split()


def test_the_story_of_a_host_says_who_saw_it(run: Run, agent: FakeAgent) -> None:
    agent.replies["GET /v1/why/gpu1"] = [STORY | {"subject": "host/gpu1", "event": "gone"}]
    _, out, _ = run("why", "gpu1")
    assert out.startswith("TIME") and "SEEN BY" in out.splitlines()[0]


def test_quotas_and_volumes_are_changed(run: Run, agent: FakeAgent) -> None:
    agent.replies |= {"POST /v1/quotas": {}, "POST /v1/volumes": {}, "DELETE /v1/volumes/demo": {}}
    assert run("quota", "ann", "8")[:2] == (0, "ann may hold 8 GPUs\n")
    assert run("quota", "ann", "none")[:2] == (0, "ann may hold any number of GPUs\n")
    assert run("volume", "create", "demo", "64MiB")[0] == run("volume", "rm", "demo")[0] == 0
    changes = [(target, body) for target, body in agent.asked if not target.startswith("GET")]
    assert changes == [
        ("POST /v1/quotas", {"tenant": "ann", "gpus": 8}),
        ("POST /v1/quotas", {"tenant": "ann", "gpus": None}),
        ("POST /v1/volumes", {"volume": "demo", "size_bytes": 64 << 20}),
        ("DELETE /v1/volumes/demo", None),
    ]


SWAP_ON = {"word": "on", "device": "/dev/nbd0", "used_bytes": 12 << 20, "why": ""}


def test_a_volume_becomes_swap_and_one_that_exists_needs_no_size(run: Run, agent: FakeAgent) -> None:
    row = VOLUME | {"volume": "swap", "host": "gpu1", "swap": SWAP_ON}
    agent.replies |= {"GET /v1/volumes": [], "POST /v1/volumes": row, "POST /v1/volumes/swap/swap": {"swap": "on"}}
    code, said, _ = run("volume", "swap", "swap", "64G")
    assert (code, said) == (0, "swap: 64 GiB, swap of gpu1; next: agentctl memory\n")
    assert ("POST /v1/volumes", {"volume": "swap", "size_bytes": 64 << 30}) in agent.asked
    assert run("volume", "swap", "swap", "1G", "--mirror", "2", "--tenant", "ann")[0] == 0
    asked = {"volume": "swap", "size_bytes": 1 << 30, "mirror": 2, "tenant": "ann"}
    assert ("POST /v1/volumes", asked) in agent.asked
    assert run("volume", "swap", "swap", "1G", "--parity", "2+1")[0] == 0
    assert ("POST /v1/volumes", {"volume": "swap", "size_bytes": 1 << 30, "parity": "2+1"}) in agent.asked
    assert run("volume", "swap", "swap")[0] == 2, "there is no such volume, and no size"
    assert run("volume", "swap", "swap", "much")[0] == 2
    agent.replies["GET /v1/volumes"] = [row]
    before = len(agent.asked)
    assert run("volume", "swap", "swap")[:2] == (0, "swap: 64 MiB, swap of gpu1; next: agentctl memory\n")
    assert "POST /v1/volumes" not in [asked for asked, _ in agent.asked[before:]], "it is used as it is"


def test_memory_says_how_swap_is(run: Run, agent: FakeAgent) -> None:
    waits = SWAP_ON | {"word": "waits", "why": "no swap helper listens"}
    agent.replies["GET /v1/volumes"] = [VOLUME | {"volume": "swap", "host": "gpu1", "swap": SWAP_ON}]
    assert "swap on gpu1: swap on, /dev/nbd0, 12 MiB used" in run("memory")[1]
    agent.replies["GET /v1/volumes"] = [VOLUME | {"volume": "swap", "host": "gpu1", "swap": waits}]
    assert "swap waits, /dev/nbd0, 12 MiB used: no swap helper listens" in run("memory")[1]


def test_swap_that_has_no_room_for_its_pages_is_not_forgotten(
    run: Run, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lack of room is known only after a while: what the volume says then is told."""
    monkeypatch.setattr("cli.volume.unswap.LOOK_S", 0.0)
    kept = SWAP_ON | {"why": "there is room for 1 MiB; next: free memory"}
    agent.replies |= {
        "POST /v1/volumes/swap/swap": {"swap": "ending"},
        "DELETE /v1/volumes/swap": {"volume": "swap"},
        "GET /v1/volumes": [VOLUME | {"volume": "swap", "host": "gpu1", "swap": kept}],
    }
    code, _, errors = run("volume", "unswap", "swap")
    assert code == 4 and "there is room for 1 MiB" in errors and "next: free memory" in errors
    assert not [target for target, _ in agent.asked if target.startswith("DELETE")]
    agent.replies["GET /v1/volumes"] = [VOLUME | {"volume": "swap", "host": "gpu1", "swap": SWAP_ON | {"word": "off"}}]
    assert run("volume", "unswap", "swap")[:2] == (0, "swap is removed from gpu1\n")


SILENT: list[dict[str, Any]] = [
    {"host": "gpu3", "why": "no answer within 3 s", "age_s": None},
    {"host": "gpu4", "why": "its agent restarts and will be back within 9 s", "age_s": 12.0},
]
EVERY_LIST = [
    "gpus",
    "gpus --line",
    "slabs",
    "volume ls",
    "volume show demo",
    "memory",
    "tensors",
    "why j1",
    "voters",
    "interference",
]


@pytest.mark.parametrize("words", EVERY_LIST)
def test_a_list_that_is_not_whole_names_who_did_not_answer_and_has_its_own_exit_code(
    run: Run, agent: FakeAgent, words: str
) -> None:
    agent.replies |= {"GET /v1/voters": {"voters": [], "rows": [], "under_way": ""}, "GET /v1/interference": []}
    assert (run(*words.split())[0], run(*words.split())[2]) == (0, "")
    agent.unanswered = SILENT
    code, out, err = run(*words.split())
    assert code == 8
    assert err.splitlines() == [
        "incomplete: gpu3 is missing (no answer within 3 s)",
        "incomplete: gpu4 is shown as it was 12 s ago (its agent restarts and will be back within 9 s)",
        "  next: add --timeout 30s to wait longer, or: agentctl why host/gpu3",
    ]
    assert words != "gpus --line" or out.endswith("; 2 hosts did not answer\n")
    code, out, err = run(*words.split(), "--json")
    assert (code, err) == (8, "") or words == "gpus --line"
    assert words == "gpus --line" or json.loads(out)["unanswered"] == SILENT


def test_a_list_waits_for_hosts_as_long_as_its_reader_says(run: Run, agent: FakeAgent) -> None:
    """The agent is waited for longer: its answer says which hosts are missing."""

    def late(_body: object) -> list[dict[str, Any]]:
        time.sleep(0.4)
        return [SLAB]

    agent.replies["GET /v1/slabs?timeout_s=0.2"] = late
    code, out, _ = run("slabs", "--timeout", "200ms")
    assert (code, "demo" in out) == (0, True)
    run("gpus", "--timeout", "2min")
    run("gpus")
    assert [path for path, _ in agent.asked if "gpus" in path] == ["GET /v1/gpus?timeout_s=120.0", "GET /v1/gpus"]


def test_a_job_names_hosts_that_did_not_say_what_its_ranks_do(run: Run, agent: FakeAgent, job: Job) -> None:
    agent.replies["GET /v1/jobs/j1"] = job(unanswered=["gpu2"])
    code, out, _ = run("job", "j1")
    assert (code, "gpu2 did not answer" in out) == (8, True)


def test_who_sums_a_job_is_not_called_nobody_while_hosts_are_silent(run: Run, agent: FakeAgent) -> None:
    agent.replies["GET /v1/tensors"] = []
    assert run("tensors", "--move", "j1", "gpu2")[0] == 3
    agent.unanswered = SILENT
    code, _, err = run("tensors", "--move", "j1", "gpu2")
    assert (code, "gpu3 is missing" in err) == (8, True)


def test_hosts_and_status_say_what_is_wrong_with_a_host_that_is_alive(run: Run, agent: FakeAgent) -> None:
    """Four hosts that each lead a rack of their own are alive, but that is not all there is to say."""
    other = {"what": "it belongs to another rack", "next": "choose which rack stays"}
    twin = {"what": "two machines claim this name", "next": "rename one"}
    row = agent.replies["GET /v1/hosts"][0] | {"plugins_failed": []}
    agent.replies["GET /v1/hosts"] = [
        row,
        row | {"host": "gpu8", "leads": False, "troubles": [other]},
        row | {"host": "gpu9", "leads": False, "troubles": [other, twin]},
    ]
    code, out, _ = run("hosts")
    assert code == 0
    assert "wrong: it belongs to another rack; wrong: two machines claim this name" in out
    assert out.count("next: choose which rack stays") == 1 and "next: rename one" in out
    assert "3 of 3 hosts alive, 2 wrong; gpu1 leads" in out
    assert run("status")[0] == 0
    agent.replies["GET /v1/status"] |= {"wrong": [{"host": "gpu9", **twin}]}
    code, out, _ = run("status")
    assert (code, "gpu9: two machines claim this name; next: rename one" in out) == (1, True)
