"""An elastic job of real processes for tests: agents' sockets, an aggregator, and changes of who carries what."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from agent.jobs.socket.memory_reports import on_host
from covey.core.errors import EXIT_AGAIN
from covey.core.ids import HostId, JobId
from covey.wire.frames import pack, whole
from covey.wire.job import AggregatorAt, Carries, Frame, Join, Joined, MemoryHeld, decoder
from plugins.base import RanksSpec
from plugins.scheduler.policy.carrying import carried_after, carriers_of, first_carried
from tests.agent.here import ranks as a_spec
from tests.plugins.aggregator.loopback import SECRET, AggdThread

JOB = JobId("j1")
GRANT = 1
SCRIPT = Path(__file__).with_name("elastic_script.py")
WITHIN_S = 60.0


class Started(Protocol):
    """A process of `tests.covey.forks` or of `tests.covey.plain_processes`."""

    pid: int

    def text(self) -> str: ...
    def wait(self, within_s: float = ...) -> int | None: ...
    def close(self) -> None: ...


class Starts(Protocol):
    """Starts processes that run a script."""

    def run(self, script: Path, *words: Any) -> Started: ...


class AgentSocket:
    """The agents of one job: each process gets the aggregator's address, and which ranks are carried by which."""

    def __init__(self, path: Path, at: AggregatorAt, carries: Carries) -> None:
        self.path, self._at, self._carries = path, at, carries
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self.memory: RanksSpec | None = None
        """The ranks whose processes are told what they may take of the host's memory, if they are."""
        self.used: dict[socket.socket, MemoryHeld] = {}
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def tell(self, carries: Carries) -> None:
        with self._lock:
            self._carries = carries
            for each in self._connections:
                with suppress(OSError):
                    each.sendall(pack(carries))

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        incoming = bytearray()
        with connection, suppress(OSError):
            while received := connection.recv(1 << 16):
                incoming += received
                for frame in whole(incoming, decoder):
                    self._heard(connection, frame)

    def _heard(self, connection: socket.socket, frame: Frame) -> None:
        if isinstance(frame, Join):
            joined = Joined(
                HostId("h1"), frame.job, frame.rank, 0, frame.epoch, frame.protocol, heals=True, memory_s=0.05
            )
            with self._lock:
                connection.sendall(pack(joined) + pack(self._at) + pack(self._carries))
                self._connections.append(connection)
        elif isinstance(frame, MemoryHeld) and self.memory is not None:
            with self._lock:
                self.used[connection] = frame
                others = [each for other, each in self.used.items() if other is not connection]
                connection.sendall(pack(on_host(self.memory, others)))

    def close(self) -> None:
        self._listening.close()


class ElasticProcesses:
    """The processes of one elastic job, which run a script of this repository."""

    def __init__(
        self,
        forks: Starts,
        folder: Path,
        ranks: int,
        processes: int,
        script: Path,
        *words: str,
        host_memory: int = 0,
        saved: Path | None = None,
    ) -> None:
        """`host_memory`: what its processes may take together of the memory of their host, bytes; 0: any. `saved`: the
        folder of its checkpoints; None: one of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        self._saved = saved or folder / "checkpoints"
        self.preempt_file = folder / "preempt"
        """Once this file is there, the job is asked to end."""
        self._forks, self._ranks, self._script, self._words = forks, ranks, script, words
        self._aggd = AggdThread(folder)
        self.carried: Mapping[int, tuple[int, ...]] = first_carried(ranks, processes)
        self._config, self._came = 0, dict[int, int]()
        at = self._aggd.serve(str(JOB), (GRANT << 32) + 1, ranks)
        found = AggregatorAt(JOB, at.epoch, HostId("h1"), at.address, SECRET)
        self._socket = AgentSocket(folder / "jobs.sock", found, Carries(0, dict(self.carried)))
        self._host_memory = host_memory
        if host_memory:
            self._socket.memory = replace(a_spec(str(JOB), count=processes), host_memory=host_memory)
        self.now = {first: self._start(first, 0) for first in self.carried}
        self.ended: list[Started] = []

    def _start(self, first: int, incarnation: int) -> Started:
        environ = {
            "COVEY_SOCKET": str(self._socket.path),
            "COVEY_JOB_ID": str(JOB),
            "COVEY_RANK": str(first),
            "COVEY_WORLD_SIZE": str(self._ranks),
            "COVEY_EPOCH": str(GRANT),
            "COVEY_TABLES": "1",
            "COVEY_TOKEN": "secret",
            "COVEY_HOST": "h1",
            "COVEY_INCARNATION": str(incarnation),
            "COVEY_ELASTIC": "1",
            "COVEY_CHECKPOINT_DIR": str(self._saved),
            "COVEY_PREEMPT_FILE": str(self.preempt_file),
        }
        if self._host_memory:
            here = ",".join(map(str, sorted({first, *self.carried})))
            environ |= {"COVEY_RANKS_HERE": here, "COVEY_HOST_MEMORY": str(self._host_memory)}
        return self._forks.run(SCRIPT, self._script, json.dumps(environ), *self._words)

    def arrange(self, ends: list[int], begins: int) -> list[int]:
        """Another configuration: kill these processes, begin so many; returns the new ones."""
        for first in ends:
            self.kill(first)
            self.ended.append(self.now.pop(first))
        old, self.carried = self.carried, carried_after(self.carried, ends, begins)
        self._config += 1
        moved = carriers_of(self.carried).items() - carriers_of(old).items()
        self._came |= {rank: self._config for rank, _ in moved}
        self._socket.tell(Carries(self._config, dict(self.carried), dict(self._came)))
        new = [first for first in self.carried if first not in self.now]
        for first in new:
            self.now[first] = self._start(first, self._config << 16)
        return new

    def kill(self, first: int) -> None:
        """Kill this process; nobody is told."""
        with suppress(ProcessLookupError):
            os.kill(self.now[first].pid, signal.SIGKILL)

    def until(self, is_so: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WITHIN_S
        while not is_so():
            assert time.monotonic() < end_s, self.text()
            time.sleep(0.005)

    def have_said(self, word: str) -> bool:
        """Whether each process has written this."""
        return all(word in each.text() for each in self.now.values())

    def stopped(self) -> None:
        """Ask the job to end, and wait until all of its processes have saved and ended."""
        self.preempt_file.touch()
        ended = {first: each.wait(WITHIN_S) for first, each in self.now.items()}
        assert set(ended.values()) == {EXIT_AGAIN}, (ended, self.text())

    def digest(self) -> str:
        """The digest with which all processes end that say one."""
        ended = {first: each.wait(WITHIN_S) for first, each in self.now.items()}
        assert set(ended.values()) == {0}, (ended, self.text())
        said = [each.text().partition("sha256=")[2].split() for each in self.now.values()]
        found = {words[0] for words in said if words}
        assert len(found) == 1, self.text()
        return found.pop()

    def text(self) -> str:
        return "\n".join(f"process {first}: {each.text()[-2500:]}" for first, each in self.now.items())

    def close(self) -> None:
        for each in [*self.now.values(), *self.ended]:
            each.close()
        self._socket.close()
        self._aggd.finish()
