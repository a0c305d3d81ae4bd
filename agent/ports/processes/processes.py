"""Processes on this machine: users' commands and Covey's own programs.

Every process gets a session and a process group of its own, and no death signal tied to this one: it lives on when this
agent is killed. Its end is seen through a pidfd, also when it is not this process's child (found again after a
restart).

    start(Command)      no shell, nothing inherited, stdout and stderr appended to a file; with `run` under a shim that
                        outlives this one, bounds what is written and tells how it ended
                        (`agent/ports/processes/shim.py`, `agent/ports/processes/shims.py`)
    resume(Command)     what was started under that shim, here or by an earlier supervisor
    start_program(...)  `python -P -m agent.program`, its configuration handed over in an unnamed file as stdin; a fork
                        of what has imported its code where there is one (`agent/ports/processes/forker.py`)
    find(ProcessId)     pid and start time must match /proc: a recycled pid is another process

A supervisor adopts the descendants of its processes (`adopt`: PR_SET_CHILD_SUBREAPER): a process that daemonises itself
away from a rank becomes the supervisor's child and is ended with the job.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import pwd
import signal as signals
import subprocess
import sys
import termios
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from agent.ports.processes import held_back
from agent.ports.processes.container_host import TOOL_S, Containers
from agent.ports.processes.containers import ContainerRefused
from agent.ports.processes.forker import TOLD_S, Forked, Forker, NotForked
from agent.ports.processes.inheritance import NOT_INHERITED, begin_anew, make_ordinary, umask_of
from agent.ports.processes.procfs import (
    descendants,
    environment,
    is_alive,
    is_ours,
    live_ticks,
    name_of,
    pids,
    start_ticks,
    stat,
)
from agent.ports.processes.shims import DetachedProcess, KeptProcess, signal_catchers, signal_group, start_waiting
from agent.ports.processes.shims import resume as kept_resume
from agent.ports.processes.shims import start as kept_start
from covey.core.carried import for_process, for_processes
from covey.ports.processes import Command, Process, ProcessId, WaitingProcess
from covey.wire.checked import StateRefused

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
"""Seconds between two looks for an end where the kernel has no pidfd (before Linux 5.3)."""
REAP_S = 1.0
SHIM_KEEPS = ("COVEY_JOB_ID", "COVEY_EPOCH", "COVEY_TOKEN", "LD_LIBRARY_PATH")
"""The rank's variables that its shim gets: those by which it is found, and what an interpreter may need to start."""
CONMON = "conmon"
"""The name of podman's process under which one in a container runs."""
LOGIN = ("HOME", "USER", "LOGNAME", "SHELL")
"""Variables that a login of the job's user sets on this host, whatever they were where the job was submitted."""
GROUP_READS = 0o640
"""Mode of files of other users' programs: the access list of their folder lets the agent do what a group may."""
RACK_MARK = "COVEY_RACK"
"""The variable by which covey-rack finds what it started and whatever that started: a shim has it from the agent, not
from its rank."""
LOG_BYTES_MAX = 8 << 20
"""A program that starts begins another log when its last one is longer, bytes; one earlier log is kept, as
NAME.log.old."""
TOOL_BYTES_MAX = 1 << 20
"""Bytes that are read of what another program answers."""
LOADED_FD = "COVEY_LOADED_FD"
"""File descriptor of a pipe through which a program tells that its code is loaded."""


class ProgramBase(msgspec.Struct, frozen=True):
    """What each of Covey's programs gets beside its own configuration."""

    host: str
    state_dir: str
    run_dir: str
    advertise: str
    program: str = ""
    instance: str = ""
    log_level: str = "info"
    user: str = ""
    """The user as whom the program runs, where that is not the agent's: then the agent reads what it writes."""


WORDS_MAX = 400
"""The most characters of a program's last words."""


def words_path(run_dir: str, instance: str) -> str:
    """The path where a program says why it gives up. It is beside its sockets, in memory: a disk that is full takes no
    words."""
    return os.path.join(run_dir, f"{instance}.died")


