"""The likeness of a rank: whether two ranks compute the same bits from the same numbers (processor, kernels, versions).

A sum of Covey has the same bits however often it is repeated, but each rank computes its own contribution. A successor
on another kind of processor, or with another numpy, may push numbers that differ in the last bits. So ranks send one
another, when they attach, a digest of a small computation with the kernels that they use, and the versions of their
libraries. People are told which rank differs; a successor with other versions ends, since the state that it was given
may mean something else to it. The text of the main script is compared, too, and a rank that runs another one is named:
its script may have been changed while the job ran.
"""

import ctypes
import hashlib
import os
import platform
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from covey.core.version import VERSION
from covey.tensors.numbers.arrays import Array

CORE_NAMES = ("scipy_openblas_get_corename64_", "openblas_get_corename64_", "openblas_get_corename")
"""Functions of OpenBLAS that return the kernel's name, by how it may be built."""
NOT_KNOWN = "not known (python -m, python -c, or a notebook)"
SIZE = 200
"""Size of a matrix that is multiplied: several blocks of any BLAS, and a remainder."""


class Likeness(msgspec.Struct, frozen=True):
    """What determines the bits that one rank computes."""

    versions: dict[str, str]
    processor: str
    """Name of the processor, and the features that numpy found in it."""
    threads: str
    bits: str
    """Digest of the results of the test computation."""
    script: str = ""
    """Digest of the main script's text; empty: it is not known."""


class Kernels(NamedTuple):
    """The test computation of a library."""

    version: str
    compute: Callable[[], list[Array]]
    """Computes the same numbers each time, through the kernels that are used most."""


encode_likeness = msgspec.msgpack.Encoder().encode
likeness_decoder: msgspec.msgpack.Decoder[Likeness] = msgspec.msgpack.Decoder(Likeness)
libraries: dict[str, Kernels] = {}
"""Libraries other than numpy, by name: `covey.torch` and `covey.jax` add themselves when they are imported."""


@cache
def likeness() -> Likeness:
    """The likeness of this process at the first call; takes some ms."""
    blas = _configured("Build Dependencies", "blas")
    versions = {
        "Covey": VERSION,
        "Python": ".".join(map(str, sys.version_info[:2])),
        "numpy": np.__version__,
        "BLAS": f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip(),
    }
    found = hashlib.blake2b(digest_size=8)
    for array in _numbers():
        found.update(np.ascontiguousarray(array).data)
    for name, kernels in sorted(libraries.items()):
        versions[name] = kernels.version
        for array in kernels.compute():
            found.update(np.ascontiguousarray(array).data)
    return Likeness(versions, f"{_processor()} {_features()}".strip(), _threads(), found.hexdigest(), main_script())


def drawn(*shape: int) -> Array:
    """Float32 numbers between -1 and 1 that are the same everywhere."""
    count = int(np.prod(shape))
    whole = (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(2654435761)) % np.uint64(1 << 24)
    return (whole.astype(np.float64) / (1 << 23) - 1).astype(np.float32).reshape(shape)


def unlike_versions(own: Likeness, other: Likeness) -> str:
    """The first version that differs, for people; empty when none does."""
    for name in sorted(own.versions.keys() | other.versions.keys()):
        here, there = own.versions.get(name, "not used"), other.versions.get(name, "not used")
        if here != there:
            return f"{name} here is {here}, and there {there}"
    return ""


def unlike_bits(own: Likeness, other: Likeness) -> str:
    """Why the same computation has other bits there, for people; empty when it has the same."""
    if own.bits == other.bits:
        return ""
    here, there = f"{own.processor}, {own.threads}", f"{other.processor}, {other.threads}"
    same = "on a processor of the same name" if here == there else f"{here} here, and there {there}"
    return f"the same numbers give other bits: {same}"


def unlike_script(own: Likeness, other: Likeness) -> str:
    """Why the main scripts are not one, for people; empty when they are, or neither is known."""
    if own.script == other.script:
        return ""
    here, there = (each.script or NOT_KNOWN for each in (own, other))
    return f"the text of the main script is {here} here, and there {there}"


def main_script() -> str:
    """Digest of the text of the script with which Python was started; empty when that is not known: `python -m`,
    `python -c` and notebooks, or the file is gone."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    if not path or getattr(main, "__spec__", None) is not None:
        return ""
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return ""


def _numbers() -> list[Array]:
    a, b = drawn(SIZE, SIZE + 3), drawn(SIZE + 3, SIZE - 7)
    wide = a.astype(np.float64)
    return [a @ b, a[0] @ b, wide @ b.astype(np.float64), np.exp(a), np.tanh(wide), a.sum(axis=0), a.sum(), a @ b[:, 0]]


def _configured(*path: str) -> dict[str, str]:
    """A part of numpy's build configuration; empty where numpy does not say."""
    found = getattr(np.__config__, "CONFIG", {})
    for name in path:
        found = found.get(name, {})
    return found if isinstance(found, dict) else {}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _features() -> str:
    found = getattr(np.__config__, "CONFIG", {}).get("SIMD Extensions", {}).get("found", [])
    return " ".join(filter(None, (f"with {found[-1]}" if found else "", _openblas())))


def _openblas() -> str:
    """The kernel that OpenBLAS chose; empty where numpy has another BLAS."""
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
        path = next(line.split(maxsplit=5)[5] for line in mapped if "openblas" in line.rpartition("/")[2])
        library = ctypes.CDLL(path)
        name = next(each for each in CORE_NAMES if hasattr(library, each))
    except (OSError, StopIteration):
        return ""
    ask = getattr(library, name)
    ask.restype = ctypes.c_char_p
    return f"and kernels for {ask().decode(errors='replace')}"


def _threads() -> str:
    said = next((os.environ[name] for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS") if os.environ.get(name)), "")
    return f"{said or os.cpu_count()} threads"
