"""Load modules of a kernel whose files are not where modprobe looks: `python -m chaos.guest.modules FOLDER NAME...`."""

import ctypes
import os
import sys
from pathlib import Path

FINIT_MODULE = 313
"""The number of that system call on amd64."""


def load(path: Path) -> None:
    """OSError when the kernel refuses it."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.syscall(FINIT_MODULE, file, b"", 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{path}: {os.strerror(number)}")
    finally:
        os.close(file)


def main() -> None:
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        load(next(folder.rglob(f"{name}.ko")))


if __name__ == "__main__":
    main()
