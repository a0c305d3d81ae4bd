"""JAX on two ranks, whose gradients Covey averages (`covey.jax.pmean`), with Covey's state."""

import time

import jax
import jax.numpy as jnp
from points import READ_S, say_digest, spiral

import covey
import covey.jax


@jax.jit
@jax.grad
def slope(w, x, y):
    found = jnp.tanh(x @ w["in"]) @ w["out"]
    return jnp.mean(jnp.logaddexp(0, found) - y * found)


with covey.join() as job:
    w = {"in": jax.random.normal(jax.random.key(0), (2, 64)), "out": jnp.zeros(64)}
    state = covey.jax.state(w, job=job, checkpoint=True)
    if state.step:
        print(f"continues with step {state.step}", flush=True)
    for step in state.steps(200):
        mine = range((step * 2 + job.rank) * 8, (step * 2 + job.rank + 1) * 8)
        points, sides = zip(*map(spiral, mine), strict=True)
        time.sleep(8 * READ_S)
        gradient = covey.jax.pmean(slope(state.tree, jnp.array(points), jnp.array(sides)), job=job)
        state.tree = jax.tree.map(lambda w, g: w - 0.1 * g, state.tree, gradient)
    say_digest(*state.tree.values())
