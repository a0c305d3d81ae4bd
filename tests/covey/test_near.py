"""Ranks and an aggregator of one host: its unix socket, pages instead of copies, results copied as they come."""

import asyncio
import ctypes
import fcntl
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agent.ports.memory.pages import MemfdPages
from agent.ports.network.bytes import SocketBytes
from covey.core.ids import JobId
from covey.job.tensors import TensorClient
from covey.kernel import memfd
from covey.ports.streams import ByteStream
from covey.tensors.aggregator import push_memory
from covey.tensors.aggregator.early_copy import EarlyCopy
from covey.tensors.aggregator.link import TensorLink
from covey.tensors.aggregator.rounds import Rounds
from covey.tensors.numbers.spoken import Spoken
from covey.tensors.numbers.tensor_wire import (
    HEADER_BYTES,
    Declared,
    Header,
    Payload,
    TensorOp,
    TensorWireError,
    frame,
    is_lasting,
    job_hash,
    parse,
    verify,
)
from covey.tensors.owner.memory import Arena, mapped
from covey.tensors.owner.rank_frames import RankFrames
from covey.tensors.owner.sums import TensorSum
from covey.wire import page_pipe
from covey.wire.page_pipe import PagePipe
from covey.wire.splicing import LEAST_BYTES, PageStream
from plugins.aggregator.datapath.links import WorkerLink
from tests.covey.test_direct import BadCard
from tests.covey.test_tensors import EPOCH, Ranks, deltas, until
from tests.plugins.aggregator.harness import added
from tests.plugins.aggregator.loopback import AggdThread, Quiet
from tests.quiet import quiet

SHAPE = (300_000,)


@pytest.fixture
def near(tmp_path: Path) -> Iterator[AggdThread]:
    running = AggdThread(tmp_path, near="near.sock")
    yield running
    running.finish()


def near_links(ranks: Ranks) -> list[bool]:
    links = [client._far.table(0)._link for client in ranks.clients]
    return [link is not None and link.near for link in links]


def play(ranks: Ranks, script: Callable[[int, TensorClient], None]) -> None:
    """Run the script until all ranks have ended; clients that wait for ever are closed."""

    def end() -> None:
        for client in ranks.clients:
            client.close()

    over = threading.Timer(15.0, end)
    over.start()
    try:
        ranks.end(ranks.start(script))
    finally:
        over.cancel()


@pytest.mark.parametrize("in_place", [False, True])
def test_sums_over_its_socket_have_the_same_bits_and_arrays_may_change_right_after(
    near: AggdThread, in_place: bool
) -> None:
    ranks = Ranks(3)
    wrong: list[tuple[int, int]] = []

    def script(rank: int, client: TensorClient) -> None:
        given = np.empty(SHAPE, np.float32)
        out = given if in_place else np.empty(SHAPE, np.float32)
        for round in range(6):
            given[:] = deltas(rank, round, SHAPE)
            client.push_pull("g", given, out=out)
            expected = added([deltas(each, round, SHAPE) for each in range(3)], "tree")
            wrong.extend([(rank, round)] * (out.tobytes() != expected.tobytes()))
            given[:] = np.nan
        assert all(near_links(ranks))

    ranks.moved(near.serve("j1", EPOCH + 1, 3))
    play(ranks, script)
    assert not wrong and not ranks.lost


def test_an_aggregator_that_is_lost_between_changes_no_bit(near: AggdThread, tmp_path: Path) -> None:
    other_dir = tmp_path / "other"
    other_dir.mkdir()
    first = AggdThread(other_dir, near="near.sock")
    ranks = Ranks(2)
    results: dict[tuple[int, int], bytes] = {}
    half, gone = threading.Barrier(2), threading.Event()

    def script(rank: int, client: TensorClient) -> None:
        given = np.empty(SHAPE, np.float32)
        for round in range(4):
            given[:] = deltas(rank, round, SHAPE)
            if round == 2 and rank == 1:  # rank 0 has pushed, and waits
                assert gone.wait(10)
            handle = client.push("g", given, out=given)
            if round == 2 and rank == 0:
                until(lambda: bool(first.now().jobs[0].received_bytes > 4 * SHAPE[0] * 4))
                first.kill()
                ranks.moved(near.serve("j1", EPOCH + 2, 2))
                gone.set()
            results[rank, round] = handle.wait().tobytes()
            half.wait(10)

    ranks.moved(first.serve("j1", EPOCH + 1, 2))
    play(ranks, script)
    for rank, round in results:
        expected = added([deltas(each, round, SHAPE) for each in range(2)], "tree")
        assert results[rank, round] == expected.tobytes(), (rank, round)


