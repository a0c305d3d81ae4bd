"""Memory whose faults the pager of a volume answers: the half of `RemoteArray` that talks to the pager.

The script keeps its own copy of the userfaultfd: without it, the kernel would answer faults with zeros once the pager
is dead. So a thread may wait for a pager that does not exist any more. Then the lifeline, a pair of sockets whose other
end the pager and its keeper hold, makes the kernel end the script.
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import mmap
import os
import signal
import socket
import threading
import time
import weakref

from covey.arrays.remote_memory import RemoteMemory
from covey.arrays.volume_link import RemoteMemoryError, ask_for_door
from covey.kernel import memfd, userfault
from covey.wire import array_wire as arraywire
from covey.wire.array_wire import ArrayDone, ArrayOpened, ArrayRefused, ArrayResumed, AskArray, OpenArray

OPEN_S = 30.0
"""Longest wait in seconds for the volume's pager when an array is opened."""
ASK_S = 150.0
"""Longest wait in seconds for an answer of the pager, which tries for 90 s to do what it was asked for."""
PART_S = 10.0
PAUSE_S = 0.05
LOST_SIGNAL = signal.SIGBUS
_F_SETSIG = 10


class ArrayMemory(mmap.mmap):
    """The mapped memory, which keeps its `owner`, and by that its connection to the pager, as long as any view of it
    exists: a script may keep only the `array` of a `RemoteArray`."""

    owner: "FaultedMemory | None" = None


