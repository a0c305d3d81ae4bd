"""What the agent starts: the plugin `memory`."""

from covey.wire import Attach, Detach
from plugins.base import Plugin, Program
from plugins.memory.datapath.slabd import SlabdConfig, run_slabd
from plugins.memory.datapath.spill_writer import PROGRAM as SPILL
from plugins.memory.datapath.vold import VoldConfig, run_vold
from plugins.memory.messages import Messages
from plugins.memory.policy.settings import MemorySettings
from plugins.memory.service import MemoryService

PLUGIN = Plugin(
    name="memory",
    paper="Infiniswap (Gu 2021, chapter 2)",
    settings=MemorySettings,
    messages=Messages,
    service=MemoryService,
    programs=(
        Program("slabd", SlabdConfig, run_slabd, goes_first=True),
        Program("vold", VoldConfig, run_vold),
        SPILL,
    ),
    frames=(Attach, Detach),
)
