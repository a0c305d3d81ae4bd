"""Gradients on an accelerator: every bucket goes to host memory and back on a stream of its own.

    script's stream   .. backward ..  E     .. backward ..                          waits for F
    Covey's stream                    waits for E, copies down, D                   copies up, F
    covey-ddp-down                                     waits for D, pushes
    covey-ddp                                                        waits for the sum

E, D and F are events: nobody waits for a whole device, and the script's thread waits for nothing before the end of the
pass. Host memory is page-locked and belongs to the parameters of the bucket, so it is used again in each pass. The copy
down of a pass follows the copy up of the pass before on one stream, so it cannot overtake it.

Everything here is written against `torch.accelerator`, `torch.Stream` and `torch.Event`: CUDA is one such device.
"""

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from covey.core.errors import CoveyError
from covey.core.units import format_seconds, format_size
from covey.frameworks.torch.types import TYPES, in_host_memory
from covey.kernel.this_process import OfOneProcess

STREAM_S = 600.0
"""Seconds after which a stream that has not finished counts as one that never does; NCCL's watchdog has as many."""
SAY_S = 30.0
"""Seconds after which people are told what is waited for."""
POLL_S = (50e-6, 1e-3)
"""Shortest and longest pause between two looks at an event, s; the pause doubles in between."""
END_S = 1.0
"""Seconds that the end of the script waits for the thread that pushes buckets."""
NOT_AVERAGED = "gradients were not averaged"
Say = Callable[[str], None]


def accelerator_type() -> str | None:
    """Type of the devices that this PyTorch computes on besides the CPU; None when there are none."""
    accelerator = getattr(torch, "accelerator", None)
    found = accelerator.current_accelerator() if accelerator is not None else None
    return None if found is None else str(found.type)


def devices_of(module: Any) -> list[Any]:
    """The accelerators that this model's parameters and buffers are on, in their order."""
    found = [each.device for each in (*module.parameters(), *module.buffers())]
    return list(dict.fromkeys(device for device in found if device.type != "cpu"))


def why_not(device: Any) -> str:
    """The reason why tensors on this device cannot be copied to host memory; empty when they can."""
    if device.type == "cpu":
        return ""
    if (found := accelerator_type()) != device.type:
        return f"this PyTorch's accelerator is {found or 'not known'}"
    return "" if hasattr(torch.Stream, "__enter__") else f"PyTorch {torch.__version__} has no streams of {device.type}"


def check_gradients(name: str, tensor: Any) -> None:
    """TypeError where gradients like this tensor cannot be averaged."""
    why = f"; {found}" if (found := why_not(tensor.device)) else ""
    if why or tensor.dtype not in TYPES or tensor.layout != torch.strided:
        kind = "" if tensor.layout == torch.strided else f"{tensor.layout} ".removeprefix("torch.")
        came = f"{kind}{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
        wanted = f"dense {', '.join(TYPES.values())} in host memory or on an accelerator"
        raise TypeError(f"gradients of {name!r} are {came}{why}; Covey averages {wanted}")


def check_model(module: Any) -> None:
    """TypeError, naming the parameter, where gradients of this model cannot be averaged."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            check_gradients(name, parameter)
    for name, each in module.named_modules():
        if getattr(each, "sparse", False) is True and each.weight.requires_grad:
            named = f"{name}.weight" if name else "weight"
            raise TypeError(f"gradients of {named!r} are sparse; Covey averages dense ones: make it with sparse=False")


def wait_until(event: Any, what: str, say: Say) -> None:
    """Wait for the event in this thread alone. CoveyError that names `what` when it has not come after STREAM_S."""
    began_s, pause_s, is_told = time.monotonic(), POLL_S[0], False
    while not event.query():
        waited_s = time.monotonic() - began_s
        if waited_s > STREAM_S:
            why = f"{what} is not complete on its device after {format_seconds(waited_s)}"
            raise CoveyError(
                NOT_AVERAGED, why, "look for a kernel that hangs, in this rank's stack and the driver's log"
            )
        if waited_s > SAY_S and not is_told:
            say(f"waits for its device: {what} is not complete after {format_seconds(waited_s)}")
            is_told = True
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S[1])


@contextmanager
def side_stream(device: Any, stream: Any) -> Iterator[Any]:
    """Work inside is done on this stream, after all that the device's current stream was given until now."""
    ready = torch.Event(device=device)
    ready.record(torch.accelerator.current_stream(device))
    stream.wait_event(ready)
    with stream:
        yield stream


