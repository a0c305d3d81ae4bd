"""`covey-swapd`: started as root by systemd (`systemd/covey-swap.service`), for the agent's user.

covey-swapd --user covey [--socket /run/covey-swap/swapd.sock]
"""

import argparse

from agent.ports.memory.lock import stay_in_memory
from agent.ports.network.root_helper import RootHelper, say
from agent.swap import kernel
from agent.swap.helper import SwapHelper
from covey.wire.swap_wire import HELPER_SOCKET


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("covey-swapd", description="The swap helper of a host: volumes as kernel swap.")
    parser.add_argument("--user", default="covey", help="who may ask it, beside root (%(default)s)")
    parser.add_argument("--socket", default=HELPER_SOCKET, metavar="PATH", help="where it listens (%(default)s)")
    return parser


def main() -> None:
    """Run until SIGTERM; swap that is on stays on. Exit status 2: it cannot run here."""
    options = arguments().parse_args()
    process = RootHelper("covey-swapd", options.user, "configure swap", "covey-swap")
    lacks = stay_in_memory(flushes=True)
    listener = process.listen(options.socket)
    try:
        kernel.load_module()
    except OSError as error:
        say(f"this kernel has no NBD: {error}")
    if lacks:
        say(f"swap will be refused: {lacks}")
    process.run(SwapHelper(process.uid, lacks, say).serve, listener)


if __name__ == "__main__":
    main()
