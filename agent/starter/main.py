"""`covey-starter`: started as root by systemd (`systemd/covey-starter.service`), for the agent's user.

covey-starter --user covey [--folder /var/lib/covey-jobs] [--uid-min 1000] [--allow NAME]...
"""

import argparse
import os
import pwd
import signal
import sys
import tempfile
import threading
from typing import NoReturn

from agent.ports.network.unix_sockets import bind_unix
from agent.ports.starter.starter_wire import FOLDER, SOCKET
from agent.starter.accounts import UID_MIN, Rules
from agent.starter.folders import JobFolders
from agent.starter.helper import Starter
from agent.starter.units import launcher


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("covey-starter", description="Starts jobs as the users whose jobs they are.")
    parser.add_argument("--user", default="covey", help="the agent's user: nobody else may ask (%(default)s)")
    parser.add_argument("--folder", default=FOLDER, metavar="PATH", help="the folder of the jobs' files (%(default)s)")
    parser.add_argument("--uid-min", type=int, default=UID_MIN, metavar="UID", help="the first uid that may have jobs")
    parser.add_argument("--allow", action="append", default=[], metavar="NAME", help="a user below that who may, too")
    return parser


def main() -> None:
    """Run until SIGTERM; jobs keep running. Exit status 2: it cannot run here."""
    options = arguments().parse_args()
    try:
        uid = int(options.user) if options.user.isdecimal() else pwd.getpwnam(options.user).pw_uid
    except KeyError:
        _fail(f"there is no user {options.user}", "name the agent's user with --user")
    if os.geteuid() != 0:
        _fail("only root may start jobs as other users", "systemctl start covey-starter")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    folder = os.path.abspath(options.folder)
    folders = JobFolders(folder, uid)
    path = os.path.join(folder, SOCKET)
    try:
        folders.set_up()
        listener = bind_unix(path, uid=uid)
    except OSError as error:
        _fail(f"cannot listen at {path}: {error}", "check whether another covey-starter is running")
    listener.setblocking(True)
    run_dir = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0] or tempfile.mkdtemp(prefix="covey-starter-")
    units = launcher(run_dir)
    rules = Rules(uid, options.uid_min, frozenset(options.allow))
    starter = Starter(rules, folders, units, _say)
    threading.Thread(target=starter.serve, args=(listener,), daemon=True).start()
    _say(f"serves uid {uid} at {path}; jobs have {'units' if units.enforces else 'sessions'} of their own")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    os.unlink(path)


def _say(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass


def _fail(why: str, next: str) -> NoReturn:
    print(f"covey-starter: {why}\nnext: {next}", file=sys.stderr)
    sys.exit(2)
