"""Invariants of every story about memory: unused slabs are freed within a lease; pages lie where large slabs are
used."""

from types import SimpleNamespace
from typing import Any

import pytest

from chaos.actors.pager import BLOCK, Oracle, page_of
from chaos.checks.leaks import SLACK_S, UnusedSlabs
from chaos.rackworld import OWN_SLABS, SPREAD
from covey.core.ids import HostId
from covey.core.units import MIB, parse_size
from plugins.memory.machine.loan import Lent
from plugins.memory.messages import SECRET_BYTES, SlabRef

LEASE_S, AWAY_S = 60.0, 60.0
MOST_S = LEASE_S + LEASE_S / 3 + SLACK_S


class LendingRack:
    """A rack in which h1 borrows slab 0 of `v` from h2, and uses these epochs of it."""

    def __init__(self, epoch: int = 7) -> None:
        self.now, self.used, self.pid = 0.0, [epoch], 11
        self.lent = Lent(HostId("h1"), SlabRef("v", 0, epoch), 64 * MIB, bytes(SECRET_BYTES), LEASE_S, "lent")
        volumes = {"v": SimpleNamespace(slabs=[SimpleNamespace(epochs=self.used)])}
        borrows = SimpleNamespace(awaited=set(), volumes=volumes)
        self.knows = SimpleNamespace(borrowing=SimpleNamespace(machine=borrows, volumes=volumes))
        lender = SimpleNamespace(lent={("h1", "v", 0): self.lent}, _lease_s=LEASE_S)
        lends = SimpleNamespace(lending=SimpleNamespace(machine=lender))
        lends.borrowing = SimpleNamespace(machine=SimpleNamespace(awaited=set(), volumes={}), volumes={})
        self.knows.lending = SimpleNamespace(machine=SimpleNamespace(lent={}, _lease_s=LEASE_S))
        self.plugins: dict[str, Any] = {"h1": self.knows, "h2": lends}
        config = SimpleNamespace(gossip=SimpleNamespace(away_s=AWAY_S))
        self.agents = {name: SimpleNamespace(config=config) for name in self.plugins}
        clock = SimpleNamespace(now_s=lambda: self.now)
        agent = SimpleNamespace(id=SimpleNamespace(pid=self.pid))
        self.hosts = {name: SimpleNamespace(clock=clock, agent=agent, find=lambda name: []) for name in self.plugins}
        self.watch: Any = UnusedSlabs(self)  # type: ignore[arg-type]

    def alive(self) -> list[str]:
        return list(self.plugins)

    def plugin(self, name: str, plugin: str) -> Any:
        return self.plugins.get(name)

    def passes(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            self.watch.check(self)


def test_a_slab_that_its_borrower_uses_is_no_leak() -> None:
    rack = LendingRack()
    rack.passes(1000)
    assert rack.now == 1000 and not rack.watch._since


def test_a_slab_that_nobody_uses_is_a_leak_once_its_lease_is_over() -> None:
    rack = LendingRack()
    rack.used.clear()
    rack.passes(MOST_S)
    with pytest.raises(AssertionError, match="h2 lends slab 0 of v, epoch 7, to h1, which has not used it for 86 s"):
        rack.passes(2)


def test_a_borrower_that_said_it_would_be_away_has_so_long_and_a_lease_more() -> None:
    rack = LendingRack()
    rack.used.clear()
    rack.lent.expires_s = AWAY_S + LEASE_S + 1.0
    rack.passes(MOST_S + AWAY_S)
    with pytest.raises(AssertionError, match="not used it for"):
        rack.passes(2)


def test_a_lender_that_began_anew_grants_a_new_lease_and_who_is_silent_may_use_it() -> None:
    rack = LendingRack()
    rack.used.clear()
    rack.passes(MOST_S)
    rack.hosts["h2"].agent.id.pid += 1
    rack.passes(MOST_S)
    del rack.plugins["h1"]
    rack.passes(MOST_S)
    rack.plugins["h1"] = rack.knows
    rack.knows.borrowing.machine.awaited.add("v")
    rack.passes(MOST_S)
    rack.knows.borrowing.machine.awaited.clear()
    with pytest.raises(AssertionError):
        rack.passes(MOST_S + 2)


def test_pages_in_use_of_large_slabs_lie_at_both_sides_of_where_two_of_them_meet() -> None:
    slab_pages = parse_size(OWN_SLABS["slab"]) // parse_size(OWN_SLABS["page"])
    oracle = Oracle("v", 4 * 64 * MIB, print, print, 4 * BLOCK * 4096, spread=SPREAD)
    oracle.page_bytes = 4096
    places = [oracle.place(number) for number in range(oracle.pages)]
    assert oracle.pages == 4 * BLOCK and slab_pages == BLOCK * SPREAD
    assert places[: 2 * BLOCK] == list(range(slab_pages - BLOCK, slab_pages + BLOCK))
    assert {page // slab_pages for page in places} == {0, 1, 2, 3}
    assert [oracle.together(at, 12) for at in (0, 25, 31, 32)] == [12, 7, 1, 12]
    others = list(oracle.unused())
    assert sum(count for _, count in others) == 4 * slab_pages - len(places)
    assert not any(first <= page < first + count for first, count in others for page in (places[0], places[-1]))


def test_pages_of_small_slabs_are_all_in_use() -> None:
    oracle = Oracle("v", 1 * MIB, print, print)
    oracle.page_bytes = 4096
    assert [oracle.place(number) for number in range(oracle.pages)] == list(range(256))
    assert oracle.together(250, 6) == 6 and not list(oracle.unused())


def test_a_write_that_was_refused_may_be_read_and_be_gone_later_and_no_other_may() -> None:
    stale: list[str] = []
    oracle = Oracle("v", 1 * MIB, print, stale.append)
    older, newer = (page_of("v", 0, version, 4096) for version in (1, 2))
    oracle.acknowledge(0, oracle.sending(0))
    oracle.refused.add((0, oracle.sending(0)))
    oracle.check(0, newer)
    oracle.check(0, older)
    assert not stale
    oracle.refused.clear()
    oracle.check(0, newer)
    oracle.check(0, older)
    assert stale == ["page 0 of v is at version 1, but 2 was acknowledged"]
