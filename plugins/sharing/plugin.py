"""What the agent starts: the plugin `sharing`."""

from plugins.base import Plugin
from plugins.sharing.policy.settings import SharingSettings
from plugins.sharing.service.main import SharingService

PLUGIN = Plugin(
    name="sharing",
    paper="AntMan",
    settings=SharingSettings,
    messages=None,
    service=SharingService,
)
