"""What people ask of jobs that wait, and lists of jobs: who may see and move what, and what is wrong is named."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from chaos.askers import ANN, BOB, EVE, ROOT, VISITOR, asked_by
from covey.core.errors import Refused
from covey.core.ids import HostId, JobId
from covey.wire.job import AskSave, SaveIs
from plugins.askers import Asker
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.commands import CancelAsked, Command, PriorityAsked, RequeueAsked, Submitted
from plugins.scheduler.messages.spec import JobOwner, JobSpec
from plugins.scheduler.messages.wire import SaveAnswer
from plugins.scheduler.service.people.lists import SORTS, wanted, wish_of
from plugins.scheduler.service.people.queue_changes import QueueChanges
from plugins.scheduler.service.people.saves import AskedSaves
from tests.plugins.scheduler.little import Little

NAMES = (("ann", ANN.uid, "BERT_large"), ("ann", ANN.uid, "gpt"), ("bob", BOB.uid, "bert-small"), ("", 0, "root-job"))


@pytest.fixture
def little() -> Little:
    """Two jobs of ann's, the second one running; one of bob's, held; one of the agent's own user."""
    little = Little([1], {"red": 1})
    for user, uid, name in NAMES:
        spec = JobSpec.parse({"argv": ["x"], "tenant": "red", "name": name, "hold": name != "gpt"})
        owned = msgspec.structs.replace(spec, owner=JobOwner(user, uid) if user else None)
        little.say(Submitted(wall_s=float(little.queue.index), key=f"key{little.queue.index:06}", spec=owned))
    little.look()
    little.look()
    little.place(little.queue.jobs[JobId("j2")])
    return little


def listed(little: Little, asker: Asker, **given: str) -> list[str]:
    found = wanted(little.queue.jobs.values(), wish_of(given), asker, 0.0)
    return [job.spec.called for job in found]


def test_a_list_shows_what_is_asked_for_and_no_name_of_others(little: Little) -> None:
    assert listed(little, ANN, mine="1") == ["BERT_large", "gpt"]
    assert len(listed(little, ROOT, mine="1")) == len(listed(little, VISITOR, mine="1")) == 4, "they have no own jobs"
    assert listed(little, EVE, user="ann,bob", sort="-id") == ["bert-small", "gpt", "BERT_large"]
    assert listed(little, ROOT, name="*bert*,BERT*") == ["BERT_large", "bert-small"]
    assert listed(little, ANN, name="*") == ["BERT_large", "gpt"], "names of others are nobody's"
    assert listed(little, EVE, name="*") == []
    assert listed(little, ROOT, state="held") == ["BERT_large", "bert-small", "root-job"]
    assert listed(little, ROOT, state="running,done", tenant="red") == ["gpt"]
    assert listed(little, ROOT, sort="name", limit="2") == ["BERT_large", "bert-small"]
    for sort in SORTS:
        assert len(listed(little, ROOT, sort=sort)) == 4


@pytest.mark.parametrize(
    ("given", "what", "next"),
    [
        ({"state": "runing"}, "invalid state: 'runing'", "did you mean running?"),
        ({"sort": "nam"}, "invalid sort: 'nam'", "did you mean name?"),
        ({"limit": "0"}, "invalid limit: '0'", "agentctl jobs --limit 20"),
        ({"limit": "many"}, "invalid limit: 'many'", "agentctl jobs --limit 20"),
    ],
)
def test_a_wrong_wish_is_named_with_the_nearest_right_one(given: dict[str, str], what: str, next: str) -> None:
    with pytest.raises(Refused) as caught:
        wish_of(given)
    assert (caught.value.code, caught.value.what, caught.value.next) == (2, what, next)


class FakeLog:
    """Takes what is proposed, and applies nothing."""

    def __init__(self, queue: JobTable) -> None:
        self.queue, self.heard = queue, list[Command]()

    async def change(self, command: Command, what: str) -> None:
        self.heard.append(command)

    async def until(self, holds: Any, timeout_s: float) -> bool:
        return True


def changes(little: Little) -> tuple[QueueChanges, FakeLog]:
    log = FakeLog(little.queue)

    async def seek(given: Mapping[str, Any]) -> Job:
        return little.queue.jobs[JobId(str(given["id"]))]

    async def show(given: Mapping[str, Any]) -> str:
        return str(given["id"])

    return QueueChanges(log, seek, show), log  # type: ignore[arg-type]


async def test_a_user_moves_own_jobs_before_own_ones_alone(little: Little) -> None:
    queue, log = changes(little)
    for asker, own in ((ANN, True), (ROOT, False)):
        await queue.commands()["priority"](asked_by(asker, {"id": "j1", "up": True}))
        said = log.heard[-1]
        assert isinstance(said, PriorityAsked) and (said.own, said.up, said.by) == (own, True, asker.user or "uid 0")


