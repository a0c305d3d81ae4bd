"""Which bytes of an array's memory are there. An absent page must not be read through a mapping: that would make it,
full of zeros."""

import ctypes
import errno
import os

_CACHESTAT = 451
"""Number of the system call cachestat (Linux 6.5) on every architecture that has userfaultfd here."""
_libc = ctypes.CDLL(None, use_errno=True)


def is_whole(memory: int, start: int, size: int) -> bool:
    """Is every byte of these pages there? `start` and `size` are multiples of the machine's page. False also where the
    kernel does not count pages (before Linux 6.5): then `there` tells, whose search for a hole goes through all that is
    there behind `start`, 6 ms in an array of which 256 MiB are local."""
    asked, found = (ctypes.c_uint64 * 2)(start, size), (ctypes.c_uint64 * 5)()
    if _libc.syscall(_CACHESTAT, memory, asked, found, 0) != 0:
        return False
    in_memory, swapped_out = found[0], found[3]
    return bool((in_memory + swapped_out) * os.sysconf("SC_PAGESIZE") == size)


def there(memory: int, start: int, size: int) -> list[tuple[int, int]]:
    """First byte and end of each part that is there between `start` and `start + size`; `memory`: the memory's
    descriptor."""
    found: list[tuple[int, int]] = []
    at, end = start, start + size
    while at < end:
        try:
            at = os.lseek(memory, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        if at < end:
            hole = min(end, os.lseek(memory, at, os.SEEK_HOLE))
            found.append((at, hole))
            at = hole
    return found


def whole_pages(memory: int, start: int, size: int, page: int) -> list[tuple[int, int]]:
    """First byte and end of each run of the volume's pages that are there from end to end."""
    known = [(start, start + size)] if is_whole(memory, start, size) else there(memory, start, size)
    parts = ((-(-begin // page) * page, end // page * page) for begin, end in known)
    return [(begin, end) for begin, end in parts if begin < end]


def fill(memory: int, start: int, size: int, source: int) -> None:
    """Fill what is not there with the bytes at the address `source` in this process, byte for byte from `start` on.
    Only where no process has it mapped any more: one that touched it afterwards would cause no fault."""
    at = start
    for begin, end in [*there(memory, start, size), (start + size, start + size)]:
        if at < begin:
            os.pwrite(memory, ctypes.string_at(source + at - start, begin - at), at)
        at = end
