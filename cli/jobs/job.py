"""Show one job: its command, the hosts of its ranks, its steps, and how it ended. With --plot its step time and its
metrics (loss, and what else its ranks report) over its steps."""

import argparse
import base64
import signal
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from cli.books.ending import last_lines
from cli.client import NOT_WHOLE, AgentctlError
from cli.context import Context, not_found
from cli.jobs.jobs import class_of, how_long, timed, workers_of
from cli.jobs.starting import starts_of
from cli.jobs.tensors import silent, ways
from cli.table import BOLD, clock, pairs, plural, printable, table
from covey.core.units import format_seconds, format_size
from covey.tensors.numbers.blocks import job_of

UNSEEN_S = 30.0
"""For so long a script may load before it is said that nothing sees its steps."""
RANK_TITLES = ("RANK", "HOST", "STATE", "PID", "ENDED", "GPUS")
FAULTS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""Signals at which Python's faulthandler, which is on in ranks, writes where each thread is."""
SHELL_SIGNALS = 128
"""What a shell adds to the number of the signal that ended its command."""
STACK_BEGINS, STACK_BYTES, STACKS_MAX = b"Fatal Python error: ", 1 << 16, 4
"""How such a stack begins, in how many of the last bytes of a rank's output it is looked for, and of how many ranks."""
PLOT_WIDTH = 80
"""Columns of a chart that is not on a terminal."""
CARRIES = "CARRIES"
"""The title of the ranks that each process of an elastic job carries."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="ID", help="such as j1")
    parser.add_argument("--plot", action="store_true", help="show step time and metrics over steps, as curves")
    said = "show the variables it was submitted with, secrets hidden; for its owner and operators, until it is over"
    parser.add_argument("--env", action="store_true", help=said)


def run(context: Context) -> int:
    if context.args.plot:
        return plot(context)
    if context.args.env:
        return environment(context)
    try:
        answer = context.agent.gather("jobs", context.args.job)
    except AgentctlError as error:
        not_found(context, error, context.args.job)
    job = answer.data
    code = NOT_WHOLE if job.get("unanswered") else 0
    if context.json:
        context.say_json(answer.whole)
        return code
    sums = tables_of(context, job)
    job["waits"] = silent(sums, {rank["rank"]: rank["host"] for rank in job["ranks"]})
    job["sums"] = ways(sums)
    job["starts"] = starts_of(context, job["id"]).get(job["id"], "") if job["state"] == "queued" else ""
    context.say(pairs(facts(job), context.paint))
    if job["ranks"]:
        context.say()
        carried = (job.get("elastic") or {}).get("carried") or {}
        rows = [(*rank_row(rank), *([carries(job, rank["rank"])] if carried else [])) for rank in job["ranks"]]
        titles = (*RANK_TITLES, CARRIES) if carried else RANK_TITLES
        context.say(table(titles, rows, ("RANK", "PID"), context.paint))
    for line in [*last_lines(context.agent, job), *stacks_of(context, job)]:
        context.say(line)
    for host in job.get("unanswered", ()):
        context.say(f"{host} did not answer, so the state of its ranks is unknown; next: agentctl why host/{host}")
    context.as_of(answer, f"agentctl logs {job['id']}", f"agentctl why {job['id']}", age_s=job["age_s"])
    return code


def rank_row(rank: dict[str, Any]) -> tuple[object, ...]:
    """What the columns of `RANK_TITLES` show of a rank."""
    return rank["rank"], rank["host"], rank["state"], rank["pid"], ending(rank["code"]), " ".join(rank["gpus"])


def stacks_of(context: Context, job: dict[str, Any]) -> list[str]:
    """Where the Python stacks of ranks are that a fault of their own ended, such as SIGSEGV; of the first few."""
    found = []
    for rank in [rank for rank in job["ranks"] if fault_of(rank["code"])][:STACKS_MAX]:
        ask, number = f"agentctl logs {job['id']} --rank {rank['rank']} --tail 60", rank["rank"]
        try:
            part = partial(context.agent.get, "jobs", job["id"], "logs", rank=number)
            size = part(offset=0).data["size"]
            text = base64.b64decode(part(offset=max(0, size - STACK_BYTES)).data["data"])
        except AgentctlError:
            continue  # it is another user's, or gone
        wrote = f"its Python stack is in {ask}" if STACK_BEGINS in text else f"it wrote no Python stack; see {ask}"
        found.append(f"rank {number} ended by {fault_of(rank['code'])}: {wrote}")
    return found


def fault_of(code: int | None) -> str:
    """The name of the signal by which a fault in the process's own code ended it, as Python or a shell says it; empty:
    it was none."""
    number = -(code or 0) if (code or 0) < 0 else (code or 0) - SHELL_SIGNALS
    return signal.Signals(number).name if number in FAULTS else ""


def environment(context: Context) -> int:
    """Show the variables that a job was submitted with, as `env` does."""
    try:
        answer = context.agent.get("jobs", context.args.job, "env")
    except AgentctlError as error:
        not_found(context, error, context.args.job)
    if context.json:
        return context.say_json(answer.whole)
    for name, value in answer.data["variables"].items():
        context.say(printable(f"{name}={value}"))
    context.as_of(answer, plural(len(answer.data["variables"]), "variable"))
    return 0


def plot(context: Context) -> int:
    """Show the curves of a job, `loss` first; with --json the points."""
    from cli.plot import chart  # only where it is needed: agentctl's imports are a budget

    try:
        answer = context.agent.gather("jobs", context.args.job, "curve")
    except AgentctlError as error:
        not_found(context, error, context.args.job)
    curve = answer.data
    code = NOT_WHOLE if curve["unanswered"] else 0
    if context.json:
        context.say_json(answer.whole)
        return code
    id, points = curve["id"], curve["points"]
    names = sorted({name for point in points for name in point["metrics"]}, key=lambda name: (name != "loss", name))
    series = [(name, [(p["step"], p["metrics"][name]) for p in points if name in p["metrics"]]) for name in names]
    times = [(point["step"], point["step_s"]) for point in points if point["step_s"] is not None]
    for name, values in [*series, ("step time, s", times)]:
        if values:
            title = f"{name}  {values[-1][1]:.6g}"
            context.say(chart(context.paint(printable(title), BOLD), values, context.paint.width or PLOT_WIDTH) + "\n")
    if not points:
        context.say(f"no step of {id} is known: none was reported, or its output and curves are no longer kept")
    for host in curve["unanswered"]:
        context.say(f"{host} did not answer, so steps may be missing; next: agentctl why host/{host}")
    context.as_of(answer, f"agentctl job {id}")
    return code


def tables_of(context: Context, job: dict[str, Any]) -> list[dict[str, Any]]:
    """The tables of a job that runs and whose tensors somebody sums; none where that is not known."""
    if job["state"] != "running" or not job["seen"]["aggregator"]:
        return []
    try:
        return [row for row in context.agent.gather("tensors").data if job_of(row["job"]) == job["id"]]
    except AgentctlError:
        return []


def facts(job: dict[str, Any]) -> list[tuple[str, object]]:
    metrics = "  ".join(f"{name} {value:.6g}" for name, value in sorted(job["metrics"].items()))
    times, tally, losses, seen = job["times"], job["tally"], job["losses"], job["seen"]
    started, ended = times["started_wall_s"], times["ended_wall_s"]
    gpus = f"{job['gpus'] // max(1, job['workers'])} GPU each" if job["gpus"] else "without GPU"
    return [
        ("job", f"{job['id']}  {job['name']}"),
        ("state", job["state"]),
        ("ended as", job.get("ended_as") if job["state"] == "failed" else ""),
        ("why", job["reason"]),
        ("start", job.get("starts", "").removeprefix("start ").removeprefix("start: ")),
        ("GPUs", "; ".join(f"{host}: {words}" for host, words in (seen.get("devices") or {}).items())),
        ("workers", f"{workers_of(job)}, {gpus}{configuration(job)}"),
        ("range", (job.get("elastic") or {}).get("over_rack")),
        ("wants", wants(job)),
        ("to end", (job.get("elastic") or {}).get("to_end")),
        ("places", "  ".join(f"{p['host']}: {ranks_of(p['ranks'])}" for p in job["places"])),
        ("shares", shares(job)),
        ("tables", owners(job)),
        ("host memory", host_memory(seen)),
        ("processors", f"{seen['cpus']} for each worker" if seen.get("cpus") else ""),
        ("limits", limits(seen)),
        ("step", job["step"]),
        ("step time", step_takes(job)),
        ("checkpoint", checkpoint(seen)),
        ("waits", job.get("waits")),
        ("seen by", seen_by(job) or unseen(job)),
        ("metrics", metrics),
        ("exit code", exit_words(job)),
        ("array", job.get("array")),
        ("task", job.get("task")),
        ("not before", clock(job["begin_wall_s"]) if job.get("begin_wall_s") else ""),
        ("time limit", format_seconds(job["time_limit_s"]) if job.get("time_limit_s") else ""),
        ("output", job.get("stdout")),
        ("user", job.get("user")),
        ("tenant", f"{job['tenant']}, {class_of(job)}"),
        ("shares GPUs", with_whom(job)),
        ("shares hosts", in_turns(job)),
        ("GPUs reserved", f"{job['reserved_gpus']} of {job['gpus']} GPUs" if job.get("reserved_gpus") else ""),
        ("command", " ".join(job["argv"])),
        ("directory", job["cwd"]),
        ("image", job.get("image")),
        ("submitted", clock(times["submitted_wall_s"])),
        ("started", "" if started is None else clock(started)),
        ("ended", "" if ended is None else clock(ended)),
        ("time", how_long(job)),
        ("service", f"{job['attained_gpu_s']:.1f} GPU·s, queue {job['queue']}" if job["attained_gpu_s"] else ""),
        ("coordinator", job["coordinator"]),
        ("gradients at", job.get("sums") or seen["aggregator"]),
        ("kernels", seen["unlike"]),
        ("attempt", f"{tally['attempt']} (epoch {job['epoch']})" if tally["attempt"] else ""),
        ("restarts", started_again(tally)),
        ("if a host is lost", on_lost(losses, job["state"], bool(job.get("elastic")))),
        (
            "spares",
            f"{losses['spares']} processes wait on each of its hosts, and on one more" if losses["spares"] else "",
        ),
        ("hang", hang(losses)),
        ("information", f"{format_seconds(job['age_s'])} old" if job["age_s"] > 5 else ""),
    ]


def checkpoint(seen: dict[str, Any]) -> str:
    """The newest checkpoint, in words; empty: none is known."""
    saved = seen.get("saved")
    return "" if saved is None else f"step {saved['step']}, at {clock(saved['wall_s'])}: {saved['path']}"


def configuration(job: dict[str, Any]) -> str:
    """`, configuration 2`: how often an elastic job that runs was arranged anew."""
    elastic = job.get("elastic") or {}
    return f", configuration {elastic['config']}" if elastic.get("processes") else ""


def carries(job: dict[str, Any], process: int) -> str:
    """The ranks that a process of an elastic job carries, in words."""
    elastic = job["elastic"]
    lacks = job["state"] == "running" and process not in elastic["have"]
    return ranks_of(elastic["carried"].get(str(process), [])) + (", not begun yet" if lacks else "")


def shares(job: dict[str, Any]) -> str:
    """How many ranks the processes of each host of an elastic job carry: `gpu1: 11  gpu2: 5 of 16 ranks`."""
    elastic = job.get("elastic") or {}
    each = [f"{host}: {count}" for host, count in elastic.get("shares", {}).items()]
    if not each:
        return ""
    said = "" if elastic["equal"] else ", as somebody said"
    return f"{'  '.join(each)} of {elastic['workers_max']} ranks{said}"


def owners(job: dict[str, Any]) -> str:
    """The hosts that somebody wants to own tables of an elastic job: `0 2 on gpu1, 1 on gpu4, 3 anywhere`."""
    hosts = (job.get("elastic") or {}).get("owners") or ()
    tables: dict[str, list[str]] = {}
    for number, host in enumerate(hosts):
        tables.setdefault(f"on {host}" if host else "anywhere", []).append(str(number))
    return ", ".join(f"{' '.join(each)} {where}" for where, each in sorted(tables.items(), key=lambda row: row[1]))


def in_turns(job: dict[str, Any]) -> str:
    """With whom the job takes turns on its hosts: `in turns with group night; sends for 12 % of a step`."""
    group, timing = job.get("share_host"), job["seen"]["timing"] or {}
    if not group:
        return ""
    whom = "jobs that say auto" if group == "auto" else f"group {group} of tenant {job['tenant']}"
    sends_s, step_s = timing.get("sending_s", 0.0), timing.get("step_s", 0.0)
    share = f"; sends for {round(100 * sends_s / step_s)} % of a step" if sends_s and step_s else ""
    return f"in turns with {whom}{share}"


def exit_words(job: dict[str, Any]) -> Any:
    """The exit code, and `oom` with its peak where the kernel killed a process at its limit."""
    peak = job.get("oom_bytes")
    return f"{job['exit_code']} (oom, peak {format_size(peak)})" if peak and job["exit_code"] else job["exit_code"]


def host_memory(seen: dict[str, Any]) -> str:
    """What the job may take of each host's memory, and what it has: `at most 64 GiB on a host; gpu1: Blocks 20 GiB,
    arrays 4 GiB, peak 31 GiB`; what is not known is left out."""
    limit = f"at most {format_size(seen['host_memory'])} on a host" if seen.get("host_memory") else ""
    each = []
    for host, has in seen.get("memory", {}).items():
        known = [(what, has[f"{what}_bytes"]) for what in ("arrays", "peak") if has[f"{what}_bytes"]]
        parts = [f"{what} {format_size(size)}" for what, size in [("Blocks", has["blocks_bytes"]), *known]]
        each.append(f"{host}: {', '.join(parts)}")
    return "; ".join(part for part in (limit, "  ".join(each)) if part)


def limits(seen: dict[str, Any]) -> str:
    """Whether hosts keep the job to its limits: `enforced on gpu1, not enforced on gpu2`; empty: it has none."""
    asked = seen.get("host_memory") or seen.get("cpus")
    if not asked and not any(seen.get("limited", {}).values()):
        return ""
    said: dict[str, list[str]] = {}
    for host, limited in seen.get("limited", {}).items():
        said.setdefault("enforced" if limited else "not enforced", []).append(host)
    return next(iter(said), "") if len(said) < 2 else ", ".join(f"{how} on {' '.join(at)}" for how, at in said.items())


def wants(job: dict[str, Any]) -> str:
    """What an elastic job is about to grow to: `10 processes: ann`."""
    elastic = job.get("elastic") or {}
    return f"{elastic['wanted']} processes: {elastic['wanted_by']}" if elastic.get("wanted") else ""


def hang(losses: dict[str, Any]) -> str:
    """What becomes of ranks that hang."""
    if not losses["hang_s"]:
        return str(losses.get("stuck", ""))
    does = "a rank that the others wait for is replaced; a job in which no rank makes progress is ended"
    return losses["hang_unseen"] or f"{does}, after {format_seconds(losses['hang_s'])}"


def on_lost(losses: dict[str, Any], state: str, elastic: bool = False) -> str:
    """What becomes of a job in this state if one of its hosts is lost now."""
    if losses["on_lost"] == "keep":
        return "its ranks keep running there (keep)"
    if state != "running":
        return ""
    why = losses["heals_not"]
    return (
        f"the whole job starts again: {why}"
        if why
        else "its other processes carry the lost ranks"
        if elastic
        else "its other ranks keep running, and another host takes over the lost ones"
    )


def step_takes(job: dict[str, Any]) -> str:
    """`0.21 s, of which input 40 %; 512 MiB; counted by its optimizer`."""
    timing = job["seen"]["timing"]
    if timing is None:
        return ""
    took, waited, memory = timed(job)
    by = timing["boundary"]
    counted = "counted by the script" if by == "script" else f"counted by its {by}"
    return "; ".join(part for part in (f"{took}, of which {waited}" if waited else took, memory, counted) if part)


def seen_by(job: dict[str, Any]) -> str:
    """What `covey.hooks` sees of its ranks, or why it sees nothing; alike ones together."""
    by_what: dict[str, list[int]] = {}
    for rank, what in sorted((int(rank), what) for rank, what in job["seen"]["hooked"].items()):
        by_what.setdefault(what, []).append(rank)
    if len(by_what) == 1:
        return next(iter(by_what))
    return "; ".join(f"{ranks_of(ranks)}: {what}" for what, ranks in by_what.items())


def unseen(job: dict[str, Any]) -> str:
    """Why nothing sees the steps of a Python script that has run for a while; empty when something does."""
    interpreter, *words = job["argv"] or ("",)  # another user's job has none that is shown
    if job["state"] != "running" or job["step"] is not None or not Path(interpreter).name.startswith("python"):
        return ""
    options = takewhile(lambda word: word.startswith("-") and word not in ("-m", "-c"), words)
    if hiding := [word for word in options if word[1:2] not in "-WX" and set(word) & set("IES")]:
        return (
            f"nothing: Python ignores PYTHONPATH with {hiding[0]}; next: leave that "
            "out, or call covey.join() in the script"
        )
    return (
        "nothing: the script has imported neither PyTorch nor JAX yet (or --no-hooks was given)"
        if job["times"]["for_s"] > UNSEEN_S
        else ""
    )


def with_whom(job: dict[str, Any]) -> str:
    """`j3 (guaranteed) on h1, h2; j5 (opportunistic) on h1`: jobs on the same GPUs."""
    others = job.get("beside") or ()
    return "; ".join(f"{other['job']} ({other['runs_as']}) on {', '.join(other['hosts'])}" for other in others)


def started_again(tally: dict[str, Any]) -> str:
    """`preempted 2 times, host lost 1 time of 5`: what happened to a job, and how often it is started again for
    that."""
    counts = {"preempted": "preemptions", "host lost": "hosts_lost", "exit 75": "requeues", "failed": "failures"}
    counts["no room beside other jobs"] = "unfit"
    happened = [(cause, tally[field], tally["retries"].get(cause)) for cause, field in counts.items()]
    return ", ".join(
        f"{cause} {plural(count, 'time')}{f' ({limit} allowed)' if limit is not None else ''}"
        for cause, count, limit in happened
        if count or (cause == "failed" and limit)
    )


def ranks_of(ranks: list[int]) -> str:
    """`ranks 0-3`, `rank 2`, `ranks 0-1 4`; in order, whichever came first."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][-1] == rank - 1:
            found[-1] = [found[-1][0], rank]
        else:
            found.append([rank])
    if not found:
        return "no rank"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {' '.join('-'.join(map(str, run)) for run in found)}"


def ending(code: int | None) -> str:
    """`exit 3`, `killed by SIGKILL`."""
    if code is None:
        return ""
    if code >= 0:
        return f"exit {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
