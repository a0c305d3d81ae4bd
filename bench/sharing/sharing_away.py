"""`make bench-sharing ONLY=away`: a guaranteed script goes away from its device and returns (AntMan, figure 12).

    python bench/sharing/sharing_away.py [--rounds 5]

The script `evaluation` of `live_jobs.py` trains for five seconds and is away for five, again and again; beside it, on
the same core, the MLP that always computes. Printed for each round, median and worst:

    HAS    from when the guaranteed script left, until the other makes steps at 80 % of its rate alone
    CUT    from its return, until the other is under half of its rate alone

Both are ends of the first tenth of a second of which that is true, so 0.1 s is the least there is. DELAY is that of
`sharing_live.py`, of the guaranteed script's mini-batches while both share, and of those in its first second back.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, leave_the_device, options, print_head  # noqa: E402
from bench.sharing.live_jobs import BETWEEN_S, EVALUATION_S  # noqa: E402
from bench.sharing.sharing_live import Pair  # noqa: E402
from covey.core.units import GIB  # noqa: E402
from tests.plugins.sharing.live_host import live_host  # noqa: E402

SECOND = 1_000_000_000
WINDOW_NS, GRID_NS = SECOND // 10, SECOND // 100
HAS, CUT = 0.8, 0.5
"""Shares of the other's rate alone: above the first it has the device, below the second it is cut."""
LAWS = ("alone", "packed", "ours")
Record = tuple[int, int, int, int]


def away(records: Sequence[Record]) -> list[tuple[int, int]]:
    """For each phase away: when the script left and when it worked on the device again, in ns; each long mini-batch is
    one such phase."""
    long_ns = 0.8 * EVALUATION_S * SECOND
    return [(ended - took, ended - waited - ran) for ended, took, waited, ran in records if took > long_ns]


def rate(ended: Sequence[int], from_ns: int, to_ns: int) -> float:
    """Steps per second."""
    return (bisect_left(ended, to_ns) - bisect_left(ended, from_ns)) * SECOND / max(1, to_ns - from_ns)


def until(ended: Sequence[int], from_ns: int, to_ns: int, holds: Callable[[float], bool]) -> float:
    """Seconds to the end of the first window in which the condition holds; all of the time if there is none."""
    for at in range(from_ns, to_ns - WINDOW_NS, GRID_NS):
        if holds(rate(ended, at, at + WINDOW_NS)):
            return (at + WINDOW_NS - from_ns) / SECOND
    return (to_ns - from_ns) / SECOND


def delay_ms(records: Sequence[Record], from_ns: int, to_ns: int) -> float:
    """Mean wait for the core in ms, of mini-batches that lie between."""
    found = [waited for ended, took, waited, _ in records if ended - took >= from_ns and ended <= to_ns]
    return statistics.fmean(found) / 1e6 if found else float("nan")


def measured(mine: Sequence[Record], theirs: Sequence[Record], alone: float) -> list[dict[str, float]]:
    """Measurements for each phase away after which the guaranteed script trained again."""
    ended = [record[0] for record in theirs]
    phases = away(mine)
    found = []
    for at, (left_ns, back_ns) in enumerate(phases):
        on_ns = phases[at + 1][0] if at + 1 < len(phases) else mine[-1][0]
        if on_ns - back_ns < 2 * SECOND:
            continue
        found.append(
            {
                "has_s": until(ended, left_ns, back_ns, lambda now: now >= HAS * alone),
                "cut_s": until(ended, back_ns, on_ns, lambda now: now < CUT * alone),
                "away_rate": rate(ended, left_ns, back_ns) / alone,
                "shared_rate": rate(ended, back_ns, on_ns) / alone,
                "delay_ms": delay_ms(mine, back_ns, on_ns),
                "back_delay_ms": delay_ms(mine, back_ns, back_ns + SECOND),
                "step_ms": statistics.median(r[1] for r in mine if back_ns <= r[0] - r[1] and r[0] <= on_ns) / 1e6,
            }
        )
    return found


async def live(rounds: int) -> dict[str, Any]:
    """Run every law in turn for its rounds; `alone` and `packed` for two."""
    period_s = EVALUATION_S + BETWEEN_S
    with tempfile.TemporaryDirectory(prefix="covey-bench-") as folder:
        async with live_host(4 * GIB) as host:
            pair = Pair(host, "evaluation", Path(folder))
            await pair.begin()
            alone = await pair.guest_alone(period_s)
            found: dict[str, Any] = {"guest_alone": alone}
            for law in LAWS:
                pair.rule(law)
                await asyncio.sleep(1.0)
                began_ns = time.monotonic_ns()
                await asyncio.sleep(period_s * (2.2 if law != "ours" else rounds + 1.2))
                span = began_ns, time.monotonic_ns()
                each = measured(pair.guaranteed.between(*span), pair.guest.between(*span), alone)
                found[law] = each[: rounds if law == "ours" else 2]
                print(f"  {law}: {len(found[law])} rounds", file=sys.stderr, flush=True)
            return found


def rows(found: dict[str, Any]) -> list[str]:
    """A line for each law."""
    step = statistics.median(one["step_ms"] for one in found["alone"])
    before = statistics.median(one["delay_ms"] for one in found["alone"])

    def delay(each: Sequence[dict[str, float]], key: str) -> str:
        return f"{100 * (statistics.median(one[key] for one in each) - before) / step:+.1f} %"

    def share(each: Sequence[dict[str, float]], key: str) -> str:
        return f"{100 * statistics.median(one[key] for one in each):.0f} %"

    def times(law: str, key: str) -> str:
        spent = [one[key] for one in found[law]]
        return f"{statistics.median(spent):.2f} ({max(spent):.2f}) s" if law == "ours" else "-"

    lines = []
    for law in LAWS:
        each = found[law]
        told = [times(law, "has_s"), times(law, "cut_s"), delay(each, "delay_ms"), delay(each, "back_delay_ms")]
        told += [share(each, "shared_rate"), share(each, "away_rate")]
        lines.append(f"| {law} | {' | '.join(told)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    json_option(parser)
    args = parser.parse_args(argv)
    leave_the_device()
    found = asyncio.run(live(args.rounds))
    print_head("law | HAS | CUT | DELAY | DELAY, first second back | the other, shared | the other, away")
    print("\n".join(rows(found)))
    keep(found, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
