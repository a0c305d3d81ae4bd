"""Layout of the memory in which ranks of one host exchange tensors: one sealed memfd of a job, made by its agent.

    0          head: magic, version, how many ranks and the first of them, whether a rank refused, how many tensors,
               where free memory begins; behind it, for each rank, whether it has left (`covey.tensors.owner.leaving`)
    BELLS      for each rank a row of words, one for each rank: it changes whenever that rank has news for this one
    DIRECTORY  for each tensor: key, state, where it is
    behind it  tensors, each with its declaration, two words for each rank, and room for data
               (`covey.tensors.same_host.shared_rounds`)

The file has its greatest possible size, and is empty: what is not allocated takes no memory. A rank adds a tensor under
a lock of the whole file, which the kernel takes back from a rank that dies.
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
"""Most ranks: a process cannot sleep on more words at once (futex_waitv(2))."""
TENSORS_MAX = 8192
HEAD = struct.Struct("<8sIIIIQI")
REFUSED_AT, COUNT_AT, FREE_AT = 16, 20, 24
"""Offsets of fields of the head; `REFUSED_AT` is the same in every version."""
ENTRY = struct.Struct("<IIQ")
FORMING, REFUSED = 1, 2
"""States of a tensor: ranks may still join it, or all of them use an aggregator for it."""
BELLS_AT = PAGE_BYTES
LEFT_AT, LEFT, LEFT_BEFORE = 128, struct.Struct("<Q"), 2
"""Eight bytes for each rank: 0, it has not left; 1, it left without reporting a step; else its newest step + 2."""


def usable(environ: Mapping[str, str]) -> bool:
    """Whether a rank can share tensors in memory: it needs a processor that keeps the order of stores, and
    COVEY_SHARED_TENSORS must not be 0."""
    return platform.machine() == "x86_64" and environ.get("COVEY_SHARED_TENSORS") != "0"


def lends(environ: Mapping[str, str]) -> bool:
    """Whether other ranks may read this rank's contributions in place: yes, unless COVEY_SHARED_TENSORS is copy."""
    return environ.get("COVEY_SHARED_TENSORS") != "copy"


def row_bytes(ranks: int) -> int:
    """Bytes of one rank's row of bells, in whole cache lines."""
    return -(-4 * ranks // 64) * 64


def directory_at(ranks: int) -> int:
    return whole_pages(BELLS_AT + ranks * row_bytes(ranks))


def tensors_at(ranks: int) -> int:
    return whole_pages(directory_at(ranks) + TENSORS_MAX * ENTRY.size)


def whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def make(ranks: int, first: int = 0) -> int:
    """The descriptor of new memory for so many ranks from `first` on. OSError when the kernel has none."""
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
    """Mark the memory so that no further tensor is shared, for a rank that cannot use it (also of another version)."""
    os.pwrite(descriptor, (1).to_bytes(4, "little"), REFUSED_AT)


def check(descriptor: int, rank: int, world_size: int) -> tuple[int, int]:
    """The ranks that share this memory: from the first up to, and without, the second. ValueError when it is no such
    memory for rank `rank` of `world_size`."""
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
