"""Ranks that are carried by few processes or many, and change hands at any time: the same bits.

Threads are processes here, and aggregators are real.
"""

import io
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from agent.jobs.rank_env import INCARNATIONS_BITS
from covey.core.errors import CoveyError
from covey.core.ids import HostId, JobId
from covey.healing.healing import Healing
from covey.healing.neighbours import HealedRank
from covey.healing.taking_over import HealingClosed
from covey.job.carrying import RANKS_MAX, CarriedMember, CarriedRanks, CarriedScript, _OthersNow, ranks_in
from covey.job.carrying_machine import INCARNATION_BITS
from covey.job.job_state import ScriptState, begun
from covey.job.tensors import TensorClient, TensorError
from covey.tensors.aggregator.rounds import Superseded
from covey.tensors.numbers.blocks import table_id
from covey.wire.job import AggregatorAt, Carries
from covey.wire.sums import DropJob, Serve
from plugins.scheduler.messages import options
from plugins.scheduler.policy.carrying import carried_after, carriers_of, first_carried
from tests.families import in_gate
from tests.plugins.aggregator.loopback import SECRET, AggdThread

JOB = JobId("j1")
GRANT = 1 << 32
WITHIN_S = 40.0
SIZES = {"a": 70_000, "b": 7}


class Killed(Exception):
    """This process was killed, at this point."""


class Process:
    """One process of an elastic job."""

    def __init__(self, gang: "ElasticGang", first: int, incarnation: int) -> None:
        self.gang, self.first, self.incarnation = gang, first, incarnation
        self.clients: list[TensorClient] = []
        self.client = self._client(first, incarnation)
        self.carried: CarriedRanks | None = None
        self.is_killed = False
        self.reached = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _client(self, rank: int, incarnation: int) -> TensorClient:
        beside = self.clients[0] if self.clients else None
        made = TensorClient(
            JOB, rank, self.gang.ranks, lambda epoch, why, table: None, tables=len(self.gang.owners),
            part_bytes=1 << 16, say=self.gang.words, incarnation=incarnation, beside=beside,
        )  # fmt: skip
        self.clients.append(made)
        for at in self.gang.at:
            made.moved(at)
        return made

    def kill(self) -> None:
        self.is_killed = True
        for client in list(self.clients):
            client.close()

    def told(self, carries: Carries) -> None:
        if self.carried is not None:
            self.carried.told(carries)

    def _run(self) -> None:
        try:
            self.gang.found[self.first] = self._train()
            assert self.carried is not None
            assert self.carried.leave()
        except (Killed, TensorError, HealingClosed, Superseded) as error:
            self.error = error
            if not self.is_killed:
                self.gang.failed.append((self.first, error))
        except BaseException as error:
            self.error = error
            if not self.is_killed:
                self.gang.failed.append((self.first, error))

    def _train(self) -> bytes:
        w = {name: np.zeros(size, np.float32) for name, size in SIZES.items()}
        draws = np.random.default_rng()

        def load(arrays: dict[str, Any], own: Any) -> None:
            assert own is None
            for name in SIZES:
                w[name][:] = arrays[name]

        def enter(rank: int, own: Any) -> None:
            draws.bit_generator.state = np.random.default_rng(rank).bit_generator.state if own is None else own

        def carry(healing: Healing) -> CarriedRanks:
            script = CarriedScript(lambda: draws.bit_generator.state, enter)
            self.carried = CarriedRanks(CarriedMember(self.client, healing), script, self._client, me)
            self.carried.told(self.gang.carries())
            return self.carried

        me = HealedRank(self.first, self.gang.ranks, self.incarnation)
        script = ScriptState(lambda: dict(w), load, lambda: draws.bit_generator.state)
        state = begun(self.client, me, script, gathers_max=RANKS_MAX, carry=carry)
        assert self.carried is not None
        for step in state.steps(self.gang.steps):
            self.reached.set()
            self._passes(step, "at its beginning")
            for rank in self.carried.carried():
                self._passes(step, f"before rank {rank}")
                with rank:
                    drawn = draws.standard_normal(SIZES["a"], np.float32)
                    self.gang.drawn.append((step, int(rank)))
                    sums = {name: rank.push(name, drawn[: len(w[name])] * (1 + w[name]), mean=True) for name in w}
                self._passes(step, f"after rank {rank}")
            found = {name: handle.wait() for name, handle in sums.items()}
            self._passes(step, "with its results")
            for name, each in found.items():
                w[name] -= np.float32(0.01) * each
            if self.gang.computes_s:
                time.sleep(self.gang.computes_s)
        return b"".join(w[name].tobytes() for name in sorted(w))

    def _passes(self, step: int, where: str) -> None:
        if self.is_killed or self.gang.kills(self.first, step, where):
            self.kill()
            raise Killed(f"process {self.first} in step {step} {where}")


