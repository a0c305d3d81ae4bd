"""Send bytes over a unix socket as the pages that hold them: the other end copies them once, and this end never.

A pipe holds pages (`vmsplice(2)`), and a socket takes them from there (`splice(2)`). No copy is made, so nobody may
write to the pages until the other end has read them, and their memory must not be used for anything else. (Pages that
are unmapped meanwhile still arrive.)
"""

import ctypes
import errno
import fcntl
import os

PIPE_BYTES = 1 << 20
"""Bytes of a pipe: the most that an unprivileged process may have."""
_PAGES, _NONBLOCK = 1, 2


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _vmsplice() -> "ctypes._NamedFuncPointer | None":
    try:
        found = ctypes.CDLL(None, use_errno=True).vmsplice
    except (OSError, AttributeError):
        return None  # no Linux
    found.argtypes = (ctypes.c_int, ctypes.POINTER(_Vector), ctypes.c_size_t, ctypes.c_uint)
    found.restype = ctypes.c_ssize_t
    return found if hasattr(os, "splice") else None


_give = _vmsplice()


class PagePipe:
    """A pipe that feeds one socket."""

    def __init__(self) -> None:
        """OSError where this system cannot give pages to sockets."""
        if _give is None:
            raise OSError(errno.ENOSYS, "this system cannot give pages to sockets")
        self._out, self._in = os.pipe()
        try:
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:
            pass  # this user has many pipes: it stays a small one

    def fill(self, view: memoryview) -> int:
        """Put the beginning of `view` into the empty pipe. Returns how many bytes it took, at least one. OSError."""
        from numpy import frombuffer, uint8  # processes that send nothing load this module too

        assert _give is not None
        here = frombuffer(view, uint8)
        count = int(_give(self._in, ctypes.byref(_Vector(here.ctypes.data, len(here))), _PAGES, _NONBLOCK))
        if count < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return count

    def drain(self, to: int, count: int, waits: bool) -> int:
        """Move at most `count` bytes to the socket `to`. Returns how many. BlockingIOError when it takes nothing
        now."""
        return os.splice(self._out, to, count, flags=0 if waits else _NONBLOCK)

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
