"""Checkpoints as files: what is written is read back, by others too; what is damaged is refused in words."""

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from covey.core.errors import CoveyError
from covey.healing.checkpoint import Checkpoint, check, opened, place_of, save
from covey.healing.machine import Boundary
from covey.job.job_state import JobState, ScriptState, StopsAndSaves, saves_when_asked
from covey.saves.asked_save import AskedSave
from covey.tensors.numbers.arrays import Array
from tests.families import examples

ABOUT = Checkpoint(7, ('{"at": 3}', None, '"\\u00e9"'), "numpy")
ARRAYS: dict[str, Array] = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "none": np.zeros((0, 5)),
    "count": np.array(7, np.int64),
    "turned": np.arange(6, dtype=np.uint16).reshape(2, 3).T,
    "half": np.array([1, -2], np.int16),
    "set": np.array([True, False]),
}


def umask() -> int:
    os.umask(now := os.umask(0))
    return now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "new" / "state.safetensors"
    save(found, ABOUT, ARRAYS, {"half": "BF16"})
    return found


def test_what_is_written_is_read_back_into_the_arrays_that_are_there_and_by_others(path: Path) -> None:
    saved = opened(path)
    assert saved is not None and saved.about[:3] == ABOUT[:3] and saved.about.number
    assert [saved.own_of(rank) for rank in range(4)] == [{"at": 3}, None, "é", None]
    assert saved.owns(3) == (b'{"at": 3}', b"", b'"\\u00e9"') and saved.owns(2) == (b"", b"")
    known: dict[str, Array] = {"w": np.zeros((3, 4), np.float32), "count": np.zeros(3)}
    found = saved.arrays(known)
    assert found["w"] is known["w"] and found["count"] is not known["count"], "another shape"
    for name, array in ARRAYS.items():
        assert found[name].shape == array.shape and found[name].dtype == array.dtype and (found[name] == array).all()
    assert (
        stat.S_IMODE(path.stat().st_mode) == 0o666 & ~os.umask(os.umask(0o022))
        and len(list(path.parent.iterdir())) == 1
    )
    save(path, ABOUT, {name: array for name, array in ARRAYS.items() if name != "half"})
    others = load_file(path)  # whose numpy has no BF16
    assert (others["w"] == ARRAYS["w"]).all() and others["count"].shape == ()
    assert opened(path.with_name("other")) is None


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a checkpoint."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def meta(**new: str) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["__metadata__"].update(new)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.write_bytes(b""), "it has 0 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes are|are written in its header"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "it has 100 bytes"),
        (lambda path: path.write_bytes(b"\xff" * 4000), "it has 4000 bytes"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "are written in its header"),
        (lambda path: (path.unlink(), path.mkdir()), "directory"),
        (lambda path: save_file({"w": np.zeros(3)}, path), "it does not say that Covey wrote it"),
        (lambda path: changed(path, meta(covey="2")), "its format is version 2, and this is 1"),
        (lambda path: changed(path, meta(ranks="4")), "its header cannot be read"),
        (lambda path: changed(path, meta(step="-1")), "its header cannot be read"),
        (lambda path: changed(path, meta(own='["é"]', ranks="1")), "its header cannot be read"),
        (lambda path: changed(path, lambda header: header["w"].update(dtype="F8")), "its header cannot be read"),
        (lambda path: changed(path, lambda header: header["w"].update(shape=[3, -4])), "its header cannot be read"),
        (lambda path: changed(path, lambda header: header["w"].update(shape=[2, 4])), "its header cannot be read"),
        (lambda path: changed(path, lambda header: header.pop("count")), "its header cannot be read"),
    ],
)
def test_what_is_no_whole_checkpoint_is_refused_with_its_name(
    path: Path, damage: Callable[[Path], object], why: str
) -> None:
    damage(path)
    with pytest.raises(CoveyError, match=why) as refused:
        opened(path)
    assert refused.value.what == f"checkpoint {path} was not used" and refused.value.next


def test_a_byte_that_changed_is_found(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    saved = opened(path)
    assert saved is not None
    with pytest.raises(CoveyError, match="its content is not what was written"):
        saved.arrays({})


@settings(max_examples=examples(150), deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400))
def test_whatever_is_in_a_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int
) -> None:
    """Bytes in a checkpoint are replaced, or are all there is."""
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    save(path, ABOUT, ARRAYS)
    whole = bytearray(path.read_bytes())
    whole[at : at + len(data)] = data
    for content in (whole, data, len(data).to_bytes(8, "little") + data):
        path.write_bytes(content)
        try:
            if (saved := opened(path)) is not None:
                saved.arrays({})
        except CoveyError as refused:
            assert refused.what == f"checkpoint {path} was not used"


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CoveyError, match="No space left on device; the state has"):
        save(path, ABOUT._replace(step=8), ARRAYS)
    assert path.read_bytes() == before and [each.name for each in path.parent.iterdir()] == [path.name]
    with pytest.raises(CoveyError, match="an array is named __metadata__"):
        save(path, ABOUT, {"__metadata__": np.zeros(2)})
    with pytest.raises(CoveyError, match="array 'c' has elements of type complex128"):
        save(path, ABOUT, {"c": np.zeros(2, complex)})


