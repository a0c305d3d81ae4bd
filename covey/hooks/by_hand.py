"""`covey.join()`: it returns the rank's job, and hooks its steps also where no `sitecustomize` ran (`python -I`)."""

from typing import Any

from covey.hooks import stacks
from covey.hooks.watch import ImportWatch
from covey.job import this_job
from covey.job.client import JobClient
from covey.job.this_job import JOIN_S


def join(timeout_s: float = JOIN_S) -> JobClient:
    """This rank's job. Waits at most `timeout_s` seconds for the agent's answer; an agent that is away is joined later,
    in the background. CoveyError outside a job, or when the agent refuses this process. The steps of PyTorch and JAX
    are seen from now on, until the script reports its own (`JobClient.step`)."""
    found = this_job.join(timeout_s)
    stacks.offer()

    def failed(error: BaseException) -> None:
        found.hooked("", f"{type(error).__name__}: {error}".replace("\n", " "))

    watch = ImportWatch(failed)
    watch.when_imported("torch.optim.optimizer", _torch_imported)
    watch.when_imported("jax", _jax_imported)
    return found


def _torch_imported(_module: Any) -> None:
    from covey.hooks.frameworks import torch_hooks

    torch_hooks.install()


def _jax_imported(_module: Any) -> None:
    from covey.hooks.frameworks import jax_hooks

    jax_hooks.install()
