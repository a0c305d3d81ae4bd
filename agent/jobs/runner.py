"""Job processes on this host: started, signalled and found again through one supervisor per job and epoch.

    start(spec) -> disk: EPOCH.start -> supervisor process -> its socket says Status -> RanksStarted, RanksEnded
                                                 |
    agent restarts: EPOCH.start without an end --+-- follow that socket again; it is gone: read EPOCH.state

The record `EPOCH.start` is durable before anything runs, so an agent that died at any point knows what it may have
started. A supervisor claims its epoch (see there), so starting one again is harmless. The end of an epoch is published
after every restart until the scheduler calls `forget`; then only the highest forgotten epoch of the job stays, and
every epoch up to it is refused: a grant's epoch is the fencing token.

Which processes of an elastic job run here changes under one epoch: the record, too, is durable before the supervisor
hears of it (`JoinRanks`, `LeaveRanks`), and it hears all of it again on each new connection.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from agent.jobs import records, supervision
from agent.jobs.epoch import (
    Epoch,
    allowed_with,
    ended_before_others,
    ended_of,
    have_now,
    heal_of,
    is_leaving,
    started_of,
    takes_changes,
)
from agent.jobs.following import Following
from agent.jobs.held_ports import HeldPorts
from agent.jobs.kept_spares import KeptSpares
from agent.jobs.launching import Launching, begins_beside_its_siblings
from agent.jobs.output import JobsSettings, read_log, read_since
from agent.jobs.outputs import Outputs
from agent.jobs.records import Key, StartRecord, file_of, instance_of
from agent.jobs.successors import NEVER
from agent.jobs.supervision import (
    EXTENSION_MAX_S,
    EndStuck,
    Extend,
    ForgetRanks,
    HealRank,
    KeepStacks,
    Renewed,
    StopRanks,
)
from agent.jobs.whose import is_own, limit_again, other_user
from covey.core.errors import Refused
from covey.core.events import Fact
from covey.core.ids import JobId
from covey.ports.env import Env
from covey.ports.processes import Command, KnowsTrees, LetsGo, ProcessId
from covey.ports.starter import ENFORCED
from covey.wire import checked
from covey.wire.frames import pack
from covey.wire.job import GRACE_KEPT, Stopping
from plugins.base import LogRead, RankLease, RanksSpec
from plugins.facts import RankReplaced, RanksStarted, SparesReady

TOKEN_BYTES = 16
LATE_S, LOOK_S = 15.0, 1.0
"""Seconds after the grace at which ranks of another user are ended by force, and between two looks."""
HELD_S = 10.0
"""Most seconds that a process which begins beside others of its elastic job runs on what they leave of the cores: where
other work keeps all cores busy it would not begin at all."""


class BesideRank(NamedTuple):
    """What a command beside a rank that runs here needs."""

    spec: RanksSpec
    command: Command
    """The rank's own command."""
    process: ProcessId
    """The rank's process."""
    supervisor: ProcessId | None
    """The supervisor of the ranks here; None: it is not known."""


async def nobody_waits() -> None:
    """Do nothing: no socket is to be opened."""


