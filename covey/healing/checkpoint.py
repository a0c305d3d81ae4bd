"""Checkpoints: the state of a job in one file, from which its ranks continue with the same bits.

    state = job.state(get, load, own=own, checkpoint=True)
    for step in state.steps(1000):              # saves and ends when the job is asked to end
        ...
        if step % 100 == 99:
            state.save()

The file is in the format of safetensors, which other tools read: the arrays that are the same on every rank, by name.
Beside them, as text, are the step with which ranks continue, their number, and what each has of its own:

    length of the header, 8 bytes | header, JSON | bytes of all arrays, one after the other

    header   {"__metadata__": {"covey": "1", "step": .., "ranks": .., "own": JSON, "crc32": ..},
              NAME: {"dtype": "F32", "shape": [..], "data_offsets": [first, end]}, ..}

It is written beside its place and then moved there, so that a file is complete or not there. Arrays are written from
their own memory, and read into those of the script that have the same names, types and shapes.
"""

import glob
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from covey.core.errors import CoveyError
from covey.core.units import format_size
from covey.healing.state_pieces import Item, array_of, bytes_of_state
from covey.tensors.numbers.arrays import Array
from covey.wire.checksum import crc32

VERSION = "1"
NAME = "state.safetensors"
"""Name of the file where none is given, in the folder of COVEY_CHECKPOINT_DIR."""
FOLDER = "COVEY_CHECKPOINT_DIR"
META = "__metadata__"
HEADER_BYTES_MAX = 100_000_000
"""Most bytes of a header, as for other readers of the format."""
LEFT_S = 600.0
"""Seconds after which a file that nobody has written to is what a killed process left."""
CUT_BYTES = 16 << 20
"""Bytes that are written or read at a time."""
TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1", "C64": "<c8", "BF16": "<i2",
}  # fmt: skip
"""Types of elements, as the format and numpy name them. numpy has no BF16: its bits are in 16-bit integers."""
_NAMES = {numpy: name for name, numpy in TYPES.items() if name != "BF16"}
NOT_USED = "checkpoint {} was not used"
ANOTHER = "give another checkpoint, or move this one away to begin anew"


class Checkpoint(NamedTuple):
    """What a checkpoint says beside the arrays."""

    step: int
    """The step with which ranks continue."""
    own: tuple[str | None, ...]
    """By rank: what is its own, as JSON; None: it had nothing."""
    made: str = ""
    """Which kind of script made it: "numpy", "torch", "jax"."""
    number: int = 0
    """Made of all that is in it; never 0 in a file."""

    @property
    def ranks(self) -> int:
        return len(self.own)


class SaysWhat(Protocol):
    """A checkpoint of which everything but the arrays was read."""

    @property
    def about(self) -> Checkpoint: ...


class OpenedCheckpoint(SaysWhat, Protocol):
    """A checkpoint that is to be read: a file (`SavedState`), or one rank's part of several."""

    @property
    def path(self) -> Path: ...

    def own_of(self, rank: int) -> Any: ...
    def owns(self, ranks: int) -> tuple[bytes, ...]: ...
    def arrays(self, known: Mapping[str, Array]) -> dict[str, Array]: ...


def place_of(path: "str | os.PathLike[str] | bool", environ: Mapping[str, str]) -> Path:
    """Where the checkpoint is that a script names; True: in the job's own folder. CoveyError when it has none."""
    if not isinstance(path, bool):
        return Path(path)
    if not (folder := environ.get(FOLDER)):
        what, why = "the place of the checkpoint is not known", f"{FOLDER} is not set, and no path was given"
        raise CoveyError(what, why, "give the path of a file")
    return Path(folder) / NAME


