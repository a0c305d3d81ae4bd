"""Tells, in one line for people, how pages travel between this host and others."""

from collections.abc import Mapping, Sequence

from covey.core.metrics import MetricSeries
from covey.ports.verbs import VerbsFound
from plugins.memory.datapath.wire.control import PageCounts, RdmaLent
from plugins.memory.service.metrics import VOLUME_MAPPED_SLABS, VOLUME_ONE_SIDED_SLABS


def told(found: VerbsFound, volumes: Sequence[PageCounts], lent: RdmaLent) -> str:
    """Line for `agentctl status`. What byte processes met says more than what can be seen from here."""
    return "; ".join([_between_hosts(found, volumes, lent), *_mapped(volumes)])


def told_without_rdma(volumes: Sequence[PageCounts]) -> str:
    return "; ".join(["over TCP; RDMA is switched off ([memory] rdma)", *_mapped(volumes)])


def _mapped(volumes: Sequence[PageCounts]) -> list[str]:
    slabs = sum(each.mapped_slabs for each in volumes)
    said = [f"{slabs} slabs of this host are mapped"] if slabs else []
    return said + [f"not mapped: {why}" for why in sorted({each.map_why for each in volumes if each.map_why})[:2]]


def _between_hosts(found: VerbsFound, volumes: Sequence[PageCounts], lent: RdmaLent) -> str:
    if found.why:
        return f"over TCP; no RDMA: {found.why}"
    slabs, failed = sum(each.rdma_slabs for each in volumes), sum(each.rdma_failed for each in volumes)
    said = [f"over RDMA ({found.device}): {slabs} borrowed slabs, {lent.pairs} volumes of others"]
    said += [f"over TCP instead: {why}" for why in sorted({each.rdma_why for each in volumes if each.rdma_why})[:2]]
    if lent.why:
        said.append(f"refused to others: {lent.why}")
    if failed:
        said.append(f"{failed} queue pairs failed")
    return "; ".join(said)


def mapped_metrics(volumes: Sequence[PageCounts]) -> Mapping[MetricSeries, float]:
    return {
        VOLUME_MAPPED_SLABS.of(): sum(each.mapped_slabs for each in volumes),
        VOLUME_ONE_SIDED_SLABS.of(): sum(each.rdma_slabs for each in volumes),
    }
