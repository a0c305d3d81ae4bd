"""When jobs that wait will start: lengths from ended jobs that are alike, jobs that come as they came, and the leader
run ahead, which says what the leader then does."""

import asyncio
import math
import random
from itertools import islice

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covey.core.errors import Refused
from covey.core.ids import JobId
from plugins.scheduler.machine.ahead import run_ahead
from plugins.scheduler.machine.ahead.run_ahead import RunAhead, moment
from plugins.scheduler.policy.foreseen.arrivals import ARRIVALS_MIN, coming, recent
from plugins.scheduler.policy.foreseen.lengths import ALIKE_MIN, JobKind, Lengths, PastJob, pattern_of, remaining_s
from plugins.scheduler.policy.rules import COVEY, OrderRules
from plugins.start_views import StartsView
from sim.jobs.engine import SimJob
from sim.jobs.live import Live, settings_of
from tests.plugins.scheduler.rack import Rack, on_a_rack, submit, until, user

KIND = JobKind("ann", "bert-lr*", 8, "red", "guaranteed")


def ended(*lengths_s: float, kind: JobKind = KIND) -> list[PastJob]:
    return [PastJob(kind, float(at), length_s) for at, length_s in enumerate(lengths_s)]


def test_a_length_is_that_of_the_most_alike_that_ran_longer() -> None:
    gpt = KIND._replace(name="gpt", gpus=1)
    lengths = Lengths([*ended(*range(100, 110)), *ended(*range(1000, 1010), kind=gpt)])
    assert pattern_of("bert-lr3") == pattern_of("bert-lr14") == KIND.name
    found = lengths.basis(KIND, 0.0)
    assert found is not None and found.words == "10 jobs of ann named bert-lr* with 8 GPUs"
    assert found.outline == "10 jobs of ann with 8 GPUs", "the name is not for everybody"
    ran = lengths.basis(KIND, 104.0)
    assert ran is not None and ran.words.startswith(
        f"{ALIKE_MIN} jobs of ann named bert-lr* with 8 GPUs that ran longer"
    )
    assert all(remaining_s(ran, 104.0, None, random.Random(seed)) >= 1.0 for seed in range(50))
    longest = lengths.basis(KIND, 105.0)
    assert longest is not None and longest.words.startswith("14 jobs of ann that ran longer"), (
        "too few like it are left"
    )
    bob = lengths.basis(KIND._replace(user="bob", tenant="blue", gpus=2), 0.0)
    assert bob is not None and bob.words == "20 jobs of any kind"
    assert Lengths(ended(1.0, 2.0, 3.0, 4.0)).basis(KIND, 0.0) is None, "that is too few to say"


@given(
    lengths_s=st.lists(st.floats(1.0, 1e6), min_size=ALIKE_MIN, max_size=40),
    ran_s=st.floats(0.0, 2e6),
    limit_s=st.none() | st.floats(1.0, 1e6),
    seed=st.integers(0, 1000),
)
def test_a_draw_is_over_what_ran_and_within_the_limit(
    lengths_s: list[float], ran_s: float, limit_s: float | None, seed: int
) -> None:
    basis = Lengths(ended(*lengths_s)).basis(KIND, ran_s)
    assert basis is not None
    left_s = remaining_s(basis, ran_s, limit_s, random.Random(seed))
    assert left_s >= 1.0 and math.isfinite(left_s)
    assert limit_s is None or left_s <= max(1.0, limit_s - ran_s)
    longer = [length_s for length_s in lengths_s if length_s > ran_s]
    if limit_s is None and longer:
        assert left_s >= max(1.0, min(longer) - ran_s)


def test_one_draw_in_n_and_one_is_longer_than_all_that_were_seen() -> None:
    basis = Lengths(ended(*range(10, 19))).basis(KIND, 0.0)
    assert basis is not None
    rng = random.Random(7)
    longer = sum(remaining_s(basis, 0.0, None, rng) > 18.0 for _ in range(10_000))
    assert longer == pytest.approx(1000, rel=0.15)


@given(st.lists(st.floats(0.0, 1e5), min_size=ARRIVALS_MIN, max_size=60), st.integers(0, 1000))
def test_jobs_come_at_the_rate_at_which_they_came(times_s: list[float], seed: int) -> None:
    now_s = max(times_s) + 100.0
    seen = recent([PastJob(KIND, at_s, 1.0) for at_s in times_s], now_s)
    assert len(seen) == len(times_s)
    span_s = now_s - min(times_s)
    after_s = [each for each, _ in islice(coming(seen, now_s, random.Random(seed)), 2 * len(seen))]
    assert after_s == sorted(after_s) and after_s[0] >= 0
    assert len([each for each in after_s if each < span_s]) == pytest.approx(len(seen), abs=1)
    assert recent([PastJob(KIND, now_s + 1.0, 1.0)] * 100, now_s) == [], "what is after now is not known"


# ---- the leader run ahead ----

GPUS = 8
gangs = st.lists(st.tuples(st.sampled_from([1, 1, 2, 4, 8]), st.integers(5, 20_000)), min_size=2, max_size=14)


@pytest.fixture(autouse=True)
def to_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ahead, "ROUGH_MAX_S", 1.0)


