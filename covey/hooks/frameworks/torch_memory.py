"""Keep a PyTorch script within a memory limit: what does not fit goes to host memory, and results have the same bits.

    parameters, gradients           stay: operators use them where they are
    states of optimizers            in host memory between two updates, as far as the limit needs it
    tensors saved for the backward  the first ones, up to what is left, stay; copies of the others, until they are used

(AntMan §3.1.1: what does not fit is placed in host memory, and the job does not fail.) On a set of cores "device" and
"host" are the same memory: the classes are counted, and the bytes really move. Memory that operators need while they
run (results that are not saved, workspaces) can neither be moved nor counted from Python. On a GPU the allocator counts
everything, and takes no more than the limit: `covey.hooks.limits.cuda_memory`.

Autograd is hooked while there is a limit, and for one mini-batch in 64 to know what the script would use. Hooks of the
script itself (`save_on_cpu`) have priority: then ours wait for the next mini-batch.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import graph
from torch.optim.optimizer import register_optimizer_step_pre_hook

from covey.hooks.limits.cuda_memory import CudaMemory
from covey.hooks.limits.device_memory import Used, Wanted, device_peak, on_device, spilled, temporaries
from covey.hooks.limits.sharing import MemoryUsed

_autograd: Any = torch._C._autograd
ROOMY, ROOMY_EVERY = 1.5, 8
"""Factor on the need of the last counted mini-batch above which a limit is far away. Then one mini-batch in eight is
counted, since counting costs some 5 us for each tensor; a sudden rise exceeds the limit for seven mini-batches at
most."""
COUNTED_EVERY = 64
"""Number of mini-batches without a limit of which one is counted."""
SMALLEST_MOVED = 1024
"""Bytes below which a tensor is not moved: copying it costs more than it gives."""


class Held:
    """Memory of one saved tensor, however often it was saved; collected when nothing needs the tensor any more."""

    __slots__ = ("__weakref__", "nbytes", "of")

    def __init__(self, of: "SavedTensors", nbytes: int) -> None:
        self.of, self.nbytes = of, nbytes

    def __del__(self) -> None:
        self.of.released(self.nbytes)


class SavedTensors:
    """The tensors that autograd saves for the backward pass, within a budget; `pack` and `unpack` are its hooks."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held: weakref.WeakValueDictionary[tuple[int, int], Held] = weakref.WeakValueDictionary()
        self.budget_bytes: int | None = None
        self.now_bytes = self.peak_bytes = self.spilled_bytes = self.wanted_bytes = self.moved = 0
        """Bytes of the mini-batch: on the device now, at most, moved out, all of it; number of moves since the
        start."""

    def pack(self, tensor: Any) -> Any:
        """The object that autograd keeps in place of the tensor. Raises nothing: at worst the tensor stays."""
        try:
            return self._packed(tensor)
        except Exception:
            return tensor.detach(), None

    def _packed(self, tensor: Any) -> Any:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or _is_parameter(tensor):
            return tensor.detach(), None
        if torch.cuda.is_initialized() and not tensor.is_cuda:
            return tensor.detach(), None
        key, nbytes = _memory_of(tensor)
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                return tensor.detach(), held
            if self.budget_bytes is None or self.now_bytes + nbytes <= self.budget_bytes or nbytes < SMALLEST_MOVED:
                self._held[key] = held = Held(self, nbytes)
                self.now_bytes += nbytes
                self.wanted_bytes += nbytes
                self.peak_bytes = max(self.peak_bytes, self.now_bytes)
                return tensor.detach(), held
        copy = in_host_memory(tensor.detach())
        if copy is None:
            return tensor.detach(), None
        with self._lock:
            self.spilled_bytes += copy.nbytes
            self.wanted_bytes += copy.nbytes
            self.moved += 1
        return copy, tensor.device

    def unpack(self, packed: Any) -> Any:
        tensor, where = packed
        return to_device(tensor, where) if isinstance(where, torch.device) else tensor

    def released(self, nbytes: int) -> None:
        with self._lock:
            self.now_bytes -= nbytes

    def begin(self) -> None:
        """Begin the figures of a mini-batch."""
        with self._lock:
            self.peak_bytes = self.now_bytes
            self.spilled_bytes = self.wanted_bytes = 0


