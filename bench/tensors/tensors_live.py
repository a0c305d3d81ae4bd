"""`make bench-tensors`: rounds of tensors on one host, through a real aggregator and with gloo, side by side.

    python bench/tensors/tensors_live.py [--ranks 2,4] [--rounds 20] [--json FILE]

One process a rank, one thread each. *Shared*: in memory that the ranks share, as on one host. *Near*: through an
aggregator, a process of its own, over its unix socket, as where ranks of its host cannot share memory, or others are
elsewhere. *TCP*: the same over loopback, as between hosts. In each window the same ranks do a block of rounds through
each, and again in the other order. ms: median round of rank 0, and in times of gloo's. CPU: processor time of a round,
all ranks and the aggregator together, ms. (Needs PyTorch.)

    4 KB .. 100 MB   one tensor, `push_pull(out=)` beside `all_reduce`
    25 MB fresh      as 25 MB, but the result is a new array each round: `push_pull` without `out`
    25 MB in 100     a hundred tensors of 256 KB: all pushed, then all waited for, beside `all_reduce(async_op=True)`
    DDP              a step of a model of 6.3 M parameters, `covey.torch.attach` beside DDP's own reduction
    25 MB Adam       gradients of 25 MB become a step of Adam: made where they are summed, beside `all_reduce` and
                     `torch.optim.Adam(fused=True)` on every rank
    ResNet-50        as DDP, with the parameters of this model (25.6 M in 161 tensors) and next to no work
    GPT-2            as ResNet-50 (124.4 M in 148 tensors); both by `--cases` only
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head, spent_s  # noqa: E402

JOB, EPOCH, SECRET, NEAR = "bench", (1 << 32) + 1, b"sixteen bytes !!", "near.sock"
KB, MB = 1 << 10, 1_000_000
CASES: dict[str, tuple[int, int]] = {
    "4 KB": (1, 4 * KB),
    "1 MB": (1, MB),
    "25 MB": (1, 25 * MB),
    "25 MB fresh": (1, 25 * MB),
    "100 MB": (1, 100 * MB),
    "25 MB in 100": (100, 250_000),
    "DDP": (0, 0),
    "25 MB Adam": (1, 25 * MB),
}
"""Number of tensors of each case, and bytes of each tensor."""
DOORS = ("shared", "near", "tcp", "gloo")
"""Ways to push; the others are compared with the last one."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=20, help="of each block; a block is one door in one window")
    parser.add_argument("--cases", default=",".join(CASES))
    json_option(parser)
    args = parser.parse_args(argv)
    print_head(" | ".join(("ranks", "tensors", *(f"{door}, {what}" for what in ("ms", "CPU ms") for door in DOORS))))
    whole: dict[str, Any] = {}
    for ranks in map(int, args.ranks.split(",")):
        for case in args.cases.split(","):
            found = whole[f"{ranks} ranks, {case}"] = measure(ranks, case, args.rounds)
            print(f"| {ranks} | {case} | {row(found)} |", flush=True)
    keep(whole, args.json)
    return 0


def row(found: dict[str, Any], doors: Sequence[str] = DOORS, digits: int = 2) -> str:
    """Milliseconds and processor time by door, each with its ratio to those of the last one, gloo."""

    def each(what: str) -> str:
        theirs = found[doors[-1]][what]
        ours = [f"{found[door][what]:.{digits}f} ({found[door][what] / theirs:.2f}x)" for door in doors[:-1]]
        return f"{' | '.join(ours)} | {theirs:.{digits}f}"

    return f"{each('ms')} | {each('cpu_ms')}"


