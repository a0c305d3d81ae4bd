"""The files of one saved step of a job's models, of which each rank has written the Blocks that it keeps.

    model.json                                     the list: step, tensors, and each file's size and checksum
    model.json-300-5f0c2a91.saved/rank-00000.safetensors      (`covey.healing.checkpoint`)
                                  rank-00002.safetensors

A file has parts of tensors and of their moments, in the format of safetensors; which part of which tensor an array is,
its header says (`__metadata__`, `own`). A step is saved once the list that names its files has been moved to its place:
until then the list of the step before is there, and its files are removed afterwards.
"""

import glob
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from covey.core.errors import CoveyError
from covey.healing.checkpoint import VERSION, Checkpoint, SavedState, opened, put_file, refused
from covey.healing.checkpoint import save as save_file
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.tensor_wire import TYPES, Declared, Type
from covey.tensors.numbers.types import NUMBERS
from covey.wire.checksum import crc32

MADE = "tensors"
LIST_BYTES_MAX = 64 << 20
"""Most bytes of a list."""
ARRAYS_MAX = 3
"""Arrays of a tensor: its parameters, and two moments at most."""
_FOLDER = re.compile(r"-(\d+)-[0-9a-f]{8}\.saved")
_FILE = re.compile(r"rank-(\d{5,7})\.safetensors")


class SavedTensor(NamedTuple):
    """A saved tensor."""

    type: Type
    shape: tuple[int, ...]
    moments: int

    @property
    def elements(self) -> int:
        return int(np.prod([1, *self.shape], dtype=object))

    def dtype(self, which: int) -> np.dtype[Any]:
        """The type in which numpy holds the parameters (0) or a moment."""
        return NUMBERS[self.type].wide if which else NUMBERS[self.type].stored


class Part(NamedTuple):
    """Some elements of one array of a tensor: of its parameters (`which` is 0), or of its first or second moment."""

    name: str
    which: int
    first: int
    numbers: Array


class File(NamedTuple):
    """One rank's file, as the list names it."""

    rank: int
    bytes: int
    number: int
    """Made of all that is in it, as `covey.healing.checkpoint.save` returns it."""


class TensorSet(NamedTuple):
    """A saved step, of which the list was read."""

    path: Path
    """Place of the list."""
    step: int
    """Number of steps that each optimizer has made."""
    folder: str
    tensors: Mapping[str, SavedTensor]
    files: tuple[File, ...]

    @property
    def about(self) -> Checkpoint:
        """What it says, as a checkpoint in one file does."""
        return Checkpoint(self.step, (None,), MADE)


def kind_of(declared: Declared) -> SavedTensor:
    return SavedTensor(declared.type, declared.shape, declared.moments)


def folder_of(path: Path, step: int, start: int) -> Path:
    """The folder of one saved step. `start`: a number of the start of the job, in which all ranks agree."""
    return path.parent / f"{path.name}-{step}-{start & 0xFFFFFFFF:08x}.saved"


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"


def write_file(folder: Path, rank: int, step: int, parts: Sequence[Part], kinds: Mapping[str, SavedTensor]) -> None:
    """Write one rank's parts. CoveyError as of `covey.healing.checkpoint.save`."""
    arrays, types, said = dict[str, Array](), dict[str, str](), dict[str, list[Any]]()
    for name, which, first, numbers in parts:
        whole = len(numbers) == kinds[name].elements
        key = f"{name}{f' moment {which}' if which else ''}{'' if whole else f' from {first}'}"
        while key in arrays:
            key += "'"
        arrays[key], said[key] = numbers.reshape(kinds[name].shape) if whole else numbers, [name, which, first]
        if kinds[name].type == "bfloat16" and not which:
            types[key] = "BF16"
    save_file(file_of(folder, rank), Checkpoint(step, (json.dumps(said),), MADE), arrays, types)


def found_files(folder: Path, kinds: Mapping[str, SavedTensor], known: dict[int, tuple[File, int]]) -> bool:
    """Look for the files of all ranks, and add those that are new to `known`, with the number of their bytes of
    tensors. Returns whether they have all parts of these tensors. CoveyError when one cannot be read."""
    with suppress(FileNotFoundError):
        for name in os.listdir(folder):
            said = _FILE.fullmatch(name)
            if said is None or int(said[1]) in known:
                continue
            rank, path = int(said[1]), folder / name
            if (shard := opened(path)) is not None:
                has = sum(_bytes(kinds, place, count) for place, count in _parts_of(shard, kinds))
                known[rank] = File(rank, os.stat(path).st_size, shard.about.number), has
    return sum(has for _, has in known.values()) == sum(
        kind.elements * kind.dtype(which).itemsize for kind in kinds.values() for which in range(1 + kind.moments)
    )


def complete(path: Path, step: int, folder: Path, kinds: Mapping[str, SavedTensor], files: Sequence[File]) -> None:
    """Write the list of a step whose files are all there, and remove the files of steps before it. CoveyError when it
    cannot be written; then the list before it counts."""
    tensors = {name: [kind.type, list(kind.shape), kind.moments] for name, kind in kinds.items()}
    said: dict[str, Any] = {"covey": VERSION, "made": MADE, "step": step, "folder": folder.name, "tensors": tensors}
    said["files"] = [list(each) for each in sorted(files)]
    text = json.dumps(said | {"crc32": f"{_number(said):08x}"}, indent=1).encode()
    try:
        put_file(path, [memoryview(text)])
    except OSError as error:
        raise CoveyError(f"{path} was not written", error.strerror or str(error), "make room there") from error
    for old in path.parent.glob(f"{glob.escape(path.name)}-*.saved"):
        named = _FOLDER.fullmatch(old.name.removeprefix(path.name))
        if named is not None and old.name != folder.name and int(named[1]) <= step:
            remove(old)


