"""An owner hands a job over to another one while its ranks train: threads as ranks, two real aggregators."""

import io
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from covey.core.ids import HostId, JobId
from covey.job.tensors import TensorClient
from covey.tensors.aggregator import present_owner
from covey.wire.job import AggregatorAt
from covey.wire.sums import DropJob, NextOwner, Serve
from plugins.aggregator.datapath.job_sums import JobSums
from tests.covey.played_ranks import PlayedRanks
from tests.plugins.aggregator.loopback import SECRET, AggdThread

JOB = JobId("j1")
RANKS, EPOCH, WITHIN_S = 3, 1 << 32, 20.0
SIZES = {"a": 120_000, "b": 5, "c": 40_000}
COMPUTES_S = 0.06


class TrainingRanks(PlayedRanks):
    def __init__(self) -> None:
        self.lost: list[str] = []
        super().__init__(
            [
                TensorClient(
                    JOB, rank, RANKS, lambda epoch, why, table: self.lost.append(why), part_bytes=1 << 16,
                    say=io.StringIO(),
                )
                for rank in range(RANKS)
            ]
        )  # fmt: skip
        self.iterations = [0] * RANKS
        self.until = 1 << 30

    def told(self, at: AggregatorAt) -> None:
        for client in self.clients:
            client.moved(at)

    def train(self, rank: int, client: TensorClient) -> None:
        """A training whose iterations add to a model and sum gradients, some at once and some one after another."""
        held = {name: client.model(name, np.zeros(size, np.float32)) for name, size in SIZES.items()}
        while self.iterations[rank] < self.until:
            now = self.iterations[rank] + 1
            model = [client.push(name, np.full(size, rank, np.float32)) for name, size in SIZES.items()]
            for handle, (name, size) in zip(model, SIZES.items(), strict=True):
                held[name] = handle.wait()
                assert np.all(held[name] == now * sum(range(RANKS))), (rank, now, name)
                summed = client.push_pull("g" + name, np.full(size, now, np.float32))
                assert np.all(summed == now * RANKS), (rank, now, name)
            self.iterations[rank] = now
            time.sleep(COMPUTES_S)

    def wait_for(self, more: int) -> None:
        wanted = max(self.iterations) + more
        end_s = time.monotonic() + 20
        while min(self.iterations) < wanted:
            assert not self.failed and time.monotonic() < end_s, (self.iterations, self.failed, self.lost)
            time.sleep(0.002)

    def finish(self, threads: Sequence[threading.Thread]) -> None:
        self.until = max(self.iterations) + 2
        self.end(threads)

    def pushed_bytes(self) -> int:
        """Bytes that the ranks had to push once."""
        return 2 * 4 * sum(SIZES.values()) * sum(self.iterations)


@pytest.fixture
def ranks() -> Iterator[TrainingRanks]:
    made = TrainingRanks()
    yield made
    for client in made.clients:
        client.close()


@pytest.fixture
def aggds(tmp_path: Path) -> Iterator[list[AggdThread]]:
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    running = [AggdThread(folder) for folder in folders]
    yield running
    for each in running:
        each.finish()


def served(aggd: AggdThread, epoch: int, handed_over: bool = False) -> tuple[JobSums, AggregatorAt]:
    aggd.order(Serve(JOB, epoch, RANKS, SECRET, 4 * sum(SIZES.values())))
    return aggd.aggd.jobs[JOB], AggregatorAt(JOB, epoch, HostId("h1"), aggd.aggd.address, SECRET, 0, handed_over)


def training(ranks: TrainingRanks, aggd: AggdThread) -> tuple[Sequence[threading.Thread], JobSums]:
    """All ranks train through this aggregator, and have done so for some iterations."""
    job, at = served(aggd, EPOCH + 1)
    ranks.told(at)
    threads = ranks.start(ranks.train)
    ranks.wait_for(5)
    return threads, job


