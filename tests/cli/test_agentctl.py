"""Every noun: its table, its JSON, its exit code, and what it says when something is wrong."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from agent.api.gossip_row import COUNTED, GossipRow, SuspectRow
from cli import main as agentctl
from cli.client import REFUSED, TOO_LATE, Agent, AgentctlError
from cli.jobs.job import exit_words, facts, host_memory, limits
from cli.main import NOUNS, main
from covey.core.ids import HostId
from tests.cli.conftest import FakeAgent
from tests.cli.rack_answers import GPU, HOSTS, SLAB, STORY, Job, Run, error_of
from tests.cli.rack_answers import answers as answers
from tests.cli.rack_answers import run as run


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
        ("version", ["agentctl ", "agentd 0.1.0: gpu1", "not known: gpu2"]),
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


def test_each_surface_says_when_a_waiting_job_starts_and_from_what(run: Run, agent: FakeAgent) -> None:
    waiting = {**agent.replies["GET /v1/jobs"][0], "state": "queued", "places": [], "ranks": [], "reason": "2nd"}
    agent.replies |= {"GET /v1/jobs": [waiting], "GET /v1/jobs/j1": waiting}
    start = {"id": "j1", "p50_s": 720.0, "p90_s": 3900.0, "basis": "from 34 jobs of ann named bert*"}
    for known, age_s, said in (
        (start, 0.0, "starts within 12 min (p50), 1 h 5 min (p90), from 34 jobs of ann named bert*"),
        (start, 1000.0, "starts within 1.0 s (p50), 48 min 20 s (p90), from 34 jobs of ann named bert*"),
        ({**start, "p90_s": None}, 0.0, "starts within 12 min (p50), p90 not known, from 34 jobs of ann named bert*"),
        ({**start, "p50_s": 0.0, "p90_s": 0.0, "basis": "there is room"}, 0.0, "starts at once: there is room"),
        ({**start, "p50_s": None, "p90_s": None, "basis": "not known: 2 have ended"}, 0.0, "not known: 2 have ended"),
    ):
        data = {"starts": [known], "whole": True, "age_s": age_s}
        agent.replies |= {"GET /v1/starts": data, "POST /v1/starts": {**known, "id": ""}}
        for words in ("jobs", "job j1", "why j1"):
            assert said in run(*words.split())[1], words
        if not age_s:
            code, out, err = run("submit", "--dry-run", "--", "train")
            assert (code, err) == (0, "") and "not submitted; " in out and said in out
    agent.replies["GET /v1/starts"] = {"starts": [], "whole": False, "age_s": 0.0}
    assert "being worked out" in run("job", "j1")[1] and "being worked out" in run("why", "j1")[1]
    agent.replies["GET /v1/starts"] = (REFUSED, 403)
    assert run("job", "j1")[0] == run("jobs")[0] == 0, "an agent that cannot say hides nothing else"
    assert not [asked for asked, _ in agent.asked if asked == "POST /v1/jobs"]
    assert "with --dry-run no job is submitted" in run("submit", "--dry-run", "--wait", "--", "train")[2]


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


def test_versions_that_no_agent_says_are_not_known(run: Run, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is no rack without hosts, and an agent that hangs is not waited for as long as for an answer."""
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    agent.replies["GET /v1/hosts"] = (REFUSED, 403)
    for words, said in (((), "no: because"), (("--agent", "https://gpu1:8470"), "you have no certificate")):
        code, out, err = run(*words, "version")
        assert (code, err) == (0, "") and out.startswith("agentctl ") and "agents: not known: " in out and said in out
    code, out, _ = run("version", "--json")
    assert code == 0 and json.loads(out)["data"]["hosts"] is None
    waited = []

    def hangs(self: Agent, *_: str) -> None:
        waited.append(self.timeout_s)
        raise AgentctlError(TOO_LATE, "it did not answer", "it hangs", "wait")

    monkeypatch.setattr(Agent, "get", hangs)
    for line in ("version", "version --timeout 20s"):
        assert "agents: not known: it did not answer: it hangs\n" in run(*line.split())[1]
    assert waited[0] <= 5.0 and waited[1] == 20.0


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
    assert agent.asked[-1][0] == "GET /v1/jobs?all=1&mine=1"


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
        ("salloc", "unknown command 'salloc'", "agentctl shell --gpus"),
        ("jobs --al", "unknown option --al", "--all"),
        ("hosts --jsno", "unknown option --jsno", "--json"),
        ("hosts gpu1", "invalid ACTION 'gpu1'", "--help"),
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
        ("submit --host-memory 8G -- python", "unknown option --host-memory", "--mem 64GiB"),
        ("submit --mem-per-cpu 8G -- python", "unknown option --mem-per-cpu", "--mem 64GiB"),
        ("submit --after j1 -- python", "invalid --after 'j1'", "--after ok:j1"),
        ("submit --after on:j1 -- python", "invalid --after 'on:j1'", "ok:JOB"),
        ("submit --begin soon -- python", "invalid --begin soon", "--begin 18:30"),
        ("submit --begin 2001-01-01 -- python", "invalid --begin 2001-01-01", "that time is over"),
        ("submit --notify ftp://x -- python", "invalid --notify ftp://x", "https://HOST"),
        ("submit --follow --array 0-3 -- python", "--follow and --array", "agentctl submit --wait"),
        ("priority j1", "no place is named", "agentctl priority j1 --up"),
        ("update j1 --time 90", "--time 90 has no unit", "--time 90min"),
        ("cancel", "no job is named", "agentctl cancel j1"),
        ("cancel j1 --state queued", "both jobs and a filter", "agentctl cancel j1"),
        ("cancel j9-j5", "invalid range of jobs 'j9-j5'", "j5-j9"),
        ("jobs --columns nam", "invalid --columns 'nam'", "did you mean name?"),
        ("submit --frob 1 -- python", "unknown option --frob", "agentctl submit --help"),
        ("logs j1 --lines 5", "unknown option --lines", "--tail N"),
        ("submit --class best -- python", "invalid --class 'best'", "--help"),
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
    others = GPU | {
        "job": None,
        "utilization": None,
        "use": "used by processes 42, 43, which no job of the rack started",
    }
    idle = GPU | {"job": "j7", "use": "idle for 12 min: no process is there"}
    agent.replies["GET /v1/gpus"] = [others, idle]
    said = run("gpus")[1]
    assert "next: on gpu1: ps -fp 42\n" in said and "next: agentctl job j7; agentctl logs j7\n" in said
    assert "1 held, 0 free, 1 out of use" in said and "idle for 12 min: no process is there" in said
    agent.replies["GET /v1/gpus"] = [lost]
    agent.replies["GET /v1/hosts"] = [HOSTS[0] | {"gpus_held": {"j7": "idle", "j8": "drain"}}]
    assert "j7 does not use a GPU that it holds; j8 holds a GPU: drain" in run("hosts")[1]
    agent.replies["GET /v1/hosts"] = [HOSTS[0] | {"gpus_out": 1, "gpus_why": "XID 79: off the bus"}]
    assert "1 GPU out: XID 79: off the bus" in run("hosts")[1]
    itself = {
        "cordoned_by": "its own agent",
        "closed_why": "j4, j7, j9 did not start here",
        "closed_wall_s": 86400.0 * 9,
    }
    agent.replies["GET /v1/hosts"] = [HOSTS[0] | itself]
    said = run("hosts")[1]
    assert re.search(
        r"cordoned by its own agent since 1970-01-(09|10) \d\d:\d\d, 0 jobs there; j4, j7, j9 did not", said
    )
    assert "next: agentctl why host/gpu1; agentctl hosts uncordon gpu1, once jobs can start there\n" in said
    agent.replies["GET /v1/hosts"] = [HOSTS[0] | {"gpus_known": False, "gpus_why": "the driver does not answer"}]
    assert "the driver does not answer" in run("hosts")[1]
    agent.replies["GET /v1/voters"] = {"voters": ["gpu1"], "rows": []}
    agent.replies["GET /v1/links"] = []
    code, shown, _ = run("doctor")
    assert (
        code == 1
        and "GPU-2 is lost: XID 79" in shown
        and "host gpu1: its GPUs are not known: the driver does not answer" in shown
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


def test_gossip_says_who_suspects_whom_and_what_was_dropped(run: Run, agent: FakeAgent) -> None:
    counted: dict[str, Any] = dict.fromkeys(COUNTED, 0)
    quiet = GossipRow(
        **counted, host=HostId("gpu2"), up_s=0.0, health=0, alone=False, stalled_s=0.0, dropped={}
    )  # fmt: skip
    busy = msgspec.structs.replace(
        quiet, host=HostId("gpu1"), up_s=100.0, health=3, sent=850, sent_bytes=170_000, alone=True, full=2,
        suspects=(SuspectRow(HostId("gpu3"), HostId("gpu2"), 4.0),), dropped={"replayed": 2, "new_reason": 1},
    )  # fmt: skip
    agent.replies["GET /v1/gossip"] = msgspec.to_builtins([quiet, busy])
    code, out, err = run("gossip")
    lines = out.splitlines()
    assert (code, err) == (0, "") and lines[1].split()[:4] == ["gpu1", "3", "8.5", "1.7"]
    assert lines[2].split()[:4] == ["gpu2", "0", "0.0", "0.0"], "an agent that has just started"
    assert lines[3:7] == [
        "gpu1: no other host answers it",
        "gpu1: knows that gpu3 is suspected by gpu2, for 4.0 s",
        "gpu1: dropped datagrams: 1 new reason, 2 seen before",
        "gpu1: its table is full, 2 times a host was not taken; raise hosts_max on every host",
    ]


def test_the_story_of_a_host_says_who_saw_it(run: Run, agent: FakeAgent) -> None:
    agent.replies["GET /v1/why/gpu1"] = [STORY | {"subject": "host/gpu1", "event": "gone"}]
    _, out, _ = run("why", "gpu1")
    assert out.startswith("TIME") and "SEEN BY" in out.splitlines()[0]


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
    "groups",
    "gossip",
]


