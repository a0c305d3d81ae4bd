#!/usr/bin/env python3
"""Handwritten digits by multinomial logistic regression, trained by several workers: a small, real Covey job.

    agentctl submit --workers 4 -- python examples/digits.py --out /tmp/digits.npy
    python examples/digits.py --sequential 4                  # the same, in one process, without Covey
    ... --optimizer adam                                      # or momentum: either way

Every worker holds a part of the 1,438 training images and computes its part of the gradient; the aggregator adds the
parts in a fixed order (0 with 1, 2 with 3, then these sums) to the parameters it keeps. `--sequential N` does these
additions in the same order in one process, so it ends with the same parameters to the bit, however often an aggregator
was lost on the way. (Between processors for which BLAS chooses the same kernel, and in the same environment:
OPENBLAS_CORETYPE chooses too.) With an optimizer workers push gradients, and the aggregator makes a step with their
sum.
"""

import argparse
import hashlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

# One thread adds in one order. This must be set before numpy is imported.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

DATA = Path(__file__).resolve().parent / "data" / "digits.npz"
HELD_OUT_EVERY = 5
"""Every fifth image is held out: 359 of 1,797."""
DIGITS = 10
LEARNING_RATE = {"none": 0.5, "momentum": 0.1, "adam": 0.01}
MOMENTUM, BETA1, BETA2, EPSILON = 0.9, 0.9, 0.999, 1e-8
REPORT_EVERY = 50
"""Steps between two reports of loss and accuracy."""


class Part:
    """One worker's share of the training images: every `world_size`-th one, from `rank` on."""

    def __init__(
        self, images: Array, labels: npt.NDArray[np.uint8], rank: int, world_size: int, optimizer: str = "none"
    ) -> None:
        self.images = np.ascontiguousarray(images[rank::world_size])
        self.wanted = np.eye(DIGITS, dtype=np.float32)[labels[rank::world_size]]
        self.share = np.float32((1 if optimizer != "none" else -LEARNING_RATE["none"]) / len(images))

    def deltas(self, weights: Array, bias: Array) -> tuple[Array, Array, float]:
        """What this worker adds to weights (64, 10) and bias (10,), or its part of their gradients for an optimizer;
        and the mean loss of its images before that."""
        likely = probabilities(self.images, weights, bias)
        loss = -float(np.log(np.maximum((likely * self.wanted).sum(axis=1), np.float32(1e-12))).mean())
        error = likely - self.wanted
        return self.share * (self.images.T @ error), self.share * error.sum(axis=0), loss


def probabilities(images: Array, weights: Array, bias: Array) -> Array:
    """Probability of each digit for each image, shape (images, 10)."""
    scores = images @ weights + bias
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    return likely / likely.sum(axis=1, keepdims=True)


