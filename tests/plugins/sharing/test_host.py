"""The shared GPUs of one host: gangs come, are told limits, report, and leave. Reference: AntMan §3.3."""

import random
from typing import Any

import msgspec
import pytest

from covey.core.ids import JobId
from covey.core.units import GIB
from covey.kernel.pages import MiniBatch, RankLimits, RankReport, rates_at
from covey.ports.devices import Condition
from plugins.facts import JobKind
from plugins.sharing.machine.events import HardLimited, Suspended
from plugins.sharing.machine.host import FOUND_S, HostSharing
from plugins.sharing.machine.host_events import (
    EndGang,
    GangChanged,
    GangComing,
    GangGone,
    GiveBack,
    GpuAnswer,
    GpuHealth,
    GpuLooked,
    GpusHere,
    HostEvent,
    HostTick,
    JobsBefore,
    LetStart,
    PagesMade,
    PairFound,
    PressRank,
    RankReported,
    ShowNeighbour,
    WriteLimits,
)
from plugins.sharing.messages import Limits
from plugins.sharing.policy.lease import FAILSAFE_ALONE, FAILSAFE_BESIDE, combined
from tests.families import in_gate

G, OPP, MORE = JobId("g"), JobId("o"), JobId("p")
MS = 1_000_000
SHAPES: list[dict[int, tuple[str, ...]]] = [{0: ("A",)}, {0: ("B",)}, {0: ("A",), 1: ("B",)}, {0: ("A", "B")}]
FINE: list[Condition] = ["ok"] * 30
CONDITIONS: list[Condition] = [*FINE, "degraded", "unknown", "drain", "lost"]


