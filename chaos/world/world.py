"""The simulated world: one seed, one virtual time, many hosts; the same story every time.

    while a loop can run:      pick a random runnable loop, run ONE callback of it, look at the cheap invariants
    when none can:             jump to the next timer or arrival

Everything random comes from generators derived from the seed, so a failure is repeated by its seed alone. `story_hash`
is a running checksum over (process, virtual time, what happened): equal hashes mean equal stories. It must not depend
on PYTHONHASHSEED, on addresses, or on the garbage collector; the collector is therefore off while the world runs and
called at fixed points of the story.
"""

import asyncio
import gc
import inspect
import itertools
import random
import sys
import zlib
from array import array
from asyncio import events
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Protocol

from chaos.world.guard import escape_guard
from chaos.world.host import SimHost, SimProcess, UserProgram
from chaos.world.links import SimLinks
from chaos.world.loop import HostLoop, SimHandle, trace_of
from chaos.world.mischief import Mischief
from chaos.world.net import Network
from chaos.world.streams import Wires
from covey.ports.addresses import Address
from plugins.base import Program

TICK_S = 1e-6
"""Virtual seconds that every callback takes, so that no busy loop can stop time."""
FOLD_EVERY = 2000
"""Callbacks between two foldings of the trail into the hash."""
COLLECT_EVERY = 25 * FOLD_EVERY
"""Callbacks between two garbage collections."""


class Broken(AssertionError):
    """An invariant does not hold, or simulated code failed. The message says which, when, and how to repeat it."""


class Enough(Exception):
    """A replay reached the second at which it was to stop."""


class Invariant(Protocol):
    """Something that must hold whatever happens."""

    name: str
    every_s: float
    """Virtual seconds between two checks; 0: after every callback (must be cheap), or after those that `after` names:
    `moved`, when an agent's log did something; `process_count`, when a process began or ended or a user's program saw
    something wrong. Whatever else happens cannot have changed what such an invariant looks at."""

    def check(self, world: "World") -> None:
        """Check the invariant; raises AssertionError when it does not hold."""


@dataclass(frozen=True)
class Complaint:
    """An exception that simulated code did not catch."""

    at_s: float
    process: str
    what: str
    trace: str


