"""Page faults that another process answers: Linux' userfaultfd over a memfd, by ioctl (`ioctl_userfaultfd(2)`).

    a thread touches a page that is not there  -> it waits, and a `Fault` can be read from the descriptor
    `copy`                                      -> the page is there, write-protected or not; the thread continues
    a thread writes to a protected page         -> it waits, and a `Fault` with `write` can be read
    `protect(..., False)`                       -> it may be written; the thread continues

Another process must answer: numpy touches memory while it holds the interpreter's lock. Missing and write-protected
pages of shared memory need Linux 5.19.
"""

import ctypes
import errno
import fcntl
import os
import platform
import struct
from collections.abc import Iterator
from typing import NamedTuple

PAGE_BYTES = 4096
_SYSCALLS = {"x86_64": 323, "aarch64": 282, "riscv64": 282}
_USER_MODE_ONLY = 1
_IOC_NEW = 0xAA00
_API_VERSION = 0xAA
_MISSING, _PROTECT = 1, 2
_FEATURE_WP, _FEATURE_MISSING_SHMEM, _FEATURE_WP_SHMEM, _FEATURE_POISON = 1 << 0, 1 << 5, 1 << 12, 1 << 14
_NEEDED = _FEATURE_WP | _FEATURE_MISSING_SHMEM | _FEATURE_WP_SHMEM
_COPY_PROTECTED = 2
_EVENT_PAGEFAULT = 0x12
_FLAG_WRITE, _FLAG_PROTECTED = 1, 2
_DEVICE = "/dev/userfaultfd"

_api = struct.Struct("=QQQ")
_register = struct.Struct("=QQQQ")
_range = struct.Struct("=QQ")
_copy = struct.Struct("=QQQQq")
_protect = struct.Struct("=QQQ")
_poison = struct.Struct("=QQQq")
_message = struct.Struct("=B7xQQ8x")
MESSAGE_BYTES = _message.size


def _number(direction: int, number: int, size: int) -> int:
    return direction << 30 | size << 16 | 0xAA << 8 | number


API = _number(3, 0x3F, _api.size)
REGISTER = _number(3, 0x00, _register.size)
UNREGISTER = _number(2, 0x01, _range.size)
WAKE = _number(2, 0x02, _range.size)
COPY = _number(3, 0x03, _copy.size)
WRITEPROTECT = _number(3, 0x06, _protect.size)
POISON = _number(3, 0x08, _poison.size)


class Fault(NamedTuple):
    address: int
    write: bool


class OwnFaults(NamedTuple):
    """A new userfaultfd descriptor, which the caller closes."""

    descriptor: int
    user_mode_only: bool
    """Whether system calls that read or write a page that is not there fail with EFAULT; other accesses wait."""


def opened() -> OwnFaults:
    """A userfaultfd of this process, with full rights where they are given: to root, by CAP_SYS_PTRACE, by
    /dev/userfaultfd, or by `vm.unprivileged_userfaultfd=1`. OSError says why this kernel gives none."""
    flags = os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return OwnFaults(_checked(_by_system_call(flags)), False)
    except PermissionError:
        pass
    try:
        return OwnFaults(_checked(_by_device(flags)), False)
    except (FileNotFoundError, PermissionError):
        return OwnFaults(_checked(_by_system_call(flags | _USER_MODE_ONLY)), True)


def _by_system_call(flags: int) -> int:
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"userfaultfd is not known here on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.syscall(number, flags))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), f"userfaultfd: {os.strerror(ctypes.get_errno())}")
    return descriptor


def _by_device(flags: int) -> int:
    device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        return fcntl.ioctl(device, _IOC_NEW, flags)
    finally:
        os.close(device)


def _checked(descriptor: int) -> int:
    """The descriptor, after the kernel said that it can do all that is needed; otherwise it is closed. OSError."""
    try:
        try:
            fcntl.ioctl(descriptor, API, bytearray(_api.pack(_API_VERSION, _NEEDED | _FEATURE_POISON, 0)))
        except OSError:  # before Linux 6.6: memory cannot be poisoned
            fcntl.ioctl(descriptor, API, bytearray(_api.pack(_API_VERSION, _NEEDED, 0)))
    except OSError as error:
        os.close(descriptor)
        why = "this kernel cannot write-protect shared memory (Linux 5.19 or newer can)"
        raise OSError(error.errno, why) from error
    return descriptor


def is_one(descriptor: int) -> bool:
    """Whether this descriptor, which another process gave, is a userfaultfd."""
    return os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[userfaultfd]"


def register(descriptor: int, address: int, size: int) -> None:
    """From now on faults of this memory of this process are read from the descriptor. OSError."""
    fcntl.ioctl(descriptor, REGISTER, bytearray(_register.pack(address, size, _MISSING | _PROTECT, 0)))


def faults(descriptor: int, most: int = 64) -> Iterator[Fault]:
    """Faults that wait and were not read before. BlockingIOError when there are none."""
    data = os.read(descriptor, MESSAGE_BYTES * most)
    for event, flags, address in _message.iter_unpack(data):
        if event == _EVENT_PAGEFAULT:
            yield Fault(address, bool(flags & (_FLAG_WRITE | _FLAG_PROTECTED)))


def copy(descriptor: int, address: int, source: int, size: int, protected: bool) -> None:
    """Fill pages of the other process with a copy of this process's memory at `source`; pages that are there already
    stay unchanged. Threads that wait for them continue. OSError: ENOENT when its memory is gone, ESRCH when the process
    is."""
    mode = _COPY_PROTECTED if protected else 0
    done = 0
    while done < size:
        asked = bytearray(_copy.pack(address + done, source + done, size - done, mode, 0))
        try:
            fcntl.ioctl(descriptor, COPY, asked)
            return
        except OSError as error:
            done += max(0, _copy.unpack(asked)[4])
            if error.errno == errno.EEXIST:
                wake(descriptor, address + done, PAGE_BYTES)
                done += PAGE_BYTES
            elif error.errno != errno.EAGAIN:
                raise


def protect(descriptor: int, address: int, size: int, on: bool) -> None:
    """From now on writes to these pages cause faults; with `on` False they do not, and waiting threads continue."""
    while True:
        try:
            fcntl.ioctl(descriptor, WRITEPROTECT, bytearray(_protect.pack(address, size, 1 if on else 0)))
            return
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise


def wake(descriptor: int, address: int, size: int) -> None:
    """Threads that wait for these pages try again."""
    fcntl.ioctl(descriptor, WAKE, bytearray(_range.pack(address, size)))


def poison(descriptor: int, address: int, size: int) -> None:
    """Touching a page that is not there is now a SIGBUS, in a system call EFAULT. OSError before Linux 6.6."""
    fcntl.ioctl(descriptor, POISON, bytearray(_poison.pack(address, size, 0, 0)))
