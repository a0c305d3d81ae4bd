"""The shim: one small process between a supervisor and a rank, which outlives the supervisor (as containerd's does).

    supervisor --start--> shim --fork--> rank     PATH.run    who the rank and its shim are; the rank begins after it
                           |  ^           |        PATH.exit   how the rank ended, whole or not at all, on disk
                           |  +---pipe----+        OUTPUT      what it wrote: head and ring

It adopts the processes that the rank leaves behind, so that they can be found and ended, and exits once none of them is
left and all output is on disk. `kill -9` of a shim costs its rank, whose exit status would be lost and whose output
nothing would read.

Output goes through the shim since nothing else bounds it without a race: the rank may write at any speed, and the shim
handles a full disk, which would otherwise raise in the training script. A pipe to the supervisor or to the agent would
end the rank with them. Of OUTPUT the first quarter of what it may hold is kept for good (how it began: the arguments,
the versions), then a ring of twelve parts with the newest of the rest:

    rank0.log                   the head
    rank0.log.000000067108864   a part; the number is the offset of its first byte in all that was ever written

So offsets never change their meaning, and what was dropped is the gap between head and first part. When it was written
stands beside it in `rank0.log.times` (`Times`). All of it goes to a file of the user's choice as well (`UsersFile`), or
to two: standard error by itself.

What is printed leaves the last room of the disk to others (`agent/ports/last_room.py`): the oldest part goes, or where
there is none what is new is lost, and a line says so.

A *spare* (`config["control"]`, a socket of whoever keeps it) is a process that waits before it does anything of its
script (`covey.hooks.warm`). It has no record and no output until it is taken for a rank: what it is then comes over
that socket, and from there on it is a rank like any other. Its shim ends it once no process holds the other end.

    keeper -- marshal: run, output, limit_bytes, cores, given --> shim -- "warm" or why not, then "taken" --> keeper

Run as a script of its own, without site and with one small module of Covey, which says what a rank inherits
(`agent/ports/processes/inheritance.py`): it starts in some 20 ms of CPU and 10 MB.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import marshal
import os
import select
import sys
import time
import zlib

# Neither `signal` nor `typing` at run time: what they import takes longer than all the rest of the start.
from _signal import (  # type: ignore[import-not-found]
    SIG_IGN,
    SIGCHLD,
    SIGHUP,
    SIGINT,
    SIGKILL,
    SIGTERM,
    set_wakeup_fd,
    signal,
)

if not __package__:  # a script of its own: what it shares with the agent lies beside it
    sys.path.append(__file__.rsplit("/", 4)[0])
from agent.ports.processes.inheritance import UMASK, UMASK_UNLESS_SET, begin_anew, umask_of, unblock_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

PR_SET_CHILD_SUBREAPER = 36
HELD_NICE, NICE_LIMIT, CAP_SYS_NICE = 19, 20, 23
PIPE_BYTES = 1 << 20
READ_BYTES = 1 << 18
HEAD_SHARE, PARTS, PART_SHARE = 4, 12, 16
"""The divisors of the limit: a quarter of it for the head, and twelve parts of a sixteenth each."""
PART_DIGITS = 15
LINE_BYTES = 200
"""Bytes of room for the line at the end of the head."""
FIRST_BYTES = 1 << 20
"""How a rank began is of use to everybody: its first bytes, this many, need only half the room left free."""
TIMES_BYTES, TIME_BYTES = 1 << 16, 44
"""The most bytes of the file of times, of which `PART_SHARE` bounds the share too; and of one time in it."""
TIMES_EVERY_S, TIMES_APART = 1.0, 0.02
"""Seconds between two times at least; and the least share of its age by which an old one is apart from the next."""
WRITE_TRIES, RETRY_MS = 30, 1000
"""How often, and how many milliseconds apart, writing the exit status is tried when the disk fails."""
EXIT_BYTES = 64
AT_FAULT_MAX = 2048
"""The most characters of what is at fault, in words: they fit into a pipe at once."""
SPARE = "COVEY_SPARE"
"""The variable of a spare's environment with the descriptors by which it hears what it is, and says that it waits."""
SPARE_LINE_BYTES = 4096
LENGTH_BYTES = 8
GOES_FIRST, ORDINARY = 800, 0
"""The oom_score_adj of a spare, which does no work yet, and of a rank."""