@pytest.mark.long
def test_who_takes_over_before_its_memory_is_ready_keeps_what_ranks_bring(
    aggds: list[AggdThread], ranks: TrainingRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new owner writes all of its memory beforehand, which takes longer than ranks need to come; it must not
    overwrite what they brought."""
    monkeypatch.setitem(SIZES, "a", 4_000_000)
    threads, _ = training(ranks, aggds[0])
    for epoch, aggd in ((EPOCH + 2, aggds[1]), (EPOCH + 3, aggds[2])):
        _, at = served(aggd, epoch)
        ranks.told(at)
        ranks.wait_for(2)
    ranks.finish(threads)  # each compares every number of every round
    assert min(ranks.iterations) >= 5 + 2 + 2


def test_nothing_is_pushed_twice_when_an_owner_hands_over(aggds: list[AggdThread], ranks: TrainingRanks) -> None:
    """The first owner hands over to a second, to which it brings the model, and that one to a third, to which ranks
    bring it, in the middle of it all."""
    threads, former = training(ranks, aggds[0])
    jobs = [former]
    for number, aggd in enumerate(aggds[1:], start=2):
        job, at = served(aggd, EPOCH + number, handed_over=True)
        jobs.append(job)
        ranks.told(at)
        to = NextOwner(aggd.aggd.address, SECRET) if number == 2 else None
        drop = DropJob(JOB, EPOCH + number - 1, EPOCH + number, WITHIN_S, to)
        assert aggds[number - 2].order(drop).jobs == aggds[number - 2].order(drop).jobs == []
        ranks.wait_for(2 + int(3 * 0.2 / COMPUTES_S))
        assert jobs[-2].over and not job.over
    ranks.finish(threads)
    assert len(set(ranks.iterations)) == 1 and not ranks.lost
    state = 4 * sum(SIZES.values())
    assert sum(job.received_bytes for job in jobs) == ranks.pushed_bytes() + 2 * state, "ranks give a model twice"
    assert [aggd.now().copied for aggd in aggds] == [0, len(SIZES), 0]
    assert [aggd.now().copies_failed for aggd in aggds] == [0, 0, 0]
    assert all(tensor.duplicates == 0 for tensor in jobs[-1].tensors.values())


def test_an_owner_that_dies_while_it_hands_over_is_left_at_once(aggds: list[AggdThread], ranks: TrainingRanks) -> None:
    threads, _ = training(ranks, aggds[0])
    _, at = served(aggds[1], EPOCH + 2, handed_over=True)
    ranks.told(at)
    ranks.wait_for(3)
    assert aggds[1].now().jobs[0].joined == 0, "nobody went before the end of the first one"
    aggds.pop(0).kill()
    ranks.wait_for(3)
    ranks.finish(threads)
    assert not ranks.lost


def test_a_rank_that_leaves_early_takes_the_others_with_it(aggds: list[AggdThread], ranks: TrainingRanks) -> None:
    """A rank with an older `covey` goes to the new owner at once; the others would wait for it at the old one."""
    threads, former = training(ranks, aggds[0])
    _, handed = served(aggds[1], EPOCH + 2, handed_over=True)
    _, lost = served(aggds[1], EPOCH + 2)
    for rank, client in enumerate(ranks.clients):
        client.moved(lost if rank == 1 else handed)
    began_s = time.monotonic()
    aggds[0].order(DropJob(JOB, EPOCH + 1, EPOCH + 2, WITHIN_S))
    ranks.wait_for(5)
    assert former.over and time.monotonic() - began_s < WITHIN_S / 2
    ranks.finish(threads)


def test_an_owner_that_never_ends_its_connections_is_left(
    aggds: list[AggdThread], ranks: TrainingRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner is cut off from those who would tell it, but not from its ranks."""
    monkeypatch.setattr(present_owner, "HANDOVER_S", 0.5)
    threads, former = training(ranks, aggds[0])
    job, at = served(aggds[1], EPOCH + 2, handed_over=True)
    ranks.told(at)
    while not job.rounds:
        ranks.wait_for(1)
    assert not former.over
    ranks.finish(threads)
