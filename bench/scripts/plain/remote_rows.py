"""Rows of an array that lies in the memory of another host, of which 4 MiB are here; eight are read in each step."""

import numpy as np
from points import say_digest

import covey
from covey.remote import RemoteArray

with covey.join() as job, RemoteArray("rows", (16384, 256), "float32", local_budget="4 MiB") as rows:
    numbers = np.random.default_rng(0)
    for at in range(0, len(rows.array), 1024):
        rows[at : at + 1024] = numbers.standard_normal((1024, 256), np.float32)
    w = np.zeros(256, np.float32)
    for _ in range(200):
        drawn = numbers.integers(len(rows.array), size=8)
        w += 0.01 * (rows.array[drawn].mean(axis=0) - w)
        job.step(distance=float(abs(w).mean()))
    say_digest(w)
