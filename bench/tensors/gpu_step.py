"""A DDP step on GPUs of one host: gradients by NCCL, by gloo, and by Covey in its two ways.

    python bench/tensors/gpu_step.py [--mb 100] [--steps 20] [--json FILE]

One rank a GPU; where there is one GPU, two ranks share it, without NCCL, which refuses that. *Copied*: each rank's
gradients go to host memory, and ranks add in memory that they share (COVEY_GPU_SUMS=0). *Added on GPUs*:
`covey.frameworks.torch.gpu_sums`; left out where ranks share a GPU. Ways take turns, twice. ms: median step of rank 0,
synchronised at its end; in times of NCCL's, or of gloo's. *Bits*: whether all of Covey's ways end with the same ones.
Without a GPU it says `not measured`. `--device lab` rehearses it on the laboratory device of the tests.
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.live_command import json_option, keep, options, print_head  # noqa: E402
from covey.tensors.same_host import layout  # noqa: E402

COPIED, ADDED = "copied", "added on GPUs"
WITHIN_S = 100.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--mb", type=int, default=100, help="of gradients, float32")
    parser.add_argument("--steps", type=int, default=20, help="of each way in each turn")
    parser.add_argument("--device", default="cuda")
    json_option(parser)
    args = parser.parse_args(argv)
    import torch

    count = torch.cuda.device_count() if args.device == "cuda" else 2
    if count == 0:
        print("not measured: PyTorch finds no CUDA device here")
        return 0
    ranks, ways = max(2, count), ways_of(args.device, count)
    with tempfile.TemporaryDirectory() as folder:
        memories = [layout.make(ranks) for way in ways if way in (COPIED, ADDED)]
        words = [args.device, str(args.mb), str(args.steps), folder, ",".join(ways), ",".join(map(str, memories))]
        each = [
            subprocess.Popen([sys.executable, __file__, "--rank", str(rank), str(ranks), *words], pass_fds=memories)
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(WITHIN_S) for process in each]
        finally:
            for process in each:
                process.kill()
        if any(codes):
            return 1
        found = json.loads(Path(folder, "found").read_text(encoding="utf-8"))
    first = statistics.median(found[ways[0]]["ms"])
    print_head(" | ".join(("ranks", "MB", *ways, "bits")))
    medians = [statistics.median(found[way]["ms"]) for way in ways]
    bits = {found[way]["bits"] for way in ways if way in (COPIED, ADDED)}
    cells = [f"{ms:.2f} ({ms / first:.2f}x)" for ms in medians]
    print(f"| {ranks} | {args.mb} | {' | '.join(cells)} | {'the same' if len(bits) == 1 else 'others'} |")
    keep(found, args.json)
    return 0 if len(bits) == 1 else 1


def ways_of(device: str, count: int) -> list[str]:
    if device != "cuda":
        return [COPIED, ADDED]
    return ["nccl", "gloo", COPIED, ADDED] if count > 1 else ["gloo", COPIED]


def rank_main(rank: int, ranks: int, device: str, mb: int, steps: int, folder: str, ways: str, memories: str) -> None:
    import torch
    import torch.distributed as dist

    import covey.torch
    from covey.core.ids import JobId
    from covey.job.tensors import TensorClient
    from covey.tensors.same_host.memory import TensorMemory

    torch.set_num_threads(1)
    moves = "nccl"
    if device == "lab":
        from tests.covey.device import lab, labccl

        os.environ[lab.UUID] = f"of rank {rank}"
        lab.load()
        labccl.register()
        here, moves = torch.device("lab", rank % 2), "labccl"
    else:
        here = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(here)
    names = ways.split(",")
    default = moves if device == "lab" or "nccl" in names else "gloo"
    dist.init_process_group(default, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    groups = {"gloo": dist.new_group(backend="gloo")} if "gloo" in names else {}
    clients, shared = [], iter(map(int, filter(None, memories.split(","))))
    play: dict[str, Callable[[], None]] = {}
    models: dict[str, Any] = {}
    for way in names:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(1024, 1024) for _ in range(max(1, mb // 4))]
        model = models[way] = torch.nn.Sequential(*layers).to(here)
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=groups.get(way))
        if way in (COPIED, ADDED):
            client = TensorClient(JobId("j1"), rank, ranks, lambda *_: None, undecided=True)
            client.memory_is(TensorMemory(next(shared), rank, ranks))
            clients.append(client)
            os.environ["COVEY_GPU_SUMS"] = "0" if way == COPIED else "1"
            job: Any = SimpleNamespace(tensors=client, rank=rank, world_size=ranks)
            covey.torch.attach(ddp, job)
        play[way] = _step(torch, ddp, model, here, rank)
    found: dict[str, Any] = {way: {"ms": []} for way in names}
    for way in names:
        for _ in range(4):
            play[way]()
    for way in (*names, *reversed(names)):
        clients[0].barrier()
        for _ in range(steps):
            began_s = time.perf_counter()
            play[way]()
            torch.accelerator.synchronize(here)
            found[way]["ms"].append(1000 * (time.perf_counter() - began_s))
    for way, model in models.items():
        learnt = torch.cat([each.detach().cpu().reshape(-1) for each in model.parameters()])
        found[way]["bits"] = hashlib.sha256(learnt.numpy().tobytes()).hexdigest()
    for client in clients:
        client.leave()
        client.close()
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def _step(torch: Any, ddp: Any, model: Any, here: Any, rank: int) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    batch = torch.randn(8, 1024, generator=torch.Generator().manual_seed(rank)).to(here)

    def play() -> None:
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()

    return play


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        words = sys.argv[2:]
        rank_main(int(words[0]), int(words[1]), words[2], int(words[3]), int(words[4]), *words[5:8])
    else:
        sys.exit(main())
