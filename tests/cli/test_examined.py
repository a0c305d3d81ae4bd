"""What `agentctl doctor` measures against other hosts, and reads of this one: right, wrong, and unreadable."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from cli.hosts.examined import Finding, of_driver, of_limits, of_links, of_names, of_process_limits, pid_behind


def link(host: str, rtt_s: float | None = 0.002, offset_s: float | None = 0.0, whole: bool | None = True) -> Any:
    return {"host": host, "rtt_s": rtt_s, "offset_s": offset_s, "whole": whole, "why": "" if whole else "it hangs"}


def wrong(found: Sequence[Finding]) -> list[tuple[str, str]]:
    assert all(each.next for each in found if each.state != "good"), "each has the command that mends it"
    return [(each.what, each.state) for each in found if each.state != "good"]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([link("gpu2"), link("gpu3", offset_s=0.4)], []),
        ([link("gpu2", None, None, None)], [("ports to gpu2", "wrong")]),
        ([link("gpu2", whole=False), link("gpu3")], [("MTU to gpu2", "wrong")]),
        ([link("gpu2", whole=None)], [("MTU to gpu2", "lacking")]),
        ([link("gpu2", offset_s=5.0), link("gpu3")], [("clock of gpu2", "wrong")]),
        ([link("gpu2", offset_s=-5.0), link("gpu3", offset_s=-5.1)], [("clock of gpu1", "wrong")]),
        ([link("gpu2", 8.0, 4.0), link("gpu3", 8.0, 4.0), link("gpu4", 8.0, 4.0)], [("clock of gpu1", "wrong")]),
        ([link("gpu2", 8.0, 4.0), link("gpu3"), link("gpu4")], []),
        ([link("gpu2", offset_s=3.5)], [("clocks", "wrong")]),
        ([link("gpu2", 4.0, 3.5)], []),
        ([link("gpu2", offset_s=-5.0)], [("clocks", "wrong")]),
        ([link("gpu2", offset_s=5.0), link("gpu3", offset_s=5.0), link("gpu4")], [("clocks", "wrong")]),
        ([link("gpu2", offset_s=1.9), link("gpu3", offset_s=-1.9)], [("clocks", "wrong")]),
        ([link("gpu2"), link("gpu3", offset_s=3.0), link("gpu4", offset_s=10.0)], [("clocks", "wrong")]),
        ([], []),
    ],
)
def test_links_and_clocks(rows: list[Any], found: list[tuple[str, str]]) -> None:
    """An offset within half a round trip may be none. It is the host that differs from most which is wrong."""
    all_found = list(of_links("gpu1", rows))
    assert wrong(all_found) == found
    good = any(each == ("clocks", "good") for each in ((each.what, each.state) for each in all_found))
    offsets = [0.0, *(row["offset_s"] for row in rows if row["offset_s"] is not None)]
    assert good == (len(offsets) > 1 and max(offsets) - min(offsets) <= 2.0)


def test_memory_that_can_be_locked_and_files_that_can_be_opened(tmp_path: Path) -> None:
    def limits(soft: str, files: str = "65536") -> list[tuple[str, str]]:
        (tmp_path / "proc/7").mkdir(parents=True, exist_ok=True)
        text = f"Limit  Soft  Hard\nMax locked memory  {soft}  {soft}  bytes\nMax open files  {files} 9 files\n"
        (tmp_path / "proc/7/limits").write_text(text)
        return wrong(list(of_process_limits(tmp_path, 7, 100)))

    assert limits("unlimited") == limits(str(1 << 30), "656") == limits("unlimited", "unlimited") == []
    assert limits("65536") == [("memlock", "lacking")]
    assert limits("unlimited", "655") == [("files", "wrong")]
    for pid in (8, None):
        (unread,) = of_process_limits(tmp_path, pid, 4)
        assert "cannot be read" in unread.why and unread.state == "lacking", "not known is not good"


def test_the_agent_is_the_process_behind_its_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent.sock"))
        listener.listen()
        assert pid_behind(str(tmp_path / "agent.sock")) == os.getpid()
    assert pid_behind(str(tmp_path / "nobody.sock")) is None


def test_an_agent_that_accepts_nobody_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as before:
        listener.bind(str(tmp_path / "agent.sock"))
        listener.listen(0)
        before.connect(str(tmp_path / "agent.sock"))
        found: list[int | None] = []
        asking = Thread(target=lambda: found.append(pid_behind(str(tmp_path / "agent.sock"))), daemon=True)
        asking.start()
        asking.join(20.0)
        assert found == [None], "it is known not to be known, and soon"


def test_names_that_lead_to_this_machine_itself(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()

    def found(text: str, *hosts: str) -> list[tuple[str, str]]:
        (tmp_path / "etc/hosts").write_text(text)
        return wrong(list(of_names(tmp_path, hosts, "gpu1")))

    assert found("127.0.1.1 gpu1.lab gpu1\n", "gpu1") == [("name gpu1", "lacking")]
    assert found("10.0.0.2 gpu2\n::1 gpu2\n", "gpu1", "gpu2") == [("name gpu2", "lacking")]
    assert found("10.0.0.1 gpu1\n127.0.1.1 gpu1\n#127.0.1.1 gpu2\n127.0.0.1 gpu22  # gpu2\n\n", "gpu1", "gpu2") == []
    assert found("", "gpu1", "gpu2") == [], "names are not needed"
    (tmp_path / "etc/hosts").write_bytes(b"\xff")
    assert wrong(list(of_names(tmp_path, ["gpu1"], "gpu1"))) == [("names", "lacking")], "not known is not good"
    (tmp_path / "etc/hosts").unlink()
    assert not list(of_names(tmp_path, ["gpu1"], "gpu1"))


def test_a_gpu_that_the_driver_has_and_the_agent_does_not_list(tmp_path: Path) -> None:
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    assert not list(of_driver(tmp_path, "gpu1", [])), "no driver of NVIDIA"
    folder.mkdir(parents=True)
    assert wrong(list(of_driver(tmp_path, "gpu1", []))) == [("GPU at 0000:01:00.0", "lacking")], "nothing can be read"
    (folder / "information").write_text("Model: H200\nGPU UUID: GPU-7\nDevice Minor: 3\n")
    (lost,) = of_driver(tmp_path, "gpu1", [{"host": "gpu2", "uuid": "GPU-7"}])
    assert lost.state == "wrong" and "/dev/nvidia3" in lost.why and "nvidia-smi" in lost.next
    assert not list(of_driver(tmp_path, "gpu1", [{"host": "gpu1", "uuid": "GPU-7"}]))
    for pretended in ({"uuid": "GPU-sim-gpu1-0", "simulated": True}, {"uuid": "CPU-gpu1-0", "simulated": False}):
        assert not list(of_driver(tmp_path, "gpu1", [{"host": "gpu1", **pretended}])), "it is not meant to list it"


def test_hosts_whose_users_jobs_are_not_limited() -> None:
    hosts = [{"host": "gpu1", "other_users": "limited"}, {"host": "gpu2", "other_users": "unlimited"}]
    assert wrong(list(of_limits(hosts))) == [("limits on gpu2", "lacking")]
