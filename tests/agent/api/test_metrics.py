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

from agent.api.exposition import SERIES_MAX, Scrape, declared, exposition
from chaos.rackworld import SimRack
from chaos.stories import train
from covey.core.metrics import Distribution, MetricGroup, MetricSeries, Tally, catalogue

ROOT = Path(__file__).parents[3]
VALUES = {
    "le": r"[0-9.e+-]+|\+Inf",
    "uuid": r"(GPU|MIG|CPU)-[\w-]+",
    "job_id": "j[0-9]+",
    "tenant": r"[a-z0-9][a-z0-9.-]{0,62}",
    "model": "[ -~]+",
    "route": r"unknown|/[\w{}/.-]*",
    "version": "[0-9.]+",
}
"""What values of labels look like, where they are not plain words."""
NAMES = Path(__file__).with_name("metrics.txt")


def read_back(text: str) -> Mapping[str, Family]:
    """Families by name, without `_total`, as Prometheus' parser has them; AssertionError for one that comes twice."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


def test_all_that_a_living_agent_tells_is_good_prometheus_and_declared() -> None:
    with SimRack(3, hosts=1) as rack:
        rack.start().settle()
        rack.pager("h1", "very-private", 1 << 18, 3.0)
        train(rack, rounds=1000, workers=1, key="a-secret")
        rack.run(5.0)
        measured = rack.agents["h1"].metrics()
    families = read_back(exposition(measured).decode())
    assert not re.search("secret|private|trainer", exposition(measured).decode()), "whoever reaches the port reads this"
    (job,) = families["covey_job_info"].samples
    (held,) = families["covey_job_gpu_info"].samples
    assert (job.labels, held.labels["job_id"]) == ({"job_id": "j1", "tenant": "red", "class": "guaranteed"}, "j1")
    by_uuid = {each.labels["uuid"]: each.value for each in families["covey_gpu_held"].samples}
    assert by_uuid == {"GPU-h1-0": 1, "GPU-h1-1": 0} and held.labels["uuid"] == "GPU-h1-0"
    for timed in ("job_wait", "placement", "decision"):
        counts = [each.value for each in families[f"covey_{timed}_seconds"].samples if each.name.endswith("_count")]
        assert counts and counts[0] > 0, f"{timed} counts nothing"
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
            for label, said in sample.labels.items():
                assert re.fullmatch(VALUES.get(label, "[a-z0-9_]+"), said), (name, label, said)
    for (metric, values), value in measured.items():
        if not isinstance(value, Distribution):
            labels = {label: said for label, said in zip(metric.labels, values, strict=True) if said}
            samples = families[metric.name.removesuffix("_total")].samples
            assert [sample.value for sample in samples if sample.labels == labels] == [value]


def test_a_metric_has_at_most_256_series_whatever_people_call_things() -> None:
    group = MetricGroup()
    tenants, other = group.gauge("t", "By a name that people choose.", "tenant"), group.gauge("u", "One.")
    measured: dict[MetricSeries, float | Distribution] = {tenants.of(f"t{number:04}"): number for number in range(1000)}
    found = read_back(exposition({**measured, other.of(): 7}).decode())
    assert [each.value for each in found["t"].samples] == list(range(SERIES_MAX)), "always the same ones"
    assert (found["u"].samples[0].value, found["covey_series_left_out"].samples[0].value) == (7, 1000 - SERIES_MAX)


def test_a_tally_counts_each_measurement_in_its_bucket() -> None:
    group = MetricGroup()
    tally = Tally(group.histogram("h_seconds", "Times.", "route", bounds=(0.1, 1.0)))
    assert tally.measured() == {}
    for value in (0.05, 0.1, 0.5, 7.0):
        tally.see(value, "/a")
    tally.see(0.2, "/b")
    with pytest.raises(ValueError, match="has the labels"):
        tally.see(0.2)
    *buckets, count, total = [
        each
        for each in read_back(exposition(tally.measured()).decode())["h_seconds"].samples
        if each.labels["route"] == "/a"
    ]
    assert [(each.labels["le"], each.value) for each in buckets] == [("0.1", 2), ("1", 3), ("+Inf", 4)]
    assert count.value == 4 and total.value == pytest.approx(7.65)
    empty = Tally(group.histogram("i_seconds", "Times.", bounds=(0.1,)))
    assert [each.value for each in read_back(exposition(empty.measured()).decode())["i_seconds"].samples] == [
        0,
        0,
        0,
        0,
    ]


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
    assert list(found) == ["a_b", "a", "covey_series_left_out"]
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
    for bounds in ((1.0, 0.5), (1.0, 1.0), (1.0, math.inf)):
        with pytest.raises(ValueError, match="bounds that rise"):
            group.histogram("c", "Bounds.", bounds=bounds)
    other = MetricGroup()
    other.gauge("a", "Of another part.")
    with pytest.raises(ValueError, match="two parts"):
        catalogue([group, other])


def test_words_with_a_label_and_words_that_nobody_declared() -> None:
    group = MetricGroup()
    said = {"dropped": "Dropped.", "sent": "Sent.", "elected": "Elections won."}
    words = group.counters("covey_x", said, {"dropped": "reason"})
    found = words.of({"dropped_BadSeal": 2, "sent": 1, "sent_late": 4, "unheard": 5})
    dropped, sent, elected = group
    assert found == {dropped.of("bad_seal"): 2.0, sent.of(): 1.0, elected.of(): 0.0}, "a count does not appear at 1"
