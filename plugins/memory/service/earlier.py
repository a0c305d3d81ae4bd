"""Before a volume is made: does another host hold pages of one of this name, of which this host has lost its record?

A host whose disk was replaced knows nothing of its volumes. Made anew, one of them would read zeros where pages were
acknowledged, without an error; so every other host is asked, and a person must confirm.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from covey.core.errors import Refused
from covey.core.ids import HostId
from plugins.base import Host
from plugins.gossiped import Spare
from plugins.memory.messages import VolumeHeld, VolumeIsHeld
from plugins.memory.service.record import SlabRecord

ASK_S = 2.0
"""Seconds that one host may take to answer."""
SILENT_S = 10.0
"""Seconds for which a host that gossip calls alive may be silent; after that the volume is not made."""
PAUSE_S = 0.5
MAY_ANSWER = ("alive", "suspect", "away")
NAMED = 4
"""Most hosts that are named in one line."""
Waits = Callable[[str], None]
"""Called with the reason why it takes so long. Raises Refused when the client does not wait any more."""


class KnownElsewhere(NamedTuple):
    """Slabs that one host knows of a volume that this host has no record of."""

    host: HostId
    held: int
    freed: int


class EarlierElsewhere:
    """Asks the other hosts on behalf of one host."""

    def __init__(self, host: Host, record: SlabRecord) -> None:
        self._host, self._record = host, record

    async def check(self, name: str, waits: Waits | None = None) -> None:
        """Check that no other host knows of such a volume. Refused when one does (4), or does not say whether it does
        (1)."""
        clock = self._host.env.clock
        began_s = clock.now_s()
        silent, told = self._others(), list[KnownElsewhere]()
        while silent:
            answers = await asyncio.gather(*(self._ask(host, name, forget=False) for host in silent))
            told += [answer for answer in answers if answer is not None]
            alive = set(self._others())
            silent = [host for host, answer in zip(silent, answers, strict=True) if answer is None and host in alive]
            if found := [each for each in told if each.held or each.freed]:
                raise self._is_known(name, found)
            if silent and clock.now_s() >= began_s + SILENT_S:
                raise _not_said(name, silent)
            if silent:
                if waits is not None:
                    waits(f"{named(silent)} has not said yet whether it holds pages of an earlier volume of this name")
                await asyncio.sleep(PAUSE_S)

    async def forget(self, name: str) -> list[HostId]:
        """A person said that the volume is made anew: tell the other hosts. Returns those that knew of it."""
        others = self._others()
        told = await asyncio.gather(*(self._ask(host, name, forget=True) for host in others))
        found = [each.host for each in told if each is not None and (each.held or each.freed)]
        if found:
            self._host.note(f"volume/{name}", "given up", f"its pages were given up by request, at {named(found)}")
        return found

    def _others(self) -> list[HostId]:
        """Hosts that may still answer: one that is suspected, or restarts its agent, is gone or alive soon."""
        return [view.host for view in self._host.hosts() if view.host != self._host.id and view.state in MAY_ANSWER]

    def _lends(self, host: HostId) -> bool:
        """Does the host have this plugin, as far as it has said?"""
        return any(view.host == host and view.value("spare", Spare) is not None for view in self._host.hosts())

    async def _ask(self, host: HostId, name: str, forget: bool) -> KnownElsewhere | None:
        """Ask one host for all that it knows of the volume; None: it did not say."""
        since, boot = self._record.since, self._host.boot
        try:
            answer = await self._host.ask("memory", host, VolumeHeld(name, since, boot, forget), ASK_S)
        except Refused:  # it has no such plugin, or has and cannot say
            return None if self._lends(host) else KnownElsewhere(host, 0, 0)
        except (TimeoutError, ConnectionError):
            return None
        if not isinstance(answer, VolumeIsHeld) or not (answer.known or forget):
            return None
        foreign = [slabs for slabs in answer.slabs if not since <= slabs.boot <= boot]
        return KnownElsewhere(host, sum(slabs.held for slabs in foreign), sum(slabs.freed for slabs in foreign))

    def _is_known(self, name: str, told: list[KnownElsewhere]) -> Refused:
        me = self._host.id
        held, freed = sum(each.held for each in told), sum(each.freed for each in told)
        hosts = named([each.host for each in told])
        slabs = f"{held} slabs of it are" if held else f"{freed} slabs of it were, until their lease ran out,"
        why = f"{me} had a volume of this name and has lost its record; {slabs} at {hosts}"
        step = f"restore the state directory of {me} from a copy, or drop those pages: {word(name)}"
        return Refused(4, f"volume {name} is not created again, empty", why, step)


def word(name: str) -> str:
    """Command by which a person says that a volume is made anew."""
    return f"agentctl volume give-up {name}, or create=True in RemoteMemory.open"


def named(hosts: list[HostId]) -> str:
    return ", ".join(hosts[:NAMED]) + (f" and {len(hosts) - NAMED} more" if len(hosts) > NAMED else "")


def _not_said(name: str, silent: list[HostId]) -> Refused:
    why = (
        f"{named(silent)}, which may hold pages, did not say within {SILENT_S:g} "
        "s whether it holds pages of an earlier one"
    )
    return Refused(
        1, f"volume {name} is not created", why, f"try again; if no page of an earlier volume matters: {word(name)}"
    )
