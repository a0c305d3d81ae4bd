"""Python stacks of ranks, while they run: each is asked by a signal that its hooks answer (`covey.hooks.stacks`),
writes them to its output, and runs on; what it wrote since is read there."""

import asyncio
import re
from collections.abc import Sequence

from agent.jobs.beside.messages import RankStacks
from agent.jobs.runner import SupervisedRunner
from covey.core.ids import JobId
from covey.ports.env import Env

WRITTEN_S = 3.0
"""Seconds in which a rank has to write its stacks."""
SETTLED_S = 0.3
"""Seconds without more of them after which they are whole."""
LOOK_S = 0.05
TEXT_BYTES_MAX = 256 << 10
"""The most of one rank's output that is searched for stacks, bytes."""
_HEAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_LINE = re.compile(r'^  (?:File ".*", line \d+ in .*|\.\.\.|<no Python frame>)$')


def stacks_in(text: str) -> str:
    """The stacks among lines that a rank wrote; what else it wrote meanwhile is left out."""
    found: list[str] = []
    inside = False
    for line in text.splitlines():
        if _HEAD.match(line):
            inside = True
            found.append(line)
        elif inside and _LINE.match(line):
            found.append(line)
    return "\n".join(found)


async def stacks_here(env: Env, runner: SupervisedRunner, job: JobId) -> Sequence[RankStacks]:
    """The stacks of the job's ranks that run on this host."""
    found: list[RankStacks] = []
    for (other, epoch), pids in runner.running().items():
        if other == job:
            before = {rank: (await runner.read_log(job, rank, 0, 0)).size for rank in pids}
            await runner.keep_stacks(job, epoch)
            texts = await asyncio.gather(*(_written(env, runner, job, rank, at) for rank, at in before.items()))
            spec = runner.spec(job, epoch)
            hooks, stderr = (spec.hooks, spec.stderr) if spec is not None else (True, "")
            for rank, text in zip(before, texts, strict=True):
                why = "" if text else why_none(hooks, stderr)
                found.append(RankStacks(rank=rank, host=env.host, text=text, why=why))
    return found


async def _written(env: Env, runner: SupervisedRunner, job: JobId, rank: int, offset: int) -> str:
    """The stacks that a rank wrote from that offset of its output on."""
    end_s = env.clock.now_s() + WRITTEN_S
    since_s, text = env.clock.now_s(), ""
    while env.clock.now_s() < end_s:
        read = await runner.read_log(job, rank, offset, TEXT_BYTES_MAX)
        now = stacks_in(read.data.decode(errors="replace"))
        if now != text:
            text, since_s = now, env.clock.now_s()
        elif text and (env.clock.now_s() - since_s > SETTLED_S):
            break
        await asyncio.sleep(LOOK_S)
    return text


def why_none(hooks: bool, stderr: str) -> str:
    """Why a rank has written no stacks, as far as its host knows."""
    if not hooks:
        return "the job runs without Covey's hooks (--no-hooks), which answer the signal"
    if stderr:
        return f"they are in its standard error, which goes to {stderr}"
    return "none of its processes answered: it is no Python, has just begun, or handles signals itself"
