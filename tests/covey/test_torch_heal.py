"""PyTorch trainings whose ranks are killed end with the same bits: real processes, a real aggregator."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest
from safetensors import safe_open

from covey.core.errors import EXIT_AGAIN
from tests.covey.forks import Fork, Forks
from tests.covey.hooks.torch_jobs import NEEDS_TORCH
from tests.families import in_gate
from tests.plugins.aggregator.loopback import AggdThread

pytestmark = NEEDS_TORCH
EPOCH = 1 << 32
SCRIPT = Path(__file__).with_name("torch_heal_script.py")
WITHIN_S = 60.0
SIZE = 192
"""Number of samples in the data set."""


class TrainedGang:
    """All ranks of one training, and their successors."""

    def __init__(
        self,
        forks: Forks,
        folder: Path,
        ranks: int,
        kind: str,
        steps: int,
        saved: Path | None = None,
        script: Path = SCRIPT,
    ) -> None:
        """`saved`: where its checkpoint is."""
        folder.mkdir()
        self.saved, self._script = saved, script
        self._forks, self._ranks, self._kind, self._steps = forks, ranks, kind, steps
        self._aggd = AggdThread(folder)
        self._at = self._aggd.serve("j1", EPOCH + 1, ranks)
        self.incarnations = dict.fromkeys(range(ranks), 0)
        self._processes: dict[int, list[Fork]] = {rank: [] for rank in range(ranks)}

    def begin(self) -> None:
        for rank in range(self._ranks):
            self._start(rank)

    def _start(self, rank: int) -> None:
        of = rank, self._ranks, self.incarnations[rank], self._kind, self._steps
        folder = () if self.saved is None else (self.saved,)
        self._processes[rank].append(self._forks.run(self._script, *of, self._at.epoch, self._at.address, *folder))

    @property
    def pids(self) -> dict[int, int]:
        """For each rank, the pid of its newest process."""
        return {rank: processes[-1].pid for rank, processes in self._processes.items()}

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def replace(self, *ranks: int) -> None:
        for rank in ranks:
            assert self._processes[rank][-1].wait() == -signal.SIGKILL, self.text(rank)
            self.incarnations[rank] += 1
            self._start(rank)

    def ended(self, rank: int) -> int | None:
        """Wait until the rank's newest process ends: its exit status."""
        return self._processes[rank][-1].wait()

    def text(self, rank: int) -> str:
        return "".join(each.text() for each in self._processes[rank])

    def lines(self, rank: int, word: str) -> list[str]:
        whole = self.text(rank).rpartition("\n")[0].splitlines()
        return [line.removeprefix(f"{word} ") for line in whole if line.startswith(f"{word} ")]

    def taken(self, rank: int) -> dict[int, set[tuple[int, ...]]]:
        """For each step, the samples that processes of this rank took."""
        found: dict[int, set[tuple[int, ...]]] = {}
        for line in self.lines(rank, "takes"):
            if not line.replace(" ", "").isdecimal():
                continue  # a process was killed within it, and another wrote on
            step, *samples = map(int, line.split())
            found.setdefault(step, set()).add(tuple(samples))
        return found

    def has_come(self, rank: int, step: int, part: int) -> bool:
        """Whether the rank has come to this part of the step."""
        return max((tuple(map(int, line.split())) for line in self.lines(rank, "part")), default=(-1, 0)) >= (
            step,
            part,
        )

    def until(self, rank: int, step: int) -> None:
        until(lambda: max(self.taken(rank), default=-1) >= step, self)

    def stopped(self) -> None:
        """Ask all ranks to end, one after the other, and wait for that: each ends with 75."""
        assert self.saved is not None
        for rank in range(self._ranks):
            (self.saved / f"stop-{rank}").touch()
            time.sleep(0.03)
        ended = [self._processes[rank][-1].wait() for rank in range(self._ranks)]
        assert ended == [EXIT_AGAIN] * self._ranks, [self.text(rank)[-3000:] for rank in range(self._ranks)]
        for rank in range(self._ranks):
            (self.saved / f"stop-{rank}").unlink()

    def learnt(self) -> str:
        """The checksum with which all ranks end."""
        ended = [self._processes[rank][-1].wait() for rank in range(self._ranks)]
        print(*map(self.text, range(self._ranks)))  # pytest shows it whole where this fails
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
        return all("goes on " in self._processes[rank][-1].text() for rank in ranks)

    def close(self) -> None:
        for processes in self._processes.values():
            for each in processes:
                each.close()
        self._aggd.finish()


def until(is_so: Callable[[], bool], gang: TrainedGang) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < end_s, [gang.text(rank)[-2000:] for rank in gang.pids]
        time.sleep(0.005)


