"""Ranks that own the tables of their job, in real sockets: one thread per rank, no aggregator."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from covey.core.errors import TensorError
from covey.core.ids import HostId, JobId
from covey.job.tensors import TensorClient
from covey.ports.verbs import Verbs
from covey.tensors.aggregator.aggregator_rounds import AWAITED_BYTES
from covey.tensors.aggregator.link import READ_BYTES, SMALL_BYTES
from covey.tensors.direct.connection import AT_ONCE_BYTES
from covey.tensors.direct.local_link import LocalLink
from covey.tensors.numbers.blocks import Sizes, table_id
from covey.tensors.numbers.sum_order import ORDERS, Order
from covey.tensors.numbers.tensor_wire import TensorOp, frame, job_hash
from covey.tensors.numbers.updates import Adam
from covey.tensors.owner.sums import TensorSum
from covey.wire import handshake
from covey.wire.handshake import CHALLENGE_BYTES
from covey.wire.job import AggregatorAt
from covey.wire.sums import DropJob, GetStatus, RanksAway, Serve
from tests.covey.test_tensors import deltas, reference, until
from tests.plugins.aggregator.loopback import SECRET

JOB = JobId("j1")
GRANT = 1 << 32
SHAPE = (500, 401)
"""Shape of a tensor of 800 KB, which has a Block for each table."""
IP = "127.0.0.1"
WITHIN_S = 30.0
"""Seconds that all rounds of a test may take."""


class Ranks:
    """The ranks of a job on as many hosts: rank n owns table n."""

    def __init__(self, ranks: int = 3, order: Order = "tree", verbs: Sequence[Verbs] = ()) -> None:
        """`verbs`: the RDMA of each rank; none: their agents do not let them use any."""
        self.lost: list[tuple[int, int]] = []
        self.whys: list[str] = []
        """Why each of them was lost."""
        self.rdma = set(range(len(verbs)))
        """Ranks whose agent lets them use RDMA."""
        self.clients = [
            TensorClient(
                JOB,
                rank,
                ranks,
                self._lost,
                tables=ranks,
                verbs=verbs[rank] if verbs else None,
            )
            for rank in range(ranks)
        ]
        self.failed: list[BaseException] = []
        self.results: dict[int, np.ndarray] = {}
        for client in self.clients:
            client.order = order
        for table in range(ranks):
            self.own(table, table, GRANT + 1)

    def _lost(self, epoch: int, why: str, table: int) -> None:
        self.lost.append((table, epoch))
        self.whys.append(why)

    def own(self, rank: int, table: int, epoch: int, near: bool = False) -> None:
        """Let a rank own a table, and tell all ranks."""
        serve = Serve(table_id(JOB, table), epoch, len(self.clients), SECRET)
        now = self.clients[rank].owner.perform(serve, IP, 1 << 30, rank in self.rdma)
        there = HostId(f"h{rank}"), now.address, SECRET, table
        for client in self.clients:
            rdma = client.rank in self.rdma
            client.moved(AggregatorAt(JOB, epoch, *there, near=now.near if near else "", rdma=rdma))

    def start(self, script: Any) -> list[threading.Thread]:
        def run(rank: int) -> None:
            try:
                script(rank, self.clients[rank])
            except Exception as error:
                self.failed.append(error)
                for client in self.clients:  # others would wait for this rank
                    client._far._failed(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.clients))]
        for thread in threads:
            thread.start()
        return threads

    def end(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(WITHIN_S)
            assert not thread.is_alive(), (self.lost, [client.why("w") for client in self.clients])
        if self.failed:
            raise self.failed[0]

    def close(self) -> None:
        threads = [threading.Thread(target=client.close) for client in self.clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def train(ranks: Ranks, rounds: int, pause_s: float = 0.0) -> list[threading.Thread]:
    def script(rank: int, client: TensorClient) -> None:
        client.model("w", np.full(SHAPE, 0.5 + rank, np.float32))
        for round in range(rounds):
            given = deltas(rank, round, SHAPE)
            ranks.results[rank] = client.push_pull("w", given)
            assert given.tobytes() == deltas(rank, round, SHAPE).tobytes(), "what was pushed is the script's"
            time.sleep(pause_s)

    return ranks.start(script)


def is_reference(ranks: Ranks, rounds: int, order: Order = "tree") -> bool:
    wanted = reference(len(ranks.clients), rounds, SHAPE, order).tobytes()
    return all(ranks.results[rank].tobytes() == wanted for rank in range(len(ranks.clients)))


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_that_own_the_tables_have_the_bits_of_an_aggregator(order: Order) -> None:
    ranks = Ranks(4, order)
    ranks.end(train(ranks, 5))
    assert is_reference(ranks, 5, order) and not ranks.lost
    for rank, client in enumerate(ranks.clients):
        (job,) = client.owner.perform(GetStatus(), IP, 1 << 30).jobs
        assert (job.job, job.joined, job.iterations) == (table_id(JOB, rank), 4, 5)
        assert job.received_bytes > 0 and not job.missing
    ranks.close()


def test_tensors_around_each_size_at_which_something_changes_are_added(ranks: Ranks) -> None:
    """Blocks are sent by the thread that pushes or adds, or by one of its own; alone or with others."""
    edges = (SMALL_BYTES, READ_BYTES, Sizes().elsewhere_bytes, 3 * AWAITED_BYTES, 3 * AT_ONCE_BYTES)
    counts = sorted({edge // 4 + more for edge in edges for more in (-1, 0, 1)} | {0, 1})

    def script(rank: int, client: TensorClient) -> None:
        for count in counts:
            given = np.arange(count, dtype=np.float32) + rank
            found = [client.push_pull(f"g{count}", given, out=np.empty_like(given)) for _ in range(2)]
            pushed = client.push(f"g{count}", given).wait()
            assert all((each == 3 * np.arange(count) + 3).all() for each in (*found, pushed)), count

    ranks.end(ranks.start(script))


def test_halves_and_an_optimizer_are_added_as_elsewhere(ranks: Ranks) -> None:
    """Sixteen bits are added in thirty-two; Adam's moments go to the keeper before others have the result."""
    told: dict[int, Any] = {}

    def script(rank: int, client: TensorClient) -> None:
        half = client.push_pull("h", np.full(100_000, rank + 1, np.float16), mean=True)
        client.model("p", np.zeros(100_000, np.float32), update=Adam())
        for _ in range(3):
            p = client.push_pull("p", np.full(100_000, rank + 1.0, np.float32))
        told[rank] = half[0], p.tobytes(), client.moments("p").steps

    ranks.end(ranks.start(script))
    assert {tuple(each) for each in told.values()} == {(np.float16(2), told[0][1], 3)}


