"""Workers and servers of one job on given hosts: the tuner at work in virtual time, and what it gains (Cruise, ch. 3).

    covey-sim tuner                              the paper's tables: four applications, unequal hosts, hosts that change
    covey-sim tuner --cluster hosts.csv          your hosts and your job (the options from --samples on)

The cluster is CSV, one host a line:
    host,compute_s_per_sample,nic_bytes_per_s[,kind][,role][,joins_s][,leaves_s][,lost_s][,slows_s,slows_times]

Agents run the tuner of the last table: elastic jobs, whose hosts may be workers, servers, or both
(`sim/tuner/arranged.py`). All else is as the paper has it, where a host is one or the other: the tuner waits for
mini-batches of every worker, decides, and its plan is executed step by step, moves and all (`sim/tuner/cluster.py` says
what hosts do meanwhile, which differs from the tuner's model of them). It is compared with what the job would have been
without it, and with every fixed number of workers.
"""

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from covey.core.ids import HostId
from plugins.tuner.machine.disjoint import BATCHES_MIN
from plugins.tuner.policy import search
from plugins.tuner.policy.cost import HostCosts, Load
from sim.report import Cell, Figure, Progress, Report, Series, Table, Wrong
from sim.tuner.arranged import arranged_hosts
from sim.tuner.cluster import Cluster, Job, Machine, Outcome, start_of
from sim.tuner.file import read_cluster

HELP = "workers and servers of one job on given hosts"
SEED = 1
NIC = 1.25e9 / 8
"""Bytes per second of the paper's r4.xlarge (§3.4.1)."""
EPOCHS = 10
FIXED_MAX = 64
"""Most numbers of workers that are tried fixed; more hosts are tried in steps."""
BATCHES_MAX = 20_000_000
"""Most mini-batches of one run of the command."""


@dataclass(frozen=True)
class App:
    """An application of the paper, with what the paper says about it (tables 3.3 and 3.4, §3.4.3)."""

    load: Load
    sample_s: float
    """Seconds of computing per sample on one host. Ours: the paper gives none, so they are what puts the model's
    optimum where the paper found it."""
    data_bytes: float
    """Bytes of training data. NMF's are the paper's 200 blocks of 100 MB (§3.4.6); the others' are ours."""
    starts: tuple[tuple[int, int], ...]
    best: tuple[int, int]
    reached_percent: tuple[float, ...]
    gain_percent: tuple[float, ...]


APPS = {
    "NMF": App(Load(2e6, 284e6, 1e4), 1.19e-3, 20e9, ((27, 5), (18, 14)), (23, 9), (98.8, 93.9), (35.8, 22.3)),
    "MLR": App(Load(1e5, 2.56e9, 1e3), 0.478, 2e9, ((18, 14), (23, 9)), (27, 5), (97.8, 97.8), (55.3, 8.7)),
    "LDA": App(Load(8.2e6, 225.6e6, 1e3), 2.39e-3, 6e9, ((27, 5), (23, 9)), (18, 14), (100.0, 100.0), (37.5, 17.4)),
    "Lasso": App(Load(1e5, 2.56e9, 1e3), 0.0455, 2e9, ((27, 5), (23, 9)), (20, 12), (100.0, 100.0), (42.7, 28.5)),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="hosts to run on; without it, the paper's tables")
    parser.add_argument("--hosts", type=int, default=32, help="equal hosts of the paper's tables (default 32)")
    parser.add_argument("--noise", type=float, default=0.1, help="spread of computing times (default 0.1)")
    parser.add_argument("--batches", type=int, default=BATCHES_MIN,
                        help=f"mini-batches of every worker before a decision (default {BATCHES_MIN})")  # fmt: skip
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"epochs to run (default {EPOCHS})")
    job = parser.add_argument_group("the job, with --cluster")
    job.add_argument("--samples", type=float, default=2e6, help="samples of an epoch (default 2e6)")
    job.add_argument("--model-bytes", type=float, default=284e6, help="of the whole model (default 284e6)")
    job.add_argument("--batch", type=float, default=1e4, help="samples of a mini-batch (default 1e4)")
    job.add_argument("--data-bytes", type=float, default=20e9, help="of all training data (default 20e9)")
    job.add_argument("--workers", type=int, help="hosts that work at the start, the first ones (default: half)")


