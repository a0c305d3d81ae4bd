"""The worker's side of a tensor's rounds, without sockets, threads or numbers: bytes and frames only.

A tensor has a version: the last round whose result this worker holds whole. `push` begins round version + 1. The pushed
bytes remain the caller's, who must not change them until the result is here, since they may have to be sent to the next
aggregator too. The last result is kept (two buffers, one complete, one being filled): an aggregator without state asks
for it, and gets it at any time, also while the worker computes. The same steps start a job and follow the crash of an
aggregator and a takeover:

    version v, nothing pushed --push--> version v, round v+1 unacknowledged --whole result of v+1--> version v+1
            connected (a new connection or a new owner): OPEN every tensor with its version, PUSH what is unacknowledged

No two workers are more than one version apart, since round v+1 needs a push from every worker and none pushes v+1
before it holds v. A frame that comes late or twice is ignored; a frame that this worker could not have asked for is an
error of the peer, and ends the connection.
"""

import itertools
from collections.abc import Iterator, Sequence

from covey.core.ids import JobId
from covey.tensors.numbers.arrays import copy_bytes
from covey.tensors.numbers.spoken import Spoken
from covey.tensors.numbers.sum_order import Node, Order
from covey.tensors.numbers.telling import Tell as Tell
from covey.tensors.numbers.telling import ToldByRank as ToldByRank
from covey.tensors.numbers.tensor_wire import (
    FAULT_BYTES_MAX,
    HOLLOW,
    IN_VAIN,
    PART_BYTES,
    PLACES,
    SPEAKS,
    TYPES,
    WANT,
    Declared,
    Frame,
    Header,
    Kind,
    Payload,
    TensorOp,
    TensorWireError,
    frame,
    grant_of,
    job_hash,
    key_of,
    pack_declared,
    pack_opening,
    pack_rate,
)
from covey.wire import handshake
from covey.wire.handshake import CHALLENGE_BYTES, Challenge

_DRAINED = frozenset(
    (
        TensorOp.TOLD,
        TensorOp.CHALLENGE,
        TensorOp.PAIRED,
        TensorOp.WELCOME,
        TensorOp.STALE,
        TensorOp.ASK,
        TensorOp.PONG,
        TensorOp.FAULT,
        TensorOp.MEMORY,
    )
)
"""Operations whose payload is used at once."""
Buffers = Sequence[memoryview]
"""Memory of a result, then of each of its moments."""


class Stale(ConnectionError):
    """The aggregator serves this job under another epoch, which is `epoch`; 0 when it does not know the job."""

    def __init__(self, epoch: int) -> None:
        super().__init__("it does not serve this job under this epoch")
        self.epoch = epoch


class Superseded(RuntimeError):
    """This rank belongs to a run of the job that was taken back and started again elsewhere."""


