"""A callback for an import: the importing code must not notice it."""

import builtins
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.hooks.watch import ImportWatch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = list(sys.meta_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    assert sys.meta_path == before, "the finder is gone once nothing is watched"
    for name in ("watched_here", "broken_here"):
        sys.modules.pop(name, None)


def test_a_module_is_told_once_after_it_was_executed(folder: Path) -> None:
    (folder / "watched_here.py").write_text("x = 5\n")
    told: list[Any] = []
    watch = ImportWatch(lambda error: told.append(error))
    watch.when_imported("watched_here", lambda module: told.append(module.x))
    assert told == []
    module = importlib.import_module("watched_here")
    assert told == [5] and type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None and module.__spec__.loader is module.__loader__
    importlib.reload(module)
    assert told == [5]


def test_a_module_that_is_there_is_told_at_once() -> None:
    told: list[Any] = []
    ImportWatch(told.append).when_imported("sys", told.append)
    assert told == [sys]


def test_a_callback_that_raises_is_not_the_importers_trouble(folder: Path) -> None:
    (folder / "watched_here.py").write_text("x = 5\n")
    failed: list[BaseException] = []

    def call(module: Any) -> None:
        raise RuntimeError("no")

    ImportWatch(failed.append).when_imported("watched_here", call)
    assert importlib.import_module("watched_here").x == 5
    assert [str(error) for error in failed] == ["no"]


def test_a_module_that_raises_raises_what_it_did(folder: Path) -> None:
    (folder / "broken_here.py").write_text("raise ValueError('mine')\n")
    told: list[Any] = []
    ImportWatch(told.append).when_imported("broken_here", told.append)
    watch = sys.meta_path[0]
    with pytest.raises(ValueError, match="mine"):
        importlib.import_module("broken_here")
    sys.meta_path.remove(watch)
    assert told == []


def test_an_import_that_failed_half_way_is_told_when_it_succeeds(folder: Path) -> None:
    (folder / "broken_here.py").write_text("import builtins\nif not hasattr(builtins, 'mended'): raise OSError('no')\n")
    told: list[Any] = []
    ImportWatch(told.append).when_imported("broken_here", lambda module: told.append(module.__name__))
    with pytest.raises(OSError, match="no"):
        importlib.import_module("broken_here")
    builtins.mended = True  # type: ignore[attr-defined]
    try:
        importlib.import_module("broken_here")
    finally:
        del builtins.mended  # type: ignore[attr-defined]
    assert told == ["broken_here"]


def test_a_module_that_is_nowhere_is_not_found(folder: Path) -> None:
    told: list[Any] = []
    watch = ImportWatch(told.append)
    watch.when_imported("nowhere_here", told.append)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nowhere_here")
    sys.meta_path.remove(watch)
    assert told == []
