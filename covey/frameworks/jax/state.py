"""A JAX training whose ranks may be lost: `covey.job.job_state` for trees instead of arrays.

    state = covey.jax.state({"params": params, "moments": optimizer.init(params)}, own=jax.random.key(rank))
    for step in state.steps(1000):
        key, state.own = jax.random.split(state.own)            # before anything is pushed
        grads = covey.jax.pmean(gradients(state.tree["params"], batch(key)))
        state.tree = updated(state.tree, grads)

The tree is the same on all ranks; `own` is what only this rank has: its keys, its place in the data. A rank that takes
over gets both as they were, and its loop begins with the step in which the others wait. Arrays of JAX never change, so
they are handed over without a copy; a jitted update must not donate its arguments, which a successor may be reading:
a step that begins with a donated one is refused.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from covey.core.errors import CoveyError
from covey.frameworks.jax.places import check_place, come_down, put_back
from covey.healing.likeness import Kernels, drawn, libraries
from covey.healing.state_pieces import CANNOT, SAME
from covey.job.job_state import StopsAndSaves
from covey.tensors.numbers.arrays import Array

if TYPE_CHECKING:
    from covey.job.client import JobClient
    from covey.job.job_state import JobState, Place

MADE = "covey/made"
"""Name of the array that describes the tree, as JSON; compared before anything is taken over."""
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Integer types, by bytes, in which numbers travel whose type numpy does not have."""


class HealedTree:
    """The state that `covey.jax.state` returns. The script sets `tree` and `own`, with the same structure each time."""

    def __init__(self, tree: Any, own: Any) -> None:
        self.tree, self._own = tree, own
        self._state: JobState | None = None
        self._made = _made(tree)

    @property
    def own(self) -> Any:
        return self._own

    @own.setter
    def own(self, own: Any) -> None:
        """Set this rank's own state; it goes to the ranks that keep it while this rank computes."""
        self._own = own
        if self._state is not None:
            self._state.drawn()

    @property
    def step(self) -> int:
        """Number of the step that this rank is in."""
        return self._begun.step

    def steps(self, stop: int) -> Iterator[int]:
        """Steps as in `covey.job.job_state.JobState.steps`; each waits for what the one before computes."""
        return self._begun.steps(stop)

    def done(self) -> None:
        """End the step, as in `covey.job.job_state.JobState.done`, where `steps` is not used."""
        self._begun.done()

    @property
    def _begun(self) -> "JobState":
        assert self._state is not None, "covey.jax.state begins it"
        return self._state

    @property
    def stopping(self) -> bool:
        """Whether the job ends with this step, as of `covey.job.job_state.JobState`."""
        return self._begun.stopping

    def save(self, path: "Place | None" = None) -> Path:
        """Save all that is needed to continue with the same bits, and return where, as of
        `covey.job.job_state.JobState.save`: once `tree` is as it will be at the step's end."""
        return self._begun.save(path)

    def begin(self, job: "JobClient", step: int, checkpoint: "Place | bool" = False) -> None:
        own = None if self._own is None else self._own_now
        self._state = job.state(self._arrays, self._load, own=own, step=step, checkpoint=checkpoint, stop=self._stops())

    def _stops(self) -> "StopsAndSaves":
        return StopsAndSaves(types=self._types, made="jax")

    def _types(self) -> dict[str, str]:
        """Leaves of bfloat16, which numpy does not have, as in `covey.healing.checkpoint.TYPES`."""
        return {name: "BF16" for name, leaf in _named(self.tree) if str(getattr(leaf, "dtype", "")) == "bfloat16"}

    def _arrays(self) -> dict[str, Array]:
        """The state as arrays, in JAX's own memory where that is the host's. CoveyError when the tree has another
        structure than at first."""
        made = _made(self.tree)
        if made != self._made:
            what, why = "the structure of this training's state has changed", _difference(made, self._made)
            raise CoveyError(what, why, "keep the structure, shapes and types that were given to covey.jax.state")
        named = _named(self.tree)
        leaves = come_down(jax.random.key_data(leaf) if _kind(leaf).is_key else leaf for _, leaf in named)
        found = {name: _stored(leaf) for (name, _), leaf in zip(named, leaves, strict=True)}
        return found | {MADE: np.frombuffer(json.dumps(made).encode(), np.uint8)}

    def _load(self, arrays: Mapping[str, Array], own: Any) -> None:
        theirs = json.loads(arrays[MADE].tobytes()) if MADE in arrays else {}
        if theirs != self._made:
            raise CoveyError(CANNOT, _difference(self._made, theirs), SAME)
        structure = jax.tree_util.tree_structure(self.tree)
        leaves = [_restored(arrays[name], like) for name, like in _named(self.tree)]
        self.tree = jax.tree_util.tree_unflatten(structure, leaves)
        if own is not None:
            self._load_own(own)

    def _own_now(self) -> list[Any]:
        return [
            [str(each.dtype), each.shape, _packed(each)] for each in map(_stored, jax.tree_util.tree_leaves(self.own))
        ]

    def _load_own(self, own: Any) -> None:
        """Load this rank's own state. CoveyError when its structure differs from what this process made."""
        leaves, structure = jax.tree_util.tree_flatten(self.own)
        stored = [_stored(leaf) for leaf in leaves]
        if [[str(each.dtype), list(each.shape)] for each in stored] != [each[:2] for each in own]:
            raise CoveyError(CANNOT, "what is its own has other parts than that of the lost rank", SAME)
        arrays = [_unpacked(data, each) for (_, _, data), each in zip(own, stored, strict=True)]
        restored = [_restored(array, leaf) for array, leaf in zip(arrays, leaves, strict=True)]
        self._own = jax.tree_util.tree_unflatten(structure, restored)


