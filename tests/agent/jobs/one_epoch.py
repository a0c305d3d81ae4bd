"""A runner, as far as jobs.sock asks it, that knows the ranks of one epoch."""

from agent.jobs.successors import NEVER
from covey.core.errors import Refused
from covey.core.ids import JobId
from covey.ports.processes import ProcessId
from covey.wire.job import GRACE_KEPT, Stopping
from plugins.base import RanksSpec


class OneEpoch:
    """The ranks of one epoch. Their token is `secret`; `asked`: by when they are to end, which may be put off once."""

    def __init__(self, known: RanksSpec) -> None:
        self.known = known
        self.asked: Stopping | None = None
        self.healing: dict[int, int] = {}
        self.joined: list[int] = []
        self.looked = 0
        self.started: frozenset[ProcessId] = frozenset()

    def token(self, job: JobId, epoch: int) -> str | None:
        return None if self.spec(job, epoch) is None else "secret"

    def spec(self, job: JobId, epoch: int) -> RanksSpec | None:
        return self.known if (job, epoch) == (self.known.job, self.known.epoch) else None

    def runs_as(self, spec: RanksSpec) -> int:
        return -1 if spec.uid is None else spec.uid

    def other_uids(self) -> set[int]:
        return {self.runs_as(self.known)} - {-1}

    def stopping(self, job: JobId, epoch: int) -> Stopping | None:
        return self.asked

    def joins(self, job: JobId, epoch: int, rank: int) -> None:
        self.joined.append(rank)

    def leaves(self, job: JobId, epoch: int, rank: int) -> None:
        self.joined.remove(rank)

    def tree(self, job: JobId, epoch: int, rank: int) -> frozenset[ProcessId]:
        self.looked += 1
        return self.started

    async def gives_up(self, job: JobId, epoch: int, rank: int) -> None:
        self.healing[rank] = NEVER

    async def extend(self, job: JobId, epoch: int, seconds: float) -> None:
        if self.asked is None:
            raise Refused(4, GRACE_KEPT, "no host asked", "wait")
        self.asked = Stopping(self.asked.left_s + seconds, self.asked.why, may_extend=False)

    async def heals(
        self, job: JobId, epoch: int, rank: int, step: int, pid: int = 0, modules: tuple[str, ...] = ()
    ) -> None:
        self.healing[rank] = step