class TensorRounds:
    """One tensor of one worker."""

    def __init__(
        self,
        declared: Declared,
        initial: Payload | None,
        ranks: Node,
        world_size: int,
        buffers: tuple[Buffers, Buffers] | None = None,
        moments: Sequence[Payload] = (),
    ) -> None:
        """`ranks`: the ranks for which it pushes. `moments`: those from which an optimizer with earlier steps
        continues. `buffers`: memory for results and their moments, used in turn; the first holds the initial values."""
        size = declared.size_bytes
        if initial is not None and len(initial) != size:
            raise ValueError(f"tensor {declared.name!r} has {size} bytes, its initial value {len(initial)}")
        self.declared = declared
        self.packed = pack_declared(declared)
        self.spoken = Spoken(declared, ranks, world_size)
        self.key = key_of(declared.label)
        self.type = TYPES[declared.type][0]
        self.version = 0
        self.agreed = declared.kind == "grad"
        """Whether the initial value is in force: for a model only once the aggregator has sent the one it chose."""
        self.hollow = False
        """Whether it began at its version without a copy of that version's result."""
        self.adopted = False
        """Whether the script has not declared it yet."""
        self.state: Payload
        self.incoming: Payload
        self.keeps = bool(declared.moments) and ranks[0] <= declared.keeper < ranks[1]
        """Whether results come with their moments."""
        self.moments: Sequence[Payload]
        """Moments of `state`: those that this rank keeps, or with which it began."""
        self._incoming_moments: Sequence[Payload] = ()
        if buffers is None:
            self.state = bytearray(initial) if initial is not None else bytearray(size)
            self.incoming = bytearray(size)
            self.moments = [bytearray(each) for each in moments]
            if self.keeps:
                each = range(declared.moments)
                self._incoming_moments = [bytearray(declared.moment_bytes) for _ in each]
                self.moments = self.moments or [bytearray(declared.moment_bytes) for _ in each]
        else:
            (self.state, *self.moments), (self.incoming, *self._incoming_moments) = buffers
        self.pushed: tuple[Payload, ...] = ()
        """The sum for each node of `spoken`."""
        self.rate = 0.0
        """Learning rate of the round that was pushed."""
        self.unacknowledged: int | None = None
        """The round whose result is still to come; its contribution is `pushed`. None: no round is under way."""
        self.fault = ""
        """Why the aggregator does not sum this tensor, for people."""
        self.in_vain = False
        """Whether the fault is that a rank has left (`covey.tensors.owner.leaving`)."""
        self.memory: memoryview | None = None
        """Memory of the owner in which this rank places what it pushes; None: that is sent."""
        self._seen: set[int] = set()

    @property
    def expected(self) -> int | None:
        """The only round whose result is not ignored."""
        return self.unacknowledged if self.agreed else self.version

    @property
    def result_parts(self) -> int:
        """Number of parts of a whole result that this rank receives."""
        return self.declared.state_parts if self.keeps else self.declared.parts

    def part_of_state(self, part: int) -> memoryview:
        which, start, end = self.declared.state_piece(part)
        return memoryview(self.moments[which - 1] if which else self.state)[start:end]

    def parts_here(self) -> list[int]:
        """Parts of the result that is to come which have arrived."""
        return list(self._seen)

    def part_here(self, part: int) -> memoryview | None:
        """The numbers of such a part; None when it is not one: the result is whole, or its parts will come again."""
        if part not in self._seen or part >= self.declared.parts:
            return None
        start, end = self.declared.span(part)
        return memoryview(self.incoming)[start:end]

    def forget_partial(self) -> None:
        self._seen.clear()

    def slot(self, header: Header) -> memoryview | None:
        """Memory for a part of the result; None when it is late. TensorWireError when there is no such part."""
        if header.part >= self.result_parts:
            raise TensorWireError(f"part {header.part} of {self.declared.name!r}, which has {self.result_parts}")
        which, start, end = self.declared.state_piece(header.part)
        if header.length != end - start:
            raise TensorWireError(
                f"part {header.part} of {self.declared.name!r} has {end - start} bytes, not {header.length}"
            )
        if header.type != self.type:
            raise TensorWireError(f"part {header.part} of {self.declared.name!r} is of type {header.type}")
        if header.round != self.expected:
            return None
        return memoryview(self._incoming_moments[which - 1] if which else self.incoming)[start:end]

    def arrived(self, part: int) -> bool:
        """Note a part. True when the result is now whole; it is then the state."""
        self._seen.add(part)
        if len(self._seen) < self.result_parts:
            return False
        self._seen.clear()
        self.state, self.incoming = self.incoming, self.state
        if self.keeps:
            self.moments, self._incoming_moments = self._incoming_moments, self.moments
        if self.agreed:
            self.version += 1
            self.hollow = False
            self.moments = self.moments if self.keeps else ()
            self.unacknowledged, self.pushed = None, ()
        self.agreed = True
        return True

    def check(self) -> None:
        assert len(self.state) == len(self.incoming) == self.declared.size_bytes
        assert self.unacknowledged in (None, self.version + 1)
        assert self.agreed or self.unacknowledged is None, "pushed before the initial value was agreed"


