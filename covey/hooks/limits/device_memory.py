"""A memory limit on a GPU: the host memory that is ready, what PyTorch's allocator is told, what it then used. Pure.

The allocator (CUDACachingAllocator) takes segments from the device until all of them, including those of pools, have
`allowed` bytes. Then it looks for a free block in pools that exist for that (`use_on_oom`), and takes one only if it is
there already. So host memory is prepared between two mini-batches:

    wanted without a limit |#####################|
    limit                  |############|                     allowed = limit + pool
    moved by Covey                       |#####|               saved tensors, states of optimizers
    pool                                      |####|####|     the rest, and an eighth of what is wanted, or 512 MiB

(AntMan §3.1.1 places in host memory what does not fit, and grows the limit at the end of the mini-batch.)
"""

import math
from typing import NamedTuple

from covey.core.units import GIB, MIB

SEGMENT = 2 * MIB
"""Bytes to which PyTorch rounds large segments; allocations of up to 1 MiB are packed into segments of this size."""
PIECE_MIN = 16 * MIB
"""Least bytes of a piece: above what PyTorch packs into segments of its own size (10 MiB)."""
SMALL_SHARE, SMALL_MIN, SMALL_MAX = 64, 8, 512
"""Segments of a pool for tensors up to 1 MiB: one for this many segments of the pool, and least and most number."""
POOL_MIN = 512 * MIB
"""Least bytes of a pool when a limit is below what is wanted: one mini-batch may want more than those before it."""
UNKNOWN_MAX = 4 * GIB
"""Most bytes of a pool for a rank that was never seen without a limit."""


class Wanted(NamedTuple):
    """Bytes that a rank wants in one mini-batch."""

    allocated: int
    """Most bytes allocated without a limit; 0: not known."""
    moved: int = 0
    """Bytes of these that Covey itself moves to host memory under the limit."""


class Room(NamedTuple):
    """Bytes that exist."""

    device: int
    """All bytes of the device."""
    host: int
    """Bytes of host memory that are available now."""


def pool_bytes(wanted: Wanted, limit_bytes: int, room: Room) -> int:
    """Bytes of host memory that are ready under this limit: no more than half of what the host has, and few enough that
    the allocator is told of less than the whole device, which it would take for no limit."""
    if not wanted.allocated:
        least = min(max(limit_bytes // 4, POOL_MIN), UNKNOWN_MAX)
    else:
        over = wanted.allocated - limit_bytes
        least = 0 if over <= 0 else max(0, over - wanted.moved) + max(wanted.allocated // 8, POOL_MIN)
    most = min(room.device - limit_bytes - SEGMENT, room.host // 2)
    return max(0, min(least, most))


def pieces(nbytes: int, split_max: int = 0, powers: bool = False) -> tuple[int, ...]:
    """Sizes of blocks for `nbytes`: a single one, since each further block leaves an end that no tensor fits in. No
    blocks for 0. `split_max`: blocks of this size are not split (max_split_size_mb), and so cannot serve smaller
    tensors; 0: all are split. `powers`: the allocator rounds sizes other than powers of two
    (roundup_power2_divisions)."""
    if nbytes <= 0:
        return ()
    most = 1 << ((split_max - 1).bit_length() - 1) if split_max > PIECE_MIN else 0
    if most and nbytes > most:
        return (most,) * math.ceil(nbytes / most)
    whole = 1 << (nbytes - 1).bit_length() if powers or most else math.ceil(nbytes / SEGMENT) * SEGMENT
    return (max(PIECE_MIN, whole),)


def small_segments(nbytes: int) -> int:
    """Number of small segments beside pieces of `nbytes`."""
    return min(max(nbytes // (SMALL_SHARE * SEGMENT), SMALL_MIN), SMALL_MAX) if nbytes else 0


def to_prepare(have_bytes: int, need_bytes: int) -> int | None:
    """Bytes to prepare beside those that exist; None: all of them anew, since far too many exist."""
    if need_bytes and have_bytes <= 4 * need_bytes:
        return max(0, need_bytes - have_bytes)
    return None if have_bytes else need_bytes


def fraction(limit_bytes: int, pool_bytes: int, device_bytes: int) -> float:
    """The share of the device with which the allocator takes no more of it than the limit. Never 1.0, which is no limit
    at all: a pool that is too large leaves less of the device instead."""
    allowed = min(limit_bytes + pool_bytes, device_bytes - 1)
    found = max(allowed, 0) / device_bytes
    return found if int(found * device_bytes) >= allowed else math.nextafter(found, 1.0)


class Used(NamedTuple):
    """Bytes by the allocator's own figures since the last boundary."""

    allocated_peak: int
    reserved_peak: int
    allocated: int
    reserved: int
    pool: int
    """Bytes of host memory among `reserved`."""


def on_device(used: Used) -> int:
    """Bytes of the device that are held or cached now."""
    return max(0, used.reserved - used.pool)


def device_peak(used: Used) -> int:
    return max(on_device(used), used.reserved_peak - used.pool)


def spilled(used: Used) -> int:
    """A lower bound of the bytes placed in the pool: those allocated beyond all that was ever taken from the device."""
    return min(used.pool, max(0, used.allocated_peak - device_peak(used)))


def more_pool(used: Used, limit_bytes: int, room: Room) -> int:
    """Bytes by which the pool should grow for the next mini-batch: half of it, once over three quarters were used."""
    if not used.pool or spilled(used) <= used.pool * 3 // 4:
        return 0
    return max(0, min(used.pool // 2, room.device - limit_bytes - used.pool - SEGMENT, room.host // 2))


def temporaries(wanted: Wanted, counted_bytes: int) -> int:
    """Bytes that operators need and autograd does not save: they cannot be moved, so they get room first."""
    return max(0, wanted.allocated - counted_bytes) if wanted.allocated else 0
