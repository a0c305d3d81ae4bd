"""The home agent's part of an upgrade: all ranks of a gang become guaranteed, or none stays so (AntMan §3.3).

    Wanted --> AskUpgrade to each host --> all yes --> Retag(guaranteed) to each --> over
                        |                                      |
                        '-- a no, or silence                   '-- a no after all
                                     '--> Retag(opportunistic) <--'

A synchronous job is as fast as its slowest rank, so an upgrade of some would help nobody. Hosts keep a yes for longer
(`gpu.PROMISE_S`) than the home waits; a host that broke its promise all the same, because its agent or its device went
away meanwhile, says no to the `Retag`, and all go back. The epoch is the grant's: hosts ignore older ones, so a home
that has lost the job can change nothing. A downgrade asks nobody.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from covey.core import HostId, JobId, LogEvent, Send
from plugins.sharing.messages import AskUpgrade, CanUpgrade, Kind, Retag

ASK_S = 5.0
"""How long hosts have to answer."""
UNDO_S = 15.0
"""How long after `Retag` a no still undoes the upgrade."""


class UpgradeWanted(msgspec.Struct, frozen=True):
    """The log says that this gang is of this kind from now on. `gpus`: of its ranks, by host."""

    job: JobId
    epoch: int
    kind: Kind
    gpus: Mapping[HostId, tuple[str, ...]]


class UpgradeAnswered(msgspec.Struct, frozen=True):
    """A host said whether it can, or that it could not after all."""

    host: HostId
    answer: CanUpgrade


class UpgradeTick(msgspec.Struct, frozen=True):
    """The clock moved on."""


class UpgradeDone(msgspec.Struct, frozen=True):
    """Action: its result; `refused` says why all ranks are opportunistic, empty: all are of the kind wanted."""

    job: JobId
    epoch: int
    refused: str


UpgradeEvent = UpgradeWanted | UpgradeAnswered | UpgradeTick
UpgradeAction = Send | UpgradeDone | LogEvent


@dataclass
class _Asked:
    epoch: int
    gpus: Mapping[HostId, tuple[str, ...]]
    until_s: float
    yes: set[HostId] = field(default_factory=set)
    tagged: bool = False


class Upgrades:
    """All upgrades that this agent is the home of."""

    def __init__(self) -> None:
        self.asked: dict[JobId, _Asked] = {}

    def handle(self, event: UpgradeEvent, now_s: float) -> Sequence[UpgradeAction]:
        match event:
            case UpgradeWanted():
                return self._wanted(event, now_s)
            case UpgradeAnswered():
                return self._answered(event.host, event.answer, now_s)
            case UpgradeTick():
                return self._second_passed(now_s)
            case _:
                assert_never(event)

    def check(self) -> None:
        for job, asked in self.asked.items():
            assert asked.yes <= set(asked.gpus), f"{job}: a yes from a host without its ranks"
            assert not asked.tagged or asked.yes == set(asked.gpus), f"{job}: upgraded without everybody's yes"

    def _wanted(self, event: UpgradeWanted, now_s: float) -> Sequence[UpgradeAction]:
        before = self.asked.get(event.job)
        if not event.gpus or (before is not None and event.epoch < before.epoch):
            return []
        self.asked.pop(event.job, None)
        if event.kind == "opportunistic":
            return [
                *self._retag(event.job, event.epoch, event.gpus, "opportunistic"),
                UpgradeDone(event.job, event.epoch, ""),
            ]
        self.asked[event.job] = _Asked(event.epoch, event.gpus, now_s + ASK_S)
        return [Send(host, AskUpgrade(event.job, event.epoch, gpus)) for host, gpus in sorted(event.gpus.items())]

    def _answered(self, host: HostId, answer: CanUpgrade, now_s: float) -> Sequence[UpgradeAction]:
        job = JobId(answer.job)
        asked = self.asked.get(job)
        if asked is None or answer.epoch != asked.epoch or host not in asked.gpus:
            return []
        if answer.refused:
            return self._refused(job, asked, f"{host}: {answer.refused}")
        if asked.tagged:
            return []
        asked.yes.add(host)
        if asked.yes != set(asked.gpus):
            return []
        asked.tagged, asked.until_s = True, now_s + UNDO_S
        why = f"all {len(asked.gpus)} hosts can: {job} is guaranteed from now on"
        return [*self._retag(job, asked.epoch, asked.gpus, "guaranteed"), LogEvent(f"job/{job}", "upgrade", why)]

    def _refused(self, job: JobId, asked: _Asked, why: str) -> Sequence[UpgradeAction]:
        """Told to all, also before anybody was upgraded: they may have been under an older epoch, and promises end."""
        del self.asked[job]
        undone = self._retag(job, asked.epoch, asked.gpus, "opportunistic")
        return [*undone, UpgradeDone(job, asked.epoch, why), LogEvent(f"job/{job}", "not upgraded", why)]

    def _second_passed(self, now_s: float) -> Sequence[UpgradeAction]:
        actions: list[UpgradeAction] = []
        for job, asked in sorted(self.asked.items()):
            if now_s <= asked.until_s:
                continue
            if asked.tagged:
                del self.asked[job]
                actions.append(UpgradeDone(job, asked.epoch, ""))
                continue
            silent = ", ".join(sorted(set(asked.gpus) - asked.yes))
            actions += self._refused(job, asked, f"no answer from {silent} within {ASK_S:g} s")
        return actions

    @staticmethod
    def _retag(job: JobId, epoch: int, gpus: Mapping[HostId, tuple[str, ...]], kind: Kind) -> list[UpgradeAction]:
        return [Send(host, Retag(job, epoch, kind)) for host in sorted(gpus)]
