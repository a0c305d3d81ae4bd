"""Rounds in shared memory: threads as ranks, one memory; where a rank cannot, all of them go to a real aggd."""

import contextlib
import io
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.ids import JobId
from covey.job.tensors import TensorClient, TensorError
from covey.tensors.aggregator.block_rounds import CutTensor
from covey.tensors.aggregator.rounds import Superseded
from covey.tensors.numbers import additions
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.sum_order import ORDERS, Order
from covey.tensors.numbers.tensor_wire import Declared
from covey.tensors.same_host import layout as tensor_layout
from covey.tensors.same_host import memory as tensor_memory
from covey.tensors.same_host.memory import TensorMemory
from covey.tensors.same_host.shared_rounds import SharedRounds, SharedTensor
from tests.covey.played_ranks import PlayedRanks
from tests.families import examples
from tests.plugins.aggregator.harness import Tensor, contribution, initial, reference
from tests.plugins.aggregator.loopback import AggdThread
from tests.quiet import until_blocked

EPOCH = 1 << 32


class SharingRanks(PlayedRanks):
    """The clients of one job, and the memory that they share."""

    def __init__(self, ranks: int, order: Order = "tree", patience_s: float = 30.0) -> None:
        self.said = [io.StringIO() for _ in range(ranks)]
        clients = [
            TensorClient(
                JobId("j1"),
                rank,
                ranks,
                lambda epoch, why, table: None,
                undecided=True,
                patience_s=patience_s,
                say=said,
            )
            for rank, said in enumerate(self.said)
        ]
        super().__init__(clients)
        for client in self.clients:
            client.order = order
        self.descriptor = tensor_layout.make(ranks)

    def memory(self, rank: int) -> TensorMemory:
        return TensorMemory(os.dup(self.descriptor), rank, len(self.clients))

    def share(self) -> None:
        for rank, client in enumerate(self.clients):
            client.memory_is(self.memory(rank))

    def close(self) -> None:
        for client in self.clients:
            client.close()


@pytest.fixture
def aggd(tmp_path: Path) -> Iterator[AggdThread]:
    running = AggdThread(tmp_path)
    yield running
    running.finish()


@settings(max_examples=examples(30), deadline=None)
@given(
    ranks=st.integers(1, 7),
    order=st.sampled_from(ORDERS),
    kind=st.sampled_from(("grad", "model")),
    size=st.sampled_from((0, 1, 3, 1000, 16384, 16385, 70_001, 200_003)),
    seed=st.integers(0, 1000),
)
def test_a_round_has_the_bits_that_one_process_would_get(
    ranks: int, order: Order, kind: str, size: int, seed: int
) -> None:
    tensor = Tensor(f"t{seed}", "model" if kind == "model" else "grad", (size,))
    wanted = reference(tensor, ranks, 4, order)
    shared = SharingRanks(ranks, order)
    shared.share()

    def script(rank: int, client: TensorClient) -> None:
        rng = random.Random(seed + rank)
        if tensor.kind == "model":
            assert client.model(tensor.name, initial(tensor, rank)).tobytes() == initial(tensor, 0).tobytes()
        for round, result in enumerate(wanted, 1):
            time.sleep(rng.choice((0.0, 0.0, 0.001)))
            array = contribution(tensor, rank, round)
            out = array if rng.random() < 0.5 else None
            assert client.push_pull(tensor.name, array, out=out).tobytes() == result.tobytes()
        assert client.leave()
        way = client._ways[tensor.name]
        assert way is not None
        way.check()

    shared.play(script)
    assert not any(said.getvalue() for said in shared.said)


def test_names_may_be_waited_for_in_any_order() -> None:
    """Each rank begins and ends its rounds in an order of its own, from two threads."""
    names = [f"t{n}" for n in range(6)]
    shared = SharingRanks(3)
    shared.share()

    def half(rank: int, client: TensorClient, mine: list[str], size: int) -> None:
        rng = random.Random(rank)
        for round in range(1, 20):
            handles = {}
            for name in rng.sample(mine, len(mine)):
                handles[name] = client.push(name, contribution(Tensor(name, "grad", (size,)), rank, round))
            for name in rng.sample(mine, len(mine)):
                wanted = reference(Tensor(name, "grad", (size,)), 3, round)[-1]
                assert handles[name].wait().tobytes() == wanted.tobytes()

    def script(rank: int, client: TensorClient) -> None:
        other = threading.Thread(target=half, args=(rank, client, names[:3], 20_000))
        other.start()
        half(rank, client, names[3:], 500)
        other.join()

    shared.play(script)


