"""The pager of one array: it answers faults, from its job's userfaultfd to its volume and back, in one loop that never
waits for one thing alone.

    fault -> Paging.handle -> FetchChunk: asked of the volume, into a staging place -> PutInPlace: copied to the job
                           -> SendChunk: write-protected, sent to the volume from the memory itself -> PunchHole

The job is not trusted: it chose the descriptors (`checked`), may lie about addresses and change its memory meanwhile;
by that it can harm its own array only. When its process ends, what it wrote is still in the memory, and goes to the
volume before this process ends.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from agent.arrays.present import fill, there, whole_pages
from agent.arrays.runs import RUN_BYTES_MAX, StagingPlaces, together
from covey.arrays.volume_link import PageRequest, VolumeLink, submit_one
from covey.kernel import userfault
from covey.ports.log import Logger
from covey.wire import array_wire as arraywire
from covey.wire.array_wire import ArrayDone, ArrayResumed, ArrayWireError, AskArray, OpenArray
from covey.wire.headers import Op
from covey.wire.volume_wire import REQUEST_PAGES_MAX
from plugins.memory.machine.arrays import events as paging
from plugins.memory.machine.arrays.events import PagingAction, PagingEvent
from plugins.memory.machine.arrays.paging import Paging

STAGING_BYTES = 8 << 20
"""Bytes of the places for chunks on their way; at least 4 places, at most 64, and at most a quarter of the budget."""
WAIT_S = 90.0
"""The most seconds that a thread of the job waits for a chunk; then it gets SIGBUS, and its job the reason on standard
error."""
AGAIN_S = 1.0
"""Seconds to pause before what the volume did not take or give is tried again."""
LAST_S = 60.0
"""Seconds for which a pager whose job has ended tries to bring what it wrote to the volume."""
PUNCH = 3
"""The mode of fallocate that frees pages: FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""
NO_MEMORY_TRIES = 500

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True)
class ArrayGiven:
    """The descriptors and options of an array that a job handed over. The descriptors stay open."""

    opened: OpenArray
    connection: socket.socket
    faults: int
    memory: int
    lifeline: int
    errors: int
    """The descriptor of the job's standard error."""
    pid: int
    uid: int

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.connection.fileno(), self.faults, self.memory, self.lifeline, self.errors)


class JobGone(Exception):
    """The job's process has ended, or has closed the array."""


