"""An elastic job's training in PyTorch: one process computes for the ranks that it carries (`covey.job.carrying`).

    model = network()                                       # no DistributedDataParallel
    sampler = covey.torch.StepSampler(len(data), 32)
    training = covey.torch.attach(model, optimizer, also=[scheduler], data=sampler, elastic=True)
    for step in training.steps(1000):
        for rank in training.carried():
            with rank:                                      # forward and backward passes of that rank
                for inputs, wanted in loader:
                    loss(model(inputs), wanted).backward()
        training.step()                                     # averages of all ranks, then optimizer.step()

What belongs to one rank is changed at `with rank:`; nothing of it depends on which process computes:

    random generators    those of that rank: PyTorch's, Python's, numpy's, and those of the model's accelerators
    place in the data    the batches of that rank
    buffers              as at the beginning of the step (running means); at its end all have those of rank 0's passes
    .grad                empty; at the end of `with rank:` it is pushed, and is empty again

Outside of `with rank:` random generators follow from the step's number, so what is drawn there is the same in each
process. Seeds of all of them come from the seed that rank 0's process had when it called `attach`.

The very first steps of `job.state` are not steps of the training. In the first one ranks compare their parameters;
where they differ, all take rank 0's in another one. A process that is lost in these begins anew, so its parameters must
follow from a seed.
"""

import atexit
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from covey.core.errors import CoveyError
from covey.frameworks.torch.devices import devices_of, is_captured
from covey.frameworks.torch.elastic_models import CANNOT_CARRY
from covey.frameworks.torch.flat_gradients import FlatGradients
from covey.frameworks.torch.random_state import generators, set_generators
from covey.frameworks.torch.state import TrainingState
from covey.frameworks.torch.types import bits, fill, halves_count, halves_of
from covey.healing.owns import JsonText
from covey.job.job_state import StopsAndSaves
from covey.tensors.numbers.arrays import Array

if TYPE_CHECKING:
    from covey.job.carrying import CarriedRank
    from covey.job.client import JobClient
    from covey.job.job_state import Place
    from covey.job.tensors import TensorHandle

DIGEST_HALVES = 8
SEED_HALVES = 4
REST = "ddp/rest"
"""Tensor with one number for each parameter, 1 where the rank has a gradient for it, and with rank 0's buffers."""


class Mean:
    """The average over all ranks of a number that each rank gives in a step."""

    def __init__(self, name: str, given: Any, found: dict[str, float]) -> None:
        """`given`: this rank's number; `found`: averages of the step, by name, once they are here."""
        self.name, self.given, self._found = name, given, found

    @property
    def value(self) -> float:
        """The average. ValueError before `ElasticTraining.average` or `step`."""
        if self.name not in self._found:
            raise ValueError(f"the average {self.name!r} is not here yet; next: ask after training.step()")
        return self._found[self.name]


class TrainedRank(int):
    """A rank that this process computes for in this step, as a number. `with rank:` forward and backward passes are
    that rank's."""

    _carried: "CarriedRank"
    _of: "ElasticTraining"

    def __new__(cls, carried: "CarriedRank", of: "ElasticTraining") -> "TrainedRank":
        made = super().__new__(cls, carried)
        made._carried, made._of = carried, of
        return made

    def __enter__(self) -> "TrainedRank":
        with ExitStack() as stack:
            stack.enter_context(self._carried)
            self._of.entered()
            stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._carried.__exit__(kind, error, at)
            return
        with ExitStack() as stack:
            stack.push(self._carried)
            self._of.passed(self._carried)

    def mean(self, name: str, value: Any) -> Mean:
        """Average a number over all ranks, such as the loss: its `value` is here after the step. Each rank gives the
        same names in a step. ValueError for one that was given before."""
        return self._of.mean(name, value)


