"""AntMan's figure 11 on this machine's GPU: how long a rank takes to shrink and to grow, with and without host memory.

    python bench/sharing/device_memory.py [--gib 17.6] [--to 1.3] [--rounds 5]

A rank has `--gib` of memory cached on the device and gives all except `--to` back between two mini-batches (shrink);
then its limit is lifted and the next mini-batch takes it again (grow). With spill: a mini-batch wants all of it under
the small limit, the rest lies in page-locked host memory, and the limit is lifted at its end; printed is how much
longer that mini-batch took than one without a limit, and the time to prepare the host memory before it. Medians and
ranges of rounds. Without a CUDA device it says "not measured".
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

PAPER = {"shrink": "17", "grow": "-", "prepare": "-", "spill": "115 to 143"}
WORDS = {
    "shrink": "shrink, nothing in host memory",
    "grow": "grow: the first mini-batch without the limit, longer than the next",
    "prepare": "shrink below what is wanted: host memory prepared",
    "spill": "one mini-batch with the rest in host memory, longer than without",
}
PIECE = 64 << 20


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=17.6, help="what a mini-batch takes of the device")
    parser.add_argument("--to", type=float, default=1.3, help="what it may have under the limit")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    try:
        import torch
    except ImportError:
        return told(None, "PyTorch is not installed")
    if not torch.cuda.is_available():
        return told(None, "PyTorch finds no CUDA device")
    return told(measured(torch, int(given.gib * 2**30), int(given.to * 2**30), given.rounds), device_of(torch))


def device_of(torch: Any) -> str:
    return f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"


def measured(torch: Any, whole: int, limit: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round, by what was measured."""
    from covey.hooks.frameworks.torch_cuda import TorchGpu
    from covey.hooks.frameworks.torch_memory import TorchMemory
    from covey.hooks.gate.build import TorchBuild, build, cache_folder

    torch.zeros(1, device="cuda")
    gpu = TorchGpu(build(TorchBuild.of(torch), cache_folder()), lambda error: print(error, file=sys.stderr))
    memory = TorchMemory(gpu.memory)
    small, large = limit // PIECE, whole // PIECE
    found: dict[str, list[float]] = {name: [] for name in PAPER}
    for _ in range(rounds):
        batch(torch, memory, large)
        batch(torch, memory, large)
        for _ in range(64):  # what was wanted is forgotten: from now on a mini-batch needs little
            batch(torch, memory, small // 2)
        found["shrink"].append(timed(lambda: memory.apply(limit)))
        memory.apply(0)
        first = batch(torch, memory, large)
        usual = statistics.median(batch(torch, memory, large) for _ in range(3))
        found["grow"].append(first - usual)
        found["prepare"].append(timed(lambda: memory.apply(limit)))
        found["spill"].append(batch(torch, memory, large) - usual)
        memory.apply(0)
    return found


def batch(torch: Any, memory: Any, pieces: int) -> float:
    """Milliseconds of a mini-batch that writes and reads `pieces` pieces."""

    def work() -> None:
        held = [torch.full((PIECE,), 1, dtype=torch.uint8, device="cuda") for _ in range(pieces)]
        for one in held:
            one.add_(1)
        torch.cuda.synchronize()

    took = timed(work)
    memory.ended()
    return took


def timed(call: Any) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1000


def told(found: dict[str, list[float]] | None, where: str) -> int:
    print(f"{where}\n\n| | AntMan, ms | here, ms |\n|---|---:|---:|")
    for name, paper in PAPER.items():
        print(f"| {WORDS[name]} | {paper} | {figure(found[name]) if found else 'not measured'} |")
    return 0


def figure(numbers: Sequence[float]) -> str:
    return f"{statistics.median(numbers):.1f} ({min(numbers):.1f} .. {max(numbers):.1f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
