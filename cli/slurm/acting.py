"""scancel and scontrol: what they do to jobs, in Slurm's words."""

from collections.abc import Sequence

from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.job_files import sbatch_options
from cli.job_files.sbatch_options import Given
from cli.jobs.cancel import ask
from cli.slurm import looking, nodes, states
from cli.slurm.options import read
from cli.table import printable


def scancel(context: Context, words: Sequence[str]) -> int:
    values = {"user": "u", "name": "n", "state": "t", "account": "A", "partition": "p", "signal": "s"}
    said = read("scancel", words, values, {"me": "", "quiet": "Q", "verbose": "v", "full": "f", "batch": "b"})
    if "signal" in said.values:
        why = "ranks get SIGTERM, and SIGKILL after the job's grace"
        raise AgentctlError(USAGE, "--signal is refused", why, "scancel JOB")
    named = [part for word in said.words for part in word.split(",") if part and "[" not in word] + [
        word for word in said.words if "[" in word
    ]
    filters = {name: value for name, value in said.values.items() if name in ("user", "name", "state", "account", "me")}
    if not named and not filters:
        raise AgentctlError(USAGE, "no job is named", "expected jobs, or some of --user, --name, --state", "scancel 12")
    ids = [states.ours(word) for word in named]
    if not named:
        asked = {"mine": "", **filters} if "user" not in filters else dict(filters)
        asked |= {"states": filters["state"]} if "state" in filters else {}
        ids = [job["id"] for job in looking.found(context, asked, False)]
    first: AgentctlError | None = None
    for id in ids:
        try:
            ask(context, id)
        except AgentctlError as error:
            first = first or error
    if first is not None:
        raise first
    return 0


def scontrol(context: Context, words: Sequence[str]) -> int:
    match list(words):
        case ["show", ("job" | "jobs"), *ids]:
            return _show(context, ids)
        case ["show", ("hostnames" | "hostname"), *lists]:
            for name in ",".join(lists).split(","):
                context.say(name)
            return 0
        case ["show", ("node" | "nodes"), *names]:
            return nodes.show_nodes(context, names)
        case ["show", ("partition" | "partitions"), *_]:
            return nodes.show_partition(context)
        case [("hold" | "release" | "requeue") as verb, *ids] if ids:
            for id in ",".join(ids).split(","):
                context.agent.post("jobs", states.ours(id), verb)
            return 0
        case ["requeuehold", *ids] if ids:
            for id in ",".join(ids).split(","):
                context.agent.post("jobs", states.ours(id), "requeue", body={"hold": True})
            return 0
        case ["update", *parts] if parts:
            return _update(context, parts)
    why = "expected show job|hostnames|node, hold, release, requeue, requeuehold or update"
    raise AgentctlError(USAGE, f"unknown command {' '.join(words)[:80]!r}", why, "scontrol show job 12")


def _show(context: Context, ids: Sequence[str]) -> int:
    jobs = [context.agent.get("jobs", states.ours(id)).data for id in ids] or context.agent.get("jobs").data
    for job in jobs:
        name = states.STATES[job["state"]][1]
        lines = [
            f"JobId={job['id'][1:]} JobName={job['name']}",
            f"   UserId={job.get('user') or 'covey'}({job.get('uid')}) Account={job['tenant']} QOS={job['job_class']}",
            f"   JobState={name} Reason={states.reason_of(job) or 'None'} ExitCode={job['exit_code'] or 0}:0",
            f"   RunTime={states.elapsed(job)} TimeLimit={states.time_limit(job)} Restarts={job['tally']['attempt']}",
            f"   Partition={states.PARTITION} NodeList={','.join(states.nodes_of(job))}",
            f"   NumTasks={job['workers']} TresPerJob=gres/gpu:{job['gpus']}",
            f"   Command={' '.join(job['argv'])[:200]!r}",
            f"   WorkDir={job['cwd']} StdOut={job.get('stdout', '')}",
        ]
        context.say("\n".join(map(printable, lines)) + "\n")
    return 0


def _update(context: Context, parts: Sequence[str]) -> int:
    """`update JobId=12 TimeLimit=2:00:00`; also `Priority=0` and others are refused, with what does it."""
    said = {name.lower(): value for name, _, value in (part.partition("=") for part in parts)}
    if "nodename" in said:
        why = "hosts are drained with a reason of their own"
        raise AgentctlError(USAGE, "scontrol update NodeName is refused", why, "agentctl hosts drain HOST")
    job, limit = said.pop("jobid", said.pop("job", "")), said.pop("timelimit", "")
    if not job or not limit or said:
        why = "expected JobId=JOB TimeLimit=TIME, and nothing else can be changed"
        step = (
            "agentctl priority JOB --up"
            if "priority" in said or "nice" in said
            else "scontrol update JobId=12 TimeLimit=60"
        )
        raise AgentctlError(USAGE, f"invalid update {' '.join(parts)[:80]!r}", why, step)
    seconds = sbatch_options.time_of(Given(limit, "scontrol"))
    context.agent.post("jobs", states.ours(job), "update", body={"time_limit_s": seconds})
    return 0
