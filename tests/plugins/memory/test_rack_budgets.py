"""Budgets over the whole rack: what lenders tell, which volumes are refused and why, what is taken back, and which
hosts are believed."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.errors import Refused
from covey.core.events import Heard, LogEvent
from covey.core.ids import HostId, JobId
from covey.core.units import GIB, MIB
from covey.ports.probes import MemoryNow
from covey.wire.job import VolumeWanted
from gossip.spread.messages import VALUE_BYTES_MAX
from plugins.base import JobPeer
from plugins.facts import HostView, JobPlaced, JobUnplaced
from plugins.gossiped import LentNow
from plugins.memory.machine.borrowing import events as b
from plugins.memory.machine.borrowing.borrower import Borrower
from plugins.memory.machine.borrowing.place import SlabPlace
from plugins.memory.machine.lending.events import LenderTick, SlabFreed, SlabRegistered, StoreFound, StoreLost
from plugins.memory.machine.lending.lender import Lender
from plugins.memory.machine.loan import LoanedSlab
from plugins.memory.machine.rack_accounts import RackAccounts
from plugins.memory.messages import (
    Activity,
    CheckActivity,
    Evict,
    FreeMem,
    Map,
    MrInfo,
    QueryMem,
    Renew,
    SlabRef,
)
from plugins.memory.policy import budgets
from plugins.memory.policy.budgets import ACCOUNTS_TOLD, FRESH_S, SETTLED_S, BudgetAccount, BudgetHeld, as_told, told
from plugins.memory.policy.lending import Headroom
from plugins.memory.policy.placement import LenderPeer
from plugins.memory.policy.settings import MemorySettings
from plugins.memory.service import metrics
from plugins.memory.service.views import peers as peers_seen
from tests.plugins.memory.rack import SETTINGS
from tests.plugins.memory.tale import noted, sent
from tests.plugins.memory.test_service import a_rack, keep_hot

ME = HostId("h9")
H1, H2, H3 = HostId("h1"), HostId("h2"), HostId("h3")
ANN, JOB = BudgetAccount("tenant", "ann"), BudgetAccount("job", "j1")
MEMORY = MemoryNow(64 * GIB, 60 * GIB, 0.0)


def peer(host: HostId, free: int | None = 9, state: str = "alive", **lent: int) -> LenderPeer:
    """A host that lends so many MiB to each tenant; `old`: it does not tell."""
    told_ = None if "old" in lent else {BudgetAccount("tenant", who).number: size * MIB for who, size in lent.items()}
    return LenderPeer(host, state, free, lent=told_)  # type: ignore[arg-type]


class LenderTale:
    """A lender under a budget, beside others."""

    def __init__(self, budget: int, *peers: LenderPeer, began_s: float = -FRESH_S) -> None:
        self.accounts = RackAccounts(ME, 60.0, lambda tenant: budget * MIB if tenant == "ann" else None)
        self.machine = Lender(
            random.Random(1), lambda n: b"s" * n, Headroom(fraction=0.1), 64 * GIB, 10.0, 60.0, self.accounts
        )
        self.now_s, self.peers = 0.0, peers
        self.accounts.heard(peers, began_s)
        self.machine.handle(StoreFound("127.0.0.1:1", ()), 0.0)
        self.second(0.0)

    def second(self, after_s: float = 1.0) -> Sequence[Any]:
        self.now_s += after_s
        self.accounts.heard(self.peers, self.now_s)
        return self.machine.handle(LenderTick(MEMORY, 0), self.now_s)

    def map(self, index: int, tenant: str = "ann", borrower: HostId = H1, **more: Any) -> str:
        """Ask for a slab; return why it is not mapped, or an empty text when it is lent."""
        asked = Map("v", index, 1, more.pop("slab_bytes", MIB), more.pop("page_bytes", 4096), tenant=tenant, **more)
        for _, message in sent(self.machine.handle(Heard(borrower, asked), self.now_s), MrInfo):
            return str(message.refused)
        self.machine.handle(SlabRegistered(borrower, asked.ref, "127.0.0.1:1"), self.now_s)
        return ""


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_what_a_host_tells_fits_into_gossip_and_names_who_is_nearest_its_budget() -> None:
    held = {BudgetAccount("tenant", f"t{n}"): (n + 1) * GIB for n in range(40)} | {ANN: 1 << 49}
    said = told(held, {ANN: 1 << 50, BudgetAccount("tenant", "t0"): GIB})
    assert len(said) == 2 * ACCOUNTS_TOLD
    assert said[:3:2] == (BudgetAccount("tenant", "t0").number, ANN.number), "all of its budget, then half of it"
    assert said[4] == BudgetAccount("tenant", "t39").number, "then who has most"
    most = tuple([(1 << 32) - 1, (1 << 40) - 1] * ACCOUNTS_TOLD)
    assert len(msgspec.msgpack.encode(LentNow(most))) <= min(VALUE_BYTES_MAX, 240)
    assert as_told(told({ANN: 1500}, {})) == {ANN.number: 2048}, "rounded up"
    assert told({ANN: 0}, {}) == ()


@given(
    st.binary(max_size=64) | st.lists(st.integers(-5, 1 << 41), max_size=9).map(lambda x: msgspec.msgpack.encode([x]))
)
def test_whatever_a_host_gossips_it_is_heard_or_counts_as_silent(said: bytes) -> None:
    (seen,) = peers_seen([HostView(host=H1, state="alive", values={"lent": said})], ME)
    assert seen.lent is None or all(size >= 0 for size in seen.lent.values())
    accounts = RackAccounts(ME, 60.0)
    accounts.heard([seen], 0.0)
    assert set(accounts.others(ANN)) <= {H1}


# ---- who is refused --------------------------------------------------------------------------------------------------


def test_a_lender_counts_what_the_others_told() -> None:
    tale = LenderTale(8, peer(H2, None, ann=4), peer(H3, None, ann=2, bob=50))
    assert tale.map(0) == tale.map(1) == ""
    assert tale.map(2) == "tenant ann has 8 MiB of 8 MiB on 3 hosts, and this is 1 MiB more"
    assert tale.map(3, tenant="bob") == "" and tale.machine.refused_for_budget == 1
    tale.peers = (peer(H2, None, ann=3), peer(H3, None))
    tale.second(FRESH_S)
    assert [tale.map(index) for index in range(4, 7)] == ["", "", ""], "what was given back is room again"


def test_what_is_left_is_divided_since_the_others_may_give_theirs_now() -> None:
    tale = LenderTale(8, peer(H2), peer(H3), peer(H1, None))  # the last one has no room
    assert [tale.map(index) for index in range(2)] == ["", ""]
    assert "each host lends only a part" in tale.map(2), "a third of 8"
    tale.second(FRESH_S)
    assert [bool(tale.map(index)) for index in range(3, 6)] == [False, False, True], "a third of 6"


@given(st.integers(1, 30), st.integers(0, 200), st.integers(1, 8), st.integers(1, 7))
def test_all_lenders_at_once_give_no_more_than_there_is_and_one_for_each_member(
    lenders: int, budget: int, slab: int, members: int
) -> None:
    hosts = [HostId(f"h{n}") for n in range(lenders)]
    given_ = 0
    for me in hosts:
        mine = 0
        while not budgets.refused(BudgetHeld(ANN, budget, mine, {}, mine), slab, me, hosts, members):
            mine += slab
        given_ += mine
    assert given_ <= budget + members * slab
    if budget >= slab:
        assert given_ > 0, "somebody gives the last one"


def test_the_turn_leaves_a_host_that_a_borrower_can_ask() -> None:
    hosts = [HostId(f"h{n}") for n in range(50)]
    for members in (1, 2, 8):
        first = budgets.in_turn(BudgetHeld(ANN, 10, 9, {}), 1, hosts, members)
        assert len(first) == 1 + members, "itself, and who holds another member, are not asked"
        assert first == budgets.in_turn(BudgetHeld(ANN, 10, 9, {}), 1, hosts[::-1], members), "alike everywhere"
    assert first != budgets.in_turn(BudgetHeld(JOB, 10, 9, {}), 1, hosts, members)


def test_a_lender_that_began_just_now_does_not_know_the_others_yet() -> None:
    tale = LenderTale(8, began_s=0.0)
    assert "known here only 5 s after the start" in tale.map(0) and tale.map(1, tenant="bob") == ""
    tale.second(FRESH_S)
    assert tale.map(2) == ""


def test_seals_do_not_count_and_nobody_counts_less_by_odd_pages() -> None:
    assert budgets.plain_bytes(4128 * 16, 4128) == 4096 * 16
    assert budgets.plain_bytes(544 * 16, 544) == 512 * 16
    for page in (4096, 8191, 0, 33):
        assert budgets.plain_bytes(8191 * 16, page) == 8191 * 16


# ---- who is believed -------------------------------------------------------------------------------------------------


def test_a_borrower_that_lies_about_whose_volume_it_is_is_refused() -> None:
    tale = LenderTale(2)
    tale.accounts.placed("j1", "ann", 0)
    assert tale.map(0, tenant="bob", job="j1") == "job j1 is of tenant ann, not of bob"
    assert tale.map(1, tenant="", job="j1") == tale.map(2, tenant="", job="j1") == "", "the log says whose it is"
    assert "tenant ann has 2 MiB of 2 MiB" in tale.map(3, tenant="", job="j1")
    refs = tuple(lent.slab for lent in tale.machine.lent.values())
    tale.machine.handle(Heard(H1, Renew(refs, tenant="bob", page_bytes=4128)), 0.0)
    assert {(lent.tenant, lent.page_bytes) for lent in tale.machine.lent.values()} == {("ann", 4096)}


def test_who_names_no_tenant_may_have_a_budget_too() -> None:
    tale = LenderTale(2)
    tale.accounts.budget_of = {"": MIB}.get
    assert tale.map(0, tenant="") == ""
    assert "volumes without a tenant has 1 MiB of 1 MiB" in tale.map(1, tenant="")
    tale.second()
    assert as_told(tale.machine.told_accounts() or ()) == {BudgetAccount("tenant", "").number: MIB}
    assert MemorySettings(budgets={"": "1 MiB"}).budget_bytes("") == MIB
    with pytest.raises(ValueError, match="a tenant"):
        MemorySettings(budgets={"a tenant": "1 MiB"})


# ---- hosts that go and come ------------------------------------------------------------------------------------------


def test_what_a_host_told_last_counts_for_a_lease_after_it_was_gone_or_began_anew() -> None:
    for silent in ((peer(H2, 9, "gone", ann=5),), (), (peer(H2, 9, "alive", old=1),)):
        accounts = RackAccounts(ME, 60.0)
        accounts.heard((peer(H2, ann=4),), 0.0)
        accounts.heard(silent, 10.0)
        accounts.heard(silent, 69.0)
        assert accounts.others(ANN) == {H2: 4 * MIB}
        accounts.heard(silent, 70.0)
        assert accounts.others(ANN) == {}
        accounts.heard((peer(H2, ann=1),), 71.0)
        assert accounts.others(ANN) == {H2: MIB}


def test_a_lender_that_began_anew_tells_nothing_until_it_knows_whose_slabs_it_holds() -> None:
    tale = LenderTale(2)
    assert tale.machine.told_accounts() == ()
    found = (
        LoanedSlab(H1, SlabRef("v", 0, 1), 4128 * 256, b"s" * 16),
        LoanedSlab(H2, SlabRef("w", 0, 1), MIB, b"s" * 16),
    )
    tale.machine.handle(StoreFound("127.0.0.1:1", found), 0.0)
    assert tale.machine.told_accounts() is None and "tenant ann has" in tale.map(5)
    tale.machine.handle(Heard(H1, Renew((found[0].slab,), 1, "ann", "", 4128)), 1.0)
    assert tale.machine.told_accounts() is None
    tale.machine.handle(Heard(H2, Renew((found[1].slab,))), 1.0)
    tale.second()
    assert as_told(tale.machine.told_accounts() or ()) == {ANN.number: MIB} and tale.map(6) == ""
    tale.machine.handle(StoreLost("killed"), 2.0)
    assert tale.machine.told_accounts() is None, "its slabs may be back in a moment"


# ---- what is taken back ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 200))
def test_lenders_take_back_what_is_over_and_no_more(held: list[int], budget: int) -> None:
    shares = {HostId(f"h{n}"): size for n, size in enumerate(held)}
    taken = sum(
        budgets.to_take_back(
            BudgetHeld(ANN, budget, size, {other: shares[other] for other in shares if other != host}), host, 1, 0
        )
        for host, size in shares.items()
    )
    assert taken == max(0, sum(held) - budget)


def over(tale: LenderTale, seconds: float) -> list[Any]:
    """Let so many seconds pass; return the lender's actions."""
    return [action for _ in range(round(seconds)) for action in tale.second()]


