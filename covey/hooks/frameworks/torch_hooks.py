"""PyTorch's hooks for `covey.hooks`. Called after torch was imported.

    torch.optim     register_optimizer_step_post_hook: after every step of every optimizer, also under torch.compile
    GradScaler      `step` is wrapped: an update that was skipped for its gradients is a mini-batch too
    DataLoader      `__next__` of its iterators is wrapped: how long the script waited for input
    DDP             its constructor is wrapped: its own figures say how long ranks waited for one another, and with
                    `submit --aggregate` (COVEY_AGGREGATE) its gradients are averaged by Covey
    collectives     `Work.wait` is wrapped: how long the script waited for other ranks (FSDP, its own collectives); on a
                    host that jobs share in turns, others compute meanwhile
    process groups  in an elastic job (COVEY_ELASTIC) a group of all ranks is refused: it would wait for ever

No hook is called per operator, and none changes what is computed. `covey.hooks.frameworks.torch_share` handles a shared
device.
"""

import functools
import inspect
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from covey.core.errors import CoveyError
from covey.hooks import rank_of
from covey.hooks.frameworks.torch_cuda import StreamWaits, TorchGpu
from covey.hooks.frameworks.torch_memory import TorchMemory
from covey.hooks.frameworks.torch_share import end_of_stream, native_library, share_control, turn_gate
from covey.hooks.limits.sharing import ShareControl
from covey.hooks.reporter import Reporter, of_process, resident_bytes
from covey.hooks.turns import hooked
from covey.hooks.turns.hooked import HookedTurns
from covey.hooks.waits import QueuedWaits

UNUSED_AFTER = 10
"""Optimizer steps after which a model whose forward pass was not seen is taken to have a compiled one."""
_installed: Reporter | None = None


def install() -> Reporter:
    """Install the hooks, once per process. Returns the reporter of this process."""
    global _installed
    if _installed is None:
        exposed = DdpFigures()
        reporter = _installed = of_process()
        gpu = TorchGpu(native_library(), reporter.failed)
        memory = TorchMemory(gpu.memory)
        share = share_control(memory, gpu)
        turns = hooked.of_process()
        turns.gains(turn_gate())
        gpu.graphs.before = lambda: before_graph(reporter, memory, share)
        gpu.graphs.install()
        Hooks(reporter, exposed, share, memory, gpu, turns).install()
        to = f"torch {torch.__version__}, gate per {share.gate}"
        reporter.attach(to, device_bytes, exposed.communicate_s, share, turns)
    return _installed


def before_graph(reporter: Reporter, memory: TorchMemory, share: ShareControl) -> None:
    """The script is about to record its first CUDA graph."""
    try:
        memory.before_graph()
        share.memory_is_free()
    except Exception as error:
        reporter.failed(error)


