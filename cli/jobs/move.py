"""Move a job's ranks from one host to another: `agentctl move j1 gpu2`, `agentctl move j1 3 gpu5`.

Name a host, or one of its ranks: all ranks of the job on that host move. The other ranks wait meanwhile, and none
starts again from the beginning. The job's script must have registered its state (`job.state`, `covey.torch.attach`)."""

import argparse

from cli.client import AgentctlError
from cli.context import Context, not_found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="ID", help="such as j1")
    parser.add_argument("what", metavar="RANK|HOST", help="a rank or a host; all ranks of that host move")
    parser.add_argument("to", metavar="TO", nargs="?", help="the host to move to (default: one that has room)")


def run(context: Context) -> int:
    args = context.args
    try:
        answer = context.agent.post("jobs", args.job, "move", body={"what": args.what, "to": args.to})
    except AgentctlError as error:
        not_found(context, error, args.job)
    if context.json:
        return context.say_json(answer.whole)
    context.say(f"{args.job}: {answer.data['reason']}; next: agentctl job {args.job}")
    return 0
