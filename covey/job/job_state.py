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

With `checkpoint=True` a job that is asked to end saves by itself, and continues with the same bits once it is started
again (`covey.healing.checkpoint`). All ranks end after the same step, with exit status 75, whenever each hears of it
(`covey.healing.owns`); nothing that stands after the loop is run then.
"""

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from covey.core.errors import EXIT_AGAIN, EXIT_STATE_LOST, CoveyError, OthersDone
from covey.healing import checkpoint
from covey.healing.healing import Healing
from covey.healing.likeness import likeness
from covey.healing.machine import NOT_SAVED, Boundary, json_of
from covey.healing.neighbours import HealedRank
from covey.healing.own_gather import OwnGather
from covey.healing.owns import RANKS_MAX, Owns
from covey.healing.taking_over import WITHIN_S
from covey.job.carrying import CarriedRanks
from covey.job.tensors import TensorClient
from covey.kernel.this_process import OfOneProcess
from covey.saves.asked_save import AskedSave
from covey.tensors.aggregator.block_rounds import BlockRounds
from covey.tensors.numbers.arrays import Array

Get = Callable[[], Mapping[str, Array]]
Load = Callable[[dict[str, Array], Any], None]
Place = str | os.PathLike[str]
STEPS_MAX = 1 << 31
OWN_CHECKED = 5
"""The number of steps in which what `own` gives at the end is compared with what it gave before the first push."""


SAVES_HOW = "submit a script that says job.state(.., checkpoint=True), or covey.torch.heal(.., checkpoint=True)"
TOGETHER = "its ranks save only together, all in the same step, and the script alone can say when"
SAVE_LEAST_S, SAVE_BYTES_S = 5.0, 100e6
"""Seconds that the last checkpoint may take, and bytes in each second more, on a slow disk or over a network."""


class WritesParts(Protocol):
    """What writes one rank's part of a checkpoint."""

    def __call__(
        self,
        place: Path,
        about: checkpoint.Checkpoint,
        arrays: Mapping[str, Array],
        gathered: Callable[[bytes], Sequence[bytes]],
    ) -> object:
        """Write this rank's part, and return once the whole checkpoint is there. `gathered` returns, by rank, what each
        gave it. CoveyError on all ranks when one cannot write."""


class ScriptState(NamedTuple):
    """The state of a script, as it gives it to `job.state`."""

    get: Get
    load: Load
    own: Callable[[], object] | None
    """Returns what only this rank has; None: it has nothing of its own."""
    stepped: Callable[[int], object] = lambda step: None
    """Called with each step that is done."""


