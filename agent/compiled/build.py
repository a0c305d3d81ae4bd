"""Compile the byte path: for this installation, or into a wheel. A minute or two of one core.

Only Covey's own sources and the libraries whose types they need are read: whatever else is imported, PyTorch and JAX
above all, counts as untyped. The compiler runs in a session of its own beside a guard (`compiler`), which ends it and
removes what it has written as soon as this process is gone, however it went.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.compiled.files import CIPHER, HERE, MODULES, ROOT, folder, folder_name, install, look

TREES = ("agent", "covey", "gossip", "plugins")
"""The folders that mypy reads."""
READ = ("cryptography", "msgspec", "numpy")
"""Libraries whose types are needed: those that modules of the byte path use."""
BUILD_S = 900.0
"""Seconds after which a compiler is taken to hang."""
PR_SET_PDEATHSIG = 1
WORK = ".covey-"
"""Beginning of the name of a folder in which a compiler works."""
MYPY = "\n".join(
    [
        "[mypy]", "ignore_missing_imports = True", "follow_imports = skip",
        *(f"[mypy-{tree},{tree}.*]\nfollow_imports = silent" for tree in (*TREES, *READ)), "",
    ]
)  # fmt: skip


class NotCompiled(Exception):
    """Why nothing was compiled, with what to do next."""


def build() -> Path:
    """Compile the modules for this installation, unless that was done, or its wheel brought them, and they can be
    loaded here. NotCompiled with the compiler's words, or for want of one."""
    found = install(look())
    if found.files:
        return found.files[CIPHER].parents[CIPHER.count(".")]
    there = folder()
    _check_compiler()
    there.parent.mkdir(parents=True, exist_ok=True)
    with _alone(there.parent):
        compile_into(there)
        found = look()
        if not found.files:
            raise NotCompiled(f"{found.why}\nnext: correct that; nothing is loaded from there")
        for older in there.parent.iterdir():
            if older != there and older.is_dir():
                shutil.rmtree(older, ignore_errors=True)
    return there


def carry(package_root: Path) -> Path:
    """Compile the modules into a tree of packages from which a wheel is made. NotCompiled when that fails."""
    _check_compiler()
    end_with_parent()
    there = package_root.absolute() / "agent" / "compiled" / "built" / folder_name()
    there.parent.mkdir(parents=True, exist_ok=True)
    compile_into(there)
    return there


def end_with_parent() -> None:
    """Have this process killed when the one that started it ends, so that a build that is given up leaves nothing."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _check_compiler() -> None:
    if shutil.which(os.environ.get("CC", "cc")) is None:
        raise NotCompiled("there is no C compiler\nnext: install gcc or clang")


@contextmanager
def _alone(at: Path) -> Iterator[None]:
    """One build at a time in this folder. What an earlier one left there that lost its power is removed."""
    with open(at / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise NotCompiled(f"another process compiles into {at}\nnext: wait for it") from error
        for left in at.glob(f"{WORK}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def compile_into(there: Path) -> None:
    """Compile into this folder, whole or not at all. NotCompiled with the compiler's words."""
    with tempfile.TemporaryDirectory(prefix=WORK, dir=there.parent, ignore_cleanup_errors=True) as work:
        _compile(Path(work))
        shutil.rmtree(there, ignore_errors=True)
        os.replace(Path(work, "out"), there)


def _compile(work: Path) -> None:
    """Compile into `out` in that folder. In a copy, since what is installed may be neither written to nor looked at as
    sources."""
    for tree in TREES:
        shutil.copytree(ROOT / tree, work / tree, ignore=lambda at, names: [n for n in names if not _is_source(at, n)])
    Path(work, "mypy.ini").write_text(MYPY)
    files = [module.replace(".", "/") + ".py" for module in MODULES]
    command = [sys.executable, "-P", str(HERE / "compiler.py"), str(work), CIPHER, *files]
    code, said = guarded(command, work)
    if code:
        missing = "No module named" in said
        what = "pip install 'mypy[mypyc]' into this environment" if missing else "report this"
        raise NotCompiled(f"mypyc ended with {code}:\n{said[-2000:]}\nnext: {what}")


def guarded(command: list[str], work: Path) -> tuple[int, str]:
    """Run the compiler in a session of its own; its exit status and what it said. Its standard input tells its guard
    how this process ends: with a byte once all is over, with none when it is gone."""
    with open(work / "said", "w+", errors="replace") as said:
        try:
            process = subprocess.Popen(
                command, cwd=work, stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True
            )
        except OSError as error:
            raise NotCompiled(f"{error}\nnext: check this machine, then run it again") from error
        assert process.stdin is not None
        try:
            code = process.wait(BUILD_S)
        except subprocess.TimeoutExpired as error:
            raise NotCompiled(f"{error}\nnext: check this machine, then run it again") from error
        finally:
            if process.returncode is None:  # not reaped: its number is nobody else's
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            with contextlib.suppress(OSError):  # no guard: the compiler failed before it made one
                process.stdin.write(b"1")
                process.stdin.flush()
            with contextlib.suppress(OSError):
                process.stdin.close()
        said.seek(0)
        return code, said.read()


def _is_source(at: str, name: str) -> bool:
    kinds = (".py", ".c", ".pyi")
    return name.endswith(kinds) or (name not in ("__pycache__", "built") and Path(at, name).is_dir())


def main() -> int:
    try:
        print(build())
    except (NotCompiled, OSError) as why:
        print(f"the byte path was not compiled: {why}; until then it is interpreted", file=sys.stderr)
        return 1
    return 0
