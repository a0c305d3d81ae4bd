"""The replicated state machine by story, and by every order of commands that hypothesis can think of."""

from typing import Any

import pytest

from covey.core.ids import HostId, JobId
from plugins.facts import Place, StepTiming
from plugins.scheduler.machine.log import job_endings, job_starts
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.messages.commands import (
    Applied,
    Attained,
    CancelAsked,
    Command,
    Granted,
    JobSteps,
    NotApplied,
    Placed,
    PlaceFailed,
    Promoted,
    QuotaSet,
    RanksReported,
    Result,
    Submitted,
    TakenBack,
    TimeLimitReached,
)
from plugins.scheduler.messages.spec import JobSpec

H1, H2, H3 = HostId("h1"), HostId("h2"), HostId("h3")


class Told:
    """A queue and what was said to it."""

    def __init__(self) -> None:
        self.queue = JobTable()
        self.notes: list[tuple[str, str]] = []

    def say(self, command: Command) -> Result:
        result, notes = apply(self.queue, self.queue.index + 1, command)
        self.notes += [(note.subject, note.event) for note in notes]
        self.queue.check()
        return result

    def submit(self, workers: int = 2, tenant: str = "alice", **more: Any) -> JobId:
        spec = JobSpec.parse({"argv": ["train"], "workers": workers, "tenant": tenant, "env": {"A": "1"}, **more})
        result = self.say(Submitted(wall_s=1.0, key=f"key-{self.queue.index:08}", spec=spec))
        assert isinstance(result, Applied) and result.job is not None
        return result.job

    def grant(self, id: JobId, coordinator: HostId = H1) -> Result:
        return self.say(Granted(wall_s=2.0, job=id, epoch=self[id].grant.epoch + 1, coordinator=coordinator))

    def place(self, id: JobId, *places: Place, epoch: int | None = None) -> Result:
        return self.say(
            Placed(
                wall_s=3.0,
                job=id,
                epoch=self[id].grant.epoch if epoch is None else epoch,
                places=places,
                master_addr="10.0.0.1",
                master_port=20_000,
            )
        )

    def run(self, workers: int = 2, tenant: str = "alice", base: int = 0, **more: Any) -> JobId:
        """Run a job: submitted, granted and placed, half on h1 and half on h2."""
        id = self.submit(workers, tenant, **more)
        assert isinstance(self.grant(id), Applied)
        assert isinstance(self.place(id, *halves(workers, base)), Applied)
        return id

    def report(self, id: JobId, host: HostId, codes: dict[int, int], **more: Any) -> Result:
        return self.say(RanksReported(wall_s=9.0, job=id, epoch=self[id].grant.epoch, host=host, codes=codes, **more))

    def __getitem__(self, id: str) -> Job:
        return self.queue.jobs[JobId(id)]


def halves(workers: int, base: int = 0) -> tuple[Place, ...]:
    middle = (workers + 1) // 2
    parts = ((H1, range(middle)), (H2, range(middle, workers)))
    return tuple(
        Place(host, tuple(ranks), tuple(f"g{base + rank}" for rank in ranks)) for host, ranks in parts if ranks
    )


def refusal(result: Result) -> NotApplied:
    assert isinstance(result, NotApplied)
    return result


def test_a_job_goes_from_queued_to_done_and_its_story_is_told() -> None:
    told = Told()
    id = told.run()
    assert told[id].state == "running" and told.queue.used("alice") == 2
    told.report(id, H1, {0: 0})
    assert told[id].state == "running"
    told.report(id, H2, {1: 0})
    job = told[id]
    assert (job.state, job.ending.exit_code, job.times.ended_wall_s) == ("done", 0, 9.0)
    assert told.queue.used("alice") == 0 and told.queue.holders == {}
    assert job.spec.env == {}, "an ended job carries no environment"
    assert [event for _, event in told.notes] == [
        "submitted", "granted", "placed", "ranks ended", "ranks ended", "done",
    ]  # fmt: skip


