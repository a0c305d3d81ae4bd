"""One table of a job that a rank owns, without sockets and threads: what other ranks say goes in, and what each of them
is to be sent comes out.

The sums are `covey.tensors.owner.sums.TensorSum`, as in an `aggd`, so the bits are the same whoever owns the table, and
a rank that loses its owner goes to the next one in the same way. What happens to a frame:

    OPEN, PUSH, STATE, RATE, KEPT --> TensorSum --> ask a rank for its state, give a rank the result
    TELL --> the rank that it is for
    LEAVES --> other ranks that would wait for it in vain are told (`covey.tensors.owner.ranks_away`)
"""

from collections.abc import Sequence
from typing import Protocol

from covey.tensors.numbers.blocks import job_of
from covey.tensors.numbers.tensor_wire import (
    FAULT_BYTES_MAX,
    HOLLOW,
    IN_VAIN,
    WANT,
    Declared,
    Frame,
    Header,
    Payload,
    TensorOp,
    frame,
    job_hash,
    key_of,
    unpack_opening,
    unpack_rate,
)
from covey.tensors.owner.leaving import LEAVE, in_vain
from covey.tensors.owner.memory import Arena, Buffers, Memory
from covey.tensors.owner.rank_frames import RankFrames
from covey.tensors.owner.ranks_away import RanksAwayHere
from covey.tensors.owner.sums import StateTransfer, TensorSum, held_bytes, refusal
from covey.wire.sums import MISSING_MAX, JobCounters, Serve


class OwnersLink(Protocol):
    """The connection of one rank."""

    rank: int
    frames: RankFrames
    near: bool
    """Whether the rank is on this host."""

    def say(self, said: Frame) -> None:
        """Send a frame, after all that was to be sent before. It never waits."""

    def give(self, key: int, tensor: TensorSum) -> None:
        """Send the result of a tensor, likewise."""

    def pump(self) -> None:
        """Begin to send what was said and given."""

    def close(self) -> None:
        """End the connection once everything that was said is sent."""


