"""Ranks under their shims (`agent/ports/processes/shim.py`): started, found again by the next supervisor, and their
exit status read.

The record of a rank is two lines on disk, each with its checksum: its pids (`PATH.run`, before it begins) and how it
ended (`PATH.exit`). So the supervisor may die at any moment: the next one finds the rank by pid and start time, sees
its end through a pidfd, and reads the exit status that the shim wrote."""

import asyncio
import contextlib
import errno
import json
import marshal
import os
import signal as signals
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable

from agent.ports.processes import procfs, shim
from agent.ports.processes.containers import pid_file_of, tool_of
from agent.ports.processes.procfs import is_alive
from covey.core.carried import for_process, for_processes
from covey.ports.processes import Command, ProcessId

EXIT_POLL_S = 0.01
"""Seconds between two looks for a rank's exit file once the rank has ended: its shim writes it at once, then syncs
it."""
PROGRAM_POLL_S = 0.05
"""Seconds between two looks for the program in a container that is about to begin, for which a signal waits."""
ROUNDS_MAX = 20
"""Most times that the processes of a container are looked for while they get a signal: some may fork meanwhile."""
ANSWER_BYTES_MAX = 1 << 16
NO_LIMIT_BYTES = 1 << 50
Watch = Callable[[int, Callable[[], None]], Callable[[], None]]


class DetachedProcess(subprocess.Popen[bytes]):
    """A child that is meant to outlive this process, so dropping the object gives no warning."""

    def __del__(self, *_: object) -> None:
        """Do nothing: the parent class would warn that the process still runs."""


def unsealed(line: bytes, word: str) -> str | None:
    """What follows `word` and its version in a line of a shim; None when it is another word, or damaged."""
    text, _, check = line.strip().rpartition(b" ")
    if not text.startswith(f"{word} 1 ".encode()) or check != f"{zlib.crc32(text):08x}".encode():
        return None
    return text.decode(errors="replace").partition(" 1 ")[2]


def _read(path: str, word: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return unsealed(file.read(ANSWER_BYTES_MAX), word)
    except FileNotFoundError:
        return None


class KeptProcess:
    """A rank under a shim, started here or by an earlier supervisor."""

    def __init__(
        self, command: Command, rank: ProcessId, shim_id: ProcessId, watch: Watch, popen: DetachedProcess | None
    ) -> None:
        self.id, self.shim = rank, shim_id
        self._run, self._watch, self._popen = command.run, watch, popen
        self._container = command.container
        self._pid_file = pid_file_of(command)

    @property
    def loaded(self) -> bool:
        """Whether it is loaded: True, since a user's command has no such signal."""
        return True

    async def wait(self) -> int | None:
        await self._over()
        if is_alive(self.id):
            self.kill()  # its shim was killed: its output and exit status would be lost
            await self._until(lambda: not is_alive(self.id))
            return None
        await self._until(lambda: self._code() is not None or not self.shim_lives())
        return self._code()

    async def _until(self, true: Callable[[], bool]) -> None:
        """Poll until the condition holds: every one awaited here does within milliseconds."""
        while True:
            if true():
                return
            await asyncio.sleep(EXIT_POLL_S)

    async def _over(self) -> None:
        """Wait until the rank or its shim has ended."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def look() -> None:
            if not over.done() and not (is_alive(self.id) and self.shim_lives()):
                over.set_result(None)

        watched = [self._watch(process.pid, look) for process in (self.id, self.shim)]
        try:
            look()
            await over
        finally:
            for stop in watched:
                stop()

    def shim_lives(self) -> bool:
        if self._popen is not None:
            return self._popen.poll() is None
        return is_alive(self.shim)

    def _code(self) -> int | None:
        """The exit status that the shim wrote, or the shim's own exit status where the disk did not take it."""
        text = _read(f"{self._run}.exit", "exit")
        if text is not None:
            return int(text)
        own = None if self._popen is None else self._popen.poll()
        if own is None or own < 0:
            return None
        return own if own <= 128 else 128 - own

    def signal(self, number: int) -> None:
        if self._container is None or tool_of(self._container) != "podman":
            signal_one(self.id, number)
            return
        program = self._program()
        if program is not None:
            signal_one(program, number)
        elif is_alive(self.id):
            # podman is about to start it
            asyncio.get_running_loop().call_later(PROGRAM_POLL_S, self.signal, number)

    def _program(self) -> ProcessId | None:
        """The first process of the container; None: it has not begun, or has ended."""
        try:
            with open(self._pid_file, "rb") as file:
                pid = file.read(16).strip()
        except OSError:
            return None
        return next((each for each in procfs.descendants(self.shim.pid) if str(each.pid).encode() == pid), None)

    def runs_in_container(self) -> bool:
        """Whether the rank runs now, and in a container."""
        return self._container is not None and is_alive(self.id)

    def signal_catchers(self, number: int) -> None:
        if self._container is None:
            signal_catchers(self.id, number)
            return
        for each in procfs.descendants(self.shim.pid):
            with contextlib.suppress(OSError):
                if procfs.catches(each.pid, number):
                    os.kill(each.pid, number)

    def stand_still(self) -> None:
        self._signal_all(signals.SIGSTOP)

    def go_on(self) -> None:
        self._signal_all(signals.SIGCONT)

    def kill(self) -> None:
        self._signal_all(signals.SIGKILL)

    def _signal_all(self, number: int) -> None:
        """Send a signal to the rank's group; of a rank in a container, which has groups of its own, to all processes
        under its shim, until no other one has begun meanwhile."""
        contained = self.runs_in_container()
        signal_group(self.id, number)
        if not contained:
            return
        signalled: set[ProcessId] = set()
        for _ in range(ROUNDS_MAX):
            found = [each for each in procfs.descendants(self.shim.pid) if each not in signalled]
            for each in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(each.pid, number)
            if not found:
                return
            signalled |= set(found)


def signal_one(process: ProcessId, number: int) -> None:
    """Send a signal through a pidfd: the rank's shim may reap it at any moment, and the pid be used again."""
    try:
        file = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno == errno.ENOSYS and is_alive(process):
            os.kill(process.pid, number)
        return
    try:
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signals.pidfd_send_signal(file, number)
    finally:
        os.close(file)


def signal_group(leader: ProcessId, number: int) -> None:
    """Send a signal to a process and its whole group. Nothing happens when it is gone."""
    if is_alive(leader):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, number)


