"""How long a step of an elastic job takes before and after each change of it, whoever made the change.

    configuration 2, its steps are timed --JobDivided--> configuration 3 --every host timed enough steps--> "measured"
                                                                |
                                                                '--changed again before that--> "not measured"

Who made a change, and why, stands in the event log already: the log of the rack says that. Hosts report the steps of
all elastic jobs to the coordinator, as they do for its tuner, which compares predictions with the same figures.
"""

from collections.abc import Sequence
from typing import NamedTuple, assert_never

from covey.core.events import LogEvent
from covey.core.ids import HostId, JobId
from plugins.tuner.machine.figures import Figure, short
from plugins.tuner.machine.tuner import STEPS_MIN, HostMeasured, JobDivided


class UnmeasuredChange(NamedTuple):
    """A change whose steps are not measured yet."""

    config: int
    """The configuration that it made."""
    said: str
    """What changed, in words."""
    before: Figure | None
    """Seconds of a step before it; None: too few steps were timed."""


class JobChanges:
    """The changes of one job, as its coordinator sees them."""

    def __init__(self, job: JobId, now: JobDivided) -> None:
        self.job, self.now = job, now
        self.change: UnmeasuredChange | None = None
        self._forget()

    def handle(self, event: JobDivided | HostMeasured) -> Sequence[LogEvent]:
        match event:
            case JobDivided():
                return self._divided(event)
            case HostMeasured():
                return self._measured(event)
            case _:
                assert_never(event)

    def check(self) -> None:
        assert set(self.steps) <= set(self.reported) <= set(self.now.hosts), "who measured is there"
        assert self.change is None or self.change.config == self.now.config

    def _forget(self) -> None:
        self.step: Figure | None = None
        """Seconds of a step in this configuration."""
        self.steps: dict[HostId, int] = {}
        """Steps that each host timed, without those of its first report: the change is in it."""
        self.reported: dict[HostId, None] = {}
        """Hosts that have reported steps."""

    def _divided(self, event: JobDivided) -> Sequence[LogEvent]:
        before, is_known = self.now, self._is_known
        if event == before or (event.epoch, event.config) < (before.epoch, before.config):
            return []
        self.now = event
        if (event.epoch, event.config) == (before.epoch, before.config):
            return []
        last, step = self.change, self.step if is_known else None
        self._forget()
        self.change = None
        if event.epoch != before.epoch:
            return []
        self.change = UnmeasuredChange(event.config, _said(before, event), step)
        if last is None:
            return []
        why = f"the job was changed again before {STEPS_MIN} steps of each host were timed"
        return [self._note("not measured", f"{_named(last)}: {why}; {_before(last)}")]

    def _measured(self, event: HostMeasured) -> Sequence[LogEvent]:
        if (event.epoch, event.config) != (self.now.epoch, self.now.config) or event.host not in self.now.hosts:
            return []
        if event.steps <= 0 or event.step_s <= 0:
            return []
        if event.host not in self.reported:
            self.reported[event.host] = None
            return []
        self.steps[event.host] = self.steps.get(event.host, 0) + event.steps
        self.step = Figure(event.step_s) if self.step is None else self.step.with_measured(event.step_s)
        if self.change is None or not self._is_known:
            return []
        change, self.change = self.change, None
        return [self._note("measured", f"{_named(change)}: {short(self.step.mean)} a step measured; {_before(change)}")]

    @property
    def _is_known(self) -> bool:
        """Whether every host has timed enough steps in this configuration."""
        return all(self.steps.get(host, 0) >= STEPS_MIN for host in self.now.hosts)

    def _note(self, event: str, reason: str) -> LogEvent:
        return LogEvent(subject=self.job, event=event, reason=reason)


def _said(before: JobDivided, now: JobDivided) -> str:
    """What changed, in words: `from 4 to 7 processes`."""
    had, has = (sum(host.processes for host in each.hosts.values()) for each in (before, now))
    return f"from {had} to {has} processes" if had != has else f"{has} processes as before"


def _named(change: UnmeasuredChange) -> str:
    return f"configuration {change.config}, {change.said}"


def _before(change: UnmeasuredChange) -> str:
    return f"before {short(change.before.mean)}" if change.before is not None else "before: too few steps were timed"
