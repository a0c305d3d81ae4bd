"""The groups of a host as its agent runs them: facts in, wishes and rows out."""

import random
from types import SimpleNamespace
from typing import Any

from covey.core.events import LogEvent, Publish, Send
from covey.core.ids import HostId, JobId
from gossip.types import HostView
from plugins.facts import (
    ArrangementsAnswered,
    ArrangementsWanted,
    JobPlaced,
    JobUnplaced,
    Place,
    SecondPassed,
    StepTimed,
)
from plugins.interleave.policy.settings import InterleaveSettings
from plugins.interleave.service.groups import HostGroups

H1, H2, H3 = (HostId(f"h{n}") for n in (1, 2, 3))
J1, J2 = JobId("j1"), JobId("j2")


class Host:
    """What the groups of a host ask of their agent, and what they made it do."""

    def __init__(self, settings: InterleaveSettings) -> None:
        self.id, self.now_s = H1, 0.0
        self.env = SimpleNamespace(rng=random.Random(1), clock=SimpleNamespace(now_s=lambda: self.now_s))
        self.done: list[Any] = []
        self.states = {H1: "alive", H2: "alive", H3: "alive"}
        self.groups = HostGroups(self, settings, lambda action, _: self.done.append(action))  # type: ignore[arg-type]

    def hosts(self) -> list[HostView]:
        return [HostView(host=host, state=state) for host, state in self.states.items()]  # type: ignore[arg-type]

    def placed(self, job: JobId, share_host: str = "auto", config: int = 0) -> None:
        carried: dict[int, tuple[int, ...]] = {0: (0, 1), 2: (2, 3)}
        of = JobPlaced(job, 1, "lab", 4, (Place(H1, (0, 2), ()),), 1, 0, config, carried)
        fields = {name: getattr(of, name) for name in of.__struct_fields__}
        self.groups.on_fact(JobPlaced(**{**fields, "share_host": share_host, "workers": 1}))

    def run(self, seconds: int, *jobs: JobId) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            for job in jobs:
                for process in (0, 2):
                    of = job, 1, process, int(self.now_s), 1.0, 0.9, 0.1
                    self.groups.on_fact(StepTimed(*of, {}))
            self.groups.on_fact(SecondPassed(self.now_s))

    def wishes(self) -> list[ArrangementsWanted]:
        facts = [action.fact for action in self.done if isinstance(action, Publish)]
        return [fact for fact in facts if isinstance(fact, ArrangementsWanted)]


async def test_a_job_is_measured_profiled_and_given_the_idle_hosts() -> None:
    host = Host(InterleaveSettings())
    host.placed(J1)
    host.run(1)
    (row,) = await host.groups.rows({})
    assert (row.group, row.predicted_s, row.jobs[0].profiled) == ("auto/j1", None, False)
    host.run(30, J1)
    (row,) = await host.groups.rows({})
    assert row.predicted_s is not None and row.cpu_measured is not None
    assert row.jobs[0].work_s == 0.9 and row.jobs[0].processes == 2
    wish = host.wishes()[0]
    assert set(wish.jobs[J1].processes) == {H1, H2, H3}
    assert (wish.jobs[J1].epoch, wish.jobs[J1].replaces) == (1, 0)
    assert "asked for, and not in force yet" in row.decided
    assert not [action for action in host.done if isinstance(action, Send)], "nobody else has to know"


async def test_hosts_that_are_drained_away_or_gone_are_not_asked_for() -> None:
    host = Host(InterleaveSettings())
    host.states |= {H2: "away", H3: "gone"}
    host.placed(J1)
    host.run(30, J1)
    assert not host.wishes()


async def test_with_regroup_off_nothing_is_wanted_and_people_are_told() -> None:
    host = Host(InterleaveSettings(regroup=False))
    host.placed(J1)
    host.run(30, J1)
    assert not host.wishes()
    (row,) = await host.groups.rows({})
    assert "regroup = false" in row.decided


async def test_a_job_that_shares_no_hosts_is_in_no_group_and_its_hosts_are_not_idle() -> None:
    host = Host(InterleaveSettings())
    host.placed(J1, share_host="")
    host.placed(J2, share_host="night")
    host.run(5, J1, J2)
    assert [(row.group, row.pool) for row in await host.groups.rows({})] == [("lab/night/j2", "lab/night")]
    host.groups.on_fact(JobUnplaced(J2, 1, True))
    assert await host.groups.rows({}) == []


async def test_a_refusal_is_in_the_event_log_of_the_job() -> None:
    host = Host(InterleaveSettings())
    host.placed(J1)
    host.run(30, J1)
    host.groups.on_fact(ArrangementsAnswered(host.wishes()[0].ask, "h2 has no room for j1"))
    notes = [action for action in host.done if isinstance(action, LogEvent)]
    assert notes and notes[0].subject == J1 and notes[0].reason.endswith("h2 has no room for j1")
