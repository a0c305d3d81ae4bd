"""Whether the Python of a submitted command has covey-job, where the job needs it, and the line that installs it.

The Python itself is asked, by its own import system, so a .pth file, PYTHONPATH and an editable installation count. It
is asked on this host: the job's hosts are taken to have the same files, so what is missing is said and not refused.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from cli.table import printable

ASK_S = 10.0
"""Seconds within which a Python has to answer."""
SCRIPT_BYTES_MAX = 1 << 20
IMPORTS = re.compile(rb"^[ \t]*(?:import|from)[ \t]+covey\b", re.MULTILINE)
OLDEST = (3, 11)
ASKED = """
import sys
sys.path[:] = [each for each in sys.path if each]
import importlib.util, json, os, sysconfig
sys.path.insert(0, sys.argv[1])
def has(name):
    try:
        found = importlib.util.find_spec(name)
    except Exception:
        return False
    return found is not None and found.origin is not None
managed = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
print(json.dumps({
    "version": list(sys.version_info[:2]),
    "missing": [each for each in ("covey", "msgspec", "numpy", "isal") if not has(each)],
    "pip": has("pip"),
    "managed": sys.prefix == sys.base_prefix and os.path.exists(managed),
}))
"""
"""What that Python runs; any Python 3 can. What it imports itself comes from that Python alone: nothing in
the folder where `submit` is typed is run, whatever it is called."""


def why_needed(spec: Mapping[str, Any], argv: Sequence[str], cwd: str) -> str:
    """What of the job needs covey-job, in words; empty: nothing that can be seen."""
    if "COVEY_AGGREGATE" in spec["env"]:
        return "--aggregate"
    if spec.get("on_lost") == "heal":
        return "--on-lost heal"
    if "workers_max" in spec:
        return f"--workers {spec['workers']}..{spec['workers_max']}"
    if spec.get("spares"):
        return "--spares"
    script = script_of(argv, cwd)
    try:
        with open(script, "rb") as file:
            imports = IMPORTS.search(file.read(SCRIPT_BYTES_MAX)) is not None
    except (OSError, ValueError):
        return ""
    return f"{os.path.basename(script)}, which imports covey," if imports else ""


def script_of(argv: Sequence[str], cwd: str) -> str:
    """The path of the first argument that is a Python file; empty: none is."""
    paths = (os.path.join(cwd, word) for word in argv[1:] if word.endswith(".py"))
    return next(filter(os.path.isfile, paths), "")


def lacking(python: str, reason: str, folder: str, environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """What is missing, why that matters, and the next step; None: nothing is, as far as it can be known. `folder`: that
    of the script; `environ`: the job's."""
    try:
        done = subprocess.run(
            [python, "-c", ASKED, folder], env=dict(environ), capture_output=True, timeout=ASK_S, check=False
        )
        said = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        why = f"{reason} needs it, and that Python did not answer: {printable(str(error))[:200]}"
        return f"whether {printable(python)} has covey-job is not known", why, f'{python} -c "import covey"'
    if not said["missing"]:
        return None
    version = tuple(said["version"])
    what = f"covey-job is not installed for {printable(python)}"
    why = f"{reason} needs it; there is no module {', '.join(said['missing'])}"
    if version < OLDEST:
        why = f"{reason} needs it, and it needs Python 3.11 or newer: this is {'.'.join(map(str, version))}"
        return what, why, "python3.11 -m venv env, and install covey-job there"
    return what, why, install_line(python, said)


def install_line(python: str, said: Mapping[str, Any]) -> str:
    """The line that installs covey-job for this Python."""
    wheel = source()
    if said["managed"]:  # by the distribution, whose pip refuses
        return f"{python} -m venv env && env/bin/pip install {wheel}, then activate env"
    if said["pip"]:
        return f"{python} -m pip install {wheel}"
    return f"uv pip install --python {python} {wheel}"


def source() -> str:
    """What pip is to install: the folder of this checkout, or the wheel that came with agentctl."""
    from covey.core.version import VERSION

    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.isfile(os.path.join(folder, "covey", "pyproject.toml")):
        return os.path.join(folder, "covey")
    wheel = f"covey_job-{VERSION}-py3-none-any.whl"
    beside = os.path.join(sys.prefix, "share", "covey", wheel)
    return beside if os.path.isfile(beside) else f"{wheel} (make dist, in a checkout, writes it into dist)"
