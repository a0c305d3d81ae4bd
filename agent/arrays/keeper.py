"""The program `pager`: one per volume whose arrays are in use, started by the volume's process.

It listens on `arr-NAME.sock`, checks what a job hands over, and starts a process for each array by fork. It holds the
descriptors of every array as long as that process lives, so that a pager which is killed costs its job a pause and
nothing else: the next one finds in the memory what was there. When this process is killed as well, the job's lifeline
ends, and the kernel sends the job SIGBUS: it must not read zeros where its content was.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import stat
import time

from agent.arrays.pager import ArrayGiven, Pager, complain
from agent.ports.network.peers import peer_of
from agent.ports.network.unix_sockets import bind_unix
from covey.arrays.volume_link import RemoteMemoryError, VolumeLink
from covey.kernel import memfd, userfault
from covey.ports.env import Env
from covey.wire import array_wire as arraywire
from covey.wire.array_wire import ArrayOpened, ArrayRefused, ArrayWireError, OpenArray
from plugins.base import Program
from plugins.memory.datapath.doors.array_door import PagerConfig, array_socket
from plugins.memory.policy.arrays.residence import CHUNKS_MIN

HELLO_S = 5.0
"""Seconds that a new connection may take to hand over its array."""
STRANGERS_MAX = 64
"""The most connections that have not done so yet; further ones are closed."""
ARRAYS_MAX = 256
IDLE_S = 60.0
"""Seconds without an array after which this process ends."""
IDLE_LOOK_S = AGAIN_S = 1.0
LIVES_MAX = 5
"""The most pagers of one array that may die."""


class ArrayImpossible(Exception):
    """Why an array is not served."""


class KeptArray:
    """One array and the process that answers its faults."""

    def __init__(self, given: ArrayGiven, lock: int) -> None:
        self.given, self.lock = given, lock
        self.deaths = 0
        self.pid = 0

    def close(self) -> None:
        self.given.connection.close()
        for descriptor in (self.given.faults, self.given.memory, self.given.lifeline, self.given.errors, self.lock):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class Keeper:
    """The arrays of one volume, and the socket where they are handed over. It listens from `open` to `close`."""

    def __init__(self, env: Env, config: PagerConfig) -> None:
        self._env, self._config = env, config
        self._path = array_socket(env.run_dir, config.volume)
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._strangers: dict[socket.socket, asyncio.TimerHandle] = {}
        self.arrays: list[KeptArray] = []
        self.used_s = env.clock.now_s()

    def open(self) -> None:
        """Listen. OSError when another process does it already."""
        self._listener = bind_unix(self._path, socket.SOCK_SEQPACKET, self._config.uid)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Serve no new array; pagers keep running until their jobs have ended."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        for stranger in list(self._strangers):
            self._part(stranger)

    # ---- strangers ----

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            stranger, _ = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) >= STRANGERS_MAX:
            stranger.close()
            return
        stranger.setblocking(False)
        self._strangers[stranger] = self._loop.call_later(HELLO_S, self._part, stranger)
        self._loop.add_reader(stranger, self._hear, stranger)

    def _part(self, stranger: socket.socket) -> None:
        self._leave(stranger)
        stranger.close()

    def _leave(self, stranger: socket.socket) -> None:
        timer = self._strangers.pop(stranger, None)
        if timer is not None:
            timer.cancel()
            self._loop.remove_reader(stranger)

    def _hear(self, stranger: socket.socket) -> None:
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                stranger, arraywire.MESSAGE_BYTES_MAX + 1, arraywire.DESCRIPTORS + 1
            )
        except BlockingIOError:
            return
        except OSError:
            self._part(stranger)
            return
        self._leave(stranger)
        self.used_s = self._env.clock.now_s()
        lock = -1
        try:
            given = self._given(stranger, data, descriptors, flags)
            lock = self._locked(given.opened)
            self._begin(KeptArray(given, lock))
        except ArrayImpossible as refused:
            self._refuse(stranger, str(refused))
        except ConnectionError as error:
            self._env.log.warning("a process sent an invalid request to open an array", why=str(error))
            stranger.close()
        except OSError as error:  # no process, no descriptor, no disk for the file of locks
            self._env.log.error("an array cannot be served", why=str(error))
            self._refuse(stranger, f"this host cannot serve arrays: {error}")
            if lock >= 0:
                os.close(lock)
        else:
            return
        for descriptor in descriptors:
            os.close(descriptor)

    def _refuse(self, stranger: socket.socket, why: str) -> None:
        what = f"no array on volume {self._config.volume}"
        with contextlib.suppress(OSError):
            frame = ArrayRefused(what, why[:600], "see docs/guides/memory.md, Arrays")
            stranger.send(arraywire.pack(frame), socket.MSG_NOSIGNAL)
        stranger.close()

    def _given(self, stranger: socket.socket, data: bytes, descriptors: list[int], flags: int) -> ArrayGiven:
        """What a connection handed over. ArrayImpossible for what cannot be served, ArrayWireError for what is no
        opening."""
        config = self._config
        pid, uid = peer_of(stranger)
        if not may_use(uid, config.uid):
            raise ArrayImpossible(f"it belongs to another user (uid {config.uid}), and this process has uid {uid}")
        opened = arraywire.unpack(data, arraywire.to_pager)
        if not isinstance(opened, OpenArray) or flags & socket.MSG_CTRUNC or len(descriptors) != arraywire.DESCRIPTORS:
            raise ArrayWireError("expected one message with four descriptors")
        why = arraywire.wrong(opened, config.size_bytes, config.page_bytes, userfault.PAGE_BYTES)
        if not why and opened.budget < CHUNKS_MIN * opened.chunk:
            why = (
                f"a local budget of {opened.budget} bytes is too small: at least "
                f"{CHUNKS_MIN} chunks of {opened.chunk} are needed"
            )
        if not why and len(self.arrays) >= ARRAYS_MAX:
            why = f"{ARRAYS_MAX} arrays of this volume, the limit, are open"
        faults, memory, lifeline, errors = descriptors
        why = why or wrong_descriptors(faults, memory, lifeline, opened.size)
        if why:
            raise ArrayImpossible(why)
        return ArrayGiven(opened, stranger, faults, memory, lifeline, errors, pid, uid)

    def _locked(self, opened: OpenArray) -> int:
        """A lock on these bytes of the volume for an array that writes them; it goes with the last process that has
        this descriptor. Two arrays that write the same bytes would overwrite one another's, a chunk at a time."""
        file = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if opened.writable:
                lock = arraywire.LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, opened.offset, opened.size, 0)
                fcntl.fcntl(file, arraywire.F_OFD_SETLK, lock)
        except OSError as error:
            os.close(file)
            where = f"bytes {opened.offset} to {opened.offset + opened.size}"
            raise ArrayImpossible(
                f"another array writes to {where} of it; close that one, or open this one with mode='r'"
            ) from error
        return file

    # ---- arrays ----

    def _begin(self, array: KeptArray) -> None:
        """Start the pager of an array. OSError: no process could be started."""
        self._start(array, False)
        self.arrays.append(array)
        self._env.log.info("array opened", uid=array.given.uid, of=array.given.pid, pager=array.pid)

    def _start(self, array: KeptArray, resumed: bool) -> None:
        array.given.connection.setblocking(True)
        array.pid = os.fork()
        if array.pid == 0:
            in_the_pager(self._env, self._config, array, resumed)
        try:
            handle = os.pidfd_open(array.pid)
        except OSError:
            os.kill(array.pid, signal.SIGKILL)
            os.waitpid(array.pid, 0)
            raise
        self._loop.add_reader(handle, self._ended, array, handle)

    def _ended(self, array: KeptArray, handle: int) -> None:
        self._loop.remove_reader(handle)
        os.close(handle)
        _, status = os.waitpid(array.pid, 0)
        self.used_s = self._env.clock.now_s()
        if status == 0:
            self.arrays.remove(array)
            array.close()
            return
        array.deaths += 1
        self._env.log.error("a pager died", status=status, deaths=array.deaths, of=array.given.pid)
        if array.deaths < LIVES_MAX:
            self._start_again(array)
            return
        complain(array.given, f"array of volume {self._config.volume} is lost", "its pager died again and again")
        self.arrays.remove(array)
        array.close()

    def _start_again(self, array: KeptArray) -> None:
        """Start a pager again, however often it takes: threads of the job wait for it."""
        try:
            self._start(array, True)
        except OSError as error:
            self._env.log.error("a pager cannot be started again yet", why=str(error), of=array.given.pid)
            self._loop.call_later(AGAIN_S, self._start_again, array)


