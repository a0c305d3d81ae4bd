"""Real operators of PyTorch under the native gate, whose device is a played GPU: its runtime is a small library in
which an event is done 5 ms after it was recorded (`covey/hooks/gate/gate.cpp` with `device_queue.cpp`)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.covey.hooks.torch_jobs import NEEDS_TORCH, gate_folder

pytestmark = NEEDS_TORCH
ROOT = Path(__file__).parents[3]
RUNTIME = """
#include <time.h>
#include <thread>
static long now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000L + t.tv_nsec; }
static long recorded[16], events, records, host_functions;
extern "C" {
int cudaEventCreateWithFlags(void** event, unsigned flags) { *event = &recorded[events++]; return flags == 3 ? 0 : 1; }
int cudaEventRecord(void* event, void* stream) { *(long*)event = now(); records++; return stream == (void*)7 ? 0 : 1; }
int cudaEventQuery(void* event) { return now() - *(long*)event < 5000000 ? 600 : 0; }
int cudaStreamIsCapturing(void*, int* into) { return *into = 0; }
int cudaGetLastError() { return 0; }
int cudaLaunchHostFunc(void*, void (*call)(void*), void* of) {
  host_functions++;
  std::thread([=] { timespec t{0, 20000000}; nanosleep(&t, nullptr); call(of); }).detach();
  return 0;
}
int cudaHostAlloc(void**, size_t, unsigned) { return 2; }
int cudaFreeHost(void*) { return 0; }
long recorded_so_far() { return records; }
}
"""
SCRIPT = """
import ctypes, json, sys, time
import torch
from covey.hooks.gate.build import TorchBuild, cache_folder, found
from covey.hooks.limits.cuda_calls import DeviceQueue
from covey.hooks.gate.native import NativeGate
from covey.kernel.pages import PAGE_BYTES, FlagReader, FlagWriter, LimitsWriter, RankLimits
torch.set_num_threads(1)
library = found(TorchBuild.of(torch), cache_folder())
gate, runtime = NativeGate(library), ctypes.CDLL(sys.argv[1])
queue = DeviceQueue(library, runtime)
queue.stream_is(7)
limits, flag = bytearray(PAGE_BYTES), bytearray(PAGE_BYTES)
writer, x = LimitsWriter(limits), torch.zeros(8)
FlagWriter(flag)
gate.start(limits, flag, False)
epoch = 0

def obey(**rates):
    global epoch
    epoch += 1
    writer.write(RankLimits(epoch, failsafe=0.5, lease_ns=time.monotonic_ns() + 60 * 10**9, **rates))
    gate.look()

def operators(seconds):
    count, end_s = 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        x.add_(1)
        count += 1
    return count

def tell(**found):
    gate.stop()
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("runtime")
    (folder / "runtime.cpp").write_text(RUNTIME)
    command = [
        compiler,
        "-std=c++20",
        "-w",
        "-shared",
        "-fPIC",
        str(folder / "runtime.cpp"),
        "-o",
        str(folder / "r.so"),
    ]
    subprocess.run(command, check=True, timeout=120)
    return str(folder / "r.so")


def tried(runtime: str, script: str) -> Any:
    gate_folder()
    command = [sys.executable, "-c", SCRIPT + script, runtime]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_operators_wait_for_the_part_before_them_while_limits_hold_and_not_otherwise(runtime: str) -> None:
    """Each part has one event; without a limit there are none at all. Reference: §3.1.2."""
    found = tried(
        runtime,
        "operators(0.2); before = runtime.recorded_so_far()\n"
        "obey(idle=0.9, busy=0.9); held = operators(1.0)\n"
        "under, records = queue.counters(), runtime.recorded_so_far()\n"
        "obey(); free = operators(0.2); after = runtime.recorded_so_far()\n"
        "tell(before=before, held=held, parts=under.parts, waits=under.waits, operators=under.operators,\n"
        "     queued_ns=under.queued_ns, failures=under.failures, records=records, free=free, after=after)",
    )
    assert found["before"] == 0 and found["after"] == found["records"] == found["parts"] > 10
    assert found["held"] <= 16 * (found["parts"] + 2), "a part has few operators: they take 5 ms, and it may take 2"
    assert found["free"] > 10 * found["held"] / 5 and found["waits"] > 0 and found["failures"] == 0
    assert 0.5e9 < found["queued_ns"] < 1.5e9, "it is charged for the time in which something is queued"


@pytest.mark.long
def test_a_rank_that_may_do_nothing_is_done_with_its_queue_and_is_charged_no_more(runtime: str) -> None:
    found = tried(
        runtime,
        "import threading\n"
        "obey(idle=0.9, busy=0.9); operators(0.2)\n"
        "over = threading.Thread(target=operators, args=(1.0,))\n"
        "obey(idle=0.0, busy=0.0); over.start(); time.sleep(0.3)\n"
        "first = queue.counters(); time.sleep(0.3); second = queue.counters()\n"
        "obey(); over.join()\n"
        "tell(first=first, second=second)",
    )
    assert found["first"][0] == found["second"][0], "no events while it is stopped"
    assert found["second"][4] - found["first"][4] < 0.01e9


def test_the_flag_of_a_guaranteed_rank_follows_the_end_of_its_stream(runtime: str) -> None:
    found = tried(
        runtime,
        "obey(guaranteed=True); flags = FlagReader(flag)\n"
        "seen = [flags.busy()]; queue.waits(); seen.append(flags.busy())\n"
        "time.sleep(0.3); seen.append(flags.busy()); queue.works(); seen.append(flags.busy())\n"
        "queue.waits(); queue.works(); time.sleep(0.3); seen.append(flags.busy())\n"
        "tell(seen=seen)",
    )
    assert found["seen"] == [True, True, False, True, True]
