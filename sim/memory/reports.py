"""The experiments on remote memory, each a `Report`: the paper's cluster, a full rack, batch eviction, old views."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from covey.core.units import GIB, MIB
from plugins.memory.policy import eviction, placement
from plugins.memory.policy.lending import Headroom
from sim.memory.cluster import Outcome, Rack, Strategy, by_lot, ours, published
from sim.memory.views import WAYS, herd
from sim.memory.workload import APPS, KEPT, SECONDS, SPARK, App, Container, containers_by_seed, local_and_swapped
from sim.report import Cell, Figure, Progress, Report, Series, Table

HEADROOM = Headroom(fraction=0.125)
FULL_CONTAINERS = (60, 90, 105, 120, 130, 140, 150)
DRAWN = (2, 4, placement.DRAWN, 12, 24, 64, 1000)
DISK_SHARE_MAX = 0.01
"""A rack counts as full when more than this share of page requests goes to the disk."""

_THEIRS = ("no remote memory", "as published")


@dataclass(frozen=True)
class Setting:
    """What an operator may set about the rack."""

    hosts: int = 32
    containers: int = 90
    host_bytes: int = 64 * GIB
    slab_bytes: int = 64 * MIB
    headroom: Headroom | None = HEADROOM
    """Headroom of each host; None: ours is measured, the paper's stays at its eighth."""
    kept: float = KEPT
    view_age_s: int = 1
    runs: int = 10
    seed: int = 1
    seconds: int = SECONDS
    apps: tuple[App, ...] = APPS
    given: tuple[Container, ...] = ()
    """Containers of a file; if given, only the load of slabs is drawn at random."""

    def ways(self) -> list[Strategy]:
        size = self.slab_bytes
        found = [
            Strategy("no remote memory", choices=0),
            published(),
            self.covey(),
            replace(ours("covey, headroom auto", size), auto_headroom=True),
            replace(ours("covey, lend auto", size), auto_lend=True),
            replace(ours("covey, ColdSlab 1/4 of HotSlab", size), cold_share=0.25),
            replace(ours("covey, HotSlab 20 for any slab", size), hot=placement.HOT_SLAB),
            by_lot("power of two", size, 2),
            by_lot("random placement", size, 1),
            by_lot("power of four", size, 4),
            by_lot("full knowledge", size, self.hosts),
        ]
        return [way if way.label in _THEIRS else self._kept(way) for way in found]

    def covey(self) -> Strategy:
        """The strategy of live agents on this rack."""
        return self._kept(ours("covey", self.slab_bytes))

    def _kept(self, way: Strategy) -> Strategy:
        return replace(way, auto_headroom=way.auto_headroom or self.headroom is None)

    def load(self, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        drawn = random.Random(seed)
        held = self.given or containers_by_seed(self.hosts, self.containers, self.host_bytes, drawn, self.apps)
        return local_and_swapped(held, self.hosts, self.seconds, self.kept)

    def outcome(self, way: Strategy, load: tuple[np.ndarray, np.ndarray, np.ndarray], seed: int) -> Outcome:
        rack = Rack(way, self.host_bytes, self.headroom or HEADROOM, load, random.Random(seed), self.view_age_s)
        return rack.run()


# ---- the paper's cluster ---------------------------------------------------------------------------------------------


def cluster(setting: Setting, progress: Progress) -> Report:
    """The paper's 32 hosts and 90 containers (Gu 2021, §2.7.5.1, Figure 2.18), beside other ways to choose a lender."""
    ways = setting.ways()
    found: dict[str, list[Outcome]] = {way.label: [] for way in ways}
    for run in range(setting.runs):
        load = setting.load(setting.seed + run)
        for number, way in enumerate(ways):
            progress((run + number / len(ways)) / setting.runs, f"run {run + 1} of {setting.runs}: {way.label}")
            found[way.label].append(setting.outcome(way, load, setting.seed + run))
    data = {label: _summary(outcomes) for label, outcomes in found.items()}
    table = Table(
        f"{setting.hosts} hosts, {len(setting.given) or setting.containers} containers, {setting.runs} runs",
        (
            "way",
            "utilisation %",
            "in whole slabs",
            "holding pages",
            "max/median",
            "its range",
            "max/min",
            "spread",
            "to disk %",
            "evicted",
            "of them hot",
            "asked per slab",
        ),
        [_cluster_row(label, each) for label, each in data.items()],
        (
            "The paper: 40.8 % without and 60 % with remote memory, max/median 2.36 and 1.6, max/min 22.5 and 2.7.",
            "Memory in use over all memory, mean of the run; a slab counts whole as published, by touched pages here.",
            "max is a host filled by its own containers: no placement lowers it. spread: deviation over mean of hosts.",
            f"Slots kept {setting.kept:g} (fitted so that `as published` comes to 60 %); seeds from {setting.seed} on.",
        ),
    )
    lines = [
        Series(label, list(range(1, setting.hosts + 1)), sorted((100 * found[label][0].used_share).tolist()))
        for label in ("no remote memory", "as published", "covey", "power of two", "full knowledge")
    ]
    figure = Figure("memory-hosts", "Memory in use per host, sorted", "host", "memory in use, %", lines)
    return Report("memory-cluster", {"ways": data, **_told(setting)}, (table,), (figure,))


def _summary(outcomes: Sequence[Outcome]) -> dict[str, float]:
    ratios = [each.max_to_median for each in outcomes]

    def mean(of: str) -> float:
        return float(np.mean([each.counts[of] for each in outcomes]))

    counted = ("mapped", "evicted", "busy_evicted", "moved", "given_back", "refused", "asked", "short_host_s")

    return {
        "utilization": float(np.mean([each.utilization for each in outcomes])),
        "utilization_whole_slabs": float(np.mean([each.whole for each in outcomes])),
        "utilization_holding_pages": float(np.mean([each.useful for each in outcomes])),
        "max_to_median": float(np.mean(ratios)),
        "utilization_least": min(each.utilization for each in outcomes),
        "utilization_most": max(each.utilization for each in outcomes),
        "max_to_median_least": min(ratios),
        "max_to_median_most": max(ratios),
        "max_to_min": float(np.mean([each.max_to_min for each in outcomes])),
        "spread": float(np.mean([each.used_share.std() / each.used_share.mean() for each in outcomes])),
        "disk_share": float(np.mean([each.disk_share for each in outcomes])),
        **{of: mean(of) for of in counted},
    }


def _cluster_row(label: str, each: Mapping[str, float]) -> list[Cell]:
    return [
        label,
        100 * each["utilization"],
        100 * each["utilization_whole_slabs"],
        100 * each["utilization_holding_pages"],
        each["max_to_median"],
        f"{each['max_to_median_least']:.2f}-{each['max_to_median_most']:.2f}",
        each["max_to_min"],
        each["spread"],
        100 * each["disk_share"],
        round(each["evicted"], 1),
        round(each["busy_evicted"], 1),
        each["asked"] / each["mapped"] if each["mapped"] else None,
    ]


def _told(setting: Setting) -> dict[str, object]:
    told = {name: value for name, value in asdict(setting).items() if name not in ("given", "headroom", "apps")}
    return {"setting": {**told, "headroom_bytes": (setting.headroom or HEADROOM).of(setting.host_bytes)}}


def sensitivity(setting: Setting, progress: Progress) -> Report:
    """What the paper leaves open, swept: the one number that was fitted, and whether Spark was among the containers."""
    keeps = (0.0, 0.25, 0.5, 0.8, 1.0)
    swept = [(f"slots kept {kept:g}", replace(setting, kept=kept)) for kept in keeps]
    mixes = [("five applications", setting), ("six, with Spark", replace(setting, apps=(*APPS, SPARK)))]
    told: list[dict[str, object]] = []
    tables = []
    for title, cases in (("The fitted number", swept), ("Applications", mixes if not setting.given else [])):
        rows: list[list[Cell]] = []
        for label, case in cases:
            found = _both(replace(case, runs=min(4, case.runs)), label, progress)
            rows.append([label, *(cell for summary in found.values() for cell in _brief(summary))])
            told.append({"case": label, **found})
        if rows:
            columns = ("case", *(f"{way}: {column}" for way in ("none", "published", "covey") for column in _BRIEF))
            tables.append(Table(title, columns, rows, _SENSITIVITY_NOTES[title]))
    return Report("memory-sensitivity", {"cases": told}, tables)


_BRIEF = ("utilisation %", "holding pages", "max/median")
_SENSITIVITY_NOTES = {
    "The fitted number": (
        "Share of resident pages of paging containers that also hold a place in swap; the paper does not give it.",
    ),
    "Applications": (
        "§2.7.5: those of §2.7.3, equally many containers of each. That names six; five come nearer to its 40.8 %.",
    ),
}


def _brief(summary: Mapping[str, float]) -> list[Cell]:
    return [100 * summary["utilization"], 100 * summary["utilization_holding_pages"], summary["max_to_median"]]


def _both(setting: Setting, label: str, progress: Progress) -> dict[str, dict[str, float]]:
    """Summaries without remote memory, as published, and with ours."""
    ways = [way for way in setting.ways() if way.label in (*_THEIRS, "covey")]
    found: dict[str, list[Outcome]] = {way.label: [] for way in ways}
    for run in range(setting.runs):
        progress(run / setting.runs, label)
        load = setting.load(setting.seed + run)
        for way in ways:
            found[way.label].append(setting.outcome(way, load, setting.seed + run))
    return {label: _summary(outcomes) for label, outcomes in found.items()}


# ---- how full a rack gets --------------------------------------------------------------------------------------------


def fill(setting: Setting, progress: Progress) -> Report:
    """Put more and more containers on the same hosts: the utilisation up to which paging stays out of the disk."""
    ways = [way for way in setting.ways() if way.label not in ("no remote memory", "power of four")]
    ways = [way for way in ways if "Slab" not in way.label]
    rows: list[list[Cell]] = []
    data: list[dict[str, object]] = []
    counts = [round(setting.hosts / 32 * count) for count in FULL_CONTAINERS]
    for number, count in enumerate(counts):
        crowded = replace(setting, containers=count, runs=min(2, setting.runs), given=())
        found: dict[str, list[Outcome]] = {}
        for run in range(crowded.runs):
            progress((number + run / crowded.runs) / len(counts), f"{count} containers")
            load = crowded.load(crowded.seed + run)
            for way in ways:
                found.setdefault(way.label, []).append(crowded.outcome(way, load, crowded.seed + run))
        for label, outcomes in found.items():
            each = _summary(outcomes)
            data.append({"containers": count, "way": label, **each})
            rows.append(
                [
                    count,
                    label,
                    100 * each["utilization"],
                    each["max_to_median"],
                    100 * each["disk_share"],
                    round(each["evicted"], 1),
                    round(each["short_host_s"], 1),
                ]
            )
    full = {way.label: _fullest(data, way.label) for way in ways}
    columns = ("containers", "way", "utilisation %", "max/median", "to disk %", "evicted", "host-seconds short")
    notes = [
        f"{label}: {'never' if best is None else f'{100 * best:.1f} %'} with at most {100 * DISK_SHARE_MAX:g} % of "
        "page requests on disk"
        for label, best in full.items()
    ]
    figures = (
        Figure(
            "memory-fill",
            "Memory in use by the number of containers",
            "containers",
            "memory in use, %",
            [_line(data, way.label, "utilization") for way in ways],
        ),
        Figure(
            "memory-fill-disk",
            "Page requests that go to the disk",
            "containers",
            "of all page requests, %",
            [_line(data, way.label, "disk_share") for way in ways],
        ),
    )
    table = Table("The same hosts, more containers", columns, rows, notes)
    return Report("memory-fill", {"points": data, "fullest": full}, (table,), figures)


def _fullest(data: Sequence[Mapping[str, object]], label: str) -> float | None:
    good = [each for each in data if each["way"] == label and _number(each["disk_share"]) <= DISK_SHARE_MAX]
    return max((_number(each["utilization"]) for each in good), default=None)


def _line(data: Sequence[Mapping[str, object]], label: str, of: str) -> Series:
    mine = [each for each in data if each["way"] == label]
    return Series(label, [_number(each["containers"]) for each in mine], [100 * _number(each[of]) for each in mine])


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def large(setting: Setting, hosts: Sequence[int], progress: Progress) -> Report:
    """Run this cluster with more hosts and as many containers on each: does what holds on 32 hosts hold on thousands?
    Every host runs the machines of an agent, so 5,000 hosts take three quarters of an hour."""
    rows: list[list[Cell]] = []
    told: list[dict[str, object]] = []
    for number, count in enumerate(hosts):
        containers = round(setting.containers * count / setting.hosts)
        case = replace(setting, hosts=count, containers=containers, given=())

        def part(share: float, text: str, number: int = number) -> None:
            progress((number + share) / len(hosts), text)

        for label, each in _both(case, f"{count:,} hosts, {containers:,} containers", part).items():
            told.append({"hosts": count, "containers": containers, "way": label, **each})
            rows.append([count, label, *_brief(each), each["max_to_min"], each["spread"], 100 * each["disk_share"]])
            rows[-1] += [round(each["mapped"]), round(each["evicted"]), round(each["short_host_s"])]
    columns = ("hosts", "way", *_BRIEF, "max/min", "spread", "to disk %", "mapped", "evicted", "host-seconds short")
    note = f"Slabs of {setting.slab_bytes // MIB} MiB (as published: 1 GiB); runs of {setting.seconds:,} s."
    return Report("memory-large", {"points": told}, (Table("More hosts", columns, rows, (note,)),))


# ---- batch eviction --------------------------------------------------------------------------------------------------


def batch_eviction(evict: int, lent: int, trials: int, seed: int, progress: Progress) -> Report:
    """Figure 2.7: E slabs evicted of E + E' asked; the formula beside what the policy functions really pick."""
    rng = random.Random(seed)
    shares = [round(0.1 * step, 1) for step in range(1, 10)]
    extras = (0, evict // 2, evict)
    rows: list[list[Cell]] = []
    points: list[dict[str, float]] = []
    worst = 0.0
    for number, share in enumerate(shares):
        row: list[Cell] = [share]
        for extra in extras:
            progress((number + extra / evict / 3) / len(shares), f"{share:.0%} of slabs busy, E' = {extra}")
            formula = eviction.chance_all_lightly_active(evict, extra, share)
            measured = sum(_lightly(evict, extra, share, lent, rng) for _ in range(trials)) / trials
            worst = max(worst, abs(formula - measured))
            row += [formula, measured]
            points.append({"busy_share": share, "extra": extra, "formula": formula, "measured": measured})
        wanted = eviction.extra_for(evict, share)
        reached = eviction.chance_all_lightly_active(evict, wanted, share) >= eviction.CHANCE_WANTED
        rows.append([*row, wanted if reached else f"over {evict}"])
    columns = ["busy share", *(name for extra in extras for name in (f"E'={extra}", "measured")), "E' for 95 %"]
    notes = (
        f"Chance that all of E = {evict} evicted slabs are lightly active; {lent} slabs lent, {trials} trials a cell.",
        f"Largest difference between formula and measurement: {worst:.4f}.",
    )
    lines = [
        Series(f"E' = {extra}, {of}", shares, [point[of] for point in points if point["extra"] == extra])
        for extra in extras
        for of in ("formula", "measured")
    ]
    figure = Figure("memory-eviction", "Batch eviction (Figure 2.7)", "share of busy slabs", "chance", lines)
    data: dict[str, object] = {"evict": evict, "lent": lent, "trials": trials, "points": points, "difference": worst}
    return Report("memory-eviction", data, (Table("Batch eviction", columns, rows, notes),), (figure,))


def _lightly(evict: int, extra: int, busy_share: float, lent: int, rng: random.Random) -> bool:
    """Whether the policy evicted no busy slab. Only the slabs asked need an activity."""
    sizes = dict.fromkeys(range(lent), 1)
    asked = eviction.candidates_for(sizes, evict, rng, extra)
    hot = placement.HOT_SLAB
    told = {slab: hot + 1 + rng.random() if rng.random() < busy_share else hot * rng.random() for slab in asked}
    return not any(placement.is_hot(told[slab]) for slab in eviction.slabs_to_evict(told, sizes, evict))


# ---- old views -------------------------------------------------------------------------------------------------------


def views(hosts: Sequence[int], ages_s: Sequence[float], seed: int, progress: Progress) -> Report:
    """Compare power of two with the best of a gossiped view, for each age of the view in seconds."""
    todo = [(count, age_s, way) for count in hosts for age_s in ages_s for way in WAYS]
    weights = np.cumsum([0, *(count for count, _, _ in todo)])
    found = []
    for number, (count, age_s, way) in enumerate(todo):
        begin, part = weights[number] / weights[-1], count / weights[-1]

        def told(share: float, begin: float = begin, part: float = part, what: str = f"{count} hosts: {way}") -> None:
            progress(begin + part * share, what)

        found.append(herd(way, count, age_s, seed, told))
    columns = (
        "hosts",
        "views up to s old",
        "way",
        "refused per 1,000",
        "never placed",
        "most on one host in 1 s",
        "p99 host",
        "max/median",
        "spread",
    )
    rows: list[list[Cell]] = [
        [
            one.hosts,
            one.age_s,
            one.way,
            round(one.refused_per_1000, 1),
            one.unplaced,
            one.burst_max,
            round(one.burst_p99, 1),
            one.max_to_median,
            one.spread,
        ]
        for one in found
    ]
    notes = [f"{name}: {text}" for name, text in WAYS.items()]
    slabs = {one.hosts: one.slabs for one in found}
    notes.append("Slabs that turn hot within 20 s: " + ", ".join(f"{slabs[count]:,} on {count:,}" for count in slabs))

    def line(count: int, way: str, of: str) -> Series:
        mine = [one for one in found if one.hosts == count and one.way == way]
        return Series(f"{way} ({count:,})", [one.age_s for one in mine], [getattr(one, of) for one in mine])

    shown = ("covey", "power of two", "best of view", "full knowledge")
    figures = (
        Figure(
            "memory-herd",
            "Most slabs that came to one host in a second (hosts)",
            "age of views, s",
            "slabs",
            [line(count, way, "burst_max") for count in hosts for way in shown],
            log_y=True,
        ),
        Figure(
            "memory-spread",
            "Unevenness of memory in use, deviation over mean (hosts)",
            "age of views, s",
            "spread",
            [line(count, way, "spread") for count in hosts for way in shown],
        ),
    )
    table = Table("Old views", columns, rows, notes)
    drawn_table, drawn = _drawn(min(hosts), ages_s, seed, progress)
    data = {"runs": [asdict(one) for one in found], "drawn": drawn}
    return Report("memory-views", data, (table, drawn_table), figures)


def _drawn(hosts: int, ages_s: Sequence[float], seed: int, progress: Progress) -> tuple[Table, list[dict[str, object]]]:
    """Measure how many hosts should be drawn for two to be picked by view."""
    way, counts = "covey", [count for count in DRAWN if count <= hosts]
    data: list[dict[str, object]] = []
    rows: list[list[Cell]] = []
    for drawn in counts:
        progress(1.0, f"{hosts} hosts: two of {drawn} by view")
        each = [herd(way, hosts, age_s, seed, drawn=drawn) for age_s in ages_s]
        rows.append([drawn, *(one.spread for one in each), max(one.burst_max for one in each)])
        data += [{"drawn": drawn, "age_s": one.age_s, "spread": one.spread, "burst": one.burst_max} for one in each]
    columns = ("drawn", *(f"spread, views {age_s:g} s" for age_s in ages_s), "most on one host in 1 s")
    note = f"{hosts:,} hosts; the two freest by view of so many drawn are asked. 2 is the paper's power of two choices."
    return Table("Two of how many?", columns, rows, (note,)), data


def together(name: str, reports: Sequence[Report]) -> Report:
    """Several reports as one: their data under their names."""
    return Report(
        name,
        {report.name.removeprefix("memory-"): report.data for report in reports},
        [table for report in reports for table in report.tables],
        [figure for report in reports for figure in report.figures],
        [warning for report in reports for warning in report.warnings],
    )
