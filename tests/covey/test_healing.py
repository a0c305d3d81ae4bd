"""A lost rank gets a successor, which continues where the others wait: threads as ranks, real aggregators."""

import io
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.core.errors import EXIT_AGAIN, StateLost
from covey.core.ids import HostId, JobId
from covey.healing.neighbours import HealedRank
from covey.healing.owns import RANKS_MAX
from covey.healing.stepwise import Pause, Stepwise
from covey.healing.taking_over import HealingClosed, TakingOver
from covey.job.job_state import JobState, ScriptState, StopsAndSaves, begun
from covey.job.tensors import TensorClient, TensorError
from covey.tensors.numbers.handle import TensorHandle
from covey.tensors.owner.leaving import LEAVE
from covey.wire.job import AggregatorAt
from covey.wire.sums import Serve
from tests.families import in_gate
from tests.plugins.aggregator.loopback import SECRET, AggdThread
from tests.quiet import until_blocked

JOB = JobId("j1")
GRANT = 1 << 32
WITHIN_S = 60.0
SIZES = {"a": 70_000, "b": 7, "c": 20_001}


class Lost(Exception):
    """This process was killed, at this point."""


class Rank:
    """One process of a rank."""

    def __init__(self, gang: "HealingGang", rank: int, incarnation: int) -> None:
        self.gang, self.rank, self.incarnation = gang, rank, incarnation
        self.client = TensorClient(
            JOB, rank, gang.ranks, lambda epoch, why, table: None, tables=len(gang.owners), part_bytes=1 << 16,
            say=io.StringIO(),
        )  # fmt: skip
        self.lost_at: Callable[[int, str], bool] = lambda step, where: False
        self.error: BaseException | None = None
        self.has_state = not incarnation
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        for at in self.gang.at:
            self.client.moved(at)
        self.thread.start()

    def kill(self) -> None:
        """Kill the process: all of its connections end, and its script gets no further."""
        self.client.close()

    def _run(self) -> None:
        try:
            self.gang.found[self.rank] = self._train()
            self.client.leave()
        except (Lost, TensorError, HealingClosed) as error:
            self.error = error
        except BaseException as error:
            self.error = error
            if isinstance(error, SystemExit) and error.code == EXIT_AGAIN:
                self.gang.stopped.append((self.rank, self.step))
                return
            self.gang.failed.append((self.rank, error))

    def _passes(self, step: int, where: str) -> None:
        if self.lost_at(step, where):
            self.client.close()
            raise Lost(f"rank {self.rank} in step {step} {where}")

    def _train(self) -> bytes:
        """The training: momentum over the mean of ranks' draws, and a tensor that is used in every third step only."""
        draws = np.random.default_rng(self.rank)
        w = {name: np.zeros(size, np.float32) for name, size in SIZES.items()}
        m = {name: np.zeros(size, np.float32) for name, size in SIZES.items()}

        def get() -> dict[str, Any]:
            return {f"w {name}": array for name, array in w.items()} | {f"m {name}": array for name, array in m.items()}

        def load(arrays: dict[str, Any], own: Any) -> None:
            for name in SIZES:
                w[name][:], m[name][:] = arrays[f"w {name}"], arrays[f"m {name}"]
            if own is not None:
                draws.bit_generator.state = own

        own = (lambda: draws.bit_generator.state) if self.gang.draws else None
        me = HealedRank(self.rank, self.client.world_size, self.incarnation)
        gang = self.gang
        stop = StopsAndSaves(gang.checkpoint, self._wants, leave=self.client.leave)
        state = begun(self.client, me, ScriptState(get, load, own), gathers_max=gang.gathers_max, stop=stop)
        self.has_state = True
        self.gang.began.append((self.rank, state.step))
        for step in state.steps(self.gang.steps):
            self._step(step, state, w, m, draws)
        return b"".join(w[name].tobytes() for name in sorted(w))

    @property
    def step(self) -> int:
        assert self.client._healing is not None
        return self.client._healing.step

    def _wants(self) -> bool:
        """Whether this process has heard that the job is to stop: a successor may hear later than the lost rank."""
        return self.step >= self.gang.hears.get((self.rank, self.incarnation), self.gang.steps)

    def _step(self, step: int, state: JobState, w: Any, m: Any, draws: np.random.Generator) -> None:
        self.gang.used.append((self.rank, step))
        drawn = draws if self.gang.draws else np.random.default_rng((self.rank, step))
        mine = {name: drawn.standard_normal(size, np.float32) * (1 + w[name]) for name, size in SIZES.items()}
        self._passes(step, "before it pushes")
        handles = {}
        for name, each in mine.items():
            handles[name] = self.client.push(name, each, mean=True)
            self._passes(step, f"after {name}")
        if step % 3 == 0:
            self.client.push_pull("seldom", np.ones(3, np.float32))
        found = {name: handle.wait() for name, handle in handles.items()}
        self._passes(step, "with its results")
        for name, each in found.items():
            m[name] = 0.9 * m[name] + each
            w[name] -= np.float32(0.01) * m[name]
        if self.gang.draws_late:
            draws.random()
        self._passes(step, "at its end")
        if self.gang.computes_s:
            time.sleep(self.gang.computes_s)


