"""The vocabulary of every machine in Covey: messages, facts, and the actions common to all.

A machine is state plus `handle(event, now_s) -> Sequence[Action]`. It never reads a clock, draws a random
number or opens a socket: those come in as arguments, and it asks for effects by actions. The service
around it performs the actions; a finished action comes back as an event.
"""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from covey.core.ids import HostId

E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)
A_co = TypeVar("A_co", covariant=True)


class Message(msgspec.Struct, frozen=True, tag=True):
    """A message between two hosts. Subclasses (`frozen=True` again) are in a plugin's part `messages`."""


class Fact(msgspec.Struct, frozen=True):
    """What one plugin publishes to the others on its host, past tense (`JobStarted`). All receive facts in one
    order."""


class Heard(msgspec.Struct, frozen=True):
    """Event: a message arrived from an authenticated host."""

    sender: HostId
    message: Any


class Send(msgspec.Struct, frozen=True):
    """Action: deliver `message` to `to`, at least once until `deadline_s` has passed; handled at most once there."""

    to: HostId
    message: Message
    deadline_s: float = 10.0


class Undelivered(msgspec.Struct, frozen=True):
    """Event: `message` was not acknowledged before its deadline. It may or may not have been handled."""

    to: HostId
    message: Any


class SetTimer(msgspec.Struct, Generic[E], frozen=True):
    """Action: hand `event` back after `after_s` seconds. Timers are never cancelled: the event carries what makes it
    stale (an epoch, an incarnation), and the machine ignores a stale one."""

    after_s: float
    event: E


class Publish(msgspec.Struct, frozen=True):
    """Action: publish `fact` to the other plugins of this host."""

    fact: Fact


class LogEvent(msgspec.Struct, frozen=True):
    """Action: add a line to the event log of `subject` (job, `slab/VOLUME/N`, `volume/NAME`, host; `agentctl why`)."""

    subject: str
    event: str
    reason: str
    key: str = ""
    """Events of several hosts with the same key are one event (`log/57`); empty: only this host saw it."""


class Machine(Protocol[E_contra, A_co]):
    """A machine has state and `handle`, and nothing else."""

    def handle(self, event: E_contra, now_s: float) -> Sequence[A_co]: ...

    def check(self) -> None:
        """Raise AssertionError when an invariant of this machine does not hold."""
