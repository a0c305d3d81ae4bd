#!/usr/bin/env python3
"""Features that do not fit into memory: extracted, standardised and fitted, with a quarter of them local at a time.

    agentctl submit -- python examples/features.py --volume features          # in remote memory, 16 MiB of it local
    python examples/features.py                                               # the same in this host's own memory

Each of the 1,797 digits is shifted in nine ways, and 1,024 random Fourier features are taken of each (Rahimi and
Recht, 2007): 16,173 rows of 4 KiB, 63 MiB. Passes run over them: they are written, their columns' mean and deviation
found, and standardised in place; a ridge regression is fitted to those of the training images; then held-out rows are
looked up in random order. Both ways print the same digest of the weights: the content of a row does not depend on
where it was.

Only rows by index are used, so the script is the same where this host permits no userfaultfd.
"""

import argparse
import hashlib
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

# One thread adds in one order. This must be set before numpy is imported.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np

from covey.remote import RemoteArray

DATA = Path(__file__).parent / "data" / "digits.npz"
SHIFTS = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
FEATURES = 1024
BLOCK = 256
"""Rows of one block of work."""
HELD_OUT = 0.2
RIDGE = 10.0


def images() -> tuple[Any, Any]:
    """All digits as rows of 64 values from 0 to 1, and their labels."""
    with np.load(DATA) as found:
        return (found["images"] / 16).astype(np.float32), found["labels"].astype(np.int64)


def shifted(pixels: Any) -> Any:
    """Each image in all shifts, one after another, shape (9 n, 64)."""
    squares = pixels.reshape(-1, 8, 8)
    return np.stack([np.roll(squares, shift, (1, 2)).reshape(-1, 64) for shift in SHIFTS], 1).reshape(-1, 64)


def store_of(rows: int, args: argparse.Namespace) -> Any:
    """The array of features: remote, or in memory of this process that begins at a page too."""
    if args.volume is None:
        return np.frombuffer(mmap.mmap(-1, rows * FEATURES * 4), np.float32).reshape(rows, FEATURES)
    return RemoteArray(args.volume, (rows, FEATURES), "float32", local_budget=args.budget)


def blocks(rows: int) -> list[slice]:
    return [slice(at, min(at + BLOCK, rows)) for at in range(0, rows, BLOCK)]


def extract(store: Any, inputs: Any, rng: np.random.Generator) -> None:
    directions = rng.normal(0, 0.4, (64, FEATURES)).astype(np.float32)
    phases = rng.uniform(0, 2 * np.pi, FEATURES).astype(np.float32)
    for block in blocks(len(inputs)):
        store[block] = np.sqrt(2 / FEATURES, dtype=np.float32) * np.cos(inputs[block] @ directions + phases)


def standardise(store: Any, rows: int) -> None:
    total, squares = np.zeros(FEATURES), np.zeros(FEATURES)
    for block in blocks(rows):
        values = store[block].astype(np.float64)
        total += values.sum(0)
        squares += (values * values).sum(0)
    mean = total / rows
    deviation = np.sqrt(squares / rows - mean * mean) + 1e-9
    for block in blocks(rows):
        store[block] = ((store[block] - mean) / deviation).astype(np.float32)


def fit(store: Any, labels: Any, training: Any) -> Any:
    """Weights of the ridge regression on the training rows, shape (features, 10)."""
    square, product = RIDGE * np.eye(FEATURES), np.zeros((FEATURES, 10))
    for block in blocks(len(labels)):
        values = np.array(store[block], np.float64)[training[block]]
        square += values.T @ values
        product += values.T @ np.eye(10)[labels[block][training[block]]]
    return np.linalg.solve(square, product)


def accuracy(store: Any, labels: Any, held_out: Any, weights: Any, rng: np.random.Generator) -> float:
    """Share of held-out rows that are predicted right, looked up one by one in random order."""
    chosen = rng.permutation(np.flatnonzero(held_out))[:600]
    right = sum(int(np.argmax(store[int(row)].astype(np.float64) @ weights) == labels[row]) for row in chosen)
    return right / len(chosen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--volume", help="keep the features there: a volume's name, or the path of its socket")
    parser.add_argument("--budget", default="16 MiB", help="how much of it is local at most")
    args = parser.parse_args()
    rng = np.random.default_rng(20260101)
    pixels, digits = images()
    inputs, labels = shifted(pixels), np.repeat(digits, len(SHIFTS))
    held_out = np.repeat(rng.random(len(digits)) < HELD_OUT, len(SHIFTS))
    store = store_of(len(inputs), args)
    began_s = time.monotonic()
    extract(store, inputs, rng)
    standardise(store, len(inputs))
    weights = fit(store, labels, ~held_out)
    right = accuracy(store, labels, held_out, weights, rng)
    digest = hashlib.sha256(weights.tobytes()).hexdigest()[:16]
    where = "local" if args.volume is None else f"{store.way}, {args.budget} of {store.nbytes / 2**20:.0f} MiB local"
    print(f"{len(inputs)} rows ({where}): {time.monotonic() - began_s:.1f} s", file=sys.stderr)
    if args.volume is not None:
        print(f"counts {store.counts()}", file=sys.stderr)
        store.close()
    print(f"weights {digest}, {100 * right:.1f} % of held-out digits right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