class Pager:
    """The pager of one array. `resumed`: another pager of it died."""

    def __init__(self, given: ArrayGiven, link: VolumeLink, log: Logger, resumed: bool) -> None:
        opened = given.opened
        self._given, self._link, self._log = given, link, log
        self._chunk, self._size, self._base = opened.chunk, opened.size, opened.address
        self._memory = memoryview(mmap.mmap(given.memory, opened.size, prot=mmap.PROT_READ))
        chunks, budget = -(-opened.size // opened.chunk), opened.budget // opened.chunk
        places = max(4, min(64, STAGING_BYTES // opened.chunk, budget // 4))
        self._staging = StagingPlaces(places, opened.chunk)
        self._staging_at = ctypes.addressof(ctypes.c_char.from_buffer(self._staging.memory))
        self._run_most = max(1, RUN_BYTES_MAX // opened.chunk)
        self._zeros = mmap.mmap(-1, self._run_most * opened.chunk)
        self._zeros_at = ctypes.addressof(ctypes.c_char.from_buffer(self._zeros))
        self._place_of: dict[int, int] = {}
        """The staging place of each chunk; -1: it is all zeros."""
        self._later: list[tuple[float, Callable[[], None]]] = []
        """Calls that are made after a pause: when, and which."""
        self._since: dict[int, float] = {}
        """When a thread began to wait for each chunk."""
        self._looked_s = 0.0
        self._watched = (-1, 0)
        self._job_gone = self.ending = False
        """`ending`: this process was asked to end (SIGTERM)."""
        self._trying: dict[int, float] = {}
        """Chunks that could not be fetched, and since when."""
        here, torn = self._found() if resumed else ([], [])
        self.machine = Paging(chunks, budget, places, here, opened.writable)
        if resumed:
            self._resume(here, torn)

    # ---- after another pager died ----

    def _found(self) -> tuple[list[int], list[int]]:
        """The chunks whose pages are in memory, and those among them of which pages are missing."""
        pages: dict[int, int] = {}
        for start, end in there(self._given.memory, 0, self._size):
            for page in range(start // userfault.PAGE_BYTES, end // userfault.PAGE_BYTES):
                chunk = page * userfault.PAGE_BYTES // self._chunk
                pages[chunk] = pages.get(chunk, 0) + 1
        torn = [chunk for chunk, count in pages.items() if count * userfault.PAGE_BYTES < self._bytes(chunk)]
        return sorted(pages), sorted(torn)

    def _resume(self, here: Sequence[int], torn: Sequence[int]) -> None:
        """Continue for a pager that died while pages of a chunk were put in place: the others of that chunk come from
        the volume. Any chunk may be newer here. Threads that waited try again."""
        for chunk in torn:
            place = memoryview(bytearray(self._bytes(chunk)))
            failed: list[str] = []
            for page, count, at in self._requests(chunk, self._bytes(chunk)):
                submit_one(self._link, Op.FETCH, page, count, failed, place[at : at + count * self._link.page_bytes])
            self._link.finish(lambda: self._link.busy == 0)
            if failed:
                raise OSError(errno.EIO, failed[0])
            source = ctypes.addressof(ctypes.c_char.from_buffer(place))
            self._copy(chunk, 1, source, False)
        if here:
            self._log.info("chunks found in memory", chunks=len(here), torn=len(torn))
        userfault.wake(self._given.faults, self._base, self._size)
        self._say(ArrayResumed())

    # ---- the loop ----

    def run(self) -> None:
        """Serve until the job has ended or closed the array, and the volume has all of it."""
        given, poll = self._given, select.epoll()
        for descriptor in (given.faults, given.connection.fileno()):
            poll.register(descriptor, select.EPOLLIN)
        try:
            job = os.pidfd_open(given.pid)
            poll.register(job, select.EPOLLIN)
        except OSError:
            job = -1  # of another pid namespace: the end of the connection tells
        try:
            while not self.ending:
                self._turn(poll, job)
            self._complain("its pager ends", "it was asked to (SIGTERM)")
        except JobGone:
            self._job_gone = True
        self._bring_home()

    def _turn(self, poll: select.epoll, job: int) -> None:
        link = self._link
        self._watch_link(poll)
        wait_s = 0.02 if link.fileno() < 0 or self._later else 1.0
        ready = {descriptor for descriptor, _ in poll.poll(wait_s)}
        if self._given.faults in ready:
            self._hear_faults()
        if link.fileno() in ready or link.fileno() < 0:
            link.step()
        if self._given.connection.fileno() in ready:
            self._hear_job()
        if job in ready:
            raise JobGone
        self._pass_time()
        link.push()

    def _watch_link(self, poll: select.epoll) -> None:
        wanted = (self._link.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._link.wants_write else 0))
        if wanted == self._watched:
            return
        known, self._watched = self._watched[0], wanted
        if known == wanted[0]:
            with contextlib.suppress(FileNotFoundError):  # a new connection that got the number of the old one
                poll.modify(*wanted)
                return
        if known >= 0:
            with contextlib.suppress(OSError):  # closed, so it is not watched any more
                poll.unregister(known)
        if wanted[0] >= 0:
            poll.register(*wanted)

    def _hear_faults(self) -> None:
        try:
            touched: list[PagingEvent] = []
            for fault in userfault.faults(self._given.faults):
                chunk = (fault.address - self._base) // self._chunk
                if 0 <= chunk < self.machine.chunks:
                    touched.append(paging.ChunkTouched(chunk, fault.write))
            self._tell(*touched)
        except BlockingIOError:
            pass
        except OSError as error:
            raise JobGone from error

    def _hear_job(self) -> None:
        try:
            data = self._given.connection.recv(arraywire.MESSAGE_BYTES_MAX + 1, socket.MSG_DONTWAIT)
            if not data:
                raise JobGone
            asked = arraywire.unpack(data, arraywire.to_pager)
        except BlockingIOError:
            return
        except ConnectionError as error:
            if isinstance(error, ArrayWireError):
                self._log.warning("an array's job sent a malformed message", why=str(error), uid=self._given.uid)
            raise JobGone from error
        if not isinstance(asked, AskArray):
            raise JobGone
        if asked.what == "counts":
            counts = msgspec.structs.asdict(self.machine.counts) | {"local": self.machine.held}
            self._say(ArrayDone(asked.id, counts=counts))
            return
        self._tell(paging.AskedFor(asked.id, asked.what, asked.first, asked.end))

    def _pass_time(self) -> None:
        now_s = time.monotonic()
        if self._later:
            due = [work for at_s, work in self._later if at_s <= now_s]
            self._later = [(at_s, work) for at_s, work in self._later if at_s > now_s]
            for work in due:
                work()
        if now_s >= self._looked_s + AGAIN_S:
            self._looked_s = now_s
            waiting = self.machine.waiting
            self._since = {chunk: self._since.get(chunk, now_s) for chunk in waiting}
            for chunk, since_s in self._since.items():
                if now_s > since_s + WAIT_S:
                    self._tell(paging.WaitedTooLong(chunk, f"the volume has not returned it for {WAIT_S:g} s"))

    def _bring_home(self) -> None:
        """Send the volume everything that it does not have."""
        until_s = time.monotonic() + LAST_S
        self._tell(paging.AskedFor(0, "save", 0, 0))
        while self.machine.unsaved and time.monotonic() < until_s:
            self._link.step()
            if self._link.fileno() < 0:
                time.sleep(0.02)
            elif self._link.busy:
                poll = select.poll()
                poll.register(self._link.fileno(), select.POLLIN | (select.POLLOUT if self._link.wants_write else 0))
                poll.poll(100)
            else:
                time.sleep(0.02)
            self._pass_time()
            if not self._link.busy and not self._later and self.machine.unsaved:
                self._tell(paging.AskedFor(0, "save", 0, 0))
        if self.machine.unsaved:
            self._log.error("the writes of a job to its array did not reach the volume", uid=self._given.uid)

    # ---- actions ----

    def _tell(self, *events: PagingEvent) -> None:
        actions = [action for event in events for action in self.machine.handle(event)]
        for run in together(actions, self._run_most):
            self._do(run[0], len(run))

    def _do(self, action: PagingAction, count: int) -> None:
        """Perform the action for its chunk and for the next `count` - 1 chunks."""
        match action:
            case paging.FetchChunk():
                self._fetch(action.chunk, count)
            case paging.PutInPlace():
                self._put(action.chunk, count, action.writable)
            case paging.Unstage():
                self._unstage(action.chunk)
            case paging.SendChunk():
                self._send(action.chunk, count)
            case paging.Unprotect():
                if self._given.opened.writable:
                    self._kernel(lambda: userfault.protect(self._given.faults, *self._where(action.chunk), False))
                else:
                    self._poison(action.chunk, "it was opened read-only")
            case paging.GoOn():
                self._kernel(lambda: userfault.wake(self._given.faults, *self._where(action.chunk)))
            case paging.PunchHole():
                at = action.chunk * self._chunk
                _libc.fallocate(self._given.memory, PUNCH, at, self._bytes(action.chunk, count))
            case paging.Poison():
                self._poison(action.chunk, action.why)
            case paging.SyncVolume():
                id = action.id
                done = lambda why: self._say(ArrayDone(id, why[:600]))  # noqa: E731
                self._link.submit(PageRequest(Op.FLUSH, 0, 0, done))
            case paging.Answered():
                self._say(ArrayDone(action.id, action.why[:600]))
            case _:
                raise AssertionError(action)

    def _bytes(self, chunk: int, count: int = 1) -> int:
        return min(count * self._chunk, self._size - chunk * self._chunk)

    def _where(self, chunk: int, count: int = 1) -> tuple[int, int]:
        return self._base + chunk * self._chunk, self._bytes(chunk, count)

    def _requests(self, chunk: int, size: int) -> list[tuple[int, int, int]]:
        """The requests for a chunk: first page, pages, offset from the beginning of the chunk. They are no longer than
        the volume takes."""
        page = self._link.page_bytes
        first, count = (self._given.opened.offset + chunk * self._chunk) // page, size // page
        return [
            (first + at, min(REQUEST_PAGES_MAX, count - at), at * page) for at in range(0, count, REQUEST_PAGES_MAX)
        ]

    def _to_send(self, chunk: int, size: int) -> list[tuple[int, int, int]]:
        """The `_requests` of the pages that are in memory. All pages of a chunk that is here are, unless there was no
        memory for some, or the job took them away: what was never there is not written over what the volume has."""
        start, page = chunk * self._chunk, self._link.page_bytes
        parts = whole_pages(self._given.memory, start, size, page)
        if parts == [(start, start + size)]:
            return self._requests(chunk, size)
        first = self._given.opened.offset // page
        return [
            (first + at // page, min(REQUEST_PAGES_MAX, (end - at) // page), at - start)
            for begin, end in parts
            for at in range(begin, end, REQUEST_PAGES_MAX * page)
        ]

    def _fetch(self, chunk: int, count: int) -> None:
        while count:
            places = self._staging.take(count)
            self._fetch_run(chunk, places)
            chunk, count = chunk + len(places), count - len(places)

    def _fetch_run(self, chunk: int, places: range) -> None:
        chunks, page = range(chunk, chunk + len(places)), self._link.page_bytes
        self._place_of.update(zip(chunks, places, strict=True))
        parts = self._requests(chunk, self._bytes(chunk, len(places)))
        left, failed, zeros = len(parts), "", 0

        def done(why: str, request: PageRequest) -> None:
            nonlocal left, failed, zeros
            left -= 1
            failed = failed or why
            if not why and request.zeros:
                zeros += 1
                if len(parts) > 1 and request.into is not None:
                    request.into[:] = bytes(len(request.into))
            if left == 0:
                self._came(chunks, failed, zeros == len(parts))

        for first, count, at in parts:
            request = PageRequest(Op.FETCH, first, count, _nothing, into=self._staging.at(places[0], at, count * page))
            request.done = partial(_with_request, done, request)
            self._link.submit(request)

    def _came(self, chunks: range, why: str, zeros: bool) -> None:
        if not why:
            for chunk in chunks:
                self._trying.pop(chunk, None)
                if zeros:
                    self._staging.free(self._place_of[chunk])
                    self._place_of[chunk] = -1
            self._tell(*(paging.ChunkCame(chunk) for chunk in chunks))
            return
        now_s, waiting = time.monotonic(), self.machine.waiting
        for chunk in chunks:
            if chunk in waiting and now_s < self._trying.setdefault(chunk, now_s) + WAIT_S:
                self._staging.free(self._place_of.pop(chunk))
                self._later.append((now_s + AGAIN_S, partial(self._fetch, chunk, 1)))
            else:
                self._trying.pop(chunk, None)
                self._tell(paging.ChunkNotCame(chunk, why))

    def _put(self, chunk: int, count: int, writable: bool) -> None:
        """Put runs of chunks in place whose staging places are side by side, or that are all zeros."""
        end = chunk + count
        while chunk < end:
            place, run = self._place_of[chunk], 1
            while chunk + run < end and self._place_of[chunk + run] == (place + run if place >= 0 else -1):
                run += 1
            source = self._zeros_at if place < 0 else self._staging_at + place * self._chunk
            self._copy(chunk, run, source, not writable or not self._given.opened.writable)
            for each in range(chunk, chunk + run):
                self._unstage(each)
                if writable and not self._given.opened.writable:
                    self._poison(each, "it was opened read-only")
            chunk += run

    def _copy(self, chunk: int, count: int, source: int, protected: bool) -> None:
        address, size = self._where(chunk, count)
        for _ in range(NO_MEMORY_TRIES):
            try:
                userfault.copy(self._given.faults, address, source, size, protected)
                return
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ESRCH, errno.EINVAL):
                    # its memory or its process is gone, which the loop is told soon; some of it may have been put in
                    # place and written to, and all of it counts as here
                    fill(self._given.memory, chunk * self._chunk, size, source)
                    return
                if error.errno != errno.ENOMEM:
                    raise
            time.sleep(0.01)
        for each in range(chunk, chunk + count):
            self._poison(each, "there is no memory for it within the job's limit")

    def _unstage(self, chunk: int) -> None:
        place = self._place_of.pop(chunk, -1)
        if place >= 0:
            self._staging.free(place)

    def _send(self, chunk: int, count: int) -> None:
        where = self._where(chunk, count)
        self._kernel(lambda: userfault.protect(self._given.faults, *where, True))
        chunks, parts = range(chunk, chunk + count), self._to_send(chunk, where[1])
        left, failed = len(parts), ""
        if not parts:
            self._later.append((0.0, partial(self._tell, *(paging.ChunkSaved(chunk) for chunk in chunks))))

        def done(why: str) -> None:
            nonlocal left, failed
            left -= 1
            failed = failed or why
            if left == 0:
                if failed:
                    told = [paging.ChunkNotSaved(chunk, failed) for chunk in chunks]
                    self._later.append((time.monotonic() + AGAIN_S, partial(self._tell, *told)))
                else:
                    self._tell(*(paging.ChunkSaved(chunk) for chunk in chunks))

        start, page = chunk * self._chunk, self._link.page_bytes
        for first, pages, at in parts:
            data = self._memory[start + at : start + at + pages * page]
            self._link.submit(PageRequest(Op.WRITE, first, pages, done, data=data))

    def _kernel(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH, errno.EINVAL):
                raise

    def _poison(self, chunk: int, why: str) -> None:
        """Give SIGBUS to the threads that wait for a chunk, and tell the job why; where the kernel cannot do that, end
        its whole process."""
        self._complain(f"bytes {chunk * self._chunk} to {chunk * self._chunk + self._bytes(chunk)} cannot be read", why)
        try:
            userfault.poison(self._given.faults, *self._where(chunk))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH):
                os.write(self._given.lifeline, b"!")

    def _complain(self, what: str, why: str) -> None:
        complain(self._given, f"array of volume {self._link.volume}: {what}", why)
        self._log.error("an array's job was told", what=what, why=why, uid=self._given.uid)

    def _say(self, frame: arraywire.ArrayFrame) -> None:
        """Answer the job. One that does not read its answers loses them."""
        if self._job_gone:
            return
        try:
            self._given.connection.send(arraywire.pack(frame), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._log.warning("an array's job does not read its answers", uid=self._given.uid)
        except OSError:
            pass  # it is gone, which the loop hears


def _nothing(why: str) -> None:
    """Take the end of a request that has none yet."""


def _with_request(done: Callable[[str, PageRequest], None], request: PageRequest, why: str) -> None:
    done(why, request)


def complain(given: ArrayGiven, what: str, why: str) -> None:
    """Write three lines to the job's standard error, if it takes them at once."""
    text = f"covey: {what}\n  why: {why}\n  next: agentctl volume ls, and start the script again\n"
    poll = select.poll()
    poll.register(given.errors, select.POLLOUT)
    try:
        if poll.poll(100):
            os.write(given.errors, text.encode(errors="replace")[:1024])
    except OSError:
        pass  # it closed it
