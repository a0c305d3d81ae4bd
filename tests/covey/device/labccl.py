"""What moves tensors between laboratory devices of several processes, as NCCL does between GPUs: a backend of
torch.distributed, `labccl`, by way of gloo. It adds integers alone, and refuses ranks that begin other moves than their
neighbours."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

WITHIN = timedelta(seconds=60)
moved: list[str] = []
"""The moves of this process, in order."""


class LabGroup(dist.ProcessGroup):  # type: ignore[misc]
    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("labccl", store), rank, size, WITHIN)

    def getBackendName(self) -> str:
        return "labccl"

    def alltoall_base(self, output: Any, given: Any, output_sizes: Any, sizes: Any, opts: Any) -> Any:
        self._agree(f"all_to_all {given.numel()}")
        there = torch.empty(output.shape, dtype=output.dtype)
        self._gloo.alltoall_base(there, given.cpu(), output_sizes, sizes, opts).wait()
        output.copy_(there)
        return Moved([output])

    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> Any:
        self._agree(f"all_gather {sum(each.numel() for each in outputs[0])}")
        for root, output in enumerate(outputs[0]):
            there = inputs[0].cpu() if root == self.rank() else torch.empty(output.shape, dtype=output.dtype)
            how = dist.BroadcastOptions()
            how.rootRank, how.rootTensor = root, 0
            self._gloo.broadcast([there], how).wait()
            output.copy_(there)
        return Moved(outputs[0])

    def broadcast(self, tensors: list[Any], opts: Any) -> Any:
        """What DDP's constructor begins with."""
        for each in tensors:
            there = each.cpu().contiguous()
            self._gloo.broadcast([there], opts).wait()
            each.copy_(there)
        return Moved(tensors)

    def allreduce(self, tensors: list[Any], opts: Any = None) -> Any:
        """What DDP does to find parameters that no rank used."""
        for each in tensors:
            assert not each.is_floating_point(), "gradients are added in no order that is known"
            there = each.cpu()
            self._gloo.allreduce([there], opts or dist.AllreduceOptions()).wait()
            each.copy_(there)
        return Moved(tensors)

    def _agree(self, what: str) -> None:
        """All ranks begin the same move: NCCL would mix up their numbers, or wait for ever."""
        moved.append(what)
        mine = torch.zeros(64, dtype=torch.uint8)
        mine[: len(what)] = torch.frombuffer(bytearray(what.encode()), dtype=torch.uint8)
        each = [torch.empty_like(mine) for _ in range(self.size())]
        self._gloo.allgather([each], [mine]).wait()
        if any(not torch.equal(mine, other) for other in each):
            said = [bytes(other.tolist()).rstrip(b"\0").decode() for other in each]
            raise RuntimeError(f"ranks began other moves: {said}")


class Moved(dist._Work):  # type: ignore[misc]
    """A move that has ended."""

    def __init__(self, result: list[Any]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def result(self) -> list[Any]:
        return self._result


def register() -> None:
    dist.Backend.register_backend(
        "labccl", lambda store, rank, size, timeout: LabGroup(store, rank, size), devices=["lab"]
    )
