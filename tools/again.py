"""The end of `make test`: what failed runs once more with the machine to itself, and is remembered.

Five processes test on two cores, beside racks of real programs; what fails there and passes alone is a test, or a
promise, with too little patience for a busy machine. What fails twice fails. What passes alone is printed with both
outcomes and its reason, and written into a file that outlives a clone (`AGAIN_FILE`, or `covey-check/again.json` below
XDG_STATE_HOME, by default `~/.local/state`): a name that is there twice in ten runs of this machine is red, whatever
it does alone.
"""

import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MOST = 3
"""Most failures that may be the machine's fault; if more failed, it is not the reason."""
RUNS = 10
"""Number of runs that are remembered and looked at, this one among them."""
GROUP = re.compile(r"@[^]@/:]*$")
"""What pytest-xdist adds to the id of a test of a group."""
KEY = "covey/failed"
"""Key in pytest's cache, where `tests/conftest.py` puts what failed in the last session, and why."""
FAILED = Path(".pytest_cache/v") / KEY

Failures = Mapping[str, str]
"""Id of a test -> the line that says why it failed."""
Run = Mapping[str, Any]
"""One run of `make test`: `wall_s`, and `forgiven`, the tests that failed beside others and passed alone."""


def failures(failed: Path = FAILED) -> dict[str, str]:
    """Failures of the last session; a key is what pytest takes as the id of a test."""
    told = json.loads(failed.read_text()) if failed.is_file() else {}
    return {GROUP.sub("", id): why for id, why in sorted(told.items())}


def to_run_again(found: Failures) -> list[str]:
    """Ids of tests to run again; empty when none failed, or too many."""
    return list(found) if len(found) <= MOST else []


def seen_before(earlier: Sequence[Run], forgiven: Failures) -> dict[str, int]:
    """For each test that is to be forgiven now, how many of the runs that count forgave it already."""
    counted = earlier[-(RUNS - 1) :]
    return {id: sum(id in run.get("forgiven", {}) for run in counted) for id in forgiven}


def red(earlier: Sequence[Run], forgiven: Failures) -> list[str]:
    """Tests that are forgiven no more: they were within the last ten runs."""
    return [id for id, count in seen_before(earlier, forgiven).items() if count]


def remembered(earlier: Sequence[Run], forgiven: Failures, wall_s: float) -> list[Run]:
    """Content of the file after this run."""
    return [*earlier, {"wall_s": round(wall_s), "forgiven": dict(forgiven)}][-RUNS:]


def words(first: Failures, alone: Failures, earlier: Sequence[Run]) -> str:
    """Both outcomes of each test that failed, with their reasons."""
    forgiven = {id: why for id, why in first.items() if id not in alone}
    counts = seen_before(earlier, forgiven)
    lines = ["", "failed beside others, and once more alone:"]
    for id, why in first.items():
        lines += [f"  {id}", f"    beside others: FAILED: {why}"]
        if id in alone:
            lines.append(f"    alone:         FAILED: {alone[id]}")
        elif counts[id]:
            lines.append(f"    alone:         passed; RED: so it was in {counts[id]} of the {RUNS - 1} runs before")
        else:
            lines.append("    alone:         passed; forgiven once: look at why it failed beside others")
    return "\n".join(lines)


# ---- the file --------------------------------------------------------------------------------------------------------


def place(environ: Mapping[str, str]) -> Path:
    """File in which runs of this machine are remembered, in whichever clone they were."""
    if given := environ.get("AGAIN_FILE"):
        return Path(given)
    state = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "covey-check" / "again.json"


def read(path: Path) -> list[Run]:
    """Runs that are remembered; empty, with a message, when the file is damaged."""
    try:
        found = json.loads(path.read_text())
        if isinstance(found, list) and all(isinstance(run.get("forgiven"), dict) for run in found):
            return found
        why = "it is something else"
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError) as error:
        why = str(error)
    print(f"again: {path} cannot be read ({why}): nothing is known about earlier runs", file=sys.stderr)
    return []


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Lock on the file, held by one run at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write(path: Path, runs: Sequence[Run]) -> None:
    """Write the file, whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(runs, indent=1) + "\n")
    new.replace(path)


def judge(first: Failures, alone: Failures, path: Path, wall_s: float) -> int:
    """Print and remember the result of a run; returns the exit status."""
    forgiven = {id: why for id, why in first.items() if id not in alone}
    try:
        with held(path):
            earlier = read(path)
            write(path, remembered(earlier, forgiven, wall_s))
    except OSError as error:
        print(f"again: {path} cannot be kept: {error}\nnext: AGAIN_FILE=/a/file make check", file=sys.stderr)
        return 1 if first else 0
    if first:
        print(words(first, alone, earlier), f"remembered in {path}", sep="\n")
    return int(bool(alone) or bool(red(earlier, forgiven)))


def main(given: Sequence[str]) -> int:
    """Judge the last run of pytest; `given`: its exit status."""
    code = int(given[0]) if given else 1
    if code not in (0, 1):
        return code
    first = failures() if code else {}
    ids = to_run_again(first)
    if code and not ids:
        return 1
    alone: Failures = {}
    if ids:
        print("\nfailed beside others, once more alone:", *ids, sep="\n  ", flush=True)
        again = subprocess.run([sys.executable, "-m", "pytest", *ids], check=False).returncode
        alone = {id: why for id, why in failures().items() if id in first} if again == 1 else {}
        if again and not alone:
            alone = dict.fromkeys(first, f"pytest ended with {again}")
    return judge(first, alone, place(os.environ), time.time())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
