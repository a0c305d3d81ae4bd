"""The lines of `sacct --parsable2`, read into jobs: what counts, what does not, and why.

A line is one attempt of one job. Slurm keeps attempts by job and submission, so lines of one job with one submission
are one attempt seen again (exports that overlap), and lines with several submissions are a job that was requeued: it
is one job that runs for as long as all its attempts held GPUs, and waits from when the first one could begin, except
while an attempt runs. A job that was resized has a line RESIZING, with its end, for each number of GPUs before its
last: these are earlier runs too. Parts of a heterogeneous job (107+0, 107+1) start together and are one gang.

Slurm writes local time by default. It is taken as UTC, which changes no span but those over a change
of the clock: what then seems to end up to an hour before it began gets that hour back, and is counted.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from cli.table import plural
from sim.jobs.sacct_runs import Found, Run, with_earlier
from sim.jobs.trace import GPUS_MAX, ID_MAX
from sim.report import Wrong

NEEDED = ("JobID", "State", "Submit")
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "PREEMPTED",
         "LAUNCH_FAILED")  # fmt: skip
GOING_ON = ("RUNNING", "COMPLETING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "EXPEDITING")
STILL_WAITING = ("PENDING", "CONFIGURING", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD",
                 "POWER_UP_NODE")  # fmt: skip
ELSEWHERE = ("REVOKED",)
STATES = (*ENDED, *GOING_ON, *STILL_WAITING, *ELSEWHERE, "CANCELLED", "REQUEUED")
EARLIER = ("requeued", "resized")
"""Kinds of lines whose time belongs to a job, before its last one."""
NO_TIME = ("", "Unknown", "None", "N/A")
CLOCK_CHANGE_S = 3600
"""Most seconds that local clocks are set back."""
EARLIEST_S, LATEST_S = 946_684_800, 4_102_444_800
"""Seconds since 1970 of 2000 and 2100; a time outside comes from a clock that was not set."""
RAN_MAX_S = 10 * 366 * 86400
"""Ten years in seconds; no job runs longer."""
SAID_MAX = 5
"""Most impossible lines that are named one by one."""

WHY = {
    "kept": "ended, with GPUs",
    "kept, cancelled while running": "it held its GPUs until then, so it counts with the time it ran",
    "joined": "a further part of a heterogeneous job (107+1): one gang with its first",
    "steps": "part of a job (12.batch, 12.0), which counts as a whole",
    "without GPUs": "it asked for none",
    "cancelled before it started": "it never held a GPU",
    "requeued": "an attempt that began again; the time it ran counts to the last one, from the first submission on",
    "resized": "a part of a job under another number of GPUs; the time it ran counts to the last part",
    "repeated": "an attempt that is there twice, as exports that overlap have it; it counts once",
    "still running": "how long it takes is not known",
    "still waiting": "it did not start, or is an array with elements that did not",
    "ended at once": "it ran for less than a second",
    "moved to another cluster": "its sibling there counts",
    "in other partitions": "left out by --partition",
    "in an unknown state": "whether it ended is not known; the states are named below",
    "without a submission time": "when it came is not known",
    "impossible": "its times or GPUs cannot be; the lines are named below",
}


@dataclass
class Accounting:
    """The content of an accounting file."""

    jobs: list[Found] = field(default_factory=list)
    """Jobs, by submission."""
    counts: Counter[str] = field(default_factory=Counter)
    """Lines of each kind (`WHY`); together all lines that are not empty."""
    notes: list[str] = field(default_factory=list)
    """Notes on what was assumed, and on lines that were left out, with their numbers."""
    partitions: Counter[str] = field(default_factory=Counter)
    """Lines that count, per partition."""


@dataclass
class _Seen:
    """Counts that are known only after the last line."""

    impossible: list[str] = field(default_factory=list)
    states: set[str] = field(default_factory=set)
    types: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    """Jobs whose GPUs are given only in what they asked for."""
    clock: int = 0
    """Lines over a change of the clock."""
    local: bool = False
    """Whether there are times that do not say their offset."""


@dataclass
class _Attempt:
    kind: str
    state: str
    line: int
    ready_s: int | None
    submit_s: int | None
    start_s: int | None
    job: Found | None
    run: Run | None = None
    """The run in which the attempt held GPUs, if it was requeued or resized."""


class _Impossible(Exception):
    """A value that Slurm cannot have meant, with its place."""


def read_sacct(text: str, name: str = "sacct", partitions: Collection[str] = ()) -> Accounting:
    """Read every job that ended and held GPUs; only of `partitions`, when they are named. Raises Wrong when the file
    is something else, when a line cannot be read, or when no job is left."""
    lines = text.split("\n")
    if "|" not in lines[0]:
        why = "fields with | between them and their names in the first line are expected"
        raise Wrong(f"{name}, line 1: this is not what sacct --parsable2 writes", why, "add --parsable2, and no -n")
    columns = {title.strip(): at for at, title in enumerate(lines[0].rstrip("\r").rstrip("|").split("|"))}
    _check_columns(name, columns)
    if partitions and "Partition" not in columns:
        why = "--partition needs it"
        raise Wrong(f"{name}, line 1: no column Partition", why, "add it to --format, or leave --partition out")
    found, seen = Accounting(), _Seen()
    attempts: dict[str, list[_Attempt]] = {}
    before: set[str] = set()
    for row in _rows(name, lines, columns):
        kept = row.get("Partition").split(",")
        if "." in row.id():
            found.counts["steps"] += 1
        elif row.text in before:
            found.counts["repeated"] += 1
        elif partitions and not set(kept) & set(partitions):
            found.counts["in other partitions"] += 1
        else:
            try:
                attempt = _attempt(row, seen)
            except _Impossible as impossible:
                found.counts["impossible"] += 1
                seen.impossible.append(str(impossible))
                continue
            attempts.setdefault(row.id(), []).append(attempt)
            if attempt.job is not None:
                found.partitions[kept[0]] += 1
        before.add(row.text)
    whole = [job for id, each in attempts.items() if (job := _last(id, each, found.counts)) is not None]
    found.jobs = sorted(_joined(whole, found.counts), key=lambda job: (job.submit_s, job.id))
    found.counts = +found.counts
    found.notes = _notes(seen, found)
    if not found.jobs:
        raise _nothing(name, found, seen)
    return found


def _rows(name: str, lines: Sequence[str], columns: dict[str, int]) -> Iterator["_Row"]:
    for number, ended in enumerate(lines[1:], 2):
        line = ended.rstrip("\r")
        if not line.strip():
            continue
        fields = line.split("|")
        if len(fields) == len(columns) + 1 and not fields[-1]:
            fields.pop()
        if len(fields) != len(columns):
            what = f"{name}, line {number}: {len(fields)} fields"
            why = f"the first line names {len(columns)}"
            raise Wrong(what, why, "leave out JobName and Comment, which may hold a |")
        yield _Row(name, number, line, fields, columns)


def _check_columns(name: str, columns: dict[str, int]) -> None:
    fix = "add it to --format (covey-sim import --help shows a whole command)"
    for needed in NEEDED:
        if needed not in columns:
            raise Wrong(f"{name}, line 1: no column {needed}", f"it has {', '.join(columns)}", fix)
    if not {"AllocTRES", "AllocGRES", "ReqTRES", "ReqGRES"} & set(columns):
        raise Wrong(f"{name}, line 1: no column AllocTRES", "it says which jobs had GPUs", fix)
    if not {"ElapsedRaw", "Elapsed"} & set(columns) and not {"Start", "End"} <= set(columns):
        raise Wrong(f"{name}, line 1: no column ElapsedRaw", "it says how long a job ran", fix)


# ---- one line --------------------------------------------------------------------------------------------------------


class _Row:
    """One line, whose fields are found by the names of its columns."""

    def __init__(self, name: str, number: int, text: str, fields: list[str], columns: dict[str, int]) -> None:
        self.name, self.number, self.text, self.fields, self.columns = name, number, text, fields, columns

    def get(self, column: str) -> str:
        at = self.columns.get(column)
        return "" if at is None else self.fields[at].strip()

    def id(self) -> str:
        id = self.get("JobID")
        if not id or len(id) > ID_MAX or not id.isprintable():
            raise self.wrong("JobID", "a job's number such as 123, 123_4, 123+0 or 123.batch")
        return id

    def wrong(self, column: str, expected: str) -> Wrong:
        what = f"{self.name}, line {self.number}, column {column}: {self.get(column)[:60]!r}"
        return Wrong(what, f"expected {expected}", "correct or remove the line")

    def impossible(self, column: str, expected: str) -> _Impossible:
        return _Impossible(f"line {self.number}, column {column}: {self.get(column)[:60]!r}; expected {expected}")

    def time(self, column: str) -> int | None:
        """Seconds since 1970 of Slurm's local time, taken as UTC; None when there is none."""
        text = self.get(column)
        if text in NO_TIME:
            return None
        if re.fullmatch(r"[0-9]{1,12}", text):
            at_s = int(text)
        else:
            try:
                moment = datetime.fromisoformat(text)
            except ValueError:
                raise self.wrong(column, "a time such as 2025-05-01T12:00:00, or seconds since 1970") from None
            at_s = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
        if not EARLIEST_S <= at_s <= LATEST_S:
            raise self.impossible(column, "a time from 2000 to 2100")
        return at_s

    def is_local(self, column: str) -> bool:
        """Whether the time does not say by which clock it is."""
        return re.fullmatch(r"[^T]*T[0-9:.]*", self.get(column)) is not None

    def ran_raw_s(self) -> int | None:
        text = self.get("ElapsedRaw")
        if text in NO_TIME:
            return None
        if not re.fullmatch(r"-?[0-9]{1,18}", text):
            raise self.wrong("ElapsedRaw", "whole seconds")
        if not 0 <= int(text) <= RAN_MAX_S:
            raise self.impossible("ElapsedRaw", f"seconds from 0 to {RAN_MAX_S}, which are ten years")
        return int(text)

    def span_s(self, column: str) -> int | None:
        """Seconds of [days-]hours:minutes:seconds; None for words such as UNLIMITED."""
        text = self.get(column)
        if not text or not re.match(r"-?[0-9]", text):
            return None
        found = re.fullmatch(r"(?:([0-9]{1,6})-)?(?:([0-9]{1,9}):)?([0-9]{1,9}):([0-9]{1,2})(?:\.[0-9]+)?", text)
        if found is None:
            raise self.wrong(column, "a time such as 1-02:30:00")
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    def limit_s(self) -> int | None:
        """The time limit in seconds; None when there is none, or none within ten years."""
        raw = self.get("TimelimitRaw")
        limit = int(raw) * 60 if re.fullmatch(r"[0-9]{1,12}", raw) else self.span_s("Timelimit")
        return limit if limit and limit <= RAN_MAX_S else None


