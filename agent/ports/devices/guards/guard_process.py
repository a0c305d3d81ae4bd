"""A guard of ranks, as the agent has it: `suspend_guard.py` or `checkpoint_guard.py`, a process that undoes what was
done to ranks when the agent does not say more in time, or is gone.

One line to its standard input, one line back. It sees by the end of its standard input that it is not needed any more,
undoes what is left, and ends by itself, so it is never killed.
"""

import contextlib
import select
import subprocess
import sys
from collections.abc import Sequence

from agent.ports.processes.shims import DetachedProcess
from covey.ports.processes import ProcessId


class GuardProcess(DetachedProcess):
    """A running guard. OSError when no process can be started. Blocking calls, one at a time."""

    def __init__(self, script: str, *arguments: str) -> None:
        super().__init__(
            guard_command(script, *arguments),
            cwd="/",
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            close_fds=True,
            bufsize=0,
        )

    def ask(self, line: str, timeout_s: float) -> str:
        """Ask the guard, and return its answer, `ok` or `no` and why; empty when there is none in time, or it has
        ended. One that was silent once must be dismissed: what it says later would be taken for the next answer."""
        assert self.stdin is not None
        assert self.stdout is not None
        try:
            self.stdin.write(f"{line}\n".encode())
            ready, _, _ = select.select([self.stdout], [], [], timeout_s)
            return self.stdout.readline().decode(errors="replace").strip() if ready else ""
        except OSError:
            return ""

    def dismiss(self, wait_s: float) -> None:
        """Dismiss the guard: it is waited for `wait_s` seconds, and then left alone."""
        for pipe in (self.stdin, self.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(wait_s)


def guard_command(script: str, *arguments: str) -> tuple[str, ...]:
    """The command of a guard, which imports nothing of Covey, and nothing from the folder or the environment of whoever
    starts it."""
    return (sys.executable, "-I", "-S", script, *arguments)


def listed(processes: Sequence[ProcessId]) -> str:
    """Processes as guards read them: `PID:START,...`."""
    return ",".join(f"{process.pid}:{process.started}" for process in processes)
