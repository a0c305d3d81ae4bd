"""A rank's side of the rounds in which all ranks gather what is each one's own (`covey.owns`)."""

import threading
from collections.abc import Callable
from typing import Protocol

from covey import owns
from covey.aggregator_rounds import Waits
from covey.sum_order import Order
from covey.tensor_arrays import Array
from covey.tensorwire import Declared


class Sums(Protocol):
    """Where rows are added: `covey.block_rounds`. What is pushed soon goes out with what is pushed next."""

    part_bytes: int

    @property
    def order(self) -> Order: ...

    def is_declared(self, name: str) -> bool: ...
    def declare(self, declared: Declared, data: Array) -> None: ...
    def push_soon(self, name: str, data: Array) -> None: ...
    def wait(self, name: str, waits: Waits, out: Array | None) -> Array: ...


class OwnGather:
    """Of one rank. In each step `begin`, before anything else is pushed, and `end`, before any result is used; of these
    threads may call the second at the same time."""

    def __init__(self, rank: int, ranks: int, step: int, sums: Sums) -> None:
        self.ranks, self._rank, self._sums = ranks, rank, sums
        self.owns = owns.none_yet(ranks, step)
        """At the beginning of this step, and at its end once it was gathered."""
        self._step = step
        self._own: bytes | None = None
        self._room = self.owns.room
        """Of the rows that are under way."""
        self._is_under_way = False
        self._ending = threading.Lock()

    def begin(self, step: int, own: bytes | None) -> None:
        """In this step; `own`: as it is at its end."""
        if self.owns.is_asked:
            self._step, self._own, self._room = step, own, self.owns.room
            self._push()
            self._is_under_way = True

    def end(self, waits: Callable[[str], Waits]) -> None:
        """Once what is every rank's own is here. Errors of `waits`, which is given the name of a tensor; ValueError
        when rows are not added."""
        if not self._is_under_way:
            return
        with self._ending:
            if not self._is_under_way:
                return
            while (needed := owns.room_needed(rows := self._pulled(waits))) > self._room:
                self._room = owns.larger(self._room, needed)
                self._push()
            self.owns = owns.merged(self.owns, rows, self._step + 1)
            self._is_under_way = False

    def _push(self) -> None:
        rows = owns.rows_of(self._rank, self.ranks, self.owns.each[self._rank], self._own, self._room)
        name, sums = owns.name_of(self._room), self._sums
        if not sums.is_declared(name):
            sums.declare(Declared(name, "grad", rows.shape, sums.part_bytes, sums.order), rows)
        sums.push_soon(name, rows)

    def _pulled(self, waits: Callable[[str], Waits]) -> Array:
        name = owns.name_of(self._room)
        return self._sums.wait(name, waits(name), None)
