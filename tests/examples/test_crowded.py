"""A script beside its own `agent.py` and `plugins/`, as a real rank: it gets its own, and joins its agent."""

import os
import sys
import tempfile
from pathlib import Path

import msgspec

from agent.jobs.socket.jobs_socket import JobSocket
from covey.core.ids import JobId
from covey.wire.job import Frame
from plugins.base import JobPeer
from plugins.facts import JobJoined, RanksEnded, StepTimed
from tests.agent.here import here, ranks, until

CROWDED = Path(__file__).parent.parent.parent / "examples/crowded"
J1 = JobId("j1")


async def test_a_script_gets_its_own_agent_and_plugins_and_joins_ours() -> None:
    async def deliver(peer: JobPeer, frame: Frame) -> None:
        raise AssertionError(f"unexpected {frame}")

    with tempfile.TemporaryDirectory(prefix="covey-") as directory:
        async with here(directory) as host:
            runner = host.runner()
            door = JobSocket(host.env, runner, host.facts.append, deliver)
            await door.start()
            spec = ranks("j1", sys.executable, "train.py", count=2)
            await runner.start(msgspec.structs.replace(spec, cwd=str(CROWDED)))
            await until(lambda: host.told(RanksEnded))
            output = (await runner.read_log(J1, 1, 0, 1 << 16)).data.decode()
            await door.stop()
    assert host.told(RanksEnded)[0].codes == {0: 0, 1: 0}, output
    own_agent, own_plugins, joined = output.splitlines()
    assert own_agent == f"agent: the training script's own agent ({CROWDED}{os.sep}agent.py)"
    assert own_plugins == f"plugins: the training script's own plugins ({CROWDED}{os.sep}plugins{os.sep}__init__.py)"
    assert joined == "rank 1 of 2 on h1: reward -0.000000"
    assert {(told.rank) for told in host.told(JobJoined)} == {0, 1}
    assert max(told.step for told in host.told(StepTimed)) == 19
