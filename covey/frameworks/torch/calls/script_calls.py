"""Which round of the job's tensors a collective is, and who is to pass there again.

    before attach, and before the loop     its result is kept, and given to successors (`covey.healing.kept_rounds`)
    in a step                              a round of this step, which a successor repeats
    after the optimizer's step             a round of the time between two steps (`covey.frameworks.torch.heal`)

Rounds are numbered in each of these, so a rank that repeats a step finds the rounds of that step.
"""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from covey.core.errors import CoveyError
from covey.frameworks.torch.calls.connections import GlooConnections
from covey.frameworks.torch.gradients import PushesTensors
from covey.healing.kept_rounds import KeptRounds
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.telling import ToldByRank
from covey.tensors.numbers.tensor_wire import Type

if TYPE_CHECKING:
    from covey.job.client import JobClient
    from covey.job.tensors import TensorClient


class CallsOfTraining(Protocol):
    """What a training says of the collectives of its script."""

    def enters(self, kind: str) -> bool:
        """The script calls this collective now. Returns whether its result is kept for successors."""


class MadeGroup(NamedTuple):
    """A group that a script has made beside the first one."""

    number: int
    about: str
    """Its description, which groups of one dimension of a mesh share."""
    ranks: tuple[int, ...]


class ScriptCalls:
    """The collectives of one process, of all its groups."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.job: JobClient | None = None
        self.training: CallsOfTraining | None = None
        self.restarts = ""
        """The call since which the job heals no more, and why; empty: it heals."""
        self.groups = 0
        """Number of groups that were made beside the first."""
        self.made: list[MadeGroup] = []
        self._sums: PushesTensors | None = None
        self._counts: Counter[str] = Counter()
        self._kept: KeptRounds | None = None
        self.connections = GlooConnections(rank, ranks, self._tell, self.heals_no_more)

    @property
    def tensors(self) -> "TensorClient":
        """The job's tensors. CoveyError where the group was made by hand."""
        if self.job is None:
            what, why = "this collective was refused", "its process group belongs to no job"
            raise CoveyError(what, why, "make it with covey.torch.init_process_group()")
        return self.job.tensors

    @property
    def kept(self) -> KeptRounds:
        """The rounds before the loop; made at the first use, when tensors stop being shared in memory."""
        if self._kept is None:
            if self.job is not None:
                self.job.shares_no_memory()
            tensors = self.tensors
            of = self.rank, self.ranks, tensors.incarnation, tensors.far.tell, tensors.tell, self.heals_no_more
            self._kept = KeptRounds(*of)
            self._kept.restarts = self.restarts
            tensors.listen(self._told)
        return self._kept

    def attached(self, training: CallsOfTraining, sums: PushesTensors) -> None:
        """From now on collectives are rounds of `sums`, where the training does not say otherwise."""
        self.training, self._sums = training, sums

    def step_begins(self) -> None:
        self._counts.clear()

    def begun(self, kind: str, of: str, mine: Array, mean: bool, bits: Type | None) -> Callable[[], Array]:
        """Begin the round of a collective; `of` names it with type and size. Returns what waits for the result."""
        if self.training is None or self._sums is None or self.training.enters(kind):
            return self.kept.round(self._push_early, of, mine, mean, bits)
        self._counts[of] += 1
        return self._sums.push(f"ddp/{of} {self._counts[of]}", mine, mean=mean, type=bits).wait

    def check_heals(self) -> None:
        """SystemExit in a successor before its loop, if lost ranks are not replaced any more."""
        self.kept.check_heals()

    def heals_no_more(self, call: str) -> None:
        """From now on the job begins again when a rank is lost; said once."""
        if self.restarts:
            return
        self.restarts = call
        if self._kept is not None:
            self._kept.restarts = call
        if self.job is not None:
            self.job.heals()
            if self.rank == 0:
                self.job.tensors.tell(
                    f"restarts instead of heals from now on when a rank is lost: {call} cannot be repeated by a "
                    "process that takes over (docs/guides/healing.md)"
                )

    # ---- inside ----

    def _push_early(self, name: str, array: Array, *, mean: bool, type: Type | None) -> Any:
        tensors = self.tensors
        tensors.early.add(name)
        return tensors.push(name, array, mean=mean, type=type)

    def _tell(self, said: Any) -> None:
        assert self._kept is not None, "connections are asked for after check_heals"
        self.tensors.far.tell(said)

    def _told(self, told: ToldByRank) -> bool:
        return self.kept.told(told) or self.connections.told(told)
