"""A rank that shares its device, without a framework: mini-batches of work and of waiting, and the limits of its page.

    sharing_rank.py WORK_S WAIT_S [STEPS]

It computes for WORK_S of processor time and sleeps for WAIT_S in each mini-batch, until it has made STEPS (0: for
ever), and goes by pages as a PyTorch script does. In `WORDS/JOB-RANK` stands what its page of limits says, also while
it is stopped (`WORDS` of the environment; unset: nothing); there it goes on after a start before this one.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

from covey.core.units import MIB
from covey.hooks.limits.sharing import MemoryUsed, ShareControl
from covey.hooks.reporter import Reporter, of_process

OPTIMIZER = 1
SAY_S = 0.02


class LittleMemory:
    """`covey.hooks.limits.sharing.MemoryLimit` of a rank that needs hardly any."""

    def ended(self) -> MemoryUsed:
        return MemoryUsed(MIB, MIB)

    counting = False

    def apply(self, limit_bytes: int) -> bool:
        """Apply a limit, which holds at once."""
        return True


def words_path() -> Path:
    return Path(os.environ["WORDS"]) / f"{os.environ['COVEY_JOB_ID']}-{os.environ['COVEY_RANK']}"


def resumed() -> int:
    """The step at which the earlier start ended: its words are its checkpoint."""
    path = words_path()
    return int(json.loads(path.read_bytes())["step"]) if path.exists() else 0


def keep_saying(share: ShareControl, reporter: Reporter, before: int) -> None:
    while True:
        say(words_path(), words(share, before + reporter._steps.count))
        time.sleep(SAY_S)


def words(share: ShareControl, step: int) -> bytes:
    """The words that tell others how the rank is."""
    limits = share._limits
    found = {
        "pid": os.getpid(),
        "step": step,
        "epoch": limits.epoch,
        "guaranteed": limits.guaranteed,
        "pages": share._pages is not None,
        "monotonic_s": time.monotonic(),
    }
    return json.dumps(found).encode()


def say(path: Path, text: bytes) -> None:
    """Write a text, whole or not at all."""
    new = path.with_suffix(".new")
    new.write_bytes(text)
    new.replace(path)


def work(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def main() -> None:
    work_s, wait_s, steps = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
    share, reporter = ShareControl(memory=LittleMemory()), of_process()
    reporter.attach("a stand-in", share=share)
    step = 0
    if os.environ.get("WORDS"):
        step = resumed()
        threading.Thread(target=keep_saying, args=(share, reporter, step), daemon=True).start()
    while not steps or step < steps:
        work(work_s)
        share.idles(True)
        time.sleep(wait_s)
        share.idles(False)
        step += 1
        reporter.optimizer_stepped(OPTIMIZER)


if __name__ == "__main__":
    main()