def test_a_tenant_that_stays_over_its_budget_is_brought_back_the_least_active_first() -> None:
    tale = LenderTale(100)
    assert [tale.map(index) for index in range(8)] == [""] * 8
    assert tale.map(8, tenant="bob") == ""
    tale.accounts.budget_of = lambda tenant: 6 * MIB if tenant == "ann" else None
    assert not sent(over(tale, SETTLED_S), CheckActivity), "views may be old, and moves under way"
    ((_, asked),) = sent(tale.second(), CheckActivity)
    assert len(asked.slabs) == 4, "two are over, and two more are asked about (§2.5.2)"
    rates = tuple((ref, float(n)) for n, ref in enumerate(asked.slabs))
    answer = msgspec.convert(
        {
            "type": "Activity",
            "round": asked.round,
            "activities": [[list(msgspec.structs.astuple(ref)), rate] for ref, rate in rates],
        },
        Activity,
    )
    actions = tale.machine.handle(Heard(H1, answer), tale.now_s)
    assert [(host, message.index) for host, message in sent(actions, Evict)] == [
        (H1, ref.index) for ref, _ in rates[:2]
    ]
    (why, _) = (action.reason for action in actions if isinstance(action, LogEvent))
    assert why.startswith("tenant ann has 8 MiB of 6 MiB on 1 hosts, and has had more than that for 15 s")
    assert tale.machine.evictions["budget"] == 2
    for ref, _ in rates[:2]:
        tale.machine.handle(SlabFreed(H1, ref), tale.now_s)
    assert not sent(over(tale, 3 * SETTLED_S), Evict)


