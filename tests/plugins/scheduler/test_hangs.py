"""A rank that is stuck: who is told, when, and what its host does about it."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.events import Send
from covey.core.ids import HostId, JobId
from plugins.facts import HeartbeatHeard, RanksAwaited
from plugins.scheduler.machine.gang.hangs import NEXT_S, Hangs
from plugins.scheduler.machine.gang.rank_signs import RankSigns
from plugins.scheduler.messages.wire import GangNowAnswer, GangStands, RankHangs, RankNow, StacksWanted
from plugins.scheduler.policy.carrying import first_carried
from plugins.scheduler.policy.hang import StuckGang, StuckRank, judged, stuck
from plugins.scheduler.service.ranks.hangs import STACKS_S
from tests.plugins.scheduler.rack import Rack, until
from tests.plugins.scheduler.test_replacing import Healing
from tests.virtual_time import play

H1, H2 = HostId("h1"), HostId("h2")


def test_the_lowest_rank_that_is_awaited_for_too_long_is_stuck() -> None:
    assert stuck([3, 2], 4, 10.0, 10.0) == 2
    assert stuck([3, 2], 4, 10.0, 10.0, asked=[2]) == 3
    assert stuck([3, 2], 4, 10.0, 10.0, asked=[2, 3]) is None
    assert stuck([2], 4, 9.9, 10.0) is None
    assert stuck([2], 4, 1e6, None) is None, "nobody said how long is too long"
    assert stuck([0, 1], 2, 1e6, 10.0) is None, "where all are awaited, nobody waits"


class Waiting:
    """A gang of four on h1 and h2, and the machine of the host that sums it."""

    def __init__(self, **spec: Any) -> None:
        self.told = Healing(**{"hang_s": 30.0, **spec})
        self.machine = Hangs(self.told.queue)
        self.now_s = 100.0

    def wait(self, *ranks: int, waits_s: float = 31.0, after_s: float = 1.0, epoch: int = 1) -> list[Send]:
        self.now_s += after_s
        return list(self.machine.handle(RanksAwaited(self.told.id, epoch, ranks, waits_s), self.now_s))


def asked(sends: list[Send]) -> list[tuple[HostId, int]]:
    return [(send.to, send.message.rank) for send in sends if isinstance(send.message, RankHangs)]


def test_its_host_is_told_and_others_keep_stacks() -> None:
    it = Waiting()
    assert it.wait(3, waits_s=29.0) == []
    sends = it.wait(3)
    assert asked(sends) == [(H2, 3)]
    assert [send.to for send in sends if isinstance(send.message, StacksWanted)] == [H1]
    assert it.wait(3) == it.wait(3, after_s=20.0) == [], "once, and again only when its successor is stuck too"
    assert asked(it.wait(3, after_s=30.0)) == [(H2, 3)]


def test_one_rank_at_a_time() -> None:
    it = Waiting()
    assert asked(it.wait(1, 3)) == [(H1, 1)]
    assert it.wait(1, 3, after_s=NEXT_S - 1.0) == []
    assert asked(it.wait(1, 3, after_s=2.0)) == [(H2, 3)]
    assert it.wait(1, 3, after_s=NEXT_S) == []


def test_a_process_with_four_ranks_that_does_not_step_is_named_once() -> None:
    it = Answering(workers_max=16)
    ranks = it.told.job.start.carried[3]
    assert len(ranks) == 4
    assert asked(it.wait(*ranks)) == [(H2, 3)], "not its first rank alone, and no process for each rank"
    assert it.wait(*ranks) == it.wait(ranks[-1], after_s=20.0) == []
    it = Answering(workers_max=16)
    assert asked(it.wait(ranks[-1])) == [(H2, 3)], "it has pushed for three of them"
    it = Answering(workers_max=16)
    assert it.wait(*range(16)) == [], "where all are awaited, nobody waits"
    assert asked(it.answer(waits(0), waits(1), waits(2), says(3))) == [(H2, 3)], "four processes are all that answer"
    assert it.answer(waits(0), waits(1), waits(2), says(3), after_s=20.0) == []


@pytest.mark.parametrize("spec", [{"hang_s": None}, {"hang_s": 60.0}])
def test_nobody_is_told_before_the_time_that_the_job_gave(spec: dict[str, Any]) -> None:
    assert Waiting(**spec).wait(3) == []


def test_nor_of_another_grant_or_while_others_take_ranks_over() -> None:
    it = Waiting()
    assert it.wait(3, epoch=2) == []
    it.told.lose(H2)
    assert it.wait(3) == [], "the rank is on its way to another host"


# ---- its host --------------------------------------------------------------------------------------------------------

J1 = JobId("j1")


def played(age_s: float, message: RankHangs | StacksWanted, hang_s: float | None = 30.0, **more: Any) -> Any:
    """What h1, which runs both ranks of j1, does when another host says this `age_s` after they began."""

    async def story() -> Any:
        rack = Rack({"h1": 2, "h2": 0, "h3": 0})
        await rack.start()
        spec = {"argv": ["train"], "workers": 2, "gpus_per_worker": 1, "hang_s": hang_s, "pack": "host", **more}
        await rack["h3"].call("submit", spec=spec)
        await until(lambda: rack["h1"].machine.ranks)
        await asyncio.sleep(age_s)
        for _ in range(2):
            await rack["h2"].send("scheduler", H1, message, 1.0)
        await asyncio.sleep(STACKS_S + 1.0)
        rack.check()
        rack.stop()
        return rack["h1"]

    return play(story())


def test_the_host_of_a_stuck_rank_keeps_stacks_and_ends_it_once() -> None:
    host = played(40.0, RankHangs(J1, 1, 1, 31.0))
    (stacks, (*ended, why)) = host.runner.stuck
    assert stacks == (J1, 1) and ended == [J1, 1, 1, 101]
    assert why.startswith("the others waited 31 s for rank 1 (--hang 30 s)")
    (note,) = [reason for _, event, reason, _ in host.notes if event == "rank stuck"]
    assert "process 101 is ended, as told by h2" in note


def test_the_host_of_a_stuck_process_names_the_ranks_that_it_carries() -> None:
    host = played(40.0, RankHangs(J1, 1, 1, 31.0), workers_max=8, pack="few")
    (_, (*ended, why)) = host.runner.stuck
    assert ended == [J1, 1, 1, 101], "once"
    ranks = ", ".join(map(str, first_carried(8, 2)[1]))
    assert why.startswith(f"the others waited 31 s for process 1, which carries ranks {ranks} (--hang 30 s)")


def test_hosts_of_the_other_ranks_keep_stacks_once() -> None:
    assert played(1.0, StacksWanted(J1, 1)).runner.stuck == [(J1, 1)]


@pytest.mark.parametrize(
    ("age_s", "message", "hang_s"),
    [
        (20.0, RankHangs(J1, 1, 1, 31.0), 30.0),  # its process is younger than that: a successor
        (40.0, RankHangs(J1, 1, 1, 29.0), 30.0),  # whoever says so is mistaken about the job
        (40.0, RankHangs(J1, 1, 7, 31.0), 30.0),  # no rank of it
        (40.0, RankHangs(J1, 2, 1, 31.0), 30.0),  # another grant
        (40.0, RankHangs(JobId("j9"), 1, 1, 31.0), 30.0),
        (40.0, RankHangs(J1, 1, 1, 31.0), None),  # nobody asked for that
    ],
)
def test_a_rank_is_not_ended_on_the_word_of_another_host(
    age_s: float, message: RankHangs, hang_s: float | None
) -> None:
    assert played(age_s, message, hang_s).runner.stuck == []
    assert played(age_s, StacksWanted(J1, 1), None).runner.stuck == [(J1, 1)], "stacks end nobody"


# ---- what ranks say of themselves ------------------------------------------------------------------------------------


def says(rank: int, quiet_s: float = 60.0, step: int | None = 7, waits_s: float = 0.0, age_s: float = 900.0) -> RankNow:
    return RankNow(rank, True, age_s, True, step, quiet_s, waits_s, step is not None)


def waits(rank: int, waits_s: float = 40.0) -> RankNow:
    return says(rank, waits_s=waits_s, quiet_s=waits_s)


def silent(rank: int, age_s: float = 900.0) -> RankNow:
    """A rank that never connected to its agent."""
    return RankNow(rank, True, age_s, False)


def over(rank: int, age_s: float = 900.0) -> RankNow:
    return RankNow(rank, False, age_s, False)


def verdict(*ranks: RankNow, hang_s: float = 30.0, before: bool = False) -> StuckRank | StuckGang | None:
    return judged(ranks, len(ranks), hang_s, before)


def named(found: StuckRank | StuckGang | None) -> int | None:
    return found.rank if isinstance(found, StuckRank) else None


def test_the_rank_that_does_not_wait_while_others_do_is_stuck() -> None:
    assert named(verdict(waits(0), waits(1), says(2))) == 2
    assert named(verdict(waits(0), says(1), says(2))) == 1, "the lowest of them"
    assert named(verdict(waits(0), silent(1), waits(2))) == 1, "it hangs in its imports"
    assert verdict(waits(0, 29.0), says(2)) is None, "not yet"
    assert verdict(waits(0), says(2, quiet_s=29.0)) is None, "it steps, evaluates or says that it is alive"
    assert named(verdict(waits(0), says(1, quiet_s=2.0), says(2))) == 2
    assert verdict(waits(0), says(2, age_s=29.0)) is None, "a successor, or its agent began anew"
    assert verdict(waits(0), silent(2, age_s=29.0)) is None
    assert verdict(waits(0), RankNow(2, True, 900.0, True)) is None, "of a covey-job that does not say"


def test_where_all_wait_for_one_another_nobody_can_be_named() -> None:
    found = verdict(waits(0), waits(1, 50.0))
    assert isinstance(found, StuckGang) and found.quiet_s == 40.0 and "for one another" in found.why
    assert isinstance(verdict(waits(0), over(1)), StuckGang), "they wait for one whose process has ended"
    assert verdict(waits(0), over(1, age_s=5.0)) is None


def test_where_all_stand_still_the_one_behind_is_stuck() -> None:
    assert named(verdict(says(0, step=57), says(1, step=56), says(2, step=57))) == 1
    assert isinstance(verdict(says(0, step=57), says(1, step=56), says(2, step=56)), StuckGang), "not two"
    assert verdict(says(0, step=57, quiet_s=10.0), says(1, step=56)) is None, "the others get on"
    found = verdict(says(0, step=57), says(1, step=57))
    assert isinstance(found, StuckGang) and "the last step was 57" in found.why
    assert isinstance(verdict(says(0)), StuckGang), "one rank alone"
    only_rank_0 = verdict(says(0), silent(1), silent(2))
    assert isinstance(only_rank_0, StuckGang), "only rank 0 reports steps: the others cannot be named for that"
    assert verdict(says(0), silent(1), silent(2, age_s=10.0)) is None


def test_a_first_step_may_take_three_times_as_long() -> None:
    loads = says(1, step=None, quiet_s=80.0)
    waiting = RankNow(0, True, 900.0, True, None, 80.0, 80.0)
    assert verdict(waiting, loads) is None, "one rank prepares the data for all"
    waiting = RankNow(0, True, 900.0, True, None, 95.0, 95.0)
    assert named(verdict(waiting, says(1, step=None, quiet_s=91.0))) == 1
    assert named(verdict(waiting, silent(1))) == 1
    assert named(verdict(waiting, msgspec.structs.replace(loads, begun=True))) == 1, "it has had a sum"
    new = [says(rank, step=None, quiet_s=80.0) for rank in range(2)]
    assert verdict(*new, before=True) is None, "it may compile"
    late = [says(rank, step=None, quiet_s=91.0) for rank in range(2)]
    assert isinstance(verdict(*late, before=True), StuckGang)
    assert verdict(*late) is None, "nobody knows that it reports steps at all"


def test_of_a_gang_that_says_nothing_nothing_is_known() -> None:
    assert verdict(silent(0), silent(1)) is None and verdict(silent(0), silent(1), before=True) is None
    assert judged([says(0)], 2, 30.0, True) is None, "a host did not answer"


@given(
    st.lists(
        st.builds(
            RankNow,
            rank=st.integers(0, 5),
            runs=st.booleans(),
            age_s=st.floats(0, 29.0),
            says=st.booleans(),
            step=st.none() | st.integers(0, 3),
            quiet_s=st.none() | st.floats(0, 1e3),
            waits_s=st.floats(0, 29.0),
            begun=st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_nobody_younger_than_the_limit_is_ever_stuck(ranks: list[RankNow]) -> None:
    assert judged(ranks, len(ranks), 30.0, True) is None


# ---- the machine of a gang's first host ------------------------------------------------------------------------------


class Answering(Waiting):
    """What h1, the gang's first host, makes of answers."""

    def answer(self, *ranks: RankNow, after_s: float = 1.0, but: HostId | None = None) -> list[Send]:
        self.now_s += after_s
        answers = {host: GangNowAnswer(True, of) for host, of in ((H1, ranks[:2]), (H2, ranks[2:])) if host != but}
        return list(self.machine.answered(self.told.id, 1, answers, self.now_s))


