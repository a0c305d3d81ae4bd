"""Events that happen to the chunks of an array (`paging`), and the actions that follow."""

from typing import Literal

import msgspec

PagingRequest = Literal["prefetch", "pin", "unpin", "drop", "save", "flush", "sequential", "random", "normal"]


class PagingEvent(msgspec.Struct, frozen=True):
    """An event: something happened to a chunk, or was asked for."""


class ChunkTouched(PagingEvent, frozen=True):
    """A thread waits for this chunk; `write`: it wants to write."""

    chunk: int
    write: bool


class ChunkCame(PagingEvent, frozen=True):
    """The chunk that was to be fetched is staged."""

    chunk: int


class ChunkNotCame(PagingEvent, frozen=True):
    """The chunk cannot be fetched."""

    chunk: int
    why: str


class ChunkSaved(PagingEvent, frozen=True):
    """The volume has acknowledged the content of the chunk that was sent."""

    chunk: int


class ChunkNotSaved(PagingEvent, frozen=True):
    """The volume did not take the chunk."""

    chunk: int
    why: str


class WaitedTooLong(PagingEvent, frozen=True):
    """A thread has waited for this chunk for as long as any may."""

    chunk: int
    why: str


class AskedFor(PagingEvent, frozen=True):
    """The array's user asks for an operation on chunks `first` to `end`."""

    id: int
    what: PagingRequest
    first: int
    end: int


class PagingAction(msgspec.Struct, frozen=True):
    """An action to take. `chunk` is always inside the array."""


class FetchChunk(PagingAction, frozen=True):
    """Read the chunk from the volume into a staging place."""

    chunk: int


class PutInPlace(PagingAction, frozen=True):
    """Move the chunk from its staging place, which is free then, into the array's memory; waiting threads continue."""

    chunk: int
    writable: bool


class Unstage(PagingAction, frozen=True):
    """Free the chunk's staging place."""

    chunk: int


class SendChunk(PagingAction, frozen=True):
    """Write-protect the chunk and write it to the volume."""

    chunk: int


class Unprotect(PagingAction, frozen=True):
    """Let the chunk be written; waiting threads continue."""

    chunk: int


class GoOn(PagingAction, frozen=True):
    """Threads that wait for the chunk try again."""

    chunk: int


class PunchHole(PagingAction, frozen=True):
    """Free the chunk's memory: it is not needed any more."""

    chunk: int


class Poison(PagingAction, frozen=True):
    """Tell threads that wait for the chunk that it cannot be had."""

    chunk: int
    why: str


class SyncVolume(PagingAction, frozen=True):
    """Sync the volume: everything sent is to be on disk; then `id` is answered."""

    id: int


class Answered(PagingAction, frozen=True):
    id: int
    why: str = ""
    """Why the request failed; empty: it is done."""
