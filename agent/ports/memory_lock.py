"""Memory that is not swapped out, and a process that does not wait for itself when memory is short.

A process behind a disk that others swap to must neither be swapped out itself (`mlockall(2)`) nor, when it needs
memory, wait for that disk to take pages (PR_SET_IO_FLUSHER, `prctl(2)`, Linux 5.6). Both are privileges.
"""

import ctypes
import os
import resource

MLOCK_ONFAULT = 1
MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT = 1, 2, 4
PR_SET_IO_FLUSHER = 57
CAP_IPC_LOCK, CAP_SYS_RESOURCE = 14, 24
NOT_ALLOWED = "without CAP_IPC_LOCK, or LimitMEMLOCK=infinity, it may be swapped out"
NO_FLUSHER = "without CAP_SYS_RESOURCE it is no IO_FLUSHER: short of memory, it may wait for itself"


def lock(view: memoryview, on_fault: bool) -> bool:
    """Whether it is locked, all of it now or each page from its first use on: a user without the right, or beyond
    RLIMIT_MEMLOCK, may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(view)))
    size = ctypes.c_size_t(len(view))
    if on_fault:
        return bool(libc.mlock2(address, size, MLOCK_ONFAULT) == 0)
    return bool(libc.mlock(address, size) == 0)


def stay_in_memory(flushes: bool) -> str:
    """`covey.ports.Probes.stay_in_memory`."""
    libc = ctypes.CDLL(None, use_errno=True)
    lacks: list[str] = []
    if not _may_lock_all():
        lacks.append(NOT_ALLOWED)
    elif libc.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) != 0:
        lacks.append(f"mlockall: {os.strerror(ctypes.get_errno())}")
    if flushes and libc.prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) != 0:
        lacks.append(NO_FLUSHER)
    return "; ".join(lacks)


def _may_lock_all() -> bool:
    """With less, every later request for memory would fail at the limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return soft == resource.RLIM_INFINITY or bool(_capabilities() >> CAP_IPC_LOCK & 1)


def _capabilities() -> int:
    """The effective ones of this process."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return next((int(line.split()[1], 16) for line in status if line.startswith("CapEff:")), 0)
    except OSError:
        return 0
