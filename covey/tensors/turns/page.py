"""The page on which jobs of one host take turns: words in memory that all their processes and the agent see.

    head    magic, number of slots that are looked at
    slot    one process: the key of its job and its place in the order of turns, which the agent writes; when it was
            last alive, what it does at the processors and at the network, since when, how often, and a bell

Only its process writes the words of a slot that say what it does, and everybody decides by `rules` from all of them, so
there is no lock that a dead process could leave behind. A process that is dead or stopped, or that has the network and
sends nothing, is not counted after `LEASE_NS`: then others go on. Jobs that share a host trust one another as far as
that: one that writes nonsense here costs others time, and nothing else.

    take    write "waits" -> nobody has the lane, and the order says us? -> write "claims"
            -> does another one claim it or hold it?  no: write "holds"    yes, and it goes first: back to "waits"
    give    write "free", and ring the bell of those whose turn is next
"""

from collections.abc import Callable, Iterator
from typing import Any

from covey.kernel.pages import PAGE_BYTES
from covey.tensors.turns import rules
from covey.tensors.turns.rules import CLAIMS, FREE, HOLDS, WAITS, Claim, Need

MAGIC = int.from_bytes(b"COVEYtrn", "little")
SLOT_WORDS = 16
SLOTS_MAX = PAGE_BYTES // (8 * SLOT_WORDS) - 1
"""Most processes that take turns on one page; the head takes the room of one."""
LEASE_NS = 1_500_000_000
"""Nanoseconds without a sign of life after which a process's turns count as given. With a look every `NAP_NS`, others
go on within 2 s."""
BEAT_NS = 400_000_000
"""Nanoseconds between two signs of life."""
NAP_NS = 100_000_000
"""Most nanoseconds between two looks of a process that waits: so long a turn stays free that nobody rang for."""
SPIN_NS = 50_000
"""Nanoseconds between two looks while another process steps back."""
KEY, ALIVE, PLACE, USE = range(4)
"""Words of a slot: key of the job, 0 when the slot is free; CLOCK_MONOTONIC of the last sign of life; place in the
order; how many processes have had the slot, by which a process knows that it is still its own."""
PROGRESS, BELL, LOST, WAITED = range(12, 16)
"""Words of a slot: when a frame was last sent under a turn; what others write to wake it; turns lost to the lease;
nanoseconds waited for turns."""
STATE, SINCE, BASE, TURNS = range(4)
"""Words of each need, from `AT` on: what the process does, in which lane, and in which turn of its job; since when;
turns of all jobs when it asked; turns of its job that it began."""
AT: dict[Need, int] = {"comp": 4, "comm": 8}
_HEAD_MAGIC, _HEAD_SLOTS = 0, 1
_MASK = (1 << 64) - 1


