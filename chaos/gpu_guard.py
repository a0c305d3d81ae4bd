"""A stand-in for the plugin that shares GPUs: it measures and limits nothing, and says what that plugin may say.

It lets ranks start after a moment, now and then says that they do not fit or that two jobs do not pair, and forgets
everything when its agent does.
"""

import asyncio

import msgspec

from covey.core import Fact, JobId, Message
from plugins.base import Host, Plugin, PluginService
from plugins.facts import (
    GpusMeasured,
    GpuUse,
    JobUnplaced,
    KindChanged,
    PairHarms,
    RanksComing,
    RanksMayStart,
    RanksUnfit,
    SecondPassed,
)

UNFIT, HARMS, REFUSES = 0.04, 0.01, 0.05
"""Chance for each gang, for each pair in a second, and for each GPU to change its mind in a second."""
ANSWER_S = 3.0
FREE_BYTES = 1 << 40
Grant = tuple[JobId, int]


class GuardSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None."""


class GuardSilence(Message, frozen=True, tag="GuardSilence"):
    """It says nothing to other hosts."""


class GpuGuard(PluginService):
    name = "sharing"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.here: dict[Grant, RanksComing] = {}
        self.busy: dict[str, float] = {}
        self.refusal: dict[str, str] = {}

    def on_fact(self, fact: Fact) -> None:
        match fact:
            case SecondPassed():
                self._measure()
                self._judge()
            case RanksComing():
                self._come(fact)
            case KindChanged() if (fact.job, fact.epoch) in self.here:
                coming = self.here[fact.job, fact.epoch]
                self.here[fact.job, fact.epoch] = msgspec.structs.replace(coming, kind=fact.kind)
            case JobUnplaced():
                self.here.pop((fact.job, fact.epoch), None)
            case _:
                pass

    def _measure(self) -> None:
        rng, uses = self.env.rng, list[GpuUse]()
        for gpu in self.env.probes.gpus():
            if rng.random() < REFUSES:
                self.busy[gpu.uuid] = rng.choice((0.0, 0.3, 0.7, 0.9))
                self.refusal[gpu.uuid] = "it is hot" if rng.random() < REFUSES else ""
            uses.append(GpuUse(gpu.uuid, self.busy.get(gpu.uuid, 0.0), FREE_BYTES, self.refusal.get(gpu.uuid, "")))
        self.host.publish(GpusMeasured(tuple(uses)))

    def _come(self, coming: RanksComing) -> None:
        key = (coming.job, coming.epoch)
        if key in self.here:
            return
        self.here[key] = coming
        answer: Fact = RanksMayStart(*key)
        if not coming.running and self.env.rng.random() < UNFIT:
            answer = RanksUnfit(*key, "there is no room for it")
        asyncio.get_running_loop().call_later(self.env.rng.uniform(0.0, ANSWER_S), self.host.publish, answer)

    def _judge(self) -> None:
        for job in self.here.values():
            for beside in self.here.values():
                share = {gpu for gpus in job.gpus.values() for gpu in gpus} & {
                    gpu for gpus in beside.gpus.values() for gpu in gpus
                }
                pair = job.kind == "guaranteed" and beside.kind == "opportunistic" and share
                if pair and self.env.rng.random() < HARMS:
                    self.host.publish(PairHarms(job.job, beside.job, 0.08, 0.01))
                    return


GUARD = Plugin(
    name=GpuGuard.name,
    paper="none: a stand-in",
    settings=GuardSettings,
    messages=GuardSilence,
    service=GpuGuard,
)
