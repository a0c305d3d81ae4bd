"""The host that sums a job and the host that decides it."""

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId, JobId
from covey.tensors.numbers.tensor_wire import grant_of
from covey.wire import sums as control
from covey.wire.frames import FrameError, unpack
from plugins.aggregator import messages, policy
from plugins.aggregator.messages import AggregatorSettings, Assigned, KnownOwner, Offer
from plugins.aggregator.messages import Any as AnyMessage
from plugins.aggregator.policy import Candidate

JOB = JobId("j1")
A, B, C = HostId("a"), HostId("b"), HostId("c")


def candidate(host: HostId, load: float = 0.0, jobs: int = 0, suspect: bool = False, age_s: float = 0.0) -> Candidate:
    return Candidate(host, suspect, load, jobs, age_s)


def test_the_least_loaded_aggregator_is_asked_first() -> None:
    assert policy.ranked(JOB, [candidate(A, 0.8), candidate(B, 0.2), candidate(C, 0.5)]) == [B, C, A]


def test_with_equal_load_the_one_with_fewer_jobs_is_asked_first() -> None:
    assert policy.ranked(JOB, [candidate(A, 0.21, 3), candidate(B, 0.25, 1)]) == [B, A]


def test_a_suspect_or_long_silent_one_comes_after_a_busy_one() -> None:
    ranked = policy.ranked(JOB, [candidate(A, suspect=True), candidate(B, 0.9), candidate(C, age_s=60)])
    assert ranked[0] == B


def test_the_one_that_just_failed_the_job_comes_last() -> None:
    assert policy.ranked(JOB, [candidate(A), candidate(B, suspect=True)], avoid=(A,)) == [B, A]


def test_jobs_that_start_together_spread_over_equal_hosts() -> None:
    hosts = [candidate(HostId(f"h{n}")) for n in range(4)]
    first = [policy.ranked(JobId(f"j{n}"), hosts)[0] for n in range(200)]
    assert all(first.count(one.host) > 25 for one in hosts)


@given(grant=st.integers(1, 1000), world=st.integers(1, 64), above=st.integers(0, 1 << 20), data=st.data())
def test_no_two_coordinators_ever_use_the_same_epoch(grant: int, world: int, above: int, data: st.DataObject) -> None:
    above += grant << 32
    ranks = data.draw(st.sets(st.integers(0, world - 1), min_size=1))
    epochs = [policy.next_epoch(grant, world, rank, above) for rank in sorted(ranks)]
    assert len(set(epochs)) == len(epochs)
    assert all(above < epoch <= above + world and grant_of(epoch) == grant for epoch in epochs)


@given(st.integers(1, 1000), st.integers(1, 64), st.lists(st.booleans(), max_size=30), st.data())
def test_a_rank_on_two_hosts_one_after_the_other_never_uses_one_epoch_twice(
    grant: int, world: int, turns: list[bool], data: st.DataObject
) -> None:
    """The host on which the rank was first knows of no later configuration, and hears only now and then which epoch
    the other one chose."""
    rank, used = data.draw(st.integers(0, world - 1)), (set[int](), set[int]())
    known = [grant << 32, grant << 32]
    config = (0, 3)
    for new in turns:
        if policy.is_old(config[new], known[new]):
            known[new] = grant << 32  # it offers nothing, and may have forgotten why after a restart
            continue
        epoch = policy.next_epoch(grant, world, rank, known[new], policy.era_of(config[new]))
        assert grant_of(epoch) == grant
        used[new].add(epoch)
        known[new] = epoch
        if data.draw(st.booleans()):
            known[0] = max(known)
    assert used[0].isdisjoint(used[1])


def test_whoever_knows_of_an_earlier_configuration_is_old() -> None:
    epoch = policy.next_epoch(1, 2, 0, 0, policy.era_of(3))
    assert policy.is_old(2, epoch) and not policy.is_old(3, epoch) and not policy.is_old(4, epoch)
    last = policy.next_epoch(1, 2, 0, 0, policy.era_of(1 << 40))
    assert grant_of(last) == 1 and policy.is_old(3, last) and not policy.is_old(1 << 40, last)


