"""Environments of submitters: API keys are in them, so the log, which every host keeps, has only their digests.

    submit -> seal -> a file here, and on `env_copies` hosts more -> Submitted(digest, key, holders) in the log
    granted -> the coordinator fetches it -> placed -> every host of the gang fetches it -> ranks start
    the job is over -> every host deletes its file

A file holds AES-GCM ciphertext and is readable by the agent's user alone; its key is in the log and leaves the log's
state when the job ends. So neither a copy of the log nor a copy of these files says anything, and what a deleted file
leaves on a disk cannot be read once the log was cut. Unencrypted it is only where the job runs: in the record of its
ranks (`agent/jobs/runner.py`, mode 0600, gone with the ranks) and in their own environment.

Hosts that find a place for the job or run it may have it, as far as the log that the holder knows says so. Whoever ran
it keeps it until the job ends, so the job outlives the submitting agent. Copies beside that one are there for the time
before the first start: a job waits in the queue for hours, and the host where the job was submitted may be gone by
then. When no host that has it answers, the job goes back to the queue and says which hosts would have to come back.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from covey.core.carried import for_people
from covey.core.errors import Refused
from covey.core.hidden import without_secret_values
from covey.core.ids import HostId, JobId
from plugins.base import Command, Host
from plugins.scheduler.machine.log.job_table import JobTable
from plugins.scheduler.machine.log.jobs import HOLDING, Job
from plugins.scheduler.messages.spec import SealedEnv
from plugins.scheduler.messages.wire import EnvAnswer, EnvOf, KeepEnv, ShownEnv, ShownEnvOf
from plugins.scheduler.service.log import QueueLog
from plugins.start_views import EnvView

FOLDER = "scheduler/env"
KEY_BYTES = 32
NONCE = bytes(12)
"""The nonce of every seal: a key seals one environment and nothing else."""
COPIES_S = 2.0
"""Seconds for which a submission waits for the hosts that are to keep a copy."""
ASK_S = 2.0
FETCH_RETRY_S = 2.0
"""Seconds to pause before the hosts that may have an environment are asked again."""
UNCLAIMED_S = 600.0
"""Seconds for which a file is kept whose job the log does not know (yet): its submission may still be on its way."""
UNCLAIMED_MAX = 4096
"""The most files of this kind that are taken from other hosts."""

_decoder = msgspec.msgpack.Decoder(dict[str, str])


class Missing(Exception):
    """No host that has the environment can be asked; the message says why."""


class Envs:
    """The environments that this host keeps."""

    def __init__(self, name: str, host: Host, queue: JobTable, log: QueueLog, copies: int) -> None:
        self._plugin, self._host, self._queue, self._log, self._copies = name, host, queue, log, copies
        self._kept: dict[str, float] = {}
        """Digest -> when it was first seen here."""
        self.keeps_spares: Callable[[Job, HostId], bool] = lambda job, host: False
        """Whether this host asked that one to keep spares of a job."""
        self._fetching: dict[JobId, None] = {}
        """Jobs whose environment is on its way here."""

    async def load(self) -> None:
        now_s = self._host.env.clock.now_s()
        for name in await self._host.env.disk.names(f"{FOLDER}/"):
            self._kept[name.rsplit("/", 1)[1]] = now_s

    # ---- a submission ----

    async def seal(self, env: Mapping[str, str]) -> SealedEnv | None:
        """Seal an environment, durable here, and on further hosts as far as they answer. Refused when it cannot be
        written here."""
        if not env:
            return None
        key = self._host.env.entropy(KEY_BYTES)
        data = AESGCM(key).encrypt(NONCE, msgspec.msgpack.encode(dict(env)), None)
        digest = _digest(data)
        try:
            await self._write(digest, data)
        except OSError as error:
            what, why = "the job was not accepted", f"its environment cannot be written on {self._host.id}: {error}"
            raise Refused(4, what, why, "make room on that disk, or submit to another agent") from error
        others = self._others()[: self._copies]
        kept = await asyncio.gather(
            *(self._host.send(self._plugin, host, KeepEnv(digest, data), COPIES_S) for host in others)
        )
        holders = (self._host.id, *(host for host, yes in zip(others, kept, strict=True) if yes))
        return SealedEnv(digest, key, holders)

    def _others(self) -> list[HostId]:
        """Alive hosts beside this one, voters first."""
        voters = set(self._host.log.voters)
        alive = [view.host for view in self._host.hosts() if view.state == "alive" and view.host != self._host.id]
        return sorted(alive, key=lambda host: (host not in voters, host))

    async def keep(self, sender: HostId, message: KeepEnv) -> None:
        """Keep an environment for another agent; acknowledged by returning. Refused when it cannot."""
        if _digest(message.data) != message.digest:
            raise Refused(2, f"an environment sent by {sender} was not kept", "it is damaged", "submit again")
        if message.digest not in self._kept and len(self._unclaimed()) >= UNCLAIMED_MAX:
            raise Refused(
                4, f"an environment sent by {sender} was not kept", "too many environments wait for their jobs", "wait"
            )
        try:
            await self._write(message.digest, message.data)
        except OSError as error:
            raise Refused(
                4, f"an environment sent by {sender} was not kept", str(error), "make room on that disk"
            ) from error

    # ---- hosts that run it ----

    async def fetch(self, job: Job) -> dict[str, str]:
        """An environment from here, or from a host that has it; then it is kept here too. Missing when no host can be
        asked."""
        found = await self.here(job)
        if found is not None or job.env is None:
            return found or {}
        asked = self._holders(job)
        answers = await asyncio.gather(*(self._ask(host, job, job.env) for host in asked))
        for data in answers:
            opened = _open(job.env, data)
            if opened is not None:
                try:
                    await self._write(job.env.digest, data)
                except OSError as error:  # it can be had again from where it came
                    self._host.env.log.warning("an environment cannot be kept", job=job.id, why=str(error))
                return opened
        raise Missing(self._missing(asked))

    def fetch_soon(self, job: Job) -> None:
        """Fetch an environment, once at a time; whoever waits for a change looks again when it came, or could not be
        had."""
        if job.id not in self._fetching:
            self._fetching[job.id] = None
            self._host.env.spawn(f"environment of {job.id}", self._fetched(job))

    async def _fetched(self, job: Job) -> None:
        try:
            await self.fetch(job)
        except Missing as missing:
            key = f"{self._host.id}/{job.grant.epoch}/environment"
            self._host.note(job.id, "waits for its environment", str(missing), key)
            await asyncio.sleep(FETCH_RETRY_S)
        finally:
            del self._fetching[job.id]
        self._log.wake()

    async def here(self, job: Job) -> dict[str, str] | None:
        """The environment of a job; None when it is not kept here, or cannot be read."""
        if job.env is None:
            return {}
        try:
            data = await self._host.env.disk.read(f"{FOLDER}/{job.env.digest}")
        except OSError as error:
            self._host.env.log.warning("an environment cannot be read", job=job.id, why=str(error))
            return None
        return _open(job.env, data or b"")

    def _holders(self, job: Job) -> list[HostId]:
        """The hosts that may have the environment: the job's coordinator now, hosts that kept it at submission, hosts
        that ran it last."""
        known: Iterable[HostId] = [job.grant.coordinator] if job.grant.coordinator is not None else []
        assert job.env is not None
        everybody = dict.fromkeys([*known, *job.env.holders, *(place.host for place in job.start.places)])
        return [host for host in everybody if host != self._host.id]

    async def _ask(self, host: HostId, job: Job, env: SealedEnv) -> bytes:
        if not any(view.host == host and view.state in ("alive", "suspect") for view in self._host.hosts()):
            return b""
        try:
            answer = await self._host.ask(self._plugin, host, EnvOf(job.id, job.grant.epoch, env.digest), ASK_S)
        except (TimeoutError, Refused):
            return b""
        return answer.data if isinstance(answer, EnvAnswer) else b""

    def _missing(self, asked: list[HostId]) -> str:
        states = {view.host: view.state for view in self._host.hosts()}
        who = ", ".join(f"{host} ({_how(states.get(host, 'gone'))})" for host in asked) or f"{self._host.id} alone"
        return (
            f"the environment it was submitted with is kept by {who}, and none of them answers: the job starts when "
            "one of them is back, or cancel it and submit it again"
        )

    async def give(self, sender: HostId, question: EnvOf) -> EnvAnswer:
        """Give an environment to hosts of the job, and to the one that this host asked to keep spares of it, and to no
        other. Their log may be ahead of this one for a moment."""
        if not await self._log.until(lambda: self._may_have(sender, question), ASK_S / 2):
            return EnvAnswer(b"")
        try:
            return EnvAnswer(await self._host.env.disk.read(f"{FOLDER}/{question.digest}") or b"")
        except OSError as error:
            self._host.env.log.warning("an environment cannot be read", job=question.job, why=str(error))
            return EnvAnswer(b"")

    def _may_have(self, host: HostId, question: EnvOf) -> bool:
        job = self._queue.as_it_runs(question.job)
        if job is None or job.env is None or job.state not in HOLDING or job.grant.epoch != question.epoch:
            return False
        runs = job.placed and job.place_on(host) is not None
        return job.env.digest == question.digest and (
            runs or job.grant.coordinator == host or self.keeps_spares(job, host)
        )

    # ---- people ----

    def commands(self, seek: Callable[[Mapping[str, Any]], Awaitable[Job]]) -> dict[str, Command]:
        """What people ask for. `seek`: the job of a request."""

        async def env(given: Mapping[str, Any]) -> EnvView:
            return await self.shown(await seek(given))

        return {"env": env}

    async def shown(self, job: Job) -> EnvView:
        """The environment that a job was submitted with, without its secrets, from here or from a host that has it.
        Refused where nobody has it."""
        what = f"the environment of {job.id} cannot be shown"
        if job.over:
            raise Refused(3, what, "the job is over, and its environment was deleted", f"agentctl job {job.id}")
        if (mine := await self.show(ShownEnvOf(job.id))).variables is not None:
            return EnvView(job.id, mine.variables, self._host.id)
        for host in self._holders(job):
            with contextlib.suppress(TimeoutError, Refused):
                answer = await self._host.ask(self._plugin, host, ShownEnvOf(job.id), ASK_S)
                if isinstance(answer, ShownEnv) and answer.variables is not None:
                    return EnvView(job.id, answer.variables, host)
        raise Refused(75, what, "no host that keeps it answers", "try again, or see agentctl hosts")

    async def show(self, question: ShownEnvOf) -> ShownEnv:
        """What may be seen of a job's environment, if it is here: no secret leaves the host that has it."""
        job = self._queue.jobs.get(question.job)
        found = None if job is None or job.over else await self.here(job)
        if found is None:
            return ShownEnv(None)
        return ShownEnv(without_secret_values({for_people(name): for_people(found[name]) for name in found}))

    # ---- the end ----

    async def forget(self) -> None:
        """Delete what no job needs any more. Called with a current copy of the log."""
        if not self._kept:
            return
        unclaimed, now_s = self._unclaimed(), self._host.env.clock.now_s()
        over = {job.env.digest for job in self._queue.jobs.values() if job.env is not None and job.over}
        for digest in sorted(unclaimed):
            if digest in over or now_s - self._kept[digest] > UNCLAIMED_S:
                await self._delete(digest)

    def _unclaimed(self) -> set[str]:
        """Digests kept here for no job that the log knows to wait or run."""
        needed = {job.env.digest for job in self._queue.live() if job.env is not None}
        return {digest for digest in self._kept if digest not in needed}

    async def _delete(self, digest: str) -> None:
        try:
            await self._host.env.disk.delete(f"{FOLDER}/{digest}")
        except OSError as error:  # tried again at the next look
            self._host.env.log.warning("an environment cannot be deleted", why=str(error))
            return
        self._kept.pop(digest, None)

    async def _write(self, digest: str, data: bytes) -> None:
        self._kept.setdefault(digest, self._host.env.clock.now_s())
        await self._host.env.disk.replace(f"{FOLDER}/{digest}", data)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _open(env: SealedEnv, data: bytes) -> dict[str, str] | None:
    """The environment in sealed bytes; None when these are not the bytes that were sealed."""
    if _digest(data) != env.digest or len(env.key) != KEY_BYTES:
        return None
    try:
        return _decoder.decode(AESGCM(env.key).decrypt(NONCE, data, None))
    except (InvalidTag, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _how(state: str) -> str:
    return "does not answer, or no longer has it" if state in ("alive", "suspect") else state
