"""Lives of a plugin, on simulated hosts: what a dead one can still do, how one begins and ends while the agent leaves,
and what others are told meanwhile. (Which failures end a life: see test_host.py.)"""

import asyncio
import inspect
import itertools
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, ClassVar, Literal

import msgspec
import pytest

from agent import main
from agent.runtime import plugin_runtime
from chaos.askers import as_root
from chaos.rackworld import SimRack
from covey.core.errors import Refused
from covey.core.events import Fact, Message
from covey.core.ids import HostId, JobId
from covey.wire import job as wire
from covey.wire.frames import pack, read_frame
from plugins.base import Command, Host, Plugin, PluginService
from plugins.facts import JobPlaced, JobUnplaced, SecondPassed, TensorsSeen
from plugins.memory.plugin import PLUGIN as MEMORY
from plugins.views import HostRow

H1, H2, J1 = HostId("h1"), HostId("h2"), JobId("j1")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section [pet] of agent.toml."""


class Word(Message, frozen=True):
    """A message that pets send."""

    text: str


def nothing(_pet: "Pet") -> None:
    """Do what a well-behaved pet does: nothing."""


async def at_once(_pet: "Pet") -> None:
    """Return at once, as a well-behaved pet does."""


class Pet(PluginService):
    """A plugin that does what the test says, by the number of its life."""

    name: ClassVar[str] = "pet"
    lives: ClassVar[list["Pet"]]
    made: ClassVar[Callable[["Pet"], None]]
    starting: ClassVar[Callable[["Pet"], Coroutine[Any, Any, None]]]
    stopping: ClassVar[Callable[["Pet"], Coroutine[Any, Any, None]]]

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.heard: list[Fact | Message] = []
        self.stopped = 0
        self.life = len(self.lives) + 1
        self.lives.append(self)
        Pet.made(self)

    async def start(self) -> None:
        await Pet.starting(self)

    async def stop(self) -> None:
        self.stopped += 1
        await Pet.stopping(self)

    def on_fact(self, fact: Fact) -> None:
        self.heard.append(fact)

    async def on_message(self, sender: HostId, message: Any) -> None:
        self.heard.append(message)

    async def answer(self, sender: HostId, question: Any) -> msgspec.Struct:
        return Word(f"{self.host.id} heard {question.text}")

    def commands(self) -> Mapping[str, Command]:
        return {"fill": self._fill, "dawdle": self._dawdle}

    async def _fill(self, _arguments: Mapping[str, Any]) -> None:
        raise OSError(28, "no space left")

    async def _dawdle(self, _arguments: Mapping[str, Any]) -> dict[str, str]:
        await asyncio.sleep(5.0)
        self.host.publish(SecondPassed(-1.0))
        raise OSError(5, "the disk is sick")


ASKED_BY: dict[str, Literal["anybody", "operators"]] = {"fill": "operators", "dawdle": "anybody"}
PET = Plugin(name="pet", paper="none", settings=Settings, messages=Word, service=Pet, asked_by=ASKED_BY)


@pytest.fixture
def rack() -> Iterator[Callable[..., SimRack]]:
    """A rack whose hosts have a pet."""
    made: list[SimRack] = []

    def make(hosts: int = 1) -> SimRack:
        Pet.lives, Pet.made, Pet.starting, Pet.stopping = [], nothing, at_once, at_once
        made.append(SimRack(7, hosts=hosts, plugins=(MEMORY, PET), settings={"pet": {}}, watched=False))
        return made[0]

    yield make
    for one in made:
        one.close()


def on(rack: SimRack, life: int = 1) -> Pet:
    """The pet of h1 once it is on in that life."""

    def found() -> list[Pet]:
        now = rack.plugin("h1", "pet")
        return [pet for pet in Pet.lives if pet.host.id == H1 and pet is now]

    rack.until(lambda: len([pet for pet in Pet.lives if pet.host.id == H1]) >= life and bool(found()), 20.0, "it is on")
    return found()[0]


def fill(rack: SimRack) -> None:
    """Let the pet of h1 meet a full disk, which ends its life."""
    with pytest.raises(Refused, match="no space left"):
        rack.ask("h1", "pet.fill", {})


def done(rack: SimRack, work: Coroutine[Any, Any, Any], within_s: float = 10.0) -> Any:
    """Do some work on h1, and return what it answers, or raise what it raises."""
    ended: list[Any] = []

    async def watched() -> None:
        try:
            ended.append(await work)
        except (Refused, TimeoutError) as error:
            ended.append(error)

    process = rack.hosts["h1"].agent
    assert process is not None
    process.spawn("test", watched())
    rack.until(lambda: bool(ended), within_s, "it answers")
    return ended[0]


def plugins_failed(rack: SimRack, seen_by: str) -> tuple[str, ...]:
    rows: list[HostRow] = rack.ask(seen_by, "agent.hosts", {})
    return next(row for row in rows if row.host == "h1").plugins_failed


# ---- a life that is over ----


def test_what_is_left_of_a_life_sends_asks_gossips_and_tells_in_vain(rack: Callable[..., SimRack]) -> None:
    two = rack(hosts=2).start()
    old = on(two)
    two.settle()
    fill(two)
    new = on(two, life=2)
    there = next(pet for pet in Pet.lives if pet.host.id == H2)
    assert done(two, old.host.send("pet", H2, Word("from the grave"), 2.0)) is False
    assert done(two, old.host.send("pet", H1, Word("from the grave"), 2.0)) is False
    silence = done(two, old.host.ask("pet", H2, Word("who is there"), 2.0))
    assert isinstance(silence, TimeoutError) and "plugin pet has ended" in str(silence)
    old.host.publish(SecondPassed(-1.0))
    new.host.publish(SecondPassed(-2.0))
    assert SecondPassed(-2.0) in new.heard, "a life that goes on is heard, by itself too"

    async def publish() -> None:
        new.host.spread("pet", Word("alive"))
        old.host.spread("pet", Word("a ghost"))

    done(two, publish())
    two.run(5)
    said = [view.value("pet", Word) for view in two.agents["h2"].hosts() if view.host == H1]
    assert said == [Word("alive")]
    assert not [word for pet in Pet.lives for word in pet.heard if word in (Word("from the grave"), SecondPassed(-1.0))]
    assert done(two, new.host.send("pet", H2, Word("hello"), 2.0)) is True
    assert done(two, new.host.send("pet", H1, Word("to myself"), 2.0)) is True
    assert done(two, new.host.ask("pet", H2, Word("hello"), 2.0)) == Word("h2 heard hello")
    assert Word("hello") in there.heard and Word("to myself") in new.heard


def test_what_a_life_that_is_over_wants_to_start_never_begins(rack: Callable[..., SimRack]) -> None:
    one = rack().start()
    old = on(one)
    fill(one)
    began: list[str] = []

    async def late() -> None:
        began.append("late")

    work = late()
    old.env.spawn("late", work)
    one.run(1)
    assert began == [] and inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


@pytest.mark.parametrize("how", ["cancelled", "killed", "after its death"])
def test_what_never_came_to_its_first_step_is_let_go(rack: Callable[..., SimRack], how: str) -> None:
    """Python would warn of a coroutine that was never awaited."""
    one = rack().start()
    old, process = on(one), one.hosts[H1].agent
    assert process is not None

    async def never() -> None:
        raise AssertionError("it never begins")

    work = never()
    if how == "after its death":
        process.signal(9)
    task = old.env.spawn("never", work)
    if how == "cancelled":
        assert isinstance(task, asyncio.Task)
        task.cancel()
        one.run(1)
    elif how == "killed":
        process.signal(9)
        one.close()
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


def test_a_life_that_is_over_hears_nothing_more(rack: Callable[..., SimRack]) -> None:
    one = rack().start()
    old = on(one)
    fill(one)
    before = len(old.heard)
    one.run(20)
    assert old.heard[before:] == []
    assert [fact for fact in on(one, life=2).heard if isinstance(fact, SecondPassed)]


def test_a_command_half_way_when_its_plugin_restarts_is_refused_not_answered_empty(
    rack: Callable[..., SimRack],
) -> None:
    one = rack().start()
    on(one)
    dawdling: list[Any] = []

    async def dawdle() -> None:
        try:
            dawdling.append(await one.agents["h1"].commands["pet.dawdle"](as_root({})))
        except Refused as refused:
            dawdling.append(refused)

    process = one.hosts["h1"].agent
    assert process is not None
    process.spawn("test: dawdle", dawdle())
    one.run(0.5)
    fill(one)
    new = on(one, life=2)
    one.until(lambda: bool(dawdling), 10.0, "it is answered")
    assert isinstance(dawdling[0], Refused) and "the disk is sick" in dawdling[0].why
    assert one.agents["h1"].health["pet"].state == "on" and SecondPassed(-1.0) not in new.heard
    assert len(Pet.lives) == 2, "the new life is not blamed for it"


# ---- messages while a plugin is away ----


def test_a_message_to_a_plugin_that_starts_again_waits_for_it(rack: Callable[..., SimRack]) -> None:
    two = rack(hosts=2).start()
    on(two)
    two.settle()
    fill(two)
    assert "pet" not in two.agents["h1"].plugins
    there = next(pet for pet in Pet.lives if pet.host.id == H2)
    told: list[bool] = []

    async def send() -> None:
        told.append(await there.host.send("pet", H1, Word("retire"), 5.0))

    there.env.spawn("test: send", send())
    two.run(0.5)
    assert told == []
    new = on(two, life=2)
    two.until(lambda: bool(told), 5.0, "it is acknowledged")
    assert told == [True] and new.heard.count(Word("retire")) == 1


def test_a_question_to_a_plugin_away_or_unknown_is_refused_with_the_reason(
    rack: Callable[..., SimRack],
) -> None:
    one = rack().start()
    on(one)
    fill(one)
    at_work = one.agents["h1"].plugin_runtime
    away = done(one, at_work.ask("pet", lambda pet: pet.answer(H2, Word("?"))))
    assert isinstance(away, Refused) and "plugin pet of h1 is not on" in away.what and "no space left" in away.why
    unknown = done(one, at_work.ask("kitchen", lambda kitchen: kitchen.answer(H2, Word("?"))))
    assert isinstance(unknown, Refused) and "no such plugin" in unknown.why


def test_a_process_that_asks_a_plugin_that_is_away_is_told_so_at_once(rack: Callable[..., SimRack]) -> None:
    """It is told that, instead of nothing until it gives up."""
    one = rack().start()
    on(one)

    async def full(_memory: PluginService) -> None:
        raise OSError(28, "no space left")

    async def attach() -> list[wire.FrameUnion]:
        process = one.hosts["h1"].agent
        assert process is not None
        stream = await process.env.bytes.connect(f"unix:{one.hosts['h1'].run_dir}/jobs.sock")
        await stream.write(pack(wire.Join(pid=77)) + pack(wire.VolumeWanted("v1", 1 << 20)))
        heard = [await read_frame(stream, wire.decoder) for _ in range(2)]
        stream.close()
        return heard

    done(one, one.agents["h1"].plugin_runtime.ask("memory", full))
    joined, refused = done(one, attach(), within_s=0.5)
    assert isinstance(joined, wire.Joined) and isinstance(refused, wire.Refusal)
    assert "plugin memory of h1 is not on" in refused.what and "no space left" in refused.why


def test_a_plugin_that_refuses_answers_and_goes_on(rack: Callable[..., SimRack]) -> None:
    one = rack().start()
    pet = on(one)

    async def no(_pet: PluginService) -> None:
        raise Refused(4, "not now", "it sleeps", "wait")

    refused = done(one, one.agents["h1"].plugin_runtime.ask("pet", no))
    assert isinstance(refused, Refused) and refused.what == "not now"
    assert one.plugin("h1", "pet") is pet


# ---- how a life begins ----


@pytest.mark.parametrize("life", [1, 2])
def test_a_plugin_that_cannot_even_be_made_fails_alone_and_is_named_to_every_host(
    rack: Callable[..., SimRack], life: int
) -> None:
    two = rack(hosts=2)
    boots: list[int] = []

    def breaks(pet: Pet) -> None:
        if pet.host.id != H1:
            return
        boots.append(pet.host.boot)
        if pet.host.boot - boots[0] >= life - 1:
            raise ZeroDivisionError("while it was made")

    Pet.made = breaks
    two.start()
    if life == 2:
        on(two)
        fill(two)
    agents = two.agents
    two.until(lambda: "h1" in agents and "while it was made" in str(agents["h1"].health.get("pet")), 10.0, "it fails")
    health = two.agents["h1"].health["pet"]
    assert (health.state, health.why) == ("failed", "ZeroDivisionError: while it was made")
    assert (health.restarts, health.again_s) == (life - 1, None), "our own fault is not tried again"
    two.settle()
    two.run(2)
    assert two.agents["h1"].health["memory"].state == "on" and plugins_failed(two, "h2") == ("pet",)
    story = [(line.event, line.reason) for line in two.ask("h1", "agent.why", {"id": "h1"})]
    why = "ZeroDivisionError: while it was made; correct that, then restart the agent"
    assert ("plugin pet failed", why) in story
    full = ("plugin pet failed", "OSError: [Errno 28] no space left; starts again in 1 s")
    assert (full in story) == (life == 2)


def test_a_plugin_that_begins_late_is_told_what_holds_and_not_what_is_over(rack: Callable[..., SimRack]) -> None:
    one = rack().start()
    on(one)
    bus = one.agents["h1"].bus
    gone = JobId("gone")
    for job in (J1, gone):
        bus.publish(JobPlaced(job, 1, "lab", 1, (), 1))
        bus.publish(TensorsSeen(job, 1, 10, 20))
    bus.publish(JobUnplaced(gone, 1, True))
    fill(one)
    told = on(one, life=2).heard
    assert [fact for fact in told if isinstance(fact, JobPlaced | TensorsSeen | JobUnplaced)] == [
        JobPlaced(J1, 1, "lab", 1, (), 1),
        TensorsSeen(J1, 1, 10, 20),
    ]


def test_pauses_grow_while_a_plugin_fails_at_once_and_begin_anew_after_a_steady_life(
    rack: Callable[..., SimRack],
) -> None:
    one = rack().start()
    pauses = []
    for life in range(1, 8):
        on(one, life)
        fill(one)
        pauses.append(one.agents["h1"].health["pet"].again_s)
        one.until(lambda life=life: len(Pet.lives) > life, 40.0, "it is tried again")  # type: ignore[misc]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    on(one, 8)
    one.run(plugin_runtime.STEADY_S)
    fill(one)
    assert one.agents["h1"].health["pet"].again_s == 1.0


def test_a_plugin_waits_longer_each_time_while_its_boot_number_cannot_be_written(
    rack: Callable[..., SimRack],
) -> None:
    one = rack().start()
    on(one)
    agent, real, tries = one.agents["h1"], one.agents["h1"].next_boot, list[float]()

    async def sick() -> int:
        tries.append(agent.env.clock.now_s())
        if len(tries) < 4:
            raise OSError(30, "read-only file system")
        return await real()

    agent.next_boot = sick  # type: ignore[method-assign]
    fill(one)
    one.until(lambda: len(tries) == 2, 10.0, "it was tried twice")
    one.run(0.1)
    health = agent.health["pet"]
    assert (health.state, health.again_s) == ("failed", 4.0) and "read-only file system" in health.why
    assert on(one, life=2).host.boot > agent.boot
    assert [round(later - before) for before, later in itertools.pairwise(tries)] == [2, 4, 8]


# ---- how a life ends ----


def test_a_plugin_that_hangs_while_it_lets_go_is_started_again_all_the_same(rack: Callable[..., SimRack]) -> None:
    one = rack().start()
    old = on(one)

    async def hangs(pet: Pet) -> None:
        await asyncio.sleep(600 if pet is old else 0)

    async def clings() -> None:
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                continue

    Pet.stopping = hangs
    old.env.spawn("clings", clings())
    fill(one)
    took = one.until(lambda: len(Pet.lives) == 2, 20.0, "it is started again")
    assert old.stopped == 1 and took < 2 * plugin_runtime.STOP_S + plugin_runtime.PAUSE_S + 0.5


def test_a_plugin_lets_go_after_its_tasks_have_ended_and_before_its_next_life_begins(
    rack: Callable[..., SimRack],
) -> None:
    one = rack().start()
    old = on(one)
    events: list[str] = []

    async def tidies() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(plugin_runtime.STOP_S / 2)
            events.append("its task has ended")

    async def lets_go(_pet: Pet) -> None:
        await asyncio.sleep(plugin_runtime.STOP_S / 2)
        events.append("it let go")

    async def begins(_pet: Pet) -> None:
        events.append("the next begins")

    Pet.stopping, Pet.starting = lets_go, begins
    old.env.spawn("tidies", tidies())
    one.run(0.1)
    fill(one)
    on(one, life=2)
    assert events == ["its task has ended", "it let go", "the next begins"]


def test_what_a_plugin_started_and_what_ended_since_is_not_kept(rack: Callable[..., SimRack]) -> None:
    one = rack().start()
    pet = on(one)
    for number in range(100):
        pet.env.spawn(f"short {number}", asyncio.sleep(0.1))
    one.run(1)
    assert not pet.host._tasks  # type: ignore[attr-defined]


def test_a_plugin_that_fails_while_it_lets_go_is_started_again_all_the_same(rack: Callable[..., SimRack]) -> None:
    one = rack().start()
    on(one)

    async def breaks(_pet: Pet) -> None:
        raise ZeroDivisionError("while it let go")

    Pet.stopping = breaks
    fill(one)
    assert on(one, life=2).life == 2


# ---- the agent leaves ----


def leaves(rack: SimRack, name: str = "h1") -> float:
    """Send SIGTERM to that agent, and return how many seconds it took to end."""
    process = rack.hosts[name].agent
    assert process is not None
    process.signal(15)
    return rack.until(lambda: not process.alive, 20.0, "the agent has left")


def test_an_agent_whose_plugin_hangs_at_goodbye_still_says_it_to_the_others_in_time(
    rack: Callable[..., SimRack],
) -> None:
    three = rack(hosts=3)

    async def hangs(_pet: Pet) -> None:
        await asyncio.sleep(600)

    Pet.stopping = hangs
    three.start().settle()
    leader = three.agents["h1"].log.leader
    assert leader is not None
    assert plugin_runtime.STOP_S <= leaves(three, leader) < main.LEAVE_S
    three.run(0.5)
    others = [name for name in three.hosts if name != leader]
    for name in others:
        assert [view.state for view in three.agents[name].hosts() if view.host == leader] == ["away"]
    assert three.agents[others[0]].log.leader in others, "it handed over"


def test_a_plugin_that_fails_at_goodbye_keeps_no_other_plugin_from_saying_it(rack: Callable[..., SimRack]) -> None:
    one = rack().start()
    pet = on(one)

    async def breaks(_pet: Pet) -> None:
        raise ZeroDivisionError("at goodbye")

    Pet.stopping = breaks
    assert leaves(one) < 1.0
    assert pet.stopped == 1


def test_a_plugin_is_not_started_again_by_an_agent_that_leaves(rack: Callable[..., SimRack]) -> None:
    """The plugin's pause ends while another thing of the agent is still stopping."""
    one = rack().start()
    on(one)
    fill(one)
    one.run(0.5)
    agent = one.agents["h1"]

    async def slow() -> None:
        await asyncio.sleep(5.0)

    agent.jobs.stop = slow  # type: ignore[method-assign]
    assert leaves(one) > 4.0
    assert len(Pet.lives) == 1 and agent.health["pet"].state == "failed"


def test_a_plugin_that_is_being_started_while_the_agent_leaves_is_ended_again(rack: Callable[..., SimRack]) -> None:
    one = rack()
    ticks: list[int] = []

    async def ticking(pet: Pet) -> None:
        while True:
            await asyncio.sleep(0.1)
            ticks.append(pet.life)

    async def slow(pet: Pet) -> None:
        if pet.life == 2:
            pet.env.spawn("ticking", ticking(pet))
            await asyncio.sleep(0.5)

    Pet.starting = slow
    one.start()
    on(one)
    fill(one)
    one.until(lambda: len(Pet.lives) == 2, 10.0, "it is being started")

    async def slow_stop() -> None:
        await asyncio.sleep(3.0)

    one.agents["h1"].jobs.stop = slow_stop  # type: ignore[method-assign]
    process = one.hosts["h1"].agent
    assert process is not None
    process.signal(15)
    one.run(1.5)
    assert process.alive and ticks
    assert Pet.lives[1].stopped == 1 and "pet" not in one.agents["h1"].plugins
    assert one.agents["h1"].health["pet"].state != "on"
    seen = len(ticks)
    one.run(0.5)
    assert len(ticks) == seen, "its tasks are over"
