"""Budgets of tenants: refused where a volume is attached and where a slab is lent, shown, and kept over restarts."""

import random
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from covey.core.errors import Refused
from covey.core.events import Heard
from covey.core.ids import HostId
from covey.core.units import GIB, MIB
from covey.ports.probes import MemoryNow
from covey.ports.streams import UNKNOWN_USER
from covey.wire.job import RemoveVolume, VolumeWanted
from plugins.base import JobPeer
from plugins.memory.machine.borrowing.borrower import Borrower
from plugins.memory.machine.lending.events import LenderTick, SlabRegistered, StoreFound
from plugins.memory.machine.lending.lender import Lender
from plugins.memory.machine.rack_accounts import RackAccounts
from plugins.memory.messages import Map, MrInfo, Renew, SlabRef
from plugins.memory.policy.budgets import BudgetAccount, BudgetHeld, budget_of, over_budget
from plugins.memory.policy.lending import Headroom
from plugins.memory.service.forming import Payer, refuse_over_budget
from plugins.memory.service.open_volume import OpenVolume
from plugins.memory.service.record import KnownProcess, KnownVolume
from tests.plugins.memory.rack import SETTINGS, MemoryRack
from tests.plugins.memory.tale import sent
from tests.plugins.memory.test_service import a_rack

H1 = HostId("h1")
ANN = BudgetAccount("tenant", "ann")
LIMITED = msgspec.structs.replace(SETTINGS, budgets={"ann": "256 KiB"}, default_budget="64 KiB")


def test_a_tenant_has_its_budget_or_the_default_and_nobody_has_none() -> None:
    budgets = {"ann": 5}
    assert [budget_of(who, budgets, 7) for who in ("ann", "bob", "")] == [5, 7, None]
    assert budget_of("bob", budgets, None) is None and budget_of("", {"": 0}, None) == 0
    assert over_budget(BudgetHeld(ANN, 5, 3, {}), 2) == ""
    assert over_budget(BudgetHeld(ANN, 5 * MIB, 4 * MIB, {}), 2 * MIB) == (
        "tenant ann has 4 MiB of 5 MiB, and this is 2 MiB more"
    )
    assert over_budget(
        BudgetHeld(BudgetAccount("job", "j1"), 5 * MIB, 0, {H1: 3 * MIB, HostId("h2"): 2 * MIB}), MIB
    ) == ("job j1 has 5 MiB of 5 MiB on 2 hosts, and this is 1 MiB more")


def attach(rack: MemoryRack, volume: str, size: str, tenant: str, mirror: int = 0) -> Any:
    return rack.command("h1", "create", volume=volume, size=size, tenant=tenant, mirror=mirror)


def test_a_budget_and_a_number_of_volumes_count_from_the_reload_that_changes_them() -> None:
    with a_rack(3, settings=LIMITED) as rack:
        attach(rack, "one", "192 KiB", "ann")
        with pytest.raises(Refused, match="192 KiB of 256 KiB"):
            attach(rack, "two", "128 KiB", "ann")
        more = msgspec.structs.replace(LIMITED, budgets={"ann": "512 KiB"}, volumes_max=2)
        rack.agents["h1"].reconfigure(more)
        attach(rack, "two", "128 KiB", "ann")
        with pytest.raises(Refused, match="may have 2"):
            attach(rack, "three", "64 KiB", "ann")
        found = {view.volume: view.budget_bytes for view in rack.command("h1", "volumes")}
        assert found == {"one": 512 << 10, "two": 512 << 10}


def test_a_volume_over_its_tenants_budget_is_refused_and_room_comes_back_with_detach() -> None:
    with a_rack(3, settings=LIMITED) as rack:
        attach(rack, "one", "192 KiB", "ann")
        for size, mirror in (("128 KiB", 0), ("64 KiB", 2)):  # the latter has everything twice
            with pytest.raises(Refused) as refused:
                attach(rack, "two", size, "ann", mirror)
            assert (refused.value.code, refused.value.what) == (4, "cannot open volume two")
            assert refused.value.why == "tenant ann has 192 KiB of 256 KiB, and this is 128 KiB more"
            assert "budgets.ann" in refused.value.next
        with pytest.raises(Refused, match="bob"):
            attach(rack, "three", "128 KiB", "bob")
        attach(rack, "nobodys", "1 MiB", "")
        attach(rack, "one", "192 KiB", "ann")  # it is there already
        rack.command("h1", "remove", volume="one")
        attach(rack, "two", "256 KiB", "ann")
        found = {view.volume: (view.tenant, view.budget_bytes) for view in rack.command("h1", "volumes")}
        assert found == {"nobodys": ("", None), "two": ("ann", 256 << 10)}
        with pytest.raises(Refused, match="not a tenant"):
            attach(rack, "four", "64 KiB", "a tenant")


