"""Frames of one connection of a rank: small ones are sent together, and received bytes are read at once."""

import socket
from collections.abc import Iterator

import pytest

from covey.tensors.aggregator.link import READ_BYTES, SMALL_BYTES, TensorLink


@pytest.fixture
def ends() -> Iterator[tuple[TensorLink, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = TensorLink(f"127.0.0.1:{server.getsockname()[1]}")
        far, _ = server.accept()
        with far:
            far.settimeout(10.0)
            yield link, far
        link.close()


def test_small_frames_leave_in_one_piece_and_in_order(
    ends: tuple[TensorLink, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, far = ends
    sent: list[int] = []

    class Counted:
        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock

        def sendall(self, data: bytes, flags: int = 0) -> None:
            sent.append(len(data))
            self.sock.sendall(data, flags)

        def __getattr__(self, name: str) -> object:
            return getattr(self.sock, name)

    monkeypatch.setattr(link, "sock", Counted(link.sock))
    large = bytes(range(256)) * (SMALL_BYTES // 128)
    frames = [(b"head 1", b"a" * 10), (b"head 2", b""), (b"head 3", large), (b"head 4", b"b")]
    link.send(frames)
    whole = b"".join(head + payload for head, payload in frames)
    assert sent == [28, len(large), 7], "what goes before a large payload goes with its header"
    found = b""
    while len(found) < len(whole):
        found += far.recv(1 << 16)
    assert found == whole


def test_what_came_at_once_is_read_without_asking_for_more(ends: tuple[TensorLink, socket.socket]) -> None:
    link, far = ends
    whole = bytes(range(256)) * (READ_BYTES // 64)
    far.sendall(whole)
    link.await_byte(lambda: (b"", b""))
    found = bytearray()
    for size in (40, 3, 40, READ_BYTES * 2, 1, 100):
        part = bytearray(size)
        link.read_into(memoryview(part))
        found += part
    assert found == whole[: len(found)]
    link.await_byte(lambda: pytest.fail("the rest of what came is there"))
