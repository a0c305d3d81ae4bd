"""Ports: the interfaces for everything a service may use outside itself.

Production ports are in `agent/`, simulated ones in `chaos/`; services cannot tell which they hold. asyncio itself
(tasks, `asyncio.sleep`, `loop.call_later`, queues) is allowed in services: under the simulator the running loop is a
virtual one. Everything else - clocks, chance, datagrams, links, bytes, disk, processes, probes - comes through `Env`.
"""

import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec

from covey.core.ids import HostId
from covey.ports.devices import TAKES_JOBS as TAKES_JOBS
from covey.ports.devices import Condition as Condition
from covey.ports.devices import Device as Device
from covey.ports.devices import DeviceHealth as DeviceHealth
from covey.ports.devices import DeviceProcess as DeviceProcess
from covey.ports.devices import Devices as Devices
from covey.ports.devices import DeviceSample as DeviceSample
from covey.ports.devices import Gpu as Gpu
from covey.ports.verbs import NO_VERBS_HERE, Verbs

Address = str
"""Address such as `127.0.0.1:7946`, `[::1]:7946` or `unix:/run/covey/agent.sock`. Port 0 asks for a free one."""


class Clock(Protocol):
    """Clocks that never go back, for decisions; one clock for people; and the CPU time of this thread."""

    def now_s(self) -> float:
        """Monotonic seconds with microsecond resolution, never the event loop's cached time."""

    def wall_s(self) -> float:
        """Seconds since 1970, for display only."""

    def boot_s(self) -> float:
        """Seconds since this machine started, with the time it slept: the same for all processes of the machine. Leases
        use this clock, since a machine that was suspended must find that its leases are over."""

    def cpu_s(self) -> float:
        """Seconds of CPU time that the calling thread has used; always 0 in the simulator, where work takes no time."""


class Logger(Protocol):
    """A structlog logger bound to one host. `event` is a fixed phrase; what varies goes into fields."""

    def debug(self, event: str, **fields: Any) -> Any: ...
    def info(self, event: str, **fields: Any) -> Any: ...
    def warning(self, event: str, **fields: Any) -> Any: ...
    def error(self, event: str, **fields: Any) -> Any: ...


class DatagramSocket(Protocol):
    @property
    def address(self) -> Address: ...
    def send(self, data: bytes, to: Address) -> bool:
        """Send one datagram, best effort; never blocks, never raises for what the network does. False when it certainly
        did not leave this host (no IP address, no route, full buffers); True promises nothing."""

    def close(self) -> None: ...


class Datagrams(Protocol):
    async def open(self, bind: Address, received: Callable[[bytes, Address], None]) -> DatagramSocket:
        """A socket at `bind`, which calls `received` for each datagram. OSError when the address cannot be bound."""

    async def resolve(self, address: Address) -> Sequence[Address]:
        """All addresses of `NAME:PORT`, at least one; an IP address unchanged. May take many seconds. OSError when the
        name does not resolve now."""


class Links(Protocol):
    """Control messages between hosts: authenticated, encrypted, **at most once and lost silently** (ZeroMQ's way).
    Messages to a peer keep their order within one connection. `agent/rpc/rpc.py` puts ids, acknowledgements, retries
    and duplicates on top."""

    @property
    def address(self) -> Address: ...
    @property
    def public_key(self) -> bytes: ...
    async def open(self, bind: Address, heard: Callable[[HostId, bytes], None]) -> None: ...
    def know(self, host: HostId, address: Address, public_key: bytes) -> None:
        """Set the address of a host and the key it must prove; a changed address or key replaces the old one."""

    def forget(self, host: HostId) -> None: ...
    def send(self, to: HostId, data: bytes) -> bool:
        """Send one message. False when it was certainly not sent (unknown host, full outbox); True promises nothing."""

    async def close(self) -> None: ...


class Handed(Protocol):
    """A descriptor of this process that can be passed to another process."""

    @property
    def descriptor(self) -> int:
        """The descriptor; -1 once it is closed."""

    def close(self) -> None:
        """Close the descriptor in this process. Idempotent."""


class SharedPage(Handed, Protocol):
    """A page of `covey.kernel.pages`, made here, whose descriptor is sent to the process that maps it."""

    @property
    def view(self) -> Any:
        """The page itself; writable where this process is the writer."""

    def seal(self) -> None:
        """Seal the page, once its writer has mapped it, against all other writers. OSError when the kernel cannot."""


class HeldMemory(Protocol):
    """A `SharedRing` of another process, which exists as long as this object is held."""

    name: str
    """Name by which other processes open the memory from here."""

    def close(self) -> None:
        """Give the memory back here; no view of it may be used any more. Idempotent."""


