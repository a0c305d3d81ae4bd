"""PyTorch's DistributedDataParallel (DDP) with gradients averaged by Covey: one line in a training script,

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    covey.torch.attach(ddp)

and none where the job was submitted with `agentctl submit --aggregate`.

DDP hands its buckets over one by one while the backward pass still computes. Each is a round of `covey.job.tensors`, in
the bucket's own memory, which DDP waits for only at the end of the pass; buckets on an accelerator come to host memory
and go back on a stream of their own (`covey.frameworks.torch.devices`):

    script's thread   hook(bucket 0) -- push -->     hook(bucket 1) -- push -->  ...   DDP waits for the futures
    covey-ddp                           wait, divide, set the future of bucket 0, then of bucket 1, ...

Where several ranks of a host have a GPU each, they first add there (`covey.frameworks.torch.gpu_sums`).

A bucket is known by its parameters, not by its number: DDP makes its buckets anew after the first backward pass. The
average is the sum in the order of `covey.tensors.numbers.sum_order`, divided by the number of ranks; float16 and
bfloat16 are added in float32 and rounded once. With two ranks it equals gloo's result to the bit. DDP's own reduction
divides first, which differs in the last bits where the number of ranks is no power of two.

With the optimizer, ranks may be lost and replaced (`covey.frameworks.torch.heal`; examples/heal_ddp.py):

    covey.torch.init_process_group()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    state = covey.torch.attach(ddp, optimizer, also=[scheduler], data=sampler)
    state = covey.torch.attach([generator, critic], [optimizer_g, optimizer_c], also=[ema], data=sampler)

In an elastic job processes come and go (`covey.frameworks.torch.elastic`; examples/elastic_ddp.py):

    training = covey.torch.attach(model, optimizer, also=[scheduler], data=sampler, elastic=True)
"""

import atexit
import hashlib
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.distributed import GradBucket

from covey.core.errors import CoveyError
from covey.frameworks.torch.devices import DeviceBuckets, check_gradients, check_model, devices_of
from covey.frameworks.torch.elastic import ElasticTraining, elastic_training
from covey.frameworks.torch.elastic_models import check_elastic
from covey.frameworks.torch.gpu_sums import HostSums, agreed
from covey.frameworks.torch.group import init_process_group
from covey.frameworks.torch.heal import HealedTraining
from covey.frameworks.torch.healed_ddp import healed
from covey.frameworks.torch.sampler import StepSampler
from covey.frameworks.torch.state import several
from covey.frameworks.torch.types import TYPES, bits, in_host_memory
from covey.frameworks.torch.uneven import refuse_uneven
from covey.job.tensors import TensorClient
from covey.job.this_job import joined

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from covey.frameworks.torch.sharded.divided import ShardedTraining
    from covey.frameworks.torch.sharded.replicas import HealedShards
    from covey.job.client import JobClient
    from covey.job.job_state import Place

