"""Gradients of ranks of one host, added on their GPUs: one copy to host memory a host, not one a rank.

NCCL adds in an order of its own, so it only moves here. Each rank gets its share of a bucket from all ranks of its
host, and adds that on its GPU in the order of `covey.tensors.numbers.sum_order`, as processors do: the bits are the
same with this and without, but for those of a NaN that have no meaning.

    GPU 0   a0 a1 --+-- a0 b0   a0 + b0 ---- one copy down, pushed for both ranks, one copy up --- s0 --+-- s0 s1
    GPU 1   b0 b1 --+-- a1 b1   a1 + b1 ---- the same for the other half ------------------------- s1 --+-- s0 s1

A job on one host is whole with that: nothing goes down. On several hosts the share of a rank is what it speaks for
(`covey.tensors.aggregator.host_rounds`), so ranks whose numbers make no sum of the tree among themselves add what they
can. The first round of a bucket goes down rank by rank, since a rank may find no memory to share in it.

All ranks of a host must begin the same moves in the same order. Those down are begun by the thread that computes, in
DDP's order; those up by the thread that ends rounds, in that order too, once the last one down of the pass was begun.
So one communicator is enough, and no two of them wait for each other's kernels.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from covey.frameworks.torch.devices import BucketUp, DeviceBuckets, devices_of, page_locked
from covey.frameworks.torch.group import TensorsGroup
from covey.frameworks.torch.types import TYPES, bits
from covey.job.tensors import TensorClient
from covey.tensors.numbers.additions import Tree, tree_of
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.sum_order import Node, nodes_of
from covey.tensors.numbers.types import NUMBERS

SWITCH = "COVEY_GPU_SUMS"
"""Environment variable; 0: each rank's gradients go to host memory."""
DIGITS = 4
"""Numbers below 2^32 by which ranks know whether they compute on one GPU; float64 holds them exactly."""
Wait = Callable[[], object]
Ends = Callable[[Wait, Any, Any], None]
_groups: dict[tuple[Node, str], Any] = {}
"""Communicators by ranks and backend; models of one script train one after the other."""


class HostGroup(NamedTuple):
    """The ranks of one host, each with a GPU, and what moves tensors between these."""

    members: Node
    rank: int
    """Number of this rank among them."""
    world_size: int
    order: Any
    group: Any
    backend: str

    @property
    def whole_job(self) -> bool:
        return self.members == (0, self.world_size)


def agreed(tensors: TensorClient, ddp: Any, name: str) -> HostGroup | str:
    """How ranks of this host add gradients of this model on their GPUs, or why they do not. All ranks of the job call
    it, for the same models in the same order; it is a round of tensor `name`."""
    members, devices = tensors.neighbours(), devices_of(ddp.module)
    backend = _backend(devices[0])
    own = _own_reason(tensors, ddp, members, devices, backend)
    rows = np.zeros((tensors.world_size, 1 + DIGITS))
    if not own:
        rows[tensors.rank] = [1, *np.frombuffer(_identity(devices[0]), "<u4").tolist()]
    rows = tensors.push_pull(name, rows)
    if own:
        return own
    assert members is not None, "else there is a reason"
    if why := _their_reason(rows, members, backend):
        return why
    key = (members, backend)
    if key not in _groups:
        _groups[key] = dist.new_group(list(range(*members)), backend=backend, use_local_synchronization=True)
    at = tensors.rank - members[0]
    return HostGroup(members, at, tensors.world_size, tensors.order, _groups[key], backend)


def _own_reason(tensors: TensorClient, ddp: Any, members: Node | None, devices: Sequence[Any], backend: str) -> str:
    kept = [name for name, each in ddp.module.named_parameters() if each.requires_grad and each.device != devices[0]]
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    if members is None:
        return "ranks of this host share no memory"
    if members[1] - members[0] == 1:
        return "no other rank of the job is on this host"
    if members != (0, tensors.world_size) and len(_nodes(tensors, members)) == members[1] - members[0]:
        return f"no two of ranks {members[0]} to {members[1] - 1} are added to each other first, in {tensors.order!r}"
    if kept:
        return f"{kept[0]!r} is not on {devices[0]} as others are"
    if not backend:
        return f"PyTorch has no backend that moves tensors between devices of type {devices[0].type}"
    if isinstance(dist.group.WORLD, TensorsGroup):
        return "covey.torch.init_process_group() connects no GPUs"
    if dist.get_rank() != tensors.rank:
        return f"rank {tensors.rank} of the job is rank {dist.get_rank()} of PyTorch's group"
    return ""


