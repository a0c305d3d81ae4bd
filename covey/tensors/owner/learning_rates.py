"""The learning rate of a round's step, which all ranks say before they push."""


class UnlikeRates(ValueError):
    """Two ranks say different learning rates."""


class LearningRates:
    """The learning rates of one tensor; the newest of each rank is known."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[int, float]] = {}
        """Rank -> round and rate."""

    def say(self, rank: int, round: int, rate: float) -> None:
        """Take in a rank's rate. UnlikeRates when another rank said otherwise of that round, or this one is further
        already."""
        if self._said.get(rank, (round, rate))[0] > round:
            raise UnlikeRates(f"rank {rank} sends a learning rate for round {round}, which is over already")
        for other, (theirs, said) in self._said.items():
            if theirs == round and said != rate and other != rank:
                raise UnlikeRates(f"rank {rank} has learning rate {rate} in round {round}, and rank {other} has {said}")
        self._said[rank] = round, rate

    def has_said(self, rank: int, round: int) -> bool:
        return self._said.get(rank, (None, 0.0))[0] == round

    def of(self, round: int) -> float:
        """Learning rate of a round that every rank has pushed."""
        return next(rate for theirs, rate in self._said.values() if theirs == round)
