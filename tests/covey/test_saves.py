"""Models that are saved while their ranks go on: which step, what is in the files, and what becomes of them when an
owner, a writer or a disk fails."""

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.core.errors import CoveyError
from covey.healing import checkpoint
from covey.job.tensors import TensorClient
from covey.saves import saver as saver_module
from covey.saves import tensor_set
from covey.saves.asked_save import AskedSave
from covey.saves.save_steps import SaveSteps
from covey.saves.tensor_set import (
    Part,
    SavedTensor,
    arrays_of,
    complete,
    file_of,
    folder_of,
    opened_set,
    write_file,
)
from covey.tensors.numbers.updates import SGD, Adam
from tests.covey.played_ranks import Script
from tests.covey.test_host_rounds import gang
from tests.families import examples
from tests.plugins.aggregator.harness import Bench, Tensor, contribution, initial, rate_in, reference

ADAM = Adam()
TENSORS = (
    Tensor("w", "model", (90_001,), ADAM),
    Tensor("b", "model", (5,), ADAM, type="bfloat16"),
    Tensor("s", "model", (7, 3), SGD(0.1)),
    Tensor("v", "model", (), SGD(0.1, momentum=0.9)),
)


def training(
    place: Path, ranks: int, rounds: int, every: int | None, tensors: Sequence[Tensor] = TENSORS, pause_s: float = 0.0
) -> Script:
    """A script that goes on from what is saved, and whose rounds have the bits of one process that never ended."""

    wanted = {tensor: reference(tensor, ranks, rounds) for tensor in tensors}

    def script(rank: int, client: TensorClient) -> None:
        began = client.save(place, every=every)
        for tensor in tensors:
            client.model(tensor.name, initial(tensor, rank), update=tensor.update, type=tensor.type)
        for round in range(began + 1, rounds + 1):
            time.sleep(pause_s)
            begun = [
                client.push(tensor.name, contribution(tensor, rank, round), rate=rate_in(round), type=tensor.type)
                for tensor in tensors
            ]
            for tensor, handle in zip(tensors, begun, strict=True):
                assert handle.wait().tobytes() == wanted[tensor][round - 1].tobytes(), (tensor.name, rank, round)
        client.leave()

    return script


def is_reference(place: Path, ranks: int, tensors: Sequence[Tensor] = TENSORS) -> int:
    """The step that is saved there: its parameters are those of one process. The bits of moments show in the steps that
    follow."""
    found = opened_set(place)
    assert found is not None
    for name, (numbers, *_) in arrays_of(found).items():
        tensor = next(tensor for tensor in tensors if tensor.name == name)
        assert numbers.tobytes() == reference(tensor, ranks, found.step)[-1].tobytes(), (name, found.step)
    return found.step


@pytest.mark.parametrize(
    "starts", [((3,), (2, 1), (1, 1, 1), (3,)), ((2, 2), (1, 3)), ((1, 1, 1, 1, 1), (5,))], ids=str
)
def test_a_job_goes_on_from_what_was_saved_at_any_number_of_hosts(
    tmp_path: Path, starts: tuple[tuple[int, ...], ...]
) -> None:
    place = tmp_path / "saved" / "m.json"
    for at, hosts in enumerate(starts, 1):
        (tmp_path / str(at)).mkdir()
        with gang(tmp_path / str(at), *hosts) as job:
            job.serve()
            job.share()
            job.play(training(place, sum(hosts), 3 * at, 3))
        assert is_reference(place, sum(hosts)) == 3 * at
    assert len(list(place.parent.glob("m.json-*.saved"))) == 1, "files of steps before are removed"


def test_a_save_while_owners_are_replaced_has_all_tensors_of_one_step(tmp_path: Path) -> None:
    place, rng = tmp_path / "m.json", random.Random(3)
    with gang(tmp_path, 2, 1) as job:
        job.serve()
        job.share()
        thread = threading.Thread(target=job.play, args=(training(place, 3, 24, 2, TENSORS[1:], 0.02),))
        thread.start()
        for _ in range(8):  # fewer than would keep a busy machine from any round
            time.sleep(rng.uniform(0.02, 0.15))
            job.replace_owners()
            if place.exists():
                assert is_reference(place, 3, TENSORS[1:]) % 2 == 0
        thread.join()
    assert is_reference(place, 3, TENSORS[1:]) == 24


def test_a_step_that_is_copied_slowly_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, tensors, copy = tmp_path / "m.json", TENSORS[1:], saver_module.Saver._copy

    def slow(self: saver_module.Saver, task: saver_module._Copy) -> None:
        time.sleep(0.05)
        copy(self, task)

    monkeypatch.setattr(saver_module.Saver, "_copy", slow)
    with gang(tmp_path, 1, 1) as job:
        job.serve()
        job.share()
        job.play(training(place, 2, 12, 7, tensors))
    assert is_reference(place, 2, tensors) == 7


