"""JAX arrays come from the device they are on, and results go back there; the devices here are two of the CPU's."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")
SCRIPT = """
import types
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import covey.jax
from covey.frameworks.jax import places, state
first, second = jax.devices()
said = []
def push(name, array, mean):
    said.append(f"push {name[-5:]}")
    return types.SimpleNamespace(wait=lambda: 2 * array)
job = types.SimpleNamespace(tensors=types.SimpleNamespace(push=push), world_size=2)
there = {"a": jax.device_put(jnp.ones(3), second), "b": jnp.ones(2), "c": np.ones(2, np.float32)}
found = covey.jax.psum(there, job=job)
assert [found[name].devices() for name in "abc"] == [{second}, {first}, {first}], found
assert all((np.asarray(each) == 2).all() for each in found.values())
assert places.is_on_host(there["a"]) and places.is_on_host(there["c"])
shards = NamedSharding(Mesh(jax.devices(), "d"), PartitionSpec("d"))
for refuse in (lambda tree: covey.jax.psum(tree, job=job), lambda tree: covey.jax.state(tree, job=job)):
    try:
        refuse({"w": jax.device_put(jnp.ones(4), shards)})
    except TypeError as error:
        assert "['w'] is on cpu:0, cpu:1; Covey adds arrays of one device a rank" in str(error), error
    else:
        raise AssertionError("several devices are let through")
key = jax.device_put(jax.random.key(3), second)
for like in (there["a"], key):
    again = state._restored(state._stored(like), like)
    assert again.devices() == {second} and again.dtype == like.dtype
places.HOST = "a platform that numpy does not read"
began = type(there["a"]).copy_to_host_async
type(there["a"]).copy_to_host_async = lambda array: (said.append("comes down"), began(array))[1]
said.clear()
covey.jax.psum(there, job=job)
assert said == ["comes down"] * 2 + ["push ['a']", "push ['b']", "push ['c']"], said
print("held")
"""


def test_arrays_of_several_devices_come_down_together_and_results_go_back_to_theirs() -> None:
    environ = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environ, check=False)
    assert done.stdout == "held\n", done.stderr[-3000:]
