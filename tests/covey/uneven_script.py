"""A training with uneven inputs, in a process of its own: PyTorch may never come back from the end of a gloo group.

`~Reducer` waits for gloo's threads with Python's lock held, and one of them may wait for that lock. Usage:
`uneven_script.py BY_ALL HEALS`, each 0 or 1; prints `averaged`, or why it was refused.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from covey.core.errors import CoveyError
from covey.frameworks.torch.uneven import refuse_uneven


def main(by_all: bool, heals: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    refuse_uneven(ddp, heals)
    ddp(torch.ones(1, 2))
    try:
        with ddp.join(divide_by_initial_world_size=by_all):
            ddp(torch.ones(1, 2)).sum().backward()
    except CoveyError as error:
        print(error, flush=True)
    else:
        print("averaged", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*(word == "1" for word in sys.argv[1:]))
