"""`make bench-tensors-lanes`: rounds a second through an aggregator with one lane and with several, side by side.

    python bench/tensors/tensors_lanes.py [--lanes 1,2] [--cases NAMES] [--windows 6] [--before FOLDER] [--json FILE]

An `aggd` for each number of lanes, all at once; the same ranks, a process each, use one after the other, by its unix
socket. In each window a block of rounds with each of them, in turns that change. RATE: rounds of all jobs together a
second, the median of windows; in brackets the median of a window's ratio to the first one. *before*: the aggregator of
another checkout of this repository (`--before`), with one lane or none. CPU: of the aggregator and its lanes, ms for a
round. Every result is compared with that of the first one, to the bit.

    Adam         gradients of 25 MB, of two ranks, become a step of Adam
    Adam, jobs   four jobs of one rank, 8 MB each
    sums         25 MB of four ranks
    16 bit       25 MB of bfloat16 of two ranks, summed in float32 and rounded
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, os.environ.get("COVEY_BENCH_ROOT", str(ROOT)))

from bench.live_command import json_option, keep, options, print_head, spent_s  # noqa: E402

EPOCH, SECRET, NEAR = (1 << 32) + 1, b"sixteen bytes !!", "near.sock"
MB = 1_000_000


class Case(NamedTuple):
    jobs: int
    ranks: int
    """Ranks of each job."""
    size: int
    """Bytes of a tensor."""
    adam: bool
    type: str = "float32"


CASES = {
    "Adam": Case(1, 2, 25 * MB, True),
    "Adam, jobs": Case(4, 1, 8 * MB, True),
    "sums": Case(1, 4, 25 * MB, False),
    "16 bit": Case(1, 2, 25 * MB, False, "bfloat16"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--lanes", default="1,2")
    parser.add_argument("--cases", default=";".join(CASES), help="between semicolons")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=8, help="of a job, with each aggregator, in a window")
    parser.add_argument("--before", default="", help="another checkout, whose aggregator is measured too")
    json_option(parser)
    args = parser.parse_args(argv)
    doors = [("before", args.before)] * bool(args.before) + [(lanes, str(ROOT)) for lanes in args.lanes.split(",")]
    names = [f"{name} lanes" if name != "before" else name for name, _ in doors]
    print_head(" | ".join(("case", *(f"RATE, {name}" for name in names), *(f"CPU, {name}" for name in names))))
    whole: dict[str, Any] = {}
    for case in args.cases.split(";"):
        found = whole[case] = measure(CASES[case], doors, args.windows, args.rounds)
        print(f"| {case} | {' | '.join(rates(found) + [f'{ms:.1f}' for ms in found['cpu_ms']])} |", flush=True)
    keep(whole, args.json)
    return 0


def rates(found: dict[str, Any]) -> list[str]:
    """The rate of each aggregator, and its ratio to the first one's."""
    first, *others = found["rates"]
    said = [f"{statistics.median(first):.2f}"]
    for each in others:
        times = statistics.median(mine / theirs for mine, theirs in zip(each, first, strict=True))
        said.append(f"{statistics.median(each):.2f} ({times:.2f}x)")
    return said


def measure(case: Case, doors: Sequence[tuple[str, str]], windows: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="covey-lanes-") as folder:
        aggregators = [aggregator(Path(folder), case, *door) for door in doors]
        at = [said(each)["address"] for each in aggregators]
        ranks = [rank(Path(folder), case, job, number, at) for job in range(case.jobs) for number in range(case.ranks)]
        for each in ranks:
            said(each)
        found: dict[str, Any] = {"rates": [[] for _ in doors], "cpu_ms": [0.0 for _ in doors]}
        for window in range(-1, windows):  # the first one makes all memory
            order = range(len(doors)) if window % 2 else reversed(range(len(doors)))
            sums: dict[int, list[str]] = {}
            for door in order:
                cpu_s, began_s = all_spent_s(aggregators[door].pid), time.monotonic()
                for each in ranks:
                    tell(each, {"door": door, "rounds": rounds})
                sums[door] = [said(each)["sum"] for each in ranks]
                if window >= 0:
                    found["rates"][door].append(case.jobs * rounds / (time.monotonic() - began_s))
                    spent = all_spent_s(aggregators[door].pid) - cpu_s
                    found["cpu_ms"][door] += 1000 * spent / (windows * rounds * case.jobs)
            if len({tuple(each) for each in sums.values()}) > 1:
                raise SystemExit("the aggregators have unlike bits")
        for each in (*ranks, *aggregators):
            tell(each, {})
            each.wait(30)
        return found


