"""Frames between an agent and its byte processes, on a unix socket of each process (`control_ends` are its ends).

The agent says `ControlHello` with the secret it gave the process at its start. After that it asks, each question with
an id that the answer repeats; answers may overtake one another, since closing a slab takes longer than counting. What
happens by itself (`SlabLost`, `SlabCopiedFrame`) is sent to every agent that is connected. An agent that
disconnects changes nothing.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from covey.wire.swap_wire import SwapCounts

Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, Meta(max_length=63)]
Text = Annotated[str, Meta(max_length=400)]
LongText = Annotated[str, Meta(max_length=1000)]
PlaceState = Literal["open", "filling", "reopening", "recovering", "leaving"]
"""open: has a working link. filling: has one, but lacks pages that a member of a slab without a disk must have.
reopening: its link ended and is being opened again. recovering: its lender may hold pages that are nowhere else, and
has not answered since this process began. leaving: the disk is being brought up to date with what it held.
"""
Secret = Annotated[bytes, Meta(min_length=1, max_length=64)]
"""Secret of a process or a slab; never empty, since anybody would know that."""


SLABS_TOLD = 4096
"""Most slabs, or places, in one frame: the rest is asked for again, since a frame longer than `covey.wire.frames`
allows cannot be sent at all."""


class ControlFrame(msgspec.Struct, frozen=True, tag=True):
    """One frame; the tag is the class name."""


class ControlHello(ControlFrame, frozen=True):
    """First frame of an agent. No answer: a wrong secret ends the connection."""

    secret: Secret


class Question(ControlFrame, frozen=True):
    """Agent -> process: a question; the answer carries the same id."""

    id: Id


# ---- both ------------------------------------------------------------------------------------------------------------


class StopProgram(Question, frozen=True):
    """End in good order. `forget`: delete everything durable first. Answer: `Yes`."""

    forget: bool = False


class Yes(ControlFrame, frozen=True):
    id: Id


class No(ControlFrame, frozen=True):
    id: Id
    why: Text


# ---- slab process ----------------------------------------------------------------------------------------------------


class RegisterSlabFrame(Question, frozen=True):
    """Make room for a slab. Answer: `Yes` (also when this very mapping exists) or `No`."""

    borrower: Name
    volume: Name
    index: Count
    epoch: Count
    slab_bytes: Count
    page_bytes: Count
    secret: Secret


class FreeSlabFrame(Question, frozen=True):
    """Cut a slab's connections and give its memory back. Answer: `Yes`, also when there is none of that epoch."""

    borrower: Name
    volume: Name
    index: Count
    epoch: Count


class ListSlabs(Question, frozen=True):
    """Ask for at most `most` slabs, those after this borrower, volume and index. Answer: `SlabList`."""

    after: tuple[Name, Name, Count] = ("", "", 0)
    most: Annotated[int, Meta(ge=0, le=SLABS_TOLD)] = SLABS_TOLD


class HeldSlab(msgspec.Struct, frozen=True, array_like=True):
    borrower: Name
    volume: Name
    index: Count
    epoch: Count
    slab_bytes: Count
    secret: Secret
    touched_bytes: Count
    """Bytes of its pages that have been written."""


class RdmaLent(msgspec.Struct, frozen=True, array_like=True):
    """One-sided access to the slabs of a slab process."""

    device: Text = ""
    """Name of the device; empty: none is in use."""
    pairs: Count = 0
    """Volumes that have a queue pair here."""
    why: Text = ""
    """Why the last queue pair that was asked for was refused; empty: it was not."""


