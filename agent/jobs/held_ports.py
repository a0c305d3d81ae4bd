"""TCP ports kept for jobs that are being placed here, until their ranks take them over (MASTER_PORT)."""

from covey.core.ids import JobId
from covey.ports.env import Env
from covey.ports.streams import HeldPort

PORTS = range(20_000, 32_000)
"""The TCP ports among which MASTER_PORT is looked for: below Linux's ephemeral ports, so that no outgoing connection
takes it meanwhile."""


class HeldPorts:
    def __init__(self, env: Env, advertise: str) -> None:
        self._env, self._advertise = env, advertise
        self._held: dict[tuple[JobId, int], HeldPort] = {}

    def hold(self, job: JobId, epoch: int) -> int:
        """Hold one port for each job and epoch; the answer is unchanged when asked again."""
        held = self._held.get((job, epoch))
        if held is None:
            held = self._held[job, epoch] = self._hold()
        return held.port

    def _hold(self) -> HeldPort:
        ports = [*self._env.rng.sample(PORTS, 64), 0]
        for port in ports:
            try:
                return self._env.bytes.hold(self._advertise, port)
            except OSError as error:
                if port == 0:
                    raise
                self._env.log.debug("port taken", port=port, why=str(error))
        raise AssertionError("port 0 was tried")

    def release(self, job: JobId, epoch: int) -> None:
        held = self._held.pop((job, epoch), None)
        if held is not None:
            held.release()

    def release_all(self) -> None:
        for key in list(self._held):
            self.release(*key)
