"""JAX in one process: a jitted step of gradient descent, and numpy's file of what is learnt each ten steps."""

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from points import READ_S, say_digest, spiral


@jax.jit
def step_of(w, x, y):
    def loss(w):
        found = jnp.tanh(x @ w["in"]) @ w["out"]
        return jnp.mean(jnp.logaddexp(0, found) - y * found)

    value, gradient = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradient), value


begin, w = 0, {"in": jax.random.normal(jax.random.key(0), (2, 64)), "out": jnp.zeros(64)}
if os.path.exists("weights.npz"):
    saved = np.load("weights.npz")
    begin, w = int(saved["step"]), {name: jnp.asarray(saved[name]) for name in w}
    print(f"continues with step {begin}", flush=True)
for step in range(begin, 200):
    points, sides = zip(*(spiral(step * 8 + each) for each in range(8)), strict=True)
    time.sleep(8 * READ_S)
    w, value = step_of(w, jnp.array(points), jnp.array(sides))
    if step % 10 == 9:
        print(f"step {step}: loss {float(value):.4f}", flush=True)
        np.savez("new.npz", step=step + 1, **w)
        os.replace("new.npz", "weights.npz")
say_digest(*w.values())
