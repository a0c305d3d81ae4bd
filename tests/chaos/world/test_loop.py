"""asyncio on the virtual loop: every primitive behaves as on a real one, and always the same."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from chaos.world.host import SimProcess
from chaos.world.world import Broken, World
from covey.ports.env import Env


def played(main: Callable[[Env], Awaitable[Any]], seed: int = 1, until: float = 100.0) -> list[Any]:
    """What `main` returned, in a list; empty when it did not end by `until`."""
    found: list[Any] = []

    async def agent(env: Env) -> int:
        found.append(await main(env))
        return 0

    with World(seed) as world:
        host = world.add_host("h1")
        host.main = agent
        host.start_agent()
        world.run(until)
    return found


def test_sleeping_for_an_hour_takes_virtual_time_only() -> None:
    async def main(env: Env) -> float:
        before = env.clock.now_s()
        await asyncio.sleep(3600)
        return env.clock.now_s() - before

    assert played(main, until=4000) == [pytest.approx(3600, abs=0.01)]


def test_a_timeout_cancels_what_it_surrounds() -> None:
    async def main(env: Env) -> str:
        try:
            async with asyncio.timeout(1.0):
                await asyncio.sleep(50)
        except TimeoutError:
            return "timed out"
        return "slept"

    assert played(main) == ["timed out"]


def test_wait_for_gives_the_result_in_time_and_timeout_error_after() -> None:
    async def slow() -> int:
        await asyncio.sleep(2)
        return 7

    async def main(env: Env) -> tuple[int, bool]:
        result = await asyncio.wait_for(slow(), 3)
        try:
            await asyncio.wait_for(slow(), 1)
        except TimeoutError:
            return result, True
        return result, False

    assert played(main) == [(7, True)]


def test_a_task_group_cancels_siblings_of_a_failed_task_in_the_order_they_were_made() -> None:
    async def main(env: Env) -> list[int]:
        cancelled: list[int] = []

        async def sibling(number: int) -> None:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                cancelled.append(number)
                raise

        async def failing() -> None:
            await asyncio.sleep(1)
            raise ValueError("no")

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(20):
                    group.create_task(sibling(number))
                group.create_task(failing())
        except* ValueError:
            pass
        return cancelled

    once, again = played(main), played(main)
    assert once == again
    assert sorted(once[0]) == list(range(20))


def test_locks_queues_events_semaphores_and_gather_work() -> None:
    async def main(env: Env) -> tuple[list[int], int, list[int]]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)
        lock, ready, slots = asyncio.Lock(), asyncio.Event(), asyncio.Semaphore(2)
        inside = most = 0

        async def worker(number: int) -> int:
            nonlocal inside, most
            await ready.wait()
            async with slots:
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(env.rng.random())
                inside -= 1
            async with lock:
                await queue.put(number)
            return number * number

        async def drain() -> list[int]:
            return [await queue.get() for _ in range(10)]

        drained = asyncio.create_task(drain())
        asyncio.get_running_loop().call_later(1, ready.set)
        squares = await asyncio.gather(*(worker(number) for number in range(10)))
        return sorted(await drained), most, squares

    assert played(main) == [(list(range(10)), 2, [n * n for n in range(10)])]


def test_call_soon_keeps_its_order() -> None:
    async def main(env: Env) -> list[int]:
        seen: list[int] = []
        for number in range(50):
            asyncio.get_running_loop().call_soon(seen.append, number)
        await asyncio.sleep(0.1)
        return seen

    assert played(main) == [list(range(50))]


def test_cancelling_a_task_runs_its_finally_block() -> None:
    async def main(env: Env) -> list[str]:
        told: list[str] = []

        async def held() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                told.append("finally")

        task = asyncio.create_task(held())
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        return told

    assert played(main) == [["finally"]]


def test_a_killed_process_runs_no_finally_block() -> None:
    told: list[str] = []

    async def main(env: Env) -> int:
        try:
            await asyncio.sleep(100)
        finally:
            told.append("finally")
        return 0

    with World(1) as world:
        host = world.add_host("h1")
        host.main = main
        agent = host.start_agent()
        world.at(5, lambda: agent.signal(9))
        world.run(50)
        assert (told, agent.alive, agent.code) == ([], False, -9)


def test_a_stopped_process_stands_still_until_it_is_continued() -> None:
    ticks: list[float] = []

    async def main(env: Env) -> int:
        while True:
            await asyncio.sleep(1)
            ticks.append(round(env_world.now))

    with World(1) as world:
        env_world = world
        host = world.add_host("h1")
        host.main = main
        agent = host.start_agent()
        world.at(3.5, lambda: agent.signal(19))
        world.at(7.5, lambda: agent.signal(18))
        world.run(9.2)
    assert [tick for tick in ticks if 4 <= tick <= 7] == []
    assert ticks[-1] >= 8


def test_a_drifting_clock_stretches_every_timer_of_its_host() -> None:
    woke: list[float] = []

    async def main(env: Env) -> int:
        await asyncio.sleep(100)
        woke.append(world.now)
        return 0

    with World(1) as world:
        host = world.add_host("h1")
        host.main = main
        host.start_agent()
        world.run(10)
        host.clock.drift(0.5)
        world.run(300)
    assert woke == [pytest.approx(10 + 90 / 0.5, rel=0.01)]


def test_a_slow_host_pays_for_every_callback() -> None:
    def callbacks_done(callback_s: float) -> int:
        count = 0

        async def main(env: Env) -> int:
            nonlocal count
            while True:
                await asyncio.sleep(0)
                count += 1

        with World(1) as world:
            host = world.add_host("h1")
            host.main = main
            host.callback_s = callback_s
            host.start_agent()
            world.run(0.01)
        return count

    assert callbacks_done(0.0) > 1000
    assert 5 < callbacks_done(0.001) < 15


def test_an_executor_job_runs_after_a_while_without_a_thread() -> None:
    async def main(env: Env) -> tuple[int, bool]:
        before = env.clock.now_s()
        result = await asyncio.to_thread(pow, 2, 10)
        return result, env.clock.now_s() > before

    assert played(main) == [(1024, True)]


def test_the_done_set_of_wait_is_the_same_in_every_run() -> None:
    async def main(env: Env) -> list[str]:
        async def nothing() -> None:
            await asyncio.sleep(1)

        tasks = [asyncio.create_task(nothing(), name=f"n{number}") for number in range(30)]
        done, _ = await asyncio.wait(tasks)
        return [task.get_name() for task in done]

    assert played(main) == played(main)


def test_an_exception_that_nobody_catches_breaks_the_world() -> None:
    async def main(env: Env) -> int:
        env.spawn("doomed", doomed())
        await asyncio.sleep(10)
        return 0

    async def doomed() -> None:
        await asyncio.sleep(1)
        raise KeyError("lost")

    with World(3) as world:
        host = world.add_host("h1")
        host.main = main
        host.start_agent()
        with pytest.raises(Broken, match=r"(?s)task 'doomed'.*KeyError: 'lost'.*repeat with: .*--seed 3"):
            world.run(20)


def test_what_is_left_when_main_returns_is_cancelled_before_the_process_ends() -> None:
    told: list[str] = []

    async def rest() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            told.append("cleaned up")

    async def main(env: Env) -> int:
        env.spawn("rest", rest())
        await asyncio.sleep(1)
        return 3

    with World(1) as world:
        host = world.add_host("h1")
        host.main = main
        agent: SimProcess = host.start_agent()
        world.run(2)
        assert (told, agent.code) == (["cleaned up"], 3)
