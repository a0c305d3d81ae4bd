"""The turns to compute of a script that only has hooks (Harmony §4.3.1): it takes COMP when it computes, and gives it
when it waits.

    an operator, without COMP       ask: the script waits here for its turn
    a mini-batch ended              COMP is given if another job waits for it; the next operator asks again
    waits for a batch, or for       COMP is given
      others (`Work.wait`)
    sleeps, or waits for anything   COMP is given, some milliseconds later: a thread sees that nothing is computed
      else (within DDP, a file)

A turn is never held while something is waited for, so jobs on several hosts do not wait for one another in a circle.
What a collective sends goes out in threads of its framework, which receive and wait by the same calls, so it takes no
turn to send (COMM).

Nothing is called in the script while no other job is on the page, nor where sums tell when a script computes.
"""

import os
import threading
from collections.abc import Callable
from types import TracebackType

from covey.hooks.turns.gates import TurnGate
from covey.tensors.turns.holder import ProcessTurns

LOOK_S = 0.4
"""Most seconds until it is seen that another job came to the page, or that none is there any more."""
OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


class HookedTurns:
    """The turns of this process, whatever frameworks it uses (`of_process`). The hooks call `batch_ended` and `waits`
    in the script's threads."""

    def __init__(self) -> None:
        self.on = False
        """Whether turns are taken now: the one thing that hooks look at."""
        self._turns: ProcessTurns | None = None
        self._gates: list[TurnGate] = []
        self._failed: Callable[[BaseException], None] = lambda _error: None
        self._script = threading.main_thread()
        self._asking: object = None
        """Where the gates look, whose thread asks, and how many gates there are; None: they do not ask."""
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._broken = False
        os.register_at_fork(after_in_child=self._forked)

    def gains(self, gate: TurnGate) -> None:
        """Add the gate of a framework. The first one says when the script waits."""
        self._gates.append(gate)
        self._wake()

    def takes(self, turns: ProcessTurns, failed: Callable[[BaseException], None]) -> None:
        """From now on these are the turns of this process. `failed` hears of our own errors."""
        self._turns, self._failed = turns, failed
        turns.hooks_changed = self._wake
        self._wake()

    # ---- the script's threads ----

    def batch_ended(self, finish: Callable[[], object] = lambda: None) -> None:
        """A mini-batch ended in this thread, which is where a turn ends if another job waits for one. `finish` waits
        until the device is done with it."""
        turns = self._turns
        if self.on and turns is not None:
            self._script_is(threading.current_thread())
            if turns.comp_wanted:
                finish()
                turns.rests()

    def waits(self) -> None:
        """This thread begins to wait for input or for other ranks."""
        turns = self._turns
        if self.on and turns is not None and threading.get_ident() == self._script.ident:
            turns.rests()

    def _script_is(self, thread: threading.Thread) -> None:
        if thread is not self._script:
            self._script = thread
            self._changed.set()

    def _ask(self) -> None:
        """Wait for the turn. What a signal's handler raises meanwhile is the script's."""
        turns = self._turns
        if turns is None or self._broken:
            return
        try:
            turns.begins()
        except Exception as error:
            if not is_ours(error.__traceback__):
                raise
            self._break(error)

    def _break(self, error: BaseException) -> None:
        """Take no turns any more, since an error of ours came. The first one is told."""
        if not self._broken:
            self._broken = True
            self._failed(error)
            self._changed.set()

    # ---- the thread that sees what is waited for ----

    def _wake(self) -> None:
        turns = self._turns
        with self._starting:
            if turns is not None and turns.on and self._gates and self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="covey-rests", daemon=True)
                self._thread.start()
        self._changed.set()

    def _watch(self) -> None:
        while not self._over():
            self._changed.clear()
            if not self._looked():
                self._changed.wait(LOOK_S)

    def _looked(self) -> bool:
        """Look once whether the script waits, which takes `LOOK_S` where it does not. False where gates do not ask."""
        turns = self._turns
        try:
            if turns is None or not self._switched(turns):
                return False
            if self._gates[0].await_rest(LOOK_S):
                turns.rests()
            return True
        except Exception as error:
            self._break(error)
            return False

    def _over(self) -> bool:
        """Whether this thread ends, since the turns are closed and no others took their place."""
        turns = self._turns
        if turns is not None and not turns.is_closed:
            return False
        try:
            self._off()
        except Exception as error:
            self._break(error)
        with self._starting:
            over = self._turns is turns
            if over:
                self._thread = None
        return over

    def _switched(self, turns: ProcessTurns) -> bool:
        """Have the gates ask, or not. Whether they do."""
        word = None if self._broken else turns.comp_word
        if word is None:
            self._off()
            turns.rests()
            return False
        script, asks = self._script, len(self._gates)
        if (word, script, asks) != self._asking:
            self._asking = word, script, asks
            for gate in self._gates:
                gate.begin(turns, word, self._ask, script)
        self.on = True
        return True

    def _off(self) -> None:
        self.on = False
        if self._asking is not None:
            self._asking = None
            for gate in self._gates:
                gate.end()

    def _forked(self) -> None:
        """Reset in a forked child: the slot is the parent's."""
        self.on, self._turns, self._asking, self._thread = False, None, None, None
        self._script = threading.main_thread()
        self._changed, self._starting = threading.Event(), threading.Lock()


def is_ours(trace: TracebackType | None) -> bool:
    """Whether an error with this traceback was raised by a line of Covey."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(OURS)


_process: HookedTurns | None = None


def of_process() -> HookedTurns:
    """The turns that hooks of this process take, made if there are none; each framework adds its gate."""
    global _process
    if _process is None:
        _process = HookedTurns()
    return _process
