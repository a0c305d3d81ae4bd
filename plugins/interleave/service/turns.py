"""The turns of jobs that share this host on purpose (`agentctl submit --share-host`)."""

from covey.core.events import Fact
from plugins.base import Host
from plugins.interleave.policy.settings import InterleaveSettings
from plugins.interleave.policy.turn_order import turn_order


class HostTurns:
    """The pages of turns of this host."""

    def __init__(self, host: Host, settings: InterleaveSettings) -> None:
        self._host, self._settings = host, settings

    def start(self) -> None:
        """Begin to look at the pages."""
        self._order = turn_order(())

    def on_fact(self, fact: Fact) -> None:
        """Hear which ranks come and go."""
