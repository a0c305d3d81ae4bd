"""What is wrong with a GPU, from what its driver counts: the error numbers (XID), memory errors, and what NVIDIA says
should be done about it.

Source of the numbers: NVIDIA's XID catalog (docs.nvidia.com/deploy/xid-errors), by its column of what is to be done at
once. An XID after which the GPU, its machine or its links are to be reset, or looked at, takes the GPU out of use. One
after which only the program is to be started again, or nothing is to be done, says nothing of the device: 13 (an
illegal instruction), 31 (a page fault), 43 (stopped), 45 (cleaned up after). Those among them that tell of memory (63,
92, 94, 171, 172) are named, and the GPU stays in use: the catalog has 63 and 92 ignored, after 94 only the program that
was hit started again, and no action for the last two. XID 154 is not here: what it tells of, the driver says in
`ACTIONS`.
"""

import msgspec

from covey.ports.devices import Condition, DeviceHealth

ORDER: tuple[Condition, ...] = ("ok", "degraded", "unknown", "drain", "lost")
"""The conditions of a device, the better first."""
XIDS: dict[int, tuple[Condition, str]] = {
    46: ("drain", "the GPU stopped processing"),
    48: ("drain", "an uncorrectable memory error"),
    61: ("drain", "an internal microcontroller halted"),
    62: ("drain", "an internal microcontroller halted"),
    63: ("degraded", "a row of memory is to be remapped at the next reset"),
    64: ("drain", "a row of memory could not be remapped"),
    74: ("drain", "an NVLink error"),
    79: ("lost", "the GPU has fallen off the bus"),
    92: ("degraded", "a high rate of corrected memory errors"),
    94: ("degraded", "a contained memory error: one program was hit"),
    95: ("drain", "an uncontained memory error"),
    109: ("drain", "the GPU did not change to another program in time"),
    110: ("drain", "a security fault"),
    119: ("drain", "the GPU's system processor does not answer"),
    120: ("drain", "the GPU's system processor failed"),
    136: ("drain", "the GPU's links could not be trained"),
    140: ("drain", "an unrecovered memory error"),
    142: ("drain", "the device failed to start an engine again"),
    143: ("drain", "the GPU could not be initialised"),
    **dict.fromkeys((144, 145, 146, 149, 150), ("drain", "an NVLink error")),
    151: ("drain", "keys of the GPU could not be exchanged for others"),
    155: ("drain", "an NVLink error that software reported"),
    156: ("drain", "a part of the GPU is retired at the next reset"),
    158: ("drain", "the GPU did not answer in time"),
    171: ("degraded", "an uncorrectable error of its memory"),
    172: ("degraded", "an uncorrectable error in the GPU itself"),
}
ACTIONS: dict[int, tuple[Condition, str]] = {
    1: ("drain", "the driver asks for a reset of the GPU"),
    2: ("drain", "the driver asks for a restart of this machine"),
    3: ("drain", "the driver asks to end the programs that use its links"),
    4: ("drain", "the driver asks to end all programs and reset the GPU"),
    5: ("degraded", "the driver asks for recovery of the IMEX domain"),
    6: ("drain", "the driver asks for a reset of the bus"),
    7: ("drain", "the driver asks for a restart of the system"),
}
"""What the driver asks for, by NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; 0: nothing."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """The counts that the driver gives of one GPU. What it does not say is 0."""

    xid: int = 0
    """The worst XID since this agent listens; 0: none that counts."""
    uncorrected: int = 0
    """Uncorrectable memory errors since the driver was loaded."""
    remap_pending: bool = False
    """Whether a row of memory is remapped at the next reset."""
    remap_failed: bool = False
    """Whether a row of memory could not be remapped: the GPU is to be replaced."""
    unrepairable: bool = False
    """Whether more memory is broken than can be remapped."""
    recovery: int = 0
    """The key in `ACTIONS` of what the driver asks for; 0: nothing."""
    hidden: tuple[str, ...] = ()
    """What this agent may not read, in words."""


def of_xid(number: int) -> DeviceHealth:
    condition, why = XIDS.get(number, ("ok", ""))
    return DeviceHealth(condition, f"XID {number}: {why}") if why else DeviceHealth()


def unheard(why: str) -> DeviceHealth:
    """The health of a device of which no XID is heard, as far as that says anything. `why`: in the driver's words."""
    return DeviceHealth("degraded", f"its health is only partly known: its XID errors are not heard ({why})")


def worse(one: DeviceHealth, other: DeviceHealth) -> DeviceHealth:
    """The worse of two healths; the first where they are equal."""
    return max((one, other), key=lambda health: ORDER.index(health.condition))


def worse_xid(one: int, other: int) -> int:
    """The XID that says more, or `one` where they are equal; 0 when neither says anything of the device."""
    return max((0, one, other), key=lambda number: ORDER.index(of_xid(number).condition))


def of(counts: Counts) -> DeviceHealth:
    """The worst health of all that is known; among equal ones the one that says what to do."""
    found = [DeviceHealth(*ACTIONS[counts.recovery])] if counts.recovery in ACTIONS else []
    if counts.remap_failed:
        found.append(DeviceHealth("drain", "a row of memory could not be remapped: replace the GPU"))
    if counts.unrepairable:
        found.append(DeviceHealth("drain", "more memory is broken than can be remapped: replace the GPU"))
    found.append(of_xid(counts.xid))
    if counts.remap_pending:
        found.append(DeviceHealth("degraded", "a row of memory is to be remapped: reset the GPU when it is free"))
    if counts.uncorrected > 0:
        found.append(DeviceHealth("degraded", f"uncorrectable memory errors: {counts.uncorrected}"))
    if counts.hidden:
        why = f"its health is only partly known: this agent may not read {', '.join(counts.hidden)}"
        found.append(DeviceHealth("degraded", why))
    return max(found, key=lambda one: ORDER.index(one.condition))
