"""Real JAX scripts without a line about Covey, seen by an agent's socket (`make check TORCH=1`)."""

from statistics import median

import pytest

from plugins.facts import JobHooked
from tests.covey.agents import Agent
from tests.covey.hooks.jax_jobs import NEEDS_JAX
from tests.covey.hooks.plain_scripts import printed, trained

pytestmark = NEEDS_JAX
HEAD = """
import functools, time, jax, jax.numpy as jnp
key = jax.random.key(0)
params = {"w": jax.random.normal(key, (8, 8)), "b": jnp.zeros(8)}
x = jax.random.normal(key, (4, 8))
def loss(params, x):
    return jnp.sum((x @ params["w"] + params["b"]) ** 2)
def update(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.001 * g, params, grads), value
def ended():
    time.sleep(0.15)  # a step is told every tenth of a second
"""
PLAIN = """
step = jax.jit(update)
for _ in range(15):
    params, value = step(params, x); float(value); ended()
"""
DECORATED = """
@functools.partial(jax.jit, static_argnames="scale", donate_argnums=0)
def step(params, x, *, scale):
    return update(params, x * scale)
for _ in range(15):
    params, value = step(params, x, scale=2); ended()
"""
METHOD = """
class Trainer:
    @functools.partial(jax.jit, static_argnums=0)
    def step(self, params, x): return update(params, x)
trainer = Trainer()
for _ in range(15):
    params, value = trainer.step(params, x); ended()
"""
TWO_FUNCTIONS = """
gradients = jax.jit(jax.value_and_grad(loss))
apply = jax.jit(lambda params, grads: jax.tree.map(lambda p, g: p - 0.001 * g, params, grads))
for _ in range(15):
    value, grads = gradients(params, x); params = apply(params, grads); ended()
"""
EVALUATES = """
step, accuracy = jax.jit(update), jax.jit(lambda sums, params, x: sums + loss(params, x))
sums = accuracy(accuracy(jnp.zeros(()), params, x), params, x)
for at in range(15):
    params, value = step(params, x); ended()
    if at % 5 == 4:
        for _ in range(20): sums = accuracy(sums, params, x)
"""
ACCUMULATED = """
add = jax.jit(lambda sums, params, x: jax.tree.map(jnp.add, sums, jax.grad(loss)(params, x)))
apply = jax.jit(lambda params, grads: jax.tree.map(lambda p, g: p - 0.001 * g, params, grads))
for _ in range(15):
    sums = jax.tree.map(jnp.zeros_like, params)
    for _ in range(4): sums = add(sums, params, x)
    params = apply(params, sums); ended()
"""
COMPILED = """
step = jax.jit(update).lower(params, x).compile()
for _ in range(16):
    params, value = step(params, x); ended()
"""
WITH_EFFECTS = """
@jax.jit
def step(params, x):
    jax.debug.callback(lambda: None)
    return update(params, x)
for _ in range(15):
    params, value = step(params, x); ended()
"""
DEBUGGED = """
jax.config.update("jax_debug_nans", True)
step = jax.jit(update)
for at in range(15):
    if at == 8: jax.config.update("jax_debug_nans", False)
    if at == 10:
        with jax.debug_nans(True): params, value = step(params, x)
    else: params, value = step(params, x)
    ended()
"""
GRADIENTS_ONLY = """
gradients = jax.jit(jax.grad(loss))
for _ in range(15):
    grads = gradients(params, x); params = jax.tree.map(lambda p, g: p - 0.001 * g, params, grads); ended()
"""
PARALLEL = """
step = jax.pmap(update, axis_name="i")
params, x = jax.tree.map(lambda a: a[None], (params, x))
for _ in range(15):
    params, value = step(params, x); ended()
"""
EAGER = """
for _ in range(15):
    value, grads = jax.value_and_grad(loss)(params, x)
    params = jax.tree.map(lambda p, g: p - 0.001 * g, params, grads); ended()
"""
RUNS_AHEAD = """
@jax.jit
def step(params):
    return jax.lax.fori_loop(0, 20, lambda _, p: jnp.tanh(p @ p), params)
params = jax.random.normal(key, (500, 500)) / 30
for at in range(60):
    params = step(params)
    if at % 6 == 5: params.block_until_ready()
"""


