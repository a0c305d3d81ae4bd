"""Records of ended jobs on a rack of fakes: every agent has them, whichever dies; who lacks some asks the others, and
says what is missing; a user sees own ones."""

import asyncio
from typing import Any

import msgspec
import pytest

from agent.ports.job_records import DirectRecords, RecordFile
from covey.core.errors import Refused
from covey.core.ids import JobId
from covey.core.job_records import JobRecord, RecordsAsked
from plugins.facts import StepTimed
from plugins.scheduler.machine.log import job_endings
from plugins.scheduler.messages.wire import RecordsAnswer, RecordsWanted
from plugins.scheduler.service import history
from plugins.scheduler.service.history import FILL_S
from tests.plugins.scheduler.rack import Rack, on_a_rack, refused, submit, until, user

ANN, BOB = user("ann", 64001), user("bob", 64002)


async def ended(rack: Rack, count: int = 1, code: int = 0, **fields: Any) -> list[str]:
    """Run so many jobs one after the other."""
    ids = []
    for _ in range(count):
        id = (await submit(rack, **{"workers": 1, **fields})).id
        await until(lambda id=id: rack.job(id).state == "running")  # type: ignore[misc]
        await asyncio.sleep(3.0)
        rack.finish(id, {0: code})
        await until(lambda id=id: rack.job(id).over)  # type: ignore[misc]
        ids.append(id)
    await asyncio.sleep(2.0)
    return ids


def records(rack: Rack, host: str) -> list[JobRecord]:
    file: RecordFile = rack[host].machine.records._file
    return file.find(RecordsAsked())


@on_a_rack()
async def test_every_agent_has_the_same_record_of_each_job_and_any_answers_for_all(rack: Rack) -> None:
    await ended(rack, name="first")
    await ended(rack, code=3, name="second", on="gpu3")
    known = records(rack, "gpu1")
    assert [(each.id, each.name, each.ended_as) for each in known] == [
        ("j2", "second", "failed 3"),
        ("j1", "first", "done"),
    ]
    assert all(records(rack, host) == known for host in ("gpu2", "gpu3", "gpu4"))
    for each in known:
        each.seconds.check()
        assert each.seconds.held >= 3.0 and sum(each.by_gpu.values()) == pytest.approx(each.seconds.held)
    said = await rack["gpu4"].call("history", state="failed")
    assert [row.id for row in said.jobs] == ["j2"] and (said.unanswered, said.missing) == ({}, 0)
    assert (await rack["gpu2"].call("history", limit="1")).jobs[0].id == "j2"
    assert (await rack["gpu2"].call("history", since_wall_s="99999999999")).jobs == []


@on_a_rack()
async def test_what_a_host_lacks_it_asks_of_the_others_in_the_background_too(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_endings, "ENDED_MAX", 1)  # the log has forgotten the others
    await ended(rack, 3)
    rack["gpu2"].machine.records = DirectRecords(RecordFile(":memory:"))
    await rack.restart("gpu2")
    await asyncio.sleep(2.0)
    said = await rack["gpu2"].call("history")
    assert [row.id for row in said.jobs] == ["j3", "j2", "j1"] and said.missing == 0
    assert records(rack, "gpu2") == records(rack, "gpu1"), "and it has them from now on"
    rack["gpu3"].machine.records = DirectRecords(RecordFile(":memory:"))
    await rack.restart("gpu3")
    await asyncio.sleep(FILL_S + 10.0)
    assert records(rack, "gpu3") == records(rack, "gpu1"), "nobody read there"


