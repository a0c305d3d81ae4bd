"""docs/start/researcher.md, from `python train.py` to an elastic job: its scripts are saved and its lines typed, one after
another, as they stand there, on a rack of four agents that this test starts in the place of `make run`."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rack.living_rack import LivingRack, living_rack, wait

pytestmark = [pytest.mark.rack, pytest.mark.torch, pytest.mark.long, pytest.mark.xdist_group("rack")]
PAGE = Path(__file__).parents[2] / "docs/start/researcher.md"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINE_S = 240.0
STEPS = 25
"""Steps that a job has made before something is done to it: a person does not type faster."""
NOT_TYPED = ("make run", "make stop", ". .venv/bin/activate")
"""This test's fixture does."""


class Person:
    """Somebody who has the page open, in a folder of a checkout."""

    def __init__(self, rack: LivingRack, folder: Path) -> None:
        self.rack, self.folder = rack, folder
        programs = Path(sys.executable).parent
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COVEY_")}
        self.environ = {**kept, "PATH": f"{programs}{os.pathsep}{kept['PATH']}", "VIRTUAL_ENV": str(programs.parent)}
        self.said: dict[str, str] = {}
        """What each line wrote."""

    def types(self, line: str) -> str:
        """Type a line: what it wrote. One that does something to a job comes once the job has made some steps."""
        line = line.partition("  #")[0].strip()
        if line in NOT_TYPED:
            return ""
        job = (re.findall(r"\b(j\d+)\b", line) or [max(self.jobs(), default="j0", key=len)])[0]
        if "requeue" in line or "preempt" in line or "scale" in line or "pkill" in line:
            self._works(job)
        done = subprocess.run(
            line,
            shell=True,
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=LINE_S,
            check=False,
        )
        wrote = done.stdout + done.stderr
        assert done.returncode == 0, f"{line}: exit {done.returncode}\n{wrote}\n{self.told(job)}"
        self.said[line] = wrote
        return wrote

    def jobs(self) -> list[str]:
        return [str(row["id"]) for row in self.rack.agent().get("jobs", all=1).data]

    def told(self, job: str) -> str:
        return "\n".join(self.rack.agentctl(word, job)[1] for word in ("why", "logs")) if job in self.jobs() else ""

    def _works(self, job: str) -> None:
        begun = self.rack.job(job)["step"] or 0
        attempt = self.rack.job(job)["tally"]["attempt"]

        def made() -> bool:
            view = self.rack.job(job)
            steps = view["step"] or 0
            again = view["tally"]["attempt"] != attempt
            return view["state"] == "running" and (steps >= begun + STEPS or (again and steps >= STEPS))

        wait(f"{job} works", made, LINE_S)
        time.sleep(0.5)


@pytest.fixture(scope="module")
def person() -> Iterator[Person]:
    pytest.importorskip("torch")
    if shutil.which("pkill") is None:
        pytest.skip("no pkill here (procps)")
    with living_rack() as rack:
        folder = Path(tempfile.mkdtemp(prefix="covey-hour-"))
        (folder / ".rack").symlink_to(rack.directory)  # agentctl finds it there, as beside a checkout
        found = Person(rack, folder)
        found.types("agentctl submit --wait -- hostname")  # `make run` has submitted j1
        yield found
        shutil.rmtree(folder)


def weights(text: str) -> set[str]:
    return set(re.findall(r"weights ([0-9a-f.-]+)$", text, re.MULTILINE))


def test_each_block_of_the_page_does_what_the_page_says(person: Person) -> None:
    names = []
    for language, block in BLOCK.findall(PAGE.read_text()):
        if language == "sh":
            for line in block.splitlines():
                person.types(line)
            continue
        name = re.match(r"# (\w+\.py)\n", block)
        assert name is not None, block
        names.append(name[1])
        (person.folder / name[1]).write_text(block)
    assert names == ["train.py", "heals.py", "stretches.py"]
    said = person.said
    assert "note: python is" in said["agentctl submit --nodes 4 --gpus 1 -- python train.py 300"]
    assert len(weights(said["python train.py 100"])) == 1
    assert re.search(r"the next start went on from it", said["agentctl preempt --test j4"])
    disturbed = {job: weights(said[f"agentctl logs {job} --follow"]) for job in ("j3", "j4", "j5")}
    assert "from step 0" not in said["agentctl logs j3 --follow"], "it went on from what it had saved"
    assert person.rack.job("j4")["tally"]["losses"] >= 1 or "healed" in said["agentctl why j4"]
    for job, line in (
        ("j3", "agentctl submit --nodes 4 --gpus 1 --follow -- python train.py 300"),
        ("j4", "agentctl submit --nodes 4 --gpus 1 --follow -- python heals.py 300"),
        ("j5", "agentctl submit --workers 4 --follow -- python stretches.py 300"),
    ):
        undisturbed = weights(person.types(line))
        assert len(undisturbed) == 1 and disturbed[job] == undisturbed, f"{job}: the bits of a run without"
