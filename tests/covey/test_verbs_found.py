"""Whether there is RDMA here, and if not, what a person reads: on trees of files like the kernel's."""

import dataclasses
import importlib.machinery
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from covey.ports.verbs import NoVerbs
from covey.verbs.found import RdmaPort, look
from covey.verbs.pyverbs_port import PyVerbs

LOCAL = "fe80:0000:0000:0000:0000:00ff:fe00:0001"
V4 = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"


class Tree:
    """A machine with pyverbs and one device whose port works."""

    def __init__(self, root: Path) -> None:
        self.sysfs, self.devices, self.distribution = root / "sysfs", root / "dev", root / "dist-packages"
        self.devices.mkdir(parents=True)
        (self.devices / "uverbs0").write_bytes(b"")
        (self.distribution / "pyverbs").mkdir(parents=True)
        (self.distribution / "pyverbs" / "__init__.py").write_text("")
        self.built(importlib.machinery.EXTENSION_SUFFIXES[0])
        self.port("mlx5_0")

    def built(self, suffix: str) -> None:
        for path in (self.distribution / "pyverbs").glob("device*"):
            path.unlink()
        (self.distribution / "pyverbs" / f"device{suffix}").write_bytes(b"")

    def port(self, device: str, **files: str) -> None:
        port = self.sysfs / device / "ports" / "1"
        shutil.rmtree(port, ignore_errors=True)
        said = {"state": "4: ACTIVE", "link_layer": "Ethernet", "lid": "0x0", **files}
        gids = [LOCAL, LOCAL, V4, V4, NONE] if "gids" not in said else said.pop("gids").split()
        kinds = said.pop("kinds", "IB/RoCE v1,RoCE v2,IB/RoCE v1,RoCE v2").split(",")
        for index, gid in enumerate(gids):
            said[f"gids/{index}"] = gid
        for index, kind in enumerate(kinds):
            said[f"gid_attrs/types/{index}"] = kind
        for name, text in said.items():
            (port / name).parent.mkdir(parents=True, exist_ok=True)
            (port / name).write_text(text + "\n")

    def why(self, needs_bytes: int = 0) -> str:
        return look(self.sysfs, self.devices, str(self.distribution), needs_bytes).why


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_port_over_ethernet_is_reached_by_its_ipv4_address_over_roce_v2(tree: Tree) -> None:
    found = look(tree.sysfs, tree.devices, str(tree.distribution))
    assert found.port is not None and not found.why
    assert (found.port.device, found.port.gid_index, found.port.gid[12:]) == ("mlx5_0", 3, bytes([10, 77, 0, 1]))


def test_a_port_of_infiniband_is_reached_by_its_lid(tree: Tree) -> None:
    tree.port("mlx5_0", link_layer="InfiniBand", lid="0x1f", gids=LOCAL, kinds="IB/RoCE v1")
    found = look(tree.sysfs, tree.devices, str(tree.distribution)).port
    assert found is not None and (found.lid, found.gid_index, found.ethernet) == (31, 0, False)


def test_a_known_port_is_taken_again_while_it_works(tree: Tree) -> None:
    """A card has 256 addresses, and SoftRoCE 1024: they are read when there is a reason to."""
    tree.port("mlx5_1")

    def found(known: RdmaPort | None) -> RdmaPort | None:
        return look(tree.sysfs, tree.devices, str(tree.distribution), known=known).port

    first = found(None)
    assert first is not None and first.device == "mlx5_0"
    second = dataclasses.replace(first, device="mlx5_1")
    assert found(second) == second
    tree.port("mlx5_1", gids=" ".join([LOCAL, LOCAL, V4, V4.replace("4d", "4e")]))
    assert found(second) == first, "it has another address now"
    tree.port("mlx5_0", state="1: DOWN")
    other = found(first)
    assert other is not None and (other.device, other.gid[13]) == ("mlx5_1", 0x4E)


def test_the_first_port_that_works_is_taken(tree: Tree) -> None:
    tree.port("mlx5_0", state="1: DOWN")
    tree.port("mlx5_1")
    found = look(tree.sysfs, tree.devices, str(tree.distribution)).port
    assert found is not None and found.device == "mlx5_1"


def test_without_a_device_that_is_all_there_is_to_say(tree: Tree, tmp_path: Path) -> None:
    assert look(tmp_path / "none", tree.devices, "").why == "this host has no RDMA device"


def test_without_pyverbs_it_names_the_package(tree: Tree) -> None:
    for path in (tree.distribution / "pyverbs").iterdir():
        path.unlink()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert (
        tree.why() == f"this host has a device, but no pyverbs for Python {version}; next: apt install python3-pyverbs"
    )


def test_a_pyverbs_for_another_python_is_named(tree: Tree) -> None:
    tree.built(".cpython-38-x86_64-linux-gnu.so")
    assert "device.cpython-38-x86_64-linux-gnu.so is for another" in tree.why()


@pytest.mark.parametrize("files", [{"state": "1: DOWN"}, {"gids": NONE}, {"kinds": ",".join(5 * ["IB/RoCE v1"])}])
def test_a_port_that_is_down_or_has_no_address_is_none(tree: Tree, files: dict[str, str]) -> None:
    tree.port("mlx5_0", **files)
    assert tree.why() == "no port of mlx5_0 is active and has an address; next: rdma link"


def test_without_a_device_file_it_names_the_module(tree: Tree) -> None:
    (tree.devices / "uverbs0").unlink()
    assert tree.why().endswith("next: modprobe ib_uverbs")


def test_a_device_that_may_not_be_opened_says_who_opens_it(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert (
        tree.why() == f"{tree.devices}/uverbs0 may not be opened by this user; next: install rdma-core (its udev rules)"
    )


def test_a_limit_of_locked_memory_that_a_slab_exceeds_is_named(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert tree.why(8 << 20) == ""
    assert (
        tree.why(64 << 20)
        == "8388608 bytes may be locked, 67108864 are needed; next: LimitMEMLOCK=infinity in the unit"
    )


def test_opening_says_the_same_as_looking() -> None:
    """This holds on this machine, whatever it has; where it has a device, `make rdma`'s tests have more to say."""
    verbs = PyVerbs()
    found = verbs.look(0)
    if found.why:
        with pytest.raises(NoVerbs, match="^" + found.why[:20]):
            verbs.open()
    else:
        verbs.open().close()


def test_neither_pyverbs_nor_numpy_is_loaded_before_a_device_is_opened() -> None:
    script = (
        "import sys, covey.verbs.pyverbs_port as v\nv.PyVerbs().look(1 << 20)\n"
        "print([name for name in ('pyverbs', 'numpy') if name in sys.modules])"
    )
    found = subprocess.run((sys.executable, "-c", script), capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
