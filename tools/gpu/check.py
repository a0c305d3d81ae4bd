"""Runs what only a machine with an NVIDIA GPU can show, in parts, and writes JSON after each part.

    python tools/gpu/check.py [--pack DIR] [--out FILE] [--part-s 120] [--total-s 540] [--only NAME ...] [--rehearse]

A GPU may be there for minutes only, so a run can be cut off anywhere: the file holds what was found until then, the
part that was running is marked `cut off`, and a second run with the same file and sources continues after the parts
that have passed. With `--pack` (what `make gpu-pack` wrote) the machine needs no network and no set-up: an environment
is made from those wheels beside the Python that runs this file, whose PyTorch, JAX and NumPy it uses. Without, this
Python is used.

A part whose tests were all skipped is `skipped`, never `passed`. Exit status: 0 every part passed, 1 a part failed or
timed out, 2 the environment could not be made, 3 nothing failed but a part was skipped or not begun. `--rehearse` is
for machines without a GPU: parts that need one must skip for that reason alone, everything else must pass.
"""

import argparse
import ctypes
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = Path("bench", "results", "gpu-check.json")
SOURCES = ("covey", "gossip", "plugins", "agent", "cli", "tests", "bench", "tools/gpu")
SUFFIXES = (".py", ".cpp", ".h", ".toml")
TAIL_CHARACTERS = 4000
"""Characters of a part's output that the file keeps."""
GRACE_S = 5.0
"""Seconds between the signal that asks a part to end and the one that ends it."""
NO_DEVICE = re.compile("finds no CUDA device|no NVIDIA driver here")
"""Text in the reason of tests that are skipped for want of a GPU."""
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
PROBE = (
    "import json, sys, torch\n"
    "found = dict(python=sys.version.split()[0], torch=torch.__version__, cuda=torch.version.cuda, devices=[])\n"
    "for at in range(torch.cuda.device_count()):\n"
    "    of = torch.cuda.get_device_properties(at)\n"
    "    found['devices'].append(dict(name=of.name, memory_bytes=of.total_memory))\n"
    "print(json.dumps(found))"
)


@dataclass(frozen=True)
class Part:
    """One command that is tried by itself. `{python}` in it is the environment's Python."""

    name: str
    command: tuple[str, ...]
    needs_gpu: bool = True
    limit_s: float | None = None
    """Limit of this part in seconds; None: that of the command line."""
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def tests(self) -> bool:
        return "pytest" in self.command


def tested(name: str, *words: str, **more: Any) -> Part:
    return Part(name, ("{python}", "-m", "pytest", "-p", "no:cacheprovider", "-vv", *words), **more)


ON_CORES = ("-n", "4", "--dist", "loadgroup")
"""Options with which parts run that only need other versions of PyTorch and JAX than the gate has."""
GRADIENT_TESTS = "tests/covey/device/test_cuda.py"
GPU_TESTS = "tests/covey/hooks/test_gpu.py"
PARTS = (
    Part("gate", ("{python}", "-m", "covey.hooks.gate.build"), needs_gpu=False),
    tested("driver", "-m", "gpu", "tests/agent/ports/devices/test_nvml.py"),
    tested("rack", "-m", "gpu", "tests/rack/test_gpu.py"),
    tested("gradients", "-m", "gpu", GRADIENT_TESTS, "-k", "bits_of"),
    tested("gradients-jax", "-m", "gpu", "tests/covey/device/test_cuda_jax.py"),
    tested("healing", "-m", "gpu", GRADIENT_TESTS, "-k", "killed"),
    tested("memory-bits", "-m", "gpu", GPU_TESTS, "-k", "same_bits"),
    tested("memory-spill", "-m", "gpu", GPU_TESTS, "-k", "lands_in_host_memory"),
    tested("memory-graphs", "-m", "gpu", GPU_TESTS, "-k", "graphs"),
    tested("flag", "-m", "gpu", GPU_TESTS, "-k", "flag"),
    tested("stopped", "-m", "gpu", GPU_TESTS, "-k", "stopped_rank"),
    tested("conformance", "-m", "gpu", "tests/agent/ports/devices/test_conformance.py"),
    Part("gradients-step", ("{python}", "bench/tensors/gpu_step.py")),
    Part("antman-small", ("{python}", "bench/sharing/device_memory.py", "--gib", "4", "--to", "0.5", "--rounds", "3")),
    Part("antman", ("{python}", "bench/sharing/device_memory.py")),
    tested("rack-cores", "tests/rack/test_gpu.py", "-k", "cpu", needs_gpu=False, environ={"COVEY_LONG": "1"}),
    tested("gradients-lab", "tests/covey/device", "-m", "not gpu", "-k", "not killed", needs_gpu=False),
    tested("gate-rules", *ON_CORES, "tests/covey/hooks/test_gate.py", needs_gpu=False),
    tested("hooks", *ON_CORES, "tests/covey/hooks/test_torch.py", needs_gpu=False),
    tested("hooks-jax", *ON_CORES, "tests/covey/hooks/test_jax.py", needs_gpu=False),
)
"""Parts in their order: those at the end, which may be cut off, are known best elsewhere."""


