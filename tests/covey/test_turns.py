"""Turns on a page that jobs of a host share: rules, and the words under any order of steps of processes and threads."""

import random
from collections.abc import Iterator

import pytest

from covey.core.ids import JobId
from covey.kernel.pages import PAGE_BYTES
from covey.tensors.turns import rules
from covey.tensors.turns.page import (
    AT,
    BEAT_NS,
    KEY,
    LEASE_NS,
    LOST,
    NAP_NS,
    PLACE,
    PROGRESS,
    SLOTS_MAX,
    SPIN_NS,
    STATE,
    Taker,
    TurnsPage,
)
from covey.tensors.turns.rules import CLAIMS, COMM, COMM_BESIDE, COMP, HOLDS, LAPS, WAITS, Claim, Need
from plugins.interleave.machine.turns import Finished, TurnAsked, Turns

NEEDS: tuple[Need, ...] = ("comp", "comm")


class Process:
    """One process of a job: a thread for each need, which takes and gives turns, and a thread that beats."""

    def __init__(self, host: "SharedHost", slot: int) -> None:
        self.host, self.taker = host, Taker(host.page, slot, host.now)
        self.taking: dict[Need, Iterator[int]] = {}
        self.has: set[Need] = set()
        self.stopped = self.dead = False
        self.beat_ns = 0
        self.beat()

    def beat(self) -> None:
        if not self.taker.alive():
            self.has.clear()
        if "comm" in self.has:
            self.taker.progress()
        self.beat_ns = self.host.now()

    def step(self, need: Need) -> int:
        """One step of the thread of this need: returns how long it would sleep."""
        if need in self.has:
            self.has.remove(need)
            self.taker.give(need)
            return 0
        if need not in self.taking:
            self.taking[need] = self.taker.take(need)
        try:
            return next(self.taking[need])
        except StopIteration:
            del self.taking[need]
            self.has.add(need)
            return 0

    def take(self, need: Need) -> bool:
        """Take a turn as far as it goes without others; whether it has it."""
        assert need not in self.has
        for _ in range(20):
            nap_ns = self.step(need)
            if need in self.has or nap_ns == NAP_NS:
                break
        return need in self.has


class SharedHost:
    """A page, and the processes of some jobs; time moves by hand."""

    def __init__(self, jobs: list[int]) -> None:
        """`jobs`: the job of each process."""
        self.at_ns = 10 * LEASE_NS
        self.page = TurnsPage(bytearray(PAGE_BYTES))
        self.page.prepare()
        for slot, job in enumerate(jobs):
            self.page.assign(slot, job + 1, job)
        self.processes = [Process(self, slot) for slot in range(len(jobs))]

    def now(self) -> int:
        return self.at_ns

    def move(self, length_ns: int) -> None:
        """Let time pass; processes that run show that they live."""
        end_ns = self.at_ns + length_ns
        while self.at_ns < end_ns:
            self.at_ns = min(end_ns, self.at_ns + BEAT_NS)
            for process in self.processes:
                if not process.stopped and not process.dead and self.at_ns - process.beat_ns >= BEAT_NS:
                    process.beat()

    def holders(self, need: Need) -> list[Claim]:
        return [claim for claim in self.page.claims(need, self.at_ns) if claim.state == HOLDS]

    def check(self) -> None:
        """No lane has two jobs."""
        for need in NEEDS:
            held = {(claim.lane, claim.job) for claim in self.holders(need)}
            lanes = [lane for lane, _ in held]
            assert len(lanes) == len(set(lanes)), f"two jobs have one lane: {self.holders(need)}"
            assert set(lanes) <= set(rules.LANES[need])

    def settle(self, need: Need, waiting: list[Process]) -> None:
        """Let those that wait look, until none gets a turn any more."""
        for _ in range(len(waiting) + 1):
            for process in waiting:
                if need in process.taking:
                    process.take(need)


# ---- rules -----------------------------------------------------------------------------------------------------------


def test_the_order_decides_and_one_that_waited_long_is_next() -> None:
    waiting = [Claim(1, 0, 0), Claim(2, 1, LAPS - 1)]
    assert rules.next_job(waiting) == 1
    assert rules.next_job([waiting[0], Claim(2, 1, LAPS)]) == 2
    assert rules.next_job([Claim(1, 0, LAPS), Claim(2, 1, LAPS + 1)]) == 2
    assert rules.next_job([]) is None


