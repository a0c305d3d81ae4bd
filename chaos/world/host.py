"""A simulated machine and the processes on it.

A `SimHost` has power, an address, a disk, clocks, memory, GPUs and a table of processes. Every process - the agent,
Covey's own byte and supervisor programs, the users' ranks - is a `SimProcess` with a virtual loop, ports and sockets
of its own, so each may be killed, stopped and continued alone, and only the loss of power ends them all.
"""

import asyncio
import contextvars
import errno
import mmap
import random
import signal
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, Literal, Protocol

import msgspec

from chaos.askers import USERS
from chaos.world.clock import SimClock, SimProbes
from chaos.world.disk import ProcessDisk, SimDisk, SimRecords
from chaos.world.links import KEY_BYTES, SimLinks
from chaos.world.loop import HostLoop, trace_of
from chaos.world.net import SimDatagrams
from chaos.world.pages import SimPages
from chaos.world.seen import WorldSeen
from chaos.world.spares import SimSpare
from chaos.world.streams import SimBytes
from covey.core.ids import HostId
from covey.ports.env import Env
from covey.ports.log import LineLog
from covey.ports.processes import Command, ProcessId
from covey.ports.starter import OneUser
from covey.wire.checked import StateRefused

Kind = Literal["agent", "program", "user"]
LEFTOVER_S = 5.0
"""Seconds that a process which returned waits for its other tasks to end."""

RESTART_S = 2.0
"""Seconds after which an agent that ended by itself with an error is started again (systemd's RestartSec)."""

UserProgram = Callable[[Env, Command], Awaitable[int]]
"""A simulated command; its result is the exit status."""


class Resource(Protocol):
    """Something the kernel holds for a process."""

    def release(self) -> None:
        """Free the resource, since the process ended."""

    def vanish(self) -> None:
        """Drop the resource, since the power failed."""


class SimLog(LineLog):
    """The `Logger` port: lines of the story, kept when a caller asked for them."""

    def __init__(self, world: WorldSeen, name: str) -> None:
        self._world, self._name = world, name

    def _line(self, level: str, event: str, fields: dict[str, Any]) -> None:
        self._world.log_line(level, self._name, event, fields)

    exception = critical = LineLog.error

    def bind(self, **_: Any) -> "SimLog":
        return self


