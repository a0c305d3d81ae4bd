"""Turns that processes and threads really take: pages are real memory, and processes are stopped and killed."""

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from covey.core.ids import JobId
from covey.hooks.turns.hooked import HookedTurns
from covey.job.tensors import TensorClient
from covey.kernel import memfd
from covey.kernel.futex import SharedWord
from covey.kernel.pages import PAGE_BYTES
from covey.tensors.turns import holder as turns_holder
from covey.tensors.turns import page as turns_page
from covey.tensors.turns.holder import HELD_MAX_S, IDLE_S, ProcessTurns
from covey.tensors.turns.page import BEAT_NS, LEASE_NS, LOST, NAP_NS, USE, TurnsPage
from covey.tensors.turns.rules import HOLDS, Need
from covey.wire.frames import FrameError
from tests.plugins.aggregator.loopback import AggdThread
from tests.quiet import until_blocked

FREE_S = (LEASE_NS + NAP_NS + BEAT_NS) / 1e9
"""Seconds within which a turn is free whose process is dead or stopped."""
HOLDER = """
import mmap, os, sys, time
from covey.tensors.turns.holder import ProcessTurns
turns = ProcessTurns()
turns.page_came(mmap.mmap(int(sys.argv[1]), int(sys.argv[2])), 0, 1)
need = sys.argv[3]
if need == "comp":
    turns.computes()
else:
    turns.sending().__enter__()
print("has it", flush=True)
while sys.argv[4] != "rest":
    turns.progress()
time.sleep(60)
"""


class Page:
    """A page of turns for some jobs, in memory that processes can share."""

    def __init__(self, jobs: list[int], places: list[int] | None = None) -> None:
        """`jobs`: of each slot; `places`: of each slot, in the order of turns."""
        self.descriptor = memfd.make("turns")
        self.map = mmap.mmap(self.descriptor, PAGE_BYTES)
        self.turns = TurnsPage(self.map)
        self.turns.prepare()
        for slot, job in enumerate(jobs):
            self.turns.assign(slot, job + 1, slot if places is None else places[slot])

    def process(self, slot: int) -> ProcessTurns:
        made = ProcessTurns()
        made.page_came(self.map, slot, self.turns.get(slot, USE))
        return made

    def holders(self, need: Need) -> list[int]:
        return [claim.slot for claim in self.turns.claims(need, time.monotonic_ns()) if claim.state == HOLDS]


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page([0, 1, 2])
    yield made
    os.close(made.descriptor)


@pytest.fixture
def aggd(tmp_path: Path) -> Iterator[AggdThread]:
    running = AggdThread(tmp_path)
    yield running
    running.finish()


def holder(page: Page, need: Need, does: str) -> "subprocess.Popen[bytes]":
    """Another process, which has a turn."""
    words = [sys.executable, "-c", HOLDER, str(page.descriptor), str(PAGE_BYTES), need, does]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, pass_fds=(page.descriptor,))
    assert process.stdout is not None and process.stdout.readline() == b"has it\n"
    return process


def comes_to(mine: ProcessTurns, within_s: float) -> bool:
    """Whether this process may compute within so many seconds."""
    waiting = threading.Thread(target=mine.computes, daemon=True)
    waiting.start()
    waiting.join(within_s)
    return not waiting.is_alive()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_turn_of_a_killed_or_stopped_process_is_free_within_two_seconds(page: Page, number: signal.Signals) -> None:
    assert FREE_S <= 2.0
    process, mine = holder(page, "comp", "work"), page.process(1)
    assert page.holders("comp") == [0]
    process.send_signal(number)
    assert comes_to(mine, FREE_S + 2.0), "two seconds are for a machine that is busy"
    assert page.holders("comp") == [1]
    process.kill()
    process.wait()
    mine.close()


def test_a_script_that_hangs_with_the_processors_loses_them_and_is_counted(page: Page) -> None:
    process, mine = holder(page, "comp", "rest"), page.process(1)
    assert comes_to(mine, IDLE_S + 3 * BEAT_NS / 1e9 + 2.0)
    assert process.poll() is None and page.turns.get(0, LOST) == 1
    process.kill()
    process.wait()
    mine.close()