class StopsAndSaves(NamedTuple):
    """How the ranks of a job stop after the same step, and save."""

    place: Path | None = None
    """Where ranks save when they stop; None: they do not stop by themselves."""
    wants: Callable[[], bool] = lambda: False
    """Whether this rank has heard that the job is to stop."""
    listens: Callable[[], object] = lambda: None
    """Called when the script asks whether to stop."""
    leave: Callable[[], object] = lambda: None
    """Waits until every rank has ended its last step."""
    stops: Callable[[], bool] = lambda: False
    """Whether all ranks stop now."""
    boundary: Callable[[], Boundary] = lambda: Boundary(0, ())
    """Where this rank is between two steps."""
    gathered: Callable[[bytes], Sequence[bytes]] = lambda own: (own,)
    """Gathers what is each rank's own, which this rank's is given to, where neighbours keep it."""
    writes: Callable[[], bool] = lambda: True
    """Whether this process writes the checkpoint: it carries rank 0."""
    own: Callable[[], object] | None = None
    """Returns what is the own of this process's first rank, where the script's `own` is that of the entered one."""
    own_said: Callable[[], bytes | None] = lambda: None
    """What this rank said in this step that its own will be at the end, as JSON; None: nothing."""
    draws_ahead: bool = False
    """Whether random numbers for the next step may be drawn before this one is ended."""
    types: Callable[[], Mapping[str, str] | None] = lambda: None
    """Types of arrays, as of `covey.healing.checkpoint.save`; called after they were given."""
    load: Load | None = None
    """Takes over what a checkpoint has; None: as from another rank."""
    saved: Callable[[int, Path], object] = lambda step, path: None
    """Called with the step and place of each checkpoint that this process has written."""
    may_end: Callable[[], bool] = lambda: True
    """Whether what is between two steps here is between two steps of the script."""
    left_s: Callable[[], float] = lambda: math.inf
    """Seconds until this process is killed, as far as is known."""
    extends: Callable[[float], object] = lambda seconds: None
    """Asks for so many seconds more. CoveyError when they are not granted."""
    made: str = "numpy"
    """Which kind of script it is."""
    number: Callable[[int], int] = lambda step: step
    """The number by which people know the step that is next, also in another start of the job."""
    ended: Callable[[int], int | None] = lambda step: step - 1
    """The number by which people know the step that just ended, from 0; None: it was a part of one."""
    alike: Collection[int] = ()
    """The ranks that hold the same state as this one; empty: all do."""
    opened: Callable[[Path], "checkpoint.OpenedCheckpoint | None"] = checkpoint.opened
    """Returns the checkpoint there, as of `covey.healing.checkpoint.opened`."""
    own_to_save: Callable[[bool], object] = lambda is_last: None
    """Returns what is to be saved as this rank's own, where it may not be what was gathered, and all ranks save;
    `is_last`: the job ends. None: what was gathered."""
    write: "WritesParts | None" = None
    """Writes the checkpoint, with all ranks, of which each has a part; None: one process writes all of it."""
    asked: AskedSave | None = None
    """The save that a person asked for; None: nobody can."""
    ranks: int = 1


class AskedToEnd(Protocol):
    """The part of `covey.job.stop_asked` that is used here."""

    @property
    def asked(self) -> bool: ...
    @property
    def left_s(self) -> float: ...

    def listens(self) -> None: ...


def stops_of(asked: AskedToEnd, place: Place | bool, more: StopsAndSaves | None, **of_client: Any) -> StopsAndSaves:
    """How ranks of a script stop and save; `more`: what a framework adds. CoveyError when the place is not known."""
    if place is not False:
        if threading.current_thread() is not threading.main_thread():
            why = "it is registered outside of the main thread, which alone can end the process"
            raise CoveyError("the state has no checkpoint", why, "call it in the main thread, or leave checkpoint= out")
        asked.listens()
    at = None if place is False else checkpoint.place_of(place, os.environ)
    of_stop: dict[str, Any] = {"wants": lambda: asked.asked, "left_s": lambda: asked.left_s, "listens": asked.listens}
    return (more or StopsAndSaves())._replace(place=at, **of_stop, **of_client)


def saves_when_asked(stop: StopsAndSaves, asked: AskedSave) -> StopsAndSaves:
    """`stop`, with saves that a person asks for (`agentctl checkpoint`), where the script can save."""

    def check() -> None:
        if stop.place is None:
            raise CoveyError(NOT_SAVED, "the script's job.state has no checkpoint", SAVES_HOW)
        if stop.write is not None:
            raise CoveyError(NOT_SAVED, TOGETHER, "call state.save() in the script")

    asked.begin = check
    return stop._replace(asked=asked)


class StepsHeal(Protocol):
    """The part of `covey.healing.healing`, or of `covey.simulated.healing_streams`, that a JobState uses."""

    @property
    def step(self) -> int: ...

    def begin(self, state: Mapping[str, Array]) -> None: ...
    def end(self, state: Mapping[str, Array]) -> None: ...
    def drawn(self, own: Callable[[], object] | None) -> None: ...
    def moved(self, own: Callable[[], object] | None) -> None: ...


class RanksGoOn(Protocol):
    """The part of `covey.job.carrying`, or of `covey.simulated.carried_streams`, that a JobState uses."""

    def begin(self, state: Mapping[str, Array]) -> None: ...
    def end(self, state: Mapping[str, Array]) -> None: ...


