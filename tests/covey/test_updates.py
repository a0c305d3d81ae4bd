"""Optimizers that run where gradients are summed, on live threads: in memory that one host's ranks share, between hosts
whose ranks add first, and for ranks that push alone."""

import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import covey
from covey.job.tensors import TensorClient, TensorError
from covey.tensors.aggregator.link import TensorLink
from covey.tensors.aggregator.rounds import TensorRounds
from covey.tensors.numbers.blocks import Sizes, blocks_of, keeper
from covey.tensors.numbers.moments import Moments
from covey.tensors.numbers.pieces import PIECE
from covey.tensors.numbers.tensor_wire import Declared, Frame, TensorOp, Type, key_of, parse
from covey.tensors.numbers.update_steps import take_step
from covey.tensors.numbers.updates import SGD, Adam, Update
from covey.tensors.owner.part_additions import PartAddition
from covey.tensors.owner.sums import StateTransfer, TensorSum
from plugins.aggregator.datapath.job_sums import JobSums
from plugins.aggregator.datapath.lanes.addition_queue import AdditionQueue, _Waiting
from tests.covey.test_host_rounds import Gang, check, gang
from tests.families import in_gate
from tests.plugins.aggregator.harness import Tensor, contribution, initial, rate_in, reference, updated
from tests.plugins.aggregator.loopback import AggdThread
from tests.plugins.aggregator.test_optimizers import UPDATES

MOMENTUM, ADAM = UPDATES[2], UPDATES[4]
HOSTS = [(3,), (2, 2), (3, 1, 2), (1, 1, 1)]
"""Ranks by host: one host, which needs no aggregator; hosts whose ranks add first; one rank for each host."""


def tensors(*updates: Update, type: Type = "float32") -> tuple[Tensor, ...]:
    """For each update, a tensor of many Blocks and one of a single Block."""
    each = [(at, update, size) for at, update in enumerate(updates) for size in (90_001, 5)]
    return tuple(Tensor(f"w{size}.{at}", "model", (size,), update, type=type) for at, update, size in each)