class ElasticTraining:
    """The training that `covey.torch.attach(model, optimizer, elastic=True)` returns."""

    def __init__(self, job: "JobClient", module: Any, optimizer: Any, also: Sequence[Any], data: Any) -> None:
        """`also`, `data`: as in `covey.torch.attach`. CoveyError when a part of the state cannot be handed over."""
        self._job, self._optimizer, self._data = job, optimizer, data
        self._seeds = _Seeds(devices_of(module))
        self._contents = TrainingState(module, optimizer, [*also, self._seeds], job.tell)
        self._gradients = FlatGradients(module, job.tell)
        self._scalers = [each for each in also if isinstance(each, torch.amp.GradScaler)]
        self._data_at_first = json.dumps(data.state_dict()) if hasattr(data, "state_dict") else None
        self._start = 0
        self._is_averaged = self._is_whole = self._is_over = False
        """Whether `average` was called in this step; whether all ranks have passed in it; whether a loop over steps
        has reached its end."""
        self._slot = 0
        """How many ranks have passed in this step."""
        self._buffers: list[Any] = []
        """Buffers at the beginning of the step."""
        self._means: dict[str, Mean] = {}
        """Numbers of the entered rank that are to be averaged."""
        self._found: dict[str, float] = {}
        """Averages of such numbers in this step, once they are here."""
        self._handles: list[TensorHandle] = []
        self._mean_handles: dict[str, TensorHandle] = {}

    # ---- for the script ----

    @property
    def next_step(self) -> int:
        """Number of the step that this process is in, or of the next one once `average` or `step` was called."""
        return self._number + self._is_averaged

    def steps(self, stop: int) -> Iterator[int]:
        """Each step from the present one on, up to `stop`, which is left out. A step ends when the next one begins, so
        what a scheduler does after this loop belongs to the last one. ValueError when a step was left out."""
        self._is_over = False
        while self.next_step < stop:
            self.ends_step()
            self._seeds.seed(f"step {self._number}")
            yield self._number
            if not self._is_averaged:
                raise ValueError(
                    f"step {self._number} was ended without averages; next: call training.step(), or "
                    "training.average() and optimizer.step(), after the loop over training.carried()"
                )
        self.ends()

    def carried(self) -> Iterator[TrainedRank]:
        """The ranks that this process computes for in this step: compute in `with rank:` for each. Ends when the
        gradients of all ranks of the job are here. ValueError when it is called twice in a step, or a rank is left
        out."""
        if self._is_whole or self._is_averaged:
            raise ValueError(
                f"the ranks of step {self._number} have passed already; next: loop over them once in a step"
            )
        self._found = {}
        self._slot, self._buffers = 0, [each.detach().clone() for each in self._contents.buffers]
        for rank in self._job.carried(self._state.step):
            before = self._slot
            yield TrainedRank(rank, self)
            if self._slot == before:
                raise ValueError(f"rank {int(rank)} did not compute; next: pass for each rank inside `with rank:`")
        self._is_whole = True
        self._seeds.seed(f"averages {self._number}")

    def average(self) -> None:
        """Set `.grad` of each parameter to its average over all ranks, and buffers to rank 0's. Then clip, and call
        `optimizer.step()`; `step` does both. ValueError before all ranks have passed."""
        if not self._is_whole:
            raise ValueError(
                f"gradients of step {self._number} were averaged before all ranks of this process had passed; next: "
                "call it once in a step, after the loop over training.carried()"
            )
        *_, rest = [handle.wait() for handle in self._handles]
        self._found.update((name, float(handle.wait()[0])) for name, handle in self._mean_handles.items())
        names = self._gradients.names
        self._gradients.put({name for name, count in zip(names, rest, strict=False) if count})
        fill(self._contents.buffers, rest[len(names) :])
        self._is_whole, self._is_averaged = False, True

    def step(self) -> None:
        """Average the gradients, and make the optimizer's step, through the GradScaler in `also` if there is one."""
        self.average()
        if not self._scalers:
            self._optimizer.step()
        for scaler in self._scalers:
            scaler.step(self._optimizer)
            scaler.update()

    @property
    def stopping(self) -> bool:
        """Whether the job ends with this step, as of `covey.job.job_state.JobState`."""
        return self._state.stopping

    def save(self, path: "Place | None" = None) -> Path:
        """Save all that is needed to continue with the same bits, and return where, once everything of a step was
        done. As of `covey.job.job_state.JobState.save`."""
        if self._is_whole:
            why = "this step has gradients, and the optimizer has not made its step"
            raise CoveyError("nothing was saved", why, "save after training.step(), at the end of the step")
        return self._state.save(path)

    # ---- for the sampler ----

    between: int | None = None

    def asks_for_batches(self, begins_epoch: bool) -> None: ...

    def takes_batch(self) -> None: ...

    def batches_over(self, epoch: int) -> None: ...

    def ends_step(self) -> None:
        """End the step, if its averages were used."""
        if self._is_averaged:
            self._is_averaged = False
            self._state.done()

    def ends(self) -> None:
        """There are no more steps: at the end of the script this process waits for the others."""
        self._is_over = True

    # ---- for ranks ----

    def entered(self) -> None:
        """A rank begins to compute. CoveyError where its passes would be recorded instead of made."""
        if recording := [str(device) for device in self._contents.devices if is_captured(device)]:
            why = f"a graph is being recorded on {', '.join(recording)}, and would be played for other ranks, too"
            raise CoveyError(CANNOT_CARRY, why, "leave the graph out")
        self._means = {}
        self._gradients.clear()
        if self._slot and self._buffers:
            with torch.no_grad():
                for now, then in zip(self._contents.buffers, self._buffers, strict=True):
                    now.copy_(then)

    def mean(self, name: str, value: Any) -> Mean:
        if name in self._means:
            raise ValueError(f"the average {name!r} was given twice by one rank in one step; next: give two names")
        given = value.detach() if isinstance(value, torch.Tensor) else value
        made = self._means[name] = Mean(name, given, self._found)
        return made

    def passed(self, rank: "CarriedRank") -> None:
        """A rank has made all of its passes: push what they gave."""
        gradients, given = self._gradients.take(self._slot)
        tensors = self._gradients.tensors
        rest = self._rest(int(rank), set(given))
        self._handles = [
            rank.push(each.name, array, out=bits(each.averages).numpy(), mean=True, type=each.type)
            for each, array in zip(tensors, gradients, strict=True)
        ]
        self._mean_handles = {
            name: rank.push(f"ddp/mean {name}", np.array([float(each.given)]), mean=True)
            for name, each in self._means.items()
        }
        self._handles.append(rank.push(REST, rest))
        self._slot += 1

    def _rest(self, rank: int, given: set[str]) -> Array:
        buffers = self._contents.buffers
        flags = np.array([name in given for name in self._gradients.names], np.float32)
        mine = np.zeros(halves_count(buffers), np.float32) if rank else halves_of(buffers)
        return np.concatenate([flags, mine])

    # ---- how it begins ----

    @property
    def _number(self) -> int:
        """Number of the step that this process is in, counted in steps of the optimizer."""
        return self._start + self._state.step - (self._contents.first or 0)

    def begin(self, step: int, checkpoint: "Place | bool" = False) -> None:
        """Begin, or take over what others have. CoveyError as of `job.state`, and when this training is another
        one."""
        self._start, self._seeds.base = step, torch.initial_seed() & (1 << 63) - 1
        stop = StopsAndSaves(load=self._resume, types=lambda: self._contents.bfloats, made="torch")
        self._state = self._job.state(
            self._contents.arrays,
            self._load,
            own=self._own_now,
            enter=self._enter,
            step=step,
            checkpoint=checkpoint,
            stop=stop,
        )
        while self._contents.first is None:
            are_same = self._are_compared() if self._state.step == step else self._are_given()
            if are_same:
                self._contents.first = self._state.step + 1
            self._state.done()
        atexit.register(self._leave)

    def _resume(self, arrays: dict[str, Array], own: None) -> None:
        self._contents.load(arrays, True)

    def _load(self, arrays: dict[str, Array], own: None) -> None:
        self._contents.load(arrays)

    def _are_compared(self) -> bool:
        """Whether all ranks have the same parameters and buffers."""
        rows = np.zeros((self._job.world_size, DIGEST_HALVES), np.float32)
        for rank in self._job.carried(self._state.step):
            with rank:
                mine = np.zeros_like(rows)
                mine[int(rank)] = np.frombuffer(self._contents.digest(), "<u2")
                handles = rank.push("ddp/same", mine), rank.push("ddp/seed", self._seeds.halves(int(rank)))
        found = handles[0].wait()
        self._seeds.take(handles[1].wait())
        return bool((found == found[0]).all())

    def _are_given(self) -> bool:
        """Give all ranks the parameters and buffers of rank 0, and its seed."""
        tensors = self._contents.tensors
        for rank in self._job.carried(self._state.step):
            with rank:
                given = [np.zeros(halves_count([each]), np.float32) if rank else halves_of([each]) for each in tensors]
                handles = [rank.push(f"ddp/first {at}", each) for at, each in enumerate(given)]
                seed = rank.push("ddp/seed", self._seeds.halves(int(rank)))
        for each, handle in zip(tensors, handles, strict=True):
            fill([each], handle.wait())
        self._seeds.take(seed.wait())
        return True

    # ---- what is a rank's own ----

    def _own_now(self) -> JsonText:
        """What the entered rank's own is now; nothing before the training has begun."""
        if self._contents.first is None:
            return JsonText("null")
        data = "null" if self._data_at_first is None else json.dumps(self._data.state_dict())
        return JsonText(f'{{"data": {data}, "generators": {generators(self._contents.devices).as_json()}}}')

    def _enter(self, rank: int, own: Any) -> None:
        """Draw, and take batches, as this rank from now on."""
        if self._contents.first is None:
            return
        if own is None:
            self._seeds.seed(f"rank {rank}")
        else:
            set_generators(own["generators"], self._contents.devices)
        if self._data_at_first is not None:
            self._data.load_state_dict(json.loads(self._data_at_first) if own is None else own["data"])
        if hasattr(self._data, "as_rank"):
            self._data.as_rank(rank)

    def _leave(self) -> None:
        """At the end of a script that trained to the end, wait for processes that may still need this one's results.
        Does nothing in a forked child."""
        if self._is_over and not self._job.is_elsewhere:
            self.ends_step()
            self._job.leave()


