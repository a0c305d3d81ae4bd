"""What the root processes of a host have in common (`agent.starter`, `agent.swap`): how they begin, whom they answer,
and how they end."""

import contextlib
import os
import pwd
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

import msgspec

from agent.ports.network.peers import peer_of
from agent.ports.network.unix_sockets import bind_unix
from covey.wire import frames
from covey.wire.frames import FrameError

T = TypeVar("T")
Say = Callable[[str], None]


class RootHelper:
    """A root process that serves one user, at a socket of that user's."""

    def __init__(self, program: str, user: str, what: str, unit: str) -> None:
        """Ends this process with status 2 where it may not serve. `user`: the name or number of the agent's user;
        `what`: what only root may do."""
        self.program, self.path = program, ""
        try:
            self.uid = int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
        except KeyError:
            self.fail(f"there is no user {user}", "name the agent's user with --user")
        if os.geteuid() != 0:
            self.fail(f"only root may {what}", f"systemctl start {unit}")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

    def listen(self, path: str) -> socket.socket:
        """The socket at `path`. Ends this process where it cannot be had."""
        try:
            listener = bind_unix(path, uid=self.uid)
        except OSError as error:
            self.fail(f"cannot listen at {path}: {error}", f"check whether another {self.program} is running")
        listener.setblocking(True)
        self.path = path
        return listener

    def run(self, serve: Callable[[socket.socket], None], listener: socket.socket, said: str = "") -> None:
        """Serve until SIGTERM. `said`: what is said besides of how it serves."""
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        say(f"serves uid {self.uid} at {self.path}{said}")
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
        os.unlink(self.path)

    def fail(self, why: str, next: str) -> NoReturn:
        print(f"{self.program}: {why}\nnext: {next}", file=sys.stderr)
        sys.exit(2)


def say(line: str) -> None:
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class Connections:
    """The connections to a root helper: a thread for each, at most `most` at once, of these users alone. `refused`:
    hears of each that is not served, by a word for its reason, and by a line."""

    def __init__(self, uids: tuple[int, ...], most: int, refused: Callable[[str, str], None]) -> None:
        self._uids, self._free, self._refused = uids, threading.Semaphore(most), refused

    def serve(self, listener: socket.socket, converse: Callable[[socket.socket], None]) -> None:
        """Let `converse` answer each until the listener is closed."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if not self._free.acquire(blocking=False):
                self._refused("turned_away", "")
                connection.close()
                continue
            threading.Thread(target=self._serve_one, args=(connection, converse), daemon=True).start()

    def _serve_one(self, connection: socket.socket, converse: Callable[[socket.socket], None]) -> None:
        with connection, contextlib.ExitStack() as stack:
            stack.callback(self._free.release)
            _, uid = peer_of(connection)
            if uid < 0 or uid not in self._uids:
                self._refused("strangers", f"refused a process of uid {uid}")
                return
            converse(connection)


def received(connection: socket.socket, decoder: "msgspec.msgpack.Decoder[T]") -> T | None:
    """The next message; None at the end. FrameError when it is malformed."""
    header = _exactly(connection, 4)
    if not header:
        return None
    return frames.unpack(_exactly(connection, frames.body_size(header)), decoder)


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