class SupervisedRunner:
    """The `plugins.base.Runner` that runs each epoch's ranks under a supervisor."""

    def __init__(
        self,
        env: Env,
        tell: Callable[[Fact], None],
        advertise: str,
        socket_path: str,
        settings: JobsSettings | None = None,
        hide_gpus: bool = True,
    ) -> None:
        self._env = env
        self._epochs: dict[Key, Epoch] = {}
        self._forgotten: dict[JobId, records.Fence] = {}
        self._outputs = Outputs(env, settings or JobsSettings(), self._live)
        self._launching = Launching(env, socket_path, hide_gpus, self._outputs.keep_free)
        self._ports = HeldPorts(env, advertise)
        self._spares = KeptSpares(env, self._launching, tell)
        self._tell = tell
        self._following = Following(env, self._launching, self._told, lambda job, epoch: self.on_stopping(job, epoch))
        self._loading: asyncio.Future[None] | None = None
        self._known = False
        """Whether the records have been read."""
        self.on_stopping: Callable[[JobId, int], None] = lambda job, epoch: None
        """Called whenever `stopping` has changed."""
        self.let_users_in: Callable[[], Coroutine[Any, Any, None]] = nobody_waits
        """Called before ranks of another user start: they reach the agent at a socket of their own."""
        self.on_carries: Callable[[JobId, int], None] = lambda job, epoch: None
        """Called whenever processes of an elastic job carry other ranks, as `spec` says."""

    # ---- life ----

    async def start_up(self) -> None:
        """Find again what an earlier agent started here, and publish `RanksStarted` and `RanksEnded`."""
        await self._loaded()
        self._env.spawn("runner: output", self._outputs.run(lambda: self._forgotten, self._unfence))

    def reconfigure(self, settings: JobsSettings) -> None:
        """Keep output by these settings from now on."""
        self._outputs.reconfigure(settings)
        self._launching.keep_free = self._outputs.keep_free

    def _unfence(self, job: JobId) -> None:
        self._forgotten = {other: fence for other, fence in self._forgotten.items() if other != job}

    def _live(self) -> set[JobId]:
        """Jobs of which something may run here, or its end is not forgotten yet."""
        return {job for job, _ in self._epochs} | self._spares.jobs()

    def _fenced(self, job: JobId) -> tuple[int, int]:
        """The newest epoch of the job that may not start here any more, and the newest place (`since`) under it."""
        fence = self._forgotten.get(job)
        return (0, 0) if fence is None else fence.over

    async def stop_up(self) -> None:
        """Stop following: the agent leaves. Ranks and supervisors stay."""
        self._ports.release_all()
        for epoch in self._epochs.values():
            if epoch.stream is not None:
                epoch.stream.close()

    async def _loaded(self) -> None:
        """Read the records once: the first caller reads them, the others wait. OSError when the disk fails: the next
        caller reads them again."""
        while not self._known:
            if self._loading is not None:
                await asyncio.shield(self._loading)
                continue
            self._loading = asyncio.get_running_loop().create_future()
            try:
                await self._load()
                self._known = True
            finally:
                self._loading.set_result(None)
                self._loading = None

    async def _load(self) -> None:
        for name in await self._env.disk.names("jobs/"):
            found = records.START_OR_FORGOTTEN.match(name)
            if found is None:
                continue
            data, job = await self._env.disk.read(name) or b"", JobId(found[1])
            if found[2] is None:
                self._forgotten[job] = records.fence_of(data, self._env.clock.wall_s())
                continue
            try:
                record = checked.unseal(data, records.decoder, name=self._env.disk.path(name))
            except (checked.Damaged, checked.OtherFormat) as error:
                self._env.log.error("a job's record cannot be read", file=self._env.disk.path(name), why=str(error))
                continue
            if (record.spec.job, record.spec.epoch) == (job, int(found[2])):
                self._epochs[job, record.spec.epoch] = Epoch(record, found=True)
        for key, epoch in sorted(self._epochs.items()):
            if (key[1], epoch.record.spec.since) <= self._fenced(key[0]):
                del self._epochs[key]
                self._env.spawn(f"runner: forget {key[0]}.{key[1]}", self._delete_if_possible(key))
                continue
            if other_user(self._env, epoch.record.spec) is not None:
                self._env.spawn("runner: users", self.let_users_in())
                self._env.spawn(f"runner: lease of {key[0]}.{key[1]}", self._keep_lease(epoch))
            self._env.spawn(f"runner: found {key[0]}.{key[1]}", self._following.found(key, epoch))
            self._env.spawn(f"runner: follow {key[0]}.{key[1]}", self._follow(key, epoch))

    # ---- what plugins ask for ----

    async def reserve_port(self, job: JobId, epoch: int) -> int:
        return self._ports.hold(job, epoch)

    def release_port(self, job: JobId, epoch: int) -> None:
        self._ports.release(job, epoch)

    async def start(self, spec: RanksSpec) -> None:
        await self._loaded()
        key = (spec.job, spec.epoch)
        newest = max((e for j, e in self._epochs if j == spec.job), default=0)
        if (spec.epoch, spec.since) <= self._fenced(spec.job) or spec.epoch < newest:
            self._env.log.info("not started: a newer epoch is known", job=spec.job, epoch=spec.epoch)
            return
        known = self._epochs.get(key)
        if known is not None:
            known.found = False  # ranks that come back here wait until those of before are over and forgotten
            async with known.changes:
                await self._join(key, known, spec)
            return
        token = self._spares.token(key) or self._env.entropy(TOKEN_BYTES).hex()
        epoch = self._epochs[key] = Epoch(StartRecord(spec, token), found=False)
        epoch.lease = spec.lease
        ranks = [rank.rank for rank in spec.ranks]
        self._env.log.info("ranks start", job=spec.job, epoch=spec.epoch, ranks=ranks)
        older = [e for (j, n), e in sorted(self._epochs.items()) if j == spec.job and n < spec.epoch]
        for fenced in older:
            await self._stop(fenced, StopRanks(0.0, f"epoch {spec.epoch} of this job starts here"))
        self._env.spawn(f"runner: follow {spec.job}.{spec.epoch}", self._begin(key, epoch, older))

    async def _join(self, key: Key, epoch: Epoch, spec: RanksSpec) -> None:
        """Let ranks that come from another host join those of this grant that run here."""
        if spec.config:
            await self._change(key, epoch, spec)
            return
        before, after = epoch.record.spec, {rank.rank for rank in spec.ranks}
        here = {rank.rank for rank in before.ranks}
        if spec.since <= before.since or not here < after or not takes_changes(epoch):
            return
        self.release_port(*key)
        joined = tuple(rank.rank for rank in spec.ranks if rank.rank in epoch.record.joined or rank.rank not in here)
        record = msgspec.structs.replace(epoch.record, spec=spec, joined=joined)
        try:
            await limit_again(self._env, spec)  # before they come: they may need what they are not allowed yet
            if not takes_changes(epoch):
                return
            await self._following.join(key, epoch, record)
        except OSError as error:
            self._env.log.error("ranks cannot join others", job=key[0], epoch=key[1], why=str(error))

    async def _change(self, key: Key, epoch: Epoch, spec: RanksSpec) -> None:
        """Let an elastic job have these processes here: new ones join, those that are not among them end at once, and
        all others keep running, whichever ranks they carry from now on."""
        record, leaving = epoch.record, is_leaving(epoch)
        if spec.config <= record.spec.config or not takes_changes(epoch):
            return
        before, after = ({rank.rank: rank for rank in each.ranks} for each in (record.spec, spec))
        if others := {rank for rank in before.keys() & after.keys() if before[rank].gpus != after[rank].gpus}:
            # another process of the same name, which came after this copy of the log last looked: first this one ends
            after = {rank: known for rank, known in before.items() if rank not in others}
            spec = msgspec.structs.replace(record.spec, ranks=tuple(after.values()))
        ends, begins = before.keys() - after.keys(), after.keys() - before.keys()
        if leaving and begins & set(record.left):
            return  # an earlier process of this name has not ended: the scheduler asks again
        if not after:
            await self._stop(epoch, StopRanks(0.0, "its place here was exchanged for another one"))
            return
        now = msgspec.structs.replace(record, spec=spec)
        if ends or begins:
            left = {*ends, *(record.left if leaving else ())}
            joined = tuple(rank for rank in after if rank in record.joined or rank in begins)
            changed = record.changed + 1
            now = msgspec.structs.replace(now, joined=joined, left=tuple(sorted(left)), changed=changed)
        if begins:
            self.release_port(*key)
        allowed = allowed_with(epoch, spec)
        try:
            if begins:
                await limit_again(self._env, allowed)
                if not takes_changes(epoch):
                    return
            epoch.allowed = allowed.ranks
            await self._following.change(key, epoch, now, bool(begins))
        except OSError as error:
            self._env.log.error("processes cannot change", job=key[0], epoch=key[1], why=str(error))
            return
        epoch.heals = {rank: step for rank, step in epoch.heals.items() if rank in after}
        self.on_carries(*key)

    def leaving(self, job: JobId, epoch: int) -> bool:
        known = self._epochs.get((job, epoch))
        return known is not None and is_leaving(known)

    def have_state(self, job: JobId, epoch: int) -> tuple[int, ...]:
        known = self._epochs.get((job, epoch))
        if known is None or not known.told or known.stop is not None:
            return ()
        find, pids = self._env.processes.find, known.state.pids
        return tuple(rank for rank in have_now(known) if find(pids[rank]) is not None)

    def may_join(self, job: JobId, epoch: int) -> bool:
        known = self._epochs.get((job, epoch))
        return known is not None and known.told and not known.ended and known.stop is None

    async def stop(self, job: JobId, epoch: int, grace_s: float, why: str) -> None:
        await self._loaded()
        known = self._epochs.get((job, epoch))
        if known is not None and not known.ended:
            await self._stop(known, StopRanks(grace_s, why))

    async def _stop(self, epoch: Epoch, stop: StopRanks) -> None:
        """Send a stop to the supervisor, now if it is connected, and again on every new connection."""
        if epoch.stop is None or stop.grace_s < epoch.stop.grace_s:
            epoch.stop = stop
            if other_user(self._env, epoch.record.spec) is not None:
                spec = epoch.record.spec
                self._env.spawn(f"runner: end {spec.job}.{spec.epoch}", self._end_in_time(epoch, stop))
        if epoch.stream is not None:
            with contextlib.suppress(ConnectionError):
                await epoch.stream.write(pack(stop))

    async def _keep_lease(self, epoch: Epoch) -> None:
        """End ranks of another user once their lease is over: their supervisor is that user's, too, and may not."""
        spec = epoch.record.spec
        while not epoch.ended:
            lease = epoch.lease
            if lease is not None and self._env.clock.boot_s() > lease.until_s + lease.grace_s + LATE_S:
                why = f"no leader has confirmed these ranks, and their supervisor did not end them on {self._env.host}"
                await self._following.end_by_force((spec.job, spec.epoch), epoch, why)
                return
            await asyncio.sleep(LOOK_S)

    async def _end_in_time(self, epoch: Epoch, stop: StopRanks) -> None:
        """End ranks of another user once their grace is over: their supervisor is that user's, too, and may not."""
        began_s, spec = self._env.clock.boot_s(), epoch.record.spec
        while not epoch.ended:
            left_s = began_s + stop.grace_s + LATE_S - self._env.clock.boot_s()
            left_s += EXTENSION_MAX_S if epoch.extended else 0.0
            if left_s <= 0:
                why = f"{stop.why}; its supervisor did not end it in time"
                await self._following.end_by_force((spec.job, spec.epoch), epoch, why)
                return
            await asyncio.sleep(min(left_s, LOOK_S))

    async def renew(self, leases: Mapping[Key, RankLease]) -> None:
        """Send leases now to each connected supervisor, and again on every new connection."""
        for key, lease in sorted(leases.items()):
            epoch = self._epochs.get(key)
            if epoch is None or epoch.ended:
                continue
            epoch.lease = lease
            if epoch.stream is not None:
                with contextlib.suppress(ConnectionError):
                    await epoch.stream.write(pack(Renewed(lease)))

    async def heals(
        self, job: JobId, epoch: int, rank: int, step: int, pid: int = 0, modules: tuple[str, ...] = ()
    ) -> None:
        """Start this rank again alone if it is lost from `step` on. Its supervisor hears that now if it is connected,
        and again on every new connection. `pid`: the process that says so; `modules`: what a spare of it imports."""
        known = self._epochs.get((job, epoch))
        if known is None or step < known.heals.get(rank, 0):
            return
        if all(rank != here.rank for here in known.record.spec.ranks):
            return  # it has left, and is about to end
        known.heals[rank] = step
        if step < NEVER:
            self._keep_spares_of(known, rank, pid, modules)
            known.said_to_have[rank] = known.state.pids.get(rank)
            self.joins(job, epoch, rank)
        self._following.tell_heals((job, epoch), known)
        if known.stream is not None and known.told:
            with contextlib.suppress(ConnectionError):
                await known.stream.write(pack(HealRank(rank, step)))

    def tree(self, job: JobId, epoch: int, rank: int) -> frozenset[ProcessId]:
        """The processes of this rank that run here, as far as it is known."""
        known = self._epochs.get((job, epoch))
        process = None if known is None else known.state.pids.get(rank)
        if process is None or not isinstance(self._env.processes, KnowsTrees):
            return frozenset()
        return frozenset(self._env.processes.started_by(process.pid))

    async def gives_up(self, job: JobId, epoch: int, rank: int) -> None:
        """Start this rank no more if its process ends: it waits for a rank that has left, and so would a successor."""
        known = self._epochs.get((job, epoch))
        if known is not None and rank in known.heals:
            await self.heals(job, epoch, rank, NEVER)

    def leaves(self, job: JobId, epoch: int, rank: int) -> None:
        """Forget what a process said whose connection has ended, if nobody knows yet which process that was."""
        known = self._epochs.get((job, epoch))
        if known is not None and known.said_to_have.get(rank, ()) is None:
            del known.said_to_have[rank]

    def _told(self, fact: Fact) -> None:
        if isinstance(fact, RanksStarted | RankReplaced):
            for rank in fact.pids if isinstance(fact, RanksStarted) else (fact.rank,):
                self._let_go((fact.job, fact.epoch), rank, HELD_S)
        self._tell(fact)

    def joins(self, job: JobId, epoch: int, rank: int) -> None:
        """Give a process that began beside others of its elastic job its share of the cores: it has imported what it
        needs, and its siblings wait for it from now on."""
        self._let_go((job, epoch), rank)

    def _let_go(self, key: Key, rank: int, after_s: float = 0.0) -> None:
        epoch = self._epochs.get(key)
        process = None if epoch is None else epoch.state.pids.get(rank)
        if epoch is None or process is None or not isinstance(self._env.processes, LetsGo):
            return
        spec = epoch.record.spec
        if begins_beside_its_siblings(spec) and not spec.held_back:
            self._env.spawn(f"let rank {rank} go", self._lets_go(self._env.processes, epoch, rank, process, after_s))

    async def _lets_go(self, processes: LetsGo, epoch: Epoch, rank: int, process: ProcessId, after_s: float) -> None:
        if after_s:
            await asyncio.sleep(after_s)
        if epoch.state.pids.get(rank) != process or rank in epoch.state.codes:
            return  # its pid may be of another process by now
        if not await processes.let_go(process.pid):
            self._env.log.warning("a rank stays throttled", rank=rank, next="LimitNICE=+0 in covey.service")

    def _keep_spares_of(self, epoch: Epoch, rank: int, pid: int, modules: tuple[str, ...]) -> None:
        """Keep spares of the ranks that run here. A spare of a process that a shell or a launcher had started would run
        these again."""
        spec, process = epoch.record.spec, epoch.state.pids.get(rank)
        if process is not None and process.pid == pid and modules:
            epoch.modules = modules
        if rank in epoch.record.joined:
            epoch.spares_awaited = 0
        count = max(spec.spares, epoch.spares_awaited)
        if not count or epoch.ended:
            self._spares.end((spec.job, spec.epoch))  # those that waited for these ranks to come here
            return
        if epoch.modules:
            self._spares.keep(epoch.record, epoch.modules, count)
        elif not epoch.spares_refused:
            epoch.spares_refused = True
            how = "by another process, such as a shell" if modules else "without covey.hooks"
            self._tell(SparesReady(spec.job, spec.epoch, 0, f"the Python of its ranks is started {how}"))

    async def keep_spares(self, spec: RanksSpec, modules: tuple[str, ...]) -> None:
        await self._loaded()
        key = (spec.job, spec.epoch)
        known = self._epochs.get(key)
        if known is not None and not known.ended:
            known.spares_awaited = spec.spares
            self._spares.keep(known.record, modules, max(spec.spares, known.record.spec.spares))
        if known is not None or (spec.epoch, spec.since) <= self._fenced(spec.job):
            return
        record = StartRecord(spec, self._spares.token(key) or self._env.entropy(TOKEN_BYTES).hex())
        self._spares.keep(record, modules, spec.spares, is_new=True)

    def end_spares(self, job: JobId, epoch: int) -> None:
        known = self._epochs.get((job, epoch))
        if known is not None:
            known.spares_awaited = 0
        if known is None or not known.record.spec.spares:
            self._spares.end((job, epoch))

    def modules(self, job: JobId, epoch: int) -> tuple[str, ...]:
        known = self._epochs.get((job, epoch))
        return () if known is None or known.ended else known.modules

    async def keep_stacks(self, job: JobId, epoch: int) -> None:
        await self._tell_stuck((job, epoch), KeepStacks())

    async def end_stuck(self, job: JobId, epoch: int, rank: int, pid: int, why: str) -> None:
        await self._tell_stuck((job, epoch), EndStuck(rank, pid, why))

    async def _tell_stuck(self, key: Key, frame: KeepStacks | EndStuck) -> None:
        """Tell the supervisor once, if it is connected: what still holds is told again."""
        known = self._epochs.get(key)
        if known is not None and known.stream is not None and known.told:
            with contextlib.suppress(ConnectionError):
                await known.stream.write(pack(frame))

    async def kept(self) -> Sequence[RanksSpec]:
        await self._loaded()
        return [epoch.record.spec for _, epoch in sorted(self._epochs.items()) if not epoch.forgotten]

    def stopping(self, job: JobId, epoch: int) -> Stopping | None:
        """The `Stopping` for ranks of this epoch that were asked to end; None when they were not."""
        known = self._epochs.get((job, epoch))
        ending = None if known is None or known.ended else known.state.ending
        if known is None or ending is None:
            return None
        left_s = max(0.0, ending.kill_at_s - self._env.clock.boot_s())
        return Stopping(left_s, known.state.reason, may_extend=not (ending.extended or ending.firm))

    async def extend(self, job: JobId, epoch: int, seconds: float) -> None:
        """Give a rank more time than its grace. Refused says why not; otherwise `on_stopping` follows."""
        known, stopping = self._epochs.get((job, epoch)), self.stopping(job, epoch)
        if known is None or known.stream is None or stopping is None:
            why = "this job was not asked to end" if stopping is None else "its supervisor is being started again"
            raise Refused(4, GRACE_KEPT, why, "ask while job.stopping is true")
        if not stopping.may_extend:
            raise Refused(4, GRACE_KEPT, "it was extended before, or cannot be", f"save within {stopping.left_s:.0f} s")
        known.extended = True
        with contextlib.suppress(ConnectionError):
            await known.stream.write(pack(Extend(seconds)))

    def running(self) -> Mapping[Key, Mapping[int, int]]:
        found: dict[Key, Mapping[int, int]] = {}
        for key, epoch in sorted(self._epochs.items()):
            state = epoch.state
            if epoch.started and not epoch.ended:
                here = {rank.rank for rank in epoch.record.spec.ranks} - state.codes.keys()
                found[key] = {rank: pid.pid for rank, pid in state.pids.items() if rank in here}
        return found

    def facts(self) -> Sequence[Fact]:
        """The facts of epochs that are not forgotten, for a plugin that started later."""
        found: list[Fact] = []
        for key, epoch in sorted(self._epochs.items()):
            if epoch.started:
                found.append(started_of(key, epoch))
            if (epoch.may_be_lost or epoch.have) and not epoch.ended:
                found.append(heal_of(key, epoch))
            found += ended_before_others(key, epoch)
            if epoch.ended and not epoch.forgotten:
                found.append(ended_of(key, epoch))
        return found

    def limited(self, job: JobId, epoch: int) -> bool | None:
        known = self._epochs.get((job, epoch))
        if known is None or known.ended:
            return None
        return other_user(self._env, known.record.spec) is not None and self._env.starter.limits == ENFORCED

    def refusal_as(self, user: str, uid: int | None) -> str:
        if is_own(self._env, uid) or not self._env.starter.refusal:
            return ""
        return f"jobs of {user} are not possible on {self._env.host}: {self._env.starter.refusal}"

    def runs_as(self, spec: RanksSpec) -> int:
        """The user as whom the ranks run; -1: the agent's own."""
        user = other_user(self._env, spec)
        return -1 if user is None else user.uid

    def other_uids(self) -> set[int]:
        """The other users who have ranks here."""
        specs = [epoch.record.spec for _, epoch in sorted(self._epochs.items()) if not epoch.ended]
        return {self.runs_as(spec) for spec in specs} - {-1}

    def token(self, job: JobId, epoch: int) -> str | None:
        """The token that a rank of this epoch must present; None when the epoch does not run here (any more)."""
        known = self._epochs.get((job, epoch))
        return None if known is None or known.ended else known.record.token

    def beside(self, job: JobId, rank: int | None) -> BesideRank | None:
        """What a command beside a rank of the job needs; `rank`: which, None: any. None: it does not run here now."""
        for key, epoch in sorted(self._epochs.items(), reverse=True):
            ends = epoch.ended or (epoch.stop or epoch.state.ending) is not None
            runs = epoch.state.pids.keys() - epoch.state.codes.keys()
            for here in epoch.record.spec.ranks if key[0] == job and not ends else ():
                if here.rank in runs and rank in (None, here.rank):
                    command, process = self._launching.command(epoch.record, here), epoch.state.pids[here.rank]
                    return BesideRank(epoch.record.spec, command, process, epoch.record.supervisor)
        return None

    def spec(self, job: JobId, epoch: int) -> RanksSpec | None:
        known = self._epochs.get((job, epoch))
        return None if known is None else known.record.spec

    def is_ending(self, job: JobId, epoch: int) -> bool:
        known = self._epochs.get((job, epoch))
        return known is not None and not known.ended and (known.stop or known.state.ending) is not None

    def knows(self, job: JobId, epoch: int) -> bool:
        return not self._known or (job, epoch) in self._epochs

    def log_path(self, job: JobId, rank: int) -> str:
        return self._env.disk.path(records.log_of(job, rank))

    @property
    def settings(self) -> JobsSettings:
        return self._outputs.settings

    @property
    def refusal(self) -> str:
        return self._outputs.refusal

    @property
    def free_bytes(self) -> int | None:
        """Bytes free where output goes, at the last look; None: not known."""
        return self._outputs.free_bytes

    async def keep_curve(self, job: JobId, data: bytes) -> None:
        await self._env.disk.replace(records.curve_of(job), data)

    async def curve(self, job: JobId) -> bytes | None:
        return await self._env.disk.read(records.curve_of(job))

    async def read_log(self, job: JobId, rank: int, offset: int, limit: int, since_s: float | None = None) -> LogRead:
        name = records.log_of(job, rank)
        if since_s is not None:
            return await read_since(self._outputs.files, name, self._env.clock.wall_s() - since_s, limit)
        return await read_log(self._outputs.files, name, offset, limit)

    def forget(self, job: JobId, epoch: int) -> None:
        known = self._epochs.get((job, epoch))
        if known is None or known.forgotten or not known.ended:
            return
        known.forgotten = True
        self._env.spawn(f"runner: forget {job}.{epoch}", self._forget((job, epoch), known))

    async def _forget(self, key: Key, epoch: Epoch) -> None:
        if epoch.stream is not None:
            with contextlib.suppress(ConnectionError):
                await epoch.stream.write(pack(ForgetRanks()))
        over = max((key[1], epoch.record.spec.since), self._fenced(key[0]))
        fence = records.Fence(over[0], self._env.clock.wall_s(), over[1])
        self._forgotten = {**self._forgotten, key[0]: fence}
        try:
            await self._env.disk.replace(records.forgotten_of(key[0]), fence.encode())
            if other_user(self._env, epoch.record.spec) is not None:
                await self._following.end_all(key)
            elif epoch.state.pids:
                await self._env.disk.delete(f"logs/{instance_of(key)}.log")  # kept where nothing ever ran: it says why
            await self._delete(key)
        except OSError as error:
            self._env.log.error("a job's record cannot be removed", job=key[0], epoch=key[1], why=str(error))
        self._epochs.pop(key, None)

    async def _delete(self, key: Key) -> None:
        """Delete an epoch's files, the record last: while it exists, the next start looks for the other files."""
        record = file_of(key, "start")
        files = self._outputs.files
        for name in await files.names(file_of(key, "")):
            if name != record:
                await files.delete(name)
        await self._env.disk.delete(record)

    async def _delete_if_possible(self, key: Key) -> None:
        """Delete an epoch's files if the disk does: those that it fails to delete are found and deleted after the next
        restart."""
        try:
            await self._delete(key)
        except OSError as error:
            self._env.log.error("a job's record cannot be removed", job=key[0], epoch=key[1], why=str(error))

    # ---- one epoch, from its start to its end ----

    async def _begin(self, key: Key, epoch: Epoch, older: list[Epoch]) -> None:
        for fenced in older:
            await fenced.over.wait()
        self.release_port(*key)
        if epoch.stop is not None:
            why = f"never started: {epoch.stop.why}"
            await self._following.never_start(key, epoch, -supervision.SIGKILL, why)
            return
        if other_user(self._env, epoch.record.spec) is not None:
            if why := self.refusal_as(epoch.record.spec.user, epoch.record.spec.uid):
                await self._following.never_start(key, epoch, supervision.CANNOT_START, why, "host")
                return
            await self.let_users_in()
            self._env.spawn(f"runner: lease of {key[0]}.{key[1]}", self._keep_lease(epoch))
        promised = [e.record.output_bytes_max * len(e.record.spec.ranks) for e in self._epochs.values() if not e.ended]
        most = self._outputs.rank_bytes_max(sum(promised), len(epoch.record.spec.ranks))
        epoch.record = msgspec.structs.replace(epoch.record, output_bytes_max=most)
        await self._following.launch(key, epoch)
        await self._follow(key, epoch)

    async def _follow(self, key: Key, epoch: Epoch) -> None:
        """Follow an epoch until it has ended. One that no supervisor ever had is forgotten: if these places are still
        wanted, the scheduler starts them (and may have done so meanwhile)."""
        was_there = await self._following.follow(key, epoch)
        self._spares.end(key)
        if not was_there:
            self._epochs.pop(key, None)
            epoch.over.set()
            await self._delete_if_possible(key)
