"""What version 0.1.0 wrote is read by this version, field by field: docs/compatibility.md.

The files beside this one are never changed. A test that fails here has found a change that hosts and scripts of 0.1.0
would not understand.
"""

import asyncio
import json
import re
import shutil
import tomllib
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent import config, event_log
from agent.ports.disk import DirectoryDisk
from agent.raft.disk import DiskRefused, Store
from agent.rpc.envelope import decode as decode_envelope
from covey.kernel import pages
from covey.tensors.numbers import tensor_wire as tensorwire
from covey.wire import checked, handshake, headers
from covey.wire import volume_wire as volumewire
from covey.wire.checked import OtherFormat
from gossip.joining.messages import JoinRefusal, RackGiven, read_ask
from gossip.packet import Keyring, Opened, Opener
from plugins.memory.datapath.wire import slabwire
from plugins.memory.policy import log_records
from plugins.scheduler.machine.log.job_table import JobTable
from tests.compatibility.samples import (
    FRAMES,
    KEPT,
    KEY,
    MESSAGES,
    NAMES,
    NONCE,
    RECORDS,
    ROOT,
    SECRET,
    SETTINGS,
    frames,
    join_asking,
    names,
    sample,
    structs,
    tagged,
)
from tests.plugins.memory.ports import a_bench, read, write

pytestmark = pytest.mark.xdist_group("compatibility")
"""Group of these tests: one process imports everything."""
SAMPLES: dict[str, str] = json.loads(MESSAGES.read_text())
LAYOUTS: dict[str, bytes] = {name: bytes.fromhex(text) for name, text in json.loads(FRAMES.read_text()).items()}
PAYLOAD = bytes(range(8))
SETTING = re.compile(r"#[a-z_0-9]+ = (?! *# not set)")
ADD = "make samples adds it"


def missing(new: Any, old: Any, where: str = "") -> list[str]:
    """Parts of `old` that are not in `new`, which may have more: fields of a map, or at the end of a list."""
    if isinstance(old, dict):
        lost = [f"{where}.{name}" for name in old if name not in new]
        return lost + [each for name in old if name in new for each in missing(new[name], old[name], f"{where}.{name}")]
    if isinstance(old, list):
        short = [f"{where}[{at}]" for at in range(len(new), len(old))]
        pairs = enumerate(zip(new, old, strict=False))
        return short + [each for at, (one, other) in pairs for each in missing(one, other, f"{where}[{at}]")]
    return [] if new == old else [f"{where} is {new!r} and was {old!r}"]


def test_a_difference_is_found_wherever_it_is() -> None:
    old = {"a": [1, {"b": 2}], "c": 3}
    assert missing({"a": [1, {"b": 2, "new": 0}, 9], "c": 3, "d": 4}, old) == []
    assert missing({"a": [1, {}], "c": 4}, old) == [".a[1].b", ".c is 4 and was 3"]
    assert missing({"a": [1], "c": 3}, old) == [".a[1]"]


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_message_of_version_0_1_0_says_the_same(name: str) -> None:
    kind = tagged().get(name)
    assert kind is not None, f"{name} has another name now, or is gone: hosts of 0.1.0 send it"
    data = bytes.fromhex(SAMPLES[name])
    again = msgspec.msgpack.encode(msgspec.msgpack.decode(data, type=kind))
    assert missing(msgspec.msgpack.decode(again), msgspec.msgpack.decode(data)) == []


def test_every_message_has_its_sample() -> None:
    assert sorted(tagged().keys() - SAMPLES.keys()) == [], ADD
    assert len(SAMPLES) > 200


@pytest.mark.parametrize("name", RECORDS)
def test_a_durable_record_of_version_0_1_0_says_the_same(name: str) -> None:
    data = (KEPT / "records" / name).read_bytes()
    kind = structs()[name]
    value = checked.unseal(data, msgspec.msgpack.Decoder(kind))
    old, new = (msgspec.msgpack.decode(part) for part in (data[18:], msgspec.msgpack.encode(value)))
    assert missing(new, old) == []
    with pytest.raises(OtherFormat, match=r"record has format 2: Covey .* reads and writes format 1 of it; next: "):
        checked.unseal(checked.seal(value, version=2), msgspec.msgpack.Decoder(kind), name="record")


