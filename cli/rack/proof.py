"""What `covey-rack run` does with a rack: two real loads at once, checked to the bit, and a summary.

    a job     examples/digits.py on four workers; its parameters must equal, bit for bit, those of one process that sums
              the workers' gradients in the same order, and it must have learned to read digits
    memory    a volume on one host, written page by page until its slabs turn hot and are placed on other hosts, then
              filled in larger requests, and read back whole: part of it was written before its slab had a lender

No answer is stored beforehand: the pattern of the pages is drawn at random each time, and the sequential run is
made here and now.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from cli.client import FAILED, Agent, AgentctlError
from cli.jobs import submit
from cli.jobs.jobs import how_long
from cli.jobs.logs import collect
from cli.main import parse
from cli.rack.example import example
from cli.rack.files import RackHost
from cli.rack.summary import summary
from cli.table import plural
from covey.core.units import MIB, format_seconds, format_size
from covey.remote import RemoteMemory, RemoteMemoryError

WORKERS = 4
ACCURACY_MIN = 0.93
"""Held-out accuracy that the example must reach."""
VOLUME, VOLUME_BYTES = "demo", 64 * MIB
MAP_S = 30.0
"""How long the slabs may take to turn hot and be placed."""
JOB_S = 120.0
PAGES_ONE_BY_ONE_MIN = 1024
"""Pages that are written one by one even when all slabs were placed in an earlier run."""
CHUNK_BYTES = MIB
COUNTED_S = 2.5
"""How long the last requests may take to appear in a volume's traffic, which is counted once a second."""
LOOK_S = 0.7
"""Between two looks at job and slabs."""
_SHA256 = re.compile(r"sha256\W+([0-9a-f]{64})", re.IGNORECASE)
_ACCURACY = re.compile(r"accuracy\W+(\d+(?:\.\d+)?)( ?%)?", re.IGNORECASE)