def is_captured(device: Any) -> bool:
    """Whether the current stream records a graph of its work instead of doing it."""
    asks = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return bool(asks is not None and asks())


class _Lane(NamedTuple):
    """One device: the stream for copies, and a piece of host memory for each bucket, by its parameters' ids."""

    stream: Any
    memory: dict[tuple[int, ...], Any]


class BucketUp:
    """The future of a bucket whose average comes to host memory: it gets the bucket, with the average copied up."""

    def __init__(self, bucket: Any, stream: Any, future: Any) -> None:
        self._bucket, self._stream, self._future = bucket, stream, future
        self._ending = threading.Lock()

    def done(self) -> bool:
        return bool(self._future.done())

    def set_result(self, host: Any) -> None:
        with self._ending:
            if self.done():
                return
            try:
                with self._stream, torch.no_grad():
                    self._future.set_result(self.put(host))  # records an event of this stream, for whoever waits
            except Exception as error:  # DDP waits for this future: whatever happens here must reach it
                self._future.set_exception(error)

    def put(self, host: Any) -> Any:
        """Put the average into the bucket, which is returned; on the current stream."""
        return self._bucket.copy_(host, non_blocking=True)

    def set_exception(self, error: Exception) -> None:
        with self._ending:
            if not self.done():
                self._future.set_exception(error)


class Up(Protocol):
    """The future of a bucket: `set_result` gets host memory with its average."""

    def done(self) -> bool: ...
    def set_result(self, host: Any) -> None: ...
    def set_exception(self, error: Exception) -> None: ...


class _Down(NamedTuple):
    """A bucket on its way to host memory."""

    what: str
    came: Callable[[Any, Any], None]
    host: Any
    copied: Any
    """Event after the copy."""
    up: Up


