"""Access lists of files (POSIX ACLs) in the form of the kernel's extended attributes, version 2."""

import os
import struct

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
"""The attributes: the list of a file or folder, and the one that what is made in a folder gets."""
READ, WRITE, PASS = 4, 2, 1
_ENTRY = struct.Struct("<HHI")
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NOBODY = 0xFFFFFFFF


def for_two(uid: int, own: int, theirs: int, others: int = 0) -> bytes:
    """The list by which a file's owner may do `own`, the user `uid` may do `theirs`, and everybody else `others`."""
    entries = (
        (_OWNER, own, _NOBODY),
        (_USER, theirs, uid),
        (_GROUP, others, _NOBODY),
        (_MASK, theirs | others, _NOBODY),
        (_OTHER, others, _NOBODY),
    )
    return struct.pack("<I", 2) + b"".join(_ENTRY.pack(*entry) for entry in entries)


def has_list(path: str) -> bool:
    """Whether a list says who may use this file or folder, beside its mode."""
    try:
        os.getxattr(path, ACCESS)
    except OSError:
        return False
    return True
