"""The frames between an agent and the supervisors of its host's ranks, the files that both use, when ranks that were
asked to stop are killed, and the control socket: the process that listens there is the one supervisor of its epoch."""

import asyncio
import errno
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable

import msgspec

from covey.core.ids import JobId
from covey.ports.addresses import Address
from covey.ports.env import Env
from covey.ports.processes import Command, ProcessId
from covey.ports.streams import Accept
from covey.wire import checked
from covey.wire.frames import FRAME_BYTES_MAX, pack
from plugins.base import RankLease
from plugins.facts import StartFault

SIGTERM, SIGKILL = 15, 9
CANNOT_START = 127
"""Exit status of a rank whose command could not be started, as a shell reports it."""
DISK_RETRY_S = 1.0
READS_MAX = 5
HOST_ERRNOS = frozenset(
    (errno.EIO, errno.ENOSPC, errno.EROFS, errno.ENFILE, errno.EMFILE, errno.ESTALE, errno.ENODEV, errno.ENXIO)
)
"""Errors of a host, whatever is started there: its disk fails or is full, or it has no more of something."""
UNKNOWN = 255
"""Exit status of a rank whose real status is lost; the reason says so."""

JOINING_BYTES = FRAME_BYTES_MAX - 1024
"""The most bytes of ranks that join, in one frame."""

EXTENSION_MAX_S = 600.0
"""The most seconds that a job's ranks may ask for beyond their grace, once: the time to write a large checkpoint."""
INCARNATION = "COVEY_INCARNATION"


def fault_of(error: OSError) -> StartFault:
    """Whose fault it is that a program cannot start: the host's where no job is to blame for such an error."""
    return "host" if error.errno in HOST_ERRNOS else "job"


class RankStart(msgspec.Struct, frozen=True):
    rank: int
    command: Command


class SupervisorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a supervisor needs; it decides nothing about jobs."""

    job: JobId
    epoch: int
    ranks: tuple[RankStart, ...]
    grace_s: float
    stop_signal: int = SIGTERM
    """The number of the signal that asks ranks to end."""
    state: str
    """Disk name of the state file."""
    preempt: str
    """Disk name of the file that appears when the ranks are asked to stop (COVEY_PREEMPT_FILE)."""
    socket: str
    """Address of the control socket."""
    lease: RankLease | None = None
    """The first lease; None: no lease until the agent sends one."""
    joined: tuple[int, ...] = ()
    """Ranks that came from other hosts while others ran here: each is the successor of a process that is lost there."""
    spares: Address = ""
    """The address where processes wait to become ranks of this epoch, if any do (`agent.jobs.spares.spares`)."""
    changed: int = 0
    """How often the processes of an elastic job had changed here (`LeaveRanks.changed`)."""
    agent_uid: int = -1
    """The agent's user, who alone may ask the supervisor, which runs as another; -1: they run as the same."""

    @property
    def came(self) -> tuple[int, ...]:
        """Ranks whose first process here takes over from one on another host."""
        numbered = (start.rank for start in self.ranks if int(start.command.env.get(INCARNATION, "0")))
        return (*numbered, *self.joined)


class Ending(msgspec.Struct, frozen=True):
    """When ranks that were asked to stop are killed."""

    grace_s: float
    """The shortest grace that was asked for, seconds."""
    kill_at_s: float
    """When the ranks are killed, by `Clock.boot_s`."""
    extended: bool = False
    firm: bool = False
    """No rank may ask for more."""


class RankHealing(msgspec.Struct, frozen=True):
    """How the loss of a rank that may be lost is made good."""

    step: int
    """The step with which the rank's newest process that had the state began."""
    losses: int = 0
    """The number of processes that were lost since then."""
    incarnation: int = 0
    """The number of the rank's newest process."""
    has_had_state: bool = True
    """Whether a process of the rank had the state here; False: all of them took over, and none has said so yet."""