def test_a_rank_that_computes_holds_nobody_up() -> None:
    """The rank pushed y, then x, and waits for neither: its thread adds its parts of both."""
    shared, computing = SharingRanks(2), threading.Event()
    shared.share()
    array = np.ones(100_000, np.float32)

    def script(rank: int, client: TensorClient) -> None:
        if rank == 0:
            assert client.push_pull("x", array)[0] == 2
            assert client.push_pull("y", array)[0] == 2
            computing.set()
        else:
            handles = [client.push("y", array), client.push("x", array)]
            assert computing.wait(10)
            assert all(handle.wait()[0] == 2 for handle in handles)

    shared.play(script)


def test_a_push_does_not_wait_and_its_handle_says_when_it_is_done() -> None:
    shared = SharingRanks(2)
    shared.share()
    first = shared.clients[0].push("g", np.ones(5, np.float32))
    assert not first.done
    with pytest.raises(ValueError, match="has a round that was not waited for"):
        shared.clients[0].push("g", np.ones(5, np.float32))
    second = shared.clients[1].push("g", np.ones(5, np.float32))
    assert second.done and first.done
    assert first.wait().tolist() == second.wait().tolist() == [2.0] * 5
    assert first.wait() is first.wait()
    shared.close()


def test_where_there_is_no_memory_all_go_over_tcp_and_say_so(aggd: AggdThread, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharingRanks(3)
    shared.share()
    at = aggd.serve("j1", EPOCH + 1, 3)
    for client in shared.clients:
        client.moved(at)
    array = np.arange(100_000, dtype=np.float32)

    def script(rank: int, client: TensorClient) -> None:
        for _ in range(3):
            assert client.push_pull("small", array[:10]).tolist() == (3 * array[:10]).tolist()
            assert client.push_pull("large", array).tobytes() == (3 * array).tobytes()

    small = 12 * tensor_layout.PAGE_BYTES
    monkeypatch.setattr(tensor_memory, "available_bytes", lambda: small / tensor_memory.FREE_SHARE)
    shared.play(script)
    assert aggd.now().jobs[0].tensors == 1
    for said in shared.said:
        assert "pushes tensor 'large' over TCP" in said.getvalue() and "small" not in said.getvalue()


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_cannot_share_takes_all_to_tcp(aggd: AggdThread, late: bool) -> None:
    """The others may have begun a round already, one of them without waiting for it."""
    shared = SharingRanks(3)
    at = aggd.serve("j1", EPOCH + 1, 3)
    for rank, client in enumerate(shared.clients):
        client.moved(at)
        if rank < 2:
            client.memory_is(shared.memory(rank))

    def refuse() -> None:
        for client in shared.clients[:2]:
            client.memory_is(None, "rank 2 runs in a container of its own")
        shared.clients[2].memory_is(None, "it runs in a container of its own")

    if not late:
        refuse()
    array, pushed, refused = np.ones(50_000, np.float32), threading.Event(), threading.Event()
    waits: list[threading.Thread] = []

    def script(rank: int, client: TensorClient) -> None:
        if rank == 2:
            assert pushed.wait(20)
            while not waits:
                time.sleep(0.001)
            if late:
                until_blocked(waits[0], TensorClient.push_pull)
                refuse()
            refused.set()
        if rank == 1:
            handle = client.push("x", array)
            pushed.set()
            assert refused.wait(20)
            assert handle.wait()[0] == 3
        elif rank == 0:
            waits.append(threading.current_thread())
            assert client.push_pull("x", array)[0] == 3
        else:
            assert client.push_pull("x", array)[0] == 3
        assert client.model("m", np.full(3, float(rank), np.float32)).tolist() == [0.0] * 3

    shared.play(script)
    assert all("uses no memory that ranks share" in said.getvalue() for said in shared.said)
    assert aggd.now().jobs[0].tensors == 2


def test_ranks_that_mean_different_tensors_are_told() -> None:
    shared = SharingRanks(2)
    shared.share()

    def script(rank: int, client: TensorClient) -> None:
        with pytest.raises(
            TensorError, match=r"'g': rank . declares grad 'g'.*shape \(., .\).*grad 'g'.*shape \(., .\)"
        ):
            client.push_pull("g", np.ones((2, 3) if rank else (3, 2), np.float32))
        assert client.push_pull("h", np.ones(2, np.float32)).tolist() == [2.0, 2.0]

    shared.play(script)


def test_a_page_that_was_overwritten_is_an_error_of_that_tensor() -> None:
    shared = SharingRanks(2)
    shared.share()
    client = shared.clients[0]
    handle = client.push("g", np.ones(100_000, np.float32))
    way = client._ways["g"]
    assert way is not None
    way._words[1, 0] = 77
    with pytest.raises(TensorError, match="'g': the memory it shares says rank 1 is in round 77, and this is 1"):
        handle.wait()
    shared.close()


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 1 << 30), count=st.integers(1, 200))
def test_garbage_in_the_memory_is_refused_or_told(seed: int, count: int) -> None:
    """Words of head, directory and a tensor's head are overwritten: a rank gets an error or its sum."""
    rng = random.Random(seed)
    shared = SharingRanks(2)
    shared.share()
    for client in shared.clients:
        client.memory_is(None)
    shared.clients[0].push("known", np.ones(100, np.float32))
    begins = [8, tensor_layout.directory_at(2), tensor_layout.tensors_at(2)]
    for _ in range(count):
        os.pwrite(shared.descriptor, rng.randbytes(rng.choice((1, 4, 8))), rng.choice(begins) + rng.randrange(0, 64))
    rank, far = shared.clients[1], []

    def declare(declared: Declared, *given: object) -> None:
        far.append(declared.name)
        rank._far.known[declared.name] = CutTensor(declared, (), ())

    rank._far.declare = declare  # type: ignore[assignment,method-assign]
    rank._far.push = lambda *given: None  # type: ignore[method-assign]
    for name in ("known", "new"):
        try:
            handle = rank.push(name, np.ones(100, np.float32))
        except TensorError:
            continue
        if name not in far:
            rank._far.fatal = Superseded("over")
            with contextlib.suppress(TensorError, Superseded):
                assert handle.wait().tolist() == [2.0] * 100
            rank._far.fatal = None
    shared.close()


