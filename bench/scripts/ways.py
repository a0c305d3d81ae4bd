"""The ways in which a script is tried as a job, and the words for what was seen of each.

    runs        submitted as it is: whether it ends with 0
    seen        of the same run: steps, what they waited for, memory, by `agentctl job`
    stopped     three times preempted by another job: whether it resumed, and ended with the same bits
    healed      then a rank is killed: whether it alone is replaced, and the bits are the same
    aggregated  with `--aggregate`: whether Covey averages its gradients, and the bits are the same
    torchrun    without Covey, started by torchrun: whether the bits are the same

Bits are what scripts print as a digest of what they learnt. Words begin with "no: " where something is not so, and
continue with the reason that Covey itself gives.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.client import Agent, AgentctlError
from cli.rack import rack
from cli.rack.files import RackHost

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HOSTS, GPUS = 2, 2
JOB_S, START_S = 600.0, 120.0
STOPS = 3
"""How often a job is preempted."""
STEPPED_S, UNSEEN_S = 0.8, 3.0
"""Seconds from a start's first step, or from the start where no step is seen, until a job is disturbed that does not
save by itself."""
LOOK_S = 0.1
DIGEST = re.compile(r"(?:digest|parameters|state sha256=)\s*([0-9a-f]{64}|[0-9a-f]{16})")
RESUMED = re.compile(r"(?:continues|goes on) with (?:step|epoch|trial)")


@dataclass(frozen=True)
class Kind:
    """A kind of script, and what is expected of it; `*` stands for any text."""

    name: str
    file: str
    submit: str = ""
    command: str = ""
    """The job's command in a shell's words; empty: `python` and the script."""
    runs: str = "yes"
    seen: str = ""
    stopped: str = ""
    aggregated: str = ""
    healed: str = ""
    torchrun: str = ""
    """The words of torchrun beside it; "no: .." where that makes no sense, and why."""
    beside: str = "same bits"
    writes: str = ""
    """Files that it leaves in its folder, as a pattern of names."""
    saves: str = ""
    """The checkpoints that it writes by itself, likewise."""
    needs: str = ""
    """What else lies in its folder: further files of this folder, between blanks."""

    @property
    def slug(self) -> str:
        return re.sub(r"\W+", "-", self.name.lower()).strip("-")

    @property
    def unseen(self) -> bool:
        """Whether none of its steps are expected to be seen."""
        return self.seen.startswith("not seen")

    @property
    def without_ddp(self) -> bool:
        """Whether Covey has no gradients of it to average."""
        return self.aggregated == "no: no DistributedDataParallel"

    @property
    def words(self) -> list[str]:
        return (self.command or f"python {Path(self.file).name}").split()


class Refused(Exception):
    """Covey did not take the job, and why."""


@dataclass
class Ended:
    """A job that ended, and what was seen of it while it ran."""

    view: dict[str, Any]
    output: str
    hooked: str
    timing: dict[str, Any] | None
    folder: Path

    @property
    def ok(self) -> bool:
        return bool(self.view["state"] == "done" and self.view["exit_code"] == 0)

    @property
    def digests(self) -> set[str]:
        return set(DIGEST.findall(self.output))

    @property
    def why_not(self) -> str:
        """Why it did not end well: the last line that looks like an error, or what the agent says."""
        if self.view["state"] != "failed":
            return f"no: {self.view['reason'][:160]}"
        named = r"^(?:\[rank\d+\]: *)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt): .*|\w+: unknown .*)$"
        errors = re.findall(named, self.output, re.MULTILINE)
        return f"no: {(errors[-1] if errors else self.view['reason'])[:160]}".replace("|", "/")


class Lane:
    """A rack of its own, on which one script is tried at a time."""

    def __init__(self, directory: Path, python: Path) -> None:
        """`python`: the folder of programs that jobs find first."""
        self.directory, self._bin = directory, python
        self.hosts: list[RackHost] = []

    @contextmanager
    def started(self) -> Iterator["Lane"]:
        quiet = rack.Timer(lambda _line: None)
        try:
            self.hosts = rack.start(self.directory / "rack", HOSTS, GPUS, os.environ, quiet)
            yield self
        finally:
            rack.stop(self.directory / "rack", os.environ, lambda _line: None)

    @property
    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("COVEY_", "MAKE"))}
        path = f"{self._bin}{os.pathsep}{ROOT / '.venv/bin'}{os.pathsep}{kept['PATH']}"
        return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}

    @property
    def agent(self) -> Agent:
        return Agent([host.address for host in self.hosts], "the rack of make scripts")

    def folder(self, kind: Kind, way: str) -> Path:
        """A working directory for one run of the kind, with its files in it."""
        made = self.directory / f"{kind.slug}-{way}"
        made.mkdir(parents=True)
        for name in ("points.py", kind.file, *kind.needs.split()):
            found = HERE / name if (HERE / name).exists() else ROOT / name
            (shutil.copytree if found.is_dir() else shutil.copy)(found, made / found.name)
        return made

    def submit(self, kind: Kind, folder: Path, *words: str) -> str:
        command = [str(ROOT / ".venv/bin/agentctl"), "--agent", self.hosts[0].address, "submit", *kind.submit.split()]
        done = subprocess.run(
            [*command, *words, "--cwd", str(folder), "--", *kind.words],
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Refused(" ".join(done.stderr.split()))
        return done.stdout.split()[0]

    def view(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = self.agent.get("jobs", job).data
        return found

    def output(self, job: str) -> str:
        found = sorted(self.directory.glob(f"rack/gpu*/jobs/{job}/rank*.log"))
        return "".join(path.read_text(errors="replace") for path in found)

    def ended(self, kind: Kind, job: str, folder: Path, look: Callable[[dict[str, Any]], None]) -> Ended:
        """Watch a job until it ended; `look` is given each view of it. One that does not end is cancelled."""
        hooked, timing, end_s = dict[str, None](), None, time.monotonic() + JOB_S
        while True:
            try:
                view = self.view(job)
            except AgentctlError:
                time.sleep(LOOK_S)
                continue
            hooked |= dict.fromkeys(view["seen"]["hooked"].values())  # a later process of a rank says something else
            timing = view["seen"]["timing"] or timing
            if view["over"]:
                return Ended(view, self.output(job), "; ".join(hooked), timing, folder)
            if time.monotonic() > end_s:
                self.agent.post("jobs", job, "cancel", body={})
                print(f"{kind.name}: job {job} did not end within {JOB_S:.0f} s", flush=True)
                end_s = float("inf")
            look(view)
            time.sleep(LOOK_S)

    # ---- the ways ----

    def plain(self, kind: Kind) -> Ended:
        """Run the script undisturbed; with `--aggregate` where it has no use of it."""
        folder, words = self.folder(kind, "plain"), ["--aggregate"] if kind.without_ddp else []
        return self.ended(kind, self.submit(kind, folder, *words), folder, lambda _view: None)

    def aggregated(self, kind: Kind) -> Ended:
        folder = self.folder(kind, "aggregated")
        return self.ended(kind, self.submit(kind, folder, "--aggregate"), folder, lambda _view: None)

    def disturbed(self, kind: Kind) -> Ended:
        """Preempt the job three times, by a guaranteed one that takes all GPUs, and then kill its highest rank, each
        once it has made steps since its start. A job that fails of that is started again."""
        folder = self.folder(kind, "disturbed")
        job = self.submit(kind, folder, "--class", "opportunistic", "--retries", "1")
        done, works = 0, _Works(kind, folder)

        def disturb(view: dict[str, Any]) -> None:
            nonlocal done
            if done > STOPS or view["state"] != "running" or view["tally"]["attempt"] != done + 1:
                works.begins()
                return
            pids = [rank["pid"] for rank in view["ranks"] if rank["pid"]]
            if not works.long_enough(view["step"]) or not pids:
                return
            if done == STOPS:
                os.kill(pids[-1], signal.SIGKILL)
            else:
                self._preempt(folder)
            done += 1
            works.begins()

        return self.ended(kind, job, folder, disturb)

    def _preempt(self, folder: Path) -> None:
        """Run a guaranteed job on all GPUs, and wait until it has ended."""
        body = {"name": "preempts", "workers": HOSTS * GPUS, "argv": ["true"], "cwd": str(folder), "env": {}}
        by, end_s = str(self.agent.post("jobs", body=body).data["id"]), time.monotonic() + START_S
        while not self.view(by)["over"] and time.monotonic() < end_s:
            time.sleep(LOOK_S)

    def beside(self, kind: Kind) -> tuple[int, str]:
        """Run the script by torchrun, without Covey. Its exit code and output."""
        folder = self.folder(kind, "torchrun")
        words = ["torchrun", *kind.torchrun.split(), Path(kind.file).name]
        done = subprocess.run(
            words, cwd=folder, env=self.environ, capture_output=True, text=True, timeout=JOB_S, check=False
        )
        return done.returncode, done.stdout + done.stderr


class _Works:
    """Whether a job has done something since its newest start that a stop would lose, or would have it continue."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self._kind, self._folder = kind, folder
        self.begins()

    def begins(self) -> None:
        """The job is about to start."""
        self._before: list[int | None] = []
        """The newest step of earlier starts, once it runs."""
        self._began_s, self._since_s = time.time(), float("inf")

    def long_enough(self, step: int | None) -> bool:
        """Whether it has saved since it began; of one that does not save by itself, whether it has made steps."""
        if self._kind.saves:
            return any(each.stat().st_mtime > self._began_s for each in self._folder.glob(self._kind.saves))
        self._before = self._before or [step]
        if self._since_s == float("inf") and (step != self._before[0] or self._kind.unseen):
            self._since_s = time.monotonic() + (UNSEEN_S if self._kind.unseen else STEPPED_S)
        return time.monotonic() >= self._since_s


