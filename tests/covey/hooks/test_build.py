"""The native gate is loaded only from files that no other user can write (`covey.hooks.gate.build`)."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from covey.hooks.gate.build import SOURCE, TorchBuild, build, cache_folder, found, is_ours

TORCH = TorchBuild("2.13.0+cpu", Path("/nowhere/torch"), True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "covey").mkdir(mode=0o700)
    (tmp_path / "covey" / TORCH.library).write_bytes(b"\x7fELF")
    os.chmod(tmp_path / "covey" / TORCH.library, 0o755)
    return tmp_path / "covey"


def test_a_library_is_for_one_pytorch_and_one_source(folder: Path) -> None:
    assert found(TORCH, folder) == folder / TORCH.library
    assert found(dataclasses.replace(TORCH, version="2.13.1+cpu"), folder) is None
    assert found(dataclasses.replace(TORCH, cxx11_abi=False), folder) is None


def test_what_others_can_write_is_not_loaded(folder: Path) -> None:
    library = folder / TORCH.library
    assert is_ours(library)
    os.chmod(library, 0o775)
    assert not is_ours(library)
    os.chmod(library, 0o755)
    os.chmod(folder, 0o777)
    assert not is_ours(library)
    os.chmod(folder, 0o1777)
    assert is_ours(library), "like /tmp: others add files, and replace none"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_owns_is_not_loaded(folder: Path) -> None:
    os.chown(folder / TORCH.library, 1234, 1234)
    assert found(TORCH, folder) is None
    os.chown(folder / TORCH.library, 0, 0)
    os.chown(folder, 1234, 1234)
    assert found(TORCH, folder) is None


def test_a_link_to_another_users_file_is_followed_before_it_is_believed(folder: Path, tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    os.chmod(open_to_all, 0o777)
    shutil.copy(folder / TORCH.library, open_to_all / "x.so")
    (folder / TORCH.library).unlink()
    (folder / TORCH.library).symlink_to(open_to_all / "x.so")
    assert found(TORCH, folder) is None


@pytest.mark.parametrize("compiler", ["/bin/false", "/nonexistent/g++"])
def test_a_compiler_that_fails_leaves_nothing_behind(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(RuntimeError, match=compiler):
        build(TORCH, tmp_path / "covey")
    assert list((tmp_path / "covey").iterdir()) == []


def test_it_lies_in_the_users_cache() -> None:
    assert cache_folder({"COVEY_GATE": "/a", "HOME": "/h"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/covey")
    assert cache_folder({"HOME": "/h"}) == Path("/h/.cache/covey")
    assert SOURCE.is_file()
