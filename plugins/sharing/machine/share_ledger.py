"""How much memory of one GPU each job holds: a limit grows only after another has shrunk, and the job has said so.

A job applies a limit between two mini-batches, some time after it was sent. Until it has acknowledged, it may hold the
old limit or the new one, so it is charged with the larger. The sum of these charges and the reserve never exceeds the
capacity, at no instant and whatever gets lost: that is `check`.

    want 4 GB      shrink sent        acknowledged           room for others
    8 ----------> charged 8 -------> charged 4 -----------> 4 more may be sent to others
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from covey.core.ids import JobId

ACK_S = 5.0
"""Seconds that a job may take to apply a smaller limit."""
ACK_STEPS = 3.0
"""The number of its mini-batches in which a job has to apply a smaller limit, if these take longer than `ACK_S`."""


@dataclass
class Account:
    acked_bytes: int = 0
    sent: list[tuple[int, int, float]] = field(default_factory=list)
    """Limits on their way: epoch, bytes, when; oldest first."""

    @property
    def charged_bytes(self) -> int:
        return max(self.acked_bytes, *(bytes_ for _, bytes_, _ in self.sent), 0)

    @property
    def told_bytes(self) -> int:
        """The newest limit that the job was sent, bytes."""
        return self.sent[-1][1] if self.sent else self.acked_bytes

    @property
    def shrinking_since_s(self) -> float | None:
        """When the oldest unacknowledged limit was sent that would free memory."""
        return next((at_s for _, bytes_, at_s in self.sent if bytes_ < self.charged_bytes), None)


class ShareLedger:
    """The accounts of one device's memory: `capacity_bytes`, of which `reserve_bytes` belong to no job."""

    def __init__(self, capacity_bytes: int, reserve_bytes: int) -> None:
        self.capacity_bytes, self.reserve_bytes = capacity_bytes, reserve_bytes
        self.accounts: dict[JobId, Account] = {}

    @property
    def room_bytes(self) -> int:
        """Bytes that all jobs together may hold."""
        return max(0, self.capacity_bytes - self.reserve_bytes)

    @property
    def free_bytes(self) -> int:
        return self.room_bytes - sum(account.charged_bytes for account in self.accounts.values())

    def open(self, job: JobId, held_bytes: int = 0) -> bool:
        """Open an account for a job with nothing, or (found again after a restart) with what it holds; False when that
        does not fit."""
        if held_bytes > self.free_bytes:
            return False
        self.accounts[job] = Account(held_bytes)
        return True

    def close(self, job: JobId) -> None:
        """Close a job's account: its memory is back with the device, and no job is charged any more."""
        self.accounts.pop(job, None)

    def changes(self, targets: Mapping[JobId, int]) -> dict[JobId, int]:
        """Limits to send now on the way to `targets`: every smaller one at once, larger ones as far as there is room,
        in the order of `targets`."""
        smaller = {job: want for job, want in targets.items() if want < self.accounts[job].told_bytes}
        larger: dict[JobId, int] = {}
        free = self.free_bytes
        for job, want in targets.items():
            account = self.accounts[job]
            if want <= account.told_bytes:
                continue
            most = min(want, account.charged_bytes + free)
            if most > account.told_bytes:
                larger[job] = most
                free -= max(0, most - account.charged_bytes)
        return {**smaller, **larger}

    def send(self, job: JobId, epoch: int, bytes_: int, now_s: float) -> None:
        """Note that this limit is on its way."""
        account = self.accounts[job]
        assert max(0, bytes_ - account.charged_bytes) <= self.free_bytes, f"{job} would get what is not there"
        account.sent.append((epoch, bytes_, now_s))

    def acked(self, job: JobId, epoch: int) -> bool:
        """Note that the job has applied the limit of `epoch`, and so all before it; True when that changes anything."""
        account = self.accounts.get(job)
        if account is None:
            return False
        applied = [bytes_ for sent, bytes_, _ in account.sent if sent <= epoch]
        if not applied:
            return False
        account.acked_bytes = applied[-1]
        account.sent = [entry for entry in account.sent if entry[0] > epoch]
        return True

    def forced(self, job: JobId, bytes_: int) -> None:
        """Note that the job is held to at most this many bytes from outside: by a limit of the driver, or
        suspension."""
        self.accounts[job] = Account(bytes_)

    def overdue(self, now_s: float, step_s: Mapping[JobId, float]) -> list[JobId]:
        """Jobs that have not applied a smaller limit in time; `step_s`: their mini-batch durations."""
        late = []
        for job, account in self.accounts.items():
            since_s = account.shrinking_since_s
            if since_s is not None and now_s - since_s > max(ACK_S, ACK_STEPS * step_s.get(job, 0.0)):
                late.append(job)
        return late

    def check(self) -> None:
        charged = sum(account.charged_bytes for account in self.accounts.values())
        assert charged + self.reserve_bytes <= max(self.capacity_bytes, self.reserve_bytes), (
            "more granted than there is"
        )
        for job, account in self.accounts.items():
            epochs = [epoch for epoch, _, _ in account.sent]
            assert epochs == sorted(set(epochs)), f"{job}: limits out of order"
            assert account.acked_bytes >= 0 and all(bytes_ >= 0 for _, bytes_, _ in account.sent)
