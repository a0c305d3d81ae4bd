"""Ranks of one job as threads of a test, each with its client."""

import threading
from collections.abc import Callable, Sequence

from covey.job.tensors import TensorClient

Script = Callable[[int, TensorClient], None]


class PlayedRanks:
    """The clients of a job, driven by a test."""

    def __init__(self, clients: Sequence[TensorClient]) -> None:
        self.clients = clients
        self.failed: list[tuple[int, BaseException]] = []

    def play(self, script: Script, seconds: float = 30.0) -> None:
        """Run the script on all ranks to the end. Raises what the lowest rank that failed raised."""
        self.end(self.start(script), seconds)

    def start(self, script: Script) -> list[threading.Thread]:
        def run(rank: int) -> None:
            try:
                script(rank, self.clients[rank])
            except BaseException as error:
                self.failed.append((rank, error))

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.clients))]
        for thread in threads:
            thread.start()
        return threads

    def end(self, threads: Sequence[threading.Thread], seconds: float = 30.0) -> None:
        """Wait until all threads have ended; a test that waits longer fails."""
        for thread in threads:
            thread.join(seconds)
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        why = [self.clients[rank].why(name) for rank in stuck for name in self.clients[rank]._open]
        for client in self.clients:
            client.close()
        assert not stuck, f"ranks {stuck} wait for ever: {why}"
        for _, error in sorted(self.failed, key=lambda failed: failed[0]):
            raise error