class OwnedTable:
    """One table under one epoch. Not safe for several threads at once."""

    def __init__(self, order: Serve, memory: Memory, buffers: Buffers) -> None:
        self.job, self.epoch, self.workers, self.secret = order.job, order.epoch, order.workers, order.secret
        self.hash = job_hash(order.job)
        self.tensors: dict[int, TensorSum] = {}
        self.links: dict[int, OwnersLink] = {}
        self.newest: dict[int, int] = {}
        """Rank -> incarnation of the newest process that was connected."""
        self.over = False
        """It is no longer owned here."""
        self.away = RanksAwayHere()
        self.received_bytes = self.sent_bytes = 0
        self._memory, self._buffers, self._held = memory, buffers, 0
        self._spoken_to: set[OwnersLink] = set()
        """Connections with something to send."""
        self._since: dict[int, float] = {}
        """Tensor -> time since which its round is under way."""

    # ---- connections ----

    def may_join(self, rank: int, incarnation: int) -> int:
        """0 when a process may connect as this rank; otherwise the newest incarnation of that rank, which is another
        process."""
        newest = self.newest[rank] = max(incarnation, self.newest.get(rank, 0))
        return newest if incarnation < newest else 0

    def join(self, link: OwnersLink) -> None:
        """Let this connection speak for its rank; an older one of the same rank is closed."""
        old = self.links.get(link.rank)
        if old is not None:
            self.leave(old)
            old.close()
        self.links[link.rank] = link
        self._say(link, frame(TensorOp.WELCOME, self.hash, self.epoch))

    def leave(self, link: OwnersLink) -> None:
        """The connection has ended."""
        if self.links.get(link.rank) is not link:
            return
        del self.links[link.rank]
        self.away.leaving.pop(link.rank, None)
        for key, tensor in self.tensors.items():
            self._do(key, tensor.gone(link.rank))

    def end(self, instead: int) -> None:
        """Own the table no longer. Ranks are told that `instead` is the epoch that counts now (0: none is known)."""
        self.over = True
        for _, link in sorted(self.links.items()):
            self._say(link, frame(TensorOp.STALE, self.hash, instead))
            link.close()
        self.links.clear()
        self._memory.used -= self._held
        self._held = 0
        for tensor in self.tensors.values():
            tensor.let_go()
        self.tensors.clear()

    # ---- frames ----

    def heard(self, link: OwnersLink, header: Header, payload: Payload, now_s: float) -> TensorSum | None:
        """Take in a frame that was expected (`RankFrames.expect`) and verified. Returns the tensor that may have
        something to add now. TensorWireError, Violation: it is that rank's fault."""
        if header.op is TensorOp.PUSH and header.key not in link.frames.refused:
            return self._pushed(link, header, payload, now_s)
        match header.op:
            case TensorOp.OPEN:
                return self._opened(link, header, payload, now_s)
            case TensorOp.PUSH | TensorOp.RATE | TensorOp.KEPT if header.key in link.frames.refused:
                return None
            case TensorOp.RATE:
                link.frames.tensor(header).learn(link.rank, header.round, unpack_rate(payload))
                return None
            case TensorOp.TELL:
                to = self.links.get(header.part)
                if to is not None:
                    self._tell(to, link.rank, header, payload)
                return None
            case TensorOp.LEAVES:
                if self.links.get(link.rank) is link:
                    self.away.leaving[link.rank] = bytes(payload).decode("utf-8", "replace")
                return None
            case TensorOp.STATE | TensorOp.KEPT:
                return self._pushed(link, header, payload, now_s)
            case _:
                self._say(link, frame(TensorOp.PONG, self.hash, self.epoch))
                return None

    def ended(self, key: int, actions: Sequence[StateTransfer], now_s: float) -> None:
        """An addition of this tensor is done, which leads to these actions."""
        self._do(key, actions)
        self._follow(key, now_s)

    def begin_anew(self, key: int) -> None:
        """Let a tensor begin without state: an addition failed, and its contributions are lost, or its newest result
        is (`TensorSum.is_lost`). All ranks connect again, and push once more."""
        self.tensors[key] = self._sum_of(self.tensors[key].declared)
        for link in list(self.links.values()):
            link.close()

    def look_for_who_left(self, now_s: float) -> None:
        """Tell each rank that waits for a rank that has left, in a round which the latter has not pushed."""
        under_way = {key: tensor.said() for key, tensor in self.tensors.items() if tensor.under_way}
        for key, rank, who in self.away.look(under_way, key_of(LEAVE), now_s):
            link = self.links.get(rank)
            if link is not None:
                words = in_vain(who, job_of(self.job)).encode()[:FAULT_BYTES_MAX]
                self._say(link, frame(TensorOp.FAULT, self.hash, self.epoch, key=key, payload=words, round=IN_VAIN))

    def counters(self, now_s: float) -> JobCounters:
        """The counters of this table, for the agent."""
        tensors = self.tensors.values()
        longest = min(self._since, key=self._since.__getitem__, default=None)
        awaited = self.tensors.get(longest) if longest is not None else None
        return JobCounters(
            job=self.job,
            epoch=self.epoch,
            workers=self.workers,
            joined=len(self.links),
            tensors=len(self.tensors),
            bytes=sum(tensor.declared.size_bytes for tensor in tensors),
            rounds=sum(tensor.rounds for tensor in tensors),
            received_bytes=self.received_bytes,
            sent_bytes=self.sent_bytes,
            iterations=max((tensor.rounds for tensor in tensors), default=0),
            largest_bytes=max((tensor.declared.tensor_bytes for tensor in tensors), default=0),
            not_finite=sum(tensor.not_finite for tensor in tensors),
            missing=awaited.missing()[:MISSING_MAX] if awaited is not None else [],
            waits_s=now_s - self._since[longest] if awaited is not None and longest is not None else 0.0,
            away=sorted(self.away.ended),
        )

    def spoken_to(self) -> Sequence[OwnersLink]:
        """Connections with something to send since the last call; to be pumped, without any lock."""
        if not self._spoken_to:
            return ()
        each, self._spoken_to = list(self._spoken_to), set()
        return each

    # ---- inside ----

    def _say(self, link: OwnersLink, said: Frame) -> None:
        link.say(said)
        self._spoken_to.add(link)

    def _opened(self, link: OwnersLink, header: Header, payload: Payload, now_s: float) -> TensorSum | None:
        declared, ranks = unpack_opening(header.flags, payload)
        tensor = self._declare(header.key, declared)
        if isinstance(tensor, str):
            link.frames.refused.add(header.key)
            words = tensor.encode()[:FAULT_BYTES_MAX]
            self._say(link, frame(TensorOp.FAULT, self.hash, self.epoch, key=header.key, payload=words))
            return None
        want, hollow = bool(header.flags & WANT), bool(header.flags & HOLLOW)
        self._do(header.key, tensor.open(link.rank, header.round, want, ranks, hollow))
        if tensor.is_lost:
            self.begin_anew(header.key)
        self._follow(header.key, now_s)
        return tensor

    def _pushed(self, link: OwnersLink, header: Header, payload: Payload, now_s: float) -> TensorSum:
        tensor = link.frames.tensor(header)
        if header.op is TensorOp.KEPT:
            self._do(header.key, tensor.kept(link.rank, header.round))
        else:
            self.received_bytes += header.length
            take = tensor.push if header.op is TensorOp.PUSH else tensor.state_part
            self._do(header.key, take(link.rank, header.round, header.part, payload))
        self._follow(header.key, now_s)
        return tensor

    def _declare(self, key: int, declared: Declared) -> TensorSum | str:
        """The tensor of this key, or why it cannot be summed."""
        known = self.tensors.get(key)
        why = refusal(known.declared if known is not None else None, declared, len(self.tensors), self._memory)
        if why:
            return why
        if known is not None:
            return known
        self._held += held_bytes(declared)
        tensor = self.tensors[key] = self._sum_of(declared)
        return tensor

    def _sum_of(self, declared: Declared) -> TensorSum:
        return TensorSum(declared, self.workers, self._buffers.give, Arena(), self._buffers.take)

    def _do(self, key: int, actions: Sequence[StateTransfer]) -> None:
        for action in actions:
            link = self.links.get(action.rank)
            if link is None:
                continue  # it opens and pushes again when it is back
            if action.what == "ask":
                self._say(link, frame(TensorOp.ASK, self.hash, self.epoch, key=key))
            else:
                link.give(key, self.tensors[key])
                self._spoken_to.add(link)

    def _follow(self, key: int, now_s: float) -> None:
        if self.tensors[key].under_way:
            self._since.setdefault(key, now_s)
        else:
            self._since.pop(key, None)

    def _tell(self, to: OwnersLink, rank: int, header: Header, payload: Payload) -> None:
        of = {"key": header.key, "rank": rank, "round": header.round}
        self._say(to, frame(TensorOp.TOLD, self.hash, self.epoch, payload=bytes(payload), near=to.near, **of))
