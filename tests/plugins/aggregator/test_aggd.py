"""aggd over real sockets against what strangers and broken workers may send."""

import asyncio
import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from covey.core.ids import JobId
from covey.job.tensors import TensorClient
from covey.tensors.numbers.tensor_wire import (
    HEADER_BYTES,
    OWNER,
    WANT,
    Declared,
    Frame,
    Header,
    TensorOp,
    frame,
    job_hash,
    key_of,
    pack_declared,
    parse,
    verify,
)
from covey.tensors.owner.sums import TensorSum
from covey.wire import handshake
from covey.wire.frames import pack
from covey.wire.handshake import PER_ADDRESS_MAX
from covey.wire.job import AggregatorAt
from covey.wire.sums import DropJob, GetStatus, NextOwner, RanksAway, Serve, answers
from plugins.aggregator.datapath import job_sums, owner_links
from plugins.aggregator.datapath.aggd import Aggd, AggdConfig
from tests.families import examples
from tests.plugins.aggregator.loopback import SECRET, AggdThread, OwnerThread
from tests.virtual_time import play

JOB, EPOCH = JobId("j1"), (1 << 32) + 1
DECLARED = Declared("w", "model", (6,), 16)


@pytest.fixture(scope="module", params=["aggd", "rank"])
def aggd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AggdThread]:
    made = AggdThread if request.param == "aggd" else OwnerThread
    running = cast(AggdThread, made(tmp_path_factory.mktemp("owner")))
    yield running
    running.finish()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AggdThread]:
    """An aggregator that is a process, for what a rank that owns a table does not do."""
    running = AggdThread(tmp_path_factory.mktemp("aggd"))
    yield running
    running.finish()


def say(op: TensorOp, payload: bytes = b"", job: JobId = JOB, epoch: int = EPOCH, **fields: int) -> bytes:
    head, body = frame(op, job_hash(job), epoch, payload=payload, near=False, **{"key": key_of("w"), **fields})
    return head + bytes(body)


class Raw:
    """A worker that sends whatever a test likes."""

    def __init__(self, at: AggregatorAt, hello: bytes | None = None, rank: int = 0) -> None:
        host, _, port = at.address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=5)
        if hello is not None:
            self.socket.sendall(hello)
            return
        self.prove(say(TensorOp.HELLO, bytes(16), epoch=at.epoch, rank=rank), at.secret, at.epoch)

    def prove(self, hello: bytes, secret: bytes, epoch: int = EPOCH) -> bytes:
        """Say hello, hear the challenge and answer it; return the proof that was sent."""
        self.socket.sendall(hello)
        header, payload = self.hear()
        assert header.op is TensorOp.CHALLENGE
        challenge = handshake.parse_challenge(payload)
        proof = say(TensorOp.PROOF, handshake.proof_of_client(secret, hello, challenge.nonce), epoch=epoch)
        self.socket.sendall(proof)
        return proof

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def hear(self) -> tuple[Header, bytes]:
        head = self.read(HEADER_BYTES)
        header = parse(head)
        payload = self.read(header.length)
        verify(head, payload)
        return header, payload

    def dropped(self) -> bool:
        """Whether aggd closes the connection, perhaps after some last words."""
        try:
            while True:
                self.hear()
        except (EOFError, ConnectionError):
            return True


def served(aggd: AggdThread, epoch: int = EPOCH, workers: int = 2) -> AggregatorAt:
    """Drop the job and begin it anew."""
    aggd.order(DropJob(JOB, 1 << 60))
    return aggd.serve(JOB, epoch, workers)


def still_works(aggd: AggdThread) -> None:
    client = TensorClient(JobId("j1/1"), 0, 1, lambda epoch, why, table: None)
    aggd.order(DropJob(JobId("j1/1"), 1 << 60))
    client.moved(aggd.serve("j1/1", EPOCH, 1))
    assert client.push_pull("g", np.ones(3, np.float32)).tolist() == [1, 1, 1]
    client.close()


def test_a_worker_says_hello_and_is_welcomed(aggd: AggdThread) -> None:
    with Raw(served(aggd)) as worker:
        assert worker.hear()[0].op is TensorOp.WELCOME
        worker.socket.sendall(say(TensorOp.PING))
        assert worker.hear()[0].op is TensorOp.PONG


