"""What the log lets happen on shared GPUs: whoever proposes it, with however old a view."""

from typing import Any

import pytest

from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.machine.leader.leader import Leader, RackHost, ScheduleTick
from plugins.scheduler.machine.leader.shared_capacity import SharedCapacity, SharedGpus, Sharing, host_of
from plugins.scheduler.machine.log.job_endings import HARMS_MAX
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.models import HARMED_MAX, PAIR_S, PAIRS_MAX, Models
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.messages.commands import (
    Applied,
    Command,
    Demoted,
    Granted,
    NotApplied,
    Placed,
    QuotaSet,
    RanksReported,
    Submitted,
    TakenBack,
    Upgraded,
)
from plugins.scheduler.messages.spec import JobSpec
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.policy.shared import short_name

H1, H2 = HostId("h1"), HostId("h2")


class Log:
    def __init__(self) -> None:
        self.queue = JobTable()
        self.notes: list[tuple[str, str, str]] = []

    def say(self, command: Command) -> Any:
        result, notes = apply(self.queue, self.queue.index + 1, command)
        self.notes += [(note.subject, note.event, note.reason) for note in notes]
        self.queue.check()
        return result

    def place(self, id: str, gpus: dict[HostId, tuple[str, ...]]) -> Any:
        """Grant a gang, and say that its hosts gave these GPUs."""
        job = self.queue.jobs[JobId(id)]
        assert isinstance(self.say(Granted(wall_s=0.0, job=job.id, epoch=job.grant.epoch + 1, coordinator=H1)), Applied)
        places, rank = [], 0
        for host, held in gpus.items():
            places.append(Place(host, tuple(range(rank, rank + len(held))), held))
            rank += len(held)
        return self.say(
            Placed(wall_s=0.0, job=job.id, epoch=job.grant.epoch, places=tuple(places), master_addr="", master_port=1)
        )

    def submit(self, kind: Any, workers: int = 1, name: str = "x", wall_s: float = 0.0) -> str:
        spec = JobSpec(name=name, tenant="red", job_class=kind, workers=workers, argv=("x",))
        number = self.queue.next_number
        result = self.say(Submitted(wall_s=wall_s, key=f"job-{number:08}", spec=spec, may_demote=True))
        assert isinstance(result, Applied) and result.job is not None
        return result.job

    def demoted(self, gpus: dict[HostId, tuple[str, ...]]) -> str:
        """The id of a job of class auto that was demoted, and runs on these GPUs."""
        id = self.submit("auto", sum(map(len, gpus.values())))
        self.say(Demoted(wall_s=0.0, job=JobId(id), epoch=0, waited_s=1.0))
        assert isinstance(self.place(id, gpus), Applied)
        return id

    def upgrade(self, id: str) -> Any:
        job = self.queue.jobs[JobId(id)]
        return self.say(Upgraded(wall_s=0.0, job=job.id, epoch=job.grant.epoch))


def test_all_ranks_are_upgraded_or_none() -> None:
    """One host of two has another guaranteed job on its GPU. Reference: AntMan §3.3, job upgrade."""
    log = Log()
    other = log.submit("guaranteed")
    assert isinstance(log.place(other, {H2: ("b",)}), Applied)
    id = log.demoted({H1: ("a+1",), H2: ("b+1",)})
    refused = log.upgrade(id)
    assert isinstance(refused, NotApplied) and refused.why == f"GPU b on h2 belongs to {other}, which is guaranteed"
    assert log.queue.jobs[JobId(id)].job_class == "opportunistic" and log.queue.used("red") == 1
    log.say(RanksReported(wall_s=0.0, job=JobId(other), epoch=1, host=H2, codes={0: 0}))
    assert isinstance(log.upgrade(id), Applied)
    assert log.queue.used("red") == 2