HELD = {
    "models-gan": "holds for successors: 10 parameters of 2 models, 3 buffers, moments of Adam and SGD, "
    "AveragedModel and MultiStepLR, random generators; each rank keeps a copy of it, as of the step's beginning",
    "models-actor": "holds for successors: 4 parameters of 2 models, moments of 2 SGD, Linear, random generators; each",
    "models-one": "holds for successors: 6 parameters, moments of SGD and AdamW, random generators; not held: ",
}
"""What rank 0 says when it is attached, by kind of training."""
Gangs = Callable[..., TrainedGang]


@pytest.fixture
def gangs(forks: Forks, tmp_path: Path) -> Iterator[Gangs]:
    made: list[TrainedGang] = []

    def make(ranks: int, kind: str, steps: int, saved: Path | None = None) -> TrainedGang:
        gang = TrainedGang(forks, tmp_path / str(len(made)), ranks, kind, steps, saved)
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


@pytest.mark.long
@pytest.mark.parametrize(("kind", "ranks", "at_once", "seed"), [("epochs", 3, 2, 1), ("unlike", 4, 2, 2)])
def test_a_training_whose_ranks_are_killed_ends_with_the_same_bits(
    gangs: Gangs, kind: str, ranks: int, at_once: int, seed: int
) -> None:
    """The training has Adam, dropout, BatchNorm and a schedule by epochs; two ranks are killed at once, too."""
    steps = 96
    gang = gangs(ranks, kind, steps)
    disturbed(gang, random.Random(seed), ranks, list(range(1, 60, 5)), at_once)
    assert sum(gang.incarnations.values()) >= 10
    assert gang.learnt() == calm(gangs, ranks, kind, steps)
    assert "draws random numbers after" not in gang.text(0), "those for a batch belong to its step"
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


@pytest.mark.parametrize(("kind", "steps"), [("epochs", 96), pytest.param("steps", 48, marks=pytest.mark.long)])
def test_a_training_that_is_asked_to_end_three_times_goes_on_with_the_same_bits(
    gangs: Gangs, tmp_path: Path, kind: str, steps: int
) -> None:
    """Within epochs; a rank is killed in the first step after a checkpoint, too."""
    (saved := tmp_path / "saved").mkdir()
    begun = []
    for here in (steps // 5, steps // 2, 3 * steps // 4):
        gang = gangs(2, kind, steps, saved)
        gang.until(0, here)
        gang.stopped()
        begun += [{int(gang.lines(rank, "goes on")[0]) for rank in (0, 1)}]
    assert [len(each) for each in begun] == [1] * 3 and begun[0] == {0} and begun[1] != {0}, begun
    last = gangs(2, kind, steps, saved)
    until(partial(last.have_begun, (0, 1)), last)
    last.kill(1)
    last.replace(1)
    assert last.learnt() == calm(gangs, 2, kind, steps)
    with safe_open(saved / "state.safetensors", "np") as others_read:
        assert "parameter/0.weight" in list(others_read.keys())


@pytest.mark.parametrize(("kind", "parts"), in_gate(1, [("models-gan", 3), ("models-actor", 2), ("models-one", 2)]))
def test_ranks_killed_between_steps_of_several_optimizers_change_nothing(
    gangs: Gangs, tmp_path: Path, kind: str, parts: int
) -> None:
    """After each part of a step, that is between an optimizer's step and the next one's; the training is stopped and
    continued, too."""
    (saved := tmp_path / "saved").mkdir()
    steps, draws = 48, random.Random(4)
    gang = gangs(3, kind, steps, saved)
    for at, step in enumerate((0, 1, 8, 11, 15, 19, 23, 25, 28)):
        lost = at % 3
        until(partial(gang.have_begun, set(range(3))), gang)
        until(partial(gang.has_come, (lost + 1) % 3, step, at % parts), gang)
        time.sleep(draws.uniform(0.0, 0.01))
        gang.kill(lost)
        gang.replace(lost)
    gang.until(0, 32)
    gang.stopped()
    last = gangs(3, kind, steps, saved)
    last.until(0, 40)
    last.kill(1, 2)
    last.replace(1, 2)
    assert last.learnt() == calm(gangs, 3, kind, steps)
    assert HELD[kind] in gang.text(0)


def test_optimizers_that_do_not_say_where_steps_end_are_refused(gangs: Gangs) -> None:
    gang = gangs(2, "models-unended", 48)
    until(lambda: "next:" in gang.text(0), gang)
    assert "it is not known with which of them a step of the training ends" in gang.text(0)
    assert "next: loop over state.steps(n), or call state.done() at the end of each step" in gang.text(0)


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
        ("draws", "random numbers were drawn after this step's first push, so they would be lost with this rank"),
    ],
)
def test_a_script_that_could_not_be_taken_over_is_told_so_at_once(gangs: Gangs, kind: str, why: str) -> None:
    gang = gangs(2, kind, 48)
    until(lambda: "next:" in gang.text(0), gang)
    assert why in gang.text(0)
