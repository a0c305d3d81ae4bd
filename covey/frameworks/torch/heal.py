"""DistributedDataParallel in a job whose ranks may be lost: `covey.job.job_state`, for a PyTorch script.

    state = covey.torch.attach(ddp, optimizer, also=[scheduler, scaler], data=sampler)

A step is one step of the optimizer, with all passes before it and what the script does after it, up to the next forward
pass. So the state that a successor takes over includes what a scheduler did. It is asked for while this rank waits for
sums, when nothing of it has changed since the step began:

    before     attached, the loop has not begun
    in step    forward, backward: gradients are pushed (`covey.frameworks.torch.gradients`), and awaited
    stepped    optimizer.step() was made: scheduler, figures, evaluation of this rank alone
    between    the script calls a collective then (validation, a barrier): `job.state` is told that the step is done
    in step    the next forward pass, or the next turn of `steps`, `epochs`: `job.state` is told that the step is done

Once a step is done, all ranks have rank 0's buffers (running means), as a forward pass has with DDP's
`broadcast_buffers`. DDP's own broadcast is turned off, since it would be a push before this step's random numbers are
drawn.

The time between two steps, if the script calls collectives in it, is a step of `job.state` of its own: it ends with a
round that has every rank's own state as it is then. After the last step of an epoch, what is given to successors is the
state when the script left its loop over batches, and a successor's first epoch has no batches: so it does again what
the script does at an epoch's end, and its collectives are rounds that others wait in. Large tensors must be as they
were, which a sum of their bits tells. After any other step a successor does not pass there, and says so.

With several optimizers a step is one turn of `steps`, or ends with `done`; its parts, each of which ends with an
optimizer's step, are steps of `job.state` (`covey.frameworks.torch.steps.step_parts`). A collective after an
optimizer's step is in the part that follows.

The very first step of `job.state` is not a step of the training: in it ranks compare their parameters, and take rank
0's where they differ, as DDP's constructor does elsewhere. A rank that is lost in it begins anew, so its parameters
must follow from a seed.
"""

import atexit
import enum
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from covey.core.errors import CoveyError
from covey.frameworks.torch.devices import DeviceBuckets, DeviceReads
from covey.frameworks.torch.gradients import CANNOT_HEAL, HEAD, UNFREEZE, AwaitsResult, Gradients
from covey.frameworks.torch.group import TensorsGroup
from covey.frameworks.torch.random_state import Generators, generators, set_generators
from covey.frameworks.torch.state import TrainingState, changed_in
from covey.frameworks.torch.steps.step_parts import END_STEPS, StepParts
from covey.frameworks.torch.types import fill, halves_count, halves_of, in_host_memory
from covey.healing.likeness import Kernels, drawn, libraries
from covey.healing.machine import NOT_SAVED
from covey.healing.owns import JsonText
from covey.job.job_state import StopsAndSaves
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


class EndsRounds(Protocol):
    """A thread that waits for rounds."""

    def end(self, wait: Callable[[], object], gradients: Any, future: Any) -> None:
        """When `wait` returns, the future gets the gradients, or the error."""


class Phase(enum.Enum):
    BEFORE = "before"
    IN_STEP = "in step"
    STEPPED = "stepped"
    BETWEEN = "between"


