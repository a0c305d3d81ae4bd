"""Turn the accounting of Slurm into a trace, and see what that month would have been under Covey.

    TZ=UTC SLURM_TIME_FORMAT=%s sacct --allusers --allocations --duplicates --parsable2 \\
          --starttime 2025-05-01 --endtime 2025-06-01 --format \\
        JobID,User,Account,Partition,State,Submit,Eligible,Start,End,ElapsedRaw,TimelimitRaw,AllocTRES,ReqTRES > may.txt
    covey-sim import sacct may.txt --output may.csv --gpus 64x8

Needed columns: JobID, State, Submit, and AllocTRES (or ReqTRES, or AllocGRES with NNodes), and ElapsedRaw, Elapsed or
Start and End. The rest is used when it is there. With --gpus it also runs both policies; FILE may be - for standard
input; without --output the trace goes to standard output and what was counted to standard error.

--duplicates   shows all attempts of a requeued job, which runs for as long as they ran together; without it Slurm shows
               the last one, and its wait begins there.
TZ=UTC, SLURM_TIME_FORMAT=%s
               times that no change of the clock disturbs. Without them sacct writes local time, which is taken as UTC:
               spans are right, but for those over the hour in which the clock is set.
one pool       all partitions and all types of GPU are taken for one pool of equal GPUs; --partition P,Q reads the jobs
               of those partitions only.
FILE           plain or gzip, 1 GiB unpacked at most.

`agentctl history -o sacct` writes such a file too. Other files: `import covey` (agentctl history -o csv or -o parquet),
`import philly` (Microsoft's cluster_job_log), `import helios` (SenseTime's cluster_log.csv), `import pai` (Alibaba's
pai_task_table.csv of 2020), each as it was published.
"""

import argparse
import csv
import io
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sim.files import bytes_of
from sim.jobs import jobs as simulator
from sim.jobs.engine import SimJob
from sim.jobs.published import READERS
from sim.jobs.sacct_lines import WHY, Accounting, read_sacct
from sim.jobs.sacct_runs import Found
from sim.jobs.trace import Trace
from sim.parquet import MAGIC, csv_of
from sim.report import Cell, Figure, Progress, Report, Series, Table, Wrong

HELP = "turn accounting, such as Slurm's, into a trace: import sacct FILE"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("format", choices=("sacct", *READERS), help="where it comes from")
    parser.add_argument("file", metavar="FILE", help="what sacct --parsable2 wrote, or another; - for standard input")
    parser.add_argument("--output", "-o", type=Path, metavar="TRACE", help="the trace; default: standard output")
    parser.add_argument("--partition", metavar="P[,Q]", default="", help="jobs of these partitions only")
    parser.add_argument("--gpus", metavar="N[xM]", help="also run it under covey and under backfill on these GPUs")


def run(options: argparse.Namespace, progress: Progress) -> Report:
    partitions = [each for each in options.partition.split(",") if each]
    text = _read(options.file)
    if options.format == "sacct":
        read = read_sacct(text, options.file, partitions)
    elif partitions:
        raise Wrong("unexpected option --partition", "only Slurm's accounting has partitions", "leave it out")
    else:
        read = READERS[options.format](text, options.file)
    trace = as_trace(read.jobs, _stem(options.file))
    written = as_csv(read.jobs)
    aside = options.report_aside = options.output is None and not options.gpus and not options.json
    if options.output is not None:
        try:
            options.output.write_text(written, encoding="utf-8")
        except OSError as error:
            raise Wrong(f"{options.output} cannot be written", str(error), "name another file") from None
    elif aside:
        sys.stdout.write(written)
    report = _report(options, read, trace, progress)
    if options.output is None and not aside:
        report.data["trace_csv"] = written
    return report


def _stem(file: str) -> str:
    return "sacct" if file == "-" else Path(file).stem


def _read(file: str) -> str:
    """Text of a file; names of people and jobs may be in any encoding, nothing that is counted is."""
    data = bytes_of(file)
    return csv_of(data, file) if data.startswith(MAGIC) else data.decode("utf-8-sig", errors="replace")


# ---- writing ----


def as_trace(found: Sequence[Found], name: str) -> Trace:
    """The jobs as a trace in which the first one is submitted at second 0."""
    begin = found[0].submit_s
    jobs = [SimJob(job.id, job.submit_s - begin, job.gpus, job.ran_s, job.limit_s, job.tenant) for job in found]
    return Trace(name, jobs, sum(job.limit_s is not None for job in jobs), {})


