"""Ranks of other users than the agent's, started by a starter, as real processes. Only root can be several users."""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from covey.core.ids import JobId
from plugins.base import RanksSpec
from plugins.facts import RanksEnded
from tests.agent.here import Here, ranks, until
from tests.agent.starter.starter_here import ALICE, StarterHere, host_with_starter

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
J1 = JobId("j1")


@pytest.fixture
def short() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="covey-", ignore_cleanup_errors=True) as directory:
        yield directory


@pytest.fixture
async def both(short: str) -> AsyncIterator[tuple[Here, StarterHere]]:
    async with host_with_starter(short) as found:
        yield found


def of_alice(*argv: str, job: str = "j1", grace_s: float = 5.0) -> RanksSpec:
    return msgspec.structs.replace(ranks(job, *argv, grace_s=grace_s), user="alice", uid=ALICE)


async def test_a_job_runs_as_its_user(both: tuple[Here, StarterHere]) -> None:
    host, starter = both
    assert host.env.starter.refusal == ""
    runner = host.runner()
    script = "id -u; echo $HOME $USER; umask; id -G"
    await runner.start(of_alice("/bin/sh", "-c", script))
    await until(lambda: host.told(RanksEnded))
    assert host.told(RanksEnded) == [RanksEnded(J1, 1, {0: 0}, "")], (starter.said, host.lines.text)
    read = await runner.read_log(J1, 0, 0, 1 << 20)
    assert read.data.decode().splitlines() == [str(ALICE), "/home/alice alice", "0077", str(ALICE)]
