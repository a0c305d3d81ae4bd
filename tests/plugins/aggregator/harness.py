"""A job's workers and its aggregators without sockets: frames in queues, delivered in an order that a seed chooses."""

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from covey.core.ids import JobId
from covey.tensors.aggregator.rounds import Rounds
from covey.tensors.numbers.sum_order import Node, Order
from covey.tensors.numbers.tensor_wire import (
    WANT,
    Declared,
    Frame,
    Header,
    Kind,
    TensorOp,
    Type,
    frame,
    job_hash,
    parse,
    unpack_opening,
    unpack_rate,
    verify,
)
from covey.tensors.numbers.types import NUMBERS
from covey.tensors.numbers.updates import SGD, Update
from covey.tensors.owner.results import RankResults
from covey.tensors.owner.sums import StateTransfer, TensorSum
from plugins.aggregator.datapath.blocks.block_copies import IncomingCopies, OutgoingCopies

Array = npt.NDArray[np.float32]
JOB = JobId("j1")


@dataclass(frozen=True)
class Tensor:
    name: str
    kind: Kind
    shape: tuple[int, ...]
    update: Update | None = None
    keeper: int = 0
    type: Type = "float32"


def contribution(tensor: Tensor, rank: int, round: int) -> Array:
    """The numbers that a rank pushes: of very different sizes, so that another order of additions gives other bits."""
    rng = np.random.default_rng([rank, round, len(tensor.name), *tensor.name.encode()])
    powers = (-2, 3) if tensor.type == "float16" else (-6, 7)  # which ends at 65,504
    values = rng.standard_normal(tensor.shape) * 10.0 ** rng.integers(*powers, tensor.shape)
    return rounded(tensor, values.astype(np.float32))


def rounded(tensor: Tensor, numbers: Array) -> Array:
    """The numbers as they are stored in memory."""
    return np.ascontiguousarray(NUMBERS[tensor.type].narrow(numbers)).reshape(tensor.shape)


def widened(tensor: Tensor, stored: Array) -> Array:
    """The numbers in the type in which they are added."""
    return NUMBERS[tensor.type].widen(stored)


def initial(tensor: Tensor, rank: int) -> Array:
    return rounded(tensor, np.full(tensor.shape, 0.1 + rank, np.float32))


