"""Sleep until a word of shared memory changes, and wake who sleeps on it: the flag of `covey.pages`, from Python.

`gate.cpp` does the same. Where the system call's number is not known (neither x86-64 nor ARM64) sleepers sleep their
time out.
"""

import ctypes
import platform
import time
from typing import Any

import numpy

WAIT, WAKE = 0, 1
ALL = 1 << 20
NUMBER = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
"""Of the system call futex(2); None: not known."""


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long


class SharedWord:
    """Four bytes at `at` of a page, which stays mapped as long as this is held. Other threads of this process go on
    while one sleeps."""

    def __init__(self, page: Any, at: int) -> None:
        self._whole, self._at = numpy.frombuffer(page, numpy.uint8), at
        self._address = ctypes.c_void_p(self._whole.ctypes.data + at)

    @property
    def value(self) -> int:
        return int.from_bytes(self._whole[self._at : self._at + 4].tobytes(), "little")

    def sleep(self, value: int, length_ns: int) -> None:
        """While the word is `value`, at most so long."""
        if NUMBER is None:
            time.sleep(length_ns / 1_000_000_000)
            return
        until = _Time(*divmod(max(0, length_ns), 1_000_000_000))
        _syscall(NUMBER, self._address, WAIT, ctypes.c_uint32(value), ctypes.byref(until), None, 0)

    def wake(self) -> None:
        """Everybody who sleeps on it."""
        if NUMBER is not None:
            _syscall(NUMBER, self._address, WAKE, ALL, None, None, 0)