def test_a_script_that_computes_keeps_the_processors_until_it_has_had_them_for_long(page: Page) -> None:
    first, second = page.process(0), page.process(1)
    first.computes()
    taker, now_ns = first._taker, time.monotonic_ns()
    assert taker is not None
    later_ns = now_ns + int((HELD_MAX_S + 1.0) * 1e9)
    first._look(taker, later_ns, later_ns)
    assert page.holders("comp") == [0], "nobody waits"
    waiting = threading.Thread(target=second.computes, daemon=True)
    waiting.start()
    until_blocked(waiting, SharedWord.sleep)
    first._look(taker, now_ns + int(20 * IDLE_S * 1e9), now_ns + int(20 * IDLE_S * 1e9))
    assert page.holders("comp") == [0], "it computes"
    first._look(taker, later_ns, later_ns)
    waiting.join(30.0)
    assert page.holders("comp") == [1] and first.lost == 1
    first.close()
    second.close()


def test_what_a_process_works_while_its_script_waits_for_sums_is_counted(page: Page) -> None:
    worked_s = [10.0]
    turns = ProcessTurns(worked_s=lambda: worked_s[0])
    turns.page_came(page.map, 0, page.turns.get(0, USE))
    turns.computes()
    worked_s[0] += 4.0  # it computes
    for _ in range(2):
        turns.computed()
        worked_s[0] += 0.5
    turns.computes()
    worked_s[0] += 4.0
    turns.computes()
    assert turns.spent().added_s == 1.0
    turns.close()


def test_hooks_take_no_turns_in_a_forked_child(page: Page) -> None:
    """The slot is the parent's, and a loader's worker does not compute."""
    hooked, turns = HookedTurns(), page.process(0)
    hooked.takes(turns, lambda error: None)
    hooked.on = True
    child = os.fork()
    if not child:
        os._exit(0 if (hooked.on, hooked._turns, hooked._thread) == (False, None, None) else 1)
    assert os.waitpid(child, 0)[1] == 0 and hooked.on and hooked._turns is turns
    turns.close()


def test_what_a_turn_costs_is_measured_by_the_bench() -> None:
    bench = Path(__file__).resolve().parents[2] / "bench" / "elastic" / "turns.py"
    ran = subprocess.run([sys.executable, str(bench), "--turns", "100"], capture_output=True, text=True, timeout=60.0)
    rows = [line.split(" | ") for line in ran.stdout.splitlines() if line.startswith("| ") and line[2:4] != "--"]
    assert [row[0] for row in rows[1:]] == ["| processors, free", "| network, free", "| handed over"], ran.stderr
    assert all(float(row[1]) > 0 for row in rows[1:])


