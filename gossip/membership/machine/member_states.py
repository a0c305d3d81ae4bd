"""How messages change the state of members: alive, suspect, gone, left; and which machine may have which name."""

from covey.core.events import Message
from covey.core.ids import HostId
from covey.ports.addresses import Address
from gossip.membership import messages as m
from gossip.membership import policy
from gossip.membership.machine.events import AwayOver, LoopStalled, SuspicionDue
from gossip.membership.machine.table import Member, Suspicion, Table
from gossip.types import HostDown, HostUp, MemberAway, MemberSuspected, Sender, State, identity


class MemberStates:
    """Changes the state of members; no other class does."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.stalls: list[tuple[float, float]] = []
        """The last intervals in which this process was stalled, oldest first, none overlapping."""

    # ---- alive ----

    def heard_alive(self, alive: m.Alive, sender: Sender, source: Address, now_s: float) -> list[Message]:
        about = identity(alive.host, alive.uuid)
        first_hand = about == sender.identity
        address = alive.address or (source if first_hand else "")
        if address:
            self.alive(alive, policy.Claimant(about, alive.boot, source if first_hand else address), address, now_s)
        return [m.SeenAt(source)] if first_hand and not alive.address else []

    def alive(self, alive: m.Alive, about: policy.Claimant, address: Address, now_s: float) -> None:
        if alive.host == self._table.me.host:
            self._alive_self(alive, about, now_s)
            return
        member = self._table.members.get(alive.host)
        if member is None:
            if self._table.make_room(alive.host, now_s):
                self._join(alive, address, now_s)
            return
        order = (alive.boot, alive.incarnation)
        again = member.remembered and order == (member.boot, member.incarnation)
        news = again or policy.supersedes((*order, "alive"), member.order)
        match policy.change(member.has_name(now_s), policy.claim(member.claimant, about), news):
            case "none":
                pass
            case "conflict":
                self._table.conflict(alive.host, about.address, now_s)
            case "reclaim":
                self._table.drop(member)
                self._join(alive, address, now_s)
            case "news":
                self._renew(member, alive, address, now_s)

    def _alive_self(self, alive: m.Alive, about: policy.Claimant, now_s: float) -> None:
        """Correct an `Alive` about this host that differs from its own."""
        claimed = policy.claim(self._table.claimant, about)
        if claimed == "earlier":
            return  # this machine under an identity that it has lost
        if claimed != "same" or alive.boot > self._table.me.boot:
            self._table.conflict(self._table.me.host, about.address, now_s)
        elif alive.boot == self._table.me.boot and self._is_wrong(alive):
            self._table.refute(alive.incarnation)

    def _is_wrong(self, mine: m.Alive) -> bool:
        if mine.incarnation == self._table.incarnation:
            return bool(self._table.address and mine.address) and self._table.address != mine.address
        return mine.incarnation > self._table.incarnation

    def _join(self, alive: m.Alive, address: Address, now_s: float) -> None:
        self._table.members[alive.host] = Member(
            alive.host, alive.uuid, alive.boot, alive.incarnation, address, "alive", now_s
        )
        self._table.rumour(alive.host, with_address(alive, address))
        self._table.publish(HostUp(alive.host))
        self.recount(now_s)

    def _renew(self, member: Member, alive: m.Alive, address: Address, now_s: float) -> None:
        changed = member.state != "alive" or alive.boot > member.boot
        member.boot, member.incarnation, member.address = alive.boot, alive.incarnation, address
        member.remembered, member.suspicion, member.suspected_by = False, None, None
        self._table.rumour(alive.host, with_address(alive, address))
        if changed:
            member.state, member.since_s, member.away_until_s = "alive", now_s, None
            self._table.publish(HostUp(member.host))
            self.recount(now_s)

    def remember(self, record: m.MemberRecord, now_s: float) -> None:
        """Take a host from before the restart: suspect until a message about it comes, or gone if it was gone then."""
        known = record.host == self._table.me.host or record.host in self._table.members
        left = record.state == policy.rank("left")
        if known or not record.address or (left and not record.away_s):
            return
        gone = record.state == policy.rank("gone")
        member = Member(
            record.host,
            record.uuid,
            record.boot,
            record.incarnation,
            record.address,
            "gone" if gone else "suspect",
            now_s,
            (record.by or None) if gone else self._table.me.host,
            remembered=not gone and not left,
        )
        self._table.members[record.host] = member
        if left:
            member.state, member.suspected_by = "left", None
            self._await_return(member, record.away_s, now_s)
        elif not gone:
            member.suspicion = Suspicion(now_s, [self._table.me.host])
            self.hasten(member, now_s)

    # ---- suspect ----

    def heard_suspect(self, suspect: m.Suspect, now_s: float) -> None:
        member = self.accused(suspect)
        if member is not None:
            self.suspected(member, suspect.boot, suspect.incarnation, suspect.by, now_s)

    def accused(self, message: m.Suspect | m.Gone | m.Left) -> Member | None:
        """The member that the message is about; None when that is this host, unknown, or the message is old."""
        if message.host == self._table.me.host:
            mine = (message.identity, message.boot) == (self._table.identity, self._table.me.boot)
            if mine and message.incarnation >= self._table.incarnation:
                self._table.feel(1)
                self._table.refute(message.incarnation)
            elif message.identity == self._table.identity and not isinstance(message, m.Suspect):
                self._table.outrun(message.boot)
            return None
        member = self._table.members.get(message.host)
        if member is None or member.identity != message.identity:
            return None
        old = (message.boot, message.incarnation) < (member.boot, member.incarnation)
        return None if old else member

    def suspected(self, member: Member, boot: int, incarnation: int, by: HostId, now_s: float) -> None:
        """Note that `by` could not reach the member: a new suspicion, or one more confirmation."""
        if not member.live:
            return
        if member.state == "alive" or (boot, incarnation) > (member.boot, member.incarnation):
            self._begin_suspicion(member, boot, incarnation, by, now_s)
            return
        suspicion = member.suspicion
        assert suspicion is not None
        if (
            by not in suspicion.by
            and len(suspicion.by) <= self._table.settings.suspicion_factor
            and not member.remembered
        ):
            suspicion.by.append(by)
            self._table.rumour(member.host, m.Suspect(member.host, member.identity, boot, incarnation, by))
            self.hasten(member, now_s)

    def _begin_suspicion(self, member: Member, boot: int, incarnation: int, by: HostId, now_s: float) -> None:
        if member.state == "alive":
            member.since_s = now_s
        member.boot, member.incarnation, member.state = boot, incarnation, "suspect"
        member.suspected_by, member.remembered = by, False
        member.suspicion = Suspicion(now_s, [by])
        self._table.rumour(member.host, m.Suspect(member.host, member.identity, boot, incarnation, by))
        self._table.publish(MemberSuspected(member.host, by))
        self.hasten(member, now_s)
        self.recount(now_s)

    def _ends_s(self, suspicion: Suspicion, could: set[HostId], hosts: int) -> float:
        """When the suspicion ends: `could` are the hosts that could confirm it, of `hosts` live ones. Hosts that are
        themselves suspect do not confirm."""
        possible = len(could) + sum(host not in could for host in {self._table.me.host, *suspicion.by}) - 1
        settings = self._table.settings
        expected = policy.confirmations_expected(settings.suspicion_factor, possible)
        shortest_s = policy.suspicion_shortest_s(settings.suspicion_factor, hosts, settings.probe_interval_s)
        lasts_s = policy.suspicion_s(len(suspicion.by) - 1, expected, shortest_s)
        return suspicion.start_s + lasts_s + suspicion.extra_s

    def _alive(self) -> set[HostId]:
        return {other.host for other in self._table.members.values() if other.state == "alive"}

    def hasten(self, member: Member, now_s: float) -> None:
        """Set a timer if the suspicion ends before the one that is set."""
        if member.suspicion is not None:
            self._hasten(member, member.suspicion, now_s, self._alive(), self._table.hosts())

    def _hasten(self, member: Member, suspicion: Suspicion, now_s: float, could: set[HostId], hosts: int) -> None:
        ends_s = max(now_s, self._ends_s(suspicion, could, hosts))
        if ends_s < suspicion.timer_s:
            suspicion.timer_s = ends_s
            about = SuspicionDue(member.host, member.identity, member.boot, member.incarnation)
            self._table.timer(ends_s - now_s, about)

    def recount(self, now_s: float) -> None:
        """Take in that the number of hosts that could confirm a suspicion has changed."""
        suspects = [member for member in self._table.members.values() if member.suspicion is not None]
        if not suspects:
            return
        could, hosts = self._alive(), self._table.hosts()
        for member in sorted(suspects, key=lambda member: member.host):
            assert member.suspicion is not None
            self._hasten(member, member.suspicion, now_s, could, hosts)

    def due(self, due: SuspicionDue, now_s: float) -> None:
        member = self._table.members.get(due.host)
        if member is None or member.suspicion is None or member.identity != due.identity:
            return
        if (member.boot, member.incarnation) != (due.boot, due.incarnation):
            return
        if now_s + 1e-6 < self._ends_s(member.suspicion, self._alive(), self._table.hosts()):
            if now_s + 1e-6 >= member.suspicion.timer_s:
                member.suspicion.timer_s = float("inf")
                self.hasten(member, now_s)
            return
        self._bury(member, "gone", now_s)

    def stalled(self, stall: LoopStalled) -> None:
        """Add time in which this process was stalled to every suspicion."""
        start_s = max([stall.start_s, *(end_s for _, end_s in self.stalls[-1:])])
        if start_s >= stall.end_s:
            return
        self.stalls = [*self.stalls[-15:], (start_s, stall.end_s)]
        for member in self._table.by_name():
            if member.suspicion is not None:
                member.suspicion.extra_s += stall.end_s - start_s

    # ---- gone and left ----

    def heard_gone(self, gone: m.Gone, now_s: float) -> None:
        """Take a `Gone`: a suspect becomes gone; any other host becomes suspect."""
        member = self.accused(gone)
        if member is None or not policy.supersedes((gone.boot, gone.incarnation, "gone"), member.order):
            return
        if member.state != "suspect":
            self.suspected(member, gone.boot, gone.incarnation, gone.by, now_s)
            return
        member.boot, member.incarnation = gone.boot, gone.incarnation
        if member.remembered:
            member.suspected_by = gone.by
        self._bury(member, "gone", now_s)

    def heard_left(self, left: m.Left, now_s: float) -> None:
        member = self.accused(left)
        if member is None or not policy.supersedes((left.boot, left.incarnation, "left"), member.order):
            return
        member.boot, member.incarnation = left.boot, left.incarnation
        self._bury(member, "left", now_s, left.away_s)

    def away_over(self, over: AwayOver) -> None:
        """Take a host for gone that did not come back within the time that it announced."""
        member = self._table.members.get(over.host)
        if member is not None and (member.identity, member.boot, member.state) == (over.identity, over.boot, "left"):
            self._table.publish(HostDown(member.host, left=False))

    def _await_return(self, member: Member, away_s: int, now_s: float) -> None:
        member.away_until_s = now_s + away_s
        self._table.timer(away_s, AwayOver(member.host, member.identity, member.boot))

    def _bury(self, member: Member, state: State, now_s: float, away_s: int = 0) -> None:
        was_live, told = member.live, not member.remembered
        member.state, member.since_s, member.away_until_s = state, now_s, None
        member.suspicion, member.remembered = None, False
        if away_s:
            self._await_return(member, away_s, now_s)
        accusation = member.accusation(now_s)
        if told and accusation is not None:
            self._table.rumour(member.host, accusation)
        if was_live and away_s:
            self._table.publish(MemberAway(member.host, float(away_s)))
        elif was_live:
            self._table.publish(HostDown(member.host, state == "left"))
        self.recount(now_s)
        if was_live:
            self._table.call_soon()


def with_address(alive: m.Alive, address: Address) -> m.Alive:
    """The message with an address that others can use: its own, or `address` where it gives none."""
    return alive if alive.address else m.Alive(alive.host, alive.uuid, alive.boot, alive.incarnation, address)