class SlabList(ControlFrame, frozen=True):
    id: Id
    address: Text
    """TCP address of the byte path, as bound."""
    slabs: tuple[HeldSlab, ...]
    refused: Count
    """Count of connections and requests refused since the start."""
    touched_bytes: Count = 0
    """Bytes of all slabs together that have been written."""
    more: bool = False
    """There are slabs after these."""
    rdma: RdmaLent = RdmaLent()
    lacks: Text = ""
    """The things that this process may not have, for people: locked memory, a keeper; empty: it has all."""
    unlocked_bytes: Count = 0
    """Bytes of lent memory that may be swapped out."""
    stalls: Count = 0
    """Count of times that the process held up its own loop for more than 5 ms."""
    stall_s_longest: Annotated[float, Meta(ge=0)] = 0.0
    """The longest of the last minute or two, in seconds."""
    waits: Count = 0
    """Count of times that its loop was ready for more than 5 ms, and the machine had no processor for it."""
    wait_s_longest: Annotated[float, Meta(ge=0)] = 0.0
    byte_path: LongText = ""
    """How this process runs the byte path (`Env.byte_path`)."""


# ---- volume process --------------------------------------------------------------------------------------------------


class OpenSlabFrame(Question, frozen=True):
    """Use this place from now on; a place of an older epoch stays open for reading until it is closed. Answer: `Yes`
    once it is in use, or `No`."""

    index: Count
    epoch: Count
    lender: Name
    address: Text
    secret: Secret


class CloseSlabFrame(Question, frozen=True):
    """Stop using the place of this epoch. Answer: `Yes` once nothing acknowledged depends on it, also when it is not
    open."""

    index: Count
    epoch: Count


class CountPages(Question, frozen=True):
    """Ask what changed since an answer of this process. `life` and `since` are that answer's `life` and `upto`; 0
    before the first. Answer: `PageCounts`."""

    life: Count = 0
    since: Count = 0


class SlabCounts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of one slab."""

    index: Count
    requests: Count
    """Pages read and written since the process started."""
    written: Count
    """Pages that have ever been written."""
    remote: Count
    """Pages whose newest content the lender holds."""
    empty: bool = False
    """It was written, and every page of it was discarded since: there is nothing to be read."""


class PlaceNow(msgspec.Struct, frozen=True, array_like=True):
    """One place, as it is at this moment."""

    index: Count
    epoch: Count
    state: PlaceState
    why: Text = ""
    """Why the content of a `recovering` place is not known yet; given for the first few only."""


class LatencyCounts(msgspec.Struct, frozen=True, array_like=True):
    """Requests of one kind since the process began, by how long they took (`policy.latencies`)."""

    op: Name
    """`read` or `write`."""
    answered: Name
    """The place that answered these requests: `zeros`, `ring`, `lender` or `disk`."""
    counts: Annotated[tuple[Count, ...], Meta(max_length=256)]
    """Requests in each bucket of duration; trailing buckets that are left out are empty."""
    sum_s: float = 0.0


class PageCounts(ControlFrame, frozen=True):
    id: Id
    slabs: tuple[SlabCounts, ...]
    """Slabs that changed since the answer that the question names, at most `SLABS_TOLD` of them; if it names none of
    this process, all that were ever used."""
    read_bytes: Count
    written_bytes: Count
    remote_read_bytes: Count
    disk_read_bytes: Count
    queued_pages: Count
    """Pages that wait for the disk."""
    torn_pages: Count
    """Pages whose newest copy on disk was torn by a loss of power, and whose older one was taken."""
    places: tuple[PlaceNow, ...] = ()
    """Every place of `slabs` that this process has in use, or that may hold pages that the disk does not have."""
    links_reopened: Count = 0
    """Links to lenders that ended and were opened again under their epoch."""
    unrecovered: Count = 0
    """Places of an earlier process whose lender had lost them, or that were given up: pages there may be older."""
    trouble: Text = ""
    """Why the disk refuses pages now; empty: it does not."""
    life: Count = 0
    """Number of this process's life, drawn at its start."""
    upto: Count = 0
    """Number of the change up to which, exclusive, everything is in this answer."""
    clients: Count = 0
    """Connections of block device clients."""
    rdma_slabs: Count = 0
    """Slabs whose pages are read and written one-sided now."""
    mapped_slabs: Count = 0
    """Slabs of this host whose memory is mapped."""
    map_why: Text = ""
    """Why a slab of this host is not mapped, for the last one that tried; empty: none failed."""
    rdma_failed: Count = 0
    """Links that ended because their queue pair did."""
    rdma_why: Text = ""
    """Why a link is over TCP alone, for the last one that tried; empty: none is."""
    clients_refused: Count = 0
    """Block device clients that broke the protocol or exceeded the limit of connections."""
    lacks: Text = ""
    """The things that this process may not have, as in `SlabList.lacks`."""
    stalls: Count = 0
    """Count of stalls; this and the next three fields are as in `SlabList`."""
    stall_s_longest: Annotated[float, Meta(ge=0)] = 0.0
    waits: Count = 0
    wait_s_longest: Annotated[float, Meta(ge=0)] = 0.0
    latencies: tuple[LatencyCounts, ...] = ()
    swap: SwapCounts = SwapCounts()
    pages_refused: Count = 0
    """Pages that came back from a lender and were not what had been sealed for it."""
    byte_path: LongText = ""
    """How this process runs the byte path, as in `SlabList`."""