def test_the_place_is_a_path_or_in_the_jobs_own_folder(tmp_path: Path) -> None:
    assert place_of("a/b", {}) == Path("a/b")
    assert place_of(True, {"COVEY_CHECKPOINT_DIR": "/x"}) == Path("/x/state.safetensors")
    with pytest.raises(CoveyError, match="COVEY_CHECKPOINT_DIR is not set"):
        place_of(True, {})


def test_a_job_does_not_begin_where_its_newest_checkpoint_is_not_or_none_could_be(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, env = opened(path), {"COVEY_SAVED_AT": str(path), "COVEY_SAVED_STEP": "7"}
    check(path, saved, ARRAYS, env)
    check(path.with_name("new"), None, ARRAYS, {"COVEY_SAVED_AT": str(path)})
    with pytest.raises(CoveyError, match="saved step 7 there, and the file is not on this host"):
        check(path, None, ARRAYS, env)
    with pytest.raises(CoveyError, match="saved step 8 there, and the one on this host is of step 7"):
        check(path, saved, ARRAYS, env | {"COVEY_SAVED_STEP": "8"})
    with pytest.raises(CoveyError, match="array 'c' has elements of type complex128"):
        check(path, None, {"c": np.zeros(2, complex)}, {})
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(CoveyError, match=f"{path.parent} cannot be written to"):
        check(path.parent / "none" / "here", None, ARRAYS, {})


class Steps:
    step = 1

    def begin(self, state: object) -> None: ...
    def end(self, state: object) -> None: ...
    def drawn(self, own: object) -> None: ...
    def moved(self, own: object) -> None: ...


def test_a_save_that_a_person_asks_for_ends_a_step_of_who_writes(tmp_path: Path) -> None:
    place, asked, own = tmp_path / "w", AskedSave(), Boundary(1, (b"",))
    stops = StopsAndSaves(place, boundary=lambda: own, ranks=2)

    def state(**more: Any) -> JobState:
        made = saves_when_asked(stops._replace(**more), asked)
        return JobState(Steps(), ScriptState(lambda: {"w": np.ones(3)}, lambda arrays, own: None, None), stop=made)

    state().done()
    assert not place.exists(), "nobody asked"
    writes, other = state(), state(writes=lambda: False)
    assert asked.ask(1).state == "pending"
    other.done()
    assert not place.exists() and asked.ask(1).state == "pending"
    writes.done()
    assert (asked.ask(1).state, asked.ask(1).step, asked.ask(1).path) == ("saved", 1, str(place))
    place.unlink()
    writes.done()
    assert not place.exists(), "once"
    unable: tuple[dict[str, Any], ...] = ({"place": None}, {"write": lambda *of: None})
    for more in unable:
        state(**more)
        assert asked.ask(asked.ask(0).number + 2).state == "refused"
    together: tuple[dict[str, Any], ...] = ({"boundary": lambda: Boundary(1, None)}, {"own_to_save": lambda last: 3})
    for number, more in enumerate(together, 10):
        ranks = state(**more)
        asked.ask(number)
        ranks.done()
        assert "only together" in asked.ask(number).why, "it must not wait for ranks that were not asked"


@pytest.mark.parametrize(("left_s", "asks"), [(math.inf, []), (60.0, []), (3.0, [pytest.approx(2.4)])])
def test_the_last_checkpoint_asks_for_more_time_where_it_may_need_it(
    tmp_path: Path, left_s: float, asks: list[Any]
) -> None:
    """5 s, and 1 s for each 100 MB; a refusal does not keep it from being written."""
    w, asked = np.zeros(10_000_000, np.float32), list[float]()

    def more(seconds: float) -> None:
        asked.append(seconds)
        raise CoveyError("no more time was granted", "it was asked before", "save within 3 s")

    stops = StopsAndSaves(tmp_path / "w", stops=lambda: True, left_s=lambda: left_s, extends=more)
    stops = stops._replace(boundary=lambda: Boundary(1, (b"",)))
    state = JobState(Steps(), ScriptState(lambda: {"w": w}, lambda arrays, own: None, None), stop=stops)
    state.save()
    assert asked == [], "one that is not the last has all the time"
    with pytest.raises(SystemExit):
        state.end_if_all_stop()
    assert asked == asks and (tmp_path / "w").exists()
