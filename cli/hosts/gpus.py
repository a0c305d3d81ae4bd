"""List every GPU of the rack, and which job holds it. `--line` prints one line for a status bar; `--shared` shows every
second how jobs share each GPU.

A GPU that is `lost`, to be emptied (`drain`) or in an unknown state takes no job; NOTE says why. Once a GPU was reset,
replaced or taken out, `agentctl gpus forget UUID` on its host drops what the agent remembers of it: its XID errors, and
that it exists."""

import argparse
import re
from collections.abc import Mapping
from typing import Any

from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.hosts import shared_gpus
from cli.lists import Listing, list_arguments, show, watch_argument
from cli.table import ago, plural
from covey.core.units import format_size

TITLES = ("HOST", "GPU", "MODEL", "MEMORY USED", "OF", "BUSY", "JOB", "SEEN", "NOTE")


AWAY = ("away", "gone", "left")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=("forget",),
        help="forget UUID: drop what the agent remembers of a GPU that was reset or taken out",
    )
    parser.add_argument("gpu", nargs="?", metavar="UUID", help="UUID of the GPU")
    parser.add_argument("--line", action="store_true", help="print one line, for a status bar such as tmux's")
    said = "show how jobs share each GPU, again every second (or SECONDS)"
    list_arguments(parser)
    watch_argument(parser)
    parser.add_argument("--shared", nargs="?", const=1.0, type=float, metavar="SECONDS", help=said)


def run(context: Context) -> int:
    if context.args.action is not None:
        return forget(context, context.args.gpu)
    if context.args.shared is not None:
        return shared_gpus.watch(context, max(0.2, context.args.shared))
    if context.args.watch:
        from cli.watched import watch  # only where it is needed: agentctl's imports are a budget

        return watch(context, "gpus", lambda _rows: LISTING)
    answer = context.agent.gather("gpus")
    gpus = answer.data
    uses = [use(gpu) for gpu in gpus]
    free, away, out = uses.count("free"), sum(name in AWAY for name in uses), uses.count("out")
    summary = f"{plural(len(gpus), 'GPU')}: {len(gpus) - free - away - out} held, {free} free"
    summary += f", {out} out of use" if out else ""
    summary += f", {away} on hosts that are gone" if away else ""
    if context.args.line and not context.json:
        silent = len(answer.unanswered)
        context.say(summary + (f"; {plural(silent, 'host')} did not answer" if silent else ""))
        return context.whole(answer)
    if not show(context, LISTING, answer):
        return context.whole(answer)
    for next_step in dict.fromkeys(step for gpu in gpus if (step := next_of(gpu))):
        context.say(f"next: {next_step}")
    context.as_of(answer, summary, age_s=max((gpu["age_s"] for gpu in gpus), default=0.0))
    return context.whole(answer)


def cells(gpu: Mapping[str, Any]) -> tuple[object, ...]:
    """What the columns of `TITLES` show of a GPU."""
    simulated = " (simulated)" if gpu["simulated"] and "simulated" not in gpu["model"].lower() else ""
    return (
        gpu["host"],
        gpu["index"],
        (gpu["model"] or "unknown") + simulated,
        format_size(gpu["memory_used_bytes"]) if tells(gpu) else None,
        format_size(gpu["memory_total_bytes"]) if gpu["memory_total_bytes"] else None,
        f"{gpu['utilization']:.0%}" if tells(gpu) and gpu["utilization"] is not None else None,
        use(gpu),
        ago(gpu["age_s"]),
        note(gpu),
    )


LISTING = Listing(
    TITLES, cells, "uuid", ("GPU", "MEMORY USED", "OF", "BUSY"), ("SEEN", "MODEL", "OF", "MEMORY USED", "BUSY", "NOTE")
)


def forget(context: Context, gpu: str | None) -> int:
    if not gpu:
        raise AgentctlError(
            USAGE, "no GPU is named", "`forget` needs the UUID of a GPU of this host", "agentctl gpus --json"
        )
    said = context.agent.post("gpus", gpu, "forget").data["said"]
    context.say(f"{gpu}: forgot {said}" if said else f"{gpu}: the agent remembers nothing beyond what its driver says")
    return 0


def tells(gpu: Mapping[str, Any]) -> bool:
    """Whether its driver says how it is."""
    return gpu.get("condition", "ok") not in ("unknown", "lost")


def note(gpu: Mapping[str, Any]) -> str:
    """What is wrong with it, or not known, with the UUID of one that takes no job; and who uses it beside the rack's
    jobs, or that its job does not."""
    condition = gpu.get("condition", "ok")
    named = f"{gpu['uuid']} " if condition in ("unknown", "drain", "lost") else ""
    parts = [] if condition == "ok" else [f"{named}{condition}: {gpu.get('why', '')}"]
    if use := gpu.get("use"):
        parts.append(str(use))
    return "; ".join(parts)


def next_of(gpu: Mapping[str, Any]) -> str:
    """What to type next about a GPU; empty: nothing is wrong with it."""
    host, uuid, said = gpu["host"], gpu["uuid"], str(gpu.get("use", ""))
    if gpu.get("condition", "ok") in ("unknown", "drain", "lost"):
        return f"on {host}, once {uuid} was reset, replaced or taken out: agentctl gpus forget {uuid}"
    if said and gpu["job"]:
        return f"agentctl job {gpu['job']}; agentctl logs {gpu['job']}"
    process = re.search(r"process(?:es)? (\d+)", said)
    return f"on {host}: ps -fp {process[1]}" if process else ""


def use(gpu: Mapping[str, Any]) -> str:
    """Its job and those beside it (`j3 +j5`), `free`, `out` where it takes no job, or that its host is `gone` or has
    `left`: then no job holds it and none gets it."""
    state = gpu.get("host_state", "alive")
    if state in AWAY:
        return str(state)
    out = gpu.get("condition", "ok") in ("unknown", "drain", "lost") or gpu.get("use")
    unheld = "out" if out else "free"
    return " ".join([*([gpu["job"]] if gpu["job"] else []), *(f"+{id}" for id in gpu.get("beside", ()))]) or unheld
