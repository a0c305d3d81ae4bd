"""JAX's gradients on a real GPU (`make gpu-check`): by page-locked memory that numpy reads in place, and back."""

import subprocess
import sys

import pytest

pytest.importorskip("jax")
pytestmark = pytest.mark.gpu
SCRIPT = """
import sys, types
import jax, jax.numpy as jnp, numpy as np
import covey.jax
from covey.frameworks.jax import places
if jax.default_backend() != "gpu":
    sys.exit(77)
def push(name, array, out, mean):
    return types.SimpleNamespace(wait=lambda: np.add(array, array, out=out))
job = types.SimpleNamespace(tensors=types.SimpleNamespace(push=push), world_size=2)
read_in_place = 0
for round in range(5):
    tree = {name: jnp.full((1000, 1001), round + 1, name) for name in ("float32", "float16", "bfloat16")}
    down = places.come_down(tree.values())
    assert {each.sharding.memory_kind for each in down} == {"pinned_host"}, down
    read_in_place += sum(np.asarray(each).ctypes.data == each.unsafe_buffer_pointer() for each in down)
    found = covey.jax.psum(tree, job=job)
    for name, each in found.items():
        assert each.devices() == tree[name].devices() and each.sharding.memory_kind == "device", each.sharding
        assert each.dtype == name and (np.asarray(each) == 2 * (round + 1)).all()
print("read in place", read_in_place, "of 15")
"""


def test_arrays_of_a_gpu_come_by_page_locked_memory() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=110)
    if done.returncode == 77:
        pytest.skip("JAX finds no CUDA device here: nothing of a GPU was tried")
    assert done.stdout == "read in place 15 of 15\n", done.stdout + done.stderr[-3000:]
