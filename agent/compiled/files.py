"""Find the compiled byte path and use it; say why it is not used."""

import hashlib
import importlib
import platform
import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from covey.hooks.gate.build import is_ours

PROGRAMS = ("slabd", "vold", "spill")
"""The programs that use the compiled modules."""
SEALS = "vold"
"""The program that seals pages."""
BYTE_PATH = (
    "doors.nbd_front", "doors.nbd_pages", "doors.nbdwire", "lending.slab_session", "lending.slab_store",
    "links.asked_in_order", "links.lender_lane", "links.lender_pair", "links.mapped_slab", "links.one_sided",
    "links.remote_slab", "links.sealing", "links.write_buffers", "spill.log_keeper", "spill.page_table", "spill.spill",
    "spill.spill_ring", "volumes.latencies", "volumes.members.members_volume", "volumes.members.mirror_volume",
    "volumes.members.parity_volume", "volumes.paged_volume", "volumes.slab", "volumes.volume", "wire.slabwire",
)  # fmt: skip
DECISIONS = ("machine.spill_log", "policy.spilling")
MODULES = (
    "agent.ports.network.stream",
    *(f"plugins.memory.{name}" for name in DECISIONS),
    *(f"plugins.memory.datapath.{name}" for name in BYTE_PATH),
)
"""The modules that mypyc compiles. Classes that inherit from one another are compiled together, or not at all."""
CIPHER = "plugins.memory.datapath.links.page_cipher"
"""A module written in C, which exists compiled only."""
IMPORTED = ("agent/ports", "covey", "plugins/memory")
"""The folders of the modules and of all that they import."""
ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
SUFFIX = EXTENSION_SUFFIXES[0]


class Look(NamedTuple):
    """What was found for this Python and these sources."""

    files: dict[str, Path]
    """The compiled files by module, and the library that they share; empty: the byte path is interpreted."""
    why: str = ""
    """Why it, or a part of it, is interpreted, in words; empty: all of it is compiled."""


def sources() -> list[Path]:
    """The sources that the result depends on: these modules, and whatever they import of Covey, whose types are
    compiled in."""
    made_of = (HERE / "build.py", HERE / "compiler.py", ROOT / (CIPHER.replace(".", "/") + ".c"))
    return sorted([*made_of, *(file for part in IMPORTED for file in (ROOT / part).rglob("*.py"))])


def digest() -> str:
    """The digest of the sources."""
    found = hashlib.sha256("\n".join(MODULES).encode())
    for file in sources():
        found.update(file.relative_to(ROOT).as_posix().encode() + b"\n")
        found.update(file.read_bytes())
    return found.hexdigest()[:24]


def abi() -> str:
    """The Python and the machine for which machine code is made, such as `cpython-311-x86_64-linux-gnu`."""
    return str(sysconfig.get_config_var("SOABI") or f"{sys.implementation.cache_tag}-{platform.machine()}")


def folder_name() -> str:
    return f"{digest()}.{abi()}"


def carried() -> Path:
    """The folder of the compiled modules that came in the wheel, one folder for each digest and ABI."""
    return HERE / "built"


def home() -> Path:
    """The folder of the modules that were compiled for this environment, one folder for each digest and ABI."""
    return Path(sys.prefix, "lib", "covey-compiled")


def folder() -> Path:
    """The folder into which `build` compiles."""
    return home() / folder_name()


def look() -> Look:
    """Find the compiled modules: those compiled here, then those of the wheel. Raises nothing."""
    whys: list[str] = []
    try:
        name = folder_name()
        for place in (home(), carried()):
            files, why = _in(place / name)
            if files:
                return Look(files)
            whys += [why or _other(place, name)]
    except OSError as error:
        whys.append(str(error))
    return Look({}, next((why for why in whys if why), "it was never compiled for this installation"))


def _in(at: Path) -> tuple[dict[str, Path], str]:
    """The files in this folder; or none, and what is wrong with them. Neither: there is no such folder."""
    if not at.is_dir():
        return {}, ""
    files = {module: at / (module.replace(".", "/") + SUFFIX) for module in (*MODULES, CIPHER)}
    missing = [module for module, file in files.items() if not file.is_file()]
    files |= {file.name.removesuffix(SUFFIX): file for file in at.glob(f"*{SUFFIX}")}
    if missing or len(files) == len(MODULES) + 1:
        return {}, f"{at} is not whole: it lacks {missing[0] if missing else 'the library of its modules'}"
    open_to = [file for file in files.values() if not is_ours(file)]
    if open_to:
        return {}, f"other users can write to {open_to[0]}"
    return files, ""


def _other(place: Path, name: str) -> str:
    """What lies there instead of the folder of that name, in words; empty: nothing."""
    there = [each.name for each in place.iterdir() if each.is_dir()] if place.is_dir() else []
    sources_of, _, wanted = name.partition(".")
    for each in there:
        made_of, _, for_abi = each.partition(".")
        if made_of == sources_of and for_abi != wanted:
            return f"it was compiled for {for_abi}, and this is {wanted}"
    return f"it was compiled from other sources (in {place})" if any("." in each.strip(".") for each in there) else ""


def told(found: Look) -> str:
    """How the byte path runs with these files, for people: `compiled`, or `interpreted`, why, and the next step."""
    if found.files:
        return f"compiled; {found.why}" if found.why else "compiled"
    fix = (
        f"{sys.executable} -m agent.compiled, then restart the agent, and end vold and slabd by SIGTERM: it starts them"
    )
    return f"interpreted: {found.why}; next: {fix}"


class CompiledFinder(MetaPathFinder):
    """Imports the compiled modules instead of their sources."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)


def use(program: str) -> str:
    """Use the compiled modules in this program, before it is imported. Returns how its byte path runs (`told`); empty
    for a program that has none."""
    if program not in PROGRAMS:
        return ""
    seals = program == SEALS
    found = _of_agent[0] if _of_agent else install(look(), seals)
    return told(found if seals or not found.files else Look(found.files))


_of_agent: list[Look] = []
"""What this process, an agent, uses for itself and for the programs that are forked from it."""


def use_in_agent() -> None:
    """Use the compiled modules in this process and in all that is forked from it, before they are imported."""
    _of_agent[:] = [install(look())]


def told_of_agent() -> str:
    """How the byte path runs of what this agent starts (`told`)."""
    return told(_of_agent[0] if _of_agent else look())


def install(found: Look, seals: bool = True) -> Look:
    """Import the compiled modules from here on, if they can be loaded: returns what is used. The library that they
    share is loaded first, for it alone depends on this machine (its C library); with `seals` the cipher too, which
    depends on the machine's libcrypto."""
    if not found.files:
        return found
    finder = CompiledFinder(found.files)
    sys.meta_path.insert(0, finder)
    if said := _fails([module for module in found.files if "." not in module]):
        sys.meta_path.remove(finder)
        return Look({}, f"the import of its machine code failed with: {said}")
    said = _fails([CIPHER] if seals else [])
    why = f"but pages are sealed one by one, since {said}; next: install OpenSSL 3" if said else ""
    return Look(found.files, why)


def _fails(modules: Sequence[str]) -> str:
    """Why one of the modules cannot be imported; empty: all were."""
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        return " ".join(str(error).split())[:300]
    return ""