def test_slabs_without_a_disk_are_never_taken_back_for_a_budget() -> None:
    tale = LenderTale(100)
    assert tale.map(0, members=2) == tale.map(1, members=3) == ""
    tale.accounts.budget_of = lambda tenant: 0
    assert not sent(over(tale, 8 * SETTLED_S), Evict) and tale.machine.evictions["budget"] == 0
    assert "tenant ann" in tale.map(2, members=2)


def test_a_slab_may_move_although_its_tenant_has_all_of_its_budget() -> None:
    tale = LenderTale(8, peer(H2, None, ann=8))
    assert "8 MiB of 8 MiB" in tale.map(0) and tale.map(1, replaces=True) == ""
    tale.second(FRESH_S)
    assert "tenant ann has 9 MiB" in tale.map(2, replaces=True), "over by now: it goes to the disk"
    assert tale.map(3, replaces=True, members=2) != "", "9 and 1 of 9"
    tale.peers = (peer(H2, None, ann=7),)
    tale.second(FRESH_S)
    assert tale.map(4, replaces=True, members=2) == "", "without a disk it must not be a member short"


# ---- jobs ------------------------------------------------------------------------------------------------------------


def test_a_lender_holds_a_job_to_its_limit_whatever_its_borrower_says() -> None:
    tale = LenderTale(100)
    tale.accounts.placed("j1", "ann", 2 * MIB)
    assert [tale.map(index, job="j1") for index in range(2)] == ["", ""]
    assert tale.map(2, job="j1", borrower=H2) == "job j1 has 2 MiB of 2 MiB, and this is 1 MiB more"
    assert tale.map(3, job="j2") == ""
    tale.second()
    assert as_told(tale.machine.told_accounts() or ())[JOB.number] == 2 * MIB
    tale.accounts.over("j1")
    tale.second()
    assert "j1" in tale.accounts.jobs, "its slabs are still here"
    for index in range(2):
        tale.machine.handle(SlabFreed(H1, SlabRef("v", index, 1)), tale.now_s)
    tale.second()
    assert "j1" not in tale.accounts.jobs


