"""Contributions that ranks read in scripts' memory: threads as ranks, real processes, and unreadable memory."""

import ctypes
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from covey.job.memory_offer import MemoryOffer
from covey.job.tensors import TensorClient, TensorError
from covey.tensors.numbers import peer_memory
from covey.tensors.numbers.arrays import Array
from covey.tensors.numbers.peer_memory import LentArray, Peer, Unreadable, address_of, myself
from covey.tensors.numbers.pieces import PIECE
from covey.tensors.numbers.sum_order import ORDERS, Order
from covey.tensors.same_host import layout as tensor_layout
from covey.tensors.same_host import lent_rounds
from covey.tensors.same_host.huge_pages import HUGE_BYTES, make_huge
from covey.tensors.same_host.lent_rounds import ADDRESS_WORDS, COULD_NOT, LENDS, PID, READS, TOKEN_AT, LentRounds
from covey.tensors.same_host.shared_rounds import SMALL_BYTES, SharedTensor
from tests.covey.test_host_rounds import TENSORS, check, gang
from tests.covey.test_shared_rounds import SharingRanks
from tests.plugins.aggregator.harness import Tensor, contribution, initial, reference

SIZE = 70_001
FORBIDDEN = Path(peer_memory.YAMA).exists() and Path(peer_memory.YAMA).read_text().strip() in ("2", "3")


def kernel_reads() -> bool:
    """Whether the kernel has the system call; some sandboxes do not."""
    try:
        return myself().is_there
    except Unreadable:
        return False


pytestmark = pytest.mark.skipif(not kernel_reads(), reason="process_vm_readv(2) is not permitted here")
MAY_READ = pytest.mark.skipif(FORBIDDEN, reason=f"{peer_memory.YAMA} forbids it here")


@pytest.fixture(autouse=True)
def every_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every array is lent, from its second round on, on any pages."""
    monkeypatch.setattr(lent_rounds, "LEAST_BYTES", SMALL_BYTES + 1)
    monkeypatch.setattr(lent_rounds, "SAME_ROUNDS", 1)
    monkeypatch.setattr(lent_rounds, "PLACES_MAX", 1 << 20)
    monkeypatch.setattr(lent_rounds, "make_huge", lambda array: True)


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rounds in which an array was lent."""
    rounds, lend = list[int](), LentRounds.lend

    def counted(self: LentRounds, flat: Array, round: int) -> bool:
        did = lend(self, flat, round)
        rounds.extend([round] * did)
        return did

    monkeypatch.setattr(LentRounds, "lend", counted)
    return rounds


class Faulty:
    """Some reads of other ranks' memory fail, each with the same chance."""

    def __init__(self, chance: float, seed: int) -> None:
        self.failed = 0
        self._rng, self._chance, self._real = random.Random(seed), chance, LentArray.__getitem__

    def getitem(self, array: LentArray, here: slice) -> Array:
        if self._rng.random() < self._chance:
            self.failed += 1
            raise Unreadable(14, "Bad address")
        return self._real(array, here)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(LentArray, "__getitem__", lambda array, here: self.getitem(array, here))


def play(ranks: int, order: Order, kind: str, rounds: int, seed: int, size: int = SIZE) -> SharingRanks:
    tensor = Tensor(f"t{seed}", "model" if kind == "model" else "grad", (size,))
    wanted = reference(tensor, ranks, rounds, order)
    shared = SharingRanks(ranks, order)
    shared.share()

    def script(rank: int, client: TensorClient) -> None:
        rng = random.Random(seed + rank)
        if tensor.kind == "model":
            client.model(tensor.name, initial(tensor, rank))
        for round, result in enumerate(wanted, 1):
            time.sleep(rng.choice((0.0, 0.0, 0.001)))
            array = contribution(tensor, rank, round)
            out = array if rng.random() < 0.5 else None
            assert client.push_pull(tensor.name, array, out=out).tobytes() == result.tobytes()
            array[:] = np.nan  # it is the script's again
        assert client.leave()
        way = client._ways[tensor.name]
        assert way is not None
        way.check()

    shared.play(script)
    return shared


