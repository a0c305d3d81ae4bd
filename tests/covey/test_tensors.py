"""TensorClient against a real aggd on loopback sockets: one thread per rank, as the processes of a job would be."""

import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from covey.core.ids import HostId, JobId
from covey.job.tensors import TensorClient, TensorError
from covey.tensors.aggregator.link import TensorLink
from covey.tensors.aggregator.rounds import Superseded
from covey.tensors.numbers.handle import TensorHandle
from covey.tensors.numbers.sum_order import ORDERS, Order
from covey.tensors.numbers.tensor_wire import HEADER_BYTES, TensorOp, frame, job_hash
from covey.wire.job import AggregatorAt
from covey.wire.sums import DropJob
from tests.plugins.aggregator.harness import added
from tests.plugins.aggregator.loopback import SECRET, AggdThread, OwnerThread
from tests.quiet import until_blocked

EPOCH = 1 << 32


@pytest.fixture(params=["aggd", "rank"])
def aggd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AggdThread]:
    """Who sums: a process of its own, or a rank that owns the table."""
    running = AggdThread(tmp_path) if request.param == "aggd" else cast(AggdThread, OwnerThread(tmp_path))
    yield running
    running.finish()


class Ranks:
    """The clients of one job, each driven by a thread."""

    def __init__(self, workers: int, part_bytes: int = 1 << 16) -> None:
        self.lost: list[tuple[int, int, str]] = []
        self.clients = [
            TensorClient(JobId("j1"), rank, workers, self._lost(rank), part_bytes=part_bytes) for rank in range(workers)
        ]
        self.failed: list[BaseException] = []

    def _lost(self, rank: int) -> Callable[[int, str, int], None]:
        return lambda epoch, why, table: self.lost.append((rank, epoch, why))

    def moved(self, at: AggregatorAt) -> None:
        for client in self.clients:
            client.moved(at)

    def start(self, script: Callable[[int, TensorClient], None]) -> list[threading.Thread]:
        def run(rank: int) -> None:
            try:
                script(rank, self.clients[rank])
            except BaseException as error:
                self.failed.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.clients))]
        for thread in threads:
            thread.start()
        return threads

    def end(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), self.lost
        for client in self.clients:
            client.close()
        if self.failed:
            raise self.failed[0]


def deltas(rank: int, round: int, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng([rank, round])
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-5, 6, shape)).astype(np.float32)


def reference(workers: int, rounds: int, shape: tuple[int, ...], order: Order = "tree") -> np.ndarray:
    parameters = np.full(shape, 0.5, np.float32)
    for round in range(rounds):
        parameters = parameters + added([deltas(rank, round, shape) for rank in range(workers)], order)
    return parameters


