"""The plugin `memory`, as the agent starts it."""

from covey.wire.job import RemoveVolume, VolumeWanted
from plugins.base import Plugin
from plugins.memory.datapath.lending.slab_keeper import PROGRAM as KEEPER
from plugins.memory.datapath.lending.slabd import PROGRAM as SLABD
from plugins.memory.datapath.spill.spill_writer import PROGRAM as SPILL
from plugins.memory.datapath.vold import PROGRAM as VOLD
from plugins.memory.messages import Messages
from plugins.memory.policy.settings import MemorySettings
from plugins.memory.service import MemoryService
from plugins.memory.service.metrics import METRICS

PLUGIN = Plugin(
    name="memory",
    paper="Infiniswap (Gu 2021, chapter 2)",
    settings=MemorySettings,
    messages=Messages,
    service=MemoryService,
    programs=(
        SLABD,
        VOLD,
        SPILL,
        KEEPER,
    ),
    frames=(VolumeWanted, RemoveVolume),
    metrics=METRICS,
)
