"""The log says whether a job is tuned, who asked, and tells every host."""

from typing import Any

from plugins.facts import Place
from plugins.scheduler.messages.commands import Applied, NotApplied, Result, TuneAsked
from tests.plugins.scheduler.rack import Rack, on_a_rack, operator, refused, submit, until
from tests.plugins.scheduler.test_arranging import Elastic
from tests.plugins.scheduler.test_growing import elastic, first
from tests.plugins.scheduler.test_queue import Told, halves, refusal


def tune(told: Told, id: Any, on: bool = True, epoch: int = 1) -> Result:
    return told.say(TuneAsked(wall_s=1.0, job=id, epoch=epoch, on=on, by="ann"))


def test_who_asks_is_remembered_until_somebody_switches_it_off() -> None:
    told = Elastic()
    assert tune(told, told.id) == Applied(told.id)
    by, asked = told.job.healing.tuned
    assert by == "ann" and asked == told.queue.index
    assert tune(told, told.id) == Applied(told.id) and told.job.healing.tuned[1] > asked, "who asks again begins anew"
    assert tune(told, told.id, on=False) == Applied(told.id) and told.job.healing.tuned == ("", 0)


def test_another_start_of_the_job_is_tuned_too() -> None:
    from plugins.scheduler.machine.log.replacing import began_anew

    told = Elastic()
    tune(told, told.id)
    before = told.job.healing.tuned
    began_anew(told.job)
    assert told.job.healing.tuned == before and told.job.healing.healed == 0


def test_a_job_without_a_range_is_not_tuned() -> None:
    told = Told()
    id = told.run(4)
    assert "not with a range" in refusal(tune(told, id)).why
    assert told[id].healing.tuned == ("", 0)


def test_a_job_that_shares_hosts_is_arranged_by_its_group_alone() -> None:
    told = Told()
    id = told.submit(4, workers_max=16, gpus_per_worker=0, share_host="night")
    told.grant(id)
    told.place(id, *(Place(place.host, place.ranks, ()) for place in halves(4)))
    assert "the hosts of its group arrange it" in refusal(tune(told, id)).why
    assert told[id].healing.tuned == ("", 0) and tune(told, id, on=False) == Applied(id)


@on_a_rack()
async def test_the_tuner_is_switched_by_true_and_false_alone(rack: Rack) -> None:
    id, at = await elastic(rack), first(rack)
    assert (await at.call("tune", id=id, on=True, asker=operator("ann"))).elastic.tuned_by == "ann"
    for on in (0, "off", None):
        said = await refused(at.call("tune", id=id, on=on))
        assert said.code == 2 and "neither true nor false" in said.why, said
    assert (await at.call("tune", id=id, on=False)).elastic.tuned_by == ""
    assert (await at.call("tune", id=id)).elastic.tuned_by == "root"
    plain = await submit(rack, workers=1)
    await until(lambda: rack.job(plain.id).state == "running")
    said = await refused(at.call("tune", id=plain.id))
    assert "not with a range" in said.why and "--workers 4..16" in said.next


def test_a_command_about_an_older_grant_changes_nothing() -> None:
    told = Elastic()
    assert isinstance(tune(told, told.id, epoch=9), NotApplied) and told.job.healing.tuned == ("", 0)
