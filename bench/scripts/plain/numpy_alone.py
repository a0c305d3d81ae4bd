"""Logistic regression with numpy in one process, which saves as it goes; options are argparse's."""

import argparse
import os
import time

import numpy as np
from points import READ_S, say_digest, spiral

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--rate", type=float, default=0.1)
parser.add_argument("--save", default="weights.npz")
options = parser.parse_args()

begin, w = 0, np.zeros(2)
if os.path.exists(options.save):
    saved = np.load(options.save)
    begin, w = int(saved["step"]), saved["w"]
    print(f"continues with step {begin}", flush=True)

for step in range(begin, options.steps):
    points, sides = zip(*(spiral(step * 8 + each) for each in range(8)), strict=True)
    time.sleep(8 * READ_S)
    x, y = np.array(points), np.array(sides)
    w -= options.rate * x.T @ (1 / (1 + np.exp(-x @ w)) - y)
    if step % 10 == 9:
        np.savez("new.npz", step=step + 1, w=w)
        os.replace("new.npz", options.save)
say_digest(w)