def healed(tree: Any, own: Any, job: "JobClient", step: int, checkpoint: "Place | bool" = False) -> HealedTree:
    """The state of `covey.jax.state`."""
    found = HealedTree(tree, own)
    found.begin(job, step, checkpoint)
    return found


def _named(tree: Any) -> list[tuple[str, Any]]:
    """Leaves of the tree, each with a name made of its place."""
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(f"tree{jax.tree_util.keystr(path)}", leaf) for path, leaf in found]


def _made(tree: Any) -> dict[str, str]:
    """A description of each leaf, by name. TypeError where one is on several devices, ValueError where one
    was donated or deleted."""
    for name, leaf in _named(tree):
        check_place(name, leaf)
    return {name: _words(leaf) for name, leaf in _named(tree)}


class _Kind(NamedTuple):
    is_key: bool
    is_array: bool


def _kind(leaf: Any) -> _Kind:
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    return _Kind(is_array and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key), is_array)


def _words(leaf: Any) -> str:
    if _kind(leaf).is_array:
        return f"{leaf.dtype} {tuple(leaf.shape)}"
    if type(leaf) not in (bool, int, float):
        why = f"a leaf is a {type(leaf).__qualname__}"
        raise CoveyError(
            "the state of this training cannot be sent to another process", why, "keep arrays, keys and numbers in it"
        )
    return type(leaf).__name__


def _stored(leaf: Any) -> Array:
    """The leaf in a type that numpy has."""
    array = np.asarray(jax.random.key_data(leaf) if _kind(leaf).is_key else leaf)
    return array if array.dtype.kind in "biufc" else array.view(WORDS[array.dtype.itemsize])


def _restored(array: Array, like: Any) -> Any:
    """The leaf that `_stored` was given; it must be `like` this one."""
    kind = _kind(like)
    if kind.is_key:
        return jax.random.wrap_key_data(put_back(array, jax.random.key_data(like)), impl=jax.random.key_impl(like))
    if not kind.is_array:
        return type(like)(array.item())
    whole = array.view(like.dtype).reshape(like.shape)
    return put_back(whole, like) if isinstance(like, jax.Array) else whole


def _packed(array: Array) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _unpacked(data: str, like: Array) -> Array:
    return np.frombuffer(base64.b64decode(data), like.dtype).reshape(like.shape)


def _difference(own: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The first difference between two descriptions, for people."""
    name = next(name for name in [*own, *theirs] if own.get(name) != theirs.get(name))
    return f"{name} here is {own.get(name, 'not there')}, and there {theirs.get(name, 'not there')}"


def _computed() -> list[Array]:
    """Results of kernels that most models use, to compare two processes."""

    def compute(a: Any, b: Any) -> Any:
        product = a @ b
        return product, jax.nn.softmax(product), jax.numpy.tanh(a).sum(0), jax.numpy.exp(b)

    return [np.asarray(each) for each in jax.jit(compute)(drawn(96, 130), drawn(130, 70))]


libraries["JAX"] = Kernels(jax.__version__, _computed)
