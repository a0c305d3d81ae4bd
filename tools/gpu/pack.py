"""Packs what a machine with a GPU, another Python and no network lacks: wheels of this project's few dependencies.

    python tools/gpu/pack.py [--python 3.12] [--machine x86_64] [DIR]

The wheels go into DIR (`.gpu`), which `tools/gpu/check.py --pack DIR` installs there. PyTorch, JAX and NumPy are the
machine's own: theirs are what is to be tried. At most 60 MiB, so that the pack can be sent along with a checkout.
"""

import argparse
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BYTES_MAX = 60 << 20
GLIBC = (17, 24, 26, 27, 28, 31, 34, 35)
"""Minor versions of glibc 2 of which wheels are taken, oldest first: pip matches each exactly, and takes the first."""
THERE = ("numpy",)
"""Packages that the machine has and the pack leaves out."""
TESTS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "setuptools")
"""Packages that parts of the check need, by the bounds of the extra `dev`."""
TOOLS = ("pip", "wheel")


def wanted(root: Path) -> list[str]:
    """Requirements of the agent, the job side and the tests, without what the machine has and Covey's own packages."""
    tops = [tomllib.loads((root / at / "pyproject.toml").read_text())["project"] for at in (".", "covey")]
    found = [line for top in tops for line in top["dependencies"]]
    found += [line for line in tops[0]["optional-dependencies"]["dev"] if _name(line) in TESTS]
    ours = {line for line in found if _name(line) not in THERE and not _name(line).startswith("covey")}
    return [*sorted(ours), *TOOLS]


def _name(requirement: str) -> str:
    for at, letter in enumerate(requirement):
        if letter not in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-":
            return requirement[:at].lower()
    return requirement.lower()


def platforms(machine: str) -> list[str]:
    named = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC]
    return [word for name in (*named, f"manylinux2014_{machine}") for word in ("--platform", name)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--python", default="3.12", help="version of that machine's Python")
    parser.add_argument("--machine", default="x86_64", help="what `uname -m` says there")
    given = parser.parse_args(arguments)
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--only-binary=:all:"]
    target = ["--implementation", "cp", "--python-version", given.python, *platforms(given.machine)]
    done = subprocess.run([*command, *target, "-d", str(given.folder), *wanted(ROOT)], check=False)
    if done.returncode:
        print(f"gpu-pack: pip ended with {done.returncode}; next: see what it says above", file=sys.stderr)
        return 1
    for wheel in given.folder.iterdir():
        if wheel.name.split("-")[0].lower() in THERE:
            wheel.unlink()
    sizes = {wheel.name: wheel.stat().st_size for wheel in given.folder.iterdir()}
    total = sum(sizes.values())
    print(f"gpu-pack: {len(sizes)} wheels, {total / 2**20:.1f} MiB, in {given.folder}")
    if total > BYTES_MAX:
        largest = max(sizes, key=lambda name: sizes[name])
        print(f"gpu-pack: more than {BYTES_MAX >> 20} MiB; next: leave out {largest}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
