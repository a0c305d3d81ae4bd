"""The state of a script that Covey keeps when a rank is lost: `job.state`, and the loop over its steps.

    w, rng = np.zeros(1000, np.float32), np.random.default_rng(job.rank)

    def load(arrays, own):
        w[:] = arrays["w"]
        if own is not None:                     # None: the job had just begun
            rng.bit_generator.state = own

    state = job.state(lambda: {"w": w}, load, own=lambda: rng.bit_generator.state)
    for step in state.steps(1000):
        g = job.tensors.push_pull("g", gradient(w, rng))
        w -= 0.1 * g

A rank that is lost (its process is killed, or ends with an error) is started again on its host, alone: it gets what
`load` needs from the others, which wait, and begins with the step in which they are. The result is bit for bit that of
a run without losses, as long as

- what `get` gives is the same on every rank at the beginning of each step, and does not change in a step before all
  that was pushed in it has come back; a successor compares (`load` may get the very arrays that `get` gave it, with
  what is in them now),
- what `own` gives is as it will be at the step's end once something is pushed: random numbers are drawn before
  (with many ranks `state.drawn()` says when, if there is something to compute in between),
- tensors are used only after `job.state` was called, to sum gradients: not `job.tensors.model`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from covey.core.errors import EXIT_STATE_LOST, CoveyError, OthersDone
from covey.healing.healing import Healing
from covey.healing.likeness import likeness
from covey.healing.neighbours import HealedRank
from covey.healing.own_gather import OwnGather
from covey.healing.owns import RANKS_MAX
from covey.healing.taking_over import WITHIN_S
from covey.job.carrying import CarriedRanks
from covey.job.tensors import TensorClient
from covey.kernel.this_process import OfOneProcess
from covey.tensors.aggregator.block_rounds import BlockRounds
from covey.tensors.numbers.arrays import Array

Get = Callable[[], Mapping[str, Array]]
Load = Callable[[dict[str, Array], Any], None]
STEPS_MAX = 1 << 31


class ScriptState(NamedTuple):
    """The state of a script, as it gives it to `job.state`."""

    get: Get
    load: Load
    own: Callable[[], object] | None
    """Returns what only this rank has; None: it has nothing of its own."""
    stepped: Callable[[int], object] = lambda step: None
    """Called with each step that is done."""


class StepsHeal(Protocol):
    """The part of `covey.healing.healing`, or of `covey.simulated.healing_streams`, that a JobState uses."""

    @property
    def step(self) -> int: ...

    def begin(self, state: Mapping[str, Array]) -> None: ...
    def end(self, state: Mapping[str, Array]) -> None: ...
    def drawn(self, own: Callable[[], object] | None) -> None: ...


class RanksGoOn(Protocol):
    """The part of `covey.job.carrying`, or of `covey.simulated.carried_streams`, that a JobState uses."""

    def begin(self, state: Mapping[str, Array]) -> None: ...
    def end(self, state: Mapping[str, Array]) -> None: ...


class JobState(OfOneProcess):
    """The steps of a job whose ranks may be lost. Made by `job.state`. In a forked child `step` can be read, and the
    rest raises OtherProcess."""

    _kind = "the steps of a job's state"
    _instead = "make its steps in the process that called job.state"

    def __init__(self, healing: StepsHeal, script: ScriptState, carried: RanksGoOn | None = None) -> None:
        """`carried`: the ranks that this process of an elastic job carries."""
        self._healing, self._script, self._carried = healing, script, carried
        healing.begin(_held(script.get()))
        if carried is not None:
            carried.begin(_held(script.get()))

    @property
    def step(self) -> int:
        """The step that this rank is in; right after `job.state`, the first one to be done."""
        return self._healing.step

    def steps(self, stop: int) -> Iterator[int]:
        """Each step from the present one on, up to `stop`, which is left out. Asking for the next step ends the one
        before. CoveyError when a round of a tensor is under way then."""
        while self.step < stop:
            yield self.step
            self.done()

    def drawn(self) -> None:
        """Tell that `own` now returns what it will return at the step's end. Where two neighbours keep that, it goes
        there while this rank computes, so the first push of the step need not wait for it. The call is optional, and
        does nothing where all ranks gather it."""
        self._check_process("nothing was handed over")
        self._healing.drawn(self._script.own)

    def done(self) -> None:
        """End the step, where `steps` is not used: all its results are here, and the state is that of the next step.
        Counts as `job.step()` too. CoveyError when a round of a tensor is under way."""
        self._check_process(f"step {self.step} was not ended")
        (self._healing if self._carried is None else self._carried).end(_held(self._script.get()))
        self._script.stepped(self.step - 1)


def _held(state: Mapping[str, Array]) -> Mapping[str, Array]:
    """A copy of the dict, since the script may put other arrays into its own later."""
    return dict(state) if isinstance(state, dict) else state


def begun(
    tensors: TensorClient,
    me: HealedRank,
    script: ScriptState,
    within_s: float = WITHIN_S,
    gathers_max: int = RANKS_MAX,
    carry: Callable[[Healing], CarriedRanks] | None = None,
    extra: bool = False,
) -> JobState:
    """The state of `JobClient.state`; ends the process where that says so. With more ranks than `gathers_max`,
    neighbours keep each rank's own values. `carry` makes the ranks that a process of an elastic job carries. `extra`:
    nothing is left to do for this process once others have ended: they had every part of every step."""
    if not 0 <= me.step < STEPS_MAX:
        raise ValueError(f"the first step is from 0 to {STEPS_MAX - 1}, not {me.step}")

    def make(far: BlockRounds) -> Healing:
        gather = OwnGather(me.rank, me.world_size, me.step, far) if 1 < me.world_size <= gathers_max else None
        return Healing(me, far, far.versions, tensors.tell, likeness(), gather)

    if me.world_size == 1 and not me.incarnation:
        tensors.tell(
            "has nobody who holds its state: this job has one rank, which begins from its checkpoint when lost"
        )
    carried: list[CarriedRanks] = []
    own = script.own if carry is None or script.own is None else (lambda: carried[0].own_of(me.rank))
    healing, far = tensors.heal(make, own)
    if carry is not None:
        carried.append(carry(healing))
        carried[0].join()
    if me.incarnation:
        try:
            found = healing.recover(tensors.tell, script.own is not None, script.get(), within_s=within_s)
            script.load(found.arrays, found.own if carry is None else None)
        except OthersDone as error:
            if not extra:
                tensors.tell(f"ends: {error}")
                raise SystemExit(EXIT_STATE_LOST) from error
            tensors.tell("ends: the others were done before this process had begun, and carried its ranks to the end")
            raise SystemExit(0) from error
        except CoveyError as error:
            tensors.tell(f"ends: {error}")
            raise SystemExit(EXIT_STATE_LOST) from error
        far.begin_with(found.rounds)
    return JobState(healing, script, *carried)
