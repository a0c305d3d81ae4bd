"""Saves the models of one rank, which optimizers update at their owners, while its script goes on.

The owner of a Block has its parameters and moments, and gives every rank the parameters with each step and one rank,
the Block's keeper, the moments too (`covey.tensors.owner.sums`). So the ranks that keep Blocks have all of them, of
every step, and write them from there: nothing is sent for it, and no round waits.

    push for step s+1: "copy w of step s" --> the saving thread: copies | writes this rank's file | rank 0: the list

A thread copies what is to be saved while the next round is under way (`covey.saves.save_steps`), and writes it
then. The script waits only where it would overwrite what is not copied yet: when copying takes longer than a step, or
the disk longer than from one save to the next. Where all ranks are on one host rank 0 writes everything.
"""

import contextlib
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from covey.core.errors import CoveyError
from covey.healing import checkpoint
from covey.healing.machine import NOT_SAVED
from covey.saves.asked_save import AskedSave
from covey.saves.save_steps import SaveDecision, SaveSteps
from covey.saves.tensor_set import (
    File,
    Part,
    SavedTensor,
    TensorSet,
    arrays_of,
    complete,
    file_of,
    folder_of,
    found_files,
    kind_of,
    opened_set,
    remove,
    write_file,
)
from covey.tensors.aggregator.block_rounds import BlockRounds
from covey.tensors.aggregator.rounds import Tell, ToldByRank
from covey.tensors.numbers.arrays import GivenArray
from covey.tensors.numbers.moments import Moments
from covey.tensors.numbers.tensor_wire import Declared
from covey.tensors.numbers.updates import Update
from covey.tensors.owner.leaving import LEAVE
from covey.tensors.same_host.shared_rounds import SharedTensor

NAME = "model.json"
"""Name of the list where no path is given, in the job's folder (COVEY_CHECKPOINT_DIR)."""
OTHERS_S = 60.0
"""Seconds that rank 0 waits for the files of other ranks once it has written its own."""
LOOK_S = (0.02, 0.5)
"""Shortest and longest pause between two looks for files of other ranks."""
AHEAD_S, AHEAD_STEPS = 1.0, 2
"""How far ahead a step is that all ranks are told to save: seconds, but no fewer than so many steps."""
AHEAD_MAX = 1 << 20
SAVE_AT, TOO_LATE = 0x5AFE01, 0x5AFE02
"""What messages among ranks are about: the step that is to be saved; that a rank is past it."""
FAILED, AGAIN = ".failed", "ask again"
CLOSE_S = 60.0
"""Seconds that a script that ends without `leave` waits for what is being saved."""


class SavingRank(Protocol):
    """The part of `covey.job.tensors.TensorClient` that is used here."""

    rank: int
    world_size: int

    @property
    def far(self) -> BlockRounds: ...
    def listen(self) -> None: ...
    def tell(self, text: str) -> None: ...
    def raise_if_over(self) -> None: ...


