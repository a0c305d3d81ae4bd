"""Rounds of a job on several hosts, whose ranks add in shared memory first: threads as ranks, a memory for each host,
real aggregators."""

import contextlib
import io
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from covey.core.ids import HostId, JobId
from covey.job.tensors import TensorClient, TensorError
from covey.tensors.aggregator.aggregator_rounds import AggregatorRounds
from covey.tensors.aggregator.host_rounds import HostTensor
from covey.tensors.aggregator.rounds import Superseded
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.blocks import table_id
from covey.tensors.numbers.sum_order import ORDERS, Order
from covey.tensors.numbers.tensor_wire import TYPES, Type
from covey.tensors.numbers.types import NUMBERS
from covey.tensors.same_host import layout as tensor_layout
from covey.tensors.same_host.memory import TensorMemory, TensorRange
from covey.tensors.same_host.shared_rounds import SharedRounds
from covey.wire.job import AggregatorAt
from covey.wire.sums import JobCounters, Serve
from tests.covey.played_ranks import PlayedRanks, Script
from tests.families import in_gate
from tests.plugins.aggregator.harness import Tensor, contribution, initial, rate_in, reference
from tests.plugins.aggregator.loopback import SECRET, AggdThread

JOB = JobId("j1")
GRANT = 1 << 32


class Gang(PlayedRanks):
    """A job's clients, rank by rank on its hosts, one table for each host, and aggregators that threads run."""

    def __init__(
        self, folder: Path, hosts: Sequence[int], order: Order = "tree", tables: int = 0, lanes: int = 1
    ) -> None:
        """`hosts`: number of ranks on each host; `lanes`: number of lanes of each aggregator."""
        self.lanes = lanes
        self.folder, self.ranks, self.tables = folder, sum(hosts), tables or len(hosts)
        self.said = [io.StringIO() for _ in range(self.ranks)]
        self.lost: list[tuple[int, str, int]] = []
        clients = [
            TensorClient(
                JOB,
                rank,
                self.ranks,
                lambda epoch, why, table: self.lost.append((epoch, why, table)),
                tables=self.tables,
                undecided=True,
                say=said,
            )
            for rank, said in enumerate(self.said)
        ]
        super().__init__(clients)
        self.members: list[range] = []
        self.memories: list[int] = []
        for ranks in hosts:
            first = self.members[-1].stop if self.members else 0
            self.members.append(range(first, first + ranks))
            self.memories.append(tensor_layout.make(ranks, first))
        for client in self.clients:
            client.order = order
        self.owners: list[AggdThread] = []
        self.epoch = GRANT

    def share(self, but: Sequence[int] = ()) -> None:
        """Give the memory of their host to all ranks but these."""
        for ranks, descriptor in zip(self.members, self.memories, strict=True):
            for rank in ranks:
                if rank in but:
                    tensor_layout.refuse(descriptor)
                    self.clients[rank].memory_is(None, "not to be")
                else:
                    self.clients[rank].memory_is(TensorMemory(os.dup(descriptor), rank, self.ranks))

    def serve(self) -> list[AggdThread]:
        """New owners of all tables; every rank is told."""
        self.epoch += 1
        owners = []
        for table in range(self.tables):
            folder = self.folder / f"{self.epoch - GRANT}.{table}"
            folder.mkdir()
            owner = AggdThread(folder, lanes=self.lanes)
            owner.order(Serve(table_id(JOB, table), self.epoch, self.ranks, SECRET))
            owners.append(owner)
        for client in self.clients:
            for table, owner in enumerate(owners):
                client.moved(AggregatorAt(JOB, self.epoch, HostId(f"h{table}"), owner.now().address, SECRET, table))
        self.owners += owners
        return owners

    def replace_owners(self) -> None:
        for owner in self.owners:
            owner.finish()
        self.owners.clear()
        self.serve()

    def jobs(self) -> list[JobCounters]:
        return [job for owner in self.owners for job in owner.now().jobs]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for owner in self.owners:
            owner.finish()
        for descriptor in self.memories:
            os.close(descriptor)


@contextlib.contextmanager
def gang(folder: Path, *hosts: int, order: Order = "tree", tables: int = 0, lanes: int = 1) -> Iterator[Gang]:
    made = Gang(folder, hosts, order, tables, lanes)
    try:
        yield made
    finally:
        made.close()


def check(tensors: Sequence[Tensor], ranks: int, rounds: int, order: Order = "tree") -> Script:
    """All rounds of these tensors, each begun by all ranks before it is waited for, with the bits of one process."""
    wanted = {tensor: reference(tensor, ranks, rounds, order) for tensor in tensors}

    def script(rank: int, client: TensorClient) -> None:
        rng = random.Random(rank)
        for tensor in tensors:
            if tensor.kind == "model":
                first = client.model(tensor.name, initial(tensor, rank), update=tensor.update, type=tensor.type)
                assert first.tobytes() == initial(tensor, 0).tobytes()
        for round in range(1, rounds + 1):
            time.sleep(rng.choice((0, 0, 0.002)))
            begun = {
                tensor: client.push(
                    tensor.name,
                    contribution(tensor, rank, round),
                    rate=rate_in(round) if tensor.update else None,
                    type=tensor.type,
                )
                for tensor in tensors
            }
            for tensor, handle in begun.items():
                assert handle.wait().tobytes() == wanted[tensor][round - 1].tobytes(), (tensor.name, rank, round)

    return script


