"""The driver fails at each call with each of its errors, at the start and later, and is then well again: no GPU
vanishes, none is used of which too little is known, and nothing needs a restart."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from agent.ports.devices.inventory import Inventory, KnownDevice, Unread, shown
from agent.ports.devices.nvidia import nvml_reads, xid_events
from agent.ports.devices.nvidia.nvml import NvmlDevices
from agent.ports.devices.nvidia.nvml_driver import LISTEN_S, NO_DRIVER_S, DriverSaid, NvmlDriver, nvidia_gpus
from agent.ports.devices.nvidia.nvml_reads import caps_of
from agent.ports.devices.nvidia.xid_events import XidEvents
from agent.program import JsonLog
from covey.core.units import GIB
from covey.ports.devices import Gpu
from covey.ports.processes import ProcessId
from plugins.scheduler.service.gpus.use_watch import use_of
from tests.agent.here import Lines, until
from tests.agent.ports.devices.stand_in import Board, Part, StandIn, beneath_pynvml, in_parts

ERRORS: Mapping[str, int] = {
    name: code
    for name, code in sorted(vars(pynvml).items())
    if name.startswith("NVML_ERROR_") and isinstance(code, int) and code != pynvml.NVML_SUCCESS
}
NONE_OF_IT = frozenset({"NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED"})
"""Errors by which the driver says that it does not have something at all."""
SAYS_HOW_IT_IS = frozenset(
    {
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetUnrepairableMemoryFlag_v1",
    }
)
OF_INSTANCES = frozenset(
    {
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetGpuInstanceId",
    }
)
MAY_FAIL = frozenset(
    {
        "nvmlSystemGetDriverVersion",
        "nvmlShutdown",
        "nvmlDeviceGetMemoryLimits_v1",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetComputeInstanceId",
    }
)
"""Functions without which a device is used all the same."""
CALLS = (
    "nvmlInitWithFlags",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
    *sorted(OF_INSTANCES | SAYS_HOW_IT_IS | MAY_FAIL - {"nvmlShutdown"}),
)
NAMES = {"GPU-a", "GPU-b", "MIG-GPU-mig-3", "MIG-GPU-mig-5"}


class Deaf:
    """A listener in the place of `XidEvents`: what is listened to."""

    made: list["Deaf"]
    alive, why = True, ""
    deaf: tuple[str, ...] | None = None

    def __init__(self, _nvml: Any, handles: Any, _heard: Any) -> None:
        self.handles, self.closed = handles, False
        Deaf.made.append(self)

    def close(self) -> None:
        self.closed = True


@dataclass
class Played:
    """A driver over the real pynvml, read by hand."""

    stand_in: StandIn
    remembered: str = ""
    now_s: float = 0.0
    lines: Lines = field(default_factory=Lines)

    def __post_init__(self) -> None:
        log: Any = JsonLog(self.lines, "debug")  # type: ignore[arg-type]
        self.inventory = Inventory(self.remembered, log, lambda: "boot")
        self.driver = NvmlDriver(
            log,
            pynvml,
            self.inventory,
            lambda: False,
            lambda *_: None,
            expected=lambda: True,
            now_s=lambda: self.now_s,
            listens=Deaf,  # type: ignore[arg-type]
        )
        self.told = DriverSaid()

    def look(self, after_s: float = 1.0) -> tuple[Gpu, ...]:
        self.now_s += after_s
        self.told = self.driver.read()
        listed = [one.listed for one in self.told.listing.readings]
        return shown(self.inventory.devices, listed, self.told.listing.unread, self.told.silence)


@pytest.fixture(autouse=True)
def nobody_listens() -> Iterator[None]:
    Deaf.made = []
    yield


def boards() -> tuple[Board, ...]:
    return Board("GPU-a", processes={7: GIB}, shares={7: 10}), Board("GPU-b"), in_parts()


def used_all_the_same(call: str, error: str, gpu: Gpu) -> bool:
    """Whether a device may take jobs although this call failed so."""
    short = error.removeprefix("NVML_ERROR_")
    if call in MAY_FAIL:
        return True
    if call in OF_INSTANCES:
        return gpu.index != 2
    if call in SAYS_HOW_IT_IS:
        return short in NONE_OF_IT | {"INVALID_ARGUMENT"} or (short == "NO_PERMISSION" and gpu.condition == "degraded")
    if call in ("nvmlDeviceGetMigMode", "nvmlDeviceGetUtilizationRates"):
        return short in NONE_OF_IT
    if call == "nvmlDeviceGetMemoryInfo":
        return short == "NOT_SUPPORTED" and not gpu.uuid.startswith("MIG")
    return False


@pytest.mark.parametrize("call", CALLS)
def test_no_gpu_vanishes_whatever_fails_when(call: str) -> None:
    with beneath_pynvml(StandIn(*boards(), limits=True)) as driver:
        for error, code in ERRORS.items():
            for later in (False, True):
                played = Played(driver)
                driver.failing = {}
                if later:
                    assert {gpu.uuid for gpu in played.look() if gpu.condition == "ok"} == NAMES
                driver.failing = {call: code}
                found, about = played.look(), f"{call}, {error}, {'later' if later else 'at the start'}"
                if later and call == "nvmlInitWithFlags":
                    driver.failing["nvmlDeviceGetCount_v2"] = pynvml.NVML_ERROR_UNKNOWN
                    played.look()
                    found = played.look(2.0)
                if not later and not found:
                    assert played.told.silence and played.told.expected, f"{about}: nobody knows what is here, and why"
                else:
                    assert {gpu.index for gpu in found} == {0, 1, 2}, f"{about}: a GPU vanished"
                if later and (call != "nvmlDeviceGetMigMode" or error.removeprefix("NVML_ERROR_") not in NONE_OF_IT):
                    assert {gpu.uuid for gpu in found} == NAMES, f"{about}: they keep their names"
                for gpu in found:
                    assert gpu.condition == "ok" or gpu.why, f"{about}: {gpu.uuid} without a word"
                    assert not gpu.takes_jobs or used_all_the_same(call, error, gpu), f"{about}: {gpu} is used"
                driver.failing = {}
                back = played.look(NO_DRIVER_S + 1.0)
                assert {gpu.uuid for gpu in back if gpu.condition == "ok"} == NAMES, f"{about}: not back"
                assert len(back) == len(NAMES), f"{about}: what it was called meanwhile is not remembered"
                played.driver.end()


def test_every_call_that_lists_devices_is_among_those_that_fail() -> None:
    with beneath_pynvml(StandIn(*boards(), limits=True)) as driver:
        Played(driver).look()
        assert set(driver.calls) == set(CALLS)


PROCESSES = tuple(f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "MPSCompute"))


@pytest.mark.parametrize("call", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetProcessUtilization", *PROCESSES])
def test_who_uses_a_gpu_is_never_nobody_because_the_driver_does_not_tell(call: str) -> None:
    with beneath_pynvml(StandIn(*boards())) as driver:
        played = Played(driver)
        played.look()
        found = played.driver.handles["GPU-a"]
        for error, code in ERRORS.items():
            driver.failing = {call: code}
            try:
                sample, _ = nvml_reads.sample(pynvml, found, 0)
            except (pynvml.NVMLError, MemoryError):
                continue  # nothing is known, and its asker hears why
            assert [process.pid for process in sample.processes] == [7], f"{error}: the process is not gone"
            assert sample.processes[0].utilization != 0.0 or error == "NVML_ERROR_NOT_FOUND"


def test_a_gpu_without_memory_of_its_own_uses_the_hosts() -> None:
    with beneath_pynvml(StandIn(Board("GPU-a", name="NVIDIA GB10", memory=None, processes={7: GIB}))) as driver:
        (gpu,) = Played(driver).look()
        assert gpu.condition == "ok" and gpu.memory_total_bytes > GIB and gpu.memory_used_bytes == GIB


def test_a_gpu_whose_use_the_driver_does_not_tell_is_not_called_idle() -> None:
    with beneath_pynvml(StandIn(Board("GPU-a", busy=80))) as driver:
        played = Played(driver)
        (gpu,) = played.look()
        assert (gpu.utilization, use_of(gpu, None)) == (0.8, 0.8)
        driver.failing = {"nvmlDeviceGetUtilizationRates": ERRORS["NVML_ERROR_NOT_SUPPORTED"]}
        (gpu,) = played.look()
        assert (gpu.condition, gpu.utilization, use_of(gpu, None)) == ("ok", None, None)


def test_a_gpu_in_no_parts_is_named_with_what_to_do() -> None:
    with beneath_pynvml(StandIn(Board("GPU-a", mig=True))) as driver:
        played = Played(driver)
        (gpu,) = played.look()
        assert (gpu.uuid, gpu.condition) == ("GPU-a", "unknown") and "nvidia-smi mig -cgi" in gpu.why
        driver.boards[0].parts = [Part("MIG-1", 1, GIB), Part("MIG-2", 2, GIB)]
        assert [(gpu.uuid, gpu.condition) for gpu in played.look()] == [("MIG-1", "ok"), ("MIG-2", "ok")]
        driver.boards[0].parts = []  # as after a restart of the machine
        assert {(gpu.uuid, gpu.condition) for gpu in played.look()} == {("MIG-1", "unknown"), ("MIG-2", "unknown")}
        driver.boards[0].mig = False
        assert [(gpu.uuid, gpu.condition) for gpu in played.look()] == [("GPU-a", "ok")], "it is whole again"


def test_a_gpu_that_is_not_listed_any_more_is_named_until_an_operator_says_otherwise(tmp_path: Path) -> None:
    remembered = str(tmp_path / "state" / "gpus.json")
    with beneath_pynvml(StandIn(*boards()[:2])) as driver:
        Played(driver, remembered).look()
        gone = driver.boards.pop()
        played = Played(driver, remembered)  # the agent began anew
        assert {gpu.uuid: gpu.condition for gpu in played.look()} == {"GPU-a": "ok", gone.uuid: "unknown"}
        driver.present = False
        played = Played(driver, remembered)
        assert {gpu.condition for gpu in played.look()} == {"unknown"} and len(played.look()) == 2
        assert "the driver tells nothing of its GPUs" in played.lines.text
        driver.present = True
        assert played.inventory.forget(gone.uuid, listed=False) == "that it is here"
        assert [gpu.uuid for gpu in Played(driver, remembered).look()] == ["GPU-a"]


def test_an_xid_is_remembered_until_a_new_boot_or_an_operators_word(tmp_path: Path) -> None:
    path, log = str(tmp_path / "gpus.json"), JsonLog(Lines())  # type: ignore[arg-type]
    Inventory(path, log, lambda: "first boot").struck(["GPU-a", "GPU-b"], 48)
    after = Inventory(path, log, lambda: "first boot")
    assert after.xids == {"GPU-a": 48, "GPU-b": 48}
    assert after.forget("GPU-a", listed=True) == "XID 48" and after.forget("GPU-a", listed=True) == ""
    assert Inventory(path, log, lambda: "first boot").xids == {"GPU-b": 48}
    assert Inventory(path, log, lambda: "second boot").xids == {}


def test_what_cannot_be_read_or_written_is_said_and_ends_nothing(tmp_path: Path) -> None:
    lines = Lines()
    log: Any = JsonLog(lines)  # type: ignore[arg-type]
    (tmp_path / "gpus.json").write_text("{")
    inventory = Inventory(str(tmp_path / "gpus.json"), log)
    inventory.learn([KnownDevice("GPU-a", "H100", GIB, 0)])
    assert "cannot be read" in lines.text and Inventory(str(tmp_path / "gpus.json"), log).devices
    (tmp_path / "file").write_text("")
    inventory = Inventory(str(tmp_path / "file" / "gpus.json"), log)
    inventory.learn([KnownDevice("GPU-a", "H100", GIB, 0)])
    assert "cannot be written" in lines.text and list(inventory.devices) == ["GPU-a"]


def test_of_two_handles_that_fail_each_is_the_gpu_of_its_number() -> None:
    known = {f"GPU-{number}": KnownDevice(f"GPU-{number}", "H100", GIB, number) for number in range(3)}
    unread = [Unread(1, "Unknown Error"), Unread(2, "lost", "lost"), Unread(7, "new")]
    found = {gpu.uuid: (gpu.condition, gpu.why) for gpu in shown(known, (), unread, "")}
    assert found["GPU-1"] == ("unknown", "Unknown Error") and found["GPU-2"] == ("lost", "lost")
    assert "no longer lists it" in found["GPU-0"][1] and found["unread-7"] == ("unknown", "new") and len(found) == 4


def test_a_machine_with_gpus_on_its_bus_and_no_driver_says_so(tmp_path: Path) -> None:
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300"), ("c", "0x1002", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    (tmp_path / "d").mkdir()
    assert nvidia_gpus(str(tmp_path)) == 1 and nvidia_gpus(str(tmp_path / "none")) == 0
    with beneath_pynvml(StandIn()) as driver:
        driver.present = False
        log: Any = JsonLog(Lines())  # type: ignore[arg-type]
        for expected in (False, True):
            inventory = Inventory("", log)
            said = partial(bool, expected)
            told = NvmlDriver(log, pynvml, inventory, lambda: False, lambda *_: None, said).read()
            assert told.expected is expected and "Driver Not Loaded" in told.silence


def test_a_driver_that_tells_no_events_is_asked_again_and_so_are_new_gpus() -> None:
    with beneath_pynvml(StandIn(Board("GPU-a"))) as driver:
        played = Played(driver)
        played.look()
        played.look()
        assert len(Deaf.made) == 1
        driver.boards.append(Board("GPU-b"))
        played.look()
        assert len(Deaf.made) == 2 and len(Deaf.made[1].handles) == 2 and Deaf.made[0].closed
        Deaf.made[1].alive = False
        played.look()
        assert len(Deaf.made) == 2
        played.look(LISTEN_S)
        assert len(Deaf.made) == 3 and "XIDs are not heard" in played.lines.text


@pytest.mark.parametrize("call", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"])
def test_listening_ends_with_a_reason_or_goes_on(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xid_events, "PAUSE_S", 0.001)
    monkeypatch.setattr(xid_events, "WAIT_MS", 1)
    with beneath_pynvml(StandIn(Board("GPU-a"))) as driver:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        for error, code in ERRORS.items():
            driver.failing = {call: code}
            events = XidEvents(pynvml, [handle], lambda *_: None)
            goes_on = call == "nvmlEventSetWait_v2" and error != "NVML_ERROR_UNINITIALIZED"
            if goes_on:
                assert events.alive
                events.close()
            events._thread.join(5.0)
            assert not events.alive and (goes_on or events.why), error
            assert events.deaf == (("",) if goes_on else (events.why,)), "what is not heard is known not to be"


async def test_a_gpu_whose_errors_are_not_heard_is_used_and_named() -> None:
    """A container, or an older GPU, tells no events: what is not known is not called well."""
    with beneath_pynvml(StandIn(Board("GPU-a"))) as driver:
        driver.failing = {"nvmlDeviceRegisterEvents": ERRORS["NVML_ERROR_NOT_SUPPORTED"]}
        devices = NvmlDevices(JsonLog(Lines()), wanted=True)  # type: ignore[arg-type]
        await devices.start_up()
        await until(lambda: devices.gpus()[0].condition == "degraded")
        (gpu,) = devices.gpus()
        assert gpu.takes_jobs and gpu.why.startswith("its health is only partly known: its XID errors are not heard (")
        devices.close()


async def test_a_driver_that_hangs_is_unknown_and_what_was_there_is_there_again() -> None:
    with beneath_pynvml(StandIn(*boards())) as driver:
        devices = NvmlDevices(JsonLog(Lines()), deadline_s=0.05, first_s=0.05, wanted=True)  # type: ignore[arg-type]
        await devices.start_up()
        assert devices.unlisted() == "" and len(devices.gpus()) == 4
        driver.open.clear()
        await until(lambda: {gpu.condition for gpu in devices.gpus()} == {"unknown"})
        assert {gpu.uuid for gpu in devices.gpus()} == NAMES == {device.uuid for device in devices.devices()}
        assert {gpu.why for gpu in devices.gpus()} == {"the driver does not answer"}, "the same words all the while"
        driver.open.set()
        await until(lambda: {gpu.condition for gpu in devices.gpus()} == {"ok"})
        devices.close()


async def test_a_driver_that_hangs_from_the_start_leaves_it_open_what_is_here() -> None:
    with beneath_pynvml(StandIn(Board("GPU-a"))) as driver:
        driver.open.clear()
        devices = NvmlDevices(JsonLog(Lines()), deadline_s=0.05, first_s=0.05)  # type: ignore[arg-type]
        began_s = time.monotonic()
        await devices.start_up(0.05)
        assert list(devices.gpus()) == [] and devices.unlisted() and time.monotonic() - began_s < 10.0
        driver.open.set()
        await until(lambda: [gpu.condition for gpu in devices.gpus()] == ["ok"])
        assert devices.unlisted() == ""
        devices.close()


def test_a_rank_is_not_moved_out_while_the_driver_does_not_tell_who_uses_a_gpu() -> None:
    """The rank may have the other half of its memory on that GPU, and would be taken to hold nothing."""
    with beneath_pynvml(StandIn(*boards()[:2])) as driver:
        devices = NvmlDevices(JsonLog(Lines()), pynvml)  # type: ignore[arg-type]
        devices._driver.read()
        row = SimpleNamespace(pid=7, id=ProcessId(7, 1), ended=False)
        tree: Any = SimpleNamespace(pid=7, rows=(row,))
        devices._trees.read = lambda: [tree]  # type: ignore[method-assign]
        assert list(devices._users(7)) == [row.id]
        driver.failing = {"nvmlDeviceGetComputeRunningProcesses_v3": pynvml.NVML_ERROR_TIMEOUT}
        with pytest.raises(OSError, match="does not tell who uses GPU-a"):
            devices._users(7)
        devices.close()


def test_answers_that_cannot_be_are_a_silence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def absurd(*_: Any) -> Any:
        raise IndexError("list index out of range")

    with beneath_pynvml(StandIn(*boards())) as driver:
        played = Played(driver)
        played.look()
        with monkeypatch.context() as patched:
            patched.setattr(nvml_reads, "read_all", absurd)
            assert {gpu.condition for gpu in played.look()} == {"unknown"} and "cannot be" in played.told.silence
        assert {gpu.uuid for gpu in played.look(2.0) if gpu.condition == "ok"} == NAMES


async def test_a_list_that_could_not_be_read_is_not_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.ports.devices.nvidia.nvml.REFRESH_S", 0.0)
    with beneath_pynvml(StandIn(*boards())):
        devices = NvmlDevices(JsonLog(Lines()))  # type: ignore[arg-type]
        await devices.start_up()
        with monkeypatch.context() as patched:
            patched.setattr(devices._newest, "_call", lambda: int("none"))
            await until(lambda: {gpu.condition for gpu in devices.gpus()} == {"unknown"})
            assert "could not be read" in devices.gpus()[0].why
        await until(lambda: {gpu.condition for gpu in devices.gpus()} == {"ok"})
        devices.close()


def test_which_files_open_a_device_is_what_the_driver_says(tmp_path: Path) -> None:
    """The number of a GPU's file is not its index; an instance has two files besides, or nobody opens it."""
    with beneath_pynvml(StandIn(*boards(), limits=True)) as driver:
        played = Played(driver)
        played.look()
        devices = [one.found.device for one in played.told.listing.readings]
        assert [(device.uuid, device.number) for device in devices] == [
            ("GPU-a", 2),
            ("GPU-b", 1),
            ("MIG-GPU-mig-3", 0),
            ("MIG-GPU-mig-5", 0),
        ]
        handle = played.told.listing.readings[2].found.handle
        folder = tmp_path / "gpu0/mig/gi3"
        (folder / "ci0").mkdir(parents=True)
        (folder / "access").write_text("DeviceFileMinor: 30\nDeviceFileMode: 292\n")
        assert caps_of(pynvml, handle, 0, 3, tmp_path) == (), "one of them alone opens nothing"
        (folder / "ci0/access").write_text("DeviceFileMinor: 31\nDeviceFileMode: 292\n")
        assert caps_of(pynvml, handle, 0, 3, tmp_path) == (30, 31)
        (folder / "access").write_text("DeviceFileMinor: ../0\n")
        assert caps_of(pynvml, handle, 0, 3, tmp_path) == ()
        played.driver.end()
