"""What commands that measure live processes share: options, the core that is the device, a table, a file of figures."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

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


def print_head(titles: str) -> None:
    """Print the head of a table of Markdown; titles lie between ` | `."""
    print(f"| {titles} |")
    print("|---" * len(titles.split(" | ")) + "|", flush=True)


def keep(found: dict[str, Any], file: str | None) -> None:
    """Write all that was measured, if --json asked for it."""
    if file is not None:
        Path(file).write_text(json.dumps(found, indent=1), encoding="utf-8")
