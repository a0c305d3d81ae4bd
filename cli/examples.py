"""What people may type first: the examples that end each `--help`, manual page and section of the reference.

A test runs each of them (tests/cli/test_examples.py).
"""

from collections.abc import Mapping, Sequence

EXAMPLES: Mapping[str, Sequence[str]] = {
    "": ("agentctl submit --workers 4 -- python train.py", "agentctl jobs", "agentctl logs j1 -f"),
    # look
    "hosts": ("agentctl hosts", "agentctl hosts drain gpu2 --wait"),
    "gpus": ("agentctl gpus", "agentctl gpus --line"),
    "groups": ("agentctl groups",),
    "interference": ("agentctl interference j1",),
    "top": ("agentctl top",),
    "jobs": ("agentctl jobs --everyone --state running,queued", "agentctl jobs -a --sort=-time --limit 10 -o csv"),
    "job": ("agentctl job j1 --plot",),
    "history": ("agentctl history --user ann --since 7d", "agentctl history --state failed --limit 20 -o csv"),
    "report": ("agentctl report --by user --since 7d", "agentctl report j1"),
    "logs": ("agentctl logs j1 -f", "agentctl logs j1 --rank 1 --tail 50"),
    "why": ("agentctl why j1", "agentctl why host/gpu2"),
    "slabs": ("agentctl slabs demo",),
    "memory": ("agentctl memory",),
    "tensors": ("agentctl tensors", "agentctl tensors --move j1 gpu3"),
    "gossip": ("agentctl gossip",),
    "leader": ("agentctl leader",),
    "status": ("agentctl status",),
    "doctor": ("agentctl doctor",),
    "bundle": ("agentctl bundle trouble.tar.gz",),
    "version": ("agentctl version",),
    "page": ("agentctl page",),
    "ping": ("agentctl ping gpu2",),
    "completion": ("agentctl completion bash",),
    # act
    "submit": (
        "agentctl submit --workers 4 --gpus 1 --time 2h -- python train.py",
        "agentctl submit --array 0-99%8 --name sweep -- python train.py",
        "agentctl submit --after ok:j1 --wait -- python eval.py",
    ),
    "run": ("agentctl run --gpus 2 -- python train.py",),
    "stacks": ("agentctl stacks j1",),
    "exec": ("agentctl exec j1 -- nvidia-smi", "agentctl exec j1.2 -- ls -l"),
    "shell": ("agentctl shell j1", "agentctl shell --gpus 1"),
    "cancel": ("agentctl cancel j1", "agentctl cancel --name 'sweep*' --state queued"),
    "hold": ("agentctl hold j1",),
    "release": ("agentctl release j1",),
    "requeue": ("agentctl requeue j1 --hold",),
    "checkpoint": ("agentctl checkpoint j1",),
    "preempt": ("agentctl preempt --test j1",),
    "priority": ("agentctl priority j1 --up",),
    "update": ("agentctl update j1 --time 4h",),
    "move": ("agentctl move j1 gpu2", "agentctl move j1 3 gpu5"),
    "scale": ("agentctl scale j1 8 --why 'the night is quiet'",),
    "tune": ("agentctl tune j1", "agentctl tune j1 off"),
    "wait": ("agentctl wait j1", "agentctl wait j1 --timeout 10min"),
    "volume": ("agentctl volume create demo 64MiB", "agentctl volume show demo"),
    "volume ls": ("agentctl volume ls",),
    "volume show": ("agentctl volume show demo",),
    "volume create": ("agentctl volume create demo 64MiB", "agentctl volume create safe 1GiB --mirror 2 --tenant ml"),
    "volume rm": ("agentctl volume rm demo",),
    "volume swap": ("agentctl volume swap swap1 64GiB",),
    "volume unswap": ("agentctl volume unswap swap1",),
    "volume export": ("agentctl volume export demo --socket /tmp/demo.sock",),
    "volume unexport": ("agentctl volume unexport demo --socket /tmp/demo.sock",),
    "volume give-up": ("agentctl volume give-up demo",),
    "rack": ("agentctl rack init --config agent.toml --no-start", "agentctl rack token"),
    "rack init": ("agentctl rack init --config agent.toml --no-start",),
    "rack join": ("agentctl rack join gpu1:7946 --token-file token.txt --config agent.toml --no-start",),
    "rack token": ("agentctl rack token",),
    "login": ("agentctl login --days 7",),
    "keys": ("agentctl keys", "agentctl keys rotate", "agentctl keys install"),
    "voters": ("agentctl voters", "agentctl voters replace gpu2 gpu4"),
    "quota": ("agentctl quota", "agentctl quota ml 16"),
    "tenant": ("agentctl tenant list", "agentctl tenant add ml --users ann,bob --quota 16"),
    "tenant list": ("agentctl tenant list",),
    "tenant add": ("agentctl tenant add ml --users ann,bob --quota 16",),
    "tenant set": ("agentctl tenant set ml --add carol --quota 24",),
    "tenant remove": ("agentctl tenant remove ml",),
}
"""Command as it is typed after `agentctl`, or a noun that has commands of its own -> lines to type."""


def epilog(command: str) -> str:
    """The end of a command's `--help`; empty: it is none of agentctl's."""
    lines = EXAMPLES.get(command, ())
    if not lines:
        return ""
    head = "example:" if len(lines) == 1 else "examples:"
    return "\n".join([head, *(f"  {line}" for line in lines)])
