"""`/metrics` as Prometheus reads it, by the parsers of its own library; and that each metric has one home."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as strict
from prometheus_client.parser import text_string_to_metric_families

from agent.api.exposition import Scrape, declared, exposition
from chaos.rackworld import SimRack
from covey.core.metrics import Distribution, MetricGroup, catalogue

ROOT = Path(__file__).parents[3]
NAMES = Path(__file__).with_name("metrics.txt")


def read_back(text: str) -> Mapping[str, Family]:
    """Families by name, without `_total`, as Prometheus' parser has them; AssertionError for one that comes twice."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


def test_all_that_a_living_agent_tells_is_good_prometheus_and_declared() -> None:
    with SimRack(3, hosts=1) as rack:
        rack.start().settle()
        rack.pager("h1", "vol1", 1 << 18, 3.0)
        rack.run(5.0)
        measured = rack.agents["h1"].metrics()
    families = read_back(exposition(measured).decode())
    # The parser of OpenMetrics refuses what that of the plain text lets pass: repeated series, histograms that fall.
    text = openmetrics.generate_latest(Scrape(measured)).decode()  # type: ignore[no-untyped-call]
    again = strict.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    assert {family.name for family in again} == families.keys()
    known = {metric.name.removesuffix("_total"): metric for metric in declared()}
    assert len(families) > 20 and families.keys() <= known.keys()
    for name, family in families.items():
        assert (family.type, family.documentation) == (known[name].kind, known[name].help)
        for sample in family.samples:
            assert sample.labels.keys() <= {*known[name].labels, "le"}
            assert all(re.fullmatch("[a-z0-9_]+", value) for label, value in sample.labels.items() if label != "le")
    for (metric, values), value in measured.items():
        if not isinstance(value, Distribution):
            labels = {label: said for label, said in zip(metric.labels, values, strict=True) if said}
            samples = families[metric.name.removesuffix("_total")].samples
            assert [sample.value for sample in samples if sample.labels == labels] == [value]


def test_names_kinds_and_labels_of_metrics_change_only_on_purpose() -> None:
    """Dashboards and alerts name them."""
    found = [f"{metric.kind} {metric.name} {','.join(metric.labels)}".rstrip() for metric in declared()]
    assert found == NAMES.read_text().splitlines()


def test_a_metric_is_named_where_it_is_declared_and_nowhere_else() -> None:
    names = "|".join(metric.name for metric in declared())
    told = re.compile(rf"[\"'](?:{names})[{{\"']")
    paths = [path for package in ("agent", "gossip", "plugins") for path in (ROOT / package).rglob("*.py")]
    assert [path for path in paths if path.name != "metrics.py" and told.search(path.read_text())] == []


def test_every_metric_that_is_declared_is_measured_by_its_name() -> None:
    homes = [ROOT / "agent/metrics.py", ROOT / "gossip/metrics.py", *(ROOT / "plugins").rglob("metrics.py")]
    for home in homes:
        constants = re.findall(r"^(\w+) = METRICS", home.read_text(), re.MULTILINE)
        text = "".join(path.read_text() for path in home.parent.rglob("*.py") if path != home)
        used = {name for pair in re.findall(r"metrics\.(\w+)|\b(\w+)\.of\(", text) for name in pair}
        assert constants and set(constants) <= used, home


WHERE = {
    "devices": ("agent/ports/devices/**/*.py",),
    "gossip": ("gossip/**/*.py",),
    "links": ("agent/ports/network/links.py", "agent/ports/network/handshake_limit.py"),
    "raft": ("agent/raft/**/*.py",),
    "rpc": ("agent/rpc/rpc.py", "agent/rpc/answers.py", "agent/host.py"),
}


@pytest.mark.parametrize("subsystem", WHERE)
def test_every_word_that_is_counted_is_declared_and_no_other(subsystem: str) -> None:
    text = "".join(path.read_text() for pattern in WHERE[subsystem] for path in sorted(ROOT.glob(pattern)))
    lines = [line for line in text.splitlines() if re.search(r"count(er)?s(\[| = \{)", line)]
    words = {word for line in lines for word in re.findall(r'f?"([^"{]+)[{"]', line)} | set(
        re.findall(r'found\["(\w+)"\] = self\._gossip', text)
    )
    prefix = f"covey_{subsystem}_"
    counters = [metric.name for metric in declared() if metric.kind == "counter" and metric.name.startswith(prefix)]
    assert {f"{prefix}{word.removesuffix('_')}_total" for word in words} == set(counters)


def test_values_that_are_not_finite_come_back_as_they_are() -> None:
    group = MetricGroup()
    values = {group.gauge("a", "One.").of(): math.inf, group.gauge("b", "Two.").of(): -math.inf}
    found = read_back(exposition({**values, group.gauge("c", "Three.").of(): math.nan}).decode())
    assert [found[name].samples[0].value for name in "ab"] == [math.inf, -math.inf]
    assert math.isnan(found["c"].samples[0].value)


def test_a_name_that_begins_another_and_any_text_in_a_label_come_back_as_they_are() -> None:
    group = MetricGroup()
    short, long = group.counter("a_total", "Short.", "x"), group.gauge("a_b", 'Long \\ "help".')
    odd = 'quote " line \n and \\'
    found = read_back(exposition({long.of(): 1, short.of(odd): 2.5, short.of(""): 3}).decode())
    assert list(found) == ["a_b", "a"]
    assert [(sample.labels, sample.value) for sample in found["a"].samples] == [({"x": odd}, 2.5), ({}, 3)]


def test_a_declaration_that_prometheus_would_not_take_is_refused() -> None:
    group = MetricGroup()
    first = group.gauge("a", "One.", "x")
    wrong = [("a", "Again."), ("a_total", "No gauge."), ("B", "Upper case."), ("b", " "), ("é", "No ASCII.")]
    for name, help in wrong:
        with pytest.raises(ValueError):
            group.gauge(name, help, "x")
    with pytest.raises(ValueError, match="end in _total"):
        group.counter("b", "No counter.")
    with pytest.raises(ValueError, match="has the labels"):
        first.of()
    other = MetricGroup()
    other.gauge("a", "Of another part.")
    with pytest.raises(ValueError, match="two parts"):
        catalogue([group, other])


def test_words_with_a_label_and_words_that_nobody_declared() -> None:
    group = MetricGroup()
    words = group.counters("covey_x", {"dropped": "Dropped.", "sent": "Sent."}, {"dropped": "reason"})
    found = words.of({"dropped_BadSeal": 2, "sent": 1, "sent_late": 4, "unheard": 5})
    dropped, sent = group
    assert found == {dropped.of("bad_seal"): 2.0, sent.of(): 1.0}