def _their_reason(rows: Array, members: Node, backend: str) -> str:
    known: dict[tuple[float, ...], int] = {}
    for rank in range(*members):
        if not rows[rank, 0]:
            return f"rank {rank} of this host cannot: its first lines say why"
        other = known.setdefault(tuple(rows[rank, 1:].tolist()), rank)
        if other != rank:
            return f"ranks {other} and {rank} share a GPU, which {backend} refuses"
    return ""


def _nodes(tensors: TensorClient, members: Node) -> tuple[Node, ...]:
    return nodes_of(members, tensors.world_size, tensors.order)


def _backend(device: Any) -> str:
    """The backend of torch.distributed that moves tensors between such devices; empty: none."""
    if device.type == "cuda" and not dist.is_nccl_available():
        return ""
    return str(dist.Backend.default_device_backend_map.get(device.type, ""))


def _identity(device: Any) -> bytes:
    """The GPU that this is, whatever number it has in this process: parts of one GPU are one."""
    asks = getattr(torch.get_device_module(device), "get_device_properties", None)
    found = asks(device) if asks is not None else None
    places = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    named = places if places[1] is not None else getattr(found, "uuid", device.index)
    return hashlib.blake2b(f"{device.type} {named}".encode(), digest_size=4 * DIGITS).digest()


class _Cut(NamedTuple):
    """How a bucket is divided among the ranks of the host."""

    nodes: tuple[Node, ...]
    spans: tuple[tuple[slice, ...], ...]
    """By rank of the host, the elements that are its share."""
    counts: list[int]
    """By rank of the host, the number of these."""

    @property
    def in_order(self) -> bool:
        """Whether shares follow one another in the bucket, so that nothing is moved within it."""
        starts = [0, *accumulate(self.counts)]
        return all(len(each) <= 1 for each in self.spans) and all(
            each[0].start == start for each, start in zip(self.spans, starts, strict=False) if each
        )


class _Memory(NamedTuple):
    """Page-locked memory of this rank's share of a bucket."""

    down: list[Any]
    """For each node, its sum."""
    up: Any
    """The average."""


