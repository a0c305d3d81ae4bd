"""Which host may be forgotten, and in which order a rack forgets it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from agent.api.forgetting import HEARD_S, forget, refusal
from covey.core.errors import Refused
from covey.core.ids import HostId
from plugins.views import VotersView
from tests.agent.api.test_rack_view import Clock

A, B = HostId("a"), HostId("b")


class View(NamedTuple):
    host: HostId
    state: str
    boot: int = 7


class TakenBackJob(NamedTuple):
    id: str


class FakeAgent:
    """An agent, and what was asked of it in its order. `refuses`: the voters cannot be changed."""

    id = A
    up_s = HEARD_S

    def __init__(self, state: str | None, votes: bool = False, known: bool = False, refuses: bool = False) -> None:
        self.views = [View(A, "alive"), *([View(B, state)] if state else [])]
        self.voting = VotersView(voters=(A, B) if votes else (A,), learner=HostId(""), leaving=HostId(""), under_way="")
        self.known, self.refuses = known, refuses
        self.asked: list[str] = []

        class Env:
            clock = Clock()

        self.env: Any = Env()

    def hosts(self) -> Sequence[Any]:
        return self.views

    def voters_now(self) -> VotersView:
        return self.voting

    async def change_voters(self, add: str, remove: str, force: bool) -> str:
        if self.refuses:
            raise Refused(4, f"{remove} cannot be removed now", "a majority must answer", "bring c back first")
        self.asked.append(f"voters -{remove}")
        return "under way"

    def plugin_commands(self) -> Mapping[str, Any]:
        async def knows(given: Mapping[str, Any]) -> bool:
            return self.known

        async def forgets(given: Mapping[str, Any]) -> list[TakenBackJob]:
            self.asked.append(f"log -{given['id']} up to boot {given['boot']}")
            return [TakenBackJob("j3")]

        return {"scheduler.knows": knows, "scheduler.forget": forgets}


async def test_it_votes_no_more_before_the_log_forgets_it() -> None:
    agent = FakeAgent("gone", votes=True)
    found = await forget(agent, {"id": "b"})
    assert agent.asked == ["voters -b", "log -b up to boot 7"]
    assert found.jobs == ("j3",) and found.voted
    unknown = FakeAgent(None, known=True)
    assert not (await forget(unknown, {"id": "b"})).voted
    assert unknown.asked == ["log -b up to boot 100"], "gossip knows no boot of it: whatever began before now is meant"


async def test_a_refusal_leaves_everything_as_it_is() -> None:
    for agent in (FakeAgent("alive"), FakeAgent(None), FakeAgent("gone", votes=True, refuses=True)):
        with pytest.raises(Refused) as refused:
            await forget(agent, {"id": "b"})
        assert refused.value.why and refused.value.next and agent.asked == []


@pytest.mark.parametrize(
    ("state", "in_log", "why"),
    [
        ("alive", True, "it is alive"),
        ("suspect", False, "it is suspect"),
        ("away", False, "it is away"),
        (None, False, "no host of that name is known"),
        (None, True, ""),
        ("gone", False, ""),
        ("left", False, ""),
    ],
)
def test_only_a_host_that_is_gone_is_forgotten(state: str | None, in_log: bool, why: str) -> None:
    refused = refusal(B, A, state, in_log, HEARD_S)
    assert why in refused.why if refused is not None else not why
    assert refusal(A, A, "alive", True, HEARD_S) is not None, "a host does not forget itself"


async def test_an_agent_that_has_just_begun_forgets_nobody_of_whom_it_has_not_heard() -> None:
    """It knows the host from the log, and gossip has not come round yet: the host may live."""
    agent = FakeAgent(None, votes=True, known=True)
    agent.up_s = HEARD_S - 1
    with pytest.raises(Refused, match="may not have heard of it") as refused:
        await forget(agent, {"id": "b"})
    assert refused.value.code == 75 and "in a minute" in refused.value.next and agent.asked == []
    assert refusal(B, A, "gone", True, 0.0) is None, "what gossip has seen go is gone"
    never = refusal(B, A, None, False, 0.0)
    assert never is not None and never.code == 3
