"""The errors that questions, changes and scripts raise, with text for people."""


class Refused(Exception):
    """A refusal that a person sees: one line what, one line why, one line what to do next.

    `code` is agentctl's exit code: 1 error, 2 usage, 3 not found, 4 refused, 6 deadline passed, 7 can never be placed,
    75 no leader, try again.
    """

    def __init__(self, code: int, what: str, why: str, next: str) -> None:
        super().__init__(f"{what}: {why}")
        self.code, self.what, self.why, self.next = code, what, why, next

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.code, self.what, self.why, self.next)


class NoLeader(Exception):
    """There is no leader now, or it could not be reached: nothing was proposed. Try again."""


class OutcomeUnknown(Exception):
    """It is not known whether the proposal will be applied. Repeat it with the same idempotency key."""


class CoveyError(RuntimeError):
    """An error for people: `what` happened, `why`, and what to do `next`, one line each."""

    def __init__(self, what: str, why: str, next: str) -> None:
        super().__init__(f"{what}\n{why}\nnext: {next}")
        self.what, self.why, self.next = what, why, next

    def __reduce__(self) -> tuple[object, ...]:
        """The arguments for pickle, so that a worker's error reaches the process that gave it the work."""
        return type(self), (self.what, self.why, self.next)


EXIT_AGAIN = 75
"""Exit status of a rank that was asked to end and has saved: its job is to be started again."""
EXIT_STATE_LOST = 70
"""Exit status of a rank that ends with `StateLost`: its job fails, or is tried again as after any failure."""


class StateLost(CoveyError):
    """No process has the state that a rank needs to take over from a lost one."""


class OthersDone(StateLost):
    """Other ranks have ended with 0 before this one could take over."""


class TensorError(RuntimeError):
    """The tensor cannot be added (shapes differ, no memory, shared memory overwritten), or the client was closed."""


class RankLeft(TensorError):
    """Another rank ended, or waits in `job.tensors.leave()`, and this rank waits for something it would push."""
