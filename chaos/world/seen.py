"""What the ports and loops of a simulated world see of their process, its host and the world, which make them."""

import asyncio
import mmap
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from chaos.world.mischief import Mischief
from covey.ports.addresses import Address
from covey.ports.env import Env
from covey.ports.processes import Command, ProcessId
from plugins.base import Program


class WorldSeen(Protocol):
    """The world: `chaos.world.world.World`."""

    seed: int
    now: float
    """Virtual seconds since the story began."""
    chance: random.Random
    mischief: Mischief
    process_count: int
    """Number of processes that began or ended, and of what users' programs saw that must never be."""
    programs: Callable[[], Mapping[str, Program]]
    network: Any
    """The `chaos.world.net.Network`."""
    wires: Any
    """The `chaos.world.streams.Wires`."""
    hosts: Any
    """The hosts by name."""
    link_ends: dict[Address, Any]
    """The `chaos.world.links.SimLinks` that is open at each address."""
    on_loss: list[Any]
    """What is called with every process that ended, and with every host that lost its power."""
    on_message: list[Any]
    """What is called with who sent and who is to get each message of a connection, before that gets it."""

    def number(self) -> int:
        """A number that was never given before."""

    def at(self, when: float, event: Any) -> None:
        """Let something happen at this time of the world, s: a call, or a timer of a loop."""

    def offer(self, loop: Any) -> None:
        """Run a callback of this loop, one day."""

    def mark(self, kind: str, who: str, detail: str = "", number: int = 0) -> None:
        """Make an event part of the story."""

    def log_line(self, level: str, who: str, event: str, fields: dict[str, Any]) -> None:
        """Keep a line of a log."""

    def complain(self, process: Any, error: BaseException, what: str) -> None:
        """Report an exception that simulated code did not catch."""

    def reap(self, loop: Any) -> None:
        """Forget the tasks of a loop that never runs again."""

    def user_program(self, argv: Sequence[str]) -> Any:
        """What this command does; None: it is unknown."""


class HostSeen(Protocol):
    """A machine: `chaos.world.host.SimHost`."""

    name: str
    ip: str
    up: bool
    commands: dict[int, Command]
    """What was started, by pid, also after its end."""

    @property
    def world(self) -> WorldSeen:
        """The world that the host is in."""

    @property
    def processes(self) -> dict[int, Any]:
        """The processes of the host by pid."""

    @property
    def runs(self) -> dict[str, Any]:
        """The process that was started for each `Command.run`."""

    def free_port(self, taken: Callable[[int], bool]) -> int:
        """A port that is not taken."""

    def ephemeral_port(self) -> int:
        """A port for the calling end of a connection."""


class ProcessSeen(Protocol):
    """A process on a host: `chaos.world.host.SimProcess`."""

    name: str
    id: ProcessId
    uid: int
    alive: bool
    env: Env
    resources: list[Any]
    """What the kernel holds for it."""
    rings: dict[str, mmap.mmap]
    ring_number: int
    waiters: list[asyncio.Future[None]]

    @property
    def host(self) -> HostSeen:
        """The host that the process is on."""

    @property
    def world(self) -> WorldSeen:
        """The world of that host."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that runs the process."""

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> object:
        """Start a task that is kept."""

    def signal(self, number: int) -> None:
        """Send the process a signal."""