def may_use(uid: int, owner: int) -> bool:
    """Whether a process of user `uid` may use a volume of user `owner`. Root and the agent's own user may; `owner` -1:
    no other may. A user whom the kernel does not tell may not."""
    return uid >= 0 and uid in (owner, 0, os.geteuid())


def wrong_descriptors(faults: int, memory: int, lifeline: int, size: int) -> str:
    """Why these descriptors cannot be those of an array; empty: they can."""
    if not userfault.is_one(faults):
        return "its first descriptor is not a userfaultfd"
    if not stat.S_ISSOCK(os.fstat(lifeline).st_mode):
        return "its third descriptor is not a socket"
    try:
        seals = fcntl.fcntl(memory, memfd.F_GET_SEALS)
    except OSError:
        return "its second descriptor is not sealed memory"
    found = os.fstat(memory)
    fixed = memfd.SHRINK | memfd.GROW
    if seals & fixed != fixed or seals & ~(fixed | memfd.SEAL) or found.st_size != size:
        return f"its memory has {found.st_size} bytes and seals {seals:#x}, not {size} and {fixed:#x}"
    if found.st_blksize != userfault.PAGE_BYTES:
        return f"its memory has pages of {found.st_blksize} bytes"
    return ""


def in_the_pager(env: Env, config: PagerConfig, array: KeptArray, resumed: bool) -> None:
    """Run the pager in the new process; it does not return. Of the keeper it has the descriptors of its array and its
    log, no more."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        kept = {0, 1, 2, array.lock, *array.given.descriptors}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in kept:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        link = VolumeLink(config.volume, lambda again: (config.path, config.token), time.monotonic)
        link.connect()
        pager = Pager(array.given, link, env.log, resumed)

        def end(number: int, frame: object) -> None:
            pager.ending = True

        signal.signal(signal.SIGTERM, end)
        if not resumed:
            answer = arraywire.pack(ArrayOpened(array.given.opened.budget))
            array.given.connection.send(answer, socket.MSG_NOSIGNAL)
        pager.run()
        status = 0
    except (RemoteMemoryError, OSError) as error:
        env.log.error("a pager ends", why=str(error))
    finally:
        os._exit(status)


async def run_keeper(env: Env, config: PagerConfig) -> None:
    """Run the program. OSError when another process serves arrays of this volume. It ends by SIGTERM, or when it has
    had no array for a minute."""
    keeper = Keeper(env, config)
    keeper.open()
    try:
        while keeper.arrays or env.clock.now_s() < keeper.used_s + IDLE_S:  # noqa: ASYNC110
            await asyncio.sleep(IDLE_LOOK_S)
    finally:
        keeper.close()


PROGRAM = Program("pager", PagerConfig, run_keeper)