class SupervisorState(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor's state file: written before the first rank starts, then at every change."""

    pids: dict[int, ProcessId] = {}
    codes: dict[int, int] = {}
    """The exit codes of ranks, in the order in which they ended."""
    ended: bool = False
    """Whether all ranks ended and nothing of them is left."""
    reason: str = ""
    lost: bool = False
    """The ranks did not end by themselves: no supervisor saw their end (the machine restarted, or it was killed), or
    their lease ran out."""
    ending: Ending | None = None
    healing: dict[int, RankHealing] = {}
    """The ranks that may be lost, since the others have what a successor needs."""
    signalled: bool = False
    """Whether the stop signal went out: a supervisor that takes over does not send a second one, which may end a
    script that saves."""
    changed: int = 0
    """The newest `LeaveRanks` whose ranks have all ended, with all that they started."""
    leaving: tuple[ProcessId, ...] = ()
    """Processes of ranks that left, and that have not all ended yet: a supervisor that takes over kills them."""
    unstarted: StartFault = ""


class SupervisorFrame(msgspec.Struct, frozen=True, tag=True):
    """A frame on the supervisor's control socket."""


class RanksStatus(SupervisorFrame, frozen=True):
    """Supervisor -> agent: the state of its ranks."""

    job: JobId
    epoch: int
    state: SupervisorState


class StopRanks(SupervisorFrame, frozen=True):
    """Agent -> supervisor: the stop signal now, SIGKILL after `grace_s` seconds. A second one can only shorten the
    grace. `firm`: from now on no rank may ask for more."""

    grace_s: float
    why: str
    firm: bool = False


class Extend(SupervisorFrame, frozen=True):
    """Agent -> supervisor: a rank needs `seconds` more than its grace to save its work. It is granted once, while the
    ranks are stopping, and at most `EXTENSION_MAX_S`; the next Status has the result."""

    seconds: float


class Renewed(SupervisorFrame, frozen=True):
    """Agent -> supervisor: the leader confirmed these ranks. The lease with the newest `asked_s` counts."""

    lease: RankLease


class HealRank(SupervisorFrame, frozen=True):
    """Agent -> supervisor: this rank has the job's state at the beginning of `step`; if it is lost from then on, start
    it again alone."""

    rank: int
    step: int


class JoinRanks(SupervisorFrame, frozen=True):
    """Agent -> supervisor: these ranks come from another host, where they have ended, and run here from now on. It is
    repeated whenever the agent connects."""

    ranks: tuple[RankStart, ...]
    replaces: bool = False
    """Whether these commands replace those of ranks that run here already: for their successors."""


class LeaveRanks(SupervisorFrame, frozen=True):
    """Agent -> supervisor: other processes of the elastic job carry what these ranks carried. Each is killed with all
    that it started; it did not fail, stops no sibling, has no successor, and its exit code is not kept. It is repeated
    whenever the agent connects, after `JoinRanks`."""

    changed: int
    """How often the processes here have changed: of two frames the higher one is newer, and has all ranks that the
    state (`SupervisorState.changed`) does not show to be gone."""
    ranks: tuple[int, ...]


class KeepStacks(SupervisorFrame, frozen=True):
    """Agent -> supervisor: ranks that can are to write down where each of their threads is."""


class EndStuck(SupervisorFrame, frozen=True):
    """Agent -> supervisor: SIGKILL to this rank, if its newest process is `pid`: the others wait for it in vain."""

    rank: int
    pid: int
    why: str


class ForgetRanks(SupervisorFrame, frozen=True):
    """Agent -> supervisor: the state is not needed any more. The supervisor exits at once if all ranks ended."""


AboutRanks = HealRank | JoinRanks | LeaveRanks | KeepStacks | EndStuck
Frame = RanksStatus | StopRanks | Extend | Renewed | AboutRanks | ForgetRanks
decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
state_decoder: msgspec.msgpack.Decoder[SupervisorState] = msgspec.msgpack.Decoder(SupervisorState)


@runtime_checkable
class Adopting(Protocol):
    """Processes whose descendants can be adopted: the real ones. Simulated processes have no descendants."""

    def adopt(self) -> None: ...
    def ask_strays(self, number: int) -> int: ...
    async def end_strays(self, grace_s: float, timeout_s: float = 5.0) -> int: ...
    async def end_rest_of(self, process: ProcessId, timeout_s: float = 5.0) -> int: ...


@runtime_checkable
class Marked(Protocol):
    """Processes that can be found by what their environment holds."""

    async def end_holding(
        self, variables: Mapping[str, str], spare: Collection[ProcessId] = (), timeout_s: float = 5.0
    ) -> int: ...


MARKS = ("COVEY_JOB_ID", "COVEY_EPOCH", "COVEY_TOKEN")
"""Variables that only the ranks of one epoch, and what they start, hold together."""


def joining_frames(starts: Sequence[RankStart], replaces: bool = False) -> list[bytes]:
    """`JoinRanks` frames for all of these ranks, in as many frames as they need: each start has the whole environment
    of its rank."""
    frames: list[bytes] = []
    batch: list[RankStart] = []
    room = JOINING_BYTES
    for start in starts:
        size = len(msgspec.msgpack.encode(start))
        if batch and size > room:
            frames.append(pack(JoinRanks(tuple(batch), replaces)))
            batch, room = [], JOINING_BYTES
        batch.append(start)
        room -= size
    return [*frames, pack(JoinRanks(tuple(batch), replaces))]


async def end_marked(env: Env, variables: Mapping[str, str], spare: Collection[ProcessId] = ()) -> int:
    """Send SIGKILL to what is left of the ranks of an epoch, recorded or not, other than the ranks in `spare` and their
    descendants: a supervisor that was killed while it started a rank leaves one without a record. `variables`: those of
    any one rank. Returns how many processes there were."""
    marks = {name: variables[name] for name in MARKS if name in variables}
    if len(marks) < len(MARKS) or not isinstance(env.processes, Marked):
        return 0
    return await env.processes.end_holding(marks, spare)


async def stored_state(env: Env, name: str) -> bytes | None:
    """The state file that an earlier supervisor wrote; None: there is none. OSError when the disk keeps failing: then
    nothing may be started here."""
    for _ in range(READS_MAX - 1):
        try:
            return await env.disk.read(name)
        except OSError as error:
            env.log.error("state cannot be read", why=str(error))
            await asyncio.sleep(DISK_RETRY_S)
    return await env.disk.read(name)


def read_state(data: bytes | None) -> SupervisorState | None:
    """The state in a state file; None when it is absent, damaged or of another version."""
    if data is None:
        return None
    try:
        return checked.unseal(data, state_decoder)
    except (checked.Damaged, checked.OtherFormat):
        return None


def asked_to_end(known: Ending | None, grace_s: float, now_s: float, firm: bool) -> Ending:
    """The ending after one more request to stop; a repeated one with an equal grace changes nothing. `now_s`: of
    `Clock.boot_s`."""
    kill_at_s = now_s + max(0.0, grace_s)
    if known is None:
        return Ending(grace_s, kill_at_s, firm=firm)
    if grace_s < known.grace_s or firm > known.firm:
        least_s = min(kill_at_s, known.kill_at_s)
        return Ending(min(grace_s, known.grace_s), least_s, known.extended, firm or known.firm)
    return known


def extended(known: Ending | None, seconds: float, now_s: float) -> Ending | None:
    """The ending after a rank asked for `seconds` more; None: it may not have them."""
    if known is None or known.extended or known.firm or not known.kill_at_s > now_s or not seconds > 0:
        return None
    return Ending(known.grace_s, known.kill_at_s + min(seconds, EXTENSION_MAX_S), extended=True)


@asynccontextmanager
async def claimed_socket(env: Env, address: Address, accept: Accept, uid: int = -1) -> AsyncIterator[bool]:
    """Claim the socket: yields whether no other process had it before; it is held until the context ends. `uid`:
    who may connect, beside this process's own user."""
    try:
        listener = await env.bytes.listen(address, accept, uid)
    except OSError as error:
        env.log.info("another supervisor is running", why=str(error))
        yield False
        return
    try:
        yield True
    finally:
        await listener.close()
