"""The stories about remote memory with slabs of the default size, one of them by the seed: volumes have the same
number of slabs, of 64 MiB, and 64 KiB of each are used, at its end or its beginning, so that requests reach from one
into the next. Volumes are idle now and then for up to 25 s, even while something fails; some, once all is healed, for
an hour, after which what is called mapped is connected, nothing unused is lent, and every page is there.

Seeds that once broke: 186 (a mistake of this story), 1422 (with four hosts: a row of parity was half written and
another member was cut off for six seconds; its pages were given up).
"""

from collections.abc import Callable

from chaos.rackworld import OWN_SLABS, SPREAD, SimRack
from chaos.stories import (
    borrower_away,
    closing_killed,
    disk_refuses,
    leaked,
    lender_killed,
    lenders_paused,
    links_cut,
    log_writer_killed,
    lost_killed,
    memory_measured,
    memory_short,
    mirrored,
    mirrored_twice,
    parity,
    parity_twice,
    unconnected,
    volume_killed,
)
from chaos.story import READ_S, not_stale
from plugins.registry import PLUGINS as REGISTERED

SETTINGS = {"memory": OWN_SLABS}
PLUGINS = tuple(plugin for plugin in REGISTERED if plugin.name == "memory")
IDLES = 0.005
"""Chance that a volume is idle before each request."""
HOUR, HOUR_S = 0.01, 3600.0
"""Chance that the volume is idle for an hour at the end, and the seconds of that hour."""
PLAYS: tuple[Callable[[SimRack], None], ...] = (
    borrower_away.play,
    closing_killed.play,
    disk_refuses.play,
    lender_killed.play,
    lenders_paused.play,
    links_cut.play,
    log_writer_killed.play,
    lost_killed.play,
    memory_measured.play,
    memory_short.play,
    mirrored.play,
    mirrored_twice.play,
    parity.play,
    parity_twice.play,
    volume_killed.play,
)
OTHERS = (borrower_away, memory_measured)
"""Stories with settings of their own, of which the sizes and the threshold are left out."""


def play(rack: SimRack) -> None:
    told = PLAYS[rack.world.seed % len(PLAYS)]
    for module in OTHERS:
        if told is module.play:
            for name in rack.hosts:
                rack.configure(name, {key: dict(values) for key, values in module.SETTINGS.items()})
    rack.world.mark("story", "chaos", told.__module__)
    rack.spread, rack.idles = SPREAD, IDLES
    told(rack)
    if rack.rng.random() < HOUR:
        idle_hour(rack)


def idle_hour(rack: SimRack) -> None:
    rack.run(HOUR_S)
    for host in rack.oracles:
        assert not unconnected(rack, host), unconnected(rack, host)[0]
    assert not leaked(rack), leaked(rack)[0]
    reading = rack.readers()
    rack.until(lambda: not any(process.alive for process in reading), READ_S, "every page is read back")
    not_stale(rack)
