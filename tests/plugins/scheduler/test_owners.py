"""Jobs that run as their users, on a rack of fakes: which hosts take them."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from plugins.scheduler.messages.spec import JobOwner, JobSpec
from tests.plugins.scheduler.rack import Rack, on_a_rack, submit, until

ALICE = JobOwner("alice", 1001)


@pytest.fixture(autouse=True)
def owned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job here is alice's."""
    parse = JobSpec.parse.__func__  # type: ignore[attr-defined]

    def parsed(cls: type[JobSpec], fields: Mapping[str, Any]) -> JobSpec:
        found: JobSpec = parse(cls, fields)
        return msgspec.structs.replace(found, owner=ALICE)

    monkeypatch.setattr(JobSpec, "parse", classmethod(parsed))


@on_a_rack()
async def test_ranks_are_told_as_whom_they_run(rack: Rack) -> None:
    job = await submit(rack, workers=1)
    await until(lambda: rack.job(job.id).state == "running")
    (place,) = rack.job(job.id).start.places
    (spec,) = rack.hosts[place.host].machine.ranks.values()
    assert (spec.user, spec.uid) == ("alice", 1001)


@on_a_rack()
async def test_a_host_says_whether_it_limits_the_job(rack: Rack) -> None:
    job = await submit(rack, workers=1)
    await until(lambda: rack.job(job.id).state == "running")
    (place,) = rack.job(job.id).start.places
    host = rack.hosts[place.host]
    assert host.service.ranks.told_by.job_now(job.id).limited is False
    host.runner.limited_here.add((job.id, 1))
    assert host.service.ranks.told_by.job_now(job.id).limited is True


@on_a_rack()
async def test_a_job_comes_to_a_host_that_runs_it_as_its_user(rack: Rack) -> None:
    able = sorted(rack.hosts)[-1]
    for name, host in rack.hosts.items():
        if name != able:
            host.runner.refused_users["alice"] = f"jobs of alice are not possible on {name}: no starter"
    job = await submit(rack, workers=1)
    await until(lambda: rack.job(job.id).state == "running")
    assert [place.host for place in rack.job(job.id).start.places] == [able]
