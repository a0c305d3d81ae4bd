"""A kernel of its own without a virtual machine: User-Mode Linux of Debian's package, with this machine's root.

    apt-get download user-mode-linux -> .guest/uml: linux.uml and its modules -> a process whose init is `uml.sh`

It has one processor, cgroups of version 2, swap and NBD. Whatever it writes outside the file systems that `uml.sh` puts
over /run and /var/tmp is written here.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from chaos.guest.boot import follow
from chaos.guest.image import NoGuest, root

MEMORY_MB = 3072
NEEDED = {"apt-get": "apt", "dpkg-deb": "dpkg"}
PACKAGE = "user-mode-linux"


def kept() -> Path:
    return root() / ".guest" / "uml"


def made() -> Path:
    """The directory with `usr/bin/linux.uml`; made if it does not exist. NoGuest says why it cannot be made."""
    folder = kept()
    if (folder / "usr/bin/linux.uml").exists():
        return folder
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise NoGuest(f"the package {PACKAGE} is for amd64; this machine is {os.uname().machine}")
    missing = [package for program, package in NEEDED.items() if shutil.which(program) is None]
    if missing:
        raise NoGuest(f"it is taken from a Debian package with {' and '.join(missing)}, which are not here")
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        for command in (["apt-get", "download", "-qq", PACKAGE], ["sh", "-c", "dpkg-deb -x *.deb tree"]):
            done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NoGuest(f"{' '.join(command)} failed: {done.stderr.strip()[-600:]}")
        os.rename(Path(work) / "tree", folder)
    return folder


def run(script: str, within_s: float) -> int:
    """Run a script in a guest of its own, in this directory; returns its exit status. Raises NoGuest when the guest
    ended without one."""
    folder = made()
    if os.geteuid() != 0:
        raise NoGuest("its root is this machine's, whose files belong to root; next: sudo make swap")
    with tempfile.TemporaryDirectory(prefix="covey-uml") as work:
        init = Path(work) / "init"
        words = {
            "COVEY_ROOT": str(root()),
            "COVEY_MODULES": str(next((folder / "usr/lib/uml/modules").iterdir())),
            "COVEY_PYTHON": sys.executable,
            "COVEY_PATH": os.environ["PATH"],
        }
        lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in words.items())
        text = (Path(__file__).parent / "uml.sh").read_text().replace("@WORDS@", lines).replace("@SCRIPT@", script)
        init.write_text(text)
        init.chmod(0o755)
        command = [
            str(folder / "usr/bin/linux.uml"), f"mem={MEMORY_MB}M", "root=/dev/root", "rootfstype=hostfs",
            "rootflags=/", "rw", f"init={init}", "con=null", "con0=null,fd:1", "quiet", f"umid=covey{os.getpid()}",
            f"uml_dir={work}/",
        ]  # fmt: skip
        return follow(command, within_s)
