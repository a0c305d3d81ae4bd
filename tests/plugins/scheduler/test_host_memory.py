"""Jobs that say what they may take of a host, memory (`--mem`) and processors (`--cpus`), go where there is as much,
and wait else."""

import asyncio
from typing import Any

import msgspec
import pytest

from covey.core.events import Heard
from covey.core.ids import HostId, JobId
from covey.ports.probes import MemoryNow
from plugins.facts import MemoryInUse, MemoryMeasured, MemoryPromised
from plugins.gossiped import MemoryHere
from plugins.scheduler.machine.gang.gang import RETRY_S, TryAgain
from plugins.scheduler.machine.host.reservations import MemorySeen, Starting
from plugins.scheduler.machine.leader import promises
from plugins.scheduler.machine.leader.leader import RackHost, ScheduleTick
from plugins.scheduler.machine.leader.shared_capacity import host_of
from plugins.scheduler.messages.commands import Command, Elapsed, Granted, RanksReported
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.messages.wire import NotReserved, Reserved
from plugins.scheduler.policy import explain
from plugins.scheduler.policy.eligible import capped, lacks_memory, memory_left, shape_of
from plugins.scheduler.policy.place import spread
from plugins.scheduler.service.gpus.gpus_here import memory_here
from tests.plugins.scheduler.rack import FOUR, Rack, on_a_rack, refused, submit, until
from tests.plugins.scheduler.test_gang import H1, H2, H3, J1, Coordinator, asks
from tests.plugins.scheduler.test_leader import Led
from tests.plugins.scheduler.test_reservations import J2, Local

GIB = 1 << 30
J3 = JobId("j3")


@pytest.mark.parametrize(
    ("said", "promised", "why"),
    [
        (MemoryHere(64 * GIB, 16 * GIB), 48 * GIB, ""),
        (MemoryHere(64 * GIB, 15 * GIB), 0, "has 15 GiB of memory free"),
        (MemoryHere(64 * GIB, 64 * GIB), 49 * GIB, "has 64 GiB of memory and other jobs there may use 49 GiB"),
        (MemoryHere(8 * GIB, 8 * GIB), 0, "has 8 GiB of memory"),
        (MemoryHere(0, 0), 0, "does not say how much memory it has"),
        (None, 0, "does not say how much memory it has"),
    ],
)
def test_a_host_takes_what_is_free_and_promised_to_nobody(said: MemoryHere | None, promised: int, why: str) -> None:
    assert lacks_memory(16 * GIB, said, promised) == why
    assert (memory_left(said, promised) >= 16 * GIB) == (not why)
    assert lacks_memory(0, said, promised) == ""


def test_free_memory_is_gossiped_in_steps_and_what_is_not_known_is_not() -> None:
    assert memory_here(MemoryNow(64 * GIB, 10 * GIB + 5, 0.0)) == MemoryHere(64 * GIB, 10 * GIB)
    assert memory_here(MemoryNow(64 * GIB, 11 * GIB - 5, 0.0)) == MemoryHere(64 * GIB, 10 * GIB)
    assert memory_here(MemoryNow(0, 0, 0.0)).total_bytes == 0


# ---- the host, which decides ----


def a_host(free_gib: int = 64) -> Local:
    local = Local()
    local.dispatch(MemorySeen(MemoryHere(64 * GIB, free_gib * GIB)))
    return local


def test_what_two_jobs_may_use_on_a_host_is_at_most_what_it_has() -> None:
    local = a_host()
    assert isinstance(local.ask(J1, 1, host_memory=40 * GIB), Reserved)
    why = "this host has 64 GiB of memory and other jobs there may use 40 GiB"
    assert local.ask(J2, 1, host_memory=25 * GIB) == NotReserved(J2, 1, 1, 3, why, False, True)
    assert isinstance(local.ask(J2, 1, attempt=2, host_memory=24 * GIB), Reserved)
    assert isinstance(local.ask(J3, 1), Reserved), "it did not say what it may use"
    again = local.restarted()
    assert again.machine.promised_bytes() == 64 * GIB, "it is on the disk with the hold"


