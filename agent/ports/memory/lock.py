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
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_BYTES_MAX = 32 << 20
"""The largest mmap threshold that glibc takes, bytes."""
KEPT_BYTES = 64 << 20
"""Bytes of freed memory that are kept when none is taken ahead: what one connection of a volume may have under way."""
HEAP_BLOCK_BYTES = 64 << 10
NOT_ALLOWED = "without CAP_IPC_LOCK, or LimitMEMLOCK=infinity, it may be swapped out"
NO_FLUSHER = "without CAP_SYS_RESOURCE it is no IO_FLUSHER: short of memory, it may wait for itself"


def lock(view: memoryview, on_fault: bool) -> bool:
    """Lock memory, all of it now or each page from its first use on. Whether it is locked: a user without the right, or
    beyond RLIMIT_MEMLOCK, may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(view)))
    size = ctypes.c_size_t(len(view))
    if on_fault:
        return bool(libc.mlock2(address, size, MLOCK_ONFAULT) == 0)
    return bool(libc.mlock(address, size) == 0)


def unlock(view: memoryview) -> None:
    """Unlock memory. Idempotent."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.munlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(view))), ctypes.c_size_t(len(view)))


def stay_in_memory(flushes: bool) -> str:
    """Do `covey.ports.probes.Probes.stay_in_memory`."""
    libc = ctypes.CDLL(None, use_errno=True)
    lacks: list[str] = []
    if not _may_lock_all():
        lacks.append(NOT_ALLOWED)
    elif libc.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) != 0:
        lacks.append(f"mlockall: {os.strerror(ctypes.get_errno())}")
    if flushes and libc.prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) != 0:
        lacks.append(NO_FLUSHER)
    return "; ".join(lacks)


def keep_heap(size_bytes: int) -> str:
    """Do `covey.ports.probes.Probes.keep_heap`. From now on blocks up to 32 MiB come from the heap, and what is freed
    stays in it; where the process is locked, it stays in memory. glibc gives the kernel most of it back otherwise, and
    a request of 1 MiB costs 256 faults for pages of zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    most = (1 << 31) - 1 if size_bytes else KEPT_BYTES
    try:
        kept = libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES_MAX) and libc.mallopt(M_TRIM_THRESHOLD, most)
    except AttributeError:
        kept = 0
    if not kept:
        return "this C library gives freed memory back to the kernel"
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.restype, libc.free.argtypes = None, (ctypes.c_void_p,)
    blocks = [libc.malloc(HEAP_BLOCK_BYTES) for _ in range(-(-size_bytes // HEAP_BLOCK_BYTES))]
    for block in blocks:
        if block:
            ctypes.memset(block, 0, HEAP_BLOCK_BYTES)
    for block in blocks:
        libc.free(block)
    return "" if all(blocks) else f"there are no {size_bytes} bytes of memory for it"


def _may_lock_all() -> bool:
    """Whether this process may lock all memory: with less, every later request for memory would fail at the limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return soft == resource.RLIM_INFINITY or bool(_capabilities() >> CAP_IPC_LOCK & 1)


def _capabilities() -> int:
    """The effective capabilities of this process."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return next((int(line.split()[1], 16) for line in status if line.startswith("CapEff:")), 0)
    except OSError:
        return 0
