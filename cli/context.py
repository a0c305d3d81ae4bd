"""What every noun is given: its arguments, the agent, and ways to say things."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

from cli.client import NO_AGENT, NOT_FOUND, NOT_WHOLE, Agent, AgentctlError, Answer
from cli.table import DIM, RED, Paint, ago, folded, printable


@dataclass
class Context:
    args: argparse.Namespace
    agent: Agent
    paint: Paint

    @property
    def json(self) -> bool:
        return bool(self.args.json)

    @property
    def command(self) -> str:
        """What was typed, without arguments: `agentctl volume rm`."""
        return f"agentctl {self.args.noun}"

    def say(self, text: str = "") -> None:
        print(text, flush=True)

    def say_folded(self, text: str) -> None:
        """A sentence in lines that the terminal has room for."""
        self.say(folded(text, 0, self.paint.width))

    def say_json(self, whole: Any) -> int:
        """The API's answer as it came, with its schema version."""
        json.dump(whole, sys.stdout, indent=2)
        print(flush=True)
        return 0

    def as_of(self, answer: Answer, *more: str, age_s: float = 0.0) -> None:
        """The grey last line: who answered, and how old the oldest part is."""
        parts = [*more, f"as {answer.host} knows it, {ago(age_s)}"]
        self.say(self.paint(folded("; ".join(parts), 0, self.paint.width), DIM))

    def whole(self, answer: Answer) -> int:
        """The exit code of a list: 0, or 8 when not every host answered. Who did not is said on stderr; JSON has it."""
        if not answer.unanswered:
            return 0
        if not self.json:
            paint = Paint(self.args.color, sys.stderr)
            for each in answer.unanswered:
                print(f"{paint('incomplete:', RED)} {printable(missing(each))}", file=sys.stderr)
            host = answer.unanswered[0]["host"]
            print(f"  next: add --timeout 30s to wait longer, or: agentctl why host/{host}", file=sys.stderr)
        return NOT_WHOLE


def missing(each: Mapping[str, Any]) -> str:
    """`gpu3 is missing (no answer within 3 s)`."""
    age_s = each.get("age_s")
    part = "is missing" if age_s is None else f"is shown as it was {ago(age_s)}"
    return f"{each['host']} {part} ({each['why']})"


def on_host(context: Context, host: str | None) -> Agent:
    """The agent to ask for something on `host`; without it, any that answers. AgentctlError when it is not known."""
    if host is None:
        return context.agent
    found = context.agent.of_host(host)
    if found is None:
        why = f"none of the agents known here ({context.agent.found_by}) is {host}'s, or it does not answer"
        raise AgentctlError(NO_AGENT, f"cannot reach the agent of {host}", why, f"agentctl hosts, or log in to {host}")
    return found


def not_found(context: Context, error: AgentctlError, given: str) -> NoReturn:
    """Return the error; when the agent found nothing by that id but a job has nearly that name, add the job's id."""
    if error.code == NOT_FOUND:
        try:
            jobs = context.agent.get("jobs", all=1).data
        except AgentctlError:
            raise error from None
        names = {name: job["id"] for job in jobs for name in (job["name"], job["id"])}
        near = get_close_matches(given, list(names), 1, 0.5)
        if near:
            job = names[near[0]]
            error.next = f"did you mean {job}?    {context.command} {job}"
    raise error
