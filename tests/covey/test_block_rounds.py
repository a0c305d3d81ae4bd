"""Tensors whose Blocks have several owners: a real aggd for each, one thread per rank."""

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from covey.core.ids import HostId, JobId
from covey.job.tensors import TensorClient, TensorError
from covey.tensors.aggregator.link import Poster, TensorLink
from covey.tensors.aggregator.rounds import Superseded
from covey.tensors.numbers.blocks import table_id
from covey.tensors.numbers.tensor_wire import Frame
from covey.wire.job import AggregatorAt
from covey.wire.sums import GetStatus
from tests.covey.test_tensors import deltas, reference, until
from tests.plugins.aggregator.loopback import SECRET, AggdThread

JOB = JobId("j1")
GRANT = 1 << 32
SHAPE = (500, 401)
"""Shape of a tensor of 800 KB, which has a Block for each table."""


class Rack:
    """Three owners, and the ranks of a job that has a table at each."""

    def __init__(self, folder: Path, ranks: int = 2, tables: int = 3) -> None:
        self.folder, self.ranks, self.tables = folder, ranks, tables
        self.owners = [self.owner(f"h{table}") for table in range(tables)]
        self.wanted: list[tuple[int, int]] = []
        self.lost: list[tuple[int, int]] = []
        self.clients = [self.client(rank) for rank in range(ranks)]
        self.failed: list[BaseException] = []
        self.results: dict[int, np.ndarray] = {}

    def owner(self, name: str) -> AggdThread:
        (self.folder / name).mkdir()
        return AggdThread(self.folder / name)

    def client(self, rank: int) -> TensorClient:
        return TensorClient(
            JOB,
            rank,
            self.ranks,
            lambda epoch, why, table: self.lost.append((table, epoch)),
            tables=self.tables,
            wanted=lambda table: self.wanted.append((rank, table)),
        )

    def serve(self, table: int, epoch: int = GRANT + 1) -> AggregatorAt:
        at = self.owners[table].serve(table_id(JOB, table), epoch, self.ranks)
        return AggregatorAt(JOB, epoch, HostId(f"h{table}"), at.address, SECRET, table)

    def tell(self, at: AggregatorAt) -> None:
        for client in self.clients:
            client.moved(at)

    def train(self, rounds: int, rank: int) -> None:
        try:
            client = self.clients[rank]
            client.model("w", np.full(SHAPE, 0.5 + rank, np.float32))
            for round in range(rounds):
                self.results[rank] = client.push_pull("w", deltas(rank, round, SHAPE))
                self.after(rank, round)
        except BaseException as error:
            self.failed.append(error)

    def after(self, rank: int, round: int) -> None:
        """Called between rounds."""

    def begin(self, rounds: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=self.train, args=(rounds, rank)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        return threads

    def end(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert not self.failed

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for owner in self.owners:
            owner.finish()


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[Rack]:
    made = Rack(tmp_path)
    yield made
    made.close()


def received(rack: Rack) -> list[int]:
    return [sum(job.received_bytes for job in owner.order(GetStatus()).jobs) for owner in rack.owners]


def test_every_owner_sums_its_blocks_and_the_bits_are_those_of_one(rack: Rack) -> None:
    for table in range(3):
        rack.tell(rack.serve(table))
    rack.end(rack.begin(4))
    for rank in range(rack.ranks):
        assert rack.results[rank].tobytes() == reference(2, 4, SHAPE).tobytes()
    shares = np.array(received(rack)) / sum(received(rack))
    assert abs(shares - 1 / 3).max() < 0.02, shares
    assert not rack.lost and sorted(set(rack.wanted)) == [(rank, table) for rank in (0, 1) for table in range(3)]


def test_each_rank_begins_with_the_table_after_its_number(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this way every owner receives from one rank at a time."""
    posted: dict[int, list[int]] = {}
    post = Poster.post

    def recorded(self: Poster, link: TensorLink, frames: Iterable[Frame]) -> None:
        posted.setdefault(id(self), []).append(link.sock.getpeername()[1])
        post(self, link, frames)

    monkeypatch.setattr(Poster, "post", recorded)
    for table in range(3):
        rack.tell(rack.serve(table))
    rack.end(rack.begin(3))
    ports = [int(owner.now().address.rpartition(":")[2]) for owner in rack.owners]
    last_rounds = [[ports.index(port) for port in each[-3:]] for each in posted.values()]
    assert sorted(last_rounds) == [[1, 2, 0], [2, 0, 1]]


def test_the_owner_of_a_table_is_asked_for_once_a_rank_has_blocks_in_it(rack: Rack) -> None:
    rack.tell(rack.serve(0))
    small = [threading.Thread(target=client.push_pull, args=("b", np.ones(100, np.float32))) for client in rack.clients]
    for thread in small:
        thread.start()
    for thread in small:
        thread.join(10)
    assert sorted(rack.wanted) == [(0, 0), (1, 0)]
    threads = rack.begin(2)
    until(lambda: len(rack.wanted) == 6)
    until(lambda: "has not assigned an aggregator yet" in rack.clients[0].why("w"))
    rack.tell(rack.serve(1))
    rack.tell(rack.serve(2))
    rack.end(threads)


def test_a_lost_owner_costs_its_own_table_a_move_and_no_bit(rack: Rack, tmp_path: Path) -> None:
    for table in range(3):
        rack.tell(rack.serve(table))
    died = threading.Event()

    def after(rank: int, round: int) -> None:
        if rank == 0 and round == 2:
            rack.owners[1].finish()
            died.set()

    rack.after = after  # type: ignore[method-assign]
    threads = rack.begin(6)
    assert died.wait(10)
    until(lambda: (1, GRANT + 1) in rack.lost)
    rack.owners[1] = rack.owner("h1 again")
    rack.tell(rack.serve(1, GRANT + 3))
    rack.end(threads)
    assert {table for table, _ in rack.lost} == {1}
    for rank in range(rack.ranks):
        assert rack.results[rank].tobytes() == reference(2, 6, SHAPE).tobytes()


def test_one_table_that_belongs_to_another_run_ends_the_waits_for_all(rack: Rack) -> None:
    for table in range(2):
        rack.tell(rack.serve(table))  # nobody sums table 2
    threads = rack.begin(1)
    until(lambda: len(rack.wanted) == 6)
    until(lambda: all(client.why("w") == "the agent has not assigned an aggregator yet" for client in rack.clients))
    time.sleep(0.05)  # they wait for table 2 now
    rack.tell(AggregatorAt(JOB, 2 << 32, HostId("h1"), "", b"", 1))
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert [type(error) for error in rack.failed] == [Superseded, Superseded]


def test_a_rank_that_never_had_an_owner_learns_that_its_run_is_over(rack: Rack) -> None:
    """The rank's agent names a newer run, and no address."""
    threads = rack.begin(1)
    until(lambda: len(rack.wanted) == 6)
    rack.tell(AggregatorAt(JOB, 2 << 32, HostId("h1"), "", b""))
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert [type(error) for error in rack.failed] == [Superseded, Superseded] and not rack.lost


def test_rounds_of_cut_tensors_do_not_block_and_end_where_they_are_wanted(rack: Rack) -> None:
    for table in range(3):
        rack.tell(rack.serve(table))
    found: dict[int, list[np.ndarray]] = {}

    def script(rank: int) -> None:
        client = rack.clients[rank]
        outs = [np.empty(SHAPE, np.float32) for _ in range(3)]
        handles = [client.push(f"g{at}", deltas(rank, at, SHAPE), out=outs[at]) for at in range(3)]
        found[rank] = [handle.wait() for handle in handles]
        assert all(result is out for result, out in zip(found[rank], outs, strict=True))
        assert all(handle.done for handle in handles)

    threads = [threading.Thread(target=script, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for at in range(3):
        expected = deltas(0, at, SHAPE) + deltas(1, at, SHAPE)
        assert all(found[rank][at].tobytes() == expected.tobytes() for rank in range(2))


def test_ranks_that_declare_unlike_shapes_are_told_which(rack: Rack) -> None:
    for table in range(3):
        rack.tell(rack.serve(table))
    told: list[str] = []

    def script(rank: int) -> None:
        shape = SHAPE if rank == 0 else SHAPE[::-1]
        try:
            rack.clients[rank].push_pull("g", np.ones(shape, np.float32))
        except TensorError as error:
            told.append(str(error))
            rack.clients[1 - rank].close()

    threads = [threading.Thread(target=script, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert told and "'g'" in told[0] and "(500, 401)" in told[0] and "(401, 500)" in told[0]