def all_spent_s(pid: int) -> float:
    """Processor time of a process and its children, in seconds of a core."""
    tasks = Path(f"/proc/{pid}/task")
    children = [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    return spent_s(pid) + sum(spent_s(child) for child in children)


# ---- processes -------------------------------------------------------------------------------------------------------


def started(words: Sequence[str], root: str = str(ROOT)) -> "subprocess.Popen[str]":
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    environ = {**os.environ, "COVEY_BENCH_ROOT": root, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=root)


def tell(to: "subprocess.Popen[str]", what: dict[str, Any]) -> None:
    assert to.stdin is not None
    print(json.dumps(what), file=to.stdin, flush=True)


def said(by: "subprocess.Popen[str]") -> dict[str, Any]:
    assert by.stdout is not None
    line = by.stdout.readline()
    if not line:
        raise SystemExit(f"{by.args}: ended")
    found: dict[str, Any] = json.loads(line)
    return found


def aggregator(folder: Path, case: Case, lanes: str, root: str) -> "subprocess.Popen[str]":
    here = folder / lanes
    here.mkdir()
    return started(["--aggd", str(here), lanes, str(case.jobs), str(case.ranks)], root)


def rank(folder: Path, case: Case, job: int, number: int, at: Sequence[str]) -> "subprocess.Popen[str]":
    return started(["--rank", str(job), str(number), json.dumps(case), *at])


def aggd_main(folder: str, lanes: str, jobs: str, ranks: str) -> None:
    import uvloop

    from tests.plugins.aggregator.loopback import AggdThread

    class LikeAgents(AggdThread):
        new_loop = staticmethod(uvloop.new_event_loop)

    more = {"lanes": int(lanes)} if lanes != "before" else {}
    aggd = LikeAgents(Path(folder), memory_bytes_max=8 << 30, near=NEAR, **more)
    for job in range(int(jobs)):
        address = aggd.serve(f"j{job}", EPOCH, int(ranks)).address
    of: Any = aggd.aggd
    while more.get("lanes", 1) > 1 and of.lanes.up < of.lanes.count:
        time.sleep(0.01)
    print(json.dumps({"address": f"{address} {folder}/{NEAR}"}), flush=True)
    sys.stdin.readline()
    aggd.finish()


def rank_main(job: str, number: str, of: str, *at: str) -> None:
    import numpy as np

    from covey.core.ids import HostId, JobId
    from covey.job.tensors import TensorClient
    from covey.tensors.numbers.types import NUMBERS
    from covey.tensors.numbers.updates import Adam
    from covey.wire.job import AggregatorAt

    case = Case(*json.loads(of))
    rng = np.random.default_rng(int(number))
    numbers: Any = NUMBERS[case.type]  # type: ignore[index]
    gradient = numbers.narrow(rng.standard_normal(case.size // numbers.stored.itemsize).astype(numbers.wide))
    out, type = np.zeros_like(gradient), {"type": case.type} if case.type == "bfloat16" else {}
    clients = []
    for address in at:
        where, near = address.split()
        client = TensorClient(JobId(f"j{job}"), int(number), case.ranks, lambda epoch, why, table: None)
        client.moved(AggregatorAt(JobId(f"j{job}"), EPOCH, HostId("h1"), where, SECRET, near=near))
        clients.append(client)
    if case.adam:
        for client in clients:
            client.model("w", out, update=Adam())
    print("{}", flush=True)
    while order := json.loads(sys.stdin.readline() or "{}"):
        client = clients[order["door"]]
        for _ in range(order["rounds"]):
            client.push_pull("w", gradient, out=out, **type)
        print(json.dumps({"sum": hashlib.sha256(out.data).hexdigest()}), flush=True)
    for client in clients:
        client.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--aggd"]:
        aggd_main(*sys.argv[2:])
    elif sys.argv[1:2] == ["--rank"]:
        rank_main(*sys.argv[2:])
    else:
        sys.exit(main())
