"""Answers the agent's questions (`agent.ports.starter.starter_wire`): a thread for each connection."""

import pwd
import socket
import subprocess
import threading
from collections import Counter
from typing import assert_never

from agent.ports.network.root_helper import Connections, Say, received
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


class Starter:
    """Answers the agent. `rules`: who may be started, and who may ask."""

    def __init__(
        self, rules: Rules, folders: JobFolders, units: Launcher, say: Say, lookup: Lookup = pwd.getpwnam
    ) -> None:
        self._rules, self._folders, self._units, self._say, self._lookup = rules, folders, units, say, lookup
        self._connections = Connections((rules.agent_uid,), CONNECTIONS_MAX, self._unserved)
        self._counting = threading.Lock()
        self.counted: Counter[str] = Counter()

    def serve(self, listener: socket.socket) -> None:
        """Serve until the listener is closed."""
        self._connections.serve(listener, self._serve_one)

    def _unserved(self, what: str, line: str) -> None:
        self._count(what)
        if line:
            self._say(line)

    def _serve_one(self, connection: socket.socket) -> None:
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
        while (message := received(connection, wire.to_starter)) is not None:
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
                    return wire.StarterHere(self._units.enforces, self._units.lacks, dict(self.counted))
                case wire.StartAs():
                    return self._start(question, given, size)
                case wire.LimitAs():
                    self._units.limit(question)
                case wire.EndAs():
                    self._end(question)
                case wire.ForgetFolder():
                    self._units.forget(question.job)
                    self._folders.forget(question.job, self._units.clear)
                case _:
                    assert_never(question)
            return wire.StarterDone()
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

    def _end(self, ask: wire.EndAs) -> None:
        owner = self._folders.owner(ask.job)
        self._units.end(ask, None if owner is None else owner[0])
        self._count("ended")

    def _count(self, what: str) -> None:
        with self._counting:
            self.counted[what] += 1
