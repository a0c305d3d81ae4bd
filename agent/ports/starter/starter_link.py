"""Programs as other users: the agent's questions to the starter of its host (`agent.starter`)."""

import asyncio
import os
from pathlib import Path

import msgspec

from agent.ports.processes.processes import ProgramBase, ProgramStart
from agent.ports.processes.procfs import is_alive, user_of
from agent.ports.starter import slices
from agent.ports.starter.starter_wire import (
    PART_BYTES,
    SOCKET,
    Answer,
    AskStarter,
    EndAs,
    ForgetFolder,
    GiveConfig,
    LimitAs,
    Question,
    StartAs,
    StartedAs,
    StarterHere,
    StarterRefused,
    from_starter,
)
from agent.ports.starter.their_files import JOBS, FolderFiles
from covey.core.ids import JobId
from covey.ports.addresses import Address
from covey.ports.processes import ProcessId
from covey.ports.starter import ENFORCED, EpochLimits, MemoryPeak, ProgramAs
from covey.ports.streams import Bytes
from covey.wire.frames import pack, read_frame

ROOT = 0
ANSWER_S = 40.0
"""Seconds for an answer: longer than the starter itself waits for systemd."""
UNEXPECTED = "the starter gave an unexpected answer; next: upgrade covey-starter and the agent together"
NEXT = "systemctl enable --now covey-starter"
NOT_LIMITED = "not enforced: systemd is not the first process of this host, and it has no control groups of version 2"
LACKS = "not enforced: nothing here has control of {}"


class StarterLink:
    """The `covey.ports.starter.StartsAs` of this machine. `folder`: the starter's; `base`: says what programs that are
    started get."""

    def __init__(self, bytes: Bytes, folder: str, base: ProgramBase, groups: Path = slices.GROUPS) -> None:
        self._bytes, self._folder, self._base, self._groups = bytes, folder, base, groups
        self.uid = os.geteuid()
        self.files = FolderFiles(folder)
        self.refusal = f"no starter was asked yet; next: {NEXT}"
        self.limits = NOT_LIMITED
        self.counted: dict[str, int] = {}
        """What the starter said that it had counted."""

    def is_own(self, uid: int) -> bool:
        return uid == self.uid

    def path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def socket(self, job: JobId, name: str) -> Address:
        return f"unix:{self.path(f'{JOBS}/{job}/{name}')}"

    def owner(self, process: ProcessId) -> int | None:
        return user_of(process.pid) if is_alive(process) else None

    async def look(self) -> None:
        try:
            here = await self._ask(AskStarter())
        except OSError as error:
            self.refusal = str(error)
            return
        if not isinstance(here, StarterHere):
            self.refusal = UNEXPECTED
            return
        self.refusal, self.counted = "", here.counted
        lacks = LACKS.format(", ".join(here.lacks)) if here.lacks else ENFORCED
        self.limits = lacks if here.enforces else NOT_LIMITED

    async def start_program(self, which: ProgramAs, config: msgspec.Struct) -> ProcessId:
        own = self.path(f"{JOBS}/{which.job}")
        base = msgspec.structs.replace(
            self._base,
            program=which.program,
            instance=which.instance,
            state_dir=self._folder,
            run_dir=own,
            user=which.user.name,
        )
        given = msgspec.msgpack.encode(ProgramStart(base, msgspec.Raw(msgspec.msgpack.encode(config))))
        parts = [GiveConfig(given[at : at + PART_BYTES]) for at in range(0, len(given), PART_BYTES)]
        user, program = which.user, which.program if which.program in ("spares", "beside") else "supervisor"
        of = which.job, which.epoch, program, user.name, user.uid
        more = {"limits": which.limits, "seconds": which.seconds, "private_tmp": which.private_tmp}
        start = StartAs(*of, **more)  # type: ignore[arg-type]
        started = await self._ask(start, parts)
        if not isinstance(started, StartedAs):
            raise OSError(UNEXPECTED)
        return ProcessId(started.pid, started.started)

    async def limit(self, job: JobId, epoch: int, limits: EpochLimits) -> None:
        await self._ask(LimitAs(job, epoch, limits))

    async def memory_peak(self, job: JobId, epoch: int) -> MemoryPeak | None:
        return slices.memory_peak(job, epoch, self._groups)

    async def end(self, job: JobId, epoch: int) -> None:
        await self._ask(EndAs(job, epoch))

    async def forget(self, job: JobId) -> None:
        await self._ask(ForgetFolder(job))

    async def _ask(self, question: Question, before: "list[GiveConfig] | None" = None) -> Answer:
        """The answer. OSError says why there is none, and what to do."""
        path = self.path(SOCKET)
        try:
            stream = await self._bytes.connect(f"unix:{path}")
        except ConnectionError as error:
            raise OSError(f"no starter answers at {path}; next: {NEXT}") from error
        try:
            if stream.uid != ROOT:
                raise OSError(f"{path} is not root's but of uid {stream.uid}; next: {NEXT}")
            async with asyncio.timeout(ANSWER_S):
                for message in (*(before or ()), question):
                    await stream.write(pack(message))
                answer = await read_frame(stream, from_starter)
        except TimeoutError as error:
            raise OSError("the starter does not answer; next: journalctl -u covey-starter") from error
        except ConnectionError as error:
            raise OSError(f"the starter ended the connection ({error}); next: journalctl -u covey-starter") from error
        finally:
            stream.close()
        if isinstance(answer, StarterRefused):
            raise OSError(f"{answer.why}; next: {answer.next}")
        return answer
