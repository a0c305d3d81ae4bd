"""Sleep until a word of shared memory changes, or wake its sleepers: the flag of `covey.kernel.pages`, from Python.

`gate.cpp` does the same. Where the system call's number is not known (neither x86-64 nor ARM64), sleepers sleep their
whole time.
"""

import ctypes
import errno
import platform
import time
from typing import Any

import numpy

WAIT, WAKE = 0, 1
WAIT_ANY, WORD_32 = 449, 2
"""futex_waitv(2), from Linux 5.16 on, has one number on all machines."""
POLL_NS = 500_000
"""Longest sleep in ns where futex_waitv(2) does not exist: words are polled that often."""
ALL = 1 << 20
NUMBER = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
"""Number of the system call futex(2) on this machine; None: not known."""


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


_WAITS = numpy.dtype([("value", "<u8"), ("address", "<u8"), ("flags", "<u4"), ("reserved", "<u4")])
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


class SharedWord:
    """Four bytes at `at` of a page, which stays mapped as long as this object exists. Other threads of this process
    keep running while one sleeps."""

    def __init__(self, page: Any, at: int) -> None:
        self._whole, self._at = numpy.frombuffer(page, numpy.uint8), at
        self._address = ctypes.c_void_p(self._whole.ctypes.data + at)

    @property
    def value(self) -> int:
        return int.from_bytes(self._whole[self._at : self._at + 4].tobytes(), "little")

    def sleep(self, value: int, length_ns: int) -> None:
        """Sleep while the word is `value`, at most `length_ns`."""
        if NUMBER is None:
            time.sleep(length_ns / 1_000_000_000)
            return
        until = _Time(*divmod(max(0, length_ns), 1_000_000_000))
        _syscall(NUMBER, self._address, WAIT, ctypes.c_uint32(value), ctypes.byref(until), None, 0)

    def wake(self) -> None:
        """Wake everybody who sleeps on the word."""
        if NUMBER is not None:
            _syscall(NUMBER, self._address, WAKE, ALL, None, None, 0)


class SharedWords:
    """`count` words of four bytes in a row at `at` of a page, each written by one process; at most 128."""

    def __init__(self, page: Any, at: int, count: int) -> None:
        self._words = numpy.frombuffer(page, numpy.uint32, count, at)
        self._waits = numpy.zeros(count, _WAITS)
        self._waits["address"] = self._words.ctypes.data + 4 * numpy.arange(count)
        self._waits["flags"] = WORD_32
        self._addresses = [ctypes.c_void_p(int(address)) for address in self._waits["address"]]

    @property
    def values(self) -> Any:
        """A copy of all words now. Read it before you look for what the words announce."""
        return self._words.copy()

    def ring(self, index: int) -> None:
        """Change this word and wake whoever sleeps on it. Only its one writer calls this, one thread at a time."""
        self._words[index] = (int(self._words[index]) + 1) & 0xFFFFFFFF
        if NUMBER is not None:
            _syscall(NUMBER, self._addresses[index], WAKE, ALL, None, None, 0)

    def sleep(self, values: Any, length_ns: int) -> None:
        """Sleep while all words are as in `values`, at most `length_ns`."""
        waits = self._waits.copy()
        waits["value"] = values
        until = _Time(*divmod(time.monotonic_ns() + length_ns, 1_000_000_000))
        where = ctypes.c_void_p(waits.ctypes.data)
        woken = _syscall(WAIT_ANY, where, len(waits), 0, ctypes.byref(until), time.CLOCK_MONOTONIC) >= 0
        if not woken and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            time.sleep(min(length_ns, POLL_NS) / 1_000_000_000)