def test_ranks_that_join_others_and_a_newer_attempt_need_no_second_promise() -> None:
    local = a_host()
    assert isinstance(local.ask(J1, 1, host_memory=64 * GIB), Reserved)
    assert isinstance(local.ask(J1, 1, attempt=2, host_memory=64 * GIB), Reserved)
    local.dispatch(Starting(J1, 1, ("g0",), True, 64 * GIB))
    local.dispatch(MemorySeen(MemoryHere(64 * GIB, 1 * GIB)))
    assert isinstance(local.ask(J1, 1, attempt=3, host_memory=64 * GIB, joins=True), Reserved)
    assert isinstance(local.ask(J2, 1, host_memory=1), NotReserved)


def test_a_start_that_the_log_says_counts_though_nobody_asked() -> None:
    local = a_host()
    local.dispatch(Starting(J1, 1, ("g0",), True, 60 * GIB))
    assert isinstance(local.ask(J2, 1, host_memory=5 * GIB), NotReserved)


def test_processors_of_a_host_are_promised_once() -> None:
    local = a_host()
    local.dispatch(MemorySeen(MemoryHere(64 * GIB, 64 * GIB, cpus=8)))
    assert isinstance(local.ask(J1, 2, cpus=3), Reserved)
    no = local.ask(J2, 1, cpus=3)
    assert isinstance(no, NotReserved) and no.memory_short
    assert no.reason == "this host has 8 processors, 6 of them promised to jobs, and 3 were asked for"
    assert isinstance(local.ask(J2, 1, attempt=2, cpus=2), Reserved)
    assert isinstance(local.ask(J1, 2, attempt=2, cpus=3), Reserved), "a newer attempt has what it had"
    assert isinstance(local.restarted().ask(J3, 1, cpus=1), NotReserved), "it is on the disk, and nothing was heard yet"


def test_ranks_that_join_others_have_processors_of_their_own() -> None:
    local = a_host()
    local.dispatch(MemorySeen(MemoryHere(64 * GIB, 64 * GIB, cpus=8)))
    assert isinstance(local.ask(J1, 1, cpus=6), Reserved)
    local.dispatch(Starting(J1, 1, ("g0",), True, 0, 6))
    assert isinstance(local.ask(J1, 1, attempt=2, cpus=6, joins=True), NotReserved)
    assert isinstance(local.ask(J1, 1, attempt=3, cpus=2, joins=True), Reserved)
    assert isinstance(local.ask(J2, 1, cpus=1), NotReserved)


def test_processors_that_are_not_known_are_not_enough() -> None:
    no = a_host().ask(J1, 1, cpus=1)
    assert isinstance(no, NotReserved) and "does not say how many processors it has" in no.reason


def test_memory_that_is_not_known_is_not_enough() -> None:
    no = Local().ask(J1, 1, host_memory=1)
    assert isinstance(no, NotReserved) and no.reason == "this host does not say how much memory it has"


# ---- the coordinator ----


@pytest.mark.parametrize("each", [0, 1])
def test_a_host_that_has_no_room_for_the_memory_is_left_out_for_this_job_alone(each: int) -> None:
    coordinator = Coordinator()
    asked = coordinator.grant(2, host_memory=8 * GIB, gpus_per_worker=each, pack="apart")
    assert {ask.host_memory for ask in asked.values()} == {8 * GIB} and set(asked) == {H1, H2}
    ask = asked[H1]
    no = NotReserved(ask.job, ask.epoch, ask.attempt, 2, "this host has 3 GiB of memory free", False, True)
    coordinator.dispatch(Heard(H1, no))
    coordinator.now_s += RETRY_S[0]
    again = asks(coordinator.dispatch(TryAgain(J1, 1, ask.attempt)))
    assert set(again) == {H2, H3}
    assert coordinator.gangs.said(False, coordinator.now_s) == {}, "its GPUs are free for others"


# ---- the leader ----

LARGE = (RackHost(H1, 4, memory=MemoryHere(64 * GIB, 64 * GIB)), RackHost(H2, 4, memory=MemoryHere(8 * GIB, 8 * GIB)))


