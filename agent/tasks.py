"""Tasks that are referenced until they end, cancelled together, and whose exceptions are always logged."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from covey.ports.log import Logger


class Tasks:
    """`Env.spawn` for a real process. `fatal(name, error)` is called with an unhandled exception."""

    def __init__(self, log: Logger, fatal: Callable[[str, BaseException], None]) -> None:
        self._log, self._fatal = log, fatal
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._log.error("task failed", task=task.get_name(), why=repr(error), exc_info=error)
            self._fatal(task.get_name(), error)

    async def cancel_all(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
