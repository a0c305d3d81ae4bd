"""One walk down an order finds the position of every job; what a job waits for is then said without another walk."""

from collections.abc import Sequence

import msgspec

from covey.core.ids import JobId
from plugins.scheduler.policy.order import Row


class Position(msgspec.Struct, frozen=True):
    """The position of one job in an order."""

    row: Row
    ahead: int
    """The number of jobs ahead of it that wait."""
    passed: bool
    """Whether one of these was admitted later and asks for fewer GPUs."""


class QueuePositions:
    """What an order says of all its jobs. Making it takes time in proportion to jobs times distinct widths; asking it
    takes none."""

    def __init__(self, order: Sequence[Row]) -> None:
        self.positions: dict[JobId, Position] = {}
        self.waiting: list[Row] = []
        self.holders: list[Row] = []
        """The jobs that run, in order."""
        self.held = 0
        """The GPUs of the jobs that run."""
        self.holders_of: dict[str, list[Row]] = {}
        """Tenant -> its jobs that run, in order."""
        self.used: dict[str, int] = {}
        """GPUs of a tenant's holders that count against its quota."""
        newest: dict[int, int] = {}
        """Width -> newest job of this width that waits, among those walked so far."""
        for row in order:
            passed = any(number > row.number and gpus < row.gpus for gpus, number in newest.items())
            self.positions[row.id] = Position(row, len(self.waiting), passed)
            if row.running:
                self._hold(row)
            else:
                self.waiting.append(row)
                newest[row.gpus] = max(row.number, newest.get(row.gpus, 0))

    def _hold(self, row: Row) -> None:
        self.holders.append(row)
        self.held += row.gpus
        self.holders_of.setdefault(row.tenant, []).append(row)
        if row.job_class != "opportunistic":
            self.used[row.tenant] = self.used.get(row.tenant, 0) + row.gpus
