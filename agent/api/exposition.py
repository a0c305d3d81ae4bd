"""What `GET /metrics` answers: what an agent measured, in Prometheus' text format as `prometheus_client` writes it.

Its own counters and gauges are not used: they are of a process, with locks, and simulated racks have hundreds of agents
in one; machines count in plain integers, which are read here at each scrape.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import inf

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

import agent.metrics
import gossip.metrics
from covey.core.metrics import Distribution, Measured, Metric, catalogue
from plugins.registry import PLUGINS

SERIES_MAX = 256
"""The most series of one metric that an agent shows, those first by their labels. Labels with names that people choose
(tenants) have no bound of their own; 256 is above the GPUs, MIG instances and jobs of any host."""
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""The format that every version of Prometheus asks for, whatever else it takes."""


def declared() -> Sequence[Metric]:
    """Every metric that an agent with all plugins may show, by name."""
    return catalogue([agent.metrics.METRICS, gossip.metrics.METRICS, *(plugin.metrics for plugin in PLUGINS)])


Series = tuple[tuple[str, ...], float | Distribution]
"""Values of a metric's labels, and what was measured."""


def shown(series: list[Series]) -> list[Series]:
    """At most SERIES_MAX of these: always the same ones, whatever their values are."""
    return series if len(series) <= SERIES_MAX else sorted(series, key=lambda each: each[0])[:SERIES_MAX]


class Scrape:
    """The measurements of one moment, as a collector of `prometheus_client`."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured

    def collect(self) -> Iterator[Family]:
        """Families by name, each with its series in the order in which they were measured; and how many were too
        many."""
        by_metric: dict[Metric, list[Series]] = defaultdict(list)
        for (metric, values), value in self._measured.items():
            by_metric[metric].append((values, value))
        left_out = sum(max(0, len(series) - SERIES_MAX) for series in by_metric.values())
        by_metric[agent.metrics.SERIES_LEFT_OUT] = [((), float(left_out))]
        for metric in sorted(by_metric, key=lambda metric: metric.name):
            yield _family(metric, shown(by_metric[metric]))


def exposition(measured: Measured) -> bytes:
    """The body of an answer whose content type is CONTENT_TYPE."""
    return generate_latest(Scrape(measured))


def _family(metric: Metric, series: list[Series]) -> Family:
    """A metric's family with its series. A label whose value is "" is left out: to Prometheus both are one series."""
    if metric.kind == "histogram":
        return _histogram(metric, series)
    family: Family
    if metric.kind == "counter":
        family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    else:
        family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
    for values, value in series:
        assert not isinstance(value, Distribution)
        labels = {label: said for label, said in zip(metric.labels, values, strict=True) if said}
        family.add_sample(metric.name, labels, value)
    return family


def _histogram(metric: Metric, series: list[Series]) -> Family:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for values, value in series:
        assert isinstance(value, Distribution)
        buckets = [("+Inf" if bound == inf else f"{bound:.6g}", float(count)) for bound, count in value.below]
        family.add_metric(values, buckets, value.sum)
    return family
