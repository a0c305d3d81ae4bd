"""Blocks over a connection: they arrive as they were, and whatever else a peer sends ends it without harm."""

import errno
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from covey.core.errors import CoveyError
from covey.healing.state_pieces import Item
from covey.job.blocks import giving as givings
from covey.job.blocks import taking as takings
from covey.job.blocks.block_arrays import code_digest, empty_block, for_script, given_block
from covey.job.blocks.block_wire import (
    HEAD_BYTES,
    HELLO_BYTES,
    PIECE_BYTES,
    REQUEST_BYTES,
    AboutBlocks,
    BlockArrays,
    BlockHead,
    BlockHello,
    BlocksHeld,
    BlocksWanted,
    DeclaredBlocks,
    encode_blocks,
    held_decoder,
    items_of,
    pack_head,
    pack_hello,
    unpack_head,
    unpack_hello,
    unpack_request,
    wanted_decoder,
)
from covey.job.blocks.exchange import Exchange, ExchangingProcess
from covey.job.blocks.giving import GivingBlocks
from covey.job.blocks.taking import AsRank, Taking
from covey.tensors.numbers.telling import ToldByRank
from covey.wire.handshake import challenge
from covey.wire.headers import WireError

SECRET = b"s" * 16
OF = DeclaredBlocks("data", 8, 16 << 20)
ME = AsRank("j1", 3, 7, SECRET)
BIG = np.random.default_rng(1).standard_normal(3 * PIECE_BYTES // 8 + 5)


@pytest.fixture
def givers() -> Iterator[Callable[..., tuple[GivingBlocks, str, list[tuple[int, int]]]]]:
    made: list[GivingBlocks] = []

    def give(blocks: dict[int, BlockArrays]) -> tuple[GivingBlocks, str, list[tuple[int, int]]]:
        taken: list[tuple[int, int]] = []

        def find(key: int, block: int) -> BlockArrays | None:
            return blocks.get(block) if key == OF.key else None

        giving = GivingBlocks("j1", lambda epoch: SECRET if epoch == 7 else b"", find, lambda *each: taken.append(each))
        made.append(giving)
        return giving, giving.address("127.0.0.1"), taken

    yield give
    for each in made:
        each.close()


def test_a_block_arrives_as_it_was(givers: Any) -> None:
    sent = {"big": BIG, "labels": np.arange(5, dtype="<i4").reshape(5, 1), "none": np.empty((0, 3), np.float32)}
    _, address, taken = givers({4: sent})
    taking = Taking(address, ME)
    found = taking.take(OF, 4)
    assert found is not None and {name: (each.dtype, each.shape) for name, each in found.items()} == {
        name: (each.dtype, each.shape) for name, each in sent.items()
    }
    assert all((found[name] == each).all() and not found[name].flags.writeable for name, each in sent.items())
    assert taking.take(OF, 5) is None
    taking.done(OF, 4)
    assert taking.take(OF, 5) is None  # so what was told before has been read
    taking.close()
    assert taken == [(OF.key, 4)]


def test_blocks_are_given_at_each_address_that_was_announced(givers: Any) -> None:
    """The owner of the job's tensors has moved to a host that another card reaches."""
    giving, first, _ = givers({4: {"": BIG}})
    second = giving.address("127.0.0.2")
    assert second.startswith("127.0.0.2:") and giving.address("127.0.0.1") == first
    for address in (first, second):
        taking = Taking(address, ME)
        assert taking.take(OF, 4) is not None
        taking.close()
    giving.close()
    for address in (first, second):
        with pytest.raises(OSError):
            Taking(address, ME)


class Refusing:
    """A listener that has no descriptor for the first connections."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._left = sock, 2

    def accept(self) -> tuple[socket.socket, Any]:
        if self._left:
            self._left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._sock.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def test_blocks_are_given_again_once_there_are_descriptors(givers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listens = socket.create_server
    monkeypatch.setattr(givings, "AGAIN_S", 0.001)
    monkeypatch.setattr(socket, "create_server", lambda *words, **more: Refusing(listens(*words, **more)))
    _, address, _ = givers({4: {"": BIG}})
    taking = Taking(address, ME)
    assert taking.take(OF, 4) is not None
    taking.close()


@pytest.mark.parametrize("wrong", [ME._replace(secret=b"x" * 16), ME._replace(epoch=8), ME._replace(job="j2")])
def test_who_is_not_of_the_job_gets_nothing(givers: Any, wrong: AsRank) -> None:
    _, address, _ = givers({4: {"": BIG}})
    with pytest.raises(OSError):
        Taking(address, wrong)


def test_who_proves_nothing_gets_nothing(givers: Any) -> None:
    """It gets a challenge, and then the end of the connection."""
    _, address, _ = givers({4: {"": BIG}})
    ip, port = address.rsplit(":", 1)
    with socket.create_connection((ip, int(port)), 5) as sock:
        sock.sendall(pack_hello(BlockHello(givings.job_hash("j1"), 3, 7, b"n" * 16)) + bytes(32))
        assert len(givings.receive(sock, 48)) == 48
        assert sock.recv(1) == b""


def test_a_block_that_is_larger_than_was_declared_is_not_taken(givers: Any) -> None:
    _, address, _ = givers({4: {"": BIG}})
    taking = Taking(address, ME)
    with pytest.raises(WireError):
        taking.take(DeclaredBlocks("data", 8, BIG.nbytes - 1), 4)
    taking.close()


class Changed:
    """A connection in whose bytes one is changed."""

    def __init__(self, sock: socket.socket, at: int) -> None:
        self._sock, self._at = sock, at

    def recv_into(self, view: memoryview, size: int) -> int:
        count = self._sock.recv_into(view, size)
        if 0 <= self._at < count:
            view[self._at] ^= 4
        self._at -= count
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.mark.parametrize("at", [HEAD_BYTES + 5, HEAD_BYTES + 40, 2 * PIECE_BYTES, 3 * PIECE_BYTES + 60])
def test_a_bit_that_changes_on_its_way_is_noticed(givers: Any, at: int) -> None:
    _, address, _ = givers({4: {"": BIG}})
    taking = Taking(address, ME)
    taking._sock = Changed(taking._sock, at)  # type: ignore[assignment]
    with pytest.raises(WireError):
        taking.take(OF, 4)
    taking.close()


def answered(data: bytes) -> str:
    """The address of a server that proves to know the secret, and then sends this."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listening, suppress(OSError):
            sock, _ = listening.accept()
            with sock:
                hello = bytes(givings.receive(sock, HELLO_BYTES))
                sock.sendall(challenge(SECRET, hello, b"n" * 16))
                givings.receive(sock, 32)
                sock.sendall(givings.YES)
                givings.receive(sock, REQUEST_BYTES)
                sock.sendall(data)
                sock.recv(1)

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listening.getsockname()[1]}"


