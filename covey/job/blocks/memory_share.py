"""How much memory of a host one process of a job may use for data Blocks (Harmony §4.3.3). Pure.

    `submit --mem`  =  Blocks of its processes there  +  what each of them needs beside Blocks

What a process needs beside Blocks is measured: the most that it had resident, less its Blocks, arrays of its state at
least. It never falls, so that what happened once may happen again within the limit. Without a limit, Blocks of all
processes of the job take a part of what the host has available.
"""

import msgspec

from covey.wire.job import HostMemory

AVAILABLE_PART = 4
"""The part of the memory that a host has available which spilling Blocks of a job take there unless somebody says more:
one fourth (chosen: other jobs, and what the script itself needs, have the rest)."""
BLOCKS_AROUND = 4
"""Blocks in memory beside those that are kept there: the one in use, the one before, which the script's variable still
names, the next, and the one that `load` makes."""


class BesideBlocks(msgspec.Struct, frozen=True):
    """What a process has needed beside its data Blocks, as it was measured so far."""

    bytes: int = 0
    """The most resident memory beside Blocks."""
    peak_bytes: int = 0
    """The most resident memory at all, as the kernel said last."""


def seen(before: BesideBlocks, resident_bytes: int, peak_bytes: int, blocks_bytes: int) -> BesideBlocks:
    """What was needed, with another measurement. A peak that is new was above what can be seen now, beside the same
    Blocks: nobody knows how many there were at that moment, and fewer were not there for long."""
    is_new = bool(before.peak_bytes) and peak_bytes > before.peak_bytes
    most = peak_bytes if is_new else resident_bytes
    return BesideBlocks(max(before.bytes, most - blocks_bytes), max(before.peak_bytes, peak_bytes))


def share_bytes(on_host: HostMemory, beside_bytes: int, available_bytes: int) -> int:
    """Bytes of Blocks that one process may have in memory. `beside_bytes`: what it needs beside Blocks; a process that
    has not said what it needs counts like this one. `available_bytes`: memory that the host had available before there
    were Blocks, for a job without a limit."""
    processes = max(1, on_host.processes)
    if not on_host.limit_bytes:
        return max(0, available_bytes) // AVAILABLE_PART // processes
    silent = max(0, processes - 1 - on_host.others)
    left = on_host.limit_bytes - beside_bytes * (1 + silent) - on_host.others_bytes
    return max(0, left) // processes


def kept_bytes(share_bytes: int, largest_bytes: int) -> int:
    """Bytes of Blocks that stay in memory, so that with those around them (`BLOCKS_AROUND`) the share is not
    exceeded. `largest_bytes`: of the largest Block."""
    return max(0, share_bytes - BLOCKS_AROUND * largest_bytes)
