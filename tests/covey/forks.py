"""Processes that begin with PyTorch imported: one process imports it, and forks each of them.

PyTorch, with what DDP and optimizers import when they are first used, takes three processor seconds, and the script of
a test half of one. Scripts to which `covey.hooks` attaches need an interpreter of their own, for that is how it does.
"""

import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
WITHIN_S = 100.0


class Fork:
    """A process that runs a script. Its output, errors among it, is in a file without a name."""

    def __init__(self, server: socket.socket, script: Path, words: tuple[Any, ...]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        there, to = os.pipe()
        self._stdin = os.fdopen(to, "w")
        told, tells = os.pipe()
        self._told = os.fdopen(told)
        request = json.dumps([str(script), *map(str, words)]).encode()
        socket.send_fds(server, [request], [there, self._output.fileno(), tells])
        os.close(there)
        os.close(tells)
        self.pid = int(self._told.readline())
        self._status: int | None = None

    def text(self) -> str:
        """What it wrote up to now."""
        return os.pread(self._output.fileno(), 1 << 24, 0).decode()

    def wait(self, within_s: float = WITHIN_S) -> int | None:
        """Exit status, negative for a signal; None when it still runs after that time."""
        if self._status is None:
            with selectors.DefaultSelector() as ready:
                ready.register(self._told, selectors.EVENT_READ)
                if ready.select(within_s):
                    self._status = int(self._told.readline())
        return self._status

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        self._stdin.write(line + "\n")
        self._stdin.flush()

    def until(self, said: str) -> None:
        """Return once it has written that."""
        end_s = time.monotonic() + WITHIN_S
        while said not in self.text():
            assert self.wait(0) is None and time.monotonic() < end_s, self.text()[-3000:]
            time.sleep(0.005)

    def kill(self) -> None:
        """Kill it, if it runs, and wait for its end."""
        if self.wait(0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def close(self) -> None:
        self.kill()
        for each in (self._stdin, self._told, self._output):
            with contextlib.suppress(BrokenPipeError):
                each.close()


class Forks:
    """The process that forks, and what it forked. Once it has ended, the test that finds it so fails and says why, and
    another one serves those that follow."""

    def __init__(self) -> None:
        self._made: list[Fork] = []
        self._begin()

    def _begin(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def run(self, script: Path, *words: Any) -> Fork:
        """Run the script with these arguments; it is killed when this object is closed, or before."""
        try:
            self._made.append(Fork(self._ours, script, words))
        except (BrokenPipeError, ConnectionResetError, ValueError) as error:
            said = f"the process that forks ended: {self._end()}"
            self._begin()
            raise AssertionError(said) from error
        return self._made[-1]

    def _end(self) -> str:
        """End the process; its exit status, and what it wrote last to its standard error."""
        self._ours.close()
        status = self._process.wait(WITHIN_S)
        written = os.pread(self._errors.fileno(), 1 << 16, 0).decode(errors="replace")[-3000:]
        self._errors.close()
        return f"exit status {status}, {written}"

    def close(self) -> None:
        for each in self._made:
            each.close()
        self._end()


# ---- the process that forks ------------------------------------------------------------------------------------------


def forked(script: str, words: list[str], given: list[int]) -> NoReturn:
    """Run the script in this process, which is a new one, and end as an interpreter ends."""
    for to, descriptor in enumerate([given[0], given[1], given[1]]):
        os.dup2(descriptor, to)
    for descriptor in given:
        os.close(descriptor)
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
    sys.exit(0)


def serve(server: socket.socket) -> None:
    """Fork for each request until the other side closes, and tell of each process its pid and how it ended."""
    with selectors.DefaultSelector() as ready:
        ready.register(server, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is not server:
                    _tell_end(*key.data)
                    ready.unregister(key.fileobj)
                    os.close(key.fd)
                    continue
                request, given, _, _ = socket.recv_fds(server, 1 << 16, 3)
                if not request:
                    return
                *files, tells = given
                pid = os.fork()
                if not pid:
                    server.close()
                    os.close(tells)
                    script, *words = json.loads(request)
                    forked(script, words, files)
                os.write(tells, f"{pid}\n".encode())
                for descriptor in files:
                    os.close(descriptor)
                ready.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, tells))


def _tell_end(pid: int, tells: int) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        os.write(tells, f"{status}\n".encode())
    os.close(tells)


def main(server: socket.socket) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401
    from torch.utils.data import DataLoader  # noqa: F401

    import covey.torch  # noqa: F401

    torch.set_num_threads(1)
    optimizer: Any = torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    optimizer.step()  # imports a second's worth of modules
    gc.collect()
    gc.freeze()  # what was imported is no garbage of a fork either
    serve(server)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