def test_the_same_key_is_the_same_job() -> None:
    told = Told()
    spec = JobSpec.parse({"argv": ["train"]})
    first = told.say(Submitted(wall_s=1.0, key="the-very-key", spec=spec))
    assert told.say(Submitted(wall_s=2.0, key="the-very-key", spec=spec)) == first == Applied(JobId("j1"))
    assert list(told.queue.jobs) == ["j1"]


def test_a_grant_over_the_quota_is_refused_and_one_after_an_end_is_not() -> None:
    told = Told()
    told.say(QuotaSet(wall_s=1.0, tenant="alice", gpus=3))
    first, second = told.run(2), told.submit(2)
    assert "holds 2 of 3 GPUs" in refusal(told.grant(second)).why
    other = told.submit(2, "bob")
    assert isinstance(told.grant(other), Applied)
    told.report(first, H1, {0: 0})
    assert isinstance(told.grant(second), NotApplied), "a gang holds its quota until the last host reported"
    told.report(first, H2, {1: 0})
    assert isinstance(told.grant(second), Applied)


def test_more_than_the_quota_could_ever_allow_is_refused_at_submit() -> None:
    told = Told()
    told.say(QuotaSet(wall_s=1.0, tenant="*", gpus=1))
    spec = JobSpec.parse({"argv": ["train"], "workers": 2})
    assert refusal(told.say(Submitted(wall_s=1.0, key="12345678", spec=spec))).code == 4
    told.submit(2, **{"class": "opportunistic"})


def test_a_quota_lowered_under_what_is_held_lets_that_run_out_and_grants_nothing() -> None:
    told = Told()
    id, waiting = told.run(4), told.submit(1)
    told.say(QuotaSet(wall_s=1.0, tenant="alice", gpus=2))
    assert told[id].state == "running"
    assert isinstance(told.grant(waiting), NotApplied)
    told.report(id, H1, {0: 0, 1: 0})
    told.report(id, H2, {2: 0, 3: 0})
    assert told.queue.overshoot == {}
    assert isinstance(told.grant(waiting), Applied)


def test_initial_quotas_do_not_overwrite_what_a_person_set() -> None:
    told = Told()
    told.say(QuotaSet(wall_s=1.0, tenant="alice", gpus=None))
    told.say(QuotaSet(wall_s=1.0, tenant="alice", gpus=3, if_absent=True))
    told.say(QuotaSet(wall_s=1.0, tenant="bob", gpus=3, if_absent=True))
    assert told.queue.quotas == {"alice": None, "bob": 3}


def test_commands_of_another_epoch_change_nothing() -> None:
    told = Told()
    id = told.submit()
    for epoch in (0, 2, 7):
        refusal(told.say(Granted(wall_s=2.0, job=id, epoch=epoch, coordinator=H1)))
    told.grant(id)
    told.say(PlaceFailed(wall_s=3.0, job=id, epoch=1, reason="no room"))
    told.grant(id, H2)
    before = told.queue.snapshot()
    stale: list[Command] = [
        Placed(wall_s=3.0, job=id, epoch=1, places=halves(2), master_addr="", master_port=0),
        PlaceFailed(wall_s=3.0, job=id, epoch=1, reason="late"),
        RanksReported(wall_s=3.0, job=id, epoch=1, host=H1, codes={0: 1}),
        TakenBack(wall_s=3.0, job=id, epoch=1, cause="preempted", reason="late"),
        TimeLimitReached(wall_s=3.0, job=id, epoch=1),
        Promoted(wall_s=3.0, job=id, epoch=1),
    ]
    index = told.queue.index
    for command in stale:
        refusal(apply(told.queue, index, command)[0])
    assert told.queue.snapshot() == before


def test_a_gang_is_placed_whole_and_only_on_gpus_that_are_its_own() -> None:
    told = Told()
    told.run(2)
    id = told.submit(2)
    told.grant(id)
    wrong = [
        (Place(H3, (0,), ("g0",)),),
        (Place(H3, (0, 1), ("g0",)),),
        (Place(H3, (0, 1), ("g0", "g0")),),
        (Place(H3, (1, 0), ("g0", "g1")),),
        (Place(H3, (0,), ("g0",)), Place(H3, (1,), ("g1",))),
        (Place(H3, (0, 1), ("g0", "g1")), Place(H2, (), ())),
        (Place(H3, (0, 1, 2), ("g0", "g1", "g2")),),
    ]
    for places in wrong:
        refusal(told.place(id, *places))
    assert "belongs to j1" in refusal(told.place(id, Place(H1, (0, 1), ("g0", "g5")))).why
    assert isinstance(told.place(id, Place(H1, (0, 1), ("g4", "g5"))), Applied)