@on_a_rack()
async def test_what_nobody_can_tell_is_counted_and_who_may_know_it_is_named(rack: Rack) -> None:
    await ended(rack, 2)
    for host in rack.hosts.values():
        host.machine.records._file.close() if host.id != "gpu4" else None
    for name in ("gpu1", "gpu2", "gpu3"):
        forget(rack, name)
    rack.cut_off("gpu4")
    said = await rack["gpu1"].call("history")
    assert said.jobs == [] and said.missing == 2 and dict(said.unanswered) == {"gpu4": "it is gone"}
    report = await rack["gpu1"].call("report")
    assert report.rows == [] and report.missing == 2, "not known is not zero"
    assert (await refused(rack["gpu1"].call("report_job", id="j1"))).why == "no answer from gpu4"
    rack.heal("gpu4")
    said = await rack["gpu1"].call("history")
    assert [row.id for row in said.jobs] == ["j2", "j1"] and (said.missing, dict(said.unanswered)) == (0, {})
    forget(rack, "gpu1", "gpu2", "gpu3", "gpu4")
    said = await rack["gpu1"].call("history")
    assert said.jobs == [] and said.missing == 0, "every host said that it has none: there is nothing to wait for"


def forget(rack: Rack, *names: str) -> None:
    """Let these hosts have no records, nor the log."""
    for name in names:
        kept, queue = rack[name].service.history, rack[name].service.queue
        kept._records = DirectRecords(RecordFile(":memory:"))
        kept._ranges = ()
        for id in list(queue.ended):
            queue.kept_bytes.forgotten(id)
            queue.keys.pop(queue.jobs.pop(id).key)
        queue.ended.clear()


@on_a_rack()
async def test_a_user_sees_own_jobs_and_an_operator_all(rack: Rack) -> None:
    await rack["gpu1"].call("tenant_set", tenant="ml", add=["ann", "bob"])
    await ended(rack, asker=ANN)
    await ended(rack, asker=BOB)
    await ended(rack)
    assert [row.id for row in (await rack["gpu2"].call("history", ANN)).jobs] == ["j1"]
    assert [row.id for row in (await rack["gpu2"].call("history", user="bob")).jobs] == ["j2"]
    assert len((await rack["gpu2"].call("history")).jobs) == 3
    assert [row.of for row in (await rack["gpu3"].call("report", ANN, by="user")).rows] == ["ann"]
    assert (await refused(rack["gpu2"].call("history", ANN, user="bob"))).code == 4
    assert (await refused(rack["gpu2"].call("report_job", BOB, id="j1"))).code == 4
    assert (await rack["gpu2"].call("report_job", ANN, id="j1")).job.user == "ann"
    nobody = msgspec.structs.replace(ANN, uid=-1, user="", role="viewer")
    assert (await refused(rack["gpu2"].call("history", nobody))).code == 4, "over TCP nobody knows who asks"


@on_a_rack()
async def test_a_report_adds_up_ended_jobs_and_those_that_run(rack: Rack) -> None:
    await ended(rack, 2, tenant="ml")
    await submit(rack, workers=2)
    await until(lambda: rack.job("j3").state == "running")
    await asyncio.sleep(20.0)
    told = await rack["gpu2"].call("report", by="tenant")
    by = {row.of: row.seconds for row in told.rows}
    assert set(by) == {"default", "ml"} and told.live == 1
    held = sum(each.seconds.held for each in records(rack, "gpu1"))
    assert by["ml"].held_gpu_s == pytest.approx(held, abs=0.01) and 40.0 <= by["default"].held_gpu_s <= 44.0
    assert told.total.held_gpu_s == pytest.approx(sum(each.held_gpu_s for each in by.values()), abs=0.01)
    gpus = await rack["gpu2"].call("report", by="gpu")
    assert sum(row.seconds.held_gpu_s for row in gpus.rows) == pytest.approx(told.total.held_gpu_s, abs=0.1)
    one = await rack["gpu4"].call("report_job", id="j3")
    assert (one.over, one.job.state, one.job.exit_code) == (False, "running", None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"by": "colour"},
        {"limit": "0"},
        {"limit": "1.5"},
        {"limit": "many"},
        {"since_wall_s": "yesterday"},
        {"since_wall_s": "nan"},
        {"user": "x" * 65},
        {"name": "a\nb"},
        {"tenant": ["ml"]},
    ],
)
@on_a_rack({"gpu1": 1})
async def test_a_wrong_question_is_refused_with_its_field(rack: Rack, wrong: dict[str, Any]) -> None:
    no: Refused = await refused(rack["gpu1"].call("report", **wrong))
    assert no.code == 2 and next(iter(wrong)) in no.what and no.why.startswith("expected") and no.next


