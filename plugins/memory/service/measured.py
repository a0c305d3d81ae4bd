"""Measurements of a host's volumes: how long requests took, what answered them, and the state of links."""

from collections import Counter
from collections.abc import Hashable, Iterable

import msgspec

from covey.core.metrics import Distribution, Measured, MetricSeries, Risen
from plugins.memory.datapath.wire.control import PageCounts
from plugins.memory.machine.loan import Lent
from plugins.memory.machine.rack_accounts import RackAccounts
from plugins.memory.policy import latencies
from plugins.memory.policy.budgets import BudgetAccount
from plugins.memory.service import metrics
from plugins.memory.service.open_volume import OpenVolume
from plugins.views import AccountView, LatencyView, LinksView, VolumeView

HISTOGRAMS = {"read": metrics.READ_SECONDS, "write": metrics.WRITE_SECONDS}
"""Histogram for each kind of request."""
LINK_STATES = ("open", "reopening", "recovering", "leaving")


def completed(view: VolumeView, volume: OpenVolume, accounts: RackAccounts) -> VolumeView:
    return msgspec.structs.replace(
        view,
        latencies=latency_views(volume),
        links=links_view(volume),
        budget_bytes=accounts.budget(BudgetAccount("tenant", view.tenant)),
        job_budget_bytes=accounts.budget(BudgetAccount("job", view.job)),
    )


def accounts(volumes: Iterable[OpenVolume], lent: Iterable[Lent]) -> dict[MetricSeries, float]:
    """Bytes of each tenant: those of its volumes here, and those of this host's memory lent to it."""
    found: Counter[tuple[str, str]] = Counter()
    for known in (volume.known for volume in volumes):
        found[known.tenant, "volumes"] += known.taken_bytes
    for slab in lent:
        found[slab.tenant, "lent"] += slab.size_bytes
    return {metrics.TENANT_BYTES.of(who, role): size for (who, role), size in found.items() if who}


def account_metrics(rows: Iterable[AccountView], refused: int) -> dict[MetricSeries, float]:
    """Bytes that accounts which this host can name have on the rack, and their budgets."""
    found: dict[MetricSeries, float] = {metrics.BUDGET_REFUSED.of("borrower"): refused}
    for row in rows:
        if row.kind:
            who = (row.name, "") if row.kind == "tenant" else ("", row.name)
            found[metrics.RACK_BYTES.of(*who)] = row.used_bytes
            if row.budget_bytes is not None:
                found[metrics.BUDGET_BYTES.of(*who)] = row.budget_bytes
    return found


def latency_views(volume: OpenVolume) -> tuple[LatencyView, ...]:
    """Latencies of the last minute; kinds of requests of which there were none are left out."""
    now = volume.counts.latencies if volume.counts is not None else ()
    before = {(each.op, each.answered): each.counts for each in (volume.older[0] if volume.older else ())}
    views: list[LatencyView] = []
    for each in now:
        counts = latencies.since(each.counts, before.get((each.op, each.answered), ()))
        if requests := sum(counts):
            p50_s, p99_s = (round(latencies.quantile_s(counts, share), 7) for share in (0.5, 0.99))
            views.append(LatencyView(each.op, each.answered, requests, p50_s, p99_s))
    return tuple(views)


def links_view(volume: OpenVolume) -> LinksView:
    states = [place.state for places in volume.places.values() for place in places]
    return LinksView(*(states.count(state) for state in LINK_STATES))  # type: ignore[arg-type]


def counted_by(counts: PageCounts) -> dict[MetricSeries, tuple[float, ...]]:
    """What the process of one volume counted since it began, by series; of a histogram the counts of its buckets, then
    the sum. None of it names the volume: people choose such names, and `agentctl volume show` has them."""
    other_bytes = max(0, counts.read_bytes - counts.remote_read_bytes - counts.disk_read_bytes)
    found: dict[MetricSeries, tuple[float, ...]] = {
        metrics.PAGE_BYTES.of("read", "remote"): (counts.remote_read_bytes,),
        metrics.PAGE_BYTES.of("read", "disk"): (counts.disk_read_bytes,),
        metrics.PAGE_BYTES.of("read", "other"): (other_bytes,),
        metrics.PAGE_BYTES.of("write", "writers"): (counts.written_bytes,),
        metrics.PAGES_TORN.of(): (counts.torn_pages,),
        metrics.PAGES_REFUSED.of(): (counts.pages_refused,),
        metrics.SLAB_LINKS_REOPENED.of(): (counts.links_reopened,),
        metrics.SLABS_UNRECOVERED.of(): (counts.unrecovered,),
        metrics.STALLS.of("vold"): (counts.stalls,),
        metrics.PROCESSOR_WAITS.of("vold"): (counts.waits,),
        metrics.VOLUME_QUEUE_PAIRS_FAILED.of(): (counts.rdma_failed,),
    }
    for one in counts.latencies:
        below = latencies.below(one.counts)
        found[HISTOGRAMS[one.op].of(one.answered)] = (*(count for _, count in below), one.sum_s)
    return found


NOTHING = PageCounts(0, (), 0, 0, 0, 0, 0, 0)
"""The counts of a volume that has counted nothing: the series of a host without volumes are there, and are 0."""
BOUNDS = tuple(bound for bound, _ in latencies.below(()))


def volume_metrics(volumes: Iterable[OpenVolume], risen: Risen) -> Measured:
    """What all volumes of this host counted, and their links by state. `risen`: the counts seen before."""
    states = dict.fromkeys(LINK_STATES, 0)
    counted: dict[tuple[Hashable, Hashable], tuple[float, ...]] = {
        ("", series): counts for series, counts in counted_by(NOTHING).items()
    }
    for volume in volumes:
        for places in volume.places.values():
            for place in places:
                states[place.state] += 1
        if volume.counts is not None:
            process = volume.known.volume, volume.counts.life
            counted |= {(process, series): found for series, found in counted_by(volume.counts).items()}
    found: dict[MetricSeries, float | Distribution] = {}
    for series, counts in risen.see(counted).items():
        assert isinstance(series, MetricSeries)
        if series.metric.kind == "histogram":
            *below, sum_s = counts
            found[series] = Distribution(tuple(zip(BOUNDS, map(int, below), strict=True)), sum_s)
        else:
            found[series] = counts[0]
    return found | {metrics.LINKS.of(state): count for state, count in states.items()}