@pytest.mark.parametrize(
    ("hello", "told"),
    [
        (say(TensorOp.HELLO, bytes(16), job=JobId("j2")), 0),
        (say(TensorOp.HELLO, bytes(16), epoch=EPOCH - 1), EPOCH),
        (say(TensorOp.HELLO, bytes(16), epoch=EPOCH + 1), EPOCH),
    ],
)
def test_who_may_not_speak_is_told_stale_and_counted(aggd: AggdThread, hello: bytes, told: int) -> None:
    at, before = served(aggd), aggd.now().refused
    with Raw(at, hello) as worker:
        header, _ = worker.hear()
        assert (header.op, header.epoch) == (TensorOp.STALE, told)
        assert worker.dropped()
    assert aggd.now().refused == before + 1


@pytest.mark.parametrize(("secret", "rank"), [(b"another secret !", 0), (SECRET, 2)])
def test_who_does_not_know_the_secret_or_is_no_rank_is_told_stale(aggd: AggdThread, secret: bytes, rank: int) -> None:
    at, before = served(aggd), aggd.now().refused
    with Raw(at, b"") as worker:
        worker.prove(say(TensorOp.HELLO, bytes(16), rank=rank), secret)
        header, _ = worker.hear()
        assert (header.op, header.epoch) == (TensorOp.STALE, 0)
        assert worker.dropped()
    assert aggd.now().refused == before + 1


def test_the_newest_process_of_a_rank_is_heard_and_an_older_one_is_told_so(aggd: AggdThread) -> None:
    at = served(aggd)

    def joined(incarnation: int) -> tuple[Raw, Header]:
        worker = Raw(at, b"")
        worker.prove(say(TensorOp.HELLO, bytes(16), round=incarnation), SECRET)
        return worker, worker.hear()[0]

    first, header = joined(1)
    assert header.op is TensorOp.WELCOME
    second, header = joined(1 << 16)
    assert header.op is TensorOp.WELCOME and first.dropped(), "one speaks for its rank at a time"
    first, header = joined(1)
    assert (header.op, header.epoch, header.round) == (TensorOp.STALE, EPOCH, 1 << 16) and first.dropped()
    second.socket.sendall(say(TensorOp.PING))
    assert second.hear()[0].op is TensorOp.PONG
    again, header = joined(1 << 16)
    assert header.op is TensorOp.WELCOME and second.dropped(), "the same process may connect again"
    again.socket.close()
    ends = time.monotonic() + 5
    while aggd.now().jobs[0].joined:
        assert time.monotonic() < ends
        time.sleep(0.01)
    first, header = joined(1)
    assert (header.op, header.round) == (TensorOp.STALE, 1 << 16) and first.dropped(), "also while that is away"


OPEN = say(TensorOp.OPEN, pack_declared(DECLARED), flags=WANT)
BAD = {
    "not a frame": b"\xff" * 40,
    "no hello first": OPEN,
    "another epoch": OPEN.replace(struct.pack("<Q", EPOCH), struct.pack("<Q", EPOCH + 1)),
    "another rank": say(TensorOp.OPEN, pack_declared(DECLARED), rank=1),
    "another job": say(TensorOp.PING, job=JobId("j9")),
    "aggregators' words": say(TensorOp.RESULT, bytes(16)),
    "never opened": say(TensorOp.PUSH, bytes(16), round=1),
    "no such part": OPEN + say(TensorOp.PUSH, bytes(16), round=1, part=2),
    "a part too short": OPEN + say(TensorOp.PUSH, bytes(12), round=1),
    "a round far ahead": OPEN + say(TensorOp.PUSH, bytes(16), round=7),
    "a malformed declaration": say(TensorOp.OPEN, b"\xc1" * 30),
    "a wrong checksum": OPEN[:-1] + bytes([OPEN[-1] ^ 1]),
    "a huge length": OPEN[:32] + struct.pack("<I", 1 << 31) + OPEN[36:],
}


@pytest.mark.parametrize("what", list(BAD))
def test_a_connection_that_says_what_cannot_be_is_dropped_and_counted(aggd: AggdThread, what: str) -> None:
    at, before = served(aggd), aggd.now().bad_frames
    hello = b"" if what == "no hello first" else None
    with Raw(at, hello) as worker:
        worker.socket.sendall(BAD[what])
        assert worker.dropped()
    assert aggd.now().bad_frames == before + 1
    still_works(aggd)


