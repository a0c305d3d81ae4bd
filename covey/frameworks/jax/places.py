"""JAX arrays and their devices: an array comes to host memory from its device, and its result goes back there.

An array of the CPU is read where it is. Others begin to come down together, before the first of them is waited for, so
their copies overlap; JAX has the host memory for them and keeps it with the array.
"""

from collections.abc import Iterable
from typing import Any

import jax

from covey.tensors.numbers.arrays import Array

HOST = "cpu"
"""JAX's platform whose arrays numpy can read in place."""


def is_on_host(leaf: Any) -> bool:
    """Whether numpy reads this leaf where it is."""
    return not isinstance(leaf, jax.Array) or all(device.platform == HOST for device in leaf.devices())


def check_place(name: str, leaf: Any) -> None:
    """TypeError where the leaf is on several devices: its parts are summed by JAX's own `psum` first."""
    if isinstance(leaf, jax.Array) and len(leaf.devices()) > 1:
        there = ", ".join(sorted(map(str, leaf.devices())))
        raise TypeError(f"{name} is on {there}; Covey adds arrays of one device a rank: sum or gather it there first")


def come_down(leaves: Iterable[Any]) -> None:
    """Begin to copy the leaves that are not in host memory to there; waits for nothing."""
    for leaf in leaves:
        if not is_on_host(leaf):
            leaf.copy_to_host_async()


def put_back(array: Array, like: Any) -> Any:
    """An array of JAX on the device of `like`; on the default one where that is no array of JAX."""
    if not isinstance(like, jax.Array):
        return jax.numpy.asarray(array)
    (device,) = like.devices()
    return jax.numpy.asarray(array, device=device)
