"""Files that are written whole, or not at all.

A file is written under a name that nobody else can know or have made, gets its mode and owner, is on the disk, and then
takes the place of the one that has the name: whoever reads meanwhile finds the earlier one. A file or link of that name
is replaced, and not written through. What is left of a write that fails or is interrupted is removed: half a file, or a
private key, stays nowhere under another name.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, mode: int, owner: tuple[int, int] | None = None) -> Iterator[BinaryIO]:
    """A file to write to, which is `path` afterwards, with this mode and owner (uid, gid; None: whoever writes it).
    OSError; whatever is raised meanwhile leaves `path` as it was."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode & 0o600)
    try:
        with open(descriptor, "wb") as file:
            yield file
            if owner is not None:
                os.fchown(descriptor, *owner)
            os.fchmod(descriptor, mode)
            file.flush()
            os.fsync(descriptor)
        os.replace(beside, path)
    finally:
        with suppress(OSError):
            beside.unlink()


def put(path: Path, text: str, mode: int, owner: tuple[int, int] | None = None, folder_mode: int = 0o777) -> None:
    """Write this text to `path`, as `replacing`. `folder_mode`: that of folders which are missing."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=folder_mode)
    with replacing(path, mode, owner) as file:
        file.write(text.encode())
