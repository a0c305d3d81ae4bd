"""May pages that were swapped out be taken back? Without room for them the kernel would end programs."""

from collections.abc import Sequence

import msgspec

from covey.core.units import format_size

KEPT_FRACTION = 1 / 32
"""Fraction of this machine's memory that is free when all pages are back."""
GROUP_KEPT_FRACTION = 1 / 16
"""Fraction of a group's memory limit that is free when all its pages are back."""


class GroupMemory(msgspec.Struct, frozen=True):
    """A control group whose memory is limited; sizes in bytes."""

    name: str
    limit_bytes: int
    used_bytes: int
    cache_bytes: int
    """Bytes of `used_bytes` that are contents of files, which the kernel gives up for pages."""
    swapped_bytes: int
    """Bytes of the group's pages in any swap area."""


class RoomNow(msgspec.Struct, frozen=True):
    """Room that a machine has for pages that come back; bytes."""

    total_bytes: int
    available_bytes: int
    """Bytes that can be had without swapping (`MemAvailable`)."""
    elsewhere_bytes: int
    """Bytes free in other swap areas."""
    used_bytes: int
    """Bytes of pages in the swap area that is to go."""
    groups: Sequence[GroupMemory] = ()


def lacks_room(now: RoomNow) -> str:
    """Why the pages of a swap area cannot be taken back, for people; empty: they can.

    A page that comes back is charged to its group, whatever is free elsewhere: in a group at its limit, without another
    swap area, the kernel would end a program to make room for it.
    """
    kept = int(now.total_bytes * KEPT_FRACTION)
    room = max(0, now.available_bytes - kept) + now.elsewhere_bytes
    if now.used_bytes > room:
        return (
            f"{format_size(now.used_bytes)} of pages are in it, and memory has room for {format_size(room)}"
            f" ({format_size(now.available_bytes)} available, of which {format_size(kept)} are kept,"
            f" and {format_size(now.elsewhere_bytes)} in other swap areas)"
        )
    for group in now.groups:
        wanted = min(group.swapped_bytes, now.used_bytes)
        free = group.limit_bytes - group.used_bytes + group.cache_bytes - int(group.limit_bytes * GROUP_KEPT_FRACTION)
        if wanted > max(0, free) + now.elsewhere_bytes:
            return (
                f"group {group.name} has {format_size(wanted)} of pages swapped out, and its limit of"
                f" {format_size(group.limit_bytes)} has room for {format_size(max(0, free))}"
            )
    return ""
