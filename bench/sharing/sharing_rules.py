"""`make bench-sharing ONLY=rules`: what each rule of the ladder is worth on real scripts.

    python bench/sharing/sharing_rules.py [--pairs drift,conv] [--rules audit] [--rounds 3]

Like `sharing_live.py`, but in place of the rivals the ladder with one of its rules taken out
(`plugins/sharing/machine/ablations.py`), each on the scripts for which it was made: on others it would only take time.
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, leave_the_device, options, print_head  # noqa: E402
from bench.sharing.sharing_live import LAWS, TITLES, WINDOW, bad_windows, compare, rows  # noqa: E402
from plugins.sharing.machine.ablations import RULES  # noqa: E402
from plugins.sharing.policy.interference import TOLERANCE  # noqa: E402


class Made(NamedTuple):
    """A pair of scripts and the rules that it shows to be worth something, or not."""

    rules: tuple[str, ...]
    measure_s: float = 8.0
    """Seconds to measure: whole periods of what grows, or goes away."""
    settle_s: float = 7.0
    whole: bool = False
    """Whether the pair runs on a core that takes no operation off, like a GPU (`whole_operations.py`)."""


MADE_FOR = {
    "mlp-input": Made(("head", "known-baseline", "too-much", "busy")),
    "conv": Made(("known-baseline", "too-much", "busy")),
    "drift": Made(("verification", "audit"), measure_s=20.0),
    "evaluation": Made(("away", "audit"), measure_s=20.0),
    "noisy": Made(("known-baseline", "too-much")),
    "quickens": Made(("audit",), measure_s=30.0, settle_s=45.0),
    "conv-input/long": Made(("head", "too-much"), settle_s=15.0, whole=True),
    "conv-input/jump": Made(("verification",), measure_s=20.0, whole=True),
}
"""Rules to take out, by pair of scripts."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--pairs", default=",".join(MADE_FOR))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rules", help="only these")
    json_option(parser)
    args = parser.parse_args(argv)
    leave_the_device()
    print_head(f"{TITLES} | {WINDOW} mini-batches over {100 * TOLERANCE:.0f} %")
    whole = {}
    for kind in args.pairs.split(","):
        made = MADE_FOR[kind]
        laws = {name: LAWS[name] for name in ("alone", "packed", "ours")}
        laws |= {f"without-{rule}": RULES[rule] for rule in made.rules if args.rules is None or rule in args.rules}
        whole[kind] = asyncio.run(compare(kind, args.rounds, made.settle_s, made.measure_s, laws, made.whole))
        for law, row in zip(laws, rows(kind, whole[kind]), strict=True):
            print(f"{row} {bad_windows(whole[kind], law, TOLERANCE)} |", flush=True)
    keep(whole, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
