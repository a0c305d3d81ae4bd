"""Leases of ranks: what a leader promises, when it may take a job back, and how a host asks for them."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.rackworld import SimRack
from covey.core.errors import Refused
from covey.core.ids import HostId, JobId
from plugins.scheduler.machine.leader.leader import RackHost
from plugins.scheduler.machine.leader.leases import LeaseAsked, over_there
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.messages.commands import Applied, Leads, NotApplied, PlacesLost, TakenBack, pack
from plugins.scheduler.messages.wire import Leaderless, LeasesRenewed, RenewLeases
from plugins.scheduler.policy.leases import DRIFT, RENEWALS, SLACK_S, terms
from plugins.scheduler.policy.settings import SchedulerSettings
from tests.plugins.scheduler.rack import FOUR, Rack, on_a_rack, operator, submit, until
from tests.plugins.scheduler.test_leader import H1, H2, Led, taken
from tests.plugins.scheduler.test_queue import Told
from tests.virtual_time import play

OVER_S = terms(60.0).over_s
H3 = HostId("h3")


def gone(for_s: float) -> tuple[RackHost, ...]:
    return (RackHost(H1, 4), RackHost(H2, 4, gone_s=for_s))


def ask(led: Led, host: HostId, *jobs: JobId) -> list[JobId]:
    grants = tuple((id, led.queue.jobs[id].grant.epoch) for id in jobs)
    (given,) = led.leader.leases.handle(LeaseAsked(host, grants), led.now_s)
    led.plain.confirm(host, grants, led.now_s)
    return [id for id, _ in given.grants]


@given(st.floats(0.1, 1e6))
def test_ranks_are_gone_before_a_leader_may_grant_again_whatever_two_clocks_do(lost_after_s: float) -> None:
    told = terms(lost_after_s)
    true_s = (told.lease_s + told.grace_s) / (1 - DRIFT)  # by a host whose clock is slow
    assert true_s * (1 + DRIFT) + SLACK_S <= told.over_s * (1 + 1e-9), "by a leader whose clock is fast"


def test_by_default_an_agent_may_be_away_for_30_s_and_a_leader_waits_for_a_minute() -> None:
    told = terms(SchedulerSettings().host_lost_after_s)
    assert told.lease_s - told.lease_s / RENEWALS >= 25.0, "its last renewal may be one interval old"
    assert told.over_s < SchedulerSettings().host_lost_after_s


# ---- the leader ------------------------------------------------------------------------------------------------------


def test_a_host_confirmed_since_gossip_lost_it_keeps_its_jobs_until_that_lease_ends() -> None:
    led = Led()
    id = led.run(2, host=H2)
    led.look(after_s=200.0)
    assert ask(led, H2, id) == [id]
    assert taken(led.look(gone(100.0), after_s=OVER_S - 1)) == []
    assert taken(led.act(gone(102.0), after_s=2.0)) == [(id, "host lost")]


def test_a_lease_counts_from_its_last_answer_and_not_from_its_first() -> None:
    """A host that asks again and again is confirmed anew each time."""
    led = Led()
    id = led.run(2, host=H2)
    led.look(after_s=200.0)
    for _ in range(4):
        led.now_s += OVER_S / 2
        assert ask(led, H2, id) == [id]
    assert led.leader.leases.over_in_s(H2, led.now_s) == pytest.approx(OVER_S)
    assert led.leader.leases.still_in_s(H2, led.now_s) == pytest.approx(terms(60.0).paused_s)
    assert taken(led.look(gone(100.0), after_s=OVER_S - 1)) == []
    assert taken(led.act(gone(102.0), after_s=2.0)) == [(id, "host lost")]


def test_a_question_that_asks_for_nothing_of_ours_is_no_confirmation() -> None:
    """Grants of an earlier epoch, and jobs that nobody knows, arrive late: the lease of the host stays as it is."""
    led = Led()
    id = led.run(2, host=H2)
    led.look(after_s=200.0)
    assert ask(led, H2, id) == [id]
    until_s = led.now_s + OVER_S
    led.now_s += 10.0
    epoch = led.queue.jobs[id].grant.epoch
    for grants in ((), ((id, epoch - 1),), ((id, epoch + 1),), ((JobId("j99"), 1),)):
        (given,) = led.leader.leases.handle(LeaseAsked(H2, grants), led.now_s)
        assert given.grants == (), grants
    assert led.leader.leases.over_in_s(H2, led.now_s) == pytest.approx(until_s - led.now_s)


def test_a_leader_begins_once_however_often_it_is_told_so() -> None:
    """What earlier leaders gave is over some time after its election, not after its last question."""
    led = Led()
    id = led.run(2, host=H2)
    led.look(after_s=200.0)
    began_s = led.leader.leases.led_s
    led.now_s += 30.0
    ask(led, H2, id)
    assert led.leader.leases.led_s == began_s is not None


def test_a_new_leader_takes_no_host_for_lost_before_earlier_leaders_leases_end() -> None:
    led = Led()
    id = led.run(2, host=H2)
    led.look(after_s=200.0)
    led.leader.forget()
    led.plain.forget()
    assert taken(led.look(gone(500.0))) == []
    assert taken(led.look(gone(500.0), after_s=OVER_S - 1)) == []
    assert taken(led.look(gone(500.0), after_s=2.0)) == [(id, "host lost")]


def test_a_new_leader_with_shorter_leases_waits_for_the_longer_ones_before_it() -> None:
    led = Led(host_lost_after_s=20.0)
    id = led.run(2, host=H2)
    led.say(Leads(wall_s=1.0, term=3, leases_over_s=100.0, pauses_over_s=5.0))
    led.leader.forget()
    led.plain.forget()
    assert taken(led.act(gone(500.0))) == [] and taken(led.act(gone(500.0), after_s=99.0)) == []
    proposed = led.look(gone(500.0), after_s=2.0)
    assert taken(proposed) == [(id, "host lost")]
    assert [command.leases_over_s for command in proposed if isinstance(command, Leads)] == [terms(20.0).over_s]


def test_a_grant_about_to_be_taken_back_is_not_confirmed_until_the_log_decided() -> None:
    led = Led()
    id, other = led.run(2, host=H2), led.run(1, host=H2, on_lost="keep")
    led.look(after_s=200.0)
    assert taken(led.look(gone(61.0))) == [(id, "host lost")]
    assert ask(led, H2, id, other) == [other], "its ranks there had not begun, and must not begin any more"
    assert taken(led.look()) == [(id, "host lost")], "also when the host is back: that it is lost was not refused yet"
    assert taken(led.act()) == [(id, "host lost")] and led.queue.jobs[id].state == "queued"
    assert taken(led.look()) == []


def test_a_job_that_is_to_be_kept_is_not_taken_back_however_long_its_host_is_away() -> None:
    led = Led()
    id = led.run(2, host=H2, on_lost="keep")
    assert taken(led.look(gone(60.0), after_s=61.0)) == [] and taken(led.look(gone(1e6), after_s=1e6)) == []
    assert led.queue.jobs[id].state == "running"


def test_only_ranks_that_the_log_still_awaits_on_that_host_are_confirmed() -> None:
    led = Led()
    id = led.run(2, host=H2)
    assert ask(led, H1, id) == [] and ask(led, H3, id) == [] and ask(led, H2, id) == [id]
    (given,) = led.leader.leases.handle(LeaseAsked(H2, ((id, 0), (id, 2), (JobId("j9"), 1))), led.now_s)
    assert given.grants == ()


# ---- the log ---------------------------------------------------------------------------------------------------------


def lost(told: Told, id: JobId, term: int = 0) -> Any:
    epoch = told[id].grant.epoch
    return told.say(
        TakenBack(wall_s=5.0, job=id, epoch=epoch, cause="host lost", reason="gone", lost=(H1, H2), term=term)
    )


def test_what_an_earlier_leader_judged_by_its_leases_is_void_once_another_one_leads() -> None:
    told = Told()
    id = told.run()
    told.say(Leads(wall_s=1.0, term=4, leases_over_s=50.0, pauses_over_s=5.0))
    assert isinstance(told.say(Leads(wall_s=1.0, term=3, leases_over_s=9.0, pauses_over_s=5.0)), NotApplied)
    assert isinstance(lost(told, id, 3), NotApplied) and told[id].state == "running"
    again = JobTable()
    again.restore(told.queue.snapshot())
    assert (again.leading_term, again.leases_over_s) == (4, 50.0)
    assert isinstance(lost(told, id, 4), Applied) and told[id].state == "queued"


def test_each_cause_of_another_start_has_a_count_and_a_limit_of_its_own() -> None:
    told = Told()
    id = told.run(retries=1, retries_lost=1, retries_again=1)

    def start() -> None:
        assert told[id].state == "queued", told[id].reason
        told.grant(id)
        told.place(id, *told[id].start.places)

    def taken_back(cause: Any, hosts: tuple[HostId, ...] = ()) -> None:
        epoch = told[id].grant.epoch
        told.say(TakenBack(wall_s=5.0, job=id, epoch=epoch, cause=cause, reason="r", lost=hosts))

    for _ in range(6):
        taken_back("preempted")
        told.report(id, H1, {0: -15}, asked=True)
        told.report(id, H2, {1: -15}, asked=True)
        start()
    told.report(id, H1, {0: 75})
    told.report(id, H2, {1: 0})
    start()
    taken_back("host lost", (H1, H2))
    start()
    told.report(id, H1, {0: 3})
    told.report(id, H2, {1: -15}, asked=True)
    start()
    job = told[id]
    assert (job.tally.preemptions, job.tally.requeues, job.tally.hosts_lost, job.tally.failures, job.tally.attempt) == (
        6,
        1,
        1,
        1,
        10,
    )
    told.report(id, H1, {0: 255}, lost=True, reason="the machine restarted")
    told.report(id, H2, {1: -15}, asked=True)
    assert (told[id].state, told[id].ending.exit_code) == ("failed", 255)
    assert told[id].reason.endswith("its hosts were lost 2 times, and at most 1 restarts are allowed for that")


def test_a_job_without_retries_fails_at_its_first_failure_and_says_only_that() -> None:
    told = Told()
    id = told.run()
    told.report(id, H1, {0: 3})
    told.report(id, H2, {1: -15}, asked=True)
    assert (told[id].state, told[id].ending.exit_code, told[id].reason) == ("failed", 3, "rank 0 on h1 exited with 3")


def test_ranks_that_saved_and_exited_with_0_as_their_lease_ran_out_start_again() -> None:
    told = Told()
    id = told.run()
    told.report(id, H1, {0: 0}, lost=True, reason="no leader has confirmed these ranks for 30 s")
    told.report(id, H2, {1: 0}, lost=True, reason="no leader has confirmed these ranks for 30 s")
    assert (told[id].state, told[id].tally.hosts_lost, told[id].tally.failures) == ("queued", 1, 0)


# ---- hosts -----------------------------------------------------------------------------------------------------------


def at_work(rack: Rack) -> int:
    return sum(len(spec.ranks) for host in rack.hosts.values() for spec in host.machine.ranks.values())


@on_a_rack()
async def test_ranks_start_under_a_lease_that_is_renewed_while_they_run(rack: Rack) -> None:
    await submit(rack)
    await until(lambda: at_work(rack) == 4)
    host = rack.hosts[rack.job("j1").start.places[0].host]
    first = host.machine.ranks[JobId("j1"), 1].lease
    assert first is not None and (first.lease_s, first.grace_s) == (30.0, 15.0)
    await asyncio.sleep(100)
    assert host.env.clock.boot_s() - host.machine.leases[JobId("j1"), 1].asked_s <= 30.0 / RENEWALS + 1


def test_two_jobs_whose_supervisors_start_slowly_do_not_keep_their_agent_busy() -> None:
    """Found so: each time one of them was given its lease that of the other was dropped, and it asked at once, without
    end."""
    with SimRack(1, hosts=1) as rack:
        rack.start()
        rack.settle()
        rack.hosts["h1"].load_s = 3.0
        for number in range(2):
            spec = {"argv": ["sleeper", "1"], "workers": 1, "gpus_per_worker": 1, "cwd": "/"}
            rack.submit(spec, f"slowly-started-{number}")
        before = rack.world.steps
        rack.run(2.0)
        assert len(rack.hosts["h1"].find("sup-j1-1") + rack.hosts["h1"].find("sup-j2-1")) == 2
        assert rack.world.steps - before < 5000
        rack.run(6.0)
        assert {job.state for job in rack.plugin("h1", "scheduler").queue.jobs.values()} == {"done"}


@on_a_rack()
async def test_a_job_that_is_to_be_kept_gets_no_lease(rack: Rack) -> None:
    await submit(rack, on_lost="keep")
    await until(lambda: at_work(rack) == 4)
    await asyncio.sleep(20)
    for host in rack.hosts.values():
        assert all(spec.lease is None for spec in host.machine.ranks.values()) and not host.machine.leases


@on_a_rack(gpus={"gpu1": 2})
async def test_a_host_that_is_the_only_voter_gives_its_ranks_leases_without_end(rack: Rack) -> None:
    await submit(rack, workers=2)
    await until(lambda: at_work(rack) == 2)
    lease = rack["gpu1"].machine.ranks[JobId("j1"), 1].lease
    assert lease is not None and lease.lease_s is None


@on_a_rack()
async def test_a_host_that_hears_the_log_and_is_heard_by_nobody_starts_nothing(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unheard(*_: Any) -> Any:
        raise TimeoutError

    async def silent(_: Any) -> None:
        return None

    monkeypatch.setattr(rack["gpu3"], "ask", unheard)
    rack["gpu3"].service.leases._here = silent
    await submit(rack, workers=8)
    await until(lambda: at_work(rack) == 6)
    await asyncio.sleep(30)
    assert not rack["gpu3"].machine.ranks and rack.job("j1", "gpu3").state == "running"
    monkeypatch.undo()
    await until(lambda: at_work(rack) == 8)


@on_a_rack()
async def test_a_host_that_the_leader_does_not_answer_asks_through_others(rack: Rack) -> None:
    rack.lead("gpu1")
    await submit(rack, workers=8)
    await until(lambda: at_work(rack) == 8)
    connected = rack.connected
    rack.connected = lambda one, other: {one, other} != {"gpu1", "gpu4"} and connected(one, other)  # type: ignore[method-assign]
    await asyncio.sleep(120)
    now_s = rack["gpu4"].env.clock.boot_s()
    assert now_s - rack["gpu4"].machine.leases[JobId("j1"), 1].asked_s < 20.0


@on_a_rack()
async def test_only_who_leads_confirms_and_a_relayed_question_is_not_relayed_again(rack: Rack) -> None:
    await submit(rack, workers=8)
    await until(lambda: at_work(rack) == 8)
    question = RenewLeases(HostId("gpu4"), ((JobId("j1"), 1),))
    answer = await rack["gpu2"].service.answer(HostId("gpu4"), question)
    assert isinstance(answer, LeasesRenewed) and answer.grants == question.grants
    with pytest.raises(Refused, match="it is not the leader"):
        await rack["gpu2"].service.answer(HostId("gpu4"), RenewLeases(question.host, question.grants, True))
    rack.lead(None)
    assert await rack["gpu1"].service.answer(HostId("gpu4"), question) == Leaderless()
    with pytest.raises(Refused):
        await rack["gpu4"].service.answer(HostId("gpu1"), question)  # which does not vote


@on_a_rack()
async def test_ranks_go_on_while_a_majority_knows_no_leader_and_a_minority_proves_nothing(rack: Rack) -> None:
    rack.voters = ["gpu1", "gpu2", "gpu3"]
    await submit(rack, workers=8)
    await until(lambda: at_work(rack) == 8)
    rack.lead(None)

    def confirmed_s() -> float:
        return rack["gpu4"].env.clock.boot_s() - rack["gpu4"].machine.leases[JobId("j1"), 1].asked_s

    await asyncio.sleep(100)
    assert confirmed_s() < 20.0, "nobody leads, and all three say so"
    rack["gpu1"].die()
    await asyncio.sleep(100)
    assert confirmed_s() < 20.0, "two of three are enough"
    rack.cut_off("gpu2")
    await asyncio.sleep(100)
    assert confirmed_s() > 80.0, "the other two may have elected one of them"
    assert await rack["gpu3"].service.answer(HostId("gpu4"), RenewLeases(HostId("gpu4"), ())) == Leaderless()


@pytest.mark.parametrize("told_by", ["gpu1", "gpu4"])
@on_a_rack()
async def test_while_nobody_leads_what_may_have_been_taken_back_is_not_confirmed(rack: Rack, told_by: str) -> None:
    """It is taken back by the entry of one voter, or this host's own, of which it is not known yet whether it was
    decided."""
    rack.voters = ["gpu1", "gpu2", "gpu3"]
    await submit(rack, workers=8)
    await until(lambda: at_work(rack) == 8)
    others = TakenBack(wall_s=0.0, job=JobId("j9"), epoch=1, cause="host lost", reason="tried")
    rack[told_by].log.tail.append(pack(others))
    rack.lead(None)

    def confirmed_s() -> float:
        return rack["gpu4"].env.clock.boot_s() - rack["gpu4"].machine.leases[JobId("j1"), 1].asked_s

    await asyncio.sleep(50)
    assert confirmed_s() < 20.0, "another job's"
    rack[told_by].log.tail.append(pack(msgspec.structs.replace(others, job=JobId("j1"))))
    await asyncio.sleep(50)
    assert confirmed_s() > 30.0


def test_what_is_over_on_a_host_by_one_copy_of_the_log() -> None:
    led = Led()
    id = led.run(2, host=H2)
    jobs, epoch = led.queue.jobs, led.queue.jobs[id].grant.epoch
    assert over_there(jobs, (), H2, ((id, epoch),)) == ()
    assert over_there(jobs, (), H3, ((id, epoch),)) == ((id, epoch),), "its ranks are elsewhere by now"
    assert over_there(jobs, (), H2, ((id, epoch - 1),)) == ((id, epoch - 1),), "another grant has come"
    assert over_there(jobs, (), H3, ((id, epoch + 1), (JobId("j7"), 1))) == (), "this copy is behind"
    lost = PlacesLost(wall_s=0.0, job=id, epoch=epoch, hosts=(H3,), coordinator=H1, reason="lost")
    assert over_there(jobs, (lost,), H2, ((id, epoch),)) == ((id, epoch),), "whichever host it is about"


@on_a_rack()
async def test_a_grant_is_not_begun_while_nobody_leads(rack: Rack) -> None:
    rack.voters = ["gpu1", "gpu2", "gpu3"]
    leases = rack["gpu4"].service.leases
    rack.lead(None)
    assert leases.valid((JobId("j1"), 1)) is None
    await asyncio.sleep(30)
    assert leases.valid((JobId("j1"), 1)) is None


def test_a_host_that_knows_too_little_of_the_log_does_not_make_a_loss_a_failure() -> None:
    """Found so: after a reboot the host decided by a copy that did not show the job as running: `failed`, exit 255."""

    async def story(rack: Rack) -> None:
        await submit(rack, workers=4)
        await until(lambda: at_work(rack) == 4)
        place = rack.job("j1").start.places[0]
        host = rack.hosts[place.host]
        host.service.queue.jobs[JobId("j1")].state = "placing"
        host.runner.end(JobId("j1"), 1, dict.fromkeys(place.ranks, 255), "the machine restarted", lost=True)
        other = next(name for name in rack.hosts if name != place.host)
        await until(lambda: rack.job("j1", other).tally.hosts_lost == 1)
        assert rack.job("j1", other).tally.failures == 0
        host.service.queue.jobs[JobId("j1")] = rack.job("j1", other)
        await until(lambda: (rack.job("j1", other).tally.attempt, rack.job("j1", other).state) == (2, "running"))

    async def alone() -> None:
        rack = Rack(FOUR)
        await rack.start()
        try:
            await story(rack)
        finally:
            rack.stop()
            await asyncio.sleep(0)

    play(alone())


# ---- what people see -------------------------------------------------------------------------------------------------


@on_a_rack()
async def test_a_job_whose_host_is_away_says_for_whom_it_waits_and_when_it_is_taken_back(rack: Rack) -> None:
    await submit(rack, workers=8)
    await until(lambda: at_work(rack) == 8)
    rack.cut_off("gpu3")
    await asyncio.sleep(11)  # and a second for which gpu3 is asked
    view = await rack["gpu1"].call("job", id="j1")
    assert view.reason == "waits for gpu3, gone for 12 s; taken back in 48 s"
    assert {rank.state for rank in view.ranks if rank.host == "gpu3"} == {"away"}
    (row,) = await rack["gpu1"].call("jobs")
    assert row.reason.startswith("waits for gpu3, gone for") and set(row.losses.away) == {"gpu3"}
    rack.heal("gpu3")
    await asyncio.sleep(2)
    assert "waits for" not in (await rack["gpu1"].call("job", id="j1")).reason


@on_a_rack()
async def test_a_kept_job_waits_until_a_person_gives_its_host_up(rack: Rack) -> None:
    await submit(rack, workers=7, on_lost="keep", gpus_per_worker=0)
    await until(lambda: at_work(rack) == 7)
    name = str(rack.job("j1").start.places[-1].host)
    ask = next(str(host) for host in rack.hosts if host != name)
    rack.lead(ask)
    with pytest.raises(Refused, match="was not given up"):
        await rack[ask].call("give_up", id=name)
    with pytest.raises(Refused, match="no host"):
        await rack[ask].call("give_up", id="gpu9")
    rack.cut_off(name)
    await asyncio.sleep(200)
    view = await rack[ask].call("job", id="j1")
    assert view.state == "running" and f"agentctl hosts give-up {name}" in view.reason
    rack.hosts[HostId(name)].die()
    rack.hosts[HostId(name)].machine.ranks.clear()
    (taken_back,) = await rack[ask].call("give_up", id=name, asker=operator("alice"))
    assert taken_back.id == "j1" and taken_back.tally.hosts_lost == 1
    await until(lambda: (rack.job("j1", ask).tally.attempt, rack.job("j1", ask).state) == (2, "running"))
    assert name not in [place.host for place in rack.job("j1", ask).start.places]