def signal_catchers(leader: ProcessId, number: int) -> None:
    """Send a signal to the processes of its group that have a handler for it."""
    if not is_alive(leader):
        return
    for pid in procfs.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if procfs.group(pid) == leader.pid and procfs.catches(pid, number):
                os.kill(pid, number)


async def start(command: Command, marks: dict[str, str], watch: Watch) -> tuple[KeptProcess, DetachedProcess]:
    """Start a rank under a shim. `marks`: the shim's own environment. OSError names what is at fault."""
    popen, started = await _start(command, _config(command), marks)
    return _found(command, watch, popen) or _gone(command, started, watch, popen), popen


def _config(command: Command) -> dict[str, object]:
    """The configuration of a shim: `Command` in its words."""
    return {
        "argv": [for_process(each) for each in command.argv],
        "cwd": for_process(command.cwd),
        "env": for_processes(command.env),
        "output": command.output,
        "limit_bytes": command.output_bytes_max or NO_LIMIT_BYTES,
        "keep_free": command.output_keep_free,
        "mode": command.output_mode,
        "run": command.run,
        "cores": command.cores,
        "held_back": command.held_back,
        "also": (for_process(command.stdout), for_process(command.stderr)),
    }


async def _start(
    command: Command, config: dict[str, object], marks: dict[str, str], control: int = -1
) -> tuple[DetachedProcess, str]:
    """Start a shim, and return it and what it says of its process. `control`: a descriptor that it keeps."""
    given = os.memfd_create("covey-shim", os.MFD_CLOEXEC)
    answer, answered = os.pipe2(os.O_CLOEXEC)
    try:
        with os.fdopen(os.dup(given), "wb") as writer:
            marshal.dump(config, writer)
        os.lseek(given, 0, os.SEEK_SET)
        popen = DetachedProcess(
            # The last is for people reading `ps`.
            (sys.executable, "-I", "-S", shim.__file__, os.path.basename(command.run)),
            cwd="/",
            env=marks,
            stdin=given,
            stdout=answered,
            start_new_session=True,
            close_fds=True,
            pass_fds=(control,) if control >= 0 else (),
        )
        os.close(answered)
        answered = -1
        line = await _read_all(answer)
    finally:
        for file in (given, answer, answered):
            if file >= 0:
                os.close(file)
    started = unsealed(line, "started")
    if started is None:
        raise _trouble(line, popen, command)
    return popen, started


