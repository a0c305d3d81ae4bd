"""A user of remote memory that knows what every page must hold.

    pages.py SOCKET VOLUME MIB ORACLE

Writes and reads pages of a volume, busy for some seconds and idle for some, until its stdin ends; then it reads all of
them and prints one line. ORACLE is a file of two numbers a page: the version being written, and the version that was
acknowledged. It is written before and after each write and survives this process, which may be killed at any time; a
page that holds neither number is wrong: a line in ORACLE.wrong.
"""

import mmap
import os
import random
import select
import struct
import sys
import time
from pathlib import Path

from covey.core.units import MIB
from covey.remote import RemoteMemory, RemoteMemoryError

PAGE = 4096
_PAIR = struct.Struct("<QQ")
BUSY_S, IDLE_S = 20.0, 15.0
"""Seconds that the user is busy, and idle: what breaks between two requests must be noticed without one."""


def content(page: int, version: int) -> bytes:
    return random.Random(f"{page}/{version}").randbytes(PAGE) if version else bytes(PAGE)


class Oracle:
    def __init__(self, path: Path, pages: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, pages * _PAIR.size)
        self._map = mmap.mmap(self._file, pages * _PAIR.size)
        self._wrong = path.with_name(path.name + ".wrong")

    def pair(self, page: int) -> tuple[int, int]:
        """The version being written, and the version acknowledged."""
        found: tuple[int, int] = _PAIR.unpack_from(self._map, page * _PAIR.size)
        return found

    def set(self, page: int, writing: int, acknowledged: int) -> None:
        _PAIR.pack_into(self._map, page * _PAIR.size, writing, acknowledged)

    def check(self, page: int, data: bytes) -> bool:
        """Whether the page holds what it may; an interrupted write that is seen counts from then on."""
        writing, acknowledged = self.pair(page)
        if data == content(page, acknowledged):
            return True
        if data == content(page, writing):
            self.set(page, writing, writing)
            return True
        older = next((version for version in range(acknowledged) if data == content(page, version)), None)
        with self._wrong.open("a") as out:
            held = "what was never written there" if older is None else f"version {older}"
            out.write(f"{time.time():.3f} page {page} holds {held}, acknowledged is {acknowledged}\n")
        return False


class Pager:
    def __init__(self, memory: RemoteMemory, oracle: Oracle, pages: int, rng: random.Random) -> None:
        self._memory, self._oracle, self._pages, self._rng = memory, oracle, pages, rng
        self.operations = self.wrong = self.failed = 0

    def step(self) -> None:
        page = self._rng.randrange(self._pages)
        try:
            if self._rng.random() < 0.5:
                self._read(page)
            else:
                self._write(page)
            self.operations += 1
        except RemoteMemoryError as error:
            self.failed += 1
            print(f"failed: {error}", flush=True)
            time.sleep(1.0)

    def _write(self, page: int) -> None:
        writing, acknowledged = self._oracle.pair(page)
        version = max(writing, acknowledged) + 1
        if writing != acknowledged:
            self._read(page)  # of an interrupted write: which of the two is it?
            _, acknowledged = self._oracle.pair(page)
        self._oracle.set(page, version, acknowledged)
        self._memory.write(page * PAGE, content(page, version))
        self._oracle.set(page, version, version)

    def _read(self, page: int) -> None:
        self.wrong += not self._oracle.check(page, self._memory.read(page * PAGE, PAGE))

    def read_all(self) -> None:
        for page in range(self._pages):
            self._read(page)


def main() -> None:
    path, volume, mib, oracle = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    pages = mib * MIB // PAGE
    memory = RemoteMemory.open(volume, mib * MIB, path)
    pager = Pager(memory, Oracle(oracle, pages), pages, random.Random())
    print("open", flush=True)
    until_s, busy = time.monotonic() + BUSY_S, True
    while not select.select([0], [], [], 0.002 if busy else 0.5)[0]:
        if time.monotonic() > until_s:
            busy = not busy
            until_s = time.monotonic() + (BUSY_S if busy else IDLE_S)
        if busy:
            pager.step()
    pager.read_all()
    print(f"ended: {pager.operations} operations, {pager.failed} failed, {pager.wrong} wrong", flush=True)


if __name__ == "__main__":
    main()
