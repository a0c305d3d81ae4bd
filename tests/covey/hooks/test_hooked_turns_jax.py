"""JAX scripts without a line about Covey take turns to compute, between their jitted calls."""

import asyncio
from pathlib import Path

import pytest

from tests.covey.agents import Agent
from tests.covey.hooks.jax_jobs import NEEDS_JAX, TRAIN
from tests.covey.hooks.turns_host import TELL, Host, both_computed, changes, one_at_a_time

pytestmark = NEEDS_JAX
TRAINS = """
@jax.jit
def judged(weights, batch):
    for _ in range(20): batch = jnp.tanh(batch @ weights[0])
    return batch.sum()
while True:
    tell("begins"); float(judged(weights, batch)); tell("ends")
    weights = train(weights, batch)
"""


@pytest.mark.long
async def test_two_jax_scripts_that_only_have_hooks_compute_in_turns(agent: Agent, tmp_path: Path) -> None:
    host = Host(agent, tmp_path)
    head, environ = TELL + "size = 256\n" + TRAIN, {"JAX_PLATFORMS": "cpu", "COVEY_GATE": "/nonexistent"}
    await asyncio.gather(*[host.run(slot, TRAINS, head, **environ) for slot in range(2)])
    first, second = await both_computed(host)
    await host.close()
    assert one_at_a_time(first, second), (first, second)
    assert changes(first, second) > 10, "each has to wait for long"
