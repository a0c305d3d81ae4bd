"""The plugin at work: it measures, gossips what the machine shows, and answers people and other hosts."""

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from covey.core.errors import Refused
from covey.core.events import Fact
from covey.core.ids import HostId
from covey.core.metrics import Measured, MetricGroup
from examples.plugin.load import policy
from examples.plugin.load.machine import Event, LoadMachine, LoadMeasured, ShowLoad
from examples.plugin.load.messages import BusyNow, HowBusy, LoadHint
from plugins.base import Command, Host, PluginService
from plugins.facts import SecondPassed

ASK_S = 2.0
"""Seconds that another host may take to answer."""
KEY = "load"
"""Key under which a host's load is gossiped."""
METRICS = MetricGroup()
LOAD_RATIO = METRICS.gauge("covey_load_ratio", "Smoothed load of this host, 0 to 1.")
LOAD_BUSY = METRICS.gauge("covey_load_busy", "1 while this host is busy, by the thresholds of its settings.")


class LoadService(PluginService):
    """The plugin `load` of one host."""

    name: ClassVar[str] = "load"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.machine = LoadMachine(host.id, host.settings(policy.LoadSettings))

    # ---- what happens ----

    def on_fact(self, fact: Fact) -> None:
        if isinstance(fact, SecondPassed):
            self.dispatch(LoadMeasured(self._measured()))

    def dispatch(self, event: Event) -> None:
        for action in self.machine.handle(event, self.env.clock.now_s()):
            match action:
                case ShowLoad():
                    self.host.spread(KEY, LoadHint(action.load))
                case _:
                    self.perform(action, self.dispatch)

    def _measured(self) -> float:
        memory = self.env.probes.memory()
        used = 1 - memory.available_bytes / memory.total_bytes
        return policy.load_of([gpu.utilization for gpu in self.env.probes.gpus() if gpu.utilization is not None], used)

    # ---- what other hosts ask ----

    async def answer(self, sender: HostId, question: Any) -> msgspec.Struct:
        if isinstance(question, HowBusy):
            return BusyNow(self.machine.load or 0.0)
        return await super().answer(sender, question)

    # ---- what people ask ----

    def commands(self) -> Mapping[str, Command]:
        return {"hints": self._hints, "calmest": self._calmest}

    async def _hints(self, arguments: Mapping[str, Any]) -> dict[HostId, float]:
        """Load by host, as gossip has it on this host; it may be seconds old."""
        return self._known()

    async def _calmest(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The calmest host and its load now. Raises Refused when no host that looks calm answers."""
        asked = policy.calmest_by_hint(self._known())
        answers = [found for found in await asyncio.gather(*map(self._ask, asked)) if found is not None]
        host = policy.calmest(answers)
        if host is None:
            why = f"of {', '.join(asked) or 'no host'}, asked, none answered within {ASK_S:g} s"
            raise Refused(75, "the calmest host is not known now", why, "try again; agentctl hosts shows who is there")
        return {"host": host, "load": dict(answers)[host]}

    def _known(self) -> dict[HostId, float]:
        """Loads of the hosts that are alive, this one included."""
        alive = [view for view in self.host.hosts() if view.state == "alive"]
        hints = {view.host: view.value(KEY, LoadHint) for view in alive}
        return {host: hint.load for host, hint in hints.items() if isinstance(hint, LoadHint)}

    async def _ask(self, host: HostId) -> tuple[HostId, float] | None:
        """Load of a host that answers in time; None for one that does not, or has no such plugin."""
        if host == self.host.id:
            return host, self.machine.load or 0.0
        try:
            answer = await self.host.ask(self.name, host, HowBusy(), ASK_S)
        except (TimeoutError, Refused):
            return None
        return (host, answer.load) if isinstance(answer, BusyNow) else None

    def metrics(self) -> Measured:
        return {LOAD_RATIO.of(): self.machine.load or 0.0, LOAD_BUSY.of(): float(self.machine.busy)}
