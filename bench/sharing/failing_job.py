"""A script of `live_jobs.py` that fills its own page of reports with garbage for three seconds when it hears SIGUSR1.

python bench/sharing/failing_job.py KIND OUT
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.sharing import live_jobs
from covey.hooks.limits.sharing import of_process

GARBAGE_S = 3.0


def garbage(*_: object) -> None:
    """Write garbage all the time: the script's next mini-batches write good reports over it."""
    threading.Thread(target=_keep_writing, daemon=True).start()


def _keep_writing() -> None:
    pages, end_s = of_process()._pages, time.monotonic() + GARBAGE_S
    assert pages is not None
    while time.monotonic() < end_s:
        pages.report_page[:] = os.urandom(len(pages.report_page))
        time.sleep(0.001)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, garbage)
    live_jobs.main()