def test_a_recorded_conversation_cannot_be_replayed_and_holds_no_secret(aggd: AggdThread) -> None:
    at, hello = served(aggd), say(TensorOp.HELLO, bytes(16))
    with Raw(at, b"") as worker:
        proof = worker.prove(hello, SECRET)
        assert worker.hear()[0].op is TensorOp.WELCOME
    recorded = hello + proof + OPEN + say(TensorOp.PUSH, bytes(16), round=1)
    assert SECRET not in recorded
    with Raw(at, recorded) as worker:
        assert [worker.hear()[0].op for _ in range(2)] == [TensorOp.CHALLENGE, TensorOp.STALE]
        assert worker.dropped()
    at = served(aggd, EPOCH + 1)
    with Raw(at, recorded) as worker:
        header, _ = worker.hear()
        assert (header.op, header.epoch) == (TensorOp.STALE, EPOCH + 1)
        assert worker.dropped()
    assert aggd.now().jobs[0].tensors == 0


def test_silent_connections_are_few_and_keep_no_worker_out(aggd: AggdThread) -> None:
    at, before = served(aggd), aggd.now().refused
    host, _, port = at.address.rpartition(":")
    silent = [socket.create_connection((host, int(port)), timeout=5) for _ in range(2 * PER_ADDRESS_MAX)]
    still_works(aggd)
    assert aggd.now().refused - before >= PER_ADDRESS_MAX
    for each in silent:
        each.close()


def test_a_second_connection_of_a_rank_replaces_the_first(aggd: AggdThread) -> None:
    at = served(aggd)
    with Raw(at) as first:
        first.hear()
        with Raw(at) as second:
            assert second.hear()[0].op is TensorOp.WELCOME
            assert first.dropped()
            assert aggd.now().jobs[0].joined == 1


def test_a_higher_epoch_ends_the_connections_of_the_lower_with_a_word(aggd: AggdThread) -> None:
    """A peer that is still proving that it may speak is told too. Orders under the earlier epoch come too late."""
    at, hello = served(aggd), say(TensorOp.HELLO, bytes(16), rank=1)
    with Raw(at) as worker, Raw(at, hello) as slow:
        worker.hear()
        _, challenge = slow.hear()
        aggd.serve(JOB, EPOCH, 2)  # said twice
        aggd.serve(JOB, EPOCH + 5, 2)
        header, _ = worker.hear()
        assert (header.op, header.epoch) == (TensorOp.STALE, EPOCH + 5)
        assert worker.dropped()
        nonce = handshake.parse_challenge(challenge).nonce
        slow.socket.sendall(say(TensorOp.PROOF, handshake.proof_of_client(SECRET, hello, nonce)))
        assert slow.hear()[0].op is TensorOp.STALE and slow.dropped()
    aggd.serve(JOB, EPOCH + 4, 2)
    for late in (DropJob(JOB, EPOCH + 4), DropJob(JOB, EPOCH + 4, within_s=5.0), RanksAway(JOB, EPOCH + 4, {1: "it"})):
        aggd.order(late)
    assert [(job.epoch, job.away) for job in aggd.now().jobs if job.job == JOB] == [(EPOCH + 5, [])]
    aggd.order(RanksAway(JOB, EPOCH + 5, {1: "it"}))
    assert [job.away for job in aggd.now().jobs if job.job == JOB] == [[1]]


def test_memory_of_a_job_that_is_forgotten_is_free_again(aggd: AggdThread) -> None:
    before = aggd.now().memory_bytes
    at = served(aggd)
    with Raw(at) as worker:
        worker.hear()
        worker.socket.sendall(OPEN + say(TensorOp.PING))
        worker.hear()
        assert aggd.now().memory_bytes == before + 2 * 24
    aggd.order(DropJob(JOB, EPOCH))
    assert aggd.now().memory_bytes == before


