"""What the scripts beside share: points on two spirals, which take a while to read, checkpoints, the digest."""

import hashlib
import math
import os
import time
from typing import Any

READ_S = float(os.environ.get("READ_S", "0.003"))
"""Seconds that reading one point takes."""
POINTS, BATCH = 512, 8


def spiral(index: int) -> tuple[list[float], float]:
    """A point, two coordinates from -1 to 1, and on which spiral it is, 0 or 1."""
    side = index % 2
    turn = 3 * math.pi * math.sqrt((index * 0.618) % 1)
    return [turn * math.cos(turn + math.pi * side) / 10, turn * math.sin(turn + math.pi * side) / 10], float(side)


class Points:
    """A dataset as PyTorch's loaders take it: a point is a pair of tensors."""

    def __len__(self) -> int:
        return POINTS

    def __getitem__(self, index: int) -> Any:
        import torch

        time.sleep(READ_S)
        point, side = spiral(index)
        return torch.tensor(point), torch.tensor(side)


def network() -> Any:
    """A small network of PyTorch, the same on every rank."""
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1), torch.nn.Flatten(0))


def say_digest(*arrays: Any) -> None:
    """Print a checksum of arrays of numpy, or of what numpy can read."""
    import numpy

    found = hashlib.sha256(b"".join(numpy.asarray(array).tobytes() for array in arrays))
    print(f"digest {found.hexdigest()[:16]}", flush=True)


SAVED = "checkpoint.pt"


def restored(**parts: Any) -> int:
    """Load what `keep` saved into these objects of PyTorch, if it is there. Returns the next step."""
    import torch

    if not os.path.exists(SAVED):
        return 0
    saved = torch.load(SAVED)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    print(f"continues with step {saved['step']}", flush=True)
    return int(saved["step"])


def keep(step: int, every: int = 10, **parts: Any) -> None:
    """Save these objects after each tenth step, or `every` so many, by rank 0 alone; `step` is the next one."""
    import torch

    if step % every == 0 and int(os.environ.get("RANK", "0")) == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step}, SAVED + ".new")
        os.replace(SAVED + ".new", SAVED)