def test_an_epoch_of_a_later_run_is_above_all_of_earlier_ones() -> None:
    assert policy.next_epoch(2, 4, 0, 0) > policy.next_epoch(1, 4, 3, (1 << 32) + 10**6)


@pytest.mark.parametrize(("jobs", "load", "why"), [(64, 0.1, "jobs_max"), (1, 0.95, "busy 95%"), (63, 0.9, "")])
def test_an_aggregator_refuses_on_its_own_state(jobs: int, load: float, why: str) -> None:
    assert why in policy.refusal(jobs, 64, load, 0.9) and bool(why) == bool(policy.refusal(jobs, 64, load, 0.9))


@given(old=st.floats(0, 1), busy=st.floats(-1, 10), elapsed=st.floats(0, 10))
def test_load_stays_between_0_and_1(old: float, busy: float, elapsed: float) -> None:
    assert 0 <= policy.load_now(old, busy, elapsed) <= 1
    assert policy.load_now(old, busy, 0.0) == pytest.approx(old), "of no time nothing is known"


# ---- decoders --------------------------------------------------------------------------------------------------------

E = 1 << 32
NEED = messages.Demand(100_000, 10_000)
MESSAGES: list[msgspec.Struct] = [
    Offer(JOB, E, 4, bytes(16), NEED, "c: full"),
    messages.Accepted(JOB, E, "127.0.0.1:1"),
    messages.Declined(JOB, E, "full", E),
    messages.Profiled(JOB, E, NEED),
    messages.AssignmentKept(JOB, E),
    messages.LossReport(JOB, E, 100, 120, True),
    messages.Coordinates(JOB, E),
    messages.Handover(JOB, E, A, "it empties itself"),
    messages.MoveTensors(JOB, E, A),
    messages.ReserveCycle(JOB, E, 7, NEED),
    messages.CycleReserved(JOB, 7),
    messages.CycleNotReserved(JOB, 7, "full"),
    messages.ReleaseCycle(JOB, 7),
    Assigned(JOB, E, A, "127.0.0.1:1", bytes(16)),
    messages.Retire(JOB, E, E + 1, "moved"),
    messages.AssignmentDropped(JOB, E, "killed"),
    messages.Lost(JOB, E, "reset"),
    messages.OwnerWanted(JOB, E),
    messages.GetOwner(JOB),
    KnownOwner(None),
    messages.Probe(JOB, E),
    messages.Serving(True),
    messages.WorkOf(JOB, E),
    messages.WorkCounters(True, 1, 2, 4, 8, 1, 3, NEED),
    messages.CycleHere(),
    messages.CycleNow(True, 100_000, 1, 1, [messages.JobDemand(JOB, NEED)], [JOB]),
    messages.TensorsHere(),
    messages.Tensors([]),
]
decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_come_through(message: msgspec.Struct) -> None:
    assert decoder.decode(msgspec.msgpack.encode(message)) == message


def test_each_message_is_among_those_that_are_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(AnyMessage))


@given(st.binary(max_size=120))
def test_random_bytes_are_no_message_and_no_order(data: bytes) -> None:
    with pytest.raises(FrameError):
        unpack(data, decoder)
    with pytest.raises(FrameError):
        unpack(data, control.orders)


@given(message=st.sampled_from(MESSAGES), at=st.integers(0, 200), flip=st.integers(1, 255))
def test_a_mutated_message_is_refused_or_within_bounds(message: msgspec.Struct, at: int, flip: int) -> None:
    data = bytearray(msgspec.msgpack.encode(message))
    data[at % len(data)] ^= flip
    try:
        found = unpack(data, decoder)
    except FrameError:
        return
    if isinstance(found, Offer):
        assert 1 <= found.workers <= 65535 and len(found.secret) == 16 and 0 <= found.epoch < 1 << 63


@pytest.mark.parametrize("bad", [{"serv": True}, {"jobs_max": 0}, {"load_max": 2.0}, {"memory_bytes_max": 1}])
def test_settings_out_of_range_or_unknown_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(bad, AggregatorSettings)
