"""One queue pair for large parts of tensors: two ends in one process, over a stand-in for a device."""

import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.ports.verbs import NoVerbs
from covey.tensors.numbers.tensor_wire import TensorOp, TensorWireError
from covey.tensors.rdma import tensor_pair
from covey.tensors.rdma.rdma_here import AGAIN_MAX_S, AGAIN_S, RdmaHere, packed_words, words
from covey.tensors.rdma.tensor_pair import (
    LEAST_BYTES,
    SLOT_BYTES,
    SLOTS,
    PairLost,
    TensorPair,
    pack_there,
    rides,
    unpack_there,
)
from tests.covey.test_tensors import until
from tests.plugins.memory.stand_in_verbs import StandInNetwork, StandInVerbs

SIZE = 1000


def part(number: int, size: int = SIZE) -> bytes:
    return bytes([number]) * size


class Ends:
    """Two ends of a connection with a queue pair, `here` sends."""

    def __init__(self) -> None:
        self.network = StandInNetwork()
        self.sockets = socket.socketpair()
        self.heads: list[bytes] = []
        verbs = StandInVerbs(self.network)
        self.here = TensorPair(verbs.open(), self.sockets[0].fileno(), self.heads.append)
        self.there = TensorPair(verbs.open(), self.sockets[1].fileno(), lambda head: None)
        for one, other in ((self.here, self.there), (self.there, self.here)):
            one.connect(unpack_there(pack_there(other.here)))

    def taken(self, size: int = SIZE) -> bytes:
        view = bytearray(size)
        self.there.take(memoryview(view))
        return bytes(view)

    def close(self) -> None:
        for end in (self.here, self.there):
            end.close()
        for sock in self.sockets:
            sock.close()
        assert not self.network.regions and not self.network.pairs


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.network.go_on()
    made.close()


def test_a_header_is_sent_once_the_part_is_in_the_peers_memory(ends: Ends) -> None:
    ends.network.held = True
    ends.here.send(b"head", part(1))
    assert ends.heads == [] and ends.taken() == bytes(SIZE)
    ends.there._got = 0
    ends.network.go_on()
    ends.here.settle()
    assert ends.heads == [b"head"] and ends.taken() == part(1)


def test_a_part_is_there_before_the_read_that_says_so(ends: Ends) -> None:
    """The READ behind a WRITE is what makes sure of that: a WRITE alone is done when the peer's card has it."""
    ends.here.send(b"head", part(1))
    ends.here.settle()
    assert [step.is_read for step in ends.network.steps] == [False, True]


def test_parts_come_whole_and_in_order_also_where_slots_are_used_again(ends: Ends) -> None:
    sizes = [SLOT_BYTES, 1, LEAST_BYTES, SLOT_BYTES - 1]
    for number in range(3 * SLOTS + 1):
        size = sizes[number % len(sizes)]
        ends.here.send(b"%d" % number, part(number, size))
        ends.here.settle()
        assert ends.taken(size) == part(number, size)
    assert ends.heads == [b"%d" % number for number in range(3 * SLOTS + 1)]


def test_a_slot_that_the_peer_has_not_taken_is_not_written(ends: Ends) -> None:
    for number in range(SLOTS):
        ends.here.send(b"%d" % number, part(number))
    late = threading.Thread(target=ends.here.send, args=(b"late", part(SLOTS)))
    late.start()
    until(lambda: len(ends.network.steps) > 2 * SLOTS + 2)  # it has read the count again
    assert late.is_alive() and len(ends.heads) == SLOTS
    assert [ends.taken() for _ in range(SLOTS)] == [part(number) for number in range(SLOTS)]
    late.join(10)
    ends.here.settle()
    assert ends.taken() == part(SLOTS) and ends.heads[-1] == b"late"


def test_both_ends_send_without_waiting_for_each_other(ends: Ends) -> None:
    """No end must read to be able to send: neither posts anything for what it takes."""
    for number in range(SLOTS):
        ends.here.send(b"", part(number))
        ends.there.send(b"", part(100 + number))
    for end in (ends.here, ends.there):
        end.settle()
    view = bytearray(SIZE)
    ends.here.take(memoryview(view))
    assert (bytes(view), ends.taken()) == (part(100), part(0))


def test_a_pair_that_fails_is_used_no_more(ends: Ends) -> None:
    ends.network.pairs[ends.here.here.where.number].failed = "flushed"
    with pytest.raises(PairLost, match="flushed"):
        ends.here.send(b"head", part(1))
    ends.network.pairs[ends.here.here.where.number].failed = ""
    with pytest.raises(PairLost, match="flushed"):
        ends.here.send(b"head", part(1))
        ends.here.settle()
    assert not ends.heads