def sealed(text: str) -> bytes:
    """The line with its own checksum."""
    return f"{text} {zlib.crc32(text.encode()):08x}\n".encode()


class Times:
    """When output was written: `OFFSET UNTIL SINCE`, a line for each second in which something was. All before `OFFSET`
    was written at `UNTIL` or earlier, the rest at `SINCE` or later (wall clock, seconds). Old lines go, so that the
    file is bounded: what is left is known to 2 % of its age. No such file: not known, as when it cannot be written."""

    def __init__(self, path: str, mode: int, bytes_max: int) -> None:
        self.path, self.mode, self.most = path, mode, bytes_max // TIME_BYTES
        self.marks: list[tuple[int, float, float]] = []
        self.written_s = 0.0
        """When output was written last."""
        try:
            with open(path, encoding="ascii") as file:
                self.marks = [time_of(line) for line in file]
        except (OSError, ValueError):
            self._gone()

    def wrote(self, offset: int, now_s: float) -> None:
        """Output from `offset` on is written now."""
        until_s, self.written_s = self.written_s, now_s
        if self.marks and 0 <= now_s - self.marks[-1][2] < TIMES_EVERY_S:
            return
        mark = offset, until_s, now_s
        self.marks.append(mark)
        try:
            if len(self.marks) > self.most:
                self.marks = thinned(self.marks, now_s)[-self.most :]
                self._write("w", self.marks)
            else:
                self._write("a", [mark])
        except OSError:
            self._gone()

    def _write(self, how: str, marks: list[tuple[int, float, float]]) -> None:
        name = self.path if how == "a" else f"{self.path}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_APPEND if how == "a" else os.O_TRUNC)
        file = os.open(name, flags, self.mode)
        data = b"".join(b"%d %.2f %.2f\n" % mark for mark in marks)
        try:
            whole = os.write(file, data) == len(data)
        finally:
            os.close(file)
        if not whole:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if name != self.path:
            os.rename(name, self.path)

    def _gone(self) -> None:
        """A file that lacks times would say that output is older than it is."""
        self.marks = []
        for name in (self.path, f"{self.path}.new"):
            try:
                os.unlink(name)
            except OSError:
                pass


def time_of(line: str) -> tuple[int, float, float]:
    """A line of `Times`. ValueError when it is none."""
    offset, until_s, since_s = line.split()
    return int(offset), float(until_s), float(since_s)


def thinned(marks: list[tuple[int, float, float]], now_s: float) -> list[tuple[int, float, float]]:
    """The times of which each is apart from the next by `TIMES_APART` of its age; the first and the last stay."""
    kept = [marks[-1]]
    for mark in reversed(marks[1:-1]):
        if kept[-1][2] - mark[2] >= TIMES_APART * (now_s - mark[2]):
            kept.append(mark)
    return [*marks[:1], *reversed(kept)]


