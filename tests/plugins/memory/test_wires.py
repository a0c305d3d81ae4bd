"""Every decoder of the plugin on bytes that are right, random and mutated: a decoder returns an answer or its own
error, never anything else."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.ids import HostId
from covey.wire import frames, headers
from covey.wire import volume_wire as volumewire
from covey.wire.headers import Op, Reply, Request, Status, Welcome
from covey.wire.swap_wire import SwapCounts
from plugins.memory.datapath.wire import control, slabwire
from plugins.memory.datapath.wire.slabwire import SlabOp, SlabRequest
from plugins.memory.messages import (
    Activity,
    CheckActivity,
    Done,
    Evict,
    FreeMem,
    Map,
    Messages,
    MrInfo,
    QueryMem,
    Renew,
    SlabActivity,
    SlabRef,
    SlabsAre,
    SlabsAreHeld,
    SlabsHeld,
    SlabsHere,
    Unrenewed,
)
from plugins.views import SlabView

REF = SlabRef("data", 3, 9)
VIEW = SlabView("data", 3, HostId("h1"), "mapped", HostId("h2"), 1 << 20, 5, 4, 20.5, 9)
SAID: list[Messages] = [
    QueryMem("data", 3, 9, slab_bytes=1 << 20),
    FreeMem("data", 3, 9, slabs=7),
    Map("data", 3, 9, slab_bytes=1 << 20, page_bytes=4096),
    Map("data", 3, 9, 1 << 20, 4128, members=2, tenant="ann", job="j1", replaces=True),
    MrInfo("data", 3, 9, address="10.0.0.1:7000", secret=b"s" * 16),
    MrInfo("data", 3, 9, refused="no room"),
    CheckActivity(1, (REF, REF)),
    Activity(1, (SlabActivity(REF, 3.5),)),
    Evict("data", 3, 9, grace_s=10.0),
    Unrenewed("data", 3, 9),
    Done("data", 3, 9),
    Renew((REF,)),
    Renew((REF,), 2, "ann", "j1", 4128),
    SlabsHeld((REF,)),
    SlabsAreHeld(True, (REF,)),
    SlabsHere(),
    SlabsAre((VIEW,)),
]
QUESTIONS: list[control.ControlFrame] = [
    control.ControlHello(b"secret"),
    control.StopProgram(1, forget=True),
    control.RegisterSlabFrame(2, "h1", "data", 3, 9, 1 << 20, 4096, b"s" * 16),
    control.FreeSlabFrame(3, "h1", "data", 3, 9),
    control.ListSlabs(4),
    control.OpenSlabFrame(5, 3, 9, "h2", "10.0.0.1:7000", b"s" * 16),
    control.CloseSlabFrame(6, 3, 9),
    control.CountPages(7),
    control.ListPlaces(8),
    control.ExportVolume(11, "/run/v.sock"),
    control.EndExport(12, "/run/v.sock"),
    control.BeginSwapping(13, "covey:h1:swap:00ff", "/run/covey-swap/swapd.sock", True),
    control.EndSwapping(14),
    control.PlaceDead(9, 3, 9, "why"),
    control.PlaceAt(9, 3, 9, "10.0.0.1:7001"),
    control.GiveUp(10),
]
ANSWERS: list[control.ControlFrame] = [
    control.Yes(1),
    control.No(2, "why"),
    control.SlabList(3, "10.0.0.1:1", (control.HeldSlab("h1", "data", 3, 9, 1 << 20, b"s" * 16, 4096),), 0),
    control.PageCounts(4, (control.SlabCounts(1, 2, 3, 4),), 1, 2, 3, 4, 5, 6),
    control.PageCounts(4, (), 1, 2, 3, 4, 5, 6, (control.PlaceNow(3, 9, "recovering", "why"),), 1, 2, "full"),
    control.PageCounts(4, (), 1, 2, 3, 4, 5, 6, swap=SwapCounts("waits", "/dev/nbd0", 7, "why", 2)),
    control.PlaceList(5, (control.OpenPlace(3, 9, "h2", "10.0.0.1:1", b"s" * 16),)),
    control.SlabLost(3, 9, "why"),
    control.SlabCopiedFrame(3, 9),
    control.ClientRefused("another version"),
]
message_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Messages)
encode = msgspec.msgpack.encode


def mutated(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """One of the seeds with a few bytes changed, cut off or put in."""

    def change(seed: bytes, edits: list[tuple[int, int, int]]) -> bytes:
        data = bytearray(seed)
        for kind, place, byte in edits:
            at = place % (len(data) + 1)
            if kind == 0 and at < len(data):
                data[at] = byte
            elif kind == 1:
                del data[at:]
            else:
                data[at:at] = bytes([byte])
        return bytes(data)

    edit = st.tuples(st.integers(0, 2), st.integers(0, 500), st.integers(0, 255))
    return st.builds(change, st.sampled_from(list(seeds)), st.lists(edit, min_size=1, max_size=6))


def to_slab(data: bytes) -> SlabRequest:
    found = slabwire.request(data)
    slabwire.check(found, 300, 4096)
    return found


def to_volume(data: bytes) -> headers.Request:
    return headers.request(data, 300, volumewire.OPERATIONS)


VERSIONS_OF = SlabRequest(SlabOp.VERSIONS, 290, 7, 3, 0, 9, 5, 0)
A_COPY = SlabRequest(SlabOp.COPY, 2, 7, 298, 2 * 4104, 9, 5, 0)
GONE = slabwire.SlabReply(slabwire.SlabStatus.GONE, 0, 7, 9, 5)
ATTACHED = slabwire.AttachedSlab(b"p" * 32, 4096, 1 << 26)
HEADERS: list[tuple[Callable[[bytes], object], bytes, object]] = [
    (
        slabwire.hello,
        slabwire.pack_hello(slabwire.SlabHello("h1", "data", 3, 9, b"e" * 16, b"s" * 16)),
        ("h1", "data", 3, 9, b"e" * 16, b"s" * 16),
    ),
    (volumewire.hello, volumewire.pack_hello(b"t" * 32), (volumewire.PAGES, b"t" * 32)),
    (headers.welcome, headers.pack_welcome(Welcome(Status.OK, 4096, 1 << 20)), Welcome(Status.OK, 4096, 1 << 20)),
    (to_slab, slabwire.pack_request(VERSIONS_OF), VERSIONS_OF),
    (to_slab, slabwire.pack_request(A_COPY), A_COPY),
    (slabwire.reply, slabwire.pack_reply(GONE), GONE),
    (slabwire.attached, slabwire.pack_attached(ATTACHED), ATTACHED),
    (to_volume, headers.pack_request(Request(Op.WRITE, 3, 4, 5)), Request(Op.WRITE, 3, 4, 5)),
    (to_volume, headers.pack_request(Request(Op.FLUSH, 0, 0, 5)), Request(Op.FLUSH, 0, 0, 5)),
    (volumewire.hello, volumewire.pack_hello(b"t" * 32, volumewire.ARRAYS), (volumewire.ARRAYS, b"t" * 32)),
    (to_volume, headers.pack_request(Request(Op.FETCH, 3, 4, 5)), Request(Op.FETCH, 3, 4, 5)),
    (headers.reply, headers.pack_reply(Reply(Status.FAILED, 4, 5)), Reply(Status.FAILED, 4, 5)),
]


@pytest.mark.parametrize(("decode", "data", "said"), HEADERS)
def test_a_header_comes_back_as_it_was_packed(decode: Callable[[bytes], object], data: bytes, said: object) -> None:
    assert decode(data) == said


@given(which=st.integers(0, len(HEADERS) - 1), data=st.binary(max_size=200) | mutated([data for _, data, _ in HEADERS]))
def test_any_bytes_are_a_header_or_a_wire_error(which: int, data: bytes) -> None:
    try:
        HEADERS[which][0](data)
    except headers.WireError:
        pass


@given(code=st.integers(0, 255), page=st.integers(0, 2**64 - 1), count=st.integers(0, 2**32 - 1))
def test_whatever_request_is_accepted_is_known_and_lies_inside(code: int, page: int, count: int) -> None:
    data = bytearray(headers.pack_request(Request(Op.READ, page, count, 1)))
    data[0] = code
    try:
        request = headers.request(data, 300, volumewire.OPERATIONS)
    except headers.WireError:
        return
    assert request.op in volumewire.OPERATIONS
    limit = volumewire.OPERATIONS[request.op]
    assert limit == 0 or (1 <= request.pages <= limit and request.page + request.pages <= 300)


NUMBERS = st.integers(0, 2**32 - 1) | st.integers(0, 400)


@given(code=st.integers(0, 9), page=NUMBERS, count=NUMBERS, size=NUMBERS | st.integers(0, 256).map(lambda n: n * 4096))
def test_a_request_to_a_slab_that_is_accepted_lies_inside_it(code: int, page: int, count: int, size: int) -> None:
    data = bytearray(slabwire.pack_request(SlabRequest(SlabOp.READ, count, 7, page, size, 9, 5, 1)))
    data[0] = code
    try:
        found = to_slab(bytes(data))
    except headers.WireError:
        return
    whole = {SlabOp.ATTACH: 32, SlabOp.DETACH: 0, SlabOp.PAIR: slabwire.PAIRED_BYTES, SlabOp.REGION: 0, SlabOp.MAP: 0}
    if found.op in whole:
        assert found.size == whole[found.op]
        return
    assert found.pages >= 1 and found.page + found.pages <= 300
    written = {SlabOp.WRITE: 4096, SlabOp.COPY: 4104}
    assert found.size == found.pages * written.get(found.op, 0)


def test_neither_end_takes_an_operation_of_the_other_protocol() -> None:
    with pytest.raises(headers.WireError, match="unknown operation"):
        to_volume(headers.pack_request(Request(Op.VERSIONS, 0, 1, 1)))
    with pytest.raises(headers.WireError, match="bytes instead of"):
        to_slab(headers.pack_request(Request(Op.READ, 0, 1, 1)))


@pytest.mark.parametrize("message", SAID, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was_said(message: Messages) -> None:
    assert message_decoder.decode(encode(message)) == message


@given(data=st.binary(max_size=300) | mutated([encode(message) for message in SAID]))
def test_any_bytes_are_a_message_or_a_decode_error(data: bytes) -> None:
    try:
        message_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "QueryMem", "volume": "../x", "index": 0, "epoch": 1, "slab_bytes": 1},
        {"type": "QueryMem", "volume": "x", "index": -1, "epoch": 1, "slab_bytes": 1},
        {"type": "FreeMem", "volume": "x", "index": 0, "epoch": 1, "slabs": -1},
        {"type": "FreeMem", "volume": "x", "index": 0, "epoch": 1, "slabs": True},
        {"type": "Map", "volume": "x", "index": 0, "epoch": 1, "slab_bytes": 1, "page_bytes": 0},
        {"type": "MrInfo", "volume": "x", "index": 0, "epoch": 1, "secret": b"s" * 17},
        {"type": "Evict", "volume": "x", "index": 0, "epoch": 1, "grace_s": float("nan")},
        {"type": "Evict", "volume": "x", "index": 0, "epoch": 1, "grace_s": float("inf")},
        {"type": "Renew", "slabs": [["x", 0, 1]] * 4097},
        {"type": "Nonsense"},
    ],
)
def test_a_message_out_of_bounds_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.DecodeError):
        message_decoder.decode(encode(wrong))


@pytest.mark.parametrize("frame", [*QUESTIONS, *ANSWERS], ids=lambda frame: type(frame).__name__)
def test_a_control_frame_comes_back_as_it_was_packed(frame: control.ControlFrame) -> None:
    decoder: msgspec.msgpack.Decoder[Any] = control.asked_decoder if frame in QUESTIONS else control.answer_decoder
    assert frames.unpack(frames.pack(frame)[4:], decoder) == frame


@given(data=st.binary(max_size=300) | mutated([frames.pack(frame)[4:] for frame in [*QUESTIONS, *ANSWERS]]))
def test_any_bytes_are_a_control_frame_or_a_frame_error(data: bytes) -> None:
    decoders: list[msgspec.msgpack.Decoder[Any]] = [control.asked_decoder, control.answer_decoder]
    for decoder in decoders:
        try:
            frames.unpack(data, decoder)
        except frames.FrameError:
            pass
