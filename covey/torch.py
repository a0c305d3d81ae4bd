"""PyTorch's DistributedDataParallel with its gradients averaged by Covey: one line in a training script.

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    covey.torch.attach(ddp)

and none where the job was submitted with `agentctl submit --aggregate`.

DDP hands its buckets over one by one while the backward pass still computes. Each is a round of `covey.tensors`, in the
bucket's own memory, which DDP waits for only at the end of the pass:

    script's thread   hook(bucket 0) -- push -->     hook(bucket 1) -- push -->  ...   DDP waits for the futures
    covey-ddp                           wait, divide, set the future of bucket 0, then of bucket 1, ...

A bucket is known by the parameters in it, not by its number: after its first backward pass DDP makes its buckets anew.
The average is the sum in the order of `covey.sum_order`, then divided by the number of ranks; of float16 and bfloat16
it is made in float32, and rounded once. With two ranks that is
what gloo gives, to the bit; DDP's own reduction divides first, which differs in the last bits where the number of ranks
is no power of two.
"""

import atexit
import hashlib
import queue
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import GradBucket

from covey.client import JOIN_S, of_process
from covey.tensors import TensorClient, TensorHandle
from covey.tensorwire import Type

if TYPE_CHECKING:
    from covey.client import JobClient

TYPES: dict[torch.dtype, Type] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""Of gradients that Covey averages."""
END_S = 1.0
"""How long the end of the script waits for the thread that ends rounds."""
_models = 0


def attach(ddp: Any, job: "JobClient | None" = None) -> None:
    """From its next backward pass on the gradients of `ddp`, a DistributedDataParallel, are averaged by Covey. `job`:
    this rank's (that of `covey.join()`, or made if there is none). Every rank attaches the same models in the same
    order.

    TypeError, naming the parameter, where gradients are not of a type in TYPES in the host's memory; RuntimeError where
    the model has a communication hook, or other ranks than the job (torchrun's). Errors of `push_pull` are raised by
    the backward pass."""
    global _models
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad:
            _check(name, parameter)
    found = job if job is not None else of_process()
    if job is None:
        found.wait_joined(JOIN_S)
    if (ranks := ddp.process_group.size()) != found.world_size:
        what = (
            f"DDP has {ranks} ranks, and this job {found.world_size}: Covey averages over ranks that the agent started"
        )
        raise RuntimeError(f"{what}; submit it with --workers {ranks}, without torchrun")
    buckets = Buckets(found.tensors, names, f"ddp{_models}")
    ddp.register_comm_hook(buckets, average)
    _models += 1


def average(state: "Buckets", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP: the average of this bucket over all ranks, in its own memory."""
    return state.average(bucket)


class Buckets:
    """Those of one model, and the thread that ends their rounds."""

    def __init__(self, tensors: TensorClient, names: dict[int, str], prefix: str) -> None:
        """`names`: of parameters, by their id."""
        self._tensors, self._parameters, self._prefix = tensors, names, prefix
        self._names: dict[tuple[int, ...], str] = {}
        self._begun: queue.SimpleQueue[tuple[TensorHandle, Any, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._end_rounds, name="covey-ddp", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def average(self, bucket: Any) -> Any:
        """Begin its round; the future of its gradients."""
        future, gradients = torch.futures.Future(), bucket.buffer()
        name = self._name(bucket.parameters())
        _check(name, gradients)
        array = _bits(gradients).numpy()
        handle = self._tensors.push(name, array, out=array, mean=True, type=TYPES[gradients.dtype])
        self._begun.put((handle, gradients, future))
        return future

    def _name(self, parameters: list[Any]) -> str:
        """Of a bucket with these: the same on every rank, and after a restart."""
        key = tuple(map(id, parameters))
        if key not in self._names:
            names = [self._parameters[each] for each in key]
            digest = hashlib.blake2b("\n".join(names).encode(), digest_size=6).hexdigest()
            self._names[key] = f"{self._prefix}/{digest} {names[0][:60]} .. {names[-1][:60]}"
        return self._names[key]

    def _end_rounds(self) -> None:
        """DDP waits for the futures, and this thread waits for the results."""
        self._tensors.in_background()
        while (begun := self._begun.get()) is not None:
            handle, gradients, future = begun
            try:
                handle.wait()
            except Exception as error:  # DDP waits for this future: whatever happens here must reach it
                future.set_exception(error)
            else:
                future.set_result(gradients)

    def _stop(self) -> None:
        """A thread that sets a future while Python ends would crash it."""
        self._begun.put(None)
        self._thread.join(END_S)


def _check(name: str, tensor: Any) -> None:
    if tensor.dtype not in TYPES or tensor.device.type != "cpu":
        came = f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
        raise TypeError(f"gradients of {name!r} are {came}; Covey averages {', '.join(TYPES.values())} on cpu")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As numpy can hold it, which has no bfloat16."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
