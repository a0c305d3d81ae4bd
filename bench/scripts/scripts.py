"""`make scripts`: forty kinds of training scripts, each tried as a job in every way, and one table of what was seen.

    python bench/scripts/scripts.py [--only WORD,..] [--lanes 2] [--out bench/results/scripts.md]

Two racks of two agents each run on this machine, and each tries one script at a time (`ways.py`). The scripts are
written as their frameworks' manuals write them; `kinds.toml` says what is expected of each. A cell that differs from
that is marked, and the exit code is 1. Nothing needs a GPU.
"""

import argparse
import fnmatch
import re
import shutil
import sys
import tempfile
import threading
import time
import tomllib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.scripts import ways  # noqa: E402
from bench.scripts.ways import Kind, Lane  # noqa: E402

COLUMNS = ("runs", "seen", "stopped", "aggregated", "healed", "torchrun")
TITLES = (
    "script",
    "runs",
    "steps, waits, memory seen",
    "preempted three times",
    "--aggregate",
    "a rank is killed",
    "torchrun beside it",
)


class Row(NamedTuple):
    """What was seen of one kind, by column."""

    kind: Kind
    cells: dict[str, str]
    seconds: float

    @property
    def unlike(self) -> list[str]:
        """The columns whose cells are not as expected, with both."""
        wanted = {name: getattr(self.kind, "beside" if name == "torchrun" else name) for name in COLUMNS}
        wanted["torchrun"] = self.kind.torchrun if self.kind.torchrun.startswith("no: ") else self.kind.beside
        return [
            f"{self.kind.name}: {name}: expected {wanted[name]!r}, seen {self.cells[name]!r}"
            for name in COLUMNS
            if not fnmatch.fnmatchcase(self.cells[name], re.sub(r"[\[\]?]", "?", wanted[name]))
        ]


def kinds() -> list[Kind]:
    found = tomllib.loads((ways.HERE / "kinds.toml").read_text(encoding="utf-8"))
    return [Kind(**{"torchrun": "no: one process", **each}) for each in found["kind"]]


def tried(lane: Lane, kind: Kind) -> Row:
    """Try a kind in every way. Where Covey does not take the job, the cells of that way say why."""
    began_s, cells = time.monotonic(), dict.fromkeys(COLUMNS, "")
    try:
        _try(lane, kind, cells)
    except ways.Refused as error:
        cells = {name: text or f"no: {error}" for name, text in cells.items()}
    return Row(kind, cells, time.monotonic() - began_s)


def _try(lane: Lane, kind: Kind, cells: dict[str, str]) -> None:
    plain = lane.plain(kind)
    bits = plain.digests
    cells["runs"] = "yes" if plain.ok else plain.why_not
    cells["seen"] = ways.seen(kind, plain)
    if plain.ok and len(bits) > 1:
        cells["runs"] = f"ranks end with unlike bits ({', '.join(sorted(bits))})"
    if missing := [each for each in kind.writes.split() if not any(plain.folder.glob(each))]:
        cells["runs"] = f"no: it left no {', '.join(missing)}"
    if not plain.ok:
        cells |= dict.fromkeys(COLUMNS[2:], "no: it does not run")
        return
    disturbed = lane.disturbed(kind)
    cells["stopped"], cells["healed"] = ways.stopped(disturbed, bits), ways.healed(disturbed, bits)
    cells["aggregated"] = ways.aggregated(plain if kind.without_ddp else lane.aggregated(kind), bits)
    cells["torchrun"] = kind.torchrun
    if not kind.torchrun.startswith("no: "):
        code, output = lane.beside(kind)
        cells["torchrun"] = "same bits" if set(ways.DIGEST.findall(output)) == bits else f"no: exit {code}, other bits"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="kinds whose names or files have one of these words, with commas")
    parser.add_argument("--lanes", type=int, default=2, help="racks, each of which tries one script at a time")
    parser.add_argument("--python", type=Path, default=ROOT / ".scripts/bin", help="folder of the scripts' programs")
    parser.add_argument("--out", type=Path, help="where to write the table")
    parser.add_argument("--keep", action="store_true", help="keep what runs wrote")
    args = parser.parse_args(argv)
    words = [word for word in args.only.split(",") if word]
    chosen = [kind for kind in kinds() if not words or any(word in f"{kind.name} {kind.file}" for word in words)]
    rows, left = list[Row](), deque(chosen)
    directory = Path(tempfile.mkdtemp(prefix="covey-scripts-"))

    def run(number: int) -> None:
        with Lane(directory / f"lane{number}", args.python).started() as lane:
            while left:
                row = tried(lane, left.popleft())
                rows.append(row)
                print(f"{row.seconds:5.0f} s  {line(row)}", *row.unlike, sep="\n   !! ", flush=True)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(min(args.lanes, len(chosen)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    order = {kind.name: number for number, kind in enumerate(chosen)}
    rows.sort(key=lambda row: order[row.kind.name])
    if args.out:
        args.out.write_text(table(rows, args.out), encoding="utf-8")
    if args.keep:
        print(f"kept: {directory}")
    else:
        shutil.rmtree(directory)
    unlike = [each for row in rows for each in row.unlike]
    print(*unlike, f"{len(rows)} of {len(chosen)} kinds were tried, {len(unlike)} cells are not as expected", sep="\n")
    return 1 if unlike or len(rows) < len(chosen) else 0


def line(row: Row) -> str:
    return f"| {' | '.join([row.kind.name, *(row.cells[name] for name in COLUMNS)])} |"


def table(rows: Sequence[Row], before: Path) -> str:
    """The table, with the rows of an earlier one for kinds that were not tried now."""
    lines = before.read_text(encoding="utf-8").splitlines() if before.exists() else []
    known = {each.split(" | ")[0].removeprefix("| "): each for each in lines[2:]}
    known |= {row.kind.name: line(row) for row in rows}
    head = f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}\n"
    return head + "".join(f"{known[kind.name]}\n" for kind in kinds() if kind.name in known)


if __name__ == "__main__":
    sys.exit(main())
