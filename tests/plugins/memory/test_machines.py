"""Borrower and lender together, with messages lost, doubled and late."""

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.events import Heard, Send, SetTimer, Undelivered
from covey.core.ids import HostId
from covey.ports.probes import MemoryNow
from plugins.memory.machine.borrowing import events as b
from plugins.memory.machine.borrowing.borrower import Borrower
from plugins.memory.machine.lending import events as le
from plugins.memory.machine.lending.lender import Lender
from plugins.memory.messages import (
    Activity,
    Done,
    Map,
    QueryMem,
    Renew,
    SlabRef,
)
from plugins.memory.policy.lending import Headroom
from plugins.memory.policy.placement import LenderPeer
from tests.families import examples
from tests.plugins.memory.tale import ME, OTHERS, PAGE, SLAB


@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(40), deadline=None)
def test_whatever_happens_to_messages_no_slab_is_held_by_two_and_none_is_left_over(seed: int) -> None:
    """Messages are lost (and reported undelivered), arrive in any order, and some are handled though reported lost."""
    rng = random.Random(seed)
    borrower = Borrower(ME, rng, 1, 20.0, 20.0)
    headroom = Headroom(fixed_bytes=30 * SLAB)
    lenders = {host: Lender(rng, rng.randbytes, headroom, 3 * SLAB, 5.0, 20.0) for host in OTHERS[:3]}
    full = dict.fromkeys(lenders, False)
    todo: list[tuple[float, HostId, Any]] = []
    store: dict[HostId, set[SlabRef]] = {host: set() for host in lenders}
    open_now: dict[tuple[int, int], HostId] = {}
    now = 0.0
    lossy = True

    def later(host: HostId, event: Any, after_s: float) -> None:
        todo.append((now + after_s, host, event))

    def perform(host: HostId, action: Any) -> None:
        match action:
            case Send():
                dropped = lossy and rng.random() < 0.15
                if not dropped or rng.random() < 0.3:
                    later(action.to, Heard(host, action.message), rng.uniform(0.001, 0.5))
                if dropped:
                    later(host, Undelivered(action.to, action.message), action.deadline_s)
            case SetTimer():
                later(host, action.event, action.after_s)
            case b.OpenSlab():
                place = action.place
                event: Any = b.SlabNotOpened("v", action.index, place.epoch, "stale")
                if SlabRef("v", action.index, place.epoch) in store[place.lender]:
                    open_now[action.index, place.epoch] = place.lender
                    event = b.SlabOpened("v", action.index, place.epoch)
                    later(host, b.SlabCopied("v", action.index, place.epoch), rng.uniform(0.6, 2))
                later(host, event, rng.uniform(0.01, 0.5))
            case b.CloseSlab():
                open_now.pop((action.index, action.epoch), None)
                later(host, b.SlabClosed("v", action.index, action.epoch), rng.uniform(0.01, 1))
            case le.RegisterSlab():
                store[host].add(action.slab)
                later(host, le.SlabRegistered(action.borrower, action.slab, "10.0.0.2:7"), rng.uniform(0.01, 0.3))
            case le.FreeSlab():
                store[host].discard(action.slab)
                later(host, le.SlabFreed(action.borrower, action.slab), rng.uniform(0.01, 0.3))
                if open_now.pop((action.slab.index, action.slab.epoch), None) is not None:
                    later(ME, b.SlabFailed("v", action.slab.index, action.slab.epoch, "freed"), 0.01)
            case _:
                pass

    def tell(host: HostId, event: Any) -> None:
        machine: Any = borrower if host == ME else lenders[host]
        if isinstance(event, Heard) and isinstance(event.message, QueryMem | Map | Activity | Done | Renew):
            machine = lenders[host]
        for action in machine.handle(event, now):
            perform(host, action)
        machine.check()

    def second(busy: bool) -> None:
        nonlocal now
        end_s = now + 1
        while todo and min(todo, key=lambda entry: entry[0])[0] <= end_s:
            entry = min(todo, key=lambda entry: entry[0])
            todo.remove(entry)
            now = max(now, entry[0])
            tell(entry[1], entry[2])
        now = end_s
        peers = tuple(LenderPeer(host, "alive", 3) for host in lenders)
        tell(ME, b.BorrowerTick({"v": [200 if busy else 0] * 4}, peers))
        for host in lenders:
            full[host] = busy and (full[host] if rng.random() < 0.9 else not full[host])
            available = (29 if full[host] else 60) * SLAB
            tell(host, le.LenderTick(MemoryNow(100 * SLAB, available, 0.0), 0))
        if busy and open_now and rng.random() < 0.05:
            (index, epoch), _ = open_now.popitem()
            tell(ME, b.SlabFailed("v", index, epoch, "reset"))
        if busy and rng.random() < 0.03:
            tell(ME, b.LenderLost(rng.choice(sorted(lenders))))
        for (index, _epoch), lender in open_now.items():
            assert any(slab.index == index for slab in store[lender]), "open where it is not held"

    for host in lenders:
        tell(host, le.StoreFound("10.0.0.2:7", ()))
    tell(ME, b.VolumeFound("v", 4, SLAB, PAGE, ()))
    for _ in range(60):
        second(busy=True)
    lossy = False
    for _ in range(90):
        second(busy=False)
    held = sorted((slab.index, slab.epoch) for slabs in store.values() for slab in slabs)
    assert held == sorted(open_now), f"left over; seed {seed}"
    places = {(slab.index, slab.place.epoch) for slab in borrower.volumes["v"].slabs if slab.place is not None}
    assert places == set(open_now), f"seed {seed}"