def _is_parameter(tensor: Any) -> bool:
    base = tensor if tensor._base is None else tensor._base
    return bool(base.is_leaf and base.requires_grad)


def _memory_of(tensor: Any) -> tuple[tuple[int, int], int]:
    storage = tensor.untyped_storage()
    return (storage.data_ptr(), storage.nbytes()), storage.nbytes()


def in_host_memory(tensor: Any) -> Any:
    """A copy with the same strides, page-locked where there is a GPU; None for a tensor whose elements overlap."""
    if overlaps(tensor.shape, tensor.stride()):
        return None
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=tensor.is_cuda)


def overlaps(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may be in the same place (`expand`)."""
    reach = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def to_device(copy: Any, device: Any) -> Any:
    """The copy on the device again, with the same strides. A stream keeps order: later operators see all of it."""
    tensor = torch.empty_strided(copy.shape, copy.stride(), dtype=copy.dtype, device=device)
    return tensor.copy_(copy, non_blocking=tensor.is_cuda)


class OptimizerStates:
    """Tensors in the states of the script's optimizers. Each stays the same object: only its memory moves."""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.device_bytes: int | None = None
        """Most bytes of them on the device between two updates; None: all."""
        self.room_bytes = 0
        """Most bytes of them on the device during an update."""
        self.moved = 0
        """Number of moves since the start."""
        self._away: dict[int, tuple[weakref.ref[Any], Any]] = {}
        """By identity: a tensor whose data is in host memory, and its device."""

    def parameters(self) -> Iterator[Any]:
        for optimizer in list(self.optimizers):
            for group in optimizer.param_groups:
                yield from group["params"]

    def tensors(self) -> Iterator[Any]:
        for optimizer in list(self.optimizers):
            yield from _of(optimizer)

    def all_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def away_bytes(self) -> int:
        return sum(tensor.nbytes for ref, _ in self._away.values() if (tensor := ref()) is not None)

    def is_away(self, tensor: Any) -> bool:
        ref, _ = self._away.get(id(tensor), (None, None))
        return ref is not None and ref() is tensor

    def move_out(self) -> None:
        """Move out all tensors but those that may stay."""
        if self.device_bytes is None:
            return
        here_bytes = 0
        for tensor in self.tensors():
            if self.is_away(tensor):
                continue
            here_bytes += tensor.nbytes
            if here_bytes > self.device_bytes and (copy := in_host_memory(tensor)) is not None:
                self._away[id(tensor)] = weakref.ref(tensor), tensor.device
                tensor.data = copy
                here_bytes -= copy.nbytes
                self.moved += 1

    def bring_back(self, optimizer: Any) -> None:
        """Move back what this optimizer is about to use. On a set of cores, what does not fit is used where it is."""
        if not self._away:
            return
        room_bytes = self.room_bytes - (self.all_bytes() - self.away_bytes())
        for tensor in _of(optimizer):
            if self.is_away(tensor) and (tensor.nbytes <= room_bytes or self._away[id(tensor)][1].type != "cpu"):
                room_bytes -= tensor.nbytes
                self._back(tensor)

    def bring_all_back(self) -> None:
        for ref, _ in list(self._away.values()):
            if (tensor := ref()) is not None:
                self._back(tensor)
        self._away.clear()

    def settle(self, elsewhere: Callable[[Any], bool]) -> None:
        """Move to the device what its allocator has placed elsewhere."""
        for tensor in self.tensors():
            if elsewhere(tensor) and not self.is_away(tensor):
                tensor.data = tensor.data.clone()

    def _back(self, tensor: Any) -> None:
        _, device = self._away.pop(id(tensor))
        tensor.data = to_device(tensor.data, device)


def _of(optimizer: Any) -> Iterator[Any]:
    for state in list(optimizer.state.values()):
        if isinstance(state, dict):
            yield from (value for value in state.values() if _moves(value))


def _moves(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and value.nbytes >= SMALLEST_MOVED


class TorchMemory:
    """The `covey.hooks.limits.sharing.MemoryLimit` of PyTorch. Its methods are called between two mini-batches, in the
    script's thread."""

    def __init__(self, gpu: Callable[[], CudaMemory | None] = lambda: None) -> None:
        """`gpu` returns the memory of the script's GPU; None as long as it computes on cores."""
        self._gpu = gpu
        self.saved, self.states = SavedTensors(), OptimizerStates()
        self._at_work_bytes = 0
        """On a GPU, bytes that operators need and autograd does not save."""
        self._used = MemoryUsed()
        self._limit_bytes = self._fixed_bytes = self._wanted_bytes = self._peak_bytes = 0
        self._demand_bytes = 0
        """Bytes that the newest counted mini-batch needed, with what was moved away."""
        self._states_bytes = self._away_bytes = 0
        """Bytes of optimizer states between two updates: on the device, and in host memory."""
        self._batches = -1
        self._thread: int | None = None
        """The thread whose optimizers are counted and moved: what another thread trains may change at any moment."""
        self._pushed_in: int | None = None
        """The thread whose autograd is hooked; hooks belong to a thread."""
        self._hooked = False
        self._unlimited = MemoryUsed()
        """The figures for each mini-batch that is not counted, without a limit."""
        self._disable = graph.disable_saved_tensors_hooks

    def uses(self, optimizer: Any) -> None:
        """The script has this optimizer, and this thread trains with it."""
        if self._thread is None:
            self._thread = threading.get_ident()
        if self._thread == threading.get_ident() and optimizer not in self.states.optimizers:
            self.states.optimizers.add(optimizer)
            self._batches = -1  # count anew

    @property
    def counting(self) -> bool:
        return self._pushed_in is not None

    def ended(self) -> MemoryUsed:
        gpu = self._gpu()
        if gpu is None or not gpu.recording():
            self._used = self._ended(gpu)
        return self._used

    def before_graph(self) -> None:
        """The script is about to record its first graph: everything comes back, since recorded copies would be repeated
        at each replay. From then on no limit is kept."""
        gpu = self._gpu()
        if gpu is not None:
            gpu.lift()
        self._limit_bytes = 0
        self.states.bring_all_back()
        self._plan()

    def _ended(self, gpu: CudaMemory | None) -> MemoryUsed:
        if self._thread != threading.get_ident():
            self._thread, self._batches = threading.get_ident(), -1
            self.states.optimizers.clear()
        self._batches += 1
        counted = self._pushed_in is not None
        due = self._batches % (ROOMY_EVERY if self._limit_bytes else COUNTED_EVERY) == 0
        if gpu is None and not (counted or due or self._is_near()):
            return self._unlimited
        if due or counted:
            self._fixed_bytes = sum(_resident(parameter) for parameter in self.states.parameters())
        spilled_bytes = self.saved.spilled_bytes + self._away_bytes
        if counted:
            self._wanted_bytes = self.saved.wanted_bytes
            at_update_bytes = self.states.all_bytes() - self.states.away_bytes()
            before_bytes = self._states_bytes + self.saved.peak_bytes
            self._peak_bytes = self._fixed_bytes + max(before_bytes, at_update_bytes)
            self._demand_bytes = self._fixed_bytes + self._wanted_bytes + self.states.all_bytes()
        used = None if gpu is None else gpu.ended()
        if gpu is not None and counted:
            self._at_work_bytes = temporaries(Wanted(gpu.wanted_bytes), self._demand_bytes)
        self._plan()
        self._push() if due or self._is_near() or (self._limit_bytes and gpu is not None) else self._pop()
        self.saved.begin()
        if gpu is not None and used is not None:
            return of_gpu(used, spilled_bytes, gpu.retries)
        moved = self.saved.moved + self.states.moved
        self._unlimited = MemoryUsed(self._peak_bytes, self._fixed_bytes, 0, moved)
        return MemoryUsed(self._peak_bytes, self._fixed_bytes, spilled_bytes, moved)

    def _is_near(self) -> bool:
        """Whether there is a limit that a mini-batch may reach."""
        near = not self._demand_bytes or self._limit_bytes < ROOMY * self._demand_bytes
        return bool(self._limit_bytes) and near

    def apply(self, limit_bytes: int) -> bool:
        gpu = self._gpu()
        if gpu is not None and not gpu.ready(limit_bytes):
            return False
        if gpu is not None and not limit_bytes:
            gpu.lift()  # first, or what comes back has no room
        self._limit_bytes = limit_bytes
        if limit_bytes:
            if not self._hooked:
                self._hooked = True
                register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: self._updates(optimizer))
            self._push()
        else:
            self.states.bring_all_back()
        self._plan()
        if gpu is None:
            return True
        if not limit_bytes:
            self.states.settle(gpu.lies_in_host_memory)
            return True
        away_bytes = max(0, self._wanted_bytes - (self.saved.budget_bytes or 0)) + self._away_bytes
        return gpu.hold(limit_bytes, away_bytes)

    def _plan(self) -> None:
        """Divide the room under the limit. States are moved out first: they are not used until the update."""
        if self._limit_bytes:
            self._divide()
        else:
            self.saved.budget_bytes = self.states.device_bytes = None
        if self._limit_bytes or self._pushed_in is not None or self._batches % COUNTED_EVERY == 0:
            self.states.move_out()
            self._away_bytes = self.states.away_bytes()
            self._states_bytes = self.states.all_bytes() - self._away_bytes

    def _divide(self) -> None:
        room_bytes = max(0, self._limit_bytes - self._fixed_bytes - self._at_work_bytes)
        states_bytes = self.states.all_bytes()
        stay_bytes = max(0, min(states_bytes, room_bytes - self._wanted_bytes))
        self.states.room_bytes, self.states.device_bytes = room_bytes, stay_bytes
        self.saved.budget_bytes = room_bytes - stay_bytes

    def _updates(self, optimizer: Any) -> None:
        if self._limit_bytes:
            with contextlib.suppress(RuntimeError):
                self.states.bring_back(optimizer)

    # ---- hooks of autograd ----

    def _push(self) -> None:
        mine = threading.get_ident()
        if self._pushed_in == mine and self._on_top():
            return
        if _autograd._saved_tensors_hooks_is_enabled() and _autograd._top_saved_tensors_default_hooks(False) is None:
            _autograd._push_saved_tensors_default_hooks(self.saved.pack, self.saved.unpack)
            self._pushed_in = mine
            graph.disable_saved_tensors_hooks = self._without

    def _pop(self) -> None:
        if self._pushed_in == threading.get_ident() and self._on_top():
            _autograd._pop_saved_tensors_default_hooks()
            self._pushed_in = None
            graph.disable_saved_tensors_hooks = self._disable

    def _on_top(self) -> bool:
        top = _autograd._top_saved_tensors_default_hooks(False)
        return bool(top is not None and top[0] == self.saved.pack)

    @contextlib.contextmanager
    def _without(self, message: str) -> Iterator[None]:
        """Our hooks are removed inside, since `torch.func` forbids hooks."""
        popped = self._on_top()
        if popped:
            _autograd._pop_saved_tensors_default_hooks()
        try:
            with self._disable(message):
                yield
        finally:
            if popped:
                _autograd._push_saved_tensors_default_hooks(self.saved.pack, self.saved.unpack)


def _resident(parameter: Any) -> int:
    """Bytes of a parameter and its gradient. The gradient is not looked at: a backward pass may be replacing it."""
    return int(parameter.nbytes) * (2 if parameter.requires_grad else 1)


def of_gpu(used: Used, moved_bytes: int, retries: int) -> MemoryUsed:
    """Figures by the allocator. Memory that it has cached counts as used, since nothing else can use it."""
    held_bytes = max(0, min(on_device(used), used.allocated))
    return MemoryUsed(device_peak(used), held_bytes, moved_bytes + spilled(used), retries)
