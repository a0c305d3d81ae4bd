"""Every object that a script gets from Covey, used in a thread, in a forked child, after pickling, and in another
interpreter: it works there, to the byte, or says what to do. Its system resources are never shared."""

import ast
import functools
import io
import os
import pickle  # noqa: TID251 - as multiprocessing and PyTorch do
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import covey
from covey import remote
from covey.arrays.volume_link import transfer
from covey.core.errors import CoveyError, RankLeft, Refused
from covey.core.ids import JobId
from covey.core.units import MIB
from covey.healing.neighbours import HealedRank
from covey.job.client import JobClient
from covey.job.job_state import ScriptState, begun
from covey.job.tensors import TensorClient, TensorError
from covey.kernel.this_process import OtherProcess, this_process
from covey.remote import RemoteArray, RemoteMemory, RemoteMemoryError
from covey.tensors.numbers.moments import Moments
from covey.tensors.same_host import layout as tensor_layout
from covey.tensors.same_host.memory import TensorMemory
from covey.wire.headers import Op
from tests.covey import used_elsewhere as used
from tests.covey.live_volume import ROOT, LiveVolume

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
ENVIRON = {
    "COVEY_SOCKET": "/nowhere/jobs.sock", "COVEY_JOB_ID": "j1", "COVEY_RANK": "0", "COVEY_WORLD_SIZE": "1",
    "COVEY_EPOCH": "1", "COVEY_TOKEN": "t", "COVEY_TABLES": "1",
}  # fmt: skip
WORKERS = 4


class Kind(NamedTuple):
    """One of Covey's classes, and how it behaves in another process."""

    made: Callable[[LiveVolume], Any]
    use: Callable[[Any], bytes]
    right: bytes | None = None
    """The bytes that `use` returns; None: those that it returned where the object was made."""
    forked: str = ""
    """The message for a forked child; empty: the object works there."""
    pickled: str = ""
    """The message for whoever pickles it; empty: the object works where it is unpickled."""


def a_memory(volume: LiveVolume) -> RemoteMemory:
    memory = RemoteMemory.at(volume.path)
    for at in range(used.PAGES):
        memory.write(at * used.PAGE, used.page(at))
    return memory


def an_array(volume: LiveVolume) -> RemoteArray:
    array = RemoteArray(volume.path, (8, used.PAGE), "uint8", offset=16 * MIB, way="explicit", local_budget="1 MiB")
    array[0:8] = np.frombuffer(used.page(7), np.uint8)
    return array


OPEN: list[TensorClient] = []
"""Clients that are closed after each test: their threads would continue in later tests."""


def a_client(**more: Any) -> TensorClient:
    client = TensorClient(JobId("j1"), 0, 1, lambda epoch, why, table: None, say=io.StringIO(), **more)
    OPEN.append(client)
    return client


def tensors_of_one() -> TensorClient:
    client = a_client(undecided=True)
    client.memory_is(TensorMemory(tensor_layout.make(1), 0, 1))
    return client


def a_handle(_: LiveVolume) -> Any:
    return tensors_of_one().push("h", np.ones(4, np.float32))


def a_state(_: LiveVolume) -> Any:
    client = a_client()
    return begun(client, HealedRank(client.rank, client.world_size), ScriptState(dict, lambda arrays, own: None, None))


SUMS = np.arange(4, dtype=np.float32).tobytes()
AGAIN = "open it again in th"
KINDS = {
    "RemoteMemory": Kind(a_memory, used.of_memory, b"all pages"),
    "RemoteArray": Kind(an_array, used.of_array, used.page(7), AGAIN, AGAIN),
    "Job": Kind(lambda _: JobClient(ENVIRON), used.of_job, b"j1", "covey.join()", "covey.join()"),
    "TensorClient": Kind(lambda _: tensors_of_one(), used.of_tensors, SUMS, "covey.join()", "covey.join()"),
    "TensorHandle": Kind(a_handle, lambda handle: bytes(handle.wait()), None, "covey.join()", "covey.join()"),
    "JobState": Kind(a_state, used.of_state, b"a step", "job.state", "job.state"),
    "Moments": Kind(lambda _: Moments(3, (np.ones(2),)), used.of_value),
    "SGD": Kind(lambda _: covey.SGD(rate=0.5), used.of_value),
    "Adam": Kind(lambda _: covey.Adam(rate=0.5), used.of_value),
    "CoveyError": Kind(lambda _: CoveyError("a", "b", "c"), used.of_error),
    "OtherProcess": Kind(lambda _: OtherProcess("a", "b", "c"), used.of_error),
    "RemoteMemoryError": Kind(lambda _: RemoteMemoryError("a", "b", "c"), used.of_error),
    "Refused": Kind(lambda _: Refused(4, "a", "b", "c"), used.of_error),
    "TensorError": Kind(lambda _: TensorError("shapes differ"), used.of_value),
    "RankLeft": Kind(lambda _: RankLeft("rank 1 has ended"), used.of_value),
}
HELD = {
    "AggregatorRounds": "TensorClient", "FaultedMemory": "RemoteArray", "Healing": "JobState", "JobClient": "Job",
    "PagePipe": "TensorClient", "Poster": "TensorClient", "RoundEnds": "TensorClient", "SharedRounds": "TensorClient",
    "DirectOwner": "TensorClient", "RankConnection": "TensorClient", "VolumeLink": "RemoteMemory", "WakePipe": "Job",
    "JittedWork": "begins anew (test_jax_share)", "ShareControl": "begins anew (test_sharing)",
    "QueuedWaits": "of ShareControl", "DeviceBuckets": "refuses in words (test_buckets)",
    "_Slots": "TensorClient", "ProcessTurns": "TensorClient", "Exchange": "DataBlocks", "GivingBlocks": "DataBlocks",
    "GlooConnections": "TensorClient", "DiskSpill": "DataBlocks", "SpillingStore": "DataBlocks",
    "Saver": "TensorClient", "HookedTurns": "takes none in a child (test_turns_taken)",
}  # fmt: skip
"""Classes that hold a socket, a thread or shared memory, and the object by which a script reaches each."""


