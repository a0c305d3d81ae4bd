"""Starts that fail on this host, one after another: then no other job is to come here before a person has looked.

    StartFailed --three in a row that differ--> HostLooked: CloseHost (every second until the log has it)
                --ranks run here--------------> none in a row
                --the host is closed----------> none in a row: once a person opens it again, three more close it

Failures differ by whose fault they are. One of the host counts once for its job. One of a job's command, or of
something of its user's, counts once for the user: a program that a thousand tasks name and that nobody has closes no
host, and programs of three users that are all gone close one (a file system that is not mounted). No more than half of
the hosts are closed that way: what fails on more of them is not the fault of one host, and a person is told instead.
"""

from collections.abc import Sequence
from typing import assert_never

import msgspec

from covey.core.ids import JobId
from plugins.facts import StartFault

IN_A_ROW = 3
"""Failed starts in a row, of three jobs or three users, that close a host."""


class StartFailed(msgspec.Struct, frozen=True):
    """Event: ranks of this job never ran here."""

    job: JobId
    user: str
    """Whose job it is; empty: of the agent's own user."""
    fault: StartFault
    why: str


class StartedWell(msgspec.Struct, frozen=True):
    """Event: all ranks of some job run here."""


class HostLooked(msgspec.Struct, frozen=True):
    """Event: a second passed, and this is how the rack is."""

    alive: int
    """Hosts that are alive, this one among them."""
    closed: int
    """Hosts that are drained or cordoned."""
    here: bool
    """Whether this host is among those."""


class CloseHost(msgspec.Struct, frozen=True):
    """Action: cordon this host, if as many hosts are closed as `closed` says."""

    why: str
    closed: int


class StayOpen(msgspec.Struct, frozen=True):
    """Action: say that this host is not cordoned, though starts fail."""

    why: str


Event = StartFailed | StartedWell | HostLooked
Action = CloseHost | StayOpen


class FailedStarts:
    """The failed starts of one host since ranks ran there last. An agent that restarts begins anew."""

    def __init__(self) -> None:
        self.row: dict[tuple[str, str], StartFailed] = {}
        """The newest failure of each job, or of each user, in the order in which they came."""
        self.stays_open = ""
        """Why starts fail and the host is not cordoned all the same, in words; empty: that is not so."""

    def handle(self, event: Event) -> Sequence[Action]:
        match event:
            case StartFailed():
                return self._failed(event)
            case StartedWell():
                self._begin_anew()
                return ()
            case HostLooked():
                return self._look(event)
            case _:
                assert_never(event)

    def _failed(self, event: StartFailed) -> Sequence[Action]:
        if event.fault:
            key = ("job", event.job) if event.fault == "host" else ("user", event.user)
            self.row.pop(key, None)
            self.row[key] = event
            while len(self.row) > IN_A_ROW:
                del self.row[next(iter(self.row))]
        return ()

    def _look(self, event: HostLooked) -> Sequence[Action]:
        if event.here:
            self._begin_anew()
        if len(self.row) < IN_A_ROW:
            return ()
        if 2 * (event.closed + 1) <= event.alive:
            return [CloseHost(self.why, event.closed)]
        before, self.stays_open = self.stays_open, f"{self.why}; not cordoned, since no more than half of the hosts are"
        return () if before else [StayOpen(self.stays_open)]

    def _begin_anew(self) -> None:
        self.row, self.stays_open = {}, ""

    @property
    def why(self) -> str:
        """The jobs that did not start in a row, and why the newest did not where the host failed it:
        `j4, j7, j9 did not start here: ...`. What a user's program is called is no other user's business."""
        failed = list(self.row.values())
        said = next((f": {each.why}" for each in failed[::-1] if each.fault == "host"), "")
        return f"{', '.join(each.job for each in failed)} did not start here{said}"
