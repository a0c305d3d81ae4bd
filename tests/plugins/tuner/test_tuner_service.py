"""The service of the tuner: each host measures and tells the coordinator, which decides; who that is says the log."""

import asyncio
import random
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from covey.core.errors import Refused
from covey.core.events import Fact, Message
from covey.core.ids import HostId, JobId
from covey.ports.probes import CardNow
from plugins import facts
from plugins.base import Host
from plugins.facts import ArrangementsAnswered, ArrangementsWanted, JobPlaced, Place, TunerAsked
from plugins.tuner.machine.tuner import REPORTS_MIN, TensorsNow
from plugins.tuner.messages import HostTimed, TunedHere, TunedNow, TunerSettings
from plugins.tuner.service import EARLY_MAX, TunerService
from plugins.tuner.service.measured import CARRIED_MIN, CardWindow, HostMeasures

JOB = JobId("j1")
H = [HostId(f"h{n}") for n in range(3)]
PLACES = tuple(Place(host, (at,), (f"GPU-{at}",)) for at, host in enumerate(H))
CARRIED = {at: tuple(range(at, 12, 3)) for at in range(3)}


def placed(
    config: int = 0, carried: dict[int, tuple[int, ...]] = CARRIED, places: tuple[Place, ...] = PLACES
) -> JobPlaced:
    return JobPlaced(JOB, 1, "default", 12, places, 3, 0, config, carried, workers=3)


class FakeHost:
    """One agent: what its tuner publishes and sends is kept."""

    def __init__(self, id: HostId) -> None:
        self.id, self.boot, self.advertise, self.now_s = id, 3, "10.0.0.1", 100.0
        self.published: list[Fact] = []
        self.sent: list[tuple[HostId, Message]] = []
        self.noted: list[tuple[str, str]] = []
        self.spawned: list[str] = []
        self.env = SimpleNamespace(
            host=id,
            clock=SimpleNamespace(now_s=lambda: self.now_s),
            rng=random.Random(1),
            spawn=self.spawn,
            log=None,
            probes=SimpleNamespace(card=lambda address: None),
        )

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        self.spawned.append(name)
        if name == "tuner send":
            asyncio.run(work)
        else:
            work.close()

    async def send(self, plugin: str, to: HostId, message: Message, deadline_s: float) -> bool:
        self.sent.append((to, message))
        return True

    def settings(self, kind: type[Any]) -> Any:
        return TunerSettings()

    def publish(self, fact: Fact) -> None:
        self.published.append(fact)

    def note(self, subject: str, event: str, reason: str, key: str = "") -> None:
        self.noted.append((event, reason))


def service(host: HostId, asked: int = 7) -> tuple[TunerService, FakeHost]:
    fake = FakeHost(host)
    tuner = TunerService(cast(Host, fake))
    tuner.on_fact(placed())
    tuner.on_fact(TunerAsked(JOB, 1, asked))
    return tuner, fake


def step(tuner: TunerService, rank: int, compute_s: float = 0.04) -> None:
    tuner.on_fact(facts.StepTimed(JOB, 1, rank, 5, 0.1, compute_s, 0.05, {}))


def second(tuner: TunerService, fake: FakeHost, seconds: float = 2.0) -> None:
    fake.now_s += seconds
    tuner.on_fact(facts.SecondPassed(fake.now_s))


def test_steps_alone_are_measured_before_somebody_asks_and_after_it_is_off() -> None:
    tuner, fake = service(H[1], asked=0)
    step(tuner, 1)
    second(tuner, fake)
    ((to, said),) = fake.sent
    assert (to, cast(HostTimed, said).steps, tuner.tuners, fake.spawned) == (H[0], 1, {}, ["tuner send"])
    second(tuner, fake)
    assert len(fake.sent) == 1, "it did no step, and nobody needs to know of its card"
    tuner.on_fact(TunerAsked(JOB, 1, 9))
    assert fake.spawned[-1] == "tuner looks at the card"
    second(tuner, fake)
    assert [to for to, _ in fake.sent] == [H[0]] * 2
    tuner.on_fact(TunerAsked(JOB, 1, 0))
    second(tuner, fake)
    assert len(fake.sent) == 2
    tuner.on_fact(facts.JobUnplaced(JOB, 1, True))
    step(tuner, 1)
    second(tuner, fake)
    assert len(fake.sent) == 2


