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
rooms = []
def push(name, array, out, mean):
    said.append(f"push {name[-5:]}")
    rooms.append(out)
    def wait():
        np.multiply(array, array.dtype.type(2), out=out)
        return rooms.pop()
    return types.SimpleNamespace(wait=wait)
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
gone = jnp.ones(5)
jax.jit(lambda x: x + 1, donate_argnums=0)(gone)
for refuse in (lambda tree: covey.jax.psum(tree, job=job), lambda tree: covey.jax.state(tree, job=job)):
    try:
        refuse({"w": gone})
    except ValueError as error:
        assert "['w'] was deleted, or donated to a jitted call" in str(error), error
    else:
        raise AssertionError("a donated array is let through")
for dtype in ("float32", "float16", "bfloat16"):
    large = jax.device_put(jnp.full((300, 512), 3, dtype), second)
    came = np.asarray(places.come_down([large])[0])
    assert came.ctypes.data == large.unsafe_buffer_pointer(), "numpy reads it where it is"
    addresses = set()
    for round in range(8):
        sums = covey.jax.psum({"w": large}, job=job)["w"]
        rooms.clear()
        assert sums.devices() == {second} and sums.dtype == dtype and (np.asarray(sums) == 6).all()
        addresses.add(sums.unsafe_buffer_pointer())
    assert len(addresses) <= 3, "the memory of results that nobody has is used again"
    held = [covey.jax.psum({"w": large}, job=job)["w"] for _ in range(4)]
    rooms.clear()
    assert len({each.unsafe_buffer_pointer() for each in held}) == 4, "that of others is not"
    given = jax.jit(lambda x: x - 6, donate_argnums=0)(held[0])
    again = covey.jax.psum({"w": large}, job=job)["w"]
    assert (np.asarray(given) == 0).all() and (np.asarray(again) == 6).all()
places.HOST = "a platform that numpy does not read"
put = jax.device_put
def noticed(leaf, to, **more):
    if getattr(to, "memory_kind", None):
        said.append(f"comes down to {to.memory_kind}")
    return put(leaf, to, **more)
jax.device_put = noticed
began = type(there["a"]).copy_to_host_async
type(there["a"]).copy_to_host_async = lambda array: (said.append("comes down"), began(array))[1]
for kind in ("pinned_host", "no kind of this device"):
    said.clear()
    places.LOCKED = kind
    found = covey.jax.psum(there, job=job)
    down = "comes down to pinned_host" if kind == "pinned_host" else "comes down"
    assert said == [down] * 2 + ["push ['a']", "push ['b']", "push ['c']"], said
    assert found["a"].devices() == {second} and found["a"].sharding.memory_kind == "device", found
    assert (np.asarray(found["a"]) == 2).all()
print("held")
"""


def test_arrays_of_several_devices_come_down_together_and_results_go_back_to_theirs() -> None:
    environ = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environ, check=False)
    assert done.stdout == "held\n", done.stderr[-3000:]