def test_whatever_keeps_records_keeps_known_ones() -> None:
    keepers = [
        path
        for package in ("covey", "gossip", "plugins", "agent")
        for path in sorted((ROOT / package).rglob("*.py"))
        if any(word in path.read_text() for word in ("checked.load(", "checked.unseal(", "checked.save("))
    ]
    assert len(keepers) > 8
    unknown = [path.name for path in keepers if not any(name in path.read_text() for name in RECORDS)]
    assert unknown == ["checked.py"] or unknown == [], f"name the class of its file in RECORDS; {ADD}"


def test_every_frame_of_version_0_1_0_is_read() -> None:
    assert LAYOUTS.keys() == frames().keys(), ADD
    for name, data in LAYOUTS.items():
        if name.startswith("tensors "):
            head = tensorwire.parse(data[: tensorwire.HEADER_BYTES])
            tensorwire.verify(data[: tensorwire.HEADER_BYTES], data[tensorwire.HEADER_BYTES :])
            assert (head.op.name, head.epoch, head.key, head.rank) == (name.removeprefix("tensors "), 5, 9, 2)
    declared = tensorwire.unpack_declared(LAYOUTS["tensors OPEN"][tensorwire.HEADER_BYTES :])
    assert (declared.name, declared.shape, declared.type, declared.mean) == ("w", (2, 3), "float16", True)
    assert read_ask(LAYOUTS["join ask"]) == read_ask(join_asking().datagram) is not None
    assert join_asking().answer(LAYOUTS["join answer"]) == sample(RackGiven)
    refusal = join_asking().answer(LAYOUTS["join refusal"])
    assert isinstance(refusal, JoinRefusal) and refusal.reason == "used"
    hello = volumewire.hello(LAYOUTS["volume hello"])
    assert hello == volumewire.Hello(volumewire.PAGES, b"t" * volumewire.TOKEN_BYTES)
    welcome = headers.welcome(LAYOUTS["pages welcome"])
    assert welcome == headers.Welcome(headers.Status.OK, 4096, 1 << 26)
    asked = headers.request(LAYOUTS["pages request"], 100, volumewire.OPERATIONS)
    assert asked == headers.Request(headers.Op.WRITE, 5, 2, 11)
    assert headers.reply(LAYOUTS["pages reply"]) == headers.Reply(headers.Status.OK, 2, 11)
    assert slabwire.hello(LAYOUTS["slab hello"]) == slabwire.SlabHello("h1", "data", 3, 7, SECRET, NONCE)
    assert slabwire.request(LAYOUTS["slab request"])._fields() == (slabwire.WRITE, 2, 3, 5, 0, 7, 11, 13)
    challenge = handshake.parse_challenge(LAYOUTS["handshake challenge"])
    assert challenge.nonce == NONCE
    assert handshake.is_proof(challenge.proof, handshake.proof_of_server(SECRET, b"hello", NONCE))
    assert handshake.is_proof(LAYOUTS["handshake proof"], handshake.proof_of_client(SECRET, b"hello", NONCE))
    assert log_records.mark(LAYOUTS["log mark"], 99) == 77
    ((line,), size) = event_log.lines(LAYOUTS["event line"])
    assert (line.subject, line.event, size) == ("job/j1", "started", len(LAYOUTS["event line"]))
    envelope = decode_envelope(LAYOUTS["envelope"])
    assert envelope is not None
    old, new = (msgspec.msgpack.decode(each) for each in (LAYOUTS["envelope"], msgspec.msgpack.encode(envelope)))
    assert missing(new, old) == []
    limits = pages.LimitsReader(LAYOUTS["limits page"].ljust(pages.PAGE_BYTES, b"\0"))
    assert limits.changed() and limits.newest == pages.RankLimits(8, 0.5, 16, 0.25, 24, 1.0, 32, True, False)
    report = pages.ReportReader(LAYOUTS["report page"].ljust(pages.PAGE_BYTES, b"\0")).fresh()
    assert report == pages.RankReport(3, 1, 2, 4, 5, 6, 1, True, False)


def test_a_datagram_of_version_0_1_0_is_opened() -> None:
    opened = Opener(Keyring([KEY], "rack"), 0).open(LAYOUTS["gossip datagram"])
    assert isinstance(opened, Opened)
    assert (opened.sender.host, opened.sender.boot, opened.unknown) == ("h1", 3, 0)
    assert [type(message).__name__ for message in opened.messages] == ["Ping", "Delta"]