# ---- which step ------------------------------------------------------------------------------------------------------


@given(
    names=st.integers(1, 4),
    every=st.none() | st.integers(1, 5),
    began=st.integers(0, 4),
    asks=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=4),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=examples(200), deadline=None)
def test_ranks_save_the_same_steps_whatever_the_order_in_which_each_pushes(
    names: int, every: int | None, began: int, asks: list[tuple[int, int]], seed: int
) -> None:
    """Tensors of a rank are at most one step apart, in any order; each save has each tensor once."""
    each = [f"t{at}" for at in range(names)]
    asked = {began + at + ahead for at, ahead in asks}
    whole = []
    for rank in range(2):
        rng, steps = random.Random(seed + rank), SaveSteps(every, began)
        assert all(steps.ask(step) for step in asked if step > began)
        saved, copied = [], dict[int, list[str]]()
        at = dict.fromkeys(each, began)
        while min(at.values()) < began + 30:
            name = rng.choice([name for name in each if at[name] == min(at.values())])
            said = steps.before_push(name, at[name], each)
            assert said.given_up is None
            if said.copy is not None:
                assert said.copy == at[name], "what is copied is what is here"
                copied.setdefault(said.copy, []).append(name)
            if said.whole:
                saved.append(at[name])
                assert sorted(copied[at[name]]) == each
            at[name] += 1
        whole.append(saved)
    due = [s for s in range(began + 1, began + 30) if s in asked or (every is not None and s % every == 0)]
    assert whole[0] == whole[1] == due


def test_a_step_that_is_past_is_refused_and_one_that_lacks_a_tensor_is_given_up() -> None:
    steps = SaveSteps(None, 0)
    steps.before_push("a", 4, ("a", "b"))
    assert not steps.ask(4) and steps.ask(5)
    assert steps.before_push("a", 5, ("a", "b")).copy == 5
    steps.ask(7)
    said = steps.before_push("a", 7, ("a", "b"))
    assert (said.copy, said.given_up, said.missing) == (7, 5, ("b",))
    assert steps.before_push("b", 7, ("a", "b")).whole


def test_tensors_with_other_numbers_of_steps_are_said_and_nothing_is_written(tmp_path: Path) -> None:
    place = tmp_path / "m.json"
    with gang(tmp_path, 1) as job:
        job.share()
        (client,) = job.clients
        client.save(place, every=2)
        for name in ("a", "b"):
            client.model(name, np.ones(3, np.float32), update=ADAM)
        for step in range(8):
            client.push_pull("a", np.ones(3, np.float32))
            if step % 4 == 0:
                client.push_pull("b", np.ones(3, np.float32))
        assert "step 2 was not saved: tensors b have another number of steps" in job.said[0].getvalue()
        assert not place.exists()


# ---- asked for -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [(2,), (2, 1), (1, 1, 1)])
def test_a_save_that_a_person_asks_for_is_of_one_step_on_all_ranks(tmp_path: Path, hosts: tuple[int, ...]) -> None:
    place, wanted = tmp_path / "m.json", TENSORS[1:]
    with gang(tmp_path, *hosts) as job:
        job.serve()
        job.share()
        asked = job.clients[0].saves.asked
        assert asked.ask(1).state == "refused", "its script saves nothing yet"
        thread = threading.Thread(target=job.play, args=(training(place, sum(hosts), 60, None, wanted, 0.02),))
        thread.start()
        while asked.begin is None or not all(client.saves.models for client in job.clients):
            time.sleep(0.01)
        time.sleep(0.1)
        for number in (2, 3):  # the second one may be too late on a rank, and says so
            while (said := asked.ask(number)).state == "pending":
                time.sleep(0.01)
            assert said.state == "saved" or "was past it" in said.why or "script ended" in said.why
            assert said == asked.ask(number), "asked again, it is the same save"
        thread.join()
    assert 0 < is_reference(place, sum(hosts), wanted) < 60


def test_one_save_at_a_time_is_asked_for() -> None:
    asked = AskedSave()
    asked.begin = lambda: None
    assert asked.ask(5).state == "pending" and asked.ask(6).why == "another save that was asked for is under way"
    asked.failed(CoveyError("w" * 900, "y", "n"))
    assert (asked.ask(5).state, len(asked.ask(5).why)) == ("refused", 400)
    asked.saved(3, Path("/late"))
    assert asked.ask(5).state == "refused", "what is over stays as it is"


# ---- failures --------------------------------------------------------------------------------------------------------


