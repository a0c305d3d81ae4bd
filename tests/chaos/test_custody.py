"""Pages that two failures took are forgiven, and no others."""

from collections.abc import Sequence

from chaos.checks.custody import on_disk
from chaos.faults import Kill, Pause, strike
from chaos.rackworld import SimRack
from chaos.stories import lenders


def played(*killed: str, slow: float = 2_000.0, forgets: bool = False) -> tuple[int, Sequence[str], int]:
    """Write to a volume while its disk is slow; then these processes die at one instant, and the volume may forget its
    lenders. Returns how many older pages were forgiven, which were not, and how many acknowledged pages the disk
    lacked."""
    with SimRack(11, 3, settings={"memory": {"slab": "256 KiB"}}) as rack:
        rack.start()
        rack.settle()
        rack.forgive()
        pager = rack.pager("h2", "vol1", 1 << 18, 14.0)  # one slab, lent: no write waits for the disk
        rack.until(lambda: bool(lenders(rack, "h2")), 20.0, "a slab is lent")
        rack.run(4.0)
        rack.hosts["h2"].disk.slow = slow
        rack.run(1.5)
        assert rack.custody is not None
        behind = len(rack.custody.volumes[0].missing())
        for host in rack.hosts:
            for name in killed:
                strike(rack.world, Kill("program", host, 0.0, name))
        rack.hosts["h2"].disk.slow = 1.0
        if forgets:
            rack.hosts["h2"].disk.damage("volumes/vol1/places", "lost")
        rack.until(lambda: not pager.alive, 120.0, "the pager is done")
        reading = rack.readers()
        rack.until(lambda: not any(process.alive for process in reading), 60.0, "all is read back")
        return rack.custody.forgiven, list(rack.stale), behind


def test_pages_lost_by_lender_and_volume_before_the_disk_are_forgiven_and_counted() -> None:
    """Lender and volume, with the writer of its log, fail before the disk has the pages."""
    forgiven, stale, behind = played("slab-keeper", "slabd", "vold", "spill")
    assert behind > 0, "the slow disk had not everything"
    assert 0 < forgiven <= behind and not stale


def test_nothing_is_lost_nor_forgiven_when_one_of_them_fails() -> None:
    assert played("vold")[:2] == (0, [])
    assert played("slabd")[:2] == (0, [])
    assert played("slabd", "vold")[:2] == (0, []), "the lender's keeper has its memory"
    assert played("slab-keeper", "slabd", "vold")[:2] == (0, []), "the writer of its log saves what the disk lacks"


def test_a_volume_that_forgets_its_lenders_is_not_forgiven() -> None:
    forgiven, stale, behind = played("vold", "spill", forgets=True)
    assert behind > 0 and stale and forgiven == 0
    assert "was acknowledged" in stale[0]


def test_what_the_disk_has_is_what_a_new_process_would_find() -> None:
    with SimRack(12, 3) as rack:
        rack.start()
        rack.settle()
        rack.forgive()
        rack.pager("h2", "vol1", 1 << 18, 5.0)
        rack.run(12.0)
        assert rack.custody is not None
        volume = rack.custody.volumes[0]
        there = on_disk(rack.hosts["h2"].disk, volume.oracle)
        assert there and all(there[page] >= held.version for page, held in volume.held.items())
        del rack.hosts["h2"].disk.files["memory/volumes/vol1/log/segments"]
        assert len(volume.missing()) == sum(held.version > 0 for held in volume.held.values())


def test_a_lender_whose_agent_stands_still_holds_pages_until_the_volume_gives_it_up() -> None:
    with SimRack(14, 3) as rack:
        rack.start()
        rack.settle()
        rack.forgive()
        rack.pager("h2", "vol1", 1 << 18, 60.0)
        rack.until(lambda: bool(lenders(rack, "h2")), 20.0, "a slab is lent")
        rack.run(1.0)
        assert rack.custody is not None
        volume = rack.custody.volumes[0]
        (lender,) = next(iter(volume.lenders.values()))
        strike(rack.world, Pause(lender, 60.0, "agent"))
        rack.run(1.0)
        assert lender in {host for hosts in volume.lenders.values() for host in hosts}, "its slab process goes on"
        gone = "pages written from here on are on the disk alone"
        rack.until(lambda: all(lender not in hosts for hosts in volume.lenders.values()), 30.0, gone)
