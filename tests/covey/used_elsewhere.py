"""What a script does with each of Covey's objects, in any process; each function returns the bytes that it got, or the
error. Interpreters that a test starts import this module, so it imports little."""

import os
import pickle  # noqa: TID251 - as multiprocessing and PyTorch do
import random
import sys
from collections.abc import Callable
from typing import Any

PAGES, PAGE, RUN = 64, 4096, 8


def page(number: int) -> bytes:
    return (b"page %d " % number).ljust(PAGE, b".")


def of_memory(memory: Any) -> bytes:
    """Read every page, in runs of one size, in an order that differs by process: a process that gets the answer to
    another process's request sees wrong pages."""
    runs = {at: b"".join(map(page, range(at, at + RUN))) for at in range(0, PAGES, RUN)}
    for at in random.Random(os.getpid()).sample(sorted(runs), len(runs)):
        if memory.read(at * PAGE, RUN * PAGE) != runs[at]:
            return b"wrong from page %d" % at
    return b"all pages"


def of_array(array: Any) -> bytes:
    rows = array[0:4]
    return bytes(rows.reshape(-1)[:PAGE])


def of_job(job: Any) -> bytes:
    job.step(loss=0.5)
    return str(job.id).encode()


def of_tensors(tensors: Any) -> bytes:
    import numpy

    return bytes(tensors.push_pull("g", numpy.arange(4, dtype=numpy.float32)).tobytes())


def of_state(state: Any) -> bytes:
    state.done()
    return b"a step"


def of_value(value: Any) -> bytes:
    return repr(value).encode()


def of_error(error: Any) -> bytes:
    return "|".join((type(error).__name__, str(error), error.next)).encode()


def tried(use: Callable[[Any], bytes], given: Any) -> bytes:
    """The result, or the error as a person would read it."""
    try:
        return use(given)
    except Exception as error:
        return f"{type(error).__name__}: {error}".encode()


if __name__ == "__main__":
    chosen = globals()[sys.argv[1]]
    sys.stdout.buffer.write(tried(chosen, pickle.load(sys.stdin.buffer)))  # noqa: S301
