"""Shared mappings of files that keep no descriptor open. A mapping of `mmap.mmap` keeps one (until `trackfd` of Python
3.13), and closing it drops all POSIX locks that the process has on the file."""

import ctypes
import mmap
import os
import weakref
from typing import Any

_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_shared(descriptor: int, size: int, at: int, touch: bool = True) -> memoryview:
    """`size` bytes of the file from `at` on, a multiple of the page size: writable, and unmapped once nothing refers to
    them. `touch`: all pages are there from the beginning. OSError."""
    import numpy  # a supervisor, which maps nothing, does without it

    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if touch else 0)
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, at)
    if address in (None, _FAILED):
        raise OSError(ctypes.get_errno(), f"cannot map {size} bytes: {os.strerror(ctypes.get_errno())}")
    whole: Any = (ctypes.c_ubyte * size).from_address(address)  # numpy's releases differ in what they say it is
    weakref.finalize(whole, _libc.munmap, address, size).atexit = False
    found: memoryview = numpy.frombuffer(whole, numpy.uint8).data
    return found
