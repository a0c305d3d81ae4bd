"""The frames that one rank may send to the owner of a table, wherever that runs."""

from collections.abc import Callable

from covey.tensors.numbers.tensor_wire import TYPES, Header, Payload, TensorOp, TensorWireError
from covey.tensors.owner.sums import TensorSum


class RankFrames:
    """Checks the frames of one rank on one connection, before anything is allocated for them."""

    def __init__(self, rank: int, find: Callable[[int], TensorSum | None]) -> None:
        """`find` gives the tensor of a key; None: no rank has opened it."""
        self.rank, self._find = rank, find
        self.refused: set[int] = set()
        """Keys of tensors that are not summed: pushes of them keep coming until the rank hears so."""
        self.memories: dict[int, Payload] = {}
        """By the tensor's key, memory in which this rank may place what it pushes."""

    def tensor(self, header: Header) -> TensorSum:
        """The tensor that a frame is about. TensorWireError when no rank has opened it."""
        tensor = self._find(header.key)
        if tensor is None:
            raise TensorWireError(f"{header.op.name} of a tensor that this worker never opened")
        return tensor

    def expect(self, header: Header) -> None:
        """TensorWireError, Violation when this rank may not send a frame with this header now."""
        if header.op is TensorOp.PUSH:
            if header.key not in self.refused:
                piece = self.tensor(header).piece(self.rank, header.part)
                if header.type != piece.type:
                    raise TensorWireError(f"type {header.type} in a push of type {piece.type}")
                if header.length != piece.size:
                    raise TensorWireError(f"a piece of {header.length} bytes, not {piece.size}")
            return
        match header.op:
            case TensorOp.PLACED:
                if header.key not in self.memories:
                    raise TensorWireError("a piece in shared memory, and this worker was given none")
                wanted = self.tensor(header).piece(self.rank, header.part).type
                if header.type != wanted:
                    raise TensorWireError(f"type {header.type} in a push of type {wanted}")
            case TensorOp.STATE:
                declared = self.tensor(header).declared
                if header.type != TYPES[declared.type][0]:
                    raise TensorWireError(f"type {header.type} in a tensor of {declared.type}")
                if header.part >= declared.state_parts:
                    raise TensorWireError(f"part {header.part} of a tensor with {declared.state_parts}")
                start, end = declared.state_span(header.part)
                if header.length != end - start:
                    raise TensorWireError(f"a part of {header.length} bytes, not {end - start}")
            case TensorOp.RATE | TensorOp.KEPT if header.key not in self.refused:
                self.tensor(header)
            case TensorOp.OPEN | TensorOp.PING | TensorOp.RATE | TensorOp.KEPT | TensorOp.TELL | TensorOp.LEAVES:
                pass
            case _:
                raise TensorWireError(f"unexpected {header.op.name} from a worker")