def test_who_waits_says_for_whom_and_ends_at_once_when_it_is_over() -> None:
    shared = SharingRanks(3, patience_s=0.2)
    shared.share()
    shared.clients[1].push("g", np.ones(4, np.float32))

    def script(rank: int, client: TensorClient) -> None:
        if rank == 0:
            client.push_pull("g", np.ones(4, np.float32))

    threads = shared.start(script)
    end_s = time.monotonic() + 10
    while "rank 2 has not pushed this round yet" not in shared.said[0].getvalue():
        assert time.monotonic() < end_s, shared.said[0].getvalue()
        time.sleep(0.02)
    shared.close()
    threads[0].join(5)
    assert not threads[0].is_alive()
    assert isinstance(shared.failed[0][1], TensorError)


def test_nothing_is_pushed_before_the_agent_has_spoken() -> None:
    shared, pushed = SharingRanks(2, patience_s=0.2), threading.Event()

    def script(rank: int, client: TensorClient) -> None:
        client.push_pull("g", np.ones(4, np.float32))
        pushed.set()

    threads = shared.start(script)
    end_s = time.monotonic() + 10
    while not all("the agent has not said yet whether the ranks share" in said.getvalue() for said in shared.said):
        assert time.monotonic() < end_s, [said.getvalue() for said in shared.said]
        time.sleep(0.02)
    assert not pushed.is_set()
    shared.share()
    shared.end(threads)