def test_a_jobs_volumes_are_refused_over_its_limit_in_three_lines() -> None:
    with a_rack(2) as rack:
        service, said = rack.agents["h1"], list[Any]()
        service.on_fact(JobPlaced(JobId("j1"), 1, "ann", 1, (), 1, 192 << 10))
        job = cast(JobPeer, SimpleNamespace(of_job=JobId("j1"), uid=1000, send=said.append))
        for volume, size in (("one", 128), ("two", 128), ("three", 64)):
            rack.do("h1", partial(service.frame, job, VolumeWanted(volume, size << 10)))
        assert [type(each).__name__ for each in said] == ["VolumeAt", "Refusal", "VolumeAt"]
        assert (said[1].what, said[1].why) == (
            "cannot open volume two",
            "job j1 has 128 KiB of 192 KiB, and this is 128 KiB more",
        )
        assert "--remote-memory" in said[1].next
        rows = {row.name: row for row in rack.command("h1", "accounts")}
        assert (rows["j1"].budget_bytes, rows["j1"].volumes_bytes, rows["j1"].tenant) == (192 << 10, 192 << 10, "ann")
        view = next(view for view in rack.command("h1", "volumes") if view.volume == "one")
        assert (view.job_budget_bytes, view.budget_bytes, view.taken_bytes) == (192 << 10, None, 128 << 10)
        measured = service.metrics()
        assert measured[metrics.BUDGET_BYTES.of("", "j1")] == 192 << 10
        assert measured[metrics.BUDGET_REFUSED.of("borrower")] == 1
        service.on_fact(JobUnplaced(JobId("j1"), 1, True))