def test_any_bytes_in_the_place_of_a_block_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takings, "SILENT_S", 0.1)
    monkeypatch.setattr(takings, "BLOCK_S", 0.1)
    monkeypatch.setattr(takings, "LEAST_BYTES_S", 1 << 40)
    draw = random.Random(2)
    for _ in range(40):
        contents = bytes(draw.randbytes(draw.randint(0, 60)))
        head = pack_head(BlockHead(True, len(contents), draw.choice([0, 8, 1 << 20])))
        sent = draw.choice([draw.randbytes(80), head + contents + draw.randbytes(draw.randint(0, 40)), head[:7]])
        taking = Taking(answered(sent), ME)
        with suppress(OSError):
            assert taking.take(OF, 1) is None
        taking.close()


def test_a_process_that_sends_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch, givers: Any) -> None:
    monkeypatch.setattr(takings, "time", SimpleNamespace(monotonic=itertools.count(0.0, 100.0).__next__))
    _, address, _ = givers({4: {"": BIG}})
    taking = Taking(address, ME)
    with pytest.raises(TimeoutError):
        taking.take(OF, 4)
    taking.close()


def test_a_block_that_is_read_from_a_disk_first_is_waited_for(monkeypatch: pytest.MonkeyPatch, givers: Any) -> None:
    class Disk(dict[int, BlockArrays]):
        def get(self, block: int, *words: Any) -> Any:
            time.sleep(0.5)
            return super().get(block)

    monkeypatch.setattr(takings, "SILENT_S", 0.25)
    _, address, _ = givers(Disk({4: {"": BIG}}))
    taking = Taking(address, ME)
    assert taking.take(OF, 4) is not None
    assert taking._sock.gettimeout() == 0.25, "bytes of a Block that has begun to come follow at once"
    taking.close()