# ---- who reads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["grad", "model"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_lent_round_has_the_bits_that_one_process_would_get(
    ranks: int, kind: str, order: Order, lent: list[int]
) -> None:
    shared = play(ranks, order, kind, 5, ranks)
    assert sorted(set(lent)) == ([2, 3, 4, 5] if kind == "grad" else [2, 3, 4, 5, 6])
    assert len(lent) == ranks * len(set(lent)) and not any(said.getvalue() for said in shared.said)


def test_a_rank_that_computes_is_read_meanwhile(lent: list[int]) -> None:
    shared, computing = SharingRanks(2), threading.Event()
    shared.share()

    def script(rank: int, client: TensorClient) -> None:
        array = np.ones(SIZE, np.float32)
        client.push_pull("x", array)
        if rank == 0:
            assert client.push_pull("x", array)[0] == 2
            computing.set()
        else:
            handle = client.push("x", array)
            assert computing.wait(10)
            assert handle.wait()[0] == 2

    shared.play(script)
    assert lent == [2, 2]


@pytest.mark.parametrize("hosts", [(2, 2), (4, 4), (4, 2, 2)])
def test_ranks_of_each_host_read_one_another(tmp_path: Path, hosts: tuple[int, ...], lent: list[int]) -> None:
    with gang(tmp_path, *hosts) as made:
        made.share()
        made.serve()
        made.play(check(TENSORS, sum(hosts), 5))
        assert set(lent) == {2, 3, 4, 5, 6}  # the first of a model is its initial value


@pytest.mark.long
def test_owners_that_are_replaced_lose_nothing_that_was_lent(tmp_path: Path, lent: list[int]) -> None:
    with gang(tmp_path, 2, 2) as made:
        made.share()
        made.serve()
        playing = made.start(check(TENSORS, 4, 30))
        for _ in range(3):
            time.sleep(0.1)
            made.replace_owners()
        made.end(playing)
        assert len(set(lent)) > 25


def test_what_one_rank_of_a_host_pushes_for_itself_is_copied(tmp_path: Path, lent: list[int]) -> None:
    """The Block's owner may ask for it once more after the round, when the script writes to its array again."""
    with gang(tmp_path, 1, 4) as made:
        made.share()
        made.serve()
        made.play(check(TENSORS, 5, 3))
        ways = [client._ways["w"] for client in made.clients]
        assert all(way is not None and way._lent is None for way in ways) and not lent


