"""`make elsewhere`: the same tree in another release of Debian, with that release's Python, systemd and kernel.

    python -m chaos.guest.elsewhere trixie                  the gate, hosts with wheels in /opt/covey, then the swap of
                                                            its kernel (User-Mode Linux)
    python -m chaos.guest.elsewhere trixie --run 'COMMAND'

    packages -> mmdebstrap -> .guest/elsewhere/trixie, made once; entered as the root of a mount namespace

The tree lies there under its own path, with an environment (.venv) and a folder for guests (.guest) of that release.
Exit status: that of the command; 2 when the root cannot be made here, and why.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from chaos.guest.image import NoGuest, root

NEEDED = {"mmdebstrap": "mmdebstrap", "unshare": "util-linux", "pivot_root": "util-linux"}
"""Program -> the Debian package that has it."""
PACKAGES = (
    *("python3", "python3-venv", "python3-dev", "build-essential", "git", "make", "ca-certificates"),
    *("systemd", "systemd-sysv", "dbus", "iproute2", "procps", "kmod", "util-linux", "attr"),
    *("fuse3", "fio", "nbdkit", "libnbd-bin", "qemu-utils", "redis-server"),
)
"""Packages that an operator's host has, and the clients of tests."""
RUN = "make check && .venv/bin/python -P tests/guest/installed_hosts.py && make swap ARGS='pages systemd'"
ENTER = """
set -e
mount --bind "$NEW" "$NEW"
mount -t proc proc "$NEW/proc"
mount --rbind /sys "$NEW/sys"
mount --rbind /dev "$NEW/dev"
cat /etc/resolv.conf > "$NEW/etc/resolv.conf" 2> /dev/null || true
if [ -d /etc/ssl/certs ]; then mount --bind /etc/ssl/certs "$NEW/etc/ssl/certs"; fi
mkdir -p "$NEW$TREE" "$NEW/old" "$NEW/own/venv" "$NEW/own/guest" "$TREE/.venv" "$TREE/.guest"
mount --bind "$TREE" "$NEW$TREE"
mount --bind "$NEW/own/venv" "$NEW$TREE/.venv"
mount --bind "$NEW/own/guest" "$NEW$TREE/.guest"
cd "$NEW"
pivot_root . old
umount -l /old
cd "$TREE"
exec sh -c "$RUN"
"""
"""Script that enters the other root, in a mount namespace of its own."""
HERE = ("PYENV", "PYTHON", "VIRTUAL_ENV", "MAKE", "MFLAGS")
"""Prefixes of variables that speak of this machine's Python, or of the make that runs this."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def made(suite: str) -> Path:
    """The folder with the root of that release; made if it does not exist. NoGuest says why it cannot be made."""
    folder = root() / ".guest" / "elsewhere" / suite
    if folder.exists():
        return folder
    packages = sorted({package for program, package in NEEDED.items() if shutil.which(program) is None})
    if packages:
        raise NoGuest(f"programs are missing; next: apt install --no-install-recommends {' '.join(packages)}")
    work = folder.with_suffix(".part")
    shutil.rmtree(work, ignore_errors=True)
    work.parent.mkdir(parents=True, exist_ok=True)
    print(f"elsewhere: Debian packages of {suite} ...", flush=True)
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, str(work)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(work, ignore_errors=True)
        raise NoGuest(f"{' '.join(command)} failed: {done.stderr.strip()[-600:]}")
    work.rename(folder)
    return folder


def run(suite: str, command: str) -> int:
    """Run a command in that release; returns its exit status. Raises NoGuest when there is no such root."""
    if os.geteuid() != 0:
        raise NoGuest("its root belongs to root; next: sudo make elsewhere")
    words = {"NEW": str(made(suite)), "TREE": str(root()), "RUN": command, "PATH": PATH, "HOME": "/root"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(HERE)}
    entered = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER]
    return subprocess.run(entered, env=inherited | words, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser("chaos.guest.elsewhere", description="The same tree in another Debian release.")
    parser.add_argument("suite", metavar="RELEASE", help="such as trixie")
    parser.add_argument("--run", default=RUN, help="a shell command (%(default)s)")
    options = parser.parse_args()
    try:
        sys.exit(run(options.suite, options.run))
    except NoGuest as why:
        print(f"elsewhere: {why}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
