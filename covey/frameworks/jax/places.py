"""JAX arrays and their devices: an array comes to host memory from its device, and its result goes back there.

    CPU     numpy reads the array where it is. The result is received in memory that XLA can use as it is (aligned to
            64 bytes), so it becomes an array without a copy; that memory is used again once nobody has the array.
    others  the array begins to come to page-locked host memory, which XLA has and uses again (memory kind
            `pinned_host`), and numpy reads it there. All arrays of a tree begin before the first of them is waited for,
            so their copies overlap. A device without that kind has JAX's own copies.

Arrays of JAX never change, but a jitted call that donates them ends them: such an array is refused by name.
"""

import ctypes
import math
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from covey.tensors.numbers.arrays import Array

HOST = "cpu"
"""JAX's platform whose arrays numpy can read in place."""
LOCKED = "pinned_host"
"""JAX's kind of host memory that a device copies to by itself."""
ALIGNED = 64
"""Bytes to which memory must be aligned that XLA uses as it is."""
LEAST_BYTES = 64 << 10
"""Least bytes of a result that is received in memory that is used again: smaller ones cost less to copy."""
KEPT_MAX = 2
"""Most unused pieces of memory of one size: one for the result of this step while the script has that of the last."""
_kept: defaultdict[int, deque[bytearray]] = defaultdict(lambda: deque(maxlen=KEPT_MAX))


def is_on_host(leaf: Any) -> bool:
    """Whether numpy reads this leaf where it is."""
    return not isinstance(leaf, jax.Array) or all(device.platform == HOST for device in leaf.devices())


def check_place(name: str, leaf: Any) -> None:
    """TypeError where the leaf is on several devices: its parts are summed by JAX's own `psum` first. ValueError where
    it was given away."""
    if not isinstance(leaf, jax.Array):
        return
    if leaf.is_deleted():
        raise ValueError(
            f"{name} was deleted, or donated to a jitted call; give it to Covey first, or take it out of donate_argnums"
        )
    if len(leaf.devices()) > 1:
        there = ", ".join(sorted(map(str, leaf.devices())))
        raise TypeError(f"{name} is on {there}; Covey adds arrays of one device a rank: sum or gather it there first")


def come_down(leaves: Iterable[Any]) -> list[Any]:
    """The leaves, those of other devices on their way to host memory, where numpy reads them (`np.asarray`); waits for
    nothing."""
    return [leaf if is_on_host(leaf) else _comes_down(leaf) for leaf in leaves]


def _comes_down(leaf: Any) -> Any:
    (device,) = leaf.devices()
    if any(memory.kind == LOCKED for memory in device.addressable_memories()):
        return jax.device_put(leaf, leaf.sharding.with_memory_kind(LOCKED))
    leaf.copy_to_host_async()
    return leaf


def room_for(like: Array) -> Array:
    """An array like this one that XLA can use as it is, for `put_back`. Its memory is used again once no array refers
    to it."""
    if like.nbytes < LEAST_BYTES:
        return np.empty(like.shape, like.dtype)
    kept = _kept[like.nbytes]
    try:
        memory = kept.popleft()
    except IndexError:
        memory = bytearray(like.nbytes + ALIGNED)
    lease = (ctypes.c_char * len(memory)).from_buffer(memory)
    weakref.finalize(lease, kept.append, memory).atexit = False
    start = -ctypes.addressof(lease) % ALIGNED
    flat = np.frombuffer(memoryview(lease), np.uint8, like.nbytes, start)
    found: Array = flat.view(like.dtype).reshape(like.shape)
    return found


def put_back(array: Array, like: Any) -> Any:
    """An array of JAX on the device of `like`; on the default one where that is no array of JAX. `array` must not
    change any more: where XLA can, it uses its memory."""
    device = None if not isinstance(like, jax.Array) else next(iter(like.devices()))
    if math.prod(array.shape) and array.ctypes.data % ALIGNED == 0:
        return jax.device_put(array, device, may_alias=True)
    return jax.numpy.asarray(array, device=device)