def test_what_a_save_copies_is_whole_at_each_message_at_which_an_owner_dies() -> None:
    """Between the pushes for steps s+1 and s+2 the ranks that keep Blocks have step s, with its moments, and nobody
    writes there, though the owner dies at any message and another one asks ranks for what it needs."""
    tensors = (Tensor("w", "model", (7, 3), ADAM, 1), Tensor("u", "model", (3,), SGD(0.1, momentum=0.9), 2))
    total = _kept_steps(Bench(1, 3, tensors, rounds=4, hosts=(1, 2)), tensors, None)
    for kill in range(0, total, total // 12):
        _kept_steps(Bench(1, 3, tensors, rounds=4, hosts=(1, 2)), tensors, kill)


def _kept_steps(bench: Bench, tensors: Sequence[Tensor], kill: int | None) -> int:
    """Play all rounds; the owner dies at message `kill`. Returns the number of messages."""
    wanted = {tensor.name: reference(tensor, bench.ranks, bench.last) for tensor in tensors}
    here: dict[tuple[int, str], tuple[int, list[object], list[bytes]]] = {}
    steps = kept = 0
    while not all(worker.finished for worker in bench.workers):
        if steps == kill:
            bench.new_owner()
        for worker in bench.workers:
            for name, tensor in worker.rounds.tensors.items():
                if not tensor.keeps or not tensor.agreed:
                    continue
                pushed = tensor.version if tensor.unacknowledged is None else tensor.unacknowledged - 1
                known = here.get((worker.rank, name))
                if (
                    known is not None
                    and tensor.version <= known[0] + 1
                    and (tensor.unacknowledged or 0) <= known[0] + 1
                ):
                    assert [bytes(each) for each in known[1]] == known[2], (worker.rank, name, known[0], steps)  # type: ignore[call-overload]
                if tensor.unacknowledged is not None and pushed and (known is None or known[0] < pushed):
                    buffers = [tensor.state, *tensor.moments]
                    here[worker.rank, name] = pushed, list(buffers), [bytes(each) for each in buffers]
                    assert here[worker.rank, name][2][0] == wanted[name][pushed - 1].tobytes()
                    kept += 1
        assert bench.step()
        steps += 1
    bench.check_results()
    assert kept == len(tensors) * (bench.last - 1), "each tensor has one keeper, in each step"
    return steps


@pytest.mark.parametrize("who", [0, 1])
def test_a_full_disk_is_said_and_the_save_before_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: int
) -> None:
    place = tmp_path / "m.json"
    put_file = checkpoint.put_file

    def full(path: Path, parts: Sequence[memoryview]) -> None:
        if "-4-" in str(path) and path.name == f"rank-{who:05d}.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        if "-6-" in str(path):
            before.append(is_reference(place, 2))
        put_file(path, parts)

    before: list[int] = []
    monkeypatch.setattr(checkpoint, "put_file", full)
    with gang(tmp_path, 1, 1) as job:
        job.serve()
        job.share()
        job.play(training(place, 2, 7, 2))
        said = job.said[0].getvalue()
        assert "No space left on device" in said and ("step 4 was not saved" in said or "was not written" in said)
    assert before == [2, 2] and is_reference(place, 2) == 6
    assert [path.name for path in tmp_path.glob("m.json-*")] == ["m.json-6-00000000.saved"], "nothing is left of it"


def _save_for_ever(place: Path, step: int, kinds: dict[str, SavedTensor]) -> None:
    """What a forked child does until it is killed."""
    try:
        while True:
            step += 1
            folder = folder_of(place, step, os.getpid())
            numbers = np.full(50_000, step, np.float32)
            write_file(folder, 0, step, [Part("w", at, 0, numbers) for at in range(2)], kinds)
            known: dict[int, tuple[tensor_set.File, int]] = {}
            tensor_set.found_files(folder, kinds, known)
            complete(place, step, folder, kinds, [file for file, _ in known.values()])
    finally:
        os._exit(1)


