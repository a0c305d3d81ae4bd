"""A volume offered as a block device by its agent, on a simulated rack: also after its process began anew."""

import asyncio

import pytest

from covey.core.errors import Refused
from tests.plugins.memory.nbd import Client
from tests.plugins.memory.rack import PAGE, MemoryRack, SimClient, pattern
from tests.plugins.memory.test_service import a_rack, keep_hot, until_done

PATH = "/run/of-a-test.sock"


async def block_device(client: SimClient, size_bytes: int) -> Client:
    """Connect a client of the block device as soon as a server listens."""
    while True:
        try:
            found = Client(await client.env.bytes.connect(f"unix:{PATH}"))
            await found.greet()
            await found.go(size_bytes=size_bytes)
            return found
        except ConnectionError:
            await asyncio.sleep(0.1)


def rewrite(rack: MemoryRack, version: int, kill: bool) -> None:
    """Write every page of the volume as this version over the block device; then read it over the device and over the
    other door."""

    async def work(client: SimClient) -> None:
        device = await block_device(client, client.size_bytes)
        for page in range(client.size_bytes // PAGE):
            assert await device.write(page * PAGE, pattern(page, version)) == 0
        if kill:
            rack.vold("h1", "data").signal(9)  # right after the last acknowledgement
            device = await block_device(client, client.size_bytes)
        for page in range(client.size_bytes // PAGE):
            assert await device.read(page * PAGE, PAGE) == pattern(page, version), f"page {page}"
            assert await client.read(page, 1) == pattern(page, version), f"page {page}, other door"

    until_done(rack, rack.client("h1", work, "data"))


@pytest.mark.parametrize("slabs", [0, 2], ids=["on the disk", "at lenders"])
def test_an_exported_volume_is_served_again_when_its_process_was_killed(slabs: int) -> None:
    with a_rack(3) as rack:
        rack.attach("h1", "data", "128 KiB")
        if slabs:
            keep_hot(rack, "h1", "data", slabs=slabs)
        rack.command("h1", "export", volume="data", socket=PATH)
        for version, kill in ((11, False), (12, True), (13, True)):
            rewrite(rack, version, kill)
        rack.command("h1", "export", volume="data", socket=PATH, end=True)

        async def work(client: SimClient) -> None:
            with pytest.raises(ConnectionError):
                await client.env.bytes.connect(f"unix:{PATH}")

        until_done(rack, rack.client("h1", work, "data"))
        assert rack.agents["h1"].borrowing.volumes["data"].known.exports == ()


def test_an_export_that_is_not_possible_is_refused_with_a_reason_and_a_next_step() -> None:
    with a_rack(1) as rack:
        rack.attach("h1", "data", "64 KiB")
        taken = rack.agents["h1"].borrowing.path("data")
        for volume, path, code in (
            ("none", PATH, 3),
            ("data", "relative.sock", 2),
            ("data", "", 2),
            ("data", "/" + "x" * 107, 2),
            ("data", "/a\0b", 2),
            ("data", taken, 4),
        ):
            with pytest.raises(Refused) as refused:
                rack.command("h1", "export", volume=volume, socket=path)
            assert (refused.value.code, bool(refused.value.next)) == (code, True)
        assert rack.agents["h1"].borrowing.volumes["data"].known.exports == ()
