"""How long a guaranteed script could not run because another process had its core, by the kernel's own trace.

    python bench/sharing/sharing_traced.py [--pairs jax] [--rounds 5] [--measure 3] [--settle 7] [--json FILE]

`sharing_live.py` adds up how long each thread of a script was in the run queue. That is the script's delay where one
thread computes. A JAX script computes in several, which wait at the same time and for each other; there the sum is too
large. This asks the kernel (tracefs: `sched_switch` and `sched_wakeup` of core 0; needs root) and counts each moment
once: a thread of the script could have run, none of them did, and another process had the core.

    STOOD   per step, in % of the script's step alone, what it had alone taken off
    SUM     the same of all threads added up, as `sharing_live.py` has it
"""

import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, leave_the_device, options, print_head  # noqa: E402
from bench.sharing.sharing_live import AT_ONCE, SETTLED_S, Pair, spread  # noqa: E402
from covey.core.units import GIB  # noqa: E402
from tests.plugins.sharing.live_host import live_host  # noqa: E402

TRACED = ("alone", "packed", "flag", "ours")
EVENTS = ("sched/sched_switch", "sched/sched_wakeup", "sched/sched_wakeup_new")
BUFFER_KB = 1 << 16
AT = r"\[(\d+)\] \S+ +([\d.]+): "
SWITCH = re.compile(AT + r"sched_switch: .* prev_pid=(\d+) prev_prio=\d+ prev_state=(\S+) ==> .* next_pid=(\d+) ")
WAKEUP = re.compile(AT + r"sched_wakeup(?:_new)?: .* pid=(\d+) ")
TITLES = "guaranteed script | law | STOOD, % of its step | SUM, % | the other, % of alone"


def stood_s(trace: Iterator[str], threads: Collection[int], core: int = 0) -> float:
    """Seconds in which one of `threads` was ready, none of them ran, and another thread had the core."""
    ready: set[int] = set()
    running, since_s, stood = 0, 0.0, 0.0
    for line in trace:
        switch = SWITCH.search(line)
        woken = None if switch else WAKEUP.search(line)
        found = switch or woken
        if found is None or (int(found[1]) != core and switch):
            continue
        now_s = float(found[2])
        if ready and running and running not in threads:
            stood += now_s - since_s
        since_s = now_s
        if switch:
            before, running = int(switch[3]), int(switch[5])
            (ready.add if before in threads and switch[4].startswith("R") else ready.discard)(before)
            ready.discard(running)
        elif woken and (thread := int(woken[3])) in threads and thread != running:
            ready.add(thread)
    return stood


def counted(folder: str) -> set[int]:
    """The threads that the guaranteed script counts as its own (`live_jobs.Recorder`)."""
    return {int(thread) for thread in Path(folder, "g.threads").read_text(encoding="utf-8").split()}


@contextmanager
def mounted() -> Iterator[Path]:
    """Mount tracefs at a place of its own. Exits where it may not be mounted."""
    with tempfile.TemporaryDirectory(prefix="covey-trace-") as at:
        done = subprocess.run(["mount", "-t", "tracefs", "none", at], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"the kernel's trace cannot be read: {done.stderr.strip()}; this needs root", file=sys.stderr)
            sys.exit(2)
        try:
            yield Path(at)
        finally:
            subprocess.run(["umount", at], check=True)


class Trace:
    """A trace of switches and wake-ups."""

    def __init__(self, tracefs: Path) -> None:
        self._at = tracefs

    def begin(self) -> None:
        self._write("tracing_on", "0")
        self._write("trace", "")
        self._write("trace_clock", "mono")
        self._write("buffer_size_kb", str(BUFFER_KB))
        self._events("1")
        self._write("tracing_on", "1")

    def end(self) -> list[str]:
        self._write("tracing_on", "0")
        self._events("0")
        return (self._at / "trace").read_text(encoding="utf-8").splitlines()

    def _events(self, on: str) -> None:
        for event in EVENTS:
            self._write(f"events/{event}/enable", on)

    def _write(self, name: str, value: str) -> None:
        (self._at / name).write_text(value, encoding="ascii")


async def compare(kind: str, rounds: int, settle_s: float, measure_s: float, trace: Trace) -> dict[str, Any]:
    """For each law and round: ms of a step, ms that it could not run and ms waited per step, and steps/s of the
    other."""
    found: dict[str, list[dict[str, float]]] = {law: [] for law in TRACED}
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as folder:
        async with live_host(4 * GIB) as host:
            pair = Pair(host, kind, Path(folder))
            await pair.begin()
            alone_rate = await pair.guest_alone(measure_s)
            for turn in range(rounds):
                for law in TRACED if turn % 2 == 0 else reversed(TRACED):
                    pair.rule("alone")
                    await asyncio.sleep(0.5)
                    pair.rule(law)
                    await asyncio.sleep(SETTLED_S if law in AT_ONCE else settle_s)
                    threads = counted(folder)
                    began_ns = time.monotonic_ns()
                    trace.begin()
                    await asyncio.sleep(measure_s)
                    lines = trace.end()
                    mine = pair.guaranteed.between(began_ns, time.monotonic_ns())
                    theirs = pair.guest.between(began_ns, time.monotonic_ns())
                    found[law].append(
                        {
                            "step_ms": statistics.fmean(step[1] for step in mine) / 1e6,
                            "stood_ms": 1e3 * stood_s(iter(lines), threads) / (measure_s * 1e9) * _step_ns(mine),
                            "sum_ms": statistics.fmean(step[2] for step in mine) / 1e6,
                            "rate": len(theirs) / measure_s,
                        }
                    )
                print(f"  {kind}: round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    return {"laws": found, "guest_alone": alone_rate}


def _step_ns(steps: Sequence[tuple[int, int, int, int]]) -> float:
    return statistics.fmean(step[1] for step in steps)


def rows(kind: str, found: dict[str, Any]) -> list[str]:
    alone = found["laws"]["alone"]
    usual = {name: statistics.median(one[name] for one in alone) for name in ("step_ms", "stood_ms", "sum_ms")}

    def more(law: str, name: str) -> str:
        return spread([100 * (one[name] - usual[name]) / usual["step_ms"] for one in found["laws"][law]])

    def share(law: str) -> str:
        return spread([100 * one["rate"] / found["guest_alone"] for one in found["laws"][law]])

    return [f"| {kind} | {law} | {more(law, 'stood_ms')} | {more(law, 'sum_ms')} | {share(law)} |" for law in TRACED]


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--pairs", default="jax")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--settle", type=float, default=7.0, metavar="SECONDS", help="of laws that measure first")
    json_option(parser)
    args = parser.parse_args(argv)
    leave_the_device()
    with mounted() as tracefs:
        print_head(TITLES)
        whole = {}
        for kind in args.pairs.split(","):
            whole[kind] = asyncio.run(compare(kind, args.rounds, args.settle, args.measure, Trace(tracefs)))
            print("\n".join(rows(kind, whole[kind])), flush=True)
    keep(whole, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
