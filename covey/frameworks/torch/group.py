"""A process group of PyTorch whose collectives are rounds of `job.tensors`, without connections of its own.

    covey.torch.init_process_group()        # instead of torch.distributed.init_process_group("gloo")

A gloo group connects all processes of a job, and cannot be used once one of them is lost; a process that takes its
place would wait for ever in the rendezvous. This group has no connections of its own.

A collective that the script calls is a tensor whose name has its kind, type, size and number in the step, so a rank
that repeats a step finds the rounds of that step. It must be called in a step: between a forward pass and the
optimizer's step. Elsewhere it is refused, since a process that takes over does not pass there again.

DistributedDataParallel has collectives of its own: its constructor compares and copies parameters, and after the first
pass it sends the order of its buckets. A process that takes over is alone in these, so they do nothing at all: `attach`
compares the parameters, and gradients are known by their names, in whatever buckets.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import distributed as of_ddp

from covey.core.errors import CoveyError
from covey.frameworks.torch.devices import accelerator_type
from covey.frameworks.torch.types import TYPES, array_of_tensor, fill, halves_count, halves_of, on_host
from covey.job.client import JOIN_S, of_process
from covey.job.tensors import TensorClient
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.tensor_wire import Type

if TYPE_CHECKING:
    from covey.job.client import JobClient

BACKEND = "covey"
LOW = 0xFFFF_FFFF
"""Mask of the lower half of a 64-bit integer: sums of either half are exact in float64."""
MERGES: dict[str, Callable[[Any], Any]] = {
    "MIN": lambda all: all.amin(0),
    "MAX": lambda all: all.amax(0),
    "PRODUCT": lambda all: all.prod(0),
}
"""Reductions of all ranks' tensors, stacked; sums need no stack."""
Finish = Callable[[], None]


class TensorsWork(dist._Work):  # type: ignore[misc]
    """A collective that was begun."""

    def __init__(self, finish: Finish, result: list[Any]) -> None:
        super().__init__()
        self._finish: Finish | None = finish
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the result is in its place. Errors as of `push_pull`; `timeout` is ignored."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None

    def is_success(self) -> bool:
        return self._finish is None

    def result(self) -> list[Any]:
        return self._result

    def get_future(self) -> Any:
        self.wait()
        future = torch.futures.Future()
        future.set_result(self._result)
        return future