__all__ = [
    "TYPES",
    "ElasticTraining",
    "HealedTraining",
    "StepSampler",
    "attach",
    "attached",
    "average",
    "init_process_group",
    "way",
]
END_S = 1.0
"""Seconds that the end of the script waits for the thread that ends rounds."""
_models = 0
COPIED = "copied from each GPU: ranks may be lost"
_ways: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""How gradients of each model that is attached get to where they are added, for people."""


@overload
def attach(ddp: Any, job: "JobClient | None" = None, /) -> None: ...


@overload
def attach(ddp: Any, *, job: "JobClient") -> None: ...


@overload
def attach(
    ddp: "FSDPModule | Sequence[FSDPModule]",
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    job: "JobClient | None" = None,
    *,
    also: Sequence[Any] = (),
    data: Any = None,
    step: int = 0,
    checkpoint: "Place | bool" = False,
) -> "ShardedTraining | HealedShards": ...


@overload
def attach(
    ddp: Any,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    job: "JobClient | None" = None,
    *,
    also: Sequence[Any] = (),
    data: Any = None,
    step: int = 0,
    checkpoint: "Place | bool" = False,
    elastic: Literal[False] = False,
) -> HealedTraining: ...


@overload
def attach(
    ddp: Any,
    optimizer: torch.optim.Optimizer,
    job: "JobClient | None" = None,
    *,
    also: Sequence[Any] = (),
    data: Any = None,
    step: int = 0,
    checkpoint: "Place | bool" = False,
    elastic: Literal[True],
) -> ElasticTraining: ...


def attach(
    ddp: Any,
    optimizer: Any = None,
    job: "JobClient | None" = None,
    *,
    also: Sequence[Any] = (),
    data: Any = None,
    step: int = 0,
    checkpoint: "Place | bool" = False,
    elastic: bool = False,
) -> "ElasticTraining | HealedTraining | ShardedTraining | None":
    """From the next backward pass on, Covey averages the gradients of `ddp`, a DistributedDataParallel. `job`: this
    rank's job; without it, the one of `covey.join()`, made if there is none. Every rank attaches the same models in the
    same order.

    With its `optimizer`, this rank may be lost from now on: another process takes its place, gets here what the others
    hold, and continues in their step with the same bits. Several models, or optimizers, are given as lists in one call,
    before any other tensor; with several optimizers, steps end where `steps()` or `done()` of the result says so.
    `also`: other objects with state that is the same on all ranks (schedulers, a GradScaler, an EMA copy), saved by
    state_dict and load_state_dict; `data`: this rank's place in the data, a StepSampler or something with a small
    state_dict; `step`: the first step. `checkpoint`: True, or a file: the training continues from there, and is saved
    there when the job is asked to end, as of `JobClient.state`.

    A model that is divided among ranks (`torch.distributed.fsdp.fully_shard`) is given itself. A lost rank gets its
    shard from another one that holds the same, on a mesh that has replicas (HSDP). Without one, the job begins again
    from the checkpoint, to which each rank writes its shard.

    `elastic`: this process computes for all ranks that it carries, and other processes come and go. `ddp` is the model
    itself then, not in a DistributedDataParallel; the loop is that of the result (`ElasticTraining`).

    Gradients may be in host memory or on accelerators, also on several. TypeError, naming the parameter, where they are
    elsewhere, sparse, or of a type that is not in TYPES; RuntimeError where the model has a communication hook, or
    other ranks than the job (torchrun's); CoveyError where ranks cannot be replaced. Errors of `push_pull` are raised
    by the backward pass."""
    if elastic:
        return _elastic(ddp, optimizer, job, also, data, step, checkpoint)
    if optimizer is not None and not isinstance(optimizer, (torch.optim.Optimizer, list, tuple)):
        optimizer, job = None, optimizer
    models = several(ddp)
    if _are_divided(models):
        if optimizer is None:
            why = "the model is divided among ranks (FSDP), and PyTorch sums its gradients itself"
            raise CoveyError("the model was not attached", why, "give its optimizer, to stop and continue")
        return _sharded(models, several(optimizer), also, data, joined(job), step, checkpoint)
    for each in models:
        check_model(each.module)
    found = joined(job)
    for each in models:
        if (ranks := each.process_group.size()) != found.world_size:
            what = (
                f"DDP has {ranks} ranks, and this job has {found.world_size}: Covey "
                "averages over the ranks that the agent started"
            )
            raise RuntimeError(f"{what}; submit it with --workers {ranks}, without torchrun")
    if optimizer is not None:
        optimizers, ends = several(optimizer), RoundEnds(found.tensors)
        training = healed(models, optimizers, also, data, found, step, ends, checkpoint)
        _ways.update((each, COPIED if devices_of(each.module) else "") for each in models)
        for each in models:
            refuse_uneven(each, heals=True)
        return training
    for each in models:
        refuse_uneven(each, heals=False)
        _average(each, found)
    return None


def _are_divided(models: Sequence[Any]) -> bool:
    """Whether some of these are divided among ranks. What divides them is imported by then, and is not for others."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from covey.frameworks.torch.sharded.shard_state import is_divided

    return any(map(is_divided, models))


def _sharded(
    models: Sequence[Any],
    optimizers: Sequence[Any],
    also: Sequence[Any],
    data: Any,
    job: "JobClient",
    step: int,
    checkpoint: "Place | bool",
) -> "ShardedTraining | HealedShards":
    from covey.frameworks.torch.sharded.divided import sharded

    return sharded(models, optimizers, also, data, job, step, checkpoint)


def _average(ddp: Any, found: "JobClient") -> None:
    """Have Covey average the gradients of this model."""
    global _models
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    buckets = Buckets(found.tensors, names, f"ddp{_models}", RoundEnds(found.tensors))
    ddp.register_comm_hook(buckets, average)
    _models += 1
    _ways[ddp] = way_there = buckets.add_on_gpus(ddp)
    if way_there:
        found.tensors.tell(f"has its gradients {way_there}")


def attached(ddp: Any) -> bool:
    """Whether Covey averages the gradients of this model."""
    return ddp in _ways


def way(ddp: Any) -> str:
    """How gradients of this attached model get from its GPU to where they are added, and why, in words; empty: they
    are in host memory."""
    return _ways.get(ddp, "")


def _elastic(
    module: Any,
    optimizer: Any,
    job: "JobClient | None",
    also: Sequence[Any],
    data: Any,
    step: int,
    checkpoint: "Place | bool",
) -> ElasticTraining:
    check_elastic(module, optimizer, also)
    check_model(module)
    return elastic_training(module, optimizer, also, data, joined(job), step, checkpoint)


def average(state: "Buckets", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP: the average of this bucket over all ranks, in the bucket's own memory."""
    return state.average(bucket)


class Buckets:
    """The gradient buckets of one model."""

    def __init__(self, tensors: TensorClient, names: dict[int, str], prefix: str, ends: "RoundEnds") -> None:
        """`names` maps the id of a parameter to its name."""
        self._tensors, self._parameters, self._prefix, self._ends = tensors, names, prefix, ends
        self._names: dict[tuple[int, ...], str] = {}
        self._devices = DeviceBuckets(tensors.tell)
        self._sums: HostSums | None = None

    def add_on_gpus(self, ddp: Any) -> str:
        """Have ranks of this host add on their GPUs from now on, if they can. Returns which way gradients go, in words;
        empty: none of them is on a GPU."""
        if not devices_of(ddp.module):
            return ""
        host = agreed(self._tensors, ddp, f"{self._prefix}/gpus")
        if isinstance(host, str):
            return f"copied from each GPU: {host}"
        self._sums = HostSums(self._tensors, host, self._devices, self._ends.end)
        return f"added on GPUs of ranks {host.members[0]} to {host.members[1] - 1} ({host.backend})"

    def average(self, bucket: Any) -> Any:
        """Begin the bucket's round; returns the future of its gradients."""
        gradients, parameters = bucket.buffer(), bucket.parameters()
        name = self._name(parameters)
        check_gradients(name, gradients)
        if not in_host_memory(gradients):
            return self._from_device(bucket, name, parameters, gradients)
        future = torch.futures.Future()
        self._push(name, gradients, future)
        return future

    def _from_device(self, bucket: Any, name: str, parameters: list[Any], gradients: Any) -> Any:
        found = None if self._sums is None else self._sums.take(name, parameters, gradients)
        if found is None:
            found = self._devices.take(name, parameters, gradients, partial(self._push, name))
        if self._sums is not None and bucket.is_last():
            self._sums.pass_ends()
        return found

    def _push(self, name: str, gradients: Any, future: Any) -> None:
        """Push gradients that are in host memory; the average replaces them."""
        array = bits(gradients).numpy()
        handle = self._tensors.push(name, array, out=array, mean=True, type=TYPES[gradients.dtype])
        self._ends.end(handle.wait, gradients, future)

    def _name(self, parameters: list[Any]) -> str:
        """The tensor name of the bucket with these parameters: the same on every rank, and after a restart."""
        key = tuple(map(id, parameters))
        if key not in self._names:
            names = [self._parameters[each] for each in key]
            digest = hashlib.blake2b("\n".join(names).encode(), digest_size=6).hexdigest()
            self._names[key] = f"{self._prefix}/{digest} {names[0][:60]} .. {names[-1][:60]}"
        return self._names[key]


class RoundEnds:
    """The thread that ends the rounds of one model: DDP waits for the futures, this thread for the results."""

    def __init__(self, tensors: TensorClient) -> None:
        self._tensors = tensors
        self._begun: queue.SimpleQueue[tuple[Callable[[], object], Any, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._end_rounds, name="covey-ddp", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def end(self, wait: Callable[[], object], gradients: Any, future: Any) -> None:
        """When `wait` returns, the future gets the gradients, or the error."""
        self._begun.put((wait, gradients, future))

    def _end_rounds(self) -> None:
        self._tensors.in_background()
        while (begun := self._begun.get()) is not None:
            wait, gradients, future = begun
            try:
                wait()
            except Exception as error:  # DDP waits for this future: whatever happens here must reach it
                future.set_exception(error)
            else:
                future.set_result(gradients)

    def _stop(self) -> None:
        """Stop the thread: setting a future while Python ends would crash it."""
        self._begun.put(None)
        self._thread.join(END_S)
