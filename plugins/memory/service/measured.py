"""What the volumes of a host were measured to do: how long requests took and who answered them, and how links are."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from plugins.memory.datapath.wire.control import LatencyCounts
from plugins.memory.machine.loan import Lent
from plugins.memory.machine.rack_accounts import RackAccounts
from plugins.memory.policy import latencies
from plugins.memory.policy.budgets import BudgetAccount
from plugins.memory.service.open_volume import OpenVolume
from plugins.views import AccountView, LatencyView, LinksView, VolumeView

FAMILIES = {"read": "covey_memory_read_seconds", "write": "covey_memory_write_seconds"}
"""Histograms, by what was asked for."""
LINK_STATES = ("open", "reopening", "recovering", "leaving")


def completed(view: VolumeView, volume: OpenVolume, accounts: RackAccounts) -> VolumeView:
    return msgspec.structs.replace(
        view,
        latencies=latency_views(volume),
        links=links_view(volume),
        budget_bytes=accounts.budget(BudgetAccount("tenant", view.tenant)),
        job_budget_bytes=accounts.budget(BudgetAccount("job", view.job)),
    )


def accounts(volumes: Iterable[OpenVolume], lent: Iterable[Lent]) -> dict[str, float]:
    """What each tenant has: of its volumes here, and of this host's memory."""
    found: Counter[tuple[str, str]] = Counter()
    for known in (volume.known for volume in volumes):
        found[known.tenant, "volumes"] += known.taken_bytes
    for slab in lent:
        found[slab.tenant, "lent"] += slab.size_bytes
    family = "covey_memory_tenant_bytes"
    return {f'{family}{{tenant="{who}",role="{role}"}}': size for (who, role), size in found.items() if who}


def account_metrics(rows: Iterable[AccountView], refused: int) -> dict[str, float]:
    """What accounts that this host can name have on the rack, and what they may have."""
    found: dict[str, float] = {'covey_memory_budget_refused_total{by="borrower"}': refused}
    for row in rows:
        if row.kind:
            labels = f'{{{row.kind}="{row.name}"}}'
            found[f"covey_memory_rack_bytes{labels}"] = row.used_bytes
            if row.budget_bytes is not None:
                found[f"covey_memory_budget_bytes{labels}"] = row.budget_bytes
    return found


def latency_views(volume: OpenVolume) -> tuple[LatencyView, ...]:
    """Of the last minute; what there was none of is left out."""
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


def metrics(volumes: Iterable[OpenVolume]) -> dict[str, float]:
    """Histograms of requests by volume and by who answered, and links by state."""
    found: dict[str, float] = {}
    states = dict.fromkeys(LINK_STATES, 0)
    refused = 0
    for volume in sorted(volumes, key=lambda volume: volume.known.volume):
        for places in volume.places.values():
            for place in places:
                states[place.state] += 1
        refused += volume.counts.pages_refused if volume.counts is not None else 0
        for one in volume.counts.latencies if volume.counts is not None else ():
            found |= _histogram(FAMILIES[one.op], volume.known.volume, one)
    found["covey_memory_pages_refused_total"] = refused
    return found | {f'covey_memory_links{{state="{state}"}}': count for state, count in states.items()}


def _histogram(family: str, volume: str, one: LatencyCounts) -> dict[str, float]:
    labels = f'volume="{volume}",answered="{one.answered}"'
    found: dict[str, float] = {}
    for upto_s, count in latencies.below(one.counts):
        bound = "+Inf" if upto_s == float("inf") else f"{upto_s:.6g}"
        found[f'{family}_bucket{{{labels},le="{bound}"}}'] = count
    return found | {f"{family}_sum{{{labels}}}": one.sum_s, f"{family}_count{{{labels}}}": sum(one.counts)}
