"""Trainings whose model is divided among ranks (`torch.distributed.fsdp.fully_shard`).

    model = fully_shard(model)
    state = covey.torch.attach(model, optimizer, data=sampler, checkpoint=True)
    for step in state.steps(1000):
        ...

No rank has another one's shard, so a lost rank makes the job begin again, from its last checkpoint; where the mesh has
replicas, `covey.frameworks.torch.sharded.replicas` replaces it. All ranks save together, each its shard
(`covey.frameworks.torch.sharded.shard_set`), and stop after the same step: at the end of each step they begin to tell
one another whether one has heard that the job is to end, and at the end of the next one all know. They say that in a
group of their own, over the CPU, so that no step waits for it, and no accelerator.

A step ends as in `covey.frameworks.torch.heal`: with the next forward pass after the optimizer's step, or with `steps`
or `done`; with several optimizers with these alone.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from covey.core.errors import EXIT_AGAIN, CoveyError
from covey.frameworks.torch.random_state import Generators, generators, set_generators
from covey.frameworks.torch.sharded.replicas import HealedShards, healed_shards, replicas_of, why_not_healed
from covey.frameworks.torch.sharded.shard_set import (
    MADE_SHARDS,
    MANIFEST,
    ShardFile,
    ShardSet,
    check_ranks,
    opened_set,
    opened_shard,
    save_together,
    write_shard,
)
from covey.frameworks.torch.sharded.shard_state import MADE, ShardState, is_divided
from covey.frameworks.torch.steps.step_parts import END_STEPS
from covey.healing import checkpoint
from covey.healing.checkpoint import Checkpoint, refused

if TYPE_CHECKING:
    from covey.job.client import JobClient
    from covey.job.job_state import Place

NOT_ATTACHED = "the divided model was not attached"


class ShardedTraining:
    """The training that `covey.torch.attach(model, optimizer)` returns for a model that is divided among ranks."""

    def __init__(
        self, job: "JobClient", state: ShardState, data: Any, place: Path | None, step: int, several: bool, why: str
    ) -> None:
        """`place`: where the manifest of its checkpoints is; None: it has none. `several`: there are several
        optimizers. `why`: why lost ranks are not replaced from their replicas; empty: there are none."""
        self._job, self._contents, self._data, self._place, self._several = job, state, data, place, several
        self._why = why
        self.step = step
        """Number of the step that this rank is in."""
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo")
        self._stepped: list[int] = []
        """Optimizers that have stepped in this step."""
        self._by_script = False
        self._drawn: Generators | None = None
        """The generators when an optimizer stepped last."""
        self._own: Any = None
        """What a checkpoint had of this rank's own, until the loop begins."""
        self._asking: tuple[Any, Any] | None = None

    # ---- for the script ----

    def steps(self, stop: int) -> Iterator[int]:
        """Each step from the present one on, up to `stop`, which is left out: one turn is one step."""
        self._by_script = True
        if self.step < stop:
            self.takes_batch()
        while self.step < stop:
            yield self.step
            self.done()
        self.ends()

    def done(self) -> None:
        """End the step, where no loop or forward pass does. SystemExit when the job was to end, and has a checkpoint
        now."""
        self._by_script, self._drawn = True, generators(self._contents.devices)
        self._ends()

    @property
    def stopping(self) -> bool:
        """Whether the job ends with this step; all ranks have the same answer in the same step, and each must ask."""
        self._listen()
        if self._asking is None:
            self._ask()
        assert self._asking is not None
        work, wanted = self._asking
        work.wait()
        return bool(wanted.item())

    def save(self, path: "Place | None" = None) -> Path:
        """Save all ranks' shards, and return where the manifest is; each rank must call it, at the end of the same
        step. `path`: a file; None: that of `attach`. CoveyError on all ranks when one cannot write."""
        place = self._place if path is None else Path(path)
        return self._save(place or _place_of(True), self.step + bool(self._stepped))

    # ---- for the sampler ----

    @property
    def next_step(self) -> int:
        return self.step + (bool(self._stepped) and not self._several)

    between: int | None = None

    def batches_over(self, epoch: int) -> None: ...

    def asks_for_batches(self, begins_epoch: bool) -> None:
        if begins_epoch:
            self.takes_batch()

    def takes_batch(self) -> None:
        """The loop begins; random numbers that the script drew before do not count."""
        own, self._own = self._own, None
        if own is not None:
            set_generators(own["generators"], self._contents.devices)

    def ends_step(self) -> None:
        if self._stepped and self._several:
            raise CoveyError("a step did not end", "an epoch ended after an optimizer's step", END_STEPS)
        if self._stepped:
            self._ends()

    def ends(self) -> None:
        """There are no more steps."""
        if self._asking is not None:
            self._asking[0].wait()

    # ---- how it begins ----

    def begin(self) -> None:
        """Continue from the checkpoint, if there is one. CoveyError on all ranks where one of them cannot."""
        if self._place is None:
            return
        self._listen()
        found = self._agreed(self._found)
        sets = self._all_say(None if found is None else (found.number, found.step))
        if any(each != sets[0] for each in sets):
            other = next(rank for rank, each in enumerate(sets) if each != sets[0])
            words = ["none" if each is None else f"{each[0]:08x} of step {each[1]}" for each in (sets[0], sets[other])]
            why = f"rank 0 found checkpoint {words[0]} at {self._place}, and rank {other} {words[1]}"
            next_ = "save in a folder that all hosts of the job share (COVEY_CHECKPOINTS)"
            raise CoveyError("the ranks of this job do not go on together", why, next_)
        if found is not None:
            own = self._agreed(lambda: self._loaded(found))
            if own is not None:
                self._own = own
                set_generators(own["generators"], self._contents.devices)
                if own["data"] is not None:
                    self._data.load_state_dict(own["data"])
            self._job.tell(f"goes on with step {self.step}, from {self._place}")

    def _found(self) -> ShardSet | None:
        assert self._place is not None
        found = opened_set(self._place)
        checkpoint.check(self._place, found, {}, os.environ)
        if found is not None:
            check_ranks(found, self._ranks)
        return found

    def _loaded(self, found: ShardSet) -> Any:
        """Load this rank's shard; returns what was its own."""
        shard = opened_shard(found, self._rank)
        try:
            arrays = shard.arrays({})
            self._contents.check(arrays[MADE])
            self.step = self._contents.load(arrays)
        except (CoveyError, KeyError, ValueError, TypeError) as error:
            why = error.why if isinstance(error, CoveyError) else f"it does not fit this script: {error!r}"
            raise refused(found.path, why) from error
        return shard.own_of(self._rank)

    def words(self) -> str:
        """One line for people on what happens when a rank is lost."""
        if self._place is None:
            from_there = "and it has no checkpoint (checkpoint=True)"
        else:
            from_there = f"from its last checkpoint, {self._place}"
        replicas = f"; ranks are not replaced from their replicas: {self._why}" if self._why else ""
        return (
            f"has a model that is divided among {self._ranks} ranks (FSDP): a rank that is lost makes the job begin "
            f"again (--retries), {from_there}{replicas}"
        )

    # ---- in a step ----

    def before_forward(self, module: Any, *_: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._own = None
            if self._stepped and not self._several:
                self._ends()

    def before_optimizer(self, optimizer: int) -> None:
        """CoveyError where several optimizers step in turn, and nothing says where steps end."""
        if self._several and not self._by_script and optimizer in self._stepped and self._stepped[-1] != optimizer:
            why = "optimizers step in turn, and it is not known with which of them a step of the training ends"
            raise CoveyError("the job cannot be stopped and continued", why, END_STEPS)

    def after_optimizer(self, optimizer: int) -> None:
        self._stepped.append(optimizer)
        self._drawn = generators(self._contents.devices)

    def scales(self, scaler: Any, optimizers: Sequence[Any]) -> None:
        """Count a step that this scaler skips, too."""
        step = scaler.step

        def scaled(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = step(optimizer, *args, **kwargs)
            self.after_optimizer(next(at for at, each in enumerate(optimizers) if each is optimizer))
            return result

        scaler.step = scaled

    def _ends(self) -> None:
        self.step += 1
        self._stepped = []
        if self._place is None:
            self._asking = None
            return
        if self._asking is not None and self.stopping:
            self._save(self._place, self.step)
            raise SystemExit(EXIT_AGAIN)
        self._ask()

    def _ask(self) -> None:
        """Begin to tell the other ranks whether this one has heard that the job is to end."""
        wanted = torch.tensor([float(self._job.stopping)])
        self._asking = dist.all_reduce(wanted, dist.ReduceOp.MAX, group=self._group, async_op=True), wanted

    def _listen(self) -> None:
        """From now on SIGTERM does not end the script."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._job.defer_stop()

    # ---- saving ----

    def _save(self, place: Path, step: int) -> Path:
        save_together(place, step, self._rank, lambda file: self._written(file, step), self._all_say)
        if self._rank == 0 and place == self._place:
            self._job.saved(step, place)
        return place

    def _written(self, file: Path, step: int) -> ShardFile:
        """Write this rank's shard."""
        now = self._drawn or generators(self._contents.devices)
        data = json.dumps(self._data.state_dict()) if hasattr(self._data, "state_dict") else "null"
        own: list[str | None] = [None] * self._ranks
        own[self._rank] = f'{{"data": {data}, "generators": {now.as_json()}}}'
        arrays = self._contents.arrays(step)
        return write_shard(file, Checkpoint(step, tuple(own), MADE_SHARDS), arrays, self._contents.bfloats)

    def _agreed(self, look: Any) -> Any:
        """What `look` returns. CoveyError on all ranks where one of them raises it."""
        found, error = None, None
        try:
            found = look()
        except CoveyError as raised:
            error = raised.what, raised.why, raised.next
        each = self._all_say(error)
        failed = next((rank for rank, one in enumerate(each) if one is not None), None)
        if failed is not None:
            what, why, next_ = each[failed] if error is None else error
            raise CoveyError(what, why if error is not None else f"rank {failed}: {why}", next_)
        return found

    def _all_say(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self._ranks
        dist.all_gather_object(found, mine, group=self._group)
        return found


def _place_of(place: "Place | bool") -> Path:
    found = checkpoint.place_of(place, os.environ)
    return found.with_name(MANIFEST) if place is True else found


def sharded(
    models: Sequence[Any],
    optimizers: Sequence[Any],
    also: Sequence[Any],
    data: Any,
    job: "JobClient",
    step: int,
    place: "Place | bool",
) -> "ShardedTraining | HealedShards":
    """The training of `covey.torch.attach` with divided models."""
    if not all(map(is_divided, models)):
        raise CoveyError(NOT_ATTACHED, "another model beside it is not divided", "divide all of them by fully_shard")
    if (ranks := dist.get_world_size()) != job.world_size:
        why = f"it has {ranks} ranks, and this job has {job.world_size}"
        raise CoveyError(NOT_ATTACHED, why, f"submit it with --workers {ranks}, without torchrun")
    if place is not False and threading.current_thread() is not threading.main_thread():
        why = "it is attached outside of the main thread, which alone can end the process"
        raise CoveyError(NOT_ATTACHED, why, "call it in the main thread, or leave checkpoint= out")
    at = None if place is False else _place_of(place)
    replicas, why = replicas_of([each for model in models for each in model.parameters()], ranks), ""
    if min(map(len, replicas)) > 1:
        why = why_not_healed(optimizers)
        if not why:
            return healed_shards(models, optimizers[0], also, data, job, step, at, replicas)
    state = ShardState(models, optimizers, also, job.tell)
    training = ShardedTraining(job, state, data, at, step, len(optimizers) > 1, why)
    training.begin()
    if hasattr(data, "follow"):
        data.follow(training)
    for model in models:
        model.register_forward_pre_hook(training.before_forward, prepend=True)  # before it gathers its parameters
    for number, optimizer in enumerate(optimizers):
        optimizer.register_step_pre_hook(lambda *_, number=number: training.before_optimizer(number))
        optimizer.register_step_post_hook(lambda *_, number=number: training.after_optimizer(number))
    for each in also:
        if isinstance(each, torch.amp.GradScaler):
            training.scales(each, optimizers)
    if dist.get_rank() == 0:
        job.tell(training.words())
    return training
