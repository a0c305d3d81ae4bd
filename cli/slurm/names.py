"""Which of Slurm's commands agentctl is called by, and running it."""

import argparse
import os
from collections.abc import Sequence

from cli.client import find
from cli.context import Context
from cli.jobs import submit
from cli.slurm import accounts, acting, looking, nodes, sbatch
from cli.table import Paint

COMMANDS = {
    "sbatch": sbatch.run,
    "squeue": looking.squeue,
    "scancel": acting.scancel,
    "sinfo": nodes.sinfo,
    "sacct": looking.sacct,
    "scontrol": acting.scontrol,
    "sacctmgr": accounts.sacctmgr,
}
VERSION = "slurm 22.05.0 (covey)"
"""What --version says: programs look for this form."""


def run(name: str, words: Sequence[str]) -> int:
    """The exit code. AgentctlError passes through."""
    if list(words) in (["--version"], ["-V"]):
        print(VERSION)
        return 0
    if list(words) in (["--help"], ["-h"], ["--usage"]) and name != "squeue":
        print(f"{name}: Covey, by the name of Slurm's command; its own: agentctl --help")
        return 0
    parser = argparse.ArgumentParser(add_help=False)
    submit.arguments(parser)
    args = parser.parse_args([])
    args.json, args.timeout, args.noun, args.color = False, None, name, "auto"
    return COMMANDS[name](Context(args, find(None, os.environ), Paint("auto")), words)