@pytest.mark.parametrize("near", [False, True])
def test_tables_that_go_from_rank_to_rank_under_way_cost_no_bit(ranks: Ranks, near: bool) -> None:
    """Each move is as if the owner had been lost: nobody brings its state, and all push again what is under way."""
    threads = train(ranks, 30, 0.01)
    for epoch in range(2, 12):
        until(lambda: len(ranks.results) == 3)
        before = epoch % 3
        ranks.clients[before].owner.perform(DropJob(table_id(JOB, 1), 1 << 60, GRANT + epoch), IP, 1 << 30)
        ranks.own((before + 1) % 3, 1, GRANT + epoch, near)
        owner = ranks.clients[(before + 1) % 3].owner
        until(lambda: any(job.epoch == GRANT + epoch and job.joined == 3 for job in owner.now().jobs))  # noqa: B023
    ranks.end(threads)
    assert is_reference(ranks, 30)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_nobody_expected_ends_the_wait(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads ends by it, so the script would wait for ever."""

    def refused(*_: Any) -> None:
        raise ValueError("not of this size")

    monkeypatch.setattr(LocalLink, "read_payload", refused)
    with pytest.raises((TensorError, ValueError), match="not of this size"):
        ranks.end(train(ranks, 1))


def test_a_rank_that_ends_first_leaves_its_results_behind() -> None:
    """Without `leave`: the last result of a rank that owns a table reaches the others although it is done."""
    for _ in range(5):
        ranks = Ranks(3)

        def script(rank: int, client: TensorClient, ranks: Ranks = ranks) -> None:
            ranks.results[rank] = client.push_pull("w", np.full(1 << 20, 1.0, np.float32))
            client.close()

        ranks.end(ranks.start(script))
        assert all((result == 3).all() for result in ranks.results.values())


def test_a_forked_child_does_not_keep_a_dead_owner_reachable() -> None:
    """A worker of a data loader outlives its rank for a while: others would connect to it, and wait."""
    reads, writes = os.pipe()
    rank = os.fork()
    if not rank:
        client = TensorClient(JOB, 0, 2, lambda epoch, why, table: None)
        address = client.owner.perform(Serve(JOB, GRANT + 1, 2, SECRET), IP, 1 << 30).address
        worker = os.fork()
        if worker:
            signal.pause()
        client.abandon()
        os.write(writes, f"{os.getpid()} {address}".encode())
        signal.pause()
    child, _, address = os.read(reads, 100).decode().partition(" ")
    try:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
        host, _, port = address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=5).close()
    finally:
        os.kill(int(child), signal.SIGKILL)
        os.close(reads)
        os.close(writes)


def test_an_addition_that_cannot_begin_is_done_when_all_have_pushed_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is refused, once: what was pushed is lost to the owner, and not to its ranks."""
    begin, failed = TensorSum.begin, list[TensorSum]()

    def refused(tensor: TensorSum) -> Any:
        if not failed:
            failed.append(tensor)
            tensor._ready.popleft()
            raise MemoryError("no memory")
        return begin(tensor)

    monkeypatch.setattr(TensorSum, "begin", refused)
    ranks.end(train(ranks, 3))
    assert failed and is_reference(ranks, 3)


@pytest.mark.parametrize("left", [False, True])
def test_an_owner_ends_once_what_it_gave_was_received(
    ranks: Ranks, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all ranks are done, it waits until they have closed their connections, too."""
    looks = 0

    class Slow:
        is_sent = True

    def connections() -> list[Slow]:
        nonlocal looks
        looks += 1
        slow = Slow()
        slow.is_sent = left or looks > 3
        return [] if left and looks > 3 else [slow]

    monkeypatch.setattr(ranks.clients[0].owner, "_remote", connections)
    ranks.clients[0].owner.close(left)
    assert looks == 4


def test_a_rank_that_does_not_read_holds_up_no_other(ranks: Ranks) -> None:
    """It gets what the kernel takes, and the rest waits for it; large results and small ones."""
    owner = ranks.clients[0].owner
    at = owner.perform(Serve(JobId("j1/9"), GRANT + 1, 2, SECRET), IP, 1 << 30).address
    say: dict[str, Any] = {"job": job_hash(JobId("j1/9")), "epoch": GRANT + 1}
    host, _, port = at.rpartition(":")
    sizes = {"small": AT_ONCE_BYTES // 8, "large": AT_ONCE_BYTES}
    with socket.create_connection((host, int(port))) as deaf:
        head, nonce = frame(TensorOp.HELLO, **say, rank=1, payload=bytes(16))
        deaf.sendall(head + nonce)
        found = deaf.recv(40 + CHALLENGE_BYTES, socket.MSG_WAITALL)
        challenge = handshake.parse_challenge(found[40:])
        proof = handshake.proof_of_client(SECRET, head + nonce, challenge.nonce)
        deaf.sendall(b"".join(map(bytes, frame(TensorOp.PROOF, **say, rank=1, payload=proof))))
        for _ in range(20_000):
            deaf.sendall(frame(TensorOp.PING, **say, rank=1)[0])  # more answers than it has room for
        ranks.end(train(ranks, 3))
        for name, size in sizes.items():
            ranks.end(ranks.start(lambda rank, client, name=name, size=size: client.push_pull(name, np.ones(size))))
    assert is_reference(ranks, 3)


class BadCard:
    """A wire between a rank and an owner that changes one bit, once, of what goes in one direction."""

    def __init__(self, to: str, of: str) -> None:
        self._to, self._of, self.flipped = to, of, 0
        self._listener = socket.create_server((IP, 0))
        self.address = f"{IP}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self._to.rpartition(":")
            far = socket.create_connection((host, int(port)))
            for name, ends in (("pushes", (near, far)), ("results", (far, near))):
                threading.Thread(target=self._carry, args=(name, *ends), daemon=True).start()

    def _carry(self, name: str, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := bytearray(source.recv(1 << 16)):
                if name == self._of and not self.flipped and len(data) > 10_000:
                    self.flipped, data[5_000] = 1, data[5_000] ^ 16
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for each in (source, sink):
                each.close()

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("of", ["pushes", "results"])
def test_a_bit_that_a_card_flips_is_seen_and_pushed_again(ranks: Ranks, of: str) -> None:
    card = BadCard(ranks.clients[0].owner.now().address, of)
    epoch = GRANT + 2
    now = ranks.clients[0].owner.perform(Serve(table_id(JOB, 0), epoch, 3, SECRET), IP, 1 << 30)
    for rank, client in enumerate(ranks.clients):
        address = card.address if rank == 1 else now.address
        client.moved(AggregatorAt(JOB, epoch, HostId("h0"), address, SECRET, 0))
    ranks.end(train(ranks, 4))
    assert card.flipped and is_reference(ranks, 4)
    assert ranks.clients[0].owner.now().bad_frames == (of == "pushes")
    card.close()


def test_a_rank_that_waits_in_vain_is_told_by_the_owner(ranks: Ranks) -> None:
    owner = ranks.clients[1].owner

    def script(rank: int, client: TensorClient) -> None:
        if rank != 2:
            client.push_pull("w", np.ones(SHAPE, np.float32))

    threads = ranks.start(script)
    job = table_id(JOB, 1)
    until(lambda: owner.perform(GetStatus(), IP, 1 << 30).jobs[0].missing == [2])
    owner.perform(RanksAway(job, GRANT + 1, {2: "rank 2 ended with 0"}), IP, 1 << 30)
    ends = time.monotonic() + 15
    while not ranks.failed and time.monotonic() < ends:
        owner.perform(GetStatus(), IP, 1 << 30)
        time.sleep(0.05)
    assert "rank 2 ended with 0" in str(ranks.failed[0])
    for client in ranks.clients:
        client.close()
    for thread in threads:
        thread.join(10)


def test_an_owner_that_is_done_waits_until_the_others_have_left() -> None:
    """Ranks leave at different speeds; none loses its owner before it has the last result."""
    ranks, begun = Ranks(3), list[int]()

    def script(rank: int, client: TensorClient) -> None:
        client.push_pull("w", np.ones(SHAPE, np.float32))
        until(lambda: len(begun) == rank)
        begun.append(rank)
        assert client.leave(20)
        client.close()

    ranks.end(ranks.start(script))
    assert not ranks.lost


def test_orders_for_another_job_or_an_address_that_is_not_here_make_no_owner(ranks: Ranks) -> None:
    client = TensorClient(JobId("j2"), 0, 1, lambda epoch, why, table: None)
    assert client.owner.perform(Serve(JobId("j1"), GRANT + 1, 1, SECRET), IP, 1 << 30).jobs == []
    with pytest.raises(OSError):
        client.owner.perform(Serve(JobId("j2"), GRANT + 1, 1, SECRET), "203.0.113.7", 1 << 30)
    now = client.owner.now()
    assert (now.address, now.jobs) == ("", [])
    client.close()
