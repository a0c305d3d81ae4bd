"""The unix socket `jobs.sock`, over which processes on this host talk to their agent (frames: `covey.wire.job`).

    process --Join--> [token of the epoch, or a tool's uid] --Joined--> frames both ways until one side closes

A rank proves with its token that the runner started it under an epoch that still runs here; a tool outside any job is
known by its uid, which the kernel reports. `Stepped` becomes the fact `StepTimed`; `ExtendGrace` goes to the runner,
whose answer `Stopping` goes to every rank that is asked to end; every other frame goes to the plugin that handles it,
one at a time per process, so a process that asks faster than its plugin answers waits in its own socket.
Frames to a process wait in a bounded outbox: a process that does not read is disconnected, and may join again. A
malformed frame is counted and ends that connection only; a process that repeats it is refused for a time
(`agent.ports.network.protocol_error_limit`).
"""

import asyncio
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from agent.jobs.socket import memory_reports
from agent.jobs.socket.connected import ConnectedProcess, plain
from agent.jobs.socket.counted import CountedProcesses
from agent.jobs.socket.tensor_memories import TensorMemories
from agent.jobs.successors import NEVER
from agent.jobs.whose import RANKS_SOCKET
from agent.metrics import JOB_FRAMES, JOB_PROCESSES
from agent.ports.network.protocol_error_limit import ProtocolErrorLimit
from covey.core.errors import Refused
from covey.core.events import Fact
from covey.core.ids import JobId
from covey.core.metrics import MetricSeries
from covey.core.version import VERSION
from covey.hooks.warm import MODULES_MAX
from covey.ports.env import Env
from covey.ports.processes import ProcessId
from covey.ports.streams import ANYBODY, ByteStream, Listener
from covey.tensors.numbers.blocks import TABLES_MAX
from covey.wire.frames import FrameError, pack, read_frame
from covey.wire.handshake import is_secret
from covey.wire.job import (
    MEMORY_S,
    PROTOCOL,
    SAVED_PATH_MAX,
    AskPages,
    AskSave,
    Carries,
    CheckpointSaved,
    ExtendGrace,
    Frame,
    Heals,
    Heartbeat,
    Hooked,
    HostMemory,
    InVain,
    Join,
    Joined,
    MemoryHeld,
    NeighbourFlag,
    NoTensorMemory,
    PagesHere,
    PagesMapped,
    ProcessLeaves,
    RanksHaveLeft,
    Refusal,
    SaveIs,
    Stepped,
    Stopping,
    SumsOrder,
    TableWanted,
    TensorMemoryHere,
    TensorsShared,
    TurnsHere,
    VolumeWanted,
    decoder,
    heartbeat_s,
    other_protocol,
)
from plugins.base import JobPeer, RanksSpec
from plugins.facts import (
    HeartbeatHeard,
    JobHooked,
    JobJoined,
    JobSaved,
    MemoryMeasured,
    RankDisconnected,
    RankLeavesHere,
    RankShares,
    RankWaitsInVain,
    SavedAt,
    StepTimed,
    TableUsed,
    TensorsSeen,
)

JOIN_S = 5.0
"""Seconds after connecting at which a process that has not joined is cut off."""
PEERS_MAX = 1024
OF_USER_MAX = 256
"""The most connections of one other user."""
METRICS_MAX = 16
METRIC_NAME_MAX = 64
BOUNDARY_MAX = 32
BY_SCRIPT = Stepped(0, 0.0).boundary
HOOKED_MAX, PROBLEM_MAX, IN_VAIN_MAX = 160, 400, 800
STEP_MAX = 1 << 53
SECONDS_MAX = 1e9
SAVED_S_MAX = 1e12
MODULE = re.compile(r"^[A-Za-z_][A-Za-z0-9_.]{0,199}$")
FROM_AGENTS = (
    Join,
    Joined,
    Stopping,
    PagesHere,
    TensorMemoryHere,
    NeighbourFlag,
    RanksHaveLeft,
    SumsOrder,
    Carries,
    TurnsHere,
    HostMemory,
    AskSave,
)
"""Frames that no process sends once it has joined: they are the agent's, or for joining."""
LEFT_S = 0.5
"""Seconds after which a process that has left is looked at again."""
JOINS_WITHIN_S = 30.0
"""Seconds within which a process that was started since joins, if it takes the place of one that has left."""
FRAMES_AT_ONCE = 32
"""The number of frames in a row after which the loop gets its turn, however many more are waiting."""


