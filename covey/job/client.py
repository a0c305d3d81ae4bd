"""A training script's side of the agent's unix socket: `JobClient`, which is open as long as the script computes.

    script --step(), tensors--> newest figures, what was lost --+
                                                                | one thread: select on the socket and a wake pipe
    agent <---------------- jobs.sock --------------------------+

The agent may end at any time and come back minutes later: the thread tries to join again for ever, with back-off, and
the script notices nothing. Frames that the agent must have (an aggregator that is lost) are sent again then; of steps
only the newest is kept. No method waits for the agent, except `join` for the first answer, and `extend_grace`.
"""

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.core.errors import CoveyError
from covey.core.version import VERSION
from covey.healing.kernels import kernel
from covey.job.blocks.memory_use import MemoryUse
from covey.job.heartbeats import Heartbeats
from covey.job.memory_offer import MemoryOffer
from covey.job.page_link import PageLink, PageUser
from covey.job.rank_identity import RefusedByAgent, identity
from covey.job.step_clock import StepClock, ToldStep, of_state
from covey.job.stop_asked import StopAsked
from covey.job.table_owners import TableOwners
from covey.kernel import at_exit
from covey.kernel.spare_modules import imported
from covey.kernel.this_process import OfOneProcess
from covey.kernel.wake_pipe import WakePipe
from covey.saves.asked_save import AskedSave
from covey.tensors.turns.holder import ProcessTurns
from covey.wire.frames import FrameError, pack, whole
from covey.wire.job import (
    GRACE_KEPT,
    PROTOCOL,
    AggregatorAt,
    AskSave,
    Carries,
    ExtendGrace,
    Frame,
    GoneRank,
    Heals,
    Hooked,
    InVain,
    Join,
    Joined,
    NoTensorMemory,
    ProcessLeaves,
    RanksHaveLeft,
    Refusal,
    Stopping,
    SumsNow,
    SumsOrder,
    TensorMemoryHere,
    TensorsShared,
    TurnsHere,
    decoder,
    other_protocol,
)
from covey.wire.sums import NOTHING, Now

if TYPE_CHECKING:
    from covey.healing.healing import Healing
    from covey.healing.neighbours import HealedRank
    from covey.job.blocks.data_blocks import DataBlocks
    from covey.job.blocks.data_blocks import Load as LoadBlock
    from covey.job.blocks.exchange import Exchange
    from covey.job.carrying import CarriedRank, CarriedRanks, Enter
    from covey.job.elastic_table import ElasticTable
    from covey.job.job_state import Get, JobState, Load, Place, ScriptState, StopsAndSaves
    from covey.job.tensors import TensorClient

BACKOFF_S = (0.1, 2.0)
"""Shortest and longest pause between attempts to reach the agent, in seconds."""
REFUSED_S = 5.0
"""Seconds to wait after the agent refused: it may not have read its own records yet."""
STEPS_WAITING_MAX = 64
"""Most steps that wait for the agent; further ones push out the oldest."""
GOODBYE_S = 0.5
"""Seconds that `close` waits for the last figures to be sent."""


