"""A volume with parity (`--parity K+1`) keeps each slab at K + 1 lenders, none of which has all of it.

Page p of a slab lies in row p // K and column p % K: member c of the slab has column c, and member K has a *slot* for
each row, which is the XOR of the row's pages, so that any one of them follows from the others (RAID 4 and 5, Patterson,
Gibson and Katz 1988; over hosts as in Hydra, FAST 2022). A run of pages that fills rows is written without reading.

What stands in a slot is told by its version, which every lender keeps beside a page (`KIND_BITS`):

    kind 0      the XOR of the row's pages, of which none is newer than the slot: whoever writes a row has its pages at
                their members before the slot is sent
    kind c + 1  a copy of the page of column c, which had no member when the row was written. The slot is at its lender
                before the row's other pages are sent, so at no moment is a page of that column in no place

So from versions alone follows which page may be made from a slot, after whatever crash: a slot of kind 0 that is older
than a page of its row is no parity, and is never taken for one.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

DATA_MIN, DATA_MAX = 2, 7
"""Least and most columns with pages. One would be a mirrored volume; a slab has at most 8 members."""
KIND_BITS = 4
"""Lower bits of a slot's version, which tell its kind; in versions of pages they are 0."""
KINDS = 1 << KIND_BITS
_KIND = np.uint64(KINDS - 1)


def parsed(text: object) -> int:
    """Number of data members in text of the form `K+1`. ValueError says what is wrong, for people."""
    data, plus, one = str(text).replace(" ", "").partition("+")
    if not (data.isascii() and data.isdigit() and len(data) < 4 and plus and one == "1"):
        raise ValueError(f"invalid parity {text!r}: expected K+1, such as 2+1 or 4+1")
    if not DATA_MIN <= int(data) <= DATA_MAX:
        raise ValueError(f"{text!r}: {DATA_MIN} to {DATA_MAX} members with pages, and one with their parity")
    return int(data)


def rows_of(first: int, count: int, data: int) -> tuple[int, int]:
    """The first row of a run of pages of a slab, and how many rows it covers."""
    row = first // data
    return row, (first + count - 1) // data - row + 1


def xor(parts: Iterable["NDArray[np.uint8]"]) -> "NDArray[np.uint8]":
    """Xor of pages of one shape: the parity of a row's pages, or the missing page from the parity and the other
    pages."""
    found: NDArray[np.uint8] = np.bitwise_xor.reduce(list(parts))
    return found


def slot_version(version: int, column: int | None) -> int:
    """Version of a slot that is written under version `version`. `column`: whose copy it is; None: it is parity."""
    return version if column is None else version | (column + 1)


def is_parity(slots: "NDArray[np.uint64]", newest: "NDArray[np.uint64]") -> "NDArray[np.bool_]":
    """The rows in which the slot is the XOR of the pages. `slots`, shape (rows,); `newest`, shape (rows, columns):
    versions of the pages that are known. For a page that is not known, the slot has whatever was acknowledged."""
    found: NDArray[np.bool_] = (slots > 0) & ((slots & _KIND) == 0) & (slots >= newest.max(axis=1))
    return found


def is_copy(slots: "NDArray[np.uint64]", newest: "NDArray[np.uint64]", column: int) -> "NDArray[np.bool_]":
    """The rows in which the slot is the newest page of that column; `newest`, shape (rows,), are the column's
    versions."""
    found: NDArray[np.bool_] = ((slots & _KIND) == column + 1) & (slots >= newest)
    return found


class SettledRows(NamedTuple):
    """The state of a slab, from what its members report."""

    newest: "NDArray[np.uint64]"
    """Newest version of each page, shape (rows, columns); 0: never written, or lost."""
    lost: bool
    """A page may have been lost: one that reads as never written may have had content."""
    stale: "NDArray[np.int64]"
    """Rows whose parity is made before anything is read: a page is newer than the slot, so its write was not
    acknowledged; read now and lost with its member afterwards, it would go back in time."""


def settled(columns: Sequence["NDArray[np.uint64] | None"], slots: "NDArray[np.uint64] | None") -> SettledRows:
    """The newest version of each page of these rows, and what is lost. `columns`: the versions that members report,
    shape (rows,) each; None: no member is left that knows. `slots`: the same for slots. A page without a member is what
    the slot of its row says, if that says it; or it is lost, if it was there. A copy may be newer than what its member
    has: the member missed the write, and the process ended before the disk knew."""
    known = [found for found in columns if found is not None]
    rows = len(next(found for found in (*known, slots) if found is not None))
    newest = np.zeros((rows, len(columns)), np.uint64)
    for column, found in enumerate(columns):
        if found is not None:
            newest[:, column] = found
    absent = [column for column, found in enumerate(columns) if found is None]
    none: NDArray[np.int64] = np.zeros(0, np.int64)
    if slots is None:
        return SettledRows(newest, bool(absent), none)
    parity = is_parity(slots, newest) if len(absent) < 2 else np.zeros(rows, np.bool_)
    was_there = (slots > 0) | (newest.max(axis=1) > 0)
    lost = False
    for column in absent:
        has = parity | is_copy(slots, newest[:, column], column)
        lost = lost or bool((was_there & ~has).any())
        newest[:, column] = np.where(has, slots & ~_KIND, np.uint64(0))
    if absent:
        return SettledRows(newest, lost, none)
    copied = np.zeros(rows, np.bool_)
    for column in range(len(columns)):
        has = is_copy(slots, newest[:, column], column)
        newest[:, column] = np.where(has, slots & ~_KIND, newest[:, column])
        copied |= has
    return SettledRows(newest, False, np.flatnonzero(was_there & ~parity & ~copied))