def timed(tuner: TunerService, step_s: float, config: int, steps: int = 8, hosts: int = 3) -> None:
    for host in H[:hosts]:
        asyncio.run(tuner.on_message(host, HostTimed(JOB, 1, config, steps, step_s, 0.01, 0.04, 0.0)))


MORE = {at: tuple(range(at, 12, 4)) for at in range(4)}
GROWN = (*PLACES[:2], Place(H[2], (2, 3), ("GPU-2", "GPU-3"), 1))


def test_what_a_change_did_to_a_step_is_noted_whoever_made_it() -> None:
    tuner, fake = service(H[0], asked=0)
    for _ in range(3):
        timed(tuner, 0.4, 0)
    tuner.on_fact(placed(1, MORE, GROWN))
    timed(tuner, 9.0, 1)
    timed(tuner, 9.0, 0)
    assert fake.noted == [], "the change is in the first report, and the other one is late"
    timed(tuner, 0.3, 1)
    timed(tuner, 0.3, 1, hosts=2)
    assert fake.noted == [], "one host has timed 8 steps"
    timed(tuner, 0.3, 1)
    said = "configuration 1, from 3 to 4 processes: 0.3 s a step measured; before 0.4 s"
    assert fake.noted == [("measured", said)]
    timed(tuner, 0.3, 1)
    assert len(fake.noted) == 1, "once"
    tuner.changes[JOB].check()


def test_a_change_before_the_last_one_was_measured_is_said() -> None:
    tuner, fake = service(H[0], asked=0)
    timed(tuner, 0.4, 0)
    tuner.on_fact(placed(1, MORE, GROWN))
    timed(tuner, 0.3, 1)
    tuner.on_fact(placed(2))
    why = "the job was changed again before 16 steps of each host were timed"
    assert fake.noted == [
        ("not measured", f"configuration 1, from 3 to 4 processes: {why}; before: too few steps were timed")
    ]
    for _ in range(3):
        timed(tuner, 0.5, 2)
    assert fake.noted[-1] == (
        "measured",
        "configuration 2, from 4 to 3 processes: 0.5 s a step measured; before: too few steps were timed",
    )
    tuner.on_fact(JobPlaced(JOB, 2, "default", 12, PLACES, 3, 0, 0, CARRIED, workers=3))
    assert len(fake.noted) == 2 and tuner.changes[JOB].change is None, "another start is no change"


def test_what_the_tuner_changed_is_noted_by_the_tuner_alone() -> None:
    tuner, fake = service(H[0])
    asked = wished(tuner, fake)
    tuner.on_fact(placed(config=1))
    tuner.on_fact(ArrangementsAnswered(asked.ask, ""))
    for _ in range(REPORTS_MIN + 1):
        reports(tuner, fake, H[2], config=1)
    assert [event for event, _ in fake.noted].count("tuned") == 1
    assert "measured" not in [event for event, _ in fake.noted]


def test_only_the_coordinator_notes_what_a_change_did() -> None:
    tuner, fake = service(H[1], asked=0)
    assert not tuner.changes
    tuner.on_fact(facts.HostGone(H[0], left=False))
    tuner.on_fact(placed(1, MORE, GROWN))
    for _ in range(3):
        timed(tuner, 0.3, 1)
    assert [event for event, _ in fake.noted] == ["measured"]
    tuner.on_fact(facts.HostSeen(H[0]))
    assert not tuner.changes


def test_a_host_reports_seconds_of_one_rank_to_the_host_of_the_lowest_process() -> None:
    tuner, fake = service(H[1])
    for _ in range(3):
        step(tuner, 1)
    second(tuner, fake)
    ((to, said),) = fake.sent
    assert to == H[0] and isinstance(said, HostTimed)
    assert (said.job, said.epoch, said.config, said.steps) == (JOB, 1, 0, 3)
    assert said.pass_s == pytest.approx(0.01) and said.step_s == pytest.approx(0.1)
    step(tuner, 1)
    tuner.on_fact(placed(config=1))
    second(tuner, fake)
    assert cast(HostTimed, fake.sent[1][1]).steps == 0, "what was timed in an older configuration is forgotten"


