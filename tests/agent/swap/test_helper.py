"""What the swap helper does and what it refuses, with a kernel that is a few files and lists."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.ports.memory import swap_seen
from agent.swap import helper, kernel, nbd
from agent.swap.helper import SwapHelper
from agent.swap.received import receive
from covey.wire import frames
from covey.wire import swap_wire as swapwire
from covey.wire.frames import FrameError
from covey.wire.swap_wire import (
    AskSwap,
    BeginSwap,
    ConnectSwap,
    EndSwap,
    SwapConnected,
    SwapFrame,
    SwapNow,
    SwapRefused,
)
from tests.covey.test_volume_users import as_user

BACKEND = "covey:h1:swap:00ff"
MIB = 1 << 20
MEMINFO = "MemTotal: {total} kB\nMemAvailable: {available} kB\n"


class FakeKernel:
    """`/proc` and `/sys` of a test, and what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.done = folder, list[str]()
        for name in ("proc", "sys/block", "sys/module/nbd", "sys/fs/cgroup/job"):
            (folder / name).mkdir(parents=True)
        self.areas: dict[str, tuple[int, int]] = {}
        self.memory(1024 * MIB, 512 * MIB)
        self.remembers = True
        self.held: set[str] = set()
        """The devices that are in use for something else."""

    def memory(self, total: int, available: int) -> None:
        text = MEMINFO.format(total=total >> 10, available=available >> 10)
        (self.folder / "proc/meminfo").write_text(text)

    def device(self, number: int, backend: str) -> None:
        folder = self.folder / f"sys/block/nbd{number}"
        folder.mkdir(exist_ok=True)
        if self.remembers:
            (folder / "backend").write_text(backend + "\n")

    def on(self, device: str, used: int, size: int = 1024 * MIB) -> None:
        self.areas[device] = size, used
        rows = self.areas.items()
        lines = [f"{name} partition {size >> 10} {used >> 10} 100" for name, (size, used) in rows]
        (self.folder / "proc/swaps").write_text("\n".join(["Filename Type Size Used Priority", *lines]) + "\n")

    def group(self, limit: str, current: int, swapped: int, cache: int = 0) -> None:
        folder = self.folder / "sys/fs/cgroup/job"
        for name, said in (("max", limit), ("current", current), ("swap.current", swapped)):
            (folder / f"memory.{name}").write_text(f"{said}\n")
        (folder / "memory.stat").write_text(f"anon {current}\ninactive_file {cache}\nactive_file 0\n")

    # what the module `nbd` and the programs do

    def connect(self, netlink: Any, backend: str, size: int, block: int, timeout_s: int, descriptor: int) -> int:
        self.done.append(f"connect {size} {block} {timeout_s}")
        self.device(4, backend)
        return 4

    def reconfigure(self, netlink: Any, number: int, backend: str, timeout_s: int, descriptor: int) -> None:
        self.done.append(f"reconfigure {number} {timeout_s}")

    def disconnect(self, netlink: Any, number: int) -> None:
        self.done.append(f"disconnect {number}")

    def in_use(self, device: str) -> bool:
        return kernel.area(device) is not None or device in self.held

    def begin(self, device: str, priority: int) -> None:
        self.done.append(f"swapon {Path(device).name} {priority}")
        self.on(device, 0)


class FakeNetlink:
    def close(self) -> None: ...


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    fake = FakeKernel(tmp_path)
    fake.on("/dev/sda2", 0, 0)
    monkeypatch.setattr(kernel, "PROC", tmp_path / "proc")
    monkeypatch.setattr(kernel, "SYS", tmp_path / "sys")
    monkeypatch.setattr(kernel, "DEV", tmp_path / "dev")
    monkeypatch.setattr(kernel, "begin", fake.begin)
    monkeypatch.setattr(kernel, "in_use", fake.in_use)
    monkeypatch.setattr(helper, "_netlink", FakeNetlink)
    for name in ("connect", "reconfigure", "disconnect"):
        monkeypatch.setattr(nbd, name, getattr(fake, name))
    return fake


@pytest.fixture
def asked() -> SwapHelper:
    return SwapHelper(os.geteuid(), "", lambda line: None)


@pytest.fixture
def end() -> Iterator[int]:
    one, other = socket.socketpair()
    yield one.fileno()
    one.close()
    other.close()


