#!/usr/bin/env python3
"""Multinomial logistic regression on data in Blocks, by as many processes as there are at the time.

    agentctl submit --workers 2..8 -- python examples/elastic/mlr.py
    agentctl scale JOB 6        (and kill -9 a process, or a host, whenever you like)

The rows are made from a seed, in Blocks; each belongs to one of the job's ranks, and is in the process that carries
that rank. In a step each rank adds up the gradient of its Blocks, or with `--batches 4` of a fourth of them in turn.
Every run with 8 ranks prints one digest, whatever happened on the way. `--check` computes the same in one process with
one large array, apart from Covey, and compares. (On processors for which BLAS chooses the same kernel.)
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
CLASSES = 5
RATE, DECAY = 0.5, 1e-3
TOLERANCE = 1e-9
"""Largest difference of a weight from the reference: sums in another order differ in the last bits."""


def rows_of(k: int, rows: int, features: int) -> dict[str, Array]:
    """Block k: rows with a constant first feature, and their classes."""
    rng = np.random.default_rng([1, k])
    x = rng.standard_normal((rows, features), np.float32)
    x[:, 0] = 1
    truth = np.random.default_rng(0).standard_normal((features, CLASSES))
    return {"x": x, "y": np.argmax(x @ truth + rng.gumbel(size=(rows, CLASSES)), axis=1).astype(np.int32)}


def gradient(w: Array, x: Array, y: Array) -> Array:
    """The sum over these rows of the gradient of the log loss."""
    scores = x @ w
    scores -= scores.max(axis=1, keepdims=True)
    p = np.exp(scores)
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return np.asarray(x.T @ p)


def batch_of(rank: int, step: int, ranks: int, options: argparse.Namespace) -> list[int]:
    """The Blocks of this rank that belong to a step."""
    mine = range(rank, options.blocks, ranks)
    return [k for k in mine if (k // ranks) % options.batches == step % options.batches]


def train(options: argparse.Namespace) -> None:
    w = np.zeros((options.features, CLASSES))

    def load(arrays: dict[str, Array], own: None) -> None:
        w[:] = arrays["w"]

    with covey.join() as job:
        size = f"{(options.rows * (options.features + 1) * 4) // 1024 + 1} KiB"
        data = job.data(
            options.blocks,
            lambda k: rows_of(k, options.rows, options.features),
            bytes=size,
            spill=options.spill,
            resident=options.resident,
        )
        state = job.state(lambda: {"w": w}, load, enter=lambda rank, own: None)
        for step in state.steps(options.steps):
            for rank in job.carried(step):
                with rank:
                    mine = np.zeros_like(w)
                    for k in batch_of(rank, step, job.world_size, options):
                        mine += gradient(w, data[k]["x"], data[k]["y"])
                    sums = rank.push("gradient", mine)
                time.sleep(options.step_seconds)
            n = options.rows * sum(len(batch_of(rank, step, job.world_size, options)) for rank in range(job.world_size))
            w -= RATE * (sums.wait() / max(1, n) + DECAY * w)
        print(f"data blocks={data.blocks} loaded={data.loaded} moved={data.moved}", flush=True)
        if data.spilled:
            print(data.spilled, flush=True)
        print(f"state sha256={hashlib.sha256(w.tobytes()).hexdigest()}", flush=True)
        if job.rank == 0 and options.check:
            check(w, job.world_size, options)
        if job.rank == 0 and options.out is not None:
            options.out.write_text(hashlib.sha256(w.tobytes()).hexdigest())


def reference(ranks: int, options: argparse.Namespace) -> Array:
    """The weights that one process finds with all rows in one array; a batch is every so many of `ranks` Blocks."""
    blocks = [rows_of(k, options.rows, options.features) for k in range(options.blocks)]
    all_x = np.concatenate([each["x"] for each in blocks]).astype(np.float64)
    all_wanted = np.eye(CLASSES)[np.concatenate([each["y"] for each in blocks])]
    batch = np.arange(len(all_x)) // (ranks * options.rows) % options.batches
    w = np.zeros((options.features, CLASSES))
    for step in range(options.steps):
        here = batch == step % options.batches
        x, wanted = all_x[here], all_wanted[here]
        e = np.exp(x @ w)
        w = w - RATE * (x.T @ (e / e.sum(axis=1)[:, None] - wanted) / max(1, len(x)) + DECAY * w)
    return w


def check(w: Array, ranks: int, options: argparse.Namespace) -> None:
    found = reference(ranks, options)
    worst = float(np.abs(w - found).max() / np.abs(found).max())
    if not worst <= TOLERANCE:  # NaN is no result
        raise SystemExit(f"the weights differ from the reference by {worst:.1e}, and {TOLERANCE:.0e} is allowed")
    print(f"checked against one process: the weights differ by {worst:.1e} at most", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="(default %(default)s)")
    parser.add_argument("--blocks", type=int, default=32, help="Blocks of the data (default %(default)s)")
    parser.add_argument("--rows", type=int, default=256, help="rows of a Block (default %(default)s)")
    parser.add_argument("--features", type=int, default=32, help="(default %(default)s)")
    parser.add_argument("--batches", type=int, default=1, help="steps of a pass over the data (default %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="each rank takes at least so long in each step")
    parser.add_argument("--spill", choices=["disk", "remote"], help="where Blocks go that have no room in memory")
    parser.add_argument("--resident", help="how much memory Blocks may take in a process, as '64 MiB'; with --spill")
    parser.add_argument("--check", action="store_true", help="compare with a computation in one process")
    parser.add_argument("--out", type=Path, help="the process of rank 0 writes the digest here")
    train(parser.parse_args())
