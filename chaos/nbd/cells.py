"""What each run of bytes of a block device may hold: `cells` of some hundred bytes, each with its number and version.

A cell is written whole, so its content says which cell it is and its version. Cells need not divide pages: with cells
of 500 bytes every request begins and ends at an odd offset of a page.

    acknowledged    reads that begin from now on find this version or a later one
    possible        the newest version that was ever sent: reads find no later one
    loose           versions of requests without an answer, since their connection ended or the volume failed: they may
                    appear at any time, even after what was acknowledged later

Zeros, by WRITE_ZEROES or TRIM, are a version too; it shows as zeros. A volume takes a page whole or not at all, so
what lies in one page is of one version; a cell that lies in two may be of two, while it is written and when that
failed.
"""

import functools
import struct
import zlib
from collections.abc import Callable

_HEAD = struct.Struct("<IIII")
Say = Callable[[str], None]


class Cells:
    """Cells of one device. `wrong` is told of bytes that were never written there, `stale` of an older version."""

    def __init__(self, volume: str, size_bytes: int, cell_bytes: int, page_bytes: int, wrong: Say, stale: Say) -> None:
        self.volume, self.cell_bytes, self.page_bytes = volume, cell_bytes, page_bytes
        self._wrong, self._stale = wrong, stale
        self.size_bytes, self.count = size_bytes, size_bytes // cell_bytes
        self._key = zlib.crc32(volume.encode())
        self._acknowledged = [0] * self.count
        self._possible = [0] * self.count
        self._zeros: set[tuple[int, int]] = {(cell, 0) for cell in range(self.count)}
        """(cell, version) of each version that is zeros."""
        self._loose: dict[int, set[int]] = {}
        self.checked = self.written = 0
        """Numbers of cells that were read and checked, and that were acknowledged."""

    @property
    def loose(self) -> int:
        """Number of cells of which a version may come late."""
        return len(self._loose)

    def content(self, cell: int, version: int) -> bytes:
        return _content(self._key, self.cell_bytes, cell, version)

    # ---- writes ----

    def sending(self, first: int, count: int, zeros: bool) -> list[int]:
        """Note that these cells are sent; returns the versions that they get."""
        for cell in range(first, first + count):
            self._possible[cell] += 1
            if zeros:
                self._zeros.add((cell, self._possible[cell]))
        return self._possible[first : first + count]

    def acknowledge(self, first: int, versions: list[int]) -> None:
        for cell, version in enumerate(versions, first):
            self._acknowledged[cell] = max(version, self._acknowledged[cell])
        self.written += len(versions)

    def let_loose(self, first: int, versions: list[int]) -> None:
        """Note that the request has no answer, or an answer that it failed."""
        for cell, version in enumerate(versions, first):
            self._loose.setdefault(cell, set()).add(version)

    # ---- reads ----

    def since(self, first: int, count: int) -> list[int]:
        """The least versions that a read which begins now must find."""
        return self._acknowledged[first : first + count]

    def check(self, first: int, since: list[int], data: bytes) -> None:
        """Check what a read found. `since`: the least versions when it was sent."""
        size = self.cell_bytes
        for at, least in enumerate(since):
            self._check(first + at, least, data[at * size : (at + 1) * size])
        self.checked += len(since)

    def _check(self, cell: int, least: int, data: bytes) -> None:
        versions = self._found_later(cell, least)
        if any(data == self._shown(cell, version) for version in versions):
            return
        start = cell * self.cell_bytes
        edge = -(-(start + 1) // self.page_bytes) * self.page_bytes - start
        for first, end in ((0, edge), (edge, self.cell_bytes)):
            piece = data[first:end]
            if any(piece == self._shown(cell, version)[first:end] for version in versions):
                continue
            where = f"bytes {start + first} to {start + min(end, self.cell_bytes)} of {self.volume}"
            older = [version for version in range(least) if piece == self._shown(cell, version)[first:end]]
            if older:
                self._stale(f"{where} are at version {older[-1]}, but {least} was acknowledged")
            else:
                self._wrong(f"{where} hold what was never written there: {piece[:24].hex()}")

    def _found_later(self, cell: int, least: int) -> list[int]:
        """Versions that a read may find which began when `least` was acknowledged, and is over now."""
        return sorted({*range(least, self._possible[cell] + 1), *self._loose.get(cell, ())})

    def _shown(self, cell: int, version: int) -> bytes:
        return bytes(self.cell_bytes) if (cell, version) in self._zeros else self.content(cell, version)

    def check_zeros(self, first: int, since: list[int]) -> None:
        """Check cells that the volume calls zeros."""
        for cell, least in enumerate(since, first):
            if not any((cell, version) in self._zeros for version in self._found_later(cell, least)):
                at = cell * self.cell_bytes
                self._stale(f"bytes from {at} on of {self.volume} are called zeros; version {least} was acknowledged")


@functools.lru_cache(maxsize=1 << 14)
def _content(key: int, cell_bytes: int, cell: int, version: int) -> bytes:
    """What a version of a cell holds, remembered: a check compares it with each read."""
    body = bytes([(cell * 7 + version * 13) % 255 + 1]) * (cell_bytes - _HEAD.size)
    return _HEAD.pack(key, cell, version, zlib.crc32(body, key ^ cell ^ version)) + body
