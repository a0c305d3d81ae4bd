"""Opportunistic jobs that do not free memory which others wait for: each step takes it by stronger means.

asked --(3 mini-batches or 5 s)--> driver limit --1 s--> suspend --10 s--> terminate --10 s--> kill

One that keeps the memory it took at its start (JAX) is not limited by the driver, under which it would fail. A job that
still loads its framework and did not say what memory it wants is not suspended but queued again: nothing of it is lost
yet, and suspended it would need room for all there may be before it could continue.
"""

from collections.abc import Mapping

from covey.core.events import LogEvent
from covey.core.ids import JobId
from covey.core.units import format_size
from plugins.sharing.machine.events import (
    Actions,
    GpuAction,
    HardLimit,
    HardLimited,
    Kill,
    Suspend,
    Suspended,
    Terminate,
)
from plugins.sharing.machine.member import GpuMember
from plugins.sharing.machine.share_ledger import ShareLedger

UNGATED_S = 30.0
"""Seconds for which an opportunistic job may be beside a guaranteed one and not be held back: time to load its
framework."""
SILENT_S = 60.0
"""Seconds for which an opportunistic job that has not answered yet may be beside a guaranteed one: it begins on what
others leave of the cores, and loads just as slowly."""
WAITS_S = 60.0
"""Seconds for which an opportunistic job may wait for memory beside a guaranteed one, which may never show that it
needs less than all: longer than it takes to load a framework and to run ten mini-batches."""
PRESS_S = (1.0, 10.0, 10.0, 10.0)
"""Seconds that each way of pressing a job may take before the next: driver, suspend, terminate, kill."""


def evicted(members: Mapping[JobId, GpuMember], guaranteed: GpuMember | None, now_s: float) -> Actions:
    """End opportunistic jobs beside a running guaranteed one that cannot be held back."""
    actions: Actions = []
    if guaranteed is None or guaranteed.stage != "running":
        return actions
    for member in members.values():
        since_s = now_s - max(member.started_s, guaranteed.started_s)
        free = member.stage == "running" and not member.guaranteed and not member.gate
        if free and not member.evicted and since_s > (SILENT_S if member.gate is None else UNGATED_S):
            member.evicted = True
            why = f"it cannot be throttled beside {guaranteed.job}, which is guaranteed"
            actions += [Terminate(member.job, why), LogEvent(f"job/{member.job}", "evicted", why)]
    return actions + _in_vain(members, guaranteed, now_s)


def _in_vain(members: Mapping[JobId, GpuMember], guaranteed: GpuMember, now_s: float) -> Actions:
    """End jobs that wait for memory that is not given back: they go to other GPUs, or to the queue, which says why."""
    actions: Actions = []
    for member in members.values():
        if member.stage != "waiting" or member.evicted:
            continue
        if member.waits_since_s is None:
            member.waits_since_s = now_s
        if now_s - member.waits_since_s > WAITS_S:
            member.evicted = True
            why = f"{guaranteed.job}, which is guaranteed, has left it no memory for {WAITS_S:g} s"
            actions += [Terminate(member.job, why), LogEvent(f"job/{member.job}", "evicted", why)]
    return actions


def press(members: Mapping[JobId, GpuMember], ledger: ShareLedger, now_s: float) -> Actions:
    """What to do now about jobs that are late; each member remembers how far it was pressed."""
    late = ledger.overdue(now_s, {member.job: member.step_s for member in members.values()})
    actions: Actions = []
    for job in late:
        member = members[job]
        if member.guaranteed or member.stage != "running":
            continue
        if member.press and now_s - member.press_s < PRESS_S[min(member.press, 4) - 1]:
            continue
        least = 1 if member.fixed else 0
        member.press, member.press_s = min(4, max(member.press, least) + 1), now_s
        if member.press == 2 and _just_began(member, now_s):
            member.press = 3
        actions += _pressed(member, ledger.accounts[job].told_bytes)
    return actions


def hard_limited(members: Mapping[JobId, GpuMember], ledger: ShareLedger, event: HardLimited) -> None:
    """The driver holds a job to its limit, or could not."""
    member = members.get(event.job)
    if member is None or not event.ok or member.press != 1:
        return
    if event.limit_bytes <= ledger.accounts[event.job].charged_bytes:
        ledger.forced(event.job, event.limit_bytes)
        member.press = 0


def suspended(members: Mapping[JobId, GpuMember], ledger: ShareLedger, event: Suspended) -> str:
    """A job's memory is on the host, or could not be moved there. Returns what to write down; empty: nothing
    changes."""
    member = members.get(event.job)
    if member is None or not event.ok or member.press < 2:
        return ""
    ledger.forced(event.job, 0)
    member.stage, member.press = "suspended", 0
    return f"{event.job} is suspended to host memory"


def _just_began(member: GpuMember, now_s: float) -> bool:
    return member.gate is None and not member.asked and now_s - member.started_s < UNGATED_S


def _pressed(member: GpuMember, want: int) -> Actions:
    what = "keeps the memory it took at its start, more than" if member.fixed else "has not applied"
    why = f"{member.job} {what} its limit of {format_size(want)}, and others wait for the memory"
    pressing: tuple[GpuAction, str]
    if member.press == 1:
        pressing = HardLimit(member.job, want), "driver limit"
    elif member.press == 2:
        pressing = Suspend(member.job, why), "suspend"
    elif member.press == 3:
        pressing = Terminate(member.job, why), "terminate"
    else:
        pressing = Kill(member.job, why), "kill"
    return [pressing[0], LogEvent(f"job/{member.job}", pressing[1], why)]
