"""End a job: its ranks get SIGTERM, and SIGKILL after the job's grace period."""

import argparse

from cli.client import AgentctlError
from cli.context import Context, not_found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="ID", help="such as j1")


def run(context: Context) -> int:
    job = context.args.job
    try:
        answer = context.agent.post("jobs", job, "cancel")
    except AgentctlError as error:
        not_found(context, error, job)
    if context.json:
        return context.say_json(answer.whole)
    state = answer.data.get("state", "stopping") if isinstance(answer.data, dict) else "stopping"
    context.say(f"{job} is {context.paint.state(state)}; next: agentctl wait {job}")
    return 0
