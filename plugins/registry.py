"""The list of rooms. The only file of `plugins/` that imports them."""

from collections.abc import Sequence

from plugins import aggregator, memory, scheduler
from plugins.base import Room

ROOMS: Sequence[Room] = (scheduler.ROOM, memory.ROOM, aggregator.ROOM)
"""In the order in which an agent starts them and tells them facts."""
