"""Tell the agent why the steps of a process are not seen whose Python has no covey-job. Standard library only.

The frames are those of `covey.wire.job` (`Join`, then `Hooked`), written by hand: a map of short strings and whole
numbers in MessagePack is a few bytes of headers.
"""

import os
import socket
import struct
from typing import Any

PROTOCOL = 1
"""The value of `covey.wire.job.PROTOCOL`."""
ANSWER_S = 2.0


def packed(value: Any) -> bytes:
    """MessagePack of a str, an int from 0 on, or a dict of these."""
    if isinstance(value, dict):
        pairs = [packed(key) + packed(content) for key, content in value.items()]
        return b"\xde" + struct.pack(">H", len(pairs)) + b"".join(pairs)
    if isinstance(value, int):
        return b"\xcf" + struct.pack(">Q", value)
    text = str(value).encode("utf-8", "replace")[:60000]
    return b"\xda" + struct.pack(">H", len(text)) + text


def frame(**fields: Any) -> bytes:
    body = packed(fields)
    return struct.pack("<I", len(body)) + body


def report(problem: str) -> bool:
    """Tell the agent the problem. Whether it answered; nothing is raised."""
    try:
        environ = os.environ
        hello = frame(
            type="Join",
            pid=os.getpid(),
            job=environ["COVEY_JOB_ID"],
            rank=int(environ["COVEY_RANK"]),
            epoch=int(environ["COVEY_EPOCH"]),
            token=environ["COVEY_TOKEN"],
            protocol=PROTOCOL,
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
            agent.settimeout(ANSWER_S)
            agent.connect(environ["COVEY_SOCKET"])
            agent.sendall(hello + frame(type="Hooked", to="", problem=problem[:400]))
            return bool(agent.recv(4096))
    except (OSError, KeyError, ValueError):
        return False