def test_a_count_that_cannot_be_ends_the_pair(ends: Ends) -> None:
    """A peer that takes what nobody sent would have its slots overwritten."""
    ends.there._in.count[0] = 2
    with pytest.raises(PairLost, match="has taken 2 parts of 1"):
        ends.here.send(b"head", part(1))


def test_a_wait_ends_with_the_connection(ends: Ends) -> None:
    ends.network.held = True
    ends.here.send(b"head", part(1))
    ends.sockets[1].shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionResetError, match="closed the connection"):
        ends.here.settle()


@pytest.mark.parametrize("waits_for", ["an answer", "room"])
def test_a_peer_that_does_nothing_is_given_up(ends: Ends, waits_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_pair, "ANSWER_S", 0.05)
    ends.network.held = waits_for == "an answer"
    for number in range(SLOTS):
        ends.here.send(b"", part(number))
    with pytest.raises(PairLost, match="the peer does not answer"):
        ends.here.send(b"", part(9))
    assert ends.here.why == "the peer does not answer"


def test_a_probe_tells_a_peer_that_cannot_be_reached(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_pair, "PROBE_S", 0.05)
    ends.here.probe()
    ends.network.unreachable = True
    with pytest.raises(PairLost):
        ends.here.probe()


@pytest.mark.parametrize("refuses", ["locks", "refuses"])
def test_what_was_made_is_undone_when_the_rest_is_refused(refuses: str) -> None:
    network = StandInNetwork()
    verbs = StandInVerbs(network)
    setattr(verbs, refuses, "8388608 bytes may be locked")
    with socket.socket() as sock, pytest.raises(NoVerbs, match="may be locked"):
        RdmaHere(verbs).pair(sock)
    assert not network.regions and not network.pairs


def is_kept_from_children(memory: memoryview) -> bool:
    """Whether the kernel leaves this memory out of a forked child (VM_DONTCOPY)."""
    address, here = np.frombuffer(memory, np.uint8).ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= address < int(found[2], 16)
        elif here and line.startswith("VmFlags:"):
            return "dc" in line.split()
    return False


def test_a_forked_child_does_not_get_the_memory(ends: Ends) -> None:
    """A page that both may write would be copied on the next write, and the device keep the old one."""
    assert not is_kept_from_children(memoryview(bytearray(1 << 20)))
    assert all(is_kept_from_children(slots.view) for slots in (ends.here._in, ends.here._out, ends.there._in))


def test_an_address_whose_pair_failed_has_none_for_a_while() -> None:
    now_s = [0.0]
    rdma = RdmaHere(StandInVerbs(StandInNetwork()), lambda: now_s[0])
    with socket.socket() as sock:
        for pause_s in (AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S):
            rdma.failed("1.2.3.4:5", "flushed")
            now_s[0] += pause_s - 1
            with pytest.raises(NoVerbs, match="its queue pair failed: flushed"):
                rdma.pair(sock, "1.2.3.4:5")
            rdma.pair(sock, "1.2.3.4:6").close()
            now_s[0] += 1
            rdma.pair(sock, "1.2.3.4:5").close()
        for _ in range(20):
            rdma.failed("1.2.3.4:5", "flushed")
        now_s[0] += AGAIN_MAX_S
        rdma.pair(sock, "1.2.3.4:5").close()


def test_a_look_names_the_memory_that_one_connection_locks() -> None:
    verbs = StandInVerbs(StandInNetwork())
    assert RdmaHere(verbs).why_not() == "" and verbs.needs_bytes > 2 * SLOTS * SLOT_BYTES


@given(st.binary(max_size=60))
def test_the_place_of_a_pair_is_one_or_an_error(data: bytes) -> None:
    try:
        assert pack_there(unpack_there(data)) == data
    except TensorWireError:
        pass


@given(st.text())
def test_words_of_the_other_end_can_be_shown(why: str) -> None:
    assert words(packed_words(why)).isprintable()
    assert words(os.urandom(20)).isprintable()


@given(st.sampled_from(list(TensorOp)), st.sampled_from([0, LEAST_BYTES - 1, LEAST_BYTES]))
def test_only_large_parts_of_numbers_go_over_the_pair(op: TensorOp, length: int) -> None:
    assert rides(op, length) == (length == LEAST_BYTES and op.name in ("PUSH", "STATE", "RESULT"))
