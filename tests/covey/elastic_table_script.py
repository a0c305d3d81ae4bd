"""AddVector with an elastic table: each element ends as delta x steps x Blocks, whoever added it.

Arguments: STEPS GO_ON [unlike]. Steps are long until the file GO_ON exists; `unlike`: the process of rank 0 has other
code, as if its script had been changed.
"""

import sys
import time
from pathlib import Path

import numpy as np

import covey

BLOCKS, WIDTH = 12, 500


def main(steps: int, go_on: Path, unlike: bool) -> None:
    with covey.join() as job:
        table = job.table()
        table.put("v", np.zeros(WIDTH))
        f = lambda v, delta: v + 3 * delta  # noqa: E731
        if unlike and job.rank == 0:
            f = lambda v, delta: v + 2 * delta  # noqa: E731
        data = job.data(BLOCKS, lambda k: np.ones(WIDTH), bytes="8 KiB")
        state = job.state(table.arrays, table.load, enter=lambda rank, own: None)
        for step in state.steps(steps):
            before = table.get("v").copy()
            for rank in job.carried(step):
                with rank:
                    assert (table.get("v") == before).all() and (before == 3 * BLOCKS * step).all()
                    delta = sum((block for _, block in data.of(rank)), np.zeros(WIDTH))
                    table.update("v", f, delta)
                time.sleep(0.002 if go_on.exists() else 0.1)
            print("step", step, flush=True)
        found = table.get("v")
        assert (found == 3 * steps * BLOCKS).all(), found
        print(f"sha256={found[0]:.0f} loaded={data.loaded} moved={data.moved}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), "unlike" in sys.argv)
