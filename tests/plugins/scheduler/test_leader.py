"""What the leader proposes, given a queue and a rack."""

from typing import Any

import pytest

from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.leader.leader import RETRY_S, Leader, RackHost, ScheduleTick
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.messages.commands import (
    Applied,
    Attained,
    Command,
    Elapsed,
    Granted,
    Placed,
    PlaceFailed,
    Promoted,
    QuotaSet,
    RanksReported,
    Submitted,
    TakenBack,
    TimeLimitReached,
)
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy.settings import SchedulerSettings
from tests.plugins.scheduler.plain_leader import PlainLeader

H1, H2 = HostId("h1"), HostId("h2")
RACK = (RackHost(H1, 4), RackHost(H2, 4))


class Led:
    """A queue, its leader, and gangs that are placed as soon as they are granted."""

    def __init__(self, **settings: Any) -> None:
        self.queue = JobTable()
        self.leader = Leader(self.queue, SchedulerSettings(**{"queue_thresholds_gpu_s": (10.0,), **settings}))
        self.plain = PlainLeader(self.queue, self.leader.settings)
        self.now_s = 100.0
        self.gpus = 0

    def say(self, command: Command) -> None:
        result, _ = apply(self.queue, self.queue.index + 1, command)
        assert isinstance(result, Applied), result

    def submit(self, workers: int = 1, tenant: str = "alice", **more: Any) -> JobId:
        spec = JobSpec.parse({"argv": ["train"], "workers": workers, "tenant": tenant, **more})
        self.say(Submitted(wall_s=1.0, key=f"key-{self.queue.index:08}", spec=spec))
        return JobId(f"j{self.queue.next_number - 1}")

    def look(self, rack: tuple[RackHost, ...] = RACK, after_s: float = 1.0) -> list[Command]:
        self.now_s += after_s
        proposed = [action.command for action in self.leader.handle(ScheduleTick(rack, 1.0), self.now_s)]
        self.leader.check()
        self.plain.settings = self.leader.settings
        assert proposed == [action.command for action in self.plain.handle(ScheduleTick(rack, 1.0), self.now_s)]
        for command in proposed:
            if isinstance(command, Elapsed):
                self.say(command)
        return [command for command in proposed if not isinstance(command, Elapsed)]

    def act(self, rack: tuple[RackHost, ...] = RACK, after_s: float = 1.0) -> list[Command]:
        """Look, and say all that is proposed to the log."""
        proposed = self.look(rack, after_s)
        for command in proposed:
            self.say(command)
        return proposed

    def place(self, id: JobId, host: HostId = H1) -> None:
        """Place the gang on this host, and what does not fit there on the next."""
        job, rank, places = self.queue.jobs[id], 0, []
        each = job.spec.gpus_per_worker
        for on in (host, *(other for other in (H1, H2) if other != host)):
            room = 4 - len(self.queue.holders.get(on, {})) if on in (H1, H2) else 99
            count = min(job.spec.workers - rank, room // each if each else 99)
            if count:
                gpus = tuple(f"g{self.gpus + n}" for n in range(count * each))
                self.gpus += len(gpus)
                places.append(Place(on, tuple(range(rank, rank + count)), gpus))
                rank += count
        self.say(Placed(wall_s=1.0, job=id, epoch=job.grant.epoch, places=tuple(places), master_addr="", master_port=1))

    def run(self, workers: int = 1, tenant: str = "alice", host: HostId = H1, **more: Any) -> JobId:
        id = self.submit(workers, tenant, **more)
        assert [command.job for command in self.act() if isinstance(command, Granted)] == [id]
        self.place(id, host)
        return id

    def serve(self, id: JobId, gpu_s: float) -> None:
        self.say(Attained(wall_s=1.0, host=H1, service_gpu_s={id: gpu_s}))


def granted(commands: list[Command]) -> list[str]:
    return [command.job for command in commands if isinstance(command, Granted)]


def taken(commands: list[Command]) -> list[tuple[str, str]]:
    return [(command.job, command.cause) for command in commands if isinstance(command, TakenBack)]


def test_whoever_fits_is_granted_in_order_with_coordinators_spread_over_the_hosts() -> None:
    led = Led()
    for workers in (3, 3, 3, 2):
        led.submit(workers)
    proposed = led.act()
    assert granted(proposed) == ["j4", "j1", "j2"], "the narrowest first; j3 does not fit beside them and is skipped"
    assert [command.coordinator for command in proposed if isinstance(command, Granted)] == [H1, H2, H1]
    assert led.look() == [], "said once"


def test_what_is_stopping_still_holds_its_gpus() -> None:
    led = Led()
    first, second = led.run(8), led.submit(8)
    led.say(RanksReported(wall_s=1.0, job=first, epoch=1, host=H1, codes={0: 1, 1: 0, 2: 0, 3: 0}))
    led.say(RanksReported(wall_s=1.0, job=first, epoch=1, host=H2, codes=dict.fromkeys(range(4, 8), 0)))
    assert granted(led.look()) == [second]
    led = Led()
    first, second = led.run(8), led.submit(8)
    led.say(TimeLimitReached(wall_s=1.0, job=first, epoch=1))
    assert led.look() == []


def test_a_lower_queue_yields_to_a_higher_one_and_is_told_for_whom() -> None:
    led = Led()
    long = led.run(8)
    led.serve(long, 10.0)
    assert led.look() == []
    short = led.submit(2, "bob")
    proposed = led.look()
    assert taken(proposed) == [(long, "preempted")]
    assert isinstance(proposed[0], TakenBack) and proposed[0].reason == f"{short} (tenant bob, 2 GPUs) comes first"
    led.leader.settings = SchedulerSettings(queue_thresholds_gpu_s=(10.0,), preemption=False)
    assert led.look() == []


def test_inside_one_queue_nobody_is_preempted() -> None:
    led = Led()
    led.run(8)
    led.submit(2)
    assert led.look() == []


def test_a_job_that_waits_for_a_host_is_left_alone_and_what_is_beside_is_given_out() -> None:
    led = Led()
    on_h1, on_h2 = led.run(3, host=H1), led.run(4, host=H2)
    for id in (on_h1, on_h2):
        led.serve(id, 10.0)
    away = (RackHost(H1, 4), RackHost(H2, 4, gone_s=5.0))
    small, large = led.submit(1), led.submit(2)
    proposed = led.act(away)
    assert granted(proposed) == [small] and taken(proposed) == [(on_h1, "preempted")]
    assert led.queue.jobs[on_h2].state == "running" and led.queue.jobs[large].state == "queued"


def test_a_job_that_waits_for_a_host_still_uses_its_tenants_quota() -> None:
    led = Led()
    led.say(QuotaSet(wall_s=1.0, tenant="alice", gpus=4))
    led.run(3, host=H2)
    led.submit(2)
    assert led.look((RackHost(H1, 4), RackHost(H2, 4, gone_s=5.0))) == []


def test_only_what_is_free_in_truth_is_granted_while_a_gang_is_stopping() -> None:
    led = Led()
    led.say(TimeLimitReached(wall_s=1.0, job=led.run(5), epoch=1))
    led.submit(2)
    led.submit(2)
    assert granted(led.look()) == ["j2"]


def test_opportunistic_jobs_yield_to_promised_ones() -> None:
    led = Led()
    led.say(QuotaSet(wall_s=1.0, tenant="alice", gpus=8))
    guest = led.run(8, "bob", job_class="opportunistic")
    led.submit(1, "alice")
    assert taken(led.act()) == [(guest, "preempted")]


def test_jobs_of_a_host_gone_long_enough_are_taken_back() -> None:
    led = Led()
    id = led.run(2, host=H2)
    assert led.look((RackHost(H1, 4), RackHost(H2, 4, gone_s=59.0)), after_s=58.0) == []
    proposed = led.act((RackHost(H1, 4), RackHost(H2, 4, gone_s=61.0)))
    assert taken(proposed) == [(id, "host lost")] and led.queue.jobs[id].state == "queued"


def test_a_host_that_gossip_never_named_counts_as_gone_from_when_it_was_missed() -> None:
    led = Led()
    id = led.run(2, host=HostId("h9"))
    assert led.look() == [] and led.look(after_s=58.0) == []
    assert taken(led.look(after_s=3.0)) == [(id, "host lost")]


def test_a_coordinator_that_is_gone_or_too_slow_loses_the_grant() -> None:
    led = Led()
    id = led.submit()
    led.act()
    away = (RackHost(H1, 4, gone_s=4.0), RackHost(H2, 4))
    assert taken(led.look(away)) == [(id, "coordinator lost")]
    assert led.look(after_s=50.0) == []
    assert taken(led.look(after_s=20.0)) == [(id, "placing took too long")]


def test_a_job_that_could_not_be_placed_pauses_longer_each_time_and_preempts_nobody() -> None:
    led = Led()
    long = led.run(6)
    led.serve(long, 10.0)
    id = led.submit(2)
    for failures in range(1, 4):
        assert granted(led.act(after_s=0.01)) == [id]
        led.say(PlaceFailed(wall_s=1.0, job=id, epoch=failures, reason="no"))
        assert led.look(after_s=0.01) == []
        assert led.look(after_s=RETRY_S[failures - 1] * 0.9) == []
        led.now_s += RETRY_S[failures - 1] * 0.1
    big = led.queue.jobs[led.submit(6)]
    big.tally.place_failures = 1
    led.look(after_s=0.01)
    assert taken(led.look(after_s=60.0)) == []


def test_a_starved_job_is_promoted_and_then_preempts_even_in_its_own_queue() -> None:
    led = Led(starve_limit_s=100.0)
    old = led.run(8)
    led.serve(old, 5.0)
    waiting = led.submit(8)
    led.look()
    assert led.look(after_s=90.0) == []
    proposed = led.act(after_s=20.0)
    assert [(type(command), getattr(command, "job", "")) for command in proposed] == [(Promoted, waiting)]
    assert taken(led.act()) == [(old, "preempted")]


def test_a_time_limit_counts_running_time_of_all_attempts() -> None:
    led = Led()
    id = led.run(2, time_limit_s=30)
    led.serve(id, 59.0)
    assert led.look() == []
    led.serve(id, 60.0)
    assert [type(command) for command in led.look()] == [TimeLimitReached]


def test_quotas_bind_within_one_decision() -> None:
    led = Led(quotas={"alice": 3}, default_quota=2)
    proposed = led.act()
    assert [(command.tenant, command.gpus) for command in proposed if isinstance(command, QuotaSet)] == [
        ("*", 2),
        ("alice", 3),
    ]
    for tenant in ("alice", "alice", "bob", "bob"):
        led.submit(2, tenant)
    assert granted(led.act()) == ["j1", "j3"]


def test_without_a_living_host_nothing_is_granted() -> None:
    led = Led()
    led.submit(1, gpus_per_worker=0)
    assert led.look(()) == []
    assert granted(led.look()) == ["j1"]


def test_between_two_looks_the_log_may_be_ahead_and_after_one_nothing_may_be_wrong() -> None:
    led = Led()
    led.run(2)
    led.leader.check()
    led.submit(3)
    led.leader.check()
    led.look()
    led.leader.capacity.placing += 1
    with pytest.raises(AssertionError, match="placing"):
        led.leader.check()
