"""From nothing to the first job that has ended, as somebody who has just heard of it.

    python bench/control/newcomer.py [--only covey]

    covey   git clone, make run, agentctl submit --follow       in a folder of its own, with an environment of its own
    ray     a virtual environment, pip install, ray start, ray job submit
    others  what they lack on this machine, if they lack something; nothing is installed into the system

Each command is timed with the load before it. A rack or cluster that is started is stopped, and its folder removed.
What pip has in its cache is used, by both.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900.0
COVEY = (
    f"git clone -q {ROOT} covey",
    "make -C covey run",
    "cd covey && .venv/bin/agentctl submit --workers 4 --follow -- hostname",
)
RAY = (
    f"{sys.executable} -m venv env",
    "env/bin/pip install -q 'ray[default]'",
    "env/bin/ray start --head --port 16379 --dashboard-port 18265 --include-dashboard true --disable-usage-stats",
    "env/bin/ray job submit --address http://127.0.0.1:18265 -- hostname",
)


def typed(name: str, commands: tuple[str, ...], last: str) -> str:
    """Type the commands in a new folder, `last` in any case: a row of the table."""
    folder = Path(tempfile.mkdtemp(prefix=f"newcomer-{name}-"))
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    took, load = [], os.getloadavg()[0]
    try:
        for command in commands:
            began_s = time.monotonic()
            done = subprocess.run(
                command, shell=True, cwd=folder, env=kept, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
            took.append(time.monotonic() - began_s)
            print(f"{took[-1]:7.1f} s  {command}", file=sys.stderr, flush=True)
            if done.returncode:
                said = (done.stderr or done.stdout).strip().splitlines()[-1:]
                return f"| {name} | `{command}` failed: {' '.join(said)[:160]} | | {load:.1f} |"
        parts = " + ".join(f"{each:.0f}" for each in took)
        return f"| {name} | {len(commands)} | {sum(took):.0f} s ({parts}) | {load:.1f} |"
    except subprocess.TimeoutExpired:
        return f"| {name} | `{commands[len(took)]}` did not end in {LIMIT_S:.0f} s | | {load:.1f} |"
    finally:
        subprocess.run(last, shell=True, cwd=folder, env=kept, capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def lacks(command: str, otherwise: str) -> Callable[[], str]:
    """What is missing where this command fails; empty: nothing that is looked at."""

    def looked() -> str:
        done = subprocess.run(command, shell=True, capture_output=True, check=False)
        return otherwise if done.returncode else ""

    return looked


OTHERS = {
    "Slurm": lacks("command -v slurmctld", "its daemons are none of this system's, and nothing is installed into it"),
    "Nomad": lacks("command -v nomad", "no package of this distribution"),
    "dstack": lacks("docker info", "no Docker daemon runs here, which runs its jobs"),
    "SkyPilot": lacks("kubectl version", "no cloud account and no Kubernetes, which run its jobs"),
    "nvitop": lacks("nvidia-smi", "no NVIDIA driver, of which it shows the devices"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=("covey", "ray", "others"), action="append")
    only = parser.parse_args().only or ["covey", "ray", "others"]
    rows = list[str]()
    if "covey" in only:
        rows.append(typed("covey", COVEY, "make -C covey stop"))
    if "ray" in only:
        rows.append(typed("Ray", RAY, "env/bin/ray stop --force"))
    if "others" in only:
        rows += [
            f"| {name} | not measured: {looked() or 'it is here; measure it'} | | |" for name, looked in OTHERS.items()
        ]
    print("| | commands | seconds, command by command | load before |", "|---|---:|---|---:|", *rows, sep="\n")


if __name__ == "__main__":
    main()