class SimProcess:
    """One process: a loop, ports, an id, and an end."""

    def __init__(self, host: "SimHost", name: str, kind: Kind, parent: "SimProcess | None") -> None:
        self.host, self.kind, self.parent = host, kind, parent
        self.world = host.world
        self.name = f"{host.name}/{name}"
        self.loop = HostLoop(self.world, self.name, host.clock)
        self.loop.callback_s = host.callback_s
        self.loop.failed = self._failed
        self.id: ProcessId = ProcessId(pid=host.next_pid(), started=int((self.world.now - host.booted) * 100) + 1)
        self.uid = 1000
        self.alive, self.unpowered = True, False
        self.code: int | None = None
        self.loaded = True
        self.resources: list[Resource] = []
        self.rings: dict[str, mmap.mmap] = {}
        """Memory that the process made or holds, and others may open, by name."""
        self.ring_number: int = 0
        self.waiters: list[asyncio.Future[None]] = []
        self._main: asyncio.Task[int] | None = None
        self._begun = False
        self.failing = 0
        """Exit status after an exception in a task."""
        self._work: Coroutine[Any, Any, int | None] | None = None
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        chance = random.Random(f"{self.world.seed}/{self.name}/{self.id.pid}")
        secret = random.Random(f"{self.world.seed}/{self.name}/{self.id.pid}/entropy")
        self.env = Env(
            host=HostId(host.name),
            clock=host.clock,
            rng=chance,
            entropy=secret.randbytes,
            spawn=self.spawn,
            log=SimLog(self.world, self.name),
            datagrams=SimDatagrams(self),
            links=SimLinks(self, secret.randbytes(KEY_BYTES)),
            bytes=SimBytes(self),
            disk=ProcessDisk(self, host.disk),
            processes=SimProcesses(self),
            probes=host.probes,
            pages=SimPages(self),
            run_dir=host.run_dir,
            starter=OneUser(self.uid),
            byte_path=host.byte_path,
            users=USERS,
            records=host.records,
        )

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> object:
        """Start a task that is kept; an exception in it is a complaint to the world."""
        if not self.alive:
            coroutine.close()
            return None
        task: asyncio.Task[Any] = contextvars.Context().run(self.loop.create_task, coroutine, name=name)
        number = hash(task)
        self._tasks[number] = task
        task.add_done_callback(lambda done: self._done(number, name, done))
        return task

    def _done(self, number: int, name: str, task: "asyncio.Task[Any]") -> None:
        self._tasks.pop(number, None)
        if not task.cancelled() and task.exception() is not None:
            self._failed(task.exception() or RuntimeError(), f"task {name!r}")

    def _failed(self, error: BaseException, what: str) -> None:
        """Handle an uncaught exception. A failing disk may cause it: the process then ends, as a real one would."""
        if isinstance(error, OSError) and self.kind != "user" and self._main is not None:
            self.world.log_line("error", self.name, f"gives up after {error!r}", {"task": what})
            self.host.last_words[self.name.partition("/")[2]] = str(error)
            self.failing = 1
            self._main.cancel()
        elif isinstance(error, StateRefused) and self._main is not None:
            self.failing = self._refuse(error)
            self._main.cancel()
        else:
            self.world.complain(self, error, what)

    def begin(self, main: Coroutine[Any, Any, int | None]) -> None:
        self.world.process_count += 1
        self._work = main
        self._main = self.spawn("main", self._run(main))  # type: ignore[assignment]

    async def _run(self, main: Coroutine[Any, Any, int | None]) -> None:
        self._begun = True
        code = 0
        try:
            code = await main or self.failing
        except asyncio.CancelledError:
            code = -signal.SIGTERM if self.kind == "user" else self.failing
        except StateRefused as refused:
            code = self._refuse(refused)
        except Exception as error:
            code = 1
            self.host.last_words[self.name.partition("/")[2]] = str(error)
            self.world.log_line("error", self.name, "the process failed", {"trace": trace_of(error)})
            if self.kind != "user" and not isinstance(error, OSError):
                self.world.complain(self, error, "main")
        if not self.alive:
            return
        others = [task for task in self.loop.tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=LEFTOVER_S)
        self.loop.call_soon(self.end, code)

    def _refuse(self, refused: StateRefused) -> int:
        """End an agent whose files cannot be trusted, as documented: systemd leaves it down."""
        self.world.log_line("error", self.name, "refuses to go on", {"why": str(refused)})
        self.host.refused = refused
        return refused.status

    def end(self, code: int, power: bool = False) -> None:
        """End the process: nothing of it runs again, its sockets close, its waiters are told."""
        if not self.alive:
            return
        self.alive, self.code, self.unpowered = False, code, power
        self.let_go()
        self._tasks.clear()
        for resource in self.resources:
            if power:
                resource.vanish()
            else:
                resource.release()
        if not power:
            self.host.disk.process_died(self)
        self.host.processes.pop(self.id.pid, None)
        self.world.process_count += 1
        self.world.mark("process ended", self.name, f"pid {self.id.pid} code {code}", code & 0xFFFF)
        for told in [] if power else self.world.on_loss:
            told(self.host, self)
        if self.kind == "agent" and code > 0 and self.host.refused is None:
            self.world.at(self.world.now + RESTART_S, self.host.revive)
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def let_go(self) -> None:
        """Never run anything of the process again; its tasks are parked until the world ends."""
        if self._work is not None and not self._begun:
            self._work.close()
        self.world.reap(self.loop.kill())

    def signal(self, number: int) -> None:
        if not self.alive:
            return
        self.world.mark("signal", self.name, signal.Signals(number).name, number)
        if number == signal.SIGKILL:
            self.end(-number)
        elif number == signal.SIGSTOP:
            self.loop.pause()
        elif number == signal.SIGCONT:
            self.loop.resume()
            self.world.process_count += 1  # it runs again, as if it began
        elif number and not self._begun:
            self.end(-number)  # it had no time to install a handler
        elif number and self._main is not None:
            self._main.cancel()


async def _fork(host: "SimHost") -> None:
    """Start of a process: perhaps there is no room for one more, or it takes long."""
    mischief = host.world.mischief
    if mischief.strikes("start"):
        if mischief.rng.random() < 0.5:
            raise OSError(errno.EAGAIN, "no process can be started now")
        await asyncio.sleep(mischief.pause_s())


