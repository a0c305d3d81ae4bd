"""Files that say what a job is: lines of scripts, options of Slurm, TOML; what is wrong is named, nothing is sent."""

from pathlib import Path
from typing import Any

import pytest

from cli.client import AgentctlError
from cli.job_files import sbatch_options
from cli.job_files.sbatch_options import Given
from tests.cli.conftest import FakeAgent
from tests.cli.public_scripts import SCRIPTS
from tests.cli.rack_answers import Job, Run
from tests.cli.rack_answers import answers as answers
from tests.cli.rack_answers import run as run

Submit = Any


@pytest.fixture
def submit(run: Run, agent: FakeAgent, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """Submit a file with this name and content; the body that the agent got, and what was said on stderr."""
    agent.replies["POST /v1/jobs"] = job(state="queued", reason="waits")
    monkeypatch.chdir(tmp_path)

    def submitted(name: str, content: str, *words: str) -> tuple[dict[str, Any], str]:
        Path(name).write_text(content)
        before = len(agent.asked)
        code, _, err = run("submit", *words[: words.index("--") if "--" in words else None], name,
                           *(words[words.index("--") :] if "--" in words else ()))  # fmt: skip
        sent = [body for path, body in agent.asked[before:] if path == "POST /v1/jobs"]
        assert (code == 0) == bool(sent), (code, err)
        return (sent[0] if sent else {}), err

    return submitted


def test_a_script_says_its_options_and_its_text_goes_along(submit: Submit) -> None:
    text = (
        "#!/bin/bash\n# what it is\n#COVEY --workers 4 --gpus 2   # two each\n#COVEY --time 2h\n\npython train.py $1\n"
    )
    body, err = submit("BERT_large.sh", text, "--time", "1h", "--", "big")
    assert body["argv"] == ["/bin/bash", "-c", text, "BERT_large.sh", "big"]
    assert (body["workers"], body["gpus_per_worker"], body["time_limit_s"]) == (4, 2, 3600.0), "what is typed holds"
    assert body["name"] == "BERT_large" and err.startswith("next:")


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ("-J a_b\n-N 2\n--ntasks-per-node=4\n--gres=gpu:a100:4\n-c 8", (8, 1, None, {"name": "a_b", "cpus": 8})),
        ("--nodes=3 --gpus-per-node=8 -t 1-12", (3, 8, "apart", {"time_limit_s": 129600.0})),
        ("-n 4 -N1 --gres=gpu:4 --mem=64G", (4, 1, "host", {"host_memory": 64 << 30})),
        ("-n4 --gpus-per-task=2 --mem-per-cpu=2G -c 2", (4, 2, None, {"host_memory": 4 << 30})),
        ("--gpus 8 --gpus-per-task 2", (4, 2, None, {})),
        ("--time=90:30 -A ml -q opportunistic", (1, 0, None, {"time_limit_s": 5430.0, "tenant": "ml"})),
        ("--signal=B:15@120 --export=NONE,A=1 -D /", (1, 0, None, {"grace_s": 120.0, "cwd": "/"})),
        ("--signal=SIGUSR2@90 -t 5", (1, 0, None, {"stop_signal": "USR2", "grace_s": 90.0, "signal_before_s": 90.0})),
        ("-o out/%x-%j.%t -e err", (1, 0, None, {})),
    ],
)
def test_options_of_slurm_are_ours(submit: Submit, lines: str, wanted: Any) -> None:
    body, _ = submit("job.sh", "#!/bin/sh\n" + "".join(f"#SBATCH {line}\n" for line in lines.split("\n")) + "true\n")
    workers, gpus, pack, more = wanted
    assert (body.get("workers", 1), body["gpus_per_worker"], body.get("pack")) == (workers, gpus, pack)
    assert {name: body[name] for name in more} == more and body["env"]["COVEY_SLURM"] == "1"
    if "stdout" in body:
        assert body["stdout"].endswith("/out/%x-%i.%r") and body["stderr"].endswith("/err")
    if "A=1" in lines:
        assert body["env"].keys() <= {"PATH", "HOME", "USER", "LANG", "A", "COVEY_SLURM", "COVEY_UMASK"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("1:00:30", 3630), ("2-3", 183600), ("1-2:30", 95400), ("1-0:0:9", 86409)],
)
def test_every_form_of_slurms_times_is_read(text: str, seconds: int) -> None:
    assert sbatch_options.time_of(Given(text, "sbatch")) == seconds
    assert sbatch_options.time_of(Given("UNLIMITED", "sbatch")) is None


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("j.sh", "#!/bin/sh\n#COVEY --wrkers 4\n", ["j.sh line 2: unknown option --wrkers", "did you mean --workers?"]),
        ("j.sh", "#!/bin/sh\n#COVEY --workers four\n", ["j.sh line 2: invalid --workers 'four'", "whole number"]),
        ("j.sh", "#!/bin/sh\n#COVEY --name 'a\n", ["j.sh line 2: its quotes do not match", "correct j.sh line 2"]),
        ("j.sh", "#!/bin/sh\n\n#SBATCH --ntask=4\n", ["j.sh line 3: unknown option --ntask", "did you mean --ntasks?"]),
        ("j.sh", "#!/bin/sh\n#SBATCH -n x\n", ["j.sh line 2: invalid --ntasks=x", "one whole number"]),
        ("j.sh", "#!/bin/sh\n#SBATCH -N 1-4\n", ["j.sh line 2: invalid --nodes=1-4", "--nodes=1"]),
        ("j.sh", "#!/bin/sh\n#SBATCH -t soon\n", ["j.sh line 2: invalid --time=soon", "days-hours"]),
        ("j.sh", "#!/bin/sh\n#SBATCH --gres=fpga:1\n", ["invalid --gres=fpga:1", "gpu:N"]),
        ("j.sh", "#!/bin/sh\n#SBATCH -n 3 --gres=gpu:4\n", ["4 GPUs for 3 tasks", "--gpus-per-task"]),
        ("j.sh", "#!/bin/sh\n#SBATCH -o %q.out\n", ["%q.out has %q", "%j is the job's id"]),
        ("j.sh", "#!/bin/sh\n#SBATCH -w gpu1\n", ["-w is refused", "agentctl hosts cordon HOST"]),
        ("j.sh", "#!/bin/sh\n#SBATCH --mem lots\n", ["invalid --mem=lots", "--mem=16G"]),
        ("j.sh", "#!/bin/sh\n#SBATCH -J\n", ["-J has no value", "--job-name=VALUE"]),
        ("train.py", "print()\n", ["train.py is no job file", "agentctl submit -- python train.py"]),
        ("j.toml", "command = 'x'\n", ["j.toml: invalid command: 'x'", 'command = ["python", "train.py"]']),
        ("j.toml", "workers = 4\n", ["j.toml: no command"]),
        ("j.toml", "command = ['x']\nwrkers = 4\n", ["j.toml wrkers: unknown option --wrkers", "--workers?"]),
        ("j.toml", "command = ['x']\ntime = 30\n", ["j.toml time: --time 30 has no unit"]),
        ("j.toml", "command = ['x']\n[env]\nA = [1]\n", ["j.toml env A: invalid value [1]"]),
        ("j.toml", "command = \n", ["j.toml: it is no TOML"]),
        ("j.sh", "echo\n", ["j.sh is no job file", "#!/bin/bash", "agentctl submit -- sh j.sh"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named_and_nothing_is_sent(
    submit: Submit, name: str, content: str, said: list[str]
) -> None:
    body, err = submit(name, content)
    assert not body and len(err.splitlines()) == 3
    for each in said:
        assert each in err, err


def test_what_slurm_does_otherwise_is_said(submit: Submit) -> None:
    text = "#!/bin/sh\n#SBTACH -n 3\n#SBATCH -p gpu --mail-type=END --signal=USR1@9000\ntrue\n#SBATCH -n 9\n"
    body, err = submit("j.sh", text)
    assert body.get("workers", 1) == 1 and body["grace_s"] == 3600.0
    for said in ("line 2: #SBTACH is a comment; did you mean #SBATCH?", "line 5: #SBATCH after the first command",
                 "line 3: --mail-type: nobody gets mail", "partition gpu",
                 "SIGKILL comes 3600 s after USR1"):  # fmt: skip
        assert f"{said}" in err, err


def test_a_toml_file_has_the_options_under_their_names(submit: Submit) -> None:
    text = """
name = "BERT_large"
workers = "4..16"
gpus = 2
time = "2h"
private_tmp = true
output = "out-%j"
command = ["python", "train.py"]
env = { A = "b", N = 3 }
"""
    body, _ = submit("job.toml", text, "--gpus", "1", "--", "--lr", "3")
    assert body["argv"] == ["python", "train.py", "--lr", "3"] and body["name"] == "BERT_large"
    assert (body["workers"], body["workers_max"], body["gpus_per_worker"], body["private_tmp"]) == (4, 16, 1, True)
    assert (body["env"]["A"], body["env"]["N"]) == ("b", "3") and body["stdout"].endswith("/out-%j")


def test_a_file_of_variables_is_read_line_by_line(run: Run, agent: FakeAgent, job: Job, tmp_path: Path) -> None:
    agent.replies["POST /v1/jobs"] = job()
    path = tmp_path / "job.env"
    path.write_text("# keys\nexport KEY='a b'\nN=1\n\n")
    run("submit", "--env-file", str(path), "--env", "N=2", "--env", "PATH", "--", "true")
    env = agent.asked[-1][1]["env"]
    assert (env["KEY"], env["N"]) == ("a b", "2") and env["PATH"]
    path.write_text("A=1\nnothing here\n")
    for words, said in (
        ((str(path),), "line 2: invalid 'nothing here'"),
        (("none.env",), "cannot read --env-file none"),
    ):
        code, _, err = run("submit", "--env-file", *words, "--", "true")
        assert code == 2 and said in err


def test_a_file_that_is_not_there_is_answered_with_the_nearest(run: Run, agent: FakeAgent, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/sh\n")
    code, _, err = run("submit", str(tmp_path / "jbo.sh"))
    assert code == 2 and f"did you mean {tmp_path}/job.sh?" in err
    with pytest.raises(AgentctlError):
        sbatch_options.read(["--frob"], "sbatch")


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_that_sites_show_their_users_are_taken_or_refused_in_words(submit: Submit, name: str) -> None:
    script = SCRIPTS[name]
    body, err = submit("job.sh", script.text)
    for said in script.says:
        assert said in err, err
    if script.refused:
        assert not body and len(err.splitlines()) == 3
    else:
        assert {field: body.get(field) for field in script.asks} == script.asks, err
        assert not [line for line in err.splitlines() if line.startswith("agentctl: ")], err
