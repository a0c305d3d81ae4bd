"""A volume without a disk begins with a place for everything: whoever attaches it waits until each slab has all of its
members on hosts of their own, or is told that there is no room for them. And for whom a volume is made."""

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from covey.errors import Refused
from covey.ports import Clock
from plugins.memory.policy.budgets import over_budget
from plugins.memory.policy.mirroring import MEMBERS
from plugins.memory.policy.settings import MemorySettings
from plugins.memory.service.open_volume import OpenVolume
from plugins.memory.service.record import KnownVolume

FORMED_S = 15.0
"""How long whoever attaches waits at most; it goes on."""
STUCK_S = 7.0
"""Without one slab more for so long there is no room."""
LOOK_S = 0.1


class Payer(NamedTuple):
    """For whom a volume is made; empty: nobody in particular."""

    tenant: str = ""
    job: str = ""


NOBODY = Payer()


def refuse_over_budget(
    settings: MemorySettings, volumes: Iterable[OpenVolume], tenant: str, more_bytes: int, what: str
) -> None:
    """Refused: the tenant's volumes on this host would have more than its budget."""
    has = (volume.known.taken_bytes for volume in volumes if volume.known.tenant == tenant)
    if why := over_budget(tenant, has, more_bytes, settings.budget_bytes(tenant)):
        step = f"detach one of its volumes (agentctl memory), or raise budgets.{tenant} in agent.toml"
        raise Refused(4, what, why, step)


def checked_members(members: object, what: str) -> int:
    """How many members somebody asks for. Refused when there is no such volume."""
    if isinstance(members, bool) or members not in (0, 1, MEMBERS):
        why = f"--mirror {members!r}: a slab has {MEMBERS} members, on two hosts, or the disk of this host beside one"
        raise Refused(2, what, why, f"give --mirror {MEMBERS}, or nothing")
    assert isinstance(members, int)
    return max(1, members)


async def until_formed(volume: OpenVolume, clock: Clock) -> bool:
    """True once every slab has its members; False when there is no room for them. Refused (1): not yet."""
    began_s = moved_s = clock.now_s()
    seen = -1
    while (formed := volume.formed()) < volume.slabs:
        now_s = clock.now_s()
        if formed != seen:
            seen, moved_s = formed, now_s
        if now_s - moved_s >= STUCK_S:
            return False
        if now_s - began_s >= FORMED_S:
            why = f"{formed} of {volume.slabs} slabs have two hosts so far, and it goes on"
            raise Refused(1, f"volume {volume.known.volume} is not ready", why, "try again in a few seconds")
        await asyncio.sleep(LOOK_S)
    return True


def no_room(volume: OpenVolume) -> Refused:
    """Why it could not be made."""
    formed, slabs = volume.formed(), volume.slabs
    trouble = f" ({volume.trouble})" if volume.trouble else ""
    found = f"{formed} of {slabs} slabs found two other hosts with room for a copy each{trouble}"
    why = f"{found}; what was taken is given back"
    next_step = "agentctl hosts shows who lends; ask for less, or attach it without --mirror"
    return Refused(4, f"cannot attach volume {volume.known.volume}", why, next_step)


def check_owner(known: KnownVolume, uid: int, what: str) -> None:
    """Refused: it belongs to another user."""
    if uid not in (known.uid, -1, 0) and known.uid != -1:
        raise Refused(4, what, f"it belongs to another user (uid {known.uid})", "choose another name")
