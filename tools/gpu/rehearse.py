"""Rehearses the check of a GPU where there is none: a copy of the tracked files, the pack, another Python, no network.

    python tools/gpu/rehearse.py --python PYTHON [--pack .gpu] [arguments of tools/gpu/check.py]

PYTHON is one of the version that the pack was made for, with PyTorch and NumPy (and JAX) in it. As root the copy is
run in a network namespace that has loopback alone. Every part that needs no GPU must pass, every other must skip for
want of one. The results are in .gpu/rehearsed.json.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tracked(root: Path) -> list[str]:
    """Files that travel: tracked ones, and untracked ones that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
    )
    return [name for name in listed.stdout.decode().split("\0") if name and (root / name).exists()]


def copied(root: Path, into: Path) -> None:
    for name in tracked(root):
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, into / name, follow_symlinks=False)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True, help="the other Python")
    parser.add_argument("--pack", type=Path, default=ROOT / ".gpu", help="what tools/gpu/pack.py wrote")
    given, rest = parser.parse_known_args(arguments)
    if not any(given.pack.glob("*.whl")):
        print(f"gpu-rehearsal: {given.pack} holds no wheels; next: make gpu-pack", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="covey-gpu-") as folder:
        tree = Path(folder, "covey")
        copied(ROOT, tree)
        out = tree / "gpu-check.json"
        check = [
            given.python,
            "tools/gpu/check.py",
            "--pack",
            str(given.pack.resolve()),
            "--rehearse",
            "--out",
            str(out),
        ]
        alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"] if os.geteuid() == 0 else []
        environ = {"PATH": os.environ["PATH"], "HOME": folder, "LANG": "C.UTF-8"}
        code = subprocess.run([*alone, *check, *rest], cwd=tree, env=environ, check=False).returncode
        if out.exists():
            shutil.copy2(out, ROOT / ".gpu" / "rehearsed.json")
    print(f"gpu-rehearsal: {'held' if code == 0 else f'ended with {code}'}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
