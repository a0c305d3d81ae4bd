"""What a turn costs on a host that jobs share (`covey/tensors/turns`), in microseconds.

    python bench/elastic/turns.py [--processes 4] [--turns 2000]

FREE: the processors are taken and given, and nobody else wants them; the network likewise. HANDED OVER: from when
another process gives the processors until this one, which waits for them, has them: a futex wake lies between.
"""

import mmap
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head  # noqa: E402
from covey.kernel.pages import PAGE_BYTES  # noqa: E402
from covey.tensors.turns.holder import ProcessTurns  # noqa: E402
from covey.tensors.turns.page import USE, TurnsPage  # noqa: E402
from covey.tensors.turns.rules import HOLDS  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--processes", type=int, default=4, help="slots on the page, of as many jobs")
    parser.add_argument("--turns", type=int, default=2000, help="of each kind, and a tenth handed over; at least 10")
    json_option(parser)
    args = parser.parse_args(argv)
    turns = max(10, args.turns)
    memory = mmap.mmap(-1, PAGE_BYTES)
    page = TurnsPage(memory)
    page.prepare()
    for slot in range(args.processes):
        page.assign(slot, slot + 1, slot)
    mine = of(memory, 0)
    found = {
        "processors, free": timed(lambda: computed(mine), turns),
        "network, free": timed(lambda: sent(mine), turns),
        "handed over": handed_over(memory, mine, turns // 10),
    }
    print_head("turn | us, median | us, 9 of 10")
    for name, us in found.items():
        print(f"| {name} | {statistics.median(us):.1f} | {sorted(us)[len(us) * 9 // 10]:.1f} |")
    keep({name: statistics.median(us) for name, us in found.items()}, args.json)
    mine.close()
    return 0


def of(memory: mmap.mmap, slot: int) -> ProcessTurns:
    made = ProcessTurns()
    made.page_came(memory, slot, TurnsPage(memory).get(slot, USE))
    return made


def computed(mine: ProcessTurns) -> None:
    mine.computes()
    mine.computed()


def sent(mine: ProcessTurns) -> None:
    with mine.sending():
        pass


def timed(turn: Callable[[], object], count: int) -> list[float]:
    """Microseconds of each turn."""
    found = []
    for _ in range(count):
        began_s = time.perf_counter()
        turn()
        found.append(1e6 * (time.perf_counter() - began_s))
    return found


def handed_over(memory: mmap.mmap, mine: ProcessTurns, count: int) -> list[float]:
    """Microseconds from when another process gives its turn until this one, which waits, has it."""
    gave = mmap.mmap(-1, mmap.PAGESIZE)
    child = os.fork()
    if not child:
        takes_turns(of(memory, 1), gave)
    found, page = list[float](), TurnsPage(memory)
    try:
        while len(found) < count:
            while not any(one.slot == 1 and one.state == HOLDS for one in page.claims("comp", time.monotonic_ns())):
                if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    raise SystemExit("the process that takes turns with this one has ended")
                time.sleep(0.0001)
            waited_s = mine.spent().waited_s
            mine.computes()
            has_ns = time.monotonic_ns()
            if mine.spent().waited_s > waited_s:
                found.append((has_ns - int.from_bytes(gave[:8], "little")) / 1000)
            mine.computed()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return found


def takes_turns(other: ProcessTurns, gave: mmap.mmap) -> NoReturn:
    """What the other process does until it is killed; it says in `gave` when it gave its turn, in nanoseconds."""
    try:
        while True:
            other.computes()
            time.sleep(0.002)
            gave[:8] = time.monotonic_ns().to_bytes(8, "little")
            other.computed()
            time.sleep(0.001)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
