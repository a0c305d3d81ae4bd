"""A checkpoint in shards: a file of each rank, and one file that names them all and is written last.

    state.json                                  the manifest: step, number of ranks, each shard's size and checksum
    state.json-120-5f0c2a91.shards/rank-00000.safetensors
                                   rank-00001.safetensors                   (`covey.healing.checkpoint`)

A set is complete once the manifest that names it has been moved to its place; the set before it is there until then,
and removed afterwards.
"""

import glob
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from covey.core.errors import CoveyError
from covey.healing.checkpoint import VERSION, Checkpoint, SavedState, opened, put_file, refused
from covey.healing.checkpoint import save as save_file
from covey.tensors.numbers.arrays import Array
from covey.wire.checksum import crc32

MADE_SHARDS = "torch shards"
MANIFEST = "state.json"
"""Name of the manifest where none is given, in the job's folder."""
MANIFEST_BYTES_MAX = 16 << 20
RANKS_MAX = 1 << 20
_FOLDER = re.compile(r"-\d+-[0-9a-f]{8}\.shards")


class ShardFile(NamedTuple):
    """A shard, as the manifest names it."""

    bytes: int
    number: int
    """Made of all that is in it, as `covey.healing.checkpoint.save` returns it."""


class ShardSet(NamedTuple):
    """A checkpoint in shards."""

    path: Path
    """Place of its manifest."""
    step: int
    """The step with which ranks continue."""
    folder: str
    shards: tuple[ShardFile, ...]
    number: int
    """Made of the manifest."""

    @property
    def about(self) -> Checkpoint:
        """What it says, as a checkpoint in one file does."""
        return Checkpoint(self.step, (None,) * len(self.shards), MADE_SHARDS, self.number)

    def file(self, rank: int) -> Path:
        return file_of(self.path, self.folder, rank)


def folder_of(path: Path, step: int, number: int) -> str:
    """Name of the folder of a new set."""
    return f"{path.name}-{step}-{number:08x}.shards"


def file_of(path: Path, folder: str, rank: int) -> Path:
    return path.parent / folder / f"rank-{rank:05d}.safetensors"


def write_shard(file: Path, about: Checkpoint, arrays: Mapping[str, Array], types: Mapping[str, str]) -> ShardFile:
    """Write one rank's shard. CoveyError as of `covey.healing.checkpoint.save`."""
    number = save_file(file, about, arrays, types)
    return ShardFile(file.stat().st_size, number)


def complete(path: Path, step: int, folder: str, shards: Sequence[ShardFile]) -> None:
    """Write the manifest of a set whose shards are all there, and remove the sets before it. CoveyError when it cannot
    be written; then the set before it counts."""
    said = {"covey": VERSION, "made": MADE_SHARDS, "step": step, "folder": folder, "shards": [list(s) for s in shards]}
    text = json.dumps(said | {"crc32": f"{_number(said):08x}"}, indent=1).encode()
    try:
        put_file(path, [memoryview(text)])
    except OSError as error:
        raise CoveyError(f"{path} was not written", error.strerror or str(error), "make room there") from error
    for old in path.parent.glob(f"{glob.escape(path.name)}-*.shards"):
        if old.name != folder and _FOLDER.fullmatch(old.name.removeprefix(path.name)):
            remove(old)


def save_together(
    path: Path, step: int, rank: int, write: Callable[[Path], ShardFile], all_say: Callable[[Any], list[Any]]
) -> None:
    """Write a set, of which each rank writes its shard by `write`, at the same time as all others. `all_say` returns,
    by rank, what each gave it. CoveyError on all ranks when one cannot write; then the set before it counts."""
    number = all_say(secrets.randbits(32))[0]
    folder = folder_of(path, step, number)
    shards = all_say(_tried(lambda: list(write(file_of(path, folder, rank)))))
    failed = next((at for at, each in enumerate(shards) if isinstance(each, dict)), None)
    if failed is not None:
        if rank == 0:
            remove(path.parent / folder)
        what, why, next_ = shards[failed]["error"]
        raise CoveyError(what, f"rank {failed}: {why}", next_)
    files = [ShardFile(*each) for each in shards]
    end = all_say(_tried(lambda: complete(path, step, folder, files)) if rank == 0 else None)[0]
    if end is not None:
        raise CoveyError(*end["error"])


