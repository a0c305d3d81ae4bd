"""Have ranks of a running job go on on another host: `agentctl move j1 gpu2`, `agentctl move j1 3 gpu5`.

All its ranks on that host go: a rank stands for the host that it is on. The rest of the job waits while they start, and
nobody begins anew. Only a job whose script attached its state (`job.state`, `covey.torch.attach`) can do that."""

import argparse

from cli.client import AgentctlError
from cli.context import Context, not_found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="ID", help="such as j1")
    parser.add_argument("what", metavar="RANK|HOST", help="what is to go")
    parser.add_argument("to", metavar="TO", nargs="?", help="a host; without it, one that has room")


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