class HostSums:
    """The buckets of one model whose gradients ranks of this host add on their GPUs. `take` and `pass_ends` are called
    by the thread that computes."""

    def __init__(self, tensors: TensorClient, host: HostGroup, buckets: DeviceBuckets, ends: Ends) -> None:
        """`ends(wait, gradients, future)`: as `covey.torch.RoundEnds.end`."""
        self._tensors, self._host, self._buckets, self._ends = tensors, host, buckets, ends
        ranks = host.members[1] - host.members[0]
        nodes = nodes_of(host.members, host.world_size, host.order)
        self._trees: dict[Node, Tree] = {node: tree_of(node, host.order, host.members[0]) for node in nodes}
        self._ranks, self._nodes = ranks, nodes
        self._memory: dict[tuple[int, ...], _Memory] = {}
        self._begun = threading.Event()
        """Whether all moves down of this pass were begun."""
        self._divisors: dict[Any, Any] = {}

    def take(self, name: str, parameters: Sequence[Any], bucket: Any) -> Any:  # torch.futures.Future | None
        """The future of this bucket, or None where it must go down rank by rank. Errors as of `DeviceBuckets.take`."""
        cut = self._cut(name, bucket.numel())
        if cut is None:
            return None
        stream = self._buckets.check(bucket.device)
        future = torch.futures.Future(devices=[bucket.device])
        with self._buckets.side(bucket.device), torch.no_grad():
            flat = bucket.reshape(-1)
            shares = self._exchanged(flat, cut)
            sums = [_sum(self._trees[node], shares) for node in cut.nodes]
            if self._host.whole_job:
                self._spread(self._narrowed(sums[0], bucket.dtype), flat, cut)
                future.set_result(bucket)
                return future
            memory = self._locked(name, tuple(map(id, parameters)), sums, bucket.dtype)
            for host, there in zip(memory.down, sums, strict=True):
                host.copy_(there, non_blocking=True)
            copied = torch.Event(device=bucket.device)
            copied.record(stream)
        up = _Gathers(self, bucket, cut, self._begun, future)
        self._buckets.later(name, self._pushes(name, memory), memory.up, copied, up)
        return future

    def pass_ends(self) -> None:
        """The last bucket of this pass has been taken."""
        self._begun.set()
        self._begun = threading.Event()

    # ---- inside ----

    def _cut(self, name: str, count: int) -> _Cut | None:
        if self._host.whole_job:
            cuts = [count * at // self._ranks for at in range(self._ranks + 1)]
            spans: tuple[tuple[slice, ...], ...] = tuple((slice(*each),) for each in pairwise(cuts))
        else:
            parts = self._tensors.host_parts(name)
            if parts is None:
                return None
            spans = parts.elements
        return _Cut(self._nodes, spans, [sum(each.stop - each.start for each in span) for span in spans])

    def _exchanged(self, flat: Any, cut: _Cut) -> list[Any]:
        """By rank of the host, its gradients of this rank's share."""
        packed = flat if cut.in_order else torch.cat([flat[each] for span in cut.spans for each in span])
        mine = cut.counts[self._host.rank]
        there = torch.empty(self._ranks * mine, dtype=flat.dtype, device=flat.device)
        dist.all_to_all_single(there, packed, [mine] * self._ranks, cut.counts, group=self._host.group)
        return list(there.view(self._ranks, mine))

    def _narrowed(self, total: Any, dtype: Any) -> Any:
        """The average of a sum of all ranks. The divisor is on the device: by a number of the host PyTorch multiplies
        with its inverse, which rounds twice."""
        key = total.dtype, total.device
        if key not in self._divisors:
            self._divisors[key] = torch.tensor(float(self._host.world_size), dtype=total.dtype, device=total.device)
        return (total / self._divisors[key]).to(dtype)

    def _spread(self, share: Any, flat: Any, cut: _Cut) -> None:
        """Give this rank's share of the average to all ranks of the host, and put all shares into the bucket."""
        whole = flat if cut.in_order else torch.empty_like(flat)
        dist.all_gather(list(whole.split(cut.counts)), share, group=self._host.group)
        if not cut.in_order:
            at = 0
            for span in cut.spans:
                for each in span:
                    end = at + each.stop - each.start
                    flat[each].copy_(whole[at:end])
                    at = end

    def _locked(self, name: str, key: tuple[int, ...], sums: Sequence[Any], dtype: Any) -> _Memory:
        """Page-locked memory for this bucket, that of the pass before where there is one."""
        if key not in self._memory:
            for old in [each for each in self._memory if not set(each).isdisjoint(key)]:
                del self._memory[old]  # DDP has divided these parameters into other buckets
            down = [page_locked(name, each.numel(), each.dtype) for each in sums]
            self._memory[key] = _Memory(down, page_locked(name, sums[0].numel(), dtype))
        return self._memory[key]

    def _pushes(self, name: str, memory: _Memory) -> Callable[[Any, Any], None]:
        """What happens when sums are in host memory, in another thread."""

        def came(host: Any, future: Any) -> None:
            taken, into = self._tensors.push_sums(name, list(map(_stored, memory.down))), _stored(host)

            def wait() -> None:
                parts, at = taken(), 0
                for part in parts:
                    into[at : at + len(part)] = part
                    at += len(part)

            self._ends(wait, host, future)

        return came

    def stream_of(self, device: Any) -> Any:
        return self._buckets.stream_of(device)

    def went_up(self, share: Any, bucket: Any, cut: _Cut) -> Any:
        """Put the average, of which this rank's share is in host memory, into the bucket, which is returned."""
        there = share.to(bucket.device, non_blocking=True)
        self._spread(there, bucket.reshape(-1), cut)
        return bucket


class _Gathers(BucketUp):
    """The future of a bucket of which each rank of the host gets its share of the average."""

    def __init__(self, sums: HostSums, bucket: Any, cut: _Cut, begun: threading.Event, future: Any) -> None:
        super().__init__(bucket, sums.stream_of(bucket.device), future)
        self._sums, self._cut, self._begun = sums, cut, begun

    def set_result(self, host: Any) -> None:
        self._begun.wait()
        super().set_result(host)

    def put(self, host: Any) -> Any:
        return self._sums.went_up(host, self._bucket, self._cut)


def _stored(tensor: Any) -> Array:
    """An array in the tensor's own memory, with the type in which such numbers are stored."""
    array: Array = bits(tensor).numpy()
    return array.view(NUMBERS[TYPES[tensor.dtype]].stored)


def _sum(tree: Tree, shares: Sequence[Any]) -> Any:
    """A sum in the type of additions; one rank's gradients as they are, where it is alone in its node."""
    if isinstance(tree, int):
        return shares[tree]
    return _added(tree, shares)


def _added(tree: Tree, shares: Sequence[Any]) -> Any:
    if isinstance(tree, int):
        share = shares[tree]
        return share.float() if share.dtype in (torch.float16, torch.bfloat16) else share
    left, right = (_added(each, shares) for each in tree)
    return left + right
