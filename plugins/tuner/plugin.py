"""The plugin `tuner`, as the agent starts it."""

from plugins.base import Plugin
from plugins.tuner import messages
from plugins.tuner.service import TunerService

PLUGIN = Plugin(
    name="tuner",
    paper="Cruise",
    settings=messages.TunerSettings,
    messages=messages.Any,
    service=TunerService,
)
