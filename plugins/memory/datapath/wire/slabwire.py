"""The protocol between a volume's process and a slab process, over TCP.

    volume -> slab   HELLO, once: who I am, one of the slabs, under which epoch, which session, and a nonce

    slab -> volume   CHALLENGE, then volume -> slab PROOF (`covey.wire.handshake`), then slab -> volume WELCOME: yes, no
    volume -> slab   REQUEST, each about one slab under one epoch, then what its operation brings along
    slab -> volume   REPLY in the order of the requests, then what its operation answers

    WRITE      the pages                            all under the version in the request
    COPY       a version for each page, the pages
    DISCARD                                         zeros, under the version in the request
    READ                                            answer: a version for each page, the pages
    VERSIONS                                        answer: a version for each page
    ATTACH     a proof that the secret is known     answer: another one, size of a page, size of the slab
    DETACH                                          the slab is not used over this connection any more

Two connections join a volume and a slab process, whatever the number of its slabs there: one for requests that are
short, one for those that are long. They are of one *session*, drawn by the volume's process. The hello brings one slab
along, and `ATTACH` each further one, with a proof by the secret of that slab which holds on this connection alone.

A slab belongs to the session that attached it last. Requests of an earlier one are answered with GONE, and so are those
about a slab that was freed, or was never attached; a GONE with tag 0 announces it unasked. So a slab is
fenced without its neighbours noticing, and what a dead process left under way cannot land in it any more.

A third connection of the same session asks for one-sided access (`lender_pair`): `PAIR` once, then for each slab
`ATTACH` and `REGION`. The queue pair lives as long as the connection, and ends when another session attaches one of its
slabs. After a GONE a `DETACH` over this connection says that nothing one-sided is under way any more in that slab.

A volume's process on the same host asks over such a connection `MAP` instead, for the name of the slab's memory, which
it maps then (`mapped_slab`); the connection is closed after that.

Every page has a version, given by the volume and growing with each write. A slab keeps the newest version it was sent
and forgets the rest, so the order in which two writes arrive does not matter, and whoever asks after a crash learns
what is there. Version 0: never written.
"""

import struct
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from covey.ports.verbs import GID_BYTES, MTU_MAX, NUMBER_BITS, PairPlace
from covey.wire import headers
from covey.wire.handshake import NONCE_BYTES, PROOF_BYTES, proof_of_client, proof_of_server
from covey.wire.headers import OtherProtocolVersion, WireError
from plugins.memory.policy.log_records import Versions as Versions
from plugins.memory.policy.settings import PAGE_BYTES_MAX, REQUEST_PAGES_MAX

MAGIC = b"coveysl1"
"""The last byte is the version of the protocol."""
SESSION_BYTES = 16
_HELLO = struct.Struct(f"<8s64s64sIQ{SESSION_BYTES}s{NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size
_REQUEST: Final = struct.Struct("<BxxxIIIIQQQ")
REQUEST_BYTES: Final = 44
_REPLY: Final = struct.Struct("<BxxxIIxxxxQQ")
REPLY_BYTES: Final = 32
assert (_REQUEST.size, _REPLY.size) == (REQUEST_BYTES, REPLY_BYTES)
_ATTACHED = struct.Struct(f"<{PROOF_BYTES}sIQ")
ATTACHED_BYTES = _ATTACHED.size
_SLAB = struct.Struct("<IQ")
WHY_BYTES = 200
_PAIRED = struct.Struct(f"<{GID_BYTES}sIIIBxxx{WHY_BYTES}s")
PAIRED_BYTES = _PAIRED.size
_REGION = struct.Struct(f"<IIQQ{WHY_BYTES}s")
LENT_REGION_BYTES = _REGION.size
RING_NAME_BYTES = 64
_LENT_MEMORY = struct.Struct(f"<{RING_NAME_BYTES}s{WHY_BYTES}s")
LENT_MEMORY_BYTES = _LENT_MEMORY.size

VERSION_BYTES: Final = 8
VERSIONS_MAX: Final = 1 << 15
"""Most versions that one request may ask for."""
BYTES_MAX: Final = REQUEST_PAGES_MAX * (PAGE_BYTES_MAX + VERSION_BYTES)
"""Most bytes that a request may bring along."""


class SlabOp(IntEnum):
    READ = 1
    WRITE = 2
    COPY = 3
    DISCARD = 4
    VERSIONS = 5
    ATTACH = 6
    DETACH = 7
    PAIR = 8
    REGION = 9
    MAP = 10


class SlabStatus(IntEnum):
    OK = 0
    GONE = 1
    """This connection does not have that slab under that epoch, or no longer has it."""
    BAD = 2
    """The request is out of range; the connection ends."""


_ABOUT_NO_PAGES = {
    SlabOp.ATTACH: PROOF_BYTES,
    SlabOp.DETACH: 0,
    SlabOp.PAIR: PAIRED_BYTES,
    SlabOp.REGION: 0,
    SlabOp.MAP: 0,
}
"""Operation -> bytes that its request brings along."""
_OPS: Final = {op.value: op for op in SlabOp}
_STATUSES: Final = {status.value: status for status in SlabStatus}
READ: Final = SlabOp.READ
WRITE: Final = SlabOp.WRITE
COPY: Final = SlabOp.COPY
DISCARD: Final = SlabOp.DISCARD
VERSIONS: Final = SlabOp.VERSIONS
ATTACH: Final = SlabOp.ATTACH
DETACH: Final = SlabOp.DETACH
PAIR: Final = SlabOp.PAIR
REGION: Final = SlabOp.REGION
MAP: Final = SlabOp.MAP
GONE: Final = SlabStatus.GONE
BAD: Final = SlabStatus.BAD
"""Members of the enumerations as plain names: in Python 3.11 a look-up in one is a call of a Python function, too slow
for each page."""


class SlabHello(NamedTuple):
    borrower: str
    volume: str
    slab: int
    epoch: int
    session: bytes
    nonce: bytes


class SlabRequest:
    """A request to a lender. `page`: the first one, counted from the start of the slab. `size`: bytes that follow. A
    plain class, since one is made for each page, and a compiled NamedTuple costs several times more."""

    __slots__ = ("epoch", "op", "page", "pages", "size", "slab", "tag", "version")

    def __init__(
        self, op: SlabOp, pages: int, slab: int, page: int, size: int, epoch: int, tag: int, version: int
    ) -> None:
        self.op, self.pages, self.slab, self.page = op, pages, slab, page
        self.size, self.epoch, self.tag, self.version = size, epoch, tag, version

    def _fields(self) -> tuple[SlabOp, int, int, int, int, int, int, int]:
        return self.op, self.pages, self.slab, self.page, self.size, self.epoch, self.tag, self.version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SlabRequest) and self._fields() == other._fields()

    def __repr__(self) -> str:
        return f"{self.op.name} of {self.pages} pages at {self.page} of slab {self.slab}, tag {self.tag}"