def test_ranks_here_and_elsewhere_get_each_its_checksum(near: AggdThread) -> None:
    ranks = Ranks(2)
    at = near.serve("j1", EPOCH + 1, 2)
    ranks.clients[0].moved(at)
    ranks.clients[1].moved(msgspec.structs.replace(at, near=""))
    results: dict[int, bytes] = {}

    def script(rank: int, client: TensorClient) -> None:
        for _ in range(3):
            results[rank] = client.push_pull("g", deltas(rank, 0, SHAPE)).tobytes()
        assert near_links(ranks) == [True, False]

    play(ranks, script)
    expected = added([deltas(each, 0, SHAPE) for each in range(2)], "tree").tobytes()
    assert set(results.values()) == {expected} and not ranks.lost


def test_where_there_is_no_such_socket_ranks_come_over_tcp(near: AggdThread) -> None:
    ranks = Ranks(1)
    at = near.serve("j1", EPOCH + 1, 1)
    ranks.moved(msgspec.structs.replace(at, near=at.near + ".other"))
    play(ranks, lambda rank, client: client.barrier())
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = TensorLink(f"127.0.0.1:{server.getsockname()[1]}", near="/nowhere")
        assert not link.near
        link.close()


def test_its_socket_is_for_every_user_and_a_second_process_goes_on_without(near: AggdThread, tmp_path: Path) -> None:
    assert os.stat(near.aggd.near).st_mode & 0o777 == 0o666
    second = AggdThread(tmp_path, near="near.sock", control="other.sock")
    assert not second.aggd.near and "cannot listen on a unix socket" in second.log.warnings[0]
    second.finish()


def test_numbers_of_this_host_are_not_checked_and_headers_are() -> None:
    head, payload = frame(TensorOp.PUSH, 1, 2, payload=b"1234", near=True)
    verify(head, b"1235", near=True)
    with pytest.raises(TensorWireError):
        verify(head, payload)
    for at in range(HEADER_BYTES):
        wrong = bytearray(head)
        wrong[at] ^= 1
        with pytest.raises(TensorWireError):
            parse(wrong)
            verify(wrong, payload, near=True)
    head, _ = frame(TensorOp.OPEN, 1, 2, payload=b"1234", near=True)
    with pytest.raises(TensorWireError):
        verify(head, b"1235", near=True)
    unlike = [
        op for op in TensorOp if frame(op, 1, 2, payload=b"12")[0] != frame(op, 1, 2, payload=b"12", near=True)[0]
    ]
    assert set(unlike) == {TensorOp.PUSH, TensorOp.STATE, TensorOp.RESULT, TensorOp.TELL, TensorOp.TOLD}
    assert [op for op in TensorOp if is_lasting(frame(op, 1, 2)[0])] == [TensorOp.PUSH, TensorOp.RESULT]


@pytest.mark.parametrize("of", ["pushes", "results"])
def test_a_bit_that_a_card_flips_is_not_added(near: AggdThread, of: str) -> None:
    """One rank is here and shares memory, the other one's frames cross a card."""
    at, ranks = near.serve("j1", EPOCH + 1, 2), Ranks(2)
    card = BadCard(at.address, of)
    ranks.clients[0].moved(at)
    ranks.clients[1].moved(msgspec.structs.replace(at, address=card.address, near=""))
    sums(ranks, 4, lost=[1])
    assert card.flipped and near.now().bad_frames == (of == "pushes")
    card.close()


# ---- pages -----------------------------------------------------------------------------------------------------------


def numbers(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, count, np.uint8)


def test_pages_of_any_place_and_length_come_as_they_are() -> None:
    ours, theirs = socket.socketpair()
    pipe, data = PagePipe(), numbers(3 << 20)
    with ours, theirs:
        for first, end in ((0, 1), (1, 4097), (4095, 70_001), (13, 3 << 20)):
            found = bytearray(end - first)

            def read(into: bytearray = found) -> None:
                view = memoryview(into)
                while view.nbytes:
                    view = view[theirs.recv_into(view) :]

            reader = threading.Thread(target=read)
            reader.start()
            view = data.data[first:end]
            while view.nbytes:
                count = pipe.fill(view)
                view = view[count:]
                while count:
                    count -= pipe.drain(ours.fileno(), count, waits=True)
            reader.join(10)
            assert found == data[first:end].tobytes()
    pipe.close()


