"""What this version writes of each of its formats: values with every field set, and how they look as bytes.

make samples     adds what is missing under tests/compatibility/0.1.0; it changes nothing there

A sample is made once, from the types: then it is a file, which every later version has to read
(docs/compatibility.md). Until 0.1.0 is tagged, a change of a format removes the folder and has it written anew.
"""

import asyncio
import functools
import importlib
import json
import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from agent import event_log
from agent.api import http
from agent.api.exposition import declared
from agent.ports.disk import DirectoryDisk
from agent.raft.disk import Store
from agent.raft.machine.types import HardState, Persist, SaveSnapshot, Snapshot
from agent.raft.messages import Entry, crc
from agent.rpc.envelope import Envelope
from covey.core.ids import HostId, JobId
from covey.kernel import pages
from covey.tensors.numbers import tensor_wire as tensorwire
from covey.wire import checked, handshake, headers
from covey.wire import volume_wire as volumewire
from gossip.joining.messages import JoinToken, RackGiven, fingerprint, pack_refusal, read_ask
from gossip.joining.policy import JoinAsking, give
from gossip.packet import Keyring, Sealer
from gossip.types import Sender
from plugins.memory.datapath.wire import slabwire
from plugins.memory.policy import log_records
from plugins.views import EventLine
from tests.plugins.memory.ports import a_bench, write
from tests.plugins.scheduler.little import Little
from tools import annotated

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
KEPT = HERE / "0.1.0"
"""Samples as version 0.1.0 writes them."""
MESSAGES, FRAMES, NAMES = KEPT / "messages.json", KEPT / "frames.json", KEPT / "names.json"
SETTINGS = KEPT / "agent.toml"
RECORDS = (
    *(
        "Identity",
        "KeyRing",
        "PeersFile",
        "ReservationFile",
        "AggregatorState",
        "SlabsOnDisk",
        "VolumeOwner",
        "VolumeRecord",
        "PlacesRecord",
    ),
    *("SegmentList", "LeftRecords", "StartRecord", "Fence", "SupervisorState"),
)
"""Classes of the files that `covey.wire.checked` writes."""
SPECIAL: dict[str, dict[str, Any]] = {}
"""Fields, by class, that only together with others may have what their types allow."""
KEY, SECRET, NONCE = bytes(range(32)), b"s" * 16, b"n" * 16


# ---- structs ---------------------------------------------------------------------------------------------------------


