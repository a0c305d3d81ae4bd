"""A volume of remote memory, open in a job, for reads and writes of bytes. Scripts import it from `covey.remote`.

Several requests of one read or write are under way at once, and bytes move directly between the caller's buffer and the
socket (`covey.arrays.volume_link`). Many threads may call; their calls take turns.
"""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import msgspec

from covey.arrays.volume_link import ANSWER_S, RemoteMemoryError, VolumeLink, dial, receive, submit_one, transfer
from covey.core.ids import JobId
from covey.core.units import format_size, parse_size
from covey.core.version import VERSION
from covey.kernel.this_process import this_process
from covey.ports.processes import ProcessId
from covey.wire import frames
from covey.wire import job as wire
from covey.wire.headers import Op
from covey.wire.volume_wire import NO_TOKEN, REQUEST_PAGES_MAX

F = TypeVar("F", bound=wire.Frame)
Buffer = bytes | bytearray | memoryview
TELL_S = 10.0
"""Seconds between two lines in the log on what `open` waits for."""
_log = logging.getLogger("covey.remote")


class RemoteMemory:
    """One volume, open in this process. Made by `open` or `at`; a context manager. Offsets and sizes are bytes.

    ValueError for offsets outside the volume. RemoteMemoryError when the volume's process is away for a minute, or
    neither a lender nor the disk can do what is asked.

    In another process it opens a connection of its own: in a forked child (a data loader's worker) at its first use,
    after pickling (`spawn`) when it is unpickled. All of them read and write one volume: what one has written, the
    others read.
    """

    def __init__(self, at: wire.VolumeAt, agent_socket: str) -> None:
        self._at, self._agent_socket = at, agent_socket
        self._closed = False
        self._process = this_process()
        self._lock = threading.RLock()
        self._link = VolumeLink(at.volume, self.found, time.monotonic)
        _open.add(self)

    @classmethod
    def open(
        cls,
        volume: str,
        size: int | str,
        agent_socket: str | None = None,
        *,
        mirror: int = 0,
        parity: str = "",
        create: bool | None = None,
        scratch: bool = False,
    ) -> "RemoteMemory":
        """Open the volume of this name on this host's agent, or make it. `size` in bytes or as text (`"64 MiB"`),
        rounded up to whole pages; an existing volume must have the same size. `agent_socket`: the agent's `jobs.sock`,
        by default $COVEY_SOCKET, which the runner sets. `mirror=2`: a new volume has no disk, and each of its slabs is
        on two other hosts; `parity="2+1"`: each slab is divided between two hosts, with its parity on a third.

        `create`: None makes a volume that does not exist, unless other hosts hold pages of one with this name whose
        record this host has lost; True makes it even then, new and empty; False never makes one. A volume that this
        host has is opened as it is. `scratch`: a volume that is made so is removed once the process that opened it so
        last has ended, however it ends. Waits as long as the agent works on the volume, and logs what it waits for.
        RemoteMemoryError when the agent refuses or is not there."""
        path = agent_socket or os.environ.get("COVEY_SOCKET", "")
        if not path:
            raise RemoteMemoryError(
                f"cannot open volume {volume}",
                "no agent is known: COVEY_SOCKET is not set",
                "start the script with agentctl submit, or give agent_socket=",
            )
        size_bytes = parse_size(size) if isinstance(size, str) else size
        make: wire.Make = "" if create is None else "anew" if create else "never"
        wanted = wire.VolumeWanted(
            volume, size_bytes, mirror, parity, *_of_job(path), make, _this() if scratch else None
        )
        memory = cls(_ask_agent(path, wanted, wire.VolumeAt), path)
        memory._connect()
        return memory

    @classmethod
    def at(cls, path: str) -> "RemoteMemory":
        """Open the volume whose socket this is; `agentctl volume create NAME SIZE --user ME` prints it. No agent is
        asked. RemoteMemoryError when the volume belongs to another user or is not there."""
        name = os.path.basename(path).removeprefix("vol-").removesuffix(".sock")
        memory = cls(wire.VolumeAt(name, 0, 0, path, NO_TOKEN), "")
        memory._connect()
        return memory

    @property
    def volume(self) -> str:
        """Name of the volume."""
        return self._at.volume

    @property
    def size(self) -> int:
        """Size of the volume in bytes."""
        return self._link.size_bytes or self._at.size_bytes

    @property
    def page(self) -> int:
        """Bytes of one page. Reads and writes aligned to it transfer no additional bytes."""
        return self._link.page_bytes or self._at.page_bytes

    def __len__(self) -> int:
        return self.size

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on, zeros where nothing was written. Any offset and size."""
        self._check(offset, size)
        found = bytearray(size)
        self.read_into(offset, found)
        return bytes(found)

    def read_into(self, offset: int, into: bytearray | memoryview) -> None:
        """Fill a writable buffer from `offset` on. Whole pages are received into it without a copy."""
        view = memoryview(into).cast("B")
        self._check(offset, len(view))
        page = self.page
        with self._turn():
            self._check_open()
            head = min(-offset % page, len(view))
            tail = (offset + len(view)) % page if len(view) > head else 0
            end = len(view) - tail
            if head:
                skip = offset % page
                view[:head] = self._one_page(offset // page)[skip : skip + head]
            if end > head:
                self._do("read", Op.FETCH, (offset + head) // page, (end - head) // page, view[head:end])
            if tail:
                view[end:] = self._one_page((offset + end) // page)[:tail]

    def write(self, offset: int, data: Buffer) -> None:
        """Write `data` at `offset`. Returns when a lender has it (the disk follows) or the disk. When it is not aligned
        to pages, the pages at both ends are read first; of two processes that do that to one page at the same time, one
        may overwrite the other's bytes."""
        self.write_from(offset, data)

    def write_from(self, offset: int, data: Buffer) -> None:
        """Write like `write`. Whole pages are sent from the buffer without a copy; it must not change meanwhile."""
        view = memoryview(data).cast("B")
        self._check(offset, len(view))
        page = self.page
        with self._turn():
            self._check_open()
            head = min(-offset % page, len(view))
            tail = (offset + len(view)) % page if len(view) > head else 0
            end = len(view) - tail
            if head:
                self._part_of_page(offset, view[:head])
            if end > head:
                self._do("write", Op.WRITE, (offset + head) // page, (end - head) // page, view[head:end])
            if tail:
                self._part_of_page(offset + end, view[end:])

    def discard(self, offset: int, size: int) -> None:
        """Give up whole pages, which read as zeros from now on. ValueError for a part of a page."""
        self._check(offset, size)
        if offset % self.page or size % self.page:
            raise ValueError(f"discard wants whole pages of {self.page} bytes, not {size} bytes at {offset}")
        first, count = offset // self.page, size // self.page
        with self._turn():
            self._check_open()
            for at in range(0, count, REQUEST_PAGES_MAX):
                self._do("discard", Op.DISCARD, first + at, min(REQUEST_PAGES_MAX, count - at))

    def flush(self) -> None:
        """Return when everything written before, by any process, is on this host's disk."""
        with self._turn():
            self._check_open()
            self._do("flush", Op.FLUSH, 0, 0)

    def close(self) -> None:
        """Close this connection. The volume stays, for other processes too, and `open` finds it again."""
        with self._turn():
            self._closed = True
            self._link.close()

    def remove(self) -> None:
        """Remove the volume and everything in it. RemoteMemoryError when the agent refuses or is not there."""
        self.close()
        if not self._agent_socket:
            step = f"agentctl volume rm {self.volume}"
            raise RemoteMemoryError(f"cannot remove volume {self.volume}", "it was opened without an agent", step)
        _ask_agent(self._agent_socket, wire.RemoveVolume(self._at.volume), wire.VolumeRemoved)

    def __enter__(self) -> "RemoteMemory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def found(self, again: bool) -> tuple[str, bytes]:
        """Socket and token of the volume now. The agent may have moved it; without an agent the same ones are given."""
        if again and self._agent_socket:
            wanted = wire.VolumeWanted(self.volume, self.size, make="never")  # not created again once it was removed
            try:
                self._at = _ask_agent(self._agent_socket, wanted, wire.VolumeAt, _not_waited_for)
            except RemoteMemoryError as refused:
                is_away = isinstance(refused.__cause__, OSError)  # the agent, which the volume does without
                self._link.heard = "" if is_away else f"{refused.why}; next: {refused.next}"
            else:
                self._link.heard = ""
        return self._at.path, self._at.token

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the volume's name and place, and no secret: whoever unpickles it opens it again, as their own user."""
        self._check_open()
        return _opened_again, (self.volume, self.size, self._at.path, self._agent_socket)

    # ---- in which process ----

    def _turn(self) -> threading.RLock:
        """The lock of this process. In another process than before, a new connection is made first."""
        if self._process != this_process():
            self._begin_here()
        return self._lock

    def _begin_here(self) -> None:
        """Begin anew in another process. Requests under way in the old one fail here: their answers go there."""
        self._process = this_process()
        self._lock = threading.RLock()
        old, self._link = self._link, self._link.anew()
        old.close("this process was forked while it was under way")

    # ---- under the lock ----

    def _check(self, offset: int, size: int) -> None:
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"{size} bytes at {offset} are outside {self._at.volume} ({format_size(self.size)})")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"volume {self._at.volume} was closed here")

    def _connect(self) -> None:
        with self._turn():
            self._link.connect()
        told = self._at
        if told.size_bytes and (told.page_bytes, told.size_bytes) != (self._link.page_bytes, self._link.size_bytes):
            why = f"the agent said {told.size_bytes} bytes, its process {self._link.size_bytes}"
            raise RemoteMemoryError(f"cannot use volume {self.volume}", why, "open it again")

    def _one_page(self, page: int) -> bytearray:
        found = bytearray(self.page)
        self._do("read", Op.FETCH, page, 1, memoryview(found))
        return found

    def _part_of_page(self, offset: int, data: memoryview) -> None:
        whole, skip = self._one_page(offset // self.page), offset % self.page
        whole[skip : skip + len(data)] = data
        self._do("write", Op.WRITE, offset // self.page, 1, memoryview(whole))

    def _do(self, what: str, op: Op, page: int, pages: int, view: memoryview | None = None) -> None:
        """Do all requests of one operation, or raise RemoteMemoryError with the first reason."""
        failed: list[str] = []
        if op is Op.FLUSH or op is Op.DISCARD:
            requests = 1
            submit_one(self._link, op, page, pages, failed)
        else:
            requests = transfer(self._link, op, page, view, pages, failed)
        self._link.finish(lambda: self._link.busy == 0)
        if failed and requests:
            what = f"{what} of {pages} pages at page {page} of {self.volume} failed"
            next_step = f"see agentctl volume ls and agentctl why volume/{self.volume}, and try again"
            raise RemoteMemoryError(what, failed[0], next_step)


_open: "weakref.WeakSet[RemoteMemory]" = weakref.WeakSet()


def _in_the_child() -> None:
    """After a fork, begin anew at once, before a descriptor of the parent could outlive it here."""
    for memory in list(_open):
        memory._begin_here()


os.register_at_fork(after_in_child=_in_the_child)


def _opened_again(volume: str, size_bytes: int, path: str, agent_socket: str) -> RemoteMemory:
    """Open the volume again, for pickle. It never makes one: on another host that would be a different, empty
    volume."""
    return RemoteMemory.open(volume, size_bytes, agent_socket, create=False) if agent_socket else RemoteMemory.at(path)


def _this() -> ProcessId:
    """This process, as the agent finds it."""
    with open("/proc/self/stat", "rb") as file:
        return ProcessId(os.getpid(), int(file.read().rpartition(b")")[2].split()[19]))


def _of_job(path: str) -> tuple[JobId | None, int, str]:
    """Job, epoch and token by which the agent at `path` knows this process; no job for a process outside any job."""
    job, epoch, token = (os.environ.get(f"COVEY_{name}", "") for name in ("JOB_ID", "EPOCH", "TOKEN"))
    if path != os.environ.get("COVEY_SOCKET") or not job or not epoch.isdecimal():
        return None, 0, ""
    return JobId(job), int(epoch), token


class _Told:
    """Logs from time to time what `open` waits for."""

    def __init__(self) -> None:
        self._told_s = time.monotonic()

    def __call__(self, coming: wire.VolumeComing) -> None:
        now_s = time.monotonic()
        if now_s >= self._told_s + TELL_S:
            self._told_s = now_s
            _log.warning("volume %s is not ready yet, and is waited for: %s", coming.volume, coming.why)


def _not_waited_for(coming: wire.VolumeComing) -> None:
    """Raise instead of waiting, for a request that has a time limit of its own."""
    raise RemoteMemoryError(f"volume {coming.volume} is not ready", coming.why, f"agentctl why volume/{coming.volume}")


def _ask_agent(
    path: str, question: wire.Frame, kind: type[F], coming: Callable[[wire.VolumeComing], None] | None = None
) -> F:
    """Join as a tool, ask once, disconnect. Waits as long as the agent says that it is working, unless `coming`, which
    is told, raises. RemoteMemoryError when the agent does not run or refuses."""
    coming = coming or _Told()
    what = f"{type(question).__name__.lower()} {getattr(question, 'volume', '')}"
    try:
        with contextlib.closing(dial(path, ANSWER_S)) as stream:
            stream.sendall(frames.pack(wire.Join(os.getpid(), protocol=wire.PROTOCOL, version=VERSION)))
            stream.sendall(frames.pack(question))
            while True:
                header = bytearray(4)
                receive(stream, memoryview(header))
                body = bytearray(frames.body_size(header))
                receive(stream, memoryview(body))
                frame: msgspec.Struct | None = frames.unpack(body, wire.decoder)
                if isinstance(frame, kind):
                    return frame
                if isinstance(frame, wire.VolumeComing):
                    coming(frame)
                if isinstance(frame, wire.Joined):
                    frame = wire.other_protocol(what, "covey-agent", frame)
                if isinstance(frame, wire.Refusal):
                    raise RemoteMemoryError(frame.what, frame.why, frame.next)
    except OSError as error:
        raise RemoteMemoryError(
            what, f"the agent at {path} does not answer: {error}", "check that agentd runs here"
        ) from error
