"""`make cases CASES=DIR`: every `*/run.sh` below a folder, in turns, and a table of the results.

A case is a program that tries one thing on a checkout (`COVEY` in its environment: this one, after `make setup`) and
exits 0 when it is right, 77 when this machine lacks what it needs, which its last line says, and anything else when it
is wrong. The folder is always named: cases come from outside, those of the project are its tests.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
CASE_S_MAX = 900.0
"""Seconds after which a case is ended, and wrong."""
SKIPPED = 77
MAKES = ("CASES", "MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS")
LINES_SHOWN = 12


class Outcome(NamedTuple):
    """The result of one case."""

    name: str
    code: int
    took_s: float
    printed: str

    @property
    def verdict(self) -> str:
        return {0: "ok", SKIPPED: "skipped"}.get(self.code, "WRONG")

    @property
    def why(self) -> str:
        """Text for the table: why the case was skipped, what is wrong, or nothing."""
        lines = [line.strip() for line in self.printed.splitlines() if line.strip()] or ["it printed nothing"]
        wrong = [line for line in lines if line.startswith("WRONG")]
        return {"ok": "", "skipped": lines[-1]}.get(self.verdict, (wrong or lines[-1:])[0])


def found(folder: Path) -> list[Path]:
    """Cases of the folder, by name."""
    return sorted(folder.glob("*/run.sh"))


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of a case: nothing of the make that runs it, whose variables may mean something to a case, and no
    agent."""
    kept = {name: value for name, value in environ.items() if name not in MAKES and not name.startswith("COVEY_")}
    return {**kept, "COVEY": str(ROOT)}


def run(case: Path, limit_s: float = CASE_S_MAX) -> Outcome:
    """Run a case; all that it started in its session is ended once it is over."""
    began_s = time.monotonic()
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            ["bash", str(case)],
            cwd=case.parent,
            env=environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(limit_s)
            late = ""
        except subprocess.TimeoutExpired:
            code, late = 124, f"\nWRONG it was not over after {limit_s:.0f} s\n"
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()
        output.seek(0)
        printed = output.read().decode(errors="replace") + late
    return Outcome(case.parent.name, code, time.monotonic() - began_s, printed)


def table(outcomes: Sequence[Outcome]) -> str:
    width = max(len(each.name) for each in outcomes)
    lines = [
        f"{each.name:<{width}}  {each.verdict:<7}  {each.took_s:6.1f} s  {each.why[:150]}".rstrip() for each in outcomes
    ]
    counts = {verdict: sum(each.verdict == verdict for each in outcomes) for verdict in ("ok", "WRONG", "skipped")}
    return "\n".join([*lines, ", ".join(f"{count} {verdict}" for verdict, count in counts.items())])


def main(given: Sequence[str]) -> int:
    """Run the cases; returns 1 when one is wrong, 2 when there is none: trying nothing is no good news."""
    folder = Path(given[0]) if given and given[0] else None
    cases = found(folder) if folder else []
    if not cases:
        why = f"{folder} has no */run.sh" if folder else "no folder was named"
        print(f"cases: there are none: {why}\nnext: make cases CASES=/a/folder", file=sys.stderr)
        return 2
    outcomes = []
    for case in cases:
        print(f"{case.parent.name} ...", end=" ", flush=True)
        outcomes.append(outcome := run(case))
        print(f"{outcome.verdict} ({outcome.took_s:.0f} s)", flush=True)
        if outcome.verdict == "WRONG":
            print("\n".join(f"    {line}" for line in outcome.printed.splitlines()[-LINES_SHOWN:]), flush=True)
    print(f"\n{table(outcomes)}")
    return int(any(outcome.verdict == "WRONG" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