def _attempt(row: _Row, seen: _Seen) -> _Attempt:
    """The attempt that a line tells of: its kind, and the job if it is one to simulate."""
    state = _state(row)
    submit, start = row.time("Submit"), row.time("Start")
    eligible = row.time("Eligible")
    seen.local = seen.local or row.is_local("Submit")
    if submit is not None and start is not None and start < submit:
        if row.is_local("Start") and submit - start <= CLOCK_CHANGE_S:
            seen.clock += 1
            start += CLOCK_CHANGE_S
        elif submit - start <= CLOCK_CHANGE_S:
            submit = start
        else:
            raise row.impossible("Start", f"a time that is not before Submit, {row.get('Submit')}")
    ready = eligible if None not in (eligible, submit) and _lies(submit, eligible, start) else submit
    gpus, asked = gpus_of(row)
    kind = _kind(row, state, gpus, submit)
    if kind == "in an unknown state":
        seen.states.add(state)
    if kind:
        run = Run(start, _ran(row, seen), gpus) if kind in EARLIER else None
        return _Attempt(kind, state, row.number, ready, submit, start, None, run)
    ran = _ran(row, seen)
    if ran == 0:
        kind = "cancelled before it started" if state == "CANCELLED" else "ended at once"
        return _Attempt(kind, state, row.number, ready, submit, start, None)
    assert ready is not None
    seen.asked += asked
    seen.types.update(set(re.findall(r"(?:^|,)gres/gpu:([^=,]+)=", row.get("AllocTRES"))))
    kind = "kept, cancelled while running" if state == "CANCELLED" else "kept"
    tenant = "".join(c if c.isprintable() else "?" for c in row.get("Account") or row.get("User"))
    job = Found(row.id(), ready, gpus, ran, row.limit_s(), tenant, state, start)
    return _Attempt(kind, state, row.number, ready, submit, start, job)