def test_a_process_whose_user_is_not_known_makes_no_volume_and_ends_none() -> None:
    """User -1 stands for a person at agentctl, who may do so; no process is that person, whatever its number."""
    with a_rack(1) as rack:
        service = rack.agents["h1"]
        rack.command("h1", "create", volume="ours", size="64 KiB", uid=1000)
        for uid in (UNKNOWN_USER, -1):
            said = list[Any]()
            peer = cast(JobPeer, SimpleNamespace(of_job=None, uid=uid, send=said.append))
            for frame in (VolumeWanted("new", 64 << 10), VolumeWanted("ours", 64 << 10), RemoveVolume("ours")):
                rack.do("h1", partial(service.frame, peer, frame))
            assert [(each.what, each.why.partition(" of this host")[2]) for each in said] == [
                ("cannot open volume new", " does not tell which user's process asks"),
                ("cannot open volume ours", " does not tell which user's process asks"),
                ("cannot remove volume ours", " does not tell which user's process asks"),
            ]
        assert [view.volume for view in rack.command("h1", "volumes")] == ["ours"]


# ---- at the lender ---------------------------------------------------------------------------------------------------


def a_lender() -> Lender:
    accounts = RackAccounts(HostId("h2"), 60.0, lambda tenant: 3 * MIB if tenant == "ann" else None)
    accounts.heard((), -10.0)
    lender = Lender(
        random.Random(1), lambda n: b"s" * n, Headroom(fraction=0.125), 64 * GIB, 10.0, 60.0, accounts
    )  # fmt: skip
    lender.handle(StoreFound("127.0.0.1:1", ()), 0.0)
    lender.handle(LenderTick(MemoryNow(64 * GIB, 60 * GIB, 0.0), 0), 0.0)
    return lender


def asked(lender: Lender, index: int, tenant: str, now_s: float = 0.0) -> str:
    """Why a slab is not lent; empty when it is."""
    ref = SlabRef("data", index, index + 1)
    actions = lender.handle(Heard(H1, Map("data", index, index + 1, MIB, 4096, tenant=tenant)), now_s)
    refused = [message.refused for _, message in sent(actions, MrInfo)]
    if refused:
        return str(refused[0])
    lender.handle(SlabRegistered(H1, ref, "127.0.0.1:1"), now_s)
    return ""


def test_a_lender_counts_what_it_lends_to_each_tenant() -> None:
    lender = a_lender()
    assert [asked(lender, index, "ann") for index in range(3)] == ["", "", ""]
    assert asked(lender, 3, "ann") == "tenant ann has 3 MiB of 3 MiB, and this is 1 MiB more"
    assert asked(lender, 4, "bob") == asked(lender, 5, "") == ""
    assert {lent.tenant for lent in lender.lent.values()} == {"ann", "bob", ""}


def test_a_lender_that_began_anew_learns_from_renewals_whose_slabs_it_holds() -> None:
    lender = a_lender()
    for index in range(3):
        asked(lender, index, "")  # as they are found after a restart: nobody says whose
    refs = tuple(lent.slab for lent in lender.lent.values())
    lender.handle(Heard(H1, Renew(refs, tenant="ann")), 1.0)
    assert asked(lender, 3, "ann") != ""
    lender.handle(Heard(H1, Renew(refs[:1])), 2.0)
    assert asked(lender, 3, "ann") != "", "who does not say whose it is changes nothing"


def test_a_mirrored_volume_counts_twice_for_what_comes_after_it() -> None:
    known = KnownVolume("one", 64 << 10, 4096, 64 << 10, b"", -1, KnownProcess(b""), tenant="ann", members=2)
    volumes = [cast(OpenVolume, SimpleNamespace(known=known))]
    accounts, borrower = RackAccounts(H1, 60.0, LIMITED.budget_bytes), Borrower(H1, random.Random(1), 1, 20.0, 60.0)
    refuse_over_budget(accounts, volumes, borrower, Payer("ann"), 128 << 10, "cannot open")
    with pytest.raises(Refused, match="cannot open"):
        refuse_over_budget(accounts, volumes, borrower, Payer("ann"), 192 << 10, "cannot open")
    assert msgspec.structs.replace(known, size_bytes=1).taken_bytes == 128 << 10, "slabs are lent whole"
