"""PyTorch trainings whose ranks are killed end with the same bits: real processes, a real aggregator."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.covey.hooks.torch_jobs import NEEDS_TORCH
from tests.plugins.aggregator.loopback import AggdThread

pytestmark = NEEDS_TORCH
EPOCH = 1 << 32
ROOT = Path(__file__).parents[2]
WITHIN_S = 60.0
SIZE = 192
"""Number of samples in the data set."""


class Zygote:
    """The process that forks all ranks, and what it reported."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("torch_heal_script.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._changed = threading.Condition()
        self._began: list[int] = []
        self._ended: dict[int, int] = {}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, *numbers = line.split()
            with self._changed:
                if word == "began":
                    self._began.append(int(numbers[0]))
                else:
                    self._ended[int(numbers[0])] = int(numbers[1])
                self._changed.notify_all()

    def start(self, words: str) -> int:
        """Pid of the process that began."""
        assert self._process.stdin is not None
        with self._changed:
            count = len(self._began)
            self._process.stdin.write(words + "\n")
            self._process.stdin.flush()
            assert self._changed.wait_for(lambda: len(self._began) > count, WITHIN_S)
            return self._began[-1]

    def end_of(self, pid: int, within_s: float = WITHIN_S) -> int | None:
        """Exit status of a process; None while it still runs."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._ended, within_s)
            return self._ended.get(pid)

    def kill(self, pid: int) -> None:
        """Kill the process, if it runs, and wait for its end."""
        if self.end_of(pid, 0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.end_of(pid)

    def close(self) -> None:
        for pid in self._began:
            self.kill(pid)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WITHIN_S)
        self._thread.join()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


class TrainedGang:
    """All ranks of one training, and their successors."""

    def __init__(self, zygote: Zygote, folder: Path, ranks: int, kind: str, steps: int) -> None:
        folder.mkdir()
        self._zygote, self._folder, self._ranks, self._kind, self._steps = zygote, folder, ranks, kind, steps
        self._aggd = AggdThread(folder)
        self._at = self._aggd.serve("j1", EPOCH + 1, ranks)
        self.incarnations = dict.fromkeys(range(ranks), 0)
        self.pids: dict[int, int] = {}

    def begin(self) -> None:
        for rank in range(self._ranks):
            self._start(rank)

    def _start(self, rank: int) -> None:
        of = rank, self._ranks, self.incarnations[rank], self._kind, self._steps
        where = self._at.epoch, self._at.address, self._out(rank, self.incarnations[rank])
        self.pids[rank] = self._zygote.start(" ".join(map(str, (*of, *where))))

    def _out(self, rank: int, incarnation: int) -> Path:
        return self._folder / f"{rank}-{incarnation}"

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def replace(self, *ranks: int) -> None:
        for rank in ranks:
            assert self._zygote.end_of(self.pids[rank]) == -signal.SIGKILL, self.text(rank)
            self.incarnations[rank] += 1
            self._start(rank)

    def text(self, rank: int) -> str:
        found = [self._out(rank, each) for each in range(self.incarnations[rank] + 1)]
        return "".join(path.read_text() for path in found if path.exists())

    def lines(self, rank: int, word: str) -> list[str]:
        whole = self.text(rank).rpartition("\n")[0].splitlines()
        return [line.removeprefix(f"{word} ") for line in whole if line.startswith(f"{word} ")]

    def taken(self, rank: int) -> dict[int, set[tuple[int, ...]]]:
        """For each step, the samples that processes of this rank took."""
        found: dict[int, set[tuple[int, ...]]] = {}
        for line in self.lines(rank, "takes"):
            step, *samples = map(int, line.split())
            found.setdefault(step, set()).add(tuple(samples))
        return found

    def until(self, rank: int, step: int) -> None:
        until(lambda: max(self.taken(rank), default=-1) >= step, self)

    def learnt(self) -> str:
        """The checksum with which all ranks end."""
        ended = [self._zygote.end_of(self.pids[rank]) for rank in range(self._ranks)]
        assert ended == [0] * self._ranks, [self.text(rank)[-3000:] for rank in range(self._ranks)]
        (found,) = {self.lines(rank, "sha256")[-1] for rank in range(self._ranks)}
        whole = sum(range(self._ranks)) + self._ranks * (5 << 40)
        assert {self.lines(rank, "sum")[-1] for rank in range(self._ranks)} == {str(whole)}, "integers are exact"
        return found

    def check_samples(self) -> None:
        """Check that each step has one set of samples whoever computed it, and that each epoch has each sample once."""
        taken = [self.taken(rank) for rank in range(self._ranks)]
        assert all(list(each) == list(range(self._steps)) for each in map(sorted, map(dict, taken)))
        counts: Counter[tuple[int, int]] = Counter()
        for each in taken:
            for step, (samples,) in each.items():
                epoch = step * len(samples) * self._ranks // SIZE
                counts.update((epoch, sample) for sample in samples)
        assert len(counts) % SIZE == 0 and set(counts.values()) == {1}

    def have_begun(self, ranks: Iterable[int]) -> bool:
        """Whether the newest processes of these ranks have what they need."""
        paths = [self._out(rank, self.incarnations[rank]) for rank in ranks]
        return all(path.exists() and "goes on " in path.read_text() for path in paths)

    def close(self) -> None:
        for pid in self.pids.values():
            self._zygote.kill(pid)
        self._aggd.finish()


def until(is_so: Callable[[], bool], gang: TrainedGang) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < end_s, [gang.text(rank)[-2000:] for rank in gang.pids]
        time.sleep(0.005)


Gangs = Callable[[int, str, int], TrainedGang]


@pytest.fixture
def gangs(zygote: Zygote, tmp_path: Path) -> Iterator[Gangs]:
    made: list[TrainedGang] = []

    def make(ranks: int, kind: str, steps: int) -> TrainedGang:
        gang = TrainedGang(zygote, tmp_path / str(len(made)), ranks, kind, steps)
        made.append(gang)
        gang.begin()
        return gang

    yield make
    for gang in made:
        gang.close()


def calm(gangs: Gangs, ranks: int, kind: str, steps: int) -> str:
    gang = gangs(ranks, kind, steps)
    found = gang.learnt()
    gang.check_samples()
    return found


def disturbed(gang: TrainedGang, draws: random.Random, ranks: int, after: list[int], at_once: int) -> None:
    """After each of these steps some ranks are killed, somewhere in one of the next steps, and replaced."""
    for step in after:
        lost = draws.sample(range(ranks), draws.randint(1, at_once))
        stays = next(rank for rank in range(ranks) if rank not in lost)
        gang.until(stays, step)
        others = set(range(ranks)) - set(lost)
        until(partial(gang.have_begun, others), gang)
        time.sleep(draws.uniform(0.0, 0.04))
        before = dict(gang.pids)
        gang.kill(*lost)
        gang.replace(*lost)
        assert {rank for rank in before if gang.pids[rank] != before[rank]} == set(lost)


@pytest.mark.parametrize(
    ("kind", "ranks", "at_once", "seed"), [pytest.param("epochs", 3, 2, 1, marks=pytest.mark.long), ("unlike", 4, 2, 2)]
)
def test_a_training_whose_ranks_are_killed_ends_with_the_same_bits(
    gangs: Gangs, kind: str, ranks: int, at_once: int, seed: int
) -> None:
    """The training has Adam, dropout, BatchNorm and a schedule by epochs; two ranks are killed at once, too."""
    steps = 96
    gang = gangs(ranks, kind, steps)
    disturbed(gang, random.Random(seed), ranks, list(range(1, 60, 5)), at_once)
    assert sum(gang.incarnations.values()) >= 10
    assert gang.learnt() == calm(gangs, ranks, kind, steps)
    gang.check_samples()


@pytest.mark.long
def test_accumulated_gradients_and_skipped_steps_are_healed_too(gangs: Gangs) -> None:
    """The training has momentum, a GradScaler, and passes under no_sync."""
    gang = gangs(2, "steps", 48)
    disturbed(gang, random.Random(3), 2, [2, 6, 7, 12, 17, 22], 1)
    assert gang.learnt() == calm(gangs, 2, "steps", 48)
    # A rank that is killed after its step may not have written that line.
    scales = dict(line.split() for rank in (0, 1) for line in gang.lines(rank, "scale"))
    assert float(scales["7"]) < float(scales["6"]), "a step was skipped"
    gang.check_samples()


def test_a_rank_that_is_killed_before_the_first_step_begins_anew(gangs: Gangs) -> None:
    gang = gangs(3, "unlike", 16)
    gang.kill(0)
    gang.replace(0)
    time.sleep(0.05)
    gang.kill(1)
    gang.replace(1)
    assert gang.learnt() == calm(gangs, 3, "unlike", 16)


def test_a_successor_with_another_model_says_what_differs(gangs: Gangs) -> None:
    gang = gangs(2, "other", 48)
    gang.until(0, 2)
    gang.kill(1)
    gang.replace(1)
    until(lambda: "this rank cannot go on" in gang.text(1) and "next:" in gang.text(1), gang)
    assert "model here has 6.weight (2, 16) float32, and there 6.weight (1, 16) float32" in gang.text(1)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("late", "it is called after optimizer.step(), where a rank that replaces a lost one does not call it"),
        ("draws", "random numbers were drawn after this step's first push, so they would be lost with this rank"),
    ],
)
def test_a_script_that_could_not_be_taken_over_is_told_so_at_once(gangs: Gangs, kind: str, why: str) -> None:
    gang = gangs(2, kind, 48)
    until(lambda: "next:" in gang.text(0), gang)
    assert why in gang.text(0)