# ---- who cannot ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_what_cannot_be_read_is_copied_in_that_round(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any rank may fail in any part of any round, in any number of rounds."""
    faulty = Faulty(random.Random(seed).choice((0.02, 0.2, 1.0)), seed)
    faulty.install(monkeypatch)
    shared = play(2 + seed % 4, ORDERS[seed % 2], ("grad", "model")[seed // 2 % 2], 6, seed, 300_007)
    said = [each.getvalue() for each in shared.said]
    assert all(each.count("copies large tensors instead of sharing them") <= 1 for each in said), "each says it once"
    if faulty.failed:
        assert any("could not be read in round" in each and "Bad address" in each for each in said)


def test_after_that_nothing_of_the_tensor_is_lent(monkeypatch: pytest.MonkeyPatch, lent: list[int]) -> None:
    Faulty(1.0, 1).install(monkeypatch)
    play(3, "tree", "grad", 5, 1)
    assert set(lent) == {2}


def test_a_pid_that_is_another_process_is_not_read(monkeypatch: pytest.MonkeyPatch, lent: list[int]) -> None:
    """This happens where ranks of one host are in containers of their own."""
    here = myself()
    monkeypatch.setattr(lent_rounds, "myself", lambda: Peer(here.pid, here.at, bytes(16)))
    shared = play(2, "tree", "grad", 3, 1)
    assert not lent
    assert all("its pid is another process here" in said.getvalue() for said in shared.said)
    assert all(said.getvalue().count("copies large tensors") == 1 for said in shared.said)


def test_with_a_rank_of_an_older_version_nobody_lends(monkeypatch: pytest.MonkeyPatch, lent: list[int]) -> None:
    introduce = LentRounds.introduce

    def older(self: LentRounds) -> None:
        if self._at != 1:
            introduce(self)

    look = LentRounds.look

    def looks(self: LentRounds) -> None:
        if self._at != 1:
            look(self)

    monkeypatch.setattr(LentRounds, "introduce", older)
    monkeypatch.setattr(LentRounds, "look", looks)
    play(3, "tree", "grad", 3, 1)
    assert not lent


@pytest.mark.parametrize("said", ["copy", "0", ""])
def test_a_job_may_be_kept_from_it(said: str) -> None:
    offer = MemoryOffer(0, 2, {"COVEY_SHARED_TENSORS": said} if said else {})
    assert (offer.now, offer._lends) == {"copy": (1, False), "0": (0, True), "": (1, True)}[said]


def test_garbage_where_a_rank_says_that_it_lends_is_copied_or_told() -> None:
    """Whatever is stored there, the result is a sum, or an error that names the tensor, and no rank dies."""
    found = 0
    for seed in range(40):
        rng = random.Random(seed)
        shared = SharingRanks(2, patience_s=0.05)
        shared.share()
        array = np.ones(SIZE, np.float32)
        for _ in range(2):
            handles = [client.push("t", array) for client in shared.clients]
            assert [handle.wait()[0] for handle in handles] == [2.0, 2.0]
        handles = [client.push("t", array) for client in shared.clients]
        way = shared.clients[0]._ways["t"]
        assert isinstance(way, SharedTensor)
        words = way._words.view(np.uint8)[1]
        for _ in range(rng.choice((1, 3, 10))):
            at = 4 * rng.choice((READS, COULD_NOT, LENDS, PID, *ADDRESS_WORDS, 2 * TOKEN_AT)) + rng.randrange(4)
            words[at] = rng.randrange(256)
        try:
            assert handles[0].wait().tolist() == [2.0] * SIZE
            found += 1
        except TensorError as error:
            assert "'t': the memory it shares was overwritten: where rank 1 has its part" in str(error)
        shared.close()
    assert 0 < found < 40


# ---- real processes --------------------------------------------------------------------------------------------------

PROCESS = """
import os, sys, time
import numpy as np
import covey.tensors.same_host.lent_rounds as lent_rounds
from covey.core.ids import JobId
from covey.tensors.same_host.memory import TensorMemory
from covey.job.tensors import TensorClient, TensorError
rank, ranks, memory, uid = map(int, sys.argv[1:])
if uid:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    import ctypes
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, which a change of user takes away
lent_rounds.make_huge = lambda array: True
client = TensorClient(JobId("j1"), rank, ranks, lambda epoch, why, table: None, undecided=True)
client.memory_is(TensorMemory(memory, rank, ranks))
array, out = np.empty(3_000_000, np.float32), np.empty(3_000_000, np.float32)
client.barrier()
for round in range(1, 9):
    array[:] = np.arange(3_000_000) % 1000 + 1000 * rank + round
    client.push_pull("t", array, out=out)
    array[:] = -1
    wanted = ranks * (np.arange(3_000_000) % 1000 + round) + 1000 * sum(range(ranks))
    assert (out == wanted).all(), round
way = client._ways["t"]
print("lends" if way._words[rank, lent_rounds.LENDS] else "copies", way._lent.why, flush=True)
assert client.leave()
client.close()
"""


def run_processes(uids: list[int]) -> list[str]:
    memory = tensor_layout.make(len(uids))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), str(len(uids)), str(memory), str(uid)],
            pass_fds=(memory,), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, uid in enumerate(uids)
    ]  # fmt: skip
    os.close(memory)
    ended = [each.communicate(timeout=60) for each in started]
    assert [each.returncode for each in started] == [0] * len(uids), ended
    return [out.strip() for out, _ in ended]


@MAY_READ
def test_processes_of_one_user_read_one_another() -> None:
    assert run_processes([0, 0, 0]) == ["lends"] * 3


DIES = """
import os, signal, sys, time
import numpy as np
import covey.tensors.same_host.lent_rounds as lent_rounds
from covey.core.ids import JobId
from covey.tensors.same_host.memory import TensorMemory
from covey.job.tensors import TensorClient
rank, memory, pipe = map(int, sys.argv[1:])
lent_rounds.make_huge = lambda array: True
client = TensorClient(JobId("j1"), rank, 2, lambda epoch, why, table: None, undecided=True, patience_s=0.3)
client.memory_is(TensorMemory(memory, rank, 2))
array = np.ones(3_000_000, np.float32)
for round in range(4):
    client.push_pull("t", array)
if rank == 1:
    client._shared._run = lambda: None
    client.push("t", array)
    os.write(pipe, b"x")
    os.kill(os.getpid(), signal.SIGKILL)
os.read(pipe, 1)
time.sleep(0.2)
client.push_pull("t", array)
"""


