"""Print what a job's ranks wrote: all lines, each with its rank, or the output of one rank unchanged (--rank N).

-f follows until the job has ended. With --json every line is an object of its own: {"rank": 0, "line": "..."}."""

import argparse
import base64
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cli.client import FAILED, NOT_FOUND, REFUSED, TRY_AGAIN, USAGE, Agent, AgentctlError
from cli.context import Context, not_found

POLL_S = 0.3
"""Between two looks while following, seconds."""
COLOURS = ("36", "33", "35", "32", "34", "31")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="ID", help="such as j1")
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing until the job ends")
    parser.add_argument("--rank", type=int, metavar="N", help="print only this rank, without a prefix")


def run(context: Context) -> int:
    job, rank = context.args.job, context.args.rank
    if rank is not None and rank < 0:
        raise AgentctlError(
            USAGE, f"there is no rank {rank}", "ranks are numbered from 0", f"agentctl logs {job} --rank 0"
        )
    try:
        view = context.agent.get("jobs", job).data
    except AgentctlError as error:
        not_found(context, error, job)
    count = ranks_in(view)
    if rank is not None and rank >= count:
        why = f"{job} has ranks 0 to {count - 1}"
        raise AgentctlError(USAGE, f"there is no rank {rank}", why, f"agentctl logs {job} --rank 0")
    carried = (view.get("elastic") or {}).get("carried") or {}
    by = next((process for process, ranks in carried.items() if rank in ranks), str(rank))
    if by != str(rank):
        why = f"process {by} carries it now, and writes for all the ranks that it carries"
        raise AgentctlError(
            NOT_FOUND, f"rank {rank} of {job} has no output of its own", why, f"agentctl logs {job} --rank {by}"
        )
    ranks = range(count) if rank is None else (rank,)
    return 0 if follow(context, job, ranks, rank is None, context.args.follow) else FAILED


def ranks_in(view: dict[str, Any]) -> int:
    """The number of ranks of a job, each of which may be a process that writes."""
    return int((view.get("elastic") or {}).get("workers_max") or view["workers"])


@dataclass
class Reader:
    """One rank's output: how far it was read, and the begun line."""

    rank: int
    offset: int = 0
    begun: bytes = b""
    lines: list[bytes] = field(default_factory=list)
    trouble: AgentctlError | None = None
    """Why it cannot be read now, or not any more."""

    def take(self, data: bytes) -> None:
        self.offset += len(data)
        *whole, self.begun = (self.begun + data).split(b"\n")
        self.lines += whole

    def skip_to(self, offset: int) -> None:
        """What lay in between was dropped by its host (`[jobs] output_rank_max`)."""
        self.flush()
        self.lines.append(f"[covey: {offset - self.offset} bytes of output are no longer kept]".encode())
        self.offset = offset

    def flush(self) -> None:
        """The begun line is all there will be."""
        if self.begun:
            self.lines.append(self.begun)
            self.begun = b""


def follow(context: Context, job: str, ranks: Sequence[int], prefixed: bool, until_ended: bool) -> bool:
    """Write what the ranks wrote; with `until_ended` again and again until the job has ended. False when some rank's
    output could not be read, which is then said on stderr. AgentctlError when all of it is gone."""
    readers = [Reader(rank) for rank in ranks]
    prefixes = {rank: prefix(context, rank, len(str(max(ranks)))) if prefixed else b"" for rank in ranks}
    over = not until_ended
    while True:
        grew = [read(context, job, reader) for reader in readers]
        if over and not any(grew):
            for reader in readers:
                reader.flush()
                write(reader, prefixes[reader.rank], context.json)
            return say_troubles([(reader.rank, reader.trouble) for reader in readers if reader.trouble], job, readers)
        for reader in readers:
            write(reader, prefixes[reader.rank], context.json)
        if not over:
            if not any(grew):
                time.sleep(POLL_S)
            over = has_ended(context, job)


def say_troubles(troubles: Sequence[tuple[int, AgentctlError]], job: str, readers: Sequence[Reader]) -> bool:
    """Whether there were none. That hosts have removed all that was asked for is an error of its own."""
    if len(troubles) == len(readers) and all(error.code == NOT_FOUND for _, error in troubles):
        _, first = troubles[0]
        what = first.what if len(readers) == 1 else f"the output of {job} is no longer kept"
        raise AgentctlError(NOT_FOUND, what, first.why, first.next)
    for rank, error in troubles:
        print(f"rank {rank}: {error.what}: {error.why}", file=sys.stderr)
    return not troubles


def read(context: Context, job: str, reader: Reader) -> bool:
    """Take what is new of one rank; whether there was anything."""
    try:
        chunk = context.agent.get("jobs", job, "logs", rank=reader.rank, offset=reader.offset).data
    except AgentctlError as error:
        if error.code == REFUSED:  # it is somebody else's, and stays so
            raise
        reader.trouble = error
        return False
    reader.trouble = None
    data = base64.b64decode(chunk["data"])
    if data and chunk["offset"] > reader.offset:
        reader.skip_to(chunk["offset"])
    reader.take(data)
    return bool(data)


def collect(agent: Agent, job: str, rank: int) -> str:
    """All that a rank wrote until now."""
    data, offset = b"", 0
    while True:
        chunk = agent.get("jobs", job, "logs", rank=rank, offset=offset).data
        new = base64.b64decode(chunk["data"])
        if not new:
            return data.decode(errors="replace")
        data, offset = data + new, chunk["offset"] + len(new)


def has_ended(context: Context, job: str) -> bool:
    """False too while an agent restarts; when no agent answers at all any more, that is an AgentctlError."""
    try:
        return bool(context.agent.get("jobs", job).data["over"])
    except AgentctlError as error:
        if error.code != TRY_AGAIN:
            raise
        return False


def prefix(context: Context, rank: int, width: int) -> bytes:
    return context.paint(f"[{rank:>{width}}] ", COLOURS[rank % len(COLOURS)]).encode()


def write(reader: Reader, before: bytes, as_json: bool) -> None:
    """The whole lines; as JSON, what is not UTF-8 in them is replaced."""
    lines, reader.lines = reader.lines, []
    for line in lines:
        if as_json:
            line, before = json.dumps({"rank": reader.rank, "line": line.decode(errors="replace")}).encode(), b""
        sys.stdout.buffer.write(before + line + b"\n")
    sys.stdout.buffer.flush()
