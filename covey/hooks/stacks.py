"""The stacks of a rank for which others wait: each thread's, written to its output when its host asks. Standard library
only, since every Python of a job runs this (`site/sitecustomize.py`).

They are written by a handler in C, so also where Python is stuck in a call that never returns.
"""

import contextlib
import faulthandler
import signal

SIGNAL = signal.SIGRTMIN + 6
"""Sent only to processes that catch it: the others would end."""
STDERR = 2


def offer() -> None:
    """From now on, unless something else answers this signal here, or there is no output to write to."""
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
        if signal.getsignal(SIGNAL) is signal.SIG_DFL:
            faulthandler.register(SIGNAL, STDERR, all_threads=True)