class Output:
    """A rank's output: the head and the ring. Nothing here raises: what cannot be written is dropped, and a line says
    how much."""

    def __init__(self, path: str, limit_bytes: int, keep_free: int = 0, mode: int = 0o600) -> None:
        self.path, self.part_bytes, self.keep_free = path, limit_bytes // PART_SHARE, keep_free
        self.mode = mode
        times_bytes = min(TIMES_BYTES, self.part_bytes)
        self.head_bytes = limit_bytes // HEAD_SHARE - LINE_BYTES - times_bytes
        self.dropped, self.why = 0, ""
        self.file = -1
        self.parts = self._parts()
        self.start = self.end = self.parts[-1] if self.parts else 0
        self._open()
        self.times = Times(f"{path}.times", mode, times_bytes)
        self.times.written_s = os.fstat(self.file).st_mtime if self.end else 0.0

    def _name(self, start: int) -> str:
        return f"{self.path}.{start:0{PART_DIGITS}d}" if start else self.path

    def _parts(self) -> list[int]:
        directory, _, name = self.path.rpartition("/")
        found = [other[len(name) + 1 :] for other in os.listdir(directory) if other.startswith(f"{name}.")]
        return sorted(int(digits) for digits in found if len(digits) == PART_DIGITS and digits.isdigit())

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
        self.file = os.open(self._name(self.start), flags, self.mode)
        self.end = self.start + os.fstat(self.file).st_size

    def take(self, data: bytes) -> None:
        self.times.wrote(self.end, time.time())
        short = self._is_short(len(data))
        if self.dropped and not (short or self._put(self._lost())):
            self.dropped = 0
        if short and not self.dropped:
            self._put(f"\n[covey: output is lost from here on: {self.why}]\n".encode())
        self.dropped += len(data) if short or self.dropped else self._put(data)

    def close(self) -> None:
        """Close the output: the rank and all that it left behind are over; what was lost at the end is said too."""
        if self.dropped:
            self._put(self._lost())

    def _lost(self) -> bytes:
        return f"\n[covey: {self.dropped} bytes of output were lost here: {self.why}]\n".encode()

    def _is_short(self, size: int) -> bool:
        """Whether `size` more bytes would leave too little free; one old part goes then, if there is one."""
        least = self.keep_free if self.end + size > FIRST_BYTES else self.keep_free // 2
        try:
            if not least or free_at(self.file) - size >= least:
                return False
            self.why = f"less than {least >> 20} MiB would be free on this host"
            if len(self.parts) > 1:
                os.unlink(self._name(self.parts.pop(0)))
            return free_at(self.file) - size < least
        except OSError as error:
            self.why = error.strerror or str(error)
            return True

    def _put(self, data: bytes) -> int:
        """Write data, and return how many bytes of it could not be written."""
        view = memoryview(data)
        try:
            while view:
                room = (self.part_bytes if self.start else self.head_bytes) - (self.end - self.start)
                if room <= 0:
                    self._next()
                    continue
                written = os.write(self.file, view[:room])
                self.end += written
                view = view[written:]
        except OSError as error:
            self.why = error.strerror or str(error)
        return len(view)

    def _next(self) -> None:
        """Begin the next part; the oldest one is deleted first, so that the limit holds at every moment."""
        if not self.start:
            kept = (PARTS - 1) * self.part_bytes
            line = (
                f"\n[covey: {self.end} bytes until here; of what follows at least the newest {kept} bytes are kept]\n"
            )
            self.end += os.write(self.file, line.encode())
        while len(self.parts) >= PARTS:
            os.unlink(self._name(self.parts.pop(0)))
        self.start = self.end
        self._open()
        self.parts.append(self.start)


class UsersFile:
    """A file of the user's choice to which a rank's output is added as well, by the user's own umask; empty: none. What
    cannot be written is dropped, and the rank's output says so once. OSError when it cannot be opened, as a named pipe
    that nobody reads: neither its reader nor the rank is waited for."""

    def __init__(self, path: str, output: Output, umask: int) -> None:
        self.path, self.output, self.file = path, output, -1
        if not path:
            return
        before = os.umask(umask)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
            self.file = os.open(path, how, 0o666)
        finally:
            os.umask(before)

    def take(self, data: bytes) -> None:
        try:
            view = memoryview(data) if self.file >= 0 else memoryview(b"")
            while view:
                view = view[os.write(self.file, view) :]
        except OSError as error:
            os.close(self.file)
            self.file = -1
            self.output.take(f"\n[covey: {self.path} gets nothing more: {error.strerror}]\n".encode(errors="replace"))


