"""A script whose data Blocks may be more than its host's memory: STEPS BLOCKS MIB SPILL [BESIDE_MIB].

Each Block has MIB of memory; SPILL is `disk`, or `none`. In each step the script comes to need BESIDE_MIB more.
"""

import hashlib
import sys

import numpy as np

import covey
from covey.kernel.resident import resident

MIB = 1 << 20


def main(steps: int, blocks: int, mib: int, spill: str, beside_mib: int) -> None:
    v, beside, most = np.zeros(100), [], 0
    with covey.join() as job:
        load = lambda k: np.full(mib * MIB // 8, float(k))  # noqa: E731
        data = job.data(blocks, load, bytes=mib * MIB, spill=None if spill == "none" else spill)
        state = job.state(lambda: {"v": v}, lambda arrays, own: None, enter=lambda rank, own: None)
        for step in state.steps(steps):
            beside.append(np.ones(beside_mib * MIB // 8))
            for rank in job.carried(step):
                with rank:
                    mine = np.zeros_like(v)
                    for k, block in data.of(rank):
                        mine += block[:100] * (k + 1) + block[-100:] * step
                    sums = rank.push("v", mine)
            v = v + sums.wait()
            most = max(most, data.resident_bytes)
        print(f"blocks_mib={most // MIB} peak_mib={resident().peak_bytes // MIB} {data.spilled}", flush=True)
        print(f"sha256={hashlib.sha256(v.tobytes()).hexdigest()} beside={len(beside)}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int((*sys.argv, "0")[5]))
