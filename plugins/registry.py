"""The list of plugins. The only file of `plugins/` that imports them."""

from collections.abc import Sequence

from plugins import aggregator, memory, scheduler
from plugins.base import Plugin

PLUGINS: Sequence[Plugin] = (scheduler.PLUGIN, memory.PLUGIN, aggregator.PLUGIN)
"""In the order in which an agent starts them and tells them facts."""