@pytest.fixture(scope="module")
def volume() -> Iterator[LiveVolume]:
    with LiveVolume(lent=False) as live:
        yield live


@pytest.fixture
def made(volume: LiveVolume, request: pytest.FixtureRequest) -> Iterator[tuple[Kind, Any]]:
    kind = KINDS[request.param]
    thing = kind.made(volume)
    yield kind, thing
    if hasattr(thing, "close"):
        thing.close()
    while OPEN:
        OPEN.pop().close()


every_kind = pytest.mark.parametrize("made", KINDS, indirect=True)


def in_children(*works: Callable[[], bytes]) -> list[bytes]:
    """The output of each function in a child of its own; all begin at once."""
    begin_read, begin = os.pipe()
    reads, children = [], []
    for work in works:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(begin)
                os.read(begin_read, 1)
                os.write(write, work())
            finally:
                os._exit(0)
        os.close(write)
        reads.append(read)
        children.append(child)
    os.close(begin)
    os.close(begin_read)
    said = [_all_of(read) for read in reads]
    for child in children:
        os.waitpid(child, 0)
    return said


def _all_of(read: int) -> bytes:
    with os.fdopen(read, "rb") as pipe:
        return pipe.read()


def in_a_thread(work: Callable[[], bytes]) -> bytes:
    said: list[bytes] = []
    thread = threading.Thread(target=lambda: said.append(work()))
    thread.start()
    thread.join(30.0)
    return said[0]


def in_an_interpreter(use: Callable[[Any], bytes], pickled: bytes) -> bytes:
    argv = (sys.executable, "-P", "-m", "tests.covey.used_elsewhere", use.__name__)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, input=pickled, stdout=subprocess.PIPE, env=environ, check=True, timeout=60).stdout


def test_every_public_class_is_here() -> None:
    public = {name for name in (*covey.__all__, *remote.__all__) if isinstance(_public(name), type)}
    assert public - KINDS.keys() == set()


def _public(name: str) -> Any:
    return getattr(covey, name, None) or getattr(remote, name)


def test_whatever_holds_something_of_the_system_is_known_here() -> None:
    """A class that begins to hold a thread, a socket or mapped memory must be listed, with its behaviour after a
    fork."""
    holding = {
        "Thread",
        "socket",
        "socketpair",
        "mmap",
        "ArrayMemory",
        "pipe",
        "eventfd",
        "memfd_create",
        "dial",
        "greet",
    }
    found = set()
    for path in (Path(covey.__file__).parent).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(
                isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in holding
                for call in ast.walk(node)
            ):
                found.add(node.name)
    assert found - HELD.keys() == set()


@every_kind
def test_a_thread_uses_it(made: tuple[Kind, Any]) -> None:
    kind, thing = made
    right = kind.right if kind.right is not None else used.tried(kind.use, thing)
    assert in_a_thread(functools.partial(used.tried, kind.use, thing)) == right


@every_kind
def test_forked_children_have_right_contents_or_are_told(made: tuple[Kind, Any]) -> None:
    kind, thing = made
    here = kind.right
    if here is None and not kind.forked:
        here = used.tried(kind.use, thing)
    for said in in_children(*[functools.partial(_many, kind.use, thing)] * WORKERS):
        if kind.forked:
            assert b"fork" in said and kind.forked.encode() in said, said
        else:
            assert said == here
    right = used.tried(kind.use, thing)
    assert right == here or (here is None and b"fork" not in right), "where it was made, it goes on"


def _many(use: Callable[[Any], bytes], thing: Any) -> bytes:
    """The answer of several tries, to show what two processes share: the first one that differs, else the first."""
    said = [used.tried(use, thing) for _ in range(20)]
    return next((other for other in said if other != said[0]), said[0])


