"""The devices that this host has, whatever its driver says of them just now.

A driver that hangs, fails or is away says of no device that it is gone. So a device that was listed once is remembered,
on disk too, until an operator says otherwise (`agentctl gpus forget UUID`): what the driver does not tell of it is
*unknown*, and named with its cause. What was heard of it once and is not told again, the XIDs, is remembered until the
machine starts anew.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from agent.ports.devices import health
from covey.ports.devices import Condition, DeviceHealth, Gpu
from covey.ports.log import Logger

FORGET = "agentctl gpus forget {uuid} on this host if it was taken out"
BOOT_FILE = "/proc/sys/kernel/random/boot_id"


class KnownDevice(msgspec.Struct, frozen=True):
    """A device as the driver listed it last."""

    uuid: str
    model: str
    memory_bytes: int
    """Bytes of the device's memory; 0: the driver never told."""
    number: int
    """The GPU's number; for an instance, that of the GPU it is a part of."""
    parent: str = ""
    """UUID of the GPU that it is an instance of."""


class Unread(NamedTuple):
    """A device that the driver lists, of which it says too little for it to be used."""

    number: int
    """The GPU's number."""
    why: str
    condition: Condition = "unknown"
    uuid: str = ""
    """The device's UUID; empty: not known."""
    part: int | None = None
    """Number of the instance within the GPU, where it is one."""
    parent: str = ""
    model: str = ""


class Listed(NamedTuple):
    """A device that can be used as far as the driver tells, and how it is."""

    known: KnownDevice
    used_bytes: int
    utilization: float | None
    """Share of the last interval in which the GPU computed, like that of `Gpu`; None: the driver does not say."""
    health: DeviceHealth


class InventoryFile(msgspec.Struct, frozen=True):
    """The content of the inventory's file."""

    boot: str
    """The machine's boot id when the file was written: its XIDs are of that time."""
    devices: tuple[KnownDevice, ...] = ()
    xids: dict[str, int] = {}
    """The worst XID of each device."""


def boot_id() -> str:
    """The id of this start of the machine; empty where the kernel does not say."""
    try:
        with open(BOOT_FILE) as file:
            return file.read().strip()
    except OSError:
        return ""


class Inventory:
    """The inventory of devices. It is used in threads; what readers in others see is replaced whole."""

    def __init__(self, path: str, log: Logger, boot: Callable[[], str] = boot_id) -> None:
        """`path`: path of its file; empty: it is remembered as long as this process runs."""
        self._path, self._log, self._boot = path, log, boot()
        self.devices: Mapping[str, KnownDevice] = {}
        self.xids: Mapping[str, int] = {}
        self._saved = InventoryFile(self._boot)
        self._sick = ""
        self._changing = threading.Lock()
        self._load()

    def learn(self, devices: Iterable[KnownDevice]) -> None:
        """Learn the devices that the driver lists now. A GPU that was divided since is no device any more, nor are
        instances of one that is whole again: the driver says so itself."""
        listed = {one.uuid: one for one in devices}
        divided = {one.parent for one in listed.values() if one.parent}
        with self._changing:
            known = self.devices.items()
            kept = {uuid: one for uuid, one in known if uuid not in divided and one.parent not in listed}
            self.devices = {**kept, **listed}
            self._save()

    def struck(self, uuids: Iterable[str], xid: int) -> None:
        """Note that each of these devices had this error."""
        with self._changing:
            now = {uuid: health.worse_xid(self.xids.get(uuid, 0), xid) for uuid in uuids}
            self.xids = {**self.xids, **{uuid: number for uuid, number in now.items() if number}}
            self._save()

    def forget(self, uuid: str, listed: bool) -> str:
        """Forget a device, and return what was forgotten, in words; empty: nothing was remembered. `listed`: the driver
        lists it now."""
        with self._changing:
            said = [f"XID {self.xids[uuid]}"] if uuid in self.xids else []
            if uuid in self.devices and not listed:
                said.append("that it is here")
            self.xids = {name: xid for name, xid in self.xids.items() if name != uuid}
            self.devices = {name: one for name, one in self.devices.items() if listed or name != uuid}
            self._save()
        return " and ".join(said)

    # ---- on disk ----

    def _load(self) -> None:
        if not self._path:
            return
        try:
            with open(self._path, "rb") as file:
                found = self._saved = msgspec.json.decode(file.read(), type=InventoryFile)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            self._log.warning("the record of GPUs cannot be read", file=self._path, why=str(error))
            return
        self.devices = {one.uuid: one for one in found.devices}
        if found.boot == self._boot:
            self.xids = dict(found.xids)

    def _save(self) -> None:
        """Save the file. When the disk fails it is tried again with the next news."""
        now = InventoryFile(self._boot, tuple(self.devices.values()), dict(self.xids))
        if not self._path or now == self._saved:
            return
        try:
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            _replace(self._path, msgspec.json.encode(now))
        except OSError as error:
            if self._sick != str(error):
                self._log.warning("the record of GPUs cannot be written", file=self._path, why=str(error))
            self._sick = str(error)
            return
        self._saved, self._sick = now, ""


