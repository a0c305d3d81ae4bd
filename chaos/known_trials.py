"""What was tried before and is as it was: results of planted bugs, from one run to the next.

    covey-chaos mutants --known bench/results/mutants.jsonl

A line for each mutant that was caught: what noticed it, and a digest of its own text, the file that it changes, and the
files of its tests. One whose digest is the same is not tried again. What else its tests use may have changed: without
the file all are tried anew.
"""

import contextlib
import hashlib
from pathlib import Path

import msgspec

from chaos.planted import ROOT, Mutant


class KnownTrial(msgspec.Struct, frozen=True):
    """A mutant that was caught. `cpu_s`: how long the simulator was asked for, in CPU seconds."""

    name: str
    digest: str
    cpu_s: float = 0.0
    by_tests: str = ""
    by_simulator: str = ""


def digest_of(mutant: Mutant, root: Path = ROOT) -> str:
    """A digest of what the check of a mutant depends on first of all."""
    found = hashlib.blake2b(msgspec.json.encode(mutant), digest_size=12)
    for file in sorted({mutant.file, *(test.partition("::")[0] for test in mutant.tests)}):
        with contextlib.suppress(OSError):
            found.update(b"\0" + file.encode() + b"\0" + (root / file).read_bytes())
    return found.hexdigest()


class KnownTrials:
    """The file of what was caught. Raises ValueError, naming the line, when it cannot be read."""

    def __init__(self, path: Path, root: Path = ROOT) -> None:
        self._path, self._root = path, root
        self._known: dict[str, KnownTrial] = {}
        lines = path.read_bytes().splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                known = msgspec.json.decode(line, type=KnownTrial)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}, line {number}: {error}; next: delete the line") from error
            self._known[known.name] = known

    def of(self, mutant: Mutant, cpu_s: float) -> KnownTrial | None:
        """What noticed this mutant, as it is now and with so many CPU seconds for the simulator; None: it is to be
        tried."""
        known = self._known.get(mutant.name)
        if known is None or known.digest != digest_of(mutant, self._root):
            return None
        asked_enough = mutant.hosts == "one" or bool(known.by_simulator) or known.cpu_s >= cpu_s
        return known if asked_enough else None

    def add(self, mutant: Mutant, cpu_s: float, by_tests: str, by_simulator: str) -> None:
        """Write down a mutant that was caught, and what noticed it."""
        known = KnownTrial(mutant.name, digest_of(mutant, self._root), cpu_s, by_tests, by_simulator[:100])
        self._known[mutant.name] = known
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(known) + b"\n")

    def tidy(self) -> None:
        """One line for each mutant, by name."""
        lines = [msgspec.json.encode(self._known[name]) + b"\n" for name in sorted(self._known)]
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_bytes(b"".join(lines))
        new.replace(self._path)
