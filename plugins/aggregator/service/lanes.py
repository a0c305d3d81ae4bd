"""How many lanes the next `aggd` of this host gets."""

from covey.ports import Probes
from plugins.aggregator.policy.lanes import lanes_of


def lanes_here(asked: int, probes: Probes) -> int:
    """`asked`: by the settings. Cores that are devices are their ranks'."""
    devices = probes.devices.devices()
    taken = {core for device in devices for core in device.cores}
    return lanes_of(asked, probes.cores() - len(taken), sum(not device.cores for device in devices))
