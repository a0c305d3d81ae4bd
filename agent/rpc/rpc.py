"""Messages between agents: ids, boots, acknowledgements, retries and a table of duplicates on top of `Links`.

A link loses messages silently, so a message that changes state travels in an `Envelope`:

    send   -> delivered at least once until its deadline, handled at most once   -> ack: it was handled
    ask    -> a question that changes nothing; asked again until answered        -> answer | refused
    raw    -> one try, no acknowledgement (the replicated log has its own)

Each envelope names the sender's boot and the boot of the receiver it was meant for. A receiver that restarted has lost
its table of duplicates, therefore it refuses envelopes for an earlier boot (`stale`) instead of handling one of them
twice; the sender then reports "not acknowledged", which its plugin must handle anyway. An envelope for a plugin that is
not on now is not acknowledged either: the sender repeats it, and the plugin may be on by then.

Who has a name is decided by gossip alone (`holder`). Boots order the lives of one installation; a machine that was
installed anew is another one, whose boots may be lower (its clock was ahead before). A `send` of an installation that
gossip does not hold for this name is dropped: of one that had it before, or of one that gossip is about to hear of,
which sends it again.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

from agent.rpc.answers import Answers
from agent.rpc.envelope import ANSWER_BYTES_MAX, ENVELOPE_BYTES_MAX, Envelope, Kind, RefusedBody, decode, encode
from covey.core.errors import Refused
from covey.core.ids import HostId
from covey.ports.env import Env

__all__ = ["Envelope", "Messenger"]

RETRY_S = (0.2, 0.4, 0.8, 1.5)
"""Seconds to pause between tries of one message; the last one repeats."""
HANDLED_MAX = 4096
"""The most ids of one sender, handled or being handled, that are remembered above those it has settled. Beyond that a
message is refused as `full`, and the sender repeats it."""


class Duplicates:
    """The ids of one life of a sender (installation and boot) that were handled or are being handled. What the sender
    settled bounds them."""

    def __init__(self, who: int, boot: int, most: int) -> None:
        self.who, self.boot, self._most = who, boot, most
        self.settled = 0
        self.handled: set[int] = set()
        self.handling: set[int] = set()
        """Ids being handled, and those whose handling failed half way: they are neither handled again nor
        acknowledged."""

    def settle(self, below: int) -> None:
        if below > self.settled:
            self.settled = below
            self.handled = {known for known in self.handled if known >= below}
            self.handling = {known for known in self.handling if known >= below}

    def seen(self, envelope_id: int) -> bool:
        return envelope_id < self.settled or envelope_id in self.handled

    @property
    def full(self) -> bool:
        return len(self.handled) + len(self.handling) >= self._most


class Messenger:
    """The messages of one agent. `who`: this host's identity in gossip; `boot_of` and `holder`: the boot and the
    identity of a host as gossip knows it, 0 while it does not. `hear(sender, plugin, body) -> bool` handles a send:
    False when it cannot now, Refused when it failed; `answer(sender, plugin, body) -> bytes` handles a question,
    `raw(sender, plugin, body)` the rest."""

    def __init__(
        self,
        env: Env,
        who: int,
        boot: int,
        boot_of: Callable[[HostId], int],
        holder: Callable[[HostId], int],
        hear: Callable[[HostId, str, bytes], Awaitable[bool]],
        answer: Callable[[HostId, str, bytes], Awaitable[bytes]],
        raw: Callable[[HostId, str, bytes], None],
    ) -> None:
        self._env, self._who, self._boot = env, who, boot
        self._boot_of, self._holder = boot_of, holder
        self._hear, self._raw = hear, raw
        self.remembered_max = HANDLED_MAX
        self._next_id = 1
        self._waiting: dict[int, tuple[HostId, asyncio.Future[Envelope], int]] = {}
        self._unsettled: dict[HostId, dict[int, None]] = {}
        """The ids of messages that may still be repeated, by receiver; they ascend."""
        self._senders: dict[HostId, Duplicates] = {}
        self.counters: Counter[str] = Counter()
        self._answers = Answers(env, answer, self._post, self.counters)

    async def send(self, plugin: str, to: HostId, body: bytes, deadline_s: float) -> bool:
        """Send a message; True once `to` acknowledged it. False: not by the deadline, or it restarted; it may still
        have been handled."""
        envelope_id = self._new_id()
        unsettled = self._unsettled.setdefault(to, {})
        unsettled[envelope_id] = None
        try:
            reply = await self._exchange("send", envelope_id, plugin, to, body, deadline_s)
        finally:
            del unsettled[envelope_id]
        return reply is not None and reply.kind == "ack"

    async def ask(self, plugin: str, to: HostId, body: bytes, deadline_s: float) -> bytes:
        """Ask a question, and return the answer's body, all its pages. TimeoutError without one, Refused when the other
        side refused."""
        end_s = self._env.clock.now_s() + deadline_s
        envelope_id = self._new_id()
        found, pages = bytearray(), 1
        page = 0
        while page < pages:
            left_s = end_s - self._env.clock.now_s()
            reply = await self._exchange("ask", envelope_id, plugin, to, b"" if page else body, left_s, page)
            if reply is None:
                raise TimeoutError(f"{to} did not answer within {deadline_s:g} s")
            if reply.kind == "refused":
                raise _refusal(to, reply.body)
            if reply.kind == "stale":  # it restarted, and gossip is about to tell; pages that it kept are gone
                found, page, pages = bytearray(), 0, 1
                await asyncio.sleep(RETRY_S[0])
                continue
            found += reply.body
            page, pages = page + 1, reply.pages
            if (page < pages and not reply.body) or len(found) > ANSWER_BYTES_MAX:
                raise Refused(1, f"the answer of {to} is malformed", "a part of it is empty or too long", "upgrade it")
        return bytes(found)

    def raw(self, plugin: str, to: HostId, body: bytes) -> bool:
        """Try once to send; False when it certainly was not sent."""
        return self._post(to, Envelope("raw", 0, self._boot, 0, 0, plugin, body))

    def _new_id(self) -> int:
        envelope_id, self._next_id = self._next_id, self._next_id + 1
        return envelope_id

    async def _exchange(
        self, kind: Kind, envelope_id: int, plugin: str, to: HostId, body: bytes, deadline_s: float, page: int = 0
    ) -> Envelope | None:
        end_s = self._env.clock.now_s() + deadline_s
        reply: asyncio.Future[Envelope] = asyncio.get_running_loop().create_future()
        self._waiting[envelope_id] = (to, reply, page)
        to_boot = 0
        tries = 0
        try:
            while (left_s := end_s - self._env.clock.now_s()) > 0:
                to_boot = to_boot or self._boot_of(to)
                if to_boot or kind == "ask":
                    self._post(
                        to,
                        Envelope(
                            kind, envelope_id, self._boot, to_boot, self._settled(to), plugin, body, page, who=self._who
                        ),
                    )
                pause_s = min(RETRY_S[min(tries, len(RETRY_S) - 1)], left_s)
                tries += 1
                await asyncio.wait([reply], timeout=pause_s)
                if reply.done():
                    return reply.result()
            self.counters["deadline"] += 1
            return None
        finally:
            del self._waiting[envelope_id]

    def _settled(self, to: HostId) -> int:
        return next(iter(self._unsettled.get(to, ())), self._next_id)

    def _post(self, to: HostId, envelope: Envelope) -> bool:
        data = encode(envelope)
        if len(data) > ENVELOPE_BYTES_MAX:
            raise ValueError(f"a message of {len(data)} bytes to {to} is over the limit of {ENVELOPE_BYTES_MAX}")
        return self._env.links.send(to, data)

    def received(self, sender: HostId, data: bytes) -> None:
        """Take a message from an authenticated host. It never raises: what is malformed is dropped and counted."""
        envelope = decode(data)
        if envelope is None:
            self.counters["malformed"] += 1
            return
        if envelope.kind == "raw":
            self._raw(sender, envelope.plugin, envelope.body)
        elif envelope.kind in ("send", "ask"):
            self._incoming(sender, envelope)
        else:
            self._reply(sender, envelope)

    def _incoming(self, sender: HostId, envelope: Envelope) -> None:
        if envelope.to_boot not in (0, self._boot):
            self.counters["stale"] += 1
            if envelope.to_boot < self._boot:
                self._post(sender, Envelope("stale", envelope.id, envelope.boot, 0, 0, envelope.plugin, b""))
        elif envelope.kind == "ask":
            self._answers.asked(sender, envelope)
        else:
            self._handle_once(sender, envelope)

    def _handle_once(self, sender: HostId, envelope: Envelope) -> None:
        known = self._senders.get(sender)
        holder = self._holder(sender) or (known.who if known else envelope.who)
        if envelope.who != holder:
            self.counters["of_another_installation"] += 1
            return
        if known is None or known.who != holder or envelope.boot > known.boot:
            known = self._senders[sender] = Duplicates(envelope.who, envelope.boot, self.remembered_max)
        if envelope.boot < known.boot:
            self.counters["old_boot"] += 1
            return
        known.settle(envelope.settled)
        if known.seen(envelope.id):
            self.counters["duplicate"] += 1
            self._acknowledge(sender, envelope)
        elif envelope.id in known.handling:
            pass
        elif known.full and envelope.id != known.settled:  # the others wait until the oldest is settled
            self.counters["refused_table_full"] += 1
            self._post(sender, Envelope("full", envelope.id, envelope.boot, 0, 0, envelope.plugin, b""))
        else:
            known.handling.add(envelope.id)
            self._env.spawn("hear", self._handle(sender, envelope, known))

    async def _handle(self, sender: HostId, envelope: Envelope, known: Duplicates) -> None:
        try:
            handled = await self._hear(sender, envelope.plugin, envelope.body)
        except Refused as failure:
            self._env.log.warning("message not handled", sender=sender, plugin=envelope.plugin, why=str(failure))
            return
        known.handling.discard(envelope.id)
        if handled:
            known.handled.add(envelope.id)
            self._acknowledge(sender, envelope)

    def _acknowledge(self, sender: HostId, envelope: Envelope) -> None:
        self._post(sender, Envelope("ack", envelope.id, envelope.boot, 0, 0, envelope.plugin, b""))

    def _reply(self, sender: HostId, envelope: Envelope) -> None:
        waiting = self._waiting.get(envelope.id)
        if envelope.boot != self._boot or waiting is None or waiting[0] != sender or waiting[1].done():
            self.counters["late_replies"] += 1
        elif envelope.kind == "full":
            self.counters["receiver_table_full"] += 1  # it certainly was not handled; `_exchange` repeats it
        elif envelope.page != waiting[2]:
            self.counters["late_replies"] += 1
        else:
            waiting[1].set_result(envelope)


def _refusal(by: HostId, body: bytes) -> Refused:
    try:
        no = msgspec.msgpack.decode(body, type=RefusedBody)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Refused(1, f"{by} refused", "the reason it gave cannot be read here", "upgrade the older host")
    return Refused(no.code, no.what, no.why, no.next)
