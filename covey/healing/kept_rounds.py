"""Rounds before a job's loop of steps, whose results every rank keeps, since a successor passes there again.

A script may agree on something before it registers its state: a run id, sizes, that all are here. A rank that is lost
later begins at the script's first line, while the others are far beyond it. So each round before the loop has a number,
every rank keeps its result, and a successor pushes nothing there: it asks the others, and gets what they got.

    successor                            another rank
      ASK(number, from byte)  ->           at any time: whoever has the result answers
                                      <-   IS(number, how many there are, bytes, from byte, piece)

The messages go among ranks like those of `covey.healing.healing`; any may be lost, and is repeated. What is kept has a
limit. Beyond it results are thrown away, and so is the healing of this job: it starts again as a whole instead.
"""

import enum
import json
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from covey.core.errors import EXIT_STATE_LOST, CoveyError
from covey.core.units import format_size
from covey.healing.state_pieces import CANNOT
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.telling import Tell, ToldByRank
from covey.tensors.numbers.tensor_wire import Payload, Type
from covey.wire.checksum import crc32

KEPT_BYTES_MAX = 16 << 20
"""Most bytes of results that a rank keeps."""
KEPT_MAX = 4096
"""Most results that a rank keeps."""
PIECE_BYTES = 256 << 10
FIRST_ASK_S, ASK_S = 0.02, 0.5
"""Seconds until a question is repeated: at first, and at most."""
PATIENCE_S = 30.0
"""Seconds after which people are told what a successor waits for."""
ENDLESS = 64
"""Names that are used in turn once results are kept no more."""
UNKNOWN, NOTHING = -1, -2
"""In place of how many results there are: not known yet; this rank is a successor itself, and has not this one."""
NO_MORE = 0xFFFF_FFFF_FFFF_FFFF
"""In place of a result's size: lost ranks are not replaced any more, and the piece says why."""
_ASK = struct.Struct("<IQ")
_IS = struct.Struct("<IiQQI")


class AboutKept(enum.IntEnum):
    """Kinds of messages among ranks, beside those of `covey.healing.state_pieces.About`."""

    ASK = 80
    IS = 81


class KeptPiece(NamedTuple):
    """A part of a result that another rank kept."""

    number: int
    total: int
    """How many results there are, once that is certain; else UNKNOWN or NOTHING."""
    size: int
    """Bytes of the whole result; 0: it is not there; NO_MORE."""
    first: int
    sum: int
    """CRC-32 of the whole result."""
    piece: bytes


class Pushes(Protocol):
    """What pushes a tensor: `covey.job.tensors.TensorClient.push`."""

    def __call__(self, name: str, array: Array, *, mean: bool, type: Type | None) -> "BegunRound": ...


class BegunRound(Protocol):
    """A round that was begun."""

    def wait(self) -> Array: ...


def kept_of(of: str, array: Array) -> bytes:
    """A result as bytes; `of`: what was called."""
    head = json.dumps([of, array.dtype.str, array.shape]).encode()
    return struct.pack("<I", len(head)) + head + array.tobytes()


def array_of_kept(data: Payload) -> tuple[str, Array]:
    """What was called, and its result. ValueError when `kept_of` did not make these bytes."""
    whole = bytes(data)
    if len(whole) < 4:
        raise ValueError("a kept result has no head")
    (size,) = struct.unpack_from("<I", whole)
    try:
        of, dtype, shape = json.loads(whole[4 : 4 + size])
        kind = np.dtype(dtype)
        if kind.kind not in "fiu" or not all(isinstance(each, int) and each >= 0 for each in shape):
            raise ValueError(f"no result has type {dtype} and shape {shape}")
        array = np.frombuffer(bytearray(whole[4 + size :]), kind).reshape(shape)
    except (TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"a kept result cannot be read: {error}") from error
    return str(of), array


def piece_of_is(data: Payload) -> KeptPiece:
    """The answer in a message. ValueError when it is none."""
    if len(data) < _IS.size or len(data) > _IS.size + PIECE_BYTES:
        raise ValueError(f"an answer of {len(data)} bytes")
    number, total, size, first, sum = _IS.unpack_from(data)
    return KeptPiece(number, total, size, first, sum, bytes(data[_IS.size :]))


