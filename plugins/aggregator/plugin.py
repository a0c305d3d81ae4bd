"""The plugin `aggregator`, as the agent starts it."""

from covey.wire.job import AggregatorLost, SumsNow
from plugins.aggregator import messages
from plugins.aggregator.datapath.aggd import PROGRAMS
from plugins.aggregator.service import AggregatorService
from plugins.aggregator.service.metrics import METRICS
from plugins.base import Plugin

PLUGIN = Plugin(
    name="aggregator",
    paper="AutoPS",
    settings=messages.AggregatorSettings,
    messages=messages.Any,
    service=AggregatorService,
    programs=PROGRAMS,
    frames=(AggregatorLost, SumsNow),
    metrics=METRICS,
)
