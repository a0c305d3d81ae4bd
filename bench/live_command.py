"""What commands that measure live processes share: options, the core that is the device, a table, a file of figures."""

import argparse
import json
import os
import platform
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chaos.rack.hosts import Host

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def options(doc: str | None) -> argparse.ArgumentParser:
    """A parser that describes itself by the first line of the module's docstring."""
    return argparse.ArgumentParser(description=(doc or "").partition("\n")[0])


def json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="all that was measured")


def leave_the_device() -> None:
    """Keep this process on the other cores: core 0 is the device. Exits where there is no other."""
    cores = os.cpu_count() or 1
    if cores < 2:
        print("two cores are needed: one is the device, this runs on another", file=sys.stderr)
        sys.exit(2)
    os.sched_setaffinity(0, set(range(1, cores)))


def spent_s(pid: int) -> float:
    """Processor time of a process so far, in seconds of a core. Raises FileNotFoundError when it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


class _Counter:
    """An object for `python_ns`."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> None:
        self.count += number


def python_ns(calls: int = 200_000) -> float:
    """Nanoseconds that a call of a small method takes on this machine, the best of five: how fast Python is here, which
    moves all figures of programs in Python."""
    best, counter = float("inf"), _Counter()
    for _ in range(5):
        began_s = time.perf_counter()
        for number in range(calls):
            counter.add(number)
        best = min(best, time.perf_counter() - began_s)
    return 1e9 * best / calls


@cache
def _print_machine() -> None:
    """Print, once, what a reader of figures should know of this machine."""
    python = f"Python {platform.python_version()} takes {python_ns():.0f} ns for a call of a method"
    print(f"{python}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")


def print_head(titles: str) -> None:
    """Print the head of a table of Markdown; titles lie between ` | `."""
    _print_machine()
    print(f"| {titles} |")
    print("|---" * len(titles.split(" | ")) + "|", flush=True)


def submitted(host: "Host", words: str) -> str:
    """Submit a job on a host of a laboratory by these words of `agentctl submit`; returns its id. SystemExit, with what
    agentctl said, when the job is not taken."""
    said = host.shell(f"agentctl submit {words}")
    if said.returncode:
        raise SystemExit(said.stdout + said.stderr)
    return str(said.stdout.split()[0])


def keep(found: dict[str, Any], file: str | None) -> None:
    """Write all that was measured, if --json asked for it."""
    if file is not None:
        Path(file).write_text(json.dumps(found, indent=1), encoding="utf-8")
