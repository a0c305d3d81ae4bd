#!/usr/bin/env python3
"""Latent Dirichlet allocation by variational Bayes on documents in Blocks, by as many processes as there are.

    agentctl submit --workers 2..8 -- python examples/elastic/lda.py
    agentctl scale JOB 6        (and kill -9 a process, or a host, whenever you like)

A Block is some documents, as counts of words. The model says of each topic how often each word was seen in it. In a
step each rank finds the topics of its documents (the E-step) and adds up which words were seen in which topic; the sums
of all are the next model (the M-step; Hoffman, Blei and Bach 2010, algorithm 1). Every run with 8 ranks prints one
digest, whatever happened on the way. `--check` computes the same in one process, one document after the other, apart
from Covey, and compares. (On processors for which BLAS chooses the same kernel.)
"""

import argparse
import hashlib
import math
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
TOPICS = 5
ALPHA, ETA = 1 / TOPICS, 0.1
"""Dirichlet priors: of the topics of a document, and of the words of a topic."""
ROUNDS = 15
"""Rounds of the E-step."""
TINY = 1e-100
TOLERANCE = 1e-6
"""Largest difference of a count from the reference, as a part of the largest count."""


def documents_of(k: int, documents: int, words: int) -> Array:
    """Block k: for each document how often it has each word. A topic prefers words of its own."""
    rng = np.random.default_rng([4, k])
    of_topics = np.random.default_rng(0).dirichlet(np.full(words, 0.1), size=TOPICS)
    each = rng.dirichlet(np.full(TOPICS, 0.3), size=documents) @ of_topics
    return np.asarray(rng.multinomial(100, each / each.sum(axis=1, keepdims=True)), np.float32)


def first_model(words: int) -> Array:
    return np.random.default_rng(1).gamma(100.0, 0.01, (TOPICS, words))


def digamma(x: Array) -> Array:
    """The derivative of the logarithm of gamma, for x > 0: x is moved up to where the series is exact to 1e-12."""
    x, below = np.array(x, np.float64), np.zeros_like(x, np.float64)
    for _ in range(8):
        small = x < 8
        below -= np.where(small, 1 / x, 0)
        x += small
    y = 1 / (x * x)
    series = y * (1 / 12 - y * (1 / 120 - y * (1 / 252 - y * (1 / 240 - y / 132))))
    return np.asarray(below + np.log(x) - 0.5 / x - series)


def expected(dirichlet: Array) -> Array:
    """exp(E[log p]) of each row's Dirichlet distribution."""
    return np.asarray(np.exp(digamma(dirichlet) - digamma(dirichlet.sum(axis=1, keepdims=True))))


def seen(counts: Array, model: Array) -> Array:
    """Which words of these documents were seen in which topic, shape (topics, words)."""
    words = expected(model)
    gamma = np.ones((len(counts), TOPICS))
    for _ in range(ROUNDS):
        topics = expected(gamma)
        gamma = ALPHA + topics * ((counts / (topics @ words + TINY)) @ words.T)
    topics = expected(gamma)
    return np.asarray(words * (topics.T @ (counts / (topics @ words + TINY))))


def train(options: argparse.Namespace) -> None:
    model = first_model(options.words)

    def load(arrays: dict[str, Array], own: None) -> None:
        model[:] = arrays["model"]

    with covey.join() as job:
        size = f"{options.documents * options.words * 4 // 1024 + 1} KiB"
        data = job.data(options.blocks, lambda k: documents_of(k, options.documents, options.words), bytes=size)
        state = job.state(lambda: {"model": model}, load, enter=lambda rank, own: None)
        for step in state.steps(options.steps):
            for rank in job.carried(step):
                with rank:
                    mine = np.zeros_like(model)
                    for _, counts in data.of(rank):
                        mine += seen(counts, model)
                    sums = rank.push("seen", mine)
                time.sleep(options.step_seconds)
            model[:] = ETA + sums.wait()
        print(f"data blocks={data.blocks} loaded={data.loaded} moved={data.moved}", flush=True)
        print(f"state sha256={hashlib.sha256(model.tobytes()).hexdigest()}", flush=True)
        if job.rank == 0 and options.check:
            check(model, options)
        if job.rank == 0 and options.out is not None:
            options.out.write_text(hashlib.sha256(model.tobytes()).hexdigest())


def log_gamma_slope(x: float) -> float:
    """digamma by a difference quotient of lgamma: another way than `digamma`."""
    below, h = 0.0, 0.02
    while x < 6:
        below, x = below - 1 / x, x + 1
    near, far = math.lgamma(x + h) - math.lgamma(x - h), math.lgamma(x + 2 * h) - math.lgamma(x - 2 * h)
    return below + (8 * near - far) / (12 * h)


def reference(options: argparse.Namespace) -> Array:
    """The model that one process finds, one document after the other."""
    slope = np.vectorize(log_gamma_slope)
    corpus = [documents_of(k, options.documents, options.words) for k in range(options.blocks)]
    model = first_model(options.words)
    for _ in range(options.steps):
        of_words = np.exp(slope(model) - slope(model.sum(axis=1))[:, None])
        found = np.full_like(model, ETA)
        for document in (each for block in corpus for each in block.astype(np.float64)):
            here = np.flatnonzero(document)
            gamma = np.ones(TOPICS)
            for _ in range(ROUNDS + 1):
                of_topics = np.exp(slope(gamma) - slope(gamma.sum()))
                phi = of_topics[:, None] * of_words[:, here]
                phi /= phi.sum(axis=0)
                gamma = ALPHA + phi @ document[here]
            found[:, here] += phi * document[here]
        model = found
    return model


def check(model: Array, options: argparse.Namespace) -> None:
    found = reference(options)
    worst = float(np.abs(model - found).max() / np.abs(found).max())
    if not worst <= TOLERANCE:  # NaN is no result
        raise SystemExit(f"the counts differ from the reference by {worst:.1e}, and {TOLERANCE:.0e} is allowed")
    print(f"checked against one process: the counts differ by {worst:.1e} at most", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="(default %(default)s)")
    parser.add_argument("--blocks", type=int, default=32, help="Blocks of the data (default %(default)s)")
    parser.add_argument("--documents", type=int, default=8, help="documents of a Block (default %(default)s)")
    parser.add_argument("--words", type=int, default=200, help="words of the vocabulary (default %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="each rank takes at least so long in each step")
    parser.add_argument("--check", action="store_true", help="compare with a computation in one process")
    parser.add_argument("--out", type=Path, help="the process of rank 0 writes the digest here")
    train(parser.parse_args())
