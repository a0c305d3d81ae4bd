"""Ranks that exchange tensors directly, over queue pairs of a stand-in: the bits of TCP, whatever fails."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from covey.job.tensors import TensorClient
from covey.tensors.aggregator import link
from covey.tensors.aggregator.rounds import Rounds
from covey.tensors.direct.connection import RankConnection
from covey.tensors.numbers.tensor_wire import HEADER_BYTES, Frame, TensorOp, frame
from covey.tensors.rdma import tensor_pair
from covey.tensors.rdma.rdma_here import RdmaHere
from covey.tensors.rdma.tensor_pair import LEAST_BYTES, SLOT_BYTES, SLOTS, TensorPair
from covey.wire.sums import GetStatus
from tests.covey.test_direct import GRANT, IP, SHAPE, Ranks, is_reference, train
from tests.covey.test_tensors import until
from tests.plugins.memory.stand_in_verbs import StandInDevice, StandInNetwork, StandInPair, StandInVerbs

LOCKED = "the device refuses to register 4198400 bytes (memory that may be locked: ulimit -l)"


class Rack:
    """Three ranks on as many hosts, each with a device."""

    def __init__(self, **refusals: Callable[[StandInVerbs], object]) -> None:
        """`refusals`: `r1=...` is called with the device of rank 1 before anything else."""
        self.network = StandInNetwork()
        self.verbs = [StandInVerbs(self.network) for _ in range(3)]
        for rank, refuse in refusals.items():
            refuse(self.verbs[int(rank[1:])])
        self.ranks = Ranks(3, verbs=self.verbs)

    def pairs(self) -> list[int]:
        """How many connections each rank has with a queue pair, as the owner of a table."""
        return [client.owner.perform(GetStatus(), IP, 1 << 30, True).pairs for client in self.ranks.clients]

    def no_rdma(self) -> list[str]:
        return [client.owner.now().no_rdma for client in self.ranks.clients]

    @property
    def written(self) -> int:
        """The number of parts that went over queue pairs."""
        return sum(not step.is_read for step in self.network.steps)

    def __enter__(self) -> "Rack":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.ranks.close()
        until(lambda: not self.network.pairs and not self.network.regions)


@pytest.fixture
def rack() -> Iterator[Rack]:
    with Rack() as made:
        yield made


def test_large_parts_go_over_queue_pairs_with_the_bits_of_tcp(rack: Rack) -> None:
    """Each of three tables gets the initial value of rank 0 or of its own rank, and of five rounds the pushes of two
    ranks; two ranks get each result."""
    rack.ranks.end(train(rack.ranks, 5))
    assert is_reference(rack.ranks, 5) and not rack.ranks.lost
    assert rack.written >= 3 * 5 * (2 + 2) and rack.pairs() == [2, 2, 2] and rack.no_rdma() == ["", "", ""]
    assert [client.owner.now().bad_frames for client in rack.ranks.clients] == [0, 0, 0]


def test_tensors_of_many_parts_and_of_every_size_are_added(rack: Rack) -> None:
    edges = (3 * LEAST_BYTES, 3 * SLOT_BYTES, 3 * SLOT_BYTES * (SLOTS + 2))
    counts = sorted({edge // 4 + more for edge in edges for more in (-3, 0, 3)} | {1, 1000})

    def script(rank: int, client: TensorClient) -> None:
        handles = []
        for count in counts:
            handles.append(client.push(f"g{count}", np.arange(count, dtype=np.float32) + rank))
        for count, handle in zip(counts, handles, strict=True):
            assert (handle.wait() == 3 * np.arange(count, dtype=np.float32) + 3).all(), count
            half = client.push_pull(f"h{count}", np.full(count, rank + 1, np.float16), mean=True)
            assert (half == 2).all(), count

    rack.ranks.end(rack.ranks.start(script))
    assert not rack.ranks.lost and rack.pairs() == [2, 2, 2]


@pytest.mark.parametrize("loser", ["the rank", "the owner"])
def test_a_queue_pair_that_is_lost_in_a_round_leaves_tcp_and_the_same_bits(rack: Rack, loser: str) -> None:
    """Either end may be the one that sees it. Only that connection is made anew, and it says why."""
    lost = list[StandInPair]()
    post = StandInPair.post

    def failing(pair: StandInPair, steps: Any) -> None:
        is_owners = any(pair.number == link.pair.here.where.number for link in owner._remote() if link.pair is not None)
        if not lost and len(rack.ranks.results) == 3 and len(steps) == 2 and is_owners == (loser == "the owner"):
            lost.append(pair)
            pair.failed = "the peer no longer allows access to that memory"
        post(pair, steps)

    owner = rack.ranks.clients[0].owner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandInPair, "post", failing)
        rack.ranks.end(train(rack.ranks, 12))
    assert lost and is_reference(rack.ranks, 12)
    assert sum(rack.pairs()) == 5 and len(rack.ranks.lost) == 1
    why = "".join(rack.no_rdma())
    assert "no longer allows" in why or "its queue pair failed: closed the connection" in why


@pytest.mark.parametrize("where", ["r0", "r1"])
@pytest.mark.parametrize(
    "refuse, why",
    [
        (lambda verbs: setattr(verbs, "refuses", "this host has no RDMA device"), "this host has no RDMA device"),
        (lambda verbs: setattr(verbs, "locks", LOCKED), LOCKED),
    ],
)
def test_a_rank_without_rdma_goes_over_tcp_and_says_why(where: str, refuse: Any, why: str) -> None:
    """It has no device, or the kernel locks no memory for it: two of the six connections have a pair."""
    with Rack(**{where: refuse}) as rack:
        rack.ranks.end(train(rack.ranks, 3))
        assert is_reference(rack.ranks, 3) and not rack.ranks.lost
        without = int(where[1:])
        assert rack.pairs() == [0 if rank == without else 1 for rank in range(3)]
        assert rack.no_rdma() == [why] * 3


def test_ranks_that_cannot_reach_each_other_by_rdma_go_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices in two networks: the first READ says so, before anything depends on it."""
    monkeypatch.setattr(tensor_pair, "PROBE_S", 0.05)
    with Rack(r0=lambda verbs: setattr(verbs.network, "unreachable", True)) as rack:
        rack.ranks.end(train(rack.ranks, 3))
        assert is_reference(rack.ranks, 3) and not rack.ranks.lost and not rack.written
        assert rack.pairs() == [0, 0, 0] and set(rack.no_rdma()) == {"the peer does not answer"}


