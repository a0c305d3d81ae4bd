"""docs/start/researcher.md and chaos.md, and what `make run` says at its end: scripts are saved and lines typed, one
after another, as they stand there, in a folder like a checkout with a rack of four agents."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.rack import processes as rack_processes
from cli.rack import rack
from tests.rack.living_rack import wait

pytestmark = [pytest.mark.rack, pytest.mark.torch, pytest.mark.long, pytest.mark.xdist_group("rack")]
ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINE_S = 300.0
STEPS = 25
"""Steps that a job has made before something is done to it: a person does not type faster."""
LEFT_OUT = ("make run", "make stop", "make storm", "make soak", ". .venv/bin/activate")
"""Lines that are not typed here: the fixture does what the first two do, and the others go on for half an hour."""
DISTURBS = ("agentctl requeue ", "agentctl preempt ", "agentctl scale ", "kill ", "pkill ")


class Person:
    """Somebody who has the page open, in a folder of a checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = Path(sys.executable).parent
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COVEY_")}
        self.environ = {**kept, "PATH": f"{programs}{os.pathsep}{kept['PATH']}", "VIRTUAL_ENV": str(programs.parent)}
        self.said: dict[str, str] = {}
        """What each line wrote."""

    def types(self, line: str) -> str:
        """Type a line: what it wrote. One that does something to a job comes once the job has made some steps."""
        line = line.partition("  #")[0].strip()
        if line.startswith(LEFT_OUT):
            return ""
        if line.startswith(DISTURBS):
            self._works((re.findall(r"\b(j\d+)\b", line) or [self.jobs()[-1]])[0])
        done = self.typed(line)
        self.said[line] = done.stdout + done.stderr
        told = "" if done.returncode == 0 else self.typed(f"agentctl why {self.jobs()[-1]}").stdout
        assert done.returncode == 0, f"{line}: exit {done.returncode}\n{self.said[line]}\n{told}"
        assert "Traceback" not in self.said[line]
        return self.said[line]

    def reads(self, page: str) -> list[str]:
        """Save the scripts of the page and type its lines: the names of the scripts."""
        names = []
        for language, block in BLOCK.findall((ROOT / page).read_text()):
            name = re.match(r"# (\w+\.py)\n", block)
            if language == "sh":
                for line in block.splitlines():
                    self.types(line)
            else:
                assert name is not None, block
                names.append(name[1])
                (self.folder / name[1]).write_text(block)
        return names

    def job(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.typed(f"agentctl job {job} --json").stdout)["data"]
        return found

    def jobs(self) -> list[str]:
        rows = json.loads(self.typed("agentctl jobs -a --json").stdout)["data"]
        return sorted((str(row["id"]) for row in rows), key=lambda job: int(job[1:]))

    def typed(self, line: str) -> "subprocess.CompletedProcess[str]":
        """Type a line as it is."""
        return subprocess.run(
            line,
            shell=True,
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=LINE_S,
            check=False,
        )

    def _works(self, job: str) -> None:
        view = self.job(job)
        begun, attempt = view["step"] or 0, view["tally"]["attempt"]

        def made() -> bool:
            view = self.job(job)
            assert not view["over"], f"{job} has ended already: {view['reason']}"
            steps = (view["step"] or 0) - (begun if view["tally"]["attempt"] == attempt else 0)
            return view["state"] == "running" and steps >= STEPS

        wait(f"{job} works", made, LINE_S)


@pytest.fixture
def person() -> Iterator[Person]:
    pytest.importorskip("torch")
    if shutil.which("pkill") is None:
        pytest.skip("no pkill here (procps)")
    folder = Path(tempfile.mkdtemp(prefix="covey-hour-"))
    (folder / "examples").symlink_to(ROOT / "examples")
    try:
        yield Person(folder)
    finally:
        rack.stop(folder / ".rack", os.environ, lambda _line: None)
        left = rack_processes.find(folder / ".rack", [])
        shutil.rmtree(folder)
        assert left == [], "stop leaves no process"


def weights(text: str) -> set[str]:
    return set(re.findall(r"weights ([0-9a-f.-]+)$", text, re.MULTILINE))


def test_what_make_run_ends_with_and_each_block_of_the_page_for_researchers(person: Person) -> None:
    printed = person.types("covey-rack run")
    assert person.reads("docs/start/researcher.md") == ["train.py", "heals.py", "stretches.py"]
    said = person.said
    assert "note: python is" in said["agentctl submit --nodes 4 --gpus 1 -- python train.py 300"]
    assert len(weights(said["python train.py 100"])) == 1
    assert "the next start went on from it" in said["agentctl preempt --test j4"]
    disturbed = {job: weights(said[f"agentctl logs {job} --follow"]) for job in ("j3", "j4", "j5")}
    assert " from step 0:" not in said["agentctl logs j3 --follow"], "it went on from what it had saved"
    assert re.search(r"rank replaced +rank \d was lost", said["agentctl why j4"])
    for job, line in (
        ("j3", "agentctl submit --nodes 4 --gpus 1 --follow -- python train.py 300"),
        ("j4", "agentctl submit --nodes 4 --gpus 1 --follow -- python heals.py 300"),
        ("j5", "agentctl submit --workers 4 --follow -- python stretches.py 300"),
    ):
        undisturbed = weights(person.types(line))
        assert len(undisturbed) == 1 and disturbed[job] == undisturbed, f"{job}: the bits of a run without"
    page = re.search(r"^Page:  (http://\S+)$", printed, re.MULTILINE)
    assert page is not None, printed
    with urllib.request.urlopen(page[1]) as answer:
        assert answer.status == 200
    commands = re.findall(r"^  (\S+/agentctl .*)$", printed, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert person.types(command).strip()


def test_each_block_of_the_page_for_chaos_engineers(person: Person) -> None:
    person.types("covey-rack start")
    digest = r"state sha256=(\w+)"
    kept = person.types("agentctl submit --workers 4 --follow -- python examples/healing.py --steps 1000")  # j1
    person.reads("docs/start/chaos.md")
    said = person.said
    assert "3 of 4 agents running" in said["covey-rack status || true"]
    assert "4 of 4" in person.types("agentctl hosts")
    assert re.findall(digest, said["agentctl logs j2 --follow"])[-1:] == re.findall(digest, kept)[-1:] != []
    storm = next(text for line, text in said.items() if line.startswith("covey-chaos storm"))
    assert "nothing lost, nothing twice, nothing left" in storm


def test_the_notebook_runs_from_its_first_cell_to_its_last(person: Person) -> None:
    python = ROOT / ".scripts/bin/python"
    runs = f"{python.with_name('jupyter-execute')} --timeout=300 --inplace first_hour.ipynb"
    if not python.exists() or person.typed(f"{python} -c 'import nbclient, ipykernel'").returncode:
        pytest.skip("the environment of make scripts is not there, which has nbclient and ipykernel")
    person.types("covey-rack start")
    cells = json.loads((ROOT / "examples/first_hour.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), "clear its outputs"
    shutil.copy(ROOT / "examples/first_hour.ipynb", person.folder)
    person.types(runs)
    done = json.loads((person.folder / "first_hour.ipynb").read_text())["cells"]
    wrote = ["".join(json.dumps(cell.get("outputs", ""), ensure_ascii=False)) for cell in done]
    assert "4 of 4 hosts alive" in wrote[1] and "note: python is" in wrote[5] and "learnt [1. 1. 1." in wrote[5], wrote
    assert "loss" in wrote[6] and "submitted" in wrote[8], wrote
