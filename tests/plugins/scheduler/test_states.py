"""The meaning of a job's state is said once, in `machine/log/jobs.py`; no other file keeps a list of states of its
own."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from covey.core.ids import JobId
from covey.core.tones import TONES
from plugins.scheduler.machine.log.jobs import HOLDING, OVER, STATES, After, Job, JobTimes, State
from plugins.scheduler.messages.spec import JobSpec

ROOT = Path(__file__).parents[3]
PLACE = ROOT / "plugins/scheduler/machine/log/jobs.py"
PACKAGES = ("covey", "gossip", "plugins", "agent", "cli", "sim", "chaos", "bench")


def lists_of_states_over(source: str) -> list[int]:
    """Lines with a tuple, list or set that names every state in which a job is over."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
        and {item.value for item in node.elts if isinstance(item, ast.Constant)} >= set(OVER)
    ]


def test_every_state_waits_holds_or_is_over() -> None:
    assert {*STATES} == {"queued", *HOLDING, *OVER}
    assert len(STATES) == 1 + len(HOLDING) + len(OVER)
    assert {*get_args(After)} < {*STATES}


@pytest.mark.parametrize("state", STATES)
def test_a_job_is_over_in_the_states_that_it_never_leaves(state: State) -> None:
    spec = JobSpec.parse({"argv": ["true"], "cwd": "/"})
    job = Job(id=JobId("j1"), number=1, key="k", spec=spec, times=JobTimes(0.0), state=state)
    assert job.over == (state not in ("queued", *HOLDING))


def test_no_other_file_lists_the_states_in_which_a_job_is_over() -> None:
    """`agentctl wait` could otherwise wait for ever for a state that only `jobs.py` knows."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path != PLACE]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in lists_of_states_over(path.read_text())]
    assert found == []


def test_a_list_of_states_that_somebody_keeps_is_found() -> None:
    assert lists_of_states_over('ENDED = ("failed", "done", "timeout", "cancelled")\nTWO = ("done", "failed")') == [1]


@pytest.mark.parametrize("state", STATES)
def test_every_state_has_a_tone_and_is_named_where_programs_read_it(state: State) -> None:
    assert state in TONES
    assert f"`{state}`" in (ROOT / "plugins/views.py").read_text()


def test_the_web_page_takes_colours_from_the_agent_and_orders_every_state() -> None:
    """Its parts that show a state know none by name: they read `/states.json`. Its queue has an order of those that are
    not over, and its overview counts each of them."""
    page = ROOT / "agent/api/page"
    for part in ("page.js", "lib/widgets.js", "lib/virtual.js"):
        assert set(re.findall(r"\w+", (page / part).read_text())) & {*STATES} == set()
    order = re.search(r"const ORDER = \{(.*?)\}", (page / "views/lists.js").read_text())
    assert order is not None and set(re.findall(r"(\w+):", order[1])) == {*STATES} - {*OVER}
    counted = set(re.findall(r'job\.state === "(\w+)"', (page / "views/overview.js").read_text()))
    assert counted == {*STATES} - {*OVER}
