"""The plugin `load`, as the agent starts it."""

from examples.plugin.load.messages import Messages
from examples.plugin.load.policy import LoadSettings
from examples.plugin.load.service import METRICS, LoadService
from plugins.base import Plugin

PLUGIN = Plugin(
    name="load",
    paper="none: the example of docs/start/plugin.md",
    settings=LoadSettings,
    messages=Messages,
    service=LoadService,
    metrics=METRICS,
    asked_by={"hints": "anybody", "calmest": "anybody"},
)
