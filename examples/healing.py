#!/usr/bin/env python3
"""A job whose ranks may be lost: digits again, with an optimizer, noise and a random batch on each worker.

    agentctl submit --workers 4 -- python examples/healing.py
    kill -9 one of the workers (agentctl job shows their processes), any of them, as often as you like

A worker that is killed is started again alone; the others wait for it and do not begin anew. Every run prints the same
digest, however many workers were lost on the way: the state comes from the others, and so does each worker's own
random generator, which all gather in each step. (On processors for which BLAS chooses the same kernel.)

When the job must leave its GPUs, all workers end after the same step and save in the folder checkpoints; once it starts
again they continue from there.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path

# One thread adds in one order. This must be set before numpy is imported.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
from digits import DIGITS, Array, accuracy, load, probabilities

import covey

BATCH, NOISE = 64, np.float32(0.1)
WIDTH = 8192
"""Features of an image: the weights have 320 KB, so that they lie in several Blocks, at several owners, on several
hosts."""
RATE, BETA1, BETA2, EPSILON = np.float32(0.01), np.float32(0.9), np.float32(0.999), np.float32(1e-8)


class Model:
    """Weights (width, 10) and bias (10,), with the moments of Adam."""

    def __init__(self, width: int) -> None:
        shapes = {"weights": (width, DIGITS), "bias": (DIGITS,)}
        self.arrays = {
            f"{kind} {name}": np.zeros(shape, np.float32)
            for kind in ("value", "first", "second")
            for name, shape in shapes.items()
        }

    def load(self, arrays: dict[str, Array]) -> None:
        for name, array in self.arrays.items():
            array[:] = arrays[name]

    def step(self, number: int, gradients: dict[str, Array]) -> None:
        for name, g in gradients.items():
            value, first, second = (self.arrays[f"{kind} {name}"] for kind in ("value", "first", "second"))
            first[:] = BETA1 * first + (1 - BETA1) * g
            second[:] = BETA2 * second + (1 - BETA2) * g * g
            rate = RATE * np.sqrt(1 - BETA2**number) / (1 - BETA1**number)
            value -= rate * first / (np.sqrt(second) + EPSILON)

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"".join(array.tobytes() for array in self.arrays.values())).hexdigest()


class Features:
    """Fixed random features, the same on every worker: the component of an image in each of `WIDTH` directions, if it
    is positive, else 0."""

    def __init__(self, width: int) -> None:
        self._directions = np.random.default_rng(0).standard_normal((64, width), np.float32) / np.float32(32)

    def of(self, images: Array) -> Array:
        """Features of the images, shape (images, width)."""
        return np.maximum(images @ self._directions, np.float32(0))


def batch(images: Array, draws: np.random.Generator) -> tuple[Array, Array]:
    """Images that this worker draws, with noise on them, and their labels."""
    chosen = draws.integers(len(images), size=BATCH)
    return images[chosen] + NOISE * draws.standard_normal((BATCH, images.shape[1]), np.float32), chosen


def gradients(model: Model, seen: Array, wanted: Array) -> dict[str, Array]:
    error = (probabilities(seen, model.arrays["value weights"], model.arrays["value bias"]) - wanted) / BATCH
    return {"weights": seen.T @ error, "bias": error.sum(axis=0)}


def train(steps: int, step_s: float, out: Path | None, width: int) -> None:
    images, labels, test_images, test_labels = load()
    wanted = np.eye(DIGITS, dtype=np.float32)[labels]
    with covey.join() as job:
        model, features, draws = Model(width), Features(width), np.random.default_rng(job.rank)

        def take_over(arrays: dict[str, Array], own: dict[str, object] | None) -> None:
            model.load(arrays)
            if own is not None:
                draws.bit_generator.state = own

        state = job.state(lambda: model.arrays, take_over, own=lambda: draws.bit_generator.state, checkpoint=True)
        for step in state.steps(steps):
            seen, chosen = batch(images, draws)
            state.drawn()
            time.sleep(step_s)
            mine = gradients(model, features.of(seen), wanted[chosen])
            handles = {name: job.tensors.push(name, g, mean=True) for name, g in mine.items()}
            model.step(step + 1, {name: handle.wait() for name, handle in handles.items()})
        if job.rank == 0:
            weights, bias = model.arrays["value weights"], model.arrays["value bias"]
            right = accuracy(weights, bias, features.of(test_images), test_labels)
            print(f"state sha256={model.digest}  accuracy={right:.4f}", flush=True)
            if out is not None:
                out.write_text(model.digest)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="(default %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="each takes at least so long")
    parser.add_argument("--width", type=int, default=WIDTH, help="features of an image (default %(default)s)")
    parser.add_argument("--out", type=Path, help="rank 0 writes the digest here")
    options = parser.parse_args()
    train(options.steps, options.step_seconds, options.out, options.width)
