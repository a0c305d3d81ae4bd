"""The byte path of remote memory, compiled: the Python sources, made into machine code by mypyc.

    python -m agent.compiled        for this installation; prints the folder (three minutes of one core, once)

The result is under the environment's own prefix, in a folder named after the sources, the Python and the machine, so
that nothing is ever loaded that was made from other sources: after an upgrade it is made again. Where it was not made,
or another user could have written it, the modules are interpreted, and every promise holds all the same. A request for
a page then costs a half more processor time (`docs/results/memory.md`).
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from covey.hooks.gate.build import is_ours

PROGRAMS = ("slabd", "vold", "spill")
"""The programs that use the compiled modules."""
BYTE_PATH = (
    "doors.nbd_front", "doors.nbd_pages", "doors.nbdwire", "lending.slab_session", "lending.slab_store",
    "links.asked_in_order", "links.lender_lane", "links.lender_pair", "links.mapped_slab", "links.one_sided",
    "links.remote_slab", "links.write_buffers", "spill.log_keeper", "spill.page_table", "spill.spill",
    "spill.spill_ring", "volumes.latencies", "volumes.members.members_volume", "volumes.members.mirror_volume",
    "volumes.members.parity_volume", "volumes.paged_volume", "volumes.slab", "volumes.volume", "wire.slabwire",
)  # fmt: skip
DECISIONS = ("machine.spill_log", "policy.spilling")
MODULES = (
    "agent.ports.network.stream",
    *(f"plugins.memory.{name}" for name in DECISIONS),
    *(f"plugins.memory.datapath.{name}" for name in BYTE_PATH),
)
"""The modules that are compiled. Classes that inherit from one another are compiled together, or not at all."""
IMPORTED = ("agent/ports", "covey", "plugins/memory")
"""The folders of the modules and of all that they import."""
TREES = ("agent", "covey", "gossip", "plugins")
"""The folders that mypy reads for that."""
ROOT = Path(__file__).parent.parent
SUFFIX = EXTENSION_SUFFIXES[0]
BUILD_S = 900.0
"""Seconds after which a compiler is taken to hang."""
SETUP = """
import sys
from setuptools import setup
from mypyc.build import mypycify
options = ["--config-file=mypy.ini"]
modules = mypycify([*options, *sys.argv[3:]], opt_level="2", debug_level="0")
setup(name="covey-compiled", packages=[], ext_modules=modules,
      script_args=["-q", "build_ext", "--build-lib", sys.argv[1], "--build-temp", sys.argv[2]])
"""
MYPY = """
[mypy]
ignore_missing_imports = True
follow_imports = silent
"""


class NotCompiled(Exception):
    """Why nothing was compiled, with what to do next."""


def sources() -> list[Path]:
    """The sources that the result depends on: these modules, and whatever they import of Covey, whose types are
    compiled in."""
    return sorted(file for part in IMPORTED for file in (ROOT / part).rglob("*.py"))


def digest() -> str:
    found = hashlib.sha256("\n".join([sys.version, platform.machine(), SETUP, MYPY, *MODULES]).encode())
    for file in sources():
        found.update(file.read_bytes())
    return found.hexdigest()[:24]


def home() -> Path:
    """The folder of this environment's compiled modules, one for each digest."""
    return Path(sys.prefix, "lib", "covey-compiled")


def folder() -> Path:
    return home() / digest()


def found(at: Path) -> dict[str, Path]:
    """The compiled files by module, all of them, and the library that they share; empty when one is missing, or
    somebody but this user and root could have written it."""
    files = {module: at / (module.replace(".", "/") + SUFFIX) for module in MODULES}
    files |= {file.name.removesuffix(SUFFIX): file for file in at.glob(f"*{SUFFIX}")}
    return files if len(files) > len(MODULES) and all(is_ours(file) for file in files.values()) else {}


def trouble() -> str:
    """What people should know of it: the modules were compiled once, and are not used. Empty: all is well, or they
    never were."""
    if found(folder()) or not home().is_dir():
        return ""
    return (
        f"the byte path is interpreted: the files in {home()} were built from other "
        "sources, or others can write to them; next:"
        + (f" {sys.executable} -m agent.compiled, then restart vold, slabd and this agent")
    )


class CompiledFinder(MetaPathFinder):
    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def use(program: str) -> bool:
    """Use the compiled modules in this program, before it is imported. Whether it runs compiled."""
    return program in PROGRAMS and install(folder())


def install(at: Path) -> bool:
    """Import these modules from the folder from here on, if they are all there; whether they are."""
    files = found(at)
    if files:
        sys.meta_path.insert(0, CompiledFinder(files))
    return bool(files)


def build() -> Path:
    """Compile the modules, unless that was done. NotCompiled with the compiler's words, or for want of one."""
    there = folder()
    if found(there):
        return there
    if shutil.which(os.environ.get("CC", "cc")) is None:
        raise NotCompiled("there is no C compiler\nnext: install gcc or clang")
    there.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".covey-", dir=there.parent) as work:
        _compile(Path(work))
        shutil.rmtree(there, ignore_errors=True)
        os.replace(Path(work, "out"), there)
    if not found(there):
        raise NotCompiled(f"{there} can be written by others: nothing is loaded from there")
    for older in there.parent.iterdir():
        if older != there:
            shutil.rmtree(older, ignore_errors=True)
    return there


def _compile(work: Path) -> None:
    """Compile into `out` in that folder. In a copy, since what is installed may be neither written to nor looked at as
    sources."""
    for tree in TREES:
        shutil.copytree(ROOT / tree, work / tree, ignore=lambda at, names: [n for n in names if not _is_source(at, n)])
    files = [module.replace(".", "/") + ".py" for module in MODULES]
    Path(work, "mypy.ini").write_text(MYPY)
    command = [sys.executable, "-P", "-c", SETUP, str(work / "out"), str(work / "temp"), *files]
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=BUILD_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{error}\nnext: check this machine, then run it again") from error
    if done.returncode:
        said = (done.stdout + done.stderr)[-2000:]
        missing = "No module named" in said
        what = "pip install 'covey-agent[compiled]' into this environment" if missing else "report this"
        raise NotCompiled(f"mypyc ended with {done.returncode}:\n{said}\nnext: {what}")


def _is_source(at: str, name: str) -> bool:
    return name.endswith(".py") or (name != "__pycache__" and Path(at, name).is_dir())


def main() -> int:
    try:
        print(build())
    except (NotCompiled, OSError) as why:
        print(f"the byte path was not compiled: {why}; until then it is interpreted", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
