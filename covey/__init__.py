"""Covey's job side: the only package of ours that a training script imports.

    import covey

    with covey.join() as job:
        grads = job.tensors.push_pull("weights", grads)
        job.step(loss=loss)

What is named here is imported when it is first used: `import covey` alone costs no numpy.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.client import CoveyError as CoveyError
    from covey.client import JobClient as Job
    from covey.client import join as join
    from covey.remote import RemoteMemory as RemoteMemory

__all__ = ["CoveyError", "Job", "RemoteMemory", "join"]


def __getattr__(name: str) -> Any:
    if name == "RemoteMemory":
        from covey.remote import RemoteMemory

        return RemoteMemory
    if name in __all__:
        from covey import client

        return client.JobClient if name == "Job" else getattr(client, name)
    raise AttributeError(f"module 'covey' has no attribute {name!r}")
