"""The borrowing half of a host: late binding of slabs to other hosts' memory, and what to do when it goes away.

A slab stays cold (on disk) until its page requests cross the threshold; then two hosts are asked, the freer one is
taken, and the volume's process opens it. Evicted while hot it moves to another host; no longer worth its place, it may
be given back unasked. Losing a place never loses a byte: every acknowledged page is on this host's
disk or in the volume's queue as well, so the worst that happens is that the slab is cold again and looks for another
place while it is hot.

The volume's process is the truth of which place is open: after a restart of the agent it is asked (`VolumeFound`), and
this machine takes its word. Epochs come from `boot << 32`, so those of a later start are always higher.
"""

import random
from collections.abc import Mapping, Sequence
from typing import assert_never

from covey.core import Heard, HostId, LogEvent, Send, SetTimer, Undelivered
from plugins.memory.machine.borrower_events import (
    Actions,
    BorrowerAction,
    BorrowerEvent,
    BorrowerTick,
    CloseSlab,
    GraceOver,
    LenderLost,
    OfSlab,
    OpenSlab,
    SearchOver,
    SlabClosed,
    SlabCopied,
    SlabFailed,
    SlabNotOpened,
    SlabOpened,
    VolumeDetached,
    VolumeFound,
)
from plugins.memory.machine.leaving import close, closed, leave_if_evicted, lost_note, reconcile
from plugins.memory.machine.slab import BorrowedSlab, BorrowedVolume, LenderSearch, Link, SlabPlace, counted, names
from plugins.memory.messages import (
    Activity,
    CheckActivity,
    Done,
    Evict,
    FreeMem,
    Map,
    MrInfo,
    QueryMem,
    Renew,
    SlabActivity,
    SlabMessage,
    SlabRef,
    ToBorrower,
    ToLender,
)
from plugins.memory.policy import eviction, placement
from plugins.memory.policy.placement import CHOICES, DRAWN, LenderPeer

ANSWER_S = 2.0
"""How long the two hosts that are asked, or the one that is taken, may take to answer."""
OPEN_S = 10.0
"""How long the volume's process may take to open a slab."""
RETRY_S, RETRY_MAX_S = 2.0, 60.0
"""Pause after nobody had room; doubles up to the maximum."""
DOUBTED_S = 2
"""For how many seconds the volume's process may not know a place that we believe in: our view of it may be older."""
CLOSE_AT = 0.8
"""Part of the grace after which a slab that is still moving is closed, so that `Done` arrives in time."""


