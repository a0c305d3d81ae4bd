"""JAX gradients summed or averaged by Covey: one line in a training step, inside or outside `jax.jit`.

    grads = jax.grad(loss)(params, batch)
    grads = covey.jax.pmean(grads)              # over all ranks of the job

Each leaf of a tree is a tensor of `covey.job.tensors`, named by its place in the tree, so it is added exactly once and
in a fixed order. All leaves are pushed before the first result is waited for.

Inside `jit` the step calls back with the arrays as XLA hands them over. `jax.experimental.io_callback` is not used: it
puts them on a device first, which waits for ever on a host with one core (jax-ml/jax issue 24255).

`covey.jax.state` keeps a training alive when ranks are lost (`covey.frameworks.jax.state`; examples/heal_jax.py),
with `elastic=True` also one whose processes come and go (`covey.frameworks.jax.elastic`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from covey.frameworks.jax.elastic import ElasticTree, elastic_tree
from covey.frameworks.jax.places import check_place, come_down, put_back, room_for
from covey.frameworks.jax.state import HealedTree, healed
from covey.job.this_job import joined
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.tensor_wire import TYPES

if TYPE_CHECKING:
    from covey.job.client import JobClient
    from covey.job.job_state import Place


def psum(tree: Any, *, name: str = "psum", job: "JobClient | None" = None) -> Any:
    """The sum of this tree of arrays over all ranks, with the same structure, shapes and types. Every rank calls it
    equally often and with the same `name`; two different trees must not share a name. `job`: this rank's job; without
    it, the one of `covey.join()`, made if there is none. The rank computes on one device, and results are there. A
    jitted step may still call back when its call has returned: wait for its results (`jax.block_until_ready`) before
    the job is left.

    TypeError, naming the leaf, where one is neither float32, float64, float16 nor bfloat16, or is on several devices;
    ValueError where one was donated or deleted.
    Errors of `TensorClient.push_pull` are raised unchanged; inside `jit`, JAX raises them as errors of a callback."""
    return _summed(tree, name, job, False)


def pmean(tree: Any, *, name: str = "pmean", job: "JobClient | None" = None) -> Any:
    """The average of this tree over all ranks: as `psum`, divided by the number of ranks and rounded once."""
    return _summed(tree, name, job, True)


@overload
def state(
    tree: Any,
    *,
    own: Any = None,
    job: "JobClient | None" = None,
    step: int = 0,
    checkpoint: "Place | bool" = False,
    elastic: Literal[False] = False,
) -> HealedTree: ...


@overload
def state(
    tree: Any,
    *,
    own: Callable[[int], Any] | None = None,
    job: "JobClient | None" = None,
    step: int = 0,
    checkpoint: "Place | bool" = False,
    elastic: Literal[True],
) -> ElasticTree: ...


def state(
    tree: Any,
    *,
    own: Any = None,
    job: "JobClient | None" = None,
    step: int = 0,
    checkpoint: "Place | bool" = False,
    elastic: bool = False,
) -> HealedTree:
    """From now on this rank may be lost: another process takes its place, gets here what the others hold, and continues
    in their step with the same bits. `tree`: arrays, keys and numbers that are the same on all ranks; `own`: a small
    tree that only this rank has. `job`: as in `psum`, before any other tensor; `step`: the first step.
    `checkpoint`: True, or a file: ranks continue from there, and save there when the job is asked to end, as of
    `JobClient.state`. In each step, set `tree` and `own` of the result. CoveyError where something cannot be handed
    over.

    `elastic`: this process computes for all ranks that it carries, and other processes come and go (`agentctl submit
    --workers A..B`). `own(rank)` returns what that rank has at first, such as a key made of its number; the loop is
    that of the result (`ElasticTree`)."""
    made = elastic_tree if elastic else healed
    return made(tree, own, joined(job), step, checkpoint)


def _summed(tree: Any, name: str, job: "JobClient | None", mean: bool) -> Any:
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [f"{name}{jax.tree_util.keystr(path)}" for path, _ in found]
    leaves = [leaf for _, leaf in found]
    for each, leaf in zip(names, leaves, strict=True):
        dtype = jax.numpy.result_type(leaf)
        if dtype.name not in TYPES:
            raise TypeError(f"{each} is {dtype}; Covey adds {', '.join(TYPES)}")
    client = joined(job)

    def summed(*arrays: Any) -> list[Array]:
        handles = []
        for each, array in zip(names, arrays, strict=True):
            mine = np.asarray(array, jax.numpy.result_type(array))
            handles.append(client.tensors.push(each, mine, out=room_for(mine), mean=mean))
        return [handle.wait() for handle in handles]

    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        results = _called_back.bind(*leaves, call=summed)
    else:
        for each, leaf in zip(names, leaves, strict=True):
            check_place(each, leaf)
        results = [put_back(array, leaf) for array, leaf in zip(summed(*come_down(leaves)), leaves, strict=True)]
    return jax.tree_util.tree_unflatten(structure, results)


def _lowered(ctx: Any, *arrays: Any, call: Any) -> Any:
    results, _, _ = mlir.emit_python_callback(
        ctx, call, None, list(arrays), ctx.avals_in, ctx.avals_out, has_side_effect=True, returns_token=False
    )
    return results


_called_back = Primitive("covey_sum")
_called_back.multiple_results = True
_called_back.def_abstract_eval(lambda *arrays, call: list(arrays))
mlir.register_lowering(_called_back, _lowered)