@dataclass
class Outcome:
    """What was seen, and what did not hold."""

    failures: list[str] = field(default_factory=list)
    accuracy: float | None = None
    sha256: str = ""
    sequential_s: float = 0.0

    def must(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.failures.append(otherwise)


class Progress:
    """One line that changes on a terminal; elsewhere a plain line now and then."""

    def __init__(self, say: Callable[[str], None], every_s: float = 4.0) -> None:
        self._say, self._every_s = say, every_s
        self._live = sys.stdout.isatty()
        self._next_s = 0.0
        self._last = ""

    def show(self, text: str) -> None:
        if self._live:
            width = shutil.get_terminal_size().columns - 11
            sys.stdout.write(f"\r\x1b[K          {text[:width]}")
            sys.stdout.flush()
        elif time.monotonic() >= self._next_s and text != self._last:
            self._next_s, self._last = time.monotonic() + self._every_s, text
            self._say(text)

    def clear(self) -> None:
        if self._live:
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()


def run(rack: Sequence[RackHost], timer: Any) -> int:
    """0 when everything held; 1 with a line for each thing that did not."""
    agent = Agent([host.address for host in rack], "the rack")
    progress, outcome = Progress(timer.say), Outcome()
    job = str(submit_digits(agent)["id"])
    timer.say(f"{job} submitted: digits.py on {WORKERS} workers, 1 GPU each")
    with sequential() as finish:
        watch = Watch(agent, job, progress)
        if len(rack) > 1:
            borrow(rack[-1], watch, outcome, timer)
        else:
            timer.say("remote memory is left out: a single host has no lender")
        view = watch.until_ended(time.monotonic() + JOB_S)
        progress.clear()
        timer.say(f"{job} {view['state']} after {how_long(view)}: {view['reason']}")
        text, outcome.sequential_s = finish()
    judge_job(agent, view, text, outcome)
    if not outcome.failures:
        timer.say(f"parameters equal to the bit to one sequential process ({outcome.sha256[:12]}...)")
        until_counted(agent, rack[-1].name)
    print()
    summary(rack, print, job, watch.tensors)
    print()
    if outcome.failures:
        why = "\n        ".join(outcome.failures)
        raise AgentctlError(FAILED, "the rack failed its checks", why, f"agentctl why {job}, agentctl logs {job}")
    print(f"All checks passed in {format_seconds(timer.passed_s)}. The rack keeps running.")
    print(what_next(job, rack, Path.cwd()))
    return 0


def what_next(job: str, rack: Sequence[RackHost], here: Path) -> str:
    """The page of the rack, three commands worth typing next, and the one that ends the rack. Paths below `here` are
    shown from there."""

    def shown(path: Path) -> Path:
        return path.relative_to(here) if path.is_relative_to(here) else path

    programs, script = shown(Path(sys.executable).parent), example()
    heals = script.with_name("healing.py")
    trains, what = script, "train again"
    if heals.exists():
        trains, what = heals, "train; kill -9 any of its processes meanwhile: the digest stays the same"
    python = Path(sys.executable).name
    lines = [
        (f"agentctl submit --workers 4 --follow -- {programs}/{python} {shown(trains)}", what),
        (f"agentctl job {job} --plot", "step times and losses of the job that has just ended, as curves"),
        (f"agentctl why {job}", "all that happened to it, on whichever host, in one order"),
    ]
    text = [f"Page:  http://{host.http}/" for host in rack[:1] if host.http]
    text += ["Try:", *(f"  {programs}/{line}\n      {what}" for line, what in lines)]
    return "\n".join([*text, f"End:   {programs}/covey-rack stop"])


# ---- the job ---------------------------------------------------------------------------------------------------------


def submit_digits(agent: Agent) -> dict[str, Any]:
    """Submit the example `digits`, as `agentctl submit` would; returns the answer."""
    script = example()
    words = ["submit", "--name", "digits", "--workers", str(WORKERS), "--cwd", str(script.parent.parent)]
    words += ["--env", "COVEY_SHARED_TENSORS=0"]  # where all are on one host they would need no aggregator
    args: argparse.Namespace = parse([*words, "--", sys.executable, str(script)])
    return submit.send(agent, submit.spec_of(args, args.command, os.environ, os.getcwd()))


@contextmanager
def sequential() -> Iterator[Callable[[], tuple[str, float]]]:
    """Run that training in one process, beside everything else: call the result for what it wrote and its seconds."""
    began_s = time.monotonic()
    command = [sys.executable, str(example()), "--sequential", str(WORKERS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:

        def finish() -> tuple[str, float]:
            try:
                text, _ = process.communicate(timeout=JOB_S)
            except subprocess.TimeoutExpired:
                what, why = "the sequential run did not end", f"{JOB_S:.0f} s have passed"
                raise AgentctlError(FAILED, what, why, " ".join(command)) from None
            if process.returncode:
                why = text.strip().splitlines()[-1] if text.strip() else f"exit status {process.returncode}"
                raise AgentctlError(FAILED, "the sequential run failed", why, " ".join(command))
            return text, time.monotonic() - began_s

        try:
            yield finish
        finally:
            process.kill()


def judge_job(agent: Agent, view: Mapping[str, Any], sequential_text: str, outcome: Outcome) -> None:
    """The job ended well, on at least two hosts where it must, learned, and equals the sequential run."""
    outcome.must(view["state"] == "done" and view["exit_code"] == 0, f"{view['id']} {view['state']}: {view['reason']}")
    per_host = max((len(place["gpus"]) for place in view["places"]), default=0)
    outcome.must(len(view["places"]) >= 2 or per_host >= WORKERS, f"{view['id']} ran on {len(view['places'])} host")
    if outcome.failures:
        return
    texts = [collect(agent, str(view["id"]), rank) for rank in range(WORKERS)]
    expected = last(_SHA256, sequential_text)
    found = sorted({digest for text in texts if (digest := last(_SHA256, text))})
    outcome.must(bool(expected), "the sequential run named no sha256 of its parameters")
    outcome.must(found == [expected], f"parameters differ: sequential {expected[:12]}, job {[d[:12] for d in found]}")
    outcome.sha256 = expected
    outcome.accuracy = next((value for text in texts if (value := accuracy(text)) is not None), None)
    good = outcome.accuracy is not None and outcome.accuracy >= ACCURACY_MIN
    outcome.must(good, f"held-out accuracy is {outcome.accuracy}, expected at least {ACCURACY_MIN}")


def last(pattern: re.Pattern[str], text: str) -> str:
    """The last match's first group, or nothing."""
    found = list(pattern.finditer(text))
    return found[-1][1] if found else ""


def accuracy(text: str) -> float | None:
    """The last accuracy that a rank wrote, 0..1."""
    found = list(_ACCURACY.finditer(text))
    if not found:
        return None
    value = float(found[-1][1])
    return value / 100 if found[-1][2] or value > 1 else value


def _epoch_and_rounds(tensors: Mapping[str, Any]) -> tuple[int, int]:
    return tensors["epoch"], tensors["rounds"]


class Watch:
    """What the job does meanwhile, looked at now and then."""

    def __init__(self, agent: Agent, job: str, progress: Progress) -> None:
        self.agent, self.job, self.progress = agent, job, progress
        self.text = ""
        self.tensors: dict[str, Any] | None = None
        """The newest that the aggregator said of this job; it forgets a job that has ended."""
        self._next_s = 0.0

    def glance(self, about_memory: str) -> bool:
        """Show how far both are; True when half a second has passed since the last look."""
        if time.monotonic() < self._next_s:
            return False
        self._next_s = time.monotonic() + LOOK_S
        self._look()
        self.progress.show(f"{self.text}; {about_memory}" if about_memory else self.text)
        return True

    def _look(self) -> dict[str, Any]:
        view: dict[str, Any] = self.agent.get("jobs", self.job).data
        if view["state"] == "running":
            own = [row for row in self.agent.get("tensors").data if row["job"] == self.job]
            self.tensors = max([self.tensors, *own] if self.tensors else own, key=_epoch_and_rounds, default=None)
        step = "" if view["step"] is None else f", step {view['step']}"
        metrics = "".join(f", {name} {value:.4g}" for name, value in sorted(view["metrics"].items())[:1])
        where = " on " + ", ".join(place["host"] for place in view["places"]) if view["places"] else ""
        self.text = f"{self.job} {view['state']}{where}{step}{metrics}"
        return view

    def until_ended(self, deadline_s: float) -> dict[str, Any]:
        while True:
            view = self._look()
            if view["over"]:
                return view
            if time.monotonic() > deadline_s:
                why = f"it is {view['state']}: {view['reason']}"
                raise AgentctlError(FAILED, f"{self.job} did not end in time", why, f"agentctl why {self.job}")
            self.progress.show(self.text)
            time.sleep(LOOK_S / 2)


# ---- remote memory ---------------------------------------------------------------------------------------------------


def borrow(host: RackHost, watch: Watch, outcome: Outcome, timer: Any) -> None:
    """Open a volume on `host`, write it until its slabs are on other hosts, read all of it back."""
    agent = Agent([host.address], f"rack host {host.name}")
    try:
        with opened(host, agent) as memory:
            timer.say(f"{format_size(VOLUME_BYTES)} of remote memory opened on {host.name}")
            began_s = time.monotonic()
            seed = time.time_ns()
            written = write_until_placed(memory, agent, host, watch, outcome, seed)
            watch.progress.clear()
            lenders = sorted({slab["lender"] for slab in slabs_of(agent, host) if slab["state"] == "mapped"})
            took = format_seconds(time.monotonic() - began_s)
            timer.say(f"{len(written)} pages written one by one; its slabs are on {', '.join(lenders)} after {took}")
            fill(memory, watch, written, seed)
            wrong = differing_pages(memory, watch, seed)
            watch.progress.clear()
            outcome.must(not wrong, f"{plural(wrong, 'page')} of remote memory read back differently")
            if not wrong:
                timer.say(f"{format_size(VOLUME_BYTES)} written and read back, every byte equal")
    except RemoteMemoryError as error:
        raise AgentctlError(FAILED, error.what, error.why, error.next) from None


def opened(host: RackHost, agent: Agent) -> RemoteMemory:
    """The volume of an earlier run, or a new one; one of another size is replaced."""
    path = str(host.run_dir / "jobs.sock")
    try:
        return RemoteMemory.open(VOLUME, VOLUME_BYTES, path)
    except RemoteMemoryError as first:
        if VOLUME not in {row["volume"] for row in agent.get("volumes").data}:
            raise
        try:
            agent.delete("volumes", VOLUME)
        except AgentctlError:
            raise first from None
        return RemoteMemory.open(VOLUME, VOLUME_BYTES, path)


def write_until_placed(
    memory: RemoteMemory, agent: Agent, host: RackHost, watch: Watch, outcome: Outcome, seed: int
) -> set[int]:
    """Write pages one by one, in turn to each slab, until every slab is on another host: which were written. After
    `MAP_S` it goes on in any case, and `outcome` records that."""
    until_s = time.monotonic() + MAP_S
    placed, of = mapped(agent, host)
    order = in_turn(memory.size // memory.page, max(1, of))
    written: set[int] = set()
    while (placed < of or len(written) < PAGES_ONE_BY_ONE_MIN) and time.monotonic() < until_s:
        page = next(order)
        memory.write(page * memory.page, pattern(seed, page, memory.page))
        written.add(page)
        if watch.glance(
            f"remote memory: {plural(len(written), 'page')} written, {placed} of {of} slabs on other hosts"
        ):
            placed, of = mapped(agent, host)
    outcome.must(0 < placed == of, f"{placed} of {of} slabs were placed on other hosts in {MAP_S:.0f} s")
    return written


def in_turn(pages: int, slabs: int) -> Iterator[int]:
    """The first page of each slab, the second page of each, and so on; from the beginning again at the end."""
    each = pages // slabs
    while True:
        for at in range(each):
            yield from range(at, each * slabs, each)


def fill(memory: RemoteMemory, watch: Watch, written: set[int], seed: int) -> None:
    """Write the pages that are not in `written`, as many at once as lie together."""
    pages, most = memory.size // memory.page, CHUNK_BYTES // memory.page
    first = 0
    while first < pages:
        end = first
        while end < pages and end - first < most and end not in written:
            end += 1
        if end > first:
            data = b"".join(pattern(seed, page, memory.page) for page in range(first, end))
            memory.write(first * memory.page, data)
            watch.glance(f"remote memory: {format_size(end * memory.page)} filled")
        first = max(end, first + 1)


def mapped(agent: Agent, host: RackHost) -> tuple[int, int]:
    """Slabs of the volume that lie on another host, and all of them."""
    slabs = slabs_of(agent, host)
    return sum(slab["state"] == "mapped" and slab["lender"] not in (None, host.name) for slab in slabs), len(slabs)


def slabs_of(agent: Agent, host: RackHost) -> list[dict[str, Any]]:
    return [slab for slab in agent.get("slabs").data if (slab["volume"], slab["borrower"]) == (VOLUME, host.name)]


def differing_pages(memory: RemoteMemory, watch: Watch, seed: int) -> int:
    """How many pages do not hold what was written."""
    wrong = 0
    for offset in range(0, memory.size, CHUNK_BYTES):
        data = memory.read(offset, CHUNK_BYTES)
        for at in range(0, len(data), memory.page):
            page = (offset + at) // memory.page
            wrong += data[at : at + memory.page] != pattern(seed, page, memory.page)
        watch.glance(f"remote memory: {format_size(offset + CHUNK_BYTES)} read back")
    return wrong


def until_counted(agent: Agent, host: str) -> None:
    """Wait until the traffic of our volume on `host`, if there is one, shows that it was read whole: what the summary
    says must not be older than what was just said."""
    until_s = time.monotonic() + COUNTED_S
    while time.monotonic() < until_s:
        ours = [row for row in agent.get("volumes").data if (row["volume"], row["host"]) == (VOLUME, host)]
        if all(row["read_bytes"] >= VOLUME_BYTES for row in ours):
            return
        time.sleep(0.1)


def pattern(seed: int, page: int, size: int) -> bytes:
    """What must stand in a page: known from its number, like no other page's and no earlier run's."""
    return Random(f"{seed}/{page}").randbytes(size)
