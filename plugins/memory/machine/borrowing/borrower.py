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

import msgspec

from covey.core.events import Heard, LogEvent, Send, SetTimer, Undelivered
from covey.core.ids import HostId
from plugins.memory.machine.borrowing import members
from plugins.memory.machine.borrowing.budgets import BudgetsAsked, replaces
from plugins.memory.machine.borrowing.events import (
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
    VolumeForgotten,
    VolumeFound,
)
from plugins.memory.machine.borrowing.leaving import (
    close,
    closed,
    give_back,
    given_back,
    leave_if_evicted,
    lost_note,
    reconcile,
)
from plugins.memory.machine.borrowing.lender_search import Opening, Querying, Requesting, names, without
from plugins.memory.machine.borrowing.members import search_timer
from plugins.memory.machine.borrowing.place import Link, SlabPlace
from plugins.memory.machine.borrowing.slab import BorrowedSlab, BorrowedVolume, Cold, Migrating, counted, rate_text
from plugins.memory.machine.rack_accounts import RackAccounts
from plugins.memory.messages import (
    AboutSlab,
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
    ToBorrower,
    ToLender,
    Unrenewed,
)
from plugins.memory.policy import eviction, placement
from plugins.memory.policy.placement import HostsDrawn, LenderPeers

ANSWER_S = 2.0
"""Seconds that the two hosts that are asked, or the one that is chosen, may take to answer."""
OPEN_S = 10.0
"""Seconds that the volume's process may take to open a slab."""
RETRY_S, RETRY_MAX_S = 2.0, 60.0
"""First and longest pause in seconds after no host had room; the pause doubles."""
DOUBTED_S = 2
"""Seconds for which the volume's process may fail to report a place that is known here: its answer may be older."""
CLOSE_AT = 0.8
"""Part of the grace after which a slab that is still moving is closed, so that `Done` arrives in time."""