class FaultedMemory:
    """The memory of one array, and the connection to its pager."""

    def __init__(
        self, memory: RemoteMemory, faults: int, offset: int, size: int, chunk: int, budget: int, writable: bool
    ) -> None:
        """Map the memory, and open it at the pager. `faults`: a userfaultfd of this process, which is always closed
        here."""
        self._volume = memory.volume
        self._lock = threading.Lock()
        self._id = 0
        self._kept = contextlib.ExitStack()
        with contextlib.ExitStack() as soon, contextlib.ExitStack() as kept:
            kept.callback(os.close, faults)
            descriptor = os.memfd_create("covey-array", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            soon.callback(os.close, descriptor)
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, memfd.F_ADD_SEALS, memfd.SHRINK | memfd.GROW | memfd.SEAL)
            self.view = ArrayMemory(descriptor, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
            self.view.owner = self
            self.view.madvise(mmap.MADV_DONTFORK)
            self._at = address = _address(self.view)
            userfault.register(faults, address, size)
            self._lifeline, theirs = socket.socketpair()
            kept.callback(self._lifeline.close)
            soon.callback(theirs.close)
            self._connection = _connected(memory)
            kept.callback(self._connection.close)
            opened = OpenArray(arraywire.VERSION, offset, size, chunk, budget, address, writable)
            given = [faults, descriptor, theirs.fileno(), _standard_error(soon)]
            socket.send_fds(self._connection, [arraywire.pack(opened)], given)
            self._hear_opened()
            self._watch()
            self._kept = kept.pop_all()
        _served.add(self)

    def _hear_opened(self) -> None:
        self._connection.settimeout(OPEN_S)
        what = f"no array on volume {self._volume}"
        try:
            data = self._connection.recv(arraywire.MESSAGE_BYTES_MAX)
            answer = arraywire.unpack(data, arraywire.to_array)
        except (OSError, TimeoutError) as error:
            why = f"its pager gave no answer: {error}"
            raise RemoteMemoryError(what, why, f"see logs/pager-{self._volume}.log") from error
        if isinstance(answer, ArrayRefused):
            raise RemoteMemoryError(answer.what, answer.why, answer.next)
        if not isinstance(answer, ArrayOpened):
            raise RemoteMemoryError(what, f"its pager answered {answer}", "install wheels of one version")

    def _watch(self) -> None:
        """From now on the kernel sends SIGBUS when no process answers faults any more. A thread that waits for a fault
        holds the interpreter's lock, so Python code could not tell it; `faulthandler` prints the line where it
        waits."""
        if not faulthandler.is_enabled():
            with contextlib.suppress(OSError, ValueError, AttributeError):
                faulthandler.enable()
        lifeline = self._lifeline.fileno()
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, _F_SETSIG, LOST_SIGNAL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        self._stop_watching = weakref.finalize(self, _unwatched, lifeline)
        """Stops the SIGBUS before anything here is closed, because the object is collected, or the script ends."""

    def ask(self, question: AskArray) -> ArrayDone:
        """Ask one question at a time, and again of a pager that took over. RemoteMemoryError without an answer in
        time."""
        with self._lock:
            self._id += 1
            sent = arraywire.pack(AskArray(self._id, question.what, question.first, question.end))
            until_s = time.monotonic() + ASK_S
            try:
                self._connection.settimeout(ASK_S)
                self._connection.send(sent)
                while (left_s := until_s - time.monotonic()) > 0:
                    self._connection.settimeout(left_s)
                    data = self._connection.recv(arraywire.MESSAGE_BYTES_MAX)
                    answer = arraywire.unpack(data, arraywire.to_array)
                    if isinstance(answer, ArrayResumed):
                        self._connection.send(sent)
                    elif isinstance(answer, ArrayDone) and answer.id == self._id:
                        return answer
            except TimeoutError:
                pass
            except OSError as error:
                why = f"its pager is gone: {error}"
                raise RemoteMemoryError(f"{question.what} of an array failed", why, "open it again") from error
            why = f"its pager gave no answer within {ASK_S:g} s"
            raise RemoteMemoryError(
                f"{question.what} of an array failed", why, f"see agentctl why volume/{self._volume}"
            )

    def close(self) -> None:
        """Save what was written to the volume, and release the memory: remaining views of it cannot be touched any
        more."""
        try:
            answer = self.ask(AskArray(0, "save"))
            if answer.why:
                next_step = "the pager goes on trying for a minute; see agentctl volume ls"
                raise RemoteMemoryError("not all of the array reached its volume", answer.why, next_step)
        finally:
            self._stop_watching()
            self._unmap()
            self._part()
            self._kept.close()

    def _part(self) -> None:
        """Wait a moment until the pager has ended this array: then these bytes of the volume can be opened again."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.settimeout(PART_S)
            while self._connection.recv(arraywire.MESSAGE_BYTES_MAX):
                pass

    def _unmap(self) -> None:
        try:
            self.view.close()
        except BufferError:  # views of it live
            _forbid(self.view)

    def forget(self) -> None:
        """In a forked child: close what was inherited, and send nothing. The addresses stay taken: the child's own
        memory must not be mapped where old views point, nor be unmapped with them."""
        with contextlib.suppress(OSError):
            self._kept.close()
        if not _take_addresses(self._at, len(self.view)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.view))  # never unmapped: other memory is there by now

    def __del__(self) -> None:
        """No view of the memory exists any more: the pager notices that, and saves what was written."""
        with contextlib.suppress(OSError, AttributeError):
            self._kept.close()


def _address(view: mmap.mmap) -> int:
    import numpy

    return int(numpy.frombuffer(view, numpy.uint8).ctypes.data)


def _unwatched(lifeline: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) & ~os.O_ASYNC)


_served: "weakref.WeakSet[FaultedMemory]" = weakref.WeakSet()


def _in_the_child() -> None:
    """Forget all arrays in a forked child: it has no such memory (MADV_DONTFORK), and the connections are the
    parent's."""
    for memory in list(_served):
        memory.forget()


os.register_at_fork(after_in_child=_in_the_child)
_ONLY_IF_FREE, _NO_RESERVE, _PRIVATE_ANONYMOUS = 0x100000, 0x4000, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""Values of MAP_FIXED_NOREPLACE and MAP_NORESERVE."""


def _take_addresses(address: int, size: int) -> bool:
    """Map inaccessible memory at these addresses. False when something was mapped in a part of them already; the rest
    is taken."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    flags = _ONLY_IF_FREE | _NO_RESERVE | _PRIVATE_ANONYMOUS
    parts, whole = [(address, size)], True
    while parts:
        at, length = parts.pop()
        there = libc.mmap(ctypes.c_void_p(at), ctypes.c_size_t(length), 0, flags, -1, ctypes.c_long(0))
        if there != at:
            whole = False
            half = length // 2 // mmap.PAGESIZE * mmap.PAGESIZE
            if half:
                parts += [(at, half), (at + half, length - half)]
    return whole


def _forbid(view: mmap.mmap) -> None:
    """From now on touching the memory is a SIGSEGV, since it is not the array any more."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect(ctypes.c_void_p(_address(view)), ctypes.c_size_t(len(view)), 0)


def _standard_error(stack: contextlib.ExitStack) -> int:
    with contextlib.suppress(OSError):
        os.fstat(2)
        return 2
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    stack.callback(os.close, nowhere)
    return nowhere


def _connected(memory: RemoteMemory) -> socket.socket:
    """A connection to the volume's pager, which the volume's process starts when it does not run."""
    until_s = time.monotonic() + OPEN_S
    asked_s = float("-inf")
    while True:
        path, token = memory.found(False)
        there = os.path.join(os.path.dirname(path), f"arr-{memory.volume}.sock")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(there)
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > until_s:
                what = f"cannot reach the pager of volume {memory.volume}"
                raise RemoteMemoryError(what, str(error), f"see logs/pager-{memory.volume}.log") from error
        if time.monotonic() > asked_s + 1.0:
            asked_s = time.monotonic()
            with contextlib.suppress(OSError):
                ask_for_door(memory.volume, path, token)
            continue
        time.sleep(PAUSE_S)
