"""Covey's programs as forks of one process that has imported their code: in memory once, and up in milliseconds.

    agentd --fork, before it reads a key or starts a thread--> forker --fork--> vold, spill, a supervisor ...
           --(ForkWanted: its words, and three descriptors)------>
           <-(ProgramForked | ForkRefused)--------
           --(ForkGoes)-------------------------->         <-(ForkEnded: its exit status)--

A program begins only once whoever asked has heard of it (`ForkGoes`): where that has ended, was cancelled, or does not
wait any longer and executes it instead, the fork ends without having done anything. So none runs twice, or unknown.

A volume's two programs have 63 MiB of their own where they import what they need, and 20 as forks: they share the rest
with the agent (docs/results/memory.md). A fork is a process like one that was executed: a session of its own, words and
variables that `ps` and /proc show (PR_SET_MM_MAP), nothing open but what it is given. It outlives the agent. The forker
does not: it ends once the agent's end of their socket is closed. Where a kernel does not let processes change their
words (CONFIG_CHECKPOINT_RESTORE), or the forker is gone, programs are executed.
"""

import array
import asyncio
import contextlib
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import select
import signal as signals
import socket
import struct
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from agent.ports.processes.inheritance import NOT_INHERITED
from agent.ports.processes.procfs import start_ticks
from covey.ports.processes import ProcessId

PR_SET_NAME, PR_SET_MM, PR_SET_MM_MAP = 15, 35, 14
MM_FIELDS = (26, 27, 45, 46, 47)
"""Fields of /proc/self/stat: where code, data and heap begin and end (`prctl_mm_map` of linux/prctl.h)."""
START_STACK = 28
NO_FILE = (1 << 32) - 1
FILES = 3
"""Descriptors that come with each wish: standard input, output, and the pipe of `LOADED_FD`."""
FILES_MAX = 1 << 20
"""More descriptors than any process has here."""
LOADED_AT, ASKS_AT = 3, 4
"""Descriptors of a program: that pipe, and its own socket to the forker."""
ENDS = (signals.SIGTERM, signals.SIGINT, signals.SIGHUP)
"""Signals that the forker ignores: it ends with its agent, also where everything is asked to end."""
FRAME_BYTES_MAX = 1 << 16
FORKED_S = 5.0
"""The most seconds until the forker has forked; afterwards it counts as gone."""
TOLD_S = 1.0
"""The most seconds between the end of a program and its exit status."""


class ForkWanted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Fork a program; the first of its words is the interpreter."""

    number: int
    words: tuple[str, ...]
    cwd: str
    loaded: str
    """The variable that names the pipe by which it tells that it is loaded."""


class ProgramForked(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The program runs."""

    number: int
    pid: int
    ticks: int


class ForkRefused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The program could not be forked, or its folder not be entered."""

    number: int
    errno: int


class ForkGoes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The program may begin, or is to end at once: nobody waits for it."""

    pid: int
    goes: bool


class ForkEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The program has ended; a negative status is the number of a signal."""

    pid: int
    ticks: int
    status: int


Told = msgspec.msgpack.Decoder(ProgramForked | ForkRefused | ForkEnded)
Asked = msgspec.msgpack.Decoder(ForkWanted | ForkGoes)
GO = b"go"


of_program: list["Forker"] = []
"""The forker of this process, where that is a program that was forked."""


class NotForked(Exception):
    """There is no forker, it does not answer, or it cannot fork this program: it is executed instead."""


class Forked(NamedTuple):
    """A program that runs, and the future of its exit status; None: nobody tells."""

    id: ProcessId
    status: "asyncio.Future[int | None]"


class Forker:
    """An end of the forker's socket, in its agent or in a program that was forked."""

    def __init__(self, end: socket.socket, pid: int = 0) -> None:
        """`pid`: the forker, where that is a child of this process."""
        self._end, self.pid = end, pid
        end.setblocking(False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: dict[int, asyncio.Future[Forked | ForkRefused]] = {}
        self._running: dict[ProcessId, asyncio.Future[int | None]] = {}
        self._count = 0
        self.is_gone = False

    async def start(self, words: Sequence[str], cwd: str, files: Sequence[int], loaded: str) -> Forked:
        """Fork a program with these words, which begins in `cwd`. `files`: its standard input, its output, and the pipe
        of the variable `loaded`. NotForked."""
        if self.is_gone:
            raise NotForked
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._end, self._heard)
        number = self._count = self._count + 1
        answer = self._asked[number] = self._loop.create_future()
        wish = msgspec.msgpack.encode(ForkWanted(number, tuple(words), cwd, loaded))
        told: Forked | ForkRefused | None = None
        try:
            socket.send_fds(self._end, [wish], list(files))
            async with asyncio.timeout(FORKED_S):
                told = await answer
            if isinstance(told, ForkRefused):
                raise NotForked(os.strerror(told.errno))
            self._end.send(msgspec.msgpack.encode(ForkGoes(told.id.pid, True)))
            return told
        except (OSError, TimeoutError) as error:
            self._lost()
            raise NotForked from error
        finally:
            self._asked.pop(number, None)
            if told is None and answer.done() and not answer.cancelled() and not answer.exception():
                self._drop(answer.result())  # cancelled in the instant in which it was forked

    def _drop(self, told: Forked | ForkRefused) -> None:
        """Nobody waits for this program any longer."""
        if isinstance(told, Forked):
            try:
                self._end.send(msgspec.msgpack.encode(ForkGoes(told.id.pid, False)))
            except OSError:
                self._lost()

    def _heard(self) -> None:
        try:
            data = self._end.recv(FRAME_BYTES_MAX)
            told = Told.decode(data) if data else None
        except BlockingIOError:
            return
        except (OSError, msgspec.DecodeError):
            told = None
        if told is None:
            self._lost()
        elif isinstance(told, ForkEnded):
            _settle_with(self._running.pop(ProcessId(told.pid, told.ticks), None), told.status)
        else:
            said: Forked | ForkRefused
            if isinstance(told, ProgramForked):
                said = Forked(ProcessId(told.pid, told.ticks), asyncio.get_running_loop().create_future())
                self._running[said.id] = said.status
            else:
                said = told
            answer = self._asked.get(told.number)
            if answer is None or answer.done():
                self._drop(said)
            else:
                answer.set_result(said)

    def _lost(self) -> None:
        if self.is_gone:
            return
        self.is_gone = True
        if self._loop is not None:
            self._loop.remove_reader(self._end)
        self._end.close()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(NotForked())
        for status in self._running.values():
            _settle_with(status, None)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid or os.getpid(), os.WNOHANG)


