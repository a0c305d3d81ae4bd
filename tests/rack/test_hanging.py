"""Ranks of real jobs hang in each place where one can: what `submit --hang` does about it, on a real rack."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rack.living_rack import ENV, LivingRack, living_rack, wait

pytestmark = [pytest.mark.rack, pytest.mark.xdist_group("rack")]

SCRIPT = Path(__file__).with_name("hanging_rank.py")
HANG_S = 3.0


@pytest.fixture(scope="module")
def living() -> Iterator[LivingRack]:
    with living_rack() as found:
        yield found


def failed(living: LivingRack, job: str) -> str:
    """Why the job failed."""
    ended = wait("the job has ended", lambda: (now := living.job(job))["over"] and now, 90)
    assert (ended["state"], ended["tally"]["attempt"]) == ("failed", 1), ended["reason"]
    return str(ended["reason"])


@pytest.mark.parametrize("shared", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_rank_that_hangs_before_its_first_sum(living: LivingRack, shared: bool) -> None:
    """`shared`: all ranks are on one host, and wait for memory that they share."""
    more: dict[str, Any] = {"name": "hanging", "hang_s": HANG_S}
    if shared:
        more |= {"workers": 2, "pack": "host", "env": {**ENV, "COVEY_SHARED_TENSORS": "1"}}
    job = living.submit(SCRIPT, "imports", "1", **more)
    why = failed(living, job)
    assert "rank 1 on " in why and "the others waited" in why and "it has not joined its agent" in why
    assert "push_pull" in living.output(job, 0), "the stack of one that waited"


@pytest.mark.long
def test_a_rank_that_hangs_before_its_part_of_a_sum_in_shared_memory(living: LivingRack) -> None:
    job = living.submit(
        SCRIPT,
        "sum",
        "0",
        name="hanging",
        hang_s=HANG_S,
        workers=2,
        pack="host",
        env={**ENV, "COVEY_SHARED_TENSORS": "1"},
    )
    why = failed(living, job)
    assert "the others waited" in why and "for rank 0" in why and "its last sign of life is" in why
    assert "hang_in" in living.output(job, 0), "where it hangs"


@pytest.mark.long
def test_a_rank_behind_the_others_where_no_tensors_are_summed(living: LivingRack) -> None:
    why = failed(living, living.submit(SCRIPT, "step", "2", name="hanging", hang_s=HANG_S))
    assert "for rank 2" in why and "it is at step 10, and the others are at step 12 or later" in why


def test_a_gang_that_stands_still(living: LivingRack) -> None:
    job = living.submit(SCRIPT, "all", "0", name="hanging", hang_s=HANG_S)
    why = failed(living, job)
    assert "no rank finished a step" in why and "the last step was 9" in why and "no single rank is at fault" in why
    assert all("hang_in" in living.output(job, rank) for rank in range(4)), "stacks of all"


@pytest.mark.long
def test_a_job_of_which_nothing_is_known_runs_on_and_says_so(living: LivingRack) -> None:
    body = {"argv": ["/bin/sleep", "8"], "gpus_per_worker": 1, "hang_s": 1.0, "cwd": "/"}
    job = str(living.agent().post("jobs", body=body).data["id"])
    said = wait("it runs", lambda: living.job(job)["losses"]["hang_unseen"])
    assert said == "--hang does not watch this job: it reports no steps"
    ended = wait("it has ended", lambda: (now := living.job(job))["over"] and now)
    assert ended["state"] == "done"
