"""The plugin of docs/start/plugin.md: its policy, its machine, its service on simulated hosts, and the page."""

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.rackworld import SimRack
from covey.core.errors import Refused
from covey.core.events import LogEvent
from covey.core.ids import HostId
from examples.plugin.load import policy
from examples.plugin.load.machine import LoadMachine, LoadMeasured, ShowLoad
from examples.plugin.load.plugin import PLUGIN

ROOT = Path(__file__).parents[2]
LOAD = ROOT / "examples/plugin/load"
PAGE = ROOT / "docs/start/plugin.md"
A, B, C = HostId("a"), HostId("b"), HostId("c")
ratios = st.floats(0, 1)


# ---- policy ----


def test_load_is_the_busier_of_gpus_and_memory() -> None:
    assert policy.load_of([1.0, 0.0], 0.3) == 0.5
    assert policy.load_of([0.1, 0.1], 0.3) == 0.3
    assert policy.load_of([], 0.3) == 0.3


@given(st.lists(ratios, min_size=1, max_size=20), ratios)
def test_smoothed_load_stays_between_what_was_and_what_is(past: list[float], measured: float) -> None:
    load = None
    for one in [*past, measured]:
        load = policy.smoothed(load, one)
    assert load is not None and min([*past, measured]) - 1e-9 <= load <= max([*past, measured]) + 1e-9


def test_the_calmest_are_asked_and_equals_go_by_name() -> None:
    assert policy.calmest_by_hint({C: 0.2, B: 0.2, A: 0.9}) == [B, C]
    assert policy.calmest([(A, 0.9), (B, 0.4)]) == B
    assert policy.calmest([]) is None


def test_settings_in_which_a_host_is_busy_and_calm_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match=r"calm_below = 0\.9, busy_above = 0\.8"):
        policy.LoadSettings(busy_above=0.8, calm_below=0.9)


# ---- machine ----


def play(machine: LoadMachine, *loads: float) -> list[ShowLoad | LogEvent]:
    """Give the machine one measurement a second; returns its actions."""
    found: list[ShowLoad | LogEvent] = []
    for second, load in enumerate(loads):
        found += machine.handle(LoadMeasured(load), float(second))
        machine.check()
    return found


def test_a_load_is_shown_when_it_moved_by_a_step_and_not_before() -> None:
    machine = LoadMachine(A, policy.LoadSettings())
    assert play(machine, 0.5, 0.5, 0.55, 0.5) == [ShowLoad(0.5)]
    assert play(machine, 1.0) != []


def test_a_host_turns_busy_once_and_calm_once_however_its_load_trembles_in_between() -> None:
    machine = LoadMachine(A, policy.LoadSettings(busy_above=0.9, calm_below=0.7))
    trembling = [*[1.0] * 10, *[0.8, 0.95] * 10, *[0.1] * 10]
    turns = [action.event for action in play(machine, *trembling) if isinstance(action, LogEvent)]
    assert turns == ["busy", "calm"]


@given(st.lists(ratios, max_size=60))
def test_whatever_is_measured_others_know_the_load_to_within_a_step(loads: list[float]) -> None:
    machine = LoadMachine(A, policy.LoadSettings())
    shown = [action.load for action in play(machine, *loads) if isinstance(action, ShowLoad)]
    assert not loads or (machine.load is not None and abs(shown[-1] - machine.load) < policy.STEP)


# ---- service, on whole agents ----


def use(rack: SimRack, host: str, utilization: float) -> None:
    at = rack.hosts[host]
    assert at.agent is not None
    for gpu in at.probes.gpus():
        at.probes.devices.use(gpu.uuid, at.agent.id.pid, 0, utilization)


def rack_of_three(seed: int) -> SimRack:
    rack = SimRack(seed, hosts=3, plugins=(PLUGIN,), settings={"load": {"busy_above": 0.8, "calm_below": 0.5}}).start()
    rack.settle()
    for host, utilization in (("h1", 0.9), ("h2", 0.2), ("h3", 0.6)):
        use(rack, host, utilization)
    rack.run(15.0)
    return rack


def test_any_host_names_the_calmest_one() -> None:
    with rack_of_three(1) as rack:
        assert {rack.ask(host, "load.calmest", {})["host"] for host in rack.hosts} == {"h2"}
        hints = rack.ask("h1", "load.hints", {})
        assert {host: round(load, 1) for host, load in hints.items()} == {"h1": 0.9, "h2": 0.2, "h3": 0.6}
        story = [line.event for line in rack.agents["h1"].event_log.lines_of("host/h1")]
        assert story.count("busy") == 1


def test_a_host_that_is_asked_and_dead_is_passed_over() -> None:
    with rack_of_three(2) as rack:
        rack.hosts["h2"].power_off()
        assert rack.ask("h1", "load.calmest", {})["host"] == "h3"


def test_when_nobody_answers_the_refusal_says_who_was_asked() -> None:
    with rack_of_three(3) as rack:
        use(rack, "h3", 0.1)
        rack.run(30.0)
        rack.hosts["h2"].power_off()
        rack.hosts["h3"].power_off()
        with pytest.raises(Refused, match="not known now") as refused:
            rack.ask("h1", "load.calmest", {})
        assert "h3" in refused.value.why and refused.value.next


# ---- the page ----

BLOCK = re.compile(r"`(examples/plugin/load/\w+\.py)`[^\n]*:\n\n```python\n(.*?)```", re.DOTALL)


def test_the_tutorial_quotes_the_files_as_they_are() -> None:
    quoted = BLOCK.findall(PAGE.read_text())
    assert {Path(path).name for path, _ in quoted} == {path.name for path in LOAD.glob("*.py")} - {"__init__.py"}
    assert PAGE.read_text().count("```python") == len(quoted), "every block of Python is one of a file"
    assert [path for path, block in quoted if block.strip("\n") not in (ROOT / path).read_text()] == []


def roots(path: Path) -> set[str]:
    """Packages that a file imports, by their first names."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.split(".")[0] for name in names}


def test_the_example_has_a_plugins_parts_and_its_decisions_reach_nothing_outside() -> None:
    parts = {"__init__", "messages", "policy", "machine", "service", "plugin"}
    assert {path.stem for path in LOAD.glob("*.py")} == parts
    for part in ("messages", "policy", "machine"):
        assert roots(LOAD / f"{part}.py") <= {"collections", "typing", "msgspec", "covey", "examples"}, part
