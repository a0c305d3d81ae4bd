"""Elastic jobs on modelled hosts, with the tuner that agents run: `plugins.tuner.machine.tuner` in virtual time.

What hosts do here differs from the tuner's model of them: a rank pushes when it has computed, while the next one of
its process computes; results come once all have pushed; times spread by chance from step to step. A change stops the
job for `CHANGE_S`, as measured on real racks (bench/elastic/elastic_changes.py), where the paper's system took half a
minute.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.core.events import LogEvent, Publish
from covey.core.ids import HostId, JobId
from plugins.facts import ArrangementsWanted
from plugins.tuner.machine.tuner import HostMeasured, HostNow, JobDivided, TensorsNow, Tuner, TunerAction, WishAnswered
from plugins.tuner.policy.division import DividedJob, Division, HostPace, HostPart, best_division, card_bytes
from sim.report import Cell, Progress, Report, Table

CHANGE_S = 1.0
"""Seconds for which a change of an arrangement stops a job: the median that was measured with other work beside; with
none it was 0.24 s (docs/results/tuner.md)."""
REPORT_S = 2.0
"""Seconds between two reports of a host."""
FOR_S = 600.0
"""Seconds that a case lasts."""
LATE_S = 200.0
"""Seconds after which a host changes, in the cases where one does."""
JOB = JobId("job")
RANKS, TABLES = 24, 12
PASS_S, CARD = 0.02, 125e6
SIZE = 2e6
Chance = Callable[[], float]


@dataclass(frozen=True)
class Case:
    """A job on hosts; `later`: the hosts as they are from `LATE_S` on."""

    title: str
    hosts: Sequence[HostPace]
    later: Sequence[HostPace] = ()
    size: float = SIZE


def cases() -> list[Case]:
    equal = [HostPace(HostId(f"h{at}"), PASS_S, CARD, 1, at > 0) for at in range(6)]
    slow = [*equal[:5], replaced(equal[5], pass_s=4 * PASS_S)]
    return [
        Case("6 equal hosts", equal),
        Case("one processor a quarter as fast", slow),
        Case("one card a quarter as fast", [*equal[:5], replaced(equal[5], card_bytes_per_s=CARD / 4)], size=10 * SIZE),
        Case("one host four times as fast, card too", [*equal[:5], HostPace(equal[5].host, PASS_S / 4, 4 * CARD, 1)]),
        Case("a processor becomes slow, a quarter", equal, slow),
        Case("a slow processor recovers", slow, equal),
    ]


def replaced(pace: HostPace, pass_s: float = 0.0, card_bytes_per_s: float = 0.0) -> HostPace:
    of = pace.host, pass_s or pace.pass_s, card_bytes_per_s or pace.card_bytes_per_s
    return HostPace(*of, pace.processes, pace.may_end)


def real_step_s(job: DividedJob, hosts: Mapping[HostId, HostPace], division: Division, chance: Chance) -> float:
    """Seconds of one step as it really is."""
    pushed = results = 0.0
    began = min(pace.pass_s for host, pace in hosts.items() if division.get(host, HostPart(0, 0)).ranks)
    for host, part in sorted(division.items()):
        pace, table = hosts[host], job.model_bytes / job.tables
        out, into = part.ranks * (job.tables - part.tables) * table, part.tables * (job.ranks - part.ranks) * table
        computed = pace.pass_s * part.ranks / max(1, pace.processes) * chance()
        last = out / max(1, part.ranks) / pace.card_bytes_per_s
        pushed = max(pushed, computed + last, began + max(out, into) / pace.card_bytes_per_s)
        results = max(results, max(out, into) / pace.card_bytes_per_s)
    return pushed + results


@dataclass
class ArrangedOutcome:
    """What became of one run."""

    start_s: float
    step_s: float
    best_s: float
    disjoint_s: float
    changes: int
    last_change_s: float
    off: float
    """The most by which a prediction missed what was measured, as a share of that."""
    division: Division


def run_case(case: Case, noise: float, seed: int) -> ArrangedOutcome:
    rng = random.Random(seed)
    paces = {pace.host: pace for pace in case.hosts}
    names = sorted(paces)
    hosts = {host: HostNow(1, len(range(at, RANKS, len(names)))) for at, host in enumerate(names)}
    owners = tuple(names[table % len(names)] for table in range(TABLES))
    tuner = Tuner(JOB, JobDivided(1, 0, hosts, owners, names[0]))
    job = DividedJob(RANKS, TABLES, case.size)
    tuner.handle(TensorsNow(int(case.size), tuple(range(TABLES))), 0.0)
    start_s = real_step_s(job, paces, tuner.division(), certain)
    now_s, changes, last_s = 0.0, 0, 0.0

    def chance() -> float:
        return rng.lognormvariate(-noise * noise / 2, noise)

    while now_s < FOR_S:
        now_s += REPORT_S
        if case.later and now_s > LATE_S:
            paces = {pace.host: pace for pace in case.later}
        steps = max(1, round(REPORT_S / real_step_s(job, paces, tuner.division(), certain)))
        took_s = sum(real_step_s(job, paces, tuner.division(), chance) for _ in range(steps)) / steps
        for action in reported(tuner, paces, job, took_s, steps, chance, now_s):
            if isinstance(action, Publish) and isinstance(action.fact, ArrangementsWanted):
                now_s += CHANGE_S
                changes, last_s = changes + 1, now_s
                obeyed(tuner, action.fact, now_s)
    there = list(paces.values())
    best = best_division(job, there, tuner.division())
    return ArrangedOutcome(
        start_s,
        real_step_s(job, paces, tuner.division(), certain),
        real_step_s(job, paces, best, certain),
        min(real_step_s(job, paces, split, certain) for split in splits(there)),
        changes,
        last_s,
        max((abs(each.predicted_s / each.measured_s - 1) for each in tuner.judged), default=0.0),
        tuner.division(),
    )


def certain() -> float:
    return 1.0


def reported(
    tuner: Tuner, paces: Mapping[HostId, HostPace], job: DividedJob, took_s: float, steps: int, chance: Chance,
    now_s: float,
) -> list[TunerAction]:  # fmt: skip
    """What the tuner does when all hosts have reported."""
    done: list[TunerAction] = []
    for host, part in tuner.division().items():
        pace, now = paces[host], tuner.now
        there = now.hosts.get(host, HostNow(0, 0))
        passed_s = sum(pace.pass_s * chance() for _ in range(steps)) / steps
        waits_s = max(0.0, took_s - passed_s * part.ranks)
        carried = pace.card_bytes_per_s * chance() if card_bytes(job, part) else 0.0
        heard = HostMeasured(host, 1, now.config, steps if there.ranks else 0, took_s, passed_s, waits_s, carried)
        done += tuner.handle(heard, now_s)
    return [action for action in done if not isinstance(action, LogEvent)]


def obeyed(tuner: Tuner, asked: ArrangementsWanted, now_s: float) -> None:
    """The log has what was asked for."""
    wanted, now = asked.jobs[JOB], tuner.now
    hosts = {host: HostNow(1, ranks) for host, ranks in wanted.shares.items()}
    owners = now.owners if wanted.owners is None else wanted.owners
    tuner.handle(JobDivided(1, now.config + 1, hosts, owners, now.ends_never), now_s)
    tuner.handle(WishAnswered(asked.ask, ""), now_s)


def splits(paces: Sequence[HostPace]) -> list[Division]:
    """Divisions in which each host works or serves, by how fast its processor is, with equal shares."""
    order = [pace.host for pace in sorted(paces, key=lambda pace: (pace.pass_s, pace.host))]
    found: list[Division] = []
    for w in range(1, len(order)):
        work = {host: HostPart(len(range(at, RANKS, w)), 0) for at, host in enumerate(order[:w])}
        serve = order[w:]
        found.append(work | {host: HostPart(0, len(range(at, TABLES, len(serve)))) for at, host in enumerate(serve)})
    return found


def arranged_hosts(noise: float, seed: int, progress: Progress) -> Report:
    """The table: from equal shares, where the tuner takes a job whose hosts may be both, and how near to the best."""
    rows: list[list[Cell]] = []
    data: dict[str, Any] = {"schema": 1, "seed": seed, "cases": {}}
    every = cases()
    for at, case in enumerate(every):
        progress(at / len(every), case.title)
        found = run_case(case, noise, seed)
        reached = 100 * found.best_s / found.step_s
        parts = [found.division.get(pace.host, HostPart(0, 0)) for pace in case.hosts]
        given = " ".join(f"{part.ranks}/{part.tables}" for part in parts)
        rows.append([case.title, 1000 * found.start_s, 1000 * found.step_s, reached, 1000 * found.disjoint_s,
                     found.changes, found.last_change_s, 100 * found.off, given])  # fmt: skip
        data["cases"][case.title] = {
            "start_s": found.start_s, "step_s": found.step_s, "best_s": found.best_s, "disjoint_s": found.disjoint_s,
            "changes": found.changes, "last_change_s": found.last_change_s, "prediction_off": found.off,
        }  # fmt: skip
    columns = ("hosts", "start ms", "tuned ms", "of the best %", "work or serve ms", "changes", "last at s",
               "predictions off by %", "ranks/tables by host")  # fmt: skip
    notes = (
        f"{RANKS} ranks and {TABLES} tables of 2 MB (slow card: 20 MB), 6 hosts of 1 Gbit/s, {FOR_S:g} s; "
        f"passes spread by {noise:.0%}, seed {seed}; a change stops the job for {CHANGE_S:g} s",
        "work or serve: the best split in which each host does one of both, with equal shares",
        f"of the last two cases a host changes after {LATE_S:g} s",
    )
    table = Table("Elastic jobs, hosts that work, serve, or both", columns, rows, notes)
    return Report("tuner-both", {"both": data}, (table,), ())