class ElasticGang:
    """An elastic job as its agents run it: who carries what is decided by what agents decide it with."""

    makes: type[Process] = Process

    def __init__(self, folder: Path, ranks: int, processes: int, steps: int = 12, tables: int = 2) -> None:
        self.folder, self.ranks, self.steps, self.computes_s = folder, ranks, steps, 0.0
        self.kills: Callable[[int, int, str], bool] = lambda first, step, where: False
        self.epoch, self.config, self.is_closed = GRANT, 0, False
        self.owners = [self._aggd() for _ in range(tables)]
        self.at: list[AggregatorAt] = []
        self.before: list[AggdThread] = []
        """Owners that have handed a table over."""
        for table in range(tables):
            self.serve(table)
        self.found: dict[int, bytes] = {}
        self.drawn: list[tuple[int, int]] = []
        self.failed: list[tuple[int, BaseException]] = []
        self.carried: Mapping[int, tuple[int, ...]] = first_carried(ranks, processes)
        self.came: dict[int, int] = {}
        self.ended: list[Process] = []
        self.said: list[str] = []
        self.words = io.StringIO()
        self.now = {first: self.makes(self, first, 0) for first in self.carried}

    def _aggd(self) -> AggdThread:
        self.epoch += 1
        folder = self.folder / str(self.epoch - GRANT)
        folder.mkdir(parents=True)
        return AggdThread(folder)

    def serve(self, table: int) -> None:
        self.epoch += 1
        job = JOB if table == 0 else JobId(f"{JOB}/{table}")
        self.owners[table].order(Serve(job, self.epoch, self.ranks, SECRET))
        at = AggregatorAt(JOB, self.epoch, HostId("h1"), self.owners[table].aggd.address, SECRET, table)
        self.at = [*self.at[:table], at, *self.at[table + 1 :]]

    def lose_owner(self, table: int) -> None:
        self.owners[table].kill()
        self._owned_anew(table)

    def hand_over(self, table: int, ends: bool = True) -> None:
        """Another owner takes a table over, once the present one has ended its connections; `ends`: it is asked to."""
        before, at = self.owners[table], self.at[table]
        self.before.append(before)
        self._owned_anew(table, handed_over=True)
        if ends:
            before.order(DropJob(table_id(JOB, table), at.epoch, self.epoch, within_s=30.0))

    def _owned_anew(self, table: int, handed_over: bool = False) -> None:
        self.owners[table] = self._aggd()
        self.serve(table)
        self.at[table] = msgspec.structs.replace(self.at[table], handed_over=handed_over)
        for process in self.now.values():
            for client in list(process.clients):
                client.moved(self.at[table])

    def carries(self) -> Carries:
        return Carries(self.config, dict(self.carried), dict(self.came))

    def arrange(self, ends: list[int], begins: int, kill: bool = True) -> list[int]:
        """Another configuration: kill these processes, begin so many; returns the new ones."""
        for first in ends:
            if kill:
                self.now[first].kill()
            self.ended.append(self.now.pop(first))
        before = set(self.carried) - set(ends)
        old, self.carried = self.carried, carried_after(self.carried, ends, begins)
        self.config += 1
        moved = carriers_of(self.carried).items() - carriers_of(old).items()
        self.came |= {rank: self.config for rank, _ in moved}
        new = [first for first in self.carried if first not in before]
        self.said.append(f"after step {self.drawn[-1:]} {ends} end, {new} begin: {self.carried}")
        for first in new:
            self.now[first] = self.makes(self, first, self.config << 16)
        for process in list(self.now.values()):
            process.told(self.carries())
        return new

    def restart(self, first: int) -> None:
        """A process is lost, and its supervisor starts it again."""
        self.said.append(f"{first} restarted after step {self.drawn[-1:]}")
        self.now[first].kill()
        self.ended.append(self.now[first])
        self.now[first] = self.makes(self, first, self.now[first].incarnation + 1)

    def end(self) -> bytes:
        end_s = time.monotonic() + WITHIN_S
        for process in self.now.values():
            process.thread.join(max(0.0, end_s - time.monotonic()))
        assert not self.failed and not any(each.thread.is_alive() for each in self.now.values()), self.told()
        self.close()
        found = {self.found[first] for first in self.now}
        assert len(found) == 1
        return found.pop()

    def told(self) -> str:
        """What became of it, for people."""
        alive = {first: self.why(each) for first, each in self.now.items() if each.thread.is_alive()}
        return "\n".join(
            map(str, [self.failed, *alive.items(), self.carried, *self.said, self.words.getvalue()[-2000:]])
        )

    def why(self, process: Process) -> Any:
        carried = process.carried
        if carried is None:
            return "it has not registered its state"
        each = {rank: (each.client.open_rounds, each.healing.awaited) for rank, each in carried.members.items()}
        return carried.step, each, [(rank, each.client.why("a")) for rank, each in carried.members.items()]

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for process in [*self.now.values(), *self.ended]:
            process.kill()
        for owner in [*self.owners, *self.before]:
            owner.kill()
            assert not owner.failures and not owner.log.errors, (owner.failures, owner.log.errors)


