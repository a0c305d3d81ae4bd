"""Tests that something does *not* happen: they look once everything that could still do it has been done.

A sleep before `assert not writing.done()` proves nothing on a busy machine: perhaps nothing ran in that time.
"""

import asyncio

CALM_TURNS = 5
"""Turns of the loop in a row in which nothing was ready but the test: what one socket of this process writes, another
reads in the next turn."""
TURNS_MAX = 100_000


async def quiet() -> None:
    """Returns when the event loop has nothing left to do but wait for a timer: no callback is ready, no descriptor of
    its own is readable. Threads and other processes are not seen: wait for a sign of theirs first."""
    loop = asyncio.get_running_loop()
    ready = getattr(loop, "_ready", None)
    if ready is None:
        raise RuntimeError(f"{type(loop).__name__} does not tell what is ready; run this test on asyncio's own loop")
    calm = 0
    for _ in range(TURNS_MAX):
        await asyncio.sleep(0)
        calm = 0 if ready else calm + 1
        if calm == CALM_TURNS:
            return
    raise AssertionError(f"something is ready in each of {TURNS_MAX} turns of the loop")
