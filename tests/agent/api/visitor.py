"""Somebody at a TCP address of an agent's HTTP who sends a change and ends the connection in one of many ways.

A script of its own, of the standard library alone: other users of the machine, and hosts of a laboratory, run it.

    python visitor.py IP PORT UID TIMES PATIENT ENDING...

UID -1: whoever starts it. PATIENT 0: endings that wait for an answer are left out, as of an agent that is stopped.
"""

import encodings.idna  # noqa: F401  # by `connect`, where another user may not read it any more
import os
import socket
import struct
import sys
import time
from collections.abc import Callable

Way = Callable[[socket.socket, bytes, bytes], bytes]
"""Sends head and body, and ends the connection; returns what was answered, if it waits for that."""


def _answered(connection: socket.socket) -> bytes:
    connection.settimeout(20)
    found = b""
    while part := connection.recv(4096):
        found += part
    return found


def polite(connection: socket.socket, head: bytes, body: bytes) -> bytes:
    connection.sendall(head + body)
    return _answered(connection)


def half_closed(connection: socket.socket, head: bytes, body: bytes) -> bytes:
    """End the sending half only: aiohttp takes that for the end, and may leave out the answer."""
    connection.sendall(head + body)
    connection.shutdown(socket.SHUT_WR)
    return _answered(connection)


def fin(connection: socket.socket, head: bytes, body: bytes) -> bytes:
    connection.sendall(head + body)
    return b""


def fin_before_the_body(connection: socket.socket, head: bytes, body: bytes) -> bytes:
    connection.sendall(head)
    return b""


def fin_within_the_body(connection: socket.socket, head: bytes, body: bytes) -> bytes:
    connection.sendall(head + body[:-1])
    return b""


def reset(connection: socket.socket, head: bytes, body: bytes) -> bytes:
    connection.sendall(head + body)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return b""


def late_body(connection: socket.socket, head: bytes, body: bytes) -> bytes:
    connection.sendall(head)
    time.sleep(0.002)
    connection.sendall(body)
    return b""


def pipelined(connection: socket.socket, head: bytes, body: bytes) -> bytes:
    connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" + head + body)
    return b""


def pipelined_after_many(connection: socket.socket, head: bytes, body: bytes) -> bytes:
    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20 + head + body)
    return b""


def pipelined_and_reset(connection: socket.socket, head: bytes, body: bytes) -> bytes:
    pipelined(connection, head, body)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return b""


PATIENT: dict[str, Way] = {"polite": polite, "half_closed": half_closed}
IMPATIENT: dict[str, Way] = {
    way.__name__: way
    for way in (
        fin,
        fin_before_the_body,
        fin_within_the_body,
        reset,
        late_body,
        pipelined,
        pipelined_after_many,
        pipelined_and_reset,
    )
}
ENDINGS: dict[str, Way] = {**PATIENT, **IMPATIENT}


def request(pad: int) -> tuple[bytes, bytes]:
    """The head and body of a job, with `pad` more bytes."""
    body = b'{"argv":["true"],"workers":1,"gpus_per_worker":0,"name":"%s"}' % (b"x" * pad)
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nX-Covey: 1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    return head % len(body), body


def visit(address: tuple[str, int], ending: str, pad: int = 10) -> bytes:
    """Visit an address, and return what was answered; empty where the visitor did not wait, or the agent ended the
    connection first."""
    with socket.create_connection(address, 20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            return ENDINGS[ending](connection, *request(pad))
        except ConnectionError:
            return b""


def main() -> None:
    ip, port, uid, times, patient, *endings = sys.argv[1:]
    if int(uid) >= 0:
        os.setgroups([])
        os.setresgid(int(uid), int(uid), int(uid))
        os.setresuid(int(uid), int(uid), int(uid))
    for ending in endings or (ENDINGS if int(patient) else IMPATIENT):
        for _ in range(int(times)):
            for pad in (10, 30_000):
                answer = visit((ip, int(port)), ending, pad)
                if ending in PATIENT:
                    print(ending, answer.partition(b"\r\n")[0].decode(), answer.rpartition(b"\r\n")[2].decode())


if __name__ == "__main__":
    main()
