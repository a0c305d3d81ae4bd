"""The end of a connection that gives data Blocks to processes that took their ranks over (`block_wire`).

It listens from the first question on that it can answer, on the address from which this host reaches the owner of the
job's tensors: on another one, too, once the owner is where another card reaches it. One thread an address accepts, and
each connection has a thread: a Block is read while the script computes.
"""

import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from covey.job.blocks.block_arrays import bytes_in_block, items_in_block, places_in_block
from covey.job.blocks.block_wire import (
    HELLO_BYTES,
    PIECE_BYTES,
    REQUEST_BYTES,
    SUM,
    BlockArrays,
    BlockHead,
    BlockOp,
    BlockRequest,
    pack_head,
    unpack_hello,
    unpack_request,
)
from covey.ports.addresses import joined
from covey.wire.checksum import crc32
from covey.wire.handshake import (
    HANDSHAKE_S,
    NONCE_BYTES,
    PROOF_BYTES,
    Strangers,
    challenge,
    is_proof,
    proof_of_client,
)

CONNECTIONS_MAX = 256
AGAIN_S = 0.1
"""Seconds until a connection is accepted again after one could not be: no descriptor was free, perhaps."""
SILENT_S = 10.0
"""Seconds after which a process that does not read or ask is cut off."""
YES = b"\1"
"""What follows a proof that is right."""
_encode = msgspec.msgpack.Encoder().encode


def job_hash(job: str) -> int:
    """The number of a job in a hello."""
    return int.from_bytes(hashlib.blake2b(job.encode(), digest_size=4).digest(), "little")


def receive(sock: socket.socket, size: int) -> bytearray:
    """So many bytes. ConnectionError when the connection ends before; TimeoutError."""
    found = bytearray(size)
    fill(sock, memoryview(found))
    return found


def fill(sock: socket.socket, view: memoryview) -> None:
    """Fill `view`. ConnectionError when the connection ends before it is full; TimeoutError."""
    while view.nbytes:
        count = sock.recv_into(view, min(view.nbytes, PIECE_BYTES))
        if not count:
            raise ConnectionResetError("the connection ended")
        view = view[count:]


class GivingBlocks:
    """The listener of one process. Any thread may call."""

    def __init__(
        self,
        job: str,
        secret: Callable[[int], bytes],
        find: Callable[[int, int], BlockArrays | None],
        taken: Callable[[int, int], object],
    ) -> None:
        """`secret` returns the job's secret of an epoch, empty: it is not known. `find` returns a Block of a set, by
        the set's key, if it is here; `taken` is called with each Block that the other process has."""
        self._job, self._secret, self._find, self._taken = job_hash(job), secret, find, taken
        self._lock = threading.Lock()
        self._listening: dict[str, socket.socket] = {}
        """By IP address."""
        self._connections: set[socket.socket] = set()
        self._strangers: Strangers[socket.socket] = Strangers()
        self._closed = False

    def address(self, ip: str) -> str:
        """Where it listens at `ip`, as `ip:port`; it begins to with the first call. Empty: it cannot."""
        with self._lock:
            if self._closed:
                return ""
            listening = self._listening.get(ip)
            if listening is None:
                family = socket.AF_INET6 if ":" in ip else socket.AF_INET
                try:
                    listening = socket.create_server((ip, 0), family=family, backlog=64)
                except OSError:
                    return ""
                self._listening[ip] = listening
                threading.Thread(target=self._accept, args=(listening,), name="covey-gives", daemon=True).start()
            return joined(ip, listening.getsockname()[1])

    def close(self) -> None:
        """End all connections. A second call is harmless."""
        with self._lock:
            self._closed = True
            listening = list(self._listening.values())
            each = [*self._connections, *listening]
        for sock in each:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for sock in listening:
            sock.close()

    def abandon(self) -> None:
        """Close this process's ends in a forked child."""
        for sock in (*self._connections, *self._listening.values()):
            sock.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                sock, peer = listening.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(AGAIN_S)
                continue
            with self._lock:
                full = self._closed or len(self._connections) >= CONNECTIONS_MAX
                goes = None if full else self._strangers.come(sock, peer[0])
                if not full:
                    self._connections.add(sock)
            if full:
                sock.close()
                continue
            if goes is not None:
                with contextlib.suppress(OSError):
                    goes.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._serve, args=(sock,), name="covey-gives", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(HANDSHAKE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._is_known(sock):
                with self._lock:
                    self._strangers.go(sock)
                sock.settimeout(SILENT_S)
                while True:
                    self._answer(sock, unpack_request(receive(sock, REQUEST_BYTES)))
        except OSError:
            pass  # the other process loads what it has not got
        finally:
            with self._lock:
                self._strangers.go(sock)
                self._connections.discard(sock)
            sock.close()

    def _is_known(self, sock: socket.socket) -> bool:
        """Whether the peer proves to belong to the job."""
        data = bytes(receive(sock, HELLO_BYTES))
        hello = unpack_hello(data)
        secret = self._secret(hello.epoch) if hello.job == self._job else b""
        nonce = os.urandom(NONCE_BYTES)
        key = secret or os.urandom(16)
        sock.sendall(challenge(key, data, nonce))
        if not is_proof(bytes(receive(sock, PROOF_BYTES)), proof_of_client(key, data, nonce)):
            return False
        sock.sendall(YES)
        return True

    def _answer(self, sock: socket.socket, asked: BlockRequest) -> None:
        if asked.op is BlockOp.DONE:
            self._taken(asked.key, asked.block)
            return
        arrays = self._find(asked.key, asked.block)
        if arrays is None:
            sock.sendall(pack_head(BlockHead(False, 0, 0)))
            return
        contents = _encode(items_in_block(arrays))
        head = pack_head(BlockHead(True, len(contents), bytes_in_block(arrays)))
        sock.sendall(head + contents + SUM.pack(crc32(contents)))
        for place in places_in_block(arrays):
            for at in range(0, len(place), PIECE_BYTES):
                piece = place[at : at + PIECE_BYTES]
                sock.sendall(piece)
                sock.sendall(SUM.pack(crc32(piece)))
