"""DDP scripts whose gradients are on a device end with the bits of the CPU: real processes, a real aggregator."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.covey.device import lab
from tests.covey.hooks.torch_jobs import NEEDS_TORCH
from tests.plugins.aggregator.loopback import AggdThread

pytestmark = [
    *NEEDS_TORCH,
    pytest.mark.xdist_group("lab"),
    pytest.mark.skipif(lab.compiler() is None, reason="there is no C++ compiler"),
]
ROOT = Path(__file__).parents[3]
EPOCH = 1 << 32
KINDS = "plain,views,accumulated,bfloat16,float16,float64,split,compiled"


def trained(folder: Path, device: str, kinds: str, group: str = "covey", ranks: int = 2) -> tuple[dict[str, str], str]:
    """By kind, the checksum with which all ranks end, and what rank 0 printed."""
    folder.mkdir()
    running = AggdThread(folder)
    at = running.serve("j1", EPOCH + 1, ranks)
    script = str(Path(__file__).with_name("ddp_script.py"))
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(ranks), device, group, kinds],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        for each in processes:
            assert each.stdin is not None
            each.stdin.write(f"{at.epoch} {at.address}\n")
            each.stdin.flush()
        ended = [each.communicate(timeout=100) for each in processes]
    finally:
        for each in processes:
            each.kill()
        running.finish()
    assert [each.returncode for each in processes] == [0] * ranks, [err[-4000:] for _, err in ended]
    found = [dict(re.findall("sha256 (.*) (.*)", out)) for out, _ in ended]
    assert all(each == found[0] for each in found) and list(found[0]) == kinds.split(",")
    return found[0], ended[0][0]


def test_gradients_on_a_device_give_the_bits_of_the_cpu(tmp_path: Path) -> None:
    """Among them are models of 16 and 64 bits, one on two devices, one that is compiled, and `no_sync`. Nobody waits
    for a whole device, and memory is pinned once for each bucket."""
    there, said = trained(tmp_path / "lab", "lab", KINDS)
    here, _ = trained(tmp_path / "cpu", "cpu", KINDS)
    assert there == here and len(set(here.values())) == 5
    waited, pinned = map(int, re.findall(r"devices waited for (\d+) pinned (\d+)", said)[0])
    assert waited == 0 and pinned < 8 * 9, "buffers are used again in each pass"