def test_steps_of_other_ranks_epochs_and_impossible_times_do_not_count() -> None:
    measures = HostMeasures(placed())
    for fact in (
        facts.StepTimed(JOB, 1, 0, 5, 0.1, 0.1, 0.0, {}),
        facts.StepTimed(JOB, 2, 1, 5, 0.1, 0.1, 0.0, {}),
        facts.StepTimed(JOB, 1, 1, 5, 1e6, 0.1, 0.0, {}),
    ):
        measures.timed(fact, PLACES[1])
    assert measures.report(PLACES[1], 1e6).steps == 0


def test_a_host_that_only_owns_tables_reports_its_card_alone() -> None:
    said = HostMeasures(placed()).report(None, 5e6)
    assert said.steps == 0 and said.card_bytes_per_s == 5e6
    assert HostMeasures(placed()).report(PLACES[0], 5e6).card_bytes_per_s == 0, "no step was under way"


def test_what_a_card_carried_in_a_long_step_is_told_with_the_step() -> None:
    """A step may last longer than reports are apart, and push in an earlier report's time than it ends in."""
    measures = HostMeasures(placed())
    assert measures.report(PLACES[1], 9e8).card_bytes_per_s == 0
    measures.timed(facts.StepTimed(JOB, 1, 1, 5, 6.0, 0.1, 0.0, {}), PLACES[1])
    said = measures.report(PLACES[1], 1e6)
    assert said.steps == 1 and said.card_bytes_per_s == 9e8
    measures.timed(facts.StepTimed(JOB, 1, 1, 6, 6.0, 0.1, 0.0, {}), PLACES[1])
    assert measures.report(PLACES[1], 1e6).card_bytes_per_s == 1e6, "each is told once"
    measures.report(PLACES[1], 9e8)
    measures.place(placed(config=1))
    measures.timed(facts.StepTimed(JOB, 1, 1, 7, 6.0, 0.1, 0.0, {}), PLACES[1])
    assert measures.report(PLACES[1], 0.0).card_bytes_per_s == 0, "that was another configuration"


def test_an_idle_card_or_one_that_came_up_anew_tells_nothing() -> None:
    card = CardWindow()
    card.look(CardNow("eth0", 0, 0), 0.0)
    card.look(CardNow("eth0", 10, int(CARRIED_MIN / 100)), 0.1)
    assert card.taken() == 0
    card.look(CardNow("eth0", 20, 2_000_000), 0.2)
    assert card.taken() == pytest.approx(2e7, rel=0.01)
    card.look(CardNow("eth1", 0, 9_000_000), 0.3)
    card.look(None, 0.4)
    card.look(CardNow("eth1", 0, 99_000_000), 0.5)
    assert card.taken() == 0


def reports(tuner: TunerService, fake: FakeHost, slow: HostId, config: int = 0) -> None:
    for host in H:
        pass_s = 0.04 if host == slow else 0.01
        said = HostTimed(JOB, 1, config, 20, 0.2, pass_s, 0.04, 1e7)
        asyncio.run(tuner.on_message(host, said))


def wished(tuner: TunerService, fake: FakeHost) -> ArrangementsWanted:
    """What the tuner asks the scheduler for once the last host is seen to be slow."""
    for table in range(3):
        tuner.on_fact(facts.TableUsed(JOB, 1, table))
    tuner.on_fact(facts.TensorsSeen(JOB, 1, 1000, 100_000))
    for _ in range(REPORTS_MIN + 1):
        reports(tuner, fake, H[2])
    (asked,) = [fact for fact in fake.published if isinstance(fact, ArrangementsWanted)]
    return asked


def test_the_coordinator_asks_the_scheduler_and_hears_its_answer() -> None:
    tuner, fake = service(H[0])
    asked = wished(tuner, fake)
    assert asked.jobs[JOB].shares[H[2]] < 4
    tuner.on_fact(ArrangementsAnswered(asked.ask, "another change came first"))
    assert fake.noted[-1][0] == "tuner refused"
    view = tuner.view(JOB)
    assert view is not None and view.asked == 7 and [row.ranks for row in view.hosts] == [4, 4, 4]
    answer = asyncio.run(tuner.answer(H[1], TunedHere(JOB)))
    assert answer == TunedNow(view) and asyncio.run(tuner.answer(H[1], TunedHere("j2"))) == TunedNow(None)