@given(gangs, st.integers(1, 40_000))
@example([(1, 100), (1, 100), (1, 74), (2, 72), (1, 5), (4, 801), (8, 5)], 901)  # one is being stopped then
def test_with_all_lengths_known_the_leader_starts_jobs_when_it_was_foreseen(
    jobs: list[tuple[int, int]], at_s: int
) -> None:
    """All jobs come at second 0; at some second the rest is foreseen. The clocks of wide gangs, which a new leader
    begins anew, are off."""
    rules = OrderRules(thresholds_gpu_s=COVEY.thresholds_gpu_s, narrow_first=True, preempt_s=30, restore_s=30)
    gave = [SimJob(at, 0, gpus, duration_s) for at, (gpus, duration_s) in enumerate(jobs)]
    seen = Watched(gave, rules, at_s)
    seen.run()
    foreseen = {seen.at[id]: at_s + second for id, second in seen.foreseen.items()}
    assert foreseen == {at: seen.next_start[at] for at in foreseen}
    assert seen.waited <= foreseen.keys(), "and each job that waited was foreseen"


class Watched(Live):
    """A run that is foreseen at one second, with the true lengths."""

    def __init__(self, jobs: list[SimJob], rules: OrderRules, at_s: int) -> None:
        super().__init__(jobs, 2, GPUS // 2, rules, settings_of(rules, {}, None, None))
        self.kernel.post(at_s, lambda: None)
        self.at_s, self.foreseen = at_s, dict[JobId, float]()
        self.next_start: dict[int, int] = {}
        self.waited: set[int] = set()

    def _start(self, at: int, counts: bool) -> None:
        super()._start(at, counts)
        if self.now > self.at_s:
            self.next_start.setdefault(at, self.now)

    def _decide(self) -> None:
        super()._decide()
        if self.now == self.at_s and not self.foreseen:
            for at in self.ids:
                self._accrue(at)
                if self.lives[at].runs:
                    self._report(at)
            begin, _ = moment(self.queue, self.rack, float(self.now), float(self.now))
            course = RunAhead(begin, self.leader.settings, lambda job: float(self.lives[self.at[job.id]].remaining))
            for _ in course.steps():
                pass
            self.foreseen = dict(course.first_s)
            self.waited = {self.at[job.id] for job in self.queue.live() if job.state == "queued"}


# ---- what hosts answer ----

ANNS, BOBS = user("ann", 64001), user("bob", 64002)


async def starts(rack: Rack, host: str = "gpu1", asker: object = None, **fields: object) -> StartsView:
    said = await rack[host].call("starts", asker, **fields)  # type: ignore[arg-type]
    assert isinstance(said, StartsView)
    return said


@on_a_rack({"gpu1": 2, "gpu2": 2})
async def test_any_host_says_when_a_job_starts_and_from_what_or_that_it_is_not_known(rack: Rack) -> None:
    """A dry run submits nothing; of others' jobs no names are shown."""
    await rack["gpu1"].call("tenant_set", tenant="red", users=["ann", "bob"])
    free = await rack["gpu2"].call("start_of", ANNS, argv=["x"], workers=4)
    assert (free.p50_s, free.p90_s, free.basis) == (0.0, 0.0, "there is room for it now")
    assert not rack["gpu1"].service.queue.jobs, "it was not submitted"
    with pytest.raises(Refused, match="can never be placed"):
        await rack["gpu2"].call("start_of", ANNS, argv=["x"], workers=5)
    first = (await submit(rack, name="bert-0", asker=ANNS)).id
    await until(lambda: rack.job(first).state == "running")
    waits = (await submit(rack, name="bert-1", asker=ANNS)).id
    none = await starts(rack)
    assert [(each.id, each.p50_s, each.p90_s) for each in none.starts] == [(waits, None, None)]
    assert none.starts[0].basis == f"not known: no ended job is like {first}: 0 have ended, and {ALIKE_MIN} are needed"
    for _ in range(ALIKE_MIN + 1):
        await asyncio.sleep(100.0)
        rack.finish(first)
        await until(lambda id=waits: rack.job(id).state == "running")  # type: ignore[misc]
        first, waits = waits, (await submit(rack, name="bert-2", asker=ANNS)).id
    await asyncio.sleep(31.0)
    for host in ("gpu1", "gpu2"):
        known = (await starts(rack, host, ANNS)).starts
        assert [each.id for each in known] == [waits]
        assert known[0].p50_s is not None and known[0].p90_s is not None
        assert 40.0 < known[0].p50_s < 80.0 and known[0].p50_s <= known[0].p90_s, "100 s, of which 31 are over"
        assert known[0].basis.startswith("from 6 jobs of ann named bert-* with 4 GPUs ("), known
    bobs = (await starts(rack, "gpu1", BOBS)).starts[0]
    assert "bert" not in bobs.basis and bobs.basis.startswith("from 6 jobs of ann with 4 GPUs"), bobs.basis
    dry = await rack["gpu2"].call("start_of", BOBS, argv=["x"], workers=4)
    assert dry.p50_s is not None and dry.p50_s > known[0].p50_s, "it comes after the one that waits"
    await rack["gpu1"].call("hold", id=waits)
    await asyncio.sleep(31.0)
    assert (await starts(rack, job=waits)).starts[0].basis == "not known: it is held until somebody releases it"
    assert (await starts(rack, job=first)).starts == [], "it runs"
