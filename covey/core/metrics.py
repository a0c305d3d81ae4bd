"""Declared metrics: each has one home in the code, with its name, its help and its labels.

A part of an agent (gossip, a plugin, the agent itself) declares what it measures as one `MetricGroup`:

    METRICS = MetricGroup()
    SLABS = METRICS.gauge("covey_slabs", "Slabs this host lends, borrows or has on disk.", "role")

and answers, when it is asked, with what it measured: `{SLABS.of("lent"): 4, SLABS.of("borrowed"): 2}`. Names follow the
rules of Prometheus; `agent/api/exposition.py` makes the text that Prometheus reads.
"""

import re
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric of an agent, as its home declares it. Two metrics are the same only if they are one object."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    """The name in Prometheus. The name of a counter ends in `_total`, and no other name does."""
    help: str
    """One line: what the metric counts or measures, and its unit."""
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """The rising upper bounds of a histogram that a `Tally` counts; empty: the part brings its own counts."""

    def of(self, *values: str) -> "MetricSeries":
        """The series with these values of the labels, in their order; "" means that the series lacks the label."""
        if len(values) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not {len(values)} of them")
        return MetricSeries(self, values)


class MetricSeries(NamedTuple):
    """A metric and a value for each of its labels."""

    metric: Metric
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Distribution:
    """The measurements of a histogram."""

    below: tuple[tuple[float, int], ...]
    """Rising upper bounds, and how many measurements lie at or below each; the last bound is infinite."""
    sum: float
    """Sum of all measurements, in the unit of the bounds."""


Measured = Mapping[MetricSeries, float | Distribution]
"""The measurements of one part of an agent: a Distribution for a histogram, a number for any other metric."""


class MetricGroup:
    """The metrics of one part of an agent. Declaring one that Prometheus would not take raises ValueError."""

    def __init__(self) -> None:
        self._declared: dict[str, Metric] = {}

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._declared.values())

    def counter(self, name: str, help: str, *labels: str) -> Metric:
        """Declare a number that only rises, from 0 when the process that counts starts."""
        return self._declare(Metric("counter", name, help, labels))

    def gauge(self, name: str, help: str, *labels: str) -> Metric:
        """Declare a number that may rise and fall."""
        return self._declare(Metric("gauge", name, help, labels))

    def histogram(self, name: str, help: str, *labels: str, bounds: tuple[float, ...] = ()) -> Metric:
        """Declare a histogram: how many measurements are at or below each of some bounds, in the metric's unit."""
        return self._declare(Metric("histogram", name, help, labels, bounds))

    def counters(self, prefix: str, words: Mapping[str, str], split: Mapping[str, str] | None = None) -> "WordCounters":
        """Declare a counter `PREFIX_WORD_total` for each word that a part of the agent counts by; `words` maps a word
        to its help.

        `split` names words with a label: `{"dropped": "reason"}` makes the count of `dropped_sealed` one of
        `PREFIX_dropped_total{reason="sealed"}`.
        """
        labels = split or {}
        declared = {
            word: self.counter(f"{prefix}_{word}_total", said, *([labels[word]] if word in labels else []))
            for word, said in words.items()
        }
        return WordCounters(declared)

    def _declare(self, metric: Metric) -> Metric:
        if not all(_NAME.fullmatch(name) for name in (metric.name, *metric.labels)) or not metric.help.strip():
            raise ValueError(f"{metric} needs lower-case names and a help text")
        if (metric.kind == "counter") != metric.name.endswith("_total"):
            raise ValueError(f"{metric.name} is a {metric.kind}: names of counters, and no others, end in _total")
        if list(metric.bounds) != sorted(set(metric.bounds)) or metric.bounds[-1:] == (inf,):
            raise ValueError(f"{metric.name} needs finite bounds that rise")
        if metric.name in self._declared:
            raise ValueError(f"{metric.name} is declared twice")
        self._declared[metric.name] = metric
        return metric


