"""The configuration that a supervisor is started with: the commands of its ranks, their files, its socket."""

import os
from collections.abc import Callable, Mapping, Sequence
from signal import Signals

from agent.jobs.limits import NVIDIA
from agent.jobs.rank_env import RankEndpoints, cores_of, environment, memory_of, set_by_covey, visible
from agent.jobs.records import StartRecord, file_of, instance_of, log_of, spares_of
from agent.jobs.spares.frames import SparesConfig
from agent.jobs.supervision import LeaveRanks, RankStart, SupervisorConfig, joining_frames
from agent.jobs.whose import JobPaths, other_user
from covey import hooks
from covey.core.ids import HostId
from covey.ports.addresses import Address
from covey.ports.devices import Devices
from covey.ports.env import Env
from covey.ports.processes import Command, Container
from covey.wire.frames import pack
from plugins.base import RankLease, RankSpec, RanksSpec
from plugins.scheduler.messages.output_names import written_out


def begins_beside_its_siblings(spec: RanksSpec) -> bool:
    """Whether these are processes of an elastic job that came while it ran: until they have its state others do their
    work, and share the cores with what they import. Not where the others wait for them."""
    return bool(spec.carried) and spec.since > 0 and not spec.awaited


def named_for(name: str, spec: RanksSpec, rank: RankSpec, host: HostId) -> str:
    """The name of a file of the user's for the output of this rank."""
    if not name:
        return ""
    array, task = (spec.job, "0") if spec.task is None else (spec.task.array, str(spec.task.index))
    known = {"j": spec.job, "i": spec.job[1:], "A": array[1:], "a": task, "r": str(rank.rank)}
    return written_out(name, {**known, "x": spec.name, "N": host, "u": spec.user or spec.env.get("USER", "")})


def container_of(
    spec: RanksSpec,
    seen: Sequence[str],
    devices: Devices,
    door: RankEndpoints,
    environment_of: Callable[[RanksSpec], Mapping[str, str]],
) -> Container | None:
    """The container of a rank; None: it runs in none. `seen`: the devices that the rank sees, of which those of another
    kind than NVIDIA's need no file. It sees the folders of what its environment names: the agent's socket, the file by
    which it is asked to end, and the hooks."""
    if not spec.image:
        return None
    others = {device.uuid for device in devices.devices() if device.backend != NVIDIA}
    gpus = tuple(gpu for gpu in seen if gpu not in others)
    shows = [os.path.dirname(path) for path in (door.socket, door.preempt_file)]
    return Container(
        image=spec.image,
        gpus=gpus,
        ours=set_by_covey(spec, environment_of),
        shows=(*shows, *([os.path.dirname(hooks.SITE)] if spec.hooks else [])),
    )


class Launching:
    """Makes supervisors' configurations. `jobs_socket`: where ranks reach this agent; `hide_gpus`: ranks without a GPU
    of their own see none, instead of all; `keep_free`: bytes of the disk that what ranks print leaves free."""

    def __init__(self, env: Env, jobs_socket: str, hide_gpus: bool, keep_free: int = 0) -> None:
        self._env, self._hide_gpus, self.keep_free = env, hide_gpus, keep_free
        self._paths = JobPaths(env, jobs_socket)

    def config(self, record: StartRecord, lease: RankLease | None) -> SupervisorConfig:
        spec = record.spec
        key = spec.job, spec.epoch
        return SupervisorConfig(
            job=spec.job,
            epoch=spec.epoch,
            ranks=self._starts(record),
            grace_s=spec.grace_s,
            stop_signal=Signals[f"SIG{spec.stop_signal}"],
            state=file_of(key, "state"),
            preempt=file_of(key, "preempt"),
            socket=self.socket(spec),
            lease=lease,
            joined=record.joined,
            spares=self.spares_socket(spec),
            changed=record.changed,
            agent_uid=self._paths.agent_uid(spec),
        )

    def _starts(self, record: StartRecord) -> tuple[RankStart, ...]:
        return tuple(RankStart(rank.rank, self.command(record, rank)) for rank in record.spec.ranks)

    def changes(self, record: StartRecord) -> list[bytes]:
        """The frames that tell a supervisor which ranks joined others here, and which left. Those that join come first:
        a supervisor without ranks ends."""
        if record.changed:
            leave = LeaveRanks(record.changed, record.left)
            return [*joining_frames(self._starts(record), replaces=True), pack(leave)]
        joined = [start for start in self._starts(record) if start.rank in record.joined]
        return joining_frames(joined) if joined else []

    def command(self, record: StartRecord, rank: RankSpec) -> Command:
        """The command that starts one rank."""
        spec, devices = record.spec, self._env.probes.devices
        cores = cores_of(rank, devices) if rank.gpus else ()
        memory = memory_of(rank, devices)
        door = RankEndpoints(
            host=self._env.host,
            token=record.token,
            socket=self._paths.jobs_socket(spec),
            preempt_file=self._paths.path(spec, file_of((spec.job, spec.epoch), "preempt")),
        )

        def environment_of(given: RanksSpec) -> dict[str, str]:
            return environment(given, rank, door, self._hide_gpus, len(cores), memory)

        return Command(
            argv=spec.argv,
            cwd=spec.cwd,
            env=environment_of(spec),
            output=self._paths.path(spec, log_of(spec.job, rank.rank)),
            stdout=named_for(spec.stdout, spec, rank, self._env.host),
            stderr=named_for(spec.stderr, spec, rank, self._env.host),
            run=self._paths.path(spec, file_of((spec.job, spec.epoch), f"rank{rank.rank}")),
            output_bytes_max=record.output_bytes_max,
            output_keep_free=self.keep_free,
            cores=cores,
            held_back=other_user(self._env, spec) is None
            and not spec.image  # what podman starts is not the rank's child, and would not be let go with it
            and (spec.held_back or begins_beside_its_siblings(spec)),
            container=container_of(spec, visible(spec, rank), devices, door, environment_of),
        )

    def socket(self, spec: RanksSpec) -> Address:
        """The supervisor's socket."""
        return self._paths.socket(spec, instance_of((spec.job, spec.epoch)))

    def spares_socket(self, spec: RanksSpec) -> Address:
        """The socket of the keeper of the spares."""
        return self._paths.socket(spec, spares_of((spec.job, spec.epoch)))

    def spares_config(self, record: StartRecord, modules: tuple[str, ...]) -> SparesConfig:
        """The configuration of what waits for ranks of this epoch; `record`: the record of any of them."""
        spec = record.spec
        return SparesConfig(
            job=spec.job,
            epoch=spec.epoch,
            command=self.command(record, spec.ranks[0]),
            modules=modules,
            socket=self.spares_socket(spec),
            agent_uid=self._paths.agent_uid(spec),
        )
