"""Commands on their way to the leader: those that come in one turn of the event loop go as one message."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from agent.raft import policy
from agent.raft.messages import (
    Asked,
    ForwardedCommand,
    MalformedMessage,
    ProposeEntries,
    ProposeEntry,
    ProposeReplies,
    ProposeReply,
    decode_asked,
    encode_asked,
)
from covey.core.errors import Refused
from covey.core.ids import HostId
from covey.ports.env import Env

FORWARD_S = 2.0
"""Seconds for which the leader is asked before it is asked again."""
PAUSE_S = 0.05
"""Seconds before the next try when the host asked does not lead, or refuses to be asked."""
LOST = ProposeReply("lost")

Reply = asyncio.Future[ProposeReply]


class Forwarding:
    """`rack()`: the rack of this host's log. `ask_leader` as in `consensus.Consensus`."""

    def __init__(
        self,
        env: Env,
        rack: Callable[[], bytes],
        ask_leader: Callable[[HostId, bytes, float], Awaitable[bytes]],
        counters: Counter[str],
    ) -> None:
        self._env, self._rack, self._ask_leader, self._counters = env, rack, ask_leader, counters
        self._queued: dict[HostId, list[tuple[ForwardedCommand, Reply]]] = {}
        """What leaves at the end of this turn of the loop, by leader."""

    def forward(self, leader: HostId, command: ForwardedCommand) -> Reply:
        """Forward a command; the reply is `lost` when the leader did not answer."""
        self._counters["forwarded"] += 1
        if not self._queued:
            asyncio.get_running_loop().call_soon(self._flush)
        reply: Reply = asyncio.get_running_loop().create_future()
        self._queued.setdefault(leader, []).append((command, reply))
        return reply

    def _flush(self) -> None:
        queued, self._queued = self._queued, {}
        for leader, waiting in queued.items():
            while waiting:
                count = policy.batch_length(command for command, _ in waiting)
                self._env.spawn("forward proposals", self._send(leader, waiting[:count]))
                waiting = waiting[count:]

    async def _send(self, leader: HostId, waiting: Sequence[tuple[ForwardedCommand, Reply]]) -> None:
        replies = await self._ask(leader, [command for command, _ in waiting])
        for (_, reply), said in zip(waiting, replies, strict=True):
            if not reply.done():
                reply.set_result(said)

    async def _ask(self, leader: HostId, commands: Sequence[ForwardedCommand]) -> Sequence[ProposeReply]:
        """One reply per command; `lost` where the leader gave none that can be read."""
        if len(commands) == 1:
            (one,) = commands
            said = await self._exchange(leader, ProposeEntry(self._rack(), one.id, one.attempt, one.base, one.command))
            return [said if isinstance(said, ProposeReply) else LOST]
        said = await self._exchange(leader, ProposeEntries(self._rack(), tuple(commands)))
        if isinstance(said, ProposeReplies) and len(said.replies) == len(commands):
            return said.replies
        return [LOST] * len(commands)

    async def _exchange(self, leader: HostId, question: Asked) -> Asked | None:
        """The leader's answer; None when there is none, or it cannot be read."""
        try:
            return decode_asked(await self._ask_leader(leader, encode_asked(question), FORWARD_S))
        except (TimeoutError, MalformedMessage):
            self._counters["forwarding_failed"] += 1
        except Refused:
            self._counters["forwarding_failed"] += 1
            await asyncio.sleep(PAUSE_S)
        return None
