"""Letters between agents: ids, boots, acknowledgements, retries and a table of duplicates on top of `Links`.

A link loses messages silently, so whatever changes state travels as a letter:

    send   -> delivered at least once until its deadline, handled at most once   -> ack: it was handled
    ask    -> a question that changes nothing; asked again until answered        -> answer | refused
    raw    -> one try, no acknowledgement (the replicated log has its own)

Each letter names the sender's boot and the boot of the receiver it was meant for. A receiver that restarted has
forgotten its table of duplicates, therefore it refuses letters meant for its former self (`stale`) instead of handling
one of them twice; the sender then reports "not acknowledged", which its plugin must be able to bear anyway. A letter
for a plugin that is not on now is not acknowledged either: it comes again, and may find the plugin on.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

from agent.answers import Answers
from agent.envelope import ANSWER_BYTES_MAX, LETTER_BYTES_MAX, Envelope, Kind, RefusedBody, decode, encode
from covey.core import HostId
from covey.errors import Refused
from covey.ports import Env

__all__ = ["Envelope", "Messenger"]

RETRY_S = (0.2, 0.4, 0.8, 1.5)
"""Pauses between tries of one letter; the last one repeats."""
HANDLED_MAX = 4096
"""Letters of one sender that are remembered beyond what it said it no longer repeats, handled or being handled. Beyond
it a letter is refused as `full`, and comes again."""


class Duplicates:
    """Which ids of one sender's boot were handled or are being handled. Bounded by what the sender settled."""

    def __init__(self, boot: int, most: int) -> None:
        self.boot, self._most = boot, most
        self.settled = 0
        self.handled: set[int] = set()
        self.handling: set[int] = set()
        """Also those whose handling failed half way: they are neither handled again nor acknowledged."""

    def settle(self, below: int) -> None:
        if below > self.settled:
            self.settled = below
            self.handled = {known for known in self.handled if known >= below}
            self.handling = {known for known in self.handling if known >= below}

    def seen(self, letter_id: int) -> bool:
        return letter_id < self.settled or letter_id in self.handled

    @property
    def full(self) -> bool:
        return len(self.handled) + len(self.handling) >= self._most