def _replace(path: str, data: bytes) -> None:
    """Replace the file: readers find the old one or the new one, never a mix."""
    beside = f"{path}~"
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(beside, path)


def shown(
    known: Mapping[str, KnownDevice], listed: Sequence[Listed], unread: Sequence[Unread], silence: str
) -> tuple[Gpu, ...]:
    """Every device that this host has, in the order of their numbers. `silence`: why the driver tells nothing now; then
    `listed` and `unread` are out of date, and are ignored."""
    if silence:
        found = [_unknown(one, silence) for one in known.values()]
        return tuple(sorted(found, key=lambda gpu: (gpu.index, gpu.uuid)))
    found = [_listed(one) for one in listed]
    missing = {uuid: one for uuid, one in known.items() if uuid not in {one.known.uuid for one in listed}}
    for one in unread:
        meant = _meant(one, missing)
        missing = {uuid: was for uuid, was in missing.items() if was not in meant}
        found += [_unknown(was, one.why, one.condition) for was in meant or (_nameless(one),)]
    for was in missing.values():
        found.append(_unknown(was, f"the driver no longer lists it; {FORGET.format(uuid=was.uuid)}"))
    return tuple(sorted(found, key=lambda gpu: (gpu.index, gpu.uuid)))


def _listed(one: Listed) -> Gpu:
    known, now = one.known, one.health
    return Gpu(
        index=known.number,
        uuid=known.uuid,
        model=known.model,
        memory_total_bytes=known.memory_bytes,
        memory_used_bytes=one.used_bytes,
        utilization=one.utilization,
        condition=now.condition,
        why=now.why,
    )


def _unknown(known: KnownDevice, why: str, condition: Condition = "unknown") -> Gpu:
    return Gpu(known.number, known.uuid, known.model, known.memory_bytes, 0, None, condition=condition, why=why)


def _meant(one: Unread, missing: Mapping[str, KnownDevice]) -> Sequence[KnownDevice]:
    """The devices among those not listed that this one is: by its name, or by where it is. For a GPU that tells nothing
    all its instances are meant."""
    if one.uuid in missing:
        return (missing[one.uuid],)
    there = [was for was in missing.values() if was.number == one.number or (one.uuid and was.parent == one.uuid)]
    if one.part is not None:
        return [was for was in there if was.parent][:1] if not one.uuid else ()
    whole = [was for was in there if not was.parent][:1] if not one.uuid else []
    return whole or [was for was in there if was.parent]


def _nameless(one: Unread) -> KnownDevice:
    """A device with a made-up name for what has none yet: no job is placed on it."""
    part = "" if one.part is None else f".{one.part}"
    return KnownDevice(one.uuid or f"unread-{one.number}{part}", one.model, 0, one.number, one.parent)