class SpareProcess:
    """The `covey.ports.processes.WaitingProcess`: one that was started ahead, under its shim."""

    def __init__(
        self, id: ProcessId, popen: DetachedProcess, control: socket.socket, whose: Callable[[Command], Command]
    ) -> None:
        self.id, self._popen, self._control, self._whose = id, popen, control, whose
        self._buffer = b""
        control.setblocking(False)

    async def says(self) -> str:
        while b"\n" not in self._buffer and len(self._buffer) < ANSWER_BYTES_MAX:
            part = await asyncio.get_running_loop().sock_recv(self._control, 4096)
            if not part:
                raise ConnectionError("it has ended")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")

    async def become(self, command: Command) -> None:
        command = self._whose(command)
        given = json.dumps(for_processes(command.env)).encode()
        said = marshal.dumps(
            {**_config(command), "given": len(given).to_bytes(shim.LENGTH_BYTES, "little") + given},
        )
        await asyncio.get_running_loop().sock_sendall(
            self._control, len(said).to_bytes(shim.LENGTH_BYTES, "little") + said
        )
        while (answer := await self.says()) != "taken":
            number, _, at_fault = answer.partition(" ")
            if number.isdigit():
                raise OSError(int(number), os.strerror(int(number)), at_fault)
        self._control.close()

    def end(self) -> None:
        self._control.close()


async def start_waiting(
    command: Command, marks: dict[str, str], whose: Callable[[Command], Command] = lambda command: command
) -> SpareProcess:
    """Start a process ahead. `whose`: what it may become, as it is for its user. OSError names what is at fault."""
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as unless_started:
        unless_started.callback(ours.close)
        with theirs:
            config = {**_config(command), "control": theirs.fileno()}
            popen, started = await _start(command, config, marks, theirs.fileno())
        unless_started.pop_all()
    pid, ticks = (int(word) for word in started.split())
    return SpareProcess(ProcessId(pid, ticks), popen, ours, whose)


def _trouble(line: bytes, popen: DetachedProcess, command: Command) -> OSError:
    said = unsealed(line, "error")
    if said is None:
        return OSError(errno.EIO, "its shim ended before it answered", command.argv[0])
    number, _, at_fault = said.partition(" ")
    code = int(number) if number.isdigit() else errno.EIO
    return OSError(code, os.strerror(code), at_fault)


def _gone(command: Command, started: str, watch: Watch, popen: DetachedProcess) -> KeptProcess:
    """The rank from the shim's answer, when its record cannot be read."""
    pid, ticks = (int(word) for word in started.split())
    return KeptProcess(command, ProcessId(pid, ticks), ProcessId(popen.pid, 0), watch, popen)


def _found(command: Command, watch: Watch, popen: DetachedProcess | None) -> KeptProcess | None:
    text = _read(f"{command.run}.run", "run")
    if text is None:
        return None
    pid, ticks, shim_pid, shim_ticks = (int(word) for word in text.split())
    return KeptProcess(command, ProcessId(pid, ticks), ProcessId(shim_pid, shim_ticks), watch, popen)


def resume(command: Command, watch: Watch) -> KeptProcess | None:
    """The process that was started for this command before, here or by another supervisor, also when it has ended; None
    when there was none. OSError when its record cannot be read."""
    return _found(command, watch, None)


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


async def _read_all(file: int) -> bytes:
    """Read until the other end is closed."""
    loop = asyncio.get_running_loop()
    os.set_blocking(file, False)
    parts: list[bytes] = []
    while sum(map(len, parts)) < ANSWER_BYTES_MAX:
        try:
            part = os.read(file, 4096)
        except BlockingIOError:
            readable: asyncio.Future[None] = loop.create_future()
            loop.add_reader(file, _set, readable)
            try:
                await readable
            finally:
                loop.remove_reader(file)
            continue
        if not part:
            break
        parts.append(part)
    return b"".join(parts)
