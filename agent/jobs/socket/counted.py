"""Which of several processes of one rank has its steps counted. Pure: time is an argument.

A script may start processes of its own (fork, `torch.multiprocessing.spawn`, workers of a loader), which carry the
rank's variables and report as that rank. Steps of two of them, mixed, tell nothing: the first that steps counts until
it is gone, or silent for long while another steps. One that says its steps itself is believed before one that is seen.
"""

from dataclasses import dataclass

from covey.core.ids import JobId

SILENT_S = 10.0
SILENT_STEPS = 5
"""The number of its own steps for which, and for `SILENT_S`, the counting process has to be silent before another
counts."""

Rank = tuple[JobId, int, int]
"""A rank: job, epoch, number."""


@dataclass
class _Counted:
    process: object
    by_script: bool
    newest_s: float
    step_s: float

    def is_silent(self, now_s: float) -> bool:
        return now_s - self.newest_s > max(SILENT_S, SILENT_STEPS * self.step_s)


class CountedProcesses:
    def __init__(self) -> None:
        self._of: dict[Rank, _Counted] = {}

    def counts(self, rank: Rank, process: object, by_script: bool, step_s: float, now_s: float) -> bool:
        """Whether this step, which `process` reports, counts for the rank."""
        known = self._of.get(rank)
        other = known is not None and known.process is not process and not known.is_silent(now_s)
        if known is not None and other and known.by_script >= by_script:
            return False
        self._of[rank] = _Counted(process, by_script, now_s, step_s)
        return True

    def gone(self, process: object) -> None:
        """Forget a process that is no longer connected."""
        self._of = {rank: known for rank, known in self._of.items() if known.process is not process}