_fixed: dict[tuple[int, int], bytes] = {}


def fixed(folder: Path, ranks: int, steps: int = 12) -> bytes:
    """The bits of a job with one process for each rank."""
    if (ranks, steps) not in _fixed:
        _fixed[ranks, steps] = ElasticGang(folder / "fixed", ranks, ranks, steps).end()
    return _fixed[ranks, steps]


@pytest.fixture
def gangs(tmp_path: Path) -> Iterator[Callable[..., ElasticGang]]:
    made: list[ElasticGang] = []

    def make(ranks: int, processes: int, **more: Any) -> ElasticGang:
        made.append(ElasticGang(tmp_path / str(len(made)), ranks, processes, **more))
        return made[-1]

    yield make
    for gang in made:
        with suppress(AssertionError):
            gang.close()


def test_what_agents_and_processes_must_agree_on_is_the_same_on_both_sides() -> None:
    assert (RANKS_MAX, INCARNATION_BITS) == (options.RANKS_MAX, INCARNATIONS_BITS)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_few_processes_have_the_bits_of_many(gangs: Callable[..., ElasticGang], tmp_path: Path, processes: int) -> None:
    assert gangs(4, processes).end() == fixed(tmp_path, 4)


def reached(gang: ElasticGang, step: int) -> None:
    """Wait until some process has drawn for this step."""
    end_s = time.monotonic() + WITHIN_S
    while max((each for each, _ in list(gang.drawn)), default=-1) < step:
        assert time.monotonic() < end_s and not gang.failed, gang.told()
        time.sleep(0.002)


def test_a_killed_process_is_carried_by_the_others_at_once(gangs: Callable[..., ElasticGang], tmp_path: Path) -> None:
    gang = gangs(4, 2)
    gang.computes_s = 0.005
    reached(gang, 3)
    gang.arrange([1], 0)
    assert gang.end() == fixed(tmp_path, 4)


class NeverBegins(Process):
    """A process that is ended before it has said anything to anybody."""

    def __init__(self, gang: "ElasticGang", first: int, incarnation: int) -> None:
        self.clients, self.carried, self.is_killed = [], None, False


def test_ranks_that_came_back_and_were_never_taken_are_given_by_who_has_them(
    gangs: Callable[..., ElasticGang], tmp_path: Path
) -> None:
    """Nobody adopted them anew: their first process carries them under its own incarnation, which is an older one."""
    gang = gangs(4, 1)
    gang.computes_s = 0.005
    reached(gang, 3)
    gang.makes = NeverBegins
    gang.arrange([], 3)
    gang.arrange(sorted(gang.now.keys() - {0}), 0)
    gang.makes = Process
    gang.arrange([], 1)
    assert gang.end() == fixed(tmp_path, 4)


