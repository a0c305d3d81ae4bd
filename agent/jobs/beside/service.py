"""The agent's part of commands beside ranks: it finds the rank's host, begins sessions there, and hands on turns."""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from agent.jobs.beside.messages import (
    ARGV_BYTES_MAX,
    SESSION_PATTERN,
    OpenSession,
    RankStacks,
    RankStacksWanted,
    SessionConfig,
    SessionOpened,
    SessionTurn,
    StacksHere,
    Turned,
    TurnSession,
    turned,
)
from agent.jobs.beside.ports import PortStream, connected
from agent.jobs.beside.stacks import stacks_here
from agent.jobs.output import JobsSettings
from agent.jobs.runner import BesideRank, SupervisedRunner
from agent.jobs.whose import JobPaths, is_theirs, other_user, start_program
from covey.core.carried import TEXT, size
from covey.core.errors import Refused
from covey.core.events import Message
from covey.core.ids import HostId, JobId
from covey.core.units import parse_seconds
from covey.ports.env import Env
from covey.ports.processes import Command as RankCommand
from covey.wire.frames import FrameError, pack, read_frame
from plugins.askers import ASKER, asker_of
from plugins.base import Command, RanksSpec
from plugins.views import JobView

AGENT = "agent"
ASK_S = 12.0
"""Seconds in which the rank's host has to begin a session."""
START_S = 2.0
"""Seconds for which a rank is waited for that has just started."""
BOOT_S = 5.0
"""Seconds in which a session has to answer after its start."""
LOOK_S = 0.02
SHELL_WAIT_S = 2.0
"""The longest that a turn of a shell waits, seconds: it takes a little more to see that nobody is there."""
SESSIONS_MAX = 64
"""The most sessions on one host that an agent knows at a time; further ones are refused."""
STREAMS_MAX = 256
"""The most connections to ports of one host at a time."""
SHELLS_MAX = 8
"""The most shells of one user beside one rank."""
EXEC_KEPT_S = 30.0
"""Seconds for which a command runs on although whoever typed it does not answer."""
LEFT_OUT = ("COVEY_TOKEN", "COVEY_SOCKET", "COVEY_PREEMPT_FILE", "COVEY_SPARE", "COVEY_INCARNATION")
"""Variables of a rank that a command beside it does not have: it is no rank, and would be taken for it."""
_SESSION = re.compile(SESSION_PATTERN)
_WORD = re.compile(f"{TEXT}*", re.DOTALL)
T = TypeVar("T", bound=msgspec.Struct)
BesideAsks = OpenSession | TurnSession | RankStacksWanted
OPENED_BY = ("argv", "terminal", "rows", "columns", "term", "holds_job", "port")
"""The fields of `OpenSession` that a request may say."""
NEXT = "agentctl exec JOB -- COMMAND"


class SessionHost(Protocol):
    """What this file needs of the agent."""

    @property
    def id(self) -> HostId: ...
    @property
    def env(self) -> Env: ...
    @property
    def runner(self) -> SupervisedRunner: ...
    def plugin_commands(self) -> Mapping[str, Command]: ...
    async def ask(self, plugin: str, to: HostId, question: Message, deadline_s: float) -> msgspec.Struct: ...