class Saves:
    """What one rank saves: nothing, until `begin`."""

    def __init__(self, of: SavingRank, ways: Mapping[str, SharedTensor | None]) -> None:
        """`ways`: the ways of all tensors, to which more may be added."""
        self.of, self._ways = of, ways
        self._models: dict[str, Declared] = {}
        self._seen = 0
        """Number of tensors when `_models` was made."""
        self.saver: Saver | None = None
        self.start = 0
        """The number of this start of the job."""
        self.asked = AskedSave()
        """The save that a person asked for."""
        self.saved: Callable[[int, Path], None] = lambda step, path: None
        """Called with the step and place of each save that is complete."""

    @property
    def models(self) -> Mapping[str, Declared]:
        """The tensors that an optimizer updates."""
        if self._seen != len(self._ways):
            ways, known = dict(self._ways), self.of.far.known
            each = {name: known[name].declared if way is None else way.declared for name, way in ways.items()}
            self._models = {name: declared for name, declared in each.items() if declared.update is not None}
            self._seen = len(ways)
        return self._models

    def way(self, name: str) -> SharedTensor | None:
        """Where this tensor is added: in shared memory, or through an aggregator (None)."""
        return self._ways[name]

    @property
    def is_alone(self) -> bool:
        """Whether no rank but rank 0 saves anything: all are on its host."""
        ways = [self._ways[name] for name in self.models]
        return bool(ways) and all(way is not None and way.whole_job for way in ways)

    def begin(self, path: "str | os.PathLike[str] | None", every: int | None) -> int:
        """Begin to save, as `TensorClient.save` says. Returns the step that was saved before."""
        if self.models or self.saver is not None:
            raise ValueError("call save once, before the first model")
        place = checkpoint.place_of(True, os.environ).with_name(NAME) if path is None else Path(path)
        self.saver = Saver(self, place, every)
        return self.saver.step

    def begins_with(
        self, name: str, given: GivenArray, update: Update | None, moments: Moments | None
    ) -> tuple[GivenArray, Moments | None]:
        """The values and moments with which a model begins, as `Saver.begins_with` says."""
        return (given, moments) if self.saver is None else self.saver.begins_with(name, given, update, moments)

    def declared(self) -> None:
        """A tensor was declared."""
        if self.saver is not None:
            self.saver.declared()

    def before_push(self, name: str) -> None:
        """A tensor is about to be pushed, as `Saver.before_push` says."""
        if self.saver is not None:
            self.saver.before_push(name)

    def told(self, told: ToldByRank) -> bool:
        """A message of another rank. Returns whether it is about saves."""
        return self.saver is not None and self.saver.told(told)

    def close(self) -> None:
        """End, once what is being saved is saved: that is waited for."""
        if self.saver is not None:
            self.saver.close(CLOSE_S)


class _Copy(NamedTuple):
    """A task of the thread: copy a tensor of this step."""

    name: str
    step: int
    parts: tuple[Part, ...]
    """The numbers where they are: which memory that is changes with each step."""


class _Write(NamedTuple):
    """A task of the thread: write what was copied of this step."""

    step: int
    kinds: dict[str, SavedTensor]