# ---- what was found --------------------------------------------------------------------------------------------------


class Record:
    """The file: one value for each part, written whole after every change."""

    def __init__(self, path: Path, sources: str) -> None:
        self.path = path
        self.found: dict[str, Any] = {"sources": sources, "machine": {}, "parts": {}}
        before = _read(path)
        if before.get("sources") == sources:
            self.found = before
            for part in self.found["parts"].values():
                if part["state"] == "running":
                    part["state"] = "cut off"
            self.write()

    def passed(self, name: str) -> bool:
        return bool(self.found["parts"].get(name, {}).get("state") == "passed")

    def say(self, name: str, **value: Any) -> None:
        self.found["parts"][name] = value
        self.write()

    def machine(self, value: Mapping[str, Any]) -> None:
        self.found["machine"] = dict(value)
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(self.path.name + ".tmp")
        new.write_text(json.dumps(self.found, indent=1, sort_keys=True) + "\n")
        os.replace(new, self.path)


def _read(path: Path) -> dict[str, Any]:
    """What an earlier run wrote; empty when there is none or it was cut off within a write of another program's."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("parts"), dict) else {}


def sources_digest(root: Path) -> str:
    """One number for all files that a part runs: a result counts for the sources it was found with."""
    digest = hashlib.sha256()
    for top in SOURCES:
        for path in sorted((root / top).rglob("*")):
            if path.suffix in SUFFIXES and "results" not in path.parts and path.is_file():
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def judged(part: Part, code: int | None, printed: str, cases: Sequence[Mapping[str, str]]) -> str:
    """The state of a part that has ended: `passed`, `failed`, `timed out` or `skipped`. `code` None: it was ended."""
    if code is None:
        return "timed out"
    if part.tests:
        outcomes = {case["outcome"] for case in cases}
        if code == 0 and "passed" in outcomes:
            return "passed"
        return "skipped" if code in (0, 5) and outcomes <= {"skipped"} and cases else "failed"
    if "not measured" in printed:
        return "skipped"
    return "passed" if code == 0 else "failed"


def cases_of(report: Path) -> list[dict[str, str]]:
    """Every test of a JUnit report: its name, outcome, seconds, and the first lines of why."""
    try:
        tree = ET.parse(report)
    except (OSError, ET.ParseError):
        return []
    found = []
    for case in tree.iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        said = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if said is None else {"skipped": "skipped"}.get(said.tag, "failed")
        why = "" if said is None else f"{said.get('message', '')}\n{said.text or ''}".strip()[:1500]
        found.append({"test": name, "outcome": outcome, "seconds": case.get("time", ""), "why": why})
    return found


TOLD = re.compile(r"^(\S+::\S+.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
TOLD_BY_WORKERS = re.compile(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED) (.+)$", re.MULTILINE)


def cases_told(printed: str) -> list[dict[str, str]]:
    """Tests of a part that was ended before it wrote its report, from what it had printed of each."""
    names = {"PASSED": "passed", "SKIPPED": "skipped"}
    told = TOLD.findall(printed) + [(test, outcome) for outcome, test in TOLD_BY_WORKERS.findall(printed)]
    return [{"test": test, "outcome": names.get(said, "failed"), "seconds": "", "why": ""} for test, said in told]


def verdict(parts: Sequence[Part], found: Mapping[str, Any], rehearsed: bool) -> tuple[int, list[str]]:
    """The exit status, and a line for each part that is not as it should be."""
    states = {part.name: found.get(part.name, {}).get("state", "not begun") for part in parts}
    bad = [f"{name}: {state}" for name, state in states.items() if state in ("failed", "timed out", "cut off")]
    open_ = [f"{name}: {state}" for name, state in states.items() if state in ("skipped", "not begun")]
    if rehearsed:
        for part in parts:
            state, wanted = states[part.name], "skipped" if part.needs_gpu else "passed"
            whys = [case["why"] for case in found.get(part.name, {}).get("tests", ())]
            if state != wanted and f"{part.name}: {state}" not in bad:
                bad.append(f"{part.name}: {state}, expected {wanted}")
            elif wanted == "skipped" and not all(NO_DEVICE.search(why) for why in whys):
                bad.append(f"{part.name}: skipped, but not for want of a GPU alone")
        open_ = []
    return (1 if bad else 3 if open_ else 0), bad + open_


# ---- running ---------------------------------------------------------------------------------------------------------


def run(command: Sequence[str], environ: Mapping[str, str], limit_s: float, folder: Path) -> tuple[int | None, str]:
    """Exit status (None: it took longer) and what it printed. All processes that it started are ended, also those that
    left its session."""
    printed = folder / "printed"
    with printed.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environ), stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        code: int | None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            end_orphans()
    return code, printed.read_bytes().decode(errors="replace")


def adopt_orphans() -> None:
    """Adopt, from now on, all processes that a part leaves behind, however they were started."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def adopts_orphans() -> bool:
    found = ctypes.c_int(0)
    ctypes.CDLL(None, use_errno=True).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return bool(found.value)


