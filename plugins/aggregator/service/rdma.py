"""Tells, in one line for people, how tensors travel between ranks on this host and those on others."""

from collections.abc import Sequence

from covey.ports.verbs import Verbs
from covey.wire.sums import Now
from plugins.aggregator.messages import AggregatorSettings

WHYS_MAX = 2
"""Most reasons that are told."""


def told(settings: AggregatorSettings, verbs: Verbs, ranks: Sequence[Now | None]) -> str:
    """Line for `agentctl status`. `ranks`: what those here said last that may own tables. They open devices, under
    limits of their own, so what they met says more than what can be seen from here."""
    if settings.rdma == "never":
        return "over TCP; RDMA is switched off ([aggregator] rdma)"
    if settings.direct == "never":
        return "over TCP; RDMA is for ranks that exchange tensors directly ([aggregator] direct)"
    found = verbs.look(0)
    if found.why:
        return f"over TCP; no RDMA: {found.why}"
    said = [now for now in ranks if now is not None]
    whys = sorted({"".join(filter(str.isprintable, now.no_rdma)) for now in said} - {""})
    pairs = f"over RDMA ({found.device}): {sum(now.pairs for now in said)} connections to tables of ranks here"
    return "; ".join([pairs, *(f"over TCP instead: {why}" for why in whys[:WHYS_MAX])])
