"""What load is, and which hosts look calmest. Arguments in, answer out: no clock, no sockets, no state."""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from covey.core.ids import HostId

SMOOTHING = 0.3
"""Weight of the newest measurement, 0..1: what lasts for two seconds shows at half its size."""
STEP = 0.05
"""Least change of the load that is gossiped."""
ASKED = 2
"""Number of hosts that are asked live: gossip is seconds old, and of two that look calm one is."""


class LoadSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of [load] in agent.toml."""

    busy_above: float = 0.9
    """Load, 0..1, above which a host is busy."""
    calm_below: float = 0.7
    """Load below which a busy host is calm again; lower than `busy_above`, or one at the edge would say so all day."""

    def __post_init__(self) -> None:
        if not 0 < self.calm_below < self.busy_above <= 1:
            why = f"calm_below = {self.calm_below:g}, busy_above = {self.busy_above:g}"
            raise ValueError(f"{why}: expected 0 < calm_below < busy_above <= 1")


def load_of(utilizations: Sequence[float], memory_used: float) -> float:
    """The busier of GPUs (their mean, each 0..1) and memory (used part, 0..1), 0..1. No GPU: memory alone."""
    gpus = sum(utilizations) / len(utilizations) if utilizations else 0.0
    return min(1.0, max(0.0, gpus, memory_used))


def smoothed(old: float | None, measured: float) -> float:
    """The exponential mean after one more second; the first measurement counts whole."""
    return measured if old is None else old + SMOOTHING * (measured - old)


def calmest_by_hint(hints: Mapping[HostId, float], count: int = ASKED) -> list[HostId]:
    """Up to `count` hosts, calmest first; equals by name, so that every host answers alike."""
    return sorted(hints, key=lambda host: (hints[host], host))[:count]


def calmest(answers: Collection[tuple[HostId, float]]) -> HostId | None:
    """The calmest of the hosts that answered, or None when none did."""
    return min(answers, key=lambda answer: (answer[1], answer[0]), default=(None, 0.0))[0]
