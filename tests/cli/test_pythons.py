"""`agentctl submit` finds the Python of its caller, says which it is, and what it lacks."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from cli.client import AgentctlError
from cli.pythons import chosen, covey_job
from cli.pythons.chosen import ChosenPython
from tests.cli.conftest import FakeAgent
from tests.cli.rack_answers import Job, Run
from tests.cli.rack_answers import answers as answers
from tests.cli.rack_answers import run as run

ROOT = Path(__file__).parents[2]


def made(prefix: Path, marker: str, *programs: str) -> str:
    """An environment with this file or folder in it, whose programs say `x`."""
    (prefix / "bin").mkdir(parents=True)
    (prefix / marker).mkdir() if marker == "conda-meta" else (prefix / marker).touch()
    for name in ("python", *programs):
        (prefix / "bin" / name).write_text("#!/bin/sh\necho x\n")
        (prefix / "bin" / name).chmod(0o755)
    return str(prefix)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    return {
        "venv": made(tmp_path / "venv", "pyvenv.cfg"),
        "conda": made(tmp_path / "conda", "conda-meta", "torchrun"),
        "system": made(tmp_path / "system", "none", "torchrun", "python3"),
    }


def found(word: str, place: str, typed: str | None = None, **environ: str) -> ChosenPython:
    python = chosen.chosen([word, "train.py"], place, environ, typed)
    assert python is not None
    return python


def test_an_environment_that_is_on_path_is_found_there_and_the_first_one_counts(places: dict[str, str]) -> None:
    venv, conda, system = places["venv"], places["conda"], places["system"]
    path = f"{conda}/bin:{venv}/bin:{system}/bin"
    both = found("python", "/", PATH=path, VIRTUAL_ENV=venv, CONDA_PREFIX=conda)
    assert both.words == f"python is {conda}/bin/python (conda environment)" and both.path == path
    path = f"{venv}/bin:{system}/bin"
    only = found("torchrun", "/", PATH=path, VIRTUAL_ENV=venv)
    assert only.words == f"torchrun is {system}/bin/torchrun (no environment), not of VIRTUAL_ENV ({venv})"
    assert only.python == f"{system}/bin/python", "the program runs by the Python beside it"


def test_an_environment_that_is_not_on_path_is_put_first_there(places: dict[str, str]) -> None:
    venv, conda, system = places["venv"], places["conda"], places["system"]
    left = found("python", "/", PATH=f"{system}/bin", CONDA_PREFIX=conda)
    assert left.path == f"{conda}/bin:{system}/bin" and left.python == f"{conda}/bin/python"
    said = f"python is {conda}/bin/python (conda environment), of CONDA_PREFIX: put first on the job's PATH"
    assert left.words == said
    assert found("python", "/", PATH="", VIRTUAL_ENV=venv, CONDA_PREFIX=conda).path == f"{venv}/bin"
    typed = found("python", "/", typed=f"{system}/bin", PATH=f"{system}/bin", VIRTUAL_ENV=venv)
    assert (typed.path, typed.program) == (f"{system}/bin", f"{system}/bin/python"), "a PATH that is typed is kept"


def test_a_python_that_is_named_by_its_path_or_not_there(places: dict[str, str], tmp_path: Path) -> None:
    beside = found("venv/bin/python", str(tmp_path), PATH="/nowhere", CONDA_PREFIX=places["conda"])
    assert beside.words == f"python is {places['venv']}/bin/python (virtual environment)" and beside.path == "/nowhere"
    none = found("python3", "/", PATH=f"{places['venv']}/bin")
    assert none.words == "no program 'python3' is on the job's PATH here; there is python"
    assert found("torchrun", "/", PATH=none.path).words.endswith("activate an environment, or name it by its path")
    assert chosen.chosen(["hostname"], "/", {"VIRTUAL_ENV": "/gone"}, None) is None, "it is no Python's program"
    assert chosen.chosen(["/elsewhere/python"], "/", {}, None) is None, "perhaps the job's hosts have it"


def broken(prefix: Path, how: str) -> None:
    python = prefix / "bin/python"
    match how:
        case "gone":
            shutil.rmtree(prefix)
        case "empty":
            python.unlink()
        case "dangling":
            python.unlink()
            python.symlink_to("/opt/old/python3.10")
        case _:
            python.chmod(0o644)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("gone", "there is no such folder"),
        ("empty", "there is no "),
        ("dangling", "its python leads to /opt/old/python3.10, which is not there"),
        ("locked", "may not be executed"),
    ],
)
def test_an_environment_that_is_not_whole_is_refused(places: dict[str, str], how: str, why: str) -> None:
    """Without the refusal PATH leads to the system's Python, without a word."""
    prefix, system = Path(places["venv"]), places["system"]
    broken(prefix, how)
    for path in (f"{prefix}/bin:{system}/bin", f"{system}/bin"):
        with pytest.raises(AgentctlError) as refused:
            found("python", "/", PATH=path, VIRTUAL_ENV=str(prefix))
        assert refused.value.what == f"the virtual environment {prefix} cannot be used (VIRTUAL_ENV names it)"
        assert why in refused.value.why and f"agentctl submit -- {system}/bin/python3" in refused.value.next
    if how != "gone":
        with pytest.raises(AgentctlError, match="cannot be used") as refused:
            found(f"{prefix}/bin/python", "/", PATH=f"{system}/bin")
        assert f"python3 -m venv --clear {prefix}" in refused.value.next