class Tokens(Protocol):
    """The part of the runner that the socket needs."""

    def token(self, job: JobId, epoch: int) -> str | None: ...
    def spec(self, job: JobId, epoch: int) -> RanksSpec | None: ...
    def runs_as(self, spec: RanksSpec) -> int: ...
    def other_uids(self) -> set[int]: ...
    def stopping(self, job: JobId, epoch: int) -> Stopping | None: ...
    def joins(self, job: JobId, epoch: int, rank: int) -> None: ...
    def leaves(self, job: JobId, epoch: int, rank: int) -> None: ...
    def tree(self, job: JobId, epoch: int, rank: int) -> frozenset[ProcessId]: ...
    async def gives_up(self, job: JobId, epoch: int, rank: int) -> None: ...
    async def extend(self, job: JobId, epoch: int, seconds: float) -> None: ...
    async def heals(
        self, job: JobId, epoch: int, rank: int, step: int, pid: int = 0, modules: tuple[str, ...] = ()
    ) -> None: ...


class JobSocket:
    """The server of `jobs.sock`. It listens from `start` to `stop`."""

    def __init__(
        self,
        env: Env,
        runner: Tokens,
        tell: Callable[[Fact], None],
        deliver: Callable[[JobPeer, Frame], Awaitable[None]],
    ) -> None:
        self._env, self._runner, self._tell, self._deliver = env, runner, tell, deliver
        self._listener: Listener | None = None
        self._for_users: Listener | None = None
        self._opening = asyncio.Lock()
        self._of_users: Counter[int] = Counter()
        """Connections of each other user."""
        self._joined: list[ConnectedProcess] = []
        self._counted = CountedProcesses()
        self._memories = TensorMemories(env.pages, self._no_memory)
        self.counters = dict.fromkeys(
            ("joined", "refused", "malformed", "steps", "steps_of_others", "metrics_dropped", "shut_out", "strangers"),
            0,
        )
        self._offences = ProtocolErrorLimit()

    async def start(self) -> None:
        """Listen. OSError when another agent listens there."""
        self._listener = await self._env.bytes.listen(f"unix:{self._env.run_dir}/jobs.sock", self._serve)

    async def let_users_in(self) -> None:
        """Listen for ranks of other users, too. Idempotent. Where that fails such ranks run without their agent."""
        address = f"unix:{self._env.run_dir}/{RANKS_SOCKET}"
        async with self._opening:
            if self._for_users is None:
                try:
                    self._for_users = await self._env.bytes.listen(address, self._serve_user, ANYBODY)
                except OSError as error:
                    self._env.log.error("ranks of other users cannot join", address=address, why=str(error))

    async def stop(self) -> None:
        listeners = self._listener, self._for_users
        self._listener = self._for_users = None
        for listener in listeners:
            if listener is not None:
                await listener.close()

    def peers(self, job: JobId) -> Sequence[ConnectedProcess]:
        """The joined processes of a job, by rank, then by time of joining."""
        return sorted((peer for peer in self._joined if peer.job == job), key=lambda peer: peer.rank)

    def facts(self) -> Sequence[Fact]:
        """The facts that every rank that is joined now said of itself, for a plugin that started later."""
        found: list[Fact] = []
        for peer in self._joined:
            if peer.job is not None:
                found.append(JobJoined(peer.job, peer.epoch, peer.rank, peer.kernel))
                found += [TableUsed(peer.job, peer.epoch, table) for table in sorted(peer.tables)]
                if peer.pages is not None and peer.pages.mapped:
                    found.append(RankShares(peer.job, peer.epoch, peer.rank))
                if peer.saved is not None:
                    found.append(JobSaved(peer.job, peer.epoch, peer.rank, peer.saved))
                if peer.hooked is not None:
                    found.append(JobHooked(peer.job, peer.epoch, peer.rank, *peer.hooked))
        return found

    def say_stopping(self, job: JobId, epoch: int) -> None:
        """Send `Stopping` to the ranks of this epoch: they were asked to end, or got more time."""
        stopping = self._runner.stopping(job, epoch)
        for peer in self.peers(job) if stopping is not None else ():
            if peer.epoch == epoch and stopping is not None:
                peer.send(stopping)

    def say_carries(self, job: JobId, epoch: int) -> None:
        """Send `Carries` to the processes of this epoch, if its job is elastic: they carry other ranks now."""
        for peer in self.peers(job):
            if peer.epoch == epoch and (carries := self._carries(peer)) is not None:
                peer.send(carries)

    def _carries(self, peer: ConnectedProcess) -> Carries | None:
        """What the process carries; None: it is none of an elastic job, or its rank has left this host."""
        spec = self._runner.spec(peer.job, peer.epoch) if peer.job is not None else None
        if spec is None or peer.rank not in (rank.rank for rank in spec.ranks) or not spec.carried:
            return None
        return Carries(spec.config, spec.carried, spec.came)

    def metrics(self) -> Mapping[MetricSeries, float]:
        counted = {JOB_FRAMES.of(kind): float(count) for kind, count in self.counters.items()}
        return {**counted, JOB_PROCESSES.of(): float(len(self._joined))}

    # ---- one connection ----

    async def _serve_user(self, stream: ByteStream) -> None:
        """Serve a process of a user who has ranks here. Others get no answer: anybody may connect."""
        uid = stream.uid
        if uid not in self._runner.other_uids() or self._of_users[uid] >= OF_USER_MAX:
            self.counters["strangers"] += 1
            return
        self._of_users[uid] += 1
        try:
            await self._serve(stream, is_users=True)
        finally:
            self._of_users[uid] -= 1

    async def _serve(self, stream: ByteStream, is_users: bool = False) -> None:
        """Serve a connection. `is_users`: it came where ranks of other users do, and nobody else may."""
        if self._offences.shut_out(stream.peer, self._env.clock.now_s()):
            self.counters["shut_out"] += 1
            return
        try:
            async with asyncio.timeout(JOIN_S):
                first = await read_frame(stream, decoder)
            peer = self._admit(first, stream, is_users)
            await stream.write(pack(self._welcome(peer)))
        except Refused as refused:
            self.counters["refused"] += 1
            await stream.write(pack(Refusal(refused.what, refused.why, refused.next)))
        except FrameError as error:
            self._malformed(stream, error)
        except TimeoutError:
            self.counters["refused"] += 1
        else:
            await self._live(peer, stream)

    def _admit(self, first: Frame, stream: ByteStream, is_users: bool = False) -> ConnectedProcess:
        if not isinstance(first, Join):
            raise FrameError(f"{type(first).__name__} before Join")
        what = "cannot join" if first.job is None else f"rank {first.rank} cannot join job {first.job}"
        if (other := other_protocol(what, "covey-job", first)) is not None:
            raise Refused(4, other.what, other.why, other.next)
        if stream.uid < 0:
            why = "the kernel of this host does not tell the user of this process"
            raise Refused(4, what, why, "run it under the agent's own user, outside of user namespaces")
        if len(self._joined) >= PEERS_MAX:
            why = f"{PEERS_MAX} processes, the limit, have joined on {self._env.host}"
            raise Refused(4, "cannot join", why, "close the ones that are not needed and try again")
        if first.job is not None:
            self._check_rank(first, first.job, stream.uid, is_users)
        return ConnectedProcess(first, stream.uid, stream, is_users)

    def _check_rank(self, join: Join, job: JobId, uid: int, is_users: bool) -> None:
        what = f"rank {join.rank} cannot join job {job}"
        spec = self._check_token(what, job, join.epoch, join.token, uid)
        if is_users and self._runner.runs_as(spec) == -1:
            raise Refused(4, what, "that job is the agent's own", "keep the job's COVEY_SOCKET")
        if all(rank.rank != join.rank for rank in spec.ranks):
            raise Refused(3, what, f"that rank does not run on {self._env.host}", f"agentctl job {job}")

    def _check_token(self, what: str, job: JobId, epoch: int, said: str, uid: int) -> RanksSpec:
        """The spec of the job's ranks here; Refused when the token is not theirs, or the process not their user's."""
        token, spec = self._runner.token(job, epoch), self._runner.spec(job, epoch)
        if token is None or spec is None:
            why = f"epoch {epoch} of {job} does not run on {self._env.host}"
            raise Refused(3, what, why, f"agentctl job {job}")
        if not is_secret(said.encode(errors="replace"), token.encode()):
            raise Refused(
                4, what, "its COVEY_TOKEN is wrong", "start it with agentctl submit, and keep its environment"
            )
        if self._runner.runs_as(spec) not in (-1, uid):
            why = f"it runs as uid {uid}, and the job as {spec.user} (uid {spec.uid})"
            raise Refused(4, what, why, "let the job's processes keep their user")
        return spec

    def _welcome(self, peer: ConnectedProcess) -> Joined:
        spec = self._runner.spec(peer.job, peer.epoch) if peer.job is not None else None
        ranks = spec.world_size if spec is not None else 1
        follows, heals = self._memories.follows(spec), spec is None or spec.may_heal
        own = self._env.host, peer.job, peer.rank, ranks, peer.epoch, PROTOCOL, VERSION
        beats = (0.0, 0.0) if spec is None else (heartbeat_s(spec.hang_s), MEMORY_S)
        return Joined(*own, follows, heals, *beats, leaves=True)

    async def _live(self, peer: ConnectedProcess, stream: ByteStream) -> None:
        self.counters["joined"] += 1
        self._joined.append(peer)
        writer = asyncio.get_running_loop().create_task(peer.outbox.write_to(stream), name=f"jobs: write to {peer.pid}")
        try:
            if peer.job is not None:
                self._runner.joins(peer.job, peer.epoch, peer.rank)
                self._tell(JobJoined(peer.job, peer.epoch, peer.rank, peer.kernel))
                if (stopping := self._runner.stopping(peer.job, peer.epoch)) is not None:
                    peer.send(stopping)
                if (carries := self._carries(peer)) is not None:
                    peer.send(carries)
                self._share_memory(peer, peer.job)
            await self._hear(peer, stream)
        except FrameError as error:
            self._malformed(stream, error)
        finally:
            self._joined.remove(peer)
            if peer.job is not None:
                self._runner.leaves(peer.job, peer.epoch, peer.rank)
            peer.left()
            self._counted.gone(peer)
            writer.cancel()
            if peer.pages is not None:
                peer.pages.close()
            if peer.job is not None:
                self._memories.gone(peer.job, peer.epoch, self._of_epoch(peer.job, peer.epoch))
                if self._listener is not None:  # a rank is not gone because its agent stops
                    self._tell(RankDisconnected(peer.job, peer.epoch, peer.rank))
                    if peer.leaves:
                        self._env.spawn(f"jobs: a process of {peer.job} left", self._left(peer, peer.job))

    async def _left(self, peer: ConnectedProcess, job: JobId) -> None:
        """Tell that the process of a rank has left, which pushes nothing more. Not once another process of the rank has
        joined since, nor while one runs that was started since and may do so."""
        began_s, before = self._env.clock.now_s(), self._runner.tree(job, peer.epoch, peer.rank)
        known = self._of_epoch(job, peer.epoch)
        while True:
            await asyncio.sleep(LEFT_S)
            if any(other.rank == peer.rank and other not in known for other in self._of_epoch(job, peer.epoch)):
                return
            now = self._runner.tree(job, peer.epoch, peer.rank)
            if now <= before or self._env.clock.now_s() - began_s > JOINS_WITHIN_S:
                self._tell(RankLeavesHere(job, peer.epoch, peer.rank))
                return

    def _of_epoch(self, job: JobId, epoch: int) -> list[ConnectedProcess]:
        return [peer for peer in self._joined if (peer.job, peer.epoch) == (job, epoch)]

    def _share_memory(self, peer: ConnectedProcess, job: JobId) -> None:
        spec = self._runner.spec(job, peer.epoch)
        if spec is not None and self._memories.follows(spec):
            self._memories.joined(job, peer.epoch, len(spec.ranks), self._of_epoch(job, peer.epoch))

    def _cannot_share(self, peer: ConnectedProcess, frame: NoTensorMemory) -> None:
        if peer.job is None or not self._memories.follows(self._runner.spec(peer.job, peer.epoch)):
            raise FrameError("NoTensorMemory from a process that was given none")
        why = plain(frame.why, PROBLEM_MAX)
        self._memories.refuse(peer.job, peer.epoch, why, self._of_epoch(peer.job, peer.epoch))

    def _tensors_shared(self, peer: ConnectedProcess, frame: TensorsShared) -> None:
        if peer.job is None or not 0 <= frame.largest_bytes <= frame.total_bytes < 1 << 60:
            raise FrameError("TensorsShared from outside a job, or of an impossible size")
        self._tell(TensorsSeen(peer.job, peer.epoch, frame.largest_bytes, frame.total_bytes))

    def _table_wanted(self, peer: ConnectedProcess, frame: TableWanted) -> None:
        if peer.job is None or not 0 <= frame.table < TABLES_MAX:
            raise FrameError("TableWanted from outside a job, or of an impossible table")
        peer.tables.add(frame.table)
        peer.may_own = frame.may_own
        self._tell(TableUsed(peer.job, peer.epoch, frame.table))

    def _no_memory(self, job: JobId, why: str) -> None:
        self._env.log.info("tensors go to an aggregator", job=job, why=why)

    async def _hear(self, peer: ConnectedProcess, stream: ByteStream) -> None:
        heard = 0
        while True:
            frame = await read_frame(stream, decoder)
            heard += 1
            if heard % FRAMES_AT_ONCE == 0:
                await asyncio.sleep(0)
            if isinstance(frame, Stepped):
                self._stepped(peer, frame)
            elif isinstance(frame, Heartbeat):
                self._heartbeat(peer, frame)
            elif isinstance(frame, MemoryHeld):
                self._memory_used(peer, frame)
            elif isinstance(frame, Hooked):
                self._hooked(peer, frame)
            elif isinstance(frame, CheckpointSaved):
                self._saved(peer, frame)
            elif isinstance(frame, SaveIs):
                peer.save_is(frame)
            elif isinstance(frame, AskPages):
                self._asked_for_pages(peer, frame)
            elif isinstance(frame, PagesMapped):
                self._mapped(peer)
            elif isinstance(frame, NoTensorMemory):
                self._cannot_share(peer, frame)
            elif isinstance(frame, TensorsShared):
                self._tensors_shared(peer, frame)
            elif isinstance(frame, TableWanted):
                self._table_wanted(peer, frame)
            elif isinstance(frame, Heals):
                await self._heals(peer, frame)
            elif isinstance(frame, InVain):
                await self._waits_in_vain(peer, frame)
            elif isinstance(frame, ProcessLeaves):
                peer.leaves = peer.job is not None
            elif isinstance(frame, FROM_AGENTS):
                raise FrameError(f"{type(frame).__name__} from a process that has joined")
            else:
                await self._ask(peer, frame)

    def _check_job(self, peer: ConnectedProcess, frame: Frame) -> None:
        """Note for which job the process asks. Refused where it may not, or where it says none and has to."""
        if isinstance(frame, VolumeWanted) and frame.job is not None:
            what = f"cannot open volume {plain(frame.volume, 80)} for job {plain(frame.job, 80)}"
            self._check_token(what, frame.job, frame.epoch, frame.token, peer.uid)
            peer.of_job = frame.job
        elif peer.is_users and peer.of_job is None:
            why = f"{RANKS_SOCKET} is for processes of jobs, and this one has not said of which it is"
            raise Refused(4, f"cannot ask for {type(frame).__name__}", why, "run it in a job")

    async def _ask(self, peer: ConnectedProcess, frame: Frame) -> None:
        try:
            if isinstance(frame, ExtendGrace):
                await self._extend(peer, frame)
            else:
                self._check_job(peer, frame)
                await self._deliver(peer, frame)
        except Refused as refused:
            peer.send(Refusal(refused.what, refused.why, refused.next))

    async def _extend(self, peer: ConnectedProcess, frame: ExtendGrace) -> None:
        if peer.job is None or not 0 < frame.seconds <= SECONDS_MAX:
            raise FrameError("ExtendGrace from outside a job, or with an impossible time")
        await self._runner.extend(peer.job, peer.epoch, frame.seconds)

    async def _heals(self, peer: ConnectedProcess, frame: Heals) -> None:
        if peer.job is None or not 0 <= frame.step <= STEP_MAX:
            raise FrameError("Heals from outside a job, or with an impossible step")
        if len(frame.modules) > MODULES_MAX or not all(map(MODULE.match, frame.modules)):
            raise FrameError("Heals with modules that have no such names, or too many")
        step = NEVER if frame.over else frame.step
        await self._runner.heals(peer.job, peer.epoch, peer.rank, step, peer.pid, frame.modules)

    def _stepped(self, peer: ConnectedProcess, frame: Stepped) -> None:
        """Handle a step. FrameError for an impossible step, size or time; a metric that is not finite (a loss of NaN)
        is left out, and so is a step of another process than the one that counts for its rank."""
        turns = frame.sending_s, frame.turns_s, frame.added_s
        times = (frame.step_s, frame.compute_s, frame.communicate_s, frame.input_s, *turns)
        counts = (frame.step, frame.memory_bytes)
        good = all(0 <= count <= STEP_MAX for count in counts) and all(0 <= time <= SECONDS_MAX for time in times)
        if peer.job is None or not good:
            raise FrameError("Stepped from outside a job, or with an impossible step, size or time")
        by_script = frame.boundary == BY_SCRIPT
        rank = (peer.job, peer.epoch, peer.rank)
        if not self._counted.counts(rank, peer, by_script, frame.step_s, self._env.clock.now_s()):
            self.counters["steps_of_others"] += 1
            return
        metrics = {
            name: value
            for name, value in list(frame.metrics.items())[:METRICS_MAX]
            if len(name) <= METRIC_NAME_MAX and math.isfinite(value)
        }
        self.counters["steps"] += 1
        self.counters["metrics_dropped"] += len(frame.metrics) - len(metrics)
        of = (*rank, frame.step, *times[:3], metrics)
        boundary = plain(frame.boundary, BOUNDARY_MAX)
        self._tell(StepTimed(*of, frame.input_s, frame.memory_bytes, boundary, *turns))

    def _heartbeat(self, peer: ConnectedProcess, frame: Heartbeat) -> None:
        good = all(0 <= time <= SECONDS_MAX for time in (frame.quiet_s, frame.waits_s))
        if peer.job is None or not good or not 0 <= (frame.step or 0) <= STEP_MAX:
            raise FrameError("Heartbeat from outside a job, or with an impossible step or time")
        of = peer.job, peer.epoch, peer.rank, peer.pid
        self._tell(HeartbeatHeard(*of, frame.step, frame.quiet_s, frame.waits_s, frame.begun))

    def _memory_used(self, peer: ConnectedProcess, frame: MemoryHeld) -> None:
        if peer.job is None or not memory_reports.is_possible(frame):
            raise FrameError("MemoryHeld from outside a job, or of an impossible size")
        peer.memory = frame
        spec, here = self._runner.spec(peer.job, peer.epoch), self._of_epoch(peer.job, peer.epoch)
        if spec is not None:
            peer.send(memory_reports.on_host(spec, (each.memory for each in here if each is not peer)))
            said = memory_reports.together([each.memory for each in here if each.memory is not None])
            self._tell(MemoryMeasured(peer.job, peer.epoch, said))

    async def _waits_in_vain(self, peer: ConnectedProcess, frame: InVain) -> None:
        if peer.job is None:
            raise FrameError("InVain from outside a job")
        await self._runner.gives_up(peer.job, peer.epoch, peer.rank)
        self._tell(RankWaitsInVain(peer.job, peer.epoch, peer.rank, plain(frame.why, IN_VAIN_MAX)))

    def _hooked(self, peer: ConnectedProcess, frame: Hooked) -> None:
        """Note what a rank hooks. It says so once after it joined, and again when that changes."""
        if peer.job is None:
            raise FrameError("Hooked from outside a job")
        peer.hooked = (plain(frame.to, HOOKED_MAX), plain(frame.problem, PROBLEM_MAX))
        self._tell(JobHooked(peer.job, peer.epoch, peer.rank, *peer.hooked))

    def _saved(self, peer: ConnectedProcess, frame: CheckpointSaved) -> None:
        """Note a checkpoint of a rank. It says so once it is complete, and again when it has joined anew."""
        if peer.job is None or not (0 <= frame.step <= STEP_MAX and 0 <= frame.wall_s <= SAVED_S_MAX):
            raise FrameError("CheckpointSaved from outside a job, or with an impossible step or time")
        peer.saved = SavedAt(frame.step, frame.wall_s, plain(frame.path, SAVED_PATH_MAX))
        self._tell(JobSaved(peer.job, peer.epoch, peer.rank, peer.saved))

    def _asked_for_pages(self, peer: ConnectedProcess, asked: AskPages) -> None:
        """Give a rank the pages that it asks for. A rank without pages goes by no limits: whoever decides on them sees
        that."""
        if peer.job is None or not (0 <= asked.epoch < 1 << 62 and 0 <= asked.memory_limit_bytes < 1 << 60):
            raise FrameError("AskPages from outside a job, or with an impossible epoch or limit")
        try:
            peer.make_pages(self._env.pages, asked)
        except OSError as error:
            self._env.log.warning("no pages for a rank", job=peer.job, rank=peer.rank, why=str(error))

    def _mapped(self, peer: ConnectedProcess) -> None:
        if peer.pages is None or peer.job is None:
            raise FrameError("PagesMapped without pages")
        peer.pages.seal()
        self._tell(RankShares(peer.job, peer.epoch, peer.rank))

    def _malformed(self, stream: ByteStream, error: FrameError) -> None:
        self.counters["malformed"] += 1
        unsaid = self._offences.add(stream.peer, self._env.clock.now_s())
        if unsaid is not None:
            self._env.log.warning("malformed frame on jobs.sock", peer=stream.peer, why=str(error), unsaid=unsaid)