def test_the_log_of_version_0_1_0_is_read_with_its_snapshot(tmp_path: Path) -> None:
    shutil.copytree(KEPT / "log", tmp_path, dirs_exist_ok=True)
    disk = DirectoryDisk(str(tmp_path))
    saved = asyncio.run(Store(disk, bytes).load())
    assert (saved.base_index, [entry.command for entry in saved.entries]) == (5, [b"one", b"two"])
    assert (saved.hard.term, saved.hard.vote, saved.hard.commit, saved.hard.lost) == (2, "h1", 6, False)
    assert saved.image is not None
    queue = JobTable()
    queue.restore(saved.image.data)
    queue.check()
    assert sorted(job.spec.tenant for job in queue.jobs.values()) == ["blue", "red", "red"]
    assert missing(msgspec.msgpack.decode(queue.snapshot()), msgspec.msgpack.decode(saved.image.data)) == []
    disk.close()


@pytest.mark.parametrize("file", ["consensus/log-00000002", "consensus/snapshot-00000002", "acknowledged"])
def test_a_log_of_another_format_is_refused_in_three_lines_and_left_alone(tmp_path: Path, file: str) -> None:
    shutil.copytree(KEPT / "log", tmp_path, dirs_exist_ok=True)
    with_another_version(tmp_path / file)
    before = contents(tmp_path)
    disk = DirectoryDisk(str(tmp_path))
    with pytest.raises((DiskRefused, OtherFormat)) as refused:
        asyncio.run(Store(disk, bytes).load())
    assert refused.value.what == f"{tmp_path / file} has format 2" and refused.value.why and refused.value.next
    assert contents(tmp_path) == before
    disk.close()


def contents(folder: Path) -> dict[Path, bytes]:
    """Content of every file below the folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def with_another_version(path: Path) -> None:
    """Turn a file into one of format 2, with checksums that hold."""
    data = bytearray(path.read_bytes())
    data[8:10] = (2).to_bytes(2, "big")
    if path.name == "acknowledged":
        for at in (0, 512):
            data[at + 8 : at + 10] = (2).to_bytes(2, "big")
            data[at + 508 : at + 512] = zlib.crc32(data[at : at + 508]).to_bytes(4, "big")
    else:
        data[14:18] = zlib.crc32(data[:14]).to_bytes(4, "big")
    path.write_bytes(data)


async def test_a_volume_of_version_0_1_0_is_opened_read_and_written() -> None:
    async with a_bench() as bench:
        shutil.copytree(KEPT / "volume", bench.env.disk.path("memory/volumes/data"))
        volume = await bench.volume()
        assert await read(volume, 2, 4) == [0, 1003, 1004, 0]
        await write(volume, 4, 2004)
        await volume.flush()
        assert await read(volume, 3, 2) == [1003, 2004]


async def test_a_volume_of_another_format_is_refused_and_left_alone() -> None:
    async with a_bench() as bench:
        folder = Path(bench.env.disk.path("memory/volumes/data"))
        shutil.copytree(KEPT / "volume", folder)
        record = checked.unseal((folder / "volume").read_bytes(), msgspec.msgpack.Decoder(structs()["VolumeRecord"]))
        (folder / "volume").write_bytes(checked.seal(record, version=2))
        before = contents(folder)
        with pytest.raises(OtherFormat, match="volumes/data/volume has format 2"):
            await bench.volume()
        assert contents(folder) == before


def test_every_setting_of_version_0_1_0_is_one() -> None:
    parsed = config.parse(said_in(SETTINGS), "agent.toml", {})
    assert parsed.plugins.keys() >= {"memory", "scheduler", "aggregator", "sharing"}


def said_in(path: Path) -> dict[str, Any]:
    """Every setting that the file has as a comment, with its value."""
    lines = path.read_text().splitlines()
    shown = [line[1:] if SETTING.match(line) else line for line in lines]
    return tomllib.loads("\n".join(shown))


@pytest.mark.parametrize("kind", ["http", "metrics", "python"])
def test_names_of_version_0_1_0_are_there(kind: str) -> None:
    """The names are routes of the HTTP API, metrics, and what scripts import."""
    kept, now = json.loads(NAMES.read_text())[kind], names()[kind]
    assert [name for name in kept if name not in now] == []
    assert [name for name in now if name not in kept] == [], ADD