class Messenger:
    """One per agent. `hear(sender, plugin, body) -> bool` handles a send, or says that it cannot now (False), or that
    it failed (Refused); `answer(sender, plugin, body) -> bytes` handles a question, `raw(sender, plugin, body)` the
    rest."""

    def __init__(
        self,
        env: Env,
        boot: int,
        boot_of: Callable[[HostId], int],
        hear: Callable[[HostId, str, bytes], Awaitable[bool]],
        answer: Callable[[HostId, str, bytes], Awaitable[bytes]],
        raw: Callable[[HostId, str, bytes], None],
    ) -> None:
        self._env, self._boot, self._boot_of = env, boot, boot_of
        self._hear, self._raw = hear, raw
        self.remembered_max = HANDLED_MAX
        self._next_id = 1
        self._waiting: dict[int, tuple[HostId, asyncio.Future[Envelope], int]] = {}
        self._unsettled: dict[HostId, dict[int, None]] = {}
        """Letters that may still be repeated, by receiver; ids ascend."""
        self._senders: dict[HostId, Duplicates] = {}
        self.counters: Counter[str] = Counter()
        self._answers = Answers(env, answer, self._post, self.counters)

    async def send(self, plugin: str, to: HostId, body: bytes, deadline_s: float) -> bool:
        """True once `to` acknowledged. False: not by the deadline, or it restarted; it may still have been handled."""
        letter_id = self._new_id()
        unsettled = self._unsettled.setdefault(to, {})
        unsettled[letter_id] = None
        try:
            reply = await self._exchange("send", letter_id, plugin, to, body, deadline_s)
        finally:
            del unsettled[letter_id]
        return reply is not None and reply.kind == "ack"

    async def ask(self, plugin: str, to: HostId, body: bytes, deadline_s: float) -> bytes:
        """The answer's body, all its pages. TimeoutError without one, Refused when the other side refused."""
        end_s = self._env.clock.now_s() + deadline_s
        letter_id = self._new_id()
        found, pages = bytearray(), 1
        page = 0
        while page < pages:
            left_s = end_s - self._env.clock.now_s()
            reply = await self._exchange("ask", letter_id, plugin, to, b"" if page else body, left_s, page)
            if reply is None:
                raise TimeoutError(f"{to} did not answer within {deadline_s:g} s")
            if reply.kind == "refused":
                raise _refusal(to, reply.body)
            found += reply.body
            page, pages = page + 1, reply.pages
            if (page < pages and not reply.body) or len(found) > ANSWER_BYTES_MAX:
                raise Refused(1, f"the answer of {to} is malformed", "a page of it is empty or too long", "upgrade it")
        return bytes(found)

    def raw(self, plugin: str, to: HostId, body: bytes) -> bool:
        """One try; False when it certainly was not sent."""
        return self._post(to, Envelope("raw", 0, self._boot, 0, 0, plugin, body))

    def _new_id(self) -> int:
        letter_id, self._next_id = self._next_id, self._next_id + 1
        return letter_id

    async def _exchange(
        self, kind: Kind, letter_id: int, plugin: str, to: HostId, body: bytes, deadline_s: float, page: int = 0
    ) -> Envelope | None:
        end_s = self._env.clock.now_s() + deadline_s
        reply: asyncio.Future[Envelope] = asyncio.get_running_loop().create_future()
        self._waiting[letter_id] = (to, reply, page)
        to_boot = 0
        tries = 0
        try:
            while (left_s := end_s - self._env.clock.now_s()) > 0:
                to_boot = to_boot or self._boot_of(to)
                if to_boot or kind == "ask":
                    self._post(
                        to, Envelope(kind, letter_id, self._boot, to_boot, self._settled(to), plugin, body, page)
                    )
                pause_s = min(RETRY_S[min(tries, len(RETRY_S) - 1)], left_s)
                tries += 1
                await asyncio.wait([reply], timeout=pause_s)
                if reply.done():
                    return reply.result()
            self.counters["deadline"] += 1
            return None
        finally:
            del self._waiting[letter_id]

    def _settled(self, to: HostId) -> int:
        return next(iter(self._unsettled.get(to, ())), self._next_id)

    def _post(self, to: HostId, letter: Envelope) -> bool:
        data = encode(letter)
        if len(data) > LETTER_BYTES_MAX:
            raise ValueError(f"a letter of {len(data)} bytes to {to} is over the limit of {LETTER_BYTES_MAX}")
        return self._env.links.send(to, data)

    def received(self, sender: HostId, data: bytes) -> None:
        """A message from an authenticated host. Never raises: what is malformed is dropped and counted."""
        letter = decode(data)
        if letter is None:
            self.counters["malformed"] += 1
            return
        if letter.kind == "raw":
            self._raw(sender, letter.plugin, letter.body)
        elif letter.kind in ("send", "ask"):
            self._incoming(sender, letter)
        else:
            self._reply(sender, letter)

    def _incoming(self, sender: HostId, letter: Envelope) -> None:
        if letter.to_boot not in (0, self._boot):
            self.counters["stale"] += 1
            if letter.to_boot < self._boot:
                self._post(sender, Envelope("stale", letter.id, letter.boot, 0, 0, letter.plugin, b""))
        elif letter.kind == "ask":
            self._answers.asked(sender, letter)
        else:
            self._handle_once(sender, letter)

    def _handle_once(self, sender: HostId, letter: Envelope) -> None:
        known = self._senders.get(sender)
        if known is None or letter.boot > known.boot:
            known = self._senders[sender] = Duplicates(letter.boot, self.remembered_max)
        if letter.boot < known.boot:
            self.counters["old_boot"] += 1
            return
        known.settle(letter.settled)
        if known.seen(letter.id):
            self.counters["duplicate"] += 1
            self._acknowledge(sender, letter)
        elif letter.id in known.handling:
            pass
        elif known.full and letter.id != known.settled:  # the oldest one is what all others wait for
            self.counters["refused_table_full"] += 1
            self._post(sender, Envelope("full", letter.id, letter.boot, 0, 0, letter.plugin, b""))
        else:
            known.handling.add(letter.id)
            self._env.spawn("hear", self._handle(sender, letter, known))

    async def _handle(self, sender: HostId, letter: Envelope, known: Duplicates) -> None:
        try:
            handled = await self._hear(sender, letter.plugin, letter.body)
        except Refused as failure:
            self._env.log.warning("letter not handled", sender=sender, plugin=letter.plugin, why=str(failure))
            return
        known.handling.discard(letter.id)
        if handled:
            known.handled.add(letter.id)
            self._acknowledge(sender, letter)

    def _acknowledge(self, sender: HostId, letter: Envelope) -> None:
        self._post(sender, Envelope("ack", letter.id, letter.boot, 0, 0, letter.plugin, b""))

    def _reply(self, sender: HostId, letter: Envelope) -> None:
        waiting = self._waiting.get(letter.id)
        if letter.boot != self._boot or waiting is None or waiting[0] != sender or waiting[1].done():
            self.counters["late_replies"] += 1
        elif letter.kind == "full":
            self.counters["receiver_table_full"] += 1  # it certainly was not handled, and comes again
        elif letter.page != waiting[2]:
            self.counters["late_replies"] += 1
        else:
            waiting[1].set_result(letter)


def _refusal(by: HostId, body: bytes) -> Refused:
    try:
        no = msgspec.msgpack.decode(body, type=RefusedBody)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Refused(1, f"{by} refused", "why cannot be understood here", "upgrade the older host")
    return Refused(no.code, no.what, no.why, no.next)
