"""A rank that is lost gets a successor while the others wait: what it needs to go on, and who gives it.

In each step a rank needs what all others push, so once one is lost the others stand in that step: what they hold *is*
the state at its beginning. Its successor asks all of them, takes the state of one that is furthest, from several at
once, and computes the step again. What the lost rank had pushed already stays true, and what its successor pushes of it
again has the same bits. What was the lost rank's own (random generators, its place in the data) lies with two
neighbours: it goes there in each step before the first push, as it will be at the step's end, and nothing is pushed
before both have it. So whoever has a result of a step need not have it alone: no rank gets ahead of what is kept.

    lost rank                            each other rank
      MIRROR(step + 1, own) ->             two neighbours keep the newest two; the script may compute meanwhile
                                        <- MIRRORED(step + 1, of which bytes); only then something is pushed
    successor
      NEED ->                              once its script waits for a tensor; from then on it waits until DONE
                                        <- HAVE(step, what was the successor's own, and others')
      FETCH(where) ->                      those that are furthest (`covey.healing.taking_over`)
                                        <- PIECE
      DONE ->                              the script goes on

Where a job has few ranks, all of them gather what is each one's own, as one more sum that is pushed first and waited
for first (`covey.healing.owns`): it is a part of the state then, no MIRROR is told, and no push waits for a word.

All of it goes through the job's aggregators (`covey.tensors.numbers.tensor_wire`, TELL), which may lose any of it, so
it is said again until it is answered. A rank that is asked while it is a successor itself says that it has nothing.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from covey.healing.likeness import Likeness
from covey.healing.machine import HealingMachine, Own
from covey.healing.neighbours import Beside
from covey.healing.own_gather import OwnGather
from covey.healing.stepwise import Found, Stepwise
from covey.healing.taking_over import HEAL_S, WITHIN_S, Recovered
from covey.tensors.aggregator.rounds import Tell, ToldByRank
from covey.tensors.numbers.arrays import Array


class Tells(Protocol):
    """How ranks reach one another; whatever is said may be lost. Methods may be called from any thread."""

    def tell(self, said: Tell) -> None: ...


class Healing:
    """Of one rank, whose decisions are those of `HealingMachine`. The script's threads call the first group of methods,
    a link's thread `told`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        neighbours: Sequence[int],
        tells: Tells,
        rounds: Callable[[], bytes | None],
        step: int,
        incarnation: int,
        people: Callable[[str], None] = lambda text: None,
        like: Likeness | None = None,
        gather: OwnGather | None = None,
        beside: Beside | None = None,
    ) -> None:
        """`rounds`: of each Block, before this step; None while one is under way. `step`: with which the script begins,
        unless it is a successor: `incarnation` says of how many. `people` read for what it waits.
        `like`: of this process; None: none is compared. `gather`: of what is each rank's own; None: two neighbours
        keep that of this rank. `beside`: who is on its host, by which `neighbours` change; None: never."""
        self._people, self._tells, self._rounds = people, tells, rounds
        self._pushing = threading.Lock()
        """Held by the thread that tells what is this rank's own: other threads push afterwards."""
        self._ending = threading.Lock()
        """Held by the thread that waits for what is every rank's own."""
        self._changed = threading.Condition()
        """Guards what follows; nobody waits for others while it is held."""
        self.machine = HealingMachine(
            rank, world_size, neighbours, step, incarnation, time.monotonic, self._say_on, like, gather, beside
        )

    # ---- from the script ----

    @property
    def step(self) -> int:
        """The one that the script is in."""
        return self.machine.step

    def begin(self, state: Mapping[str, Array]) -> None:
        """A step: `state` is not changed until all of its results are here. CoveyError when a round is under way."""
        rounds = self._rounds()
        with self._changed:
            says = self.machine.begin(state, rounds)
        self._tell(says)

    def end(self, state: Mapping[str, Array]) -> None:
        """This step is done: the next one begins. Errors as of `begin`."""
        rounds = self._rounds()
        with self._changed:
            says = self.machine.end(state, rounds)
        self._tell(says)

    def drawn(self, own: Own) -> None:
        """What is this rank's own is as it will be when the step ends: neighbours get it while the script computes."""
        with self._pushing:
            self._run(self.machine.drawn(own), self._people)

    def before_push(self, own: Own) -> None:
        """Something is about to be pushed: what is this rank's own is as it will be when the step ends. CoveyError when
        it is too large."""
        if not self.machine.has_said_own:
            with self._pushing:
                self._run(self.machine.before_push(own), self._people)

    def gathered(self, wait: Callable[[str], Array]) -> None:
        """Before a result of this step is used: once what is every rank's own is here. `wait` gives the result of a
        tensor; its errors, and ValueError when rows are not added."""
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

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The script waits for a tensor, and on while a successor needs what it holds."""
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

    def recover(
        self,
        say: Callable[[str], None],
        has_own: bool,
        known: Mapping[str, Array] | None = None,
        timeout_s: float = HEAL_S,
        within_s: float = WITHIN_S,
    ) -> Recovered:
        """What this successor goes on with. Errors as of `TakingOver.state`, and StateLost when nobody kept what is its
        own. `say`: to people, for what it waits; `has_own`: something is this rank's own; `known`: arrays into which
        the state goes, where they are like it."""
        return self._run(self.machine.recover(has_own, known, timeout_s, within_s), say)

    # ---- from a link ----

    def told(self, told: ToldByRank) -> None:
        """Another rank said something. What no rank says is left alone."""
        with self._changed:
            says, words, is_awaited = self.machine.told(told)
            if is_awaited:
                self._changed.notify_all()
        self._tell(says)
        if words:
            self._people(words)

    def gone(self, ranks: Mapping[int, str]) -> None:
        """These have left, for good: why, in words."""
        with self._changed:
            self.machine.gone(ranks)
            self._changed.notify_all()

    def close(self) -> None:
        """The script goes on, whoever waits for it."""
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
        """To its end, in this thread, which waits where it pauses."""
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
