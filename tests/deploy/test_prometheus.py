"""The dashboard and the alerts name metrics and labels that agents have, and each alert fires where it should."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agent.api.exposition import declared
from cli.main import NOUNS, VERBS
from covey.core.metrics import Metric

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES, TESTS = DEPLOY / "prometheus/rules.yml", DEPLOY / "prometheus/rules-test.yml"
BOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
TARGET = {"job", "instance", "le", "alertname", "alertstate", "severity"}
"""Labels that Prometheus adds."""
PROMTOOL = shutil.which("promtool")


def expressions(path: Path) -> list[str]:
    """Every expression of a file: lines of rules, and `expr`, queries of variables and annotations of a dashboard."""
    text = path.read_text()
    if path.suffix == ".yml":
        found = re.findall(r"^ +expr: (?:\|\n((?: {10}.*\n)+)|(.*)\n)", text, re.MULTILINE)
        return [one or two for one, two in found]
    board = json.loads(text)
    panels = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    variables = [each["definition"] for each in board["templating"]["list"] if "definition" in each]
    return [*panels, *variables, *(each["expr"] for each in board["annotations"]["list"])]


def metric_of(name: str) -> Metric | None:
    """The metric that has this series."""
    known = {metric.name: metric for metric in declared()}
    part = re.fullmatch(r"(\w+)_(bucket|count|sum)", name)
    if part and (histogram := known.get(part[1])) is not None and histogram.kind == "histogram":
        return histogram
    found = known.get(name)
    return None if found is None or found.kind == "histogram" else found


@pytest.mark.parametrize("path", [RULES, *BOARDS], ids=lambda path: path.name)
def test_every_metric_and_label_that_is_named_exists(path: Path) -> None:
    found = expressions(path)
    assert len(found) > 15
    for expression in found:
        names = re.findall(r"\bcovey_\w+", expression)
        assert names or "up{" in expression, expression
        metrics = [metric_of(name) for name in names]
        assert None not in metrics, expression
        labels = {label for metric in metrics if metric is not None for label in metric.labels} | TARGET
        braces = " ".join(re.findall(r"\{([^}]*)\}", re.sub(r'"[^"]*"', "", expression)))
        grouped = " ".join(re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", expression))
        used = {*re.findall(r"(\w+) *(?:=~?|!=|!~)", braces), *re.findall(r"\w+", grouped)}
        assert used <= labels, (expression, used - labels)


def test_a_counter_is_only_shown_as_a_rate_and_a_gauge_never_is() -> None:
    for expression in (each for path in (RULES, *BOARDS) for each in expressions(path)):
        rated = set(re.findall(r"\b(?:rate|increase)\((covey_\w+)", expression))
        for name in re.findall(r"\bcovey_\w+", expression):
            metric = metric_of(name)
            assert metric is not None and (name in rated) == (metric.kind != "gauge"), expression


def test_every_alert_has_a_next_step_that_can_be_typed_and_a_test() -> None:
    alerts = dict(re.findall(r"- alert: (\w+)\n(?:.*\n)*?          next: \"(.*)\"", RULES.read_text()))
    assert sorted(alerts) == sorted(re.findall(r"- alert: (\w+)", RULES.read_text())) and len(alerts) > 15
    assert sorted(re.findall(r"  - name: (Covey\w+)", TESTS.read_text())) == sorted(alerts)
    words = {word for step in alerts.values() for word in re.findall(r"agentctl (\w+)", step)}
    assert words and words <= {*NOUNS, *VERBS}


@pytest.mark.skipif(
    PROMTOOL is None, reason="THE ALERTS WERE NOT TRIED: there is no promtool here (Debian: prometheus)"
)
def test_promtool_finds_that_every_alert_fires_where_it_should_and_nowhere_else() -> None:
    for words in (["check", "rules", RULES.name], ["test", "rules", TESTS.name]):
        done = subprocess.run([str(PROMTOOL), *words], cwd=RULES.parent, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
