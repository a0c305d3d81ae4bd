"""The owners of the job's tables as one rank knows them, and what it tells an agent that is back."""

from collections.abc import Sequence

from covey.wire.job import AggregatorAt, AggregatorLost, Frame, TableWanted

WHY_MAX = 500


class TableOwners:
    """The owners of one job's tables. Not safe for several threads at once."""

    def __init__(self) -> None:
        self._named: dict[int, AggregatorAt] = {}
        """By table: the newest owner that the agent named."""
        self._lost: dict[int, AggregatorLost] = {}
        self._wanted: set[int] = set()

    def all(self) -> Sequence[AggregatorAt]:
        return list(self._named.values())

    def moved(self, at: AggregatorAt) -> bool:
        """Take a new owner. Whether it is no older than the one known."""
        known, lost = self._named.get(at.table), self._lost.get(at.table)
        if known is not None and known.epoch > at.epoch:
            return False
        self._named[at.table] = at
        if lost is not None and lost.epoch < at.epoch:
            del self._lost[at.table]
        return True

    def lost(self, epoch: int, why: str, table: int) -> AggregatorLost | None:
        """That epoch's owner cannot be used. Returns the frame for the agent; None when a newer owner is known."""
        known = self._named.get(table)
        if known is not None and known.epoch > epoch:
            return None
        said = self._lost[table] = AggregatorLost(epoch, why[:WHY_MAX], table)
        return said

    def wanted(self, table: int) -> TableWanted:
        self._wanted.add(table)
        return TableWanted(table, may_own=True)

    def again(self) -> Sequence[Frame]:
        """All frames, for an agent that may not have received them."""
        return [*(TableWanted(table, may_own=True) for table in sorted(self._wanted)), *self._lost.values()]