def test_one_job_computes_and_two_send() -> None:
    """Reference: §4.3.1."""
    computes, waits = Claim(1, 0, 0, HOLDS, COMP), Claim(2, 1, 0)
    assert rules.may_enter("comp", [computes, waits], 2) is None
    sends = Claim(1, 0, 0, HOLDS, COMM)
    assert rules.may_enter("comm", [sends, waits], 2) == COMM_BESIDE
    assert rules.may_enter("comm", [sends, Claim(3, 2, 0, HOLDS, COMM_BESIDE), waits], 2) is None


def test_processes_of_one_job_have_their_turn_together() -> None:
    claims = [Claim(1, 0, 0, HOLDS, COMP, turn=5), Claim(1, 0, 0, WAITS, -1, 1), Claim(2, 1, LAPS, WAITS, -1, 2)]
    assert rules.may_enter("comp", claims, 1, had=4) == COMP
    assert rules.may_enter("comp", claims, 2) is None
    assert rules.may_enter("comp", claims, 1, had=5) is None, "each has a turn of its job once"
    assert rules.may_enter("comp", claims[:2], 1, had=5) == COMP, "nobody else waits"


def test_of_two_that_claim_at_once_the_lower_slot_keeps_the_lane() -> None:
    first, second = Claim(1, 0, 0, CLAIMS, COMP, 0), Claim(2, 1, 0, CLAIMS, COMP, 1)
    assert rules.keeps(first, [first, second]) is None, "it waits until the other one has stepped back"
    assert rules.keeps(second, [first, second]) is False
    assert rules.keeps(first, [first, Claim(2, 1, 0, HOLDS, COMP, 1)]) is False
    assert rules.keeps(first, [first, Claim(2, 1, 0, CLAIMS, COMM, 1), Claim(1, 0, 0, HOLDS, COMP, 2)]) is True


# ---- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_no_lane_has_two_jobs_whatever_order_steps_come_in(seed: int) -> None:
    """Threads stop between any two of their steps; processes are stopped, go on and are killed, and their slots are
    given to others while they live."""
    rng = random.Random(seed)
    host = SharedHost([rng.randrange(4) for _ in range(rng.randint(2, 6))])
    for _ in range(400):
        process = rng.choice(host.processes)
        doing = rng.random()
        if doing < 0.01:
            process.dead = rng.random() < 0.2
        elif doing < 0.04:
            process.stopped = not process.stopped
        elif doing < 0.07:
            host.move(rng.choice((BEAT_NS, LEASE_NS, 2 * LEASE_NS)))
        elif doing < 0.12:
            host.move(rng.randrange(NAP_NS))
        elif doing < 0.13:
            slot = process.taker.slot
            host.page.free(slot)
            host.page.assign(slot, rng.randrange(1, 5), rng.randrange(4))
            host.processes.append(Process(host, slot))
        elif not process.stopped and not process.dead:
            process.step(rng.choice(NEEDS))
        host.check()
    comes_to_all(host)


def comes_to_all(host: SharedHost) -> None:
    """All that live get the turns that they wait for."""
    living = [process for process in host.processes if not process.dead]
    for process in living:
        process.stopped = False
        process.beat()
    host.move(2 * LEASE_NS)
    wait = {(process, need) for process in living for need in process.taking}
    for _ in range(60 * len(host.processes)):
        for process in living:
            for need in NEEDS:
                if need in process.taking or need in process.has:
                    process.step(need)
                    host.check()
                    if need in process.has:
                        wait.discard((process, need))
        host.move(SPIN_NS)
    assert not wait, "somebody waited for ever"


@pytest.mark.parametrize("need", NEEDS)
def test_processes_of_a_job_that_overlap_keep_no_other_job_out(need: Need) -> None:
    """One of them always has the turn of their job."""
    host = SharedHost([0, 0, 1] if need == "comp" else [0, 0, 1, 2])
    first, second, third, *beside = host.processes
    for process in (*beside, first):
        assert process.take(need)
    assert not third.take(need)
    turns = 0
    while need not in third.has:
        for asks, gives in ((second, first), (first, second)):  # the one that has the turn gives it later
            turns += need not in asks.has and asks.take(need)
            if need in gives.has:
                gives.step(need)
            host.settle(need, [third])
            host.check()
            host.move(1000)
        assert turns <= 2 * LAPS + 2, "it waits for ever"


def test_a_turn_of_a_job_counts_once_however_many_processes_it_has() -> None:
    host = SharedHost([0, 1, 1, 1, 1, 1, 2])
    first, *crew, waits = host.processes
    assert first.take("comp") and not any(process.take("comp") for process in crew) and not waits.take("comp")
    host.move(1000)
    first.step("comp")
    assert all(process.take("comp") for process in crew)
    (passed,) = [claim.passed for claim in host.page.claims("comp", host.at_ns) if claim.state == WAITS]
    assert passed == 1


