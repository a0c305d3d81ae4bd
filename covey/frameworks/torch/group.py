"""A process group of PyTorch whose collectives are rounds of `job.tensors`, without connections of its own.

    covey.torch.init_process_group()        # instead of torch.distributed.init_process_group("gloo")

A gloo group connects all processes of a job, and cannot be used once one of them is lost; a process that takes its
place would wait for ever in the rendezvous. This group has no connections of its own.

A collective that the script calls is a tensor whose name has its kind, type and size, and its number among those that a
process that takes over repeats (`covey.frameworks.torch.calls.script_calls`). Whatever the kind, all ranks push the
same number of elements: their own row, and zeros in those of others, or what is to be added.

Groups of a device mesh have rounds of all ranks, too (`covey.frameworks.torch.calls.mesh_groups`). What rounds of all
ranks cannot do (another group of some ranks, messages between two) gloo does; the job does not heal then
(`covey.frameworks.torch.calls.connections`).

DistributedDataParallel has collectives of its own: its constructor compares and copies parameters, and after the first
pass it sends the order of its buckets. A process that takes over is alone in these, so they do nothing at all: `attach`
compares the parameters, and gradients are known by their names, in whatever buckets.
"""

import sys
from collections.abc import Callable, Sequence
from functools import reduce
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import distributed as of_ddp