def test_no_upgrade_is_proposed_while_a_host_of_the_gang_is_away() -> None:
    log = Log()
    other = log.submit("guaranteed")
    log.place(other, {H2: ("b",)})
    log.demoted({H1: ("a+1",), H2: ("b+1",)})
    log.say(RanksReported(wall_s=0.0, job=JobId(other), epoch=1, host=H2, codes={0: 0}))
    log.say(QuotaSet(wall_s=0.0, tenant="red", gpus=2))
    leader = Leader(log.queue, SchedulerSettings(beside=1), Sharing(beside=1))
    here, there = (
        RackHost(host, 1, None, SharedGpus(names=(short_name(gpu),))) for host, gpu in ((H1, "a"), (H2, "b"))
    )

    def proposed(*hosts: RackHost) -> list[Command]:
        return [action.command for action in leader.handle(ScheduleTick(hosts, 100.0), 100.0)]

    assert not any(isinstance(command, Upgraded) for command in proposed(here))
    two = proposed(here, there)
    assert any(isinstance(command, Upgraded) for command in two), two


def test_an_upgrade_waits_for_a_guaranteed_job_that_still_stops_there() -> None:
    log = Log()
    other = log.submit("guaranteed")
    log.place(other, {H1: ("a",)})
    id = log.demoted({H1: ("a+1",)})
    log.say(TakenBack(wall_s=0.0, job=JobId(other), epoch=1, cause="preempted", reason="x"))
    assert log.queue.jobs[JobId(other)].state == "stopping"
    assert isinstance(log.upgrade(id), NotApplied)


def test_no_guaranteed_job_comes_to_a_gpu_of_which_an_upgraded_one_holds_a_part() -> None:
    log = Log()
    id = log.demoted({H1: ("a+1",)})
    assert isinstance(log.upgrade(id), Applied)
    other = log.submit("guaranteed")
    refused = log.place(other, {H1: ("a",)})
    assert isinstance(refused, NotApplied) and refused.why == f"GPU a on h1 belongs to {id}"
    guest = log.submit("opportunistic")
    assert isinstance(log.place(guest, {H1: ("a+2",)}), Applied), "others may be beside it"


@pytest.mark.parametrize("gpus", [("a+1", "a+2"), ("a+1", "a")])
def test_two_ranks_of_a_gang_do_not_share_a_gpu(gpus: tuple[str, ...]) -> None:
    log = Log()
    assert isinstance(log.place(log.submit("opportunistic", 2), {H1: gpus}), NotApplied)


def test_a_guaranteed_job_gets_no_part_and_a_part_has_one_holder() -> None:
    log = Log()
    refused = log.place(log.submit("guaranteed"), {H1: ("a+1",)})
    assert isinstance(refused, NotApplied) and refused.why == "it is guaranteed, and h1 gives it only a part of GPU a"
    log = Log()
    assert isinstance(log.place(log.submit("opportunistic"), {H1: ("a+1",)}), Applied)
    assert isinstance(log.place(log.submit("opportunistic"), {H1: ("a+1",)}), NotApplied)


def test_the_story_of_each_says_with_whom_it_shares() -> None:
    log = Log()
    first = log.submit("guaranteed", 2)
    log.place(first, {H1: ("a",), H2: ("b",)})
    second = log.submit("opportunistic", 2)
    log.place(second, {H1: ("a+1",), H2: ("b+1",)})
    assert (first, "shares GPUs", f"with {second} (opportunistic) on h1, h2") in log.notes
    assert (second, "shares GPUs", f"with {first} (guaranteed) on h1, h2") in log.notes


def test_what_it_harms_is_remembered_in_log_and_snapshots_up_to_so_many() -> None:
    log = Log()
    id = log.submit("opportunistic")
    for number in range(HARMS_MAX + 2):
        log.place(id, {H1: ("a+1",)})
        epoch, other = log.queue.jobs[JobId(id)].grant.epoch, JobId(f"j{100 + number}")
        why = f"beside {other} it slows that job by slower"
        log.say(TakenBack(wall_s=0.0, job=JobId(id), epoch=epoch, cause="unfit", reason=why, harms=other))
        log.say(RanksReported(wall_s=0.0, job=JobId(id), epoch=epoch, host=H1, codes={0: -15}, asked=True))
    job = log.queue.jobs[JobId(id)]
    assert (job.state, job.tally.unfit, len(job.measured.harms)) == ("queued", HARMS_MAX + 2, HARMS_MAX)
    again = JobTable()
    again.restore(log.queue.snapshot())
    again.check()
    assert (
        again.snapshot() == log.queue.snapshot()
        and again.jobs[JobId(id)].measured.harms[-1] == f"j{100 + HARMS_MAX + 1}"
    )


