"""Clients of the block device that no one here wrote; each is skipped where it is not installed."""

import asyncio
import json
import random
import shutil
from pathlib import Path

import pytest

from tests.plugins.memory.nbd import SIZE, exported
from tests.plugins.memory.ports import SHAPE, Bench

QEMU_IO = [
    "write -P 5 0 64k", "read -P 5 0 64k", "write -P 7 1000 3000", "read -P 7 1000 3000", "read -P 5 4096 1000",
    "write -z 8k 16k", "read -P 0 8k 16k", "discard 32k 8k", "read -P 0 32k 8k", "read -P 5 40k 24k",
    "flush", "write -f -P 9 65000 3000", "read -P 9 65000 3000",
]  # fmt: skip

NBDSH = f"""
import random
rng, size = random.Random(11), {SIZE}
model = bytearray(size)

def span():
    ends = sorted(min(size, max(0, rng.randrange(size // 4096 + 1) * 4096 + rng.choice(BESIDE))) for _ in range(2))
    return ends[0], max(1, ends[1] - ends[0]) if ends[0] < size else 0

BESIDE = (0, 0, 1, -1, 512, -512, 1000, 2048)
for _ in range(150):
    offset, length = span()
    if not length:
        continue
    match rng.randrange(5):
        case 0:
            h.zero(length, offset, rng.choice((0, nbd.CMD_FLAG_NO_HOLE)))
            model[offset:offset + length] = bytes(length)
        case 1:
            h.trim(length, offset)
            first, end = -(-offset // 4096) * 4096, (offset + length) // 4096 * 4096
            model[first:max(first, end)] = bytes(max(0, end - first))
        case _:
            data = rng.randbytes(length)
            h.pwrite(data, offset, rng.choice((0, nbd.CMD_FLAG_FUA)))
            model[offset:offset + length] = data
    for _ in range(4):
        offset, length = span()
        if not length:
            continue
        assert h.pread(length, offset) == model[offset:offset + length], (offset, length)
        told = []
        h.block_status(length, offset, lambda context, at, found, error: told.extend(found))
        at = offset
        for run, state in zip(told[::2], told[1::2]):
            assert not state & 2 or not any(model[at:min(at + run, offset + length)]), (offset, length, told)
            at += run
        assert at >= offset + length, (offset, length, told)
print("alike")
"""


async def run(*argv: str) -> str:
    """Output of a program that must succeed; the test is skipped when the program is not installed."""
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed: apt-get install nbdkit fio libnbd-bin qemu-utils")
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(60):
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


def uri(bench: Bench) -> str:
    return f"nbd+unix:///?socket={bench.env.run_dir}/nbd.sock"


async def test_qemu_io_reads_what_it_wrote() -> None:
    async with exported() as (bench, _, _):
        said = await run("qemu-io", "-f", "raw", *(word for each in QEMU_IO for word in ("-c", each)), uri(bench))
        assert "failed" not in said and said.count("bytes at offset") == len(QEMU_IO) - 1


async def test_nbdinfo_sees_what_the_volume_can() -> None:
    async with exported() as (bench, _, _):
        said = await run("nbdinfo", uri(bench))
        for line in ("can_fua: true", "can_multi_conn: true", "can_trim: true", f"export-size: {SIZE}"):
            assert line in said


async def test_nbdcopy_copies_a_file_in_and_out_again(tmp_path: Path) -> None:
    async with exported() as (bench, _, _):
        (tmp_path / "in").write_bytes(random.Random(3).randbytes(SIZE))
        await run("nbdcopy", str(tmp_path / "in"), uri(bench))
        await run("nbdcopy", uri(bench), str(tmp_path / "out"))
        assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()


async def test_fio_verifies_every_block_that_it_wrote() -> None:
    async with exported() as (bench, _, _):
        said = await run(
            "fio", "--name=v", "--ioengine=nbd", f"--uri={uri(bench)}", "--rw=randwrite", "--bs=4k", "--iodepth=8",
            f"--size={SIZE}", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0", "--loops=3",
        )  # fmt: skip
        assert "err= 0" in said


@pytest.mark.parametrize("lent", [True, False], ids=["at lenders", "on the disk"])
async def test_libnbd_reads_what_it_wrote_at_any_offset(lent: bool) -> None:
    """No range is called zero where there is content, also within a page."""
    async with exported(lent) as (bench, _, _):
        if shutil.which("nbdsh") is None:
            pytest.skip("nbdsh is not installed: apt-get install libnbd-bin python3-libnbd")
        systems = "PATH=/usr/bin:/bin"  # its module belongs to the Python of the system
        said = await run("env", systems, "nbdsh", "--base-allocation", "-u", uri(bench), "-c", NBDSH)
        assert "alike" in said


async def test_nbdinfo_maps_what_is_allocated() -> None:
    async with exported() as (bench, _, _):
        await run("qemu-io", "-f", "raw", "-c", "write -P 5 16k 32k", "-c", "discard 32k 4k", uri(bench))
        said = await run("nbdinfo", "--map", "--json", uri(bench))
        found = [(each["offset"], each["length"], each["type"]) for each in json.loads(said)]
        assert found == [
            (0, 16384, 3),
            (16384, 16384, 0),
            (32768, 4096, 3),
            (36864, 12288, 0),
            (49152, SIZE - 49152, 3),
        ]


async def test_nbdcopy_skips_what_is_not_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program asks for 256 KiB at least, so the volume is larger than in other tests."""
    size = 4 << 20
    monkeypatch.setattr("tests.plugins.memory.ports.SHAPE", SHAPE._replace(size_bytes=size))
    async with exported(lent=False) as (bench, volume, _):
        await run("qemu-io", "-f", "raw", "-c", "write -P 5 1M 512k", uri(bench))
        before = volume.counts(1).read_bytes
        await run("nbdcopy", uri(bench), str(tmp_path / "out"))
        assert volume.counts(1).read_bytes - before == 512 << 10
        assert (tmp_path / "out").read_bytes() == bytes(1 << 20) + b"\5" * (512 << 10) + bytes(size - (1536 << 10))


async def test_qemu_img_converts_and_compares(tmp_path: Path) -> None:
    image = tmp_path / "in"
    image.write_bytes(bytes(8192) + random.Random(4).randbytes(20000) + bytes(SIZE - 28192))
    async with exported() as (bench, _, _):
        await run("qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", str(image), uri(bench))
        assert "identical" in await run("qemu-img", "compare", "-f", "raw", "-F", "raw", str(image), uri(bench))
        said = json.loads(await run("qemu-img", "map", "--output=json", "-f", "raw", uri(bench)))
        assert [(each["start"], each["length"]) for each in said if not each["zero"]] == [(8192, 20480)]
        await run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", uri(bench), str(tmp_path / "out.qcow2"))
        await run("qemu-img", "compare", "-f", "qcow2", "-F", "raw", str(tmp_path / "out.qcow2"), str(image))
