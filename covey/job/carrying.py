"""The ranks that one process of an elastic job carries (`agentctl submit --workers 4..16`).

An elastic job has as many ranks as it may have processes, for ever. A process is named by its first rank and carries
others besides, one `TensorClient` each: to sums, owners and other ranks they are ranks like any other, so that no bit
depends on the number of processes.

    rng = None

    def enter(rank, own):                       # rank 5 comes next: what is its own
        global rng
        rng = np.random.default_rng(rank)
        if own is not None:                     # None: it has none yet
            rng.bit_generator.state = own

    state = job.state(lambda: {"w": w}, load, own=lambda: rng.bit_generator.state, enter=enter)
    for step in state.steps(1000):
        for rank in job.carried(step):
            with rank:
                sums = rank.push("g", gradient(w, rng))
        w -= 0.1 * sums.wait()

The agent says which ranks this process carries, and says so anew when that changes (`covey.wire.job.Carries`).

    one more   it is *adopted*: begun in the step where this process is, with its own state, which all ranks have
               gathered (`covey.healing.own_gather`). The loop over `job.carried` ends only once all sums of the step
               are here, and gives the script a rank that comes meanwhile: what another process pushed for it in this
               step is pushed again, and is the same.
    one less   it goes when the process that carries it from now on connects, as the newer of two; until then it is
               carried here. So nobody waits for a process that is starting.

A process that is to end is simply killed: its ranks are adopted by others.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple

from covey.core.errors import CoveyError
from covey.core.patience import Patience
from covey.healing.healing import Healing
from covey.healing.likeness import Likeness
from covey.healing.neighbours import HealedRank
from covey.healing.own_gather import OwnGather
from covey.healing.taking_over import FIRST_ASK_S
from covey.job.blocks.exchange import Exchange
from covey.job.carrying_machine import CarryingMachine, still_needed
from covey.job.tensors import LEAVE_S, TensorClient
from covey.tensors.aggregator.block_rounds import BlockRounds
from covey.tensors.aggregator.rounds import Superseded
from covey.tensors.numbers.arrays import Array, check_out, checked
from covey.tensors.numbers.handle import TensorHandle
from covey.tensors.numbers.tensor_wire import Type
from covey.tensors.owner.leaving import LEAVE
from covey.wire.job import Carries

RANKS_MAX = 64
"""Most ranks of an elastic job: in each step all gather the own state of each."""
LOOK_S = 0.25
"""Most seconds until a wait looks whether the process carries other ranks now."""
PATIENCE_S = 30.0
"""Seconds after which people are told that the agent has not said which ranks are carried."""
LOOP = "for rank in job.carried(step): with rank: rank.push(..)"
"""How a script computes for the ranks that its process carries, for people."""
Enter = Callable[[int, Any], object]
"""Called with a rank and what is its own: what the script computes from now on, it computes as that rank."""


def check_ranks(world_size: int) -> None:
    """CoveyError when a job with so many ranks cannot have them carried by other processes."""
    if world_size > RANKS_MAX:
        why = f"this job has {world_size} ranks, and {RANKS_MAX} can be at most"
        next = f"submit it with at most {RANKS_MAX} workers, or leave out enter= and carried()"
        raise CoveyError("ranks cannot be carried by other processes", why, next)


class CarriedScript(NamedTuple):
    """The part of a script's state that belongs to one rank."""

    own: Callable[[], object] | None
    """Returns what only the rank has that was entered last; None: no rank has anything of its own."""
    enter: Enter


class CarriedMember(NamedTuple):
    """A rank that this process carries."""

    client: TensorClient
    healing: Healing
    config: int = 0
    """The configuration in which it came here."""


class _OthersNow(Exception):
    """The agent has said that this process carries other ranks."""


class _Waits:
    """A wait for a tensor that ends when this process is to carry other ranks."""

    def __init__(self, patience: Patience, others_now: Callable[[], bool]) -> None:
        self._patience, self._others_now = patience, others_now

    @property
    def left_s(self) -> float:
        return min(self._patience.left_s, LOOK_S)

    def look(self) -> None:
        if self._others_now():
            raise _OthersNow
        self._patience.look()