def until(what: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


@pytest.mark.parametrize("shape", [(3,), (), (0,), (100, 70), (300_000,)])
def test_every_rank_gets_rank_0s_model_plus_the_sums(aggd: AggdThread, shape: tuple[int, ...]) -> None:
    ranks = Ranks(3)
    results: dict[int, np.ndarray] = {}

    def script(rank: int, client: TensorClient) -> None:
        start = client.model("w", np.full(shape, 0.5 + rank, np.float32))
        assert start.shape == shape and np.all(start == 0.5)
        for round in range(3):
            results[rank] = client.push_pull("w", deltas(rank, round, shape))

    ranks.moved(aggd.serve("j1", EPOCH + 1, 3))
    ranks.end(ranks.start(script))
    for rank in range(3):
        assert results[rank].shape == shape
        assert results[rank].tobytes() == reference(3, 3, shape).tobytes()
    assert not ranks.lost


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_additions_is_the_scripts_choice(aggd: AggdThread, order: Order) -> None:
    ranks = Ranks(5)
    results: dict[int, np.ndarray] = {}

    def script(rank: int, client: TensorClient) -> None:
        client.order = order
        results[rank] = client.push_pull("g", deltas(rank, 0, (1000,)))
        with pytest.raises(ValueError, match="before the first one"):
            client.order = order

    ranks.moved(aggd.serve("j1", EPOCH + 1, 5))
    ranks.end(ranks.start(script))
    expected = {order: added([deltas(rank, 0, (1000,)) for rank in range(5)], order).tobytes() for order in ORDERS}
    assert expected["tree"] != expected["rank"], "else this could not fail"
    assert {result.tobytes() for result in results.values()} == {expected[order]}


def test_an_order_that_there_is_not_is_refused() -> None:
    (client,) = (ranks := Ranks(1)).clients
    with pytest.raises(ValueError, match="tree or rank, not 'ring'"):
        client.order = "ring"  # type: ignore[assignment]
    ranks.end([])


def test_rounds_of_many_names_are_under_way_at_once_and_end_in_any_order(aggd: AggdThread) -> None:
    """Gradients come out of a backward pass like this: large and small ones, from two threads, into the same arrays."""
    shapes = [(300_000,), (3,), (70, 100), (0,), (20_000,), (5,)]
    ranks = Ranks(3)
    results: dict[tuple[int, int], bytes] = {}

    def train(rank: int, client: TensorClient, names: range) -> None:
        arrays = {at: np.empty(shapes[at], np.float32) for at in names}
        for round in range(4):
            handles = []
            for at in names:
                arrays[at][...] = deltas(rank, 10 * round + at, shapes[at])
                handles.append((at, client.push(f"g{at}", arrays[at], out=arrays[at])))
            for at, handle in reversed(handles) if rank % 2 else handles:
                assert handle.wait() is arrays[at] and handle.wait() is arrays[at] and handle.done
                results[rank, at] = arrays[at].tobytes()
                expected = added([deltas(each, 10 * round + at, shapes[at]) for each in range(3)], "tree")
                assert results[rank, at] == expected.tobytes(), (rank, at, round)

    def script(rank: int, client: TensorClient) -> None:
        other = threading.Thread(target=train, args=(rank, client, range(3)))
        other.start()
        train(rank, client, range(3, 6))
        other.join()

    ranks.moved(aggd.serve("j1", EPOCH + 1, 3))
    ranks.end(ranks.start(script))
    assert len(results) == 18 and not ranks.lost


def test_a_push_waits_neither_for_the_network_nor_for_other_ranks(aggd: AggdThread) -> None:
    ranks = Ranks(2)
    array = np.ones(1_000_000, np.float32)
    first = ranks.clients[0].push("g", array)  # nobody has named an aggregator
    ranks.moved(aggd.serve("j1", EPOCH + 1, 2))
    until(lambda: ranks.clients[0]._far._at[0]._link is not None)
    small = ranks.clients[0].push("h", np.ones(3, np.float32))
    large = ranks.clients[0].push("i", array)
    assert not first.done and not small.done and not large.done, "rank 1 has not pushed"
    for name in ("i", "g", "h"):
        ranks.clients[1].push_pull(name, np.ones(3, np.float32) if name == "h" else array)
    assert first.wait().tobytes() == large.wait().tobytes() == (array + array).tobytes()
    assert small.wait().tolist() == [2.0, 2.0, 2.0] and first.wait() is first.wait()
    ranks.end([])


def test_a_round_that_nobody_waited_for_is_not_written_over(aggd: AggdThread) -> None:
    ranks = Ranks(1)
    ranks.moved(aggd.serve("j1", EPOCH + 1, 1))
    (client,) = ranks.clients
    handle = client.push("g", np.ones(3, np.float32))
    until(lambda: handle.done)
    with pytest.raises(ValueError, match="'g' has a round that was not waited for"):
        client.push("g", np.ones(3, np.float32))
    assert handle.wait().tolist() == [1, 1, 1]
    assert client.push_pull("g", np.full(3, 2, np.float32)).tolist() == [2, 2, 2]
    ranks.end([])


def test_an_array_that_is_being_sent_again_is_not_given_back(aggd: AggdThread) -> None:
    """Its result may come meanwhile, over a new connection, from an aggregator that fetched it from another rank."""
    ranks = Ranks(1)
    ranks.moved(aggd.serve("j1", EPOCH + 1, 1))
    (client,) = ranks.clients
    handle = client.push("g", np.ones(3, np.float32))
    until(lambda: handle.done)
    with client._far._at[0]._changed:
        client._far._at[0]._repeating = True
    assert not handle.done
    waited = threading.Thread(target=handle.wait)
    waited.start()
    until_blocked(waited, TensorHandle.wait)
    with client._far._at[0]._changed:
        client._far._at[0]._repeating = False
        client._far._at[0]._changed.notify_all()
    waited.join(5.0)
    assert handle.wait().tolist() == [1, 1, 1]
    ranks.end([])


def test_what_is_said_at_once_does_not_overtake_what_was_said_before() -> None:
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    link = TensorLink(f"{host}:{port}")
    link.sock.close()
    link.sock = ours
    said = [bytes([at]) * HEADER_BYTES for at in range(40)]
    with link.lock:  # the link's own thread has the first ones, and cannot send yet
        for at, head in enumerate(said):
            link.say([(head, b"")], at_once=bool(at % 3))
    got = b""
    while len(got) < len(said) * HEADER_BYTES:
        got += theirs.recv(1 << 16)
    assert got == b"".join(said)
    link.close()
    theirs.close()
    listener.close()


@pytest.mark.parametrize(
    ("out", "error", "why"),
    [
        (np.zeros(3), TypeError, "contiguous float32 array, not float64"),
        (np.zeros((3, 2), np.float32)[:, 0], TypeError, "of strides"),
        ([0.0, 0.0, 0.0], TypeError, "not list"),
        (np.zeros(4, np.float32), ValueError, r"has shape \(4,\), not \(3,\)"),
        (np.frombuffer(bytes(12), np.float32), ValueError, "cannot be written"),
    ],
)
def test_an_array_that_cannot_hold_the_result_is_refused_before_anything_is_sent(
    out: np.ndarray, error: type[Exception], why: str
) -> None:
    (client,) = (ranks := Ranks(1)).clients
    with pytest.raises(error, match=why):
        client.push("g", np.ones(3, np.float32), out=out)
    assert not client._far._at[0].rounds.tensors
    ranks.end([])


def test_a_killed_aggregator_is_replaced_in_the_middle_without_changing_a_bit(tmp_path: Path) -> None:
    """Four ranks use three aggregators one after another, which are killed while rounds are under way."""
    shape, rounds = (40_000,), 24
    first = AggdThread(tmp_path, control="a.sock")
    ranks = Ranks(4)
    results: dict[int, np.ndarray] = {}
    reached = [0] * 4

    def script(rank: int, client: TensorClient) -> None:
        client.model("w", np.full(shape, 0.5, np.float32))
        for round in range(rounds):
            results[rank] = client.push_pull("w", deltas(rank, round, shape))
            reached[rank] = round
            client.barrier()

    ranks.moved(first.serve("j1", EPOCH + 1, 4))
    threads = ranks.start(script)
    running = first
    for epoch, wanted in ((2, 5), (3, 13)):
        until(lambda wanted=wanted: max(reached) >= wanted)  # type: ignore[misc]
        running.kill()
        assert not running.failures
        running = AggdThread(tmp_path, control=f"{epoch}.sock")
        ranks.moved(running.serve("j1", EPOCH + epoch, 4))
    ranks.end(threads)
    running.finish()
    for rank in range(4):
        assert results[rank].tobytes() == reference(4, rounds, shape).tobytes()
    assert {epoch for _, epoch, _ in ranks.lost} <= {EPOCH + 1, EPOCH + 2} and ranks.lost


def test_the_same_aggregator_may_come_back_under_a_new_epoch(aggd: AggdThread) -> None:
    ranks = Ranks(2)
    reached = [0, 0]

    def script(rank: int, client: TensorClient) -> None:
        for round in range(1, 60):
            assert client.push_pull("ids", np.array([1 << rank], np.float32))[0] == 3.0
            reached[rank] = round

    ranks.moved(aggd.serve("j1", EPOCH + 1, 2))
    threads = ranks.start(script)
    for epoch in range(2, 6):
        until(lambda epoch=epoch: min(reached) > epoch * 8)  # type: ignore[misc]
        ranks.moved(aggd.serve("j1", EPOCH + epoch, 2))
    ranks.end(threads)


def test_state_is_given_while_the_script_computes(tmp_path: Path) -> None:
    """Rank 0 has its result and computes; rank 1 has not: only rank 0's link thread can help the new aggregator."""
    first, second = AggdThread(tmp_path, control="a.sock"), AggdThread(tmp_path, control="b.sock")
    ranks = Ranks(2)
    both, computing, go_on = threading.Barrier(2), threading.Event(), threading.Event()
    results: dict[int, np.ndarray] = {}

    def script(rank: int, client: TensorClient) -> None:
        client.model("w", np.zeros(4, np.float32))
        both.wait(5)
        if rank == 0:
            results[0] = client.push_pull("w", np.full(4, 1.0, np.float32))
            computing.set()
            assert go_on.wait(10)
        else:
            results[1] = client.push_pull("w", np.full(4, 2.0, np.float32))

    ranks.moved(first.serve("j1", EPOCH + 1, 2))
    threads = ranks.start(script)
    assert computing.wait(10)
    first.kill()
    ranks.clients[1]._far._at[0].rounds.tensors["w"].version = 0  # as if the answer had not reached it
    ranks.moved(second.serve("j1", EPOCH + 2, 2))
    until(lambda: second.now().jobs[0].joined == 2)
    go_on.set()
    ranks.end(threads)
    second.finish()
    assert results[0].tolist() == results[1].tolist() == [3.0] * 4


def test_a_result_is_the_scripts_own_and_writing_to_it_harms_nobody(aggd: AggdThread) -> None:
    ranks = Ranks(2)
    results: dict[int, np.ndarray] = {}

    def script(rank: int, client: TensorClient) -> None:
        w = client.model("w", np.zeros(4, np.float32))
        w += 100
        w = client.push_pull("w", np.ones(4, np.float32))
        w += 100
        results[rank] = client.push_pull("w", np.ones(4, np.float32))

    ranks.moved(aggd.serve("j1", EPOCH + 1, 2))
    ranks.end(ranks.start(script))
    assert results[0].tolist() == results[1].tolist() == [4.0] * 4


def test_ranks_that_declare_different_shapes_are_told_so(aggd: AggdThread) -> None:
    ranks = Ranks(2)
    errors: dict[int, str] = {}

    def script(rank: int, client: TensorClient) -> None:
        try:
            client.push_pull("g", np.zeros(3 + rank, np.float32))
        except TensorError as error:
            errors[rank] = str(error)
            ranks.clients[1 - rank].close()

    ranks.moved(aggd.serve("j1", EPOCH + 1, 2))
    ranks.end(ranks.start(script))
    assert any("another rank declared" in error and "(4,)" in error for error in errors.values())


def test_arrays_that_cannot_be_summed_are_refused_at_once(aggd: AggdThread) -> None:
    ranks = Ranks(1)
    client = ranks.clients[0]
    ranks.moved(aggd.serve("j1", EPOCH + 1, 1))
    with pytest.raises(TypeError, match="astype"):
        client.push_pull("g", np.zeros(3, np.int32))
    client.push_pull("g", np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="another name"):
        client.push_pull("g", np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="length <= 200"):
        client.push_pull("g" * 201, np.zeros(4, np.float32))
    ranks.end([])


def test_a_tensor_that_does_not_fit_is_refused_with_the_setting_to_change(tmp_path: Path) -> None:
    small = AggdThread(tmp_path, memory_bytes_max=1000)
    ranks = Ranks(1)
    ranks.moved(small.serve("j1", EPOCH + 1, 1))
    with pytest.raises(TensorError, match="memory_bytes_max"):
        ranks.clients[0].push_pull("g", np.zeros(1000, np.float32))
    assert ranks.clients[0].push_pull("small", np.ones(3, np.float32)).tolist() == [1, 1, 1]
    ranks.end([])
    small.finish()


def test_a_rank_of_a_run_that_was_taken_back_learns_it_from_the_aggregator(aggd: AggdThread) -> None:
    ranks = Ranks(1)
    at = aggd.serve("j1", EPOCH + 1, 1)
    aggd.serve("j1", 2 * EPOCH + 1, 1)
    ranks.moved(at)
    with pytest.raises(Superseded, match="taken back"):
        ranks.clients[0].push_pull("g", np.zeros(3, np.float32))
    ranks.end([])


def test_a_rank_of_a_run_that_was_taken_back_learns_it_from_its_agent(aggd: AggdThread) -> None:
    ranks = Ranks(1)
    ranks.moved(aggd.serve("j1", EPOCH + 1, 1))
    ranks.clients[0].push_pull("g", np.zeros(3, np.float32))
    ranks.moved(AggregatorAt(JobId("j1"), 2 * EPOCH + 1, HostId("h1"), "127.0.0.1:1", SECRET))
    with pytest.raises(Superseded, match="grant 2"):
        ranks.clients[0].push_pull("g", np.zeros(3, np.float32))
    ranks.end([])


def test_a_job_that_is_no_longer_served_is_reported_and_waits(aggd: AggdThread) -> None:
    ranks = Ranks(1)
    at = aggd.serve("j1", EPOCH + 1, 1)
    ranks.moved(at)
    ranks.clients[0].push_pull("g", np.zeros(3, np.float32))
    aggd.order(DropJob(JobId("j1"), EPOCH + 1))
    until(lambda: (0, EPOCH + 1, "it does not serve this job under this epoch") in ranks.lost)
    ranks.moved(aggd.serve("j1", EPOCH + 2, 1))
    assert ranks.clients[0].push_pull("g", np.ones(3, np.float32)).tolist() == [1, 1, 1]
    ranks.end([])


def test_who_waits_long_says_for_what() -> None:
    said = io.StringIO()
    client = TensorClient(JobId("j1"), 2, 4, lambda epoch, why, table: None, patience_s=0.02, say=said)

    def script() -> None:
        with pytest.raises(TensorError, match="closed"):
            client.push_pull("g", np.zeros(1, np.float32))

    thread = threading.Thread(target=script)
    thread.start()
    until(lambda: said.getvalue().count("\n") >= 2)
    client.close()
    thread.join(5)
    assert "covey: rank 2 of j1 has waited" in said.getvalue()
    assert "tensor 'g': the agent has not assigned an aggregator yet" in said.getvalue()


def test_lower_and_equal_epochs_are_no_news(aggd: AggdThread) -> None:
    ranks = Ranks(1)
    ranks.moved(aggd.serve("j1", EPOCH + 5, 1))
    for epoch in (EPOCH + 5, EPOCH + 4):
        ranks.moved(AggregatorAt(JobId("j1"), epoch, HostId("h9"), "127.0.0.1:1", SECRET))
    assert ranks.clients[0].push_pull("g", np.ones(1, np.float32)).tolist() == [1]
    ranks.end([])
    assert not ranks.lost


def hostile(answers: bytes) -> tuple[AggregatorAt, socket.socket]:
    """A listener that sends `answers` to each connection, and its address for ranks."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                peer.recv(56)
                peer.sendall(answers)

    threading.Thread(target=serve, daemon=True).start()
    host, port = listener.getsockname()
    return AggregatorAt(JobId("j1"), EPOCH + 1, HostId("h1"), f"{host}:{port}", SECRET), listener


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (b"\xff" * 40, "version 255"),
        (b"".join(frame(TensorOp.PONG, job_hash(JobId("j1")), EPOCH + 1)), "answered PONG to our hello"),
        (b"".join(frame(TensorOp.WELCOME, job_hash(JobId("j2")), EPOCH + 1)), "a frame of job"),
        (frame(TensorOp.WELCOME, job_hash(JobId("j1")), EPOCH + 1)[0][:-1] + b"\0", "checksum"),
        (frame(TensorOp.HELLO, job_hash(JobId("j1")), EPOCH + 1)[0], "does not send HELLO"),
        (b"", "closed the connection"),
    ],
)
def test_an_aggregator_that_talks_nonsense_is_reported_and_never_believed(answers: bytes, why: str) -> None:
    at, listener = hostile(answers)
    ranks = Ranks(1)
    ranks.moved(at)
    until(lambda: bool(ranks.lost))
    assert why in ranks.lost[0][2]
    ranks.end([])
    listener.close()


def test_no_rank_leaves_before_all_have_what_they_need(aggd: AggdThread) -> None:
    ranks = Ranks(2)
    left: dict[int, bool] = {}
    computing = threading.Event()

    def script(rank: int, client: TensorClient) -> None:
        client.push_pull("g", np.ones(1, np.float32))
        if rank == 1:
            assert computing.wait(10)
        left[rank] = client.leave()

    ranks.moved(aggd.serve("j1", EPOCH + 1, 2))
    threads = ranks.start(script)
    until(lambda: "covey/leave" in ranks.clients[0]._far._at[0].rounds.tensors)
    assert not left
    computing.set()
    ranks.end(threads)
    assert left == {0: True, 1: True}


def test_a_rank_that_waits_in_vain_for_the_others_to_finish_leaves_in_the_end(aggd: AggdThread) -> None:
    ranks = Ranks(2)
    ranks.moved(aggd.serve("j1", EPOCH + 1, 2))
    assert not ranks.clients[0].leave(linger_s=0.05)
    ranks.end([])


def test_an_aggregator_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.tensors.aggregator.link.SILENT_S", 0.02)
    monkeypatch.setattr("covey.tensors.aggregator.link.DEAD_S", 0.1)
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    ranks = Ranks(1)
    ranks.moved(AggregatorAt(JobId("j1"), EPOCH + 1, HostId("h1"), f"{host}:{port}", SECRET))
    until(lambda: bool(ranks.lost))
    assert "was silent" in ranks.lost[0][2]
    ranks.end([])
    listener.close()


def test_sums_that_are_not_finite_are_counted_and_the_first_is_logged(aggd: AggdThread) -> None:
    ranks = Ranks(2)
    ranks.moved(aggd.serve("j1", EPOCH, 2))

    def script(rank: int, client: TensorClient) -> None:
        for number in (1, np.inf, np.inf):
            given = np.full(5, number if rank else -number, np.float32)
            assert np.isnan(client.push_pull("g", given)).all() == np.isinf(number)

    ranks.end(ranks.start(script))
    assert [job.not_finite for job in aggd.now().jobs] == [10]
    (warning,) = [words for words in aggd.log.warnings if "not finite" in words]
    assert "'g'" in warning and "2" in warning
