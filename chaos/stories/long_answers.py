"""A volume with the most slabs that are allowed: its host's answer about them is longer than an envelope, so it comes
in pages. An asker on another host gets every slab."""

from chaos.rackworld import SimRack
from chaos.story import ended
from covey.core.units import parse_size
from plugins.memory.policy.settings import SLABS_MAX

SLAB = "4 KiB"
SETTINGS = {"memory": {"slab": SLAB, "page": SLAB}}
USED_S = 60.0


def play(rack: SimRack) -> None:
    rack.settle()
    pager = rack.pager("h2", "vol1", SLABS_MAX * parse_size(SLAB), 3.0, used_bytes=1 << 16)
    rack.until(lambda: not pager.alive, USED_S, "the volume was used")
    asker = rack.rng.choice([name for name in sorted(rack.hosts) if name != "h2"])
    found = [row for row in rack.ask(asker, "agent.rack_slabs", {}) if row.volume == "vol1"]
    assert len(found) == SLABS_MAX, f"{asker} was told of {len(found)} of {SLABS_MAX} slabs"
    ended(rack, {})