@pytest.mark.parametrize("seed", range(40))
def test_the_page_gives_turns_as_the_simulator_does(seed: int) -> None:
    """`covey-sim groups` drives `Turns`: the same jobs ask and give on a page, and the same ones have turns.

    Reference: §4.3.1."""
    rng = random.Random(seed)
    count = rng.randint(2, 6)
    jobs = [job for job in range(count) for _ in range(rng.randint(1, 3))]
    host, names = SharedHost(jobs), [JobId(f"j{n}") for n in range(count)]
    machine = Turns(names)
    for _ in range(60):
        at = rng.randrange(count)
        crew = [process for process, job in zip(host.processes, jobs, strict=True) if job == at]
        busy: list[Need] = [need for need in NEEDS if need in crew[0].has or need in crew[0].taking]
        if not busy:
            need = rng.choice(NEEDS)
            machine.handle(TurnAsked(names[at], need), host.at_ns / 1e9)
            for process in crew:
                process.take(need)
        elif busy[0] in crew[0].has:
            for process in crew:
                process.step(busy[0])
            machine.handle(Finished(names[at]), host.at_ns / 1e9)
        for need in NEEDS:
            host.settle(need, host.processes)
        host.move(1000)
        assert all(
            len({need in process.has for process in host.processes if process.taker.job == job + 1}) < 2
            for need in NEEDS
            for job in range(count)
        ), "a turn is of all processes of its job"
        assert held(host, names) == (machine.holds.get("comp"), machine.holds.get("primary"), comm_beside(machine))


def held(host: SharedHost, names: list[JobId]) -> tuple[JobId | None, ...]:
    """Who computes, who sends, and who sends beside it: of two, the one that began later."""
    (comp, _), comm = (_named(host, names, "comp"), _named(host, names, "comm"))
    return comp, *comm


def _named(host: SharedHost, names: list[JobId], need: Need) -> tuple[JobId | None, JobId | None]:
    found = [
        names[claim.job - 1] for claim in sorted(host.holders(need), key=lambda claim: (claim.since_ns, claim.place))
    ]
    first, second, *_ = (*dict.fromkeys(found), None, None)
    return first, second


def comm_beside(machine: Turns) -> JobId | None:
    return machine.holds.get("secondary")


def test_a_process_that_is_stopped_with_a_turn_loses_it_within_two_seconds_and_knows() -> None:
    host = SharedHost([0, 1])
    first, second = host.processes
    assert first.take("comp") and not second.take("comp")
    first.stopped = True
    host.move(LEASE_NS + NAP_NS)
    assert second.take("comp"), "the turn of one that shows no life is free"
    assert LEASE_NS + NAP_NS + BEAT_NS <= 2_000_000_000
    first.stopped = False
    first.beat()
    assert not first.taker.holds("comp") and host.page.get(0, LOST) == 1
    host.check()


def test_a_process_that_was_stopped_while_it_took_a_turn_takes_it_from_nobody() -> None:
    host = SharedHost([0, 1])
    first, second = host.processes
    while host.page.get(0, AT["comp"] + STATE) & 3 != CLAIMS:
        first.step("comp")
    first.step("comp")  # it has looked, and nobody was there
    first.stopped = True
    host.move(2 * LEASE_NS)
    assert second.take("comp")
    first.stopped = False
    first.beat()
    assert not first.take("comp")
    host.check()
    second.step("comp")
    assert first.take("comp")


def test_what_a_process_saw_is_as_old_as_the_moment_before_its_look() -> None:
    """It is stopped after its look, and before it reads the clock once more."""
    host = SharedHost([1, 2])
    first, second = host.processes
    claims, looks = host.page.claims, 0

    def stopped_after(need: Need, now_ns: int) -> list[Claim]:
        nonlocal looks
        found, looks = claims(need, now_ns), looks + (host.page.get(0, AT[need] + STATE) & 3 == CLAIMS)
        if looks == 1:
            looks += 1
            host.page.claims = claims  # type: ignore[method-assign]
            first.stopped = True
            host.move(2 * LEASE_NS)
            assert second.take("comp")
            first.stopped = False
            first.beat()
        return found

    host.page.put(1, AT["comp"] + STATE, WAITS)  # so that the first one is not alone
    host.page.put(1, PLACE, 9)
    assert not first.step("comp")
    host.page.claims = stopped_after  # type: ignore[method-assign]
    assert not first.take("comp") and looks == 2
    host.check()