def end_orphans() -> None:
    """End every process below this one and wait for it; again, since one that dies leaves its children to this
    process. A process that a driver holds cannot be ended: it is left after `GRACE_S`. Only where orphans are adopted:
    else children of this process may be another program's."""
    if not adopts_orphans():
        return
    until_s = time.monotonic() + GRACE_S
    while (children := _children(os.getpid())) and time.monotonic() < until_s:
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _children(pid: int) -> list[int]:
    try:
        return [
            int(word)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for word in (task / "children").read_text().split()
        ]
    except OSError:
        return []


@dataclass
class Run:
    """One run of the parts, against one file and one clock."""

    record: Record
    python: str
    environ: Mapping[str, str]
    part_s: float
    total_s: float
    now: Callable[[], float] = time.monotonic
    say: Callable[[str], None] = lambda line: print(line, flush=True)

    def all(self, parts: Sequence[Part]) -> None:
        began = self.now()
        for part in parts:
            left = self.total_s - (self.now() - began)
            if self.record.passed(part.name):
                self.say(f"{part.name}: passed before")
            elif left < min(20.0, self.part_s):
                self.say(f"{part.name}: not begun, {left:.0f} s are left")
            else:
                self.one(part, min(part.limit_s or self.part_s, left))

    def one(self, part: Part, limit_s: float) -> None:
        self.record.say(part.name, state="running", limit_s=round(limit_s, 1))
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            report = Path(folder, "report.xml")
            command = [word.replace("{python}", self.python) for word in part.command]
            if part.tests:
                command.append(f"--junitxml={report}")
            began = self.now()
            code, printed = run(command, {**self.environ, **part.environ}, limit_s, Path(folder))
            took, cases = self.now() - began, cases_of(report) or cases_told(printed)
        state = judged(part, code, printed, cases)
        found = {"state": state, "seconds": round(took, 1), "limit_s": round(limit_s, 1), "code": code}
        self.record.say(part.name, **found, tests=cases, printed=printed[-TAIL_CHARACTERS:])
        self.say(f"{part.name}: {state}, {took:.1f} s")
        if state in ("failed", "timed out"):
            self.say(re.sub("(?m)^", "    ", printed[-1500:]))