def test_who_is_stuck_by_what_ranks_say_is_ended_one_at_a_time() -> None:
    it = Answering()
    assert it.answer(waits(0), says(1), waits(2), says(3), but=H2) == [], "h2 does not answer"
    sends = it.answer(waits(0), says(1), waits(2), says(3))
    assert asked(sends) == [(H1, 1)]
    assert [send.to for send in sends if isinstance(send.message, StacksWanted)] == [H2]
    assert it.answer(waits(0), says(1), waits(2), says(3)) == []
    assert asked(it.answer(waits(0), says(1, age_s=5.0), waits(2), says(3), after_s=NEXT_S)) == [(H2, 3)]


def test_a_gang_that_stands_still_is_ended_at_the_host_of_its_lowest_rank() -> None:
    it = Answering()
    sends = it.answer(*(says(rank) for rank in range(4)))
    assert [(send.to, type(send.message)) for send in sends] == [(H2, StacksWanted), (H1, GangStands)]
    assert it.answer(*(says(rank) for rank in range(4))) == [], "once"


def test_ranks_of_a_host_that_reported_their_end_count_as_ended() -> None:
    it = Answering()
    it.told.job.ending.codes = {H2: {2: 0, 3: 0}}
    assert it.answer(waits(0, 400.0), waits(1, 400.0), but=H2) == [], "just now, as far as h1 knows"
    sends = it.answer(waits(0, 400.0), waits(1, 400.0), but=H2, after_s=31.0)
    assert [type(send.message) for send in sends] == [StacksWanted, GangStands]


