"""The number of lanes of this host's next `aggd`."""

from covey.ports.probes import Probes
from plugins.aggregator.policy.lanes import lanes_of


def lanes_here(asked: int, probes: Probes) -> int:
    """Number of lanes; `asked`: by the settings. Cores that are devices belong to their ranks."""
    devices = probes.devices.devices()
    taken = {core for device in devices for core in device.cores}
    return lanes_of(asked, probes.cores() - len(taken), sum(not device.cores for device in devices))