# ---- the environment -------------------------------------------------------------------------------------------------


def environment(pack: Path, folder: Path) -> str:
    """A Python with everything of the pack and this checkout, that also sees what this Python has. Raises RuntimeError
    with pip's words."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder)], check=True)
    site = Path(_printed([str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]))
    seen = sorted({sysconfig.get_paths()[name] for name in ("purelib", "platlib")})
    (site / "zz-beside.pth").write_text("".join(f"{path}\n" for path in seen))  # last: the pack comes first
    pip = next(iter(sorted(pack.glob("pip-*.whl"))), None)
    if pip is None:
        raise RuntimeError(f"{pack} holds no wheel of pip; next: make gpu-pack")
    wheels = [str(path) for path in sorted(pack.glob("*.whl"))]
    environ = {**os.environ, "PYTHONPATH": str(pip), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--disable-pip-version-check",
        "--no-build-isolation",
    ]
    for what in (wheels, ["-e", "./covey", "-e", "."]):
        done = subprocess.run([*install, *what], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"pip ended with {done.returncode}:\n{(done.stderr or done.stdout)[-2000:]}")
    return str(python)


def _printed(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def machine(python: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Facts about this machine: versions, devices, the driver. What could not be asked says why."""
    found: dict[str, Any] = {"kernel": platform.release(), "machine": platform.machine(), "cores": os.cpu_count()}
    done = subprocess.run(
        [python, "-c", PROBE], env=dict(environ), cwd=ROOT, capture_output=True, text=True, check=False
    )
    found["torch"] = json.loads(done.stdout) if done.returncode == 0 else f"not known: {done.stderr.strip()[-300:]}"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,mig.mode.current", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        found["driver"] = (asked.stdout or asked.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        found["driver"] = f"not known: {error}"
    return found


def has_device(told: Mapping[str, Any]) -> bool:
    return isinstance(told["torch"], dict) and bool(told["torch"]["devices"])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pack", type=Path, help="folder of wheels that make gpu-pack wrote")
    parser.add_argument("--out", type=Path, default=ROOT / OUT, help="the file, read first and written after each part")
    parser.add_argument("--part-s", type=float, default=120.0, help="longest that a part may take, s")
    parser.add_argument("--total-s", type=float, default=3600.0, help="no part begins that could not end by then, s")
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME", help="these parts alone")
    parser.add_argument("--rehearse", action="store_true", help="there is no GPU: all but what needs one must pass")
    given = parser.parse_args(arguments)
    names = [part.name for part in PARTS]
    unknown = sorted(set(given.only) - set(names))
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}: expected {', '.join(names)}")
    parts = [part for part in PARTS if not given.only or part.name in given.only]
    adopt_orphans()
    try:
        python = environment(given.pack.resolve(), ROOT / ".venv") if given.pack else sys.executable
    except (RuntimeError, subprocess.CalledProcessError, OSError) as error:
        print(f"gpu-check: the environment could not be made: {error}", file=sys.stderr)
        return 2
    environ = {**os.environ, "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    record = Record(given.out, sources_digest(ROOT))
    told = machine(python, environ)
    record.machine(told)
    print(f"gpu-check: {json.dumps(told)}", flush=True)
    if not has_device(told) and not given.rehearse:
        print(
            "gpu-check: PyTorch finds no CUDA device here; next: python -m pip install torch (its CUDA build), "
            "on a host with a driver",
            file=sys.stderr,
        )
        return 3
    Run(record, python, environ, given.part_s, given.total_s).all(parts)
    code, lines = verdict(parts, record.found["parts"], given.rehearse)
    print(f"gpu-check: {given.out}", *(lines or ["every part is as it should be"]), sep="\n  ")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
