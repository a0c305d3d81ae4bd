"""The Blocks of a rank and the round of each, packed as a part of the state that its successor takes over."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from covey.tensors.numbers.tensor_wire import Declared, TensorWireError, unpack_declared

Versions = Sequence[tuple[bytes, int]]
"""For each Block of a table, its declaration and the round whose result is here (`Rounds.versions`)."""
_encode = msgspec.msgpack.Encoder().encode
_tables: msgspec.msgpack.Decoder[dict[int, list[tuple[bytes, int]]]] = msgspec.msgpack.Decoder(
    dict[int, list[tuple[bytes, int]]]
)


def pack_rounds(each: Mapping[int, Versions | None]) -> bytes | None:
    """The versions of all tables, packed; equal on all ranks in the same step. None while a round is under way."""
    if any(versions is None for versions in each.values()):
        return None
    return _encode({table: versions for table, versions in sorted(each.items()) if versions})


def unpack_rounds(packed: bytes, tables: int) -> Iterator[tuple[int, Declared, int]]:
    """The Blocks that another rank packed, in a job with `tables` tables: table, Block and round. TensorWireError."""
    try:
        found = _tables.decode(packed)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TensorWireError(f"malformed rounds of another rank: {error}") from error
    for table, blocks in sorted(found.items()):
        if not 0 <= table < tables:
            raise TensorWireError(f"another rank has a Block in table {table}; this one knows {tables}")
        for declared, version in blocks:
            yield table, unpack_declared(declared), version