class CarriedRank(int):
    """A rank that this process carries in a step, as a number. `with rank:` what the script computes and draws is that
    rank's; `rank.push` pushes for it."""

    _of: "CarriedRanks"

    def __new__(cls, rank: int, of: "CarriedRanks") -> "CarriedRank":
        made = super().__new__(cls, rank)
        made._of = of
        return made

    def __enter__(self) -> "CarriedRank":
        self._of.enter(int(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._of.exit(int(self), kind is None)

    def push(
        self, name: str, array: Array, *, out: Array | None = None, mean: bool = False, type: Type | None = None
    ) -> TensorHandle:
        """Begin this rank's part of the tensor's next round, as `job.tensors.push` does; `array` must not change before
        the result is here. Every handle of a round gives the same result, once the loop over `job.carried` is over.
        CoveyError outside `with rank:`; other errors as of `job.tensors.push`."""
        return self._of.push(int(self), name, array, out=out, mean=mean, type=type)


class CarriedRanks:
    """The ranks that this process carries: those of the newest `Carries`, and those that were not taken over yet."""

    def __init__(
        self,
        first: CarriedMember,
        script: CarriedScript,
        make: Callable[[int, int], TensorClient],
        me: HealedRank,
        like: Likeness | None = None,
    ) -> None:
        """`first`: the rank by which this process is named; `make` makes the client of another rank and incarnation."""
        self.members = {me.rank: first}
        self._new: dict[int, CarriedMember] = {}
        """Ranks as which this process has joined, and which have nothing yet."""
        self._joins = False
        """Whether the first rank takes its state over. It asks all ranks, and some of them may come to this process
        meanwhile: nobody else answers for those."""
        self._joining = threading.Lock()
        """Guards the two above, before `begin` is over."""
        self._first, self._script, self._make, self._me, self._like = me.rank, script, make, me, like
        self._machine = CarryingMachine(me.rank, me.incarnation, script.own)
        self._changed = threading.Condition()
        """Guards what the agent said last; notified when that changes."""
        self._looping = False
        """Whether the script is in the loop over `job.carried`."""
        self._state: Mapping[str, Array] = {}
        self.own_saved: bytes | None = None
        """The own state of the first rank in a checkpoint, where no other rank has it; None: there is none."""
        self.blocks: Exchange | None = None
        """The data Blocks of the ranks; None: the script has none."""
        self.leaving: list[Callable[[int], object]] = []
        """Called with each rank whose passes are over, while it may still push."""

    def exchanges(self, blocks: Exchange, carries: Carries | None) -> None:
        """Let data Blocks go with ranks from now on. `carries`: what the agent said last."""
        self.blocks = blocks
        if carries is not None:
            blocks.carries(carries)

    # ---- from the agent ----

    def told(self, carries: Carries) -> None:
        """The agent says what this process carries; an older configuration than the newest is ignored."""
        with self._changed:
            moved = self._machine.told(carries)
            self._changed.notify_all()
        if moved is None:
            return
        if self.blocks is not None:
            self.blocks.carries(carries)
        for rank, member in list(self.members.items()):
            member.healing.carried_elsewhere(moved)
            if rank in self._machine.ours:
                member.healing.carried_here(self._machine.came(rank))
        with self._joining:
            if self._joins:
                self._join_newest()
        for member in list(self.members.values()):
            member.client.wake()

    # ---- the job's state ----

    def join(self) -> None:
        """Join as all ranks that are to be carried, before the first one takes its state over: to others they are
        ranks that have nothing yet."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._machine.newest is not None, PATIENCE_S):
                self._lead.client.tell("waits for its agent to say which ranks this process carries")
        with self._joining:
            self._joins = True
            self._join_newest()

    def begin(self, state: Mapping[str, Array]) -> None:
        """Carry all ranks that are to be carried, from the step in which the first rank is."""
        self._state = state
        if self._me.world_size > 1:
            self._machine.own_is(self._first, self._gather.owns.each[self._first])
        elif self.own_saved is not None:
            self._machine.own_is(self._first, self.own_saved)
        with self._joining:
            self._joins = False
        self._carry_newest()

    def end(self, state: Mapping[str, Array]) -> None:
        """End the step of all ranks, and begin the next one with this state."""
        self._state = state
        for member in self.members.values():
            member.healing.end(state)
        if self.blocks is not None:
            self.blocks.stepped(self.members)

    # ---- from the script ----

    @property
    def is_looping(self) -> bool:
        """Whether the script is in the loop over `job.carried`."""
        return self._looping

    @property
    def entered(self) -> int | None:
        """The rank that the script computes as (`with rank:`); None: no rank."""
        return self._machine.entered

    @property
    def world_size(self) -> int:
        """The number of ranks of the job."""
        return self._me.world_size

    @property
    def step(self) -> int:
        """The step that the script is in."""
        return self._lead.healing.step

    def carried(self) -> Iterator[CarriedRank]:
        """The ranks that this process carries in this step; ends when all that was pushed has come back. CoveyError
        inside such a loop, and when a rank was entered and not left."""
        if self._looping:
            what, why = "the loop over job.carried(step) was not begun", "another one is not over"
            raise CoveyError(what, why, f"loop once in a step: {LOOP}")
        self._looping, pushed = True, set[CarriedMember]()
        try:
            self._let_others_catch_up()
            while True:
                while left := [rank for rank, member in self.members.items() if member not in pushed]:
                    pushed.add(self.members[left[0]])
                    yield CarriedRank(left[0], self)
                    if (entered := self._machine.entered) is not None:
                        what, why = "the loop over job.carried(step) ends", f"rank {entered} was entered and not left"
                        raise CoveyError(what, why, f"let `with rank:` enter and leave each rank: {LOOP}")
                with suppress(_OthersNow):
                    self._settle()
                    return
                self._carry_newest()
        finally:
            self._looping = False

    def enter(self, rank: int) -> None:
        """The script computes as this rank from now on. CoveyError when it is in another one, and when this process
        does not carry the rank in a loop that is under way."""
        if not self._looping or rank not in self.members:
            why = "this process does not carry it" if self._looping else "no loop over job.carried(step) is under way"
            raise CoveyError(f"rank {rank} was not entered", why, f"take the ranks of each step anew: {LOOP}")
        self._script.enter(rank, self._machine.enter(rank))

    def exit(self, rank: int, well: bool) -> None:
        """The script is done with this rank in this step; `well`: without an exception."""
        try:
            for each in self.leaving if well else ():
                each(rank)
        finally:
            self._machine.exit(rank, well)

    def push(
        self, rank: int, name: str, array: Array, *, out: Array | None, mean: bool, type: Type | None
    ) -> TensorHandle:
        """Push for a rank that was entered. CoveyError for any other rank."""
        if (entered := self._machine.entered) != rank:
            now = "no rank was entered" if entered is None else f"this process computes as rank {entered}"
            what, why = f"tensor {name!r} was not pushed", f"rank {rank} pushes inside `with rank:` only, and {now}"
            raise CoveyError(what, why, LOOP)
        given = checked(name, array, type)
        if out is not None:
            check_out(name, out, given)
        try:
            self.members[rank].client.push(name, array, mean=mean, type=type)
        except Superseded:  # another process carries it by now, and pushes the same
            if rank == self._first:
                raise
        return TensorHandle(self, name, given, out)

    def has_result(self, name: str) -> bool:
        """Whether the result of this tensor's round is here; for handles."""
        return not self._looping and self._lead.client.has_result(name)

    def finish(self, name: str, out: Array | None) -> Array:
        """The result of this tensor's round; for handles. CoveyError inside the loop."""
        if self._looping:
            what, why = f"tensor {name!r} has no result yet", "not all ranks of this process have pushed"
            raise CoveyError(what, why, "wait for it after the loop over job.carried(step)")
        return self._lead.client.finish(name, out)

    def leave(self, linger_s: float = LEAVE_S) -> bool:
        """The last call for all ranks that are carried here: as `TensorClient.leave`."""
        end_s, began = time.monotonic() + linger_s, set[CarriedMember]()
        self._looping = True
        try:
            while True:
                for member in self.members.values():
                    if member not in began:
                        began.add(member)
                        member.client.begin_to_leave()
                try:
                    self._settle(end_s)
                except _OthersNow:
                    self._carry_newest()
                    continue
                except TimeoutError:
                    return False
                for member in self.members.values():
                    member.client.left = True
                return True
        finally:
            self._looping = False

    def close(self) -> None:
        """Close the clients of all ranks but the first."""
        for rank, member in [*self.members.items(), *self._new.items()]:
            if rank != self._first:
                member.client.close()

    # ---- inside ----

    @property
    def _lead(self) -> CarriedMember:
        return self.members[self._first]

    @property
    def _gather(self) -> OwnGather:
        """The gathering of each rank's own state, by the first rank."""
        gather = self._lead.healing.machine.gather
        assert gather is not None, "all ranks of an elastic job gather each rank's own state"
        return gather

    def _others_now(self) -> bool:
        return self._machine.others_now

    def _carry_newest(self) -> None:
        """Adopt the ranks that the newest configuration adds."""
        with self._changed:
            adopts = self._machine.to_adopt(self.members)
            config = self._machine.config
        for rank in adopts:
            member = self._new.pop(rank, None) or self._made(rank, config)
            self._begin_with(rank, member)
            self.members[rank] = member
        while self._new:
            self._new.popitem()[1].client.close()

    def _join_newest(self) -> None:
        """Join as all ranks that are to be carried here."""
        newest = self._machine.newest
        if newest is None:
            return
        ends, begins = self._machine.to_join(self.members, {rank: new.config for rank, new in self._new.items()})
        for rank in ends:
            self._new.pop(rank).client.close()
        for rank in begins:
            self._new[rank] = self._made(rank, newest.config)

    def _made(self, rank: int, config: int) -> CarriedMember:
        """This process as that rank, which has nothing yet."""
        incarnation = self._machine.incarnation(config)
        client = self._make(rank, incarnation)
        client.order = self._lead.client.order
        me = self._me._replace(rank=rank, incarnation=incarnation)

        def make(far: BlockRounds) -> Healing:
            return Healing(me, far, far.versions, client.tell, self._like, self._gather.beside(rank, far))

        healing, _ = client.heal(make, None if self._script.own is None else lambda: self.own_of(rank))
        return CarriedMember(client, healing, config)

    def _begin_with(self, rank: int, member: CarriedMember) -> None:
        """Let this rank go on from the beginning of the step in which the first rank is."""
        first, owns = self._lead.healing.machine, self._gather.owns
        self._machine.own_is(rank, owns.each[rank])
        member.healing.goes_on_from(first, owns)
        if first.rounds_before:
            member.client.far.begin_with(first.rounds_before)
        member.healing.begin(self._state)

    def own_of(self, rank: int) -> Any:
        """What is this rank's own now; None: nothing."""
        return self._machine.own_of(rank)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """All ranks wait inside, and then as long as a successor needs what one of them holds: it asks them all.
        _OthersNow when others are to be carried here meanwhile: a successor asks those, too."""
        waits = dict[int, CarriedMember](self.members)
        for member in waits.values():
            member.healing.waits()
        try:
            yield
            while still_needed([member.healing for member in waits.values()], LOOK_S):
                self._look()
            waits.clear()
        finally:
            for member in waits.values():
                member.healing.gave_up()

    def _let_others_catch_up(self) -> None:
        """Wait for successors that are a step behind, before any rank pushes: whatever one of this process's ranks
        waits for, a successor may ask the others, and those that come here meanwhile."""
        while True:
            self._carry_newest()
            with suppress(_OthersNow):
                if not self._late():
                    return
                self._lead.client.turns.computed()
                with self._waiting():
                    pause_s = FIRST_ASK_S
                    while late := self._late():
                        self._look()
                        late[0].healing.ask_late(pause_s)
                        pause_s = min(2 * pause_s, LOOK_S)

    def _late(self) -> list[CarriedMember]:
        """Ranks of which a successor is a step behind."""
        return [member for member in self.members.values() if member.healing.machine.is_ahead]

    def _look(self) -> None:
        """Drop the ranks that another process carries by now, as `_let_go`; _OthersNow when others are to be carried
        here."""
        self._let_go()
        if self._others_now():
            raise _OthersNow

    def _settle(self, end_s: float | None = None) -> None:
        """Wait until all that was pushed has come back, to every rank that is carried here; ranks that another process
        carries by now go. _OthersNow when others are to be carried here; TimeoutError after `end_s`, monotonic
        seconds."""
        turns = self._lead.client.turns
        turns.computed()
        with self._lead.client.calls.timed(), self._waiting():
            while True:
                self._let_go()
                with suppress(Superseded):
                    self._arrived(list(self.members.values()), end_s)
                    break
        if end_s is None:
            turns.computes()

    def _let_go(self) -> None:
        """Drop the ranks that another process carries by now. Superseded when the first rank is one of them; _OthersNow
        when one has been carried elsewhere meanwhile and is to be carried here again."""
        self._lead.client.raise_if_over()
        gone = {rank: member for rank, member in list(self.members.items()) if member.client.is_superseded}
        for rank, member in gone.items():
            del self.members[rank]
            member.client.close()
        if gone and self.blocks is not None:
            self.blocks.let_go(gone)
        if self._machine.lets_go({rank: member.config for rank, member in gone.items()}):
            raise _OthersNow

    def _arrived(self, members: list[CarriedMember], end_s: float | None) -> None:
        """Wait for all rounds of these ranks. Rows with each rank's own state come first, and may have to be pushed
        again by all ranks."""

        def waits(member: CarriedMember, name: str) -> _Waits:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            return _Waits(Patience(member.client, name, left_s), self._others_now)

        while awaited := [(member, name) for member in members if (name := member.healing.awaited) is not None]:
            for member, name in awaited:
                member.healing.rows_came(member.client.far.wait(name, waits(member, name), None).tobytes())
                member.client.far.say_held()
        for member in members:
            for name in member.client.open_rounds:
                member.client.far.until(name, waits(member, name))
                if member is not self._lead or name == LEAVE:
                    member.client.settled(name)


def ranks_in(carried: CarriedRanks | None, step: int) -> Iterator[CarriedRank]:
    """The ranks that a process carries in this step. CoveyError in another step, and before there is a state (None)."""
    what = f"the ranks of step {step} were not given"
    if carried is None:
        raise CoveyError(what, "the job has no state to carry", "call state = job.state(.., enter=) first")
    if step != carried.step:
        why = f"this process is in step {carried.step}"
        raise CoveyError(what, why, "for step in state.steps(N): for rank in job.carried(step): ..")
    return carried.carried()
