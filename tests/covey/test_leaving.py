"""A rank that waits for one that has left is told which, whichever way its tensors go: threads as ranks."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.core.errors import EXIT_STATE_LOST, OthersDone, RankLeft, TensorError
from covey.core.ids import HostId, JobId
from covey.healing.healing import Healing
from covey.healing.neighbours import HealedRank
from covey.job.given_rounds import GivenRound
from covey.job.job_state import ScriptState, begun
from covey.job.tensors import TensorClient
from covey.tensors.numbers.arrays import checked
from covey.tensors.numbers.spoken import Spoken
from covey.tensors.numbers.tensor_wire import Declared
from covey.tensors.owner.leaving import in_vain, who
from covey.tensors.owner.ranks_away import SENDING_S, VAIN_S, RanksAwayHere, RoundSaid
from covey.tensors.owner.ranks_away import in_vain as is_in_vain
from covey.wire.job import GoneRank
from covey.wire.sums import GetStatus, RanksAway
from tests.covey.test_host_rounds import JOB, Gang, gang
from tests.covey.test_tensors import until
from tests.plugins.aggregator.loopback import AggdThread

ENDED = {0: GoneRank(HostId("h1"), 19)}
WITHIN_S = 20.0


class Asked:
    """The agent's work once a second: it asks aggregators how they progress, and tells who has ended."""

    def __init__(self, owners: list[AggdThread]) -> None:
        self._owners, self._over = owners, threading.Event()
        self.away: dict[int, str] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.05):
            for owner in list(self._owners):
                for job in owner.order(GetStatus()).jobs if self.away else ():
                    if set(job.away) != set(self.away):
                        owner.order(RanksAway(job.job, job.epoch, self.away))
                owner.order(GetStatus())

    def end(self) -> None:
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def asked(job: Gang) -> Iterator[Asked]:
    made = Asked(job.owners)
    try:
        yield made
    finally:
        made.end()


def steps(job: Gang, counts: dict[int, int], last: Callable[[TensorClient], object]) -> dict[int, BaseException]:
    """Each rank makes so many steps, then calls `last`. Returns the errors. Rank 0 stays until all others ended."""
    raised: dict[int, BaseException] = {}

    def run(rank: int, client: TensorClient) -> None:
        client.newest_step = lambda: counts[rank] - 1
        try:
            for _ in range(counts[rank]):
                client.push_pull("g", np.full(40_000, rank + 1, np.float32))
            last(client)
        except RankLeft as error:
            raised[rank] = error
        except TensorError:
            assert rank == 0, "closed, below"

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(job.clients)]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join(WITHIN_S)
        assert not thread.is_alive(), "a rank waits for ever"
    if raised:
        job.clients[0].close()
    threads[0].join(WITHIN_S)
    assert not threads[0].is_alive()
    return raised


# ---- in `leave()`: it says so itself ----