@pytest.mark.parametrize(
    ("type", "shape", "size"),
    [
        ("<f8", (2,), 15), ("O", (1,), 8), ("<f8", (-1,), 8), ("no type", (1,), 8), ("<f4,<f4", (1,), 8),
        ("<f8", (1 << 62, 1 << 62), 8), ("<f8", (1,) * 40, 8), ("S8", (1,), 8),
    ],
)  # fmt: skip
def test_arrays_that_are_none_are_refused_before_memory_is_taken(type: str, shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(WireError):
        empty_block((Item("x", type, shape),), size)


def test_decoders_refuse_any_bytes_or_give_what_is_within_bounds() -> None:
    draw = random.Random(5)
    whole = encode_blocks(BlocksHeld(3, "10.0.0.1:9", (OF,), {"data": (1, 2)}))
    wanted = encode_blocks(BlocksWanted(3, (1, 2)))
    items = msgspec.msgpack.encode((Item("x", "<f8", (3,)),))
    for _ in range(4000):
        for data in (whole, wanted, items, draw.randbytes(draw.randint(0, 48))):
            changed = bytearray(data)
            for _ in range(draw.randint(0, 3)):
                if changed:
                    changed[draw.randrange(len(changed))] = draw.randrange(256)
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                assert held_decoder.decode(changed).ask >= 0
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                assert len(wanted_decoder.decode(changed).ranks) <= 1 << 12
            with suppress(WireError):
                items_of(changed)
    for size in (HELLO_BYTES, REQUEST_BYTES, HEAD_BYTES):
        for read in (unpack_hello, unpack_request, lambda data: unpack_head(data, 1 << 20)):
            for _ in range(500):
                with suppress(WireError):
                    read(draw.randbytes(size))


def test_messages_of_other_ranks_that_are_none_change_nothing() -> None:
    exchange = Exchange(
        ExchangingProcess("j1", 0, 0, 4, lambda: None, lambda text: None), lambda: pytest.fail("it answered")
    )
    draw = random.Random(6)
    for _ in range(500):
        about = draw.choice([*AboutBlocks])
        assert exchange.told(ToldByRank(1, about, 0, b"\xff" + draw.randbytes(draw.randint(0, 30))))
    assert not exchange.told(ToldByRank(1, 2, 0, b""))


def test_load_may_give_arrays_or_buffers() -> None:
    assert (for_script(given_block(OF, 1, np.arange(3)))[:] == [0, 1, 2]).all()
    found = for_script(given_block(OF, 1, {"a": b"xyz", "b": memoryview(b"12"), "c": np.ones((2, 2))[:, ::2]}))
    assert bytes(found["a"]) == b"xyz" and found["c"].shape == (2, 1)
    with pytest.raises(ValueError):
        found["c"][:] = 2


@pytest.mark.parametrize("given", [None, 7, {}, {"x": "text"}, {"x": object()}, np.array([object()]), np.array(["a"])])
def test_load_that_gives_no_numbers_is_refused_in_three_lines(given: object) -> None:
    with pytest.raises(CoveyError) as refused:
        given_block(OF, 6, given)
    assert len(str(refused.value).splitlines()) == 3 and "load(6)" in str(refused.value)


def test_load_that_gives_more_than_was_declared_is_refused() -> None:
    with pytest.raises(CoveyError, match=r"load\(2\) gave 8\.0* ?.*KiB.*bytes= allows 4 KiB"):
        given_block(DeclaredBlocks("data", 8, 4096), 2, np.zeros(1025))


def test_unlike_code_has_another_digest() -> None:
    def one(k: int) -> Any:
        return np.zeros(3) + k

    def same(k: int) -> Any:
        return np.zeros(3) + k

    def other(k: int) -> Any:
        return np.zeros(4) + k

    assert code_digest(one) == code_digest(same) != code_digest(other)
    assert code_digest(int) == ""