def test_placed_said_twice_is_one_start() -> None:
    told = Told()
    id = told.run()
    assert isinstance(told.place(id, *halves(2)), Applied)
    assert told[id].tally.attempt == 1
    refusal(told.place(id, Place(H3, (0, 1), ("g0", "g1"))))


def test_the_first_failure_decides_and_the_exit_code_is_its() -> None:
    told = Told()
    id = told.run(4)
    told.report(id, H2, {3: -15, 2: -9})
    assert (told[id].state, told[id].ending.after) == ("stopping", "failed")
    told.report(id, H1, {0: 1, 1: -15}, asked=True)
    job = told[id]
    assert (job.state, job.ending.exit_code, job.reason) == ("failed", 137, "rank 2 on h2 was killed by SIGKILL (9)")


def test_why_ranks_could_not_start_is_said() -> None:
    told = Told()
    id = told.run(1)
    told.report(id, H1, {0: 127}, reason="./train.py: no such file")
    assert told[id].reason == "rank 0 on h1 exited with 127: ./train.py: no such file"


def test_exit_75_queues_the_job_again_whatever_the_others_say() -> None:
    told = Told()
    id = told.run(2)
    told.report(id, H1, {0: 75})
    told.report(id, H2, {1: -9}, asked=True)
    job = told[id]
    assert (job.state, job.tally.requeues, job.ending.exit_code, job.tally.preemptions) == ("queued", 1, None, 0)
    told.grant(id)
    told.place(id, *halves(2))
    assert (job.grant.epoch, job.tally.attempt) == (2, 2)


def test_a_preempted_gang_waits_for_each_of_its_hosts_and_any_exit_queues_it_again() -> None:
    told = Told()
    id = told.run(2)
    told.say(TakenBack(wall_s=5.0, job=id, epoch=1, cause="preempted", reason="j9 comes first"))
    assert told[id].state == "stopping" and told.queue.used("alice") == 2
    told.report(id, H1, {0: 0}, asked=True)
    assert told[id].state == "stopping"
    told.report(id, H2, {1: 3}, asked=True)
    assert (told[id].state, told[id].tally.preemptions, told.queue.used("alice")) == ("queued", 1, 0)


def test_ranks_that_end_with_0_because_they_were_told_to_are_not_done() -> None:
    told = Told()
    id = told.run(2)
    told.say(TakenBack(wall_s=5.0, job=id, epoch=1, cause="preempted", reason="j9 comes first"))
    told.report(id, H1, {0: 0}, asked=True)
    told.report(id, H2, {1: 0}, asked=True)
    assert told[id].state == "queued"


def test_a_gang_that_finished_before_it_was_told_to_stop_is_done() -> None:
    for command in (
        TakenBack(wall_s=5.0, job=JobId("j1"), epoch=1, cause="preempted", reason="j9 comes first"),
        CancelAsked(wall_s=5.0, job=JobId("j1")),
    ):
        told = Told()
        id = told.run(2)
        told.say(command)
        told.report(id, H1, {0: 0})
        told.report(id, H2, {1: 0})
        assert (told[id].state, told[id].ending.exit_code) == ("done", 0)


def test_a_failure_beside_a_host_that_did_not_answer_counts_as_a_lost_host() -> None:
    told = Told()
    id = told.run(2)
    told.report(id, H1, {0: 1}, unreachable=(H2,))
    job = told[id]
    assert (job.state, job.ending.after, job.tally.hosts_lost, job.tally.failures) == ("stopping", "queued", 1, 0)
    assert "exit" in job.reason and "h2 did not answer h1 then" in job.reason
    told.say(TakenBack(wall_s=5.0, job=id, epoch=1, cause="host lost", reason="h2 is gone", lost=(H2,)))
    assert (job.state, job.tally.hosts_lost) == ("queued", 1), "counted once"


