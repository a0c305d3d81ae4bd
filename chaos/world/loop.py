"""A virtual asyncio loop: one per simulated host's agent and one per simulated process.

A `HostLoop` has no selector, no file descriptor and no thread. `call_soon` puts a handle into the loop's own queue,
first in, first out, as asyncio promises and library code relies on; `call_at` puts it into the one heap of the world.
`chaos.world.world.World` picks a random runnable loop and runs ONE handle of it, so callbacks of one process keep their
order while those of different processes interleave freely: exactly what real hosts do.

Three things come for free with a loop per process. *Pause* (SIGSTOP) is a loop that is not stepped. *Crash* (kill -9)
is a loop that will never be stepped again; its tasks are parked, so that their `finally` blocks do not run, as in a
real kill -9. *A skewed clock* is a loop whose `time()` runs at another rate.

Tasks hash to a counter instead of their address: the done set of `asyncio.wait`, the cancel order of a `TaskGroup` and
`asyncio.all_tasks()` are then iterated in the same order in every run of the same seed. Futures are asyncio's own,
which tasks await without a detour through Python; a set of bare futures has no order that anybody may rely on.
"""

import asyncio
import contextvars
import traceback
import weakref
from asyncio.futures import _set_result_unless_cancelled as end_sleep  # type: ignore[attr-defined]
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, Protocol

from chaos.world.seen import WorldSeen

EXECUTOR_S = (0.0001, 0.002)
"""Least and most seconds after which a job handed to `run_in_executor` runs (inline: there are no threads)."""


TASKS = 64
"""Most references to tasks before those to tasks that are gone are dropped."""


class LocalClock(Protocol):
    """A host's own monotonic clock, and the way back from it to the world's time."""

    def now_s(self) -> float: ...
    def world_time(self, local_s: float) -> float: ...


class SimTask(asyncio.Task[Any]):
    """A task whose hash is its number within the world."""

    def __init__(self, number: int, coro: Any, **options: Any) -> None:
        self.number = number  # before the base class, which puts the task into a set
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number


class SimHandle:
    """What asyncio asks of its `Handle` and `TimerHandle`, and nothing more. Without a context of its own the callback
    runs in that of the world, which is never changed."""

    __slots__ = ("args", "callback", "context", "loop", "off", "when_s")

    def __init__(
        self,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
        loop: "HostLoop",
        when_s: float = 0.0,
    ) -> None:
        self.callback, self.args, self.context = callback, args, context
        self.loop, self.when_s = loop, when_s
        self.off = False

    def cancel(self) -> None:
        self.off, self.args = True, ()

    def cancelled(self) -> bool:
        return self.off

    def when(self) -> float:
        """When a timer is due, by the loop's clock in seconds."""
        return self.when_s


class HostLoop(asyncio.BaseEventLoop):
    """The loop of one simulated process. Stepped by the world, never run by itself."""

    create_future: Any

    def __init__(self, world: WorldSeen, name: str, clock: LocalClock) -> None:
        super().__init__()
        self.world, self.name, self.clock = world, name, clock
        self.time = clock.now_s  # type: ignore[method-assign]
        self.get_debug = bool  # type: ignore[method-assign]  # False, without a frame of Python for every future
        self.create_future = partial(asyncio.Future, loop=self)
        self.ready: deque[SimHandle] = deque()
        self.agent_moved: Callable[[], bool] | None = None
        """For an agent's loop: whether the callback that just ran changed what the agent's invariants concern."""
        self.paused = False
        self.dead = False
        self.queued = False
        """Whether the loop is in the world's list of runnable loops."""
        self.held = False
        """Whether the loop is not stepped now: paused, or busy until the virtual cost of its last callback is paid."""
        self.callback_s = 0.0
        """Virtual seconds that every callback costs here (a slow host); 0: none."""
        self.failed: Callable[[BaseException, str], None] | None = None
        """Called for an exception that no code caught."""
        self._busy = False
        self._tasks: list[weakref.ref[asyncio.Task[Any]]] = []
        self._tasks_max = TASKS
        self.set_exception_handler(self._uncaught)

    # ---- what asyncio calls ------------------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> SimHandle:
        handle = SimHandle(callback, args, context, self)
        if not self.dead:  # a dead loop forgets it
            self.ready.append(handle)
            if not (self.queued or self.held):
                self.world.offer(self)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> SimHandle:
        when = self.time() + delay
        timer = SimHandle(callback, args, context, self, when)
        if not self.dead:
            self.world.at(self.clock.world_time(when), timer)
        return timer

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> SimHandle:
        timer = SimHandle(callback, args, context, self, when)
        if not self.dead:
            self.world.at(self.clock.world_time(when), timer)
        return timer

    def create_task(self, coro: Any, **options: Any) -> Any:
        number = self.world.number()
        options["name"] = options.get("name") or f"task-{number}"
        task = SimTask(number, coro, loop=self, **options)
        self._tasks.append(weakref.ref(task))
        if len(self._tasks) > self._tasks_max:
            self._tasks = [kept for kept in self._tasks if kept() is not None]
            self._tasks_max = TASKS + 2 * len(self._tasks)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        """Run the job inline after a short random delay: no thread, the same order in every run."""
        future: asyncio.Future[Any] = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                future.set_exception(error)

        self.call_later(self.world.chance.uniform(*EXECUTOR_S), run)
        return future

    def _no_sockets(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("a simulated process has no sockets, signals or children: use the ports in Env")

    create_connection = create_server = create_datagram_endpoint = _no_sockets
    create_unix_connection = create_unix_server = subprocess_exec = subprocess_shell = _no_sockets
    add_reader = add_writer = add_signal_handler = _no_sockets  # type: ignore[assignment]
    run_forever = run_until_complete = _no_sockets

    def __del__(self) -> None:
        """Do nothing: a loop of no sockets needs no closing."""

    # ---- what the world calls ----------------------------------------------------------------------------------------

    def due(self, timer: SimHandle) -> None:
        """Handle a timer whose time has come. A sleep is over without a callback of the process."""
        if self.dead:
            return
        if self.time() < timer.when_s - 1e-6:  # the clock was slowed down meanwhile
            self.world.at(self.clock.world_time(timer.when_s), timer)
        elif timer.callback is end_sleep:
            end_sleep(*timer.args)
        else:
            self.ready.append(timer)
            if not (self.queued or self.held):
                self.world.offer(self)

    def pause(self) -> None:
        self.paused = self.held = True

    def resume(self) -> None:
        self.paused, self.held = False, self._busy
        self.world.offer(self)

    def work(self) -> None:
        """Mark the loop busy, since its last callback takes a while."""
        self._busy = self.held = True

    def rest(self) -> None:
        self._busy, self.held = False, self.paused
        self.world.offer(self)

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Tasks of this loop that are not done, oldest first. (`asyncio.all_tasks` looks at those of all loops.)"""
        known = (kept() for kept in self._tasks)
        return [task for task in known if task is not None and not task.done()]

    def kill(self) -> list[asyncio.Task[Any]]:
        """Never step this loop again. Returns the tasks that it leaves behind, oldest first, for `World.reap`."""
        self.dead = True
        self.ready.clear()
        left = self.tasks()
        for task in left:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        return left

    def _uncaught(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        message = str(context.get("message", ""))
        if self.failed is not None and not self.dead:
            self.failed(error if isinstance(error, BaseException) else RuntimeError(message), message)


def trace_of(error: BaseException) -> str:
    """The traceback of an exception, as text."""
    return "".join(traceback.format_exception(error)).rstrip()
