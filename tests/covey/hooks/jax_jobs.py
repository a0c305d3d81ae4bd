"""The model of the tests' JAX scripts: six layers of `size` by `size`; the script sets `size`."""

import importlib.util

import pytest

NEEDS_JAX = [
    pytest.mark.jax,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="no jax here: make check TORCH=1"),
]
TRAIN = """
import jax, jax.numpy as jnp
keys = jax.random.split(jax.random.PRNGKey(1), 6)
weights = [jax.random.normal(key, (size, size)) * 0.05 for key in keys]
batch = jax.random.normal(keys[0], (size, size))
def loss(weights, batch):
    for weight in weights: batch = jnp.tanh(batch @ weight)
    return jnp.mean(batch ** 2)
@jax.jit
def train(weights, batch):
    return [w - 1e-3 * g for w, g in zip(weights, jax.grad(loss)(weights, batch))]
"""
