"""Bytes that strangers and broken programs of this host may send over the unix sockets of an aggregator, and
descriptors with them: random and mutated bytes, frames cut short or with wrong sizes, descriptors, false pipes."""

import array
import asyncio
import contextlib
import gc
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.ports.network.page_lender import PageLender
from agent.ports.processes.processes import RealProcesses
from covey.core.ids import HostId, JobId
from covey.job.tensors import TensorClient
from covey.tensors.numbers.tensor_wire import (
    HEADER_BYTES,
    WANT,
    Declared,
    TensorOp,
    frame,
    job_hash,
    key_of,
    pack_declared,
    parse,
)
from covey.wire import handshake
from covey.wire.handshake import CHALLENGE_BYTES
from covey.wire.job import AggregatorAt
from covey.wire.page_pipe import PagePipe
from covey.wire.splicing import LEAST_BYTES
from covey.wire.sums import DropJob
from plugins.aggregator.datapath.lanes.wire import SOCKET
from tests.families import examples, in_gate
from tests.plugins.aggregator.loopback import SECRET, AggdThread

JOB, EPOCH = JobId("j1"), (1 << 32) + 1
COUNT = LEAST_BYTES // 4 + 3
DECLARED = Declared("w", "model", (COUNT,), LEAST_BYTES)
"""A tensor of two parts; the first one is sent as pages."""


@pytest.fixture(scope="module")
def aggd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AggdThread]:
    running = AggdThread(tmp_path_factory.mktemp("aggd"), near="near.sock", lanes=2)
    yield running
    running.finish()