async def test_what_is_asked_of_a_job_is_checked_before_anything_is_proposed(little: Little) -> None:
    queue, log = changes(little)
    wrong = (
        ("priority", {"id": "j1"}, "invalid up: 'None'"),
        ("requeue", {"id": "j2", "hold": "yes"}, "invalid hold: 'yes'"),
        ("requeue", {"id": "j2", "test": 1}, "invalid test: '1'"),
        ("update", {"id": "j1"}, "nothing to change about j1"),
        ("update", {"id": "j1", "time_limit_s": -1}, "invalid time_limit_s: '-1'"),
        ("update", {"id": "j1", "time_limit_s": "4h"}, "invalid time_limit_s: '4h'"),
        ("cancel", {"id": "j1", "tasks": "3-7"}, "nothing of j1 was cancelled"),
    )
    for verb, given, what in wrong:
        with pytest.raises(Refused) as caught:
            await queue.commands()[verb](asked_by(ROOT, given))
        assert caught.value.what == what and caught.value.next
    assert not log.heard
    await queue.commands()["requeue"](asked_by(ANN, {"id": "j2", "hold": True}))
    assert log.heard == [RequeueAsked(wall_s=0.0, job=JobId("j2"), epoch=1, hold=True, by="ann")]


async def test_ranks_under_a_timer_of_their_host_get_no_more_time(little: Little) -> None:
    queue, log = changes(little)
    runs = little.queue.jobs[JobId("j2")]
    runs.spec = msgspec.structs.replace(runs.spec, time_limit_s=60.0)
    for more in (61.0, None):
        with pytest.raises(Refused, match="gets no more time") as caught:
            await queue.commands()["update"](asked_by(ANN, {"id": "j2", "time_limit_s": more}))
        assert caught.value.next.startswith("agentctl requeue j2 --hold")
    await queue.commands()["update"](asked_by(ANN, {"id": "j2", "time_limit_s": 30}))
    assert len(log.heard) == 1


async def test_tasks_of_an_array_are_named_by_ranges(little: Little) -> None:
    spec = JobSpec.parse({"argv": ["x"], "tenant": "red", "array": "0-99"})
    little.say(Submitted(wall_s=1.0, key="array-key", spec=spec))
    queue, log = changes(little)
    await queue.commands()["cancel"](asked_by(ROOT, {"id": "j5", "tasks": "3-7,9"}))
    (said,) = log.heard
    assert isinstance(said, CancelAsked) and said.tasks == ((3, 7), (9, 9))
    for text, why in (("x", "no index"), ("1-9:2", "no step"), ("9-1", "ends before it begins")):
        with pytest.raises(Refused) as caught:
            await queue.commands()["cancel"](asked_by(ROOT, {"id": "j5", "tasks": text}))
        assert why in caught.value.why


class FakeRanks:
    """A host whose processes answer at once how far a save is."""

    def __init__(self, *peers: "FakePeer") -> None:
        self.id, self.here, self.env = HostId("h0"), peers, self
        self.answers: object = SaveAnswer("pending")

    def entropy(self, size: int) -> bytes:
        return bytes(range(7, 7 + size))

    def peers(self, job: JobId) -> "Sequence[FakePeer]":
        return self.here

    async def ask(self, plugin: str, host: HostId, question: object, wait_s: float) -> object:
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers


class FakePeer:
    gone, epoch = False, 1

    def __init__(self, rank: int, said: SaveIs, saves: bool = True) -> None:
        self.rank, self.saves, self.save, self._said = rank, saves, SaveIs(0, "refused"), said

    def send(self, frame: AskSave) -> None:
        self.save = msgspec.structs.replace(self._said, number=frame.number)


async def test_the_process_with_rank_0_saves_wherever_it_runs(little: Little) -> None:
    job = little.queue.jobs[JobId("j2")]
    job.state = "running"
    (place,) = job.start.places

    async def seek(given: Mapping[str, Any]) -> Job:
        return little.queue.jobs[JobId(str(given["id"]))]

    async def refusal(host: FakeRanks, **given: Any) -> Refused:
        with pytest.raises(Refused) as caught:
            await AskedSaves("scheduler", host, seek).commands()["checkpoint"]({"id": "j2"} | given)  # type: ignore[arg-type]
        return caught.value

    saved = FakePeer(0, SaveIs(0, "saved", 40, "/ckpt/m.json"))
    here = FakeRanks(FakePeer(1, SaveIs(0, "refused")), saved)
    here.id = place.host
    view = await AskedSaves("scheduler", here, seek).commands()["checkpoint"]({"id": "j2", "number": 9})  # type: ignore[arg-type]
    assert (view.number, view.state, view.step, view.path, saved.save.number) == (9, "saved", 40, "/ckpt/m.json", 9)
    here.here = (FakePeer(0, SaveIs(0, "refused", why="w", next="n")),)
    assert ((await refusal(here)).why, (await refusal(here)).next) == ("w", "n")
    here.here = (FakePeer(0, SaveIs(0, "saved"), saves=False),)
    assert "uses a covey-job that cannot be asked" in (await refusal(here)).why
    here.here = ()
    assert "has not called covey.join()" in (await refusal(here)).why
    far = FakeRanks()
    assert (await AskedSaves("scheduler", far, seek).commands()["checkpoint"]({"id": "j2"})).state == "pending"  # type: ignore[arg-type]
    far.answers = TimeoutError()
    assert (await refusal(far)).code == 75
    for number in (-1, True, "7", 1 << 31):
        assert (await refusal(far, number=number)).code == 2
    assert "only a job that runs can save" in (await refusal(far, id="j1")).why