def load(path: Path = DATA) -> tuple[Array, npt.NDArray[np.uint8], Array, npt.NDArray[np.uint8]]:
    """Training images (n, 64) of 0..1 and labels, then the held-out ones."""
    with np.load(path, allow_pickle=False) as data:
        images, labels = data["images"].astype(np.float32) / np.float32(16), data["labels"]
    held_out = np.arange(len(labels)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


def accuracy(weights: Array, bias: Array, images: Array, labels: npt.NDArray[np.uint8]) -> float:
    """Part of the images whose most likely digit is right."""
    return float((probabilities(images, weights, bias).argmax(axis=1) == labels).mean())


def result_line(weights: Array, bias: Array, right: float) -> str:
    digest = hashlib.sha256(weights.tobytes() + bias.tobytes()).hexdigest()
    return f"parameters sha256={digest}  accuracy={right:.4f}"


def save(path: Path, weights: Array, bias: Array) -> None:
    """The parameters, shape (65, 10): weights, then bias. The file appears whole or not at all."""
    beside = path.with_name(f".{path.name}.part")
    with beside.open("wb") as file:
        np.save(file, np.vstack([weights, bias[np.newaxis]]), allow_pickle=False)
    beside.replace(path)


def sequential(workers: int, steps: int, optimizer: str = "none") -> tuple[Array, Array]:
    """The reference: N workers' deltas added in the same order, in one process."""
    images, labels, _, _ = load()
    parts = [Part(images, labels, rank, workers, optimizer) for rank in range(workers)]
    weights, bias = start()
    kept = [[np.zeros_like(each)] * 2 for each in (weights, bias)]
    for step in range(1, steps + 1):
        deltas = [part.deltas(weights, bias) for part in parts]
        weights = after(optimizer, step, weights, in_order([delta[0] for delta in deltas]), kept[0])
        bias = after(optimizer, step, bias, in_order([delta[1] for delta in deltas]), kept[1])
    return weights, bias


def after(optimizer: str, step: int, w: Array, g: Array, kept: list[Array]) -> Array:
    """The parameters after this step, whose sum is `g`; `kept`: moments, which change."""
    rate = LEARNING_RATE[optimizer]
    if optimizer == "none":
        return w + g
    if optimizer == "momentum":
        kept[0] = MOMENTUM * kept[0] + g
        return w - rate * kept[0]
    kept[0] = BETA1 * kept[0] + (1 - BETA1) * g
    kept[1] = BETA2 * kept[1] + (1 - BETA2) * (g * g)
    return w - (rate / (1 - BETA1**step)) * kept[0] / (np.sqrt(kept[1] / (1 - BETA2**step)) + EPSILON)


def in_order(arrays: list[Array]) -> Array:
    """Sum of the arrays two by two, then these sums two by two, until there is one; an odd one is taken over alone."""
    while len(arrays) > 1:
        odd = arrays[len(arrays) // 2 * 2 :]
        arrays = [left + right for left, right in zip(arrays[::2], arrays[1::2], strict=False)] + odd
    return arrays[0]


def start() -> tuple[Array, Array]:
    return np.zeros((64, DIGITS), np.float32), np.zeros(DIGITS, np.float32)


def distributed(
    steps: int, step_s: float, out: Path | None, say: Callable[[str], None], optimizer: str = "none"
) -> None:
    """Train in this process, which is one rank of a job."""
    import covey

    rate = LEARNING_RATE[optimizer]
    update = {
        "none": None,
        "momentum": covey.SGD(rate, momentum=MOMENTUM),
        "adam": covey.Adam(rate, BETA1, BETA2, EPSILON),
    }[optimizer]
    images, labels, test_images, test_labels = load()
    with covey.join() as job:
        part = Part(images, labels, job.rank, job.world_size, optimizer)
        weights, bias = start()
        weights = job.tensors.model("weights", weights, update=update)
        bias = job.tensors.model("bias", bias, update=update)
        for step in range(1, steps + 1):
            began = time.monotonic()
            more_weights, more_bias, loss = part.deltas(weights, bias)
            if step_s:
                time.sleep(max(0.0, step_s - (time.monotonic() - began)))
            weights = job.tensors.push_pull("weights", more_weights)
            bias = job.tensors.push_pull("bias", more_bias)
            if step % REPORT_EVERY == 0 or step == steps:
                right = accuracy(weights, bias, test_images, test_labels)
                job.step(step, loss=loss, accuracy=right)
                if job.rank == 0:
                    say(f"step {step} of {steps}  loss={loss:.4f}  accuracy={right:.4f}")
            else:
                job.step(step)
        if job.rank == 0:
            if out is not None:
                save(out, weights, bias)
            say(result_line(weights, bias, accuracy(weights, bias, test_images, test_labels)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000, help="of gradient descent (default %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="computing takes at least this long per step")
    parser.add_argument("--optimizer", choices=sorted(LEARNING_RATE), default="none", help="(default %(default)s)")
    parser.add_argument("--out", type=Path, help="rank 0 writes the parameters here, as .npy of shape (65, 10)")
    parser.add_argument("--sequential", type=int, metavar="N", help="no job: compute what N workers would, here")
    options = parser.parse_args(arguments)
    if options.sequential is None:
        say = partial(print, flush=True)
        distributed(options.steps, options.step_seconds, options.out, say, options.optimizer)
        return
    weights, bias = sequential(options.sequential, options.steps, options.optimizer)
    if options.out is not None:
        save(options.out, weights, bias)
    _, _, images, labels = load()
    print(result_line(weights, bias, accuracy(weights, bias, images, labels)))


if __name__ == "__main__":
    main()
