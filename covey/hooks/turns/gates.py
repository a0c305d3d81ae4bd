"""Where a script that only has hooks asks for its turn to compute, and how it is seen that the script waits.

NativeTurns   before each operator of PyTorch; a native thread looks at the script (`covey/hooks/gate/turns.cpp`)
PolledTurns   before each module of PyTorch where no gate was built, after each jitted call of JAX
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from covey.hooks.gate.native import NativeGate
from covey.hooks.limits.sharing import Stops
from covey.hooks.thread_state import ThreadState, others_run
from covey.tensors.turns.holder import ProcessTurns

LOOK_S = 0.004
"""Seconds between two looks whether the script waits, without a native gate."""
IDLE_SHARE = 0.2
"""Share of one processor below which a process whose script's thread sleeps computes nothing."""
Ask = Callable[[], None]
"""Returns once the script may compute."""
Word = tuple[Any, int]
"""Where a word lies that says whether this process may compute (`ProcessTurns.comp_word`)."""


class TurnGate(Protocol):
    """One way to ask for turns. All but what is asked is called by the thread of `HookedTurns`."""

    def begin(self, turns: ProcessTurns, word: Word, ask: Ask, script: threading.Thread) -> None:
        """Have this thread of the script ask from now on, where this process may not compute by this word."""

    def end(self) -> None:
        """Ask no more: nothing is called in the script."""

    def await_rest(self, within_s: float) -> bool:
        """Wait until the process may compute and its script waits for something, or `within_s` seconds. Whether it
        waits."""


class NativeTurns:
    """Operators of PyTorch, by the native gate."""

    def __init__(self, native: NativeGate) -> None:
        self._native = native

    def begin(self, turns: ProcessTurns, word: Word, ask: Ask, script: threading.Thread) -> None:
        self._native.turns(*word, ask, script.native_id or 0)

    def end(self) -> None:
        self._native.no_turns()

    def await_rest(self, within_s: float) -> bool:
        return self._native.await_rest(within_s)


class PolledTurns:
    """Calls that Python sees."""

    def __init__(self, stops: Stops) -> None:
        self._stops = stops
        self._turns: ProcessTurns | None = None
        self._script: threading.Thread | None = None
        self._state = ThreadState()

    def begin(self, turns: ProcessTurns, word: Word, ask: Ask, script: threading.Thread) -> None:
        self._turns, self._script = turns, script

        def before() -> None:
            if threading.get_ident() == script.ident:
                ask()

        self._stops.take_out()
        self._stops.put_in(before)

    def end(self) -> None:
        self._stops.take_out()

    def await_rest(self, within_s: float) -> bool:
        end_s = time.monotonic() + within_s
        while (began_s := time.monotonic()) < end_s:
            used_s, has_comp = time.process_time(), self._has_comp
            time.sleep(LOOK_S)
            used = (time.process_time() - used_s) / (time.monotonic() - began_s)
            if has_comp and self._has_comp and used < IDLE_SHARE and not self._script_runs() and not others_run():
                return True
        return False

    @property
    def _has_comp(self) -> bool:
        return self._turns is not None and self._turns.has_comp

    def _script_runs(self) -> bool:
        return self._script is None or self._state.runs(self._script.native_id or 0)
