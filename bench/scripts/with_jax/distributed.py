"""JAX on two processes that know each other by jax.distributed: one array over both, summed by XLA's collectives."""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from points import READ_S, say_digest, spiral

jax.config.update("jax_cpu_collectives_implementation", "gloo")
address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
jax.distributed.initialize(address, num_processes=ranks, process_id=rank)
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))


@jax.jit
def step_of(w, x, y):
    def loss(w):
        found = jnp.tanh(x @ w["in"]) @ w["out"]
        return jnp.mean(jnp.logaddexp(0, found) - y * found)

    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w))


w = {"in": jax.random.normal(jax.random.key(0), (2, 64)), "out": jnp.zeros(64)}
for step in range(200):
    mine = range((step * ranks + rank) * 8, (step * ranks + rank + 1) * 8)
    points, sides = zip(*map(spiral, mine), strict=True)
    time.sleep(8 * READ_S)
    x = jax.make_array_from_process_local_data(sharding, np.array(points, np.float32))
    y = jax.make_array_from_process_local_data(sharding, np.array(sides, np.float32))
    w = step_of(w, x, y)
say_digest(*[each.addressable_data(0) for each in w.values()])