class Saver:
    """The saves of one rank. Made by `job.tensors.save`."""

    def __init__(self, of: Saves, path: Path, every: int | None) -> None:
        """CoveyError when what is at `path` cannot be used, or nothing can be written there."""
        if every is not None and operator.index(every) < 1:
            raise ValueError(f"every= is a number of steps from 1 on, not {every!r}")
        self._of, self._rank, self.path = of, of.of, path
        self.found = _checked(path)
        self._arrays = arrays_of(self.found) if self.found is not None and of.of.rank == 0 else {}
        self.steps = SaveSteps(every, self.step)
        self._lock = threading.Condition()
        """Guards the fields below; notified when a task is over, or there is a new one."""
        self._tasks: deque[_Copy | _Write] = deque()
        self._copying: dict[str, int] = {}
        """Tensors that are still to be copied, and of which step."""
        self._parts: dict[int, list[Part]] = {}
        """By step, what was copied of it."""
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None
        self._late: set[int] = set()
        """Rank 0: steps that were asked for, and past which another rank was."""
        self._told_waits = False
        self._models = 0
        """Number of models when it was looked whether ranks of other hosts save too."""
        self._ahead = AHEAD_STEPS
        self._pace: tuple[float, int] | None = None
        """When, and at which step, this rank began to measure how long steps take."""
        of.asked.begin = self._ask

    @property
    def step(self) -> int:
        """The number of steps that were made before this start of the job."""
        return 0 if self.found is None else self.found.step

    # ---- what models begin with ----

    def begins_with(
        self, name: str, given: GivenArray, update: Update | None, moments: Moments | None
    ) -> tuple[GivenArray, Moments | None]:
        """The values and moments of a model that is declared: those that were saved, if any were. CoveyError when they
        do not fit; ValueError where the script gives moments too."""
        if update is None or self.found is None:
            return given, moments
        if moments is not None:
            raise ValueError(f"tensor {name!r} goes on from {self.path}; give no moments")
        kind, wanted = self.found.tensors.get(name), SavedTensor(given.type, given.data.shape, update.moments)
        if kind != wanted:
            has = "has no such tensor" if kind is None else f"has {kind.type} {kind.shape} with {kind.moments} moments"
            why = f"it {has}, and {name!r} is {wanted.type} {wanted.shape} with {wanted.moments}"
            raise checkpoint.refused(self.path, why)
        if self._rank.rank != 0:
            empty = (np.zeros(kind.shape, kind.dtype(which)) for which in range(1, 1 + kind.moments))
            return given, Moments(self.step, tuple(empty))
        values, *kept = self._arrays.pop(name)
        return given._replace(data=values), Moments(self.step, tuple(kept))

    def declared(self) -> None:
        """A tensor was declared: listen to other ranks, if they save too, before any of them may ask."""
        models = len(self._of.models)
        if self._models != models:
            self._models = models
            if not self._of.is_alone:
                self._rank.listen()

    # ---- what scripts wait for ----

    def before_push(self, name: str) -> None:
        """A tensor is about to be pushed: copy it first, if its step is saved, and wait until what this push overwrites
        is copied. With the last push of a script, wait until everything is saved."""
        models = self._of.models
        if name == LEAVE:
            for each in models:
                way = self._of.way(each)
                if self._rank.far.has_result(each) if way is None else way.rests:
                    self._look(each, models)
            self.wait_saved()
            self._of.asked.failed(CoveyError(NOT_SAVED, "the script ended before the step that was to be saved", AGAIN))
        elif name in models:
            self._until(lambda: name not in self._copying)
            self._look(name, models)

    def wait_saved(self, within_s: float = float("inf")) -> None:
        """Wait until nothing is being saved."""
        self._until(lambda: not self._tasks and not self._busy, within_s)

    def _until(self, over: Callable[[], bool], within_s: float = float("inf")) -> None:
        began_s = time.monotonic()
        with self._lock:
            while not over() and not self._closed and time.monotonic() - began_s < within_s:
                self._lock.wait(0.2)
                self._rank.raise_if_over()
        if time.monotonic() - began_s > 1.0 and not self._told_waits:
            self._told_waits = True
            self._rank.tell(f"waited {time.monotonic() - began_s:.1f} s for {self.path} to be written")

    def _look(self, name: str, models: Mapping[str, Declared]) -> None:
        step = self._steps_of(name)
        with self._lock:
            self._measure(step)
            said = self.steps.before_push(name, step, models)
            if said.given_up is not None:
                self._give_up(said)
            if said.copy is not None:
                self._copying[name] = step
                self._put(_Copy(name, step, self._parts_of(name)))
            if said.whole:
                self._put(_Write(step, {each: kind_of(declared) for each, declared in models.items()}))

    def _give_up(self, said: SaveDecision) -> None:
        self._tasks = deque(task for task in self._tasks if task.step != said.given_up)
        self._copying = {}
        why = f"tensors {', '.join(said.missing)} have another number of steps"
        self._failed(CoveyError(f"step {said.given_up} was not saved", why, "push all models once in each step"))

    def _put(self, task: _Copy | _Write) -> None:
        self._tasks.append(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="covey-save", daemon=True)
            self._thread.start()
        self._lock.notify_all()

    def _steps_of(self, name: str) -> int:
        way = self._of.way(name)
        return self._rank.far.steps(name) if way is None else way.steps

    def _parts_of(self, name: str) -> tuple[Part, ...]:
        """What this rank keeps of the last result of a tensor."""
        way = self._of.way(name)
        kept = self._rank.far.own_state(name) if way is None else way.own_state()
        return tuple(
            Part(name, which, first, numbers) for first, arrays in kept for which, numbers in enumerate(arrays)
        )

    def _measure(self, step: int) -> None:
        now_s = time.monotonic()
        if self._pace is None or step < self._pace[1]:
            self._pace = now_s, step
        elif step > self._pace[1] and now_s > self._pace[0]:
            self._ahead = max(
                self._ahead, min(AHEAD_MAX, int(AHEAD_S * (step - self._pace[1]) / (now_s - self._pace[0])))
            )
            if step - self._pace[1] >= 100:
                self._pace = now_s, step

    # ---- saves that people ask for ----

    def _ask(self) -> None:
        """Rank 0: save a step soon, on all ranks alike. CoveyError from other ranks."""
        if self._rank.rank != 0:
            raise CoveyError(NOT_SAVED, f"rank 0 decides that, and this is rank {self._rank.rank}", AGAIN)
        with self._lock:
            alone = self._of.is_alone
            step = self.steps.newest + (1 if alone else self._ahead)
            self.steps.ask(step)
        if not alone:
            for rank in range(1, self._rank.world_size):
                self._rank.far.tell(Tell(rank, SAVE_AT, step))

    def told(self, told: ToldByRank) -> bool:
        """A message of another rank. Returns whether it is about saves."""
        if told.about == SAVE_AT:
            with self._lock:
                late = not self.steps.ask(told.step)
            if late:
                self._rank.far.tell(Tell(told.rank, TOO_LATE, told.step))
        elif told.about == TOO_LATE:
            with self._lock:
                if told.step not in self._late:
                    self._ahead = min(AHEAD_MAX, 2 * self._ahead)
                self._late.add(told.step)
                self.steps.asked.discard(told.step)
            self._failed(CoveyError(f"step {told.step} was not saved", f"rank {told.rank} was past it", AGAIN))
        return told.about in (SAVE_AT, TOO_LATE)

    # ---- the thread ----

    def close(self, within_s: float) -> None:
        """End, once what is being saved is saved or so many seconds have passed."""
        with contextlib.suppress(RuntimeError):
            self.wait_saved(within_s)
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._busy = False
                self._lock.notify_all()
                while not self._tasks and not self._closed:
                    self._lock.wait()
                if self._closed:
                    return
                task, self._busy = self._tasks.popleft(), True
            try:
                if isinstance(task, _Copy):
                    self._copy(task)
                else:
                    self._write(task)
            except CoveyError as error:
                self._failed(error)
            except (MemoryError, OSError) as error:
                next = "see what it says"
                self._failed(CoveyError(f"step {task.step} was not saved", str(error) or repr(error), next))
            finally:
                with self._lock:
                    if isinstance(task, _Copy) and self._copying.get(task.name) == task.step:
                        del self._copying[task.name]

    def _copy(self, task: _Copy) -> None:
        copies = [part._replace(numbers=part.numbers.copy()) for part in task.parts]
        self._parts.setdefault(task.step, []).extend(copies)

    def _write(self, task: _Write) -> None:
        parts = self._parts.pop(task.step, [])
        self._parts.clear()  # of steps that were given up
        folder, rank = folder_of(self.path, task.step, self._of.start), self._rank.rank
        try:
            if parts:
                write_file(folder, rank, task.step, parts, task.kinds)
            del parts
        except CoveyError as error:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                file_of(folder, rank).with_suffix(FAILED).write_text(f"rank {rank}: {error.why}"[:400])
            if rank == 0:
                remove(folder)
            raise
        if rank == 0:
            self._complete(task, folder)

    def _complete(self, task: _Write, folder: Path) -> None:
        known = dict[int, tuple[File, int]]()
        began_s, pause_s = time.monotonic(), LOOK_S[0]
        while not found_files(folder, task.kinds, known):
            why = "a rank was past it" if task.step in self._late else next(_failures(folder), "")
            if not why and (self._closed or time.monotonic() - began_s > OTHERS_S):
                has = f"ranks {', '.join(map(str, sorted(known)))}" if known else "no rank"
                why = f"of it the files of {has} were in {folder.parent} after {OTHERS_S:.0f} s"
            if why:
                remove(folder)
                shared = "make room there, and let all hosts share that folder (COVEY_CHECKPOINTS)"
                raise CoveyError(f"step {task.step} was not saved", why, shared)
            time.sleep(pause_s)
            pause_s = min(LOOK_S[1], 2 * pause_s)
        complete(self.path, task.step, folder, task.kinds, [file for file, _ in known.values()])
        self._of.saved(task.step, self.path)
        self._of.asked.saved(task.step, self.path)

    def _failed(self, error: CoveyError) -> None:
        self._rank.tell(f"{error.what}: {error.why}")
        self._of.asked.failed(error)


def _failures(folder: Path) -> Iterator[str]:
    """What ranks say that could not write."""
    with contextlib.suppress(OSError):
        for each in folder.glob(f"rank-*{FAILED}"):
            yield each.read_text()


def _checked(path: Path) -> TensorSet | None:
    """The saved step there; None when there is none. CoveyError when it cannot be used, or nothing be written there."""
    found = opened_set(path)
    checkpoint.check(path, found, {}, os.environ)
    with contextlib.suppress(FileNotFoundError):
        if (whose := path.stat().st_uid) != os.geteuid():
            why = f"it belongs to user {whose}, and this job runs as user {os.geteuid()}"
            raise CoveyError(f"{path} would not be overwritten", why, "give another path")
    return found