TENSORS = (Tensor("w", "model", (70_001,)), Tensor("g", "grad", (300, 1000)), Tensor("b", "grad", (7,)))


@pytest.mark.parametrize("hosts", in_gate(2, [((2, 2),), ((3, 1, 2),), ((1, 4),), ((2, 2, 2, 2),), ((5, 3),)]))
@pytest.mark.parametrize("order", ORDERS)
def test_hosts_add_first_and_the_bits_are_those_of_one_process(
    tmp_path: Path, hosts: tuple[int, ...], order: Order
) -> None:
    with gang(tmp_path, *hosts, order=order) as job:
        job.serve()
        job.share()
        job.play(check(TENSORS, sum(hosts), 4, order))


def test_a_host_sends_and_gets_each_block_once_a_round(tmp_path: Path) -> None:
    size = 4 * 400_000
    with gang(tmp_path, 4, 4) as job:
        job.serve()
        job.share()
        job.play(check((Tensor("g", "grad", (400_000,)),), 8, 3))
        jobs = job.jobs()
    assert [each.received_bytes for each in jobs] == [3 * size, 3 * size]  # half of it from each host, and two tables
    assert [each.sent_bytes for each in jobs] == [3 * size, 3 * size]


def test_owners_that_are_replaced_in_the_middle_lose_no_round(tmp_path: Path) -> None:
    with gang(tmp_path, 2, 3) as job:
        job.serve()
        job.share()
        threads = job.start(check(TENSORS, 5, 40))
        for _ in range(3):
            time.sleep(0.1)
            job.replace_owners()
        job.end(threads)
        assert sum(each.rounds for each in job.jobs()) > 0


@pytest.mark.parametrize("refuses", [0, 1, 3])
def test_a_host_where_a_rank_cannot_share_pushes_rank_by_rank(tmp_path: Path, refuses: int) -> None:
    with gang(tmp_path, 2, 3) as job:
        job.serve()
        job.share(but=(refuses,))
        job.play(check(TENSORS, 5, 3))
        assert job.clients[refuses]._ways["g"] is None
        other = 4 if refuses < 2 else 0
        assert job.clients[other]._ways["g"] is not None


