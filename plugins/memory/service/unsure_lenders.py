"""Lenders that have not said what they hold since a volume's process began anew: they are asked, or given up."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from covey.core.errors import Refused
from covey.core.ids import HostId
from plugins.base import Host
from plugins.facts import HostView
from plugins.memory.datapath.wire import control
from plugins.memory.datapath.wire.control import OpenPlace, PlaceList
from plugins.memory.machine.borrowing.borrower import ANSWER_S
from plugins.memory.machine.borrowing.slab import BorrowedSlab
from plugins.memory.messages import SlabRef, SlabsAreHeld, SlabsHeld, in_parts
from plugins.memory.service import views
from plugins.memory.service.earlier import EarlierElsewhere
from plugins.memory.service.open_volume import OpenVolume

ASK_S = 5.0
HEARD_S = 60.0
"""Seconds after this agent's start from which a host that no other speaks of is not there."""


class UnsureLenders:
    """The unsure lenders of this host's volumes. `slabs_of`: the slabs of a volume, as the machine knows them."""

    def __init__(
        self,
        host: Host,
        volumes: Mapping[str, OpenVolume],
        slabs_of: Callable[[str], Iterable[BorrowedSlab]],
        earlier: EarlierElsewhere,
    ) -> None:
        self._host, self._env, self._volumes = host, host.env, volumes
        self._slabs_of, self._earlier = slabs_of, earlier
        self._asked: set[HostId] = set()
        """Lenders that are being asked what they hold."""
        self.never_back: dict[HostId, int] = {}
        """Lenders that will never come back, by the word of a person, and the latest boot that is meant. One that was
        seen after that word is here no more: it was only cut off, and has what it held."""
        self._began_s = host.env.clock.now_s()

    def slabs(self) -> dict[HostId, list[SlabRef]]:
        """Lender -> places whose content a volume's process does not know, since it began anew."""
        found: dict[HostId, list[SlabRef]] = {}
        for name, volume in self._volumes.items():
            epochs = {now.epoch for now in volume.recovering()}
            for slab in self._slabs_of(name) if epochs else ():
                held = {place.epoch: place.lender for place in slab.places}
                for epoch, lender in (held | slab.left).items():
                    if epoch in epochs:
                        found.setdefault(lender, []).append(slab.ref(epoch))
        return found

    def ask(self) -> None:
        """Ask lenders what they hold, one question at a time to each: a lender that has lost a place is not waited
        for."""
        views = {view.host: view for view in self._host.hosts()}
        for lender, slabs in sorted(self.slabs().items()):
            if lender not in self._asked:
                self._asked.add(lender)
                lost = self._is_lost(lender, views.get(lender))
                asks = self._give_up_lender(lender, slabs) if lost else self._ask_lender(lender, slabs)
                self._env.spawn(f"ask {lender} about slabs", asks)

    def _is_lost(self, lender: HostId, view: HostView | None) -> bool:
        """Whether what this lender held is lost, by the word of a person. One that is there, or began later than that
        word, is asked: it may be another machine of that name."""
        boot = self.never_back.get(lender)
        if boot is None:
            return False
        if view is None:  # soon after a start nobody may have spoken of a living host
            return self._env.clock.now_s() - self._began_s >= HEARD_S
        return view.state in ("gone", "left") and view.boot <= boot

    async def _ask_lender(self, lender: HostId, slabs: Sequence[SlabRef]) -> None:
        try:
            for part in in_parts(slabs):
                answer = await self._host.ask("memory", lender, SlabsHeld(part), ANSWER_S)
                if isinstance(answer, SlabsAreHeld) and answer.known:
                    held = set(answer.slabs)
                    for slab in part:
                        if slab not in held:
                            await self._tell_dead(lender, slab)
                        elif answer.address:
                            await self._tell_at(slab, answer.address)
        except (TimeoutError, ConnectionError, Refused):
            pass  # asked again in a second
        finally:
            self._asked.discard(lender)

    async def _give_up_lender(self, lender: HostId, slabs: Sequence[SlabRef]) -> None:
        """Wait no longer for what a host holds that will never come back."""
        try:
            for slab in slabs:
                await self._tell_dead(lender, slab, f"{lender} was forgotten: it will never come back")
        except (TimeoutError, ConnectionError):
            pass  # told again in a second
        finally:
            self._asked.discard(lender)

    async def _tell_dead(self, lender: HostId, slab: SlabRef, why: str = "") -> None:
        volume = self._volumes.get(slab.volume)
        if volume is not None:
            why = why or f"{lender} no longer holds it"
            await volume.process.ask(lambda id: control.PlaceDead(id, slab.index, slab.epoch, why), ASK_S)

    async def _tell_at(self, slab: SlabRef, address: str) -> None:
        """Say where a place is served: another program may have the port that its lender had."""
        volume = self._volumes.get(slab.volume)
        if volume is not None:
            await volume.process.ask(lambda id: control.PlaceAt(id, slab.index, slab.epoch, address), ASK_S)

    async def give_up(self, name: str) -> tuple[OpenPlace, ...]:
        """Stop waiting for lenders of this volume that have not said what they hold; returns the places given up."""
        volume = self._volumes.get(name)
        if volume is None:
            return await self._give_up_earlier(name)
        given_up: tuple[OpenPlace, ...] = ()
        more = True
        while more:
            try:
                answer = await volume.process.ask(control.GiveUp, ASK_S)
            except (ConnectionError, TimeoutError) as error:
                what = f"cannot reach the process of volume {name}"
                raise Refused(1, what, f"its process does not answer: {error}", "try again in a few seconds") from error
            given_up += answer.places if isinstance(answer, PlaceList) else ()
            more = isinstance(answer, PlaceList) and answer.more
        for place in given_up:
            self._host.note(f"volume/{name}", "given up", views.given_up_told(place, volume.known.members))
        return given_up

    async def _give_up_earlier(self, name: str) -> tuple[OpenPlace, ...]:
        """Give up a volume whose record this host has lost: other hosts drop its pages. Refused when none knows of
        one."""
        found = await self._earlier.forget(name)
        if not found:
            raise Refused(3, f"no volume {name}", "this host has none of that name", "agentctl volume ls")
        return tuple(OpenPlace(0, 0, host, "", b"") for host in found)
