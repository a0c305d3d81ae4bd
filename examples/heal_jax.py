#!/usr/bin/env python3
"""A JAX training whose workers may be killed, one or some at a time, and which ends as if nothing had been lost.

    agentctl submit --workers 4 -- python examples/heal_jax.py
    kill -9 PID            # of one of the four, meanwhile: the other three wait, and do not begin again

A small network learns which of two spirals a point is on, with Adam written out, and noise on random points. Two things
are Covey's: `covey.jax.state` holds what is learnt and each worker's own key, and `covey.jax.pmean` averages.
"""

import argparse
import hashlib
from typing import Any

import jax
import jax.numpy as jnp

import covey
import covey.jax

BATCH, NOISE, RATE = 64, 0.02, 0.01


def network(key: Any) -> dict[str, Any]:
    first, second = jax.random.split(key)
    return {
        "in": jax.random.normal(first, (2, 64)),
        "bias": jnp.zeros(64),
        "out": jax.random.normal(second, (64, 1)) / 8,
    }


def points(key: Any) -> tuple[Any, Any]:
    """Random points, shape (BATCH, 2), and on which spiral each is, 0 or 1."""
    turns, sides, noise = jax.random.split(key, 3)
    side = jax.random.bernoulli(sides, shape=(BATCH,)).astype(jnp.float32)
    turn = 3 * jnp.pi * jnp.sqrt(jax.random.uniform(turns, (BATCH,)))
    angle = turn + jnp.pi * side
    drawn = jnp.stack([turn * jnp.cos(angle), turn * jnp.sin(angle)], 1) / 10
    return drawn + NOISE * jax.random.normal(noise, drawn.shape), side


def loss(params: dict[str, Any], drawn: Any, side: Any) -> Any:
    found = (jnp.sin(drawn @ params["in"] + params["bias"]) @ params["out"])[:, 0]
    return jnp.mean(jnp.logaddexp(0, found) - side * found)


@jax.jit
def updated(learnt: dict[str, Any], gradients: Any) -> dict[str, Any]:
    """A step of Adam."""
    each, count = jax.tree_util.tree_map, learnt["count"] + 1
    first = each(lambda old, g: 0.9 * old + 0.1 * g, learnt["first"], gradients)
    second = each(lambda old, g: 0.999 * old + 0.001 * g * g, learnt["second"], gradients)
    rate = RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    params = each(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), learnt["params"], first, second)
    return {"params": params, "first": first, "second": second, "count": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="(default %(default)s)")
    args = parser.parse_args()

    with covey.join() as job:
        params = network(jax.random.key(0))
        zeros = jax.tree_util.tree_map(jnp.zeros_like, params)
        learnt = {"params": params, "first": zeros, "second": zeros, "count": jnp.zeros((), jnp.int32)}
        state = covey.jax.state(learnt, own=jax.random.key(100 + job.rank), job=job, checkpoint=True)
        if state.step:
            print(f"rank {job.rank}: took over from one that was lost, and goes on with step {state.step}", flush=True)
        slope = jax.jit(jax.value_and_grad(loss))
        for step in state.steps(args.steps):
            key, state.own = jax.random.split(state.own)
            value, gradients = slope(state.tree["params"], *points(key))
            state.tree = updated(state.tree, covey.jax.pmean(gradients, job=job))
            if job.rank == 0 and step % 100 == 0:
                print(f"step {step}: loss {float(value):.4f}", flush=True)
        found = hashlib.sha256()
        for leaf in jax.tree_util.tree_leaves(state.tree):
            found.update(leaf.tobytes())
        print(f"rank {job.rank}: parameters {found.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
