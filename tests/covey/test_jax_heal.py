"""A training in JAX whose ranks are lost: trees, keys and numbers come as they were (make check TORCH=1)."""

import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.core.errors import EXIT_AGAIN, CoveyError
from covey.core.ids import JobId
from covey.healing.neighbours import HealedRank
from covey.job.job_state import JobState, ScriptState, begun
from covey.job.tensors import TensorClient
from covey.wire.job import AggregatorAt
from tests.plugins.aggregator.loopback import AggdThread

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax
EPOCH, STEPS, RANKS, WITHIN_S = (1 << 32) + 1, 8, 3, 60.0


class Lost(Exception):
    """This process was killed, at this point."""


class JobOfTest:
    """The part of a JobClient that `covey.jax.state` uses."""

    def __init__(self, at: AggregatorAt, rank: int, incarnation: int) -> None:
        self.rank, self.world_size, self._incarnation = rank, RANKS, incarnation
        self.tensors = TensorClient(JobId("j1"), rank, RANKS, lambda epoch, why, table: None, say=io.StringIO())
        self.tensors.moved(at)

    def state(self, get: Any, load: Any, *, own: Any, step: int, checkpoint: Any, stop: Any) -> JobState:
        me = HealedRank(self.rank, self.tensors.world_size, self._incarnation, step=step)
        stop = stop._replace(place=checkpoint or None, wants=lambda: self.asked, leave=self.tensors.leave)
        return begun(self.tensors, me, ScriptState(get, load, own), stop=stop)

    asked = False
    """Whether this rank has heard that the job is to stop."""


def tree() -> dict[str, Any]:
    jnp = jax.numpy
    return {
        "w": jnp.arange(6.0).reshape(2, 3),
        "short": [jnp.array([1.5, 2.25], jnp.bfloat16), jnp.array(7, jnp.int32)],
        "key": jax.random.key(3),
        "plain": (np.arange(3), 5, 0.1, True, None),
    }


class _NoJob:
    def state(self, get: Any, load: Any, *, own: Any, step: int, **_: Any) -> Any:
        self.get, self.load, self.own = get, load, own


def handed_over(one: Any, other: Any, own: Any = None, other_own: Any = None) -> Any:
    """The state `other` after it got what `one` gave."""
    import covey.jax

    gives, takes = _NoJob(), _NoJob()
    covey.jax.state(one, own=own, job=gives)  # type: ignore[call-overload]
    found = covey.jax.state(other, own=other_own, job=takes)  # type: ignore[call-overload]
    said = None if gives.own is None else json.loads(json.dumps(gives.own()))
    takes.load({name: array.copy() for name, array in gives.get().items()}, said)
    return found


def test_every_leaf_comes_as_it_was_with_its_type() -> None:
    other = jax.tree_util.tree_map(lambda leaf: leaf, tree()) | {"key": jax.random.key(9)}
    other["w"], other["plain"] = other["w"] + 1, (np.arange(3) + 1, 6, 0.2, False, None)
    found = handed_over(tree(), other).tree
    assert found["w"].tolist() == [[0, 1, 2], [3, 4, 5]] and isinstance(found["w"], jax.Array)
    assert str(found["short"][0].dtype) == "bfloat16" and found["short"][0].tolist() == [1.5, 2.25]
    assert found["short"][1].shape == () and int(found["short"][1]) == 7
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(jax.random.key(3))).all()
    assert isinstance(found["plain"][0], np.ndarray) and found["plain"][0].tolist() == [0, 1, 2]
    assert found["plain"][1:] == (5, 0.1, True, None) and [type(each) for each in found["plain"][1:4]] == [
        int,
        float,
        bool,
    ]


def test_keys_of_its_own_come_from_what_the_lost_rank_said() -> None:
    own = {"key": jax.random.key(4), "old": jax.random.PRNGKey(5), "at": 17}
    found = handed_over(tree(), tree(), own, {"key": jax.random.key(0), "old": jax.random.PRNGKey(0), "at": 0}).own
    assert jax.random.normal(found["key"]) == jax.random.normal(own["key"])
    assert jax.random.normal(found["old"]) == jax.random.normal(own["old"]) and found["at"] == 17


def test_arrays_are_handed_over_without_a_copy() -> None:
    import covey.jax

    job, big = _NoJob(), jax.numpy.ones((1000, 100))
    covey.jax.state({"w": big}, job=job)  # type: ignore[call-overload]
    given = job.get()["tree['w']"]
    assert given.__array_interface__["data"][0] == big.unsafe_buffer_pointer()


