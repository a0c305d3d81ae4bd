"""Training scripts of `bench/sharing/sharing_live.py`: stock PyTorch and JAX, one thread each, unaware of Covey.

    python bench/sharing/live_jobs.py KIND OUT [--whole-operations]

After each step they append to OUT: when it ended and how long it took (CLOCK_MONOTONIC, ns), how long its thread was
in the run queue of its core and how long it ran (schedstat of /proc, ns; JAX computes in threads of its own, which
count too). The wait for input is a sleep, like that for a disk or a network elsewhere. It is a third of each step
alone: half of the processor time that the first steps took. `--whole-operations`: on a core that takes no operation
off, like a GPU (`whole_operations.py`).
"""

import math
import os
import random
import statistics
import struct
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.sharing import whole_operations

RECORD = struct.Struct("<qqqq")
WAITS = ("conv-input", "mlp-input", "transformer", "evaluation", "drift", "quickens", "noisy", "jax")
"""Kinds of scripts that wait for input."""
WARM_STEPS, KNOWN_STEPS = 5, 25
EVALUATION_S, BETWEEN_S = 5.0, 5.0
DRIFT_S, DRIFT = 10.0, 1.5
"""In the kind `drift` the work grows by half (factor 1.5) after so many seconds, and shrinks again: longer sentences,
larger images."""
QUICKENS_S, QUICKENED_S, QUICKENS = 10.0, 70.0, 0.94
"""In the kind `quickens` the batch shrinks to 0.94 of itself after 10 s, and is whole again 70 s after that: a step
takes 4 % less, which is within the tolerance."""
NOISE = 0.25
"""Coefficient of variation of the work of a step (log-normal) in the kind `noisy`: sentences of unlike length."""
SUDDEN = 60.0
"""Factor by which the batch, and with it each operation, grows for `DRIFT_S` in the kind `sudden`."""
LONG_S, SHORT_S, OPERATIONS = 0.008, 0.0003, 4
"""In the kinds `long` and `jump`: seconds of an operation, in `jump` in turn with short ones of `DRIFT_S`, and how
many of them a step has."""


class Input:
    """Waits for the next batch."""

    def __init__(self, kind: str) -> None:
        self._waits = kind in WAITS
        self._took_s: list[float] = []
        self._since_s = 0.0
        self.wait_s = 0.0

    def wait(self) -> None:
        if not self._waits:
            return
        if len(self._took_s) <= KNOWN_STEPS:
            self._took_s.append(time.process_time() - self._since_s)
        elif not self.wait_s:
            self.wait_s = statistics.median(self._took_s[WARM_STEPS:]) / 2
        time.sleep(self.wait_s)
        self._since_s = time.process_time()


