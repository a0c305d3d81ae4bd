"""The `sitecustomize` of ranks: a script notices nothing of it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from covey.core.ids import JobId
from covey.hooks import SITE, bare, rank_of
from covey.wire.frames import body_size, unpack
from covey.wire.job import PROTOCOL, Hooked, Join, decoder
from plugins.facts import JobHooked
from tests.agent.here import until
from tests.covey.agents import Agent

RANK = {"COVEY_SOCKET": "/nowhere/jobs.sock", "COVEY_TOKEN": "t", "COVEY_RANK": "3", "COVEY_WORLD_SIZE": "4"}


def run(code: str, *behind: Path, **environ: str) -> str:
    """Output of a script in a rank's environment; nothing may be written to stderr."""
    path = os.pathsep.join([SITE, *map(str, behind)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout.strip()


def test_a_script_without_torch_loads_nothing_of_ours() -> None:
    seen = run("import sys; print([name for name in sys.modules if name.startswith('covey')])", **RANK)
    assert seen == "[]"


def test_the_sitecustomize_behind_ours_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 7\n")
    code = "import builtins, sys; print(builtins.mine, sys.modules['sitecustomize'].__file__)"
    assert run(code, tmp_path, **RANK) == f"7 {tmp_path}/sitecustomize.py"
    assert run(code, tmp_path) == f"7 {tmp_path}/sitecustomize.py", "also outside a job"


def test_the_usercustomize_of_the_user_runs_as_ever(tmp_path: Path) -> None:
    """Python runs no usercustomize in a virtual environment, so this uses the Python beneath it."""
    (tmp_path / "usercustomize.py").write_text("import builtins; builtins.mine = 8\n")
    path = os.pathsep.join([SITE, str(tmp_path)])
    code = "import builtins, site; print(getattr(builtins, 'mine', None) if site.ENABLE_USER_SITE else 8)"
    python = str(getattr(sys, "_base_executable", sys.executable))
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": path, **RANK}
    done = subprocess.run([python, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("8", "")


def test_a_torch_that_cannot_be_hooked_trains_all_the_same(tmp_path: Path) -> None:
    """The optimizer module has nothing in it: the hooks fail, but the import does not."""
    for folder in (tmp_path / "torch", tmp_path / "torch/optim"):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (tmp_path / "torch/optim/optimizer.py").write_text("x = 1\n")
    assert run("import torch.optim.optimizer as o; print(o.x)", tmp_path, **RANK, COVEY_JOB_ID="j1") == "1"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        ({"COVEY_SOCKET": ""}, "not part of a Covey job"),
        ({"COVEY_HOOKS": "0"}, "--no-hooks"),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, ""),
        ({"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}, ""),
        ({"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, "another process of this rank"),
    ],
)
def test_one_process_of_a_rank_reports(changed: dict[str, str], why: str) -> None:
    """A launcher that runs as a rank starts processes with ranks of their own: the first of a host reports."""
    assert why in rank_of({**RANK, **changed}) and bool(why) == bool(rank_of({**RANK, **changed}))


def test_frames_written_by_hand_are_those_of_the_wire() -> None:
    frames = [
        bare.frame(type="Join", pid=5, job="j1", rank=3, epoch=2, token="t", protocol=PROTOCOL),
        bare.frame(type="Hooked", to="", problem="größer als nötig"),
    ]
    found = [unpack(frame[4:], decoder) for frame in frames]
    assert found == [
        Join(5, JobId("j1"), 3, 2, "t", protocol=PROTOCOL),
        Hooked("", "größer als nötig"),
    ]
    assert all(body_size(frame[:4]) == len(frame) - 4 for frame in frames) and bare.PROTOCOL == PROTOCOL


def test_an_agent_that_is_away_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**RANK, "COVEY_JOB_ID": "j1", "COVEY_EPOCH": "1"}.items():
        monkeypatch.setenv(name, value)
    assert bare.report("nothing listens there") is False


async def test_why_nothing_is_seen_reaches_the_agent(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in agent.environ().items():
        monkeypatch.setenv(name, value)
    assert await asyncio.to_thread(bare.report, "covey-job is not installed for python3.9")
    await until(lambda: any(isinstance(fact, JobHooked) for fact in agent.facts))
    told = next(fact for fact in agent.facts if isinstance(fact, JobHooked))
    assert (told.rank, told.to, told.problem) == (1, "", "covey-job is not installed for python3.9")
