"""The ring of this host, on disk and in gossip, and one step of a rotation over all hosts.

The ring is the file `gossip.ring` of the state directory, since the agent may not write where an operator put the first
key. It is in the place of that file: when an operator puts other keys there, they count.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from agent.event_log import EventLog
from agent.keyring.policy import REFUSED, KeyRing, KeyStep, lacking, name, needed, planned, stepped
from agent.keyring.views import KeyRow, KeysTurned
from covey.core.errors import Refused
from covey.core.ids import HostId
from covey.ports.env import Env
from covey.wire import checked
from gossip.packet import KEYS_MAX
from gossip.types import KEY_BYTES, HostView
from plugins.base import Command

FILE = "gossip.ring"
ANSWER_S = 5.0
"""Seconds for which a host is asked to take a step."""
REACHED = ("alive", "suspect", "away")
"""The states of hosts that have to take every step: they are there, or will be back soon."""

Ask = Callable[[HostId, KeyStep, float], Awaitable[KeyRow]]
"""Has another host take a step; TimeoutError or Refused."""
_decoder = msgspec.msgpack.Decoder(KeyRing)


class HostKeyring:
    """The keys of this host. `ring`: as it was when the agent started; `changed` is called with all keys when it
    changes."""

    def __init__(
        self,
        env: Env,
        ring: KeyRing,
        event_log: EventLog,
        hosts: Callable[[], Sequence[HostView]],
        ask: Ask,
        changed: Callable[[Sequence[bytes]], None],
    ) -> None:
        self._env, self._event_log, self._hosts, self._ask, self._changed = env, event_log, hosts, ask, changed
        self._ring = ring
        self._one_at_a_time = asyncio.Lock()

    @property
    def keys(self) -> tuple[bytes, ...]:
        return self._ring.keys

    @property
    def row(self) -> KeyRow:
        return self._ring.row(self._env.host)

    def commands(self) -> Mapping[str, Command]:
        return {"agent.turn_keys": self._turn}

    # ---- this host ----

    async def take(self, asked: KeyStep) -> KeyRow:
        """Take a step, durable on return. Refused."""
        async with self._one_at_a_time:
            ring = stepped(self._ring, asked)
            if ring != self._ring:
                await self._save(ring)
                self._ring = ring
                self._changed(ring.keys)
                ids = ", ".join(self.row.ids)
                self._event_log.note(f"host/{self._env.host}", "keys changed", f"{asked.step}: it has {ids} now")
            return self.row

    async def _save(self, ring: KeyRing) -> None:
        try:
            await checked.save(self._env.disk, FILE, ring)
        except OSError as error:
            why = f"{self._env.disk.path(FILE)}: {error.strerror or error}"
            raise Refused(
                REFUSED, "the ring cannot be written", why, "free some space, then: agentctl keys rotate"
            ) from None

    # ---- the rack ----

    async def _turn(self, arguments: Mapping[str, Any]) -> KeysTurned:
        """Take the `step` that is asked for, or, of none, the next one of a rotation, on every host that has not taken
        it. Refused when a host does not answer, or would not be heard afterwards."""
        named, id = str(arguments.get("step") or ""), str(arguments.get("id") or "")
        rows = await self._on_all(self._reached(), KeyStep("tell"))
        gone = tuple(view.host for view in self._hosts() if view.state == "gone")
        step, hosts = self._named(named, id, rows, gone) if named or id else self._next(rows)
        taken = await self._on_all(hosts, step)
        after = {row.host: row for row in (*rows, *taken)}
        is_done = bool(named) or planned(list(after.values()), self._env.host).step == "new"
        return KeysTurned(named or step.step, step.id, tuple(sorted(hosts)), gone, is_done)

    def _next(self, rows: Sequence[KeyRow]) -> tuple[KeyStep, Sequence[HostId]]:
        """The next step of a rotation, and who has not taken it."""
        plan = planned(rows, self._env.host)
        if plan.step == "new":
            return self._new(rows), plan.hosts
        if plan.step == "install":
            return self._install(plan.id, rows, "the rotation cannot continue from here", "rotate"), plan.hosts
        return KeyStep(plan.step, plan.id), plan.hosts

    def _named(
        self, named: str, id: str, rows: Sequence[KeyRow], gone: Sequence[HostId]
    ) -> tuple[KeyStep, Sequence[HostId]]:
        """A step that was asked for by name, and who has not taken it."""
        if named == "install" and not id:
            return self._new(rows), [row.host for row in rows]
        if named not in ("install", "use", "remove"):
            raise Refused(2, f"no step {named!r}", "steps are install, use and remove", "agentctl keys --help")
        lack = lacking(rows, id)
        if len(lack) == len(rows):
            raise Refused(REFUSED, f"no host has key {id!r}", "keys are called as the list shows them", "agentctl keys")
        if named == "install":
            return self._install(id, rows, f"key {id} cannot be installed from here", f"install {id}"), lack
        if named == "use":
            if lack:
                why = f"{', '.join(lack)}: without it, so that nothing sealed with it can be opened there"
                raise Refused(REFUSED, f"key {id} cannot be used", why, f"agentctl keys install {id}")
            return KeyStep("use", id), [row.host for row in rows if row.ids[0] != id]
        why = needed(rows, id, gone)
        if why:
            next_step = f"agentctl hosts forget {gone[0]}, if it never comes back" if gone else "agentctl keys"
            raise Refused(REFUSED, f"key {id} cannot be removed", why, next_step)
        return KeyStep("drop", id), [row.host for row in rows if id in row.ids]

    def _new(self, rows: Sequence[KeyRow]) -> KeyStep:
        key = self._env.entropy(KEY_BYTES)
        return KeyStep("install", name(key), key, 1 + max(number for row in rows for number in row.numbers))

    def _install(self, id: str, rows: Sequence[KeyRow], what: str, typed: str) -> KeyStep:
        """The step that installs a key which some host has."""
        for key, number in zip(self._ring.keys, self._ring.numbers, strict=True):
            if name(key) == id:
                return KeyStep("install", id, key, number)
        has = next(row.host for row in rows if id in row.ids)
        raise Refused(REFUSED, what, f"{self._env.host} lacks key {id} itself", f"on {has}: agentctl keys {typed}")

    def _reached(self) -> tuple[HostId, ...]:
        return tuple(view.host for view in self._hosts() if view.host == self._env.host or view.state in REACHED)

    async def _on_all(self, hosts: Sequence[HostId], step: KeyStep) -> list[KeyRow]:
        """Have these hosts take a step, and return their rows. Refused unless all acknowledge it."""
        found = await asyncio.gather(*(self._on(host, step) for host in hosts))
        silent = [f"{host}: {each}" for host, each in zip(hosts, found, strict=True) if isinstance(each, str)]
        if silent:
            what = (
                "no key was changed" if step.step == "tell" else f"not every host acknowledges: {step.step} {step.id}"
            )
            next_step = "start the agents that do not answer, or wait until they are gone; then type it again"
            raise Refused(REFUSED, what, "; ".join(silent), next_step)
        return [each for each in found if isinstance(each, KeyRow)]

    async def _on(self, host: HostId, step: KeyStep) -> KeyRow | str:
        """The row of a host after the step, or why it did not take it."""
        try:
            return await (self.take(step) if host == self._env.host else self._ask(host, step, ANSWER_S))
        except TimeoutError:
            return "it does not answer"
        except Refused as refused:
            return f"{refused.what}: {refused.why}"


def of_file(given: Sequence[bytes]) -> KeyRing:
    """The ring of a host whose keys are those of a file."""
    return KeyRing(tuple(given), (0,) * len(given), _fingerprint(given))


def in_place(found: KeyRing | None, of_a_file: KeyRing) -> KeyRing:
    """The ring that counts: the one found on disk, if it is in the place of this file."""
    if found is None or found.instead_of != of_a_file.instead_of or not _is_whole(found):
        return of_a_file
    return found


def unsealed(data: bytes, given: Sequence[bytes]) -> KeyRing:
    """The ring of a host whose file `FILE` has these bytes, and whose file of keys these keys. checked.Damaged."""
    return in_place(checked.unseal(data, _decoder), of_file(given))


def _fingerprint(given: Sequence[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(given), digest_size=16, person=b"covey-ring").digest()


def _is_whole(ring: KeyRing) -> bool:
    right = 1 <= len(ring.keys) == len(ring.numbers) <= KEYS_MAX and all(len(key) == KEY_BYTES for key in ring.keys)
    return right and len({name(key) for key in ring.keys}) == len(ring.keys)
