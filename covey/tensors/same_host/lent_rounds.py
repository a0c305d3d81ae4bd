"""Contributions that stay in the script's memory: ranks that add read them there (`covey.tensors.numbers.peer_memory`).

Each rank shows in its words (`covey.tensors.same_host.shared_rounds`) where it can be found. In the first round of a
tensor, in which all ranks copy, each tries to read all others, and shows whether it could. From then on a rank may lend
its contribution: it shows the address instead of copying. It does so with a large array that comes from the same
address again and again, as the buckets of DDP do, once that is on huge pages: reading 4 KiB pages of another process
costs more than it saves. Nobody may write to an array until its round is over (`TensorClient.push`), and it is over
when all have added. A rank that finds something unreadable after all shows that: then the lenders copy it, in this
round, and no longer lend anything of this tensor.

    words of 32 bits   0 pushed, 1 added, 2-3 rate (`covey.tensors.same_host.shared_rounds`), 4 has read all others,
                       5 round in which it could not, 6 checksum of what it lends in this round (0: nothing), 7 pid
    words of 64 bits   4 address of what it lends, 5 address of its token, 6-7 the token
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
"""Least bytes of a tensor that is lent: with 4 MB nothing is gained."""
SAME_ROUNDS = 3
"""Number of rounds in which an array must come from one address before it is lent from there."""
PLACES_MAX = 4
"""Most addresses of one tensor that are remembered."""
READS, COULD_NOT, LENDS, PID = 4, 5, 6, 7
ADDRESS_WORDS = (8, 9)
ADDRESS, TOKEN_AT, TOKEN = 4, 5, slice(6, 8)
"""The indexes ADDRESS, TOKEN_AT and TOKEN count words of 64 bits."""


class Overwritten(ValueError):
    """The words of a rank have impossible values."""


class LentRounds:
    """The lending of one tensor, for one rank, which is number `at` of those on its host."""

    def __init__(self, words: Words, at: int, first: int, type: np.dtype[Any]) -> None:
        """`words`: a row of 16 for each rank, from number `first` of the job on. `type`: the type in which
        contributions are stored."""
        self._words, self._at, self._first, self._type = words, at, first, type
        self._wide: npt.NDArray[np.uint64] = words.view(np.uint64)
        self._mine: Array | None = None
        """The array that is lent in this round; kept until the round is over."""
        self._looked = False
        self._seen: dict[int, int] = {}
        """By address: in how many rounds an array came from there."""
        self._huge: set[int] = set()
        """Addresses of arrays that are on huge pages."""
        self.why = ""
        """Why contributions are copied, for people; empty: they are not, or it is not known yet."""

    def introduce(self) -> None:
        """Show where this rank's memory can be read; before its first push."""
        let_ranks_read()
        me = myself()
        self._words[self._at, PID] = me.pid
        self._wide[self._at, TOKEN_AT] = me.at
        self._wide[self._at, TOKEN] = np.frombuffer(me.token, np.uint64)

    def look(self) -> None:
        """Check, once, after all have pushed for the first time, whether this rank can read the others."""
        if self._looked:
            return
        self._looked = True
        for at in range(len(self._words)):
            if why := "" if at == self._at else self._why_not(at):
                self.why = f"the memory of rank {self._first + at} cannot be read: {why}"
                return
        self._words[self._at, READS] = 1

    def lend(self, flat: Array, round: int) -> bool:
        """Lend this rank's contribution, if possible. Whether it need not be copied."""
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
        """The round is over: the script may write to its array again."""
        self._mine = None

    def contributions(self, slots: Sequence[Contribution], round: int) -> Sequence[Contribution] | None:
        """The contributions of all ranks, in this round that all have pushed. `slots`: memory of those that were
        copied. None: an unreadable one is not copied yet. Overwritten."""
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
        """A contribution could not be read in this round."""
        self._words[self._at, COULD_NOT] = round
        self.why = (
            f"the memory of rank {self._first + error.place} could not be read in round {round}: {_in_words(error)}"
        )

    def copy_if_asked(self, slot: Array) -> bool:
        """Copy the contribution that `lend` did not copy, if a rank could not read. Whether it was copied."""
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
        """Checksum of where a rank's lent contribution is, in a round; never 0."""
        row = self._words[at]
        return zlib.crc32(row[[PID, *ADDRESS_WORDS]].tobytes(), round) or 1

    def _lent(self, at: int, slot: Contribution) -> Contribution:
        if at == self._at:
            return slot if self._mine is None else self._mine
        return LentArray(int(self._words[at, PID]), int(self._wide[at, ADDRESS]), self._type, at)

    def _why_not(self, at: int) -> str:
        """Why this rank cannot be read; empty when it can."""
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