class Borrower:
    """`hot`: page requests per second, None: in proportion to a volume's slab size. `cold_share`: the part of `hot`
    below which a slab is given back unasked, 0: never."""

    def __init__(
        self,
        me: HostId,
        rng: random.Random,
        boot: int,
        hot: float | None,
        lease_s: float,
        *,
        cold_share: float = 0.0,
        hosts: HostsDrawn = HostsDrawn(),
        accounts: RackAccounts | None = None,
    ) -> None:
        self.me, self.hot, self.lease_s = me, hot, lease_s
        self._cold_share, self._hosts = cold_share, hosts
        self.volumes: dict[str, BorrowedVolume] = {}
        self.awaited: set[str] = set()  # volumes whose processes have not said yet which places they have
        self._rng = rng
        self._epoch = boot << 32
        self._peers = LenderPeers()
        self._renewed_s = float("-inf")
        self._asked_for = BudgetsAsked(accounts or RackAccounts(me, lease_s), self.volumes)

    def handle(self, event: BorrowerEvent, now_s: float) -> Sequence[BorrowerAction]:
        match event:
            case BorrowerTick():
                return self._second_passed(event, now_s)
            case VolumeFound():
                return self._volume_found(event, now_s)
            case VolumeForgotten():
                return self._volume_forgotten(event.volume)
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
            volume.check()
            assert not members.together(volume), members.together(volume)[0]
            for index, slab in enumerate(volume.slabs):
                assert (slab.volume, slab.index) == (name, index), f"{slab.subject} is out of place"
                for epoch in slab.epochs:
                    assert epoch not in epochs, f"epoch {epoch} is used twice"
                    epochs.add(epoch)

    # ---- the second ----

    def _second_passed(self, event: BorrowerTick, now_s: float) -> Actions:
        self._peers = event.peers if isinstance(event.peers, LenderPeers) else LenderPeers(event.peers)
        self._asked_for.learn_payers()
        actions: Actions = []
        if event.links is not None:
            for name, volume in self.volumes.items():
                links = event.links.get(name)
                actions += [action for slab in volume.slabs for action in self._looked(slab, links, now_s)]
        for name, requests in event.requests.items():
            if name in self.volumes:
                actions += self._measured(self.volumes[name], requests, event.empty.get(name, ()), now_s)
        return actions + self._renew(now_s)

    def _looked(self, slab: BorrowedSlab, links: Mapping[int, Link] | None, now_s: float) -> Actions:
        """Compare with what the volume's process says of its links each second. What it reports by itself comes sooner,
        but may be lost or overtaken: a place that it does not have, twice in a row, is lost. `links` None: it does not
        answer."""
        if slab.place is not None:
            slab.linked(links.get(slab.place.epoch, "") if links else "")
        gone = [p for p in slab.places if links is not None and links.get(p.epoch, "leaving") == "leaving"]
        slab.doubted = slab.doubted + 1 if gone and not slab.is_closing else 0
        if slab.doubted < DOUBTED_S:
            return []
        slab.doubted = 0
        return [action for place in gone for action in self._failed(slab, place.epoch, "it has no link", now_s)]

    def _measured(self, volume: BorrowedVolume, requests: Sequence[int], empty: Sequence[int], now_s: float) -> Actions:
        """Take in this second's page requests. This runs each second for each slab of the host, so it must be cheap."""
        volume.rates = placement.activities(volume.rates, requests)
        actions: Actions = []
        if volume.members > 1:
            for slab in members.homeless(volume, now_s):
                actions += self._seek(slab, "wanted", f"one of {volume.members} members has no lender", now_s)
            return actions
        hot = [volume.slabs[number] for number in placement.hot_slabs(volume.rates, volume.hot)]
        for slab in [slab for slab in hot if isinstance(slab.phase, Cold) and now_s >= slab.retry_at_s]:
            why = f"{rate_text(volume.rates[slab.index])} page requests/s, hot above {rate_text(volume.hot)}"
            actions += self._seek(slab, "hot", why, now_s)
        return actions if volume.cold is None and not empty else actions + self._give_back_cold(volume, empty)

    def _give_back_cold(self, volume: BorrowedVolume, empty: Sequence[int]) -> Actions:
        """Give cold slabs back. A slab whose content was discarded goes at any rate well below hot: there is nothing to
        read in it."""
        actions: Actions = []
        for slab, rate in zip(volume.slabs, volume.rates, strict=True):
            is_empty = slab.index in empty
            cold = volume.hot * placement.EMPTY_SHARE or None if is_empty else volume.cold
            if placement.is_cold(rate, cold, volume.hot) and slab.state == "mapped":
                assert slab.place is not None and cold is not None
                why = "everything in it was discarded" if is_empty else f"cold below {rate_text(cold)}"
                why = f"{rate_text(rate)} page requests/s, {why}; {slab.place.lender} gets its memory back"
                actions += [LogEvent(slab.subject, "cold", why), close(slab)]
        return actions

    def _requests_per_s(self, slab: BorrowedSlab) -> float:
        return self.volumes[slab.volume].rates[slab.index]

    def _renew(self, now_s: float) -> Actions:
        """Every third of a lease, renew with each lender all that it holds."""
        if now_s < self._renewed_s + self.lease_s / 3:
            return []
        self._renewed_s = now_s
        return [Send(lender, renew, self.lease_s / 3) for lender, renew in members.renewals(self.volumes.values())]

    # ---- finding a place ----

    def _seek(self, slab: BorrowedSlab, event: str, why: str, now_s: float, leaving: HostId | None = None) -> Actions:
        """Ask two hosts for room. If there is none to ask, note why and try again later. `leaving`: lender that the
        slab must leave."""
        volume = self.volumes[slab.volume]
        away = sum(other.leaves(leaving) for other in self._all()) if leaving is not None else 0
        room = eviction.free_at_others(self._peers, volume.slab_bytes, self.me, leaving, away)
        free, nobody, none = self._asked_for.may_ask(slab, room, now_s)
        allowed = members.kept_apart(volume, slab, free, self._peers)
        if not allowed:
            other = members.may_make_way(volume, slab, free) if leaving is None else None
            if other is None:
                return self._retry_later(slab, nobody, f"{why}; {none}", now_s)
            slab.retries = 0
            makes = f"a member of {slab.subject} may be on its host, but not on hosts with room"
            way = self._seek(other, "moves away", makes, now_s, leaving=other.hosts()[0])
            return [*self._retry_later(slab, nobody, f"{why}; {other.subject} moves away for it", now_s), *way]
        most, drawn = self._hosts.asked, self._hosts.drawn
        asked = placement.hosts_to_ask_by_view(allowed, volume.by_host.near, self._rng, most, drawn)
        fresh = [host for host in asked if host not in volume.by_host.near]  # which knows of this search once it begins
        self._epoch += 1
        slab.seek(Querying(epoch=self._epoch, asked=asked, offers={}))
        chosen = f", freest of {drawn} drawn," if most < drawn < len(allowed) else ""
        said = (
            f"{why}; asked {names(asked)}{chosen} of {len(allowed)} with room; hosts "
            f"without a slab of {slab.volume}: {names(fresh)}"
        )
        query = QueryMem(slab.volume, slab.index, self._epoch, volume.slab_bytes)
        sends: Actions = [Send(host, query, ANSWER_S) for host in asked]
        timer = search_timer(slab, self._epoch, "answers", 1.5 * ANSWER_S)
        return [LogEvent(slab.subject, event, said), *sends, timer]

    def _retry_later(self, slab: BorrowedSlab, event: str, reason: str, now_s: float, late: bool = False) -> Actions:
        slab.search_ended(now_s, late)
        slab.retries += 1
        pause_s = min(RETRY_MAX_S, RETRY_S * 2 ** min(slab.retries - 1, 10))
        slab.retry_at_s = now_s + pause_s
        why = f"{reason}; {members.without(slab)}, next try in {pause_s:g} s"
        return [LogEvent(slab.subject, event, why), *leave_if_evicted(slab)]

    def _offered(self, slab: BorrowedSlab, host: HostId, slabs: int, now_s: float, late: bool = False) -> Actions:
        search = slab.search
        if not isinstance(search, Querying) or host not in search.asked or host in search.offers:
            return []
        search = search.offered(host, slabs, late)
        if len(search.offers) == len(search.asked):
            return self._take(slab, search, now_s)
        slab.search_on(search)
        return []

    def _take(self, slab: BorrowedSlab, search: Querying, now_s: float) -> Actions:
        """Choose the freest host of those that answered; what each said goes into the event log."""
        volume, said = self.volumes[slab.volume], search.said
        chosen = placement.freest(search.asked, search.offers, volume.by_host.chosen)
        if chosen is None:
            return self._retry_later(slab, "no host has room", said, now_s, search.late)
        had = volume.by_host.chosen[chosen]
        slab.search_on(search.requesting(chosen))
        sizes, payer = (volume.slab_bytes, volume.page_bytes), (volume.tenant, volume.job)
        taken = Map(slab.volume, slab.index, search.epoch, *sizes, volume.members, *payer, replaces(slab))
        equal = sorted(search.offers.values())[-2:] == [search.offers[chosen]] * 2
        best = f"no less room, and {counted(had)} of {slab.volume}" if equal else "the most room"
        note = LogEvent(slab.subject, "taken", f"{said}; {chosen} has {best}")
        return [note, Send(chosen, taken, ANSWER_S), search_timer(slab, search.epoch, "map", 1.5 * ANSWER_S)]

    def _next_best(
        self, slab: BorrowedSlab, search: Requesting | Opening, why: str, now_s: float, late: bool = False
    ) -> Actions:
        """The chosen host is out; take the next one, if it has room. A place that the volume's process was told to open
        is closed first: it may be open, with pages that are nowhere else."""
        lost, old = search.chosen, search.epoch
        self._epoch += 1
        back: BorrowerAction = Send(lost, Done(slab.volume, slab.index, old))
        if isinstance(search, Opening):
            slab.left[old] = lost
            back = CloseSlab(slab.volume, slab.index, old)
        note = LogEvent(slab.subject, "refused", f"{lost}: {why}")
        return [note, back, *self._take(slab, without(search, self._epoch, late), now_s)]

    def _granted(self, slab: BorrowedSlab, search: Requesting, info: MrInfo) -> Actions:
        opening = search.granted(info.address, info.secret)
        slab.search_on(opening)
        opens = OpenSlab(slab.volume, slab.index, opening.place)
        return [opens, search_timer(slab, search.epoch, "open", OPEN_S)]

    def _search_over(self, slab: BorrowedSlab, event: SearchOver, now_s: float) -> Actions:
        search = slab.search
        if search is None or search.epoch != event.epoch:
            return []
        match search:
            case Querying() if event.step == "answers":
                return self._take(slab, search.over(), now_s)
            case Requesting() if event.step == "map":
                return self._next_best(slab, search, "did not answer", now_s, late=True)
            case Opening() if event.step == "open":
                return self._next_best(slab, search, f"not opened within {OPEN_S:g} s", now_s, late=True)
            case _:
                return []

    def _opened(self, slab: BorrowedSlab, epoch: int) -> Actions:
        search = slab.search
        if not isinstance(search, Opening) or search.epoch != epoch:
            return [CloseSlab(slab.volume, slab.index, epoch)]
        place = slab.opened()
        event = "mapped" if slab.next is None else "moving"
        note = LogEvent(slab.subject, event, f"on {place.lender} ({place.address}), epoch {epoch}")
        return [note, *(self._copied(slab, epoch) if search.copied else [])]

    def _not_opened(self, slab: BorrowedSlab, epoch: int, why: str, now_s: float) -> Actions:
        search = slab.search
        if isinstance(search, Opening) and search.epoch == epoch:
            return self._next_best(slab, search, why, now_s)
        return []

    # ---- losing a place ----

    def _failed(self, slab: BorrowedSlab, epoch: int, why: str, now_s: float) -> Actions:
        """Close a place that failed. Nothing is lost: its pages are on disk or in the volume's queue. Only when all are
        on disk may the lender free it, and another place be looked for. A place may fail before we hear that it was
        opened: reports of the process overtake its answers."""
        search = slab.search
        if isinstance(search, Opening) and search.epoch == epoch:
            return [*self._opened(slab, epoch), *self._failed(slab, epoch, why, now_s)]
        if slab.next is not None and slab.next.epoch == epoch:
            lost = slab.next_gone()
            slab.left[epoch] = lost.lender
            note = lost_note(slab, lost, why, "the lender it was leaving serves it")
            return [note, CloseSlab(slab.volume, slab.index, epoch), *leave_if_evicted(slab)]
        if slab.place is None or slab.place.epoch != epoch or slab.is_closing:
            return []
        note = lost_note(slab, slab.place, why, f"{members.instead(slab)}, until another lender is found")
        return [note, close(slab, lost=True)]

    def _host_lost(self, host: HostId) -> Actions:
        """Close the places of a lost host at once, also those that are not read now; searches do not wait for its
        answer."""
        actions: Actions = []
        for slab in self._all():
            if slab.next is not None and slab.next.lender == host:
                actions.append(CloseSlab(slab.volume, slab.index, slab.next.epoch))
            if slab.place is not None and slab.place.lender == host and not slab.is_closing:
                actions += [LogEvent(slab.subject, "lender gone", f"{host} is gone from the rack"), close(slab)]
        return actions

    # ---- eviction ----

    def _evict(self, slab: BorrowedSlab, sender: HostId, message: Evict, now_s: float) -> Actions:
        """Move the slab if it is hot and another host has room, within the grace; else the disk serves it (§2.4.4)."""
        place = slab.place
        if place is None or place.epoch != message.epoch or place.lender != sender:
            return self._evict_other(slab, sender, message, now_s)
        if slab.is_evicted or slab.is_closing:
            return []
        slab.evict()
        why = f"{sender} needs its memory back within {message.grace_s:g} s"
        if not self._moves(slab):
            cool = f"{why}; {self._requests_per_s(slab):.1f} page requests/s is not hot, so it goes to the disk"
            return [LogEvent(slab.subject, "evicted", cool), close(slab)]
        timer: SetTimer[SearchOver | GraceOver] = SetTimer(
            CLOSE_AT * message.grace_s, GraceOver(slab.volume, slab.index, place.epoch)
        )
        if isinstance(slab.phase, Migrating):
            return [
                timer,
                LogEvent(slab.subject, "evicted", f"{why}; another lender is being searched for or filled already"),
            ]
        return [timer, *self._seek(slab, "evicted", why, now_s, leaving=sender)]

    def _moves(self, slab: BorrowedSlab) -> bool:
        """Is it worth looking for another place for its pages, rather than leaving them to the disk?"""
        return slab.members > 1 or placement.is_hot(self._requests_per_s(slab), self.volumes[slab.volume].hot)

    def _evict_other(self, slab: BorrowedSlab, sender: HostId, message: Evict, now_s: float) -> Actions:
        """A lender wants back a place that is not in use: one that is being opened or filled is given up; any other is
        not ours any more."""
        if slab.next is not None and slab.next.epoch == message.epoch:
            return [CloseSlab(slab.volume, slab.index, message.epoch)]
        search = slab.search
        if isinstance(search, Requesting | Opening) and (search.epoch, search.chosen) == (message.epoch, sender):
            return self._next_best(slab, search, "is taking it back already", now_s)
        return [Send(sender, Done(slab.volume, slab.index, message.epoch))]

    def _copied(self, slab: BorrowedSlab, epoch: int) -> Actions:
        search = slab.search
        if isinstance(search, Opening) and search.epoch == epoch:
            slab.search_on(msgspec.structs.replace(search, copied=True))
        moved = slab.next is not None and slab.next.epoch == epoch and not slab.is_closing
        return [close(slab)] if moved else []

    def _grace_over(self, slab: BorrowedSlab, epoch: int) -> Actions:
        late = slab.place is not None and slab.place.epoch == epoch and not slab.is_closing
        return [close(slab)] if late else []

    # ---- messages ----

    def _heard(self, sender: HostId, message: ToBorrower, now_s: float) -> Actions:
        match message:
            case CheckActivity():
                return [Send(sender, self._activity(message), ANSWER_S)]
            case FreeMem() | MrInfo() | Evict() | Unrenewed():
                return self._heard_about_slab(sender, message, now_s)
            case _:
                assert_never(message)

    def _heard_about_slab(self, sender: HostId, message: AboutSlab, now_s: float) -> Actions:
        slab = self._slab(message.volume, message.index)
        if slab is None:
            return [] if message.volume in self.awaited else members.not_ours(sender, message)
        search = slab.search
        match message:
            case Unrenewed():
                return [members.still_used(self.volumes[slab.volume], slab, sender, message)]
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
            known = {place.epoch for place in slab.places}
            unused = not message.refused and message.epoch not in known
            return [give_back(sender, message)] if unused else []
        if not isinstance(search, Requesting):
            return []
        if why := message.refused or ("" if message.secret else "it sent no secret, so any host could be the lender"):
            return self._next_best(slab, search, why, now_s, message.late)
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
            return self._offered(slab, to, 0, now_s, late=True)
        if isinstance(search, Requesting) and search.chosen == to:
            return self._next_best(slab, search, "did not answer", now_s, late=True)
        return []

    # ---- volumes ----

    def _volume_found(self, event: VolumeFound, now_s: float) -> Actions:
        """Take over the places that the process has open; places that it does not have are given back."""
        self.awaited.discard(event.volume)
        known = self.volumes.get(event.volume)
        if known is None:
            known = self.volumes[event.volume] = members.new_volume(event, self.hot, self._cold_share)
        open_now: dict[int, list[SlabPlace]] = {}
        for index, place in event.places:
            open_now.setdefault(index, []).append(place)
        actions: Actions = []
        for slab in known.slabs:
            found = sorted(open_now.get(slab.index, []), key=lambda place: place.epoch)
            actions += reconcile(slab, found)
        return actions

    def _volume_forgotten(self, name: str) -> Actions:
        self.awaited.discard(name)
        volume = self.volumes.pop(name, None)
        return [] if volume is None else [action for slab in volume.slabs for action in given_back(slab)]

    # ---- looking ----

    def _slab(self, name: str, index: int) -> BorrowedSlab | None:
        volume = self.volumes.get(name)
        return volume.slabs[index] if volume is not None and index < len(volume.slabs) else None

    def _all(self) -> list[BorrowedSlab]:
        return [slab for volume in self.volumes.values() for slab in volume.slabs]