def _lies(low: int | None, at: int | None, high: int | None) -> bool:
    return low is not None and at is not None and low <= at and (high is None or at <= high)


def _state(row: _Row) -> str:
    """The state without the name of who cancelled it; one that was cut off (OUT_OF_ME+) is completed."""
    state = row.get("State").split(" ")[0]
    if state.endswith("+"):
        state = state.rstrip("+")
        return next((each for each in STATES if each.startswith(state)), state) if len(state) > 3 else state
    if not state.isupper():
        raise row.wrong("State", "a state such as COMPLETED or CANCELLED by 1000")
    return state


def _kind(row: _Row, state: str, gpus: int, submit: int | None) -> str:
    """Why this line is no job to simulate; empty when it is one, if it ran."""
    if gpus == 0:
        unknown = not any(row.get(column) for column in ("AllocTRES", "ReqTRES", "AllocGRES", "ReqGRES"))
        if unknown and state == "CANCELLED" and not row.ran_raw_s() and not row.span_s("Elapsed"):
            return "cancelled before it started"
        return "still waiting" if unknown and state in STILL_WAITING else "without GPUs"
    if "[" in row.id():
        return "cancelled before it started" if state == "CANCELLED" else "still waiting"
    if state in STILL_WAITING:
        return "still waiting"
    if state == "RESIZING" and row.time("End") is not None:
        return "resized"
    if state in GOING_ON:
        return "still running"
    if state == "REQUEUED":
        return "requeued"
    if state in ELSEWHERE:
        return "moved to another cluster"
    if state not in ENDED and state != "CANCELLED":
        return "in an unknown state"
    return "" if submit is not None else "without a submission time"


