"""Users of a rack of whole agents: a job belongs to whoever submitted it, on whichever host, and whoever asks where."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from chaos.askers import ANN, BOB, EVE, ROOT, VISITOR, asked_by
from chaos.rackworld import SimRack
from covey.core.errors import Refused
from plugins.askers import Asker

SECRET = "secret-of-ann"
JOB = {"argv": ["sleeper", "900", SECRET], "cwd": f"/{SECRET}", "workers": 1, "env": {"KEY": SECRET}, "name": SECRET}


@pytest.fixture(scope="module")
def rack() -> Iterator[SimRack]:
    """Three hosts; ann and bob are in tenant ml. Ann's job is j2; root's j1 runs, and j3 waits."""
    with SimRack(31, hosts=3, gpus=2).start() as rack:
        rack.run(20)
        rack.ask("h1", "scheduler.tenant_set", {"tenant": "ml", "users": ["ann", "bob"], "gpus": 4})
        rack.ask("h1", "scheduler.submit", {"argv": ["sleeper", "900", SECRET], "cwd": "/", "gpus_per_worker": 1})
        rack.run(5)
        follower = next(name for name in rack.hosts if name != rack.leader())
        rack.ask(follower, "scheduler.submit", asked_by(ANN, {**JOB, "key": "the-key-of-ann", "gpus_per_worker": 2}))
        large = {"argv": ["sleeper", SECRET], "cwd": "/", "workers": 3, "gpus_per_worker": 2}
        rack.ask("h1", "scheduler.submit", large)
        rack.run(20)
        yield rack


def said(rack: SimRack, host: str, asker: Asker, command: str, **given: Any) -> Any:
    return rack.ask(host, command, asked_by(asker, given))


def no(rack: SimRack, host: str, asker: Asker, command: str, **given: Any) -> Refused:
    with pytest.raises(Refused) as refused:
        said(rack, host, asker, command, **given)
    assert refused.value.what and refused.value.why and refused.value.next
    return refused.value


def test_every_host_shows_whose_a_job_is_and_its_content_to_its_owner_alone(rack: SimRack) -> None:
    for host in rack.hosts:
        for asker in (ANN, ROOT):
            mine = next(job for job in said(rack, host, asker, "scheduler.jobs") if job.id == "j2")
            assert (mine.user, mine.tenant) == ("ann", "ml") and SECRET in mine.argv and mine.cwd == f"/{SECRET}"
        for asker in (BOB, EVE, VISITOR):
            jobs = said(rack, host, asker, "scheduler.jobs", all=True)
            rows = {(job.id, job.user, job.tenant, job.gpus) for job in jobs}
            assert rows == {("j1", "", "default", 1), ("j2", "ann", "ml", 2), ("j3", "", "default", 6)}
            waits, runs = (next(job for job in jobs if job.id == id) for id in ("j3", "j1"))
            assert "of the waiting jobs" in waits.reason, "the queue is everybody's"
            assert runs.places[0].host in rack.hosts and SECRET.encode() not in msgspec.json.encode(jobs)
            assert SECRET.encode() not in msgspec.json.encode(said(rack, host, asker, "scheduler.job", id="j2"))


def test_the_events_of_a_job_say_nothing_of_it_to_others(rack: SimRack) -> None:
    for host in rack.hosts:
        whole = said(rack, host, ANN, "agent.why", id="j2")
        assert any(SECRET in line.reason and line.reason.endswith(", by ann") for line in whole)
        for asker in (BOB, EVE, VISITOR):
            for id in ("j1", "j2", "j3"):
                lines = said(rack, host, asker, "agent.why", id=id)
                assert {line.event for line in lines} >= {"submitted"} and SECRET not in str(lines), id
                assert all(line.reason == "" for line in lines if line.event not in ("granted", "reserves GPUs"))


def test_nobody_else_reads_its_output_or_changes_it_wherever_they_ask(rack: SimRack) -> None:
    asks: tuple[tuple[str, dict[str, Any]], ...] = (
        ("scheduler.logs", {}),
        ("scheduler.cancel", {}),
        ("scheduler.move", {"what": "0"}),
        ("scheduler.scale", {"workers": 2}),
        ("scheduler.tune", {"on": True}),
        ("scheduler.arrange", {"owners": []}),
        ("tuner.show", {}),
    )
    for host in rack.hosts:
        for asker in (BOB, EVE, VISITOR):
            for command, given in asks:
                assert no(rack, host, asker, command, id="j2", **given).code == 4, (command, asker)
        assert no(rack, host, ANN, "scheduler.cancel", id="j1").code == 4, "root's"
    rack.run(5)
    assert {job.id for job in rack.ask("h1", "scheduler.jobs", {}) if not job.over} == {"j1", "j2", "j3"}
    assert said(rack, "h1", ANN, "scheduler.logs", id="j2").host in rack.hosts


def test_what_concerns_the_rack_is_the_operators(rack: SimRack) -> None:
    for command, given in (
        ("scheduler.drain", {"id": "h3"}),
        ("scheduler.resume", {"id": "h3"}),
        ("scheduler.give_up", {"id": "h3"}),
        ("scheduler.quota_set", {"tenant": "ml", "gpus": 100}),
        ("scheduler.tenant_set", {"tenant": "ml", "users": ["eve"]}),
        ("agent.change_voters", {"remove": "h3"}),
        ("agent.forget_gpu", {"id": "x"}),
        ("aggregator.move", {"job": "j2", "to": "h2"}),
        ("memory.swap", {"volume": "v"}),
        ("memory.export", {"volume": "v", "socket": "/x"}),
    ):
        for asker in (ANN, EVE, VISITOR):
            assert "is for operators" in no(rack, "h2", asker, command, **given).why
    assert rack.ask("h1", "scheduler.tenants", {})[0].users == ("ann", "bob")


def test_the_key_of_another_users_job_makes_an_own_one_and_shows_nothing_of_it(rack: SimRack) -> None:
    again = {**JOB, "key": "the-key-of-ann", "gpus_per_worker": 0}
    anns = said(rack, "h2", ANN, "scheduler.submit", **again)
    bobs = said(rack, "h2", BOB, "scheduler.submit", **{**again, "argv": ["sleeper", "1"], "name": "bobs", "cwd": "/"})
    assert anns.id == "j2" != bobs.id and (bobs.user, bobs.argv) == ("bob", ("sleeper", "1"))
    assert SECRET.encode() not in msgspec.json.encode(bobs)


def test_a_volume_is_its_users_on_its_host(rack: SimRack) -> None:
    made = said(rack, "h1", ANN, "memory.create", volume="anns", size="1 MiB")
    assert (made.uid, made.tenant) == (ANN.uid, "ml") and made.path
    for asker in (BOB, EVE):
        assert no(rack, "h1", asker, "memory.remove", volume="anns").code == 4
        assert no(rack, "h1", asker, "memory.give_up", volume="anns").code == 4
        (shown,) = [each for each in said(rack, "h2", asker, "agent.rack_volumes") if each.volume == "anns"]
        assert (shown.path, shown.uid) == ("", ANN.uid)
    assert no(rack, "h1", BOB, "memory.create", volume="anns", size="1 MiB").code == 4
    assert no(rack, "h1", EVE, "memory.create", volume="eves", size="1 MiB").code == 4
    assert any("by ann" in line.reason for line in rack.ask("h1", "agent.why", {"id": "volume/anns"}))
    said(rack, "h1", ANN, "memory.remove", volume="anns")


def test_its_owner_ends_a_job_from_any_host_and_the_log_says_who(rack: SimRack) -> None:
    view = said(rack, "h3", ANN, "scheduler.submit", argv=["sleeper", "900"], cwd="/", gpus_per_worker=0)
    rack.run(10)
    assert said(rack, "h2", ANN, "scheduler.cancel", id=view.id, by="root").id == view.id
    rack.run(10)
    (job,) = [each for each in rack.ask("h1", "scheduler.jobs", {"all": True}) if each.id == view.id]
    told = rack.ask("h1", "agent.why", {"id": job.id})
    assert job.state == "cancelled" and any("cancelled by ann" in line.reason for line in told)
