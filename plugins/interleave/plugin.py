"""The plugin `interleave`, as the agent starts it."""

from plugins.base import Plugin
from plugins.interleave import messages
from plugins.interleave.policy.settings import InterleaveSettings
from plugins.interleave.service.main import InterleaveService

PLUGIN = Plugin(
    name="interleave",
    paper="Harmony",
    settings=InterleaveSettings,
    messages=messages.Messages,
    service=InterleaveService,
)
