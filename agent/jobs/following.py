"""The supervisor of one epoch, from its start to its end: followed at its socket, started again when it dies, given up.

launched --> its socket says RanksStatus --> the last state it wrote says that all have ended --> RanksEnded
    ^                  |
    +-- it is gone ----+-- it does not answer LAUNCHES_MAX times --> given up: ranks that are left are killed
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection

import msgspec

from agent.jobs import supervision
from agent.jobs.epoch import (
    Epoch,
    allowed_with,
    ended_before_others,
    ended_of,
    have_now,
    heal_of,
    is_leaving,
    lost_of,
    replaced_of,
    run_all,
    started_of,
)
from agent.jobs.launching import Launching
from agent.jobs.records import Key, StartRecord, file_of, instance_of
from agent.jobs.successors import may_be_lost
from agent.jobs.supervision import (
    HealRank,
    RanksStatus,
    Renewed,
    SupervisorState,
    decoder,
    end_marked,
    read_state,
)
from agent.jobs.whose import PACE_S, believed, is_theirs, limit_again, other_user, start_program, stored
from covey.core.events import Fact
from covey.core.ids import JobId
from covey.ports.env import Env
from covey.ports.streams import ByteStream
from covey.wire import checked
from covey.wire.frames import pack, read_frame
from plugins.base import RankLease
from plugins.facts import MemoryKilled, StartFault

BOOT_S = 10.0
"""Seconds after its start at which a supervisor that has not opened its socket is taken for dead."""
LAUNCHES_MAX = 3
"""The number of supervisors in a row that die before they answer; after that the ranks cannot start here."""
RETRY_S = 0.1
UNREADABLE_S = 1.0
"""Seconds to pause before the runner looks again for a supervisor whose state file could not be read."""
JOIN_AGAIN_S = 5.0
"""Seconds within which the processes of a job have found the next agent, and said again who has the job's state."""
AGAIN_LEASE_S = 10.0
"""Seconds of lease for ranks whose supervisor and agent both died: the rest of their former lease is unknown. Those
that may be lost stand still until the next one."""