@pytest.mark.parametrize("hosts", [(2,), (1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("shares", [True, False])
def test_who_waits_for_a_rank_that_is_done_is_told_by_name(
    tmp_path: Path, hosts: tuple[int, ...], shares: bool
) -> None:
    """Rank 0 makes 3 steps, all others want 5; in shared memory, through aggregators, and both."""
    with gang(tmp_path, *hosts) as job, asked(job):
        job.serve()
        if shares:
            job.share()
        else:
            for client in job.clients:
                client.memory_is(None)
        counts = {rank: 5 if rank else 3 for rank in range(sum(hosts))}
        raised = steps(job, counts, lambda client: client.leave())
        assert raised.keys() == set(counts) - {0}
        for error in raised.values():
            assert "tensor 'g': rank 0" in str(error) and "after its step 2" in str(error)
            assert "job.tensors.leave()" in str(error) and "next: have every rank make the same number" in str(error)


@pytest.mark.parametrize("hosts", [(3,), (2, 1), (1, 1, 1)])
def test_ranks_that_end_moments_apart_are_told_nothing(tmp_path: Path, hosts: tuple[int, ...]) -> None:
    """One rank is in `leave()` for a while, and another takes its last result late."""
    with gang(tmp_path, *hosts) as job, asked(job):
        job.serve()
        job.share()

        def last(client: TensorClient) -> None:
            handle = client.push("last", np.ones(40_000, np.float32))
            if client.rank == 1:
                time.sleep(VAIN_S + 0.5)
            assert handle.wait()[0] == 3
            assert client.leave()

        assert steps(job, dict.fromkeys(range(3), 3), last) == {}


# ---- ended with 0: the agents say so ----


def test_a_rank_that_ended_is_named_to_who_waits_in_shared_memory_at_once(tmp_path: Path) -> None:
    """The waiting rank is told by its agent; a rank that has pushed all is not waited for, and its last sum counts."""
    said: list[str] = []
    with gang(tmp_path, 2) as job:
        job.share()
        one, other = job.clients
        other._say_in_vain = said.append
        first = one.push("g", np.ones(40, np.float32))
        other.gone(ENDED)
        assert other.push_pull("g", np.ones(40, np.float32))[0] == 2
        assert first.wait()[0] == 2
        with pytest.raises(RankLeft, match="rank 0 on h1 ended with 0 after its step 19") as raised:
            other.push_pull("g", np.ones(40, np.float32))
        with pytest.raises(RankLeft, match="ended with 0"):
            other.barrier()
        assert not other.leave() and "agentctl why j1" in str(raised.value)
        assert len(said) == 2 and "tensor 'covey/barrier'" in said[1], "the agent is told, but not of the end"


def test_one_that_ended_is_not_blamed_for_who_is_late(tmp_path: Path) -> None:
    """The rank that ended has pushed, and so has this rank; the third one computes."""
    with gang(tmp_path, 3) as job:
        job.share()
        handles = [client.push("g", np.ones(40, np.float32)) for client in job.clients[:2]]
        job.clients[1].gone(ENDED)
        job.clients[1].raise_in_vain("g")
        assert job.clients[2].push_pull("g", np.ones(40, np.float32))[0] == 3
        assert all(handle.wait()[0] == 3 for handle in handles)


def test_a_rank_that_never_joined_is_named_to_who_waits_for_memory(tmp_path: Path) -> None:
    """A rank that ended on another host is no reason why memory of this host does not come."""
    with gang(tmp_path, 2) as job:
        other = job.clients[1]
        other._gone.host = "h2"
        other.gone(ENDED)
        with pytest.raises(TimeoutError):
            other._begin("g", GivenRound(checked("g", np.ones(3, np.float32))), True, 0.01)
        other._gone.host = "h1"
        with pytest.raises(RankLeft, match="rank 0 on h1 ended with 0"):
            other.push_pull("g", np.ones(3, np.float32))


def test_a_rank_that_ended_is_named_by_who_adds(tmp_path: Path) -> None:
    """The aggregator waits a while first, since the last push may still come; it also tells ranks that push later."""
    with gang(tmp_path, 1, 1, 1) as job, asked(job) as agent:
        job.serve()
        job.share()
        for client in job.clients:
            client.memory_is(None)
        handles = [client.push("g", np.ones(40_000, np.float32)) for client in job.clients]
        assert all(handle.wait()[0] == 3 for handle in handles)
        job.clients[0].close()
        agent.away = {0: who(0, "h1", 19, True)}
        began_s = time.monotonic()
        with pytest.raises(RankLeft, match="rank 0 on h1 ended with 0 after its step 19\nit pushes nothing more"):
            job.clients[1].push_pull("g", np.ones(40_000, np.float32))
        assert time.monotonic() - began_s >= VAIN_S
        with pytest.raises(RankLeft, match="rank 0 on h1"):
            job.clients[2].push_pull("g", np.ones(40_000, np.float32))
        assert not job.clients[2].leave(), "nobody waits a minute for who has ended"


# ---- what is in vain ----

G = Declared("g", "grad", (4,))


def said(missing: set[int], here: set[int], *speakers: tuple[int, tuple[int, int]], begun: bool = True) -> RoundSaid:
    spoken = {by: Spoken(G, ranks, 4) for by, ranks in speakers}
    return RoundSaid(missing, set(range(4)) - missing, here, spoken, begun)


ALONE = tuple((rank, (rank, rank + 1)) for rank in range(4))
TWO_HOSTS = ((0, (0, 2)), (3, (2, 4)))


@pytest.mark.parametrize(
    ("round", "ended", "leaving", "together", "rank"),
    [
        (said({0}, {0, 1, 2, 3}, *ALONE), {0}, (), (), 0),
        (said({2}, {0, 1, 2, 3}, *ALONE), {0}, (), (), None),
        (said({0}, {0, 1, 2, 3}, *ALONE), (), {0}, (), 0),
        (said({0}, {1, 2, 3}, *ALONE), (), {0}, (), None),
        (said({0}, {0, 1, 2, 3}, *ALONE, begun=False), (), {0}, (), None),
        (said({0}, {1, 2, 3}, *ALONE[1:], begun=False), {0}, (), (), 0),
        (said({0, 1}, {0, 3}, *TWO_HOSTS), {1}, (), (), None),
        (said({0, 1}, {0, 3}, *TWO_HOSTS), {0}, (), (), 0),
        (said({0, 1}, {0, 3}, *TWO_HOSTS), (), {0}, (), 0),
        (said({0, 1}, {3}, TWO_HOSTS[1]), {0}, (), {0}, None),
    ],
)
def test_a_round_waits_in_vain_for_who_pushes_for_himself_and_has_left(
    round: RoundSaid, ended: set[int], leaving: set[int], together: set[int], rank: int | None
) -> None:
    """A rank in `leave()` counts while it is connected and has opened the tensor: a successor may push again."""
    assert is_in_vain(round, ended, leaving, together) == rank


def test_who_waits_is_told_after_a_while_and_never_that_all_leave() -> None:
    away = RanksAwayHere()
    rounds = {7: said({0}, {0, 1, 2, 3}, *ALONE), 9: said({0}, {0, 1, 2, 3}, *ALONE)}
    assert away.look(rounds, 9, 0.0) == []
    away.leaving[0] = "rank 0"
    assert away.look(rounds, 9, 1.0) == [] == away.look(rounds, 9, 0.9 + VAIN_S)
    assert away.look(rounds, 9, 1.0 + VAIN_S) == [(7, rank, "rank 0") for rank in (1, 2, 3)]
    assert away.look({}, 9, 20.0) == [] == away.look(rounds, 9, 21.0), "a later round waits anew"
    away.ended[0] = "rank 0, ended"
    assert away.look(rounds, 9, 21.0 + VAIN_S) == [], "what it sent may be on its way while it is connected"
    assert len(away.look(rounds, 9, 21.0 + SENDING_S)) == 3
    assert len(away.look(rounds, 9, 21.0 + VAIN_S + SENDING_S)) == 6, "and in leave() all that are there end"
    away.ended[1] = "rank 1, ended"
    other = {7: said({1}, {0, 1, 2, 3}, *ALONE)}
    assert away.look(other, 9, 30.0) == [], "what that one pushed may be on its way"
    assert len(away.look(other, 9, 30.0 + SENDING_S)) == 3
    closed = {7: said({1}, {0, 2, 3}, *ALONE)}
    assert away.look({}, 9, 40.0) == [] == away.look(closed, 9, 41.0)
    assert len(away.look(closed, 9, 41.0 + VAIN_S)) == 3


def test_words_name_the_rank_its_host_and_its_last_step() -> None:
    assert who(3, "gpu1", 19, True) == "rank 3 on gpu1 ended with 0 after its step 19"
    assert who(3, "", None, True) == "rank 3 ended with 0 and never told of a step"
    assert "rank 3 on gpu1 is done, in job.tensors.leave(), after its step 0\nit pushes nothing more" in in_vain(
        who(3, "gpu1", 0, False), JobId("j1")
    )


# ---- state ----


class Nobody:
    """A receiver that ignores all messages."""

    def tell(self, said: object) -> None: ...


def test_a_successor_does_not_ask_who_has_left_for_ten_minutes() -> None:
    healing = Healing(HealedRank(1, 2, 1, [1], "h2"), Nobody(), lambda: b"")
    raised: list[BaseException] = []

    def recover() -> None:
        try:
            healing.recover(lambda text: None, True)
        except OthersDone as error:
            raised.append(error)

    thread = threading.Thread(target=recover, daemon=True)
    thread.start()
    healing.gone({0: in_vain(who(0, "h1", 19, True), JOB)})
    thread.join(WITHIN_S)
    assert not thread.is_alive() and "rank 0 on h1 ended with 0 after its step 19" in str(raised[0])


def test_what_is_a_ranks_own_is_not_told_for_ever_to_who_has_left() -> None:
    healing = Healing(HealedRank(1, 2), Nobody(), lambda: b"")
    healing.begin({})
    raised: list[BaseException] = []

    def push() -> None:
        try:
            healing.before_push(lambda: "mine")
        except RankLeft as error:
            raised.append(error)

    thread = threading.Thread(target=push, daemon=True)
    thread.start()
    until(lambda: bool(healing.machine._own))
    healing.gone({0: "rank 0 on h1 ended with 0"})
    thread.join(WITHIN_S)
    assert not thread.is_alive() and "what is this rank's own cannot be kept: rank 0 on h1" in str(raised[0])


def test_a_gang_with_state_is_told_like_any_other(tmp_path: Path) -> None:
    """The aggregator tells it; rank 0 makes 2 steps of `job.state`, rank 1 wants 4."""
    with gang(tmp_path, 1, 1) as job, asked(job):
        job.serve()
        for client in job.clients:
            client.memory_is(None)
        raised: list[BaseException] = []

        def run(rank: int, client: TensorClient) -> None:
            w = np.zeros(9, np.float32)
            script = ScriptState(lambda: {"w": w}, lambda arrays, own: None, None)
            state = begun(client, HealedRank(rank, client.world_size), script)
            try:
                for _ in state.steps(4 if rank else 2):
                    w += client.push_pull("g", np.ones(9, np.float32))
                client.leave(linger_s=4.0)
            except RankLeft as error:
                raised.append(error)

        threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(job.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
            assert not thread.is_alive()
        assert len(raised) == 1 and "rank 0 is done" in str(raised[0])


@pytest.mark.parametrize(("extra", "code"), [(True, 0), (False, EXIT_STATE_LOST)])
def test_a_process_that_began_too_late_in_an_elastic_job_has_nothing_left_to_do(extra: bool, code: int) -> None:
    """Others had carried its ranks to the end. Rank 0's process, or one of a fixed job, has more to do then."""
    said: list[str] = []

    class Late:
        def recover(self, *_: Any, **more: Any) -> Any:
            raise OthersDone("it cannot take over", "rank 1 ended with 0", "none")

    class Tensors:
        def heal(self, *_: Any) -> tuple[Late, None]:
            return Late(), None

        def tell(self, text: str) -> None:
            said.append(text)

    class Ranks:
        def join(self) -> None: ...

    script = ScriptState(dict, lambda arrays, own: None, None)
    with pytest.raises(SystemExit) as ends:
        begun(Tensors(), HealedRank(3, 4, 1 << 16), script, carry=lambda _: Ranks(), extra=extra)  # type: ignore[arg-type, return-value]
    assert ends.value.code == code and said[-1].startswith("ends: ")