def _tried(do: Callable[[], Any]) -> Any:
    """What it returns, or the three lines of its error."""
    try:
        return do()
    except CoveyError as error:
        return {"error": [error.what, error.why, error.next]}


def remove(folder: Path) -> None:
    """Remove the shards of a set that does not count."""
    with suppress(OSError):
        for each in (*folder.glob("rank-*.safetensors"), *folder.glob(".rank-*.safetensors.*")):
            each.unlink()
        folder.rmdir()


def opened_set(path: Path) -> ShardSet | None:
    """The set whose manifest is there; None when there is none. CoveyError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            data = file.read(MANIFEST_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refused(path, error.strerror or str(error)) from error
    if not data.startswith(b"{") or len(data) > MANIFEST_BYTES_MAX:
        raise refused(path, f"it has {len(data)} bytes, and is no checkpoint in shards, or the beginning of one")
    try:
        return _read(path, json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise refused(path, f"it cannot be read: {error!r}"[:300]) from error


def _read(path: Path, said: dict[str, Any]) -> ShardSet:
    """The set of this manifest. CoveyError, ValueError, TypeError, KeyError, AttributeError."""
    number = int(said.pop("crc32"), 16)
    if said.get("covey") != VERSION or said.get("made") != MADE_SHARDS:
        why = f"its format is version {said.get('covey')} of {said.get('made')}, and this is {VERSION} of {MADE_SHARDS}"
        raise refused(path, why, "use the Covey of then")
    if _number(said) != number:
        raise refused(path, "its content is not what was written: its checksum differs")
    step, folder = int(said["step"]), said["folder"]
    shards = tuple(ShardFile(int(size), int(crc)) for size, crc in said["shards"])
    if step < 0 or not 0 < len(shards) <= RANKS_MAX or not _FOLDER.fullmatch(folder.removeprefix(path.name)):
        raise ValueError(f"step {step}, {len(shards)} shards in {folder!r}")
    return ShardSet(path, step, folder, shards, number)


def opened_shard(found: ShardSet, rank: int) -> SavedState:
    """The shard of this rank. CoveyError when it is not there, cut short, or of another set."""
    file, wanted = found.file(rank), found.shards[rank]
    shard = opened(file)
    if shard is None:
        raise refused(found.path, f"{file} is not there, and the manifest names it")
    if (size := os.stat(file).st_size) != wanted.bytes or shard.about.number != wanted.number:
        why = f"{file} has {size} bytes and number {shard.about.number:08x}, and the manifest says {wanted.bytes}"
        raise refused(found.path, f"{why} and {wanted.number:08x}")
    return shard


class PartOfSet:
    """One rank's shard of a set, as the checkpoint with which that rank begins."""

    def __init__(self, found: ShardSet, shard: SavedState) -> None:
        self.path: Path = found.path
        self.about: Checkpoint = shard.about._replace(number=found.number)
        self._shard = shard
        self.own_of, self.owns, self.arrays = shard.own_of, shard.owns, shard.arrays


def opened_part(path: Path, rank: int, ranks: int) -> PartOfSet | None:
    """This rank's part of the set whose manifest is there; None when there is none. CoveyError when it cannot be read,
    or belongs to another number of ranks."""
    found = opened_set(path)
    if found is None:
        return None
    check_ranks(found, ranks)
    return PartOfSet(found, opened_shard(found, rank))


def check_ranks(found: ShardSet, ranks: int) -> None:
    """CoveyError where the set belongs to another number of ranks."""
    if len(found.shards) != ranks:
        why = f"it has the shards of {len(found.shards)} ranks, and this job has {ranks}"
        raise refused(found.path, why, f"submit the job with --workers {len(found.shards)}")


def _number(said: Mapping[str, Any]) -> int:
    """CRC-32 of what a manifest says; never 0."""
    return crc32(json.dumps(said, sort_keys=True).encode()) or 1
