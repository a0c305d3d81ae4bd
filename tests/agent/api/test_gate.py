"""The gate before all commands: who asks is found by uid, judged by the table, and never by what a request says."""

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.api.access import RULES
from agent.api.gate import Gate
from chaos.askers import ANN, BOB, EVE, ROOT, USERS, VISITOR, asked_by
from covey.core.errors import NoLeader, Refused
from covey.core.ids import HostId
from covey.ports.env import Env
from covey.ports.users import FixedUsers, User
from plugins.askers import ASKER, Asker, OwnerUser
from plugins.views import EventLine
from tests.families import examples


class GuardedFake:
    """An agent on which job j1 and volume v1 are ann's, and j2 is the agent's own."""

    id = HostId("h1")

    def __init__(self, users: FixedUsers = USERS) -> None:
        self.env = cast(Env, SimpleNamespace(users=users))
        self.tenants = {"ann": ["ml"], "bob": ["ml", "vision"]}
        self.sought: list[tuple[str, str]] = []
        self.notes: list[tuple[str, str, str]] = []
        self.performed: list[tuple[str, Mapping[str, Any]]] = []
        self.answer: Any = {}
        self.gate = Gate(self, RULES, ("carol", "@wheel"))

    def tenants_of(self, user: str) -> Sequence[str]:
        return self.tenants.get(user, [])

    async def owner_of(self, plugin: str, name: str) -> OwnerUser:
        self.sought.append((plugin, name))
        known = {
            ("scheduler", "j1"): OwnerUser("ann", ANN.uid),
            ("scheduler", "j2"): OwnerUser(),
            ("memory", "v1"): OwnerUser(uid=ANN.uid),
        }
        if name == "j9":
            raise NoLeader
        if (plugin, name) not in known:
            raise Refused(3, f"there is no {name}", "no such thing", "agentctl jobs")
        return known[plugin, name]

    def note(self, subject: str, event: str, reason: str) -> None:
        self.notes.append((subject, event, reason))

    async def ask(self, asker: Asker, command: str, **asked: Any) -> Any:
        async def perform(heard: Mapping[str, Any]) -> Any:
            self.performed.append((command, {name: value for name, value in heard.items() if name != ASKER}))
            assert heard[ASKER] == asker
            return self.answer

        return await self.gate.guarded(command, perform)(asked_by(asker, asked))


@pytest.fixture
def fake() -> GuardedFake:
    return GuardedFake()


# ---- who asks --------------------------------------------------------------------------------------------------------


async def test_who_asks_is_found_by_the_number_that_the_kernel_tells() -> None:
    carol, dora = User("carol", 64011), User("dora", 64012, frozenset(("dora", "wheel")))
    ann, eve = User("ann", ANN.uid, frozenset(("ml",))), User("eve", EVE.uid)
    gate = GuardedFake(FixedUsers(ann, eve, carol, dora, User("covey", 990), own_uid=990)).gate
    found = {uid: await gate.asker(uid) for uid in (0, 990, ANN.uid, EVE.uid, 64011, 64012)}
    assert found == {
        0: Asker(0, "", "operator", is_agent=True),
        990: Asker(990, "covey", "operator", is_agent=True),
        ANN.uid: ANN,
        EVE.uid: EVE,
        64011: Asker(64011, "carol", "operator"),
        64012: Asker(64012, "dora", "operator"),
    }


async def test_whoever_has_no_name_here_is_nobody() -> None:
    odd = [User(name, 65000 + at) for at, name in enumerate(("the leader", "", "ann\n", "a" * 300, "-rf", "é"))]
    gate = GuardedFake(FixedUsers(*odd)).gate
    for uid in (64099, -1, *(user.uid for user in odd)):
        assert await gate.asker(uid) is None, uid


async def test_a_name_service_that_tells_of_another_number_is_not_believed() -> None:
    class Confused(FixedUsers):
        async def numbered(self, uid: int) -> User | None:
            return User("ann", ANN.uid)

    gate = GuardedFake(Confused()).gate
    assert await gate.asker(BOB.uid) is None and await gate.asker(ANN.uid) == ANN


# ---- what is asked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [{}, {ASKER: None}, {ASKER: "root"}, {ASKER: {"uid": 0, "role": "operator"}}])
@pytest.mark.parametrize("command", ["scheduler.jobs", "scheduler.cancel", "agent.health", "none.such"])
async def test_of_whom_nothing_is_known_nothing_is_performed(fake: GuardedFake, said: Any, command: str) -> None:
    async def perform(_given: Mapping[str, Any]) -> Any:
        raise AssertionError("it was performed")

    with pytest.raises(Refused, match="it is not known who asks") as refused:
        await fake.gate.guarded(command, perform)({"id": "j1", **said})
    assert refused.value.code == 4


async def test_a_job_and_a_volume_are_changed_by_their_owner_and_by_operators(fake: GuardedFake) -> None:
    for command, about in (("scheduler.cancel", {"id": "j1"}), ("memory.remove", {"volume": "v1"})):
        for asker in (ANN, ROOT):
            await fake.ask(asker, command, **about)
        for asker in (BOB, EVE, VISITOR):
            with pytest.raises(Refused) as refused:
                await fake.ask(asker, command, **about)
            assert refused.value.code == 4
    assert len(fake.performed) == 4
    with pytest.raises(Refused, match="agent's own user"):
        await fake.ask(ANN, "scheduler.cancel", id="j2")