class TurnsPage:
    """The words of one page. `page` is an mmap, or plain memory in tests."""

    def __init__(self, page: Any) -> None:
        """ValueError when it is too small."""
        if len(page) < PAGE_BYTES:
            raise ValueError(f"a page of turns has {PAGE_BYTES} bytes, and this one {len(page)}")
        self._page = page
        self._words: memoryview[int] = memoryview(page).cast("B")[:PAGE_BYTES].cast("Q")
        self._states = {need: self._words[SLOT_WORDS + AT[need] + STATE :: SLOT_WORDS] for need in AT}

    @property
    def page(self) -> Any:
        """The memory itself."""
        return self._page

    @property
    def valid(self) -> bool:
        """Whether the agent has prepared it."""
        return self._words[_HEAD_MAGIC] == MAGIC

    @property
    def slots(self) -> int:
        """Number of slots that are looked at."""
        return min(self._words[_HEAD_SLOTS], SLOTS_MAX)

    @staticmethod
    def offset(slot: int, word: int) -> int:
        """Where a word lies, in bytes."""
        return 8 * (SLOT_WORDS * (slot + 1) + word)

    def get(self, slot: int, word: int) -> int:
        return self._words[SLOT_WORDS * (slot + 1) + word]

    def put(self, slot: int, word: int, value: int) -> None:
        self._words[SLOT_WORDS * (slot + 1) + word] = value & _MASK

    def claims(self, need: Need, now_ns: int) -> list[Claim]:
        """What the living processes want or have of the processors, or of the network."""
        slots, at = self.slots, AT[need]
        words = self._words[SLOT_WORDS : SLOT_WORDS * (slots + 1)].tolist()
        total, found = 0, list[Claim]()
        for slot in range(slots):
            first = SLOT_WORDS * slot
            state, since, base, turns = words[first + at : first + at + 4]
            total += turns
            doing = state & 3
            if not doing or not words[first + KEY] or abs(now_ns - words[first + ALIVE]) >= LEASE_NS:
                continue
            if doing == HOLDS and need == "comm" and now_ns - words[first + PROGRESS] >= LEASE_NS:
                continue
            lane = (state >> 2) & 7 if doing != WAITS else -1
            found.append(Claim(words[first + KEY], words[first + PLACE], base, doing, lane, slot, since, state >> 5))
        return [claim._replace(passed=_passed(total, claim.passed)) for claim in found]

    def owns(self, slot: int, key: int, use: int) -> bool:
        """Whether this use of the slot, by a process of the job with this key, lasts."""
        return self.get(slot, KEY) == key != 0 and self.get(slot, USE) == use

    def alone(self, need: Need, slot: int) -> bool:
        """Whether no process but that of this slot wants or has any of it."""
        states = self._states[need][: self._words[_HEAD_SLOTS]].tolist()
        del states[slot : slot + 1]
        return not any(states)

    def has_others(self, key: int) -> bool:
        """Whether a process of another job than this one has a slot."""
        return any(self.get(slot, KEY) not in (0, key) for slot in range(self.slots))

    # ---- the agent's side ----

    def prepare(self) -> None:
        """Make the page one that ranks may use."""
        self._words[_HEAD_SLOTS] = 0
        self._words[_HEAD_MAGIC] = MAGIC

    def assign(self, slot: int, key: int, place: int) -> None:
        """Give a slot to a process of the job with this key. Counts of turns go on from those of whoever had it: the
        turns that others were passed over by are their sum."""
        self.put(slot, USE, self.get(slot, USE) + 1)
        for word in (ALIVE, PROGRESS, LOST, WAITED, AT["comp"] + STATE, AT["comm"] + STATE):
            self.put(slot, word, 0)
        self.put(slot, PLACE, place)
        self.put(slot, KEY, key)
        self._words[_HEAD_SLOTS] = max(self.slots, slot + 1)

    def free(self, slot: int) -> None:
        """The process of this slot is gone."""
        self.put(slot, KEY, 0)
        for need in AT:
            self.put(slot, AT[need] + STATE, FREE)


def _passed(total: int, base: int) -> int:
    passed = (total - base) & _MASK
    return passed if passed < 1 << 32 else 0


