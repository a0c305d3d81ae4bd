"""One rank of a DDP training whose gradients Covey averages, on the CPU, the laboratory device, or CUDA.

    ddp_script.py RANK RANKS DEVICE GROUP KINDS [MEMORY TABLES [NAME=VALUE ...]]

GROUP is `covey`, or another backend with the path of its store, `gloo=PATH`, with which DDP averages by itself; with
`covey+gloo=PATH` Covey does. On CUDA ranks share the GPUs that are there.

MEMORY is the path of the memory that ranks of this host share. On the laboratory device `labccl` moves tensors between
ranks, each of which has a device of its own; NAME=VALUE is put into the environment.

Lines on stdin are `EPOCH ADDRESS TABLE` of an aggregator. For each kind it prints a checksum of what was learnt.
"""

import hashlib
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 4
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class Layers(torch.nn.Module):  # type: ignore[misc]
    """Some layers; `split`: the second half of them is on another device."""

    def __init__(self, kind: str, devices: list[torch.device]) -> None:
        super().__init__()
        self.kind, self.devices = kind, devices
        self.first = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)]).to(devices[0])
        self.second = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)]).to(devices[-1])
        self.sometimes = torch.nn.Linear(64, 64).to(devices[-1])
        self.to(dtype=TYPES.get(kind, torch.float32))

    def forward(self, x: Any) -> Any:
        x = self.first(x.to(self.devices[0], TYPES.get(self.kind, torch.float32))).tanh()
        x = self.second(x.to(self.devices[-1]))
        return x if self.kind == "unused" else self.sometimes(x)


def learnt(kind: str, rank: int, device: str, attach: Any) -> str:
    torch.manual_seed(1)
    here = torch.device(device)
    on = here.type if here.index is None and here.type != "cpu" else device
    devices = [torch.device(f"{on}:0"), torch.device(f"{on}:1")] if kind == "split" and on != "cpu" else [here]
    model = Layers(kind, devices)
    views = kind == "views"
    ddp = DistributedDataParallel(
        model,
        bucket_cap_mb=25 if kind == "compiled" else 0.03,
        find_unused_parameters=kind == "unused",
        gradient_as_bucket_view=views,
    )
    attach(ddp)
    compiled = kind == "compiled" and rank == 0  # what compiles takes seconds to import, and one rank shows it
    run = torch.compile(ddp, backend="eager") if compiled else ddp
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not views)
        for part in range(2 if kind == "accumulated" else 1):
            batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * rank + 10 * step + part))
            with ddp.no_sync() if kind == "accumulated" and part == 0 else torch.enable_grad():
                run(batch.to(devices[0])).float().square().mean().backward()
        if kind in ("bfloat16", "float16"):  # the last bits of PyTorch's own step depend on strides, which differ here
            for each in model.parameters():
                rounded = each.detach().cpu().float() - 0.05 * each.grad.cpu().float().contiguous()
                each.data.copy_(rounded.to(each.dtype))
        else:
            optimizer.step()
    whole = torch.cat([each.detach().cpu().reshape(-1) for each in model.parameters()])
    assert whole.isfinite().all() and whole.count_nonzero()
    return hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest()


def main(rank: int, ranks: int, device: str, group: str, kinds: str, memory: str = "", tables: str = "1") -> None:
    import covey.torch
    from covey.core.ids import HostId, JobId
    from covey.job.tensors import TensorClient
    from covey.tensors.same_host.memory import TensorMemory
    from covey.wire.job import AggregatorAt

    torch.set_num_threads(1)
    if device.startswith("lab"):
        from tests.covey.device import lab, labccl

        lab.load()
        lab.latency(0.0001)
        labccl.register()
        os.environ.setdefault(lab.UUID, f"of rank {rank}")
    undecided = bool(memory)
    client = TensorClient(JobId("j1"), rank, ranks, lambda *_: None, tables=int(tables), undecided=undecided)
    if memory:
        client.memory_is(TensorMemory(os.open(memory, os.O_RDWR), rank, ranks))

    def moved() -> None:
        for line in sys.stdin:
            epoch, address, table = line.split()
            client.moved(AggregatorAt(JobId("j1"), int(epoch), HostId("h1"), address, b"sixteen bytes !!", int(table)))

    threading.Thread(target=moved, daemon=True).start()
    job: Any = SimpleNamespace(tensors=client, rank=rank, world_size=ranks)
    by_covey = group.startswith("covey")
    backend, _, store = group.removeprefix("covey+").partition("=")
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    if backend == "covey":
        covey.torch.init_process_group(job)
    else:
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)

    def attach(ddp: Any) -> None:
        if by_covey:
            covey.torch.attach(ddp, job)
            print("gradients are", covey.torch.way(ddp) or "in host memory", flush=True)

    for kind in kinds.split(","):
        print("sha256", kind, learnt(kind, rank, device, attach), flush=True)
    if device.startswith("lab"):
        moves = sum(each.startswith("all_to_all") for each in labccl.moved)
        print("moves", moves, "pushed", client.calls.rounds, flush=True)
        print("devices waited for", lab.synchronized_devices(), "pinned", lab.pinned_made(), flush=True)
    if backend != "covey":
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ |= dict(each.split("=", 1) for each in sys.argv[8:])
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:8])