def remove(folder: Path) -> None:
    """Remove the files of a step that does not count."""
    with suppress(OSError):
        for each in (*folder.glob("rank-*"), *folder.glob(".rank-*")):
            each.unlink()
        folder.rmdir()


def opened_set(path: Path) -> TensorSet | None:
    """The saved step whose list is there; None when there is none. CoveyError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            data = file.read(LIST_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refused(path, error.strerror or str(error)) from error
    if not data.startswith(b"{") or len(data) > LIST_BYTES_MAX:
        raise refused(path, f"it has {len(data)} bytes, and is no list of a saved model, or the beginning of one")
    try:
        return _read(path, json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise refused(path, f"it cannot be read: {error!r}"[:300]) from error


def _read(path: Path, said: dict[str, Any]) -> TensorSet:
    """The set of this list. CoveyError, ValueError, TypeError, KeyError, AttributeError."""
    number = int(said.pop("crc32"), 16)
    if said.get("covey") != VERSION or said.get("made") != MADE:
        why = f"its format is version {said.get('covey')} of {said.get('made')}, and this is {VERSION} of {MADE}"
        raise refused(path, why, "use the Covey of then")
    if _number(said) != number:
        raise refused(path, "its content is not what was written: its checksum differs")
    tensors = dict[str, SavedTensor]()
    for name, (type, shape, moments) in said["tensors"].items():
        if type not in TYPES or not all(isinstance(side, int) and side >= 0 for side in shape):
            raise ValueError(f"tensor {name!r} is {type} {shape}")
        if not (isinstance(moments, int) and 0 <= moments < ARRAYS_MAX):
            raise ValueError(f"tensor {name!r} has {moments} moments")
        tensors[name] = SavedTensor(type, tuple(shape), moments)
    files = tuple(File(int(rank), int(size), int(crc)) for rank, size, crc in said["files"])
    step, folder = int(said["step"]), str(said["folder"])
    if step <= 0 or not _FOLDER.fullmatch(folder.removeprefix(path.name)) or os.sep in folder:
        raise ValueError(f"step {step} in {folder!r}")
    return TensorSet(path, step, folder, tensors, files)


def arrays_of(found: TensorSet) -> dict[str, list[Array]]:
    """For each tensor its parameters and its moments, read from all files. CoveyError when a byte is not what was
    written, or a part is missing."""
    whole = {
        name: [np.empty(kind.elements, kind.dtype(which)) for which in range(1 + kind.moments)]
        for name, kind in found.tensors.items()
    }
    has = 0
    for rank, size, number in found.files:
        path = file_of(found.path.parent / found.folder, rank)
        shard = opened(path)
        if shard is None:
            raise refused(found.path, f"{path} is not there, and the list names it")
        if (is_now := os.stat(path).st_size) != size or shard.about.number != number:
            why = f"{path} has {is_now} bytes and number {shard.about.number:08x}, and the list says {size}"
            raise refused(found.path, f"{why} and {number:08x}")
        places = _parts_of(shard, found.tensors)
        for (name, which, first), numbers in zip(
            (place for place, _ in places), shard.arrays({}).values(), strict=True
        ):
            into = whole[name][which][first : first + numbers.size]
            into[:] = numbers.reshape(-1).view(into.dtype)
            has += numbers.nbytes
    if has != sum(each.nbytes for arrays in whole.values() for each in arrays):
        raise refused(found.path, f"{has} bytes of its tensors are there, and not all")
    return {name: [each.reshape(found.tensors[name].shape) for each in arrays] for name, arrays in whole.items()}


def _parts_of(shard: SavedState, kinds: Mapping[str, SavedTensor]) -> list[tuple[tuple[str, int, int], int]]:
    """For each array of a file: its tensor, which array of that it is, its first element, and how many it has.
    CoveyError when that is impossible."""
    try:
        said, sizes = shard.own_of(0), shard.sizes
        found = list[tuple[tuple[str, int, int], int]]()
        for key, size in sizes.items():
            name, which, first = said[key]
            kind = kinds[name]
            count, rest = divmod(size, kind.dtype(which).itemsize)
            if not 0 <= which <= kind.moments or first < 0 or first + count > kind.elements or rest:
                raise ValueError(f"{size} bytes of {name!r} from {first}")
            found.append(((name, which, first), count))
        return found
    except (ValueError, TypeError, KeyError) as error:
        raise refused(shard.path, f"it does not say what its arrays are: {error!r}"[:300]) from error


def _bytes(kinds: Mapping[str, SavedTensor], place: tuple[str, int, int], count: int) -> int:
    return count * kinds[place[0]].dtype(place[1]).itemsize


def _number(said: Mapping[str, Any]) -> int:
    """CRC-32 of what a list says; never 0."""
    return crc32(json.dumps(said, sort_keys=True).encode()) or 1