@pytest.mark.parametrize("unreachable", [(H1,), (H3,), ()])
def test_a_failure_is_one_when_every_other_host_of_the_gang_answered(unreachable: tuple[HostId, ...]) -> None:
    told = Told()
    id = told.run(2)
    told.report(id, H1, {0: 1}, unreachable=unreachable)
    assert (told[id].ending.after, told[id].tally.hosts_lost, told[id].tally.failures) == ("failed", 0, 1)


def test_nobody_waits_for_a_lost_host_and_what_it_says_later_changes_nothing() -> None:
    told = Told()
    id = told.run(2)
    told.say(TakenBack(wall_s=5.0, job=id, epoch=1, cause="host lost", reason="h2 is gone", lost=(H2, H3)))
    assert (told[id].state, told[id].ending.lost) == ("stopping", (H2,))
    told.report(id, H1, {0: -15}, asked=True)
    assert told[id].state == "queued"
    refusal(told.report(id, H2, {1: 0}))
    told.grant(id)
    told.place(id, Place(H1, (0, 1), ("g0", "g1")))
    refusal(told.say(RanksReported(wall_s=9.0, job=id, epoch=1, host=H2, codes={1: 5})))
    assert told[id].state == "running"


def test_a_stopping_gang_ends_when_its_last_host_is_lost() -> None:
    told = Told()
    id = told.run(2)
    told.report(id, H1, {0: 2})
    told.say(TakenBack(wall_s=5.0, job=id, epoch=1, cause="host lost", reason="h2 is gone", lost=(H2,)))
    assert (told[id].state, told[id].ending.exit_code) == ("failed", 2)


@pytest.mark.parametrize("state", ["queued", "placing", "running", "stopping"])
def test_a_job_can_be_cancelled_in_every_state(state: str) -> None:
    told = Told()
    id = told.submit(2)
    if state != "queued":
        told.grant(id)
    if state in ("running", "stopping"):
        told.place(id, *halves(2))
    if state == "stopping":
        told.say(TakenBack(wall_s=5.0, job=id, epoch=1, cause="preempted", reason="j9 comes first"))
    told.say(CancelAsked(wall_s=6.0, job=id, by="bob"))
    if state in ("running", "stopping"):
        told.report(id, H1, {0: -15}, asked=True)
        told.report(id, H2, {1: -15}, asked=True)
    job = told[id]
    assert (job.state, job.ending.exit_code) == ("cancelled", 143) and "by bob" in job.reason
    assert told.queue.used("alice") == 0
    assert told.say(CancelAsked(wall_s=6.0, job=id)) == Applied(id)


def test_cancelling_what_never_was_or_is_forgotten_is_told_apart() -> None:
    told = Told()
    told.submit()
    assert refusal(told.say(CancelAsked(wall_s=1.0, job=JobId("j2")))).why == "no job ever had this id"
    for odd in ("", "j", "k1", "j-1", "j²", "j" + "9" * 40):
        assert refusal(told.say(CancelAsked(wall_s=1.0, job=JobId(odd)))).code == 3


def test_attained_service_only_grows_and_is_summed_over_hosts() -> None:
    told = Told()
    id = told.run(2)
    for host, done in ((H1, 5.0), (H2, 3.0), (H1, 4.0), (H1, 6.0)):
        told.say(Attained(wall_s=1.0, host=host, service_gpu_s={id: done, JobId("j99"): 1.0}))
    assert told[id].attained_gpu_s == 9.0


