"""Checkpoints that people ask for while a job runs: `agentctl checkpoint`.

The process that carries rank 0 saves, on whichever host it runs: that is asked, and asked again how far the save is."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from covey.core.errors import Refused
from covey.core.ids import HostId, JobId
from covey.wire.job import AskSave
from plugins.base import Command, Host
from plugins.scheduler.machine.log.jobs import Job
from plugins.scheduler.messages.wire import SaveAnswer, SaveWanted

ANSWER_S, LOOK_S = 3.0, 0.02
"""Seconds that a process may take to answer, and between two looks for its answer."""
NUMBER_MAX = 1 << 31
NOT_SAVED = "no checkpoint of {} was written"


class SaveView(msgspec.Struct, frozen=True, kw_only=True):
    """How far a save is that was asked for."""

    id: JobId
    number: int
    """What to ask again with."""
    state: str
    """`pending`, or `saved`."""
    step: int = 0
    """The step with which the job would go on from it."""
    path: str = ""
    host: HostId
    """The host of the process that saves."""


class AskedSaves:
    """Saves of jobs that run somewhere, and of processes on this host. `seek` finds the job of a request."""

    def __init__(self, plugin: str, host: Host, seek: Callable[[Mapping[str, Any]], Awaitable[Job]]) -> None:
        self._plugin, self._host, self._seek = plugin, host, seek

    def commands(self) -> Mapping[str, Command]:
        return {"checkpoint": self._checkpoint}

    async def _checkpoint(self, given: Mapping[str, Any]) -> SaveView:
        job, number = await self._seek(given), given.get("number", 0)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < NUMBER_MAX:
            why = f"expected a whole number from 0 to {NUMBER_MAX - 1}: the one of the answer before"
            raise Refused(2, f"invalid number: {str(number)[:40]!r}", why, "agentctl checkpoint ID")
        what = NOT_SAVED.format(job.id)
        if job.state != "running":
            next = f"agentctl job {job.id}" if job.over else f"agentctl why {job.id}"
            raise Refused(4, what, f"it is {job.state}, and only a job that runs can save", next)
        process, host = _who_saves(job)
        if host is None:
            raise Refused(75, what, "its rank 0 is on its way to another host", "try again")
        number = number or 1 + int.from_bytes(self._host.env.entropy(4)) % (NUMBER_MAX - 1)
        answer = await self._ask(host, SaveWanted(job.id, job.grant.epoch, process, number))
        if answer.state == "refused":
            raise Refused(4, what, answer.why, answer.next)
        return SaveView(id=job.id, number=number, state=answer.state, step=answer.step, path=answer.path, host=host)

    async def _ask(self, host: HostId, question: SaveWanted) -> SaveAnswer:
        if host == self._host.id:
            return await self.answer(question)
        what = NOT_SAVED.format(question.job)
        try:
            answer = await self._host.ask(self._plugin, host, question, 2 * ANSWER_S)
        except TimeoutError as error:
            raise Refused(75, what, f"{host}, where its rank 0 runs, does not answer", "agentctl hosts") from error
        if not isinstance(answer, SaveAnswer):
            raise Refused(1, what, f"{host} gave an unexpected answer", f"upgrade {host}")
        return answer

    async def answer(self, asked: SaveWanted) -> SaveAnswer:
        """Let the process on this host save, or say how far it is."""
        here = [peer for peer in self._host.peers(asked.job) if (peer.epoch, peer.rank) == (asked.epoch, asked.rank)]
        peers = [peer for peer in here if peer.saves and not peer.gone]
        if not peers:
            old = "uses a covey-job that cannot be asked" if here else "has not called covey.join() here"
            next = "call covey.join() in the script, and save: job.tensors.save(), or job.state(.., checkpoint=True)"
            return SaveAnswer("refused", why=f"its rank {asked.rank} {old}", next=next)
        peer = peers[-1]
        peer.send(AskSave(asked.number))
        for _ in range(int(ANSWER_S / LOOK_S)):
            await asyncio.sleep(LOOK_S)
            if peer.save.number == asked.number:
                break
        said = peer.save
        if said.number != asked.number:
            why = f"its rank {asked.rank} did not answer in {ANSWER_S:g} s"
            return SaveAnswer("refused", why=why, next="try again")
        return SaveAnswer(said.state, said.step, said.path, said.why, said.next)


def _who_saves(job: Job) -> tuple[int, HostId | None]:
    """The process that carries rank 0, and its host; None: it is on none now."""
    for place in job.start.places:
        for process in place.ranks:
            if 0 in job.carried_by([process]):
                return process, place.host
    return 0, None
