"""DistributedDataParallel in a job whose ranks may be lost: `covey.job.job_state`, for a PyTorch script.

    state = covey.torch.attach(ddp, optimizer, also=[scheduler, scaler], data=sampler)

A step is one step of the optimizer, with all passes before it and what the script does after it, up to the next forward
pass. So the state that a successor takes over includes what a scheduler did. It is asked for while this rank waits for
sums, when nothing of it has changed since the step began:

    before     attached, the loop has not begun
    in step    forward, backward: gradients are pushed (`covey.frameworks.torch.gradients`), and awaited
    stepped    optimizer.step() was made: scheduler, figures, evaluation of this rank alone
    in step    the next forward pass, or the next turn of `steps`, `epochs`: `job.state` is told that the step is done

Once a step is done, all ranks have rank 0's buffers (running means), as a forward pass has with DDP's
`broadcast_buffers`. DDP's own broadcast is turned off, since it would be a push before this step's random numbers are
drawn.

With several optimizers a step is one turn of `steps`, or ends with `done`; its parts, each of which ends with an
optimizer's step, are steps of `job.state` (`covey.frameworks.torch.steps.step_parts`).

The very first step of `job.state` is not a step of the training: in it ranks compare their parameters, and take rank
0's where they differ, as DDP's constructor does elsewhere. A rank that is lost in it begins anew, so its parameters
must follow from a seed.
"""

import atexit
import enum
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from covey.core.errors import CoveyError
from covey.frameworks.torch.devices import DeviceBuckets, DeviceReads
from covey.frameworks.torch.gradients import CANNOT_HEAL, HEAD, UNFREEZE, AwaitsResult, Gradients
from covey.frameworks.torch.group import TensorsGroup
from covey.frameworks.torch.random_state import Generators, generators, set_generators
from covey.frameworks.torch.state import TrainingState
from covey.frameworks.torch.steps.held_words import held_words
from covey.frameworks.torch.steps.step_parts import END_STEPS, StepParts
from covey.frameworks.torch.types import fill, halves_count, halves_of, in_host_memory
from covey.healing.likeness import Kernels, drawn, libraries
from covey.healing.owns import JsonText
from covey.job.job_state import StopsAndSaves
from covey.job.tensors import TensorClient
from covey.tensors.numbers.arrays import Array

if TYPE_CHECKING:
    from covey.job.client import JobClient
    from covey.job.job_state import Place


def _computed() -> list[Array]:
    """Results of kernels that most models use (products, convolution, norm, activations), to compare processes."""
    a, b = (torch.from_numpy(drawn(*shape)) for shape in ((96, 130), (70, 130)))
    images, filters = (torch.from_numpy(drawn(*shape)) for shape in ((2, 3, 19, 19), (8, 3, 3, 3)))
    with torch.no_grad():
        linear = torch.nn.functional.linear(a, b)
        each = [
            linear,
            torch.nn.functional.conv2d(images, filters),
            torch.nn.functional.layer_norm(linear, (70,)),
            torch.nn.functional.gelu(linear),
            linear.softmax(1),
            (a.double() @ a.double().T).sum(0),
        ]
    return [one.numpy() for one in each]


libraries["PyTorch"] = Kernels(str(torch.__version__), _computed)
DIGEST_HALVES = 8
_attached: weakref.WeakSet[TensorClient] = weakref.WeakSet()
"""Clients whose ranks have the state of a training."""


class EndsRounds(Protocol):
    """A thread that waits for rounds."""

    def end(self, wait: Callable[[], object], gradients: Any, future: Any) -> None:
        """When `wait` returns, the future gets the gradients, or the error."""


class Phase(enum.Enum):
    BEFORE = "before"
    IN_STEP = "in step"
    STEPPED = "stepped"