def test_a_folder_that_divides_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AgentctlError, match="cannot be used") as refused:
        found("python", "/", PATH="", CONDA_PREFIX=made(tmp_path / "a:b", "conda-meta"))
    assert "divides PATH" in refused.value.why and refused.value.next.startswith("conda deactivate")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real virtual environment, with nothing in it, not even pip."""
    made = tmp_path_factory.mktemp("bare") / "env"
    venv.create(made, symlinks=True, with_pip=False)
    return made


def test_a_job_that_needs_covey_job_is_told_the_line_that_installs_it(
    bare: Path, run: Run, agent: FakeAgent, job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    agent.replies["POST /v1/jobs"] = job(state="queued", reason="")
    monkeypatch.setenv("VIRTUAL_ENV", str(bare))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text("import os\nprint('import covey')\n")
    (tmp_path / "heals.py").write_text("import os\nimport covey.torch as t\n")
    first = f"note: python is {bare}/bin/python (virtual environment), of VIRTUAL_ENV: put first on the job's PATH\n"
    assert run("submit", "--", "python", "plain.py")[2] == f"{first}next: agentctl logs j1 -f\n"
    assert agent.asked[-1][1]["env"]["PATH"].startswith(f"{bare}/bin:")
    for words, reason in (
        ("--aggregate -- python plain.py", "--aggregate"),
        ("--on-lost heal -- python plain.py", "--on-lost heal"),
        ("--workers 2..4 -- python plain.py", "--workers 2..4"),
        ("-- python -u heals.py", "heals.py, which imports covey,"),
    ):
        said = run("submit", *words.split())[2]
        assert said.startswith(
            f"{first}note: covey-job is not installed for {bare}/bin/python\n"
            f"  why:  {reason} needs it; there is no module covey, msgspec, numpy, isal\n"
            f"  next: uv pip install --python {bare}/bin/python {ROOT}/covey\n"
        ), said
    assert run("submit", "--image", "torch", "--aggregate", "--", "python", "plain.py")[2].startswith("next:")
    monkeypatch.setenv("VIRTUAL_ENV", "/gone")
    code, _, said = run("submit", "--", "python", "plain.py")
    assert code == 2 and len(said.splitlines()) == 3 and "VIRTUAL_ENV names it" in said


def test_the_line_that_installs_works_for_each_kind_of_python() -> None:
    def line(**said: Any) -> str:
        return covey_job.install_line("/env/bin/python", {"pip": True, "managed": False} | said)

    assert line() == f"/env/bin/python -m pip install {ROOT}/covey"
    assert line(pip=False) == f"uv pip install --python /env/bin/python {ROOT}/covey"
    assert line(managed=True).startswith("/env/bin/python -m venv env && env/bin/pip install ")


def test_a_python_that_has_it_lacks_nothing_and_one_that_is_none_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = dict(os.environ, PYTHONPATH=str(ROOT))
    for name in ("json", "sysconfig", "importlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('what lies where submit is typed was run')\n")
    monkeypatch.chdir(tmp_path)
    assert covey_job.lacking(sys.executable, "--aggregate", str(tmp_path), environ) is None
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\necho \'{"version": [3, 9], "missing": ["covey"], "pip": true, "managed": false}\'\n')
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\necho none\n")
    for each in (old, mute):
        each.chmod(0o755)
    lacks = covey_job.lacking(str(old), "--aggregate", "/", environ)
    assert lacks is not None and "this is 3.9" in lacks[1]
    unknown = covey_job.lacking(str(mute), "--aggregate", "/", environ)
    assert unknown is not None and unknown[0] == f"whether {mute} has covey-job is not known"


@pytest.mark.long
def test_the_line_that_is_told_is_typed_and_then_nothing_is_lacking(tmp_path: Path) -> None:
    env, environ = tmp_path / "env", {"PATH": os.environ["PATH"]}
    venv.create(env, symlinks=True, with_pip=True)
    lacks = covey_job.lacking(f"{env}/bin/python", "--aggregate", "/", environ)
    assert lacks is not None
    shutil.copytree(
        ROOT / "covey", tmp_path / "covey", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    )
    line = lacks[2].replace(str(ROOT), str(tmp_path))  # pip builds in the folder, which here is a checkout
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install here: {done.stderr[-300:]}")
    assert covey_job.lacking(f"{env}/bin/python", "--aggregate", "/", environ) is None
