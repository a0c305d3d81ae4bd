"""Clients of this process, which are closed when it ends, and abandoned in a child that it forks."""

import atexit
import os
import sys
import weakref
from typing import Protocol


class Client(Protocol):
    def close(self) -> None: ...

    def abandon(self) -> None:
        """Give up the connection in a forked child: it is the parent's, and its thread does not exist here."""


living: "weakref.WeakSet[Client]" = weakref.WeakSet()


def failed() -> bool:
    """Whether an exception that the script did not catch ends this process."""
    return getattr(sys, "last_value", None) is not None


def _close_all() -> None:
    for client in list(living):
        client.close()


def _abandon_all() -> None:
    for client in list(living):
        client.abandon()
    living.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
