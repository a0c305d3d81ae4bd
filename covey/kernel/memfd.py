"""Sealed memory for the pages of `covey.kernel.pages`: a memfd that can neither shrink nor grow, and that no other
process can open for writing once its writer has mapped it, not even by /proc/PID/fd (F_SEAL_FUTURE_WRITE, Linux
5.1)."""

import fcntl
import mmap
import os

from covey.kernel.pages import PAGE_BYTES

F_ADD_SEALS, F_GET_SEALS = 1033, 1034
SEAL, SHRINK, GROW, FUTURE_WRITE = 1, 2, 4, 16
"""Seals from linux/fcntl.h; Python 3.11 does not name all of them."""


def make(kind: str) -> int:
    """The descriptor of a new page of zeros whose size is fixed. OSError when the kernel has no memory for it."""
    descriptor = os.memfd_create(f"covey-{kind}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, PAGE_BYTES)
        fcntl.fcntl(descriptor, F_ADD_SEALS, SHRINK | GROW)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def writable(descriptor: int) -> mmap.mmap:
    """The page for its one writer. OSError when somebody sealed it, ValueError when it is not such a page."""
    _check_shape(descriptor)
    return mmap.mmap(descriptor, PAGE_BYTES)


def close_for_writers(descriptor: int) -> None:
    """From now on no other process can write the page, neither by this descriptor nor by opening it again. Existing
    mappings stay writable."""
    fcntl.fcntl(descriptor, F_ADD_SEALS, SEAL | FUTURE_WRITE)


def readable(descriptor: int, sealed: bool = True) -> mmap.mmap:
    """The page for a reader. ValueError when it does not have the shape of a page, or (`sealed`) another writer could
    still open it."""
    _check_shape(descriptor, SEAL | FUTURE_WRITE if sealed else 0)
    return mmap.mmap(descriptor, PAGE_BYTES, prot=mmap.PROT_READ)


def _check_shape(descriptor: int, more: int = 0) -> None:
    try:
        seals = fcntl.fcntl(descriptor, F_GET_SEALS)
    except OSError as error:
        raise ValueError(f"the descriptor is not sealed memory: {error}") from error
    wanted = SHRINK | GROW | more
    if seals & wanted != wanted or os.fstat(descriptor).st_size != PAGE_BYTES:
        raise ValueError(f"the page has {os.fstat(descriptor).st_size} bytes and seals {seals:#x}, not {wanted:#x}")
