"""Which GPUs, or parts of them, a host gives: by what it measured, and in words when it does not."""

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId, JobId
from plugins.facts import GpuUse
from plugins.scheduler.machine.host.parts import Hold, WantedGpus, choice
from plugins.scheduler.machine.host.reservations import GrantNews, HeldReservations, RanksGone, Reservations
from plugins.scheduler.machine.leader.shared_capacity import Sharing
from plugins.scheduler.policy.shared import device_of, is_part
from plugins.scheduler.service.gpus.shared_gpus import _use

GPUS = ("a", "b", "c")
TWO = Sharing(beside=2, busy=0.8)


def uses(busy: Mapping[str, float] = {}, free: Mapping[str, int] = {}, no: Mapping[str, str] = {}) -> dict[str, GpuUse]:
    return {gpu: GpuUse(gpu, busy.get(gpu, 0.0), free.get(gpu, 1 << 40), no.get(gpu, "")) for gpu in GPUS}


def hold(job: str, *gpus: str, guaranteed: bool = True) -> Hold:
    return Hold(JobId(job), 1, 1, HostId("h"), gpus, 0, True, guaranteed)


def guest(job: str, *gpus: str) -> Hold:
    return hold(job, *gpus, guaranteed=False)


def test_an_opportunistic_job_goes_where_it_is_least_busy() -> None:
    """Reference: AntMan, Algorithm 1."""
    chosen = choice(WantedGpus(2, True), GPUS, [], uses({"a": 0.5, "b": 0.1}), TWO)
    assert (chosen.gpus, chosen.there) == (("b+1", "c+1"), 3)


def test_a_guaranteed_job_takes_gpus_with_the_fewest_beside_and_none_of_another() -> None:
    """A GPU of which an upgraded job holds a part is not taken either. Reference: AntMan §3.3."""
    holds = [hold("j1", "a+1"), guest("j2", "b+1", "c+1"), guest("j3", "b+2")]
    chosen = choice(WantedGpus(1, False), GPUS, holds, {}, TWO)
    assert (chosen.gpus, chosen.there, chosen.why_not) == (("c",), 2, "1 held by guaranteed jobs")


def test_beside_an_upgraded_job_there_is_room_for_as_many_others() -> None:
    holds = [hold("j1", "a+1"), guest("j2", "a+2")]
    assert choice(WantedGpus(1, True), ("a",), holds, uses(), TWO).gpus == ("a+3",)
    holds = [*holds, guest("j3", "a+3")]
    full = choice(WantedGpus(1, True), ("a",), holds, uses(), TWO)
    assert (full.gpus, full.why_not) == ((), "1 with 2 opportunistic jobs already")


def test_what_speaks_against_a_gpu_is_said() -> None:
    seen = uses({"a": 0.85}, {"b": 4}, {"c": "XID 79"})
    no = choice(WantedGpus(1, True, memory_bytes=8), GPUS, [], seen, TWO)
    said = "1 busy for 80% of the last 10 s or more, 1 refused (XID 79), 1 without enough free memory"
    assert (no.gpus, no.there, no.why_not) == ((), 0, said)
    assert choice(WantedGpus(1, True), GPUS, [], {}, TWO).why_not == "3 not measured yet"
    assert choice(WantedGpus(1, False), GPUS, [], seen, TWO).gpus == ("a",), "a guaranteed job makes its own room"


def test_nothing_is_put_beside_a_job_on_a_gpu_of_unknown_use() -> None:
    """A GPU without a job is taken; one with a job is never taken for idle, here nor in what is gossiped of it."""
    not_known = {gpu: GpuUse(gpu, None, 1 << 40) for gpu in GPUS}
    found = choice(WantedGpus(1, True), GPUS, [hold("j1", "a"), guest("j2", "b+1")], not_known, TWO)
    assert (found.gpus, found.why_not) == (("c+1",), "2 in use, whose driver does not say how much")
    assert choice(WantedGpus(1, False), ("b",), [guest("j2", "b+1")], not_known, TWO).gpus == ("b",)
    said = [_use(GpuUse("a", None, 0, jobs=jobs)) for jobs in (0, 1)]
    assert said == [0, 100] and _use(GpuUse("a", 0.5, 0)) == 50


def test_a_job_is_not_put_beside_one_that_it_slows_down() -> None:
    holds = [hold("j1", "a"), hold("j2", "b"), hold("j3", "c")]
    chosen = choice(WantedGpus(2, True, apart_from=(JobId("j1"),)), GPUS, holds, uses({"b": 0.7, "c": 0.7}), TWO)
    assert (chosen.gpus, chosen.why_not) == (("b+1", "c+1"), "1 held by j1, which this job slows down")


def test_an_upgrade_waits_until_the_guaranteed_job_before_has_gone_here() -> None:
    """The log knows its end before this host has freed its GPU."""
    held = HeldReservations((hold("before", "a"), guest("gang", "a+1", "b+1")))
    reservations = Reservations(held, 15.0, 0.0, TWO)
    news = GrantNews(JobId("gang"), 1, live=True, over=False, guaranteed=True)
    assert reservations.handle(news, 1.0) == ()
    reservations.check()
    reservations.handle(RanksGone(JobId("before"), 1), 2.0)
    reservations.handle(news, 3.0)
    (gang,) = reservations.all()
    assert gang.guaranteed
    reservations.check()


HOLDS = st.lists(st.tuples(st.booleans(), st.sampled_from(GPUS)), max_size=8)


@given(HOLDS, st.integers(1, 3), st.booleans(), st.integers(0, 3))
def test_nobody_is_given_what_is_held(drawn: Any, gpus: int, opportunistic: bool, beside: int) -> None:
    """At most one guaranteed job and so many others on each, whoever asks for what. Reference: AntMan §3.3."""
    sharing = Sharing(beside=beside)
    holds: list[Hold] = []
    for number, (is_guest, _) in enumerate([*drawn, (opportunistic, "")]):
        wanted = gpus if number == len(drawn) else 1
        chosen = choice(WantedGpus(wanted, is_guest), GPUS, holds, uses(), sharing)
        assert len(chosen.gpus) in (0, wanted) and len({device_of(gpu) for gpu in chosen.gpus}) == len(chosen.gpus)
        if chosen.gpus:
            holds.append(hold(f"j{number}", *chosen.gpus, guaranteed=not is_guest))
    held = [gpu for each in holds for gpu in each.gpus]
    assert len(held) == len(set(held))
    assert all(sum(device_of(gpu) == device and is_part(gpu) for gpu in held) <= beside for device in GPUS)
