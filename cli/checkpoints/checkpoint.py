"""Let a job that runs save a checkpoint and go on: `agentctl checkpoint j1`.

A script that saves by `job.tensors.save` writes the models of a step soon from now while its ranks go on; one with
`job.state(.., checkpoint=True)` writes at the end of its present step. The command waits until the checkpoint is
complete (--timeout: at most so long). A script that does neither is refused: Covey does not know its state."""

import argparse
import time

from cli.client import TOO_LATE, AgentctlError, Answer
from cli.context import Context, not_found

LOOK_S = 0.2
WAITS_S = 300.0
"""Seconds for which a checkpoint is waited for, without --timeout."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="ID", help="such as j1")


def run(context: Context) -> int:
    job, began_s = context.args.job, time.monotonic()
    try:
        answer = saved(context, job, began_s + (context.args.timeout or WAITS_S))
    except AgentctlError as error:
        not_found(context, error, job)
    if context.json:
        return context.say_json(answer.whole)
    view, took_s = answer.data, time.monotonic() - began_s
    context.say(f"{job} saved step {view['step']} in {took_s:.1f} s, and goes on: {view['path']} on {view['host']}")
    return 0


def saved(context: Context, job: str, until_s: float) -> Answer:
    """Ask for a checkpoint, and wait for it. AgentctlError when there is none."""
    answer = context.agent.post("jobs", job, "checkpoint", body={})
    while answer.data["state"] == "pending":
        if time.monotonic() > until_s:
            why = f"it is still being written on {answer.data['host']}, or the job's step is still under way"
            raise AgentctlError(TOO_LATE, f"no checkpoint of {job} yet", why, f"agentctl job {job}")
        time.sleep(LOOK_S)
        answer = context.agent.post("jobs", job, "checkpoint", body={"number": answer.data["number"]})
    return answer
