"""`make bench-sharing ONLY=rules`: what each rule of the ladder is worth on real scripts.

    python bench/sharing_rules.py [--pairs drift,conv] [--rounds 3] [--settle 7]

As `sharing_live.py`, and in place of the rivals the ladder with one of its rules taken out (`machine/ablations.py`),
each on the scripts for which it was made: nothing but time would be lost on others.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, leave_the_device, options, print_head  # noqa: E402
from bench.sharing_live import LAWS, TITLES, compare, rows  # noqa: E402
from plugins.sharing.machine.ablations import RULES  # noqa: E402

MADE_FOR: dict[str, tuple[float, tuple[str, ...]]] = {
    "mlp-input": (8.0, ("head", "alarm", "easing", "known-baseline", "too-much", "busy")),
    "conv": (8.0, ("easing", "known-baseline", "too-much", "busy")),
    "drift": (20.0, ("verification", "audit")),
    "evaluation": (20.0, ("away", "audit")),
    "noisy": (8.0, ("known-baseline", "too-much")),
    "conv-input/sudden": (20.0, ("alarm", "verification")),
}
"""Of each pair, for how many seconds it is measured (whole periods of what grows, or goes away), and which rules."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--pairs", default=",".join(MADE_FOR))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle", type=float, default=7.0, metavar="SECONDS")
    json_option(parser)
    args = parser.parse_args(argv)
    leave_the_device()
    print_head(TITLES)
    whole = {}
    for kind in args.pairs.split(","):
        measure_s, rules = MADE_FOR[kind]
        laws = {name: LAWS[name] for name in ("alone", "packed", "ours")}
        laws |= {f"without-{rule}": RULES[rule] for rule in rules}
        whole[kind] = asyncio.run(compare(kind, args.rounds, args.settle, measure_s, laws))
        print("\n".join(rows(kind, whole[kind])), flush=True)
    keep(whole, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
