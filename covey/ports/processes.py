"""Processes that an agent starts and watches."""

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

import msgspec


class ProcessId(msgspec.Struct, frozen=True):
    """Id of a process that differs from that of a later process with the same pid."""

    pid: int
    started: int
    """Start time in clock ticks since boot (field 22 of /proc/PID/stat)."""


class Process(Protocol):
    @property
    def id(self) -> ProcessId: ...
    @property
    def loaded(self) -> bool:
        """False until one of Covey's programs that was started here has reported that its code is loaded."""

    async def wait(self) -> int | None:
        """Exit status once it ended: 0..255, -N when killed by signal N, None when it was not our child (unknown)."""

    def signal(self, number: int) -> None:
        """Send a signal to this process alone, not to its children. Does nothing when it is gone."""

    def signal_catchers(self, number: int) -> None:
        """Send a signal to those processes of its group that have a handler for it; it would end the others."""

    def stand_still(self) -> None:
        """Send SIGSTOP to its whole group. Does nothing when it is gone."""

    def go_on(self) -> None:
        """Send SIGCONT to its whole group, which may be suspended. Does nothing when it is gone."""

    def kill(self) -> None:
        """Send SIGKILL to its whole group. Does nothing when it is gone."""


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """The image in which a command runs, and what of this host is seen in it beside its user's home and its folder."""

    image: str
    """A name in the user's own storage of podman, or the absolute path of a file or folder that apptainer runs."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the NVIDIA devices that it sees, and no others."""
    ours: tuple[str, ...] = ()
    """Variables of the command that hold whatever the image says."""
    shows: tuple[str, ...] = ()
    """Folders of this host that it may read, at the same paths."""
    hides: tuple[str, ...] = ()
    """Variables of the container that a command does not have which enters it."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a process of a user: no shell, its own session and process group."""

    argv: tuple[str, ...]
    """Program and arguments. Here, in `cwd` and in `env`, text is as in `covey.core.carried`: the same bytes arrive."""
    cwd: str
    env: dict[str, str]
    """The whole environment; nothing is inherited."""
    output: str
    """Absolute path of a file; stdout and stderr are appended to it."""
    run: str = ""
    """Absolute path without ending: a shim, which outlives this process, writes the process's id and its end there, so
    that `Processes.resume` finds it again. Empty: it cannot be resumed."""
    output_bytes_max: int = 0
    """Most bytes of output, with `run`: the first quarter is kept, then the newest of the rest. 0: no limit."""
    output_mode: int = 0o600
    """Mode of the files of the output, for a process with `run`."""
    output_keep_free: int = 0
    """Bytes of the disk that the output leaves free, whatever it may hold; for a process with `run`."""
    stdout: str = ""
    """Absolute path of a file to which what the process writes is added as well, by the process's user and umask; with
    `run` only. Empty: to none. Here text is as in `argv`."""
    stderr: str = ""
    """Absolute path of a file for its standard error alone, which `stdout` does not get then. Empty: it has none."""
    cores: tuple[int, ...] = ()
    """Cores on which the process and all that it starts run, for a process with `run`; empty: any."""
    held_back: bool = False
    """Whether the process begins with cores that others leave idle, until `LetsGo.let_go`; with `run` only."""
    container: Container | None = None
    """The container that it runs in, with `run` only; None: it runs in none."""


class WaitingProcess(Protocol):
    """A process that was started before it is known for which rank (`StartsAhead.start_waiting`)."""

    @property
    def id(self) -> ProcessId: ...

    async def says(self) -> str:
        """The next line that the process reports about itself: `here`, `warm`, or why it cannot be used.
        ConnectionError once it has ended."""

    async def become(self, command: Command) -> None:
        """Turn the process into this command: `Processes.resume` finds it so, and who started it has no part in it any
        more. OSError when its record cannot be written, ConnectionError when the process has ended: then it never
        becomes the command."""

    def end(self) -> None:
        """Send SIGKILL to its group, unless it has become something. Idempotent."""


@runtime_checkable
class RunsContainers(Protocol):
    """Processes some of which run in containers: the real ones."""

    async def clear_containers(self, commands: Sequence[Command]) -> str:
        """Remove what the containers of these commands, whose processes have all ended, left in their user's storage.
        Returns why something is left; empty: nothing is."""


@runtime_checkable
class LetsGo(Protocol):
    """Processes that can begin held back."""

    async def let_go(self, pid: int) -> bool:
        """Let a process that began held back (`Command.held_back`) run like any other from now on, with all that it
        started. Returns whether nothing of it is held back any more."""


@runtime_checkable
class KnowsTrees(Protocol):
    """Processes of which it is known what they have started: the real ones."""

    def started_by(self, pid: int) -> Collection[ProcessId]:
        """What this process has started, and what that has, as far as it runs."""


@runtime_checkable
class StartsAhead(Protocol):
    """Processes some of which can be started ahead."""

    async def start_waiting(self, command: Command) -> WaitingProcess:
        """Start a process that waits before its script does anything (`covey.hooks.warm`), and ends with whoever
        started it. OSError when it cannot be started."""


@runtime_checkable
class StartsBetween(Protocol):
    """Processes that can be given a terminal or pipes: the real ones."""

    def start_between(self, command: Command, descriptors: tuple[int, int, int], terminal: bool) -> Process:
        """Start a command whose standard input, output and error are these descriptors, which stay open here.
        `terminal`: they are a terminal, and it becomes the command's own. Without arguments it is the user's shell.
        One with a container runs in the container of the rank whose command it is, which is there. OSError when it
        cannot be started."""

    def signal_between(self, process: Process, number: int) -> None:
        """Send a signal to all of a command that was started so, and to what it runs in a container."""


class Processes(Protocol):
    async def start(self, command: Command) -> Process:
        """Start the command. OSError when it cannot be started (no such file, not executable)."""

    async def start_program(self, program: str, name: str, config: msgspec.Struct) -> Process:
        """Start one of Covey's own byte or supervisor processes (`plugins.registry.PROGRAMS[program]`) detached, so
        that it survives this agent. `name` is its instance; its log is `logs/NAME.log` in the state directory."""

    def resume(self, command: Command) -> Process | None:
        """The process that was started for this `Command.run` before, here or by another process; None when there was
        none. When it has ended, `wait` gives its exit status, None when unknown. OSError when the disk fails."""

    def find(self, process: ProcessId) -> Process | None:
        """That very process, if it is still alive; None otherwise."""

    def last_words(self, name: str) -> str:
        """Why Covey's program that last ran as this instance gave up, in its own words; empty: it said nothing."""
