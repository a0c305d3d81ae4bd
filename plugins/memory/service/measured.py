"""Measurements of a host's volumes: how long requests took, what answered them, and the state of links."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from covey.core.metrics import Distribution, Measured, MetricSeries
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


def volume_metrics(volumes: Iterable[OpenVolume]) -> Measured:
    """Histograms of requests by volume and by what answered, and links by state."""
    found: dict[MetricSeries, float | Distribution] = {}
    states = dict.fromkeys(LINK_STATES, 0)
    refused = 0
    for volume in sorted(volumes, key=lambda volume: volume.known.volume):
        for places in volume.places.values():
            for place in places:
                states[place.state] += 1
        refused += volume.counts.pages_refused if volume.counts is not None else 0
        for one in volume.counts.latencies if volume.counts is not None else ():
            series = HISTOGRAMS[one.op].of(volume.known.volume, one.answered)
            found[series] = Distribution(tuple(latencies.below(one.counts)), one.sum_s)
    found[metrics.PAGES_REFUSED.of()] = refused
    return found | {metrics.LINKS.of(state): count for state, count in states.items()}