def test_a_volume_that_was_opened_before_its_job_was_known_counts_once_it_is() -> None:
    """The volume counts here, at its lender, and after a restart of the agent, which is not told of the job again."""
    with a_rack(2) as rack:
        job = cast(JobPeer, SimpleNamespace(of_job=JobId("j1"), uid=1000, send=list[Any]().append))
        rack.do("h1", partial(rack.agents["h1"].frame, job, VolumeWanted("early", 128 << 10)))
        rack.agents["h1"].on_fact(JobPlaced(JobId("j2"), 1, "bob", 1, (), 1, 0))
        keep_hot(rack, "h1", "early", 2)
        assert [view.tenant for view in rack.command("h1", "volumes")] == [""]
        for agent in rack.agents.values():
            agent.on_fact(JobPlaced(JobId("j1"), 1, "ann", 1, (), 1, 0))
        rack.run(3)
        assert [view.tenant for view in rack.command("h1", "volumes")] == ["ann"]
        assert rack.agents["h1"].borrowing.machine.volumes["early"].tenant == "ann"
        assert rack.agents["h2"].accounts.here[ANN] == 128 << 10
        assert [event for event, _ in rack.story("volume/early")].count("payer") == 1
        rack.processes["h1"].signal(9)
        rack.host("h1").start_agent()
        rack.run(3)
        assert [view.tenant for view in rack.command("h1", "volumes")] == ["ann"]


def test_what_does_not_fit_beside_a_hosts_other_values_is_noted_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_rack(2) as rack:
        lending, told, whys = rack.agents["h1"].lending, list[object](), ["too long", "too long", ""]

        def spread(key: str, value: object) -> None:
            if why := whys.pop(0):
                raise ValueError(why)
            told.append(value)

        monkeypatch.setattr(lending.machine, "told_accounts", lambda: (7, 1))
        monkeypatch.setattr(lending._host, "spread", spread)
        for left in (1, 1, 0):
            lending._tell_accounts()
            assert len([note for note in lending.notes() if "too long" in note]) == left
        assert told == [LentNow((7, 1))]


# ---- at the borrower -------------------------------------------------------------------------------------------------


class BorrowerTale:
    """A borrower of ann's under a budget of so many MiB, and its volume of slabs of 1 MiB."""

    def __init__(self, budget: int, slabs: int, *peers: LenderPeer, members: int = 1) -> None:
        self.accounts = RackAccounts(ME, 60.0, lambda tenant: budget * MIB if tenant == "ann" else None)
        self.machine = Borrower(ME, random.Random(1), 1, 20.0, 60.0, accounts=self.accounts)
        self.now_s, self.slabs, self.peers = 0.0, slabs * members, peers
        self.tell(b.VolumeFound("v", slabs, MIB, 4096, (), members, "ann", "j1"))

    def tell(self, event: b.BorrowerEvent) -> Sequence[Any]:
        actions = self.machine.handle(event, self.now_s)
        self.machine.check()
        return actions

    def second(self, *, rate: int = 1000) -> Sequence[Any]:
        self.now_s += 1.0
        self.accounts.heard(self.peers, self.now_s)
        return self.tell(b.BorrowerTick({"v": [rate] * self.slabs}, self.peers))

    def granted(self, actions: Sequence[Any]) -> list[tuple[HostId, Map]]:
        """Answer every question with room; return the host that is asked for a slab."""
        found: list[tuple[HostId, Map]] = []
        for host, query in sent(actions, QueryMem):
            found += sent(self.tell(Heard(host, FreeMem("v", query.index, query.epoch, 3))), Map)
        return found