@MAY_READ
def test_who_waits_for_a_rank_that_died_after_it_lent_says_so() -> None:
    """It waits as for a rank that died after it copied: the job is started anew."""
    memory, (read, write) = tensor_layout.make(2), os.pipe()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", DIES, str(rank), str(memory), str((read, write)[rank])],
            pass_fds=(memory, read, write), stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert started[0].stderr is not None
        said = started[0].stderr.readline()
        assert "rank 0, 1 has not added its part of this round yet; the memory of rank 1 could not be read" in said
        assert "in round 5: No such process" in said
        assert started[1].wait(10) == -signal.SIGKILL and started[0].poll() is None
    finally:
        for process in started:
            process.kill()
            process.communicate()
        for descriptor in (memory, read, write):
            os.close(descriptor)


@pytest.mark.long
@MAY_READ
@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to become others")
def test_processes_of_a_plain_user_read_one_another_and_of_two_copy() -> None:
    assert run_processes([65533, 65533]) == ["lends"] * 2
    first, second = run_processes([65533, 65534])
    assert first.startswith("copies the memory of rank 1 cannot be read: Operation not permitted; another user")
    assert second.startswith("copies the memory of rank 0 cannot be read: Operation not permitted; another user")


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    """A process that prints the address of 16 KiB of its memory, and sleeps."""
    text = "import numpy, time; a = numpy.arange(4096, dtype='f4'); print(a.ctypes.data, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@MAY_READ
def test_a_stopped_process_is_read_and_a_dead_one_is_not(other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    at = int(other.stdout.readline())
    array = LentArray(other.pid, at, np.dtype("f4"), 0)
    assert array[slice(0, 5)].tolist() == [0, 1, 2, 3, 4]
    os.kill(other.pid, signal.SIGSTOP)
    assert array[slice(4000, 4002)].tolist() == [4000, 4001]
    other.kill()
    other.wait()
    with pytest.raises(Unreadable, match="No such process"):
        array[slice(0, 5)]


def test_what_may_not_be_read_is_an_error_also_at_its_end() -> None:
    page, size = mmap.mmap(-1, 16 * 4096), 16 * 4096
    whole = np.frombuffer(page, np.uint8)
    array = LentArray(os.getpid(), address_of(whole), np.dtype("u1"), 0)
    assert len(array[slice(0, size)]) == size
    tail = ctypes.c_void_p(address_of(whole) + 8192), ctypes.c_size_t(size - 8192)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(*tail, 0) == 0
    try:
        assert len(array[slice(0, 8192)]) == 8192
        for here in (slice(4096, 16384), slice(8192, 8193)):
            with pytest.raises(Unreadable, match="Bad address"):
                array[here]
        with pytest.raises(ValueError, match="is the most"):
            array[slice(0, PIECE + 1)]
    finally:
        assert libc.mprotect(*tail, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_huge_pages_leave_what_lies_there_and_are_not_forced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = mmap.mmap(-1, 4 * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(page, np.uint8)
    array[:] = np.arange(len(array), dtype=np.uint32).view(np.uint8)[: len(array)]
    before = array.tobytes()
    make_huge(array)
    assert array.tobytes() == before
    assert not make_huge(array[: HUGE_BYTES - 1]), "too small for one"
    never = tmp_path / "enabled"
    never.write_text("always madvise [never]\n")
    monkeypatch.setattr("covey.tensors.same_host.huge_pages.ENABLED", str(never))
    assert not make_huge(array)
    monkeypatch.setattr("covey.tensors.same_host.huge_pages.ENABLED", str(tmp_path / "none"))
    assert not make_huge(array)


@pytest.mark.parametrize(("scope", "asks"), [("0", False), ("1", True), ("2", False), ("", False)])
def test_ranks_let_others_read_where_only_parents_might(
    scope: str, asks: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, asked = tmp_path / "ptrace_scope", list[int]()
    if scope:
        file.write_text(f"{scope}\n")
    monkeypatch.setattr(peer_memory, "YAMA", str(file))
    monkeypatch.setattr(peer_memory, "_libc", SimpleNamespace(prctl=lambda option, *rest: asked.append(option)))
    peer_memory.let_ranks_read()
    assert asked == [peer_memory.PR_SET_PTRACER] * asks
