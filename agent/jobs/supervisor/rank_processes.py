"""How a supervisor starts the processes of ranks, and ends what ranks leave behind."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from agent.jobs.spares.taking import AnswerLost, take
from agent.jobs.supervision import Adopting, SupervisorConfig, end_marked
from covey.ports.env import Env
from covey.ports.processes import Command, Process, ProcessId, RunsContainers

STRAYS_GRACE_S = 0.5
"""Seconds between SIGTERM and SIGKILL for what ranks left behind."""
LOOK_S = 0.1
"""Seconds between two looks for processes left of a rank whose main process ended while the rank was being stopped."""


class SpareEnded(Exception):
    """A spare had perhaps become the rank when its keeper died: it is ended, and its number is used up."""


class RankProcesses:
    """The processes of the ranks of one epoch."""

    def __init__(self, env: Env, config: SupervisorConfig) -> None:
        self._env, self._config = env, config
        self._contained: dict[str, Command] = {}
        """The commands that were started in containers, by the path of their files."""

    def adopt(self) -> None:
        if isinstance(self._env.processes, Adopting):
            self._env.processes.adopt()

    async def start(self, command: Command, living: Iterable[Process]) -> Process:
        """Start a rank's process, in a spare if there is one. `living`: the processes of the other ranks here. OSError
        when it cannot be started, SpareEnded when another process has to be started in place of this one."""
        if self._config.spares and command.container is None:
            try:
                found = await take(self._env, self._config.spares, command)
            except AnswerLost as lost:
                self._env.log.warning("spares are ended", why=str(lost))
                await self.end_unknown([process.id for process in living])
                if self._env.processes.resume(command) is not None:
                    raise SpareEnded(str(lost)) from lost
            else:
                if found is not None:
                    self._env.log.info("a rank begins in a spare", pid=found.id.pid)
                    return found
        started = await self._env.processes.start(command)
        if command.container is not None:
            self._contained[command.run] = command
        return started

    async def clear_containers(self, found: Iterable[Command] = ()) -> None:
        """Remove what is left of ranks' containers, once all ranks have ended. `found`: commands that an earlier
        supervisor may have started."""
        commands = [*self._contained.values(), *(each for each in found if each.container is not None)]
        if commands and isinstance(self._env.processes, RunsContainers):
            if why := await self._env.processes.clear_containers(commands):
                self._env.log.warning("containers are left", why=why)
            await self.end_strays(lambda: 0.0, are_stopped=True)  # what podman keeps running for the next command

    async def ask_strays(self, left_s: Callable[[], float]) -> None:
        """Send the stop signal, while ranks are being stopped, also to processes that an ended main process left
        running, which get the rest of the grace."""
        processes = self._env.processes
        while left_s() > 0:
            if not isinstance(processes, Adopting) or not processes.ask_strays(self._config.stop_signal):
                return
            await asyncio.sleep(LOOK_S)

    async def end_strays(self, left_s: Callable[[], float], are_stopped: bool) -> None:
        if isinstance(self._env.processes, Adopting):
            await self.ask_strays(left_s)
            strays = await self._env.processes.end_strays(0.0 if are_stopped else STRAYS_GRACE_S)
            if strays:
                self._env.log.info("ended what ranks left behind", processes=strays)

    async def end_rest_of(self, lost: ProcessId | None) -> None:
        """End whatever a rank's lost process left running."""
        if lost is not None and isinstance(self._env.processes, Adopting):
            await self._env.processes.end_rest_of(lost)

    async def end_found(self, id: ProcessId) -> None:
        """End a rank's process, which an earlier supervisor may have started, and whatever it left running."""
        process = self._env.processes.find(id)
        if process is not None:
            process.kill()
            await process.wait()
        await self.end_rest_of(id)

    async def end_unknown(self, spare: Sequence[ProcessId] = ()) -> None:
        """End whatever has the marks of this epoch, and is none of the spared processes."""
        variables = self._config.ranks[0].command.env if self._config.ranks else {}
        if unknown := await end_marked(self._env, variables, spare):
            self._env.log.warning("ended processes without a record", processes=unknown)
