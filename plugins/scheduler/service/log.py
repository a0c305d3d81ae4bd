"""The link between the scheduler and the replicated log: it proposes commands and applies what the log says to the
queue.

`behind` tells whether this copy may be missing what was already decided: true from the start of the agent until a
command of its own came back out of the log, and whenever the copy is older than `current_s`. What is read from an old
copy is still true about the past (this grant is over), so only starting something waits for a current one.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence

import msgspec

from covey.core.errors import NoLeader, OutcomeUnknown, Refused
from covey.core.ids import HostId
from covey.core.version import VERSION, text_of
from covey.ports.clock import Clock
from covey.wire.checked import OtherFormat, StateRefused
from plugins import facts
from plugins.base import Host
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.messages.commands import (
    COMMAND_BYTES_MAX,
    Applied,
    Attained,
    Command,
    HostForgotten,
    MalformedCommand,
    NewerCommand,
    NotApplied,
    Result,
    open_command,
    open_result,
    pack,
)
from plugins.scheduler.messages.releases import Needs, needed, not_yet

UPGRADE = "install that version here and start the agent again: it goes on where it was"
SHOWN_MAX = 5
"""The most hosts that an error names."""
RETRY_S = 0.5
"""Seconds to pause before something that must reach the log is proposed again."""


def _too_early(needs: Needs, older: Sequence[HostId]) -> NotApplied:
    """The answer to a command that hosts of an older release would not apply as it is meant."""
    shown = ", ".join(older[:SHOWN_MAX]) + (f" and {len(older) - SHOWN_MAX} more" if older[SHOWN_MAX:] else "")
    runs = "runs an older version, or does" if len(older) == 1 else "run older versions, or do"
    why = f"{needs.part} came with Covey {text_of(needs.release)}; {shown} {runs} not say which"
    return NotApplied(4, "the rack cannot do that yet", why, "upgrade these hosts first: agentctl version shows which")


class RackClock:
    """The rack's clock as this host reads it: seconds during which agents took part in this log, by clocks that do not
    step.

    Each command carries the proposer's reading; the log keeps the highest (`JobTable.rack_s`). Between commands every
    host counts on by its own monotonic clock. So people see one duration of a job on every host, and no clock that is
    set, forward or back, changes it. It stands still while no agent of the rack runs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said_s = 0.0
        self._at_s: float | None = None
        """When `_said_s` was read, on this host's clock; None: it was never asked for, and begins at the first
        question."""

    def now_s(self) -> float:
        now_s = self._clock.now_s()
        if self._at_s is None:
            self._at_s = now_s
        return self._said_s + max(0.0, now_s - self._at_s)

    def heard(self, said_s: float) -> None:
        """Catch up with the log's reading, if this host's clock is behind it."""
        if said_s > self.now_s():
            self._said_s, self._at_s = said_s, self._clock.now_s()