OWN_GENERATOR = "draw them from a generator of their own, as DataLoader(generator=..) does (docs/guides/healing.md)"
DRAWS_BETWEEN = (
    "draws random numbers after optimizer.step(), for an evaluation, say: a rank that is lost before its next step "
    "begins is replaced by one that does not draw them, and the result may have other bits then; next: " + OWN_GENERATOR
)
SAVED_EARLIER = (
    "saved random generators as they were at the step's last push: numbers were drawn since, and those of other ranks "
    "are not known here, so a job that goes on from there draws others; next: save before that, or " + OWN_GENERATOR
)
SAVE_BEFORE = "save before the first collective that follows a step, or in the next step"
UNKNOWN = -1
"""In place of an epoch: between two steps, where a successor does not pass."""


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
        ends: EndsRounds | None = None,
    ) -> None:
        """`ends`: the thread that waits for sums of gradients; None: there are no `ddps`."""
        self._tensors, self._contents, self._group, self._data = job.tensors, state, group, data
        self._optimizers = optimizers
        self._parts = StepParts(job.tensors, state, len(ddps) > 1) if len(optimizers) > 1 else None
        """The parts of a step; None: it has one, and ends with its optimizer's step."""
        self._sums: Any = self._parts or job.tensors
        self._at = Phase.BEFORE
        self._step = 0
        self._counts = True
        """Whether what ends is a step of the training."""
        self._left: tuple[int, Mapping[str, Array]] | None = None
        """The epoch whose batches the script had all, and the state when it left the loop over them."""
        self._held: Mapping[str, Array] | None = None
        """The state at the beginning of the time between two steps, in such a time."""
        self._between_own: JsonText | None = None
        """This rank's own state at the newest collective between two steps."""
        self._is_said = False
        """Whether people were told of a time between two steps in which no rank can be replaced."""
        self._before: int | None = None
        """The step of `job.state` in which collectives before the loop are rounds."""
        self._own: Any = None
        """Own state of the lost rank, until the loop begins."""
        self._drawn: Generators | None = None
        """The generators at the first push of this step, or just before it."""
        self._drawn_json = JsonText()
        self._data_json = "null"
        """This rank's place in the data, as it was said with these generators."""
        self._turned: Generators | None = None
        """The generators when the script turned to the next step; None: it has not, or nothing told."""
        self._has_moved = False
        """Whether this rank drew random numbers between the last push of the step before and this step."""
        self._says_draws = self._says_saved = True
        """Whether people are still to be told that such numbers are drawn, and that they are not in what is saved."""
        self._said = self._began = "null"
        """This rank's own state at the end of the newest part that pushed something, and at the beginning of this step,
        as JSON."""
        self._buffers: AwaitsResult | None = None
        self._is_over = self._computes = self._is_stepping = False
        """Whether no step follows; whether there was a forward pass since an optimizer stepped; whether one does."""
        heads = [HEAD] if len(ddps) == 1 else [f"{HEAD}{at}" for at in range(len(ddps))]
        self._gradients = [
            Gradients(
                self._sums, [(name, p) for name, p in ddp.module.named_parameters() if p.requires_grad], ends.end, h
            )
            for ddp, h in zip(ddps, heads, strict=True)
            if ends is not None
        ]
        """By model."""
        self._devices = state.devices
        self._names = {id(each): name for name, each in state.parameters}
        self._averaged = {key for each in self._gradients for key in each.averaged}
        self._buckets = DeviceBuckets(job.tensors.tell)
        self._drawn_before: Generators | None = None
        """The generators at the first push of the step before."""
        self._follows_step = False
        """Whether this part of a step began with a collective after an optimizer's step."""
        self._own_of_step: JsonText | None = None
        """This rank's own state, taken in the backward pass by the thread that computes; another thread pushes it."""

    # ---- for the script ----

    @property
    def step(self) -> int:
        """Number of the step that this rank is in, counted in steps of the optimizer, or of the script where there are
        several."""
        return self._step if self._parts is None else self._parts.step + self._parts.is_over

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
        self._turns()
        if self._at is Phase.BETWEEN:
            self._next_begins()
        elif self._parts is None:
            self._step_done()
        else:
            self._step_over()
            if self._drawn is not None and generators(self._devices) != self._drawn:
                raise late_draws(f"the last push of step {self.step}")
            self._parts.by_script = self._parts.is_over = True

    def _step_done(self) -> None:
        self._ends(self._place(self._step + 1))
        self._be(Phase.IN_STEP)

    def _turns(self) -> None:
        """The script turns to the next step: what it draws from here on a successor draws, too."""
        if self._parts is None and self._at is Phase.STEPPED and self._turned is None:
            self._turned = generators(self._devices)

    def _own_left(self) -> JsonText | None:
        """This rank's own state at the end of this step, if it changed after the script's last push; None: it is what
        was said."""
        if self._turned is None or self._drawn is None or self._turned == self._drawn:
            return None
        if self._says_draws:
            self._say(DRAWS_BETWEEN)
        self._says_draws = False
        self._said = f'{{"data": {self._data_json}, "generators": {self._turned.as_json()}}}'
        return JsonText(self._said)

    def _ends(self, place: dict[str, Any], counts: bool = True, may_end: bool = True) -> None:
        """End a step of `job.state`; `place`: where in the script the next one begins; `counts`: whether it was one of
        the training."""
        self._finish_buffers()
        self._step, self._counts, self._contents.place = place["step"], counts, place
        left = self._own_left()
        self._state.done(may_end=may_end)
        self._has_moved = left is not None
        if left is not None:
            self._state.moved(lambda: left)
        self._begins()

    def _begins(self) -> None:
        """Nothing was pushed since here."""
        self._drawn, self._own_of_step, self._left, self._turned, self._follows_step = None, None, None, None, False
        for each in self._gradients:
            each.step_begins()
        self._group.step_begins()

    def _place(self, step: int, between: int | None = None, call: str = "") -> dict[str, Any]:
        """Where in the script step `step` of the training begins; `between`: the epoch after whose batches."""
        found: dict[str, Any] = {"step": step, "before": self._before}
        return found if between is None else {**found, "between": between, "call": call}

    def _be(self, phase: Phase) -> None:
        if self._at is Phase.BEFORE and phase is not Phase.BEFORE:
            self._group.calls.kept.over()
        self._at = phase
        self._tensors.own_later = phase in (Phase.BEFORE, Phase.BETWEEN)

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
        if self._at is Phase.BETWEEN:
            self._check_between()
        elif self._drawn_on and self._says_saved:
            self._says_saved = False
            self._say(SAVED_EARLIER)
        self._finish_buffers()
        place, parts = self._contents.place, self._parts
        if parts is not None:
            parts.saves = self._at is Phase.STEPPED or parts.is_over
            if self._at is Phase.BETWEEN:
                parts.begins_again()
        if self._at is Phase.STEPPED or (parts is not None and parts.saves):
            self._contents.place = self._place((self._step if parts is None else parts.step) + 1)
        try:
            found = self._state.save(path)
        finally:
            self._contents.place = place
            if parts is not None:
                was_at_end, parts.saves = parts.saves, False
        if parts is not None and was_at_end and not parts.is_over:
            parts.saved()
        return found

    @property
    def _drawn_on(self) -> bool:
        """Whether this rank has drawn random numbers since it said its own state, and others may have."""
        if self._parts is None and self._at is Phase.STEPPED:
            return self._drawn not in (None, generators(self._devices))
        return self._at is Phase.IN_STEP and self._has_moved

    def _own_to_save(self, is_last: bool) -> JsonText | None:
        """This rank's own state in the last checkpoint of a job: all ranks are here, and may have drawn since they said
        theirs."""
        return JsonText(self._said) if is_last else None

    @property
    def _is_within_step(self) -> bool:
        parts = self._parts
        if parts is None:
            return self._at is Phase.IN_STEP and self._drawn is not None
        if self._at is Phase.STEPPED or parts.is_over:
            return parts.is_again
        return self._at is not Phase.BETWEEN and (self._drawn is not None or not parts.begins_step)

    def _check_between(self) -> None:
        """CoveyError where what would be saved now belongs to no beginning of the script's loops."""
        if self._held is not None and (names := changed_in(self._held)):
            why = f"{names[0]} was changed after an epoch's steps, and a job that goes on from here does that again"
            raise CoveyError(NOT_SAVED, why, SAVE_BEFORE)
        self._check_draws()

    def _check_draws(self) -> None:
        if self._held is None and self._drawn_before not in (None, generators(self._devices)):
            why = "random numbers were drawn after optimizer.step(), and those of other ranks are not known yet"
            raise CoveyError(NOT_SAVED, why, SAVE_BEFORE)

    # ---- for the sampler ----

    @property
    def next_step(self) -> int:
        return self.step + (self._at is Phase.STEPPED and self._parts is None)

    def asks_for_batches(self, begins_epoch: bool) -> None:
        """A DataLoader draws a random number here, at the beginning of each epoch. When this process begins within an
        epoch, the kept generators include that draw."""
        if self._at is Phase.BETWEEN:
            self._next_begins()
        self._turns()
        if begins_epoch:
            self._loop_begins()

    def takes_batch(self) -> None:
        if self._at is Phase.BETWEEN:
            self._next_begins()
        self._turns()
        self._loop_begins()

    @property
    def between(self) -> int | None:
        epoch: int | None = self._contents.place.get("between")
        return epoch if self._at is Phase.BEFORE else None

    def batches_over(self, epoch: int) -> None:
        if self._parts is None and self._at is Phase.STEPPED and self._left is None:
            self._finish_buffers()
            place, self._contents.place = self._contents.place, self._place(self._step + 1, epoch)
            self._left = epoch, self._contents.guarded()
            self._contents.place = place

    def ends_step(self) -> None:
        if self._at is Phase.BETWEEN or (self._parts is None and self._at is Phase.STEPPED):
            self.done()
        elif self._parts is not None:
            self._step_over()
            if self._at is Phase.STEPPED or self._parts.number:
                why = "an epoch ended in the middle of a step, and several optimizers do not say where steps end"
                raise CoveyError(CANNOT_HEAL, why, END_STEPS)

    def ends(self) -> None:
        """The last step is done, and no step follows. At the end of the script this rank waits for the others."""
        self._step_over()
        self._be(Phase.IN_STEP)
        self._is_over = True

    # ---- how it begins ----

    def begin(self, job: "JobClient", step: int, checkpoint: "Place | bool" = False, **more: Any) -> None:
        """Begin, or take over from a lost rank. `more`: of `StopsAndSaves`. CoveyError as of `job.state`, and when this
        training is another one."""
        parts = self._parts
        stop = StopsAndSaves(
            load=self._resume,
            types=lambda: self._contents.bfloats,
            draws_ahead=True,
            may_end=lambda: parts is None or parts.begins_step,
            own_to_save=self._own_to_save,
            number=lambda _: int(self._contents.place["step"]) + 1,
            ended=lambda _: int(self._contents.place["step"]) - 1 if self._counts else None,
            **{"made": "torch", **more},
        )
        calls = self._group.calls
        calls.job = calls.job or job
        kept = calls.kept
        self._contents.restarts, self._contents.place = (lambda: calls.restarts), {"step": step}
        get = self._arrays
        if parts is not None:
            get, parts.step = parts.arrays, step
        self._state = job.state(get, self._load, own=self._own_now, step=step, checkpoint=checkpoint, stop=stop)
        self._step = self._contents.place.setdefault("step", self._state.step - 1)
        if self._contents.first is None:
            self._agree_on_parameters()
            self._contents.first = self._state.step + 1
            self._before = self._contents.first
            self._ends(self._place(self._step), counts=False)
            self._said = "null"
        self._before = self._contents.place.get("before") or self._state.step
        kept.replays = kept.replays and self._before != self._state.step
        if self._state.step == self._contents.first:
            self._own, self._began = None, "null"  # the script has yet to draw what it draws before its loop
        self._be(Phase.BEFORE)
        self._group.attached(self, self._sums)
        atexit.register(self._leave)

    def _arrays(self) -> Mapping[str, Array]:
        """The state at the beginning of this step of `job.state`."""
        if self._held is None and self._contents.place.get("between", UNKNOWN) >= 0:
            self._held = self._contents.guarded()
        return self._contents.arrays() if self._held is None else self._held

    def _resume(self, arrays: dict[str, Array], own: Any) -> None:
        self._load(arrays, own, True)
        kept = ("step", "between") if self._contents.place.get("between", UNKNOWN) >= 0 else ("step",)
        self._contents.place = {name: at for name, at in self._contents.place.items() if name in kept}

    def _load(self, arrays: dict[str, Array], own: Any, elsewhere: bool = False) -> None:
        if self._parts is None:
            self._contents.load(arrays, elsewhere)
        else:
            self._parts.load(arrays, elsewhere)
            own = self._own_at_beginning(own)
        if own is not None and self._contents.first is not None:
            self._own = own
            if self._parts is None:
                self._said = json.dumps(own)
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
            self._be(Phase.IN_STEP if self.between is None else Phase.BETWEEN)
            if self._own is not None:
                set_generators(self._own["generators"], self._devices)
                self._own = None

    def _agree_on_parameters(self) -> None:
        """Give all ranks the parameters of rank 0."""
        found = self._digests()
        if (found == found[0]).all():
            return
        tensors, is_first = self._contents.tensors, self._tensors.rank == 0
        given = [halves_of([each]) if is_first else np.zeros(halves_count([each]), np.float32) for each in tensors]
        handles = [self._tensors.push(f"ddp/first {at}", each) for at, each in enumerate(given)]
        for each, handle in zip(tensors, handles, strict=True):
            fill([each], handle.wait())

    def _digests(self) -> Array:
        """By rank: a digest of its parameters."""
        digests = np.zeros((self._tensors.world_size, DIGEST_HALVES), np.float32)
        digests[self._tensors.rank] = np.frombuffer(self._contents.digest(), "<u2")
        return self._tensors.push_pull("ddp/same", digests)

    # ---- in a step ----

    def average(self, model: int, bucket: Any) -> Any:
        """A communication hook of this model: the future of the averages of the gradients in this bucket."""
        self._loop_begins()
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
            if self._at is Phase.BETWEEN:
                self._next_begins(self._between_own)
            if self._parts is not None:
                self._step_over()
            elif self._at is Phase.STEPPED:
                self._step_done()
            self._own, self._computes = None, True
            if self._parts is None or self._at is Phase.BEFORE:
                self._be(Phase.IN_STEP)

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
            raise late_draws("this step's first push")
        self._is_stepping = True

    def after_optimizer(self, *_: Any) -> None:
        self._computes = self._is_stepping = False
        if self._at is not Phase.BETWEEN:
            self._be(Phase.STEPPED)

    def _part_pushes(self) -> None:
        """Gradients come. CoveyError where a part is done again otherwise than before, and after the step's end."""
        assert self._parts is not None
        if self._parts.is_over or self._at is Phase.BETWEEN:
            why = f"gradients came after the end of step {self.step - 1}, of a forward pass before it"
            raise CoveyError(CANNOT_HEAL, why, "call backward() in the step of its forward pass")
        self._part_over()
        self._parts.repeats()

    def _part_over(self) -> None:
        """Begin the next part of the step with what is pushed now, if an optimizer has stepped in this one, or if
        nothing was pushed since but collectives. A forward pass alone begins none: it may be the script's look at what
        was learnt."""
        if self._parts is not None and (self._at is Phase.STEPPED or self._follows_step):
            self._finish_buffers()
            if self._parts.ends_part():
                self._ends(self._place(self._parts.step), counts=False)
            else:
                self._begins()
            self._be(Phase.IN_STEP)

    def _step_over(self) -> None:
        """Begin the next step, if the script has ended one that has parts."""
        if self._parts is not None and self._parts.is_over:
            self._finish_buffers()
            self._parts.ends_step()
            self._began = self._said
            self._ends(self._place(self._parts.step))
            self._be(Phase.IN_STEP)

    def scales(self, scaler: Any) -> None:
        """Count a step that this scaler skips, too."""
        step = scaler.step

        def scaled(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self.before_optimizer(optimizer)
            self._is_stepping = False  # the scaler looks at gradients first
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
        own, self._data_json = f'"data": {data}, "generators": {self._drawn_json}', data
        self._said = f"{{{own}}}"
        return JsonText(self._said if self._parts is None else f'{{"began": {self._began}, {own}}}')

    def _finish_buffers(self) -> None:
        handle, self._buffers = self._buffers, None
        if handle is not None:
            fill(self._contents.buffers, handle.wait())

    # ---- collectives of the script ----

    def enters(self, kind: str) -> bool:
        """The script calls this collective. Returns whether successors get its result without passing there with
        others: before the loop."""
        if self._is_stepping:  # what others hold is no state of a step's beginning
            self._group.calls.heals_no_more(f"{kind} within optimizer.step()")
        if self._parts is None and self._at is Phase.STEPPED:
            epoch, self._held = (UNKNOWN, None) if self._left is None else self._left
            self._between_begins(kind, self._step + 1, epoch)
        elif self._parts is not None and self._parts.is_over:
            self._finish_buffers()
            self._parts.ends_step()
            self._began = self._said
            self._between_begins(kind, self._parts.step, UNKNOWN)
        elif self._at is Phase.STEPPED:
            self._part_over()
            self._follows_step = not self._computes
        if self._at is Phase.BETWEEN:
            self._between_own = self._own_now()
        return self._at is Phase.BEFORE

    def _between_begins(self, kind: str, step: int, epoch: int) -> None:
        """The step ends, and a time of its own begins, before `step`."""
        if epoch == UNKNOWN and not self._is_said:
            self._is_said = True
            end, before = "optimizer.step()", "call it before optimizer.step(), or after an epoch's steps"
            if self._parts is not None:
                end, before = "the end of a step", "call it before the step's end"
            self._say(
                f"restarts instead of heals when a rank is lost between {end} and the next step: {kind} is called "
                f"there, where a process that takes over does not pass; next: {before} (docs/guides/healing.md)"
            )
        self._drawn_before = self._drawn
        self._ends(self._place(step, epoch, kind), may_end=False)
        self._be(Phase.BETWEEN)

    def _say(self, text: str) -> None:
        """Tell people what holds for all ranks, once."""
        if self._tensors.rank == 0:
            self._tensors.tell(text)

    def _next_begins(self, own: JsonText | None = None) -> None:
        """The next step begins, for all ranks, with the own state that each has now, or had then (`own`)."""
        self._tensors.own_later = False
        self._own_of_step = own
        self._tensors.push_pull("ddp/between", np.zeros(1, np.float32))
        self._held, self._between_own = None, None
        if self._parts is not None:
            self._began = self._said
            self._parts.begins_again()
        self._ends(self._place(self._step), counts=False)
        self._be(Phase.IN_STEP)

    def _leave(self) -> None:
        """At the end of a script that trained to the end, wait for ranks that may still need this one's results. Does
        nothing in a forked child."""
        if self._is_over and not self._tensors.is_elsewhere:
            self._tensors.leave()


def late_draws(after: str) -> CoveyError:
    why = f"random numbers were drawn after {after}, so they would be lost with this rank"
    return CoveyError(CANNOT_HEAL, why, "draw them in the forward pass, and call collectives after backward()")
