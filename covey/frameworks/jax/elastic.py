"""A JAX training of an elastic job: one process computes for the ranks that it carries (`covey.job.carrying`).

    state = covey.jax.state({"params": params}, own=lambda rank: jax.random.key(rank), elastic=True)
    for step in state.steps(1000):
        for rank in state.carried():
            with rank:
                key, state.own = jax.random.split(state.own)
                mean = rank.pmean(gradients(state.tree["params"], batch(key)))
        state.tree = updated(state.tree, mean.wait())

The tree is the same on all ranks; `own` is what the rank has that was entered: its key, its place in the data. Inside
`with rank:` `state.own` may be set at any time, since what a rank gives is pushed at the end. Draw nothing from it
outside.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from covey.core.errors import CoveyError
from covey.frameworks.jax.places import check_place, come_down, put_back
from covey.frameworks.jax.state import HealedTree
from covey.tensors.numbers.tensor_wire import TYPES

if TYPE_CHECKING:
    from covey.job.carrying import CarriedRank
    from covey.job.client import JobClient
    from covey.job.job_state import Place
    from covey.job.tensors import TensorHandle


class SummedTree:
    """A tree that a rank gave in a step, and its sum or average over all ranks."""

    def __init__(self, tree: Any, name: str, mean: bool) -> None:
        found, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._leaves = [leaf for _, leaf in found]
        self._names = [f"{name}{jax.tree_util.keystr(path)}" for path, _ in found]
        self._mean = mean
        self._handles: list[TensorHandle] = []
        self._sums: Any = None
        for each, leaf in zip(self._names, self._leaves, strict=True):
            dtype = jax.numpy.result_type(leaf)
            if dtype.name not in TYPES:
                raise TypeError(f"{each} is {dtype}; Covey adds {', '.join(TYPES)}")
            check_place(each, leaf)
        come_down(self._leaves)

    def push(self, rank: "CarriedRank") -> None:
        """Push it for the rank, which is entered."""
        self._handles = [
            rank.push(name, np.asarray(leaf, jax.numpy.result_type(leaf)), mean=self._mean)
            for name, leaf in zip(self._names, self._leaves, strict=True)
        ]

    def wait(self) -> Any:
        """The sum or average, with the structure that was given and on its devices. CoveyError before the loop over
        `carried` is over. A second call returns the same."""
        if self._leaves and not self._handles:
            what, why = f"{self._names[0]!r} has no sum yet", "it is pushed at the end of `with rank:`"
            raise CoveyError(what, why, "wait for it after the loop over state.carried()")
        if self._sums is None:
            found = [handle.wait() for handle in self._handles]
            leaves = [put_back(array, leaf) for array, leaf in zip(found, self._leaves, strict=True)]
            self._sums = jax.tree_util.tree_unflatten(self._structure, leaves)
        return self._sums


class TreeRank(int):
    """A rank that this process computes for in this step, as a number. Inside `with rank:` the `own` of the state is
    that rank's."""

    _carried: "CarriedRank"
    _given: list[SummedTree]

    def __new__(cls, carried: "CarriedRank") -> "TreeRank":
        made = super().__new__(cls, carried)
        made._carried, made._given = carried, []
        return made

    def __enter__(self) -> "TreeRank":
        self._carried.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._carried.__exit__(kind, error, at)
            return
        with ExitStack() as leaving:
            leaving.push(self._carried)
            for each in self._given:
                each.push(self._carried)

    def psum(self, tree: Any, *, name: str = "psum") -> SummedTree:
        """Give this rank's tree, to be added over all ranks: as `covey.jax.psum`, outside of `jit`. The sum is here
        after the loop, whichever rank's result is waited for. TypeError as there."""
        return self._gives(SummedTree(tree, name, False))

    def pmean(self, tree: Any, *, name: str = "pmean") -> SummedTree:
        """Give this rank's tree, to be averaged over all ranks: as `psum`, divided by the number of ranks."""
        return self._gives(SummedTree(tree, name, True))

    def _gives(self, given: SummedTree) -> SummedTree:
        self._given.append(given)
        return given


class ElasticTree(HealedTree):
    """The state that `covey.jax.state(.., elastic=True)` returns. The script sets `tree` in each step, and `own` for
    each rank."""

    def __init__(self, tree: Any, own: Callable[[int], Any] | None, job: "JobClient") -> None:
        super().__init__(tree, None if own is None else own(job.rank))
        self._own_at_first, self._job = own, job

    @property
    def own(self) -> Any:
        """What the rank's own is that was entered."""
        return self._own

    @own.setter
    def own(self, own: Any) -> None:
        self._own = own

    def carried(self) -> Iterator[TreeRank]:
        """The ranks that this process computes for in this step: compute in `with rank:` for each. Ends when what all
        ranks of the job gave is here."""
        return map(TreeRank, self._job.carried(self.step))

    def begin(self, job: "JobClient", step: int, checkpoint: "Place | bool" = False) -> None:
        own, stop = None if self._own_at_first is None else self._own_now, self._stops()
        enter = self._enter
        self._state = job.state(
            self._arrays, self._load, own=own, enter=enter, step=step, checkpoint=checkpoint, stop=stop
        )

    def _enter(self, rank: int, own: Any) -> None:
        if self._own_at_first is not None:
            self._own = self._own_at_first(rank)
            if own is not None:
                self._load_own(own)


def elastic_tree(
    tree: Any, own: Callable[[int], Any] | None, job: "JobClient", step: int, checkpoint: "Place | bool" = False
) -> ElasticTree:
    """The state of `covey.jax.state` with `elastic`. CoveyError where `own` cannot be called with a rank."""
    if own is not None and not callable(own):
        what, why = "ranks of this training cannot be carried by other processes", f"own= is a {type(own).__qualname__}"
        raise CoveyError(what, why, "give what returns a rank's own at first: own=lambda rank: jax.random.key(rank)")
    found = ElasticTree(tree, own, job)
    found.begin(job, step, checkpoint)
    return found
