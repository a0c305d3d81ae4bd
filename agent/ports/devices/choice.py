"""The choice of the backend that this host's devices come from."""

from collections.abc import Callable

from agent.ports.devices.backend import Backend
from agent.ports.devices.cpu import CpuDevices
from agent.ports.devices.nvidia.nvml import NvmlDevices
from agent.ports.devices.settings import GpuSettings
from agent.ports.devices.sim import SimDevices, simulated_devices
from covey.core.ids import HostId
from covey.core.units import parse_size
from covey.ports.log import Logger


def backend(
    settings: GpuSettings, host: HostId, socket: str, log: Logger, now_s: Callable[[], float], remembered: str = ""
) -> Backend:
    """The backend for these settings. `socket`: path of jobs.sock, by which ranks of this agent are told from another's
    on this machine; `remembered`: path of the file with what NVIDIA's driver listed here before; empty: none is
    kept."""
    match settings.chosen:
        case "simulated":
            devices = simulated_devices(host, settings.simulated, parse_size(settings.simulated_memory))
            return SimDevices(devices, now_s)
        case "cpu":
            return CpuDevices(host, settings.cpu, socket)
        case _:
            return NvmlDevices(log, socket=socket, remembered=remembered, wanted=settings.backend == "nvml")
