"""Bytes that a process may send to the pager of a volume, and the pager to it: they are a message or an error, and an
array that is accepted is inside its volume."""

import os
import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.units import MIB
from covey.kernel import memfd, userfault
from covey.wire import array_wire as arraywire
from covey.wire.array_wire import (
    ArrayDone,
    ArrayFrame,
    ArrayOpened,
    ArrayRefused,
    ArrayResumed,
    ArrayWireError,
    AskArray,
    OpenArray,
)
from tests.covey.live_volume import LiveVolume, faults_are_possible

AN_ARRAY = OpenArray(arraywire.VERSION, 8192, 4 * MIB, 65536, MIB, 1 << 40, True)
TO_PAGER: list[ArrayFrame] = [AN_ARRAY, AskArray(7, "pin", 3, 9), AskArray(1, "flush")]
TO_ARRAY: list[ArrayFrame] = [ArrayOpened(MIB), ArrayRefused("what", "why", "next"), ArrayResumed(), ArrayDone(7, "no")]


@pytest.mark.parametrize("frame", TO_PAGER + TO_ARRAY, ids=lambda frame: type(frame).__name__)
def test_an_array_message_comes_back_as_it_was_said(frame: ArrayFrame) -> None:
    decoder: Any = arraywire.to_pager if frame in TO_PAGER else arraywire.to_array
    assert arraywire.unpack(arraywire.pack(frame), decoder) == frame


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(arraywire.pack(draw(st.sampled_from(TO_PAGER + TO_ARRAY))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return bytes(data)


@given(data=st.binary(max_size=400) | damaged())
def test_any_bytes_are_an_array_message_or_an_error(data: bytes) -> None:
    decoders: tuple[Any, Any] = (arraywire.to_pager, arraywire.to_array)
    for decoder in decoders:
        try:
            found: object = arraywire.unpack(data, decoder)
        except ArrayWireError:
            continue
        assert isinstance(found, ArrayFrame)
        if isinstance(found, AskArray):
            assert 0 <= found.first <= 1 << 47 and 0 <= found.end <= 1 << 47


NUMBER = st.integers(0, 1 << 47) | st.integers(0, 64).map(lambda n: n * 4096) | st.integers(0, 30).map(lambda n: 1 << n)


@given(offset=NUMBER, size=NUMBER, chunk=NUMBER, address=NUMBER, page=st.sampled_from([512, 4096, 65536]))
def test_an_array_that_is_accepted_lies_inside_its_volume(
    offset: int, size: int, chunk: int, address: int, page: int
) -> None:
    volume = 64 * MIB
    asked = OpenArray(arraywire.VERSION, offset, size, chunk, MIB, address, True)
    if not arraywire.wrong(asked, volume, page, 4096):
        assert 0 < size <= volume - offset
        assert chunk % max(page, 4096) == 0 and 4096 <= chunk <= arraywire.CHUNK_MAX
        assert offset % page == 0 and size % max(page, 4096) == 0 and address % 4096 == 0


# ---- a real pager ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def volume() -> Iterator[LiveVolume]:
    with LiveVolume(8 * MIB, lent=False) as volume:
        volume.run('RemoteArray(PATH, 10, local_budget="1 MiB").close()')
        yield volume


def stranger(volume: LiveVolume) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found.settimeout(10)
    found.connect(f"{volume.run_dir}/arr-data.sock")
    return found


def given_memory(size: int, seals: int = memfd.SHRINK | memfd.GROW | memfd.SEAL) -> int:
    import fcntl

    descriptor = os.memfd_create("a-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, memfd.F_ADD_SEALS, seals)
    return descriptor


WRONG = ["no userfaultfd", "a pipe as memory", "unsealed", "sealed against writing", "other size", "no lifeline"]


@pytest.mark.rack
@pytest.mark.skipif(not faults_are_possible(), reason="this kernel gives no userfaultfd")
@pytest.mark.parametrize("what", WRONG)
def test_descriptors_that_are_not_those_of_an_array_are_refused(volume: LiveVolume, what: str) -> None:
    faults, (mine, theirs) = userfault.opened().descriptor, socket.socketpair()
    read, write = os.pipe()
    memory = given_memory(MIB)
    unsealed, closed, small = given_memory(MIB, 0), given_memory(MIB, 15), given_memory(MIB // 2)
    handed = {
        "no userfaultfd": [memory, memory, theirs.fileno(), 2],
        "a pipe as memory": [faults, read, theirs.fileno(), 2],
        "unsealed": [faults, unsealed, theirs.fileno(), 2],
        "sealed against writing": [faults, closed, theirs.fileno(), 2],
        "other size": [faults, small, theirs.fileno(), 2],
        "no lifeline": [faults, memory, write, 2],
    }[what]
    asked = OpenArray(arraywire.VERSION, 0, MIB, 65536, MIB, 1 << 40, True)
    with stranger(volume) as stream:
        socket.send_fds(stream, [arraywire.pack(asked)], handed)
        answer = arraywire.unpack(stream.recv(4096), arraywire.to_array)
        assert isinstance(answer, ArrayRefused), answer
        assert stream.recv(10) == b""
    for descriptor in (faults, read, write, memory, unsealed, closed, small):
        os.close(descriptor)
    mine.close()
    theirs.close()


@pytest.mark.rack
@pytest.mark.skipif(not faults_are_possible(), reason="this kernel gives no userfaultfd")
def test_nonsense_ends_its_own_connection_and_the_pager_keeps_no_descriptor(volume: LiveVolume) -> None:
    keeper = volume.pagers()[0]
    with stranger(volume):
        before = len(os.listdir(f"/proc/{keeper}/fd"))
    null = os.open(os.devnull, os.O_RDONLY)
    asked = arraywire.pack(AN_ARRAY)
    for data, descriptors in (
        (b"\xff" * 100, []),
        (b"x" * 4097, []),
        (asked, []),
        (asked, [null] * 3),
        (asked, [null] * 9),
        (arraywire.pack(AskArray(1, "flush")), [null] * 4),
        (asked[:-3], [null] * 4),
    ):
        with stranger(volume) as stream:
            socket.send_fds(stream, [data], descriptors)
            rest = stream.recv(4096)
            assert not rest or isinstance(arraywire.unpack(rest, arraywire.to_array), ArrayRefused)
    os.close(null)
    silent = [stranger(volume) for _ in range(70)]
    assert any(each.recv(10) == b"" for each in silent[64:]), "more than 64 that say nothing are closed"
    for each in silent:
        each.close()
    assert volume.run('RemoteArray(PATH, 10, local_budget="1 MiB").close(); print("served")') == "served\n"
    assert len(os.listdir(f"/proc/{keeper}/fd")) <= before + 1
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0


LIES = """
import fcntl, mmap, socket, threading
from covey.kernel import memfd, userfault
from covey.wire import array_wire as arraywire
from covey.arrays.faulted_memory import FaultedMemory
real = userfault.register
{lie}
try:
    array = RemoteArray(PATH, 1_000_000, "uint8", local_budget="1 MiB")
    array._faults._connection.send({data})
    print(array._faults._connection.recv(100), flush=True)
except (RemoteMemoryError, OSError) as error:
    print(error, flush=True)
signal.signal(signal.SIGBUS, signal.SIG_DFL)
time.sleep(30)
"""


@pytest.mark.rack
@pytest.mark.skipif(not faults_are_possible(), reason="this kernel gives no userfaultfd")
@pytest.mark.parametrize(
    "data", ["b'nonsense'", "arraywire.pack(arraywire.OpenArray(1, 0, 4096, 4096, 4096, 0, True))"]
)
def test_a_job_that_lies_loses_its_array_and_no_other(volume: LiveVolume, data: str) -> None:
    """Its lifeline ends with the array, so SIGBUS ends the job: it must not wait for faults without an answer."""
    other = volume.script(
        'array = RemoteArray(PATH, 100_000, "uint8", offset=4 * 2**20, local_budget="1 MiB")\n'
        'print("open", flush=True); sys.stdin.readline(); array.array[:] = 3; array.close(); print("good", flush=True)'
    )
    assert other.stdout is not None and other.stdout.readline() == "open\n"
    liar = volume.script(LIES.format(lie="", data=data))
    assert liar.wait(timeout=30) == -7
    liar.communicate()
    said, errors = other.communicate("go on\n", timeout=30)
    assert said == "good\n", errors
