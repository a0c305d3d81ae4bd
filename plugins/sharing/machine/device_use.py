"""Whether the device may be used: a lost one never again, and one that drains is given no more jobs."""

import msgspec

from covey.core.transitions import StateTable


class InUse(msgspec.Struct, frozen=True):
    """The device is in use: jobs may come."""

    why = ""


class DrainingDevice(msgspec.Struct, frozen=True):
    """The device drains: no job comes or starts any more, opportunistic ones go, and a guaranteed one that runs may end
    by itself."""

    why: str


class LostDevice(msgspec.Struct, frozen=True):
    """The device is lost: no job may use it any more, and all are told to end."""

    why: str


DeviceUse = InUse | DrainingDevice | LostDevice
TRANSITIONS: StateTable[DeviceUse] = StateTable(
    "use of a GPU",
    {
        InUse: {DrainingDevice: "it is to be emptied", LostDevice: "its driver or its host reports it as failed"},
        DrainingDevice: {LostDevice: "its driver or its host reports it as failed"},
        LostDevice: {},
    },
)
