"""[gpus] of agent.toml: which devices jobs get here."""

import os
from collections.abc import Callable, Collection

import msgspec

from covey.core.units import parse_size

CPU_DEVICES_MAX = 64
CORE_MAX = 8191
"""The highest number of a core that Linux is built for (CONFIG_NR_CPUS of large distributions, less one)."""
BACKENDS = ("auto", "nvml", "cpu", "simulated")


class CpuDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of `[gpus] cpu`: cores and memory that a rank gets in the place of a GPU."""

    cores: str
    """The cores, such as "0-3" or "0,2,8-11", as `taskset -c` takes them."""
    memory: str
    """The memory, such as "2 GiB"."""

    @property
    def core_numbers(self) -> tuple[int, ...]:
        """The numbers of the cores, ascending. ValueError says what cannot be read."""
        found: set[int] = set()
        for part in self.cores.split(","):
            first, _, last = part.strip().partition("-")
            if not first.isdecimal() or not (last or first).isdecimal():
                raise ValueError(f"{self.cores!r} is not a list of cores")
            low, high = int(first), int(last or first)
            if high < low or high > CORE_MAX:
                raise ValueError(f"{part.strip()!r} is not a range of cores")
            found.update(range(low, high + 1))
        return tuple(sorted(found))

    @property
    def memory_bytes(self) -> int:
        return parse_size(self.memory)


class GpuSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[gpus]: real ones are found by NVML and need nothing here."""

    backend: str = "auto"
    """The source of the devices. `nvml`: what NVIDIA's driver has, MIG instances included; `cpu`: what `cpu` lists;
    `simulated`: devices that only pretend, `simulated` of them; `auto`: `simulated` or `cpu` where these say something,
    else `nvml`."""
    simulated: int = 0
    """The number of GPUs to pretend, for a rack on a laptop; 0: the real ones."""
    simulated_memory: str = "16 GiB"
    cpu: tuple[CpuDevice, ...] = ()
    """Cores and memory in the place of GPUs, one entry per device:
    [{cores = "0-3", memory = "2 GiB"}, {cores = "4-7", memory = "2 GiB"}]. Ranks are bound to the cores of their
    devices."""

    def __post_init__(self) -> None:
        parse_size(self.simulated_memory)
        if not 0 <= self.simulated <= 64:
            raise ValueError(f"simulated = {self.simulated}: expected 0 to 64 GPUs")
        if self.backend not in BACKENDS:
            raise ValueError(f"backend = {self.backend!r}: expected {', '.join(BACKENDS)}")
        if len(self.cpu) > CPU_DEVICES_MAX:
            raise ValueError(f"cpu lists {len(self.cpu)} devices: expected at most {CPU_DEVICES_MAX}")

    @property
    def chosen(self) -> str:
        """The backend chosen: `nvml`, `cpu` or `simulated`."""
        if self.backend != "auto":
            return self.backend
        return "simulated" if self.simulated else "cpu" if self.cpu else "nvml"


Trouble = tuple[str, str, str]
"""What is wrong with settings: the key, why its value cannot be used, what to do next."""


def usable_cores() -> frozenset[int]:
    """The cores that this process may run on: those of the machine that its cgroup and its mask leave it."""
    return frozenset(os.sched_getaffinity(0))


def trouble(settings: GpuSettings, usable: Callable[[], Collection[int]] = usable_cores) -> Trouble | None:
    """What is wrong with settings that are well-formed each by itself."""
    return _contradiction(settings) or _cpu_trouble(settings.cpu, usable)


def _contradiction(settings: GpuSettings) -> Trouble | None:
    listed = {"simulated": settings.simulated > 0, "cpu": bool(settings.cpu)}
    if settings.chosen in listed and not listed[settings.chosen]:
        key = settings.chosen
        return f"gpus.{key}", f'backend = "{key}", and `{key}` lists no devices', f'set `{key}`, or backend = "auto"'
    for key, there in listed.items():
        if there and key != settings.chosen:
            why = f'the devices of this host are "{settings.chosen}", and a host has one kind'
            return f"gpus.{key}", why, f"remove `{key}`, or set `backend` so that it is used"
    return None


def _cpu_trouble(devices: tuple[CpuDevice, ...], usable: Callable[[], Collection[int]]) -> Trouble | None:
    owner: dict[int, int] = {}
    there = usable() if devices else ()
    for number, device in enumerate(devices):
        key = f"gpus.cpu[{number}]"
        try:
            cores, memory_bytes = device.core_numbers, device.memory_bytes
        except ValueError as error:
            return key, str(error), 'write it as in {cores = "0-3", memory = "2 GiB"}'
        if memory_bytes <= 0:
            return f"{key}.memory", "a device needs more than 0 bytes of memory", 'give it memory, such as "2 GiB"'
        for core in cores:
            if core not in there:
                usual = ",".join(map(str, sorted(there)))
                return (
                    f"{key}.cores",
                    f"core {core} is not available to this agent",
                    f"choose among {usual} (nproc, lscpu)",
                )
            if core in owner:
                why = f"core {core} is in cpu[{owner[core]}] too, and devices do not overlap"
                return f"{key}.cores", why, "give each core to one device"
            owner[core] = number
    return None