class SimProcesses:
    """The `Processes` port of one process."""

    def __init__(self, process: SimProcess) -> None:
        self._process = process

    async def start(self, command: Command) -> "SeenProcess":
        child, program = await self._child(command)
        if command.run:
            self._process.host.runs[command.run] = child
        child.begin(_call(program, child.env, command))
        return SeenProcess(self._process, child, kept=bool(command.run))

    async def start_waiting(self, command: Command) -> SimSpare:
        child, program = await self._child(command)
        spare = SimSpare(self._process, child)
        child.begin(spare.work(program))
        return spare

    async def _child(self, command: Command) -> tuple[SimProcess, UserProgram]:
        """A process that does nothing yet, and the program that it is to run."""
        host = self._process.host
        await _fork(host)
        program = host.world.user_program(command.argv)
        if program is None:
            raise FileNotFoundError(2, "no such simulated program", command.argv[0] if command.argv else "")
        await asyncio.sleep(host.world.chance.uniform(0.002, 0.02))
        child = SimProcess(host, f"{command.argv[0].rpartition('/')[2]}", "user", self._process)
        host.processes[child.id.pid] = child
        host.commands[child.id.pid] = command
        return child, program

    @property
    def own(self) -> ProcessId:
        """Identity of this process."""
        return self._process.id

    def resume(self, command: Command) -> "SeenProcess | None":
        if self._process.world.mischief.strikes("resume"):
            raise OSError(errno.EIO, "the disk does not tell what was started", command.run)
        found = self._process.host.runs.get(command.run)
        return None if found is None else SeenProcess(self._process, found, kept=True)

    async def start_program(self, program: str, name: str, config: msgspec.Struct) -> "SeenProcess":
        host = self._process.host
        await _fork(host)
        found = host.world.programs().get(program)
        if found is None:
            raise FileNotFoundError(2, "no such program of ours", program)
        passed = msgspec.json.decode(msgspec.json.encode(config), type=found.config)
        await asyncio.sleep(host.world.chance.uniform(0.02, 0.1))
        child = SimProcess(host, name, "program", self._process)
        host.last_words.pop(name, None)
        host.processes[child.id.pid] = child
        child.begin(_loads(child, found.run(child.env, passed)) if host.load_s else found.run(child.env, passed))
        return SeenProcess(self._process, child)

    def last_words(self, name: str) -> str:
        return self._process.host.last_words.get(name, "")

    def find(self, process: ProcessId) -> "SeenProcess | None":
        found = self._process.host.processes.get(process.pid)
        if found is None or found.id != process:
            return None
        return SeenProcess(self._process, found)

    async def end_holding(
        self, variables: Mapping[str, str], spare: Collection[ProcessId] = (), timeout_s: float = 5.0
    ) -> int:
        """Kill processes with these variables, as `agent.ports.processes.processes.RealProcesses` does; returns how
        many there were."""
        host, count = self._process.host, 0
        for pid, process in list(host.processes.items()):
            command = host.commands.get(pid)
            if command is not None and process.id not in spare and variables.items() <= command.env.items():
                count += 1
                process.signal(signal.SIGKILL)
        return count


async def _call(program: UserProgram, env: Env, command: Command) -> int:
    return await program(env, command)


async def _loads(child: SimProcess, work: Coroutine[Any, Any, None]) -> None:
    """Run the program after its load time, on a machine that has little time for it."""
    child.loaded = False
    try:
        await asyncio.sleep(child.host.load_s)
    except BaseException:
        work.close()
        raise
    child.loaded = True
    await work


class SeenProcess:
    """A process as another one sees it: its parent learns its exit status, and every process that of a `kept` one,
    which is on disk, unless the power failed before."""

    def __init__(self, viewer: SimProcess, process: SimProcess, kept: bool = False) -> None:
        self._viewer, self.process, self._kept = viewer, process, kept

    @property
    def id(self) -> ProcessId:
        return self.process.id

    @property
    def loaded(self) -> bool:
        return self.process.loaded

    async def wait(self) -> int | None:
        if self.process.alive:
            waiter = self._viewer.loop.create_future()
            self.process.waiters.append(waiter)
            await waiter
        known = self._kept and not self.process.unpowered
        return self.process.code if known or self.process.parent is self._viewer else None

    def signal(self, number: int) -> None:
        self.process.signal(number)

    def signal_catchers(self, number: int) -> None:
        """Report which processes catch a signal: none here."""

    def stand_still(self) -> None:
        self.process.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.signal(signal.SIGKILL)


