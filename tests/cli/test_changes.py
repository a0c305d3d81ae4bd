"""What agentctl changes: jobs, volumes, swap, quotas; what it asks the agent for, and what it says of the answer."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from cli.main import main
from tests.cli.conftest import FakeAgent
from tests.cli.rack_answers import VOLUME, Job, Run
from tests.cli.rack_answers import answers as answers
from tests.cli.rack_answers import run as run

# ---- submit, wait, cancel --------------------------------------------------------------------------------------------


def test_submit_carries_command_directory_and_environment(
    run: Run, agent: FakeAgent, job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    agent.replies["POST /v1/jobs"] = job(state="queued", reason="2nd in queue 0")
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("COVEY_TOKEN", "secret")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/ssh")
    monkeypatch.setenv("ODD", "\udcff")
    monkeypatch.setenv("BASH_FUNC_module%%", "() { echo; }")
    words = "submit --name n --workers 4 --gpus 2 --tenant ann --class auto --env A=b=c --time 2h --grace 5s --cwd sub"
    words += " --signal-before 10min"
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
        "signal_before_s": 600.0,
        "grace_s": 5.0,
    }
    assert (env["VIRTUAL_ENV"], env["A"]) == (sys.prefix, "b=c")
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
    run("submit", "--mem", "64GiB", "--", "true")
    assert agent.asked[-1][1]["host_memory"] == 64 << 30
    code, _, errors = run("submit", "--mem", "0", "--", "true")
    assert code == 2 and "invalid --mem 0" in errors and "leave it out" in errors
    run("submit", "--cpus", "4", "--private-tmp", "--", "true")
    assert (agent.asked[-1][1]["cpus"], agent.asked[-1][1]["private_tmp"]) == (4, True)
    for said, image in (
        ("torch:2", "torch:2"),
        ("/i/torch.sif", "/i/torch.sif"),
        ("torch.sif", os.path.abspath("torch.sif")),
        ("./rootfs", os.path.abspath("rootfs")),
    ):
        run("submit", "--image", said, "--", "true")
        assert agent.asked[-1][1]["image"] == image
    code, _, errors = run("submit", "--cpus", "0", "--", "true")
    assert code == 2 and "invalid --cpus 0" in errors
    asked = len(agent.asked)
    code, _, errors = run("submit", "--gpu-memory", "much", "--", "true")
    assert code == 2 and "invalid --gpu-memory much" in errors and len(agent.asked) == asked


def test_each_submission_has_its_own_key_and_no_env_carries_little(
    run: Run, agent: FakeAgent, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.replies["POST /v1/jobs"] = job()
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
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


def test_quotas_and_volumes_are_changed(run: Run, agent: FakeAgent) -> None:
    agent.replies |= {"POST /v1/quotas": {}, "POST /v1/volumes": {}, "DELETE /v1/volumes/demo": {}}
    assert run("quota", "ann", "8")[:2] == (0, "ann may hold 8 GPUs\n")
    assert run("quota", "ann", "none")[:2] == (0, "ann may hold any number of GPUs\n")
    agent.replies["POST /v1/quotas"] = {"gpus": 8}
    said = "ann has weight 2 among tenants without a quota; it has one now, by which its jobs go\n"
    assert run("quota", "ann", "--weight", "2")[:2] == (0, said)
    for words in (
        ("quota", "--weight", "2"),
        ("quota", "ann", "8", "--weight", "2"),
        ("quota", "ann", "--weight", "x"),
    ):
        code, _, err = run(*words)
        assert code == 2 and "agentctl quota alice --weight 2" in err
    assert run("volume", "create", "demo", "64MiB")[0] == run("volume", "rm", "demo")[0] == 0
    changes = [(target, body) for target, body in agent.asked if not target.startswith("GET")]
    assert changes == [
        ("POST /v1/quotas", {"tenant": "ann", "gpus": 8}),
        ("POST /v1/quotas", {"tenant": "ann", "gpus": None}),
        ("POST /v1/quotas", {"tenant": "ann", "weight": 2.0}),
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


def test_the_environment_of_a_job_is_shown_as_it_is_hidden(run: Run, agent: FakeAgent) -> None:
    agent.replies["GET /v1/jobs/j1/env"] = {
        "id": "j1",
        "variables": {"A": "x\n", "API_KEY": "(hidden)"},
        "host": "gpu1",
    }
    code, out, _ = run("job", "j1", "--env")
    assert (code, out.splitlines()[:2]) == (0, ["A=x?", "API_KEY=(hidden)"])


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