def attached(agent: Agent) -> list[tuple[str, str]]:
    return [(fact.to[:4], fact.problem) for fact in agent.facts if isinstance(fact, JobHooked)]


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(DECORATED, id="static-and-donated", marks=pytest.mark.long),
        pytest.param(METHOD, id="method", marks=pytest.mark.long),
        pytest.param(TWO_FUNCTIONS, id="gradients-and-update", marks=pytest.mark.long),
        pytest.param(EVALUATES, id="evaluates", marks=pytest.mark.long),
        pytest.param(ACCUMULATED, id="accumulated", marks=pytest.mark.long),
        pytest.param(COMPILED, id="compiled", marks=pytest.mark.long),
        pytest.param(WITH_EFFECTS, id="with-effects", marks=pytest.mark.long),
        pytest.param(DEBUGGED, id="debug-nans", marks=pytest.mark.long),
        pytest.param(GRADIENTS_ONLY, id="gradients-only", marks=pytest.mark.long),
        pytest.param(PARALLEL, id="pmap", marks=pytest.mark.long),
    ],
)
async def test_a_jitted_training_step_is_a_step_however_it_is_written(agent: Agent, script: str) -> None:
    steps = await trained(agent, HEAD + script)
    assert {step.boundary for step in steps} == {"jitted call"}
    assert [step.step for step in steps] == sorted({step.step for step in steps}), "each is told once"
    assert steps[-1].step in range(14, 23) and len(steps) >= 5, "what was taken for a step at first is counted too"
    assert 0.1 < median(step.step_s for step in steps) < 30
    assert all(step.memory_bytes > 10 << 20 for step in steps)
    assert attached(agent) == [("jax ", "")]


@pytest.mark.long
async def test_operations_of_jax_itself_are_no_steps(agent: Agent) -> None:
    assert await trained(agent, HEAD + EAGER) == []
    assert attached(agent) == [("jax ", "")]


@pytest.mark.long
async def test_a_script_that_runs_ahead_is_told_the_mean_and_what_it_waits_for_the_device(agent: Agent) -> None:
    steps = await trained(agent, HEAD + RUNS_AHEAD)
    said = [step for step in steps if step.step > 10]
    waited = [step.metrics["device_wait_s"] / step.step_s for step in said]
    assert said and max(waited) > 0.5 and all(0 <= share <= 1 for share in waited)


@pytest.mark.long
async def test_a_loop_that_joins_by_hand_is_seen_too(agent: Agent) -> None:
    steps = await trained(agent, HEAD + "import covey\njob = covey.join()\n" + PLAIN, PYTHONPATH="")
    assert {step.boundary for step in steps} == {"jitted call"} and steps[-1].step == 14


@pytest.mark.long
async def test_a_jax_without_its_hooks_trains_and_it_is_said(agent: Agent) -> None:
    """Another version of JAX may have other names where they are not public."""
    hide = "import sys, jax._src.api\n"
    lacking = "del jax._src.api._post_hook_state\nimport covey\ncovey.join()\n"
    await trained(agent, HEAD + hide + lacking + PLAIN, PYTHONPATH="")
    assert any("_post_hook_state" in problem for _, problem in attached(agent))


async def test_jitted_functions_are_those_of_jax_and_results_the_same_bits(agent: Agent) -> None:
    show = """
import weakref
assert type(step) is type(jax.jit(loss)) and isinstance(step, jax.stages.Wrapped) and weakref.ref(step)() is step
assert step.__wrapped__ is update and step.__name__ == "update" and "dot" in step.lower(params, x).as_text()
print(float(value).hex(), float(jnp.sum(params["w"])).hex(), flush=True)
"""
    assert await printed(agent, HEAD + PLAIN + show, True) == await printed(agent, HEAD + PLAIN + show, False)