def leave_words(run_dir: str, instance: str, why: BaseException) -> None:
    """Leave words for whoever starts this program again, and for its clients."""
    plain = isinstance(why, OSError | ValueError | StateRefused) and str(why)
    words = str(why) if plain else f"{type(why).__name__}: {why}"
    with contextlib.suppress(OSError), open(words_path(run_dir, instance), "w") as file:
        file.write(" ".join(words.split())[:WORDS_MAX])


class ProgramStart(msgspec.Struct, frozen=True):
    """What a program reads from its standard input, msgpack."""

    base: ProgramBase
    config: msgspec.Raw


class ChildProcess:
    """A process that this one started. It is reaped as soon as it ends, whether or not a caller waits."""

    def __init__(self, popen: DetachedProcess, tells: int = -1) -> None:
        """`tells`: this process's end of the pipe `LOADED_FD`; it is closed here."""
        self._popen, self.loaded = popen, tells < 0
        started = start_ticks(popen.pid)
        self.id = ProcessId(popen.pid, started if started is not None else 0)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._stop_watching = watch(popen.pid, self._look)
        if tells >= 0:
            self._loop.add_reader(tells, self._heard, tells)

    def _heard(self, tells: int) -> None:
        """Note that the program told that it is loaded, or ended, which closed the pipe."""
        self.loaded = True
        self._loop.remove_reader(tells)
        os.close(tells)

    def _look(self) -> None:
        code = self._popen.poll()
        if code is not None and not self._ended.done():
            self._stop_watching()
            self._ended.set_result(code)

    async def wait(self) -> int | None:
        return await asyncio.shield(self._ended)

    def signal(self, number: int) -> None:
        """Send a signal, only while the process has not been reaped: until then its pid is not used again."""
        if self._popen.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.id.pid, number)

    def signal_catchers(self, number: int) -> None:
        signal_catchers(self.id, number)

    def stand_still(self) -> None:
        self._signal_group(signals.SIGSTOP)

    def go_on(self) -> None:
        self._signal_group(signals.SIGCONT)

    def kill(self) -> None:
        self._signal_group(signals.SIGKILL)

    def _signal_group(self, number: int) -> None:
        if self._popen.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.id.pid, number)


class FoundProcess:
    """A process that is not a child of this one: how it ended cannot be known, only that it did."""

    def __init__(self, process: ProcessId) -> None:
        self.id = process
        self.loaded = True

    async def wait(self) -> int | None:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def look() -> None:
            if not is_alive(self.id) and not ended.done():
                ended.set_result(None)

        stop_watching = watch(self.id.pid, look)
        try:
            look()
            await ended
        finally:
            stop_watching()
        return None

    def signal(self, number: int) -> None:
        if is_alive(self.id):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.id.pid, number)

    def signal_catchers(self, number: int) -> None:
        signal_catchers(self.id, number)

    def stand_still(self) -> None:
        signal_group(self.id, signals.SIGSTOP)

    def go_on(self) -> None:
        signal_group(self.id, signals.SIGCONT)

    def kill(self) -> None:
        signal_group(self.id, signals.SIGKILL)


class ForkedProcess(FoundProcess):
    """A program that the forker of this process started, and whose exit status it tells."""

    def __init__(self, forked: Forked, tells: int) -> None:
        """`tells`: this process's end of the pipe `LOADED_FD`; it is closed here."""
        super().__init__(forked.id)
        self._status, self.loaded = forked.status, False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(tells, self._heard, tells)

    def _heard(self, tells: int) -> None:
        self.loaded = True
        self._loop.remove_reader(tells)
        os.close(tells)

    async def wait(self) -> int | None:
        await super().wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TOLD_S):
                return await asyncio.shield(self._status)
        return None