class Rounds:
    """All tensors of one worker. The caller transfers the frames: it sends those that a method returns on the
    connection of the current epoch, in order; it reads each received one into `destination(header)` and passes it to
    `heard`.

    Frames are made when iterated, and refer to buffers that must not change until their round is over.
    """

    def __init__(
        self, job: JobId, rank: int, world_size: int, part_bytes: int = PART_BYTES, order: Order = "tree"
    ) -> None:
        self.job, self.rank, self.world_size, self.part_bytes = job, rank, world_size, part_bytes
        self.order: Order = order
        """Order of additions for tensors that are declared from now on."""
        self.epoch = 0
        self.tensors: dict[str, TensorRounds] = {}
        self.incarnation = 0
        """How many processes of this rank were lost before this one; an aggregator listens to the newest."""
        self.ignored = 0
        """Number of late and repeated frames."""
        self._hash = job_hash(job)
        self._by_key: dict[int, TensorRounds] = {}
        self._leaves = b""
        """Words for people on this rank, which has left; empty: it has not."""
        self.near = False
        """Whether the newest connection is to a process of this host (`covey.tensors.numbers.tensor_wire`)."""
        self.places = False
        """Whether that process may give this one memory for what it pushes."""
        self._scratch = bytearray(FAULT_BYTES_MAX)
        """Memory for the payload of frames that are used at once."""
        self._secret = self._hello = b""
        """Secret and hello of the newest connection."""

    # ---- from the script ----

    def declare(self, name: str, kind: Kind, shape: tuple[int, ...], initial: Payload | None = None) -> Iterator[Frame]:
        """Declare a tensor of float32. ValueError when its name is taken by another shape or kind, or it is too
        large."""
        return self.declare_as(Declared(name, kind, shape, self.part_bytes, self.order), initial)

    def declare_as(
        self,
        declared: Declared,
        initial: Payload | None = None,
        ranks: Node | None = None,
        buffers: tuple[Buffers, Buffers] | None = None,
        moments: Sequence[Payload] = (),
    ) -> Iterator[Frame]:
        """Declare a tensor, or one Block of it. `ranks`: ranks of this host for all of which it is pushed; None: this
        one only. `buffers`, `moments`: as in `TensorRounds`. ValueError when its name is taken, or it is too large."""
        known = self._by_key.get(key_of(declared.label))
        if known is not None and known.adopted and known.declared == declared:
            known.adopted = False
            return iter(())
        if known is not None:
            raise ValueError(f"tensor {declared.name!r} is already known as {known.declared.words}")
        tensor = TensorRounds(declared, initial, ranks or (self.rank, self.rank + 1), self.world_size, buffers, moments)
        self.tensors[declared.label] = self._by_key[tensor.key] = tensor
        return iter((self._open(tensor),))

    def adopt(self, declared: Declared, version: int) -> Iterator[Frame]:
        """Take over a Block that the lost process of this rank declared, and of which round `version` was complete; the
        script declares it again before it uses it. ValueError for a model, which no rank holds: only sums can be taken
        over."""
        if declared.kind != "grad" or key_of(declared.label) in self._by_key:
            raise ValueError(f"{declared.words} cannot be taken over from a rank that was lost")
        tensor = TensorRounds(declared, None, (self.rank, self.rank + 1), self.world_size)
        tensor.version, tensor.hollow, tensor.adopted = version, version > 0, True
        self.tensors[declared.label] = self._by_key[tensor.key] = tensor
        return iter((self._open(tensor),))

    def push(self, name: str, *sums: Payload, rate: float = 0.0) -> Iterator[Frame]:
        """Begin the next round of a tensor. `sums`: one for each node that is pushed, for one rank its own
        contribution; they are not copied, and must not change until the result is here. `rate`: learning rate, where
        parameters are updated. ValueError when a round is under way or a sum has another size."""
        tensor = self.tensors[name]
        if tensor.unacknowledged is not None or not tensor.agreed:
            raise ValueError(f"tensor {name!r} is still in round {tensor.expected}")
        for node, data in zip(tensor.spoken.nodes, sums, strict=True):
            if len(data) != tensor.spoken.size_of(node):
                raise ValueError(f"tensor {name!r} has {tensor.spoken.size_of(node)} bytes, not {len(data)}")
        tensor.pushed, tensor.rate = sums, rate
        tensor.unacknowledged = tensor.version + 1
        return self._pieces(tensor, tensor.unacknowledged)

    def tell(self, said: Tell) -> Frame:
        """The frame with a message for another rank, which gets it if it is connected now."""
        return frame(
            TensorOp.TELL,
            self._hash,
            self.epoch,
            key=said.about,
            part=said.rank,
            rank=self.rank,
            round=said.step,
            payload=said.data,
            near=self.near,
        )

    def leave(self, words: bytes) -> Iterator[Frame]:
        """This rank pushes no tensor any more but the last one; `words` tell people. Empty words: it continues."""
        self._leaves = words
        leaves = TensorOp.LEAVES, self._hash, self.epoch
        return iter((frame(*leaves, rank=self.rank, payload=words),) if words else ())

    def versions(self) -> list[tuple[bytes, int]] | None:
        """For each Block, its declaration, as `pack_declared` writes it, and the round whose result is here, or with
        which it begins. None while a round is under way."""
        if any(tensor.unacknowledged is not None for tensor in self.tensors.values()):
            return None
        return [(tensor.packed, tensor.version) for _, tensor in sorted(self.tensors.items())]

    # ---- from the connection ----

    def moved(self, epoch: int) -> bool:
        """The agent names an aggregator. True when its epoch is higher than the one known. Superseded when it belongs
        to another run of the job."""
        if epoch <= self.epoch:
            return False
        if self.epoch and grant_of(epoch) != grant_of(self.epoch):
            raise Superseded(self._superseded(epoch))
        self.epoch = epoch
        return True

    def hello(self, secret: bytes, nonce: bytes, pairs: int = 0) -> Frame:
        """The first frame of a new connection. `nonce` is new; the secret itself is never sent. `pairs`: PAIRS if this
        rank may use RDMA."""
        who, now = self.rank, self.incarnation
        said = frame(TensorOp.HELLO, self._hash, self.epoch, part=pairs, rank=who, round=now, payload=nonce)
        self._secret, self._hello = secret, said[0] + nonce
        return said

    def pairs(self, yes: int, payload: bytes) -> Frame:
        """The frame with the place of this rank's queue pair, that it works, or why it does not."""
        return frame(TensorOp.PAIR, self._hash, self.epoch, part=yes, rank=self.rank, payload=payload)

    def _prove(self, challenge: Challenge) -> Iterator[Frame]:
        """The answer to a challenge. TensorWireError when the peer does not know the secret of this assignment."""
        expected = handshake.proof_of_server(self._secret, self._hello, challenge.nonce)
        if not self._hello or not handshake.is_proof(challenge.proof, expected):
            raise TensorWireError("does not know the secret of this job's assignment")
        proof = handshake.proof_of_client(self._secret, self._hello, challenge.nonce)
        return iter((frame(TensorOp.PROOF, self._hash, self.epoch, rank=self.rank, payload=proof),))

    def connected(self) -> Iterator[Frame]:
        """The frames that the aggregator needs to continue from here, after WELCOME on a new connection."""
        for tensor in self.tensors.values():
            tensor.memory = None  # it belongs to the connection before
        tensors = [tensor for tensor in self.tensors.values() if not tensor.fault]
        frames = [iter((self._open(tensor),)) for tensor in tensors]
        frames.append(self.leave(self._leaves))
        for tensor in tensors:
            tensor.forget_partial()
            if tensor.unacknowledged is not None:
                frames.append(self._pieces(tensor, tensor.unacknowledged))
        return itertools.chain.from_iterable(frames)

    def memory_is(self, key: int, memory: memoryview) -> None:
        """The owner has given memory for what is pushed of this tensor over the present connection."""
        tensor = self._by_key.get(key)
        if tensor is not None and len(memory) == tensor.spoken.memory_bytes:
            tensor.memory = memory

    def ping(self) -> Frame:
        return frame(TensorOp.PING, self._hash, self.epoch, rank=self.rank)

    def destination(self, header: Header) -> memoryview:
        """Memory for the payload of a frame, exactly `header.length` bytes. TensorWireError when the frame is not
        allowed now."""
        if header.job != self._hash or (header.epoch != self.epoch and header.op is not TensorOp.STALE):
            raise TensorWireError(
                f"a frame of job {header.job:#x} epoch {header.epoch}; expected job {self._hash:#x} epoch {self.epoch}"
            )
        match header.op:
            case TensorOp.RESULT:
                slot = self._tensor(header).slot(header)
                return slot if slot is not None else self._drain(header.length)
            case op if op in _DRAINED:
                return self._drain(header.length)
            case _:
                raise TensorWireError(f"an aggregator does not send {header.op.name}")

    def expects(self, header: Header) -> bool:
        """Whether the frame belongs to the result that is to come."""
        return header.round == self._tensor(header).expected

    def heard(self, header: Header, payload: Payload) -> Iterator[Frame]:
        """Handle a verified frame, its payload in `destination(header)`. Returns the answers. Stale, Superseded."""
        match header.op:
            case TensorOp.RESULT:
                tensor = self._tensor(header)
                if header.round != tensor.expected:
                    self.ignored += 1
                elif tensor.arrived(header.part) and tensor.keeps and tensor.version:
                    return iter((self._said(TensorOp.KEPT, tensor, tensor.version),))
            case TensorOp.CHALLENGE:
                if len(payload) != CHALLENGE_BYTES:
                    raise TensorWireError(f"a challenge of {len(payload)} bytes")
                return self._prove(handshake.parse_challenge(bytes(payload)))
            case TensorOp.ASK:
                tensor = self._tensor(header)
                declared = tensor.declared
                if tensor.hollow:
                    raise TensorWireError(f"asks for a result of {declared.name!r} that came before this process")
                if declared.asked_parts(tensor.version) > declared.parts + len(tensor.moments) * declared.moment_parts:
                    raise TensorWireError(f"asks for moments of {declared.name!r}, which another rank keeps")
                return self._state(tensor)
            case TensorOp.FAULT:
                tensor = self._tensor(header)
                tensor.fault, tensor.in_vain = bytes(payload).decode("utf-8", "replace"), header.round == IN_VAIN
            case TensorOp.STALE:
                if header.round > self.incarnation:
                    raise Superseded(
                        f"another process runs as rank {self.rank} of {self.job} now: this process must end"
                    )
                if self.epoch and grant_of(header.epoch) > grant_of(self.epoch):
                    raise Superseded(self._superseded(header.epoch))
                raise Stale(header.epoch)
            case _:
                pass
        return iter(())

    def check(self) -> None:
        for tensor in self.tensors.values():
            tensor.check()

    # ---- frames ----

    def _open(self, tensor: TensorRounds) -> Frame:
        own = tensor.spoken.ranks == (self.rank, self.rank + 1)
        return frame(
            TensorOp.OPEN,
            self._hash,
            self.epoch,
            key=tensor.key,
            rank=self.rank,
            round=tensor.version,
            flags=(0 if tensor.agreed else WANT)
            | (0 if own else SPEAKS)
            | (HOLLOW if tensor.hollow else 0)
            | (PLACES if self.places else 0),
            type=tensor.type,
            payload=pack_opening(tensor.packed, None if own else tensor.spoken.ranks),
        )

    def _said(self, op: TensorOp, tensor: TensorRounds, round: int, payload: bytes = b"") -> Frame:
        return frame(op, self._hash, self.epoch, key=tensor.key, rank=self.rank, round=round, payload=payload)

    def _pieces(self, tensor: TensorRounds, round: int) -> Iterator[Frame]:
        """What was pushed, one frame per piece, each made when it is sent, all under the present epoch."""
        sums = {node: memoryview(data) for node, data in zip(tensor.spoken.nodes, tensor.pushed, strict=True)}
        pieces = filter(None, map(tensor.spoken.piece, range(tensor.spoken.count)))
        each = ((piece.type, sums[piece.node][piece.first : piece.end]) for piece in pieces)
        if tensor.memory is not None:
            frames = self._placed(tensor, round, each, tensor.memory)
        else:
            frames = self._frames(TensorOp.PUSH, tensor, round, each)
        if tensor.declared.update is None:
            return frames
        return itertools.chain((self._said(TensorOp.RATE, tensor, round, pack_rate(tensor.rate)),), frames)

    def _placed(
        self, tensor: TensorRounds, round: int, each: Iterator[tuple[int, Payload]], memory: memoryview
    ) -> Iterator[Frame]:
        """One frame for each piece, which is put into this memory when its frame is made. The owner has added those of
        the round before, since its result is here."""
        of = TensorOp.PLACED, self._hash, self.epoch
        for number, (type, payload) in enumerate(each):
            first, end = tensor.spoken.place(number)
            copy_bytes(memory[first:end], payload)
            yield frame(*of, key=tensor.key, part=number, rank=self.rank, round=round, type=type)

    def _state(self, tensor: TensorRounds) -> Iterator[Frame]:
        """The last result, and the moments that are asked for, one frame per part."""
        parts = map(tensor.part_of_state, range(tensor.declared.asked_parts(tensor.version)))
        return self._frames(TensorOp.STATE, tensor, tensor.version, ((tensor.type, part) for part in parts))

    def _frames(
        self, op: TensorOp, tensor: TensorRounds, round: int, each: Iterator[tuple[int, Payload]]
    ) -> Iterator[Frame]:
        """One frame for each type and payload, numbered from 0."""
        epoch, near = self.epoch, self.near
        return (
            frame(
                op,
                self._hash,
                epoch,
                key=tensor.key,
                part=number,
                rank=self.rank,
                round=round,
                type=type,
                payload=payload,
                near=near,
            )
            for number, (type, payload) in enumerate(each)
        )

    def _tensor(self, header: Header) -> TensorRounds:
        tensor = self._by_key.get(header.key)
        if tensor is None:
            raise TensorWireError(f"{header.op.name} of a tensor that this rank never named")
        return tensor

    def _drain(self, length: int) -> memoryview:
        if length > len(self._scratch):
            self._scratch = bytearray(length)
        return memoryview(self._scratch)[:length]

    def _superseded(self, epoch: int) -> str:
        return (
            f"rank {self.rank} of {self.job} belongs to grant {grant_of(self.epoch)}, but the job was taken back and "
            f"runs again under grant {grant_of(epoch)}; this process must end"
        )
