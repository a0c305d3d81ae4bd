"""`make bench-sharing ONLY=upgrade`: a gang of four is upgraded again and again while an agent dies: all ranks or
none.

    python bench/sharing/sharing_upgrade.py [--tries 10] [--seed 1]

`tests/rack/upgrades.py` says what is checked; a try that breaks ends it with status 1. Times are s after the
guaranteed job was cancelled.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import options, print_head  # noqa: E402
from tests.rack.sharing_rack import sharing_rack  # noqa: E402
from tests.rack.upgrades import SCHEDULER, Tried, Upgrade  # noqa: E402


def row(number: int, tried: Tried) -> str:
    def told(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds:.2f}"

    who = f"{tried.victim}{', the leader' if tried.led else ''}"
    times = f"{tried.kill_s:.2f} | {told(tried.log_s)} | {told(tried.ranks_s)}"
    return f"| {number} | {who} | {times} | {' and '.join(sorted(tried.before))} | {tried.back_s:.2f} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--tries", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    print_head("try | killed | at | log says so | all that live | without the dead one | all four, after its return")
    rng = Random(args.seed)
    with sharing_rack(4, 1, SCHEDULER) as rack:
        for number in range(1, args.tries + 1):
            tried = Upgrade(rack, rng).run()
            print(row(number, tried), flush=True)
            if not tried.whole:
                print(f"half an upgrade: {tried}", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
