"""The first `sitecustomize` on a rank's PYTHONPATH: attaches Covey, then runs the one that would have run.

Every Python of the job loads this file, also an old one and one without covey-job: it uses only the standard library,
imports nothing of Covey until torch or jax is imported, and swallows all of its own errors.
"""

import os
import sys
from typing import Any


def _beside(name: str) -> Any:
    """A file of the folder above, run by its path: it may belong to another installation than this Python's."""
    import importlib.util

    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), name + ".py")
    spec = importlib.util.spec_from_file_location("_covey_" + name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _failed(error: BaseException) -> None:
    problem = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in ("covey", "msgspec", "numpy"):
        problem = f"covey-job is not installed for {sys.executable} ({error})"
    _beside("bare").report(problem)


def _torch_imported(module: object) -> None:
    from covey.hooks.frameworks import torch_hooks

    torch_hooks.install()


def _jax_imported(module: object) -> None:
    from covey.hooks.frameworks import jax_hooks

    jax_hooks.install()


def _wait_if_spare() -> None:
    """Wait, in a spare. A spare whose wait fails ends: its script must not begin without being a rank."""
    if "COVEY_SPARE" in os.environ:
        waited = False
        try:
            _beside("warm").wait()
            waited = True
        finally:
            if not waited:
                os._exit(70)


def _attach() -> None:
    if os.environ.get("COVEY_SOCKET") and os.environ.get("COVEY_HOOKS", "1") != "0":
        _beside("warm").offer()
        _beside("stacks").offer()
        watch = _beside("watch").ImportWatch(_failed)
        watch.when_imported("torch.optim.optimizer", _torch_imported)
        watch.when_imported("jax", _jax_imported)


def _run_next() -> None:
    """Run the `sitecustomize` behind this one, as `site` would have: its errors are raised."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_wait_if_spare()
try:
    _attach()
except Exception:  # the script must run as if this file were not there
    pass
_run_next()
