"""Layout of the memory in which ranks of one host exchange tensors: one sealed memfd of a job, made by its agent.

    0          head: magic, version, how many ranks and the first of them, whether a rank refused, how many tensors,
               where free memory begins; behind it, for each rank, whether it has left (`covey.job.leaving`)
    BELLS      for each rank a row of words, one of each rank: another number whenever that one has news for this one
    DIRECTORY  for each tensor: key, state, where it lies
    behind it  tensors, each with its declaration, two words a rank, and room for data
    (`covey.tensors.same_host.shared_rounds`)

The file is as large as it can ever be, and empty: what is not allocated takes no memory. A rank adds a tensor under a
lock of the whole file, which the kernel takes back from a rank that dies.
"""

import fcntl
import os
import platform
import struct
from collections.abc import Mapping

from covey.kernel.memfd import F_ADD_SEALS, F_GET_SEALS, GROW, SHRINK

MAGIC, VERSION = b"COVEYten", 1
SIZE_BYTES = 1 << 40
PAGE_BYTES = 4096
RANKS_MAX = 128
"""More words than this nobody can sleep on at once (futex_waitv(2))."""
TENSORS_MAX = 8192
HEAD = struct.Struct("<8sIIIIQI")
REFUSED_AT, COUNT_AT, FREE_AT = 16, 20, 24
"""Offsets of fields of the head; the first of them is where it is in every version."""
ENTRY = struct.Struct("<IIQ")
FORMING, REFUSED = 1, 2
"""States of a tensor: whoever comes may join, or all go another way."""
BELLS_AT = PAGE_BYTES
LEFT_AT, LEFT, LEFT_BEFORE = 128, struct.Struct("<Q"), 2
"""Of each rank 8 bytes: 0, it has not left; 1, it has, and never said a step; else its newest step, and 2 more."""


def usable(environ: Mapping[str, str]) -> bool:
    """Whether a rank can share tensors in memory: on a processor that keeps the order of stores, and unless
    COVEY_SHARED_TENSORS is 0."""
    return platform.machine() == "x86_64" and environ.get("COVEY_SHARED_TENSORS") != "0"


def lends(environ: Mapping[str, str]) -> bool:
    """Whether other ranks may read what this one contributes where it lies: unless COVEY_SHARED_TENSORS is copy."""
    return environ.get("COVEY_SHARED_TENSORS") != "copy"


def row_bytes(ranks: int) -> int:
    """Of one rank's bells: whole cache lines."""
    return -(-4 * ranks // 64) * 64


def directory_at(ranks: int) -> int:
    return whole_pages(BELLS_AT + ranks * row_bytes(ranks))


def tensors_at(ranks: int) -> int:
    return whole_pages(directory_at(ranks) + TENSORS_MAX * ENTRY.size)


def whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def make(ranks: int, first: int = 0) -> int:
    """A descriptor of a new one, for so many ranks from `first` on. OSError when the kernel has none."""
    descriptor = os.memfd_create("covey-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, SIZE_BYTES)
        os.pwrite(descriptor, HEAD.pack(MAGIC, VERSION, ranks, 0, 0, tensors_at(ranks), first), 0)
        fcntl.fcntl(descriptor, F_ADD_SEALS, SHRINK | GROW)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def refuse(descriptor: int) -> None:
    """Nobody shares another tensor: for a rank that cannot use this memory, also of another version."""
    os.pwrite(descriptor, (1).to_bytes(4, "little"), REFUSED_AT)


def check(descriptor: int, rank: int, world_size: int) -> tuple[int, int]:
    """From the first rank for which it is up to, and without, the second. ValueError when this is no such memory for
    this rank of so many."""
    try:
        seals = fcntl.fcntl(descriptor, F_GET_SEALS)
        head = os.pread(descriptor, HEAD.size, 0)
    except OSError as error:
        raise ValueError(f"the descriptor is not sealed memory: {error}") from error
    if seals & (SHRINK | GROW) != SHRINK | GROW or os.fstat(descriptor).st_size != SIZE_BYTES:
        raise ValueError("the memory for tensors may change its size")
    if len(head) < HEAD.size:
        raise ValueError("the memory for tensors has no head")
    magic, version, ranks, _, _, _, first = HEAD.unpack(head)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"the memory for tensors has version {version}, not {VERSION}")
    if not first <= rank < first + ranks <= world_size or ranks > RANKS_MAX:
        theirs = f"{ranks} ranks from rank {first} on"
        raise ValueError(f"the memory for tensors is for {theirs}, not for rank {rank} of {world_size}")
    return first, first + ranks
