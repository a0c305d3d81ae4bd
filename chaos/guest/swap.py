"""`make swap`: a kernel of its own (User-Mode Linux) swaps to remote memory, while its processes are killed.

    python -m chaos.guest.swap                  all: pages, without a disk, lost, Redis if it is installed, systemd
    python -m chaos.guest.swap pages lost       some of it
    python -m chaos.guest.swap --run 'COMMAND'

Exit status: 0 when all holds; 2 when the guest cannot be made or run here, and why.
"""

import argparse
import shlex
import signal
import sys

from chaos.guest.image import NoGuest
from chaos.guest.uml import run

WITHIN_S = 900.0
KINDS = ("pages", "mirror", "parity", "lost", "redis", "redis-mirror", "systemd", "systemd-mirror")
PARTS = ("discards",)
BOOTED = {"systemd": "disk", "systemd-mirror": "mirror"}
"""Parts that run on hosts whose first process is systemd."""
MODULES = "overlay bridge veth"
"""Modules that hosts with systemd need of the guest's kernel."""


def main() -> None:
    parser = argparse.ArgumentParser("chaos.guest.swap", description="Swap to remote memory in User-Mode Linux.")
    parser.add_argument("--run", default="", help="a shell command instead")
    parser.add_argument("--within", type=float, default=WITHIN_S, help="seconds for each (%(default)g)")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=" or ".join(KINDS))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the guest is ended then too
    wrong = [kind for kind in options.kinds if kind not in (*KINDS, *PARTS)]
    if wrong:
        parser.error(f"{wrong[0]}: expected {' or '.join(KINDS)}")
    python = shlex.quote(sys.executable)
    modules = f'{python} -m chaos.guest.modules "$COVEY_MODULES" {MODULES}'
    scripts = [options.run] if options.run else [
        f"{modules} && {python} -P tests/guest/systemd_swap.py {BOOTED[kind]}" if kind in BOOTED
        else f"{python} -P tests/guest/kernel_swap.py {kind}" for kind in options.kinds or KINDS
    ]  # fmt: skip
    code = 0
    try:
        for script in scripts:
            code = run(script, options.within) or code
    except NoGuest as why:
        print(f"swap: {why}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code)


if __name__ == "__main__":
    main()
