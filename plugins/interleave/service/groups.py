"""The groups of jobs that share hosts, on one host: facts and messages go to the machine, wishes to the scheduler."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from covey.core.events import Fact, Heard
from covey.core.ids import HostId, JobId
from plugins.base import Host
from plugins.facts import ArrangementsAnswered, JobPlaced, JobUnplaced, SecondPassed, StepTimed, SumsWorked
from plugins.gossiped import closed
from plugins.group_views import GroupJobView, GroupView
from plugins.interleave.machine.pools import HostsNow, Pools, PoolsEvent, SecondBegan
from plugins.interleave.policy.decide import Decision, PoolView, decide
from plugins.interleave.policy.groups import PlacedGroup, arranger_of, groups_of
from plugins.interleave.policy.model import iteration_s, use
from plugins.interleave.policy.order import ALONE_ON, Waiting, alone_s
from plugins.interleave.policy.settings import InterleaveSettings
from plugins.interleave.policy.turn_order import turn_order

THERE = ("alive", "suspect", "away")
"""States of hosts whose jobs run on."""


class HostGroups:
    """The pools of the rack, as this host sees them."""

    def __init__(
        self, host: Host, settings: InterleaveSettings, perform: Callable[[Any, Callable[[Any], None]], None]
    ) -> None:
        self._host, self._perform = host, perform
        decides = decide if settings.regroup else _stays
        self.pools = Pools(host.id, host.env.rng, settings.review_s, decides)

    def on_fact(self, fact: Fact) -> None:
        """Hear what the log says of jobs, what their processes tell, and what became of a wish."""
        match fact:
            case JobPlaced() | JobUnplaced() | StepTimed() | SumsWorked() | ArrangementsAnswered():
                self._feed(fact)
            case SecondPassed():
                views = self._host.hosts()
                live = frozenset(view.host for view in views if view.state in THERE)
                usable = frozenset(view.host for view in views if view.state == "alive" and not closed(view))
                self._feed(HostsNow(live | {self._host.id}, usable))
                self._feed(SecondBegan())
            case _:
                pass

    def heard(self, sender: HostId, message: Any) -> None:
        """Take a message of the same plugin on another host."""
        self._feed(Heard(sender, message))

    def left_s(self) -> Mapping[JobId, float]:
        """What each profiled job of the rack's pools has left, in seconds alone, as far as this host knows."""
        return self.pools.left_s(self._host.env.clock.now_s())

    def _feed(self, event: PoolsEvent) -> None:
        for action in self.pools.handle(event, self._host.env.clock.now_s()):
            self._perform(action, lambda _: None)  # what was not delivered is told again

    # ---- what people see ----

    async def rows(self, _arguments: Mapping[str, Any]) -> list[GroupView]:
        """The groups of the pools that this host arranges, being the lowest live one that has a job of them."""
        now_s, found = self._host.env.clock.now_s(), []
        for name in sorted(self.pools.pools):
            members = self.pools.members(name)
            if arranger_of(members, self.pools.live) != self._host.id:
                continue
            known = self.pools.known(name, now_s)
            words = self.pools.words(name, now_s)
            found += [self._row(group, known, words) for group in groups_of(members)]
        return found

    def _row(self, group: PlacedGroup, known: Mapping[JobId, Waiting], words: str) -> GroupView:
        left = {job: known[job].left * alone_s(known[job].profile, ALONE_ON) for job in group.jobs if job in known}
        jobs = tuple(self._job(job, known, left) for job in turn_order(group.jobs, left))
        row = GroupView(group=group.name, pool=group.pool, hosts=group.hosts, jobs=jobs, decided=words)
        if len(left) < len(group.jobs):
            return row
        profiles = [known[job].profile for job in group.jobs]
        busy = use(profiles, len(group.hosts))
        return msgspec.structs.replace(
            row,
            predicted_s=iteration_s(profiles, len(group.hosts)),
            cpu=busy.cpu,
            net=busy.net,
            cpu_measured=sum(job.work_s / len(group.hosts) / job.step_s for job in jobs if job.step_s),
            net_measured=sum(job.net_s / job.step_s for job in jobs if job.step_s),
        )

    def _job(self, job: JobId, known: Mapping[JobId, Waiting], left: Mapping[JobId, float]) -> GroupJobView:
        placed, heard = self.pools.jobs[job], self.pools.profiles.get(job)
        told = heard.told if heard is not None and job in known else None
        return GroupJobView(
            job=job,
            hosts=tuple(sorted(placed.hosts)),
            processes=sum(placed.processes.values()),
            elastic=placed.most > 0,
            profiled=told is not None,
            work_s=told.work_s if told is not None else 0.0,
            net_s=told.net_s if told is not None else 0.0,
            step_s=told.step_s if told is not None else 0.0,
            left_s=left.get(job),
        )


def _stays(_view: PoolView) -> Decision:
    return Decision(None, "this host asks for no other groups (regroup = false)")