class JobClient(OfOneProcess):
    """One rank's connection to its agent. Made by `covey.join()`; a context manager.

    `id` names the job, `rank` is 0..`world_size`-1, `epoch` is the number of the grant under which the job runs (higher
    after each restart), and `host` is the host's name. In a forked child these names and `stopping` can be read,
    `close` does nothing, and the rest raises OtherProcess.
    """

    _kind = "the steps and tensors of a rank"
    _instead = (
        "use them in the process that called covey.join(), or call covey.join() in this process if it is the rank now"
    )

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Connect in the background. CoveyError when this process is not a rank of a job."""
        self._me = me = identity(environ)
        self.id, self.rank, self.world_size, self.epoch, self.host = me.job, me.rank, me.world_size, me.epoch, me.host
        self._stop, self._asked = StopAsked(me.preempt_file), AskedSave()
        self._lock = threading.Lock()
        self._steps: deque[bytes] = deque(maxlen=STEPS_WAITING_MAX)
        self._urgent: deque[bytes] = deque()
        self._owners = TableOwners()
        self._gone: Mapping[int, GoneRank] = {}
        self._shared: TensorsShared | None = None
        self._follows = False
        """Whether the agent knows of memory for tensors, by its `Joined`."""
        self._hooked: Hooked | None = None
        self._heals: Heals | None = None  # once the script said that this rank may be lost
        self._by_hand = self._agent_heals = False
        self._hears_who_leaves = False
        """Whether the agent handles `ProcessLeaves`, by its `Joined`."""
        self._failed = False
        """Whether an error ended the script's `with`."""
        self.given = False
        """Whether `join` gave this client to the script."""
        self._pages = PageLink()
        self._memory = MemoryOffer(self.rank, self.world_size, environ)
        self._tensors: TensorClient | None = None
        self._carries: Carries | None = None
        self._carried: CarriedRanks | None = None
        self._blocks: Exchange | None = None
        self._others: list[TensorClient] = []
        """The clients of the ranks that this process carries beside its first."""
        self._clock = StepClock()
        self.heartbeats = Heartbeats()
        self.memory = MemoryUse(me.host_memory, me.processes)
        self.turns = turns = ProcessTurns()
        self.heartbeats.waits_for_turn = lambda: turns.waits  # without this client, which would outlive its `close`
        self._answered = threading.Event()
        self._refusal: Refusal | None = None
        self._joined = self._closed = False
        self._connection: socket.socket | None = None
        self._wakes = WakePipe()
        self._thread = threading.Thread(target=self._run, name="covey", daemon=True)
        self._thread.start()
        at_exit.living.add(self)

    # ---- what a script uses ----

    @property
    def connected(self) -> bool:
        """Whether the agent is connected now. A script does not need to know."""
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
        """Report that one mini-batch is done. Never waits. `step` counts from 0 by itself. Times are in seconds:
        `step_s` since the last call, `communicate_s` of that inside `tensors`, `input_s` of that waiting for input,
        `compute_s` the rest. `memory_bytes` is the highest use of device memory. `metrics` (loss, accuracy) are shown
        by `agentctl job`. While the agent is away only the newest step is kept. From the first call on these calls
        alone count steps, not what `covey.hooks` sees; after `state`, they add to the step under way."""
        self._check_process(f"cannot report a step of job {self.id}")
        self._by_hand = True
        told = ToldStep(step, step_s, compute_s, communicate_s, input_s, memory_bytes, metrics, "script")
        self._stepped(told, ends=not self._clock.by_state)

    def observed(
        self, step: int, step_s: float, input_s: float, memory_bytes: int, boundary: str, **more: float
    ) -> None:
        """Report a mini-batch that `covey.hooks` saw, in seconds and bytes; when the script itself reports its steps,
        of those only what it does not say is taken from here. `more`: `communicate_s` (default: the time spent inside
        `tensors`), and metrics that are shown."""
        if not self.is_elsewhere:
            talked_s = more.pop("communicate_s", None)
            told = ToldStep(step, step_s, None, talked_s, input_s, memory_bytes, more, boundary)
            (self._clock.sees if self._by_hand else self._stepped)(told)

    def alive(self) -> None:
        """Report progress that is not a step (the script evaluates, saves, compiles), for `submit --hang`."""
        self._check_process(f"cannot give a sign of life of job {self.id}")
        self.heartbeats.sign()

    def hooked(self, to: str, problem: str = "") -> None:
        """Tell the agent, now and whenever it was away, what `covey.hooks` sees of this script, and what it cannot see.
        Does nothing in a forked child: a hook of Covey never ends the script."""
        if self.is_elsewhere:
            return
        self._hooked = Hooked(to[:160], problem[:400])
        self._say(self._hooked)

    def share(self, user: PageUser) -> None:
        """From now on `user` obeys the limits that this host's agent sets, once the agent sends some."""
        self._pages.user = user
        self._say(user.now())

    def _stepped(self, told: ToldStep, ends: bool = True) -> None:
        with self._lock:
            if self._closed or not ends:
                self._clock.add(told)
                return
            if not self._joined:
                self._steps.clear()
            talked_s = 0.0 if self._tensors is None else self._tensors.communicate_s
            stepped = self._clock.stepped(told, talked_s, self.turns.spent())
            self._steps.append(pack(stepped))
        self.heartbeats.sign(stepped.step if self._by_hand else None)
        self._wakes.wake()

    @property
    def stopping(self) -> bool:
        """Whether this job is asked to end: the script should save its state and exit. Check it after each mini-batch,
        and keep SIGTERM from ending the script before (`defer_stop`). A file tells it while the agent is away."""
        return self._stop.asked

    @property
    def grace_left_s(self) -> float:
        """Seconds until what is left of this rank is killed, by the agent's last message; infinite without one."""
        return self._stop.left_s

    def defer_stop(self) -> None:
        """From now on SIGTERM only makes `stopping` true, so that the step under way is finished and saved. Call it in
        the main thread."""
        self._stop.defer()

    def saved(self, step: int, path: Path) -> None:
        """Tell the agent of a complete checkpoint from which `step` is the next one: `agentctl job` shows it."""
        self._say(self._stop.wrote(step, path))

    def extend_grace(self, seconds: float, timeout_s: float = 5.0) -> float:
        """Ask, once, for `seconds` more to save. Returns the seconds that are left now: at most 600 more than before.
        The ranks of the job on this host share what is granted. CoveyError when the job is not stopping, has asked
        before or may not ask, or when the agent does not answer."""
        self._check_process(GRACE_KEPT)
        self._stop.asks_for_more()
        self._say(ExtendGrace(float(seconds)))
        return self._stop.more(
            timeout_s, lambda: "the agent did not answer" if self._joined else "the agent is not running"
        )

    @property
    def tensors(self) -> "TensorClient":
        """The client that pushes and pulls named tensors; numpy is imported at the first use. CoveyError in an elastic
        job, where each rank pushes for itself (`carried`)."""
        if self._me.elastic:
            what, why = f"job {self.id} pushes no tensors in this way", "this process may carry several ranks"
            raise CoveyError(what, why, "push for each: for rank in job.carried(step): with rank: rank.push(..)")
        return self._client()

    def _client(self) -> "TensorClient":
        """The tensors of this process's first rank."""
        self._check_process(f"tensors of job {self.id} are not available here")
        with self._lock:
            if self._tensors is not None:
                return self._tensors
            made = self._tensors = self._made(
                self.rank, self._me.incarnation, undecided=True, shared=self._tensors_shared
            )
            owners = self._owners.all()
            made.gone(self._gone)
        self.heartbeats.uses(made)
        for at in owners:
            made.moved(at)
        self._cannot_share(self._memory.used_by(made))
        return made

    def _carried_client(self, rank: int, incarnation: int) -> "TensorClient":
        """The tensors of another rank that this process carries."""
        made = self._made(rank, incarnation, beside=self._client())
        with self._lock:
            owners, gone = self._owners.all(), self._gone
            self._others = [each for each in self._others if not each.is_closed] + [made]
        made.gone(gone)
        for at in owners:
            made.moved(at)
        return made

    def _made(self, rank: int, incarnation: int, **more: Any) -> "TensorClient":
        from covey.job.tensors import TensorClient

        made = TensorClient(
            self.id,
            rank,
            self.world_size,
            self._owner_lost,
            tables=self._me.tables,
            wanted=self._table_wanted,
            incarnation=incarnation,
            host=self._me.host,
            in_vain=lambda why: self._say(InVain(why[:800])),
            turns=self.turns,
            **more,
        )
        made.newest_step = self._clock.newest_step
        made.saves.start, made.saves.asked, made.saves.saved = self.epoch, self._asked, self.saved
        return made

    def state(
        self,
        get: "Get",
        load: "Load",
        *,
        own: "Callable[[], object] | None" = None,
        enter: "Enter | None" = None,
        step: int = 0,
        within_s: float = 300.0,
        checkpoint: "Place | bool" = False,
        stop: "StopsAndSaves | None" = None,
    ) -> "JobState":
        """From now on this rank may be lost: it is started again alone and continues where the others wait, with the
        same bits; `covey.job.job_state` says what the script must do for that. `get` returns the arrays of the state,
        by name. `own` returns what only this rank has, such as its random generators, as values that JSON can write. In
        a rank that was lost, `load` is called here with the arrays and what `own` returned last. `step`: the first
        step, after a checkpoint. `within_s`: how many seconds the state may take to arrive, while the others wait.
        `enter`: the script loops over `carried`, and this makes what it computes that of one rank; `load` is then given
        None in place of what is a rank's own. `checkpoint`: a file, or True for the one in the job's folder
        (COVEY_CHECKPOINT_DIR). If it is there, `load` is called here with what is in it, and the first step is the one
        that was next. When the job is asked to end, all ranks end after the same step and save there first. CoveyError
        when it cannot be used. `stop`: what a framework adds. ValueError when there are tensors already. When no rank
        has the state of a lost rank, this process says so and ends with 70: the job fails, or with retries left runs
        again from its last checkpoint."""
        from covey.healing.neighbours import HealedRank
        from covey.job.job_state import ScriptState, begun, saves_when_asked, stops_of

        self._check_process(f"the state of job {self.id} is not available here")
        if self._me.elastic and enter is None:
            what = f"the state of job {self.id} was not registered"
            why = "one process may carry several of its ranks (submit --workers A..B)"
            raise CoveyError(what, why, "give job.state(.., enter=), and loop over job.carried(step); or --workers N")
        self.shares_no_memory()
        me = self._me
        with self.heartbeats.at_work():
            rank = HealedRank(self.rank, self.world_size, me.incarnation, me.here, me.host, step)
            script = ScriptState(self.memory.counts(get), load, own, lambda step: self._stepped(of_state(step)))
            stop = stops_of(self._stop, checkpoint, stop, leave=self.leave, saved=self.saved, extends=self.extend_grace)
            stop = saves_when_asked(stop, self._asked)
            if enter is None:
                state = begun(self._client(), rank, script, within_s, stop=stop)
            else:
                state = self._begun(rank, script, enter, within_s, stop)
        self._by_hand = self._clock.by_state = True
        self.heals(self._heals or Heals(state.step, modules=imported()))
        return state

    def shares_no_memory(self) -> None:
        """From now on tensors go through aggregators: ranks may be lost."""
        why = self._memory.decline("its ranks may be lost and started again (job.state)")
        self._cannot_share(why if self._follows else "")

    def heals(self, said: Heals = Heals(0, over=True)) -> None:
        """Tell the agent whether a lost rank is replaced; without arguments: no more, the job begins again then."""
        self._heals = said
        if self._agent_heals:
            self._say(said)

    def _begun(
        self, me: "HealedRank", script: "ScriptState", enter: "Enter", within_s: float, stop: "StopsAndSaves"
    ) -> "JobState":
        """The state of a script that loops over `carried`."""
        from covey.healing.likeness import likeness
        from covey.job.carrying import RANKS_MAX, CarriedMember, CarriedRanks, CarriedScript, check_ranks
        from covey.job.job_state import begun

        check_ranks(me.world_size)
        first = self._client()

        def carry(healing: "Healing") -> CarriedRanks:
            carried = CarriedRanks(
                CarriedMember(first, healing), CarriedScript(script.own, enter), self._carried_client, me, likeness()
            )
            with self._lock:
                self._carried, carried.blocks = carried, self._blocks
                told = self._carries if self._me.elastic else Carries(0, {self.rank: (self.rank,)})
            if told is not None:
                carried.told(told)
            return carried

        return begun(first, me, script, within_s, RANKS_MAX, carry, self._me.elastic and self.rank > 0, stop)

    def carried(self, step: int) -> "Iterator[CarriedRank]":
        """The ranks that this process carries in this step, which is the one that `JobState.steps` gave: each is
        entered (`with rank:`) and pushes for itself (`covey.job.carrying`). A process that carries one rank only loops
        once. CoveyError before `state(.., enter=)`, or for another step."""
        from covey.job.carrying import ranks_in

        self._check_process(f"the ranks of job {self.id} are not carried here")
        return ranks_in(self._carried, step)

    def data(
        self,
        blocks: int,
        load: "LoadBlock | None" = None,
        bytes: int | str = "64 MiB",
        *,
        name: str = "data",
        spill: str | None = None,
        resident: int | str | None = None,
    ) -> "DataBlocks":
        """Input data in Blocks, of which each process holds those of the ranks that it carries
        (`covey.job.blocks.data_blocks`). `load(k)` returns what is in Block k, the same wherever it is called: an
        array, or a dict of arrays, of at most `bytes` together. For scripts that loop over `carried`; call it before
        `state`, so that Blocks come while the state does. `spill`: "disk" or "remote", for those that are more than
        `resident` bytes (`covey.job.blocks.spilling_store`). CoveyError when this cannot be."""
        from covey.job.blocks.data_blocks import KeptHere, added, declared_blocks, store_of
        from covey.job.blocks.exchange import Exchange, ExchangingProcess

        self._check_process(f"data {name!r} of job {self.id} is not available here")
        declared, client, of = declared_blocks(name, blocks, load, bytes), self._client(), (self.id, self.rank)
        me = ExchangingProcess(*of, self._me.incarnation, self.world_size, lambda: client.far.owner(0), client.tell)
        if self._blocks is None:
            self._blocks = Exchange(me, lambda: client.far)
            client.about_blocks = self._blocks.told
            with self._lock:
                carried, told = self._carried, self._carries
            if carried is not None:  # else state() tells it
                carried.exchanges(self._blocks, told if self._me.elastic else None)
        assert load is not None, "declared_blocks has refused that"
        entered = lambda: None if self._carried is None else self._carried.entered  # noqa: E731
        store = lambda: store_of(declared, KeptHere(spill, resident, self.memory, self._carries), me)  # noqa: E731
        return added(self._blocks, declared, load, self.world_size, entered, store)

    def table(self) -> "ElasticTable":
        """Values by key that ranks `put`, `get` and `update` in rounds (`covey.job.elastic_table`), for scripts that
        loop over `carried`."""
        from covey.job.elastic_table import ElasticTable

        return ElasticTable(lambda: self._carried)

    def _tensors_shared(self, largest_bytes: int, total_bytes: int) -> None:
        if self.rank == 0:
            with self._lock:
                self._shared = TensorsShared(largest_bytes, total_bytes)
                if self._follows:
                    self._urgent.append(pack(self._shared))
            self._wakes.wake()

    def _cannot_share(self, why: str) -> None:
        """Tell the agent why this rank cannot share memory; the agent tells the other ranks."""
        if why:
            self._say(NoTensorMemory(why[:400]))

    def close(self) -> None:
        """Send the last figures if the agent is connected, then disconnect. Idempotent; also called at exit. Does
        nothing in a forked child."""
        if self.is_elsewhere:
            return
        self._clock.tell_left(self._stepped)
        with self._lock:
            closed, self._closed = self._closed, True
            tensors = self._tensors
            if self._heals is not None and self._agent_heals and tensors is not None and tensors.left:
                self._urgent.append(pack(Heals(self._heals.step, over=True)))
            failed = self._failed or at_exit.failed() or self._me.elastic
            if self._hears_who_leaves and not (closed or failed) and tensors is not None and tensors.may_be_awaited:
                self._urgent.append(pack(ProcessLeaves()))
        if closed:
            return
        self.turns.close()
        for part in (self._carried, self._blocks):
            if part is not None:
                part.close()
        if tensors is not None and tensors.close():
            self._say(SumsNow(NOTHING, over=True))
        self._wakes.wake()
        self._thread.join(GOODBYE_S + 0.5)
        self._memory.close()
        if not self._thread.is_alive():
            self._wakes.close()
        at_exit.living.discard(self)

    def __enter__(self) -> "JobClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A script that ended well waits for the others first: another rank may need this rank's copy of the last sum
        until all are done."""
        self._failed = kind is not None
        if kind is None and not self.is_elsewhere:
            self.leave()
        self.close()

    def leave(self) -> None:
        """Wait, at the end of a script that ended well, until every rank has ended well or 60 s have passed: another
        rank may need this rank's copy of the last sum. `with covey.join()` does this at its end; a second call is
        harmless."""
        self._check_process(f"job {self.id} was not left")
        if self._tensors is not None and not self._tensors.left and not self._closed:
            (self._tensors if self._carried is None else self._carried).leave()

    def tell(self, text: str) -> None:
        """Write one line about this rank to stderr, for people."""
        self._client().tell(text)

    def wait_joined(self, timeout_s: float) -> None:
        """Wait until the agent answered, or `timeout_s` seconds passed. CoveyError when the agent refused."""
        self._check_process(f"job {self.id} was not joined")
        self._answered.wait(timeout_s)
        if (refusal := self._refusal) is not None and not self._joined:
            self.close()
            raise CoveyError(refusal.what, refusal.why, refusal.next)

    # ---- between the script's threads and this client's thread ----

    def _say(self, frame: Frame) -> None:
        """Send a frame to the agent, as soon as it is connected."""
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
        pause_s, tried = BACKOFF_S[0], False
        while not self._closed or (self._steps and not tried):
            began_s, tried, refused = time.monotonic(), True, False
            try:
                with self._me.connected() as self._connection:
                    self._talk(self._connection)
            except RefusedByAgent:
                refused = True
            except OSError:
                pass
            self._joined = False
            self._pages.lost()
            pause_s = BACKOFF_S[0] if time.monotonic() - began_s > 5.0 else min(pause_s * 2, BACKOFF_S[1])
            self._sleep(REFUSED_S if refused else pause_s)

    def _sleep(self, seconds: float) -> None:
        """Wait for so many seconds or until the script closes the client; other wake-ups do not shorten it."""
        end_s = time.monotonic() + seconds
        while not self._closed and (left_s := end_s - time.monotonic()) > 0:
            self._wakes.wait(left_s)

    def _talk(self, connection: socket.socket) -> None:
        """Exchange frames until the connection or the script ends. OSError (a FrameError is one) for a bad
        connection."""
        incoming, outgoing = bytearray(), bytearray(pack(self._hello()))
        goodbye_s = float("inf")
        while True:
            if self._joined and not outgoing:
                outgoing += self._next_out()
            if self._closed:
                goodbye_s = min(goodbye_s, time.monotonic() + GOODBYE_S)
                if not (outgoing if self._joined else self._steps) or time.monotonic() > goodbye_s:
                    return
            wanted = select.POLLIN | (select.POLLOUT if outgoing else 0)
            left_s = None if goodbye_s == float("inf") else max(0.0, goodbye_s - time.monotonic())
            left_s = self.memory.left_s(self.heartbeats.left_s(left_s)) if self._joined else left_s
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
        """The Join for a new connection, made anew each time: the kernel is known once numpy is imported."""
        me = self._me
        mine = me.job, me.rank, me.epoch, me.token
        return Join(os.getpid(), *mine, kernel(), PROTOCOL, VERSION, self._memory.now, saves=True)

    def _next_out(self) -> bytes:
        with self._lock:
            frames = [*self._urgent, *self._steps, *map(pack, self.heartbeats.due()), *map(pack, self.memory.due())]
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
        elif isinstance(frame, Carries):
            self._carry(frame)
        elif isinstance(frame, TurnsHere):
            self.turns.page_came(self._pages.writable(), frame.slot, frame.use)
        elif isinstance(frame, SumsOrder):
            self._say(SumsNow(self._sums(frame)))
        elif isinstance(frame, AskSave):
            self._say(self._asked.ask(frame.number))
        elif not self.memory.heard(frame) and (answer := self._pages.heard(frame)) is not None:
            self._say(answer)

    def _welcome(self, joined: Joined) -> None:
        refusal = other_protocol(f"rank {self.rank} cannot join job {self.id}", "covey-agent", joined)
        if refusal is not None:
            self._refuse(refusal)
        with self._lock:
            self.host, self._joined = joined.host, True
            self._urgent.clear()
            self._follows, self._agent_heals = joined.tensor_memory, joined.heals
            self._hears_who_leaves = joined.leaves
            cannot = NoTensorMemory(self._memory.cannot[:400]) if self._memory.cannot else None
            memory = (self._shared, cannot) if self._follows else ()
            self.memory.every_s, self.heartbeats.every_s = joined.memory_s, joined.heartbeat_s
            heals = self._heals if joined.heals else None
            owns = self._tensors.owner.now() if self._tensors is not None else None
            sums = SumsNow(owns) if owns is not None and owns.jobs else None
            again = (*self._owners.again(), self._hooked, *memory, self._pages.hello(), heals, sums, self._stop.saved)
            self._urgent.extend(pack(frame) for frame in again if frame is not None)
        self._refusal = None
        self._memory.joined(joined.tensor_memory)
        self._answered.set()

    def _refuse(self, refusal: Refusal) -> None:
        """Handle a refusal: before Joined this process is not admitted; later it answers a request."""
        if self._joined:
            if refusal.what == GRACE_KEPT:
                self._stop.refused(refusal)
            return
        self._refusal = refusal
        self._answered.set()
        raise RefusedByAgent(refusal.what)

    def _moved(self, at: AggregatorAt) -> None:
        with self._lock:
            if at.job != self.id or not self._owners.moved(at):
                return
            each = self._each()
        for tensors in each:
            tensors.moved(at)

    def _ranks_gone(self, frame: RanksHaveLeft) -> None:
        with self._lock:
            self._gone, each = frame.ranks, self._each()
        for tensors in each:
            tensors.gone(frame.ranks)

    def _each(self) -> "list[TensorClient]":
        """The clients of all ranks that this process carries."""
        return [*([] if self._tensors is None else [self._tensors]), *self._others]

    def _carry(self, frame: Carries) -> None:
        with self._lock:
            self._carries, carried = frame, self._carried
        if carried is not None:
            carried.told(frame)

    def _sums(self, frame: SumsOrder) -> Now:
        """Obey an order to this rank as an owner of tables. One that cannot be obeyed leaves it the owner of no table,
        and the agent finds another."""
        with self._lock:
            tensors = self._tensors
        return NOTHING if tensors is None or self._closed else tensors.obey(frame)

    def abandon(self) -> None:
        """Give up this connection in a forked child: it is the parent's, and its thread does not exist here."""
        self._closed, self._joined = True, False
        self._wakes.close()
        for each in self._each():
            each.abandon()
        if self._blocks is not None:
            self._blocks.abandon()
        if self._connection is not None:
            self._connection.close()