class BesideSessions:
    """The sessions that this agent was asked for. `commands` are for people, `answer` is for other agents."""

    def __init__(self, agent: SessionHost, jobs_socket: str) -> None:
        self._agent, self._paths = agent, JobPaths(agent.env, jobs_socket)
        self._known: OrderedDict[str, RanksSpec] = OrderedDict()
        """The sessions that began on this host, oldest first."""
        self._ports: dict[str, PortStream] = {}
        """The connections to ports of this host."""

    def commands(self) -> Mapping[str, Command]:
        return {"agent.open_session": self._open, "agent.turn_session": self._turn, "agent.stacks": self._stacks}

    # ---- for people ----

    async def _open(self, given: Mapping[str, Any]) -> SessionOpened:
        asker = asker_of(given)
        job, rank = await self._job(given), given.get("rank", 0)
        what = f"there is no process beside {job.id}"
        if job.over or job.state != "running":
            step = f"agentctl why {job.id}"
            raise Refused(3 if job.over else 75, what, f"{job.id} is {job.state}: {job.reason}"[:400], step)
        here = {each: place.host for place in job.places for each in place.ranks}
        if isinstance(rank, bool) or not isinstance(rank, int) or rank not in here:
            ranks = sorted(here)
            why = f"{job.id} has ranks {ranks[0]} to {ranks[-1]}" if ranks else f"no rank of {job.id} runs now"
            raise Refused(3, f"there is no rank {str(rank)[:20]}", why, f"agentctl job {job.id}")
        kind = given.get("kind", "exec")
        begins = {"shell": "sh", "port": "to"}.get(kind, "ex") if isinstance(kind, str) else "ex"
        name = f"{rank}-{asker.uid if asker.uid >= 0 else 'x'}" if kind == "shell" else self._agent.env.entropy(6).hex()
        fields = {each: given[each] for each in OPENED_BY if each in given}
        wanted = {**fields, "job": job.id, "rank": rank, "kind": kind, "session": f"{begins}-{name}"}
        question = _read(wanted, OpenSession)
        _refuse_command(question)
        opened = await self._at(here[rank], question, ASK_S)
        if not isinstance(opened, SessionOpened):
            raise _unexpected(here[rank])
        return opened

    async def _job(self, given: Mapping[str, Any]) -> JobView:
        command = self._agent.plugin_commands().get("scheduler.job")
        if command is None:
            raise Refused(1, "the job is not known here", "the plugin `scheduler` is off", "agentctl status")
        found = await command({"id": given.get("id", ""), ASKER: given[ASKER]})
        assert isinstance(found, JobView)
        return found

    async def _turn(self, given: Mapping[str, Any]) -> Turned:
        asked = {name: value for name, value in given.items() if name not in (ASKER, "id", "host", "epoch", "session")}
        asked["looks"] = False
        turn = _read(asked, SessionTurn)
        about = {"job": given.get("id", ""), **{each: given.get(each, "") for each in ("epoch", "session")}}
        question = _read({**about, "turn": {}}, TurnSession)
        host = given.get("host", "")
        question = msgspec.structs.replace(question, turn=turn)
        answer = await self._at(HostId(str(host)[:63]), question, turn.wait_s + ASK_S)
        if not isinstance(answer, Turned):
            raise _unexpected(HostId(str(host)[:63]))
        return answer

    async def _stacks(self, given: Mapping[str, Any]) -> list[RankStacks]:
        """The stacks of all ranks of a job, or why there are none."""
        job = await self._job(given)
        if job.state not in ("running", "stopping"):
            why = f"{job.id} is {job.state}: {job.reason}"[:400]
            raise Refused(3 if job.over else 75, f"no rank of {job.id} runs", why, f"agentctl why {job.id}")
        asked = [self._stacks_of(place.host, place.ranks, RankStacksWanted(job=job.id)) for place in job.places]
        found = [each for some in await asyncio.gather(*asked) for each in some]
        return sorted(found, key=lambda each: each.rank)

    async def _stacks_of(self, host: HostId, ranks: Sequence[int], question: RankStacksWanted) -> list[RankStacks]:
        why = "it does not run there now"
        try:
            answer = await self._at(host, question, ASK_S)
            found = {each.rank: each for each in answer.ranks} if isinstance(answer, StacksHere) else {}
        except Refused as no:
            why, found = f"{no.what}: {no.why}", {}
        return [found.get(rank) or RankStacks(rank=rank, host=host, why=why) for rank in ranks]

    async def _at(self, host: HostId, question: BesideAsks, deadline_s: float) -> msgspec.Struct:
        if host == self._agent.id:
            return await self.answer(question)
        try:
            return await self._agent.ask(AGENT, host, question, deadline_s)
        except TimeoutError:
            what = f"{host} does not answer"
            raise Refused(75, what, f"no answer within {deadline_s:g} s", "agentctl hosts") from None

    # ---- for other agents ----

    async def answer(self, question: BesideAsks) -> SessionOpened | Turned | StacksHere:
        """Answer another agent, which has made sure that whoever asks may act on the job. Refused says why not."""
        if isinstance(question, RankStacksWanted):
            await self._rank(question.job, None)
            return StacksHere(ranks=tuple(await stacks_here(self._agent.env, self._agent.runner, question.job)))
        if isinstance(question, TurnSession):
            return await self._hand_on(question)
        found = await self._rank(question.job, question.rank)
        what = f"no command can run beside rank {question.rank} of {question.job}"
        if found is None:
            why = f"the rank does not run on {self._agent.id} now"
            raise Refused(75, what, why, f"agentctl job {question.job}")
        spec = found.spec
        if question.kind == "port":
            return await self._open_port(question, found)
        settings = self._agent.runner.settings
        kept_s, idle_s = _times(question, settings)
        session, again = await self._free_name(question, spec)
        opened = SessionOpened(
            job=question.job, rank=question.rank, host=self._agent.id, epoch=spec.epoch, session=session
        )
        opened = msgspec.structs.replace(opened, kept_s=kept_s, idle_s=idle_s)
        if again is not None:
            return msgspec.structs.replace(opened, again=question.kind == "shell", at=again.at, taken=again.taken)
        if len(self._known) >= SESSIONS_MAX:
            await self._forget_ended()
        if len(self._known) >= SESSIONS_MAX:
            why = f"{SESSIONS_MAX} sessions run on {self._agent.id}, the limit"
            raise Refused(75, what, why, "end one of them, and try again")
        config = SessionConfig(
            command=_beside(found.command, question),
            terminal=question.terminal,
            rows=question.rows,
            columns=question.columns,
            socket=self._paths.socket(spec, session),
            agent_uid=self._paths.agent_uid(spec),
            ends_with=found.supervisor or found.process,
            holds=found.process if question.holds_job else None,
            kept_s=kept_s,
            idle_s=idle_s,
        )
        self._known[session] = spec
        try:
            await start_program(self._agent.env, spec, "beside", f"beside-{session}", config)
            await self._until_it_answers(spec, session)
        except OSError as error:
            self._known.pop(session, None)
            raise Refused(1, what, str(error), f"agentctl why {question.job}") from error
        return opened

    async def _rank(self, job: JobId, rank: int | None) -> BesideRank | None:
        """A rank of the job that runs here; `rank`: which, None: any. One that has just started is waited for: its
        supervisor is about to say that it runs."""
        clock, runner = self._agent.env.clock, self._agent.runner
        end_s = clock.now_s() + START_S
        while True:
            found = runner.beside(job, rank)
            if found is not None or clock.now_s() > end_s:
                return found
            await asyncio.sleep(LOOK_S)

    async def _open_port(self, question: OpenSession, found: BesideRank) -> SessionOpened:
        """A connection to a port of this host where the job's user listens."""
        for session, known in list(self._ports.items()):
            if known.is_over:
                known.close()
                del self._ports[session]
        what = f"port {question.port} of {self._agent.id} cannot be reached"
        if len(self._ports) >= STREAMS_MAX:
            raise Refused(75, what, f"{STREAMS_MAX} connections are open here, the limit", "close some of them")
        user = other_user(self._agent.env, found.spec)
        uid = self._agent.env.users.own_uid if user is None else user.uid
        stream = await connected(self._agent.env, question.port, uid)
        name = f"to-{_short(found.spec)}-{question.session[3:]}"
        self._ports[name] = stream
        where = {"job": question.job, "rank": question.rank, "host": self._agent.id}
        return SessionOpened(**where, epoch=found.spec.epoch, session=name)  # type: ignore[arg-type]

    async def _free_name(self, question: OpenSession, spec: RanksSpec) -> tuple[str, Turned | None]:
        """The name of the session to begin; or the one to find again, and where its bytes are."""
        base = f"{question.session[:3]}{_short(spec)}-{question.session[3:]}"
        if question.kind != "shell":
            return base, await self._look(spec, base)
        for number in range(SHELLS_MAX):
            session = f"{base}-{number}"
            found = await self._look(spec, session)
            if found is None or not await self._is_attended(spec, session, found):
                return session, found
        what = f"no further shell beside rank {question.rank} of {question.job}"
        raise Refused(4, what, f"{SHELLS_MAX} shells of the same user run there", "leave one of them")

    async def _is_attended(self, spec: RanksSpec, session: str, found: Turned) -> bool:
        """Whether somebody looks at a shell. A turn of a terminal that was lost may still wait for its answer, so a
        second one has to come."""
        if not found.attended:
            return False
        await asyncio.sleep(SHELL_WAIT_S + 0.5)
        later = await self._look(spec, session)
        return later is not None and later.turns != found.turns

    async def _look(self, spec: RanksSpec, session: str) -> Turned | None:
        """Where the bytes of a session are; None: none of this name runs."""
        try:
            return await self._exchange(spec, session, SessionTurn(looks=True))
        except ConnectionError:
            return None

    async def _until_it_answers(self, spec: RanksSpec, session: str) -> None:
        clock = self._agent.env.clock
        end_s = clock.now_s() + BOOT_S
        while await self._look(spec, session) is None:
            if clock.now_s() > end_s:
                raise OSError(f"its process did not answer within {BOOT_S:g} s")
            await asyncio.sleep(LOOK_S)

    async def _hand_on(self, question: TurnSession) -> Turned:
        if (port := self._ports.get(question.session)) is not None and _is_about(question):
            return await port.conversation.turn(question.turn)
        spec = self._known.get(question.session) or self._agent.runner.spec(question.job, question.epoch)
        why = f"it does not run on {self._agent.id}"
        gone = Refused(3, "the session has ended", why, f"agentctl job {question.job}")
        if spec is None or not _is_about(question):
            raise gone
        try:
            return await self._exchange(spec, question.session, question.turn)
        except FrameError as error:
            raise Refused(1, "the session answers nonsense", str(error), "upgrade the agent of that host") from error
        except ConnectionError:
            self._known.pop(question.session, None)
            raise gone from None

    async def _exchange(self, spec: RanksSpec, session: str, turn: SessionTurn) -> Turned:
        """One turn of a session here. ConnectionError: it has ended, or what answers there is not the job's user's."""
        stream = await self._agent.env.bytes.connect(self._paths.socket(spec, session))
        try:
            if not is_theirs(self._agent.env, spec, stream):
                raise ConnectionError("the socket is not the job's user's")
            await stream.write(pack(turn))
            return await read_frame(stream, turned)
        finally:
            stream.close()

    async def _forget_ended(self) -> None:
        for session, spec in list(self._known.items()):
            if await self._look(spec, session) is None:
                self._known.pop(session, None)


