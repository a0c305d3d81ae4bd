"""The three wheels: built from sdists in a folder of their own, and tried in an environment that has nothing else.

python -m tools.wheels DIR      sdists and wheels of all three into DIR, then a try of them; `make dist` runs it

Of `covey-agent` there are two wheels: one with the byte path of remote memory compiled, for this Python and this kind
of machine, and a pure one, which pip takes everywhere else.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.compiled.build import end_with_parent

ROOT = Path(__file__).parent.parent
FOLDERS = {"covey_job": "covey", "covey_agent": ".", "covey_tools": "tools"}
"""Name of a wheel -> the folder of its pyproject.toml, in the order in which they need one another."""
NEEDED = (
    *("covey", "gossip", "plugins", "agent", "cli", "sim", "chaos"),
    *("tools", "systemd", "examples", "docs", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"),
)
COMPILED = "covey_agent"
"""The wheel that may carry compiled modules."""
LEFT_OUT = shutil.ignore_patterns("*.egg-info", "__pycache__", "build", "dist", "built")
"""Files of earlier builds: setuptools would put what they list into new ones."""
TRIED = (
    ("agentd", "--check", "--config", "agent.toml"),
    ("agentd", "--install-unit", "--prefix", "host"),
    ("agentctl", "version"),
    ("covey-sim", "--help"),
    ("covey-rack", "run"),
)


def build(name: str, into: Path, compiled: bool = False, sdist: bool = True) -> Path:
    """The wheel of that name, made from its sdist, which lies beside it, unless `sdist` is false; `compiled`: with the
    byte path as machine code. Raises CalledProcessError when either cannot be built."""
    into.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, "COVEY_WHEEL": "compiled" if compiled else ""}
    with tempfile.TemporaryDirectory(prefix="covey-build-") as folder:
        copy = Path(folder, "covey")
        copy.mkdir()
        for needed in NEEDED:
            copied(ROOT / needed, copy / needed)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(into), str(copy / FOLDERS[name])]
        command += [] if sdist else ["--wheel"]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, check=False,
            preexec_fn=end_with_parent,
        )  # fmt: skip
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        done.check_returncode()
    (wheel,) = (each for each in into.glob(f"{name}-*.whl") if each.name.endswith("-none-any.whl") != compiled)
    return wheel


def copied(source: Path, to: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, to, ignore=LEFT_OUT, symlinks=True)
    else:
        shutil.copy2(source, to)


def environment(folder: Path, wheels: Sequence[Path]) -> Path:
    """The folder of programs of a new environment with these wheels, their requirements, and nothing else."""
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *map(str, wheels)], env=plain(os.environ), check=True)
    return folder / "bin"


def tried(programs: Path, folder: Path) -> list[str]:
    """Commands of `TRIED` that failed, run in `folder` on an empty agent.toml. A rack that was started is stopped."""
    folder.mkdir()
    (folder / "agent.toml").touch()
    outside = plain(os.environ) | {"XDG_STATE_HOME": str(folder), "PATH": f"{programs}:{os.environ['PATH']}"}
    failed = []
    for command in (*TRIED, ("covey-rack", "stop")):
        print(f"dist: {' '.join(command)}", flush=True)
        done = subprocess.run([programs / command[0], *command[1:]], cwd=folder, env=outside, check=False)
        if done.returncode:
            failed.append(f"{' '.join(command)} ended with {done.returncode}")
    return failed


def plain(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables that would let programs find modules of this tree, or another rack."""
    return {name: value for name, value in environ.items() if not name.startswith(("PYTHON", "COVEY_", "VIRTUAL_ENV"))}


def main(into: Path) -> int:
    shutil.rmtree(into, ignore_errors=True)
    wheels = {name: build(name, into) for name in FOLDERS}
    try:
        wheels[COMPILED] = build(COMPILED, into, compiled=True)
    except subprocess.CalledProcessError:
        print("dist: no compiled wheel of covey-agent here: its pure one is interpreted", file=sys.stderr)
    for made in sorted(into.iterdir()):
        print(f"dist: {made.name}, {made.stat().st_size / 1024:.0f} KiB", flush=True)
    with tempfile.TemporaryDirectory(prefix="covey-dist-") as folder:
        programs = environment(Path(folder, "venv"), list(wheels.values()))
        failed = tried(programs, Path(folder, "tried"))
    for line in failed:
        print(f"dist: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