class HealingGang:
    def __init__(self, folder: Path, ranks: int, tables: int = 2, steps: int = 12) -> None:
        self.folder, self.ranks, self.steps, self.draws, self.computes_s = folder, ranks, steps, True, 0.0
        self.gathers_max, self.draws_late = RANKS_MAX, False
        self.epoch = GRANT
        self.owners = [self._aggd() for _ in range(tables)]
        self.at: list[AggregatorAt] = []
        for table in range(tables):
            self.serve(table)
        self.found: dict[int, bytes] = {}
        self.began: list[tuple[int, int]] = []
        self.used: list[tuple[int, int]] = []
        self.failed: list[tuple[int, BaseException]] = []
        self.checkpoint: Path | None = None
        """Where ranks save and from which they continue; None: they do not ask whether to stop."""
        self.hears: dict[tuple[int, int], int] = {}
        """By rank and incarnation: the step from which it has heard that the job is to stop."""
        self.stopped: list[tuple[int, int]] = []
        self.now: dict[int, Rank] = {}

    def _aggd(self) -> AggdThread:
        self.epoch += 1
        folder = self.folder / str(self.epoch - GRANT)
        folder.mkdir(parents=True)
        return AggdThread(folder)

    def serve(self, table: int) -> None:
        """Serve a table under a new epoch, and name it to all ranks."""
        self.epoch += 1
        job = JOB if table == 0 else JobId(f"{JOB}/{table}")
        self.owners[table].order(Serve(job, self.epoch, self.ranks, SECRET))
        at = AggregatorAt(JOB, self.epoch, HostId("h1"), self.owners[table].aggd.address, SECRET, table)
        self.at = [*self.at[:table], at, *self.at[table + 1 :]]

    def lose_owner(self, table: int) -> None:
        """The owner's aggregator dies with all that it held; another one takes its place."""
        self.owners[table].kill()
        self.owners[table] = self._aggd()
        self.serve(table)
        for rank in self.now.values():
            rank.client.moved(self.at[table])

    def begin(self) -> None:
        self.now = {rank: Rank(self, rank, 0) for rank in range(self.ranks)}
        for rank in self.now.values():
            rank.start()

    @property
    def is_leaving(self) -> bool:
        """Whether a process has ended its last step."""
        return any(LEAVE in each.client._ways for each in self.now.values())

    def replace(self, rank: int) -> Rank:
        """Kill the process of a rank, and start its successor."""
        self.now[rank].kill()
        self.now[rank].thread.join(10)
        assert not self.now[rank].thread.is_alive()
        if rank in dict(self.stopped):
            return self.now[rank]
        if self.is_leaving and rank not in self.found:
            time.sleep(0.5)
            if len(dict(self.stopped)) == self.ranks - 1:  # nothing is left to do, and nobody waits for a successor
                self.stopped.append((rank, self.now[rank].step))
                return self.now[rank]
        self.now[rank] = Rank(self, rank, self.now[rank].incarnation + 1)
        self.now[rank].start()
        return self.now[rank]

    def end(self) -> list[bytes]:
        """The result of each rank."""
        end_s = time.monotonic() + WITHIN_S
        for rank in self.now.values():
            rank.thread.join(max(0.0, end_s - time.monotonic()))
        stuck = {rank: self.now[rank].client.rank for rank, each in self.now.items() if each.thread.is_alive()}
        self.close()
        assert not self.failed and not stuck, (self.failed, stuck, self.began, self.stopped)
        return [self.found[rank] for rank in range(self.ranks) if rank in self.found]

    def close(self) -> None:
        for rank in self.now.values():
            rank.client.close()
        for owner in self.owners:
            owner.kill()
            assert not owner.failures and not owner.log.errors, (owner.failures, owner.log.errors)


def undisturbed(folder: Path, ranks: int, tables: int = 2, draws: bool = True) -> list[bytes]:
    gang = HealingGang(folder / "calm", ranks, tables)
    gang.draws = draws
    gang.begin()
    found = gang.end()
    assert len(found) == ranks and len(set(found)) == 1
    return found


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[HealingGang]:
    made = HealingGang(tmp_path / "g", 3)
    yield made
    for rank in made.now.values():
        rank.client.close()


