"""Messages that a coordinator sent into a partition are sent again: a rank's host that was cut off while its job moved
would never complain by itself, if the former aggregator still answers it."""

from collections.abc import Sequence
from typing import Any

from covey.core.events import Heard, Send, Undelivered
from covey.core.ids import HostId, JobId
from plugins.aggregator.machine.coordinator import JobCoordinator
from plugins.aggregator.machine.events import GangPlaced, QuestionAnswered, RackUpdated, Unplaced
from plugins.aggregator.messages import Accepted, Assigned, AssignmentDropped, GetOwner, KnownOwner, Offer, Retire
from plugins.aggregator.policy import Candidate
from plugins.facts import Place

JOB = JobId("j1")
A, B, C, D = HostId("a"), HostId("b"), HostId("c"), HostId("d")
PLACES = (Place(A, (0,), ()), Place(B, (1,), ()))


def rack(*gone: HostId) -> RackUpdated:
    """A view in which c and d offer to sum, c the less busy one. Ranks run on a and b."""
    return RackUpdated(frozenset(gone), (Candidate(C, False, 0.1, 0, 0.0), Candidate(D, False, 0.5, 0, 0.0)))


class Told:
    """The coordinator on a, and the messages that it sends."""

    def __init__(self, *gone: HostId) -> None:
        self.coordinator, self.now_s = JobCoordinator(A, lambda size: bytes(size)), 100.0
        self(rack(*gone))
        self(GangPlaced(JOB, 1, 2, PLACES))
        offers = [found for host in (A, B) for found in self(QuestionAnswered(host, GetOwner(JOB), KnownOwner(None)))]
        self.first = self.accept(offers)

    def __call__(self, event: Any) -> list[tuple[HostId, Any]]:
        """Give it this event; return (to, message) of everything that it sends."""
        actions: Sequence[Any] = self.coordinator.handle(event, self.now_s)
        self.coordinator.check()
        return [(action.to, action.message) for action in actions if isinstance(action, Send)]

    def accept(self, offers: list[tuple[HostId, Any]]) -> Assigned:
        """Let the host that was asked say yes; return the assignment of which all hosts are told then."""
        ((to, offer),) = [(to, message) for to, message in offers if isinstance(message, Offer)]
        told = self(Heard(to, Accepted(JOB, offer.epoch, "10.0.0.9:9")))
        first = next(message for _, message in told if isinstance(message, Assigned))
        assert first.owner == to
        return first


def test_an_assignment_that_did_not_arrive_is_sent_again_until_it_does() -> None:
    told = Told()
    for _ in range(3):
        assert told(Undelivered(B, told.first)) == [(B, told.first)]


def test_an_assignment_that_is_old_by_now_is_not_sent_again() -> None:
    told = Told()
    second = told.accept(told(Heard(C, AssignmentDropped(JOB, told.first.epoch, "its process died"))))
    assert second.epoch > told.first.epoch
    assert told(Undelivered(B, told.first)) == []
    assert told(Undelivered(B, second)) == [(B, second)]
    told(Unplaced(JOB, 1, True))
    assert told(Undelivered(B, second)) == [], "the job is over"


def test_a_job_that_is_left_on_its_first_hosts_alone_is_offered_on() -> None:
    """An elastic job grew to b and shrank to a again: no place of it tells of the changes, its configuration does."""
    told = Told()
    told(GangPlaced(JOB, 1, 2, (Place(A, (0,), ()), Place(B, (1,), (), since=4)), config=4))
    grown = told.accept(told(Heard(C, AssignmentDropped(JOB, told.first.epoch, "its process died"))))
    told(GangPlaced(JOB, 1, 2, PLACES[:1], config=5))
    shrunk = told.accept(told(Heard(grown.owner, AssignmentDropped(JOB, grown.epoch, "its process died"))))
    assert shrunk.epoch > grown.epoch > told.first.epoch
    told(GangPlaced(JOB, 1, 2, PLACES[:1], config=3))
    dropped = AssignmentDropped(JOB, shrunk.epoch, "its process died")
    assert told(Heard(shrunk.owner, dropped)) == [], "the log is behind here"


def test_a_host_of_its_ranks_that_missed_the_assignment_is_told_when_it_is_back() -> None:
    told = Told(B)
    assert told(rack()) == [(B, told.first)]
    assert told(rack()) == [], "once; the message itself is repeated until it is delivered"


def test_a_former_owner_that_did_not_hear_of_its_end_is_told_again() -> None:
    told = Told()
    second = told.accept(told(rack(C)))
    ((to, retire),) = [(to, message) for to, message in told(rack()) if isinstance(message, Retire)]
    assert (to, retire.epoch, retire.instead) == (C, told.first.epoch, second.epoch)
    assert told(Undelivered(C, retire)) == [(C, retire)]
    told(Unplaced(JOB, 1, True))
    assert told(Undelivered(C, retire)) == [], "the log tells it by now"