# ---- the words of a cell ----


def seen(kind: Kind, done: Ended) -> str:
    timing, step = done.timing, done.view["step"]
    if step is None:
        return "not seen"
    wanted = re.match(r"\d+", kind.seen)
    steps = f"{step + 1} of {wanted[0]} steps" if wanted else f"{step + 1} steps"
    if timing is None:
        return f"{steps}, times not known"
    whole = timing["step_s"] or 1e-9
    parts = [f"{word} {100 * timing[key] / whole:.0f} %" for word, key in WAITS if timing[key] > 0]
    memory = [f"memory {timing['memory_bytes'] >> 20} MiB"] if timing["memory_bytes"] else []
    return ", ".join([steps, *parts, *memory])


WAITS = (("input", "input_s"), ("ranks", "communicate_s"))


def same(done: Ended, bits: set[str]) -> str:
    """Whether a run ended with the bits of the undisturbed one, in words."""
    if not done.ok:
        return done.why_not
    if not done.digests:
        return "no digest"
    return "same bits" if done.digests == bits else f"other bits ({', '.join(sorted(done.digests))})"


def stopped(done: Ended, bits: set[str]) -> str:
    """What became of a job that was preempted, in words."""
    tally = done.view["tally"]
    starts = tally["preemptions"] + tally["failures"]
    how = "resumed" if len(RESUMED.findall(done.output)) >= starts else "began anew"
    return f"{tally['preemptions']} times, {how}, {same(done, bits)}"


def healed(done: Ended, bits: set[str]) -> str:
    """What became of a job of which a rank was killed, in words."""
    if done.view["tally"]["failures"]:
        return f"no: all ranks start again, {same(done, bits)}"
    return f"it alone, {same(done, bits)}"


def aggregated(done: Ended, bits: set[str]) -> str:
    if "gradients averaged by Covey" in done.hooked:
        return same(done, bits)
    declined = re.search(r"gradients averaged by DDP itself \((.*?)(?:\)(?:;|$)|$)", done.hooked)
    why = declined[1] if declined else "no DistributedDataParallel"
    return f"no: {why}" if done.ok else done.why_not
