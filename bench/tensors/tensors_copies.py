"""How long training stops when the parameters of a model move to another aggregator: brought there by the owner
before, and brought by ranks, in turns in one run.

    python bench/tensors/tensors_copies.py [--mb 118] [--moves 20] [--computes 0.6] [--json FILE]
        [--cases parameters,Adam]

Two real aggregators, a process each, and two ranks, over loopback. Ranks push `--mb` of gradients in tensors of 4 MB,
wait for all, and sleep for a while, as a script does whose device computes; the whole job moves from the one to the
other and back, each second time as if its owner were of an older version, which brings nothing. PAUSE: of the five
rounds after a move, how much longer than the median of all rounds the longest one took, in ms: least, median and most
of all moves. STILL: the same where nothing moved. Both ranks must have the same numbers in each round, and with
`parameters` these are compared with what they must be. (Each aggregator and rank wants a core;
`bench/tensors/tensors_moves.py` has real agents.)
"""

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head  # noqa: E402

RANKS, EPOCH, WITHIN_S, AFTER = 2, 1 << 32, 30.0, 5
CASES = ("parameters", "Adam")


class Case(NamedTuple):
    kind: str
    mb: int
    computes_s: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--mb", type=int, default=118)
    parser.add_argument("--moves", type=int, default=20)
    parser.add_argument("--computes", type=float, default=0.6)
    parser.add_argument("--cases", default=",".join(CASES))
    json_option(parser)
    args = parser.parse_args(argv)
    print_head(
        "case | MB | brought by | moves | a round, ms | PAUSE, least | median | most | STILL, median | wrong rounds"
    )
    whole: dict[str, Any] = {}
    for kind in args.cases.split(","):
        found = whole[kind] = measure(Case(kind, args.mb, args.computes), args.moves)
        for who in ("owner", "ranks"):
            pauses = sorted(found[who])
            words = f"{kind} | {args.mb} | {who} | {len(pauses)} | {found['round_ms']:.0f} | {pauses[0]:.0f}"
            rest = f"{statistics.median(pauses):.0f} | {pauses[-1]:.0f} | {statistics.median(found['still']):.0f}"
            print(f"| {words} | {rest} | {found['wrong']} |", flush=True)
    keep(whole, args.json)
    return 1 if any(found["wrong"] for found in whole.values()) else 0


class Part:
    """A process of this file, which hears and says lines of JSON."""

    def __init__(self, *argv: str) -> None:
        command = [sys.executable, __file__, *argv]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.heard: list[Any] = []
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        self.heard.extend(json.loads(line) for line in self.process.stdout)

    def ask(self, what: Any, answers: int) -> None:
        """Say this, and wait for `answers` answers."""
        before = len(self.heard)
        self.say(what)
        self.until(before + answers)

    def say(self, what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def until(self, count: int) -> None:
        end_s = time.monotonic() + 300
        while len(self.heard) < count:
            if self.process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"a part of the bench has ended: {self.process.args}")
            time.sleep(0.005)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:  # a rank waits for the other one's push, which has ended
            self.process.kill()