def lost(gang: HealingGang, rank: int) -> None:
    """Wait until the rank is lost by itself."""
    gang.now[rank].thread.join(WITHIN_S)
    assert not gang.now[rank].thread.is_alive() and isinstance(gang.now[rank].error, Lost), gang.now[rank].error


WHERE = ["before it pushes", "after a", "after b", "after c", "with its results", "at its end"]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("step", "gathers_max"), in_gate(2, [(1, RANKS_MAX), (5, 2), (0, RANKS_MAX), (6, RANKS_MAX), (0, 2)])
)
def test_a_rank_that_is_lost_anywhere_in_a_step_is_replaced(
    gang: HealingGang, where: str, step: int, gathers_max: int
) -> None:
    """Its own state is with all other ranks, or with two neighbours when there are many ranks."""
    gang.gathers_max = gathers_max
    gang.now = {rank: Rank(gang, rank, 0) for rank in range(3)}
    gang.now[1].lost_at = lambda at, here: (at, here) == (step, where)
    for rank in gang.now.values():
        rank.start()
    lost(gang, 1)
    gang.replace(1)
    assert gang.end() == undisturbed(gang.folder, 3)
    assert gang.began[-1][1] in (step, step + 1), "nobody else begins again, and it goes on where it was lost"


def test_two_that_are_lost_at_once_are_both_replaced_by_what_the_third_holds(gang: HealingGang) -> None:
    gang.now = {rank: Rank(gang, rank, 0) for rank in range(3)}
    gang.now[0].lost_at = lambda at, here: (at, here) == (5, "after a")
    for rank in gang.now.values():
        rank.start()
    lost(gang, 0)
    gang.replace(2)
    gang.replace(0)
    assert gang.end() == undisturbed(gang.folder, 3)


