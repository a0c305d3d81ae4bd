"""The arrays of a Block: what `load` returned as they are kept, sent and received."""

import hashlib
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import numpy as np

from covey.core.errors import CoveyError
from covey.core.units import format_size
from covey.healing.state_pieces import Item, bytes_of_state
from covey.job.blocks.block_wire import ARRAYS_MAX, BlockArrays, DeclaredBlocks
from covey.tensors.numbers.arrays import Array
from covey.wire.headers import WireError

KINDS = "biufc"
"""Kinds of elements, as numpy writes them (`dtype.kind`), that Blocks may have."""


def given_block(of: DeclaredBlocks, block: int, given: object) -> BlockArrays:
    """The arrays that `load` returned, contiguous and read-only. CoveyError when they are none, or too large."""
    named: Mapping[Any, Any] = given if isinstance(given, Mapping) else {"": given}
    if not named or not all(isinstance(name, str) for name in named) or len(named) > ARRAYS_MAX:
        raise _unfit(of, block, f"load({block}) gave {type(given).__name__} and no arrays with names")
    found: dict[str, Array] = {}
    for name, each in named.items():
        try:
            array = each if isinstance(each, np.ndarray) else np.frombuffer(each, np.uint8)
        except (TypeError, ValueError) as error:
            raise _unfit(of, block, f"load({block}) gave {type(each).__name__} for {name!r}: {error}") from error
        if array.dtype.kind not in KINDS:
            raise _unfit(of, block, f"load({block}) gave an array of {array.dtype} for {name!r}")
        found[name] = read_only(np.ascontiguousarray(array).reshape(array.shape))
    if (size := bytes_in_block(found)) > of.bytes_max:
        why = f"load({block}) gave {format_size(size)}, and bytes= allows {format_size(of.bytes_max)}"
        raise _unfit(of, block, why)
    return found


def _unfit(of: DeclaredBlocks, block: int, why: str) -> CoveyError:
    what = f"Block {block} of {of.name!r} cannot be kept"
    return CoveyError(what, why, "let load return an array, or a dict of arrays of numbers, of at most `bytes`")


def read_only(array: Array) -> Array:
    """A view of the array that cannot be written: data does not change."""
    view = array.view()
    view.flags.writeable = False
    return view


def bytes_in_block(arrays: BlockArrays) -> int:
    return sum(array.nbytes for array in arrays.values())


def items_in_block(arrays: BlockArrays) -> tuple[Item, ...]:
    return tuple(Item(name, array.dtype.str, array.shape) for name, array in arrays.items())


def places_in_block(arrays: BlockArrays) -> list[memoryview]:
    """The bytes of each array, in place."""
    return [bytes_of_state(array) for array in arrays.values()]


def empty_block(items: tuple[Item, ...], block_bytes: int) -> dict[str, Array]:
    """Arrays for a Block that comes from another process. WireError when these are not `block_bytes`, or none can be
    made; nothing is allocated before that is known."""
    try:
        types = [np.dtype(item.type) for item in items]
        sizes = [_elements(item.shape) * type.itemsize for item, type in zip(items, types, strict=True)]
        if sum(sizes) != block_bytes or any(type.kind not in KINDS for type in types):
            raise WireError(f"arrays of {sum(sizes)} bytes in a Block of {block_bytes}")
        return {item.name: np.empty(item.shape, type) for item, type in zip(items, types, strict=True)}
    except (TypeError, ValueError, MemoryError, OverflowError, SyntaxError) as error:
        raise WireError(f"no such arrays: {error}") from error


def _elements(shape: tuple[int, ...]) -> int:
    """Number of elements. WireError for a shape that no array has."""
    if len(shape) > 32 or any(side < 0 for side in shape):
        raise WireError(f"an array of the shape {shape}")
    count = 1
    for side in shape:
        count *= side
    return count


def for_script(arrays: BlockArrays) -> Any:
    """A Block as the script gets it: the array that `load` returned, or the dict of them."""
    return arrays[""] if arrays.keys() == {""} else dict(arrays)


def code_digest(load: Callable[..., object]) -> str:
    """A digest of what a function computes, by its own code: processes that run unlike code are noticed by it. What it
    calls, and values that it takes from elsewhere, are not in it. Empty: it is no Python function."""
    code = getattr(load, "__code__", None)
    if code is None:
        return ""
    found = hashlib.blake2b(digest_size=8)
    _add_code(found, code)
    return found.hexdigest()


def _add_code(found: hashlib.blake2b, code: CodeType) -> None:
    found.update(code.co_code)
    found.update(repr(code.co_names).encode())
    for each in code.co_consts:
        if isinstance(each, CodeType):
            _add_code(found, each)
        else:
            found.update(repr(sorted(map(repr, each)) if isinstance(each, frozenset) else each).encode())
