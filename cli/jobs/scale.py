"""Give an elastic job more or fewer processes: `agentctl scale j1 8`.

The job was submitted with a range, such as `--workers 4..16`, and its script has registered its state (`job.state`,
`covey.torch.attach`). New processes start where GPUs are free; where some end, the others carry their ranks. No other
process ends, none starts again from the beginning, and what the job computes does not change."""

import argparse

from cli.client import AgentctlError
from cli.context import Context, not_found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="ID", help="such as j1")
    parser.add_argument("workers", metavar="N", type=int, help="the number of processes, in the range of its --workers")
    parser.add_argument("--why", metavar="TEXT", default="", help="why, for agentctl why: up to 500 characters")


def run(context: Context) -> int:
    args = context.args
    try:
        body = {"workers": args.workers} | ({"why": args.why} if args.why else {})
        answer = context.agent.post("jobs", args.job, "scale", body=body)
    except AgentctlError as error:
        not_found(context, error, args.job)
    if context.json:
        return context.say_json(answer.whole)
    has = (answer.data.get("elastic") or {}).get("processes")
    context.say(f"{args.job} has {has} processes: {answer.data['reason']}; next: agentctl job {args.job}")
    return 0
