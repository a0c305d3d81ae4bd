"""`tests.quiet`: what is already on its way is done when it returns."""

import asyncio
import socket
import threading

import pytest

from tests import quiet as module
from tests.quiet import quiet, until_blocked


async def test_what_is_on_its_way_through_tasks_and_sockets_of_this_process_has_arrived() -> None:
    ends = [asyncio.open_connection(sock=end) for end in socket.socketpair()]
    (near_reads, near_writes), (far_reads, far_writes) = await asyncio.gather(*ends)
    answers = []

    async def echo() -> None:
        for _ in range(20):
            far_writes.write(await far_reads.readexactly(1))

    async def ask() -> None:
        for _ in range(20):
            near_writes.write(b"x")
            answers.append(await near_reads.readexactly(1))

    tasks = [asyncio.create_task(echo()), asyncio.create_task(ask())]
    await quiet()
    assert len(answers) == 20 and all(task.done() for task in tasks)
    near_writes.close()
    far_writes.close()


async def test_it_does_not_wait_for_timers() -> None:
    waiting = asyncio.create_task(asyncio.sleep(3600))
    await quiet()
    assert not waiting.done()
    waiting.cancel()


async def test_a_loop_that_is_never_quiet_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURNS_MAX", 100)

    loop = asyncio.get_running_loop()
    going = True

    def again() -> None:
        if going:
            loop.call_soon(again)

    again()
    with pytest.raises(AssertionError, match="100 turns"):
        await quiet()
    going = False


def _takes(lock: threading.Lock) -> None:
    with lock:
        pass


def _counts(ends: threading.Event) -> None:
    while not ends.is_set():
        sum(range(1000))


def test_a_thread_is_blocked_once_it_waits_in_that_function() -> None:
    lock = threading.Lock()
    thread = threading.Thread(target=_takes, args=(lock,), daemon=True)
    with lock:
        thread.start()
        until_blocked(thread, _takes)
        assert thread.is_alive()
    thread.join(10.0)


def test_a_thread_that_computes_or_waits_elsewhere_or_has_ended_is_not_blocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BLOCKED_S", 0.3)
    ends, lock = threading.Event(), threading.Lock()
    busy = threading.Thread(target=_counts, args=(ends,), daemon=True)
    elsewhere = threading.Thread(target=ends.wait, daemon=True)
    over = threading.Thread(target=_takes, args=(lock,))
    for thread in (busy, elsewhere, over):
        thread.start()
    over.join()
    try:
        with pytest.raises(AssertionError, match="does not come to wait in _counts"):
            until_blocked(busy, _counts)
        with pytest.raises(AssertionError, match="does not come to wait in _takes"):
            until_blocked(elsewhere, _takes)
        with pytest.raises(AssertionError, match="has ended"):
            until_blocked(over, _takes)
    finally:
        ends.set()
