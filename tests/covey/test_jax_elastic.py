"""A JAX training whose ranks are carried by few processes or many, which come and are killed: the same bits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from covey.core.errors import CoveyError
from covey.healing.healing import Healing
from covey.healing.neighbours import HealedRank
from covey.job.carrying import RANKS_MAX, CarriedMember, CarriedRanks, CarriedScript
from covey.job.job_state import JobState, ScriptState, begun
from tests.covey import test_carrying
from tests.covey.test_carrying import ElasticGang, Process, reached
from tests.covey.test_carrying import gangs as gangs

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax
Gangs = Callable[..., ElasticGang]
RANKS = 4


class JaxProcess(Process):
    """A process whose script is one of JAX."""

    def _train(self) -> bytes:
        import covey.jax

        job: Any = _Job(self)
        tree = {"w": jax.numpy.ones(300), "count": 0}
        state = covey.jax.state(tree, own=jax.random.key, elastic=True, job=job)
        for step in state.steps(self.gang.steps):
            for rank in state.carried():
                self._passes(step, f"before rank {rank}")
                with rank:
                    key, state.own = jax.random.split(state.own)
                    self.gang.drawn.append((step, int(rank)))
                    mean = rank.pmean({"w": jax.random.normal(key, (300,)) * state.tree["w"]})
                    with pytest.raises(CoveyError, match="at the end of `with rank:`"):
                        mean.wait()
                    key, state.own = jax.random.split(state.own)
                    norm = rank.psum(jax.random.normal(key))
            found = mean.wait()["w"] + norm.wait()
            state.tree = {"w": state.tree["w"] + 0.1 * found, "count": state.tree["count"] + 1}
        assert state.tree["count"] == self.gang.steps
        return np.asarray(state.tree["w"]).tobytes()


class _Job:
    """The part of a JobClient that `covey.jax.state` uses."""

    def __init__(self, process: JaxProcess) -> None:
        self._process, self.rank = process, process.first

    def state(self, get: Any, load: Any, *, own: Any, enter: Any, step: int) -> JobState:
        process, gang = self._process, self._process.gang
        me = HealedRank(self.rank, gang.ranks, process.incarnation, step=step)

        def carry(healing: Healing) -> CarriedRanks:
            script = CarriedScript(own, enter)
            process.carried = CarriedRanks(CarriedMember(process.client, healing), script, process._client, me)
            process.carried.told(gang.carries())
            return process.carried

        return begun(process.client, me, ScriptState(get, load, own), gathers_max=RANKS_MAX, carry=carry)

    def carried(self, step: int) -> Any:
        assert self._process.carried is not None and self._process.carried.step == step
        return self._process.carried.carried()


@pytest.fixture(autouse=True)
def in_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_carrying, "Process", JaxProcess)


def test_processes_that_come_and_are_killed_leave_the_bits_of_one_for_each_rank(gangs: Gangs) -> None:
    fixed = gangs(RANKS, RANKS).end()
    assert gangs(RANKS, 1).end() == fixed
    gang = gangs(RANKS, 2)
    gang.computes_s = 0.005
    reached(gang, 3)
    gang.arrange([1], 1)
    assert gang.end() == fixed


def test_what_is_its_own_is_made_for_each_rank() -> None:
    import covey.jax

    with pytest.raises(CoveyError, match="next: give what returns a rank's own at first"):
        covey.jax.state({"w": 1.0}, own=jax.random.key(1), elastic=True, job=object())  # type: ignore[call-overload]