class Borrower:
    """`hot` in page requests per second, None: in proportion to a volume's slabs; `cold_share`: the part of it below
    which a slab is given back unasked, 0 never; `drawn`: hosts of which the `choices` freest by gossip are asked;
    `lease_s` in seconds; `boot` counts this agent's starts."""

    def __init__(
        self,
        me: HostId,
        rng: random.Random,
        boot: int,
        hot: float | None,
        lease_s: float,
        *,
        cold_share: float = 0.0,
        drawn: int = DRAWN,
        choices: int = CHOICES,
    ) -> None:
        self.me, self.hot, self.lease_s = me, hot, lease_s
        self._cold_share, self._drawn, self._choices = cold_share, drawn, choices
        self.volumes: dict[str, BorrowedVolume] = {}
        self._rng = rng
        self._epoch = boot << 32
        self._peers: tuple[LenderPeer, ...] = ()
        self._renewed_s = float("-inf")

    def handle(self, event: BorrowerEvent, now_s: float) -> Sequence[BorrowerAction]:
        match event:
            case BorrowerTick():
                return self._second_passed(event, now_s)
            case VolumeFound():
                return self._volume_found(event, now_s)
            case VolumeDetached():
                return self._volume_detached(event.volume)
            case LenderLost():
                return self._host_lost(event.host)
            case Heard():
                return self._heard(event.sender, event.message, now_s)
            case Undelivered():
                return self._undelivered(event.to, event.message, now_s)
            case _:
                slab = self._slab(event.volume, event.index)
                return [] if slab is None else self._slab_event(slab, event, now_s)

    def _slab_event(self, slab: BorrowedSlab, event: OfSlab, now_s: float) -> Actions:
        match event:
            case SlabOpened():
                return self._opened(slab, event.epoch)
            case SlabNotOpened():
                return self._not_opened(slab, event.epoch, event.why, now_s)
            case SlabCopied():
                return self._copied(slab, event.epoch)
            case SlabFailed():
                return self._failed(slab, event.epoch, event.why, now_s)
            case SlabClosed():
                return closed(slab, event.epoch)
            case SearchOver():
                return self._search_over(slab, event, now_s)
            case GraceOver():
                return self._grace_over(slab, event.epoch)
            case _:
                assert_never(event)

    def check(self) -> None:
        epochs: set[int] = set()
        for name, volume in self.volumes.items():
            assert len(volume.rates) == len(volume.slabs), f"{name} measures other slabs than it has"
            for index, slab in enumerate(volume.slabs):
                assert (slab.volume, slab.index) == (name, index), f"{slab.subject} is out of place"
                slab.check()
                places = [place.epoch for place in (slab.place, slab.next, slab.search) if place is not None]
                for epoch in (*places, *slab.left):
                    assert epoch not in epochs, f"epoch {epoch} is used twice"
                    epochs.add(epoch)

    # ---- the second ----

    def _second_passed(self, event: BorrowerTick, now_s: float) -> Actions:
        self._peers = event.peers
        actions: Actions = []
        if event.links is not None:
            for name, volume in self.volumes.items():
                links = event.links.get(name)
                actions += [action for slab in volume.slabs for action in self._looked(slab, links, now_s)]
        for name, requests in event.requests.items():
            if name in self.volumes:
                actions += self._measured(self.volumes[name], requests, now_s)
        return actions + self._renew(now_s)

    def _looked(self, slab: BorrowedSlab, links: Mapping[int, Link] | None, now_s: float) -> Actions:
        """What the volume's process says of its places each second. What it tells by itself comes sooner, but may be
        lost or overtaken: a place that it does not have, twice in a row, is lost. None: it does not answer."""
        slab.link = links.get(slab.place.epoch, "") if links and slab.place is not None else ""
        places = [place for place in (slab.place, slab.next) if place is not None]
        gone = [place for place in places if links is not None and links.get(place.epoch, "leaving") == "leaving"]
        slab.doubted = slab.doubted + 1 if gone and not slab.closing else 0
        if slab.doubted < DOUBTED_S:
            return []
        slab.doubted = 0
        return [action for place in gone for action in self._failed(slab, place.epoch, "it has no link", now_s)]

    def _measured(self, volume: BorrowedVolume, requests: Sequence[int], now_s: float) -> Actions:
        """Each second for each slab of the host: with thousands of slabs nothing costs more."""
        volume.rates = placement.activities(volume.rates, requests)
        unplaced = [slab for slab in volume.slabs if slab.place is None and slab.search is None]
        actions: Actions = []
        for slab in unplaced:
            if now_s >= slab.retry_at_s and placement.is_hot(volume.rates[slab.index], volume.hot):
                why = f"{_rate(volume.rates[slab.index])} page requests/s, hot above {_rate(volume.hot)}"
                actions += self._seek(slab, "hot", why, now_s)
        return actions if volume.cold is None else actions + self._give_back_cold(volume)

    def _give_back_cold(self, volume: BorrowedVolume) -> Actions:
        actions: Actions = []
        for slab, rate in zip(volume.slabs, volume.rates, strict=True):
            if placement.is_cold(rate, volume.cold, volume.hot) and slab.state == "mapped":
                assert slab.place is not None and volume.cold is not None
                why = f"{_rate(rate)} page requests/s, cold below {_rate(volume.cold)}"
                note = LogEvent(slab.subject, "cold", f"{why}; {slab.place.lender} gets its memory back")
                actions += [note, close(slab)]
        return actions

    def _requests_per_s(self, slab: BorrowedSlab) -> float:
        return self.volumes[slab.volume].rates[slab.index]

    def _renew(self, now_s: float) -> Actions:
        """Every third of a lease: one message per lender."""
        if now_s < self._renewed_s + self.lease_s / 3:
            return []
        self._renewed_s = now_s
        by_lender: dict[HostId, list[SlabRef]] = {}
        for slab in self._all():
            for place in (slab.place, slab.next):
                if place is not None:
                    by_lender.setdefault(place.lender, []).append(slab.ref(place.epoch))
            for epoch, lender in slab.left.items():
                by_lender.setdefault(lender, []).append(slab.ref(epoch))
        return [Send(lender, Renew(tuple(slabs)), self.lease_s / 3) for lender, slabs in sorted(by_lender.items())]

    # ---- finding a place ----

    def _seek(self, slab: BorrowedSlab, event: str, why: str, now_s: float, without: HostId | None = None) -> Actions:
        """Ask two hosts. Nobody to ask: say so, and try again later. `without`: the lender that it has to leave."""
        volume = self.volumes[slab.volume]
        holding = {host for other in volume.slabs for host in other.hosts()}
        leaving = sum(other.leaves(without) for other in self._all()) if without is not None else 0
        free = eviction.free_at_others(self._peers, volume.slab_bytes, self.me, without, leaving)
        asked = placement.hosts_to_ask_by_view(free, holding, self._rng, self._choices, self._drawn)
        if not asked:
            return self._retry_later(slab, "nobody asked", f"{why}; no other host says that it has room", now_s)
        self._epoch += 1
        slab.search = LenderSearch(self._epoch, asked)
        fresh = [host for host in asked if host not in holding]
        chosen = f", freest of {self._drawn} drawn," if self._choices < self._drawn < len(free) else ""
        reason = (
            f"{why}; asked {names(asked)}{chosen} of {len(free)} with room; no slab of {slab.volume}: {names(fresh)}"
        )
        query = QueryMem(slab.volume, slab.index, self._epoch, volume.slab_bytes)
        sends: Actions = [Send(host, query, ANSWER_S) for host in asked]
        return [LogEvent(slab.subject, event, reason), *sends, self._search_timer(slab, "answers", 1.5 * ANSWER_S)]

    def _search_timer(self, slab: BorrowedSlab, step: str, after_s: float) -> SetTimer[SearchOver | GraceOver]:
        assert slab.search is not None
        return SetTimer(after_s, SearchOver(slab.volume, slab.index, slab.search.epoch, step))

    def _retry_later(self, slab: BorrowedSlab, event: str, reason: str, now_s: float) -> Actions:
        slab.search = None
        slab.retries += 1
        pause_s = min(RETRY_MAX_S, RETRY_S * 2 ** min(slab.retries - 1, 10))
        slab.retry_at_s = now_s + pause_s
        actions: Actions = [LogEvent(slab.subject, event, f"{reason}; stays on disk, next try in {pause_s:g} s")]
        return actions + leave_if_evicted(slab)

    def _offered(self, slab: BorrowedSlab, host: HostId, slabs: int, now_s: float) -> Actions:
        search = slab.search
        if search is None or search.chosen is not None or host not in search.asked or host in search.offers:
            return []
        search.offers[host] = slabs
        return self._take(slab, search, now_s) if len(search.offers) == len(search.asked) else []

    def _take(self, slab: BorrowedSlab, search: LenderSearch, now_s: float) -> Actions:
        """The freer of those that answered; what each said goes into the story."""
        ours, said = self.volumes[slab.volume].lenders(), search.said
        search.chosen = placement.freest(search.asked, search.offers, ours)
        if search.chosen is None:
            return self._retry_later(slab, "nobody has room", said, now_s)
        volume = self.volumes[slab.volume]
        taken = Map(slab.volume, slab.index, search.epoch, volume.slab_bytes, volume.page_bytes)
        equal = sorted(search.offers.values())[-2:] == [search.offers[search.chosen]] * 2
        best = f"no less room, and {counted(ours[search.chosen])} of {slab.volume}" if equal else "the most room"
        note = LogEvent(slab.subject, "taken", f"{said}; {search.chosen} has {best}")
        return [note, Send(search.chosen, taken, ANSWER_S), self._search_timer(slab, "map", 1.5 * ANSWER_S)]

    def _next_best(self, slab: BorrowedSlab, search: LenderSearch, why: str, now_s: float) -> Actions:
        """The chosen host is out; take the other one, if it has room. What the volume's process was told to open is
        closed first: it may be open, with pages that nobody else has."""
        assert search.chosen is not None
        lost, granted, old = search.chosen, search.place, search.epoch
        search.offers[lost], search.chosen, search.place = 0, None, None
        self._epoch += 1
        search.epoch = self._epoch
        back: BorrowerAction = Send(lost, Done(slab.volume, slab.index, old))
        if granted is not None:
            slab.left[old] = lost
            back = CloseSlab(slab.volume, slab.index, old)
        return [LogEvent(slab.subject, "refused", f"{lost}: {why}"), back, *self._take(slab, search, now_s)]

    def _granted(self, slab: BorrowedSlab, search: LenderSearch, info: MrInfo) -> Actions:
        assert search.chosen is not None
        search.place = SlabPlace(search.epoch, search.chosen, info.address, info.secret)
        return [OpenSlab(slab.volume, slab.index, search.place), self._search_timer(slab, "open", OPEN_S)]

    def _search_over(self, slab: BorrowedSlab, event: SearchOver, now_s: float) -> Actions:
        search = slab.search
        if search is None or search.epoch != event.epoch:
            return []
        match event.step:
            case "answers" if search.chosen is None:
                return self._take(slab, search, now_s)
            case "map" if search.chosen is not None and search.place is None:
                return self._next_best(slab, search, "did not answer", now_s)
            case "open" if search.place is not None:
                return self._not_opened(slab, event.epoch, f"not opened within {OPEN_S:g} s", now_s)
            case _:
                return []

    def _opened(self, slab: BorrowedSlab, epoch: int) -> Actions:
        search = slab.search
        if search is None or search.place is None or search.epoch != epoch:
            return [CloseSlab(slab.volume, slab.index, epoch)]
        slab.search, slab.retries = None, 0
        if slab.place is None:
            slab.place, slab.link = search.place, "open"
        else:
            slab.next = search.place
        event = "mapped" if slab.next is None else "moving"
        note = LogEvent(slab.subject, event, f"on {search.place.lender} ({search.place.address}), epoch {epoch}")
        return [note, *(self._copied(slab, epoch) if search.copied else [])]

    def _not_opened(self, slab: BorrowedSlab, epoch: int, why: str, now_s: float) -> Actions:
        search = slab.search
        if search is None or search.place is None or search.epoch != epoch:
            return []
        return self._next_best(slab, search, why, now_s)

    # ---- losing a place ----

    def _failed(self, slab: BorrowedSlab, epoch: int, why: str, now_s: float) -> Actions:
        """Nothing is lost: what it held is on disk or in the volume's queue. Only when all of it is on disk may the
        lender free it, and another place be looked for. A place may fail before we hear that it was opened: what the
        process tells by itself overtakes its answers."""
        search = slab.search
        if search is not None and search.epoch == epoch and search.place is not None:
            return [*self._opened(slab, epoch), *self._failed(slab, epoch, why, now_s)]
        if slab.next is not None and slab.next.epoch == epoch:
            lost, slab.next = slab.next, None
            slab.left[epoch] = lost.lender
            note = lost_note(slab, lost, why, "the place it was leaving serves it")
            return [note, CloseSlab(slab.volume, slab.index, epoch), *leave_if_evicted(slab)]
        if slab.place is None or slab.place.epoch != epoch or slab.closing:
            return []
        slab.lost = True
        note = lost_note(slab, slab.place, why, "the disk serves it, until another place is found")
        return [note, close(slab)]

    def _host_lost(self, host: HostId) -> Actions:
        """Its places are closed at once, also those that nobody reads now; a search does not wait for its answer."""
        actions: Actions = []
        for slab in self._all():
            if slab.next is not None and slab.next.lender == host:
                actions.append(CloseSlab(slab.volume, slab.index, slab.next.epoch))
            if slab.place is not None and slab.place.lender == host and not slab.closing:
                actions += [LogEvent(slab.subject, "lender gone", f"{host} is gone from the rack"), close(slab)]
        return actions

    # ---- eviction ----

    def _evict(self, slab: BorrowedSlab, sender: HostId, message: Evict, now_s: float) -> Actions:
        """Move if the slab is hot and somebody has room, within the grace; else the disk serves it (§2.4.4)."""
        place = slab.place
        if place is None or place.epoch != message.epoch or place.lender != sender:
            return self._evict_other(slab, sender, message, now_s)
        if slab.evicted or slab.closing:
            return []
        slab.evicted = True
        why = f"{sender} needs its memory back within {message.grace_s:g} s"
        if not self._moves(slab):
            cool = f"{why}; {self._requests_per_s(slab):.1f} page requests/s is not hot, the disk will do"
            return [LogEvent(slab.subject, "evicted", cool), close(slab)]
        timer: SetTimer[SearchOver | GraceOver] = SetTimer(
            CLOSE_AT * message.grace_s, GraceOver(slab.volume, slab.index, place.epoch)
        )
        return [timer, *self._seek(slab, "evicted", why, now_s, without=sender)]

    def _moves(self, slab: BorrowedSlab) -> bool:
        """Is it worth looking for another place with its pages, rather than leaving them to the disk?"""
        return placement.is_hot(self._requests_per_s(slab), self.volumes[slab.volume].hot)

    def _evict_other(self, slab: BorrowedSlab, sender: HostId, message: Evict, now_s: float) -> Actions:
        """Not the place in use: the one being opened or filled is given up; anything else is not ours any more."""
        if slab.next is not None and slab.next.epoch == message.epoch:
            return [CloseSlab(slab.volume, slab.index, message.epoch)]
        search = slab.search
        if search is not None and search.epoch == message.epoch and search.chosen == sender:
            return self._next_best(slab, search, "wants it back already", now_s)
        return [Send(sender, Done(slab.volume, slab.index, message.epoch))]

    def _copied(self, slab: BorrowedSlab, epoch: int) -> Actions:
        if slab.search is not None and slab.search.epoch == epoch:
            slab.search.copied = True
        moved = slab.next is not None and slab.next.epoch == epoch and not slab.closing
        return [close(slab)] if moved else []

    def _grace_over(self, slab: BorrowedSlab, epoch: int) -> Actions:
        late = slab.place is not None and slab.place.epoch == epoch and not slab.closing
        return [close(slab)] if late else []

    # ---- messages ----

    def _heard(self, sender: HostId, message: ToBorrower, now_s: float) -> Actions:
        match message:
            case CheckActivity():
                return [Send(sender, self._activity(message), ANSWER_S)]
            case FreeMem() | MrInfo() | Evict():
                return self._heard_about_slab(sender, message, now_s)
            case _:
                assert_never(message)

    def _heard_about_slab(self, sender: HostId, message: FreeMem | MrInfo | Evict, now_s: float) -> Actions:
        slab = self._slab(message.volume, message.index)
        if slab is None:
            stale = isinstance(message, Evict) or (isinstance(message, MrInfo) and not message.refused)
            return [_give_back(sender, message)] if stale else []
        search = slab.search
        match message:
            case Evict():
                return self._evict(slab, sender, message, now_s)
            case FreeMem():
                current = search is not None and search.epoch == message.epoch
                return self._offered(slab, sender, message.slabs, now_s) if current else []
            case MrInfo():
                return self._heard_mr_info(slab, sender, message, now_s)

    def _heard_mr_info(self, slab: BorrowedSlab, sender: HostId, message: MrInfo, now_s: float) -> Actions:
        search = slab.search
        if search is None or search.epoch != message.epoch or search.chosen != sender:
            known = {place.epoch for place in (slab.place, slab.next) if place is not None}
            unused = not message.refused and message.epoch not in known
            return [_give_back(sender, message)] if unused else []
        if search.place is not None:
            return []
        if message.refused:
            return self._next_best(slab, search, message.refused, now_s)
        return self._granted(slab, search, message)

    def _activity(self, message: CheckActivity) -> Activity:
        known: list[SlabActivity] = []
        for ref in message.slabs:
            slab = self._slab(ref.volume, ref.index)
            if slab is not None and slab.place is not None and slab.place.epoch == ref.epoch:
                known.append(SlabActivity(ref, self._requests_per_s(slab)))
        return Activity(message.round, tuple(known))

    def _undelivered(self, to: HostId, message: ToLender, now_s: float) -> Actions:
        match message:
            case QueryMem() | Map():
                return self._not_asked(to, message, now_s)
            case Renew() | Done() | Activity():
                return []  # a lost Renew is repeated, a lost Done ends with the lease, who is silent counts as idle
            case _:
                assert_never(message)

    def _not_asked(self, to: HostId, message: QueryMem | Map, now_s: float) -> Actions:
        slab = self._slab(message.volume, message.index)
        search = slab.search if slab is not None else None
        if slab is None or search is None or search.epoch != message.epoch:
            return []
        if isinstance(message, QueryMem):
            return self._offered(slab, to, 0, now_s)
        if search.chosen == to and search.place is None:
            return self._next_best(slab, search, "did not answer", now_s)
        return []

    # ---- volumes ----

    def _volume_found(self, event: VolumeFound, now_s: float) -> Actions:
        """Take the process's word for what is open; give back what it does not have."""
        known = self.volumes.get(event.volume)
        if known is None:
            slabs = [BorrowedSlab(event.volume, index) for index in range(event.slabs)]
            hot = placement.hot_for(event.slab_bytes) if self.hot is None else self.hot
            cold = self._cold_share * hot or None
            known = self.volumes[event.volume] = BorrowedVolume(
                event.slab_bytes, event.page_bytes, slabs, [0.0] * event.slabs, hot, cold
            )
        open_now: dict[int, list[SlabPlace]] = {}
        for index, place in event.places:
            open_now.setdefault(index, []).append(place)
        actions: Actions = []
        for slab in known.slabs:
            found = sorted(open_now.get(slab.index, []), key=lambda place: place.epoch)
            actions += reconcile(slab, found)
        return actions

    def _volume_detached(self, name: str) -> Actions:
        volume = self.volumes.pop(name, None)
        actions: Actions = []
        for slab in volume.slabs if volume else ():
            held = [(place.lender, place.epoch) for place in (slab.place, slab.next) if place is not None]
            if slab.search is not None and slab.search.chosen is not None:
                held.append((slab.search.chosen, slab.search.epoch))
            held += [(lender, epoch) for epoch, lender in slab.left.items()]
            actions += [Send(lender, Done(name, slab.index, epoch)) for lender, epoch in held]
        return actions

    # ---- looking ----

    def _slab(self, volume: str, index: int) -> BorrowedSlab | None:
        found = self.volumes.get(volume)
        return found.slabs[index] if found is not None and index < len(found.slabs) else None

    def _all(self) -> list[BorrowedSlab]:
        return [slab for volume in self.volumes.values() for slab in volume.slabs]


def _give_back(to: HostId, message: SlabMessage) -> Send:
    return Send(to, Done(message.volume, message.index, message.epoch))


def _rate(requests_per_s: float) -> str:
    return f"{requests_per_s:.0f}" if requests_per_s >= 10 else f"{requests_per_s:.3g}"
