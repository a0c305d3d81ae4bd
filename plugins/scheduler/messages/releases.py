"""Which release of Covey an agent must have to apply a command of the log, so that hosts of two releases agree.

All agents apply the same commands, and an agent that ignores a field, or a command, comes to another state without a
word. A part of a command that came after release 0.1 therefore says with which release it came:

    note: Annotated[str, Meta(max_length=64, extra={"came_with": "0.2"})] = ""    a field, where it has another value
    class Paused(CommandBase, ...): came_with: ClassVar[str] = "0.2"              a command, or a value in one

A bound that is widened, or a word added to a choice, is a new field with its own mark in what the log holds: an agent
that is older finds a command with a longer value malformed, and would apply nothing of it.

Whoever proposes a command asks `needed`: while a host of the rack is older, the command is not submitted (`not_yet`);
else it carries the release as `needs`, and so does the snapshot of a log that ever had such a command. An agent that
is older ends when it meets either, instead of going on without (`service.log`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_args

import msgspec

from covey.core.ids import HostId
from covey.core.version import Release, release_of
from gossip.types import HostView
from plugins.gossiped import version_of

UNKNOWN: Release = (0, 0)
"""The release of a host that does not say its own: older than every part that says with which it came."""
GONE = ("gone", "left")
"""States of hosts that are not waited for: one that comes back older reads in the log that it cannot go on."""


class Needs(msgspec.Struct, frozen=True, order=True):
    """The newest release that a command needs, and the part of it that does."""

    release: Release
    part: str


def needed(command: msgspec.Struct) -> Needs | None:
    """The newest release that an agent must have to apply this command as it is; None: the first one."""
    return max(_needs(command, type(command).__name__), default=None) if _may_need(type(command)) else None


def not_yet(release: Release, hosts: Iterable[HostView]) -> Sequence[HostId]:
    """The hosts of the rack that have an older release, or do not say which they have, in order of their names."""
    return sorted(
        view.host for view in hosts if view.state not in GONE and (release_of(version_of(view)) or UNKNOWN) < release
    )


def _needs(value: Any, name: str) -> Iterator[Needs]:
    if isinstance(value, msgspec.Struct):
        own = _own(type(value))
        if own is not None:
            yield Needs(own, name)
        marks = _marks(type(value))
        for field in value.__struct_fields__:
            part = getattr(value, field)
            if field in marks and part != marks[field][1]:
                yield Needs(marks[field][0], f"{name}.{field}")
            yield from _needs(part, f"{name}.{field}")
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _needs(part, name)
    elif isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from _needs(part, name)


def _own(kind: type) -> Release | None:
    """The release that a class of values came with. TypeError when what it says is no release."""
    said = getattr(kind, "came_with", None)
    return None if said is None else _release(said, kind.__name__)


def _release(said: object, name: str) -> Release:
    release = release_of(said) if isinstance(said, str) else None
    if release is None:
        raise TypeError(f"{name} came with {said!r}, which is no release such as 0.2")
    return release


@cache
def _marks(kind: type[msgspec.Struct]) -> Mapping[str, tuple[Release, Any]]:
    """The fields of a struct that came after the first release: with which one, and the value that means "as before".
    TypeError when such a field has no default: what an older agent sent would not be read."""
    found = {}
    for field in msgspec.structs.fields(kind):
        name = f"{kind.__name__}.{field.name}"
        said = [more["came_with"] for each in _metas(field.type) if "came_with" in (more := each.extra or {})]
        if not said:
            continue
        if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
            raise TypeError(f"{name} came with {said[0]} and has no default")
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        found[field.name] = max(_release(each, name) for each in said), default
    return found


def _metas(of: Any) -> Iterator[msgspec.Meta]:
    """What is said of a type, wherever in it: `Annotated[str, Meta(...)] | None` says it of a part."""
    if isinstance(of, msgspec.Meta):
        yield of
    for part in get_args(of):
        yield from _metas(part)


@cache
def _may_need(kind: type[msgspec.Struct]) -> bool:
    """Whether any part of such a command came after the first release: most have none, and are not looked through."""
    return any(_own(each) is not None or _marks(each) for each in _within(kind))


def _within(kind: type[msgspec.Struct]) -> Sequence[type[msgspec.Struct]]:
    """The structs that values of this one may hold, itself first."""
    found = [kind]
    for each in found:
        for field in msgspec.structs.fields(each):
            found += [part for part in _structs(field.type) if part not in found]
    return found


def _structs(of: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(of, type) and issubclass(of, msgspec.Struct):
        yield of
    for part in get_args(of):
        yield from _structs(part)
