"""A core that behaves like a GPU in one respect: an operation that runs is not taken off for another process's.

Linux lets the thread that slept run first, so on a core a long operation of one script hurts another one little.
Scripts of one real-time priority (SCHED_FIFO) are not taken off for each other, and `done` gives a waiting one its
turn, as a GPU serves kernels of several processes one by one. Threads that only look (the gate, Python's) have higher
priority.
"""

import contextlib
import os
import threading
import time
import warnings
from typing import Any

OPERATIONS, LOOKERS = 1, 2
"""Real-time priorities of the thread that computes, and of all others of its process."""
LOOK_S = 0.1
done = os.sched_yield
"""Call that ends an operation: another thread that waits for the core has its turn."""


def begin() -> None:
    """Let this thread compute in whole operations from now on. Raises OSError (PermissionError) when it may not
    (CAP_SYS_NICE)."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(OPERATIONS))
    threading.Thread(target=_lift, args=(threading.get_native_id(),), daemon=True).start()


def _lift(computes: int) -> None:
    """Give threads that begin later the priority `LOOKERS`. (As ordinary ones they would have next to nothing of the
    core beside another process that computes, and hold Python's lock meanwhile.)"""
    known = {computes}
    while True:
        there = {int(task) for task in os.listdir("/proc/self/task")}
        for task in there - known:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(task, os.SCHED_FIFO, os.sched_param(LOOKERS))
        known = there | {computes}
        time.sleep(LOOK_S)


def after_each_layer(model: Any) -> None:
    """Mark the end of an operation after each layer of a PyTorch model, forwards and backwards."""
    warnings.filterwarnings("ignore", "Full backward hook")  # the first layer's input has no gradient
    for layer in model.modules():
        if next(layer.children(), None) is None:
            layer.register_forward_hook(lambda *_: done())
            layer.register_full_backward_hook(lambda *_: done())