class Hooks:
    """Replaces functions of PyTorch by ones that report; an error in reporting is reported once, never raised."""

    def __init__(
        self,
        reporter: Reporter,
        figures: "DdpFigures",
        share: ShareControl,
        memory: TorchMemory,
        gpu: TorchGpu,
        turns: HookedTurns,
    ) -> None:
        self._reporter, self._figures, self._share, self._memory = reporter, figures, share, memory
        self._turns = turns
        self._queued = StreamWaits(share, gpu, QueuedWaits(share, end_of_stream))
        self._fired = 0
        self._known: set[int] = set()
        """Identities of optimizers that exist."""
        self._begun: dict[int, bool] = {}
        """By optimizer that was seen to begin a step: whether it began one since its last counted step."""
        self._first: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """Models whose gradients Covey is to average from their first forward pass on -> the handle of its hook."""

    def install(self) -> None:
        from torch.amp.grad_scaler import GradScaler
        from torch.nn.parallel.distributed import DistributedDataParallel
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        register_optimizer_step_pre_hook(self._began)
        register_optimizer_step_post_hook(self._stepped)
        GradScaler.step = self._scaled(GradScaler.step)
        _BaseDataLoaderIter.__next__ = self._fetched(_BaseDataLoaderIter.__next__)
        DistributedDataParallel.__init__ = self._made(DistributedDataParallel.__init__)
        if torch.distributed.is_available():
            torch.distributed.Work.wait = self._awaited(torch.distributed.Work.wait)
        if os.environ.get("COVEY_ELASTIC") == "1" and torch.distributed.is_available():
            torch.distributed.init_process_group = for_elastic(torch.distributed.init_process_group)

    def _guarded(self, report: Callable[..., None], *what: Any) -> None:
        try:
            report(*what)
        except Exception as error:
            self._reporter.failed(error)

    def _began(self, optimizer: Any, *_: Any) -> None:
        self._begun[id(optimizer)] = True

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        """Count a step. Called twice for one step where a script replaced `step` by a function that calls the old
        one."""
        try:
            identity = id(optimizer)
            if not self._begun.get(identity, True):
                return
            if identity in self._begun:
                self._begun[identity] = False
            self._fired += 1
            self._figures.step_ends()
            if self._fired == UNUSED_AFTER and self._first:
                self._average_none()
            if identity not in self._known:
                self._comes(optimizer)
            self._reporter.optimizer_stepped(identity)
            if self._turns.on:
                self._turns.batch_ended()
        except Exception as error:
            self._reporter.failed(error)

    def _comes(self, optimizer: Any) -> None:
        self._known.add(id(optimizer))
        self._memory.uses(optimizer)
        weakref.finalize(optimizer, self._gone, id(optimizer)).atexit = False

    def _gone(self, identity: int) -> None:
        """The optimizer was collected: another may get its identity from now on."""
        self._known.discard(identity)
        self._begun.pop(identity, None)
        self._reporter.optimizer_gone(identity)

    def _scaled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def scaled(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._fired
            result = step(scaler, optimizer, *args, **kwargs)
            if self._fired == before:
                self._began(optimizer)
                self._stepped(optimizer)
            return result

        return scaled

    def _fetched(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        reporter = self._reporter

        @functools.wraps(fetch)
        def fetched(loader: Any) -> Any:
            began_s = reporter.now_s()
            if self._turns.on:
                self._guarded(self._turns.waits if loader._num_workers > 0 else self._turns.batch_ended)
            waits = self._waits(loader)
            self._guarded(waits, True)
            try:
                batch = fetch(loader)
            finally:
                self._guarded(waits, False)
            self._guarded(reporter.batch_fetched, reporter.now_s() - began_s, torch.is_grad_enabled())
            return batch

        return fetched

    def _waits(self, loader: Any) -> Callable[[bool], None]:
        """The function to call when the script waits for this loader. A loader without workers loads in the script's
        thread, which may be work where the device is a set of cores."""
        if torch.cuda.is_initialized():
            return self._queued.waits
        return self._share.waits if loader._num_workers > 0 else self._share.fetches

    def _awaited(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """`Work.wait`, by which all collectives wait that Python calls."""

        @functools.wraps(wait)
        def awaited(*args: Any, **kwargs: Any) -> Any:
            if self._turns.on:
                self._guarded(self._turns.waits)
            began_s = time.perf_counter()
            done = wait(*args, **kwargs)
            self._figures.waited_s += time.perf_counter() - began_s
            return done

        return awaited

    def _made(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def made(model: Any, *args: Any, **kwargs: Any) -> None:
            init(model, *args, **kwargs)
            self._figures.models.add(model)
            if os.environ.get("COVEY_AGGREGATE") == "1":
                self._guarded(self._aggregate, model)

        return made

    def _aggregate(self, model: Any) -> None:
        """Average the gradients of this model from its first pass on: until then a script may choose a communication
        hook of its own, which then stays."""

        def begins(module: Any, *_: Any) -> None:
            if not torch.compiler.is_compiling():
                self._begins(module)

        self._first[model] = model.register_forward_pre_hook(begins)
        if not hasattr(torch.compile, "__wrapped__"):
            torch.compile = self._compiled(torch.compile)

    def _begins(self, model: Any) -> None:
        handle = self._first.pop(model, None)
        if handle is not None:
            handle.remove()
            self._guarded(self._average, model)

    def _compiled(self, compile: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.compile`, before which all models are attached: none can be while dynamo traces."""

        @functools.wraps(compile)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            for model in list(self._first):
                self._begins(model)
            return compile(*args, **kwargs)

        return compiled

    def _average_none(self) -> None:
        """Steps were made without a forward pass that is seen of some model."""
        self._first.clear()
        self._averaged_by_ddp("its forward pass is compiled in a function that was given to torch.compile before it")

    def _average(self, model: Any) -> None:
        import covey.torch
        from covey.job import this_job

        try:
            if not covey.torch.attached(model):
                covey.torch.attach(model, this_job.of_process())
        except (TypeError, RuntimeError) as error:
            self._averaged_by_ddp(str(error).splitlines()[0])
        else:
            way = covey.torch.way(model)
            self._reporter.attach(f"gradients averaged by Covey{f', {way}' if way else ''}")

    def _averaged_by_ddp(self, why: str) -> None:
        """Say in the output, and to the agent, that `--aggregate` does not apply, and why."""
        if not rank_of(os.environ):
            print(f"covey: --aggregate: gradients are averaged by DDP itself: {why}", file=sys.stderr, flush=True)
        self._reporter.attach(f"gradients averaged by DDP itself ({why})")


def for_elastic(init: Callable[..., None]) -> Callable[..., None]:
    """`init_process_group` for a process of an elastic job: CoveyError for a group of all ranks of the job, or of as
    many as the environment says. There are more ranks than processes, so it would wait until its timeout."""

    @functools.wraps(init)
    def refused(*args: Any, **kwargs: Any) -> None:
        size = inspect.signature(init).bind(*args, **kwargs).arguments.get("world_size", -1)
        ranks = int(os.environ.get("WORLD_SIZE", "0"))
        if size in (-1, ranks) and ranks > 1:
            raise CoveyError(
                f"no process group of {ranks} ranks can be made in this job",
                "it is elastic (submit --workers A..B): fewer processes carry these ranks, and their number changes",
                "leave process groups and DistributedDataParallel out: covey.torch.attach(model, optimizer, "
                f"elastic=True); or submit with --workers {ranks}",
            )
        init(*args, **kwargs)

    return refused


class DdpFigures:
    """How long ranks waited for one another: the times that DistributedDataParallel measures in its first iterations
    and every hundredth (nanoseconds from the first bucket sent to the last one summed, and how much of that the
    backward pass hid), and the waits for other collectives, which are seen one by one."""

    def __init__(self) -> None:
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        self.waited_s = 0.0
        """Seconds in `Work.wait` since the newest step ended."""
        self._in_step_s: float | None = None
        """Seconds in `Work.wait` in the newest step; None: there were none so far."""

    def step_ends(self) -> None:
        if self.waited_s or self._in_step_s is not None:
            self._in_step_s, self.waited_s = self.waited_s, 0.0

    def communicate_s(self) -> float | None:
        """Seconds in the newest step of communication that was not hidden; None where none is known."""
        found = [model._get_ddp_logging_data() for model in self.models]
        times = [
            figures["backward_comm_time"] - figures.get("backward_compute_comm_overlap_time", 0)
            for figures in found
            if "backward_comm_time" in figures
        ]
        own_s = self._in_step_s
        return max(0.0, sum(times) / 1e9) + (own_s or 0.0) if times or own_s is not None else None


def device_bytes() -> int:
    """Highest use of device memory by this process, in bytes; without a device, its resident memory."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_reserved())
    return resident_bytes()
