"""A borrower on its own, for stories: the events that it gets, and the actions that it asks for."""

import random
from collections.abc import Sequence
from typing import Any

from covey.core.events import Heard, LogEvent, Message, Send
from covey.core.ids import HostId
from covey.core.units import MIB
from plugins.memory.machine.borrowing import events as b
from plugins.memory.machine.borrowing.borrower import Borrower
from plugins.memory.messages import FreeMem, Map, MrInfo, QueryMem
from plugins.memory.policy.placement import HostsDrawn, LenderPeer

ME = HostId("h1")
OTHERS = [HostId(f"h{n}") for n in range(2, 6)]
SLAB, PAGE = 64 * MIB, 4096
PEERS = tuple(LenderPeer(host, "alive", 9) for host in OTHERS)
SECRET = b"s" * 16


def sent(actions: Sequence[Any], kind: type[Message]) -> list[tuple[HostId, Any]]:
    return [(a.to, a.message) for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def noted(actions: Sequence[Any]) -> list[str]:
    return [action.event for action in actions if isinstance(action, LogEvent)]


def only(actions: Sequence[Any], kind: type) -> Any:
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


class Tale:
    """One borrower and what it did; `check` runs after every event."""

    def __init__(
        self, slabs: int = 1, seed: int = 1, hot: float | None = 20.0, cold_share: float = 0.0, drawn: int = 2
    ) -> None:
        rng = random.Random(seed)
        self.machine = Borrower(ME, rng, boot=3, hot=hot, lease_s=60.0, cold_share=cold_share, hosts=HostsDrawn(drawn))
        self.now_s = 100.0
        self.slabs = slabs
        self.tell(b.VolumeFound("v", slabs, SLAB, PAGE, ()))

    def tell(self, event: b.BorrowerEvent, after_s: float = 0.0) -> Sequence[Any]:
        self.now_s += after_s
        actions = self.machine.handle(event, self.now_s)
        self.machine.check()
        return actions

    def second(self, *requests: int, peers: tuple[LenderPeer, ...] = PEERS) -> Sequence[Any]:
        """A second passes with this many requests to each of the first slabs, and none to the others."""
        counted = (*requests, *[0] * (self.slabs - len(requests)))
        return self.tell(b.BorrowerTick({"v": counted}, peers), 1.0)

    def hear(self, sender: HostId, message: Message) -> Sequence[Any]:
        return self.tell(Heard(sender, message))

    def state(self, index: int = 0) -> str:
        return self.machine.volumes["v"].slabs[index].state

    def offers(self, asked: Sequence[tuple[HostId, QueryMem]], *slabs: int) -> Sequence[Any]:
        """Let the first of the hosts asked offer so many slabs, the others none; return the actions that follow the
        last answer."""
        actions: Sequence[Any] = ()
        for (host, query), offered in zip(asked, (*slabs, *[0] * len(asked)), strict=False):
            actions = self.hear(host, FreeMem(query.volume, query.index, query.epoch, offered))
        return actions

    def mapped(self) -> tuple[HostId, int]:
        """Bring slab 0 to `mapped`; return its lender and epoch."""
        asked = sent(self.second(1000), QueryMem)
        epoch = asked[0][1].epoch
        ((lender, _),) = sent(self.offers(asked, 5, 4), Map)
        self.hear(lender, MrInfo("v", 0, epoch, "10.0.0.2:7", SECRET))
        self.tell(b.SlabOpened("v", 0, epoch))
        assert self.state() == "mapped"
        return lender, epoch
