"""A training script's side of the agent's unix socket: `JobClient`, which is open as long as the script computes.

    script --step(), tensors--> newest figures, what was lost --+
                                                                | one thread: select on the socket and a wake pipe
    agent <---------------- jobs.sock --------------------------+

The agent may end at any time and come back minutes later: the thread joins again with back-off for ever, and the script
notices nothing. Frames that the agent must have are sent again then (an aggregator that is lost); of the others (steps)
the newest is kept. No method waits for the agent, except `join` for the first answer, and `extend_grace`.
"""

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from covey.core.errors import CoveyError
from covey.core.version import VERSION
from covey.healing.kernels import kernel
from covey.job.heartbeats import Heartbeats
from covey.job.memory_offer import MemoryOffer
from covey.job.page_link import PageLink, PageUser
from covey.job.rank_identity import identity
from covey.job.spare_modules import imported
from covey.job.step_clock import StepClock, ToldStep
from covey.job.stop_asked import StopAsked
from covey.job.table_owners import TableOwners
from covey.kernel import at_exit
from covey.kernel.this_process import OfOneProcess
from covey.kernel.wake_pipe import WakePipe
from covey.wire.frames import FrameError, pack, whole
from covey.wire.job import (
    GRACE_KEPT,
    PROTOCOL,
    AggregatorAt,
    ExtendGrace,
    Frame,
    GoneRank,
    Heals,
    Hooked,
    InVain,
    Join,
    Joined,
    NoTensorMemory,
    RanksHaveLeft,
    Refusal,
    Stopping,
    TensorMemoryHere,
    TensorsShared,
    decoder,
    other_protocol,
)

if TYPE_CHECKING:
    from covey.job.job_state import Get, JobState, Load
    from covey.job.tensors import TensorClient

JOIN_S = 10.0
"""How long `join` waits for an agent that is away; then the script goes on, and joins when the agent is back."""
BACKOFF_S = (0.1, 2.0)
"""First and longest pause between attempts to reach the agent."""
REFUSED_S = 5.0
"""Pause after the agent refused: it may not have read its own records yet."""
STEPS_WAITING_MAX = 64
"""Steps not yet taken by the agent; then the oldest are dropped."""
GOODBYE_S = 0.5
"""How long `close` waits for the last figures to leave."""