def _settle_with(future: "asyncio.Future[Any] | None", value: Any) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def begin(run: Callable[[], None]) -> Forker:
    """Fork the forker of this process, which has no threads but those of libraries that end them at a fork. Returns in
    this process alone; `run` is called in each program. NotForked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gc.collect()
    gc.freeze()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        pid = _fork()
    except OSError as error:
        raise NotForked from error
    if pid:
        theirs.close()
        return Forker(ours, pid)
    ours.close()
    _serve(theirs)
    run()
    sys.exit(0)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of libraries, which end them at a fork
        return os.fork()


def _serve(end: socket.socket) -> None:
    """Fork what is asked for, until the agent has ended. Returns in each program alone."""
    os.closerange(3, end.fileno())
    os.closerange(end.fileno() + 1, FILES_MAX)
    before = {number: signals.signal(number, signals.SIG_IGN) for number in ENDS}
    with contextlib.suppress(OSError):
        os.setsid()
    for name in NOT_INHERITED:
        os.environ.pop(name, None)
    try:
        _be_called((sys.executable, "-P", "-m", "agent.program", "forker"), os.environ)
    except OSError:
        os._exit(0)
    poll = select.poll()
    waiting: dict[int, tuple[socket.socket, socket.socket]] = {}
    """By pid, programs that may not begin yet: the end of each, and of whoever asked for it."""
    ends, children = {end.fileno(): end}, dict[int, tuple[ProcessId, socket.socket]]()
    poll.register(end, select.POLLIN)
    while True:
        for file, _ in poll.poll():
            if file in children:
                poll.unregister(file)
                os.close(file)
                child, asker = children.pop(file)
                waiting.pop(child.pid, None)
                status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
                _tell(asker, ForkEnded(child.pid, child.started, status))
                continue
            asker = ends[file]
            data, files = _asked(asker)
            if not data and asker is end:
                os._exit(0)
            if not data:
                poll.unregister(file)
                ends.pop(file)
                for pid in [pid for pid, (_, asked_by) in waiting.items() if asked_by is asker]:
                    _let(waiting.pop(pid)[0], False)
                asker.close()
                continue
            wanted = Asked.decode(data)
            if isinstance(wanted, ForkGoes):
                if wanted.pid in waiting:
                    _let(waiting.pop(wanted.pid)[0], wanted.goes)
                continue
            begun = _forked(wanted, files)
            if begun is None:
                for each_end in ends.values():
                    each_end.detach()
                for number, handler in before.items():
                    signals.signal(number, handler)
                return
            for each in files:
                os.close(each)
            if isinstance(begun, int):
                _tell(asker, ForkRefused(wanted.number, begun))
                continue
            id, its_end = begun
            _tell(asker, ProgramForked(wanted.number, id.pid, id.started))
            watched = os.pidfd_open(id.pid)
            children[watched], ends[its_end.fileno()] = (id, asker), its_end
            waiting[id.pid] = its_end, asker
            poll.register(watched, select.POLLIN)
            poll.register(its_end, select.POLLIN)


def _let(its_end: socket.socket, goes: bool) -> None:
    """Let a program begin, or end."""
    with contextlib.suppress(OSError):  # it was killed
        its_end.send(GO if goes else b"no")


def _asked(asker: socket.socket) -> tuple[bytes, list[int]]:
    try:
        data, files, _, _ = socket.recv_fds(asker, FRAME_BYTES_MAX, FILES)
    except ConnectionError:
        return b"", []
    return data, files


def _tell(end: socket.socket, told: ProgramForked | ForkRefused | ForkEnded) -> None:
    with contextlib.suppress(OSError):  # whoever asked has ended
        end.send(msgspec.msgpack.encode(told))


def _forked(wanted: ForkWanted, files: Sequence[int]) -> tuple[ProcessId, socket.socket] | int | None:
    """The program that was forked, with this end of its own socket, or the number of an error; None in the program."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hears, tells = os.pipe()
        pid = _fork()
    except OSError as error:
        return error.errno or errno.EAGAIN
    if not pid:
        ours.detach()  # a socket that is collected closes its number, whatever is under that by then
        try:
            _settle(wanted, (*files, theirs.detach(), tells))
        except OSError as error:
            os.write(tells, array.array("i", [error.errno or errno.EINVAL]).tobytes())
            os._exit(1)
        return None
    theirs.close()
    os.close(tells)
    said = os.read(hears, 16)  # it has a session of its own then, so it can be killed with what it starts
    os.close(hears)
    if said:
        os.waitpid(pid, 0)
        ours.close()
        return int(array.array("i", said)[0])
    return ProcessId(pid, start_ticks(pid) or 0), ours


def _settle(wanted: ForkWanted, files: Sequence[int]) -> None:
    """Make this process what `subprocess` would have made it: its session, descriptors, folder, words and variables.
    The last of its files is closed then."""
    os.setsid()
    os.chdir(wanted.cwd)
    high = max(*files, ASKS_AT) + 1
    given, output, loaded, asks, said = (fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, high) for file in files)
    for to, file in enumerate((given, output, output)):
        os.dup2(file, to)
    os.dup2(loaded, LOADED_AT, inheritable=False)
    os.dup2(asks, ASKS_AT, inheritable=False)
    os.closerange(ASKS_AT + 1, said)
    os.closerange(said + 1, FILES_MAX)
    os.environ[wanted.loaded] = str(LOADED_AT)
    sys.argv[:] = wanted.words[3:]
    _be_called(wanted.words, os.environ)
    os.close(said)
    own = socket.socket(fileno=ASKS_AT)
    if own.recv(len(GO)) != GO:
        os._exit(0)
    of_program[:] = [Forker(own)]


_words: list[mmap.mmap] = []
"""The memory where the kernel finds this process's words and variables."""


def _be_called(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Have /proc show these words and variables of this process. OSError where the kernel does not allow it."""
    argv = b"".join(os.fsencode(word) + b"\0" for word in words)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    # the kernel reads these of private memory alone
    memory = mmap.mmap(-1, len(argv) + len(variables) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(argv + variables)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    bounds = [int(fields[number - 3]) for number in MM_FIELDS]
    stack, heap, middle = int(fields[START_STACK - 3]), libc.sbrk(0), at + len(argv)
    strings = (at, middle, middle, middle + len(variables))
    packed = struct.pack("=11QQII", *bounds, heap, stack, *strings, 0, 0, NO_FILE)
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.c_char_p(packed), len(packed), 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP)")
    libc.prctl(PR_SET_NAME, os.fsencode(os.path.basename(words[0]))[:15], 0, 0, 0)
    _words[:] = [memory]
