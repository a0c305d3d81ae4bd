"""How long a gang is without a lost host, in virtual time, over many seeds (`chaos/replaced.py`).

    python bench/healing/healing_simulated.py [--seeds 1-200] [--kinds quiet,again,busy] [--json FILE]

Seconds from the loss of a host until another one runs its rank: median, 9 of 10, worst, and the seeds of the three
slowest; separately for hosts that led, whose loss costs an election and the leases that they may have given.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head  # noqa: E402
from chaos.planted import range_of  # noqa: E402
from chaos.replaced import KINDS, lose_host  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=range_of, default=range(1, 201), metavar="A-B")
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="A,B")
    json_option(parser)
    args = parser.parse_args(argv)
    print_head("lost | it led | times | s, median | 9 of 10 | worst | slowest seeds")
    told = {}
    for kind in [kind for kind in KINDS if kind in args.kinds.split(",")]:
        found = {seed: lose_host(seed, kind) for seed in args.seeds}
        for led in (False, True):
            took = sorted((each.took_s, seed) for seed, each in found.items() if each.led == led)
            if took:
                times = [took_s for took_s, _ in took]
                figures = f"{times[len(times) // 2]:.2f} | {times[len(times) * 9 // 10]:.2f} | {times[-1]:.2f}"
                slowest = ", ".join(str(seed) for _, seed in reversed(took[-3:]))
                print(f"| {kind} | {'yes' if led else 'no'} | {len(times)} | {figures} | {slowest} |", flush=True)
                told[f"{kind}, {'led' if led else 'another'}"] = times
    keep(told, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
