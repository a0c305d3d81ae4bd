"""Which turns hooks take of a script, with a gate of this test in the place of PyTorch's or JAX's."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from covey.hooks.turns.gates import PolledTurns, Word
from covey.hooks.turns.hooked import LOOK_S, HookedTurns
from covey.kernel.pages import PAGE_BYTES
from covey.tensors.turns.holder import UNSEEN_MAX_S, ProcessTurns
from covey.tensors.turns.page import LOST, USE, TurnsPage
from covey.tensors.turns.rules import HOLDS, WAITS
from tests.covey.hooks.native_stand_in import Modules


def until_true(true: Callable[[], object]) -> None:
    end_s = time.monotonic() + 20.0
    while not true():
        assert time.monotonic() < end_s, "it never became true"
        time.sleep(0.002)


class Gate:
    """A gate that notes what it is told, and sees the script wait when the test says so."""

    def __init__(self) -> None:
        self.ask: Callable[[], None] | None = None
        self.script: threading.Thread | None = None
        self.begun = 0
        self.rests = threading.Event()

    def begin(self, turns: ProcessTurns, word: Word, ask: Callable[[], None], script: threading.Thread) -> None:
        self.ask, self.script, self.begun = ask, script, self.begun + 1

    def end(self) -> None:
        self.ask = None

    def await_rest(self, within_s: float) -> bool:
        seen = self.rests.wait(0.01)
        self.rests.clear()
        return seen


class Script:
    """A script in slot 0, and another job in slot 1, which the test adds."""

    def __init__(self) -> None:
        self.page = mmap.mmap(-1, PAGE_BYTES)
        self.words = TurnsPage(self.page)
        self.words.prepare()
        self.gate, self.hooked, self.failures = Gate(), HookedTurns(), list[BaseException]()
        self.hooked.gains(self.gate)
        self.turns = self._process(0)
        self.hooked.takes(self.turns, self.failures.append)
        self.made = [self.turns]

    def _process(self, slot: int) -> ProcessTurns:
        self.words.assign(slot, slot + 1, slot)
        made = ProcessTurns(worked_s=time.monotonic)
        made.page_came(self.page, slot, self.words.get(slot, USE))
        return made

    def other(self) -> ProcessTurns:
        return self.add(1)

    def add(self, slot: int) -> ProcessTurns:
        made = self._process(slot)
        self.made.append(made)
        return made

    def does(self, slot: int) -> list[int]:
        return [claim.state for claim in self.words.claims("comp", time.monotonic_ns()) if claim.slot == slot]

    def close(self) -> None:
        for each in self.made:
            each.close()
        until_true(lambda: self.hooked._thread is None)


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()
    yield made
    made.close()


def test_gates_ask_while_another_job_is_on_the_page_and_no_longer(script: Script) -> None:
    assert script.gate.begun == 0 and not script.hooked.on
    script.other()
    until_true(lambda: script.hooked.on)
    assert script.gate.ask is not None
    script.gate.ask()
    assert script.does(0) == [HOLDS]
    script.words.free(1)
    until_true(lambda: not script.gate.ask)
    assert not script.hooked.on
    until_true(lambda: not script.does(0))


def test_a_turn_is_given_when_the_script_waits_and_when_a_batch_ends_if_others_wait(script: Script) -> None:
    other = script.other()
    until_true(lambda: script.hooked.on)
    script.turns.begins()
    script.gate.rests.set()
    until_true(lambda: not script.does(0))
    script.turns.begins()
    script.hooked.batch_ended()
    assert script.does(0) == [HOLDS], "nobody waits for it"
    waiting = threading.Thread(target=other.begins)
    waiting.start()
    until_true(lambda: script.does(1) == [WAITS])
    finished = list[bool]()
    script.hooked.batch_ended(lambda: finished.append(script.turns.has_comp))
    assert finished == [True], "the device is done before the turn is given"
    waiting.join(30.0)
    assert script.does(1) == [HOLDS] and not script.does(0)


def test_what_waits_for_a_batch_or_for_other_ranks_gives_its_turn_in_its_own_thread(script: Script) -> None:
    script.other()
    until_true(lambda: script.hooked.on)
    script.turns.begins()
    another = threading.Thread(target=script.hooked.waits)
    another.start()
    another.join()
    assert script.does(0) == [HOLDS], "a thread that only fetches says nothing of the script"
    script.hooked.waits()
    assert not script.does(0)


def test_a_wish_stays_while_the_script_is_seen_to_wait(script: Script) -> None:
    """It waits for its turn: that is no reason to take the wish away."""
    other = script.other()
    other.begins()
    waiting = threading.Thread(target=script.turns.begins)
    waiting.start()
    until_true(lambda: script.does(0) == [WAITS])
    script.turns.rests()
    assert script.does(0) == [WAITS]
    other.rests()
    waiting.join(30.0)
    assert script.does(0) == [HOLDS]


def test_scripts_whose_sums_tell_are_left_to_their_sums_unless_threads_wait_for_them(script: Script) -> None:
    script.other()
    until_true(lambda: script.hooked.on)
    script.turns.computes()
    until_true(lambda: not script.hooked.on)
    script.hooked.waits()
    script.turns.rests()
    assert script.does(0) == [HOLDS], "sums say when it is given"
    script.turns.in_background()
    until_true(lambda: script.hooked.on)
    script.turns.begins()
    assert script.does(0) == [HOLDS]


def test_a_script_whose_batches_are_not_seen_lets_others_in_and_loses_nothing(script: Script) -> None:
    other = script.other()
    until_true(lambda: script.hooked.on)
    script.turns.begins()
    taker, later_ns = script.turns._taker, time.monotonic_ns() + int((UNSEEN_MAX_S + 1.0) * 1e9)
    assert taker is not None
    script.turns._look(taker, later_ns, later_ns)
    assert script.does(0) == [HOLDS], "nobody waits"
    waiting = threading.Thread(target=other.begins)
    waiting.start()
    until_true(lambda: script.does(1) == [WAITS])
    script.turns._look(taker, later_ns, later_ns)
    waiting.join(30.0)
    assert script.does(1) == [HOLDS] and script.turns.lost == 0 and script.words.get(0, LOST) == 0


def test_a_page_that_is_replaced_while_it_is_looked_at_ends_no_turns(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new agent hands its page at any moment: for a moment this process has none."""
    replaced, has_others = threading.Event(), TurnsPage.has_others

    def replace(page: TurnsPage, key: int) -> bool:
        if not replaced.is_set() and threading.current_thread() is script.hooked._thread:
            script.turns._drop()
            replaced.set()
        return has_others(page, key)

    monkeypatch.setattr(TurnsPage, "has_others", replace)
    script.other()
    until_true(replaced.is_set)
    script.turns.page_came(script.page, 0, script.words.get(0, USE))
    until_true(lambda: script.hooked.on)
    script.turns.begins()
    assert script.does(0) == [HOLDS]
    script.gate.rests.set()
    until_true(lambda: not script.does(0))
    assert not script.failures


