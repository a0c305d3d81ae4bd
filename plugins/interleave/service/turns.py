"""The turns of jobs that share this host on purpose (`agentctl submit --share-host`).

Each group of jobs has one page (`covey.tensors.turns.page`). This agent makes it, gives every process of the group a
slot, writes the order of turns, and frees the slots of processes that are gone; it gives no turns. While it is away
ranks go on taking turns on the page that they have, and join the page of the next agent.
"""

import asyncio
from collections.abc import Callable, Mapping

from covey.core.events import Fact
from covey.core.ids import JobId
from covey.core.units import format_seconds
from covey.kernel.pages import PAGE_BYTES
from covey.ports.pages import SharedPage
from covey.tensors.turns.page import LOST, PLACE, SLOTS_MAX, USE, WAITED, TurnsPage
from covey.tensors.turns.rules import HOLDS, WAITS, Claim, Need
from covey.wire.job import TurnsHere
from plugins.base import Host, JobPeer
from plugins.facts import JobJoined, RankDisconnected
from plugins.interleave.policy.groups import pool_of
from plugins.interleave.policy.settings import InterleaveSettings
from plugins.interleave.policy.turn_order import turn_order

LOOK_S = 1.0
"""Seconds between two looks at the pages."""
LONG_S = 60.0
"""Seconds after which a turn that others wait for is named: no iteration of the paper's jobs computes for longer on one
host than minutes, and most for seconds (figure 4.9)."""
DOES: Mapping[Need, str] = {"comp": "the processors", "comm": "the network"}
VERBS: Mapping[Need, str] = {"comp": "compute", "comm": "send"}


class TurnsGroup:
    """The page of one group, and who has which slot."""

    def __init__(self, page: SharedPage) -> None:
        self.page, self.turns = page, TurnsPage(page.view)
        self.turns.prepare()
        self.peers: dict[JobPeer, int] = {}
        """The slot of each process."""
        self.keys: dict[JobId, int] = {}
        self._made = 0
        self.named: set[tuple[int, int]] = set()
        """Turns that were named since they last long: slot and beginning."""
        self.lost: dict[int, int] = {}
        """Turns that the process of a slot has lost, as told."""

    def add(self, peer: JobPeer, job: JobId) -> int | None:
        """A slot for the process; None: all are taken."""
        slot = next((slot for slot in range(SLOTS_MAX) if slot not in self.peers.values()), None)
        if slot is None:
            return None
        if job not in self.keys:
            self._made += 1
            self.keys[job] = self._made
        self.turns.assign(slot, self.keys[job], len(self.keys))
        self.peers[peer] = slot
        self.lost[slot] = 0
        self.order({})
        return slot

    def remove(self, peer: JobPeer) -> None:
        """The process is gone: what it had is free."""
        self.turns.free(self.peers.pop(peer))
        jobs = {peer.job for peer in self.peers}
        self.keys = {job: key for job, key in self.keys.items() if job in jobs}

    def order(self, left_s: Mapping[JobId, float]) -> None:
        """Write the order of turns. `left_s`: what each job has left, in seconds, as far as it is known."""
        places = {job: place for place, job in enumerate(turn_order(self.keys, left_s))}
        for peer, slot in self.peers.items():
            if peer.job is not None:
                self.turns.put(slot, PLACE, places[peer.job])

    def peer(self, slot: int) -> JobPeer | None:
        """The process that has this slot."""
        return next((peer for peer, its in self.peers.items() if its == slot), None)

    def name(self, claim: Claim) -> str:
        """The process of a claim, for people."""
        peer = self.peer(claim.slot)
        return "a process that is gone" if peer is None else f"rank {peer.rank} of {peer.job}"