@pytest.mark.parametrize("disturbed", ["moving", "beside", "other epoch"])
def test_nothing_is_decided_of_a_gang_that_is_disturbed(disturbed: str) -> None:
    it = Answering()
    job = it.told.job
    if disturbed == "moving":
        it.told.move(H2)
    elif disturbed == "beside":
        job.priority.demoted = 1
        job.spec = msgspec.structs.replace(job.spec, job_class="opportunistic")
        job.start.places = tuple(msgspec.structs.replace(place, gpus=("G+1", "H+1")) for place in job.start.places)
    else:
        job.grant.epoch += 1
    assert it.answer(waits(0), waits(1), waits(2), says(3)) == []


# ---- what a host knows of its ranks ----------------------------------------------------------------------------------


class Watched:
    """Two of the gang's ranks on h1, seen for 100 s. Every second counts."""

    def __init__(self) -> None:
        self.told = Healing(hang_s=30.0)
        self.signs = RankSigns(self.told.queue, H1)
        self.pids = {0: 100, 1: 101}
        self.now_s = 1000.0
        self.pass_s(100)

    def pass_s(self, seconds: int, led: bool = True) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            running = {(self.told.id, 1): dict(self.pids)} if self.pids else {}
            self.signs.second(self.now_s, running, led)

    def hear(self, rank: int, quiet_s: float, waits_s: float = 0.0, pid: int = 0, step: int | None = 5) -> None:
        said = HeartbeatHeard(self.told.id, 1, rank, pid or 100 + rank, step, quiet_s, waits_s, True)
        self.signs.heard(said, self.now_s)

    def now(self, *connected: int) -> dict[int, RankNow]:
        answer = self.signs.now(self.told.job, connected, self.now_s)
        return {rank.rank: rank for rank in answer.ranks}


