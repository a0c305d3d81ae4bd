"""Bytes that go to the kernel, compared with those that pyroute2 0.9.7 makes; and whatever may come back."""

import errno
import os
import struct
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.swap import nbd
from agent.swap.netlink import (
    CONTROLLER,
    FAMILY_NAME,
    GET_FAMILY,
    GenericNetlink,
    KernelAnswer,
    NetlinkError,
    attributes,
    message,
    text,
    u32,
)

FAMILY = 0x1C
BACKEND = "covey:h1:swap:00ff"
SOCKETS = "100007800c0001800800010009000000"
PARAMETERS = "0c00040005000000000000000c000800100e000000000000"
NAMED = "17000a00636f7665793a68313a737761703a3030666600"
CONNECT = (
    "780000001c0005000700000000000000010100000c00020000000000100000000c00030000100000000000000c00040005000000000000000c"
    "0005002d000000000000000c000800100e000000000000" + NAMED + "00" + SOCKETS
)
RECONFIGURE = "5c0000001c00050007000000000000000301000008000100030000000c00040005000000000000000c000800100e000000000000"
DISCONNECT = "1c0000001c0005000700000000000000020100000800010003000000"
GET = "1c00000010000500070000000000000003010000080002006e626400"


def test_a_device_is_asked_for_with_the_bytes_that_another_library_makes() -> None:
    asked = nbd.connecting(BACKEND, 64 << 30, 4096, 5, 9)
    assert message(FAMILY, nbd.CONNECT, 7, asked).hex() == CONNECT


def test_another_socket_is_given_with_the_bytes_that_another_library_makes() -> None:
    asked = nbd.reconfiguring(3, BACKEND, 5, 9)
    assert message(FAMILY, nbd.RECONFIGURE, 7, asked).hex() == RECONFIGURE + NAMED + "00" + SOCKETS


def test_an_end_and_a_family_are_asked_for_with_the_bytes_that_another_library_makes() -> None:
    assert message(FAMILY, nbd.DISCONNECT, 7, [u32(nbd.INDEX, 3)]).hex() == DISCONNECT
    assert message(CONTROLLER, GET_FAMILY, 7, [text(FAMILY_NAME, "nbd")]).hex() == GET


def said(sequence: int, kind: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, 0, sequence, 0) + body


def error(sequence: int, number: int) -> bytes:
    return said(sequence, 2, struct.pack("=i", -number) + bytes(16))


ANSWER = said(7, FAMILY, struct.pack("=BBH", 1, 1, 0) + u32(nbd.INDEX, 3))


def test_an_answer_is_over_when_it_is_acknowledged_and_others_are_not_ours() -> None:
    answered = KernelAnswer(7)
    answered.take(error(6, errno.EBUSY) + ANSWER)
    assert not answered.over and answered.attributes == {nbd.INDEX: struct.pack("=I", 3)}
    answered.take(error(7, 0))
    assert answered.over


def test_a_refusal_has_the_number_that_the_kernel_gave() -> None:
    with pytest.raises(OSError, match="busy") as refused:
        KernelAnswer(7).take(error(7, errno.EBUSY))
    assert refused.value.errno == errno.EBUSY


@given(
    data=st.binary(max_size=200)
    | st.builds(
        lambda at, byte, end: ((ANSWER + error(7, 0))[:at] + bytes([byte]) + (ANSWER + error(7, 0))[at + 1 :])[:end],
        st.integers(0, 80),
        st.integers(0, 255),
        st.integers(0, 80),
    )
)
def test_any_bytes_are_an_answer_or_an_error_of_the_system(data: bytes) -> None:
    answered = KernelAnswer(7)
    try:
        answered.take(data)
    except OSError:
        return
    assert sum(4 + len(value) for value in answered.attributes.values()) <= len(data)


@given(st.binary(max_size=100))
def test_any_bytes_are_attributes_or_a_netlink_error(data: bytes) -> None:
    try:
        attributes(data)
    except NetlinkError:
        pass


class FakeNetlink:
    """A netlink socket that answers with these attributes."""

    def __init__(self, answer: Mapping[int, bytes]) -> None:
        self._answer = answer

    def family(self, name: str) -> int:
        return FAMILY

    def ask(self, family: int, command: int, *attributes: bytes) -> Mapping[int, bytes]:
        return self._answer


def test_a_device_without_a_number_is_no_device() -> None:
    assert nbd.connect(FakeNetlink({nbd.INDEX: b"\3\0\0\0"}), BACKEND, 1 << 30, 4096, 5, 9) == 3
    with pytest.raises(NetlinkError):
        nbd.connect(FakeNetlink({}), BACKEND, 1 << 30, 4096, 5, 9)


def test_this_kernel_knows_its_controller_and_no_family_of_a_made_up_name() -> None:
    try:
        netlink = GenericNetlink()
    except OSError as error:
        pytest.skip(f"no generic netlink here: {os.strerror(error.errno or 0)}")
    try:
        assert netlink.family("nlctrl") == CONTROLLER
        with pytest.raises(FileNotFoundError):
            netlink.family("covey-nothing")
    finally:
        netlink.close()