def test_a_writer_that_is_killed_leaves_the_save_before(tmp_path: Path) -> None:
    """At any moment: the list that is there names files that are whole."""
    place, rng, kinds = tmp_path / "m.json", random.Random(5), {"w": SavedTensor("float32", (50_000,), 1)}
    seen = set()
    for _ in range(12):
        found = opened_set(place)
        child = os.fork()
        if not child:
            _save_for_ever(place, 0 if found is None else found.step, kinds)
        until_s = time.monotonic() + 5.0
        while opened_set(place) == found and time.monotonic() < until_s:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if (now := opened_set(place)) is not None:
            assert {float(each) for each in arrays_of(now)["w"][1]} == {float(now.step)}
            seen.add(now.step)
    assert len(seen) > 3 and len(list(tmp_path.glob("m.json-*.saved"))) < 4, "what killed ones left is removed"


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A saved step in two files."""
    path, kinds = tmp_path / "m.json", {"w": SavedTensor("float32", (6,), 1), "h": SavedTensor("bfloat16", (2,), 0)}
    folder, numbers = folder_of(path, 9, 1), np.arange(6, dtype=np.float32)
    write_file(folder, 0, 9, [Part("w", 0, 0, numbers[:4]), Part("w", 1, 0, numbers)], kinds)
    write_file(folder, 3, 9, [Part("w", 0, 4, numbers[4:]), Part("h", 0, 0, np.array([1, 2], "<u2"))], kinds)
    known: dict[int, tuple[tensor_set.File, int]] = {}
    assert tensor_set.found_files(folder, kinds, known)
    complete(path, 9, folder, kinds, [file for file, _ in known.values()])
    return path


def test_other_tools_read_the_files(place: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    found = safetensors.load_file(file_of(folder_of(place, 9, 1), 0))
    assert {name: each.tolist() for name, each in found.items()} == {
        "w from 0": [0, 1, 2, 3],
        "w moment 1": [0, 1, 2, 3, 4, 5],
    }


@pytest.mark.parametrize("flip", [None, 1])
def test_a_byte_that_changed_anywhere_is_seen(place: Path, flip: int | None) -> None:
    found = opened_set(place)
    assert found is not None
    whole = arrays_of(found)
    rng = random.Random(7)
    for path in (place, *sorted(folder_of(place, 9, 1).iterdir())):
        data = path.read_bytes()
        for at in {0, 7, 8, len(data) - 1, *(rng.randrange(len(data)) for _ in range(60))}:
            path.write_bytes(
                data[:at] if flip is None else data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            )
            try:
                now = opened_set(place)
                assert now is not None
                same = {name: [each.tobytes() for each in arrays] for name, arrays in arrays_of(now).items()}
                assert same == {name: [each.tobytes() for each in arrays] for name, arrays in whole.items()}
                assert path == place and flip is not None, "spaces of the list may be other ones"
            except CoveyError as error:
                assert "was not used" in error.what
        path.write_bytes(data)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=4) | st.floats(),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(
                st.sampled_from(("covey", "made", "step", "folder", "tensors", "files", "w", "crc32")), x, max_size=8
            )
        ),
        max_leaves=20,
    )
)
@settings(max_examples=examples(60), deadline=None)
def test_no_list_makes_another_error_than_one_in_words(said: object) -> None:
    import json

    text = dict(said) if isinstance(said, dict) else {"x": said}
    base = {
        "covey": "1",
        "made": "tensors",
        "step": 1,
        "folder": "m.json-1-00000000.saved",
        "tensors": {},
        "files": [],
    } | text
    base.pop("crc32", None)
    base["crc32"] = f"{tensor_set._number(base):08x}"
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"covey-list-{os.getpid()}" / "m.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(base))
    try:
        found = opened_set(path)
        assert found is not None
        arrays_of(found)
    except CoveyError:
        pass
    finally:
        path.unlink()
        path.parent.rmdir()


def test_a_part_that_no_file_has_is_missed(place: Path) -> None:
    found = opened_set(place)
    assert found is not None
    with pytest.raises(CoveyError, match="bytes of its tensors are there, and not all"):
        arrays_of(found._replace(files=found.files[:1]))


def test_a_model_that_is_another_one_is_refused_in_words(place: Path, tmp_path: Path) -> None:
    with gang(tmp_path, 1) as job:
        job.share()
        (client,) = job.clients
        assert client.save(place) == 9
        for name, update, has in (("w", SGD(0.1), "has float32 \\(6,\\) with 1"), ("x", ADAM, "has no such tensor")):
            with pytest.raises(CoveyError, match=has):
                client.model(name, np.ones(6, np.float32), update=update)
        w = client.model("w", np.ones(6, np.float32), update=SGD(0.1, momentum=0.9))
        assert w.tolist() == [0, 1, 2, 3, 4, 5] and client.moments("w").steps == 9
        assert client.moments("w").arrays[0].tolist() == [0, 1, 2, 3, 4, 5]
        with pytest.raises(ValueError, match="before the first model"):
            client.save(place)
        for every in (0, -1):
            with pytest.raises(ValueError, match="number of steps from 1 on"):
                saver_module.Saver(client.saves, place, every)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_what_is_another_users_is_not_overwritten(place: Path, tmp_path: Path) -> None:
    os.chown(place, 64_010, 64_010)
    with gang(tmp_path, 1) as job, pytest.raises(CoveyError, match="it belongs to user 64010"):
        job.clients[0].save(place)