def test_a_host_counts_on_from_what_it_heard_last() -> None:
    it = Watched()
    it.hear(0, quiet_s=3.0, waits_s=2.0)
    it.pass_s(5)
    assert it.now(0) == {0: RankNow(0, True, 104.0, True, 5, 8.0, 7.0, True), 1: RankNow(1, True, 104.0, False)}
    it.pass_s(24)
    assert it.now(0)[0].waits_s == 31.0, "its heartbeats are late"
    it.pass_s(1)
    assert it.now(0)[0] == RankNow(0, True, 129.0, True, 5, 33.0, 0.0, True), "silent: nobody knows for whom it waits"
    it.hear(0, quiet_s=2.0, pid=77)
    assert it.now(0)[0].quiet_s == 2.0, "another process of this rank"
    assert not it.now()[0].says, "it closed its connection"


@pytest.mark.parametrize("disturbed", ["no leader", "stood still", "moved", "new process", "agent began"])
def test_nothing_counts_from_before_what_disturbed_it(disturbed: str) -> None:
    it = Watched()
    it.hear(0, quiet_s=90.0, waits_s=90.0)
    assert it.now(0)[0].quiet_s == 90.0
    if disturbed == "no leader":
        it.pass_s(1, led=False)
    elif disturbed == "stood still":
        it.now_s += 60.0
        it.pass_s(1)
    elif disturbed == "moved":
        it.told.job.healing.healed += 1
        it.pass_s(1)
    elif disturbed == "new process":
        it.pids[0] = 200
        it.pass_s(1)
        assert it.now(0)[0].quiet_s is None, "what its predecessor said is nothing of it"
    else:
        it.signs = RankSigns(it.told.queue, H1)
        it.pass_s(1)
    it.hear(0, quiet_s=90.0, waits_s=90.0, pid=it.pids[0])
    it.pass_s(4)
    now = it.now(0)[0]
    assert (now.age_s, now.quiet_s, now.waits_s) == (4.0, 4.0, 4.0)


