#!/usr/bin/env python3
"""Lasso (least squares with few weights that are not zero) on data in Blocks, by as many processes as there are.

    agentctl submit --workers 2..8 -- python examples/elastic/lasso.py
    agentctl scale JOB 6        (and kill -9 a process, or a host, whenever you like)

Each step is one of proximal gradient descent: each rank adds up the gradient of its Blocks, and the sum of all moves
the weights, which are then drawn towards zero. Every run with 8 ranks prints one digest, whatever happened on the way.
`--check` computes the same in one process with one large array, apart from Covey, and compares. (On processors for
which BLAS chooses the same kernel.)
"""

import argparse
import hashlib
import os
import time
from pathlib import Path
from typing import Any

# One thread adds in one order. This must be set before numpy is imported.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import numpy.typing as npt

import covey

Array = npt.NDArray[Any]
PENALTY, RATE = 0.05, 0.2
TOLERANCE = 1e-9
"""Largest difference of a weight from the reference: sums in another order differ in the last bits."""


def rows_of(k: int, rows: int, features: int) -> dict[str, Array]:
    """Block k: rows, and what they should give. One feature in eight matters."""
    rng = np.random.default_rng([2, k])
    x = rng.standard_normal((rows, features), np.float32)
    truth = np.where(np.arange(features) % 8 == 0, np.random.default_rng(0).standard_normal(features), 0)
    return {"x": x, "y": x @ truth + 0.1 * rng.standard_normal(rows)}


def shrunk(w: Array, by: float) -> Array:
    return np.asarray(np.sign(w) * np.maximum(np.abs(w) - by, 0))


def train(options: argparse.Namespace) -> None:
    w = np.zeros(options.features)
    n = options.blocks * options.rows

    def load(arrays: dict[str, Array], own: None) -> None:
        w[:] = arrays["w"]

    with covey.join() as job:
        size = f"{options.rows * (options.features * 4 + 8) // 1024 + 1} KiB"
        data = job.data(options.blocks, lambda k: rows_of(k, options.rows, options.features), bytes=size)
        state = job.state(lambda: {"w": w}, load, enter=lambda rank, own: None)
        for step in state.steps(options.steps):
            for rank in job.carried(step):
                with rank:
                    mine = np.zeros_like(w)
                    for _, block in data.of(rank):
                        mine += block["x"].T @ (block["x"] @ w - block["y"])
                    sums = rank.push("gradient", mine)
                time.sleep(options.step_seconds)
            w[:] = shrunk(w - RATE * sums.wait() / n, RATE * PENALTY)
        print(f"data blocks={data.blocks} loaded={data.loaded} moved={data.moved}", flush=True)
        print(f"state sha256={hashlib.sha256(w.tobytes()).hexdigest()}", flush=True)
        if job.rank == 0 and options.check:
            check(w, options)
        if job.rank == 0 and options.out is not None:
            options.out.write_text(hashlib.sha256(w.tobytes()).hexdigest())


def reference(options: argparse.Namespace) -> Array:
    """The weights that one process finds from X'X and X'y of all rows."""
    blocks = [rows_of(k, options.rows, options.features) for k in range(options.blocks)]
    x = np.concatenate([each["x"] for each in blocks]).astype(np.float64)
    y = np.concatenate([each["y"] for each in blocks])
    squares, products = x.T @ x / len(x), x.T @ y / len(x)
    w = np.zeros(options.features)
    for _ in range(options.steps):
        moved = w - RATE * (squares @ w - products)
        w = np.maximum(moved - RATE * PENALTY, 0) + np.minimum(moved + RATE * PENALTY, 0)
    return w


def check(w: Array, options: argparse.Namespace) -> None:
    found = reference(options)
    worst = float(np.abs(w - found).max() / np.abs(found).max())
    if not worst <= TOLERANCE:  # NaN is no result
        raise SystemExit(f"the weights differ from the reference by {worst:.1e}, and {TOLERANCE:.0e} is allowed")
    print(f"checked against one process: the weights differ by {worst:.1e} at most", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="(default %(default)s)")
    parser.add_argument("--blocks", type=int, default=32, help="Blocks of the data (default %(default)s)")
    parser.add_argument("--rows", type=int, default=256, help="rows of a Block (default %(default)s)")
    parser.add_argument("--features", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="each rank takes at least so long in each step")
    parser.add_argument("--check", action="store_true", help="compare with a computation in one process")
    parser.add_argument("--out", type=Path, help="the process of rank 0 writes the digest here")
    train(parser.parse_args())