def added(arrays: Sequence[Array], order: Order) -> Array:
    """Add all contributions in one process: pair by pair and then the pairs, or one after the other."""
    sums = list(arrays)
    while len(sums) > 1:
        if order == "rank":
            sums[:2] = [sums[0] + sums[1]]
        else:
            odd = sums[len(sums) // 2 * 2 :]
            sums = [left + right for left, right in zip(sums[0::2], sums[1::2], strict=False)] + odd
    return sums[0]


def rate_in(round: int) -> float:
    """The rate at which an optimizer learns."""
    return 0.1 / round


def updated(update: Update, w: Array, g: Array, kept: list[Array], t: int, rate: float) -> tuple[Array, list[Array]]:
    """Make one step, as `covey.tensors.numbers.update_steps` says it in lines of numpy: the parameters and their
    moments after it."""
    if isinstance(update, SGD):
        if update.weight_decay:
            g = g + update.weight_decay * w
        if update.momentum:
            g = update.momentum * kept[0] + g
            kept = [g]
        return w - rate * g, kept
    if update.weight_decay and update.decoupled:
        w = w - (rate * update.weight_decay) * w
    elif update.weight_decay:
        g = g + update.weight_decay * w
    m = update.beta1 * kept[0] + (1 - update.beta1) * g
    v = update.beta2 * kept[1] + (1 - update.beta2) * (g * g)
    size: Any = np.sqrt(v / (1 - update.beta2**t)) + update.epsilon
    stepped: Array = w - (rate / (1 - update.beta1**t)) * m / size
    return stepped, [m, v]


def reference(
    tensor: Tensor, workers: int, rounds: int, order: Order = "tree", rate: Callable[[int], float] = rate_in
) -> list[Array]:
    """Compute the results of rounds 1.. in one process: the sum, added to rank 0's initial value for a model, or a step
    of its optimizer."""
    results, parameters = [], widened(tensor, initial(tensor, 0))
    kept = [np.zeros(tensor.shape, np.float32)] * (tensor.update.moments if tensor.update is not None else 0)
    for round in range(1, rounds + 1):
        total = added([widened(tensor, contribution(tensor, rank, round)) for rank in range(workers)], order)
        if tensor.update is not None:
            parameters, kept = updated(tensor.update, parameters, total, kept, round, rate(round))
        else:
            parameters = parameters + total if tensor.kind == "model" else total
        results.append(rounded(tensor, parameters))
        parameters = widened(tensor, results[-1])
    return results


class Owner:
    """An aggregator of one epoch: `TensorSum`s and a queue to and from each connected worker."""

    def __init__(self, epoch: int, workers: int) -> None:
        self.epoch, self.workers = epoch, workers
        self.tensors: dict[int, TensorSum] = {}
        self.inboxes: dict[int, deque[Frame]] = {}
        self.outboxes: dict[int, deque[Frame | int]] = {}
        """The frames for each rank, and keys of tensors whose result is owed."""
        self.results: dict[int, RankResults] = {}
        self.answered: list[tuple[int, int, int]] = []
        """The key, round and rank of every result that was given to its end."""
        self.early = 0
        """Number of parts that were given before their round was complete."""
        self.asked: list[int] = []
        """The keys of Blocks that a rank was asked for."""
        self.hash = job_hash(JOB)
        self.before: IncomingCopies | None = None
        self.is_ready, self.expects = True, 0
        """Whether its memory is ready, and the bytes of state that the owner before brings."""

    def expect(self, state_bytes: int) -> None:
        self.expects = state_bytes

    def declare(self, key: int, declared: Declared) -> TensorSum | str:
        if key not in self.tensors:
            self.tensors[key] = TensorSum(declared, self.workers)
            if self.before is not None and self.before.announces:
                self.tensors[key].await_copy()
        return self.tensors[key]

    def heard(self, key: int, tensor: TensorSum, actions: Sequence[StateTransfer]) -> None:
        self._do(key, actions)
        tensor.check()

    def connect(self, rank: int, hello: Frame) -> None:
        self.disconnect(rank)
        self.inboxes[rank], self.outboxes[rank] = deque(), deque([frame(TensorOp.WELCOME, job_hash(JOB), self.epoch)])
        self.results[rank] = RankResults(rank, job_hash(JOB), self.epoch, near=False)
        assert parse(hello[0]).epoch == self.epoch

    def disconnect(self, rank: int) -> None:
        if rank in self.inboxes:
            del self.inboxes[rank], self.outboxes[rank]
            for key, tensor in self.tensors.items():
                self._do(key, tensor.gone(rank))

    def hear(self, rank: int) -> None:
        head, payload = self.inboxes[rank].popleft()
        header, payload = parse(head), bytes(payload)
        verify(head, payload)
        assert (header.epoch, header.rank) == (self.epoch, rank)
        match header.op:
            case TensorOp.OPEN:
                declared, ranks = unpack_opening(header.flags, payload)
                tensor = self.declare(header.key, declared)
                assert isinstance(tensor, TensorSum) and tensor.declared == declared
                self._do(header.key, tensor.open(rank, header.round, bool(header.flags & WANT), ranks))
            case TensorOp.PUSH:
                actions = self.tensors[header.key].push(rank, header.round, header.part, payload)
                self._do(header.key, actions)
            case TensorOp.STATE:
                actions = self.tensors[header.key].state_part(rank, header.round, header.part, payload)
                self._do(header.key, actions)
            case TensorOp.RATE:
                self.tensors[header.key].learn(rank, header.round, unpack_rate(payload))
            case TensorOp.KEPT:
                self._do(header.key, self.tensors[header.key].kept(rank, header.round))
            case other:
                raise AssertionError(other)
        self.tensors[header.key].check()

    def busy(self) -> list[int]:
        return [key for key, tensor in self.tensors.items() if tensor.busy]

    def work(self, key: int) -> None:
        self._do(key, self.tensors[key].work())
        self.tensors[key].check()

    def _do(self, key: int, actions: Sequence[StateTransfer]) -> None:
        for action in actions:
            out = self.outboxes.get(action.rank)
            if out is None:
                continue
            if action.what == "ask":
                self.asked.append(key)
                out.append(frame(TensorOp.ASK, job_hash(JOB), self.epoch, key=key))
                continue
            if self.results[action.rank].owe(key):
                out.append(key)

    def pay(self, rank: int) -> None:
        """Send a result that the rank was promised when its turn comes; it is the newest one then."""
        out, results = self.outboxes[rank], self.results[rank]
        while out and isinstance(key := out[0], int):
            out.popleft()
            tensor = self.tensors[key]
            giving = results.begin(key, tensor)
            if giving is None:
                continue
            if giving.lent.is_whole:
                self.answered.append((key, giving.lent.round, rank))
            else:
                self.early += len(giving.parts)
            frames = [(head, bytes(payload)) for head, payload in (results.frame(giving, at) for at in giving.parts)]
            results.over(giving)
            out.extendleft(reversed(frames))


class Bringing:
    """An owner that brings its Blocks to the next one: frames in queues, and the answers of each when its turn
    comes."""

    def __init__(self, old: Owner, new: Owner) -> None:
        self.new, self.over = new, False
        self.out = OutgoingCopies(new.hash, new.epoch, old.tensors)
        self.into = new.before = IncomingCopies(new)
        self.there = deque(self.out.announced())
        """The frames on their way to the new owner."""
        self.back: deque[Frame] = deque()
        self.heard = 0
        """The number of frames that the new owner has heard."""

    @property
    def choices(self) -> list[tuple[str, int]]:
        if self.over:
            return []
        return [("new owner hears", 0)] if self.there else [("old owner hears or ends", 0)]

    def happen(self) -> None:
        if not self.there:
            self._go_on()
            return
        head, payload = self.there.popleft()
        header = parse(bytes(head))
        into = self.into.destination(header)
        into[:] = bytes(payload)
        verify(head, into)
        self.back.extend(self.into.heard(header, into))
        self.heard += 1

    def _go_on(self) -> None:
        while self.back:
            self.out.heard(parse(bytes(self.back.popleft()[0])))
        state = self.out.next()
        if state is None:
            assert self.out.is_over
            self.end()
        else:
            self.there.extend((head, bytes(payload)) for head, payload in state)

    def end(self) -> None:
        """End the connection: all was brought, or one of the two died."""
        if not self.over:
            self.over, self.new.before = True, None
            self.into.ended()


@dataclass
class Worker:
    """A training script: every round it pushes each tensor in turn and waits for the result. It may stand for the
    scripts of one host, for all of which one of them speaks."""

    rank: int
    ranks: Node
    rounds: Rounds
    tensors: Sequence[Tensor]
    last: int
    owner: Owner | None = None
    round: int = 0
    at: int = 0
    results: dict[tuple[str, int], bytes] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.round > self.last

    def step(self) -> bool:
        """Go on with the script as far as one call; False when it waits."""
        if self.finished:
            return False
        tensor = self.tensors[self.at]
        state = self.rounds.tensors.get(tensor.name)
        if state is None:
            start = initial(tensor, self.ranks[0]).tobytes() if tensor.kind == "model" else None
            declared = Declared(
                tensor.name,
                tensor.kind,
                tensor.shape,
                self.rounds.part_bytes,
                self.rounds.order,
                update=tensor.update,
                keeper=tensor.keeper % self.rounds.world_size,
                type=tensor.type,
            )
            self._send(self.rounds.declare_as(declared, start, self.ranks))
            if tensor.kind == "model":
                return True
            state = self.rounds.tensors[tensor.name]
        if not state.agreed or state.unacknowledged is not None:
            return False
        if self.round == 0:
            self._next()
        elif state.version == self.round:
            self.results[tensor.name, self.round] = bytes(state.state)
            self._next()
        else:
            assert state.version == self.round - 1
            sums = self._sums(tensor, state.spoken.nodes)
            self._send(self.rounds.push(tensor.name, *sums, rate=rate_in(self.round)))
        return True

    def _sums(self, tensor: Tensor, nodes: Sequence[Node]) -> list[bytes]:
        given = {rank: contribution(tensor, rank, self.round) for rank in range(*self.ranks)}
        wide = {rank: widened(tensor, each) for rank, each in given.items()}
        return [
            given[first].tobytes()
            if end - first == 1
            else added([wide[rank] for rank in range(first, end)], self.rounds.order).tobytes()
            for first, end in nodes
        ]

    def _next(self) -> None:
        self.at += 1
        if self.at == len(self.tensors):
            self.at, self.round = 0, self.round + 1

    def _send(self, frames: object) -> None:
        copies = [(head, bytes(payload)) for head, payload in frames]  # type: ignore[attr-defined]
        if self.owner is not None and self.rank in self.owner.inboxes and self.welcomed:
            self.owner.inboxes[self.rank].extend(copies)

    welcomed: bool = False

    def hear(self) -> None:
        assert self.owner is not None
        self.owner.pay(self.rank)
        if not self.owner.outboxes[self.rank]:
            return
        said = self.owner.outboxes[self.rank].popleft()
        assert not isinstance(said, int)
        head, payload = said
        header: Header = parse(head)
        into = self.rounds.destination(header)
        into[:] = payload
        verify(head, into)
        answer = list(self.rounds.heard(header, into))
        if header.op is TensorOp.WELCOME:
            self.welcomed = True
            answer = list(self.rounds.connected())
        self._send(answer)
        self.rounds.check()

    def move(self, owner: Owner) -> None:
        if self.owner is not None:
            self.owner.disconnect(self.rank)
        self.rounds.moved(owner.epoch)
        self.owner, self.welcomed = owner, False
        owner.connect(self.rank, self.rounds.hello(b"s" * 16, bytes(16)))


class Bench:
    """Workers and the owner of the highest epoch."""

    def __init__(
        self,
        seed: int,
        workers: int,
        tensors: Sequence[Tensor],
        rounds: int,
        part_bytes: int = 16,
        order: Order = "tree",
        hosts: Sequence[int] = (),
    ) -> None:
        """`hosts`: how many ranks each host has, for all of which one speaks; none: each rank speaks for itself."""
        self.rng = random.Random(seed)
        self.tensors, self.last, self.ranks = tensors, rounds, workers
        ends = list(itertools.accumulate(hosts or [1] * workers))
        self.workers = [
            Worker(rank, ranks, Rounds(JOB, rank, workers, part_bytes, order), tensors, rounds)
            for ranks in zip([0, *ends], ends, strict=False)
            for rank in [self.rng.randrange(*ranks)]
        ]
        self.order: Order = order
        self.bringing: Bringing | None = None
        self.owner = self.new_owner()

    def new_owner(self) -> Owner:
        """Replace the owner; every worker is told at once. The numbers that the old one had are lost."""
        epoch = getattr(self, "owner", Owner(1 << 32, 0)).epoch + 1
        self.owner, self.bringing = Owner(epoch, self.ranks), None
        for worker in self.workers:
            worker.move(self.owner)
        return self.owner

    def hand_over(self) -> Bringing:
        """Replace the owner; the old one stays alive and brings its Blocks to the new one."""
        old, new = self.owner, self.new_owner()
        self.bringing = Bringing(old, new)
        return self.bringing

    def choices(self) -> list[tuple[str, int]]:
        """The steps that could happen next."""
        found: list[tuple[str, int]] = [("work", key) for key in self.owner.busy()]
        found += self.bringing.choices if self.bringing is not None else []
        for worker in self.workers:
            if self.owner.inboxes.get(worker.rank):
                found.append(("owner hears", worker.rank))
            if self.owner.outboxes.get(worker.rank):
                found.append(("worker hears", worker.rank))
            if not worker.finished:
                found.append(("script", worker.rank))
        return found

    def worker(self, rank: int) -> Worker:
        return next(worker for worker in self.workers if worker.rank == rank)

    def happen(self, what: str, which: int) -> bool:
        match what:
            case "work":
                self.owner.work(which)
            case "new owner hears" | "old owner hears or ends":
                assert self.bringing is not None
                self.bringing.happen()
            case "owner hears":
                self.owner.hear(which)
            case "worker hears":
                self.worker(which).hear()
            case _:
                return self.worker(which).step()
        return True

    def step(self, allowed: Callable[[str, int], bool] = lambda what, which: True) -> bool:
        """Do one step that changes something, at random; return False when nothing can happen any more."""
        found = [choice for choice in self.choices() if allowed(*choice)]
        self.rng.shuffle(found)
        return any(self.happen(*choice) for choice in found)

    def run(self, until: Callable[[], bool] | None = None, steps: int = 200_000) -> None:
        """Take steps until a condition holds, or until every script has ended."""
        for _ in range(steps):
            if until() if until is not None else all(worker.finished for worker in self.workers):
                return
            assert self.step(), f"stuck: {[(w.round, w.at) for w in self.workers]}"
        raise AssertionError("did not end")

    def check_results(self) -> None:
        """Check for every worker and every round that the results are, bit for bit, what one process would have
        computed."""
        for tensor in self.tensors:
            for round, expected in enumerate(reference(tensor, self.ranks, self.last, self.order), 1):
                for worker in self.workers:
                    assert worker.results[tensor.name, round] == expected.tobytes(), (tensor, round, worker.rank)