from covey.core.errors import CoveyError
from covey.frameworks.torch.calls.mesh_groups import OF_MESH, MeshGroup
from covey.frameworks.torch.calls.script_calls import CallsOfTraining, MadeGroup, ScriptCalls
from covey.frameworks.torch.devices import accelerator_type
from covey.frameworks.torch.gradients import PushesTensors
from covey.frameworks.torch.types import (
    TYPES,
    array_of_tensor,
    fill,
    halves_count,
    halves_of,
    in_host_memory,
    on_host,
)
from covey.job.this_job import joined
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
    "PRODUCT": lambda all: all.prod(0, dtype=all.dtype),
    "BAND": lambda all: reduce(torch.bitwise_and, all),
    "BOR": lambda all: reduce(torch.bitwise_or, all),
    "BXOR": lambda all: reduce(torch.bitwise_xor, all),
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
    """A process group of all ranks of the job, or of a device mesh."""

    def __init__(
        self,
        rank: int,
        size: int,
        calls: ScriptCalls | None = None,
        ranks: Sequence[int] = (),
        mesh: MeshGroup | None = None,
    ) -> None:
        """`calls`, `ranks`: of a group beside the first one: the collectives of this process, and the job's ranks in
        the order of this group. `mesh`: its rounds, where it is one of a mesh's groups."""
        super().__init__(rank, size)
        self._mesh, self._name = mesh, ""
        self._own_rank, self._ranks = rank, size
        self.calls = ScriptCalls(rank, size) if calls is None else calls
        self._of_job = list(ranks or range(size))
        self._prefix = "" if calls is None else f"group {calls.groups} "

    def attached(self, training: CallsOfTraining, sums: PushesTensors) -> None:
        """Let this training say from now on who repeats a collective, which else is a round of `sums`."""
        self.calls.attached(training, sums)

    def step_begins(self) -> None:
        self.calls.step_begins()

    # ---- as PyTorch calls them ----

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def allreduce(self, tensors: list[Any], opts: Any = None) -> TensorsWork:
        if _is_of_ddp():
            return _done(tensors)
        return self._all_reduced("all_reduce", tensors, opts, True)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Any], opts: Any) -> TensorsWork:
        """Reduce the tensors; only the root gets the result."""
        return self._all_reduced("reduce", tensors, opts, opts.rootRank == self._own_rank)

    def broadcast(self, tensors: list[Any], opts: Any) -> TensorsWork:
        if _is_of_ddp():
            return _done(tensors)
        pulled = self._given("broadcast", tensors[0], [tensors[0]] if opts.rootRank == self._own_rank else None, 1)
        return TensorsWork(lambda: fill(tensors, pulled()[0]), tensors)

    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> TensorsWork:
        if _is_of_ddp():
            for out in outputs[0]:
                out.copy_(inputs[0])
            return _done(outputs[0])
        gathered = self._gathered("all_gather", inputs[0])
        return TensorsWork(lambda: _fill_each(outputs[0], gathered()), outputs[0])

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> TensorsWork:
        """Gather all ranks' inputs into one tensor, one after the other."""
        gathered = self._gathered("all_gather_into_tensor", input)
        return TensorsWork(lambda: _fill_parts(output, gathered(), self._ranks), [output])

    def all_gather_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> TensorsWork:
        return _together([self.all_gather_single(*each) for each in zip(outputs, inputs, strict=True)])

    def gather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any) -> TensorsWork:
        gathered = self._gathered("gather", inputs[0])
        mine = outputs[0] if opts.rootRank == self._own_rank else []
        return TensorsWork(lambda: _fill_each(mine, gathered()[: len(mine)]), mine)

    def scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any) -> TensorsWork:
        given = inputs[0] if opts.rootRank == self._own_rank else None
        pulled = self._given("scatter", outputs[0], given, self._ranks)
        return TensorsWork(lambda: fill(outputs, pulled()[self._own_rank]), outputs)

    def reduce_scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any) -> TensorsWork:
        whole = torch.stack([each.detach().reshape(-1) for each in inputs[0]])
        return self._reduced_part("reduce_scatter", outputs[0], whole, opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any) -> TensorsWork:
        """Reduce all ranks' inputs, and give each rank its part of the result."""
        return self._reduced_part("reduce_scatter_tensor", output, input, opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any) -> TensorsWork:
        return _together([self.reduce_scatter_single(*each, opts) for each in zip(outputs, inputs, strict=True)])

    def alltoall(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> TensorsWork:
        return self._exchanged("all_to_all", outputs, inputs)

    def all_to_all_single(
        self, output: Any, input: Any, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> TensorsWork:
        """Exchange parts along the first dimension; without sizes they are equal."""
        parts = [
            list(torch.split(each, list(sizes) or each.shape[0] // self._ranks))
            for each, sizes in ((output, output_sizes), (input, input_sizes))
        ]
        return self._exchanged("all_to_all_single", parts[0], parts[1])

    def barrier(self, opts: Any = None) -> TensorsWork:
        none = torch.zeros(1)
        return self._all_reduced("barrier", [none], None, True)

    # PyTorch before 2.11 calls these by other names
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- what gloo does ----

    def new_group(self, ranks: Sequence[int], **more: Any) -> Any:
        """A group of these ranks, in this order; None where this rank does not belong to it."""
        calls, of_job = self.calls, [self._of_job[each] for each in ranks]
        calls.groups += 1
        name = str(more.get("group_name") or calls.groups)
        made = MadeGroup(calls.groups, str(more.get("group_desc") or ""), tuple(of_job))
        calls.made.append(made)
        if len(ranks) == self._ranks:
            return TensorsGroup(of_job.index(calls.rank), len(ranks), calls, of_job)
        if made.about.startswith(OF_MESH):
            if calls.rank not in of_job:
                return None
            return _named(
                TensorsGroup(of_job.index(calls.rank), len(ranks), calls, of_job, MeshGroup(calls, made)), name
            )
        calls.check_heals()
        gloo = calls.connections.of(of_job, f"{calls.groups} {name}", f"new_group over ranks {of_job}"[:100])
        if gloo is None:
            return None
        group = dist.ProcessGroup(dist.HashStore(), of_job.index(calls.rank), len(of_job))
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        for device in _devices():
            group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)
        return _named(group, name)

    def send(self, tensors: list[Any], to: int, tag: int) -> Any:
        given = [on_host(each).contiguous() for each in tensors]
        return self._everyone("send").send(given, self._of_job[to], tag)

    def recv(self, tensors: list[Any], of: int, tag: int) -> Any:
        return self._received(tensors, lambda into: self._everyone("recv").recv(into, self._of_job[of], tag))

    def recv_anysource(self, tensors: list[Any], tag: int) -> Any:
        return self._received(tensors, lambda into: self._everyone("recv").recv_anysource(into, tag))

    def _everyone(self, kind: str) -> Any:
        self.calls.check_heals()
        return self.calls.connections.everyone(f"{kind} by rank {self.calls.rank}")

    def _received(self, tensors: list[Any], begin: Callable[[list[Any]], Any]) -> Any:
        if all(in_host_memory(each) and each.is_contiguous() for each in tensors):
            return begin(tensors)
        into = [torch.empty(each.shape, dtype=each.dtype) for each in tensors]
        begun = begin(into)

        def finish() -> None:
            begun.wait()
            for each, came in zip(tensors, into, strict=True):
                each.copy_(came)

        return TensorsWork(finish, tensors)

    # ---- rounds ----

    def _all_reduced(self, kind: str, tensors: list[Any], opts: Any, writes: bool) -> TensorsWork:
        found = [self._reduced(kind, each, _operation(opts)) for each in tensors]

        def finish() -> None:
            with torch.no_grad():
                for tensor, result in zip(tensors, [each() for each in found], strict=True):
                    if writes:
                        tensor.copy_(result.reshape(tensor.shape))

        return TensorsWork(finish, tensors)

    def _reduced_part(self, kind: str, output: Any, whole: Any, opts: Any) -> TensorsWork:
        found = self._reduced(kind, whole, _operation(opts))

        def finish() -> None:
            with torch.no_grad():
                output.copy_(found().reshape(self._ranks, -1)[self._own_rank].reshape(output.shape))

        return TensorsWork(finish, [output])

    def _exchanged(self, kind: str, outputs: list[Any], inputs: list[Any]) -> TensorsWork:
        """Give each rank its input, and take what each gives this rank; sizes may differ, and are gathered first."""
        sizes = torch.tensor([halves_count([each]) for each in inputs], dtype=torch.int64)
        counts = torch.empty((self._ranks, self._ranks), dtype=torch.int64)
        for row, halves in zip(counts, self._gathered(kind, sizes)(), strict=True):
            fill([row], halves)
        most = int(counts.max())
        if not most:
            return _done(outputs)
        mine = np.zeros((self._ranks, self._ranks, most), np.float32)
        for place, each, size in zip(mine[self._own_rank], inputs, sizes, strict=True):
            place[: int(size)] = halves_of([each])
        pulled = self._begun(f"{kind} parts", inputs[0], mine)

        def finish() -> None:
            _fill_each(outputs, pulled()[:, self._own_rank])

        return TensorsWork(finish, outputs)

    def _begun(self, kind: str, like: Any, mine: Array, mean: bool = False) -> Callable[[], Array]:
        """Push `mine`. Returns a function that waits for the sum."""
        shape, way = "x".join(map(str, mine.shape)), f"{mine.dtype}{' mean' if mean else ''}"
        of = f"{kind} {str(like.dtype).removeprefix('torch.')} {shape} {way}"
        bits: Type | None = "bfloat16" if like.dtype == torch.bfloat16 and mine.dtype == np.int16 else None
        if self._mesh is not None:
            return self._mesh.begun(kind, of, mine, bits)
        of = f"{self._prefix}{of}"
        return self.calls.begun(kind, of, mine, mean, bits)

    def _reduced(self, kind: str, tensor: Any, operation: str) -> Callable[[], Any]:
        """Begin to reduce one tensor. Returns a function that waits for the result, flat."""
        if tensor.dtype.is_complex and operation == "SUM":
            parts = torch.view_as_real(tensor.detach().resolve_conj())
            found = self._reduced(kind, parts, operation)
            return lambda: torch.view_as_complex(found().reshape(parts.shape))
        if operation in MERGES:
            return self._merged(kind, tensor, MERGES[operation])
        if operation in ("SUM", "AVG") and tensor.dtype in TYPES:
            return self._added(kind, tensor, operation == "AVG")
        if operation == "SUM" and not tensor.dtype.is_complex:
            return self._counted(kind, tensor)
        why = f"{operation} of {tensor.dtype} is not among SUM, {', '.join(MERGES)}, and AVG of floats"
        raise CoveyError(f"{kind} was refused", why, "gather the tensors, and reduce them in the script")

    def _added(self, kind: str, tensor: Any, mean: bool) -> Callable[[], Any]:
        """Sum floats, in the order of `covey.tensors.numbers.sum_order`."""
        mine = array_of_tensor(tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1))
        divides = mean and self._mesh is not None  # by the ranks of the group, not by those of the round
        pulled = self._begun(kind, tensor, mine, mean and not divides)

        def found() -> Any:
            whole = torch.from_numpy(pulled()).view(tensor.dtype)
            return whole / self._ranks if divides else whole

        return found

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
            _fill_each(list(each), gathered())
            return merge(each)

        return found

    def _gathered(self, kind: str, tensor: Any) -> Callable[[], Array]:
        """Gather the halves of every rank's tensor."""
        rows: list[Any] = [None] * self._ranks
        rows[self._own_rank] = tensor
        return self._given(kind, tensor, rows, self._ranks)

    def _given(self, kind: str, like: Any, given: Sequence[Any] | None, rows: int) -> Callable[[], Array]:
        """Give so many rows of halves, each of a tensor that is as large as `like`; what is None another rank gives."""
        size = halves_count([like])
        mine = np.zeros((rows, _room(size) if like.dtype == torch.uint8 else size), np.float32)
        for row, each in zip(mine, given or (), strict=bool(given)):
            if each is not None:
                row[:size] = halves_of([each])
        return self._begun(kind, like, mine)


def init_process_group(job: "JobClient | None" = None) -> None:
    """Do what `init_process_group` of torch.distributed does, for a job whose ranks may be lost: this process is
    `job`'s rank (without `job`, that of `covey.join()`, made if there is none), and meets no other process yet.
    CoveyError outside a job."""
    found = joined(job)
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=found.rank, world_size=found.world_size)
    group = dist.group.WORLD
    assert isinstance(group, TensorsGroup), "made by `_made`"
    group.calls.job = found


def _made(store: Any, rank: int, size: int, timeout: Any) -> TensorsGroup:
    if dist.is_initialized() and size != dist.get_world_size():
        why = f"it would have {size} of {dist.get_world_size()} ranks, and this PyTorch does not ask Covey for it"
        raise CoveyError("this group cannot be created", why, "use the group of all ranks, or PyTorch 2.13")
    return TensorsGroup(rank, size)


def _named(group: Any, name: str) -> Any:
    group._set_group_name(name)
    return group


def _devices() -> list[str]:
    return sorted({"cpu", "cuda", accelerator_type() or "cpu"})


dist.Backend.register_backend(BACKEND, _made, devices=_devices())


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


def _together(works: Sequence[TensorsWork]) -> TensorsWork:
    def finish() -> None:
        for each in works:
            each.wait()

    return TensorsWork(finish, [tensor for each in works for tensor in each.result()])


def _fill_each(tensors: Sequence[Any], rows: Array) -> None:
    """Fill each tensor with its row of halves."""
    for tensor, row in zip(tensors, rows, strict=True):
        fill([tensor], row)


def _fill_parts(tensor: Any, rows: Array, parts: int) -> None:
    """Fill a tensor with rows of halves, one after the other along its first dimension."""
    if tensor.is_contiguous():
        _fill_each(list(tensor.view(parts, -1)), rows)
        return
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    _fill_each(list(whole.view(parts, -1)), rows)
    with torch.no_grad():
        tensor.copy_(whole)


def _room(size: int) -> int:
    """The room for so many halves of an object: few sizes of it, since each is a tensor of its own for good."""
    step = 1 << max(5, size.bit_length() - 3)
    return -(-size // step) * step