@given(
    update=st.sampled_from(UPDATES),
    type=st.sampled_from(("float32", "float64")),
    size=st.sampled_from((0, 1, 1000, PIECE, PIECE + 1)),
    step=st.integers(1, 10_000),
    rate=st.floats(0, 10),
    seed=st.integers(0, 2**32),
)
def test_a_step_has_the_bits_of_the_lines_of_numpy_that_say_it(
    update: Update, type: str, size: int, step: int, rate: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    w, g, *kept = (rng.standard_normal((2 + update.moments, size)) * 10.0 ** rng.integers(-6, 7, size)).astype(type)
    kept = [np.abs(each) for each in kept]
    with np.errstate(over="ignore", invalid="ignore"):
        right, right_kept = updated(update, w, g, kept, step, rate)
    old, new = [w, *kept], [g.copy(), *(np.empty_like(each) for each in kept)]
    before = [each.tobytes() for each in old]
    take_step(update, step, rate, old, new)
    assert new[0].tobytes() == right.tobytes() and new[0].dtype == type
    assert [each.tobytes() for each in new[1:]] == [each.tobytes() for each in right_kept]
    assert [each.tobytes() for each in old] == before, "who was interrupted could not begin again"


@pytest.mark.parametrize("hosts", HOSTS)
def test_every_way_of_a_tensor_has_the_bits_of_one_process(tmp_path: Path, hosts: tuple[int, ...]) -> None:
    with gang(tmp_path, *hosts) as job:
        job.serve()
        job.share()
        job.play(check(tensors(*UPDATES), sum(hosts), 3))


@pytest.mark.parametrize(
    ("hosts", "type"), [((3,), "float16"), ((3,), "bfloat16"), ((2, 2), "bfloat16"), ((1, 1, 1), "float16")]
)
def test_sixteen_bits_are_kept_and_rounded_once_a_step(tmp_path: Path, hosts: tuple[int, ...], type: Type) -> None:
    """Moments and sums are float32, and move with their Block to the second owner."""
    decoupled = UPDATES[6]
    with gang(tmp_path, *hosts) as job:
        job.serve()
        job.share()
        threads = job.start(check(tensors(MOMENTUM, decoupled, type=type), sum(hosts), 10))
        if len(hosts) > 1:
            time.sleep(0.1)
            for owner in job.owners:
                owner.finish()
            job.owners.clear()
            job.serve()
        job.end(threads, 60)


def test_ranks_that_push_alone_have_the_same_bits(tmp_path: Path) -> None:
    with gang(tmp_path, 2, 2) as job:
        job.serve()
        job.share(but=range(4))
        job.play(check(tensors(MOMENTUM, ADAM), 4, 3))


@pytest.mark.parametrize("hosts", in_gate(1, [((2, 3),), ((1, 1, 1),)]))
def test_owners_that_die_take_no_moment_along(tmp_path: Path, hosts: tuple[int, ...]) -> None:
    with gang(tmp_path, *hosts) as job:
        job.serve()
        job.share()
        threads = job.start(check(tensors(MOMENTUM, ADAM), sum(hosts), 40))
        for _ in range(4):
            time.sleep(0.15)
            for owner in job.owners:
                owner.finish()
            job.owners.clear()
            job.serve()
        job.end(threads, 60)
        assert sum(each.rounds for each in job.jobs()) > 0


def test_a_keeper_that_ends_with_its_last_result_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper has said that it keeps the moments before its script continues, and may close."""
    send = TensorLink.send

    def slow(link: TensorLink, frames: Iterable[Frame], careful: bool = True) -> None:
        said = tuple(frames)
        if any(parse(head).op is TensorOp.KEPT for head, _ in said):
            time.sleep(0.2)
        send(link, said, careful)

    monkeypatch.setattr(TensorLink, "send", slow)

    def script(rank: int, client: TensorClient) -> None:
        client.model("w", np.ones(5, np.float32), update=ADAM)
        found[rank] = client.push_pull("w", np.ones(5, np.float32)).tobytes()
        client.close()

    found: dict[int, bytes] = {}
    with gang(tmp_path, 1, 1, 1) as job:
        job.serve()
        job.share()
        job.play(script)
    assert sorted(found) == [0, 1, 2] and len(set(found.values())) == 1


@pytest.mark.parametrize("later", [True, False])
def test_an_addition_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: bool) -> None:
    """The addition fails for want of memory: the tensor begins without state, which its ranks and its keeper have."""
    failed: list[str] = []
    end = TensorSum.end

    def fails(self: TensorSum, addition: PartAddition, not_finite: int) -> Sequence[StateTransfer]:
        if self.version == 3 and not failed and addition.last is not None:
            failed.append(self.declared.name)
            raise MemoryError("no memory for an addition")
        return end(self, addition, not_finite)

    monkeypatch.setattr(TensorSum, "end", fails)
    monkeypatch.setattr(AggdThread, "finish", AggdThread.kill)  # it logs an error, as it should
    if later:
        monkeypatch.setattr(AdditionQueue, "put", _always_later)
    with gang(tmp_path, 1, 1, tables=1) as job:
        job.serve()
        job.share()
        job.play(check((Tensor("w", "model", (90_001,), ADAM),), 2, 6))
        assert failed == ["w"] and "addition failed" in job.owners[0].log.errors[0]


def _always_later(self: AdditionQueue, job: JobSums, key: int, tensor: TensorSum) -> None:
    """Put off the addition, as when additions of other jobs wait."""
    if tensor.busy and (id(job), key) not in self._queued:
        self._queued.add((id(job), key))
        self._waiting.put(0.0, _Waiting(job, key, tensor))
    if self._waiting and not self._running:
        self._running = True
        self._env.spawn("aggd adds", self._add())


def test_the_declared_rate_is_that_of_rounds_that_say_none(tmp_path: Path) -> None:
    tensor = Tensor("w", "model", (1000,), SGD(0.25, momentum=0.5))
    wanted = reference(tensor, 2, 2, rate=lambda round: 0.25 if round == 1 else 0.5)

    def script(rank: int, client: TensorClient) -> None:
        client.model("w", initial(tensor, rank), update=tensor.update)
        first = client.push_pull("w", contribution(tensor, rank, 1))
        second = client.push_pull("w", contribution(tensor, rank, 2), rate=0.5)
        assert (first.tobytes(), second.tobytes()) == (wanted[0].tobytes(), wanted[1].tobytes())

    with gang(tmp_path, 2) as job:
        job.share()
        job.play(script)


def test_the_mean_of_gradients_makes_a_step(tmp_path: Path) -> None:
    found: dict[int, list[float]] = {}

    def script(rank: int, client: TensorClient) -> None:
        client.model("w", np.ones(3, np.float32), mean=True, update=SGD(0.5))
        found[rank] = client.push_pull("w", np.full(3, 1 + rank, np.float32), mean=True).tolist()

    with gang(tmp_path, 1, 1) as job:
        job.serve()
        job.share()
        job.play(script)
    assert found == {0: [0.25] * 3, 1: [0.25] * 3}


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def trained(job: Gang, tensor: Tensor, rounds: range, saved: dict[int, Moments], kept: dict[int, np.ndarray]) -> None:
    """All ranks do these rounds, starting from what was saved before, and save again."""

    def script(rank: int, client: TensorClient) -> None:
        # only rank 0's parameters and moments count; others must know how many steps were made
        start = kept[0] if kept and rank == 0 else initial(tensor, rank)
        moments = saved.get(rank)
        if moments is not None and rank:
            moments = Moments(moments.steps, tuple(np.full_like(each, np.nan) for each in moments.arrays))
        now = client.model("w", start, update=tensor.update, moments=moments, type=tensor.type)
        for round in rounds:
            given = contribution(tensor, rank, round)
            now = client.push_pull("w", given, rate=rate_in(round), type=tensor.type)
        found[rank], ended[rank] = client.moments("w"), now

    found: dict[int, Moments] = {}
    ended: dict[int, np.ndarray] = {}
    job.share()
    job.play(script)
    saved.update(found)
    kept.update(ended)


@pytest.mark.parametrize(("update", "type"), [(MOMENTUM, "float32"), (ADAM, "float32"), (ADAM, "bfloat16")])
@pytest.mark.parametrize("hosts", in_gate(1, [((2, 2),), ((3,),), ((1, 1, 1),)]))
def test_a_job_goes_on_from_a_checkpoint_with_the_bits_of_one_that_never_ended(
    tmp_path: Path, hosts: tuple[int, ...], update: Update, type: Type
) -> None:
    tensor = Tensor("w", "model", (300_001,), update, type=type)
    saved: dict[int, Moments] = {}
    kept: dict[int, np.ndarray] = {}
    for at, rounds in enumerate((range(1, 3), range(3, 5))):
        (tmp_path / str(at)).mkdir()
        with gang(tmp_path / str(at), *hosts) as job:
            job.serve()
            trained(job, tensor, rounds, saved, kept)
    wanted = reference(tensor, sum(hosts), 4)[-1]
    assert all(array.tobytes() == wanted.tobytes() for array in kept.values())
    assert {moments.steps for moments in saved.values()} == {4}
    assert len({tuple(each.tobytes() for each in moments.arrays) for moments in saved.values()}) == 1
    assert all(each.shape == tensor.shape for each in saved[0].arrays)


def test_moments_are_asked_for_between_rounds_and_of_what_has_some(tmp_path: Path) -> None:
    with gang(tmp_path, 1) as job:
        job.share()
        (client,) = job.clients
        client.model("w", np.ones(3, np.float32), update=ADAM)
        handle = client.push("w", np.ones(3, np.float32))
        with pytest.raises(ValueError, match="'w' has a round under way"):
            client.moments("w")
        handle.wait()
        client.push_pull("g", np.ones(3, np.float32))
        for name in ("g", "none"):
            with pytest.raises(ValueError, match=f"'{name}' is no model with an optimizer"):
                client.moments(name)
        assert client.moments("w").steps == 1


def test_a_scalar_goes_on_from_its_checkpoint_and_numbers_may_be_numpys(tmp_path: Path) -> None:
    with gang(tmp_path, 1) as job:
        job.share()
        (client,) = job.clients
        client.model("t", np.array(3, np.float32), update=Adam(rate=np.float64(0.5)))
        client.push_pull("t", np.array(1, np.float32))
        steps, arrays = client.moments("t")
        client.model("u", np.array(3, np.float32), update=Adam(0.5), moments=Moments(np.int64(steps), arrays))  # type: ignore[arg-type]
        assert [each.tolist() for each in client.moments("u").arrays] == [each.tolist() for each in arrays]
        assert client.moments("u").steps == 1
    assert SGD(1) == SGD(1.0) and isinstance(SGD(1).rate, float)


@pytest.mark.parametrize("alone", [False, True])
def test_a_round_that_was_given_up_is_still_under_way(tmp_path: Path, alone: bool) -> None:
    """A script catches Ctrl-C, and saves: its numbers do not belong to a single round."""
    with gang(tmp_path, 1, 1) as job:
        job.serve()
        job.share(but=range(2) if alone else ())
        first, second = job.clients
        told = threading.Thread(target=first.model, args=("w", np.ones(3, np.float32)), kwargs={"update": ADAM})
        told.start()
        second.model("w", np.ones(3, np.float32), update=ADAM)
        told.join(20)
        first.push("w", np.ones(3, np.float32))
        first._ended("w")  # as a `push_pull` that was interrupted
        with pytest.raises(ValueError, match="'w' has a round under way"):
            first.moments("w")


@pytest.mark.parametrize("hosts", [(2,), (2, 1), (1, 1)])
def test_what_a_script_asks_of_numpy_stops_no_round(tmp_path: Path, hosts: tuple[int, ...]) -> None:
    """The script makes numpy raise, and moments that shrink underflow in the end."""

    def script(rank: int, client: TensorClient) -> None:
        with np.errstate(all="raise"):
            client.model("w", np.ones(3, np.float32), update=Adam(beta1=0.0))
            client.push_pull("w", np.full(3, 1e-30, np.float32))
            found[rank] = client.push_pull("w", np.full(3, 3e38, np.float32)).tobytes()

    found: dict[int, bytes] = {}
    with gang(tmp_path, *hosts) as job:
        job.serve()
        job.share()
        job.play(script)
    assert len(found) == sum(hosts) and len(set(found.values())) == 1


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "alone", "why"),
    [((2,), False, "rank 1 learns"), ((2, 1), False, "rank 1 learns"), ((1, 1), True, r"rank \d learns")],
)
def test_ranks_that_learn_at_different_rates_are_told_so(
    tmp_path: Path, hosts: tuple[int, ...], alone: bool, why: str
) -> None:
    told: list[str] = []

    def script(rank: int, client: TensorClient) -> None:
        client.model("w", np.ones(1000, np.float32), update=MOMENTUM)
        try:
            client.push_pull("w", np.ones(1000, np.float32), rate=0.5 if rank == 1 else 0.25)
        except TensorError as error:
            told.append(str(error))
            time.sleep(0.2)
            for other in job.clients:
                other.close()

    with gang(tmp_path, *hosts) as job:
        job.serve()
        job.share(but=range(sum(hosts)) if alone else ())
        job.play(script)
    refused = [each for each in told if "has learning rate" in each]
    assert refused, told
    for each in refused:
        assert "tensor 'w'" in each and "0.5" in each and "0.25" in each and "in round 1" in each


def test_ranks_that_declare_different_optimizers_are_told_so(tmp_path: Path) -> None:
    told: list[str] = []

    def script(rank: int, client: TensorClient) -> None:
        try:
            client.model("w", np.ones(3, np.float32), update=SGD(0.5) if rank else SGD(0.25))
        except TensorError as error:
            told.append(str(error))
            time.sleep(0.2)
            for other in job.clients:
                other.close()

    for hosts in ((2,), (1, 1)):
        (tmp_path / str(len(hosts))).mkdir()
        with gang(tmp_path / str(len(hosts)), *hosts) as job:
            job.serve()
            job.share()
            job.play(script)
        assert any("rate=0.5" in each and "rate=0.25" in each for each in told), told
        told.clear()


@pytest.mark.parametrize("rate", [-0.5, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused_and_the_tensor_goes_on(tmp_path: Path, rate: float) -> None:
    with gang(tmp_path, 1) as job:
        job.share()
        (client,) = job.clients
        client.model("w", np.ones(3, np.float32), update=SGD(0.5))
        with pytest.raises(ValueError, match="a learning rate is a number from 0 on"):
            client.push_pull("w", np.ones(3, np.float32), rate=rate)
        assert client.push_pull("w", np.ones(3, np.float32)).tolist() == [0.5] * 3
        with pytest.raises(ValueError, match="tensor 'g' has no optimizer"):
            client.push_pull("g", np.ones(3, np.float32), rate=0.5)


@pytest.mark.parametrize(
    ("update", "moments", "array", "why"),
    [
        (None, Moments(1, ()), np.ones(3, np.float32), "moments are given without an update"),
        (MOMENTUM, Moments(1, (np.ones(3, np.float16),)), np.ones(3, np.float16), "whose moments are float32"),
        (ADAM, Moments(1, (np.ones(3, np.float32),)), np.ones(3, np.float32), "2 moments, not 1 after 1 steps"),
        (
            MOMENTUM,
            Moments(1, (np.ones(4, np.float32),)),
            np.ones(3, np.float32),
            r"float32 \(4,\), and the parameters",
        ),
        (MOMENTUM, Moments(1, (np.ones(3),)), np.ones(3, np.float32), "a moment is float64"),
        (MOMENTUM, Moments(-1, (np.ones(3, np.float32),)), np.ones(3, np.float32), "after -1 steps"),
    ],
)
def test_moments_that_are_not_those_of_the_parameters_are_refused_by_name(
    tmp_path: Path, update: Update | None, moments: Moments | None, array: np.ndarray, why: str
) -> None:
    with gang(tmp_path, 1) as job:
        job.share()
        (client,) = job.clients
        with pytest.raises((TypeError, ValueError), match=f"tensor 'w'.*{why}"):
            client.model("w", array, update=update, moments=moments)
        assert client.model("w", np.ones(3, np.float32), update=ADAM).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: SGD(-1), "rate of SGD is from 0"),
        (lambda: SGD(0.1, momentum=1), "momentum of SGD is from 0 to below 1"),
        (lambda: Adam(beta2=1.5), "beta2 of Adam"),
        (lambda: Adam(epsilon=float("nan")), "epsilon of Adam"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused(make: type, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()


def test_scripts_find_optimizers_where_they_find_the_rest() -> None:
    assert (covey.SGD, covey.Adam, covey.Moments) == (SGD, Adam, Moments)


# ---- keepers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hosts", "alike"), [(2, 1), (2, 4), (4, 2), (16, 1)])
def test_a_keeper_is_on_another_host_than_the_owner_and_all_keep_about_as_much(hosts: int, alike: int) -> None:
    ranks, kept = hosts * alike, dict.fromkeys(range(hosts * alike), 0)
    for name in map(str, range(200)):
        key = key_of(name)
        for at, block in enumerate(blocks_of(key, 100_000, 4, hosts, Sizes())):
            rank = keeper(key, at, block.table, hosts, ranks)
            assert rank // alike != block.table, "a host that is lost would take both along"
            kept[rank] += 1
    assert max(kept.values()) < 2 * min(kept.values()) and min(kept.values()) > 0


@pytest.mark.parametrize("tables", [1, 2, 3, 7])
def test_there_is_a_keeper_for_any_number_of_ranks(tables: int) -> None:
    for ranks in range(1, 20):
        assert all(0 <= keeper(key, 3, table, tables, ranks) < ranks for key in range(9) for table in range(tables))


def test_only_a_keeper_has_memory_for_moments() -> None:
    declared = Declared("w", "model", (1000,), update=ADAM, keeper=1)
    sizes = [len(TensorRounds(declared, bytes(4000), (rank, rank + 1), 3).moments) for rank in range(3)]
    assert sizes == [0, 2, 0]