async def test_whose_a_job_is_that_is_not_known_here_is_not_guessed(fake: GuardedFake) -> None:
    with pytest.raises(Refused, match="there is no j7") as refused:
        await fake.ask(ANN, "scheduler.cancel", id="j7")
    assert refused.value.code == 3
    with pytest.raises(NoLeader):
        await fake.ask(ANN, "scheduler.cancel", id="j9")
    await fake.ask(ROOT, "scheduler.cancel", id="j7")
    assert [command for command, _ in fake.performed] == ["scheduler.cancel"], "the plugin says there is none"


async def test_a_job_is_sought_by_the_id_that_the_command_gets(fake: GuardedFake) -> None:
    """Not by another field of the request, which may name an own job."""
    with pytest.raises(Refused):
        await fake.ask(ANN, "scheduler.cancel", id="j2", job="j1", volume="v1")
    with pytest.raises(Refused):
        await fake.ask(ANN, "memory.remove", volume="v2", id="v1")
    assert fake.sought == [("scheduler", "j2"), ("memory", "v2")] and not fake.performed


async def test_events_of_own_jobs_and_volumes_are_shown_whole(fake: GuardedFake) -> None:
    for about, subject in (("j1", "j1"), ("job/j1", "j1"), ("v1", "volume/v1"), ("volume/v1", "slab/v1/3")):
        fake.answer = [EventLine(1.0, HostId("h1"), subject, "failed", "its words")]
        assert (await fake.ask(ANN, "agent.why", id=about))[0].reason == "its words"
        assert (await fake.ask(BOB, "agent.why", id=about))[0].reason == ""
        assert (await fake.ask(ROOT, "agent.story", id=about))[0].reason == "its words"
    for subject in ("j7", "j9", "v7", "slab/v1/0", "", "j1/2"):
        fake.answer = [EventLine(1.0, HostId("h1"), subject, "failed", "its words")]
        assert (await fake.ask(ANN, "agent.why", id=subject))[0].reason == "", subject


@pytest.mark.parametrize(
    ("about", "host", "subject"),
    [
        ("j1", "h1", "volume/j1"), ("j1", "h1", "slab/j1/0"), ("v1", "h2", "volume/v1"), ("v1", "h2", "slab/v1/0"),
        ("volume/v1", "h2", "volume/v1"), ("v1", "h1", "volume/v10"), ("v1", "h1", "slab/v10/0"), ("v1", "h1", "v1"),
    ],
)  # fmt: skip
async def test_events_of_what_has_the_same_name_are_not_the_own_ones(
    fake: GuardedFake, about: str, host: str, subject: str
) -> None:
    """A volume may be called like a job, and each host has volumes of its own."""
    fake.answer = [EventLine(1.0, HostId(host), subject, "failed", "its words")]
    assert (await fake.ask(ANN, "agent.why", id=about))[0].reason == ""


async def test_a_users_volume_is_made_as_the_users(fake: GuardedFake) -> None:
    await fake.ask(ANN, "memory.create", volume="v2", size="1MiB")
    assert fake.performed == [("memory.create", {"volume": "v2", "size": "1MiB", "uid": ANN.uid, "tenant": "ml"})]
    with pytest.raises(Refused, match="own volumes only"):
        await fake.ask(ANN, "memory.create", volume="v3", size="1MiB", uid=BOB.uid)
    with pytest.raises(Refused, match="several tenants"):
        await fake.ask(BOB, "memory.create", volume="v3", size="1MiB")


async def test_the_event_log_says_who_did_what(fake: GuardedFake) -> None:
    await fake.ask(ANN, "memory.create", volume="v2", size="1MiB")
    await fake.ask(ROOT, "agent.change_voters", add="h4", remove="h3")
    await fake.ask(ROOT, "agent.change_voters", add="", remove="h2", force=True)
    await fake.ask(ROOT, "agent.forget_gpu", id="G" * 500)
    await fake.ask(ROOT, "aggregator.move", job="j1/1", by="ann")
    with pytest.raises(Refused):
        await fake.ask(EVE, "memory.remove", volume="v1", by="root")
    assert fake.notes == [
        ("volume/v2", "asked", "memory.create, by ann"),
        ("host/h4", "asked", "agent.change_voters, by root"),
        ("host/h3", "asked", "agent.change_voters, by root"),
        ("host/h2", "asked", "agent.change_voters, by root"),
        ("gpu/" + "G" * 80, "asked", "agent.forget_gpu, by root"),
        ("j1/1", "asked", "aggregator.move, by root"),
    ]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_FIELDS = st.sampled_from(["id", "volume", "uid", "tenant", "create", "by", "add", "remove", "job", "timeout_s"])


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from([*RULES, "none.such"]),
    st.sampled_from([ROOT, ANN, BOB, EVE, VISITOR]),
    st.dictionaries(_FIELDS, _JSON | st.sampled_from(["j1", "j2", "j9", "v1", "ml"]), max_size=5),
)
def test_whatever_is_asked_it_is_performed_or_refused_in_three_lines(
    command: str, asker: Asker, asked: dict[str, Any]
) -> None:
    fake = GuardedFake()
    try:
        asyncio.run(fake.ask(asker, command, **asked))
    except Refused as no:
        assert no.what and no.why and no.next and not fake.performed
    except NoLeader:
        assert not fake.performed
    else:
        assert command in RULES
        assert asker.role != "viewer" or RULES[command].needs == "look" or (command, asker) == ("agent.login", EVE)
        assert asker.role == "operator" or RULES[command].needs != "operate"
