"""One host's load: smoothed, shown when it moved by a step, and logged when the host turns busy or calm.

calm --above busy_above--> busy --below calm_below--> calm
"""

from collections.abc import Sequence
from typing import assert_never

import msgspec

from covey.core.events import LogEvent
from covey.core.ids import HostId
from examples.plugin.load.policy import STEP, LoadSettings, smoothed


class LoadMeasured(msgspec.Struct, frozen=True):
    """Event, once a second: the load now, 0..1."""

    load: float


class ShowLoad(msgspec.Struct, frozen=True):
    """Action: gossip this load."""

    load: float


Event = LoadMeasured
Action = ShowLoad | LogEvent


class LoadMachine:
    """State and `handle`: the machine measures nothing and sends nothing."""

    def __init__(self, me: HostId, settings: LoadSettings) -> None:
        self.me = me
        self.settings = settings
        self.load: float | None = None
        """Smoothed load, 0..1; None before the first measurement."""
        self.shown: float | None = None
        """Load that others were told last; None before that."""
        self.busy = False

    def handle(self, event: Event, now_s: float) -> Sequence[Action]:
        match event:
            case LoadMeasured():
                self.load = smoothed(self.load, event.load)
                return [*self._show(self.load), *self._turn(self.load)]
            case _:
                assert_never(event)

    def check(self) -> None:
        assert self.load is None or 0 <= self.load <= 1, self.load
        assert (self.load is None) == (self.shown is None)
        assert self.load is None or self.shown is None or abs(self.load - self.shown) < STEP

    def _show(self, load: float) -> Sequence[Action]:
        if self.shown is not None and abs(load - self.shown) < STEP:
            return []
        self.shown = load
        return [ShowLoad(load)]

    def _turn(self, load: float) -> Sequence[Action]:
        """Turn busy or calm by two thresholds: between them a host keeps its state."""
        busy = load > self.settings.busy_above or (self.busy and load >= self.settings.calm_below)
        if busy == self.busy:
            return []
        self.busy = busy
        return [LogEvent(f"host/{self.me}", "busy" if busy else "calm", f"its load is {load:.0%}")]
