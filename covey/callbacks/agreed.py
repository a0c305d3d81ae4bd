"""What all ranks of a training agree on, each of which hears at another time that the job is to end."""

import os
import sys
from typing import Any


def any_rank(here: bool, device: Any = None) -> bool:
    """Whether it is so on any rank: the same answer on all of them, which ask together. `device`: where the backend of
    the process group takes tensors; without it the processor for gloo and MPI, else this process's GPU. Without a
    process group, what is so here."""
    torch = sys.modules.get("torch")  # a script without PyTorch has no group of its ranks
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return here
    group = torch.distributed
    if group.get_world_size() == 1:
        return here
    if device is None:
        on_processor = any(name in group.get_backend() for name in ("gloo", "mpi"))
        device = "cpu" if on_processor else torch.cuda.current_device()
    said = torch.tensor(int(here), device=device)
    group.all_reduce(said, group.ReduceOp.MAX)
    return bool(said.item())


def is_first() -> bool:
    """Whether this process is rank 0, which writes what is written once."""
    return os.environ.get("RANK", "0") == "0"


def attempt() -> int:
    """How often the job has been started, this start included; 1 outside a job."""
    return int(os.environ.get("COVEY_ATTEMPT", "1"))