class LedByMemory(Led):
    """The plain leader, with which `Led` compares, knows no memory."""

    def look(self, rack: tuple[RackHost, ...] = LARGE, after_s: float = 1.0) -> list[Command]:
        self.now_s += after_s
        proposed = [action.command for action in self.leader.handle(ScheduleTick(rack, 1.0), self.now_s)]
        self.leader.check()
        return [command for command in proposed if not isinstance(command, Elapsed)]

    def act(self, rack: tuple[RackHost, ...] = LARGE, after_s: float = 1.0) -> list[Command]:
        return super().act(rack, after_s)


def test_what_a_job_gave_back_is_there_for_the_next() -> None:
    led = LedByMemory()
    first = led.run(host=H1, host_memory=40 * GIB)
    second = led.submit(host_memory=40 * GIB)
    assert not granted(led.look()) and not granted(led.look())
    led.say(RanksReported(wall_s=1.0, job=first, epoch=1, host=H1, codes={0: 0}))
    assert granted(led.look()) == [second]


@pytest.mark.parametrize("each", [0, 1])
def test_room_is_looked_for_once_for_all_jobs_that_ask_for_the_same(each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at 3,000 jobs that wait for memory on 256 hosts took 1.8 s when each asked each host, and takes 0.07 s."""
    led, asked = LedByMemory(), list[MemoryHere | None]()
    of: dict[str, Any] = {"host_memory": 40 * GIB, "gpus_per_worker": each}
    led.run(host=H1, **of)
    for _ in range(50):
        led.submit(**of)

    def counted(said: MemoryHere | None, promised_bytes: int) -> int:
        asked.append(said)
        return memory_left(said, promised_bytes)

    monkeypatch.setattr(promises, "memory_left", counted)
    assert not granted(led.look()) and len(asked) == len(LARGE)


EIGHT = tuple(RackHost(host, 4, memory=MemoryHere(64 * GIB, 64 * GIB, cpus)) for host, cpus in ((H1, 8), (H2, 2)))


@pytest.mark.parametrize("each", [0, 1])
def test_a_job_starts_once_its_processors_are_there(each: int) -> None:
    """The other host has the GPUs, and processors for one worker."""
    led = LedByMemory()
    of: dict[str, Any] = {"cpus": 2, "gpus_per_worker": each}
    first = led.submit(workers=3, **of)
    assert granted(led.act(EIGHT)) == [first]
    led.place(first, H1)
    second = led.submit(workers=3, **of)
    assert not granted(led.look(EIGHT)), "one on each host is too few"
    led.say(RanksReported(wall_s=1.0, job=first, epoch=1, host=H1, codes={0: 0, 1: 0, 2: 0}))
    assert granted(led.look(EIGHT)) == [second]
    assert not granted(led.look(LARGE)), "a host that does not say how many it has has none"


@pytest.mark.parametrize("pack", ["few", "host", "apart"])
def test_workers_without_gpus_go_where_their_processors_are(pack: Any) -> None:
    hosts, most = {H1: 0, H2: 0, H3: 5}, {H2: 1, H3: 2}
    chosen = {
        "few": {H2: 1, H3: 1},
        "host": {H3: 2},
        "apart": {H2: 1, H3: 1},
    }
    assert spread(hosts, 2, pack, most) == chosen[pack]
    assert spread(hosts, 4, pack, most) == {} and spread({H1: 0}, 1, pack, most) == {}
    assert spread(hosts, 2, pack) != {}, "a job that did not ask"


def test_gpus_beyond_a_hosts_processors_are_nobodys() -> None:
    spec = JobSpec.parse({"argv": ["x"], "cpus": 4, "gpus_per_worker": 2})
    assert capped(spec, {H1: 8, H2: 8, H3: 1}, {H1: 1, H3: 9}) == {H1: 2, H3: 1}
    assert capped(spec, {H1: 8}, None) == {H1: 8}
    units = {HostId(f"{host}/{n}"): 1 for host in (H1, H2) for n in range(4)}
    assert list(capped(spec, units, {H2: 1}, host_of)) == [f"{H2}/0", f"{H2}/1"]


def granted(commands: list[Command]) -> list[JobId]:
    return [command.job for command in commands if isinstance(command, Granted)]


# ---- the rack ----


@pytest.mark.parametrize("each", [0, 1])
@on_a_rack()
async def test_a_job_goes_where_its_processors_are_and_waits_in_words(rack: Rack, each: int) -> None:
    await memory_everywhere(rack)
    for name, cores in {"gpu1": 2, "gpu2": 2, "gpu3": 8, "gpu4": 0}.items():
        rack[name].machine.probes.cores_now = cores
    await asyncio.sleep(3.0)
    of: dict[str, Any] = {"gpus_per_worker": each, "workers": 2, "cpus": 3}
    await submit(rack, **of)
    await until(lambda: rack.job("j1").state == "running")
    assert hosts_of(rack, "j1") == {"gpu3"}
    await submit(rack, **{**of, "workers": 1})
    await asyncio.sleep(5.0)
    view = await rack["gpu2"].call("job", id="j2")
    assert view.state == "queued" and rack.job("j2").tally.place_failures == 0
    assert "no room for its 3 processors for each worker: gpu1 has 2 processors, gpu2 has 2" in view.reason
    assert "gpu3 has 8 processors, 6 of them promised to jobs and 1 more hosts" in view.reason
    rack.finish("j1")
    await until(lambda: rack.job("j2").state == "running")
    assert hosts_of(rack, "j2") == {"gpu3"}


def hosts_of(rack: Rack, id: str) -> set[str]:
    return {str(place.host) for place in rack.job(id).start.places}


def has(rack: Rack, name: str, total_gib: int, free_gib: int) -> None:
    """Let a host have this memory from now on."""
    rack[name].machine.probes.memory_now = MemoryNow(total_gib * GIB, free_gib * GIB, 0.0)


async def memory_everywhere(rack: Rack, **free_gib: int) -> None:
    for name in FOUR:
        has(rack, name, 64, free_gib.get(name, 64))
    await asyncio.sleep(3.0)


@pytest.mark.parametrize("each", [0, 1])
@on_a_rack()
async def test_a_job_goes_where_its_memory_is_free_and_waits_in_words(rack: Rack, each: int) -> None:
    await memory_everywhere(rack, gpu1=3, gpu2=3, gpu4=3)
    of: dict[str, Any] = {"gpus_per_worker": each, "workers": 1}
    await submit(rack, host_memory=8 * GIB, **of)
    await until(lambda: rack.job("j1").state == "running")
    assert hosts_of(rack, "j1") == {"gpu3"}
    await submit(rack, host_memory=57 * GIB, **of)
    await asyncio.sleep(5.0)
    view = await rack["gpu2"].call("job", id="j2")
    assert view.state == "queued" and rack.job("j2").tally.place_failures == 0
    assert "no room for its 57 GiB of host memory: gpu1 has 3 GiB of memory free, gpu2 has 3" in view.reason
    assert "gpu3 has 64 GiB of memory and other jobs there may use 8 GiB and 1 more hosts" in view.reason
    await submit(rack, host_memory=0, **of)
    await until(lambda: rack.job("j3").state == "running")
    rack.finish("j1")
    await until(lambda: rack.job("j2").state == "running")
    assert hosts_of(rack, "j2") == {"gpu3"}


@on_a_rack()
async def test_a_person_sees_what_a_job_may_take_and_what_it_has(rack: Rack) -> None:
    await memory_everywhere(rack)
    await submit(rack, host_memory=8 * GIB)
    await until(lambda: rack.job("j1").state == "running")
    first, second = (HostId(name) for name in sorted(hosts_of(rack, "j1")))
    rack[first].publish(MemoryMeasured(rack.job("j1").id, 1, MemoryInUse(1, 2, 3)))
    rack[second].publish(MemoryMeasured(rack.job("j1").id, 0, MemoryInUse(4, 5, 6)))
    view = await rack["gpu1"].call("job", id="j1")
    assert view.seen.host_memory == 8 * GIB
    assert view.seen.memory == {first: MemoryInUse(1, 2, 3)}, "the other one is of an earlier grant"


@on_a_rack()
async def test_other_plugins_hear_what_jobs_may_take_of_a_host(rack: Rack) -> None:
    await memory_everywhere(rack)

    def heard(name: str) -> list[int]:
        return [fact.promised_bytes for fact in rack[name].told if isinstance(fact, MemoryPromised)]

    await submit(rack, host_memory=8 * GIB, workers=1)
    await until(lambda: rack.job("j1").state == "running")
    (host,) = hosts_of(rack, "j1")
    assert heard(host) == [8 * GIB] and not any(heard(name) for name in FOUR if name != host)
    await submit(rack, workers=1)
    await until(lambda: rack.job("j2").state == "running")
    rack.finish("j1")
    await until(lambda: len(heard(host)) > 1)
    assert heard(host) == [8 * GIB, 0]


@on_a_rack()
async def test_a_host_that_does_not_say_what_it_has_takes_no_such_job(rack: Rack) -> None:
    await memory_everywhere(rack)
    for name in FOUR:
        has(rack, name, 0, 0)
    await asyncio.sleep(3.0)
    await submit(rack, workers=1, host_memory=1)
    await asyncio.sleep(5.0)
    assert rack.job("j1").state == "queued"
    assert "gpu1 does not say how much memory it has" in (await rack["gpu1"].call("job", id="j1")).reason


@on_a_rack()
async def test_more_than_any_host_has_is_refused_at_once(rack: Rack) -> None:
    await memory_everywhere(rack)
    error = await refused(submit(rack, workers=1, host_memory=65 * GIB))
    assert error.code == 7 and "65 GiB" in error.why and "the largest has 64 GiB" in error.why
    assert "--mem" in error.next
    has(rack, "gpu2", 0, 0)
    await asyncio.sleep(3.0)
    await submit(rack, workers=1, host_memory=65 * GIB)
    assert rack.job("j1").state == "queued", "what a host has that does not say it is not known, and not nothing"


def test_jobs_of_unlike_memory_are_of_unlike_shape() -> None:
    one, other = (JobSpec.parse({"argv": ["x"], "host_memory": size}) for size in (1, 2))
    assert shape_of(one) != shape_of(other)


def test_many_hosts_without_room_are_a_number() -> None:
    spec = JobSpec.parse({"argv": ["x"], "host_memory": GIB})
    words = explain.lack_room(spec, {HostId(f"h{n}"): "has 1 MiB of memory free" for n in range(5)})
    assert words.endswith("h2 has 1 MiB of memory free and 2 more hosts")
    assert explain.lack_room(spec, {}) == ""


@on_a_rack()
async def test_a_kill_that_nobody_sent_is_told_with_what_the_host_killed_for_memory(rack: Rack) -> None:
    """Only as far as it is known: within the newest seconds, of a rank that was killed by SIGKILL."""
    for number, (kills, code, said) in enumerate(((3, -9, True), (None, -9, False), (3, 1, False), (0, -9, False)), 1):
        id = f"j{number}"
        await submit(rack, workers=1)
        await until(lambda: rack.job(id).state == "running")  # noqa: B023
        host = rack.hosts[rack.job(id).start.places[0].host]
        await until(lambda: (JobId(id), 1) in host.machine.ranks)  # noqa: B023
        probes: Any = host.env.probes
        probes.memory_now = msgspec.structs.replace(probes.memory_now, oom_kills=None if kills is None else 40)
        await asyncio.sleep(12.0)
        if kills is not None:
            probes.memory_now = msgspec.structs.replace(probes.memory_now, oom_kills=40 + kills)
        host.runner.end(JobId(id), 1, {0: code})
        await until(lambda: rack.job(id).state == "failed")  # noqa: B023
        assert ("its host killed 3 processes for memory within the same 10 s" in rack.job(id).reason) is said
        assert ("SIGKILL" in rack.job(id).reason) is (code == -9)
