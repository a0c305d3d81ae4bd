#!/usr/bin/env python3
"""Non-negative matrix factorization (V = L R') on data in Blocks, by as many processes as there are at the time.

    agentctl submit --workers 2..8 -- python examples/elastic/nmf.py
    agentctl scale JOB 6        (and kill -9 a process, or a host, whenever you like)

A Block is some rows of V. The model is R, with the factors of the columns; the factors L of a Block's rows follow from
the Block and R, and are found anew in each step, so that nothing but R has to be kept. Both are found by the
multiplicative updates of Lee and Seung: each rank adds up V'L and L'L of its Blocks, and the sums of all update R.
Every run with 8 ranks prints one digest, whatever happened on the way. `--check` computes the same in one process with
one large matrix, apart from Covey, and compares. (On processors for which BLAS chooses the same kernel.)
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
FACTORS = 4
UPDATES = 10
"""Updates of the row factors in each step."""
TINY = 1e-12
TOLERANCE = 1e-6
"""Largest difference of a factor from the reference: products of many steps carry on what sums in another order differ
by."""


def rows_of(k: int, rows: int, columns: int) -> Array:
    """Block k: rows of a matrix that has few factors, with noise."""
    rng = np.random.default_rng([3, k])
    right = np.random.default_rng(0).random((columns, FACTORS))
    return np.asarray(rng.random((rows, FACTORS)) @ right.T + 0.01 * rng.random((rows, columns)), np.float32)


def first_factors(columns: int) -> Array:
    return np.random.default_rng(1).random((columns, FACTORS)) + 0.1


def row_factors(v: Array, right: Array) -> Array:
    """The factors of these rows, from the factors of the columns."""
    left, products, squares = np.ones((len(v), FACTORS)), v @ right, right.T @ right
    for _ in range(UPDATES):
        left *= products / (left @ squares + TINY)
    return left


def train(options: argparse.Namespace) -> None:
    right = first_factors(options.columns)

    def load(arrays: dict[str, Array], own: None) -> None:
        right[:] = arrays["right"]

    with covey.join() as job:
        size = f"{options.rows * options.columns * 4 // 1024 + 1} KiB"
        data = job.data(options.blocks, lambda k: rows_of(k, options.rows, options.columns), bytes=size)
        state = job.state(lambda: {"right": right}, load, enter=lambda rank, own: None)
        for step in state.steps(options.steps):
            for rank in job.carried(step):
                with rank:
                    products, squares = np.zeros((options.columns, FACTORS)), np.zeros((FACTORS, FACTORS))
                    for _, v in data.of(rank):
                        left = row_factors(v, right)
                        products += v.T @ left
                        squares += left.T @ left
                    sums = rank.push("products", products), rank.push("squares", squares)
                time.sleep(options.step_seconds)
            right *= sums[0].wait() / (right @ sums[1].wait() + TINY)
        print(f"data blocks={data.blocks} loaded={data.loaded} moved={data.moved}", flush=True)
        print(f"state sha256={hashlib.sha256(right.tobytes()).hexdigest()}", flush=True)
        if job.rank == 0 and options.check:
            check(right, options)
        if job.rank == 0 and options.out is not None:
            options.out.write_text(hashlib.sha256(right.tobytes()).hexdigest())


def reference(options: argparse.Namespace) -> Array:
    """The factors of the columns that one process finds with all rows in one matrix."""
    v = np.concatenate([rows_of(k, options.rows, options.columns) for k in range(options.blocks)]).astype(np.float64)
    r = first_factors(options.columns)
    for _ in range(options.steps):
        left = np.ones((v.shape[0], FACTORS))
        for _ in range(UPDATES):
            left = left * np.einsum("ij,jf->if", v, r) / (left @ (r.T @ r) + TINY)
        r = r * np.einsum("ij,if->jf", v, left) / (r @ (left.T @ left) + TINY)
    return r


def check(right: Array, options: argparse.Namespace) -> None:
    found = reference(options)
    worst = float(np.abs(right - found).max() / np.abs(found).max())
    if not worst <= TOLERANCE:  # NaN is no result
        raise SystemExit(f"the factors differ from the reference by {worst:.1e}, and {TOLERANCE:.0e} is allowed")
    print(f"checked against one process: the factors differ by {worst:.1e} at most", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="(default %(default)s)")
    parser.add_argument("--blocks", type=int, default=32, help="Blocks of the data (default %(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="rows of a Block (default %(default)s)")
    parser.add_argument("--columns", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="each rank takes at least so long in each step")
    parser.add_argument("--check", action="store_true", help="compare with a computation in one process")
    parser.add_argument("--out", type=Path, help="the process of rank 0 writes the digest here")
    train(parser.parse_args())