class RealProcesses:
    """The `covey.ports.processes.Processes` of this machine. `base` says where programs started from here keep their
    files; `forker` forks them, where there is one."""

    def __init__(self, base: ProgramBase, forker: Forker | None = None) -> None:
        self._base, self._forker = base, forker
        self._forked: dict[int, ForkedProcess] = {}
        self._children: dict[int, ChildProcess] = {}
        self._kept: dict[ProcessId, KeptProcess] = {}
        """The processes that were started under a shim, here or before."""
        self._asked: dict[ProcessId, None] = {}
        """The strays that were asked to end."""
        self._containers = Containers(base.host, self._run_tool)

    async def start(self, command: Command) -> Process:
        """Start a command. It blocks for the one or two milliseconds between fork and exec. OSError names the file that
        is at fault."""
        if not command.argv:
            raise FileNotFoundError("the command is empty")
        if command.run:
            return await self._start_kept(await self._contained(self._of_user(command)))
        output = _open_output(command.output)
        try:
            started = DetachedProcess(
                [for_process(each) for each in command.argv],
                cwd=for_process(command.cwd),
                env=for_processes(command.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                close_fds=True,
            )
            make_ordinary(started.pid, started.pid)
            return self._child(started)
        except ValueError as error:  # a NUL byte in an argument, '=' in the name of a variable
            raise OSError(f"cannot start {command.argv[0]!r}: {error}") from error
        finally:
            os.close(output)

    async def _contained(self, command: Command) -> Command:
        """The command that runs this one in its container, if it has one. ContainerRefused; then the rank's output says
        so too."""
        if command.container is None:
            return command
        try:
            return await self._containers.contained(command, command.container)
        except ContainerRefused as refused:
            with contextlib.suppress(OSError):
                output = _open_output(command.output, command.output_mode)
                with os.fdopen(output, "w") as file:
                    file.write(refused.lines)
            raise

    async def clear_containers(self, commands: Sequence[Command]) -> str:
        return await self._containers.clear([self._of_user(command) for command in commands])

    async def _run_tool(self, argv: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
        """Run a command of another program, and return its exit status and what it wrote."""
        output = os.memfd_create("covey-tool", os.MFD_CLOEXEC)
        try:
            started = DetachedProcess(
                argv,
                cwd="/",
                env=for_processes(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            child = self._child(started)
            try:
                async with asyncio.timeout(TOOL_S):
                    code = await child.wait()
            except TimeoutError:
                child.kill()
                return 1 << 8, f"it did not answer within {TOOL_S:.0f} s"
            words = os.pread(output, TOOL_BYTES_MAX, 0).decode(errors="replace")
            return 1 << 8 if code is None else code, words
        finally:
            os.close(output)

    def start_between(self, command: Command, descriptors: tuple[int, int, int], terminal: bool) -> Process:
        """Start a command whose standard input, output and error are these descriptors, which stay open here.
        `terminal`: they are a terminal, and it becomes the command's own. Without arguments it is the user's shell.
        OSError names the file that is at fault."""
        command = self._of_user(command)
        if command.container is not None:
            command = self._containers.entered(command, command.container, terminal)
        env = for_processes(command.env)
        argv = [for_process(each) for each in command.argv] or [_shell(env)]

        def begin() -> None:
            begin_anew()
            os.umask(umask_of(env))
            if terminal:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            if command.cores:
                os.sched_setaffinity(0, command.cores)

        try:
            started = DetachedProcess(
                argv,
                cwd=for_process(command.cwd),
                env=env,
                stdin=descriptors[0],
                stdout=descriptors[1],
                stderr=descriptors[2],
                start_new_session=True,
                close_fds=True,
                preexec_fn=begin,
            )
        except ValueError as error:
            raise OSError(f"cannot start {argv[0]!r}: {error}") from error
        except subprocess.SubprocessError as error:
            raise OSError(f"cannot start {argv[0]!r} in this terminal, on these cores: {error}") from error
        return self._child(started)

    def signal_between(self, process: Process, number: int) -> None:
        """Send a signal to a command that was started with `start_between`. What it runs in a container is below a
        `conmon`, a child of this process: podman passes no signal on."""
        keepers = [each.pid for each in descendants(os.getpid()) if name_of(each.pid) == CONMON]
        inside = [each for keeper in keepers for each in descendants(keeper)]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not inside or number == signals.SIGKILL:
                os.killpg(process.id.pid, number)
        for each in inside:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each.pid, number)

    async def start_waiting(self, command: Command) -> WaitingProcess:
        return await start_waiting(self._of_user(command), self._marks(command), self._of_user)

    def _of_user(self, command: Command) -> Command:
        """The command as it is for a user other than the agent's: it has what a login gives, and output that the agent
        may read."""
        if not self._base.user:
            return command
        env = command.env | {name: os.environ[name] for name in LOGIN if name in os.environ}
        return msgspec.structs.replace(command, env=env, output_mode=GROUP_READS)

    def _marks(self, command: Command) -> dict[str, str]:
        """The environment of a shim, by which it is found."""
        marks = {name: for_process(command.env[name]) for name in SHIM_KEEPS if name in command.env}
        return marks | {name: os.environ[name] for name in (RACK_MARK,) if name in os.environ}

    async def _start_kept(self, command: Command) -> Process:
        kept, popen = await kept_start(command, self._marks(command), watch)
        self._child(popen)
        self._kept[kept.id] = kept
        return kept

    def resume(self, command: Command) -> Process | None:
        found = kept_resume(command, watch)
        known = None if found is None else self._kept.get(found.id)
        if found is not None and known is None:
            known = self._kept[found.id] = found
        return known

    async def start_program(self, program: str, name: str, config: msgspec.Struct) -> Process:
        base = msgspec.structs.replace(self._base, program=program, instance=name)
        with contextlib.suppress(OSError):
            os.unlink(words_path(base.run_dir, name))
        start = ProgramStart(base, msgspec.Raw(msgspec.msgpack.encode(config)))
        try:
            output = _open_log(os.path.join(base.state_dir, "logs", f"{name}.log"))
        except OSError:
            output = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)  # a program starts although the disk takes no log
        handed = os.memfd_create(f"covey-{program}", os.MFD_CLOEXEC)
        hears, tells = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        environ = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
        # -P: a folder holding an `agent.py` is never searched. The last two are for people reading `ps`.
        words = (sys.executable, "-P", "-m", "agent.program", program, name)
        with contextlib.ExitStack() as open_here:
            for each in (tells, handed, output):
                open_here.callback(os.close, each)
            undo = open_here.enter_context(contextlib.ExitStack())
            undo.callback(os.close, hears)
            with os.fdopen(os.dup(handed), "wb") as writer:
                writer.write(msgspec.msgpack.encode(start))
            os.lseek(handed, 0, os.SEEK_SET)
            started: Process | None = None
            if self._forker is not None:
                with contextlib.suppress(NotForked):
                    forked = await self._forker.start(words, base.state_dir, (handed, output, tells), LOADED_FD)
                    started = self._of_forker(ForkedProcess(forked, hears))
            if started is None:
                popen = DetachedProcess(
                    words,
                    cwd=base.state_dir,
                    env=environ | {LOADED_FD: str(tells)},
                    pass_fds=(tells,),
                    stdin=handed,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    close_fds=True,
                )
                started = self._child(popen, hears)
            undo.pop_all()
            return started

    def _child(self, popen: DetachedProcess, tells: int = -1) -> ChildProcess:
        child = ChildProcess(popen, tells)
        self._children = {pid: known for pid, known in self._children.items() if known._popen.returncode is None}
        self._children[popen.pid] = child
        return child

    def _of_forker(self, process: ForkedProcess) -> ForkedProcess:
        self._forked = {pid: known for pid, known in self._forked.items() if is_alive(known.id)}
        self._forked[process.id.pid] = process
        return process

    async def let_go(self, pid: int) -> bool:
        return await asyncio.to_thread(held_back.let_go, pid)

    def last_words(self, name: str) -> str:
        try:
            with open(words_path(self._base.run_dir, name), errors="replace") as file:
                return file.read(WORDS_MAX)
        except OSError:
            return ""

    def find(self, process: ProcessId) -> Process | None:
        known = self._children.get(process.pid)
        if known is not None and known.id == process:
            return known if known._popen.poll() is None else None
        if (forked := self._forked.get(process.pid)) is not None and forked.id == process:
            return forked if is_alive(process) else None
        return FoundProcess(process) if is_alive(process) else None

    def started_by(self, pid: int) -> Collection[ProcessId]:
        return descendants(pid)

    # ---- adopted descendants ----

    def adopt(self) -> None:
        """Become the parent of every descendant whose own parent ends. OSError where the kernel cannot."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        self._reap()

    def _reap(self) -> None:
        """Take dead adopted children off the process table, once in `REAP_S`, so that they do not pile up."""
        with contextlib.suppress(ChildProcessError):
            while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                known = self._unreaped(dead.si_pid)
                if known is not None:
                    known._look()
                else:
                    os.waitpid(dead.si_pid, os.WNOHANG)
        asyncio.get_running_loop().call_later(REAP_S, self._reap)

    def ask_strays(self, number: int) -> int:
        """Send a signal, once, to every adopted process, this process's or a shim's: what a process that was started
        here, and that ended, had left running, but not what that has started in its turn, and not what a container that
        still runs is kept by. Returns how many adopted processes there are."""
        shims = [kept for kept in self._kept.values() if kept.shim_lives() and not kept.runs_in_container()]
        parents = {os.getpid(), *(kept.shim.pid for kept in shims)}
        strays: list[ProcessId] = []
        for pid in pids():
            fields = stat(pid)
            if fields is not None and int(fields[1]) in parents and fields[0] != "Z":
                stray = ProcessId(pid, int(fields[19]))
                if stray not in self._kept and self._unreaped(pid) is None:
                    strays.append(stray)
        for stray in strays:
            if stray not in self._asked:
                self._asked[stray] = None
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(stray.pid, number)
        return len(strays)

    async def end_strays(self, grace_s: float, timeout_s: float = 5.0) -> int:
        """Send SIGTERM to every descendant, SIGKILL to what is left after `grace_s`, until there is none, and return
        how many there were. It is only of use after `adopt`, in a process that has no other children than those to be
        ended. Shims end by themselves, once nothing is left of their ranks and all of the output is on disk."""
        seen: set[ProcessId] = set()
        loop = asyncio.get_running_loop()
        began_s, number = loop.time(), signals.SIGTERM if grace_s > 0 else signals.SIGKILL
        signalled: set[tuple[ProcessId, int]] = set()
        while True:
            shims = {kept.shim.pid for kept in self._kept.values() if kept.shim_lives()}
            found = {stray for root in (os.getpid(), *sorted(shims)) for stray in descendants(root)}
            strays = [stray for stray in sorted(found, key=_pid) if stray.pid not in shims and not self._reaped(stray)]
            if (not strays and not shims) or loop.time() - began_s > grace_s + timeout_s:
                return len(seen)
            if loop.time() - began_s >= grace_s:
                number = signals.SIGKILL
            for stray in strays:
                seen.add(stray)
                if (stray, number) not in signalled:
                    signalled.add((stray, number))
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(stray.pid, number)
            await asyncio.sleep(0.01)

    async def end_rest_of(self, process: ProcessId, timeout_s: float = 5.0) -> int:
        """Send SIGKILL to what a process that was started here with `run`, and that ended, has left running, until
        there is none, and return how many there were."""
        kept = self._kept.get(process)
        seen: set[ProcessId] = set()
        end_s = asyncio.get_running_loop().time() + timeout_s
        while kept is not None and asyncio.get_running_loop().time() < end_s:
            left = [each for each in descendants(kept.shim.pid) if not self._reaped(each)]
            if not left:
                break
            for each in left:
                seen.add(each)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(each.pid, signals.SIGKILL)
            await asyncio.sleep(0.01)
        return len(seen)

    async def end_holding(
        self, variables: Mapping[str, str], spare: Collection[ProcessId] = (), timeout_s: float = 5.0
    ) -> int:
        """Send SIGKILL to every process of this user that was started with all of these environment variables, whether
        or not a child, until there is none, and return how many there were. Not to ranks in `spare`, their shims,
        descendants."""
        seen: set[ProcessId] = set()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while (found := self._unspared(holding(variables), spare)) and loop.time() < end_s:
            for process in found:
                seen.add(process)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signals.SIGKILL)
            await asyncio.sleep(0.01)
        return len(seen)

    def _unspared(self, found: list[ProcessId], spare: Collection[ProcessId]) -> list[ProcessId]:
        spared = set(spare)
        for rank in spare:
            if (kept := self._kept.get(rank)) is not None:
                spared |= {kept.shim, *descendants(kept.shim.pid)}
        return [process for process in found if process not in spared]

    def _unreaped(self, pid: int) -> ChildProcess | None:
        """The process that was started here under this pid, as long as the pid is its own."""
        known = self._children.get(pid)
        return known if known is not None and known._popen.returncode is None else None

    def _reaped(self, stray: ProcessId) -> bool:
        """Take a dead adopted child off the process table. Processes that were started here are reaped by their own
        watch."""
        known = self._unreaped(stray.pid)
        if known is not None:
            return known._popen.poll() is not None
        with contextlib.suppress(ChildProcessError):
            pid, _ = os.waitpid(stray.pid, os.WNOHANG)
            return pid != 0
        return False


def _pid(process: ProcessId) -> int:
    return process.pid


def _open_log(path: str) -> int:
    """Open a program's log. One that has grown long begins anew beside the one before it."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_size > LOG_BYTES_MAX:
            os.replace(path, f"{path}.old")
    return _open_output(path)


def _open_output(path: str, mode: int = 0o600) -> int:
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, mode)


def _shell(env: Mapping[str, str]) -> str:
    """The shell of this process's user, whatever the submitter's was on another host."""
    with contextlib.suppress(KeyError):
        found = pwd.getpwuid(os.geteuid()).pw_shell
        if os.access(found, os.X_OK):
            return found
    return env.get("SHELL") or "/bin/sh"


def watch(pid: int, look: Callable[[], None]) -> Callable[[], None]:
    """Call `look` when the process ends (at least then). The returned function stops it."""
    loop = asyncio.get_running_loop()
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        handle = loop.call_soon(look)
        return handle.cancel
    except OSError:
        return _poll(loop, look)
    loop.add_reader(file, look)
    open_ = [file]

    def stop() -> None:
        while open_:
            loop.remove_reader(open_[0])
            os.close(open_.pop())

    return stop


def _poll(loop: asyncio.AbstractEventLoop, look: Callable[[], None]) -> Callable[[], None]:
    handle: list[asyncio.TimerHandle] = []

    def again() -> None:
        handle[:] = [loop.call_later(POLL_S, again)]
        look()

    handle.append(loop.call_later(0, again))
    return lambda: handle[0].cancel()


def holding(variables: Mapping[str, str]) -> list[ProcessId]:
    """The processes of this user, other than this one, whose environment held all of these when they began; by pid.
    None when there are no variables to tell them by."""
    found: list[ProcessId] = []
    for pid in pids() if variables else ():
        with contextlib.suppress(OSError):  # it ended, or is somebody else's
            if pid == os.getpid() or not is_ours(pid):
                continue
            started = live_ticks(pid)
            if started is not None and variables.items() <= environment(pid).items():
                found.append(ProcessId(pid, started))
    return found