class ExportVolume(Question, frozen=True):
    """Offer the volume as a block device (NBD) at this unix socket from now on. Answer: `Yes`, also when it is offered
    there already, or `No`."""

    path: Text


class EndExport(Question, frozen=True):
    """Stop offering the volume at this unix socket. Answer: `Yes`."""

    path: Text


class BeginSwapping(Question, frozen=True):
    """Make the volume swap of this host, through the helper that listens at `helper`. `resume`: it was swap before this
    process began. Answer: `Yes` or `No`."""

    backend: Text
    helper: Text
    resume: bool = False


class EndSwapping(Question, frozen=True):
    """End the swap. Answer: `Yes` when it has ended or is ending (`SwapCounts`), or `No`, and it stays swap."""


class PlaceDead(Question, frozen=True):
    """The lender's own agent says that it does not hold this place any more. Answer: `Yes`."""

    index: Count
    epoch: Count
    why: Text


class PlaceAt(Question, frozen=True):
    """The lender's own agent says where it serves this place now. Answer: `Yes`."""

    index: Count
    epoch: Count
    address: Text


class GiveUp(Question, frozen=True):
    """Sent when a person asks for it: wait no longer for lenders that do not answer, use the disk's pages. Answer:
    `PlaceList` of the places given up."""


class ListPlaces(Question, frozen=True):
    """Ask for places after this slab and epoch. Answer: `PlaceList`."""

    index: Count = 0
    epoch: Count = 0


class OpenPlace(msgspec.Struct, frozen=True, array_like=True):
    index: Count
    epoch: Count
    lender: Name
    address: Text
    secret: Secret


class PlaceList(ControlFrame, frozen=True):
    """Every place in use, and places that may hold pages which the disk does not have yet; at most `SLABS_TOLD` of
    them."""

    id: Id
    places: tuple[OpenPlace, ...]
    more: bool = False
    """There are further places."""


class SlabLost(ControlFrame, frozen=True):
    """Process -> agent: this place is lost; the queue or the disk serves what it held. It must be closed before its
    lender may free it: the disk may not have everything yet."""

    index: Count
    epoch: Count
    why: Text


class SlabCopiedFrame(ControlFrame, frozen=True):
    """Process -> agent: this place holds every page of the slab."""

    index: Count
    epoch: Count


class ClientRefused(ControlFrame, frozen=True):
    """Volume's process -> agent: one of this host's processes speaks another version, and what to do about it."""

    why: Text


Told = SlabLost | SlabCopiedFrame | ClientRefused
Answer = Yes | No | SlabList | PageCounts | PlaceList
Asked = (
    ControlHello
    | StopProgram
    | RegisterSlabFrame
    | FreeSlabFrame
    | ListSlabs
    | OpenSlabFrame
    | CloseSlabFrame
    | CountPages
    | ExportVolume
    | EndExport
    | BeginSwapping
    | EndSwapping
    | PlaceDead
    | PlaceAt
    | GiveUp
    | ListPlaces
)
asked_decoder: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
answer_decoder: msgspec.msgpack.Decoder[Answer | Told] = msgspec.msgpack.Decoder(Answer | Told)