class Recorder:
    """Appends a record for each step."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._counted = Path(f"{path}.threads")
        self._counts = self._threads()
        self._last_ns, self._before = time.monotonic_ns(), self._scheduled()

    def _threads(self) -> list[int]:
        """Descriptors of the kernel's counts for each thread, without those of Python except the script's own. Their
        numbers are written beside the steps, for `sharing_traced.py`."""
        script = threading.get_native_id()
        python = {thread.native_id for thread in threading.enumerate()} - {script}
        there = [int(task) for task in os.listdir("/proc/self/task") if int(task) not in python]
        self._counted.write_text(" ".join(map(str, there)), encoding="utf-8")
        return [os.open(f"/proc/self/task/{task}/schedstat", os.O_RDONLY) for task in there]

    def again(self) -> None:
        """Count from now on the threads that began since."""
        for descriptor in self._counts:
            os.close(descriptor)
        self._counts = self._threads()
        self._before = self._scheduled()

    def _scheduled(self) -> tuple[int, int]:
        each = [os.pread(descriptor, 100, 0).split() for descriptor in self._counts]
        return sum(int(counts[0]) for counts in each), sum(int(counts[1]) for counts in each)

    def step(self) -> None:
        now_ns, now = time.monotonic_ns(), self._scheduled()
        took = (now_ns, now_ns - self._last_ns, now[1] - self._before[1], now[0] - self._before[0])
        self._file.write(RECORD.pack(*took))
        self._last_ns, self._before = now_ns, now


def quickened(now_s: float) -> bool:
    """Whether batches of the kind `quickens` are smaller now."""
    return now_s % (QUICKENS_S + QUICKENED_S) > QUICKENS_S


def to_whole_batches_s(now_s: float) -> float:
    """Seconds until batches of that kind are next whole again."""
    return QUICKENS_S + QUICKENED_S - now_s % (QUICKENS_S + QUICKENED_S)


def torch_job(kind: str, recorder: Recorder, whole: bool) -> None:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    torch.set_num_threads(1)
    torch.manual_seed(1)
    awaited = Input(kind)

    class Batches(IterableDataset):  # type: ignore[type-arg]
        """Endless batches; each takes the time that `Input` says."""

        def __iter__(self) -> Iterator[Any]:
            batch = torch.randn(*SHAPES[kind])
            times = {"drift": DRIFT, "sudden": SUDDEN, "noisy": 3.0}.get(kind, 1.0)
            larger = torch.randn(int(times * len(batch)), *batch.shape[1:])
            spread, rng = (math.log(1 + NOISE**2)) ** 0.5, random.Random(1)
            while True:
                awaited.wait()
                if kind == "noisy":
                    yield larger[: max(1, int(len(batch) * rng.lognormvariate(-(spread**2) / 2, spread)))]
                elif kind == "quickens":
                    yield batch[: int(QUICKENS * len(batch))] if quickened(time.monotonic()) else batch
                else:
                    yield larger if time.monotonic() // DRIFT_S % 2 else batch

    model = _model(torch, kind)
    if whole:
        whole_operations.after_each_layer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    began_s = time.monotonic()
    for batch in DataLoader(Batches(), batch_size=None):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        recorder.step()
        if kind == "evaluation" and time.monotonic() - began_s > BETWEEN_S:
            time.sleep(EVALUATION_S)
            began_s = time.monotonic()


SHAPES: dict[str, tuple[int, ...]] = {
    "conv-input": (24, 3, 32, 32),
    "conv": (8, 3, 32, 32),
    "mlp-input": (256, 256),
    "mlp": (64, 256),
    "drift": (256, 256),
    "quickens": (256, 256),
    "noisy": (256, 256),
    "sudden": (64, 256),
    "transformer": (12, 32, 64),
    "evaluation": (24, 3, 32, 32),
}


def _model(torch: Any, kind: str) -> Any:
    nn = torch.nn
    if kind.startswith("mlp") or kind in ("drift", "quickens", "noisy", "sudden"):
        return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())])
    if kind == "transformer":
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    widths = (3, 16, 32, 32)
    layers = [each for a, b in pairwise(widths) for each in (nn.Conv2d(a, b, 3), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 26 * 26, 10))


def operations_job(kind: str, recorder: Recorder) -> None:
    """Compute matrix products that take the time that the kind says."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    lengths = {lasts_s: _product(torch, lasts_s) for lasts_s in (LONG_S, SHORT_S)}
    while True:
        lasts_s = SHORT_S if kind == "jump" and time.monotonic() // DRIFT_S % 2 else LONG_S
        one, other, out = lengths[lasts_s]
        for _ in range(OPERATIONS):
            torch.mm(one, other, out=out)
            whole_operations.done()
        optimizer.step()
        recorder.step()


def _product(torch: Any, lasts_s: float) -> Any:
    """Two matrices whose product takes `lasts_s` here, and room for it."""
    rows, common, took_s = 64, 256, []
    for _ in range(20):
        began_s = time.process_time()
        torch.mm(torch.zeros(rows, common), torch.zeros(common, common))
        took_s.append(time.process_time() - began_s)
    rows = max(1, int(rows * lasts_s / statistics.median(took_s)))
    return torch.randn(rows, common), torch.randn(common, common), torch.empty(rows, common)


def jax_job(kind: str, recorder: Recorder) -> None:
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.PRNGKey(1), 8)
    weights = [jax.random.normal(key, (256, 256)) * 0.05 for key in keys]
    batch = jax.random.normal(keys[0], (512, 256))

    def loss(weights: Any, batch: Any) -> Any:
        for weight in weights:
            batch = jnp.tanh(batch @ weight)
        return jnp.mean(batch**2)

    @jax.jit
    def train(weights: Any, batch: Any) -> Any:
        gradients = jax.grad(loss)(weights, batch)
        return [weight - 1e-3 * gradient for weight, gradient in zip(weights, gradients, strict=True)]

    weights = jax.block_until_ready(train(weights, batch))
    recorder.again()
    awaited = Input(kind)
    while True:
        awaited.wait()
        weights = train(weights, batch)
        jax.block_until_ready(weights)
        recorder.step()


def main() -> None:
    kind, path, *whole = sys.argv[1:]
    recorder = Recorder(path)
    if whole:
        whole_operations.begin()
    if kind.startswith("jax"):
        jax_job(kind, recorder)
    elif kind in ("long", "jump"):
        operations_job(kind, recorder)
    else:
        torch_job(kind, recorder, bool(whole))


if __name__ == "__main__":
    main()
