"""The job of this process: one connection to the agent, made by whoever needs it first. Hooks, a framework's door and
`covey.join()` have the same one, since two connections of one rank would replace each other."""

import os

from covey.job.client import JobClient
from covey.kernel import at_exit

JOIN_S = 10.0
"""Seconds to wait for an agent that is away; then the script continues, and joins when the agent is back."""
_process: JobClient | None = None
"""The connection of `covey.hooks` in this process, which `join` hands to the script."""


def of_process() -> JobClient:
    """This process's connection, made if there is none. CoveyError when this process is no rank of a job."""
    global _process
    if _process is None or _process not in at_exit.living or _process.is_elsewhere:
        _process = JobClient(os.environ)
    return _process


def joined(job: JobClient | None = None) -> JobClient:
    """The job that was given, or this process's own once the agent has answered, or was waited for. CoveyError as of
    `join`."""
    if job is not None:
        return job
    found = of_process()
    found.wait_joined(JOIN_S)
    return found


def join(timeout_s: float = JOIN_S) -> JobClient:
    """This rank's job. Waits at most `timeout_s` seconds for the agent's answer; an agent that is away is joined later,
    in the background. CoveyError outside a job, or when the agent refuses this process."""
    global _process
    client = of_process()
    if client.given:
        client = _process = JobClient(os.environ)
    client.given = True
    client.wait_joined(timeout_s)
    return client
