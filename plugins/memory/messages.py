"""Messages between two hosts about slabs: the paper's eight control messages (Infiniswap §2.6.1), and ours.

        borrower                          lender                 borrower                          lender
           |-- QueryMem --------------------->|                     |<----------- CheckActivity --------|
           |<----------------------- FreeMem -|                     |-- Activity ---------------------->|
           |-- Map -------------------------->|                     |<------------------- Evict --------|
           |<------------------------ MrInfo -|                     |   (drain, move or rely on disk)   |
           |   (from here on: pages)          |                     |-- Done -------------------------->|

Every message about one slab names it by volume and index, and by the epoch under which the borrower asked. Epochs only
grow, so an answer to an older question is recognised and dropped. A `Done` that nobody asked for gives the slab back as
well: a borrower says it when a volume is detached or when it gives up a `Map`.

Ours: `Renew`, since a borrower may vanish without a word (the paper's daemon then keeps the memory for ever), and
`Unrenewed`, which asks for it; the question `SlabsHere` with its answer, so that any agent can list the slabs of all;
`SlabsHeld`, since a lender that has lost a slab for certain is not waited for; and `VolumeHeld`, since a host that lost
its disk would make a volume anew of which lenders hold pages.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from covey.core.events import Message
from covey.core.ids import ID_PATTERN
from plugins.views import SlabView

VolumeName = Annotated[str, Meta(pattern=ID_PATTERN)]
SlabIndex = Annotated[int, Meta(ge=0, lt=1 << 20)]
Epoch = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Bytes = Annotated[int, Meta(ge=0, lt=1 << 50)]
Secret = Annotated[bytes, Meta(max_length=16)]
Tenant = Annotated[str, Meta(max_length=63)]
"""Tenant whose volume it is; empty: no tenant in particular."""
Job = Annotated[str, Meta(max_length=63)]
"""Job whose rank made the volume; empty: no job."""
Members = Annotated[int, Meta(ge=1, le=8)]
Reason = Annotated[str, Meta(max_length=300)]

SECRET_BYTES = 16
"""Bytes of the secret that a connection to a slab must prove to know; the lender draws one for each mapping."""


class SlabRef(msgspec.Struct, frozen=True, array_like=True):
    """One mapping of one slab of the borrower that sends or receives the message."""

    volume: VolumeName
    index: SlabIndex
    epoch: Epoch


REFS_MAX = 4096
"""Slabs in one message. A sender with more sends several messages (`in_parts`): the decoder refuses a longer one
whole."""
SlabRefs = Annotated[tuple[SlabRef, ...], Meta(max_length=REFS_MAX)]


def in_parts(slabs: Sequence[SlabRef]) -> list[tuple[SlabRef, ...]]:
    """Split slabs into as many messages as it takes."""
    return [tuple(slabs[at : at + REFS_MAX]) for at in range(0, len(slabs), REFS_MAX)]


class SlabMessage(Message, frozen=True):
    """A message about one slab, under one epoch."""

    volume: VolumeName
    index: SlabIndex
    epoch: Epoch

    @property
    def ref(self) -> SlabRef:
        return SlabRef(self.volume, self.index, self.epoch)


# ---- placement -------------------------------------------------------------------------------------------------------


class QueryMem(SlabMessage, frozen=True):
    """Borrower: how many slabs of this size could you lend?"""

    slab_bytes: Bytes


class FreeMem(SlabMessage, frozen=True):
    """Lender: slabs that I could lend now. It promises nothing."""

    slabs: Annotated[int, Meta(ge=0, lt=1 << 31)]


class Map(SlabMessage, frozen=True):
    """Borrower: lend me this slab."""

    slab_bytes: Bytes
    page_bytes: Annotated[int, Meta(ge=512, le=(1 << 16) + 32)]
    """Bytes of a page: at most 64 KiB and its seal."""
    members: Members = 1
    """Members of the slab, which has no disk if there are several: `index` is the number of one of them."""
    tenant: Tenant = ""
    job: Job = ""
    replaces: bool = False
    """This place replaces one that its lender wants back, or a member that was lost."""


class MrInfo(SlabMessage, frozen=True):
    """Lender: the slab is here (`address` and `secret`: the paper's address, length, rkey), or it is not lent
    (`refused`)."""

    address: Annotated[str, Meta(max_length=120)] = ""
    secret: Secret = b""
    refused: Reason = ""
    """Why the slab is not lent; empty when it is mapped."""
    late: bool = False
    """The refusal says nothing about room: the slab process did not answer in time, or frees an older mapping first."""


# ---- eviction --------------------------------------------------------------------------------------------------------


class CheckActivity(Message, frozen=True):
    """Lender: how busy are these slabs of yours that I hold?"""

    round: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    slabs: SlabRefs


class SlabActivity(msgspec.Struct, frozen=True, array_like=True):
    slab: SlabRef
    requests_per_s: Annotated[float, Meta(ge=0, le=1e12)]


class Activity(Message, frozen=True):
    """Borrower: how busy these slabs are. A slab that it does not know under that epoch is left out."""

    round: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    activities: Annotated[tuple[SlabActivity, ...], Meta(max_length=REFS_MAX)]


class Evict(SlabMessage, frozen=True):
    """Lender: I need this slab back within `grace_s` seconds."""

    grace_s: Annotated[float, Meta(ge=0, le=3600)]


class Unrenewed(SlabMessage, frozen=True):
    """Lender: this slab was not renewed for a lease. Is it still used? Answer: `Renew` or `Done`. Only sent about slabs
    without a disk; the others are orphans by then."""


class Done(SlabMessage, frozen=True):
    """Borrower: I do not need this slab any more; free it."""


# ---- ours ------------------------------------------------------------------------------------------------------------


class Renew(Message, frozen=True):
    """Borrower: I still use these slabs. A slab that is not renewed for a lease is an orphan and is freed."""

    slabs: SlabRefs
    members: Members = 1
    """Members of each of these slabs: slabs with several have no disk, and are kept longer (`policy.mirroring`)."""
    tenant: Tenant = ""
    """Tenant of each of these slabs: a lender that began anew knows it from here."""
    job: Job = ""
    page_bytes: Annotated[int, Meta(ge=0, le=(1 << 16) + 32)] = 0
    """Bytes of a page of each of these slabs, with its seal."""


class SlabsHeld(Message, frozen=True):
    """Question of a borrower whose volume's process began anew: do you still hold these of mine?"""

    slabs: SlabRefs


class SlabsAreHeld(Message, frozen=True):
    """Answer to `SlabsHeld`."""

    known: bool
    """False: the slab process is not there or has not said yet what it holds. Then `slabs` means nothing."""
    slabs: SlabRefs = ()
    """Slabs of the question that this host holds."""
    address: Annotated[str, Meta(max_length=120)] = ""
    """Where they are reached now: the slab process may have another port than when they were mapped."""


class VolumeHeld(Message, frozen=True):
    """Question of a borrower that has no record of its volume of this name: do you know of one? `forget`: a person said
    that the volume is made anew, so what you hold or remember of boots other than `since` to `boot` is of no use."""

    volume: VolumeName
    since: Epoch
    boot: Epoch
    forget: bool = False


class EarlierSlabs(msgspec.Struct, frozen=True, array_like=True):
    """Slabs of one volume that its borrower mapped under one boot of its agent."""

    boot: Epoch
    held: Annotated[int, Meta(ge=0, le=1 << 20)]
    freed: Annotated[int, Meta(ge=0)]
    """Slabs freed because they were not renewed."""


class VolumeIsHeld(Message, frozen=True):
    """Answer to `VolumeHeld`: the state before anything was forgotten."""

    known: bool
    """False: the slab process has not said yet what it holds. Then `slabs` means nothing."""
    slabs: Annotated[tuple[EarlierSlabs, ...], Meta(max_length=16)] = ()


class SlabsHere(Message, frozen=True):
    """Question: which slabs do the volumes of your host have?"""


class SlabsAre(Message, frozen=True):
    """Answer to `SlabsHere`."""

    slabs: Annotated[tuple[SlabView, ...], Meta(max_length=1 << 16)]


ToLender = QueryMem | Map | Activity | Done | Renew
AboutSlab = FreeMem | MrInfo | Evict | Unrenewed
ToBorrower = FreeMem | MrInfo | CheckActivity | Evict | Unrenewed
Messages = ToLender | ToBorrower | SlabsHeld | SlabsAreHeld | VolumeHeld | VolumeIsHeld | SlabsHere | SlabsAre