class Streams:
    """The pipes through which a rank's output comes, each with the file of the user's that gets it too: one pipe, or
    two where standard error has a file of its own."""

    def __init__(self, output: Output, config: dict[str, Any], one_pipe: int = -1) -> None:
        """`one_pipe`: a pipe that there is already; then it is the only one."""
        self.output, also = output, config["also"]
        try:
            umask = umask_of(config["env"])
        except ValueError:
            umask = UMASK_UNLESS_SET  # the rank does not start, and says why
        names = also[:1] if one_pipe >= 0 or not also[1] or also[1] == also[0] else also
        files = [UsersFile(name, output, umask) for name in names]
        pairs = [(one_pipe, -1)] if one_pipe >= 0 else [output_pipe() for _ in files]
        self.files = {out: file for (out, _), file in zip(pairs, files)}  # noqa: B905
        self.ends = (pairs[0][1], pairs[-1][1])
        """What the rank gets as its standard output, and as its standard error."""

    def pump(self, pipe: int) -> int:
        """Move a buffer from a pipe to the disk, and return how many bytes went; 0 when nothing will come any more, -1
        when there is nothing now."""
        try:
            data = os.read(pipe, READ_BYTES)
        except BlockingIOError:
            return -1
        if data:
            self.output.take(data)
            self.files[pipe].take(data)
        return len(data)

    def drain(self) -> None:
        """Move what is in the pipes, and no more than fits into them: a process may go on to write for ever."""
        for pipe in self.files:
            moved = part = 0
            while moved < PIPE_BYTES and (part := self.pump(pipe)) > 0:
                moved += part


def free_at(file: int) -> int:
    """Bytes that any user may still write on the file system of an open file."""
    return (found := os.fstatvfs(file)).f_bavail * found.f_frsize


def started(pid: int) -> int:
    """When this process began, in clock ticks since boot."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def replace(path: str, data: bytes) -> None:
    """Replace a file, whole or not at all, for every reader while this machine runs."""
    file = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.write(file, data)
    os.close(file)
    os.rename(f"{path}.new", path)


class ExitFile:
    """The file of a rank's exit status, allocated beforehand: a full disk loses no exit status."""

    def __init__(self, path: str) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self.file = os.open(f"{path}.new", flags, 0o600)
        os.write(self.file, b" " * EXIT_BYTES)
        os.fsync(self.file)

    def write(self, code: int) -> bool:
        """Write the exit status; whether it is on disk now."""
        try:
            os.pwrite(self.file, sealed(f"exit 1 {code}").ljust(EXIT_BYTES), 0)
            os.fsync(self.file)
            os.rename(f"{self.path}.new", self.path)
            directory = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_CLOEXEC)
            os.fsync(directory)
            os.close(directory)
        except OSError:
            return False
        return True

    def remove(self) -> None:
        os.unlink(f"{self.path}.new")


def become(
    config: dict[str, Any], ends: tuple[int, int], go: int, trouble: int, spare: tuple[int, int] | None
) -> NoReturn:
    """Become the rank: wait until it is written down, then run the user's command. `spare`: the descriptors by which it
    hears and says."""
    at_fault = config["argv"][0]
    try:
        os.setsid()
        if not os.read(go, 1):
            os._exit(127)
        if spare is not None:
            for file in spare:
                os.set_inheritable(file, True)
            config["env"][SPARE] = f"{spare[0]},{spare[1]}"
        begin_anew()
        if spare is not None:
            score("self", GOES_FIRST)
        null = os.open("/dev/null", os.O_RDONLY)
        for target, source in ((0, null), (1, ends[0]), (2, ends[1])):
            os.dup2(source, target)
        at_fault = UMASK
        os.umask(umask_of(config["env"]))
        if config["cores"]:
            at_fault = f"cores {config['cores']}"
            os.sched_setaffinity(0, config["cores"])
        if config.get("held_back"):
            hold_back()
        at_fault = config["cwd"]
        os.chdir(at_fault)
        at_fault = config["argv"][0]
        os.execvpe(at_fault, config["argv"], config["env"])
    except OSError as error:
        os.write(trouble, f"{error.errno} {at_fault[:AT_FAULT_MAX]}".encode(errors="surrogateescape"))
    except ValueError as error:
        os.write(trouble, f"{errno.EINVAL} {at_fault[:AT_FAULT_MAX]}: {error}".encode(errors="replace"))
    os._exit(127)


