"""A port of this machine, on 127.0.0.1 alone, that leads to a port of a job's host: through the agent, as all else."""

import base64
import contextlib
import errno
import re
import socket
import threading
import time
from typing import Any

from cli.beside.attached import ANSWER_S, say
from cli.client import NO_AGENT, TOO_LATE, TRY_AGAIN, Agent, AgentctlError

CONNECTIONS_MAX = 64
WAIT_S = 8.0
READ_BYTES = 48 << 10
LOOK_S = 0.5
LOOK_BYTES_MAX = 1 << 20
"""The most output of a job in which the address of its notebook is sought, bytes."""
ADDRESS = re.compile(rb"https?://(?:localhost|127\.0\.0\.1|\[::1\]|0\.0\.0\.0):(\d{1,5})(/[^\s'\"]*)?")
SERVERS = ("jupyter", "jupyter-lab", "jupyter-notebook", "jupyter-server", "tensorboard")
"""Programs whose address is sought in what they write."""


def address_in(text: bytes) -> tuple[int, str] | None:
    """The port and the path of the first address in this output where a browser is to go."""
    for found in ADDRESS.finditer(text):
        if 0 < int(found[1]) < 65536 and found.end() < len(text):
            return int(found[1]), (found[2] or b"/").decode(errors="replace")
    return None


class Tunnel:
    """A tunnel to `port` of the host of a job's rank 0. `local` is the port here: the same, or another if that is
    taken."""

    def __init__(self, agent: Agent, job: str, port: int) -> None:
        self._agent, self._job, self._port = agent, job, port
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            self._listener.bind(("127.0.0.1", 0))
            say(f"port {port} of this machine is taken: {self.local} is taken in its place")
        self._listener.listen(CONNECTIONS_MAX)
        self._open = threading.Semaphore(CONNECTIONS_MAX)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def local(self) -> int:
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        while True:
            self._open.acquire()
            connection, _ = self._listener.accept()
            threading.Thread(target=self._carry, args=(connection,), daemon=True).start()

    def _carry(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                try:
                    Carried(self._agent, self._job, self._port, connection).run()
                except AgentctlError as error:
                    say(f"{error.what}: {error.why}")
        finally:
            self._open.release()


class Carried:
    """One connection of a browser."""

    def __init__(self, agent: Agent, job: str, port: int, connection: socket.socket | None = None) -> None:
        self._agent, self._job, self._connection = agent, job, connection
        body = {"rank": 0, "kind": "port", "port": port}
        found = self._patient().post("jobs", job, "sessions", body=body).data
        self._about = {name: found[name] for name in ("host", "epoch", "session")}
        self._over = False

    def _patient(self) -> Agent:
        found = Agent(self._agent.addresses, self._agent.found_by, ANSWER_S)
        found.address = self._agent.address
        return found

    def close(self) -> None:
        self._turn({"leaves": True})

    def run(self) -> None:
        connection, seen = self._connection, 0
        assert connection is not None
        threading.Thread(target=self._send, args=(connection,), daemon=True).start()
        try:
            while True:
                answer = self._turn({"seen": seen, "wait_s": WAIT_S})
                for _, text in answer["parts"]:
                    connection.sendall(base64.b64decode(text))
                seen = answer["at"] + sum(len(base64.b64decode(text)) for _, text in answer["parts"])
                if answer["code"] is not None or (self._over and not answer["parts"]):
                    return
        finally:
            self._over = True
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _send(self, connection: socket.socket) -> None:
        at = 0
        with contextlib.suppress(OSError, AgentctlError):
            while not self._over:
                data = connection.recv(READ_BYTES)
                end = at + len(data)
                while not self._over:
                    part = base64.b64encode(data[len(data) - (end - at) :]).decode()
                    answer = self._turn({"at": at, "data": part, "ended": not data, "wait_s": 2.0})
                    at = max(at, int(answer["taken"]))
                    if at >= end:
                        break
                if not data:
                    return

    def _turn(self, fields: dict[str, Any]) -> Any:
        until_s = time.monotonic() + ANSWER_S
        while True:
            try:
                return self._patient().post("jobs", self._job, "turn", body={**self._about, **fields}).data
            except AgentctlError as error:
                if error.code not in (NO_AGENT, TOO_LATE, TRY_AGAIN) or time.monotonic() > until_s:
                    raise
            time.sleep(0.3)


def lead(agent: Agent, job: str, port: int, path: str = "/") -> None:
    """Open a tunnel once somebody listens on that port of the job's host, and say where to look: only then is it known
    which ports of this machine the job takes itself, where it runs here."""
    said = False
    while True:
        try:
            Carried(agent, job, port).close()
        except AgentctlError as error:
            if error.code != TRY_AGAIN:
                say(f"{error.what}: {error.why}")
                return
            if not said:
                said = True
                say(f"{error.what}: {error.why}")
            time.sleep(LOOK_S)
        else:
            say(f"open http://127.0.0.1:{Tunnel(agent, job, port).local}{path}")
            return


def announce(agent: Agent, job: str) -> None:
    """Find the address that rank 0 of a job writes, and lead there. It gives up once the job has ended, or has written
    much."""
    text = b""
    with contextlib.suppress(AgentctlError, OSError):
        while len(text) < LOOK_BYTES_MAX:
            answer = agent.get("jobs", job, "logs", rank=0, offset=len(text)).data
            text += base64.b64decode(answer["data"])
            if found := address_in(text):
                lead(agent, job, *found)
                return
            if answer["end"]:
                return
            time.sleep(LOOK_S)