def test_a_new_process_takes_ranks_over_while_nobody_waits_for_it(
    gangs: Callable[..., ElasticGang], tmp_path: Path
) -> None:
    gang = gangs(4, 1, steps=40)
    gang.computes_s = 0.005
    reached(gang, 3)
    assert gang.arrange([], 1) == [2]
    assert gang.end() == fixed(tmp_path, 4, 40)
    assert gang.now[0].carried is not None and sorted(gang.now[0].carried.members) == [0, 1]


@pytest.mark.parametrize("seed", in_gate(2, range(4)))
def test_any_changes_at_any_time_leave_the_same_bits(
    gangs: Callable[..., ElasticGang], tmp_path: Path, seed: int
) -> None:
    draw, steps = random.Random(seed), 60
    gang = gangs(6, draw.randint(1, 6), steps=steps)
    gang.computes_s = 0.004
    for at in range(2, steps - 6, 6):
        reached(gang, at + draw.randint(0, 4))
        time.sleep(draw.random() * 0.01)
        match draw.choice(["shrink", "grow", "both", "restart", "owner", "handover"]):
            case "shrink" if len(gang.now) > 1:
                gang.arrange(draw.sample(sorted(gang.now), draw.randint(1, len(gang.now) - 1)), 0)
            case "grow" if len(gang.now) < 6:
                gang.arrange([], draw.randint(1, 6 - len(gang.now)))
            case "both" if len(gang.now) > 1:
                ends = draw.sample(sorted(gang.now), 1)
                gang.arrange(ends, draw.randint(0, min(2, 6 - len(gang.now))))
            case "restart" if len(gang.now) > 1:
                gang.restart(draw.choice(sorted(gang.now)))
            case "owner":
                gang.lose_owner(draw.randint(0, 1))
            case "handover":
                gang.hand_over(draw.randint(0, 1))
            case _:
                pass
    assert gang.end() == fixed(tmp_path, 6, steps)


def test_a_rank_that_is_adopted_begins_where_its_siblings_are_while_a_table_moves(
    gangs: Callable[..., ElasticGang], tmp_path: Path
) -> None:
    """At the next owner it would wait for them, and they for it."""
    gang = gangs(4, 2)
    gang.computes_s = 0.005
    reached(gang, 3)
    for table in range(2):
        gang.hand_over(table, ends=False)
    gang.arrange([1], 0)
    assert gang.end() == fixed(tmp_path, 4)


def until(true: Callable[[], object], otherwise: Callable[[], str] = lambda: "") -> None:
    end_s = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < end_s, otherwise()
        time.sleep(0.002)


def members_of(gang: ElasticGang, first: int) -> dict[int, CarriedMember]:
    carried = gang.now[first].carried
    return {} if carried is None else carried.members


def test_nobody_waits_for_a_process_that_was_ended_a_step_behind_the_others(
    gangs: Callable[..., ElasticGang], tmp_path: Path
) -> None:
    gang = gangs(4, 2)
    gang.kills = lambda first, step, where: first not in (0, 1) and where == "with its results"
    reached(gang, 2)
    (new,) = gang.arrange([], 1)
    until(lambda: not gang.now[new].thread.is_alive())
    until(
        lambda: any(each.healing.machine.is_ahead for first in (0, 1) for each in members_of(gang, first).values()),
        gang.told,
    )
    gang.arrange([new], 0, kill=False)
    assert gang.end() == fixed(tmp_path, 4)


def test_a_rank_that_comes_back_before_it_had_left_is_carried_again(
    gangs: Callable[..., ElasticGang], tmp_path: Path
) -> None:
    gang, go_on = gangs(4, 1), threading.Event()

    def waits(first: int, step: int, where: str) -> bool:
        return first == 0 and (step, where) == (3, "before rank 0") and not go_on.wait(WITHIN_S)

    gang.kills = waits
    until(lambda: 0 in members_of(gang, 0) and members_of(gang, 0)[0].healing.step == 3)
    (new,) = gang.arrange([], 1)
    until(lambda: all(members_of(gang, 0)[rank].client.is_superseded for rank in gang.carried[new]))
    gang.arrange([new], 0)
    go_on.set()
    assert gang.end() == fixed(tmp_path, 4)


