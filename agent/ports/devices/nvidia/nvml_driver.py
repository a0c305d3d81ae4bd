"""NVIDIA's driver over its lives, as one thread after another finds it: begun, read whole, listened to, given up, and
begun again.

Everything here blocks; `nvml.py` calls it in threads with a deadline. What the driver does not tell is a value too: the
reason for its silence.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from agent.ports.devices.inventory import Inventory
from agent.ports.devices.nvidia import nvml_reads
from agent.ports.devices.nvidia.nvml_reads import Listing, NvmlDevice
from agent.ports.devices.nvidia.xid_events import XidEvents
from covey.ports.log import Logger

AGAIN_S = 1.0
"""Seconds until a driver that failed is begun again."""
NO_DRIVER_S = 60.0
"""Seconds until the driver is tried again on a machine without one: it may be installed while the agent runs."""
LISTEN_S = 30.0
"""Seconds until events are asked for again after the driver failed to tell any."""
NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")
"""The vendor, and the classes of devices, on the PCI bus: VGA and 3D controllers."""
NONSENSE = (MemoryError, IndexError, ValueError, OSError)
"""Errors that pynvml raises beside NVMLError when a driver gives lists or texts that cannot be."""


class DriverSaid(NamedTuple):
    """What the driver says of its devices."""

    listing: Listing = Listing((), ())
    silence: str = "the driver has not answered yet"
    """Why the driver tells nothing; empty: it tells what `listing` has."""
    expected: bool = True
    """Whether there should be a driver. False: this machine has no GPU, as far as is known."""


def nvidia_gpus(devices: str = "/sys/bus/pci/devices") -> int:
    """The number of NVIDIA's GPUs on this machine's PCI bus, with a driver or without."""
    count = 0
    for name in os.listdir(devices) if os.path.isdir(devices) else ():
        count += _word(f"{devices}/{name}/vendor") == NVIDIA and _word(f"{devices}/{name}/class")[:6] in DISPLAYS
    return count


def _word(path: str) -> str:
    """The word in a file; empty when it cannot be read."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


class NvmlDriver:
    """NVIDIA's driver. `able`: whether whole GPUs can move a rank's memory out. `expected`: whether this machine should
    have a driver, though none is found and no GPU of it is remembered. `heard(uuid of the GPU, instance or None, XID)`
    is called in another thread."""

    def __init__(
        self,
        log: Logger,
        nvml: Any,
        inventory: Inventory,
        able: Callable[[], bool],
        heard: Callable[[str, int | None, int], None],
        expected: Callable[[], bool] = lambda: nvidia_gpus() > 0,
        now_s: Callable[[], float] = time.monotonic,
        listens: type[XidEvents] = XidEvents,
    ) -> None:
        """`nvml`: the module pynvml; None: imported when it is first needed."""
        self.nvml, self._log, self._inventory = nvml, log, inventory
        self._able, self._heard, self._expected, self._now_s, self._listens = able, heard, expected, now_s, listens
        self._initialised, self._again_s, self._said = False, 0.0, ""
        self._last = DriverSaid()
        self.handles: Mapping[str, NvmlDevice] = {}
        """The handles of each device that was listed since the driver was begun, by UUID."""
        self._events: XidEvents | None = None
        self._listened: tuple[tuple[int, ...], float] = ((), 0.0)
        """The GPUs that are listened to, by number, and since when."""
        self.deaf: Mapping[int, str] = {}
        """The GPUs whose XIDs are not heard, by number, and why: as the newest listener found that knows."""

    def read(self) -> DriverSaid:
        """Read every device now. It never raises what a driver does."""
        if not self._initialised and self._now_s() < self._again_s:
            return self._last
        self._last = self._read()
        if self._last.silence != self._said:
            self._said = self._last.silence
            if self._said and self._last.expected:
                self._log.warning("the driver tells nothing of its GPUs", why=self._said)
            elif not self._said:
                self._log.info("the driver tells of its GPUs", gpus=len(self._last.listing.readings))
        return self._last

    def _read(self) -> DriverSaid:
        if self.nvml is None:
            import pynvml

            self.nvml = pynvml
        if not self._initialised and (said := self._begin()) is not None:
            return said
        try:
            more = frozenset({"suspend"}) if self._able() else frozenset()
            listing = nvml_reads.read_all(self.nvml, more, self._inventory.xids)
        except self.nvml.NVMLError as error:
            self.end()
            self._again_s = self._now_s() + AGAIN_S
            return DriverSaid(silence=f"the driver failed: {error}")
        except NONSENSE as error:
            return DriverSaid(silence=f"the driver answers what cannot be: {error!r}")
        found = [one.found for one in listing.readings]
        self.handles = {**self.handles, **{one.device.uuid: one for one in found}}
        self._inventory.learn(one.listed.known for one in listing.readings)
        self._listen({one.number: one.whole for one in found})
        if self._events is not None and self._events.deaf is not None:
            told = zip(self._listened[0], self._events.deaf, strict=True)
            self.deaf = {number: why for number, why in told if why}
        return DriverSaid(listing, "")

    def _begin(self) -> DriverSaid | None:
        """Begin the driver. None: it has begun; else why not."""
        nvml = self.nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            nothing = error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
            expected = not nothing or bool(self._inventory.devices) or self._expected()
            self._again_s = self._now_s() + (AGAIN_S if expected else NO_DRIVER_S)
            return DriverSaid(silence=f"there is no driver to ask: {error}", expected=expected)
        except NONSENSE as error:
            self._again_s = self._now_s() + AGAIN_S
            return DriverSaid(silence=f"the driver answers what cannot be: {error!r}")
        self._initialised, self.handles = True, {}
        try:
            version = nvml_reads.text(nvml.nvmlSystemGetDriverVersion())
        except (nvml.NVMLError, *NONSENSE) as error:
            version = f"not told: {error}"
        self._log.info("NVML found", driver=version)
        return None

    def _listen(self, wholes: Mapping[int, Any]) -> None:
        """Listen to XIDs of these GPUs, by number."""
        numbers, (before, since_s), now_s = tuple(sorted(wholes)), self._listened, self._now_s()
        if self._events is not None and numbers == before and (self._events.alive or now_s - since_s < LISTEN_S):
            return
        if self._events is not None:
            if numbers == before:
                self._log.warning("XIDs are not heard for now", why=self._events.why or "the driver tells no events")
            self._events.close()
            self._events = None
        if numbers:
            self._events = self._listens(self.nvml, tuple(wholes[number] for number in numbers), self._heard)
            self._listened = numbers, now_s

    def end(self) -> None:
        """Give the driver up. What it said of devices before no longer holds, but they are remembered."""
        if self._events is not None:
            self._events.close()
            self._events = None
        if self._initialised:
            with contextlib.suppress(self.nvml.NVMLError, *NONSENSE):
                self.nvml.nvmlShutdown()
        self._initialised, self.handles = False, {}

    def close(self) -> None:
        """Listen no more."""
        if self._events is not None:
            self._events.close()
