"""numpy on two ranks with Covey's state: sums of gradients, and nothing about files."""

import time

import numpy as np
from points import READ_S, say_digest, spiral

import covey

with covey.join() as job:
    w = np.zeros(2)

    def load(arrays, _):
        w[:] = arrays["w"]

    state = job.state(lambda: {"w": w}, load, checkpoint=True)
    if state.step:
        print(f"continues with step {state.step}", flush=True)
    for step in state.steps(200):
        mine = range((step * 2 + job.rank) * 8, (step * 2 + job.rank + 1) * 8)
        points, sides = zip(*map(spiral, mine), strict=True)
        time.sleep(8 * READ_S)
        x, y = np.array(points), np.array(sides)
        w -= 0.1 * job.tensors.push_pull("g", x.T @ (1 / (1 + np.exp(-x @ w)) - y), mean=True)
    say_digest(w)