def run(options: argparse.Namespace, progress: Progress) -> Report:
    for flag, value, low, high in (
        ("--hosts", options.hosts, 2, 512),
        ("--noise", options.noise, 0, 1),
        ("--batches", options.batches, 1, 10_000),
        ("--epochs", options.epochs, 1, 10_000),
        ("--samples", options.samples, 1, 1e12),
        ("--model-bytes", options.model_bytes, 1, 1e15),
        ("--batch", options.batch, 1, 1e12),
        ("--data-bytes", options.data_bytes, 1, 1e18),
    ):
        if not low <= value <= high:
            raise Wrong(f"{flag} {value:g}", f"it lies outside {low:g}..{high:g}", "give another value")
    if options.cluster is not None:
        return given(options, progress)
    if options.workers is not None:
        raise Wrong("--workers", "the paper's tables have their own starts", "give --cluster FILE, or leave it out")
    parts = [
        equal_hosts(options.hosts, options.noise, options.batches, options.epochs, options.seed, progress),
        mixed_hosts(options.noise, options.batches, options.epochs, options.seed, progress),
        changing_hosts(options.noise, options.batches, options.seed, progress),
        arranged_hosts(options.noise, options.seed, progress),
    ]
    data = {key: value for part in parts for key, value in part.data.items()}
    tables = [table for part in parts for table in part.tables]
    return Report("tuner", data, tables, [figure for part in parts for figure in part.figures])


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Everything of a run except where it starts."""

    job: Job
    machines: Sequence[Machine]
    noise: float
    batches: int
    seed: int

    def run(self, workers: Sequence[HostId], epochs: int, progress: Progress, tunes: bool = True) -> Outcome:
        start = start_of(self.job, self.machines, workers)
        rng = random.Random(self.seed)
        cluster = Cluster(self.job, self.machines, start, self.noise, rng, self.batches, tunes=tunes)
        return cluster.run(epochs, progress)

    def fixed(self, orders: Sequence[Sequence[HostId]], progress: Progress) -> dict[tuple[int, int], float]:
        """(order, workers) -> seconds of an epoch with these roles and equal shares, for every number of workers."""
        n = len(orders[0])
        step = max(1, -(-(n - 1) // FIXED_MAX))
        found = {}
        for at, order in enumerate(orders):
            for w in range(1, n, step):
                progress((at + w / n) / len(orders), f"{w} workers fixed")
                found[at, w] = self.run(order[:w], 2, _silent, tunes=False).epoch_s()
        return found


def _silent(share: float, text: str) -> None: ...


def _within(progress: Progress, start: float, part: float, name: str) -> Progress:
    return lambda done, text: progress(start + part * done, f"{name}: {text}")


def _equal(n: int, sample_s: float) -> list[Machine]:
    return [Machine(HostId(f"h{at:03}"), sample_s, NIC, "equal") for at in range(n)]


def _job(app: App) -> Job:
    return Job(app.load, app.data_bytes)


def _split(w: int, n: int) -> str:
    return f"({w}, {n - w})"


def _ended(outcome: Outcome) -> str:
    _, w, s = outcome.splits[-1]
    return f"({w}, {s})"


# ---- the paper's tables ----------------------------------------------------------------------------------------------


def equal_hosts(
    n: int,
    noise: float,
    batches: int,
    epochs: int,
    seed: int,
    progress: Progress,
    apps: Sequence[str] = tuple(APPS),
) -> Report:
    """Table 3.4 and §3.4.3: from each start, where the tuner takes the job, how soon, and how near that is to the best
    fixed split."""
    rows: list[list[Cell]] = []
    series: list[Series] = []
    data: dict[str, Any] = {"schema": 1, "hosts": n, "seed": seed, "apps": {}}
    for at, name in enumerate(apps):
        app, tell = APPS[name], _within(progress, at / len(apps), 1 / len(apps), name)
        setting = Setting(_job(app), _equal(n, app.sample_s), noise, batches, seed)
        hosts = [machine.host for machine in setting.machines]
        grid = {w: epoch_s for (_, w), epoch_s in setting.fixed([hosts], tell).items()}
        best = min(grid, key=lambda w: (grid[w], w))
        series.append(Series(name, list(grid), [each / grid[best] for each in grid.values()]))
        data["apps"][name] = {"best_workers": best, "choices": []}
        for start, reached_there, gain_there in zip(app.starts, app.reached_percent, app.gain_percent, strict=True):
            first = max(1, min(n - 1, round(start[0] * n / 32)))
            found = setting.run(hosts[:first], epochs, tell)
            without_s = setting.run(hosts[:first], 2, tell, tunes=False).epoch_s()
            settled_s = found.epoch_s(found.settled_s)
            reached, gain = 100 * grid[best] / settled_s, 100 * (1 - settled_s / without_s)
            in_epochs = found.settled_s / without_s
            rows.append([name, _split(first, n), _ended(found), _split(best, n), str(app.best), reached, reached_there,
                         gain, gain_there, in_epochs, found.moving_s, found.moves])  # fmt: skip
            data["apps"][name]["choices"].append({
                "start": first, "workers": found.splits[-1][1], "reached_percent": reached, "gain_percent": gain,
                "settled_s": found.settled_s, "settled_epochs": in_epochs, "moving_s": found.moving_s,
                "moves": found.moves, "blocks_moved": found.blocks, "decisions_to_stay": found.kept,
            })  # fmt: skip
    columns = ("app", "start (W, S)", "choice", "best of all", "paper's best", "reached %", "paper %",
               "epoch shorter %", "paper shorter %", "settled, epochs", "moving s", "moves")  # fmt: skip
    notes = (
        f"{n} hosts of 1.25 Gbit/s; times spread by {noise:.0%}; {batches} mini-batches of every worker before a "
        f"decision; {epochs} epochs, seed {seed}; the tuner of the agent, its plans executed step by step",
        "reached: the epoch of the best fixed split over the epoch after the last plan, both run with the same noise "
        "(a little over 100 is chance, or shares that fit better than equal ones)",
        "settled: when the last plan was done, in epochs of the start; moving: seconds with a plan under way (NMF from "
        "(18, 14) there: 31.3 s, §3.4.6)",
        "seconds per sample are fitted to the paper's optimum, which it gives, since it does not give them",
    )
    figure = Figure("tuner-splits", "Epoch against the best one", "workers", "times the best", series)
    return Report("tuner", data, (Table("Applications on equal hosts", columns, rows, notes),), (figure,))


MIXED: tuple[tuple[str, int, int, int, int, float], ...] = (
    ("NMF", 25, 2, 3, 2, 35.2),
    ("MLR", 16, 2, 12, 2, 58.3),
    ("LDA", 25, 2, 3, 2, 41.3),
)
"""(app, workers, strong workers, servers, strong servers, percent that the epoch became shorter there) (§3.4.5)."""


def mixed_hosts(noise: float, batches: int, epochs: int, seed: int, progress: Progress) -> Report:
    """§3.4.5: 28 hosts and 4 with four times the processors and network, from even shares."""
    rows: list[list[Cell]] = []
    data: dict[str, Any] = {}
    for at, (name, workers, strong_workers, servers, strong_servers, there) in enumerate(MIXED):
        app = APPS[name]
        tell = _within(progress, at / len(MIXED), 1 / len(MIXED), f"{name}, two kinds")
        weak = [Machine(HostId(f"h{n:03}"), app.sample_s, NIC, "weak") for n in range(workers + servers)]
        strong = [Machine(HostId(f"s{n:03}"), app.sample_s / 4, NIC * 4, "strong")
                  for n in range(strong_workers + strong_servers)]  # fmt: skip
        setting = Setting(_job(app), [*weak, *strong], noise, batches, seed)
        first = [each.host for each in (*weak[:workers], *strong[:strong_workers])]
        found = setting.run(first, epochs, tell)
        before_s, after_s = setting.run(first, 2, tell, tunes=False).epoch_s(), found.epoch_s(found.settled_s)
        names = {each.host for each in strong}
        ended = [f"{sum(r == role for h, r in found.roles.items() if h not in names)}+"
                 f"{sum(r == role for h, r in found.roles.items() if h in names)}"
                 for role in ("worker", "server")]  # fmt: skip
        gain = 100 * (1 - after_s / before_s)
        start = f"({workers}+{strong_workers}, {servers}+{strong_servers})"
        rows.append([name, start, f"({ended[0]}, {ended[1]})", before_s, after_s, gain, there,
                     found.settled_s / before_s, found.moving_s, found.moves])  # fmt: skip
        data[name] = {"workers": ended[0], "servers": ended[1], "epoch_before_s": before_s, "epoch_after_s": after_s,
                      "gain_percent": gain, "settled_s": found.settled_s, "moves": found.moves}  # fmt: skip
    columns = ("app", "start (W, S)", "choice", "epoch before s", "after s", "shorter %", "paper shorter %",
               "settled, epochs", "moving s", "moves")  # fmt: skip
    notes = (
        "28 hosts and 4 strong ones with four times the processors and 5 Gbit/s; 17+3 are 17 and 3 strong",
        "all shares are equal at the start; the tuner gets two kinds of hosts, not what they can do",
    )
    return Report("tuner-mixed", {"mixed": data}, (Table("Hosts of two kinds", columns, rows, notes),))


def changing_hosts(noise: float, batches: int, seed: int, progress: Progress) -> Report:
    """§3.4.4 and beyond: NMF on 16 hosts; 16 more come, a host slows down, a host dies, the 16 are asked back."""
    app = APPS["NMF"]
    weak = _equal(32, app.sample_s)
    changes = [replace(each, joins_s=1200.0 if at >= 16 else 0.0, leaves_s=4800.0 if at >= 16 else None)
               for at, each in enumerate(weak)]  # fmt: skip
    changes[0] = replace(changes[0], slows_s=2400.0, slows_times=2.0)
    changes[1] = replace(changes[1], lost_s=3600.0)
    first = [each.host for each in changes[:14]]
    return compared("tuner-changing", "NMF on hosts that change", Setting(_job(app), changes, noise, batches, seed),
                    first, 30, progress, fixed=False)  # fmt: skip


# ---- any cluster -----------------------------------------------------------------------------------------------------


def given(options: argparse.Namespace, progress: Progress) -> Report:
    machines, workers = read_cluster(options.cluster)
    there = [machine.host for machine in machines if machine.joins_s <= 0]
    if options.workers is not None:
        if workers is not None:
            raise Wrong(f"--workers {options.workers}", f"{options.cluster} says who works", "leave one of them out")
        workers = there[: max(0, options.workers)]
    elif workers is None:
        workers = there[: len(there) // 2]
    if not 0 < len(workers) < len(there):
        what = f"{len(workers)} of the {len(there)} hosts of {options.cluster} that are there at the start work"
        raise Wrong(what, "there must be a worker and a server", "change roles, joins_s or --workers")
    job = Job(Load(options.samples, options.model_bytes, options.batch), options.data_bytes)
    runs = 2 * options.epochs + 4 * min(FIXED_MAX, len(there))
    if options.samples / options.batch * runs > BATCHES_MAX:
        why = f"{options.samples / options.batch * runs:.3g} mini-batches, at most {BATCHES_MAX} are run"
        raise Wrong("the job is too long", why, "give a larger --batch, or less --samples or --epochs")
    setting = Setting(job, machines, options.noise, options.batches, options.seed)
    return compared("tuner", options.cluster.name, setting, workers, options.epochs, progress)


def compared(
    name: str, title: str, setting: Setting, workers: Sequence[HostId], epochs: int, progress: Progress,
    fixed: bool = True,
) -> Report:  # fmt: skip
    """What the tuner does from this start, beside the start kept, and every fixed number of workers."""
    found = setting.run(workers, epochs, _within(progress, 0.0, 0.4, "tuned"))
    kept = setting.run(workers, epochs, _within(progress, 0.4, 0.3, "start kept"), tunes=False)
    if not found.epochs or not kept.epochs:
        raise Wrong(f"{title}: no epoch comes to its end", "all hosts are lost before", "let hosts join, or lose fewer")
    at_start = [machine for machine in setting.machines if machine.joins_s <= 0]
    rows: list[list[Cell]] = [_told("start kept", f"({len(workers)}, {len(at_start) - len(workers)})", kept, 0.0)]
    tuned_s, kept_s = found.epoch_s(found.settled_s), kept.epoch_s(found.settled_s)
    data: dict[str, Any] = {
        "schema": 1, "hosts": len(setting.machines), "seed": setting.seed, "epochs": len(found.epochs),
        "workers_start": len(workers), "workers": found.splits[-1][1], "servers": found.splits[-1][2],
        "settled_s": found.settled_s, "moving_s": found.moving_s, "plans": len(found.splits) - 1, "moves": found.moves,
        "blocks_moved": found.blocks, "decisions_to_stay": found.kept, "epoch_s_settled": tuned_s,
        "epoch_s_start_kept": kept_s, "gain_percent_over_start": 100 * (1 - tuned_s / kept_s),
        "roles": dict(sorted(found.roles.items())),
        "story": [{"at_s": at_s, "event": event, "reason": reason} for at_s, event, reason in found.story],
    }  # fmt: skip
    if fixed:
        quiet = [Machine(each.host, each.sample_s, each.nic_bytes_per_s, each.kind) for each in at_start]
        orders = [[each.host for each in quiet], [each.host for each in sorted(quiet, key=lambda m: m.sample_s)]]
        grid = replace(setting, machines=quiet).fixed(orders, _within(progress, 0.7, 0.3, "fixed"))
        (order, w), best_s = min(grid.items(), key=lambda one: (one[1], one[0]))
        who = ("the first", "the fastest")[order]
        rows.append([f"best fixed: {who} work, equal shares", _split(w, len(quiet)), best_s, None, None, None, None])
        data |= {"epoch_s_best_fixed": best_s, "workers_best_fixed": w,
                 "gain_percent_over_best_fixed": 100 * (1 - tuned_s / best_s)}  # fmt: skip
    rows.append(_told("tuned", _ended(found), found, found.settled_s))
    changes = any(each.lost_s or each.leaves_s or each.slows_s or each.joins_s for each in setting.machines)
    gains = [f"{data['gain_percent_over_start']:.1f} % shorter epochs than the start kept"]
    if fixed and not changes:
        gains.append(f"{data['gain_percent_over_best_fixed']:.1f} % than the best fixed split")
    notes = [
        f"epoch: mean of those begun after the tuner's last plan, {found.settled_s:.4g} s in; all run with times that "
        f"spread by {setting.noise:.0%}, seed {setting.seed}",
        f"tuned: {', '.join(gains)}",
    ]
    if found.epochs and found.epochs[-1][0] - found.epochs[-1][1] < found.settled_s:
        notes.append("no epoch began after the last plan, so it is the last one, plan and all: give more --epochs")
    if fixed and changes:
        notes.append("the fixed splits are of the hosts that are there at the start, before anything happens to them")
    columns = ("how", "(W, S)", "epoch s", f"{len(found.epochs)} epochs s", "moves", "blocks moved", "moving s")
    story: list[list[Cell]] = [[at_s, event, reason] for at_s, event, reason in found.story]
    tables = [Table(title, columns, rows, notes), Table("What happened", ("s", "what", "why"), story)]
    figure = Figure(f"{name}-epochs", title, "seconds", "seconds of an epoch", [
        Series(label, [end for end, _ in each.epochs], [length for _, length in each.epochs])
        for label, each in (("tuned", found), ("start kept", kept))
    ])  # fmt: skip
    return Report(name, data if fixed else {"changing": data}, tables, (figure,))


def _told(how: str, split: str, outcome: Outcome, after_s: float) -> list[Cell]:
    ended_s = outcome.epochs[-1][0] if outcome.epochs else None
    epoch_s = outcome.epoch_s(after_s) if outcome.epochs else None
    return [how, split, epoch_s, ended_s, outcome.moves, outcome.blocks, outcome.moving_s]


# ---- the searches ----------------------------------------------------------------------------------------------------


def unequal_hosts(seed: int, cases: int, progress: Progress) -> Report:
    """Compare the two searches with all assignments, and measure how long they take."""
    rng = random.Random(seed)
    worst = worst_descent = 0.0
    for case in range(cases):
        progress(case / cases, f"case {case} of {cases}")
        hosts = made(rng, rng.randrange(2, 13))
        load = Load(2e6, 10 ** rng.uniform(6, 9.5), 10 ** rng.uniform(2.5, 4.5))
        truth = search.exhaustive(load, hosts)
        worst = max(worst, search.best(load, hosts).epoch_s / truth - 1)
        worst_descent = max(worst_descent, search.best(load, hosts, counts_max=0).epoch_s / truth - 1)
    rows: list[list[Cell]] = [
        [f"{cases} cases of 2-12 unequal hosts: worst over the optimum, %", 100 * worst, 0.1],
        ["the same by descent alone, %", 100 * worst_descent, 0.1],
    ]
    data: dict[str, Any] = {"schema": 1, "worst_percent": 100 * worst, "worst_descent_percent": 100 * worst_descent}
    for name, n, kinds, limit in (("32 hosts of 4 kinds", 32, 4, 0.1), ("100 hosts, all different", 100, 100, 1.0)):
        few = made(rng, kinds)
        hosts = [HostCosts(HostId(f"h{at:03}"), *_figures(few[at % kinds])) for at in range(n)]
        began = time.process_time()
        search.best(Load(2e6, 284e6, 1e4), hosts)
        took = time.process_time() - began
        rows.append([f"{name}: CPU seconds", took, limit])
        data[f"seconds_{n}"] = took
    notes = (
        "hosts differ in speed by 100 and in network by 50; seconds are CPU time of one process",
        "the paper's solver: 37.4 s for 32 hosts (§3.4.6)",
    )
    return Report("tuner-unequal", data, (Table("Unequal hosts", ("what", "ours", "at most"), rows, notes),))


def made(rng: random.Random, n: int) -> list[HostCosts]:
    """Random hosts that all differ."""
    return [
        HostCosts(HostId(f"h{at:03}"), 10 ** rng.uniform(-4.5, -2.5), 10 ** rng.uniform(7.5, 9.2)) for at in range(n)
    ]


def _figures(host: HostCosts) -> tuple[float, float]:
    return host.sample_s, host.nic_bytes_per_s