def _ran(row: _Row, seen: _Seen) -> int:
    """Seconds that the attempt held its GPUs."""
    ran = row.ran_raw_s()
    if ran is None:
        ran = row.span_s("Elapsed")
        if ran is not None and ran > RAN_MAX_S:
            raise row.impossible("Elapsed", "at most ten years")
    if ran is not None:
        return ran
    start, end = row.time("Start"), row.time("End")
    if start is None or end is None:
        return 0
    if end < start and row.is_local("End") and start - end <= CLOCK_CHANGE_S:
        seen.clock += 1
        end += CLOCK_CHANGE_S
    if not 0 <= end - start <= RAN_MAX_S:
        raise row.impossible("End", f"a time that is not before Start, {row.get('Start')}, and within ten years of it")
    return end - start


def gpus_of(row: _Row) -> tuple[int, bool]:
    """GPUs of the whole allocation, and whether they are given only in what was asked for: nothing was ever allocated,
    or Slurm does not account for GPUs that are."""
    for column in ("AllocTRES", "ReqTRES"):
        text = row.get(column)
        plain = re.findall(r"(?:^|,)gres/gpu=([0-9]{1,9})([KM]?)(?=,|$)", text)
        typed = re.findall(r"(?:^|,)gres/gpu:[^=,]+=([0-9]{1,9})([KM]?)(?=,|$)", text)
        if plain or typed:
            counts = [int(number) * {"": 1, "K": 1024, "M": 1 << 20}[unit] for number, unit in plain[:1] or typed]
            return _bounded(row, column, sum(counts)), column == "ReqTRES"
    for column in ("AllocGRES", "ReqGRES"):
        each = re.findall(r"(?:^|,)(?:gres[:/])?gpu(?::[^:,=()]*[^:,=()\d][^:,=()]*)?[:=]([0-9]{1,9})", row.get(column))
        if each:
            nodes = row.get("NNodes")
            if nodes and not re.fullmatch(r"[0-9]{1,9}", nodes):
                raise row.wrong("NNodes", "a number of nodes")
            gpus = sum(map(int, each)) * (int(nodes) if nodes else 1)
            return _bounded(row, column, gpus), column == "ReqGRES"
    return 0, False


def _bounded(row: _Row, column: str, gpus: int) -> int:
    if gpus > GPUS_MAX:
        raise row.impossible(column, f"at most {GPUS_MAX} GPUs")
    return gpus


# ---- whole jobs ------------------------------------------------------------------------------------------------------


def _last(id: str, lines: Sequence[_Attempt], counts: Counter[str]) -> Found | None:
    """The last attempt of a job with the runs of the earlier ones, submitted when the first one could begin. Every
    line is counted."""
    attempts: list[_Attempt] = []
    for line in lines:
        same = next((at for at, each in enumerate(attempts) if _is_same(each, line)), None)
        if same is None:
            attempts.append(line)
            continue
        counts["repeated"] += 1
        if not _is_over(attempts[same]) or _is_over(line):
            attempts[same] = line
    attempts.sort(key=lambda each: (each.submit_s or 0, each.kind not in EARLIER, each.line))
    last = attempts[-1]
    for earlier in attempts[:-1]:
        counts["resized" if earlier.kind == "resized" else "requeued"] += 1
    counts["still running" if last.kind == "resized" else last.kind] += 1
    if last.job is None or len(attempts) == 1:
        return last.job
    begin_s = min(each.ready_s for each in attempts if each.ready_s is not None)
    return with_earlier(replace(last.job, submit_s=begin_s), [_run_of(each) for each in attempts[:-1]])


