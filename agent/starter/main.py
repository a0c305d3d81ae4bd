"""`covey-starter`: started as root by systemd (`systemd/covey-starter.service`), for the agent's user.

covey-starter --user covey [--folder /var/lib/covey-jobs] [--uid-min 1000] [--allow NAME]...
"""

import argparse
import os
import tempfile
from pathlib import Path

from agent.ports.network.root_helper import RootHelper, say
from agent.ports.starter.slices import GROUPS
from agent.ports.starter.starter_wire import FOLDER, SOCKET
from agent.starter.accounts import UID_MIN, Rules
from agent.starter.folders import JobFolders
from agent.starter.groups import ControlGroups, usable
from agent.starter.helper import Starter
from agent.starter.sessions import Sessions
from agent.starter.units import Launcher, Units

BOOTED = Path("/run/systemd/system")
"""Where systemd is the first process, this folder exists (sd_booted(3))."""


def launcher(run_dir: str, booted: Path = BOOTED, groups: Path = GROUPS) -> Launcher:
    """How this host starts programs. `run_dir`: a folder that root alone may read."""
    if booted.is_dir():
        return Units(run_dir)
    return ControlGroups(root=groups) if usable(groups) else Sessions()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("covey-starter", description="Starts jobs as the users whose jobs they are.")
    parser.add_argument("--user", default="covey", help="the agent's user: nobody else may ask (%(default)s)")
    parser.add_argument("--folder", default=FOLDER, metavar="PATH", help="the folder of the jobs' files (%(default)s)")
    parser.add_argument("--uid-min", type=int, default=UID_MIN, metavar="UID", help="the first uid that may have jobs")
    parser.add_argument("--allow", action="append", default=[], metavar="NAME", help="a user below that who may, too")
    return parser


def _own(units: Launcher) -> str:
    return {Units: "units", ControlGroups: "control groups"}.get(type(units), "sessions")


def main() -> None:
    """Run until SIGTERM; jobs keep running. Exit status 2: it cannot run here."""
    options = arguments().parse_args()
    process = RootHelper("covey-starter", options.user, "start jobs as other users", "covey-starter")
    folder = os.path.abspath(options.folder)
    folders = JobFolders(folder, process.uid)
    try:
        folders.set_up()
    except OSError as error:
        process.fail(f"cannot use {folder}: {error}", "a folder of root's on a file system with access lists: --folder")
    listener = process.listen(os.path.join(folder, SOCKET))
    run_dir = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0] or tempfile.mkdtemp(prefix="covey-starter-")
    units = launcher(run_dir)
    rules = Rules(process.uid, options.uid_min, frozenset(options.allow))
    starter = Starter(rules, folders, units, say)
    process.run(starter.serve, listener, f"; jobs have {_own(units)} of their own")
