"""A rank as the owner of tables of its job: it listens for other ranks, and adds what they push.

The agent says which tables (`covey.wire.job.SumsOrder`), with the same orders that an `aggd` obeys, and is told the
same figures. Each connection has two threads (`connection`), and whoever has read the last contribution that an
addition needs adds: numpy adds while other threads read.

    rank 1 --PUSH--> its reader --+--> OwnedTable --> writers --RESULT--> rank 1, rank 2, ...
    rank 2 --PUSH--> its reader --+   (one lock)  \
    this rank  --- `LocalLink`, by reference -----+--> this rank

Pushes of this rank do not pass through a socket.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from covey.core.ids import JobId
from covey.ports.verbs import NoVerbs
from covey.tensors.direct.connection import RankConnection, configure, receive
from covey.tensors.direct.local_link import LocalLink
from covey.tensors.direct.owned_table import OwnedTable, OwnersLink
from covey.tensors.numbers.blocks import job_of
from covey.tensors.numbers.tensor_wire import (
    HEADER_BYTES,
    PAIRS,
    Header,
    Payload,
    TensorOp,
    TensorWireError,
    frame,
    parse,
    verify,
)
from covey.tensors.owner.memory import Buffers, Memory
from covey.tensors.owner.ranks_away import LOOK_S as LOOK_AWAY_S
from covey.tensors.owner.speakers import Violation
from covey.tensors.owner.sums import TensorSum
from covey.tensors.rdma.rdma_here import RdmaHere, packed_words, words
from covey.tensors.rdma.tensor_pair import TensorPair, pack_there, unpack_there
from covey.wire import handshake
from covey.wire.bulk import widen
from covey.wire.handshake import HANDSHAKE_S, NONCE_BYTES, PROOF_BYTES, Strangers
from covey.wire.job import AggregatorAt
from covey.wire.sums import WORDS_MAX, DropJob, GetStatus, Now, Order, Quit, RanksAway, Serve, SetPace

CONNECTIONS_MAX = 4096
LINGER_S = 5.0
"""Seconds that a rank that is done waits until the other ranks have their last results from it."""
END_S = 2.0
"""Seconds within which the threads of connections end."""
LOOK_S = 0.02
"""Seconds between two looks whether all results were received."""


class DirectOwner:
    """The tables that one rank owns. Any thread may call."""

    def __init__(
        self, job: JobId, rank: int, tell: Callable[[str], None] = lambda text: None, rdma: RdmaHere | None = None
    ) -> None:
        """`tell` is called with what people should know. `rdma`: used where the agent lets it; None: never."""
        self.job, self.rank, self._tell, self._rdma = job, rank, tell, rdma
        self._may_pair = False
        """Whether the agent lets it."""
        self._lost_pairs: dict[int, str] = {}
        """Rank -> why its queue pair failed, as was seen here."""
        self.lock = threading.RLock()
        """Guards all tables, and the fields below."""
        self._tables: dict[int, OwnedTable] = {}
        """By the hash of the table's name."""
        self._memory, self._buffers = Memory(1 << 40), Buffers()
        self._strangers: Strangers[socket.socket] = Strangers()
        self._connections: set[socket.socket] = set()
        self._listeners: list[socket.socket] = []
        self._address = self._near = ""
        self._closed = self._looks = False
        self._bad_frames = self._refused = 0
        self._gone = threading.Condition(self.lock)
        """Notified when a connection has ended."""

    # ---- orders of the agent ----

    def perform(self, order: Order, ip: str, memory_bytes_max: int, rdma: bool = False) -> Now:
        """Obey an order. `rdma`: whether connections may have queue pairs. OSError when this rank cannot listen on that
        address."""
        with self.lock:
            self._memory.bytes_max, self._may_pair = memory_bytes_max, rdma
            match order:
                case Serve() if job_of(order.job) == self.job and not self._closed:
                    self._listen(ip)
                    self._serve(order)
                case DropJob():
                    self._drop(order.job, order.epoch, order.instead)
                case RanksAway():
                    for table in self._tables.values():
                        if (table.job, table.epoch) == (order.job, order.epoch):
                            table.away.ended.update(order.ranks)
                            self._look_from_now_on(table)
                case Serve() | GetStatus() | SetPace() | Quit():
                    pass
            return self.now()

    def now(self) -> Now:
        """What this rank owns, and its counters."""
        with self.lock:
            tables = sorted(self._tables.values(), key=lambda table: table.job)
            jobs = [table.counters(time.monotonic()) for table in tables]
            counted = self._bad_frames, self._refused, self._memory.used
            far = self._remote()
            return Now(
                self._address if jobs else "",
                jobs,
                0.0,
                *counted,
                near=self._near if jobs else "",
                pairs=sum(link.pair is not None for link in far),
                no_rdma=next((link.no_rdma for link in far if link.no_rdma), "")[:WORDS_MAX],
            )

    def _serve(self, order: Serve) -> None:
        known = next((table for table in self._tables.values() if table.job == order.job), None)
        if known is not None and known.epoch >= order.epoch:
            return
        self._drop(order.job, order.epoch, order.epoch)
        table = OwnedTable(order, self._memory, self._buffers)
        self._tables[table.hash] = table

    def _drop(self, job: JobId, epoch: int, instead: int) -> None:
        for key, table in list(self._tables.items()):
            if table.job == job and table.epoch <= epoch:
                del self._tables[key]
                table.end(instead)
                self._pump(table)

    # ---- life ----

    def _listen(self, ip: str) -> None:
        """Listen for ranks of other hosts, and at an abstract unix socket for those of this one. OSError."""
        if self._listeners:
            return
        tcp = socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET, backlog=256)
        self._listeners.append(tcp)
        port = tcp.getsockname()[1]
        self._address = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        with contextlib.suppress(OSError):  # ranks of this host then come over TCP
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            name = f"\0covey-tensors-{os.getpid()}-{os.urandom(8).hex()}"
            unix.bind(name)
            unix.listen(256)
            self._listeners.append(unix)
            self._near = name
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="covey-owner", daemon=True).start()

    def close(self, left: bool) -> None:
        """End everything, once other ranks have what was given to them, or after `LINGER_S`. `left`: all ranks are
        done, and close their connections when they have their last results."""
        end_s = time.monotonic() + LINGER_S
        with self._gone:
            while any(not link.is_sent or left for link in self._remote()) and (left_s := end_s - time.monotonic()) > 0:
                self._gone.wait(min(left_s, LOOK_S))
        self.cut()

    def cut(self) -> None:
        """End everything now, whatever was not sent."""
        with self.lock:
            self._closed = True
            listeners, connections = self._listeners, list(self._connections)
            self._listeners = []
            self._tables.clear()
        for sock in (*listeners, *connections):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for listener in listeners:
            listener.close()
        with self._gone:
            self._gone.wait_for(lambda: not self._connections, END_S)

    def abandon(self) -> None:
        """Close this process's ends in a forked child: through them a rank that has died would seem to live on."""
        for sock in (*self._listeners, *self._connections):
            sock.close()

    def _remote(self) -> list[RankConnection]:
        links = (link for table in self._tables.values() for link in table.links.values())
        return [link for link in links if isinstance(link, RankConnection)]

    # ---- this rank ----

    def local(self, at: AggregatorAt, rank: int, incarnation: int) -> LocalLink | None:
        """The connection of a rank of this process to a table that it owns; None: another process owns it."""
        with self.lock:
            for table in self._tables.values():
                if at.address == self._address and table.epoch == at.epoch and table.secret == at.secret:
                    if table.may_join(rank, incarnation):
                        return None
                    link = LocalLink(rank, table, self)
                    table.join(link.end)
                    self._pump(table)
                    return link
        return None

    def left(self, table: OwnedTable, link: OwnersLink) -> None:
        """A connection has ended."""
        with self.lock:
            table.leave(link)

    def hear(self, table: OwnedTable, link: OwnersLink, header: Header, payload: Payload) -> None:
        """Take in one frame of a rank, and add what can be added. TensorWireError, Violation: it is that rank's
        fault; ConnectionError: the table is not owned here any more."""
        with self.lock:
            if table.over or table.links.get(link.rank) is not link:
                raise ConnectionAbortedError("no longer served here")
            tensor = table.heard(link, header, payload, time.monotonic())
            self._look_from_now_on(table)
        self._pump(table)
        if tensor is not None:
            self._add(table, header.key, tensor)

    def _look_from_now_on(self, table: OwnedTable) -> None:
        """Look at rounds of this table from now on if a rank has left, for which they may wait in vain."""
        if table.away.has_left and not self._looks and not self._closed:
            self._looks = True
            threading.Thread(target=self._look_for_who_left, name="covey-leaving", daemon=True).start()

    def _look_for_who_left(self) -> None:
        while True:
            time.sleep(LOOK_AWAY_S)
            with self.lock:
                tables = [table for table in self._tables.values() if table.away.has_left]
                self._looks = bool(tables)
                for table in tables:
                    table.look_for_who_left(time.monotonic())
            if not tables:
                return
            for table in tables:
                self._pump(table)

    def _add(self, table: OwnedTable, key: int, tensor: TensorSum) -> None:
        """Do all additions of this tensor that can be done now."""
        while True:
            try:
                with self.lock:
                    if not self._sums(table, key, tensor) or not tensor.busy:
                        return
                    addition = tensor.begin()
                count = addition.run()
            except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
                self._tell(f"could not add tensor {tensor.declared.name!r}, so all ranks push again: {error!r}")
                with self.lock:
                    if table.tensors.get(key) is tensor:
                        table.begin_anew(key)
                return
            with self.lock:
                if not self._sums(table, key, tensor):
                    return
                was_finite, round = not tensor.not_finite, (tensor.version or 0) + 1
                table.ended(key, tensor.end(addition, count), time.monotonic())
            self._pump(table)
            if was_finite and tensor.not_finite:
                self._tell(f"has a sum of tensor {tensor.declared.name!r} that is not finite, in round {round}")

    def _pump(self, table: OwnedTable) -> None:
        """Send what there is to be sent, as far as that takes no time; writers send the rest."""
        with self.lock:
            links = table.spoken_to()
        for link in links:
            link.pump()

    def _sums(self, table: OwnedTable, key: int, tensor: TensorSum) -> bool:
        """Whether this tensor is still the one that is summed under that key."""
        return not table.over and table.tensors.get(key) is tensor

    # ---- other ranks ----

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, peer = listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # no descriptor is free, perhaps
                continue
            name = peer[0] if isinstance(peer, tuple) else "here"
            with self.lock:
                full = not self._has_room()
                crowded_out = None if full else self._strangers.come(sock, name)
                if not full:
                    self._connections.add(sock)
                else:
                    self._refused += 1
            if full:
                sock.close()
                continue
            if crowded_out is not None:
                with self.lock:
                    self._refused += 1
                with contextlib.suppress(OSError):
                    crowded_out.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._talk, args=(sock,), name="covey-pushes", daemon=True).start()

    def _has_room(self) -> bool:
        return not self._closed and len(self._connections) < CONNECTIONS_MAX

    def _talk(self, sock: socket.socket) -> None:
        link: RankConnection | None = None
        table: OwnedTable | None = None
        try:
            configure(sock)
            if sock.family == socket.AF_UNIX:
                widen(sock)
            sock.settimeout(HANDSHAKE_S)
            found = self._hello(sock)
            if found is None:
                return
            table, link = found
            self._read(table, link)
        except (TensorWireError, Violation) as error:
            self._blame(table, link, error)
        except OSError:
            pass  # it connects again, or its host is gone
        finally:
            with self._gone:
                self._strangers.go(sock)
                if table is not None and link is not None:
                    table.leave(link)
                    link.close()
            if link is not None:
                link.writer.join(2 * HANDSHAKE_S)
                if link.pair is not None and link.pair.why:
                    self._lost_pairs[link.rank] = link.pair.why
                link.release()
            sock.close()
            with self._gone:
                self._connections.discard(sock)
                self._gone.notify_all()

    def _blame(self, table: OwnedTable | None, link: RankConnection | None, error: Exception) -> None:
        """Tell a rank what it did wrong, if it listens."""
        with self.lock:
            self._bad_frames += 1
        if table is not None and link is not None and isinstance(error, Violation):
            words = str(error).encode()[:1024]
            with self.lock:
                link.say(frame(TensorOp.FAULT, table.hash, table.epoch, key=link.key, payload=words))
            link.pump()

    def _hello(self, sock: socket.socket) -> tuple[OwnedTable, RankConnection] | None:
        """The table and connection of a rank that has proven to know the secret; None when it was refused."""
        head, hello = self._hear_whole(sock, TensorOp.HELLO, NONCE_BYTES)
        with self.lock:
            table = self._tables.get(head.job)
        if table is None or table.epoch != head.epoch:
            self._refuse(sock, head.job, table.epoch if table is not None else 0)
            return None
        ours = os.urandom(NONCE_BYTES)
        challenge = handshake.challenge(table.secret, hello, ours)
        no_rdma = self._no_rdma(sock, head)
        pairs = 0 if no_rdma is None or no_rdma else PAIRS
        self._send(sock, frame(TensorOp.CHALLENGE, table.hash, table.epoch, part=pairs, payload=challenge))
        _, found = self._hear_whole(sock, TensorOp.PROOF, PROOF_BYTES)
        proven = handshake.is_proof(found[HEADER_BYTES:], handshake.proof_of_client(table.secret, hello, ours))
        if not proven or head.rank >= table.workers:
            self._refuse(sock, head.job, 0)
            return None
        pair, no_rdma = self._pair(sock, table) if pairs else (None, no_rdma)
        made = self._made(sock, head, table, pair, no_rdma or "")
        if made is None and pair is not None:
            pair.close()
        return made

    def _made(
        self, sock: socket.socket, head: Header, table: OwnedTable, pair: TensorPair | None, no_rdma: str
    ) -> tuple[OwnedTable, RankConnection] | None:
        """The connection of a rank that has proven to know the secret; None when it comes too late."""
        sock.settimeout(None)
        with self.lock:
            if self._tables.get(head.job) is not table:
                self._refuse(sock, head.job, 0)
                return None
            newest = table.may_join(head.rank, head.round)
            if newest:  # it was lost to its host, and does not know it
                self._refuse(sock, head.job, table.epoch, newest)
                return None
            self._strangers.go(sock)
            sent = partial(self._sent, table)
            link = RankConnection(sock, head.rank, table.hash, table.epoch, table.tensors.get, self.lock, sent)
            lost = self._lost_pairs.pop(head.rank, "")
            link.pair, link.no_rdma = pair, no_rdma and (lost or no_rdma)
            table.join(link)
            self._pump(table)
        return table, link

    def _no_rdma(self, sock: socket.socket, head: Header) -> str | None:
        """Why the connection of this rank can have no queue pair; empty: it may have one; None: it needs none."""
        if sock.family == socket.AF_UNIX or not self._may_pair or self._rdma is None:
            return None
        if head.part != PAIRS:
            return f"rank {head.rank} is not to use RDMA; next: [aggregator] rdma on its host"
        return self._rdma.why_not()

    def _pair(self, sock: socket.socket, table: OwnedTable) -> tuple[TensorPair | None, str]:
        """Give a rank's connection a queue pair if both ends can, else say why not."""
        assert self._rdma is not None
        header, said = self._hear(sock, TensorOp.PAIR)
        if header.part != PAIRS:
            return None, words(said)
        pair: TensorPair | None = None
        why = ""
        try:
            pair = self._rdma.pair(sock)
            pair.connect(unpack_there(said))
            answer = PAIRS, pack_there(pair.here)
        except NoVerbs as error:
            answer, why = (0, packed_words(str(error))), str(error)
        try:
            self._send(sock, frame(TensorOp.PAIRED, table.hash, table.epoch, part=answer[0], payload=answer[1]))
            header, said = self._hear(sock, TensorOp.PAIR)
            if header.part == PAIRS and not why:
                found, pair = pair, None
                return found, ""
            return None, why or words(said)
        finally:
            if pair is not None:
                pair.close()

    def _sent(self, table: OwnedTable, size: int) -> None:
        table.sent_bytes += size

    def _hear_whole(self, sock: socket.socket, op: TensorOp, size: int) -> tuple[Header, bytes]:
        """Read a frame, which must have this operation and size; returns its header and all its bytes."""
        header, head, payload = self._next(sock, op)
        if header.length != size:
            raise TensorWireError(f"{op.name} has {size} bytes here, not {header.length}")
        return header, bytes(head + payload)

    def _hear(self, sock: socket.socket, op: TensorOp) -> tuple[Header, bytearray]:
        """Read a frame, which must have this operation; returns its header and payload."""
        header, _, payload = self._next(sock, op)
        return header, payload

    def _next(self, sock: socket.socket, op: TensorOp) -> tuple[Header, bytearray, bytearray]:
        """Read a frame, which must have this operation, after PINGs of a rank that waits for an answer: it can take
        seconds to open a device, once."""
        until_s = time.monotonic() + HANDSHAKE_S
        while True:
            head = bytearray(HEADER_BYTES)
            receive(sock, memoryview(head))
            header = parse(head)
            if header.op is not TensorOp.PING or time.monotonic() > until_s:
                break
            verify(head, b"")
        if header.op is not op:
            raise TensorWireError(f"{op.name} expected here, not {header.op.name}")
        payload = bytearray(header.length)
        receive(sock, memoryview(payload))
        verify(head, payload)
        return header, head, payload

    def _refuse(self, sock: socket.socket, job: int, epoch: int, newest: int = 0) -> None:
        """Tell a process that it is not served."""
        with self.lock:
            self._refused += 1
        self._send(sock, frame(TensorOp.STALE, job, epoch, round=newest))

    def _send(self, sock: socket.socket, said: tuple[bytes, Payload]) -> None:
        sock.sendall(said[0] + bytes(said[1]))

    def _read(self, table: OwnedTable, link: RankConnection) -> None:
        """Read frames until the connection ends, always by an exception."""
        head = bytearray(HEADER_BYTES)
        while True:
            link.read_into(memoryview(head))
            header = parse(head)
            if header.job != table.hash or header.epoch != table.epoch or header.rank != link.rank:
                raise TensorWireError("a frame for another job, epoch or rank than this connection was opened for")
            with self.lock:
                if table.over:
                    raise ConnectionAbortedError("no longer served here")
                link.frames.expect(header)
                payload = self._buffers.take(header.length)
            link.key = header.key
            if header.length:
                link.read_payload(header, memoryview(payload))
            verify(head, payload, link.near)
            self.hear(table, link, header, payload)
