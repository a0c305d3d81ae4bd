#!/usr/bin/env python3
"""A job whose number of processes changes while it runs: the training of `healing.py`, with 8 ranks.

    agentctl submit --workers 2..8 -- python examples/elastic.py
    agentctl scale JOB 6        (and kill -9 a process, or a host, whenever you like)

The job has 8 ranks for ever: each draws its own batches with its own generator. How many processes carry them changes:
a process loops over the ranks that it carries in a step, and other processes take ranks over. Every run prints the
digest that `agentctl submit --workers 8 -- python examples/healing.py` prints, whatever happened on the way. (On
processors for which BLAS chooses the same kernel.)
"""

import argparse
import time
from pathlib import Path
from typing import Any

import healing  # before numpy: it sets the number of threads
import numpy as np
from digits import DIGITS, Array, accuracy, load

import covey


class Draws:
    """The random generator of one rank at a time."""

    def __init__(self) -> None:
        self.now = np.random.default_rng()

    def enter(self, rank: int, own: Any) -> None:
        """Draw as this rank from now on. `own`: what `own` returned when it was left; None: it never drew."""
        self.now = np.random.default_rng(rank)
        if own is not None:
            self.now.bit_generator.state = own

    def own(self) -> Any:
        return self.now.bit_generator.state


def train(steps: int, step_s: float, out: Path | None, width: int) -> None:
    images, labels, test_images, test_labels = load()
    wanted = np.eye(DIGITS, dtype=np.float32)[labels]
    with covey.join() as job:
        model, features, draws = healing.Model(width), healing.Features(width), Draws()

        def take_over(arrays: dict[str, Array], own: None) -> None:
            model.load(arrays)

        state = job.state(lambda: model.arrays, take_over, own=draws.own, enter=draws.enter, checkpoint=True)
        for step in state.steps(steps):
            for rank in job.carried(step):
                with rank:
                    seen, chosen = healing.batch(images, draws.now)
                    mine = healing.gradients(model, features.of(seen), wanted[chosen])
                    handles = {name: rank.push(name, g, mean=True) for name, g in mine.items()}
                time.sleep(step_s)
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
    parser.add_argument("--step-seconds", type=float, default=0.0, help="each rank takes at least so long in each step")
    parser.add_argument("--width", type=int, default=healing.WIDTH, help="features of an image (default %(default)s)")
    parser.add_argument("--out", type=Path, help="the process of rank 0 writes the digest here")
    options = parser.parse_args()
    train(options.steps, options.step_seconds, options.out, options.width)