def measure(ranks: int, case: str, rounds: int) -> dict[str, Any]:
    """For each door: the median round of rank 0, and processor time of a round."""
    import uvloop

    from covey.tensors.same_host import layout as tensor_layout
    from tests.plugins.aggregator.loopback import AggdThread

    class LikeAgents(AggdThread):
        new_loop = staticmethod(uvloop.new_event_loop)

    with tempfile.TemporaryDirectory(prefix="covey-bench-") as folder:
        aggd = LikeAgents(Path(folder), memory_bytes_max=8 << 30, near=NEAR)
        address = aggd.serve(JOB, EPOCH, ranks).address
        aggd.serve(f"{JOB}-near", EPOCH, ranks)
        memory = tensor_layout.make(ranks)
        words = [str(ranks), case, str(rounds), address, folder, str(memory)]
        command = [sys.executable, str(Path(__file__).resolve()), "--rank"]
        processes = [
            subprocess.Popen([*command, str(rank), *words], stdout=subprocess.PIPE, text=True, pass_fds=(memory,))
            for rank in range(ranks)
        ]
        os.close(memory)
        said = [process.communicate()[0] for process in processes]
        aggd.finish()
        if any(process.returncode for process in processes):
            raise SystemExit(f"{ranks} ranks, {case}: a rank failed")
    each = [json.loads(text) for text in said]
    found: dict[str, Any] = {}
    for door in DOORS:
        cpu_s = sum(one[door]["cpu_s"] for one in each) + each[0][door]["aggregator_s"]
        all_ms = each[0][door]["ms"]
        found[door] = {"ms": statistics.median(all_ms), "cpu_ms": 1000 * cpu_s / len(all_ms), "all_ms": all_ms}
    return found


# ---- in a rank ----


def rank_main(rank: int, ranks: int, case: str, rounds: int, address: str, folder: str, memory: str) -> None:
    import torch
    import torch.distributed as dist

    from covey.core.ids import HostId, JobId
    from covey.job.tensors import TensorClient
    from covey.tensors.same_host.memory import TensorMemory
    from covey.wire.job import AggregatorAt

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    jobs = {"shared": JobId(JOB), "near": JobId(f"{JOB}-near"), "tcp": JobId(JOB)}
    clients = {
        door: TensorClient(jobs[door], rank, ranks, lambda epoch, why, table: None, undecided=door == "shared")
        for door in DOORS[:-1]
    }
    clients["shared"].memory_is(TensorMemory(int(memory), rank, ranks))
    clients["near"].moved(AggregatorAt(jobs["near"], EPOCH, HostId("h1"), address, SECRET, near=f"{folder}/{NEAR}"))
    clients["tcp"].moved(AggregatorAt(jobs["tcp"], EPOCH, HostId("h1"), address, SECRET))
    if case == "25 MB Adam":
        play = adam(torch, clients, CASES[case][1])
    elif case in CASES and CASES[case][0]:
        play = sums(torch, clients, case)
    else:
        play = ddp(torch, clients, ranks, case)
    found: dict[str, dict[str, Any]] = {door: {"ms": [], "cpu_s": 0.0, "aggregator_s": 0.0} for door in DOORS}
    for door in DOORS:
        for _ in range(3):
            play[door]()
    for door in (*DOORS, *reversed(DOORS)):
        dist.barrier()
        cpu_s, aggregator_s = time.process_time(), aggregators_s()
        for _ in range(rounds):
            began_s = time.perf_counter()
            play[door]()
            found[door]["ms"].append(1000 * (time.perf_counter() - began_s))
        found[door]["cpu_s"] += time.process_time() - cpu_s
        dist.barrier()
        found[door]["aggregator_s"] += aggregators_s() - aggregator_s
    for client in clients.values():
        client.leave()
        client.close()
    print(json.dumps(found))


def aggregators_s() -> float:
    """Processor time of the process that started this one, in which the aggregator is, in seconds."""
    return spent_s(os.getppid())


