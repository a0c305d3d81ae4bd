"""`covey-sim memory --show views` chooses as live borrowers do: by the same dice the same hosts are asked and taken."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from covey.core.events import Heard, Send
from covey.core.ids import HostId
from plugins.memory.machine.borrowing.borrower import Borrower
from plugins.memory.machine.borrowing.events import BorrowerTick, VolumeFound
from plugins.memory.machine.borrowing.place import SlabPlace
from plugins.memory.messages import FreeMem, Map, MrInfo, QueryMem
from plugins.memory.policy.placement import DRAWN, HostsDrawn, LenderPeer
from sim.memory.views import Crowd

STEPS = 10_000
SLAB = 1 << 20


class Noting(Crowd):
    """A crowd that notes which hosts it asked."""

    def _ask(self, borrower: int, asked: tuple[HostId, ...], step: int) -> bool:
        self.asked = list(asked)
        return super()._ask(borrower, asked, step)


class Choice:
    """One slab of host 0 looks for a place in a rack of a few hosts; its view is one step older than the truth."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.crowd = crowd = Noting(rng.randrange(2, 14), 0.0, seed, rng.randrange(2, DRAWN + 3))
        for _ in range(2):
            crowd.free[:] = [rng.randrange(4) for _ in crowd.names]
            crowd.remember()
        crowd.age_steps[0] = 1
        taken = [n for n in range(1, len(crowd.names)) if rng.random() < 0.4]
        crowd.free[taken] = 0  # since they were asked
        for host in crowd.names[1:]:
            if rng.random() < 0.3:
                crowd.holding[0][host] = rng.randrange(1, 4)
        self.dice = rng.randrange(1 << 30)
        self.held: Counter[HostId] = Counter(crowd.holding[0])

    def of_crowd(self) -> tuple[list[HostId], HostId | None]:
        """Hosts asked, in order, and the lender."""
        crowd = self.crowd
        crowd.rng = random.Random(self.dice)
        crowd.by_view(0, 1)
        return crowd.asked, next(iter(Counter(crowd.holding[0]) - self.held), None)

    def of_borrower(self) -> tuple[list[HostId], HostId | None]:
        """The answer of a live borrower whose peers answer what is true at the step and refuse by what is true now."""
        crowd = self.crowd
        machine = Borrower(crowd.names[0], random.Random(self.dice), 1, 1.0, 60.0, hosts=HostsDrawn(crowd.drawn))
        places = [SlabPlace(n + 1, host, "", b"") for n, host in enumerate(self.held.elements())]
        slabs = tuple((n + 1, place) for n, place in enumerate(places))
        machine.handle(VolumeFound("v", len(slabs) + 1, SLAB, 4096, slabs), 0.0)
        peers = tuple(
            LenderPeer(host, "alive", int(free)) for host, free in zip(crowd.names, crowd.history[0], strict=True)
        )
        actions = machine.handle(BorrowerTick({"v": [1000, *[0] * len(slabs)]}, peers), 1.0)
        asked = [send for send in actions if isinstance(send, Send) and isinstance(send.message, QueryMem)]
        for send in asked:
            epoch, offer = send.message.epoch, int(crowd.history[1][crowd.number[send.to]])  # type: ignore[attr-defined]
            actions = machine.handle(Heard(send.to, FreeMem("v", 0, epoch, offer)), 1.0)
        return [send.to for send in asked], self._taken(machine, actions)

    def _taken(self, machine: Borrower, actions: Sequence[Any]) -> HostId | None:
        while maps := [each for each in actions if isinstance(each, Send) and isinstance(each.message, Map)]:
            to, epoch = maps[0].to, maps[0].message.epoch  # type: ignore[attr-defined]
            if self.free[to]:
                return to
            actions = machine.handle(Heard(to, MrInfo("v", 0, epoch, refused="full")), 1.0)
        return None

    def step(self) -> tuple[tuple[list[HostId], HostId | None], tuple[list[HostId], HostId | None]]:
        """The choice of the crowd, and the choice of the machine."""
        self.free = dict(zip(self.crowd.names, self.crowd.free.tolist(), strict=True))
        machine = self.of_borrower()
        return self.of_crowd(), machine


def test_the_crowd_asks_and_takes_as_the_live_machine_does_ten_thousand_times() -> None:
    """Reference: §2.4.2."""
    seen: Counter[str] = Counter()
    for seed in range(STEPS):
        crowd, machine = Choice(seed).step()
        assert crowd == machine, f"seed {seed}"
        asked, lender = machine
        seen["no host asked"] += not asked
        seen["no host has room"] += bool(asked) and lender is None
        seen["the second one"] += lender is not None and len(asked) > 1 and lender == asked[1]
        seen["placed"] += lender is not None
    assert min(seen.values()) > 200 and seen["placed"] > STEPS / 2, seen
