"""Tables go to the hosts that somebody said (`JobPlaced.owners`): to a rank there, or to the aggd of a host that has no
rank of the job."""

from typing import Any

import msgspec

from chaos.rackworld import SimRack
from covey.core.events import Heard
from covey.core.ids import HostId, JobId
from plugins.aggregator.machine.coordinator import JobCoordinator
from plugins.aggregator.machine.direct_tables import NO_RANKS
from plugins.aggregator.machine.events import GangPlaced, QuestionAnswered
from plugins.aggregator.messages import Assigned, Declined, GetOwner, Handover, KnownOwner, Offer
from plugins.aggregator.service.tables import JobTables
from plugins.facts import JobPlaced, Place
from tests.plugins.aggregator.play import JOB, A, B, C, Play, rack, sends
from tests.plugins.aggregator.ranks import Job
from tests.plugins.aggregator.test_direct import HOSTS, by, direct_rack
from tests.plugins.aggregator.test_direct_tables import assigned

PLACES = tuple(Place(HostId(f"h{at}"), (at,), ()) for at in range(3))
H0, H1, H2, H9 = (HostId(f"h{at}") for at in (0, 1, 2, 9))
PLACED = GangPlaced(JOB, 1, 2, (Place(A, (0,), ()), Place(B, (1,), ())), A, True, True)


def said(host: HostId, since: int = 1) -> GangPlaced:
    """The job's gang once somebody said that this host is to own the table."""
    return msgspec.structs.replace(PLACED, prefers=host, said_since=since)


def summed_by_a() -> tuple[Play, Assigned]:
    """The coordinator of a job with ranks on a and b; a rank on a sums its table. c has an aggd."""
    play = Play(JobCoordinator(A, lambda size: bytes(size)))
    play(rack())
    play(PLACED)
    for host in (A, B):
        play(QuestionAnswered(host, GetOwner(JOB), KnownOwner(None)))
    return play, assigned(play)


def offers(actions: list[Any]) -> list[tuple[HostId, bool]]:
    """Hosts that the table is offered to, and whether to a rank there."""
    return [(to, message.direct) for to, message in sends(actions) if isinstance(message, Offer)]


# ---- the gangs of tables ---------------------------------------------------------------------------------------------


def test_each_table_prefers_the_host_that_somebody_said_else_that_of_its_number() -> None:
    fact = JobPlaced(JobId("j1"), 1, "t", 3, PLACES, 4, 0, 5, {}, (H2, H9, HostId(""), H0), 4)
    _, others = JobTables(direct=True).place(fact)
    assert [(gang.prefers, gang.said_since) for gang in others] == [(H2, 4), (H9, 4), (H2, 0), (H0, 4)]
    assert all(gang.stays and gang.direct and gang.config == 5 for gang in others)
    opened, _ = JobTables().place(fact)
    assert [(gang.prefers, gang.stays) for gang in opened] == [(H2, True)], "one table alone stays where somebody said"
    opened, _ = JobTables().place(msgspec.structs.replace(fact, owners=(), owners_since=0))
    assert [(gang.prefers, gang.stays) for gang in opened] == [(H0, False)]


# ---- where its coordinator takes a table -----------------------------------------------------------------------------


def test_a_table_goes_at_once_to_a_rank_of_the_host_that_somebody_says() -> None:
    play, told = summed_by_a()
    assert offers(play(said(B))) == []
    assert offers(play(rack())) == [(B, True)], "and its owner goes on meanwhile"
    assert play.machine.jobs[JOB].assigned == told
    assert assigned(play, B).owner == B
    play.now_s += 100
    assert offers(play(rack())) == []


def test_a_table_goes_to_the_aggd_of_a_host_without_ranks_of_the_job() -> None:
    play, _ = summed_by_a()
    play(said(C))
    assert offers(play(rack(sums=(B, C)))) == [(C, False)]
    now = assigned(play, C)
    assert (now.owner, now.direct, now.handed_over) == (C, False, True)
    for _ in range(100):
        play.now_s += 30
        assert offers(play(rack(sums=(B, C)))) == [], "no rank is asked to take it home"


