"""What a plugin that begins late is told: what holds, and nothing that is over."""

from collections.abc import Sequence

import pytest

from agent.runtime.retained_facts import RetainedFacts, facts_of_hosts
from covey.core.events import Fact
from covey.core.ids import HostId, JobId
from plugins.facts import (
    HostGone,
    HostSeen,
    HostSuspected,
    HostView,
    JobPlaced,
    JobUnplaced,
    MemoryPromised,
    SpareChanged,
    StepTimed,
    TensorsAssigned,
    TensorsSeen,
)

J1, J2, H1, H2 = JobId("j1"), JobId("j2"), HostId("h1"), HostId("h2")


def placed(job: JobId, epoch: int = 1) -> JobPlaced:
    return JobPlaced(job, epoch, "lab", 1, (), 1)


def seen(job: JobId, total_bytes: int = 20) -> TensorsSeen:
    return TensorsSeen(job, 1, 10, total_bytes)


def assigned(job: JobId, to: HostId = H1) -> TensorsAssigned:
    return TensorsAssigned(job, 1, 7, to)


def after(*told: Fact) -> Sequence[Fact]:
    standing = RetainedFacts()
    for fact in told:
        standing.on_fact(fact)
    return standing.facts()


def test_the_newest_of_each_holds_and_a_job_comes_before_what_is_known_of_it() -> None:
    told = (
        *(placed(J1), placed(J2), seen(J2), seen(J1), assigned(J1), SpareChanged(5), MemoryPromised(3)),
        *(seen(J1, 30), assigned(J1, H2), placed(J2, 2), SpareChanged(6), MemoryPromised(4)),
    )
    facts = after(*told)
    newest = placed(J1), placed(J2, 2), seen(J2), seen(J1, 30), assigned(J1, H2), SpareChanged(6), MemoryPromised(4)
    assert len(facts) == 7 and all(fact in facts for fact in newest)
    for job in (J1, J2):
        kinds = [type(fact) for fact in facts if getattr(fact, "job", None) == job]
        assert kinds[:2] == [JobPlaced, TensorsSeen]


@pytest.mark.parametrize("ended", [True, False])
def test_of_a_job_that_is_no_longer_placed_nothing_is_told(ended: bool) -> None:
    told = (placed(J1), seen(J1), assigned(J1), placed(J2), seen(J2), assigned(J2), JobUnplaced(J1, 1, ended))
    assert list(after(*told)) == [placed(J2), seen(J2), assigned(J2)]
    again = after(*told, placed(J1, 2))
    assert [fact for fact in again if getattr(fact, "job", None) == J1] == [placed(J1, 2)]


@pytest.mark.parametrize("late", [seen(J1), assigned(J1)])
def test_what_comes_late_of_a_job_that_is_not_placed_is_not_kept(late: Fact) -> None:
    """A rank's last word may come after the log took its place back."""
    assert list(after(late)) == []
    assert list(after(placed(J1), JobUnplaced(J1, 1, True), late)) == []
    assert list(after(placed(J1), JobUnplaced(J1, 1, True), late, placed(J1, 2))) == [placed(J1, 2)]


def test_what_only_happened_does_not_hold() -> None:
    assert list(after(StepTimed(J1, 1, 0, 1, 1.0, 0.5, 0.5, {}), HostSeen(H1), JobUnplaced(J1, 1, True))) == []


def view(host: HostId, state: str, by: HostId | None = None) -> HostView:
    return HostView(host=host, state=state, address="1.2.3.4:5", suspected_by=by)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("known", "facts"),
    [
        (view(H1, "alive"), [HostSeen(H1)]),
        (view(H1, "suspect", H2), [HostSeen(H1), HostSuspected(H1, H2)]),
        (view(H1, "suspect"), [HostSeen(H1)]),
        (view(H1, "alive", H2), [HostSeen(H1)]),
        (view(H1, "gone", H2), [HostGone(H1, False)]),
        (view(H1, "left"), [HostGone(H1, True)]),
    ],
)
def test_of_each_host_is_said_what_gossip_says_by_now(known: HostView, facts: list[Fact]) -> None:
    assert list(facts_of_hosts([known])) == facts
    assert list(facts_of_hosts([known, view(H2, "alive")])) == [*facts, HostSeen(H2)]
