"""Print what a job's ranks wrote: all lines, each with its rank, or those of one rank (--rank N).

-f follows until the job has ended; a line that is only begun is shown after a second. Of a line that was overwritten
(a progress bar) its last state is shown, and with --raw all of it. With --json every line is an object of its own:
{"rank": 0, "line": "..."}."""

import argparse
import base64
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cli.client import FAILED, NOT_FOUND, REFUSED, TRY_AGAIN, USAGE, Agent, AgentctlError
from cli.context import Context, not_found
from cli.jobs.log_lines import RankLines, Shows, ended, shown_on
from cli.table import clock

POLL_S = 0.3
"""Between two looks while following, seconds."""
COLOURS = ("36", "33", "35", "32", "34", "31")
TAIL_BYTES = 1 << 16
"""Bytes that are read at once in search of the last lines."""
LINES_MAX = 1_000_000
DAY_S = 86_400


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="ID", help="such as j1")
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing until the job ends")
    parser.add_argument("--rank", type=int, metavar="N", help="print only this rank, without a prefix")
    parser.add_argument("--tail", type=lines_of, metavar="N", help="begin with the last N lines of each rank")
    what = "begin with what was written since then: 10m ago, or at 14:30, '2026-01-31 14:30'"
    parser.add_argument("--since", type=age_of, metavar="TIME", help=what)
    parser.add_argument("--raw", action="store_true", help="print lines with all that was overwritten in them")


def lines_of(text: str) -> int:
    """The number of lines of `--tail`."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= LINES_MAX):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of lines from 1 to {LINES_MAX}")
    return int(text)


def age_of(text: str) -> float:
    """Seconds since the time that `--since` names. A time of day is the last one."""
    from datetime import datetime  # only where it is needed: agentctl's imports are a budget

    from covey.core.units import parse_seconds

    now_s = time.time()
    try:
        return parse_seconds(text)
    except ValueError:
        pass
    for form in ("%H:%M", "%H:%M:%S"):
        try:
            at = datetime.strptime(text, form).time()
        except ValueError:
            continue
        return (now_s - datetime.combine(datetime.now(), at).timestamp()) % DAY_S
    try:
        age_s = now_s - datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        why = f"{text[:40]!r} is no time: write how long ago (90s, 10m, 2h, 1d), 14:30, or '2026-01-31 14:30'"
        raise argparse.ArgumentTypeError(why) from None
    if age_s < 0:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not over yet")
    return age_s


@dataclass(frozen=True)
class Wanted:
    """Which output is shown, and how."""

    follows: bool
    """Whether it is followed until the job has ended."""
    tail: int | None = None
    since_s: float | None = None
    raw: bool = False


def run(context: Context) -> int:
    args = context.args
    job, rank = args.job, args.rank
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
    wanted = Wanted(args.follow, args.tail, args.since, args.raw)
    return 0 if follow(context, job, ranks, rank is None, wanted) else FAILED


def ranks_in(view: dict[str, Any]) -> int:
    """The number of ranks of a job, each of which may be a process that writes."""
    return int((view.get("elastic") or {}).get("workers_max") or view["workers"])


@dataclass
class Reader(RankLines):
    """A rank whose output is read from its host."""

    behind: bool = False
    """Whether its host had more than what was read last."""
    trouble: AgentctlError | None = None
    """Why it cannot be read now, or not any more."""


def follow(context: Context, job: str, ranks: Sequence[int], prefixed: bool, wanted: Wanted) -> bool:
    """Write what the ranks wrote; where that is followed, again and again until the job has ended. False when some
    rank's output could not be read, which is then said on stderr. AgentctlError when all of it is gone."""
    readers = [Reader(rank, wanted.raw) for rank in ranks]
    for reader in readers:
        begin(context, job, reader, wanted)
    prefixes = {rank: prefix(context, rank, len(str(max(ranks)))) if prefixed else b"" for rank in ranks}
    shows = shown_on(sys.stdout.buffer, prefixes, wanted.raw, context.json, wanted.follows)
    try:
        read_all(context, job, readers, shows, over=not wanted.follows)
    finally:
        shows.end()
    return say_troubles([(reader.rank, reader.trouble) for reader in readers if reader.trouble], job, readers)


def read_all(context: Context, job: str, readers: Sequence[Reader], shows: Shows, over: bool) -> None:
    """Show what is read until nothing comes any more. `over`: whether the job has ended, or is taken as ended."""
    while True:
        grew = [read(context, job, reader) for reader in readers]
        if over and not any(grew):
            ended(readers, shows, time.monotonic())
            return
        shows.show(readers, time.monotonic())
        if not over:
            if not any(reader.behind for reader in readers):
                time.sleep(POLL_S)
            over = has_ended(context, job)


def begin(context: Context, job: str, reader: Reader, wanted: Wanted) -> None:
    """Begin where `--since` and `--tail` say. What cannot be read is said later."""
    try:
        if wanted.since_s is not None:
            age_s = round(wanted.since_s)
            found = context.agent.get("jobs", job, "logs", rank=reader.rank, offset=0, since_s=age_s).data
            reader.offset = found["offset"]
            if not found.get("timed") and found["size"]:
                when = f"when rank {reader.rank} wrote it is not known on {found['host']}"
                print(f"{when}, so output of before {clock(time.time() - age_s)} is shown too", file=sys.stderr)
        if wanted.tail is not None:
            reader.offset = max(reader.offset, tail_of(context.agent, job, reader.rank, wanted.tail))
    except AgentctlError as error:
        if error.code == REFUSED:
            raise


def tail_of(agent: Agent, job: str, rank: int, lines: int) -> int:
    """The offset at which the last lines of a rank begin; an unfinished one counts."""
    size = agent.get("jobs", job, "logs", rank=rank, offset=0).data["size"]
    end, missing = size, lines
    while end > 0:
        start = max(0, end - TAIL_BYTES)
        chunk = agent.get("jobs", job, "logs", rank=rank, offset=start).data
        first = chunk["offset"]
        if first >= end:  # all of it was dropped
            end = kept_before(agent, job, rank, start)
            continue
        data = base64.b64decode(chunk["data"])[: max(0, end - first)]
        at = len(data) - 1 if end == size and data.endswith(b"\n") else len(data)
        while (at := data.rfind(b"\n", 0, at)) >= 0:
            missing -= 1
            if not missing:
                return int(first + at + 1)
        end = start
    return 0


def kept_before(agent: Agent, job: str, rank: int, dropped: int) -> int:
    """Where a rank's output ends that is kept before this offset, from which on some was dropped; 0: none is. It is
    found by halves: what was dropped may be a thousand times what is read at once."""
    low, high = 0, dropped
    while low < high:
        middle = (low + high) // 2
        chunk = agent.get("jobs", job, "logs", rank=rank, offset=middle).data
        if chunk["offset"] > middle:
            high = middle
        else:
            low = max(middle + 1, middle + len(base64.b64decode(chunk["data"])))
    return high


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
    reader.behind = False
    try:
        chunk = context.agent.get("jobs", job, "logs", rank=reader.rank, offset=reader.offset).data
    except AgentctlError as error:
        if error.code == REFUSED:  # it is somebody else's, and stays so
            raise
        reader.trouble = error
        return False
    reader.trouble = None
    data = base64.b64decode(chunk["data"])
    now_s = time.monotonic()
    if data and chunk["offset"] > reader.offset:
        reader.skip_to(chunk["offset"], now_s)
    reader.take(data, now_s)
    reader.behind = reader.offset < chunk["size"]
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