def test_a_host_that_cannot_leaves_the_table_where_it_is_and_is_asked_ever_less() -> None:
    play, told = summed_by_a()
    play(said(C))
    asked_s = []
    for _ in range(200):
        for to, _ in offers(play(rack())):
            asked_s.append(play.now_s)
            play(Heard(to, Declined(JOB, play.machine.jobs[JOB].epoch, "no memory is left")))
        assert play.machine.jobs[JOB].assigned == told, "it is never without an owner"
        play.now_s += 1
    assert [at_s - asked_s[0] for at_s in asked_s] == [0, 20, 60, 140]


def test_a_table_whose_owner_is_another_by_now_does_not_wait_for_the_one_before() -> None:
    """Tables go along with processes that move; nobody says their owners anew."""
    play, _ = summed_by_a()
    play(said(C))
    for _ in range(100):
        for to, _ in offers(play(rack())):
            play(Heard(to, Declined(JOB, play.machine.jobs[JOB].epoch, "no memory is left")))
        play.now_s += 1
    play(said(B))
    assert offers(play(rack())) == [(B, True)]


def test_a_table_comes_back_to_ranks_when_nobody_says_an_owner_any_more() -> None:
    play, _ = summed_by_a()
    play(said(C))
    play(rack())
    assigned(play, C)
    play(PLACED)
    assert offers(play(rack())) == [(A, True)]


def test_a_table_whose_said_owner_is_gone_goes_to_ranks_and_back_when_it_returns() -> None:
    play, _ = summed_by_a()
    play(said(C))
    play(rack())
    assigned(play, C)
    assert offers(play(rack(C, sums=()))) == [(A, True)]
    assert assigned(play, A).direct
    play.now_s += 11
    assert offers(play(rack())) == [(C, False)]


def test_a_persons_wish_holds_until_somebody_says_owners_again() -> None:
    play, told = summed_by_a()
    play(said(A))
    assert offers(play(Heard(A, Handover(JOB, told.epoch, B, "moved by request to b", wished=True)))) == [(B, True)]
    assigned(play, B)
    play.now_s += 100
    assert offers(play(rack())) == []
    play(msgspec.structs.replace(said(A), places=PLACED.places))
    assert offers(play(rack())) == [], "another configuration, and nobody said owners"
    play(said(A, since=2))
    assert offers(play(rack())) == [(A, True)], "the same host is said again"


def test_no_rank_on_the_host_that_somebody_says_leaves_it_to_the_aggd_there() -> None:
    """Its ranks have ended, or cannot own tables."""
    play, told = summed_by_a()
    play(said(B))
    play(rack(sums=(B, C)))
    epoch = play.machine.jobs[JOB].epoch
    play(Heard(B, Declined(JOB, epoch, NO_RANKS, no_ranks=True)))
    assert play.machine.jobs[JOB].assigned == told, "a rank goes on rather than an aggd"


# ---- whole agents ----------------------------------------------------------------------------------------------------


def say(rack: SimRack, job: Job, owners: tuple[str, ...], since: int) -> None:
    """Tell all agents what the log says of the job, with these owners."""
    for host in rack.alive():
        found = job.plugin(host)
        if found is not None:
            fact = found._tables._placed[JOB]
            found.host.publish(
                msgspec.structs.replace(fact, owners=tuple(map(HostId, owners)), owners_since=since, config=since)
            )


def test_all_tables_move_to_a_host_that_only_sums_and_back_while_the_job_goes_on() -> None:
    with direct_rack(77) as rack:
        job = Job(rack, HOSTS, rounds=60, cut=True, direct=True)
        rack.until(job.reached(4), 60, "round 4")
        say(rack, job, ("h4", "h4", "h4"), 1)
        rack.until(lambda: {host for host, _ in by(rack).values()} == {"h4"}, 20, "h4 sums all")
        assert {who for _, who in by(rack).values()} == {"aggd"}
        say(rack, job, ("h3", "h1", "h4"), 2)
        wanted = {"j1": "h3", "j1/1": "h1", "j1/2": "h4"}
        rack.until(lambda: {t: host for t, (host, _) in by(rack).items()} == wanted, 20, "each is where it is to be")
        assert by(rack)["j1"] == ("h3", "rank 2")
        job.finish()
