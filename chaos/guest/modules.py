"""Load modules of a kernel whose files are not where modprobe looks: `python -m chaos.guest.modules FOLDER NAME...`."""

import ctypes
import errno
import os
import sys
from pathlib import Path

FINIT_MODULE = 313
"""Number of that system call on amd64."""


def load(path: Path) -> None:
    """Load a module. Raises OSError when the kernel refuses it; one that is loaded already is fine."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.syscall(FINIT_MODULE, file, b"", 0) != 0 and ctypes.get_errno() != errno.EEXIST:
            number = ctypes.get_errno()
            raise OSError(number, f"{path}: {os.strerror(number)}")
    finally:
        os.close(file)


def needed(folder: Path, name: str) -> list[Path]:
    """The files of a module and of all that it needs, in the order in which they are loaded."""
    for line in (folder / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        if Path(path).stem == name:
            return [folder / each for each in (*reversed(others.split()), path)]
    raise FileNotFoundError(errno.ENOENT, f"no module {name}", str(folder))


def main() -> None:
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        for path in needed(folder, name):
            load(path)


if __name__ == "__main__":
    main()
