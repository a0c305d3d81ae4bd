"""What the processes of a job may take of this host, where a starter enforces it: what the job asked for, and where it
did not ask, a part of the host in proportion to its GPUs."""

import math

from agent.jobs.supervision import EXTENSION_MAX_S
from covey.ports.devices import Device
from covey.ports.env import Env
from covey.ports.starter import EpochLimits
from plugins.base import RanksSpec

WEIGHT, WEIGHT_MAX = 100, 10_000
"""Part of the processors of a job with one GPU here, or none; and the most that the kernel knows."""
ENDING_S = 120.0
"""Seconds, beyond its grace and the time that its ranks may ask for, that a job at its time limit has to end."""
NVIDIA = "nvml"


def limits_here(env: Env, spec: RanksSpec) -> EpochLimits:
    """The limits of these ranks on this host."""
    devices, unlisted = tuple(env.probes.devices.devices()), bool(env.probes.gpus_unlisted())
    return limits_of(spec, devices, env.probes.memory().total_bytes, unlisted)


def limits_of(spec: RanksSpec, devices: tuple[Device, ...], memory_bytes: int, unlisted: bool = False) -> EpochLimits:
    """The limits of these ranks on a host with these devices and so much memory, which is 0 where it is not known.
    `unlisted`: it has GPUs, and nobody knows which. OSError: nobody knows which files open a GPU of theirs, so no job
    may open them."""
    wanted = {gpu for rank in spec.ranks for gpu in rank.gpus}
    own = [device for device in devices if device.uuid in wanted]
    if missing := sorted(wanted - {device.uuid for device in own}):
        raise OSError(f"{missing[0]} is not among the GPUs that this host lists; next: agentctl doctor")
    part = memory_bytes * len(own) // len(devices) if own else 0
    for device in own:
        if device.backend == NVIDIA and (device.number is None or (device.parent and not device.caps)):
            raise OSError(f"the driver does not say which device file opens {device.uuid}; next: agentctl doctor")
    has_nvidia = unlisted or any(device.backend == NVIDIA for device in devices)
    return EpochLimits(
        memory_bytes=spec.host_memory or part,
        cpus=spec.cpus * len(spec.ranks),
        weight=min(WEIGHT_MAX, WEIGHT * max(1, len(own))),
        gpus=tuple(sorted({one.number for one in own if one.number is not None})) if has_nvidia else None,
        caps=tuple(sorted({cap for one in own for cap in one.caps})),
    )


def seconds_of(spec: RanksSpec) -> int:
    """Seconds after which nothing of these ranks may run any more, whatever happens; 0: no limit."""
    if spec.time_left_s is None:
        return 0
    return math.ceil(max(0.0, spec.time_left_s) + spec.grace_s + EXTENSION_MAX_S + ENDING_S)
