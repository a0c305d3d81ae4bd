"""`make bench-sharing ONLY=starts`: what a guaranteed script loses while an opportunistic one beside it starts.

    python bench/sharing/sharing_starts.py [--pairs mlp-input] [--rounds 5]

A script imports modules and builds its model for seconds, and nothing in it can hold it back meanwhile. The guaranteed
script computes on core 0; the other starts on the same core again and again, each way in turn, forwards and backwards:

    as any       as other processes start: no priority is lowered
    held back    as agents start it (`agent/ports/processes/held_back.py`), let go when the sharing service says so

STEP is how much longer than alone the guaranteed script's step takes, and DELAY how much longer its thread is in the
run queue per step, both as a share of its step alone: from the start of the process until its first mini-batch has
ended, and for `AFTER_S` seconds after that. STARTED is the time until that first mini-batch has ended.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from agent.ports.processes.held_back import let_go  # noqa: E402
from bench.live_command import json_option, keep, leave_the_device, options, print_head  # noqa: E402
from bench.sharing.sharing_live import GUEST, Steps, spread  # noqa: E402
from covey.core.ids import JobId  # noqa: E402
from covey.core.units import GIB, MIB  # noqa: E402
from tests.plugins.sharing.live_host import LiveHost, live_host  # noqa: E402

WAYS = ("as any", "held back")
ALONE_S, AFTER_S, ANSWER_S, WARM_STEPS = 5.0, 5.0, 180.0, 50
TITLES = "guaranteed script | the other starts | STARTED, s | STEP, % | DELAY, % | STEP after, % | DELAY after, %"
LIVE_JOBS = str(ROOT / "bench" / "sharing" / "live_jobs.py")
HOLD_BACK = (
    "import os, sys; from agent.ports.processes.shim import hold_back; hold_back(); os.execv(sys.argv[1], sys.argv[1:])"
)


class Releases:
    """The part of the port of processes with which the sharing service releases ranks."""

    def __init__(self) -> None:
        self.answered_ns: dict[int, int] = {}
        """CLOCK_MONOTONIC in ns at which the service let each process go."""

    async def let_go(self, pid: int) -> bool:
        self.answered_ns.setdefault(pid, time.monotonic_ns())
        return await asyncio.to_thread(let_go, pid)


def mean(records: Sequence[tuple[int, int, int, int]]) -> dict[str, float]:
    """Mean step and mean wait for the core, in ms."""
    if not records:
        return {"step_ms": float("nan"), "delay_ms": float("nan")}
    return {
        "step_ms": statistics.fmean(took for _, took, _, _ in records) / 1e6,
        "delay_ms": statistics.fmean(waited for _, _, waited, _ in records) / 1e6,
    }


async def until(what: str, holds: Any) -> None:
    """Wait until the condition holds; raises SystemExit after `ANSWER_S` seconds."""
    end_s = time.monotonic() + ANSWER_S
    while not holds():
        if time.monotonic() > end_s:
            raise SystemExit(f"{what}: not within {ANSWER_S:.0f} s")
        await asyncio.sleep(0.005)


async def started(
    host: LiveHost, releases: Releases, steps: Steps, way: str, guest: tuple[str, ...]
) -> dict[str, float]:
    """One start of the opportunistic script, and its end."""
    alone_ns = time.monotonic_ns()
    await asyncio.sleep(ALONE_S)
    argv = (sys.executable, "-c", HOLD_BACK, *guest) if way == "held back" else guest
    began_ns = time.monotonic_ns()
    await host.come("o", "opportunistic", argv, 256 * MIB)
    pid = host.processes[JobId("o")].pid
    await until("the first mini-batch of the opportunistic script", lambda: pid in releases.answered_ns)
    answered_ns = releases.answered_ns[pid]
    await asyncio.sleep(AFTER_S)
    ended_ns = time.monotonic_ns()
    host.kill("o")
    await asyncio.sleep(1.0)
    before, meanwhile, after = (
        mean(steps.between(*span)) for span in ((alone_ns, began_ns), (began_ns, answered_ns), (answered_ns, ended_ns))
    )
    found = {"started_s": (answered_ns - began_ns) / 1e9, **{f"alone_{key}": value for key, value in before.items()}}
    for key, value in before.items():
        found[key] = 100 * (meanwhile[key] - value) / before["step_ms"]
        found[f"after_{key}"] = 100 * (after[key] - value) / before["step_ms"]
    return found


async def compare(kind: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Each way of starting `rounds` times, in turns."""
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as name:
        folder = Path(name)
        async with live_host(4 * GIB) as host:
            releases = Releases()
            host.service.env = replace(host.service.env, processes=releases)  # type: ignore[arg-type]
            steps = Steps(folder / "g")
            await host.come("g", "guaranteed", (sys.executable, LIVE_JOBS, kind, str(steps.path)), GIB)
            await until("the guaranteed script", lambda: len(steps.between(0, 1 << 62)) >= WARM_STEPS)
            found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for turn in range(rounds):
                for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                    guest = (sys.executable, LIVE_JOBS, GUEST, str(folder / f"o{turn}-{WAYS.index(way)}"))
                    found[way].append(await started(host, releases, steps, way, guest))
                print(f"  {kind}: round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
            return found


def rows(kind: str, found: dict[str, list[dict[str, float]]]) -> list[str]:
    """A line for each way of starting: medians over the rounds, and the whole range."""
    keys = ("step_ms", "delay_ms", "after_step_ms", "after_delay_ms")
    lines = []
    for way, each in found.items():
        times = statistics.median(one["started_s"] for one in each)
        told = [spread([one[key] for one in each]) for key in keys]
        lines.append(f"| {kind} | {way} | {times:.1f} | {' | '.join(told)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--pairs", default="mlp-input,conv-input")
    parser.add_argument("--rounds", type=int, default=5)
    json_option(parser)
    args = parser.parse_args(argv)
    leave_the_device()
    print(f"load {os.getloadavg()[0]:.2f}", file=sys.stderr)
    print_head(TITLES)
    whole = {}
    for kind in args.pairs.split(","):
        whole[kind] = asyncio.run(compare(kind, args.rounds))
        print("\n".join(rows(kind, whole[kind])), flush=True)
    keep(whole, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
