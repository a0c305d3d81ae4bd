"""The lending half of a host: what it lends, to whom, under which epoch, and taking it back.

    offered (FreeMem) -> registering (Map) -> lent (MrInfo) -> freeing (Done) -> gone
                                                |  ^ Renew        ^
                                                v  '              |
                                             evicting (Evict) ----'   Done, or the deadline and the lease are over

A host is short of memory when less than its headroom is free, or when its tasks wait for memory. Headroom is a size, or
measured each second. Then E slabs must go, of whatever sizes. Only their borrowers know which of them are idle, so the
borrowers of E + E' slabs are asked and the E least active go (Infiniswap §2.5.2). A slab is freed after its borrower's
`Done`; without one, when both the grace and the lease have passed, since the borrower may be dead. That is safe at any
time: a borrower never has the only copy of a page here. Of one without a disk the other copy may be on its way to a new
place; so an orphan of those is kept for longer, and what must go is asked for as always.

While tasks wait for memory the kernel says so at once (PSI). What headroom lacks then goes without a question and
without grace, before jobs are killed for it.

After a restart of the agent the slab process says what it holds (`StoreFound`); the machine takes that over and grants
a new lease. When the slab process died, nothing is lent (`StoreLost`) until the next one says what it took up.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

import msgspec

from covey.core.events import Heard, LogEvent, Send, SetTimer, Undelivered
from covey.core.ids import HostId
from covey.core.units import format_size
from covey.ports.probes import MemoryNow
from plugins.memory.machine.lending.budgets import Excesses, why_refused
from plugins.memory.machine.lending.earlier_volumes import EarlierVolumes
from plugins.memory.machine.lending.events import (
    AnswersOver,
    BorrowerAway,
    FreeSlab,
    LenderAction,
    LenderEvent,
    LenderTick,
    MemoryStalls,
    RegisterSlab,
    SlabFreed,
    SlabNotRegistered,
    SlabRegistered,
    StoreAsleep,
    StoreFound,
    StoreLost,
)
from plugins.memory.machine.loan import Batch, Key, Lent, LoanedSlab, Loans
from plugins.memory.machine.rack_accounts import RackAccounts
from plugins.memory.messages import (
    SECRET_BYTES,
    Activity,
    CheckActivity,
    Done,
    Evict,
    FreeMem,
    Map,
    MrInfo,
    QueryMem,
    Renew,
    SlabRef,
    SlabsAreHeld,
    ToBorrower,
    ToLender,
    Unrenewed,
    in_parts,
)
from plugins.memory.policy import eviction, headroom, lending, mirroring
from plugins.memory.policy.headroom import HeadroomGrowth
from plugins.memory.policy.lending import Budget, Headroom

ANSWER_S = 2.0
"""Seconds that a message to a borrower may take."""
ANSWERS_S = 1.5 * ANSWER_S
"""Seconds that borrowers may take to say how busy their slabs are; slabs of one that does not answer count as idle."""

DRAINED = "this host is drained"
ASLEEP = "asleep"
"""Value of the address while there is no slab process: the first loan starts it."""

Actions = list[LenderAction]


class Lender:
    """`kept`: headroom, None to measure it; `lend_bytes`: cap; `grace_s`, `lease_s`: seconds; `entropy(n)` gives n
    unpredictable bytes."""

    def __init__(
        self,
        rng: random.Random,
        entropy: Callable[[int], bytes],
        kept: Headroom | None,
        lend_bytes: int,
        grace_s: float,
        lease_s: float,
        accounts: RackAccounts | None = None,
    ) -> None:
        self.lent = Loans()
        self.address = ""
        """Where the slab process listens, or `ASLEEP`; empty while it is not there."""
        self.budget: Budget | None = None
        self.evictions: dict[str, int] = dict.fromkeys(
            ("pressure", "stalled", "drained", "orphan", "forced", "budget"), 0
        )
        """Count of slabs taken back, by reason."""
        self._rng, self._entropy, self._kept = rng, entropy, kept
        self._lend_bytes, self._grace_s, self._lease_s = lend_bytes, grace_s, lease_s
        self.accounts = accounts or RackAccounts(HostId(""), lease_s)
        self.refused_for_budget = 0
        """Count of slabs that were not lent because a tenant or a job would have been over its budget."""
        self._excesses = Excesses(self.accounts)
        self._used_bytes: float | None = None
        self._growth = HeadroomGrowth()
        self._batch: Batch | None = None
        self._drained, self._round, self._away = False, 0, ""
        self.earlier = EarlierVolumes()
        self._let_go: set[tuple[HostId, SlabRef]] = set()
        """Slabs that their borrowers let go while no slab process was there."""

    def handle(self, event: LenderEvent, now_s: float) -> Sequence[LenderAction]:
        match event:
            case LenderTick():
                return self._second_passed(event, now_s)
            case MemoryStalls():
                return self._memory_stalls(event.memory)
            case SlabRegistered():
                return self._registered(event)
            case SlabNotRegistered():
                return self._not_registered(event)
            case SlabFreed():
                return self._freed(event)
            case StoreFound():
                return self._store_found(event, now_s)
            case StoreAsleep():
                self.address = ASLEEP
                return []
            case StoreLost():
                return self._store_lost(event.why)
            case BorrowerAway():
                return self._borrower_away(event, now_s)
            case AnswersOver():
                return self._answers_over(event.round, now_s)
            case Heard():
                return self._heard(event.sender, event.message, now_s)
            case Undelivered():
                return self._undelivered(event.to, event.message, now_s)
            case _:
                assert_never(event)

    def check(self) -> None:
        self.lent.check()
        for (borrower, volume, index), lent in self.lent.items():
            assert (borrower, volume, index) == (lent.borrower, lent.slab.volume, lent.slab.index)
            assert len(lent.secret) == SECRET_BYTES, f"{lent.subject} has no secret"
        assert self._batch is None or self._batch.needed_bytes > 0

    def spare_bytes(self) -> int:
        """Bytes that could be lent in addition now; 0 before the first measurement and while the slab process is
        down."""
        if self.budget is None or not self.address:
            return 0
        return lending.spare_bytes(msgspec.structs.replace(self.budget, lent_bytes=self.lent.size_bytes))

    def told_accounts(self) -> tuple[int, ...] | None:
        """The loans to each account, as this host gossips them; None: not known yet, or its slab process is gone."""
        known = self.address and all(lent.payer_known for lent in self.lent.values())
        return self.accounts.told() if known else None

    def held(self, borrower: HostId, asked: Sequence[SlabRef]) -> SlabsAreHeld:
        """The slabs of `asked` that the slab process has for that borrower. Not known before it has said what it
        holds."""
        if not self.address:
            return SlabsAreHeld(known=False)
        held = tuple(ref for ref in asked if self._find(borrower, ref) is not None)
        return SlabsAreHeld(known=True, slabs=held, address=self.address if held else "")

    def given_up(self, borrower: HostId, volume: str, since: int, boot: int) -> Actions:
        """A person said that this volume is made anew: free what is here of other boots of its borrower."""
        old = self.earlier.given_up(borrower, volume, range(since, boot + 1), self.lent.values())
        return [action for lent in old for action in self._free(lent, "done", "its volume is created again")]

    # ---- the second ----

    def _second_passed(self, event: LenderTick, now_s: float) -> Actions:
        memory = event.memory
        used_now_bytes = memory.total_bytes - memory.available_bytes
        self._drained = event.drained
        self._used_bytes = lending.memory_used(self._used_bytes, used_now_bytes)
        self.budget = Budget(
            total_bytes=memory.total_bytes,
            used_bytes=self._used_bytes,
            used_now_bytes=used_now_bytes,
            pressure=memory.pressure_some_avg10,
            headroom_bytes=self._headroom_bytes(memory, event.touched_bytes),
            lend_bytes=0 if event.drained else self._lend_bytes,
            lent_bytes=self.lent.size_bytes,
            touched_bytes=event.touched_bytes,
            promised_bytes=event.promised_bytes,
        )
        self.accounts.lends(self.lent.values())
        return [*self._overdue(now_s), *self._make_room(self.budget, now_s), *self._bring_back(now_s)]

    def _memory_stalls(self, memory: MemoryNow) -> Actions:
        """Take memory back at once, without grace: borrowers read the pages elsewhere. Does nothing while some is being
        freed."""
        if self.budget is None or any(lent.state == "freeing" for lent in self.lent.values()):
            return []
        missing_bytes = self.budget.headroom_bytes - memory.available_bytes
        leaving = {key: lent.size_bytes for key, lent in self.lent.items() if lent.state == "evicting"}
        staying = {key: lent.size_bytes for key, lent in sorted(self.lent.items()) if lent.state == "lent"}
        actions: Actions = []
        for key in eviction.slabs_at_once(leaving, staying, missing_bytes, self._rng):
            lent, ref = self.lent[key], self.lent[key].slab
            self.evictions["stalled"] += 1
            why = f"tasks wait for memory, {format_size(memory.available_bytes)} free; {lent.borrower} gets no grace"
            actions += [
                *self._free(lent, "taken back at once", why),
                Send(lent.borrower, Evict(ref.volume, ref.index, ref.epoch, 0.0), ANSWER_S),
            ]
        return actions

    def _headroom_bytes(self, memory: MemoryNow, touched_bytes: int) -> int:
        if self._kept is not None:
            return self._kept.of(memory.total_bytes)
        self._growth = headroom.grown(self._growth, headroom.own_memory(memory, touched_bytes))
        return headroom.headroom_auto(memory, self._growth, react_s(self._grace_s))

    def _borrower_away(self, event: BorrowerAway, now_s: float) -> Actions:
        """Extend leases for the time away and one lease more; once the borrower is back, to one lease at most."""
        until_s = now_s + event.for_s + self._lease_s
        for lent in self.lent.values():
            if lent.borrower == event.borrower:
                lent.expires_s = (max if event.for_s else min)(lent.expires_s, until_s)
        return []

    def _overdue(self, now_s: float) -> Actions:
        """Take back slabs that are past their lease or grace. A slab without a disk may be the only copy: it is not
        taken by force while the host has headroom."""
        lacks = self.budget is None or eviction.bytes_lacking(self.budget) > 0
        actions: Actions = []
        for lent in self.lent.values():
            if now_s < lent.expires_s:
                continue
            kept_s = mirroring.orphan_after_s(self._lease_s, lent.members)
            kept_until_s = lent.expires_s - self._lease_s + kept_s
            if lent.state == "lent":
                if now_s >= kept_until_s:
                    self.evictions["orphan"] += 1
                    actions += self._free(lent, "orphan", f"{lent.borrower} has not renewed it for {kept_s:g} s")
                elif now_s >= lent.asked_s + self._lease_s / 3:
                    lent.asked_s, ref = now_s, lent.slab
                    actions.append(Send(lent.borrower, Unrenewed(ref.volume, ref.index, ref.epoch), ANSWER_S))
            elif lent.state == "evicting" and now_s >= lent.deadline_s and (lacks or now_s >= kept_until_s):
                self.evictions["forced"] += 1
                why = f"{lent.borrower} did not release it in time; grace and lease are over"
                actions += self._free(lent, "forced", why)
        return actions

    def _make_room(self, budget: Budget, now_s: float) -> Actions:
        """Begin to take slabs back if memory is short. One batch at a time, since the next measurement shows what it
        brought."""
        needed_bytes = eviction.bytes_to_free(budget)
        if needed_bytes == 0 or self._batch is not None:
            return []
        leaving = any(lent.state in ("evicting", "freeing") for lent in self.lent.values())
        sizes = {key: lent.size_bytes for key, lent in sorted(self.lent.items()) if lent.state == "lent"}
        return [] if leaving or not sizes else self._begin_batch(needed_bytes, sizes, "", now_s)

    def _bring_back(self, now_s: float) -> Actions:
        """Take the least active slabs back from tenants and jobs that are over their budgets."""
        due = self._excesses.due(self.lent, now_s) if self._batch is None else None
        return [] if due is None else self._begin_batch(due.needed_bytes, due.sizes, due.why, now_s)

    def _begin_batch(self, needed_bytes: int, sizes: Mapping[Key, int], over: str, now_s: float) -> Actions:
        self._round += 1
        asked = eviction.candidates_for(sizes, needed_bytes, self._rng)
        self._batch = Batch(self._round, needed_bytes, asked, over)
        spared_bytes = sum(sizes[key] for key in asked) - needed_bytes
        if spared_bytes < min(sizes[key] for key in asked):
            return self._evict_least_active(self._batch, now_s)  # all of them must go: nobody needs to be asked
        return self._ask_activity(self._batch)

    # ---- eviction in a batch ----

    def _ask_activity(self, batch: Batch) -> Actions:
        by_borrower: dict[HostId, list[SlabRef]] = {}
        for key in batch.asked:
            by_borrower.setdefault(key[0], []).append(self.lent[key].slab)
        asks: Actions = []
        for borrower, slabs in sorted(by_borrower.items()):
            parts = in_parts(slabs)
            batch.waiting[borrower] = len(parts)
            asks += [Send(borrower, CheckActivity(batch.round, part), ANSWER_S) for part in parts]
        return [*asks, SetTimer(ANSWERS_S, AnswersOver(batch.round))]

    def _activity(self, sender: HostId, message: Activity, now_s: float) -> Actions:
        batch = self._batch
        if batch is None or message.round != batch.round or not batch.waiting[sender]:
            return []
        for said in message.activities:
            key = (sender, said.slab.volume, said.slab.index)
            if key in batch.asked:
                batch.activities[key] = said.requests_per_s
        batch.waiting[sender] -= 1
        return [] if any(batch.waiting.values()) else self._evict_least_active(batch, now_s)

    def _answers_over(self, round: int, now_s: float) -> Actions:
        if self._batch is None or self._batch.round != round:
            return []
        return self._evict_least_active(self._batch, now_s)

    def _evict_least_active(self, batch: Batch, now_s: float) -> Actions:
        self._batch = None
        activities = {
            key: batch.activities.get(key, 0.0)
            for key in batch.asked
            if key in self.lent and self.lent[key].state == "lent"
        }
        actions: Actions = []
        sizes = {key: self.lent[key].counted_bytes if batch.over else self.lent[key].size_bytes for key in activities}
        taken = eviction.slabs_to_evict(activities, sizes, batch.needed_bytes)
        for key in taken:
            lent = self.lent[key]
            lent.state, lent.deadline_s = "evicting", now_s + self._grace_s
            self.evictions["budget" if batch.over else "drained" if self._drained else "pressure"] += 1
            short = batch.over or (DRAINED if self._drained else lending.shortage_told(self.budget))
            idle = f"{activities[key]:.1f} page requests/s, among the {len(taken)} least active"
            why = f"{short}; {idle} of {len(activities)} asked"
            ref = lent.slab
            actions += [
                LogEvent(lent.subject, "evicting", why),
                Send(lent.borrower, Evict(ref.volume, ref.index, ref.epoch, self._grace_s), self._grace_s),
            ]
        return actions

    # ---- lending ----

    def _heard(self, sender: HostId, message: ToLender, now_s: float) -> Actions:
        match message:
            case QueryMem():
                slabs = self.spare_bytes() // message.slab_bytes if message.slab_bytes else 0
                offer = FreeMem(message.volume, message.index, message.epoch, min(slabs, (1 << 31) - 1))
                return [Send(sender, offer, ANSWER_S)]
            case Map():
                return self._map(sender, message, now_s)
            case Done():
                return self._done(sender, message.ref)
            case Renew():
                return self._renew(sender, message, now_s)
            case Activity():
                return self._activity(sender, message, now_s)
            case _:
                assert_never(message)

    def _map(self, sender: HostId, message: Map, now_s: float) -> Actions:
        known = self.lent.get((sender, message.volume, message.index))
        if known is None:
            return self._map_new(sender, message, now_s)
        if message.epoch < known.slab.epoch:
            return [self._refuse(sender, message.ref, f"epoch {message.epoch} is older than {known.slab.epoch}")]
        if message.epoch > known.slab.epoch:
            # The borrower forgot this mapping (it started anew): the old one is freed first, and it may ask again.
            freeing = self._free(known, "replaced", f"{sender} maps it again under epoch {message.epoch}")
            return [*freeing, self._refuse(sender, message.ref, "its older mapping is being freed; try again", True)]
        if known.state == "lent":
            return [self._mr_info(known)]
        if known.state == "registering":
            return []  # the answer is on its way
        return [self._refuse(sender, message.ref, "this mapping is being taken back", True)]

    def _map_new(self, sender: HostId, message: Map, now_s: float) -> Actions:
        why = self._why_not(message, now_s)
        if why:
            slab = mirroring.slab_of(message.index, message.members)
            note = LogEvent(f"slab/{message.volume}/{slab}", "not lent", f"to {sender}: {why}")
            return [note, self._refuse(sender, message.ref, why)]
        secret = self._entropy(SECRET_BYTES)
        lent = Lent(sender, message.ref, message.slab_bytes, secret, now_s + self._lease_s, members=message.members)
        lent.tenant, lent.job = self.accounts.payer(message.tenant, message.job), message.job
        lent.page_bytes, lent.since_s = message.page_bytes, now_s
        self.lent[sender, message.volume, message.index] = lent
        return [RegisterSlab(sender, message.ref, message.slab_bytes, message.page_bytes, secret)]

    def _why_not(self, message: Map, now_s: float) -> str:
        if not self.address:
            return f"this host does not lend now{self._away}"
        if message.slab_bytes == 0 or message.slab_bytes % message.page_bytes:
            return f"{message.slab_bytes} bytes is not a whole number of pages"
        spare = self.spare_bytes()
        if message.slab_bytes > spare:
            return f"only {format_size(spare)} to spare now, a slab is {format_size(message.slab_bytes)}"
        why = why_refused(self.accounts, self.lent.values(), message, now_s)
        self.refused_for_budget += bool(why)
        return why

    def _refuse(self, to: HostId, slab: SlabRef, why: str, late: bool = False) -> Send:
        return Send(to, MrInfo(slab.volume, slab.index, slab.epoch, refused=why[:300], late=late), ANSWER_S)

    def _mr_info(self, lent: Lent) -> Send:
        slab = lent.slab
        info = MrInfo(slab.volume, slab.index, slab.epoch, address=self.address, secret=lent.secret)
        return Send(lent.borrower, info, ANSWER_S)

    def _registered(self, event: SlabRegistered) -> Actions:
        self.address = event.address
        lent = self._find(event.borrower, event.slab)
        if lent is None:
            return [FreeSlab(event.borrower, event.slab)]
        if lent.state != "registering":
            return []
        lent.state = "lent"
        why = f"to {lent.borrower}, {format_size(lent.size_bytes)}, epoch {lent.slab.epoch}"
        return [LogEvent(lent.subject, "lent", why), self._mr_info(lent)]

    def _not_registered(self, event: SlabNotRegistered) -> Actions:
        lent = self._find(event.borrower, event.slab)
        if lent is None or lent.state != "registering":
            return []
        del self.lent[lent.borrower, lent.slab.volume, lent.slab.index]
        return [self._refuse(event.borrower, event.slab, event.why, event.late)]

    def _renew(self, sender: HostId, message: Renew, now_s: float) -> Actions:
        """Renew the leases of these slabs. A renewal does not put off an eviction under way."""
        for ref in message.slabs:
            lent = self._find(sender, ref)
            if lent is not None and lent.state in ("registering", "lent"):
                lent.expires_s = now_s + self._lease_s
                lent.renewed(message)
        return []

    # ---- taking back ----

    def _done(self, sender: HostId, slab: SlabRef) -> Actions:
        lent = self._find(sender, slab)
        if lent is None and not self.address:
            self._let_go.add((sender, slab))
        return [] if lent is None or lent.state == "freeing" else self._free(lent, "done", f"{sender} released it")

    def _free(self, lent: Lent, event: str, why: str) -> Actions:
        lent.state = "freeing"
        if event != "done":
            self.earlier.freed(lent)
        return [LogEvent(lent.subject, event, f"{why}; freed here"), FreeSlab(lent.borrower, lent.slab)]

    def _freed(self, event: SlabFreed) -> Actions:
        lent = self._find(event.borrower, event.slab)
        if lent is not None:
            del self.lent[lent.borrower, lent.slab.volume, lent.slab.index]
        return []

    def _undelivered(self, to: HostId, message: ToBorrower, now_s: float) -> Actions:
        """A borrower that cannot be asked counts as idle. A borrower that did not get `MrInfo` gives up or lets the
        lease run out; one that did not get `Evict` loses the slab when grace and lease are over."""
        match message:
            case CheckActivity():
                return self._activity(to, Activity(message.round, ()), now_s)
            case FreeMem() | MrInfo() | Evict() | Unrenewed():
                return []
            case _:
                assert_never(message)

    # ---- the slab process ----

    def _store_found(self, event: StoreFound, now_s: float) -> Actions:
        self.address, self._away = event.address, ""
        held = {(found.borrower, found.slab): found for found in event.slabs}
        for key, lent in list(self.lent.items()):
            if (lent.borrower, lent.slab) not in held and lent.state != "registering":
                del self.lent[key]
        actions: Actions = []
        for found in event.slabs:
            actions += self._adopt(found, now_s)
            if (found.borrower, found.slab) in self._let_go:
                actions += self._done(found.borrower, found.slab)
        self._let_go.clear()
        return actions

    def _adopt(self, found: LoanedSlab, now_s: float) -> Actions:
        """Lend a slab that the slab process holds under a new lease, which its borrower renews if it still uses the
        slab."""
        if self._find(found.borrower, found.slab) is not None:
            return []
        lent = Lent(found.borrower, found.slab, found.size_bytes, found.secret, now_s + self._lease_s, "lent")
        lent.payer_known = False
        self.lent[found.borrower, found.slab.volume, found.slab.index] = lent
        return [LogEvent(lent.subject, "found again", f"lent to {found.borrower}, epoch {found.slab.epoch}")]

    def _store_lost(self, why: str) -> Actions:
        self.address, self._batch, self._away = "", None, f": {why}"
        lost, self.lent = self.lent, Loans()
        self.earlier.freed(*lost.values())
        return [
            LogEvent(lent.subject, "away", f"lent to {lent.borrower}; the slab process is gone and starts again: {why}")
            for lent in lost.values()
        ]

    def _find(self, borrower: HostId, slab: SlabRef) -> Lent | None:
        """The loan of exactly this epoch."""
        lent = self.lent.get((borrower, slab.volume, slab.index))
        return lent if lent is not None and lent.slab.epoch == slab.epoch else None


def react_s(grace_s: float) -> float:
    """Seconds from short of memory to memory back, at worst: one measurement, the answers about activity, the grace."""
    return 1.0 + ANSWERS_S + grace_s