def test_a_rank_without_a_process_has_ended_and_a_host_without_any_knows_nothing() -> None:
    it = Watched()
    del it.pids[1]
    it.pass_s(3)
    assert it.now(0)[1] == RankNow(1, False, 2.0, False)
    it.pids.clear()
    it.pass_s(1)
    assert it.now(0) == {}
    it = Watched()
    it.told.move(H2)
    assert not it.signs.now(it.told.job, (0, 1), it.now_s).known


# ---- on a rack -------------------------------------------------------------------------------------------------------


class Peer:
    def __init__(self, rank: int, epoch: int = 1) -> None:
        self.rank, self.epoch = rank, epoch


def heartbeat(rank: int, step: int | None, quiet_s: float, waits_s: float) -> HeartbeatHeard:
    return HeartbeatHeard(J1, 1, rank, 100 + rank, step, quiet_s, waits_s, step is not None)


def lived(beats: Any, s: float = 60.0, step_s: float | None = None, **spec: Any) -> Any:
    """Let a gang with a rank on each of h1 and h2 live. `beats(rank, now_s)`: each second, a heartbeat's step, quiet
    and waits or None. `step_s`: how long its steps are known to take."""

    async def story() -> Any:
        rack = Rack({"h1": 1, "h2": 1, "h3": 0})
        await rack.start()
        asked = {"argv": ["train"], "workers": 2, "gpus_per_worker": 1, "hang_s": 20.0, **spec}
        await rack["h3"].call("submit", spec=asked)
        await until(lambda: rack["h1"].machine.ranks and rack["h2"].machine.ranks)
        where = {rank: place.host for place in rack.job("j1").start.places for rank in place.ranks}
        for rank, host in where.items():
            if beats(rank, 0) is not None:
                rack.hosts[host].peers = lambda job, rank=rank: [Peer(rank)]  # type: ignore[method-assign,misc]
        for host in rack.hosts.values():
            host.service.stuck.step_s = lambda job, epoch: step_s
        for second in range(round(s)):
            for rank, host in where.items():
                if (beat := beats(rank, second)) is not None and (J1, 1) in rack.hosts[host].runner.running():
                    rack.hosts[host].publish(heartbeat(rank, *beat))
            await asyncio.sleep(1.0)
        view = await rack["h3"].call("job", id="j1")
        rack.check()
        rack.stop()
        return rack, view

    return play(story())


def test_a_rank_that_hangs_in_its_imports_is_ended() -> None:
    rack, _ = lived(lambda rank, s: (None, s, s) if rank == 0 else None, s=80.0)
    host = rack.job("j1").start.places[1].host
    stacks, (*ended, why), *_ = rack.hosts[host].runner.stuck
    assert (
        stacks == (J1, 1)
        and ended == [J1, 1, 1, 101]
        and "for rank 1 (--hang 20 s), and it has not joined its agent" in why
    )