class _Seeds:
    """The seed from which all random generators of a training follow; the same on all ranks."""

    def __init__(self, devices: Sequence[Any]) -> None:
        """`devices`: accelerators whose generators are seeded, too; torch.manual_seed would remember each call for
        every kind of accelerator that is not in use."""
        self.base, self._devices = 0, {torch.get_device_module(each) for each in devices}

    def seed(self, what: str) -> None:
        """Seed all generators for what comes now."""
        drawn = hashlib.blake2b(f"{self.base} {what}".encode(), digest_size=8).digest()
        number = int.from_bytes(drawn) >> 1
        torch.default_generator.manual_seed(number)
        for device in self._devices:
            device.manual_seed_all(number)
        random.seed(number)
        np.random.seed(number & 0xFFFF_FFFF)

    def halves(self, rank: int) -> Array:
        """What a rank pushes so that all have rank 0's seed."""
        found = np.frombuffer(self.base.to_bytes(8, "little"), "<u2").astype(np.float32)
        return np.zeros_like(found) if rank else found

    def take(self, halves: Array) -> None:
        self.base = int.from_bytes(halves.astype("<u2").tobytes(), "little")

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.base}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base = state["seed"]


def elastic_training(
    module: Any,
    optimizer: Any,
    also: Sequence[Any],
    data: Any,
    job: "JobClient",
    step: int,
    checkpoint: "Place | bool" = False,
) -> ElasticTraining:
    """The training of `covey.torch.attach` with `elastic`."""
    if data is not None and not any(hasattr(data, each) for each in ("as_rank", "state_dict")):
        why = f"data= is a {type(data).__qualname__}, which has neither as_rank(rank) nor a state_dict"
        raise CoveyError(CANNOT_CARRY, why, "give a covey.torch.StepSampler, or choose samples by rank and step")
    training = ElasticTraining(job, module, optimizer, also, data)
    training.begin(step, checkpoint)
    if hasattr(data, "carries"):
        data.carries(training)
    return training
