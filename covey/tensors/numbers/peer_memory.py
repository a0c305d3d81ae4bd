"""Reading the memory of another rank on this host in place: process_vm_readv(2), which MPI libraries call CMA.

The kernel demands what it demands of a debugger: the same user, and a process that may be dumped. Where Yama restricts
debuggers to parents (`kernel.yama.ptrace_scope` of 1, as in Ubuntu), a rank lets others read it (PR_SET_PTRACER, as
long as it runs); with 2 and 3, in some containers and across their borders, reading is forbidden. A pid may mean
another process to another rank, so a rank shows the address of a few random bytes, and only a rank that finds them
there reads its memory.
"""

import ctypes
import errno
import os
import threading
from typing import Any, NamedTuple

import numpy as np

from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.pieces import PIECE

TOKEN_BYTES = 16
YAMA = "/proc/sys/kernel/yama/ptrace_scope"
PR_SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)


class Unreadable(OSError):
    """The memory of another process cannot be read."""

    place = -1
    """Place of the `LentArray` that could not be read."""


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


_ONE, _NO_FLAGS = ctypes.c_ulong(1), ctypes.c_ulong(0)
_libc = ctypes.CDLL(None, use_errno=True)
_read = _libc.process_vm_readv
_read.restype = ctypes.c_ssize_t
_token = np.frombuffer(os.urandom(TOKEN_BYTES), np.uint8).copy()
_of_thread = threading.local()


class Peer(NamedTuple):
    """Identity of another process, as it states it."""

    pid: int
    at: int
    """Address of its token."""
    token: bytes

    @property
    def is_there(self) -> bool:
        """Whether it is that process. Unreadable when it may not be read, or does not exist."""
        found = np.empty(TOKEN_BYTES, np.uint8)
        _Reading(self.pid, found).read(self.at, TOKEN_BYTES)
        return found.tobytes() == self.token


def myself() -> Peer:
    return Peer(os.getpid(), address_of(_token), _token.tobytes())


def address_of(array: Array) -> int:
    """Address of the array's first element, in this process."""
    address: int = array.ctypes.data
    return address


class _Reading:
    """One array that is filled from another process."""

    def __init__(self, pid: int, into: Array) -> None:
        self._pid = ctypes.c_int(pid)
        self._here, self._there = _Span(address_of(into), 0), _Span(0, 0)
        self._spans = ctypes.byref(self._here), ctypes.byref(self._there)

    def read(self, address: int, size: int) -> None:
        """Fill its first `size` bytes. Other threads of this process continue. Unreadable when not all can be read."""
        self._there.address = address
        self._here.size = self._there.size = size
        here, there = self._spans
        found = _read(self._pid, here, _ONE, there, _ONE, _NO_FLAGS)
        if found != size:
            code = ctypes.get_errno() if found < 0 else errno.EFAULT
            raise Unreadable(code, os.strerror(code))


def let_ranks_read() -> None:
    """Let other ranks read this process, where the kernel would allow only parents. A second call is harmless."""
    try:
        with open(YAMA) as file:
            scope = file.read().strip()
    except OSError:
        return  # there is no Yama
    if scope == "1":
        _libc.prctl(PR_SET_PTRACER, ANY, 0, 0, 0)


class LentArray:
    """A flat array of another rank. A slice is read when it is asked for, by the thread that made this object, into
    memory that the next slice with the same `place` uses too."""

    def __init__(self, pid: int, address: int, type: np.dtype[Any], place: int) -> None:
        spare: dict[tuple[str, int], Array] = _of_thread.__dict__.setdefault("spare", {})
        if (type.name, place) not in spare:
            spare[type.name, place] = np.empty(PIECE, type)
        self._into = spare[type.name, place]
        self._address, self._itemsize, self._place = address, type.itemsize, place
        self._reading = _Reading(pid, self._into)

    def __getitem__(self, here: slice) -> Array:
        """At most `PIECE` elements of the array. Unreadable."""
        count = here.stop - here.start
        if count > PIECE:
            raise ValueError(f"{count} elements at once, {PIECE} is the most")
        try:
            self._reading.read(self._address + here.start * self._itemsize, count * self._itemsize)
        except Unreadable as error:
            error.place = self._place
            raise
        return self._into[:count]