def sums(torch: Any, clients: Mapping[str, Any], case: str) -> dict[str, Callable[[], None]]:
    import torch.distributed as dist

    count, size = CASES[case]
    tensors = [torch.ones(size // 4).mul_(0) for _ in range(count)]  # written once, and its sums stay finite
    arrays = [tensor.numpy() for tensor in tensors]
    outs = [torch.empty(size // 4).numpy() for _ in range(count)]

    def ours(client: Any) -> Callable[[], None]:
        def many() -> None:
            handles = [client.push(f"t{at}", array, out=outs[at]) for at, array in enumerate(arrays)]
            for handle in handles:
                handle.wait()

        def one() -> None:
            client.push_pull("t0", arrays[0], out=None if case.endswith("fresh") else outs[0])

        return one if count == 1 else many

    def gloo() -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    return {**{door: ours(client) for door, client in clients.items()}, "gloo": gloo}


def adam(torch: Any, clients: Mapping[str, Any], size: int) -> dict[str, Callable[[], None]]:
    import torch.distributed as dist

    from covey.tensors.numbers.updates import Adam

    gradient = torch.full((size // 4,), 1e-3)
    array, out = gradient.numpy(), torch.empty(size // 4).numpy()

    def ours(client: Any) -> Callable[[], None]:
        client.model("w", out, update=Adam())

        def step() -> None:
            client.push_pull("w", array, out=out)

        return step

    def gloo() -> Callable[[], None]:
        parameter = torch.nn.Parameter(torch.zeros(size // 4))
        parameter.grad = gradient.clone()
        optimizer = torch.optim.Adam([parameter], fused=True)

        def step() -> None:
            parameter.grad.copy_(gradient)  # the sum is made where the gradient was
            dist.all_reduce(parameter.grad)
            optimizer.step()

        return step

    return {**{door: ours(client) for door, client in clients.items()}, "gloo": gloo()}


def resnet50() -> list[int]:
    """Parameters of each tensor of ResNet-50 (He et al. 2016)."""
    sizes, before = [64 * 3 * 49, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers = [(before, width, 1), (width, width, 9), (width, 4 * width, 1)]
            layers += [(before, 4 * width, 1)] if block == 0 else []
            sizes += [size for a, b, kernel in layers for size in (a * b * kernel, b, b)]
            before = 4 * width
    return [*sizes, 2048 * 1000, 1000]


def gpt2() -> list[int]:
    """Parameters of each tensor of the small GPT-2 (Radford et al. 2019)."""
    wide, layers = 768, []
    for a, b in ((wide, 3 * wide), (wide, wide), (wide, 4 * wide), (4 * wide, wide)):
        layers += [a * b, b]
    return [50257 * wide, 1024 * wide, *(12 * [*layers, *(4 * [wide])]), wide, wide]


MODELS: dict[str, Callable[[], list[int]]] = {"ResNet-50": resnet50, "GPT-2": gpt2}


def ddp(torch: Any, clients: Mapping[str, Any], ranks: int, case: str) -> dict[str, Callable[[], None]]:
    from types import SimpleNamespace

    import covey.torch

    class Sized(torch.nn.Module):  # type: ignore[misc]
        """A module with gradients of these sizes for next to no work."""

        def __init__(self, sizes: Sequence[int]) -> None:
            super().__init__()
            self.each = torch.nn.ParameterList([torch.full((size,), 0.01) for size in sizes])

        def forward(self, batch: Any) -> Any:
            return torch.stack([each.sum() for each in self.each]).mean() * batch.mean()

    def step(of: Any) -> Callable[[], None]:
        optimizer = torch.optim.SGD(of.parameters(), 1e-4)
        batch = torch.randn(8, 1024)

        def play() -> None:
            optimizer.zero_grad()
            of(batch).square().mean().backward()
            optimizer.step()

        return play

    def model() -> Any:
        if case in MODELS:
            return torch.nn.parallel.DistributedDataParallel(Sized(MODELS[case]()))
        layers = [torch.nn.Linear(1024, 1024) for _ in range(6)]
        return torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))

    def ours(client: Any) -> Any:
        made = model()
        covey.torch.attach(made, SimpleNamespace(tensors=client, world_size=ranks))
        return made

    return {**{door: step(ours(client)) for door, client in clients.items()}, "gloo": step(model())}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), *sys.argv[6:9])
    else:
        sys.exit(main())
