"""The chunks of one array, whose memory is local in part: which are here, which come, which go.

               touched                came                written to
      absent ----------> coming ----------------> clean ------------> dirty
        ^        |          (fetched ahead: staged)  |                  |
        |        `- staged ------touched-----------> |                  | write-protected,
        |                                            |                  v sent to the volume
        '---------- memory given back --------------'-------------- leaving, or saving (stays, clean)

A chunk that is clean is write-protected, so its first write is a fault as well. One that leaves is write-protected too,
and its memory is given back once the volume has it: whoever writes to it meanwhile waits, and keeps it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Literal, assert_never

import msgspec

from plugins.memory.machine.arrays.events import (
    Answered,
    AskedFor,
    ChunkCame,
    ChunkNotCame,
    ChunkNotSaved,
    ChunkSaved,
    ChunkTouched,
    FetchChunk,
    GoOn,
    PagingAction,
    PagingEvent,
    Poison,
    PunchHole,
    PutInPlace,
    SendChunk,
    SyncVolume,
    Unprotect,
    Unstage,
    WaitedTooLong,
)
from plugins.memory.policy.arrays import prefetch, residence

RECENT = 8
"""Number of recent accesses, after one of which an access of the stream comes."""


class Chunk(IntEnum):
    ABSENT = 0
    COMING = 1
    STAGED = 2
    """Fetched ahead; no thread has touched it, and it is not in the array's memory yet."""
    CLEAN = 3
    DIRTY = 4
    SAVING = 5
    LEAVING = 6


UNSAVED = (Chunk.DIRTY, Chunk.SAVING, Chunk.LEAVING)
"""States in which the volume may have older content."""
HERE = (Chunk.CLEAN, Chunk.DIRTY, Chunk.SAVING, Chunk.LEAVING)


class _Saving(msgspec.Struct):
    """A request that is done when the chunks `left` are saved."""

    id: int
    left: set[int]
    sync: bool
    why: str = ""


class PagingCounts(msgspec.Struct):
    touched: int = 0
    """Accesses that waited for a fault, first writes to clean chunks not counted."""
    hits: int = 0
    """Touches whose chunk had been fetched ahead, or was on its way."""
    ahead: int = 0
    """Chunks fetched ahead."""
    placed: int = 0
    """Chunks fetched ahead and put in place before they were touched, so that the touch was no fault."""
    wasted: int = 0
    """Chunks fetched ahead and given up for want of room before they were touched."""
    saved: int = 0
    """Chunks written to the volume."""