def test_memory_for_another_number_of_ranks_or_of_another_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="is for 3 ranks from rank 0 on, not for rank 0 of 2"):
        TensorMemory(tensor_layout.make(3), 0, 2)
    for rank in (1, 4):
        with pytest.raises(ValueError, match=f"is for 2 ranks from rank 2 on, not for rank {rank} of 6"):
            TensorMemory(tensor_layout.make(2, 2), rank, 6)
    monkeypatch.setattr(tensor_layout, "VERSION", 2)
    other = tensor_layout.make(2)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has version 2, not 1"):
        TensorMemory(other, 0, 2)
    plain = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    with pytest.raises(ValueError, match="not sealed memory"):
        TensorMemory(plain, 0, 2)


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_refusal_while_a_rank_joins_a_tensor_takes_all_the_same_way(
    aggd: AggdThread, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has mapped the tensor and not pushed yet; rank 0 has, and hears that another process cannot share."""
    shared = SharingRanks(2)
    shared.share()
    at = aggd.serve("j1", EPOCH + 1, 2)
    for client in shared.clients:
        client.moved(at)
    begin = SharedTensor.begin

    def late(tensor: SharedTensor, *given: Any) -> None:
        if tensor._rank == 1:
            time.sleep(0.5)
        begin(tensor, *given)

    monkeypatch.setattr(SharedTensor, "begin", late)

    def script(rank: int, client: TensorClient) -> None:
        for _ in range(3):
            assert client.push_pull("g", np.ones(size, np.float32))[0] == 2

    threads = shared.start(script)
    time.sleep(0.25)
    for client in shared.clients:
        client.memory_is(None, "another process of rank 1 cannot map it")
    shared.end(threads)
    assert [client._ways["g"] for client in shared.clients] == [None, None]


def test_a_wait_that_was_interrupted_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt is in the middle of this rank's part of a model: nothing is added twice."""
    shared = SharingRanks(1)
    shared.share()
    (client,) = shared.clients
    client.model("w", np.zeros(400_000, np.float32))
    monkeypatch.setattr(SharedRounds, "_run", lambda self: None)
    handle, spare, calls = client.push("w", np.ones(400_000, np.float32)), additions._spare, list[int]()

    def interrupted(tree: object, wide: np.dtype[np.float32]) -> list[Array]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return spare(tree, wide)

    monkeypatch.setattr(additions, "_spare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert set(handle.wait().tolist()) == {1.0}
    shared.close()


def test_no_round_begins_before_the_result_of_the_last_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot of the last round may still be read."""
    shared = SharingRanks(2)
    shared.share()
    client, array = shared.clients[0], np.ones(50_000, np.float32)

    def interrupted(bells: object, length_ns: int = 0) -> None:
        raise KeyboardInterrupt

    assert client._shared is not None
    monkeypatch.setattr(client._shared.memory, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.push_pull("g", array)
    with pytest.raises(ValueError, match="'g' is still in round 1"):
        client.push_pull("g", array)
    shared.close()


def test_who_cannot_go_to_an_aggregator_either_is_told_and_does_not_spin() -> None:
    shared = SharingRanks(2)
    shared.share()
    client = shared.clients[0]
    handle = client.push("g", np.ones(5, np.float32))
    client._far._failed(Superseded("this run is over"))
    for each in shared.clients:
        each.memory_is(None, "no")
    with pytest.raises(Superseded):
        handle.wait()
    shared.close()


def test_a_rank_that_never_heard_of_memory_leaves_in_time() -> None:
    client = TensorClient(JobId("j1"), 0, 2, lambda epoch, why, table: None, undecided=True)
    assert not client.leave(0.2)
    client.close()


def test_two_names_with_one_key_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_memory, "key_of", lambda name: 7)
    shared = SharingRanks(1)
    shared.share()
    (client,) = shared.clients
    assert client.push_pull("a", np.ones(3, np.float32)).tolist() == [1.0] * 3
    with pytest.raises(TensorError, match="give it another name: 'a' has the same key"):
        client.push_pull("b", np.ones(3, np.float32))
    assert client.push_pull("a", np.ones(3, np.float32)).tolist() == [1.0] * 3
    shared.close()


def test_tensors_take_no_descriptors_and_a_closed_client_keeps_none() -> None:
    before = len(os.listdir("/proc/self/fd"))
    shared = SharingRanks(1)
    shared.share()
    (client,) = shared.clients
    client.push_pull("first", np.ones(3, np.float32))
    there = len(os.listdir("/proc/self/fd"))
    for at in range(50):
        client.push_pull(f"t{at}", np.ones(3, np.float32))
    assert len(os.listdir("/proc/self/fd")) == there
    shared.close()
    os.close(shared.descriptor)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_tensor_more_takes_as_long_as_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks join under one lock: a look at all names for each new one takes seconds where a model has a thousand."""
    looks: list[int] = []
    told: list[tuple[int, int]] = []
    entry = TensorMemory._entry

    def counted(memory: TensorMemory, place: int) -> tuple[int, int, int]:
        looks.append(place)
        return entry(memory, place)

    monkeypatch.setattr(TensorMemory, "_entry", counted)
    shared = SharingRanks(1)
    (client,) = shared.clients
    client._tell_shared = lambda largest, total: told.append((largest, total))
    shared.share()
    each = []
    for at in range(60):
        before = len(looks)
        client.push_pull(f"t{at}", np.ones(8 * (60 - at), np.float32))
        each.append(len(looks) - before)
    assert max(each[1:]) <= each[1]
    assert told[-1] == (32 * 60, 32 * sum(range(1, 61)))
    shared.close()


PROCESS = """
import os, sys
import numpy as np
from covey.core.ids import JobId
from covey.tensors.numbers.arrays import Array
from covey.tensors.same_host.memory import TensorMemory
from covey.job.tensors import TensorClient
rank, ranks, memory, count = map(int, sys.argv[1:])
client = TensorClient(JobId("j1"), rank, ranks, lambda epoch, why, table: None, undecided=True)
client.memory_is(TensorMemory(memory, rank, ranks))
client.barrier()
names = [(rank * count // ranks + at) % count for at in range(count)]
handles = {name: client.push(f"t{name}", np.full(3000, 1000.0 * (name + 1) + rank, np.float32)) for name in names}
for name, handle in handles.items():
    assert (handle.wait() == ranks * 1000.0 * (name + 1) + sum(range(ranks))).all(), name
assert client.leave()
client.close()
"""


def test_processes_that_begin_tensors_in_any_order_get_places_of_their_own() -> None:
    """Real processes are needed: threads would keep one another from the directory by locks of Python. A POSIX lock
    would not work, since it is gone when any mapping of the file is."""
    memory, ranks = tensor_layout.make(4), 4
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), str(ranks), str(memory), "100"],
            pass_fds=(memory,),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    os.close(memory)
    ended = [each.communicate(timeout=60)[1] for each in started]
    assert [each.returncode for each in started] == [0] * ranks, ended