def test_a_device_that_is_slow_to_open_costs_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the other end asks whether it lives: PINGs are no violation before the welcome."""
    pings, opens = list[bytes](), StandInVerbs.open
    ping = Rounds.ping

    def slow(verbs: StandInVerbs) -> StandInDevice:
        if threading.current_thread().name == "covey-pushes":  # an owner's, whose rank waits
            until(lambda: len(pings) > 2)
        return opens(verbs)

    def counted(rounds: Rounds) -> Frame:
        said = ping(rounds)
        pings.append(said[0])
        return said

    monkeypatch.setattr(link, "SILENT_S", 0.02)
    monkeypatch.setattr(StandInVerbs, "open", slow)
    monkeypatch.setattr(Rounds, "ping", counted)
    with Rack() as rack:
        rack.ranks.end(train(rack.ranks, 3))
        assert is_reference(rack.ranks, 3) and not rack.ranks.whys and rack.pairs() == [2, 2, 2]


@pytest.mark.parametrize("may", [{0, 2}, set()])
def test_a_rank_whose_agent_does_not_let_it_has_no_pair(rack: Rack, may: set[int]) -> None:
    """The agents of two hosts may be set differently: either may say no, and the owner says which one did."""
    rack.ranks.rdma = may
    for table in range(3):
        rack.ranks.own(table, table, GRANT + 2)
    rack.ranks.end(train(rack.ranks, 3))
    now = [client.owner.now() for client in rack.ranks.clients]
    assert is_reference(rack.ranks, 3) and [each.pairs for each in now] == ([1, 0, 1] if may else [0, 0, 0])
    why = "rank 1 is not to use RDMA; next: [aggregator] rdma on its host" if may else ""
    assert [each.no_rdma for each in now] == [why, "", why]


def test_ranks_of_one_host_have_no_pair(rack: Rack) -> None:
    for table in range(3):
        rack.ranks.own(table, table, GRANT + 2, near=True)
    rack.ranks.end(train(rack.ranks, 3))
    assert is_reference(rack.ranks, 3) and rack.pairs() == [0, 0, 0] and rack.no_rdma() == ["", "", ""]


def test_tables_that_go_from_rank_to_rank_take_no_pair_along(rack: Rack) -> None:
    """A move is no failure of RDMA: the next connection, to the same address too, has a pair."""
    threads = train(rack.ranks, 20, 0.01)
    for epoch in range(2, 8):
        until(lambda: len(rack.ranks.results) == 3)
        rack.ranks.own(epoch % 2, 1, GRANT + epoch)
        owner = rack.ranks.clients[epoch % 2].owner
        until(lambda: any(job.epoch == GRANT + epoch and job.joined == 3 for job in owner.now().jobs))  # noqa: B023
    rack.ranks.end(threads)
    assert is_reference(rack.ranks, 20) and not any(rack.no_rdma())


@pytest.mark.parametrize("of", ["pushes", "results"])
def test_a_bit_that_a_card_flips_on_the_pair_is_seen_and_pushed_again(
    rack: Rack, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, flipped = TensorPair.take, list[TensorPair]()

    def flipping(pair: TensorPair, view: memoryview) -> None:
        take(pair, view)
        owned = any(pair is link.pair for client in rack.ranks.clients for link in client.owner._remote())
        if not flipped and owned == (of == "pushes"):
            flipped.append(pair)
            view[5] ^= 16

    monkeypatch.setattr(TensorPair, "take", flipping)
    rack.ranks.end(train(rack.ranks, 4))
    assert flipped and is_reference(rack.ranks, 4)
    assert sum(client.owner.now().bad_frames for client in rack.ranks.clients) == (of == "pushes")
    assert len(rack.ranks.lost) == 1 and sum(rack.pairs()) == 5


def test_a_rank_that_takes_nothing_holds_up_no_other(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots are full, and the rest of its result waits in the thread that sends to it alone."""
    take, stopped, go_on = TensorPair.take, threading.Event(), threading.Event()
    shape = (3 * SLOTS * SLOT_BYTES // 2,)

    def slow(pair: TensorPair, view: memoryview) -> None:
        mine = [rounds._link.pair for rounds in rack.ranks.clients[2]._far._at.values() if rounds._link is not None]
        if pair in mine and not go_on.is_set():
            stopped.set()
            assert go_on.wait(20)
        take(pair, view)

    monkeypatch.setattr(TensorPair, "take", slow)
    done = list[int]()

    def script(rank: int, client: TensorClient) -> None:
        found = client.push_pull("g", np.full(shape, rank, np.float32))
        assert (found == 3).all()
        done.append(rank)
        if rank != 2:
            assert stopped.wait(20)
            if sorted(done) == [0, 1]:
                go_on.set()

    rack.ranks.end(rack.ranks.start(script))
    assert done[2] == 2 and not rack.ranks.lost


def test_an_owner_that_is_done_waits_until_the_header_of_the_last_part_is_received() -> None:
    """The part itself is in the rank's memory before, but the rank does not know it."""
    network, (ours, theirs) = StandInNetwork(), socket.socketpair()
    rdma, lock = RdmaHere(StandInVerbs(network)), threading.RLock()
    connection = RankConnection(ours, 1, 1, GRANT, lambda key: None, lock, lambda size: None)
    here, there = connection.pair, _ = rdma.pair(ours), rdma.pair(theirs)
    for one, other in ((here, there), (there, here)):
        one.connect(other.here)
    network.held = True
    with lock:
        connection.say(frame(TensorOp.RESULT, 1, GRANT, payload=bytes(LEAST_BYTES)))
    connection.pump()
    until(lambda: not connection._owed)
    assert not connection.is_sent
    network.go_on()
    assert len(theirs.recv(HEADER_BYTES, socket.MSG_WAITALL)) == HEADER_BYTES
    until(lambda: connection.is_sent)
    connection.close()
    connection.writer.join(10)
    connection.release()
    there.close()
    assert not network.regions and not network.pairs
    for sock in (ours, theirs):
        sock.close()


assert 4 * SHAPE[0] * SHAPE[1] // 3 >= LEAST_BYTES, "a Block of the tensor of most tests goes over a pair"