def measure(case: Case, moves: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        aggds = [Part("--aggd", folder, name) for name in ("one", "two")]
        ranks = [Part("--rank", str(number), json.dumps(case)) for number in range(RANKS)]
        try:
            return _measure(case, moves, aggds, ranks)
        finally:
            for part in (*ranks, *aggds):
                part.end()


def _measure(case: Case, moves: int, aggds: Sequence[Part], ranks: Sequence[Part]) -> dict[str, Any]:
    for aggd in aggds:
        aggd.until(1)
    size, marks = case.mb * 1_000_000 * (3 if case.kind == "Adam" else 1), []

    def rounds(more: int) -> int:
        began = min(len(rank.heard) for rank in ranks)
        for rank in ranks:
            rank.until(began + more)
        return began

    for number in range(moves + 1):
        now, before = aggds[number % 2], aggds[1 - number % 2]
        epoch, at = EPOCH + 1 + number, now.heard[0]
        now.ask({"serve": epoch, "size": size}, 1)
        for rank in ranks:
            rank.say([epoch, at])
        if number == 0:
            rounds(3 * AFTER)
            continue
        who = "owner" if number % 2 else "ranks"
        before.ask({"drop": epoch - 1, "to": at if who == "owner" else None}, 1)  # until it was handed over
        marks.append((who, rounds(AFTER)))
        marks.append(("still", rounds(AFTER)))
    took = [max(each) for each in zip(*([said[0] for said in rank.heard] for rank in ranks), strict=False)]
    usual = statistics.median(took[AFTER:])
    found: dict[str, Any] = {"owner": [], "ranks": [], "still": [], "round_ms": 1000 * usual}
    for who, first in marks:
        found[who].append(1000 * (max(took[first : first + AFTER]) - usual))
    sums = zip(*([said[1:] for said in rank.heard] for rank in ranks), strict=False)
    found["wrong"] = sum(1 for each in sums if each[0] != each[1] or each[0][1])
    return found


def aggd_main(folder: str, name: str) -> None:
    import uvloop

    from covey.core.ids import JobId
    from covey.wire.sums import DropJob, NextOwner, Serve
    from tests.plugins.aggregator.loopback import SECRET, AggdThread

    class LikeAgents(AggdThread):
        new_loop = staticmethod(uvloop.new_event_loop)

    here, job = Path(folder) / name, JobId("j1")
    here.mkdir()
    aggd = LikeAgents(here, memory_bytes_max=8 << 30)
    print(json.dumps(aggd.aggd.address), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "serve" in order:
            aggd.order(Serve(job, order["serve"], RANKS, SECRET, order["size"]))
        else:
            to = NextOwner(order["to"], SECRET) if order["to"] else None
            aggd.order(DropJob(job, order["drop"], order["drop"] + 1, WITHIN_S, to))
            while job in aggd.aggd.jobs:
                time.sleep(0.002)
        print("0", flush=True)
    aggd.finish()


def rank_main(number: str, of: str) -> None:
    import numpy as np

    from covey.core.ids import HostId, JobId
    from covey.job.tensors import TensorClient
    from covey.tensors.numbers.updates import Adam
    from covey.wire.job import AggregatorAt
    from tests.plugins.aggregator.loopback import SECRET

    case, rank = Case(*json.loads(of)), int(number)
    client = TensorClient(JobId("j1"), rank, RANKS, lambda epoch, why, table: None)

    def hear() -> None:
        for line in sys.stdin:
            epoch, address = json.loads(line)
            client.moved(AggregatorAt(JobId("j1"), epoch, HostId("h1"), address, SECRET, handed_over=True))
        closed.append(True)

    closed: list[bool] = []
    threading.Thread(target=hear, daemon=True).start()
    names = [f"t{at}" for at in range(max(1, case.mb // 4))]
    held = [np.zeros(1_000_000, np.float32) for _ in names]
    given = [np.full(1_000_000, 1 + rank, np.float32) for _ in names]
    for name, array in zip(names, held, strict=True):
        client.model(name, array, update=Adam() if case.kind == "Adam" else None)
    round = 0
    while not closed:
        began = time.monotonic()
        for handle in [client.push(*each[:2], out=each[2]) for each in zip(names, given, held, strict=True)]:
            handle.wait()
        took, round = time.monotonic() - began, round + 1
        wanted, sum = (1 + RANKS) * RANKS // 2 * round, 0
        for array in held:
            sum = zlib.crc32(array.data, sum)
        wrong = case.kind == "parameters" and any(array[0] != wanted or (array != wanted).any() for array in held)
        print(json.dumps([took, sum, bool(wrong)]), flush=True)
        time.sleep(case.computes_s)
    client.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--aggd"]:
        aggd_main(*sys.argv[2:])
    elif sys.argv[1:2] == ["--rank"]:
        rank_main(*sys.argv[2:])
    else:
        sys.exit(main())