class World:
    """One simulated rack and its time."""

    def __init__(
        self,
        seed: int,
        *,
        log: Callable[[str], None] | None = None,
        programs: Callable[[], Mapping[str, Program]] | None = None,
        strict: bool = True,
        guard: bool = True,
    ) -> None:
        self.seed = seed
        self.now = 0.0
        """Virtual seconds since the story began."""
        self.chance = random.Random(f"{seed}/world")
        self.steps = 0
        self.log = log
        self.strict = strict
        self.guard = guard
        self.replay = f"covey-chaos sim --seed {seed}"
        """The line that repeats this story."""
        self.stop_at = float("inf")
        """Virtual second at which `run` raises `Enough`."""
        self.hosts: dict[str, SimHost] = {}
        self.link_ends: dict[Address, SimLinks] = {}
        self.invariants: list[Invariant] = []
        self.complaints: list[Complaint] = []
        self.counts: dict[str, int] = {}
        """How often each kind of event was marked."""
        self.on_loss: list[Callable[[SimHost, SimProcess | None], None]] = []
        """Functions called with every process that ended, and with every host (no process) that lost its power."""
        self.on_log: list[Callable[[str, Mapping[str, Any]], None]] = []
        """Functions called with what is logged anywhere: the event, and its fields."""
        self.on_message: list[Callable[[SimProcess, SimProcess], None]] = []
        """Functions called with who sent and who is to get each message of a connection, before that gets it."""
        self.user_programs: dict[str, UserProgram] = {}
        self.programs: Callable[[], Mapping[str, Program]] = programs or dict
        self.process_count = 0
        """Number of processes that began or ended, and of things that users' programs saw that must never be."""
        self.last: HostLoop | None = None
        """The loop that ran last."""
        self.parked: list[asyncio.Task[Any]] = []
        self.mischief = Mischief(seed)
        self.network = Network(self, random.Random(f"{seed}/network"))
        self.wires = Wires(self)
        self._order = random.Random(f"{seed}/order")
        self._heap: list[tuple[float, int, Any]] = []
        """Entries of (time, a number, a timer of a loop or a function of the world's own)."""
        self._sequence = itertools.count()
        self._numbers = itertools.count(1)
        self._runnable: list[HostLoop] = []
        self._after: dict[str, list[Invariant]] = {"any": [], "moved": [], "process_count": []}
        self._process_count_seen = -1
        self._broken: Broken | None = None
        self._running: HostLoop | None = None
        """The loop that asyncio takes for the running one."""
        self._hash = 0
        self._trail: list[str] = []
        """Processes that ran and marks that were made since the last folding."""
        self._times = array("d")
        self._numbers_marked = array("Q")

    # ---- building ----------------------------------------------------------------------------------------------------

    def add_host(self, name: str, gpus: int = 0) -> SimHost:
        number = len(self.hosts) + 1
        host = SimHost(self, name, f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}", gpus)
        self.hosts[name] = host
        self.network.hosts_by_ip[host.ip] = host
        self.network.names[name] = (host.ip,)
        return host

    def watch(self, invariant: Invariant) -> None:
        """Look at this invariant from now on."""
        self.invariants.append(invariant)
        if invariant.every_s <= 0:
            self._after[getattr(invariant, "after", "any")].append(invariant)
        else:
            self.at(self.now + invariant.every_s, lambda: self._again(invariant))

    def _again(self, invariant: Invariant) -> None:
        self._look(invariant)
        self.at(self.now + invariant.every_s, lambda: self._again(invariant))

    def _look(self, invariant: Invariant) -> None:
        try:
            invariant.check(self)
        except AssertionError as error:
            if self._broken is None:
                self._broken = self.broken(f"{invariant.name}: {error}")

    def broken(self, why: str) -> Broken:
        return Broken(f"{why}\nat {self.now:.6f} s of seed {self.seed}; repeat with: {self.replay}")

    def user_program(self, argv: Sequence[str]) -> UserProgram | None:
        for word in argv[:2]:
            found = self.user_programs.get(word) or self.user_programs.get(word.rpartition("/")[2])
            if found is not None:
                return found
        return None

    # ---- what loops and ports call -----------------------------------------------------------------------------------

    def number(self) -> int:
        return next(self._numbers)

    def offer(self, loop: HostLoop) -> None:
        if loop.ready and not loop.queued and not loop.held:
            loop.queued = True
            self._runnable.append(loop)

    def at(self, when: float, event: Callable[[], object] | SimHandle) -> None:
        """Post something that happens in the world itself (a packet arrives, a fault strikes), or a timer of a loop."""
        heappush(self._heap, (when, next(self._sequence), event))

    def mark(self, kind: str, who: str, detail: str = "", number: int = 0) -> None:
        """Mark an event of the story: it enters the hash, the counts and, when a caller asked for it, the log."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self._trail += (kind, who)
        self._times.append(self.now)
        self._numbers_marked.append(number)
        if self.log is not None and kind not in ("datagram", "bytes", "link"):
            self.log(f"{self.now:12.6f} {who:<16} {kind}{': ' + detail if detail else ''}")

    @property
    def story_hash(self) -> int:
        """Hash of all that happened so far: who ran when, and what was marked."""
        found = zlib.crc32("\0".join(self._trail).encode(), self._hash)
        return zlib.crc32(self._numbers_marked, zlib.crc32(self._times, found))

    def _fold(self) -> None:
        self._hash = self.story_hash
        self._trail.clear()
        del self._times[:], self._numbers_marked[:]

    def log_line(self, level: str, who: str, event: str, fields: Mapping[str, Any]) -> None:
        self.counts[f"log {level}"] = self.counts.get(f"log {level}", 0) + 1
        for hears in self.on_log:
            hears(event, fields)
        if self.log is not None:
            told = " ".join(f"{key}={value}" for key, value in fields.items())
            self.log(f"{self.now:12.6f} {who:<16} {level}: {event} {told}".rstrip())

    def complain(self, process: SimProcess, error: BaseException, what: str) -> None:
        complaint = Complaint(self.now, process.name, what, trace_of(error))
        self.complaints.append(complaint)
        self.log_line("error", process.name, f"uncaught exception in {what}", {"trace": complaint.trace})
        if self.strict and process.kind != "user" and self._broken is None:
            self._broken = self.broken(f"uncaught exception in {process.name}, {what}:\n{complaint.trace}")

    def reap(self, tasks: list["asyncio.Task[Any]"]) -> None:
        self.parked.extend(tasks)

    # ---- running -----------------------------------------------------------------------------------------------------

    def run(self, until: float | None = None, stop: Callable[[], bool] | None = None) -> bool:
        """Run until virtual time `until`, or until `stop()` (looked at after every callback) is true; returns whether
        it was. Raises `Broken` at the first invariant that does not hold. With nothing left to happen the time becomes
        `until`."""
        limit = min(self.stop_at, float("inf") if until is None else until)
        outer = events._get_running_loop()
        was_collecting = gc.isenabled()
        gc.disable()
        events._set_running_loop(None)
        self._running = None
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=None, finalizer=_finalize)
        try:
            with ExitStack() as stack:
                if self.guard:
                    stack.enter_context(escape_guard())
                reached = self._steps(limit, stop)
            if self.now >= self.stop_at:
                raise Enough(f"stopped at {self.now:.6f} s as asked")
            return reached
        finally:
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(outer)
            if was_collecting:
                gc.enable()

    def _steps(self, limit: float, stop: Callable[[], bool] | None) -> bool:
        """Step loops and timers. One long function: a story spends nearly all its time here."""
        heap, runnable, chance = self._heap, self._runnable, self._order.random
        ran, at = self._trail.append, self._times.append
        always, moved = self._after["any"], self._after["moved"]
        while True:
            if stop is not None and stop():
                return True
            now = self.now
            while heap and heap[0][0] <= now:
                what = heappop(heap)[2]
                if type(what) is not SimHandle:
                    what()
                elif not what.off:
                    what.loop.due(what)
            if self._broken is not None:
                raise self._broken
            if not runnable:
                if not heap or heap[0][0] > limit:
                    self.now = max(now, limit if limit != float("inf") else now)
                    return False
                self.now = heap[0][0]
                continue
            if now > limit:
                return False
            place = int(chance() * len(runnable)) if len(runnable) > 1 else 0
            loop = runnable[place]
            ready = loop.ready
            if ready and not loop.held:
                handle = ready.popleft()
                if not handle.off:
                    self.now = now + TICK_S
                    self.last = loop
                    if self._running is not loop:  # setting it costs more than many a callback
                        self._running = loop
                        events._set_running_loop(loop)
                    try:
                        if handle.context is None:
                            handle.callback(*handle.args)
                        else:
                            handle.context.run(handle.callback, *handle.args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:
                        what = f"exception in {handle.callback!r}"
                        loop.call_exception_handler({"message": what, "exception": error})
                    ran(loop.name)
                    at(self.now)
                    self.steps = steps = self.steps + 1
                    if loop.callback_s and not loop.dead:
                        loop.work()
                        self.at(self.now + loop.callback_s, loop.rest)
                    if always or self.process_count != self._process_count_seen:
                        self._look_on()
                    if loop.agent_moved is not None and loop.agent_moved():
                        for invariant in moved:
                            self._look(invariant)
                    if steps % FOLD_EVERY == 0:
                        self._tidy()
            if loop.held or not ready:
                loop.queued = False
                runnable[place] = runnable[-1]
                runnable.pop()

    def _look_on(self) -> None:
        """Check, after a callback, the invariants of every callback, and those for a changed number of processes."""
        for invariant in self._after["any"]:
            self._look(invariant)
        if self.process_count != self._process_count_seen:
            self._process_count_seen = self.process_count
            for invariant in self._after["process_count"]:
                self._look(invariant)

    def _tidy(self) -> None:
        self._fold()
        if self.steps % COLLECT_EVERY == 0:
            gc.collect()

    def close(self) -> None:
        """Free everything. What dead tasks still do in their `finally` blocks changes nothing any more."""
        self.log, self.strict = None, False
        for host in self.hosts.values():
            for process in list(host.processes.values()):
                process.loop.failed = None
                process.let_go()
                process.alive = False
                process.loop.close()
            host.processes.clear()
        outer = events._get_running_loop()
        for task in self.parked:
            events._set_running_loop(task.get_loop())
            _let_go(task.get_coro())
        events._set_running_loop(outer)
        self.parked.clear()
        self._heap.clear()
        self._runnable.clear()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _let_go(coroutine: Any) -> None:
    """Close a parked coroutine, through every `finally` block that waits for something more; and the coroutines that
    it was given, when it never began. A compiled one knows nothing of its state."""
    frame = getattr(coroutine, "cr_frame", None)
    if frame is not None and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
        for given in list(frame.f_locals.values()):
            if inspect.iscoroutine(given):
                _let_go(given)
    for _ in range(100):
        try:
            coroutine.close()
            return
        except RuntimeError as error:
            if "ignored GeneratorExit" not in str(error):
                return
        except Exception:
            return


def _finalize(generator: Any) -> None:
    """Handle an async generator that was dropped half-way: close it on the loop that dropped it, if there is one."""
    loop = events._get_running_loop()
    if loop is not None:
        loop.call_soon(lambda: loop.create_task(generator.aclose()))
