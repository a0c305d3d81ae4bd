"""A sampler that chooses a rank's samples by the step's number alone, so that a lost rank's successor finds its place.

    sampler = covey.torch.StepSampler(len(data), 32)
    loader = DataLoader(data, batch_sampler=sampler)
    state = covey.torch.attach(ddp, optimizer, data=sampler)
    for epoch in sampler.epochs(10):
        for inputs, wanted in loader:
            ...

Both loops begin where this process must continue. An epoch shuffles all samples anew, and gives each to one rank;
samples that do not fill a step of all ranks are left out, different ones in each epoch.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from covey.job.this_job import of_process


class StepCount(Protocol):
    """The step count of a training that continues after a rank was lost."""

    @property
    def next_step(self) -> int:
        """Number of the step for which the next batch is, if the script was given none of its batches."""

    def asks_for_batches(self, begins_epoch: bool) -> None:
        """The script begins a loop over batches; `begins_epoch`: with the first batch of an epoch."""

    def takes_batch(self) -> None: ...

    @property
    def between(self) -> int | None:
        """The epoch whose steps are all done, and after which this process begins, with what the script does then;
        None: it begins with a step."""

    def batches_over(self, epoch: int) -> None:
        """The script has left its loop over the batches of this epoch, and all of its steps were made."""

    def ends_step(self) -> None:
        """The script has ended the step, if one is under way."""

    def ends(self) -> None:
        """There are no more steps."""


class StepSampler:
    """A `batch_sampler` for PyTorch's DataLoader, whose batches follow from the step."""

    def __init__(
        self,
        size: int,
        batch: int,
        *,
        seed: int = 0,
        per_step: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
        order: Callable[[int], list[int]] | None = None,
    ) -> None:
        """`size`: samples in the data set. `batch`: samples in a batch of one rank. `per_step`: batches of a rank in
        each step of the optimizer (`no_sync`). `rank`, `world_size`: None for those of torch.distributed, or of the job
        where no process group was made. `order(epoch)`: returns this rank's samples, `size` // `world_size` of them,
        instead of a shuffle by `seed`. ValueError when the samples do not fill one step."""
        self._rank = _job_of(dist.get_rank, "rank") if rank is None else rank
        self._world_size = _job_of(dist.get_world_size, "world_size") if world_size is None else world_size
        self._size, self._batch, self._seed, self._per_step = size, batch, seed, per_step
        self._order, self._distributed = order, None
        self.steps_per_epoch = size // (self._world_size * batch * per_step)
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"{size} samples are too few for one step of {self._world_size} "
                f"ranks, {per_step} batches, {batch} samples"
            )
        self._counts: StepCount | None = None
        self._given = 0
        """Number of batches given, where no training counts steps."""
        self._known: dict[int, tuple[int, list[int]]] = {}
        """For each rank, the newest epoch that was asked for, and the rank's samples in their order."""
        self._loop: weakref.ref[Iterator[list[int]]] | None = None
        """The newest loop over batches: a DataLoader with workers asks for the last one before the script has it, and
        drops its iterator as soon as the script has left the loop."""
        self._by_step = False
        """Whether a loop over batches has those of one step (`carries`)."""
        self._asked: Any = None
        """Random numbers as they were when a loop over a step's batches was asked for; None: it has begun."""

    @classmethod
    def like(cls, sampler: Any, batch: int, *, per_step: int = 1) -> "StepSampler":
        """A StepSampler in the order of PyTorch's DistributedSampler `sampler`, with its shuffling, padding or
        dropping."""
        ranks = sampler.num_replicas
        made = cls(len(sampler) * ranks, batch, per_step=per_step, rank=sampler.rank, world_size=ranks)
        made._distributed = sampler
        return made

    def follow(self, counts: StepCount) -> None:
        """From now on the sampler is at the step that `counts` says; called by `attach`."""
        self._counts = counts

    def carries(self, counts: StepCount) -> None:
        """From now on the sampler is at the step that `counts` says, and a loop over its batches has those of one step
        of one rank, which changes (`as_rank`); called by `attach` in an elastic job."""
        self._counts, self._by_step = counts, True

    def as_rank(self, rank: int) -> None:
        """Choose this rank's batches from now on. ValueError where `order` knows those of one rank alone."""
        if self._order is not None and rank != self._rank:
            raise ValueError(
                f"order= gives the samples of rank {self._rank}, and this process computes for rank {rank} too; next: "
                "give StepSampler.like(DistributedSampler(..)), or seed="
            )
        self._rank = rank

    def __len__(self) -> int:
        """Number of batches in a loop: those of a whole epoch, or of one step in an elastic job."""
        return self._per_step if self._by_step else self._per_epoch

    @property
    def _per_epoch(self) -> int:
        return self.steps_per_epoch * self._per_step

    def __iter__(self) -> Iterator[list[int]]:
        """The batches from here to the end of this epoch. Not a generator: a DataLoader draws a random number after it
        asked for the iterator, and before it asks that for a batch."""
        first = self._next_batch()
        if self._by_step:
            now = torch.default_generator.get_state()
            if self._asked is None or not torch.equal(now, _after_one_draw(self._asked)):
                self._asked = now  # else a DataLoader that starts its workers asks twice, and draws in between
            return self._of_step([self._batch_at(first + part) for part in range(self._per_step)], self._asked)
        if self._counts is not None and self._counts.between is not None:
            return self._batches(first, first)
        begins_epoch = first % self._per_epoch == 0
        if self._counts is not None:
            self._counts.asks_for_batches(begins_epoch)
        stop = first - first % self._per_epoch + self._per_epoch
        batches = self._batches(first, stop)
        self._loop = weakref.ref(batches, lambda _: self._over(stop))
        return batches

    def epochs(self, stop: int) -> Iterator[int]:
        """Each epoch from this one on, up to `stop`, which is left out. It ends when all of its steps are done. In a
        process that takes over where the script was after an epoch's steps, that epoch comes once more, without
        batches."""
        if self._counts is not None and (between := self._counts.between) is not None:
            if between < stop:
                yield between
            self._counts.ends_step()
        while (epoch := self._next_batch() // self._per_epoch) < stop:
            yield epoch
            if self._counts is not None:
                self._counts.ends_step()
        if self._counts is not None:
            self._counts.ends()

    def batch_of(self, step: int, part: int = 0) -> list[int]:
        """This rank's samples of batch `part` of a step; steps are counted from 0 over all epochs."""
        return self._batch_at(step * self._per_step + part)

    def _next_batch(self) -> int:
        return self._given if self._counts is None else self._counts.next_step * self._per_step

    def _of_step(self, batches: list[list[int]], asked: Any) -> Iterator[list[int]]:
        """The batches of one step. A DataLoader draws a number for each loop, but none where it kept its workers: then
        it is drawn here, so that what a rank draws does not depend on what this process has done before."""
        self._asked = None
        if torch.equal(asked, torch.default_generator.get_state()):
            torch.empty((), dtype=torch.int64).random_()
        yield from batches

    def _batches(self, first: int, stop: int) -> Iterator[list[int]]:
        for at in range(first, stop):
            if self._counts is not None:
                self._counts.takes_batch()
            self._given = at + 1
            yield self._batch_at(at)
        if first < stop:
            self._over(stop)
        elif self._counts is not None:
            self._counts.takes_batch()

    def _over(self, stop: int) -> None:
        """Tell that the loop up to this batch was left, if all of its steps were made."""
        if self._counts is not None and self._next_batch() == stop:
            self._loop = None
            self._counts.batches_over(stop // self._per_epoch - 1)

    def _batch_at(self, number: int) -> list[int]:
        epoch, at = divmod(number, self._per_epoch)
        known = self._known.get(self._rank)
        if known is None or known[0] != epoch:
            known = self._known[self._rank] = epoch, self._order_of(epoch)
        return known[1][at * self._batch : (at + 1) * self._batch]

    def _order_of(self, epoch: int) -> list[int]:
        if self._order is not None:
            return self._order(epoch)
        if self._distributed is not None:
            self._distributed.rank = self._rank
            self._distributed.set_epoch(epoch)
            return list(self._distributed)
        drawn = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order: list[int] = torch.randperm(self._size, generator=drawn).tolist()
        return order[self._rank :: self._world_size]


def _after_one_draw(state: Any) -> Any:
    """The state of PyTorch's generator once a DataLoader has drawn its number."""
    generator = torch.Generator()
    generator.set_state(state)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return generator.get_state()


def _job_of(of_group: Callable[[], int], name: str) -> int:
    """The rank or world size, of torch.distributed or of this process's job. CoveyError where there is neither."""
    return of_group() if dist.is_initialized() else int(getattr(of_process(), name))
