"""One machine of the plugin by story: events in, actions out. The ranks of its jobs run on a and b; c and d offer to
sum."""

from collections.abc import Sequence
from typing import Any

from covey.core.events import Heard, Send
from covey.core.ids import HostId, JobId
from plugins.aggregator.machine.directory import Directory
from plugins.aggregator.machine.events import GangPlaced, RackUpdated
from plugins.aggregator.machine.owner import Owner
from plugins.aggregator.machine.process_words import ProcessUp, Served, ServeJob
from plugins.aggregator.messages import AggregatorSettings, Assigned, Demand, Offer
from plugins.aggregator.policy import Candidate
from plugins.facts import Place

JOB = JobId("j1")
A, B, C, D = HostId("a"), HostId("b"), HostId("c"), HostId("d")
PLACES = (Place(A, (0,), ()), Place(B, (1,), ()))
PLACED = GangPlaced(JOB, 1, 2, PLACES)
SECRET = bytes(16)
G1 = 1 << 32


def rack(*gone: HostId, sums: Sequence[HostId] = (C, D)) -> RackUpdated:
    loads = {C: 0.1, D: 0.5}
    return RackUpdated(frozenset(gone), tuple(Candidate(host, False, loads.get(host, 0.9), 0, 0.0) for host in sums))


class Play:
    """A machine, its clock, and its actions."""

    def __init__(self, machine: Any) -> None:
        self.machine, self.now_s = machine, 100.0
        self.actions: list[Any] = []

    def __call__(self, event: Any) -> list[Any]:
        found = list(self.machine.handle(event, self.now_s))
        self.machine.check()
        self.actions += found
        return found


def sends(actions: Sequence[Any]) -> list[tuple[HostId, Any]]:
    return [(action.to, action.message) for action in actions if isinstance(action, Send)]


def promising(*jobs: str) -> Play:
    """Make an aggregator that sums these jobs and has promised each what it needs, in this order."""
    play = Play(Owner(AggregatorSettings(), me=C))
    play(ProcessUp("10.0.0.3:9", {}))
    for job in jobs:
        offer = Offer(JobId(job), G1 + 1, 2, SECRET, Demand(100_000, 10_000))
        (serve,) = play(Heard(A, offer))
        assert isinstance(serve, ServeJob)
        play(Served(JobId(job), G1 + 1))
    return play


def loaded(host: HostId, used_us: int, suspect: bool = False) -> Candidate:
    return Candidate(host, suspect, 0.0, 1, 0.0, 100_000, used_us)


LOW, HIGH = (Assigned(JOB, G1 + n, host, "10.0.0.3:9", SECRET) for n, host in ((2, C), (4, D)))


def directory(*known: Assigned) -> Play:
    play = Play(Directory(B, known))
    play(PLACED)
    play.now_s += 10
    return play