@on_a_rack({"gpu1": 2, "gpu2": 2})
async def test_a_disk_that_fails_loses_no_record_and_is_told(rack: Rack) -> None:
    file: Any = rack["gpu1"].machine.records._file
    put, file.put = file.put, lambda rows: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    await ended(rack)
    assert "No space left" in rack["gpu1"].service.notes()[-1] and records(rack, "gpu1") == []
    assert len(records(rack, "gpu2")) == 1
    file.put = put
    await asyncio.sleep(15.0)
    assert len(records(rack, "gpu1")) == 1 and rack["gpu1"].service.notes() == []


@on_a_rack({"gpu1": 2, "gpu2": 2})
async def test_an_answer_is_bounded_and_whoever_asks_goes_on_until_it_has_all(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_endings, "ENDED_MAX", 1)
    await ended(rack, 4)
    monkeypatch.setattr(history, "ANSWER_BYTES_MAX", 1)
    answer = await rack["gpu1"].service.answer(rack["gpu2"].id, RecordsWanted(((1, 3),)))
    assert isinstance(answer, RecordsAnswer) and [each.id for each in answer.records] == ["j3"] and answer.more
    rack["gpu2"].machine.records = DirectRecords(RecordFile(":memory:"))
    await rack.restart("gpu2")
    await asyncio.sleep(1.0)
    assert [row.id for row in (await rack["gpu2"].call("history")).jobs] == ["j4", "j3", "j2", "j1"]


@on_a_rack({"gpu1": 2, "gpu2": 2})
async def test_jobs_that_end_and_are_forgotten_before_anybody_looks_are_recorded(
    rack: Rack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_endings, "ENDED_MAX", 1)
    for _ in range(6):
        await submit(rack, workers=4)
    queues = [host.service.queue for host in rack.hosts.values()]
    looks = [queue.changed for queue in queues]
    for queue in queues:
        queue.changed = list  # type: ignore[method-assign]
    for number in range(1, 7):
        await rack["gpu2"].call("cancel", id=f"j{number}")
    for queue, look in zip(queues, looks, strict=True):
        queue.changed = look  # type: ignore[method-assign]
    rack.finish("j1", dict.fromkeys(range(4), -15))
    await asyncio.sleep(5.0)
    assert sorted(each.id for each in records(rack, "gpu1")) == [f"j{number}" for number in range(1, 7)]


# ---- what hosts measure ----------------------------------------------------------------------------------------------


@on_a_rack({"gpu1": 2, "gpu2": 2})
async def test_what_drivers_tell_comes_into_the_bill_and_what_they_do_not_is_not_known(rack: Rack) -> None:
    for name, utilization in (("gpu1", 0.5), ("gpu2", None)):
        probes = rack[name].machine.probes
        told = {"simulated": False, "utilization": utilization, "memory_used_bytes": 20 << 30}
        probes._gpus = [msgspec.structs.replace(gpu, **told) for gpu in probes._gpus]
    await submit(rack)
    await until(lambda: rack.job("j1").state == "running")
    await asyncio.sleep(62.0)
    await rack.restart("gpu1")  # its sums go on from what the log knows
    await asyncio.sleep(30.0)
    for step in range(12):
        for host in rack.hosts.values():
            host.publish(StepTimed(JobId("j1"), 1, 0, step, 2.0, 0.5, 0.25, {}, 1.24, 21 << 30))
    await asyncio.sleep(13.0)
    rack.finish("j1")
    await until(lambda: rack.job("j1").over)
    await asyncio.sleep(2.0)
    (record,) = records(rack, "gpu2")
    seconds = record.seconds
    seconds.check()
    assert 0.5 * seconds.held - 1.0 < seconds.unknown < 0.6 * seconds.held, "of gpu2 nothing is known"
    assert seconds.used == pytest.approx(seconds.idle, rel=0.1) and 80.0 < seconds.used < 110.0, "half, on two GPUs"
    assert (record.gpu_bytes, record.step_s, record.input_s, record.steps) == (21 << 30, 2.0, 1.24, 11)
    assert rack.job("j1").bill.uses == {}, "the next start has its own"
