"""Answers the agent's questions (`agent.ports.starter.starter_wire`): a thread for each connection."""

import contextlib
import pwd
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from typing import assert_never

from agent.ports.network.peers import peer_of
from agent.ports.processes.procfs import start_ticks
from agent.ports.starter import starter_wire as wire
from agent.starter.accounts import Denied, Lookup, Rules, account_of
from agent.starter.folders import JobFolders
from agent.starter.units import Launcher
from covey.wire import frames
from covey.wire.frames import FrameError

CONNECTIONS_MAX = 64
SILENT_S = 30.0
"""Seconds after which a connection that asks nothing is closed."""
READ_LOG = "journalctl -u covey-starter"
Say = Callable[[str], None]


class Starter:
    """Answers the agent. `rules`: who may be started, and who may ask."""

    def __init__(
        self, rules: Rules, folders: JobFolders, units: Launcher, say: Say, lookup: Lookup = pwd.getpwnam
    ) -> None:
        self._rules, self._folders, self._units, self._say, self._lookup = rules, folders, units, say, lookup
        self._connections = threading.Semaphore(CONNECTIONS_MAX)
        self._counting = threading.Lock()
        self.counted: Counter[str] = Counter()

    def serve(self, listener: socket.socket) -> None:
        """Serve until the listener is closed."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if not self._connections.acquire(blocking=False):
                self._count("turned_away")
                connection.close()
                continue
            threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def _serve_one(self, connection: socket.socket) -> None:
        with connection, contextlib.ExitStack() as stack:
            stack.callback(self._connections.release)
            _, uid = peer_of(connection)
            if uid < 0 or uid != self._rules.agent_uid:
                self._count("strangers")
                self._say(f"refused a process of uid {uid}")
                return
            connection.settimeout(SILENT_S)
            try:
                self._converse(connection)
            except FrameError as error:
                self._count("malformed")
                self._say(f"dropped a connection: {error}")
            except OSError:
                return  # it closed, or says nothing

    def _converse(self, connection: socket.socket) -> None:
        parts: list[bytes] = []
        size = 0
        while (message := received(connection)) is not None:
            if isinstance(message, wire.GiveConfig):
                size += len(message.part)
                parts = [*parts, message.part] if size <= wire.CONFIG_BYTES_MAX else []
                continue
            answer = self.answer(message, b"".join(parts), size)
            parts, size = [], 0
            connection.sendall(frames.pack(answer))

    def answer(self, question: wire.Question, given: bytes = b"", size: int = 0) -> wire.Answer:
        """`given`: the configuration that came before, of `size` bytes; empty where it is too long."""
        try:
            match question:
                case wire.AskStarter():
                    return wire.StarterHere(self._units.enforces, dict(self.counted))
                case wire.StartAs():
                    return self._start(question, given, size)
                case wire.EndAs():
                    return self._end(question)
                case wire.ForgetFolder():
                    self._folders.forget(question.job)
                    return wire.StarterDone()
                case _:
                    assert_never(question)
        except Denied as denied:
            return self._refused(question, str(denied), denied.next)
        except (OSError, subprocess.SubprocessError) as error:
            return self._refused(question, str(error), READ_LOG)

    def _refused(self, question: wire.Question, why: str, next: str) -> wire.StarterRefused:
        self._count("refused")
        job = "" if isinstance(question, wire.AskStarter) else f" of {question.job}"
        self._say(f"refused {type(question).__name__}{job}: {why}")
        return wire.StarterRefused(why[:400], next[:400])

    def _start(self, ask: wire.StartAs, given: bytes, size: int) -> wire.StartedAs:
        account = account_of(ask.user, ask.uid, self._rules, self._lookup)
        if size > wire.CONFIG_BYTES_MAX:
            why = f"environment and arguments of its ranks are {size >> 20} MiB; at most {wire.CONFIG_BYTES_MAX >> 20}"
            raise Denied(why, "submit it from a shell with a smaller environment")
        if not given:
            raise Denied("a program without a configuration", "upgrade covey-starter and the agent together")
        folder = self._folders.make(ask.job, account)
        pid = self._units.start(ask, account, folder, given)
        self._count("started")
        self._say(f"{ask.program} of {ask.job}, epoch {ask.epoch}, runs as {account.name}: pid {pid}")
        return wire.StartedAs(pid, start_ticks(pid) or 0)

    def _end(self, ask: wire.EndAs) -> wire.StarterDone:
        owner = self._folders.owner(ask.job)
        if owner is not None:
            self._units.end(ask, owner[0])
            self._count("ended")
        return wire.StarterDone()

    def _count(self, what: str) -> None:
        with self._counting:
            self.counted[what] += 1


def received(connection: socket.socket) -> wire.GiveConfig | wire.Question | None:
    """The next message; None at the end. FrameError when it is malformed."""
    header = _exactly(connection, 4)
    if not header:
        return None
    body = _exactly(connection, frames.body_size(header))
    return frames.unpack(body, wire.to_starter)


def _exactly(connection: socket.socket, size: int) -> bytes:
    """That many bytes; none at the end of the stream. FrameError when it ends in the middle."""
    found = bytearray()
    while len(found) < size:
        part = connection.recv(min(size - len(found), frames.PART_BYTES))
        if not part:
            if found:
                raise FrameError("it ended in the middle of a message")
            return b""
        found += part
    return bytes(found)
