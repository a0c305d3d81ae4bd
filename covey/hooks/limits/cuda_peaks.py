"""Peaks of PyTorch's memory figures, as the script expects them. A rank that shares its GPU measures the peaks of each
mini-batch, for which the allocator's are reset; a script that asks for peaks gets those since it reset them itself."""

import functools
from collections.abc import Callable
from typing import Any

Stats = dict[str, Any]


class ScriptPeaks:
    """The peaks of a script. `memory` is `torch.cuda.memory`, whose functions that scripts call are replaced; `spaces`
    are modules that have them by name too (`torch.cuda`). `index` maps a device, as a caller names it, to its number;
    None: the current device."""

    def __init__(self, memory: Any, index: Callable[[Any], int]) -> None:
        self._index = index
        self._stats: Callable[..., Stats] = memory.memory_stats_as_nested_dict
        self._reset: Callable[..., None] = memory.reset_peak_memory_stats
        self._kept: dict[tuple[int, str, str], int] = {}

    def install(self, *spaces: Any) -> None:
        for space in spaces:
            space.memory_stats_as_nested_dict = functools.wraps(self._stats)(self.seen)
            space.reset_peak_memory_stats = functools.wraps(self._reset)(self.reset)

    # ---- ours ----

    def memory_stats_as_nested_dict(self) -> Stats:
        """The allocator's figures since the last mini-batch."""
        return self._stats()

    def reset_peak_memory_stats(self) -> None:
        """A mini-batch begins."""
        here = self._index(None)
        for name, kind, stat in _peaks(self._stats()):
            self._kept[here, name, kind] = max(stat["peak"], self._kept.get((here, name, kind), 0))
        self._reset()

    # ---- the script's ----

    def seen(self, device: Any = None) -> Stats:
        stats = self._stats(device)
        for name, kind, stat in _peaks(stats):
            stat["peak"] = max(stat["peak"], self._kept.get((self._index(device), name, kind), 0))
        return stats

    def reset(self, device: Any = None) -> None:
        here = self._index(device)
        self._kept = {key: peak for key, peak in self._kept.items() if key[0] != here}
        self._reset(device)


def _peaks(stats: Stats) -> list[tuple[str, str, Any]]:
    kinds = [(name, kinds) for name, kinds in stats.items() if isinstance(kinds, dict)]
    found = [(name, kind, stat) for name, each in kinds for kind, stat in each.items()]
    return [(name, kind, stat) for name, kind, stat in found if isinstance(stat, dict) and "peak" in stat]
