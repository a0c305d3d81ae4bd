"""Which Python runs a submitted command: that of the caller's virtual or conda environment, or the system's.

A command that begins with a path is run by what is there. A bare name is looked up on the job's PATH, which is the
caller's. An environment that VIRTUAL_ENV or CONDA_PREFIX names, and whose programs are not on PATH (a login shell that
made PATH anew, a notebook, cron), is put first there, since whoever submits means it. Where both are on PATH, the first
one there counts. An environment that is gone, or cannot be read, is refused: PATH would lead to another Python without
a word.
"""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cli.client import USAGE, AgentctlError
from cli.table import printable

PYTHONS = re.compile(r"python(3(\.\d+)?)?|torchrun|accelerate|deepspeed|ipython|jupyter|pytest")
"""Programs that belong to one Python."""
VARIABLES = {"VIRTUAL_ENV": "virtual environment", "CONDA_PREFIX": "conda environment"}
LEAVES = {"VIRTUAL_ENV": "deactivate", "CONDA_PREFIX": "conda deactivate"}


@dataclass(frozen=True)
class ChosenPython:
    """What runs the command on this host; the job's hosts are taken to have the same files."""

    program: str
    """Path of the command's program; empty: there is none by its name."""
    python: str
    """Path of the interpreter beside it; empty: not known."""
    path: str
    """The job's PATH."""
    words: str
    """What is said of it, one line."""


def chosen(argv: Sequence[str], cwd: str, environ: Mapping[str, str], typed_path: str | None) -> ChosenPython | None:
    """The Python of this command; None: it is no program of a Python. `environ`: the caller's; `typed_path`: the PATH
    that was given to the job by --env. AgentctlError: the environment that is meant is not whole."""
    word = os.path.basename(argv[0])
    if not PYTHONS.fullmatch(word):
        return None
    path = environ.get("PATH", "") if typed_path is None else typed_path
    if os.path.dirname(argv[0]):
        program = os.path.abspath(os.path.join(cwd, argv[0]))
        prefix = os.path.dirname(os.path.dirname(program))
        if os.path.isfile(os.path.join(prefix, "pyvenv.cfg")):
            refuse_broken(prefix, "", path)
        elif not os.path.isfile(program):
            return None
        return ChosenPython(program, interpreter(program), path, f"{word} is {shown(program)}")
    named = {name: os.path.abspath(environ[name]) for name in VARIABLES if environ.get(name)}
    order = [os.path.realpath(each) for each in path.split(os.pathsep) if each]
    places = {name: order.index(at) for name, prefix in named.items() if (at := programs_of(prefix)) in order}
    variable, first = min(places, key=lambda name: places[name], default=""), ""
    if not variable and named and typed_path is None:
        variable = next(iter(named))
        first = f", of {variable}: put first on the job's PATH"
    if variable:
        refuse_broken(named[variable], variable, path)
    if first:
        path = os.pathsep.join(filter(None, (os.path.join(named[variable], "bin"), path)))
    program = shutil.which(word, path=path) or ""
    if not program:
        others = [each for each in ("python3", "python") if word.startswith("python") and shutil.which(each, path=path)]
        hint = f"there is {others[0]}" if others else "activate an environment, or name it by its path"
        return ChosenPython("", "", path, f"no program {word!r} is on the job's PATH here; {hint}")
    words = f"{word} is {shown(program)}{first}"
    if variable and not program.startswith(named[variable] + os.sep):
        words += f", not of {variable} ({printable(named[variable])})"
    return ChosenPython(program, interpreter(program), path, words)


def programs_of(prefix: str) -> str:
    """The folder of an environment's programs, without symbolic links."""
    return os.path.realpath(os.path.join(prefix, "bin"))


def shown(program: str) -> str:
    """The program's path, and what kind of environment it is of."""
    prefix = os.path.dirname(os.path.dirname(program))
    kind = "no environment"
    if os.path.isfile(os.path.join(prefix, "pyvenv.cfg")):
        kind = VARIABLES["VIRTUAL_ENV"]
    elif os.path.isdir(os.path.join(prefix, "conda-meta")):
        kind = VARIABLES["CONDA_PREFIX"]
    return f"{printable(program)} ({kind})"


def interpreter(program: str) -> str:
    """The interpreter that runs this program: itself, or the one beside it; empty: not known."""
    if os.path.basename(program).startswith("python"):
        return program
    beside = os.path.join(os.path.dirname(program), "python")
    return beside if os.access(beside, os.X_OK) else ""


def refuse_broken(prefix: str, variable: str, path: str) -> None:
    """AgentctlError: this environment has no Python that can be run. `variable`: what names it, empty: the command."""
    python = os.path.join(prefix, "bin", "python")
    if os.pathsep in prefix:
        why = f"its path has a {os.pathsep!r}, which divides PATH"
    elif not os.path.isdir(prefix):
        why = "there is no such folder"
    elif not os.access(os.path.dirname(python), os.R_OK | os.X_OK):
        why = f"{os.path.dirname(python)} cannot be read"
    elif os.path.islink(python) and not os.path.exists(python):
        why = f"its python leads to {os.path.realpath(python)}, which is not there"
    elif not os.path.isfile(python):
        why = f"there is no {python}"
    elif not os.access(python, os.X_OK):
        why = f"{python} may not be executed"
    else:
        return
    kind = VARIABLES.get(variable, VARIABLES["VIRTUAL_ENV"])
    what = f"the {kind} {printable(prefix)} cannot be used{f' ({variable} names it)' if variable else ''}"
    own = programs_of(prefix)
    rest = os.pathsep.join(each for each in path.split(os.pathsep) if each and os.path.realpath(each) != own)
    other = shutil.which("python3", path=rest) or "/path/of/python"
    next_step = (
        f"agentctl submit -- {printable(other)} ..., or make it anew: python3 -m venv --clear {printable(prefix)}"
    )
    if variable:
        next_step = f"{LEAVES[variable]}, and activate one that is whole; or: agentctl submit -- {printable(other)} ..."
    raise AgentctlError(USAGE, what, printable(why), next_step)
