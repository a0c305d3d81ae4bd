"""What this host finds out by asking every other one: whether its agent answers, how far its clock is off, and whether
segments of full size come through.

    asked_s --- small question --> other: its clock --> heard_s     offset = its clock - middle of (asked_s, heard_s)
            --- question of `PAD_BYTES` -->                         comes through, or only the small one did

An answer comes back over a connection that the other host opened to this one, so it shows that the control ports are
open both ways. The clock's offset is known to half a round trip.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from agent.api.gathering import WAIT_S
from covey.core.errors import Refused
from covey.core.ids import HostId
from covey.ports.clock import Clock

ASKED, LOST_MAX = 3, 2
"""The small questions to each host, of which the quickest counts, and how many may be lost until no more is asked."""
PAD_BYTES = 64 * 1024
"""Bytes of the long question: several segments of any network, jumbo frames included."""


class ClockRow(msgspec.Struct, frozen=True):
    """The wall clock of a host, and how much of a question came through."""

    host: HostId
    wall_s: float
    pad: int


class LinkRow(msgspec.Struct, frozen=True):
    """One other host, as this one reaches it."""

    host: HostId
    rtt_s: float | None = None
    """Seconds of a round trip between the two agents; None: the other one did not answer."""
    offset_s: float | None = None
    """How far its wall clock is ahead of this host's, to half of `rtt_s`; None: not known."""
    whole: bool | None = None
    """Whether a question of `PAD_BYTES` came through; None: not known."""
    why: str = ""
    """Why something is not known."""


class PathRow(msgspec.Struct, frozen=True):
    """Over what a host's pages and tensors travel, in its own words; empty: the plugin is off there."""

    host: HostId
    pages: str = ""
    tensors: str = ""


class PingView(msgspec.Struct, frozen=True):
    """How this host reaches another one, and over what each of the two moves pages and tensors."""

    link: LinkRow
    here: PathRow
    there: PathRow | None = None
    """What the other host says; None: it did not."""
    there_why: str = ""
    """Why the other host did not say it."""


Ask = Callable[[HostId, int, float], Awaitable[ClockRow]]
"""`ask(host, pad, seconds)`: have a host tell its clock; TimeoutError or Refused."""


async def links(hosts: Sequence[HostId], clock: Clock, ask: Ask, within_s: float = WAIT_S) -> list[LinkRow]:
    """A row for each of these hosts; all are asked at once."""
    return list(await asyncio.gather(*(_link(host, clock, ask, within_s) for host in hosts)))


async def _link(host: HostId, clock: Clock, ask: Ask, within_s: float) -> LinkRow:
    found: list[tuple[float, float]] = []
    lost = 0
    while len(found) + lost < ASKED and lost < LOST_MAX:
        try:
            found.append(await _asked(host, clock, ask, within_s))
        except TimeoutError:
            lost += 1
        except Refused as refused:
            return LinkRow(host, why=f"{refused.what}: {refused.why}")
    if not found:
        return LinkRow(host, why=f"its agent did not answer within {within_s:g} s, {lost} times")
    rtt_s, offset_s = min(found)
    try:
        row = await ask(host, PAD_BYTES, within_s)
    except TimeoutError:
        return LinkRow(host, rtt_s, offset_s, False)
    except Refused as refused:
        return LinkRow(host, rtt_s, offset_s, None, f"{refused.what}: {refused.why}")
    return LinkRow(host, rtt_s, offset_s, row.pad == PAD_BYTES)


async def _asked(host: HostId, clock: Clock, ask: Ask, within_s: float) -> tuple[float, float]:
    """Seconds of a round trip, and of the other clock's offset."""
    asked_s, wall_s = clock.now_s(), clock.wall_s()
    row = await ask(host, 0, within_s)
    rtt_s = clock.now_s() - asked_s
    return rtt_s, row.wall_s - (wall_s + rtt_s / 2)