class JobClient(OfOneProcess):
    """One rank's connection to its agent. Made by `covey.join()`; a context manager.

    `id` names the job, `rank` is 0..`world_size`-1, `epoch` the number of the grant under which it runs, which
    is higher after each restart, and `host` the host's name. In a forked child these names and `stopping` can be read,
    `close` does nothing, and the rest raises OtherProcess.
    """

    _kind = "the steps and tensors of a rank"
    _instead = (
        "use them in the process that called covey.join(), or call covey.join() in this process if it is the rank now"
    )

    def __init__(self, environ: Mapping[str, str]) -> None:
        """CoveyError when this process is no rank of a job."""
        self._me = me = identity(environ)
        self.id, self.rank, self.world_size, self.epoch, self.host = me.job, me.rank, me.world_size, me.epoch, me.host
        self._stop = StopAsked(me.preempt_file)
        self._lock = threading.Lock()
        self._steps: deque[bytes] = deque(maxlen=STEPS_WAITING_MAX)
        self._urgent: deque[bytes] = deque()
        self._owners = TableOwners()
        self._gone: Mapping[int, GoneRank] = {}
        self._shared: TensorsShared | None = None
        self._follows = False
        """Whether the agent knows of memory for tensors."""
        self._hooked: Hooked | None = None
        self._heals: Heals | None = None  # once the script said that this rank may be lost
        self._by_hand = self._agent_heals = False
        self.given = False
        """To the script, by `join`."""
        self._pages = PageLink()
        self._memory = MemoryOffer(self.rank, self.world_size, environ)
        self._tensors: TensorClient | None = None
        self._clock = StepClock()
        self.heartbeats = Heartbeats()
        self._answered = threading.Event()
        self._refusal: Refusal | None = None
        self._joined = False
        self._closed = False
        self._connection: socket.socket | None = None
        self._wakes = WakePipe()
        self._thread = threading.Thread(target=self._run, name="covey", daemon=True)
        self._thread.start()
        at_exit.living.add(self)

    # ---- what a script uses ----

    @property
    def connected(self) -> bool:
        """Whether the agent is connected now. A script does not need it."""
        return self._joined

    def step(
        self,
        step: int | None = None,
        step_s: float | None = None,
        *,
        compute_s: float | None = None,
        communicate_s: float | None = None,
        input_s: float = 0.0,
        memory_bytes: int = 0,
        **metrics: float,
    ) -> None:
        """One mini-batch done. Never waits. `step` counts from 0 by itself. In seconds: `step_s` is the time since the
        last call, `communicate_s` the time since then inside `tensors`, `input_s` the time waited for input,
        `compute_s` the rest. `memory_bytes` is the highest use of device memory. `metrics` (loss, accuracy) are shown
        by `agentctl job`. While the agent is away only the newest step is kept. From the first call on these calls
        alone count steps, not what `covey.hooks` sees."""
        self._check_process(f"cannot report a step of job {self.id}")
        self._by_hand = True
        told = ToldStep(step, step_s, compute_s, communicate_s, input_s, memory_bytes, metrics, "script")
        self._stepped(told)

    def observed(
        self, step: int, step_s: float, input_s: float, memory_bytes: int, boundary: str, **more: float
    ) -> None:
        """A mini-batch that `covey.hooks` saw, in seconds and bytes; nothing where the script itself says its steps.
        `more`: `communicate_s` (without it: what was spent inside `tensors`), and metrics that are shown."""
        if not self._by_hand and not self.is_elsewhere:
            talked_s = more.pop("communicate_s", None)
            self._stepped(ToldStep(step, step_s, None, talked_s, input_s, memory_bytes, more, boundary))

    def alive(self) -> None:
        """The script is at work on what is no step (it evaluates, saves, compiles): progress, for `submit --hang`."""
        self._check_process(f"cannot give a sign of life of job {self.id}")
        self.heartbeats.sign()

    def hooked(self, to: str, problem: str = "") -> None:
        """Tell the agent, now and after it was away, what `covey.hooks` sees of this script, and what it cannot. Not
        in a forked child: a hook of ours never ends the script."""
        if self.is_elsewhere:
            return
        self._hooked = Hooked(to[:160], problem[:400])
        self._say(self._hooked)

    def share(self, user: PageUser) -> None:
        """From now on `user` goes by the limits that this host's agent sets, once it sends some."""
        self._pages.user = user
        self._say(user.now())

    def _stepped(self, told: ToldStep) -> None:
        with self._lock:
            if self._closed:
                return
            if not self._joined:
                self._steps.clear()
            stepped = self._clock.stepped(told, 0.0 if self._tensors is None else self._tensors.communicate_s)
            self._steps.append(pack(stepped))
        self.heartbeats.sign(stepped.step if self._by_hand else None)
        self._wakes.wake()

    @property
    def stopping(self) -> bool:
        """This job is asked to end: the script is to save its state, and exit. Check it after each mini-batch, and keep
        SIGTERM from ending the script before (`defer_stop`). Known also while the agent is away, by a file."""
        return self._stop.asked

    @property
    def grace_left_s(self) -> float:
        """Seconds until the rest of this rank is killed, by the agent's last message; infinite without one."""
        return self._stop.left_s

    def defer_stop(self) -> None:
        """From now on SIGTERM does no more than make `stopping` true, so that the step under way is finished and saved.
        Call it in the main thread."""
        self._stop.defer()

    def extend_grace(self, seconds: float, timeout_s: float = 5.0) -> float:
        """Ask, once, for `seconds` more to save: how many are left now, at most 600 more than before. The ranks of
        the job on this host share what is granted. CoveyError when the job is not stopping, has asked before, may not
        ask, or the agent does not answer."""
        self._check_process(GRACE_KEPT)
        self._stop.asks_for_more()
        self._say(ExtendGrace(float(seconds)))
        return self._stop.more(
            timeout_s, lambda: "the agent did not answer" if self._joined else "the agent is not running"
        )

    @property
    def tensors(self) -> "TensorClient":
        """Push and pull named tensors; numpy is imported at the first use."""
        from covey.job.tensors import TensorClient

        self._check_process(f"tensors of job {self.id} are not available here")
        with self._lock:
            if self._tensors is not None:
                return self._tensors
            made = self._tensors = TensorClient(
                self.id,
                self.rank,
                self.world_size,
                self._owner_lost,
                tables=self._me.tables,
                wanted=self._table_wanted,
                incarnation=self._me.incarnation,
                undecided=True,
                shared=self._tensors_shared,
                host=self._me.host,
                in_vain=lambda why: self._say(InVain(why[:800])),
            )
            made.newest_step, owners = self._clock.newest_step, self._owners.all()
            made.gone(self._gone)
        self.heartbeats.uses(made)
        for at in owners:
            made.moved(at)
        self._cannot_share(self._memory.used_by(made))
        return made

    def state(
        self,
        get: "Get",
        load: "Load",
        *,
        own: "Callable[[], object] | None" = None,
        step: int = 0,
        within_s: float = 300.0,
    ) -> "JobState":
        """From now on this rank may be lost: it is started again alone, and goes on where the others wait, to the same
        bits; `covey.job.job_state` says what the script keeps to. `get` gives the arrays that make the state, by name.
        `load` is called here, in a rank that was lost, with these and what `own` gave last: what is this rank's alone,
        such as its random generators, as JSON writes it. `step`: the first one, after a checkpoint. `within_s`: how
        long the state may be on its way, while the others wait. ValueError when there are tensors already. Where nobody
        has the state of a lost rank, this process says so and ends with 70: the job fails, or with retries left runs
        again from its last checkpoint."""
        from covey.job.job_state import begun

        self._check_process(f"the state of job {self.id} is not available here")
        why = self._memory.decline("its ranks may be lost and started again (job.state)")
        if self._follows:
            self._cannot_share(why)
        me = self._me
        with self.heartbeats.at_work():
            made = begun(self.tensors, me.here, me.incarnation, get, load, own, step, self.step, within_s, host=me.host)
        self._heals = Heals(made.step, modules=imported())
        if self._agent_heals:
            self._say(self._heals)
        return made

    def _tensors_shared(self, largest_bytes: int, total_bytes: int) -> None:
        if self.rank == 0:
            with self._lock:
                self._shared = TensorsShared(largest_bytes, total_bytes)
                if self._follows:
                    self._urgent.append(pack(self._shared))
            self._wakes.wake()

    def _cannot_share(self, why: str) -> None:
        """Tell the agent, which tells the other ranks."""
        if why:
            self._say(NoTensorMemory(why[:400]))

    def close(self) -> None:
        """Send the last figures if the agent is connected, then disconnect. Idempotent; also called at exit. Nothing in
        a forked child."""
        if self.is_elsewhere:
            return
        with self._lock:
            closed, self._closed = self._closed, True
            tensors = self._tensors
            if self._heals is not None and self._agent_heals and tensors is not None and tensors.left:
                self._urgent.append(pack(Heals(self._heals.step, over=True)))
        if closed:
            return
        self._wakes.wake()
        self._thread.join(GOODBYE_S + 0.5)
        if tensors is not None:
            tensors.close()
        self._memory.close()
        if not self._thread.is_alive():
            self._wakes.close()
        at_exit.living.discard(self)

    def __enter__(self) -> "JobClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A script that ended well waits for the others first: until all are done, another rank may still need this
        one's copy of the last sum."""
        if kind is None and self._tensors is not None and not self.is_elsewhere:
            self._tensors.leave()
        self.close()

    def wait_joined(self, timeout_s: float) -> None:
        """Until the agent answered, or `timeout_s` seconds passed. CoveyError when it refused."""
        self._check_process(f"job {self.id} was not joined")
        self._answered.wait(timeout_s)
        if self._refusal is not None and not self._joined:
            refusal = self._refusal
            self.close()
            raise CoveyError(refusal.what, refusal.why, refusal.next)

    # ---- between the script's threads and ours ----

    def _say(self, frame: Frame) -> None:
        """To the agent, as soon as it is there."""
        with self._lock:
            self._urgent.append(pack(frame))
        self._wakes.wake()

    def _owner_lost(self, epoch: int, why: str, table: int) -> None:
        with self._lock:
            said = self._owners.lost(epoch, why, table)
        if said is not None:
            self._say(said)

    def _table_wanted(self, table: int) -> None:
        with self._lock:
            said = self._owners.wanted(table)
        self._say(said)

    # ---- the thread ----

    def _run(self) -> None:
        pause_s = BACKOFF_S[0]
        while not self._closed:
            began_s = time.monotonic()
            refused = False
            try:
                with self._connect() as self._connection:
                    self._talk(self._connection)
            except _Refused:
                refused = True
            except OSError:
                pass
            self._joined = False
            self._pages.lost()
            pause_s = BACKOFF_S[0] if time.monotonic() - began_s > 5.0 else min(pause_s * 2, BACKOFF_S[1])
            self._sleep(REFUSED_S if refused else pause_s)

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(2.0)
            connection.connect(self._me.socket)
        except OSError:
            connection.close()
            raise
        connection.setblocking(False)
        return connection

    def _sleep(self, seconds: float) -> None:
        """Until the time has passed or the script closes; other wake-ups do not shorten it."""
        end_s = time.monotonic() + seconds
        while not self._closed and (left_s := end_s - time.monotonic()) > 0:
            self._wakes.wait(left_s)

    def _talk(self, connection: socket.socket) -> None:
        """Until the connection or the script ends. OSError, FrameError (one too) when the connection is of no use."""
        incoming, outgoing = bytearray(), bytearray(pack(self._hello()))
        goodbye_s = float("inf")
        while True:
            if self._joined and not outgoing:
                outgoing += self._next_out()
            if self._closed:
                goodbye_s = min(goodbye_s, time.monotonic() + GOODBYE_S)
                if not outgoing or not self._joined or time.monotonic() > goodbye_s:
                    return
            wanted = select.POLLIN | (select.POLLOUT if outgoing else 0)
            left_s = None if goodbye_s == float("inf") else max(0.0, goodbye_s - time.monotonic())
            left_s = self.heartbeats.left_s(left_s) if self._joined else left_s
            ready = self._wakes.wait(left_s, (connection.fileno(), wanted))
            if outgoing:
                with contextlib.suppress(BlockingIOError):
                    del outgoing[: connection.send(outgoing)]
            if ready.get(connection.fileno(), 0) & ~select.POLLOUT:
                received, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 8)
                self._pages.received(descriptors)
                if not received:
                    raise ConnectionResetError("the agent closed the connection")
                incoming += received
                for frame in whole(incoming, decoder):
                    self._heard(frame)

    def _hello(self) -> Join:
        """A new one each time: the kernel is known once numpy is imported."""
        own = os.getpid(), self.id, self.rank, self.epoch, self._me.token
        return Join(*own, kernel(), PROTOCOL, VERSION, self._memory.now)

    def _next_out(self) -> bytes:
        with self._lock:
            frames = [*self._urgent, *self._steps, *map(pack, self.heartbeats.due())]
            self._urgent.clear()
            self._steps.clear()
        return b"".join(frames)

    def _heard(self, frame: Frame) -> None:
        if isinstance(frame, Joined):
            self._welcome(frame)
        elif isinstance(frame, Refusal):
            self._refuse(frame)
        elif not self._joined:
            raise FrameError(f"{type(frame).__name__} before Joined")
        elif isinstance(frame, AggregatorAt):
            self._moved(frame)
        elif isinstance(frame, Stopping):
            self._stop.told(frame)
        elif isinstance(frame, TensorMemoryHere):
            self._cannot_share(self._memory.here(self._pages.take()))
        elif isinstance(frame, NoTensorMemory):
            self._memory.none(frame.why)
        elif isinstance(frame, RanksHaveLeft):
            self._ranks_gone(frame)
        elif (answer := self._pages.heard(frame)) is not None:
            self._say(answer)

    def _welcome(self, joined: Joined) -> None:
        refusal = other_protocol(f"rank {self.rank} cannot join job {self.id}", "covey-agent", joined)
        if refusal is not None:
            self._refuse(refusal)
        with self._lock:
            self.host, self._joined = joined.host, True
            self._urgent.clear()
            self._follows = joined.tensor_memory
            cannot = NoTensorMemory(self._memory.cannot[:400]) if self._memory.cannot else None
            memory = (self._shared, cannot) if self._follows else ()
            self._agent_heals, self.heartbeats.every_s = joined.heals, joined.heartbeat_s
            heals = self._heals if joined.heals else None
            again = (*self._owners.again(), self._hooked, *memory, self._pages.hello(), heals)
            self._urgent.extend(pack(frame) for frame in again if frame is not None)
        self._refusal = None
        self._memory.joined(joined.tensor_memory)
        self._answered.set()

    def _refuse(self, refusal: Refusal) -> None:
        """Before Joined: this process is not admitted. After it: the answer to our question."""
        if self._joined:
            if refusal.what == GRACE_KEPT:
                self._stop.refused(refusal)
            return
        self._refusal = refusal
        self._answered.set()
        raise _Refused(refusal.what)

    def _moved(self, at: AggregatorAt) -> None:
        with self._lock:
            if at.job != self.id or not self._owners.moved(at):
                return
            tensors = self._tensors
        if tensors is not None:
            tensors.moved(at)

    def _ranks_gone(self, frame: RanksHaveLeft) -> None:
        with self._lock:
            self._gone, tensors = frame.ranks, self._tensors
        if tensors is not None:
            tensors.gone(frame.ranks)

    def abandon(self) -> None:
        """In a forked child: this connection is the parent's, and the thread was left behind."""
        self._closed, self._joined = True, False
        self._wakes.close()
        if self._connection is not None:
            self._connection.close()


class _Refused(OSError):
    """By the agent; joining again at once would not help."""


_process: JobClient | None = None
"""The connection of `covey.hooks` in this process, which `join` hands to the script."""


def of_process() -> JobClient:
    """This process's connection, made if there is none. CoveyError when this process is no rank of a job."""
    global _process
    if _process is None or _process not in at_exit.living or _process.is_elsewhere:
        _process = JobClient(os.environ)
    return _process


def join(timeout_s: float = JOIN_S) -> JobClient:
    """This rank's job. Waits for the agent's answer at most `timeout_s` seconds; an agent that is away is joined
    later, in the background. CoveyError outside a job, or when the agent refuses this process."""
    global _process
    client = of_process()
    if client.given:
        client = _process = JobClient(os.environ)
    client.given = True
    client.wait_joined(timeout_s)
    return client