def test_a_gang_that_stands_still_fails_with_the_reason() -> None:
    rack, view = lived(lambda rank, s: (9, s, 0.0))
    assert view.state == "failed" and "no rank finished a step" in view.reason and "the last step was 9" in view.reason
    assert all((J1, 1) in host.runner.stuck for host in (rack["h1"], rack["h2"])), "stacks are kept first"


def test_who_makes_no_progress_is_named_by_a_learnt_time_and_left_alone() -> None:
    def beats(rank: int, s: float) -> tuple[int, float, float]:
        return (9, s, s if rank == 0 else 0.0)

    def lines(rack: Rack, event: str) -> list[str]:
        return [line[2] for host in rack.hosts.values() for line in host.notes if line[1] == event]

    for s, step_s in ((50.0, 0.5), (90.0, None), (90.0, 10.0)):
        rack, view = lived(beats, s, step_s, hang_s=None)
        assert view.losses.stuck == "" and not lines(rack, "no progress"), "too soon, or nothing is known of its steps"
    rack, view = lived(beats, 100.0, 0.5, hang_s=None)
    host = rack.job("j1").start.places[1].host
    assert f"for rank 1 on {host}: its last sign of life is" in view.losses.stuck and "0.5 s" in view.losses.stuck
    assert view.state == "running" and len(lines(rack, "no progress")) == 1
    assert all(host.runner.stuck == [(J1, 1)] for host in (rack["h1"], rack["h2"])), "stacks are kept, nobody is ended"
    rack, view = lived(lambda rank, s: beats(rank, s) if s < 80 else (int(s), 0.5, 0.0), 100.0, 0.5, hang_s=None)
    assert view.losses.stuck == "" and len(lines(rack, "progress again")) == 1


def test_and_runs_again_with_retries() -> None:
    _, view = lived(lambda rank, s: (9, s, 0.0), s=40.0, retries=1)
    assert (view.state, view.tally.attempt, view.tally.failures) == ("running", 2, 1)


def test_one_that_steps_evaluates_or_says_nothing_is_left_alone() -> None:
    _, view = lived(lambda rank, s: (s, 0.5, 0.0), s=90.0)
    assert (view.state, view.losses.hang_unseen) == ("running", "")
    _, view = lived(lambda rank, s: None, s=90.0)
    assert view.state == "running" and view.losses.hang_unseen == "--hang does not watch this job: it reports no steps"
    _, view = lived(lambda rank, s: (None, s, 0.0), s=90.0)
    assert view.state == "running" and view.losses.hang_unseen.endswith("it has reported no step yet")


def test_a_rank_that_waits_for_a_neighbour_is_not_ended_for_an_aggregator() -> None:
    """The rank has not pushed, since a neighbour of its does not keep what is its own; an aggregator sees no
    difference."""

    async def story() -> Any:
        rack = Rack({"h1": 2, "h2": 0, "h3": 0})
        await rack.start()
        spec = {"argv": ["train"], "workers": 2, "gpus_per_worker": 1, "hang_s": 20.0, "pack": "host"}
        await rack["h3"].call("submit", spec=spec)
        await until(lambda: rack["h1"].machine.ranks)
        rack["h1"].peers = lambda job: [Peer(0), Peer(1)]  # type: ignore[method-assign]
        for second in range(26):
            rack["h1"].publish(heartbeat(0, 7, second, second + 0.1))
            await asyncio.sleep(1.0)
        for rank in (0, 1):
            await rack["h2"].send("scheduler", H1, RankHangs(J1, 1, rank, 24.0), 1.0)
        await asyncio.sleep(STACKS_S + 1.0)
        rack.stop()
        return [said[2] for said in rack["h1"].runner.stuck if len(said) > 2]

    assert set(play(story())) == {1}


def test_what_an_aggregator_asks_for_in_vain_hides_nobody_who_is_stuck() -> None:
    it = Answering(hang_s=5.0)
    for _ in range(3):
        assert asked(it.wait(0, 3, after_s=6.0)) == [(H1, 0)], "it waits for rank 3, and its host leaves it alone"
    assert asked(it.answer(waits(0), waits(1), waits(2), says(3))) == [(H2, 3)]