def test_another_tree_is_refused_and_the_difference_said() -> None:
    with pytest.raises(CoveyError, match=r"tree\['w'\] here is float32 \(2, 4\), and there float32 \(2, 3\)"):
        handed_over(tree(), tree() | {"w": jax.numpy.zeros((2, 4))})
    with pytest.raises(CoveyError, match=r"tree\['more'\] here is int, and there not there"):
        handed_over(tree(), tree() | {"more": 1})
    with pytest.raises(CoveyError, match="what is its own has other parts"):
        handed_over(tree(), tree(), jax.random.key(1), [jax.random.key(1), 2])
    with pytest.raises(CoveyError, match="a leaf is a str"):
        handed_over({"name": "x"}, tree())


def test_a_tree_that_changes_its_shape_is_refused_in_the_step() -> None:
    import covey.jax

    job = _NoJob()
    state = covey.jax.state(tree(), job=job)  # type: ignore[call-overload]
    state.tree = tree() | {"w": jax.numpy.zeros(3)}
    with pytest.raises(CoveyError, match="the structure of this training"):
        job.get()


class JaxGang:
    """A gang whose ranks are threads."""

    def __init__(self, folder: Path, checkpoint: Path | None = None, stops_at: int = STEPS) -> None:
        """`stops_at`: the step from which rank 1 has heard that the job is to stop."""
        folder.mkdir()
        self.checkpoint, self.stops_at = checkpoint, stops_at
        self.aggd = AggdThread(folder)
        self.at = self.aggd.serve("j1", EPOCH, RANKS)
        self.found: dict[int, bytes] = {}
        self.failed: list[BaseException] = []
        self.began: list[tuple[int, int]] = []

    def run(self, rank: int, incarnation: int, lost_at: int) -> threading.Thread:
        thread = threading.Thread(target=self._train, args=(rank, incarnation, lost_at), daemon=True)
        thread.start()
        return thread

    def _train(self, rank: int, incarnation: int, lost_at: int) -> None:
        import covey.jax

        job: Any = JobOfTest(self.at, rank, incarnation)
        try:
            start = {"w": jax.numpy.ones(300), "count": 0}
            own, checkpoint = jax.random.key(rank), self.checkpoint or False
            state = covey.jax.state(start, own=own, job=job, checkpoint=checkpoint)
            self.began.append((rank, state.step))
            for step in state.steps(STEPS):
                job.asked = rank == 1 and step >= self.stops_at
                key, state.own = jax.random.split(state.own)
                mean = covey.jax.pmean(jax.random.normal(key, (300,)) * state.tree["w"], job=job)
                if step == lost_at:
                    raise Lost
                state.tree = {"w": state.tree["w"] + 0.1 * mean, "count": state.tree["count"] + 1}
            assert state.tree["count"] == STEPS
            self.found[rank] = np.asarray(state.tree["w"]).tobytes()
            job.tensors.leave()
        except Lost:
            pass
        except SystemExit as ended:
            assert ended.code == EXIT_AGAIN
        except BaseException as error:
            self.failed.append(error)
        job.tensors.close()


def test_a_job_that_stops_and_continues_leaves_the_same_bits(tmp_path: Path) -> None:
    calm, _ = trained(tmp_path / "calm", -1)
    saved = tmp_path / "state.safetensors"
    for name, stops_at in (("first", 2), ("second", STEPS)):
        gang = JaxGang(tmp_path / name, saved, stops_at)
        threads = [gang.run(rank, 0, -1) for rank in range(RANKS)]
        for thread in threads:
            thread.join(WITHIN_S)
        gang.aggd.finish()
        assert not gang.failed and bool(gang.found) == (name == "second"), gang.failed
    assert {step for _, step in gang.began} == {4} and set(gang.found.values()) == calm


def trained(folder: Path, lost_at: int) -> tuple[set[bytes], JaxGang]:
    gang = JaxGang(folder)
    threads = [gang.run(rank, 0, lost_at if rank == 1 else -1) for rank in range(RANKS)]
    if lost_at >= 0:
        threads[1].join(WITHIN_S)
        threads.append(gang.run(1, 1, -1))
    for thread in threads:
        thread.join(WITHIN_S)
    gang.aggd.finish()
    assert not gang.failed and sorted(gang.found) == list(range(RANKS)), gang.failed
    return set(gang.found.values()), gang


def test_a_rank_that_is_lost_leaves_the_same_bits(tmp_path: Path) -> None:
    calm, _ = trained(tmp_path / "calm", -1)
    found, gang = trained(tmp_path / "lost", 4)
    assert len(calm) == 1 and found == calm
    assert gang.began[-1] == (1, 4) or gang.began[-1] == (1, 5)
