"""Rumours: messages that are passed on, and how often."""

from dataclasses import dataclass

from covey.core.events import Message
from covey.core.ids import HostId
from gossip.types import size


@dataclass
class Rumour:
    message: Message
    bytes: int
    serial: int
    sends: int = 0


class Rumours:
    """The messages to pass on: the newest about each host, those sent least first (memberlist,
    TransmitLimitedQueue)."""

    def __init__(self) -> None:
        self._by_host: dict[HostId, Rumour] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._by_host)

    def publish(self, host: HostId, message: Message) -> None:
        """Send this message about `host` from now on, and no older one."""
        self._serial += 1
        self._by_host[host] = Rumour(message, size(message), self._serial)

    def drop(self, host: HostId) -> None:
        self._by_host.pop(host, None)

    def take(self, budget: int, sends_max: int) -> list[Message]:
        """The rumours that fit into `budget` bytes; a rumour is dropped after `sends_max` sends."""
        found: list[Message] = []
        for host, rumour in sorted(self._by_host.items(), key=lambda item: (item[1].sends, -item[1].serial)):
            if rumour.bytes > budget:
                continue
            found.append(rumour.message)
            budget -= rumour.bytes
            rumour.sends += 1
            if rumour.sends >= sends_max:
                del self._by_host[host]
        return found