class Paging:
    """Pages `chunks` of an array, of which `budget` may be local at once, staged ones included. `staging`: places for
    arriving chunks. `writable` False: the array is only read."""

    def __init__(self, chunks: int, budget: int, staging: int, here: Iterable[int] = (), writable: bool = True) -> None:
        """`here`: chunks found in memory after the earlier process died. The volume may have older content of them,
        unless the array is only read: then the volume's content is as new or newer, and must not be overwritten."""
        self.chunks, self.budget, self.staging = chunks, budget, staging
        self.counts = PagingCounts()
        self._state = bytearray(chunks)
        self._order: dict[int, None] = {}
        """Chunks that are here and neither pinned nor leaving, oldest first."""
        self._staged: dict[int, None] = {}
        self._waiting: dict[int, bool] = {}
        """Chunks that a thread waits for; True: to write."""
        self._asked_ahead: set[int] = set()
        """Chunks that are coming or staged because of the trend."""
        self._place_at_once: set[int] = set()
        self._pinned: set[int] = set()
        self._queue: deque[int] = deque()
        """Chunks touched or wished for, and not yet fetched for want of room; a chunk may be in it twice."""
        self._held = self._coming = self._leaving = 0
        self._saves: list[_Saving] = []
        self._pins: list[tuple[int, set[int]]] = []
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._strides: deque[int] = deque(maxlen=prefetch.STRIDES_MAX)
        self._trend: int | None = None
        self._fixed: Literal["sequential", "random", "normal"] = "normal"
        self._window = 0
        for chunk in here:
            self._state[chunk] = Chunk.DIRTY if writable else Chunk.CLEAN
            self._order[chunk] = None
            self._held += 1

    def handle(self, event: PagingEvent) -> Sequence[PagingAction]:
        actions: list[PagingAction] = []
        match event:
            case ChunkTouched():
                self._on_touched(event, actions)
            case ChunkCame():
                self._on_came(event.chunk, actions)
            case ChunkNotCame():
                self._on_not_came(event, actions)
            case ChunkSaved():
                self._on_saved(event.chunk, "", actions)
            case ChunkNotSaved():
                self._on_saved(event.chunk, event.why, actions)
            case WaitedTooLong():
                self._on_waited_too_long(event, actions)
            case AskedFor():
                self._on_asked(event, actions)
            case _:
                raise AssertionError(event)
        self._make_room(actions)
        self._fetch_queued(actions)
        return actions

    def state(self, chunk: int) -> Chunk:
        return Chunk(self._state[chunk])

    @property
    def held(self) -> int:
        """Chunks that take local memory now."""
        return self._held

    @property
    def waiting(self) -> Sequence[int]:
        """Chunks that a thread waits for."""
        return list(self._waiting)

    @property
    def unsaved(self) -> bool:
        """Does the volume have older content of any chunk?"""
        return any(self._state.find(state) >= 0 for state in UNSAVED)

    # ---- touched ----

    def _on_touched(self, event: ChunkTouched, actions: list[PagingAction]) -> None:
        chunk, state = event.chunk, self._state[event.chunk]
        if state == Chunk.DIRTY or (state == Chunk.CLEAN and event.write):
            self._state[chunk] = Chunk.DIRTY
            if chunk in self._order:
                del self._order[chunk]
                self._order[chunk] = None
            actions.append(Unprotect(chunk))
        elif state in (Chunk.SAVING, Chunk.LEAVING) and event.write:
            self._waiting[chunk] = True
        elif state in HERE:
            actions.append(GoOn(chunk))
        else:
            new = chunk not in self._waiting
            self._waiting[chunk] = self._waiting.get(chunk, False) or event.write
            if new:
                self._on_access(chunk, Chunk(state), actions)

    def _on_access(self, chunk: int, state: Chunk, actions: list[PagingAction]) -> None:
        self.counts.touched += 1
        write = self._waiting[chunk]
        hit = chunk in self._asked_ahead
        if hit:
            self._asked_ahead.discard(chunk)
            self.counts.hits += 1
        if state is Chunk.STAGED:
            self._put(chunk, actions)
        elif state is Chunk.ABSENT:
            self._fetch(chunk, actions)
        self._look_ahead(chunk, hit, write, actions)

    def _place_ahead(self, chunk: int, write: bool, actions: list[PagingAction]) -> None:
        """Put a chunk in place that the stream will touch next, so it counts as touched. Where the stream writes, the
        chunk is taken to be written: if it is not, it is sent to the volume once for nothing."""
        self.counts.placed += 1
        self._strides.append(chunk - self._recent[-1])
        self._recent.append(chunk)
        if write:
            self._waiting[chunk] = True
        self._put(chunk, actions)

    def _look_ahead(self, chunk: int, hit: bool, write: bool, actions: list[PagingAction]) -> None:
        recent = list(self._recent)
        if recent:
            self._strides.append(chunk - recent[-1])
        self._recent.append(chunk)
        if self._fixed == "random":
            return
        self._trend = 1 if self._fixed == "sequential" else prefetch.trend(list(self._strides), self._trend)
        if self._trend is None or not prefetch.follows(chunk, self._trend, recent):
            return
        self._window = prefetch.window(self._window, hit)
        for at in prefetch.ahead(chunk, self._trend, prefetch.placed(self._window), self.chunks):
            if at not in self._staged or at in self._waiting:
                break
            self._place_ahead(at, write, actions)
            chunk = at
        wanted = prefetch.ahead(chunk, self._trend, self._window, self.chunks)
        absent = sum(self._state[at] == Chunk.ABSENT for at in wanted)
        if not prefetch.fetches_on(absent, len(wanted), self._window):
            return
        for at in wanted:
            if self._state[at] == Chunk.ABSENT and at not in self._waiting:
                if not self._may_fetch_ahead(wanted, actions):
                    break
                self._asked_ahead.add(at)
                self.counts.ahead += 1
                self._begin_fetch(at, actions)

    def _may_fetch_ahead(self, wanted: Sequence[int], actions: list[PagingAction]) -> bool:
        """May one more chunk be fetched ahead? A chunk that was fetched ahead and is not wanted any more makes room for
        it."""
        most = min(self.staging - 2, residence.ahead_most(len(self._pinned), self.budget))
        if self._coming + len(self._staged) >= most:
            stale = next((chunk for chunk in self._staged if chunk not in wanted), None)
            if stale is None:
                return False
            self._unstage(stale, actions)
        return not self._queue and self._held < self.budget - 2

    # ---- coming ----

    def _fetch(self, chunk: int, actions: list[PagingAction]) -> None:
        self._queue.append(chunk)
        self._fetch_queued(actions)

    def _fetch_queued(self, actions: list[PagingAction]) -> None:
        while self._queue:
            chunk = self._queue[0]
            if self._state[chunk] == Chunk.ABSENT:
                if self._coming + len(self._staged) >= self.staging and self._staged:
                    self._unstage(next(iter(self._staged)), actions)
                if self._held >= self.budget or self._coming + len(self._staged) >= self.staging:
                    return
                self._begin_fetch(chunk, actions)
            self._queue.popleft()

    def _begin_fetch(self, chunk: int, actions: list[PagingAction]) -> None:
        self._state[chunk] = Chunk.COMING
        self._held += 1
        self._coming += 1
        actions.append(FetchChunk(chunk))

    def _on_came(self, chunk: int, actions: list[PagingAction]) -> None:
        self._coming -= 1
        self._state[chunk] = Chunk.STAGED
        self._staged[chunk] = None
        if chunk in self._waiting or chunk in self._place_at_once or chunk in self._pinned:
            self._put(chunk, actions)

    def _put(self, chunk: int, actions: list[PagingAction]) -> None:
        del self._staged[chunk]
        self._place_at_once.discard(chunk)
        self._asked_ahead.discard(chunk)
        write = self._waiting.pop(chunk, False)
        self._state[chunk] = Chunk.DIRTY if write else Chunk.CLEAN
        if chunk not in self._pinned:
            self._order[chunk] = None
        actions.append(PutInPlace(chunk, write))
        self._pin_is_here(chunk, "", actions)

    def _unstage(self, chunk: int, actions: list[PagingAction]) -> None:
        del self._staged[chunk]
        self._held -= 1
        self._state[chunk] = Chunk.ABSENT
        if chunk in self._asked_ahead:
            self._asked_ahead.discard(chunk)
            self.counts.wasted += 1
        actions.append(Unstage(chunk))

    def _on_not_came(self, event: ChunkNotCame, actions: list[PagingAction]) -> None:
        chunk = event.chunk
        self._coming -= 1
        self._held -= 1
        self._state[chunk] = Chunk.ABSENT
        self._asked_ahead.discard(chunk)
        self._place_at_once.discard(chunk)
        actions.append(Unstage(chunk))
        self._pin_is_here(chunk, event.why, actions)
        if self._waiting.pop(chunk, None) is not None:
            actions.append(Poison(chunk, event.why))

    def _on_waited_too_long(self, event: WaitedTooLong, actions: list[PagingAction]) -> None:
        chunk = event.chunk
        if self._waiting.pop(chunk, None) is None:
            return
        if self._state[chunk] in HERE:  # to be written: it is allowed, and is sent again
            self._waiting[chunk] = True
            return
        self._queue = deque(queued for queued in self._queue if queued != chunk)
        actions.append(Poison(chunk, event.why))

    # ---- going ----

    def _make_room(self, actions: list[PagingAction]) -> None:
        count = residence.to_go(self._held, self._leaving, self.budget)
        while count and len(self._staged) > residence.ahead_most(len(self._pinned), self.budget):
            self._unstage(next(iter(self._staged)), actions)
            count -= 1
        for chunk in residence.victims(self._order, self._waiting, count):
            self._evict(chunk, actions)

    def _evict(self, chunk: int, actions: list[PagingAction]) -> None:
        """Evict a chunk: a clean one goes at once, a dirty one once the volume has it."""
        state = self._state[chunk]
        del self._order[chunk]
        if state == Chunk.CLEAN:
            self._state[chunk] = Chunk.ABSENT
            self._held -= 1
            actions.append(PunchHole(chunk))
            return
        self._leaving += 1
        self._state[chunk] = Chunk.LEAVING
        if state == Chunk.DIRTY:
            actions.append(SendChunk(chunk))

    def _on_saved(self, chunk: int, why: str, actions: list[PagingAction]) -> None:
        left = self._state[chunk] == Chunk.LEAVING
        self._leaving -= left
        write = self._waiting.pop(chunk, False)
        if not why:
            self.counts.saved += 1
        if why or write:
            self._state[chunk] = Chunk.DIRTY
            if write:
                actions.append(Unprotect(chunk))
        elif left:
            self._state[chunk] = Chunk.ABSENT
            self._held -= 1
            actions.append(PunchHole(chunk))
        else:
            self._state[chunk] = Chunk.CLEAN
        if left and (why or write) and chunk not in self._pinned:
            self._order[chunk] = None
        self._tell_saves(chunk, why, actions)

    def _tell_saves(self, chunk: int, why: str, actions: list[PagingAction]) -> None:
        for save in list(self._saves):
            save.left.discard(chunk)
            save.why = save.why or why
            if not save.left:
                self._saves.remove(save)
                self._end_save(save, actions)

    def _end_save(self, save: _Saving, actions: list[PagingAction]) -> None:
        actions.append(SyncVolume(save.id) if save.sync and not save.why else Answered(save.id, save.why))

    # ---- asked for ----

    def _on_asked(self, event: AskedFor, actions: list[PagingAction]) -> None:
        chunks = range(max(0, event.first), min(event.end, self.chunks))
        match event.what:
            case "save" | "flush":
                self._save(event, actions)
                return
            case "pin":
                self._pin(event.id, chunks, actions)
                return
            case "prefetch":
                self._wish(chunks, actions)
            case "unpin":
                for chunk in chunks:
                    self._unpin(chunk)
            case "drop":
                self._drop(chunks, actions)
            case "sequential" | "random" | "normal":
                self._fixed, self._window = event.what, 0
            case _:
                assert_never(event.what)
        actions.append(Answered(event.id))

    def _save(self, event: AskedFor, actions: list[PagingAction]) -> None:
        save = _Saving(event.id, set(), event.what == "flush")
        for state in UNSAVED:
            save.left.update(self._all_in(state))
        for chunk in self._all_in(Chunk.DIRTY):
            self._state[chunk] = Chunk.SAVING
            actions.append(SendChunk(chunk))
        if save.left:
            self._saves.append(save)
        else:
            self._end_save(save, actions)

    def _all_in(self, state: Chunk) -> list[int]:
        """All chunks in this state, found by byte search: an array has millions of chunks, and its threads wait
        meanwhile."""
        found, at = [], self._state.find(state)
        while at >= 0:
            found.append(at)
            at = self._state.find(state, at + 1)
        return found

    def _wish(self, chunks: Iterable[int], actions: list[PagingAction]) -> None:
        """Ask for as many of these chunks as fit, so that the first are not gone when the last come."""
        room = self.budget - residence.kept_free(self.budget) - len(self._pinned)
        for chunk in list(chunks)[: max(0, room)]:
            self._want(chunk, actions)

    def _want(self, chunk: int, actions: list[PagingAction]) -> None:
        state = self._state[chunk]
        if state == Chunk.STAGED:
            self._put(chunk, actions)
        elif state in (Chunk.ABSENT, Chunk.COMING):
            self._place_at_once.add(chunk)
            if state == Chunk.ABSENT:
                self._queue.append(chunk)

    def _pin(self, id: int, chunks: range, actions: list[PagingAction]) -> None:
        if not residence.pinnable(len(self._pinned.union(chunks)), self.budget):
            why = f"{len(chunks)} chunks more than the local budget of {self.budget} chunks allows"
            actions.append(Answered(id, why))
            return
        missing = {chunk for chunk in chunks if self._state[chunk] not in HERE}
        for chunk in chunks:
            self._pinned.add(chunk)
            self._order.pop(chunk, None)
            if self._state[chunk] == Chunk.LEAVING:
                self._state[chunk] = Chunk.SAVING
                self._leaving -= 1
            self._want(chunk, actions)
        missing = {chunk for chunk in missing if self._state[chunk] not in HERE}
        if missing:
            self._pins.append((id, missing))
        else:
            actions.append(Answered(id))

    def _pin_is_here(self, chunk: int, why: str, actions: list[PagingAction]) -> None:
        for pin in list(self._pins):
            id, missing = pin
            if chunk in missing:
                missing.discard(chunk)
                if why or not missing:
                    self._pins.remove(pin)
                    actions.append(Answered(id, why))

    def _unpin(self, chunk: int) -> None:
        if chunk in self._pinned:
            self._pinned.discard(chunk)
            if self._state[chunk] in HERE:
                self._order[chunk] = None

    def _drop(self, chunks: Iterable[int], actions: list[PagingAction]) -> None:
        for chunk in chunks:
            if self._state[chunk] == Chunk.STAGED:
                self._unstage(chunk, actions)
            elif chunk in self._order and chunk not in self._waiting:
                self._evict(chunk, actions)

    # ---- for tests ----

    def check(self) -> None:
        staged, leaving = self._all(Chunk.STAGED), self._all(Chunk.LEAVING)
        here = set[int]().union(*(self._all(state) for state in HERE))
        assert self._coming == self._state.count(Chunk.COMING)
        assert self._leaving == len(leaving)
        assert set(self._staged) == staged
        assert self._held == len(here) + len(self._staged) + self._coming <= self.budget
        assert self._coming + len(self._staged) <= self.staging
        assert set(self._order) == here - self._pinned - leaving, "every chunk that may go is in the order"
        assert self._asked_ahead <= self._all(Chunk.COMING) | staged

    def _all(self, state: Chunk) -> set[int]:
        found, at = set[int](), self._state.find(state)
        while at >= 0:
            found.add(at)
            at = self._state.find(state, at + 1)
        return found