def hold_back() -> None:
    """Run on what others leave of the cores from now on, as far as that can be taken back
    (`agent/ports/processes/held_back.py`)."""
    try:
        with open("/proc/self/autogroup", "w") as file:
            file.write(str(HELD_NICE))
    except OSError:
        pass  # a kernel without automatic groups
    try:
        if may_be_let_go():
            os.setpriority(os.PRIO_PROCESS, 0, HELD_NICE)
    except (OSError, ValueError):
        pass


def may_be_let_go() -> bool:
    """Whether this user may raise again a priority that he lowered."""
    import resource  # takes longer than all the rest of the start, so only where it is asked for

    if resource.getrlimit(resource.RLIMIT_NICE)[0] >= NICE_LIMIT:
        return True
    with open("/proc/self/status") as file:
        able = [int(line.split()[1], 16) for line in file if line.startswith("CapEff:")]
    return bool(able and able[0] >> CAP_SYS_NICE & 1)


def record(run: str, rank: int) -> None:
    """Write down which processes the rank and its shim are, before the rank begins."""
    own = os.getpid()
    replace(f"{run}.run", sealed(f"run 1 {rank} {started(rank)} {own} {started(own)}"))


def score(pid: int | str, adj: int) -> None:
    """Set how soon the kernel ends a process when memory runs out."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write(str(adj))
    except OSError:
        return


def begin(config: dict[str, Any], ends: tuple[int, int], spare: tuple[int, int] | None = None) -> tuple[int, str]:
    """Start the rank's process, and return it, and why it could not start. `ends`: its standard output and error."""
    go_out, go = os.pipe2(os.O_CLOEXEC)
    trouble, trouble_in = os.pipe2(os.O_CLOEXEC)
    rank = os.fork()
    if rank == 0:
        become(config, ends, go_out, trouble_in, spare)
    for file in {*ends}:
        os.close(file)
    os.close(trouble_in)
    os.close(go_out)
    if spare is None:
        record(config["run"], rank)
    os.write(go, b"g")
    os.close(go)
    wrong = b"".join(iter(lambda: os.read(trouble, 4096), b""))
    os.close(trouble)
    return rank, wrong.decode(errors="replace")


def reap(rank: int) -> tuple[int | None, bool]:
    """Reap ended children: the rank's exit status if it is among them, whether any child is left."""
    code = None
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return code, True
            if pid == rank:
                code = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        return code, False


def keep(rank: int, streams: Streams, ended: ExitFile) -> int:
    """Keep the rank until it and all that it left behind are over, and return its exit status."""
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal(SIGCHLD, lambda _number, _frame: None)
    ready = select.poll()
    for pipe in (*streams.files, woken):
        ready.register(pipe, select.POLLIN)
    code: int | None = None
    tries, left = 0, True
    first = True
    while left or (code is not None and 0 < tries < WRITE_TRIES):
        events = [] if first else ready.poll(RETRY_MS if tries else None)
        first = False
        if any(file == woken for file, _ in events):
            os.read(woken, 4096)
        found, left = reap(rank)
        if found is not None:
            code, tries = found, 1
            streams.drain()  # who hears of its end finds what it wrote
        for file, _ in events:
            if file != woken and streams.pump(file) == 0:
                ready.unregister(file)
        if tries:
            assert code is not None
            tries = 0 if tries >= WRITE_TRIES or ended.write(code) else tries + 1
    streams.drain()
    streams.output.close()
    return 255 if code is None else code


def read_exactly(file: int, size: int) -> bytes:
    """Read `size` bytes; fewer: the other end was closed."""
    found = b""
    while len(found) < size and (part := os.read(file, size - len(found))):
        found += part
    return found


def write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def await_taken(control: int, says: int) -> dict[str, Any] | None:
    """Wait until a spare is told what it is to be; None when its keeper will not say so any more, or it has ended."""
    ready = select.poll()
    ready.register(control, select.POLLIN)
    ready.register(says, select.POLLIN)
    while True:
        for file, _ in ready.poll():
            if file == control:
                length = read_exactly(control, LENGTH_BYTES)
                data = read_exactly(control, int.from_bytes(length, "little"))
                whole = len(length) == LENGTH_BYTES and len(data) == int.from_bytes(length, "little")
                return marshal.loads(data) if whole else None  # noqa: S302  our own parent's
            said = os.read(says, SPARE_LINE_BYTES)
            if not said:
                return None
            write_all(control, said)


