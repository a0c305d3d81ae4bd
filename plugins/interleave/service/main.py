"""The service of the plugin `interleave`: it hands facts to its parts."""

from collections.abc import Mapping
from typing import Any, ClassVar

from covey.core.events import Fact
from covey.core.ids import HostId
from plugins.base import Command, Host, PluginService
from plugins.interleave.policy.settings import InterleaveSettings
from plugins.interleave.service.groups import HostGroups
from plugins.interleave.service.turns import HostTurns


class InterleaveService(PluginService):
    """The interleaving service; see the plugin's essay in `plugins/interleave/__init__.py`."""

    name: ClassVar[str] = "interleave"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.settings = host.settings(InterleaveSettings)
        self.groups = HostGroups(host, self.settings, self.perform)
        self.turns = HostTurns(host, self.settings, self.groups.left_s)

    async def start(self) -> None:
        self.turns.start()

    def on_fact(self, fact: Fact) -> None:
        self.turns.on_fact(fact)
        self.groups.on_fact(fact)

    async def on_message(self, sender: HostId, message: Any) -> None:
        self.groups.heard(sender, message)

    def commands(self) -> Mapping[str, Command]:
        return {"groups": self.groups.rows}

    def status(self) -> Mapping[str, str]:
        return self.turns.status()