class JobState(OfOneProcess):
    """The steps of a job whose ranks may be lost. Made by `job.state`. In a forked child `step` can be read, and the
    rest raises OtherProcess."""

    _kind = "the steps of a job's state"
    _instead = "make its steps in the process that called job.state"

    def __init__(
        self,
        healing: StepsHeal,
        script: ScriptState,
        carried: RanksGoOn | None = None,
        stop: StopsAndSaves = StopsAndSaves(),
    ) -> None:
        """`carried`: the ranks that this process of an elastic job carries."""
        self._healing, self._script, self._carried, self._stop = healing, script, carried, stop
        self._unchecked = OWN_CHECKED
        """In how many steps more what is this rank's own is compared with what was said."""
        healing.begin(_held(script.get()))
        if carried is not None:
            carried.begin(_held(script.get()))

    @property
    def step(self) -> int:
        """The step that this rank is in; right after `job.state`, the first one to be done."""
        return self._healing.step

    def steps(self, stop: int) -> Iterator[int]:
        """Each step from the present one on, up to `stop`, which is left out. Asking for the next step ends the one
        before. Errors as of `done`."""
        while self.step < stop:
            yield self.step
            self.done()

    @property
    def stopping(self) -> bool:
        """Whether the job ends with this step: it is asked to, and every rank has the same answer in the same step,
        once its results are used or before anything of it is pushed. All ranks know one or two steps after the first
        of them heard. With a checkpoint, they save and end once the step is done. Else ask in every step, save, call
        `done` and leave the loop; from the first question on SIGTERM does not end the script, and CoveyError is raised
        when it comes after many steps of a job that has no `own`."""
        self._check_process("it is not known whether all ranks stop")
        self._stop.listens()
        return self._stop.stops()

    def save(self, path: Place | None = None, *, types: Mapping[str, str] | None = None) -> Path:
        """Save what ranks need to continue with the same bits (`covey.healing.checkpoint`), and return where: at the
        end of this step, when all of its results are used, or before anything of it is pushed. Rank 0 writes; other
        ranks may leave the call out, but not in a job of more than 16 ranks, which save at the end of a step. `path`: a
        file; None: the checkpoint that `job.state` was given. `types`: as of `covey.healing.checkpoint.save`.
        CoveyError within a step, and when the file cannot be written: then the one before is there."""
        self._check_process("nothing was saved")
        place = Path(path) if path is not None else self._stop.place or checkpoint.place_of(True, os.environ)
        return self._save(place, types, False)

    def _save(self, place: Path, types: Mapping[str, str] | None, is_last: bool) -> Path:
        boundary, own = self._stop.boundary(), self._script.own
        each = boundary.owns
        if (to_save := self._stop.own_to_save(is_last)) is not None:
            each = self._stop.gathered(json_of(lambda: to_save))
        elif each is None:
            if boundary.step == self.step and not is_last:
                why = "what is each rank's own is gathered for that, and may change before this step's first push"
                raise CoveyError(NOT_SAVED, why, "save at the end of a step in which something is pushed")
            mine = boundary.own
            if mine is None:
                mine = b"" if own is None else json_of(self._stop.own or own)
            each = self._stop.gathered(mine)
        writes, write = self._stop.writes(), self._stop.write
        if writes or write is not None:
            owns = tuple(one.decode() or None for one in each)
            about = checkpoint.Checkpoint(self._stop.number(boundary.step), owns, self._stop.made)
            arrays = dict(self._script.get())
            if is_last:
                self._ask_for_time(sum(array.nbytes for array in arrays.values()))
            if write is not None:
                write(place, about, arrays, self._stop.gathered)
            else:
                checkpoint.save(place, about, arrays, types or self._stop.types())
            if writes and place == self._stop.place:
                self._stop.saved(about.step, place)
        return place

    def _ask_for_time(self, size_bytes: int) -> None:
        """Ask for more time, once, where the last checkpoint may take longer than what is left of the grace."""
        lacks_s = SAVE_LEAST_S + size_bytes / SAVE_BYTES_S - self._stop.left_s()
        if lacks_s > 0:
            with contextlib.suppress(CoveyError):  # asked before, or not to be granted: it is written as far as it gets
                self._stop.extends(lacks_s)

    def save_if_asked(self) -> None:
        """At the end of a step: save, if a person asked for it and this process writes. Other ranks go on."""
        asked, place = self._stop.asked, self._stop.place
        if asked is None or place is None or not asked.wanted or not self._stop.may_end() or not self._stop.writes():
            return
        try:
            boundary = self._stop.boundary()
            if self._stop.ranks > 1 and (boundary.owns is None or self._stop.own_to_save(False) is not None):
                raise CoveyError(NOT_SAVED, TOGETHER, "call state.save() in the script")
            self._save(place, None, False)
        except CoveyError as error:
            asked.failed(error)
        else:
            asked.saved(self._stop.number(boundary.step), place)

    def end_if_all_stop(self) -> None:
        """Between two steps: save and end this process, if there is a checkpoint and all ranks stop now."""
        if self._stop.place is None or not self._stop.may_end() or not self._stop.stops():
            return
        self._save(self._stop.place, None, True)
        self._stop.leave()
        raise SystemExit(EXIT_AGAIN)

    def _check_own(self) -> None:
        """In the first steps, compare what is this rank's own with what was said of it. CoveyError when it differs: a
        successor would go on with something else."""
        said, own = self._stop.own_said(), self._script.own
        if own is None or said is None or self._stop.draws_ahead:
            return
        self._unchecked -= 1
        if (now := json_of(own)) != said:
            before, after = json.loads(said), json.loads(now)
            if before == after:
                return
            where = _difference(before, after)
            why = f"own{where} at the end of step {self.step} is not what it was at this step's first push"
            next_ = "draw random numbers, and count, before the first push of a step"
            raise CoveyError("a rank that replaces this one would go on with another own state", why, next_)

    def drawn(self) -> None:
        """Tell that `own` now returns what it will return at the step's end. Where two neighbours keep that, it goes
        there while this rank computes, so the first push of the step need not wait for it. The call is optional, and
        does nothing where all ranks gather it."""
        self._check_process("nothing was handed over")
        self._healing.drawn(self._script.own)

    def moved(self, own: Callable[[], object]) -> None:
        """Tell that what is this rank's own at the beginning of this step is what `own` returns, since it changed after
        the last push of the step before. Called before anything is pushed; waits until two other ranks keep it."""
        self._check_process("nothing was handed over")
        self._healing.moved(own)

    def done(self, *, may_end: bool = True) -> None:
        """End the step, where `steps` is not used: all its results are here, and the state is that of the next step.
        Counts as `job.step()` too. CoveyError when a round of a tensor is under way. SystemExit when the job was to
        end, and has a checkpoint now; not where the script has more to do before the next step (`may_end`)."""
        self._check_process(f"step {self.step} was not ended")
        if self._unchecked and self._carried is None:
            self._check_own()
        self.save_if_asked()
        (self._healing if self._carried is None else self._carried).end(_held(self._script.get()))
        if (ended := self._stop.ended(self.step)) is not None:
            self._script.stepped(ended)
        if may_end:
            self.end_if_all_stop()


