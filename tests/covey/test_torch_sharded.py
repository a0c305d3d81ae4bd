"""Trainings whose model is divided among ranks (FSDP) stop together and continue with the same bits: real processes,
gloo. What a checkpoint in shards says, and what is refused."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.core.errors import EXIT_AGAIN, CoveyError
from covey.healing.checkpoint import Checkpoint
from tests.covey.forks import Forks
from tests.covey.hooks.torch_jobs import NEEDS_TORCH

pytestmark = NEEDS_TORCH
SCRIPT = Path(__file__).with_name("torch_sharded_script.py")
WITHIN_S = 100.0


class DividedGang:
    """All ranks of one training."""

    def __init__(self, forks: Forks, folder: Path, kind: str, steps: int, ranks: int = 2) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        store = folder / f"store-{time.monotonic_ns()}"
        self.ranks = [forks.run(SCRIPT, rank, ranks, steps, store, folder, kind) for rank in range(ranks)]

    def lines(self, rank: int, word: str) -> list[str]:
        whole = self.ranks[rank].text().rpartition("\n")[0].splitlines()
        return [line.removeprefix(f"{word} ") for line in whole if line.startswith(f"{word} ")]

    def until(self, rank: int, step: int) -> None:
        end_s = time.monotonic() + WITHIN_S
        while str(step) not in self.lines(rank, "takes"):
            assert time.monotonic() < end_s, [each.text()[-3000:] for each in self.ranks]
            time.sleep(0.005)

    def stopped(self) -> None:
        """Ask the ranks to end, one after the other; each ends with 75."""
        for rank in reversed(range(len(self.ranks))):
            (self.folder / f"stop-{rank}").touch()
            time.sleep(0.03)
        self.ended(EXIT_AGAIN)
        for rank in range(len(self.ranks)):
            (self.folder / f"stop-{rank}").unlink()

    def ended(self, code: int) -> "DividedGang":
        found = [each.wait() for each in self.ranks]
        assert found == [code] * len(found), [each.text()[-3000:] for each in self.ranks]
        return self

    def learnt(self) -> list[str]:
        return [self.lines(rank, "sha256")[0] for rank in range(len(self.ranks))]

    def close(self) -> None:
        for each in self.ranks:
            each.close()


Gangs = Callable[..., DividedGang]


@pytest.fixture
def gangs(forks: Forks, tmp_path: Path) -> Any:
    made: list[DividedGang] = []

    def make(folder: str, kind: str, steps: int, ranks: int = 2) -> DividedGang:
        made.append(DividedGang(forks, tmp_path / folder, kind, steps, ranks))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.long
@pytest.mark.parametrize(("kind", "steps"), [("model", 48), ("models", 40)])
def test_a_divided_training_that_is_asked_to_end_goes_on_with_the_same_bits(
    gangs: Gangs, kind: str, steps: int
) -> None:
    """Stopped twice, in the second epoch and soon after; one rank hears of it after the other."""
    for at in (6, 30):
        gang = gangs("stopped", kind, steps)
        gang.until(0, at)
        gang.stopped()
        (step, place) = gang.lines(0, "saved")[-1].split()
        assert place == str(gang.folder / "state.json") and not gang.lines(1, "saved")
        assert len(list(gang.folder.glob("state.json-*.shards"))) == 1, "the set before it is gone"
        assert int(step) <= at + 8
    last = gangs("stopped", kind, steps).ended(0)
    assert {last.lines(rank, "goes on")[0] for rank in (0, 1)} == {step}
    assert last.learnt() == gangs("calm", kind, steps).ended(0).learnt()
    assert "divided among 2 ranks (FSDP): a rank that is lost makes the job begin again" in last.lines(0, "tells")[-1]


def test_checkpoints_of_another_training_or_number_of_ranks_are_refused_by_all(gangs: Gangs) -> None:
    def refused(why: str, kind: str, ranks: int = 2) -> None:
        gang = gangs("saved", kind, 48, ranks).ended(1)
        for rank in range(ranks):
            said = gang.ranks[rank].text()
            assert why in said and "was not used" in said and "next: " in said, said

    gang = gangs("saved", "model", 48)
    gang.until(0, 6)
    gang.stopped()
    refused("it has the shards of 2 ranks, and this job has 1", "model", 1)
    refused("model here has 0.weight (7, 8) float32, and there 0.weight (5, 8) float32", "wide")
    (shard,) = gang.folder.glob("state.json-*/rank-00001.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    refused("its content is not what was written: its checksum differs", "model")
    shard.unlink()
    refused("rank-00001.safetensors is not there, and the manifest names it", "model")


def test_a_rank_that_cannot_write_ends_the_save_of_all_and_the_older_set_counts(gangs: Gangs) -> None:
    gang = gangs("saved", "unwritten", 10).ended(1)
    assert "/proc/nowhere" in gang.ranks[1].text() and "rank 1: " in gang.ranks[0].text()
    assert gang.lines(0, "stopping") == ["False"]
    why = "ranks are not replaced from their replicas: the process group (gloo) spans the processes that may be lost"
    assert why in gang.lines(0, "tells")[-1]
    assert not list(gang.folder.glob("state.json*")), "no part of a set that is not complete stays"


def saved_set(path: Path, step: int, number: int) -> Any:
    from covey.frameworks.torch.sharded.shard_set import complete, file_of, folder_of, opened_set, write_shard

    folder = folder_of(path, step, number)
    about = Checkpoint(step, (None, None), "torch shards")
    shards = [
        write_shard(file_of(path, folder, rank), about, {"w": np.full(3 + rank, float(step))}, {}) for rank in range(2)
    ]
    complete(path, step, folder, shards)
    return opened_set(path)


def test_a_set_of_shards_is_whole_or_not_there(tmp_path: Path) -> None:
    from covey.frameworks.torch.sharded.shard_set import opened_set, opened_shard

    path = tmp_path / "state.json"
    assert opened_set(path) is None
    first = saved_set(path, 3, 7)
    other = saved_set(tmp_path / "state.other", 3, 7)
    found = saved_set(path, 5, 8)
    assert found.step == 5 and len(found.shards) == 2 and not first.file(0).exists() and other.file(0).exists()
    assert opened_shard(found, 1).arrays({})["w"].tolist() == [5.0] * 4
    found.file(0).write_bytes(other.file(0).read_bytes())
    with pytest.raises(CoveyError, match="and the manifest says"):
        opened_shard(found, 0)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: b"", "it has 0 bytes, and is no checkpoint in shards"),
        (lambda data: data[:-5], "it cannot be read"),
        (lambda data: data.replace(b'"step": 3', b'"step": 4'), "its checksum differs"),
        (lambda data: data.replace(b"torch shards", b"other shards"), "its format is version 1 of other shards"),
        (lambda data: json.dumps([1]).encode(), "is no checkpoint in shards"),
        (lambda data: b'{"crc32": "00"}', "its format is version None"),
        (lambda data: b'{"crc32": 1}', "it cannot be read"),
        (lambda data: b'{"a":' * 100_000, "it cannot be read"),
    ],
)
def test_a_damaged_manifest_is_refused_in_words(tmp_path: Path, damage: Callable[[bytes], bytes], why: str) -> None:
    from covey.frameworks.torch.sharded.shard_set import opened_set

    path = tmp_path / "state.json"
    saved_set(path, 3, 7)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CoveyError, match="was not used") as raised:
        opened_set(path)
    assert why in raised.value.why and raised.value.next