class KeptRounds:
    """The rounds of one rank before its loop. The script's thread calls `round`, a link's thread `told`."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        incarnation: int,
        tell: Callable[[Tell], None],
        people: Callable[[str], None],
        too_many: Callable[[str], None],
    ) -> None:
        """`too_many` is called, once, with the call whose result is not kept any more, in words."""
        self._others = [*range(rank + 1, ranks), *range(rank)]
        self._is_new, self._incarnation = incarnation > 0, incarnation
        self._tell, self._people, self._too_many = tell, people, too_many
        self.replays = self._is_new
        """Whether results are asked for: others have them, and are beyond these rounds."""
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._kept: dict[int, tuple[bytes, int]] = {}
        """Results, each with its CRC-32."""
        self._bytes, self._begun = 0, 0
        """Bytes of what is kept; number of rounds begun."""
        self._count: int | None = None
        """How many results there are; None: there may be more."""
        self._is_full = False
        self.restarts = ""
        """Why lost ranks are not replaced any more; empty: they are."""
        self._heard: dict[int, KeptPiece] = {}
        """The newest answer of each rank to the question under way."""
        self._asked = 0
        """Number of the result that is asked for."""

    # ---- from the script ----

    def round(self, push: Pushes, of: str, mine: Array, mean: bool, type: Type | None) -> Callable[[], Array]:
        """Begin the next round, or ask for what it gave. Returns a function that waits for the result. SystemExit when
        no rank has what this successor needs; CoveyError when its script calls something else here."""
        number, self._begun = self._begun, self._begun + 1
        if self.replays:
            kept = self._asked_for(number, of)
            return lambda: kept
        handle = push(self._name(number, of), mine, mean=mean, type=type)

        def wait() -> Array:
            found = handle.wait()
            self._keep(number, of, found)
            return found

        return wait

    def check_heals(self) -> None:
        """SystemExit in a successor, where lost ranks are not replaced any more."""
        if self.replays:
            self._asked_for(self._begun, None)

    def over(self) -> None:
        """The loop begins: there are no more of these rounds."""
        with self._changed:
            self._count = self._begun
            self.replays = self._is_new = False

    # ---- from a link ----

    def told(self, told: ToldByRank) -> bool:
        """Handle a message of another rank. Whether it is about kept results; a malformed one is ignored."""
        if told.about == AboutKept.ASK and len(told.data) == _ASK.size:
            self._answer(told)
        elif told.about == AboutKept.IS and told.step == self._incarnation:
            try:
                found = piece_of_is(told.data)
            except ValueError:
                return True
            with self._changed:
                if found.number == self._asked:
                    self._heard[told.rank] = found
                    self._changed.notify_all()
        return told.about in (AboutKept.ASK, AboutKept.IS)

    # ---- inside ----

    def _name(self, number: int, of: str) -> str:
        return f"early/{number % ENDLESS} again {of}" if self._is_full else f"early/{number} {of}"

    def _keep(self, number: int, of: str, found: Array) -> None:
        data = kept_of(of, found)
        with self._changed:
            full = self._is_full
            self._is_full = full or self._bytes + len(data) > KEPT_BYTES_MAX or len(self._kept) >= KEPT_MAX
            if not self._is_full:
                self._kept[number], self._bytes = (data, crc32(data)), self._bytes + len(data)
                return
            self._kept.clear()
        if not full:
            most = f"{KEPT_MAX} results or {format_size(KEPT_BYTES_MAX)}"
            self._too_many(f"{of}, with which more than {most} came before the loop of steps")

    def _answer(self, asked: ToldByRank) -> None:
        number, first = _ASK.unpack(asked.data)
        with self._changed:
            data, sum = self._kept.get(number, (b"", 0))
            count, why = self._count, self.restarts.encode()
        if why:
            head, piece = _IS.pack(number, UNKNOWN, NO_MORE, 0, 0), why[:1024]
        else:
            said = NOTHING if self._is_new and not data else UNKNOWN if count is None else count
            head = _IS.pack(number, said, len(data), first, sum)
            piece = data[first : first + PIECE_BYTES]
        self._tell(Tell(asked.rank, AboutKept.IS, asked.step, head + piece))

    def _asked_for(self, number: int, of: str | None) -> Array:
        """The result with this number, of another rank. `of` None: only ask whether lost ranks are replaced."""
        into, sum, pause_s, told_s = bytearray(), None, FIRST_ASK_S, time.monotonic() + PATIENCE_S
        turn = 0
        while True:
            rank = self._others[turn % len(self._others)]
            found = self._ask(rank, number, len(into), pause_s)
            if found is None or not found.piece:
                turn += 1
                pause_s = min(2 * pause_s, ASK_S)
            if found is not None:
                self._check(found, number, of)
                if of is None:
                    return np.zeros(0, np.float32)
                if found.piece and found.first == len(into) and sum in (None, found.sum):
                    into += found.piece
                    sum = found.sum
                if len(into) == found.size > 0:
                    if crc32(into) == sum:
                        return self._came(number, of, into)
                    into, sum = bytearray(), None
            if time.monotonic() > told_s:
                told_s += PATIENCE_S
                self._people(f"took over from a rank that was lost, and asks the others for the result of {of}")

    def _ask(self, rank: int, number: int, first: int, within_s: float) -> KeptPiece | None:
        with self._changed:
            if self._asked != number:
                self._asked, self._heard = number, {}
            else:
                self._heard.pop(rank, None)
        self._tell(Tell(rank, AboutKept.ASK, self._incarnation, _ASK.pack(number, first)))
        with self._changed:
            self._changed.wait_for(lambda: rank in self._heard, within_s)
            return self._heard.get(rank)

    def _check(self, found: KeptPiece, number: int, of: str | None) -> None:
        if found.size == NO_MORE:
            self._ends(f"lost ranks of this job are not replaced any more: {found.piece.decode(errors='replace')}")
        with self._changed:
            heard = [self._heard.get(rank) for rank in self._others]
        if all(each is not None and each.total == NOTHING for each in heard):
            self._ends("all ranks of this job were lost, and with them what they had agreed on before their loop")
        if of is not None and 0 <= found.total <= number:
            why = f"it calls {of} as collective {number} before its loop, and the others called {found.total} there"
            raise CoveyError(CANNOT, why, "run the same script in all processes of a job")

    def _came(self, number: int, of: str, data: bytearray) -> Array:
        called, array = array_of_kept(data)
        if called != of:
            why = f"it calls {of} as collective {number} before its loop, and the others called {called} there"
            raise CoveyError(CANNOT, why, "call the same before the loop in a process that takes over")
        with self._changed:
            self._kept[number], self._bytes = (bytes(data), crc32(data)), self._bytes + len(data)
        return array

    def _ends(self, why: str) -> None:
        self._people(f"ends: {CANNOT}: {why}")
        raise SystemExit(EXIT_STATE_LOST)