class TensorsGroup(dist.ProcessGroup):  # type: ignore[misc]
    """The process group of all ranks of the job."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._own_rank, self._ranks = rank, size
        self._tensors: TensorClient | None = None
        self._permit: Callable[[str], None] = _not_attached
        self._counts: Counter[str] = Counter()

    def attached(self, tensors: TensorClient, permit: Callable[[str], None]) -> None:
        """Connect the group to the job's tensors. `permit` raises CoveyError where a collective is not allowed."""
        self._tensors, self._permit = tensors, permit

    def step_begins(self) -> None:
        self._counts.clear()

    # ---- as PyTorch calls them ----

    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors: list[Any], opts: Any = None) -> TensorsWork:
        if _is_of_ddp():
            return _done(tensors)
        return self._all_reduced("all_reduce", tensors, opts, True)

    def reduce(self, tensors: list[Any], opts: Any) -> TensorsWork:
        """Reduce the tensors; only the root gets the result."""
        return self._all_reduced("reduce", tensors, opts, opts.rootRank == self._own_rank)

    def broadcast(self, tensors: list[Any], opts: Any) -> TensorsWork:
        if _is_of_ddp():
            return _done(tensors)
        mine = halves_of(tensors)
        pulled = self._begun("broadcast", tensors[0], mine if opts.rootRank == self._own_rank else np.zeros_like(mine))
        return TensorsWork(lambda: fill(tensors, pulled()), tensors)

    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> TensorsWork:
        if _is_of_ddp():
            for out in outputs[0]:
                out.copy_(inputs[0])
            return _done(outputs[0])
        gathered = self._gathered("all_gather", inputs[0])

        def finish() -> None:
            for out, halves in zip(outputs[0], gathered(), strict=True):
                fill([out], halves)

        return TensorsWork(finish, outputs[0])

    def barrier(self, opts: Any = None) -> TensorsWork:
        none = torch.zeros(1)
        return self._all_reduced("barrier", [none], None, True)

    # ---- rounds ----

    def _all_reduced(self, kind: str, tensors: list[Any], opts: Any, writes: bool) -> TensorsWork:
        finish = [self._reduced(kind, each, _operation(opts), writes) for each in tensors]

        def finish_all() -> None:
            for each in finish:
                each()

        return TensorsWork(finish_all, tensors)

    def _begun(self, kind: str, like: Any, mine: Array, mean: bool = False) -> Callable[[], Array]:
        """Push `mine`. Returns a function that waits for the sum."""
        self._permit(kind)
        assert self._tensors is not None, "permitted, so attached"
        of = f"{kind} {str(like.dtype).removeprefix('torch.')} {mine.size}"
        self._counts[of] += 1
        bits: Type | None = "bfloat16" if like.dtype == torch.bfloat16 and mine.dtype == np.int16 else None
        return self._tensors.push(f"ddp/{of} {self._counts[of]}", mine, mean=mean, type=bits).wait

    def _reduced(self, kind: str, tensor: Any, operation: str, writes: bool) -> Finish:
        """Begin to reduce one tensor; the result replaces its content where it `writes`."""
        if operation in MERGES:
            found = self._merged(kind, tensor, MERGES[operation])
        elif operation in ("SUM", "AVG") and tensor.dtype in TYPES:
            found = self._added(kind, tensor, operation == "AVG")
        elif operation == "SUM" and not tensor.dtype.is_complex:
            found = self._counted(kind, tensor)
        else:
            why = f"{operation} of {tensor.dtype} is not among SUM, MIN, MAX, PRODUCT, and AVG of floats"
            raise CoveyError(f"{kind} was refused", why, "gather the tensors, and reduce them in the script")

        def finish() -> None:
            result = found()
            if writes:
                with torch.no_grad():
                    tensor.copy_(result.reshape(tensor.shape))

        return finish

    def _added(self, kind: str, tensor: Any, mean: bool) -> Callable[[], Any]:
        """Sum floats, in the order of `covey.tensors.numbers.sum_order`."""
        mine = array_of_tensor(tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1))
        pulled = self._begun(kind, tensor, mine, mean)
        return lambda: torch.from_numpy(pulled()).view(tensor.dtype)

    def _counted(self, kind: str, tensor: Any) -> Callable[[], Any]:
        """Sum integers exactly, in two halves."""
        whole = on_host(tensor).to(torch.int64).reshape(-1).numpy()
        pulled = self._begun(kind, tensor, np.concatenate([whole >> 32, whole & LOW]).astype(np.float64))

        def found() -> Any:
            high, low = pulled().astype(np.int64).reshape(2, -1)
            return torch.from_numpy((high << 32) + low).to(tensor.dtype)

        return found

    def _merged(self, kind: str, tensor: Any, merge: Callable[[Any], Any]) -> Callable[[], Any]:
        gathered = self._gathered(kind, tensor)

        def found() -> Any:
            each = torch.empty((self._ranks, tensor.numel()), dtype=tensor.dtype)
            for row, halves in zip(each, gathered(), strict=True):
                fill([row], halves)
            return merge(each)

        return found

    def _gathered(self, kind: str, tensor: Any) -> Callable[[], Array]:
        """Gather the halves of every rank's tensor."""
        size = halves_count([tensor])
        mine = np.zeros((self._ranks, size), np.float32)
        mine[self._own_rank] = halves_of([tensor])
        return self._begun(kind, tensor, mine)


def init_process_group(job: "JobClient | None" = None) -> None:
    """Do what `init_process_group` of torch.distributed does, for a job whose ranks may be lost: this process is
    `job`'s rank (without `job`, that of `covey.join()`, made if there is none), and meets no other process yet.
    CoveyError outside a job."""
    found = job if job is not None else of_process()
    if job is None:
        found.wait_joined(JOIN_S)
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=found.rank, world_size=found.world_size)


def _made(store: Any, rank: int, size: int, timeout: Any) -> TensorsGroup:
    if dist.is_initialized() and size != dist.get_world_size():
        why = f"it would have {size} of {dist.get_world_size()} ranks, and each tensor is added by all of them"
        raise CoveyError("this group cannot be created", why, "use the group of all ranks")
    return TensorsGroup(rank, size)


dist.Backend.register_backend(BACKEND, _made, devices=sorted({"cpu", "cuda", accelerator_type() or "cpu"}))


def _not_attached(kind: str) -> None:
    raise CoveyError(
        f"{kind} was refused",
        "this process does not know yet whether it starts from the beginning or replaces a lost rank",
        "call it after covey.torch.attach(ddp, optimizer), in a step",
    )


def _is_of_ddp() -> bool:
    """Whether DistributedDataParallel itself calls, not the script, a module in a forward pass, or a backward pass,
    which in autograd's thread of a device has no frame of Python above."""
    inside = (dist.__path__[0], of_ddp.__file__, __file__)
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        if frame.f_code.co_filename == of_ddp.__file__:
            return True
        frame = frame.f_back
    return False


def _operation(opts: Any) -> str:
    """Name of the reduction."""
    if opts is None:
        return "SUM"
    of = opts.reduceOp
    names = ("SUM", "AVG", *MERGES)
    return next((name for name in names if of == getattr(dist.ReduceOp, name)), str(of))


def _done(tensors: Sequence[Any]) -> TensorsWork:
    return TensorsWork(lambda: None, list(tensors))
