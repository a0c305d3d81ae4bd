"""The laboratory device is as unhelpful as a GPU: what is not waited for is not there, and the host cannot read it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.covey.device import lab
from tests.covey.hooks.torch_jobs import NEEDS_TORCH

pytestmark = [
    *NEEDS_TORCH,
    pytest.mark.xdist_group("lab"),
    pytest.mark.skipif(lab.compiler() is None, reason="there is no C++ compiler"),
]
ROOT = Path(__file__).parents[3]
READS = """
import ctypes, sys, torch
from tests.covey.device import lab
lab.load()
there = torch.ones(4, device="lab")
print(ctypes.string_at(there.data_ptr(), 4))
"""


@pytest.fixture(autouse=True)
def loaded() -> Any:
    lab.load()
    yield
    lab.latency(0.0)


def test_its_memory_cannot_be_read_by_the_host() -> None:
    import torch

    there = torch.arange(6.0, device="lab")
    assert (there * 2 + 1).cpu().tolist() == [1, 3, 5, 7, 9, 11]
    with pytest.raises(TypeError, match="can't convert lab"):
        there.numpy()
    done = subprocess.run([sys.executable, "-c", READS], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode < 0 and not done.stdout, "a reader of data_ptr ends with SIGSEGV"


def test_a_stream_that_waits_for_no_event_reads_what_was_there_before() -> None:
    import torch

    stream, ready = torch.Stream(device="lab"), torch.Event(device="lab")
    there, here = torch.zeros(4).to("lab"), torch.empty(4, pin_memory=True)
    own = torch.accelerator.current_stream("lab")
    own.synchronize()
    for waits, wanted in ((False, 0.0), (True, 1.0)):
        with lab.held(own):
            there.copy_(torch.ones(4))
            ready.record(own)
            if waits:
                stream.wait_event(ready)
            with stream:
                here.copy_(there, non_blocking=True)
            if not waits:
                stream.synchronize()
            assert not ready.query()
        stream.synchronize()
        assert here.tolist() == [wanted] * 4


def test_events_of_two_streams_end_in_any_order() -> None:
    import torch

    first, second = torch.Stream(device="lab"), torch.Stream(device="lab")
    events = [torch.Event(device="lab") for _ in range(2)]
    with lab.held(first):
        for stream, event in zip((first, second), events, strict=True):
            event.record(stream)
        events[1].synchronize()
        assert not events[0].query() and lab.waiting(first) == 1
    events[0].synchronize()
    assert events[0].query()


def test_its_numbers_are_those_of_the_cpu_and_its_draws_its_own() -> None:
    import torch

    def learnt(device: str) -> list[float]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4, device=device)).sum().backward()
            optimizer.step()
        return [each for part in model.parameters() for each in part.detach().cpu().flatten().tolist()]

    assert learnt("lab") == learnt("cpu")
    device: Any = torch.get_device_module("lab")
    here, there = torch.get_rng_state(), device.get_rng_state()
    torch.nn.functional.dropout(torch.ones(8, device="lab"))
    assert torch.equal(torch.get_rng_state(), here) and not torch.equal(device.get_rng_state(), there)