class HealedTraining:
    """The training that `covey.torch.attach(ddp, optimizer)` returns."""

    def __init__(
        self,
        job: "JobClient",
        ddps: Sequence[Any],
        optimizers: Sequence[Any],
        state: TrainingState,
        group: TensorsGroup,
        data: Any,
        ends: EndsRounds,
    ) -> None:
        self._tensors, self._contents, self._group, self._data = job.tensors, state, group, data
        self._optimizers = optimizers
        self._parts = StepParts(job.tensors, state, len(ddps) > 1) if len(optimizers) > 1 else None
        """The parts of a step; None: it has one, and ends with its optimizer's step."""
        self._sums: Any = self._parts or job.tensors
        self._at = Phase.BEFORE
        self._own: Any = None
        """Own state of the lost rank, until the loop begins."""
        self._drawn: Generators | None = None
        """The generators at the first push of this step, or just before it."""
        self._drawn_json = JsonText()
        self._said = self._began = "null"
        """This rank's own state at the end of the newest part that pushed something, and at the beginning of this step,
        as JSON."""
        self._buffers: AwaitsResult | None = None
        self._is_over = self._computes = False
        """Whether no step follows; whether there was a forward pass since an optimizer stepped."""
        heads = [HEAD] if len(ddps) == 1 else [f"{HEAD}{at}" for at in range(len(ddps))]
        self._gradients = [
            Gradients(
                self._sums, [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad], ends.end, h
            )
            for ddp, h in zip(ddps, heads, strict=True)
        ]
        """By model."""
        self._devices = state.devices
        self._names = {id(each): name for name, each in state.parameters}
        self._averaged = {key for each in self._gradients for key in each.averaged}
        self._buckets = DeviceBuckets(job.tensors.tell)
        self._own_of_step: JsonText | None = None
        """This rank's own state, taken in the backward pass by the thread that computes; another thread pushes it."""

    # ---- for the script ----

    @property
    def step(self) -> int:
        """Number of the step that this rank is in, counted in steps of the optimizer, or of the script where there are
        several."""
        return self._state.step - 1 if self._parts is None else self._parts.step + self._parts.is_over

    def steps(self, stop: int) -> Iterator[int]:
        """Each step from the present one on, up to `stop`, which is left out: one turn is one step, also when a scaler
        skipped the optimizer's. CoveyError when a collective of the step was not waited for."""
        if self.step < stop:
            self._loop_begins()
        if self._parts is not None:
            self._parts.by_script = True
        while self.step < stop:
            yield self.step
            self.done()
            self._step_over()
        self.ends()

    def done(self) -> None:
        """End the step, where no loop or forward pass does. With several optimizers, the end of each step; a scheduler
        may step after it. Errors as of `steps`."""
        if self._parts is None:
            self._next_step()
            return
        self._step_over()
        if self._drawn is not None and generators(self._devices) != self._drawn:
            raise _late_draws(f"the last push of step {self.step}")
        self._parts.by_script = self._parts.is_over = True

    @property
    def stopping(self) -> bool:
        """Whether the job ends with this step, as of `covey.job.job_state.JobState`."""
        return self._state.stopping if self._parts is None else self._parts.stopping(lambda: self._state.stopping)

    def save(self, path: "Place | None" = None) -> Path:
        """Save all that is needed to continue with the same bits, and return where: once everything of a step was done
        (`scheduler.step()` too), or before its forward pass. As of `covey.job.job_state.JobState.save`; parameters
        have the names `parameter/..` there, and the types that they have here."""
        if self._is_within_step:
            why = "this step has gradients, and the optimizer has not made its step"
            raise CoveyError("nothing was saved", why, "save after optimizer.step(), at the end of the step")
        self._finish_buffers()
        if self._parts is None:
            return self._state.save(path)
        self._parts.saves = self._at is Phase.STEPPED or self._parts.is_over
        try:
            found = self._state.save(path)
        finally:
            was_at_end, self._parts.saves = self._parts.saves, False
        if was_at_end and not self._parts.is_over:
            self._parts.saved()
        return found

    @property
    def _is_within_step(self) -> bool:
        parts = self._parts
        if parts is None:
            return self._at is Phase.IN_STEP and self._drawn is not None
        if self._at is Phase.STEPPED or parts.is_over:
            return parts.is_again
        return self._drawn is not None or not parts.begins_step

    # ---- for the sampler ----

    @property
    def next_step(self) -> int:
        return self.step + (self._at is Phase.STEPPED and self._parts is None)

    def asks_for_batches(self, begins_epoch: bool) -> None:
        """A DataLoader draws a random number here, at the beginning of each epoch. When this process begins within an
        epoch, the kept generators include that draw."""
        if begins_epoch:
            self._loop_begins()

    def takes_batch(self) -> None:
        self._loop_begins()

    def ends_step(self) -> None:
        if self._parts is None:
            if self._at is Phase.STEPPED:
                self._next_step()
            return
        self._step_over()
        if self._at is Phase.STEPPED or self._parts.number:
            why = "an epoch ended in the middle of a step, and several optimizers do not say where steps end"
            raise CoveyError(CANNOT_HEAL, why, END_STEPS)

    def ends(self) -> None:
        """The last step is done, and no step follows. At the end of the script this rank waits for the others."""
        self._step_over()
        self._at, self._is_over = Phase.IN_STEP, True

    # ---- how it begins ----

    def begin(self, job: "JobClient", step: int, checkpoint: "Place | bool" = False) -> None:
        """Begin, or take over from a lost rank. CoveyError as of `job.state`, and when this training is another one."""
        parts = self._parts
        stop = StopsAndSaves(load=self._resume, types=lambda: self._contents.bfloats, draws_ahead=True, made="torch")
        get = self._contents.arrays
        if parts is not None:
            get, parts.step, stop = parts.arrays, step, stop._replace(may_end=lambda: parts.begins_step)
        self._state = job.state(get, self._load, own=self._own_now, step=step, checkpoint=checkpoint, stop=stop)
        self._group.attached(self._sums, self._permit)
        if self._contents.first is None:
            self._agree_on_parameters()
            self._contents.first = self._state.step + 1
            self._next_part(True)
            self._said, self._at = "null", Phase.BEFORE
        if self._state.step == self._contents.first:
            self._own, self._began = None, "null"  # the script has yet to draw what it draws before its loop
        atexit.register(self._leave)

    def _resume(self, arrays: dict[str, Array], own: Any) -> None:
        self._load(arrays, own, True)

    def _load(self, arrays: dict[str, Array], own: Any, elsewhere: bool = False) -> None:
        if self._parts is None:
            self._contents.load(arrays, elsewhere)
        else:
            self._parts.load(arrays, elsewhere)
            own = self._own_at_beginning(own)
        if own is not None and self._contents.first is not None:
            self._own = own
            set_generators(own["generators"], self._devices)
            if own["data"] is not None:
                self._data.load_state_dict(own["data"])

    def _own_at_beginning(self, own: Any) -> Any:
        """This rank's own state at the beginning of the step; `own`: where the others are, at the end of a part."""
        assert self._parts is not None
        if own is None:
            return None
        if self._parts.first_live:
            self._parts.drew(lambda: json.loads(generators(self._devices).as_json()), own["generators"])
            own = own["began"]
        else:
            own = {name: own[name] for name in ("data", "generators")}
        self._began = self._said = json.dumps(own)
        return own

    def _loop_begins(self) -> None:
        """The script's loop begins; random numbers that it drew before do not count."""
        if self._at is Phase.BEFORE:
            self._at = Phase.IN_STEP
            if self._own is not None:
                set_generators(self._own["generators"], self._devices)
                self._own = None

    def _agree_on_parameters(self) -> None:
        """Give all ranks the parameters of rank 0."""
        rank, ranks = self._tensors.rank, self._tensors.world_size
        digests = np.zeros((ranks, DIGEST_HALVES), np.float32)
        digests[rank] = np.frombuffer(self._contents.digest(), "<u2")
        found = self._tensors.push_pull("ddp/same", digests)
        if (found == found[0]).all():
            return
        tensors = self._contents.tensors
        given = [halves_of([each]) if rank == 0 else np.zeros(halves_count([each]), np.float32) for each in tensors]
        handles = [self._tensors.push(f"ddp/first {at}", each) for at, each in enumerate(given)]
        for each, handle in zip(tensors, handles, strict=True):
            fill([each], handle.wait())

    # ---- in a step ----

    def average(self, model: int, bucket: Any) -> Any:
        """A communication hook of this model: the future of the averages of the gradients in this bucket."""
        if self._parts is not None:
            self._part_pushes()
        parameters, gradients = bucket.parameters(), bucket.buffer()
        if in_host_memory(gradients):
            future = torch.futures.Future()
            self._gradients[model].came(parameters, gradients, future, bucket.is_last())
            self._push_buffers(DeviceReads(()))
            return future
        if self._own_of_step is None and not (self._parts and self._parts.is_again):
            self._own_of_step = self._own_now()
        what = f"the bucket of {self._names[id(parameters[0])]!r} in step {self.step}"
        came = self._came(self._gradients[model], parameters, DeviceReads(self._devices))
        return self._buckets.take(what, parameters, gradients, came)

    def _came(self, into: Gradients, parameters: Sequence[Any], reads: DeviceReads) -> Callable[[Any, Any], None]:
        """What happens when a bucket of a device is in host memory, in another thread. Buffers are pushed before the
        bucket, so they have been when all buckets are done."""

        def came(host: Any, future: Any) -> None:
            self._push_buffers(reads)
            into.came(parameters, host, future)

        return came

    def _push_buffers(self, reads: DeviceReads) -> None:
        """Push rank 0's buffers, once a step: a backward pass does not change them."""
        buffers = self._contents.buffers
        if self._buffers is not None or not buffers:
            return
        mine = np.zeros(halves_count(buffers), np.float32)
        if self._tensors.rank == 0:
            mine = halves_of([reads.read("a buffer", each) for each in buffers])
        self._buffers = self._sums.push("ddp/buffers", mine)

    def before_forward(self, module: Any, *_: Any) -> None:
        if module.training and torch.is_grad_enabled():
            if self._parts is None:
                self.ends_step()
            else:
                self._step_over()
            self._own, self._computes = None, True
            if self._at is Phase.BEFORE:
                self._at = Phase.IN_STEP

    def after_forward(self, module: Any, *_: Any) -> None:
        """Nothing is drawn after the last forward pass: this rank's own state is sent during the backward pass."""
        is_live = self._parts is None or not self._parts.is_again
        if module.training and torch.is_grad_enabled() and module.require_backward_grad_sync and is_live:
            self._state.drawn()

    def before_optimizer(self, optimizer: Any, *_: Any) -> None:
        """All sums are here. CoveyError when the random generators changed after they were sent, and for a parameter
        whose gradient is not averaged."""
        self._finish_buffers()
        for group in optimizer.param_groups:
            for each in group["params"]:
                if id(each) not in self._averaged and each.grad is not None:
                    name = self._names.get(id(each), f"of shape {tuple(each.shape)}")
                    why = f"the gradient of parameter {name!r} is not averaged: it was frozen, or not in the model"
                    raise CoveyError(CANNOT_HEAL, why, UNFREEZE)
        if self._parts is not None:
            self._parts.steps(next((at for at, each in enumerate(self._optimizers) if each is optimizer), -1))
        elif self._drawn is not None and generators(self._devices) != self._drawn:
            raise _late_draws("this step's first push")

    def after_optimizer(self, *_: Any) -> None:
        self._at, self._computes = Phase.STEPPED, False

    def _part_pushes(self) -> None:
        """Gradients come. CoveyError where a part is done again otherwise than before, and after the step's end."""
        assert self._parts is not None
        if self._parts.is_over:
            why = f"gradients came after the end of step {self.step - 1}, of a forward pass before it"
            raise CoveyError(CANNOT_HEAL, why, "call backward() in the step of its forward pass")
        self._part_over()
        self._parts.repeats()

    def _part_over(self) -> None:
        """Begin the next part of the step with what is pushed now, if an optimizer has stepped in this one. A forward
        pass alone begins none: it may be the script's look at what was learnt."""
        if self._parts is not None and self._at is Phase.STEPPED:
            self._at = Phase.IN_STEP
            self._finish_buffers()
            self._next_part(self._parts.ends_part())

    def _step_over(self) -> None:
        """Begin the next step, if the script has ended one that has parts."""
        if self._parts is not None and self._parts.is_over:
            self._finish_buffers()
            self._parts.ends_step()
            self._began = self._said
            self._next_part(True)

    def _next_step(self) -> None:
        self._finish_buffers()
        self._next_part(True)

    def _next_part(self, is_told: bool) -> None:
        """Begin the next step of `job.state`, if others are told of it."""
        if is_told:
            self._state.done()
        self._drawn, self._own_of_step, self._at = None, None, Phase.IN_STEP
        for each in self._gradients:
            each.step_begins()
        self._group.step_begins()

    def scales(self, scaler: Any) -> None:
        """Count a step that this scaler skips, too."""
        step = scaler.step

        def scaled(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self.before_optimizer(optimizer)
            result = step(optimizer, *args, **kwargs)
            self.after_optimizer()
            return result

        scaler.step = scaled

    def _own_now(self) -> JsonText:
        """This rank's own state, as it is at the step's end."""
        if self._own_of_step is not None:
            return self._own_of_step
        now = generators(self._devices)
        if now != self._drawn or not self._drawn_json:
            self._drawn, self._drawn_json = now, now.as_json()
        data = json.dumps(self._data.state_dict()) if hasattr(self._data, "state_dict") else "null"
        own = f'"data": {data}, "generators": {self._drawn_json}'
        self._said = f"{{{own}}}"
        return JsonText(self._said if self._parts is None else f'{{"began": {self._began}, {own}}}')

    def _finish_buffers(self) -> None:
        handle, self._buffers = self._buffers, None
        if handle is not None:
            fill(self._contents.buffers, handle.wait())

    def _permit(self, kind: str) -> None:
        """CoveyError at a point that a successor would not pass."""
        if self._parts is not None and self._computes and not self._parts.is_over:
            self._part_over()
        if self._at is not Phase.IN_STEP:
            when = "before the first step" if self._at is Phase.BEFORE else "after optimizer.step()"
            why = f"it is called {when}, where a rank that replaces a lost one does not call it"
            raise CoveyError(f"{kind} was refused", why, "call it after backward() and before optimizer.step()")

    def _leave(self) -> None:
        """At the end of a script that trained to the end, wait for ranks that may still need this one's results. Does
        nothing in a forked child."""
        if self._is_over and not self._tensors.is_elsewhere:
            self._tensors.leave()


def _late_draws(after: str) -> CoveyError:
    why = f"random numbers were drawn after {after}, so they would be lost with this rank"
    return CoveyError(CANNOT_HEAL, why, "draw them in the forward pass, and call collectives after backward()")


def healed(
    ddps: Sequence[Any],
    optimizers: Sequence[Any],
    also: Sequence[Any],
    data: Any,
    job: "JobClient",
    step: int,
    ends: EndsRounds,
    checkpoint: "Place | bool" = False,
) -> HealedTraining:
    """The training of `covey.torch.attach` with optimizers."""
    if job.world_size < 2:
        why = "this job has one rank, so no other rank has its state"
        raise CoveyError(CANNOT_HEAL, why, "submit it with --workers 2 or more, or train without Covey")
    group = ddps[0].process_group
    for ddp in ddps:
        if not isinstance(ddp.process_group, TensorsGroup):
            why = f"its process group ({ddp.process_group.name()}) spans the processes that may be lost"
            next_ = "call covey.torch.init_process_group() instead of torch.distributed.init_process_group()"
            raise CoveyError(CANNOT_HEAL, why, next_)
    if job.tensors in _attached:
        why = "a training was attached before, and a rank that replaces a lost one gets one state"
        raise CoveyError(CANNOT_HEAL, why, "give all of it at once: attach([ddp, ..], [optimizer, ..])")
    state = TrainingState([ddp.module for ddp in ddps], optimizers, also, job.tensors.tell)
    training = HealedTraining(job, ddps, optimizers, state, group, data, ends)
    for at, ddp in enumerate(ddps):
        ddp.broadcast_buffers = False
        ddp.register_comm_hook(None, _hook(training, at))
    _attached.add(job.tensors)
    training.begin(job, step, checkpoint)
    if hasattr(data, "follow"):
        data.follow(training)
    for ddp in ddps:
        ddp.register_forward_pre_hook(training.before_forward)
        ddp.register_forward_hook(training.after_forward)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(training.before_optimizer)
        optimizer.register_step_post_hook(training.after_optimizer)
    for each in also:
        if isinstance(each, torch.amp.GradScaler):
            training.scales(each)
    state.groups.follow()
    if job.tensors.rank == 0:
        job.tensors.tell(held_words(state, optimizers, also, len(optimizers) > 1 and len(ddps) > 1))
    return training


def _hook(training: HealedTraining, model: int) -> Callable[[Any, Any], Any]:
    def average(_: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return training.average(model, bucket)

    return average
