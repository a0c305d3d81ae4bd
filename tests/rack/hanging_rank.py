"""A rank that hangs where it is told: `hanging_rank.py WHERE RANK`.

WHERE: `imports`, before it says anything to its agent; `sum`, before its part of one; `step`, at the end of one; `all`,
every rank, where none waits for tensors.
"""

import os
import sys
import time

WHERE, WHO = sys.argv[1], int(sys.argv[2])
RANK, LOST = int(os.environ["RANK"]), int(os.environ.get("COVEY_INCARNATION", "0"))


def hang_in(where: str) -> None:
    if where == WHERE and not LOST and (RANK == WHO or where == "all"):
        time.sleep(600)


hang_in("imports")

import numpy as np  # noqa: E402

import covey  # noqa: E402

with covey.join() as job:
    for step in range(60):
        if step == 10:
            hang_in("sum")
            hang_in("all")
        if WHERE not in ("all", "step"):
            job.tensors.push_pull("g", np.ones(3, np.float32))
        if step == 11:
            hang_in("step")
        job.step()
        if step == 12 and WHERE == "step":
            time.sleep(600)
        time.sleep(0.02)