@functools.cache
def structs() -> dict[str, type[msgspec.Struct]]:
    """All Structs of the product, by name."""
    for package in ("covey", "gossip", "plugins", "agent"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if "msgspec.Struct" in (text := path.read_text()) or "Message, frozen" in text:
                importlib.import_module(
                    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                )
    return {kind.__name__: kind for kind in _below(msgspec.Struct) if kind.__module__.split(".")[0] in _OURS}


_OURS = ("covey", "gossip", "plugins", "agent")


@functools.cache
def tagged() -> dict[str, type[msgspec.Struct]]:
    """Structs that cross a wire or lie in the log under a tag, by the name of their class."""
    return {
        name: kind
        for name, kind in sorted(structs().items())
        if kind.__struct_config__.tag is not None and not kind.__subclasses__()
    }


def _below(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def sample(kind: type[msgspec.Struct]) -> msgspec.Struct:
    """A value of this kind with all its fields, none of them empty."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(_value(inspect.type_info(kind))), type=kind)


def _value(of: inspect.Type) -> Any:
    match of:
        case inspect.Metadata():
            return _value(of.type)
        case inspect.StructType():
            return _struct(of)
        case inspect.IntType() | inspect.FloatType():
            return _number(of)
        case inspect.StrType():
            return next(text for text in _TEXTS if _fits(text, of) and re.search(of.pattern or "", text))
        case inspect.BytesType():
            return bytes(max(of.min_length or 0, min(4, 4 if of.max_length is None else of.max_length)))
        case inspect.BoolType():
            return True
        case inspect.EnumType():
            return list(of.cls)[-1].value
        case inspect.LiteralType():
            return of.values[-1]
        case inspect.UnionType():
            return _value(next(each for each in of.types if not isinstance(each, inspect.NoneType)))
        case inspect.TupleType():
            return [_value(each) for each in of.item_types]
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            return [_value(of.item_type)] * max(1, of.min_length or 0)
        case inspect.DictType():
            return {_value(of.key_type): _value(of.value_type)}
        case inspect.AnyType() | inspect.RawType():
            return "any"
        case inspect.NoneType():
            return None
        case _:
            raise TypeError(f"no sample of {of}")


_TEXTS = (
    *("a1", "covey:data", "/a", "a", "0123456789abcdef" * 2, "0123456789abcdef" * 4, "127.0.0.1:4000"),
    *("ok:j3", "0-9", "ex-1", ""),
)


def _fits(text: str, of: inspect.StrType) -> bool:
    return (of.min_length or 0) <= len(text) <= (1000 if of.max_length is None else of.max_length)


def _number(of: inspect.IntType | inspect.FloatType) -> int | float:
    least = 0 if of.ge is None and of.gt is None else of.ge if of.ge is not None else of.gt
    assert least is not None
    step = of.multiple_of or 1
    wanted = (least // step + 1) * step
    most = of.le if of.le is not None else of.lt
    if most is None or wanted < most:
        return wanted
    return (least + most) / 2 if isinstance(of, inspect.FloatType) else least


def _struct(of: inspect.StructType) -> Any:
    special = SPECIAL.get(of.cls.__name__, {})
    fields = {field.encode_name: special.get(field.name, None) or _value(field.type) for field in of.fields}
    if of.array_like:
        return [*([] if of.tag is None else [of.tag]), *fields.values()]
    return fields if of.tag is None else {of.tag_field: of.tag, **fields}


# ---- fixed layouts, by name ------------------------------------------------------------------------------------------


JOIN_TOKEN = JoinToken(b"join1", fingerprint(bytes(32)), b"a secret of 20 bytes")


def join_asking() -> JoinAsking:
    """A new host that asks with this token."""
    return JoinAsking(JOIN_TOKEN, bytes(range(32)))


def frames() -> dict[str, bytes]:
    """One sample of each frame, head or page of fixed layout, as its own `pack` writes it."""
    hello = slabwire.SlabHello("h1", "data", 3, 7, SECRET, NONCE)
    declared = tensorwire.Declared("w", "model", (2, 3), 16, type="float16", mean=True)
    job, payload = tensorwire.job_hash(JobId("j1")), bytes(range(8))
    found = {
        f"tensors {op.name}": b"".join(tensorwire.frame(op, job, 5, key=9, part=1, rank=2, round=3, payload=payload))
        for op in (tensorwire.TensorOp.PUSH, tensorwire.TensorOp.RESULT, tensorwire.TensorOp.STATE)
    }
    opening = tensorwire.pack_declared(declared)
    found["tensors OPEN"] = b"".join(tensorwire.frame(tensorwire.TensorOp.OPEN, job, 5, key=9, rank=2, payload=opening))
    found["volume hello"] = volumewire.pack_hello(b"t" * volumewire.TOKEN_BYTES)
    found["pages welcome"] = headers.pack_welcome(headers.Welcome(headers.Status.OK, 4096, 1 << 26))
    found["pages request"] = headers.pack_request(headers.Request(headers.Op.WRITE, 5, 2, 11))
    found["pages reply"] = headers.pack_reply(headers.Reply(headers.Status.OK, 2, 11))
    found["slab hello"] = slabwire.pack_hello(hello)
    found["slab request"] = slabwire.pack_request(slabwire.SlabRequest(slabwire.WRITE, 2, 3, 5, 0, 7, 11, 13))
    found["handshake challenge"] = handshake.challenge(SECRET, b"hello", NONCE)
    found["handshake proof"] = handshake.proof_of_client(SECRET, b"hello", NONCE)
    found["log mark"] = log_records.pack_mark(77, 99)
    found["event line"] = event_log.frame(EventLine(1.5, HostId("h1"), "job/j1", "started", "why", "key"))
    sealer = Sealer(Keyring([KEY], "rack"), Sender(HostId("h1"), NONCE, 3), b"salt")
    known = tagged()
    found["gossip datagram"] = sealer.seal([sample(known["Ping"]), sample(known["Delta"])])  # type: ignore[list-item]
    asking, given = join_asking(), sample(RackGiven)
    ask = read_ask(asking.datagram)
    assert ask is not None and isinstance(given, RackGiven)
    found["join ask"] = asking.datagram
    found["join answer"] = give(JOIN_TOKEN, ask, asking.datagram, given, bytes(range(1, 33))) or b""
    found["join refusal"] = pack_refusal(asking.datagram, "used")
    found["envelope"] = msgspec.msgpack.encode(sample(Envelope))
    limits, report = bytearray(pages.PAGE_BYTES), bytearray(pages.PAGE_BYTES)
    pages.LimitsWriter(limits).write(pages.RankLimits(8, 0.5, 16, 0.25, 24, 1.0, 32, True, False))
    pages.ReportWriter(report).write(pages.RankReport(3, 1, 2, 4, 5, 6, 1, True, False))
    found["limits page"], found["report page"] = bytes(limits).rstrip(b"\0"), bytes(report).rstrip(b"\0")
    return found


# ---- names that people and scripts use -------------------------------------------------------------------------------


def names() -> dict[str, list[str]]:
    import covey
    import covey.remote

    routes: list[str] = []
    api: Any = object.__new__(http.HttpApi)
    api._ask = lambda *given, **more: None
    api._add_reads(lambda path, *more, **also: routes.append(f"GET {path}"))
    api._add_changes(lambda path, *more, **also: routes.append(f"POST {path}"))
    python = [f"covey.{name}" for name in covey.__all__] + [f"covey.remote.{name}" for name in covey.remote.__all__]
    job = [f"covey.Job.{name}" for name in dir(covey.Job) if not name.startswith("_")]
    return {
        "http": sorted(
            route for route in routes if not route.endswith((".js", ".css"))
        ),  # parts of the page are its own
        "metrics": [metric.name for metric in declared()],
        "python": sorted([*python, *job]),
    }


# ---- files -----------------------------------------------------------------------------------------------------------


async def raft_log(folder: Path) -> None:
    """Write a log with entries after a snapshot, whose state is that of a queue with jobs."""
    rack = Little([4, 2], {"red": 2})
    for workers, tenant in ((2, "red"), (1, "blue"), (4, "red")):
        rack.submit(workers, tenant)
    rack.settle()
    state = rack.queue.snapshot()
    disk = DirectoryDisk(str(folder))
    store = Store(disk, random.Random(1).randbytes)
    await store.load()
    entries = [Entry(2, b"an id", 5, data) for data in (b"one", b"two")]
    identity = HardState(identity=b"i" * 16, rack=b"a rack 1")
    image = Snapshot(5, 1, state, crc(state))
    await store.checkpoint(SaveSnapshot(0, msgspec.structs.replace(identity, term=1, commit=5), image, 5, 1, ()))
    await store.append([Persist(0, msgspec.structs.replace(identity, term=2, vote="h1", commit=6), 6, tuple(entries))])
    disk.close()


async def volume(folder: Path) -> None:
    """Write a volume in which pages 3 and 4 have the words 1003 and 1004."""
    async with a_bench() as bench:
        written = await bench.volume()
        await write(written, 3, 1003, 1004)
        await written.flush()
        await written.end()
        _copy(Path(bench.env.disk.path("memory/volumes/data")), folder)


def add_missing() -> None:
    """Write a sample of everything that has none yet."""
    KEPT.mkdir(exist_ok=True)
    known = structs()
    old = json.loads(MESSAGES.read_text()) if MESSAGES.exists() else {}
    new = {name: msgspec.msgpack.encode(sample(kind)).hex() for name, kind in tagged().items() if name not in old}
    MESSAGES.write_text(json.dumps(dict(sorted((old | new).items())), indent=0) + "\n")
    old = json.loads(FRAMES.read_text()) if FRAMES.exists() else {}
    new = {name: data.hex() for name, data in frames().items() if name not in old}
    FRAMES.write_text(json.dumps(dict(sorted((old | new).items())), indent=0) + "\n")
    kept: dict[str, list[str]] = json.loads(NAMES.read_text()) if NAMES.exists() else {}
    every = {kind: sorted({*kept.get(kind, ()), *found}) for kind, found in names().items()}
    NAMES.write_text(json.dumps(every, indent=0) + "\n")
    for name in RECORDS:
        if not (file := KEPT / "records" / name).exists():
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(checked.seal(sample(known[name])))
    if not SETTINGS.exists():
        SETTINGS.write_text(annotated.text())
    for folder, written in ((KEPT / "log", raft_log), (KEPT / "volume", volume)):
        if not folder.exists():
            with tempfile.TemporaryDirectory() as scratch:
                asyncio.run(written(Path(scratch)))
                _copy(Path(scratch), folder)


def _copy(found: Path, folder: Path) -> None:
    """Copy all files below `found`."""
    for path in sorted(path for path in found.rglob("*") if path.is_file()):
        copy = folder / path.relative_to(found)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())


if __name__ == "__main__":
    add_missing()