class HostTurns:
    """The pages of turns of this host."""

    def __init__(self, host: Host, settings: InterleaveSettings, left_s: Callable[[], Mapping[JobId, float]]) -> None:
        self._host, self._settings, self._left_s = host, settings, left_s
        self.groups: dict[str, TurnsGroup] = {}

    def start(self) -> None:
        """Begin to look at the pages."""
        self._host.env.spawn("turns", self._look_on())

    def on_fact(self, fact: Fact) -> None:
        """Hear which processes come and go."""
        if isinstance(fact, JobJoined):
            self._joined(fact.job, fact.epoch)
        elif isinstance(fact, RankDisconnected):
            self._sweep()

    def status(self) -> Mapping[str, str]:
        """Who has which turn, for `agentctl status`."""
        return {f"turns of {name}": self._now(group) for name, group in sorted(self.groups.items())}

    # ---- who takes turns ----

    def _joined(self, job: JobId, epoch: int) -> None:
        """Give the processes of this job, which have joined, their slots."""
        spec = self._host.runner.spec(job, epoch)
        if spec is None or not (name := pool_of(spec.tenant, spec.share_host)) or not self._settings.turns:
            return
        self._sweep()
        group = self.groups.get(name)
        if group is None:
            try:
                group = self.groups[name] = TurnsGroup(self._host.env.pages.make_handed(PAGE_BYTES))
            except OSError as error:
                self._say(job, "takes no turns", f"the kernel has no memory to share: {error}")
                return
        for peer in self._host.peers(job):
            if peer.epoch == epoch and not peer.gone and peer not in group.peers:
                slot = group.add(peer, job)
                if slot is None:
                    why = f"{SLOTS_MAX} processes, the limit, take turns on {self._host.id} already"
                    self._say(job, "takes no turns", f"rank {peer.rank} runs beside them: {why}")
                    continue
                peer.hand(TurnsHere(slot, group.turns.get(slot, USE)), group.page)

    def _sweep(self) -> None:
        """Free the slots of processes that are gone."""
        for name, group in list(self.groups.items()):
            for peer in [peer for peer in group.peers if peer.gone]:
                group.remove(peer)
            if not group.peers:
                del self.groups[name]
                group.page.close()

    # ---- what is seen on the pages ----

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Free what is left over, and name turns that last long or were lost."""
        self._sweep()
        left_s = self._left_s() if self.groups else {}
        for group in self.groups.values():
            group.order(left_s)
            for need in DOES:
                self._name_long(group, need)
            self._name_lost(group)

    def _claims(self, group: TurnsGroup, need: Need) -> list[Claim]:
        return group.turns.claims(need, int(self._host.env.clock.now_s() * 1e9))

    def _name_long(self, group: TurnsGroup, need: Need) -> None:
        claims = self._claims(group, need)
        waiting = [claim for claim in claims if claim.state == WAITS]
        for claim in claims:
            held_s = self._host.env.clock.now_s() - claim.since_ns / 1e9
            turn = claim.slot, claim.since_ns
            late = [other for other in waiting if other.job != claim.job]
            if claim.state != HOLDS or held_s < LONG_S or not late or turn in group.named:
                continue
            group.named = {*(named for named in group.named if named[0] != claim.slot), turn}
            peer = group.peer(claim.slot)
            if peer is not None and peer.job is not None:
                why = (
                    f"rank {peer.rank} has {DOES[need]} of {self._host.id} for {format_seconds(held_s)}, and "
                    f"{group.name(late[0])} waits; submit it without --share-host if its steps are that long"
                )
                self._say(peer.job, "holds its turn", why)

    def _name_lost(self, group: TurnsGroup) -> None:
        for peer, slot in group.peers.items():
            lost = min(group.turns.get(slot, LOST), 1 << 62)
            if lost > group.lost[slot] and peer.job is not None:
                first, group.lost[slot] = not group.lost[slot], lost
                if first:
                    why = (
                        f"rank {peer.rank} had a turn on {self._host.id} and did not use it: it was stopped, waited "
                        "for something that is no sum, or one call into C kept Python's lock; others went on"
                    )
                    self._say(peer.job, "lost its turn", why)

    def _say(self, job: JobId, event: str, why: str) -> None:
        self._host.env.log.warning(event, job=job, why=why)
        self._host.note(job, event, why)

    def _now(self, group: TurnsGroup) -> str:
        parts = []
        for need, verb in VERBS.items():
            claims = self._claims(group, need)
            having = sorted({group.name(claim) for claim in claims if claim.state == HOLDS})
            count = sum(claim.state == WAITS for claim in claims)
            parts += [f"{who} {verb}s" for who in having]
            parts += [f"{count} {'waits' if count == 1 else 'wait'} to {verb}"] if count else []
        waited_s = sum(min(group.turns.get(slot, WAITED), 1 << 62) for slot in group.peers.values()) / 1e9
        return ", ".join(parts or ["nobody has a turn"]) + f"; waited {format_seconds(waited_s)} together"
