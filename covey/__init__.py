"""Covey's job side: the only Covey package that a training script imports.

    import covey

    with covey.join() as job:
        grads = job.tensors.push_pull("weights", grads)
        job.step(loss=loss)

Each name here is imported at its first use: `import covey` alone imports no numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.core.errors import CoveyError as CoveyError
    from covey.core.errors import RankLeft as RankLeft
    from covey.core.errors import TensorError as TensorError
    from covey.hooks.by_hand import join as join
    from covey.job.client import JobClient as Job
    from covey.remote import RemoteMemory as RemoteMemory
    from covey.remote import RemoteMemoryError as RemoteMemoryError
    from covey.tensors.numbers.moments import Moments as Moments
    from covey.tensors.numbers.updates import SGD as SGD
    from covey.tensors.numbers.updates import Adam as Adam

__all__ = [
    "SGD",
    "Adam",
    "CoveyError",
    "Job",
    "Moments",
    "RankLeft",
    "RemoteMemory",
    "RemoteMemoryError",
    "TensorError",
    "join",
]
_FROM = {
    "Adam": ("tensors.numbers.updates", "Adam"),
    "CoveyError": ("core.errors", "CoveyError"),
    "Job": ("job.client", "JobClient"),
    "Moments": ("tensors.numbers.moments", "Moments"),
    "RankLeft": ("core.errors", "RankLeft"),
    "RemoteMemory": ("remote", "RemoteMemory"),
    "RemoteMemoryError": ("remote", "RemoteMemoryError"),
    "SGD": ("tensors.numbers.updates", "SGD"),
    "TensorError": ("core.errors", "TensorError"),
    "join": ("hooks.by_hand", "join"),
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'covey' has no attribute {name!r}")
    module, attribute = _FROM[name]
    return getattr(importlib.import_module(f"covey.{module}"), attribute)