def until_touched(tensor: TensorSum) -> None:
    """Wait until the memory of the job is there."""
    ends = time.monotonic() + 5
    while not len(tensor._state):
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.mark.parametrize("brings", [False, True])
def test_ranks_hear_where_to_go_before_memory_is_given_back(
    process: AggdThread, monkeypatch: pytest.MonkeyPatch, brings: bool
) -> None:
    """Giving back a gigabyte takes up to seconds: so long a job stood that was handed over. `brings`: the memory stays
    until the next owner has it, or cannot be brought it; that owner does not answer here."""
    give_back_s = 0.0 if brings else 0.4
    monkeypatch.setattr(job_sums, "GIVE_BACK_S", give_back_s)
    let_go, given_back_s = TensorSum.let_go, list[float]()

    def noted(self: TensorSum) -> None:
        given_back_s.append(time.monotonic())
        let_go(self)

    monkeypatch.setattr(TensorSum, "let_go", noted)
    at = served(process)
    with socket.create_server(("127.0.0.1", 0)) as next_owner, Raw(at) as worker:
        to = NextOwner(f"127.0.0.1:{next_owner.getsockname()[1]}", SECRET) if brings else None
        worker.hear()
        worker.socket.sendall(OPEN + say(TensorOp.PING))
        worker.hear()
        tensor = process.aggd.jobs[JOB].tensors[key_of("w")]
        until_touched(tensor)
        not_before_s = time.monotonic() + give_back_s
        process.order(DropJob(JOB, EPOCH, EPOCH + 1, 0.01 if brings else 0.0, to))
        assert worker.hear()[0].op is TensorOp.STALE
        if brings:
            with next_owner.accept()[0]:
                for _ in range(5):  # its loop goes round meanwhile
                    process.now()
                not_before_s = time.monotonic()
    ends = time.monotonic() + 5
    while len(tensor._state):
        assert time.monotonic() < ends
        time.sleep(0.02)
    assert given_back_s[0] >= not_before_s


def bring(op: TensorOp, payload: bytes = b"", **fields: Any) -> bytes:
    """The bytes of a frame of the earlier owner."""
    return say(op, payload, rank=OWNER, **fields)


GOOD: list[bytes] = [
    OPEN + say(TensorOp.PUSH, bytes(16), round=1) + say(TensorOp.STATE, bytes(16)) + say(TensorOp.PING),
    bring(TensorOp.PING)
    + bring(TensorOp.OPEN, pack_declared(DECLARED), round=3)
    + bring(TensorOp.COPIES)
    + bring(TensorOp.STATE, bytes(16), round=3)
    + bring(TensorOp.STATE, bytes(8), round=3, part=1),
]
SPEAKERS = (0, OWNER)
"""The ranks that send each of these frames: a worker, and the earlier owner."""


