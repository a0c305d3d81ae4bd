"""Which step of a model's tensors a rank saves, decided as it pushes.

A rank has the result of step s in one of two memories, and that of step s+1 goes to the other one; what came with step
s is overwritten only once this rank has pushed for step s+2. So a tensor of step s may be copied while the rank
computes and the next round is under way:

    result of step s --push for s+1: copying begins--> ... --push for s+2: copying must be over--> overwritten

One save has all tensors with an optimizer, each of the same number of steps. All ranks push the same rounds, so each
decides alike, without a message: every so many steps, and at steps that they were told ahead (`asked`).
"""

from collections.abc import Collection
from typing import NamedTuple


class SaveDecision(NamedTuple):
    """What to do before a push of one tensor."""

    copy: int | None = None
    """Copy the tensor, for the save of this step."""
    whole: bool = False
    """With this tensor, the save has all of them."""
    given_up: int | None = None
    """This step is not saved: tensors of it are missing, `missing`."""
    missing: tuple[str, ...] = ()


class SaveSteps:
    """The steps that one rank saves."""

    def __init__(self, every: int | None, began: int) -> None:
        """`every`: number of steps from one save to the next; None: only steps that are asked for. `began`: the step
        with which this start of the job began, which is saved already, or is none."""
        self.every, self.began = every, began
        self.asked: set[int] = set()
        """Steps that are saved besides."""
        self.step: int | None = None
        """The step whose tensors are being copied; None: no step is."""
        self._copied: set[str] = set()
        self._pushed: dict[str, int] = {}
        """For each tensor, the number of its steps when it was pushed last."""

    @property
    def newest(self) -> int:
        """The newest step for which it was decided whether it is saved, by any tensor."""
        return max(self._pushed.values(), default=self.began)

    def ask(self, step: int) -> bool:
        """Save this step too. False: it is too late for that."""
        if step <= self.newest:
            return False
        self.asked.add(step)
        return True

    def is_due(self, step: int) -> bool:
        """Is this step saved?"""
        return step > self.began and (step in self.asked or (self.every is not None and step % self.every == 0))

    def before_push(self, name: str, step: int, names: Collection[str]) -> SaveDecision:
        """Decide before the push of a tensor whose `step`th result is here. `names`: all tensors with an optimizer."""
        self._pushed[name] = step
        given_up, missing = None, tuple[str, ...]()
        if self.step is not None and step > self.step and (self.is_due(step) or name not in self._copied):
            given_up, missing = self.step, tuple(sorted(set(names) - self._copied))
            self._end()
        if self.step is None and self.is_due(step):
            self.step = step
        if self.step != step or name in self._copied:
            return SaveDecision(None, False, given_up, missing)
        self._copied.add(name)
        whole = self._copied.issuperset(names)
        if whole:
            self._end()
        return SaveDecision(step, whole, given_up, missing)

    def _end(self) -> None:
        assert self.step is not None
        self.asked = {step for step in self.asked if step > self.step}
        self.step = None
        self._copied.clear()