def _beside(rank: RankCommand, question: OpenSession) -> RankCommand:
    """The command beside a rank. Of a rank in a container it enters that one, which is named after what the rank
    has."""
    inside = rank.container and msgspec.structs.replace(rank.container, hides=LEFT_OUT)
    env = {name: value for name, value in rank.env.items() if inside or name not in LEFT_OUT}
    env |= {"TERM": question.term or "dumb"} if question.terminal else {}
    return msgspec.structs.replace(rank, argv=question.argv, env=env, run="", container=inside)


def _short(spec: RanksSpec) -> str:
    """The job and its epoch, in the name of a session: the sockets of all of the agent's own jobs are in one folder."""
    return f"{spec.job}-{spec.epoch}"


def _is_about(question: TurnSession) -> bool:
    """Whether the session that a turn names is one of the job that it names: who may act on that one was asked."""
    return question.session[3:].startswith(f"{question.job}-{question.epoch}-")


def _times(question: OpenSession, settings: JobsSettings) -> tuple[float, float]:
    """For how long a session runs on alone, and until it is idle for too long, seconds."""
    if question.kind != "shell":
        return EXEC_KEPT_S, 0.0
    return parse_seconds(settings.shell_kept), parse_seconds(settings.shell_idle)


def _refuse_command(question: OpenSession) -> None:
    """Refused: what was asked for is no command that Linux could run."""
    what = "this command cannot be run"
    if question.kind == "exec" and not (question.argv and question.argv[0]):
        raise Refused(2, what, "no command is named", NEXT)
    if any(not _WORD.fullmatch(word) for word in question.argv):
        raise Refused(2, what, "an argument holds a NUL byte or half a character", NEXT)
    if sum(size(word) + 1 for word in question.argv) > ARGV_BYTES_MAX:
        why = f"its arguments have more than {ARGV_BYTES_MAX >> 10} KiB"
        raise Refused(2, what, why, "put long content into a file, and name the file")


def _read(given: Mapping[str, Any], kind: type[T]) -> T:
    """The message that a request says. Refused names what is wrong in it."""
    try:
        return msgspec.convert(dict(given), kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise Refused(2, "invalid request", str(error)[:300], NEXT) from error


def _unexpected(host: HostId) -> Refused:
    return Refused(1, f"{host} gave an unexpected answer", "it may run another version", "agentctl version")
