"""The service of the plugin `interleave`: it hands facts to its parts."""

from typing import ClassVar

from covey.core.events import Fact
from plugins.base import Host, PluginService
from plugins.interleave.policy.settings import InterleaveSettings
from plugins.interleave.service.turns import HostTurns


class InterleaveService(PluginService):
    """The interleaving service; see the plugin's essay in `plugins/interleave/__init__.py`."""

    name: ClassVar[str] = "interleave"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.settings = host.settings(InterleaveSettings)
        self.turns = HostTurns(host, self.settings)

    async def start(self) -> None:
        self.turns.start()

    def on_fact(self, fact: Fact) -> None:
        self.turns.on_fact(fact)