@pytest.fixture(scope="module")
def laneless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AggdThread]:
    """An aggregator whose lanes never come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RealProcesses, "start_program", no_program)
        running = AggdThread(tmp_path_factory.mktemp("laneless"), near="near.sock", lanes=2)
        yield running
        running.finish()


async def no_program(*_: object) -> None:
    raise OSError("no program starts here")


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def say(op: TensorOp, payload: bytes = b"", **fields: int) -> bytes:
    head, body = frame(op, job_hash(JOB), EPOCH, payload=payload, near=True, **{"key": key_of("w"), **fields})
    return head + bytes(body)


def talk() -> bytes:
    """The bytes of a good connection, after the handshake."""
    state = np.zeros(COUNT, np.float32).tobytes()
    opened = say(TensorOp.OPEN, pack_declared(DECLARED), flags=WANT)
    said = [opened]
    for op, round in ((TensorOp.STATE, 0), (TensorOp.PUSH, 1)):
        for part in range(DECLARED.parts):
            first, end = DECLARED.span(part)
            said.append(say(op, state[first:end], part=part, round=round))
    return b"".join([*said, say(TensorOp.PING)])


class NearRank:
    """A client at the unix socket for ranks; `proven`: it knows the job's secret."""

    def __init__(self, path: str, proven: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(5)
        self.socket.connect(path)
        if proven:
            hello = say(TensorOp.HELLO, bytes(16))
            self.socket.sendall(hello)
            found = self._read(HEADER_BYTES + CHALLENGE_BYTES)
            challenge = handshake.parse_challenge(found[HEADER_BYTES:])
            self.socket.sendall(say(TensorOp.PROOF, handshake.proof_of_client(SECRET, hello, challenge.nonce)))
            assert parse(self._read(HEADER_BYTES)).op is TensorOp.WELCOME

    def _read(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            more = self.socket.recv(size - len(found))
            assert more
            found += more
        return found

    def send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send all of it, unless the other end has closed."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with contextlib.suppress(ConnectionError):
            sent = self.socket.sendmsg([data], ancillary) if data else 0
            self.socket.sendall(data[sent:])

    def end(self) -> None:
        """Send nothing more, and read what aggd sends until it ends the connection."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 20):
                pass
        self.socket.close()


def served(aggd: AggdThread) -> str:
    aggd.order(DropJob(JOB, 1 << 60))
    return aggd.serve(JOB, EPOCH, 1).near


def still_works(aggd: AggdThread) -> None:
    aggd.order(DropJob(JobId("other"), 1 << 60))
    client = TensorClient(JobId("other"), 0, 1, lambda epoch, why, table: None)
    client.moved(aggd.serve("other", EPOCH, 1))
    given = np.arange(COUNT, dtype=np.float32)
    assert client.push_pull("g", given).tobytes() == given.tobytes()
    client.close()
    assert not aggd.failures and not aggd.log.errors


def changed(chance: random.Random, data: bytes) -> bytes:
    """The data with bits turned, a piece left out or repeated, or the end cut off."""
    made = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        at, size = chance.randrange(len(made)), chance.choice((1, 7, HEADER_BYTES, LEAST_BYTES))
        match chance.randrange(5):
            case 0:
                made[at] ^= 1 << chance.randrange(8)
            case 1:  # of a header, which is a small part of all
                made[chance.randrange(2) * (len(made) - HEADER_BYTES) + chance.randrange(HEADER_BYTES)] ^= 0xFF
            case 2:
                del made[at : at + size]
            case 3:
                made[at:at] = made[at : at + size]
            case _:
                del made[at:]
        if not made:
            break
    return bytes(made)


# ---- the aggregator's end --------------------------------------------------------------------------------------------


def test_the_conversation_that_is_mutated_below_is_a_good_one(aggd: AggdThread) -> None:
    path, before = served(aggd), aggd.now().bad_frames
    rank = NearRank(path)
    rank.send(talk())
    rank.end()
    assert aggd.now().bad_frames == before and aggd.now().jobs[-1].rounds == 1


@given(data=st.one_of(st.binary(min_size=1, max_size=300), st.integers(0, 2**32)), proven=st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_random_and_mutated_bytes_at_the_unix_socket_never_stop_it(
    aggd: AggdThread, data: bytes | int, proven: bool
) -> None:
    path = served(aggd)
    rank = NearRank(path, proven)
    rank.send(data if isinstance(data, bytes) else changed(random.Random(data), talk()))
    rank.end()
    still_works(aggd)


@pytest.mark.parametrize("proven", in_gate(1, [True, False]))
def test_descriptors_that_come_along_are_kept_by_nobody(aggd: AggdThread, tmp_path: Path, proven: bool) -> None:
    """The descriptors are files, sockets, pipes, the connection itself, and as many as a message takes."""
    still_works(aggd)
    before = open_files()
    ours, theirs = socket.socketpair()
    reads, writes = os.pipe()
    with open(tmp_path / "file", "wb") as file, ours, theirs:
        each = (file.fileno(), theirs.fileno(), reads, writes)
        for descriptors in (each, each[:1], each * 60):
            rank = NearRank(served(aggd), proven)
            cut = len(talk()) // 2
            rank.send(talk()[:cut], descriptors)
            rank.send(talk()[cut:], descriptors)
            rank.end()
        os.close(reads)
        os.close(writes)
    still_works(aggd)
    for _ in range(100):
        if len(os.listdir("/proc/self/fd")) > before + 8:
            threading.Event().wait(0.02)
    assert open_files() <= before + 8, "of memory that aggd keeps for use again"


@given(data=st.one_of(st.binary(min_size=1, max_size=200), st.integers(0, 1 << 31)))
@settings(max_examples=examples(30), deadline=None)
def test_who_is_no_lane_ends_its_own_connection_only(laneless: AggdThread, data: bytes | int) -> None:
    """The stranger sends any bytes to the socket of lanes, where it is taken for a lane."""
    aggd = laneless
    size = data.to_bytes(4, "little") + b"x" if isinstance(data, int) else data
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(5)
        stranger.connect(f"{aggd.aggd.env.run_dir}/{SOCKET}")
        with contextlib.suppress(ConnectionError):
            stranger.sendall(size)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1 << 16):
                pass
    still_works(aggd)


# ---- the rank's end --------------------------------------------------------------------------------------------------


class FalseAggregator:
    """An aggregator that welcomes every connection to its unix socket, then sends what it likes."""

    def __init__(self, path: Path, says: list[bytes]) -> None:
        self.path, self._says = str(path), says
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            for said in self._says:
                sock, _ = self._listener.accept()
                with sock, contextlib.suppress(OSError):
                    sock.settimeout(2)
                    hello = sock.recv(HEADER_BYTES + 16, socket.MSG_WAITALL)
                    answer = handshake.challenge(SECRET, hello, b"m" * 16)
                    sock.sendall(say(TensorOp.CHALLENGE, answer, key=0))
                    sock.recv(HEADER_BYTES + handshake.PROOF_BYTES, socket.MSG_WAITALL)
                    socket.send_fds(sock, [say(TensorOp.WELCOME, key=0)], [sock.fileno()] * 3)
                    sock.sendall(said)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1 << 20):
                        pass

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("seed", in_gate(1, range(4)))
def test_a_rank_survives_whatever_an_aggregator_of_its_host_says(tmp_path: Path, seed: int) -> None:
    """The rank reports each useless connection, writes no result that was not whole, and goes to the next owner."""
    chance, before = random.Random(seed), open_files()
    result = b"".join(
        say(TensorOp.RESULT, np.full(COUNT, 9, np.float32).tobytes()[slice(*DECLARED.span(part))], part=part, round=1)
        for part in range(DECLARED.parts)
    )
    says = [changed(chance, say(TensorOp.ASK) + result[:-1]) for _ in range(6)]
    says += [bytes(chance.randrange(256) for _ in range(chance.randrange(1, 400))) for _ in range(2)]
    false = FalseAggregator(tmp_path / "false.sock", says)
    lost: list[str] = []
    client = TensorClient(JOB, 0, 1, lambda epoch, why, table: lost.append(why))
    given, out = np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32)
    for at in range(len(says)):
        client.moved(AggregatorAt(JOB, EPOCH + at, HostId("h"), "127.0.0.1:1", SECRET, near=false.path))
        if at == 0:
            handle = client.push("w", given, out=out)
        threading.Event().wait(0.03)
    assert not handle.done
    running = AggdThread(tmp_path, near="near.sock")
    client.moved(running.serve(JOB, EPOCH + 100, 1))
    assert handle.wait().tobytes() == given.tobytes()
    client.close()
    false.close()
    running.finish()
    assert open_files() <= before + 8, "of memory that is mapped, and loops that are closed"


# ---- pipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["a closed one", "a file", "a pipe's end for reading", "none"])
def test_pages_for_what_is_no_socket_are_an_error_and_no_descriptor_stays(tmp_path: Path, what: str) -> None:
    before = open_files()
    reads, writes = os.pipe()
    file = os.open(tmp_path / "f", os.O_RDONLY | os.O_CREAT)
    descriptor = {"a file": file, "a pipe's end for reading": reads, "none": 1 << 20}.get(what, writes)
    os.close(writes)

    async def lend() -> None:
        lender = PageLender(descriptor)
        try:
            await asyncio.wait_for(lender.send(memoryview(bytes(3 << 20))), 5)
        finally:
            lender.close()

    with pytest.raises(OSError):
        asyncio.run(lend())
    os.close(reads)
    os.close(file)
    assert open_files() <= before, "what earlier tests left may go meanwhile"


@given(sizes=st.lists(st.integers(1, 100_000), max_size=6), takes=st.integers(500, 1 << 18))
@settings(max_examples=examples(30), deadline=None)
def test_pages_of_any_sizes_come_whole_through_a_pipe_however_little_is_taken(sizes: list[int], takes: int) -> None:
    ours, theirs = socket.socketpair()
    data = np.random.default_rng(sum(sizes)).integers(0, 256, sum(sizes) + 1, np.uint8)
    pipe, found, first = PagePipe(), bytearray(), 0
    ours.setblocking(False)
    with ours, theirs:
        for size in sizes:
            view = data.data[first : first + size]
            first += size
            while view.nbytes:
                count = pipe.fill(view)
                assert 0 < count <= view.nbytes
                view = view[count:]
                while count:
                    try:
                        count -= pipe.drain(ours.fileno(), min(count, takes), waits=False)
                    except BlockingIOError:
                        found += theirs.recv(takes)
        ours.shutdown(socket.SHUT_WR)
        while more := theirs.recv(1 << 16):
            found += more
    pipe.close()
    assert found == data[: sum(sizes)].tobytes()


def test_where_there_are_no_descriptors_left_numbers_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has as many descriptors as it may have."""

    def none_left(descriptor: int) -> int:
        raise OSError(24, "Too many open files")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        made, pipe = list[int](), os.pipe

        def noted() -> tuple[int, int]:
            made.extend(ends := pipe())
            return ends

        monkeypatch.setattr(os, "pipe", noted)
        monkeypatch.setattr(os, "dup", none_left)
        with pytest.raises(OSError, match="Too many open files"):
            PageLender(ours.fileno())
        monkeypatch.undo()
        assert len(made) == 2
        for end in made:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(end)