def test_the_owner_before_is_heard_once_at_a_time_and_under_this_epoch_alone(
    process: AggdThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late and repeated frames change nothing; an owner that falls silent is not waited for."""
    monkeypatch.setattr(owner_links, "COPY_SILENT_S", 0.2)
    at, before = served(process), process.now()
    with Raw(at, bring(TensorOp.HELLO, bytes(16), epoch=EPOCH - 1)) as late:
        assert late.hear()[0].op is TensorOp.STALE and late.dropped()
    with Raw(at, rank=OWNER) as owner, Raw(at) as worker:
        assert owner.hear()[0].op is TensorOp.WELCOME and worker.hear()[0].op is TensorOp.WELCOME
        with Raw(at, rank=OWNER) as again:
            assert again.hear()[0].op is TensorOp.STALE and again.dropped()
        owner.socket.sendall(GOOD[1])
        assert [owner.hear()[0].op for _ in range(2)] == [TensorOp.PONG, TensorOp.COPIED]
        assert owner.dropped(), "it said nothing more"
        worker.socket.sendall(say(TensorOp.PING))
        assert worker.hear()[0].op is TensorOp.PONG
    with Raw(at, rank=OWNER) as owner:
        assert owner.hear()[0].op is TensorOp.WELCOME and owner.dropped(), "it says nothing at all"
    now = process.now()
    assert (now.copied - before.copied, now.copies_failed - before.copies_failed) == (1, 1)


@given(data=st.one_of(st.binary(max_size=200), st.integers(0, 2**32)))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_and_mutated_conversations_never_stop_it(aggd: AggdThread, data: bytes | int) -> None:
    at = served(aggd)
    if isinstance(data, int):
        which = data % len(GOOD)
        chance, talk = random.Random(data), bytearray(GOOD[which])
        for _ in range(chance.randrange(1, 4)):
            talk[chance.randrange(len(talk))] ^= 1 << chance.randrange(8)
        data = bytes(talk)
        worker = Raw(at, rank=SPEAKERS[which])
        worker.socket.sendall(data)
    else:
        worker = Raw(at, data)
    with worker:
        with contextlib.suppress(OSError):  # it was dropped already
            worker.socket.shutdown(socket.SHUT_WR)
        assert worker.dropped()
    assert not aggd.failures and not aggd.log.errors
    still_works(aggd)


def test_a_worker_that_never_reads_holds_up_nobody(aggd: AggdThread) -> None:
    """Rank 1 asks for more than a socket holds and does not read; another job goes on meanwhile."""
    at = served(aggd, workers=1)
    with Raw(at) as greedy:
        greedy.hear()
        for _ in range(3000):
            greedy.socket.sendall(say(TensorOp.PING))
        threads = [threading.Thread(target=still_works, args=(aggd,))]
        threads[0].start()
        threads[0].join(10)
        assert not threads[0].is_alive()


def test_the_agents_socket_obeys_frames_and_drops_what_is_none(process: AggdThread) -> None:
    path = f"{process.aggd.env.run_dir}/aggd.sock"

    def ask(data: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as control:
            control.settimeout(5)
            control.connect(path)
            control.sendall(data)
            control.shutdown(socket.SHUT_WR)
            found = b""
            while more := control.recv(1 << 16):
                found += more
            return found

    before = process.now().bad_frames
    for bad in (b"\xff" * 64, b"\x02\0\0\0\xc1\xc1", struct.pack("<I", 1 << 30)):
        assert ask(bad) == b""
    assert process.now().bad_frames == before + 3
    found = ask(pack(Serve(JobId("j7"), EPOCH, 3, SECRET)) + pack(GetStatus()))
    size = struct.unpack_from("<I", found)[0]
    assert [job.workers for job in answers.decode(found[4 : 4 + size]).jobs if job.job == "j7"] == [3]
    process.order(DropJob(JobId("j7"), EPOCH))


def test_it_ends_by_itself_when_neither_agent_nor_workers_are_there(tmp_path: Path) -> None:
    lonely = AggdThread(tmp_path, orphan_s=0.05)
    lonely._thread.join(5)
    assert not lonely._thread.is_alive() and not lonely.failures


def test_it_has_been_alone_since_the_last_one_left() -> None:
    """After twenty seconds alone in all it ends; fifteen before an agent that restarts, and fifteen after it, are not
    that."""

    async def ended_s() -> float:
        alone = SimpleNamespace(
            config=AggdConfig(bind="", control="", memory_bytes_max=0, orphan_s=20.0), over=asyncio.Event()
        )
        alone._controls, alone._connections = 0, 0
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        loop.call_later(14, setattr, alone, "_controls", 1)
        loop.call_later(16, setattr, alone, "_controls", 0)
        await Aggd._until_over(cast(Aggd, alone))
        return loop.time() - began_s

    assert play(ended_s()) == pytest.approx(35.0, abs=0.1)


def frames_of(data: bytes) -> list[Frame]:
    """A conversation cut into frames."""
    found = []
    while data:
        header = parse(data[:HEADER_BYTES])
        end = HEADER_BYTES + header.length
        found.append((data[:HEADER_BYTES], data[HEADER_BYTES:end]))
        data = data[end:]
    return [*found]


def test_the_conversation_that_is_mutated_above_is_a_good_one() -> None:
    ops = [[parse(bytes(head)).op for head, _ in frames_of(talk)] for talk in GOOD]
    assert ops[0] == [TensorOp.OPEN, TensorOp.PUSH, TensorOp.STATE, TensorOp.PING]
    assert ops[1] == [TensorOp.PING, TensorOp.OPEN, TensorOp.COPIES, TensorOp.STATE, TensorOp.STATE]


def test_what_each_job_costs_is_counted_for_it_alone(process: AggdThread) -> None:
    """The e of a job is the work for it in so many iterations; together the jobs are nearly all that the process
    worked."""
    for name in ("large", "small", "other", "j1"):
        process.order(DropJob(JobId(name), 1 << 60))
    before = process.now()
    clients = {}
    for name, size in (("large", 1 << 20), ("small", 1 << 10)):
        clients[name] = client = TensorClient(JobId(name), 0, 1, lambda epoch, why, table: None)
        client.moved(process.serve(name, EPOCH, 1))
        for _ in range(8):
            client.push_pull("g", np.ones(size, np.float32))
        client.push_pull("once", np.ones(size // 2, np.float32))
    now = process.now()
    jobs = {job.job: job for job in now.jobs}
    large, small = jobs[JobId("large")], jobs[JobId("small")]
    assert (large.iterations, large.rounds, large.largest_bytes, large.bytes) == (8, 9, 4 << 20, 6 << 20)
    assert (small.iterations, small.largest_bytes) == (8, 4 << 10)
    assert large.busy_us > 5 * small.busy_us > 0
    worked_us = (now.busy_s - before.busy_s) * 1e6
    assert 0.5 * worked_us < large.busy_us + small.busy_us <= worked_us + 2
    for client in clients.values():
        client.close()
