"""The kernel with which a rank computes is found cheaply, in the numpy that it really loaded."""

import os
import subprocess
import sys
from typing import Any

import pytest

from covey.healing import kernels

SAY = "import numpy; from covey.healing.kernels import kernel; print(kernel())"


def said(**env: str) -> str:
    """The kernel that a process with this environment reports."""
    whole = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")} | env
    done = subprocess.run([sys.executable, "-c", SAY], env=whole, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_kernel_that_openblas_was_told_to_use_is_the_one_that_is_found() -> None:
    found = said()
    if "OpenBLAS" not in found:
        pytest.skip("this numpy has another BLAS")
    core = found.rpartition(" ")[2]
    other = "Nehalem" if core != "Nehalem" else "Prescott"
    if os.uname().machine != "x86_64":
        pytest.skip("these names are of x86-64")
    assert said(OPENBLAS_CORETYPE=other) == found.replace(core, other)


def test_nothing_is_said_before_numpy_is_imported_and_this_does_not_import_it() -> None:
    imports = "import covey.job.client, sys; from covey.healing.kernels import kernel"
    code = f"{imports}; print(kernel(), 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_library_that_cannot_be_asked_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(path: str) -> Any:
        asked.append(path)
        raise OSError("wrong ELF class")

    monkeypatch.setattr("ctypes.CDLL", load)
    path = "/lib/a b/libopenblas.so.0"
    maps = f"7f00-7f01 r-xp 0 08:01 5   {path}\n7f02 rw-p\n7f00-7f02 r-xp 0 08:01 5 {path}\n"
    assert kernels.corename(maps) == "" and asked == [path]
