"""The supervisor: one process per job, epoch and host, between the agent and the ranks, so that they outlive the agent.

    agent --start--> supervisor --start--> rank 0, rank 1, ...      each rank: own session, group and log file
      |                  |
      +--- unix socket --+----> disk: EPOCH.state, replaced whole at every step

An agent may ask for the state of the ranks (`RanksStatus`, sent on connecting and at every change), for their stop, and
for the supervisor's exit. The state is on disk before it is sent, and the supervisor exits by itself once the last exit
status is there: an agent that was away reads the file.

    Stop --> notice: the file COVEY_PREEMPT_FILE, Status to the agent, which tells the ranks that joined it
         --> the stop signal to each rank's main process, and to no other: the workers of a data loader live until it
             has saved;
             to one that takes over only once it has the job's state, or in the last quarter of the grace
             SIGCONT to all of the rank: who is suspended (`covey.ports.devices.Devices`) could not save
             a main process that ended and left others (a shell, say): it to those that it had started itself
         --> the grace; once, a rank may ask for more (`Extend`)
         --> SIGKILL to all that is left of the ranks

It holds the ranks' lease (`plugins.base.RankLease`), which its agent renews (`Renewed`) with what the log's leader
says. One that runs out means that this host may be cut off and that another is about to run these ranks, so they get
the notice, the stop signal and SIGKILL from here, whatever the agent does: it may be dead or stopped. They count as
lost. The stop signal is SIGTERM, unless the job chose another.
Ranks that may all be lost stand still long before (`agent/jobs/supervisor/rank_lease.py`); what ends them then is
SIGKILL.

Started once. The unix socket is the claim: two supervisors for one epoch cannot both listen. One that finds a state
file takes over from a supervisor that died: it starts nothing, finds the ranks again that the other had started, lets
them run on, and learns how they ended from what their shims wrote (`Processes.resume`). Every other process with the
marks of this epoch is ended. So an agent that does not know how far it got starts a supervisor again.

A rank that may be lost (`Heal`: its script called `job.state`) is started again alone when it fails, or is killed
(`agent.jobs.successors`); whatever its process left running is ended.

A rank that leaves (`LeaveRanks`) is killed with all that it started. Processes of an elastic job do, when other ones
carry its ranks: the supervisor forgets it, and its number alone is kept.

Any other rank that fails takes its siblings on this host with it after `SIBLINGS_S`, since collective operations would
wait for it for ever; codes are kept in the order in which the ranks ended, so the first that failed comes first.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any

import msgspec

from agent.jobs.successors import (
    after_leaving,
    after_loss,
    command_of,
    healing_said,
    incarnation_of,
    stand_still_unconfirmed,
)
from agent.jobs.supervision import (
    CANNOT_START,
    DISK_RETRY_S,
    EXTENSION_MAX_S,
    SIGKILL,
    SIGTERM,
    UNKNOWN,
    EndStuck,
    Extend,
    ForgetRanks,
    Frame,
    HealRank,
    JoinRanks,
    KeepStacks,
    LeaveRanks,
    RankHealing,
    RanksStatus,
    RankStart,
    Renewed,
    StopRanks,
    SupervisorConfig,
    SupervisorState,
    asked_to_end,
    claimed_socket,
    extended,
    fault_of,
    read_state,
    stored_state,
)
from agent.jobs.supervisor.connected_agents import ConnectedAgents
from agent.jobs.supervisor.rank_lease import HeldLease
from agent.jobs.supervisor.rank_processes import RankProcesses, SpareEnded
from covey.core.units import format_seconds
from covey.hooks.stacks import SIGNAL as STACKS
from covey.ports.env import Env
from covey.ports.processes import Command, Process, ProcessId
from covey.wire import checked
from covey.wire.frames import FrameError
from plugins.base import Program, RankLease

SIBLINGS_S = 3.0
"""Seconds between a rank's failure and SIGTERM to its siblings: they usually fail by themselves, with codes that say
more than -15."""
LAST_PART = 0.25
"""The last part of the grace, in which a process that takes over gets the stop signal though it has no state yet."""
NOTICE_S = 1.0
"""The most seconds for which the disk is waited for between a Stop and the stop signal."""


class Supervisor:
    """The supervisor of one `SupervisorConfig`."""

    def __init__(self, env: Env, config: SupervisorConfig) -> None:
        self._env, self._config = env, config
        self._state = SupervisorState(changed=config.changed)
        """The state of the ranks. The part of it that is on disk (or cannot be written) is sent."""
        self._processes: dict[int, Process] = {}
        self._ranks_here = RankProcesses(env, config)
        self._lease = HeldLease(config.lease)
        self._suspended = False
        """Whether the ranks are suspended: no leader confirms them, and they may be lost."""
        self._goes_on = asyncio.Event()
        """Set while the ranks are not suspended, or about to end: otherwise nothing is started here, since others may
        run in its place."""
        self._goes_on.set()
        self._waits: set[asyncio.Task[None]] = set()  # for ranks that run, or leave
        self._wait_of: dict[int, asyncio.Task[None]] = {}
        """For each rank, the newest of `_waits`: it is over once all processes of the rank are."""
        self._comes: list[RankStart] | None = []
        """Ranks that are to join while the first ones start; None: the first ones have started."""
        self._leave: LeaveRanks | None = None
        """What was heard of ranks that leave while the first ones start."""
        self._without_state: set[int] = set()
        """Ranks whose process takes over and has not said yet that it has the job's state. It would die of the stop
        signal, and the others, which wait for it, could not save."""
        self._stuck: dict[int, str] = {}  # ranks that were ended because others waited in vain -> why
        self._over = self._taken_over = False
        self._stopping = asyncio.Event()
        self._forgotten = asyncio.Event()
        self._agents = ConnectedAgents(config, self._heard)

    async def run(self) -> None:
        config = self._config
        async with claimed_socket(self._env, config.socket, self._agents.serve, config.agent_uid) as first:
            if not first:
                return
            self._ranks_here.adopt()
            try:
                stored = await stored_state(self._env, self._config.state)
            except OSError as error:
                await self._ranks_here.end_unknown()
                await self._end_unstarted(f"the state directory cannot be read: {error}")
            else:
                if stored is None:
                    await self._supervise(self._start_all)
                else:
                    self._state = self._agents.said = read_state(stored) or SupervisorState()
                    if not self._state.ended:
                        await self._supervise(self._take_over)
            await self._agents.say_goodbye()

    async def _end_unstarted(self, why: str) -> None:
        for start in self._config.ranks:
            self._ended(start.rank, CANNOT_START)
        self._state = msgspec.structs.replace(self._state, reason=why, unstarted="host")
        await self._save(ended=True)

    # ---- the ranks ----

    async def _supervise(self, begin: Callable[[], Awaitable[str]]) -> None:
        work = asyncio.get_running_loop().create_task(self._ranks(begin), name="ranks")
        while not work.done():
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                # SIGTERM: ranks without a supervisor would be orphans. A second one does not wait for the grace.
                grace_s = self._config.grace_s if self._state.ending is None else 0.0
                self._ask_to_stop(grace_s, "their supervisor was told to end")

    async def _ranks(self, begin: Callable[[], Awaitable[str]]) -> None:
        """Run the ranks. `begin` fills in the processes; it returns why they cannot run, or an empty string."""
        self._env.spawn("stopper", self._stopper())
        self._env.spawn("lease", self._keep_lease())
        try:
            await checked.save(self._env.disk, self._config.state, self._state)
        except OSError as error:
            if not self._state.pids:
                self._over = True
                await self._end_unstarted(f"the state directory cannot be written: {error}")
                return
            self._env.log.error("state cannot be written", why=str(error))
        reason = await begin()
        if reason:
            self._ask_to_stop(0.0, reason)
        comes, self._comes = self._comes or [], None
        comes = [start for start in comes if start.rank not in {*self._processes, *self._state.codes}]
        self._wait_for({rank: self._wait(rank, process) for rank, process in sorted(self._processes.items())})
        self._wait_for({start.rank: self._join(start) for start in comes})
        if self._leave is not None:
            self._leaves(self._leave)
        while self._waits:
            await asyncio.wait(self._waits, return_when=asyncio.FIRST_COMPLETED)
            self._waits -= {task for task in self._waits if task.done() and task.result() is None}
        await self._ranks_here.end_strays(self._left_s, self._state.ending is not None)
        if self._taken_over:
            await self._ranks_here.end_unknown()  # what a rank left behind may have another parent
        found = [start.command for start in self._config.ranks] if self._taken_over else []
        await self._ranks_here.clear_containers(found)
        self._over = True
        await self._save(ended=True)
        self._env.log.info("all ranks ended", codes=self._state.codes, reason=self._state.reason)

    async def _start_all(self) -> str:
        """Start all ranks. Returns why one could not be started; empty when all run, or when they were told to stop
        before."""
        reason = ""
        self._have_come()
        for start in self._config.ranks:
            if self._state.ending is not None or reason:
                self._ended(start.rank, CANNOT_START if reason else -SIGTERM)
                continue
            try:
                process = await self._start_first(start.command)
            except OSError as error:
                at_fault = error.filename or start.command.argv[0]
                reason = f"rank {start.rank} cannot start: {at_fault}: {error.strerror or error}"
                self._state = msgspec.structs.replace(self._state, unstarted=fault_of(error))
                self._ended(start.rank, CANNOT_START)
                continue
            self._processes[start.rank] = process
            self._state = msgspec.structs.replace(self._state, pids={**self._state.pids, start.rank: process.id})
            if self._state.ending is not None:
                process.signal(self._config.stop_signal)
            await self._save()
        return reason

    def _wait_for(self, works: dict[int, Coroutine[Any, Any, None]]) -> None:
        self._wait_of |= {rank: asyncio.get_running_loop().create_task(work) for rank, work in works.items()}
        self._waits |= {self._wait_of[rank] for rank in works}

    def _joins(self, starts: Sequence[RankStart], replaces: bool) -> None:
        """Let these ranks come here, while those that ran here before keep running. Not once all those have ended: then
        the gang has."""
        if replaces:
            new = {start.rank: start for start in starts}
            ranks = tuple(new.get(start.rank, start) for start in self._config.ranks)
            self._config = msgspec.structs.replace(self._config, ranks=ranks)
        known = {start.rank for start in self._config.ranks}
        comes = [start for start in starts if start.rank not in known]
        if not comes or (self._comes is None and not self._waits):
            return
        ranks, joined = (*self._config.ranks, *comes), (*self._config.joined, *(start.rank for start in comes))
        self._config = msgspec.structs.replace(self._config, ranks=ranks, joined=joined)
        self._have_come()
        if self._comes is None:
            self._wait_for({start.rank: self._join(start) for start in comes})
        else:
            self._comes += comes

    def _leaves(self, frame: LeaveRanks) -> None:
        """Let these ranks end at once, without a trace but their number. Their processes are in the state until nothing
        is left of them: they may outlive this supervisor."""
        if self._comes is not None:
            self._leave = frame
            return
        if frame.changed <= self._state.changed:
            return
        self._let_go(frame.ranks)
        self._wait_until_left(frame)

    def _let_go(self, ranks: Collection[int]) -> None:
        """Forget these ranks, and kill their processes."""
        config, state = self._config, self._state
        for rank, process in sorted(self._processes.items()):
            if rank in ranks and not self._has_left(rank):
                self._env.log.info("a rank leaves", rank=rank, pid=process.id.pid)
                process.kill()
        known = {*state.pids, *state.codes, *state.healing, *(start.rank for start in config.ranks)} & set(ranks)
        here = tuple(start for start in config.ranks if start.rank not in ranks)
        joined = tuple(rank for rank in config.joined if rank not in ranks)
        self._config = msgspec.structs.replace(config, ranks=here, joined=joined)
        self._state = msgspec.structs.replace(
            state,
            pids={rank: process for rank, process in state.pids.items() if rank not in ranks},
            codes={rank: code for rank, code in state.codes.items() if rank not in ranks},
            healing=state.healing | {rank: after_leaving(state.healing.get(rank)) for rank in sorted(known)},
            leaving=(*state.leaving, *(process for rank, process in state.pids.items() if rank in ranks)),
        )

    def _has_left(self, rank: int) -> bool:
        return all(start.rank != rank for start in self._config.ranks)

    def _wait_until_left(self, frame: LeaveRanks) -> None:
        self._waits.add(asyncio.get_running_loop().create_task(self._have_left(frame)))

    async def _have_left(self, frame: LeaveRanks) -> None:
        """Note that ranks have left, once nothing of them runs any more."""
        leaving = self._state.leaving
        await self._save()
        if waits := [self._wait_of[rank] for rank in frame.ranks if rank in self._wait_of]:
            await asyncio.wait(waits)
        for process in leaving:  # one that ended before it left may have left others running
            await self._ranks_here.end_found(process)
        left = tuple(process for process in self._state.leaving if process not in leaving)
        changed = max(frame.changed, self._state.changed)
        self._state = msgspec.structs.replace(self._state, changed=changed, leaving=left)
        await self._save()

    def _have_come(self) -> None:
        """Note that what came here from another host heals: it would not have come otherwise."""
        healing = {rank: RankHealing(0, has_had_state=False) for rank in self._config.came} | self._state.healing
        self._state = msgspec.structs.replace(self._state, healing=healing)

    async def _join(self, start: RankStart) -> None:
        process = await self._start_successor(start.rank, UNKNOWN)
        if process is not None:
            await self._wait(start.rank, process)
            return
        if self._has_left(start.rank):
            return
        if self._state.ending is None:
            why = f"rank {start.rank}, which came from another host, cannot start here"
            self._state = msgspec.structs.replace(self._state, lost=True, reason=self._state.reason or why)
            self._env.spawn("siblings", self._stop_siblings(start.rank, CANNOT_START))
        self._ended(start.rank, CANNOT_START)
        await self._save()

    async def _wait(self, rank: int, process: Process) -> None:
        ended: Process | None = process
        while ended is not None:
            code = await ended.wait()
            del self._processes[rank]
            self._without_state.discard(rank)
            self._ask_the_rest()
            lost, ended = ended.id, await self._start_successor(rank, code, ended.id)
            if ended is not None:
                self._stuck.pop(rank, None)
        if self._has_left(rank):
            self._stuck.pop(rank, None)
            await self._ranks_here.end_rest_of(lost)
            return
        if code is None and self._state.ending is None:
            why = f"it is not known how rank {rank} ended: this machine was restarted, or the rank's shim was killed"
            self._state = msgspec.structs.replace(self._state, lost=True, reason=self._state.reason or why)
        elif rank in self._stuck and self._state.ending is None:
            self._state = msgspec.structs.replace(self._state, reason=self._state.reason or self._stuck[rank])
        self._ended(rank, UNKNOWN if code is None else code)
        if code != 0 and self._processes and self._state.ending is None:
            self._env.spawn("siblings", self._stop_siblings(rank, UNKNOWN if code is None else code))
        await self._save()
        await self._ranks_here.ask_strays(self._left_s)

    async def _start_successor(self, rank: int, code: int | None, lost: ProcessId | None = None) -> Process | None:
        """Start a process in place of a rank's process that ended; None: the rank ended. Its number is on disk before
        it starts."""
        is_over = self._state.ending is not None or self._has_left(rank)
        then = None if is_over else after_loss(self._state.healing.get(rank), code)
        if then is None:
            return None
        self._env.log.warning("a rank is started again", rank=rank, code=code, incarnation=then.incarnation)
        self._state = msgspec.structs.replace(self._state, healing={**self._state.healing, rank: then})
        await self._save()
        await self._ranks_here.end_rest_of(lost)
        self._stand_still_or_go_on()
        await self._goes_on.wait()
        if self._state.ending is not None or self._has_left(rank):
            return None
        start = next(start for start in self._config.ranks if start.rank == rank)
        try:
            process = await self._start(command_of(start, then.incarnation, then.has_had_state))
        except SpareEnded:
            return await self._start_successor(rank, -SIGKILL)
        except OSError as error:
            self._env.log.error("a rank cannot be started again", rank=rank, why=str(error))
            return None
        self._processes[rank] = process
        if self._has_left(rank):
            process.kill()
            return process
        self._without_state.add(rank)
        self._state = msgspec.structs.replace(self._state, pids={**self._state.pids, rank: process.id})
        await self._save()
        return process

    async def _start_first(self, command: Command) -> Process:
        try:
            return await self._start(command)
        except SpareEnded:
            return await self._env.processes.start(command)

    async def _start(self, command: Command) -> Process:
        return await self._ranks_here.start(command, self._processes.values())

    def _heal(self, rank: int, step: int) -> None:
        """Note that this rank may be lost. The agent repeats it whenever it connects."""
        if rank in self._without_state:
            self._without_state.discard(rank)
            if self._state.signalled and rank in self._processes:
                self._processes[rank].signal(self._config.stop_signal)
        known = self._state.healing.get(rank)
        said = healing_said(known, step)
        if said != known and any(start.rank == rank for start in self._config.ranks):
            self._state = msgspec.structs.replace(self._state, healing={**self._state.healing, rank: said})
            self._env.spawn("heals", self._save())

    def _end_stuck(self, rank: int, pid: int, why: str) -> None:
        process = self._processes.get(rank)
        if process is not None and process.id.pid == pid and self._state.ending is None:
            self._env.log.warning("a rank is stuck and ended", rank=rank, pid=pid, why=why)
            self._stuck[rank] = why
            process.kill()

    async def _stop_siblings(self, rank: int, code: int) -> None:
        await asyncio.sleep(SIBLINGS_S)
        if self._processes and not self._has_left(rank):
            how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
            why = self._stuck.get(rank, f"rank {rank} {how}")
            self._ask_to_stop(self._config.grace_s, f"{why}; the job's other ranks on this host were stopped")

    def _ended(self, rank: int, code: int) -> None:
        self._state = msgspec.structs.replace(self._state, codes={**self._state.codes, rank: code})

    # ---- the lease ----

    def _renewed(self, lease: RankLease) -> None:
        self._lease.renewed(lease, self._env.clock.boot_s())
        self._stand_still_or_go_on()

    async def _keep_lease(self) -> None:
        """Keep the lease until the ranks are over, or the lease is. An expired lease stays expired: other ranks may be
        about to start under the next grant, and a renewal that arrives now was requested before."""
        while not self._over:
            now_s = self._env.clock.boot_s()
            if self._lease.is_over(now_s):
                self._lease_ran_out(now_s)
                return
            self._stand_still_or_go_on()
            await asyncio.sleep(self._lease.look_in_s(now_s, self._may_stand_still))

    @property
    def _may_stand_still(self) -> bool:
        ranks = [start.rank for start in self._config.ranks]
        return self._state.ending is None and stand_still_unconfirmed(ranks, self._state)

    def _stand_still_or_go_on(self) -> None:
        now_s, before = self._env.clock.boot_s(), self._suspended
        self._suspended = self._may_stand_still and self._lease.stands_still(now_s)
        if self._suspended != before:
            (self._goes_on.clear if self._suspended else self._goes_on.set)()
            silent = format_seconds(self._lease.silent_s(now_s))
            self._env.log.warning("ranks suspended" if self._suspended else "ranks continue", unconfirmed_for=silent)
        for process in self._processes.values():
            if self._suspended:
                process.stand_still()
            elif before:
                process.go_on()

    def _lease_ran_out(self, now_s: float) -> None:
        """Stop the ranks since their lease ran out. Ranks that are being stopped for another reason keep that reason,
        and get no more grace than the lease's."""
        if self._state.ending is None:
            self._state = msgspec.structs.replace(self._state, lost=True)
        why = (
            f"no leader has confirmed these ranks for {format_seconds(self._lease.silent_s(now_s))}: {self._env.host} "
            "may be cut off, so another host will run them"
        )
        grace_s = 0.0 if self._lease.lease is None else self._lease.lease.grace_s
        self._ask_to_stop(min(grace_s, self._config.grace_s), why, firm=True)

    # ---- stopping ----

    def _ask_to_stop(self, grace_s: float, why: str, firm: bool = False) -> None:
        """Ask the ranks to stop. `firm`: no rank may ask for more time. A repeated request with an equal grace changes
        nothing."""
        grace_s = 0.0 if self._suspended else grace_s  # others may run in their place by now
        self._goes_on.set()
        reason = why if self._state.ending is None else self._state.reason
        ending = asked_to_end(self._state.ending, grace_s, self._env.clock.boot_s(), firm)
        self._state = msgspec.structs.replace(self._state, reason=reason, ending=ending)
        self._stopping.set()

    def _extend(self, seconds: float) -> None:
        """Extend the grace, since a rank asked for more time. Its agent has already refused a request that cannot be
        granted."""
        ending = extended(self._state.ending, seconds, self._env.clock.boot_s())
        if ending is None:
            return
        self._env.log.info("a rank asked for more time", seconds=min(seconds, EXTENSION_MAX_S))
        self._state = msgspec.structs.replace(self._state, ending=ending)
        self._stopping.set()
        self._env.spawn("extended", self._save())

    def _left_s(self) -> float:
        """Seconds left of the grace; 0 also for ranks that were not asked to stop."""
        ending = self._state.ending
        return 0.0 if ending is None else max(0.0, ending.kill_at_s - self._env.clock.boot_s())

    async def _stopper(self) -> None:
        await self._stopping.wait()
        self._env.log.info("stopping", why=self._state.reason)
        if self._left_s() > 0 and not self._state.signalled:
            await self._give_notice()
            for rank, process in sorted(self._processes.items()):
                if rank not in self._without_state:
                    process.signal(self._config.stop_signal)
                process.go_on()
            self._state = msgspec.structs.replace(self._state, signalled=True)
            self._env.spawn("signalled", self._save())
            self._ask_the_rest()
        while (left_s := self._left_s()) > 0:
            if left_s <= (last_s := self._config.grace_s * LAST_PART):
                self._ask_the_rest(late=True)
            self._stopping.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s - last_s if left_s > last_s and self._without_state else left_s):
                    await self._stopping.wait()
        while not self._over:
            for _, process in sorted(self._processes.items()):
                process.kill()
            await asyncio.sleep(0.2)

    def _ask_the_rest(self, late: bool = False) -> None:
        """Send the stop signal to processes without the job's state, too, once no other process of the job runs, or it
        is `late`."""
        whole = all(
            int(start.command.env.get("WORLD_SIZE", "0")) <= len(self._config.ranks) for start in self._config.ranks
        )
        alone = whole and self._processes.keys() <= self._without_state
        if self._state.signalled and (late or alone):
            for rank in sorted(self._without_state & self._processes.keys()):
                self._processes[rank].signal(self._config.stop_signal)
            self._without_state.clear()

    async def _give_notice(self) -> None:
        """Write the preemption file before the stop signal, so that a rank that gets it can read the reason and the
        grace. A disk that hangs delays it by `NOTICE_S` at most."""
        try:
            async with asyncio.timeout(NOTICE_S):
                await self._env.disk.replace(self._config.preempt, self._state.reason.encode())
                await self._save()
        except OSError as error:  # a TimeoutError too
            self._env.log.warning("no preemption file", why=str(error) or "the disk is slow")
            self._agents.tell(self._state)

    # ---- after a supervisor that died ----

    async def _take_over(self) -> str:
        """Find the ranks again that an earlier supervisor had started. None is started here: one that is missing was
        never started, or has no record and was ended just now."""
        self._taken_over = True
        self._let_go({*self._state.pids, *self._state.codes} - {start.rank for start in self._config.ranks})
        self._have_come()
        self._env.log.warning("an earlier supervisor died", pids=[found.pid for found in self._state.pids.values()])
        awaited = [start for start in self._config.ranks if start.rank not in self._state.codes]
        for start in awaited:
            self._resume(start)
        await self._ranks_here.end_unknown(spare=[process.id for process in self._processes.values()])
        if self._state.changed < self._config.changed:
            self._wait_until_left(LeaveRanks(self._config.changed, ()))
        missing = [start.rank for start in awaited if start.rank not in self._processes and not self._resume(start)]
        missing = [rank for rank in missing if await self._start_successor(rank, UNKNOWN) is None]
        for rank in missing:
            self._ended(rank, UNKNOWN)
        failed = [(rank, code) for rank, code in self._state.codes.items() if code != 0 and rank not in missing]
        if self._state.ending is not None:
            self._stopping.set()
        elif missing:
            self._state = msgspec.structs.replace(self._state, lost=True)
        elif failed:
            self._env.spawn("siblings", self._stop_siblings(*failed[0]))
        await self._save()
        return f"the supervisor of these ranks died while it started them; missing: {missing}" if missing else ""

    def _resume(self, start: RankStart) -> bool:
        """Resume a rank's process; whether an earlier supervisor started it. It may have ended since."""
        try:
            process = self._env.processes.resume(command_of(start, incarnation_of(self._state, start.rank)))
        except OSError as error:
            self._env.log.error("a rank's files cannot be read", rank=start.rank, why=str(error))
            return False
        if process is None:
            return False
        self._processes[start.rank] = process
        self._state = msgspec.structs.replace(self._state, pids={**self._state.pids, start.rank: process.id})
        return True

    # ---- the state: on disk before it is sent ----

    async def _save(self, ended: bool = False) -> None:
        """Save the state, then send it. When the disk fails the state is sent all the same. The next change writes
        everything again; the last one is tried again until it works, or until the agent has received it and sends
        Forget."""
        self._state = state = msgspec.structs.replace(self._state, ended=ended or self._state.ended)
        while True:
            try:
                await checked.save(self._env.disk, self._config.state, state)
            except OSError as error:
                self._env.log.error("state cannot be written", why=str(error))
            else:
                self._agents.tell(state)
                return
            self._agents.tell(state)
            if not ended or self._forgotten.is_set():
                return
            await asyncio.sleep(DISK_RETRY_S)

    def _heard(self, frame: Frame) -> None:
        match frame:
            case StopRanks(grace_s, why, firm):
                self._ask_to_stop(grace_s, why, firm)
            case Extend(seconds):
                self._extend(seconds)
            case Renewed(lease):
                self._renewed(lease)
            case HealRank(rank, step):
                self._heal(rank, step)
            case JoinRanks(ranks, replaces):
                self._joins(ranks, replaces)
            case LeaveRanks():
                self._leaves(frame)
            case KeepStacks():
                for process in self._processes.values():
                    process.signal_catchers(STACKS)
            case EndStuck(rank, pid, why):
                self._end_stuck(rank, pid, why)
            case ForgetRanks():
                self._forgotten.set()
            case RanksStatus():
                raise FrameError("an agent does not send Status")


async def run(env: Env, config: SupervisorConfig) -> None:
    await Supervisor(env, config).run()


PROGRAM = Program("supervisor", SupervisorConfig, run)
