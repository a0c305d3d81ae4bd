"""`agentctl login`: a certificate for whoever asks at this host's unix socket, by which other hosts know the user over
TCP.

The kernel says who asks; of the request only a public key counts. The private key stays where it was made.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from agent.api.rack_view import RackMember
from agent.authority.certificates import CSR_CHARACTERS_MAX, SERIAL_BYTES, Named, may_be_named, requested_key
from agent.authority.service import HostAuthority
from covey.core.errors import Refused
from plugins.askers import asker_of
from plugins.base import Command

DAY_S = 86_400.0
DAYS, DAYS_MAX = 1, 30
"""The days for which a certificate is good: what is asked for by default, and the most (chosen)."""


class LoginView(msgspec.Struct, frozen=True):
    """A certificate that was made."""

    user: str
    uid: int
    until_wall_s: float
    """When it is out of date, seconds since 1970."""
    certificate: str
    """The certificate, PEM."""
    authority: str
    """The certificates of the rack's authorities, PEM: who shows a certificate signed by one of them is a host."""


class Logins:
    """Makes the certificates."""

    def __init__(self, member: RackMember, authority: HostAuthority) -> None:
        self._member, self._authority = member, authority

    def commands(self) -> Mapping[str, Command]:
        return {"agent.login": self._log_in}

    async def _log_in(self, given: Mapping[str, Any]) -> LoginView:
        """`csr`: a certificate request, PEM; `days`: for how long."""
        asker, what = asker_of(given), "no certificate was made"
        csr, days = given.get("csr"), given.get("days", DAYS)
        if isinstance(days, bool) or not isinstance(days, int) or not 1 <= days <= DAYS_MAX:
            why = f"{str(days)[:40]!r} is not a number of days from 1 to {DAYS_MAX}"
            raise Refused(2, what, why, f"agentctl login --days {DAYS}")
        key = requested_key(csr) if isinstance(csr, str) else None
        if key is None:
            why = f"`csr` is no request, signed by its own key on P-256, of at most {CSR_CHARACTERS_MAX} characters"
            raise Refused(2, what, why, "agentctl login makes one")
        if not may_be_named(asker.user, asker.uid):
            why = f"a certificate cannot name {asker.name[:80]} (uid {asker.uid})"
            raise Refused(4, what, why, "use agentctl on a host")
        env = self._member.env
        named = Named(asker.user, asker.uid, float(int(env.clock.wall_s() + days * DAY_S)))
        made = self._authority.certified(key, named, env.entropy(SERIAL_BYTES))
        # One line a day of the same: whoever may log in would else push all others out of this host's events.
        same = f"login/{asker.uid}/{days}/{int(env.clock.wall_s() // DAY_S)}"
        said = f"for {asker.user} (uid {asker.uid}), good for {days} days"
        self._member.event_log.note(f"host/{self._member.id}", "certificate made", said, same)
        env.log.info("a user logged in", user=asker.user, uid=asker.uid, days=days)
        return LoginView(named.user, named.uid, named.until_s, made, self._authority.pem)
