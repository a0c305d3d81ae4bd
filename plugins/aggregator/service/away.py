"""Ranks that have left (`covey.tensors.owner.leaving`), by the log, and the orders that tell `aggd` of them."""

from collections.abc import Iterator

from covey.core.ids import JobId
from covey.tensors.numbers.blocks import job_of
from covey.tensors.numbers.tensor_wire import grant_of
from covey.tensors.owner.leaving import who
from covey.wire.sums import Now, RanksAway
from plugins.facts import RanksLeft


class RanksAwayNow:
    """Ranks that have left, of all gangs on whatever hosts: this host may sum their tensors."""

    def __init__(self) -> None:
        self._left: dict[JobId, RanksLeft] = {}

    def left(self, fact: RanksLeft) -> bool:
        """Take in what the log says. Returns whether it is new."""
        known = self._left.get(fact.job)
        self._left[fact.job] = fact
        return known is None or (known.epoch, known.ranks.keys()) != (fact.epoch, fact.ranks.keys())

    def forget(self, job: JobId) -> None:
        self._left.pop(job, None)

    def orders(self, now: Now) -> Iterator[RanksAway]:
        """Orders that tell `aggd` of ranks which it does not know to have left."""
        for job in now.jobs:
            fact = self._left.get(job_of(job.job))
            if fact is not None and grant_of(job.epoch) == fact.epoch and fact.ranks.keys() - set(job.away):
                words = {rank: who(rank, gone.host, gone.step, True) for rank, gone in fact.ranks.items()}
                yield RanksAway(job.job, job.epoch, words)