def _run_of(attempt: _Attempt) -> Run | None:
    job = attempt.job
    return attempt.run if job is None else Run(job.start_s, job.ran_s, job.gpus)


def _is_same(one: _Attempt, other: _Attempt) -> bool:
    """Whether two lines are one attempt, seen at two times. Each attempt has its own submission in Slurm's database;
    where two have the same, two that are over and began at two times are two nevertheless."""
    if one.submit_s != other.submit_s or "REQUEUED" in (one.state, other.state):
        return False
    if "resized" in (one.kind, other.kind):
        return (one.kind, one.start_s) == (other.kind, other.start_s)
    return one.start_s == other.start_s or not (_is_over(one) and _is_over(other))


def _is_over(attempt: _Attempt) -> bool:
    return attempt.kind == "resized" or attempt.state not in (*GOING_ON, *STILL_WAITING)


def _joined(jobs: Sequence[Found], counts: Counter[str]) -> list[Found]:
    """The jobs, with parts of heterogeneous ones joined to one gang: all their GPUs, for the time of the longest
    part."""
    gangs: dict[str, Found] = {}
    names = {job.id for job in jobs}
    for job in jobs:
        part = re.fullmatch(r"([0-9]+)\+[0-9]+", job.id)
        name = job.id if part is None or part[1] in names else part[1]
        gang = gangs.get(name)
        if gang is None:
            gangs[name] = replace(job, id=name)
            continue
        counts["joined"] += 1
        counts["kept, cancelled while running" if job.state == "CANCELLED" else "kept"] -= 1
        gang.gpus = min(GPUS_MAX, gang.gpus + job.gpus)
        gang.ran_s = max(gang.ran_s, job.ran_s)
        gang.earlier = max(gang.earlier, job.earlier, key=lambda runs: sum(run.ran_s for run in runs))
        gang.submit_s = min(gang.submit_s, job.submit_s)
        gang.limit_s = None if None in (gang.limit_s, job.limit_s) else max(gang.limit_s or 0, job.limit_s or 0)
    return list(gangs.values())


# ---- what is said ----------------------------------------------------------------------------------------------------


def _notes(seen: _Seen, found: Accounting) -> list[str]:
    notes = []
    if seen.asked:
        notes.append(
            f"{plural(seen.asked, 'job')} with GPUs in what was asked for only: those count. Slurm records "
            "GPUs that are held once AccountingStorageTRES=gres/gpu is in slurm.conf"
        )
    if seen.clock:
        notes.append(
            f"{plural(seen.clock, 'time')} lay up to an hour before what it follows: the clock was set back between, "
            "and an hour was added. TZ=UTC sacct writes no such times"
        )
    if seen.local:
        notes.append(
            "times say no time zone and are taken as UTC: over a change of the clock waits are an hour off. "
            "TZ=UTC or SLURM_TIME_FORMAT=%s before sacct is exact"
        )
    if len(found.partitions) > 1 or len(seen.types) > 1:
        which = [f"partitions {', '.join(sorted(found.partitions))}"] if len(found.partitions) > 1 else []
        which += [f"GPUs {', '.join(sorted(seen.types))}"] if len(seen.types) > 1 else []
        notes.append(f"{' and '.join(which)} are taken for one pool; --partition P reads one of them")
    if any(re.search(r"[0-9]g\.[0-9]+gb", each) for each in seen.types):
        notes.append("slices of GPUs (MIG) count as GPUs")
    if seen.states:
        notes.append(f"states not known here: {', '.join(sorted(seen.states)[:SAID_MAX])}")
    notes += [f"left out: {each}" for each in seen.impossible[:SAID_MAX]]
    if len(seen.impossible) > SAID_MAX:
        notes.append(f"left out: {len(seen.impossible) - SAID_MAX} more lines of that kind")
    return notes


def _nothing(name: str, found: Accounting, seen: _Seen) -> Wrong:
    held = ", ".join(f"{count} {kind}" for kind, count in sorted(found.counts.items())) or "no line"
    why = "; ".join([f"it holds {held}", *found.notes])
    next_step = "export a longer time, with --allusers"
    if found.counts["in other partitions"] and len(found.counts) == 1:
        next_step = "name another partition"
    elif found.counts["without GPUs"] and not found.counts["still running"]:
        next_step = (
            "if those jobs had GPUs, Slurm did not record them: set AccountingStorageTRES=gres/gpu in slurm.conf, and "
            "export ReqTRES, or AllocGRES and NNodes where they still are"
        )
    return Wrong(f"{name}: no job to simulate", why, next_step)
