"""The parts of a step in which several optimizers step: a GAN's two, actor's and critic's, the first of them twice.

A step is one turn of `state.steps()`, or ends with `state.done()`. A part of it ends with an optimizer's step, once the
script computes gradients again; each part is a step of `job.state`. A rank that is lost in a later part cannot begin
there, since what its script had computed in earlier ones is gone. So its successor begins with the step, and the parts
that others have behind them are done again without them:

    step 7          forward, backward, D.step()  |  forward, backward, G.step()
    others hold     state at the beginning of step 7, results of part 0
    successor       takes both, computes part 0 with the results that it has, and pushes from part 1 on

For that each rank keeps a copy of the state at the beginning of the step, made before the first optimizer steps, and
the results of parts that are done. Where there is one model, as with Muon and AdamW, no part is expected to follow
another, so nothing is copied before one has; a rank that is lost in that first step makes the job begin again.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from covey.core.errors import CoveyError
from covey.frameworks.torch.gradients import CANNOT_HEAL
from covey.frameworks.torch.state import MADE, BegunState, LaterArrays, TrainingState, WholeState
from covey.frameworks.torch.values.plain_values import bytes_array
from covey.healing.state_pieces import CANNOT, FROM_CHECKPOINT
from covey.job.tensors import TensorClient, TensorHandle
from covey.tensors.numbers.arrays import Array

PART, RESULT = "covey/part", "covey/result/"
UNENDED_MAX = 128
"""Most parts of a first step that nothing has ended: more are many steps, of a script that does not say where they
end."""
END_STEPS = "loop over state.steps(n), or call state.done() at the end of each step"


class PartResult:
    """A result of a part that others have behind them."""

    def __init__(self, found: Array, out: Array | None) -> None:
        self._found, self._out = found, out

    def wait(self) -> Array:
        """The result, in its place."""
        if self._out is None:
            return self._found.copy()
        self._out[...] = self._found.reshape(self._out.shape)
        return self._out


class PartHandle:
    """A round of this part."""

    def __init__(self, handle: TensorHandle, came: Callable[[Array], object]) -> None:
        self._handle, self._came = handle, came

    def wait(self) -> Array:
        """Wait for the result. Errors as of `push_pull`."""
        found = self._handle.wait()
        self._came(found)
        return found


class StepParts:
    """Where this rank is in its step, what it keeps of it, and the tensors of its parts: `push` is that of a
    TensorClient, and everything else of one is here too."""

    def __init__(self, tensors: TensorClient, contents: TrainingState, copies: bool) -> None:
        """`copies`: whether a copy of the state is kept from the first step on."""
        self._tensors, self._contents = tensors, contents
        self.copies = copies
        self.step = 0
        """Number of the step, counted by the script."""
        self.number = 0
        """Number of the part in the step."""
        self.first_live = 0
        """The part in which the others are; parts before it are done again."""
        self.is_over = False
        """Whether the script has ended the step, and nothing of the next one was computed."""
        self.by_script = False
        """Whether the script says where steps end."""
        self.saves = False
        """Whether the state is asked for at the end of the step, to be saved."""
        self._was_saved = False
        self._stepped: list[int] = []
        """Numbers of the optimizers that have stepped in this step."""
        self._results: list[dict[str, Array]] = []
        """Results of the parts before `first_live`, and of those done since, by name."""
        self._now: dict[str, Array] = {}
        self._stopping: list[bool] = []
        """By part: what `stopping` was last, where the script has asked."""
        self._begun: BegunState | None = None
        self._kept: WholeState | None = None
        """The copy of the state at the beginning of this step."""
        self._memory: Mapping[str, Any] = {}
        """Tensors of the newest copy."""
        self._wanted: tuple[Callable[[], Any], Any] | None = None
        self._is_lost = False
        """Whether the state at the beginning of this step is gone."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensors, name)

    @property
    def is_again(self) -> bool:
        """Whether this part is done again, with results that are here."""
        return self.number < self.first_live

    @property
    def begins_step(self) -> bool:
        """Whether the state is that of a step's beginning."""
        return not self.number and not self.first_live

    # ---- what others get ----

    def arrays(self) -> Mapping[str, Array]:
        """What others need to be where this rank is; at the end of a step that is saved, the next one's beginning."""
        if self._contents.first is None:
            return self._contents.arrays()
        if self.saves:
            whole = self._contents.whole(self._contents.look())
            return {**self._contents.arrays_of(whole), PART: self._about(self.step + 1, 0, [])}
        if self._is_lost:
            why = f"something followed an optimizer's step in step {self.step}, and nobody had expected that"
            return {MADE: self._contents.made_array, PART: bytes_array(json.dumps({"lost": why}))}
        begun = self._begun = self._contents.look() if self._begun is None else self._begun
        return LaterArrays(lambda: self._made(begun))

    def _made(self, begun: BegunState) -> dict[str, Array]:
        whole = self._contents.whole(begun) if self._kept is None else self._kept
        results = {
            f"{RESULT}{part}/{name}": each[name]
            for part, each in enumerate(self._results[: self.number])
            for name in sorted(each)
        }
        about = self._about(self.step, self.number, self._stopping)
        return {**self._contents.arrays_of(whole), **results, PART: about}

    def _about(self, step: int, number: int, stopping: list[bool]) -> Array:
        about = {"step": step, "part": number, "stopping": stopping[:number], "copies": self.copies}
        return bytes_array(json.dumps(about))

    def load(self, arrays: Mapping[str, Array], elsewhere: bool) -> None:
        """Take over what another rank's `arrays` gave, or a checkpoint. CoveyError as of `TrainingState.load`, and when
        nobody holds the state."""
        about = json.loads(arrays[PART].tobytes()) if PART in arrays else {}
        if why := about.get("lost"):
            raise CoveyError(CANNOT, why, FROM_CHECKPOINT)
        self._contents.load(arrays, elsewhere)
        if self._contents.first is None:
            return
        self.step, self.first_live, self.copies = about["step"], about["part"], about["copies"]
        self._stopping = about["stopping"]
        self._results = [{} for _ in range(self.first_live)]
        for name, array in arrays.items():
            if name.startswith(RESULT):
                part, _, of = name.removeprefix(RESULT).partition("/")
                self._results[int(part)][of] = array

    def drew(self, now: Callable[[], Any], wanted: Any) -> None:
        """In the last part that is done again, `now` is to return what is `wanted` when something is pushed first."""
        self._wanted = now, wanted

    # ---- in a step ----

    def repeats(self) -> None:
        """Something is pushed. CoveyError where random numbers were not drawn as in the process before."""
        if self._wanted is not None and self.number + 1 == self.first_live:
            (now, wanted), self._wanted = self._wanted, None
            if now() != wanted:
                raise self.unlike("random generators are not where they were")

    def push(self, name: str, array: Array, *, out: Array | None = None, **more: Any) -> PartHandle | PartResult:
        """Push a tensor, as a TensorClient does. CoveyError where a part that is done again had none."""
        if not self.is_again:
            return PartHandle(self._tensors.push(name, array, out=out, **more), lambda found: self._came(name, found))
        self.repeats()
        found = self._results[self.number].get(name)
        if found is None:
            raise self.unlike(f"tensor {name!r} was not pushed in it before")
        return PartResult(found, out)

    def _came(self, name: str, found: Array) -> None:
        if self.copies and name not in self._now:
            self._now[name] = found.copy()

    def steps(self, optimizer: int) -> None:
        """This optimizer is about to step. CoveyError where it is not known whether a step ends between."""
        if not self.by_script:
            is_second = optimizer in self._stepped and self._stepped[-1] != optimizer
            if is_second or len(self._stepped) > UNENDED_MAX:
                why = "optimizers step in turn, and it is not known with which of them a step of the training ends"
                raise CoveyError(CANNOT_HEAL, why, END_STEPS)
        self._stepped.append(optimizer)
        if self.copies and self._kept is None and self._begun is not None:
            self._kept = self._contents.copied(self._begun, self._memory)
            self._memory = self._kept.tensors

    def stopping(self, ask: Callable[[], bool]) -> bool:
        """Whether the job ends with this step, as this part's others were told; `ask` asks them now."""
        if self.is_again:
            return self._stopping[self.number]
        found = ask()
        self._stopping += [found] * (self.number + 1 - len(self._stopping))
        self._stopping[self.number] = found
        return found

    def saved(self) -> None:
        """The script has saved the state, as that of the step's end."""
        self._was_saved = True

    def ends_part(self) -> bool:
        """Begin the next part; returns whether others are told. CoveyError where the step was saved as done."""
        if self._was_saved:
            why = f"step {self.step} was saved, and went on: whoever continues from there leaves its rest out"
            raise CoveyError(
                "the checkpoint is not that of a step's end", why, "call state.save() at the end of a step"
            )
        was_again = self.is_again
        if not was_again:
            self._results.append(self._now)
            self._stopping += [False] * (self.number + 1 - len(self._stopping))
        if not self.copies:
            self._is_lost = self.copies = True
            self._tensors.tell(
                f"has no copy of the state at the beginning of step {self.step}, since nothing had followed an "
                "optimizer's step before: a rank lost in this step makes the job begin again; later ones are kept"
            )
        self._now = {}
        self.number += 1
        return not was_again

    def begins_again(self) -> None:
        """The state at the beginning of this step is that of now; what was pushed before is of no further use."""
        self._begun = self._kept = None
        self._now = {}

    def ends_step(self) -> None:
        """Begin the next step. CoveyError where this one was to have more parts."""
        if self.is_again:
            raise self.unlike("the script ended the step without it")
        self.step += 1
        self.number = self.first_live = 0
        self._results, self._now, self._stopping, self._stepped = [], {}, [], []
        self._begun = self._kept = None
        self.is_over = self._was_saved = self._is_lost = False

    def unlike(self, why: str) -> CoveyError:
        """The error of a script that does not do the same again."""
        what = f"part {self.number} of step {self.step} cannot be done again: {why}"
        next_ = "let what a step does follow from the state, the data of the step, and the kept random generators alone"
        return CoveyError(CANNOT_HEAL, what, next_)