class SharedRing(HeldMemory, Protocol):
    """Memory that two processes of a host share."""

    locked: bool
    """Whether the memory cannot be swapped out."""
    view: memoryview
    """All of the memory, writable; begins at a page of the machine."""

    def empty(self) -> None:
        """Give the memory back to the kernel: all who map it read zeros then. OSError when the kernel refuses."""


class Pages(Protocol):
    def make(self, kind: str, mine: bool) -> SharedPage:
        """A page of zeros. `mine`: this process writes it, and it is sealed at once. OSError when there is no memory or
        descriptor for it, or the kernel has no sealed memory."""

    def make_memory(self, ranks: int, first: int) -> SharedPage:
        """Memory of `covey.tensors.same_host.layout` for `ranks` ranks from `first` on; this process needs no view of
        it. OSError as of `make`."""

    def make_ring(self, size: int, sparse: bool = False) -> "SharedRing":
        """`size` bytes of zeros for this process and another one of this host, locked in memory where that is
        permitted; they exist as long as one of the two holds them. `sparse`: a page takes memory, and is locked, from
        its first use on. OSError as of `make`."""

    def open_ring(self, name: str, size: int, sparse: bool = False) -> "SharedRing":
        """Memory that a living process of this user made, or holds. OSError when it is gone, or has another size."""

    def hold(self, name: str, size: int) -> "HeldMemory":
        """Hold memory without using it. OSError as of `open_ring`."""