def save(path: Path, about: Checkpoint, arrays: Mapping[str, Array], types: Mapping[str, str] | None = None) -> int:
    """Write a checkpoint, and return its number. `types`: names of the format for arrays whose type numpy does not have
    (BF16). CoveyError when it cannot be written; then the file is as it was before."""
    whole = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    found: dict[str, Any] = {}
    at = 0
    for name, array in whole.items():
        type = (types or {}).get(name) or _NAMES.get(array.dtype.str)
        if name == META:
            raise CoveyError(f"{path} was not written", f"an array is named {META}", "give it another name")
        if type is None:
            raise _unknown(path, name, array)
        found[name] = {"dtype": type, "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    places = [bytes_of_state(array) for array in whole.values()]
    number = _number(places, about)
    meta = {"covey": VERSION, "step": f"{about.step}", "ranks": f"{about.ranks}", "made": about.made}
    meta |= {"own": json.dumps(about.own), "crc32": f"{number:08x}"}
    header = json.dumps({META: meta, **found}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    try:
        put_file(path, [memoryview(len(header).to_bytes(8, "little") + header), *places])
    except OSError as error:
        why = f"{error.strerror or error}; the state has {format_size(at)}"
        raise CoveyError(f"{path} was not written", why, "make room there, or give another place") from error
    return number


def _number(places: Sequence[memoryview], about: Checkpoint) -> int:
    """CRC-32 of all arrays and of what is said beside them; never 0."""
    found = crc32(f"{about.step} {about.made} {json.dumps(about.own)}".encode())
    for place in places:
        for at in range(0, len(place), CUT_BYTES):
            found = crc32(place[at : at + CUT_BYTES], found)
    return found or 1


def put_file(path: Path, parts: Sequence[memoryview]) -> None:
    """Write a file that is complete or not there, also after a power failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob(f".{glob.escape(path.name)}.*"):  # of a process that was killed while it wrote
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > LEFT_S:
                old.unlink()
    descriptor, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    is_there = False
    try:
        with open(descriptor, "wb", buffering=0) as file:
            os.fchmod(descriptor, 0o666 & ~_umask())
            for part in parts:
                for at in range(0, len(part), CUT_BYTES):
                    left = part[at : at + CUT_BYTES]
                    while left:
                        left = left[file.write(left) :]
            os.fsync(descriptor)
        os.replace(beside, path)
        is_there = True
    finally:
        if not is_there:
            with suppress(OSError):
                os.unlink(beside)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _umask() -> int:
    """The umask of this process, which cannot be read without being set elsewhere than in /proc."""
    with suppress(OSError, ValueError, StopIteration), open("/proc/self/status", encoding="ascii") as status:
        return int(next(line for line in status if line.startswith("Umask:")).split()[1], 8)
    return 0o077


def check(path: Path, saved: "SaysWhat | None", arrays: Mapping[str, Array], environ: Mapping[str, str]) -> None:
    """CoveyError where a job cannot begin with what is there (`saved`; None: nothing), by the agent's word, or could
    not save there: that must not be found when it has to stop. `arrays`: its state."""
    if environ.get("COVEY_SAVED_AT") == os.path.abspath(path):
        step = int(environ.get("COVEY_SAVED_STEP", "0"))
        there = (
            "the file is not on this host" if saved is None else f"the one on this host is of step {saved.about.step}"
        )
        if saved is None or saved.about.step < step:
            shared = "keep it in a folder that all hosts share (COVEY_CHECKPOINTS); to begin anew, submit another job"
            raise refused(path, f"this job saved step {step} there, and {there}", shared)
    for name, array in arrays.items():
        if array.dtype.str not in _NAMES:
            raise _unknown(path, name, array)
    folder = next(each for each in path.absolute().parents if each.exists())
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CoveyError(f"{path} could not be written", f"{folder} cannot be written to", "set COVEY_CHECKPOINTS")


def _unknown(path: Path, name: str, array: Array) -> CoveyError:
    why = f"array {name!r} has elements of type {array.dtype}, which the format does not have"
    return CoveyError(f"{path} was not written", why, f"keep the state in {', '.join(_NAMES)}")


class SavedState:
    """A checkpoint that is to be read."""

    def __init__(self, path: Path, about: Checkpoint, items: Mapping[str, tuple[Item, int, int]], data_at: int) -> None:
        """`items`: each array, with the first and the last byte of it, counted from byte `data_at` of the file."""
        self.path: Path = path
        self.about: Checkpoint = about
        self._items, self._data_at = items, data_at

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each array, in the order in which they are written."""
        return {name: end - first for name, (_, first, end) in self._items.items()}

    def own_of(self, rank: int) -> Any:
        """What is this rank's own; None: it had nothing. CoveyError when it cannot be read."""
        text = self.about.own[rank] if rank < self.about.ranks else None
        try:
            return None if text is None else json.loads(text)
        except ValueError as error:
            raise refused(self.path, f"what is rank {rank}'s own cannot be read: {error}") from error

    def owns(self, ranks: int) -> tuple[bytes, ...]:
        """What is each rank's own, as ranks gather it; nothing in a job of another number of ranks."""
        if self.about.ranks != ranks:
            return (b"",) * ranks
        return tuple((each or "").encode("ascii") for each in self.about.own)

    def arrays(self, known: Mapping[str, Array]) -> dict[str, Array]:
        """Its arrays, in those that are `known` here where type and shape are equal. CoveyError when a byte of the file
        is not what was written; the arrays `known` have other bytes then."""
        found = {name: array_of(item, known.get(name)) for name, (item, _, _) in self._items.items()}
        places = [bytes_of_state(array) for array in found.values()]
        try:
            with open(self.path, "rb", buffering=0) as file:
                for place, (_, first, _) in zip(places, self._items.values(), strict=True):
                    file.seek(self._data_at + first)
                    _fill(file, place)
        except OSError as error:
            raise refused(self.path, error.strerror or str(error)) from error
        if _number(places, self.about) != self.about.number:
            raise refused(self.path, "its content is not what was written: its checksum differs")
        return found


def _fill(file: Any, place: memoryview) -> None:
    at = 0
    while at < len(place):
        count = file.readinto(place[at : at + CUT_BYTES])
        if not count:
            raise OSError("it ends too early")
        at += count


def refused(path: Path, why: str, next: str = ANOTHER) -> CoveyError:
    """The error that says that this checkpoint was not used."""
    return CoveyError(NOT_USED.format(path), why, next)


def opened(path: Path) -> SavedState | None:
    """The checkpoint there, of which everything but the arrays was read; None when there is no such file. CoveyError
    when it is none, or cut short."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
                raise refused(path, f"it has {size} bytes, and is no checkpoint, or the beginning of one")
            header = json.loads(file.read(length))
            about, items, end = _read(path, header)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refused(path, error.strerror or str(error)) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise refused(path, f"its header cannot be read: {error!r}"[:300]) from error
    if 8 + length + end != size:
        raise refused(path, f"it has {size} bytes, and {8 + length + end} are written in its header")
    return SavedState(path, about, items, 8 + length)


def _read(path: Path, header: dict[str, Any]) -> tuple[Checkpoint, dict[str, tuple[Item, int, int]], int]:
    """What the header says, and the end of the last array. CoveyError, ValueError, TypeError, KeyError,
    AttributeError."""
    meta = header.pop(META, {})
    if "covey" not in meta:
        raise refused(path, "it does not say that Covey wrote it (state.save)")
    if meta["covey"] != VERSION:
        raise refused(path, f"its format is version {meta['covey']}, and this is {VERSION}", "use the Covey of then")
    own = json.loads(meta["own"])
    if not isinstance(own, list) or not all(each is None or (isinstance(each, str) and each.isascii()) for each in own):
        raise ValueError("own is no list of texts")
    if len(own) != int(meta["ranks"]) or int(meta["step"]) < 0:
        raise ValueError(f"{len(own)} own states of {meta['ranks']} ranks, step {meta['step']}")
    items, at = dict[str, tuple[Item, int, int]](), 0
    for name, each in header.items():
        first, end = each["data_offsets"]
        shape = tuple(each["shape"])
        type = np.dtype(TYPES[each["dtype"]])
        if not all(isinstance(side, int) and side >= 0 for side in shape):
            raise ValueError(f"shape {shape} of {name!r}")
        if first != at or end - first != type.itemsize * int(np.prod([1, *shape], dtype=object)):
            raise ValueError(f"{name!r} is at {first} to {end}, after {at}")
        items[name], at = (Item(name, type.str, shape), first, end), end
    return Checkpoint(int(meta["step"]), tuple(own), str(meta["made"]), int(meta["crc32"], 16)), items, at
