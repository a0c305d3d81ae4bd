"""Contributions that stay where the script has them: ranks that add read them there
(`covey.tensors.numbers.peer_memory`).

Each rank shows in its words (`covey.tensors.same_host.shared_rounds`) where it can be found. In the first round of a
tensor, in which all copy, each tries to read all others, and says so. From then on a rank may lend what it contributes:
it shows the address instead of copying. It does so with a large array that comes from the same place again and again,
as the buckets of DDP do, once that lies on huge pages: reading 4 KiB pages of another process costs more than it
spares. Nobody may write to an array until its round is over (`TensorClient.push`), and it is over when all have added.
Who finds that something cannot be read after all says so: then those who lent copy it, in this round, and lend nothing
of this tensor any more.

    words of 32 bits   0 pushed, 1 added, 2-3 rate (`covey.tensors.same_host.shared_rounds`), 4 has read all others, 5
    the round in which
                       it could not, 6 a checksum of what it lends in this round, 0: nothing; 7 pid
    words of 64 bits   4 address of what it lends, 5 of its token, 6-7 the token
"""

import errno
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from covey.tensors.numbers.additions import Contribution
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.peer_memory import LentArray, Peer, Unreadable, address_of, let_ranks_read, myself
from covey.tensors.same_host.huge_pages import make_huge

Words = npt.NDArray[np.uint32]

LEAST_BYTES = 8 << 20
"""Of a tensor that is lent: of 4 MB nothing is gained."""
SAME_ROUNDS = 3
"""In as many rounds an array comes from one place before it is lent from there."""
PLACES_MAX = 4
"""Of one tensor that are looked at."""
READS, COULD_NOT, LENDS, PID = 4, 5, 6, 7
ADDRESS_WORDS = (8, 9)
ADDRESS, TOKEN_AT, TOKEN = 4, 5, slice(6, 8)
"""The last line: of 64 bits."""


class Overwritten(ValueError):
    """Words of a rank cannot be."""


class LentRounds:
    """Of one tensor, for one rank, number `at` of those on its host."""

    def __init__(self, words: Words, at: int, first: int, type: np.dtype[Any]) -> None:
        """`words`: a row of 16 for each rank, from number `first` of the job on. `type`: in which contributions lie."""
        self._words, self._at, self._first, self._type = words, at, first, type
        self._wide: npt.NDArray[np.uint64] = words.view(np.uint64)
        self._mine: Array | None = None
        """What is lent in this round; kept until that is over."""
        self._looked = False
        self._seen: dict[int, int] = {}
        """In how many rounds an array came from there."""
        self._huge: set[int] = set()
        """Those of them that lie on huge pages."""
        self.why = ""
        """Contributions are copied, for people; empty: they are not, or it is not known yet."""

    def introduce(self) -> None:
        """Before this rank's first push."""
        let_ranks_read()
        me = myself()
        self._words[self._at, PID] = me.pid
        self._wide[self._at, TOKEN_AT] = me.at
        self._wide[self._at, TOKEN] = np.frombuffer(me.token, np.uint64)

    def look(self) -> None:
        """Once, after all have pushed for the first time: can this rank read the others?"""
        if self._looked:
            return
        self._looked = True
        for at in range(len(self._words)):
            if why := "" if at == self._at else self._why_not(at):
                self.why = f"the memory of rank {self._first + at} cannot be read: {why}"
                return
        self._words[self._at, READS] = 1

    def lend(self, flat: Array, round: int) -> bool:
        """Whether this rank need not copy what it contributes."""
        words = self._words
        may = words[:, READS].all() and not words[:, COULD_NOT].any()
        if not may or not self._is_worth_it(flat):
            words[self._at, LENDS] = 0
            return False
        self._mine = flat
        self._wide[self._at, ADDRESS] = address_of(flat)
        words[self._at, LENDS] = self._checksum(self._at, round)
        return True

    def over(self) -> None:
        """The script may write to its array again."""
        self._mine = None

    def contributions(self, slots: Sequence[Contribution], round: int) -> Sequence[Contribution] | None:
        """Of all ranks, in this round that all have pushed. `slots`: where those lie that were copied. None: one that
        could not be read is not copied yet. Overwritten."""
        lends = self._words[:, LENDS].tolist()
        if not any(lends):
            return slots
        for at, checksum in enumerate(lends):
            if checksum not in (0, self._checksum(at, round)):
                raise Overwritten(f"the memory it shares was overwritten: where rank {self._first + at} has its part")
        if self._words[self._at, COULD_NOT]:
            return None
        return [self._lent(at, slot) if lends[at] else slot for at, slot in enumerate(slots)]

    def could_not(self, round: int, error: Unreadable) -> None:
        """Read something in this round."""
        self._words[self._at, COULD_NOT] = round
        self.why = (
            f"the memory of rank {self._first + error.place} could not be read in round {round}: {_in_words(error)}"
        )

    def copy_if_asked(self, slot: Array) -> bool:
        """Whether it did what `lend` spared it, since somebody could not read."""
        if self._mine is None or not self._words[:, COULD_NOT].any():
            return False
        np.copyto(slot, self._mine)
        self._words[self._at, LENDS] = 0
        self._mine = None
        return True

    # ---- inside ----

    def _is_worth_it(self, flat: Array) -> bool:
        address = address_of(flat)
        seen = self._seen.get(address, 0) + 1
        if seen > 1 or len(self._seen) < PLACES_MAX:
            self._seen[address] = seen
        if seen == SAME_ROUNDS and make_huge(flat):
            self._huge.add(address)
        return address in self._huge

    def _checksum(self, at: int, round: int) -> int:
        """Of what this rank lends in a round; never 0."""
        row = self._words[at]
        return zlib.crc32(row[[PID, *ADDRESS_WORDS]].tobytes(), round) or 1

    def _lent(self, at: int, slot: Contribution) -> Contribution:
        if at == self._at:
            return slot if self._mine is None else self._mine
        return LentArray(int(self._words[at, PID]), int(self._wide[at, ADDRESS]), self._type, at)

    def _why_not(self, at: int) -> str:
        """This rank cannot be read; empty: it can."""
        peer = Peer(int(self._words[at, PID]), int(self._wide[at, TOKEN_AT]), self._wide[at, TOKEN].tobytes())
        if not peer.pid:
            return "it does not give the address of its memory (COVEY_SHARED_TENSORS=copy)"
        try:
            return "" if peer.is_there else "its pid is another process here (a container of its own)"
        except Unreadable as error:
            return _in_words(error)


def _in_words(error: Unreadable) -> str:
    forbidden = "; another user, a container, or kernel.yama.ptrace_scope above 1 may be why"
    return f"{error.strerror}{forbidden if error.errno == errno.EPERM else ''}"
