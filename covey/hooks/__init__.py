"""Hooks that see a training script's steps without a change to the script.

    runner: PYTHONPATH=covey/hooks/site:...   (`agentctl submit --no-hooks` leaves it out)
      '-> site/sitecustomize.py -> attach() -> watches for the import of torch
            '-> torch_hooks: an optimizer stepped, a batch was fetched ... -> steps.StepCounter -> reporter -> agent

`covey.join()` attaches too, for a Python that reads no PYTHONPATH.

In AntMan (OSDI 2020, §3.3) job and coordinator talk once per mini-batch, through patched frameworks. The hooks here are
PyTorch's own (`register_optimizer_step_post_hook`) or wrap one Python function; none is called per operator. An error
in a hook is reported once, in one line (`agentctl job`), and never reaches the script.
"""

import os
from collections.abc import Mapping

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
"""Folder that the runner puts first into PYTHONPATH."""


def rank_of(environ: Mapping[str, str]) -> str:
    """Why this process does not report for its rank; empty when it does. A launcher (torchrun) that runs as a rank
    starts processes of its own, which have the rank's variables too: only the first of them reports."""
    if not environ.get("COVEY_SOCKET") or not environ.get("COVEY_TOKEN"):
        return "this process is not part of a Covey job"
    if environ.get("COVEY_HOOKS", "1") == "0":
        return "--no-hooks"
    launched = any(environ.get(name, environ[ours]) != environ[ours] for name, ours in _COUNTS if ours in environ)
    if launched and environ.get("LOCAL_RANK", "0") != "0":
        return "another process of this rank reports"
    return ""


_COUNTS = (("RANK", "COVEY_RANK"), ("WORLD_SIZE", "COVEY_WORLD_SIZE"))