class QueueLog:
    """The scheduler's side of the log: it applies the log to the queue, and proposes."""

    def __init__(self, host: Host, queue: JobTable, current_s: float) -> None:
        self.host, self.queue, self.current_s = host, queue, current_s
        self.malformed = 0
        self.listeners: list[asyncio.Event] = []
        """Events that are set at every change of the queue."""
        self._barriers: dict[str, None] = {}
        """This host's own commands under way through the log; when one comes out, this copy is current."""
        self._caught_up = False
        self._names = itertools.count(1)
        self.rack_clock = RackClock(host.env.clock)
        host.log.bind(self._apply, queue.snapshot, self._restore)

    @property
    def behind(self) -> bool:
        return not self._caught_up or self.host.log.age_s > self.current_s

    def _apply(self, index: int, data: bytes) -> bytes:
        try:
            command = open_command(data)
        except NewerCommand as error:
            why = f"{error}; {VERSION} runs here, and would come to another state than the rack without it"
            raise OtherFormat("the log goes on with what this version does not know", why, UPGRADE) from error
        except MalformedCommand as error:
            self.malformed += 1
            return pack(NotApplied(2, "a command was not understood", str(error)[:500], "upgrade the older agents"))
        result, notes = apply(self.queue, index, command)
        self.rack_clock.heard(self.queue.rack_s)
        if isinstance(command, Attained) and command.barrier in self._barriers:
            del self._barriers[command.barrier]
            self._caught_up = True
        for note in notes:
            self.host.note(note.subject, note.event, note.reason, note.key)
        if isinstance(command, HostForgotten) and isinstance(result, Applied):
            self.host.publish(facts.HostNeverBack(command.host, self.queue.forgotten[command.host]))
        self.wake()
        return pack(result)

    def _restore(self, data: bytes) -> None:
        """Restore the queue from a snapshot. StateRefused: nothing of the snapshot is used."""
        try:
            self.queue.restore(data)
        except (ValueError, msgspec.DecodeError) as error:
            what, step = "the snapshot of the log cannot be used", "start the version of Covey that wrote it"
            raise StateRefused(what, str(error), step) from error
        self.rack_clock.heard(self.queue.rack_s)
        for host, boot in self.queue.forgotten.items():
            self.host.publish(facts.HostNeverBack(host, boot))
        self.wake()

    def wake(self) -> None:
        """Wake everything that waits for a change."""
        for event in self.listeners:
            event.set()

    async def propose(self, command: Command, timeout_s: float = 5.0) -> Result:
        """Propose `command`, stamped with the time now, and return what the log says to it. NoLeader,
        OutcomeUnknown."""
        wall_s, rack_s = max(0.0, self.host.env.clock.wall_s()), round(self.rack_clock.now_s(), 3)
        needs = needed(command)
        if needs is not None:
            older = not_yet(needs.release, self.host.hosts())
            if older:
                return _too_early(needs, older)
            command = msgspec.structs.replace(command, needs=text_of(needs.release))
        stamped = msgspec.structs.replace(command, wall_s=wall_s, rack_s=rack_s)
        data = pack(stamped)
        if len(data) > COMMAND_BYTES_MAX:
            why = f"it has {len(data)} bytes, and the log accepts at most {COMMAND_BYTES_MAX}"
            return NotApplied(4, f"{type(command).__name__} was not submitted to the log", why, "use fewer workers")
        return open_result(await self.host.log.propose(data, timeout_s))

    async def insist(self, command: Command) -> Result:
        """Propose until the log has answered. It is only for commands that mean the same when they come twice."""
        while True:
            try:
                return await self.propose(command)
            except (NoLeader, OutcomeUnknown) as error:
                self.host.env.log.debug("proposed again", command=type(command).__name__, why=str(error))
                await asyncio.sleep(RETRY_S)

    async def change(self, command: Command, what: str, tries: int = 3) -> Result:
        """Make a change that a person asked for, and return the log's yes. Refused when it said no, with 75 when there
        is no leader or the outcome is unknown."""
        for attempt in range(1, tries + 1):
            try:
                result = await self.propose(command)
            except NoLeader as error:
                why = str(error) or "this host knows no leader now"
                raise Refused(75, f"cannot {what}", why, "try again in a few seconds (agentctl status)") from error
            except OutcomeUnknown as error:
                if attempt == tries:
                    why = "the leader did not confirm it in time; it may still be applied"
                    raise Refused(
                        75, f"{what}: outcome unknown", why, "check with agentctl jobs, then repeat it"
                    ) from error
                await asyncio.sleep(RETRY_S)
                continue
            if isinstance(result, NotApplied):
                raise Refused(result.code, result.what, result.why, result.next)
            return result
        raise AssertionError("tries is at least 1")

    async def barrier(self) -> None:
        """Return once this copy holds everything that was decided before this call."""
        name = f"{self.host.id}.{self.host.boot}.{next(self._names)}"
        self._barriers[name] = None
        try:
            while name in self._barriers:
                await self.insist(Attained(wall_s=0.0, host=self.host.id, service_gpu_s={}, barrier=name))
                await self.until(lambda: name not in self._barriers, 5.0)
        finally:
            self._barriers.pop(name, None)

    async def until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Whether `holds()` became true in time; looked at after every change of the queue."""
        changed = asyncio.Event()
        self.listeners.append(changed)
        try:
            async with asyncio.timeout(timeout_s):
                while not holds():
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            return holds()
        finally:
            self.listeners.remove(changed)
        return True
