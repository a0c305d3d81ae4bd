"""Pages of 2 MiB under memory that is there: madvise(2) with MADV_COLLAPSE, from Linux 6.1 on.

Who reads the memory of another process pays for each page of it, and who adds pays for missing the processor's table
of them. The kernel copies the memory once, 0.3 ms for each MB; what lies there, and where, stays as it is.
"""

import ctypes

from covey.tensors.numbers.arrays import Array

HUGE_BYTES = 2 << 20
ENABLED = "/sys/kernel/mm/transparent_hugepage/enabled"
_COLLAPSE = 25
"""Not in Python 3.11's mmap."""
_libc = ctypes.CDLL(None, use_errno=True)


def make_huge(array: Array) -> bool:
    """Whether it lies on such pages now, but for less than one at each end. Again is cheap. False where the kernel
    cannot, has no memory for it, or its operator does not want such pages."""
    first = -(-array.ctypes.data // HUGE_BYTES) * HUGE_BYTES
    end = (array.ctypes.data + array.nbytes) // HUGE_BYTES * HUGE_BYTES
    if end <= first or not are_wanted():
        return False
    found: int = _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_int(_COLLAPSE))
    return found == 0


def are_wanted() -> bool:
    """Whether this host lets programs have such pages."""
    try:
        with open(ENABLED) as file:
            return "[never]" not in file.read()
    except OSError:
        return False
