"""`covey-swapd`: started as root by systemd (`systemd/covey-swap.service`), for the agent's user.

covey-swapd --user covey [--socket /run/covey-swap/swapd.sock]
"""

import argparse
import os
import pwd
import signal
import sys
import threading
from typing import NoReturn

from agent.ports.memory.lock import stay_in_memory
from agent.ports.network.unix_sockets import bind_unix
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
    try:
        owner = int(options.user) if options.user.isdecimal() else pwd.getpwnam(options.user).pw_uid
    except KeyError:
        _fail(f"there is no user {options.user}", "name the agent's user with --user")
    if os.geteuid() != 0:
        _fail("only root may configure swap", "systemctl start covey-swap")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    lacks = stay_in_memory(flushes=True)
    try:
        listener = bind_unix(options.socket, uid=owner)
    except OSError as error:
        _fail(f"cannot listen at {options.socket}: {error}", "check whether another covey-swapd is running")
    listener.setblocking(True)
    try:
        kernel.load_module()
    except OSError as error:
        _say(f"this kernel has no NBD: {error}")
    if lacks:
        _say(f"swap will be refused: {lacks}")
    helper = SwapHelper(owner, lacks, _say)
    threading.Thread(target=helper.serve, args=(listener,), daemon=True).start()
    _say(f"serves uid {owner} at {options.socket}")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    os.unlink(options.socket)


def _say(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass


def _fail(why: str, next: str) -> NoReturn:
    print(f"covey-swapd: {why}\nnext: {next}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