def test_a_turn_is_not_lost_while_its_script_gives_it(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that beats looks and writes at once: a script that gives in between, and waits for its next turn,
    would lose its wish."""
    first = page.process(0)
    first.computes()
    taker, could, later_ns = first._taker, list[bool](), time.monotonic_ns() + int(2 * IDLE_S * 1e9)
    assert taker is not None
    lose = taker.lose

    def lose_later(need: Need) -> list[int]:
        script = threading.Thread(target=lambda: could.append(first._words.acquire(blocking=False)))
        script.start()
        script.join()
        return lose(need)

    monkeypatch.setattr(taker, "lose", lose_later)
    first._look(taker, later_ns, 0)
    assert could == [False] and not page.holders("comp")
    first.close()


def test_a_slot_that_the_agent_gave_to_another_process_is_refused(page: Page) -> None:
    page.turns.free(0)
    page.turns.assign(0, 9, 0)
    with pytest.raises(FrameError, match="no such slot"):
        ProcessTurns().page_came(page.map, 0, 1)


def test_one_that_waits_is_woken_and_does_not_look_again_and_again(page: Page) -> None:
    first, second = page.process(0), page.process(1)
    naps: list[float] = []
    for _ in range(5):
        first.computes()
        got = threading.Event()

        def take(got: threading.Event = got) -> None:
            second.computes()
            got.set()

        threading.Thread(target=take).start()
        while not second.waits:
            time.sleep(0.001)
        began_s = time.monotonic()
        first.computed()
        assert got.wait(5.0)
        naps.append(time.monotonic() - began_s)
        second.computed()
    assert min(naps) < NAP_NS / 1e9 / 2, "nobody rang"
    first.close()
    second.close()


def test_a_wait_that_is_interrupted_leaves_nothing_behind(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its job is next once four others went before, and nobody computes any more."""
    first, second = page.process(0), page.process(1)
    first.computes()

    def interrupted(bell: SharedWord, value: int, length_ns: int) -> None:
        assert second.waits
        raise KeyboardInterrupt

    monkeypatch.setattr(SharedWord, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        second.computes()
    assert not second.waits, "a rank that hangs would seem to wait for its turn"
    assert [claim.slot for claim in page.turns.claims("comp", time.monotonic_ns())] == [0]
    first.close()
    second.close()


def test_a_process_that_closes_gives_all_and_waits_for_nothing(page: Page) -> None:
    first, second = page.process(0), page.process(1)
    first.computes()
    waiting = threading.Thread(target=second.computes, daemon=True)
    waiting.start()
    second.close()
    waiting.join(5.0)
    assert not waiting.is_alive() and not second.on
    first.close()
    assert not page.holders("comp")


def test_a_process_whose_threads_wait_for_sums_takes_no_turn_to_compute(page: Page) -> None:
    first, second = page.process(0), page.process(1)
    first.computes()
    first.in_background()
    second.computes()
    first.computes()
    assert page.holders("comp") == [1]
    first.close()
    second.close()


def test_posts_that_were_announced_are_sent_under_one_turn(page: Page) -> None:
    first = page.process(0)
    with first.sending():
        first.announce()
    assert page.holders("comm") == [0], "what was announced is yet to be sent"
    with first.sending(coming=1):
        pass
    assert not page.holders("comm")
    assert first.spent().sending_s > 0
    first.close()


def test_the_next_page_takes_the_place_of_the_first(page: Page) -> None:
    """A new agent: what the process had on the page before is given there."""
    first, other = page.process(0), Page([0, 1])
    first.computes()
    first.page_came(other.map, 0, 1)
    assert not page.holders("comp")
    first.computes()
    assert other.holders("comp") == [0]
    first.close()
    os.close(other.descriptor)


@pytest.mark.parametrize("slot", [-1, 3, 63, 1 << 40])
def test_a_slot_that_the_agent_did_not_prepare_is_refused(page: Page, slot: int) -> None:
    with pytest.raises(FrameError, match="no such slot"):
        ProcessTurns().page_came(page.map, slot, 1)
    with pytest.raises(FrameError, match="no such slot"):
        ProcessTurns().page_came(bytearray(PAGE_BYTES), 0, 1)


class Shared:
    """Four jobs of two ranks each, on two hosts whose jobs take turns in unlike orders; an `aggd` adds."""

    STEPS = 12
    COUNT = 300_000
    """Elements of a gradient: 1.2 MB, so that it is sent under a turn."""

    def __init__(self, aggd: AggdThread) -> None:
        self.hosts = [Page([0, 1, 2, 3], [0, 1, 2, 3]), Page([0, 1, 2, 3], [3, 2, 1, 0])]
        self.computing: list[list[int]] = [[], []]
        self.failed: list[BaseException] = []
        self.clients: dict[tuple[int, int], TensorClient] = {}
        for job in range(4):
            at = msgspec.structs.replace(aggd.serve(f"j{job}", (1 << 32) + 1, 2), near="")  # as if on a third host
            for host in range(2):
                client = TensorClient(
                    JobId(f"j{job}"), host, 2, lambda epoch, why, table: None, turns=self.hosts[host].process(job)
                )
                client.moved(at)
                self.clients[job, host] = client

    def run(self, job: int, host: int) -> None:
        client, now = self.clients[job, host], self.computing[host]
        try:
            client.push_pull("first", np.zeros(1, np.float32))
            for step in range(self.STEPS):
                now.append(job)
                assert now == [job], f"jobs {now} compute at once on host {host}"
                mine = np.full(self.COUNT, (host + 1) * (step + 1), np.float32)
                now.remove(job)
                assert client.push_pull("g", mine)[-1] == 3 * (step + 1)
            client.turns.computed()
        except BaseException as error:
            self.failed.append(error)
            client.turns.close()


def test_four_jobs_on_two_hosts_in_unlike_order_all_go_on(aggd: AggdThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """COMM is sending only: if a turn were held while others are waited for, each host's senders would wait for ranks
    that wait for the network of the other host, for ever. No lease ends here that would hide it.

    Reference: §4.3.1."""
    monkeypatch.setattr(turns_page, "LEASE_NS", 600_000_000_000)
    monkeypatch.setattr(turns_holder, "IDLE_S", 600.0)
    shared = Shared(aggd)
    threads = [threading.Thread(target=shared.run, args=at, daemon=True) for at in shared.clients]
    for thread in threads:
        thread.start()
    began_s = time.monotonic()
    for thread in threads:
        thread.join(max(0.0, began_s + 45.0 - time.monotonic()))
    stuck = sum(thread.is_alive() for thread in threads)
    spent = [client.turns.spent() for client in shared.clients.values()]
    for client in shared.clients.values():
        client.close()
        client.turns.close()
    for page in shared.hosts:
        os.close(page.descriptor)
    assert not shared.failed, shared.failed[0]
    assert not stuck, f"{stuck} of 8 ranks wait for ever"
    assert all(each.sending_s > 0 for each in spent) and any(each.waited_s > 0 for each in spent)
