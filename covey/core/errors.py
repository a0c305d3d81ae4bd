"""The errors of questions and changes, and of scripts, with text for people."""


class Refused(Exception):
    """An answer a person sees: one line what, one line why, one line what to do next.

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
    """The proposal may or may not be applied later. Repeat it with the same idempotency key."""


class CoveyError(RuntimeError):
    """What happened, why, and what to do next: `what`, `why` and `next`, one line each."""

    def __init__(self, what: str, why: str, next: str) -> None:
        super().__init__(f"{what}\n{why}\nnext: {next}")
        self.what, self.why, self.next = what, why, next

    def __reduce__(self) -> tuple[object, ...]:
        """For pickle: a worker's error reaches the process that gave it the work."""
        return type(self), (self.what, self.why, self.next)


EXIT_STATE_LOST = 70
"""Exit status of a rank that ends by `StateLost`: its job fails, or is tried again as after any failure."""


class StateLost(CoveyError):
    """Nobody has what a rank needs that takes over from one that was lost."""


class TensorError(RuntimeError):
    """This tensor is not added (shapes differ, no memory, shared memory was overwritten), or the client was closed."""


class RankLeft(TensorError):
    """Another rank of the job has ended, or waits for the end of all, and this one waits for what it would push."""