class DeviceBuckets(OfOneProcess):
    """The buckets of one model on its way between a device and host memory. `take` is called by the thread that
    computes, all else by a thread of this class, which a forked child lacks: there `take` raises OtherProcess."""

    _kind = "the gradient buckets of a model"
    _instead = "train in the process that called covey.torch.attach()"

    def __init__(self, say: Say) -> None:
        """`say` gets lines for people."""
        self._say = say
        self._lanes: dict[Any, _Lane] = {}
        self._going: queue.SimpleQueue[_Down | None] = queue.SimpleQueue()
        self._open: list[Up] = []
        """Buckets of this pass; they get the error when one of them is lost."""
        self._error: Exception | None = None
        """The first error: no bucket comes to host memory any more."""
        self._thread: threading.Thread | None = None

    def take(
        self, what: str, parameters: Sequence[Any], bucket: Any, came: Callable[[Any, Any], None]
    ) -> Any:  # torch.futures.Future
        """The future of this bucket. `came(host, future)` is called once its gradients are in host memory, and gives
        that memory, with the average in it, to its future. `what` names the bucket. CoveyError where its copy cannot
        begin."""
        device = bucket.device
        self.check(device)
        lane = self._lanes[device]
        host = self._memory(what, lane, tuple(map(id, parameters)), bucket)
        with side_stream(device, lane.stream) as stream, torch.no_grad():
            host.copy_(bucket.reshape(-1), non_blocking=True)
            copied = torch.Event(device=device)
            copied.record(stream)
        future = torch.futures.Future(devices=[device])
        self.later(what, came, host, copied, BucketUp(bucket, lane.stream, future))
        return future

    def check(self, device: Any) -> Any:
        """The stream on which buckets of this device are copied. CoveyError where no copy can begin."""
        self._check_process(NOT_AVERAGED)
        if is_captured(device):
            why = "a device graph is being recorded, and a graph that is played again pushes nothing"
            raise CoveyError(NOT_AVERAGED, why, "record the forward pass alone, or train without a graph")
        return self.stream_of(device)

    def side(self, device: Any) -> Any:
        """`side_stream` for the stream on which buckets of this device are copied."""
        return side_stream(device, self.stream_of(device))

    def later(self, what: str, came: Callable[[Any, Any], None], host: Any, copied: Any, up: Up) -> None:
        """Call `came(host, up)` in another thread once event `copied` has come."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._all, name="covey-ddp-down", daemon=True)
            self._thread.start()
            atexit.register(self._stop)
        self._going.put(_Down(what, came, host, copied, up))

    def stream_of(self, device: Any) -> Any:
        """The stream on which buckets of this device are copied."""
        return (self._lanes.get(device) or self._lane(device)).stream

    def _lane(self, device: Any) -> _Lane:
        lane = self._lanes[device] = _Lane(torch.Stream(device=device), {})
        return lane

    def _memory(self, what: str, lane: _Lane, key: tuple[int, ...], bucket: Any) -> Any:
        """Page-locked memory for this bucket, that of the pass before where there is one."""
        if key not in lane.memory:
            for old in [each for each in lane.memory if not set(each).isdisjoint(key)]:
                del lane.memory[old]  # DDP has divided these parameters into other buckets
            lane.memory[key] = page_locked(what, bucket.numel(), bucket.dtype)
        return lane.memory[key]

    def _all(self) -> None:
        while (down := self._going.get()) is not None:
            self._one(down)

    def _stop(self) -> None:
        """Stop the thread: setting a future while Python ends would crash it."""
        self._going.put(None)
        if self._thread is not None:
            self._thread.join(END_S)

    def _one(self, down: _Down) -> None:
        self._open = [up for up in self._open if not up.done()]
        self._open.append(down.up)
        try:
            if self._error is not None:
                raise self._error
            wait_until(down.copied, down.what, self._say)
            down.came(down.host, down.up)
        except Exception as error:  # DDP waits for these futures: whatever happens here must reach them
            self._error = error
            for up in self._open:
                up.set_exception(error)


def page_locked(what: str, count: int, dtype: Any) -> Any:
    """A host tensor that the device can copy to and from by itself. CoveyError when the host does not give that."""
    try:
        return torch.empty(count, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        size = format_size(count * torch.empty(0, dtype=dtype).element_size())
        why = f"{what} needs {size} of page-locked host memory, and PyTorch says: {str(error).splitlines()[0]}"
        raise CoveyError(
            NOT_AVERAGED, why, "free host memory, or raise the limit of locked memory (ulimit -l)"
        ) from error


class DeviceReads:
    """Reading tensors of devices from any thread, as they are once all work is done that the devices had been given
    when this was made. The reading thread waits; devices do not."""

    def __init__(self, devices: Sequence[Any], say: Say = lambda text: None) -> None:
        """Called by the thread that computes."""
        self._say = say
        self._ready: dict[Any, Any] = {}
        for device in devices:
            if device.type != "cpu":
                event = self._ready[device] = torch.Event(device=device)
                event.record(torch.accelerator.current_stream(device))

    def check(self, what: str, tensor: Any) -> None:
        """CoveyError where the tensor cannot be read."""
        if not in_host_memory(tensor) and tensor.device not in self._ready:
            there = ", ".join(map(str, self._ready)) or "host memory alone"
            why = f"{what} is on {tensor.device}, and the model uses {there}"
            raise CoveyError(
                "the state of this training cannot be sent to another process", why, "move it to one of these"
            )

    def read(self, what: str, tensor: Any) -> Any:
        """The tensor in host memory: itself where it is there. CoveyError where `check` or `wait_until` raises it."""
        if in_host_memory(tensor):
            return tensor.detach()
        self.check(what, tensor)
        device = tensor.device
        wait_until(self._ready[device], what, self._say)
        if device not in _reading:
            _reading[device] = torch.Stream(device=device)
        stream = _reading[device]
        with stream, torch.no_grad():
            return tensor.detach().to("cpu")


_reading: dict[Any, Any] = {}
"""Streams of `DeviceReads`, by device."""