def test_a_successor_that_is_lost_while_it_asks_has_a_successor_too(
    gang: HealingGang, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang.now = {rank: Rank(gang, rank, 0) for rank in range(3)}
    gang.now[1].lost_at = lambda at, here: (at, here) == (4, "after b")
    for rank in gang.now.values():
        rank.start()
    lost(gang, 1)
    asked = threading.Event()

    def never(self: TakingOver, *_: Any) -> Stepwise[bool]:
        asked.set()
        yield Pause(until=lambda: False, most_s=0.05)
        return False

    with monkeypatch.context() as patch:
        patch.setattr(TakingOver, "_fetch", never)
        gang.replace(1)
        assert asked.wait(WITHIN_S)
        gang.now[1].kill()
        gang.now[1].lost_at = lambda at, here: True
    gang.now[1].thread.join(WITHIN_S)
    gang.replace(1)
    assert gang.end() == undisturbed(gang.folder, 3)


def _without_state(gang: HealingGang, besides: int) -> int:
    return sum(not each.has_state for rank, each in gang.now.items() if rank != besides)


@pytest.mark.parametrize("seed", in_gate(2, range(6)))
def test_ranks_and_owners_that_die_at_any_time_leave_the_same_bits(tmp_path: Path, seed: int) -> None:
    draws = random.Random(seed)
    gang = HealingGang(tmp_path / "g", draws.choice([2, 3, 5]), tables=draws.choice([1, 2]), steps=30)
    gang.computes_s = 0.01
    gang.gathers_max = RANKS_MAX if seed % 2 else 0
    gang.draws = gang.ranks > 2 or draws.random() < 0.5
    gang.begin()
    for _ in range(6):
        time.sleep(draws.uniform(0.0, 0.12))
        if draws.random() < 0.3:
            gang.lose_owner(draws.randrange(len(gang.owners)))
        lost, end_s = draws.randrange(gang.ranks), time.monotonic() + WITHIN_S
        while _without_state(gang, lost) > min(1, gang.ranks - 2):  # at most two are lost at once
            assert time.monotonic() < end_s, "nobody could take over"
            time.sleep(0.001)
        if gang.found:
            break
        gang.replace(lost)
    found = gang.end()
    calm = HealingGang(tmp_path / "c", gang.ranks, tables=1, steps=30)
    calm.draws = gang.draws
    calm.begin()
    assert found == calm.end()


@pytest.mark.parametrize("gathers_max", [RANKS_MAX, 0])
def test_own_state_that_changes_after_it_was_said_is_named_at_once(gang: HealingGang, gathers_max: int) -> None:
    gang.gathers_max, gang.draws_late = gathers_max, True
    gang.begin()
    for rank in gang.now.values():
        rank.thread.join(WITHIN_S)
    gang.close()
    assert len(gang.failed) == 3
    for _, error in gang.failed:
        assert "own['state']['state'] at the end of step 0 is not what it was" in str(error), error


@pytest.mark.parametrize("seed", in_gate(2, range(6)))
def test_all_ranks_stop_after_one_step_and_continue_with_the_same_bits(tmp_path: Path, seed: int) -> None:
    """Each rank hears in another step, and ranks and owners die meanwhile."""
    draws = random.Random(seed)
    first = HealingGang(tmp_path / "first", draws.choice([2, 3, 5]), tables=draws.choice([1, 2]), steps=30)
    first.computes_s, first.checkpoint = 0.01, tmp_path / "saved" / "state.safetensors"
    first.gathers_max = RANKS_MAX if seed % 2 else 0
    first.draws = first.ranks > 2 or draws.random() < 0.5
    hearer = draws.randrange(first.ranks)
    first.hears |= {(rank, 0): draws.randrange(5, 40) for rank in range(first.ranks) if draws.random() < 0.7}
    first.hears[hearer, 0] = draws.randrange(2, 16)
    first.begin()
    for _ in range(8):
        time.sleep(draws.uniform(0.0, 0.08))
        if first.is_leaving:  # agents replace nobody while a job ends
            break
        if draws.random() < 0.3:
            first.lose_owner(draws.randrange(len(first.owners)))
        lost = draws.randrange(first.ranks)
        if lost == hearer or _without_state(first, lost):
            continue
        if draws.random() < 0.5:
            first.hears[lost, first.now[lost].incarnation + 1] = draws.randrange(40)
        first.replace(lost)
    first.end()
    where = {step for _, step in first.stopped}
    assert len(first.stopped) == first.ranks and len(where) == 1, first.stopped
    then = HealingGang(tmp_path / "then", first.ranks, tables=1, steps=30)
    then.draws, then.gathers_max, then.checkpoint = first.draws, first.gathers_max, first.checkpoint
    then.begin()
    time.sleep(draws.uniform(0.0, 0.02))
    lost = draws.randrange(then.ranks)
    if not then.found:
        then.replace(lost)
    found = then.end()
    assert {step for _, step in then.began[: then.ranks]} == where
    calm = HealingGang(tmp_path / "c", first.ranks, tables=1, steps=30)
    calm.draws = first.draws
    calm.begin()
    assert found == calm.end()


def test_a_result_is_used_only_once_what_is_every_ranks_own_is_here(gang: HealingGang) -> None:
    """Otherwise a rank could get ahead of the newest own state that is kept of another rank, which is then lost."""
    clients = [Rank(gang, rank, 0).client for rank in range(3)]
    states = []
    for rank, client in enumerate(clients):
        for at in gang.at:
            client.moved(at)
        own = [lambda: "mine", lambda: "mine", lambda: "x"][rank]
        states.append(begun(client, HealedRank(rank, 3), ScriptState(dict, lambda arrays, own: None, own)))
    try:
        assert clients[2]._healing is not None
        gather = clients[2]._healing.machine.gather
        assert gather is not None
        pushed = [client.push("a", np.ones(3, np.float32)) for client in clients[:2]]
        clients[2]._healing = None  # it pushes, and does not say what is its own
        clients[2].push_pull("a", np.ones(3, np.float32))
        done = threading.Event()

        def wait() -> None:
            with suppress(TensorError):
                pushed[0].wait()
                done.set()

        end_s = time.monotonic() + WITHIN_S
        while not pushed[0].done:
            assert time.monotonic() < end_s, "the result does not come"
            time.sleep(0.001)
        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        until_blocked(waiter, TensorHandle.wait)
        assert not done.is_set(), "it is here, and is not given out"
        gather.begin(0, b'"x"')
        clients[2].push("b", np.ones(3, np.float32))
        assert done.wait(WITHIN_S)
    finally:
        for client in clients:
            client.close()
        gang.close()


def test_when_all_are_lost_a_successor_says_so(gang: HealingGang) -> None:
    gang.computes_s = 0.02
    gang.begin()
    time.sleep(0.1)
    for rank in range(3):
        gang.now[rank].kill()
    for rank in range(3):
        gang.now[rank].thread.join(WITHIN_S)
    for rank in range(3):
        gang.replace(rank)
    for each in gang.now.values():
        each.thread.join(WITHIN_S)
    assert len(gang.failed) == 3
    for _, error in gang.failed:
        assert isinstance(error, SystemExit) and error.code == 70
        assert isinstance(error.__cause__, StateLost) and "all ranks of this job were lost" in str(error.__cause__)
    gang.close()
