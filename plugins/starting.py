"""Starting a program of Covey on a machine that has no time for it.

Thirty agents that begin together on two cores need a minute of processor for their programs. An agent that kills a
start after 10 s and begins another never finishes one, and keeps the agents beside it from finishing theirs. Therefore:

- Until the program has said that its code is loaded it may take minutes; afterwards it has little left to do.
- Time is counted in looks that were due, not on a clock: an agent that gets to look every fifth time only waits five
  times as long, and so does one that was stopped.
- Pauses between starts grow with every start that failed, whatever it took, and are drawn at random, so that hosts that
  failed together do not begin together. Only a program that lived for a while sets them back.
"""

import asyncio
import contextlib
import random

from covey.ports.processes import Process, Processes

LOOK_S = 0.05
"""Seconds between two looks whether the program listens."""
LOAD_S_MAX = 120.0
"""Seconds in which a program has to load its code: about 1 s of processor time."""
LISTEN_S_MAX = 10.0
"""Seconds from then on until it has to listen."""
STEADY_S = 30.0
"""A program that was reached and lived this many seconds did not fail to start."""
PAUSE_S, PAUSE_MAX_S = 0.5, 30.0
SIGNALS = {6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
REASON_S = 0.5
"""Seconds for which the end of a process is waited for once its connection ended."""


def ended_by(code: int) -> str:
    """How a process ended, by its exit status, for people: `was killed by signal 9 (SIGKILL)`."""
    if code >= 0:
        return f"ended with exit status {code}"
    return f"was killed by signal {-code}" + (f" ({SIGNALS[-code]})" if -code in SIGNALS else "")


async def why_ended(processes: Processes, name: str, process: Process | None) -> str:
    """What the program of that instance died of, for whoever was served by it: its own words, else how it ended. Empty:
    it may live, or it cannot be known."""
    code: int | None = None
    if process is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REASON_S):
                code = await process.wait()
    if words := processes.last_words(name):
        return f"{name} ended: {words}"
    return "" if code is None else f"{name} {ended_by(code)}; see logs/{name}.log"


class StartPatience:
    """Patience with one program that was started, or that lives and does not answer."""

    def __init__(self) -> None:
        self._looks = {False: 0, True: 0}

    def looked(self, loaded: bool) -> bool:
        """Count one more look that found it silent, and say whether it may still come."""
        self._looks[loaded] += 1
        return self._looks[loaded] * LOOK_S < (LISTEN_S_MAX if loaded else LOAD_S_MAX)


class Pauses:
    """The pauses between starts of one program."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next_s = PAUSE_S

    def after(self, lived_s: float) -> float:
        """Seconds to wait before the next start; `lived_s`: how long the program was reached, 0 when it never was."""
        if lived_s >= STEADY_S:
            self._next_s = PAUSE_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, PAUSE_MAX_S)
        return self._rng.uniform(0.5, 1.0) * pause_s
