"""DDP scripts whose gradients are on a device end with the bits of the CPU: real processes, a real aggregator."""

import re
from pathlib import Path

import pytest

from tests.covey.device import lab
from tests.covey.forks import Forks
from tests.covey.hooks.torch_jobs import NEEDS_TORCH
from tests.plugins.aggregator.loopback import AggdThread

pytestmark = [
    *NEEDS_TORCH,
    pytest.mark.xdist_group("lab"),
    pytest.mark.skipif(lab.compiler() is None, reason="there is no C++ compiler"),
]
SCRIPT = Path(__file__).with_name("ddp_script.py")
EPOCH = 1 << 32
KINDS = "plain,views,accumulated,bfloat16,float16,float64,split"


def trained(
    forks: Forks, folder: Path, device: str, kinds: str, group: str = "covey", ranks: int = 2
) -> tuple[dict[str, str], str]:
    """By kind, the checksum with which all ranks end, and what rank 0 printed."""
    folder.mkdir()
    running = AggdThread(folder)
    at = running.serve("j1", EPOCH + 1, ranks)
    processes = [forks.run(SCRIPT, rank, ranks, device, group, kinds) for rank in range(ranks)]
    try:
        for each in processes:
            each.say(f"{at.epoch} {at.address} 0")
        assert [each.wait() for each in processes] == [0] * ranks, [each.text()[-4000:] for each in processes]
        texts = [each.text() for each in processes]
    finally:
        for each in processes:
            each.close()
        running.finish()
    found = [dict(re.findall("sha256 (.*) (.*)", text)) for text in texts]
    assert all(each == found[0] for each in found) and list(found[0]) == kinds.split(",")
    return found[0], texts[0]


def test_gradients_on_a_device_give_the_bits_of_the_cpu(forks: Forks, tmp_path: Path) -> None:
    """Among them are models of 16 and 64 bits, one on two devices, one that is compiled, and `no_sync`. Nobody waits
    for a whole device, and memory is pinned once for each bucket."""
    there, said = trained(forks, tmp_path / "lab", "lab", f"{KINDS},compiled")
    here, _ = trained(forks, tmp_path / "cpu", "cpu", KINDS)
    assert there == {**here, "compiled": here["plain"]} and len(set(here.values())) == 5
    waited, pinned = map(int, re.findall(r"devices waited for (\d+) pinned (\d+)", said)[0])
    assert waited == 0 and pinned < 8 * 9, "buffers are used again in each pass"