class Harm(Log):
    """A queue where `guest.py` was taken back since it harmed `train.py` on h1, which still runs there."""

    def __init__(self) -> None:
        super().__init__()
        self.harmed = self.submit("guaranteed", name="train.py")
        self.place(self.harmed, {H1: ("a",)})
        self.guest = self.submit("opportunistic", name="guest.py")
        self.harms(self.guest, self.harmed, 1000.0)

    def harms(self, guest: str, job: str, wall_s: float) -> None:
        self.place(guest, {H1: ("a+1",)})
        id, epoch = JobId(guest), self.queue.jobs[JobId(guest)].grant.epoch
        why = f"beside {job} it slows that job by slower"
        self.say(TakenBack(wall_s=wall_s, job=id, epoch=epoch, cause="unfit", reason=why, harms=JobId(job)))
        self.say(RanksReported(wall_s=wall_s, job=id, epoch=epoch, host=H1, codes={0: -15}, asked=True))

    def apart_from(self, id: str) -> list[JobId]:
        return self.queue.apart_from(self.queue.jobs[JobId(id)])


def test_a_script_that_is_submitted_again_does_not_meet_the_one_it_harmed() -> None:
    log = Harm()
    again = log.submit("opportunistic", name="guest.py", wall_s=2000.0)
    other = log.submit("opportunistic", name="other.py", wall_s=2000.0)
    assert (log.apart_from(again), log.apart_from(other)) == ([log.harmed], [])
    log.say(RanksReported(wall_s=3000.0, job=JobId(log.harmed), epoch=1, host=H1, codes={0: 0}))
    assert log.apart_from(again) == [], "it has ended, and holds nothing"
    next_one, stranger = log.submit("guaranteed", name="train.py"), log.submit("guaranteed", name="stranger.py")
    log.place(next_one, {H1: ("a",)})
    log.place(stranger, {H2: ("b",)})
    assert log.apart_from(again) == [next_one]
    shared = {H1: SharedGpus(names=(short_name("a"),)), H2: SharedGpus(names=(short_name("b"),))}
    free = SharedCapacity(log.queue, {H1: 1, H2: 1}, None, Sharing(beside=1), shared).free_for
    assert [host_of(unit) for unit in free(log.queue.jobs[JobId(again)])] == [H2]
    assert [host_of(unit) for unit in free(log.queue.jobs[JobId(other)])] == [H1, H2]


def test_pairs_are_kept_in_snapshots_for_a_day_and_only_so_many() -> None:
    log = Harm()
    restored = JobTable()
    restored.restore(log.queue.snapshot())
    assert restored.models.pairs == log.queue.models.pairs == {"red/guest.py": {"red/train.py": 1000.0}}
    assert restored.snapshot() == log.queue.snapshot()
    log.submit("opportunistic", name="late.py", wall_s=1000.0 + PAIR_S)
    assert log.queue.models.pairs == {}
    models, train = Models(), JobSpec(name="train.py", argv=("x",))
    for number in range(PAIRS_MAX + 1):
        models.saw_harm(JobSpec(name=f"guest{number}.py", argv=("x",)), train, 1000.0)
    for number in range(HARMED_MAX + 1):
        models.saw_harm(train, JobSpec(name=f"train{number}.py", argv=("x",)), 1000.0)
    assert len(models.pairs) == PAIRS_MAX and len(models.harmed_by(train)) == HARMED_MAX
    assert "default/train0.py" not in models.harmed_by(train)


def test_quotas_count_guaranteed_jobs_and_an_upgrade_needs_room_in_one() -> None:
    log = Log()
    log.say(QuotaSet(wall_s=0.0, tenant="red", gpus=1))
    id = log.demoted({H1: ("a+1",), H2: ("b+1",)})
    assert log.queue.used("red") == 0
    assert isinstance(log.upgrade(id), NotApplied), "it needs two"
    log.say(QuotaSet(wall_s=0.0, tenant="red", gpus=2))
    assert isinstance(log.upgrade(id), Applied) and log.queue.used("red") == 2