def test_one_that_steps_back_lets_the_other_one_have_the_lane() -> None:
    """Both claim in step: the one with the lower slot, and one that is first in the order and came a moment later."""
    host = SharedHost([1, 0, 2])
    first, second, third = host.processes
    assert third.take("comp") and not first.take("comp")
    third.step("comp")
    while host.page.get(0, AT["comp"] + STATE) & 3 != CLAIMS:
        first.step("comp")
    claims = False
    for _ in range(50):
        for _ in range(12):  # until it has claimed anew
            before, _ = claims, second.step("comp")
            claims = host.page.get(1, AT["comp"] + STATE) & 3 == CLAIMS
            if claims and not before:
                break
        first.step("comp")
        host.check()
        if "comp" in first.has:
            break
    assert "comp" in first.has, "each steps back for the other one for ever"


def test_the_network_is_free_for_others_when_its_holder_sends_nothing() -> None:
    host = SharedHost([0, 1, 2])
    first, second, third = host.processes
    assert first.take("comm") and second.take("comm") and not third.take("comm")
    for _ in range(5):
        host.at_ns += BEAT_NS
        for process in host.processes:
            process.taker.alive()
        second.host.page.put(1, PROGRESS, host.at_ns)
    assert third.take("comm"), "a sender whose peer does not read waits for others, which nobody does with a turn"
    assert [claim.slot for claim in host.holders("comm")] == [1, 2]


def test_who_gives_rings_for_the_next_one_and_for_nobody_else() -> None:
    host = SharedHost([0, 1, 2, 1])
    first, second, third, fourth = host.processes
    assert first.take("comp")
    for process in (third, second, fourth):
        assert not process.take("comp")
    first.has.clear()
    assert first.taker.give("comp") == [1, 3], "both processes of the job whose turn is next"
    assert second.take("comp") and fourth.take("comp") and not third.take("comp")


@pytest.mark.parametrize("need", NEEDS)
def test_a_process_whose_slot_is_anothers_goes_on_without_turns_and_writes_nothing(need: Need) -> None:
    """Its connection to the agent broke, and it lives."""
    host = SharedHost([0, 1, 2, 3])
    lost, *others = host.processes
    for process in others:
        process.take(need)
    assert not lost.take(need) and others[0].taker.holds(need)
    host.page.free(0)
    host.page.assign(0, 9, 0)
    successor = Process(host, 0)
    assert not successor.take(need)
    before = host.page.page[:]
    for _ in range(20):
        lost.beat()
        lost.step(need)  # it ends its wait, gives, and asks again
        lost.taker.progress()
        lost.taker.waited(1)
    assert not lost.taker.holds(need) and host.page.page == before
    assert need not in lost.taking, "it waits for a turn that nobody can give it"
    host.page.free(0)
    assert not lost.taker.owns and not successor.taker.owns


def test_a_process_whose_wish_vanished_from_the_page_writes_it_again() -> None:
    host = SharedHost([0, 1])
    first, second = host.processes
    assert first.take("comp") and not second.take("comp")
    host.page.put(1, AT["comp"] + STATE, 0)
    first.step("comp")
    assert second.take("comp"), "it waits for ever"


def test_a_slot_that_another_process_had_counts_on() -> None:
    """Turns by which one that waits was passed over do not vanish with the process that had them."""
    host = SharedHost([0, 1])
    first, second = host.processes
    assert first.take("comp") and not second.take("comp")
    first.step("comp")
    before = host.page.claims("comp", host.at_ns)[0].passed
    host.page.free(0)
    host.page.assign(0, 9, 0)
    assert host.page.claims("comp", host.at_ns)[0].passed == before


def test_nonsense_on_the_page_is_nobodys_turn() -> None:
    """Other jobs write the page too."""
    for seed in range(300):
        rng = random.Random(seed)
        memory = bytearray(rng.randbytes(PAGE_BYTES) if seed % 2 else PAGE_BYTES)
        page = TurnsPage(memory)
        for _ in range(0 if seed % 2 else 20):
            page.put(rng.randrange(SLOTS_MAX), rng.randrange(16), rng.choice((0, 3, 1 << 63, (1 << 64) - 1)))
        now_ns = rng.randrange(1 << 62)
        page.assign(1, 7, 0)
        taker = Taker(page, 1, lambda now_ns=now_ns: now_ns)  # type: ignore[misc]
        taker.alive()
        for need in NEEDS:
            for _ in zip(range(30), taker.take(need), strict=False):
                page.claims(need, now_ns)
            assert taker.holds(need) and [claim.slot for claim in page.claims(need, now_ns)] == [1]
            taker.give(need)


def test_a_page_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="8192 bytes"):
        TurnsPage(bytearray(100))
    assert not TurnsPage(bytearray(PAGE_BYTES)).valid
    assert TurnsPage(bytearray(PAGE_BYTES)).get(0, KEY) == 0