@pytest.mark.parametrize("words", EVERY_LIST)
def test_a_list_that_is_not_whole_names_who_did_not_answer_and_has_its_own_exit_code(
    run: Run, agent: FakeAgent, words: str
) -> None:
    agent.replies |= {"GET /v1/voters": {"voters": [], "rows": [], "under_way": ""}, "GET /v1/interference": []}
    agent.replies |= {"GET /v1/links": [], "GET /v1/groups": [], "GET /v1/gossip": []}
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


def test_hosts_say_where_jobs_of_other_users_cannot_run_once_they_can_anywhere(run: Run, agent: FakeAgent) -> None:
    row = agent.replies["GET /v1/hosts"][0] | {"plugins_failed": [], "other_users": "no"}
    agent.replies["GET /v1/hosts"] = [row, row | {"host": "gpu8", "leads": False}]
    assert "other users" not in run("hosts")[1]
    agent.replies["GET /v1/hosts"] = [row, row | {"host": "gpu8", "leads": False, "other_users": "limited"}]
    assert run("hosts")[1].count("jobs of other users: not possible, no starter") == 1
    agent.replies["GET /v1/hosts"] = [row | {"other_users": "unlimited"}]
    assert "limits of other users' jobs: not enforced" in run("hosts")[1]


def test_a_job_that_the_kernel_killed_for_its_memory_says_oom() -> None:
    assert exit_words({"exit_code": 137, "oom_bytes": 64 << 30}) == "137 (oom, peak 64 GiB)"
    assert exit_words({"exit_code": 137, "oom_bytes": 0}) == exit_words({"exit_code": 137}) == 137
    assert exit_words({"exit_code": None, "oom_bytes": 1}) is None, "it is started again"


