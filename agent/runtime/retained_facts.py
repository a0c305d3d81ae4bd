"""Facts that hold now, for a plugin that starts later than the others and has missed their publication."""

from collections.abc import Iterable, Sequence

from covey.core.events import Fact
from covey.core.ids import HostId, JobId
from plugins.facts import (
    HostAway,
    HostGone,
    HostNeverBack,
    HostSeen,
    HostSuspected,
    HostView,
    JobPlaced,
    JobUnplaced,
    MemoryPromised,
    SpareChanged,
    TensorsAssigned,
    TensorsSeen,
    TunerAsked,
)


class RetainedFacts:
    """Facts that plugins published and that still hold. Those of hosts, ranks and the leader are kept elsewhere."""

    def __init__(self) -> None:
        self._placed: dict[JobId, JobPlaced] = {}
        self._tensors: dict[JobId, TensorsSeen] = {}
        self._assigned: dict[JobId, TensorsAssigned] = {}
        self._tuned: dict[JobId, TunerAsked] = {}
        self._never_back: dict[HostId, HostNeverBack] = {}
        self._spare: SpareChanged | None = None
        self._promised: MemoryPromised | None = None

    def on_fact(self, fact: Fact) -> None:
        match fact:
            case JobPlaced():
                self._placed[fact.job] = fact
            case JobUnplaced():
                self._placed.pop(fact.job, None)
                self._tensors.pop(fact.job, None)
                self._assigned.pop(fact.job, None)
                self._tuned.pop(fact.job, None)
            case TensorsSeen() if fact.job in self._placed:
                self._tensors[fact.job] = fact
            case TensorsAssigned() if fact.job in self._placed:
                self._assigned[fact.job] = fact
            case TunerAsked() if fact.job in self._placed:
                self._tuned[fact.job] = fact
            case HostNeverBack():
                self._never_back[fact.host] = fact
            case SpareChanged():
                self._spare = fact
            case MemoryPromised():
                self._promised = fact
            case _:
                pass

    def facts(self) -> Sequence[Fact]:
        """The facts in an order in which they may have come about: a job is placed before its tensors are seen."""
        memory = [fact for fact in (self._spare, self._promised) if fact is not None]
        jobs = *self._placed.values(), *self._tuned.values(), *self._tensors.values(), *self._assigned.values()
        return [*self._never_back.values(), *jobs, *memory]


def facts_of_hosts(views: Iterable[HostView]) -> Sequence[Fact]:
    """The facts that gossip would have caused for each host by now."""
    found: list[Fact] = []
    for view in views:
        if view.state in ("gone", "left"):
            found.append(HostGone(view.host, view.state == "left"))
            continue
        if view.state == "away":
            found.append(HostAway(view.host, view.away_s))
            continue
        found.append(HostSeen(view.host))
        if view.state == "suspect" and view.suspected_by is not None:
            found.append(HostSuspected(view.host, view.suspected_by))
    return found
