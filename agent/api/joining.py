"""What this agent does for hosts that join the rack: it makes tokens, and says what a new host is given
(`gossip.joining`)."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from agent.api.rack_view import RackMember
from covey.core.errors import Refused
from covey.ports.addresses import Address, reached_at
from gossip.joining.messages import SEEDS_MAX, RackGiven
from gossip.joining.policy import TOKEN_S, voters_to_name
from gossip.service import GossipService
from plugins.base import Command


class JoinedMember(RackMember, Protocol):
    """What this file needs of the agent."""

    @property
    def gossip(self) -> GossipService: ...


class Joining:
    """Tokens, and what they are good for. `keys` returns those of gossip, `cluster` is its label, `advertise` the IP of
    this host."""

    def __init__(
        self, member: JoinedMember, keys: Callable[[], tuple[bytes, ...]], cluster: str, advertise: str
    ) -> None:
        self._member, self._keys, self._cluster, self._advertise = member, keys, cluster, advertise
        member.gossip.gives, member.gossip.gave = self.given, self._gave

    def commands(self) -> Mapping[str, Command]:
        return {"agent.make_token": self._make}

    @property
    def at(self) -> Address:
        """The address under which another host reaches the gossip of this one."""
        return reached_at(self._member.gossip.address, self._advertise)

    def given(self) -> RackGiven:
        member = self._member
        voters = voters_to_name(member.voters, member.log.leader)
        known = {view.host: view.address for view in member.hosts() if view.state == "alive" and view.address}
        others = [known.pop(host) for host in (*voters, *sorted(known)) if host in known and host != member.id]
        seeds = tuple(dict.fromkeys((self.at, *others)))[:SEEDS_MAX]
        return RackGiven(member.id, self._keys(), self._cluster, voters, seeds)

    def _gave(self, at: Address, by_key: bool) -> None:
        how = "it had the key" if by_key else "it had a token"
        self._member.env.log.info("a host asked to join", at=at, how=how)
        self._member.event_log.note(f"host/{self._member.id}", "let a host join", f"at {at}: {how}")

    async def _make(self, _arguments: Mapping[str, Any]) -> dict[str, Any]:
        """A token, as text, where its host asks for what it is good for, and for how many seconds it is."""
        token = self._member.gossip.make_token()
        if token is None:
            why = "as many as an agent remembers are good still"
            raise Refused(4, "no more tokens can be made now", why, "use those, or try again in an hour")
        self._member.env.log.info("a way to join was opened", good_s=TOKEN_S)
        self._member.event_log.note(f"host/{self._member.id}", "token made", "for one host, good for one hour")
        return {"at": self.at, "token": token.text, "good_s": TOKEN_S}