def test_a_job_says_where_its_limits_are_enforced() -> None:
    assert limits({}) == limits({"limited": {}}) == ""
    assert limits({"limited": {"gpu1": True, "gpu2": True}}) == "enforced"
    assert limits({"limited": {"gpu1": False}}) == "", "it asked for none"
    assert limits({"limited": {"gpu1": False}, "host_memory": 1}) == "not enforced"
    assert limits({"limited": {"gpu1": False}, "cpus": 1}) == "not enforced"
    assert limits({"limited": {}, "host_memory": 1}) == "", "no host answered"
    assert limits({"limited": {"gpu1": True, "gpu2": False}}) == "enforced on gpu1, not enforced on gpu2"


def test_a_job_says_what_it_may_take_of_each_hosts_memory_and_what_it_has() -> None:
    gib = 1 << 30
    has = {"blocks_bytes": 20 * gib, "arrays_bytes": 4 * gib, "peak_bytes": 31 * gib}
    seen = {"host_memory": 64 * gib, "memory": {"gpu1": has}}
    words = "at most 64 GiB on a host; gpu1: Blocks 20 GiB, arrays 4 GiB, peak 31 GiB"
    assert host_memory(seen) == words
    not_known = {**has, "arrays_bytes": 0, "peak_bytes": 0}
    assert host_memory({"memory": {"gpu1": not_known}}) == "gpu1: Blocks 20 GiB"
    assert host_memory({**seen, "memory": {}}) == "at most 64 GiB on a host"
    assert host_memory({}) == "", "an older agent"
