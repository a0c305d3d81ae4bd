"""The escape guard: while a world runs, no code may reach the real clock, real chance, sockets, processes or threads.

A failure can be repeated only when the seed decides everything. So while a world is stepped, the usual ways out raise
`Escape` and name the caller. Libraries that need one of them for something that cannot change the story (a logging
record's time stamp) are listed in `ALLOWED`. Outside a world the guards let everything through, and they are taken off
when the last world stops.
"""

import builtins
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ALLOWED = frozenset(
    {
        "logging",  # a record's time stamp; never read back
        "_pytest",
        "pytest_timeout",
        "hypothesis",  # measures garbage collection with perf_counter
        "importlib",
        "coverage",
        "cryptography",  # draws nonces inside OpenSSL; ours come from env.entropy
        "threading",  # a lock's own bookkeeping
        "tempfile",
    }
)
"""Top-level packages that may call a guarded function while a world runs."""

OURS = frozenset({"covey", "gossip", "plugins", "agent", "chaos"})
"""Packages in which `open()` is guarded too, and names bound with `from time import ...` are replaced."""

_CLOCKS = ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns", "sleep")
_DICE = tuple(
    name for name in dir(random) if hasattr(random.Random, name) and name[0] != "_" and callable(getattr(random, name))
)
"""The module functions of `random`, which share one hidden generator."""


class Escape(RuntimeError):
    """Simulated code reached for the real world."""


def _caller(depth: int = 2) -> tuple[str, str]:
    frame = sys._getframe(depth)
    module = str(frame.f_globals.get("__name__", "?"))
    return module, f"{frame.f_code.co_filename}:{frame.f_lineno} ({module}.{frame.f_code.co_name})"


def _guard(what: str, original: Callable[..., Any], instead: str) -> Callable[..., Any]:
    def guarded(*args: Any, **options: Any) -> Any:
        if _active:
            module, where = _caller()
            if module.partition(".")[0] not in ALLOWED:
                raise Escape(f"{what} was called in a simulated rack by {where}: use {instead}")
        return original(*args, **options)

    guarded.__name__ = what
    guarded.__wrapped__ = original  # type: ignore[attr-defined]
    return guarded


def _guarded_open(original: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **options: Any) -> Any:
        if _active:
            module, where = _caller()
            if module.partition(".")[0] in OURS:
                raise Escape(f"open was called in a simulated rack by {where}: use env.disk")
        return original(*args, **options)

    return guarded


_active = 0
_undo: list[tuple[Any, str, Any]] = []
_found: tuple[int, list[tuple[Any, str, Any]]] = (0, [])
"""Number of modules at the last look, and what was replaced then: a story begins and ends to run several hundred
times, and looking through all modules each time took a fifth of it."""


def _replace(owner: Any, name: str, value: Any) -> None:
    _undo.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _install() -> None:
    global _found
    if _found[0] == len(sys.modules):
        for owner, name, value in _found[1]:
            _replace(owner, name, value)
        return
    _look_for_ways_out()
    _found = (len(sys.modules), [(owner, name, getattr(owner, name)) for owner, name, _ in _undo])


def _look_for_ways_out() -> None:
    originals: dict[int, Callable[..., Any]] = {}

    def patch(owner: Any, name: str, what: str, instead: str) -> None:
        original = getattr(owner, name)
        guarded = _guard(what, original, instead)
        originals[id(original)] = guarded
        _replace(owner, name, guarded)

    for name in _CLOCKS:
        patch(time, name, f"time.{name}", "env.clock or asyncio.sleep")
    for name in _DICE:
        patch(random, name, f"random.{name}", "env.rng")
    patch(os, "urandom", "os.urandom", "env.entropy")
    for name in ("uuid1", "uuid4"):
        patch(uuid, name, f"uuid.{name}", "env.entropy")
    for name in ("token_bytes", "token_hex", "token_urlsafe", "randbelow", "randbits", "choice"):
        patch(secrets, name, f"secrets.{name}", "env.entropy")
    patch(socket.socket, "__init__", "socket.socket", "env.bytes, env.links or env.datagrams")
    patch(subprocess.Popen, "__init__", "subprocess.Popen", "env.processes")
    patch(threading.Thread, "start", "threading.Thread.start", "a process of its own or the loop's executor")
    _replace(builtins, "open", _guarded_open(builtins.open))
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in OURS and name != __name__:
            for attribute, value in sorted(vars(module).items()):
                if callable(value) and id(value) in originals:
                    _replace(module, attribute, originals[id(value)])


def _remove() -> None:
    while _undo:
        owner, name, value = _undo.pop()
        setattr(owner, name, value)


@contextmanager
def escape_guard() -> Iterator[None]:
    """Guards that are on inside the `with`; may be nested (a world within a test of a world)."""
    global _active
    if not _active:
        _install()
    _active += 1
    try:
        yield
    finally:
        _active -= 1
        if not _active:
            _remove()
