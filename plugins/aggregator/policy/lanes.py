"""How many additions an aggregator does at a time (ours; AutoPS plans with one core for an aggregator, 4.3.3.2)."""

LANES_MAX = 8
"""Most lanes without a setting: one process reads and writes for all of them, and keeps no more busy."""
CORES_OF_A_DEVICE = 4
"""Cores of the host that a rank uses beside its GPU: its script, what loads its input; ours."""
OWN_CORES = 1
"""Cores for the process that reads and writes, and for the agent."""


def lanes_of(asked: int, cores: int, devices: int) -> int:
    """Number of lanes. `asked`: by the settings, 0 for half of the cores that nothing else needs; at least 1, which is
    no process of its own."""
    if asked:
        return asked
    spare = cores - CORES_OF_A_DEVICE * devices - OWN_CORES
    return max(1, min(LANES_MAX, spare // 2))