class SlabReply(NamedTuple):
    status: SlabStatus
    pages: int
    slab: int
    epoch: int
    tag: int


class AttachedSlab(NamedTuple):
    proof: bytes
    page_bytes: int
    slab_bytes: int


class LentRegion(NamedTuple):
    """Address and keys by which a device reaches a slab in the lender's memory."""

    pages_key: int
    versions_key: int
    pages_at: int
    """Address of the first byte of its pages."""
    versions_at: int
    """Address of the first of its versions, 8 bytes each, little-endian."""


def pack_hello(hello: SlabHello) -> bytes:
    borrower, volume = hello.borrower.encode(), hello.volume.encode()
    return _HELLO.pack(MAGIC, borrower, volume, hello.slab, hello.epoch, hello.session, hello.nonce)


def hello(data: bytes | bytearray) -> SlabHello:
    """Parse a hello. WireError when it is none."""
    headers.expect("hello", data, HELLO_BYTES)
    magic, borrower, volume, index, epoch, session, nonce = _HELLO.unpack(data)
    if magic[:-1] == MAGIC[:-1] and magic != MAGIC:
        theirs, ours = magic[-1:].decode("ascii", "replace"), MAGIC[-1:].decode()
        raise OtherProtocolVersion(f"it speaks version {theirs} of the slab protocol, this process {ours}")
    if magic != MAGIC:
        raise WireError("not a slab connection")
    return SlabHello(_name(borrower), _name(volume), index, epoch, session, nonce)


def _name(field: bytes) -> str:
    try:
        return field.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError as error:
        raise WireError("a name that is no ASCII") from error


def pack_request(asked: SlabRequest) -> bytes:
    return _REQUEST.pack(
        asked.op, asked.pages, asked.slab, asked.page, asked.size, asked.epoch, asked.tag, asked.version
    )


def request(data: bytes | bytearray | memoryview) -> SlabRequest:
    """Parse a request. WireError when it is none, or announces more bytes than any request may bring along."""
    if len(data) != REQUEST_BYTES:
        headers.expect("request", data, REQUEST_BYTES)
    code, pages, slab, page, size, epoch, tag, version = _REQUEST.unpack(data)
    op = _OPS.get(code)
    if op is None:
        raise WireError(f"unknown operation {code}")
    if size > BYTES_MAX:
        raise WireError(f"{op.name} with {size} bytes; at most {BYTES_MAX}")
    return SlabRequest(op, pages, slab, page, size, epoch, tag, version)


