"""The plugin `sharing`, as the agent starts it."""

from plugins.base import Plugin
from plugins.sharing.policy.settings import SharingSettings
from plugins.sharing.service.main import SharingService
from plugins.sharing.service.metrics import METRICS

PLUGIN = Plugin(
    name="sharing",
    paper="AntMan",
    settings=SharingSettings,
    messages=None,
    service=SharingService,
    metrics=METRICS,
)