def test_steps_of_a_running_job_are_known_by_host_and_forgotten_at_its_next_start() -> None:
    told = Told()
    id = told.run(2)
    epoch = told[id].grant.epoch
    for host, step, step_s in ((H1, 5, 0.2), (H2, 4, 0.3), (HostId("h9"), 99, 9.0)):
        steps = {id: JobSteps(epoch, step, StepTiming(step_s)), JobId("j99"): JobSteps(1, 1, StepTiming(1.0))}
        told.say(Attained(wall_s=1.0, host=host, service_gpu_s={}, steps=steps))
    assert (told[id].start.step, told[id].start.timings) == (5, {H1: StepTiming(0.2), H2: StepTiming(0.3)})
    told.say(Attained(wall_s=1.0, host=H1, service_gpu_s={}, steps={id: JobSteps(epoch - 1, 50, StepTiming(1.0))}))
    assert told[id].start.step == 5, "an older start's"


def test_the_newest_step_and_its_metrics_are_kept_with_the_end() -> None:
    told = Told()
    id = told.run(2)
    told.report(id, H1, {0: 0}, step=10, metrics={"accuracy": 0.95})
    told.report(id, H2, {1: 0}, step=9, metrics={"accuracy": 0.5})
    assert (told[id].start.step, told[id].start.metrics) == (10, {"accuracy": 0.95})


def test_ended_jobs_are_kept_up_to_a_bound_and_their_keys_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_endings, "ENDED_MAX", 3)
    told = Told()
    for _ in range(5):
        told.say(CancelAsked(wall_s=1.0, job=told.submit()))
    assert list(told.queue.jobs) == ["j3", "j4", "j5"] and len(told.queue.keys) == 3
    assert told.queue.was(JobId("j1")) and told.queue.over(JobId("j1"), 1)
    assert not told.queue.was(JobId("j6")) and not told.queue.over(JobId("j6"), 1)


def test_a_full_queue_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_starts, "LIVE_MAX", 2)
    told = Told()
    told.submit()
    told.submit()
    spec = JobSpec.parse({"argv": ["train"]})
    assert refusal(told.say(Submitted(wall_s=1.0, key="12345678", spec=spec))).code == 4
    told.say(CancelAsked(wall_s=1.0, job=JobId("j1")))
    told.submit()


def test_jobs_that_are_large_together_are_refused_before_their_snapshot_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_starts, "LIVE_BYTES_MAX", 100_000)
    told = Told()
    large = JobSpec.parse({"argv": ["train", *["x" * 1000] * 45]})
    ids = [told.say(Submitted(wall_s=1.0, key=f"{n:08}", spec=large)) for n in range(2)]
    refused = refusal(told.say(Submitted(wall_s=1.0, key="00000009", spec=large)))
    assert refused.code == 4 and "100000" in refused.why and "--no-env" in refused.next
    copy = JobTable()
    copy.restore(told.queue.snapshot())
    assert copy.kept_bytes.live == told.queue.kept_bytes.live > 90_000
    told.say(CancelAsked(wall_s=1.0, job=JobId("j1")))
    told.submit()
    assert len(ids) == 2
    told.queue.check()


def test_ended_jobs_that_are_large_are_forgotten_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_endings, "ENDED_BYTES_MAX", 100_000)
    told = Told()
    for number in range(4):
        spec = JobSpec.parse({"argv": ["train", *["x" * 1000] * 45]})
        told.say(Submitted(wall_s=1.0, key=f"{number:08}", spec=spec))
        told.say(CancelAsked(wall_s=1.0, job=JobId(f"j{number + 1}")))
    assert list(told.queue.jobs) == ["j3", "j4"]
    told.queue.check()


def test_a_promotion_forgets_the_service_attained_so_far() -> None:
    told = Told()
    id = told.submit()
    told.say(Attained(wall_s=1.0, host=H1, service_gpu_s={id: 50.0}))
    told.say(Promoted(wall_s=1.0, job=id, epoch=0))
    assert (told[id].priority.base_gpu_s, told[id].priority.promoted) == (50.0, told.queue.index)


def test_a_snapshot_of_another_version_or_a_damaged_one_is_refused() -> None:
    told = Told()
    told.run()
    data = told.queue.snapshot()
    with pytest.raises(ValueError):
        JobTable().restore(data[:-3])
    other = bytearray(data)
    other[data.index(b"version") + len(b"version")] = 9
    with pytest.raises(ValueError, match="version 9"):
        JobTable().restore(bytes(other))
