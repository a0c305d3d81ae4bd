"""The tokens that this agent made, and its answers to hosts that ask. Nothing of it is on disk: a restart forgets all
tokens."""

from collections.abc import Sequence

import msgspec

from gossip.joining import policy
from gossip.joining.messages import (
    BY_KEY,
    ID_BYTES,
    SECRET_BYTES,
    VERSION,
    Ask,
    JoinToken,
    RackGiven,
    Reason,
    fingerprint,
    pack_refusal,
    read_ask,
)

TOKENS_MAX = 1024
"""The most tokens remembered, used and expired ones included: what has ended goes first."""
ANSWERS_MAX = 64
"""The most answers to hosts that have the key which are kept, to be repeated when the ask is."""


class Replied(msgspec.Struct, frozen=True):
    """What follows an ask."""

    outcome: str
    """A word to count it by: `given`, `repeated`, `malformed`, `flooded`, or a `Reason`."""
    reply: bytes = b""
    """What is sent back; empty: nothing."""
    by_key: bool = False


class Made(msgspec.Struct):
    """A token that was made here."""

    token: JoinToken
    until_s: float
    ask: bytes = b""
    """The ask that used it; empty while it is not used."""
    answer: bytes = b""


class JoinTokens:
    """The member's side of joining. `keys`: those of gossip, the first seals."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = tuple(keys)
        self._made: dict[bytes, Made] = {}
        self._answers: dict[bytes, bytes] = {}
        """The newest asks of hosts that have the key, and the answer to each."""
        self._replies_left, self._since_s = policy.REPLIES_PER_S, 0.0

    def rekey(self, keys: Sequence[bytes]) -> None:
        """Take these as the keys of gossip. Tokens of a key that is none of them any more are forgotten."""
        self._keys = tuple(keys)
        known = {fingerprint(key) for key in keys}
        self._made = {token: made for token, made in self._made.items() if made.token.rack in known}
        self._answers.clear()

    def make(self, random: bytes, now_s: float) -> JoinToken | None:
        """A new token, from `ID_BYTES + SECRET_BYTES` random bytes; None when too many are good still."""
        token = JoinToken(random[:ID_BYTES], fingerprint(self._keys[0]), random[ID_BYTES : ID_BYTES + SECRET_BYTES])
        if token.id == BY_KEY or token.id in self._made or not self._make_room(now_s):
            return None
        self._made[token.id] = Made(token, now_s + policy.TOKEN_S)
        return token

    def _make_room(self, now_s: float) -> bool:
        if len(self._made) >= TOKENS_MAX:
            ended = next((key for key, made in self._made.items() if made.ask or now_s >= made.until_s), None)
            if ended is None:
                return False
            del self._made[ended]
        return True

    def asked(self, datagram: bytes, given: RackGiven, private: bytes, now_s: float) -> Replied:
        """Answer a datagram whose first byte says that it is an ask. `private`: 32 random bytes."""
        replied = self._answered(datagram, given, private, now_s)
        is_once = replied.outcome == "given" and not replied.by_key
        return replied if is_once or not replied.reply or self._may_reply(now_s) else Replied("flooded")

    def _answered(self, datagram: bytes, given: RackGiven, private: bytes, now_s: float) -> Replied:
        ask = read_ask(datagram)
        if ask is None:
            return Replied("malformed")
        if ask.version != VERSION:
            return _refused(datagram, "version")
        if ask.token == BY_KEY:
            return self._of_a_holder(ask, datagram, given, private)
        made = self._made.get(ask.token)
        if made is None:
            return _refused(datagram, "unknown")
        return self._of_token(made, ask, datagram, given, private, now_s)

    def _of_token(
        self, made: Made, ask: Ask, datagram: bytes, given: RackGiven, private: bytes, now_s: float
    ) -> Replied:
        if not policy.proves(ask, made.token):
            return _refused(datagram, "wrong")
        if made.ask == datagram:
            return Replied("repeated", made.answer)
        if made.ask:
            return _refused(datagram, "used")
        if now_s >= made.until_s:
            return _refused(datagram, "expired")
        answer = policy.give(made.token, ask, datagram, given, private)
        if answer is None:
            return Replied("malformed")
        made.ask, made.answer = datagram, answer
        return Replied("given", answer)

    def _of_a_holder(self, ask: Ask, datagram: bytes, given: RackGiven, private: bytes) -> Replied:
        if (known := self._answers.get(datagram)) is not None:
            return Replied("repeated", known, by_key=True)
        token = next((one for one in map(policy.by_key, self._keys) if policy.proves(ask, one)), None)
        if token is None:
            return _refused(datagram, "wrong")
        answer = policy.give(token, ask, datagram, given, private)
        if answer is None:
            return Replied("malformed")
        self._answers[datagram] = answer
        if len(self._answers) > ANSWERS_MAX:
            del self._answers[next(iter(self._answers))]
        return Replied("given", answer, by_key=True)

    def _may_reply(self, now_s: float) -> bool:
        left = self._replies_left + (now_s - self._since_s) * policy.REPLIES_PER_S
        self._replies_left, self._since_s = min(left, policy.REPLIES_PER_S), now_s
        if self._replies_left < 1:
            return False
        self._replies_left -= 1
        return True


def _refused(datagram: bytes, reason: Reason) -> Replied:
    return Replied(reason, pack_refusal(datagram, reason))