@every_kind
def test_pickled_it_works_or_says_what_to_do(made: tuple[Kind, Any]) -> None:
    kind, thing = made
    if kind.pickled:
        with pytest.raises(TypeError, match=r"cannot be pickled.*; next: ") as refused:
            pickle.dumps(thing)
        assert kind.pickled in str(refused.value)
        return
    pickled = pickle.dumps(thing)
    right = used.tried(kind.use, thing)
    again = pickle.loads(pickled)  # noqa: S301
    assert used.tried(kind.use, again) == right
    if hasattr(again, "close"):
        again.close()
    assert in_an_interpreter(kind.use, pickled) == right
    assert used.tried(kind.use, thing) == right


def test_children_of_a_memory_read_and_write_beside_their_parent(volume: LiveVolume) -> None:
    """Each child works in its part: it reads what it wrote, and afterwards every process reads all of it."""
    with a_memory(volume) as memory:
        memory.read(0, 1)
        part = used.PAGES // WORKERS

        def work(worker: int) -> bytes:
            for turn in range(10):
                for at in range(worker * part, (worker + 1) * part):
                    memory.write(at * used.PAGE, b"%d %d " % (at, turn) * 8)
                    if not memory.read(at * used.PAGE, 64).startswith(b"%d %d " % (at, turn)):
                        return b"wrong"
            memory.flush()
            return b"right"

        assert in_children(*(functools.partial(work, worker) for worker in range(WORKERS))) == [b"right"] * WORKERS
        assert all(memory.read(at * used.PAGE, 64).startswith(b"%d 9 " % at) for at in range(used.PAGES))


def test_a_fork_in_the_middle_of_a_request_fails_it_in_the_child_alone(volume: LiveVolume) -> None:
    """The handler of a signal may fork, for example: the answer goes to the parent, so the child never gets one."""
    with a_memory(volume) as memory:
        link, step = memory._link, memory._link.step
        children: list[int] = []

        def forks() -> None:
            if not children and link.busy:
                children.append(os.fork())
            step()

        link.step = forks  # type: ignore[method-assign]
        try:
            got = memory.read(0, used.PAGE)
        except RemoteMemoryError as error:
            os._exit(0 if "forked" in error.why else 1)
        if children[0] == 0:
            os._exit(2)
        assert got == used.page(0)
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0


def test_a_lock_that_a_thread_held_at_the_fork_is_free_in_the_child(volume: LiveVolume) -> None:
    with a_memory(volume) as memory:
        held, forked = threading.Event(), threading.Event()

        def holds() -> None:
            with memory._turn():
                held.set()
                forked.wait(30.0)

        thread = threading.Thread(target=holds)
        thread.start()
        assert held.wait(30.0)

        def work() -> bytes:
            return used.of_memory(memory) if memory._turn().acquire(blocking=False) else b"it is held"

        said = in_children(work)
        forked.set()
        thread.join()
        assert said == [b"all pages"]


def test_a_child_that_has_its_parents_pid_is_another_process() -> None:
    """In a pid namespace of its own, the first process of a container forks another first one."""
    pid = os.getpid()

    def work() -> bytes:
        os.getpid = lambda: pid
        return str(this_process()[0] == here[0] and this_process() != here).encode()

    here = this_process()
    assert in_children(work) == [b"True"]


def test_a_child_and_its_parent_are_each_given_their_own_answer(volume: LiveVolume) -> None:
    """The child's request is answered while the parent asks: with one shared connection and one count of requests, the
    parent would take the child's page for its own."""
    with a_memory(volume) as memory:
        asked_read, asked = os.pipe()
        goes_on, go_on = os.pipe()
        child = os.fork()
        if child == 0:
            status = 2
            try:
                os.close(go_on)
                into, failed = bytearray(used.PAGE), list[str]()
                transfer(memory._link, Op.FETCH, 1, memoryview(into), 1, failed)
                memory._link.push()
                os.write(asked, b"asked")
                os.read(goes_on, 1)  # until its parent has its answer
                memory._link.finish(lambda: memory._link.busy == 0)
                status = 0 if bytes(into) == used.page(1) and not failed else 1
            finally:
                os._exit(status)
        assert os.read(asked_read, 5) == b"asked"
        got = memory.read(2 * used.PAGE, used.PAGE)
        for end in (asked_read, asked, goes_on, go_on):
            os.close(end)
        assert got == used.page(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_closes_its_own_and_leaves_its_parents_connection(volume: LiveVolume) -> None:
    with a_memory(volume) as memory:
        before = memory._link.fileno()

        def work() -> bytes:
            held = memory._link.fileno()
            memory.close()
            return f"{held} {used.tried(used.of_memory, memory).decode()}".encode()

        (said,) = in_children(work)
        assert said == b"-1 ValueError: volume data was closed here"
        assert (memory._link.fileno(), used.of_memory(memory)) == (before, b"all pages")


def test_a_pickle_has_no_secret_and_one_that_was_closed_is_refused(volume: LiveVolume) -> None:
    memory = a_memory(volume)
    assert memory._at.token not in pickle.dumps(memory) or not any(memory._at.token)
    memory.close()
    with pytest.raises(ValueError, match="was closed here"):
        pickle.dumps(memory)
