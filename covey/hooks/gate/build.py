"""Build `gate.cpp`, with what it needs on GPUs (`device_queue.cpp`, `spill.cpp`) and for turns on shared hosts
(`turns.cpp`), for one PyTorch, and find the built library, which only this user and root may be able to write.

    python -m covey.hooks.gate.build [FOLDER]       for the PyTorch of this Python; prints its path

The library is in `$COVEY_GATE`, else in `$XDG_CACHE_HOME/covey`, under a name made from PyTorch's version, its ABI and
our source, so that it is never loaded into another PyTorch. Where no library was built, the script is stopped per
module and per step.
"""

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("gate.cpp")
SOURCES = (SOURCE, *(SOURCE.with_name(f"{name}.cpp") for name in ("device_queue", "spill", "turns")))
READ = (*SOURCES, *(SOURCE.with_name(f"{name}.h") for name in ("device_queue", "process")))
BUILD_S = 300.0
"""Seconds after which a compiler counts as hanging; it takes 4 s on one core of 2024."""
FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC", "-pthread")


@dataclass(frozen=True)
class TorchBuild:
    """The properties of a PyTorch with which its library must agree."""

    version: str
    folder: Path
    cxx11_abi: bool

    @classmethod
    def of(cls, torch: Any) -> "TorchBuild":
        """The build of the imported module."""
        abi = getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True)  # the module may be half imported
        return cls(str(torch.__version__), Path(torch.__file__).parent, bool(abi))

    @property
    def library(self) -> str:
        """Name of the library's file."""
        told = "\n".join([self.version, str(self.cxx11_abi), platform.machine(), *FLAGS])
        sources = b"".join(source.read_bytes() for source in READ)
        return f"gate-{hashlib.sha256(told.encode() + sources).hexdigest()[:24]}.so"


def cache_folder(environ: "os._Environ[str] | dict[str, str]" = os.environ) -> Path:
    """Folder of this user's libraries."""
    if environ.get("COVEY_GATE"):
        return Path(environ["COVEY_GATE"])
    return Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/nonexistent"), ".cache"), "covey")


def found(torch: TorchBuild, folder: Path) -> Path | None:
    """Path of the library for this PyTorch; None when there is none, or another user could have written it."""
    path = folder / torch.library
    return path if is_ours(path) else None


def is_ours(path: Path) -> bool:
    """Whether only this user and root can write or replace this regular file or any folder above it."""
    try:
        path = path.resolve(strict=True)
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        return all(_closed(at.stat()) for at in (path, *path.parents))
    except OSError:
        return False


def _closed(at: os.stat_result) -> bool:
    """Whether others cannot replace it. A folder with the sticky bit (/tmp) lets others only add files."""
    others_write = bool(at.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    sticky = stat.S_ISDIR(at.st_mode) and bool(at.st_mode & stat.S_ISVTX)
    return at.st_uid in (0, os.geteuid()) and (not others_write or sticky)


def build(torch: TorchBuild, folder: Path) -> Path:
    """Compile the library, unless it exists. RuntimeError with the compiler's words, or for want of a compiler."""
    there = found(torch, folder)
    if there is not None:
        return there
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (g++, c++ or clang++)")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(descriptor)
    try:
        _compile(compiler, torch, Path(name))
        os.chmod(name, 0o755)
        os.replace(name, folder / torch.library)
    finally:
        Path(name).unlink(missing_ok=True)
    there = found(torch, folder)
    if there is None:
        raise RuntimeError(f"{folder} can be written by others: nothing is loaded from there")
    return there


def _compile(compiler: str, torch: TorchBuild, into: Path) -> None:
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.cxx11_abi)}"
    include, lib = torch.folder / "include", torch.folder / "lib"
    command = [compiler, *FLAGS, abi, "-isystem", str(include), "-o", str(into), *map(str, SOURCES), f"-L{lib}"]
    try:
        done = subprocess.run(
            [*command, "-ltorch_cpu", "-lc10", "-ldl"], capture_output=True, text=True, timeout=BUILD_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{compiler}: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{compiler} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def main(arguments: list[str]) -> int:
    import torch

    try:
        print(build(TorchBuild.of(torch), Path(arguments[0]) if arguments else cache_folder()))
    except (RuntimeError, OSError) as error:
        print(f"the operator gate was not built: {error}\nnext: install g++; until then jobs are stopped per module")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