def test_what_was_given_back_and_not_read_yet_is_not_overwritten() -> None:
    """A job ends while its last result is on its way to a rank: its memory may be needed for another job."""
    size = 200_000
    block = bytearray(4 * size)  # glibc: from now on memory of this size is not mapped for itself
    del block
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        pipe, array = PagePipe(), Arena().take(size, np.dtype(np.uint8))
        array[:] = 7
        sent = 0
        while sent < size // 2:
            count = pipe.fill(array.data[sent : size // 2])
            sent += pipe.drain(ours.fileno(), count, waits=True)
        del array
        gc.collect()
        others = [np.full(size, 9, np.uint8) for _ in range(4)]
        found = bytearray(sent)
        assert theirs.recv_into(found, 0, socket.MSG_WAITALL) == sent
        assert found == b"\7" * sent and others
        pipe.close()


def test_memory_that_cannot_be_given_is_copied(monkeypatch: pytest.MonkeyPatch, near: AggdThread) -> None:
    def refuses(*args: object) -> int:
        ctypes.set_errno(14)
        return -1

    link = TensorLink("127.0.0.1:1", near=near.aggd.near)
    monkeypatch.setattr(page_pipe, "_give", refuses)
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with theirs:
        link.sock.close()
        link.sock = ours
        sent = frame(TensorOp.PUSH, 1, 2, payload=bytes(numbers(70_000)), near=True)
        link.send((sent,))
        found = bytearray(HEADER_BYTES + 70_000)
        assert theirs.recv_into(found, 0, socket.MSG_WAITALL) == len(found)
        assert found == sent[0] + bytes(sent[1])
        link.close()


async def lent(path: Path) -> tuple[ByteStream, ByteStream]:
    accepted: asyncio.Queue[ByteStream] = asyncio.Queue()

    async def accept(stream: ByteStream) -> None:
        accepted.put_nowait(stream)
        await asyncio.sleep(3600)

    port = SocketBytes(Quiet())
    await port.listen(f"unix:{path}", accept, bulk=True)
    far = await port.connect(f"unix:{path}")
    return await accepted.get(), far


async def test_a_slow_reader_holds_up_who_lends_and_gets_all(tmp_path: Path) -> None:
    near, far = await lent(tmp_path / "s.sock")
    stream: object = near
    assert isinstance(stream, PageStream)
    data, heads = numbers(9 << 20), [bytes([at]) * 40 for at in range(3)]
    lending = asyncio.ensure_future(_lend_all(stream, heads, data))
    await quiet()
    assert not lending.done(), "the reader has read nothing"
    for at, head in enumerate(heads):
        found = bytearray(40 + (3 << 20))
        await far.read_into(memoryview(found))
        assert found[:40] == head and found[40:] == data[at * (3 << 20) : (at + 1) * (3 << 20)].tobytes()
    await lending
    await near.write(b"after")
    found = bytearray(5)
    await far.read_into(memoryview(found))
    assert found == b"after"


async def _lend_all(stream: PageStream, heads: list[bytes], data: np.ndarray) -> None:
    for at, head in enumerate(heads):
        await stream.lend(head, data.data[at * (3 << 20) : (at + 1) * (3 << 20)])


@pytest.mark.parametrize("how", ["closed here", "closed there", "cancelled"])
async def test_who_lends_is_told_of_the_end_and_keeps_no_descriptor(tmp_path: Path, how: str) -> None:
    near, far = await lent(tmp_path / "s.sock")
    stream: object = near
    assert isinstance(stream, PageStream)
    gc.collect()  # what other tests left is not counted
    before = len(os.listdir("/proc/self/fd"))
    lending = asyncio.ensure_future(stream.lend(b"head", numbers(9 << 20).data))
    await quiet()
    assert not lending.done() and len(os.listdir("/proc/self/fd")) == before + 3
    ends: dict[str, Callable[[], object]] = {"closed here": near.close, "closed there": far.close}
    ends.get(how, lending.cancel)()
    with pytest.raises((ConnectionError, asyncio.CancelledError)):
        await asyncio.wait_for(lending, 5.0)
    near.close()
    far.close()
    await quiet()
    assert len(os.listdir("/proc/self/fd")) == before - 2


# ---- copies ----------------------------------------------------------------------------------------------------------

TWO_PARTS = Declared("g", "grad", (6,), 16)
RESULT = bytes(range(24))


@pytest.mark.parametrize("parts", [(), (0,), (1,), (1, 0), (0, 1)])
def test_a_result_is_whole_whatever_came_early(parts: tuple[int, ...]) -> None:
    out, given = bytearray(b"." * 24), bytearray(b"." * 24)
    copy = EarlyCopy(TWO_PARTS, memoryview(out), [given])
    for part in parts:
        start, end = TWO_PARTS.span(part)
        copy.came(part, RESULT[start:end])
        assert out[start:end] == RESULT[start:end], "it is copied as it comes"
    copy.came(2, b"moments of an optimizer")
    copy.finish(RESULT)
    assert out == RESULT and given == b"." * 24


def test_what_was_pushed_stays_until_the_result_is_whole() -> None:
    """An aggregator that died now would need the contribution again."""
    memory = bytearray(b"." * 40)
    out, given = memoryview(memory)[:24], memoryview(memory)[16:40]
    copy = EarlyCopy(TWO_PARTS, out, [given])
    copy.came(0, RESULT[:16])
    assert memory == b"." * 40
    copy.finish(RESULT)
    assert out == RESULT


def test_parts_that_came_while_the_script_pushed_are_at_hand_until_they_come_again() -> None:
    """It copies them when it begins to wait."""
    rounds = Rounds(JobId("j1"), 0, 1)
    list(rounds.declare_as(TWO_PARTS))
    list(rounds.push("g", bytes(24)))
    tensor = rounds.tensors["g"]
    assert tensor.parts_here() == [] and tensor.part_here(1) is None
    head, payload = frame(
        TensorOp.RESULT, job_hash(JobId("j1")), 0, key=tensor.key, part=1, round=1, payload=RESULT[16:]
    )
    rounds.destination(parse(head))[:] = payload
    list(rounds.heard(parse(head), payload))
    here = tensor.part_here(1)
    assert tensor.parts_here() == [1] and here is not None and bytes(here) == RESULT[16:]
    list(rounds.connected())
    assert tensor.parts_here() == [] and tensor.part_here(1) is None, "the next owner sends them all again"


def test_of_a_result_that_comes_again_all_is_copied_again() -> None:
    out = bytearray(24)
    copy = EarlyCopy(TWO_PARTS, memoryview(out), [])
    copy.came(0, b"x" * 16)
    copy.forget()
    copy.finish(RESULT)
    assert out == RESULT


# ---- memory for what ranks push ----


class Pushes:
    """What an aggregator heard: operations by rank, and the memory that each connection was given."""

    def __init__(self, running: AggdThread, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running, self.ops = running, list[tuple[int, TensorOp, int]]()
        heard = WorkerLink._heard

        def hears(link: WorkerLink, header: Header, payload: Payload) -> None:
            self.ops.append((link.rank, header.op, header.round))
            heard(link, header, payload)

        monkeypatch.setattr(WorkerLink, "_heard", hears)

    def rounds(self, rank: int, op: TensorOp) -> set[int]:
        return {round for who, found, round in self.ops if (who, found) == (rank, op)}


def sums(ranks: Ranks, rounds: int, size: tuple[int, ...] = SHAPE, lost: Sequence[int] = ()) -> None:
    """Some rounds with arrays that change right after, checked bit by bit. `lost`: ranks that lose a connection."""
    wrong: list[tuple[int, int]] = []

    def script(rank: int, client: TensorClient) -> None:
        given = np.empty(size, np.float32)
        for round in range(rounds):
            given[:] = deltas(rank, round, size)
            result = client.push_pull("g", given)
            given[:] = np.nan
            expected = added([deltas(each, round, size) for each in range(len(ranks.clients))], "tree")
            wrong.extend([(rank, round)] * (result.tobytes() != expected.tobytes()))

    play(ranks, script)
    assert not wrong and [rank for rank, *_ in ranks.lost] == list(lost)


def test_what_ranks_of_its_host_push_is_in_memory_that_both_see(
    near: AggdThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second round on no number of near ranks passes through connections; a rank elsewhere sends its own."""
    pushes, ranks = Pushes(near, monkeypatch), Ranks(3)
    at = near.serve("j1", EPOCH + 1, 3)
    for rank in (0, 1):
        ranks.clients[rank].moved(at)
    ranks.clients[2].moved(msgspec.structs.replace(at, near=""))
    sums(ranks, 6)
    for rank in (0, 1):
        assert pushes.rounds(rank, TensorOp.PLACED) >= {3, 4, 5, 6} and 1 in pushes.rounds(rank, TensorOp.PUSH)
        assert not pushes.rounds(rank, TensorOp.PLACED) & pushes.rounds(rank, TensorOp.PUSH)
    assert pushes.rounds(2, TensorOp.PUSH) == {1, 2, 3, 4, 5, 6} and not pushes.rounds(2, TensorOp.PLACED)
    until(lambda: not near.now().jobs[0].joined)
    assert near.aggd._shared.for_pushes.used == 0, "it is given back with the connection"


@pytest.mark.parametrize("why", ["no memory is free", "the kernel has none", "the rank cannot map it", "lanes add"])
def test_where_no_memory_is_shared_ranks_send_what_they_push(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: object) -> object:
        raise OSError("no memory")

    free = 4 * 4 * SHAPE[0] - 1 if why == "no memory is free" else 1 << 30  # a quarter is for what ranks push
    if why == "the kernel has none":
        monkeypatch.setattr(MemfdPages, "make_handed", none)
    if why == "the rank cannot map it":
        monkeypatch.setattr(push_memory, "map_shared", none)
    running = AggdThread(tmp_path, near="near.sock", memory_bytes_max=free)
    if why == "lanes add":
        running.aggd._shared = running.aggd._shared._replace(source=mapped)
    pushes, ranks = Pushes(running, monkeypatch), Ranks(2)
    ranks.moved(running.serve("j1", EPOCH + 1, 2))
    sums(ranks, 3)
    assert all(near == {1, 2, 3} for near in (pushes.rounds(rank, TensorOp.PUSH) for rank in range(2)))
    running.finish()


def test_a_small_tensor_is_sent(near: AggdThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frame and numbers go in one call."""
    pushes, ranks = Pushes(near, monkeypatch), Ranks(2)
    ranks.moved(near.serve("j1", EPOCH + 1, 2))
    sums(ranks, 3, (LEAST_BYTES // 4 - 16,))
    assert pushes.rounds(0, TensorOp.PUSH) == pushes.rounds(1, TensorOp.PUSH) == {1, 2, 3}


def test_memory_whose_size_may_change_is_not_mapped() -> None:
    """An aggregator that cut it off would end the rank with SIGBUS."""
    for seals in (0, memfd.SHRINK, memfd.GROW):
        descriptor = os.memfd_create("pushes", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, 4096)
        fcntl.fcntl(descriptor, memfd.F_ADD_SEALS, seals)
        with pytest.raises(OSError, match="not sealed"):
            push_memory.mapped(descriptor, 4096)
        with pytest.raises(OSError):
            os.fstat(descriptor)
    with pytest.raises(OSError, match="8192 bytes"):
        push_memory.mapped(MemfdPages().make_handed(4096).descriptor, 8192)


def test_a_piece_in_memory_that_nobody_gave_ends_the_connection() -> None:
    tensor = TensorSum(Declared("g", "grad", (4,), 16), 1)
    tensor.open(0, 0, False)
    frames = RankFrames(0, lambda key: tensor)
    header = parse(frame(TensorOp.PLACED, 1, 2, key=7)[0])
    with pytest.raises(TensorWireError, match="was given none"):
        frames.expect(header)
    frames.memories[7] = b""
    frames.expect(header)
    with pytest.raises(TensorWireError, match="type"):
        frames.expect(header._replace(type=2))


def test_pieces_of_two_sums_lie_one_after_the_other() -> None:
    """Ranks 1 and 2 of 4 are no sum of the tree: each has a place of its own, which begins at a cache line."""
    spoken = Spoken(Declared("g", "grad", (7,), 16, "tree", type="float16"), (1, 3), 4)
    assert [spoken.place(number) for number in range(spoken.count)] == [(0, 14), (64, 78)]
    assert spoken.memory_bytes == 128
    whole = Spoken(Declared("g", "grad", (7,), 8, "tree", type="float16"), (0, 2), 4)
    assert [whole.place(number) for number in range(whole.count)] == [(0, 16), (16, 28)], "sums are wider"
