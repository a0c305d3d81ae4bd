"""What happens to the chunks of an array (`paging`), and what is to be done about it."""

from typing import Literal

import msgspec

PagingRequest = Literal["prefetch", "pin", "unpin", "drop", "save", "flush", "sequential", "random", "normal"]


class PagingEvent(msgspec.Struct, frozen=True):
    """What happened."""


class ChunkTouched(PagingEvent, frozen=True):
    """A thread waits for this chunk; `write`: it wants to write."""

    chunk: int
    write: bool


class ChunkCame(PagingEvent, frozen=True):
    """What was to be fetched is staged."""

    chunk: int


class ChunkNotCame(PagingEvent, frozen=True):
    """It cannot be had."""

    chunk: int
    why: str


class ChunkSaved(PagingEvent, frozen=True):
    """The volume has acknowledged what was sent of it."""

    chunk: int


class ChunkNotSaved(PagingEvent, frozen=True):
    """The volume did not take it."""

    chunk: int
    why: str


class WaitedTooLong(PagingEvent, frozen=True):
    """Somebody has waited for this chunk for as long as anybody may."""

    chunk: int
    why: str


class AskedFor(PagingEvent, frozen=True):
    """The array's user wants something of chunks `first` to `end`."""

    id: int
    what: PagingRequest
    first: int
    end: int


class PagingAction(msgspec.Struct, frozen=True):
    """What is to be done. `chunk` is always inside the array."""


class FetchChunk(PagingAction, frozen=True):
    """Read it from the volume into a staging place."""

    chunk: int


class PutInPlace(PagingAction, frozen=True):
    """From its staging place, which is free then, into the array's memory; who waits goes on."""

    chunk: int
    writable: bool


class Unstage(PagingAction, frozen=True):
    """Its staging place is free."""

    chunk: int


class SendChunk(PagingAction, frozen=True):
    """Write-protect it, and write it to the volume."""

    chunk: int


class Unprotect(PagingAction, frozen=True):
    """It may be written; who waits goes on."""

    chunk: int


class GoOn(PagingAction, frozen=True):
    """Who waits for it tries again."""

    chunk: int


class PunchHole(PagingAction, frozen=True):
    """Its memory is not needed any more."""

    chunk: int


class Poison(PagingAction, frozen=True):
    """Who waits for it must be told that it cannot be had."""

    chunk: int
    why: str


class SyncVolume(PagingAction, frozen=True):
    """All that was sent is to be on disk; then `id` is answered."""

    id: int


class Answered(PagingAction, frozen=True):
    id: int
    why: str = ""
    """Why not; empty: it is done."""
