"""The list of rooms. The only file of `plugins/` that imports them."""

from collections.abc import Sequence

from plugins.base import Room

ROOMS: Sequence[Room] = ()
