"""Training scripts without a line about Covey, run to their end under an agent's socket."""

import asyncio
import os
import sys

from covey.hooks import SITE
from plugins.facts import StepTimed
from tests.agent.here import until
from tests.covey.agents import J1, Agent

WITHOUT_COMPILER = """
import sys, types
import torch
compiler = types.ModuleType("torch._dynamo")
compiler.graph_break, compiler.disable = lambda: None, lambda function, *_, **__: function
sys.modules["torch._dynamo"] = torch._dynamo = compiler
"""
"""PyTorch without its compiler, which optimizers import though they do not use it: half of a script's time."""


async def trained(agent: Agent, script: str, *options: str, **environ: str) -> list[StepTimed]:
    """Steps that the agent heard of until the script ended well. `options` are options of Python."""
    ours = {"PATH": os.environ["PATH"], "PYTHONPATH": SITE, "HOME": "/tmp", "JAX_PLATFORMS": "cpu"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *options, "-c", script, env={**ours, **agent.environ(), **environ}
    )
    async with asyncio.timeout(300):
        assert await process.wait() == 0
    await until(lambda: not agent.socket.peers(J1))
    return agent.steps()


async def printed(agent: Agent, script: str, attached: bool) -> bytes:
    """Output of the script, attached or left alone, until it ended well."""
    environ = {"PATH": os.environ["PATH"], **agent.environ(), **({"PYTHONPATH": SITE} if attached else {})}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, env=environ, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0 and out
    return out
