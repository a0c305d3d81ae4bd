"""A spare: a process that has started its Python and imported what the ranks of its job import, and waits to become one
(`submit --spares`). Standard library only, since every Python of a job runs this (`site/sitecustomize.py`).

    shim --> Python --> sitecustomize --> here: imports, "warm", waits --> its environment comes --> the script begins

Nothing of the script has run before: it reads its RANK, draws its random numbers and opens its files as any rank does.
A module that opens a GPU when it is imported makes the process unfit, since it is not known yet which GPU it will get.
"""

import contextlib
import importlib
import json
import os
import sys

SPARE, MODULES = "COVEY_SPARE", "COVEY_SPARE_MODULES"
"""Variables of a spare: its descriptors for commands and answers (`agent/ports/processes/shim.py`); its modules."""
MODULES_MAX, NAMES_BYTES_MAX = 256, 8192
LENGTH_BYTES = 8
UNFIT = 70
INSTALLED = ("site-packages", "dist-packages")
NOT_AGAIN = ("sitecustomize", "usercustomize")


def offer() -> None:
    """Allow spares: this Python has run this file as it started, so another that is started in the same way can wait as
    a spare (`covey.kernel.spare_modules`)."""
    pid = os.getpid()
    sys._covey_imported = lambda: imported() if os.getpid() == pid else ()  # type: ignore[attr-defined]


def imported() -> "tuple[str, ...]":
    """Modules that a spare of this process imports ahead: installed packages, and their parts."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    own = [os.getcwd()] + ([os.path.dirname(os.path.abspath(main))] if main else [])
    names: list[str] = []
    for name, module in list(sys.modules.items()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None) or ""
        top = name.partition(".")[0]
        if (
            (name.count(".") > 1 and top != "covey")
            or not name.isascii()
            or top.startswith("_")
            or top in sys.stdlib_module_names
            or top in NOT_AGAIN
        ):
            continue
        installed = any(folder in origin for folder in INSTALLED)
        if os.path.isabs(origin) and (installed or not any(origin.startswith(f"{path}{os.sep}") for path in own)):
            names.append(name)
    kept, size = [], 0
    for name in sorted(names, key=lambda name: name.count("."))[:MODULES_MAX]:
        size += len(name) + 1
        if size <= NAMES_BYTES_MAX:
            kept.append(name)
    return tuple(kept)


def wait() -> None:
    """Wait in a spare, and return once it is a rank, with that rank's environment. The process ends when it is not
    wanted any more, and on any error: its script must never begin without being a rank."""
    is_rank = False
    try:
        hears, says = (int(file) for file in os.environ.pop(SPARE).split(","))
        names = os.environ.pop(MODULES, "")
        for file in (hears, says):
            os.set_inheritable(file, False)
        os.write(says, b"here\n")
        for name in names.split(",") if names else ():
            with contextlib.suppress(Exception):  # the script will see for itself
                importlib.import_module(name)
        why = opened_device()
        os.write(says, f"unfit: {why}\n".encode() if why else b"warm\n")
        length = int.from_bytes(_exactly(hears, LENGTH_BYTES), "little")
        env = json.loads(_exactly(hears, length))
        os.environ.clear()
        os.environ.update(env)
        os.close(hears)
        os.close(says)
        is_rank = True
    finally:
        if not is_rank:
            os._exit(UNFIT)


def opened_device() -> str:
    """Words on the GPU that some module has opened; empty: none."""
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{file}")
            if path.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
                return f"a module opens {path} when it is imported"
    return ""


def _exactly(file: int, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = os.read(file, size - len(found))
        if not part:
            raise EOFError("it is no longer needed")
        found += part
    return found
