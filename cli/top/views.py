"""What each view shows: rows of the lists that agentctl prints, by the same functions. All pure.

From a job one goes down to its ranks, from a rank to the job's hosts, from a host to its GPUs, and from a GPU to the
slabs that its host lends or borrows.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from cli.hosts import gpus, hosts
from cli.jobs import job as one_job
from cli.jobs import jobs
from cli.lists import Listing
from cli.memory import slabs
from cli.table import plural, shown

Tables = Mapping[str, Mapping[str, dict[str, Any]]]
"""Table -> key of a row -> the row as the list's JSON has it."""


class Place(NamedTuple):
    """Which view it is, and of what."""

    view: str = "jobs"
    job: str = ""
    host: str = ""
    ended: bool = False
    """Whether jobs that have ended are shown, too."""


class Line(NamedTuple):
    """One row, and what its keys are about."""

    key: str
    cells: Sequence[str]
    job: str = ""
    rank: int | None = None
    host: str = ""
    why: str = ""
    """What `agentctl why` is asked for."""


class View(NamedTuple):
    titles: Sequence[str]
    right: Collection[str]
    drops: Sequence[str]
    """Columns that a narrow terminal does without: what is left out first, first."""


LIVE = ("SEEN",)
"""Columns of the lists that are not shown: what is here is as it is now."""


def _view(listing: Listing, *more: str) -> View:
    """A view of a list: its columns, and those that have no room first as in the list; `more`: columns behind them."""
    titles = (*(title for title in listing.titles if title not in LIVE), *more)
    return View(titles, listing.right, tuple(title for title in listing.least if title in titles[:-1]))


VIEWS = {
    "jobs": _view(jobs.LISTING),
    "ranks": View(one_job.RANK_TITLES, ("RANK", "PID"), ("PID", "ENDED")),
    "hosts": _view(hosts.listing(())),
    "gpus": _view(gpus.LISTING),
    "slabs": _view(slabs.LISTING, ""),
}
"""View -> its columns, those with numbers, and those that are left out where there is no room."""


def rows(place: Place, tables: Tables, ranks: Sequence[dict[str, Any]] = ()) -> list[tuple[str, dict[str, Any]]]:
    """The keys and rows of a view, in their order. `ranks`: those of its job, which are in no list."""
    if place.view == "ranks":
        return [(str(each["rank"]), each) for each in ranks]
    found = tables.get(place.view, {})
    match place.view:
        case "jobs":
            kept = {key: each for key, each in found.items() if place.ended or not each["over"]}
            return sorted(kept.items(), key=lambda each: _number(each[0]))
        case "hosts":
            of_job = {each["host"] for each in tables.get("jobs", {}).get(place.job, {}).get("places", ())}
            return sorted(each for each in found.items() if not place.job or each[0] in {*of_job, place.host})
        case "gpus":
            kept = {key: each for key, each in found.items() if place.host in ("", each["host"])}
            return sorted(kept.items(), key=lambda each: (each[1]["host"], each[1]["index"]))
        case _:
            return sorted(each for each in found.items() if place.host in ("", each[1]["lender"], each[1]["borrower"]))


def lines(place: Place, tables: Tables, found: Sequence[tuple[str, dict[str, Any]]]) -> list[Line]:
    """What the view shows of these rows."""
    match place.view:
        case "jobs":
            return [_line(key, jobs.row(each), job=key, why=key) for key, each in found]
        case "ranks":
            return [_rank(place.job, each) for _, each in found]
        case "hosts":
            every = tables.get("hosts", {}).values()
            has_other_users = any(each.get("other_users") in ("limited", "unlimited") for each in every)
            return [_host(place.job, each, has_other_users) for _, each in found]
        case "gpus":
            return [_gpu(key, each) for key, each in found]
        case _:
            return [_slab(key, each) for key, each in found]


def _line(key: str, cells: Sequence[object], **about: Any) -> Line:
    return Line(key, [shown(cell) for cell in cells], **about)


def _number(job: str) -> tuple[int, str]:
    """The place of a job among those that were submitted."""
    digits = job[1:]
    return (int(digits) if digits.isascii() and digits.isdigit() else 0, job)


def _rank(job: str, rank: dict[str, Any]) -> Line:
    number = int(rank["rank"])
    return _line(str(number), one_job.rank_row(rank), job=job, rank=number, host=str(rank["host"]), why=job)


def _host(job: str, host: dict[str, Any], has_other_users: bool) -> Line:
    name, cells = str(host["host"]), zip(hosts.cells(host, has_other_users), hosts.TITLES, strict=True)
    return _line(name, [cell for cell, title in cells if title not in LIVE], job=job, host=name, why=f"host/{name}")


def _gpu(key: str, gpu: dict[str, Any]) -> Line:
    host, job, cells = str(gpu["host"]), gpu["job"] or "", zip(gpus.cells(gpu), gpus.TITLES, strict=True)
    return _line(
        key, [cell for cell, title in cells if title not in LIVE], job=job, host=host, why=job or f"host/{host}"
    )


def _slab(key: str, slab: dict[str, Any]) -> Line:
    why = f"slab/{slab['volume']}/{slab['index']}"
    return _line(key, (*slabs.cells(slab), ""), host=str(slab["lender"] or slab["borrower"]), why=why)


def below(place: Place, line: Line) -> Place | None:
    """The view that Enter leads to from a row; None: there is nothing below."""
    match place.view:
        case "jobs":
            return Place("ranks", job=line.job)
        case "ranks":
            return Place("hosts", job=line.job, host=line.host)
        case "hosts":
            return Place("gpus", job=place.job, host=line.host)
        case "gpus":
            return Place("slabs", job=line.job, host=line.host)
        case _:
            return None


def heading(place: Place, shown_lines: int, wanted: int, all_lines: int) -> str:
    """`3 jobs waiting or running`, with how many of them a filter leaves, and how many there is room for."""
    noun = {"jobs": "job", "ranks": "rank", "hosts": "host", "gpus": "GPU", "slabs": "slab"}[place.view]
    what = plural(all_lines, noun) + (" waiting or running" if place.view == "jobs" and not place.ended else "")
    what = what if wanted == all_lines else f"{wanted} of {what}"
    return what if shown_lines == wanted else f"{what}, the first {shown_lines} here (/ finds others)"


def matches(line: Line, wanted: str) -> bool:
    """Whether all words of a filter stand in the row, in letters of any size."""
    text = " ".join(line.cells).lower()
    return all(word in text for word in wanted.lower().split())
