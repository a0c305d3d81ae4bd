"""A lost rank gets a successor while the others wait: what the successor needs to continue, and who gives it.

In each step a rank needs what all others push, so once one is lost the others stop in that step: what they hold *is*
the state at its beginning. The successor asks all of them, takes the state of those that are furthest, from several at
once, and computes the step again. What the lost rank had pushed already stays valid, since its successor pushes the
same bits again. The lost rank's own state (random generators, its place in the data) is kept by two neighbours: in each
step a rank sends them, before its first push, its own state as it will be at the step's end, and it pushes nothing
before both have it. So no rank gets a result of a step for which a lost rank's own state could be missing.

    lost rank                            each other rank
      MIRROR(step + 1, own) ->             two neighbours keep the newest two; the script may compute meanwhile
                                        <- MIRRORED(step + 1, CRC-32); the lost rank pushed only after both
    successor
      NEED ->                              once its script waits for a tensor; from then on it waits until DONE
                                        <- HAVE(step, own states of the successor and of others)
      FETCH(where) ->                      those that are furthest (`covey.healing.taking_over`)
                                        <- PIECE; NOTHING, of a process that came in the place of the one asked
      DONE ->                              the script continues

When a job has few ranks, all of them gather every rank's own state, as one more sum that is pushed first and waited for
first (`covey.healing.owns`). It is then a part of the state: no MIRROR is sent, and no push waits for an answer.

What changes after that sum, before the next step (a validation draws random numbers), is told in any job: the rank
sends MIRROR for the step that it has begun, and pushes nothing before both neighbours have it. It counts for a
successor, whatever was gathered. A rank that is lost before that goes on with what it had said.

All messages go through the job's aggregators (`covey.tensors.numbers.tensor_wire`, TELL), which may lose any of them,
so a message is repeated until it is answered. A rank that is asked while it is a successor itself answers that it has
nothing.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from covey.healing.likeness import Likeness
from covey.healing.machine import Boundary, HealingMachine, Own
from covey.healing.neighbours import HealedRank
from covey.healing.own_gather import OwnGather
from covey.healing.owns import Owns
from covey.healing.stepwise import Found, Stepwise
from covey.healing.taking_over import HEAL_S, WITHIN_S, Recovered
from covey.tensors.aggregator.rounds import Tell, ToldByRank
from covey.tensors.numbers.arrays import Array


class Tells(Protocol):
    """The way in which ranks reach one another; any message may be lost. Methods may be called from any thread."""

    def tell(self, said: Tell) -> None: ...


class Healing:
    """The healing of one rank: `HealingMachine` decides, this class runs it. The script's threads call the first group
    of methods, a link's thread calls `told`."""

    def __init__(
        self,
        me: HealedRank,
        tells: Tells,
        rounds: Callable[[], bytes | None],
        people: Callable[[str], None] = lambda text: None,
        like: Likeness | None = None,
        gather: OwnGather | None = None,
    ) -> None:
        """`rounds` returns the round of each Block before this step; None while one is under way. `people` gets lines
        for people on what this rank waits for. `like`: likeness of this process; None: none is compared. `gather`:
        collects every rank's own state; None: two neighbours keep that of this rank."""
        self._people, self._tells, self._rounds = people, tells, rounds
        self._pushing = threading.Lock()
        """Held by the thread that sends this rank's own state: other threads push afterwards."""
        self._ending = threading.Lock()
        """Held by the thread that waits for every rank's own state."""
        self._changed = threading.Condition()
        """Guards the fields below; no thread waits for other ranks while it holds this."""
        self.machine = HealingMachine(me, time.monotonic, self._say_on, like, gather)

    # ---- from the script ----

    @property
    def step(self) -> int:
        """Number of the step that the script is in."""
        return self.machine.step

    def begin(self, state: Mapping[str, Array]) -> None:
        """Begin the first step: `state` must not change until all of its results are here. CoveyError during a
        round."""
        rounds = self._rounds()
        with self._changed:
            says = self.machine.begin(state, rounds)
        self._tell(says)

    def end(self, state: Mapping[str, Array]) -> None:
        """End this step and begin the next. Errors as of `begin`."""
        rounds = self._rounds()
        with self._changed:
            says = self.machine.end(state, rounds)
        self._tell(says)

    def drawn(self, own: Own) -> None:
        """This rank's own state is as it will be at the step's end: neighbours get it while the script computes."""
        with self._pushing:
            self._run(self.machine.drawn(own), self._people)

    def moved(self, own: Own) -> None:
        """This rank's own state at the beginning of this step is another one than it said, as `HealingMachine.moved`.
        Waits until neighbours have it."""
        with self._pushing:
            self._run(self.machine.moved(own), self._people)

    def before_push(self, own: Own, later: bool = False) -> None:
        """Called before a push, when this rank's own state is as it will be at the step's end, or with `later`, if
        another push of this step will say that. CoveyError when the own state is too large."""
        if not self.machine.has_said_own:
            with self._pushing:
                self._run(self.machine.before_push(own, later), self._people)

    def gathered(self, wait: Callable[[str], Array]) -> None:
        """Wait until every rank's own state is here; called before a result of this step is used. `wait` returns the
        result of a tensor and raises its errors. ValueError when rows are not added."""
        gather = self.machine.gather
        if gather is None or gather.awaited is None:
            return
        with self._ending:
            while (name := gather.awaited) is not None:
                rows = wait(name).tobytes()
                with self._changed:
                    is_to_be_pushed = gather.came(rows)
                if is_to_be_pushed:
                    gather.push_again()

    def boundary(self) -> Boundary:
        """Where this rank is between two steps, as of `HealingMachine.boundary`."""
        rounds = self._rounds()
        with self._changed:
            return self.machine.boundary(rounds)

    def ask_late(self, within_s: float) -> None:
        """Ask successors that are a step behind whether they still are, and wait for at most so many seconds until none
        is."""
        with self._changed:
            says = self.machine.ask_late()
        self._tell(says)
        with self._changed:
            self._changed.wait_for(lambda: not self.machine.is_ahead, within_s)

    def goes_on_from(self, other: HealingMachine, owns: Owns) -> None:
        """Let this rank go on where a rank of the same process is, as `HealingMachine.goes_on_from` does."""
        with self._changed:
            self.machine.goes_on_from(other, owns)

    @property
    def awaited(self) -> str | None:
        """Name of the tensor whose result comes before any other of this step; None: it is here (`OwnGather`)."""
        return None if self.machine.gather is None else self.machine.gather.awaited

    def rows_came(self, rows: bytes) -> None:
        """Take that result, and push longer rows where it has too short ones, as `gathered` does for one rank."""
        gather = self.machine.gather
        if gather is not None:
            with self._ending, self._changed:
                if gather.came(rows):
                    gather.push_again()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The script waits for a tensor inside, and then as long as a successor needs what this rank holds."""
        with self._changed:
            says = self.machine.waits()
        in_vain = True
        try:
            self._tell(says)
            yield
            in_vain = False
        finally:
            if in_vain:
                with self._changed:
                    self.machine.gave_up()
        self._run(self.machine.waited(), self._people)

    def waits(self) -> None:
        """The script waits for a tensor from now on, until `is_free` or `gave_up`; for ranks that wait together."""
        with self._changed:
            says = self.machine.waits()
        self._tell(says)

    def is_free(self, within_s: float) -> bool:
        """Wait for at most so many seconds until no successor needs what this rank holds; as
        `HealingMachine.is_free`."""
        with self._changed:
            self._changed.wait_for(lambda: self.machine.needed_by_none, within_s)
            return self.machine.is_free()

    def gave_up(self) -> None:
        """The script waits no longer, whoever needs what it holds."""
        with self._changed:
            self.machine.gave_up()

    def recover(
        self,
        say: Callable[[str], None],
        has_own: bool,
        known: Mapping[str, Array] | None = None,
        timeout_s: float = HEAL_S,
        within_s: float = WITHIN_S,
    ) -> Recovered:
        """The state with which this successor continues. Errors as of `TakingOver.state`, and StateLost when no rank
        kept its own state. `say` tells people what it waits for; `has_own`: the script has own state; `known`: arrays
        that take the state, where type and shape are equal."""
        return self._run(self.machine.recover(has_own, known, timeout_s, within_s), say)

    # ---- from a link ----

    def told(self, told: ToldByRank) -> None:
        """Handle a message of another rank. A malformed one is ignored."""
        with self._changed:
            says, words, is_awaited = self.machine.told(told)
            if is_awaited:
                self._changed.notify_all()
        self._tell(says)
        if words:
            self._people(words)

    def gone(self, ranks: Mapping[int, str]) -> None:
        """These ranks have left for good; the values say so in words."""
        with self._changed:
            self.machine.gone(ranks)
            self._changed.notify_all()

    def carried_here(self, incarnation: int) -> None:
        """This process is to carry its rank, as `HealingMachine.carried_here`."""
        with self._changed:
            self.machine.carried_here(incarnation)

    def carried_elsewhere(self, ranks: Mapping[int, int]) -> None:
        """Wait no more for the processes that carried these ranks, as `HealingMachine.carried_elsewhere` does."""
        with self._changed:
            self.machine.carried_elsewhere(ranks)
            self._changed.notify_all()

    def close(self) -> None:
        """Let the script continue, whoever waits for it."""
        with self._changed:
            self.machine.close()
            self._changed.notify_all()

    # ---- inside ----

    def _say_on(self) -> None:
        threading.Thread(
            target=lambda: self._run(self.machine.saying(), self._people), name="covey-heal", daemon=True
        ).start()

    def _tell(self, says: Sequence[Tell]) -> None:
        for said in says:
            self._tells.tell(said)

    def _run(self, steps: Stepwise[Found], people: Callable[[str], None]) -> Found:
        """Run a generator of the machine to its end in this thread, which waits where it pauses."""
        gave: object = None
        try:
            while True:
                with self._changed:
                    try:
                        pause = steps.send(gave)
                    except StopIteration as end:
                        found: Found = end.value
                        return found
                self._tell(pause.says)
                if pause.words:
                    people(pause.words)
                gave = pause.work() if pause.work is not None else None
                with self._changed:
                    self._changed.wait_for(pause.until, pause.most_s)
        finally:
            with self._changed:
                steps.close()
