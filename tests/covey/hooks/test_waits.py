"""The flag of a rank whose device still works on its queue (`covey.hooks.waits`)."""

import threading

from covey.hooks.limits.sharing import ShareControl
from covey.hooks.waits import QueuedWaits
from covey.kernel.pages import PAGE_BYTES, FlagReader
from tests.agent.here import until
from tests.quiet import until_blocked


def sharing() -> tuple[ShareControl, FlagReader]:
    share, pages = ShareControl(), [bytearray(PAGE_BYTES) for _ in range(3)]
    share.pages_came(*pages)
    return share, FlagReader(pages[2])


def rests(waits: QueuedWaits) -> None:
    """Wait until the thread of `waits`, if there is one, has done all its work."""
    if waits._thread is not None:
        until_blocked(waits._thread, threading.Event.wait)


async def test_the_flag_says_idle_once_what_was_queued_is_done() -> None:
    share, flag = sharing()
    done, looks = threading.Event(), 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return done.is_set()

    waits = QueuedWaits(share, lambda: look)
    waits.waits(True)
    await until(lambda: looks >= 3)
    assert flag.busy() is True, "kernels are still running"
    done.set()
    await until(lambda: flag.busy() is False)
    waits.waits(False)
    assert flag.busy() is True
    rests(waits)
    assert flag.busy() is True, "the wait is over, whatever is done"


async def test_input_that_comes_before_the_queue_is_done_leaves_the_flag_up() -> None:
    share, flag = sharing()
    done = threading.Event()
    waits = QueuedWaits(share, lambda: done.is_set)
    waits.waits(True)
    waits.waits(False)
    done.set()
    rests(waits)
    assert flag.busy() is True


async def test_a_wait_of_which_nothing_is_known_leaves_the_flag_up() -> None:
    """Nothing is known while a stream is recorded into a graph, or when another thread fetches ahead."""
    share, flag = sharing()
    unknown = QueuedWaits(share, lambda: None)
    unknown.waits(True)
    prefetched = QueuedWaits(share, lambda: lambda: True)
    ahead = threading.Thread(target=prefetched.waits, args=(True,))
    ahead.start()
    ahead.join()
    for waits in (unknown, prefetched):
        rests(waits)
    assert flag.busy() is True