class SimHost:
    """One simulated machine."""

    def __init__(self, world: WorldSeen, name: str, ip: str, gpus: int) -> None:
        self.world, self.name, self.ip = world, name, ip
        self.up = True
        self.booted = world.now
        self.callback_s = 0.0
        self.load_s = 0.0
        """Seconds that one of Covey's programs takes to load its code."""
        self.run_dir = f"/run/covey/{name}"
        self.byte_path = ""
        """How programs that start from now on say they run the byte path."""
        self.clock = SimClock(world, start_s=world.chance.uniform(100, 100_000))
        self.probes = SimProbes(name, gpus, lambda: world.now, self._lives)
        self.disk = SimDisk(f"/var/lib/covey/{name}", random.Random(f"{world.seed}/{name}/disk"))
        self.records = SimRecords(self.disk)
        """Records of ended jobs, on its disk."""
        self.processes: dict[int, SimProcess] = {}
        self.commands: dict[int, Command] = {}
        """pid -> the command that was started, kept after its end."""
        self.last_words: dict[str, str] = {}
        """Instance of one of Covey's programs -> why it gave up."""
        self.runs: dict[str, SimProcess] = {}
        """`Command.run` -> the process that was started for it: the files that shims write."""
        self.agent: SimProcess | None = None
        self.refused: StateRefused | None = None
        """Why the agent ended with a status of its own, after which systemd does not start it again."""
        self.main: Callable[[Env], Coroutine[Any, Any, int | None]] | None = None
        """What the agent process of this host runs."""
        self._last_pid = 100
        self._next_port = 32_768

    def lose_records(self) -> None:
        """Lose the records of ended jobs, as with the disk they are on."""
        self.records = SimRecords(self.disk)

    def _lives(self, pid: int) -> bool:
        return pid in self.processes and self.processes[pid].alive

    def next_pid(self) -> int:
        self._last_pid += self.world.chance.randint(1, 3)
        return self._last_pid

    def ephemeral_port(self) -> int:
        self._next_port = self._next_port + 1 if self._next_port < 60_999 else 32_768
        return self._next_port

    def free_port(self, taken: Callable[[int], bool]) -> int:
        port = self.ephemeral_port()
        while taken(port):
            port = self.ephemeral_port()
        return port

    def start_agent(self) -> SimProcess:
        """Start (or start again) the agent of this host."""
        if self.main is None or not self.up:
            raise RuntimeError(f"{self.name} has no agent to start, or no power")
        if self.agent is not None and self.agent.alive:
            return self.agent
        self.agent, self.refused = SimProcess(self, "agent", "agent", None), None
        self.processes[self.agent.id.pid] = self.agent
        self.world.mark("agent started", self.name)
        self.agent.begin(self.main(self.agent.env))
        return self.agent

    def revive(self) -> None:
        """Start the agent unless it runs or there is no power."""
        if self.up and self.main is not None:
            self.start_agent()

    def run(self, name: str, program: UserProgram, argv: tuple[str, ...] = ()) -> SimProcess:
        """Start a process of a user that no agent asked for (a tool, a shell)."""
        process = SimProcess(self, name, "user", None)
        self.processes[process.id.pid] = process
        command = Command(argv=argv or (name,), cwd="/", env={}, output="/dev/null")
        process.begin(_call(program, process.env, command))
        return process

    def find(self, name: str) -> list[SimProcess]:
        """Live processes of this name (`agent`, a program's instance, a command), oldest first."""
        return [p for p in self.processes.values() if p.name.partition("/")[2] == name]

    def power_off(self) -> None:
        """Every process dies at once, the disk forgets what was not synced, the network falls silent."""
        if not self.up:
            return
        self.up = False
        self.world.mark("power off", self.name)
        for process in list(self.processes.values()):
            process.end(-signal.SIGKILL, power=True)
        self.disk.power_failed()
        self.records.power_failed()
        for told in self.world.on_loss:
            told(self, None)
        self.world.network.changed()

    def power_on(self) -> None:
        """The machine boots; its monotonic clock begins again. The agent is started too, as systemd would."""
        if self.up:
            return
        self.up = True
        self.booted = self.world.now
        self.world.mark("power on", self.name)
        wrong = self.clock.skews
        self.clock = SimClock(self.world, start_s=self.world.chance.uniform(5, 50))
        for number, (wall_s, rate) in wrong.items():
            self.clock.skew(number, wall_s, rate)
        self.world.network.changed()
        self.revive()

    def slow_down(self, callback_s: float) -> None:
        """Let every callback of every process on this host cost `callback_s` of virtual time; 0 heals."""
        self.callback_s = callback_s
        for process in self.processes.values():
            process.loop.callback_s = callback_s
