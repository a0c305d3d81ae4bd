"""Which handler replays which file: the plugins' own modules, merged."""

import importlib
from collections.abc import Mapping

from sim.vectors.types import Handler

MODULES: dict[str, tuple[str, ...]] = {
    "scheduler": ("2das_small", "2das_traces", "gittins_index", "placement", "quota"),
    "aggregator": ("autops_assign", "parameters/autops"),
    "tuner": ("parameters/cruise",),
    "interleave": ("harmony_group", "parameters/harmony"),
}
"""Module of this package -> the names of the files (`file/key` for one list of several) that it replays."""


def load() -> tuple[dict[str, Handler], dict[str, str]]:
    """All handlers by name, and for every known name without one the module that would have it."""
    found: dict[str, Handler] = {}
    missing: dict[str, str] = {}
    for module, names in MODULES.items():
        theirs = _handlers(f"sim.vectors.{module}")
        found |= theirs
        missing |= {name: module for name in names if name not in theirs}
    return found, missing


def _handlers(path: str) -> Mapping[str, Handler]:
    """`HANDLERS` of the module, empty when the module is not there. An import that fails inside it is a defect."""
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        return {}
    handlers: Mapping[str, Handler] = module.HANDLERS
    return handlers
