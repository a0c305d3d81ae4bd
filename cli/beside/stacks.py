"""Show where the Python threads of a job's ranks are, each with its host. The ranks write that down and run on.

It needs Covey's hooks in the ranks' Python (not --no-hooks). A rank that has no stacks is listed with the reason; with
none at all the exit code is 1. The same is then in the ranks' output, too (agentctl logs)."""

import argparse

from cli.beside.attached import ANSWER_S, job_and_rank
from cli.client import FAILED, Agent
from cli.context import Context
from cli.table import BOLD, printable


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB[.RANK]", help="such as j1, or j1.2 for rank 2 alone")


def run(context: Context) -> int:
    job, rank = job_and_rank(context.args.job)
    patient = Agent(context.agent.addresses, context.agent.found_by, ANSWER_S)
    answer = patient.post("jobs", job, "stacks")
    rows = [row for row in answer.data if "." not in context.args.job or row["rank"] == rank]
    if context.json:
        context.say_json({**answer.whole, "data": rows})
    else:
        for row in rows:
            head = context.paint(f"rank {row['rank']} on {row['host']}", BOLD)
            context.say(f"{head}: no stacks: {printable(row['why'])}" if row["why"] else head)
            for line in row["text"].splitlines():
                context.say(f"  {printable(line)}")
    return 0 if any(row["text"] for row in rows) else FAILED