def test_a_borrower_counts_before_it_asks_also_what_it_asks_for_in_the_same_second() -> None:
    tale = BorrowerTale(10, 8, peer(H1, ann=4), peer(H2, ann=3), peer(H3, None))
    actions = tale.second()
    assert len({query.index for _, query in sent(actions, QueryMem)}) == 3, "of 10 MiB 7 are lent by others"
    assert noted(actions).count("over budget") == 5
    why = next(action.reason for action in actions if isinstance(action, LogEvent) and action.event == "over budget")
    assert "tenant ann has 10 MiB of 10 MiB" in why and "stays on disk, next try in 2 s" in why
    maps = tale.granted(actions)
    assert [(taken.tenant, taken.job, taken.replaces) for _, taken in maps] == [("ann", "j1", False)] * 3
    for _ in range(3):
        actions = tale.second()
        assert not sent(actions, QueryMem), "what it was granted counts before its lenders tell of it"


def test_a_borrower_asks_whose_turn_it_is() -> None:
    hosts = [HostId(f"h{n:02}") for n in range(40)]
    tale = BorrowerTale(10, 1, *(peer(host, ann=9 if host == hosts[0] else 0) for host in hosts))
    asked = {host for host, _ in sent(tale.second(), QueryMem)}
    assert asked == budgets.in_turn(BudgetHeld(ANN, 10, 9, {}), 1, hosts) and len(asked) == 2


def test_a_lost_member_is_replaced_although_its_tenant_has_all_of_its_budget() -> None:
    tale = BorrowerTale(16, 1, peer(H1, ann=15), peer(H2), peer(H3), members=2)
    tale.tell(
        b.VolumeFound(
            "v", 1, MIB, 4096, ((0, SlabPlace(1, H1, "a", b"s" * 16)), (1, SlabPlace(2, H2, "a", b"s" * 16))), 2, "ann"
        )
    )
    tale.tell(b.SlabFailed("v", 1, 2, "reset"))
    tale.tell(b.SlabClosed("v", 1, 2))
    tale.peers = (peer(H1, ann=16), peer(H3))
    maps = tale.granted(tale.second())
    assert [(host, taken.replaces, taken.members) for host, taken in maps] == [(H3, True, 2)]


def test_an_evicted_slab_of_a_tenant_that_is_over_its_budget_goes_to_the_disk() -> None:
    for has, event in ((31, "evicted"), (32, "over budget")):
        tale = BorrowerTale(32, 1, peer(H1, ann=1), peer(H2, ann=has))
        tale.tell(b.VolumeFound("v", 1, MIB, 4096, ((0, SlabPlace(1, H1, "a", b"s" * 16)),), 1, "ann"))
        tale.second()
        actions = tale.tell(Heard(H1, Evict("v", 0, 1, 10.0)))
        assert noted(actions)[-1] == event
        assert bool(sent(actions, QueryMem)) == (event == "evicted")


# ---- several hosts with real services --------------------------------------------------------------------------------


def test_two_borrowers_of_one_tenant_share_its_budget_over_the_rack() -> None:
    limited = msgspec.structs.replace(SETTINGS, budgets={"ann": "256 KiB"})
    with a_rack(4, settings=limited) as rack:
        rack.run(8)
        for host, name in (("h1", "one"), ("h2", "two")):
            rack.command(host, "create", volume=name, size="192 KiB", tenant="ann")
        keep_hot(rack, "h1", "one", slabs=3)
        rack.run(3)
        keep_hot(rack, "h2", "two", slabs=1)
        rack.run(3)
        lent: Counter[str] = Counter()
        for service in rack.agents.values():
            for slab in service.lending.machine.lent.values():
                lent[slab.tenant] += slab.counted_bytes
            found = service.metrics().get(metrics.TENANT_BYTES.of("ann", "lent"), 0)
            assert found == sum(slab.size_bytes for slab in service.lending.machine.lent.values())
        assert lent["ann"] == 256 << 10
        rows: Mapping[str, Any] = {row.name: row for row in rack.command("h4", "accounts")}
        assert (rows["ann"].used_bytes, rows["ann"].budget_bytes) == (lent["ann"], 256 << 10)
        with pytest.raises(Refused, match="tenant ann has 256 KiB of 256 KiB"):
            rack.command("h3", "create", volume="three", size="128 KiB", tenant="ann")
