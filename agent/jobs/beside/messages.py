"""What agents and sessions say to one another, and what agentctl is answered. Every field has its bounds."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from covey.core.events import Message
from covey.core.ids import ID_PATTERN, HostId, JobId
from covey.ports.addresses import Address
from covey.ports.processes import Command, ProcessId

OUTPUT_BYTES_MAX = 256 << 10
"""The most bytes of output that one turn brings, and that a session holds unread."""
INPUT_BYTES_MAX = 64 << 10
"""The most bytes of input that one turn brings, and that a session holds until its command reads them."""
WAIT_S_MAX = 10.0
"""The longest that a turn waits for output, seconds."""
ARGV_BYTES_MAX = 64 << 10
"""The most bytes of a command and its arguments."""
SESSION_PATTERN = r"^(?:ex|sh|to)-[a-z0-9.-]{1,80}\Z"
OUT, ERR, NOTICE = 1, 2, 3
"""Where bytes of a session belong: to its command's standard output, to its standard error, or to words of the session
itself for whoever looks."""

Offset = Annotated[int, Meta(ge=0, lt=1 << 62)]
Cells = Annotated[int, Meta(ge=0, le=65_535)]
Job = Annotated[JobId, Meta(pattern=ID_PATTERN, max_length=63)]
Epoch = Annotated[int, Meta(ge=0, lt=10**18)]
Rank = Annotated[int, Meta(ge=0, le=99_999)]
Session = Annotated[str, Meta(pattern=SESSION_PATTERN)]
Kind = Literal["exec", "shell", "port"]


class SessionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a session is started with."""

    command: Command
    """The command with its folder and environment; without arguments: the user's shell."""
    terminal: bool
    rows: int
    columns: int
    socket: Address
    agent_uid: int
    """The agent's user, where the session runs as another; -1: they run as the same."""
    ends_with: ProcessId | None
    """The process with which the session ends: the job's supervisor; None: it is not known."""
    kept_s: float
    """Seconds for which the command runs although nobody takes a turn."""
    idle_s: float
    """Seconds without input and output after which the command is ended; 0: never."""
    holds: ProcessId | None = None
    """The rank that is there for this session: it hears SIGUSR1 when the session begins, and SIGTERM when it ends."""


class SessionTurn(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn: all that one end of a stream says to the other."""

    looks: bool = False
    """Whether an agent only looks whether the session is there: that is no sign of whoever typed the command."""
    seen: Annotated[int, Meta(ge=-1, lt=1 << 62)] = -1
    """All output before this offset has arrived; -1: nothing is said of output, and none is wanted."""
    at: Offset = 0
    """The offset of the first byte of `data` in all of the input."""
    data: Annotated[bytes, Meta(max_length=INPUT_BYTES_MAX)] = b""
    ended: bool = False
    """Whether no input follows `data`."""
    rows: Cells = 0
    """The size of the terminal; 0: as before."""
    columns: Cells = 0
    signals: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """How often in all whoever typed the command has interrupted it."""
    leaves: bool = False
    """Whether whoever typed the command is going, and it is to end."""
    wait_s: Annotated[float, Meta(ge=0.0, le=WAIT_S_MAX)] = 0.0
    """How long to wait for output, or for room for the input."""


class Turned(Message, frozen=True, kw_only=True):
    """The answer to a turn."""

    at: int
    """The offset of the first byte of `parts` in all of the output."""
    parts: Annotated[tuple[tuple[int, bytes], ...], Meta(max_length=4096)] = ()
    """Output: where it belongs, and the bytes."""
    taken: int = 0
    """The offset up to which input was taken."""
    code: int | None = None
    """How the command ended, as a shell says it (128+N for signal N); None: it runs, or `parts` is not yet all."""
    attended: bool = False
    """Whether somebody has just taken a turn, or one waits."""
    turns: int = 0
    """The number of turns so far."""


class OpenSession(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agent -> agent of the rank's host: begin a session, or find the one of this name again."""

    job: Job
    rank: Rank
    kind: Kind
    session: Session
    """The name of the session; of a shell the first part of it: the shells of one user at one rank are numbered."""
    argv: Annotated[tuple[str, ...], Meta(max_length=4096)] = ()
    terminal: bool = False
    rows: Cells = 0
    columns: Cells = 0
    term: Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9._+-]*\Z")] = ""
    """The kind of terminal, as TERM says it."""
    holds_job: bool = False
    """Whether the job is there for this shell, and is to end with it."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """The port of the rank's host to which the stream goes."""


class TurnSession(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agent -> agent of the rank's host: a turn of a session."""

    job: Job
    epoch: Epoch
    session: Session
    turn: SessionTurn


class SessionOpened(Message, frozen=True, kw_only=True):
    """A session that runs."""

    job: JobId
    rank: int
    host: HostId
    epoch: int
    session: str
    again: bool = False
    """Whether it was found again: a shell whose terminal was lost."""
    at: int = 0
    """The offset of the first byte of output that is kept."""
    taken: int = 0
    """The offset up to which it had input."""
    kept_s: float = 0.0
    idle_s: float = 0.0


class RankStacksWanted(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agent -> agent of ranks: where are the threads of this job's ranks there?"""

    job: Job


class RankStacks(msgspec.Struct, frozen=True, kw_only=True):
    """Where the Python threads of one rank are."""

    rank: int
    host: HostId
    text: str = ""
    """The stacks of all threads, as faulthandler writes them; empty: there are none."""
    why: str = ""
    """Why there are none."""


class StacksHere(Message, frozen=True, kw_only=True):
    """The answer to `RankStacksWanted`: the ranks that run on that host."""

    ranks: tuple[RankStacks, ...]


turns: msgspec.msgpack.Decoder[SessionTurn] = msgspec.msgpack.Decoder(SessionTurn)
turned: msgspec.msgpack.Decoder[Turned] = msgspec.msgpack.Decoder(Turned)