def test_another_host_decides_once_the_coordinator_is_gone_and_begins_from_nothing() -> None:
    tuner, _ = service(H[1])
    assert tuner.tuners == {}
    tuner.on_fact(facts.HostGone(H[0], left=False))
    assert list(tuner.tuners) == [JOB] and tuner.tuners[JOB].passes == {}
    tuner.on_fact(facts.HostSeen(H[0]))
    assert tuner.tuners == {}


def test_who_asks_again_lets_the_tuner_begin_anew() -> None:
    tuner, _ = service(H[0])
    before = tuner.tuners[JOB]
    tuner.on_fact(TunerAsked(JOB, 1, 7))
    assert tuner.tuners[JOB] is before
    tuner.on_fact(TunerAsked(JOB, 1, 8))
    assert tuner.tuners[JOB] is not before


def test_a_job_that_is_over_is_forgotten() -> None:
    tuner, fake = service(H[0])
    tuner.on_fact(facts.JobUnplaced(JOB, 1, True))
    second(tuner, fake)
    assert tuner.tuners == {} and fake.sent == []
    reports(tuner, fake, H[2])


def test_what_ranks_of_an_older_start_push_does_not_count() -> None:
    tuner, fake = service(H[0])
    tuner.on_fact(facts.TensorsSeen(JOB, 1, 1000, 100_000))
    tuner.on_fact(facts.TableUsed(JOB, 1, 0))
    tuner.on_fact(facts.TensorsSeen(JOB, 0, 9000, 900_000))
    tuner.on_fact(facts.TableUsed(JOB, 0, 2))
    reports(tuner, fake, H[2])
    assert tuner.tuners[JOB].tensors == TensorsNow(100_000, (0,))


def test_a_table_whose_new_owner_has_seen_a_part_of_it_is_as_large_as_before() -> None:
    tuner, fake = service(H[0])
    tuner.on_fact(facts.TableUsed(JOB, 1, 0))
    tuner.on_fact(facts.TensorsSeen(JOB, 1, 1000, 100_000))
    for _ in range(3):
        reports(tuner, fake, H[2])
    steps = dict(tuner.tuners[JOB].steps)
    tuner.on_fact(facts.TensorsSeen(JOB, 1, 1000, 60_000))
    reports(tuner, fake, H[2])
    assert tuner.tuners[JOB].tensors.total_bytes == 100_000 and tuner.tuners[JOB].steps[H[0]] > steps[H[0]]


def test_ranks_may_be_heard_before_the_log_says_that_their_job_runs() -> None:
    fake = FakeHost(H[0])
    tuner = TunerService(cast(Host, fake))
    tuner.on_fact(facts.TableUsed(JOB, 1, 1))
    tuner.on_fact(facts.TensorsSeen(JOB, 1, 1000, 100_000))
    tuner.on_fact(placed())
    tuner.on_fact(TunerAsked(JOB, 1, 7))
    reports(tuner, fake, H[2])
    assert tuner.tuners[JOB].tensors == TensorsNow(100_000, (1,))


def test_what_is_known_of_jobs_that_are_over_does_not_grow() -> None:
    tuner, _ = service(H[0])
    tuner.on_fact(facts.TableUsed(JOB, 1, 0))
    for number in range(200):
        tuner.on_fact(facts.TableUsed(JobId(f"late{number}"), 1, 0))
    assert len(tuner._tensors) == EARLY_MAX + 1 and JOB in tuner._tensors
    tuner.on_fact(facts.JobUnplaced(JOB, 1, True))
    assert tuner._begun == {} and JOB not in tuner._tensors


def test_a_job_that_is_not_tuned_is_refused_in_words() -> None:
    tuner, _ = service(H[0], asked=0)
    with pytest.raises(Refused, match="the tuner is off") as refused:
        asyncio.run(tuner._show({"id": JOB}))
    assert refused.value.next == "agentctl tune j1"
    with pytest.raises(Refused, match="no elastic job of that name runs"):
        asyncio.run(tuner._show({"id": "j9"}))
