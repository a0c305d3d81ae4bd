"""examples/digits.py: it learns, and by several workers with dying aggregators it learns the same to the bit."""

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
import pytest

import covey
from covey.core.ids import JobId
from covey.job.tensors import TensorClient
from tests.plugins.aggregator.loopback import AggdThread

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"
EPOCH = 1 << 32


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Job:
    """What `covey.join()` gives a rank, with the agent's part played by the test."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.tensors = TensorClient(JobId("j1"), rank, world_size, lambda epoch, why, table: None)

    def step(self, step: int, **metrics: float) -> None:
        self.steps.append((step, metrics))

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tensors.close()


def test_the_data_is_all_there_and_split_without_overlap(digits: ModuleType) -> None:
    images, labels, test_images, test_labels = digits.load()
    assert images.shape == (1438, 64) and test_images.shape == (359, 64)
    assert len(labels) + len(test_labels) == 1797 and set(labels) == set(test_labels) == set(range(10))
    parts = [digits.Part(images, labels, rank, 4).images for rank in range(4)]
    assert sum(len(part) for part in parts) == 1438
    assert images.min() == 0 and images.max() == 1


@pytest.mark.parametrize("optimizer", ["none", "momentum", "adam"])
def test_the_reference_learns_to_tell_at_least_93_percent_of_held_out_digits_apart(
    digits: ModuleType, optimizer: str
) -> None:
    weights, bias = digits.sequential(4, 400, optimizer)
    _, _, images, labels = digits.load()
    assert digits.accuracy(weights, bias, images, labels) >= 0.93
    untrained = digits.accuracy(*digits.start(), images, labels)
    assert untrained < 0.2


@pytest.mark.parametrize("optimizer", ["none", "momentum", "adam"])
def test_four_workers_and_three_aggregators_end_bit_equal_to_one_process(
    digits: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    steps, out = 120, tmp_path / "digits.npy"
    jobs = [Job(rank, 4) for rank in range(4)]
    mine = threading.local()
    said: list[str] = []
    failed: list[BaseException] = []
    monkeypatch.setattr(covey, "join", lambda: mine.job, raising=False)

    def rank(job: Any) -> None:
        mine.job = job
        try:
            digits.distributed(steps, 0.0, out, said.append, optimizer)
        except BaseException as error:
            failed.append(error)

    aggd = AggdThread(tmp_path, control="0.sock")
    threads = [threading.Thread(target=rank, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for epoch, wanted in ((1, 30), (2, 75), (3, steps)):
        at = aggd.serve("j1", EPOCH + epoch, 4)
        for job in jobs:
            job.tensors.moved(at)
        while min(len(job.steps) for job in jobs) < wanted and any(thread.is_alive() for thread in threads):
            threads[0].join(0.005)
        if wanted < steps:
            aggd.kill()
            aggd = AggdThread(tmp_path, control=f"{epoch}.sock")
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    aggd.finish()
    assert not failed

    weights, bias = digits.sequential(4, steps, optimizer)
    assert np.load(out).tobytes() == weights.tobytes() + bias.tobytes()
    _, _, images, labels = digits.load()
    assert said[-1] == digits.result_line(weights, bias, digits.accuracy(weights, bias, images, labels))
    assert all([step for step, _ in job.steps] == list(range(1, steps + 1)) for job in jobs)
    assert jobs[2].steps[-1][1]["accuracy"] == jobs[0].steps[-1][1]["accuracy"] > 0.85


def test_the_script_alone_prints_its_result_and_writes_it_whole(digits: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "sequential.npy"
    command = [sys.executable, str(SCRIPT), "--sequential", "3", "--steps", "20", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    weights, bias = digits.sequential(3, 20)
    parameters = np.load(out)
    assert parameters.shape == (65, 10) and np.allclose(parameters, np.vstack([weights, bias]), atol=1e-6)
    assert done.stdout.startswith("parameters sha256=") and "  accuracy=0." in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["sequential.npy"]