class Following:
    """Follows the supervisors of this host. `tell`: called once when all ranks run, and once when they have ended;
    `ending_changed`: called when a supervisor says anew when its ranks are killed."""

    def __init__(
        self,
        env: Env,
        launching: Launching,
        tell: Callable[[Fact], None],
        ending_changed: Callable[[JobId, int], None],
    ) -> None:
        self._env, self._launching = env, launching
        self._tell, self._ending_changed = tell, ending_changed

    async def never_start(self, key: Key, epoch: Epoch, code: int, why: str, fault: StartFault = "") -> None:
        """End an epoch before anything ran."""
        codes = dict.fromkeys((rank.rank for rank in epoch.record.spec.ranks), code)
        state = SupervisorState(codes=codes, ended=True, reason=why, unstarted=fault)
        await self._end_here(key, epoch, state)

    async def launch(self, key: Key, epoch: Epoch) -> None:
        """Launch the epoch's first supervisor, once its record is durable. Where that fails, the epoch ends."""
        try:
            await self._write(key, epoch)
            await self._launch(key, epoch)
        except OSError as error:
            at_fault = f"{error.filename}: " if error.filename else ""
            why = f"the supervisor cannot start: {at_fault}{error.strerror or error}"
            fault = self._fault(epoch, supervision.fault_of(error))
            await self.never_start(key, epoch, supervision.CANNOT_START, why, fault)

    async def join(self, key: Key, epoch: Epoch, record: StartRecord) -> None:
        """Let more ranks come here: `record`, which is written down before anything starts, and so is found again
        whatever dies. OSError when the disk fails: nothing has changed."""
        await self._write_change(key, epoch, record)
        epoch.changing, epoch.may_be_lost = True, False
        await self._tell_changes(epoch)

    async def change(self, key: Key, epoch: Epoch, record: StartRecord, begin: bool) -> None:
        """Let other processes of an elastic job be here, or let these carry other ranks; `begin`: some are new, and do
        not have the state yet. As with `join`, the record is written down first. OSError when the disk fails: nothing
        has changed."""
        before = await self._write_change(key, epoch, record)
        if begin:
            epoch.may_be_lost = False
        if before.changed < record.changed:
            epoch.changing = True
            await self._tell_changes(epoch)

    async def _write_change(self, key: Key, epoch: Epoch, record: StartRecord) -> StartRecord:
        """Write down who is here now, and return the record before. Another supervisor may start meanwhile."""
        record = msgspec.structs.replace(record, supervisor=epoch.record.supervisor)
        await checked.save(self._env.disk, file_of(key, "start"), record)
        before, epoch.record = epoch.record, msgspec.structs.replace(record, supervisor=epoch.record.supervisor)
        return before

    async def _tell_changes(self, epoch: Epoch) -> None:
        if epoch.stream is not None and epoch.told:
            with contextlib.suppress(ConnectionError):
                for frame in self._launching.changes(epoch.record):
                    await epoch.stream.write(frame)

    async def follow(self, key: Key, epoch: Epoch) -> bool:
        """Follow an epoch until its end is known. The supervisor may be booting, alive, gone with its last state on
        disk, or dead. A damaged state file also shows that ranks were started: the next supervisor looks for them and
        starts none. False: an earlier agent wrote the record and died; no supervisor ever ran."""
        deadline_s = self._env.clock.now_s() + BOOT_S
        while not epoch.ended:
            if await self._listen(key, epoch):
                epoch.launches = 0
            if epoch.ended:
                break
            try:
                found = await stored(self._env, epoch.record.spec, file_of(key, "state"))
            except OSError as error:  # an unreadable state decides nothing: look again
                self._env.log.error("state cannot be read", job=key[0], epoch=key[1], why=str(error))
                await asyncio.sleep(UNREADABLE_S)
                continue
            state = read_state(found)
            state = None if state is None else believed(self._env, epoch.record.spec, state)
            if state is not None and state.ended:
                await self._end(key, epoch, state)
            elif epoch.forced or self._may_live(epoch, deadline_s):
                await asyncio.sleep(RETRY_S)
            elif found is None and epoch.found and epoch.record.supervisor is None:
                return False
            elif found is None and epoch.found and not epoch.launches:
                why = f"the record of what ran is gone on {self._env.host}; nothing is started twice under one epoch"
                await self._give_up(key, epoch, SupervisorState(), why)
            elif epoch.launches >= LAUNCHES_MAX:
                state = state or SupervisorState()
                if not state.pids:
                    state = msgspec.structs.replace(state, unstarted=self._fault(epoch, "job"))
                await self._give_up(key, epoch, state, self._no_start(key, epoch))
            else:
                deadline_s = self._env.clock.now_s() + BOOT_S
                await self._again(key, epoch)
        return True

    async def _launch(self, key: Key, epoch: Epoch) -> None:
        """Start a supervisor. OSError when its program cannot be started."""
        config = self._launching.config(epoch.record, self._lease(epoch))
        allowed = allowed_with(epoch, epoch.record.spec)
        process = await start_program(self._env, allowed, "supervisor", instance_of(key), config)
        epoch.launched = True
        epoch.record = msgspec.structs.replace(epoch.record, supervisor=process)
        try:
            await self._write(key, epoch)
        except OSError as error:  # it lives, and is found at its socket: these ranks did start
            self._env.log.warning("a supervisor's id is not written", job=key[0], epoch=key[1], why=str(error))

    async def _write(self, key: Key, epoch: Epoch) -> None:
        await checked.save(self._env.disk, file_of(key, "start"), epoch.record)

    def _lease(self, epoch: Epoch) -> RankLease | None:
        first = epoch.record.spec.lease
        if epoch.lease is not None or first is None:
            return epoch.lease
        return RankLease(self._env.clock.boot_s(), AGAIN_LEASE_S, first.grace_s, pause_s=0.0)

    def _may_live(self, epoch: Epoch, deadline_s: float) -> bool:
        """Whether the supervisor may live: without a recorded process id it may be booting until the deadline."""
        process = epoch.record.supervisor
        if process is None:
            return self._env.clock.now_s() < deadline_s
        return self._env.processes.find(process) is not None

    def _fault(self, epoch: Epoch, of_others: StartFault) -> StartFault:
        """Whose fault it is that a supervisor does not start. `of_others`: where it runs as another user, who may have
        seen to that."""
        return "host" if other_user(self._env, epoch.record.spec) is None else of_others

    def _no_start(self, key: Key, epoch: Epoch) -> str:
        log = self._env.disk.path(f"logs/{instance_of(key)}.log")
        if other_user(self._env, epoch.record.spec) is not None:
            log = f"journalctl -u 'covey-job:{key[0]}:{key[1]}:*'"
        return f"its supervisor does not start on {self._env.host}; see {log}"

    async def _give_up(self, key: Key, epoch: Epoch, state: SupervisorState, why: str) -> None:
        """Give these ranks no other supervisor: end what an earlier one may have left, and publish their end."""
        if other_user(self._env, epoch.record.spec) is not None:
            await self._end_surely(key, epoch)
        else:
            await self._end_left(epoch, state)
        await self._end_here(key, epoch, lost_of(epoch, state, why))

    async def _end_left(self, epoch: Epoch, state: SupervisorState) -> None:
        for pid in (*(pid for rank, pid in state.pids.items() if rank not in state.codes), *state.leaving):
            process = self._env.processes.find(pid)
            if process is not None:
                process.kill()
        for rank in epoch.record.spec.ranks[:1]:
            await end_marked(self._env, self._launching.command(epoch.record, rank).env)

    async def end_by_force(self, key: Key, epoch: Epoch, why: str) -> None:
        """End an epoch that runs as another user and whose supervisor does not end it."""
        epoch.forced = True
        await self._end_surely(key, epoch)
        await self._end_here(key, epoch, lost_of(epoch, epoch.state, why))

    async def _end_surely(self, key: Key, epoch: Epoch) -> None:
        """End all that runs of an epoch as another user: others may start in its place once its end is told."""
        await self._count_killed(key, epoch)
        while True:
            if await self.end_all(key):
                return
            await asyncio.sleep(UNREADABLE_S)

    async def end_all(self, key: Key) -> bool:
        """End all that runs of an epoch as another user, whatever its supervisor says of it. Whether that was
        possible."""
        try:
            await self._env.starter.end(*key)
        except OSError as error:
            self._env.log.error("processes of another user are not ended", job=key[0], epoch=key[1], why=str(error))
            return False
        return True

    async def _again(self, key: Key, epoch: Epoch) -> None:
        self._env.log.warning("the supervisor ended; starting another one", job=key[0], epoch=key[1])
        epoch.launches += 1
        try:
            await self._launch(key, epoch)
        except OSError as error:
            self._env.log.error("the supervisor cannot start", job=key[0], epoch=key[1], why=str(error))
            await asyncio.sleep(10 * RETRY_S)

    async def _listen(self, key: Key, epoch: Epoch) -> bool:
        """Handle the supervisor's frames until the connection ends: whether there was one."""
        try:
            stream = await self._env.bytes.connect(self._launching.socket(epoch.record.spec))
        except ConnectionError:
            return False
        if not is_theirs(self._env, epoch.record.spec, stream):
            stream.close()
            return False
        epoch.stream = stream
        try:
            if epoch.stop is not None:
                await stream.write(pack(epoch.stop))
            if epoch.lease is not None:
                await stream.write(pack(Renewed(epoch.lease)))
            while not epoch.ended:
                heard = await read_frame(stream, decoder)
                if isinstance(heard, RanksStatus) and (heard.job, heard.epoch) == key:
                    if not epoch.told:
                        epoch.told = True
                        await self._tell_again(epoch, stream)
                    await self._heard(key, epoch, believed(self._env, epoch.record.spec, heard.state))
                    self.tell_heals(key, epoch)
                    if other_user(self._env, epoch.record.spec) is not None:
                        await asyncio.sleep(PACE_S)
        except ConnectionError:
            return True
        finally:
            epoch.stream, epoch.told = None, False
            stream.close()
        return True

    async def _tell_again(self, epoch: Epoch, stream: ByteStream) -> None:
        """Tell this supervisor what it may not have heard yet: which ranks may be lost, which joined, and which
        left."""
        for rank, step in sorted(epoch.heals.items()):
            await stream.write(pack(HealRank(rank, step)))
        for frame in self._launching.changes(epoch.record):
            await stream.write(frame)

    async def _heard(self, key: Key, epoch: Epoch, state: SupervisorState) -> None:
        before, epoch.state = epoch.state, state
        if state.ending != before.ending:
            self._ending_changed(*key)
        replaced = replaced_of(key, before, state) if epoch.started else []
        if replaced or (not epoch.launched and not before.pids and not state.codes):  # an earlier agent's ranks
            epoch.killed_before = await self._killed(key, epoch)
        for each in replaced:
            self._tell(each)
        if state.ended:
            await self._end(key, epoch, state)
        else:
            self._tell_started(key, epoch)
            for ended in ended_before_others(key, epoch, before):
                self._tell(ended)

    def tell_heals(self, key: Key, epoch: Epoch) -> None:
        """Tell whether the ranks may be lost, and who has the job's state, whenever that changes."""
        spec = epoch.record.spec
        ranks = [rank.rank for rank in spec.ranks] if epoch.record.changed else list(epoch.state.pids)
        now = epoch.started and not epoch.ended and may_be_lost(ranks, epoch.state)
        for rank, pid in epoch.state.pids.items():
            if epoch.said_to_have.get(rank, pid) is None:
                epoch.said_to_have[rank] = pid
        have = have_now(epoch)
        if now and not epoch.may_be_lost and self._may_say_again(epoch, have):
            return
        if (now, have) != (epoch.may_be_lost, epoch.have) and not epoch.ended:
            epoch.may_be_lost, epoch.have = now, have
            self._tell(heal_of(key, epoch))

    def _may_say_again(self, epoch: Epoch, have: Collection[int]) -> bool:
        """Whether processes that an earlier agent started are yet to say who has the state: what that agent said of
        them holds until then."""
        spec = epoch.record.spec
        more = bool(spec.carried) and any(rank.rank not in have for rank in spec.ranks)
        return more and self._env.clock.now_s() < epoch.awaited_until_s

    async def found(self, key: Key, epoch: Epoch) -> None:
        """Tell who has the state once the processes of an earlier agent had their time to say so."""
        epoch.awaited_until_s = self._env.clock.now_s() + JOIN_AGAIN_S
        await asyncio.sleep(JOIN_AGAIN_S)
        epoch.awaited_until_s = 0.0
        self.tell_heals(key, epoch)

    def _tell_started(self, key: Key, epoch: Epoch) -> None:
        """Tell that the ranks started: once, when all of them run, and again once ranks that joined them do, and those
        that left are gone."""
        if (epoch.changing or not epoch.started) and run_all(epoch, epoch.state) and not is_leaving(epoch):
            other = other_user(self._env, epoch.record.spec) is not None
            if other and (epoch.changing or not epoch.launched) and not epoch.ended:
                self._env.spawn(f"limits of {key[0]}.{key[1]}", self._limit_again(key, epoch))
            epoch.started, epoch.changing = True, False
            self._tell(started_of(key, epoch))

    async def _limit_again(self, key: Key, epoch: Epoch) -> None:
        """Let limits follow ranks that left, which are gone."""
        async with epoch.changes:
            if epoch.ended or epoch.changing or is_leaving(epoch):
                return
            try:
                await limit_again(self._env, epoch.record.spec)
                epoch.allowed = ()
            except OSError as error:
                self._env.log.error("limits stay as they were", job=key[0], epoch=key[1], why=str(error))

    async def _end(self, key: Key, epoch: Epoch, state: SupervisorState) -> None:
        await self._count_killed(key, epoch)
        if epoch.ended:
            return
        epoch.state, epoch.ended = state, True
        if epoch.launched:
            self._tell_started(key, epoch)  # ranks that ended before they could be seen running
        epoch.over.set()
        ended = ended_of(key, epoch)
        self._env.log.info("ranks ended", job=key[0], epoch=key[1], codes=ended.codes, why=state.reason)
        self._tell(ended)

    async def _count_killed(self, key: Key, epoch: Epoch) -> None:
        """Note what the kernel killed, as long as it still counts: until all that runs of the epoch is ended."""
        if other_user(self._env, epoch.record.spec) is None:
            return
        said = await self._env.starter.memory_peak(*key)
        if said is not None and said.killed > epoch.killed_before:
            epoch.oom = MemoryKilled(said.killed - epoch.killed_before, said.peak_bytes, said.limit_bytes)

    async def _killed(self, key: Key, epoch: Epoch) -> int:
        """Processes of the epoch that the kernel has killed so far."""
        if other_user(self._env, epoch.record.spec) is None:
            return 0
        said = await self._env.starter.memory_peak(*key)
        return 0 if said is None else said.killed

    async def _end_here(self, key: Key, epoch: Epoch, state: SupervisorState) -> None:
        """Write down an end that no supervisor wrote, so that it is published again after a restart."""
        try:
            await self._write(key, epoch)
            await checked.save(self._env.disk, file_of(key, "state"), state)
        except OSError as error:
            self._env.log.error("an end cannot be written", job=key[0], epoch=key[1], why=str(error))
        await self._end(key, epoch, state)
