"""`/metrics` as Prometheus reads it: every line checked against the exposition format, version 0.0.4."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.api.metrics import COUNTED, HELP, prometheus
from chaos.rackworld import SimRack

ROOT = Path(__file__).parents[3]
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
VALUE = r"(?:[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|NaN|[+-]Inf)"
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)?\}})? {VALUE}")


class Family:
    """One metric family, as a scrape has it."""

    def __init__(self, name: str) -> None:
        self.name, self.help, self.kind = name, "", ""
        self.samples: dict[str, str] = {}


def parsed(text: str) -> Mapping[str, Family]:
    """AssertionError at the first line that a strict reader would not take."""
    assert text.endswith("\n")
    found: dict[str, Family] = {}
    current = Family("")
    for line in text.splitlines():
        if line.startswith("#"):
            _, what, name, rest = line.split(" ", 3)
            assert re.fullmatch(NAME, name), line
            if name != current.name:
                assert name not in found, f"{name} comes in two places"
                current = found[name] = Family(name)
            assert not current.samples, "what a family is comes before its samples"
            if what == "HELP":
                assert not current.help and not current.kind and rest.strip(), line
                current.help = rest
            else:
                assert what == "TYPE" and not current.kind and rest in ("counter", "gauge", "histogram"), line
                current.kind = rest
            continue
        matched = SAMPLE.fullmatch(line)
        assert matched, line
        endings = ("_bucket", "_sum", "_count") if current.kind == "histogram" else ("",)
        inside = matched[1] in {f"{current.name}{ending}" for ending in endings}
        assert inside and current.kind, f"{line} stands outside its family"
        labels = ",".join(sorted((matched[2] or "").split(",")))
        labels = f"{matched[1].removeprefix(current.name)} {labels}".lstrip()
        assert labels not in current.samples, f"{line} comes twice"
        current.samples[labels] = line
    return found


def test_all_that_a_living_agent_tells_is_good_prometheus_and_explained() -> None:
    with SimRack(3, hosts=1) as rack:
        rack.start().settle()
        rack.pager("h1", "vol1", 1 << 18, 3.0)
        rack.run(5.0)
        families = parsed(prometheus(rack.agents["h1"].metrics()))
    assert len(families) > 20
    for family in families.values():
        assert family.help
        values = [pair for line in family.samples for pair in re.findall(r'(\w+)="(.*?)"', line)]
        assert all(re.fullmatch("[a-z0-9_]+", value) for label, value in values if label != "le")
        bounds = [float(value) for label, value in values if label == "le"]
        assert (family.kind == "histogram") == (math.inf in bounds) and all(bound > 0 for bound in bounds)
        assert (family.kind == "counter") == family.name.endswith("_total")
        assert family.samples


def test_every_family_that_the_code_names_is_explained_and_no_other() -> None:
    named: set[str] = set()
    for path in [*(ROOT / "agent").rglob("*.py"), *(ROOT / "gossip").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]:
        if path.name != "metrics.py":
            named |= set(re.findall(r"[\"'](covey_[a-z_]+)[{\"']", path.read_text()))
    assert {family for family in named if not family.endswith("_")} == set(HELP)


WHERE = {
    "devices": ("agent/ports/devices/**/*.py",),
    "gossip": ("gossip/**/*.py",),
    "links": ("agent/ports/network/links.py", "agent/ports/network/handshake_limit.py"),
    "raft": ("agent/raft/**/*.py",),
    "rpc": ("agent/rpc/rpc.py", "agent/rpc/answers.py", "agent/host.py"),
}


@pytest.mark.parametrize("subsystem", WHERE)
def test_every_word_that_is_counted_is_explained_and_no_other(subsystem: str) -> None:
    text = "".join(path.read_text() for pattern in WHERE[subsystem] for path in sorted(ROOT.glob(pattern)))
    lines = [line for line in text.splitlines() if re.search(r"count(er)?s(\[| = \{)", line)]
    words = {word for line in lines for word in re.findall(r'f?"([^"{]+)[{"]', line)} | set(
        re.findall(r'found\["(\w+)"\] = self\._gossip', text)
    )
    assert {word.removesuffix("_") for word in words} == set(COUNTED[subsystem])
    assert all(re.fullmatch("[a-z0-9_]+", word) for word in words)


def test_a_family_whose_name_begins_another_is_not_split() -> None:
    text = prometheus({"a_b": 1, "a": 2.5, 'a{x="1"}': 3})
    assert text.splitlines() == ["# TYPE a gauge", "a 2.5", 'a{x="1"} 3', "# TYPE a_b gauge", "a_b 1"]
    assert [family.name for family in parsed(text).values()] == ["a", "a_b"]


def test_values_that_are_not_finite_are_written_as_prometheus_wants() -> None:
    text = prometheus({"a": float("inf"), "b": float("nan"), "c": float("-inf")})
    assert text.splitlines()[1::2] == ["a +Inf", "b NaN", "c -Inf"]
    assert len(parsed(text)) == 3


@pytest.mark.parametrize(
    "text",
    [
        "a 1",
        '# TYPE a gauge\na 1\n# TYPE b gauge\nb 1\na{x="1"} 2\n',
        "# TYPE a gauge\na 1\n# TYPE a gauge\n",
        "# TYPE a gauge\na one\n",
        "# TYPE a gauge\na 1\na 2\n",
        "# TYPE a gauge\na{x=1} 1\n",
        "# TYPE a gauge\n# HELP a too late\na 1\n",
    ],
)
def test_the_reader_of_these_tests_is_strict(text: str) -> None:
    with pytest.raises(AssertionError):
        parsed(text)
