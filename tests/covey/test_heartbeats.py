"""Reports on a script's progress that its process sends when its agent asks for them."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from covey.job.heartbeats import CallTimes, Heartbeats
from covey.job.tensors import TensorError
from covey.wire.job import HEARTBEAT_S, Heartbeat, heartbeat_s
from plugins.facts import HeartbeatHeard
from tests.agent.here import until
from tests.covey.agents import J1, Agent


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def clock() -> Iterator[Clock]:
    yield Clock()


def test_a_step_or_a_word_of_the_script_is_a_sign_of_life(clock: Clock) -> None:
    script = Heartbeats(clock)
    clock.s += 7.0
    assert script.now() == Heartbeat(None, 7.0, 0.0)
    script.sign(3)
    clock.s += 2.0
    assert script.now() == Heartbeat(3, 2.0, 0.0, True)
    script.sign()
    assert script.now() == Heartbeat(3, 0.0, 0.0, True)


def test_what_covey_attach_saw_counts_but_not_before_what_the_script_says(clock: Clock) -> None:
    script = Heartbeats(clock)
    clock.s += 50.0
    script.seen = lambda: (41, 140.0)
    assert script.now() == Heartbeat(41, 10.0, 0.0, True)
    script.sign(3)
    clock.s += 1.0
    assert script.now() == Heartbeat(3, 1.0, 0.0, True)


def test_calls_of_tensors_say_for_how_long_others_are_waited_for() -> None:
    calls, waits = CallTimes(), list[float]()
    with calls.timed():
        waits.append(calls.waits_s(calls.last_s + 5.0))
        other = threading.Thread(target=lambda: calls.timed().__enter__())
        other.start()
        other.join()
        waits.append(calls.waits_s(calls.last_s + 5.0))
    assert waits[0] == pytest.approx(5.0) and waits[1] >= waits[0], "the one that has waited longest"
    calls = CallTimes()
    with calls.timed(waits=False):
        assert calls.waits_s(1e9) == 0.0, "who lingers at its end waits for nobody"
    with calls.timed():
        pass
    assert calls.waits_s(1e9) == 0.0


def test_waiting_of_several_threads_at_once_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("covey.job.heartbeats.time.monotonic", lambda: clock.s)
    calls = CallTimes()
    with calls.timed():
        clock.s += 1.0
        others = [calls.timed() for _ in range(4)]
        for other in others:
            other.__enter__()
        clock.s += 2.0
        assert calls.communicate_s == 3.0, "what is under way counts as far as it went"
        for other in others[1:]:
            other.__exit__(None, None, None)
    clock.s += 4.0
    others[0].__exit__(None, None, None)
    clock.s += 8.0
    assert calls.communicate_s == 7.0


def test_threads_in_the_background_wait_and_are_not_counted() -> None:
    calls = CallTimes()

    def work() -> None:
        calls.in_background()
        with calls.timed():
            assert calls.waits_s(calls.last_s + 1.0) == pytest.approx(1.0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert calls.communicate_s == 0.0


def test_nothing_is_said_of_waiting_where_those_that_add_are_out_of_reach(clock: Clock) -> None:
    script, calls = Heartbeats(clock), CallTimes()
    reached = True
    tensors: Any = SimpleNamespace(calls=calls, reaches=lambda: reached)
    script.uses(tensors)
    with calls.timed():
        calls.last_s, calls._began = 110.0, {1: 110.0}
        clock.s += 20.0
        assert script.now() == Heartbeat(None, 10.0, 10.0)
        clock.s += 5.0
        assert script.now() == Heartbeat(None, 15.0, 15.0)
        calls.rounds = 1
        assert script.now() == Heartbeat(None, 15.0, 15.0, True), "it has had the sum of a tensor"
        reached = False
        assert script.now() == Heartbeat(None, 0.0, 0.0, True)
        reached = True
        clock.s += 2.0
        assert script.now() == Heartbeat(None, 2.0, 2.0, True), "what was before is nobody's fault"


def test_who_takes_over_from_a_lost_rank_has_a_limit_of_its_own(clock: Clock) -> None:
    script = Heartbeats(clock)
    with script.at_work():
        clock.s += 100.0
        assert script.now() == Heartbeat(None, 0.0, 0.0)
    clock.s += 1.0
    assert script.now() == Heartbeat(None, 1.0, 0.0)


def test_one_is_due_as_often_as_the_agent_wants(clock: Clock) -> None:
    script = Heartbeats(clock)
    assert script.due() == [] and script.left_s(None) is None and script.left_s(3.0) == 3.0
    script.every_s = 2.0
    assert len(script.due()) == 1 and script.due() == []
    assert script.left_s(None) == 2.0 and script.left_s(0.5) == 0.5
    clock.s += 2.0
    assert script.left_s(None) == 0.0 and len(script.due()) == 1
    assert (
        heartbeat_s(None) == HEARTBEAT_S[1]
        and heartbeat_s(1.0) == HEARTBEAT_S[0]
        and heartbeat_s(1e6) == HEARTBEAT_S[1]
    )
    assert heartbeat_s(16.0) == 2.0


async def until_said(agent: Agent, of: Any) -> HeartbeatHeard:
    def found() -> list[HeartbeatHeard]:
        return [fact for fact in agent.facts if isinstance(fact, HeartbeatHeard) and of(fact)]

    await until(found)
    return found()[0]


async def test_ranks_of_a_job_that_may_hang_say_how_they_get_on(agent: Agent) -> None:
    agent.runner.known = msgspec.structs.replace(agent.runner.known, hang_s=2.0)
    job = await agent.client()
    first = await until_said(agent, lambda fact: True)
    assert (first.job, first.epoch, first.rank, first.step) == (J1, 1, 1, None)
    job.step(step=41)
    job.alive()
    await until_said(agent, lambda fact: fact.step == 41)

    def push() -> None:
        with contextlib.suppress(TensorError):
            job.tensors.push_pull("w", np.ones(3))

    pushing = asyncio.create_task(asyncio.to_thread(push))
    said = await until_said(agent, lambda fact: fact.waits_s > 0.3)
    assert said.quiet_s > 0, "it waits for the other rank, which has not joined"
    await asyncio.to_thread(job.close)
    await pushing


async def test_and_others_say_it_rarely(agent: Agent) -> None:
    job = await agent.client()
    job.step(step=1)
    await until(agent.steps)
    assert job.heartbeats.every_s == HEARTBEAT_S[1]
    assert len([fact for fact in agent.facts if isinstance(fact, HeartbeatHeard)]) <= 1
    await asyncio.to_thread(job.close)
