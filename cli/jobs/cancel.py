"""End jobs: their ranks get SIGTERM, and SIGKILL after the job's grace period.

Name jobs (`j1`, `j5-j9`), an array (`j12`: all its tasks) or tasks of one (`j12[3-7]`), or say which: --user, --state,
--name, --tenant, as in `agentctl jobs`."""

import argparse

from cli.client import USAGE, AgentctlError, Answer
from cli.context import Context, not_found
from cli.job_ids import ids_of, jobs_argument, summed_up
from cli.jobs.jobs import FILTERS, filter_arguments, filters


def arguments(parser: argparse.ArgumentParser) -> None:
    jobs_argument(parser, "*")
    filter_arguments(parser)


def run(context: Context) -> int:
    args = context.args
    said = filters(context)
    if args.job and said:
        why = f"expected jobs, or what they have in common ({', '.join(said)}), and not both"
        raise AgentctlError(USAGE, "both jobs and a filter are named", why, f"agentctl cancel {args.job[0]}")
    if not args.job and not said:
        why = f"expected jobs, or some of {', '.join(f'--{name}' for name in FILTERS)}"
        raise AgentctlError(USAGE, "no job is named", why, "agentctl cancel j1")
    if said:
        found = context.agent.get("jobs", mine=None if "user" in said else 1, **said).data
        ids = [job["id"] for job in found if not job["over"]]
    else:
        ids = ids_of(args.job)
    if len(ids) == 1:
        try:
            answer = ask(context, ids[0])
        except AgentctlError as error:
            not_found(context, error, ids[0])
        if context.json:
            return context.say_json(answer.whole)
        return told(context, ids[0], answer)
    done, refused = [], []
    for id in ids:
        try:
            answer = ask(context, id)
        except AgentctlError as error:
            refused.append((id, error))
            continue
        done.append(answer.data)
        if not context.json:
            told(context, id, answer)
    if not ids and not context.json:
        context.say("no job is like that")
    return summed_up(context, done, refused, "cancelled")


def ask(context: Context, id: str) -> Answer:
    """Cancel a job, or tasks of an array by `j12[3-7]`."""
    job, bracket, tasks = id.partition("[")
    body = {"tasks": tasks.rstrip("]")} if bracket else None
    return context.agent.post("jobs", job, "cancel", body=body)


def told(context: Context, id: str, answer: Answer) -> int:
    state = answer.data.get("state", "stopping") if isinstance(answer.data, dict) else "stopping"
    if "[" in id:
        context.say(f"{id} are cancelled; next: agentctl job {id.partition('[')[0]}")
    else:
        context.say(f"{id} is {context.paint.state(state)}; next: agentctl wait {id}")
    return 0