class Taker:
    """The turns of the process that has this slot. One thread at a time calls `give`, `lose` or
    `alive`, or lets `take` do a step.

    The agent frees the slot of a process that it has lost touch with, and the process may live: it writes nothing on
    the page from then on, and runs without turns until it joins again."""

    def __init__(
        self,
        page: TurnsPage,
        slot: int,
        now_ns: Callable[[], int],
        fence: Callable[[], None] = lambda: None,
        use: int | None = None,
    ) -> None:
        """`fence`: makes this process's writes visible to others before its next reads. `use`: which use of the slot is
        this process's (USE); None: the present one."""
        self.page, self.slot = page, slot
        self.job, self._use = page.get(slot, KEY), page.get(slot, USE) if use is None else use
        self._now_ns, self._fence = now_ns, fence
        self._had: dict[Need, int] = dict.fromkeys(AT, 0)
        """The turn of its job that this process had last."""

    @property
    def owns(self) -> bool:
        """Whether the slot is still this process's."""
        return self.page.owns(self.slot, self.job, self._use)

    def take(self, need: Need) -> Iterator[int]:
        """Take a turn. Between the steps other processes may do anything; each yields for how many nanoseconds to
        sleep, unless the bell rings, and 0 to go on at once. Ends without a turn once the slot is another process's."""
        if self.page.alone(need, self.slot):
            lane = rules.LANES[need][0]
            self._do(need, CLAIMS, lane)
            self._fence()
            yield 0
            looked_ns, alone = self._now_ns(), self.page.alone(need, self.slot)
            yield 0
            if alone and self._begin(need, lane, looked_ns, alone):
                return
        total = sum(self.page.get(slot, AT[need] + TURNS) for slot in range(self.page.slots))
        self._put(need, BASE, total)
        self._put(need, SINCE, self._now_ns())
        while self.owns:
            if self._get(need, STATE) & 3 != WAITS:  # nobody would let one go on that does not seem to wait
                self._do(need, WAITS)
                self._fence()
            yield 0
            claims = self.page.claims(need, self._now_ns())
            lane_now = rules.may_enter(need, claims, self.job, self._had[need])
            if lane_now is None:
                yield NAP_NS
                continue
            if rules.keeps(self._claim(lane_now), claims) is False:  # one that steps back lets the other one go on
                yield SPIN_NS
                continue
            self._do(need, CLAIMS, lane_now)
            self._fence()
            yield 0
            looked_ns = self._now_ns()
            while (kept := self._keeps(need, lane_now)) is None:
                yield SPIN_NS
                looked_ns = self._now_ns()
            yield 0
            if kept and self._begin(need, lane_now, looked_ns):
                return
            self._do(need, WAITS)
            yield SPIN_NS

    def _begin(self, need: Need, lane: int, looked_ns: int, alone: bool = False) -> bool:
        """Begin a turn, unless this process was stopped since it looked: what it saw is long ago then. `alone`: no
        other process of its job has one that it could join."""
        now_ns = self._now_ns()
        if now_ns - looked_ns > LEASE_NS // 2:
            return False
        if need == "comm":
            self._write(PROGRESS, now_ns)
        turn, had = 0, self._had[need]
        if not alone:
            turn = rules.present_turn(self.page.claims(need, now_ns), self.job, lane)
        if turn in (0, had):  # the job's next turn: its time tells it from all others of the job
            turn = max(now_ns, had + 1)
            self._put(need, TURNS, self._get(need, TURNS) + 1)
        self._had[need] = turn
        self._put(need, SINCE, now_ns)
        self._do(need, HOLDS, lane)
        return True

    def give(self, need: Need) -> list[int]:
        """Give the turn, or the wish for one; returns the slots whose bell to ring."""
        if not self.owns or self._get(need, STATE) == FREE:
            return []
        self._put(need, STATE, FREE)
        self._fence()
        return [] if self.page.alone(need, self.slot) else self.next_slots(need)

    def next_slots(self, need: Need) -> list[int]:
        """The slots of the processes that may begin now."""
        claims = self.page.claims(need, self._now_ns())
        return [
            claim.slot
            for claim in claims
            if claim.state == WAITS and rules.may_enter(need, claims, claim.job, claim.turn) is not None
        ]

    def alive(self) -> bool:
        """Give a sign of life. False when the last one was too long ago, so that the turns it had are lost."""
        now_ns, last_ns = self._now_ns(), self.page.get(self.slot, ALIVE)
        kept = not self.owns or not last_ns or now_ns - last_ns < LEASE_NS
        if not kept:
            for need in AT:
                if self._get(need, STATE) & 3 == HOLDS:
                    self.lose(need)
        self._write(ALIVE, now_ns)
        return kept

    def progress(self) -> None:
        """Something was sent under the turn, which others take for given otherwise."""
        if self.holds("comm"):
            self._write(PROGRESS, self._now_ns())

    def waited(self, length_ns: int) -> None:
        """Count time that was waited for turns."""
        self._write(WAITED, self.page.get(self.slot, WAITED) + length_ns)

    def lose(self, need: Need) -> list[int]:
        """Give a turn up that was held too long; returns the slots whose bell to ring."""
        self._write(LOST, self.page.get(self.slot, LOST) + 1)
        return self.give(need)

    def holds(self, need: Need) -> bool:
        """Whether this process wrote that it holds a turn; others may count it as lost."""
        return self.owns and self._get(need, STATE) & 3 == HOLDS

    def since_ns(self, need: Need) -> int:
        """When its turn began, or when it asked."""
        return self._get(need, SINCE)

    def others_wait(self, need: Need) -> bool:
        """Whether a process of another job waits for what this one has."""
        return any(claim.state == WAITS and claim.job != self.job for claim in self.page.claims(need, self._now_ns()))

    def _keeps(self, need: Need, lane: int) -> bool | None:
        claims = self.page.claims(need, self._now_ns())
        kept = rules.keeps(self._claim(lane), claims)
        return kept and rules.may_enter(need, claims, self.job, self._had[need]) == lane

    def _claim(self, lane: int) -> Claim:
        return Claim(self.job, 0, 0, CLAIMS, lane, self.slot)

    def _do(self, need: Need, doing: int, lane: int = 0) -> None:
        self._put(need, STATE, doing | lane << 2 | self._had[need] << 5)

    def _get(self, need: Need, word: int) -> int:
        return self.page.get(self.slot, AT[need] + word)

    def _put(self, need: Need, word: int, value: int) -> None:
        self._write(AT[need] + word, value)

    def _write(self, word: int, value: int) -> None:
        if self.owns:
            self.page.put(self.slot, word, value)