def check(asked: SlabRequest, pages: int, page_bytes: int) -> None:
    """WireError when the request is outside a slab of `pages` pages, or brings along another number of bytes than it
    must."""
    op, count = asked.op, asked.pages
    if op is READ or op is DISCARD:
        limit, size = REQUEST_PAGES_MAX, 0
    elif op is WRITE:
        limit, size = REQUEST_PAGES_MAX, count * page_bytes
    elif op is COPY:
        limit, size = REQUEST_PAGES_MAX, count * (page_bytes + VERSION_BYTES)
    elif op is VERSIONS:
        limit, size = VERSIONS_MAX, 0
    else:
        limit, size = 0, _ABOUT_NO_PAGES[op]
    if asked.size != size:
        raise WireError(f"{op.name} of {count} pages with {asked.size} bytes instead of {size}")
    if limit and (not 1 <= count <= limit or asked.page + count > pages):
        raise WireError(f"{op.name} of {count} pages at {asked.page}; there are {pages}, a request has at most {limit}")


def pack_reply(reply: SlabReply) -> bytes:
    return _REPLY.pack(*reply)


def pack_done(asked: SlabRequest) -> bytes:
    """Pack the reply that a request is done."""
    return _REPLY.pack(0, asked.pages, asked.slab, asked.epoch, asked.tag)


def reply(data: bytes | bytearray) -> SlabReply:
    """Parse a reply. WireError when it is none."""
    return SlabReply(*reply_fields(data))


def reply_fields(data: bytes | bytearray | memoryview) -> tuple[SlabStatus, int, int, int, int]:
    """The fields of a `SlabReply`. WireError when it is none."""
    if len(data) != REPLY_BYTES:
        headers.expect("reply", data, REPLY_BYTES)
    code, pages, slab, epoch, tag = _REPLY.unpack(data)
    status = _STATUSES.get(code)
    if status is None:
        raise WireError(f"unknown status {code}")
    return status, pages, slab, epoch, tag


def pack_attached(attached: AttachedSlab) -> bytes:
    return _ATTACHED.pack(*attached)


def attached(data: bytes | bytearray) -> AttachedSlab:
    """Parse the answer to ATTACH. WireError when it has another length."""
    headers.expect("attached", data, ATTACHED_BYTES)
    return AttachedSlab(*_ATTACHED.unpack(data))


def pack_paired(place: PairPlace | None, why: str = "") -> bytes:
    """Pack a queue pair; None: there is none, and `why`."""
    gid, lid, number, psn, mtu = (bytes(GID_BYTES), 0, 0, 0, 0) if place is None else msgspec.structs.astuple(place)
    return _PAIRED.pack(gid, lid, number, psn, mtu, _words(why) if place is None else b"")


def paired(data: bytes | bytearray) -> PairPlace | str:
    """The pair, or why there is none. WireError when it is neither."""
    headers.expect("queue pair", data, PAIRED_BYTES)
    gid, lid, number, psn, mtu, why = _PAIRED.unpack(data)
    if not mtu:
        return _read(why) or "it does not say why"
    if mtu > MTU_MAX or lid >> 16 or number >> NUMBER_BITS or psn >> NUMBER_BITS:
        raise WireError(f"no queue pair: number {number}, first packet {psn}, lid {lid}, mtu {mtu}")
    return PairPlace(gid, lid, number, psn, mtu)


def pack_region(region: LentRegion | None, why: str = "") -> bytes:
    """Pack a region; None: the slab is not registered, and `why`."""
    return _REGION.pack(*(region or (0, 0, 0, 0)), _words(why) if region is None else b"")


def region(data: bytes | bytearray) -> LentRegion | str:
    """The region, or why there is none. WireError when it has another length."""
    headers.expect("region", data, LENT_REGION_BYTES)
    *numbers, why = _REGION.unpack(data)
    return LentRegion(*numbers) if any(numbers) else (_read(why) or "it does not say why")


def pack_lent_memory(name: str, why: str = "") -> bytes:
    """Pack the name by which a process of the same host maps a slab; empty: it cannot, and `why`."""
    return _LENT_MEMORY.pack(name.encode(), _words(why))


def lent_memory(data: bytes | bytearray) -> tuple[str, str]:
    """The name, or why there is none. WireError when it has another length."""
    headers.expect("lent memory", data, LENT_MEMORY_BYTES)
    name, why = (_read(part) for part in _LENT_MEMORY.unpack(data))
    return name, "" if name else why or "it does not say why"


def _words(why: str) -> bytes:
    return why.encode("ascii", "replace")[:WHY_BYTES]


def _read(why: bytes) -> str:
    """A peer's reason for people: whatever it sent, the result is one printable line."""
    return "".join(each if each.isprintable() else "?" for each in why.rstrip(b"\0").decode("ascii", "replace"))


def proof_of_volume(secret: bytes, hello: bytes, nonce: bytes, slab: int, epoch: int) -> bytes:
    """Proof that the volume knows the secret of a further slab; valid on the connection of this hello and nonce
    alone."""
    return proof_of_client(secret, hello + _SLAB.pack(slab, epoch), nonce)


def proof_of_lender(secret: bytes, hello: bytes, nonce: bytes, slab: int, epoch: int) -> bytes:
    return proof_of_server(secret, hello + _SLAB.pack(slab, epoch), nonce)
