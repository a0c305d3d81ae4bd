"""JAX's gradients summed by Covey: real processes of one core each, memory that they share (make check TORCH=1)."""

import functools
import os
import subprocess
import sys

import pytest

from covey.tensors.same_host import layout as tensor_layout

pytest.importorskip("jax")
SCRIPT = """
import hashlib, sys, types
rank, ranks, memory, way = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
import jax, jax.numpy as jnp, numpy as np
import covey.jax
from covey.core.ids import JobId
from covey.tensors.same_host.memory import TensorMemory
from covey.job.tensors import TensorClient
def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"]) @ params["v"][0]) ** 2)
def stepped(params, found):
    return jax.tree_util.tree_map(lambda one, gradient: one - 0.1 * gradient, params, found)
def batch(rank, step):
    return jax.random.normal(jax.random.PRNGKey(100 * rank + step), (64, 64))
keys = jax.random.split(jax.random.PRNGKey(0), 2)
params = {"w": jax.random.normal(keys[0], (64, 3000)) * 0.05, "v": [jax.random.normal(keys[1], (3000, 8)) * 0.05]}
gradients = jax.jit(jax.grad(loss))
if way == "alone":
    for step in range(5):
        each = [gradients(params, batch(one, step)) for one in range(ranks)]
        added = jax.tree_util.tree_map(lambda one, other: np.asarray(one) + np.asarray(other), *each)
        params = stepped(params, jax.tree_util.tree_map(lambda one: one / np.float32(ranks), added))
else:
    client = TensorClient(JobId("j1"), rank, ranks, lambda epoch, why, table: None, undecided=True)
    client.memory_is(TensorMemory(memory, rank, ranks))
    job = types.SimpleNamespace(tensors=client, world_size=ranks)
    mean = lambda found: covey.jax.pmean(found, job=job)
    if way == "jit":
        mean = jax.jit(mean)
        whole = jax.jit(lambda start: jax.lax.scan(
            lambda total, one: (covey.jax.psum(total + one, job=job), None), start, jnp.ones(5)))
        total = 0
        for one in range(5):
            total = ranks * (total + 1)
        assert whole(jnp.zeros(()))[0] == total
    for step in range(5):
        params = stepped(params, mean(gradients(params, batch(rank, step))))
    jax.block_until_ready(params)
    short = {"b": jnp.array([1.5, 2.25], jnp.bfloat16), "h": jnp.array([3.0], jnp.float16)}
    averaged = lambda tree: covey.jax.pmean(tree, name="short", job=job)
    found = (jax.jit(averaged) if way == "jit" else averaged)(short)
    told = {name: (str(array.dtype), array.tolist()) for name, array in found.items()}
    assert told == {"b": ("bfloat16", [1.5, 2.25]), "h": ("float16", [3.0])}, told
    client.leave()
    client.close()
print(hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(params))).hexdigest())
"""
WRONG = """
import jax.numpy as jnp
import covey.jax
covey.jax.psum({"a": [jnp.zeros(3), jnp.zeros(3, jnp.int32)]})
"""


@functools.cache
def parameters(way: str, ranks: int = 2) -> str:
    """The checksum that all ranks end with."""
    memory = tensor_layout.make(ranks)
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    cores = sorted(os.sched_getaffinity(0))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(ranks), str(memory), way],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            pass_fds=(memory,),
            preexec_fn=lambda rank=rank: os.sched_setaffinity(0, {cores[rank % len(cores)]}),  # type: ignore[misc]
        )
        for rank in range(1 if way == "alone" else ranks)
    ]
    os.close(memory)
    ended = [each.communicate(timeout=100) for each in started]
    assert [each.returncode for each in started] == [0] * len(started), ended
    (found,) = {str(out) for out, _ in ended}
    return found


@pytest.mark.parametrize("way", [pytest.param("eager", marks=pytest.mark.long), "jit"])
def test_ranks_of_one_core_train_to_the_same_bits_as_one_process(way: str) -> None:
    """The script asks for the average between jitted calls, in one, and beside a sum within a loop of XLA."""
    assert parameters(way) == parameters("alone")


def test_a_leaf_that_cannot_be_added_is_named() -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", WRONG], capture_output=True, text=True, check=False, env=env)
    assert "psum['a'][1] is int32; Covey adds float32, float64, float16, bfloat16" in done.stderr