def catalogue(groups: Iterable[Iterable[Metric]]) -> list[Metric]:
    """All metrics of these groups, by name. ValueError when two groups declare the same name."""
    found: dict[str, Metric] = {}
    for metric in (metric for group in groups for metric in group):
        if found.setdefault(metric.name, metric) is not metric:
            raise ValueError(f"{metric.name} is declared by two parts of the agent")
    return sorted(found.values(), key=lambda metric: metric.name)


class Tally:
    """Counts the measurements of one histogram since the process started. `see` takes less than a microsecond, and no
    time of day: whoever measures says how long it took."""

    def __init__(self, metric: Metric) -> None:
        """`metric`: a histogram that declares its bounds."""
        assert metric.kind == "histogram" and metric.bounds, metric
        self._metric, self._places = metric, len(metric.bounds) + 1
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def see(self, value: float, *labels: str) -> None:
        """Count one measurement; `labels`: values of the metric's labels, in their order."""
        counts = self._counts.get(labels)
        if counts is None:
            series = self._metric.of(*labels)  # raises ValueError where labels are missing
            counts = self._counts[series.values] = [0] * self._places
            self._sums[labels] = 0.0
        counts[bisect_left(self._metric.bounds, value)] += 1
        self._sums[labels] += value

    def measured(self) -> "dict[MetricSeries, float | Distribution]":
        """The histograms; without labels also one that has counted nothing yet, since a rate needs its 0."""
        known = self._counts if self._counts or self._metric.labels else {(): [0] * self._places}
        return {
            MetricSeries(self._metric, labels): Distribution(
                tuple(zip((*self._metric.bounds, inf), _risen(counts), strict=True)), self._sums.get(labels, 0.0)
            )
            for labels, counts in known.items()
        }


def _risen(counts: Iterable[int]) -> Iterator[int]:
    total = 0
    for count in counts:
        total += count
        yield total


class Risen:
    """Sums what sources count that come and go, such as processes: the sum never falls, as Prometheus expects of a
    counter. A source that begins anew at 0 is another source. What one counted after it was last seen is not in it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Hashable, Hashable], tuple[float, ...]] = {}
        self._gone: dict[Hashable, tuple[float, ...]] = {}

    def see(self, now: Mapping[tuple[Hashable, Hashable], tuple[float, ...]]) -> Mapping[Hashable, tuple[float, ...]]:
        """The sums by kind. `now`: (source, kind) -> its counts, each kind with equally many."""
        for key, before in self._seen.items():
            if key not in now:
                self._gone[key[1]] = _added(self._gone.get(key[1], ()), before)
        self._seen = dict(now)
        sums = dict(self._gone)
        for (_, kind), counts in now.items():
            sums[kind] = _added(sums.get(kind, ()), counts)
        return sums


def _added(one: tuple[float, ...], two: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(sum, zip(one, two, strict=True))) if one else two


class WordCounters:
    """Counters that machines and services keep by a word (`counters["elections"] += 1`), as metrics."""

    def __init__(self, declared: Mapping[str, Metric]) -> None:
        self._declared = declared

    def of(self, counts: Mapping[str, int]) -> dict[MetricSeries, float]:
        """The counts as series. A declared word without a label that has counted nothing yet is 0: a count that appears
        at 1 did not rise, to Prometheus. A word that is not declared is left out: one such word must not cost a rack
        all other metrics, and a test reads from the code that every word is declared."""
        nothing = {metric.of(): 0.0 for metric in self._declared.values() if not metric.labels}
        found = ((self._series(word), count) for word, count in counts.items())
        return nothing | {series: float(count) for series, count in found if series is not None}

    def _series(self, word: str) -> MetricSeries | None:
        if (metric := self._declared.get(word)) is not None and not metric.labels:
            return metric.of()
        short, _, rest = word.partition("_")
        split = self._declared.get(short)
        return None if split is None or not split.labels else split.of(_snake(rest))


def _snake(word: str) -> str:
    """A class name as a label's value."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).lower()