def swapoff(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Play `swapoff`, in the place of the program."""
    (folder / "bin").mkdir()
    program = folder / "bin/swapoff"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(kernel, "PROGRAMS", f"{folder}/bin:/usr/bin:/bin")


def test_a_device_is_made_once_and_then_given_another_socket(system: FakeKernel, asked: SwapHelper, end: int) -> None:
    question = ConnectSwap(BACKEND, 10 * MIB + 5, 4096)
    assert asked.answer(question, [end]) == SwapConnected(f"{system.folder}/dev/nbd4", False)
    again = msgspec.structs.replace(question, timeout_s=10)
    assert asked.answer(again, [end]) == SwapConnected(f"{system.folder}/dev/nbd4", True)
    assert system.done == [f"connect {10 * MIB} 4096 5", "reconfigure 4 10"]


def test_what_is_to_go_on_is_never_begun_anew(system: FakeKernel, asked: SwapHelper, end: int) -> None:
    system.device(2, "covey:h1:another:00")
    refused = asked.answer(ConnectSwap(BACKEND, 10 * MIB, 4096, resume=True), [end])
    assert isinstance(refused, SwapRefused) and "no longer has this device" in refused.why and system.done == []
    assert asked.answer(AskSwap(BACKEND), []) == SwapNow()


def test_a_kernel_that_forgets_whose_device_it_is_gets_none(system: FakeKernel, asked: SwapHelper, end: int) -> None:
    system.remembers = False
    refused = asked.answer(ConnectSwap(BACKEND, 10 * MIB, 4096), [end])
    assert isinstance(refused, SwapRefused) and "5.14" in refused.next
    assert system.done[-1] == "disconnect 4"


def test_a_device_takes_one_socket(system: FakeKernel, asked: SwapHelper, tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        for descriptors in ([], [file.fileno()]):
            refused = asked.answer(ConnectSwap(BACKEND, MIB, 4096), descriptors)
            assert isinstance(refused, SwapRefused) and system.done == []


def test_swap_begins_once_and_on_our_device_alone(system: FakeKernel, asked: SwapHelper) -> None:
    system.device(1, "somebody:else")
    assert isinstance(asked.answer(BeginSwap(BACKEND), []), SwapRefused)
    system.device(4, BACKEND)
    for _ in range(2):
        assert asked.answer(BeginSwap(BACKEND, 7), []) == SwapNow(f"{system.folder}/dev/nbd4", True, 0)
    assert system.done == ["swapon nbd4 7"]


def test_a_helper_that_may_be_swapped_out_begins_no_swap(system: FakeKernel) -> None:
    system.device(4, BACKEND)
    refused = SwapHelper(0, "without CAP_IPC_LOCK", lambda line: None).answer(BeginSwap(BACKEND), [])
    assert isinstance(refused, SwapRefused) and "CAP_IPC_LOCK" in refused.why and system.done == []


def test_pages_without_room_stay_in_swap(
    system: FakeKernel, asked: SwapHelper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    swapoff(monkeypatch, tmp_path, f"touch {tmp_path}/ran")
    system.device(4, BACKEND)
    system.on(kernel.device(4), 600 * MIB)
    refused = asked.answer(EndSwap(BACKEND), [])
    assert isinstance(refused, SwapRefused) and "600 MiB" in refused.why
    assert not (tmp_path / "ran").exists() and system.done == []


def test_taking_pages_back_is_given_up_when_room_ends(
    system: FakeKernel, asked: SwapHelper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A group whose limit would be reached: the kernel would end a program of it."""
    swapoff(monkeypatch, tmp_path, f"touch {tmp_path}/ran; exec sleep 60")
    system.device(4, BACKEND)
    system.on(kernel.device(4), 100 * MIB)
    system.group(str(400 * MIB), 200 * MIB, 100 * MIB)

    def fill() -> None:
        while not (tmp_path / "ran").exists():
            pass
        system.group(str(400 * MIB), 350 * MIB, 100 * MIB)

    other = threading.Thread(target=fill)
    other.start()
    refused = asked.answer(EndSwap(BACKEND), [])
    other.join()
    assert isinstance(refused, SwapRefused) and "group job" in refused.why
    assert system.done == []


def test_pages_with_room_come_back_and_the_device_goes(
    system: FakeKernel, asked: SwapHelper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    swapoff(monkeypatch, tmp_path, f"sed -i /nbd4/d {tmp_path}/proc/swaps")
    system.device(4, BACKEND)
    system.on(kernel.device(4), 100 * MIB)
    system.group("max", 900 * MIB, 100 * MIB)
    assert asked.answer(EndSwap(BACKEND), []) == SwapNow()
    assert system.done == ["disconnect 4"]


@pytest.mark.parametrize("shown", ["/nbd4", r"/dev/nbd4\040(deleted)", "/run/systemd/old/dev/nbd4"])
def test_swap_that_another_helper_began_is_taken_back_whatever_its_path_is_now(
    system: FakeKernel, asked: SwapHelper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shown: str
) -> None:
    """The unit has a mount namespace of its own, and with a restart another one. A device that is disconnected while it
    is swap takes the pages of all programs with it."""
    swapoff(monkeypatch, tmp_path, f"sed -i /nbd4/d {tmp_path}/proc/swaps")
    system.device(4, BACKEND)
    system.on("/dev/nbd40", 0, 100 * MIB)
    system.on(shown, 50 * MIB)
    assert asked.answer(AskSwap(BACKEND), []) == SwapNow(kernel.device(4), True, 50 * MIB)
    assert kernel.room(kernel.device(4)).elsewhere_bytes == 100 * MIB
    assert asked.answer(EndSwap(BACKEND), []) == SwapNow()
    assert system.done == ["disconnect 4"]


def test_a_device_that_the_kernel_has_in_use_is_never_disconnected(system: FakeKernel, asked: SwapHelper) -> None:
    system.device(4, BACKEND)
    system.held.add(kernel.device(4))
    refused = asked.answer(EndSwap(BACKEND), [])
    assert isinstance(refused, SwapRefused) and "in use" in refused.why and system.done == []


def test_a_group_of_either_version_is_read(system: FakeKernel) -> None:
    system.group(str(64 * MIB), 60 * MIB, 90 * MIB, cache=3 * MIB)
    (found,) = kernel.groups()
    assert (found.limit_bytes, found.used_bytes, found.cache_bytes, found.swapped_bytes) == (
        64 * MIB, 60 * MIB, 3 * MIB, 90 * MIB,
    )  # fmt: skip
    old = system.folder / "sys/fs/cgroup/memory/job"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text(f"{64 * MIB}\n")
    (old / "memory.usage_in_bytes").write_text(f"{60 * MIB}\n")
    (old / "memory.stat").write_text(f"total_swap {90 * MIB}\ntotal_inactive_file {3 * MIB}\n")
    assert list(kernel.groups()) == [found]


# ---- the socket ----

SAID: list[SwapFrame] = [
    ConnectSwap(BACKEND, 1 << 30, 4096, 5, True),
    BeginSwap(BACKEND),
    EndSwap(BACKEND),
    AskSwap(BACKEND),
]
ANSWERS: list[SwapFrame] = [SwapConnected("/dev/nbd0", True), SwapNow("/dev/nbd0", True, 5), SwapRefused("why", "next")]


def test_messages_come_back_as_they_were_said() -> None:
    for frame in SAID:
        assert swapwire.to_helper.decode(frames.pack(frame)[4:]) == frame
    for frame in ANSWERS:
        assert swapwire.to_volume.decode(frames.pack(frame)[4:]) == frame


@given(
    data=st.binary(max_size=100)
    | st.builds(
        lambda frame, at, byte, end: (frames.pack(frame)[:at] + bytes([byte]) + frames.pack(frame)[at + 1 :])[:end],
        st.sampled_from(SAID),
        st.integers(0, 70),
        st.integers(0, 255),
        st.integers(0, 80),
    ),
    handed=st.integers(0, 3),
)
def test_any_bytes_are_a_message_or_a_frame_error_and_no_descriptor_stays(data: bytes, handed: int) -> None:
    one, other = socket.socketpair()
    before = len(os.listdir("/proc/self/fd"))
    with one, other:
        if data:
            socket.send_fds(one, [data], [one.fileno()] * handed)
        one.shutdown(socket.SHUT_WR)
        try:
            found = receive(other, swapwire.to_helper)
        except FrameError:
            found = None
        for descriptor in found[1] if found is not None else ():
            os.close(descriptor)
        assert found is None or len(found[1]) <= 1
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("backend", ["sda", "covey:", "covey:A", "covey:../x", "covey:a b", "covey:a\n"])
def test_a_device_of_another_name_cannot_be_spoken_of(backend: str) -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(frames.pack(AskSwap(backend)))
        with pytest.raises(FrameError):
            receive(other, swapwire.to_helper)


@contextlib.contextmanager
def served(owner: int) -> Iterator[socket.socket]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # a name of its own that the kernel chooses: a child of another test may still hold the last one
    listener.listen()
    threading.Thread(target=SwapHelper(owner, "", lambda line: None).serve, args=(listener,), daemon=True).start()
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(listener.getsockname())
        yield client
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_the_agents_user_is_answered(system: FakeKernel) -> None:
    system.device(4, BACKEND)
    system.on(kernel.device(4), 5 * MIB)
    with served(os.geteuid()) as client:
        for _ in range(2):
            client.sendall(frames.pack(AskSwap(BACKEND)))
            received = receive(client, swapwire.to_volume)
            assert received is not None and received[0] == SwapNow(kernel.device(4), True, 5 * MIB)


def test_nobody_else_is_answered(system: FakeKernel) -> None:
    """Run as root, a process of another user asks; run as anybody else, this user asks a helper of another one."""

    def asks() -> str:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(address)
            client.sendall(frames.pack(AskSwap(BACKEND)))
            return str(client.recv(100))

    owner = os.geteuid() if os.geteuid() == 0 else os.geteuid() + 1
    with served(owner) as client:
        address = client.getpeername()
        said = as_user(64_999 if os.geteuid() == 0 else os.geteuid(), asks)
    assert said in ("b''", "ECONNRESET", "EPIPE")


# ---- what an agent sees of it ----


def test_a_host_says_in_a_line_what_it_lacks_for_swap(tmp_path: Path) -> None:
    helper_at = str(tmp_path / "swapd.sock")
    assert "has no NBD" in swap_seen.lacks(helper_at, str(tmp_path))
    modules = tmp_path / "lib/modules" / os.uname().release
    modules.mkdir(parents=True)
    (modules / "modules.dep").write_text("kernel/drivers/block/nbd.ko.xz:\n")
    assert swap_seen.lacks(helper_at, str(tmp_path)) == (
        f"no swap helper listens at {helper_at}; next: systemctl enable --now covey-swap"
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(helper_at)
        assert swap_seen.lacks(helper_at, str(tmp_path)) == ""