class ByteStream(Protocol):
    """One connection for bulk bytes. Every method raises ConnectionError (or its subclass) once the peer is gone."""

    @property
    def peer(self) -> Address: ...
    @property
    def uid(self) -> int:
        """The user at the other end of a unix socket, as the kernel tells it (SO_PEERCRED). Over TCP, and where the
        kernel does not tell, `UNKNOWN_USER`, whom no rule lets in."""

    @property
    def same_host(self) -> bool:
        """Whether both ends are on this host, by their addresses."""

    async def read_into(self, view: memoryview) -> None:
        """Fill all of `view`, without an extra copy. ConnectionError when the stream ends before it is full."""

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Queue all parts as one unit (never interleaved with another write); waits while the outbox is full. The
        buffers may be reused once this returns."""

    async def write_with(self, data: bytes, pages: Sequence[Handed]) -> None:
        """Write `data`, and with it the descriptors of `pages` (SCM_RIGHTS); unix sockets only. The receiver has them,
        in order, by the time it has read `data`. Nothing is sent when one of them was closed meanwhile."""

    def close(self) -> None: ...


class Listener(Protocol):
    @property
    def address(self) -> Address:
        """The address bound, with the real port."""

    async def close(self) -> None:
        """Stop accepting, and close every stream that was accepted here."""


class HeldPort(Protocol):
    """A TCP port that is bound but does not listen: no other process gets it, and connections are refused."""

    @property
    def port(self) -> int: ...
    def release(self) -> None: ...


Accept = Callable[[ByteStream], Coroutine[Any, Any, None]]
UNKNOWN_USER = -3
"""The uid of an unknown user. Two more negative numbers exist: -1 (a volume without an owner) and `ANYBODY`."""
ANYBODY = -2
"""The uid for `listen` when any user may connect: who connects is asked for a secret."""


class Bytes(Protocol):
    async def listen(self, bind: Address, accept: Accept, uid: int = -1, bulk: bool = False) -> Listener:
        """Run `accept(stream)` as a task per connection; the stream closes when it returns or raises. `uid`: user who
        gets access to a unix socket; -1: our own user alone. `bulk`: the connections carry bulk bytes
        (`covey.wire.bulk`)."""

    async def connect(self, to: Address, timeout_s: float = 2.0) -> ByteStream:
        """A connection to `to`. ConnectionRefusedError when that machine says that nothing listens there,
        ConnectionError otherwise."""

    def hold(self, ip: str, port: int = 0) -> HeldPort:
        """Reserve a TCP port for a process that binds it after the release. OSError when it is taken."""

    async def pair(self) -> tuple[ByteStream, Handed]:
        """A connection whose other end is handed to another process, or to the kernel. OSError."""


class Disk(Protocol):
    """Durable files in this host's state directory. Names are relative, of `a-z0-9._-` and `/`. OSError on failure."""

    async def read(self, name: str) -> bytes | None: ...
    async def replace(self, name: str, data: bytes) -> None:
        """Replace the file: after a crash it is the old one or the new one, whole; durable on return."""

    async def append(self, name: str, data: bytes) -> None:
        """Append, durable on return. A crash may leave a torn tail: records carry their own length and checksum."""

    async def truncate(self, name: str, size: int) -> None: ...
    async def write_at(self, name: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write at `offset`; not durable until `sync`."""

    async def read_at(self, name: str, offset: int, size: int) -> bytes:
        """Exactly `size` bytes; holes and what is beyond the end read as zeros."""

    async def sync(self, name: str) -> None: ...
    async def delete(self, name: str) -> None: ...
    async def names(self, prefix: str) -> list[str]:
        """All files whose name starts with `prefix`, sorted."""

    def path(self, name: str) -> str:
        """The absolute path, for another process on this host."""


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
    output_keep_free: int = 0
    """Bytes of the disk that the output leaves free, whatever it may hold; for a process with `run`."""
    cores: tuple[int, ...] = ()
    """Cores on which the process and all that it starts run, for a process with `run`; empty: any."""
    held_back: bool = False
    """Whether the process begins with cores that others leave idle, until `LetsGo.let_go`; with `run` only."""


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
class LetsGo(Protocol):
    """Processes that can begin held back."""

    async def let_go(self, pid: int) -> bool:
        """Let a process that began held back (`Command.held_back`) run like any other from now on, with all that it
        started. Returns whether nothing of it is held back any more."""


@runtime_checkable
class StartsAhead(Protocol):
    """Processes some of which can be started ahead."""

    async def start_waiting(self, command: Command) -> WaitingProcess:
        """Start a process that waits before its script does anything (`covey.hooks.warm`), and ends with whoever
        started it. OSError when it cannot be started."""


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


class MemoryNow(msgspec.Struct, frozen=True):
    """Memory of one host now: the smaller of the machine's and the cgroup's."""

    total_bytes: int
    available_bytes: int
    pressure_some_avg10: float
    """Percent of the last 10 s in which some task waited for memory (PSI); 0 where the kernel has no PSI."""


class Probes(Protocol):
    @property
    def devices(self) -> Devices:
        """The devices that jobs of this host share: its GPUs, or what is in their place."""

    def gpus(self) -> Sequence[Gpu]:
        """All GPUs that this host has, whatever its driver says of them now, until an operator says otherwise."""

    def gpus_unlisted(self) -> str:
        """Why it is not known which GPUs this host has, in words; empty: `gpus` has them all."""

    def forget_gpu(self, uuid: str) -> str:
        """Forget this GPU: its XIDs, and, unless the driver lists it, that it is here. Returns what was forgotten, in
        words; empty: nothing was remembered."""

    def memory(self) -> MemoryNow: ...
    def cores(self) -> int:
        """Number of processors that this process may use."""

    def watch_memory(self, stalls: Callable[[], None]) -> str:
        """From now on call `stalls` on this loop whenever tasks of this machine have waited for memory for 0.15 s of 2
        s. Returns why that is impossible, in words; empty: it works."""

    def stay_in_memory(self, flushes: bool) -> str:
        """From now on nothing of this process is swapped out. `flushes`: a disk of this host may depend on it, so the
        kernel does not wait for disks when it needs memory for it. Returns why that is impossible, in words; empty: it
        works."""

    def swap_lacks(self, helper: str) -> str:
        """Why no volume can be swap of this host, and the next step; empty: a helper listens there, and the kernel has
        what is needed, as far as can be seen without asking."""

    def keep_heap(self, size_bytes: int) -> str:
        """Take `size_bytes` of memory for requests now and never give it back, so that a request under load finds some.
        0: take none, but keep some of what is freed for the next request, which then need not ask the kernel. Returns
        why that is impossible, in words; empty: it works."""

    def watch_loop(self) -> "LoopStalls":
        """From now on, until the process ends, measure how long this loop is held up."""


class LoopStalls(Protocol):
    """How long one loop was held up: by its own callbacks, and (`waits`) by a machine that had no processor for it."""

    @property
    def count(self) -> int:
        """How often the loop was held up for more than 5 ms."""

    @property
    def longest_s(self) -> float:
        """The longest delay of the last minute or two, in seconds."""

    @property
    def waits_count(self) -> int: ...

    @property
    def waits_longest_s(self) -> float: ...


@dataclass(frozen=True)
class Env:
    """The ports of one host, or of one program. Given to every service when it is made."""

    host: HostId
    clock: Clock
    rng: random.Random
    entropy: Callable[[int], bytes]
    """Unpredictable bytes, for keys, tokens and nonces."""
    spawn: Callable[[str, Coroutine[Any, Any, Any]], object]
    """Run a coroutine as a named task that is kept, cancelled at shutdown, and whose exception stops its plugin."""
    log: Logger
    datagrams: Datagrams
    links: Links
    bytes: Bytes
    disk: Disk
    processes: Processes
    probes: Probes
    pages: Pages
    run_dir: str
    """Directory of this host's unix sockets: `unix:{run_dir}/NAME.sock`. Short: a socket path has 107 bytes at most."""
    verbs: Verbs = NO_VERBS_HERE
