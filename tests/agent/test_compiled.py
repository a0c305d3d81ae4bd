"""The byte path as machine code is used only where it was made from these very sources, by somebody who may
(`agent.compiled`). That it does the same is shown by its tests, run so: `make compiled`."""

import os
import sys
from pathlib import Path

import pytest

from agent import compiled


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of compiled modules, without a compiler."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    folder = compiled.folder()
    for name in ("abc__mypyc", *(module.replace(".", "/") for module in compiled.MODULES)):
        file = folder / (name + compiled.SUFFIX)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"\x7fELF")
        file.chmod(0o755)
    return folder


def test_every_module_and_what_it_imports_of_ours_is_looked_at() -> None:
    """Types of what they import are compiled in: one that changed makes the result another one's."""
    sources = {file.relative_to(compiled.ROOT).as_posix() for file in compiled.sources()}
    for module in compiled.MODULES:
        path = module.replace(".", "/") + ".py"
        assert path in sources
        words = (compiled.ROOT / path).read_text().split()
        ours = {word for word in words if word.startswith(("agent.", "covey.", "gossip.", "plugins."))}
        imported = [word for word in ours if (compiled.ROOT / (word.replace(".", "/") + ".py")).is_file()]
        assert all(word.replace(".", "/") + ".py" in sources for word in imported), module


def test_the_byte_path_runs_compiled_and_nothing_else_does(made: Path) -> None:
    assert not compiled.use("supervisor") and not compiled.use("aggd")
    assert compiled.use("vold")
    finder = sys.meta_path[0]
    spec = finder.find_spec("plugins.memory.datapath.doors.nbd_front", None)
    assert spec is not None and spec.origin == str(made / f"plugins/memory/datapath/doors/nbd_front{compiled.SUFFIX}")
    assert finder.find_spec("abc__mypyc", None) is not None
    assert finder.find_spec("plugins.memory.datapath.vold", None) is None
    assert compiled.trouble() == ""


def test_what_was_made_from_other_sources_is_not_used_and_people_are_told(
    made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    edited = tmp_path / "edited.py"
    edited.write_text("# newer\n")
    sources = compiled.sources()
    monkeypatch.setattr(compiled, "sources", lambda: [*sources[1:], edited])
    assert compiled.folder() != made and not compiled.use("vold")
    assert "-m agent.compiled" in compiled.trouble()


@pytest.mark.parametrize("harm", ["open", "missing"])
def test_what_others_can_write_or_is_not_whole_is_not_used(made: Path, harm: str) -> None:
    file = made / ("agent/ports/network/stream" + compiled.SUFFIX)
    if harm == "open":
        os.chmod(file, 0o777)
    else:
        file.unlink()
    assert not compiled.use("slabd") and compiled.trouble()


def test_where_it_was_never_made_nobody_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert not compiled.use("vold") and compiled.trouble() == ""


def test_without_a_compiler_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    assert compiled.main() == 1
    assert "install gcc" in capsys.readouterr().err and not list(tmp_path.iterdir())
