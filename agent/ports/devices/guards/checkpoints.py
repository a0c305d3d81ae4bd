"""Ranks that give up their GPU for a while: by CUDA's checkpoint their memory there is moved to the host, and their
calls of CUDA wait (drivers from 570 on: `cuCheckpointProcessLock`, `Checkpoint`, `Restore`, `Unlock`). Never run on a
GPU so far.

A rank must not stay out because its agent died: `checkpoint_guard.py`, a process of its own, moves it back when a lease
is over or the agent is gone. SIGSTOP is not used in its place: a stopped process keeps its memory of the GPU, and what
it had queued runs on, so it would free nothing for others. Processes that share device memory with others (some of
NCCL's transports) are refused by the driver: then they stay as they are.
"""

import subprocess
import threading
from collections.abc import Callable, Sequence

from agent.ports.devices.guards import checkpoint_guard
from agent.ports.devices.guards.guard_process import GuardProcess, guard_command, listed
from agent.ports.processes.procfs import is_alive
from covey.ports.processes import ProcessId

LEASE_S = 10.0
ANSWER_S = 60.0
"""Seconds that the guard may take: memory of a GPU moves to the host at some 10 GiB/s."""
ABLE_S = 10.0
DISMISS_S = 0.1
"""Seconds for which a dismissed guard is waited for: it ends only when all processes are back."""
_SILENT = "the guard of checkpointed processes does not answer"
Users = Callable[[int], Sequence[ProcessId]]
"""The processes of a rank that use a GPU now; empty when it is not a rank of this host, or uses none."""


class Checkpoints:
    """Moves ranks' memory out of GPUs and back. Blocking calls, from threads; one at a time."""

    def __init__(self, users: Users, library: str = checkpoint_guard.LIBRARY, lease_s: float = LEASE_S) -> None:
        self._users, self._library, self._lease_s = users, library, lease_s
        self._lock = threading.Lock()
        self._guard: GuardProcess | None = None
        self._held: dict[int, tuple[ProcessId, ...]] = {}
        self._able: bool | None = None
        self.why = ""
        """The guard's words, when it did not do what it was last asked."""

    def able(self) -> bool:
        """Whether this host's driver can do it. A guard that ends then is asked once."""
        if self._able is None:
            command = guard_command(checkpoint_guard.__file__, self._library)
            try:
                done = subprocess.run(command, input=b"able\n", capture_output=True, timeout=ABLE_S, check=False)
                self._able = done.stdout == b"ok\n"
            except (OSError, subprocess.TimeoutExpired):
                self._able = False
        return self._able

    def suspend(self, pid: int) -> bool:
        """Move a rank out for a lease from now; whether nothing of its memory is on a GPU."""
        with self._lock:
            known = (*self._held.get(pid, ()), *self._users(pid))
            found = tuple(dict.fromkeys(one for one in known if is_alive(one)))
            if not found or not self.able() or not self._ask(f"hold {self._lease_s:g} {listed(found)}"):
                return False
            self._held[pid] = found
            return True

    def resume(self, pid: int) -> bool:
        """Move a rank back; whether it was out, and is back. One for which the GPU has no room yet comes back as soon
        as there is."""
        with self._lock:
            held = self._held.pop(pid, ())
            return bool(held) and self._ask(f"drop {listed(held)}")

    def close(self) -> None:
        """Let all ranks come back: the guard sees that no agent listens any more."""
        with self._lock:
            self._dismiss()

    def _ask(self, line: str) -> bool:
        if self._guard is None:
            self._guard = GuardProcess(checkpoint_guard.__file__, self._library)
        said = self._guard.ask(line, ANSWER_S)
        if not said:
            self._dismiss()
        self.why = "" if said == "ok" else said.removeprefix("no ") or _SILENT
        return not self.why

    def _dismiss(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.dismiss(DISMISS_S)
