"""A rank that cannot run twice unseen: it holds a lock of its rank and of each of its GPUs while it runs a script.

    rank.py LOCKS SCRIPT [ARGUMENT ...]

All hosts of a laboratory share one kernel, so a lock of a file in the folder LOCKS is a lock over all of them. Whoever
finds one taken writes both claims to LOCKS/violations, and exits with 99.
"""

import fcntl
import os
import runpy
import sys
import time
from pathlib import Path

TWICE = 99


def claim(folder: Path, name: str) -> int:
    """The descriptor that holds the lock until this process ends."""
    me = " ".join(os.environ[key] for key in ("COVEY_JOB_ID", "COVEY_EPOCH", "COVEY_RANK", "COVEY_HOST"))
    file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 200, 0).decode(errors="replace")
        with (folder / "violations").open("a") as out:
            out.write(f"{time.time():.3f} {name} is held by [{holder}] while [{me}] starts\n")
        sys.exit(TWICE)
    os.ftruncate(file, 0)
    os.pwrite(file, me.encode(), 0)
    return file


def main() -> None:
    folder = Path(sys.argv[1])
    job, rank = os.environ["COVEY_JOB_ID"], os.environ["COVEY_RANK"]
    held = [claim(folder, f"rank-{job}-{rank}")]
    held += [claim(folder, f"gpu-{gpu}") for gpu in os.environ["COVEY_GPUS"].split(",") if gpu]
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
