"""Try what a job does when it is preempted: `agentctl preempt --test j1`.

Its ranks are told to stop exactly as a preemption tells them: SIGTERM, a file named in COVEY_PREEMPT_FILE, and SIGKILL
for what is left after --grace. The job is queued again then, and goes on as soon as it has GPUs. The command says how
long its ranks took to end, whether one had to be killed, whether a checkpoint appeared, and whether the next start went
on from it (--timeout: how long that start is waited for). Exit code 0: all of that went well; 1: not.

That is no preemption of the job: it is not counted as one, nor against its limits of starts. Time since the checkpoint
is lost, as it would be, and is on the bill."""

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

from cli.client import FAILED, OK, USAGE, AgentctlError
from cli.context import Context, not_found
from cli.table import ago
from covey.core.units import format_seconds

LOOK_S = 0.1
STOPS_S = 3600 + 660.0
"""Seconds within which ranks have ended: the longest grace, and what they may ask for besides."""
STARTS_S = 120.0
"""Seconds for which the next start is waited for, without --timeout."""
SAID_S = 5.0
"""Seconds within which a checkpoint is known that was complete before the ranks ended."""
View = Mapping[str, Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="ID", help="such as j1")
    parser.add_argument("--test", action="store_true", help="try it (required: nobody preempts a job by hand)")


def run(context: Context) -> int:
    job = context.args.job
    if not context.args.test:
        why = "the scheduler preempts; by hand a job is tried, or queued again"
        raise AgentctlError(
            USAGE, "preempt needs --test", why, f"agentctl preempt --test {job}; agentctl requeue {job}"
        )
    try:
        before = context.agent.get("jobs", job).data
        began_s, wall_s = time.monotonic(), time.time()
        context.agent.post("jobs", job, "requeue", body={"test": True})
    except AgentctlError as error:
        not_found(context, error, job)
    said: dict[str, Any] = {"id": job}
    after = until(context, job, lambda view: view["state"] != "stopping" or view["epoch"] != before["epoch"], STOPS_S)
    said |= {"ended_s": time.monotonic() - began_s, "killed": killed(context, job, wall_s - 1.0)}
    if after is not None and not after["over"]:
        after = until(context, job, lambda view: _saved(view, before) is not None, SAID_S) or after
    said["saved"] = None if after is None else _saved(after, before)
    if after is None or after["over"]:
        said["went_on"] = f"the job is {'stopping' if after is None else after['state']}, and does not go on"
    else:
        said["went_on"] = went_on(context, job, before["epoch"], said["saved"])
    good = not said["killed"] and said["saved"] is not None and said["went_on"] == ""
    if context.json:
        context.say_json({"schema": 1, "data": said})
    else:
        say(context, said, wall_s)
    return OK if good else FAILED


def until(context: Context, job: str, is_so: Callable[[View], bool], within_s: float) -> View | None:
    """The job, once it is so; None: it is not within so many seconds."""
    end_s = time.monotonic() + within_s
    while True:
        view: View = context.agent.get("jobs", job).data
        if is_so(view):
            return view
        if time.monotonic() > end_s:
            return None
        time.sleep(LOOK_S)


def _saved(view: View, before: View) -> Mapping[str, Any] | None:
    """The checkpoint that the job wrote since; None: none is known."""
    now, then = view["seen"]["saved"], before["seen"]["saved"]
    if now is None or (then is not None and (now["step"], now["wall_s"]) == (then["step"], then["wall_s"])):
        return None
    found: Mapping[str, Any] = now
    return found


def killed(context: Context, job: str, since_wall_s: float) -> str:
    """Which rank had to be killed, in words; empty: none."""
    events = context.agent.gather("why", job).data
    ends = (each["reason"] for each in events if each["event"] == "ranks ended" and each["wall_s"] >= since_wall_s)
    return next((reason for reason in ends if "SIGKILL" in reason), "")


def went_on(context: Context, job: str, epoch: int, saved: Mapping[str, Any] | None) -> str:
    """Empty when the next start goes on from the checkpoint; else why that is not so, or not known."""
    within_s = context.args.timeout or STARTS_S

    def is_known(view: View) -> bool:
        return bool(view["over"]) or (
            view["epoch"] != epoch and view["state"] == "running" and view["step"] is not None
        )

    view = until(context, job, is_known, within_s)
    if view is None:
        now = context.agent.get("jobs", job).data
        has = "runs, and has told no step yet" if now["state"] == "running" else f"is {now['state']}: {now['reason']}"
        return f"not known within {format_seconds(within_s)}: the job {has}"
    if view["step"] is None:
        return f"the job is {view['state']}: {view['reason']}"
    if saved is None:
        return f"there was no checkpoint, and it is in step {view['step']} now"
    if view["step"] + 1 < saved["step"]:
        return f"it began anew: it is in step {view['step']}, and saved step {saved['step']}"
    return ""


def say(context: Context, said: Mapping[str, Any], asked_wall_s: float) -> None:
    context.say(
        f"ranks ended after {said['ended_s']:.1f} s{': ' + said['killed'] if said['killed'] else ', by themselves'}"
    )
    if (saved := said["saved"]) is None:
        context.say(
            "no checkpoint appeared; next: let the script save when it is told to stop (job.state, job.stopping)"
        )
    else:
        when = saved["wall_s"] - asked_wall_s
        age = f"{when:.1f} s after it was told to stop" if when >= 0 else f"{ago(-when)}, before it was told to stop"
        context.say(f"a checkpoint appeared: step {saved['step']}, {age}, {saved['path']}")
    context.say("the next start went on from it" if not said["went_on"] else f"it did not go on: {said['went_on']}")
