"""Whether what clients were answered fits one order of their requests: linearizability (Herlihy and Wing, 1990).

A history is a list of requests, each with the time at which a client made it and the time at which it had the answer.
It is linearizable when every request can be given a moment between the two so that a single copy of the state, which
performs the requests in the order of these moments, gives each client its answer. A request without an answer may have
been performed at any time after it was made, or never.

The search is that of Wing and Gong (1993) with the memory of Lowe (2017): take any request that began before the first
answer that is still to be explained, perform it, go on; where nothing fits, take the last one back. A pair (which
requests are performed, state) is looked at once. A history of several keys, each of which has a state of its own, is
linearizable when that of each key is (Herlihy and Wing, section 3.3), so keys are checked one by one.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import msgspec

TOLD_MAX = 12
"""The most requests that are told of a history that does not fit."""


class Request(msgspec.Struct, frozen=True):
    """One request of a client, and what it was answered."""

    client: str
    key: str
    asked: Any
    began_s: float
    ended_s: float = math.inf
    """When the answer was there; infinite: there was none."""
    answer: Any = None

    @property
    def is_answered(self) -> bool:
        return self.ended_s < math.inf

    def told(self) -> str:
        until = f"{self.ended_s:.6f} s: {self.answer!r}" if self.is_answered else "no answer"
        return f"{self.client} {self.key} {self.asked!r} {self.began_s:.6f} to {until}"


Performed = Callable[[Any, Any], tuple[Hashable, Any]]
"""What one copy of a key's state does: (state, what is asked) -> (the state afterwards, the answer)."""


def contradiction(history: Iterable[Request], first: Hashable, perform: Performed) -> str:
    """Why these answers fit no order of the requests, with the history of one key; empty when they do. `first` is the
    state of each key at the beginning."""
    by_key: dict[str, list[Request]] = {}
    for request in history:
        by_key.setdefault(request.key, []).append(request)
    for key, requests in by_key.items():
        if not fits(requests, first, perform):
            told = "\n".join(request.told() for request in _shortest(requests, first, perform)[-TOLD_MAX:])
            return f"no order of the requests about {key} explains all answers:\n{told}"
    return ""


def _shortest(requests: Sequence[Request], first: Hashable, perform: Performed) -> list[Request]:
    """The requests up to the first answer that does not fit those before it: what was answered later counts as not
    answered."""
    ends_s = sorted(request.ended_s for request in requests if request.is_answered)
    for end_s in ends_s:
        known = [_as_of(request, end_s) for request in requests if request.began_s <= end_s]
        if not fits(known, first, perform):
            return sorted(known, key=lambda request: (request.ended_s, request.began_s))
    return list(requests)


def _as_of(request: Request, end_s: float) -> Request:
    if request.ended_s <= end_s:
        return request
    return msgspec.structs.replace(request, ended_s=math.inf, answer=None)


def fits(requests: Sequence[Request], first: Hashable, perform: Performed) -> bool:
    """Whether some order of these requests, all about one key, explains every answer."""
    row = _Row(requests)
    state, performed = first, 0
    taken: list[tuple[int, Hashable]] = []
    looked_at: set[tuple[int, Hashable]] = set()
    at = row.first
    while row.unexplained:
        request = row.call_at(at)
        if request is None:  # an answer, for which its request must have been performed by now
            if not taken:
                return False
            number, state = taken.pop()
            performed ^= 1 << number
            at = row.put_back(number)
            continue
        then, answer = perform(state, requests[request].asked)
        seen = (performed | 1 << request, then)
        wrong = requests[request].is_answered and answer != requests[request].answer
        if wrong or seen in looked_at:
            at = row.after(at)
            continue
        looked_at.add(seen)
        taken.append((request, state))
        performed, state = seen
        row.take_out(request)
        at = row.first
    return True


class _Row:
    """Calls and answers in the order of time, as a linked list out of which requests are taken and put back. At the
    same moment calls come before answers: such requests overlap."""

    def __init__(self, requests: Sequence[Request]) -> None:
        count = len(requests)
        self._count = count
        calls = [(request.began_s, 0, number) for number, request in enumerate(requests)]
        answers = [(request.ended_s, 1, number + count) for number, request in enumerate(requests)]
        order = [place for _, _, place in sorted(calls + answers)]
        self._head = 2 * count
        self._next, self._last = [self._head] * (2 * count + 1), [self._head] * (2 * count + 1)
        for one, other in zip([self._head, *order], [*order, self._head], strict=True):
            self._next[one], self._last[other] = other, one
        self._answered = [request.is_answered for request in requests]
        self.unexplained = sum(self._answered)
        """The number of answers that are still to be explained."""

    @property
    def first(self) -> int:
        return self._next[self._head]

    def after(self, place: int) -> int:
        return self._next[place]

    def call_at(self, place: int) -> int | None:
        """The number of the request whose call this is; None for an answer."""
        return place if place < self._count else None

    def take_out(self, number: int) -> None:
        for place in (number, number + self._count):
            self._next[self._last[place]], self._last[self._next[place]] = self._next[place], self._last[place]
        self.unexplained -= self._answered[number]

    def put_back(self, number: int) -> int:
        """Put a request back where it was; returns what comes after its call."""
        for place in (number + self._count, number):
            self._next[self._last[place]] = self._last[self._next[place]] = place
        self.unexplained += self._answered[number]
        return self._next[number]
