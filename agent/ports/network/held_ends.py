"""Ends of connections that are kept for another process: a port that it binds, a socket that it is given."""

import socket


class OtherEnd:
    """The `Handed` end of a pair of sockets, which another process gets."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @property
    def descriptor(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()


class BoundPort:
    """The `HeldPort`. It has SO_REUSEADDR, so that a job that sets it too may bind right after (or even before) the
    release."""

    def __init__(self, ip: str, port: int) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.bind((ip, port))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        self._socket.close()