def test_a_rank_that_comes_while_a_process_takes_its_state_over_answers(
    gangs: Callable[..., ElasticGang], tmp_path: Path
) -> None:
    """It asked that rank, too, and waited for ever for its own answer."""
    gang, go_on = gangs(4, 2), threading.Event()

    def waits(first: int, step: int, where: str) -> bool:
        return first == 0 and (step, where) == (3, "before rank 0") and not go_on.wait(WITHIN_S)

    gang.kills = waits
    reached(gang, 3)
    (new,) = gang.arrange([], 1)
    until(lambda: (carried := gang.now[new].carried) is not None and carried._joins)
    gang.arrange([1], 0)
    assert 1 in gang.carried[new]
    go_on.set()
    assert gang.end() == fixed(tmp_path, 4)


class Waiting:
    """A rank that waits, and says when it is free."""

    now: ClassVar[set[str]] = set()

    def __init__(self, name: str, *free: bool) -> None:
        self.name, self.free = name, [*free]

    def waits(self) -> None:
        self.now.add(self.name)

    def gave_up(self) -> None:
        self.now.remove(self.name)

    def is_free(self, within_s: float) -> bool:
        if self.free.pop(0):
            self.now.remove(self.name)
            return True
        return False

    def carried_here(self, incarnation: int) -> None:
        pass

    def carried_elsewhere(self, ranks: dict[int, int]) -> None:
        pass


def member(name: str, *free: bool) -> Any:
    client = TensorClient(JOB, 0, 2, lambda epoch, why, table: None)
    return CarriedMember(client, Waiting(name, *free))  # type: ignore[arg-type]


def test_a_process_that_waits_for_a_successor_adopts_the_rank_it_asks() -> None:
    """Nobody else answers for a rank that is to be carried here by now."""
    one = member("one", False, False, False)
    of = CarriedRanks(one, CarriedScript(None, lambda rank, own: None), lambda *_: one.client, HealedRank(0, 2))
    of.told(Carries(1, {0: (0,), 1: (1,)}))
    assert of._machine.to_adopt(of.members) == []
    with pytest.raises(_OthersNow), of._waiting():
        of.told(Carries(2, {0: (0, 1)}))
    assert not Waiting.now
    assert of._machine.to_adopt(of.members) == [1]


def test_the_ranks_of_a_process_wait_until_no_successor_needs_any_of_them() -> None:
    one, other, waiting = member("one", True, True), member("other", False, True), Waiting.now
    of = CarriedRanks(one, CarriedScript(None, lambda rank, own: None), lambda *_: one.client, HealedRank(0, 2))
    of.members[1] = other
    with of._waiting():
        assert waiting == {"one", "other"}
    assert not waiting and not one.healing.free and not other.healing.free
    with suppress(KeyError), of._waiting():
        raise KeyError
    assert not waiting, "nobody waits once the script has given up"


def refused(call: Callable[[], object], *words: str) -> None:
    """An error in three lines: what, why, next."""
    with pytest.raises(CoveyError) as error:
        call()
    lines = str(error.value).splitlines()
    assert len(lines) == 3 and lines[2].startswith("next: "), lines
    assert all(word in str(error.value) for word in words), lines


def test_a_script_that_does_not_keep_to_the_loop_is_told_so(gangs: Callable[..., ElasticGang], tmp_path: Path) -> None:
    gang = gangs(2, 1)
    gang.end()
    carried = gang.now[0].carried
    assert carried is not None
    refused(lambda: ranks_in(carried, 3), "the ranks of step 3 were not given", f"in step {carried.step}")
    ranks = carried.carried()
    rank = next(ranks)
    push = lambda: rank.push("a", np.zeros(1, np.float32))  # noqa: E731
    refused(push, "tensor 'a' was not pushed", "rank 0 pushes inside `with rank:` only, and no rank was entered")
    refused(lambda: carried.finish("a", None), "tensor 'a' has no result yet", "after the loop over job.carried")
    refused(lambda: next(carried.carried()), "another one is not over")
    refused(lambda: carried.enter(2), "rank 2 was not entered", "does not carry it")
    rank.__enter__()
    refused(rank.__enter__, "rank 0 was not entered", "`with rank:` of rank 0 is not over")
    refused(lambda: carried.push(1, "a", np.zeros(1), out=None, mean=False, type=None), "computes as rank 0")
    refused(lambda: next(ranks), "rank 0 was entered and not left")
    refused(rank.__enter__, "rank 0 was not entered", "no loop over job.carried(step) is under way")
