"""The list of plugins. The only file of `plugins/` that imports them."""

from collections.abc import Sequence

from plugins.aggregator.plugin import PLUGIN as AGGREGATOR
from plugins.base import Plugin
from plugins.interleave.plugin import PLUGIN as INTERLEAVE
from plugins.memory.plugin import PLUGIN as MEMORY
from plugins.scheduler.plugin import PLUGIN as SCHEDULER
from plugins.sharing.plugin import PLUGIN as SHARING

PLUGINS: Sequence[Plugin] = (SCHEDULER, MEMORY, AGGREGATOR, SHARING, INTERLEAVE)
"""All plugins, in the order in which an agent starts them and tells them facts."""
