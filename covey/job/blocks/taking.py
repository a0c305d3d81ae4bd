"""The end of a connection that takes data Blocks from the process that had them (`block_wire`).

Whatever goes wrong raises an OSError: then the Blocks are loaded."""

import contextlib
import os
import socket
import time
from typing import NamedTuple

from covey.job.blocks.block_arrays import empty_block, places_in_block, read_only
from covey.job.blocks.block_wire import (
    HEAD_BYTES,
    PIECE_BYTES,
    SUM,
    BlockArrays,
    BlockHello,
    BlockOp,
    BlockRequest,
    DeclaredBlocks,
    items_of,
    pack_hello,
    pack_request,
    unpack_head,
)
from covey.job.blocks.giving import YES, fill, job_hash, receive
from covey.ports.addresses import ip_port
from covey.wire.checksum import crc32
from covey.wire.handshake import (
    CHALLENGE_BYTES,
    NONCE_BYTES,
    is_proof,
    parse_challenge,
    proof_of_client,
    proof_of_server,
)
from covey.wire.headers import WireError

SILENT_S = 2.0
"""Seconds without a byte after which a process counts as gone, once a Block has begun to come."""
BLOCK_S = 5.0
"""Seconds that a Block of any size may take to be read there, and then to come."""
LEAST_BYTES_S = 8 << 20
"""Bytes a second below which a process counts as slow: most storage gives more."""


class AsRank(NamedTuple):
    """Who takes."""

    job: str
    rank: int
    epoch: int
    secret: bytes


class Taking:
    """A connection to a process that gives."""

    def __init__(self, address: str, me: AsRank) -> None:
        """OSError when it cannot be reached, or does not belong to the job."""
        ip, port = ip_port(address)
        self._sock = socket.create_connection((ip, port), SILENT_S)
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._prove(me)
        except OSError:
            self.close()
            raise

    def _prove(self, me: AsRank) -> None:
        hello = pack_hello(BlockHello(job_hash(me.job), me.rank, me.epoch, os.urandom(NONCE_BYTES)))
        self._sock.sendall(hello)
        there = parse_challenge(receive(self._sock, CHALLENGE_BYTES))
        if not is_proof(there.proof, proof_of_server(me.secret, hello, there.nonce)):
            raise WireError("it does not know the job's secret")
        self._sock.sendall(proof_of_client(me.secret, hello, there.nonce))
        if bytes(receive(self._sock, 1)) != YES:
            raise WireError("it did not accept the proof")

    def take(self, of: DeclaredBlocks, block: int) -> BlockArrays | None:
        """The Block; None: it is not there any more."""
        self._sock.sendall(pack_request(BlockRequest(BlockOp.GET, of.key, block)))
        self._sock.settimeout(BLOCK_S + of.bytes_max / LEAST_BYTES_S)  # it may have to be read first
        head = unpack_head(receive(self._sock, HEAD_BYTES), of.bytes_max)
        self._sock.settimeout(SILENT_S)
        end_s = time.monotonic() + BLOCK_S + head.block_bytes / LEAST_BYTES_S
        if not head.is_here:
            return None
        contents = receive(self._sock, head.contents_bytes)
        self._compare(crc32(contents))
        found = empty_block(items_of(contents), head.block_bytes)
        for place in places_in_block(found):
            for at in range(0, len(place), PIECE_BYTES):
                piece = place[at : at + PIECE_BYTES]
                fill(self._sock, piece)
                self._compare(crc32(piece))
                if time.monotonic() > end_s:
                    raise TimeoutError("it is too slow")
        return {name: read_only(array) for name, array in found.items()}

    def done(self, of: DeclaredBlocks, block: int) -> None:
        """Tell that the Block has a place here."""
        self._sock.sendall(pack_request(BlockRequest(BlockOp.DONE, of.key, block)))

    def _compare(self, found: int) -> None:
        (sent,) = SUM.unpack(receive(self._sock, SUM.size))
        if sent != found:
            raise WireError("bytes have changed on their way")

    def end(self) -> None:
        """Let whoever takes at this time see the end of the connection. Any thread may call."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()