def as_csv(found: Sequence[Found]) -> str:
    """The jobs as the CSV of a trace for `covey-sim jobs`."""
    begin, out = found[0].submit_s, io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["job_id", "submit_time_s", "num_gpus", "duration_s", "tenant", "status", "time_limit_s", "wait_in_trace_s"]
    )
    for job in found:
        waited = "" if (seconds := job.waited_s()) is None else seconds
        limit = "" if job.limit_s is None else job.limit_s
        writer.writerow([job.id, job.submit_s - begin, job.gpus, job.ran_s, job.tenant, job.state, limit, waited])
    return out.getvalue()


def busiest(found: Sequence[Found]) -> int:
    """The most GPUs that were held at once; 0 when no line says when jobs started."""
    changes: Counter[int] = Counter()
    for job in found:
        for run in job.runs():
            if run.start_s is not None:
                changes[run.start_s] += run.gpus
                changes[run.start_s + run.ran_s] -= run.gpus
    now = most = 0
    for _, change in sorted(changes.items()):
        now += change
        most = max(most, now)
    return most


def _report(options: argparse.Namespace, read: Accounting, trace: Trace, progress: Progress) -> Report:
    found, counts = read.jobs, read.counts
    rows: list[Sequence[Cell]] = [(kind, counts[kind], why) for kind, why in WHY.items() if counts[kind]]
    most = busiest(found)
    waits = [waited for job in found if (waited := job.waited_s()) is not None]
    notes = [f"{most} GPUs were held at once at the busiest moment"] if most else []
    if waits:
        where = "Slurm itself" if options.format == "sacct" else "the cluster itself"
        notes.append(f"they waited {simulator.duration(sum(waits) / len(waits))} on average in {where}")
    if not options.gpus and options.output is not None:
        size = most or max(job.gpus for job in found)
        for policy in ("backfill", "covey"):
            notes.append(f"next: covey-sim jobs --trace {options.output} --gpus {size} --policy {policy}")
    notes += read.notes
    tables = [Table("what was found", ("lines", "count", "why"), rows, notes)]
    data: dict[str, Any] = {
        "trace": None if options.output is None else str(options.output),
        "jobs": len(found),
        "counted": {kind: counts[kind] for kind in WHY},
        "partitions": dict(sorted(read.partitions.items())),
        "notes": read.notes,
        "gpus_held_at_once_max": most,
        "wait_in_trace_s_mean": sum(waits) / len(waits) if waits else None,
    }
    figures: list[Figure] = []
    warnings: list[str] = []
    if options.gpus:
        compared, figure, warnings = compare(trace, *simulator.gpus_of(options.gpus), progress)
        tables.append(_comparison(compared, trace, options.gpus))
        figures.append(figure)
        data["compared"] = compared
    return Report("import", data, tables, figures, warnings)


def compare(
    trace: Trace, capacity: int, hosts: int | None, progress: Progress
) -> tuple[dict[str, dict[str, object]], Figure, list[str]]:
    """Simulate these jobs under backfill and under covey; data by policy, the figure, and warnings."""
    found: dict[str, dict[str, object]] = {}
    series: list[Series] = []
    warnings: list[str] = []
    for policy in ("backfill", "covey"):
        report = simulator.simulate(trace, capacity, simulator.plan_of(policy, {}), progress, hosts)
        found[policy] = report.data
        series += report.figures[0].series
        warnings += report.warnings
    figure = replace(report.figures[0], series=series, title=f"{trace.name}, {capacity} GPUs")
    return found, figure, list(dict.fromkeys(warnings))


def _comparison(compared: dict[str, dict[str, object]], trace: Trace, gpus: str) -> Table:
    rows: list[Sequence[Cell]] = []
    for name, title in (
        ("jct_s_mean", "job completion time, mean"),
        ("jct_s_p50", "job completion time, median"),
        ("jct_s_p95", "job completion time, 95 %"),
        ("wait_s_mean", "waiting, mean"),
        ("makespan_s", "makespan"),
    ):
        before, after = (float(str(compared[policy][name])) for policy in ("backfill", "covey"))
        better = f"{before / after:.2f} x" if after else "-"
        rows.append((title, simulator.duration(before), simulator.duration(after), better))
    rows.append(("preemptions", 0, int(str(compared["covey"]["preemptions"])), ""))
    notes = (
        "durations are those of the accounting: what a job would gain or lose on other GPUs is not in it",
        "covey: 30 s for every checkpoint and 30 s for every restart from it; jobs must be able to do so",
    )
    return Table(f"{trace.name} on {gpus} GPUs", ("what", "fcfs + backfill", "covey", "better"), rows, notes)