def test_a_gate_that_fails_is_told_and_the_script_keeps_no_turn(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(within_s: float) -> bool:
        script.turns.begins()
        raise OSError("no file is left to look at threads")

    monkeypatch.setattr(script.gate, "await_rest", fails)
    script.other()
    until_true(lambda: script.failures and not script.gate.ask)
    until_true(lambda: not script.does(0))
    assert len(script.failures) == 1


def test_what_fails_again_and_again_is_told_once_and_takes_no_processor(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried_s = list[float]()

    def fails() -> None:
        tried_s.append(time.monotonic())
        raise ValueError("the page is gone")

    monkeypatch.setattr(script.turns, "rests", fails)
    until_true(lambda: len(tried_s) >= 4)
    assert tried_s[3] - tried_s[2] > LOOK_S / 2
    assert len(script.failures) == 1


def test_turns_of_the_next_connection_are_taken_whenever_it_comes(script: Script) -> None:
    """The thread of the first one may be about to end."""
    off, came = script.hooked._off, threading.Event()

    def later() -> None:
        off()
        if not came.is_set():
            came.set()
            script.hooked.takes(other, script.failures.append)

    other = script.other()
    script.hooked._off = later  # type: ignore[method-assign]
    script.turns.close()
    until_true(came.is_set)
    third = script.add(2)
    until_true(lambda: script.hooked.on)
    assert script.gate.ask is not None
    script.gate.ask()
    assert script.does(1) == [HOLDS] and third.on


def test_in_a_forked_child_the_thread_that_is_left_asks(script: Script) -> None:
    script.other()
    until_true(lambda: script.hooked.on)
    worker = threading.Thread(target=script.hooked.batch_ended)
    worker.start()
    until_true(lambda: script.gate.script is worker)
    looks = script.hooked._thread
    assert looks is not None
    script.hooked._forked()
    looks.join()  # a child has no such thread
    script.hooked.takes(script.turns, script.failures.append)
    until_true(lambda: script.gate.script is threading.main_thread())


def test_an_error_of_ours_is_told_once_and_one_of_a_signals_handler_is_the_scripts(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.other()
    until_true(lambda: script.gate.ask is not None)
    ask = script.gate.ask
    assert ask is not None

    def handler() -> None:
        raise TimeoutError("by the script's alarm")

    monkeypatch.setattr(script.turns, "begins", handler)
    with pytest.raises(TimeoutError):
        ask()
    assert not script.failures and script.hooked.on

    def ours() -> None:
        raise ValueError("a mistake")

    monkeypatch.setattr("covey.hooks.turns.hooked.OURS", os.path.dirname(__file__))
    monkeypatch.setattr(script.turns, "begins", ours)
    ask()
    ask()
    until_true(lambda: not script.hooked.on)
    assert len(script.failures) == 1


def test_without_a_native_gate_the_scripts_thread_alone_asks_and_its_sleep_is_seen(script: Script) -> None:
    script.other()
    stops, ready, asked = Modules(), threading.Event(), list[int | None]()
    gate, done = PolledTurns(stops), threading.Event()

    def computes() -> None:
        while not ready.is_set():
            sum(range(1000))
        done.wait(30.0)

    worker = threading.Thread(target=computes)
    worker.start()
    word = script.turns.comp_word
    assert word is not None
    gate.begin(script.turns, word, lambda: asked.append(threading.get_ident()), worker)
    assert stops.before is not None
    stops.before()
    assert not asked, "this is not the script's thread"
    assert not gate.await_rest(0.05), "it has no turn"
    script.turns.begins()
    assert not gate.await_rest(0.1), "it computes"
    ready.set()
    assert gate.await_rest(20.0), "it sleeps"
    done.set()
    worker.join()
    gate.end()
    assert stops.before is None
