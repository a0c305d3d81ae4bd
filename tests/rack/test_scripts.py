"""The short half of `make scripts`: scripts as other tools' manuals have them, as jobs of a rack; and those that the
page for researchers shows."""

import fnmatch
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.scripts import scripts, ways
from bench.scripts.ways import Kind, Lane

pytestmark = [pytest.mark.rack, pytest.mark.xdist_group("rack")]
PAGE = Path(__file__).parents[2] / "docs/start/researcher.md"


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lane]:
    with Lane(tmp_path_factory.mktemp("scripts"), Path(sys.executable).parent).started() as found:
        yield found


def kind_of(file: str) -> Kind:
    return next(kind for kind in scripts.kinds() if kind.file == file)


@pytest.mark.long
def test_a_script_that_saves_is_preempted_and_killed_and_ends_with_the_same_bits(lane: Lane) -> None:
    row = scripts.tried(lane, kind_of("plain/numpy_alone.py"))
    assert row.unlike == []


@pytest.mark.long
@pytest.mark.torch
def test_a_script_for_torchrun_runs_as_it_is_is_seen_and_averaged(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("READ_S", "0.0001")
    kind = kind_of("pytorch/by_hand.py")
    done = lane.aggregated(kind)
    assert done.ok and len(done.digests) == 1, done.output
    assert ways.aggregated(done, done.digests) == "same bits", done.hooked
    assert fnmatch.fnmatchcase(ways.seen(kind, done), kind.seen)


@pytest.mark.torch
def test_scripts_of_the_page_for_researchers_run(lane: Lane, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    blocks = re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert [name for name, _ in blocks] == ["train", "heals", "stretches"]
    for name, block in blocks[1:]:  # tests/rack/test_first_hour.py runs the first one, too
        script = tmp_path / f"{name}.py"
        script.write_text(block)
        kind = Kind(f"{name} of the page", str(script), submit="--workers 2", command=f"python {name}.py 100")
        done = lane.plain(kind)
        assert done.ok, done.output
        assert done.view["step"] in (99, 100), "all steps are seen"