class HostRack:
    """A host with GPUs of 8 GiB and obedient ranks: they apply limits with their next mini-batch."""

    def __init__(self, *gpus: str) -> None:
        self.machine = HostSharing(0, 0.05)
        self.now_s = 100.0
        self.pages: dict[tuple[JobId, int], RankLimits] = {}
        self.neighbours: dict[tuple[JobId, int], tuple[JobId, int] | None] = {}
        self.started: list[JobId] = []
        self.back: dict[JobId, str] = {}
        self.other: list[Any] = []
        self.deaf: set[JobId] = set()
        self.steps = 0
        self.tell(GpusHere(dict.fromkeys(gpus or ("A",), 8 * GIB)))

    def tell(self, event: HostEvent, after_s: float = 0.0) -> list[Any]:
        self.now_s += after_s
        actions = list(self.machine.handle(event, self.now_s))
        self.machine.check()
        for action in actions:
            match action:
                case WriteLimits():
                    self.pages[action.job, action.rank] = action.limits
                case ShowNeighbour():
                    self.neighbours[action.job, action.rank] = action.neighbour
                case LetStart():
                    self.started.append(action.job)
                case GiveBack():
                    self.back[action.job] = action.why
                case PressRank() | EndGang() | PairFound():
                    self.other.append(action)
                case _:
                    pass
        return actions

    def come(self, job: JobId, kind: JobKind, gib: float = 0, gpus: dict[int, tuple[str, ...]] | None = None) -> None:
        here = gpus or {0: ("A",)}
        self.tell(GangComing(job, 1, kind, here, int(gib * GIB), False))
        for rank in here:
            self.tell(PagesMade(job, 1, rank, 0, 0))

    def step(self, job: JobId, rank: int = 0, step_ms: float = 20.0, peak_gib: float = 1, **more: Any) -> None:
        self.steps += 1
        self.now_s += step_ms / 1000
        acked = 0 if job in self.deaf else self.pages[job, rank].epoch
        ended = MiniBatch(self.steps, int(step_ms * MS), int(step_ms * MS / 2))
        report = RankReport(acked, 0, int(peak_gib * GIB), GIB // 4, gate=1, says_idle=True, batches=(ended,))
        self.tell(RankReported(job, 1, rank, report))

    def steady(self) -> None:
        """Bring the host to `g` with 4 GiB running beside `o` with 2, measured."""
        self.come(OPP, "opportunistic", 2)
        self.step(OPP)
        self.come(G, "guaranteed", 4)
        for _ in range(200):
            self.step(OPP)
            self.step(G)
            if self.machine.gpus["A"].state == "run":
                return
        raise AssertionError(self.machine.gpus["A"].state)


def test_a_guaranteed_gang_starts_when_the_others_have_acknowledged() -> None:
    """Reference: AntMan §3.3, Local coordinator."""
    rack = HostRack()
    rack.come(OPP, "opportunistic", 6)
    assert rack.started == [OPP]
    rack.step(OPP)
    rack.come(G, "guaranteed", 4)
    assert rack.started == [OPP]
    page = rack.pages[OPP, 0]
    assert page.free and page.memory_bytes == 4 * GIB
    rack.step(OPP)
    assert rack.started == [OPP, G]
    page = rack.pages[OPP, 0]
    assert (page.idle, page.busy) == (0, 0) and page.lease_ns > 0
    assert rack.neighbours[OPP, 0] == (G, 0) and rack.pages[G, 0].free


def test_a_gang_starts_when_all_its_gpus_here_are_ready_and_goes_by_the_strictest() -> None:
    rack = HostRack("A", "B")
    rack.come(OPP, "opportunistic", 6, {0: ("B",)})
    rack.step(OPP)
    rack.come(G, "guaranteed", 4, {0: ("A", "B")})
    assert rack.started == [OPP], "B has no room yet"
    rack.step(OPP)
    assert rack.started == [OPP, G]
    rack.tell(GangGone(OPP, 1))
    rack.tell(GpuLooked("B", frozenset()))
    rack.come(MORE, "opportunistic", 0, {0: ("A",)})
    assert rack.pages[MORE, 0].memory_bytes == 4 * GIB
    rack.come(OPP, "opportunistic", 1, {0: ("A", "B")})
    told = {uuid: rack.machine.gpus[uuid].ledger.accounts[OPP].told_bytes for uuid in "AB"}
    assert told["A"] < told["B"] == GIB and rack.pages[OPP, 0].memory_bytes == max(1, told["A"])


def test_a_gang_that_one_gpu_refuses_is_on_none() -> None:
    rack = HostRack("A", "B")
    rack.come(OPP, "guaranteed", 2, {0: ("B",)})
    rack.come(G, "guaranteed", 2, {0: ("A",), 1: ("B",)})
    assert "guaranteed job already, o" in rack.back[G]
    assert G not in rack.machine.gangs and not rack.machine.gpus["A"].members
    rack.come(MORE, "guaranteed", 2)
    assert MORE in rack.started


def test_a_gang_for_a_gpu_that_is_not_here_goes_back() -> None:
    rack = HostRack()
    rack.tell(GangComing(G, 1, "guaranteed", {0: ("Z",)}, 0, False))
    assert rack.back[G] == "there is no GPU Z here now"


def test_the_scheduler_asks_again_and_is_answered_again() -> None:
    rack = HostRack()
    rack.come(G, "guaranteed", 4)
    rack.tell(GangComing(G, 1, "guaranteed", {0: ("A",)}, 4 * GIB, False))
    assert rack.started == [G, G]


def test_limits_are_renewed_before_their_lease_is_over_and_only_then() -> None:
    rack = HostRack()
    rack.steady()
    before = rack.pages[OPP, 0]
    rack.tell(HostTick(frozenset({(G, 0)})), 0.1)
    assert rack.pages[OPP, 0] is before
    for _ in range(15):
        rack.tell(HostTick(frozenset({(G, 0)})), 0.1)
    after = rack.pages[OPP, 0]
    assert after.lease_ns > before.lease_ns and after.lease_ns > rack.now_s * 1e9


def test_who_may_do_all_it_wants_beside_a_guaranteed_job_may_do_so_for_a_lease() -> None:
    """Once the agent is gone, no process looks any more whether the guaranteed job suffers."""
    free = Limits(OPP, 1, 1.0, None, 1.0, GIB, FAILSAFE_BESIDE)
    beside = combined([free], 1, guaranteed=False, alone=False, now_s=100.0)
    assert beside.free and beside.lease_ns == round((100.0 + free.lease_s) * 1e9)
    assert rates_at(beside, beside.lease_ns).busy == FAILSAFE_BESIDE
    alone = combined(
        [msgspec.structs.replace(free, failsafe=FAILSAFE_ALONE)], 1, guaranteed=False, alone=True, now_s=100.0
    )
    assert alone.free and alone.lease_ns == 0


def test_memory_is_handed_on_when_the_device_shows_it_free() -> None:
    rack = HostRack()
    rack.steady()
    rack.tell(GangGone(G, 1))
    rack.tell(GpuLooked("A", {G, OPP}))
    assert G in rack.machine.gangs
    rack.tell(GpuLooked("A", {OPP}))
    assert G not in rack.machine.gangs
    assert rack.pages[OPP, 0].free and rack.pages[OPP, 0].lease_ns == 0
    assert rack.neighbours[OPP, 0] is None


def test_after_a_restart_nobody_comes_before_those_that_run_have_said_their_limits() -> None:
    rack = HostRack()
    rack.tell(GangComing(G, 1, "guaranteed", {0: ("A",)}, 4 * GIB, True))
    rack.tell(GangComing(OPP, 1, "opportunistic", {0: ("A",)}, 2 * GIB, True))
    rack.tell(GangComing(MORE, 1, "opportunistic", {0: ("A",)}, 2 * GIB, False))
    assert rack.started == [] and not rack.machine.gpus["A"].members
    rack.tell(PagesMade(G, 1, 0, 7, 4 * GIB))
    rack.tell(PagesMade(OPP, 1, 0, 9, 2 * GIB))
    assert rack.pages[G, 0].epoch > 7 and rack.pages[OPP, 0].epoch > 9
    assert rack.pages[OPP, 0].memory_bytes == 2 * GIB, "it keeps its limit: nobody raised it"
    rack.tell(GangComing(MORE, 1, "opportunistic", {0: ("A",)}, 2 * GIB, False))
    assert MORE in rack.machine.gangs


def test_after_a_restart_nobody_is_given_what_is_anothers_who_is_told_of_later() -> None:
    """An opportunistic job that is found alone would have the whole device, and the guaranteed one no room."""
    rack = HostRack()
    rack.tell(JobsBefore({G, OPP}))
    rack.tell(GangComing(OPP, 1, "opportunistic", {0: ("A",)}, 2 * GIB, True))
    rack.tell(PagesMade(OPP, 1, 0, 9, 2 * GIB))
    rack.tell(HostTick(frozenset()), 0.1)
    rack.tell(GangComing(MORE, 1, "opportunistic", {0: ("A",)}, 2 * GIB, False))
    assert not rack.machine.gpus["A"].members and MORE not in rack.machine.gangs
    rack.tell(GangComing(G, 1, "guaranteed", {0: ("A",)}, 4 * GIB, True))
    rack.tell(PagesMade(G, 1, 0, 7, 4 * GIB))
    rack.tell(HostTick(frozenset()), 0.1)
    assert rack.back == {} and set(rack.started) == {G, OPP}
    held = {job: account.charged_bytes for job, account in rack.machine.gpus["A"].ledger.accounts.items()}
    assert held == {G: 4 * GIB, OPP: 2 * GIB}


def test_after_a_restart_who_says_nothing_is_known_after_a_while() -> None:
    rack = HostRack()
    rack.tell(GangComing(G, 1, "guaranteed", {0: ("A",)}, 4 * GIB, True))
    rack.tell(HostTick(frozenset()), FOUND_S - 1)
    assert not rack.machine.gpus["A"].members
    rack.tell(HostTick(frozenset()), 2)
    assert rack.machine.gpus["A"].ledger.accounts[G].acked_bytes == 4 * GIB


def test_who_acknowledges_nothing_is_pressed_and_a_guaranteed_job_never() -> None:
    """Reference: AntMan §3.3: the guaranteed job comes first."""
    rack = HostRack()
    rack.come(OPP, "opportunistic", 8)
    rack.step(OPP)
    rack.deaf = {OPP}
    rack.come(G, "guaranteed", 6)
    for _ in range(80):
        rack.tell(HostTick(frozenset()), 0.1)
    assert [(press.job, press.how) for press in rack.other] == [(OPP, "limit"), (OPP, "suspend")]
    rack.tell(GpuAnswer("A", HardLimited(OPP, 0, False)))
    rack.tell(GpuAnswer("A", Suspended(OPP, True)))
    assert rack.started == [OPP, G]
    rack.deaf = {OPP, G}
    for _ in range(400):
        rack.tell(HostTick(frozenset()), 0.1)
    assert all(press.job == OPP for press in rack.other)


def test_a_sick_device_sends_its_gangs_back_with_the_reason() -> None:
    rack = HostRack()
    rack.steady()
    rack.tell(GpuHealth("A", "drain", "rows to remap"))
    assert "rows to remap" in rack.back[OPP] and G not in rack.back
    rack.tell(GpuHealth("A", "lost", "XID 79"))
    assert "XID 79" in rack.back[G]


def test_a_device_of_which_nobody_knows_how_it_is_keeps_its_gangs() -> None:
    rack = HostRack()
    rack.steady()
    rack.tell(GpuHealth("A", "unknown", "the driver does not answer"))
    assert not rack.back and rack.machine.gpus["A"].use.why == ""


def test_a_device_that_works_and_should_be_looked_at_is_used_again() -> None:
    """A reset clears what asked for it, and the driver keeps counting memory errors."""
    rack = HostRack()
    rack.tell(GpuHealth("A", "drain", "the driver asks for a reset"))
    rack.tell(GpuHealth("A", "unknown", "the driver does not answer"))
    assert rack.machine.gpus["A"].use.why
    rack.tell(GpuHealth("A", "degraded", "uncorrectable memory errors: 2"))
    rack.come(G, "guaranteed", 4)
    assert G in rack.started


def test_a_device_whose_memory_becomes_known_later_is_counted_by_it() -> None:
    rack = HostRack()
    rack.tell(GpusHere({"A": GIB, "B": 8 * GIB}))
    assert rack.machine.gpus["A"].ledger.capacity_bytes == GIB


def test_a_device_that_was_reset_is_used_again_once_nobody_is_on_it() -> None:
    rack = HostRack()
    rack.come(OPP, "opportunistic", 2)
    rack.tell(GpuHealth("A", "lost", "XID 79"))
    rack.tell(GpuHealth("A", "ok", ""))
    assert rack.machine.gpus["A"].state == "lost", "its job is still there"
    rack.tell(GangGone(OPP, 1))
    rack.tell(GpuLooked("A", frozenset()))
    rack.tell(GpuHealth("A", "ok", ""))
    rack.come(G, "guaranteed", 4)
    assert G in rack.started


def test_a_word_of_an_epoch_that_is_over_counts_for_nothing() -> None:
    """A process of an earlier grant is still there, and its page says that it applied all that it was sent."""
    rack = HostRack()
    rack.come(OPP, "opportunistic", 2)
    page, account = rack.pages[(OPP, 0)], rack.machine.gpus["A"].ledger.accounts[OPP]
    rack.tell(GangComing(G, 1, "guaranteed", {0: ("A",)}, 7 * GIB, False))
    assert account.sent, "it is to give memory back"
    before = list(account.sent)
    rack.tell(RankReported(OPP, 0, 0, RankReport(acked=1 << 40, gate=1)))
    assert account.sent == before and rack.pages[(OPP, 0)].epoch >= page.epoch


def test_limits_of_a_page_never_go_back_for_a_process_that_knows_newer_ones() -> None:
    """The process's agent began anew and counts from 1, and the process would take all that for old."""
    rack = HostRack()
    rack.come(OPP, "opportunistic", 2)
    rack.tell(PagesMade(OPP, 1, 0, 500, GIB))
    assert rack.pages[(OPP, 0)].epoch > 500


def test_a_newer_grant_replaces_one_that_never_started() -> None:
    """The first grant waited for memory here while its gang was taken back and granted again."""
    rack = HostRack()
    rack.come(OPP, "opportunistic", 8)
    rack.step(OPP)
    rack.deaf = {OPP}
    rack.tell(GangComing(G, 1, "guaranteed", {0: ("A",)}, 4 * GIB, False))
    assert rack.started == [OPP]
    rack.tell(GangGone(OPP, 1))
    rack.tell(GangComing(G, 2, "guaranteed", {0: ("A",)}, 4 * GIB, False))
    rack.tell(GpuLooked("A", frozenset()))
    assert rack.started == [OPP, G] and rack.machine.gangs[G].epoch == 2


def test_an_upgrade_holds_for_all_ranks_here_at_once() -> None:
    """Reference: AntMan §3.3, Job upgrade."""
    rack = HostRack("A", "B")
    rack.come(OPP, "opportunistic", 2, {0: ("A",), 1: ("B",)})
    rack.step(OPP, 0)
    rack.step(OPP, 1)
    rack.tell(GangChanged(OPP, 1, "guaranteed", 50))
    assert all(rack.machine.gpus[uuid].guaranteed is not None for uuid in "AB")
    assert rack.pages[OPP, 0].guaranteed and rack.pages[OPP, 1].guaranteed
    rack.tell(GangChanged(OPP, 1, "opportunistic", 49))
    assert rack.machine.gpus["A"].guaranteed is not None, "an older index changes nothing"


def test_a_pair_that_harms_whatever_it_may_do_is_found_once() -> None:
    rack = HostRack()
    rack.steady()
    for _ in range(4000):
        stopped = rack.pages[OPP, 0].idle == 0 and rack.pages[OPP, 0].busy == 0
        rack.step(G, step_ms=20 if stopped else 28)
        rack.tell(HostTick(frozenset()))
        if any(isinstance(found, PairFound) for found in rack.other):
            break
    (found,) = [found for found in rack.other if isinstance(found, PairFound)]
    assert (found.job, found.beside) == (G, OPP) and found.slowdown > 0.05


@pytest.mark.parametrize("seed", in_gate(20, range(60)))
def test_whatever_happens_charges_never_exceed_a_gpu_and_nobody_is_stopped_for_ever(seed: int) -> None:
    """`HostSharing.check` holds after every event, and a job that is told to stop is told for how long."""
    rng, rack = random.Random(seed), HostRack("A", "B")
    jobs = [JobId(name) for name in "abcdef"]
    epochs = dict.fromkeys(jobs, 1)
    for _ in range(400):
        job, gpus = rng.choice(jobs), rng.choice(SHAPES)
        kind: JobKind = rng.choice(["guaranteed", "opportunistic"])
        epoch, rank, size = epochs[job], rng.randrange(2), rng.choice([0, GIB, 3 * GIB, 7 * GIB, 9 * GIB])
        report = RankReport(
            rng.randrange(12), 0, rng.randrange(6) * GIB, rng.randrange(2) * GIB, rng.choice([0, 0, GIB]),
            rng.randrange(3), rng.randrange(3), rng.random() < 0.7, rng.random() < 0.2,
            tuple(MiniBatch(n, rng.randrange(1, 50) * MS, 0) for n in range(rng.randrange(3))),
        )  # fmt: skip
        events: list[HostEvent] = [
            GangComing(job, epoch, kind, gpus, size, rng.random() < 0.2),
            PagesMade(job, epoch, rank, rng.randrange(5), rng.choice([0, GIB])),
            RankReported(job, epoch, rank, report),
            RankReported(job, epoch, rank, report),
            GangChanged(job, epoch, kind, rng.randrange(100)),
            GangGone(job, epoch),
            GpuLooked(rng.choice("AB"), frozenset(rng.sample(jobs, 2))),
            HostTick(frozenset({(job, rank)})),
            GpuAnswer("A", Suspended(job, rng.random() < 0.5)),
            GpuAnswer("B", HardLimited(job, rng.randrange(3) * GIB, rng.random() < 0.5)),
            GpusHere({"A": 8 * GIB, **({"B": 8 * GIB} if rng.random() < 0.9 else {})}),
            JobsBefore(frozenset(rng.sample(jobs, rng.randrange(2)))),
            GpuHealth(rng.choice("AB"), rng.choice(CONDITIONS), "XID"),
        ]
        rack.tell(rng.choice(events), rng.choice([0.0, 0.05, 0.5, 3.0]))
        if rng.random() < 0.05:
            epochs[job] += 1
        for page in rack.pages.values():
            assert page.lease_ns > 0 or (page.free and page.failsafe == 1)
