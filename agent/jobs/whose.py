"""Whose a job is on this host, and where what its supervisor and its ranks write is.

The agent's own jobs write into its state directory. Another user's write into a folder of that user, which the starter
makes (`agent.starter`), under the same names; their records (`EPOCH.start`) and what the agent itself writes of their
end stay in the state directory, where nobody else comes.
"""

import msgspec

from agent.jobs.limits import limits_here, seconds_of
from agent.jobs.records import instance_of, spares_of
from agent.jobs.supervision import SupervisorState
from covey.ports.addresses import Address
from covey.ports.env import Env
from covey.ports.processes import ProcessId
from covey.ports.starter import OtherUser, ProgramAs
from covey.ports.streams import ByteStream
from plugins.base import RanksSpec

RANKS_SOCKET = "ranks.sock"
"""The socket in `run_dir` where ranks of other users reach the agent; nobody else does there."""
CODES = range(-64, 256)
REASON_MAX = 1000
"""Most characters of a reason that another user's supervisor gives."""
PACE_S = 0.02
"""Least seconds between two states that are heard from another user's supervisor."""


def is_own(env: Env, uid: int | None) -> bool:
    """Whether a job of this owner runs as the agent's own user. `uid`: the owner's; None: it has none."""
    return uid is None or env.starter.is_own(uid)


def other_user(env: Env, spec: RanksSpec) -> OtherUser | None:
    """The user as whom the ranks run; None: as the agent's own."""
    return None if spec.uid is None or is_own(env, spec.uid) else OtherUser(spec.user, spec.uid)


class JobPaths:
    """Where files and sockets of jobs are."""

    def __init__(self, env: Env, jobs_socket: str) -> None:
        self._env, self._jobs_socket = env, jobs_socket

    def path(self, spec: RanksSpec, name: str) -> str:
        """The absolute path of a file that the job writes."""
        return self._env.disk.path(name) if other_user(self._env, spec) is None else self._env.starter.path(name)

    def socket(self, spec: RanksSpec, instance: str) -> Address:
        """The socket of one of the job's programs."""
        if other_user(self._env, spec) is None:
            return f"unix:{self._env.run_dir}/{instance}.sock"
        key = spec.job, spec.epoch
        names = {instance_of(key): f"sup-{spec.epoch}", spares_of(key): f"spares-{spec.epoch}"}
        return self._env.starter.socket(spec.job, f"{names.get(instance, instance)}.sock")

    def jobs_socket(self, spec: RanksSpec) -> str:
        """The path of the socket where ranks reach the agent."""
        if other_user(self._env, spec) is None:
            return self._jobs_socket
        return f"{self._env.run_dir}/{RANKS_SOCKET}"

    def agent_uid(self, spec: RanksSpec) -> int:
        """Who may ask the job's programs; -1: they run as the same user."""
        return -1 if other_user(self._env, spec) is None else self._env.starter.uid


def _is_podmans(image: str) -> bool:
    """Whether podman runs this image: it has a /tmp of its own then, and podman's sockets are in the host's."""
    return bool(image) and not image.startswith("/") and not image.endswith(".sif")


async def start_program(env: Env, spec: RanksSpec, program: str, instance: str, config: msgspec.Struct) -> ProcessId:
    """Start a program of the job. OSError says why it cannot be started."""
    user = other_user(env, spec)
    if user is None:
        return (await env.processes.start_program(program, instance, config)).id
    limits = limits_here(env, spec)
    if program == "spares" and limits.gpus is not None:  # the GPUs of their spec may be another job's
        limits = msgspec.structs.replace(limits, gpus=(), caps=())
    of = spec.job, spec.epoch
    which = ProgramAs(
        user=user,
        job=of[0],
        epoch=of[1],
        program=program,
        instance=instance,
        limits=limits,
        seconds=seconds_of(spec),
        private_tmp=spec.private_tmp and not _is_podmans(spec.image),
    )
    return await env.starter.start_program(which, config)


async def limit_again(env: Env, spec: RanksSpec) -> None:
    """Let limits follow a change of the ranks that are here. OSError says why they cannot."""
    if other_user(env, spec) is not None:
        await env.starter.limit(spec.job, spec.epoch, limits_here(env, spec))


async def stored(env: Env, spec: RanksSpec, name: str) -> bytes | None:
    """The state file of the job's supervisor, or what the agent wrote in its place. OSError."""
    found, user = await env.disk.read(name), other_user(env, spec)
    return found if found is not None or user is None else await env.starter.files.read(name, user.uid)


def believed(env: Env, spec: RanksSpec, state: SupervisorState) -> SupervisorState:
    """What may be believed of a state that the job's supervisor told. Of one that runs as another user: those
    processes that are that user's, or gone, and the exit codes of ranks that are here; never that this host failed
    it."""
    user = other_user(env, spec)
    if user is None:
        return state

    def is_theirs(process: ProcessId) -> bool:
        return env.starter.owner(process) in (None, user.uid)

    here = {rank.rank for rank in spec.ranks}
    return msgspec.structs.replace(
        state,
        pids={rank: process for rank, process in state.pids.items() if is_theirs(process)},
        codes={rank: code for rank, code in state.codes.items() if rank in here and code in CODES},
        leaving=tuple(process for process in state.leaving if is_theirs(process)),
        reason=_plain(state.reason),
        unstarted="job" if state.unstarted else "",
    )


def is_theirs(env: Env, spec: RanksSpec, stream: ByteStream) -> bool:
    """Whether the program at the other end of a connection to the job's socket runs as the job's user: the socket is in
    a folder of that user, who may have put anything there."""
    user = other_user(env, spec)
    if user is None or stream.uid == user.uid:
        return True
    env.log.warning("a job's socket is not its user's", job=spec.job, epoch=spec.epoch, uid=stream.uid)
    return False


def _plain(text: str) -> str:
    return "".join(filter(str.isprintable, text[:REASON_MAX]))
