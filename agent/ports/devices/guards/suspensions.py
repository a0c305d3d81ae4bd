"""Processes that are stopped for a while (SIGSTOP) and let run again (SIGCONT): whole trees, never for longer than a
lease.

A stopped rank must not stay stopped because its agent died, was stopped itself, or forgot it: `suspend_guard.py`, a
process of its own, knows of every stopped process before it is stopped, and lets it run again when the lease is over or
the agent is gone. Whoever wants a rank stopped for longer says so again within `LEASE_S`.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

from agent.ports.devices.guards import suspend_guard
from agent.ports.devices.guards.guard_process import GuardProcess, listed
from agent.ports.processes.procfs import is_alive, stat
from covey.ports.processes import ProcessId

LEASE_S = 10.0
GUARD_S = 2.0
"""Seconds that the guard may take: it answers within a millisecond; one that does not is replaced."""
STILL_S = 1.0
ROUNDS_MAX = 20
"""The most times that a tree is read while it is being stopped, since it may fork: until nothing new is found."""
Tree = Callable[[int], Sequence[ProcessId]]
"""The processes of a rank now; empty when it is not a rank of this host, or is gone."""


class Suspensions:
    """Stops and continues processes of ranks. Blocking calls, from threads; one at a time."""

    def __init__(self, tree: Tree, lease_s: float = LEASE_S) -> None:
        self._tree, self._lease_s = tree, lease_s
        self._lock = threading.Lock()
        self._guard: GuardProcess | None = None
        self._held: dict[int, tuple[ProcessId, ...]] = {}

    def suspend(self, pid: int) -> bool:
        """Stop a rank for a lease from now; whether every process of it is stopped. OSError when no guard can be
        started: then nothing is stopped."""
        with self._lock:
            stopped: set[ProcessId] = set()
            for _ in range(ROUNDS_MAX):
                found = tuple(self._tree(pid))
                if not found or set(found) <= stopped:
                    return bool(stopped) and self._still(found)
                self._say(f"hold {self._lease_s:g} {listed(found)}")
                self._held[pid] = found
                for process in found:
                    _signal(process, signal.SIGSTOP)
                stopped |= set(found)
            return False

    def _still(self, processes: Sequence[ProcessId]) -> bool:
        """Whether these processes have stopped. A signal is taken when the kernel next gives the process a turn; one
        that waits for a disk takes none."""
        end_s = time.monotonic() + STILL_S
        while moving := [one for one in processes if is_alive(one) and (stat(one.pid) or "T")[0] not in ("T", "t")]:
            if time.monotonic() > end_s:
                return not moving
            time.sleep(0.001)
        return True

    def resume(self, pid: int) -> bool:
        """Let a rank run again; whether there was one."""
        with self._lock:
            held = self._held.pop(pid, ())
            found = dict.fromkeys((*self._tree(pid), *held))
            for process in found:
                _signal(process, signal.SIGCONT)
            if held and self._guard is not None:
                with contextlib.suppress(OSError):
                    self._say(f"drop {listed(held)}")
            return bool(found)

    def close(self) -> None:
        """Let everything run again: the guard sees that no agent listens any more."""
        with self._lock:
            self._dismiss()

    def _say(self, line: str) -> None:
        """Say a line to a guard that lives; what is held is told to a new one."""
        for _ in (0, 1):
            if self._guard is None:
                self._guard = GuardProcess(suspend_guard.__file__)
                told = [f"hold {self._lease_s:g} {listed(held)}" for held in self._held.values()]
            else:
                told = []
            if all(self._guard.ask(one, GUARD_S) == "ok" for one in (*told, line)):
                return
            self._dismiss()
        raise OSError("the guard of suspended processes does not answer")

    def _dismiss(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.dismiss(GUARD_S)


def _signal(process: ProcessId, number: int) -> None:
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)
