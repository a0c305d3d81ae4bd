"""Stacks of a rank for which others wait: those of all threads are written to its output when its host asks. Standard
library only, since every Python of a job runs this (`site/sitecustomize.py`).

A handler in C writes them, so it works also where Python is stuck in a call that never returns.
"""

import contextlib
import faulthandler
import signal

SIGNAL = signal.SIGRTMIN + 6
"""Signal that asks for the stacks; sent only to processes that catch it, since it would end others."""
STDERR = 2


def offer() -> None:
    """Answer the signal from now on, unless something else answers it here, or there is no output to write to."""
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
        if signal.getsignal(SIGNAL) is signal.SIG_DFL:
            faulthandler.register(SIGNAL, STDERR, all_threads=True)
