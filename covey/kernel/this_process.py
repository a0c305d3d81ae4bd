"""Tell a process from its forked children. Connections, threads and shared memory belong to the process that made them:
a fork copies the object but not what is behind it, so parent and child would take one another's answers.

Every Covey object that holds such things asks here first. In another process it either makes its own (`RemoteMemory`)
or raises `OtherProcess`, which names the next step.
"""

import os
from typing import Any, ClassVar, NoReturn, Self

from covey.core.errors import CoveyError

_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


def this_process() -> tuple[int, int]:
    """The pid of this process, and how many forks led to it from the first one: a child in a pid namespace of its own
    may have its parent's pid. A fork made below Python is noticed by the pid only."""
    return os.getpid(), _forks


class OtherProcess(CoveyError):
    """An object is used in a process that did not make it, where it cannot work."""


def not_pickled(what: str, instead: str) -> NoReturn:
    """Raise TypeError, as Python does for whatever cannot be pickled."""
    why = "its connections, threads and memory belong to the process that made it"
    raise TypeError(f"{what} cannot be pickled: {why}; next: {instead}")


class OfOneProcess:
    """A base of classes whose objects work only in the process that made them. They cannot be pickled."""

    _kind: ClassVar[str]
    """Name of the object for people, such as `the tensors of a job`."""
    _instead: ClassVar[str]
    """What to do in another process, for people."""
    _process: tuple[int, int]

    def __new__(cls, *_args: Any, **_more: Any) -> Self:
        made = super().__new__(cls)
        made._process = this_process()
        return made

    @property
    def is_elsewhere(self) -> bool:
        return self._process != this_process()

    def _check_process(self, what: str) -> None:
        """OtherProcess in any process but the one that made the object; `what` says what did not work there."""
        if self.is_elsewhere:
            why = (
                f"{self._kind} belong to process {self._process[0]}, and this is process {os.getpid()}:"
                " a forked process does not get connections, threads and shared memory"
            )
            raise OtherProcess(what, why, self._instead)

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        not_pickled(self._kind, self._instead)