def end_spare(spare: int) -> NoReturn:
    """End a spare: it has no rank, and all of its group goes."""
    try:
        os.killpg(spare, SIGKILL)
        os.waitpid(spare, 0)
    except OSError:
        pass
    sys.exit(127)


def keep_spare(config: dict[str, Any]) -> int:
    """Keep a spare until it is taken and has ended, and return its exit status."""
    control = config["control"]
    os.set_inheritable(control, False)
    hears, tell = os.pipe2(os.O_CLOEXEC)
    told, says = os.pipe2(os.O_CLOEXEC)
    pipe, pipe_in = output_pipe()
    spare, wrong = begin(config, (pipe_in, pipe_in), (hears, says))
    os.close(hears)
    os.close(says)
    answer(spare, wrong)
    taken = None if wrong else await_taken(control, told)
    if taken is None:
        end_spare(spare)
    try:
        os.makedirs(os.path.dirname(taken["output"]), mode=0o700, exist_ok=True)
        output = Output(taken["output"], taken["limit_bytes"], taken["keep_free"], taken["mode"])
        streams = Streams(output, taken, pipe)
        ended = ExitFile(f"{taken['run']}.exit")
        for task in os.listdir(f"/proc/{spare}/task") if taken["cores"] else ():
            os.sched_setaffinity(int(task), taken["cores"])
        score(spare, ORDINARY)
        record(taken["run"], spare)
    except OSError as error:
        write_all(control, f"{error.errno} {error.filename or taken['output']}\n".encode())
        end_spare(spare)
    try:
        write_all(tell, taken["given"])
    except OSError:
        pass  # it has just ended, as a rank
    os.close(tell)
    os.close(told)
    try:
        write_all(control, b"taken\n")
    except OSError:
        pass  # whoever took it finds its record
    os.close(control)
    return keep(spare, streams, ended)


def output_pipe() -> tuple[int, int]:
    pipe, pipe_in = os.pipe2(os.O_CLOEXEC)
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:
        pass  # this user has many pipes; it works with a small one too
    os.set_blocking(pipe, False)
    return pipe, pipe_in


def answer(rank: int, wrong: str) -> None:
    """Answer whoever started this shim: the rank's process, or why there is none."""
    try:
        os.write(1, sealed(f"error 1 {wrong}") if wrong else sealed(f"started 1 {rank} {started(rank)}"))
    except OSError:
        pass  # the supervisor is gone; the next one reads the files
    os.dup2(0, 1)


def main() -> None:
    with open(0, "rb", closefd=False) as given:
        config: dict[str, Any] = marshal.load(given)  # noqa: S302  our own parent's
    os.dup2(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC), 0)
    unblock_signals()
    for number in (SIGTERM, SIGINT, SIGHUP):
        signal(number, SIG_IGN)  # it ends when its rank does
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sys.exit(status_of(keep_spare(config) if "control" in config else keep_rank(config)))


def status_of(code: int) -> int:
    return code if code >= 0 else 128 - code


def keep_rank(config: dict[str, Any]) -> int:
    """Keep a rank until it has ended, and return its exit status."""
    rank, wrong = 0, ""
    try:
        os.makedirs(os.path.dirname(config["output"]), mode=0o700, exist_ok=True)
        output = Output(config["output"], config["limit_bytes"], config["keep_free"], config["mode"])
        streams = Streams(output, config)
        ended = ExitFile(f"{config['run']}.exit")
        rank, wrong = begin(config, streams.ends)
    except OSError as error:
        wrong = f"{error.errno} {error.filename or config['output']}"
    answer(rank, wrong)
    if wrong:
        if rank:
            ended.remove()
            os.unlink(f"{config['run']}.run")
        sys.exit(127)
    return keep(rank, streams, ended)


if __name__ == "__main__":
    main()