def test_who_cannot_share_after_others_began_takes_its_host_along(tmp_path: Path) -> None:
    with gang(tmp_path, 2, 2) as job:
        job.serve()
        for rank in (0, 1, 2):
            descriptor = job.memories[rank // 2]
            job.clients[rank].memory_is(TensorMemory(os.dup(descriptor), rank, 4))
        threads = job.start(check(TENSORS[1:], 4, 3))
        time.sleep(0.2)
        job.clients[3].memory_is(None, "its processor cannot")
        job.clients[2].memory_is(None, "its processor cannot")
        job.end(threads)
        assert job.clients[2]._ways["g"] is None and job.clients[0]._ways["g"] is not None


def test_every_rank_of_a_host_hears_that_another_host_means_another_tensor(tmp_path: Path) -> None:
    heard: dict[int, str] = {}

    def script(rank: int, client: TensorClient) -> None:
        with pytest.raises(TensorError) as refused:
            client.push_pull("g", np.zeros(100 + rank // 2, np.float32))
        heard[rank] = str(refused.value)

    with gang(tmp_path, 2, 2) as job:
        (first, _) = job.serve()
        job.share()
        threads = [threading.Thread(target=script, args=(rank, job.clients[rank])) for rank in range(4)]
        for thread in threads[:2]:
            thread.start()
        while not first.now().jobs[0].tensors:
            time.sleep(0.01)
        for thread in threads[2:]:
            thread.start()
        for thread in threads[2:]:
            thread.join(20)
        assert sorted(heard) == [2, 3]
        assert heard[2] == heard[3] and "(101,)" in heard[2] and "(100,)" in heard[2]
        for client in job.clients[:2]:
            client.close()
        for thread in threads[:2]:
            thread.join(20)


def test_a_refusal_that_nobody_waits_for_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time a refusal is announced all ranks of the host wake up, also the one that announces it."""
    said: list[str] = []
    say_fault = TensorRange.say_fault

    def counted(self: TensorRange, why: str, in_vain: bool = False) -> None:
        said.append(why)
        say_fault(self, why, in_vain)

    looks: Counter[int] = Counter()
    own_part = HostTensor._own_part

    def looked(self: HostTensor) -> bool:
        found = own_part(self)
        if said:
            looks[self._rank] += 1
        return found

    monkeypatch.setattr(TensorRange, "say_fault", counted)
    monkeypatch.setattr(HostTensor, "_own_part", looked)
    with gang(tmp_path, 2, 2) as job:
        (first, _) = job.serve()
        job.share()
        for client in job.clients[:2]:
            client.push("g", np.zeros(100, np.float32))
        while not first.now().jobs[0].tensors:
            time.sleep(0.01)
        for client in job.clients[2:]:
            client.push("g", np.zeros(101, np.float32))
        end_s = time.monotonic() + 20
        while not said and time.monotonic() < end_s:
            time.sleep(0.01)
        shared = job.clients[2]._shared
        assert shared is not None
        while len(looks) < 2 or sum(looks.values()) < 4:
            assert time.monotonic() < end_s, f"{said}, and ranks looked {looks}"
            shared.memory.ring()  # as whoever else has something to say to the ranks of this host
            time.sleep(0.01)
        assert len(said) == 1 and "(101,)" in said[0]


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("type", TYPES)
def test_every_type_has_the_bits_that_ranks_get_who_push_alone(tmp_path: Path, type: Type, mean: bool) -> None:
    """Sums of 16-bit numbers are sent as float32, and rounded once."""
    bits = NUMBERS[type].stored
    found: list[dict[int, bytes]] = []
    for shared in (True, False):
        results: dict[int, bytes] = {}

        def script(rank: int, client: TensorClient, results: dict[int, bytes] = results) -> None:
            wide = np.random.default_rng(rank).standard_normal(150_001).astype(NUMBERS[type].wide)
            for _ in range(2):
                given = NUMBERS[type].narrow(wide).astype(bits)
                named: Type | None = "bfloat16" if type == "bfloat16" else None
                results[rank] = client.push_pull("g", given, mean=mean, type=named).tobytes()

        folder = tmp_path / str(shared)
        folder.mkdir()
        with gang(folder, 3, 2) as job:
            job.serve()
            job.share(but=() if shared else range(5))
            job.play(script)
        found.append(results)
    assert found[0] == found[1] and len(set(found[0].values())) == 1


def test_a_run_that_was_taken_back_ends_every_rank_that_waits(tmp_path: Path) -> None:
    ended: list[int] = []

    def script(rank: int, client: TensorClient) -> None:
        with pytest.raises(Superseded):
            client.push_pull("g", np.zeros(50_000, np.float32))
        ended.append(rank)

    with gang(tmp_path, 2, 2) as job:
        job.serve()
        job.share()
        threads = [threading.Thread(target=script, args=(rank, job.clients[rank])) for rank in (0, 1, 2)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        for client in job.clients:
            client.moved(AggregatorAt(JOB, 2 * GRANT + 1, HostId("h9"), "", SECRET))
        for thread in threads:
            thread.join(20)
        assert sorted(ended) == [0, 1, 2]
        assert not job.failed


def test_who_waits_is_told_for_whom(tmp_path: Path) -> None:
    with gang(tmp_path, 2, 2) as job:
        job.share()
        handles = [client.push("g", np.zeros(3, np.float32)) for client in job.clients[:1]]
        assert job.clients[0].why("g") == "rank 1 has not pushed this round yet"
        handles.append(job.clients[1].push("g", np.zeros(3, np.float32)))
        end_s = time.monotonic() + 10
        whys: set[str] = set()
        while time.monotonic() < end_s and len(whys) < 2:
            whys = {client.why("g") for client in job.clients[:2]}
        assert any("the agent has not assigned an aggregator yet" in why for why in whys)
        assert any("of this host waits for the sum of all hosts" in why for why in whys)
        assert not any(handle.done for handle in handles)


@pytest.mark.parametrize("kind", ["grad", "model"])
def test_who_was_interrupted_while_it_spoke_goes_on(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt is in the middle of the rank's Blocks: none is declared or pushed twice. Threads of clients are
    off, since an interrupt strikes a script's own thread."""
    push, calls = AggregatorRounds.push, list[str]()

    def interrupted(self: AggregatorRounds, label: str, *sums: Array, blocks: bool, rate: float) -> None:
        push(self, label, *sums, blocks=blocks, rate=rate)
        calls.append(label)
        if len(calls) in (2, 5):
            raise KeyboardInterrupt

    tensor = Tensor("w", "model" if kind == "model" else "grad", (600_000,))
    wanted = [array.tobytes() for array in reference(tensor, 4, 2)]
    with gang(tmp_path, 2, 2) as job:
        monkeypatch.setattr(SharedRounds, "_run", lambda self: None)
        job.serve()
        job.share()

        def script(rank: int, client: TensorClient) -> None:
            if tensor.kind == "model":
                client.model("w", initial(tensor, rank))
            for round in (1, 2):
                handle = client.push("w", contribution(tensor, rank, round))
                for _ in range(3):
                    with contextlib.suppress(KeyboardInterrupt):
                        assert handle.wait().tobytes() == wanted[round - 1]
                        break

        monkeypatch.setattr(AggregatorRounds, "push", interrupted)
        job.play(script)
        assert set(Counter(calls).values()) == {4}, "each Block once in each round, by each host"