def _difference(one: Any, other: Any) -> str:
    """Where two values of JSON differ first, as Python writes it: `['state']['inc']`; empty: as a whole."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next((f"[{key!r}]{_difference(one[key], other[key])}" for key in one if one[key] != other[key]), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return next((f"[{at}]{_difference(each, other[at])}" for at, each in enumerate(one) if each != other[at]), "")
    return ""


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
    stop: StopsAndSaves = StopsAndSaves(),
) -> JobState:
    """The state of `JobClient.state`; ends the process where that says so. With more ranks than `gathers_max`,
    neighbours keep each rank's own values. `carry` makes the ranks that a process of an elastic job carries. `extra`:
    nothing is left to do for this process once others have ended: they had every part of every step."""
    me = me._replace(alike=stop.alike)
    saved = None if stop.place is None else stop.opened(stop.place)
    if stop.place is not None and not me.incarnation:
        checkpoint.check(stop.place, saved, script.get(), os.environ)
    if saved is not None and not me.incarnation:
        _check_saved(saved, me.world_size, stop.made)
        me = me._replace(step=saved.about.step)
        tensors.tell(f"goes on with step {me.step}, from {saved.path}")
    if not 0 <= me.step < STEPS_MAX:
        raise ValueError(f"the first step is from 0 to {STEPS_MAX - 1}, not {me.step}")

    def make(far: BlockRounds) -> Healing:
        gather = None
        if me.world_size > 1:
            gather = OwnGather(me.rank, me.world_size, me.step, far, stop.wants, me.world_size <= gathers_max)
            gather.begins(0 if saved is None else saved.about.number, bool(me.incarnation), stop.place is not None)
            if saved is not None and gather.has_owns:
                gather.go_on_with(Owns(me.step, saved.owns(me.world_size)))
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
            mine = found.own
            if mine is None and saved is not None and saved.about.step == found.step:
                mine = saved.own_of(me.rank)  # it was lost in the first step
            script.load(found.arrays, mine if carry is None else None)
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
    elif saved is not None:
        try:
            arrays = saved.arrays(script.get())
            (stop.load or script.load)(arrays, saved.own_of(me.rank) if carry is None else None)
        except (CoveyError, KeyError, ValueError) as error:
            why = error.why if isinstance(error, CoveyError) else f"it does not fit this script: {error!r}"
            raise checkpoint.refused(saved.path, why) from error
        if carried:
            carried[0].own_saved = saved.owns(me.world_size)[me.rank] or None
    gather = healing.machine.gather
    stop = stop._replace(
        stops=stop.wants if gather is None else lambda: gather.stops,
        boundary=healing.boundary,
        own=own if carried else None,
        ranks=me.world_size,
        own_said=lambda: healing.machine.own_said,
        gathered=lambda mine: _gathered(tensors, mine),
        writes=lambda: 0 in carried[0].members if carried else me.rank == 0,
    )
    state = JobState(healing, script, carried[0] if carried else None, stop)
    state.end_if_all_stop()
    return state


def _check_saved(saved: checkpoint.OpenedCheckpoint, ranks: int, made: str) -> None:
    """CoveyError when a job of so many ranks, with this kind of script, cannot continue from this checkpoint."""
    if saved.about.made != made:
        why = f"{saved.about.made} made it, and this is a script of {made}"
        raise checkpoint.refused(saved.path, why)
    if saved.about.ranks != ranks and any(saved.about.own):
        why = f"it has what {saved.about.ranks} ranks have of their own, and this job has {ranks} ranks"
        raise checkpoint.refused(saved.path, why, f"submit the job with --workers {saved.about.ranks}")


def _gathered(tensors: TensorClient, mine: bytes) -> Sequence[bytes]:
    """What is each rank's own, gathered in rounds of all ranks: where neighbours keep it otherwise."""
    rank, ranks = tensors.rank, tensors.world_size
    if ranks == 1:
        return (mine,)
    sizes = np.zeros(ranks, np.float32)
    sizes[rank] = len(mine)
    sizes = tensors.push_pull("covey/saved sizes", sizes)
    size = max(4, -(-int(sizes.max()) // 4) * 4)
    rows = bytearray(ranks * size)
    rows[rank * size : rank * size + len(mine)] = mine
    whole = tensors.push_pull(f"covey/saved {size}", np.frombuffer(rows, np.float32)).tobytes()
    return [whole[at * size : at * size + int(sizes[at])] for at in range(ranks)]
