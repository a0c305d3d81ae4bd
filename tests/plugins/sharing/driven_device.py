"""A core whose driver is a stand-in beneath the real pynvml: what it says about processes comes from NVML's own
code."""

from collections.abc import Sequence

from agent.ports.devices.nvidia.nvml import NvmlDevices
from agent.program import JsonLog
from covey.core.units import GIB
from covey.ports.devices import Device, DeviceHealth, DeviceSample
from tests.agent.here import Lines
from tests.agent.ports.devices.stand_in import StandIn
from tests.plugins.sharing.live_host import CoreDevice


class DrivenDevice(CoreDevice):
    """A core with a driver: after `driver.open.clear()` it hangs; with `driver.present = False` every call raises."""

    def __init__(self, driver: StandIn, deadline_s: float) -> None:
        super().__init__(driver.boards[0].memory or 0)
        self.driver = driver
        self.nvml = NvmlDevices(JsonLog(Lines()), deadline_s=deadline_s)  # type: ignore[arg-type]

    async def begin(self) -> None:
        """Begin: ask the driver which devices there are."""
        await self.nvml.start_up()
        (self.device,) = self.nvml.devices()

    def devices(self) -> Sequence[Device]:
        return self.nvml.devices()

    async def sample(self, uuid: str) -> DeviceSample:
        self.driver.boards[0].processes = dict.fromkeys(self.pids, GIB)
        return await self.nvml.sample(uuid)

    async def health(self, uuid: str) -> DeviceHealth:
        return await self.nvml.health(uuid)

    async def events(self) -> Sequence[tuple[str, DeviceHealth]]:
        return await self.nvml.events()
